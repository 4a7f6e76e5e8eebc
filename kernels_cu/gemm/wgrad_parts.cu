// Second step of split-K for the weight gradients of few large experts (paper section 3.2, Algorithm 1 lines 18 and 29).
// grouped_wgrad_sm90.cu divides the rows of each expert (the K dimension) into splits and writes an fp32 sum of each. This
// kernel adds the sums in the order of the splits, so that two runs give the same bits.
//
// Launch: grid (rows * columns / 8 / GROUPS_PER_BLOCK, rounded up; E; halves), GROUPS_PER_BLOCK threads per block. A thread has
// 8 columns of a row. As in grouped_wgrad_sm90.cu, sizes and strides are multiples of 8 elements and addresses of 16 bytes.
#include "common.cuh"

static_assert(GROUPS_PER_BLOCK <= 1024, "threads of a block");

template <class OUT>
struct WgradPartsParams {
    const float* sums;                // (E, splits, halves, rows, columns) fp32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    OUT *out0, *out1;                 // (rows, columns) of each expert, element or fp32, out, with accumulate also in: the
                                      // gradients of gate and up, or out0 alone
    int64 expert_stride, ldo;         // elements of out0 and out1 from expert to expert, and from row to row
    int rows, columns, halves, splits;
    int accumulate;  // not 0: adds to the values of out0 and out1 in fp32, rounds once, and leaves experts without rows alone
};

template <class OUT>
__device__ void add_parts(const float* sums, const int* expert_token_offsets, OUT* out, int64 ldo, unsigned rows,
                          unsigned columns, int64 stride, int splits, bool accumulate) {
    const unsigned index = blockIdx.x * GROUPS_PER_BLOCK + threadIdx.x, row = index / (columns / 8),
                   column = index % (columns / 8) * 8;
    const int expert = blockIdx.y;
    if (row >= rows || (accumulate && expert_token_offsets[expert] == expert_token_offsets[expert + 1])) return;
    sums += int64(row) * columns + column;
    out += row * ldo + column;
    float total[8] = {};
#pragma unroll 4
    for (int part = 0; part < splits; ++part) {
        Row8<float> held;
        float v[8];
        held.load<true>(sums + part * stride, 8);
        held.unpack(v);
#pragma unroll
        for (int c = 0; c < 8; ++c) total[c] += v[c];
    }
    if (accumulate) {
        Row8<OUT> held;
        float v[8];
        held.template load<true>(out, 8);
        held.unpack(v);
#pragma unroll
        for (int c = 0; c < 8; ++c) total[c] += v[c];
    }
    store_vector8(out, total);
}

#define WGRAD_PARTS_ENTRY(SUFFIX, OUT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(GROUPS_PER_BLOCK) wgrad_parts_##SUFFIX(const WgradPartsParams<OUT> p) { \
        const int64 expert = blockIdx.y, half = blockIdx.z, size = int64(p.rows) * p.columns;                            \
        add_parts(p.sums + (expert * p.splits * p.halves + half) * size, p.expert_token_offsets,                         \
                  (half ? p.out1 : p.out0) + expert * p.expert_stride, p.ldo, unsigned(p.rows), unsigned(p.columns),     \
                  p.halves * size, p.splits, p.accumulate != 0);                                                         \
    }
WGRAD_PARTS_ENTRY(float32, float)
WGRAD_PARTS_ENTRY(bfloat16, bf16)
WGRAD_PARTS_ENTRY(float16, fp16)
