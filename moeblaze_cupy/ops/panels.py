"""Products of the experts summed over the k slots of each token, through panels of columns:
kernels_cu/grouped_gemm_*.cu and aggregation.cu in turn.
"""

from moeblaze_cupy import launch_config
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
    k, d = index.token_index_map.shape[1], out.shape[1]
    tier = grouped_gemm.config_of(context, entry, a, weight, d, K, activation)[0].tier
    call = context, entry, index, a, weight
    if launch_config.rows_go_to_tokens(k, tier):
        grouped_gemm.gemm(*call, d, K, activation, product=out, weights=weights, to_tokens=True)
        return
    panels = launch_config.panels(d, index.num_slots, tier)
    in_place = launch_config.panel_takes_left_operands_rows(d, a.shape[1] if overwrites else 0, tier)
    memory = a if in_place else context.empty((index.num_slots, panels[0][1]), out.dtype)
    for first_column, width in panels:
        panel = memory if in_place else memory.part(0, (index.num_slots, width))
        grouped_gemm.gemm(*call, width, K, activation, first_column=first_column, product=panel)
        aggregate(context, panel, index.token_index_map, weights, out, first_column, width)
