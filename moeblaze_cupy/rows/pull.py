"""Rows of other GPUs' memory: kernels_cu/rows/pull.cu. Each function makes the record of one launch.

rows_per_peer: L, the tokens of each of P ranks. offset: bytes from a peer's address to what is read there. d is a
multiple of 8.
"""

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, cached
from moeblaze_cupy.frameworks import ITEMSIZE
from moeblaze_cupy.rows import config as rows_config


def _suffix(ids_dtype: str, dtype: str) -> str:
    return f"{ids_dtype}_{ITEMSIZE[dtype]}"


@cached
def pull_slots(
    P: int,
    rows_per_peer: int,
    k: int,
    ids_offset: int,
    weights_offset: int,
    first_expert: int,
    experts_per_peer: int,
    ids_dtype: str,
    dtype: str,
) -> Launch:
    """Pulls slots. Addresses: peers (P,) uint64, local_ids (P*L, k) int32, weights (P*L, k), needed (P*L,) bool."""
    num_rows = P * rows_per_peer
    return Launch(
        loader.entry("pull.cu", f"pull_slots_{_suffix(ids_dtype, dtype)}"),
        (launch_config.ceil_div(num_rows, rows_config.PULL_SLOT_ROWS),),
        rows_config.PULL_THREADS,
        ("peers", "local_ids", "weights", "needed"),
        {
            "ids_offset": ids_offset,
            "weights_offset": weights_offset,
            "num_rows": num_rows,
            "rows_per_peer": rows_per_peer,
            "k": k,
            "first_expert": first_expert,
            "experts_per_peer": experts_per_peer,
        },
    )


@cached
def pull_rows(P: int, rows_per_peer: int, d: int, dtype: str, offset: int) -> Launch:
    """Pulls rows. Addresses: peers (P,) uint64, needed (P*L,) bool, out (P*L, d), where unneeded rows stay."""
    return Launch(
        loader.entry("pull.cu", "pull_rows"),
        (rows_config.pull_blocks(P * rows_per_peer, d * ITEMSIZE[dtype]),),
        rows_config.PULL_THREADS,
        ("peers", "needed", "out"),
        {"offset": offset, "P": P, "rows_per_peer": rows_per_peer, "pieces": d * ITEMSIZE[dtype] // 16},
    )


@cached
def pull_scaled_rows(P: int, rows_per_peer: int, d: int, offset: int, scales_offset: int) -> Launch:
    """Pulls e4m3, d a multiple of 16. Addresses: peers (P,) uint64, needed (P*L,) bool, out (P*L, d), scales (P*L,)."""
    sizes = {"P": P, "rows_per_peer": rows_per_peer, "pieces": d // 16}
    return Launch(
        loader.entry("pull.cu", "pull_scaled_rows"),
        (rows_config.pull_blocks(P * rows_per_peer, d),),
        rows_config.PULL_THREADS,
        ("peers", "needed", "out", "scales"),
        {"offset": offset, "scales_offset": scales_offset, **sizes},
    )


@cached
def pull_sum(
    P: int, L: int, k: int, d: int, first_row: int, experts_per_peer: int, ids_dtype: str, dtype: str, offset: int
) -> Launch:
    """Computes out[t] = sum over ranks that have an expert of token t, in order, of their row first_row + t.

    Addresses: peers (P,) uint64, ids (L, k), out (L, d).
    """
    return Launch(
        loader.entry("pull.cu", f"pull_sum_{dtype}_{ids_dtype}"),
        (
            launch_config.ceil_div(L, rows_config.AGGREGATE_TOKENS),
            launch_config.ceil_div(d, launch_config.PANEL_COLUMNS),
        ),
        32 * rows_config.AGGREGATE_TOKENS,
        ("peers", "ids", "out"),
        {
            "offset": offset,
            "first_row": first_row,
            "L": L,
            "P": P,
            "k": k,
            "d": d,
            "experts_per_peer": experts_per_peer,
        },
    )


@cached
def pull_values(
    P: int, num_slots: int, first_slot: int, experts_per_peer: int, ids_dtype: str, dtype: str, offset: int
) -> Launch:
    """Copies out[s] = value first_slot + s of the rank that has slot s's expert, 0 without one.

    Addresses: peers (P,) uint64, ids (num_slots,), out (num_slots,).
    """
    return Launch(
        loader.entry("pull.cu", f"pull_values_{_suffix(ids_dtype, dtype)}"),
        (launch_config.ceil_div(num_slots, rows_config.PULL_THREADS),),
        rows_config.PULL_THREADS,
        ("peers", "ids", "out"),
        {
            "offset": offset,
            "first_slot": first_slot,
            "num_slots": num_slots,
            "num_experts": P * experts_per_peer,
            "experts_per_peer": experts_per_peer,
        },
    )
