"""The language model of examples/ in docs/results.md: final losses by arm, whole training steps, the long run.

bench/records/language_model/ has a folder per size with the results that examples/language_model.py writes, a folder
`timed` of runs each alone on its GPU, and the records of bench.training_step, bench.long_run, bench.fine_tuning and
bench.language_model_log_probabilities.
"""

import json
from itertools import pairwise
from statistics import mean

from bench.recorded import RECORDS
from bench.table import number

FOLDER = RECORDS / "language_model"
SIZES = ("small", "base")
TIMED = "timed"
BASELINE = "grouped_mm"
ARMS = {
    "fp32": "float32, torch",
    "grouped_mm": "bf16, torch grouped_mm",
    "minimal": "moeblaze-cupy, minimal",
    "recompute": "moeblaze-cupy, recompute",
    "save_fp8": "moeblaze-cupy, save fp8",
    "fp8": "moeblaze-cupy, products in fp8",
    "fp8_wgrad": "moeblaze-cupy, fp8_wgrad",
    "rounded": "moeblaze-cupy, token rounding",
}
EAGER = "eager"  # of bench.fine_tuning
TUNED_HEAD = ["experts", "loss before", "seeds", "held-out loss, mean", "range", "minus eager, mean", "range"]
ABOUT = """A decoder-only model on bytes (`examples/language_model.py`), trained on sources and documentation of Python
and its packages. Whole files are held out. Arms of one seed start from the same weights, see the same batches, and
differ only in the experts. `fp32` has TF32 off. The last columns are differences from torch's `grouped_mm` on the same
seeds."""
TUNED = """The same model, trained on Python sources alone. Its weights are then frozen, and factors of rank {rank}
beside all experts are trained on C and C++ headers, {steps} steps of {tokens:,} bytes. "eager" computes expert by
expert in torch. "W + BA" makes these weights in every step. "fused" hands the factors to the layer, whose experts are
in bf16, or packed as the row says. Arms of one seed start from the same factors and see the same batches."""
TIMES = """{million:.0f} million parameters train for {steps:,} steps, each run alone on a GPU. Seconds exclude
evaluation and compilation. Losses of `grouped_mm` lie on straight lines between its evaluations. Its learning rate
still falls."""
TIMED_HEAD = ["experts", "seeds", "seconds", "loss", "grouped_mm then", "difference"]
APART = """One model of {steps:,} steps evaluates {tokens:,} held-out bytes with each kind of experts, on the same
bfloat16 weights. Quantiles are of the absolute difference of a byte's log-probability, in nats."""
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
APART_HEAD = ["experts", "less", *(f"{100 * q:g}%" for q in QUANTILES), "cross-entropy"]
STEPS = """Forward, loss, backward and AdamW with float32 main weights. Peak memory includes weights and optimizer. The
largest batch counts sequences of 1,024 bytes. Speed is the median of windows of steps back to back."""


def runs(size: str) -> dict[str, list[dict]]:
    """Results by arm in the order of ARMS, each by seed; {} without records."""
    found: dict[str, list[dict]] = {}
    for path in sorted((FOLDER / size).glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["arm"], []).append(result)
    return {arm: sorted(found[arm], key=lambda r: r["seed"]) for arm in ARMS if arm in found}


def _record(name: str) -> dict | None:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def loss_rows(found: dict[str, list[dict]], baseline: str = BASELINE) -> list[list[str]]:
    """Cells: arm, seeds, mean loss, its range, mean difference from the baseline's same seeds, its range."""
    base = {r["seed"]: r["held_out_loss"] for r in found.get(baseline, [])}
    rows = []
    for arm, results in found.items():
        losses = [r["held_out_loss"] for r in results]
        apart = [r["held_out_loss"] - base[r["seed"]] for r in results if r["seed"] in base]
        cells = [f"{mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"]
        cells += [f"{mean(apart):+.4f}", f"{min(apart):+.4f} to {max(apart):+.4f}"] if apart else ["-", "-"]
        rows.append([ARMS.get(arm, arm), str(len(results)), *cells])
    return rows


def tuned_rows(record: dict) -> list[list[str]]:
    """Cells of TUNED_HEAD. The loss before is that of the arm's frozen experts, which no seed changes."""
    found: dict[str, list[dict]] = {}
    for run in record["runs"]:
        found.setdefault(run["arm"], []).append(run)
    before = {arm: results[0]["history"][0]["held_out"] for arm, results in found.items()}
    rows = zip(before.values(), loss_rows(found, EAGER), strict=True)
    return [[arm, f"{loss:.4f}", *cells] for loss, (arm, *cells) in rows]


def loss_at(run: dict, seconds: float) -> float | None:
    """The held-out loss after so many seconds of training, None outside the evaluated times."""
    points = list(zip(run["seconds"], (entry["held_out"] for entry in run["history"]), strict=True))
    for (before, first), (after, last) in pairwise(points):
        if before <= seconds <= after:
            return first + (last - first) * (seconds - before) / (after - before)
    return None


def timed_rows(found: dict[str, list[dict]]) -> list[list[str]]:
    """Cells of TIMED_HEAD: means over seeds, the last ones where the baseline has all of them at that time."""
    base, rows = {run["seed"]: run for run in found[BASELINE]}, []
    for arm, results in found.items():
        loss = mean(run["held_out_loss"] for run in results)
        others = [loss_at(base[run["seed"]], run["seconds"][-1]) if run["seed"] in base else None for run in results]
        cells = [str(len(results)), f"{mean(run['seconds'][-1] for run in results):.1f}", f"{loss:.4f}"]
        cells += ["-", "-"] if None in others else [f"{mean(others):.4f}", f"{loss - mean(others):+.4f}"]
        rows.append([ARMS[arm], *cells])
    return rows


def apart_rows(record: dict) -> list[list[str]]:
    """Cells of APART_HEAD."""
    names = ARMS | {EAGER: "bf16, torch, expert by expert"}
    return [
        [names[r["experts"]], names[r["less"]], *(f"{q:.2g}" for q in r["quantiles"]), f"{r['cross_entropy']:+.1e}"]
        for r in record["rows"]
    ]


def step_rows(record: dict) -> list[list[str]]:
    """Cells: arm; then median tokens/s, peak MiB and largest batch, each over the baseline's."""
    rows = {row["arm"]: row | {"speed": row.get("tokens_per_second", {}).get("median")} for row in record["rows"]}
    base, lines = rows.get(BASELINE, {}), []
    for arm, row in rows.items():
        cells = []
        for name in ("speed", "peak_mib", "largest_batch"):
            value, of_base = row.get(name), base.get(name)
            cells.append("-" if value is None else f"{value:,.0f}")
            cells.append(number(value / of_base if value and of_base else None))
        lines.append([ARMS[arm], *cells])
    return lines


def headline() -> list[str]:
    """Losses of the model with most seeds beside the baseline's, for the front page; none without a record."""
    compared = [by_arm for size in reversed(SIZES) if {"minimal", BASELINE} <= (by_arm := runs(size)).keys()]
    if not compared:
        return []
    found = max(compared, key=lambda by_arm: len(by_arm["minimal"]))
    ours, base = found["minimal"], found[BASELINE]
    losses = [mean(r["held_out_loss"] for r in results) for results in (ours, base)]
    seeds = f"means of {len(ours)} seeds" if len(ours) > 1 else "one seed"
    lines = [
        f"Language models: one of {ours[0]['parameters'] / 1e6:.0f} million parameters ends at a held-out loss of "
        f"{losses[0]:.3f} nats per byte,",
        f"with torch's `grouped_mm` at {losses[1]:.3f} ({seeds}).",
    ]
    step = _record("step")
    if step and (of_size := runs(step["size"])):
        parameters = next(iter(of_size.values()))[0]["parameters"]
        _, _, speed, _, share, _, batch = next(row for row in step_rows(step) if row[0] == ARMS["minimal"])
        lines += [
            f"One of {parameters / 1e6:.0f} million trains at {speed} times the tokens per second of `grouped_mm`, in "
            f"{share} of its memory,",
            f"and {batch} times as many sequences fit into a step.",
        ]
    return lines


def _losses(size: str, found: dict[str, list[dict]], table) -> list[str]:
    first = next(iter(found.values()))[0]
    s = first["settings"]
    shape = f"{s['layers']} layers, d={s['d']}, E={s['E']}, h={s['h']}, k={s['k']}"
    words = f"{size}: {first['parameters'] / 1e6:.0f} million parameters ({shape}), {s['steps']:,} steps of "
    words += f"{s['B'] * s['T']:,} bytes. A unigram model's loss is {first['unigram_loss']:.2f} nats per byte."
    head = ["experts", "seeds", "held-out loss, mean", "range", "minus grouped_mm, mean", "range"]
    return ["", words, *table(head, loss_rows(found))]


def section(table) -> list[str]:
    """Lines of the page; none without a record."""
    found = {size: by_arm for size in SIZES if (by_arm := runs(size))}
    if not found:
        return []
    lines = ["", "## A language model", "", "![Held-out losses](losses.svg)", "", ABOUT]
    for size, by_arm in found.items():
        lines += _losses(size, by_arm, table)
    if timed := runs(TIMED):
        first = timed[BASELINE][0]
        about = TIMES.format(million=first["parameters"] / 1e6, **first["settings"])
        title = ["", "### Loss by time", "", "![Held-out losses by time](losses_by_time.svg)"]
        lines += [*title, "", about, *table(TIMED_HEAD, timed_rows(timed))]
    if apart := _record("log_probabilities"):
        s = apart["settings"]
        about = APART.format(steps=s["steps"], tokens=s["held_out_windows"] * s["T"])
        lines += ["", "### Log-probabilities by kind of experts", "", about, *table(APART_HEAD, apart_rows(apart))]
    if step := _record("step"):
        head = ["experts", "tokens/s", "speed", "peak, MiB", "share", "largest batch", "times"]
        lines += [
            "",
            f"### Training steps, {step['size']}",
            "",
            STEPS,
            *table(head, step_rows(step)),
        ]
    if tuned := _record("fine_tuning"):
        s = tuned["settings"]
        about = TUNED.format(rank=tuned["rank"], steps=s["steps"], tokens=s["B"] * s["T"])
        lines += ["", "### Fine-tuning with low-rank factors", "", about, *table(TUNED_HEAD, tuned_rows(tuned))]
    if long := _record("long_run"):
        repeated, collapsing = long["repeated"], long["collapsing"]
        history = collapsing["history"]
        held = {name: {entry[name] for entry in history} for name in ("torch_allocated", "cupy_held")}
        level = "never differ" if all(len(values) == 1 for values in held.values()) else "differ"
        lines += [
            "",
            f"{repeated['equal']:,} of {repeated['repeats']:,} repeats of one training step gave the same bits.",
            f"In the middle fifth of a run of {collapsing['steps']:,} steps all tokens go to one expert. The bytes",
            f"that torch's and CuPy's allocators hold after a step {level} over {len(history)} readings. The held-out",
            f"loss ends at {collapsing['held_out_loss']:.3f}.",
        ]
    return lines
