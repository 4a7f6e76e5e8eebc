// Router: softmax and top-k over the experts of each token (paper section 2.1), forward and backward.
//
// All arithmetic is fp32. A NaN logit ranks first and makes the token's weights NaN. Equal logits rank by rising id.
//
// Launch: a warp per token, TOKENS_PER_BLOCK warps per block. Dynamic shared memory (TOKENS_PER_BLOCK, E) of 4 bytes: the
// sort keys of each token forward, the gradient of its logits backward. E <= MAX_ROUTER_EXPERTS, k <= MAX_ROUTER_K.
#include "common.cuh"

#if !defined(TOKENS_PER_BLOCK) || !defined(MAX_ROUTER_EXPERTS) || !defined(MAX_ROUTER_K) || !defined(DEFAULT_SHARED_BYTES)
#error "TOKENS_PER_BLOCK, MAX_ROUTER_EXPERTS, MAX_ROUTER_K and DEFAULT_SHARED_BYTES are given by launch_config.py"
#endif
static_assert(MAX_ROUTER_K <= 32, "a lane holds one of a token's experts");
static_assert(4 * TOKENS_PER_BLOCK * MAX_ROUTER_EXPERTS <= DEFAULT_SHARED_BYTES, "launches ask for no more shared memory");
static_assert(TOKENS_PER_BLOCK * 32 <= 1024, "threads of a block");

template <class T>
struct RouterFwdParams {
    const T* logits;  // (L, E) bf16, fp16 or fp32, in
    float* weights;   // (L, k) fp32, out
    int* ids;         // (L, k) int32, out: largest logit first, ties to the lower id
    int64 L;
    int num_experts;    // E
    int k;              // experts per token
    int over_selected;  // 1: softmax over the k chosen logits (topk_softmax, or softmax_topk renormalised, which is the
                        // same function); 0: softmax over all E
};

template <class T>
struct RouterBwdParams {
    const float* grad_weights;  // (L, k) fp32, in
    const T* logits;            // (L, E) bf16, fp16 or fp32, in
    const float* weights;       // (L, k) fp32, in
    const int* ids;             // (L, k) int32, in
    T* grad_logits;             // (L, E) as logits, out
    int64 L;
    int num_experts, k, over_selected;  // as in RouterFwdParams
};

// Maps a float to an unsigned with the same order. 0 is below every float and marks an expert that is already chosen.
__device__ __forceinline__ unsigned sort_key(float v) {
    if (v != v) return 0xffffffffu;
    const unsigned bits = __float_as_uint(v);
    if (bits == 0x80000000u) return bits;  // -0 ties with +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_sort_key(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);  // the key of NaN gives a NaN
}

// One token by one warp. Each lane keeps the best key of its experts lane, lane + 32, ...; the warp takes the best of all k
// times, and the lane that held it looks for its next best.
template <class T>
__device__ void route_token(const T* logits, float* weights, int* ids, int E, int k, bool over_selected, unsigned* keys) {
    const int lane = threadIdx.x & 31;
    unsigned best = 0;
    int best_id = 0;
    for (int e = lane; e < E; e += 32) {
        const unsigned key = sort_key(to_float(logits[e]));
        keys[e] = key;
        if (key > best) best = key, best_id = e;
    }
    const float largest = from_sort_key(__reduce_max_sync(0xffffffffu, best));
    float sum = 0.f;
    if (!over_selected) {
        for (int e = lane; e < E; e += 32) sum += expf(from_sort_key(keys[e]) - largest);
        sum = warp_sum(sum);
    }
    unsigned my_key = 0;  // lane j holds slot j
    int my_id = 0;
    for (int j = 0; j < k; ++j) {
        const unsigned top = __reduce_max_sync(0xffffffffu, best);
        const int id =
            static_cast<int>(__reduce_min_sync(0xffffffffu, best == top ? static_cast<unsigned>(best_id) : 0xffffffffu));
        if (lane == j) my_key = top, my_id = id;
        if ((id & 31) == lane) {
            keys[id] = 0;
            best = 0;
            for (int e = lane; e < E; e += 32)
                if (keys[e] > best) best = keys[e], best_id = e;
        }
    }
    const float p = lane < k ? expf(from_sort_key(my_key) - largest) : 0.f;
    if (over_selected) sum = warp_sum(p);
    if (lane < k) {
        weights[lane] = p / sum;
        ids[lane] = my_id;
    }
}

// One token by one warp. The gradient of softmax is p (g - <p, g>), over the chosen logits or over all. `row` (E,) is shared
// memory for the gradients of the chosen experts among zeros.
template <class T>
__device__ void route_token_bwd(const float* grad_weights, const T* logits, const float* weights, const int* ids, T* grad_logits,
                                int E, int k, bool over_selected, float* row) {
    const int lane = threadIdx.x & 31;
    const float g = lane < k ? grad_weights[lane] : 0.f, w = lane < k ? weights[lane] : 0.f;
    const float dot = warp_sum(w * g);
    for (int e = lane; e < E; e += 32) row[e] = 0.f;
    __syncwarp();
    const int id = lane < k ? ids[lane] : -1;
    if (id >= 0 && id < E) row[id] = over_selected ? w * (g - dot) : g;
    __syncwarp();
    if (over_selected) {
        for (int e = lane; e < E; e += 32) store_one(grad_logits + e, row[e]);
        return;
    }
    unsigned best = 0;
    for (int e = lane; e < E; e += 32) best = max(best, sort_key(to_float(logits[e])));
    const float largest = from_sort_key(__reduce_max_sync(0xffffffffu, best));
    float sum = 0.f;
    for (int e = lane; e < E; e += 32) sum += expf(to_float(logits[e]) - largest);
    sum = warp_sum(sum);
    for (int e = lane; e < E; e += 32) {
        const float p = expf(to_float(logits[e]) - largest) / sum;
        store_one(grad_logits + e, p * (row[e] - dot));
    }
}

#define ROUTER_ENTRIES(SUFFIX, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) router_fwd_##SUFFIX(const RouterFwdParams<T> p) {   \
        const int warp = threadIdx.x / 32;                                                                                  \
        const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + warp;                                                    \
        if (token < p.L)                                                                                                    \
            route_token(p.logits + token * p.num_experts, p.weights + token * p.k, p.ids + token * p.k, p.num_experts, p.k, \
                        p.over_selected != 0, reinterpret_cast<unsigned*>(dynamic_shared) + warp * p.num_experts);          \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) router_bwd_##SUFFIX(const RouterBwdParams<T> p) {   \
        const int warp = threadIdx.x / 32;                                                                                  \
        const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + warp;                                                    \
        if (token < p.L)                                                                                                    \
            route_token_bwd(p.grad_weights + token * p.k, p.logits + token * p.num_experts, p.weights + token * p.k,        \
                            p.ids + token * p.k, p.grad_logits + token * p.num_experts, p.num_experts, p.k,                 \
                            p.over_selected != 0, reinterpret_cast<float*>(dynamic_shared) + warp * p.num_experts);         \
    }
ROUTER_ENTRIES(bfloat16, bf16)
ROUTER_ENTRIES(float16, fp16)
ROUTER_ENTRIES(float32, float)
