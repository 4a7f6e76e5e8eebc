// CPU stand-in for the CUDA device environment: g++ compiles a kernel source with this file forced in front.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>

#include "blocks.h"

// From here on the names that CUDA reserves, some of which the standard library has another use for.
#define __CUDA_ARCH__ 800
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(blocks) __attribute__((cuemu_cluster(blocks)))  // read by the Python driver
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // see blocks.h

#define CUEMU_VECTOR(T, NAME)                                                            \
    struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                   \
    struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                             \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                           \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUEMU_VECTOR(int, int)
CUEMU_VECTOR(unsigned, uint)
CUEMU_VECTOR(float, float)

namespace cuemu {

// Combines the values of all lanes in lane order and gives each the result.
template <class T>
static __forceinline__ T fold(const char* name, unsigned mask, T value, T (*combine)(T, T)) {
    struct Operand { T value; T (*combine)(T, T); } mine = {value, combine};
    collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        const Operand first = *static_cast<Operand*>(operands[__builtin_ctz(lanes)]);
        T total = first.value;
        for (unsigned m = lanes & (lanes - 1); m; m &= m - 1)
            total = first.combine(total, static_cast<Operand*>(operands[__builtin_ctz(m)])->value);
        for (unsigned m = lanes; m; m &= m - 1) static_cast<Operand*>(operands[__builtin_ctz(m)])->value = total;
    });
    return mine.value;
}

// A source lane outside the mask, or exited, gives poison: its value is undefined in CUDA.
template <class T>
static __forceinline__ T exchange(const char* name, unsigned mask, T value, unsigned source) {
    struct Operand { T in, out; unsigned source; } mine = {value, value, source};
    collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned m = lanes; m; m &= m - 1) {
            Operand& to = *static_cast<Operand*>(operands[__builtin_ctz(m)]);
            if (lanes >> to.source & 1)
                to.out = static_cast<Operand*>(operands[to.source])->in;
            else
                memset(static_cast<void*>(&to.out), 0xff, sizeof(T));
        }
    });
    return mine.out;
}

}  // namespace cuemu

#define threadIdx (cuemu::current->index)
#define blockIdx (cuemu::block->index)
#define blockDim (cuemu::block_dim)
#define gridDim (cuemu::grid_dim)
#define warpSize 32

static __forceinline__ void __syncthreads() { cuemu::barrier(); }
static __forceinline__ void __syncwarp(unsigned mask = ~0u) {
    cuemu::collective("__syncwarp", mask, nullptr, [](void* const*, unsigned) {});
}
static __forceinline__ void __threadfence() {}
static __forceinline__ void __threadfence_block() {}
static __forceinline__ void __trap() { CUEMU_FAIL("__trap"); }

#define CUEMU_SHUFFLE(NAME, BY, SOURCE)                                               \
    template <class T>                                                                \
    static __forceinline__ T NAME(unsigned mask, T v, BY by, int width = 32) {        \
        const unsigned lane = cuemu::current->id & 31, inner = width - 1;             \
        return cuemu::exchange(#NAME, mask, v, SOURCE);                               \
    }
CUEMU_SHUFFLE(__shfl_sync, int, (lane & ~inner) | (by & inner))
CUEMU_SHUFFLE(__shfl_up_sync, unsigned, (lane & inner) >= by ? lane - by : lane)
CUEMU_SHUFFLE(__shfl_down_sync, unsigned, by <= inner - (lane & inner) ? lane + by : lane)
CUEMU_SHUFFLE(__shfl_xor_sync, int, (lane ^ by) <= (lane | inner) ? lane ^ by : lane)

#define CUEMU_FOLD(NAME, T, VALUE, COMBINED)                                                          \
    static __forceinline__ T NAME(unsigned mask, T v) {                                               \
        return cuemu::fold<T>(#NAME, mask, VALUE, [](T a, T b) { return static_cast<T>(COMBINED); }); \
    }
CUEMU_FOLD(__ballot_sync, unsigned, (v != 0) * (1u << (cuemu::current->id & 31)), a | b)
CUEMU_FOLD(__reduce_or_sync, unsigned, v, a | b)
CUEMU_FOLD(__any_sync, int, v != 0, a | b)
CUEMU_FOLD(__all_sync, int, v != 0, a & b)
CUEMU_FOLD(__reduce_add_sync, unsigned, v, a + b)
CUEMU_FOLD(__reduce_min_sync, unsigned, v, b < a ? b : a)
CUEMU_FOLD(__reduce_max_sync, unsigned, v, a < b ? b : a)
CUEMU_FOLD(__reduce_add_sync, int, v, static_cast<unsigned>(a) + b)
CUEMU_FOLD(__reduce_min_sync, int, v, b < a ? b : a)
CUEMU_FOLD(__reduce_max_sync, int, v, a < b ? b : a)

template <class T>
static __forceinline__ unsigned __match_any_sync(unsigned mask, T v) {
    struct Operand { T value; unsigned peers; } mine = {v, 0};
    cuemu::collective("__match_any_sync", mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned m = lanes; m; m &= m - 1) {
            Operand& to = *static_cast<Operand*>(operands[__builtin_ctz(m)]);
            for (unsigned n = lanes; n; n &= n - 1)
                if (!memcmp(&static_cast<Operand*>(operands[__builtin_ctz(n)])->value, &to.value, sizeof(T)))
                    to.peers |= n & -n;
        }
    });
    return mine.peers;
}

static __forceinline__ unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {  // no sign replication
    const unsigned long long bytes = low | static_cast<unsigned long long>(high) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (chosen >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
static __forceinline__ int __popc(unsigned v) { return __builtin_popcount(v); }
static __forceinline__ int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static __forceinline__ int __ffs(int v) { return __builtin_ffs(v); }
static __forceinline__ int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static __forceinline__ unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
static __forceinline__ float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
static __forceinline__ int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
static __forceinline__ float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
template <class T>
static __forceinline__ T __ldg(const T* p) { return *p; }

#define CUEMU_ATOMICS(T)                                                                                          \
    static __forceinline__ T atomicAdd(T* p, T v) { T old = *p; __builtin_add_overflow(old, v, p); return old; }  \
    static __forceinline__ T atomicMax(T* p, T v) { T old = *p; *p = old < v ? v : old; return old; }              \
    static __forceinline__ T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
CUEMU_ATOMICS(int)
CUEMU_ATOMICS(unsigned)
CUEMU_ATOMICS(unsigned long long)

// Macros: glibc declares functions of some of these names.
#define __expf expf
#define __logf logf
#define __frcp_rn(a) (1.f / static_cast<float>(a))
#define rsqrtf(a) (1.f / sqrtf(a))

#define CUEMU_MIN_MAX(A, B, R)                                                                             \
    static __forceinline__ R min(A a, B b) { return static_cast<R>(b) < static_cast<R>(a) ? b : a; }       \
    static __forceinline__ R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? b : a; }
#define CUEMU_MIN_MAX_OF(S, U) \
    CUEMU_MIN_MAX(S, S, S) CUEMU_MIN_MAX(U, U, U) CUEMU_MIN_MAX(S, U, U) CUEMU_MIN_MAX(U, S, U)
CUEMU_MIN_MAX_OF(int, unsigned)
CUEMU_MIN_MAX_OF(long, unsigned long)
CUEMU_MIN_MAX_OF(long long, unsigned long long)
static __forceinline__ float min(float a, float b) { return fminf(a, b); }
static __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
