"""Models of transformers on many GPUs: import from `moeblaze_cupy.interop.transformers.parallel`."""

from moeblaze_cupy.interop.transformers.parallel import *  # noqa: F403
