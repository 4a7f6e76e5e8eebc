"""Frozen experts in four and eight bits: how fast they are decoded, and a pass on them beside one on bf16.

python -m bench.quantised --out FILE.json [--part decode,passes,errors] [--tiny]

Decoding of both weights of a layer is timed by each format, beside a copy that reads and writes as many bytes together.
A pass is forward and backward of a frozen layer on arrays, with the gradients of x and of the router weights. Forward
and backward each decode both weights, as in a model of many layers; "once" is a pass whose backward finds what forward
decoded. Decoded weights are compared with the CPU's bit for bit, and passes with those on decoded weights, before they
are timed. Windows of calls back to back follow one another in random order. "in e4m3" is mxfp4 as e4m3, in forward's
order and in backward's, and a pass with precision="fp8" on Hopper, which is compared with float64.

Errors are no times: how far output and gradients of a frozen layer with factors of rank 16 move by the format, against
float64 on the weights that were packed. Beside them is the arithmetic's part, against float64 on the decoded weights.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moeblaze_cupy as mb
from bench import accuracy, cases, fp8, inputs, lora, measure, table, verify
from bench.bench_experts import GPT_OSS, with_biases
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.frameworks import Torch
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import WEIGHT_FORMATS

ROUNDS = 4  # of which the first is dropped
TOKENS = 4096, 16384
CASES = cases.GPT_OSS_20B, cases.LAYERS["qwen30b"]
TINY = cases.LayerCase("tiny", 48, 128, 128, 4, 2, "for machines without a GPU")
OF_PASSES = ("mxfp4", "nf4", "e4m3")
BF16, IN_E4M3 = "bf16", "mxfp4, in e4m3"
E4M3_TOLERANCE = 0.1  # of a norm: that of rows in e4m3, as bench/fp8.py has it for layers
OF_ERRORS = cases.LayerCase("d512", 4096, 512, 256, 8, 2, "few experts"), lora.CASES["qwen30b_4k"]
RANK_16 = lora.Way(16)
Pair = tuple[mb.QuantizedWeight, mb.QuantizedWeight]


def formats(w1: torch.Tensor, w2: torch.Tensor) -> dict[str, Pair]:
    """Both weights by format: what is made of them, and two forms of checkpoints with random scales."""
    made = {name: mb.quantize_experts(w1, w2, name) for name in WEIGHT_FORMATS}
    generator = torch.Generator(w1.device).manual_seed(1)

    def scales(low: int, high: int, *shape: int) -> torch.Tensor:
        options: dict[str, Any] = {"generator": generator, "device": w1.device, "dtype": torch.uint8}
        return torch.randint(low, high, shape, **options)

    def mxfp8(weight: mb.QuantizedWeight) -> mb.QuantizedWeight:
        E, K, N = weight.shape
        return weight._replace(scales=scales(110, 130, E, N, K // 32), block=(1, 32))

    def nested(weight: mb.QuantizedWeight) -> mb.QuantizedWeight:
        E, blocks = weight.scales.shape
        code = torch.rand(256, generator=generator, device=w1.device)
        absmax = torch.rand(E, blocks // 256, generator=generator, device=w1.device)
        parts = mb.NestedScales(code, absmax, torch.tensor(0.5, device=w1.device))
        return weight._replace(scales=scales(0, 256, E, blocks), nested=parts)

    made["mxfp8"] = mxfp8(made["e4m3"][0]), mxfp8(made["e4m3"][1])
    if all(weight.scales.shape[1] % 256 == 0 for weight in made["nf4"]):
        made["nf4, nested"] = nested(made["nf4"][0]), nested(made["nf4"][1])
    return made


def check_decoded(name: str, weight: mb.QuantizedWeight) -> None:
    """The first expert's numbers, bit for bit those of the CPU."""
    first = weight._replace(data=weight.data[:1].cpu(), scales=weight.scales[:1].cpu(), shape=(1, *weight.shape[1:]))
    if weight.nested is not None:
        code, absmax, offset = weight.nested
        first = first._replace(nested=mb.NestedScales(code.cpu(), absmax[:1].cpu(), offset.cpu()))
    got, want = mb.dequantize(weight)[:1].cpu(), mb.dequantize(first)
    assert torch.equal(got, want), f"{name}: other numbers than on the CPU; a wrong result gets no time"


def decoding(case: cases.LayerCase, window: float, rounds: int) -> list[dict]:
    """A row of each format: milliseconds of both weights and of the copy, and GB/s."""
    made = inputs.layer_inputs(replace(case, L=1))
    rows = []
    for name, weights in formats(made["w1"], made["w2"]).items():
        for weight in weights:
            check_decoded(name, weight)
        E, d, h = case.E, case.d, case.h
        nbytes = sum(weight.nbytes for weight in weights) + 2 * E * 3 * d * h
        source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device=made["w1"].device) for _ in range(2))

        def decode(weights: Pair = weights) -> None:
            for weight in weights:
                mb.dequantize(weight)

        calls = {"decode": decode, "copy": functools.partial(target.copy_, source)}
        seconds = fp8.in_turn(calls, window, rounds)
        about = {"case": case.name, "format": name, "bytes": nbytes}
        speeds = {f"{what}_gb_per_s": nbytes / seconds[what] / 1e9 for what in seconds}
        rows.append({**about, "ms": seconds["decode"] * 1e3, **speeds})
    return rows


def as_e4m3(weight: mb.QuantizedWeight, groups: int, transposed: bool) -> Callable[[], torch.Tensor]:
    """A call that decodes it to e4m3 and returns the bytes, after a comparison of the first expert's with the CPU's."""
    (E, K, N), data = weight.shape, weight.data
    run = Runtime.current(Torch, data.device.index)
    steps = decode.steps_e4m3(weight.shape, groups, groups, transposed)
    out = torch.empty((E, K, N) if transposed else (E, N, K), dtype=torch.uint8, device=data.device)
    tops = torch.empty(decode.tops_bytes(E, groups), dtype=torch.uint8, device=data.device)
    scales = torch.empty(E, groups, device=data.device)
    addresses = *(t.data_ptr() for t in (data, weight.scales, tops)), 0, out.data_ptr(), scales.data_ptr()

    def call() -> torch.Tensor:
        for step in steps:
            run.launch(step, *addresses)
        return out

    first = weight._replace(data=data[:1].cpu().numpy(), scales=weight.scales[:1].cpu().numpy(), shape=(1, K, N))
    want, got = torch.from_numpy(reference.mxfp4_as_e4m3(first, groups)[0]), call()[:1].cpu()
    same = torch.equal(got.mT if transposed else got, want)
    assert same, "e4m3: other numbers than on the CPU; a wrong result gets no time"
    return call


def decoding_e4m3(case: cases.LayerCase, window: float, rounds: int) -> list[dict]:
    """The rows of mxfp4 as e4m3, as those of `decoding`."""
    if not inputs.has_gpu():
        return []
    made, rows = inputs.layer_inputs(replace(case, L=1)), []
    weights = mb.quantize_experts(made["w1"], made["w2"], "mxfp4")
    nbytes = sum(weight.nbytes for weight in weights) + 3 * case.E * case.d * case.h
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device=made["w1"].device) for _ in range(2))
    for name, transposed in ((IN_E4M3, False), (f"{IN_E4M3}, transposed", True)):
        both = [as_e4m3(weight, groups, transposed) for weight, groups in zip(weights, (2, 1), strict=True)]
        calls = {"decode": measure.in_a_row(both), "copy": functools.partial(target.copy_, source)}
        seconds = fp8.in_turn(calls, window, rounds)
        speeds = {f"{what}_gb_per_s": nbytes / seconds[what] / 1e9 for what in seconds}
        rows.append({"case": case.name, "format": name, "bytes": nbytes, "ms": seconds["decode"] * 1e3, **speeds})
    return rows


def passes(case: cases.LayerCase, L: int, window: float, rounds: int) -> list[dict]:
    """A row of each kind of weights, with milliseconds."""
    is_gpt_oss = case.name.startswith("gptoss")
    made = inputs.layer_inputs(replace(case, L=L))
    made = with_biases(made) if is_gpt_oss else made
    kind = {"activation": GPT_OSS.activation, "gate_up": GPT_OSS.gate_up} if is_gpt_oss else {}
    options = {**kind, "b1": made.get("b1"), "b2": made.get("b2")}

    def run(w1: Any, w2: Any, again: bool = True, precision: str | None = None) -> tuple[torch.Tensor, ...]:
        of_call = {**options, "precision": precision}
        out, saved = mb.moe_forward(made["x"], made["ids"], made["weights"], w1, w2, **of_call)
        if again:
            mb.release_scratch()  # as if another layer had run
        grads = mb.moe_backward(made["grad_out"], saved, needs=("x", "weights"))
        return out, grads.x, grads.weights

    calls = {BF16: functools.partial(run, made["w1"], made["w2"])}
    for name in OF_PASSES:
        packed = mb.quantize_experts(made["w1"], made["w2"], name)
        want = run(*(mb.dequantize(weight).mT for weight in packed))
        for label, again in ((name, True), (f"{name}, once", False)):
            calls[label] = functools.partial(run, *packed, again=again)
            same = all(torch.equal(a, b) for a, b in zip(calls[label](), want, strict=True))
            assert same, f"{label} on {case.name}: other bits than on decoded weights; a wrong result gets no time"
        if name == "mxfp4" and not (inputs.has_gpu() and torch.cuda.get_device_capability() != (9, 0)):
            calls[IN_E4M3] = functools.partial(run, *packed, precision="fp8")
            got = dict(zip(("out", "x", "weights"), calls[IN_E4M3](), strict=True))
            plain = {name: mb.dequantize(weight).mT for name, weight in zip(("w1", "w2"), packed, strict=True)}
            found = lora.errors_of(made | plain, lora.kind_of(case), None, got)
            assert max(found.values()) < E4M3_TOLERANCE, f"{IN_E4M3} on {case.name}: {found}; it gets no time"
    seconds = fp8.in_turn(calls, window, rounds)
    mb.release_scratch()
    return [{"case": case.name, "L": L, "weights": name, "ms": s * 1e3} for name, s in seconds.items()]


def errors(case: cases.LayerCase, data: str) -> list[dict]:
    """A row of each format on one kind of data (bench/accuracy.py): bits and error of the weights, errors by result.

    Raises AssertionError where a result is not that of the decoded weights.
    """
    made, rows = accuracy.layer_inputs(case, data, seed=0), []
    w1, w2 = weights = made["w1"], made["w2"]
    factors, kind = lora.factors_of(case, RANK_16), lora.kind_of(case)
    for name in (BF16, *WEIGHT_FORMATS):
        packed = weights if name == BF16 else mb.quantize_experts(w1, w2, name)
        got = lora.fused(made | {"w1": packed[0], "w2": packed[1]}, {}, factors)
        decoded = weights if name == BF16 else tuple(mb.dequantize(weight).mT for weight in packed)
        arithmetic = lora.errors_of(made | {"w1": decoded[0], "w2": decoded[1]}, kind, factors, got)
        wrong = verify.problems(arithmetic, made["x"].dtype)
        assert wrong is None, f"{name} on {case.name}: {wrong}"
        moved = [(a.float() - b.float()).square().sum() for a, b in zip(decoded, weights, strict=True)]
        of_weights = (sum(moved) / sum(w.float().square().sum() for w in weights)) ** 0.5
        about = {"case": case.name, "shape": case.shape, "data": data, "weights": name}
        bits = 8 * sum(weight.nbytes for weight in packed) / (w1.numel() + w2.numel())
        found = {"errors": lora.errors_of(made, kind, factors, got), "arithmetic": arithmetic}
        rows.append({**about, "bits": bits, "weight_error": float(of_weights), **found})
    mb.release_scratch()
    return rows


def text(record: dict) -> list[str]:
    """Lines of a table for each part that was measured."""
    return [line for part in PARTS if record[part] for line in PARTS[part](record[part])]


def decode_text(rows: list[dict]) -> list[str]:
    lines = [["case", "format", "decode ms", "GB/s", "copy GB/s", "of a copy"]]
    for row in rows:
        speeds = row["decode_gb_per_s"], row["copy_gb_per_s"]
        numbers = table.number(row["ms"]), *map(table.number, speeds), f"{speeds[0] / speeds[1]:.3f}"
        lines.append([row["case"], row["format"], *numbers])
    return table.aligned(lines, 2)


def passes_text(rows: list[dict]) -> list[str]:
    of_bf16 = {(row["case"], row["L"]): row["ms"] for row in rows if row["weights"] == BF16}
    lines = [["case", "tokens", "weights", "ms", "of bf16"]]
    for row in rows:
        ratio = row["ms"] / of_bf16[row["case"], row["L"]]
        lines.append([row["case"], str(row["L"]), row["weights"], table.number(row["ms"], 4), f"{ratio:.3f}"])
    return table.aligned(lines, 3)


def errors_text(rows: list[dict]) -> list[str]:
    """In thousandths; of the factors the least and the greatest."""
    lines = [["case", "data", "weights", "bits", "of weights", "out", "grad x", "grads of factors", "arithmetic, most"]]
    for row in rows:
        found = {name: f"{1e3 * error:.1f}" for name, error in row["errors"].items()}
        factors = sorted((found[name] for name in found if name.startswith("lora.")), key=float)
        most = f"{1e3 * max(row['arithmetic'].values()):.1f}"
        about = row["case"], row["data"], row["weights"], f"{row['bits']:.2f}", f"{1e3 * row['weight_error']:.1f}"
        lines.append([*about, found["out"], found["x"], f"{factors[0]} to {factors[-1]}", most])
    return table.aligned(lines, 3)


PARTS: dict[str, Callable[[list[dict]], list[str]]] = {
    "decode": decode_text,
    "passes": passes_text,
    "errors": errors_text,
}


def parts(names: str) -> list[str]:
    """An argparse type."""
    if unknown := [name for name in names.split(",") if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"expected names among {', '.join(PARTS)}, got {unknown[0]!r}")
    return names.split(",")


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=parts, default=list(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--tiny", action="store_true", help="one small layer, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    if not args.tiny:
        inputs.expect_gpu(parser)
    chosen, tokens, of_errors = ((TINY,), (TINY.L,), (TINY,)) if args.tiny else (CASES, TOKENS, OF_ERRORS)
    how = measure.SWING_SECONDS, ROUNDS
    record = measure.record(**{part: [] for part in PARTS})
    calls = [("decode", functools.partial(of, case, *how)) for case in chosen for of in (decoding, decoding_e4m3)]
    calls += [("passes", functools.partial(passes, case, L, *how)) for case in chosen for L in tokens]
    calls += [("errors", functools.partial(errors, case, data)) for case in of_errors for data in accuracy.KINDS]
    for part, call in calls:
        if part in args.part:
            record[part] += call()
            measure.release()
            if args.out:  # after each, as a run may be cut
                measure.write_record(record, args.out)
    print("\n".join(text(record)))


if __name__ == "__main__":
    main()
