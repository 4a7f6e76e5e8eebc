// The counting kernel of dispatch.cu, step 2 of the paper's section 4.2: slots of each expert in each block of the routing
// kernel.
#pragma once
#include "dispatch_matrix.cuh"

template <class Id>
struct DispatchCountParams {
    const Id* ids;              // (L*k,) int32 or int64, in; id < 0 or >= E: no expert in this slot
    int* token_expert_indices;  // (L*k,) int32, out: from int64 ids, -1 for "none"; null where ids are int32
    int* block_counts;          // (ceil(B/G), G, E') int32, out: slots of each expert in each G blocks of dispatch_route,
                                // and if G = 2 in the first of the two
    int64 block_slots;
    int num_slots, num_experts, columns, counted_together;
};

// Four ids of a thread, several times, on their way from global memory while as many are counted.
template <class Id>
constexpr int COUNT_LOADS = sizeof(Id) == 4 ? 4 : 2;

// Sums each row of the G matrices and writes the sums to block_counts. A lane adds 4 counters of a row, and with G = 2 the
// counters of the same row in the second matrix.
__device__ __forceinline__ void write_block_counts(int* block_counts, const unsigned* matrix, int num_experts, int columns,
                                                   int counted_together) {
    const int num_rows = num_experts + 1, lane_bits = log2_of(columns) - 2, experts = stride_of(num_experts);
    for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x & 31) < experts << lane_bits; i += blockDim.x) {
        const int row = i >> lane_bits;
        unsigned of_first = 0, of_second = 0;
        if (row < num_experts) {
            const uint4 w = reinterpret_cast<const uint4*>(matrix)[i];
            of_first = w.x + w.y + w.z + w.w;
            if (counted_together == 2) {
                const uint4 v = reinterpret_cast<const uint4*>(matrix)[i + (num_rows << lane_bits)];
                of_second = v.x + v.y + v.z + v.w;
            }
        }
#pragma unroll
        for (int step = 1; step < 8; step <<= 1)  // 32 columns are at most 8 lanes
            if (step < 1 << lane_bits) {
                of_first += __shfl_xor_sync(0xffffffffu, of_first, step);
                of_second += __shfl_xor_sync(0xffffffffu, of_second, step);
            }
        if (row < experts && (i & ((1 << lane_bits) - 1)) == 0) {
            int* total = block_counts + blockIdx.x * static_cast<int64>(counted_together * experts) + row;
            *total = static_cast<int>(of_first + of_second);
            if (counted_together == 2) total[experts] = static_cast<int>(of_first);
        }
    }
}

template <class Id>
__device__ __forceinline__ void count(const DispatchCountParams<Id>& p) {
    constexpr int LOADS = COUNT_LOADS<Id>;
    let_next_launch_start();
    const int num_experts = p.num_experts, columns = p.columns, counted_together = p.counted_together;
    const int64 num_slots = p.num_slots, block_slots = p.block_slots;
    unsigned* matrix = reinterpret_cast<unsigned*>(dynamic_shared);  // (G, E+1, C)
    const int num_rows = num_experts + 1;
    // The threads are G groups, each with the slots of one block of the routing kernel and a matrix of its own.
    const unsigned threads = blockDim.x / counted_together, group = threadIdx.x / threads;  // powers of two
    const unsigned thread = threadIdx.x & (threads - 1), stride = 4 * threads;
    const int64 first = (blockIdx.x * static_cast<int64>(counted_together) + group) * block_slots;
    const unsigned slots = static_cast<unsigned>(max(min(first + block_slots, num_slots) - first, 0ll));
    const Id* ids = p.ids;
    const bool aligned = reinterpret_cast<unsigned long long>(ids) % 16 == 0;
    ids += first;
    auto load = [&](Ids4<Id>(&loaded)[LOADS], unsigned base) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const unsigned slot = base + i * stride + 4 * thread;
            loaded[i] = load_ids(ids + slot, slot + 3 < slots, aligned);
        }
        issue_loads_now();
    };
    const unsigned column_offset = 4 * (group * num_rows * columns + (threadIdx.x & (columns - 1)));
    auto count_slot = [&](Id id) {
        atomicAdd(reinterpret_cast<unsigned*>(dynamic_shared + (column_offset + row4_of(id, num_experts) * columns)), 1u);
    };
    auto count_slots = [&](const Ids4<Id>(&loaded)[LOADS], unsigned base) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) count_slot(loaded[i].of[j]);
            const unsigned slot = base + i * stride + 4 * thread;
            if (sizeof(Id) == 8 && slot + 3 < slots) {
                int experts[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) experts[j] = expert_of(row4_of(loaded[i].of[j], num_experts), num_experts);
                *reinterpret_cast<int4*>(p.token_expert_indices + first + slot) =
                    make_int4(experts[0], experts[1], experts[2], experts[3]);
            }
        }
    };
    Ids4<Id> even[LOADS], odd[LOADS];
    load(even, 0);
    clear(matrix, counted_together * num_rows * columns);
    __syncthreads();
    for (unsigned base = 0; base < slots; base += 2 * LOADS * stride) {
        load(odd, base + LOADS * stride);
        count_slots(even, base);
        if (base + LOADS * stride >= slots) break;
        load(even, base + 2 * LOADS * stride);
        count_slots(odd, base + LOADS * stride);
    }
    if (thread < (slots & 3)) {  // the last slots % 4
        const unsigned slot = (slots & ~3u) + thread;
        count_slot(ids[slot]);
        if (sizeof(Id) == 8) p.token_expert_indices[first + slot] = expert_of(row4_of(ids[slot], num_experts), num_experts);
    }
    __syncthreads();
    write_block_counts(p.block_counts, matrix, num_experts, columns, counted_together);
}
