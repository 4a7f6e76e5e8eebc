// Scores of logits, for the router and for quantile balancing.
#pragma once
#include "common.cuh"

enum Score { NO_SCORE = -1, SOFTMAX, SIGMOID, SQRT_SOFTPLUS, IDENTITY, RELU };

__device__ __forceinline__ float sigmoid(float x) {
    const float small = expf(-fabsf(x));  // it is at most 1, and precise for scores near 0
    return (x < 0.f ? small : 1.f) * reciprocal(1.f + small);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// The score of a logit. Not for SOFTMAX, whose scores depend on the whole row.
template <int SCORE_OF>
__device__ __forceinline__ float score_of(float x) {
    if (SCORE_OF == SIGMOID) return sigmoid(x);
    if (SCORE_OF == SQRT_SOFTPLUS)  // below -40 softplus(x) equals exp(x) in fp32, and would underflow before its root does
        return x < -40.f ? expf(0.5f * x) : sqrtf(softplus(x));
    if (SCORE_OF == RELU) return x > 0.f || x != x ? x : 0.f;
    return x;
}
// Faster exp(x) and scores, for ranking and for sums. Router weights come from the functions above. expf takes ten
// instructions, quick_exp takes two. The relative error of quick_exp is (2 + |x|) * 2^-23, and it keeps the order of its
// arguments.
__device__ __forceinline__ float quick_exp(float x) { return exp2f(x * 1.44269504f); }
template <int SCORE_OF>
__device__ __forceinline__ float quick_score_of(float x) {
    return SCORE_OF == SIGMOID ? reciprocal(1.f + quick_exp(-x)) : score_of<SCORE_OF>(x);
}
// d log s / dx of a score s, SIGMOID or SQRT_SOFTPLUS.
template <int SCORE_OF>
__device__ __forceinline__ float log_slope(float x) {
    if (SCORE_OF == SIGMOID) return sigmoid(-x);
    return x < -40.f ? 0.5f : sigmoid(x) / (2.f * softplus(x));
}

// Returns the score of a logit, of a kind that is known when the kernel runs. log_sum: the log of the sum of exp(logits), for
// SOFTMAX.
__device__ __forceinline__ float score_of(float x, int score, float log_sum) {
    if (score == SOFTMAX) return expf(x - log_sum);
    if (score == SIGMOID) return reciprocal(1.f + expf(-x));
    if (score == SQRT_SOFTPLUS) return sqrtf(softplus(x));
    return score == RELU && x < 0.f ? 0.f : x;
}
