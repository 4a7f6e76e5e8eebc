// Low-rank factors in the order and dtype in which the kernels read them: rounded to element, padded with zeros. Factors are
// small beside the weights. They may be fp32 and have any strides.
//
// Columns are the dimension in which out is contiguous. Lines are the one in which the factor is, if that is another, so
// that a tile is read along its lines' dimension and transposed. Batches are what remains of experts, rows and columns.
//
// Launch: grid (tiles of all batches), THREADS threads. A tile has TILE elements, 8 << column_shift of them in a line.
// VECTOR: the factor's elements lie side by side in the dimension along which it is read, and are read 16 bytes at a time.
#include "lora_tile.cuh"

typedef ELEMENT element;
typedef FACTOR factor_t;

struct LoraPackParams {
    const factor_t* factor;  // (batches, lines, columns) FACTOR, in, with any strides
    element* out;            // (out_batches, out_lines, out_columns) element, out: zeros past the factor's sizes
    int64 batch_stride, line_stride, column_stride;  // of the factor, in elements
    int64 out_batch_stride, out_line_stride;         // of out, whose columns are side by side
    int batches, lines, columns, out_lines, out_columns;
    int column_shift, line_shift;  // of a tile; see lora_tile.cuh
    int along_lines;               // the factor is read along the lines' dimension
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraPackParams p) {
    const int tile_columns = 8 << p.column_shift, tile_lines = TILE / tile_columns;
    const int column_tiles = (p.out_columns + tile_columns - 1) / tile_columns;
    const int line_tiles = (p.out_lines + tile_lines - 1) / tile_lines;
    const int column0 = blockIdx.x % column_tiles * tile_columns, of_lines = blockIdx.x / column_tiles;
    const int line0 = of_lines % line_tiles * tile_lines, batch = of_lines / line_tiles;
    const int shift = p.along_lines ? p.line_shift : p.column_shift;
    const factor_t* const factor = p.factor + batch * p.batch_stride;
    float values[VECTORS][8];
    Row8<factor_t> given[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place at(i, shift);
        const int line = line0 + (p.along_lines ? at.fast : at.slow), column = column0 + (p.along_lines ? at.slow : at.fast);
        const bool exists = batch < p.batches && line < p.lines && column < p.columns;
        const int valid = !exists ? 0 : p.along_lines ? p.lines - line : p.columns - column;
        const factor_t* const from = factor + line * p.line_stride + column * p.column_stride;
        if constexpr (VECTOR) {
            given[i].template load<true>(from, valid);
        } else {
            const int64 step = p.along_lines ? p.line_stride : p.column_stride;
#pragma unroll
            for (int j = 0; j < 8; ++j) values[i][j] = j < valid ? to_float(from[j * step]) : 0.f;
        }
    }
    issue_loads_now();
    if constexpr (VECTOR)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) given[i].unpack(values[i]);
    if (p.along_lines) transpose_tile(values, shift, p.column_shift);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Place at(i, p.column_shift);
        const int line = line0 + at.slow, column = column0 + at.fast;
        if (line < p.out_lines && column < p.out_columns)
            store_vector8(p.out + batch * p.out_batch_stride + line * p.out_line_stride + column, values[i]);
    }
}
