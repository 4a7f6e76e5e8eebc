"""Launches the three dispatch steps of the paper's section 4.2: kernels_cu/dispatch/dispatch.cu."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.dispatch import config as dispatch_config
from moeblaze_cupy.frameworks import Buffer, Layout

LISTS = (
    *("token_index_map", "expert_token_indices", "row_tiles", "expert_token_offsets", "experts_by_load"),
    "token_offsets",
)
EXPERT_TOKEN_INDICES = LISTS.index("expert_token_indices")
EXPERT_TOKEN_OFFSETS = LISTS.index("expert_token_offsets")
EXPERTS_BY_LOAD = LISTS.index("experts_by_load")
TOKEN_INDEX_MAP = LISTS.index("token_index_map")
TOKEN_OFFSETS = LISTS.index("token_offsets")
Lists = tuple[int, int, int, int, int, int]  # their addresses, in this order; 0 without token_offsets


@dataclass(frozen=True)
class IndexLayout:
    """Sizes of the index lists, and where each lies in their one buffer.

    num_pairs: the number of slots where a token may have any number of them; k is then None.
    """

    num_tokens: int
    k: int | None
    num_experts: int
    num_pairs: int = 0
    max_slots: int | None = None  # bound of the slots that have a row

    @property
    def num_slots(self) -> int:
        return self.num_pairs if self.k is None else self.num_tokens * self.k

    @property
    def slots_shape(self) -> tuple[int, ...]:
        """Returns the shape of arrays with an element per slot."""
        return (self.num_pairs,) if self.k is None else (self.num_tokens, self.k)

    @property
    def by_slot(self) -> "IndexLayout":
        """Returns the same slots, each as a token of its own."""
        return IndexLayout(self.num_slots, 1, self.num_experts, max_slots=self.max_slots)

    @property
    def num_rows(self) -> int:
        """Returns the rows of buffers in expert order."""
        return self.num_slots if self.max_slots is None else self.max_slots

    @property
    def max_row_tiles(self) -> int:
        return launch_config.max_row_tiles(self.num_rows, self.num_experts)

    @property
    def max_square_tiles(self) -> int:
        return launch_config.max_row_tiles(self.num_rows, self.num_experts, height=launch_config.SQUARE_TILE)

    @property
    def _lists(self) -> tuple[Mapping[str, tuple[int, tuple[int, ...]]], int]:
        sizes = self.num_tokens, self.k, self.num_experts, self.num_pairs
        return launch_config.index_lists(*sizes, bounded=self.max_slots is not None)

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Returns the first element and shape of each list."""
        return self._lists[0]

    @property
    def size(self) -> int:
        """Returns the number of elements of the buffer."""
        return self._lists[1]

    @functools.cached_property
    def _offsets(self) -> tuple[int, int, int, int, int, int | None]:
        a, b, c, d, e = (4 * self.places[name][0] for name in LISTS[:TOKEN_OFFSETS])
        return a, b, c, d, e, 4 * self.places["token_offsets"][0] if self.k is None else None

    def addresses(self, lists: int) -> Lists:
        """Returns the addresses of LISTS in a buffer at `lists`."""
        a, b, c, d, e, f = self._offsets
        return lists + a, lists + b, lists + c, lists + d, lists + e, 0 if f is None else lists + f


@dataclass(frozen=True, eq=False)
class Dispatch:
    """The launches and buffers of the three steps for ids of one layout."""

    index: IndexLayout
    copies_ids: bool  # int64 ids become int32
    counts: int  # int32 elements of workspace
    count: Launch | None  # None where one block knows all counts itself
    route: Launch
    list_tokens: Launch | None  # runs where tokens have any number of slots
    rows_to_tokens: Launch | None  # runs where tokens have any number of slots
    mark_identity: Launch | None  # runs where there are identity experts
    bound: Launch | None  # runs where max_slots bounds the rows


@cached
def configure(
    ids: Layout,
    num_experts: int,
    limits: DeviceLimits,
    num_tokens: int | None = None,
    identity_experts: int = 0,
    max_slots: int | None = None,
) -> Dispatch:
    """Configures the launches for ids (L, k), int32 or int64; (P,) of `num_tokens` tokens if that is given.

    Pairs are dispatched as P tokens with one expert each, from a copy of the ids that has none for pairs of no token.
    A launch before finds each pair's token, and one after puts tokens in the place of pairs. max_slots: the bound of
    slots that have a row, by expert, then token.
    """
    ragged, num_slots = num_tokens is not None, math.prod(ids.shape)
    tokens, k = (num_tokens, None) if num_tokens is not None else ids.shape
    index = IndexLayout(tokens, k, num_experts, num_slots if ragged else 0, max_slots)
    copies_ids, dtype = ids.dtype == "int64", "int32" if ragged else ids.dtype
    config = dispatch_config.dispatch(num_slots, num_experts, limits)
    count = None
    if config.counts:
        count = Launch(
            loader.entry("dispatch.cu", f"dispatch_count_{dtype}"),
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
            why=config.why[:1],
        )
        dtype = "int32"  # it has copied the ids
    route = Launch(
        loader.entry("dispatch.cu", f"dispatch_route_{dtype}"),
        (config.blocks,),
        config.route_threads,
        ("ids", "token_expert_indices", "block_counts", *LISTS),
        {
            "num_slots": num_slots,
            "k": index.k or 1,
            "num_experts": num_experts,
            "columns": config.columns,
            "block_slots": config.block_slots,
            "part_slots": config.part_slots,
            "counted_together": config.counted_together,
        },
        config.route_shared_bytes,
        why=config.why[-1:],
        # What a launch reads before it waits must have been there before the last launch, which copies int64 ids.
        overlaps=count is not None and (ragged or not copies_ids),
    )
    counts = config.workspace_bytes(num_experts) // 4 if config.counts else 0
    list_tokens = rows_to_tokens = mark_identity = None
    if num_tokens is not None:
        sizes = {"num_slots": num_slots, "num_tokens": num_tokens, "num_experts": num_experts}
        given = ("ids", "offsets", "masked_ids", "tokens", *LISTS)
        list_tokens = _per_slot(f"list_tokens_{ids.dtype}", max(num_slots, num_tokens + 1), given, sizes)
    if ragged and num_slots:
        rows_to_tokens = _per_slot("rows_to_tokens", num_slots, ("tokens", *LISTS), {"num_slots": num_slots})
    if identity_experts and num_slots:
        sizes = {"num_slots": num_slots, "num_experts": num_experts, "identity_experts": identity_experts}
        mark_identity = _per_slot(f"mark_identity_{ids.dtype}", num_slots, ("ids", "tokens", *LISTS), sizes)
    return Dispatch(index, copies_ids, counts, count, route, list_tokens, rows_to_tokens, mark_identity, _bound(index))


def _bound(index: IndexLayout) -> Launch | None:
    """Returns the launch that cuts off the lists at `max_slots`. Launches before it make them as without a bound."""
    if index.max_slots is None:
        return None
    return Launch(
        loader.entry("bound_slots.cu", "bound_slots"),
        (1 + launch_config.ceil_div(index.num_slots, dispatch_config.BOUND_THREADS),),
        dispatch_config.BOUND_THREADS,
        (*LISTS, "dropped"),
        {"num_slots": index.num_slots, "num_experts": index.num_experts, "max_slots": index.max_slots},
    )


def _per_slot(entry: str, number: int, addresses: tuple[str, ...], scalars: dict[str, int]) -> Launch:
    grid = (launch_config.ceil_div(number, dispatch_config.SLOTS_PER_BLOCK),)
    return Launch(loader.entry("slots.cu", entry), grid, dispatch_config.SLOTS_PER_BLOCK, addresses, scalars)


def dispatch(
    run: Runtime, steps: Dispatch, ids: int, token_offsets: int = 0, lists: Buffer | None = None
) -> tuple[Buffer, Buffer | None, Lists]:
    """Returns the index lists in one buffer, the int32 copy of int64 ids (see `DispatchIndices`) and all addresses.

    lists: the memory for the lists, or None for new memory.
    """
    index = steps.index
    counts = run.empty((steps.counts,), "int32") if steps.counts else None
    copy = run.empty(index.slots_shape, "int32") if steps.copies_ids else None
    tokens = masked = None
    read, copy_ptr, counts_ptr = ids, copy.ptr if copy else 0, counts.ptr if counts else 0
    if steps.list_tokens:
        lists, tokens = run.empty((index.size,), "int32"), run.empty((index.num_slots,), "int32")
        masked = copy or run.empty((index.num_slots,), "int32")
        run.launch(steps.list_tokens, ids, token_offsets, masked.ptr, tokens.ptr, *index.addresses(lists.ptr))
        read, copy_ptr = masked.ptr, 0
    if steps.count:
        run.launch(steps.count, read, copy_ptr, counts_ptr)
        if copy_ptr:
            read, copy_ptr = copy_ptr, 0
    lists = lists or run.empty((index.size,), "int32")
    addresses = index.addresses(lists.ptr)
    run.launch(steps.route, read, copy_ptr, counts_ptr, *addresses)
    if steps.mark_identity:
        run.launch(steps.mark_identity, ids, tokens.ptr if tokens else 0, *addresses)
    if tokens and steps.rows_to_tokens:
        run.launch(steps.rows_to_tokens, tokens.ptr, *addresses)
    if steps.bound:
        run.launch(steps.bound, *addresses, lists.ptr + 4 * index.places["dropped"][0])
    return lists, copy, addresses


def index_lists(run: Runtime, steps: Dispatch, pointers: Sequence[int]) -> tuple[Buffer, Buffer | None]:
    """Returns the same without the addresses. pointers: ids, token_offsets."""
    ids, token_offsets = pointers
    return dispatch(run, steps, ids, token_offsets)[:2]
