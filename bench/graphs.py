"""A training step of one layer, eager, compiled and as a CUDA graph: what the host's share of a step is.

python -m bench.graphs --out FILE.json [--calls 50]

Microseconds of a forward with backward of `MoE`, calls one after another as in training, the GPU waited for once a
round. The orders of rounds change. Medians of rounds, beside the peak memory of a step.
"""

import argparse
from collections.abc import Callable

import torch

from bench import cases, inputs, measure, table
from moeblaze_cupy.interop.torch import MoE

ROUNDS = 15
SIZES = {"64 tokens, d=256": (64, 256, 256, 8, 2)}  # L, d, h, E, k


def sizes() -> dict[str, tuple[int, ...]]:
    case = cases.LAYERS["tab2_32k"]
    return SIZES | {case.name: (case.L, case.d, case.h, case.E, case.k)}


def steps(L: int, d: int, h: int, E: int, k: int, device: str) -> dict[str, Callable]:
    """Steps by name; all have the gradients of x and of every parameter."""
    options = {"device": device, "dtype": torch.bfloat16}
    x, grad_out = torch.randn(L, d, **options).requires_grad_(), torch.randn(L, d, **options)

    def step_of(layer, function):
        leaves = (x, *layer.parameters())

        def step():
            torch.compiler.cudagraph_mark_step_begin()
            return torch.autograd.grad(function(x), leaves, grad_out)

        return step

    made = {}
    for name, of in (
        ("eager", lambda layer: layer),
        ("compiled", lambda layer: torch.compile(layer, fullgraph=True, dynamic=False)),
        ("reduce-overhead", lambda layer: torch.compile(layer, fullgraph=True, mode="reduce-overhead", dynamic=False)),
        ("graphed", lambda layer: torch.cuda.make_graphed_callables(layer, (x,))),
    ):
        if device == "cpu" and name != "eager":
            continue
        layer = MoE(d, h, E, k, **options)
        made[name] = step_of(layer, of(layer))
    return made


def measured(calls: int, device: str = "cuda") -> list[dict]:
    """A row of each size and step: median and quartiles in microseconds, and the peak MiB of a step."""
    rows = []
    for size, shape in sizes().items() if device == "cuda" else [("tiny", (8, 16, 16, 4, 2))]:
        named = steps(*shape, device)
        for step in named.values():
            for _ in range(10):
                step()
        for name, quartiles in measure.host_microseconds(named, calls, ROUNDS, waits=True).items():
            has_no_pool = name in ("eager", "compiled")  # as graphs have
            peak = measure.peak_mib(named[name]) if has_no_pool else None
            rows.append({"size": size, "step": name, **quartiles, "peak_mib": peak})
    return rows


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.graphs", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50, help="per round (%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    rows = measured(args.calls)
    if args.out:
        measure.write_record(measure.record(steps=rows), args.out)
    head = ["size", "step", "q1 us", "median us", "q3 us", "peak MiB"]
    lines = [
        [r["size"], r["step"], *(f"{r[q]:.1f}" for q in measure.QUARTILES), table.number(r["peak_mib"])] for r in rows
    ]
    print("\n".join(table.aligned([head, *lines], 2)))


if __name__ == "__main__":
    main()
