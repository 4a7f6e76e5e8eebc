"""Rows of other GPUs' memory by index: kernels_cu/pull.cu. Each function makes the record of one launch."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import ITEMSIZE
from moeblaze_cupy.runtime import Launch, cached


@cached
def pull_rows(num_rows: int, rows_per_peer: int, d: int, dtype: str) -> Launch:
    """out[i] = row sources[i] of the peers' rows, which count on from peer to peer; of the others nothing is written.

    Addresses: peers (P,) uint64, sources (num_rows,) int32, out (num_rows, d). d is a multiple of 8.
    """
    rows_per_block = launch_config.PULL_THREADS // 32
    return Launch(
        loader.entry("pull.cu", "pull_rows"),
        (min(launch_config.ceil_div(num_rows, rows_per_block), launch_config.PULL_BLOCKS),),
        launch_config.PULL_THREADS,
        ("peers", "sources", "out"),
        {"num_rows": num_rows, "rows_per_peer": rows_per_peer, "pieces": d * ITEMSIZE[dtype] // 16},
    )


@cached
def pull_sum(L: int, P: int, d: int, dtype: str) -> Launch:
    """out[t] = sum over peers j, in order, of peer j's row positions[t, j] where that is not below 0.

    Addresses: peers (P,) uint64, positions (L, P) int32, out (L, d). d is a multiple of 8.
    """
    return Launch(
        loader.entry("pull.cu", f"pull_sum_{dtype}"),
        (
            launch_config.ceil_div(L, launch_config.AGGREGATE_TOKENS),
            launch_config.ceil_div(d, launch_config.PANEL_COLUMNS),
        ),
        32 * launch_config.AGGREGATE_TOKENS,
        ("peers", "positions", "out"),
        {"L": L, "P": P, "d": d},
    )
