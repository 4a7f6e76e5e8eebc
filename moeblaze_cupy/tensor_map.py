"""Tensor maps for Hopper's bulk copies, encoded by the driver through ctypes (CuPy has no binding)."""

import ctypes
import functools

import numpy as np

from moeblaze_cupy import loader

_DATA_TYPES = {"bfloat16": 9, "float16": 6}  # CUtensorMapDataType
_SWIZZLE_128B, _L2_PROMOTION_256B, _NO_INTERLEAVE, _ZERO_FILL = 3, 3, 0, 0


@functools.cache
def _driver():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuTensorMapEncodeTiled.restype = ctypes.c_int
    return driver


@functools.lru_cache(maxsize=4096)
def encode(pointer: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A CUtensorMap as a kernel argument: 128 bytes, passed by value.

    shape, strides (elements, all but the first, which is 1) and box list the contiguous dimension first;
    boxes arrive in shared memory in the 128-byte swizzle, zeros beyond `shape`. It depends on the values
    given alone, so it may be kept for any array that comes to lie there.
    Raises RuntimeError if the driver refuses it.
    """
    loader.bind_context()
    rank, itemsize = len(shape), 2
    raw = np.zeros(128 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # the driver wants 64-byte alignment
    encoded = raw[start : start + 128]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*(s * itemsize for s in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _ZERO_FILL,
    )
    if status != 0:
        raise RuntimeError(
            f"tensor_map.encode: expected a map the driver accepts, got error {status} for pointer {pointer:#x}, "
            f"shape {shape}, strides {strides}, box {box}"
        )
    return encoded.tobytes()
