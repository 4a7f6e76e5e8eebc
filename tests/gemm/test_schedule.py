"""Which tiles the CTAs of Hopper's GEMMs work on, and in which order: tile_scheduler_sm90.cuh, compiled by g++."""

import ctypes
import subprocess

import numpy as np
import pytest

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.gemm import config as gemm_config
from tests.emulator import COMPILER, KERNELS

if COMPILER is None:
    pytest.skip("needs g++", allow_module_level=True)

# CTAs, or clusters of two, take turns as `turns` says. With the dynamic schedule the first to come gets the next tile.
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
#define BM 128
#include "tile_scheduler_sm90.cuh"
template <bool GATHERED, int CTAS>
int work(const int* row_tiles, const int* offsets, int column_tiles, bool dynamic, int ctas, const int* turns,
         int num_turns, WorkTile* found, int* multicasts) {
    const TileOrder<GATHERED> order = {unsigned(column_tiles)};
    const int tiles = row_tiles[0] * column_tiles;
    gridDim.x = ctas;
    int counter = 0, count = 0;
    std::vector<TileScheduler<TileOrder<GATHERED>, CTAS>> schedulers;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        schedulers.emplace_back(order, row_tiles, offsets, tiles);
    for (int turn = 0; turn < num_turns; ++turn) {
        auto* own = &schedulers[turns[turn] / CTAS * CTAS];
        if (CTAS == 2) {  // both must agree, as each fetches what the other does not
            if (own[0].valid() != own[1].valid() || own[0].multicast != own[1].multicast) return -3;
            const WorkTile first = own[0].current, second = own[1].current;
            const bool both = first.rows > 0 && second.rows > 0;
            const bool same = both && first.expert == second.expert && first.column_tile == second.column_tile;
            const bool multicast = own[0].multicast;  // with GATHERED alone exactly `same`: see shares_columns
            if (GATHERED && same != multicast) return -4;
            if (multicast && !(same && std::abs(first.row - second.row) == BM)) return -4;
        }
        if (!own[0].valid()) continue;
        blockIdx.x = turns[turn] / CTAS * CTAS;
        const int index = own[0].take_index(dynamic ? &counter : nullptr);
        for (int cta = 0; cta < CTAS; ++cta, ++blockIdx.x) {
            own[cta].prefetch();
            const WorkTile tile = own[cta].current;
            if (tile.rows) {
                found[count++] = tile;
                *multicasts += own[cta].multicast;
            }
            own[cta].advance(own[cta].next(), index + cta);
        }
    }
    for (auto& own : schedulers)
        if (own.valid()) return -1;
    return count;
}
extern "C" int work_on(const int* row_tiles, const int* offsets, int column_tiles, int gathers, int dynamic,
                       int clusters, int ctas, const int* turns, int num_turns, WorkTile* found, int* multicasts) {
    const auto gathered = clusters ? work<true, 2> : work<true, 1>;
    const auto contiguous = clusters ? work<false, 2> : work<false, 1>;
    const auto on = gathers ? gathered : contiguous;
    return on(row_tiles, offsets, column_tiles, dynamic, ctas, turns, num_turns, found, multicasts);
}
"""
CTAS = 14


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(HARNESS)
    command = [
        COMPILER,
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{KERNELS / 'gemm'}",
        "-o",
        "schedule.so",
        "schedule.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "schedule.so"))


COUNTS = [(512,) * 6, (1, 0, 128, 129, 0, 700), (0, 0, 5000, 64, 0), (2049, 2048, 4100), (3,), (0, 0), (100,) * 40]


def worked_tiles(kernels, counts, n_tiles, *, gathers=True, dynamic=False, clusters=False, ctas=CTAS):
    """Tiles (expert, first row, column tile, rows) in the order of work, the tiles of rows, and how many tiles
    share their weights with the other tile of the cluster."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    entries = [(e, row) for e in range(len(counts)) for row in range(offsets[e], offsets[e + 1], 128)]
    row_tiles = np.array([(len(entries), 128), *entries], np.int32)
    most = len(entries) * n_tiles
    turns = np.random.default_rng(most).integers(0, ctas, 40 * (most + ctas)).astype(np.int32)
    found = np.zeros((len(turns), 4), np.int32)
    row_tiles, offsets_, turns_, found_ = (
        a.ctypes.data_as(ctypes.c_void_p) for a in (row_tiles, offsets, turns, found)
    )
    shared, how = ctypes.c_int(0), (n_tiles, gathers, dynamic, clusters, ctas)
    count = kernels.work_on(row_tiles, offsets_, *how, turns_, len(turns), found_, ctypes.byref(shared))
    assert count == most
    tiles = {(e, row, min(128, offsets[e + 1] - row)) for e, row in entries}
    return [tuple(map(int, tile)) for tile in found[:count]], tiles, shared.value


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n_tiles", [1, 3, 8, 11])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_tile_once(kernels, counts, n_tiles, dynamic, gathers, clusters):
    """And of large experts most share their weights: a cluster spans two columns once in an expert's row tiles or, of
    more than 24, in 8 to 24 of them. In a panel of one or three columns, an expert with an odd number of row tiles puts
    the clusters of the next one across columns."""
    found, tiles, shared = worked_tiles(kernels, counts, n_tiles, gathers=gathers, dynamic=dynamic, clusters=clusters)
    assert set(found) == {(e, row, n, rows) for e, row, rows in tiles for n in range(n_tiles)}
    large = sum(n_tiles * -(-count // 128) for count in counts if count >= 1024)
    if not gathers and n_tiles in (1, 3):
        large = 0
    assert shared >= large * 3 // 4 if clusters else shared == 0


@pytest.mark.parametrize("n_tiles", [1, 3, 8])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tiles_of_the_same_rows_run_side_by_side_in_panels(kernels, counts, n_tiles):
    found, tiles, _ = worked_tiles(kernels, counts, n_tiles, gathers=False, ctas=1)
    for e, row, rows in tiles:
        positions = [found.index((e, row, n, rows)) for n in range(n_tiles)]
        assert max(positions) - min(positions) < 2 * n_tiles


@pytest.mark.parametrize("gathers", [True, False])
def test_clusters_where_products_are_long(gathers):
    assert gemm_config.uses_clusters(gathers, 8, 7168, 16384 * 8, 256)[0]  # DeepSeek-V3
    assert gemm_config.uses_clusters(gathers, 8, 4096, 512, 2)[0]
    assert not gemm_config.uses_clusters(gathers, 8, 4096, 511, 2)[0]  # hardly two tiles of an expert's rows
    assert not gemm_config.uses_clusters(gathers, 8, 4088, 16384 * 8, 256)[0]
    assert not gemm_config.uses_clusters(gathers, 8, 7168, 0, 256)[0]
    assert gemm_config.uses_clusters(gathers, 8, 28672, 8192 * 2, 8)[0] == gathers  # Mixtral's rows are many
    assert gemm_config.uses_clusters(gathers, 7, 7168, 16384 * 8, 256)[0] == gathers  # see test_every_tile_once


def test_the_schedule_is_dynamic_where_ctas_share_weights():
    def dynamic(entry, L, k, E, d, h):
        return gemm_config.dynamic_schedule(
            entry, h // (128 if entry == "up_fwd" else 256), d, L * k, E, launch_config.H200
        )[0]

    for entry in ("up_fwd", "down_bwd"):
        assert dynamic(entry, 16384, 8, 256, 7168, 2048)  # DeepSeek-V3
        assert dynamic(entry, 8192, 2, 8, 4096, 14336)  # Mixtral
        assert dynamic(entry, 24576, 8, 128, 1536, 256)  # few tiles to an expert
        assert not dynamic(entry, 1024, 8, 128, 2048, 768)  # a tile per expert, which shares nothing
        assert not dynamic(entry, 0, 8, 256, 7168, 2048)
    assert dynamic("down_bwd", 65536, 4, 16, 1024, 4096)
    assert not dynamic("up_fwd", 65536, 4, 16, 1024, 4096)  # short tiles, 4096 to an expert
