// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in
// the three steps of section 4.2, without a sort and without atomics, stable and deterministic.
//
//   ids                   (L*k,)    int32 or int64, in   id < 0 or >= E: no expert in this slot
//   token_expert_indices  (L*k,)    int32, out           only written where ids are int64
//   block_counts          (E, B)    int32, workspace     slots of expert e in block b, then those before block b
//   expert_lengths        (E,)      int32, workspace
//   expert_token_indices  (L*k,)    int32, out           token of each routed slot; -1 past the last
//   expert_token_offsets  (E+1,)    int32, out
//   token_index_map       (L*k,)    int32, out           position in expert_token_indices, or -1
//   row_tiles             (T+1, 2)  int32, out           [0] = (count, tile rows), then (expert, first row)
//
// Launch: steps 1 and 3 take B blocks of W warps; a warp owns `slots_per_warp` consecutive slots (a
// multiple of 32) and one counter per expert in dynamic shared memory: 4*W*E bytes in step 1,
// 4*(W*E + 2*(E+1)) in step 3. Step 2 takes E blocks of 256 threads.
//
// The dense token-expert map of the paper's step 1 has L*E cells. Here it exists 32 slots at a time:
// __match_any_sync gives each slot the bit column of its expert over the 32 slots a warp holds, from
// which both the count (step 2) and the slot's rank (step 3) are a popcount.
#include "common.cuh"

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

template <class Id>
__device__ __forceinline__ int expert_of(const Id* ids, int64 slot, int64 num_slots, int64 num_experts) {
    if (slot >= num_slots) return -1;
    const Id id = ids[slot];
    return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ bool is_leader(unsigned peers, int lane) { return __ffs(peers) - 1 == lane; }

// Counts this warp's slots per expert into its own counters.
template <class Id>
__device__ void count_warp_slots(const Id* ids, int64 first, int64 last, int64 num_slots, int64 num_experts, int* counts,
                                 int* ids_int32) {
    const int lane = threadIdx.x & 31;
    for (int64 e = lane; e < num_experts; e += 32) counts[e] = 0;
    __syncwarp();
    for (int64 base = first; base < last; base += 32) {
        const int expert = expert_of(ids, base + lane, num_slots, num_experts);
        if (ids_int32 && base + lane < num_slots) ids_int32[base + lane] = expert;
        const unsigned peers = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && is_leader(peers, lane)) counts[expert] += __popc(peers);
        __syncwarp();
    }
}

template <class Id>
__device__ void step1_map(const Id* ids, int* token_expert_indices, int* block_counts, int64 num_slots, int64 num_experts,
                          int64 slots_per_warp) {
    int* counts = reinterpret_cast<int*>(dynamic_shared);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int64 first = (static_cast<int64>(blockIdx.x) * warps + warp) * slots_per_warp;
    const int64 last = min(first + slots_per_warp, num_slots);
    count_warp_slots(ids, first, last, num_slots, num_experts, counts + warp * num_experts, token_expert_indices);
    __syncthreads();
    for (int64 e = threadIdx.x; e < num_experts; e += blockDim.x) {
        int total = 0;
        for (int w = 0; w < warps; ++w) total += counts[w * num_experts + e];
        block_counts[e * gridDim.x + blockIdx.x] = total;
    }
}

// Exclusive scan of two values per thread over one warp; returns the totals in the last arguments.
__device__ __forceinline__ void warp_scan2(int& a, int& b, int& total_a, int& total_b) {
    const int lane = threadIdx.x & 31, a0 = a, b0 = b;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int up_a = __shfl_up_sync(0xffffffffu, a, step), up_b = __shfl_up_sync(0xffffffffu, b, step);
        if (lane >= step) a += up_a, b += up_b;
    }
    total_a = __shfl_sync(0xffffffffu, a, 31);
    total_b = __shfl_sync(0xffffffffu, b, 31);
    a -= a0;
    b -= b0;
}

extern "C" __global__ void __launch_bounds__(256) dispatch_step2_lengths(int* block_counts, int* expert_lengths, int64 num_blocks) {
    __shared__ int warp_totals[8];
    int* counts = block_counts + blockIdx.x * num_blocks;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int carry = 0;
    for (int64 base = 0; base < num_blocks; base += 256) {
        const int64 b = base + threadIdx.x;
        int before = b < num_blocks ? counts[b] : 0, unused = 0, total, unused_total;
        warp_scan2(before, unused, total, unused_total);
        if (lane == 0) warp_totals[warp] = total;
        __syncthreads();
        int chunk = 0;
        for (int w = 0; w < 8; ++w) {
            if (w < warp) before += warp_totals[w];
            chunk += warp_totals[w];
        }
        if (b < num_blocks) counts[b] = carry + before;
        carry += chunk;
        __syncthreads();
    }
    if (threadIdx.x == 0) expert_lengths[blockIdx.x] = carry;
}

template <class Id>
__device__ void step3_route(const Id* ids, const int* block_counts, const int* expert_lengths, int* expert_token_indices,
                            int* expert_token_offsets, int* token_index_map, int* row_tiles, int64 num_slots, int64 k,
                            int64 num_experts, int64 slots_per_warp, int64 tile_rows) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int* positions = reinterpret_cast<int*>(dynamic_shared);  // (W, E) next position per warp and expert
    int* offsets = positions + warps * num_experts;           // (E+1,)
    int* tile_starts = offsets + num_experts + 1;             // (E+1,)
    const int64 first = (static_cast<int64>(blockIdx.x) * warps + warp) * slots_per_warp;
    const int64 last = min(first + slots_per_warp, num_slots);
    count_warp_slots(ids, first, last, num_slots, num_experts, positions + warp * num_experts, static_cast<int*>(nullptr));
    if (warp == 0) {
        int slots = 0, tiles = 0;
        for (int64 base = 0; base < num_experts; base += 32) {
            const int64 e = base + lane;
            const int length = e < num_experts ? expert_lengths[e] : 0;
            int before = length, tiles_before = static_cast<int>((length + tile_rows - 1) / tile_rows), total, total_tiles;
            warp_scan2(before, tiles_before, total, total_tiles);
            if (e < num_experts) offsets[e] = slots + before, tile_starts[e] = tiles + tiles_before;
            slots += total;
            tiles += total_tiles;
        }
        if (lane == 0) offsets[num_experts] = slots, tile_starts[num_experts] = tiles;
    }
    __syncthreads();
    for (int64 e = threadIdx.x; e < num_experts; e += blockDim.x) {
        int next = offsets[e] + block_counts[e * gridDim.x + blockIdx.x];
        for (int w = 0; w < warps; ++w) {
            const int count = positions[w * num_experts + e];
            positions[w * num_experts + e] = next;
            next += count;
        }
    }
    __syncthreads();
    int* next = positions + warp * num_experts;
    for (int64 base = first; base < last; base += 32) {
        const int64 slot = base + lane;
        const int expert = expert_of(ids, slot, num_slots, num_experts);
        const unsigned peers = __match_any_sync(0xffffffffu, expert);
        const int rank = __popc(peers & ((1u << lane) - 1u));
        const int position = expert >= 0 ? next[expert] + rank : -1;
        __syncwarp();
        if (expert >= 0 && is_leader(peers, lane)) next[expert] = position + __popc(peers);
        __syncwarp();
        if (slot < num_slots) {
            token_index_map[slot] = position;
            if (position >= 0) expert_token_indices[position] = static_cast<unsigned>(slot) / static_cast<unsigned>(k);
            if (slot >= offsets[num_experts]) expert_token_indices[slot] = -1;
        }
    }
    if (blockIdx.x == 0)
        for (int64 e = threadIdx.x; e <= num_experts; e += blockDim.x) expert_token_offsets[e] = offsets[e];
    const int64 num_tiles = tile_starts[num_experts];
    for (int64 tile = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; tile < num_tiles; tile += gridDim.x * blockDim.x) {
        int64 low = 0, high = num_experts;  // the last expert whose first tile is <= tile
        while (high - low > 1) {
            const int64 middle = (low + high) / 2;
            (tile_starts[middle] <= tile ? low : high) = middle;
        }
        row_tiles[2 * (tile + 1)] = static_cast<int>(low);
        row_tiles[2 * (tile + 1) + 1] = static_cast<int>(offsets[low] + (tile - tile_starts[low]) * tile_rows);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) row_tiles[0] = static_cast<int>(num_tiles), row_tiles[1] = static_cast<int>(tile_rows);
}

#define DISPATCH_ENTRIES(SUFFIX, ID)                                                                                          \
    extern "C" __global__ void dispatch_step1_map_##SUFFIX(const ID* ids, int* token_expert_indices, int* block_counts,       \
                                                           int64 num_slots, int64 num_experts, int64 slots_per_warp) {        \
        step1_map(ids, token_expert_indices, block_counts, num_slots, num_experts, slots_per_warp);                           \
    }                                                                                                                         \
    extern "C" __global__ void dispatch_step3_route_##SUFFIX(                                                                 \
        const ID* ids, const int* block_counts, const int* expert_lengths, int* expert_token_indices,                         \
        int* expert_token_offsets, int* token_index_map, int* row_tiles, int64 num_slots, int64 k, int64 num_experts,         \
        int64 slots_per_warp, int64 tile_rows) {                                                                              \
        step3_route(ids, block_counts, expert_lengths, expert_token_indices, expert_token_offsets, token_index_map,           \
                    row_tiles, num_slots, k, num_experts, slots_per_warp, tile_rows);                                         \
    }
DISPATCH_ENTRIES(int32, int)
DISPATCH_ENTRIES(int64, long long)
