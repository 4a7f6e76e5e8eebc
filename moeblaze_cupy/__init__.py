"""Mixture-of-Experts training kernels without routed buffers, after the MoEBlaze paper (arXiv 2601.05296)."""

from moeblaze_cupy.layer import (
    build_dispatch,
    moe_backward,
    moe_backward_data,
    moe_backward_weights,
    moe_forward,
)
from moeblaze_cupy.routing import route, route_backward
from moeblaze_cupy.rows import sum_rows
from moeblaze_cupy.structures import DispatchIndices, Gradients, PendingWeights, SavedForBackward

__version__ = "0.1.0"
__all__ = [
    "DispatchIndices",
    "Gradients",
    "PendingWeights",
    "SavedForBackward",
    "build_dispatch",
    "moe_backward",
    "moe_backward_data",
    "moe_backward_weights",
    "moe_forward",
    "route",
    "route_backward",
    "sum_rows",
]
