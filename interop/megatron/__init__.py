"""Megatron-Core, 0.19 and newer: `install` has its models compute their routed experts by the layer.

May import torch, Megatron-Core, `interop.torch` and `interop.parallel`. Touches `grouped_mlp_modules` of Megatron's
spec providers. `run --megatron` imports this while Megatron is being imported, so only building a model imports
Megatron's layers. `experts` and `layer`, whose classes specs name, are imported apart.
"""

from moeblaze_cupy.checks import installed

installed("moeblaze_cupy.interop.megatron", "torch")

from moeblaze_cupy.interop.megatron.providers import build_experts, install, install_loaded  # noqa: E402

__all__ = ["build_experts", "install", "install_loaded"]
