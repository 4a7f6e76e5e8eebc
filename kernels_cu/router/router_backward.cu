// Router backward (paper section 2.1): the gradient of the logits, from the gradients of the router weights and of the sums for
// balancing losses. Per token, x are the logits, s the scores, p the softmax of x, w the weights of its slots, and g the
// gradient of w. dot is the sum of g w over the slots. v is the gradient of one of the sums. The gradient of a logit adds up
// these terms:
//
//   chosen experts                w (g - dot / scale) if weights are renormalised, else w g; times d log s / dx, except with
//                                 softmax. With s = x or s = relu(x) it is (scale g - dot) / total if weights are
//                                 renormalised, where total is the sum of the chosen scores and eps, else scale g. Where relu
//                                 is 0 the term is 0.
//   softmax, not renormalised     -p dot
//   sum of shares q               q (v - <q, v>); times d log s / dx if q are shares of sigmoid or sqrt(softplus) scores
//   sum of z = lse^2              2 v lse p
//   sum of entropies              -v p (z - <p, z>), where z = x - max(x)
//
// Launch: grid L / TOKENS, rounded up, THREADS threads. LANES lanes hold a token's row, so a block has TOKENS = THREADS / LANES
// tokens. Dynamic shared memory: for each of them E floats, rounded up to a multiple of 4.
#include "router_scores.cuh"

struct RouterBackwardParams {
    const float* grad_weights;        // (L, k) or (P,) fp32, in
    const ELEMENT* logits;            // (L, E) ELEMENT, in
    const float* weights;             // (L, k) or (P,) fp32, in: of forward
    const int* ids;                   // (L, k) or (P,) int32, in: of forward; outside of 0 .. E - 1 for empty slots
    const int* token_offsets;         // (L + 1,) int32, in: where each token's pairs begin; null: each token has k slots
    const unsigned char* token_mask;  // (L,) bool, in: tokens that count in the sums; null: all
    const int* sequences;             // (num_sequences + 1,) int32, in: where each sequence begins; null: all are equally long
    const float* grad_score_sums;     // (num_sequences, E) fp32, in; null without SHARES
    const float* grad_z_sums;         // (num_sequences,) fp32, in; null without SUM_Z
    const float* grad_entropy_sums;   // (num_sequences,) fp32, in; null without SUM_ENTROPY
    ELEMENT* grad_logits;             // (L, E) ELEMENT, out
    int L, num_experts, k, num_pairs, num_sequences;  // num_pairs: P
    int scale, eps;                                   // the bits of floats
};

constexpr bool LINEAR = SCORE == IDENTITY || SCORE == RELU;
constexpr bool OVER_ALL = SCORE == SOFTMAX && !RENORMALIZE;
constexpr bool SUMS = SHARES != NO_SCORE || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool DENSE = OVER_ALL || SUMS;
constexpr bool PROBABILITIES = OVER_ALL || SHARES == SOFTMAX || SUM_Z != 0 || SUM_ENTROPY != 0;
constexpr bool SCORE_SHARES = SHARES == SIGMOID || SHARES == SQRT_SOFTPLUS;
constexpr int TOKENS = THREADS / LANES;
// RESIDENT blocks per multiprocessor at least: more blocks hide more of the memory's latency. The gradients of shares are read
// twice, the second time from the L1 cache, because registers to hold them would leave room for fewer blocks.
constexpr bool MANY_REGISTERS = VALUES > 16 || SUM_ENTROPY != 0 || (SCORE_SHARES && (PROBABILITIES || SHARES != SIGMOID));
constexpr int RESIDENT = MANY_REGISTERS ? 1 : SCORE_SHARES || !ALIGNED ? 4 : 6;

struct Slot {
    int id;
    float weight, grad;
};

// Adds the terms of the chosen experts to the token's row in shared memory. Returns dot.
__device__ __forceinline__ float scatter(const RouterBackwardParams& p, const Pairs& pairs, const ELEMENT* logits, float* row) {
    const int lane = lane_of_token(), E = p.num_experts;
    const float scale = __int_as_float(p.scale);
    const int64 first = pairs.first;
    const auto slot_of = [&](int j) -> Slot {
        if (j >= pairs.number) return {-1, 0.f, 0.f};
        return {p.ids[first + j], p.weights[first + j], p.grad_weights[first + j]};
    };
    const auto is_present = [&](const Slot& slot) { return static_cast<unsigned>(slot.id) < static_cast<unsigned>(E); };
    float dot = 0.f, total = 0.f;
    const auto add = [&](const Slot& slot) {
        if (!is_present(slot)) return;  // the gradient of an empty slot's weight may be anything
        dot += slot.weight * slot.grad;
        if (LINEAR && RENORMALIZE) total += score_of<SCORE>(to_float(logits[slot.id]));
    };
    Slot slot = slot_of(lane);  // in most cases the lane's only slot, so it stays in registers for the loop below
    add(slot);
#pragma unroll 1
    for (int j = lane + LANES; j < pairs.number; j += LANES) add(slot_of(j));
    dot = sum_of_lanes(dot);
    if (LINEAR && RENORMALIZE) total = sum_of_lanes(total) + __int_as_float(p.eps);
    const int longest = __reduce_max_sync(WARP, pairs.number);
#pragma unroll 1
    for (int base = 0; base < longest; base += LANES) {
        if (base > 0) slot = slot_of(base + lane);
        const int id = slot.id;
        const bool present = is_present(slot);
        float h = 0.f;
        if (present) {
            const float g = slot.grad;
            if (LINEAR) {
                h = RENORMALIZE ? (scale * g - dot) / total : scale * g;
                if (SCORE == RELU && !(to_float(logits[id]) > 0.f)) h = 0.f;
            } else {
                const float w = slot.weight;
                h = RENORMALIZE ? w * (g - dot / scale) : w * g;
                if (SCORE != SOFTMAX) h *= log_slope<SCORE>(to_float(logits[id]));
            }
        }
        // If a token has an expert twice, both gradients are added, in the order of slots.
        const int place = threadIdx.x % 32 / LANES;
        const unsigned same = __match_any_sync(WARP, present ? place << 16 | id : -1 - static_cast<int>(threadIdx.x % 32));
        if (__any_sync(WARP, (same & (same - 1)) != 0)) {
#pragma unroll 1
            for (int turn = 0; turn < LANES; ++turn) {
                if (turn == lane && present) row[id] += h;
                __syncwarp();
            }
        } else if (present) {
            row[id] += h;
        }
        __syncwarp();
    }
    return dot;
}

__device__ __forceinline__ void store_vector(ELEMENT* out, const float (&v)[1]) { store_one(out, v[0]); }
__device__ __forceinline__ void store_vector(float* out, const float (&v)[4]) {
    store_global_16(out, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
}
template <class Half>
__device__ __forceinline__ void store_vector(Half* out, const float (&v)[8]) {
    store_vector8(out, v);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) router_backward(const RouterBackwardParams p) {
    const int E = p.num_experts, lane = lane_of_token(), place = threadIdx.x / LANES;
    const int token = blockIdx.x * TOKENS + place;
    const bool there = token < p.L;
    const ELEMENT* logits = p.logits + static_cast<int64>(there ? token : 0) * E;
    float* const row = reinterpret_cast<float*>(dynamic_shared) + place * ((E + 3) / 4 * 4);
    float x[VALUES], v[WIDTH];  // v: the gradient of the sequence's sum of shares; 0 if the token or the column has none
    if (DENSE) load_row(logits, there, E, x);
    const float* v_row = p.grad_score_sums;
    int sequence = 0;
    bool counts = false;
    if (SUMS) {
        sequence = sequence_of(p.sequences, p.num_sequences, there ? token : 0, p.L).index;
        counts = there && sequence >= 0 && sequence < p.num_sequences && !(p.token_mask != nullptr && !p.token_mask[token]);
        if (SHARES != NO_SCORE) v_row += static_cast<int64>(counts ? sequence : 0) * E;
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v * WIDTH);
        if (!is_expert(column, E)) continue;
        if (WIDTH % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WIDTH; i += 4) *reinterpret_cast<float4*>(row + column + i) = make_float4(0.f, 0.f, 0.f, 0.f);
        } else {
            row[column] = 0.f;
        }
    }
    __syncwarp();
    const float dot = scatter(p, pairs_of(p.token_offsets, token, p.k, p.num_pairs, there), logits, row);

    LogSumExp lse = {0.f, 1.f, 0.f};
    float probabilities[VALUES];
    if (PROBABILITIES) {
        lse = log_sum_exp(x, probabilities);
        const float of_term = reciprocal(lse.sum);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) probabilities[i] *= of_term;
    }
    float falls[VALUES];  // exp(-x), from which a sigmoid and its slope are computed without another exponential
    float v_entropy = 0.f, of_all = OVER_ALL ? -dot : 0.f, mean_v = 0.f, share = 0.f;
    if (SUMS) {
        if (SUM_Z && counts) of_all += 2.f * p.grad_z_sums[sequence] * lse.value();
        if (SUM_ENTROPY && counts) v_entropy = p.grad_entropy_sums[sequence];
        float mean_z = 0.f, scores = 0.f;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            float q = 0.f;
            if (SHARES == SOFTMAX || SUM_ENTROPY) q = probabilities[i];
            if (SUM_ENTROPY) mean_z += q * below_largest(x[i], lse.largest);
            if (SHARES == SIGMOID) falls[i] = quick_exp(-x[i]), q = reciprocal(1.f + falls[i]);
            if (SHARES == SQRT_SOFTPLUS) q = quick_score_of<SHARES>(x[i]);
            if (SCORE_SHARES) scores += q;
            if (SHARES != NO_SCORE && i % WIDTH == 0) load_floats(v_row, i, counts, E, 0.f, v);
            if (SHARES != NO_SCORE) mean_v += q * v[i % WIDTH];
        }
        if (SUM_ENTROPY) of_all += v_entropy * sum_of_lanes(mean_z);
        if (SHARES != NO_SCORE) mean_v = sum_of_lanes(mean_v);
        if (SHARES == SOFTMAX) of_all -= mean_v;
        if (SCORE_SHARES) {
            share = reciprocal(sum_of_lanes(scores) + NORMALIZER);
            mean_v *= share;
        }
    }
    if (!there) return;
    // Probabilities of other tokens may be NaN: these are in no sum and have no slot.
    const bool has_probabilities = PROBABILITIES && (counts || (OVER_ALL && dot != 0.f));
    ELEMENT* const out = p.grad_logits + static_cast<int64>(token) * E;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = column_of(i * WIDTH);
        if (!is_expert(column, E)) continue;
        float grad[WIDTH];
        if (SHARES != NO_SCORE) load_floats(v_row, i * WIDTH, counts, E, 0.f, v);
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            const float x_c = DENSE ? x[i * WIDTH + c] : 0.f, v_c = SHARES != NO_SCORE ? v[c] : 0.f;
            grad[c] = row[column + c];
            if (has_probabilities) {
                const float probability = probabilities[i * WIDTH + c];
                float factor = of_all + (SHARES == SOFTMAX ? v_c : 0.f);
                if (SUM_ENTROPY) factor -= v_entropy * below_largest(x_c, lse.largest);
                grad[c] += probability * factor;
            }
            if (SHARES == SIGMOID && counts) {
                const float fall = falls[i * WIDTH + c], q = reciprocal(1.f + fall);
                grad[c] += q * share * (v_c - mean_v) * (q * fminf(fall, 1e38f));  // fminf: 0 * infinity is NaN
            }
            if (SHARES == SQRT_SOFTPLUS && counts)
                grad[c] += quick_score_of<SHARES>(x_c) * share * (v_c - mean_v) * log_slope<SHARES>(x_c);
        }
        store_vector(out + column, grad);
    }
}
