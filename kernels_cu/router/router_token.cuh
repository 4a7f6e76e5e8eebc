// Shared parts of router_forward.cu and router_lane.cu (paper section 2.1): the parameters, the scores and keys of a token's experts,
// and the sums of balancing losses.
//
// All arithmetic is fp32. LANES lanes hold a token's logits in registers, VALUES each. A block has THREADS / LANES places: it
// works on that many tokens at a time, and on tokens_per_block consecutive tokens in all. LANE_K is 0 in router_forward.cu, and k
// in router_lane.cu.
//
// Sums: each place adds up its tokens of one sequence, in registers or in a row of shared memory. Then the block adds the places'
// rows in the order of the places, and writes what it has of sequence s to row blockIdx.x + s of the partial sums. Tokens and
// sequences rise together, so no other block writes this row. router_sums.cu adds the rows.
#pragma once
#include "router_select.cuh"

struct RouterForwardParams {
    const ELEMENT* logits;                         // (L, E), in
    const float* bias;                             // (E,) or (L, E), in; absent without BIAS
    const void* given;                             // (L, k) or (P,) int32 or int64: ids, in; absent without GIVEN
    const int* token_offsets;                      // (L + 1,) int32, in, or absent: the pairs of each token
    const unsigned char* token_mask;               // (L,) bool, in, or absent
    const int* sequences;                          // (num_sequences + 1,) int32, in, or absent: equal runs
    float* weights;                                // (L, k) or (P,) fp32, out
    int* ids;                                      // (L, k) or (P,) int32, out: -1 in an empty slot
    float* partial_sums;                           // (blocks + num_sequences, E + 2) fp32, out: shares, then z, then entropy
    int64 bias_stride;                             // elements between tokens' biases: 0 or E
    int L, num_experts, k, num_pairs, given_wide;  // given_wide: ids are int64
    int groups, kept, top, group_size, group_reciprocal;
    int tokens_per_block, num_sequences;
    int scale, eps, top_p, threshold;  // bits of floats
};

constexpr bool SUMS = SHARES != NO_SCORE || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool SCORE_SHARES = SHARES == SIGMOID || SHARES == SQRT_SOFTPLUS;
constexpr bool RANKED_BY_SCORES = BIAS == 1 || (BIAS == 0 && GROUP_TOP > 1);  // a group's sum is one of scores, not of logits
constexpr bool NEEDS_LSE =
    (SCORE == SOFTMAX && (!RENORMALIZE || RANKED_BY_SCORES || CUT)) || CUT || SHARES == SOFTMAX || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool NEEDS_ROW = !GIVEN || NEEDS_LSE || SUMS;
// If LANE_K > 0 and experts rank by their logits, the sums come after the listing: the lane computes the logits again from
// the keys, because its registers have room for one of both only.
constexpr bool SUMS_LAST = SUMS && LANE_K > 0 && LANES > 1 && BIAS == 0;
constexpr bool HOLDS_SHARES = SHARES != NO_SCORE && VALUES <= 32 && LANE_K == 0;  // a lane holds its shares in registers
constexpr int STORED = LANES > 1 && WIDTH % 4 == 0 ? 4 : 1;                       // shares of an access to shared memory
constexpr int TOKENS = THREADS / LANES;                                           // places of a block

__device__ __forceinline__ int experts_of(const RouterForwardParams& p) { return FULL ? VALUES * LANES : p.num_experts; }

__device__ __forceinline__ float score_in_row(float x, const LogSumExp& lse) {
    return SCORE == SOFTMAX ? lse.probability(x) : score_of<SCORE>(x);
}
// value / total. IDENTITY and RELU scores have any size, so that the reciprocal of their total may be 0.
__device__ __forceinline__ float share_of_total(float value, float total) {
    return SCORE == IDENTITY || SCORE == RELU ? value / total : value * reciprocal(total);
}
// Returns the score that experts rank by. score: the score of this logit if SCORE_SHARES, else unused.
__device__ __forceinline__ float ranked_score(float x, float score, const LogSumExp& lse) {
    if (SCORE == SOFTMAX) return lse.quick_probability(x);
    return SCORE_SHARES && SHARES == SCORE ? score : quick_score_of<SCORE>(x);
}

// The lane's part of its place's sum of shares, if registers have room. Otherwise it is in the place's row in shared memory, where
// z and entropy always are.
struct Held {
    float shares[HOLDS_SHARES ? VALUES : 1];
};

// Accesses to the shares of a row in shared memory.
__device__ __forceinline__ void load_stored(const float* at, float (&v)[1]) { v[0] = *at; }
__device__ __forceinline__ void store_stored(float* at, const float (&v)[1]) { *at = v[0]; }
__device__ __forceinline__ void load_stored(const float* at, float (&v)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ __forceinline__ void store_stored(float* at, const float (&v)[4]) {
    *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
}

// Adds a token's shares, z and entropy to its place's row if the token counts. values: the scores with SCORE_SHARES, else the
// terms of `lse`. All lanes of the warp take part.
__device__ __forceinline__ void add_sums(const float (&values)[VALUES], const LogSumExp& lse, int E, float* row, bool counts,
                                         Held& held) {
    const float of_term = reciprocal(lse.sum);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum += values[i];
    const float share = SHARES == SOFTMAX ? of_term : reciprocal(sum_of_lanes(sum) + NORMALIZER);
    const float mean = SUM_ENTROPY ? sum_of_lanes(lse.weighted) * of_term : 0.f;
    if (!counts) return;
    if (lane_of_token() == 0) {
        if (SUM_Z) row[E] += lse.value() * lse.value();
        if (SUM_ENTROPY) row[E + 1] += logf(lse.sum) - mean;  // binary_logarithm has few digits near a sum of 1
    }
    if (HOLDS_SHARES) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) held.shares[i] += values[i] * share;
    } else if (SHARES != NO_SCORE) {
#pragma unroll
        for (int i = 0; i < VALUES; i += STORED) {
            if (!is_expert(column_of(i), E)) continue;
            float stored[STORED];
            load_stored(row + column_of(i), stored);
#pragma unroll
            for (int j = 0; j < STORED; ++j) stored[j] += values[i + j] * share;
            store_stored(row + column_of(i), stored);
        }
    }
}

// Words from a place's row of sums to the next. Rows begin with whole vectors. If a quarter of a warp holds two tokens or more, their
// rows begin in different banks.
__device__ __forceinline__ int sum_row_words(int columns) {
    return LANES == 1 ? columns | 1 : LANES == 4 ? (columns + 15) / 32 * 32 + 16 : (columns + 3) / 4 * 4;
}

// Clears the words that this lane adds to.
__device__ __forceinline__ void clear_sums(int E, float* row) {
    if (lane_of_token() == 0) row[E] = row[E + 1] = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES && SHARES != NO_SCORE && !HOLDS_SHARES; i += STORED) {
        const float zeros[STORED] = {};
        if (is_expert(column_of(i), E)) store_stored(row + column_of(i), zeros);
    }
}

// Writes the shares in registers to the place's row.
__device__ __forceinline__ void store_sums(const Held& held, int E, float* row) {
    if (HOLDS_SHARES) {
#pragma unroll
        for (int i = 0; i < VALUES; i += STORED) {
            if (!is_expert(column_of(i), E)) continue;
            float values[STORED];
#pragma unroll
            for (int j = 0; j < STORED; ++j) values[j] = held.shares[i + j];
            store_stored(row + column_of(i), values);
        }
    }
}

// This thread's place. With sums few registers are left, so the thread's index is read again and not kept.
__device__ __forceinline__ int place_of_thread() { return (SUMS ? read_thread_index() : static_cast<int>(threadIdx.x)) / LANES; }

__device__ __forceinline__ bool counts_in_sums(const RouterForwardParams& p, int token, bool there) {
    return there && !(p.token_mask != nullptr && !p.token_mask[token]);
}

// Loads a token's logits x, computes the scores of SCORE_SHARES, and returns the LogSumExp of the row if NEEDS_LSE. Adds the
// token's sums unless SUMS_LAST.
__device__ __forceinline__ LogSumExp read_token(const RouterForwardParams& p, int token, bool there, bool in_sums, float* row,
                                                Held& held, float (&x)[VALUES], float (&scores)[VALUES]) {
    float terms[VALUES];
    LogSumExp lse = {0.f, 1.f, 0.f};
    if (NEEDS_ROW) load_row(p.logits + static_cast<int64>(there ? token : 0) * experts_of(p), there, experts_of(p), x);
    if (SUMS_LAST) return lse;
    if (NEEDS_LSE) lse = log_sum_exp(x, terms);
#pragma unroll
    for (int i = 0; i < VALUES && SCORE_SHARES; ++i) scores[i] = quick_score_of<SHARES>(x[i]);
    if (SUMS && in_sums) add_sums(SCORE_SHARES ? scores : terms, lse, experts_of(p), row, counts_in_sums(p, token, there), held);
    return lse;
}

// Adds a token's sums if SUMS_LAST. largest: its largest logit. Returns the LogSumExp of the row if NEEDS_LSE.
__device__ __forceinline__ LogSumExp add_sums_of_keys(const unsigned (&keys)[VALUES], float largest, int E, float* row,
                                                      bool counts, Held& held) {
    float x[VALUES], values[VALUES];
    LogSumExp lse = {0.f, 1.f, 0.f};
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = from_sort_key(keys[i]);
    if (NEEDS_LSE) lse = log_sum_exp(x, largest, values);
#pragma unroll
    for (int i = 0; i < VALUES && SCORE_SHARES; ++i) values[i] = quick_score_of<SHARES>(x[i]);
    add_sums(values, lse, E, row, counts, held);
    return lse;
}

// The key that an expert ranks by, before groups are left out. score: see ranked_score.
__device__ __forceinline__ unsigned rank_key(float x, float score, float bias, const LogSumExp& lse) {
    if (BIAS == 1 && SCORE != IDENTITY && SCORE != RELU)  // no such score is -0
        return sort_key_of_canonical(canonical_sum(ranked_score(x, score, lse), bias));
    return sort_key(BIAS == 1 ? ranked_score(x, score, lse) + bias : BIAS ? x + bias : x);
}

// The keys of a token's experts: 0 in groups that are left out. groups: shared memory of all places for the choice of groups.
// With LANE_K > 0 groups leave the keys alone. Returns kept_vectors with GROUP_LANES > 0.
__device__ __forceinline__ unsigned rank_experts(const RouterForwardParams& p, int token, bool there, const float (&x)[VALUES],
                                                 const float (&scores)[VALUES], const LogSumExp& lse, unsigned* groups,
                                                 int group_words, unsigned (&keys)[VALUES]) {
    const int E = experts_of(p);
    float bias[VALUES];
    if (BIAS) load_floats(p.bias + (there ? token : 0) * p.bias_stride, 0, FULL || there, E, minus_infinity(), bias);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) keys[i] = rank_key(x[i], scores[i], bias[i], lse);
    if (GROUP_TOP) {
        unsigned ranked_by[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            ranked_by[i] = BIAS == 0 && RANKED_BY_SCORES ? sort_key(ranked_score(x[i], scores[i], lse)) : keys[i];
        if constexpr (GROUP_LANES > 0) {
            const unsigned kept = kept_vectors<GROUP_TOP>(ranked_by, p.kept);
#pragma unroll
            for (int i = 0; i < VALUES && LANE_K == 0; ++i)
                if (!is_vector_kept(kept, i / WIDTH)) keys[i] = 0;
            return kept;
        } else {
            keep_groups<GROUP_TOP>(keys, ranked_by, groups + place_of_thread() * group_words, E, p.groups, p.kept, p.top,
                                   p.group_size, static_cast<unsigned>(p.group_reciprocal));
        }
    }
    return 0;
}

// Routes the block's tokens and writes its partial sums. route(base, stop, follow, counts, held) routes token base and those after
// it before `stop`, one in each place. follow: more tokens of the block follow. counts: the sequence has sums. wait() is a barrier
// of the block, if none came after the last route().
template <class Route, class Wait>
__device__ __forceinline__ void route_sequences(const RouterForwardParams& p, int first, int end, float* all_sums, Route route,
                                                Wait wait) {
    const int E = experts_of(p), columns = E + 2, stride = sum_row_words(columns);
    for (int begin = first; begin < end;) {
        Sequence sequence = {0, end};
        if (SUMS) {
            sequence = sequence_of(p.sequences, p.num_sequences, begin, p.L);
            __syncthreads();  // all threads have read the rows of the sequence before
        }
        const int index = __reduce_max_sync(WARP, sequence.index), stop = __reduce_max_sync(WARP, min(end, sequence.end));
        const bool counts = index >= 0 && index < p.num_sequences;
        Held held = {};
        if (SUMS) clear_sums(E, all_sums + place_of_thread() * stride);
        for (int base = begin; base < stop; base += TOKENS) route(base, stop, stop < end || base + TOKENS < stop, counts, held);
        if (SUMS && counts) {
            store_sums(held, E, all_sums + place_of_thread() * stride);
            wait();
            float* const out = p.partial_sums + static_cast<int64>(blockIdx.x + index) * columns;
#pragma unroll 1
            for (int i = threadIdx.x; i < columns; i += THREADS) {
                float sum = 0.f;
#pragma unroll 16
                for (int at = 0; at < TOKENS; ++at) sum += all_sums[at * stride + i];
                out[i] = sum;
            }
        }
        begin = stop;
    }
}
