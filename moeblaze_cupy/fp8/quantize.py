"""Rows and weights in e4m3 with float32 scales: kernels_cu/fp8/quantize.cu."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeblaze_cupy.cuda import clear, launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.fp8 import config as fp8_config
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.gemm.products import Weight, is_aligned

E4M3 = ("w1", "w1_transposed", "w2", "w2_transposed")  # fields of Fp8Weights
FIELDS = (*fp8_checks.FIELDS, "amax")
NO_SCALARS: Mapping[str, float] = {}
HALVES_ADDRESSES = ("first", "second", "amax", "same", "transposed", "scales")


def shapes_of(E: int, d: int, h: int, halves: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of Fp8Weights' arrays, by field, in the order of FIELDS."""
    columns = halves * h
    up = (E, d, columns), (E, columns, d), (E, halves)
    return dict(zip(FIELDS, (*up, (E, h, d), (E, d, h), (E, 1), (E, halves + 1)), strict=True))


def rows(layout: Layout, scale_of_zeros: float = 1.0, gap: int = 0) -> Launch | None:
    """Returns the launch for contiguous rows (L, d), None for none. Addresses: rows, out (L, d) e4m3, scales (L,).

    scale_of_zeros: that of a row of zeros. Numbers that are multiplied by scales need 0, for a 1 would make them large.
    gap: bytes in out between each GROUP_COLUMNS columns and the next, also from row to row; d is a multiple of them.
    """
    suffix = "" if is_aligned((layout.misalignment,), layout.shape[1:]) else "_unaligned"
    d = layout.shape[1]
    out = {"out_ld": d + d // launch_config.GROUP_COLUMNS * gap, "gap": gap}
    addresses, scalars = ("rows", "out", "scales"), {"scale_of_zeros": scale_of_zeros, **out}
    return _of_rows(layout, f"quantize_rows_{layout.dtype}{suffix}", addresses, scalars)


def dequantize_rows(layout: Layout) -> Launch | None:
    """Returns the launch for contiguous e4m3 rows (L, d), or None for none.

    Addresses: rows, scales (L,), out (L, d) bf16. d is a multiple of 8, and rows and out are aligned.
    """
    return _of_rows(layout, "dequantize_rows_bfloat16", ("rows", "scales", "out"))


def _of_rows(
    layout: Layout, entry: str, addresses: tuple[str, ...], scalars: Mapping[str, float] = NO_SCALARS
) -> Launch | None:
    L, d = layout.shape
    if not L:
        return None
    threads_per_row = fp8_config.quantize_threads(d)
    threads = max(fp8_config.QUANTIZE_THREADS, threads_per_row)
    return Launch(
        loader.entry("quantize.cu", entry),
        (launch_config.ceil_div(L, threads // threads_per_row),),
        threads,
        addresses,
        {"L": L, "d": d, "threads_per_row": threads_per_row, **scalars},
        why=(f"{threads_per_row} threads for each row of {d} elements",),
    )


@dataclass(frozen=True, eq=False)
class Quantize:
    """Launches of `weights`: the largest magnitudes, then e4m3, of w1 and of w2, and their arguments."""

    up: Weight
    down: Weight
    up_launches: tuple[Launch, Launch]
    down_launches: tuple[Launch, Launch]
    clear: Launch  # clears amax
    halves: int


@cached
def configure(w1: tuple[Layout, ...], w2: Layout, interleaved: bool) -> Quantize:
    """Returns the launches. w1: one array, or the pair (gate, up); gated if it has twice the columns of w2's rows."""
    (E, h, d), columns = w2.shape, sum(layout.shape[2] for layout in w1)
    halves = columns // h
    split = halves == 2 and not interleaved
    up, down = Weight.of(w1, h if split and len(w1) == 1 else None), Weight.of((w2,))
    up_launches = _launches(up, d, h if split else columns, 1 + split, columns, halves + 1, halves)
    down_launches = _launches(down, h, d, 1, d, halves + 1, 1)
    return Quantize(up, down, up_launches, down_launches, clear.configure(E * (halves + 1)), halves)


def _launches(
    weight: Weight, rows: int, columns: int, halves: int, all_columns: int, amax_ld: int, scales_ld: int
) -> tuple[Launch, Launch]:
    """Returns the launches of one weight. rows, columns: a half's. all_columns: those of the arrays that are made."""
    outer, inner = (columns, rows) if weight.transposed else (rows, columns)
    same_ld, transposed_ld = (rows, all_columns) if weight.transposed else (all_columns, rows)
    same_half, transposed_half = columns, columns * rows
    if weight.transposed:
        same_half, transposed_half = transposed_half, same_half
    sizes = {
        "expert_stride": weight.expert_stride,
        "ld": weight.ld,
        "size": rows * all_columns,
        "same_half": same_half,
        "transposed_half": transposed_half,
        "outer": outer,
        "inner": inner,
        "halves": halves,
        "amax_ld": amax_ld,
        "scales_ld": scales_ld,
        "same_ld": same_ld,
        "transposed_ld": transposed_ld,
    }
    aligned = is_aligned((weight.misalignment,), (rows, columns, weight.ld, weight.expert_stride))
    suffix = f"{weight.dtype}{'' if aligned else '_unaligned'}"
    tile = fp8_config.QUANTIZE_TILE
    grid = launch_config.ceil_div(outer, tile) * launch_config.ceil_div(inner, tile), weight.num_experts * halves

    def launch(step: str, why: str) -> Launch:
        variant = loader.entry("quantize.cu", f"{step}_{suffix}")
        threads = fp8_config.QUANTIZE_THREADS
        return Launch(variant, grid, threads, HALVES_ADDRESSES, sizes, why=(why,), overlaps=True)

    return (
        launch("weights_amax", "the largest magnitude of each expert's half, by integer atomics"),
        launch("quantize_weights", "e4m3 in both orientations"),
    )


def weights(
    run: Runtime,
    steps: Quantize,
    w1: Sequence[int],
    w2: int,
    made: Sequence[int],
) -> None:
    """Quantises. w1: addresses of its one or two arrays. made: addresses of Fp8Weights' arrays, amax last."""
    *of_weights, amax = made
    run.launch(steps.clear, amax)
    of_up = steps.up, steps.up_launches, steps.up.halves(*w1), amax, of_weights[:3]
    of_down = steps.down, steps.down_launches, (w2, w2), amax + 4 * steps.halves, of_weights[3:]
    for weight, launches, halves, largest, (in_rows, transposed, scales) in (of_up, of_down):
        same, other = (transposed, in_rows) if weight.transposed else (in_rows, transposed)
        for launch in launches:
            run.launch(launch, *halves, largest, same, other, scales)
