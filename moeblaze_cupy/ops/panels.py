"""Products of the experts summed over the k slots of each token, through panels of up to 256 columns or, on Hopper,
chunks of tokens.

There it is one launch of kernels_cu/grouped_panels_sm90.cu, and for k > 1 one of aggregation.cu, which sums the last
group of panels or the last chunk; elsewhere kernels_cu/grouped_gemm_sm80.cu and aggregation.cu in turn.
"""

from dataclasses import dataclass

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.ops import grouped_gemm
from moeblaze_cupy.ops.aggregation import aggregate
from moeblaze_cupy.ops.grouped_gemm import Index, Weight
from moeblaze_cupy.ops.token_chunks import token_chunks


def down_fwd(
    context: Context,
    index: Index,
    product: Array,
    w2: Weight,
    weights: Array,
    out: Array,
    activation: str,
    *,
    overwrites: bool,
) -> None:
    """out (L, d) = sum over slots of weights * row of product w2; `overwrites`: product may be used as scratch."""
    _sum_of_rows(context, "down_fwd", index, product, w2, product.shape[1], weights, out, activation, overwrites)


def up_bwd(
    context: Context,
    index: Index,
    first_layer_grad: Array,
    w1: Weight,
    h: int,
    grad_x: Array,
    activation: str,
) -> None:
    """grad_x (L, d) = sum over slots of row of first_layer_grad w1^T."""
    _sum_of_rows(context, "up_bwd", index, first_layer_grad, w1, h, None, grad_x, activation, False)


@dataclass(slots=True)
class _Rounds:
    """How rows pass through memory to their sums: arguments of the kernel, and of `aggregate` for the last round."""

    lists: tuple[int, int]  # offsets and row tiles
    max_row_tiles: int
    buffers: tuple[int, ...]  # pointer, panels per group, number, elements from row to row, from buffer to buffer
    token_index_map: Array
    chunks: tuple[int, ...]
    progress: Array | None
    rest: tuple  # of arrays in the buffers' memory among others; nothing if k = 1, which has no buffers


def _sum_of_rows(
    context: Context,
    entry: str,
    index: Index,
    a: Array,
    weight: Weight,
    K: int,
    weights: Array | None,
    out: Array,
    activation: str,
    overwrites: bool,
) -> None:
    (L, k), d = index.token_index_map.shape, out.shape[1]
    config, aligned = grouped_gemm.config_of(context, entry, a, weight, d, K, activation)
    if config.tier == "sm80":
        panels = launch_config.panels(d)
        panel = context.empty((index.num_slots, panels[0][1]), out.dtype)
        for first_column, width in panels:
            columns = {"first_column": first_column, "columns": width, "product": panel}
            grouped_gemm.gemm(context, entry, index, a, weight, d, K, activation, **columns)
            aggregate(context, panel, index.token_index_map, weights, out, first_column, width, width)
        return
    chunks = launch_config.num_token_chunks(L, k, index.num_experts, d)
    if chunks > 1:
        rounds = _by_chunks(context, index, weights, out, chunks)
    else:
        rounds = _by_panels(context, index, weights, out, a, overwrites)
    options = {"weights_dtype": "float32" if weights is None else weights.dtype, "k": k, "chunked": chunks > 1}
    variant = grouped_gemm.variant_of(entry, a, weight, config, aligned, activation, **options)
    args = (
        grouped_gemm.rows_map(context, a, launch_config.TILE_ROWS),
        *grouped_gemm.tensor_maps(context, weight, entry, d, K),
        *(d, K),
        index.expert_token_indices.ptr,
        *rounds.lists,
        *rounds.buffers,
        rounds.token_index_map.ptr,
        grouped_gemm.pointer(weights),
        out.ptr,
        *(L, k),
        *rounds.chunks,
        grouped_gemm.pointer(rounds.progress),
    )
    blocks = config.blocks(d, rounds.max_row_tiles, loader.device_limits(context.device))
    context.launch(variant, (blocks,), config.threads, args, config.shared_bytes)
    if rounds.rest:
        aggregate(context, *rounds.rest)


def _with_counters(context: Context, size: int, counters: int, dtype: str) -> tuple[Array, Array | None]:
    """`size` elements of 16 bits, and behind them int32 `counters` that start as zeros, seen as elements; None without
    any. In one buffer, as every allocation takes as long as a launch."""
    memory = context.empty((size + 2 * counters,), dtype)
    if not counters:
        return memory, None
    progress = memory.part(size, (2 * counters,))
    context.clear(progress)
    return memory, progress


def _by_panels(
    context: Context, index: Index, weights: Array | None, out: Array, a: Array, overwrites: bool
) -> _Rounds:
    """All rows of one group of columns after another, through two groups' buffers, or through rows of `a`."""
    k, d, R = index.token_index_map.shape[1], out.shape[1], index.num_slots
    panels, buffers = launch_config.panels(d), launch_config.panel_buffers(d, k, a.shape[1] if overwrites else 0)
    shape = R, panels[0][1]
    ld, stride = a.shape[1] if buffers.in_place else shape[1], R * shape[1]
    memory, progress = a if buffers.in_place else None, None
    if buffers.allocated:
        memory, progress = _with_counters(context, buffers.allocated * stride, buffers.counters, out.dtype)
    rest = ()
    if k > 1:
        last_group = (len(panels) - 1) // buffers.group * buffers.group
        rows, column = memory.part(last_group % buffers.number * stride, shape), panels[last_group][0]
        rest = rows, index.token_index_map, weights, out, column, d - column, ld, stride
    return _Rounds(
        (index.expert_token_offsets.ptr, index.row_tiles.ptr),
        index.max_row_tiles,
        (grouped_gemm.pointer(memory), buffers.group, buffers.number, ld, stride),
        index.token_index_map,
        (0, index.num_experts, 0, 0),
        progress,
        rest,
    )


def _by_chunks(context: Context, index: Index, weights: Array | None, out: Array, chunks: int) -> _Rounds:
    """All columns of one chunk of tokens after another, through a buffer of two chunks' rows."""
    (L, k), d = index.token_index_map.shape, out.shape[1]
    tokens = launch_config.ceil_div(L, chunks)
    lists = token_chunks(context, index, chunks, tokens)
    counters = launch_config.progress_counters(chunks)
    memory, progress = _with_counters(context, 2 * tokens * k * d, counters, out.dtype)
    first = (chunks - 1) * tokens
    of_rest = first * k, (L - first, k)
    rest = (
        memory,
        lists.buffer_rows.part(*of_rest),
        None if weights is None else weights.part(*of_rest),
        out.part(first * d, (L - first, d)),
        *(0, d, d, launch_config.PANEL_COLUMNS),
    )
    return _Rounds(
        (lists.part_ends, lists.row_tiles),
        lists.max_row_tiles,
        (memory.ptr, len(launch_config.panels(d)), 2, d, tokens * k * d),
        lists.buffer_rows,
        (lists.part_shifts, index.num_experts, chunks, tokens),
        progress,
        rest,
    )
