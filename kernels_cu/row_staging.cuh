// What the expert kernels of every tier share: from accumulators to rows, the raster of tiles.
#pragma once
#include "common.cuh"

constexpr int STAGED_FLOATS = 16 * 64;  // per warp

// 16 rows of 64 accumulator columns of a warp, through shared memory, as rows of 8 consecutive columns, so that global
// accesses are 16 bytes. In pass p a lane has row p * ROWS + lane / LANES and column group lane % LANES of each of
// GROUPS blocks of 64 / GROUPS columns; GROUPS = 2 pairs gate and up of one element.
template <int GROUPS>
struct RowStaging {
    static constexpr int LANES = 8 / GROUPS, ROWS = 32 / LANES, PASSES = 16 / ROWS;

    // Four neighbouring rows, and the two halves of a row (or its gate and up), meet all banks, in writes and in reads.
    static __device__ __forceinline__ int place(int row, int column) {
        return row * 64 + (column ^ (row & 3) * 8 ^ (4 * (GROUPS == 2 ? row & 1 : column >> 5)));
    }
    static __device__ __forceinline__ int row(int pass) { return pass * ROWS + (threadIdx.x & 31) / LANES; }
    static __device__ __forceinline__ int column_group() { return (threadIdx.x & 31) % LANES; }

    // tile[j] is an accumulator of mma.m16n8k16: rows lane / 4 and + 8, columns 8 j + 2 (lane % 4) and + 1.
    static __device__ __forceinline__ void put(float* staged, const float (&tile)[8][4]) {
        const int lane = threadIdx.x & 31;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                *reinterpret_cast<float2*>(staged + place(lane / 4 + s * 8, j * 8 + (lane & 3) * 2)) =
                    make_float2(tile[j][2 * s], tile[j][2 * s + 1]);
        __syncwarp();
    }
    static __device__ __forceinline__ void get(float (&v)[GROUPS][8], const float* staged, int pass) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int column = g * 32 + column_group() * 8 + h * 4;
                const float4 q = *reinterpret_cast<const float4*>(staged + place(row(pass), column));
                v[g][4 * h] = q.x, v[g][4 * h + 1] = q.y, v[g][4 * h + 2] = q.z, v[g][4 * h + 3] = q.w;
            }
    }
};

struct Tile {
    int m, n;
};

// Rasters a grid of tiles in groups of 16 m-tiles by all n-tiles: what runs at one time (264 blocks on
// an H200) is near a square, which reads the fewest operand bytes.
__device__ __forceinline__ Tile raster(unsigned block, unsigned m_tiles, unsigned n_tiles) {
    constexpr unsigned GROUP = 16;
    const unsigned first = block / (GROUP * n_tiles) * GROUP, within = block % (GROUP * n_tiles);
    const unsigned height = min(GROUP, m_tiles - first);
    return {static_cast<int>(first + within % height), static_cast<int>(within / height)};
}
