// Output aggregation (paper section 2.3 and 3.1) and token gradient accumulation (section 3.2, step 3):
// each token sums the rows of its k slots, found through token_index_map, over the columns of a panel.
//
//   panel            (L*k, panel_ld)       element, in     expert outputs, or input gradients
//   token_index_map  (L, k)                int32, in       -1: no expert in this slot
//   weights          (L, k)                fp32 or element, in; absent for the input gradient
//   out              (L, d)                element, out    columns first_column .. + columns
//   partial_sums     (parts, num_slots)    fp32, in        <dA, A> of each of num_slots = L*k slots by column part
//   grad_weights     (L, k)                as weights, out
//   row_weights      (L*k,)                fp32, out       weights in the order of the experts' rows
//
// Launch: aggregate: one warp per token, 8 warps per block, a grid row per 256 columns; lane c takes columns 8c .. 8c+7
// of them, one 16-byte load per row. weights_bwd and weights_by_row: one thread per slot, 256 per block.
// Sums run in fp32 in slot order: two runs give the same bits.
#include "common.cuh"

constexpr int64 WARP_COLUMNS = 256;

template <bool ALIGNED_ROWS, class T, class W>
__device__ void aggregate(const T* panel, const int* token_index_map, const W* weights, T* out, int64 L, int64 k, int64 d,
                          int64 first_column, int64 columns, int64 panel_ld) {
    const int64 column = blockIdx.y * WARP_COLUMNS + (threadIdx.x & 31) * 8, valid = min(columns - column, int64(8));
    const int64 token = blockIdx.x * 8LL + threadIdx.x / 32;
    if (token >= L || valid <= 0) return;
    const int* positions = token_index_map + token * k;
    panel += column;
    float sum[8] = {};
    for (int64 j0 = 0; j0 < k; j0 += 4) {
        Row8<T> rows[4];  // four in flight before the first is used
        float scale[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = j0 + i < k ? positions[j0 + i] : -1;
            scale[i] = position < 0 ? 0.f : weights ? to_float(weights[token * k + j0 + i]) : 1.f;
            rows[i].template load<ALIGNED_ROWS>(panel + max(position, 0) * panel_ld, position < 0 ? 0 : valid);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float row[8];
            rows[i].unpack(row);
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = fmaf(scale[i], row[c], sum[c]);
        }
    }
    store_row8<ALIGNED_ROWS>(out + token * d + first_column + column, sum, valid);
}

template <class W>
__device__ void weights_bwd(const float* partial_sums, const int* token_index_map, W* grad_weights, int64 num_slots, int64 parts) {
    const int64 slot = blockIdx.x * 256LL + threadIdx.x;
    if (slot >= num_slots) return;
    const int position = token_index_map[slot];
    float sum = 0.f;
    if (position >= 0)
        for (int64 part = 0; part < parts; ++part) sum += partial_sums[part * num_slots + position];
    store_one(grad_weights + slot, sum);
}

template <class W>
__device__ void weights_by_row(const W* weights, const int* token_index_map, float* row_weights, int64 num_slots) {
    const int64 slot = blockIdx.x * 256LL + threadIdx.x;
    if (slot < num_slots && token_index_map[slot] >= 0) row_weights[token_index_map[slot]] = to_float(weights[slot]);
}

#define AGGREGATE_ENTRY(NAME, ALIGNED_ROWS, T, W)                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                         \
        NAME(const T* panel, const int* token_index_map, const W* weights, T* out, int64 L, int64 k, int64 d,                 \
             int64 first_column, int64 columns, int64 panel_ld) {                                                             \
        aggregate<ALIGNED_ROWS>(panel, token_index_map, weights, out, L, k, d, first_column, columns, panel_ld);              \
    }
#define AGGREGATE_ENTRIES(SUFFIX, T, W)                                                                                       \
    AGGREGATE_ENTRY(aggregate_##SUFFIX, true, T, W)                                                                           \
    AGGREGATE_ENTRY(aggregate_##SUFFIX##_unaligned, false, T, W)
#define WEIGHTS_ENTRIES(SUFFIX, W)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) weights_bwd_##SUFFIX(                                                   \
        const float* partial_sums, const int* token_index_map, W* grad_weights, int64 num_slots, int64 parts) {               \
        weights_bwd(partial_sums, token_index_map, grad_weights, num_slots, parts);                                           \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                         \
        weights_by_row_##SUFFIX(const W* weights, const int* token_index_map, float* row_weights, int64 num_slots) {          \
        weights_by_row(weights, token_index_map, row_weights, num_slots);                                                     \
    }
AGGREGATE_ENTRIES(bfloat16_float32, bf16, float)
AGGREGATE_ENTRIES(bfloat16_bfloat16, bf16, bf16)
AGGREGATE_ENTRIES(float16_float32, fp16, float)
AGGREGATE_ENTRIES(float16_float16, fp16, fp16)
AGGREGATE_ENTRIES(float32_float32, float, float)
WEIGHTS_ENTRIES(float32, float)
WEIGHTS_ENTRIES(bfloat16, bf16)
WEIGHTS_ENTRIES(float16, fp16)
