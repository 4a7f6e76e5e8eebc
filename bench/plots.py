"""The plots of the README and of docs/results.md, drawn from the records. SVG, through matplotlib.

`front` is the README's: five layers, three systems, every bar with its figure. `times` and `memory` show all fifteen
shapes and every system that was measured.
"""

from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "moeblaze"  # the same file for the same records
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from bench import cases, language_model_report, parallel_report, transformers_report  # noqa: E402
from bench.recorded import Records, title  # noqa: E402

OURS = "moeblaze-cupy"
FRONT_CASES = {
    "mixtral": "Mixtral 8x7B",
    "olmoe": "OLMoE",
    "qwen30b": "Qwen3-30B-A3B",
    "dsv3": "DeepSeek-V3",
    "conf3": "paper's conf3",
}
# color, and the marker of the plots with all shapes
STYLES = {
    "moeblaze": ("#0b5394", "o"),
    "sonicmoe": ("#e69138", "D"),
    "torch_grouped_mm": ("#a3a3a3", "s"),
    "liger": ("#38761d", "^"),
    "moeblaze_sm80": ("#6fa8dc", "v"),
}
FRONT_PROVIDERS = ("moeblaze", "sonicmoe", "torch_grouped_mm")
INK, FAINT = "#222222", "#cfcfcf"


def label(provider: str) -> str:
    """A provider's name in a plot."""
    return {"moeblaze": OURS, "moeblaze_sm80": f"{OURS}, portable kernels"}.get(provider, title(provider))


def gpu_of(records: Records) -> str:
    """The GPU of the newest record of layers."""
    layers = (r for r in reversed(records.by_name.values()) if any(b["group"] == "layer" for b in r["benchmarks"]))
    return next(layers)["machine_info"]["gpu"]


def figures(records: Records, name: str) -> dict[str, dict[str, float]]:
    """A figure of the layer's rows by provider and case, weights as transformers stores them."""
    found: dict[str, dict[str, float]] = {}
    for (case, order, provider), entry in records.entries().items():
        if order == "transposed" and provider in STYLES and entry.get(name):
            found.setdefault(provider, {})[case] = entry[name]
    return {provider: found[provider] for provider in STYLES if provider in found}


def front(records: Records) -> Figure:
    """Forward and backward of five layers, calls back to back: time over cuBLAS's products, and peak memory."""
    times_bound = figures(records, "forward_backward_back_to_back_ratio")
    panels = (
        (times_bound, 1.0, "Time, in units of its matrix products in cuBLAS"),
        (figures(records, "peak_mib"), 1024.0, "Peak memory beyond weights and gradients, GiB"),
    )
    figure, both = plt.subplots(1, 2, figsize=(9.0, 5.2), sharey=True, layout="constrained")
    height = 0.27
    for number, (axes, (series, unit, heading)) in enumerate(zip(both, panels, strict=True)):
        for row, case in enumerate(FRONT_CASES):
            for bar, provider in enumerate(FRONT_PROVIDERS):
                value, y = series[provider][case] / unit, row + (bar - 1) * height
                ours = provider == "moeblaze"
                axes.barh(y, value, height * 0.92, color=STYLES[provider][0])
                text = f" {value:.2f}" + (f"  {label(provider)}" if row == 0 else "")
                axes.text(value, y, text, va="center", color=INK, fontsize=9, fontweight="bold" if ours else "normal")
        axes.set_title(heading, fontsize=10, loc="left", color=INK)
        axes.set_xlim(0, 1.16 * max(max(series[p][c] for c in FRONT_CASES) for p in FRONT_PROVIDERS) / unit)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=6)
        if number == 0:
            axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate("cuBLAS = 1", (1, len(FRONT_CASES) - 0.52), (1.05, len(FRONT_CASES) - 0.52), fontsize=8,
                          color=INK, va="center")  # fmt: skip
    shapes = [cases.LAYERS[case] for case in FRONT_CASES]
    names = [f"{FRONT_CASES[s.name]}\n{s.E} experts, top {s.k}\nd {s.d}, h {s.h}" for s in shapes]
    both[0].set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    both[0].set_ylim(len(names) - 0.35, -0.55)
    figure.suptitle(
        "A training pass of one MoE layer: faster than SonicMoE and torch, in less memory",
        fontsize=12.5, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        f"One {gpu_of(records)}, bf16, SwiGLU, forward and backward, calls back to back. Shorter is better.",
        fontsize=8.5, color=INK,
    )  # fmt: skip
    return figure


def dots(panels: dict[str, dict[str, dict[str, float]]], heading: str, xlabel: str, ticks: tuple[float, ...]) -> Figure:
    """A row per case and a panel per heading; panels[heading][provider][case] is where a dot goes, on a log scale."""
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
            axes.scatter(places, rows, size, color=color, marker=marker, zorder=order, label=label(provider))
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(panel, fontsize=10, loc="left", color=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(xlabel, fontsize=9, color=INK)
    drawn[0].set_yticks(range(len(names)), names, color=INK)
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
    )


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
    names = [f"{case}\n{what.replace('_', ' ')}" for case, what in bars]
    both[0].set_yticks(range(len(names)), names, fontsize=8.5, color=INK)
    both[0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle("Training steps of transformers models", fontsize=12, fontweight="bold", color=INK)
    return figure


def losses(records: Records) -> Figure | None:
    """Held-out losses of the language model: means over seeds with their range; what arms of one seed differ by."""
    sizes = {size: found for size in language_model_report.SIZES if (found := language_model_report.runs(size))}
    if not sizes:
        return None
    colors = {"fp32": INK, "grouped_mm": "#a3a3a3", "minimal": STYLES["moeblaze"][0], "recompute": "#e69138"}
    colors |= {"save_fp8": "#6fa8dc", "fp8": "#8e63b5"}
    figure, panels = plt.subplots(len(sizes), 2, figsize=(9.0, 3.4 * len(sizes)), layout="constrained", squeeze=False)
    for (size, found), (curves, apart) in zip(sizes.items(), panels, strict=True):
        for arm, results in found.items():
            steps = [entry["step"] for entry in results[0]["history"]]
            by_step = list(zip(*([e["held_out"] for e in r["history"]] for r in results), strict=True))
            words = f"{language_model_report.ARMS[arm]}, {len(results)} seed{'s' * (len(results) > 1)}"
            curves.plot(steps, [mean(each) for each in by_step], color=colors[arm], label=words, linewidth=1.4)
            band = [min(each) for each in by_step], [max(each) for each in by_step]
            curves.fill_between(steps, *band, color=colors[arm], alpha=0.15, linewidth=0)
        curves.axhline(results[0]["unigram_loss"], color=FAINT, linestyle=":")
        curves.text(
            steps[-1], results[0]["unigram_loss"], "unigram model", ha="right", va="bottom", fontsize=8, color=INK
        )
        curves.set_ylim(0, 1.1 * results[0]["unigram_loss"])
        curves.set_title(f"{size}: held-out loss, nats per byte\nbands: the range over seeds", fontsize=9, loc="left")
        curves.set_xlabel("step", fontsize=8.5)
        curves.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.92))
        base = {r["seed"]: r["held_out_loss"] for r in found[language_model_report.BASELINE]}
        others = [arm for arm in found if arm != language_model_report.BASELINE]
        half = (max(base.values()) - min(base.values())) / 2
        furthest = max(half, 1e-3)
        for place, arm in enumerate(others):
            values = [r["held_out_loss"] - base[r["seed"]] for r in found[arm] if r["seed"] in base]
            apart.plot(values, [place] * len(values), "o", color=colors[arm], alpha=0.8)
            furthest = max(furthest, *(abs(value) for value in values))
        apart.axvline(0, color="#a3a3a3", linewidth=1)
        apart.axvspan(-half, half, color=FAINT, alpha=0.35, linewidth=0)
        apart.set_xlim(-1.5 * furthest, 1.5 * furthest)
        apart.set_xticks([-furthest, 0, furthest], [f"-{furthest:.3f}", "0", f"+{furthest:.3f}"])
        apart.set_yticks(range(len(others)), [language_model_report.ARMS[arm] for arm in others], fontsize=8.5)
        apart.set_ylim(len(others) - 0.4, -0.6)
        grey = "\ngrey: as wide as its range over seeds" if len(base) > 1 else ""
        apart.set_title(f"final loss less grouped_mm's of the same seed{grey}", fontsize=9, loc="left")
    for axes in figure.axes:
        axes.tick_params(labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def parallel(records: Records) -> Figure | None:
    """Efficiency of experts on the most GPUs of the records, and of FSDP2. None without a record."""
    by_case = parallel_report.efficiencies()
    if not by_case:
        return None
    gpus = max(row["gpus"] for row in parallel_report.rows())
    named = {
        "pull": f"{OURS}, experts",
        parallel_report.PEER: "torchtitan's order, experts",
        "FSDP2, copy engines, stored by products; in a CUDA graph": f"{OURS}, FSDP2 by copy engines, in a CUDA graph",
        "FSDP2, copy engines, stored by products": f"{OURS}, FSDP2 by copy engines",
        "FSDP2, NCCL, float32": f"{OURS}, FSDP2 by NCCL",
    }
    colors = dict(zip(named, (STYLES["moeblaze"][0], "#a3a3a3", "#3d85c6", "#6fa8dc", "#b9d4ee"), strict=True))
    figure, axes = plt.subplots(figsize=(9.0, 0.8 + len(by_case)), layout="constrained")
    for group, series in enumerate(by_case.values()):
        for place, name in enumerate(named):
            if name not in series:
                continue
            y, value = group + 0.17 * (place - 2), series[name]
            axes.barh(y, value, 0.15, color=colors[name])
            axes.text(value, y, f" {value:.0f}%  {named[name]}", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(by_case)), list(by_case), fontsize=8.5, color=INK)
    axes.set_ylim(len(by_case) - 0.4, -0.6)
    axes.set_xlim(0, 140)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    heading = f"Time on one GPU over that on {gpus}, as many tokens on each: forward and backward"
    axes.set_title(heading, fontsize=11, fontweight="bold", loc="left", color=INK)
    return figure


DRAWN = {
    "front.svg": front,
    "time_over_bound.svg": times,
    "memory.svg": memory,
    "transformers.svg": transformers,
    "losses.svg": losses,
    "parallel.svg": parallel,
}


def write(records: Records, folder: Path) -> None:
    """Every plot as an SVG file of its name."""
    for name, draw in DRAWN.items():
        figure = draw(records)
        if figure is None:  # of what there is no record of
            continue
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)
