"""Low-rank factors on CUDA: kernels_cu/lora, around the products that take a factor as one more segment of their sums.

Pair 0 is (a1, b1) beside w1, pair 1 (a2, b2) beside w2. `configure_forward` and `configure_backward` choose the
launches of a pair from layouts alone; what they return allocates and launches. Factors are packed
first, rounded to the dtype of the rows and padded to whole steps, except those that lie in memory that way.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.cuda.launch_config import DeviceLimits, ceil_div
from moeblaze_cupy.cuda.loader import ELEMENTS, Variant, variant_of
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.dispatch.launches import EXPERT_TOKEN_OFFSETS, LISTS, IndexLayout, Lists
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer, Layout
from moeblaze_cupy.gemm.products import PLAIN, Factor, GemmExtras, Operand, PlacedFactor, is_aligned, sum_of_two
from moeblaze_cupy.lora import config
from moeblaze_cupy.types import LayerOptions, Lora

_ROWS = "rows", "factor", "out", "other", "weights", "weighted", *LISTS
_GRAM = "rows", "u", "parts", *LISTS


@functools.cache
def pack_variant(dtype: str, factor: str, vector: bool) -> Variant:
    """factor: the dtype of the factor as it is given. vector: it is read 16 bytes at a time."""
    macros = {"ENTRY": "lora_pack", "ELEMENT": ELEMENTS[dtype], "FACTOR": ELEMENTS[factor]}
    return variant_of("lora_pack.cu", "lora_pack", {**macros, "VECTOR": int(vector)})


@functools.cache
def product_variant(source: str, entry: str, dtype: str, aligned: bool, gathers: bool, **ranks: int) -> Variant:
    """Of lora_rows.cu, with `COLUMNS`, or lora_gram.cu, with `RANKS`."""
    mma = "mma_fp16" if dtype == "float16" else "mma_bf16"
    macros: dict[str, str | int] = {"ENTRY": entry, "ELEMENT": ELEMENTS[dtype], "MMA": mma}
    return variant_of(source, entry, macros | {"ALIGNED": int(aligned), "GATHER": int(gathers)} | ranks)


@functools.cache
def sums_variant(out: str, aligned: bool) -> Variant:
    """aligned: the output has a multiple of 8 elements in the dimension in which it is contiguous."""
    return variant_of(
        "lora_sums.cu", "lora_sums", {"ENTRY": "lora_sums", "OUT": ELEMENTS[out], "ALIGNED": int(aligned)}
    )


class _View(NamedTuple):
    """A factor with its ranks and its columns, the side of the weight, by name; strides in elements."""

    layout: Layout
    rank: int
    columns: int
    expert_stride: int  # 0 if all experts share it
    rank_stride: int
    column_stride: int

    @classmethod
    def of(cls, layout: Layout, ranks_first: bool) -> "_View":
        """ranks_first: of a1 and a2."""
        sides = slice(None) if ranks_first else slice(None, None, -1)
        (rank, columns), (rank_stride, column_stride) = layout.shape[-2:][sides], layout.strides[-2:][sides]
        expert_stride = layout.strides[0] if len(layout.shape) == 3 else 0
        return cls(layout, rank, columns, expert_stride, rank_stride, column_stride)


@dataclass(frozen=True, eq=False)
class Packed:
    """A factor as kernels read it: (E, rows, columns), of which either are ranks. launch: None if it is in place."""

    shape: tuple[int, int, int]
    dtype: str
    launch: Launch | None

    def make(self, run: Runtime, address: int) -> tuple[int, Buffer | None]:
        """Where it is, and the memory that it lies in."""
        if self.launch is None:
            return address, None
        memory = run.empty(self.shape, self.dtype)
        run.launch(self.launch, address, memory.ptr)
        return memory.ptr, memory


def _packed(view: _View, E: int, dtype: str, ranks_first: bool) -> Packed:
    """(E, ranks, columns), or with the last two exchanged; columns of the former are padded to 16 bytes."""
    ranks = config.padded(view.rank)
    if ranks_first:
        given, strides = (view.rank, view.columns), (view.rank_stride, view.column_stride)
        shape = E, ranks, ceil_div(view.columns, 8) * 8
    else:
        given, strides = (view.columns, view.rank), (view.column_stride, view.rank_stride)
        shape = E, view.columns, ranks
    in_order = strides == (shape[2], 1) and (view.expert_stride == shape[1] * shape[2] or E == 1)
    if view.layout.dtype == dtype and given == shape[1:] and in_order and not view.layout.misalignment:
        return Packed(shape, dtype, None)
    experts = _Dimension(E, E, view.expert_stride, shape[1] * shape[2])
    rows = _Dimension(given[0], shape[1], strides[0], shape[2])
    columns = _Dimension(given[1], shape[2], strides[1], 1)
    return Packed(shape, dtype, _pack_launch(view.layout, dtype, experts, rows, columns))


def rounding(layout: Layout, dtype: str) -> Launch:
    """Returns the launch that rounds packed numbers (E, ...) to `dtype`, from and to addresses.

    An expert has a multiple of 8 of them.
    """
    E, number = layout.shape[0], math.prod(layout.shape[1:])
    experts, columns = _Dimension(E, E, number, number), _Dimension(number, number, 1, 1)
    return _pack_launch(layout, dtype, experts, _Dimension(1, 1, 0, 0), columns)


class _Dimension(NamedTuple):
    """Of a factor and of its packed copy: sizes, and strides in elements."""

    size: int
    out_size: int
    stride: int
    out_stride: int


def _pack_launch(layout: Layout, dtype: str, experts: _Dimension, rows: _Dimension, columns: _Dimension) -> Launch:
    """Reads along the dimension in which the factor's elements are closest to each other. That may be the experts'.

    Rows that follow each other without a gap in both memories are one long row.
    """
    strided = [n for n in (columns, rows, experts) if n.size > 1 and n.stride]
    along = min(strided, key=lambda n: n.stride, default=columns)
    along_lines, lines, batches = along is not columns, rows, experts
    if along is not rows and (columns.size, rows.stride) == (columns.out_size, columns.size * columns.stride):
        columns = _Dimension(rows.size * columns.size, rows.out_size * columns.out_size, columns.stride, 1)
        rows = _Dimension(1, 1, 0, 0)
        along = along if along_lines else columns
    if along is experts or rows.out_size == 1:
        lines, batches = experts, rows
    strides = [n.stride for n in (batches, lines, columns) if n is not along]
    vector = along.stride == 1 and is_aligned((layout.misalignment,), (along.size, *strides))
    tile = config.LORA_PACK_TILE
    most = tile // config.block_ranks(lines.out_size, 64 if along_lines else 16)
    tile_columns, tile_lines, shifts = config.tile(columns.out_size, most, tile)
    tiles = batches.out_size * ceil_div(lines.out_size, tile_lines) * ceil_div(columns.out_size, tile_columns)
    scalars = {"batches": batches.size, "lines": lines.size, "columns": columns.size}
    scalars |= {"out_lines": lines.out_size, "out_columns": columns.out_size, "along_lines": int(along_lines)}
    scalars |= {"batch_stride": batches.stride, "line_stride": lines.stride, "column_stride": columns.stride}
    scalars |= {"out_batch_stride": batches.out_stride, "out_line_stride": lines.out_stride}
    scalars |= dict(zip(("column_shift", "line_shift"), shifts, strict=True))
    variant, threads = pack_variant(dtype, layout.dtype, vector), config.LORA_PACK_THREADS
    return Launch(variant, (tiles,), threads, ("factor", "out"), scalars)


def factors_beside(factors: Lora | None, options: LayerOptions, forward: bool) -> tuple[Factor | None, Factor | None]:
    """What products take beside w1 and beside w2: b1 and b2 in forward, a1 and a2 in backward."""
    if factors is None:
        return None, None
    in_halves = forward and options.gated and not options.interleaved

    def beside(a: Layout | None, b: Layout, in_halves: bool = False) -> Factor | None:
        if a is None:
            return None
        view = _View.of(b, False) if forward else _View.of(a, True)
        return Factor(config.padded(view.rank), view.columns, view.columns // 2 if in_halves else 0)

    return beside(factors.a1, factors.b1, in_halves), beside(factors.a2, factors.b2)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows times a factor: u or v, (R, ranks)."""

    factor: Packed
    product: Launch
    shape: tuple[int, int]
    dtype: str

    def make(self, run: Runtime, lists: Lists, rows: int, factor: int, to: Buffer | None = None) -> Buffer:
        """rows, factor: addresses. to: memory for the product; None allocates it."""
        return self.make_weighted(run, lists, rows, factor, 0, 0, to)[0]

    def make_weighted(
        self, run: Runtime, lists: Lists, rows: int, factor: int, other: int, weights: int, to: Buffer | None = None
    ) -> tuple[Buffer, Buffer | None]:
        """Also other rows (R, ranks) times the rows' weights. other: 0 for none. weights: 0 for 1."""
        made, weighted = to or run.empty(self.shape, self.dtype), run.empty(self.shape, self.dtype) if other else None
        packed, memory = self.factor.make(run, factor)
        beside = other, weights, weighted.ptr if weighted else 0
        run.launch(self.product, rows, packed, made.ptr, *beside, *lists)
        del memory
        return made, weighted


def configure_rows(
    entry: str, index: IndexLayout, rows: Operand, factor: Layout, ranks_first: bool, gathers: bool, scale: float
) -> Rows:
    """entry: as of lora_rows.cu. ranks_first: of the factor as it is given. gathers: the rows are those of tokens."""
    view = _View.of(factor, ranks_first)
    packed, ranks = _packed(view, index.num_experts, rows.dtype, True), config.padded(view.rank)
    aligned = is_aligned((rows.misalignment,), (view.columns, rows.ld))
    columns = config.block_ranks(ranks, 128)
    product = Launch(
        product_variant("lora_rows.cu", entry, rows.dtype, aligned, gathers, COLUMNS=columns),
        (2 * index.max_row_tiles, ceil_div(ranks, columns)),
        config.LORA_THREADS,
        _ROWS,
        {
            "ld": rows.ld,
            "depth": view.columns,
            "ranks": ranks,
            "factor_ld": packed.shape[2],
            "scale": scale,
        },
        config.rows_shared_bytes(columns),
    )
    return Rows(packed, product, (index.num_rows, ranks), rows.dtype)


@dataclass(frozen=True, eq=False)
class Second:
    """A factor beside a weight."""

    factor: Packed
    placed: PlacedFactor

    def make(
        self, run: Runtime, rows: Buffer, factor: int, extras: GemmExtras = PLAIN
    ) -> tuple[GemmExtras, Buffer | None]:
        """What the product takes, and the memory that must live until it is launched.

        rows: u or v. factor: its address. extras: what else the product takes.
        """
        packed, memory = self.factor.make(run, factor)
        lora0, lora1 = self.placed.weight.halves(packed)
        return extras._replace(lora_rows=rows.ptr, lora0=lora0, lora1=lora1), memory


def configure_second(placed: PlacedFactor, dtype: str, factor: Layout, ranks_first: bool) -> Second:
    """placed: as the product reads it. ranks_first: of the factor as it is given."""
    view = _View.of(factor, ranks_first)
    return Second(_packed(view, placed.shape[0], dtype, placed.ranks_first), placed)


class Forward(NamedTuple):
    """A pair in forward: rows times the first factor, and the second one beside the weight."""

    rows: Rows
    second: Second

    def make(
        self,
        run: Runtime,
        lists: Lists,
        rows: int,
        factors: tuple[int, int],
        extras: GemmExtras = PLAIN,
        to: Buffer | None = None,
    ) -> tuple[Buffer, GemmExtras, Buffer | None]:
        """The rows u, and what `Second.make` returns. rows, factors: addresses. to: memory for u, or None."""
        u = self.rows.make(run, lists, rows, factors[0], to)
        return u, *self.second.make(run, u, factors[1], extras)


def configure_forward(
    pair: int, index: IndexLayout, rows: Operand, factors: tuple[Layout, Layout], scale: float, placed: PlacedFactor
) -> Forward:
    """rows: x, or y_swi. placed: as the product of these rows reads the second factor."""
    first, second = factors
    of_rows = configure_rows(f"lora_u{pair + 1}", index, rows, first, True, pair == 0, scale)
    return Forward(of_rows, configure_second(placed, rows.dtype, second, False))


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of a factor: parts of it, and their sums."""

    parts: tuple[int, int, int]  # shape: numbers of chunks, columns, ranks
    gram: Launch
    sums: Launch
    shape: tuple[int, ...]
    dtype: str

    def make(self, run: Runtime, lists: Lists, rows: int, u: Buffer | int | None, to: int = 0) -> Any:
        """A new array, or None where there is memory. rows: as of lora_gram.cu. u: None where there are no rows.

        to: the address of memory for it, 0 for none.
        """
        made = None if to else run.empty(self.shape, self.dtype)
        parts = run.empty(self.parts, "float32")
        if u is not None:
            run.launch(self.gram, rows, u.ptr if isinstance(u, Buffer) else u, parts.ptr, *lists)
        run.launch(self.sums, parts.ptr, lists[EXPERT_TOKEN_OFFSETS], made.ptr if made else to)
        return made and made.array


def _gradient(
    entry: str, index: IndexLayout, rows: Operand, view: _View, ranks_first: bool, gathers: bool, limits: DeviceLimits,
    of: str | None,
) -> Gradient:  # fmt: skip
    """of: its dtype, None for the factor's."""
    of = of or view.layout.dtype
    ranks, columns, dtype, E = config.padded(view.rank), view.columns, rows.dtype, index.num_experts
    block = config.block_ranks(ranks, 64)
    shift, why = config.chunk_shift(index.num_rows, columns, ranks, limits)
    chunks = (index.num_rows >> shift) + E
    aligned = is_aligned((rows.misalignment,), (columns, rows.ld))
    sizes = {"columns": columns, "ranks": ranks, "chunk_shift": shift}
    gram = Launch(
        product_variant("lora_gram.cu", entry, dtype, aligned, gathers, RANKS=block),
        (chunks, ceil_div(columns, config.LORA_COLUMNS), ceil_div(ranks, block)),
        config.LORA_THREADS,
        _GRAM,
        {"ld": rows.ld, "num_experts": E, **sizes},
        config.gram_shared_bytes(block),
        why=(why,),
    )
    outputs = E if len(view.layout.shape) == 3 else 1
    tile_ranks, tile_columns, shifts = config.tile(ranks, 32, config.LORA_SUMS_TILE)
    sums = Launch(
        sums_variant(of, (columns if ranks_first else view.rank) % 8 == 0),
        (ceil_div(columns, tile_columns), ceil_div(ranks, tile_ranks), outputs),
        config.LORA_PACK_THREADS,
        ("parts", "expert_token_offsets", "out"),
        {
            **sizes,
            **dict(zip(("rank_shift", "column_shift"), shifts, strict=True)),
            "along_columns": int(ranks_first),
            "rank": view.rank,
            "experts": E // outputs,
        },
        why=("adds the partial sums of chunks in a fixed order",),
    )
    return Gradient((chunks, columns, ranks), gram, sums, view.layout.shape, of)


@dataclass(frozen=True, eq=False)
class SummedGradient:
    """The gradient of a factor as a sum over chunks of tokens, in float32 and in the order of the chunks.

    A chunk's gradient goes behind the sum, to which it is then added. The last addition rounds to the factor's dtype.
    """

    size: int
    shape: tuple[int, ...]
    dtype: str
    add: Launch
    last_add: Launch

    @classmethod
    def of(cls, factor: Layout) -> "SummedGradient":
        """factor: has a multiple of 8 elements."""
        size = math.prod(factor.shape)
        adds = (sum_of_two(size, dtype) for dtype in ("float32", factor.dtype))
        return cls(size, factor.shape, factor.dtype, *adds)

    def memory(self, run: Runtime) -> Buffer:
        return run.empty((2, self.size), "float32")

    def place(self, memory: Buffer, is_first: bool) -> int:
        """The address of a chunk's gradient."""
        return memory.ptr if is_first else memory.ptr + self.size * ITEMSIZE["float32"]

    def added(self, run: Runtime, memory: Buffer, is_last: bool) -> Any:
        """Adds the chunk's gradient to the sum. Returns the gradient of the factor after the last one, else None."""
        made = run.empty(self.shape, self.dtype) if is_last else None
        run.launch(self.last_add if is_last else self.add, memory.ptr, 0, made.ptr if made else memory.ptr, 0)
        return made and made.array


class Backward(NamedTuple):
    """A pair in backward: the product's gradient times the second factor, and the first one beside the weight."""

    rows: Rows
    second: Second | None  # None without a product that takes it
    of_first: Gradient
    of_second: Gradient
    again: Rows | None = None  # u of the rows, which are weighted, where forward kept none

    def gradients(
        self,
        run: Runtime,
        rows: tuple[Lists, int],
        grad: tuple[Lists, int],
        v: Buffer | None,
        u: Buffer | int | None,
        first: int,
        to: tuple[int, int],
    ) -> tuple[Any, Any]:
        """Of the factors. rows, grad: as of `configure_backward`, the lists and an address. first: the factor's.

        v, u: None where there are no rows, u also where it is made again. to: as of `Gradient.make`.
        """
        if self.again:
            u = self.again.make(run, *rows, first)
        of_second = self.of_second.make(run, *grad, u, to[1])
        return self.of_first.make(run, *rows, v, to[0]), of_second


def configure_backward(
    pair: int, index: IndexLayout, grad: Operand, rows: Operand, factors: tuple[Layout, Layout], scale: float,
    limits: DeviceLimits, placed: PlacedFactor | None, again: bool, of: str | None,
) -> Backward:  # fmt: skip
    """grad: the gradient of the product's result, gathered of pair 1. rows: what the product multiplies.

    placed: as the product of grad reads the first factor, if there is one. again: u2 was not kept. of: the dtype of
    gradients, None for the factors'.
    """
    (first, second), name, gathers = factors, pair + 1, pair == 1
    u2_again = configure_rows("lora_u2", index, rows, first, True, False, scale) if again and pair == 1 else None
    return Backward(
        configure_rows(f"lora_v{name}", index, grad, second, False, gathers, scale),
        placed and configure_second(placed, rows.dtype, first, True),
        _gradient(f"lora_da{name}", index, rows, _View.of(first, True), True, not gathers, limits, of),
        _gradient(f"lora_db{name}", index, grad, _View.of(second, False), False, gathers, limits, of),
        u2_again,
    )
