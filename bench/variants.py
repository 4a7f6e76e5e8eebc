"""What the rules of gemm_config choose between, timed in turn in one process.

python -m bench.variants --rule clusters --rule split_k --case dsv3,one_expert --order row --out FILE.json
"""

import argparse
import random
import statistics
from collections.abc import Callable
from unittest import mock

import torch

from bench import cases, inputs, kernels, measure, table
from moeblaze_cupy.cuda import launch_config, runtime
from moeblaze_cupy.gemm import config as gemm_config

WINDOW_SECONDS, ROUNDS = 0.15, 8  # of a variant's calls back to back; the median is of all rounds but the first
SPLITS = (1, 2, 3, 4, 6, 8, 16)


def variants(rule: str, kernel: kernels.Kernels, entry: str) -> dict[str, Callable]:
    """Calls by name."""
    if rule == "load":
        lists = kernel.index.experts_by_load
        orders = {"by id": torch.arange(len(lists), dtype=lists.dtype, device=lists.device), "by load": lists.clone()}
        return {name: _listed(lists, experts, kernel.calls[entry]) for name, experts in orders.items()}
    if rule == "clusters":
        function, answers = "uses_clusters", {"single CTAs": False, "clusters": True}
    elif rule == "schedule":
        function, answers = "dynamic_schedule", {"static": False, "dynamic": True}
    elif rule == "tile":
        function = "square_wgrad" if entry in kernels.WGRADS else "square_product"
        answers = {"128 x 256": False, "192 x 192": True}
    else:
        case, halves = kernel.case, kernel.case.first_columns // kernel.case.h if entry == "up_wgrad" else 1
        orders = (case.d, case.h), (case.h, case.d)
        tiles = max(gemm_config.wgrad_tiles(*sizes, case.E * halves) for sizes in orders)
        most = gemm_config.MAX_WAVES * launch_config.H200.multiprocessors // tiles
        function, answers = "split_k", {f"split-K {n}": n for n in SPLITS if n == 1 or n <= most}
    return {name: _answered(function, answer, kernel, entry) for name, answer in answers.items()}


def _answered(function: str, answer: int, kernel: kernels.Kernels, entry: str) -> Callable:
    """The kernel's call where a rule of gemm_config gives this answer."""
    runtime.forget()
    with mock.patch.object(gemm_config, function, lambda *_: (answer, "")):
        call = kernel.configured()[entry]
    runtime.forget()
    return call


def _listed(lists: torch.Tensor, experts: torch.Tensor, call: Callable) -> Callable:
    """The call with weight gradients that take experts in this order, which it writes anew in a few microseconds."""

    def listed() -> None:
        lists.copy_(experts)
        call()

    return listed


# The kernels that ask each rule.
RULES = {
    "clusters": ("up_fwd", "down_fwd", "down_bwd", "up_bwd"),
    "schedule": ("up_fwd", "down_bwd"),
    "split_k": kernels.WGRADS,
    "tile": ("up_fwd", "down_fwd", "up_bwd", *kernels.WGRADS),
    "load": kernels.WGRADS,
}


def in_turn(calls: dict[str, Callable]) -> dict[str, float]:
    """Seconds of each of the calls.

    Their order changes from round to round: the power limit lets the clock swing once a second, and of five equal
    kernels in windows of 0.2 s one came out up to 7% below another, by its place in a fixed order.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            once = measure.back_to_back_seconds(calls[name], WINDOW_SECONDS)  # few calls, as if each took so long
            found[name].append(measure.back_to_back_seconds(calls[name], once, WINDOW_SECONDS))
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def run(
    rules: list[str], names: list[str], order: str, accumulate: bool = False, gate_up: str = "halves"
) -> list[dict]:
    """A row for each rule, case, kernel and variant. Results are not compared: the suites and tests do that.

    accumulate: weight gradients are added to float32 sums. gate_up: the order of w1's columns.
    """
    rows = []
    for name in names:
        case = cases.LAYERS[name]
        kernel = kernels.Kernels(case, inputs.layer_inputs(case, order), accumulate=accumulate, gate_up=gate_up)
        for rule in rules:
            for entry in RULES[rule]:
                if rule == "clusters" and case.k == 1 and entry in kernels.SUMMED:  # never in clusters
                    continue
                by_load = kernel.index.experts_by_load.clone()
                timed = in_turn(variants(rule, kernel, entry))
                kernel.index.experts_by_load.copy_(by_load)
                flops = kernels.gemm_work(case, entry).flops
                for variant, seconds in timed.items():
                    about = {"case": name, "order": order, "kernel": entry, "rule": rule, "variant": variant}
                    rows.append({**about, "seconds": seconds, "tflops": flops / seconds / 1e12})
        kernel = None
        measure.release()
    return rows


def text(rows: list[dict]) -> list[str]:
    head = ["case", "order", "kernel", "variant", "us", "TFLOP/s"]
    lines = [
        [*(row[name] for name in head[:4]), table.number(row["seconds"] * 1e6), table.number(row["tflops"])]
        for row in rows
    ]
    return table.aligned([head, *lines], 4)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.variants", description=__doc__.splitlines()[0])
    parser.add_argument("--rule", action="append", choices=RULES, help="repeatable (default: all)")
    parser.add_argument("--case", default="one_expert", help="cases or groups of bench/cases.py (%(default)s)")
    parser.add_argument("--order", choices=("transposed", "row"), default="transposed", help="(%(default)s)")
    parser.add_argument("--accumulate", action="store_true", help="weight gradients are added to float32 sums")
    parser.add_argument("--gate-up", choices=("halves", "interleaved"), default="halves", help="(%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record of the rows")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    names = cases.select(args.case, "one_expert")
    rows = run(args.rule or list(RULES), names, args.order, args.accumulate, args.gate_up)
    if args.out:
        measure.write_record(measure.record(rows=rows), args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
