"""Host time of a public call on a layer so small that the GPU is faster: what Python, CuPy and the driver take.

python -m bench.host_time --out FILE.json [--calls 300]

A call returns before the GPU has done its work, so calls are timed one after another without a wait, in rounds that a
synchronisation separates. The order of the functions changes from round to round. The figures are medians of rounds.
"""

import argparse
from collections.abc import Callable

import torch

import moeblaze_cupy as mb
from bench import inputs, measure, table
from moeblaze_cupy.interop.torch import MoE, moe

L, K, E, D, H = 64, 2, 8, 256, 256
ROUNDS = 30


def functions(device: str) -> dict[str, Callable]:
    """Calls by name, on 64 tokens of d = h = 256, 8 experts and k = 2, in bfloat16."""
    options = {"device": device, "dtype": torch.bfloat16}
    x, grad_out = torch.randn(L, D, **options), torch.randn(L, D, **options)
    logits = torch.randn(L, E, device=device)
    w1 = torch.randn(E, 2 * H, D, **options).div_(D**0.5).transpose(1, 2)
    w2 = torch.randn(E, D, H, **options).div_(H**0.5).transpose(1, 2)
    weights, ids = mb.route(logits, K)
    needing = [t.detach().requires_grad_() for t in (x, weights, w1, w2)]
    layer = MoE(D, H, E, K, **options)
    tokens = x.clone().requires_grad_()

    def forward():
        with torch.no_grad():
            moe(x, ids, weights, w1, w2)

    def autograd():
        a, b, c, d = needing
        return moe(a, ids, b, c, d)

    def step():
        torch.autograd.grad(autograd(), needing, grad_out)

    def module():
        layer.zero_grad(set_to_none=True)
        layer(tokens).backward(grad_out)

    def arrays():
        _, saved = mb.moe_forward(x, ids, weights, w1, w2)
        mb.moe_backward(grad_out, saved)

    return {
        "route": lambda: mb.route(logits, K),
        "build_dispatch": lambda: mb.build_dispatch(ids, E),
        "forward": forward,
        "forward with autograd": autograd,
        "forward and backward, arrays": arrays,
        "forward and backward": step,
        "MoE module with backward": module,
    }


def measured(calls: int, device: str = "cuda") -> dict[str, dict[str, float]]:
    """Median and quartiles of the microseconds of one call, by name."""
    named = functions(device)
    for function in named.values():
        for _ in range(20):
            function()
    return measure.host_microseconds(named, calls, ROUNDS, waits=False)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100, help="per round (%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    rows = measured(args.calls)
    if args.out:
        measure.write_record(measure.record(microseconds=rows), args.out)
    lines = [[name, *(f"{row[q]:.1f}" for q in measure.QUARTILES)] for name, row in rows.items()]
    print("\n".join(table.aligned([["microseconds of a call", "q1", "median", "q3"], *lines], 1)))


if __name__ == "__main__":
    main()
