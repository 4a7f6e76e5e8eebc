"""Hugging Face transformers: its import registers the layer as the experts implementation `"moeblaze"`.

May import torch, transformers, `interop.torch` and `interop.parallel`. Touches transformers' registry of experts
and the modules that it is given. `parallel` is imported apart, as it registers an option of its own.
"""

from moeblaze_cupy.checks import installed

installed("moeblaze_cupy.interop.transformers", "torch")
installed("moeblaze_cupy.interop.transformers", "transformers")

from moeblaze_cupy.interop.transformers.api import Patched, pack_experts, patch, quantize_weights, register  # noqa: E402
from moeblaze_cupy.interop.transformers.load import Load, Monitor, monitor  # noqa: E402
from moeblaze_cupy.interop.transformers.routing import UNSET, Record, Routing, align, from_engine  # noqa: E402

__all__ = [
    "UNSET",
    "Load",
    "Monitor",
    "Patched",
    "Record",
    "Routing",
    "align",
    "from_engine",
    "monitor",
    "pack_experts",
    "patch",
    "quantize_weights",
    "register",
]
