// Capacity: an expert keeps at most `capacity` slots of each sequence. From ids (L, k) to ids with -1 in the dropped slots.
//
// An expert keeps the slots with the largest keys, and of equal keys the lowest tokens, then the lowest slots. The order says
// what the key is: a number that falls with the slot's position in its token ("choice"), the slot's weight ("weights"), or the
// token's priority ("priority"). These kernels select by keys:
//
//   capacity_count   makes a histogram of a digit of the keys, see Digits
//   capacity_pick    finds the digit at which an expert's selection ends. Slots with this digit are candidates if only some of
//                    them stay. Reserves room for them in a list
//   capacity_list    writes the ids, -1 for candidates, and lists the candidates
//   capacity_finish  writes the ids of the candidates that stay
//
// With "position" all keys are equal, and with "choice" there are only k keys. Then these kernels count slots instead, unless k
// is very large. They count the slots of each of `choices` positions separately; `choices` is k for "choice" and 1 for
// "position":
//
//   capacity_parts   counts the slots of each choice and expert in each part, and in the whole sequence
//   capacity_mark    writes the ids. A block finds each expert's choice of which only some slots stay, and adds up the slots of
//                    this choice in the parts before its own. In most blocks either all of these slots stay or none. In the
//                    others each of `walkers` warps takes consecutive slots and ranks them.
//
// The order of the candidates in the list varies, but the selection among them does not. Other atomics add integers, and their
// results are the same in any order.
//
// Launch: SELECT_THREADS threads and a grid of S * parts, except where the table says otherwise. A block takes one part of a
// sequence's tokens. Dynamic shared memory:
//   capacity_count   (2^width, E) 16-bit counters. Therefore a part has fewer than 65536 slots
//   capacity_pick    (32, 32) int32; grid (S, ceil(E / 32)), a block for 32 experts
//   capacity_list    (4, E) int32: least, first, numbers and places, see list_candidates
//   capacity_finish  FINISH_SHARED_BYTES; FINISH_THREADS threads, grid S * E, a block for each column
//   capacity_parts   (choices, E) int32
//   capacity_mark    (2 + walkers, E) int32 and one more: room, last, of_warp and some, see mark
#include "candidates.cuh"
#include "pick.cuh"

constexpr int LOADS = 4;        // slots whose ids and keys a thread loads at once
constexpr int COUNT_LOADS = 8;  // slots whose ids alone a thread loads at once
constexpr int SUM_LOADS = 16;   // counts that a thread loads at once
enum Order { POSITION, CHOICE, WEIGHTS, PRIORITY };
enum ValueType { FLOAT32, BFLOAT16, FLOAT16 };

template <class Id>
struct CapacityCountParams {
    const Id* ids;         // (L, k) int32 or int64, in; id < 0 or >= E: an empty slot
    const void* values;    // (L, k) for WEIGHTS or (L,) for PRIORITY, of value_type, in; else null
    const int* sequences;  // (S+1,) int32 offsets, in; null for equal lengths
    int* histogram;        // (S, 2^width, E) int32, in and out: zeros at first
    int64 L;
    int k, num_experts, num_sequences, parts, order, value_type, width;
};

struct CapacityPickParams {
    const int* histogram;          // (S, 2^width, E) int32, in
    Column* columns;               // (S, E) of 16 bytes, out
    unsigned long long* reserved;  // uint64, in and out: 0 at first; number of the list's places that are reserved
    int64 room;                    // the list's places
    int num_experts, width, capacity;
};

template <class Id>
struct CapacityListParams {
    const Id* ids;          // (L, k), in
    const void* values;     // as in CapacityCountParams, in
    const Column* columns;  // (S, E) of 16 bytes, in
    const int* sequences;   // (S+1,) int32 offsets, in; null for equal lengths
    Candidate* list;        // (L * k,) of 8 bytes, out
    unsigned* listed;       // (S, E) uint32, in and out: zeros at first; number of candidates
    int* kept;              // (L, k) int32, out: the ids that stay, -1 for other slots and for candidates
    int64 L;
    int k, num_experts, num_sequences, parts, order, value_type, width;
};

struct CapacityFinishParams {
    const Column* columns;   // (S, E) of 16 bytes, in
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    const Candidate* list;   // (L * k,) of 8 bytes, in
    const unsigned* listed;  // (S, E) uint32, in
    int* kept;               // (L, k) int32, in and out
    int64 L;
    int k, num_experts, num_sequences, order, width;
};

template <class Id>
struct CapacityPartsParams {
    const Id* ids;         // (L, k), in
    const int* sequences;  // (S+1,) int32 offsets, in; null for equal lengths
    int* counts;           // (S, parts, choices, E) int32, out
    int* totals;           // (S, choices, E) int32, in and out: zeros at first; null for one choice
    int64 L;
    int k, num_experts, num_sequences, parts, choices;
};

template <class Id>
struct CapacityMarkParams {
    const Id* ids;         // (L, k), in
    const int* sequences;  // (S+1,) int32 offsets, in; null for equal lengths
    const int* counts;     // (S, parts, choices, E) int32, in
    const int* totals;     // (S, choices, E) int32, in; null for one choice
    int* kept;             // (L, k) int32, out: the ids that stay, -1 for dropped and empty slots
    int64 L;
    int k, num_experts, num_sequences, parts, choices, capacity, walkers;
};

// The digit of a key: its `width` leading bits, or for PRIORITY the number of a step, one of 2^width that rise with the key.
// Priorities are the largest weights of tokens and have few different exponents, so that their leading bits differ little. Half
// of the steps are for positive floats. Steps divide the floats between 2^-14 and 4 by exponent and leading bits of the
// mantissa. Smaller floats are in the first of them, larger ones in the last.
struct Digits {
    static constexpr unsigned LEAST = 0x38800000u;  // the bits of 2^-14, 16 exponents below 4
    int width, order;
    __device__ __forceinline__ unsigned half() const { return 1u << width >> 1; }
    __device__ __forceinline__ int step_bits() const { return 28 - width; }  // 16 exponents and the mantissa are 27 bits
    __device__ __forceinline__ unsigned of(unsigned key) const {
        if (order != PRIORITY) return key >> (32 - width);
        const bool positive = key >> 31;
        const unsigned size = (positive ? key : ~key) & 0x7fffffffu;
        const unsigned step = size < LEAST ? 0 : min((size - LEAST) >> step_bits(), half() - 1);
        return positive ? half() + step : half() - 1 - step;
    }
    // key: the leading bits that all keys with this digit share, and zeros. Returns the number of these bits.
    __device__ __forceinline__ int prefix(unsigned digit, unsigned& key) const {
        key = digit << (32 - width);
        if (order != PRIORITY) return width;
        const bool positive = digit >= half();
        const unsigned step = positive ? digit - half() : half() - 1 - digit;
        key = positive ? 0x80000000u : 0;
        if (step == 0 || step == half() - 1 || step_bits() > 23) return 1;
        const unsigned size = LEAST + (step << step_bits());
        key |= (positive ? size : ~size & 0x7fffffffu) >> step_bits() << step_bits();
        return 32 - step_bits();
    }
};

// The slots of a block.
template <class Params>
struct Slots {
    const Params& p;
    int sequence, part, number;
    int64 sequence_begin, begin;  // the first slot of the sequence, and of the block
    __device__ __forceinline__ explicit Slots(const Params& params)
        : p(params), sequence(blockIdx.x / params.parts), part(blockIdx.x % params.parts) {
        const Tokens all = tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence);
        const Tokens tokens = tokens_of_part(all, p.parts, part);
        sequence_begin = all.begin * p.k;
        begin = tokens.begin * p.k;
        number = static_cast<int>((tokens.end - tokens.begin) * p.k);
    }
    // The ids of N slots from `slot` on, `step` apart. -1 for empty slots and for slots from `end` on.
    template <int N>
    __device__ __forceinline__ void load_ids(int (&ids)[N], int slot, int step, int end) const {
#pragma unroll
        for (int l = 0; l < N; ++l) {
            const int i = slot + l * step;
            ids[l] = -1;
            if (i < end) {
                const auto id = p.ids[begin + i];
                if (id >= 0 && id < p.num_experts) ids[l] = static_cast<int>(id);
            }
        }
    }
    // The keys of LOADS slots. 0 for slots from `end` on.
    __device__ __forceinline__ void load_keys(unsigned (&keys)[LOADS], int slot, int step, int end) const {
        if (p.order == CHOICE) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
                keys[l] = static_cast<unsigned>(p.k - 1 - (slot + l * step) % p.k) << __clz(p.k - 1);  // k > 1
        } else if (p.value_type == FLOAT32) {
            load_values<float>(keys, slot, step, end);
        } else if (p.value_type == BFLOAT16) {
            load_values<bf16>(keys, slot, step, end);
        } else {
            load_values<fp16>(keys, slot, step, end);
        }
    }
    template <class T>
    __device__ __forceinline__ void load_values(unsigned (&keys)[LOADS], int slot, int step, int end) const {
        const T* values = static_cast<const T*>(p.values) + (p.order == WEIGHTS ? begin : begin / p.k);
        T loaded[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int i = slot + l * step;
            if (i < end) loaded[l] = values[p.order == WEIGHTS ? i : i / p.k];
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) keys[l] = slot + l * step < end ? sort_key(to_float(loaded[l])) : 0;
    }
    // Calls f(slot, id) for slot first + offset and then every step-th, and loads COUNT_LOADS ids at once. Threads with the same
    // first and end make equally many calls. Empty slots and slots from `end` on have id -1.
    template <class F>
    __device__ __forceinline__ void for_each(int first, int end, int offset, int step, const F& f) const {
        for (int base = first + offset; base - offset < end; base += COUNT_LOADS * step) {
            int ids[COUNT_LOADS];
            load_ids(ids, base, step, end);
#pragma unroll
            for (int l = 0; l < COUNT_LOADS; ++l) f(base + l * step, ids[l]);
        }
    }
    // Writes -1 to the slots of tokens that are in no sequence.
    __device__ __forceinline__ void drop_others() const {
        if (!p.sequences || (blockIdx.x > 0 && blockIdx.x < gridDim.x - 1)) return;
        const int64 before = clamped(p.sequences[0], p.L) * p.k, after = clamped(p.sequences[p.num_sequences], p.L) * p.k;
        if (blockIdx.x == 0)
            for (int64 i = threadIdx.x; i < before; i += SELECT_THREADS) p.kept[i] = -1;
        if (blockIdx.x == gridDim.x - 1)
            for (int64 i = after + threadIdx.x; i < p.L * p.k; i += SELECT_THREADS) p.kept[i] = -1;
    }
};

template <class Id>
__device__ __forceinline__ void count(const CapacityCountParams<Id>& p) {
    unsigned* counters = reinterpret_cast<unsigned*>(dynamic_shared);  // (2^width, E) 16-bit counters, two in a word
    const Slots<CapacityCountParams<Id>> slots(p);
    const int num_counters = p.num_experts << p.width;
    const Digits digits = {p.width, p.order};
    let_next_launch_start();
    for (int i = threadIdx.x; i < (num_counters + 1) / 2; i += SELECT_THREADS) counters[i] = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots.number; slot += LOADS * SELECT_THREADS) {
        int ids[LOADS];
        unsigned keys[LOADS];
        slots.load_ids(ids, slot, SELECT_THREADS, slots.number);
        slots.load_keys(keys, slot, SELECT_THREADS, slots.number);
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            if (ids[l] < 0) continue;
            const int counter = static_cast<int>(digits.of(keys[l])) * p.num_experts + ids[l];
            atomicAdd(counters + counter / 2, counter & 1 ? 1u << 16 : 1u);
        }
    }
    __syncthreads();
    wait_for_last_launch();  // the last launch clears the histogram
    int* histogram = p.histogram + (static_cast<int64>(slots.sequence) * p.num_experts << p.width);
    for (int i = threadIdx.x; i < (num_counters + 1) / 2; i += SELECT_THREADS) {
        const unsigned both = counters[i];
        if (both == 0) continue;
        if (both & 0xffff) atomicAdd(histogram + 2 * i, static_cast<int>(both & 0xffff));
        if (both >> 16) atomicAdd(histogram + 2 * i + 1, static_cast<int>(both >> 16));
    }
}

// Slots with the digit least - 1 are candidates if their expert has a place in the list.
template <class Id>
__device__ __forceinline__ void list_candidates(const CapacityListParams<Id>& p) {
    const int E = p.num_experts, shift = 32 - p.width;
    const Digits digits = {p.width, p.order};
    unsigned* least = reinterpret_cast<unsigned*>(dynamic_shared);  // (E,): all slots from this digit on stay
    int* first = reinterpret_cast<int*>(least + E);  // (E,): start of the expert's part of the list; -1: no candidates
    int* numbers = first + E;                        // (E,): candidates in this round of the loop
    int* places = numbers + E;                       // (E,): where these go in the list
    const Slots<CapacityListParams<Id>> slots(p);
    const Column* columns = p.columns + static_cast<int64>(slots.sequence) * E;
    unsigned* listed = p.listed + static_cast<int64>(slots.sequence) * E;
    let_next_launch_start();
    wait_for_last_launch();
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        const Column column = columns[e];
        least[e] = (column.key >> shift) + (column.wanted == ALL ? 0 : 1);
        first[e] = has_candidates(column) ? column.first : -1;
    }
    for (int round = 0; round < slots.number; round += LOADS * SELECT_THREADS) {
        const int slot = round + threadIdx.x;
        int ids[LOADS], ranks[LOADS];
        unsigned keys[LOADS];
        slots.load_ids(ids, slot, SELECT_THREADS, slots.number);
        slots.load_keys(keys, slot, SELECT_THREADS, slots.number);
        for (int e = threadIdx.x; e < E; e += SELECT_THREADS) numbers[e] = 0;
        __syncthreads();
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int i = slot + l * SELECT_THREADS, id = ids[l];
            const unsigned digit = digits.of(keys[l]);
            ranks[l] = id >= 0 && digit + 1 == least[id] && first[id] >= 0 ? atomicAdd(numbers + id, 1) : -1;
            if (i < slots.number) p.kept[slots.begin + i] = id >= 0 && digit >= least[id] ? id : -1;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < E; e += SELECT_THREADS)
            if (numbers[e]) places[e] = first[e] + static_cast<int>(atomicAdd(listed + e, static_cast<unsigned>(numbers[e])));
        __syncthreads();
        const unsigned index = static_cast<unsigned>(slots.begin - slots.sequence_begin) + slot;
#pragma unroll
        for (int l = 0; l < LOADS; ++l)
            if (ranks[l] >= 0) p.list[places[ids[l]] + ranks[l]] = candidate(keys[l], index + l * SELECT_THREADS);
    }
    slots.drop_others();
}

__device__ __forceinline__ void finish(const CapacityFinishParams& p) {
    Candidate* shared = reinterpret_cast<Candidate*>(dynamic_shared);  // (MAX_LISTED,)
    Search& search = *reinterpret_cast<Search*>(shared + MAX_LISTED);
    wait_for_last_launch();
    const Column column = p.columns[blockIdx.x];
    const int number = static_cast<int>(p.listed[blockIdx.x]);
    if (!has_candidates(column) || column.first < 0) return;
    const int sequence = blockIdx.x / p.num_experts, expert = blockIdx.x % p.num_experts;
    const bool fit = number <= MAX_LISTED;
    const Candidate* from = fit ? shared : p.list + column.first;
    if (fit) copy_candidates(shared, p.list + column.first, number);
    __syncthreads();
    const auto for_each = [&](const auto& f) {
        for (int i = threadIdx.x; i < number; i += FINISH_THREADS) f(from[i]);
    };
    unsigned key;
    const int known = Digits{p.width, p.order}.prefix(column.key >> (32 - p.width), key);
    const Candidate last = find_last(search, key, known, column.wanted, for_each);
    int* kept = p.kept + tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence).begin * p.k;
    for_each([&](Candidate v) {
        if (v >= last) kept[index_of(v)] = expert;
    });
}

// The position of a slot in its token if positions are counted separately, else 0. A block's first slot is a token's first.
__device__ __forceinline__ int choice_of(int slot, int choices) { return choices > 1 ? slot % choices : 0; }

template <class Id>
__device__ __forceinline__ void count_parts(const CapacityPartsParams<Id>& p) {
    int* numbers = reinterpret_cast<int*>(dynamic_shared);  // (choices, E)
    const Slots<CapacityPartsParams<Id>> slots(p);
    const int size = p.choices * p.num_experts;
    let_next_launch_start();
    for (int i = threadIdx.x; i < size; i += SELECT_THREADS) numbers[i] = 0;
    __syncthreads();
    slots.for_each(0, slots.number, threadIdx.x, SELECT_THREADS, [&](int slot, int id) {
        if (id >= 0) atomicAdd(numbers + choice_of(slot, p.choices) * p.num_experts + id, 1);
    });
    __syncthreads();
    wait_for_last_launch();  // the last launch clears the totals
    int* counts = p.counts + static_cast<int64>(blockIdx.x) * size;
    int* totals = p.totals + static_cast<int64>(slots.sequence) * size;
    for (int i = threadIdx.x; i < size; i += SELECT_THREADS) {
        counts[i] = numbers[i];
        if (p.totals && numbers[i]) atomicAdd(totals + i, numbers[i]);
    }
}

// The sum of the values number first, first + step, ... below `end`. Value i is at values[i * stride].
__device__ __forceinline__ int sum_of(const int* values, int first, int end, int step, int64 stride) {
    int sum = 0;
    for (int i = first; i < end; i += SUM_LOADS * step) {
        int loaded[SUM_LOADS];
#pragma unroll
        for (int l = 0; l < SUM_LOADS; ++l) loaded[l] = i + l * step < end ? values[(i + l * step) * stride] : 0;
#pragma unroll
        for (int l = 0; l < SUM_LOADS; ++l) sum += loaded[l];
    }
    return sum;
}

// The choice of which only some of an expert's slots stay. All slots of earlier choices stay, none of later ones. left: the
// capacity; becomes the number of this choice's slots that stay.
__device__ __forceinline__ int last_choice(const int* totals, int choices, int64 stride, int& left) {
    for (int first = 0; first < choices; first += SUM_LOADS) {
        int loaded[SUM_LOADS];
#pragma unroll
        for (int l = 0; l < SUM_LOADS; ++l) loaded[l] = first + l < choices ? totals[(first + l) * stride] : 0;
#pragma unroll
        for (int l = 0; l < SUM_LOADS; ++l) {
            if (first + l == choices - 1 || left < loaded[l]) return first + l;
            left -= loaded[l];
        }
    }
    return 0;
}

// room[e]: the first room[e] slots of choice last[e] in this block stay, or all if it is ALL.
template <class Id>
__device__ __forceinline__ void mark(const CapacityMarkParams<Id>& p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, E = p.num_experts;
    int* room = reinterpret_cast<int*>(dynamic_shared);
    int* last = room + E;     // (E,): see last_choice
    int* of_warp = last + E;  // (walkers, E): slots of choice last[e] in each warp's share, then in the shares before it
    int& some = of_warp[p.walkers * E];  // true if an expert's room is neither 0 nor ALL
    const Slots<CapacityMarkParams<Id>> slots(p);
    const int64 of_part = static_cast<int64>(p.choices) * E;  // counts of one part
    if (threadIdx.x == 0) some = 0;
    wait_for_last_launch();
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        int left = p.capacity;
        last[e] = p.choices > 1 ? last_choice(p.totals + slots.sequence * of_part + e, p.choices, E, left) : 0;
        room[e] = left;
    }
    __syncthreads();
    // `share` threads divide the parts before this one among them, for each expert.
    const int* counts = p.counts + (static_cast<int64>(blockIdx.x) - slots.part) * of_part;
    const int share = max(SELECT_THREADS / E, 1);
    for (int i = threadIdx.x; i < share * E; i += SELECT_THREADS) {
        const int e = i % E, before = sum_of(counts + last[e] * E + e, i / E, slots.part, share, of_part);
        if (before) atomicAdd(room + e, -before);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        const int left = max(room[e], 0);
        const bool stay = left > 0 && counts[slots.part * of_part + last[e] * E + e] <= left;
        room[e] = stay ? ALL : left;
        if (!stay && left > 0) some = 1;
    }
    __syncthreads();
    slots.drop_others();
    int* kept = p.kept + slots.begin;
    if (!some) {
        slots.for_each(0, slots.number, threadIdx.x, SELECT_THREADS, [&](int slot, int id) {
            const int later = id < 0 ? 1 : choice_of(slot, p.choices) - last[id];
            if (slot < slots.number) kept[slot] = later < 0 || (later == 0 && room[id] > 0) ? id : -1;
        });
        return;
    }
    if (warp < p.walkers)
        for (int e = lane; e < E; e += 32) of_warp[warp * E + e] = 0;
    __syncthreads();
    const int of_each = (slots.number + p.walkers - 1) / p.walkers, begin = min(warp * of_each, slots.number);
    const int end = warp < p.walkers ? min(begin + of_each, slots.number) : begin;
    slots.for_each(begin, end, lane, 32, [&](int slot, int id) {
        if (id >= 0 && choice_of(slot, p.choices) == last[id]) atomicAdd(of_warp + warp * E + id, 1);
    });
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        int sum = 0;
        for (int w = 0; w < p.walkers; ++w) {
            const int found = of_warp[w * E + e];
            of_warp[w * E + e] = sum;
            sum += found;
        }
    }
    __syncthreads();
    slots.for_each(begin, end, lane, 32, [&](int slot, int id) {
        const int later = id < 0 ? 1 : choice_of(slot, p.choices) - last[id];
        bool stays = later < 0 || (later == 0 && room[id] == ALL);
        const bool ranks = later == 0 && !stays && room[id] > 0;
        if (__any_sync(0xffffffffu, ranks)) {
            const unsigned alike = __match_any_sync(0xffffffffu, ranks ? id : -1), before = alike & ((1u << lane) - 1);
            if (ranks) stays = of_warp[warp * E + id] + __popc(before) < room[id];
            __syncwarp();
            if (ranks && before == 0) of_warp[warp * E + id] += __popc(alike);
            __syncwarp();
        }
        if (slot < end) kept[slot] = stays ? id : -1;
    });
}

#define CAPACITY(SUFFIX, ID)                                                                                                \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_count_##SUFFIX(const CapacityCountParams<ID> p) { \
        count(p);                                                                                                           \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_list_##SUFFIX(const CapacityListParams<ID> p) {   \
        list_candidates(p);                                                                                                 \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_parts_##SUFFIX(const CapacityPartsParams<ID> p) { \
        count_parts(p);                                                                                                     \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_mark_##SUFFIX(const CapacityMarkParams<ID> p) {   \
        mark(p);                                                                                                            \
    }
CAPACITY(int32, int)
CAPACITY(int64, long long)

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_pick(const CapacityPickParams p) {
    const int* histogram = p.histogram + (static_cast<int64>(blockIdx.x) << p.width) * p.num_experts;
    Column* columns = p.columns + static_cast<int64>(blockIdx.x) * p.num_experts;
    int* of_warps = reinterpret_cast<int*>(dynamic_shared);
    let_next_launch_start();
    wait_for_last_launch();
    pick(histogram, columns, p.reserved, p.room, p.num_experts, p.width, p.capacity, blockIdx.y, of_warps);
}
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) capacity_finish(const CapacityFinishParams p) { finish(p); }
