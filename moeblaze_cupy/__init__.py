"""Mixture-of-Experts training kernels without routed buffers, after the MoEBlaze paper (arXiv 2601.05296)."""

from typing import TYPE_CHECKING

from moeblaze_cupy.fp8.api import quantize_weights
from moeblaze_cupy.layer.api import build_dispatch, moe_forward
from moeblaze_cupy.layer.backward_api import moe_backward, moe_backward_data, moe_backward_weights
from moeblaze_cupy.quantised.api import dequantize, quantize_experts
from moeblaze_cupy.quantised.scratch import limit_scratch, release_scratch
from moeblaze_cupy.router.api import route, route_backward
from moeblaze_cupy.rows.api import sum_rows
from moeblaze_cupy.selection.api import (
    expert_choice,
    limit_capacity,
    list_pairs,
    quantile_histogram,
    round_tokens,
    tokens_per_expert,
)
from moeblaze_cupy.types import (
    Activation,
    DispatchIndices,
    Fp8Weights,
    Gradients,
    Lora,
    NestedScales,
    PendingWeights,
    QuantizedWeight,
    RouterSums,
    SavedForBackward,
)

__version__ = "0.1.0"
__all__ = [
    "Activation",
    "DispatchIndices",
    "Fp8Weights",
    "Gradients",
    "Lora",
    "NestedScales",
    "PendingWeights",
    "QuantizedWeight",
    "RouterSums",
    "SavedForBackward",
    "build_dispatch",
    "dequantize",
    "expert_choice",
    "limit_capacity",
    "limit_scratch",
    "list_pairs",
    "moe_backward",
    "moe_backward_data",
    "moe_backward_weights",
    "moe_forward",
    "quantile_histogram",
    "quantize_experts",
    "quantize_weights",
    "release_scratch",
    "round_tokens",
    "route",
    "route_backward",
    "sum_rows",
    "tokens_per_expert",
]

if not TYPE_CHECKING:  # type checkers would take it for a module that has every name

    def __getattr__(name: str) -> object:
        if name in ("MoE", "moe"):  # names that a user of torch looks for
            right = f"'from moeblaze_cupy.interop.torch import {name}'"
            raise ImportError(f"moeblaze_cupy: {name}: expected {right}, got an import from moeblaze_cupy itself")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
