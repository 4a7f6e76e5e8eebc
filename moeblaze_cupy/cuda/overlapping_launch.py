"""Programmatic dependent launches, through ctypes (CuPy has no binding): kernels that start while the last one ends."""

import ctypes
import functools
import struct
from collections.abc import Callable

import numpy as np

_LEAST_DRIVER = 12030  # CUDA 12.3: graphs have edges for such launches from then on
_LEAST_CAPABILITY = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID
# A CUlaunchAttribute of 72 bytes: the id, padding, and 1 in a union of 64 bytes. Launches hold its address, so the
# module makes it: two threads may enter a cached function together, and one of its results would be freed.
_ATTRIBUTE = np.array([_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1] + 15 * [0], np.int32)


def supported(compute_capability: int, driver_version: int) -> bool:
    """Returns whether GPU and driver can do such launches. driver_version: CUDA's, 1000 * major + 10 * minor."""
    return compute_capability >= _LEAST_CAPABILITY and driver_version >= _LEAST_DRIVER


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_char_p, *(3 * (ctypes.c_void_p,)))
    driver.cuLaunchKernelEx.restype = ctypes.c_int
    return driver


def launcher(kernel: int, geometry: tuple[int, ...]) -> Callable[[int, int, int], None]:
    """Returns a function that launches a kernel (a CUfunction). It takes a stream, a pointer to the arguments, and 0.

    geometry: grid and block, three numbers each, and bytes of dynamic shared memory.
    The function raises RuntimeError if the driver refuses the launch. It needs a thread with the device's context.
    """
    driver = _driver()
    head = struct.pack("=7I4x", *geometry)  # a CUlaunchConfig is this, the stream, and the tail
    tail = struct.pack("=QI4x", _ATTRIBUTE.ctypes.data, 1)
    pack_stream, launch = struct.Struct("=Q").pack, driver.cuLaunchKernelEx

    def run(stream: int, arguments: int, extra: int) -> None:
        status = launch(head + pack_stream(stream) + tail, kernel, arguments, extra)
        if status:
            raise RuntimeError(f"the driver's error {status} of cuLaunchKernelEx")

    return run
