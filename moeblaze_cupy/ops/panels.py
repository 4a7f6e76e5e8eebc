"""Products of the experts summed over the k slots of each token, through panels of up to 256 columns.

On Hopper one launch of kernels_cu/grouped_panels_sm90.cu, and for k > 1 one of aggregation.cu, which sums the last
group of panels; elsewhere kernels_cu/grouped_gemm_sm80.cu and aggregation.cu in turn.
"""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.ops import grouped_gemm
from moeblaze_cupy.ops.aggregation import aggregate
from moeblaze_cupy.ops.grouped_gemm import Index, Weight


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
    (L, k), d, R = index.token_index_map.shape, out.shape[1], index.num_slots
    panels = launch_config.panels(d)
    config, aligned = grouped_gemm.config_of(context, entry, a, weight, d, K, activation)
    shape = R, panels[0][1]
    if config.tier == "sm80":
        panel = context.empty(shape, out.dtype)
        for first_column, width in panels:
            columns = {"first_column": first_column, "columns": width, "product": panel}
            grouped_gemm.gemm(context, entry, index, a, weight, d, K, activation, **columns)
            aggregate(context, panel, index.token_index_map, weights, out, first_column, width, width)
        return
    buffers, stride = launch_config.panel_buffers(d, k, a.shape[1] if overwrites else 0), R * shape[1]
    ld, panel, progress = a.shape[1] if buffers.in_place else shape[1], a if buffers.in_place else None, None
    if buffers.allocated:
        # the panels, then progress, (2, panels) int32, in one buffer: every allocation takes as long as a launch
        size, counters = buffers.allocated * stride, 2 * buffers.counters  # in elements of 16 bits
        panel = context.empty((size + counters,), out.dtype)
        if counters:
            progress = panel.part(size, (counters,))
            loader.clear(context, progress)
    options = {"weights_dtype": "float32" if weights is None else weights.dtype, "k": k}
    variant = grouped_gemm.variant_of(entry, a, weight, config, aligned, activation, **options)
    args = (
        grouped_gemm.rows_map(a, launch_config.TILE_ROWS),
        *grouped_gemm.tensor_maps(weight, entry, d, K),
        d,
        K,
        index.expert_token_indices.ptr,
        index.expert_token_offsets.ptr,
        index.row_tiles.ptr,
        grouped_gemm.pointer(panel),
        buffers.group,
        buffers.number,
        ld,
        stride,
        index.token_index_map.ptr,
        grouped_gemm.pointer(weights),
        out.ptr,
        L,
        k,
        grouped_gemm.pointer(progress),
    )
    blocks = config.blocks(d, index.max_row_tiles, loader.device_limits(context.device))
    loader.launch(context, variant, (blocks,), config.threads, args, config.shared_bytes)
    if k > 1:
        last_group = (len(panels) - 1) // buffers.group * buffers.group
        rows, first_column = panel.part(last_group % buffers.number * stride, shape), panels[last_group][0]
        aggregate(context, rows, index.token_index_map, weights, out, first_column, d - first_column, ld, stride)
