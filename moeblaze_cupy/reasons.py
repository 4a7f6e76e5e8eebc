"""Why a launch is as it is, in plain sentences for `explain` and MOEBLAZE_LOG.

The rules are those of `gemm_config` and `dispatch_config`, which decide. A function here is given the decision and the
numbers that it follows from. tests/test_explain.py compares the sentences with the decisions on both sides of every
bound.
"""

from moeblaze_cupy.dispatch_config import DispatchConfig
from moeblaze_cupy.gemm_config import GemmConfig
from moeblaze_cupy.launch_config import (
    GEMM_BLOCKS,
    HOPPER_STAGE_BYTES,
    MAX_PANEL_COLUMNS,
    ONE_PANEL_ELEMENTS,
    PANEL_COLUMNS,
    SQUARE_ROWS,
    SQUARE_TILE,
    STAGE_BYTES,
    TILE_ROWS,
    DeviceLimits,
    ceil_div,
)

SHARED_WEIGHT_ROWS = 2 * TILE_ROWS  # of an expert on average, from which on CTAs share its weights


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def tier(config: GemmConfig, dtype: str, aligned: bool, num_slots: int, limits: DeviceLimits) -> tuple[str, str]:
    """Why these kernels, and why so many stages."""
    capability = f"{limits.compute_capability // 10}.{limits.compute_capability % 10}"
    if config.tier == "sm90":
        return (
            f"Hopper's kernels: compute capability {capability}, {dtype}, 16-byte-aligned addresses and strides, "
            "sizes that are multiples of 8",
            f"{config.stages} stages of {HOPPER_STAGE_BYTES // 1024} KiB; a persistent grid with at most one CTA per "
            "multiprocessor",
        )
    if limits.tier != "sm90" and limits.compute_capability == 90:
        why = "the portable tier is forced"
    elif limits.tier != "sm90":
        why = f"compute capability is {capability}, not 9.0"
    elif dtype == "float32":
        why = "Hopper's take bfloat16 and float16, not float32"
    elif num_slots == 0:
        why = "there are no slots"
    else:
        why = "Hopper's need 16-byte-aligned addresses and strides, and sizes that are multiples of 8"
    accesses = "16 bytes at a time" if aligned else "an element at a time, as 16 bytes would not be aligned"
    shared = limits.shared_bytes_per_multiprocessor // 1024
    fit = GEMM_BLOCKS * config.shared_bytes < limits.shared_bytes_per_multiprocessor
    resident = f"{'two CTAs fit' if fit else 'one CTA fits'} in the {shared} KiB of a multiprocessor"
    return (
        f"portable kernels: {why}; memory is read {accesses}",
        f"{config.stages} stages of {STAGE_BYTES // 1024} KiB, with which {resident}; a CTA per tile",
    )


def clusters(
    used: bool,
    to_tokens: bool,
    gathers: bool,
    column_tiles: int,
    depth: int,
    num_slots: int,
    num_experts: int,
    fp8: bool = False,
) -> str:
    """Why a product on Hopper has 2-CTA clusters or none. depth: what an element of the result sums over."""
    rows = num_slots // num_experts
    if used and fp8:
        even = "" if gathers else f", the number of column tiles is even ({column_tiles})"
        return (
            f"2-CTA clusters with TMA multicast of the weight: operands are e4m3, an expert has {_count(rows, 'row')} "
            f"on average (at least {SHARED_WEIGHT_ROWS}){even}"
        )
    if used:
        few, even = (
            ("", "") if gathers else (", at most 1024", f", the number of column tiles is even ({column_tiles})")
        )
        return (
            f"2-CTA clusters with TMA multicast of the weight: an element sums over {depth} (at least 4096), an expert "
            f"has {_count(rows, 'row')} on average (at least {SHARED_WEIGHT_ROWS}{few}){even}"
        )
    if depth < 4096 and not fp8:
        why = f"an element sums over {depth}, less than 4096"
    elif rows < SHARED_WEIGHT_ROWS:
        why = f"an expert has {_count(rows, 'row')} on average, fewer than {SHARED_WEIGHT_ROWS}"
    elif to_tokens:
        why = "rows go straight to their tokens"
    elif num_slots > 1024 * num_experts and not fp8:
        why = f"an expert has {num_slots / num_experts:.10g} rows on average, more than 1024"
    else:
        why = f"the number of column tiles is odd ({column_tiles})"
    return f"no 2-CTA clusters: {why}"


SINGLE_CTAS = "no 2-CTA clusters: square tiles have none"
E4M3 = "e4m3 operands: two count as one of what an element sums over, as a k-step has twice as many"


def schedule(
    dynamic: bool, entry: str, column_tiles: int, depth: int, num_slots: int, num_experts: int, limits: DeviceLimits
) -> str:
    """Why a product on Hopper has a dynamic or a static schedule. depth: what an element of the result sums over."""
    rows, most = num_slots // num_experts, 2 * limits.multiprocessors
    tiles, average = rows // TILE_ROWS * column_tiles, f"an expert has {_count(rows, 'row')} on average"
    if entry not in ("up_fwd", "down_bwd"):
        why = "products that are summed per token take row tiles in twos, in a fixed order"
    elif rows < SHARED_WEIGHT_ROWS:
        why = f"{average}, fewer than {SHARED_WEIGHT_ROWS}, so CTAs share few weights"
    elif not dynamic:
        why = (
            f"an element sums over {depth}, less than 2048, and an expert has {_count(tiles, 'tile')}, more than {most}"
        )
    else:
        why = f"{average} (at least {SHARED_WEIGHT_ROWS}), whose tiles share its weights"
        if entry == "up_fwd" and depth >= 2048:
            why += f", and an element sums over {depth} (at least 2048)"
        elif entry == "up_fwd":
            why += f", and it has {_count(tiles, 'tile')} (at most {most}, two per multiprocessor)"
    return f"{'dynamic' if dynamic else 'static'} tile scheduling: {why}"


def panels(widths: tuple[int, ...], d: int, num_slots: int, tier: str, in_place: bool) -> str:
    """Why a product has these column panels. widths: of the panels, () where rows go to their tokens."""
    if not widths:
        return "no column panel: with k = 1 a row of the product is its token's result"
    number = "one column panel" if len(widths) == 1 else f"{len(widths)} column panels"
    if tier == "sm80":
        text = f"{number} of {_count(widths[0], 'column')}: the portable tier's are {PANEL_COLUMNS} wide, or d = {d}"
    elif d <= 2 * PANEL_COLUMNS:
        text = f"{number}: d = {d} is at most {2 * PANEL_COLUMNS}"
    elif num_slots * d <= ONE_PANEL_ELEMENTS:
        text = f"{number}: L*k*d = {num_slots * d} elements, at most {ONE_PANEL_ELEMENTS}, stay in the L2 cache"
    else:
        text = f"{number} of {widths[0]} columns: half of d = {d} in multiples of 256, at most {MAX_PANEL_COLUMNS}"
    return f"{text}; it lies in the rows of the left operand, which nothing reads again" if in_place else text


def product_tile(square: bool, widths: tuple[int, ...], num_slots: int, num_experts: int) -> str:
    """Why a product on Hopper has square tiles or none. widths: of its column panels, in columns of the weight."""
    columns = " + ".join(map(str, widths))
    wide, narrow = (sum(ceil_div(width, tile) * tile for width in widths) for tile in (PANEL_COLUMNS, SQUARE_TILE))
    if square:
        return f"tiles of 192 x 192: these compute {narrow} columns for {columns}, tiles of 128 x 256 {wide}"
    if narrow < wide:
        rows = _count(num_slots // num_experts, "row")
        return f"tiles of 128 x 256: an expert has {rows} on average, fewer than {SQUARE_ROWS}"
    return f"tiles of 128 x 256: these compute {wide} columns for {columns}, tiles of 192 x 192 {narrow}"


def wgrad_tile(square: bool, fits_better: bool) -> str:
    """Why a weight gradient on Hopper has square tiles or none. fits_better: fewer elements lie past their edges."""
    if fits_better and not square:
        return "tiles of 128 x 256: it is added to sums, or takes split-K, for which there are none of 192 x 192"
    if square:
        return "tiles of 192 x 192: fewer elements lie past the gradient's edges than with 128 x 256"
    return "tiles of 128 x 256: no more elements lie past the gradient's edges than with 192 x 192"


def split_k(splits: int, tiles: int, num_slots: int, num_experts: int, limits: DeviceLimits) -> str:
    """Why a weight gradient on Hopper takes split-K or not."""
    rows = _count(num_slots // num_experts, "row")
    of_all = f"{_count(tiles, 'tile')} on {limits.multiprocessors} multiprocessors, {rows} per expert"
    if splits == 1:
        return f"no split-K: {of_all} on average; more CTAs per tile would cost more than they save"
    waves = ceil_div(tiles * splits, limits.multiprocessors)
    return (
        f"split-K, {splits} CTAs per tile: {of_all} on average; {tiles * splits} shorter tiles in "
        f"{_count(waves, 'wave')} leave fewer multiprocessors idle"
    )


def dispatch(config: DispatchConfig, num_slots: int, num_experts: int) -> tuple[str, ...]:
    """Why dispatch_count is launched or not, and the CTAs of dispatch_route."""
    if not config.counts:
        return (f"one launch: one CTA takes all {_count(num_slots, 'slot')} (at most 2048) and counts them itself",)
    if config.blocks > 1:
        why = f"{num_slots} slots are more than one CTA takes by itself"
    else:
        why = f"the counters of {num_experts} experts leave room for {config.part_slots} slots at a time"
    parts = f" in {config.parts} parts" if config.parts > 1 else ""
    return (
        f"two launches: {why}, so dispatch_count counts per CTA, and dispatch_route ranks",
        f"dispatch_route has {config.blocks} CTAs of {config.block_slots} slots{parts}, "
        f"with {config.columns} columns of counters",
    )


def bias_accesses(aligned: bool) -> str:
    """Why the gradients of biases are read in 16 bytes or element by element."""
    if aligned:
        return "16 bytes at a time: rows and biases are aligned to 16 bytes"
    return "an element at a time: rows or biases are not aligned to 16 bytes"


def accesses(aligned: bool) -> str:
    """Why the sums over slots are read in 16 bytes or element by element."""
    if aligned:
        return "16 bytes at a time: d and the panel's first column are multiples of 8"
    return "an element at a time: d or the panel's first column is no multiple of 8"
