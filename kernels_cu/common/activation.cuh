// The activation of the first layer, forward and backward, in fp32 (paper section 5.1; Algorithm 1, lines 23-28). A gated layer
// computes y_swi = V(a) * M(b), a layer without a gate y_swi = V(a). docs/activations.md gives the formulas of V and M.
//
// Each kind of activation has a number in the enum and a case in gate_of, which computes V. Unless M(b) = b, it also has a case
// in up_of, which computes M. A kernel is compiled for one kind, ACTIVATION, which has CONSTANTS constants.
#pragma once
#include "ptx_sm80.cuh"

enum { SILU, GELU, RELU, GELU_TANH, RELU2, SWIGLU_CLAMP, SWIGLU_OAI, SWIGLU_CLAMP_AFTER, SWIGLU_SOFTCAP };

// The activation's constants, in the order of types.FORMS. Those that it does not have are 0.
struct ActivationConstants {
    float first, second;
};

// ACTIVATION_CONSTANTS declares a kernel's parameters for the constants. CONSTANTS_OF(p) reads them.
#if CONSTANTS == 2
#define ACTIVATION_CONSTANTS float constant0, constant1;
#define CONSTANTS_OF(p) {(p).constant0, (p).constant1}
#elif CONSTANTS == 1
#define ACTIVATION_CONSTANTS float constant0;
#define CONSTANTS_OF(p) {(p).constant0, 0.f}
#else
#define ACTIVATION_CONSTANTS
#define CONSTANTS_OF(p) \
    {                   \
    }
#endif
template <class Params>
__device__ __forceinline__ ActivationConstants constants_of([[maybe_unused]] const Params& p) {
    return CONSTANTS_OF(p);
}

struct Activated {
    float value, derivative;
};

// The error is a few units in the last place of fp32.
__device__ __forceinline__ float sigmoid_of(float x) { return reciprocal(1.f + __expf(-x)); }

__device__ __forceinline__ Activated silu(float x) {
    const float sigmoid = sigmoid_of(x);
    const float value = x * sigmoid;
    return {value, fmaf(value, 1.f - sigmoid, sigmoid)};
}

// Clamps keep a NaN, which fminf and fmaxf would drop. At the limits the derivative is 1, as in torch.clamp.
__device__ __forceinline__ float clamp_above(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ Activated clamp(float x, float limit) {
    const bool outside = fabsf(x) > limit;
    return {outside ? copysignf(limit, x) : x, outside ? 0.f : 1.f};
}

// V(a) and V'(a).
template <int KIND>
__device__ __forceinline__ Activated gate_of(float a, ActivationConstants constants) {
    if (KIND == SILU) return silu(a);
    if (KIND == GELU) {  // no approximation: a times the normal distribution function
        const float cdf = 0.5f * (1.f + erff(a * 0.70710678f));
        return {a * cdf, cdf + a * 0.39894228f * expf(-0.5f * a * a)};
    }
    // (1 + tanh(u)) / 2 = sigmoid(2 u). It is 0 or 1 in fp32 long before |a| = 32, and powers of a larger a could overflow.
    if (KIND == GELU_TANH) {
        const float near = fminf(fmaxf(a, -32.f), 32.f), square = near * near;
        const float sigmoid = sigmoid_of(near * fmaf(0.07135481f, square, 1.59576912f));
        const float value = a * sigmoid, slope = fmaf(0.21406444f, square, 1.59576912f);
        return {value, fmaf(value * slope, 1.f - sigmoid, sigmoid)};
    }
    if (KIND == RELU2) {
        const float relu = a < 0.f ? 0.f : a;
        return {relu * relu, 2.f * relu};
    }
    if (KIND == SWIGLU_CLAMP) {
        const float limit = constants.first;
        const Activated clamped = silu(clamp_above(a, limit));
        return {clamped.value, a > limit ? 0.f : clamped.derivative};
    }
    if (KIND == SWIGLU_OAI) {
        const float alpha = constants.first, limit = constants.second, clamped = clamp_above(a, limit);
        const float sigmoid = sigmoid_of(alpha * clamped), value = clamped * sigmoid;
        return {value, a > limit ? 0.f : fmaf(alpha * value, 1.f - sigmoid, sigmoid)};
    }
    if (KIND == SWIGLU_CLAMP_AFTER) {
        const float limit = constants.first;
        const Activated before = silu(a);
        return {clamp_above(before.value, limit), before.value > limit ? 0.f : before.derivative};
    }
    if (KIND == SWIGLU_SOFTCAP) {
        const float cap = constants.first, tanh = tanhf(a * reciprocal(cap)), sigmoid = sigmoid_of(a);
        const float value = cap * tanh * sigmoid;
        return {value, fmaf(value, 1.f - sigmoid, sigmoid * fmaf(-tanh, tanh, 1.f))};
    }
    return {a < 0.f ? 0.f : a, a > 0.f ? 1.f : 0.f};  // RELU; a NaN stays a NaN
}

// M(b) and M'(b).
template <int KIND>
__device__ __forceinline__ Activated up_of(float b, ActivationConstants constants) {
    if (KIND == SWIGLU_CLAMP || KIND == SWIGLU_CLAMP_AFTER) return clamp(b, constants.first);
    if (KIND == SWIGLU_OAI) {
        const Activated clamped = clamp(b, constants.second);
        return {clamped.value + 1.f, clamped.derivative};
    }
    if (KIND == SWIGLU_SOFTCAP) {
        const float cap = constants.second, tanh = tanhf(b * reciprocal(cap));
        return {cap * tanh, fmaf(-tanh, tanh, 1.f)};
    }
    return {b, 1.f};
}

// Layers without a gate pass b = 1.
template <int KIND>
__device__ __forceinline__ float y_swi_of(float a, float b, ActivationConstants constants) {
    return gate_of<KIND>(a, constants).value * up_of<KIND>(b, constants).value;
}

struct ActivatedBwd {
    float y_swi, grad_a, grad_b;
};

// y_swi, and the gradients of a and b. grad: the gradient of y_swi. Layers without a gate pass b = 1 and ignore grad_b.
template <int KIND>
__device__ __forceinline__ ActivatedBwd activate_bwd(float a, float b, float grad, ActivationConstants constants) {
    const Activated gate = gate_of<KIND>(a, constants), up = up_of<KIND>(b, constants);
    return {gate.value * up.value, grad * up.value * gate.derivative, grad * gate.value * up.derivative};
}
