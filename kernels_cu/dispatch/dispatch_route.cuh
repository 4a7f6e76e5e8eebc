// The routing kernel of dispatch.cu, phase by phase. dispatch.cu lists the phases, the steps of the paper, and the launch.
#pragma once
#include "dispatch_matrix.cuh"

template <class Id>
struct DispatchRouteParams {
    const Id* ids;              // (L*k,) int32 or int64, in
    int* token_expert_indices;  // (L*k,) int32, out; null where ids are int32
    const int* block_counts;    // (ceil(B/G), G, E') int32, in; null if one part holds all slots
    int* expert_token_indices;  // (L*k,) int32, out: token of each routed slot; -1 past the last
    int* expert_token_offsets;  // (E+1,) int32, out
    int* token_index_map;       // (L*k,) int32, out: position in expert_token_indices, or -1
    int* row_tiles;             // (T+1, 2) int32, out: [0] = (count, TILE_ROWS), then (expert, first row)
    int* experts_by_load;       // (E,) int32, out: ids by falling slot count, equal ones by rising id
    int64 block_slots;
    int num_slots, k, num_experts, columns, part_slots, counted_together;
};

constexpr int ROUTE_INT32_LOADS = 6;  // times 4 ids of a thread on their way from global memory
constexpr int ROUTE_INT64_LOADS = 2;
constexpr int RANKED_PAIRS = 4;     // pairs of slots on their way through the counters
constexpr int PLACED_PAIRS = 4;     // pairs of slots whose places are looked up together
constexpr int WRITTEN_SLOTS = 4;    // slots of a thread that are read together when tokens are written
constexpr int SUMMED_ROWS = 6;      // rows of block_counts of a thread on their way from global memory
constexpr int SORTING_THREADS = 8;  // threads that find the rank of one expert in experts_by_load
constexpr int BEYOND_ANY_PLACE = 65536;
static_assert(EXPERT_LISTS == 5, "counts (E), offsets, tiles, to_position (E+1 each), starts (E+2)");

// The lists and arrays of a block in dynamic shared memory, in the order of their addresses.
struct RouteViews {
    int* counts;         // (E,) slots of each expert in all blocks
    int* offsets;        // (E+1,) expert_token_offsets
    int* tiles;          // (E+1,) first row tile of each expert
    int* to_position;    // (E+1,) position less place, of the slots of each matrix row in this part
    int* starts;         // (E+2,) place of the first slot of each matrix row; starts[E+1] is part_slots
    unsigned* matrix;    // (E+1, C/2) words of two counters: columns c (low half) and c + C/2
    int2* scratch;       // (groups, E') sums of each group of sum_blocks: (all blocks, blocks before this one)
    unsigned* by_place;  // (part_slots,) over matrix and scratch: (4 * matrix row) << 16 | slot within the part
    unsigned* by_slot;   // (part_slots,) 4 * matrix row, then (4 * matrix row) << 16 | rank in its run, then .. | place
    int matrix_offset;   // bytes before the matrix
};

// Consecutive slots that a block works on together.
struct Part {
    unsigned first;  // the first slot
    int slots;
};

// A column of counters, and the run of consecutive slots that is counted in it.
struct Column {
    bool is_low;      // which half of the word its counters are
    unsigned offset;  // bytes of its word in the matrix's first row, in dynamic shared memory
    uint2* run;       // (pairs,) slots of by_slot
    int pairs;
    int first_pair, pair_step;  // pairs of the run that this thread places: first_pair, first_pair + pair_step, ...
};

// Groups of threads that each sum the counts of all experts over some blocks.
__device__ __forceinline__ int sum_groups(int num_experts, int threads) {
    const int groups = 4u * threads / static_cast<unsigned>(stride_of(num_experts));
    return groups < MIN_GROUPS ? 1 : groups;  // so many experts leave little shared memory
}

__device__ __forceinline__ RouteViews route_views(int num_experts, int columns, int part_slots, int groups) {
    const int num_rows = num_experts + 1, cells = columns / 2 * num_rows;
    RouteViews views;
    views.counts = reinterpret_cast<int*>(dynamic_shared);
    views.offsets = views.counts + num_experts;
    views.tiles = views.offsets + num_rows;
    views.to_position = views.tiles + num_rows;
    views.starts = views.to_position + num_rows;
    views.matrix_offset = (4 * EXPERT_LISTS * num_rows + 15) / 16 * 16;
    views.matrix = reinterpret_cast<unsigned*>(dynamic_shared + views.matrix_offset);
    views.scratch = reinterpret_cast<int2*>(views.matrix + cells);
    views.by_place = views.matrix;
    views.by_slot = views.matrix + max(cells + (groups > 1 ? 2 * groups * stride_of(num_experts) : 0), part_slots);
    return views;
}

__device__ __forceinline__ Column column_of_thread(const RouteViews& views, int columns, int part_slots) {
    const int column = threadIdx.x & (columns - 1), half_columns = columns / 2;
    Column found;
    found.pairs = part_slots >> log2_of(columns) + 1;
    found.is_low = column < half_columns;
    found.offset = views.matrix_offset + 4 * (column & (half_columns - 1));
    found.run = reinterpret_cast<uint2*>(views.by_slot) + column * found.pairs;
    found.first_pair = threadIdx.x >> log2_of(columns);
    found.pair_step = blockDim.x >> log2_of(columns);
    return found;
}

// The word of a column in a matrix row; row4 is 4 * the row.
__device__ __forceinline__ unsigned char* cell(const Column& column, unsigned row4, int half_columns) {
    return dynamic_shared + (column.offset + row4 * half_columns);
}

// Loads the first ids of a part from slot `base` on, all but those of its last slots % 4.
template <class Id, int LOADS>
__device__ __forceinline__ void load_part(Ids4<Id> (&loaded)[LOADS], const Id* ids, const Part& part, int base, bool aligned) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
        loaded[i] = load_ids(ids + part.first + slot, slot + 3 < part.slots, aligned);
    }
}

// Writes 4 * the matrix row of every slot to by_slot, and int32 copies of int64 ids to token_expert_indices. `loaded` has
// what load_part gives for slot 0. Slots past the part's end go to the row of "none".
template <class Id, int LOADS>
__device__ __forceinline__ void store_rows(Ids4<Id> (&loaded)[LOADS], const Id* ids, int* token_expert_indices,
                                           const RouteViews& views, const Part& part, int num_experts, int part_slots,
                                           bool aligned) {
    for (int base = 0;;) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
            if (slot < part_slots) {
                unsigned row4[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) row4[j] = row4_of(loaded[i].of[j], num_experts);
                *reinterpret_cast<uint4*>(views.by_slot + slot) = make_uint4(row4[0], row4[1], row4[2], row4[3]);
                if (sizeof(Id) == 8 && slot + 3 < part.slots) {
                    int experts[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) experts[j] = expert_of(row4[j], num_experts);
                    *reinterpret_cast<int4*>(token_expert_indices + part.first + slot) =
                        make_int4(experts[0], experts[1], experts[2], experts[3]);
                }
            }
        }
        base += LOADS * 4 * blockDim.x;
        if (base >= part_slots) break;
        load_part(loaded, ids, part, base, aligned);
        issue_loads_now();
    }
    // The last slots % 4, by the thread that wrote "none" for them above.
    if ((part.slots & 3) != 0 && (part.slots / 4) % blockDim.x == threadIdx.x) {
        for (int slot = part.slots & ~3; slot < part.slots; ++slot) {
            const unsigned row4 = row4_of(ids[part.first + slot], num_experts);
            views.by_slot[slot] = row4;
            if (sizeof(Id) == 8) token_expert_indices[part.first + slot] = expert_of(row4, num_experts);
        }
    }
}

// Counts up to RANKED_PAIRS pairs of slots, in their order. What a slot finds in its counter is its rank in the run.
__device__ __forceinline__ void rank_pairs(const uint2 (&rows4)[RANKED_PAIRS], uint2* to, int left, const Column& column,
                                           int half_columns) {
    const unsigned one = column.is_low ? 1 : 0x10000;
    const unsigned bytes = column.is_low ? 0x5410 : 0x5432;  // (row4 << 16) | the counter's half of the word
    unsigned old[2 * RANKED_PAIRS];
#pragma unroll
    for (int j = 0; j < 2 * RANKED_PAIRS; ++j)
        if (j / 2 < left) {
            const unsigned row4 = j % 2 == 0 ? rows4[j / 2].x : rows4[j / 2].y;
            old[j] = atomicAdd(reinterpret_cast<unsigned*>(cell(column, row4, half_columns)), one);
        }
#pragma unroll
    for (int j = 0; j < RANKED_PAIRS; ++j)
        if (j < left)
            to[j] = make_uint2(__byte_perm(old[2 * j], rows4[j].x, bytes), __byte_perm(old[2 * j + 1], rows4[j].y, bytes));
}

// One thread per column ranks the slots of the column's run, and leaves in the column how many slots of the run each
// expert has.
__device__ __forceinline__ void rank_run(const Column& column, int half_columns) {
    uint2 now[RANKED_PAIRS], next[RANKED_PAIRS];
#pragma unroll
    for (int j = 0; j < RANKED_PAIRS; ++j) now[j] = column.run[min(j, column.pairs - 1)];
    uint2* at = column.run;
    int left = column.pairs;
#pragma unroll 1
    for (; left >= 2 * RANKED_PAIRS; left -= RANKED_PAIRS, at += RANKED_PAIRS) {
#pragma unroll
        for (int j = 0; j < RANKED_PAIRS; ++j) next[j] = at[RANKED_PAIRS + j];
        rank_pairs(now, at, RANKED_PAIRS, column, half_columns);
#pragma unroll
        for (int j = 0; j < RANKED_PAIRS; ++j) now[j] = next[j];
    }
#pragma unroll
    for (int j = 0; j < RANKED_PAIRS; ++j) next[j] = at[min(RANKED_PAIRS + j, left - 1)];
    rank_pairs(now, at, left, column, half_columns);
    rank_pairs(next, at + RANKED_PAIRS, left - RANKED_PAIRS, column, half_columns);
}

// Sums block_counts over all blocks and over the blocks before this one, by `threads` threads of which this is `thread`.
// A thread takes four experts of every groups-th row. One group writes counts and to_position, several write scratch.
__device__ __forceinline__ void sum_blocks(const int* block_counts, const RouteViews& views, int num_experts,
                                           int counted_together, int groups, int thread, int threads) {
    wait_for_last_launch();  // waits for dispatch_count
    const int fours = stride_of(num_experts) / 4;
    const int rows = (gridDim.x + counted_together - 1) / counted_together, this_row = blockIdx.x / counted_together;
    for (int i = thread; i < groups * fours; i += threads) {
        const int group = static_cast<unsigned>(i) / static_cast<unsigned>(fours);
        const int4* of_experts = reinterpret_cast<const int4*>(block_counts) + (i - group * fours);
        int4 total = make_int4(0, 0, 0, 0), before = total;
        // With G = 2 the second block of a row comes after the first, whose counts are stored beside the row's sum.
        if (group == 0 && blockIdx.x != this_row * counted_together) before = of_experts[(2 * this_row + 1) * fours];
        for (int row0 = group; row0 < rows; row0 += SUMMED_ROWS * groups) {
            int4 n[SUMMED_ROWS];
#pragma unroll
            for (int j = 0; j < SUMMED_ROWS; ++j) {
                n[j] = make_int4(0, 0, 0, 0);
                if (row0 + j * groups < rows) n[j] = of_experts[(row0 + j * groups) * counted_together * fours];
            }
#pragma unroll
            for (int j = 0; j < SUMMED_ROWS; ++j) {
                total.x += n[j].x, total.y += n[j].y, total.z += n[j].z, total.w += n[j].w;
                if (row0 + j * groups < this_row) before.x += n[j].x, before.y += n[j].y, before.z += n[j].z, before.w += n[j].w;
            }
        }
        if (groups == 1) {
            const int totals[4] = {total.x, total.y, total.z, total.w}, befores[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < num_experts) views.counts[4 * i + j] = totals[j], views.to_position[4 * i + j] = befores[j];
        } else {
            int4* to = reinterpret_cast<int4*>(views.scratch + 4 * i);
            to[0] = make_int4(total.x, before.x, total.y, before.y);
            to[1] = make_int4(total.z, before.z, total.w, before.w);
        }
    }
}

// Adds the sums of the groups of sum_blocks, into counts and to_position.
__device__ __forceinline__ void add_groups(const RouteViews& views, int num_experts, int groups) {
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
        int total = 0, before = 0;
#pragma unroll 4
        for (int group = 0; group < groups; ++group) {
            const int2 sums = views.scratch[group * stride_of(num_experts) + e];
            total += sums.x, before += sums.y;
        }
        views.counts[e] = total;
        views.to_position[e] = before;
    }
}

// Sums each matrix row into starts. A lane has 8 counters of a row, a 16-byte piece. before[j] becomes the exclusive prefix
// sums of this thread's piece j in its row, for the lower columns in the low half, for the upper columns in the high half.
// No sum reaches 65536, so both halves of a word are added at once. A block that has all slots also fills in counts.
__device__ __forceinline__ void sum_matrix_rows(unsigned (&before)[HELD_PIECES], const RouteViews& views, int num_experts,
                                                int columns, bool alone) {
    const int num_rows = num_experts + 1, lane = threadIdx.x & 31;
    const int lane_bits = log2_of(columns) - 3, last_lane = (1 << lane_bits) - 1;
#pragma unroll
    for (int j = 0; j < HELD_PIECES; ++j) {
        if (j * static_cast<int>(blockDim.x) >= num_rows << lane_bits) break;
        const int i = j * blockDim.x + threadIdx.x, row = i >> lane_bits;
        uint4 w = make_uint4(0, 0, 0, 0);
        if (row < num_rows) w = reinterpret_cast<const uint4*>(views.matrix)[i];
        const unsigned sum = w.x + w.y + w.z + w.w, through = warp_scan(sum, last_lane + 1);
        const unsigned total = __shfl_sync(0xffffffffu, through, lane | last_lane);
        before[j] = through - sum + (total << 16);  // the upper columns come after all the lower ones
        if (row < num_rows && (lane & last_lane) == 0) {
            const int of_row = static_cast<int>((total & 0xffff) + (total >> 16));
            views.starts[row] = of_row;
            if (alone && row < num_experts) views.counts[row] = of_row, views.to_position[row] = 0;
        }
    }
}

// Exclusive prefix sums over experts, each by one warp: starts, and with the first part offsets and tiles.
__device__ __forceinline__ void scan_lists(const RouteViews& views, int num_experts, bool first_part) {
    const int warp = threadIdx.x / 32;
    if (warp == 0) exclusive_sums(views.starts, num_experts + 1, [&](int i) { return views.starts[i]; });
    if (first_part) {
        if (warp == 1) exclusive_sums(views.offsets, num_experts, [&](int i) { return views.counts[i]; });
        if (warp == 2)
            exclusive_sums(views.tiles, num_experts, [&](int i) { return (views.counts[i] + TILE_ROWS - 1) / TILE_ROWS; });
    }
}

// Turns every counter into the place of the first slot that its run has of its expert. `before` is sum_matrix_rows'.
__device__ __forceinline__ void add_starts(const unsigned (&before)[HELD_PIECES], const RouteViews& views, int num_experts,
                                           int columns, bool first_part) {
    const int num_rows = num_experts + 1, lane_bits = log2_of(columns) - 3;
#pragma unroll
    for (int j = 0; j < HELD_PIECES; ++j) {
        const int i = j * blockDim.x + threadIdx.x;
        if (i < num_rows << lane_bits) {
            const uint4 w = reinterpret_cast<const uint4*>(views.matrix)[i];
            const unsigned x = before[j] + views.starts[i >> lane_bits] * 0x10001u, y = x + w.x, z = y + w.y;
            reinterpret_cast<uint4*>(views.matrix)[i] = make_uint4(x, y, z, z + w.z);
        }
    }
    for (int e = threadIdx.x; e < num_experts; e += blockDim.x)
        views.to_position[e] += (first_part ? views.offsets[e] : 0) - views.starts[e];
    if (threadIdx.x == 0) views.to_position[num_experts] = -BEYOND_ANY_PLACE;  // "none" gives a position below 0
}

// Turns the ranks of up to PLACED_PAIRS pairs of slots into places: a slot's cell in the matrix, plus its rank.
__device__ __forceinline__ void place_pairs(int pair, bool all, const Column& column, int half_columns) {
    uint2 two[PLACED_PAIRS];
#pragma unroll
    for (int j = 0; j < PLACED_PAIRS; ++j)
        two[j] = column.run[all || pair + j * column.pair_step < column.pairs ? pair + j * column.pair_step : pair];
#pragma unroll
    for (int j = 0; j < PLACED_PAIRS; ++j) {
        two[j].x += *reinterpret_cast<const uint16*>(cell(column, two[j].x >> 16, half_columns) + (column.is_low ? 0 : 2));
        two[j].y += *reinterpret_cast<const uint16*>(cell(column, two[j].y >> 16, half_columns) + (column.is_low ? 0 : 2));
    }
#pragma unroll
    for (int j = 0; j < PLACED_PAIRS; ++j)
        if (all || pair + j * column.pair_step < column.pairs) column.run[pair + j * column.pair_step] = two[j];
}

// All threads place the slots: those whose threads share a column share its run.
__device__ __forceinline__ void place_slots(const Column& column, int half_columns) {
    int pair = column.first_pair;
    for (; pair + (PLACED_PAIRS - 1) * column.pair_step < column.pairs; pair += PLACED_PAIRS * column.pair_step)
        place_pairs(pair, true, column, half_columns);
    if (pair < column.pairs) place_pairs(pair, false, column, half_columns);
}

// to_position of the matrix row in the high half of a word. The row is there times 4, as bytes of an int.
__device__ __forceinline__ int to_position_of(const RouteViews& views, unsigned word) {
    const unsigned offset = static_cast<unsigned>(reinterpret_cast<unsigned char*>(views.to_position) - dynamic_shared);
    return *reinterpret_cast<const int*>(dynamic_shared + (offset + (word >> 16)));
}

// The position of a slot in expert_token_indices, -1 for "none". Also puts the slot in by_place.
__device__ __forceinline__ int collect_slot(const RouteViews& views, unsigned word, int slot) {
    const unsigned place = word & 0xffff;
    views.by_place[place] = (word & 0xffff0000u) + slot;
    return max(static_cast<int>(place) + to_position_of(views, word), -1);
}

// Writes token_index_map in the order of slots, and sorts the slots by place.
__device__ __forceinline__ void write_map(int* token_index_map, const RouteViews& views, const Part& part) {
    for (int slot = 4 * threadIdx.x; slot + 3 < part.slots; slot += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4*>(views.by_slot + slot);
        const int x = collect_slot(views, four.x, slot), y = collect_slot(views, four.y, slot + 1);
        const int z = collect_slot(views, four.z, slot + 2), w = collect_slot(views, four.w, slot + 3);
        store_global_16(token_index_map + part.first + slot, make_uint4(x, y, z, w));
    }
    if (threadIdx.x < (part.slots & 3)) {
        const int slot = (part.slots & ~3) + threadIdx.x;
        token_index_map[part.first + slot] = collect_slot(views, views.by_slot[slot], slot);
    }
}

// Writes expert_token_indices in the order of places, which are consecutive for the slots of an expert.
// slot / k is a multiplication by 2^32 / k, rounded up, exact while (65536 + k) * k < 2^32. For k = 1, where 2^32 does not
// fit, it is (slot + 1) * (2^32 - 1).
__device__ __forceinline__ void write_tokens(int* expert_token_indices, const RouteViews& views, const Part& part, int k,
                                             unsigned reciprocal, int first_token, int routed) {
    const unsigned first_within = k == 1 ? 1 : part.first - static_cast<unsigned>(first_token) * k;
    auto write = [&](int place, unsigned word) {
        const unsigned long long product = static_cast<unsigned long long>((word & 0xffff) + first_within) * reciprocal;
        expert_token_indices[place + to_position_of(views, word)] = first_token + static_cast<int>(product >> 32);
    };
    int place = threadIdx.x;
    for (; place + (WRITTEN_SLOTS - 1) * static_cast<int>(blockDim.x) < routed; place += WRITTEN_SLOTS * blockDim.x) {
        unsigned words[WRITTEN_SLOTS];
#pragma unroll
        for (int i = 0; i < WRITTEN_SLOTS; ++i) words[i] = views.by_place[place + i * blockDim.x];
#pragma unroll
        for (int i = 0; i < WRITTEN_SLOTS; ++i) write(place + i * blockDim.x, words[i]);
    }
    for (; place < routed; place += blockDim.x) write(place, views.by_place[place]);
}

// experts_by_load: SORTING_THREADS threads find the rank of an expert, which is how many experts have more slots, or as many
// and a lower id. `thread` of `threads` is this thread's number among the threads of all blocks.
__device__ __forceinline__ void write_experts_by_load(int* experts_by_load, const int* counts, int num_experts, unsigned thread,
                                                      unsigned threads) {
#pragma unroll 1
    for (int i = static_cast<int>(thread); i - static_cast<int>(thread & 31) < num_experts * SORTING_THREADS; i += threads) {
        const int e = i / SORTING_THREADS, which = i % SORTING_THREADS, n = e < num_experts ? counts[e] : 0;
        unsigned rank = 0;
#pragma unroll 4
        for (int first = 4 * which; first < (num_experts & ~3); first += 4 * SORTING_THREADS) {
            const int4 four = *reinterpret_cast<const int4*>(counts + first);
            const int limit = n - (first < (e & ~3));  // the four that e is one of are compared below
            rank += (static_cast<unsigned>(limit - four.x) >> 31) + (static_cast<unsigned>(limit - four.y) >> 31);
            rank += (static_cast<unsigned>(limit - four.z) >> 31) + (static_cast<unsigned>(limit - four.w) >> 31);
        }
        const int last = (num_experts & ~3) + which, next = (e & ~3) + which;
        if (last < num_experts) rank += counts[last] > n;
        if (next < e && e < num_experts) rank += counts[next] == n;
#pragma unroll
        for (int step = 1; step < SORTING_THREADS; step <<= 1) rank += __shfl_xor_sync(0xffffffffu, rank, step);
        if (e < num_experts && which == 0) experts_by_load[rank] = e;
    }
}

// The outputs that depend on the counts of the experts alone, shared among the threads of all blocks.
template <class Id>
__device__ __forceinline__ void write_schedule(const DispatchRouteParams<Id>& p, const RouteViews& views) {
    // Warps of all blocks take turns, so that few elements are still spread over the blocks.
    const unsigned thread = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + (threadIdx.x & 31);
    const unsigned threads = gridDim.x * blockDim.x;
    const unsigned num_tiles = views.tiles[p.num_experts], routed = views.offsets[p.num_experts];
    const int64 num_slots = p.num_slots;
    write_experts_by_load(p.experts_by_load, views.counts, p.num_experts, thread, threads);
#pragma unroll 1
    for (unsigned tile = thread; tile < num_tiles; tile += threads) {
        const int e = find_run(views.tiles, p.num_experts, static_cast<int>(tile));
        p.row_tiles[2ll * (tile + 1)] = e;
        p.row_tiles[2ll * (tile + 1) + 1] = views.offsets[e] + static_cast<int>(tile - views.tiles[e]) * TILE_ROWS;
    }
#pragma unroll 1
    for (unsigned i = routed + thread; i < num_slots; i += threads) p.expert_token_indices[i] = -1;
#pragma unroll 1
    for (unsigned e = thread; e <= p.num_experts; e += threads) p.expert_token_offsets[e] = views.offsets[e];
    if (thread == 0) p.row_tiles[0] = num_tiles, p.row_tiles[1] = TILE_ROWS;
}

// All phases. Those that read what others have written have a barrier before them.
template <class Id>
__device__ __forceinline__ void route(const DispatchRouteParams<Id>& p) {
    const int num_experts = p.num_experts, k = p.k, columns = p.columns, part_slots = p.part_slots, half_columns = columns / 2;
    const bool alone = gridDim.x == 1 && p.block_slots <= part_slots;  // this block has all slots at once
    const bool aligned = reinterpret_cast<unsigned long long>(p.ids) % 16 == 0;
    const int counting = max(columns, 32), others = blockDim.x - counting, other = threadIdx.x - counting;
    const int groups = alone ? 1 : sum_groups(num_experts, others);
    const RouteViews views = route_views(num_experts, columns, part_slots, groups);
    const Column column = column_of_thread(views, columns, part_slots);
    const unsigned reciprocal = k == 1 ? 0xffffffffu : 0xffffffffu / static_cast<unsigned>(k) + 1;

    unsigned first = static_cast<unsigned>(blockIdx.x * p.block_slots);
    const unsigned last = static_cast<unsigned>(min(first + p.block_slots, static_cast<int64>(p.num_slots)));
    auto part_from = [&](unsigned first) {
        return Part{first, static_cast<int>(first < last ? min(last - first, static_cast<unsigned>(part_slots)) : 0)};
    };
    Ids4<Id> loaded[sizeof(Id) == 4 ? ROUTE_INT32_LOADS : ROUTE_INT64_LOADS];
    load_part(loaded, p.ids, part_from(first), 0, aligned);
#pragma unroll 1
    for (int number = 0; number == 0 || first < last; ++number, first += part_slots) {
        const Part part = part_from(first);
        if (number > 0)  // the last part's slots of each expert come before this part's
            for (int e = threadIdx.x; e < num_experts; e += blockDim.x) views.to_position[e] += views.starts[e + 1];
        clear(views.matrix, half_columns * (num_experts + 1));
        store_rows(loaded, p.ids, p.token_expert_indices, views, part, num_experts, part_slots, aligned);
        __syncthreads();
        if (threadIdx.x < columns)
            rank_run(column, half_columns);
        else if (number == 0 && !alone && other >= 0)
            sum_blocks(p.block_counts, views, num_experts, p.counted_together, groups, other, others);
        __syncthreads();
        if (number == 0 && groups > 1) add_groups(views, num_experts, groups);
        unsigned before[HELD_PIECES];
        sum_matrix_rows(before, views, num_experts, columns, alone);
        __syncthreads();
        scan_lists(views, num_experts, number == 0);
        __syncthreads();
        add_starts(before, views, num_experts, columns, number == 0);
        __syncthreads();
        place_slots(column, half_columns);
        __syncthreads();
        write_map(p.token_index_map, views, part);
        if (number == 0) write_schedule(p, views);
        __syncthreads();
        const int first_token = static_cast<int>(first / static_cast<unsigned>(k)), routed = views.starts[num_experts];
        load_part(loaded, p.ids, part_from(first + part_slots), 0, aligned);  // ids of the next part
        issue_loads_now();
        write_tokens(p.expert_token_indices, views, part, k, reciprocal, first_token, routed);
        __syncthreads();
    }
}
