"""Tensor maps for the emulator's cp.async.bulk.tensor: what `moeblaze_cupy.tensor_map.encode` is told, as 128 bytes."""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAGIC = 0x70616D726F736E65
_WORDS = struct.Struct("<10Q48x")  # TensorMap of ptx_sm90.cuh
ITEMSIZE = 2


@dataclass
class EmulatedTensorMap:
    """A 3-D tensor of 16-bit elements, the contiguous dimension first, with the 128-byte swizzle.

    array: a NumPy array, or a pair (array, byte offset). shape, strides (elements, all but the first) and box as of
    `tensor_map.encode`. Raises ValueError where the driver would refuse the map.
    """

    array: Any
    shape: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    _memory: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        steps = [stride * ITEMSIZE for stride in self.strides]
        if len(self.shape) != 3 or len(steps) != 2 or len(self.box) != 3:
            raise ValueError(f"tensor map: expected 3 dimensions, got {self}")
        if any(step % 16 or not 0 < step < 2**40 for step in steps):
            raise ValueError(f"tensor map: expected strides of multiples of 16 bytes, got {self.strides} elements")
        if any(not 1 <= n <= 2**32 for n in self.shape) or any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(
                f"tensor map: expected sizes up to 2^32 and boxes up to 256, got {self.shape} and {self.box}"
            )
        if self.box[0] * ITEMSIZE > 128 or self.box[0] * ITEMSIZE % 16:
            raise ValueError(f"tensor map: expected lines of at most 128 bytes for the swizzle, got box {self.box}")

    def encode(self, address: int) -> bytes:
        """The map of a tensor at `address`. Raises ValueError if that is not on 16 bytes."""
        if address % 16:
            raise ValueError(f"tensor map: expected an address on 16 bytes, got {address:#x}")
        return _WORDS.pack(MAGIC, address, *self.shape, *(stride * ITEMSIZE for stride in self.strides), *self.box)

    @classmethod
    def decode(cls, encoded: bytes) -> tuple[int, "EmulatedTensorMap"]:
        """Address and map, without an array."""
        magic, address, *words = _WORDS.unpack(encoded)
        if magic != MAGIC:
            raise ValueError("tensor map: expected one made by EmulatedTensorMap.encode")
        strides = (words[3] // ITEMSIZE, words[4] // ITEMSIZE)
        return address, cls(None, tuple(words[:3]), strides, tuple(words[5:]))

    def put(self, address: int) -> int:
        """Where the encoded map lies, on 64 bytes, as long as this object lives."""
        memory = np.zeros(128 + 64, np.uint8)
        start = -memory.ctypes.data % 64
        memory[start : start + 128] = np.frombuffer(self.encode(address), np.uint8)
        self._memory = memory
        return memory.ctypes.data + start
