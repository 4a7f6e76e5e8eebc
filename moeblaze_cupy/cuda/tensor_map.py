"""Tensor maps for Hopper's TMA loads, encoded by the driver through ctypes (CuPy has no binding)."""

import ctypes
import functools
from typing import NamedTuple

import numpy as np

_DATA_TYPES = {"uint8": (0, 1), "bfloat16": (9, 2), "float16": (6, 2)}  # CUtensorMapDataType, bytes; uint8 holds e4m3
_SWIZZLE_128B, _L2_PROMOTION_256B, _NO_INTERLEAVE, _ZERO_FILL = 3, 3, 0, 0


class TensorMap(NamedTuple):
    """A CUtensorMap without its address: the array of which TMA loads a box.

    shape, strides (elements, of all dimensions but the first, whose stride is 1) and box list the contiguous dimension
    first. Boxes arrive in shared memory in the 128-byte swizzle, with zeros beyond `shape`.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuTensorMapEncodeTiled.restype = ctypes.c_int
    return driver


@functools.lru_cache(maxsize=4096)
def encode(pointer: int, tensor: TensorMap) -> bytes:
    """Returns the 128 bytes of a CUtensorMap at an address, to be passed by value.

    They depend on the values given alone, so they serve any array that comes to lie there. The calling thread must have
    a CUDA context. Raises RuntimeError if the driver refuses the map.
    """
    dtype, shape, strides, box = tensor
    rank, (data_type, itemsize) = len(shape), _DATA_TYPES[dtype]
    raw = np.zeros(128 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # the driver wants 64-byte alignment
    encoded = raw[start : start + 128]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        data_type,
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
