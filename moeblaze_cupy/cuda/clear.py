"""Zeros for counters: kernels_cu/common/clear.cu."""

from dataclasses import dataclass
from itertools import accumulate

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.frameworks import Buffer


def configure(number: int) -> Launch:
    """Returns a launch that zeroes `number` int32 at a multiple of 16 bytes. The next launch may overlap with it."""
    threads = launch_config.CLEAR_THREADS
    blocks = max(1, min(launch_config.ceil_div(number, 4 * threads), launch_config.CLEAR_BLOCKS))
    return Launch(loader.entry("clear.cu", "clear"), (blocks,), threads, ("memory",), {"number": number})


@dataclass(frozen=True, eq=False)
class Zeros:
    """One buffer of int32 zeros for several arrays."""

    starts: tuple[int, ...]  # element at which each array begins
    size: int  # elements
    clear: Launch

    @classmethod
    def of(cls, *sizes: int) -> "Zeros":
        *starts, size = accumulate(sizes, initial=0)
        return cls(tuple(starts), size, configure(size))

    def make(self, run: Runtime) -> tuple[Buffer, list[int]]:
        """Returns the buffer, and the address of each array."""
        buffer = run.empty((self.size,), "int32")
        run.launch(self.clear, buffer.ptr)
        return buffer, [buffer.ptr + 4 * start for start in self.starts]
