// Element types, 8-element rows in fp32, warp reductions. Row offsets are 64-bit throughout:
// L * k * 2h passes 2^31 elements at two million tokens.
#pragma once
#include "ptx_sm80.cuh"

typedef long long int64;

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

template <class T>
__device__ __forceinline__ void load_vector8(float (&v)[8], const T* p) {
    const uint4 r = load_global_16(p);
    const unsigned words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        T low, high;
        low.bits = static_cast<unsigned short>(words[i]);
        high.bits = static_cast<unsigned short>(words[i] >> 16);
        v[2 * i] = to_float(low);
        v[2 * i + 1] = to_float(high);
    }
}
__device__ __forceinline__ void load_vector8(float (&v)[8], const float* p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 r = load_global_16(p + 4 * i);
        v[4 * i] = __uint_as_float(r.x);
        v[4 * i + 1] = __uint_as_float(r.y);
        v[4 * i + 2] = __uint_as_float(r.z);
        v[4 * i + 3] = __uint_as_float(r.w);
    }
}

template <class T>
__device__ __forceinline__ void store_vector8(T* p, const float (&v)[8]) {
    store_global_16(p, make_uint4(pack2(T(), v[0], v[1]), pack2(T(), v[2], v[3]), pack2(T(), v[4], v[5]), pack2(T(), v[6], v[7])));
}
__device__ __forceinline__ void store_vector8(float* p, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        store_global_16(p + i, make_uint4(__float_as_uint(v[i]), __float_as_uint(v[i + 1]), __float_as_uint(v[i + 2]),
                                          __float_as_uint(v[i + 3])));
}

// Eight consecutive elements of a row of which the first `valid` exist. With ALIGNED_ROWS the rows
// start on 16 bytes and their length is a multiple of 8, so the eight exist together or not at all.
template <bool ALIGNED_ROWS, class T>
__device__ __forceinline__ void load_row8(float (&v)[8], const T* p, int64 valid) {
    if (ALIGNED_ROWS) {
        if (valid > 0) {
            load_vector8(v, p);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = 0.f;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < valid ? to_float(p[i]) : 0.f;
    }
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

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
