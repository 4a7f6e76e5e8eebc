"""Launch geometry: pure functions of shapes and device limits, no CuPy, no GPU.

The numbers here mirror the constants of the kernel sources (`gemm_core_sm80.cuh`, `dispatch.cu`,
`router.cu`, `aggregation.cu`).
"""

import os
from dataclasses import dataclass

TILE_ROWS = 128  # BM of the GEMMs; dispatch emits its tile list for this height
TILE_COLUMNS = 128  # BN
GEMM_THREADS = 128
STAGE_BYTES = 32 * 1024
PANEL_COLUMNS = 256  # width of the (L*k, 256) buffer the expert outputs pass through
MAX_EXPERTS = 4096  # dispatch: counters and three lists per expert, beside the block's slots, in shared memory
MAX_SLOTS = 2**31 - 1  # the index lists are int32
MAX_K = 32768  # dispatch divides slots by k through a 32-bit reciprocal, exact while (65536 + k) * k < 2^32
MAX_ROUTER_EXPERTS = 1024
MAX_ROUTER_K = 32
DEFAULT_SHARED_BYTES = 48 * 1024  # more needs an opt-in per kernel


@dataclass(frozen=True)
class DeviceLimits:
    """What the configurations depend on, read once per device."""

    compute_capability: int  # 90 for sm_90
    multiprocessors: int
    shared_bytes_per_block: int  # opt-in limit
    shared_bytes_per_multiprocessor: int


H200 = DeviceLimits(90, 132, 232448, 233472)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tier(compute_capability: int) -> str:
    """Best kernel family for a compute capability such as 90. Raises RuntimeError below 80.

    MOEBLAZE_TIER=sm80 or sm90 forces one.
    """
    if compute_capability < 80:
        raise RuntimeError(
            "moeblaze_cupy: compute capability: expected 8.0 or later (mma.sync on bf16, cp.async), "
            f"got {compute_capability // 10}.{compute_capability % 10}"
        )
    forced = os.environ.get("MOEBLAZE_TIER")
    if forced not in (None, "", "sm80", "sm90"):
        raise ValueError(f"moeblaze_cupy: MOEBLAZE_TIER: expected sm80 or sm90, got {forced!r}")
    if forced == "sm90" and compute_capability != 90:
        raise RuntimeError(
            f"moeblaze_cupy: MOEBLAZE_TIER=sm90: expected compute capability 9.0, got {compute_capability / 10}"
        )
    return forced or ("sm90" if compute_capability == 90 else "sm80")


@dataclass(frozen=True)
class GemmConfig:
    """Geometry of one grouped GEMM launch."""

    tier: str
    tile_columns: int  # of the result; a gated up projection's tile holds as many of gate and of up
    threads: int
    shared_bytes: int
    stages: int

    def blocks(self, columns: int, max_row_tiles: int, limits: DeviceLimits) -> int:
        """The portable tier has a block per tile, Hopper's at most one per multiprocessor."""
        tiles = ceil_div(columns, self.tile_columns) * max_row_tiles
        return tiles if self.tier == "sm80" else min(tiles, limits.multiprocessors)


def gemm(dtype: str, aligned: bool, split: bool, limits: DeviceLimits) -> GemmConfig:
    """The grouped GEMM kernel for a call: Hopper's for 16-bit elements and sizes that are multiples of 8.

    split: a gated up projection, half of whose tile is gate.
    """
    if tier(limits.compute_capability) == "sm90" and aligned and dtype in ("bfloat16", "float16"):
        return GemmConfig("sm90", 128 if split else 256, 384, 3 * 48 * 1024 + 64 * 1024 + 16 * 1024, 3)
    stages = gemm_stages(limits)
    return GemmConfig("sm80", 64 if split else 128, GEMM_THREADS, stages * STAGE_BYTES, stages)


def gemm_stages(limits: DeviceLimits) -> int:
    """Pipeline depth of the portable GEMMs.

    Two blocks per multiprocessor hide each other's epilogue, so depth yields to the second block: 3
    stages where 2 blocks of 96 KiB fit (sm_90, sm_100), 2 on sm_80's 164 KiB, and 3 with one block where
    even 2 x 64 KiB do not fit (sm_86, sm_89, sm_120).
    """
    static_and_reserved = 3 * 1024  # the kernels' static arrays and the 1 KiB the driver keeps per block
    for stages in (3, 2):
        if 2 * (stages * STAGE_BYTES + static_and_reserved) <= limits.shared_bytes_per_multiprocessor:
            return stages
    return 3 if 3 * STAGE_BYTES + static_and_reserved <= limits.shared_bytes_per_block else 2


def max_row_tiles(num_slots: int, num_experts: int) -> int:
    """Upper bound of row tiles for any routing: full tiles plus one partial tile per non-empty expert."""
    return num_slots // TILE_ROWS + min(num_experts, num_slots)


def column_tiles(columns: int, width: int = TILE_COLUMNS) -> int:
    return ceil_div(columns, width)


def panels(columns: int) -> list[tuple[int, int]]:
    """(first column, width) of each panel."""
    return [(c, min(PANEL_COLUMNS, columns - c)) for c in range(0, columns, PANEL_COLUMNS)]


@dataclass(frozen=True)
class DispatchConfig:
    """Geometry of the dispatch kernels: `blocks` blocks, each `parts` parts of its slots in `ranges` ranges.

    dispatch_count has a warp per range; dispatch_route has `route_threads`.
    """

    blocks: int
    parts: int
    ranges: int  # a power of two
    range_slots: int  # a multiple of 32; a part's slots are numbered in 16 bits
    route_threads: int
    count_shared_bytes: int
    route_shared_bytes: int

    def range_counts(self, num_experts: int) -> int:
        """Elements (uint16) of the counts per range."""
        return self.blocks * self.parts * self.ranges * num_experts

    def workspace_bytes(self, num_slots: int, num_experts: int) -> int:
        """A rank per slot and a count per range and expert (uint16), a count per block and expert (int32)."""
        return 2 * num_slots + 2 * self.range_counts(num_experts) + 4 * self.blocks * num_experts


def dispatch(num_slots: int, num_experts: int, limits: DeviceLimits) -> DispatchConfig:
    """16 ranges of 128 slots, or fewer, before a second block; 32 once every multiprocessor has a block.

    Small blocks spend their time in the sums over blocks and experts, which gain nothing from more warps; large ones
    hide the latency of the counters behind 32 warps, unless these take over a third of the shared memory. A block
    whose slots do not fit in the rest takes them in parts.
    """
    static_bytes = 1024  # the driver's own
    lists_bytes = 22 * (num_experts + 1)
    ranges = 4
    while ranges < 16 and 128 * ranges < num_slots:
        ranges *= 2
    if num_slots > 16 * 128 * limits.multiprocessors:
        ranges = 32
    while ranges > 2 and 2 * ranges * num_experts > (limits.shared_bytes_per_block - lists_bytes) // 3:
        ranges //= 2
    range_bytes = 2 * ranges * num_experts
    free_bytes = limits.shared_bytes_per_block - static_bytes - lists_bytes - range_bytes
    most_slots = min(65536, free_bytes * 32 // 65)  # 2 bytes per slot, and 2 per 64 slots of one expert
    most_rounds = most_slots // (32 * ranges)
    # the sum over blocks takes 8 bytes per thread in the room of the slots
    route_threads = min(max(256, 32 * ranges), free_bytes // 8 // 32 * 32)
    if most_rounds < 1 or route_threads < 32 * ranges:
        raise ValueError(
            f"dispatch: num_experts: expected few enough for {limits.shared_bytes_per_block} bytes of shared memory "
            f"per block (22 per expert, and counters), got {num_experts}"
        )
    blocks = min(limits.multiprocessors, max(1, ceil_div(num_slots, 128 * ranges)))
    rounds = max(1, ceil_div(num_slots, 32 * ranges * blocks))  # of 32 slots per range, of one block
    parts = ceil_div(rounds, most_rounds)
    rounds = ceil_div(rounds, parts)  # of one part
    slots = 32 * ranges * rounds
    return DispatchConfig(
        blocks=max(1, ceil_div(num_slots, parts * rounds * 32 * ranges)),
        parts=parts,
        ranges=ranges,
        range_slots=32 * rounds,
        route_threads=route_threads,
        count_shared_bytes=range_bytes + 4 * num_experts,
        route_shared_bytes=lists_bytes + range_bytes + max(2 * slots + slots // 32, 8 * route_threads),
    )
