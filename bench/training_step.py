"""A whole training step of a language model by each kind of experts: tokens per second, memory, the largest batch.

python -m bench.training_step --out FILE.json [--size base] [--arm minimal,recompute,grouped_mm]

The model, its attention and its optimizer are those of examples/language_model.py; arms differ in the experts alone.
Steps follow one another without a wait, in windows whose order changes from round to round, as the GPU's clock swings
once a second. The peak is of a step with nothing else on the GPU. The largest batch is found by steps that fit and
steps that do not.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench import measure, table
from examples import corpus
from examples import language_model as lm

ARMS = ("minimal", "recompute", "grouped_mm")
TEXT_BYTES = 16 << 20
FIRST_STEPS = 4  # compile kernels, fill the allocator


def step_of(s: lm.Settings, arm: str, data: torch.Tensor) -> Callable[[], None]:
    """A training step on the same windows each time."""
    model = lm.Model(s, arm, seed=0).to(data.device)
    weights = lm.MainWeights(model, torch.float32 if arm == "fp32" else torch.bfloat16)
    windows = lm.batch(data, 0, 0, s)

    def step() -> None:
        nats, balance = model.loss(windows)
        (nats + lm.BALANCE * balance).backward()
        weights.step(s.lr)

    return step


def peak_mib(s: lm.Settings, arm: str, data: torch.Tensor) -> float | None:
    """Of a second step, weights and optimizer included; None if it does not fit."""
    measure.release()
    try:
        step = step_of(s, arm, data)
        step()
        if data.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() / measure.MIB if data.is_cuda else 0.0
    except torch.OutOfMemoryError:
        return None


def largest(fits: Callable[[int], bool], least: int, guess: int, most: int, granule: int) -> int:
    """The largest multiple of `granule` that fits, known to lie from `least` up to `most`; tried near `guess` first.

    fits: falls from true to false once. least is known to fit.
    """
    low, high = least // granule, most // granule + 1
    trial = min(max(guess // granule, low + 1), high - 1)
    reach = 1
    while low + 1 < high:
        if fits(trial * granule):
            low = trial
            trial = min(trial + reach, (low + high + 1) // 2)
        else:
            high = trial
            trial = max(trial - reach, (low + high) // 2)
        reach *= 2
        trial = min(max(trial, low + 1), high - 1)
    return low * granule


def largest_batch(s: lm.Settings, arm: str, data: torch.Tensor, peak: float, granule: int) -> dict:
    """Sequences per step at most, from multiples of `granule`, and the peak then. peak: MiB with s.B sequences."""
    peaks = {s.B: peak, 2 * s.B: peak_mib(replace(s, B=2 * s.B), arm, data)}
    if peaks[2 * s.B] is None:
        return {"largest_batch": s.B, "largest_batch_mib": peak}
    total = torch.cuda.mem_get_info()[1] / measure.MIB
    per_sequence = (peaks[2 * s.B] - peak) / s.B
    guess = s.B + (0.97 * total - peak) / per_sequence

    def fits(B: int) -> bool:
        peaks[B] = peak_mib(replace(s, B=B), arm, data)
        return peaks[B] is not None

    found = largest(fits, 2 * s.B, int(guess), int(1.2 * guess), granule)
    return {"largest_batch": found, "largest_batch_mib": peaks[found]}


def speeds(
    steps: dict[str, Callable[[], None]], tokens: int, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Tokens per second by arm: quartiles over the rounds, each a window of steps back to back."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    calls: dict[str, int] = {}
    found: dict[str, list[float]] = {arm: [] for arm in steps}
    for arm, step in steps.items():
        for _ in range(FIRST_STEPS):
            step()
        wait()
        start = time.perf_counter()
        step()
        wait()
        calls[arm] = max(2, round(seconds / (time.perf_counter() - start)))
    for _ in range(rounds):
        for arm in random.sample(list(steps), len(steps)):
            wait()
            start = time.perf_counter()
            for _ in range(calls[arm]):
                steps[arm]()
            wait()
            found[arm].append(calls[arm] * tokens / (time.perf_counter() - start))
    return {arm: dict(zip(measure.QUARTILES, statistics.quantiles(v, n=4), strict=True)) for arm, v in found.items()}


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training_step", description=__doc__.splitlines()[0])
    parser.add_argument("--arm", type=lm.choices(lm.ARMS), default=list(ARMS), metavar="A,B", help=", ".join(ARMS))
    parser.add_argument("--size", choices=lm.SIZES, default="base", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="windows of each arm (%(default)s)")
    parser.add_argument("--window", type=float, default=1.1, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--granule", type=int, default=8, help="sequences; 0 looks for no largest batch (%(default)s)")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--commit", help="to write into the record where there is no git")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    torch.set_float32_matmul_precision("highest")  # no TF32
    device, s = "cuda" if torch.cuda.is_available() else "cpu", lm.SIZES[args.size]
    data = corpus.load(args.text or corpus.default_folders(), TEXT_BYTES).training.to(device)
    rows: list[dict] = []
    record = measure.record(args.commit, size=args.size, tokens_per_step=s.B * s.T, rows=rows)

    def write() -> None:  # after each part, as a run may be cut
        if args.out:
            measure.write_record(record, args.out)

    for arm in args.arm:
        rows.append({"arm": arm, "peak_mib": peak_mib(s, arm, data)})
    measure.release()
    steps = {row["arm"]: step_of(s, row["arm"], data) for row in rows if row["peak_mib"] is not None}
    for arm, found in speeds(steps, s.B * s.T, args.rounds, args.window).items():
        next(row for row in rows if row["arm"] == arm)["tokens_per_second"] = found
    steps.clear()
    write()
    for row in rows:
        if device == "cuda" and args.granule and row["peak_mib"] is not None:
            row |= largest_batch(s, row["arm"], data, row["peak_mib"], args.granule)
            write()
    head = ["arm", "tokens/s", "quartiles", "peak, MiB", "largest batch"]
    lines = []
    for row in rows:
        found = row.get("tokens_per_second", {})
        spread = f"{found['q1']:,.0f} to {found['q3']:,.0f}" if found else "-"
        speed = f"{found['median']:,.0f}" if found else "-"
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
        lines.append([row["arm"], speed, spread, peak, str(row.get("largest_batch", "-"))])
    print("\n".join(table.aligned([head, *lines])))


if __name__ == "__main__":
    main()
