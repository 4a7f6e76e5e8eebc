"""Saved records to docs/results.md, the plots, and the figures of README and docs/performance.md.

`python -m bench.report` writes them all.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench import (
    accuracy_report,
    cases,
    fp8_report,
    language_model_report,
    other_gpus,
    parallel_report,
    save_report,
    summary,
    sweep_report,
    transformers_report,
    two_gpus,
)
from bench.recorded import OURS, POLICIES, TITLES, Records, beside_peers, routed_mib, title
from bench.table import PASSES, number, span

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are numbers."""
    first, *lines = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", first, f"|---|{'---:|' * (len(head) - 1)}", *lines, ""]


def ms(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3)


def us(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e6)


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def mib(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def printed_ms(value: float | None) -> str:
    """The paper's number as it prints it."""
    return "-" if value is None else f"{value:g}"


def sources(records: Records) -> list[str]:
    """The records, and once above them the GPU and the versions that most of them have."""
    about = {}
    for name, record in records.by_name.items():
        machine = record["machine_info"]
        gpu = f"{machine['gpu']}, {machine.get('power_limit_w', '?')} W, driver {machine.get('driver')}"
        versions = (f"{n} {machine[n]}" for n in ("torch", "triton", "cupy") if machine.get(n))
        about[name] = ", ".join([gpu, *versions])
    most, _ = Counter(about.values()).most_common(1)[0] if about else ("", 0)
    by_commit: dict[tuple[str, str], list[str]] = {}
    for name, record in records.by_name.items():
        own = [] if about[name] == most else [about[name]]
        own += [f"{n} {v}" for n, v in record["machine_info"].get("peers", {}).items()]
        commit = f"`{record['commit_info']['id']}`"
        by_commit.setdefault((commit, ", ".join(own) or "-"), []).append(f"`{name}.json`")
    rows = [[commit, ", ".join(names), own] for (commit, own), names in by_commit.items()]
    lines = table(["commit", "records", "beside these"], rows)
    notes = [f"`{name}.json`: {record['note']}\n" for name, record in records.by_name.items() if "note" in record]
    return ["", f"Records are of {most}, unless they say otherwise.", *lines, *notes]


def _of_many_cases(keys: Iterable[tuple[str, str, str]]) -> set[str]:
    """Providers in keys of case, order and provider, but for other layers that ran on one or two of many cases, which
    have a table of their own."""
    cases_of: dict[str, set[str]] = {}
    for case, _, provider in keys:
        cases_of.setdefault(provider, set()).add(case)
    many = max(map(len, cases_of.values()), default=0) > 2
    return {name for name, found in cases_of.items() if len(found) > 2 or name in OURS or not many}


def layer_section(records: Records, what: str, heading: str) -> list[str]:
    """Cases by providers: ms, and in brackets times the bound of the same run. The bound shown is moeblaze's.
    [] where no record has this."""
    entries = {key: entry for key, entry in records.entries().items() if what in entry}
    if not entries:
        return []
    shown = _of_many_cases(entries)
    columns = [
        (name, order)
        for name in (*OURS, *TITLES)
        if name in shown
        for order in ("transposed", "row")
        if name != "cublas_bound" and any(key[1:] == (order, name) for key in entries)
    ]
    head = ["case", "cuBLAS bound"]
    head += [title(name) + (", row-major" if order == "row" else "") for name, order in columns]
    rows = []
    for case in (name for name in cases.LAYERS if any(key[0] == name for key in entries)):
        cells = [case]
        cells.append(ms(entries.get((case, "transposed", "moeblaze"), {}).get(f"{what}_bound")))
        for name, order in columns:
            entry = entries.get((case, order, name))
            cells.append(f"{ms(entry[what])} ({ratio(entry.get(f'{what}_ratio'))})" if entry else "-")
        rows.append(cells)
    return ["", f"### {heading}, calls back to back, ms (times the bound)", *table(head, rows)]


def single_calls(records: Records) -> list[str]:
    """How long a single call of this package takes beside calls back to back."""
    found = [entry for (_, _, name), entry in records.entries().items() if name == "moeblaze"]
    spans = [
        span(entry[what] / entry[f"{what}_back_to_back"] for entry in found if f"{what}_back_to_back" in entry)
        for what in ("forward", "forward_backward")
        if any(f"{what}_back_to_back" in entry for entry in found)
    ]
    about = "A single call of `moeblaze` takes {} times as long as one of these forward, {} times with backward."
    return ["", about.format(*spans), ""] if len(spans) == 2 else []


def shapes_section(records: Records) -> list[str]:
    """What the cases of the layer's tables are, those of other GPUs included; [] without one."""
    found = {key[0] for key in records.entries()}
    found |= {row["case"] for rows in other_gpus.by_gpu().values() for row in rows} if found else set()
    named = [name for name in cases.LAYERS if name in found]
    shapes = [cases.LAYERS[name] for name in named]
    rows = [
        [cases.NAMES.get(s.name, s.source), f"`{s.name}`", *(f"{n:,}" for n in (s.L, s.d, s.h, s.E, s.k))]
        for s in shapes
    ]
    return table(["layer of", "case", "L", "d", "h", "E", "k"], rows) if rows else []


def peer_section(records: Records) -> list[str]:
    """Peers by case, but for those that have columns in the layer's tables, which are of random routing."""
    found = {
        (case, name): times
        for (case, name), times in beside_peers(records).items()
        if name != "torch_grouped_mm" and not (name == "sonicmoe" and cases.LAYERS[case].routing == "random")
    }
    shown = (*(what for what in PASSES if what.endswith("back_to_back")), "peak")
    rows = [
        [case, title(name), *(ratio(found[case, name].get(what)) for what in shown)]
        for case in cases.LAYERS
        for name in TITLES
        if (case, name) in found
    ]
    return table(["case", "layer", "forward", "forward and backward", "our peak over its"], rows) if rows else []


def _with(records: Records, figure: str) -> tuple[dict[tuple[str, str], dict], list[str], list[str]]:
    """Layer rows that have a figure, weights as transformers stores them, by case and provider; their providers and
    their cases in the tables' order."""
    entries = {
        (case, provider): entry
        for (case, order, provider), entry in records.entries().items()
        if order == "transposed" and entry.get(figure) is not None
    }
    shown = _of_many_cases((case, "transposed", provider) for case, provider in entries)
    providers = [name for name in (*OURS, *TITLES) if name in shown]
    return entries, providers, [name for name in cases.LAYERS if any(key[0] == name for key in entries)]


def power(records: Records) -> list[str]:
    """What this package's layers draw in calls back to back, of all cases in which it was measured."""
    entries, *_ = _with(records, "forward_watts")
    ours = [entry for (_, name), entry in entries.items() if name == "moeblaze"]
    watts = [entry[f"{what}_watts"] for entry in ours for what in PASSES[:2] if f"{what}_watts" in entry]
    if not watts:
        return []
    drawn = f"{min(watts):.0f} to {max(watts):.0f} W (NVML, {len(ours)} cases)"
    return ["", f"Called back to back for a second this layer draws {drawn}."]


def error_section(records: Records) -> list[str]:
    """Relative errors in thousandths, least to greatest of the cases: this package's, and those of torch operations."""
    entries, shown, named = _with(records, "errors")
    lines = []
    for name in (n for n in shown if n in ("moeblaze", "torch_grouped_mm", "torch_routed")):
        of_case = [entries[case, name]["errors"] for case in named if (case, name) in entries]
        spans = (span(1e3 * errors[result] for errors in of_case) for result in cases.RESULTS)
        lines.append([title(name), str(len(of_case)), *spans])
    head = ["provider", "layers", "out", *(f"gradient of {name}" for name in cases.RESULTS[1:])]
    return table(head, lines) if lines else []


def small_batch_section(records: Records) -> list[str]:
    """Forward on small batches: us, and times the reading of the touched weights."""
    lines = [
        [r["case"], r["shape"], f"{r['touched_experts']:.1f}", us(r["seconds"]), ratio(r.get("times_bound")),
         number(r.get("gb_per_s"))]
        for r in records.rows("small_batch")
    ]  # fmt: skip
    return table(["case", "shape", "experts touched", "µs", "times their reading", "GB/s of weights"], lines)


def saved_peak(row: dict) -> str:
    """MiB, in one cell."""
    return f"{mib(row['saved_mib'])} / {mib(row['peak_mib'])}" if row.get("saved_mib") is not None else "-"


def layer_memory(records: Records) -> list[str]:
    """MiB of the layer suite: saved for backward, and the peak."""
    entries, shown, named = _with(records, "saved_mib")
    rows = [
        [case, *(saved_peak(entries.get((case, name), {})) for name in shown), mib(routed_mib(cases.LAYERS[case]))]
        for case in named
    ]
    head = ["case", *map(title, shown), "routed buffers, saved"]
    return ["", "### Memory of one forward and backward, saved / peak, MiB", *table(head, rows)]


TABLE2 = (*cases.GROUPS["table2"], *cases.GROUPS["table2_silu"])
IN_TABLE2 = {"moeblaze", "torch_grouped_mm"}  # whose memory table 2 has


def memory_section(records: Records) -> list[str]:
    by_case: dict[str, dict] = {}
    for row in records.rows("memory"):
        by_case.setdefault(row["case"], {})[row["provider"]] = row
    providers = [n for n in (*POLICIES, "torch_grouped_mm") if any(n in rows for rows in by_case.values())]
    head = ["case", *map(title, providers), "paper, MB", "MegaBlocks, MB"]
    lines = []
    for name in (n for n in cases.LAYERS if n in by_case and not (n in TABLE2 and by_case[n].keys() <= IN_TABLE2)):
        cells = [name, *(saved_peak(by_case[name].get(provider, {})) for provider in providers)]
        printed = {p.system: p for p in cases.LAYERS[name].paper}
        for system in ("MoEBlaze", "MegaBlocks"):
            paper = printed.get(system)
            value = "-" if paper is None else mib(paper.memory_mb) if paper.memory_mb else paper.note
            lead = {"approximately": "about ", "over": "over "}.get(paper.note, "") if paper and paper.memory_mb else ""
            cells.append(lead + value)
        lines.append(cells)
    return table(head, lines)


def table2_section(records: Records) -> list[str]:
    """Time of a single call and memory of the default policy beside what the paper prints, which is h = 256 alone."""
    entries = records.entries()
    memory_rows = {(r["case"], r["provider"]): r for r in records.rows("memory")}
    rows = []
    for name in TABLE2:
        case = cases.LAYERS[name]
        printed = {p.system: p for p in case.paper}
        kept, torchs = (memory_rows.get((name, provider), {}) for provider in sorted(IN_TABLE2))
        measured = entries.get((name, "transposed", "moeblaze"), {}).get("forward_backward", kept.get("seconds"))
        if measured is None or not printed:
            continue
        blaze, block = (printed[system] for system in ("MoEBlaze", "MegaBlocks"))
        cells = [name, ms(measured), printed_ms(blaze.time_ms), block.note or printed_ms(block.time_ms)]
        cells += [saved_peak(row) for row in (kept, torchs)]
        rows.append([*cells, mib(blaze.memory_mb), block.note or mib(block.memory_mb)])
    head = ["case", "moeblaze, H200, ms", "paper, H100, ms", "MegaBlocks, H100, ms"]
    head += [f"{title(n)}, MiB" for n in sorted(IN_TABLE2)]
    head += ["paper, MB", "MegaBlocks, MB"]
    return table(head, rows) if rows else []


def dispatch_section(records: Records) -> list[str]:
    by_case: dict[str, dict] = {}
    for row in records.rows("dispatch"):
        by_case.setdefault(row["case"], {})[row["provider"]] = row
    others = [n for n in ("torch_sort", "sonicmoe") if any(n in rows for rows in by_case.values())]
    head = ["case", "shape", "copy, µs", "moeblaze, µs", "times copy", *(f"{title(n)}, µs" for n in others)]
    lines, routed = [], []
    for name in (n for n in cases.DISPATCHES if n in by_case):
        rows, case = by_case[name], cases.DISPATCHES[name]
        if case.routing != "random":
            routed.append(rows["moeblaze"].get("times_bound"))
            continue
        printed = {p.system: p.time_ms for p in case.paper}
        get = lambda provider, rows=rows: rows.get(provider, {}).get("seconds")  # noqa: E731
        cells = [name, case.shape, us(get("copy")), us(get("moeblaze")), ratio(rows["moeblaze"].get("times_bound"))]
        cells += [us(get(other)) for other in others]
        lines.append([*cells, *(printed_ms(printed.get(s)) for s in ("hash", "sorting"))])
    made = table([*head, "paper's hash, ms", "paper's sort, ms"], lines)
    if routed := [times for times in routed if times]:
        made += ["", f"With other routing a million tokens take {span(routed)} times a copy ({len(routed)} cases)."]
    return made


def kernel_section(records: Records) -> list[str]:
    """A row per case and product, weights as transformers stores them, and what the other memory order costs."""
    rows = [r for r in records.rows("grouped_gemm") if (r["provider"], r["rows"]) == ("moeblaze", "gathered")]
    order = {(r["case"], r["kernel"]): r["seconds"] for r in rows if r["order"] == "row"}
    shown = [r for r in rows if r["order"] == "transposed"]
    lines = [[r["case"], r["kernel"], ratio(r.get("times_bound")), number(r.get("tflops"))] for r in shown]
    both = [order[key] / r["seconds"] for r in shown if (key := (r["case"], r["kernel"])) in order]
    about = ["", f"With row-major weights a product takes {span(both)} times as long."] if both else []
    return [*about, *table(["case", "kernel", "times cuBLAS", "TFLOP/s"], lines)]


def gather_section(records: Records) -> list[str]:
    rows = {(r["kernel"], r["order"], r["rows"]): r for r in records.rows("grouped_gemm") if r["case"] == "sec73"}
    lines = []
    for (kernel, order, kind), row in rows.items():
        contiguous = rows.get((kernel, order, "contiguous"))
        if kind == "gathered" and contiguous and contiguous["provider"] == "moeblaze":
            seconds = row["seconds"], contiguous["seconds"]
            lines.append([kernel, order, *map(ms, seconds), ratio(seconds[0] / seconds[1])])
    return table(["kernel", "order", "gathered, ms", "contiguous, ms", "ratio"], lines) if lines else []


def small_section(records: Records, group: str) -> list[str]:
    """Aggregation or router: us and times the copy of the same bytes."""
    lines = []
    for row in records.rows(group):
        if row["provider"] != "copy":
            words = [row["case"], row.get("kernel") or row["pass"], title(row["provider"])]
            lines.append([*words, us(row["seconds"]), ratio(row.get("times_bound"))])
    return table(["case", "pass", "provider", "µs", "times copy"], lines)


def router_section(records: Records) -> list[str]:
    return ["", "torch's backward is the time of forward and backward together.", *small_section(records, "router")]


def selection_section(records: Records) -> list[str]:
    """Selections and counts beside what they are compared with, and layers on pairs beside k experts per token."""
    lines = []
    for row in records.rows("selection"):
        kind = row.get("kernel") or row["pass"]
        lines.append([row["case"], kind, title(row["provider"]), us(row["seconds"]), ratio(row.get("times_bound"))])
    about = (
        "The bound is the first row of a kind: dispatch of the same ids, a copy of what is read, k experts per token."
    )
    return ["", about, *table(["case", "kind", "provider", "µs", "times bound"], lines)]


def experts_section(records: Records) -> list[str]:
    """What activations, biases and interleaved columns cost beside the layer without them."""
    passes: dict[tuple[str, str], dict[str, dict]] = {}
    for row in records.rows("experts"):
        if "back_to_back_ms" in row:
            passes.setdefault((row["case"], title(row["provider"])), {})[row["pass"]] = row
    lines = []
    for key, of in passes.items():
        cells = []
        for row in (of.get(what, {}) for what in PASSES[:2]):
            seconds = row["back_to_back_ms"] / 1e3 if row else None
            cells += [ms(seconds), *(ratio(row.get(f"back_to_back_times_{base}")) for base in ("bound", "base"))]
        lines.append([*key, *cells])
    about = "The base is the layer with swiglu, for relu2 with relu. gpt_oss: swiglu_oai, biases, interleaved columns."
    head = [
        "case",
        "layer",
        "forward, ms",
        "times bound",
        "times base",
        "with backward, ms",
        "times bound",
        "times base",
    ]
    return ["", "Calls are back to back, with row-major weights.", about, *table(head, lines)]


def ablation_section(records: Records) -> list[str]:
    rows = {(r["case"], r["provider"]): r for r in records.rows("ablation")}
    lines = []
    for name in cases.GROUPS["ablation"]:
        for step, printed in zip(cases.ABLATION, cases.LAYERS[name].paper, strict=True):
            row = rows.get((name, step))
            if row:
                measured = [ms(row["seconds"]), mib(row.get("saved_mib"))]
                lines.append([name, step, *measured, printed_ms(printed.time_ms), mib(printed.memory_mb)])
    return table(["case", "step", "ms", "saved, MiB", "paper, ms", "paper, MB"], lines)


INTRODUCTION = """How to read the tables:

- The bound is the time of the layer's matrix products alone in cuBLAS, with equal tokens per expert, no routing and no
  activation.
- "cuBLAS and copies" runs the bound's products while another stream copies what a layer reads and writes beyond them.
- `moeblaze` is `save="minimal"` on Hopper's kernels. [Other GPUs](#other-gpus) has the portable kernels.
- Weights are in transformers' memory order, unless a column says row-major. The router is not in a layer's time.
- Times are medians of device time. Ratios compare rows of one run, or of two runs times over their own bounds. The
  bound shown is that of moeblaze's run.
- "Back to back" is the mean of calls that are enqueued without waiting. Table 2 and the ablation are of single
  calls: the benchmark records two events and waits, so the time includes the host's share.
- Saved is what is kept for backward. The peak is that of the pass. Parameters, gradients and x are in neither.
- A dash means: not run. torch's layer fails if its first product has more than 2^31 elements.

The paper's numbers are from an H100, which has two thirds of the memory bandwidth of this GPU, with torch 2.0.1, and
cannot be reproduced from its sources. Compare them with one another alone. Its Tables 4 and 5 print ten times the time
of its Table 2 for the same shape."""


ERRORS = f"""The norm of the difference over the norm of the reference. The reference is the layer in float64 from the
same bf16 inputs, with all tokens and experts (above {cases.SAMPLED_ABOVE:,} tokens, samples of both). Beside this layer
stands the composition of bf16 torch operations over a routed buffer. Cells are the least and the greatest of the
layers."""
MARIN = """SonicMoE's published pass with backward at marin's shape takes 8.446 ms on one H100 (marin #7024)."""
NO_ROWS = """No rows: MegaBlocks (78eea65) does not compile with CUDA 13. FastMoE, whose experts have no gate, and Tutel
were not built for torch 2.11. DeepSpeed-MoE pads every expert to a capacity. No public code of TurboMoE was found.
DeepGEMM has no layer to train, and its products (2.6.1) crashed in the first call. TileKernels' gate needs TileLang,
which was not there. Of Megatron-Core only its experts without Transformer Engine were timed
(`bench/records/megatron/`)."""
PEERS = """Of those without a column above: the time over moeblaze's in the same run, so above 1 moeblaze is faster, and
moeblaze's peak memory over theirs."""
PROVENANCE = """`python -m bench.report` writes this page from the records in `bench/records/`. `bench/README.md` says
how they are made."""
SMALL = """`save=None`, replays of a CUDA graph that rotate over token sets, which leave the L2 cache cold. The bound is
the time to read the weights of the touched experts once, at the GB/s of a copy."""


def results(records: Records) -> str:
    """The whole of docs/results.md."""
    groups = {row["group"] for record in records.by_name.values() for row in record["benchmarks"]}
    lines = ["# Results", "", *summary.overview(records), "", INTRODUCTION]
    lines += ["", "## Layer", "", "![Time over the bound](time_over_bound.svg)", *shapes_section(records)]
    lines += layer_section(records, "forward_backward_back_to_back", "Forward and backward")
    lines += layer_section(records, "forward_back_to_back", "Forward")
    lines += ["", MARIN] * ("marin" in {entry["case"] for entry in records.layers()})
    lines += single_calls(records)
    lines += power(records)
    lines += ["", "Figures 4 and 6 of the paper give speed-ups over MegaBlocks: " + speedups()]
    lines += ["", "![Memory kept for backward and at the peak](memory.svg)", *layer_memory(records)]
    lines += ["The last column is by formula, for a layer that recomputes nothing."]
    if "memory" in groups:
        lines += ["", "### Figures 3 and 5: memory per save policy, saved / peak, MiB", *memory_section(records)]
    if table2 := table2_section(records):
        lines += ["", "### Table 2: forward and backward, time, and memory saved / peak", *table2]
    if peers := peer_section(records):
        lines += ["", "### Other layers", "", PEERS, *peers, "", NO_ROWS]
    if errors := error_section(records):
        lines += ["", "### Errors against float64, thousandths", "", ERRORS, *errors]
    lines += accuracy_report.section(records.by_name.values())
    lines += sweep_report.section(records)
    if "small_batch" in groups:
        lines += ["", "### Small batches, forward alone", "", SMALL, *small_batch_section(records)]
    for group, heading, section in (
        ("dispatch", "Table 3: dispatch", dispatch_section),
        ("grouped_gemm", "Products of the experts", kernel_section),
        ("grouped_gemm", "Section 7.3: gather against contiguous rows (paper: about 30% slower)", gather_section),
        ("aggregation", "Aggregation", lambda r: small_section(r, "aggregation")),
        ("router", "Router", router_section),
        ("selection", "Selections of pairs", selection_section),
        ("experts", "Activations, biases, interleaved columns", experts_section),
        ("ablation", "Tables 4 and 5: ablation, forward and backward", ablation_section),
    ):
        if group in groups and (body := section(records)):
            lines += ["", f"## {heading}", *body]
    lines += save_report.section(table)
    lines += fp8_report.section(table)
    lines += transformers_report.section(list(records.by_name.values()), table)
    lines += language_model_report.section(table)
    lines += parallel_report.section(table)
    lines += other_gpus.section(table, peer_section)
    lines += two_gpus.section(table, records)
    lines += ["", "## Where the figures come from", "", PROVENANCE, *sources(records)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def speedups() -> str:
    return "; ".join(f"{a}: {least} to {most} ({where})" for a, (where, least, most) in cases.SPEEDUPS.items()) + "."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true", help="text only; the plots need matplotlib")
    options = parser.parse_args()
    records = Records.load()
    RESULTS.write_text(results(records))
    for page, block in ((README, summary.readme), (PERFORMANCE, summary.performance)):
        page.write_text(summary.put(page.read_text(), block(records), page.name))
    if not options.no_plots:
        from bench import plots

        plots.write(records, ROOT / "docs")


if __name__ == "__main__":
    main()
