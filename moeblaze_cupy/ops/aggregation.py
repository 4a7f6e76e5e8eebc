"""Sums over the k slots of each token: kernels_cu/aggregation.cu."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context

TOKENS_PER_BLOCK = launch_config.AGGREGATE_TOKENS
SLOTS_PER_BLOCK = launch_config.SLOTS_PER_BLOCK


def aggregate(
    context: Context,
    panel: Array,
    token_index_map: Array,
    weights: Array | None,
    out: Array,
    first_column: int,
    columns: int,
) -> None:
    """out[:, first_column : first_column + columns] from the first `columns` of panel's rows.

    token_index_map (L, k) names a row for each slot. weights (L, k) scale the slots; None leaves them unscaled (the
    gradient of x).
    """
    (L, k), d = token_index_map.shape, out.shape[1]
    aligned = d % 8 == 0 and first_column % 8 == 0 and out.ptr % 16 == 0
    suffix = "" if aligned else "_unaligned"
    weights_dtype = "float32" if weights is None else weights.dtype
    context.launch(
        loader.entry("aggregation.cu", f"aggregate_{out.dtype}_{weights_dtype}{suffix}"),
        (launch_config.ceil_div(L, TOKENS_PER_BLOCK), launch_config.ceil_div(columns, launch_config.PANEL_COLUMNS)),
        32 * TOKENS_PER_BLOCK,
        (
            *(panel.ptr, token_index_map.ptr, 0 if weights is None else weights.ptr, out.ptr),
            *(panel.shape[1], L, k, d, first_column, columns),
        ),
    )


def weights_bwd(context: Context, partial_sums: Array, token_index_map: Array, grad_weights: Array) -> None:
    """Gradient of the router weights (L, k) from <dA, A> of each routed slot, partial_sums (parts, L*k)."""
    num_slots = token_index_map.size
    context.launch(
        loader.entry("aggregation.cu", f"weights_bwd_{grad_weights.dtype}"),
        (launch_config.ceil_div(num_slots, SLOTS_PER_BLOCK),),
        SLOTS_PER_BLOCK,
        (partial_sums.ptr, token_index_map.ptr, grad_weights.ptr, num_slots, partial_sums.shape[0]),
    )


def weights_by_row(context: Context, weights: Array, token_index_map: Array) -> Array:
    """The router weight of each of the experts' rows (L*k,) float32; rows past the routed ones are not written."""
    num_slots = token_index_map.size
    row_weights = context.empty((num_slots,), "float32")
    context.launch(
        loader.entry("aggregation.cu", f"weights_by_row_{weights.dtype}"),
        (launch_config.ceil_div(num_slots, SLOTS_PER_BLOCK),),
        SLOTS_PER_BLOCK,
        (weights.ptr, token_index_map.ptr, row_weights.ptr, num_slots),
    )
    return row_weights
