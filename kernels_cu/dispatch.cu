// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in
// the three steps of section 4.2, without a sort, stable and deterministic.
//
// num_slots = L*k, num_experts = E <= MAX_EXPERTS, E' = E rounded up to a multiple of 4, G = counted_together, 1 or 2. Launch:
// dispatch_count of ceil(B/G) blocks, left out where one part holds all slots, then dispatch_route of B. A block of
// dispatch_route owns block_slots consecutive slots, in parts of part_slots < 65536. Both kernels have 512 or 1024
// threads, and count in a matrix in shared memory: a row per expert, one more for "none", and C = columns counters in a
// row, of which a thread adds to one; C is a power of two.
//   dispatch_count: C of 4 to 32, counters of 32 bits, a matrix for each of the G blocks. Where ids are int64 it writes
// token_expert_indices, and dispatch_route reads that in place of ids.
//   dispatch_route: C of 8 to 128, counters of 16 bits, C * (E + 1) / 8 at most HELD_PIECES per thread; C threads count while 32
// or more others sum over blocks. part_slots / C is 2 more than a multiple of 4. Shared memory: EXPERT_LISTS lists of E+1 ints,
// rounded up to 16 bytes; the matrix and what those sums take, 8*E' per group of threads that reads all experts 4 at a
// time, nothing if there is one group, or 4 per slot of a part if that is more; 4 per slot.
//
// The dense token-expert map of step 1 has L*E cells; here a column of it is a counter of each row. dispatch_count sums
// the rows (step 2). In dispatch_route a thread walks its own run of consecutive slots, and what a slot finds in its
// counter is its rank within the run. Rows then become their exclusive prefix sums, from where the part's slots of that
// expert start, and a slot's place by expert is its cell plus its rank (step 3), for all threads at once. Tokens leave in
// the order of places, as runs: lone 4-byte stores would each cost a 32-byte sector of the L2. Slots without an expert
// are one more run, which goes nowhere. The atomics are on integers in shared memory: in dispatch_count sums, the same in
// any order; in dispatch_route on half a word to which one thread alone adds, in its own order.
#include "dispatch_matrix.cuh"

#if !defined(TILE_ROWS) || !defined(MAX_EXPERTS) || !defined(MAX_K) || !defined(MAX_BLOCK_THREADS) || !defined(MIN_COLUMNS) || \
    !defined(MIN_COUNT_COLUMNS) || !defined(HELD_PIECES) || !defined(EXPERT_LISTS) || !defined(MIN_GROUPS)
#error "TILE_ROWS, MAX_EXPERTS, MAX_K, MAX_BLOCK_THREADS, MIN_COLUMNS, MIN_COUNT_COLUMNS, HELD_PIECES, EXPERT_LISTS and \
MIN_GROUPS are given by launch_config.py"
#endif
static_assert(4 * MAX_EXPERTS < 65536, "the row of an expert, times 4, is half a word beside a rank or a slot");
static_assert((65536ull + MAX_K) * MAX_K < 1ull << 32, "slot / k by a 32-bit reciprocal is exact");
static_assert(MIN_COLUMNS % 8 == 0 && MIN_COUNT_COLUMNS % 4 == 0, "a lane reads 16 bytes of counters");
static_assert(MAX_BLOCK_THREADS <= 1024, "threads of a block");
static_assert(MIN_GROUPS >= 2, "one group writes its sums where they belong, and has no scratch memory");

template <class Id>
struct DispatchCountParams {
    const Id* ids;              // (L*k,) int32 or int64, in; id < 0 or >= E: no expert in this slot
    int* token_expert_indices;  // (L*k,) int32, out: from int64 ids, -1 for "none"; null where ids are int32
    int* block_counts;          // (ceil(B/G), G, E') int32, out: slots of each expert in each G blocks of dispatch_route,
                                // and if G = 2 in the first of the two
    int64 block_slots;
    int num_slots, num_experts, columns, counted_together;
};

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

// Of block_counts: rows are read 16 bytes at a time.
__device__ __forceinline__ int stride_of(int num_experts) { return (num_experts + 3) & ~3; }

template <class Id>
__device__ void count(const Id* ids, int* token_expert_indices, int* block_counts, int64 num_slots, int num_experts,
                      int columns, int64 block_slots, int counted_together) {
    constexpr int LOADS = sizeof(Id) == 4 ? 4 : 2;  // of 4 slots, while as many are counted
    unsigned* matrix = reinterpret_cast<unsigned*>(dynamic_shared);  // (G, E+1, C)
    const int num_rows = num_experts + 1;
    const unsigned threads = blockDim.x / counted_together, mine = threadIdx.x / threads;  // powers of two
    const unsigned thread = threadIdx.x & (threads - 1), stride = 4 * threads;
    const int64 first = (blockIdx.x * static_cast<int64>(counted_together) + mine) * block_slots;
    const unsigned slots = static_cast<unsigned>(max(min(first + block_slots, num_slots) - first, 0ll));
    const bool aligned = reinterpret_cast<unsigned long long>(ids) % 16 == 0;
    ids += first;
    auto load = [&](Ids4<Id>(&loaded)[LOADS], unsigned base) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const unsigned slot = base + i * stride + 4 * thread;
            loaded[i] = load_ids(ids + slot, slot + 3 < slots, aligned);
        }
        __syncwarp();  // or each load is put off until it is used
    };
    const unsigned column_at = 4 * (mine * num_rows * columns + (threadIdx.x & (columns - 1)));
    auto count_slot = [&](Id id) {
        atomicAdd(reinterpret_cast<unsigned*>(dynamic_shared + (column_at + row_of(id, num_experts) * columns)), 1u);
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
                for (int j = 0; j < 4; ++j) experts[j] = expert_of(row_of(loaded[i].of[j], num_experts), num_experts);
                *reinterpret_cast<int4*>(token_expert_indices + first + slot) =
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
    if (thread < (slots & 3)) {
        const unsigned slot = (slots & ~3u) + thread;
        count_slot(ids[slot]);
        if (sizeof(Id) == 8) token_expert_indices[first + slot] = expert_of(row_of(ids[slot], num_experts), num_experts);
    }
    __syncthreads();
    // A lane sums up 4 counters of a row, and of the same row in the second matrix.
    const int lane_bits = log2_of(columns) - 2, experts = stride_of(num_experts);
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
        for (int step = 1; step < 8; step <<= 1)
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

// Adds up what each block counted, over all blocks and over those before this one, by `threads` threads of which this is
// `thread`. One takes four experts of every so many rows of block_counts; scratch (groups, E rounded up) takes
// (all, before), or of a single group `all` and `before` themselves.
__device__ __forceinline__ int sum_groups(int num_experts, int threads) {
    const int groups = 4u * threads / static_cast<unsigned>(stride_of(num_experts));
    return groups < MIN_GROUPS ? 1 : groups;  // so many experts leave little shared memory
}

__device__ void sum_blocks(const int* block_counts, int num_experts, int counted_together, int groups, int thread,
                           int threads, int2* scratch, int* all, int* before_this) {
    constexpr int LOADS = 6;  // before the first is added
    const int fours = stride_of(num_experts) / 4;
    const int rows = (gridDim.x + counted_together - 1) / counted_together, this_row = blockIdx.x / counted_together;
    for (int i = thread; i < groups * fours; i += threads) {
        const int group = static_cast<unsigned>(i) / static_cast<unsigned>(fours);
        const int4* of_experts = reinterpret_cast<const int4*>(block_counts) + (i - group * fours);
        int4 total = make_int4(0, 0, 0, 0), before = total;
        if (group == 0 && blockIdx.x != this_row * counted_together) before = of_experts[(2 * this_row + 1) * fours];
        for (int row0 = group; row0 < rows; row0 += LOADS * groups) {
            int4 n[LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                n[j] = make_int4(0, 0, 0, 0);
                if (row0 + j * groups < rows) n[j] = of_experts[(row0 + j * groups) * counted_together * fours];
            }
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                total.x += n[j].x, total.y += n[j].y, total.z += n[j].z, total.w += n[j].w;
                if (row0 + j * groups < this_row) before.x += n[j].x, before.y += n[j].y, before.z += n[j].z, before.w += n[j].w;
            }
        }
        if (groups == 1) {
            const int totals[4] = {total.x, total.y, total.z, total.w}, befores[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < num_experts) all[4 * i + j] = totals[j], before_this[4 * i + j] = befores[j];
        } else {
            int4* to = reinterpret_cast<int4*>(scratch + 4 * i);
            to[0] = make_int4(total.x, before.x, total.y, before.y);
            to[1] = make_int4(total.z, before.z, total.w, before.w);
        }
    }
}

// The outputs that depend on the experts' totals alone, by `threads` threads of all blocks, of which this is `thread`.
__device__ void write_schedule(const int* counts, const int* offsets, const int* tiles, int num_experts, int64 num_slots,
                               unsigned thread, unsigned threads, int* expert_token_indices,
                               int* expert_token_offsets, int* row_tiles, int* experts_by_load) {
    constexpr int RANKING = 8;  // threads that find an expert's place: how many have more slots, or as many and a lower id
    const unsigned num_tiles = tiles[num_experts], routed = offsets[num_experts];
#pragma unroll 1
    for (int i = static_cast<int>(thread); i - static_cast<int>(thread & 31) < num_experts * RANKING; i += threads) {
        const int e = i / RANKING, which = i % RANKING, n = e < num_experts ? counts[e] : 0;
        unsigned place = 0;
#pragma unroll 4
        for (int first = 4 * which; first < (num_experts & ~3); first += 4 * RANKING) {
            const int4 four = *reinterpret_cast<const int4*>(counts + first);
            const int limit = n - (first < (e & ~3));  // those next to e are compared below
            place += (static_cast<unsigned>(limit - four.x) >> 31) + (static_cast<unsigned>(limit - four.y) >> 31);
            place += (static_cast<unsigned>(limit - four.z) >> 31) + (static_cast<unsigned>(limit - four.w) >> 31);
        }
        const int last = (num_experts & ~3) + which, next = (e & ~3) + which;
        if (last < num_experts) place += counts[last] > n;
        if (next < e && e < num_experts) place += counts[next] == n;
#pragma unroll
        for (int step = 1; step < RANKING; step <<= 1) place += __shfl_xor_sync(0xffffffffu, place, step);
        if (e < num_experts && which == 0) experts_by_load[place] = e;
    }
#pragma unroll 1
    for (unsigned tile = thread; tile < num_tiles; tile += threads) {
        const int e = find_run(tiles, num_experts, static_cast<int>(tile));
        row_tiles[2ll * (tile + 1)] = e;
        row_tiles[2ll * (tile + 1) + 1] = offsets[e] + static_cast<int>(tile - tiles[e]) * TILE_ROWS;
    }
#pragma unroll 1
    for (unsigned i = routed + thread; i < num_slots; i += threads) expert_token_indices[i] = -1;
#pragma unroll 1
    for (unsigned e = thread; e <= num_experts; e += threads) expert_token_offsets[e] = offsets[e];
    if (thread == 0) row_tiles[0] = num_tiles, row_tiles[1] = TILE_ROWS;
}

template <class Id>
__device__ void route(const Id* ids, int* token_expert_indices, const int* block_counts, int* expert_token_indices,
                      int* expert_token_offsets, int* token_index_map, int* row_tiles, int* experts_by_load, int64 num_slots,
                      int k, int num_experts, int columns, int64 block_slots, int part_slots,
                      int counted_together) {
    constexpr int LOADS = sizeof(Id) == 4 ? 6 : 2;  // of 4 slots, before the first is used
    constexpr int COUNTED = 4;                      // pairs of slots on their way through the counters
    constexpr int PLACED = 4;                       // pairs of slots at once that find their places
    constexpr int PLACES = 4;                       // of what was collected, read at once
    const int num_rows = num_experts + 1, lists = EXPERT_LISTS * num_rows;
    int* counts = reinterpret_cast<int*>(dynamic_shared);  // (E,) slots of each expert
    int* offsets = counts + num_experts;                   // (E+1,) expert_token_offsets
    int* tiles = offsets + num_rows;                       // (E+1,) first tile of each expert
    int* rows = tiles + num_rows;                          // (E+1,) first row of each expert's run, less its first place
    int* starts = rows + num_rows;                         // (E+2,) that first place among the part's slots
    static_assert(EXPERT_LISTS == 5, "counts (E), offsets, tiles, rows (E+1 each), starts (E+2)");
    const int matrix_bytes = (4 * lists + 15) / 16 * 16;   // before it
    unsigned* matrix = reinterpret_cast<unsigned*>(dynamic_shared + matrix_bytes);  // (E+1, C/2): columns c and c + C/2
    const int half_columns = columns / 2, cells = half_columns * num_rows;
    int2* scratch = reinterpret_cast<int2*>(matrix + cells);  // for sum_blocks
    unsigned* collected = matrix;                          // (part_slots,) in place of both: 65536 * row + slot, by place
    const bool alone = gridDim.x == 1 && block_slots <= part_slots, aligned = reinterpret_cast<unsigned long long>(ids) % 16 == 0;
    const int counting = max(columns, 32), other = threadIdx.x - counting, others = blockDim.x - counting;
    const int groups = alone ? 1 : sum_groups(num_experts, others), summing = groups > 1 ? 2 * groups * stride_of(num_experts) : 0;
    // (part_slots,) by slot: row, then 65536 * row + rank in its run, then 65536 * row + place. Rows are times 4.
    unsigned* found = matrix + max(cells + summing, part_slots);

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int lane_bits = log2_of(columns) - 3, last_lane = (1 << lane_bits) - 1;  // a lane takes 8 counters of a row
    // slot / k by multiplication, exact while (65536 + k) * k < 2^32: by 2^32 / k, rounded up; (slot + 1) * (2^32 - 1) if k = 1
    const unsigned reciprocal = k == 1 ? 0xffffffffu : 0xffffffffu / static_cast<unsigned>(k) + 1;

    // This thread's column as all find their places, C threads as they count, and the run of slots that belongs to it.
    const int column = threadIdx.x & (columns - 1), pairs = part_slots >> log2_of(columns) + 1;
    const bool is_low = column < half_columns;
    const unsigned column_at = matrix_bytes + 4 * (column & (half_columns - 1));
    auto cell_of = [&](unsigned row) { return dynamic_shared + (column_at + row * half_columns); };
    uint2* run = reinterpret_cast<uint2*>(found) + column * pairs;
    const int pair0 = threadIdx.x >> log2_of(columns), pair_step = blockDim.x >> log2_of(columns);

    Ids4<Id> loaded[LOADS];
    unsigned first = static_cast<unsigned>(blockIdx.x * block_slots);
    const unsigned last = static_cast<unsigned>(min(first + block_slots, num_slots));
    auto slots_from = [&](unsigned first) {
        return static_cast<int>(first < last ? min(last - first, static_cast<unsigned>(part_slots)) : 0);
    };
    auto load = [&](unsigned first, int base, int slots) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
            loaded[i] = load_ids(ids + first + slot, slot + 3 < slots, aligned);
        }
    };
    load(first, 0, slots_from(first));
#pragma unroll 1
    for (int part = 0; part == 0 || first < last; ++part, first += part_slots) {
        const int slots = slots_from(first);
        if (part > 0)
            for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += starts[e + 1];
        clear(matrix, cells);
        for (int base = 0;;) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
                if (slot < part_slots) {
                    unsigned row[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) row[j] = row_of(loaded[i].of[j], num_experts);
                    *reinterpret_cast<uint4*>(found + slot) = make_uint4(row[0], row[1], row[2], row[3]);
                    if (sizeof(Id) == 8 && slot + 3 < slots) {
                        int experts[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) experts[j] = expert_of(row[j], num_experts);
                        *reinterpret_cast<int4*>(token_expert_indices + first + slot) =
                            make_int4(experts[0], experts[1], experts[2], experts[3]);
                    }
                }
            }
            base += LOADS * 4 * blockDim.x;
            if (base >= part_slots) break;
            load(first, base, slots);
            __syncwarp();  // or each load is put off until it is used
        }
        if ((slots & 3) != 0 && (slots / 4) % blockDim.x == threadIdx.x) {  // overwrites its own
            for (int slot = slots & ~3; slot < slots; ++slot) {
                const unsigned row = row_of(ids[first + slot], num_experts);
                found[slot] = row;
                if (sizeof(Id) == 8) token_expert_indices[first + slot] = expert_of(row, num_experts);
            }
        }
        __syncthreads();

        if (threadIdx.x < columns) {
            const unsigned one = is_low ? 1 : 0x10000, bytes = is_low ? 0x5410 : 0x5432;
            auto count_pairs = [&](const uint2(&two)[COUNTED], uint2* at, int left) {
                unsigned old[2 * COUNTED];
#pragma unroll
                for (int j = 0; j < 2 * COUNTED; ++j)
                    if (j / 2 < left)
                        old[j] = atomicAdd(reinterpret_cast<unsigned*>(cell_of(j % 2 == 0 ? two[j / 2].x : two[j / 2].y)), one);
#pragma unroll
                for (int j = 0; j < COUNTED; ++j)
                    if (j < left)
                        at[j] = make_uint2(__byte_perm(old[2 * j], two[j].x, bytes),
                                                    __byte_perm(old[2 * j + 1], two[j].y, bytes));
            };
            uint2 two[COUNTED], next[COUNTED];
#pragma unroll
            for (int j = 0; j < COUNTED; ++j) two[j] = run[min(j, pairs - 1)];
            uint2* at = run;
            int left = pairs;
#pragma unroll 1
            for (; left >= 2 * COUNTED; left -= COUNTED, at += COUNTED) {
#pragma unroll
                for (int j = 0; j < COUNTED; ++j) next[j] = at[COUNTED + j];
                count_pairs(two, at, COUNTED);
#pragma unroll
                for (int j = 0; j < COUNTED; ++j) two[j] = next[j];
            }
#pragma unroll
            for (int j = 0; j < COUNTED; ++j) next[j] = at[min(COUNTED + j, left - 1)];
            count_pairs(two, at, left);
            count_pairs(next, at + COUNTED, left - COUNTED);
        } else if (part == 0 && !alone && other >= 0) {
            sum_blocks(block_counts, num_experts, counted_together, groups, other, others, scratch, counts, rows);
        }
        __syncthreads();

        if (part == 0 && groups > 1) {
            for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
                int total = 0, before = 0;
#pragma unroll 4
                for (int group = 0; group < groups; ++group) {
                    const int2 sums = scratch[group * stride_of(num_experts) + e];
                    total += sums.x, before += sums.y;
                }
                counts[e] = total;
                rows[e] = before;
            }
        }
        // Both columns of a word at once: no sum reaches 65536. The upper ones come after all the lower.
        unsigned before[HELD_PIECES];  // of the 16-byte pieces of the matrix that this thread works on
#pragma unroll
        for (int j = 0; j < HELD_PIECES; ++j) {
            if (j * static_cast<int>(blockDim.x) >= num_rows << lane_bits) break;
            const int i = j * blockDim.x + threadIdx.x, row = i >> lane_bits;
            uint4 w = make_uint4(0, 0, 0, 0);
            if (row < num_rows) w = reinterpret_cast<const uint4*>(matrix)[i];
            const unsigned sum = w.x + w.y + w.z + w.w, through = warp_scan(sum, last_lane + 1);
            const unsigned total = __shfl_sync(0xffffffffu, through, lane | last_lane);
            before[j] = through - sum + (total << 16);
            if (row < num_rows && (lane & last_lane) == 0) {
                const int of_row = static_cast<int>((total & 0xffff) + (total >> 16));
                starts[row] = of_row;
                if (alone && row < num_experts) counts[row] = of_row, rows[row] = 0;
            }
        }
        __syncthreads();
        if (warp == 0) exclusive_sums(starts, num_rows, [&](int i) { return starts[i]; });
        if (part == 0) {
            if (warp == 1) exclusive_sums(offsets, num_experts, [&](int i) { return counts[i]; });
            if (warp == 2) exclusive_sums(tiles, num_experts, [&](int i) { return (counts[i] + TILE_ROWS - 1) / TILE_ROWS; });
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < HELD_PIECES; ++j) {
            const int i = j * blockDim.x + threadIdx.x;
            if (i < num_rows << lane_bits) {
                const uint4 w = reinterpret_cast<const uint4*>(matrix)[i];
                const unsigned x = before[j] + starts[i >> lane_bits] * 0x10001u, y = x + w.x, z = y + w.y;
                reinterpret_cast<uint4*>(matrix)[i] = make_uint4(x, y, z, z + w.z);
            }
        }
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += (part == 0 ? offsets[e] : 0) - starts[e];
        if (threadIdx.x == 0) rows[num_experts] = -65536;  // and no place reaches that
        __syncthreads();

        auto find_places = [&](int pair, bool all) {
            uint2 two[PLACED];
#pragma unroll
            for (int j = 0; j < PLACED; ++j) two[j] = run[all || pair + j * pair_step < pairs ? pair + j * pair_step : pair];
#pragma unroll
            for (int j = 0; j < PLACED; ++j) {
                two[j].x += *reinterpret_cast<const uint16*>(cell_of(two[j].x >> 16) + (is_low ? 0 : 2));
                two[j].y += *reinterpret_cast<const uint16*>(cell_of(two[j].y >> 16) + (is_low ? 0 : 2));
            }
#pragma unroll
            for (int j = 0; j < PLACED; ++j)
                if (all || pair + j * pair_step < pairs) run[pair + j * pair_step] = two[j];
        };
        int pair = pair0;
        for (; pair + (PLACED - 1) * pair_step < pairs; pair += PLACED * pair_step) find_places(pair, true);
        if (pair < pairs) find_places(pair, false);
        __syncthreads();
        const unsigned to_rows = static_cast<unsigned>(reinterpret_cast<unsigned char*>(rows) - dynamic_shared);
        auto to_row_of = [&](unsigned found) { return *reinterpret_cast<const int*>(dynamic_shared + (to_rows + (found >> 16))); };
        auto position_of = [&](unsigned of_slot, int slot) {
            const unsigned place = of_slot & 0xffff;
            collected[place] = (of_slot & 0xffff0000u) + slot;
            return max(static_cast<int>(place) + to_row_of(of_slot), -1);
        };
        for (int slot = 4 * threadIdx.x; slot + 3 < slots; slot += 4 * blockDim.x) {
            const uint4 four = *reinterpret_cast<const uint4*>(found + slot);
            const int x = position_of(four.x, slot), y = position_of(four.y, slot + 1);
            const int z = position_of(four.z, slot + 2), w = position_of(four.w, slot + 3);
            store_global_16(token_index_map + first + slot, make_uint4(x, y, z, w));
        }
        if (threadIdx.x < (slots & 3)) {
            const int slot = (slots & ~3) + threadIdx.x;
            token_index_map[first + slot] = position_of(found[slot], slot);
        }
        if (part == 0) {
            const unsigned turn = (warp * gridDim.x + blockIdx.x) * 32 + lane;  // warps of all blocks in turn
            write_schedule(counts, offsets, tiles, num_experts, num_slots, turn, gridDim.x * blockDim.x,
                           expert_token_indices, expert_token_offsets, row_tiles, experts_by_load);
        }
        __syncthreads();

        const int first_token = static_cast<int>(first / static_cast<unsigned>(k)), routed = starts[num_experts];
        const unsigned first_within = k == 1 ? 1 : first - static_cast<unsigned>(first_token) * k;
        auto write = [&](int place, unsigned found) {
            const unsigned long long product = static_cast<unsigned long long>((found & 0xffff) + first_within) * reciprocal;
            expert_token_indices[place + to_row_of(found)] = first_token + static_cast<int>(product >> 32);
        };
        load(first + part_slots, 0, slots_from(first + part_slots));
        __syncwarp();  // or each load is put off until it is used
        int place = threadIdx.x;
        for (; place + (PLACES - 1) * static_cast<int>(blockDim.x) < routed; place += PLACES * blockDim.x) {
            unsigned of_place[PLACES];
#pragma unroll
            for (int i = 0; i < PLACES; ++i) of_place[i] = collected[place + i * blockDim.x];
#pragma unroll
            for (int i = 0; i < PLACES; ++i) write(place + i * blockDim.x, of_place[i]);
        }
        for (; place < routed; place += blockDim.x) write(place, collected[place]);
        __syncthreads();
    }
}

#define DISPATCH(NAME, ID)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS)                                                           \
        dispatch_count_##NAME(const DispatchCountParams<ID> p) {                                            \
        count(p.ids, p.token_expert_indices, p.block_counts, p.num_slots, p.num_experts, p.columns, p.block_slots,            \
              p.counted_together);                                                                                            \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS)                                                           \
        dispatch_route_##NAME(const DispatchRouteParams<ID> p) {                                            \
        route(p.ids, p.token_expert_indices, p.block_counts, p.expert_token_indices, p.expert_token_offsets,                  \
              p.token_index_map, p.row_tiles, p.experts_by_load, p.num_slots, p.k, p.num_experts, p.columns, p.block_slots,   \
              p.part_slots, p.counted_together);                                                                              \
    }

DISPATCH(int32, int)
DISPATCH(int64, long long)
