"""PyTorch: the layer and the router as differentiable functions, as operators for compiled code, and as a module.

May import torch and all of moeblaze_cupy but `tools` and the rest of `interop`. Touches torch's autograd,
operator registry and compiler.
"""

from moeblaze_cupy.interop.torch.api import MoE, Routed, moe, route
from moeblaze_cupy.interop.torch.balancing import load_balancing_loss, update_bias, z_loss

__all__ = ["MoE", "Routed", "load_balancing_loss", "moe", "route", "update_bias", "z_loss"]
