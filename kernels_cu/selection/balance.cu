// Counts for balancing the load of experts: tokens per expert, and the histogram of quantile balancing.
//
//   tokens_per_expert  slots of each expert in each sequence
//   quantile_lines     a line for each token: the largest biased score among the experts that the token did not choose
//   quantile_counts    a histogram for each expert: over all tokens, the token's line minus the expert's score
//
// Atomics add integers in shared and global memory. Their results are the same in any order.
//
// Launch: COUNT_THREADS threads.
//   tokens_per_expert  grid S * parts; a block takes one part of a sequence's tokens. Dynamic shared memory (E,) int32
//   quantile_lines     a warp for each token. No dynamic shared memory
//   quantile_counts    grid (parts, ceil(E / columns)); a block takes one part of the tokens and `columns` experts, a power of
//                      two up to 32. Dynamic shared memory (columns, bins) int32
#include "scores.cuh"
#include "token_parts.cuh"

static_assert(COUNT_THREADS % 32 == 0 && COUNT_THREADS <= 1024, "threads of a block");
constexpr int LOADS = 8;       // scores that a thread of quantile_counts loads at once
constexpr int LINE_LOADS = 4;  // the same of quantile_lines

template <class Id>
struct TokensPerExpertParams {
    const Id* ids;         // (L, k) int32 or int64, rows row_stride apart, in; id < 0 or >= E: an empty slot
    const int* sequences;  // (S+1,) int32 offsets, in; null for equal lengths
    int* counts;           // (S, E) int32, in and out: zeros at first
    int64 L, row_stride;
    int k, num_experts, num_sequences, parts;
};

// A token's line, and what its scores need. A token without a line is not counted.
struct __align__(8) Line {
    float line;     // the largest biased score that is not chosen; NaN: none
    float log_sum;  // log of the sum of exp(logits), for SOFTMAX
};

template <class T, class Id>
struct QuantileLinesParams {
    const T* logits;    // (L, E) bf16, fp16 or fp32, in
    const Id* ids;      // (L, k) int32 or int64, in; a token without any id has no line
    const float* bias;  // (E,) fp32, in
    Line* lines;        // (L,) of 8 bytes, out
    int64 L;
    int k, num_experts, score;
};

template <class T>
struct QuantileCountsParams {
    const T* logits;      // (L, E), in
    const Line* lines;    // (L,) of 8 bytes, in
    const float* bounds;  // (2,) fp32, in: where the first bin begins and the last ends
    int* histogram;       // (E, bins) int32, in and out
    int64 L;
    int num_experts, score, bins, columns;
};

template <class Id>
__device__ __forceinline__ void count_tokens(const TokensPerExpertParams<Id>& p) {
    int* counts = reinterpret_cast<int*>(dynamic_shared);
    const int sequence = blockIdx.x / p.parts;
    const Tokens all = tokens_of_sequence(p.sequences, p.L, p.num_sequences, sequence);
    const Tokens tokens = tokens_of_part(all, p.parts, blockIdx.x % p.parts);
    for (int e = threadIdx.x; e < p.num_experts; e += COUNT_THREADS) counts[e] = 0;
    __syncthreads();
    const bool apart = p.k > 1 && p.row_stride != p.k;  // rows do not follow each other
    const int64 step = p.k > 1 ? 1 : p.row_stride;      // distance from slot to slot
    for (int64 slot = tokens.begin * p.k + threadIdx.x; slot < tokens.end * p.k; slot += COUNT_THREADS) {
        const Id id = p.ids[apart ? slot / p.k * p.row_stride + slot % p.k : slot * step];
        if (id >= 0 && id < p.num_experts) atomicAdd(counts + static_cast<int>(id), 1);
    }
    __syncthreads();
    wait_for_last_launch();  // the last launch clears the counts
    int* total = p.counts + static_cast<int64>(sequence) * p.num_experts;
    for (int e = threadIdx.x; e < p.num_experts; e += COUNT_THREADS)
        if (counts[e]) atomicAdd(total + e, counts[e]);
}

// Calls f(first, logit of expert first + lane) for every 32 experts. All lanes make equally many calls. A lane past the last
// expert gets the last expert's logit.
template <class T, class F>
__device__ __forceinline__ void for_experts(const T* logits, int num_experts, const F& f) {
    const int lane = threadIdx.x & 31;
    for (int first = 0; first < num_experts; first += 32 * LINE_LOADS) {
        T loaded[LINE_LOADS];
#pragma unroll
        for (int l = 0; l < LINE_LOADS; ++l) loaded[l] = logits[min(first + 32 * l + lane, num_experts - 1)];
        issue_loads_now();
#pragma unroll
        for (int l = 0; l < LINE_LOADS; ++l)
            if (first + 32 * l < num_experts) f(first + 32 * l, to_float(loaded[l]));
    }
}

template <class T, class Id>
__device__ __forceinline__ void find_lines(const QuantileLinesParams<T, Id>& p) {
    const int lane = threadIdx.x & 31;
    const int64 token = blockIdx.x * int64(COUNT_THREADS / 32) + threadIdx.x / 32;
    let_next_launch_start();
    if (token >= p.L) return;
    const T* logits = p.logits + token * p.num_experts;
    const Id* ids = p.ids + token * p.k;
    const Id own = lane < p.k ? ids[lane] : static_cast<Id>(-1);  // the id of slot `lane`, loaded together with the logits
    float log_sum = 0.f;
    if (p.score == SOFTMAX) {
        float largest = __uint_as_float(0xff800000u), sum = 0.f;
        for_experts(logits, p.num_experts, [&](int, float x) { largest = fmaxf(largest, x); });
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        for_experts(logits, p.num_experts,
                    [&](int first, float x) { sum += first + lane < p.num_experts ? expf(x - largest) : 0.f; });
        log_sum = largest + logf(warp_sum(sum));
    }
    unsigned best = 0;
    bool any = own >= 0 && own < p.num_experts;
    for (int j = lane + 32; j < p.k; j += 32) any |= ids[j] >= 0 && ids[j] < p.num_experts;
    for_experts(logits, p.num_experts, [&](int first, float x) {
        unsigned chosen = own >= first && own < first + 32 ? 1u << (static_cast<int>(own) - first) : 0;  // a bit per expert
        for (int j = lane + 32; j < p.k; j += 32)
            if (ids[j] >= first && ids[j] < first + 32) chosen |= 1u << (static_cast<int>(ids[j]) - first);
        chosen = __reduce_or_sync(0xffffffffu, chosen);
        if (first + lane < p.num_experts && !(chosen >> lane & 1))
            best = max(best, sort_key(score_of(x, p.score, log_sum) + p.bias[first + lane]));
    });
    any = __any_sync(0xffffffffu, any);
    best = __reduce_max_sync(0xffffffffu, best);
    if (lane == 0) {
        p.lines[token] = {any ? from_sort_key(best) : __uint_as_float(0x7fc00000u), log_sum};
    }
}

// Neighbouring threads take the `columns` neighbouring experts of a row. A block takes COUNT_THREADS / columns rows at once.
template <class T>
__device__ __forceinline__ void count_lines(const QuantileCountsParams<T>& p) {
    int* counts = reinterpret_cast<int*>(dynamic_shared);
    const int size = p.columns * p.bins;
    for (int i = threadIdx.x; i < size; i += COUNT_THREADS) counts[i] = 0;
    __syncthreads();
    wait_for_last_launch();  // the launch of quantile_lines
    const float low = p.bounds[0], scale = static_cast<float>(p.bins) / (p.bounds[1] - low);
    const int column = threadIdx.x & (p.columns - 1), rows = COUNT_THREADS / p.columns;
    const int expert = blockIdx.y * p.columns + column;
    const Tokens tokens = tokens_of_part({0, p.L}, gridDim.x, blockIdx.x);
    const int number = expert < p.num_experts ? static_cast<int>(tokens.end - tokens.begin) : 0;
    // Offsets of rows have 32 bits, so that an address takes few instructions.
    const unsigned row_bytes = p.num_experts * sizeof(T);
    const Line* of_lines = p.lines + tokens.begin;
    const char* of_logits = reinterpret_cast<const char*>(p.logits + tokens.begin * p.num_experts + expert);
    for (int first = threadIdx.x / p.columns; first < number; first += LOADS * rows) {
        Line lines[LOADS];
        T logits[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const unsigned token = min(first + l * rows, number - 1);
            lines[l] = of_lines[token];
            logits[l] = *reinterpret_cast<const T*>(of_logits + static_cast<unsigned long long>(token) * row_bytes);
        }
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            const float s = score_of(to_float(logits[l]), p.score, lines[l].log_sum);
            const float place = (lines[l].line - s - low) * scale;
            if (place == place && first + l * rows < number) {
                const int bin = static_cast<int>(fminf(fmaxf(place, 0.f), static_cast<float>(p.bins - 1)));
                atomicAdd(counts + column * p.bins + bin, 1);
            }
        }
    }
    __syncthreads();
    int* histogram = p.histogram + static_cast<int64>(blockIdx.y) * size;
    for (int i = threadIdx.x; i < size; i += COUNT_THREADS)
        if (counts[i]) atomicAdd(histogram + i, counts[i]);
}

#define COUNT_TOKENS(SUFFIX, ID)                                                                                                \
    extern "C" __global__ void __launch_bounds__(COUNT_THREADS) tokens_per_expert_##SUFFIX(const TokensPerExpertParams<ID> p) { \
        count_tokens(p);                                                                                                        \
    }
COUNT_TOKENS(int32, int)
COUNT_TOKENS(int64, long long)

#define QUANTILE_LINES(SUFFIX, T, ID_SUFFIX, ID)                                         \
    extern "C" __global__ void __launch_bounds__(COUNT_THREADS)                          \
        quantile_lines_##SUFFIX##_##ID_SUFFIX(const QuantileLinesParams<T, ID> params) { \
        find_lines(params);                                                              \
    }
#define QUANTILES(SUFFIX, T)                                                                                                \
    QUANTILE_LINES(SUFFIX, T, int32, int)                                                                                   \
    QUANTILE_LINES(SUFFIX, T, int64, long long)                                                                             \
    extern "C" __global__ void __launch_bounds__(COUNT_THREADS) quantile_counts_##SUFFIX(const QuantileCountsParams<T> p) { \
        count_lines(p);                                                                                                     \
    }
QUANTILES(bfloat16, bf16)
QUANTILES(float16, fp16)
QUANTILES(float32, float)
