// Output aggregation (paper sections 2.3 and 3.1), token gradient accumulation (section 3.2, step 3), and the router weights
// of rows and their gradient.
//   aggregate       each token sums the rows of its k slots, found by token_index_map, over the columns of a panel
//   weights_bwd     the gradient of each router weight is the sum of its row's partial sums
//   weights_by_row  router weights in the order of the experts' rows
// Sums are fp32 and in the order of slots or parts, so two runs give the same bits.
//
// Launch:
//   aggregate       grid (L / TOKENS_PER_BLOCK, columns / PANEL_COLUMNS), rounded up; a warp per token, TOKENS_PER_BLOCK
//                   warps per block. Lane c takes columns 8c to 8c+7 of the PANEL_COLUMNS, a 16-byte load per row.
//   the others      a thread per slot, SLOTS_PER_BLOCK threads per block
#include "aggregate.cuh"

template <class T, class W>
struct AggregateParams {
    const T* panel;              // (L*k, panel_ld) element, in: expert outputs, or input gradients
    const int* token_index_map;  // (L, k) int32, in; below 0: no expert in this slot
    const W* weights;            // (L, k) fp32 or element, in; null for the input gradient
    T* out;                      // (L, d) element, out: columns first_column .. + columns
    int64 panel_ld;              // elements from row to row of the panel
    int L, k, d;
    int first_column, columns;
};

template <class W>
struct WeightsBwdParams {
    const float* partial_sums;   // (parts, num_rows) fp32, in: <dA, A> of each row over the columns of each part
    const int* token_index_map;  // (num_slots,) int32, in
    W* grad_weights;             // (num_slots,) as weights, out
    int num_slots, num_rows;     // L*k slots, and rows in the order of experts, fewer if max_slots bounds them
    int parts;
};

template <class W>
struct WeightsByRowParams {
    const W* weights;            // (num_slots,) fp32 or element, in
    const int* token_index_map;  // (num_slots,) int32, in
    float* row_weights;          // (num_slots,) fp32, out: weights in the order of the experts' rows
    int num_slots;               // L*k
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
