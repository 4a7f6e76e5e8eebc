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
from bench.table import span

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


def _layers(records: Records, provider: str) -> list[dict[str, float]]:
    """A training pass of each shape with random routing, weights in transformers' order, calls back to back: the time
    of another layer over this one's, each over the bound of its own run, and the MiB that it has more at the peak."""
    entries, ratio = records.entries(), f"{BACK_TO_BACK[1]}_ratio"
    both = [
        (entries.get((case, "transposed", "moeblaze"), {}), theirs)
        for (case, order, name), theirs in entries.items()
        if (order, name) == ("transposed", provider)
    ]
    return [
        {"time": theirs[ratio] / ours[ratio], "more": theirs["peak_mib"] - ours["peak_mib"]}
        for ours, theirs in both
        if ratio in ours and ratio in theirs
    ]


def _of_layers(rows: list[dict[str, float]]) -> list[str]:
    """Two cells: the span of times, of three or more with the median, and the span of GiB."""
    times = [row["time"] for row in rows]
    middle = f"{statistics.median(times):.2f} ({span(times)})" if len(times) > 2 else span(times)
    return [middle, span(row["more"] / 1024 for row in rows)]


def _gpu(records: Records) -> str:
    layers = (r for r in reversed(records.by_name.values()) if any(b["group"] == "layer" for b in r["benchmarks"]))
    return next(layers)["machine_info"]["gpu"]


def _table(records: Records) -> list[str]:
    """Time and memory of other layers beside this one: layers by GPU, then steps of whole models."""
    rows, not_run = [], ["not run", "not run"]
    torchs, sonicmoe = (_layers(records, name) for name in ("torch_grouped_mm", "sonicmoe"))
    name = f"One layer, {_gpu(records)}, {len(torchs)} shapes"
    name += f" (SonicMoE: {len(sonicmoe)})" if len(sonicmoe) != len(torchs) else ""
    rows.append([name, *_of_layers(torchs), *_of_layers(sonicmoe)])
    for gpu, of_gpu in other_gpus.by_gpu().items():
        found = [{"time": row["passes"][other_gpus.SHOWN[1]][2], "more": row["peer_more_mib"]} for row in of_gpu]
        beside = [row[other_gpus.SONICMOE] for row in of_gpu if row[other_gpus.SONICMOE]]
        name = f"One layer, {gpu}, {len(found)} shapes" + (f" (SonicMoE: {len(beside)})" if beside else "")
        rows.append([name, *_of_layers(found), *(_of_layers(beside) if beside else not_run)])
    for (case, what), (ours, base) in transformers_report.steps(list(records.by_name.values()), STEPS_SHOWN).items():
        mode = "compiled" if what.endswith("compiled") else "eager"
        more = (base["peak_mib"] - ours["peak_mib"]) / 1024
        speed = ours["tokens_per_second"] / base["tokens_per_second"]
        name = f"Step of {STEPS_SHOWN[case]}, {_gpu(records)}, {mode}"
        rows.append([name, f"{speed:.2f}", f"{more:.1f}", *not_run])
    head = ["", "torch `grouped_mm`: time", "GiB more", "SonicMoE: time", "GiB more"]
    lines = (head, ["---", *["---:"] * 4], *rows)
    return ["| " + " | ".join(cells) + " |" for cells in lines]


STEPS_SHOWN = {
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_30b_a3b_lora_4k": "Qwen3-30B-A3B's adapters, 4k tokens",
    "qwen3_30b_a3b_lora_32k": "Qwen3-30B-A3B's adapters, 32k tokens",
}
ABOUT = """The table compares training passes and steps with torch's `grouped_mm` and with
[SonicMoE](https://arxiv.org/abs/2512.14080) in bf16. Time is theirs over this layer's, median (range):
above 1 this layer is faster. Memory is how much more they allocate at the peak: what all share, such as weights,
gradients and optimizer state, cancels out. A layer's time is forward and backward without the router. A step is that of
a model of transformers with 4 layers and a vocabulary of 8,192: router, attention, loss and AdamW are in it. Adapters
are peft's of rank 16."""


def readme(records: Records) -> str:
    """The front figure and the table of times and memory; all layers of calls back to back, as in training."""
    bounds = [of_gpu["passes"][other_gpus.SHOWN[1]][1] for of_gpu in portable()]
    return block(
        [
            "![Time and peak memory of five MoE layers: moeblaze-cupy, SonicMoE and torch](docs/front.svg)",
            "",
            *_table(records),
            "",
            *ABOUT.splitlines(),
            f"The portable kernels, for other cards than Hopper, take {span(bounds)} times as long as their products",
            f"in cuBLAS on an H200 ({len(bounds)} shapes).",
            "[All results](docs/results.md) name the commit of each record.",
        ]
    )


def portable() -> list[dict]:
    """Layers of the portable kernels, as `other_gpus.layers` has them, of every GPU."""
    return [row for gpu, rows in other_gpus.by_gpu().items() if gpu.endswith("portable kernels") for row in rows]


def overview(records: Records) -> list[str]:
    """What docs/results.md begins with: least, greatest and median ratios of the default policy, of calls back to back,
    and a sentence or two on each other suite."""
    peer, beside = [], _sonicmoe(records)
    if beside:
        times, peaks = ([f[name] for f in beside] for name in (BACK_TO_BACK[1], "peak"))
        peer = [
            f"SonicMoE: a training pass is {statistics.median(times):.2f} times as fast and needs "
            f"{statistics.median(peaks):.2f} of its peak memory",
            "beyond weights and gradients:",
            f"medians over {len(beside)} layers in bf16 on one {_gpu(records)}, weights in the memory order",
            f"of transformers (speed {span(times)}, memory {span(peaks)}).",
        ]
    ratios = [ratio for found in _ratios(records, "moeblaze", BACK_TO_BACK[1]).values() for ratio in found]
    bound = [
        f"Bound: a training pass takes {span(ratios)} times as long as the layer's matrix products alone in cuBLAS,",
        "in either memory order of the weights where both ran.",
    ]
    points = [
        bound if ratios else [],
        peer,
        transformers_report.headline(list(records.by_name.values())),
        accuracy_report.headline(records.by_name.values()),
        language_model_report.headline(),
        fp8_report.headline(),
        parallel_report.headline(),
        other_gpus.headline(),
    ]
    return ["- " + "\n  ".join(lines) for lines in points if lines]


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
    of_portable = portable()
    spans = [span(of["passes"][what][1] for of in of_portable) for what in other_gpus.SHOWN]
    row(f"times the bound, the portable tier, {len(of_portable)} shapes", *spans)
    beside = _sonicmoe(records)
    row("SonicMoE's time over this layer's", *(span(f[what] for f in beside if what in f) for what in BACK_TO_BACK))
    row("this layer's peak memory over SonicMoE's", "-", span(f["peak"] for f in beside if "peak" in f))
    skewed = [row for row in records.rows("layer") if row["routing"] == "skewed" and row["provider"] == "moeblaze"]
    of_bound = (span(row[f"{what}_ratio"] for row in skewed if f"{what}_ratio" in row) for what in BACK_TO_BACK)
    row(f"times the bound with skewed routing, {len(skewed)} shapes", *of_bound)
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
