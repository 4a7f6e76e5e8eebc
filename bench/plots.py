"""The two plots of the README: time over the bound and memory, per configuration. SVG, through matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "moeblaze"  # the same file for the same records
import matplotlib.pyplot as plt  # noqa: E402

from bench import cases, report  # noqa: E402

COLORS = ("#1f4e79", "#7fb2e5", "#c55a11", "#7f7f7f", "#548235", "#bf9000", "#7030a0", "#a6a6a6", "#c00000", "#00b0a0")


def bars(figures: dict[str, dict[str, float]], ylabel: str, heading: str, path: Path, *, line=None, log=False) -> None:
    """Grouped bars: `figures[series][case]`; a series has gaps where it has no case."""
    names = [name for name in cases.LAYERS if any(name in series for series in figures.values())]
    width = 0.84 / len(figures)
    figure, axes = plt.subplots(figsize=(max(7.0, 0.62 * len(names)), 4.0), layout="constrained")
    for number, (label, series) in enumerate(figures.items()):
        places = [i + (number - (len(figures) - 1) / 2) * width for i, name in enumerate(names) if name in series]
        heights = [series[name] for name in names if name in series]
        axes.bar(places, heights, width, label=label, color=COLORS[number % len(COLORS)])
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8)
    if log:
        axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_ylabel(ylabel)
    axes.set_title(heading, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def time_series(records) -> dict[str, dict[str, float]]:
    """Times the bound per case: ours forward and with backward, the others with backward."""
    series: dict[str, dict[str, float]] = {}
    for entry in records.layers():
        name = entry["provider"]
        if entry["order"] != "transposed" or name == "cublas_bound":
            continue
        for what, label in (("forward", "forward"), ("forward_backward", "forward + backward")):
            if f"{what}_ratio" in entry and (name == "moeblaze" or what == "forward_backward"):
                series.setdefault(f"{report.title(name)}, {label}", {})[entry["case"]] = entry[f"{what}_ratio"]
    return series


def memory_series(records) -> dict[str, dict[str, float]]:
    """MiB saved for backward per case, of every provider that was measured, of routed buffers by formula, and what the
    paper prints."""
    series: dict[str, dict[str, float]] = {}
    for entry in records.layers():
        if entry["order"] == "transposed" and entry.get("saved_mib") and entry["provider"] != "moeblaze_sm80":
            series.setdefault(report.title(entry["provider"]), {})[entry["case"]] = entry["saved_mib"]
    table2 = {name for name in cases.GROUPS["table2"] if cases.LAYERS[name].paper}  # its shapes with SwiGLU
    for row in records.rows("memory"):
        if row["case"] in table2 and row.get("saved_mib"):
            series.setdefault(report.title(row["provider"]), {})[row["case"]] = row["saved_mib"]
    measured = {name for values in series.values() for name in values}
    series["routed buffers, by formula"] = {name: report.routed_mib(cases.LAYERS[name]) for name in measured}
    for system in ("MoEBlaze", "MegaBlocks"):
        printed = {n: p.memory_mb for n in measured for p in cases.LAYERS[n].paper if p.system == system}
        if printed := {name: value for name, value in printed.items() if value}:
            series[f"paper's {system}, as printed"] = printed
    return series


def write(records, folder: Path) -> None:
    newest = next(r for r in reversed(records.by_name.values()) if any(b["group"] == "layer" for b in r["benchmarks"]))
    gpu = newest["machine_info"]["gpu"]
    bars(
        time_series(records),
        "times the cuBLAS bound",
        f"Time of one layer over its dense products alone ({gpu}, bf16, SwiGLU)",
        folder / "time_over_bound.svg",
        line=1,
    )
    bars(
        memory_series(records),
        "MiB",
        f"Saved for backward, parameters and x excluded ({gpu}, bf16, SwiGLU)",
        folder / "memory.svg",
        log=True,
    )
