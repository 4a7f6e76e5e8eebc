// Weight gradients of few large experts, second step (paper section 3.2, Algorithm 1 lines 18 and 29): the sums that
// grouped_wgrad_sm90.cu made of parts of each expert's rows are added up, in their order: two runs give the same bits.
//
//   sums                  (E, parts, halves, rows, columns)  fp32, in
//   expert_token_offsets  (E+1,)                             int32, in
//   out0, out1            (rows, columns) of expert e at e * expert_stride, rows ldo apart, element or fp32, out: gate's and
//                         up's (out1 only if gated)
//   accumulate            not 0: added to what out0 and out1 hold, in fp32, rounded once; an expert without rows is left alone
//
// Launch: grid (groups of 8 columns of all rows, 256 to a block; E; halves), 256 threads, a group each. Sizes, strides and
// pointers are those of grouped_wgrad_sm90.cu: multiples of 8 elements, of 16 bytes.
#include "common.cuh"

template <class OUT>
__device__ void add_parts(const float* sums, const int* expert_token_offsets, OUT* out, int64 ldo, unsigned rows, unsigned columns,
                          int64 stride, int64 parts, bool accumulate) {
    const unsigned index = blockIdx.x * 256 + threadIdx.x, row = index / (columns / 8), column = index % (columns / 8) * 8;
    const int expert = blockIdx.y;
    if (row >= rows || (accumulate && expert_token_offsets[expert] == expert_token_offsets[expert + 1])) return;
    sums += int64(row) * columns + column;
    out += row * ldo + column;
    float total[8] = {};
#pragma unroll 4
    for (int64 part = 0; part < parts; ++part) {
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

#define WGRAD_PARTS_ENTRY(SUFFIX, OUT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                         \
        wgrad_parts_##SUFFIX(const float* sums, const int* expert_token_offsets, OUT* out0, OUT* out1, int64 expert_stride,   \
                             int64 ldo, int64 rows, int64 columns, int64 halves, int64 parts, int64 accumulate) {             \
        const int64 expert = blockIdx.y, half = blockIdx.z, size = rows * columns;                                            \
        add_parts(sums + (expert * parts * halves + half) * size, expert_token_offsets,                                       \
                  (half ? out1 : out0) + expert * expert_stride, ldo, unsigned(rows), unsigned(columns), halves * size,       \
                  parts, accumulate != 0);                                                                                    \
    }
WGRAD_PARTS_ENTRY(float32, float)
WGRAD_PARTS_ENTRY(bfloat16, bf16)
WGRAD_PARTS_ENTRY(float16, fp16)
