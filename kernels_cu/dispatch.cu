// Dispatch: from the chosen experts of every token to the index lists of the paper's section 4.1, in
// the three steps of section 4.2, without a sort and without atomics, stable and deterministic.
//
//   ids                   (L*k,)   int32 or int64, in   id < 0 or >= E: no expert in this slot
//   token_expert_indices  (L*k,)   int32, out           from int64 ids, -1 for "none"; null where ids are int32
//   block_counts          (B, E')  int32, workspace     slots of each expert in each block; null if one part holds all
//   expert_token_indices  (L*k,)   int32, out           token of each routed slot; -1 past the last
//   expert_token_offsets  (E+1,)   int32, out
//   token_index_map       (L*k,)   int32, out           position in expert_token_indices, or -1
//   row_tiles             (T+1, 2) int32, out           [0] = (count, tile_rows), then (expert, first row)
//   experts_by_load       (E,)     int32, out           ids by falling slot count, equal ones by rising id
//
// num_slots = L*k, num_experts = E <= 4096, E' = E rounded up to a multiple of 4. Launch: dispatch_count, left out where
// one part holds all slots, then dispatch_route, both of B blocks. A block owns block_slots consecutive slots, in parts
// of part_slots < 65536. A matrix in shared memory has a row per expert, one more for "none", and C = columns uint16
// counters in a row, one for each of C threads; C is a power of two, 8 to 512. dispatch_count has 512 threads and
// 2*C*(E+1) bytes of dynamic shared memory. dispatch_route has C <= 256, at least 32 threads more, 1024 at most, and
// part_slots / C is 2 more than a multiple of 4. Its shared memory: five lists of E+1 ints, rounded up to 16 bytes; the
// matrix and 2 bytes per slot of a part, or 4 per slot if that is more; 4 per slot, or what the sums over blocks take
// if that is more, 8*E' per group of threads that reads all experts 4 at a time, unless there is one group.
//
// The dense token-expert map of step 1 has L*E cells; here a column of it is the counters of one thread, which walks its
// own run of consecutive slots. dispatch_count sums the rows (step 2). dispatch_route counts a part again, turns every
// row into its exclusive prefix sums, and walks once more: each slot takes its counter as its place among the part's
// slots by expert, and advances it (step 3). What it collects there leaves as runs: lone 4-byte stores would each cost a
// 32-byte sector of the L2. Slots without an expert are one more run, which goes nowhere.
#include "dispatch_matrix.cuh"

// Of block_counts: rows are read 16 bytes at a time.
__device__ __forceinline__ int stride_of(int num_experts) { return (num_experts + 3) & ~3; }

template <class Id>
__device__ void count(const Id* ids, int* block_counts, int64 num_slots, int num_experts, int columns, int64 block_slots) {
    constexpr int LOADS = sizeof(Id) == 4 ? 4 : 2;  // of 4 slots, while as many are counted
    constexpr int64 MOST = 8192;                    // slots per thread between sums, which add 4 counters in 16 bits
    uint16* matrix = reinterpret_cast<uint16*>(dynamic_shared);
    const int lane = threadIdx.x & 31, lane_bits = min(log2_of(columns) - 3, 3), lanes = 1 << lane_bits;  // for a row
    const int64 first = blockIdx.x * block_slots, last = min(first + block_slots, num_slots);
    const bool aligned = reinterpret_cast<unsigned long long>(ids) % 16 == 0;
    for (int64 begin = first; begin == first || begin < last; begin += MOST * columns) {
        clear(matrix, columns * (num_experts + 1));
        __syncthreads();
        if (threadIdx.x < columns) {
            const int slots = static_cast<int>(max(min(last - begin, MOST * columns), 0ll)), stride = 4 * columns;
            const unsigned column = 2 * column_of_thread(columns);
            const unsigned mask = columns < 32 ? (1u << columns) - 1 : 0xffffffffu;
            auto load = [&](Ids4<Id>(&loaded)[LOADS], int base) {
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const int slot = base + i * stride + 4 * threadIdx.x;
                    loaded[i] = load_ids(ids + begin + slot, slot + 3 < slots, aligned);
                }
                __syncwarp(mask);  // or each load is put off until it is used
            };
            auto count_slots = [&](const Ids4<Id>(&loaded)[LOADS]) {
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        const unsigned rows[2] = {row_of(loaded[i].of[j], num_experts), row_of(loaded[i].of[j + 1], num_experts)};
                        unsigned found[2];
                        advance(column, columns, rows, found);
                    }
                }
            };
            Ids4<Id> even[LOADS], odd[LOADS];
            load(even, 0);
            for (int base = 0; base < slots; base += 2 * LOADS * stride) {
                load(odd, base + LOADS * stride);
                count_slots(even);
                if (base + LOADS * stride >= slots) break;
                load(even, base + 2 * LOADS * stride);
                count_slots(odd);
            }
            if (threadIdx.x < (slots & 3)) {
                const unsigned rows[1] = {row_of(ids[begin + (slots & ~3) + threadIdx.x], num_experts)};
                unsigned found[1];
                advance(column, columns, rows, found);
            }
        }
        __syncthreads();
        for (int row0 = threadIdx.x / 32 * (32 >> lane_bits); row0 < stride_of(num_experts); row0 += blockDim.x >> lane_bits) {
            const int row = row0 + (lane >> lane_bits);
            int sum = 0;
            if (row < num_experts)
#pragma unroll 8
                for (int i = lane & (lanes - 1); i < columns / 8; i += lanes) {
                    const uint4 w = reinterpret_cast<const uint4*>(matrix)[row * (columns / 8) + i];
                    const unsigned pair = w.x + w.y + w.z + w.w;
                    sum += static_cast<int>((pair & 0xffff) + (pair >> 16));
                }
#pragma unroll
            for (int step = 1; step < 8; step <<= 1)
                if (step < lanes) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (row < stride_of(num_experts) && (lane & (lanes - 1)) == 0) {
                int* total = block_counts + blockIdx.x * static_cast<int64>(stride_of(num_experts)) + row;
                *total = begin == first ? sum : *total + sum;
            }
        }
        __syncthreads();
    }
}

// Adds up what each block counted, over all blocks and over those before this one, by `threads` threads of which this is
// `thread`. One takes four experts of every so many blocks; scratch (groups, E rounded up) takes (all, before), or of a
// single group `all` and `before` themselves.
__device__ __forceinline__ int sum_groups(int num_experts, int threads) { return max(1u, 4u * threads / static_cast<unsigned>(stride_of(num_experts))); }

__device__ void sum_blocks(const int* block_counts, int num_experts, int thread, int threads, int2* scratch, int* all,
                           int* before_this) {
    constexpr int LOADS = 8;  // before the first is added
    const int groups = sum_groups(num_experts, threads), fours = stride_of(num_experts) / 4;
    for (int i = thread; i < groups * fours; i += threads) {
        const int group = static_cast<unsigned>(i) / static_cast<unsigned>(fours);
        const int4* of_experts = reinterpret_cast<const int4*>(block_counts) + (i - group * fours);
        int4 total = make_int4(0, 0, 0, 0), before = total;
        for (int b0 = group; b0 < gridDim.x; b0 += LOADS * groups) {
            int4 n[LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                n[j] = make_int4(0, 0, 0, 0);
                if (b0 + j * groups < gridDim.x) n[j] = of_experts[(b0 + j * groups) * fours];
            }
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                total.x += n[j].x, total.y += n[j].y, total.z += n[j].z, total.w += n[j].w;
                if (b0 + j * groups < blockIdx.x) before.x += n[j].x, before.y += n[j].y, before.z += n[j].z, before.w += n[j].w;
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
__device__ void write_schedule(const int* counts, const int* offsets, const int* tiles, int num_experts, int tile_rows,
                               int64 num_slots, unsigned thread, unsigned threads, int* expert_token_indices,
                               int* expert_token_offsets, int* row_tiles, int* experts_by_load) {
    const unsigned num_tiles = tiles[num_experts], routed = offsets[num_experts];
#pragma unroll 1
    for (unsigned e = thread; e < num_experts; e += threads) {
        // Its place by load: how many experts have more slots, or as many and a lower id.
        const int n = counts[e], first = static_cast<int>(e) & ~31, last = min(first + 32, num_experts);
        unsigned place = 0;
        auto count_above = [&](int from, int to, int n) {  // both multiples of 4
#pragma unroll 4
            for (int other = from; other < to; other += 4) {
                const int4 four = *reinterpret_cast<const int4*>(counts + other);
                place += (static_cast<unsigned>(n - four.x) >> 31) + (static_cast<unsigned>(n - four.y) >> 31);
                place += (static_cast<unsigned>(n - four.z) >> 31) + (static_cast<unsigned>(n - four.w) >> 31);
            }
        };
        count_above(0, first, n - 1);
        for (int other = first; other < last; ++other) place += counts[other] > n - (other < e);
        count_above(last, max(last, num_experts & ~3), n);
        for (int other = max(last, num_experts & ~3); other < num_experts; ++other) place += counts[other] > n;
        experts_by_load[place] = static_cast<int>(e);
    }
#pragma unroll 1
    for (unsigned tile = thread; tile < num_tiles; tile += threads) {
        const int e = find_run(tiles, num_experts, static_cast<int>(tile));
        row_tiles[2ll * (tile + 1)] = e;
        row_tiles[2ll * (tile + 1) + 1] = offsets[e] + static_cast<int>(tile - tiles[e]) * tile_rows;
    }
#pragma unroll 1
    for (unsigned i = routed + thread; i < num_slots; i += threads) expert_token_indices[i] = -1;
#pragma unroll 1
    for (unsigned e = thread; e <= num_experts; e += threads) expert_token_offsets[e] = offsets[e];
    if (thread == 0) row_tiles[0] = num_tiles, row_tiles[1] = tile_rows;
}

template <class Id>
__device__ void route(const Id* ids, int* token_expert_indices, const int* block_counts, int* expert_token_indices,
                      int* expert_token_offsets, int* token_index_map, int* row_tiles, int* experts_by_load, int64 num_slots,
                      int k, int num_experts, int columns, int64 block_slots, int part_slots, int tile_rows) {
    constexpr int LOADS = sizeof(Id) == 4 ? 6 : 3;  // of 4 slots, before the first is used
    constexpr int PLACES = 4;                       // likewise, of what was collected
    const int num_rows = num_experts + 1, lists = 5 * num_rows;
    int* counts = reinterpret_cast<int*>(dynamic_shared);  // (E,) slots of each expert
    int* offsets = counts + num_experts;                   // (E+1,) expert_token_offsets
    int* tiles = offsets + num_rows;                       // (E+1,) first tile of each expert
    int* rows = tiles + num_rows;                          // (E+1,) first row of each expert's run, less its first place
    int* starts = rows + num_rows;                         // (E+2,) that first place among the part's slots
    const int matrix_bytes = (4 * lists + 15) / 16 * 16;   // before it
    uint16* matrix = reinterpret_cast<uint16*>(dynamic_shared + matrix_bytes);  // (E+1, C)
    uint16* slot_rows = matrix + columns * num_rows;       // (part_slots,) the matrix' row of each slot
    int* map = reinterpret_cast<int*>(matrix);             // (part_slots,) in place of both: this part of token_index_map
    unsigned* collected = reinterpret_cast<unsigned*>(matrix + max(columns * num_rows + part_slots, 2 * part_slots));
    int2* scratch = reinterpret_cast<int2*>(collected);    // for sum_blocks; collected: slot + 65536 * row, by expert

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int lane_bits = log2_of(columns) - 3, last_lane = (1 << lane_bits) - 1;  // a lane takes 8 counters of a row
    const int counting = (columns + 31) / 32 * 32, other = threadIdx.x - counting, others = blockDim.x - counting;
    const bool alone = gridDim.x == 1 && block_slots <= part_slots, aligned = reinterpret_cast<unsigned long long>(ids) % 16 == 0;
    // slot / k by multiplication, exact while (65536 + k) * k < 2^32: by 2^32 / k, rounded up; (slot + 1) * (2^32 - 1) if k = 1
    const unsigned reciprocal = k == 1 ? 0xffffffffu : 0xffffffffu / static_cast<unsigned>(k) + 1;

    Ids4<Id> loaded[LOADS];
    int64 first = blockIdx.x * block_slots;
    const int64 last = min(first + block_slots, num_slots);
    auto slots_from = [&](int64 first) {
        return static_cast<int>(max(min(last - first, static_cast<int64>(part_slots)), 0ll));
    };
    auto load = [&](int64 first, int base, int slots) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
            loaded[i] = load_ids(ids + first + slot, slot + 3 < slots, aligned);
        }
    };
    load(first, 0, slots_from(first));
    for (int part = 0; part == 0 || first < last; ++part, first += part_slots) {
        const int slots = slots_from(first);
        if (part > 0)
            for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += starts[e + 1];
        clear(matrix, columns * num_rows);
        for (int base = 0;;) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int slot = base + (i * blockDim.x + threadIdx.x) * 4;
                if (slot < part_slots) {
                    unsigned row[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) row[j] = row_of(loaded[i].of[j], num_experts);
                    *reinterpret_cast<uint2*>(slot_rows + slot) = make_uint2(row[0] + (row[1] << 16), row[2] + (row[3] << 16));
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
                slot_rows[slot] = static_cast<uint16>(row);
                if (sizeof(Id) == 8) token_expert_indices[first + slot] = expert_of(row, num_experts);
            }
        }
        __syncthreads();

        const unsigned column = matrix_bytes + 2 * column_of_thread(columns);
        const int pairs = part_slots >> log2_of(columns) + 1;
        const unsigned* my_pairs = reinterpret_cast<const unsigned*>(slot_rows) + column_of_thread(columns) * pairs;
        if (threadIdx.x < columns) {
            walk(my_pairs, pairs, [&](auto& rows, int) {
                unsigned found[sizeof(rows) / 4];
                advance(column, columns, rows, found);
            });
        } else if (part == 0 && !alone && other >= 0) {
            sum_blocks(block_counts, num_experts, other, others, scratch, counts, rows);
        }
        __syncthreads();

        if (part == 0 && !alone && sum_groups(num_experts, others) > 1) {
            for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
                int total = 0, before = 0;
#pragma unroll 4
                for (int group = 0; group < sum_groups(num_experts, others); ++group) {
                    const int2 sums = scratch[group * stride_of(num_experts) + e];
                    total += sums.x, before += sums.y;
                }
                counts[e] = total;
                rows[e] = before;
            }
        }
        for (int i = threadIdx.x; i - lane < num_rows << lane_bits; i += blockDim.x) {
            const int row = i >> lane_bits;
            uint4 w = make_uint4(0, 0, 0, 0);
            if (row < num_rows) w = reinterpret_cast<const uint4*>(matrix)[i];
            const unsigned pair = w.x + w.y + w.z + w.w, sum = (pair & 0xffff) + (pair >> 16);
            const unsigned through = warp_scan(static_cast<int>(sum), last_lane + 1);
            auto spread = [](unsigned& before, unsigned& two) {  // two counters to their prefix sums
                const unsigned both = before * 0x10001u + (two << 16);
                before += (two & 0xffff) + (two >> 16);
                two = both;
            };
            unsigned before = through - sum;
            spread(before, w.x), spread(before, w.y), spread(before, w.z), spread(before, w.w);
            if (row < num_rows) {
                reinterpret_cast<uint4*>(matrix)[i] = w;
                if ((lane & last_lane) == last_lane) {
                    starts[row] = static_cast<int>(through);
                    if (alone && row < num_experts) counts[row] = static_cast<int>(through), rows[row] = 0;
                }
            }
        }
        __syncthreads();
        if (warp == 0) exclusive_sums(starts, num_rows, [&](int i) { return starts[i]; });
        if (part == 0) {
            if (warp == 1) exclusive_sums(offsets, num_experts, [&](int i) { return counts[i]; });
            if (warp == 2) exclusive_sums(tiles, num_experts, [&](int i) { return (counts[i] + tile_rows - 1) / tile_rows; });
        }
        __syncthreads();
        for (int i = threadIdx.x; i < num_rows << lane_bits; i += blockDim.x) {
            const uint4 w = reinterpret_cast<const uint4*>(matrix)[i];
            const unsigned start = starts[i >> lane_bits] * 0x10001u;
            reinterpret_cast<uint4*>(matrix)[i] = make_uint4(w.x + start, w.y + start, w.z + start, w.w + start);
        }
        for (int e = threadIdx.x; e < num_experts; e += blockDim.x) rows[e] += (part == 0 ? offsets[e] : 0) - starts[e];
        __syncthreads();

        if (threadIdx.x < columns) {
            const int first_slot = column_of_thread(columns) * 2 * pairs;
            walk(my_pairs, pairs, [&](auto& rows, int slot) {
                constexpr int N = sizeof(rows) / 4;
                unsigned places[N];
                advance(column, columns, rows, places);
#pragma unroll
                for (int i = 0; i < N; ++i) collected[places[i]] = (rows[i] << 16) + first_slot + slot + i;
            });
        } else if (part == 0 && other >= 0) {
            const unsigned turn = (other / 32 * gridDim.x + blockIdx.x) * 32 + lane;  // warps of all blocks in turn
            write_schedule(counts, offsets, tiles, num_experts, tile_rows, num_slots, turn, gridDim.x * others,
                           expert_token_indices, expert_token_offsets, row_tiles, experts_by_load);
        }
        __syncthreads();

        const int first_token = static_cast<int>(static_cast<unsigned>(first) / static_cast<unsigned>(k)), routed = starts[num_experts];
        const unsigned first_within = k == 1 ? 1 : static_cast<unsigned>(first) - static_cast<unsigned>(first_token) * k;
        auto write = [&](int place, unsigned found, int to_row) {
            const unsigned slot = found & 0xffff;
            const unsigned long long product = static_cast<unsigned long long>(slot + first_within) * reciprocal;
            expert_token_indices[place + to_row] = first_token + static_cast<int>(product >> 32);
            map[slot] = place + to_row;
        };
        const unsigned to_rows = static_cast<unsigned>(reinterpret_cast<unsigned char*>(rows) - dynamic_shared);
        auto to_row_of = [&](unsigned found) { return *reinterpret_cast<const int*>(dynamic_shared + (to_rows + (found >> 16))); };
        int place = threadIdx.x;
        for (; place + (PLACES - 1) * static_cast<int>(blockDim.x) < routed; place += PLACES * blockDim.x) {
            unsigned found[PLACES];
            int to_row[PLACES];
#pragma unroll
            for (int i = 0; i < PLACES; ++i) found[i] = collected[place + i * blockDim.x];
#pragma unroll
            for (int i = 0; i < PLACES; ++i) to_row[i] = to_row_of(found[i]);
#pragma unroll
            for (int i = 0; i < PLACES; ++i) write(place + i * blockDim.x, found[i], to_row[i]);
        }
        for (; place < routed; place += blockDim.x) write(place, collected[place], to_row_of(collected[place]));
        for (; place < part_slots; place += blockDim.x) map[collected[place] & 0xffff] = -1;
        __syncthreads();
        load(first + part_slots, 0, slots_from(first + part_slots));
        for (int slot = 4 * threadIdx.x; slot + 3 < slots; slot += 4 * blockDim.x)
            store_global_16(token_index_map + first + slot, *reinterpret_cast<const uint4*>(map + slot));
        if (threadIdx.x < (slots & 3)) token_index_map[first + (slots & ~3) + threadIdx.x] = map[(slots & ~3) + threadIdx.x];
        __syncthreads();
    }
}

#define DISPATCH(NAME, ID)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(512)                                                                         \
        dispatch_count_##NAME(const ID* ids, int* block_counts, int64 num_slots, int64 num_experts, int64 columns,            \
                              int64 block_slots) {                                                            \
        count(ids, block_counts, num_slots, static_cast<int>(num_experts), static_cast<int>(columns), block_slots); \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024)                                                                        \
        dispatch_route_##NAME(const ID* ids, int* token_expert_indices, const int* block_counts, int* expert_token_indices,   \
                              int* expert_token_offsets, int* token_index_map, int* row_tiles, int* experts_by_load,          \
                              int64 num_slots, int64 k, int64 num_experts, int64 columns, int64 block_slots, int64 part_slots,  \
                              int64 tile_rows) {                                                                              \
        route(ids, token_expert_indices, block_counts, expert_token_indices, expert_token_offsets, token_index_map,           \
              row_tiles, experts_by_load, num_slots, static_cast<int>(k), static_cast<int>(num_experts),                      \
              static_cast<int>(columns), block_slots, static_cast<int>(part_slots), static_cast<int>(tile_rows));               \
    }

DISPATCH(int32, int)
DISPATCH(int64, long long)
