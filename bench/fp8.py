"""The e4m3 products of a layer, each checked against torch and then timed beside the bf16 product and torch._scaled_mm.

python -m bench.fp8 [--case CASES] [--part PARTS] [--window SECONDS] [--rounds N] --out FILE.json

All three are timed in turn, in windows of calls back to back, as the power limit lets the clock swing.
torch._scaled_mm has rows' scales and one dense product of the same size: no gather, no experts, no epilogue, no sums.
down_fwd and up_bwd include the sum over each token's slots in both of ours; "sums" is the time of these alone. The
layer follows, in bf16 and fp8, with how far its results are from bf16's, its forward by torch's own products in e4m3
(bench/fp8_torch.py), and both passes by torchao's where that is installed (bench/fp8_torchao.py). Last come the
kernels that make x and the weights e4m3, beside copies of as many bytes.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import moeblaze_cupy as mb
from bench import cases, fp8_quantize, fp8_torch, fp8_torchao, inputs, kernels, measure, table, verify
from bench.fp8_products import PRODUCTS, Products, buffer_shapes
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.fp8 import wgrad
from moeblaze_cupy.frameworks import Torch
from moeblaze_cupy.gemm import variants as gemm_variants

CASES = "readme,conf3,qwen30b,conf1,mixtral,olmoe,sonic7b,dsv3"
E4M3, LARGEST, GROUP = torch.float8_e4m3fn, 448.0, launch_config.GROUP_COLUMNS
# Of sums against float64: bf16's own rounding, and that of the tensor cores' sums, which keep 13 bits of a fraction.
TOLERANCE = 1.2e-2
# Of what a kernel quantises: elements that are another e4m3 than torch's of the same numbers in float32.
OTHERS = 5e-3
WGRAD = "fp8, fp8_wgrad"  # weight gradients in e4m3, too; its forward is that of "fp8"
PEER = "torch, fp8"
RECIPES = tuple(fp8_torchao.RECIPES)
PEERS = PEER, *(f"torchao, {recipe}" for recipe in RECIPES)
PEER_TOLERANCE = 0.1  # of out, from bf16's
IN_GRAPH = 8  # calls of a graph: those that quantise are shorter than the host's share of them
SUMS = {"down_fwd": "aggregate_out", "up_bwd": "aggregate_dx"}


def quantised(values: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and float32 scales: one for all elements along `dims`."""
    amax = values.abs().amax(dims, keepdim=True).float()
    scale = torch.where(amax == 0, 1.0, amax.clamp(min=2.0**-100) / LARGEST)
    inverse = LARGEST / amax.clamp(min=2.0**-100)
    return (values.float() * inverse).clamp(-LARGEST, LARGEST).to(E4M3), scale


def operands(case: cases.LayerCase, made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `Products` reads, by name."""
    E, d, h, n = case.E, case.d, case.h, case.first_columns
    device, g = made["x"].device, n // h
    found = {"ids": made["ids"], "weights": made["weights"]}
    for name, scales in (("x", "x_scales"), ("grad_out", "grad_scales")):
        q, scale = quantised(made[name], (1,))
        found |= {name: q.view(torch.uint8), scales: scale.flatten().contiguous()}
    shapes = {"up_fwd": (E, n, d), "up_bwd": (E, d, n), "down_fwd": (E, d, h), "down_bwd": (E, h, d)}
    found |= {name: torch.empty(shape, device=device, dtype=torch.uint8) for name, shape in shapes.items()}
    found |= {name: torch.empty(E, parts, device=device) for name, parts in (("w1_scales", g), ("w2_scales", 1))}
    for e in range(E):
        for name, other, w, scales, parts in (
            ("up_bwd", "up_fwd", made["w1"][e], found["w1_scales"], g),
            ("down_bwd", "down_fwd", made["w2"][e], found["w2_scales"], 1),
        ):
            q, scale = quantised(w.reshape(len(w), parts, -1), (0, 2))
            q = q.view(torch.uint8).reshape(w.shape)
            found[name][e], found[other][e], scales[e] = q, q.T, scale.flatten()
    return found


class Checked:
    """The e4m3 products of one case with their buffers, and what torch makes of the same e4m3 numbers in float64.

    Checked are all rows of one expert, 4096 at most, and of the sums over slots 512 tokens.
    """

    def __init__(self, case: cases.LayerCase, kernel: kernels.Kernels):
        self.case, self.kernel, self.g = case, kernel, case.first_columns // case.h
        self.arrays = a = operands(case, kernel.inputs)
        for name, (shape, dtype) in buffer_shapes(case.slots, case.L, case.d, case.h, self.g).items():
            a[name] = torch.empty(shape, device=a["x"].device, dtype=getattr(torch, dtype))
        self.products = Products(Torch, kernel.limits, a, case.activation)
        self.calls = self.products.calls
        self.tokens = kernel.index.expert_token_indices.long()

    def _values(self, name: str, rows: torch.Tensor, halves: int) -> torch.Tensor:
        """Rows that a kernel has quantised, in float64."""
        width = self.arrays[name].shape[1] // halves
        scales = self.arrays[f"{name}_scales"][:, rows].T.unflatten(1, (halves, -1))
        wide = scales.repeat_interleave(GROUP, 2)[:, :, :width].flatten(1)
        return self.arrays[name][rows].view(E4M3).double() * wide

    def _weight(self, name: str, e: int) -> torch.Tensor:
        """(rows, columns) of w1 or w2, in float64."""
        q = self.arrays["up_bwd" if name == "w1" else "down_bwd"][e].view(E4M3).double()
        scales = self.arrays[f"{name}_scales"][e].double()
        return q * scales.repeat_interleave(q.shape[1] // len(scales))

    def _inputs(self, name: str, scales: str, tokens: torch.Tensor) -> torch.Tensor:
        return self.arrays[name][tokens].view(E4M3).double() * self.arrays[scales][tokens, None]

    def errors(self, name: str) -> dict[str, float]:
        """Relative norms of the last call's sums; "others" is the part of e4m3 numbers that torch rounds otherwise."""
        if name in kernels.SUMMED:
            return {"sums": self._error_of_sums(name)}
        counts = self.kernel.index.expert_token_offsets.diff()
        e = int(counts.argmax())
        first = int(self.kernel.index.expert_token_offsets[e])
        rows = torch.arange(first, first + min(int(counts[e]), 4096), device=counts.device)
        tokens = self.tokens[rows]
        if name == "up_fwd":
            got, key, halves = self.arrays["first_layer"][rows], "y", 1
            want = self._inputs("x", "x_scales", tokens) @ self._weight("w1", e)
        else:
            got, key, halves = self.arrays["first_layer_grad"][rows], "dh", self.g
            want = self._expected_grad(e, rows, tokens)
        error = float((got.double() - want).norm() / want.norm())
        values = self._values(key, rows, halves)
        if key == "dh":  # the kernel rounds these to bf16 before it stores them: no bits to compare with
            exact = got.double()
            others = (values - exact).abs() > 0.07 * exact.abs() + 0.01 * values.abs().amax()
        else:
            y = verify.activate(got.float(), self.case.activation)[0]
            groups = torch.nn.functional.pad(y, (0, -y.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
            q = quantised(groups, (2,))[0].view(torch.uint8).flatten(1)[:, : y.shape[1]]
            others = q != self.arrays[key][rows]
        return {"sums": error, "others": float(others.float().mean())}

    def _expected_grad(self, e: int, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        places = self.kernel.index.token_index_map[tokens]
        weights = (self.arrays["weights"][tokens].double() * (places == rows[:, None])).sum(1, keepdim=True)
        grad = self._inputs("grad_out", "grad_scales", tokens) @ self._weight("w2", e).T * weights
        _, *slopes = verify.activate(self.arrays["first_layer"][rows].double(), self.case.activation)
        return torch.cat([grad * slope for slope in slopes], dim=1)

    def _error_of_sums(self, name: str) -> float:
        case, index = self.case, self.kernel.index
        sample = torch.arange(0, case.L, max(1, case.L // 512), device=self.tokens.device)
        rows, order = index.token_index_map[sample].flatten().long().sort()
        bounds = torch.searchsorted(rows, index.expert_token_offsets.long()).tolist()
        parts = torch.zeros(len(rows), case.d, dtype=torch.float64, device=rows.device)
        for e in range(case.E):
            these = slice(bounds[e], bounds[e + 1])
            if bounds[e] == bounds[e + 1]:
                continue
            if name == "down_fwd":
                parts[order[these]] = self._values("y", rows[these], 1) @ self._weight("w2", e)
            else:
                parts[order[these]] = self._values("dh", rows[these], self.g) @ self._weight("w1", e).T
        parts = parts.view(len(sample), case.k, case.d)
        weights = self.arrays["weights"][sample].double() if name == "down_fwd" else torch.ones_like(parts[:, :, 0])
        want = (parts * weights[:, :, None]).sum(1)
        got = self.arrays["out" if name == "down_fwd" else "grad_x"][sample]
        return float((got.double() - want).norm() / want.norm())


def dense(case: cases.LayerCase, name: str) -> Callable[[], object]:
    """One product of all rows with one weight by torch._scaled_mm, with a scale per row and column."""
    d, h, n = case.d, case.h, case.first_columns
    K, N = {"up_fwd": (d, n), "down_fwd": (h, d), "down_bwd": (d, h), "up_bwd": (n, d)}[name]
    a = torch.randn(case.slots, K, device="cuda", dtype=torch.bfloat16).mul_(100).to(E4M3)
    b = torch.randn(N, K, device="cuda", dtype=torch.bfloat16).mul_(100).to(E4M3)
    scales = torch.rand(case.slots, 1, device="cuda"), torch.rand(1, N, device="cuda")
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def in_turn(calls: dict[str, Callable], window: float, rounds: int) -> dict[str, float]:
    """Median seconds of each call over the rounds but the first, in random order."""
    once = {name: measure.back_to_back_seconds(call, window, window) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            found[name].append(measure.back_to_back_seconds(calls[name], once[name], window))
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def precompile(names: list[str]) -> None:
    """The kernels of all cases, side by side."""
    found = {loader.Variant(source, ""): None for source in ("dispatch.cu", "aggregation.cu", "quantize.cu")}
    common = {"dtype": "bfloat16", "activation": "swiglu", "aligned": True, "tier": "sm90", "transposed": True}
    both, k_is_1 = (False, True), {cases.LAYERS[name].k == 1 for name in names}
    for fp8, saved, entry, pairs in itertools.product(both, both, PRODUCTS, both):
        for to_tokens in k_is_1 if entry in kernels.SUMMED else {False}:
            options = {"clusters": pairs and not to_tokens, "to_tokens": to_tokens, "fp8": fp8, "fp8_saved": saved}
            found[gemm_variants.gemm_variant(entry, **common, **options)] = None
            if entry == "down_bwd" and fp8:
                found[gemm_variants.gemm_variant(entry, **common, **options, fp8_wgrad=True)] = None
    found |= {wgrad.product_variant(entry, True, "bfloat16", False): None for entry in kernels.WGRADS}
    found[loader.Variant("routed_fp8.cu", "")] = None
    for entry, split_k in itertools.product(kernels.WGRADS, both):
        found[gemm_variants.gemm_variant(entry, **common, split_k=split_k)] = None
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(loader.precompile, found))


def run(name: str, parts: Sequence[str], window: float, rounds: int, order: str) -> list[dict]:
    """The rows of one case. Raises RuntimeError where a result is wrong: there is no time for it."""
    made, rows = inputs.layer_inputs(cases.LAYERS[name], order), []
    for part in parts:
        start = time.perf_counter()
        rows += PARTS[part](name, made, window, rounds)
        measure.release()
        print(f"{name}: {part} {time.perf_counter() - start:.1f} s", flush=True)
    return rows


def product_rows(name: str, made: dict[str, torch.Tensor], window: float, rounds: int) -> list[dict]:
    """Each product in bf16 and e4m3, and a dense one of the same size."""
    case, rows = cases.LAYERS[name], []
    kernel = kernels.Kernels(case, made)
    checked = Checked(case, kernel)
    for entry in PRODUCTS:
        checked.calls[entry]()
        errors = checked.errors(entry)
        if not errors["sums"] <= TOLERANCE or not errors.get("others", 0) <= OTHERS:
            raise RuntimeError(f"bench.fp8: {name}: {entry}: expected errors of at most {TOLERANCE}, got {errors}")
        calls = {"bf16": kernel.calls[entry], "e4m3": checked.calls[entry], "_scaled_mm": dense(case, entry)}
        if entry in SUMS:
            calls["sums"] = kernel.calls[SUMS[entry]]
        about = {"case": name, "kernel": entry, "flops": kernels.gemm_work(case, entry).flops, "errors": errors}
        rows.append({**about, "seconds": in_turn(calls, window, rounds)})
    return rows


LAYERS = {  # how the layer is called, by name
    "bf16": {},
    "bf16, save fp8": {"save": "fp8"},
    "fp8": {"precision": "fp8"},
    "fp8, save fp8": {"precision": "fp8", "save": "fp8"},
    "fp8, quantises": {"precision": "fp8"},  # the weights in every call
    WGRAD: {"precision": "fp8", "fp8_wgrad": True},
}


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """By parts, as gradients of large weights in float32 have no room beside the layer."""
    squares = torch.zeros(2, dtype=torch.float64, device=got.device)
    for part, of in zip(got.chunk(16), want.chunk(16), strict=True):
        squares += torch.stack([(part.float() - of.float()).norm().double(), of.float().norm().double()]).square()
    return float((squares[0] / squares[1]).sqrt())


def layer_rows(name: str, made: dict[str, torch.Tensor], window: float, rounds: int) -> list[dict]:
    """Forward, and forward with backward, in each way; and how far fp8's results are from bf16's."""
    fp8_weights = mb.quantize_weights(made["w1"], made["w2"])
    arrays = [made[key] for key in ("x", "ids", "weights", "w1", "w2")]

    def options(kind: str) -> dict:
        ready = {"fp8_weights": fp8_weights} if kind.startswith("fp8") and kind != "fp8, quantises" else {}
        return {**LAYERS[kind], **ready}

    def forward(kind: str) -> Callable[[], object]:
        given = options(kind)
        return lambda: mb.moe_forward(*arrays, **given)

    def both(kind: str) -> Callable[[], dict]:
        given = options(kind)

        def call() -> dict:
            out, saved = mb.moe_forward(*arrays, **given)
            return {"out": out, **vars(mb.moe_backward(made["grad_out"], saved))}

        return call

    exact = both("bf16")()
    errors = {}
    for kind in ("bf16, save fp8", "fp8", WGRAD):
        for key, value in both(kind)().items():
            if value is not None:
                errors[f"{kind}: {key}"] = relative_difference(value, exact[key])
    exact = value = None
    makers = partial(torchs, name, made), *(partial(torchaos, name, made, recipe) for recipe in RECIPES)
    running, errors_of_peers = check_peers(name, dict(zip(PEERS, makers, strict=True)), mb.moe_forward(*arrays)[0])
    passes = {"forward": forward, "forward + backward": both}
    rows = []
    for title, make in passes.items():
        calls = {kind: make(kind) for kind in LAYERS if kind != WGRAD or make is both}
        seconds = in_turn(calls | {peer: of[title] for peer, of in running.items() if title in of}, window, rounds)
        found = errors if title != "forward" else errors_of_peers
        rows.append({"case": name, "kernel": title, "errors": found, "seconds": seconds})
    return rows


def quantize_rows(name: str, made: dict[str, torch.Tensor], window: float, rounds: int) -> list[dict]:
    """What makes x and the weights e4m3, beside a copy. Raises RuntimeError where rows are not those of `quantised`."""
    of_x, out, scales = fp8_quantize.of_rows(made["x"])
    of_x.call()
    numbers, expected = quantised(made["x"], (1,))
    others = float((out != numbers.view(torch.uint8)).float().mean())
    if others > OTHERS or not torch.allclose(scales, expected.flatten(), rtol=1e-6, atol=0):
        raise RuntimeError(f"bench.fp8: {name}: quantize_rows: expected torch's e4m3 and scales, got {others} others")
    del numbers, expected
    rows = []
    for kernel, found in zip(
        fp8_quantize.KERNELS, (of_x, fp8_quantize.of_weights(made["w1"], made["w2"])), strict=True
    ):
        copy, times = fp8_quantize.copy_of(found.nbytes, made["x"].device)
        seconds = in_turn({"e4m3": measure.in_graph([found.call] * IN_GRAPH), "copy": copy}, window, rounds)
        seconds["e4m3"] /= IN_GRAPH
        seconds["copy"] *= times
        rows.append({"case": name, "kernel": kernel, "bytes": found.nbytes, "errors": {}, "seconds": seconds})
    return rows


PARTS = {"products": product_rows, "layers": layer_rows, "quantize": quantize_rows}


def torchs(name: str, made: dict) -> dict[str, Callable]:
    """torch's own forward, by pass; torch has no gradient of its product."""
    if not fp8_torch.available():
        raise RuntimeError("this torch has no _scaled_grouped_mm")
    return {"forward": fp8_torch.forward(cases.LAYERS[name], made)}


def torchaos(name: str, made: dict, recipe: str) -> dict[str, Callable]:
    """The layer by torchao's products, by pass."""
    layer = fp8_torchao.TorchAO(cases.LAYERS[name], made, *fp8_torchao.product_of(recipe))
    layer.forward_backward()
    return {"forward": layer.forward, "forward + backward": layer.forward_backward}


def check_peers(
    name: str, peers: dict[str, Callable[[], dict[str, Callable]]], want: torch.Tensor
) -> tuple[dict[str, dict[str, Callable]], dict[str, float]]:
    """Those that run, of what makes each peer's calls, and how far each result is from bf16's. Others leave a note."""
    running, errors = {}, {}
    for peer, make in peers.items():
        try:
            calls = make()
            error = relative_difference(calls["forward"]().detach(), want)
        except Exception as problem:  # whatever another package raises, torch.compile included
            print(f"{name}: {peer} does not run: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        if error <= PEER_TOLERANCE:
            running[peer], errors[f"{peer}: out"] = calls, error
        else:
            print(f"{name}: {peer}: expected an error of at most {PEER_TOLERANCE}, got {error}: left out", flush=True)
    return running, errors


def text(rows: list[dict]) -> list[str]:
    """Of products: times, ratio, TFLOP/s of each way, relative errors. Of layers: ms, and bf16's over each way's.

    Of what makes e4m3: times, bytes per second, and a copy's time over it.
    """
    lines = [["case", "kernel", "bf16 us", "e4m3 us", "bf16 / e4m3", "TFLOP/s", "dense", "sums us", "error"]]
    kinds = [*list(LAYERS)[1:], *(peer for peer in PEERS if any(peer in row["seconds"] for row in rows))]
    layers = [["case", "pass", "bf16 ms", *(f"bf16 / {kind}" for kind in kinds)]]
    copies = [["case", "kernel", "us", "TB/s", "copy / e4m3"]]
    errors = []
    for row in rows:
        seconds = row["seconds"]
        if "bytes" in row:
            us, rate = seconds["e4m3"] * 1e6, row["bytes"] / seconds["e4m3"] / 1e12
            ratio = f"{seconds['copy'] / seconds['e4m3']:.2f}"
            copies.append([row["case"], row["kernel"], table.number(us, 4), table.number(rate), ratio])
            continue
        if "flops" not in row:
            ratios = (f"{seconds['bf16'] / seconds[kind]:.2f}" if kind in seconds else "-" for kind in kinds)
            layers.append([row["case"], row["kernel"], table.number(seconds["bf16"] * 1e3, 4), *ratios])
            if row["errors"]:
                found = (f"{key} {error:.4f}" for key, error in row["errors"].items())
                errors.append(f"{row['case']}, from bf16: {', '.join(found)}")
            continue
        rates = [seconds[kind] and row["flops"] / seconds[kind] / 1e12 for kind in seconds if kind != "sums"]
        by_kind = dict(zip((kind for kind in seconds if kind != "sums"), rates, strict=True))
        lines.append(
            [
                *(row["case"], row["kernel"]),
                *(table.number(seconds[kind] * 1e6, 4) for kind in ("bf16", "e4m3")),
                f"{seconds['bf16'] / seconds['e4m3']:.2f}",
                *(table.number(by_kind.get(kind), 4) for kind in ("e4m3", "_scaled_mm")),
                table.number(seconds["sums"] * 1e6 if "sums" in seconds else None, 4),
                " ".join(f"{error:.1e}" for error in row["errors"].values()),
            ]
        )
    tables = (part for part in (lines, layers, copies) if len(part) > 1)
    return [*(line for part in tables for line in table.aligned(part, 2)), *errors]


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fp8", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=CASES, help="cases or groups of bench/cases.py (%(default)s)")
    parser.add_argument("--window", type=float, default=0.05, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="of the rows (all)")
    parser.add_argument("--order", choices=("transposed", "row"), default="transposed", help="of bf16's weights")
    parser.add_argument("--commit", help="to write into the record where there is no git")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record of the rows")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    names = cases.select(args.case, CASES)
    start = time.perf_counter()
    precompile(names)
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    rows: list[dict] = []
    record = measure.record(args.commit, rows=rows)
    for name in names:
        rows += run(name, args.part, args.window, args.rounds, args.order)
        if args.out:  # after each case, as a run may be cut
            measure.write_record(record, args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
