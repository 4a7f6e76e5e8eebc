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
