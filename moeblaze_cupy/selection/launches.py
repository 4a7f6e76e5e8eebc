"""Pairs of tokens and experts that stay or are taken: kernels_cu/selection/selection.cu, pairs.cu, capacity.cu."""

from collections.abc import Sequence
from dataclasses import dataclass

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.clear import Zeros
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.loader import Variant
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.frameworks import Buffer, Layout
from moeblaze_cupy.selection import config as selection_config
from moeblaze_cupy.types import CAPACITY_ORDERS, ROUNDINGS

COLUMN, CANDIDATE = 4, 2  # int32 elements of a `Column` and a `Candidate`, see token_parts.cuh and candidates.cuh
RESERVED = 2  # int32 elements of a 64-bit number
VALUE_TYPES = ("float32", "bfloat16", "float16")
Pairs = tuple[Buffer, Buffer]  # token_offsets and ids


@dataclass(frozen=True)
class Sequences:
    """A division of tokens into sequences of equal lengths, or by int32 offsets (S+1,)."""

    number: int
    by_offsets: bool

    def longest(self, num_tokens: int) -> int:
        """Returns the most tokens that a sequence may have."""
        return num_tokens if self.by_offsets else num_tokens // self.number


@dataclass(frozen=True, eq=False)
class ListPairs:
    """The launches that make token_offsets and ids from a bit per pair, or from a mask."""

    words: tuple[int, int]  # shape of the bits
    num_tokens: int
    num_pairs: int
    blocks: int
    block_shift: int  # log2 of a block's tokens
    pack: Launch | None  # makes bits from a mask
    count: Launch
    write: Launch


@cached
def configure_pairs(num_tokens: int, num_experts: int, num_pairs: int, from_mask: bool = False) -> ListPairs:
    """Returns the launches that list the set pairs of (L, E), at most num_pairs."""
    row_words = launch_config.ceil_div(num_experts, 32)
    num_words, threads = num_tokens * row_words, selection_config.PAIRS_THREADS
    shift = selection_config.pairs_block_shift(num_tokens, row_words)
    blocks = max(1, launch_config.ceil_div(num_tokens, 1 << shift))
    of_blocks = {"num_words": num_words, "row_words": row_words, "block_shift": shift}
    pack = Launch(
        loader.entry("pairs.cu", "mask_bits"),
        (max(1, min(8 * selection_config.PAIRS_BLOCKS, launch_config.ceil_div(num_words, threads // 32))),),
        threads,
        ("mask", "taken"),
        {"L": num_tokens, "num_experts": num_experts},
    )
    count = Launch(
        loader.entry("pairs.cu", "pairs_count"),
        (blocks,),
        threads,
        ("taken", "block_counts"),
        of_blocks,
        4,
        overlaps=True,
    )
    write = Launch(
        loader.entry("pairs.cu", "pairs_write"),
        (blocks,),
        threads,
        ("taken", "block_counts", "token_offsets", "ids"),
        of_blocks | {"num_pairs": num_pairs},
        16 * (threads // 32) + 4 * (threads // 32 + 1),
        overlaps=True,
    )
    bits = (num_tokens, row_words)
    return ListPairs(bits, num_tokens, num_pairs, blocks, shift, pack if from_mask else None, count, write)


def list_pairs(run: Runtime, steps: ListPairs, pointers: Sequence[int]) -> Pairs:
    """Returns token_offsets (L+1,) and ids (num_pairs,), int32. pointers: address of a mask (L, E), a byte per pair."""
    taken = run.empty(steps.words, "int32")
    assert steps.pack
    run.launch(steps.pack, *pointers, taken.ptr)
    return _counted(run, steps, taken)


def _counted(run: Runtime, steps: ListPairs, taken: Buffer) -> Pairs:
    counts = run.empty((steps.blocks,), "int32")
    run.launch(steps.count, taken.ptr, counts.ptr)
    return _listed(run, steps, taken, counts.ptr)


def _listed(run: Runtime, steps: ListPairs, taken: Buffer, counts: int) -> Pairs:
    token_offsets, ids = run.empty((steps.num_tokens + 1,), "int32"), run.empty((steps.num_pairs,), "int32")
    run.launch(steps.write, taken.ptr, counts, token_offsets.ptr, ids.ptr)
    return token_offsets, ids


@dataclass(frozen=True, eq=False)
class Select:
    """The launches and allocations that select the tokens with the largest scores of each expert."""

    num_columns: int
    zeros: Zeros  # reserved, histogram, done, listed, block counts; token rounding also has done and frequencies
    room: int  # candidates that the list may have
    count: Launch
    split: Launch
    finish: Launch
    pairs: ListPairs
    choose: Launch | None  # chosen_bits; token rounding only
    by_offsets: bool  # offsets may leave tokens out or make sequences overlap


def _configure(
    scores: Layout,
    wanted: int,
    sequences: Sequences,
    num_pairs: int,
    limits: DeviceLimits,
    choose: Launch | None = None,
) -> Select | None:
    L, E = scores.shape
    if L == 0:
        return None
    groups, S, threads = launch_config.ceil_div(E, 32), sequences.number, selection_config.SELECT_THREADS
    blocks = max(1, limits.multiprocessors // groups)  # each has a multiprocessor to itself, for its shared memory
    longest = sequences.longest(L)
    parts = selection_config.parts_of_sequence(S, longest, blocks, 256, longest)
    width = selection_config.digit_bits(4 * 32, S * E, limits)
    pairs, room = configure_pairs(L, E, num_pairs), selection_config.listed_candidates(L, E)
    sizes = {"L": L, "num_experts": E, "num_sequences": S, "parts": parts, "width": width}
    sizes["block_shift"] = pairs.block_shift

    def entry(step: str) -> Variant:
        return loader.entry("selection.cu", f"columns_{step}_{scores.dtype}")

    inputs, grid = ("scores", "chosen", "columns", "sequences"), (S * parts, groups)
    counted = {"room": room, "wanted": -1 if choose else wanted}
    count = Launch(
        entry("count"),
        grid,
        threads,
        (*inputs, "histogram", "done", "reserved"),
        sizes | counted,
        4 * max(32 << width, threads),
        overlaps=True,
    )
    of_choice = (1, S * E) if choose else (0, 0)
    bits = (*inputs, "taken", "candidates", "list", "listed", "block_counts")
    split_bytes = selection_config.SPLIT_SHARED_BYTES
    finish_threads = selection_config.FINISH_THREADS
    finish_bytes = selection_config.FINISH_SHARED_BYTES + 4 * selection_config.PAIRS_BLOCKS
    return Select(
        num_columns=S * E,
        zeros=Zeros.of(RESERVED, S * E << width, S * groups, S * E, pairs.blocks, *of_choice),
        room=room,
        count=count,
        split=Launch(entry("split"), grid, threads, bits, sizes, split_bytes, overlaps=not sequences.by_offsets),
        finish=Launch(entry("finish"), (S * E,), finish_threads, bits, sizes, finish_bytes, overlaps=True),
        pairs=pairs,
        choose=choose,
        by_offsets=sequences.by_offsets,
    )


@cached
def configure_expert_choice(
    scores: Layout, capacity: int, sequences: Sequences, num_pairs: int, limits: DeviceLimits
) -> Select | None:
    """Returns the launches for scores (L, E), or None without tokens."""
    return _configure(scores, min(capacity, scores.shape[0]), sequences, num_pairs, limits)


@cached
def configure_round_tokens(
    scores: Layout, ids: Layout, tile: int, rounding: str, num_pairs: int, limits: DeviceLimits
) -> Select | None:
    """Returns the launches for scores (L, E) and ids (L, k), or None without tokens."""
    (L, E), k, threads = scores.shape, ids.shape[1], selection_config.SELECT_THREADS
    parts = selection_config.parts_of_sequence(1, L, 2 * limits.multiprocessors, 256, max(L, 1))
    bits = Launch(
        loader.entry("selection.cu", f"chosen_bits_{ids.dtype}"),
        (parts,),
        threads,
        ("ids", "chosen", "frequencies", "done", "columns"),
        {"L": L, "k": k, "num_experts": E, "parts": parts, "tile": tile, "rounding": ROUNDINGS.index(rounding)},
        4 * E,
        overlaps=True,
    )
    return _configure(scores, -1, Sequences(1, False), num_pairs, limits, bits)


Plan = tuple[Select | None, int]  # the steps, None without tokens, and the number of pairs


def expert_choice(run: Runtime, plan: Plan, pointers: Sequence[int]) -> Pairs:
    """Launches expert choice. pointers: scores, sequences."""
    scores, offsets = pointers
    return _select(run, plan, scores, 0, offsets)


def round_tokens(run: Runtime, plan: Plan, pointers: Sequence[int]) -> Pairs:
    """Launches token rounding. pointers: scores, ids."""
    return _select(run, plan, *pointers)


def _select(run: Runtime, plan: Plan, scores: int, ids: int, offsets: int = 0) -> Pairs:
    """Returns token_offsets (L+1,) and ids of the pairs, int32. ids: the choice that token rounding starts from."""
    steps, num_pairs = plan
    if steps is None:
        no_offsets, no_ids = run.empty((1,), "int32"), run.empty((num_pairs,), "int32")
        run.clear(no_offsets.ptr, 4)
        return no_offsets, no_ids
    columns = run.empty((steps.num_columns, COLUMN), "int32")
    # `choose` writes this memory before it waits, and memory allocated after the first launch may still be in use.
    chosen = run.empty(steps.pairs.words, "int32") if steps.choose else None
    _memory, addresses = steps.zeros.make(run)
    reserved, histogram, counted, listed, counts, chose, frequencies = addresses
    if steps.choose and chosen:
        run.launch(steps.choose, ids, chosen.ptr, frequencies, chose, columns.ptr)
    inputs = (scores, chosen.ptr if chosen else 0, columns.ptr, offsets)
    run.launch(steps.count, *inputs, histogram, counted, reserved)
    taken, candidates = run.empty(steps.pairs.words, "int32"), run.empty(steps.pairs.words, "int32")
    found = run.empty((steps.room, CANDIDATE), "int32")
    if steps.by_offsets:
        rows, words = steps.pairs.words
        run.clear(taken.ptr, 4 * rows * words)
        counts = 0
    outputs = (taken.ptr, candidates.ptr, found.ptr, listed, counts)
    run.launch(steps.split, *inputs, *outputs)
    run.launch(steps.finish, *inputs, *outputs)
    return _listed(run, steps.pairs, taken, counts) if counts else _counted(run, steps.pairs, taken)


@dataclass(frozen=True, eq=False)
class CapacityByKey:
    """The launches and allocations of limit_capacity if keys select slots: weights, priorities or many choices."""

    num_columns: int
    zeros: Zeros  # reserved, histogram, listed
    room: int  # candidates that the list may have
    count: Launch
    pick: Launch
    select: Launch
    finish: Launch


@dataclass(frozen=True, eq=False)
class CapacityByCounts:
    """The launches and allocations of limit_capacity if it counts slots by position, or by few choices."""

    counts: int  # int32 elements
    totals: Zeros | None
    count: Launch
    mark: Launch


Capacity = CapacityByKey | CapacityByCounts


@cached
def configure_capacity(
    ids: Layout,
    num_experts: int,
    capacity: int,
    order: str,
    values: str | None,
    sequences: Sequences,
    limits: DeviceLimits,
) -> Capacity | None:
    """Returns the launches for ids (L, k), or None without tokens. values: dtype of the weights or priorities."""
    (L, k), E, S, threads = ids.shape, num_experts, sequences.number, selection_config.SELECT_THREADS
    if L == 0:
        return None
    most = max(1, selection_config.PART_COUNTS // k)
    longest, fewest = sequences.longest(L), launch_config.ceil_div(4096, k)
    parts = selection_config.parts_of_sequence(S, longest, limits.multiprocessors, min(fewest, most), most)
    sizes = {"L": L, "k": k, "num_experts": E, "num_sequences": S, "parts": parts}
    capacity = min(capacity, launch_config.MAX_SLOTS)

    def launch(
        step: str, addresses: tuple[str, ...], scalars: dict[str, int], shared_bytes: int, *, overlaps: bool = True
    ) -> Launch:
        entry, names = loader.entry("capacity.cu", f"capacity_{step}_{ids.dtype}"), ("ids", *addresses)
        return Launch(entry, (S * parts,), threads, names, sizes | scalars, shared_bytes, overlaps=overlaps)

    choices = {"position": 1, "choice": k}.get(order)
    if choices == 1 or (choices and selection_config.counts_choices(choices * E, S * parts, limits)):
        ranking, counts = selection_config.ranking_warps(E, limits), ("sequences", "counts", "totals")
        marked = {"choices": choices, "capacity": capacity, "walkers": ranking}
        return CapacityByCounts(
            counts=S * parts * choices * E,
            totals=Zeros.of(S * choices * E) if choices > 1 else None,
            count=launch("parts", counts, {"choices": choices}, 4 * choices * E, overlaps=choices > 1),
            mark=launch("mark", (*counts, "kept"), marked, 4 * (E * (2 + ranking) + 1)),
        )
    width = selection_config.digit_bits(2 * E, S * E, limits)
    if order == "choice":
        width = min(width, (k - 1).bit_length())
    keys = {
        "order": CAPACITY_ORDERS.index(order),
        "value_type": VALUE_TYPES.index(values or "float32"),
        "width": width,
    }
    counters = launch_config.ceil_div(E << width, 2) * 4  # bytes, in whole words
    count = launch("count", ("values", "sequences", "histogram"), keys, counters)
    outputs = ("columns", "sequences", "list", "listed", "kept")
    return CapacityByKey(
        num_columns=S * E,
        zeros=Zeros.of(RESERVED, S * E << width, S * E),
        room=L * k,
        count=count,
        pick=Launch(
            loader.entry("capacity.cu", "capacity_pick"),
            (S, launch_config.ceil_div(E, 32)),
            threads,
            ("histogram", "columns", "reserved"),
            {"room": L * k, "num_experts": E, "width": width, "capacity": capacity},
            4 * threads,
            overlaps=True,
        ),
        select=launch("list", ("values", *outputs), keys, 16 * E),
        finish=Launch(
            loader.entry("capacity.cu", "capacity_finish"),
            (S * E,),
            selection_config.FINISH_THREADS,
            outputs,
            {"L": L, "k": k, "num_experts": E, "num_sequences": S, "order": keys["order"], "width": width},
            selection_config.FINISH_SHARED_BYTES,
            overlaps=True,
        ),
    )


def limit_capacity(run: Runtime, plan: tuple[Capacity | None, tuple[int, int]], pointers: Sequence[int]) -> Buffer:
    """Returns ids int32, -1 for a dropped or empty slot. plan: the steps, and the shape (L, k).

    pointers: ids, weights, priority, sequences.
    """
    (steps, shape), (ids, weights, priority, offsets) = plan, pointers
    values = weights or priority
    kept = run.empty(shape, "int32")
    if isinstance(steps, CapacityByCounts):
        counts = run.empty((steps.counts,), "int32")
        _memory, (totals,) = steps.totals.make(run) if steps.totals else (None, [0])
        run.launch(steps.count, ids, offsets, counts.ptr, totals)
        run.launch(steps.mark, ids, offsets, counts.ptr, totals, kept.ptr)
    elif steps:
        columns, found = run.empty((steps.num_columns, COLUMN), "int32"), run.empty((steps.room, CANDIDATE), "int32")
        _memory, (reserved, histogram, listed) = steps.zeros.make(run)
        run.launch(steps.count, ids, values, offsets, histogram)
        run.launch(steps.pick, histogram, columns.ptr, reserved)
        outputs = (columns.ptr, offsets, found.ptr, listed, kept.ptr)
        run.launch(steps.select, ids, values, *outputs)
        run.launch(steps.finish, *outputs)
    return kept
