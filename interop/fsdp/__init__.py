"""Experimental: FSDP2's all-gathers and reduce-scatters by copy engines, and sums on the rank that has the weight.

It leans on private names of FSDP2, so another version of torch may break it. May import torch, `interop.torch`
and `interop.parallel`. Touches the groups of parameters of FSDP2 and their memory.
"""

from moeblaze_cupy.checks import installed

installed("moeblaze_cupy.interop.fsdp", "torch")

from moeblaze_cupy.interop.fsdp.api import CopyEngines  # noqa: E402

__all__ = ["CopyEngines"]
