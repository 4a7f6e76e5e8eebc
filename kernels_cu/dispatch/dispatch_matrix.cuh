// The common part of the kernels of dispatch.cu: loads of ids, rows of the matrix of counters, prefix sums.
#pragma once
#include "common.cuh"

typedef unsigned short uint16;

// Integers of a row of block_counts: E rounded up to a multiple of 4, as rows are read 16 bytes at a time.
__device__ __forceinline__ int stride_of(int num_experts) { return (num_experts + 3) & ~3; }

template <class Id>
struct alignas(16) Ids4 {
    Id of[4];
};

// Four consecutive ids, or four times -1 if not all of them exist.
template <class Id>
__device__ __forceinline__ Ids4<Id> load_ids(const Id* ids, bool exist, bool aligned) {
    Ids4<Id> loaded = {{-1, -1, -1, -1}};
    if (aligned) {
        if (exist) loaded = *reinterpret_cast<const Ids4<Id>*>(ids);
    } else if (exist) {
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded.of[i] = ids[i];
    }
    return loaded;
}

// 4 * the matrix row for an id, which is its expert, or E for "none". Times the words of a row it is an offset in bytes.
__device__ __forceinline__ unsigned row4_of(int id, int num_experts) {
    return 4 * min(static_cast<unsigned>(id), static_cast<unsigned>(num_experts));
}
__device__ __forceinline__ unsigned row4_of(long long id, int num_experts) {
    return 4 * (static_cast<unsigned long long>(id) < num_experts ? static_cast<unsigned>(id) : num_experts);
}

__device__ __forceinline__ int expert_of(unsigned row4, int num_experts) {
    return row4 < 4 * num_experts ? static_cast<int>(row4 / 4) : -1;
}

__device__ __forceinline__ void clear(unsigned* matrix, int words) {
    for (int i = threadIdx.x; i < words / 4; i += blockDim.x) reinterpret_cast<uint4*>(matrix)[i] = make_uint4(0, 0, 0, 0);
}

// Inclusive prefix sums within each group of `width` lanes, a power of two.
template <class T>
__device__ __forceinline__ T warp_scan(T value, int width) {
    const int lane = threadIdx.x & (width - 1);
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const T before = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += before;
    }
    return value;
}

__device__ __forceinline__ int log2_of(int power) { return __popc(power - 1); }

// Exclusive prefix sums by one warp: sums[i] = value(0) + ... + value(i - 1) for i <= n. value(i) may read sums[i].
template <class Value>
__device__ __forceinline__ void exclusive_sums(int* sums, int n, Value value) {
    constexpr int EACH = 4;  // consecutive values of a lane
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int base = 0; base < n; base += 32 * EACH) {
        const int begin = base + lane * EACH;
        int values[EACH], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) values[i] = begin + i < n ? value(begin + i) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum += values[i];
        const int through = warp_scan(sum, 32);
        int at = before + through - sum;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (begin + i < n) sums[begin + i] = at;
            at += values[i];
        }
        before += __shfl_sync(0xffffffffu, through, 31);
    }
    if (lane == 0) sums[n] = before;
}

// The i with starts[i] <= value < starts[i + 1], by binary search. Expects starts[0] = 0 <= value < starts[n].
__device__ __forceinline__ int find_run(const int* starts, int n, int value) {
    int low = 0, high = n;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= value ? low : high) = middle;
    }
    return low;
}
