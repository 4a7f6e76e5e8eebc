// Scales of what an epilogue writes as e4m3 (fp8.cuh): the largest magnitudes of groups of 128 columns, of which a lane has 8.
#pragma once
#include "fp8.cuh"
#include "ptx_sm90.cuh"

constexpr int GROUP_LANES = GROUP_COLUMNS / 8;

// The larger magnitude in each half of a word, with a sign that has no meaning.
__device__ __forceinline__ unsigned larger_magnitudes(bf16, unsigned a, unsigned b) { return max_xorsign_abs_bf16x2(a, b); }
__device__ __forceinline__ unsigned larger_magnitudes(fp16, unsigned a, unsigned b) { return max_xorsign_abs_fp16x2(a, b); }

// The largest magnitudes of even elements, in the low half, and of odd ones.
template <class T>
__device__ __forceinline__ unsigned amax_of_pairs(const Row8<T>& v) {
    return larger_magnitudes(T(), larger_magnitudes(T(), v.words[0], v.words[1]), larger_magnitudes(T(), v.words[2], v.words[3]));
}

// Of the even and odd elements of two vectors -> of the first vector, in the low half, and of the second.
template <class T>
__device__ __forceinline__ unsigned amax_of_two(unsigned first, unsigned second) {
    return larger_magnitudes(T(), __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// The scaling of groups of LANES lanes by two magnitudes in each of N words: lane l of a group has that of magnitude
// l / (LANES / (2 N)). A word's first magnitude is in its low half.
template <int LANES, class T, int N>
__device__ __forceinline__ Scaling scaling_of_pairs(const unsigned (&amax)[N]) {
    const unsigned found = largest<LANES>(amax, [](unsigned a, unsigned b) { return larger_magnitudes(T(), a, b); });
    T mine;
    mine.bits = static_cast<unsigned short>(threadIdx.x & (LANES / (2 * N)) ? found >> 16 : found);
    return scaling_of(fabsf(to_float(mine)));
}

// Where N vectors of 8 columns share the 16 lanes of a group: each lane finds the scale of one of them.
template <int N>
struct SharedScaling {
    static constexpr int LANES = GROUP_LANES / N;  // that have a vector's scale

    static __device__ __forceinline__ int vector() { return threadIdx.x % GROUP_LANES / LANES; }  // whose scale the lane has
    static __device__ __forceinline__ bool stores() { return threadIdx.x % LANES == 0; }
    // Of vector i, from a lane that has it.
    static __device__ __forceinline__ float factor(const Scaling& mine, int i) {
        return N == 1 ? mine.factor : __shfl_sync(0xffffffffu, mine.factor, (threadIdx.x & 32 - GROUP_LANES) + i * LANES);
    }
};

// Stores N vectors of 8 columns per lane, each with the scale of its group. All lanes of the warp take part; those past the last
// column have zeros. to: of the first vector; the others follow at equal distances. stores: whether vector i is stored. Returns
// the scale of vector SharedScaling<N>::vector().
template <int N, class Stores>
__device__ __forceinline__ float store_quantised(e4m3* to, int64 step, const float (&v)[N][8], Stores stores) {
    float amax[N];
#pragma unroll
    for (int i = 0; i < N; ++i) amax[i] = amax_of(v[i]);
    const Scaling mine = scaling_of(largest<GROUP_LANES>(amax));
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float factor = SharedScaling<N>::factor(mine, i);
        store_global_8_if(stores(i), to + i * step, pack_e4m3(v[i], factor, factor));
    }
    return mine.scale;
}
