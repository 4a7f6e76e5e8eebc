"""Sums over the k slots of each token: kernels_cu/aggregation.cu. Each function makes the record of one launch."""

from moeblaze_cupy import launch_config, loader, reasons
from moeblaze_cupy.ops.dispatch import IndexLayout
from moeblaze_cupy.runtime import Launch


def aggregate(
    index: IndexLayout,
    dtype: str,
    weights_dtype: str | None,
    d: int,
    first_column: int,
    columns: int,
    panel_ld: int,
    misalignment: int = 0,
) -> Launch:
    """out[:, first_column : first_column + columns] from the first `columns` of panel's rows, `panel_ld` apart.

    Addresses: panel, token_index_map (L, k) that names a row for each slot, weights (L, k) that scale the slots, and
    out (L, d). weights_dtype None leaves slots unscaled, as the gradient of x does. misalignment: of the panel.
    """
    aligned = d % 8 == 0 and first_column % 8 == 0 and not misalignment
    suffix = "" if aligned else "_unaligned"
    return Launch(
        loader.entry("aggregation.cu", f"aggregate_{dtype}_{weights_dtype or 'float32'}{suffix}"),
        (
            launch_config.ceil_div(index.num_tokens, launch_config.AGGREGATE_TOKENS),
            launch_config.ceil_div(columns, launch_config.PANEL_COLUMNS),
        ),
        32 * launch_config.AGGREGATE_TOKENS,
        ("panel", "token_index_map", "weights", "out"),
        {
            "L": index.num_tokens,
            "k": index.k,
            "d": d,
            "first_column": first_column,
            "columns": columns,
            "panel_ld": panel_ld,
        },
        why=(reasons.accesses(aligned),),
    )


def weights_bwd(index: IndexLayout, dtype: str, parts: int) -> Launch:
    """The gradient of the router weights (L, k) from <dA, A> of each routed slot.

    Addresses: partial_sums (parts, rows), token_index_map, grad_weights.
    """
    addresses = ("partial_sums", "token_index_map", "grad_weights")
    return _per_slot(index, f"weights_bwd_{dtype}", addresses, {"num_rows": index.num_rows, "parts": parts})


def weights_by_row(index: IndexLayout, dtype: str) -> Launch:
    """The router weight of each of the experts' rows (L*k,) float32; rows past the routed ones are not written.

    Addresses: weights, token_index_map, row_weights.
    """
    return _per_slot(index, f"weights_by_row_{dtype}", ("weights", "token_index_map", "row_weights"), {})


def _per_slot(index: IndexLayout, entry: str, addresses: tuple[str, ...], scalars: dict[str, int]) -> Launch:
    grid = (launch_config.ceil_div(index.num_slots, launch_config.SLOTS_PER_BLOCK),)
    variant = loader.entry("aggregation.cu", entry)
    return Launch(variant, grid, launch_config.SLOTS_PER_BLOCK, addresses, {"num_slots": index.num_slots, **scalars})
