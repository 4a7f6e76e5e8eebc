"""Converts any DLPack array (JAX and others) to a CuPy or NumPy array and back, without copying where possible."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_dlpack(array: Any) -> bool:
    return _is_jax_tracer(array) or (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"))


def _is_jax(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] in ("jaxlib", "jax")


def _is_jax_tracer(array: Any) -> bool:
    return _is_jax(array) and isinstance(array, sys.modules["jax"].core.Tracer)


def import_array(array: Any) -> Any:
    """Returns a CuPy array (CUDA) or NumPy array (CPU) over the same memory.

    The producer orders its work before CuPy's current stream of that device, as DLPack asks. Raises
    TypeError for other devices, dtypes that NumPy does not import and JAX's tracers, and RuntimeError where CuPy is
    needed and missing.
    """
    if _is_jax_tracer(array):
        expected = "an array with contents: a call outside of jax.jit, grad and vmap, or within jax.pure_callback"
        raise TypeError(f"moeblaze_cupy: JAX: expected {expected}, got {type(array)}")
    device_type, device = (int(v) for v in array.__dlpack_device__())
    if device_type in CPU_DEVICES:
        if _is_jax(array):
            return np.asarray(array)  # the same memory, in dtypes too that NumPy's DLPack does not know, as bfloat16
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError) as error:
            expected = "an array whose memory can be read by NumPy (no bfloat16: pass float32)"
            raise TypeError(f"moeblaze_cupy: DLPack: expected {expected}, got {error}") from error
    if device_type not in CUDA_DEVICES:
        raise TypeError(f"moeblaze_cupy: DLPack device: expected CPU or CUDA, got type {device_type}")
    from moeblaze_cupy.cuda.loader import import_cupy

    cupy = import_cupy()
    with cupy.cuda.Device(device):
        return cupy.from_dlpack(array)


def exporter(array: Any) -> Callable[[Any], Any]:
    """Returns a function that turns a CuPy or NumPy array into the kind of `array`.

    The result shares the memory. A read-only NumPy array, such as a view of ids of JAX, is copied, as DLPack does not
    carry it.
    """
    if _is_jax(array):
        return functools.partial(_to_jax, device=next(iter(array.devices())))
    root = type(array).__module__.partition(".")[0]
    namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else sys.modules.get(root)
    if namespace is None or not hasattr(namespace, "from_dlpack"):
        raise TypeError(f"moeblaze_cupy: DLPack: expected a framework with from_dlpack, got {type(array)}")

    def export(result: Any) -> Any:
        return namespace.from_dlpack(result.copy() if _is_read_only(result) else result)

    return export


def _is_read_only(array: Any) -> bool:
    return isinstance(array, np.ndarray) and not array.flags.writeable


def _to_jax(array: Any, device: Any) -> Any:
    jax = sys.modules["jax"]
    if isinstance(array, np.ndarray) and (_is_read_only(array) or array.dtype == ml_dtypes.bfloat16):
        return jax.device_put(array, device)  # NumPy's DLPack takes neither
    return jax.dlpack.from_dlpack(array)
