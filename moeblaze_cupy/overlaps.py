"""Checks that arrays that are written share no memory, from addresses, shapes and strides alone."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import checks
from moeblaze_cupy.frameworks import Array


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Returns the bytes from an array's address to its first and to the end of its last; strides are in bytes."""
    if 0 in shape:
        return 0, 0
    reaches = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + itemsize


@functools.lru_cache(maxsize=1024)
def _extents(strides_in_bytes: bool, layouts: tuple[Any, ...]) -> list[tuple[int, int]]:
    found = []
    for layout in layouts:
        if layout is None:
            found.append((0, 0))
            continue
        shape, strides, dtype, *_ = layout
        unit = 1 if strides_in_bytes else dtype.itemsize
        found.append(_extent(shape, tuple(unit * stride for stride in strides), dtype.itemsize))
    return found


def ranges_meet(strides_in_bytes: bool, layouts: tuple[Any, ...], pointers: Sequence[int], written: int) -> bool:
    """Returns True if the address range of one of the last `written` arrays meets that of any other.

    layouts: as `arrays.CuPy.layouts` gives them; None, with an address of 0, for what is absent. Ranges of views of one
    buffer may meet where the views share no element: `apart` tells.
    """
    ranges = [(p + low, p + high) for p, (low, high) in zip(pointers, _extents(strides_in_bytes, layouts), strict=True)]
    for last in range(len(ranges) - written, len(ranges)):
        low, high = ranges[last]
        for other_low, other_high in ranges[:last]:
            if low < other_high and other_low < high:
                return True
    return False


class _Memory:
    """An array's place, for NumPy to reason about: it reads nothing there."""

    def __init__(self, array: Array) -> None:
        strides = tuple(stride * array.itemsize for stride in array.strides)
        data = {"data": (array.ptr, True), "shape": array.shape, "strides": strides}
        self.__array_interface__ = {"version": 3, "typestr": f"|V{array.itemsize}", **data}


def _share_memory(a: Array, b: Array) -> bool:
    """Returns True if some byte belongs to elements of both, from addresses, shapes and strides alone."""
    (low_a, high_a), (low_b, high_b) = (
        (array.ptr + low, array.ptr + high)
        for array in (a, b)
        for low, high in [_extent(array.shape, tuple(s * array.itemsize for s in array.strides), array.itemsize)]
    )
    if low_a >= high_b or low_b >= high_a or not a.size or not b.size:
        return False
    try:
        # NumPy's stubs know only two of the numbers that max_work may be.
        return np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), max_work=10**6)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # no halves, slices or columns of a buffer are that involved


def apart(function: str, read: Mapping[str, Array], written: Mapping[str, Array]) -> None:
    """Checks that no array that is written shares memory with one that is read, or with another that is written."""
    others = dict(read)
    for name, array in written.items():
        for other, held in others.items():
            if _share_memory(array, held):
                raise checks.bad_value(function, name, f"memory apart from {other}", "an array that overlaps it")
        others[name] = array
