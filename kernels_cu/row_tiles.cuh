// Lists of row tiles, from the rows of each expert. Used by split_tiles.cu and square_tiles.cu, in one block of WARPS warps.
#pragma once
#include "common.cuh"

// Returns the sum of the values of all threads before this one. `sum` becomes that of all threads' values.
template <int WARPS>
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

// Writes a list: (tile count, HEIGHT), then the tiles of all experts, (STEP * expert, first row). The rows of an expert are
// ranges[STEP * expert] to ranges[STEP * expert + 1]. Each thread counts the tiles of one expert at a time, and each warp writes
// them.
template <int WARPS, int HEIGHT, int STEP>
__device__ __forceinline__ void write_row_tiles(int2* list, const int* ranges, int num_experts) {
    constexpr int COUNTED = 32 * WARPS;
    __shared__ int places[COUNTED];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto tiles_of = [&](int expert) { return (ranges[STEP * expert + 1] - ranges[STEP * expert] + HEIGHT - 1) / HEIGHT; };
    int total = 0;
    for (int first = 0; first < num_experts; first += COUNTED) {
        int sum;
        const int expert = first + threadIdx.x;
        const int place = sum_before<WARPS>(expert < num_experts ? tiles_of(expert) : 0, sum);
        places[threadIdx.x] = total + place;
        __syncthreads();
        for (int other = first + warp; other < min(first + COUNTED, num_experts); other += WARPS)
            for (int tile = lane; tile < tiles_of(other); tile += 32)
                list[1 + places[other - first] + tile] = make_int2(STEP * other, ranges[STEP * other] + tile * HEIGHT);
        __syncthreads();
        total += sum;
    }
    if (threadIdx.x == 0) list[0] = make_int2(total, HEIGHT);
}
