"""The layer on many GPUs, by its path of version 0.1: import from `moeblaze_cupy.interop.parallel`."""

from moeblaze_cupy.interop.parallel import clip_grad_norm_, expert_parallel_moe

__all__ = ["clip_grad_norm_", "expert_parallel_moe"]
