"""Launch geometry of sums over slots and of rows of other GPUs; see `launch_config`."""

from moeblaze_cupy.cuda.launch_config import PANEL_COLUMNS, ceil_div
from moeblaze_cupy.dispatch.config import SLOTS_PER_BLOCK

AGGREGATE_TOKENS = 8  # tokens per block, a warp each
PULL_THREADS = 512  # threads per block of pull.cu
PULL_BLOCKS = 64  # blocks of pull.cu for rows of PULL_BYTES or more: fewer fill NVLink, but not the memory here
PULL_BYTES = 4096  # bytes that a warp of pull.cu loads before it stores the first
PULL_SLOT_ROWS = 64  # rows per block of pull_slots

_SUMS = {
    "TOKENS_PER_BLOCK": AGGREGATE_TOKENS,
    "SLOTS_PER_BLOCK": SLOTS_PER_BLOCK,
    "PANEL_COLUMNS": PANEL_COLUMNS,
}
CONSTANTS = {
    "pull.cu": {
        "PULL_THREADS": PULL_THREADS,
        "SLOT_ROWS": PULL_SLOT_ROWS,
        "TOKENS_PER_BLOCK": AGGREGATE_TOKENS,
        "PANEL_COLUMNS": PANEL_COLUMNS,
    },
    "push.cu": _SUMS,
    "slots.cu": _SUMS,
    "aggregation.cu": _SUMS,
}


def pull_blocks(rows: int, row_bytes: int) -> int:
    """Returns the blocks of pull_rows. Warps that load short rows have less on its way, so there are more of them."""
    most = ceil_div(PULL_BLOCKS * PULL_BYTES, min(max(row_bytes, 512), PULL_BYTES))
    return min(ceil_div(rows, PULL_THREADS // 32), most)
