// Scales of the rows that a Hopper epilogue writes as e4m3 (fp8.cuh). Each row has a scale per group of GROUP_COLUMNS = 128
// columns, from the group's largest magnitude. A lane has 8 columns of a row, so that GROUP_LANES = 16 lanes have a group.
#pragma once
#include "fp8.cuh"
#include "ptx_sm90.cuh"

constexpr int GROUP_LANES = GROUP_COLUMNS / 8;

// The larger magnitude in each half of a word. Its sign has no meaning.
__device__ __forceinline__ unsigned larger_magnitudes(bf16, unsigned a, unsigned b) { return max_xorsign_abs_bf16x2(a, b); }
__device__ __forceinline__ unsigned larger_magnitudes(fp16, unsigned a, unsigned b) { return max_xorsign_abs_fp16x2(a, b); }

// The largest magnitudes of the even elements, in the low half, and of the odd elements, in the high half.
template <class T>
__device__ __forceinline__ unsigned amax_of_pairs(const Row8<T>& v) {
    return larger_magnitudes(T(), larger_magnitudes(T(), v.words[0], v.words[1]), larger_magnitudes(T(), v.words[2], v.words[3]));
}

// The largest magnitudes of two vectors, the first one's in the low half, from amax_of_pairs of both.
template <class T>
__device__ __forceinline__ unsigned amax_of_two(unsigned first, unsigned second) {
    return larger_magnitudes(T(), __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// Scalings from maxima over groups of LANES lanes. Each lane has 2 N magnitudes, two in each word, the first in the low half.
// Lane l of a group returns the scaling of magnitude l / (LANES / (2 N)).
template <int LANES, class T, int N>
__device__ __forceinline__ Scaling scaling_of_pairs(const unsigned (&amax)[N]) {
    const unsigned found = largest<LANES>(amax, [](unsigned a, unsigned b) { return larger_magnitudes(T(), a, b); });
    T mine;
    mine.bits = static_cast<unsigned short>(threadIdx.x & (LANES / (2 * N)) ? found >> 16 : found);
    return scaling_of(fabsf(to_float(mine)));
}

// How the 16 lanes of a group share the work of N scales. Each lane has N vectors of 8 columns, each with a group of its own,
// and computes the scale of one group.
template <int N>
struct SharedScaling {
    static constexpr int LANES = GROUP_LANES / N;  // lanes that compute the same scale

    // The vector whose scale this lane computes.
    static __device__ __forceinline__ int vector() { return threadIdx.x % GROUP_LANES / LANES; }
    // True if this lane stores its scale to memory.
    static __device__ __forceinline__ bool stores() { return threadIdx.x % LANES == 0; }
    // The factor of vector i, from a lane that has computed it.
    static __device__ __forceinline__ float factor(const Scaling& mine, int i) {
        return N == 1 ? mine.factor : __shfl_sync(0xffffffffu, mine.factor, (threadIdx.x & 32 - GROUP_LANES) + i * LANES);
    }
};

// Stores N vectors of 8 columns per lane as e4m3, each with the scale of its group. All lanes of the warp call it; those past
// the last column have zeros. Vector i goes to `to + i * step` if stores(i). Returns the scale of vector
// SharedScaling<N>::vector(), and with `found` the largest magnitude that it is made of.
template <int N, class Stores>
__device__ __forceinline__ float store_quantised(e4m3* to, int64 step, const float (&v)[N][8], Stores stores, float& found) {
    float amax[N];
#pragma unroll
    for (int i = 0; i < N; ++i) amax[i] = amax_of(v[i]);
    found = largest<GROUP_LANES>(amax);
    const Scaling mine = scaling_of(found);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float factor = SharedScaling<N>::factor(mine, i);
        store_global_8_if(stores(i), to + i * step, pack_e4m3(v[i], factor, factor));
    }
    return mine.scale;
}
template <int N, class Stores>
__device__ __forceinline__ float store_quantised(e4m3* to, int64 step, const float (&v)[N][8], Stores stores) {
    float found;
    return store_quantised(to, step, v, stores, found);
}
