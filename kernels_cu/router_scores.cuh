// What the router's kernels share: scores of logits, keys to sort by, reductions over the LANES lanes that hold one token.
//
// Lane l of a token holds its logits in vectors of WIDTH: the columns (v * LANES + l) * WIDTH and those that follow.
#pragma once
#include "common.cuh"

#if !defined(ELEMENT) || !defined(LANES) || !defined(VALUES) || !defined(ALIGNED) || !defined(FULL) || !defined(THREADS) || \
    !defined(MAX_ROUTER_EXPERTS)
#error "ELEMENT, LANES, VALUES, ALIGNED, FULL, THREADS and MAX_ROUTER_EXPERTS are given by launch_config.py and loader.py"
#endif

#define SOFTMAX 1
#define SIGMOID 2
#define SQRT_SOFTPLUS 3
#define IDENTITY 4
#define RELU 5

constexpr int WIDTH = ALIGNED ? 16 / sizeof(ELEMENT) : 1;  // of a load; rows that are not ALIGNED are read one by one
constexpr int VECTORS = VALUES / WIDTH;
constexpr int COLUMN_BITS = 13;  // of a column, also of those that fill the last vectors of a row up
constexpr unsigned WARP = 0xffffffffu;
constexpr float NORMALIZER = 1e-20f;  // added to the sum of a token's scores where these are made shares of it
static_assert(VALUES % WIDTH == 0, "a lane holds whole vectors");
static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "tokens are held by aligned parts of a warp");
static_assert(2 * MAX_ROUTER_EXPERTS <= 1 << COLUMN_BITS, "columns of a row, and as many that fill its vectors up");
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "threads of a block");

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float sigmoid(float x) {
    const float small = expf(-fabsf(x));  // does not overflow, and keeps the digits of scores near 0
    return (x < 0.f ? small : 1.f) * reciprocal(1.f + small);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// The score of a logit, but for softmax, whose scores need the whole row.
template <int SCORE_OF>
__device__ __forceinline__ float score_of(float x) {
    if (SCORE_OF == SIGMOID) return sigmoid(x);
    if (SCORE_OF == SQRT_SOFTPLUS)  // softplus(x) is exp(x) to the last digit below -40, and would underflow
        return x < -40.f ? expf(0.5f * x) : sqrtf(softplus(x));
    if (SCORE_OF == RELU) return x > 0.f || x != x ? x : 0.f;
    return x;
}
// exp(x) and scores for what is ranked or added up. expf takes ten instructions, quick_exp two: its relative error is 2 + |x|
// units of 2^-23, and it keeps the order of its arguments. Weights come from the functions above.
__device__ __forceinline__ float quick_exp(float x) { return exp2f(x * 1.44269504f); }
template <int SCORE_OF>
__device__ __forceinline__ float quick_score_of(float x) {
    return SCORE_OF == SIGMOID ? reciprocal(1.f + quick_exp(-x)) : score_of<SCORE_OF>(x);
}
// d log s / dx.
template <int SCORE_OF>
__device__ __forceinline__ float log_slope(float x) {
    if (SCORE_OF == SIGMOID) return sigmoid(-x);
    return x < -40.f ? 0.5f : sigmoid(x) / (2.f * softplus(x));
}

template <class T, class F>
__device__ __forceinline__ T over_lanes(T v, F combine) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) v = combine(v, __shfl_xor_sync(WARP, v, step));
    return v;
}
__device__ __forceinline__ float sum_of_lanes(float v) {
    return over_lanes(v, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float max_of_lanes(float v) {
    return over_lanes(v, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ int count_of_lanes(int v) {
    return over_lanes(v, [](int a, int b) { return a + b; });
}
template <class T>
__device__ __forceinline__ T from_lane(T v, int lane) {
    return LANES == 1 ? v : __shfl_sync(WARP, v, lane, LANES);
}

__device__ __forceinline__ int lane_of_token() { return threadIdx.x % LANES; }
__device__ __forceinline__ int first_column() { return lane_of_token() * WIDTH; }
__device__ __forceinline__ constexpr int columns_after_first(int value) { return value / WIDTH * LANES * WIDTH + value % WIDTH; }
__device__ __forceinline__ int column_of(int value) { return first_column() + columns_after_first(value); }

__device__ __forceinline__ float element_of(const unsigned (&words)[4], int i, float) { return __uint_as_float(words[i]); }
template <class Half>
__device__ __forceinline__ float element_of(const unsigned (&words)[4], int i, Half half) {
    half.bits = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
    return to_float(half);
}

// Whether a lane's column is an expert's. With FULL all are, and instructions that ask are left out.
__device__ __forceinline__ bool is_expert(int column, int E) { return FULL || column < E; }

// The row's values of this lane. Columns from E on are -infinity: no real column ranks behind them, and their probability is 0.
// So are rows that are not there, but with FULL: then `row` is another token's, and nobody asks for the results.
__device__ __forceinline__ void load_row(const ELEMENT* row, bool there, int E, float (&x)[VALUES]) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v * WIDTH);
        const bool inside = FULL || (there && column < E);
        if (ALIGNED) {
            uint4 words = make_uint4(0, 0, 0, 0);
            if (inside) words = load_global_16(row + column);
            const unsigned parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) x[v * WIDTH + i] = inside ? element_of(parts, i, ELEMENT()) : minus_infinity();
        } else {
            x[v] = inside ? to_float(row[column]) : minus_infinity();
        }
    }
}

// The floats of `row` in the columns of this lane's N values from the `first` on, and `otherwise` where there are none.
template <int N>
__device__ __forceinline__ void load_floats(const float* row, int first, bool there, int E, float otherwise, float (&x)[N]) {
    constexpr int PART = WIDTH % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < N; i += PART) {
        const int column = column_of(first + i);
        const bool inside = there && is_expert(column, E);
        if constexpr (PART == 4) {
            uint4 words = make_uint4(0, 0, 0, 0);
            if (inside) words = load_global_16(row + column);
            const unsigned parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i + j] = inside ? __uint_as_float(parts[j]) : otherwise;
        } else {
            x[i] = inside ? row[column] : otherwise;
        }
    }
}

struct LogSumExp {
    float largest, sum;  // of the row, and of exp(x - largest)
    float weighted;      // of this lane: sum of x exp(x - largest), for entropies
    __device__ __forceinline__ float probability(float x) const { return expf(x - largest) * reciprocal(sum); }
    __device__ __forceinline__ float quick_probability(float x) const { return quick_exp(x - largest) * reciprocal(sum); }
    __device__ __forceinline__ float value() const { return largest + 0.693147181f * binary_logarithm(sum); }
};

// An expert without probability adds nothing to an entropy, even at -infinity.
__device__ __forceinline__ float logit_or_zero(float x, float p) { return p == 0.f ? 0.f : x; }

// terms: exp(x - largest), so that what needs probabilities of all experts has no exponentials left to compute.
__device__ __forceinline__ LogSumExp log_sum_exp(const float (&x)[VALUES], float largest, float (&terms)[VALUES]) {
    LogSumExp found = {largest, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        const float value = x[i];  // terms may be x
        terms[i] = quick_exp(value - largest);
        found.sum += terms[i];
        found.weighted += terms[i] * logit_or_zero(value, terms[i]);
    }
    found.sum = sum_of_lanes(found.sum);
    return found;
}
__device__ __forceinline__ LogSumExp log_sum_exp(const float (&x)[VALUES], float (&terms)[VALUES]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < VALUES; ++i) largest = fmaxf(largest, x[i]);
    return log_sum_exp(x, max_of_lanes(largest), terms);
}

__device__ __forceinline__ int clamped(int v, int most) { return min(max(v, 0), most); }

// The pairs of a token: its k slots, or those that the offsets give it, whatever these contain.
struct Pairs {
    int first, number;
};
__device__ __forceinline__ Pairs pairs_of(const int* token_offsets, int token, int k, int num_pairs, bool there) {
    if (!there) return {0, 0};
    if (token_offsets == nullptr) return {token * k, k};
    const int first = clamped(token_offsets[token], num_pairs);
    return {first, max(clamped(token_offsets[token + 1], num_pairs) - first, 0)};
}

// The sequence that a token is in, or one outside of 0 .. number - 1. `end` is where the next one begins.
struct Sequence {
    int index, end;
};
__device__ __forceinline__ Sequence sequence_of(const int* offsets, int number, int token, int L) {
    if (offsets == nullptr) {
        if (number == 1) return {0, L};
        const int tokens = L / number;
        return {token / tokens, (token / tokens + 1) * tokens};
    }
    int low = 0, high = number + 1;  // offsets[low - 1] <= token < offsets[high]
    while (low < high) {
        const int middle = (low + high) / 2;
        if (offsets[middle] <= token)
            low = middle + 1;
        else
            high = middle;
    }
    return {low - 1, low <= number ? max(offsets[low], token + 1) : L};
}
