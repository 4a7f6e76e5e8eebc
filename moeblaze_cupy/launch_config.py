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
MAX_EXPERTS = 8192  # dispatch: one warp's counters and two offset lists, 12 bytes per expert, in shared memory
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
    """Geometry of the three dispatch steps: `blocks` blocks of `warps` warps in steps 1 and 3."""

    blocks: int
    warps: int
    slots_per_warp: int  # multiple of 32
    step1_shared_bytes: int
    step3_shared_bytes: int

    def workspace_bytes(self, num_experts: int) -> int:
        """Per-block and per-expert counts, int32."""
        return 4 * num_experts * (self.blocks + 1)


def dispatch(num_slots: int, num_experts: int, limits: DeviceLimits) -> DispatchConfig:
    """At most two blocks per multiprocessor, as many warps (<= 16) as 48 KiB of counters allow."""

    def step3_bytes(warps: int) -> int:
        return 4 * (warps * num_experts + 2 * (num_experts + 1))

    warps = 16
    while warps > 1 and step3_bytes(warps) > DEFAULT_SHARED_BYTES:
        warps //= 2
    slots_per_warp = 32 * max(1, ceil_div(num_slots, 32 * warps * 2 * limits.multiprocessors))
    return DispatchConfig(
        blocks=max(1, ceil_div(num_slots, warps * slots_per_warp)),
        warps=warps,
        slots_per_warp=slots_per_warp,
        step1_shared_bytes=4 * warps * num_experts,
        step3_shared_bytes=step3_bytes(warps),
    )
