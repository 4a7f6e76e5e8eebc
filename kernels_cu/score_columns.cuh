// How the kernels of selections read scores (L, E): a block takes a part of a sequence's tokens and 32 columns, a lane each.
#pragma once
#include "token_parts.cuh"

#if !defined(SELECT_THREADS)
#error "SELECT_THREADS is given by launch_config.py"
#endif
constexpr int WARPS = SELECT_THREADS / 32;
constexpr int LOADS = 8;  // scores of a thread on their way from global memory, beside as many that it works on

// A block's place: its sequence, its part of that, and its lane's column.
template <class Params>
struct Place {
    int sequence, part, expert, word, num_words;
    bool exists;  // the column
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

// A word of each lane, 32 x 32 bits, the other way round: bit i of lane l becomes bit l of lane i.
__device__ __forceinline__ unsigned transposed(unsigned v) {
    unsigned low = 0x0000ffffu;  // bits that pairs of lanes keep or exchange
#pragma unroll
    for (int step = 16; step > 0; step >>= 1, low ^= low << step) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, v, step);
        v = threadIdx.x & step ? (v & ~low) | (other >> step & low) : (v & low) | (other & low) << step;
    }
    return v;
}

// A warp's share of tokens, which follow each other, at the lane's column. Lanes past the last column see that one's keys.
// Offsets from row to row have 32 bits, so that an address takes one instruction.
template <class T, bool CHOSEN>
struct Rows {
    const char *scores, *words;  // of the first token; words of chosen pairs
    unsigned row_bytes, row_word_bytes;
    int begin, number;  // tokens, from the first of `tokens` on
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
    // The word of token `first` + lane.
    __device__ __forceinline__ unsigned chosen_of_lane(int first) const {
        if (!CHOSEN) return 0;
        const unsigned i = max(min(first + static_cast<int>(threadIdx.x & 31), number - 1), 0);
        return *reinterpret_cast<const unsigned*>(words + static_cast<unsigned long long>(i) * row_word_bytes);
    }
    // LOADS tokens from `first` on. Those before the first and past the last are the first and the last.
    __device__ __forceinline__ void load(T (&of_scores)[LOADS], int first) const {
#pragma unroll
        for (int l = 0; l < LOADS; ++l) of_scores[l] = score(max(min(first + l, number - 1), 0));
    }
};
static_assert(32 % LOADS == 0, "loads begin with the words of 32 tokens");
