"""Which tiles the blocks of Hopper's GEMMs work on, and in which order: the kernels' own code, compiled by g++."""

import ctypes
import re
import subprocess

import numpy as np
import pytest
from emulator import COMPILER, KERNELS

from moeblaze_cupy import launch_config

if COMPILER is None:
    pytest.skip("needs g++", allow_module_level=True)

# Blocks, or pairs of them, take turns as `turns` says: with claims, who comes first gets the next tile.
HARNESS = """
#include <algorithm>
#include <cstdlib>
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
template <int BLOCKS, class Order>
int work(const int* row_tiles, const int* offsets, int n_tiles, bool claims, bool exact, int blocks, const int* turns,
         int num_turns, int* found, int* shared) {
    const Order order = {unsigned(n_tiles)};
    const int tiles = row_tiles[0] * n_tiles;
    gridDim.x = blocks;
    int counter = 0, count = 0;
    std::vector<Schedule<Order, BLOCKS>> schedules;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) schedules.emplace_back(order, row_tiles, offsets, tiles);
    for (int turn = 0; turn < num_turns; ++turn) {
        auto* own = &schedules[turns[turn] / BLOCKS * BLOCKS];
        if (BLOCKS == 2) {  // the word of both must be the same, as each fetches what the other does not
            if (own[0].valid() != own[1].valid() || own[0].shared != own[1].shared) return -3;
            const Place first = own[0].own.place, second = own[1].own.place;
            const bool both = own[0].own.rows > 0 && own[1].own.rows > 0;
            const bool same = both && first.expert == second.expert && first.n == second.n;
            const bool shared = own[0].shared;  // not `exact`: neighbours of two groups need not know
            if ((exact && same != shared) || (shared && !(same && std::abs(first.row - second.row) == BM))) return -4;
        }
        if (!own[0].valid()) continue;
        blockIdx.x = turns[turn] / BLOCKS * BLOCKS;
        const int claim = claims ? own[0].claim(&counter) : own[0].following();
        for (int of = 0; of < BLOCKS; ++of, ++blockIdx.x) {
            own[of].prefetch();
            const Found tile = own[of].own;
            if (tile.rows) {
                std::memcpy(found + 4 * count++, &tile, sizeof(tile));
                *shared += own[of].shared;
            }
            own[of].advance(own[of].next(), claim + of);
        }
    }
    for (auto& own : schedules)
        if (own.valid()) return -1;
    return count;
}
namespace gathered {
constexpr bool GATHER = true;
%s
}
namespace own {
constexpr bool GATHER = false;
%s
}
extern "C" int work_on(const int* row_tiles, const int* offsets, int n_tiles, int gathers, int claims, int clusters,
                       int blocks, const int* turns, int num_turns, int* found, int* shared) {
    const auto on_gathered = clusters ? work<2, gathered::Order> : work<1, gathered::Order>;
    const auto on_own = clusters ? work<2, own::Order> : work<1, own::Order>;
    const auto on = gathers ? on_gathered : on_own;
    return on(row_tiles, offsets, n_tiles, claims, gathers, blocks, turns, num_turns, found, shared);
}
"""
BLOCKS = 14


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    core, gemm = ((KERNELS / name).read_text() for name in ("gemm_core_sm90.cuh", "grouped_gemm_sm90.cu"))
    schedule = re.search(r"struct Place \{.*?struct Schedule.*?\n};\n", core, re.DOTALL).group()
    order = re.search(r"struct Order \{.*?\n};\n", gemm, re.DOTALL).group()
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(HARNESS % (schedule, order, order))
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "schedule.so", "schedule.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "schedule.so"))


COUNTS = [(512,) * 6, (1, 0, 128, 129, 0, 700), (0, 0, 5000, 64, 0), (2049, 2048, 4100), (3,), (0, 0), (100,) * 40]


def worked_tiles(kernels, counts, n_tiles, *, gathers=True, claims=False, clusters=False, blocks=BLOCKS):
    """Tiles (expert, first row, column tile, rows) in the order of work, the tiles of rows, and how many tiles share
    their weights with that of the block's pair."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    entries = [(e, row) for e in range(len(counts)) for row in range(offsets[e], offsets[e + 1], 128)]
    row_tiles = np.array([(len(entries), 128), *entries], np.int32)
    most = len(entries) * n_tiles
    turns = np.random.default_rng(most).integers(0, blocks, 40 * (most + blocks)).astype(np.int32)
    found = np.zeros((len(turns), 4), np.int32)
    row_tiles, offsets_, turns_, found_ = (
        a.ctypes.data_as(ctypes.c_void_p) for a in (row_tiles, offsets, turns, found)
    )
    shared, how = ctypes.c_int(0), (n_tiles, gathers, claims, clusters, blocks)
    count = kernels.work_on(row_tiles, offsets_, *how, turns_, len(turns), found_, ctypes.byref(shared))
    assert count == most
    tiles = {(e, row, min(128, offsets[e + 1] - row)) for e, row in entries}
    return [tuple(map(int, tile)) for tile in found[:count]], tiles, shared.value


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("tile_counter", [False, True])
@pytest.mark.parametrize("n_tiles", [1, 3, 8, 11])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_tile_once(kernels, counts, n_tiles, claims, gathers, clusters):
    """And of large experts most share their weights: a pair spans two columns once in an expert's row tiles or, of more
    than 24, in 8 to 24 of them. In a panel of one or three columns, an expert with an odd number of row tiles puts the
    pairs of the next one across columns."""
    found, tiles, shared = worked_tiles(kernels, counts, n_tiles, gathers=gathers, claims=claims, clusters=clusters)
    assert set(found) == {(e, row, n, rows) for e, row, rows in tiles for n in range(n_tiles)}
    large = sum(n_tiles * -(-count // 128) for count in counts if count >= 1024)
    if not gathers and n_tiles in (1, 3):
        large = 0
    assert shared >= large * 3 // 4 if clusters else shared == 0


@pytest.mark.parametrize("n_tiles", [1, 3, 8])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tiles_of_the_same_rows_run_side_by_side_in_panels(kernels, counts, n_tiles):
    found, tiles, _ = worked_tiles(kernels, counts, n_tiles, gathers=False, blocks=1)
    for e, row, rows in tiles:
        places = [found.index((e, row, n, rows)) for n in range(n_tiles)]
        assert max(places) - min(places) < 2 * n_tiles


@pytest.mark.parametrize("gathers", [True, False])
def test_blocks_work_in_pairs_where_products_are_long(gathers):
    assert launch_config.uses_clusters(gathers, 8, 7168, 16384 * 8, 256)  # DeepSeek-V3
    assert launch_config.uses_clusters(gathers, 8, 4096, 512, 2)
    assert not launch_config.uses_clusters(gathers, 8, 4096, 511, 2)  # hardly two tiles of an expert's rows
    assert not launch_config.uses_clusters(gathers, 8, 4088, 16384 * 8, 256)
    assert not launch_config.uses_clusters(gathers, 8, 7168, 0, 256)
    assert launch_config.uses_clusters(gathers, 8, 28672, 8192 * 2, 8) == gathers  # Mixtral's rows are many
    assert launch_config.uses_clusters(gathers, 7, 7168, 16384 * 8, 256) == gathers  # see test_every_tile_once


def test_tiles_are_claimed_where_blocks_share_weights():
    def claims(entry, L, k, E, d, h):
        return launch_config.dynamic_schedule(
            entry, h // (128 if entry == "up_fwd" else 256), d, L * k, E, launch_config.H200
        )

    for entry in ("up_fwd", "down_bwd"):
        assert claims(entry, 16384, 8, 256, 7168, 2048)  # DeepSeek-V3
        assert claims(entry, 8192, 2, 8, 4096, 14336)  # Mixtral
        assert claims(entry, 24576, 8, 128, 1536, 256)  # few tiles to an expert
        assert not claims(entry, 1024, 8, 128, 2048, 768)  # a tile per expert, which shares nothing
        assert not claims(entry, 0, 8, 256, 7168, 2048)
    assert claims("down_bwd", 65536, 4, 16, 1024, 4096)
    assert not claims("up_fwd", 65536, 4, 16, 1024, 4096)  # short tiles, 4096 to an expert
