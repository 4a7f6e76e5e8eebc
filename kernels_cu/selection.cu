// The tokens with the largest keys of each expert: a radix select over the columns of scores (L, E), without a sort.
//
// Of each column it takes a given number of tokens: the largest scores, equal ones by rising token. NaN ranks first, -0 equals
// +0. A column is one expert's in one sequence. Keys have 32 bits. Of scores with 16 bits the last 10 tell nothing and are 0.
//
//   columns_count   histogram of the leading digit of the keys
//   columns_pick    the digit of the last key that is taken, and how many are still wanted there
//   columns_split   one bit per token and expert: taken, as the digit is higher; and another: a candidate, whose digit is that
//   columns_finish  takes the candidates that are still wanted, of those that are equal the lowest tokens
//   chosen_bits     for token rounding: a bit per chosen pair, and the number of tokens that chose each expert
//   round_targets   for token rounding: how many tokens of each expert are taken
//
// In token rounding a chosen pair ranks before all that are not chosen. If no more than the chosen ones are wanted, the
// selection is among these; else all of them are taken, and the selection is among the others.
//
// Atomics are sums of integers and bits that are set, the same in any order.
//
// Launch: SELECT_THREADS threads; grid (S * parts, ceil(E / 32)) but for the kernels named below. A block takes one part of a
// sequence's tokens and 32 columns, a lane each. Dynamic shared memory:
//   columns_count   (2^width, 32) int32: each lane has a bank to itself
//   columns_split   none
//   columns_pick    (32, 32) int32; grid (S, ceil(E / 32)), a block for 32 columns
//   columns_finish  FINISH_SHARED_BYTES; FINISH_THREADS threads, grid S * E, a block per column
//   chosen_bits     (E,) int32; grid (parts, 1)
//   round_targets   (E,) int32; one block
#include "token_parts.cuh"

#if !defined(SELECT_THREADS) || !defined(FINISH_THREADS) || !defined(FINISH_SHARED_BYTES)
#error "SELECT_THREADS, FINISH_THREADS and FINISH_SHARED_BYTES are given by launch_config.py"
#endif
#if !defined(MAX_EXPERTS) || !defined(DEFAULT_SHARED_BYTES)
#error "MAX_EXPERTS and DEFAULT_SHARED_BYTES are given by launch_config.py"
#endif
static_assert(SELECT_THREADS == 1024, "a warp sums the counts of all warps, a lane each");
static_assert(FINISH_THREADS % 32 == 0 && FINISH_THREADS <= 1024, "threads of a block");
static_assert(4 * MAX_EXPERTS <= DEFAULT_SHARED_BYTES, "launches ask for no more shared memory");
constexpr int WARPS = SELECT_THREADS / 32;
constexpr int FINISH_LOADS = 16;             // tokens of a thread of columns_finish on their way from global memory
constexpr int DIGIT = 8, BINS = 1 << DIGIT;  // of columns_finish

struct FinishShared {
    unsigned long long list[(FINISH_SHARED_BYTES - 4 * BINS - 16) / 8];  // candidates
    int histogram[BINS];
    int listed, digit, wanted, here;
};
static_assert(sizeof(FinishShared) <= FINISH_SHARED_BYTES && FINISH_SHARED_BYTES <= DEFAULT_SHARED_BYTES, "its launches");
constexpr int MAX_LISTED = sizeof(FinishShared::list) / 8;

template <class T>
struct ColumnsCountParams {
    const T* scores;         // (L, E) bf16, fp16 or fp32, in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in; not read if `chosen` is null
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    int* histogram;          // (S, 2^width, E) int32, in and out: zeros at first
    int64 L;
    int num_experts, num_sequences, parts, width;
};

struct ColumnsPickParams {
    int* histogram;   // (S, 2^width, E) int32, in; set to zeros unless `last`
    Column* columns;  // (S, E) of 16 bytes, in and out
    int num_experts, width, shift, last;
    int wanted;  // of each column; -1: `columns` says
};

template <class T>
struct ColumnsSplitParams {
    const T* scores;         // (L, E), in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    unsigned* taken;         // (L, ceil(E/32)) uint32, out
    unsigned* candidates;    // (ceil(E/32), L) uint32, out
    int64 L;
    int num_experts, num_sequences, parts, width;
};

template <class T>
struct ColumnsFinishParams {
    const T* scores;             // (L, E), in
    const Column* columns;       // (S, E) of 16 bytes, in
    const int* sequences;        // (S+1,) int32 offsets, in; null for equal lengths
    const unsigned* candidates;  // (ceil(E/32), L) uint32, in
    unsigned* taken;             // (L, ceil(E/32)) uint32, in and out
    int64 L;
    int num_experts, num_sequences, width;
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
template <int LOADS, class T, template <class> class Params, class F>
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
    int* counters = reinterpret_cast<int*>(dynamic_shared);  // (2^width, 32)
    const int num_counters = 32 << p.width, lane = threadIdx.x & 31, shift = 32 - p.width;
    for (int i = threadIdx.x; i < num_counters; i += SELECT_THREADS) counters[i] = 0;
    const Place<ColumnsCountParams<T>> place(p);
    const bool exists = place.expert < p.num_experts;
    const Members members(exists && p.chosen && p.columns[place.column(p)].among_chosen, exists);
    __syncthreads();
    for_tokens<16>(p, place, place.tokens, threadIdx.x / 32, WARPS, [&](int, unsigned key, unsigned chosen) {
        if (members.has(chosen)) atomicAdd(counters + (key >> shift) * 32 + lane, 1);
    });
    __syncthreads();
    int* histogram = p.histogram + (static_cast<int64>(place.sequence) << p.width) * p.num_experts + place.expert;
    for (int i = threadIdx.x; i < num_counters; i += SELECT_THREADS)
        if (counters[i]) atomicAdd(histogram + static_cast<int64>(i / 32) * p.num_experts, counters[i]);
}

// Lanes take a column each, warps as many bins each, from the highest down.
__device__ __forceinline__ void pick(const ColumnsPickParams& p) {
    int* of_warps = reinterpret_cast<int*>(dynamic_shared);  // (32, 32)
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, expert = 32 * blockIdx.y + lane;
    const int bins = 1 << p.width, of_warp = max(bins / WARPS, 1), highest = bins - 1 - warp * of_warp;
    const int number = expert < p.num_experts && highest >= 0 ? of_warp : 0;
    int* histogram = p.histogram + (static_cast<int64>(blockIdx.x) << p.width) * p.num_experts + expert;
    Column* found = p.columns + static_cast<int64>(blockIdx.x) * p.num_experts + expert;
    int sum = 0;
#pragma unroll 8
    for (int i = 0; i < number; ++i) sum += histogram[static_cast<int64>(highest - i) * p.num_experts];
    of_warps[32 * warp + lane] = sum;
    Column column = {0, p.wanted, 0, 0};
    if (expert < p.num_experts && (p.wanted < 0 || bits_above(p.shift, p.width))) column = *found;
    __syncthreads();  // all have read the column, of which one thread writes another
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp) before = total;
        total += of_warps[32 * w + lane];
    }
    const int wanted = column.wanted;
    if (number && wanted > 0 && before < wanted && wanted <= before + sum) {
        int bin = highest, here = histogram[static_cast<int64>(bin) * p.num_experts];
        while (before + here < wanted) before += here, here = histogram[static_cast<int64>(--bin) * p.num_experts];
        column.key |= static_cast<unsigned>(bin) << p.shift;
        column.wanted = p.last && here == wanted - before ? ALL : wanted - before;
        *found = column;
    } else if (warp == 0 && number && wanted <= 0) {  // above all keys but NaN's, of which none is taken
        column.key |= static_cast<unsigned>(bins - 1) << p.shift;
        *found = column;
    } else if (warp == 0 && number && wanted > total) {  // below all keys
        column.wanted = ALL;
        *found = column;
    }
    if (!p.last)
        for (int i = 0; i < number; ++i) histogram[static_cast<int64>(highest - i) * p.num_experts] = 0;
}

template <class T>
__device__ __forceinline__ void split(const ColumnsSplitParams<T>& p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, shift = 32 - p.width;
    const Place<ColumnsSplitParams<T>> place(p);
    const bool exists = place.expert < p.num_experts;
    Column column = {0, 0, 0, 0};
    if (exists) column = p.columns[place.column(p)];
    const Members members(column.among_chosen != 0, exists);
    const unsigned digit = column.key >> shift, least = column.wanted == ALL ? digit : digit + 1;
    const unsigned candidate = has_ties(column) ? digit : 0xffffffffu;
    const unsigned always = column.among_chosen ? 0 : members.mask;  // of the chosen pairs
    const Tokens tokens = tokens_of_part(place.tokens, WARPS, warp);
    unsigned* taken = p.taken + tokens.begin * place.num_words + place.word;
    unsigned* candidates = p.candidates + place.word * p.L + tokens.begin;
    for_tokens<8>(p, place, tokens, 0, 1, [&](int i, unsigned key, unsigned chosen) {
        const bool is_member = members.has(chosen);
        const unsigned takes = __ballot_sync(0xffffffffu, (is_member && key >> shift >= least) || (chosen & always));
        const unsigned maybe = __ballot_sync(0xffffffffu, is_member && key >> shift == candidate);
        if (lane == 0) {
            taken[static_cast<int64>(i) * place.num_words] = takes;
            candidates[i] = maybe;
        }
    });
}

// The candidates of a block's column as 64-bit values with the order in which they are taken, the largest first: the key,
// then the token. Those that do not fit into `list` are read again each time.
template <class T>
struct Candidates {
    const ColumnsFinishParams<T>& p;
    const Tokens tokens;
    const int expert;
    unsigned long long* list;
    int* listed;
    __device__ __forceinline__ static unsigned long long value(unsigned key, unsigned token) {
        return static_cast<unsigned long long>(key) << 32 | ~token;
    }
    template <class F>
    __device__ __forceinline__ void read(const F& f) const {
        const unsigned* words = p.candidates + expert / 32 * p.L + tokens.begin;
        const T* column = p.scores + tokens.begin * p.num_experts + expert;
        const unsigned number = static_cast<unsigned>(tokens.end - tokens.begin);
        for (unsigned first = 0; first < number; first += FINISH_LOADS * FINISH_THREADS) {
            const unsigned begin = first + threadIdx.x;
            unsigned bits[FINISH_LOADS], found = 0;
            T loaded[FINISH_LOADS];
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l) bits[l] = words[min(begin + l * FINISH_THREADS, number - 1)];
            __syncwarp();  // keeps the compiler from waiting for each word before it loads the next
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (begin + l * FINISH_THREADS < number) found |= (bits[l] >> (expert & 31) & 1) << l;
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (found >> l & 1) loaded[l] = column[static_cast<int64>(begin + l * FINISH_THREADS) * p.num_experts];
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (found >> l & 1) f(value(key_of(loaded[l]), begin + l * FINISH_THREADS));
        }
    }
    __device__ __forceinline__ void fill() const {
        read([&](unsigned long long v) {
            const int place = atomicAdd(listed, 1);
            if (place < MAX_LISTED) list[place] = v;
        });
    }
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
        if (*listed > MAX_LISTED) return read(f);
        for (int i = threadIdx.x; i < *listed; i += FINISH_THREADS) f(list[i]);
    }
};

template <class T>
__device__ __forceinline__ void finish(const ColumnsFinishParams<T>& p) {
    FinishShared& shared = *reinterpret_cast<FinishShared*>(dynamic_shared);
    const Column column = p.columns[blockIdx.x];
    if (!has_ties(column)) return;
    const int sequence = blockIdx.x / p.num_experts, expert = blockIdx.x % p.num_experts, lane = threadIdx.x & 31;
    const Candidates<T> candidates = {p, tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence), expert, shared.list,
                                      &shared.listed};
    if (threadIdx.x == 0) shared.listed = 0, shared.wanted = column.wanted;
    __syncthreads();
    candidates.fill();
    unsigned long long known = static_cast<unsigned long long>(column.key) << 32;  // leading bits of the last that is taken
    int shift = 64 - p.width;                                                      // of these
    do {
        const int width = min(DIGIT, shift);
        shift -= width;
        for (int i = threadIdx.x; i < BINS; i += FINISH_THREADS) shared.histogram[i] = 0;
        __syncthreads();
        candidates.for_each([&](unsigned long long v) {
            if ((v ^ known) >> (shift + width) == 0)
                atomicAdd(shared.histogram + (v >> shift & (BINS - 1) >> (DIGIT - width)), 1);
        });
        __syncthreads();
        if (threadIdx.x < 32) {
            const int still = shared.wanted, highest = BINS - 1 - lane * (BINS / 32);
            int sum = 0;
#pragma unroll
            for (int i = 0; i < BINS / 32; ++i) sum += shared.histogram[highest - i];
            int before = sum;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const int other = __shfl_up_sync(0xffffffffu, before, step);
                if (lane >= step) before += other;
            }
            if (lane == 31 && before < still) shared.digit = 0, shared.here = still;  // fewer candidates than wanted: all of them
            before -= sum;
            if (before < still && still <= before + sum) {
                int bin = highest;
                while (before + shared.histogram[bin] < still) before += shared.histogram[bin--];
                shared.digit = bin, shared.here = shared.histogram[bin], shared.wanted = still - before;
            }
        }
        __syncthreads();
        known |= static_cast<unsigned long long>(shared.digit) << shift;
    } while (shared.here != shared.wanted && shift > 0);
    const int word = expert / 32, num_words = (p.num_experts + 31) / 32;
    candidates.for_each([&](unsigned long long v) {
        const int64 token = candidates.tokens.begin + ~static_cast<unsigned>(v);
        if (v >= known) atomicOr(p.taken + token * num_words + word, 1u << (expert & 31));
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

#define SELECTION_OF_SCORES(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_count_##SUFFIX(const ColumnsCountParams<T> p) {   \
        count_columns(p);                                                                                                  \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_split_##SUFFIX(const ColumnsSplitParams<T> p) {   \
        split(p);                                                                                                          \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(FINISH_THREADS) columns_finish_##SUFFIX(const ColumnsFinishParams<T> p) { \
        finish(p);                                                                                                         \
    }
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
