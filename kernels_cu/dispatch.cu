// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in
// the three steps of section 4.2, without a sort and without atomics, stable and deterministic.
//
//   ids                   (L*k,)        int32 or int64, in   id < 0 or >= E: no expert in this slot
//   token_expert_indices  (L*k,)        int32, out           from int64 ids, -1 for "none"; null where ids are int32
//   ranks                 (L*k,)        uint16, workspace    slots of the same expert before, in the same range
//   range_counts          (B, P, W, E)  uint16, workspace    slots of each expert in each range
//   block_counts          (B, E)        int32, workspace     slots of each expert in each block
//   expert_token_indices  (L*k,)        int32, out           token of each routed slot; -1 past the last
//   expert_token_offsets  (E+1,)        int32, out
//   token_index_map       (L*k,)        int32, out           position in expert_token_indices, or -1
//   row_tiles             (T+1, 2)      int32, out           [0] = (count, tile_rows), then (expert, first row)
//
// num_slots = L*k, num_experts = E <= 4096. Launch: both kernels take B blocks, at most one per multiprocessor. A block
// owns P = num_parts consecutive parts of W = num_ranges ranges (a power of two) of range_slots consecutive slots, a
// multiple of 32; W * range_slots <= 65536. dispatch_count has W warps, one per range of a part, and 2*W*E + 4*E bytes
// of dynamic shared memory; dispatch_route max(256, 32*W) threads and 22*(E+1) + 2*W*E + max(2*W*range_slots +
// W*range_slots/32, 8*threads) bytes, as has dispatch_block, which does the work of both where B = 1.
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
// instruction behind __match_any_sync takes time with every distinct value (67 us against 40 at 128 experts).
template <int BITS>
__device__ __forceinline__ unsigned peers_of(int expert) {
    unsigned peers = __ballot_sync(0xffffffffu, expert >= 0);
#pragma unroll
    for (int b = 0; b < BITS; ++b) {
        const int bit = static_cast<int>(static_cast<unsigned>(expert) << (31 - b)) >> 31;  // all ones or zero
        peers &= ~(__ballot_sync(0xffffffffu, bit) ^ bit);
    }
    return peers;
}

// Copies counts (an even number of them, on 4 bytes).
__device__ __forceinline__ void copy_counts(uint16* to, const uint16* from, int n) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x)
        reinterpret_cast<unsigned*>(to)[i] = reinterpret_cast<const unsigned*>(from)[i];
}

template <int BITS, class Id>
__device__ void count(const Id* ids, int* token_expert_indices, uint16* ranks, uint16* range_counts, int* block_counts,
                      int64 num_slots, int num_experts, int num_ranges, int range_slots, int64 num_parts) {
    constexpr int ROUNDS = 8;  // so many times 32 slots are loaded while as many are worked on
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, cells = num_ranges * num_experts;
    int* totals = reinterpret_cast<int*>(dynamic_shared);              // (E,)
    uint16* counts = reinterpret_cast<uint16*>(totals + num_experts);  // (W, E)
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) totals[e] = 0;
    for (int64 part = blockIdx.x * num_parts; part < (blockIdx.x + 1) * num_parts; ++part) {
        for (int i = threadIdx.x; i < cells / 2; i += blockDim.x) reinterpret_cast<unsigned*>(counts)[i] = 0;
        __syncthreads();
        uint16* mine = counts + warp * num_experts;
        const int64 first = (part * num_ranges + warp) * range_slots;
        const int64 left = warp < num_ranges ? num_slots - first : 0;
        const int slots = static_cast<int>(max(min(left, static_cast<int64>(range_slots)), 0ll));
        ids += first, ranks += first, token_expert_indices += first;
        Id loaded[ROUNDS];
        auto load = [&](int base) {
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int slot = base + 32 * i + lane;
                loaded[i] = slot < slots ? ids[slot] : Id(-1);
            }
        };
        load(0);
        for (int base = 0; base < slots; base += 32 * ROUNDS) {
            Id now[ROUNDS];
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) now[i] = loaded[i];
            load(base + 32 * ROUNDS);
            // The ballots of several rounds are independent of each other; the counters follow round by round.
#pragma unroll
            for (int i0 = 0; i0 < ROUNDS; i0 += 4) {
                if (base + 32 * i0 >= slots) break;
                int experts[4];
                unsigned peers[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Id id = now[i0 + i];
                    experts[i] = id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
                    peers[i] = peers_of<BITS>(experts[i]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int slot = base + 32 * (i0 + i) + lane;
                    const unsigned before = peers[i] & ((1u << lane) - 1u);
                    int rank = 0;
                    if (experts[i] >= 0) rank = mine[experts[i]] + __popc(before);
                    __syncwarp();
                    if (experts[i] >= 0 && before == 0) mine[experts[i]] = static_cast<uint16>(rank + __popc(peers[i]));
                    __syncwarp();
                    if (slot < slots) {
                        ranks[slot] = static_cast<uint16>(rank);
                        if (sizeof(Id) == 8) token_expert_indices[slot] = experts[i];
                    }
                }
            }
        }
        ids -= first, ranks -= first, token_expert_indices -= first;
        __syncthreads();
        copy_counts(range_counts + part * cells, counts, cells);
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int total = totals[e];
#pragma unroll 8
            for (int w = 0; w < num_ranges; ++w) total += counts[w * num_experts + e];
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

// values[0..n) to their exclusive prefix sums, and values[n] = their total; by one warp, a lane taking n / 32 of them.
__device__ void exclusive_sums(int* values, int n) {
    const int lane = threadIdx.x & 31, chunk = (n + 31) / 32, begin = min(lane * chunk, n), end = min(begin + chunk, n);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += values[i];
    const int through = warp_scan(sum);
    int before = through - sum;
    for (int i = begin; i < end; ++i) {
        const int value = values[i];
        values[i] = before;
        before += value;
    }
    if (lane == 31) values[n] = through;
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

// Writes one part's routed slots, collected by expert, as tokens: places of the part to rows by `shift`. `width` lanes
// (8 or 32) take one segment of 8 * width places of one expert's run; segments[e] is the first segment of expert e,
// segment_experts its inverse.
__device__ __forceinline__ void write_runs(const uint16* collected, const int* starts, const int* shift, const int* segments,
                                           const uint16* segment_experts, int num_experts, int width, int first_slot, int k,
                                           int* expert_token_indices) {
    // slot / k by multiplication, exact while (65536 + k) * k < 2^32
    const unsigned long long reciprocal = 0xffffffffu / static_cast<unsigned>(k) + 1ull;  // 2^32 / k, rounded up
    const int first_token = first_slot / k;
    const unsigned first_within = static_cast<unsigned>(first_slot - first_token * k);
    const int groups = blockDim.x / width, group = threadIdx.x / width, lane = threadIdx.x % width, count = segments[num_experts];
    for (int segment = group; segment < count; segment += groups) {
        const int expert = segment_experts[segment];
        const int begin = starts[expert] + (segment - segments[expert]) * 8 * width, end = min(begin + 8 * width, starts[expert + 1]);
        int* rows = expert_token_indices + shift[expert];
#pragma unroll 4
        for (int place = begin + lane; place < end; place += width)
            rows[place] = first_token + static_cast<int>((first_within + collected[place]) * reciprocal >> 32);
    }
}

// Adds up what each block counted, over all blocks and over those before this one; `scratch`: 2 ints per thread.
__device__ void sum_blocks(const int* block_counts, int num_experts, int* totals, int* before, int* scratch) {
    // So many threads share the blocks of one expert; beyond 1024 experts a thread takes several, one after another.
    const int groups = max(1, static_cast<int>(blockDim.x) / num_experts), group = threadIdx.x / num_experts;
    if (groups == 1) {
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int total = 0, mine = 0;
#pragma unroll 16
            for (unsigned b = 0; b < gridDim.x; ++b) {
                const int count = block_counts[b * num_experts + e];
                total += count;
                mine += b < blockIdx.x ? count : 0;
            }
            totals[e] = total;
            before[e] = mine;
        }
    } else {
        if (group < groups) {
            int total = 0, mine = 0;
#pragma unroll 16
            for (unsigned b = group; b < gridDim.x; b += groups) {
                const int count = block_counts[b * num_experts + threadIdx.x % num_experts];
                total += count;
                mine += b < blockIdx.x ? count : 0;
            }
            scratch[threadIdx.x] = total;
            scratch[blockDim.x + threadIdx.x] = mine;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int total = 0, mine = 0;
            for (int g = 0; g < groups; ++g) {
                total += scratch[g * num_experts + e];
                mine += scratch[blockDim.x + g * num_experts + e];
            }
            totals[e] = total;
            before[e] = mine;
        }
    }
    __syncthreads();
}

// Four consecutive slots from `slot` on, of which `valid` exist; -1 beyond.
__device__ __forceinline__ int4 load_ids(const int* ids, int64 slot, int valid) {
    if (valid >= 4 && reinterpret_cast<unsigned long long>(ids) % 16 == 0) return *reinterpret_cast<const int4*>(ids + slot);
    return make_int4(valid > 0 ? ids[slot] : -1, valid > 1 ? ids[slot + 1] : -1, valid > 2 ? ids[slot + 2] : -1,
                     valid > 3 ? ids[slot + 3] : -1);
}

__device__ void route(const int* token_expert_indices, const uint16* ranks, const uint16* range_counts, const int* block_counts,
                      int* expert_token_indices, int* expert_token_offsets, int* token_index_map, int* row_tiles,
                      int64 num_slots, int k, int num_experts, int num_ranges, int range_slots, int64 num_parts, int tile_rows) {
    constexpr int ROUNDS = 4;  // so many times 4 slots are loaded before the first is used
    const int cells = num_ranges * num_experts;
    int* offsets = reinterpret_cast<int*>(dynamic_shared);              // (E+1,) expert_token_offsets
    int* rows = offsets + num_experts + 1;                              // (E+1,) this part's first row per expert
    int* starts = rows + num_experts + 1;                               // (E+1,) where it starts in `collected`
    int* shift = starts + num_experts + 1;                              // (E+1,) from there to its row
    int* segments = shift + num_experts + 1;                            // (E+1,) first segment of its run, for write_runs
    uint16* places = reinterpret_cast<uint16*>(segments + num_experts + 1);  // (W, E) where a range starts in `collected`
    uint16* collected = places + cells;                                 // the part's routed slots, by expert
    uint16* segment_experts = collected + num_ranges * range_slots;     // the expert of each segment
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = num_ranges * range_slots >= 64 * num_experts ? 32 : 8;  // long runs or short ones

    copy_counts(places, range_counts + blockIdx.x * num_parts * cells, cells);
    sum_blocks(block_counts, num_experts, offsets, rows, reinterpret_cast<int*>(segments + num_experts + 1) + (cells + 1) / 2);
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x)
        shift[e] = (offsets[e] + tile_rows - 1) / tile_rows;
    __syncthreads();
    if (warp == 0) exclusive_sums(offsets, num_experts);
    if (warp == 1) exclusive_sums(shift, num_experts);  // for now the first tile of each expert
    __syncthreads();
    const int num_tiles = shift[num_experts], routed = offsets[num_experts];
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x, threads = static_cast<int64>(gridDim.x) * blockDim.x;
    for (int64 tile = thread; tile < num_tiles; tile += threads) {
        const int e = find_expert(shift, num_experts, static_cast<int>(tile));
        row_tiles[2 * (tile + 1)] = e;
        row_tiles[2 * (tile + 1) + 1] = static_cast<int>(offsets[e] + (tile - shift[e]) * tile_rows);
    }
    for (int64 i = routed + thread; i < num_slots; i += threads) expert_token_indices[i] = -1;
    if (thread == 0) row_tiles[0] = num_tiles, row_tiles[1] = tile_rows;
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += offsets[e];
    if (blockIdx.x == 0)
        for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) expert_token_offsets[e] = offsets[e];

    for (int64 part = blockIdx.x * num_parts; part < (blockIdx.x + 1) * num_parts; ++part) {
        const int64 part_first = part * num_ranges * range_slots;
        __syncthreads();
        if (part > blockIdx.x * num_parts) copy_counts(places, range_counts + part * cells, cells);
        __syncthreads();
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            int sum = 0;
#pragma unroll 8
            for (int w = 0; w < num_ranges; ++w) sum += places[w * num_experts + e];
            starts[e] = sum;
            segments[e] = (sum + 8 * width - 1) / (8 * width);
        }
        __syncthreads();
        if (warp == 0) exclusive_sums(starts, num_experts);
        if (warp == 1) exclusive_sums(segments, num_experts);
        __syncthreads();
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
            shift[e] = rows[e] - starts[e];
            rows[e] += starts[e + 1] - starts[e];
            for (int segment = segments[e]; segment < segments[e + 1]; ++segment)
                segment_experts[segment] = static_cast<uint16>(e);
            int place = starts[e];
            for (int w0 = 0; w0 < num_ranges; w0 += 4) {
                int counts[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) counts[i] = w0 + i < num_ranges ? places[(w0 + i) * num_experts + e] : 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (w0 + i < num_ranges) places[(w0 + i) * num_experts + e] = static_cast<uint16>(place);
                    place += counts[i];
                }
            }
        }
        __syncthreads();

        // 32 / W warps share a range; a thread takes 4 consecutive slots at a time.
        const int range = warp & (num_ranges - 1), warps_per_range = blockDim.x / 32 / num_ranges;
        const int first_in_part = range * range_slots;
        const int64 first = part_first + first_in_part;
        const int slots = static_cast<int>(max(min(num_slots - first, static_cast<int64>(range_slots)), 0ll));
        const uint16* range_places = places + range * num_experts;
        const int stride = warps_per_range * 128;
        for (int base = (warp / num_ranges * 32 + lane) * 4; base < slots; base += ROUNDS * stride) {
            int4 ids4[ROUNDS];
            uint2 ranks4[ROUNDS];
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int slot = base + i * stride;
                ids4[i] = load_ids(token_expert_indices, first + slot, slots - slot);
                if (slot < slots) ranks4[i] = *reinterpret_cast<const uint2*>(ranks + first + slot);
            }
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int slot = base + i * stride, valid = slots - slot;
                const int ids[4] = {ids4[i].x, ids4[i].y, ids4[i].z, ids4[i].w};
                const unsigned before[4] = {ranks4[i].x & 0xffff, ranks4[i].x >> 16, ranks4[i].y & 0xffff, ranks4[i].y >> 16};
                int map[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    map[j] = -1;
                    if (ids[j] >= 0 && ids[j] < num_experts) {
                        const int place = range_places[ids[j]] + static_cast<int>(before[j]);
                        collected[place] = static_cast<uint16>(first_in_part + slot + j);
                        map[j] = place + shift[ids[j]];
                    }
                }
                if (valid >= 4) {
                    *reinterpret_cast<int4*>(token_index_map + first + slot) = make_int4(map[0], map[1], map[2], map[3]);
                } else {
#pragma unroll
                    for (int j = 0; j < 3; ++j)
                        if (j < valid) token_index_map[first + slot + j] = map[j];
                }
            }
        }
        __syncthreads();
        write_runs(collected, starts, shift, segments, segment_experts, num_experts, width, static_cast<int>(part_first), k,
                   expert_token_indices);
    }
}

// The number of ballots is a constant of the code: for up to 16, 128, 256 and 4096 experts.
#define WITH_BITS(CALL)          \
    if (num_experts <= 16)       \
        CALL(4);                 \
    else if (num_experts <= 128) \
        CALL(7);                 \
    else if (num_experts <= 256) \
        CALL(8);                 \
    else                         \
        CALL(12);

#define COUNT(BITS)                                                                                                     \
    count<BITS>(ids, token_expert_indices, ranks, range_counts, block_counts, num_slots, static_cast<int>(num_experts), \
                static_cast<int>(num_ranges), static_cast<int>(range_slots), num_parts)
#define ROUTE(IDS)                                                                                                   \
    route(IDS, ranks, range_counts, block_counts, expert_token_indices, expert_token_offsets, token_index_map,       \
          row_tiles, num_slots, static_cast<int>(k), static_cast<int>(num_experts), static_cast<int>(num_ranges),    \
          static_cast<int>(range_slots), num_parts, static_cast<int>(tile_rows))

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_count_int32(const int* ids, int* token_expert_indices, uint16* ranks, uint16* range_counts, int* block_counts,
                         int64 num_slots, int64 num_experts, int64 num_ranges, int64 range_slots, int64 num_parts) {
    WITH_BITS(COUNT)
}

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_count_int64(const long long* ids, int* token_expert_indices, uint16* ranks, uint16* range_counts, int* block_counts,
                         int64 num_slots, int64 num_experts, int64 num_ranges, int64 range_slots, int64 num_parts) {
    WITH_BITS(COUNT)
}

extern "C" __global__ void __launch_bounds__(1024)
    dispatch_route(const int* token_expert_indices, const uint16* ranks, const uint16* range_counts, const int* block_counts,
                   int* expert_token_indices, int* expert_token_offsets, int* token_index_map, int* row_tiles, int64 num_slots,
                   int64 k, int64 num_experts, int64 num_ranges, int64 range_slots, int64 num_parts, int64 tile_rows) {
    ROUTE(token_expert_indices);
}

// Both kernels in one launch of one block.
extern "C" __global__ void __launch_bounds__(1024)
    dispatch_block_int32(const int* ids, int* token_expert_indices, uint16* ranks, uint16* range_counts, int* block_counts,
                         int* expert_token_indices, int* expert_token_offsets, int* token_index_map, int* row_tiles,
                         int64 num_slots, int64 k, int64 num_experts, int64 num_ranges, int64 range_slots, int64 num_parts,
                         int64 tile_rows) {
    WITH_BITS(COUNT)
    __syncthreads();
    ROUTE(ids);
}
