// E4m3 with fp32 scales (an addition to the paper). A group of numbers shares a scale, and each number is approximately its
// e4m3 value times the scale. With amax the largest magnitude of the group, scale = amax / 448, and a number v becomes the e4m3
// value nearest to v * (448 / amax), ties to even. A group of zeros or denormals has the scale 1. An infinity turns all of its
// group into NaN. A NaN affects no other number.
#pragma once
#include "common.cuh"

struct e4m3 {
    unsigned char bits;
};
constexpr float E4M3_MAX = 448.f;
constexpr float LARGEST = 3.40282347e38f;  // the largest finite fp32
constexpr float MIN_AMAX = 0x1p-100f;      // amax is raised to this, so that 448 / amax does not overflow
constexpr float MIN_NORMAL = 0x1p-126f;    // smaller magnitudes are denormals, which some instructions flush to zero

struct Scaling {
    float scale, factor;  // amax / 448, which e4m3 values are multiplied by to read them; 448 / amax, to write them
};
// Computes the quotients without a division. One step of Newton's method gives them the rounding of a division. Infinities go
// without this step, which would make a NaN of them.
__device__ __forceinline__ Scaling scaling_of(float amax) {
    constexpr float RECIPROCAL = 1.f / E4M3_MAX;
    const float divisor = fmaxf(amax, MIN_AMAX);
    const bool finite = divisor <= LARGEST;
    float scale = divisor * RECIPROCAL;
    if (finite) scale = fmaf(fmaf(-E4M3_MAX, scale, divisor), RECIPROCAL, scale);
    float factor = reciprocal(scale);
    if (finite) factor = fmaf(fmaf(-factor, divisor, E4M3_MAX) * RECIPROCAL, factor, factor);
    return {amax >= MIN_NORMAL ? scale : 1.f, factor};  // the scale is 1 for a NaN too
}

// The largest magnitude. It ignores NaNs, as fmaxf does.
template <int N>
__device__ __forceinline__ float amax_of(const float (&v)[N]) {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) amax = fmaxf(amax, fabsf(v[i]));
    return amax;
}

// Maxima over groups of LANES lanes of N values per lane, value by value. Lane l of a group returns the maximum of value
// l / (LANES / N). larger(a, b) returns the larger of two.
template <int LANES, class T, int N, class Larger>
__device__ __forceinline__ T largest(const T (&v)[N], Larger larger) {
    constexpr int STEP = LANES / 2;
    constexpr unsigned ALL = 0xffffffffu;
    if constexpr (N == 1) {
        T found = v[0];
#pragma unroll
        for (int step = STEP; step > 0; step >>= 1) found = larger(found, __shfl_xor_sync(ALL, found, step));
        return found;
    } else {
        const bool second = threadIdx.x & STEP;
        T kept[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const T own = second ? v[i + N / 2] : v[i], other = second ? v[i] : v[i + N / 2];
            kept[i] = larger(own, __shfl_xor_sync(ALL, other, STEP));
        }
        return largest<STEP>(kept, larger);
    }
}
template <int LANES, int N>
__device__ __forceinline__ float largest(const float (&v)[N]) {
    return largest<LANES>(v, [](float a, float b) { return fmaxf(a, b); });
}

// Eight numbers as e4m3. Those with an even index are multiplied by `even`, the others by `odd`.
__device__ __forceinline__ uint2 pack_e4m3(const float (&v)[8], float even, float odd) {
    unsigned words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        words[i] = cvt_e4m3x2(v[4 * i] * even, v[4 * i + 1] * odd) |
                   static_cast<unsigned>(cvt_e4m3x2(v[4 * i + 2] * even, v[4 * i + 3] * odd)) << 16;
    return make_uint2(words[0], words[1]);
}
__device__ __forceinline__ void unpack_e4m3(float (&v)[8], unsigned low, unsigned high) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned word = i < 2 ? low : high;
        const float2 pair = cvt_f32x2_from_e4m3x2(static_cast<unsigned short>(word >> i % 2 * 16));
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
}
