"""The plots of the README and of docs/results.md, drawn from the records. SVG, through matplotlib.

`front` is the README's: five layers, three systems, every bar with its figure. `times` and `memory` show all
shapes and the systems that were measured on more than one.
"""

import json
import math
from functools import partial
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "moeblaze"  # the same file for the same records
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from bench import cases, language_model_report, other_gpus, parallel_report, sweep_report, transformers_report  # noqa: E402
from bench.recorded import RECORDS, Records, title  # noqa: E402

LONG_SEQUENCES = RECORDS / "long_sequences" / "h200.json"
OURS = "moeblaze-cupy"
FRONT_CASES = ("mixtral", "olmoe", "qwen30b", "dsv3", "conf3")
# color, and the marker of the plots with all shapes
STYLES = {
    "moeblaze": ("#0b5394", "o"),
    "sonicmoe": ("#e69138", "D"),
    "torch_grouped_mm": ("#a3a3a3", "s"),
}
FRONT_PROVIDERS = ("moeblaze", "sonicmoe", "torch_grouped_mm")
INK, FAINT = "#222222", "#cfcfcf"
ARM_COLORS = {"fp32": INK, "grouped_mm": "#a3a3a3", "minimal": STYLES["moeblaze"][0], "recompute": "#e69138"}
ARM_COLORS |= {"save_fp8": "#6fa8dc", "fp8": "#8e63b5", "fp8_wgrad": "#38761d", "rounded": "#cc4125"}


def label(provider: str) -> str:
    """A provider's name in a plot."""
    return OURS if provider == "moeblaze" else title(provider)


def gpu_of(records: Records) -> str:
    """The GPU of the newest record of layers."""
    layers = (r for r in reversed(records.by_name.values()) if any(b["group"] == "layer" for b in r["benchmarks"]))
    return next(layers)["machine_info"]["gpu"]


def figures(records: Records, name: str) -> dict[str, dict[str, float]]:
    """A figure of the layer's rows by provider and case, weights as transformers stores them, of the providers that ran
    on more than one case."""
    found: dict[str, dict[str, float]] = {}
    for (case, order, provider), entry in records.entries().items():
        if order == "transposed" and provider in STYLES and entry.get(name):
            found.setdefault(provider, {})[case] = entry[name]
    return {provider: found[provider] for provider in STYLES if len(found.get(provider, ())) > 1}


def of_cards(records: Records, name: str) -> dict[str, dict[str, dict[str, float]]]:
    """`figures` by GPU, of each that has all of the front figure."""
    others: dict[str, dict[str, dict]] = {}
    for record in other_gpus.records():
        others.setdefault(other_gpus.name_of(record), {})[record["datetime"]] = record
    found = {gpu_of(records): figures(records, name)}
    found |= {gpu: figures(Records(of_gpu), name) for gpu, of_gpu in others.items()}
    wanted = [(provider, case) for provider in FRONT_PROVIDERS for case in FRONT_CASES]
    return {gpu: of for gpu, of in found.items() if all(case in of.get(provider, {}) for provider, case in wanted)}


def front(records: Records) -> Figure:
    """Forward and backward of five layers, calls back to back: time over cuBLAS's products by GPU, and peak memory."""
    cards = of_cards(records, "forward_backward_back_to_back_ratio")
    panels = [(series, 1.0, f"Time, {' '.join(gpu.split()[:2])}") for gpu, series in cards.items()]
    panels.append((figures(records, "peak_mib"), 1024.0, "Peak memory, GiB"))
    figure, drawn = plt.subplots(1, len(panels), figsize=(10.8, 5.2), sharey=True, layout="constrained")
    height = 0.27
    for axes, (series, unit, heading) in zip(drawn, panels, strict=True):
        is_time = unit == 1.0
        for row, case in enumerate(FRONT_CASES):
            for bar, provider in enumerate(FRONT_PROVIDERS):
                value, y = series[provider][case] / unit, row + (bar - 1) * height
                ours = provider == "moeblaze"
                axes.barh(y, value, height * 0.92, color=STYLES[provider][0])
                text = f" {value:.2f}" + (f"  {label(provider)}" if row == 0 else "")
                axes.text(value, y, text, va="center", color=INK, fontsize=9, fontweight="bold" if ours else "normal")
        axes.set_title(heading, fontsize=10, loc="left", color=INK)
        # the names stand beside the first row's bars
        longest = max(max(series[p][c] for c in FRONT_CASES) for p in FRONT_PROVIDERS)
        named = max(series[p][FRONT_CASES[0]] for p in FRONT_PROVIDERS)
        axes.set_xlim(0, max(1.16 * longest, 1.75 * named) / unit)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=6)
        if is_time:
            axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate("cuBLAS = 1", (1, len(FRONT_CASES) - 0.52), (1.05, len(FRONT_CASES) - 0.52), fontsize=8,
                          color=INK, va="center")  # fmt: skip
    shapes = [cases.LAYERS[case] for case in FRONT_CASES]
    names = [f"{cases.NAMES[s.name]}\n{s.E} experts, top {s.k}\nd {s.d}, h {s.h}" for s in shapes]
    drawn[0].set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    drawn[0].set_ylim(len(names) - 0.35, -0.55)
    figure.suptitle(
        "A training pass of one MoE layer: faster than SonicMoE and torch, in less memory",
        fontsize=12.5, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        "One GPU, bf16, SwiGLU, forward and backward, calls back to back. Time is in units of the layer's\n"
        "matrix products in cuBLAS, memory beyond weights and gradients. Shorter is better.",
        fontsize=8.5, color=INK,
    )  # fmt: skip
    return figure


def dots(
    panels: dict[str, dict[str, dict[str, float]]],
    heading: str,
    xlabel: str,
    ticks: tuple[float, ...],
    apart: float = 0.0,
) -> Figure:
    """A row per case and a panel per heading; panels[heading][provider][case] is where a dot goes, on a log scale.

    apart: by how much of a row the providers' dots lie above one another, where many are at one place.
    """
    shown = [provider for provider in STYLES if any(provider in series for series in panels.values())]
    names = [n for n in cases.LAYERS if any(n in series for panel in panels.values() for series in panel.values())]
    figure, drawn = plt.subplots(
        1, len(panels), figsize=(9.6, 1.5 + 0.32 * len(names)), sharey=True, sharex=True, layout="constrained"
    )
    for axes, (panel, series) in zip(drawn, panels.items(), strict=True):
        axes.hlines(range(len(names)), 0, 1, transform=axes.get_yaxis_transform(), color=FAINT, linewidth=0.6, zorder=0)
        for provider, values in series.items():
            color, marker = STYLES[provider]
            rows = [i for i, name in enumerate(names) if name in values]
            size = 34 if provider == "moeblaze" else 56  # a smaller dot on top, where two are at one place
            order = 3 if provider == "moeblaze" else 2
            places = [values[names[i]] for i in rows]
            rows = [i + apart * (shown.index(provider) - (len(shown) - 1) / 2) for i in rows]
            axes.scatter(places, rows, size, color=color, marker=marker, zorder=order, label=label(provider))
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(panel, fontsize=10, loc="left", color=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"{xlabel}, logarithmic", fontsize=9, color=INK)
    drawn[0].set_yticks(range(len(names)), [cases.NAMES[name] for name in names], color=INK)
    drawn[0].set_ylim(len(names) - 0.5, -0.5)
    by_label = {}
    for axes in drawn:
        by_label |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(by_label.values(), by_label, loc="outside lower center", fontsize=9, frameon=False, ncols=3)
    figure.suptitle(heading, fontsize=12, fontweight="bold", color=INK)
    return figure


def times(records: Records) -> Figure:
    """Times the cuBLAS bound of all shapes and systems, calls back to back."""
    figure = dots(
        {
            "forward": figures(records, "forward_back_to_back_ratio"),
            "forward and backward": figures(records, "forward_backward_back_to_back_ratio"),
        },
        f"Time over the layer's matrix products in cuBLAS ({gpu_of(records)}, bf16, SwiGLU, back to back)",
        "times the cuBLAS bound",
        (1, 1.2, 1.5, 2, 3, 4),
    )
    for axes in figure.axes:
        axes.axvline(1, color=INK, linewidth=0.8)
    return figure


def memory(records: Records) -> Figure:
    """MiB kept for backward and at the peak, of all shapes and systems."""
    return dots(
        {
            "kept for backward": figures(records, "saved_mib"),
            "peak of forward and backward": figures(records, "peak_mib"),
        },
        f"Memory beyond parameters, gradients and x ({gpu_of(records)}, bf16, SwiGLU)",
        "MiB",
        (200, 500, 1000, 2000, 5000, 10000),
        apart=0.22,
    )


def swept(records: Records, sweep: str) -> Figure | None:
    """Times the cuBLAS bound of a training pass by the number that a sweep changes: a panel per GPU, a line per
    provider. None without a record."""
    found = sweep_report.points(records, sweep)
    if not found:
        return None
    changed, heading = sweep_report.SWEEPS[sweep]
    figure, drawn = plt.subplots(
        1, len(found), figsize=(max(5.5, 4.8 * len(found)), 3.6), layout="constrained", squeeze=False, sharey=True
    )
    numbers = [getattr(cases.LAYERS[name], changed) for name in cases.GROUPS[sweep]]
    shape = cases.LAYERS[cases.GROUPS[sweep][0]]
    by_label = {}
    for axes, (gpu, series) in zip(drawn[0], found.items(), strict=True):
        for provider in (name for name in STYLES if name in series):
            color, marker = STYLES[provider]
            of_provider = sorted(series[provider].items())
            axes.plot(*zip(*of_provider, strict=True), color=color, marker=marker, label=label(provider))
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, map(str, numbers))
        axes.set_xlim(numbers[0] / 1.2, numbers[-1] * 1.2)
        axes.set_title(gpu, fontsize=10, loc="left", color=INK)
        axes.set_xlabel(f"{changed}, logarithmic", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        by_label |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    most = 1.05 * max(max(values.values()) for series in found.values() for values in series.values())
    drawn[0][0].set_ylim(0.9, most)
    drawn[0][0].set_yticks([tick for tick in drawn[0][0].get_yticks() if 0.9 <= tick <= most])
    drawn[0][0].set_ylabel("times the cuBLAS bound", fontsize=9, color=INK)
    figure.legend(by_label.values(), by_label, loc="outside lower center", fontsize=9, frameon=False, ncols=3)
    figure.suptitle(f"{heading} (L {shape.L:,}, d {shape.d:,}, bf16)", fontsize=11, fontweight="bold", color=INK)
    return figure


def transformers(records: Records) -> Figure | None:
    """Training steps of models of transformers: tokens per second and peak memory. None without a record."""
    bars = transformers_report.bars(list(records.by_name.values()))
    if not bars:
        return None
    colors = {"moeblaze": STYLES["moeblaze"][0], "sonicmoe": STYLES["sonicmoe"][0], "grouped_mm": "#a3a3a3"}
    figure, both = plt.subplots(1, 2, figsize=(9.0, 0.9 + 0.9 * len(bars)), sharey=True, layout="constrained")
    for panel, (axes, heading) in enumerate(zip(both, ("Tokens per second", "Peak memory, GiB"), strict=True)):
        for group, series in enumerate(bars.values()):
            height = 0.8 / len(series)
            for place, (name, values) in enumerate(series.items()):
                y = group + (place - (len(series) - 1) / 2) * height
                axes.barh(y, values[panel], 0.92 * height, color=colors.get(name, FAINT))
                figures = f" {values[panel]:,.0f}" if panel == 0 else f" {values[panel]:.1f}"
                axes.text(values[panel], y, f"{figures}  {label(name)}", va="center", color=INK, fontsize=8.5)
        axes.set_title(heading, fontsize=10, loc="left", color=INK)
        axes.set_xlim(0, 1.5 * max(values[panel] for series in bars.values() for values in series.values()))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    modes = {"step": "eager", "step_compiled": "compiled"}
    names = [f"{transformers_report.MODELS[case]}\n{modes[what]}" for case, what in bars]
    both[0].set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    both[0].set_ylim(len(names) - 0.4, -0.6)
    gpus = " and ".join(transformers_report.gpus(list(records.by_name.values())))
    heading = f"Training steps of transformers models with 4 layers ({gpus}, bf16)"
    figure.suptitle(heading, fontsize=12, fontweight="bold", color=INK)
    return figure


def losses(records: Records) -> Figure | None:
    """Held-out losses of the language model: the curves of torch's grouped_mm and of this package, which coincide; and
    the final losses of all arms less grouped_mm's of the same seed, on one scale."""
    sizes = {size: found for size in language_model_report.SIZES if (found := language_model_report.runs(size))}
    if not sizes:
        return None
    colors = ARM_COLORS
    names, baseline = language_model_report.ARMS, language_model_report.BASELINE
    figure, panels = plt.subplots(
        len(sizes), 2, figsize=(9.0, 3.0 * len(sizes)), layout="constrained", squeeze=False, sharex="col"
    )
    for (size, found), (curves, apart) in zip(sizes.items(), panels, strict=True):
        first, seeds = found[baseline][0], len(found[baseline])
        million = f"{first['parameters'] / 1e6:.0f} million parameters"
        for arm, style in ((baseline, {"linewidth": 4}), ("minimal", {"linewidth": 1.4})):
            steps = [entry["step"] for entry in found[arm][0]["history"]]
            by_step = zip(*([e["held_out"] for e in r["history"]] for r in found[arm]), strict=True)
            curves.plot(steps, [mean(each) for each in by_step], color=colors[arm], label=names[arm], **style)
        curves.axhline(first["unigram_loss"], color=FAINT, linestyle=":")
        curves.text(steps[-1], first["unigram_loss"], "unigram model", ha="right", va="bottom", fontsize=8, color=INK)
        curves.set_ylim(0, 1.22 * first["unigram_loss"])
        means = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
        curves.set_title(f"{size}, {million}:\nheld-out loss, nats per byte, {means}", fontsize=9, loc="left")
        curves.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.78))
        base = {r["seed"]: r["held_out_loss"] for r in found[baseline]}
        others = [arm for arm in found if arm != baseline]
        for place, arm in enumerate(others):
            values = [r["held_out_loss"] - base[r["seed"]] for r in found[arm] if r["seed"] in base]
            apart.plot(values, [place] * len(values), "o", color=colors[arm], alpha=0.8)
        apart.axvline(0, color="#a3a3a3", linewidth=1)
        apart.set_yticks(range(len(others)), [names[arm] for arm in others], fontsize=8.5)
        apart.set_ylim(len(others) - 0.4, -0.6)
        spread = max(base.values()) - min(base.values())
        between = f"\n(seeds alone differ by up to {spread:.3f})" if seeds > 1 else ""
        apart.set_title(f"final loss less grouped_mm's, same seed{between}", fontsize=9, loc="left")
    furthest = max(abs(x) for axes in panels[:, 1] for line in axes.lines for x in line.get_xdata())
    panels[-1][1].set_xlim(-1.3 * furthest, 1.3 * furthest)
    panels[-1][1].set_xticks([tick for tick in panels[-1][1].get_xticks() if abs(tick) < 1.3 * furthest])
    heading = f"A language model on bytes with experts by torch and by {OURS} ({first['gpu']})"
    figure.suptitle(heading, fontsize=11.5, fontweight="bold", color=INK)
    panels[-1][0].set_xlabel("step", fontsize=8.5)
    panels[-1][1].set_xlabel("nats per byte", fontsize=8.5)
    for axes in figure.axes:
        axes.tick_params(labelsize=8.5, labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def losses_by_time(records: Records) -> Figure | None:
    """Held-out losses of the language model by seconds of training, a line per run. None without a timed run."""
    found = language_model_report.runs(language_model_report.TIMED)
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    for arm, results in found.items():
        for run in results:
            held_out = [entry["held_out"] for entry in run["history"]]
            width = 4 if arm == language_model_report.BASELINE else 1.4
            name = None if run is not results[0] else language_model_report.ARMS[arm]
            axes.plot(run["seconds"], held_out, color=ARM_COLORS[arm], linewidth=width, label=name)
            axes.plot(run["seconds"][-1], held_out[-1], "o", color=ARM_COLORS[arm], markersize=width + 3)
    most = 1.03 * max(run["seconds"][-1] for results in found.values() for run in results)
    axes.set_xlim(0, most)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most])
    axes.set_xlabel(f"seconds of training; a dot is the end of {run['settings']['steps']:,} steps", fontsize=8.5)
    about = f"{run['parameters'] / 1e6:.0f} million parameters: held-out loss, nats per byte"
    axes.set_title(about, fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    heading = f"Losses by time with experts by torch and by {OURS} ({run['gpu']})"
    figure.suptitle(heading, fontsize=11, fontweight="bold", color=INK)
    return figure


def parallel(records: Records) -> Figure | None:
    """Weak-scaling efficiency on the most GPUs of the records: of spread experts, and of FSDP2. None without one."""
    by_case = parallel_report.efficiencies()
    if not by_case:
        return None
    newest = max(parallel_report.rows(), key=lambda row: row["gpus"])
    of_experts = {
        "pull": (f"{OURS}", *STYLES["moeblaze"]),
        parallel_report.PEER: ("torch functions in torchtitan's order", *STYLES["torch_grouped_mm"]),
    }
    ways = {
        f"{parallel_report.STORED}-graph": ("copy engines, CUDA graph", "#0b5394", "o"),
        parallel_report.STORED: ("copy engines", "#6fa8dc", "v"),
        "moeblaze": ("NCCL", "#a3a3a3", "s"),
    }
    of_fsdp = {f"FSDP2, {parallel_report.FSDP_TITLES[way]}": style for way, style in ways.items()}
    panels = (("Experts spread over the GPUs", of_experts), (f"FSDP2, 4 layers of {OURS}", of_fsdp))
    names = [name for name in cases.LAYERS if name in by_case]
    figure, both = plt.subplots(
        1, 2, figsize=(9.0, 1.9 + 0.32 * len(names)), sharey=True, sharex=True, layout="constrained"
    )
    for axes, (heading, series) in zip(both, panels, strict=True):
        axes.hlines(range(len(names)), 0, 1, transform=axes.get_yaxis_transform(), color=FAINT, linewidth=0.6, zorder=0)
        for name, (words, color, marker) in series.items():
            rows = [i for i, case in enumerate(names) if name in by_case[case]]
            values = [by_case[names[i]][name] for i in rows]
            axes.scatter(values, rows, 44, color=color, marker=marker, label=words, zorder=2)
        for i, case in enumerate(names):
            if not series.keys() & by_case[case].keys():
                axes.text(60, i, "not run", va="center", ha="center", fontsize=8.5, color=INK, backgroundcolor="white")
        axes.axvline(100, color=INK, linewidth=0.8)
        axes.set_title(heading, fontsize=10, loc="left", color=INK)
        axes.set_xlim(0, 112)
        axes.set_xticks((0, 25, 50, 75, 100), ("0", "25%", "50%", "75%", "100%"))
        axes.set_xlabel("of the speed of one GPU alone", fontsize=9, color=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8.5, frameon=False)
    both[0].set_yticks(range(len(names)), [cases.NAMES[name] for name in names], color=INK)
    both[0].set_ylim(len(names) - 0.5, -0.5)
    heading = f"How much of its speed a GPU keeps beside another ({newest['gpus']} {newest['gpu']}, bf16)"
    figure.suptitle(heading, fontsize=12, fontweight="bold", color=INK)
    figure.supxlabel(
        "Weak scaling: as many tokens on each GPU as on one alone, forward and backward. Right is better.", fontsize=8.5
    )
    return figure


def long_sequences(records: Records) -> Figure | None:
    """`steps_by_tokens` of the record that bench.long_sequences made. None without one."""
    return steps_by_tokens(json.loads(LONG_SEQUENCES.read_text())) if LONG_SEQUENCES.is_file() else None


def steps_by_tokens(record: dict) -> Figure:
    """Tokens per second and peak memory of whole training steps by their tokens. A size that did not fit is a cross at
    zero."""
    arms = {
        "moeblaze_limit": (f"{OURS}, memory_limit", *STYLES["moeblaze"]),
        "moeblaze": (OURS, "#6fa8dc", "v"),
        "grouped_mm": (title("torch_grouped_mm"), *STYLES["torch_grouped_mm"]),
    }
    figure, both = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    rows = [row for row in record["rows"] if row["part"] == "step"]
    panels = (("tokens_per_second", 1e3, "Thousand tokens per second"), ("peak_bytes", 2**30, "Peak memory, GiB"))
    for axes, (key, unit, heading) in zip(both, panels, strict=True):
        for arm, (words, color, marker) in arms.items():
            of_arm = sorted((row["tokens"], row.get(key)) for row in rows if row["arm"] == arm)
            for marked, drawn in ((marker, [n for n in of_arm if n[1]]), ("x", [n for n in of_arm if not n[1]])):
                if drawn:
                    values = [(value or 0.0) / unit for _, value in drawn]
                    style = {"label": words} if marked == marker else {"linestyle": "", "clip_on": False}
                    axes.plot([tokens for tokens, _ in drawn], values, color=color, marker=marked, **style)
        tokens = sorted({row["tokens"] for row in rows if math.log2(row["tokens"]).is_integer()})
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
        axes.set_ylim(bottom=0)
        axes.set_title(heading, fontsize=10, loc="left", color=INK)
        axes.set_xlabel("tokens of a step, logarithmic; x: does not fit in 78 GiB", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, frameon=False, ncols=3)
    gpu = record["machine_info"]["gpu"]
    heading = f"Training steps of four layers of Qwen3-30B-A3B ({gpu}, bf16)"
    figure.suptitle(heading, fontsize=11, fontweight="bold", color=INK)
    return figure


DRAWN = {
    "front.svg": front,
    "time_over_bound.svg": times,
    "memory.svg": memory,
    **{f"{sweep}.svg": partial(swept, sweep=sweep) for sweep in sweep_report.SWEEPS},
    "transformers.svg": transformers,
    "losses.svg": losses,
    "losses_by_time.svg": losses_by_time,
    "parallel.svg": parallel,
    "long_sequences.svg": long_sequences,
}


def write(records: Records, folder: Path) -> None:
    """Every plot as an SVG file of its name."""
    for name, draw in DRAWN.items():
        figure = draw(records)
        if figure is None:  # of what there is no record of
            continue
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)
