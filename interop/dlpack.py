"""Any DLPack array (JAX and others) to a CuPy or NumPy array and back, without copying."""

import sys
from typing import Any

import numpy as np

CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_dlpack(array: Any) -> bool:
    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")


def import_array(array: Any):
    """A CuPy array (CUDA) or NumPy array (CPU) over the same memory.

    The producer orders its work before CuPy's current stream of that device, as DLPack asks. Raises
    TypeError for other devices and RuntimeError where CuPy is needed and missing.
    """
    device_type, device = (int(v) for v in array.__dlpack_device__())
    if device_type in CPU_DEVICES:
        return np.from_dlpack(array)
    if device_type not in CUDA_DEVICES:
        raise TypeError(f"moeblaze_cupy: DLPack device: expected CPU or CUDA, got type {device_type}")
    from moeblaze_cupy.loader import import_cupy

    cupy = import_cupy()
    with cupy.cuda.Device(device):
        return cupy.from_dlpack(array)


def exporter(array: Any):
    """A function that turns a CuPy or NumPy array into the kind of `array`, over the same memory."""
    root = type(array).__module__.partition(".")[0]
    if root in ("jaxlib", "jax"):
        return sys.modules["jax"].dlpack.from_dlpack
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else sys.modules.get(root)
    if not hasattr(namespace, "from_dlpack"):
        raise TypeError(f"moeblaze_cupy: DLPack: expected a framework with from_dlpack, got {type(array)}")
    return namespace.from_dlpack
