// How the selections read scores (L, E): a block takes a part of a sequence's tokens and 32 columns, one for each lane.
#pragma once
#include "token_parts.cuh"

constexpr int WARPS = SELECT_THREADS / 32;
constexpr int LOADS = 8;  // scores that a thread loads at once, while it works on as many
static_assert(32 % LOADS == 0, "lanes that have a word of chosen pairs each");

// The work of a thread: its block's sequence and part, and its lane's column.
template <class Params>
struct Place {
    int sequence, part, expert, word, num_words;
    bool exists;  // true if the column is one of the E
    Tokens all, tokens;
    __device__ __forceinline__ explicit Place(const Params& p)
        : sequence(blockIdx.x / p.parts), part(blockIdx.x % p.parts), expert(32 * blockIdx.y + (threadIdx.x & 31)),
          word(blockIdx.y), num_words((p.num_experts + 31) / 32), exists(expert < p.num_experts),
          all(tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence)), tokens(tokens_of_part(all, p.parts, part)) {}
    __device__ __forceinline__ int64 column(const Params& p) const {
        return static_cast<int64>(sequence) * p.num_experts + expert;
    }
};

__device__ __forceinline__ unsigned key_of(float v) { return sort_key(v); }
__device__ __forceinline__ unsigned key_of(bf16 v) { return sort_key(to_float(v)) & ~0x3ffu; }
__device__ __forceinline__ unsigned key_of(fp16 v) { return sort_key(to_float(v)) & ~0x3ffu; }

// The pairs of a lane's column that take part in the selection: the chosen ones or the others; none in a column past the last.
struct Members {
    unsigned flip, mask;
    __device__ __forceinline__ Members(bool among_chosen, bool exists)
        : flip(among_chosen ? 0 : 0xffffffffu), mask(exists ? 1u << (threadIdx.x & 31) : 0) {}
    __device__ __forceinline__ bool has(unsigned chosen) const { return ((chosen ^ flip) & mask) != 0; }
};

// A warp's share of the tokens, which are consecutive, at the lane's column. Lanes past the last column read the last one's
// scores. Offsets between rows have 32 bits, so that an address takes one instruction.
template <class T, bool CHOSEN>
struct Rows {
    const char *scores, *words;  // addresses for the first token; words: chosen pairs, a bit for each column
    unsigned row_bytes, row_word_bytes;
    int begin, number;  // the share's first token, counted from tokens.begin, and its number of tokens
    template <class Params>
    __device__ __forceinline__ Rows(const Params& p, const Place<Params>& place, const Tokens& tokens)
        : row_bytes(p.num_experts * sizeof(T)), row_word_bytes(4 * place.num_words) {
        const int all = static_cast<int>(tokens.end - tokens.begin), share = (all + WARPS - 1) / WARPS;
        begin = min(static_cast<int>(threadIdx.x / 32) * share, all);
        number = min(share, all - begin);
        const int64 first = tokens.begin + begin;
        scores = reinterpret_cast<const char*>(p.scores + first * p.num_experts + min(place.expert, p.num_experts - 1));
        words = CHOSEN ? reinterpret_cast<const char*>(p.chosen + first * place.num_words + place.word) : nullptr;
    }
    __device__ __forceinline__ T score(unsigned i) const {
        return *reinterpret_cast<const T*>(scores + static_cast<unsigned long long>(i) * row_bytes);
    }
    __device__ __forceinline__ int last() const { return (number - 1) / LOADS * LOADS; }  // start of the last load
    // The scores of LOADS tokens from `first` on. For tokens outside of the share it loads the share's first or last token.
    __device__ __forceinline__ void load_scores(T (&of_scores)[LOADS], int first) const {
#pragma unroll
        for (int l = 0; l < LOADS; ++l) of_scores[l] = score(clamped_token(first + l));
    }
    // The words of chosen pairs of these tokens. Lane l of every LOADS lanes gets the word of token l, see chosen_of.
    __device__ __forceinline__ void load_words(unsigned& words_of_lanes, int first) const {
        if (CHOSEN) {
            const unsigned i = clamped_token(first + static_cast<int>(threadIdx.x % LOADS));
            words_of_lanes = *reinterpret_cast<const unsigned*>(words + static_cast<unsigned long long>(i) * row_word_bytes);
        }
    }
    __device__ __forceinline__ void load(T (&of_scores)[LOADS], unsigned& words_of_lanes, int first) const {
        load_scores(of_scores, first);
        load_words(words_of_lanes, first);
    }
    // The word of chosen pairs of the l-th token that was loaded. All lanes call it.
    __device__ __forceinline__ static unsigned chosen_of(unsigned words_of_lanes, int l) {
        return CHOSEN ? __shfl_sync(0xffffffffu, words_of_lanes, l) : 0;
    }

private:
    __device__ __forceinline__ unsigned clamped_token(int i) const { return max(min(i, number - 1), 0); }
};
