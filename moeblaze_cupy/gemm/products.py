"""Grouped GEMMs and weight gradients of the experts: kernels_cu/grouped_gemm_*.cu, grouped_wgrad_*.cu.

R = L*k slots, or max_slots if that bounds them. Only the first expert_token_offsets[E] rows of (R, ...) buffers are
written and read. `configure` and `configure_wgrad` choose kernel and grid from layouts alone; `gemm` and `wgrad`
launch.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy import checks
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, Tiles
from moeblaze_cupy.cuda.tensor_map import TensorMap
from moeblaze_cupy.dispatch.launches import EXPERT_TOKEN_OFFSETS, LISTS, IndexLayout, Lists
from moeblaze_cupy.frameworks import ALIGNMENT, ITEMSIZE, Array, Buffer, Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import variants as gemm_variants
from moeblaze_cupy.gemm.biases import Bias, Parameter
from moeblaze_cupy.rows import push
from moeblaze_cupy.types import Activation, activation_of, is_gated


@dataclass(frozen=True)
class Weight(Parameter):
    """The layout of an expert weight, or of its gradient: one array, or the pair (gate, up).

    Element (e, row, column) of a half lies at its start + e*expert_stride + row*ld + column, or column*ld + row where
    `transposed`. `up_offset` separates the up half's start, in bytes, from that of the last array.
    """

    layouts: tuple[Layout, ...]
    up_offset: int
    expert_stride: int
    ld: int
    transposed: bool
    misalignment: int  # that of the halves' starts; 0 if both are aligned

    @classmethod
    def of(cls, layouts: tuple[Layout, ...], half_columns: int | None = None) -> "Weight":
        """Returns the layout. half_columns: h, if this is the only array (E, d, 2h) of a gated layer."""
        first = layouts[0]
        transposed = checks.weight_order("weight", "strides", Array(None, 0, *first[:4]))
        up_offset = 0
        if half_columns is not None and len(layouts) == 1:
            up_offset = half_columns * first.strides[2] * first.itemsize
        starts = first.misalignment, layouts[-1].misalignment + up_offset
        ld = first.strides[2 if transposed else 1]
        return cls(layouts, up_offset, first.strides[0], ld, transposed, math.gcd(ALIGNMENT, *starts) % ALIGNMENT)

    @property
    def num_experts(self) -> int:
        return self.layouts[0].shape[0]

    def is_k_contiguous(self, entry: str) -> bool:
        """Returns True if the dimension that a step sums over is contiguous: rows in forward, columns in backward."""
        return self.transposed == entry.endswith("_fwd")

    def gradient_layouts(self) -> tuple[Layout, ...]:
        """Returns the layouts of new arrays for the gradient: packed, in the shapes and memory order of the weight."""
        layouts = []
        for E, rows, columns in (layout.shape for layout in self.layouts):
            strides = (rows * columns, 1, rows) if self.transposed else (rows * columns, columns, 1)
            layouts.append(Layout((E, rows, columns), strides, self.dtype, self.layouts[0].device))
        return tuple(layouts)


@dataclass(frozen=True)
class Operand:
    """A row-major left operand: its dtype, how far its rows are apart in elements, and its address's misalignment."""

    dtype: str  # "uint8" holds e4m3
    ld: int
    misalignment: int = 0
    tf32: bool = False  # float32 that products round to TF32

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "uint8"

    @property
    def result_dtype(self) -> str:
        """Returns the dtype of a product with this operand."""
        return "bfloat16" if self.is_fp8 else self.dtype


class Factor(NamedTuple):
    """A low-rank factor beside a product's weight. The rows that it multiplies are (R, ranks), in expert order.

    ranks: a multiple of 16. columns: those of the product, gate and up together. half: the columns of gate, where
    those of up follow in b1; else 0.
    """

    ranks: int
    columns: int
    half: int = 0


class Product(NamedTuple):
    """The operands of a step: N columns of the result are sums over K, per segment, of rows of `a` and the weight.

    interleaved: gate and up columns alternate in w1 and the first layer. bias: what is added to the products. lora:
    the factor beside the weight.
    """

    entry: str
    lists: IndexLayout
    a: Operand
    weight: Weight
    N: int
    K: int
    activation: str | Activation
    interleaved: bool = False
    bias: Bias | None = None
    lora: Factor | None = None


class PlacedFactor(NamedTuple):
    """A factor as a product reads it: (E, ranks, columns), or with the last two exchanged, in memory.

    weight: its layout in the role of the product's weight. in_spare: it has no stages, see `gemm_config.lora_in_spare`.
    """

    weight: Weight
    ranks: int
    ranks_first: bool
    in_spare: bool
    why: tuple[str, ...]

    @classmethod
    def of(cls, product: Product, factor: Factor, tier: str, square: bool) -> "PlacedFactor":
        (ranks, columns, half), entry = factor, product.entry
        in_spare, why = False, ""
        if tier == "sm90":
            in_spare, why = gemm_config.lora_in_spare(entry, ranks, square, product.bias is not None)
        ranks_first = in_spare or not product.weight.is_k_contiguous(entry)
        rows, ld = (ranks, launch_config.ceil_div(columns, 8) * 8) if ranks_first else (columns, ranks)
        layout = Layout((product.lists.num_experts, rows, ld), (rows * ld, ld, 1), product.a.result_dtype, 0)
        up_offset = half * (1 if ranks_first else ld) * layout.itemsize
        weight = Weight((layout,), up_offset, rows * ld, ld, ranks_first != entry.endswith("_fwd"), 0)
        return cls(weight, ranks, ranks_first, in_spare, (why,) if why else ())

    @property
    def shape(self) -> tuple[int, int, int]:
        E, rows, columns = self.weight.layouts[0].shape
        return E, rows, columns

    def sizes(self, tier: str) -> dict[str, int]:
        """Returns the sizes that the launch is given."""
        if tier == "sm80":
            return {"lora_stride": self.weight.expert_stride, "lora_ld": self.weight.ld, "ranks": self.ranks}
        return {} if self.in_spare else {"lora_steps": launch_config.ceil_div(self.ranks, gemm_config.STEP_ROWS)}

    def maps(self, entry: str, columns: int, slots: int, box_rows: int, box_columns: int) -> dict[str, TensorMap]:
        """Returns the tensor maps of the rows, unless the kernel loads them itself, and of the factor's halves."""
        of_factor = _weight_map(self.weight, entry, columns, self.ranks, box_columns)
        if self.in_spare:
            return dict.fromkeys(("lora0", "lora1"), of_factor._replace(box=(64, self.ranks, 1)))
        rows = Operand(self.weight.dtype, self.ranks)
        return {"lora_rows": _rows_map(rows, slots, box_rows), "lora0": of_factor, "lora1": of_factor}


class Rows(NamedTuple):
    """The destination of the rows of a product.

    ld: elements between the rows of `result`. first_column: the column of the weight that is the first of these rows.
    panels: the widths of all column panels, of which this product is one; they have tiles of one kind. why: sentences
    for `Launch.why`. to_tokens: rows go to their tokens, which is Hopper's alone and for k = 1, scaled by weights of
    `weights_dtype` if that is given. place: that of rows that go to the tokens of several GPUs.
    """

    ld: int = 0
    first_column: int = 0
    panels: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    to_tokens: bool = False
    weights_dtype: str | None = None
    place: push.PeerOffset | None = None


NO_ROWS = Rows()  # for a step that writes no `result`


class GemmExtras(NamedTuple):
    """Further addresses of a product of e4m3, with a low-rank factor, or whose rows go to several GPUs; 0 for none.

    a_scales: float32, (L,) of gathered rows, else (groups, R) of each row and 128 columns of each half of the left
    operand. b_scales: (E, halves) float32. quantised: e4m3 of up_fwd's (R, h) y_swi or down_bwd's (R, halves * h)
    first_layer_grad. quantised_scales: (groups, R) float32, of each row and 128 columns of each half. peers, needed:
    those of `push.Addresses`. lora_rows: (R, ranks), which the factor multiplies. lora0, lora1: where its gate and up
    begin. x_scales and the largest magnitudes of down_bwd's results: those of `fp8.wgrad`.
    """

    a_scales: int = 0
    b_scales: int = 0
    quantised: int = 0
    quantised_scales: int = 0
    peers: int = 0
    needed: int = 0
    lora_rows: int = 0
    lora0: int = 0
    lora1: int = 0
    x_scales: int = 0
    first_layer_grad_amax: int = 0
    result_amax: int = 0


PLAIN = GemmExtras()


# What `gemm` and `wgrad` pass to a launch. The portable kernel knows the rows' weights by another name than Hopper's.
GEMM_ADDRESSES = (
    *("a", "b0", "b1", "first_layer", "first_layer_grad", "result", "y_swi", "weights", "row_weights"),
    *("partial_sums", "tile_counter", "bias0", "bias1", *LISTS),
    *GemmExtras._fields,
)
WGRAD_ADDRESSES = ("p", "q", "routed", "out0", "out1", "others", *LISTS)


def _tier(launch: Launch) -> str:
    return "sm90" if launch.variant.source.endswith("_sm90.cu") else "sm80"


@dataclass(frozen=True, eq=False)
class Gemm:
    """One launch of grouped_gemm_*.cu, and the memory that it takes."""

    launch: Launch
    offset: int  # bytes from the weight's halves to the first column
    dynamic_schedule: bool  # CTAs take tiles from a counter
    bias_offset: int  # bytes from the bias's halves to the first column
    partial_sums: tuple[int, int] | None  # shape: column tiles and further parts, R
    square: bool  # its row tiles are those of square_tiles.cu
    lora: PlacedFactor | None
    lora_offset: int  # bytes from the low-rank factor's halves to the first column

    @property
    def tier(self) -> str:
        return _tier(self.launch)


def is_aligned(misalignments: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Returns True for aligned addresses, and sizes and strides of whole 8-element groups, as 16-byte accesses need."""
    return not any(misalignments) and math.gcd(8, *sizes) == 8


def config_of(product: Product, limits: DeviceLimits) -> tuple[gemm_config.GemmConfig, bool]:
    """Returns the kernel's geometry, and whether 16-byte accesses are possible."""
    a, weight, bias = product.a, product.weight, product.bias
    sizes = (product.N, product.K, a.ld, weight.ld, weight.expert_stride, bias.stride if bias else 0)
    starts = a.misalignment, weight.misalignment, bias.misalignment if bias else 0
    # a weight may have its experts in reverse or all in one place, which a tensor map cannot say
    aligned = is_aligned(starts, sizes) and min(weight.ld, weight.expert_stride) > 0
    split = gemm_variants.is_split(product.entry, is_gated(product.activation))
    return gemm_config.gemm(a.result_dtype, aligned, split, limits), aligned


def _variant(
    entry: str,
    dtype: str,
    weight: Weight,
    config: gemm_config.GemmConfig,
    aligned: bool,
    activation: str | Activation,
    **options: Any,
) -> loader.Variant:
    """Returns the kernel of a step; `options` are those of `gemm_variants.gemm_variant`."""
    return gemm_variants.gemm_variant(
        entry,
        dtype=dtype,
        activation=activation_of(activation).name,
        transposed=weight.transposed,
        aligned=aligned,
        stages=config.stages,
        step_bytes=config.step_bytes,
        tier=config.tier,
        **options,
    )


def _rows_map(operand: Operand, rows: int, box_rows: int) -> TensorMap:
    """Describes a row-major (rows, columns) array as (columns, rows, 1), in boxes of 128 bytes of columns."""
    ld, columns = operand.ld, gemm_config.STEP_BYTES // ITEMSIZE[operand.dtype]
    return TensorMap(operand.dtype, (ld, rows, 1), (ld, ld * rows), (columns, box_rows, 1))


def _weight_map(weight: Weight, entry: str, n: int, k: int, box_columns: int) -> TensorMap:
    """Describes n columns of a half as (contiguous, strided, expert): k, n, E where k is contiguous, else n, k, E.

    box_columns: the columns of a box where k is contiguous.
    """
    k_box = gemm_config.STEP_BYTES // ITEMSIZE[weight.dtype]
    shape, box = ((k, n), (k_box, box_columns, 1)) if weight.is_k_contiguous(entry) else ((n, k), (64, 64, 1))
    return TensorMap(weight.dtype, (*shape, weight.num_experts), (weight.ld, weight.expert_stride), box)


def _column_offset(weight: Weight, entry: str, column: int) -> int:
    """Returns the bytes from a half of the weight to this column of the product."""
    return column * (weight.ld if weight.is_k_contiguous(entry) else 1) * weight.layouts[0].itemsize


def configure(
    product: Product,
    limits: DeviceLimits,
    rows: Rows = NO_ROWS,
    *,
    stored_y_swi: bool = False,
    further_parts: int | None = None,
    weights_on_input: bool = False,
    fp8_saved: bool = False,
    fp8_wgrad: bool = False,
) -> Gemm:
    """Configures the launch of one step.

    stored_y_swi: down_bwd reads it. further_parts: parts of the partial sums that others write; None for no partial
    sums. weights_on_input: the rows' router weights scale a and b of up_fwd and down_bwd. fp8_saved: Hopper's kernel
    keeps or reads the first layer in e4m3; the portable one leaves that to `fp8.saved`. fp8_wgrad: down_bwd finds the
    largest magnitudes for `fp8.wgrad`.
    """
    entry, index, a, weight, N, K, activation, interleaved, bias, lora = product
    to_tokens, place = rows.to_tokens, rows.place
    config, aligned = config_of(product, limits)
    slots, dynamic, clusters = index.num_rows, False, False
    why = (*rows.why, *config.why, *((gemm_config.TF32,) if a.tf32 else ()))
    pairs, stores_rows = interleaved and entry == "up_fwd", gemm_variants.EPILOGUES[entry] == "STORE" and not to_tokens
    max_row_tiles, square = index.max_row_tiles, False
    num_slots = index.num_slots if to_tokens else slots
    sizes: dict[str, float] = {"columns": N, "depth": K, "num_slots": num_slots, "lda": a.ld}
    sizes |= {f"constant{i}": value for i, value in enumerate(activation_of(activation).constants.values())}
    if bias:
        sizes["bias_stride"] = bias.stride
    if a.is_fp8:
        sizes["scales_ld"] = slots
    maps: dict[str, TensorMap] = {}
    if config.tier == "sm90" and (stores_rows or (pairs and not fp8_saved)) and not a.is_fp8:
        widths = rows.panels or (N * (1 + pairs),)
        square, of_tiles = gemm_config.square_product(widths, slots, index.num_experts)
        why += (of_tiles,)
    if square:
        config, max_row_tiles = gemm_config.square_gemm(pairs), index.max_square_tiles
    column_tiles = gemm_config.column_tiles(N, config.tile_columns)
    placed = lora and PlacedFactor.of(product, lora, config.tier, square)
    if placed:
        sizes |= placed.sizes(config.tier)
        why += placed.why
    if config.tier == "sm80":
        sizes |= {"expert_stride": weight.expert_stride, "ldb": weight.ld}
    else:
        gathers, segments = (
            gemm_variants.gathers(entry),
            gemm_variants.k_segments(entry, is_gated(activation), interleaved),
        )
        depth = segments * K // (2 if a.is_fp8 else 1)  # the depth of as many k-steps
        rule = column_tiles, depth, slots, index.num_experts
        if square:
            of_clusters = "no 2-CTA clusters: square tiles have none"
        elif to_tokens:
            of_clusters = "no 2-CTA clusters: rows go straight to their tokens"
        else:
            clusters, of_clusters = gemm_config.uses_clusters(gathers, *rule, a.is_fp8)
        of_schedule = gemm_config.FIXED_ORDER
        if gathers:
            dynamic, of_schedule = gemm_config.dynamic_schedule(entry, *rule, limits)
        else:
            maps["a"] = _rows_map(a, slots, config.tile_rows)
        box_columns = launch_config.SQUARE_TILE if square else 128
        maps["b0"] = maps["b1"] = _weight_map(weight, entry, N * (1 + pairs), K, box_columns)
        if placed:
            maps |= placed.maps(entry, N * (1 + pairs), slots, config.tile_rows, box_columns)
        sizes |= {"result_ld": rows.ld}
        why += (*((gemm_config.E4M3,) if a.is_fp8 else ()), of_clusters, of_schedule)
    options: dict[str, object] = {"stored_y_swi": stored_y_swi, "clusters": clusters, "to_tokens": to_tokens}
    options |= {"fp8": a.is_fp8, "tf32": a.tf32}
    options |= {"interleaved": interleaved, "bias": bias.dtype if bias else None, "weights_on_input": weights_on_input}
    options |= {"fp8_saved": fp8_saved, "fp8_wgrad": fp8_wgrad, "square": square, "pushes": place is not None}
    options |= {"lora": placed is not None, "lora_in_spare": placed is not None and placed.in_spare}
    if place is not None:
        sizes |= place._asdict()
    if to_tokens and rows.weights_dtype is not None:
        options["weights_dtype"] = rows.weights_dtype
    tiles = Tiles(config.tile_rows, config.tile_columns, column_tiles * max_row_tiles, at_most=True)
    launch = Launch(
        _variant(entry, a.result_dtype, weight, config, aligned, activation, **options),
        (config.blocks(N, max_row_tiles, limits, clusters),),
        config.threads,
        GEMM_ADDRESSES,
        sizes,
        config.shared_bytes,
        maps,
        why,
        tiles,
    )
    offset = _column_offset(weight, entry, rows.first_column)
    lora_offset = _column_offset(placed.weight, entry, rows.first_column) if placed else 0
    bias_offset = rows.first_column * bias.layouts[0].itemsize if bias else 0
    partial_sums = None if further_parts is None else (column_tiles + further_parts, slots)
    return Gemm(launch, offset, dynamic, bias_offset, partial_sums, square, placed, lora_offset)


def gemm(
    run: Runtime,
    step: Gemm,
    lists: Lists,
    a: int,
    halves: tuple[int, int],
    *,
    first_layer: int = 0,
    first_layer_grad: int = 0,
    result: int = 0,
    y_swi: int = 0,
    weights: int = 0,
    bias: tuple[int, int] = (0, 0),
    extras: GemmExtras = PLAIN,
) -> Buffer | None:
    """Launches the step on addresses; 0 stands for what is not read or written.

    lists: the index lists, and those of `square_tiles.listed` if the step has square tiles. halves, bias: where the
    weight's and the bias's gate and up begin. weights: one for each row (down_bwd, and up_fwd if they scale a and b),
    or for each token if rows go to tokens.
    Returns the partial sums of down_bwd (parts, R) float32, if wanted.
    """
    partial_sums = run.empty(step.partial_sums, "float32") if step.partial_sums else None
    tile_counter = run.empty((1,), "int32") if step.dynamic_schedule else None
    if tile_counter:
        run.clear(tile_counter.ptr, 4)
    if step.lora_offset:
        lora0, lora1 = extras.lora0 + step.lora_offset, extras.lora1 + step.lora_offset
        extras = extras._replace(lora0=lora0, lora1=lora1)
    run.launch(
        step.launch,
        a,
        halves[0] + step.offset,
        halves[1] + step.offset,
        first_layer,
        first_layer_grad,
        result,
        y_swi,
        weights,
        weights,
        partial_sums.ptr if partial_sums else 0,
        tile_counter.ptr if tile_counter else 0,
        bias[0] + step.bias_offset,
        bias[1] + step.bias_offset,
        *lists,
        *extras,
    )
    return partial_sums


@dataclass(frozen=True, eq=False)
class Wgrad:
    """A weight gradient: one launch of grouped_wgrad_*.cu, or with split-K one more that adds up the splits."""

    product: Launch
    swapped: bool  # the gradient is stored transposed: its columns come first
    routed_is_q: bool  # the operand that is not gathered is q, not p
    sums: tuple[int, int, int, int] | None  # shape of the splits' float32 sums: E * splits, halves, M, N
    add: Launch | None

    @property
    def tier(self) -> str:
        return _tier(self.product)


class Summed(NamedTuple):
    """A weight gradient is summed with those of other ranks, and the sum is scaled."""

    num_others: int  # at most 7
    scale: float


def configure_wgrad(
    index: IndexLayout,
    activation: str | Activation,
    limits: DeviceLimits,
    entry: str,
    rows: tuple[Operand, int],
    columns: tuple[Operand, int],
    gradient: Weight,
    halves: int,
    accumulate: bool,
    num_experts: int | None = None,
    summed: Summed | None = None,
) -> Wgrad:
    """Configures the gradient of each half: sums over each expert's rows, zeros for experts without any.

    `rows` and `columns`: the operand that spans that side of the weight, and its step from gate to up half in elements.
    `accumulate` adds to what the gradient holds, in the operands' dtype or float32; experts without rows are then left
    alone. On Hopper few large experts take split-K: float32 sums over parts of their rows, and a launch that adds them.
    num_experts: the number that the lists are of, if these are one rank's experts. summed: with parts of other ranks,
    on Hopper; the gradient is in the operands' dtype, in which the parts are, or in float32.
    """
    _, M, N = gradient.layouts[0].shape
    N = N * len(gradient.layouts) // halves
    swapped = gradient.transposed
    (p, p_half), (q, q_half) = (columns, rows) if swapped else (rows, columns)
    if swapped:
        M, N = N, M
    sizes = (M, N, p.ld, q.ld, p_half, q_half, gradient.ld, gradient.expert_stride)
    aligned = is_aligned((p.misalignment, q.misalignment, gradient.misalignment), sizes) and index.num_rows > 0
    E, dtype = num_experts or index.num_experts, gradient.dtype
    num_rows = index.num_rows * E // index.num_experts
    tiles = gemm_config.wgrad_tiles(M, N, E * halves)
    splits, of_splits = 1, "no split-K: it is summed with other ranks' parts"
    if not summed:
        splits, of_splits = gemm_config.split_k(tiles, num_rows, E, limits)
    square, of_tiles = gemm_config.square_wgrad(M, N)
    if square and (splits > 1 or accumulate or summed):
        kind = "takes split-K" if splits > 1 else "is added to sums"
        square, of_tiles = False, f"{gemm_config.WIDE}: it {kind}, for which there are no square tiles"
    if square:
        tiles = gemm_config.wgrad_tiles(M, N, E * halves, square)
    config = gemm_config.wgrad(p.dtype, aligned, square, limits)
    to: dict[str, Any] = {"accumulate": dtype if accumulate else None, "summed": dtype if summed else None}
    to["tf32"] = p.tf32
    operands = {"ldp": p.ld, "p_half": p_half, "ldq": q.ld, "q_half": q_half, "rows": M, "columns": N}
    result = {"expert_stride": gradient.expert_stride, "ldo": gradient.ld}

    def launch(
        grid: tuple[int, ...],
        scalars: dict[str, int],
        maps: dict[str, TensorMap],
        why: tuple[str, ...],
        **options: Any,
    ) -> Launch:
        variant = _variant(entry, p.dtype, gradient, config, aligned, activation, square=square, **options)
        shape = Tiles(config.tile_rows, config.tile_columns, number)
        return Launch(variant, grid, config.threads, WGRAD_ADDRESSES, scalars, config.shared_bytes, maps, why, shape)

    if config.tier == "sm80":
        tiles = launch_config.ceil_div(M, launch_config.TILE_ROWS) * gemm_config.column_tiles(N)
        number = tiles * E * halves
        why = (*config.why, *((gemm_config.TF32,) if p.tf32 else ()))
        product = launch((tiles, E, halves), {**operands, **result}, {}, why, **to)
        return Wgrad(product, swapped, True, None, None)
    grid = (min(tiles * splits, limits.multiprocessors),)
    routed_is_q = (entry == "up_wgrad") != swapped
    maps = {"routed": _rows_map(q if routed_is_q else p, index.num_rows, gemm_config.STEP_ROWS)}
    schedule = {"num_experts": E, "halves": halves, "splits": splits}
    number = tiles * splits
    why = (*config.why, of_tiles, of_splits)
    if summed:
        result |= {"others_stride": E * gradient.expert_stride, **summed._asdict()}
    if splits == 1:
        product = launch(grid, {**operands, **result, **schedule}, maps, why, **to)
        return Wgrad(product, swapped, routed_is_q, None, None)
    packed = {"expert_stride": halves * M * N, "ldo": N}
    product = launch(grid, {**operands, **packed, **schedule}, maps, why, split_k=True)
    of_parts = {**result, "splits": splits, "accumulate": int(accumulate)}
    add = _parts_launch(dtype, (M, N), E, halves, of_parts, "adds the float32 sums of split-K in a fixed order")
    return Wgrad(product, swapped, routed_is_q, (E * splits, halves, M, N), add)


def _parts_launch(dtype: str, shape: tuple[int, int], E: int, halves: int, scalars: dict[str, int], why: str) -> Launch:
    rows, columns = shape
    return Launch(
        loader.entry("wgrad_parts.cu", f"wgrad_parts_{dtype}"),
        (launch_config.ceil_div(rows * columns // 8, gemm_config.PARTS_GROUPS), E, halves),
        gemm_config.PARTS_GROUPS,
        ("sums", "expert_token_offsets", "out0", "out1"),
        {"rows": rows, "columns": columns, "halves": halves, **scalars},
        why=(why,),
    )


def sum_of_two(size: int, dtype: str) -> Launch:
    """Returns the launch that adds two arrays of `size` float32 numbers, a multiple of 8, the second behind the first.

    The result is rounded to `dtype`. In float32 it may take the place of the first array.
    """
    scalars = {"expert_stride": 0, "ldo": 8, "splits": 2, "accumulate": 0}
    return _parts_launch(dtype, (size // 8, 8), 1, 1, scalars, "adds a chunk's gradient to the float32 sum of others")


def wgrad(
    run: Runtime,
    step: Wgrad,
    lists: Lists,
    rows: int,
    columns: int,
    gradient: tuple[int, int],
    others: int = 0,
) -> None:
    """Launches the step. rows, columns: addresses of the operands. gradient: where the result's gate and up begin.

    others: where the other ranks' parts of the gradient begin, if it is summed with them.
    """
    p, q = (columns, rows) if step.swapped else (rows, columns)
    out0, out1 = gradient
    if step.sums:
        sums = run.empty(step.sums, "float32")
        out0 = sums.ptr
        out1 = out0 + 4 * math.prod(step.sums[2:])
    run.launch(step.product, p, q, q if step.routed_is_q else p, out0, out1, others, *lists)
    if step.add:
        run.launch(step.add, out0, lists[EXPERT_TOKEN_OFFSETS], *gradient)
