"""What each save policy keeps and how long a pass takes with it: 15 layers with a gate, and three without.

python -m bench.save_policies --out FILE.json [--case conf3,dsv3] [--tiny]

A pass is forward and backward on arrays. Passes of all policies follow one another without a wait, each once in
a round and in random order, for two seconds: the clock swings around the power limit with a period of a second, and
every policy meets all of its phases alike. A time is the mean after the first quarter. "minimal" is compared with
float64 before it is timed, out and all gradients. The other policies are compared with "minimal" then, the gradients of
weights on a few experts.
"""

import argparse
import functools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import moeblaze_cupy as mb
from bench import cases, inputs, measure, save_report, table, verify
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.tools import dry_run, memory

CASES = ",".join((*save_report.GATED, *save_report.PLAIN))
SECONDS = 2.0  # of all policies of a case
LEAST_ROUNDS = 8
EXPERTS = 4  # whose gradients of weights the policies are compared on
# Of a relative norm of the difference from "minimal": act(a) * b is rounded at another place, or a and b to e4m3.
TOLERANCES = {"paper": 2**-7, "fp8": 0.06, "recompute": 2**-7}


def precompile(names: Iterable[str]) -> None:
    """Compiles the kernels of all cases and policies side by side."""
    limits, found = loader.device_limits(torch.cuda.current_device()), {}
    for case in map(cases.LAYERS.__getitem__, names):
        shape = memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation, transposed=True)
        for save in save_report.POLICIES:
            for launch in dry_run.layer(shape, save, limits).launches:
                found[launch.variant.source, launch.variant.macros] = launch.variant
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(loader.precompile, found.values()))


def kept_and_results(case: cases.LayerCase, made: dict[str, torch.Tensor], save: str) -> tuple[int, dict]:
    """Bytes that forward keeps for backward, and out and the gradients by name."""
    arrays = (made[name] for name in ("x", "ids", "weights", "w1", "w2"))
    out, saved = mb.moe_forward(*arrays, activation=case.activation, save=save)
    kept = saved.nbytes
    grads = mb.moe_backward(made["grad_out"], saved)
    return kept, {"out": out, **{name: getattr(grads, name) for name in ("x", "weights", "w1", "w2")}}


def of_few_experts(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[:EXPERTS].clone() if name in ("w1", "w2") else value for name, value in found.items()}


def checked(case: cases.LayerCase, made: dict[str, torch.Tensor]) -> dict[str, dict]:
    """MiB kept and relative errors by policy: of "minimal" from float64, of others from "minimal".

    Raises AssertionError if a result is wrong.
    """
    kept, found = kept_and_results(case, made, "minimal")
    errors = verify.relative_errors(case, made, found["out"], {n: found[n] for n in found if n != "out"})
    wrong = verify.problems(errors, made["x"].dtype)
    assert wrong is None, f"minimal on {case.name}: {wrong}; a wrong result gets no time"
    want = of_few_experts(found)
    del found
    of_saves = {"minimal": {"saved_mib": kept / measure.MIB, "errors": errors}}
    for save, tolerance in TOLERANCES.items():
        kept, found = kept_and_results(case, made, save)
        got = of_few_experts(found)
        del found
        errors = {n: float((got[n].double() - w.double()).norm() / w.double().norm()) for n, w in want.items()}
        worst = max(errors, key=errors.__getitem__)
        close = errors[worst] <= tolerance
        assert close, f"{save} on {case.name}: {worst} {errors[worst]:.2g} from minimal; a wrong result gets no time"
        of_saves[save] = {"saved_mib": kept / measure.MIB, "errors": errors}
    return of_saves


def in_single_turns(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Mean device seconds of each call among rounds of one call of each, without those of the first quarter."""
    on_gpu, once = inputs.has_gpu(), measure.DeviceClock()
    for call in calls.values():
        call()  # fills allocators
        once.run(call)
    rounds = max(LEAST_ROUNDS, round(seconds / once.now))
    found: dict[str, list[tuple]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            if on_gpu:
                turn = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                turn[0].record()
                calls[name]()
                turn[1].record()
            else:
                start = time.perf_counter()
                calls[name]()
                turn = start, time.perf_counter()
            found[name].append(turn)
    if on_gpu:
        torch.cuda.synchronize()

    def took(turn: tuple) -> float:
        return turn[0].elapsed_time(turn[1]) / 1e3 if on_gpu else turn[1] - turn[0]

    return {name: statistics.fmean(map(took, turns[rounds // 4 :])) for name, turns in found.items()}


def measured(case: cases.LayerCase, seconds: float) -> dict:
    """The row of a case. Raises AssertionError for a wrong result."""
    made = inputs.layer_inputs(case)
    saves = checked(case, made)
    calls = {save: functools.partial(kept_and_results, case, made, save) for save in saves}
    for save, call in calls.items():
        saves[save]["peak_mib"] = measure.peak_mib(lambda call=call: call()[1].values())
    for save, took in in_single_turns(calls, seconds).items():
        saves[save]["ms"] = took * 1e3
    return {**case.info, "saves": saves}


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.save_policies", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case", default=CASES, metavar="CASES", help="cases or groups of bench/cases.py (%(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="small layers, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    try:
        names = cases.select(args.case, CASES)
    except ValueError as error:
        parser.error(str(error))
    chosen = [cases.TINY, cases.TINY_SILU]
    if not args.tiny:
        inputs.expect_gpu(parser)
        precompile(names)
        chosen = [cases.LAYERS[name] for name in names]
    rows: list[dict] = []
    record = measure.record(seconds=SECONDS, rows=rows)
    for case in chosen:
        rows.append(measured(case, SECONDS))
        measure.release()
        if args.out:  # after each case, as a run may be cut
            measure.write_record(record, args.out)
    print("\n".join(table.aligned([save_report.HEAD, *save_report.lines(record)])))


if __name__ == "__main__":
    main()
