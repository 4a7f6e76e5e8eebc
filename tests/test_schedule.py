"""Which tiles the blocks of Hopper's grouped GEMMs work on: the kernels' own code, compiled by g++."""

import ctypes
import re
import subprocess

import numpy as np
import pytest
from emulator import COMPILER, KERNELS

from moeblaze_cupy import launch_config

if COMPILER is None:
    pytest.skip("needs g++", allow_module_level=True)

# Blocks take turns as `turns` says: with claims, who comes first gets the next tile.
HARNESS = """
#include <algorithm>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
struct int2 { int x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
struct { unsigned x; } blockIdx, gridDim;
inline int atomicAdd(int* p, int v) { return (*p += v) - v; }
constexpr int BM = 128;
%s
%s
extern "C" int work(const int* row_tiles, const int* offsets, int n_tiles, int blocks, int claims, const int* turns,
                    int num_turns, int* found) {
    gridDim.x = blocks;
    int counter = 0, count = 0;
    std::vector<Schedule<Order>> schedules;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        schedules.emplace_back(Order{unsigned(n_tiles)}, row_tiles, offsets, row_tiles[0] * n_tiles);
    for (int turn = 0; turn < num_turns; ++turn) {
        auto& own = schedules[turns[turn]];
        blockIdx.x = turns[turn];
        if (!own.valid()) continue;
        const int claim = own.claim(claims ? &counter : nullptr);
        own.prefetch();
        const Found tile = own.found(), next = own.next_found();
        std::copy_n(reinterpret_cast<const int*>(&tile), 4, found + 4 * count++);
        own.advance(claim);
        const Found then = own.found();
        if (next.rows != then.rows || (then.rows && std::memcmp(&next, &then, sizeof(Found)))) return -2;
    }
    for (auto& own : schedules)
        if (own.valid()) return -1;
    return count;
}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    core, gemm = ((KERNELS / name).read_text() for name in ("gemm_core_sm90.cuh", "grouped_gemm_sm90.cu"))
    schedule = re.search(r"struct Place \{.*?struct Schedule.*?\n};\n", core, re.DOTALL).group()
    order = re.search(r"struct Order \{.*?\n};\n", gemm, re.DOTALL).group()
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(HARNESS % (schedule, order))
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "schedule.so", "schedule.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "schedule.so")).work


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("n_tiles", [1, 3, 8])
@pytest.mark.parametrize(
    "counts",
    [(512,) * 6, (1, 0, 128, 129, 0, 700), (0, 0, 5000, 64, 0), (2049, 2048, 4100), (3,), (0, 0), (100,) * 40],
    ids=str,
)
def test_every_tile_once(work, counts, n_tiles, claims):
    blocks = 13
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    entries = [(e, row) for e in range(len(counts)) for row in range(offsets[e], offsets[e + 1], 128)]
    row_tiles = np.array([(len(entries), 128), *entries], np.int32)
    want = {(e, row, n, min(128, offsets[e + 1] - row)) for e, row in entries for n in range(n_tiles)}
    turns = np.random.default_rng(len(want)).integers(0, blocks, 40 * (len(want) + blocks)).astype(np.int32)
    found = np.zeros((len(turns), 4), np.int32)
    arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in (row_tiles, offsets, turns, found)]
    count = work(*arrays[:2], n_tiles, blocks, int(claims), arrays[2], len(turns), arrays[3])
    assert count == len(want)
    assert set(map(tuple, found[:count])) == want


def test_tiles_are_claimed_where_weights_do_not_stay_in_the_cache():
    def claims(L, k, E, K):
        return launch_config.claims_tiles(K, L * k, E, launch_config.H200)

    assert claims(16384, 8, 256, 7168)  # DeepSeek-V3
    assert not claims(32768, 8, 128, 4096)
    assert not claims(65536, 4, 16, 1024)
    assert not claims(1024, 8, 128, 2048)  # a tile per expert, which shares nothing
    assert not claims(0, 8, 256, 7168)
