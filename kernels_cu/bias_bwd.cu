// Gradients of the biases: sums over the rows of each expert, and what a bias adds to the gradient of the router weights.
//
//   of b1   rows = first_layer_grad, the experts' own     out = sum of rows
//   of b2   rows = grad_out, gathered by token            out = sum of weight * row; partial_sums = <row, b2>
//
// A block (CTA) has COLUMNS columns of one expert. 8 threads span them, 16 or 32 bytes each, and ROWS of these groups take
// every ROWS-th row of the expert. The groups' fp32 sums are added in a fixed order, so that two runs give the same bits.
//
// Launch: grid (columns / COLUMNS, rounded up; E), 8 * ROWS threads per block. Blocks that run at one time have neighbouring
// columns of one expert, and experts come by falling number of rows.
#include "common.cuh"

#if !defined(ENTRY) || !defined(ELEMENT) || !defined(BIAS) || !defined(OUT) || !defined(ALIGNED)
#error "ENTRY, ELEMENT, BIAS, OUT and ALIGNED are given by loader.bias_variant"
#endif
#if !defined(COLUMNS) || !defined(ROWS)
#error "COLUMNS and ROWS are given by launch_config.py"
#endif

typedef ELEMENT element;

constexpr int GROUP = 8;           // threads that span a row's columns
constexpr int ROWS_IN_FLIGHT = 4;  // of a thread: loads before the first is used
static_assert(COLUMNS == GROUP * 8, "a thread has 8 columns");
static_assert(GROUP * ROWS <= 1024 && GROUP * ROWS >= COLUMNS, "threads of a block; the first store a column each");

struct BiasBwdParams {
    const element* rows;              // (L or R, ld) element, in
    const int* expert_token_indices;  // (num_slots,) int32, in: rows are gathered by token; null: row r is slot r's
    const int* expert_token_offsets;  // (E+1,) int32, in
    const int* experts_by_load;       // (E,) int32, in
    const float* row_weights;         // (num_slots,) fp32, in: the router weight of each slot's row; null: 1
    const BIAS* bias;                 // (E, columns) BIAS, in; read for partial_sums
    float* partial_sums;              // (column blocks, num_slots) fp32, out: <row, bias> over each block's columns; null: not
                                      // wanted
    OUT *out0, *out1;                 // (E, half) each, OUT, out: of the first `half` columns and of the others; null: not wanted
    int64 ld, bias_stride, out_stride;  // elements from row to row, and from expert to expert
    int columns, half;
    int num_slots;   // L*k, or max_slots if that bounds the rows
    int accumulate;  // not 0: adds to what out0 and out1 hold, in fp32, rounded once; leaves an expert without rows alone
};

extern "C" __global__ void __launch_bounds__(GROUP* ROWS) ENTRY(const BiasBwdParams p) {
    __shared__ float sums[ROWS][COLUMNS + 4];  // + 4: rows begin in other banks
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
    for (int row0 = first; row0 < last; row0 += ROWS * ROWS_IN_FLIGHT) {  // the same in all threads
        Row8<element> loaded[ROWS_IN_FLIGHT];
        float weights[ROWS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
            const int slot = row0 + i * ROWS + group;
            const bool exists = slot < last;
            const int64 row = !exists ? 0 : p.expert_token_indices ? p.expert_token_indices[slot] : slot;
            weights[i] = exists && p.row_weights ? p.row_weights[slot] : 1.f;
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
                const int slot = row0 + i * ROWS + group;
                if (threadIdx.x % GROUP == 0 && slot < last) partial_sums[slot] = dot;
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
