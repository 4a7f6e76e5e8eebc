// Output aggregation (paper sections 2.3 and 3.1), token gradient accumulation (section 3.2, step 3), and two kernels on router
// weights. A slot is one of a token's k choices of experts. token_index_map names the slot's row among the R rows in expert
// order. R is L*k, or max_slots if that bounds the rows.
//   aggregate       sums the rows of each token's k slots, over the columns of a panel
//   weights_bwd     computes the gradient of each router weight as the sum of its row's partial sums
//   weights_by_row  copies the router weights of slots to the order of rows
// Sums are in fp32, in the order of slots or parts, so that two runs give the same bits.
//
// Launch:
//   aggregate       grid (L / TOKENS_PER_BLOCK, columns / PANEL_COLUMNS), rounded up; one warp per token, TOKENS_PER_BLOCK
//                   warps per block. Lane c has columns 8c to 8c+7 of the block's PANEL_COLUMNS. Entries without `_unaligned`
//                   make 16-byte accesses: they need d and first_column in multiples of 8, and addresses in multiples of 16.
//   the others      grid num_slots / SLOTS_PER_BLOCK, rounded up; one thread per slot, SLOTS_PER_BLOCK threads per block
#include "aggregate.cuh"

template <class T, class W>
struct AggregateParams {
    const T* panel;              // (R, panel_ld) element, in: the experts' outputs, or the gradients of their inputs
    const int* token_index_map;  // (L, k) int32, in: the row of each slot; below 0: the slot has no expert
    const W* weights;            // (L, k) fp32 or element, in: factors of the rows; null: 1
    T* out;                      // (L, d) element, out: columns first_column .. + columns
    int64 panel_ld;              // elements from row to row of the panel
    int L, k, d;
    int first_column, columns;
};

template <class W>
struct WeightsBwdParams {
    const float* partial_sums;   // (parts, num_rows) fp32, in: each part sums some columns, in down_bwd or bias_bwd.cu
    const int* token_index_map;  // (num_slots,) int32, in
    W* grad_weights;             // (num_slots,) fp32 or element, out: 0 for slots without a row
    int num_slots, num_rows;     // L*k (or the number of pairs), R
    int parts;
};

template <class W>
struct WeightsByRowParams {
    const W* weights;            // (num_slots,) fp32 or element, in
    const int* token_index_map;  // (num_slots,) int32, in
    float* row_weights;          // (R,) fp32, out: the weight of each row; rows past the last routed one are not written
    int num_slots;               // L*k, or the number of pairs
};

template <class W>
__device__ void weights_bwd(const WeightsBwdParams<W>& p) {
    const int64 slot = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x, num_rows = p.num_rows;
    if (slot >= p.num_slots) return;
    const int position = p.token_index_map[slot];
    float sum = 0.f;
    if (position >= 0)
        for (int part = 0; part < p.parts; ++part) sum += p.partial_sums[part * num_rows + position];
    store_one(p.grad_weights + slot, sum);
}

template <class W>
__device__ void weights_by_row(const WeightsByRowParams<W>& p) {
    const int64 slot = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x;
    if (slot < p.num_slots && p.token_index_map[slot] >= 0) p.row_weights[p.token_index_map[slot]] = to_float(p.weights[slot]);
}

#define AGGREGATE_ENTRY(NAME, ALIGNED_ROWS, T, W)                                                             \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) NAME(const AggregateParams<T, W> p) { \
        aggregate<ALIGNED_ROWS, false, T>(p);                                                                 \
    }
#define AGGREGATE_ENTRIES(SUFFIX, T, W)             \
    AGGREGATE_ENTRY(aggregate_##SUFFIX, true, T, W) \
    AGGREGATE_ENTRY(aggregate_##SUFFIX##_unaligned, false, T, W)
#define WEIGHTS_ENTRIES(SUFFIX, W)                                                                                         \
    extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) weights_bwd_##SUFFIX(const WeightsBwdParams<W> p) {      \
        weights_bwd(p);                                                                                                    \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) weights_by_row_##SUFFIX(const WeightsByRowParams<W> p) { \
        weights_by_row(p);                                                                                                 \
    }
AGGREGATE_ENTRIES(bfloat16_float32, bf16, float)
AGGREGATE_ENTRIES(bfloat16_bfloat16, bf16, bf16)
AGGREGATE_ENTRIES(float16_float32, fp16, float)
AGGREGATE_ENTRIES(float16_float16, fp16, fp16)
AGGREGATE_ENTRIES(float32_float32, float, float)
WEIGHTS_ENTRIES(float32, float)
WEIGHTS_ENTRIES(bfloat16, bf16)
WEIGHTS_ENTRIES(float16, fp16)
