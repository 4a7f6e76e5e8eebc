// A tile of a matrix in the registers of a block, each thread with VECTORS vectors of eight consecutive elements, and its
// transposition through shared memory.
//
// A shift is the logarithm of the vectors in a line of the tile. The shifts of both dimensions add up to that of TILE / 64.
#pragma once
#include "common.cuh"

constexpr int VECTORS = TILE / 8 / THREADS;
constexpr int SKEW = 4;  // floats between every eight lines and the next eight, which so begin in other banks
static_assert(TILE == 8 * VECTORS * THREADS, "whole vectors");

// The first element of the thread's vector i: element `fast` of line `slow`.
struct Place {
    int fast, slow;
    __device__ __forceinline__ Place(int i, int shift) {
        const int vector = threadIdx.x + THREADS * i;
        fast = (vector & ((1 << shift) - 1)) * 8, slow = vector >> shift;
    }
};

// Vectors along lines -> vectors across them. shift: of the lines. across: of the other dimension.
__device__ __forceinline__ void transpose_tile(float (&values)[VECTORS][8], int shift, int across) {
    __shared__ __align__(16) float tile[TILE + TILE / 32];  // at most TILE / 16 lines
    const int line = 8 << shift;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place at(i, shift);
        float4* const to = reinterpret_cast<float4*>(tile + at.slow * line + at.slow / 8 * SKEW + at.fast);
        to[0] = make_float4(values[i][0], values[i][1], values[i][2], values[i][3]);
        to[1] = make_float4(values[i][4], values[i][5], values[i][6], values[i][7]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place at(i, across);
        const float* const from = tile + at.fast * line + at.fast / 8 * SKEW + at.slow;
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i][j] = from[j * line];
    }
}
