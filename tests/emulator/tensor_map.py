"""Tensor maps for the emulator's cp.async.bulk.tensor: what `cuda.tensor_map.encode` is told, as 128 bytes."""

import struct
from dataclasses import dataclass

import numpy as np

MAGIC = 0x70616D726F736E65
_WORDS = struct.Struct("<11Q40x")  # TensorMap of ptx_sm90.cuh


@dataclass
class EmulatedTensorMap:
    """A 3-D tensor of elements of `itemsize` bytes, the contiguous dimension first, with the 128-byte swizzle.

    array, offset: the memory, and the tensor's first byte in it. shape, strides (elements, all but the first) and box
    as of `tensor_map.encode`. Raises ValueError where the driver would refuse the map.
    """

    array: np.ndarray | None
    shape: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    offset: int = 0
    itemsize: int = 2

    def __post_init__(self):
        steps = [stride * self.itemsize for stride in self.strides]
        if len(self.shape) != 3 or len(steps) != 2 or len(self.box) != 3:
            raise ValueError(f"tensor map: expected 3 dimensions, got {self}")
        if any(step % 16 or not 0 < step < 2**40 for step in steps):
            raise ValueError(f"tensor map: expected strides of multiples of 16 bytes, got {self.strides} elements")
        if any(not 1 <= n <= 2**32 for n in self.shape) or any(not 1 <= n <= 256 for n in self.box):
            raise ValueError(
                f"tensor map: expected sizes up to 2^32 and boxes up to 256, got {self.shape} and {self.box}"
            )
        if self.box[0] * self.itemsize > 128 or self.box[0] * self.itemsize % 16:
            raise ValueError(f"tensor map: expected lines of at most 128 bytes for the swizzle, got box {self.box}")

    def pack(self, address: int) -> bytes:
        """The map's 128 bytes for an array at `address`. Raises ValueError if the tensor is not on 16 bytes."""
        address += self.offset
        if address % 16:
            raise ValueError(f"tensor map: expected an address on 16 bytes, got {address:#x}")
        steps = (stride * self.itemsize for stride in self.strides)
        return _WORDS.pack(MAGIC, address, *self.shape, *steps, *self.box, self.itemsize)

    @classmethod
    def unpack(cls, packed: bytes) -> tuple[int, "EmulatedTensorMap"]:
        """Address and map, without an array."""
        magic, address, *words = _WORDS.unpack(packed)
        if magic != MAGIC:
            raise ValueError("tensor map: expected what EmulatedTensorMap.pack returns")
        strides = tuple(step // words[8] for step in words[3:5])
        return address, cls(None, tuple(words[:3]), strides, tuple(words[5:8]), itemsize=words[8])
