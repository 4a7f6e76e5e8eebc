"""PyTorch: the layer and the router as differentiable functions, as operators for compiled code, and as a module.

May import torch and all of moeblaze_cupy but `tools` and the rest of `interop`. Touches torch's autograd,
operator registry and compiler.
"""

from moeblaze_cupy.interop.torch.api import MoE, Routed, moe, route

__all__ = ["MoE", "Routed", "moe", "route"]
