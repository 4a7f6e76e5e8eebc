// Shared code of the router's kernels: loads of rows, and reductions over the LANES lanes that hold one token.
//
// Lane l of a token holds VALUES logits, in vectors of WIDTH. Its vector v has the WIDTH columns from (v * LANES + l) * WIDTH
// on.
#pragma once
#include "scores.cuh"

constexpr int WIDTH = ALIGNED ? 16 / sizeof(ELEMENT) : 1;  // logits per load: 16 bytes, or one logit if rows are not ALIGNED
constexpr int VECTORS = VALUES / WIDTH;
constexpr int COLUMN_BITS = 13;  // bits of a column's number; the lanes' last vectors may have columns past E
constexpr unsigned WARP = 0xffffffffu;
constexpr float NORMALIZER = 1e-20f;  // added to the sum of a token's scores before they are divided by it
static_assert(VALUES % WIDTH == 0, "a lane holds whole vectors");
static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0, "an aligned part of a warp holds a token");
static_assert(2 * MAX_ROUTER_EXPERTS <= 1 << COLUMN_BITS, "the columns past E are no more than E");
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "threads of a block");

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

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

// Returns whether a column is an expert's. If FULL, lanes have columns of experts only, and the comparison is compiled out.
__device__ __forceinline__ bool is_expert(int column, int E) { return FULL || column < E; }

// Loads this lane's values of a row. Columns from E on become -infinity: no expert ranks behind them, and their probability is
// 0. If the token is not `there`, all columns do, except with FULL. Then the lane reads `row` all the same, which is another
// token's, and the results are not used.
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

// Loads the floats of `row` in the columns of this lane's values first .. first + N - 1. Columns from E on, and all if not
// `there`, become `otherwise`.
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
    float largest, sum;  // the row's largest x, and its sum of exp(x - largest)
    float weighted;      // this lane's part of the sum of (x - largest) exp(x - largest), for entropies
    __device__ __forceinline__ float probability(float x) const { return expf(x - largest) * reciprocal(sum); }
    __device__ __forceinline__ float quick_probability(float x) const { return quick_exp(x - largest) * reciprocal(sum); }
    __device__ __forceinline__ float value() const { return largest + 0.693147181f * binary_logarithm(sum); }
};

// A logit less the largest of its row. Entropies are made of these, as the logits themselves would cancel. Below the bound a
// probability is 0, and so is its product with a bound that is finite.
__device__ __forceinline__ float below_largest(float x, float largest) { return fmaxf(x - largest, -200.f); }

// A sum over a row whose bits are the same for all LANES > 1. A lane keeps separate sums of the values that each of 32 lanes
// would have, and adds these sums at the end.
struct RowSum {
    static constexpr int APART = LANES > 1 ? 32 / LANES : 1;
    static constexpr int PARTS = APART < VECTORS ? APART : VECTORS;
    float parts[PARTS];
    // Adds v, which belongs to the lane's i-th value. It must be called for i = 0, 1, 2, ...
    __device__ __forceinline__ void add(int i, float v) {
        float& part = parts[i / WIDTH % APART];
        part = i / WIDTH < APART && i % WIDTH == 0 ? v : part + v;
    }
    __device__ __forceinline__ float of_lanes() {
#pragma unroll
        for (int half = APART / 2; half > 0; half /= 2)
#pragma unroll
            for (int j = 0; j < half; ++j)
                if (j + half < PARTS) parts[j] += parts[j + half];
        return sum_of_lanes(parts[0]);
    }
};

// terms become exp(x - largest), from which probabilities of all experts are computed without further exponentials.
__device__ __forceinline__ LogSumExp log_sum_exp(const float (&x)[VALUES], float largest, float (&terms)[VALUES]) {
    RowSum sum;
    float weighted = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        terms[i] = quick_exp(x[i] - largest);
        sum.add(i, terms[i]);
        weighted += terms[i] * below_largest(x[i], largest);
    }
    return {largest, sum.of_lanes(), weighted};
}
__device__ __forceinline__ LogSumExp log_sum_exp(const float (&x)[VALUES], float (&terms)[VALUES]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < VALUES; ++i) largest = fmaxf(largest, x[i]);
    return log_sum_exp(x, max_of_lanes(largest), terms);
}

__device__ __forceinline__ int clamped(int v, int most) { return min(max(v, 0), most); }

// The pairs of a token: its k slots, or those that token_offsets gives it. Offsets may hold any numbers; they are clamped to
// 0 .. num_pairs.
struct Pairs {
    int first, number;
};
__device__ __forceinline__ Pairs pairs_of(const int* token_offsets, int token, int k, int num_pairs, bool there) {
    if (!there) return {0, 0};
    if (token_offsets == nullptr) return {token * k, k};
    const int first = clamped(token_offsets[token], num_pairs);
    return {first, max(clamped(token_offsets[token + 1], num_pairs) - first, 0)};
}

// The sequence that a token is in. `index` is outside of 0 .. number - 1 if it is in none. `end` is where the next sequence
// begins.
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
