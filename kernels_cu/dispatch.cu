// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in
// the three steps of section 4.2, without a sort and without atomics, stable and deterministic.
//
//   ids                   (L*k,)        int32 or int64, in   id < 0 or >= E: no expert in this slot
//   token_expert_indices  (L*k,)        int32, out           from int64 ids, -1 for "none"; null where ids are int32
//   warp_counts           (B, P, W, E)  uint16, workspace    slots of each expert in each warp's range
//   block_counts          (B, E)        int32, workspace     slots of each expert in each block
//   expert_token_indices  (L*k,)        int32, out           token of each routed slot; -1 past the last
//   expert_token_offsets  (E+1,)        int32, out
//   token_index_map       (L*k,)        int32, out           position in expert_token_indices, or -1
//   row_tiles             (T+1, 2)      int32, out           [0] = (count, tile_rows), then (expert, first row)
//
// num_slots = L*k, num_experts = E <= 4096. Launch: both kernels take B blocks, at most one per multiprocessor, of W
// warps. A block owns P = num_parts consecutive parts of W * slots_per_warp <= 65536 slots, a warp slots_per_warp
// consecutive slots (a multiple of 32) of each part. Dynamic shared memory: 2*W*E + 4*E bytes for dispatch_count,
// 2*W*E + 16*(E+1) + 2*W*slots_per_warp for dispatch_route.
//
// dispatch_count is step 1 and the counting of step 2, dispatch_route the prefix sums of step 2 and step 3. The dense
// token-expert map of step 1 has L*E cells; here it exists 32 slots at a time: peers_of gives each slot the bit column
// of its expert over the 32 slots a warp holds, whose popcounts are the count (step 2) and the slot's rank (step 3).
// Step 3 collects a part's slots by expert in shared memory and writes them out as runs: lone 4-byte stores would each
// cost a 32-byte sector of the L2.
#include "common.cuh"

typedef unsigned short uint16;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// The lanes whose slot has the same expert; meaningless for a negative one. One ballot per bit of the id: the
// instruction behind __match_any_sync takes time with every distinct value (measured: 8 times this at 128 experts).
template <int BITS>
__device__ __forceinline__ unsigned peers_of(int expert) {
    unsigned peers = __ballot_sync(0xffffffffu, expert >= 0);
#pragma unroll
    for (int b = 0; b < BITS; ++b) {
        const bool bit = expert >> b & 1;
        const unsigned with_bit = __ballot_sync(0xffffffffu, bit);
        peers &= bit ? with_bit : ~with_bit;
    }
    return peers;
}

// Calls visit(slot, expert, peers) for slots [first, last) of a warp, 32 at a time: `expert` is -1 for "none" and past
// `last`. The loads of several rounds are in flight together.
template <int BITS, class Id, class Visit>
__device__ __forceinline__ void for_each_slot(const Id* ids, int64 first, int64 last, int num_experts, Visit visit) {
    constexpr int ROUNDS = 8;
    const int lane = threadIdx.x & 31;
    for (int64 base = first; base < last; base += 32 * ROUNDS) {
        Id loaded[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const int64 slot = base + 32 * i + lane;
            loaded[i] = slot < last ? ids[slot] : Id(-1);
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (base + 32 * i >= last) break;
            const int expert = loaded[i] >= 0 && loaded[i] < num_experts ? static_cast<int>(loaded[i]) : -1;
            visit(base + 32 * i + lane, expert, peers_of<BITS>(expert));
        }
    }
}

__device__ __forceinline__ bool is_leader(unsigned peers) { return __ffs(peers) - 1 == static_cast<int>(threadIdx.x & 31); }

template <int BITS, class Id>
__device__ void count(const Id* ids, int* token_expert_indices, uint16* warp_counts, int* block_counts, int64 num_slots,
                      int num_experts, int64 slots_per_warp, int64 num_parts) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31, cells = warps * num_experts;
    int* totals = reinterpret_cast<int*>(dynamic_shared);           // (E,)
    uint16* counts = reinterpret_cast<uint16*>(totals + num_experts);  // (W, E)
    uint16* mine = counts + warp * num_experts;
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) totals[e] = 0;
    for (int64 part = blockIdx.x * num_parts; part < (blockIdx.x + 1) * num_parts; ++part) {
        const int64 first = (part * warps + warp) * slots_per_warp, last = min(first + slots_per_warp, num_slots);
        for (int e = lane; e < num_experts; e += 32) mine[e] = 0;
        __syncwarp();
        for_each_slot<BITS>(ids, first, last, num_experts, [&](int64 slot, int expert, unsigned peers) {
            if (token_expert_indices && slot < last) token_expert_indices[slot] = expert;
            if (expert >= 0 && is_leader(peers)) mine[expert] += static_cast<uint16>(__popc(peers));
            __syncwarp();
        });
        __syncthreads();
        for (int i = threadIdx.x; i < cells; i += blockDim.x) warp_counts[part * cells + i] = counts[i];
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int total = totals[e];
#pragma unroll 8
            for (int w = 0; w < warps; ++w) total += counts[w * num_experts + e];
            totals[e] = total;
        }
        __syncthreads();
    }
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x)
        block_counts[blockIdx.x * static_cast<int64>(num_experts) + e] = totals[e];
}

__device__ __forceinline__ int warp_scan(int value) {  // inclusive
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int before = __shfl_up_sync(0xffffffffu, value, step);
        if ((threadIdx.x & 31) >= step) value += before;
    }
    return value;
}

// values[0..n) to their exclusive prefix sums, and values[n] = their total. All threads of the block call it.
__device__ void block_scan(int* values, int n) {
    __shared__ int warp_totals[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int carry = 0;
    for (int base = 0; base < n; base += blockDim.x) {
        const int i = base + threadIdx.x, value = i < n ? values[i] : 0;
        const int scanned = warp_scan(value);
        if (lane == 31) warp_totals[warp] = scanned;
        __syncthreads();
        const int totals = warp_scan(lane < warps ? warp_totals[lane] : 0);
        const int before = __shfl_sync(0xffffffffu, totals, max(warp - 1, 0));
        if (i < n) values[i] = carry + (warp ? before : 0) + scanned - value;
        carry += __shfl_sync(0xffffffffu, totals, 31);
        __syncthreads();
    }
    if (threadIdx.x == 0) values[n] = carry;
    __syncthreads();
}

// The expert e with starts[e] <= value < starts[e + 1]; starts[0] = 0 <= value < starts[num_experts].
__device__ __forceinline__ int find_expert(const int* starts, int num_experts, int value) {
    int low = 0, high = num_experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= value ? low : high) = middle;
    }
    return low;
}

// Writes one part's routed slots, collected by expert, as tokens: places of the part to rows by `shift`.
__device__ __forceinline__ void write_runs(const uint16* collected, const int* starts, const int* shift, int num_experts,
                                           int64 part_first, int k, int* expert_token_indices) {
    constexpr int CHUNK = 256;  // places a warp writes in one go
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31, count = starts[num_experts];
    // slot / k by multiplication, exact while (65536 + k) * k < 2^32
    const unsigned long long reciprocal = ((1ull << 32) + k - 1) / k;
    const unsigned first_within = static_cast<unsigned>(part_first % k);
    const int first_token = static_cast<int>(part_first / k);
    for (int begin = warp * CHUNK; begin < count; begin += warps * CHUNK) {
        int expert = find_expert(starts, num_experts, begin);
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) {
            const int place = begin + 32 * i + lane;
            if (place >= count) break;
            while (place >= starts[expert + 1]) ++expert;
            const int token = first_token + static_cast<int>((first_within + collected[place]) * reciprocal >> 32);
            expert_token_indices[place + shift[expert]] = token;
        }
    }
}

template <int BITS>
__device__ void route(const int* ids, const uint16* warp_counts, const int* block_counts, int* expert_token_indices,
                      int* expert_token_offsets, int* token_index_map, int* row_tiles, int64 num_slots, int k, int num_experts,
                      int64 slots_per_warp, int64 num_parts, int tile_rows) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31, cells = warps * num_experts;
    int* offsets = reinterpret_cast<int*>(dynamic_shared);                    // (E+1,) expert_token_offsets
    int* rows = offsets + num_experts + 1;                                    // (E+1,) this part's first row per expert
    int* starts = rows + num_experts + 1;                                     // (E+1,) where it starts in `collected`
    int* shift = starts + num_experts + 1;                                    // (E+1,) from there to its row
    uint16* next = reinterpret_cast<uint16*>(shift + num_experts + 1);        // (W, E) next place in the expert's run
    uint16* collected = next + cells;                                         // the part's routed slots, by expert

    // Slots per expert of all blocks, and of those before this one: `groups` threads per expert share the blocks.
    const int groups = max(1, static_cast<int>(blockDim.x) / num_experts), group = threadIdx.x / num_experts;
    int* partial = reinterpret_cast<int*>(next);  // (groups, E) twice: next and collected are not in use yet
    for (int e = groups > 1 ? threadIdx.x % num_experts : threadIdx.x; e < num_experts; e += blockDim.x) {
        if (groups > 1 && group >= groups) break;
        int total = 0, before = 0;
#pragma unroll 4
        for (unsigned b = groups > 1 ? group : 0; b < gridDim.x; b += groups) {
            const int count = block_counts[b * static_cast<int64>(num_experts) + e];
            total += count;
            if (b < blockIdx.x) before += count;
        }
        if (groups > 1) {
            partial[2 * (group * num_experts + e)] = total;
            partial[2 * (group * num_experts + e) + 1] = before;
        } else {
            offsets[e] = total;
            rows[e] = before;
        }
    }
    __syncthreads();
    if (groups > 1) {
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int total = 0, before = 0;
            for (int g = 0; g < groups; ++g) {
                total += partial[2 * (g * num_experts + e)];
                before += partial[2 * (g * num_experts + e) + 1];
            }
            offsets[e] = total;
            rows[e] = before;
        }
        __syncthreads();
    }
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) shift[e] = (offsets[e] + tile_rows - 1) / tile_rows;
    __syncthreads();
    block_scan(offsets, num_experts);
    block_scan(shift, num_experts);  // for now the first tile of each expert
    const int num_tiles = shift[num_experts], routed = offsets[num_experts];
    for (int64 tile = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; tile < num_tiles; tile += gridDim.x * blockDim.x) {
        const int e = find_expert(shift, num_experts, static_cast<int>(tile));
        row_tiles[2 * (tile + 1)] = e;
        row_tiles[2 * (tile + 1) + 1] = static_cast<int>(offsets[e] + (tile - shift[e]) * tile_rows);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) row_tiles[0] = num_tiles, row_tiles[1] = tile_rows;
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += offsets[e];
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) expert_token_offsets[e] = offsets[e];

    for (int64 part = blockIdx.x * num_parts; part < (blockIdx.x + 1) * num_parts; ++part) {
        const int64 part_first = part * warps * slots_per_warp, first = part_first + warp * slots_per_warp;
        const int64 last = min(first + slots_per_warp, num_slots);
        __syncthreads();
        for (int i = threadIdx.x; i < cells; i += blockDim.x) next[i] = warp_counts[part * cells + i];
        __syncthreads();
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {  // counts to places within the expert's run
            int place = 0;
            for (int w = 0; w < warps; ++w) {
                const int count = next[w * num_experts + e];
                next[w * num_experts + e] = static_cast<uint16>(place);
                place += count;
            }
            starts[e] = place;
        }
        __syncthreads();
        block_scan(starts, num_experts);
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            shift[e] = rows[e] - starts[e];
            rows[e] += starts[e + 1] - starts[e];
        }
        __syncthreads();

        uint16* mine = next + warp * num_experts;
        for_each_slot<BITS>(ids, first, last, num_experts, [&](int64 slot, int expert, unsigned peers) {
            int place = 0;
            if (expert >= 0) place = mine[expert] + __popc(peers & ((1u << lane) - 1u));
            __syncwarp();
            if (expert >= 0) {
                if (is_leader(peers)) mine[expert] = static_cast<uint16>(place + __popc(peers));
                place += starts[expert];
                collected[place] = static_cast<uint16>(slot - part_first);
            }
            __syncwarp();
            if (slot < last) {
                token_index_map[slot] = expert >= 0 ? place + shift[expert] : -1;
                if (slot >= routed) expert_token_indices[slot] = -1;
            }
        });
        __syncthreads();
        write_runs(collected, starts, shift, num_experts, part_first, k, expert_token_indices);
    }
}

// The number of ballots is a constant of the code: E up to 16, 128, 256 and 4096 experts.
#define WITH_BITS(CALL)          \
    if (num_experts <= 16)       \
        CALL(4);                 \
    else if (num_experts <= 128) \
        CALL(7);                 \
    else if (num_experts <= 256) \
        CALL(8);                 \
    else                         \
        CALL(12);

#define COUNT(BITS)                                                                                                          \
    count<BITS>(ids, token_expert_indices, warp_counts, block_counts, num_slots, static_cast<int>(num_experts), slots_per_warp, \
                num_parts)
#define ROUTE(BITS)                                                                                                       \
    route<BITS>(token_expert_indices, warp_counts, block_counts, expert_token_indices, expert_token_offsets,              \
                token_index_map, row_tiles, num_slots, static_cast<int>(k), static_cast<int>(num_experts), slots_per_warp, \
                num_parts, static_cast<int>(tile_rows))

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_count_int32(const int* ids, int* token_expert_indices, uint16* warp_counts, int* block_counts, int64 num_slots,
                         int64 num_experts, int64 slots_per_warp, int64 num_parts) {
    WITH_BITS(COUNT)
}

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_count_int64(const long long* ids, int* token_expert_indices, uint16* warp_counts, int* block_counts,
                         int64 num_slots, int64 num_experts, int64 slots_per_warp, int64 num_parts) {
    WITH_BITS(COUNT)
}

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_route(const int* token_expert_indices, const uint16* warp_counts, const int* block_counts,
                   int* expert_token_indices, int* expert_token_offsets, int* token_index_map, int* row_tiles, int64 num_slots,
                   int64 k, int64 num_experts, int64 slots_per_warp, int64 num_parts, int64 tile_rows) {
    WITH_BITS(ROUTE)
}
