// Element types, rows in vectors of 8 elements, warp reductions, keys to sort by. Offsets of rows have 64 bits everywhere:
// L * k * 2h exceeds 2^31 elements in large layers.
#pragma once
#include "ptx_sm80.cuh"

typedef long long int64;

// The dynamic shared memory of a launch. The 128-byte swizzle of TMA and wgmma repeats every 1024 bytes.
extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// A kernel takes one struct by value. moeblaze_cupy/cuda/structs.py describes its fields to the host. The struct is a
// __grid_constant__ where it holds tensor maps, as the kernel passes their addresses on. In most other kernels that would
// cost registers.

// The offset of a field in bytes. The struct's name is the last argument, as it may have commas. NVRTC has no offsetof.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(FIELD, ...) __INTADDR__(&((__VA_ARGS__*)0)->FIELD)
#else
#define OFFSET_OF(FIELD, ...) __builtin_offsetof(__VA_ARGS__, FIELD)
#endif

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(bf16 v) { return cvt_f32_from_bf16(v.bits); }
__device__ __forceinline__ float to_float(fp16 v) { return cvt_f32_from_fp16(v.bits); }
__device__ __forceinline__ float to_float(float v) { return v; }

__device__ __forceinline__ unsigned pack2(bf16, float low, float high) { return cvt_bf16x2(low, high); }
__device__ __forceinline__ unsigned pack2(fp16, float low, float high) { return cvt_fp16x2(low, high); }

__device__ __forceinline__ void store_one(bf16* p, float v) { p->bits = static_cast<unsigned short>(cvt_bf16x2(v, 0.f)); }
__device__ __forceinline__ void store_one(fp16* p, float v) { p->bits = static_cast<unsigned short>(cvt_fp16x2(v, 0.f)); }
__device__ __forceinline__ void store_one(float* p, float v) { *p = v; }

// Eight consecutive elements of a row, as they are in memory. The first `valid` of them exist, and load gives zeros for the
// others. With ALIGNED_ROWS rows start at multiples of 16 bytes and have a multiple of 8 elements, so that all eight exist
// or none.
template <class T>
struct Row8 {
    static constexpr int WORDS = 2 * sizeof(T);
    unsigned words[WORDS];

    Row8() = default;
    __device__ __forceinline__ explicit Row8(uint4 v) : words{v.x, v.y, v.z, v.w} {}

    template <bool ALIGNED_ROWS>
    __device__ __forceinline__ void load(const T* p, int64 valid) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = 0;
        if (ALIGNED_ROWS) {
            if (valid > 0) {
#pragma unroll
                for (int i = 0; i < WORDS; i += 4) {
                    const uint4 r = load_global_16(reinterpret_cast<const char*>(p) + 4 * i);
                    words[i] = r.x, words[i + 1] = r.y, words[i + 2] = r.z, words[i + 3] = r.w;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < valid) put(i, p[i]);
        }
    }
    __device__ __forceinline__ void store(T* p) const {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            store_global_16(reinterpret_cast<char*>(p) + 4 * i, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
    __device__ __forceinline__ void unpack(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = get(T(), i);
    }

private:
    __device__ __forceinline__ void put(int i, float v) { words[i] = __float_as_uint(v); }
    template <class Half>
    __device__ __forceinline__ void put(int i, Half v) {
        words[i / 2] |= static_cast<unsigned>(v.bits) << (i % 2 * 16);
    }
    __device__ __forceinline__ float get(float, int i) const { return __uint_as_float(words[i]); }
    template <class Half>
    __device__ __forceinline__ float get(Half h, int i) const {
        h.bits = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
        return to_float(h);
    }
};

template <class T>
__device__ __forceinline__ uint4 pack8(T, const float (&v)[8]) {
    return make_uint4(pack2(T(), v[0], v[1]), pack2(T(), v[2], v[3]), pack2(T(), v[4], v[5]), pack2(T(), v[6], v[7]));
}

template <class T>
__device__ __forceinline__ void store_vector8(T* p, const float (&v)[8]) {
    store_global_16(p, pack8(T(), v));
}
__device__ __forceinline__ void store_vector8(float* p, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        store_global_16(p + i, make_uint4(__float_as_uint(v[i]), __float_as_uint(v[i + 1]), __float_as_uint(v[i + 2]),
                                          __float_as_uint(v[i + 3])));
}

template <bool ALIGNED_ROWS, class T>
__device__ __forceinline__ void store_row8(T* p, const float (&v)[8], int64 valid) {
    if (ALIGNED_ROWS) {
        if (valid > 0) store_vector8(p, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < valid) store_one(p + i, v[i]);
    }
}

template <class T>
__device__ __forceinline__ void store_vector4(T* p, const float (&v)[4]) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2(T(), v[0], v[1]), pack2(T(), v[2], v[3]));
}
__device__ __forceinline__ void store_vector4(float* p, const float (&v)[4]) {
    store_global_16(p, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
}

// Does what store_row8 does, for four elements. If ALIGNED_ROWS is set, all four exist or none.
template <bool ALIGNED_ROWS, class T>
__device__ __forceinline__ void store_row4(T* p, const float (&v)[4], int64 valid) {
    if (ALIGNED_ROWS) {
        if (valid > 0) store_vector4(p, v);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < valid) store_one(p + i, v[i]);
    }
}

// Eight pairs of gate and up, four in each argument -> eight of gate, eight of up.
__device__ __forceinline__ void take_pairs_apart(float (&first)[8], float (&second)[8]) {
    float gate[8], up[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        gate[i] = first[2 * i], up[i] = first[2 * i + 1];
        gate[i + 4] = second[2 * i], up[i + 4] = second[2 * i + 1];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = gate[i], second[i] = up[i];
}
// The inverse.
__device__ __forceinline__ void make_pairs(float (&gate)[8], float (&up)[8]) {
    float first[8], second[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        first[2 * i] = gate[i], first[2 * i + 1] = up[i];
        second[2 * i] = gate[i + 4], second[2 * i + 1] = up[i + 4];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = first[i], up[i] = second[i];
}

// Keeps the compiler from putting loads off until their use, so that all loads before it are in flight at one time. It is no
// barrier that the program needs.
__device__ __forceinline__ void issue_loads_now() { __syncwarp(); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// Maps a float to an unsigned with the same order. NaN comes first, -0 equals +0, and 0 is below the key of every float.
__device__ __forceinline__ unsigned sort_key_of_canonical(float v) {
    const unsigned bits = __float_as_uint(v);
    return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ unsigned sort_key(float v) { return sort_key_of_canonical(canonical(v)); }
__device__ __forceinline__ float from_sort_key(unsigned key) {
    return __uint_as_float(key ^ (~static_cast<unsigned>(static_cast<int>(key) >> 31) | 0x80000000u));  // NaN's key gives a NaN
}
