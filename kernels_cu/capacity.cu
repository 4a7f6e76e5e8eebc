// Slots that stay where an expert takes at most `capacity` of them per sequence: ids (L, k) with dropped slots -1.
//
// Slots of an expert stay by falling key, equal ones by rising token, then slot. A key is the same for all slots (order
// "position"), falls with the slot's number in its token ("choice"), or orders the slot's weight ("weights") or the token's
// priority ("priority"). So "position" has nothing but ties. For other orders a radix select finds the last key that stays,
// with columns_pick of selection.cu between two digits.
//
//   capacity_count  histogram of one digit of the keys whose higher digits are those of the column's `Column`
//   capacity_ties   per part and expert, slots whose key equals that of the last that stays, or all slots for "position"
//   capacity_mark   the ids. A block knows the ties of the parts before it. In most blocks all ties of an expert stay or none
//                   does. Where some do, warps take consecutive slots and rank the ties.
//
// Atomics are sums of integers in shared and global memory, the same in any order.
//
// Launch: SELECT_THREADS threads, grid S * parts. A block takes one part of a sequence's tokens. Dynamic shared memory:
//   capacity_count  16-bit counters (2^width, E). So a part has fewer than 65536 slots.
//   capacity_ties   (E + 1,) int32
//   capacity_mark   (2 + walkers, E) int32 and one more: the last keys, room for ties, ties of each warp that ranks them
#include "token_parts.cuh"

#if !defined(SELECT_THREADS)
#error "SELECT_THREADS is given by launch_config.py"
#endif
static_assert(SELECT_THREADS % 32 == 0 && SELECT_THREADS <= 1024, "threads of a block");

constexpr int LOADS = 4;  // slots of a thread on their way from global memory
enum Order { POSITION, CHOICE, WEIGHTS, PRIORITY };
enum ValueType { FLOAT32, BFLOAT16, FLOAT16 };

template <class Id>
struct CapacityCountParams {
    const Id* ids;          // (L, k) int32 or int64, in; id < 0 or >= E: an empty slot
    const void* values;     // (L, k) for WEIGHTS or (L,) for PRIORITY, of value_type, in; else null
    const Column* columns;  // (S, E) of 16 bytes, in; not read for the first digit
    const int* sequences;   // (S+1,) int32 offsets, in; null for equal lengths
    int* histogram;         // (S, 2^width, E) int32, in and out: zeros at first
    int64 L;
    int k, num_experts, num_sequences, parts, order, value_type, width, shift;
};

template <class Id>
struct CapacityTiesParams {
    const Id* ids;          // (L, k), in
    const void* values;     // as in CapacityCountParams, in
    const Column* columns;  // (S, E) of 16 bytes, in; null for POSITION
    const int* sequences;   // (S+1,) int32 offsets, in; null for equal lengths
    int* ties;              // (S, parts, E) int32, out
    int64 L;
    int k, num_experts, num_sequences, parts, order, value_type;
};

template <class Id>
struct CapacityMarkParams {
    const Id* ids;          // (L, k), in
    const void* values;     // as in CapacityCountParams, in
    const Column* columns;  // (S, E) of 16 bytes, in; null for POSITION
    const int* sequences;   // (S+1,) int32 offsets, in; null for equal lengths
    const int* ties;        // (S, parts, E) int32, in
    int* kept;              // (L, k) int32, out: the ids that stay, -1 for dropped and empty slots
    int64 L;
    int k, num_experts, num_sequences, parts, order, value_type;
    int capacity, walkers;
};

// The slots of a block.
template <class Params>
struct Slots {
    const Params& p;
    int sequence, part, number;
    int64 first;
    __device__ __forceinline__ explicit Slots(const Params& params)
        : p(params), sequence(blockIdx.x / params.parts), part(blockIdx.x % params.parts) {
        const Tokens all = tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence);
        const Tokens tokens = tokens_of_part(all, p.parts, part);
        first = tokens.begin * p.k;
        number = static_cast<int>((tokens.end - tokens.begin) * p.k);
    }
    // The keys of LOADS slots from `slot` on, `step` apart, of which those before `end` exist.
    __device__ __forceinline__ void load_keys(unsigned (&keys)[LOADS], int slot, int step, int end) const {
        if (p.order == CHOICE) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
                keys[l] = static_cast<unsigned>(p.k - 1 - (slot + l * step) % p.k) << __clz(p.k - 1);  // k > 1
        } else if (p.order != POSITION && p.value_type == FLOAT32) {
            load_values<float>(keys, slot, step, end);
        } else if (p.order != POSITION && p.value_type == BFLOAT16) {
            load_values<bf16>(keys, slot, step, end);
        } else if (p.order != POSITION) {
            load_values<fp16>(keys, slot, step, end);
        }
    }
    template <class T>
    __device__ __forceinline__ void load_values(unsigned (&keys)[LOADS], int slot, int step, int end) const {
        const T* values = static_cast<const T*>(p.values) + (p.order == WEIGHTS ? first : first / p.k);
        T loaded[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int i = slot + l * step;
            if (i < end) loaded[l] = values[p.order == WEIGHTS ? i : i / p.k];
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) keys[l] = slot + l * step < end ? sort_key(to_float(loaded[l])) : 0;
    }
    // Calls f(slot, id, key) for slots begin + offset, then every `step`-th, with LOADS of them on their way at one time.
    // Threads with the same begin and end call f as often, past the end with id -1, as for empty slots.
    template <class F>
    __device__ __forceinline__ void for_each(int begin, int end, int offset, int step, const F& f) const {
        for (int base = begin; base < end; base += LOADS * step) {
            int ids[LOADS];
            unsigned keys[LOADS] = {};
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                const int slot = base + offset + l * step;
                ids[l] = -1;
                if (slot < end) {
                    const auto id = p.ids[first + slot];
                    if (id >= 0 && id < p.num_experts) ids[l] = static_cast<int>(id);
                }
            }
            load_keys(keys, base + offset, step, end);
#pragma unroll
            for (int l = 0; l < LOADS; ++l) f(base + offset + l * step, ids[l], keys[l]);
        }
    }
    __device__ __forceinline__ const Column* columns() const { return p.columns + static_cast<int64>(sequence) * p.num_experts; }
};

template <class Id>
__device__ __forceinline__ void count(const CapacityCountParams<Id>& p) {
    unsigned* counters = reinterpret_cast<unsigned*>(dynamic_shared);  // (2^width, E) of 16 bits, in pairs
    const Slots<CapacityCountParams<Id>> slots(p);
    const int num_counters = p.num_experts << p.width;
    for (int i = threadIdx.x; i < (num_counters + 1) / 2; i += SELECT_THREADS) counters[i] = 0;
    __syncthreads();
    const unsigned above = bits_above(p.shift, p.width), digits = (1u << p.width) - 1;
    slots.for_each(0, slots.number, threadIdx.x, SELECT_THREADS, [&](int, int id, unsigned key) {
        if (id < 0 || (above && (key & above) != slots.columns()[id].key)) return;
        const int counter = static_cast<int>(key >> p.shift & digits) * p.num_experts + id;
        atomicAdd(counters + counter / 2, counter & 1 ? 1u << 16 : 1u);
    });
    __syncthreads();
    int* histogram = p.histogram + (static_cast<int64>(slots.sequence) * p.num_experts << p.width);
    for (int i = threadIdx.x; i < (num_counters + 1) / 2; i += SELECT_THREADS) {
        const unsigned both = counters[i];
        if (both == 0) continue;
        if (both & 0xffff) atomicAdd(histogram + 2 * i, static_cast<int>(both & 0xffff));
        if (both >> 16) atomicAdd(histogram + 2 * i + 1, static_cast<int>(both >> 16));
    }
}

template <class Id>
__device__ __forceinline__ void count_ties(const CapacityTiesParams<Id>& p) {
    int* counts = reinterpret_cast<int*>(dynamic_shared);
    int& any = counts[p.num_experts];  // whether an expert has ties
    const Slots<CapacityTiesParams<Id>> slots(p);
    if (threadIdx.x == 0) any = p.order == POSITION;
    __syncthreads();
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) {
        counts[e] = 0;
        if (p.order != POSITION && has_ties(slots.columns()[e])) any = 1;
    }
    __syncthreads();
    if (!any) return;
    slots.for_each(0, slots.number, threadIdx.x, SELECT_THREADS, [&](int, int id, unsigned key) {
        if (id >= 0 && (p.order == POSITION || key == slots.columns()[id].key)) atomicAdd(counts + id, 1);
    });
    __syncthreads();
    int* ties = p.ties + static_cast<int64>(blockIdx.x) * p.num_experts;
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) ties[e] = counts[e];
}

// `room` of an expert: how many of its ties in this block stay, the first ones; ALL where all do.
template <class Id>
__device__ __forceinline__ void mark(const CapacityMarkParams<Id>& p) {
    unsigned* last_key = reinterpret_cast<unsigned*>(dynamic_shared);
    int* room = reinterpret_cast<int*>(last_key + p.num_experts);
    int* of_warp = room + p.num_experts;             // (walkers, E)
    int& some = of_warp[p.walkers * p.num_experts];  // whether of some expert only the first ties stay
    const Slots<CapacityMarkParams<Id>> slots(p);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, E = p.num_experts;
    if (threadIdx.x == 0) some = 0;
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        Column column = {0, p.capacity, 0, 0};
        if (p.order != POSITION) column = slots.columns()[e];
        last_key[e] = column.key;
        room[e] = column.wanted;
    }
    __syncthreads();
    // As many threads per expert as there are share the parts before this one.
    const int* ties = p.ties + (static_cast<int64>(blockIdx.x) - slots.part) * E;
    const int share = max(SELECT_THREADS / E, 1);
    for (int i = threadIdx.x; i < share * E; i += SELECT_THREADS) {
        const int e = i % E;
        if (p.order != POSITION && !has_ties(slots.columns()[e])) continue;
        int before = 0;
        for (int part = i / E; part < slots.part; part += share) before += ties[static_cast<int64>(part) * E + e];
        if (before) atomicAdd(room + e, -before);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += SELECT_THREADS) {
        if (room[e] == ALL) continue;
        const int left = max(room[e], 0);
        const bool stay = left > 0 && ties[static_cast<int64>(slots.part) * E + e] <= left;
        room[e] = stay ? ALL : left;
        if (!stay && left > 0) some = 1;
    }
    __syncthreads();
    if (p.sequences && (blockIdx.x == 0 || blockIdx.x == gridDim.x - 1)) {  // tokens that are in no sequence
        const int64 begin = clamped(p.sequences[0], p.L) * p.k, end = clamped(p.sequences[p.num_sequences], p.L) * p.k;
        if (blockIdx.x == 0)
            for (int64 i = threadIdx.x; i < begin; i += SELECT_THREADS) p.kept[i] = -1;
        if (blockIdx.x == gridDim.x - 1)
            for (int64 i = end + threadIdx.x; i < p.L * p.k; i += SELECT_THREADS) p.kept[i] = -1;
    }
    int* kept = p.kept + slots.first;
    if (!some) {
        slots.for_each(0, slots.number, threadIdx.x, SELECT_THREADS, [&](int slot, int id, unsigned key) {
            const bool stays = id >= 0 && (key > last_key[id] || (key == last_key[id] && room[id] > 0));
            if (slot < slots.number) kept[slot] = stays ? id : -1;
        });
        return;
    }
    if (warp < p.walkers)
        for (int e = lane; e < E; e += 32) of_warp[warp * E + e] = 0;
    __syncthreads();
    const int of_each = (slots.number + p.walkers - 1) / p.walkers, begin = min(warp * of_each, slots.number);
    const int end = warp < p.walkers ? min(begin + of_each, slots.number) : begin;
    slots.for_each(begin, end, lane, 32, [&](int, int id, unsigned key) {
        if (id >= 0 && key == last_key[id]) atomicAdd(of_warp + warp * E + id, 1);
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
    slots.for_each(begin, end, lane, 32, [&](int slot, int id, unsigned key) {
        bool stays = false, tie = false;
        if (id >= 0) {
            const bool equal = key == last_key[id];
            stays = key > last_key[id] || (equal && room[id] == ALL);
            tie = equal && room[id] != ALL && room[id] > 0;
        }
        if (__any_sync(0xffffffffu, tie)) {
            const unsigned alike = __match_any_sync(0xffffffffu, tie ? id : -1), before = alike & ((1u << lane) - 1);
            if (tie) stays = of_warp[warp * E + id] + __popc(before) < room[id];
            __syncwarp();
            if (tie && before == 0) of_warp[warp * E + id] += __popc(alike);
            __syncwarp();
        }
        if (slot < end) kept[slot] = stays ? id : -1;
    });
}

#define CAPACITY(SUFFIX, ID)                                                                                                \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_count_##SUFFIX(const CapacityCountParams<ID> p) { \
        count(p);                                                                                                           \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_ties_##SUFFIX(const CapacityTiesParams<ID> p) {   \
        count_ties(p);                                                                                                      \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) capacity_mark_##SUFFIX(const CapacityMarkParams<ID> p) {   \
        mark(p);                                                                                                            \
    }
CAPACITY(int32, int)
CAPACITY(int64, long long)
