"""Held-out losses of runs of examples/language_model.py, a line per arm with the band of its seeds.

python examples/plot_losses.py DIR [--plot FILE.svg]
"""

import argparse
import json
from pathlib import Path
from statistics import mean


def load(folder: Path) -> dict[str, list[dict]]:
    """Results by arm, each in the order of seeds. Raises ValueError where runs differ in settings or text."""
    found: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["arm"], []).append(result)
    runs = [{name: r[name] for name in ("settings", "text")} for results in found.values() for r in results]
    if any(run != runs[0] for run in runs):
        raise ValueError(f"plot_losses: {folder}: expected runs of the same settings and text, got others")
    return {arm: sorted(results, key=lambda r: r["seed"]) for arm, results in found.items()}


def summary(found: dict[str, list[dict]]) -> list[str]:
    """A line per arm: final held-out loss, mean and range over seeds; tokens per second and peak memory."""
    lines = []
    for arm, results in found.items():
        losses = [r["held_out_loss"] for r in results]
        spread = f"{min(losses):.4f} to {max(losses):.4f} over {len(losses)} seeds"
        speed = f"{mean(r['tokens_per_second'] for r in results):,.0f} tokens/s"
        peaks = [r["peak_mib"] for r in results if r["peak_mib"] is not None]
        lines.append(f"{arm}: {mean(losses):.4f} ({spread}), {speed}" + (f", {max(peaks):,.0f} MiB" if peaks else ""))
    return lines


def draw(found: dict[str, list[dict]], path: Path) -> None:
    """Writes the plot in the format that the file's name says. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for arm, results in found.items():
        steps = [entry["step"] for entry in results[0]["history"]]
        by_step = list(zip(*([e["held_out"] for e in r["history"]] for r in results), strict=True))
        (line,) = axes.plot(steps, [mean(losses) for losses in by_step], label=f"{arm}, {len(results)} seeds")
        band = [min(losses) for losses in by_step], [max(losses) for losses in by_step]
        axes.fill_between(steps, *band, color=line.get_color(), alpha=0.25, linewidth=0)
    axes.axhline(results[0]["unigram_loss"], color="grey", linestyle=":", label="unigram")
    axes.set(xlabel="step", ylabel="held-out loss, nats per byte")
    axes.legend()
    figure.savefig(path)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python examples/plot_losses.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="(DIR/losses.svg)")
    args = parser.parse_args(argv or None)
    found = load(args.folder)
    if not found:
        parser.error(f"{args.folder}: expected results of examples/language_model.py, got none")
    print("\n".join(summary(found)))
    draw(found, args.plot or args.folder / "losses.svg")


if __name__ == "__main__":
    main()
