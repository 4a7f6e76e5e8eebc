"""Low-rank factors beside frozen experts: a pass with them, beside the experts alone and beside W + BA in memory.

python -m bench.lora --out FILE.json [--case gptoss20b,qwen30b_4k] [--precision fp8] [--tiny]

A pass is forward and backward on arrays. "frozen" has the gradients of x and of the router weights, "r = N" has those
of the factors too. "W + BA" is what an adapter does that knows the weights alone: each forward makes W + BA, backward
makes the gradients of whole weights, and these are reduced to those of the factors. The output and every gradient are
compared with float64 before a pass is timed. Windows of calls back to back follow one another in random order. The peak
is that of torch's allocator, with the results. The times of kernels are of a few passes under the profiler.

With --precision fp8 the ways are bf16 and e4m3, each without factors and with them, on weights that were quantised
before.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import moeblaze_cupy as mb
from bench import cases, fp8, inputs, kernel_times, measure, table, verify
from bench.bench_experts import FORMULAS, GPT_OSS, KINDS, Kind, with_biases
from moeblaze_cupy.types import FACTORS

ROUNDS = 4  # of which the first is dropped
FP8_TOLERANCE = 0.08  # relative norm; correct layers in e4m3 are at 0.04 to 0.06
PROFILED = 4  # passes
SCALES = 0.5, 2.0
_QWEN = cases.LAYERS["qwen30b"]
CASES = {
    case.name: case
    for case in (
        cases.GPT_OSS_20B,
        replace(cases.GPT_OSS_20B, name="gptoss20b_4k", L=4096),
        _QWEN,
        replace(_QWEN, name="qwen30b_4k", L=4096),
        cases.LAYERS["olmoe"],
        cases.LAYERS["mixtral"],
    )
}


class Way(NamedTuple):
    """rank: of both pairs of factors, None without any. in_memory: W + BA is made. precision: of the products."""

    rank: int | None
    dtype: torch.dtype = torch.float32
    in_memory: bool = False
    precision: str | None = None


FROZEN = "frozen"
WAYS = {
    FROZEN: Way(None),
    "r = 16": Way(16),
    "r = 64": Way(64),
    "r = 16, bf16 factors": Way(16, torch.bfloat16),
    "W + BA, r = 16": Way(16, in_memory=True),
}


IN_BOTH = ("frozen", None), ("r = 16", 16), ("r = 64", 64)
WAYS_IN_E4M3 = {name: Way(rank) for name, rank in IN_BOTH}
WAYS_IN_E4M3 |= {f"{name}, e4m3": Way(rank, precision="fp8") for name, rank in IN_BOTH}
CASES_IN_E4M3 = {case.name: replace(case, L=16384) for case in (cases.GPT_OSS_20B, _QWEN, cases.LAYERS["mixtral"])}


def kind_of(case: cases.LayerCase) -> Kind:
    return GPT_OSS if case.name.startswith("gptoss") else KINDS[0]


def factors_of(case: cases.LayerCase, way: Way, seed: int = 3) -> mb.Lora | None:
    """Random ones of unit products. b lies as peft has it: (columns, r, E)."""
    if way.rank is None:
        return None
    generator = torch.Generator(inputs.device()).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, device=generator.device)
        return made.mul_(0.5 * shape[-1] ** -0.5).to(way.dtype)

    E, d, h, r = case.E, case.d, case.h, way.rank
    b1, b2 = (normal(columns, E, r).transpose(1, 2).contiguous().permute(2, 0, 1) for columns in (2 * h, d))
    return mb.Lora(normal(E, r, d), b1, normal(E, r, h), b2, *SCALES)


def fused(made: dict[str, Any], options: dict[str, Any], lora: mb.Lora | None) -> dict[str, torch.Tensor]:
    """out and the gradients by name, of the experts alone if there are no factors."""
    arrays = (made[name] for name in ("x", "ids", "weights", "w1", "w2"))
    out, saved = mb.moe_forward(*arrays, b1=made.get("b1"), b2=made.get("b2"), lora=lora, **options)
    grads = mb.moe_backward(made["grad_out"], saved, needs=("x", "weights", *(("lora",) if lora else ())))
    found = {"out": out, "x": grads.x, "weights": grads.weights}
    return found | ({f"lora.{n}": getattr(grads.lora, n) for n in FACTORS} if lora else {})


def in_memory(made: dict[str, Any], options: dict[str, Any], lora: mb.Lora) -> dict[str, torch.Tensor]:
    """The same by W + BA, which lies in memory as W does."""
    dtype = made["x"].dtype
    pairs = [[factor.to(dtype) for factor in lora.factors[i : i + 2]] for i in (0, 2)]
    merged = {}
    for name, (a, b), scale in zip(("w1", "w2"), pairs, lora.scales, strict=True):
        w = made[name]
        if w.stride(1) == 1:
            merged[name] = w.mT.baddbmm(b, a, alpha=scale).mT
        else:
            merged[name] = w.baddbmm(a.mT, b.mT, alpha=scale)
    arrays = (made["x"], made["ids"], made["weights"], merged["w1"], merged["w2"])
    out, saved = mb.moe_forward(*arrays, b1=made.get("b1"), b2=made.get("b2"), **options)
    grads = mb.moe_backward(made["grad_out"], saved, needs=("x", "weights", "w1", "w2"))
    found = {"out": out, "x": grads.x, "weights": grads.weights}
    for number, (a, b), scale in zip("12", pairs, lora.scales, strict=True):
        grad = getattr(grads, f"w{number}").mT
        found |= {f"lora.a{number}": b.mT @ grad * scale, f"lora.b{number}": grad @ a.mT * scale}
    return found


def exact_of(made: dict[str, Any], kind: Kind, lora: mb.Lora | None) -> dict[str, torch.Tensor]:
    """out and the gradients by name, by autograd in float64, expert by expert."""
    whole = {"out": made["x"], "x": made["x"], "weights": made["weights"]}
    whole |= {f"lora.{n}": getattr(lora, n) for n in FACTORS} if lora else {}
    exact = {name: torch.zeros_like(values, dtype=torch.float64) for name, values in whole.items()}
    for expert in range(len(made["w2"])):
        tokens, slots = (made["ids"] == expert).nonzero(as_tuple=True)
        own = {"x": made["x"][tokens], "weights": made["weights"][tokens, slots]}
        own |= {f"lora.{n}": getattr(lora, n)[expert] for n in FACTORS} if lora else {}
        leaves = {name: values.double().requires_grad_() for name, values in own.items()}
        w1, w2 = made["w1"][expert].double(), made["w2"][expert].double()
        if lora:
            w1 = w1 + lora.scale1 * (leaves["lora.b1"] @ leaves["lora.a1"]).T
            w2 = w2 + lora.scale2 * (leaves["lora.b2"] @ leaves["lora.a2"]).T
        b1, b2 = (made[name][expert].double() if name in made else 0.0 for name in ("b1", "b2"))
        first = leaves["x"] @ w1 + b1
        halves = (first[:, 0::2], first[:, 1::2]) if kind.gate_up == "interleaved" else first.chunk(2, dim=1)
        out = (FORMULAS[kind.activation](*halves) @ w2 + b2) * leaves["weights"][:, None]
        gradients = torch.autograd.grad(out, [*leaves.values()], made["grad_out"][tokens].double())
        of = dict(zip(leaves, gradients, strict=True))
        exact["out"].index_add_(0, tokens, out.detach())
        exact["x"].index_add_(0, tokens, of.pop("x"))
        exact["weights"][tokens, slots] = of.pop("weights")
        for name, gradient in of.items():
            exact[name][expert] = gradient
    return exact


def differences(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative norms of those from exact, by name. Raises ValueError where the names differ."""
    if got.keys() != exact.keys():
        raise ValueError(f"expected results named {', '.join(exact)}, got {', '.join(got)}")
    return {name: float((got[name].double() - want).norm() / want.norm()) for name, want in exact.items()}


def errors_of(made: dict[str, Any], kind: Kind, lora: mb.Lora | None, got: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative norms of the differences from autograd in float64, expert by expert."""
    return differences(got, exact_of(made, kind, lora))


def kernels(call: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Microseconds and launches of a pass by kernel; {} without a GPU."""
    if not inputs.has_gpu():
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    rows: dict[str, dict[str, float]] = {}
    for name, start, end in kernel_times.on_gpu(found.events()):
        row = rows.setdefault(name, {"us": 0.0, "launches": 0.0})
        row["us"] += (end - start) / PROFILED
        row["launches"] += 1 / PROFILED
    return rows


def peak_with_results(call: Callable[[], object]) -> float | None:
    def without_results() -> list[torch.Tensor]:
        call()
        return []

    return measure.peak_mib(without_results)


def measured(
    case: cases.LayerCase,
    window: float = measure.SWING_SECONDS,
    rounds: int = ROUNDS,
    ways: dict[str, Way] = WAYS,
) -> list[dict]:
    """A row of each way. Raises AssertionError for a wrong result. Products in e4m3 take no columns of gpt-oss."""
    kind = KINDS[0] if ways is WAYS_IN_E4M3 else kind_of(case)
    order = "row" if kind is GPT_OSS else "transposed"
    made = inputs.layer_inputs(case, order)
    made = with_biases(made) if kind.bias else made
    plain = {"activation": kind.activation, "gate_up": kind.gate_up}
    in_e4m3: dict[str, Any] = {}
    if ways is WAYS_IN_E4M3:
        in_e4m3 = {**plain, "precision": "fp8", "fp8_weights": mb.quantize_weights(made["w1"], made["w2"])}
    calls, rows = {}, []
    for name, way in ways.items():
        lora, options = factors_of(case, way), in_e4m3 if way.precision else plain
        call = functools.partial(in_memory if way.in_memory else fused, made, options, lora)
        errors = errors_of(made, kind, lora, call())
        wrong = verify.problems(errors, made["x"].dtype, FP8_TOLERANCE if way.precision else None)
        assert wrong is None, f"{name} on {case.name}: {wrong}; a wrong result gets no time"
        about = {"case": case.name, "shape": case.shape, "activation": kind.activation, "order": order, "way": name}
        rows.append({**about, "errors": errors, "peak_mib": peak_with_results(call), "kernels": kernels(call)})
        calls[name] = call
    seconds = fp8.in_turn(calls, window, rounds)
    times = {name: {"ms": s * 1e3, "of_frozen": s / seconds[FROZEN]} for name, s in seconds.items()}
    return [{**row, **times[row["way"]]} for row in rows]


def text(rows: list[dict]) -> list[str]:
    """Lines of a table."""
    lines = [["case", "way", "ms", "of frozen", "peak MiB"]]
    for row in rows:
        cells = (table.number(row["ms"], 4), f"{row['of_frozen']:.3f}", table.number(row["peak_mib"]))
        lines.append([row["case"], row["way"], *cells])
    return table.aligned(lines, 2)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description=__doc__.splitlines()[0])
    parser.add_argument("--case", metavar="CASES", help=f"({','.join(CASES)})")
    parser.add_argument("--precision", choices=["fp8"], help=f"for {', '.join(CASES_IN_E4M3)} with 16k tokens")
    parser.add_argument("--tiny", action="store_true", help="one small layer, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    known, ways = (CASES_IN_E4M3, WAYS_IN_E4M3) if args.precision else (CASES, WAYS)
    names = inputs.chosen(parser, "--case", args.case, known)
    if not args.tiny:
        inputs.expect_gpu(parser)
    rows: list[dict] = []
    record = measure.record(rows=rows)
    tiny = replace(cases.TINY, h=32)  # e4m3 takes multiples of 16
    for case in [tiny] if args.tiny else [known[name] for name in names]:
        rows += measured(case, ways=ways)
        measure.release()
        if args.out:  # after each case, as a run may be cut
            measure.write_record(record, args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
