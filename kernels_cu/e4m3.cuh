// e4m3, the 8-bit float of Hopper's fastest products, and how floats become e4m3 times a scale in fp32.
//
// A group of elements, such as 128 columns of a row, has one scale: amax / 448, amax being its largest magnitude and 448 the
// largest e4m3. So the largest element is exact. A group of zeros has the scale 1. A NaN stays one. An infinity makes the scale a
// NaN, and so all that the group is multiplied with.
#pragma once
#include "ptx_sm90.cuh"

struct e4m3 {
    unsigned char bits;
};

constexpr int SCALE_COLUMNS = 128;       // of a row that share a scale, in y_swi and first_layer_grad
constexpr float E4M3_MAX = 448.f;
constexpr float AMAX_MIN = 7.8886091e-31f;  // 2^-100, so that 448 / amax is finite

struct Quantisation {
    float scale;    // an element is its e4m3 times this
    float inverse;  // its e4m3 is the element times this, rounded
};

// Both are quotients rounded to fp32: a product with the reciprocal, and a step of Newton's method.
__device__ __forceinline__ Quantisation quantisation_of(float amax) {
    constexpr float RECIPROCAL = 1.f / E4M3_MAX;
    const float bounded = fmaxf(amax, AMAX_MIN), about = bounded * RECIPROCAL;
    const float scale = fmaf(fmaf(-E4M3_MAX, about, bounded), RECIPROCAL, about);
    const float near = reciprocal(scale);
    const float inverse = fmaf(fmaf(-near, bounded, E4M3_MAX) * RECIPROCAL, near, near);
    return {amax == 0.f ? 1.f : scale, inverse};
}

__device__ __forceinline__ float amax8(const float (&v)[8]) {
    float amax = fabsf(v[0]);
#pragma unroll
    for (int c = 1; c < 8; ++c) amax = fmaxf(amax, fabsf(v[c]));
    return amax;
}

// The largest of each half of the warp.
__device__ __forceinline__ float half_warp_max(float v) {
#if AMAX_BY_REDUX
    const bool first = threadIdx.x % 32 < 16;  // bits of floats that are not negative have the order of the floats
    const unsigned of_first = __reduce_max_sync(0xffffffffu, first ? __float_as_uint(v) : 0);
    const unsigned of_second = __reduce_max_sync(0xffffffffu, first ? 0 : __float_as_uint(v));
    return __uint_as_float(first ? of_first : of_second);
#else
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
#endif
}

__device__ __forceinline__ unsigned quantise4(float v0, float v1, float v2, float v3) {
    return static_cast<unsigned>(cvt_e4m3x2(v0, v1)) | static_cast<unsigned>(cvt_e4m3x2(v2, v3)) << 16;
}
__device__ __forceinline__ uint2 quantise8(const float (&v)[8], float inverse) {
    return make_uint2(quantise4(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse),
                      quantise4(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse));
}

// Stores 8 columns of a row per lane, half a warp's SCALE_COLUMNS with one scale. All lanes of the warp take part; those that do
// not store have zeros or are of other groups. to, scale: where the lane's columns and its group's scale go.
__device__ __forceinline__ void store_quantised(e4m3* to, float* scale, const float (&v)[8], bool stores) {
    const Quantisation q = quantisation_of(half_warp_max(amax8(v)));
    const uint2 packed = quantise8(v, q.inverse);
    if (stores) *reinterpret_cast<uint2*>(to) = packed;
    if (stores && threadIdx.x % 16 == 0) *scale = q.scale;
}
