// Row staging for the epilogues of the portable products. A lane's accumulators of mma.m16n8k16 are pairs of columns. Through
// shared memory a lane gets 8 consecutive columns of a row instead, so that its global accesses have 16 bytes.
#pragma once
#include "common.cuh"

constexpr int STAGED_FLOATS = 16 * 64;  // per warp: 16 rows of 64 accumulator columns

// put() writes 16 rows of a warp's 64 accumulator columns. get() reads them in PASSES passes. In pass p a lane reads row p *
// ROWS + lane / LANES. The 64 columns are GROUPS groups of 64 / GROUPS columns. The lane reads 8 columns of each group, from
// column 8 * (lane % LANES) of the group on. With GROUPS = 2 the groups are gate and up, so that a lane has a and b of the same
// element.
template <int GROUPS>
struct RowStaging {
    static constexpr int LANES = 8 / GROUPS, ROWS = 32 / LANES, PASSES = 16 / ROWS;

    // The index of an element in the staged floats. The swizzle puts four neighbouring rows into different banks, and the two
    // halves of a row (or its gate and up) too. Neither writes nor reads have bank conflicts.
    static __device__ __forceinline__ int index_of(int row, int column) {
        return row * 64 + (column ^ (row & 3) * 8 ^ (4 * (GROUPS == 2 ? row & 1 : column >> 5)));
    }
    static __device__ __forceinline__ int row(int pass) { return pass * ROWS + (threadIdx.x & 31) / LANES; }
    static __device__ __forceinline__ int column_group() { return (threadIdx.x & 31) % LANES; }

    // tile[j] is an accumulator of mma.m16n8k16: rows lane / 4 and lane / 4 + 8, columns 8 j + 2 (lane % 4) and the next.
    static __device__ __forceinline__ void put(float* staged, const float (&tile)[8][4]) {
        const int lane = threadIdx.x & 31;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                *reinterpret_cast<float2*>(staged + index_of(lane / 4 + s * 8, j * 8 + (lane & 3) * 2)) =
                    make_float2(tile[j][2 * s], tile[j][2 * s + 1]);
        __syncwarp();
    }
    static __device__ __forceinline__ void get(float (&v)[GROUPS][8], const float* staged, int pass) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int column = g * 32 + column_group() * 8 + h * 4;
                const float4 q = *reinterpret_cast<const float4*>(staged + index_of(row(pass), column));
                v[g][4 * h] = q.x, v[g][4 * h + 1] = q.y, v[g][4 * h + 2] = q.z, v[g][4 * h + 3] = q.w;
            }
    }
};
