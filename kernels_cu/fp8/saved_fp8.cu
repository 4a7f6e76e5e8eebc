// Conversions of the first layer for save="fp8", an addition to the paper: the layer keeps e4m3 with scales for backward.
// SavedScales in saved_scales.cuh describes the layout. These kernels serve the portable GEMMs. Hopper's GEMMs write and read e4m3
// themselves.
//   quantize_saved    first_layer to saved
//   dequantize_saved  saved to first_layer
//
// Launch: a grid of any size, WARPS warps per block. A warp converts GROUP_COLUMNS columns of each half of one row at a time.
#include "fp8.cuh"
#include "saved_scales.cuh"

static_assert(WARPS <= 32 && GROUP_COLUMNS % 32 == 0, "threads of a block, and columns of a lane");

template <class T>
struct SavedFp8Params {
    T* first_layer;                   // (num_rows, halves * columns) T, into quantize_saved, out of dequantize_saved
    const int* expert_token_offsets;  // (E+1,) int32, in: the last one is the number of routed rows, which are converted
    unsigned char* saved;             // SavedScales of saved_scales.cuh, out of quantize_saved, into dequantize_saved
    int num_rows, num_experts;        // rows of both buffers, E
    int columns;                      // of a half: h
    int halves;                       // 2 (gate and up) if gated, else 1
    int interleaved;                  // not 0: the columns of gate and up alternate
};

constexpr int LANE_VALUES = GROUP_COLUMNS / 32;  // a lane's values of a group

// Calls use(first, step, valid, scale) for each group of the warp. The lane's elements of the group are at first + j * step,
// for j below valid and LANE_VALUES. scale: the address of the group's scale.
template <class T, class Use>
__device__ void for_each_group(const SavedFp8Params<T>& p, Use use) {
    const int64 rows = p.expert_token_offsets[p.num_experts], ld = int64(p.halves) * p.columns;
    const int groups = (p.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, step = p.interleaved ? p.halves : 1;
    float* const scales = saved_scales(p.saved, p.num_rows * ld);
    for (int64 i = blockIdx.x * int64(WARPS) + threadIdx.x / 32; i < rows * groups; i += gridDim.x * int64(WARPS)) {
        const int column = static_cast<int>(i % groups) * GROUP_COLUMNS + threadIdx.x % 32;
        for (int half = 0; half < p.halves; ++half) {
            const int64 first = i / groups * ld + half * int64(p.interleaved ? 1 : p.columns) + int64(column) * step;
            use(first, 32 * step, (p.columns - column + 31) / 32, scales + i * p.halves + half);
        }
    }
}

template <class T>
__device__ void quantize_saved(const SavedFp8Params<T>& p) {
    for_each_group(p, [&](int64 first, int step, int valid, float* scale) {
        float v[LANE_VALUES];
#pragma unroll
        for (int j = 0; j < LANE_VALUES; ++j) v[j] = j < valid ? to_float(p.first_layer[first + j * step]) : 0.f;
        const float mine[1] = {amax_of(v)};
        const Scaling scaling = scaling_of(largest<32>(mine));
#pragma unroll
        for (int j = 0; j < LANE_VALUES; ++j)
            if (j < valid) p.saved[first + j * step] = static_cast<unsigned char>(cvt_e4m3x2(v[j] * scaling.factor, 0.f));
        if (threadIdx.x % 32 == 0) *scale = scaling.scale;
    });
}

template <class T>
__device__ void dequantize_saved(const SavedFp8Params<T>& p) {
    for_each_group(p, [&](int64 first, int step, int valid, const float* scale) {
        const float factor = *scale;
#pragma unroll
        for (int j = 0; j < LANE_VALUES; ++j)
            if (j < valid)
                store_one(p.first_layer + first + j * step, cvt_f32x2_from_e4m3x2(p.saved[first + j * step]).x * factor);
    });
}

#define SAVED_FP8_ENTRIES(SUFFIX, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) quantize_saved_##SUFFIX(const SavedFp8Params<T> p) {   \
        quantize_saved(p);                                                                                          \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) dequantize_saved_##SUFFIX(const SavedFp8Params<T> p) { \
        dequantize_saved(p);                                                                                        \
    }
SAVED_FP8_ENTRIES(bfloat16, bf16)
SAVED_FP8_ENTRIES(float16, fp16)
SAVED_FP8_ENTRIES(float32, float)
