"""Launch geometry: pure functions of shapes and device limits, no CuPy, no GPU.

A number that a launch and its kernel must agree on is stated here alone. `kernel_constants` names those of a source,
and `loader` gives them to the compiler. The kernels' assumptions about them are asserted when they are compiled.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

TILE_ROWS = 128  # BM of the GEMMs; dispatch emits its tile list for this height
TILE_COLUMNS = 128  # BN of the portable GEMMs
GEMM_THREADS = 128
GEMM_BLOCKS = 2  # blocks of a portable GEMM that a multiprocessor has registers for
STAGE_BYTES = 32 * 1024  # a stage of the portable GEMMs: BM x BK of A beside BK x BN of B
STATIC_BYTES = 2048  # shared memory that a portable GEMM may declare beside its stages
RESERVED_BYTES = 1024  # shared memory that the driver keeps for each block
PANEL_COLUMNS = 256  # width of the portable tier's panels, of Hopper's column tiles, and of a warp's sums
HOPPER_THREADS = 384  # a producer warpgroup and two of consumers
HOPPER_STAGES = 3
MAX_PANEL_COLUMNS = 2048  # greatest width of Hopper's panels
ONE_PANEL_ELEMENTS = 2**24  # elements of a routed buffer that may be one panel: 32 MiB, which stay in the L2 cache
STEP_ROWS = 64  # BK on Hopper: the depth of a stage, and so the rows of a step of the weight gradients
STEP_BYTES = 2 * STEP_ROWS  # a row in a stage, and so BK of e4m3
HOPPER_STAGE_BYTES = 2 * STEP_ROWS * (TILE_ROWS + PANEL_COLUMNS)  # 16-bit elements of A and B
HOPPER_TILE_BYTES = 2 * TILE_ROWS * PANEL_COLUMNS  # a finished tile of 16-bit elements
HOPPER_SPARE_BYTES = 16 * 1024  # memory that an epilogue reads ahead into
WGRAD_SPARE_BYTES = 4 * 1024  # the tokens of a weight gradient
SQUARE_TILE = 192  # rows and columns of a square tile on Hopper
SQUARE_SPARE_BYTES = 9 * 1024  # a bias of a product's square tile for each of 12 warps
SQUARE_ROWS = 8 * SQUARE_TILE  # an expert's average rows for which products have square tiles
MAX_WAVES = 4  # waves of tiles of splits per launch, see split_k
SPLIT_ROWS = 1024  # cost of a split's tile of float32 sums, in the time of a tile's rows
ADDITION_ROWS, ADDITION_ROWS_PER_SPLIT = 512, 16  # cost of adding the sums, in the same unit
MAX_EXPERTS = 4096  # dispatch keeps counters and lists of all experts in shared memory
MAX_SLOTS = 2**31 - TILE_ROWS  # the index lists are int32, and so is a row's number past the end of a tile
MAX_K = 32768  # dispatch divides slots by k through a 32-bit reciprocal, exact while (65536 + k) * k < 2^32
MIN_COLUMNS = 8  # columns of dispatch_route's matrix: a lane reads 8 counters of 16 bits at a time
MIN_COUNT_COLUMNS = 4  # columns of dispatch_count's matrix: a lane reads 4 counters of 32 bits at a time
HELD_PIECES = 5  # 16-byte pieces of dispatch_route's matrix per thread, which keeps their prefix sums in registers
ALONE_SLOTS = 2048  # slots that one block of dispatch_route takes, and counts, by itself
DISPATCH_THREADS = (512, 1024)  # threads per block of both kernels of dispatch.cu
EXPERT_LISTS = 5  # lists of dispatch_route in shared memory, of E + 1 int32 on average
MIN_GROUPS = 3  # groups of threads that sum the counts over blocks; fewer work as one group, without scratch memory
MAX_GRID_Y = 65535  # blocks along a grid's y and z, by CUDA
MAX_ROUTER_EXPERTS = 4096
MAX_ROUTER_K = 64
ROUTER_SUM_BLOCKS = 528  # most blocks with sums or groups: what an H200 holds at once; fixed, so that sums repeat
ROUTER_SUM_ROWS = 32  # rows of the blocks' sums that are added side by side
ROUTER_LISTED = 64  # keys of a token that are ranked by pairs
ROUTER_LANE_K = 8  # experts that one lane chooses and weighs, at most
ROUTER_LISTED_ROW = 208  # bytes: 24 entries that such a lane chooses from, and their number
AGGREGATE_TOKENS = 8  # tokens per block, a warp each
SLOTS_PER_BLOCK = 256  # slots of the router weights' gradients, a thread each
BIAS_COLUMNS, BIAS_ROWS = 64, 32  # bias_bwd.cu: columns per block, and rows at a time
BIAS_THREADS = BIAS_COLUMNS // 8 * BIAS_ROWS  # 8 columns each
BOUND_THREADS = 256  # threads per block of bound_slots.cu
TILES_THREADS = 1024  # threads of square_tiles.cu's one block
PULL_THREADS = 512  # threads per block of pull.cu
PULL_BLOCKS = 64  # blocks of pull.cu for rows of PULL_BYTES or more: fewer fill NVLink, but not the memory here
PULL_BYTES = 4096  # bytes that a warp of pull.cu loads before it stores the first
PULL_SLOT_ROWS = 64  # rows per block of pull_slots
GROUP_COLUMNS = 128  # columns of a row that share a scale in e4m3
SAVED_WARPS = 8  # warps per block of saved_fp8.cu
SAVED_BLOCKS = 16  # blocks per multiprocessor
QUANTIZE_THREADS = 256  # threads per block of quantize.cu
QUANTIZE_VECTORS = 4  # vectors of 8 elements of a row that a thread has in registers
QUANTIZE_TILE = 128  # rows and columns of a weight per block
DECODE_THREADS = 256  # threads per block of decode.cu
DECODE_STEPS = 8  # steps of eight elements that a thread loads before it stores the first
ENCODE_THREADS = 128  # threads per block of encode.cu
RANK_EXPERTS_THREADS = 32  # threads of rank_experts.cu: a warp
LORA_PACK_THREADS = 256  # threads per block of lora_pack.cu and lora_sums.cu
LORA_PACK_TILE = 16 * LORA_PACK_THREADS  # elements per block of lora_pack.cu
LORA_SUMS_TILE = 8 * LORA_PACK_THREADS  # elements per block of lora_sums.cu
LORA_THREADS = 128  # threads per block of lora_rows.cu and lora_gram.cu
LORA_STAGES = 3  # more would leave room for fewer blocks
LORA_ROWS = TILE_ROWS // 2  # rows per block of lora_rows.cu
LORA_COLUMNS = 128  # columns per block of lora_gram.cu
PARTS_GROUPS = 256  # groups of 8 columns per block of wgrad_parts.cu, a thread each
SELECT_THREADS = 1024  # threads per block of selections over many tokens
SPLIT_SHARED_BYTES = 96 * 1024  # columns_split: 383 candidates of 8 bytes for each of 32 columns
FINISH_THREADS = 1024  # threads per block that selects among the candidates of a column
FINISH_SHARED_BYTES = 34 * 1024  # memory of such a block: more than 4,000 candidates of 8 bytes, and counters
SELECT_BITS = 10  # the widest digit of a radix select
SELECT_SHARED_BYTES = 128 * 1024  # counters per block, if a block may have so many
SELECT_HISTOGRAM_BYTES = 64 * 1024 * 1024  # a digit's counters of all columns
PART_COUNTS = 2**16 - 1  # greatest count of a block, which is in 16 bits
COUNT_THREADS = 512  # threads per block of tokens_per_expert and quantile_histogram
CLEAR_THREADS = 256
CLEAR_BLOCKS = 528  # four per multiprocessor of an H200
PAIRS_THREADS = 512  # threads per block of the lists of pairs, a word of 32 pairs each
PAIRS_BLOCKS = 1024
MAX_TILE = 2**30  # greatest tile of token rounding
MAX_BINS = 8192  # greatest number of quantile_histogram's bins: a block's shared memory has room for one expert's
DEFAULT_SHARED_BYTES = 48 * 1024  # more needs an opt-in per kernel


@dataclass(frozen=True)
class DeviceLimits:
    """The facts about a device on which configurations depend, read once per device."""

    compute_capability: int  # 90 for sm_90
    multiprocessors: int
    shared_bytes_per_block: int  # opt-in limit
    shared_bytes_per_multiprocessor: int
    tier: str = "sm80"  # the kernel family, see `tier`


H200 = DeviceLimits(90, 132, 232448, 233472, "sm90")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


_PORTABLE = {
    "BM": TILE_ROWS,
    "BN": TILE_COLUMNS,
    "THREADS": GEMM_THREADS,
    "BLOCKS_PER_MULTIPROCESSOR": GEMM_BLOCKS,
    "STAGE_BYTES": STAGE_BYTES,
}
_HOPPER = {
    "BM": TILE_ROWS,
    "BN": PANEL_COLUMNS,
    "BK": STEP_ROWS,
    "THREADS": HOPPER_THREADS,
    "STAGES": HOPPER_STAGES,
    "STAGE_BYTES": HOPPER_STAGE_BYTES,
    "TILE_BYTES": HOPPER_TILE_BYTES,
    "SPARE_BYTES": HOPPER_SPARE_BYTES,
}
_SUMS = {
    "TOKENS_PER_BLOCK": AGGREGATE_TOKENS,
    "SLOTS_PER_BLOCK": SLOTS_PER_BLOCK,
    "PANEL_COLUMNS": PANEL_COLUMNS,
}
_CONSTANTS = {
    "grouped_gemm_sm80.cu": _PORTABLE | {"STATIC_BYTES": STATIC_BYTES},
    "grouped_wgrad_sm80.cu": _PORTABLE,
    # setmaxnreg moves registers from the producer's threads to the consumers'
    "grouped_gemm_sm90.cu": _HOPPER
    | {"PRODUCER_REGISTERS": 72, "CONSUMER_REGISTERS": 216, "GROUP_COLUMNS": GROUP_COLUMNS},
    "grouped_wgrad_sm90.cu": _HOPPER
    | {"PRODUCER_REGISTERS": 56, "CONSUMER_REGISTERS": 224, "SPARE_BYTES": WGRAD_SPARE_BYTES},
    "bias_bwd.cu": {"COLUMNS": BIAS_COLUMNS, "ROWS": BIAS_ROWS},
    "wgrad_parts.cu": {"GROUPS_PER_BLOCK": PARTS_GROUPS},
    "quantize.cu": {
        "THREADS": QUANTIZE_THREADS,
        "ROW_VECTORS": QUANTIZE_VECTORS,
        "TILE": QUANTIZE_TILE,
    },
    "saved_fp8.cu": {"WARPS": SAVED_WARPS, "GROUP_COLUMNS": GROUP_COLUMNS},
    "decode.cu": {"THREADS": DECODE_THREADS, "STEPS": DECODE_STEPS},
    "encode.cu": {"THREADS": ENCODE_THREADS},
    "lora_pack.cu": {"THREADS": LORA_PACK_THREADS, "TILE": LORA_PACK_TILE},
    "lora_rows.cu": {"THREADS": LORA_THREADS, "ROWS": LORA_ROWS, "STAGES": LORA_STAGES},
    "lora_gram.cu": {"THREADS": LORA_THREADS, "STAGES": LORA_STAGES},
    "lora_sums.cu": {"THREADS": LORA_PACK_THREADS, "TILE": LORA_SUMS_TILE},
    "bound_slots.cu": {"BOUND_THREADS": BOUND_THREADS},
    "rank_experts.cu": {"THREADS": RANK_EXPERTS_THREADS},
    "square_tiles.cu": {"TILES_THREADS": TILES_THREADS, "TILE_ROWS": SQUARE_TILE},
    "pull.cu": {
        "PULL_THREADS": PULL_THREADS,
        "SLOT_ROWS": PULL_SLOT_ROWS,
        "TOKENS_PER_BLOCK": AGGREGATE_TOKENS,
        "PANEL_COLUMNS": PANEL_COLUMNS,
    },
    "push.cu": _SUMS,
    "slots.cu": _SUMS,
    "aggregation.cu": _SUMS,
    "selection.cu": {
        "SELECT_THREADS": SELECT_THREADS,
        "SELECT_BITS": SELECT_BITS,
        "SPLIT_SHARED_BYTES": SPLIT_SHARED_BYTES,
        "PAIRS_BLOCKS": PAIRS_BLOCKS,
        "FINISH_THREADS": FINISH_THREADS,
        "FINISH_SHARED_BYTES": FINISH_SHARED_BYTES,
        "MAX_EXPERTS": MAX_EXPERTS,
        "DEFAULT_SHARED_BYTES": DEFAULT_SHARED_BYTES,
    },
    "pairs.cu": {"PAIRS_THREADS": PAIRS_THREADS, "PAIRS_BLOCKS": PAIRS_BLOCKS},
    "capacity.cu": {
        "SELECT_THREADS": SELECT_THREADS,
        "SELECT_BITS": SELECT_BITS,
        "FINISH_THREADS": FINISH_THREADS,
        "FINISH_SHARED_BYTES": FINISH_SHARED_BYTES,
    },
    "balance.cu": {"COUNT_THREADS": COUNT_THREADS},
    "clear.cu": {"CLEAR_THREADS": CLEAR_THREADS},
    "router_forward.cu": {"MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS, "MAX_LISTED": ROUTER_LISTED},
    "router_lane.cu": {
        "MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS,
        "MAX_LISTED": ROUTER_LISTED,
        "LISTED_ROW_BYTES": ROUTER_LISTED_ROW,
    },
    "router_backward.cu": {"MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS},
    "router_sums.cu": {"ROWS_AT_ONCE": ROUTER_SUM_ROWS},
    "dispatch.cu": {
        "TILE_ROWS": TILE_ROWS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "MAX_K": MAX_K,
        "MAX_BLOCK_THREADS": DISPATCH_THREADS[-1],
        "MIN_COLUMNS": MIN_COLUMNS,
        "MIN_COUNT_COLUMNS": MIN_COUNT_COLUMNS,
        "HELD_PIECES": HELD_PIECES,
        "EXPERT_LISTS": EXPERT_LISTS,
        "MIN_GROUPS": MIN_GROUPS,
    },
}


def kernel_constants(source: str) -> dict[str, int]:
    """Returns the constants that every variant of a kernel source gets as -DNAME=value."""
    return dict(_CONSTANTS[source])


def pull_blocks(rows: int, row_bytes: int) -> int:
    """Returns the blocks of pull_rows. Warps that load short rows have less on its way, so there are more of them."""
    most = ceil_div(PULL_BLOCKS * PULL_BYTES, min(max(row_bytes, 512), PULL_BYTES))
    return min(ceil_div(rows, PULL_THREADS // 32), most)


def quantize_threads(d: int) -> int:
    """Returns the threads of a row of d elements in quantize.cu: a power of two, QUANTIZE_VECTORS each if possible."""
    threads = 32
    while threads < 1024 and threads * QUANTIZE_VECTORS * 8 < d:
        threads *= 2
    return threads


class SavedFp8(NamedTuple):
    """The layout of the first layer that save="fp8" keeps in one buffer of bytes.

    R rows of h columns of each half in e4m3, in the order of w1's columns; from `scales` on their float32 scales
    (R, groups, halves), one for each row and GROUP_COLUMNS columns of a half, of which the last group may have fewer.
    """

    scales: int
    groups: int
    nbytes: int


def saved_fp8(rows: int, h: int, halves: int) -> SavedFp8:
    """Returns the layout of the saved first layer. `rows` may be a symbolic size."""
    groups = ceil_div(h, GROUP_COLUMNS)
    scales = ceil_div(rows * h * halves, 16) * 16
    return SavedFp8(scales, groups, scales + 4 * rows * groups * halves)


def check_forced_tier(forced: str | None) -> None:
    """Raises ValueError for a tier that does not exist. forced: the value of MOEBLAZE_TIER."""
    if forced not in (None, "", "sm80", "sm90"):
        raise ValueError(f"moeblaze_cupy: MOEBLAZE_TIER: expected sm80 or sm90, got {forced!r}")


def tier(compute_capability: int, forced: str | None = None) -> str:
    """Returns the kernel family for a compute capability: Hopper's for 90, else the portable one.

    forced: "sm80" or "sm90", the value of MOEBLAZE_TIER. Raises RuntimeError below 80, or if the GPU lacks it.
    """
    if compute_capability < 80:
        raise RuntimeError(
            "moeblaze_cupy: compute capability: expected 8.0 or later (mma.sync on bf16, cp.async), "
            f"got {compute_capability // 10}.{compute_capability % 10}"
        )
    check_forced_tier(forced)
    if forced == "sm90" and compute_capability != 90:
        raise RuntimeError(
            f"moeblaze_cupy: MOEBLAZE_TIER=sm90: expected compute capability 9.0, got {compute_capability / 10}"
        )
    return forced or ("sm90" if compute_capability == 90 else "sm80")


def max_row_tiles(
    num_slots: int, num_experts: int, minimum: Callable[[int, int], int] = min, height: int = TILE_ROWS
) -> int:
    """Returns an upper bound of row tiles for any routing: full tiles plus one partial tile per non-empty expert.

    minimum: `min`, or its replacement for symbolic sizes, which `min` would compare.
    """
    return num_slots // height + minimum(num_experts, num_slots)


@functools.lru_cache(maxsize=1024)
def index_lists(
    num_tokens: int,
    k: int | None,
    num_experts: int,
    num_pairs: int | None = None,
    minimum: Callable[[int, int], int] = min,
    bounded: bool = False,
) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Returns the places of dispatch's lists in their one int32 buffer, in elements, and the size of the buffer.

    The first value gives the first element and the shape of each list. Lists follow each other without gaps.
    token_index_map is written 16 bytes at a time, so it comes first. The pairs of row_tiles are read 8 bytes at a
    time, so an even number of elements comes before it. num_pairs: the number of slots if tokens have any number
    of them; k is None then. bounded: there are at most max_slots rows, and a count of the slots without a row.
    """
    slots_shape = (num_tokens, k) if k is not None else (0 if num_pairs is None else num_pairs,)
    slots = math.prod(slots_shape)
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for name, shape in (
        ("token_index_map", slots_shape),
        ("expert_token_indices", (slots,)),
        ("row_tiles", (max_row_tiles(slots, num_experts, minimum) + 1, 2)),
        ("expert_token_offsets", (num_experts + 1,)),
        ("experts_by_load", (num_experts,)),
        *((("token_offsets", (num_tokens + 1,)),) if k is None else ()),
        *((("dropped", (1,)),) if bounded else ()),
    ):
        places[name] = end, shape
        end += math.prod(shape)
    return places, end


def size_class(number: int) -> int:
    """Returns `number` rounded up to one of 16 sizes per power of two, at most a sixteenth more.

    Buffers whose sizes change from step to step take these sizes, so that their layouts, and with them launch records,
    come again, and an allocator gets the same few sizes.
    """
    if number <= 16:
        return max(number, 0)
    step = 1 << (number - 1).bit_length() - 5
    return ceil_div(number, step) * step
