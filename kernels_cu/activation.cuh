// The activation of the first layer, forward and backward, in fp32 (paper section 5.1; Algorithm 1, lines 23-28):
// y_swi = act(a) * b in gated layers, act(a) in others.
#pragma once
#include "ptx_sm80.cuh"

enum { SILU = 0, GELU = 1, RELU = 2 };

struct Activated {
    float value, derivative;
};

template <int KIND>
__device__ __forceinline__ Activated activate(float x) {
    if (KIND == SILU) {
        const float sigmoid = reciprocal(1.f + __expf(-x));  // a few units in the last place of fp32
        const float value = x * sigmoid;
        return {value, fmaf(value, 1.f - sigmoid, sigmoid)};
    }
    if (KIND == GELU) {  // exact: x times the normal distribution function
        const float cdf = 0.5f * (1.f + erff(x * 0.70710678f));
        return {x * cdf, cdf + x * 0.39894228f * expf(-0.5f * x * x)};
    }
    return {x < 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f};  // a NaN stays a NaN
}

// b: 1 without a gate.
template <int KIND>
__device__ __forceinline__ float y_swi_of(float a, float b) {
    return activate<KIND>(a).value * b;
}

struct ActivatedBwd {
    float y_swi, grad_a, grad_b;
};

// grad: the gradient of y_swi. b: 1 without a gate; grad_b then has no meaning.
template <int KIND>
__device__ __forceinline__ ActivatedBwd activate_bwd(float a, float b, float grad) {
    const Activated activated = activate<KIND>(a);
    return {activated.value * b, grad * b * activated.derivative, grad * activated.value};
}
