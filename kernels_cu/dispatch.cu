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
        atomicAdd(reinterpret_cast<unsigned*>(dynamic_shared + (column_at + row4_of(id, num_experts) * columns)), 1u);
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
        if (sizeof(Id) == 8) token_expert_indices[first + slot] = expert_of(row4_of(ids[slot], num_experts), num_experts);
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

#include "dispatch_route.cuh"

#define DISPATCH(NAME, ID)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS)                                                           \
        dispatch_count_##NAME(const DispatchCountParams<ID> p) {                                            \
        count(p.ids, p.token_expert_indices, p.block_counts, p.num_slots, p.num_experts, p.columns, p.block_slots,            \
              p.counted_together);                                                                                            \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(MAX_BLOCK_THREADS)                                                           \
        dispatch_route_##NAME(const DispatchRouteParams<ID> p) {                                            \
        route(p);  \
    }

DISPATCH(int32, int)
DISPATCH(int64, long long)
