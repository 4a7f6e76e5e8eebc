// Tiles of TILE x TILE bytes that are transposed through shared memory.
#pragma once
#include "common.cuh"

// Transposes four words of four bytes: word i becomes byte i of each word.
__device__ __forceinline__ void transpose_bytes(unsigned (&v)[4]) {
    const unsigned a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[0], v[1], 0x7362);
    const unsigned c = __byte_perm(v[2], v[3], 0x5140), d = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(a, c, 0x5410), v[1] = __byte_perm(a, c, 0x7632);
    v[2] = __byte_perm(b, d, 0x5410), v[3] = __byte_perm(b, d, 0x7632);
}

// The word of a transposed tile that has rows 4 w to 4 w + 3 of a column, a byte each. The swizzle of a column's words keeps both
// the stores and the loads free of bank conflicts.
__device__ __forceinline__ int byte_tile_word(int column, int w) { return column * (TILE / 4) + (w ^ (column / 8 * 2)); }

static_assert(TILE == 128 && THREADS == 256, "16 threads span a row of a tile, 16 blocks of 8 rows its rows");

// A thread has BLOCKS blocks of BLOCK_LINES lines of eight bytes. Both functions return the place where one begins.
constexpr int BLOCK_LINES = 4, BLOCKS = TILE * TILE / (8 * BLOCK_LINES) / THREADS;
__device__ __forceinline__ int block_line(int i) { return (i * THREADS + threadIdx.x) / 16 * BLOCK_LINES; }
__device__ __forceinline__ int block_column() { return threadIdx.x % 16 * 8; }

// Writes the thread's i-th block to the transposed tile. low, high: the first four bytes of its lines, and the last.
__device__ __forceinline__ void put_transposed(unsigned (&words)[TILE * TILE / 4], int i, unsigned (&low)[BLOCK_LINES],
                                               unsigned (&high)[BLOCK_LINES]) {
    transpose_bytes(low);
    transpose_bytes(high);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        words[byte_tile_word(block_column() + c, block_line(i) / 4)] = low[c];
        words[byte_tile_word(block_column() + 4 + c, block_line(i) / 4)] = high[c];
    }
}
