"""Two checkouts side by side on one GPU, in turn: layers, their single kernels and host times, as ratios.

python -m bench.compare BEFORE [--case CASES] [--kernels CASES] [--fp8 CASES] [--host] [--window S] --out FILE.json

BEFORE is the folder of another checkout; the other side is this one. Each side runs in a process of its own that holds
the inputs of one case, and both make the same bits. Windows of calls back to back follow one another in random order,
as the power limit lets the clock swing once a second; differences of a percent take windows that span a swing. A ratio
is that of the medians over all windows but the first.

Host times also differ from process to process of one checkout, by where its objects lie. So they are those of several
pairs of processes, one after another. A row has the medians over the pairs, and the least and the greatest ratio of a
pair: where 1 lies between these, the checkouts do not differ by what can be told.
"""

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOW_SECONDS = 0.3
ROUNDS = 7
PAIRS, HOST_ROUNDS, HOST_CALLS = 5, 11, 100  # of processes, windows of each function in a pair, calls of a window


def module_of(*names: str):
    """The first module of the package that a checkout has under one of these names."""
    for name in names:
        try:
            return importlib.import_module(f"moeblaze_cupy.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"compare: expected one of {names}, got none")


class Side:
    """A checkout's process, which answers one line of JSON for each line of JSON that it gets."""

    def __init__(self, folder: Path):
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *what):
        """Raises RuntimeError with what the process said of its failure."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(f"compare: {what}: {answer['error']}")
        return answer["value"]

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Worker:
    """What the process of a side does: answers of its methods by name."""

    def __init__(self):
        from bench import measure

        self.measure, self.calls, self.once = measure, {}, {}

    def layer(self, name: str, order: str) -> list[str]:
        """Loads a layer; returns the names of its passes."""
        import torch

        from bench import cases, inputs
        from moeblaze_cupy.interop.torch import moe

        self.free()
        case = cases.LAYERS[name]
        made = inputs.layer_inputs(case, order)
        leaves = [made[n].detach().requires_grad_() for n in ("x", "weights", "w1", "w2")]

        def forward():
            x, weights, w1, w2 = leaves
            return moe(x, made["ids"], weights, w1, w2, activation=case.activation)

        self.calls = {
            "forward": forward,
            "forward_backward": lambda: torch.autograd.grad(forward(), leaves, made["grad_out"]),
        }
        return list(self.calls)

    def kernels(self, name: str, order: str) -> list[str]:
        """Loads the single kernels of a layer; returns their names."""
        from bench import cases, inputs, kernels

        self.free()
        case = cases.LAYERS[name]
        self.calls = dict(kernels.Kernels(case, inputs.layer_inputs(case, order)).calls)
        return list(self.calls)

    def fp8(self, name: str, order: str) -> list[str]:
        """Loads the products whose epilogues make e4m3, beside up_fwd in bf16; returns their names."""
        from bench import cases, fp8, inputs, kernels

        Torch = module_of("frameworks", "arrays").Torch

        self.free()
        case = cases.LAYERS[name]
        made = inputs.layer_inputs(case, order)
        kernel = kernels.Kernels(case, made)
        checked = fp8.Checked(case, kernel)
        w1 = Torch.describe(made["w1"])
        arguments = Torch, kernel.run, kernel.addresses, kernel.index_layout, kernel.limits, case
        saved = saved_up_fwd(*arguments, made["x"], w1.layout, w1.ptr, kernel.y_swi)
        self.calls = {"up_fwd": kernel.calls["up_fwd"], "up_fwd, save fp8": saved}
        for entry in ("up_fwd", "down_bwd"):
            checked.calls[entry]()  # down_bwd reads what up_fwd writes
            self.calls[f"{entry}, e4m3"] = checked.calls[entry]
        return list(self.calls)

    def host(self) -> list[str]:
        """Loads the small calls of bench.host_time; returns their names."""
        import torch

        from bench import host_time

        self.free()
        self.calls = host_time.functions("cuda" if torch.cuda.is_available() else "cpu")
        for call in self.calls.values():
            for _ in range(20):
                call()
        return list(self.calls)

    def window(self, name: str, seconds: float) -> float:
        """Device seconds of a call among calls back to back."""
        call, before = self.calls[name], self.once.get(name)
        if before is None:
            _, before = self.measure.keep_busy(call, 0.05)
        self.once[name] = self.measure.back_to_back_seconds(call, before, seconds)
        return self.once[name]

    def peak(self, name: str) -> float | None:
        """MiB of torch's allocator in a call, without its results; the call has run before."""
        return self.measure.peak_mib(lambda: _tensors(self.calls[name]()))

    def host_window(self, name: str, calls: int) -> float:
        """Host seconds of one of so many calls that do not wait for the GPU."""
        import time

        import torch

        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        wait()
        call, start = self.calls[name], time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - start) / calls
        wait()
        return seconds

    def environment(self) -> dict:
        return {"machine_info": self.measure.environment(), "commit": self.measure.commit()}

    def free(self) -> None:
        self.calls, self.once = {}, {}
        self.measure.release()


def saved_up_fwd(framework, run, lists, index, limits, case, x, layout, w1: int, y, saved=None):
    """A call of the bf16 product that keeps the first layer as save="fp8" does.

    layout, w1: the weight's, and its address. y: (R, h), written. saved: bytes for the first layer, made if None.
    """
    launch_config = module_of("cuda.launch_config", "launch_config")
    products = module_of("gemm.products", "ops.grouped_gemm")

    halves = case.first_columns // case.h
    weight = products.Weight.of((layout,), case.h if halves == 2 else None)
    rows = products.Operand("bfloat16", case.d)
    form = "up_fwd", index, rows, weight, case.h, case.d, case.activation
    of_step = (products.Product(*form), limits) if hasattr(products, "Product") else (*form, limits)
    step = products.configure(*of_step, fp8_saved=True)
    if saved is None:
        saved = run.empty((launch_config.saved_fp8(case.slots, case.h, halves).nbytes,), "uint8").array
    from_x, to, result = (framework.describe(array).ptr for array in (x, saved, y))

    def call():
        products.gemm(run, step, lists, from_x, weight.halves(w1), first_layer=to, result=result)
        return saved, y  # which the call keeps

    return call


def _tensors(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def serve(folder: str) -> None:
    """Answers on standard output; whatever else is printed goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path[0] = folder
    worker = Worker()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(worker, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def in_turn(sides: dict[str, Side], window: str, name: str, rounds: int, length: float) -> dict[str, list[float]]:
    """Seconds of a call on each side, by round."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in random.sample(list(sides), len(sides)):
            found[side].append(sides[side].ask(window, name, length))
    return {side: seconds[1:] for side, seconds in found.items()}


def compared(sides: dict[str, Side], load: tuple[str, ...], rounds: int, length: float) -> Iterator[dict]:
    """A row for each call that both sides have, as it is measured."""
    names = [side.ask(*load) for side in sides.values()]
    for name in names[0]:
        if name in names[1]:
            by_round = in_turn(sides, "window", name, rounds, length)
            seconds = {side: statistics.median(found) for side, found in by_round.items()}
            row = {
                "what": load[0],
                "case": load[1],
                "name": name,
                **seconds,
                "rounds": by_round,
            }
            if load[0] == "layer":
                row["peak_mib"] = {side: process.ask("peak", name) for side, process in sides.items()}
            ratio = seconds["after"] / seconds["before"]
            print(f"{row['what']:8} {row['case']:12} {name:30} {_microseconds(seconds)} {ratio:.3f}", flush=True)
            yield {**row, "ratio": ratio}


def host_rows(pairs: Iterable[dict[str, Side]], calls: int) -> list[dict]:
    """A row for each function of bench.host_time that all sides have; "rounds" are the medians of the pairs."""
    medians: dict[str, dict[str, list[float]]] = {}
    for sides in pairs:
        first, second = (side.ask("host") for side in sides.values())
        for name in (name for name in first if name in second):
            by_round = in_turn(sides, "host_window", name, HOST_ROUNDS, calls)
            for side, found in by_round.items():
                medians.setdefault(name, {}).setdefault(side, []).append(statistics.median(found))
    rows = []
    for name, by_pair in medians.items():
        ratios = [after / before for before, after in zip(*by_pair.values(), strict=True)]
        seconds = {side: statistics.median(found) for side, found in by_pair.items()}
        span = {"ratio": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
        rows.append({"what": "host", "case": "", "name": name, **seconds, "rounds": by_pair, **span})
        ratio, least, greatest = span.values()
        told = f"{_microseconds(seconds)} {ratio:.3f} ({least:.3f} to {greatest:.3f})"
        print(f"{'host':8} {'':12} {name:30} {told}", flush=True)
    return rows


def started(before: str) -> dict[str, Side]:
    return {"before": Side(Path(before).resolve()), "after": Side(ROOT)}


def started_one_after_another(first: dict[str, Side], before: str, number: int) -> Iterator[dict[str, Side]]:
    """Pairs of sides: the first, which stays, and others, which end when the next is asked for."""
    yield first
    for _ in range(number - 1):
        sides = started(before)
        yield sides
        for side in sides.values():
            side.close()


def _microseconds(seconds: dict[str, float]) -> str:
    return " ".join(f"{value * 1e6:10.1f}" for value in seconds.values())


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.splitlines()[0])
    parser.add_argument("before", help="the folder of another checkout")
    parser.add_argument("--case", default="", help="layers to compare, cases or groups of bench/cases.py")
    parser.add_argument("--kernels", default="", help="cases whose single kernels are compared")
    parser.add_argument("--fp8", default="", help="cases whose products with epilogues that make e4m3 are compared")
    parser.add_argument("--host", action="store_true", help="host time of small calls too, in about a minute")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of processes, for --host (%(default)s)")
    parser.add_argument("--calls", type=int, default=HOST_CALLS, help="of a window of --host (%(default)s)")
    parser.add_argument("--order", choices=("transposed", "row"), default="transposed")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--window", type=float, default=WINDOW_SECONDS, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record of the rows")
    args = parser.parse_args(argv or None)
    from bench import cases

    loads: list[tuple[str, str, str]] = []
    for what, names in (("layer", args.case), ("kernels", args.kernels), ("fp8", args.fp8)):
        chosen = cases.select(names, "") if names else []
        loads += [(what, name, args.order) for name in chosen]
    sides = started(args.before)
    record: dict = {"rows": [], "sides": {name: side.ask("environment") for name, side in sides.items()}}

    def write() -> None:  # what there is, should a later one fail
        if args.out:
            Path(args.out).write_text(json.dumps(record, indent=1) + "\n")

    if args.host:
        pairs = started_one_after_another(sides, args.before, args.pairs)
        record["rows"] += host_rows(pairs, args.calls)
        write()
    for load in loads:
        for row in compared(sides, load, args.rounds, args.window):
            record["rows"].append(row)
            write()
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(sys.argv[2])
    else:
        main()
