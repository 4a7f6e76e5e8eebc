"""Grouped GEMMs and weight gradients of the experts: kernels_cu/grouped_gemm_*.cu, grouped_wgrad_*.cu.

R = L*k slots; only the first expert_token_offsets[E] rows of (R, ...) buffers are written and read.
"""

import math
from dataclasses import dataclass

from moeblaze_cupy import checks, launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.structures import PackedIndices, is_gated

GROUPS_PER_BLOCK = launch_config.PARTS_GROUPS


@dataclass(slots=True)
class Index:
    """The index lists as the kernels read them."""

    expert_token_indices: Array
    expert_token_offsets: Array
    token_index_map: Array
    row_tiles: Array
    experts_by_load: Array
    num_experts: int

    @classmethod
    def of(cls, context: Context, index: PackedIndices) -> "Index":
        lists = context.describe(index.lists)
        names = ("expert_token_indices", "expert_token_offsets", "token_index_map", "row_tiles", "experts_by_load")
        return cls(*(lists.part(*index.places[name]) for name in names), index.num_experts)

    @property
    def num_slots(self) -> int:
        return self.token_index_map.size

    @property
    def max_row_tiles(self) -> int:
        return self.row_tiles.shape[0] - 1


@dataclass(slots=True)
class Weight:
    """An expert weight as stored: element (e, row, column) of half i at halves[i] + e*expert_stride + row*... .

    `ld` separates rows, or columns where `transposed`. Without a gate both halves are the same pointer.
    """

    arrays: tuple[Array, ...]
    halves: tuple[int, int]
    expert_stride: int
    ld: int
    transposed: bool

    @classmethod
    def of(cls, arrays: tuple[Array, ...], half_columns: int | None = None) -> "Weight":
        """`half_columns`: h, if arrays is the one (E, d, 2h) array of a gated layer."""
        first = arrays[0]
        transposed = checks.weight_order("weight", "strides", first)
        up = arrays[-1].ptr
        if half_columns is not None and len(arrays) == 1:
            up += half_columns * first.strides[2] * first.itemsize
        return cls(arrays, (first.ptr, up), first.strides[0], first.strides[2 if transposed else 1], transposed)

    def is_k_contiguous(self, entry: str) -> bool:
        """Whether the dimension that a step sums over is contiguous: rows in forward, columns in backward."""
        return self.transposed == entry.endswith("_fwd")

    def offset(self, elements: int) -> tuple[int, int]:
        """Both halves, moved on by a number of elements."""
        bytes_ = elements * self.arrays[0].itemsize
        return self.halves[0] + bytes_, self.halves[1] + bytes_


def empty_weight_gradient(context: Context, weight: Weight) -> tuple[Array, ...]:
    """Uninitialised arrays in the shapes and memory order of the weight's own."""
    gradients = []
    for array in weight.arrays:
        E, rows, columns = array.shape
        if weight.transposed:
            base = context.empty((E, columns, rows), array.dtype)
            strides = (base.strides[0], base.strides[2], base.strides[1])
            gradients.append(Array(base.owner.swapaxes(1, 2), base.ptr, array.shape, strides, base.dtype, base.device))
        else:
            gradients.append(context.empty((E, rows, columns), array.dtype))
    return tuple(gradients)


def _is_aligned(pointers: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """16-byte accesses need aligned pointers, and sizes and strides of whole 8-element groups."""
    return math.gcd(16, *pointers) == 16 and math.gcd(8, *sizes) == 8


def pointer(array: Array | None) -> int:
    return 0 if array is None else array.ptr


def config_of(context: Context, entry: str, a: Array, weight: Weight, N: int, K: int, activation: str):
    """The kernel's geometry and whether 16-byte accesses are possible."""
    sizes = (N, K, a.shape[1], weight.ld, weight.expert_stride)
    # a weight may have its experts in reverse or all in one place, which a tensor map cannot say
    aligned = _is_aligned((a.ptr, *weight.halves), sizes) and min(weight.ld, weight.expert_stride) > 0
    split = loader.is_split(entry, is_gated(activation))
    return launch_config.gemm(a.dtype, aligned, split, loader.device_limits(context.device)), aligned


def variant_of(
    entry: str, a: Array, weight: Weight, config: launch_config.GemmConfig, aligned: bool, activation: str, **options
) -> loader.Variant:
    """The kernel of a step on elements of `a`; `options` as of `loader.gemm_variant`."""
    return loader.gemm_variant(
        entry,
        dtype=a.dtype,
        activation=activation,
        transposed=weight.transposed,
        aligned=aligned,
        stages=config.stages,
        tier=config.tier,
        **options,
    )


def rows_map(context: Context, array: Array, box_rows: int):
    """A row-major (rows, columns) array as (columns, rows, 1), boxes of 64 columns."""
    rows, ld = array.shape
    return context.tensor_map(array.ptr, array.dtype, (ld, rows, 1), (ld, ld * rows), (64, box_rows, 1))


def tensor_maps(context: Context, weight: Weight, halves: tuple, entry: str, n: int, k: int) -> tuple:
    """n columns of both halves as (contiguous, strided, expert) maps: k, n, E where k is contiguous, else n, k, E."""
    shape, box = ((k, n), (64, 128, 1)) if weight.is_k_contiguous(entry) else ((n, k), (64, 64, 1))
    first = weight.arrays[0]
    strides = (weight.ld, weight.expert_stride)
    return tuple(context.tensor_map(p, first.dtype, (*shape, first.shape[0]), strides, box) for p in halves)


def gemm(
    context: Context,
    entry: str,
    index: Index,
    a: Array,
    weight: Weight,
    N: int,
    K: int,
    activation: str,
    *,
    first_column: int = 0,
    first_layer: Array | None = None,
    first_layer_grad: Array | None = None,
    product: Array | None = None,
    stored_product: Array | None = None,
    weights: Array | None = None,
    wants_partial_sums: bool = False,
    to_tokens: bool = False,
) -> Array | None:
    """One launch of grouped_gemm_*.cu: columns first_column .. + N of the result.

    weights: of each row (down_bwd), or of each token if rows go `to_tokens`, which is Hopper's alone and for k = 1.
    Returns the partial sums of down_bwd (column tiles, R) float32, if wanted.
    """
    config, aligned = config_of(context, entry, a, weight, N, K, activation)
    limits, slots, claims, paired = loader.device_limits(context.device), index.num_slots, None, False
    column_tiles = launch_config.column_tiles(N, config.tile_columns)
    partial_sums = context.empty((column_tiles, slots), "float32") if wants_partial_sums else None
    halves = weight.offset(first_column * (weight.ld if weight.is_k_contiguous(entry) else 1))
    lists = index.expert_token_indices.ptr, index.expert_token_offsets.ptr, index.row_tiles.ptr
    outputs = pointer(first_layer), pointer(first_layer_grad), pointer(product)
    others = pointer(stored_product), pointer(weights), pointer(partial_sums)
    if config.tier == "sm80":
        strides = a.shape[1], weight.expert_stride, weight.ld
        args = (a.ptr, *halves, *lists, *outputs, *others, *strides, N, K, slots)
    else:
        gathers, segments = loader.gathers(entry), loader.k_segments(entry, is_gated(activation))
        long = launch_config.pairs_blocks(gathers, column_tiles, segments * K, slots, index.num_experts)
        paired = long and not to_tokens
        if gathers and launch_config.claims_tiles(entry, column_tiles, K, slots, index.num_experts, limits):
            claims = context.empty((1,), "int32")
            context.clear(claims)
        b = tensor_maps(context, weight, halves, entry, N, K)
        product_ld = 0 if product is None else product.shape[1]
        arrays = *lists, *outputs, *others, index.token_index_map.ptr, pointer(claims)
        if gathers:
            args = (*b, a.ptr, *arrays, a.shape[1], product_ld, N, K, slots)
        else:
            args = (rows_map(context, a, launch_config.TILE_ROWS), *b, *arrays, product_ld, N, K, slots)
    options = {"stored_product": stored_product is not None, "paired": paired, "to_tokens": to_tokens}
    if to_tokens and weights is not None:
        options["weights_dtype"] = weights.dtype
    variant = variant_of(entry, a, weight, config, aligned, activation, **options)
    blocks = config.blocks(N, index.max_row_tiles, limits, paired)
    context.launch(variant, (blocks,), config.threads, args, config.shared_bytes)
    return partial_sums


def up_fwd(
    context: Context,
    index: Index,
    x: Array,
    w1: Weight,
    h: int,
    activation: str,
    *,
    first_layer: Array | None,
    product: Array | None,
) -> None:
    """first_layer (R, 2h) or (R, h) = x[tokens] w1, product (R, h) = act(a) * b; None is not written."""
    d = x.shape[1]
    gemm(context, "up_fwd", index, x, w1, h, d, activation, first_layer=first_layer, product=product)


def down_bwd(
    context: Context,
    index: Index,
    grad_out: Array,
    w2: Weight,
    h: int,
    activation: str,
    *,
    first_layer: Array,
    first_layer_grad: Array | None,
    product: Array | None,
    stored_product: Array | None,
    row_weights: Array,
    wants_weights_grad: bool,
) -> Array | None:
    """dA = grad_out[tokens] w2^T, at once turned into the first layer's gradient and A'.

    Returns <dA, A> of each routed row by column tile (tiles, R) float32, or None if not wanted.
    """
    return gemm(
        context,
        "down_bwd",
        index,
        grad_out,
        w2,
        h,
        grad_out.shape[1],
        activation,
        first_layer=first_layer,
        first_layer_grad=first_layer_grad,
        product=product,
        stored_product=stored_product,
        weights=row_weights,
        wants_partial_sums=wants_weights_grad,
    )


def _wgrad(
    context: Context,
    entry: str,
    index: Index,
    rows: tuple[Array, int],
    columns: tuple[Array, int],
    gradient: Weight,
    M: int,
    N: int,
    halves: int,
    activation: str,
    accumulate: bool,
) -> None:
    """`rows` and `columns`: the operand that spans that side of the weight, and its step from gate to up half.

    `accumulate` adds to what `gradient` holds, in p's dtype or float32; experts without rows are then left alone. Few
    large experts take float32 sums of parts of their rows in between, and a second launch.
    """
    (p, p_half), (q, q_half) = (columns, rows) if gradient.transposed else (rows, columns)
    if gradient.transposed:
        M, N = N, M
    all_sizes = (M, N, p.shape[1], q.shape[1], p_half, q_half, gradient.ld, gradient.expert_stride)
    limits = loader.device_limits(context.device)
    aligned = _is_aligned((p.ptr, q.ptr, *gradient.halves), all_sizes) and index.num_slots > 0  # a tensor map has rows
    config = launch_config.gemm(p.dtype, aligned, False, limits)
    E, offsets = index.num_experts, index.expert_token_offsets
    operands = p.ptr, q.ptr, index.expert_token_indices.ptr, offsets.ptr
    result = gradient.expert_stride, gradient.ld
    sizes = p_half, q_half, M, N

    def launch(grid: tuple, *args, **options) -> None:
        variant = variant_of(entry, p, gradient, config, aligned, activation, **options)
        context.launch(variant, grid, config.threads, args, config.shared_bytes)

    dtype = gradient.arrays[0].dtype
    added_to = dtype if accumulate else None
    if config.tier == "sm80":
        tiles = launch_config.ceil_div(M, launch_config.TILE_ROWS) * launch_config.column_tiles(N)
        args = *operands, *gradient.halves, p.shape[1], q.shape[1], *result, *sizes
        launch((tiles, E, halves), *args, accumulate=added_to)
        return
    tiles = launch_config.wgrad_tiles(M, N, E * halves)
    parts = launch_config.wgrad_parts(tiles, index.num_slots, E, limits)
    grid = (min(tiles * parts, limits.multiprocessors),)
    routed = q if (entry == "up_wgrad") != gradient.transposed else p  # the operand that is not gathered
    maps = (rows_map(context, routed, launch_config.STEP_ROWS),)
    schedule = E, halves, parts

    def args_of(out: tuple, strides: tuple) -> tuple:
        pointers = *operands, *out, index.experts_by_load.ptr
        return *maps, *pointers, p.shape[1], q.shape[1], *strides, *sizes, *schedule

    if parts == 1:
        launch(grid, *args_of(gradient.halves, result), accumulate=added_to)
        return
    sums = context.empty((E * parts, halves, M, N), "float32")
    launch(grid, *args_of((sums.ptr, sums.ptr + 4 * M * N), (halves * M * N, N)), in_parts=True)
    context.launch(
        loader.entry("wgrad_parts.cu", f"wgrad_parts_{dtype}"),
        (launch_config.ceil_div(M * N // 8, GROUPS_PER_BLOCK), E, halves),
        GROUPS_PER_BLOCK,
        (sums.ptr, offsets.ptr, *gradient.halves, *result, M, N, halves, parts, int(accumulate)),
    )


def down_wgrad(
    context: Context,
    index: Index,
    product: Array,
    grad_out: Array,
    gradient: Weight,
    activation: str,
    accumulate: bool = False,
) -> None:
    """gradient (E, h, d) = product^T grad_out[tokens], over each expert's rows; zeros for experts without any."""
    _wgrad(
        context,
        "down_wgrad",
        index,
        (product, 0),
        (grad_out, 0),
        gradient,
        product.shape[1],
        grad_out.shape[1],
        1,
        activation,
        accumulate,
    )


def up_wgrad(
    context: Context,
    index: Index,
    x: Array,
    first_layer_grad: Array,
    gradient: Weight,
    h: int,
    activation: str,
    accumulate: bool = False,
) -> None:
    """gradient (E, d, 2h), (E, d, h) or a pair = x[tokens]^T first_layer_grad, over each expert's rows."""
    gated = is_gated(activation)
    columns = (first_layer_grad, h if gated else 0)
    halves = 2 if gated else 1
    _wgrad(context, "up_wgrad", index, (x, 0), columns, gradient, x.shape[1], h, halves, activation, accumulate)
