// Router forward: the k experts of each token, their weights, and partial sums for balancing losses (paper section 2.1).
//
// All arithmetic is fp32. LANES lanes hold a token's logits in registers, VALUES each. A block has THREADS / LANES places: it
// works on that many tokens at a time, and on tokens_per_block consecutive tokens in all. With LANE_K > 0 one lane chooses and
// weighs a token's LANE_K experts, see router_lane.cuh. With LANE_K = 0 all lanes of the token do.
//
// Sums: each place adds up its tokens of one sequence, in registers or in a row of shared memory. Then the block adds the places'
// rows in the order of the places, and writes what it has of sequence s to row blockIdx.x + s of the partial sums. Tokens and
// sequences rise together, so no other block writes this row. router_sums.cu adds the rows.
//
// Launch: grid ceil(L / tokens_per_block), THREADS threads. Dynamic shared memory in 4-byte words for each place, in this order:
//   2 * (k + MAX_LISTED)   the selection, with LANE_K = 0
//   E + 2 * groups         the choice of groups, with LANE_K = 0 and without GROUP_LANES
//   sum_row_words(E + 2)   sums
// With LANE_K > 0 and LANES > 1 the block has LISTED_ROW_BYTES for each of 32 tokens in place of the first two, twice with sums or
// groups.
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

constexpr bool SUMS = SHARES != 0 || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool SCORE_SHARES = SHARES == SIGMOID || SHARES == SQRT_SOFTPLUS;
constexpr bool RANKED_BY_SCORES = BIAS == 1 || (BIAS == 0 && GROUP_TOP > 1);  // a group's sum is one of scores, not of logits
constexpr bool NEEDS_LSE =
    (SCORE == SOFTMAX && (!RENORMALIZE || RANKED_BY_SCORES || CUT)) || CUT || SHARES == SOFTMAX || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool NEEDS_ROW = !GIVEN || NEEDS_LSE || SUMS;
// With LANE_K > 0 and experts that rank by their logits, the sums come after the listing: the lane computes the logits again from
// the keys, because its registers have room for one of both only.
constexpr bool SUMS_LAST = SUMS && LANE_K > 0 && LANES > 1 && BIAS == 0;
constexpr bool HOLDS_SHARES = SHARES != 0 && VALUES <= 32 && LANE_K == 0;   // a lane holds its shares in registers
constexpr int STORED = LANES > 1 && WIDTH % 4 == 0 ? 4 : 1;                 // shares of an access to shared memory
constexpr int TOKENS = THREADS / LANES;                                     // places of a block
constexpr int MANY = SUMS || (GROUP_TOP != 0 && GROUP_LANES == 0) ? 4 : 5;  // blocks of a multiprocessor
constexpr bool MORE_REGISTERS = (SUMS_LAST && __CUDA_ARCH__ != 900) || (SUMS && LANES == 32);  // others would spill
constexpr int IN_LANE_THREADS = SUMS_LAST && !FULL ? 512 : MORE_REGISTERS ? 768 : 1024;        // threads of a multiprocessor
constexpr int IN_LANE = (VALUES <= 16 || LANES > 1 ? IN_LANE_THREADS : 512) / THREADS;
constexpr int IN_LANES = VALUES <= 8 ? 6 : VALUES <= 16 ? MANY : VALUES <= 32 ? 2 : 1;
constexpr int RESIDENT = LANE_K > 0 ? IN_LANE : IN_LANES;  // blocks per multiprocessor at least

__device__ __forceinline__ int experts_of(const RouterForwardParams& p) { return FULL ? VALUES * LANES : p.num_experts; }

__device__ __forceinline__ float score_in_row(float x, const LogSumExp& lse) {
    return SCORE == SOFTMAX ? lse.probability(x) : score_of<SCORE>(x);
}
// value / total. IDENTITY and RELU scores have any size, so that the reciprocal of their total may be 0.
__device__ __forceinline__ float share_of_total(float value, float total) {
    return SCORE == IDENTITY || SCORE == RELU ? value / total : value * reciprocal(total);
}
// What experts rank by. score: the score of this logit if SCORE_SHARES, else unused.
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
    } else if (SHARES) {
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
    for (int i = 0; i < VALUES && SHARES && !HOLDS_SHARES; i += STORED) {
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
__device__ __forceinline__ int place_again() { return (SUMS ? read_thread_index() : static_cast<int>(threadIdx.x)) / LANES; }

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
            keep_groups<GROUP_TOP>(keys, ranked_by, groups + place_again() * group_words, E, p.groups, p.kept, p.top,
                                   p.group_size, static_cast<unsigned>(p.group_reciprocal));
        }
    }
    return 0;
}

#if LANE_K > 0
#include "router_lane.cuh"
#else

// Computes the weights of a token's slots 0 .. number - 1. id_of(j) is the expert of slot j, or outside of 0 .. E - 1 if the slot is
// empty; logit_of(j) is its logit; put(j, weight, id) stores. longest: the largest number of slots in the warp.
template <class Id, class Logit, class Put>
__device__ __forceinline__ void weigh(int number, int longest, int E, const LogSumExp& lse, float scale, float eps, Id id_of,
                                      Logit logit_of, Put put) {
    const int lane = lane_of_token();
    const auto is_present = [&](int j) { return j < number && static_cast<unsigned>(id_of(j)) < static_cast<unsigned>(E); };
    float largest = minus_infinity();
    if (SCORE == SOFTMAX && RENORMALIZE) {
#pragma unroll 1  // one turn in most cases
        for (int j = lane; j < number; j += LANES)
            if (is_present(j)) largest = fmaxf(largest, logit_of(j));
        largest = max_of_lanes(largest);
    }
    float value = 0.f;  // of the lane's slot; in most cases a lane has one
    const auto value_of = [&](int j) {
        return SCORE == SOFTMAX && RENORMALIZE ? expf(logit_of(j) - largest) : score_in_row(logit_of(j), lse);
    };
    float total = 0.f;
    if (RENORMALIZE) {  // in the order of slots, so that the sum's bits do not depend on LANES
        for (int base = 0; base < longest; base += LANES) {
            const int j = base + lane;
            value = is_present(j) ? value_of(j) : 0.f;
#pragma unroll
            for (int part = 0; part < LANES; part += 8)
                if (base + part < longest)
#pragma unroll
                    for (int i = part; i < min(part + 8, LANES); ++i) total += from_lane(value, i);  // 0 past the last slot
        }
        if (SCORE != SOFTMAX) total += eps;
    }
#pragma unroll 1
    for (int j = lane; j < number; j += LANES) {
        const bool present = is_present(j);
        if (!RENORMALIZE || longest > LANES) value = present ? value_of(j) : 0.f;
        if (RENORMALIZE && present) value = share_of_total(value, total);
        put(j, value * scale, present ? id_of(j) : -1);
    }
}

// The shared memory of the block's places, with LANE_K = 0.
struct PlaceMemory {
    Entry* slots;      // (TOKENS, k)
    Entry* listed;     // (TOKENS, MAX_LISTED)
    unsigned* groups;  // (TOKENS, group_words)
    int group_words;
};

// Routes one token if it is `there`. Other places of the warp call this too, as all lanes take part in shuffles. row: the place's
// row of sums. in_sums: whether the token's sequence has sums.
__device__ __forceinline__ void route_token(const RouterForwardParams& p, int token, bool there, bool in_sums, float* row,
                                            Held& held, const PlaceMemory& memory) {
    const int E = experts_of(p), lane = lane_of_token();
    const ELEMENT* logits = p.logits + static_cast<int64>(there ? token : 0) * E;
    const bool masked = there && p.token_mask != nullptr && !p.token_mask[token];
    const float scale = __int_as_float(p.scale), eps = __int_as_float(p.eps);
    float x[VALUES], scores[VALUES];
    const LogSumExp lse = read_token(p, token, there, in_sums, row, held, x, scores);
    if (GIVEN) {
        const Pairs pairs = pairs_of(p.token_offsets, token, p.k, p.num_pairs, there);
        const int longest = __reduce_max_sync(WARP, pairs.number);
        const auto id_of = [&](int j) {
            const int64 at = static_cast<int64>(pairs.first) + j;
            if (masked) return -1;
            if (!p.given_wide) return static_cast<const int*>(p.given)[at];
            const int64 id = static_cast<const int64*>(p.given)[at];
            return id < 0 || id >= E ? -1 : static_cast<int>(id);
        };
        weigh(
            pairs.number, longest, E, lse, scale, eps, id_of, [&](int j) { return to_float(logits[id_of(j)]); },
            [&](int j, float weight, int id) {
                p.weights[static_cast<int64>(pairs.first) + j] = weight;
                p.ids[static_cast<int64>(pairs.first) + j] = id;
            });
        return;
    }
    unsigned keys[VALUES];
    rank_experts(p, token, there, x, scores, lse, memory.groups, memory.group_words, keys);
    const int k = p.k, place = place_again();
    Entry* const slots = memory.slots + place * k;
    select(keys, k, slots, memory.listed + place * MAX_LISTED);
    __syncwarp();
    const auto id_of = [&](int j) { return column_of_entry(slots[j]); };
    const auto logit_of = [&](int j) { return BIAS ? to_float(logits[min(id_of(j), E - 1)]) : from_sort_key(key_of(slots[j])); };
    int number = there && !masked ? k : 0;
    if (CUT) {
        int first_cut = number;
        float mass = 0.f;
        for (int base = 0; base < k; base += LANES) {
            const int j = base + lane;
            const float x_j = j < number ? logit_of(j) : 0.f, probability = j < number ? lse.probability(x_j) : 0.f;
            float before = 0.f;
#pragma unroll
            for (int i = 0; i < LANES; ++i) {
                if (i == lane) before = mass;
                if (base + i < k) mass += from_lane(probability, i);
            }
            const float compared = BIAS ? from_sort_key(key_of(slots[min(j, k - 1)])) : score_in_row(x_j, lse);
            // A NaN stays, so that it shows. Options that are not given are infinities.
            const bool stays = (j == 0 || !(before >= __int_as_float(p.top_p))) && !(compared < __int_as_float(p.threshold));
            if (j < number && !stays) first_cut = min(first_cut, j);
        }
        number = over_lanes(first_cut, [](int a, int b) { return min(a, b); });
    }
    // Each lane reads and overwrites its own slots. Empty slots are last.
    weigh(number, k, E, lse, scale, eps, id_of, logit_of, [&](int j, float weight, int id) {
        slots[j] = static_cast<Entry>(__float_as_uint(weight)) << 32 | static_cast<unsigned>(id);
    });
#pragma unroll 1
    for (int j = number + lane; j < k; j += LANES) slots[j] = 0xffffffffull;
    __syncwarp();
    // The warp's tokens are consecutive. So are their slots, in shared memory and in the results.
    const int place_in_warp = threadIdx.x % 32 / LANES, first = token - place_in_warp;
    const unsigned there_lanes = __ballot_sync(WARP, there);
    const int written = __popc(there_lanes) / LANES * k;
    const Entry* warp_slots = slots - place_in_warp * k;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < written; i += 32) {
        const Entry entry = warp_slots[i];
        p.weights[static_cast<int64>(first) * k + i] = __uint_as_float(static_cast<unsigned>(entry >> 32));
        p.ids[static_cast<int64>(first) * k + i] = static_cast<int>(static_cast<unsigned>(entry));
    }
    __syncwarp();
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) router_forward(const RouterForwardParams p) {
    if (SUMS) let_next_launch_start();
#if LANE_K > 0 && LANES == 1
    route_by_lane(p);
#else
    const int E = experts_of(p);
    const int columns = E + 2, stride = sum_row_words(columns);
#if LANE_K > 0
    ListedTokens listed = {reinterpret_cast<ListedRow*>(dynamic_shared), 0, 0};
    float* const all_sums = reinterpret_cast<float*>(listed.rows + 32 * LISTED_BUFFERS);
#else
    Entry* const all_slots = reinterpret_cast<Entry*>(dynamic_shared);
    Entry* const all_listed = all_slots + (GIVEN ? 0 : (TOKENS * p.k + 1) / 2 * 2);
    unsigned* const all_groups = reinterpret_cast<unsigned*>(all_listed + (GIVEN || LANES == 1 ? 0 : TOKENS * MAX_LISTED));
    const int group_words = GROUP_TOP && GROUP_LANES == 0 ? (E + 2 * p.groups + 3) / 4 * 4 : 0;
    float* const all_sums = reinterpret_cast<float*>(all_groups + TOKENS * group_words);
#endif
    const int first = blockIdx.x * p.tokens_per_block, end = min(p.L, first + p.tokens_per_block);
#if LANE_K > 0
    if (LISTED_BUFFERS == 1) {  // the block has 32 tokens
        Held none;
#pragma unroll 1
        for (int base = 0; base < 32; base += TOKENS) listed.take(p, first + base, end, false, nullptr, 0, none);
        listed.choose(p, false);
        return;
    }
#endif

    if (GIVEN && p.token_offsets != nullptr && blockIdx.x == gridDim.x - 1) {  // pairs that belong to no token
        const int begin = clamped(p.token_offsets[0], p.num_pairs), behind = clamped(p.token_offsets[p.L], p.num_pairs);
        for (int i = threadIdx.x; i < begin; i += THREADS) p.weights[i] = 0.f, p.ids[i] = -1;
        for (int i = behind + threadIdx.x; i < p.num_pairs; i += THREADS) p.weights[i] = 0.f, p.ids[i] = -1;
    }
    for (int begin = first; begin < end;) {
        Sequence sequence = {0, end};
        if (SUMS) {
            sequence = sequence_of(p.sequences, p.num_sequences, begin, p.L);
            __syncthreads();  // all threads have read the rows of the sequence before
        }
        const int index = __reduce_max_sync(WARP, sequence.index), stop = __reduce_max_sync(WARP, min(end, sequence.end));
        const bool counts = index >= 0 && index < p.num_sequences;
        Held held = {};
        if (SUMS) clear_sums(E, all_sums + place_again() * stride);
        for (int base = begin; base < stop; base += TOKENS) {
#if LANE_K > 0
            listed.take(p, base, stop, counts, all_sums, stride, held);
            listed.choose(p, stop < end || base + TOKENS < stop);
#else
            const int token = base + threadIdx.x / LANES;
            float* const row = all_sums + place_again() * stride;
            route_token(p, token, token < stop, counts, row, held, {all_slots, all_listed, all_groups, group_words});
#endif
        }
        if (SUMS && counts) {
            store_sums(held, E, all_sums + place_again() * stride);
#if LANE_K > 0
            if (listed.filled() != 0)  // otherwise `choose` had a barrier
#endif
                __syncthreads();
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
#endif
}
