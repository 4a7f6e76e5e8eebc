"""Row tiles whose rows are here, before those whose rows come from other GPUs: kernels_cu/split_tiles.cu."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Buffer
from moeblaze_cupy.ops.dispatch import EXPERT_TOKEN_OFFSETS, LISTS, IndexLayout, Lists
from moeblaze_cupy.runtime import Launch, Runtime

ROW_TILES = LISTS.index("row_tiles")
BEFORE, WITHIN, AFTER = range(3)  # the kernel's lists


class Arrival(NamedTuple):
    """Rows of tokens that are on their way: those of first_token .. end_token are here, others once `wait` is called.

    wait: has the stream wait for them. It may be called again.
    """

    first_token: int
    end_token: int
    wait: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Split:
    """The launch of split_tiles, and which of its lists can have tiles, those that are here first."""

    launch: Launch
    lists: tuple[int, ...]
    num_experts: int
    max_row_tiles: int

    @functools.cached_property
    def ranges(self) -> int:
        """The first element of the lists' ranges in the buffer."""
        return 3 * 2 * (self.max_row_tiles + 1)

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.ranges + 3 * 2 * self.num_experts


def configure(index: IndexLayout, tokens: tuple[int, int]) -> Split:
    """tokens: the first whose rows are here, and the end of these."""
    first, end = tokens
    launch = Launch(
        loader.entry("split_tiles.cu", "split_tiles"),
        (1,),
        launch_config.SPLIT_THREADS,
        (*LISTS[:ROW_TILES], *LISTS[ROW_TILES + 1 :], "row_tiles", "ranges"),
        {
            "first_token": first,
            "end_token": end,
            "num_experts": index.num_experts,
            "max_row_tiles": index.max_row_tiles,
        },
    )
    lists = WITHIN, *[BEFORE] * (first > 0), *[AFTER] * (end < index.num_tokens)
    return Split(launch, lists, index.num_experts, index.max_row_tiles)


def split(run: Runtime, step: Split, lists: Lists) -> tuple[Buffer, list[Lists]]:
    """Memory, and the lists in it for a launch each: 2 e stands for expert e, as split_tiles.cu says."""
    made = run.empty((step.size,), "int32")
    run.launch(step.launch, *lists[:ROW_TILES], *lists[ROW_TILES + 1 :], made.ptr, made.ptr + 4 * step.ranges)
    of_launches = []
    for which in step.lists:
        of_launch = list(lists)
        of_launch[ROW_TILES] = made.ptr + 8 * which * (step.max_row_tiles + 1)
        of_launch[EXPERT_TOKEN_OFFSETS] = made.ptr + 4 * (step.ranges + 2 * which * step.num_experts)
        of_launches.append(tuple(of_launch))
    return made, of_launches  # type: ignore[return-value]  # as many as before
