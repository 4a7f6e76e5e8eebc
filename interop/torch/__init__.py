"""PyTorch: the layer and the router as differentiable functions, as operators for compiled code, and as a module.

May import torch and all of moeblaze_cupy but `tools` and the rest of `interop`. Touches torch's autograd,
operator registry and compiler.
"""

from moeblaze_cupy.checks import installed

installed("moeblaze_cupy.interop.torch", "torch")

from moeblaze_cupy.interop.torch.api import MoE, Routed, moe, route  # noqa: E402
from moeblaze_cupy.interop.torch.balancing import load_balancing_loss, update_bias, z_loss  # noqa: E402
from moeblaze_cupy.interop.torch.saves import LayerSave, fit_saves  # noqa: E402

__all__ = ["LayerSave", "MoE", "Routed", "fit_saves", "load_balancing_loss", "moe", "route", "update_bias", "z_loss"]
