// Lists row tiles of TILE_ROWS = 192 rows beside dispatch's, which have 128. Products in square tiles read this list
// (grouped_gemm_sm90.cu). The paper has tiles of one size.
//
// Launch: one block of TILES_THREADS threads.
#include "row_tiles.cuh"

#if !defined(TILES_THREADS) || !defined(TILE_ROWS)
#error "TILES_THREADS and TILE_ROWS are given by launch_config.py"
#endif
static_assert(TILES_THREADS <= 1024 && TILES_THREADS % 32 == 0, "threads of a block");

struct SquareTilesParams {
    const int* expert_token_offsets;  // (E+1,) int32, in
    int* row_tiles;                   // (T+1, 2) int32, out: [0] = (tile count, TILE_ROWS), then (expert, first row)
    int num_experts;
};

extern "C" __global__ void __launch_bounds__(TILES_THREADS) square_tiles(const SquareTilesParams p) {
    write_row_tiles<TILES_THREADS / 32, TILE_ROWS, 1>(reinterpret_cast<int2*>(p.row_tiles), p.expert_token_offsets,
                                                      p.num_experts);
}
