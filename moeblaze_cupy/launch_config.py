"""Launch geometry: pure functions of shapes and device limits, no CuPy, no GPU.

The numbers here mirror the constants of the kernel sources (`gemm_core_sm80.cuh`, `dispatch.cu`,
`router.cu`, `aggregation.cu`).
"""

from dataclasses import dataclass

TILE_ROWS = 128  # BM of the GEMMs; dispatch emits its tile list for this height
TILE_COLUMNS = 128  # BN
GEMM_THREADS = 128
STAGE_BYTES = 32 * 1024
PANEL_COLUMNS = 256  # width of the (L*k, 256) buffer the expert outputs pass through
MAX_EXPERTS = 4096  # dispatch: counters and three lists per expert, beside the block's slots, in shared memory
MAX_SLOTS = 2**31 - 1  # the index lists are int32
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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tier(compute_capability: int) -> str:
    """Kernel family for a compute capability such as 90. Raises RuntimeError below 80."""
    if compute_capability < 80:
        raise RuntimeError(
            "moeblaze_cupy: compute capability: expected 8.0 or later (mma.sync on bf16, cp.async), "
            f"got {compute_capability // 10}.{compute_capability % 10}"
        )
    return "sm80"


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
    """Geometry of the dispatch kernels: `blocks` blocks of `warps` warps, each block `parts` parts of its slots."""

    blocks: int
    warps: int
    parts: int
    slots_per_warp: int  # per part, a multiple of 32; a part's slots are numbered in 16 bits
    count_shared_bytes: int
    route_shared_bytes: int

    def warp_counts(self, num_experts: int) -> int:
        """Elements (uint16) of the counts per warp."""
        return self.blocks * self.parts * self.warps * num_experts

    def workspace_bytes(self, num_experts: int) -> int:
        """Counts per warp and part (uint16) and per block (int32)."""
        return 2 * self.warp_counts(num_experts) + 4 * self.blocks * num_experts


def dispatch(num_slots: int, num_experts: int, limits: DeviceLimits) -> DispatchConfig:
    """At most one block per multiprocessor, in as few parts as its shared memory allows.

    32 warps hide the latency of the counters, unless these take over a third of the shared memory.
    """
    warps = 32
    while warps > 2 and 2 * warps * num_experts > limits.shared_bytes_per_block // 3:
        warps //= 2
    static_bytes = 1024
    lists = 2 * warps * num_experts + 16 * (num_experts + 1)
    round_of_slots = 32 * warps
    most_rounds = min(65536, (limits.shared_bytes_per_block - static_bytes - lists) // 2) // round_of_slots
    rounds = max(1, ceil_div(num_slots, round_of_slots * limits.multiprocessors))  # of one block
    parts = ceil_div(rounds, most_rounds)
    rounds_per_part = ceil_div(rounds, parts)
    # dispatch_route first sums the blocks' counts in the room of the slots: 8 bytes per thread
    slots_bytes = max(2 * rounds_per_part * round_of_slots, 8 * round_of_slots)
    return DispatchConfig(
        blocks=max(1, ceil_div(num_slots, parts * rounds_per_part * round_of_slots)),
        warps=warps,
        parts=parts,
        slots_per_warp=32 * rounds_per_part,
        count_shared_bytes=2 * warps * num_experts + 4 * num_experts,
        route_shared_bytes=lists + slots_bytes,
    )
