"""The layer on the CPU, in NumPy: the specification of the layer and the oracle of all tests.

Letters: L tokens, k slots (experts per token), E experts, d model width, h expert hidden width, n slots of the expert
at hand. The paper's W1, W2, W3 are here the gate half and the up half of `w1`, and `w2`.

Arithmetic is float64 if x (or the logits) is float64, else float32. Values that the layer stores (first layer, y_swi,
results) are rounded to x's dtype, and whatever follows a stored value is computed from the rounded one, stored or not:
so all save policies but "fp8" give the same gradients.

No function here checks its arguments: the package's public functions do that before they call this module.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from moeblaze_cupy.reference import experts, fp8, router, selection
from moeblaze_cupy.reference.dispatch import dispatch
from moeblaze_cupy.reference.numerics import HostArray, erf
from moeblaze_cupy.reference.selection import expert_choice, limit_capacity, list_pairs, round_tokens, tokens_per_expert

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_on_a_gpu(function: _Function) -> _Function:
    """Makes overflow, underflow and invalid operations follow IEEE 754, whatever the caller's np.errstate is."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments, **options)

    return cast("_Function", called)


moe_forward, moe_backward = _as_on_a_gpu(experts.moe_forward), _as_on_a_gpu(experts.moe_backward)
route, route_backward = _as_on_a_gpu(router.route), _as_on_a_gpu(router.route_backward)
sum_rows = _as_on_a_gpu(experts.sum_rows)
quantize_weights = _as_on_a_gpu(fp8.quantize_weights)
quantile_histogram = _as_on_a_gpu(selection.quantile_histogram)

__all__ = [
    "HostArray",
    "dispatch",
    "erf",
    "expert_choice",
    "limit_capacity",
    "list_pairs",
    "moe_backward",
    "moe_forward",
    "quantile_histogram",
    "quantize_weights",
    "round_tokens",
    "route",
    "route_backward",
    "sum_rows",
    "tokens_per_expert",
]
