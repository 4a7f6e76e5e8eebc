"""Launch geometry of the grouped GEMMs: tiles, stages, panels, clusters, schedules and splits; see `launch_config`.

A function that decides also returns why, in a sentence for `explain` and MOEBLAZE_LOG.
tests/tools/test_explain.py checks the numbers of the sentences on both sides of every bound.
"""

import functools
from dataclasses import dataclass

from moeblaze_cupy.cuda.launch_config import (
    GROUP_COLUMNS,
    PANEL_COLUMNS,
    SQUARE_TILE,
    TILE_ROWS,
    DeviceLimits,
    ceil_div,
)

PORTABLE_THREADS = 256
PORTABLE_STEPS = 128, 64  # bytes along K of a stage of the portable GEMMs, if three of them fit
PORTABLE_STAGES = 4  # at most
STATIC_BYTES = 1024  # shared memory that a portable GEMM may declare beside its stages
HOPPER_THREADS = 384  # a producer warpgroup and two of consumers
HOPPER_STAGES = 3
MAX_PANEL_COLUMNS = 2048  # greatest width of a column panel
ONE_PANEL_ELEMENTS = 2**24  # elements of a routed buffer that may be one panel: 32 MiB, which stay in the L2 cache
STEP_ROWS = 64  # BK on Hopper: the depth of a stage, and so the rows of a step of the weight gradients
STEP_BYTES = 2 * STEP_ROWS  # a row in a stage, and so BK of e4m3
HOPPER_STAGE_BYTES = 2 * STEP_ROWS * (TILE_ROWS + PANEL_COLUMNS)  # 16-bit elements of A and B
HOPPER_TILE_BYTES = 2 * TILE_ROWS * PANEL_COLUMNS  # a finished tile of 16-bit elements
HOPPER_SPARE_BYTES = 16 * 1024  # memory that an epilogue reads ahead into
WGRAD_SPARE_BYTES = 4 * 1024  # the tokens of a weight gradient
SQUARE_SPARE_BYTES = 9 * 1024  # a bias of a product's square tile for each of 12 warps
SQUARE_ROWS = 8 * SQUARE_TILE  # an expert's average rows for which products have square tiles
MAX_WAVES = 4  # waves of tiles of splits per launch, see split_k
SPLIT_ROWS = 1024  # cost of a split's tile of float32 sums, in the time of a tile's rows
ADDITION_ROWS, ADDITION_ROWS_PER_SPLIT = 512, 16  # cost of adding the sums, in the same unit
BIAS_COLUMNS, BIAS_ROWS = 64, 32  # bias_bwd.cu: columns per block, and rows at a time
BIAS_THREADS = BIAS_COLUMNS // 8 * BIAS_ROWS  # 8 columns each
TILES_THREADS = 1024  # threads of square_tiles.cu's one block
RANK_EXPERTS_THREADS = 32  # threads of rank_experts.cu: a warp
PARTS_GROUPS = 256  # groups of 8 columns per block of wgrad_parts.cu, a thread each

_PORTABLE = {
    "BM": TILE_ROWS,
    "BN": PANEL_COLUMNS,
    "THREADS": PORTABLE_THREADS,
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
CONSTANTS = {
    "grouped_gemm_sm80.cu": _PORTABLE | {"STATIC_BYTES": STATIC_BYTES},
    "grouped_wgrad_sm80.cu": _PORTABLE,
    # setmaxnreg moves registers from the producer's threads to the consumers'
    "grouped_gemm_sm90.cu": _HOPPER
    | {"PRODUCER_REGISTERS": 72, "CONSUMER_REGISTERS": 216, "GROUP_COLUMNS": GROUP_COLUMNS},
    "grouped_wgrad_sm90.cu": _HOPPER
    | {"PRODUCER_REGISTERS": 56, "CONSUMER_REGISTERS": 224, "SPARE_BYTES": WGRAD_SPARE_BYTES},
    "bias_bwd.cu": {"COLUMNS": BIAS_COLUMNS, "ROWS": BIAS_ROWS},
    "wgrad_parts.cu": {"GROUPS_PER_BLOCK": PARTS_GROUPS},
    "rank_experts.cu": {"THREADS": RANK_EXPERTS_THREADS},
    "square_tiles.cu": {"TILES_THREADS": TILES_THREADS, "TILE_ROWS": SQUARE_TILE},
}

SHARED_WEIGHT_ROWS = 2 * TILE_ROWS  # rows of an expert on average, from which on CTAs share its weights
CLUSTER_DEPTH = 4096  # number that an element sums over, from which on 2-CTA clusters pay
SPARE_RANKS = 16  # ranks of a low-rank factor that lies in the spare bytes
MAX_CLUSTER_ROWS = 1024  # rows of an expert on average, up to which they pay for products that are summed over slots
DYNAMIC_DEPTH = 2048  # number that an element of up_fwd sums over, from which on its tiles are long
WIDE, SQUARE = f"tiles of {TILE_ROWS} x {PANEL_COLUMNS}", f"tiles of {SQUARE_TILE} x {SQUARE_TILE}"

# Sentences of decisions that need no more than their condition, which stands where they are used.
TO_TOKENS = "no column panel: with k = 1 a row of the product is its token's result"
IN_PLACE = "; it lies in the rows of the left operand, which nothing reads again"
FIXED_ORDER = "static tile scheduling: products that are summed per token take row tiles in twos, in a fixed order"
TF32 = "float32 operands are rounded to TF32, and multiplied by tensor cores"
E4M3 = "e4m3 operands: two count as one of what an element sums over, as a k-step has twice as many"


def count(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fp8_constants(gathers: bool, to_tokens: bool) -> dict[str, int]:
    """Returns the constants that differ from `CONSTANTS` in a Hopper product of e4m3.

    A stage of as many bytes is twice as deep. The products that promote hold 64 more accumulators, and their producer
    is one thread. With rows that go to tokens another warp of the producer writes zeros.
    """
    producer, consumer = (72, 216) if gathers else (56, 224) if to_tokens else (40, 232)
    return {"BK": STEP_BYTES, "PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}


def square_constants(consumer_registers: int) -> dict[str, int]:
    """Returns the constants that differ from `CONSTANTS` in a Hopper kernel with square tiles.

    There are three warpgroups of consumers. A stage has as many bytes: 192 and 192 rows or columns are 128 and 256.
    """
    return {
        "BM": SQUARE_TILE,
        "BN": SQUARE_TILE,
        "THREADS": (1 + SQUARE_TILE // 64) * 128,
        "TILE_BYTES": 2 * SQUARE_TILE**2,
        "CONSUMER_REGISTERS": consumer_registers,
    }


def square_product_constants(epilogue: str) -> dict[str, int]:
    """Returns the same for a product with this epilogue; nothing for one that has no square tiles."""
    if epilogue not in ("StoreRows", "ActivatePairs"):
        return {}
    columns = SQUARE_TILE // 2 if epilogue == "ActivatePairs" else SQUARE_TILE
    producer = {"TILE_COLUMNS": columns, "SPARE_BYTES": SQUARE_SPARE_BYTES, "PRODUCER_REGISTERS": 80}
    return square_constants(144) | producer


@dataclass(frozen=True)
class GemmConfig:
    """Geometry of one grouped GEMM launch."""

    tier: str
    tile_columns: int  # columns of the result; a gated up projection's tile holds as many of gate and of up
    threads: int
    shared_bytes: int
    stages: int
    step_bytes: int = STEP_BYTES  # of a row in a stage
    tile_rows: int = TILE_ROWS
    why: tuple[str, ...] = ()  # these kernels, and so many stages

    def blocks(self, columns: int, max_row_tiles: int, limits: DeviceLimits, clusters: bool = False) -> int:
        """Returns one CTA per tile; on Hopper at most one per multiprocessor, in clusters an even number."""
        tiles = column_tiles(columns, self.tile_columns) * max_row_tiles
        if clusters:
            return 2 * min(ceil_div(tiles, 2), limits.multiprocessors // 2)
        return tiles if self.tier == "sm80" else min(tiles, limits.multiprocessors)


@functools.lru_cache(maxsize=256)
def gemm(dtype: str, aligned: bool, split: bool, limits: DeviceLimits) -> GemmConfig:
    """Chooses the grouped GEMM kernel for a call: Hopper's for 16-bit elements and sizes that are multiples of 8.

    split: a gated up projection, half of whose tile is gate. `square_gemm` has other tiles.
    """
    if limits.tier == "sm90" and aligned and dtype in ("bfloat16", "float16"):
        shared_bytes = HOPPER_STAGES * HOPPER_STAGE_BYTES + HOPPER_TILE_BYTES + HOPPER_SPARE_BYTES
        why = (
            f"Hopper's kernels: compute capability {_capability(limits)}, {dtype}, 16-byte-aligned addresses and "
            "strides, sizes that are multiples of 8",
            f"{HOPPER_STAGES} stages of {HOPPER_STAGE_BYTES // 1024} KiB; a persistent grid with at most one CTA per "
            "multiprocessor",
        )
        columns = tile_columns(split)
        return GemmConfig("sm90", columns, HOPPER_THREADS, shared_bytes, HOPPER_STAGES, why=why)
    stages, step_bytes = portable_stages(limits)
    stage_bytes = _portable_stage_bytes(step_bytes)
    room = limits.shared_bytes_per_block // 1024
    of_stages = f"{stages} stages of {stage_bytes // 1024} KiB in the {room} KiB of a CTA; a CTA per tile"
    why = _why_portable(dtype, aligned, limits), of_stages
    shared_bytes = stages * stage_bytes
    return GemmConfig("sm80", tile_columns(split), PORTABLE_THREADS, shared_bytes, stages, step_bytes, why=why)


def _capability(limits: DeviceLimits) -> str:
    return f"{limits.compute_capability // 10}.{limits.compute_capability % 10}"


def _why_portable(dtype: str, aligned: bool, limits: DeviceLimits) -> str:
    if limits.tier != "sm90" and limits.compute_capability == 90:
        why = "the portable tier is forced"
    elif limits.tier != "sm90":
        why = f"compute capability is {_capability(limits)}, not 9.0"
    elif dtype == "float32":
        why = "Hopper's take bfloat16 and float16, not float32"
    else:
        why = "Hopper's need slots, 16-byte-aligned addresses and strides, and sizes that are multiples of 8"
    accesses = "16 bytes at a time" if aligned else "an element at a time, as 16 bytes would not be aligned"
    return f"portable kernels: {why}; memory is read {accesses}"


def square_gemm(pairs: bool) -> GemmConfig:
    """Returns Hopper's kernel with square tiles. pairs: an up projection whose gate and up columns alternate."""
    constants = square_product_constants("ActivatePairs" if pairs else "StoreRows")
    shared_bytes = HOPPER_STAGES * HOPPER_STAGE_BYTES + constants["TILE_BYTES"] + SQUARE_SPARE_BYTES
    columns, threads = constants["TILE_COLUMNS"], constants["THREADS"]
    return GemmConfig("sm90", columns, threads, shared_bytes, HOPPER_STAGES, tile_rows=SQUARE_TILE)


def square_product(widths: tuple[int, ...], num_slots: int, num_experts: int) -> tuple[bool, str]:
    """Decides whether Hopper's tiles of a product that is no gradient of a weight are square.

    widths: its column panels, or the one matrix that it is, in columns of the weight. Tiles are square where
    they compute fewer columns and experts have eight row tiles on average: a last tile that is not full costs nearly as
    much as a full one. Figures: docs/decisions/018.
    """
    wide, narrow = (sum(ceil_div(width, tile) * tile for width in widths) for tile in (PANEL_COLUMNS, SQUARE_TILE))
    columns = " + ".join(map(str, widths))
    if narrow >= wide:
        return False, f"{WIDE}: these compute {wide} columns for {columns}, {SQUARE} {narrow}"
    if num_slots < SQUARE_ROWS * num_experts:
        rows = count(num_slots // num_experts, "row")
        return False, f"{WIDE}: an expert has {rows} on average, fewer than {SQUARE_ROWS}"
    return True, f"{SQUARE}: these compute {narrow} columns for {columns}, {WIDE} {wide}"


def lora_in_spare(entry: str, ranks: int, square: bool, has_bias: bool) -> tuple[bool, str]:
    """Decides whether a low-rank factor of Hopper's products lies in the spare bytes, without a stage of its own.

    A stage costs as much as one that is full, as it is not computed but loaded for that long.
    """
    if ranks > SPARE_RANKS:
        return False, f"the factor's {ranks} ranks, more than {SPARE_RANKS}, have stages of their own"
    if entry == "down_bwd":
        return False, "the factor has a stage of its own, as what the epilogue reads ahead takes the spare bytes"
    if square and has_bias:
        return False, "the factor has a stage of its own, as the bias of a square tile takes the spare bytes"
    return True, f"the factor's {ranks} ranks lie in the spare bytes"


def tile_columns(split: bool) -> int:
    """Returns the columns of the result in a tile; with `split`, a gated up projection, as many of gate and of up."""
    return PANEL_COLUMNS // 2 if split else PANEL_COLUMNS


def _portable_stage_bytes(step_bytes: int) -> int:
    return (TILE_ROWS + PANEL_COLUMNS) * step_bytes


def portable_stages(limits: DeviceLimits) -> tuple[int, int]:
    """Returns the pipeline depth of the portable GEMMs, and the bytes along K of a stage.

    4 stages of 48 KiB fit sm_90 and sm_100, 3 fit sm_80. On cards with 99 KiB (sm_86, sm_89, sm_120) 4 of 24 KiB fit.
    """
    room = limits.shared_bytes_per_block - STATIC_BYTES
    for step_bytes in PORTABLE_STEPS:
        stages = min(room // _portable_stage_bytes(step_bytes), PORTABLE_STAGES)
        if stages >= 3:
            break
    return stages, step_bytes


@functools.lru_cache(maxsize=1024)
def dynamic_schedule(
    entry: str, column_tiles: int, depth: int, num_slots: int, num_experts: int, limits: DeviceLimits
) -> tuple[bool, str]:
    """Decides whether CTAs of up_fwd and down_bwd on Hopper take tiles from a counter, in place of every n-th tile.

    depth: what an element of the result sums over.
    With the static schedule CTAs drift apart by whole tiles, and the L2 cache loses what others have read before they
    need it. The dynamic schedule keeps CTAs together that read the same weights. It also makes CTAs finish their tiles
    at one time, which slows up_fwd where its tiles are short and many to an expert. Figures: docs/decisions/003.
    """
    rows, most = num_slots // num_experts, 2 * limits.multiprocessors
    average, tiles = f"an expert has {count(rows, 'row')} on average", rows // TILE_ROWS * column_tiles
    if rows < SHARED_WEIGHT_ROWS:
        few = f"{average}, fewer than {SHARED_WEIGHT_ROWS}, so CTAs share few weights"
        return False, f"static tile scheduling: {few}"
    why = f"dynamic tile scheduling: {average} (at least {SHARED_WEIGHT_ROWS}), whose tiles share its weights"
    if entry == "down_bwd":
        return True, why
    if depth >= DYNAMIC_DEPTH:
        return True, f"{why}, and an element sums over {depth} (at least {DYNAMIC_DEPTH})"
    if tiles <= most:
        return True, f"{why}, and it has {count(tiles, 'tile')} (at most {most}, two per multiprocessor)"
    short = f"an element sums over {depth}, less than {DYNAMIC_DEPTH}"
    return False, f"static tile scheduling: {short}, and an expert has {count(tiles, 'tile')}, more than {most}"


def uses_clusters(
    gathers: bool, column_tiles: int, depth: int, num_slots: int, num_experts: int, fp8: bool = False
) -> tuple[bool, str]:
    """Decides whether a product on Hopper runs in 2-CTA clusters.

    Each CTA then fetches half of the weight's tile for both. depth: what an element of the result sums over. gathers:
    True for up_fwd and down_bwd. TMA multicast takes a third off what the L2 cache gives, and with it some of the power
    that limits long products. But a CTA then waits for the consumers of the other CTA too, at every k-step. So clusters
    pay where the sum is long and experts have two row tiles or more. Of the products that are summed over slots only
    those of experts with few rows gain, whose weights are most of what is read. There an odd number of column tiles
    would give half of the clusters tiles of different columns, as row tiles come in twos. Figures: docs/decisions/004.
    Products of e4m3 need what the L2 cache gives in half the time, and gain wherever an expert has two row tiles.
    """
    rows, none = num_slots // num_experts, "no 2-CTA clusters: "
    if not fp8 and depth < CLUSTER_DEPTH:
        return False, f"{none}an element sums over {depth}, less than {CLUSTER_DEPTH}"
    if rows < SHARED_WEIGHT_ROWS:
        return False, f"{none}an expert has {count(rows, 'row')} on average, fewer than {SHARED_WEIGHT_ROWS}"
    if not (gathers or fp8) and num_slots > MAX_CLUSTER_ROWS * num_experts:
        average = f"{num_slots / num_experts:.10g} rows on average"
        return False, f"{none}an expert has {average}, more than {MAX_CLUSTER_ROWS}"
    if not gathers and column_tiles % 2:
        return False, f"{none}the number of column tiles is odd ({column_tiles})"
    reason = "operands are e4m3" if fp8 else f"an element sums over {depth} (at least {CLUSTER_DEPTH})"
    few = "" if gathers or fp8 else f", at most {MAX_CLUSTER_ROWS}"
    even = "" if gathers else f", the number of column tiles is even ({column_tiles})"
    return True, (
        f"2-CTA clusters with TMA multicast of the weight: {reason}, an expert has {count(rows, 'row')} on average "
        f"(at least {SHARED_WEIGHT_ROWS}{few}){even}"
    )


def square_wgrad(rows: int, columns: int) -> tuple[bool, str]:
    """Decides whether Hopper's tiles of a weight gradient, (rows, columns) in memory, are square where they can be.

    They are where fewer elements lie past its edges then: of 2880 x 2880 none, and 9% with 128 x 256.
    """
    wide = ceil_div(rows, TILE_ROWS) * ceil_div(columns, PANEL_COLUMNS) * TILE_ROWS * PANEL_COLUMNS
    if ceil_div(rows, SQUARE_TILE) * ceil_div(columns, SQUARE_TILE) * SQUARE_TILE**2 < wide:
        return True, f"{SQUARE}: fewer elements lie past the gradient's edges than with 128 x 256"
    return False, f"{WIDE}: no more elements lie past the gradient's edges than with 192 x 192"


def wgrad(dtype: str, aligned: bool, square: bool, limits: DeviceLimits) -> GemmConfig:
    """Chooses the kernel of a weight gradient as `gemm` does, in square tiles if it is Hopper's and `square` is set."""
    config = gemm(dtype, aligned, False, limits)
    if config.tier == "sm80":
        return config
    tile, tile_bytes, threads = (TILE_ROWS, PANEL_COLUMNS), HOPPER_TILE_BYTES, HOPPER_THREADS
    if square:
        constants = square_constants(152)
        tile, tile_bytes, threads = (SQUARE_TILE, SQUARE_TILE), constants["TILE_BYTES"], constants["THREADS"]
    shared_bytes = HOPPER_STAGES * HOPPER_STAGE_BYTES + tile_bytes + WGRAD_SPARE_BYTES
    return GemmConfig("sm90", tile[1], threads, shared_bytes, HOPPER_STAGES, tile_rows=tile[0], why=config.why)


def wgrad_tiles(rows: int, columns: int, gradients: int, square: bool = False) -> int:
    """Returns the number of tiles of Hopper's weight gradients: one per expert and half, (rows, columns) in memory."""
    height, width = (SQUARE_TILE, SQUARE_TILE) if square else (TILE_ROWS, PANEL_COLUMNS)
    return gradients * ceil_div(rows, height) * ceil_div(columns, width)


@functools.lru_cache(maxsize=1024)
def split_k(tiles: int, num_slots: int, num_experts: int, limits: DeviceLimits) -> tuple[int, str]:
    """Decides into how many splits a weight gradient on Hopper divides each expert's rows.

    It is 1 but for few tiles of many rows. A tile takes one CTA. So fewer tiles than multiprocessors leave some idle,
    and so do a few more. Splits fill them. But each split ends with a tile of float32 sums, 128 KiB, to be written and
    read again, and adding them is one more launch. There are at most MAX_WAVES tiles per multiprocessor, which bounds
    the memory of the sums: 66 MiB on an H200. Figures: docs/decisions/008.
    """
    steps = ceil_div(num_slots // num_experts, STEP_ROWS)
    full_waves = (waves * limits.multiprocessors // tiles for waves in range(1, MAX_WAVES + 1))
    candidates = {1, *(min(splits, steps) for splits in full_waves if splits > 1)} - {0}

    def time(splits: int) -> int:  # counts rows of a tile
        rows_per_split = ceil_div(steps, splits) * STEP_ROWS + (SPLIT_ROWS if splits > 1 else 0)
        addition = ADDITION_ROWS + ADDITION_ROWS_PER_SPLIT * splits if splits > 1 else 0
        return ceil_div(tiles * splits, limits.multiprocessors) * rows_per_split + addition

    splits = min(sorted(candidates), key=time)
    rows = count(num_slots // num_experts, "row")
    of_all = f"{count(tiles, 'tile')} on {limits.multiprocessors} multiprocessors, {rows} per expert on average"
    if splits == 1:
        return splits, f"no split-K: {of_all}; more CTAs per tile would cost more than they save"
    waves = count(ceil_div(tiles * splits, limits.multiprocessors), "wave")
    why = f"{tiles * splits} shorter tiles in {waves} leave fewer multiprocessors idle"
    return splits, f"split-K, {splits} CTAs per tile: {of_all}; {why}"


def column_tiles(columns: int, width: int = PANEL_COLUMNS) -> int:
    return ceil_div(columns, width)


@functools.lru_cache(maxsize=256)
def panels(columns: int, num_slots: int) -> tuple[tuple[tuple[int, int], ...], str]:
    """Returns (first column, width) of each panel of a product that is summed over slots.

    The left operand comes from memory once per panel, so that wide panels are faster. Up to 512 columns are
    one panel, as are few rows, for which the last wave of a launch's CTAs counts. Others are two or more panels, of
    half the columns in whole tiles, 2048 columns at most. Figures: docs/decisions/006.
    """
    if columns <= 2 * PANEL_COLUMNS:
        widest, of_width = columns, f"d = {columns} is at most {2 * PANEL_COLUMNS}"
    elif num_slots * columns <= ONE_PANEL_ELEMENTS:
        elements = f"L*k*d = {num_slots * columns} elements, at most {ONE_PANEL_ELEMENTS}"
        widest, of_width = columns, f"{elements}, stay in the L2 cache"
    else:
        widest = min(ceil_div(columns, 2 * PANEL_COLUMNS) * PANEL_COLUMNS, MAX_PANEL_COLUMNS)
        of_width = f"half of d = {columns} in multiples of {PANEL_COLUMNS}, at most {MAX_PANEL_COLUMNS}"
    found = tuple((c, min(widest, columns - c)) for c in range(0, columns, widest))
    number = "one column panel" if len(found) == 1 else f"{len(found)} column panels"
    width = f" of {count(found[0][1], 'column')}" if widest < columns else ""
    return found, f"{number}{width}: {of_width}"


def rows_go_to_tokens(k: int | None, tier: str) -> bool:
    """Returns True if a product needs no panel (TO_TOKENS): with one slot per token a row is the token's sum.

    k is None where tokens have any number of slots.
    """
    return tier == "sm90" and k == 1


def panel_takes_left_operands_rows(columns: int, spare_columns: int, tier: str) -> bool:
    """Returns True if the panel may lie in the left operand's rows (IN_PLACE).

    spare_columns: columns of these rows if they may be overwritten, else 0. A tile of all columns is the last reader
    of its rows.
    """
    return tier == "sm90" and columns <= min(PANEL_COLUMNS, spare_columns)
