// Cuts dispatch's index lists off at max_slots rows, so that buffers in expert order need no more rows than that. The paper has
// no such bound. Rows are in expert order, so the slots that lose their rows are the last ones of the last experts. Such a slot
// counts as one without an expert.
//
// Launch: grid 1 + num_slots / BOUND_THREADS, rounded up, BOUND_THREADS threads per block. Block 0 cuts off the lists of
// experts and of tiles, and leaves them alone if at most max_slots slots are routed. In the other blocks each thread has a
// slot.
#include "common.cuh"

static_assert(BOUND_THREADS <= 1024 && BOUND_THREADS % 32 == 0, "threads of a block");

struct BoundSlotsParams {
    int* token_index_map;       // (num_slots,) int32, in and out: the row of each slot; a row from max_slots on becomes -1
    int* expert_token_indices;  // (num_slots,) int32, out: -1 from row max_slots on; others stay
    int* row_tiles;             // (T+1, 2) int32, in and out: [0][0], the number of tiles, becomes that of tiles that begin
                                // before max_slots
    int* expert_token_offsets;  // (E+1,) int32, in and out: at most max_slots
    int* experts_by_load;       // (E,) int32, out: experts by falling number of the rows that are left; stays if all are left
    int* dropped;               // (1,) int32, out: the number of routed slots that are cut off
    int num_slots, num_experts, max_slots;
};

__device__ __forceinline__ void bound_experts(const BoundSlotsParams& p) {
    __shared__ int tiles;
    const int num_experts = p.num_experts, routed = p.expert_token_offsets[num_experts];
    __syncthreads();  // all threads have read expert_token_offsets[E], which the loop below overwrites
    if (threadIdx.x == 0) p.dropped[0] = max(routed - p.max_slots, 0), tiles = 0;
    if (routed <= p.max_slots) return;
    for (int e = threadIdx.x; e <= num_experts; e += BOUND_THREADS)
        p.expert_token_offsets[e] = min(p.expert_token_offsets[e], p.max_slots);
    __syncthreads();
    // The first rows of tiles rise from tile to tile, so the tiles that are left are the first ones of the list.
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
