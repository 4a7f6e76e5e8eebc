// The row tiles of dispatch in three lists, by whether a range of tokens has all of a tile's rows. A product of the tiles within
// the range can then run while the other tokens' rows are on their way from other GPUs.
//
// The rows of an expert are in the order of tokens. Its tiles with a row of a token before the range come first, then those
// within it, then the others. A tile with tokens before the range and after it is of the first list.
// Each list has the form of dispatch's, so that the products take it as it is, but for experts: 2 e stands for expert e, as
// ranges[2 e] and ranges[2 e + 1] say where its rows in the list begin and end. Tile by tile the rows are those of dispatch.
//
// Launch: one block of SPLIT_THREADS threads. A warp takes an expert at a time; then a thread does, to count tiles.
#include "common.cuh"

#ifndef SPLIT_THREADS
#error "SPLIT_THREADS is given by launch_config.py"
#endif
#ifndef TILE_ROWS
#error "TILE_ROWS is given by launch_config.py"
#endif
constexpr int LISTS = 3, WARPS = SPLIT_THREADS / 32;  // before the range, within it, after it
static_assert(SPLIT_THREADS <= 1024 && SPLIT_THREADS % 32 == 0, "threads of a block");

struct SplitTilesParams {
    const int* expert_token_indices;  // (R,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    int* row_tiles;                   // (LISTS, T+1, 2) int32, out: [:, 0] = (count, TILE_ROWS), then (2 e, first row)
    int* ranges;                      // (LISTS, 2E) int32, out
    int first_token, end_token, num_experts, max_row_tiles;
};

// How many of n rising values are below a bound, for a whole warp: in each round its lanes look at 32 places.
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

// The sum of the values of all threads before this one; `sum` of all.
__device__ __forceinline__ int sum_before(int value, int& sum) {
    __shared__ int of_warps[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sums = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sums, distance);
        if (lane >= distance) sums += other;
    }
    __syncthreads();  // the last call's sums have been read
    if (lane == 31) of_warps[warp] = sums;
    __syncthreads();
    sum = 0;
    int before = 0;
    for (int other = 0; other < WARPS; ++other) {
        before = other == warp ? sum : before;
        sum += of_warps[other];
    }
    return before + sums - value;
}

__device__ __forceinline__ int tiles_of(const int* range) { return (range[1] - range[0] + TILE_ROWS - 1) / TILE_ROWS; }

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
        int total = 0;
        for (int first = 0; first < p.num_experts; first += SPLIT_THREADS) {
            __shared__ int places[SPLIT_THREADS];
            int sum;
            const int expert = first + threadIdx.x;
            const int place = sum_before(expert < p.num_experts ? tiles_of(ranges + 2 * expert) : 0, sum);
            places[threadIdx.x] = total + place;
            __syncthreads();
            for (int other = first + warp; other < min(first + SPLIT_THREADS, p.num_experts); other += WARPS)
                for (int tile = lane; tile < tiles_of(ranges + 2 * other); tile += 32)
                    tiles[1 + places[other - first] + tile] = make_int2(2 * other, ranges[2 * other] + tile * TILE_ROWS);
            __syncthreads();
            total += sum;
        }
        if (threadIdx.x == 0) tiles[0] = make_int2(total, TILE_ROWS);
    }
}
