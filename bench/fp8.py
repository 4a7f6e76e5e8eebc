"""The e4m3 products of a layer, each checked against torch and then timed beside the bf16 product and torch._scaled_mm.

python -m bench.fp8 [--case CASES] [--variants CASES] [--window SECONDS] [--rounds N] --out FILE.json

All three are timed in turn, in windows of calls back to back, as the power limit lets the clock swing.
torch._scaled_mm has rows' scales and one dense product of the same size: no gather, no experts, no epilogue, no sums.
down_fwd and up_bwd include the sum over each token's slots in both of ours; "sums" is the time of these alone. With
--variants the e4m3 product is also timed in single CTAs and in pairs of CTAs, and down_fwd and up_bwd where the
consumer warpgroups multiply and promote in turn, the others where redux finds the amax of a row.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from bench import cases, inputs, kernels, measure, table, verify
from bench.fp8_products import PRODUCTS, Products, buffer_shapes
from moeblaze_cupy import launch_config, loader, runtime
from moeblaze_cupy.arrays import Torch

CASES = "readme,conf3,qwen30b,conf1,mixtral,olmoe,sonic7b,dsv3"
E4M3, LARGEST, GROUP = torch.float8_e4m3fn, 448.0, launch_config.GROUP_COLUMNS
# Of sums against float64: bf16's own rounding, and that of the tensor cores' sums, which keep 13 bits of a fraction.
TOLERANCE = 1.2e-2
# Of what a kernel quantises: elements that are another e4m3 than torch's of the same numbers in float32.
OTHERS = 5e-3
VARIANTS = {
    "single": ("uses_clusters", False),
    "pairs": ("uses_clusters", True),
    "in turn": ("PROMOTES_IN_TURN", True),  # of SUMS
    "redux": ("AMAX_BY_REDUX", True),  # of the others
}
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


@contextmanager
def deciding(name: str, answer: object) -> Iterator[None]:
    """With another constant of `launch_config`, or one of its rules that always answers so."""
    rule = callable(getattr(launch_config, name))
    with mock.patch.object(launch_config, name, (lambda *_: answer) if rule else answer):
        for forget in (runtime.forget, loader.gemm_variant.cache_clear):
            forget()
        yield
    for forget in (runtime.forget, loader.gemm_variant.cache_clear):
        forget()


class Checked:
    """The e4m3 products of one case with their buffers, and what torch makes of the same e4m3 numbers in float64."""

    def __init__(self, case: cases.LayerCase, kernel: kernels.Kernels):
        self.case, self.kernel = case, kernel
        self.arrays = a = operands(case, kernel.inputs)
        g = case.first_columns // case.h
        for name, (shape, dtype) in buffer_shapes(case.slots, case.L, case.d, case.h, g).items():
            a[name] = torch.empty(shape, device=a["x"].device, dtype=getattr(torch, dtype))
        self.g = g
        self.products = Products(Torch, kernel.limits, a, case.activation)
        self.calls = self.products.calls
        index = kernel.index
        self.offsets, self.tokens = index.expert_token_offsets.tolist(), index.expert_token_indices.long()
        self.busy = [e for e in range(case.E) if self.offsets[e] < self.offsets[e + 1]]

    def configured(self, name: str, answer: object) -> Products:
        """The products where `launch_config` says so."""
        with deciding(name, answer):
            return Products(Torch, self.kernel.limits, self.arrays, self.case.activation)

    def _rows(self, e: int) -> slice:
        return slice(self.offsets[e], self.offsets[e + 1])

    def _values(self, name: str, rows: slice, halves: int) -> torch.Tensor:
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

    def _inputs(self, name: str, scales: str, rows: slice) -> torch.Tensor:
        tokens = self.tokens[rows]
        return self.arrays[name].view(E4M3)[tokens].double() * self.arrays[scales][tokens, None]

    def errors(self, name: str) -> dict[str, float]:
        """Relative norms of the last call's sums; "others" is the part of e4m3 numbers that torch rounds otherwise."""
        if name in kernels.SUMMED:
            return {"sums": self._error_of_sums(name)}
        difference = norm = 0.0
        others = elements = 0
        for e in sorted({self.busy[0], self.busy[-1]}):
            rows = self._rows(e)
            if name == "up_fwd":
                got = self.arrays["first_layer"][rows]
                want = self._inputs("x", "x_scales", rows) @ self._weight("w1", e)
                key, float32 = "y", verify.activate(got.float(), self.case.activation)[0]
            else:
                got, want = self.arrays["first_layer_grad"][rows], self._expected_grad(e, rows)
                key, float32 = "dh", None
            difference += float((got.double() - want).square().sum())
            norm += float(want.square().sum())
            halves = 1 if key == "y" else self.g
            values = self._values(key, rows, halves)
            if float32 is None:  # the kernel rounds these to bf16 before it stores them: no bits to compare with
                exact = got.double()
                others += int(((values - exact).abs() > 0.07 * exact.abs() + 0.01 * values.abs().amax()).sum())
            else:
                groups = torch.nn.functional.pad(float32, (0, -float32.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
                q, _ = quantised(groups, (2,))
                own = self.arrays[key][rows]
                others += int((q.view(torch.uint8).flatten(1)[:, : own.shape[1]] != own).sum())
            elements += values.numel()
        return {"sums": (difference / norm) ** 0.5, "others": others / elements}

    def _weights_of(self, rows: slice) -> torch.Tensor:
        tokens = self.tokens[rows]
        places = self.kernel.index.token_index_map[tokens]
        numbers = torch.arange(rows.start, rows.stop, device=places.device)[:, None]
        return (self.arrays["weights"][tokens].double() * (places == numbers)).sum(1, keepdim=True)

    def _expected_grad(self, e: int, rows: slice) -> torch.Tensor:
        grad = self._inputs("grad_out", "grad_scales", rows) @ self._weight("w2", e).T * self._weights_of(rows)
        _, *slopes = verify.activate(self.arrays["first_layer"][rows].double(), self.case.activation)
        return torch.cat([grad * slope for slope in slopes], dim=1)

    def _error_of_sums(self, name: str) -> float:
        got = self.arrays["out" if name == "down_fwd" else "grad_x"]
        want = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
        for e in self.busy:
            rows = self._rows(e)
            if name == "down_fwd":
                part = self._values("y", rows, 1) @ self._weight("w2", e) * self._weights_of(rows)
            else:
                part = self._values("dh", rows, self.g) @ self._weight("w1", e).T
            want.index_add_(0, self.tokens[rows], part)
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
    found = {}
    k_is_1 = {cases.LAYERS[name].k == 1 for name in names}
    common = {"dtype": "bfloat16", "activation": "swiglu", "aligned": True, "tier": "sm90", "transposed": True}
    both = (False, True)
    for fp8, entry, pairs, turn, redux in itertools.product(both, PRODUCTS, both, both, both):
        for to_tokens in k_is_1 if entry in kernels.SUMMED else {False}:
            options = {"clusters": pairs and not to_tokens, "to_tokens": to_tokens, "fp8": fp8}
            with deciding("PROMOTES_IN_TURN", turn), deciding("AMAX_BY_REDUX", redux):
                found[loader.gemm_variant(entry, **common, **options)] = None
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(loader.precompile, found))


def run(names: list[str], varied: list[str], window: float, rounds: int, order: str) -> list[dict]:
    """A row for each case and product. Raises RuntimeError where a product is wrong: there is no time for it."""
    rows = []
    for name in names:
        start, case = time.perf_counter(), cases.LAYERS[name]
        kernel = kernels.Kernels(case, inputs.layer_inputs(case, order))
        checked = Checked(case, kernel)
        for entry in PRODUCTS:
            checked.calls[entry]()
            kernel.calls[entry]()
            errors = checked.errors(entry)
            if not errors["sums"] <= TOLERANCE or not errors.get("others", 0) <= OTHERS:
                raise RuntimeError(f"bench.fp8: {name}: {entry}: expected errors of at most {TOLERANCE}, got {errors}")
            calls = {"bf16": kernel.calls[entry], "e4m3": checked.calls[entry], "_scaled_mm": dense(case, entry)}
            if name in varied:
                kinds = [kind for kind in VARIANTS if kind != ("redux" if entry in SUMS else "in turn")]
                kept = [checked.configured(*VARIANTS[kind]) for kind in kinds]
                calls |= {kind: products.calls[entry] for kind, products in zip(kinds, kept, strict=True)}
            if entry in SUMS:
                calls["sums"] = kernel.calls[SUMS[entry]]
            seconds = in_turn(calls, window, rounds)
            flops = kernels.gemm_work(case, entry).flops
            rows.append({"case": name, "kernel": entry, "flops": flops, "errors": errors, "seconds": seconds})
            print("\n".join(text(rows[-1:])), flush=True)
            calls = kept = None
            measure.release()
        kernel = checked = None
        measure.release()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return rows


def text(rows: list[dict]) -> list[str]:
    head = ["case", "kernel", "bf16 us", "e4m3 us", "bf16 / e4m3", "TFLOP/s", "dense", *VARIANTS, "sums us", "error"]
    lines = []
    for row in rows:
        seconds, flops = row["seconds"], row["flops"]

        def tflops(kind: str, seconds: dict = seconds, flops: int = flops) -> str:
            return table.number(flops / seconds[kind] / 1e12 if kind in seconds else None, 4)

        lines.append(
            [
                *(row["case"], row["kernel"]),
                *(table.number(seconds[kind] * 1e6, 4) for kind in ("bf16", "e4m3")),
                f"{seconds['bf16'] / seconds['e4m3']:.2f}",
                *map(tflops, ("e4m3", "_scaled_mm", *VARIANTS)),
                table.number(seconds["sums"] * 1e6 if "sums" in seconds else None, 4),
                " ".join(f"{error:.1e}" for error in row["errors"].values()),
            ]
        )
    return table.aligned([head, *lines], 2)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fp8", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=CASES, help="cases or groups of bench/cases.py (%(default)s)")
    parser.add_argument("--variants", default="readme,conf3,qwen30b", help="cases to time more ways of (%(default)s)")
    parser.add_argument("--window", type=float, default=0.08, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--order", choices=("transposed", "row"), default="transposed", help="of bf16's weights")
    parser.add_argument("--out", metavar="FILE.json", help="a record of the rows")
    args = parser.parse_args(argv or None)
    names, varied = cases.select(args.case, CASES), cases.select(args.variants, CASES)
    precompile(names)
    rows = run(names, varied, args.window, args.rounds, args.order)
    if args.out:
        record = {"machine_info": measure.environment(), "commit_info": {"id": measure.commit()}, "rows": rows}
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
