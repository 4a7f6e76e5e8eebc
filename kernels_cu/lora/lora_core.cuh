// What the products of low-rank factors share: lines of 128 bytes in shared memory, their copies, and accumulators.
//
// 16-byte chunk c of line l is at chunk c ^ (l & 7), as in gemm_core_sm80.cuh. Accumulators are those of mma.m16n8k16: of a
// fragment the lane has rows lane / 4 and + 8, columns 2 (lane % 4) and + 1. fp32 takes FFMA in place of mma.sync.
#pragma once
#include "common.cuh"

typedef ELEMENT element;

constexpr bool FP32 = sizeof(element) == 4;
constexpr int LINE_BYTES = 128, LINE = LINE_BYTES / sizeof(element);  // elements of a line
constexpr int VECTOR = 16 / sizeof(element);                          // elements of a chunk
constexpr int LINE_STEP = THREADS / 8;                                // thread t copies chunk t % 8 of lines t / 8 + LINE_STEP i

__device__ __forceinline__ int chunk_column() { return (threadIdx.x & 7) * VECTOR; }

// The thread's place in line `line` of the lines at byte `lines` of shared memory.
__device__ __forceinline__ unsigned chunk_place(unsigned lines, int line) {
    return lines + line * LINE_BYTES + ((threadIdx.x & 7) ^ (line & 7)) * 16;
}

// Copies a chunk of which the first `valid` elements exist; the others become zeros. ALIGNED_ROWS: all of it exists, or nothing.
template <bool ALIGNED_ROWS>
__device__ __forceinline__ void copy_chunk(unsigned place, const element* from, int valid) {
    if (ALIGNED_ROWS) {
        cp_async_16(shared_address(dynamic_shared) + place, from, valid > 0 ? 16 : 0);
    } else {
        element* to = reinterpret_cast<element*>(dynamic_shared + place);
        const element zero = {};
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) to[i] = i < valid ? from[i] : zero;
    }
}

__device__ __forceinline__ void store_pair(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
template <class Half>
__device__ __forceinline__ void store_pair(Half* to, float first, float second) {
    *reinterpret_cast<unsigned*>(to) = pack2(Half(), first, second);
}

// Element `column` of line `line` of fp32 lines at byte `lines`.
__device__ __forceinline__ float shared_float(unsigned lines, int line, int column) {
    const unsigned place = lines + line * LINE_BYTES + ((column / 4) ^ (line & 7)) * 16 + column % 4 * 4;
    return *reinterpret_cast<const float*>(dynamic_shared + place);
}
