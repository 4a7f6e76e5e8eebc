// The tokens with the largest keys of each expert: a radix select over the columns of scores (L, E), without a sort.
//
// Of each column it takes a given number of tokens: the largest scores, equal ones by rising token. NaN ranks first, -0 equals
// +0. A column is one expert's in one sequence. Keys have 32 bits. Of scores with 16 bits the last 10 tell nothing and are 0.
//
//   columns_count  histogram of one digit of the keys whose higher digits are those of the column's `Column`
//   columns_pick   the digit of the last key that is taken, and how many are still wanted there
//   columns_ties   per part, tokens whose key equals that of the last that is taken, if not all of these are taken
//   columns_mark   one bit per token and expert: taken or not
//   chosen_bits    for token rounding: a bit per chosen pair, and the number of tokens that chose each expert
//   round_targets  for token rounding: how many tokens of each expert are taken
//
// In token rounding a chosen pair ranks before all that are not chosen. If no more than the chosen ones are wanted, the
// selection is among these; else all of them are taken, and the selection is among the others.
//
// Atomics are sums of integers, the same in any order.
//
// Launch: SELECT_THREADS threads; grid (S * parts, ceil(E / 32)) but for the kernels named below. A block takes one part of a
// sequence's tokens and 32 columns, a lane each. Dynamic shared memory:
//   columns_count  16-bit counters (2^width, 32). So a part has fewer than 65536 tokens.
//   columns_ties   (32,) int32
//   columns_mark   (33, 32) int32
//   columns_pick   none; a warp per column, grid ceil(S * E / warps)
//   chosen_bits    (E,) int32; grid (parts, 1)
//   round_targets  (E,) int32; one block
#include "token_parts.cuh"

#if !defined(SELECT_THREADS) || !defined(MAX_EXPERTS) || !defined(DEFAULT_SHARED_BYTES)
#error "SELECT_THREADS, MAX_EXPERTS and DEFAULT_SHARED_BYTES are given by launch_config.py"
#endif
static_assert(SELECT_THREADS == 1024, "a warp sums the counts of all warps, a lane each");
static_assert(4 * MAX_EXPERTS <= DEFAULT_SHARED_BYTES, "launches ask for no more shared memory");
constexpr int WARPS = SELECT_THREADS / 32;
constexpr int LOADS = 8;  // rows of a warp on their way from global memory

template <class T>
struct ColumnsCountParams {
    const T* scores;         // (L, E) bf16, fp16 or fp32, in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in; not read for the first digit if `chosen` is null
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    int* histogram;          // (S, E, 2^width) int32, in and out: zeros at first
    int64 L;
    int num_experts, num_sequences, parts, width, shift;
};

struct ColumnsPickParams {
    int* histogram;   // (S, E, 2^width) int32, in; set to zeros
    Column* columns;  // (S, E) of 16 bytes, in and out
    int64 num_columns;
    int width, shift, last;
    int wanted;  // of each column; -1: `columns` says
};

template <class T>
struct ColumnsTiesParams {
    const T* scores;         // (L, E), in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    int* ties;               // (S, parts, E) int32, out
    int64 L;
    int num_experts, num_sequences, parts;
};

template <class T>
struct ColumnsMarkParams {
    const T* scores;         // (L, E), in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    const int* ties;         // (S, parts, E) int32, in
    unsigned* taken;         // (L, ceil(E/32)) uint32, out
    int64 L;
    int num_experts, num_sequences, parts;
};

template <class Id>
struct ChosenBitsParams {
    const Id* ids;     // (L, k) int32 or int64, in; id < 0 or >= E: an empty slot
    unsigned* chosen;  // (L, ceil(E/32)) uint32, out
    int* frequencies;  // (E,) int32, in and out: zeros at first; tokens that chose each expert
    int64 L;
    int k, num_experts, parts;
};

enum Rounding { UP, DOWN, NEAREST, BALANCE };

struct RoundTargetsParams {
    const int* frequencies;  // (E,) int32, in
    Column* columns;         // (E,) of 16 bytes, out
    int64 L;
    int num_experts, tile, rounding;
};

// A block's place: its sequence, its part of that, and its lane's column.
template <class Params>
struct Place {
    int sequence, part, expert, word, num_words;
    Tokens tokens;
    __device__ __forceinline__ explicit Place(const Params& p)
        : sequence(blockIdx.x / p.parts), part(blockIdx.x % p.parts), expert(32 * blockIdx.y + (threadIdx.x & 31)),
          word(blockIdx.y), num_words((p.num_experts + 31) / 32),
          tokens(tokens_of_part(tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence), p.parts, part)) {}
    __device__ __forceinline__ int64 column(const Params& p) const {
        return static_cast<int64>(sequence) * p.num_experts + expert;
    }
};

__device__ __forceinline__ unsigned key_of(float v) { return sort_key(v); }
__device__ __forceinline__ unsigned key_of(bf16 v) { return sort_key(to_float(v)) & ~0x3ffu; }
__device__ __forceinline__ unsigned key_of(fp16 v) { return sort_key(to_float(v)) & ~0x3ffu; }

// Which pairs of a lane's column the selection is among, by the word of chosen pairs; of a column past the last none.
struct Members {
    unsigned flip, mask;
    __device__ __forceinline__ Members(bool among_chosen, bool exists)
        : flip(among_chosen ? 0 : 0xffffffffu), mask(exists ? 1u << (threadIdx.x & 31) : 0) {}
    __device__ __forceinline__ bool has(unsigned chosen) const { return ((chosen ^ flip) & mask) != 0; }
};

// Calls f(i, key, the word of chosen pairs) for the tokens first, first + step, ... of `tokens` and the lane's column, with
// LOADS of them on their way at one time. All lanes of a warp call f, which may hold collectives. Lanes past the last column
// see that one's keys.
template <class T, template <class> class Params, class F>
__device__ __forceinline__ void for_tokens(const Params<T>& p, const Place<Params<T>>& place, const Tokens& tokens, int first,
                                           int step, const F& f) {
    const T* column = p.scores + tokens.begin * p.num_experts + min(place.expert, p.num_experts - 1);
    const unsigned* words = p.chosen ? p.chosen + tokens.begin * place.num_words + place.word : nullptr;
    const int number = static_cast<int>(tokens.end - tokens.begin);
    for (int begin = first; begin < number; begin += LOADS * step) {
        T loaded[LOADS];
        unsigned chosen[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int i = begin + l * step;
            if (i < number) loaded[l] = column[static_cast<int64>(i) * p.num_experts];
            chosen[l] = words && i < number ? words[static_cast<int64>(i) * place.num_words] : 0;
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const int i = begin + l * step;
            if (i < number) f(i, key_of(loaded[l]), chosen[l]);
        }
    }
}

template <class T>
__device__ __forceinline__ void count_columns(const ColumnsCountParams<T>& p) {
    unsigned* counters = reinterpret_cast<unsigned*>(dynamic_shared);  // (2^width, 16) of two 16-bit counters
    const int num_words = 16 << p.width, lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < num_words; i += SELECT_THREADS) counters[i] = 0;
    const Place<ColumnsCountParams<T>> place(p);
    Column column = {0, 0, 0, 0};
    const unsigned above = bits_above(p.shift, p.width);
    if (place.expert < p.num_experts && (above || p.chosen)) column = p.columns[place.column(p)];
    const unsigned digits = (1u << p.width) - 1, one = lane & 1 ? 1u << 16 : 1u, key_so_far = column.key & above;
    const Members members(column.among_chosen != 0, place.expert < p.num_experts);
    unsigned* of_lane = counters + lane / 2;
    __syncthreads();
    for_tokens(p, place, place.tokens, threadIdx.x / 32, WARPS, [&](int, unsigned key, unsigned chosen) {
        if (members.has(chosen) && ((key ^ key_so_far) & above) == 0) atomicAdd(of_lane + (key >> p.shift & digits) * 16, one);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < num_words; i += SELECT_THREADS) {
        const unsigned both = counters[i];
        if (both == 0) continue;
        const int expert = 32 * blockIdx.y + 2 * (i & 15);
        int* bin = p.histogram + ((static_cast<int64>(place.sequence) * p.num_experts + expert) << p.width) + i / 16;
        if (both & 0xffff) atomicAdd(bin, static_cast<int>(both & 0xffff));
        if (both >> 16) atomicAdd(bin + (1 << p.width), static_cast<int>(both >> 16));
    }
}

// One column by one warp. Lanes take the bins from the highest down, each as many.
__device__ __forceinline__ void pick(const ColumnsPickParams& p) {
    const int64 number = blockIdx.x * int64(WARPS) + threadIdx.x / 32;
    if (number >= p.num_columns) return;
    const int lane = threadIdx.x & 31, bins = 1 << p.width, of_lane = max(bins / 32, 1);
    int* histogram = p.histogram + (number << p.width);
    const int highest = bins - 1 - lane * of_lane;
    Column column = {0, p.wanted, 0, 0};
    if (p.wanted < 0 || bits_above(p.shift, p.width)) column = p.columns[number];
    int sum = 0;
    for (int i = 0; i < of_lane && highest - i >= 0; ++i) sum += histogram[highest - i];
    int upto = sum;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += other;
    }
    const int wanted = column.wanted, total = __shfl_sync(0xffffffffu, upto, 31);
    if (wanted <= 0) {  // above all keys but NaN's, of which none is taken
        column.key |= static_cast<unsigned>(bins - 1) << p.shift;
        if (lane == 0) p.columns[number] = column;
    } else if (wanted > total) {  // below all keys
        column.wanted = ALL;
        if (lane == 0) p.columns[number] = column;
    } else if (upto - sum < wanted && wanted <= upto) {
        int before = upto - sum, bin = highest, here = histogram[bin];
        while (before + here < wanted) before += here, here = histogram[--bin];
        column.key |= static_cast<unsigned>(bin) << p.shift;
        column.wanted = p.last && here == wanted - before ? ALL : wanted - before;
        p.columns[number] = column;
    }
    for (int i = 0; i < of_lane && highest - i >= 0; ++i) histogram[highest - i] = 0;
}

template <class T>
__device__ __forceinline__ void count_ties(const ColumnsTiesParams<T>& p) {
    int* counts = reinterpret_cast<int*>(dynamic_shared);  // (32,)
    const int lane = threadIdx.x & 31;
    const Place<ColumnsTiesParams<T>> place(p);
    Column column = {0, 0, 0, 0};
    if (place.expert < p.num_experts) column = p.columns[place.column(p)];
    if (!__any_sync(0xffffffffu, has_ties(column))) return;
    if (threadIdx.x < 32) counts[lane] = 0;
    __syncthreads();
    const Members members(column.among_chosen != 0, place.expert < p.num_experts);
    int count = 0;
    for_tokens(p, place, place.tokens, threadIdx.x / 32, WARPS,
               [&](int, unsigned key, unsigned chosen) { count += members.has(chosen) && key == column.key; });
    if (count) atomicAdd(counts + lane, count);
    __syncthreads();
    if (threadIdx.x < 32 && place.expert < p.num_experts)
        p.ties[static_cast<int64>(blockIdx.x) * p.num_experts + place.expert] = counts[lane];
}

// Warps take consecutive rows, so that a lane meets the ties of its column in the order of tokens.
template <class T>
__device__ __forceinline__ void mark(const ColumnsMarkParams<T>& p) {
    int* before = reinterpret_cast<int*>(dynamic_shared);  // (32,), and (WARPS, 32) ties of each warp
    int* of_warp = before + 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const Place<ColumnsMarkParams<T>> place(p);
    Column column = {0xffffffffu, 0, 0, 0};
    if (place.expert < p.num_experts) column = p.columns[place.column(p)];
    const Members members(column.among_chosen != 0, place.expert < p.num_experts);
    const Tokens tokens = tokens_of_part(place.tokens, WARPS, warp);
    int ties = 0;  // of the column in the tokens before
    if (__any_sync(0xffffffffu, has_ties(column))) {
        if (warp == 0) before[lane] = 0;
        __syncthreads();
        int count = 0;
        if (has_ties(column))
            for (int part = warp; part < place.part; part += WARPS)
                count += p.ties[(static_cast<int64>(blockIdx.x) - place.part + part) * p.num_experts + place.expert];
        if (count) atomicAdd(before + lane, count);
        count = 0;
        for_tokens(p, place, tokens, 0, 1,
                   [&](int, unsigned key, unsigned chosen) { count += members.has(chosen) && key == column.key; });
        of_warp[32 * warp + lane] = count;
        __syncthreads();
        ties = before[lane];
        for (int w = 0; w < warp; ++w) ties += of_warp[32 * w + lane];
    }
    unsigned* words = p.taken + tokens.begin * place.num_words + place.word;
    for_tokens(p, place, tokens, 0, 1, [&](int i, unsigned key, unsigned chosen) {
        const bool is_member = members.has(chosen);
        bool takes = is_member && key > column.key;
        if (is_member && key == column.key) takes = ties < column.wanted, ++ties;
        if (!column.among_chosen && (chosen & members.mask)) takes = true;
        const unsigned taken = __ballot_sync(0xffffffffu, takes);
        if (lane == 0) words[static_cast<int64>(i) * place.num_words] = taken;
    });
}

template <class Id>
__device__ __forceinline__ void mark_chosen(const ChosenBitsParams<Id>& p) {
    int* frequencies = reinterpret_cast<int*>(dynamic_shared);
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) frequencies[e] = 0;
    __syncthreads();
    const int num_words = (p.num_experts + 31) / 32;
    const Tokens tokens = tokens_of_part({0, p.L}, p.parts, blockIdx.x);
    for (int64 i = tokens.begin * num_words + threadIdx.x; i < tokens.end * num_words; i += SELECT_THREADS) {
        const int64 token = i / num_words;
        const int first = 32 * static_cast<int>(i - token * num_words);
        const Id* ids = p.ids + token * p.k;
        unsigned bits = 0;
        for (int j = 0; j < p.k; ++j) {
            const Id id = ids[j];
            if (id >= first && id < min(first + 32, p.num_experts)) bits |= 1u << (static_cast<int>(id) - first);
        }
        p.chosen[i] = bits;
        for (; bits; bits &= bits - 1) atomicAdd(frequencies + first + __ffs(static_cast<int>(bits)) - 1, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS)
        if (frequencies[e]) atomicAdd(p.frequencies + e, frequencies[e]);
}

// Of `frequency` tokens, what is left over a multiple of the tile, and what rounding up adds; there are L tokens at most.
struct Rounded {
    int over, missing;
    __device__ __forceinline__ Rounded(int frequency, int tile, int64 L) : over(frequency % tile), missing(0) {
        if (over) missing = static_cast<int>(min(static_cast<int64>(tile - over), L - frequency));
    }
};

__device__ __forceinline__ void round_frequencies(const RoundTargetsParams& p) {
    int* change = reinterpret_cast<int*>(dynamic_shared);  // (E,), from the frequency to the target
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) {
        const int frequency = p.frequencies[e];
        const Rounded rounded(frequency, p.tile, p.L);
        const bool nearest_is_up = p.tile - rounded.over < rounded.over;  // half a tile goes down
        const bool up = p.rounding == UP || (p.rounding == NEAREST && nearest_is_up);
        change[e] = p.rounding == BALANCE ? frequency : up ? rounded.missing : -rounded.over;
    }
    __syncthreads();
    if (p.rounding == BALANCE && threadIdx.x == 0) {
        int sum = 0;  // of the changes so far
        for (int e = 0; e < p.num_experts; ++e) {
            const Rounded rounded(change[e], p.tile, p.L);
            const int up = sum + rounded.missing, down = sum - rounded.over;
            const bool goes_up = (up < 0 ? -up : up) < (down < 0 ? -down : down);
            change[e] = goes_up ? rounded.missing : -rounded.over;
            sum += change[e];
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) {
        const int among_chosen = change[e] < 0;
        p.columns[e] = {0, among_chosen ? p.frequencies[e] + change[e] : change[e], among_chosen, 0};
    }
}

#define SELECTION_OF_SCORES(SUFFIX, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_count_##SUFFIX(const ColumnsCountParams<T> p) { \
        count_columns(p);                                                                                                \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_ties_##SUFFIX(const ColumnsTiesParams<T> p) {   \
        count_ties(p);                                                                                                   \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_mark_##SUFFIX(const ColumnsMarkParams<T> p) { mark(p); }
SELECTION_OF_SCORES(bfloat16, bf16)
SELECTION_OF_SCORES(float16, fp16)
SELECTION_OF_SCORES(float32, float)

#define SELECTION_OF_IDS(SUFFIX, ID)                                                                                  \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) chosen_bits_##SUFFIX(const ChosenBitsParams<ID> p) { \
        mark_chosen(p);                                                                                               \
    }
SELECTION_OF_IDS(int32, int)
SELECTION_OF_IDS(int64, long long)

extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_pick(const ColumnsPickParams p) { pick(p); }
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) round_targets(const RoundTargetsParams p) { round_frequencies(p); }
