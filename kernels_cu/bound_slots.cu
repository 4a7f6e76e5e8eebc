// The bound of slots: dispatch's lists, cut off at max_slots positions, so that buffers in expert order need no more rows.
// Positions are in expert order, so the slots that are cut off are the last of the last experts. They count as absent.
//
// Launch: BOUND_THREADS threads per block, grid 1 + num_slots / BOUND_THREADS, rounded up. The first block cuts off the
// lists of experts, and leaves them alone if all slots have a place. The other blocks have a thread per slot.
#include "common.cuh"

#ifndef BOUND_THREADS
#error "BOUND_THREADS is given by launch_config.py"
#endif
static_assert(BOUND_THREADS <= 1024 && BOUND_THREADS % 32 == 0, "threads of a block");

struct BoundSlotsParams {
    int* token_index_map;       // (num_slots,) int32, in and out: a position from max_slots on becomes -1
    int* expert_token_indices;  // (num_slots,) int32, out: -1 from max_slots on
    int* row_tiles;             // (T+1, 2) int32, in and out: the count leaves out tiles whose first row is cut off
    int* expert_token_offsets;  // (E+1,) int32, in and out: at most max_slots
    int* experts_by_load;       // (E,) int32, out: by the slots that are left
    int* dropped;               // (1,) int32, out: slots that are cut off
    int num_slots, num_experts, max_slots;
};

__device__ __forceinline__ void bound_experts(const BoundSlotsParams& p) {
    __shared__ int tiles;
    const int num_experts = p.num_experts, routed = p.expert_token_offsets[num_experts];
    __syncthreads();  // all have read what the last thread is about to change
    if (threadIdx.x == 0) p.dropped[0] = max(routed - p.max_slots, 0), tiles = 0;
    if (routed <= p.max_slots) return;
    for (int e = threadIdx.x; e <= num_experts; e += BOUND_THREADS)
        p.expert_token_offsets[e] = min(p.expert_token_offsets[e], p.max_slots);
    __syncthreads();
    // First rows rise from tile to tile, so the tiles that are left come first.
    const int all_tiles = p.row_tiles[0];
    int left = 0;
    for (int tile = threadIdx.x; tile < all_tiles; tile += BOUND_THREADS) left += p.row_tiles[2ll * (tile + 1) + 1] < p.max_slots;
    atomicAdd(&tiles, left);
    for (int e = threadIdx.x; e < num_experts; e += BOUND_THREADS) {
        const int slots = p.expert_token_offsets[e + 1] - p.expert_token_offsets[e];
        int rank = 0;
        for (int other = 0; other < num_experts; ++other) {
            const int others = p.expert_token_offsets[other + 1] - p.expert_token_offsets[other];
            rank += others > slots || (others == slots && other < e);
        }
        p.experts_by_load[rank] = e;
    }
    __syncthreads();
    if (threadIdx.x == 0) p.row_tiles[0] = tiles;
}

extern "C" __global__ void __launch_bounds__(BOUND_THREADS) bound_slots(const BoundSlotsParams p) {
    if (blockIdx.x == 0) {
        bound_experts(p);
        return;
    }
    const int64 slot = (blockIdx.x - 1) * int64(BOUND_THREADS) + threadIdx.x;
    if (slot >= p.num_slots) return;
    if (p.token_index_map[slot] >= p.max_slots) p.token_index_map[slot] = -1;
    if (slot >= p.max_slots) p.expert_token_indices[slot] = -1;
}
