"""A runtime that carries nothing out: it notes what passes launch and allocate, and needs no GPU."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer, in_memory

GAP = 1 << 12  # bytes between buffers
FIRST_ADDRESS = 1 << 60  # the first buffer's, far from the addresses that inputs are given


@dataclass(eq=False)
class Allocation:
    """Memory that a pass took. It is alive during the launches made .. freed - 1, which count from 0.

    freed: None until it is free. uses: each launch that was given an address in it, and the name of that address in the
    kernel's struct.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    made: int
    freed: int | None = None
    uses: list[tuple[Launch, str]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def is_alive(self, launch: int) -> bool:
        return self.made <= launch and (self.freed is None or launch < self.freed)


class _Memory:
    """Stands for an array. The allocation is free when the last reference to it goes."""

    def __init__(self, run: "Recorder", allocation: Allocation) -> None:
        self.run, self.allocation = run, allocation

    def __del__(self) -> None:
        self.allocation.freed = len(self.run.launches)
        self.run.used -= self.allocation.nbytes


class Recorder(Runtime):
    """A `Runtime` that carries nothing out: it notes launches, allocations, and the most bytes allocated at a time."""

    launches: list[Launch]
    allocations: list[Allocation]

    def __init__(self) -> None:
        super().__init__(None, 0, 0)  # type: ignore[arg-type]  # it asks no framework for memory
        self.launches, self.allocations = [], []
        self.used = self.peak = 0
        self._starts: list[int] = []
        self._end = FIRST_ADDRESS

    def empty(self, shape: tuple[int, ...], dtype: str, transposed: bool = False) -> Buffer:
        made = Allocation(in_memory(shape, transposed), dtype, self._end, len(self.launches))
        self.allocations.append(made)
        self._starts.append(made.start)
        self._end += made.nbytes + GAP
        self.used += made.nbytes
        self.peak = max(self.peak, self.used)
        return Buffer(_Memory(self, made), made.start)

    def clear(self, address: int, nbytes: int) -> None:
        pass

    def launch(self, launch: Launch, *values: int) -> None:
        self.launches.append(launch)
        fields = {*launch.params.maps, *launch.params.pointers}
        for name, address in zip(launch.addresses, values, strict=True):
            if name in fields and address >= FIRST_ADDRESS:
                place = bisect_right(self._starts, address) - 1
                self.allocations[place].uses.append((launch, name))


def allocation_of(array: Any) -> Allocation:
    """Returns the allocation of an array that a recorder gave."""
    memory: _Memory = array
    return memory.allocation
