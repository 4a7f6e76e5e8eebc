// The tokens with the largest keys of each expert: a radix select over the columns of scores (L, E), without a sort.
//
// A column holds the scores of one expert for the tokens of one sequence. The kernels take a given number of tokens from each
// column: those with the largest scores, and of equal scores the lowest tokens. NaN ranks first, and -0 equals +0. A key is a
// score as a 32-bit integer in the same order. The last 10 bits of a 16-bit score's key are 0. The first `width` bits are the
// key's digit.
//
//   columns_count   makes a histogram of the digits. The last block of a column finds the digit at which the selection ends:
//                   keys with a higher digit are all taken, and the keys with this digit are the candidates. It reserves room
//                   for the candidates in a list
//   columns_split   writes two bits for each token and expert: taken, because its digit is higher; and candidate. It lists the
//                   candidates
//   columns_finish  takes as many candidates as are still wanted
//   chosen_bits     for token rounding: writes a bit for each chosen pair and counts the tokens that chose each expert. The
//                   last block decides how many tokens each expert takes
//
// In token rounding the pairs that the router chose rank before all others. If an expert takes no more tokens than chose it, the
// selection is among these. Otherwise all of these are taken, and the selection is among the other tokens.
//
// The order of the candidates in the list varies, but the selection among them does not. Other atomics add integers or set
// bits, and their results are the same in any order.
//
// Launch: SELECT_THREADS threads and a grid of (S * parts, ceil(E / 32)), except where the table says otherwise. A block takes
// one part of a sequence's tokens and 32 columns, one for each lane. Dynamic shared memory:
//   columns_count   (2^width, 32) int32, where each lane has a bank to itself; at least (32, 32) int32
//   columns_split   SPLIT_SHARED_BYTES
//   columns_finish  FINISH_SHARED_BYTES and (PAIRS_BLOCKS,) int32; FINISH_THREADS threads, grid S * E, a block per column
//   chosen_bits     (E,) int32; grid (parts, 1)
#include "candidates.cuh"
#include "pick.cuh"
#include "score_columns.cuh"

static_assert(4 * MAX_EXPERTS <= DEFAULT_SHARED_BYTES, "launches ask for no more shared memory");
constexpr int SPLIT_TOKENS = 2048;   // a block of columns_split copies its candidates to the list after so many tokens
constexpr int BINS_AT_ONCE = 8;      // bins that a warp of columns_count adds to global memory together
constexpr int FINISH_LOADS = 8;      // loads that a thread of columns_finish has in flight
constexpr unsigned LOST = 1u << 31;  // this bit in a column's number of candidates: some of them are not in the list

struct SplitShared {
    static constexpr int MOST = (SPLIT_SHARED_BYTES / 32 - 4) / sizeof(Candidate);  // a column's candidates that fit
    Candidate list[32][MOST];
    int numbers[32];
};
static_assert(sizeof(SplitShared) <= SPLIT_SHARED_BYTES, "its launches");

template <class T>
struct ColumnsCountParams {
    const T* scores;               // (L, E) bf16, fp16 or fp32, in
    const unsigned* chosen;        // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const int* sequences;          // (S+1,) int32 offsets, in; null for equal lengths
    Column* columns;               // (S, E) of 16 bytes, out; in and out if `wanted` is -1
    int* histogram;                // (S, 2^width, E) int32, in and out: zeros at first
    int* done;                     // (S, ceil(E/32)) int32, in and out: zeros at first; number of blocks that have counted
    unsigned long long* reserved;  // uint64, in and out: 0 at first; number of the list's places that are reserved
    int64 L;
    int64 room;  // the list's places
    int num_experts, num_sequences, parts, width;
    int wanted;  // tokens that each column takes; -1: `columns` has this number
};

template <class T>
struct ColumnsSplitParams {
    const T* scores;         // (L, E), in
    const unsigned* chosen;  // (L, ceil(E/32)) uint32, in; null where no pair is chosen
    const Column* columns;   // (S, E) of 16 bytes, in
    const int* sequences;    // (S+1,) int32 offsets, in; null for equal lengths
    unsigned* taken;         // (L, ceil(E/32)) uint32, out
    unsigned* candidates;    // (ceil(E/32), L) uint32, out
    Candidate* list;         // (room,) of 8 bytes, out
    unsigned* listed;        // (S, E) uint32, in and out: zeros at first; number of candidates, with the bit LOST
    int* block_counts;       // (at most PAIRS_BLOCKS,) int32, in and out: zeros at first; what pairs_count counts; or null
    int64 L;
    int num_experts, num_sequences, parts, width;
    int block_shift;  // log2 of the tokens of a block of pairs_write
};

template <class T>
struct ColumnsFinishParams {
    const T* scores;             // (L, E), in
    const Column* columns;       // (S, E) of 16 bytes, in
    const int* sequences;        // (S+1,) int32 offsets, in; null for equal lengths
    const unsigned* candidates;  // (ceil(E/32), L) uint32, in
    const Candidate* list;       // (room,) of 8 bytes, in
    const unsigned* listed;      // (S, E) uint32, in
    unsigned* taken;             // (L, ceil(E/32)) uint32, in and out
    int* block_counts;           // (at most PAIRS_BLOCKS,) int32, in and out; or null
    int64 L;
    int num_experts, num_sequences, width;
    int block_shift;  // log2 of the tokens of a block of pairs_write
};

template <class Id>
struct ChosenBitsParams {
    const Id* ids;     // (L, k) int32 or int64, in; id < 0 or >= E: an empty slot
    unsigned* chosen;  // (L, ceil(E/32)) uint32, out
    int* frequencies;  // (E,) int32, in and out: zeros at first; tokens that chose each expert
    int* done;         // int32, in and out: 0 at first; number of blocks that have counted
    Column* columns;   // (E,) of 16 bytes, out
    int64 L;
    int k, num_experts, parts, tile, rounding;
};

enum Rounding { UP, DOWN, NEAREST, BALANCE };

template <class T, bool CHOSEN>
__device__ __forceinline__ void count_columns(const ColumnsCountParams<T>& p) {
    int* counters = reinterpret_cast<int*>(dynamic_shared);  // (2^width, 32)
    const int num_counters = 32 << p.width, lane = threadIdx.x & 31, shift = 32 - p.width;
    const Place<ColumnsCountParams<T>> place(p);
    const Rows<T, CHOSEN> rows(p, place, place.tokens);
    T next[LOADS];
    unsigned next_chosen = 0;  // words of the lanes
    let_next_launch_start();
    if (rows.number > 0) rows.load_scores(next, 0);
    int4* fours = reinterpret_cast<int4*>(counters);
    for (int i = threadIdx.x; i < num_counters / 4; i += SELECT_THREADS) fours[i] = make_int4(0, 0, 0, 0);
    if (CHOSEN) {
        wait_for_last_launch();  // the launch of chosen_bits
        if (rows.number > 0) rows.load_words(next_chosen, 0);
    }
    const Members members(CHOSEN && place.exists && p.columns[place.column(p)].among_chosen, place.exists);
    // The counters are ordered by the leading bits of the float itself, which saves two instructions per score. The counts
    // of lanes past the last column are never read.
    const auto add = [&](T score, unsigned chosen) {
        const unsigned bits = __float_as_uint(canonical(to_float(score)));
        atomicAdd(counters + (bits >> shift) * 32 + lane, CHOSEN ? static_cast<int>(members.has(chosen)) : 1);
    };
    __syncthreads();
    for (int first = 0; first < rows.number; first += LOADS) {
        T loaded[LOADS];
        const unsigned chosen = next_chosen;
#pragma unroll
        for (int l = 0; l < LOADS; ++l) loaded[l] = next[l];
        rows.load(next, next_chosen, first + LOADS);
        issue_loads_now();
        if (first + LOADS <= rows.number) {
#pragma unroll
            for (int l = 0; l < LOADS; ++l) add(loaded[l], rows.chosen_of(chosen, l));
        } else {
#pragma unroll
            for (int l = 0; l < LOADS; ++l)
                if (first + l < rows.number) add(loaded[l], rows.chosen_of(chosen, l));
        }
    }
    __syncthreads();
    if (!CHOSEN) wait_for_last_launch();  // the last launch clears the histogram
    int* histogram = p.histogram + (static_cast<int64>(place.sequence) << p.width) * p.num_experts;
    const int bins = 1 << p.width, positive = bins / 2;
    // Most counters are 0. A warp reads several bins at once, and skips them if all are 0.
    const int at_once = min(max(bins / WARPS, 1), BINS_AT_ONCE);
    for (int first = threadIdx.x / 32; first < bins; first += BINS_AT_ONCE * WARPS) {
        int found[BINS_AT_ONCE], any = 0;
#pragma unroll
        for (int b = 0; b < BINS_AT_ONCE; ++b) {
            found[b] = b < at_once ? counters[(first + b * WARPS) * 32 + lane] : 0;
            any |= found[b];
        }
        if (!any || !place.exists) continue;
#pragma unroll
        for (int b = 0; b < BINS_AT_ONCE; ++b) {
            const int bin = first + b * WARPS;
            const int digit = bin & positive ? bins - 1 - bin : bin + positive;  // the key's digit, see sort_key
            if (found[b]) atomicAdd(histogram + static_cast<int64>(digit) * p.num_experts + place.expert, found[b]);
        }
    }
    if (!comes_last(p.done + place.sequence * place.num_words + place.word, p.parts, counters)) return;
    Column* columns = p.columns + static_cast<int64>(place.sequence) * p.num_experts;
    pick(histogram, columns, p.reserved, p.room, p.num_experts, p.width, p.wanted, place.word, counters);
}

// Copies the candidates of a block's columns from shared memory to the list. Each warp copies one column.
template <class T>
__device__ __forceinline__ void pass_on(const ColumnsSplitParams<T>& p, SplitShared& shared, int64 first_column) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int number = shared.numbers[warp], fit = min(number, SplitShared::MOST);
    const int first = p.columns[first_column + warp].first;
    __syncwarp();  // all lanes have read the number
    if (number == 0) return;
    unsigned place = 0;
    if (lane == 0) {
        shared.numbers[warp] = 0;
        place = atomicAdd(p.listed + first_column + warp, static_cast<unsigned>(number));
        if (number > fit) atomicOr(p.listed + first_column + warp, LOST);
    }
    place = __shfl_sync(0xffffffffu, place, 0);
    if (first < 0 || place & LOST) return;
    for (int i = lane; i < fit; i += 32) p.list[first + static_cast<int64>(place) + i] = shared.list[warp][i];
}

// The tokens before `end` that a block of columns_split works on before it copies their candidates to the list.
__device__ __forceinline__ Tokens split_tokens(const Tokens& all, int64 end) { return {max(end - SPLIT_TOKENS, all.begin), end}; }

// The loop runs from the last token to the first, because the L2 cache holds what columns_count read last.
template <class T, bool CHOSEN>
__device__ __forceinline__ void split(const ColumnsSplitParams<T>& p) {
    SplitShared& shared = *reinterpret_cast<SplitShared*>(dynamic_shared);
    const int lane = threadIdx.x & 31, shift = 32 - p.width;
    const Place<ColumnsSplitParams<T>> place(p);
    Column column = {0, 0, 0, -1};
    let_next_launch_start();
    int64 end = place.tokens.end;
    Rows<T, CHOSEN> rows(p, place, split_tokens(place.tokens, end));
    T next[LOADS];
    unsigned next_chosen = 0;  // words of the lanes
    if (rows.number > 0) rows.load_scores(next, rows.last());
    if (threadIdx.x < 32) shared.numbers[threadIdx.x] = 0;
    wait_for_last_launch();
    if (rows.number > 0) rows.load_words(next_chosen, rows.last());
    if (place.exists) column = p.columns[place.column(p)];
    const Members members(column.among_chosen != 0, place.exists);
    const unsigned digit = column.key >> shift, least = column.wanted == ALL ? digit : digit + 1;
    // A key above `highest` is taken, another key above `below` is a candidate. No key is 0 or above 2^32 - 1.
    const unsigned highest = least ? (least << shift) - 1 : 0;
    const unsigned below = !has_candidates(column) ? 0xffffffffu : digit ? (digit << shift) - 1 : 0;
    const unsigned always = column.among_chosen ? 0 : members.mask;  // chosen pairs that are taken whatever their scores are
    int block = 0, sum = 0;                                          // pairs_write's block of the last token, and its taken pairs
    __syncthreads();
    while (end > place.tokens.begin) {
        const int64 begin = split_tokens(place.tokens, end).begin + rows.begin;
        unsigned* taken = p.taken + begin * place.num_words + place.word;
        unsigned* candidates = p.candidates + place.word * p.L + begin;
        const unsigned index = static_cast<unsigned>(begin - place.all.begin);
        for (int first = rows.number > 0 ? rows.last() : -1; first >= 0; first -= LOADS) {
            T loaded[LOADS];
            const unsigned chosen = next_chosen;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) loaded[l] = next[l];
            rows.load(next, next_chosen, first - LOADS);
            issue_loads_now();
            unsigned of_taken = 0, of_candidates = 0, found = 0;
#pragma unroll
            for (int l = 0; l < LOADS; ++l) {
                const unsigned key = key_of(loaded[l]), of_token = rows.chosen_of(chosen, l);
                const bool is_member = CHOSEN ? members.has(of_token) : place.exists;
                const bool takes = is_member && key > highest, maybe = is_member && key > below && key <= highest;
                const unsigned all_taken = __ballot_sync(0xffffffffu, takes || (CHOSEN && (of_token & always)));
                const unsigned all_maybe = __ballot_sync(0xffffffffu, maybe);
                if (lane == l) of_taken = all_taken, of_candidates = all_maybe;
                if (maybe) found |= 1u << l;
            }
            if (lane < min(LOADS, rows.number - first)) {
                taken[static_cast<int64>(first + lane) * place.num_words] = of_taken;
                candidates[first + lane] = of_candidates;
                const int now = static_cast<int>((begin + first + lane) >> p.block_shift);
                if (now != block && sum && p.block_counts) atomicAdd(p.block_counts + block, sum);
                sum = __popc(of_taken) + (now == block ? sum : 0), block = now;
            }
            found &= 0xffffffffu >> (32 - min(LOADS, rows.number - first));
            if (found) {
                int i = atomicAdd(shared.numbers + lane, __popc(found));
                for (; found && i < SplitShared::MOST; found &= found - 1, ++i) {
                    const int token = first + __ffs(static_cast<int>(found)) - 1;
                    shared.list[lane][i] = candidate(key_of(rows.score(token)), index + token);
                }
            }
        }
        __syncthreads();
        const int64 first_column = place.column(p) - lane;
        if (32 * blockIdx.y + threadIdx.x / 32 < p.num_experts) pass_on(p, shared, first_column);
        __syncthreads();
        end -= SPLIT_TOKENS;
        if (end <= place.tokens.begin) break;
        rows = Rows<T, CHOSEN>(p, place, split_tokens(place.tokens, end));
        if (rows.number > 0) rows.load(next, next_chosen, rows.last());
    }
    if (sum && p.block_counts) atomicAdd(p.block_counts + block, sum);
}

// The candidates of a block's column. They are in shared memory if they fit there. Otherwise they are in the list, or, where the
// list lacks some, the bits say which they are.
template <class T>
struct Candidates {
    const ColumnsFinishParams<T>& p;
    const Tokens tokens;
    const int expert;
    const Candidate* listed;  // the column's part of the list; null if the list lacks some
    Candidate* shared;
    int number;

    template <class F>
    __device__ __forceinline__ void read_bits(const F& f) const {
        const unsigned* words = p.candidates + expert / 32 * p.L + tokens.begin;
        const T* column = p.scores + tokens.begin * p.num_experts + expert;
        const unsigned all = static_cast<unsigned>(tokens.end - tokens.begin);
        for (unsigned first = 0; first < all; first += FINISH_LOADS * FINISH_THREADS) {
            const unsigned begin = first + threadIdx.x;
            unsigned bits[FINISH_LOADS], found = 0;
            T loaded[FINISH_LOADS];
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l) bits[l] = words[min(begin + l * FINISH_THREADS, all - 1)];
            issue_loads_now();
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (begin + l * FINISH_THREADS < all) found |= (bits[l] >> (expert & 31) & 1) << l;
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (found >> l & 1) loaded[l] = column[static_cast<int64>(begin + l * FINISH_THREADS) * p.num_experts];
#pragma unroll
            for (int l = 0; l < FINISH_LOADS; ++l)
                if (found >> l & 1) f(candidate(key_of(loaded[l]), begin + l * FINISH_THREADS));
        }
    }
    // next: a counter in shared memory, 0 at first. If sequences overlap, which callers must not do, a sequence also finds bits
    // of another one. Therefore the number of bits that are found counts, not the number that was counted before.
    __device__ __forceinline__ void fill(int* next) {
        if (number > MAX_LISTED) return;
        if (listed) {
            copy_candidates(shared, listed, number);
            __syncthreads();
        } else {
            read_bits([&](Candidate v) {
                const int i = atomicAdd(next, 1);
                if (i < MAX_LISTED) shared[i] = v;
            });
            __syncthreads();
            number = min(*next, MAX_LISTED);
        }
    }
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
        if (number > MAX_LISTED && !listed) return read_bits(f);
        const Candidate* from = number > MAX_LISTED ? listed : shared;
        for (int i = threadIdx.x; i < number; i += FINISH_THREADS) f(from[i]);
    }
};

template <class T>
__device__ __forceinline__ void finish(const ColumnsFinishParams<T>& p) {
    Candidate* shared = reinterpret_cast<Candidate*>(dynamic_shared);  // (MAX_LISTED,)
    Search& search = *reinterpret_cast<Search*>(shared + MAX_LISTED);
    int* sums = reinterpret_cast<int*>(dynamic_shared + FINISH_SHARED_BYTES);  // (PAIRS_BLOCKS,): pairs taken here
    let_next_launch_start();
    wait_for_last_launch();
    const Column column = p.columns[blockIdx.x];
    const unsigned number = p.listed[blockIdx.x];
    if (!has_candidates(column)) return;
    const int sequence = blockIdx.x / p.num_experts, expert = blockIdx.x % p.num_experts;
    const Candidate* listed = column.first < 0 || number & LOST ? nullptr : p.list + column.first;
    const Tokens tokens = tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence);
    Candidates<T> candidates = {p, tokens, expert, listed, shared, static_cast<int>(number & ~LOST)};
    if (threadIdx.x == 0) search.here = 0;
    for (int i = threadIdx.x; i < PAIRS_BLOCKS; i += FINISH_THREADS) sums[i] = 0;
    __syncthreads();
    candidates.fill(&search.here);
    const Candidate last = find_last(search, column.key, p.width, column.wanted, [&](const auto& f) { candidates.for_each(f); });
    const int word = expert / 32, num_words = (p.num_experts + 31) / 32;
    candidates.for_each([&](Candidate v) {
        const int64 token = candidates.tokens.begin + index_of(v);
        if (v < last) return;
        atomicOr(p.taken + token * num_words + word, 1u << (expert & 31));
        atomicAdd(sums + (token >> p.block_shift), 1);
    });
    if (!p.block_counts) return;
    __syncthreads();
    for (int i = threadIdx.x; i < PAIRS_BLOCKS; i += FINISH_THREADS)
        if (sums[i]) atomicAdd(p.block_counts + i, sums[i]);
}

// over: tokens above the next lower multiple of the tile. missing: tokens up to the next higher one, or up to L if that is less.
struct Rounded {
    int over, missing;
    __device__ __forceinline__ Rounded(int frequency, int tile, int64 L) : over(frequency % tile), missing(0) {
        if (over) missing = static_cast<int>(min(static_cast<int64>(tile - over), L - frequency));
    }
};

// Decides how many tokens each expert takes. change: shared memory (E,), this number less the frequency.
template <class Params>
__device__ __forceinline__ void round_frequencies(const Params& p, int* change) {
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS) {
        const int frequency = p.frequencies[e];
        const Rounded rounded(frequency, p.tile, p.L);
        const bool nearest_is_up = p.tile - rounded.over < rounded.over;  // half a tile goes down
        const bool up = p.rounding == UP || (p.rounding == NEAREST && nearest_is_up);
        change[e] = p.rounding == BALANCE ? frequency : up ? rounded.missing : -rounded.over;
    }
    __syncthreads();
    if (p.rounding == BALANCE && threadIdx.x == 0) {
        int sum = 0;  // the changes of the experts before
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
        p.columns[e] = {0, among_chosen ? p.frequencies[e] + change[e] : change[e], among_chosen, -1};
    }
}

template <class Id>
__device__ __forceinline__ void mark_chosen(const ChosenBitsParams<Id>& p) {
    int* frequencies = reinterpret_cast<int*>(dynamic_shared);
    let_next_launch_start();
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
    wait_for_last_launch();  // the last launch clears the frequencies
    for (int e = threadIdx.x; e < p.num_experts; e += SELECT_THREADS)
        if (frequencies[e]) atomicAdd(p.frequencies + e, frequencies[e]);
    if (comes_last(p.done, p.parts, frequencies)) round_frequencies(p, frequencies);
}

#define SELECTION_OF_SCORES(SUFFIX, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_count_##SUFFIX(const ColumnsCountParams<T> p) {   \
        p.chosen ? count_columns<T, true>(p) : count_columns<T, false>(p);                                                 \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(SELECT_THREADS) columns_split_##SUFFIX(const ColumnsSplitParams<T> p) {   \
        p.chosen ? split<T, true>(p) : split<T, false>(p);                                                                 \
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
