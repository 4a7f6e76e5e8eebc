"""Counts for balancing the load of experts: kernels_cu/selection/balance.cu."""

from collections.abc import Sequence
from dataclasses import dataclass

from moeblaze_cupy.cuda import clear, launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.frameworks import Buffer, Layout
from moeblaze_cupy.selection import config as selection_config
from moeblaze_cupy.selection.launches import Sequences
from moeblaze_cupy.types import SCORES


@dataclass(frozen=True, eq=False)
class Counts:
    """The launches of tokens_per_expert."""

    clear: Launch
    count: Launch


@cached
def configure_counts(ids: Layout, num_experts: int, sequences: Sequences, limits: DeviceLimits) -> Counts | None:
    """Returns the launches for ids (L, k), whose rows may lie apart, or None without tokens."""
    L, k = ids.shape
    if L == 0:
        return None
    fewest, threads = launch_config.ceil_div(4096, k), selection_config.COUNT_THREADS
    blocks, longest = 4 * limits.multiprocessors, sequences.longest(L)
    parts = selection_config.parts_of_sequence(sequences.number, longest, blocks, fewest, longest)
    count = Launch(
        loader.entry("balance.cu", f"tokens_per_expert_{ids.dtype}"),
        (sequences.number * parts,),
        threads,
        ("ids", "sequences", "counts"),
        {
            "L": L,
            "row_stride": ids.strides[0],
            "k": k,
            "num_experts": num_experts,
            "num_sequences": sequences.number,
            "parts": parts,
        },
        4 * num_experts,
        overlaps=True,
    )
    return Counts(clear.configure(sequences.number * num_experts), count)


def tokens_per_expert(run: Runtime, plan: tuple[Counts | None, tuple[int, int]], pointers: Sequence[int]) -> Buffer:
    """Returns slots per sequence and expert, int32. plan: the steps, and the shape (S, E). pointers: ids, sequences."""
    steps, shape = plan
    counts = run.empty(shape, "int32")
    if steps:
        run.launch(steps.clear, counts.ptr)
        run.launch(steps.count, *pointers, counts.ptr)
    elif shape[0]:
        run.clear(counts.ptr, 4 * shape[0] * shape[1])
    return counts


@dataclass(frozen=True, eq=False)
class Quantiles:
    """The launches of quantile_histogram."""

    num_tokens: int
    lines: Launch
    counts: Launch


@cached
def configure_quantiles(logits: Layout, ids: Layout, bins: int, score: str, limits: DeviceLimits) -> Quantiles | None:
    """Returns the launches for logits (L, E) and ids (L, k), or None without tokens."""
    L, E = logits.shape
    if L == 0:
        return None
    threads, columns = selection_config.COUNT_THREADS, selection_config.quantile_columns(bins)
    groups, kind = launch_config.ceil_div(E, columns), SCORES.index(score)
    lines = Launch(
        loader.entry("balance.cu", f"quantile_lines_{logits.dtype}_{ids.dtype}"),
        (launch_config.ceil_div(L, threads // 32),),
        threads,
        ("logits", "ids", "bias", "lines"),
        {"L": L, "k": ids.shape[1], "num_experts": E, "score": kind},
    )
    blocks = launch_config.ceil_div(4 * limits.multiprocessors, groups)
    counts = Launch(
        loader.entry("balance.cu", f"quantile_counts_{logits.dtype}"),
        (selection_config.parts_of_sequence(1, L, blocks, 1024, L), groups),
        threads,
        ("logits", "lines", "bounds", "histogram"),
        {"L": L, "num_experts": E, "score": kind, "bins": bins, "columns": columns},
        4 * columns * bins,
        overlaps=True,
    )
    return Quantiles(L, lines, counts)


def quantile_histogram(run: Runtime, steps: Quantiles | None, pointers: Sequence[int]) -> None:
    """Adds to the histogram (E, bins). pointers: logits, ids, bias, bounds, histogram."""
    if steps is None:
        return
    logits, ids, bias, bounds, histogram = pointers
    lines = run.empty((steps.num_tokens, 2), "float32")
    run.launch(steps.lines, logits, ids, bias, lines.ptr)
    run.launch(steps.counts, logits, lines.ptr, bounds, histogram)
