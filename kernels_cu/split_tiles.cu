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
// Launch: one block of SPLIT_THREADS threads. First each warp computes the ranges of one expert at a time. Then each thread
// counts the tiles of one expert at a time, and each warp writes them.
#include "common.cuh"

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

// Returns the sum of the values of all threads before this one. `sum` becomes that of all threads' values.
__device__ __forceinline__ int sum_before(int value, int& sum) {
    __shared__ int of_warps[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sums = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, sums, distance);
        if (lane >= distance) sums += other;
    }
    __syncthreads();  // all threads have read of_warps in the call before
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
