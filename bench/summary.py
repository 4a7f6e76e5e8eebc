"""Blocks of figures that `python -m bench.report` writes into README.md and docs/performance.md, between markers."""

import statistics
from collections.abc import Iterable

from bench import (
    accuracy_report,
    cases,
    fp8_report,
    language_model_report,
    other_gpus,
    parallel_report,
    transformers_report,
)
from bench.recorded import Records, beside_peers
from bench.table import PASSES, span

START, END = "<!-- results: written by bench/report.py -->", "<!-- end of results -->"
BACK_TO_BACK = ("forward_back_to_back", "forward_backward_back_to_back")
KERNELS = ("up_fwd", "down_fwd + sums", "down_bwd", "down_wgrad", "up_wgrad", "up_bwd + sums")
KERNEL_CASES = ("conf3", "qwen30b", "dsv3", "sonic7b")


def block(lines: Iterable[str]) -> str:
    return "\n".join([START, *lines, END])


def put(text: str, new: str, name: str) -> str:
    """The text of the file `name` with its block replaced. Raises ValueError if it has no such block."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"report: {name}: expected a block between {START!r} and {END!r}, got none")
    return before + new + after


def _ratios(records: Records, provider: str, what: str) -> dict[str, list[float]]:
    """Times the bound by case, of both memory orders."""
    found: dict[str, list[float]] = {}
    for (case, _, name), entry in records.entries().items():
        if name == provider and f"{what}_ratio" in entry:
            found.setdefault(case, []).append(entry[f"{what}_ratio"])
    return found


def _sonicmoe(records: Records) -> list[dict[str, float]]:
    """SonicMoE's times over this layer's and this layer's peak over SonicMoE's, of each shape with random routing."""
    shapes = {case for case, _, provider in records.entries() if provider == "moeblaze"}
    return [f for (case, name), f in beside_peers(records).items() if name == "sonicmoe" and case in shapes]


def readme(records: Records) -> str:
    """The front figure, and the least, greatest and median ratios of the default policy.

    All are of calls back to back, which is what a training step sees.
    """
    layers = (r for r in reversed(records.by_name.values()) if any(b["group"] == "layer" for b in r["benchmarks"]))
    gpu, peer, beside = next(layers)["machine_info"]["gpu"], [], _sonicmoe(records)
    if beside:
        times, peaks = ([f[name] for f in beside] for name in (BACK_TO_BACK[1], "peak"))
        peer = [
            f"**A training pass needs {statistics.median(peaks):.2f} of SonicMoE's peak memory and is "
            f"{statistics.median(times):.2f} times as fast**:",
            f"medians over {len(beside)} layers in bf16 on one {gpu}, calls back to back, weights in the memory order",
            f"of transformers (memory {span(peaks)}, speed {span(times)}).",
        ]
    bound = span(ratio for ratios in _ratios(records, "moeblaze", BACK_TO_BACK[1]).values() for ratio in ratios)
    points = [
        [
            f"Bound: a training pass takes {bound} times as long as the layer's matrix products alone in cuBLAS,",
            "in either memory order of the weights.",
        ],
        transformers_report.headline(list(records.by_name.values())),
        accuracy_report.headline(records.by_name.values()),
        language_model_report.headline(),
        fp8_report.headline(),
        parallel_report.headline(),
        other_gpus.headline(),
    ]
    return block(
        [
            *peer,
            "",
            *("- " + "\n  ".join(lines) for lines in points if lines),
            "",
            "![Time and peak memory of five MoE layers: moeblaze-cupy, SonicMoE and torch](docs/front.svg)",
            "",
            "[docs/results.md](docs/results.md) has every shape, the paper's numbers and other layers.",
        ]
    )


def performance(records: Records) -> str:
    """What docs/performance.md says of the state: ratios of layers, of dispatch and of single kernels."""
    rows = []

    def row(words: str, forward: str, both: str) -> None:
        rows.append(f"| {words} | {forward} | {both} |")

    def greatest(provider: str, chosen) -> list[str]:
        """Of each shape the worse memory order."""
        by_pass = (_ratios(records, provider, what) for what in BACK_TO_BACK)
        return [span(max(ratios) for case, ratios in found.items() if chosen(case)) for found in by_pass]

    small = [case for case in _ratios(records, "moeblaze", BACK_TO_BACK[0]) if case.startswith("tab2")]
    shapes = len(_ratios(records, "moeblaze", BACK_TO_BACK[0])) - len(small)
    row(f"times the bound, {shapes} shapes", *greatest("moeblaze", lambda case: case not in small))
    row(f"times the bound, {len(small)} shapes of Table 2 (d 256, h 512)", *greatest("moeblaze", lambda c: c in small))
    portable = len(_ratios(records, "moeblaze_sm80", BACK_TO_BACK[0]))
    row(f"times the bound, the portable tier, {portable} shapes", *greatest("moeblaze_sm80", lambda case: True))
    beside = _sonicmoe(records)
    row("SonicMoE's time over this layer's", *(span(f[what] for f in beside if what in f) for what in BACK_TO_BACK))
    row("this layer's peak memory over SonicMoE's", "-", span(f["peak"] for f in beside if "peak" in f))
    skewed = [row for row in records.rows("layer") if row["routing"] == "skewed" and row["provider"] == "moeblaze"]
    of_random = [
        span(row[what] / row[f"{what}_random"] for row in skewed for what in passes if f"{what}_random" in row)
        for passes in (PASSES[::2], PASSES[1::2])
    ]
    row("skewed over random routing", *of_random)
    few = span(row["times_bound"] for row in records.rows("small_batch") if "times_bound" in row)
    row("16 to 1,024 tokens over reading the touched weights", few, "-")
    dispatch = [
        row["times_bound"]
        for row in records.rows("dispatch")
        if row["provider"] == "moeblaze" and row["case"] in cases.GROUPS["table3"] and "times_bound" in row
    ]
    row("dispatch of a million tokens over a copy of its bytes", span(dispatch), "-")
    head = ["| least to greatest | forward | forward and backward |", "|---|---:|---:|"]
    return block([*head, *rows, "", *_kernels(records)])


def _kernels(records: Records) -> list[str]:
    """Times cuBLAS's product of each single kernel, of some shapes."""
    times = {
        (row["case"], row["kernel"]): row["times_bound"]
        for row in records.rows("grouped_gemm")
        if (row["provider"], row["rows"], row["order"]) == ("moeblaze", "gathered", "transposed")
        and "times_bound" in row
    }
    shown = [case for case in KERNEL_CASES if any(case == key[0] for key in times)]
    if not shown:
        return []
    cells = [[f"{times[case, k]:.2f}" if (case, k) in times else "-" for case in shown] for k in KERNELS]
    head = [f"| times cuBLAS's product | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
    return head + [f"| {kernel} | {' | '.join(line)} |" for kernel, line in zip(KERNELS, cells, strict=True)]
