"""Launch geometry: pure functions of shapes and device limits, no CuPy, no GPU.

A number that a launch and its kernel must agree on is stated once: here if several folders need it, else in the
`config` of the folder that has the launch. `CONSTANTS` there names those of each kernel source, and `loader` gives them
to the compiler. The kernels' assumptions about them are asserted when they are compiled.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TILE_ROWS = 128  # BM of the GEMMs; dispatch emits its tile list for this height
RESERVED_BYTES = 1024  # shared memory that the driver keeps for each block
PANEL_COLUMNS = 256  # columns of a tile of the products, and of a warp's sums; panels are multiples of it
SQUARE_TILE = 192  # rows and columns of a square tile on Hopper
MAX_EXPERTS = 4096  # dispatch keeps counters and lists of all experts in shared memory
MAX_SLOTS = 2**31 - TILE_ROWS  # the index lists are int32, and so is a row's number past the end of a tile
MAX_K = 32768  # dispatch divides slots by k through a 32-bit reciprocal, exact while (65536 + k) * k < 2^32
MAX_GRID_Y = 65535  # blocks along a grid's y and z, by CUDA
GROUP_COLUMNS = 128  # columns of a row that share a scale in e4m3
CLEAR_THREADS = 256
CLEAR_BLOCKS = 528  # four per multiprocessor of an H200
DEFAULT_SHARED_BYTES = 48 * 1024  # more needs an opt-in per kernel

CONSTANTS = {"clear.cu": {"CLEAR_THREADS": CLEAR_THREADS}}


@dataclass(frozen=True)
class DeviceLimits:
    """The facts about a device on which configurations depend, read once per device."""

    compute_capability: int  # 90 for sm_90
    multiprocessors: int
    shared_bytes_per_block: int  # opt-in limit
    shared_bytes_per_multiprocessor: int
    tier: str = "sm80"  # the kernel family, see `tier`


H200 = DeviceLimits(90, 132, 232448, 233472, "sm90")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class SavedFp8(NamedTuple):
    """The layout of the first layer that save="fp8" keeps in one buffer of bytes.

    R rows of h columns of each half in e4m3, in the order of w1's columns; from `scales` on their float32 scales
    (R, groups, halves), one for each row and GROUP_COLUMNS columns of a half, of which the last group may have fewer.
    """

    scales: int
    groups: int
    nbytes: int


def saved_fp8(rows: int, h: int, halves: int) -> SavedFp8:
    """Returns the layout of the saved first layer. `rows` may be a symbolic size."""
    groups = ceil_div(h, GROUP_COLUMNS)
    scales = ceil_div(rows * h * halves, 16) * 16
    return SavedFp8(scales, groups, scales + 4 * rows * groups * halves)


def check_forced_tier(forced: str | None) -> None:
    """Raises ValueError for a tier that does not exist. forced: the value of MOEBLAZE_TIER."""
    if forced not in (None, "", "sm80", "sm90"):
        raise ValueError(f"moeblaze_cupy: MOEBLAZE_TIER: expected sm80 or sm90, got {forced!r}")


def tier(compute_capability: int, forced: str | None = None) -> str:
    """Returns the kernel family for a compute capability: Hopper's for 90, else the portable one.

    forced: "sm80" or "sm90", the value of MOEBLAZE_TIER. Raises RuntimeError below 80, or if the GPU lacks it.
    """
    if compute_capability < 80:
        raise RuntimeError(
            "moeblaze_cupy: compute capability: expected 8.0 or later (mma.sync on bf16, cp.async), "
            f"got {compute_capability // 10}.{compute_capability % 10}"
        )
    check_forced_tier(forced)
    if forced == "sm90" and compute_capability != 90:
        raise RuntimeError(
            f"moeblaze_cupy: MOEBLAZE_TIER=sm90: expected compute capability 9.0, got {compute_capability / 10}"
        )
    return forced or ("sm90" if compute_capability == 90 else "sm80")


def max_row_tiles(
    num_slots: int, num_experts: int, minimum: Callable[[int, int], int] = min, height: int = TILE_ROWS
) -> int:
    """Returns an upper bound of row tiles for any routing: full tiles plus one partial tile per non-empty expert.

    minimum: `min`, or its replacement for symbolic sizes, which `min` would compare.
    """
    return num_slots // height + minimum(num_experts, num_slots)


@functools.lru_cache(maxsize=1024)
def index_lists(
    num_tokens: int,
    k: int | None,
    num_experts: int,
    num_pairs: int | None = None,
    minimum: Callable[[int, int], int] = min,
    bounded: bool = False,
) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Returns the places of dispatch's lists in their one int32 buffer, in elements, and the size of the buffer.

    The first value gives the first element and the shape of each list. Lists follow each other without gaps.
    token_index_map is written 16 bytes at a time, so it comes first. The pairs of row_tiles are read 8 bytes at a
    time, so an even number of elements comes before it. num_pairs: the number of slots if tokens have any number
    of them; k is None then. bounded: there are at most max_slots rows, and a count of the slots without a row.
    """
    slots_shape = (num_tokens, k) if k is not None else (0 if num_pairs is None else num_pairs,)
    slots = math.prod(slots_shape)
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for name, shape in (
        ("token_index_map", slots_shape),
        ("expert_token_indices", (slots,)),
        ("row_tiles", (max_row_tiles(slots, num_experts, minimum) + 1, 2)),
        ("expert_token_offsets", (num_experts + 1,)),
        ("experts_by_load", (num_experts,)),
        *((("token_offsets", (num_tokens + 1,)),) if k is None else ()),
        *((("dropped", (1,)),) if bounded else ()),
    ):
        places[name] = end, shape
        end += math.prod(shape)
    return places, end


def size_class(number: int) -> int:
    """Returns `number` rounded up to one of 16 sizes per power of two, at most a sixteenth more.

    Buffers whose sizes change from step to step take these sizes, so that their layouts, and with them launch records,
    come again, and an allocator gets the same few sizes.
    """
    if number <= 16:
        return max(number, 0)
    step = 1 << (number - 1).bit_length() - 5
    return ceil_div(number, step) * step
