"""Pairs of tokens and experts that stay or are taken: kernels_cu/selection.cu, pairs.cu, capacity.cu."""

from dataclasses import dataclass

from moeblaze_cupy import launch_config, loader, selection_config
from moeblaze_cupy.arrays import Buffer, Layout
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.loader import Variant
from moeblaze_cupy.runtime import Launch, Runtime, cached
from moeblaze_cupy.structures import CAPACITY_ORDERS, ROUNDINGS

COLUMN = 4  # int32 elements of a `Column`, see token_parts.cuh
VALUE_TYPES = ("float32", "bfloat16", "float16")
Pairs = tuple[Buffer, Buffer]  # token_offsets and ids


@dataclass(frozen=True)
class Sequences:
    """How tokens are divided: into as many sequences, of equal lengths or by offsets (S+1,) in int32."""

    number: int
    by_offsets: bool

    def longest(self, num_tokens: int) -> int:
        """Tokens that one of them may have."""
        return num_tokens if self.by_offsets else num_tokens // self.number


@dataclass(frozen=True, eq=False)
class ListPairs:
    """From a bit per pair, or from a mask, to token_offsets and ids."""

    words: tuple[int, int]  # shape of the bits
    num_tokens: int
    num_pairs: int
    blocks: int
    pack: Launch | None  # bits from a mask
    count: Launch
    write: Launch


@cached
def configure_pairs(num_tokens: int, num_experts: int, num_pairs: int, from_mask: bool = False) -> ListPairs:
    """The launches that list the set pairs of (L, E), at most num_pairs."""
    row_words = launch_config.ceil_div(num_experts, 32)
    num_words, threads = num_tokens * row_words, launch_config.PAIRS_THREADS
    blocks = max(1, min(launch_config.PAIRS_BLOCKS, launch_config.ceil_div(num_words, threads)))
    pack = Launch(
        loader.entry("pairs.cu", "mask_bits"),
        (max(1, min(8 * launch_config.PAIRS_BLOCKS, launch_config.ceil_div(num_words, threads // 32))),),
        threads,
        ("mask", "taken"),
        {"L": num_tokens, "num_experts": num_experts},
    )
    count = Launch(
        loader.entry("pairs.cu", "pairs_count"),
        (blocks,),
        threads,
        ("taken", "block_counts"),
        {"num_words": num_words},
        4,
    )
    write = Launch(
        loader.entry("pairs.cu", "pairs_write"),
        (blocks,),
        threads,
        ("taken", "block_counts", "token_offsets", "ids"),
        {"num_words": num_words, "num_pairs": num_pairs, "row_words": row_words},
        16 * (threads // 32) + 4 * (threads // 32 + 1),
    )
    return ListPairs((num_tokens, row_words), num_tokens, num_pairs, blocks, pack if from_mask else None, count, write)


def list_pairs(run: Runtime, steps: ListPairs, mask: int) -> Pairs:
    """token_offsets (L+1,) and ids (num_pairs,), int32, of a mask (L, E) with a byte per pair."""
    taken = run.empty(steps.words, "int32")
    assert steps.pack
    run.launch(steps.pack, mask, taken.ptr)
    return _listed(run, steps, taken)


def _listed(run: Runtime, steps: ListPairs, taken: Buffer) -> Pairs:
    counts = run.empty((steps.blocks,), "int32")
    token_offsets, ids = run.empty((steps.num_tokens + 1,), "int32"), run.empty((steps.num_pairs,), "int32")
    run.launch(steps.count, taken.ptr, counts.ptr)
    run.launch(steps.write, taken.ptr, counts.ptr, token_offsets.ptr, ids.ptr)
    return token_offsets, ids


@dataclass(frozen=True, eq=False)
class Digit:
    """One step of a radix select."""

    count: Launch
    pick: Launch


def _pick(num_sequences: int, num_experts: int, width: int, shift: int, last: bool, wanted: int) -> Launch:
    return Launch(
        loader.entry("selection.cu", "columns_pick"),
        (num_sequences, launch_config.ceil_div(num_experts, 32)),
        launch_config.SELECT_THREADS,
        ("histogram", "columns"),
        {"num_experts": num_experts, "width": width, "shift": shift, "last": int(last), "wanted": wanted},
        4 * launch_config.SELECT_THREADS,
    )


@dataclass(frozen=True, eq=False)
class Select:
    """The tokens with the largest scores of each expert: what is launched and allocated."""

    num_columns: int
    histogram: int  # int32 elements
    digit: Digit
    split: Launch
    finish: Launch
    pairs: ListPairs
    choose: tuple[Launch, Launch] | None  # chosen_bits and round_targets of token rounding
    clear_bits: bool  # offsets might leave tokens out


def _configure(
    scores: Layout,
    wanted: int,
    sequences: Sequences,
    num_pairs: int,
    limits: DeviceLimits,
    choose: tuple[Launch, Launch] | None = None,
) -> Select | None:
    L, E = scores.shape
    if L == 0:
        return None
    groups, S, threads = launch_config.ceil_div(E, 32), sequences.number, launch_config.SELECT_THREADS
    blocks = max(1, limits.multiprocessors // groups)  # each has a multiprocessor to itself, for its shared memory
    longest = sequences.longest(L)
    parts = selection_config.parts_of_sequence(S, longest, blocks, 256, longest)
    width = selection_config.digit_bits(4 * 32, S * E, limits)
    sizes = {"L": L, "num_experts": E, "num_sequences": S, "parts": parts, "width": width}

    def entry(step: str) -> Variant:
        return loader.entry("selection.cu", f"columns_{step}_{scores.dtype}")

    inputs, grid = ("scores", "chosen", "columns", "sequences"), (S * parts, groups)
    count = Launch(entry("count"), grid, threads, (*inputs, "histogram"), sizes, 4 * 32 << width)
    bits = (*inputs, "taken", "candidates")
    finish_threads, finish_bytes = launch_config.FINISH_THREADS, launch_config.FINISH_SHARED_BYTES
    return Select(
        num_columns=S * E,
        histogram=S * E << width,
        digit=Digit(count, _pick(S, E, width, 32 - width, True, -1 if choose else wanted)),
        split=Launch(entry("split"), grid, threads, bits, sizes),
        finish=Launch(entry("finish"), (S * E,), finish_threads, bits, sizes, finish_bytes),
        pairs=configure_pairs(L, E, num_pairs),
        choose=choose,
        clear_bits=sequences.by_offsets,
    )


@cached
def configure_expert_choice(
    scores: Layout, capacity: int, sequences: Sequences, num_pairs: int, limits: DeviceLimits
) -> Select | None:
    """The launches for scores (L, E); None where there are no tokens."""
    return _configure(scores, min(capacity, scores.shape[0]), sequences, num_pairs, limits)


@cached
def configure_round_tokens(
    scores: Layout, ids: Layout, tile: int, rounding: str, num_pairs: int, limits: DeviceLimits
) -> Select | None:
    """The launches for scores (L, E) and ids (L, k); None where there are no tokens."""
    (L, E), k, threads = scores.shape, ids.shape[1], launch_config.SELECT_THREADS
    parts = selection_config.parts_of_sequence(1, L, 2 * limits.multiprocessors, 256, max(L, 1))
    bits = Launch(
        loader.entry("selection.cu", f"chosen_bits_{ids.dtype}"),
        (parts,),
        threads,
        ("ids", "chosen", "frequencies"),
        {"L": L, "k": k, "num_experts": E, "parts": parts},
        4 * E,
    )
    targets = Launch(
        loader.entry("selection.cu", "round_targets"),
        (1,),
        threads,
        ("frequencies", "columns"),
        {"L": L, "num_experts": E, "tile": tile, "rounding": ROUNDINGS.index(rounding)},
        4 * E,
    )
    return _configure(scores, -1, Sequences(1, False), num_pairs, limits, (bits, targets))


def select(run: Runtime, steps: Select, scores: int, ids: int = 0, offsets: int = 0) -> Pairs:
    """token_offsets (L+1,) and ids of the pairs, int32. ids: those that token rounding starts from."""
    columns = run.empty((steps.num_columns, COLUMN), "int32")
    histogram, chosen = run.empty((steps.histogram,), "int32"), None
    run.clear(histogram.ptr, 4 * steps.histogram)
    if steps.choose:
        choose, target = steps.choose
        chosen, frequencies = run.empty(steps.pairs.words, "int32"), run.empty((steps.num_columns,), "int32")
        run.clear(frequencies.ptr, 4 * steps.num_columns)
        run.launch(choose, ids, chosen.ptr, frequencies.ptr)
        run.launch(target, frequencies.ptr, columns.ptr)
    inputs = (scores, chosen.ptr if chosen else 0, columns.ptr, offsets)
    run.launch(steps.digit.count, *inputs, histogram.ptr)
    run.launch(steps.digit.pick, histogram.ptr, columns.ptr)
    taken, candidates = run.empty(steps.pairs.words, "int32"), run.empty(steps.pairs.words, "int32")
    if steps.clear_bits:
        rows, words = steps.pairs.words
        run.clear(taken.ptr, 4 * rows * words)
    run.launch(steps.split, *inputs, taken.ptr, candidates.ptr)
    run.launch(steps.finish, *inputs, taken.ptr, candidates.ptr)
    return _listed(run, steps.pairs, taken)


def no_pairs(run: Runtime, num_pairs: int) -> Pairs:
    """The pairs of no tokens."""
    offsets, ids = run.empty((1,), "int32"), run.empty((num_pairs,), "int32")
    run.clear(offsets.ptr, 4)
    return offsets, ids


@dataclass(frozen=True, eq=False)
class Capacity:
    """What limit_capacity launches and allocates."""

    num_columns: int
    histogram: int  # int32 elements
    ties_shape: tuple[int, int, int]
    digits: tuple[Digit, ...]
    ties: Launch
    mark: Launch


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
    """The launches for ids (L, k); None where there are no tokens. values: dtype of the weights or priorities."""
    (L, k), E, S, threads = ids.shape, num_experts, sequences.number, launch_config.SELECT_THREADS
    if L == 0:
        return None
    if order == "choice" and k == 1:
        order = "position"
    key_bits = {"position": 0, "choice": (k - 1).bit_length()}.get(order, 32)
    widths = selection_config.digits(key_bits, selection_config.digit_bits(2 * E, S * E, limits))
    blocks = limits.multiprocessors * (1 if widths else 2)
    most = max(1, launch_config.PART_COUNTS // k)
    longest, fewest = sequences.longest(L), launch_config.ceil_div(4096, k)
    parts = selection_config.parts_of_sequence(S, longest, blocks, min(fewest, most), most)
    sizes = {
        "L": L,
        "k": k,
        "num_experts": E,
        "num_sequences": S,
        "parts": parts,
        "order": CAPACITY_ORDERS.index(order),
        "value_type": VALUE_TYPES.index(values or "float32"),
    }
    capacity, ranking = min(capacity, launch_config.MAX_SLOTS), selection_config.walkers(E, limits)

    def launch(step: str, addresses: tuple[str, ...], scalars: dict[str, int], shared_bytes: int) -> Launch:
        entry = loader.entry("capacity.cu", f"capacity_{step}_{ids.dtype}")
        inputs = ("ids", "values", "columns", "sequences")
        return Launch(entry, (S * parts,), threads, (*inputs, *addresses), sizes | scalars, shared_bytes)

    def counters(width: int) -> int:  # bytes, in whole words
        return launch_config.ceil_div(E << width, 2) * 4

    digits = tuple(
        Digit(
            launch("count", ("histogram",), {"width": width, "shift": shift}, counters(width)),
            _pick(S, E, width, shift, i == len(widths) - 1, -1 if i else capacity),
        )
        for i, (width, shift) in enumerate(widths)
    )
    return Capacity(
        num_columns=S * E if widths else 0,
        histogram=S * E << widths[0][0] if widths else 0,
        ties_shape=(S, parts, E),
        digits=digits,
        ties=launch("ties", ("ties",), {}, 4 * (E + 1)),
        mark=launch("mark", ("ties", "kept"), {"capacity": capacity, "walkers": ranking}, 4 * (E * (2 + ranking) + 1)),
    )


def limit_capacity(
    run: Runtime, steps: Capacity | None, ids: int, values: int, offsets: int, shape: tuple[int, int]
) -> Buffer:
    """ids (L, k) int32 of `shape`, -1 where a slot is dropped or empty."""
    kept = run.empty(shape, "int32")
    if steps is None:
        return kept
    columns = run.empty((steps.num_columns, COLUMN), "int32") if steps.digits else None
    inputs = (ids, values, columns.ptr if columns else 0, offsets)
    if columns:
        histogram = run.empty((steps.histogram,), "int32")
        run.clear(histogram.ptr, 4 * steps.histogram)
        for digit in steps.digits:
            run.launch(digit.count, *inputs, histogram.ptr)
            run.launch(digit.pick, histogram.ptr, columns.ptr)
    ties = run.empty(steps.ties_shape, "int32")
    run.launch(steps.ties, *inputs, ties.ptr)
    run.launch(steps.mark, *inputs, ties.ptr, kept.ptr)
    return kept
