// What the steps of dispatch.cu share: ids to rows of the matrix of counters in shared memory, a thread's column of it
// and how slots advance it, sums over lanes and lists.
#pragma once
#include "common.cuh"

typedef unsigned short uint16;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

template <class Id>
struct alignas(16) Ids4 {
    Id of[4];
};

// Four consecutive ids, or -1 if not all of them exist.
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

// The row of the matrix for an id, times 4.
__device__ __forceinline__ unsigned row_of(int id, int num_experts) {
    return 4 * min(static_cast<unsigned>(id), static_cast<unsigned>(num_experts));
}
__device__ __forceinline__ unsigned row_of(long long id, int num_experts) {
    return 4 * (static_cast<unsigned long long>(id) < num_experts ? static_cast<unsigned>(id) : num_experts);
}

__device__ __forceinline__ int expert_of(unsigned row, int num_experts) {
    return row < 4 * num_experts ? static_cast<int>(row / 4) : -1;
}

// This thread's column. Two neighbours share a word of shared memory, so the lanes of a warp take every other one.
__device__ __forceinline__ int column_of_thread(int columns) {
    const int t = threadIdx.x;
    return columns < 64 ? t : (t & ~63) + (t & 31) * 2 + (t >> 5 & 1);
}

__device__ __forceinline__ void clear(uint16* matrix, int cells) {
    for (int i = threadIdx.x; i < cells / 8; i += blockDim.x) reinterpret_cast<uint4*>(matrix)[i] = make_uint4(0, 0, 0, 0);
}

// Advances a thread's counters for N consecutive slots, whose rows' numbers come times 4; tells what each slot found. The
// column starts at that byte of dynamic_shared. All counters are read before the first is written.
template <int N>
__device__ __forceinline__ void advance(unsigned column, int columns, const unsigned (&rows)[N], unsigned (&found)[N]) {
    uint16* counters[N];
    unsigned earlier[N];  // of these slots, in the same row
#pragma unroll
    for (int i = 0; i < N; ++i) {
        counters[i] = reinterpret_cast<uint16*>(dynamic_shared + (column + rows[i] * (columns / 2)));
        found[i] = *counters[i];
        earlier[i] = 0;
#pragma unroll
        for (int j = 0; j < i; ++j) earlier[i] += rows[i] == rows[j];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        found[i] += earlier[i];
        *counters[i] = static_cast<uint16>(found[i] + 1);
    }
}

// Inclusive sums over each `width` lanes, a power of two.
__device__ __forceinline__ int warp_scan(int value, int width) {
    const int lane = threadIdx.x & (width - 1);
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int before = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += before;
    }
    return value;
}

__device__ __forceinline__ int log2_of(int power) { return __popc(power - 1); }

// sums[i] = value(0) + ... + value(i - 1) for i <= n; by one warp. value(i) may be sums[i].
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

// The i with starts[i] <= value < starts[i + 1]; starts[0] = 0 <= value < starts[n].
__device__ __forceinline__ int find_run(const int* starts, int n, int value) {
    int low = 0, high = n;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= value ? low : high) = middle;
    }
    return low;
}

// Calls visit(rows of 4 slots, the first of these), at last with 2, for an odd number of pairs of uint16 in shared memory.
template <class Visit>
__device__ __forceinline__ void walk(const unsigned* pairs, int num_pairs, Visit visit) {
    unsigned next0 = pairs[0], next1 = pairs[min(1, num_pairs - 1)];
    for (int i = 0; i + 1 < num_pairs; i += 2) {
        const unsigned rows[4] = {next0 & 0xffff, next0 >> 16, next1 & 0xffff, next1 >> 16};
        next0 = pairs[i + 2], next1 = pairs[min(i + 3, num_pairs - 1)];
        visit(rows, 2 * i);
    }
    const unsigned rows[2] = {next0 & 0xffff, next0 >> 16};
    visit(rows, 2 * (num_pairs - 1));
}
