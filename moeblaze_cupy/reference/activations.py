"""V and M of the activations y = V(a) * M(b), and their derivatives. docs/activations.md gives the formulas."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moeblaze_cupy.reference.numerics import HostArray, cast, erf, sigmoid
from moeblaze_cupy.types import FORMS, Activation

Values = tuple[HostArray, HostArray]  # values of a function and of its derivative, elementwise


class Product(NamedTuple):
    """V of the gate, or of the only half, and M of the up half. Both take an activation's constants by name."""

    V: Callable[..., Values]
    M: Callable[..., Values]


def _unchanged(u: HostArray, **_: float) -> Values:
    return u, np.ones_like(u)


def _silu(u: HostArray, **_: float) -> Values:
    gate = sigmoid(u)
    return u * gate, gate * (1 + u * (1 - gate))


def _gelu(u: HostArray, **_: float) -> Values:
    cdf = (1 + erf(u * 0.5**0.5)) / 2  # the normal distribution's function
    return u * cdf, cdf + u * np.exp(-u * u / 2) * (2 * np.pi) ** -0.5


def _gelu_tanh(u: HostArray, **_: float) -> Values:
    scale = (2 / np.pi) ** 0.5
    near = np.clip(u, -32, 32)  # beyond, the tanh is 1, and powers might overflow
    tanh = np.tanh(scale * (near + 0.044715 * near**3))
    slope = scale * (1 + 3 * 0.044715 * near**2)
    return u * (1 + tanh) / 2, (1 + tanh) / 2 + u * (1 - tanh**2) * slope / 2


def _relu(u: HostArray, **_: float) -> Values:
    return np.maximum(u, 0), cast(u > 0, u.dtype)


def _relu2(u: HostArray, **_: float) -> Values:
    relu = np.maximum(u, 0)
    return relu * relu, 2 * relu


def _clamp(u: HostArray, limit: float, **_: float) -> Values:
    """Clamps values. The derivative is 1 at the limits, as in torch.clamp."""
    return np.clip(u, -limit, limit), cast(~(np.abs(u) > limit), u.dtype)


def _silu_of_clamped(u: HostArray, limit: float) -> Values:
    value, slope = _silu(np.minimum(u, limit))
    return value, np.where(u > limit, 0, slope)


def _silu_clamped_after(u: HostArray, limit: float) -> Values:
    value, slope = _silu(u)
    return np.minimum(value, limit), np.where(value > limit, 0, slope)


def _swish_of_clamped(u: HostArray, alpha: float, limit: float) -> Values:
    clamped = np.minimum(u, limit)
    gate = sigmoid(alpha * clamped)
    slope = gate * (1 + alpha * clamped * (1 - gate))
    return clamped * gate, np.where(u > limit, 0, slope)


def _clamp_plus_one(u: HostArray, limit: float, **_: float) -> Values:
    value, slope = _clamp(u, limit)
    return value + 1, slope


def _capped_silu(u: HostArray, gate_cap: float, **_: float) -> Values:
    tanh, gate = np.tanh(u / gate_cap), sigmoid(u)
    capped = gate_cap * tanh
    return capped * gate, gate * (1 - tanh * tanh) + capped * gate * (1 - gate)


def _cap(u: HostArray, up_cap: float, **_: float) -> Values:
    tanh = np.tanh(u / up_cap)
    return up_cap * tanh, 1 - tanh * tanh


# The keys are the kinds that FORMS names.
PRODUCTS = {
    "SILU": Product(_silu, _unchanged),
    "GELU": Product(_gelu, _unchanged),
    "RELU": Product(_relu, _unchanged),
    "GELU_TANH": Product(_gelu_tanh, _unchanged),
    "RELU2": Product(_relu2, _unchanged),
    "SWIGLU_CLAMP": Product(_silu_of_clamped, _clamp),
    "SWIGLU_OAI": Product(_swish_of_clamped, _clamp_plus_one),
    "SWIGLU_CLAMP_AFTER": Product(_silu_clamped_after, _clamp),
    "SWIGLU_SOFTCAP": Product(_capped_silu, _cap),
}


def activate(a: HostArray, b: HostArray | None, activation: Activation) -> tuple[Values, Values]:
    """Returns (V(a), V'(a)) and (M(b), M'(b)). Without a gate b is None, M is 1 and its derivative has no meaning."""
    product, constants = PRODUCTS[activation.form.kind], activation.constants
    up = _unchanged(np.ones_like(a)) if b is None else product.M(b, **constants)
    return product.V(a, **constants), up


assert set(PRODUCTS) == {form.kind for form in FORMS.values()}
