// Low-rank factors in the order and dtype in which the kernels read them: rounded to element, padded with zeros. Factors are
// small beside the weights. They may be fp32 and have any strides.
//
// Launch: grid (tiles of 32 x 32 of out's rows and columns, E), THREADS threads. A tile is read along the dimension in which the
// factor's elements are closer to each other, and written along out's rows; between both it lies in shared memory.
#include "common.cuh"

typedef ELEMENT element;
typedef FACTOR factor_t;

struct LoraPackParams {
    const factor_t* factor;                          // (E, rows, columns) FACTOR, in, with any strides
    element* out;                                    // (E, out_rows, out_columns) element, out: zeros past `rows` and `columns`
    int64 expert_stride, row_stride, column_stride;  // of the factor, in elements
    int rows, columns, out_rows, out_columns;
};

constexpr int TILE = 32, LANE_ROWS = THREADS / TILE;
static_assert(THREADS % TILE == 0 && TILE % LANE_ROWS == 0, "a warp has a line of the tile");

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraPackParams p) {
    __shared__ float tile[TILE][TILE + 1];  // + 1: lines begin in different banks
    const int column_tiles = (p.out_columns + TILE - 1) / TILE;
    const int row0 = blockIdx.x / column_tiles * TILE, column0 = blockIdx.x % column_tiles * TILE, expert = blockIdx.y;
    const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE;
    const bool along_rows = p.row_stride < p.column_stride;
    const factor_t* const factor = p.factor + expert * p.expert_stride;
#pragma unroll
    for (int i = 0; i < TILE; i += LANE_ROWS) {
        const int r = along_rows ? lane : line + i, c = along_rows ? line + i : lane, row = row0 + r, column = column0 + c;
        const bool exists = row < p.rows && column < p.columns;
        tile[r][c] = exists ? to_float(factor[row * p.row_stride + column * p.column_stride]) : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE; i += LANE_ROWS) {
        const int row = row0 + line + i, column = column0 + lane;
        if (row < p.out_rows && column < p.out_columns)
            store_one(p.out + (int64(expert) * p.out_rows + row) * p.out_columns + column, tile[line + i][lane]);
    }
}
