// Splits dispatch's list of row tiles into three lists, by the tokens of a tile's rows: before, within and after a range of
// tokens, first_token .. end_token. The rows of tokens within the range are on this GPU, and those of others are on their way
// from other GPUs. So a product over the second list can run before the others arrive. The paper has one GPU.
//
// The rows of an expert are in the order of tokens. The first list has its tiles with a token before the range, even if they
// also have tokens within it or after it. The second list has the tiles of which all tokens are within the range. The third
// list has the rest. Each tile has the same rows as in dispatch's list.
//
// A list has the form of dispatch's row_tiles, and the products read it in the same way. But the number that stands for expert
// e is 2 e, because the products find the rows of an expert at two consecutive offsets: here ranges[2 e] and ranges[2 e + 1],
// which say where the list's rows of expert e begin and end.
//
// Launch: one block of SPLIT_THREADS threads. First each warp computes the ranges of one expert at a time. Then the block writes
// the lists (row_tiles.cuh).
#include "row_tiles.cuh"

#ifndef SPLIT_THREADS
#error "SPLIT_THREADS is given by launch_config.py"
#endif
#ifndef TILE_ROWS
#error "TILE_ROWS is given by launch_config.py"
#endif
constexpr int LISTS = 3, WARPS = SPLIT_THREADS / 32;
static_assert(SPLIT_THREADS <= 1024 && SPLIT_THREADS % 32 == 0, "threads of a block");

struct SplitTilesParams {
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    int* row_tiles;                   // (LISTS, T+1, 2) int32, out: [:, 0] = (tile count, TILE_ROWS), then (2 e, first row)
    int* ranges;                      // (LISTS, 2E) int32, out: first row and end of each expert
    int first_token, end_token, num_experts, max_row_tiles;  // max_row_tiles: T
};

// The number of values below a bound among n rising values, found by a whole warp. In each round the lanes read 32 values,
// evenly spaced over those that are left.
__device__ __forceinline__ int values_below(const int* values, int n, int bound) {
    int low = 0, high = n;
    while (low < high) {
        const int step = (high - low + 31) / 32, place = low + static_cast<int>(threadIdx.x % 32) * step;
        const int below = __popc(__ballot_sync(~0u, place < high && values[place] < bound));
        high = min(high, low + below * step);
        if (below) low += (below - 1) * step + 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(SPLIT_THREADS) split_tiles(const SplitTilesParams p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int expert = warp; expert < p.num_experts; expert += WARPS) {
        const int start = p.expert_token_offsets[expert], rows = p.expert_token_offsets[expert + 1] - start;
        const int before = values_below(p.expert_token_indices + start, rows, p.first_token);
        const int until = values_below(p.expert_token_indices + start, rows, p.end_token);
        const int within = min((before + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, rows);
        const int after = max(until == rows ? rows : until / TILE_ROWS * TILE_ROWS, within);
        if (lane < 2 * LISTS) {
            const int list = lane / 2, side = list + lane % 2;
            const int end = side == 0 ? 0 : side == 1 ? within : side == 2 ? after : rows;
            p.ranges[list * 2 * p.num_experts + 2 * expert + lane % 2] = start + end;
        }
    }
    __syncthreads();
    for (int list = 0; list < LISTS; ++list) {
        int2* const tiles = reinterpret_cast<int2*>(p.row_tiles) + list * (p.max_row_tiles + 1ll);
        const int* const ranges = p.ranges + list * 2 * p.num_experts;
        write_row_tiles<WARPS, TILE_ROWS, 2>(tiles, ranges, p.num_experts);
    }
}
