// Router: softmax and top-k over the experts of each token (paper section 2.1), forward and backward.
//
//   logits        (L, E)  bf16, fp16 or fp32, in; E = num_experts
//   weights       (L, k)  fp32, out of forward, into backward
//   ids           (L, k)  int32, out of forward, into backward; largest logit first, ties to the lower id
//   grad_weights  (L, k)  fp32, in
//   grad_logits   (L, E)  as logits, out
//   over_selected         1: softmax over the k chosen logits (topk_softmax, or softmax_topk renormalised,
//                         which is the same function); 0: softmax over all E
//
// Launch: one warp per token, 4 warps per block, dynamic shared memory 4 * 4 * E bytes; E any, k <= 32.
// All arithmetic is fp32. A NaN logit ranks first and makes the token's weights NaN.
#include "common.cuh"

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Order-preserving map of a float to an unsigned; 0 is below every float, so it marks a taken expert.
__device__ __forceinline__ unsigned sort_key(float v) {
    if (v != v) return 0xffffffffu;
    const unsigned bits = __float_as_uint(v);
    if (bits == 0x80000000u) return bits;  // -0 ties with +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_sort_key(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);  // the NaN key maps to a NaN
}

template <class T>
__device__ void route_token(const T* logits, float* weights, int* ids, int64 num_experts, int k, bool over_selected, unsigned* keys) {
    const int lane = threadIdx.x & 31, E = static_cast<int>(num_experts);
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
        const int id = static_cast<int>(__reduce_min_sync(0xffffffffu, best == top ? static_cast<unsigned>(best_id) : 0xffffffffu));
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

template <class T>
__device__ void route_token_bwd(const float* grad_weights, const T* logits, const float* weights, const int* ids, T* grad_logits,
                                int64 num_experts, int k, bool over_selected, float* row) {
    const int lane = threadIdx.x & 31, E = static_cast<int>(num_experts);
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

#define ROUTER_ENTRIES(SUFFIX, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) router_fwd_##SUFFIX(                                                    \
        const T* logits, float* weights, int* ids, int64 L, int64 num_experts, int64 k, int64 over_selected) {                \
        const int warp = threadIdx.x / 32;                                                                                    \
        const int64 token = blockIdx.x * 4LL + warp;                                                                          \
        if (token < L)                                                                                                        \
            route_token(logits + token * num_experts, weights + token * k, ids + token * k, num_experts, static_cast<int>(k), \
                        over_selected != 0, reinterpret_cast<unsigned*>(dynamic_shared) + warp * num_experts);                \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) router_bwd_##SUFFIX(                                                    \
        const float* grad_weights, const T* logits, const float* weights, const int* ids, T* grad_logits, int64 L,            \
        int64 num_experts, int64 k, int64 over_selected) {                                                                    \
        const int warp = threadIdx.x / 32;                                                                                    \
        const int64 token = blockIdx.x * 4LL + warp;                                                                          \
        if (token < L)                                                                                                        \
            route_token_bwd(grad_weights + token * k, logits + token * num_experts, weights + token * k, ids + token * k,     \
                            grad_logits + token * num_experts, num_experts, static_cast<int>(k), over_selected != 0,          \
                            reinterpret_cast<float*>(dynamic_shared) + warp * num_experts);                                   \
    }
ROUTER_ENTRIES(bfloat16, bf16)
ROUTER_ENTRIES(float16, fp16)
ROUTER_ENTRIES(float32, float)
