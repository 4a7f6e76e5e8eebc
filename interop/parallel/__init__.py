"""Experts on many GPUs: groups, the exchange of rows, and the layer around it.

May import torch and `interop.torch`. Touches process groups, symmetric memory, memory that processes share and
the driver's virtual memory.
"""

from moeblaze_cupy.checks import installed

installed("moeblaze_cupy.interop.parallel", "torch")

from moeblaze_cupy.interop.parallel.api import clip_grad_norm_, expert_parallel_moe  # noqa: E402
from moeblaze_cupy.interop.parallel.exchanges import ExpertGroup, Route, collect, exchange  # noqa: E402

__all__ = ["ExpertGroup", "Route", "clip_grad_norm_", "collect", "exchange", "expert_parallel_moe"]
