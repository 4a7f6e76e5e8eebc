"""Sums over the slots of each token: `aggregation.cu` and `slots.cu`. Each function makes a launch's record."""

from typing import NamedTuple

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.dispatch.config import SLOTS_PER_BLOCK
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.rows import config as rows_config

# Of the kernels that sum over slots, also of push.cu, which reads the last two and has no out, offsets and source.
SUM_ADDRESSES = ("panel", "token_index_map", "weights", "out", "token_offsets", "source", "peers", "needed")


class Source(NamedTuple):
    """The rows that identity experts add, x or grad_out: their misalignment, and the dtype of the router weights."""

    misalignment: int
    weights_dtype: str


def aggregate(
    index: IndexLayout,
    dtype: str,
    weights_dtype: str | None,
    d: int,
    first_column: int,
    columns: int,
    panel_ld: int,
    source: Source | None = None,
    misalignment: int = 0,
) -> Launch:
    """Computes out[:, first_column : first_column + columns] from the first `columns` of panel's rows, panel_ld apart.

    Addresses: panel, token_index_map that names a row for each slot, weights that scale the slots, out (L, d),
    token_offsets where tokens have any number of slots, and source, the rows of identity experts. weights_dtype None
    leaves slots unscaled, as the gradient of x does; those of identity experts are scaled in any case. misalignment:
    that of the panel.
    """
    aligned = d % 8 == 0 and first_column % 8 == 0 and not misalignment and not (source and source.misalignment)
    suffix = "" if aligned else "_unaligned"
    scaled_by = weights_dtype or (source.weights_dtype if source else "float32")
    sizes = {
        "L": index.num_tokens,
        "k": index.k or 0,
        "d": d,
        "first_column": first_column,
        "columns": columns,
        "panel_ld": panel_ld,
    }
    plain = index.k is not None and source is None
    if not plain:
        sizes["scales_rows"] = int(weights_dtype is not None)
    return Launch(
        loader.entry("aggregation.cu", f"aggregate_{dtype}_{scaled_by}{suffix}")
        if plain
        else loader.entry("slots.cu", f"aggregate_slots_{dtype}_{scaled_by}{suffix}"),
        (
            launch_config.ceil_div(index.num_tokens, rows_config.AGGREGATE_TOKENS),
            launch_config.ceil_div(columns, launch_config.PANEL_COLUMNS),
        ),
        32 * rows_config.AGGREGATE_TOKENS,
        SUM_ADDRESSES,
        sizes,
        why=(_accesses(aligned),),
    )


def _accesses(aligned: bool) -> str:
    """Returns the reason for how the sums over slots read."""
    if aligned:
        return "16 bytes at a time: d and the panel's first column are multiples of 8"
    return "an element at a time: d or the panel's first column is no multiple of 8"


def identity_weights(index: IndexLayout, x: Layout, grad_out: Layout, weights_dtype: str) -> Launch:
    """Computes the gradient of the router weights of identity experts' slots, <grad_out, x> of their tokens, no other.

    Addresses: x, grad_out, token_index_map, token_offsets where tokens have any number of slots, grad_weights.
    """
    L, d = x.shape
    aligned = d % 8 == 0 and not (x.misalignment or grad_out.misalignment)
    return Launch(
        loader.entry("slots.cu", f"identity_weights_{x.dtype}_{weights_dtype}{'' if aligned else '_unaligned'}"),
        (launch_config.ceil_div(L, rows_config.AGGREGATE_TOKENS),),
        32 * rows_config.AGGREGATE_TOKENS,
        ("x", "grad_out", "token_index_map", "token_offsets", "grad_weights"),
        {"L": L, "k": index.k or 0, "d": d},
        why=(_accesses(aligned),),
    )


def slots_by_row(index: IndexLayout) -> Launch:
    """Writes the slot of each of the R rows of experts (R,) int32, -1 past the routed ones, and a weight of 1 for each.

    Addresses: token_index_map, expert_token_offsets, slots, row_weights (R,) float32, or 0 for none.
    """
    addresses = ("token_index_map", "expert_token_offsets", "slots", "row_weights")
    return _per_slot(index, "slots_by_row", addresses, {"num_experts": index.num_experts}, "slots.cu")


def weights_bwd(index: IndexLayout, dtype: str, parts: int) -> Launch:
    """Computes the gradient of the router weights (L, k) from <dA, A> of each routed slot.

    Addresses: partial_sums (parts, rows), token_index_map, grad_weights.
    """
    addresses = ("partial_sums", "token_index_map", "grad_weights")
    return _per_slot(index, f"weights_bwd_{dtype}", addresses, {"num_rows": index.num_rows, "parts": parts})


def weights_by_row(index: IndexLayout, dtype: str) -> Launch:
    """Writes the router weight of each of the R rows of experts (R,) float32, but for rows past the routed ones.

    Addresses: weights, token_index_map, row_weights.
    """
    return _per_slot(index, f"weights_by_row_{dtype}", ("weights", "token_index_map", "row_weights"), {})


def _per_slot(
    index: IndexLayout, entry: str, addresses: tuple[str, ...], scalars: dict[str, int], source: str = "aggregation.cu"
) -> Launch:
    grid = (launch_config.ceil_div(index.num_slots, SLOTS_PER_BLOCK),)
    variant = loader.entry(source, entry)
    return Launch(variant, grid, SLOTS_PER_BLOCK, addresses, {"num_slots": index.num_slots, **scalars})
