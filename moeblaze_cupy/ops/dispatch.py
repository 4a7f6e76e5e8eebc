"""The three dispatch steps of the paper's section 4.2: kernels_cu/dispatch.cu."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from moeblaze_cupy import launch_config, loader, reasons
from moeblaze_cupy.arrays import Buffer, Layout
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.runtime import Launch, Runtime, cached

LISTS = ("token_index_map", "expert_token_indices", "row_tiles", "expert_token_offsets", "experts_by_load")
EXPERT_TOKEN_OFFSETS = LISTS.index("expert_token_offsets")
TOKEN_INDEX_MAP = LISTS.index("token_index_map")
Lists = tuple[int, int, int, int, int]  # their addresses, in this order


@dataclass(frozen=True)
class IndexLayout:
    """Sizes of the index lists, and where each lies in their one buffer."""

    num_tokens: int
    k: int
    num_experts: int
    max_slots: int | None = None  # of slots that have a row

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.k

    @property
    def num_rows(self) -> int:
        """Of buffers in expert order."""
        return self.num_slots if self.max_slots is None else self.max_slots

    @property
    def max_row_tiles(self) -> int:
        return launch_config.max_row_tiles(self.num_rows, self.num_experts)

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """First element and shape of each list."""
        return launch_config.index_lists(self.num_tokens, self.k, self.num_experts, self.max_slots is not None)[0]

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return launch_config.index_lists(self.num_tokens, self.k, self.num_experts, self.max_slots is not None)[1]

    @functools.cached_property
    def _offsets(self) -> Lists:
        a, b, c, d, e = (4 * self.places[name][0] for name in LISTS)
        return a, b, c, d, e

    def addresses(self, lists: int) -> Lists:
        """The addresses of LISTS in a buffer at `lists`."""
        a, b, c, d, e = self._offsets
        return lists + a, lists + b, lists + c, lists + d, lists + e


@dataclass(frozen=True, eq=False)
class Dispatch:
    """What the three steps launch and allocate for ids of one layout."""

    index: IndexLayout
    copies_ids: bool  # int64 ids become int32
    counts: int  # int32 elements of workspace
    count: Launch | None  # None where one block knows all counts itself
    route: Launch
    bound: Launch | None  # where max_slots bounds the rows


@cached
def configure(ids: Layout, num_experts: int, limits: DeviceLimits, max_slots: int | None = None) -> Dispatch:
    """The launches for ids (L, k), int32 or int64. max_slots: of slots that have a row, by expert, then token."""
    L, k = ids.shape
    index, num_slots, copies_ids = IndexLayout(L, k, num_experts, max_slots), L * k, ids.dtype == "int64"
    config = launch_config.dispatch(num_slots, num_experts, limits)
    count, dtype, why = None, ids.dtype, reasons.dispatch(config, num_slots, num_experts)
    if config.counts:
        count = Launch(
            loader.entry("dispatch.cu", f"dispatch_count_{ids.dtype}"),
            (config.count_blocks,),
            config.count_threads,
            ("ids", "token_expert_indices", "block_counts"),
            {
                "num_slots": num_slots,
                "num_experts": num_experts,
                "columns": config.count_columns,
                "block_slots": config.block_slots,
                "counted_together": config.counted_together,
            },
            config.count_shared_bytes,
            why=why[:1],
        )
        dtype = "int32"  # it has copied the ids
    route = Launch(
        loader.entry("dispatch.cu", f"dispatch_route_{dtype}"),
        (config.blocks,),
        config.route_threads,
        ("ids", "token_expert_indices", "block_counts", *LISTS),
        {
            "num_slots": num_slots,
            "k": k,
            "num_experts": num_experts,
            "columns": config.columns,
            "block_slots": config.block_slots,
            "part_slots": config.part_slots,
            "counted_together": config.counted_together,
        },
        config.route_shared_bytes,
        why=why[-1:],
    )
    counts = config.workspace_bytes(num_experts) // 4 if config.counts else 0
    return Dispatch(index, copies_ids, counts, count, route, _bound(index))


def _bound(index: IndexLayout) -> Launch | None:
    """What cuts off the lists at `max_slots`, which are made as without a bound."""
    if index.max_slots is None:
        return None
    return Launch(
        loader.entry("bound_slots.cu", "bound_slots"),
        (1 + launch_config.ceil_div(index.num_slots, launch_config.BOUND_THREADS),),
        launch_config.BOUND_THREADS,
        (*LISTS, "dropped"),
        {"num_slots": index.num_slots, "num_experts": index.num_experts, "max_slots": index.max_slots},
    )


def dispatch(run: Runtime, steps: Dispatch, ids: int) -> tuple[Buffer, Buffer | None, Lists]:
    """The index lists in one buffer, the int32 copy of int64 ids (see `DispatchIndices`), and each list's address."""
    index = steps.index
    counts = run.empty((steps.counts,), "int32") if steps.counts else None
    copy = run.empty((index.num_tokens, index.k), "int32") if steps.copies_ids else None
    counts_ptr, copy_ptr = counts.ptr if counts else 0, copy.ptr if copy else 0
    if steps.count:
        run.launch(steps.count, ids, copy_ptr, counts_ptr)
        if copy:
            ids, copy_ptr = copy_ptr, 0
    lists = run.empty((index.size,), "int32")
    addresses = index.addresses(lists.ptr)
    run.launch(steps.route, ids, copy_ptr, counts_ptr, *addresses)
    if steps.bound:
        run.launch(steps.bound, *addresses, lists.ptr + 4 * index.places["dropped"][0])
    return lists, copy, addresses
