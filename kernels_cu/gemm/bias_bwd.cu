// The gradients of the biases b1 and b2, and the term of b2 in the gradient of the router weights. The paper's layers have no
// biases. A bias gradient is a sum over the R routed rows of each expert:
//
//   of b1   rows = first_layer_grad, in expert order      out = sum of rows
//   of b2   rows = grad_out, gathered by token            out = sum of weight * row; partial_sums = <row, b2> for each row
//
// A block (CTA) sums COLUMNS columns of one expert's rows. A group of 8 threads spans these columns, 8 columns per thread. ROWS
// groups take the expert's rows in turn. Their fp32 sums are added in a fixed order, so that two runs give the same bits.
//
// Launch: grid (columns / COLUMNS, rounded up; E), 8 * ROWS threads per block. Blocks that run at one time read neighbouring
// columns of the same rows. Experts with many rows come first, so that the last blocks are short.
#include "common.cuh"

typedef ELEMENT element;

constexpr int GROUP = 8;           // threads that span a row's columns
constexpr int ROWS_IN_FLIGHT = 4;  // rows that a thread loads before it uses the first
static_assert(COLUMNS == GROUP * 8, "a thread has 8 columns");
static_assert(GROUP * ROWS <= 1024 && GROUP * ROWS >= COLUMNS, "at most 1024 threads; a thread per column stores");

struct BiasBwdParams {
    const element* rows;              // (L, ld) element, in, if gathered by token; else (R, ld)
    const int* expert_token_indices;  // (num_slots,) int32, in: the token of each routed row; null: rows are not gathered
    const int* expert_token_offsets;  // (E+1,) int32, in
    const int* experts_by_load;       // (E,) int32, in: experts by falling number of rows
    const float* row_weights;         // (num_slots,) fp32, in: the router weight of each routed row; null: 1
    const BIAS* bias;                 // (E, columns) BIAS, in; only read for partial_sums
    float* partial_sums;              // (grid.x, num_slots) fp32, out: <row, bias> over each block's columns; null: not wanted
    OUT *out0, *out1;                 // (E, half) and (E, columns - half) OUT, out, with accumulate also in: the first `half`
                                      // columns and the others; null: not wanted
    int64 ld;                         // elements from row to row
    int64 bias_stride, out_stride;    // elements from expert to expert
    int columns, half;
    int num_slots;   // rows in expert order: L*k, or max_slots if that bounds them
    int accumulate;  // not 0: adds to the values of out0 and out1 in fp32, rounds once, and leaves experts without rows alone
};

extern "C" __global__ void __launch_bounds__(GROUP* ROWS) ENTRY(const BiasBwdParams p) {
    __shared__ float sums[ROWS][COLUMNS + 4];  // + 4: neighbouring rows begin in different banks
    const int expert = p.experts_by_load[blockIdx.y], first = p.expert_token_offsets[expert],
              last = p.expert_token_offsets[expert + 1];
    if (first == last && (p.accumulate || !p.out0)) return;
    const int group = threadIdx.x / GROUP, column0 = blockIdx.x * COLUMNS, column = column0 + threadIdx.x % GROUP * 8;
    const int64 valid = p.columns - column;
    float bias[8] = {}, sum[8] = {};
    if (p.partial_sums) {
        Row8<BIAS> loaded;
        loaded.template load<ALIGNED>(p.bias + expert * p.bias_stride + column, valid);
        loaded.unpack(bias);
    }
    float* partial_sums = p.partial_sums + int64(blockIdx.x) * p.num_slots;
    for (int row0 = first; row0 < last; row0 += ROWS * ROWS_IN_FLIGHT) {  // all threads take part in the shuffles
        Row8<element> loaded[ROWS_IN_FLIGHT];
        float weights[ROWS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            const int routed_row = row0 + i * ROWS + group;
            const bool exists = routed_row < last;
            const int64 row = !exists ? 0 : p.expert_token_indices ? p.expert_token_indices[routed_row] : routed_row;
            weights[i] = exists && p.row_weights ? p.row_weights[routed_row] : 1.f;
            loaded[i].template load<ALIGNED>(p.rows + row * p.ld + column, exists ? valid : 0);
        }
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            float row[8], dot = 0.f;
            loaded[i].unpack(row);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                sum[c] = fmaf(weights[i], row[c], sum[c]);
                dot = fmaf(row[c], bias[c], dot);
            }
            if (p.partial_sums) {
#pragma unroll
                for (int step = 1; step < GROUP; step <<= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                const int routed_row = row0 + i * ROWS + group;
                if (threadIdx.x % GROUP == 0 && routed_row < last) partial_sums[routed_row] = dot;
            }
        }
    }
    if (!p.out0) return;
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[group][threadIdx.x % GROUP * 8 + c] = sum[c];
    __syncthreads();
    const int mine = column0 + threadIdx.x;
    if (threadIdx.x >= COLUMNS || mine >= p.columns) return;
    float total = 0.f;
    for (int i = 0; i < ROWS; ++i) total += sums[i][threadIdx.x];
    OUT* out = expert * p.out_stride + (mine < p.half ? p.out0 + mine : p.out1 + (mine - p.half));
    store_one(out, p.accumulate ? to_float(*out) + total : total);
}
