// e4m3 operands of Hopper's products: the type, and how an epilogue quantises rows (fp8.cuh says by which rule).
#pragma once
#include "fp8.cuh"

struct e4m3 {
    unsigned char bits;
};

// As scaling_of, without divisions: products with a reciprocal, and a step of Newton's method that rounds them as quotients are.
__device__ __forceinline__ Scaling scaling_by_products(float amax) {
    constexpr float RECIPROCAL = 1.f / E4M3_MAX;
    const float divisor = fmaxf(amax, MIN_AMAX), about = divisor * RECIPROCAL;
    const float scale = fmaf(fmaf(-E4M3_MAX, about, divisor), RECIPROCAL, about);
    const float near = reciprocal(scale);
    const float factor = fmaf(fmaf(-near, divisor, E4M3_MAX) * RECIPROCAL, near, near);
    return {amax == 0.f ? 1.f : scale, factor};
}

// The largest of each half of the warp, of numbers that are not negative.
__device__ __forceinline__ float half_warp_max(float v) {
#if AMAX_BY_REDUX
    const bool first = threadIdx.x % 32 < 16;  // bits of floats that are not negative have the order of the floats
    const unsigned of_first = __reduce_max_sync(0xffffffffu, first ? __float_as_uint(v) : 0);
    const unsigned of_second = __reduce_max_sync(0xffffffffu, first ? 0 : __float_as_uint(v));
    return __uint_as_float(first ? of_first : of_second);
#else
    const float one[1] = {v};
    return largest<16>(one);
#endif
}

// Stores 8 columns of a row per lane, half a warp's GROUP_COLUMNS with one scale. All lanes of the warp take part; those that do
// not store have zeros or are of other groups. to, scale: where the lane's columns and its group's scale go.
__device__ __forceinline__ void store_quantised(e4m3* to, float* scale, const float (&v)[8], bool stores) {
    const Scaling scaling = scaling_by_products(half_warp_max(amax_of(v)));
    const uint2 packed = pack_e4m3(v, scaling.factor, scaling.factor);
    if (stores) *reinterpret_cast<uint2*>(to) = packed;
    if (stores && threadIdx.x % 16 == 0) *scale = scaling.scale;
}
