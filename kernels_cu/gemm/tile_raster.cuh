// The order in which blocks (CTAs) take the tiles of a matrix.
#pragma once

struct Tile {
    int m, n;  // row tile and column tile
};

// The tile of a block. Blocks take groups of 16 row tiles by all column tiles, one group after the other. Within a group the
// row tile changes fastest. So the tiles that run at one time are nearly a square of the matrix, and a square reads the fewest
// bytes of both operands.
__device__ __forceinline__ Tile raster(unsigned block, unsigned m_tiles, unsigned n_tiles) {
    constexpr unsigned GROUP = 16;
    const unsigned first = block / (GROUP * n_tiles) * GROUP, within = block % (GROUP * n_tiles);
    const unsigned height = min(GROUP, m_tiles - first);
    return {static_cast<int>(first + within % height), static_cast<int>(within / height)};
}
