"""Low-rank factors beside frozen experts: this layer beside W + BA and beside other libraries' layers.

python -m bench.lora_peers --out FILE.json [--case qwen30b_4k,mixtral_16k] [--way NAMES] [--note TEXT] [--tiny]

All factors are in bf16, and every way goes through torch's autograd: gradients of x, of the router weights and of the
factors. The output and every gradient are compared with float64 before a way is timed. A way whose package is missing
or whose result is wrong gets no time: its row says why. Windows of calls back to back follow one another in random
order. The peak is that of torch's allocator in forward and backward, with the results.

The split way adds (x a^T) b^T to x w, each by torch's grouped_mm on rows sorted by expert. unsloth
does the same in its own function, here with the weights kept for backward. axolotl has Triton kernels for both products
at once. Its tuner tries up to 108 configurations of each product in the first call, which takes minutes.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

import moeblaze_cupy as mb
from bench import cases, fp8, inputs, lora, measure, providers, table, verify
from bench.bench_experts import FORMULAS, GPT_OSS, Kind, with_biases
from bench.layer import Layer
from moeblaze_cupy.types import FACTORS

WINDOW = 0.06
ROUNDS = 3
TOKENS = 4096, 16384, 1024, 32768  # in the order of a run, which may be cut
_LAYERS = cases.GPT_OSS_20B, cases.LAYERS["qwen30b"], cases.LAYERS["olmoe"], cases.LAYERS["mixtral"]
CASES = {
    case.name: case
    for case in (
        replace(layer, name=f"{layer.name}_{tokens // 1024}k", L=tokens) for tokens in TOKENS for layer in _LAYERS
    )
}
PASSES = "forward", "forward_backward"
UNSLOTH = "unsloth_zoo.temporary_patches.moe_utils"
AXOLOTL = "axolotl.integrations.kernels.libs.scattermoe_lora"


class _Frozen(Layer):
    """This layer, without factors where there are none."""

    def __init__(self, made: dict[str, Any], kind: Kind, factors: mb.Lora | None):
        super().__init__(made, [made["x"], made["weights"], *(factors.factors if factors else ())])
        self.kind, self.scales = kind, factors.scales if factors else ()
        self.names = ("x", "weights", *(f"lora.{name}" for name in FACTORS if factors))

    def moe(self, w1: torch.Tensor, w2: torch.Tensor, factors: mb.Lora | None) -> torch.Tensor:
        from moeblaze_cupy.interop.torch import moe

        made, (x, weights, *_) = self.inputs, self.leaves
        options = {"activation": self.kind.activation, "gate_up": self.kind.gate_up, "lora": factors}
        return moe(x, made["ids"], weights, w1, w2, b1=made.get("b1"), b2=made.get("b2"), **options)

    def forward(self) -> torch.Tensor:
        factors = mb.Lora(*self.leaves[2:], *self.scales) if self.scales else None
        return self.moe(self.inputs["w1"], self.inputs["w2"], factors)


class _InMemory(_Frozen):
    """W + BA by torch in every forward, then this layer on it."""

    def forward(self) -> torch.Tensor:
        a1, b1, a2, b2 = self.leaves[2:]
        pairs = ((self.inputs["w1"], a1, b1), (self.inputs["w2"], a2, b2))
        return self.moe(*(_sum(*pair, scale) for pair, scale in zip(pairs, self.scales, strict=True)), None)


def _sum(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """In w's memory order."""
    if w.stride(1) == 1:
        return torch.baddbmm(w.mT, b, a, alpha=scale).mT
    return torch.baddbmm(w, a.mT, b.mT, alpha=scale)


class _Split(Layer):
    """Both pairs of factors by grouped_mm beside the frozen product. They lie as grouped_mm reads them."""

    names = "x", "weights", *(f"lora.{name}" for name in FACTORS)

    def __init__(self, made: dict[str, Any], kind: Kind, factors: mb.Lora):
        as_read = (factor.mT.contiguous() for factor in factors.factors)
        super().__init__(made, [made["x"], made["weights"], *as_read])
        self.kind, self.scales = kind, factors.scales

    def forward(self) -> torch.Tensor:
        made, (x, weights, a1, b1, a2, b2) = self.inputs, self.leaves
        ids = made["ids"]
        experts, order = torch.sort(ids.reshape(-1), stable=True)
        every = torch.arange(1, len(made["w2"]) + 1, device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(experts, every, out_int32=True)
        experts = experts.long()

        def both(rows: torch.Tensor, number: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            low = providers.grouped_mm(providers.grouped_mm(rows, a, ends), b, ends)
            out = providers.grouped_mm(rows, made[f"w{number}"], ends).add(low, alpha=self.scales[number - 1])
            return out + made[f"b{number}"][experts] if f"b{number}" in made else out

        first = both(x[order // ids.shape[1]], 1, a1, b1)
        halves = (first[:, 0::2], first[:, 1::2]) if self.kind.gate_up == "interleaved" else first.chunk(2, dim=1)
        rows = both(FORMULAS[self.kind.activation](*halves), 2, a2, b2)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        slots = rows[back].view(*ids.shape, -1)
        return (slots * weights[:, :, None].to(slots.dtype)).sum(1)

    def named(self, gradients: tuple) -> dict[str, torch.Tensor]:
        dx, dweights, *factors = gradients
        return dict(zip(self.names, (dx, dweights, *(factor.mT for factor in factors)), strict=True))


class _Peer(Layer):
    """A library's function over a module of experts, whose factors are parameters as peft has them.

    An a has (E*r, columns) there, a b (columns, r*E) with the expert last, or first with `expert_first`.
    """

    names = _Split.names
    expert_first = False

    def __init__(self, made: dict[str, Any], kind: Kind, factors: mb.Lora):
        a1, b1, a2, b2 = factors.factors
        parameters = (a1.flatten(0, 1), self._b_to_peft(b1), a2.flatten(0, 1), self._b_to_peft(b2))
        super().__init__(made, [made["x"], made["weights"], *parameters])
        self.kind, self.scales = kind, factors.scales
        self.E, self.r = a1.shape[:2]
        self.ids = made["ids"].long()
        # transformers has (E, 2h, d) and (E, d, h), or the other way round for gpt-oss, with biases
        oss = kind is GPT_OSS
        self.module = type("GptOssExperts" if oss else "Experts", (SimpleNamespace,), {})(
            num_experts=self.E,
            gate_up_proj=made["w1"] if oss else made["w1"].mT,
            down_proj=made["w2"] if oss else made["w2"].mT,
            act_fn=F.silu,
            is_transposed=oss,
            is_concatenated=not oss,
            has_bias=oss,
            has_gate=True,
            **(
                {"gate_up_proj_bias": made["b1"], "down_proj_bias": made["b2"], "alpha": 1.702, "limit": 7.0}
                if oss
                else {}
            ),
        )

    def _b_to_peft(self, b: torch.Tensor) -> torch.Tensor:
        return b.permute(1, 0, 2).flatten(1) if self.expert_first else b.permute(1, 2, 0).flatten(1)

    def _b_of_peft(self, b: torch.Tensor) -> torch.Tensor:
        if self.expert_first:
            return b.unflatten(1, (self.E, self.r)).permute(1, 0, 2)
        return b.unflatten(1, (self.r, self.E)).permute(2, 0, 1)

    def named(self, gradients: tuple) -> dict[str, torch.Tensor]:
        dx, dweights, a1, b1, a2, b2 = gradients
        a1, a2 = (a.unflatten(0, (self.E, self.r)) for a in (a1, a2))
        return dict(zip(self.names, (dx, dweights, a1, self._b_of_peft(b1), a2, self._b_of_peft(b2)), strict=True))


class _Unsloth(_Peer):
    """forward_native_grouped_mm, with the factors laid out in every forward, as its wrapper of peft's module does."""

    expert_first = True

    def forward(self) -> torch.Tensor:
        library = importlib.import_module(UNSLOTH)
        x, weights, a1, b1, a2, b2 = self.leaves
        for name, a, b, scale in zip(("gate_up", "down"), (a1, a2), (b1, b2), self.scales, strict=True):
            lies = library.extract_moe_lora_weights_for_grouped_mm(
                None, a, b, scale, self.E, input_dim=a.shape[1], output_dim=b.shape[0]
            )
            setattr(self.module, f"_unsloth_lora_{name}_proj", lies)
        return library.forward_native_grouped_mm(self.module, x, self.ids, weights.to(x.dtype))


class _Axolotl(_Peer):
    """scattermoe_experts_forward, with the factors laid out in every forward, as its patch of peft does."""

    def forward(self) -> torch.Tensor:
        laid_out = importlib.import_module(f"{AXOLOTL}.layers").peft_lora_to_scattermoe
        x, weights, a1, b1, a2, b2 = self.leaves
        pairs = zip(("gate_up_proj", "down_proj"), (a1, a2), (b1, b2), self.scales, strict=True)
        factors = {name: (*laid_out(a, b, self.E, self.r), scale) for name, a, b, scale in pairs}
        self.module._scattermoe_lora = factors
        return importlib.import_module(f"{AXOLOTL}.experts").scattermoe_experts_forward(
            self.module, x, self.ids, weights
        )


@dataclass(frozen=True)
class Way:
    """rank: of both pairs of factors, None without any. `module` must be importable; `install` says how.

    environment: set before that import, unless it is set.
    """

    build: Callable[..., Layer]
    rank: int | None
    module: str | None = None
    install: str = ""
    environment: tuple[tuple[str, str], ...] = ()


LIBRARIES: dict[str, tuple[Any, ...]] = {
    "grouped_mm, split": (_Split,),
    # keeps the frozen weights for backward, where the default copies them; no files in the working folder
    "unsloth": (
        _Unsloth,
        UNSLOTH,
        "pip install unsloth_zoo",
        (("UNSLOTH_MOE_RECOMPUTE", "0"), ("UNSLOTH_COMPILE_LOCATION", os.devnull)),
    ),
    "axolotl": (_Axolotl, AXOLOTL, "pip install axolotl"),
}
WAYS = {lora.FROZEN: Way(_Frozen, None), "r = 16": Way(_Frozen, 16), "r = 64": Way(_Frozen, 64)}
WAYS |= {"W + BA, r = 16": Way(_InMemory, 16)}
WAYS |= {f"{name}, r = {r}": Way(build, r, *rest) for name, (build, *rest) in LIBRARIES.items() for r in (16, 64)}


def checked(way: Way, made: dict[str, Any], kind: Kind, exact: dict[str, torch.Tensor], factors) -> tuple[Layer, dict]:
    """The layer and its errors. Raises AssertionError for a wrong result, whatever a peer raises otherwise."""
    for variable, value in way.environment:
        os.environ.setdefault(variable, value)
    if way.module:
        try:
            importlib.import_module(way.module)
        except ImportError as error:
            raise ImportError(f"{way.install} ({error})") from error
    layer = way.build(made, kind, factors)
    got = {"out": layer.forward().detach(), **layer.named(layer.forward_backward())}
    errors = lora.differences(got, exact)
    wrong = verify.problems(errors, made["x"].dtype)
    assert wrong is None, wrong
    return layer, errors


def measured(case: cases.LayerCase, names: list[str], window: float = WINDOW, rounds: int = ROUNDS) -> list[dict]:
    """A row of each way and pass, or one with the problem of a way."""
    kind = lora.kind_of(case)
    order = "row" if kind is GPT_OSS else "transposed"
    made = inputs.layer_inputs(case, order)
    made = with_biases(made) if kind.bias else made
    rows, calls = [], {}
    by_rank: dict[int | None, tuple] = {}
    for name in names:
        way = WAYS[name]
        about = {"case": case.name, "shape": case.shape, "activation": kind.activation, "order": order, "way": name}
        if way.rank not in by_rank:
            factors = lora.factors_of(case, lora.Way(way.rank, made["x"].dtype))
            by_rank[way.rank] = factors, lora.exact_of(made, kind, factors)
        factors, exact = by_rank[way.rank]
        try:
            layer, errors = checked(way, made, kind, exact, factors)
        except Exception as error:  # an incompatible peer fails in any way
            traceback.print_exc()
            rows.append({**about, "problem": f"{type(error).__name__}: {str(error)[:300]}"})
            print(f"{name} on {case.name} gets no time: {rows[-1]['problem']}", file=sys.stderr, flush=True)
            continue
        peak = lora.peak_with_results(layer.forward_backward)
        for what in PASSES:
            calls[name, what] = getattr(layer, what)
            rows.append({**about, "pass": what, "errors": errors, "peak_mib": peak})
    by_rank.clear()
    seconds = fp8.in_turn(calls, window, rounds)
    for row in rows:
        if "pass" in row:
            own, base = (seconds.get((way, row["pass"])) for way in (row["way"], lora.FROZEN))
            row |= {"ms": own * 1e3} | ({"of_frozen": own / base} if base else {})
    return rows


def text(rows: list[dict]) -> list[str]:
    """Lines of a table: a way in each."""
    lines = [["case", "way", "forward, ms", "of frozen", "with backward, ms", "of frozen", "peak MiB"]]
    found = {(row["case"], row["way"], row.get("pass")): row for row in rows}
    for case, way in dict.fromkeys((row["case"], row["way"]) for row in rows):
        both = [found.get((case, way, what)) for what in PASSES]
        if None in both:
            lines.append([case, way, *["-"] * 5])
            continue
        times = [cell for row in both for cell in (table.number(row["ms"], 4), f"{row.get('of_frozen', 0):.3f}")]
        lines.append([case, way, *times, table.number(both[1]["peak_mib"])])
    return table.aligned(lines, 2)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lora_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--case", metavar="CASES", help=f"({','.join(CASES)})")
    parser.add_argument("--way", metavar="WAYS", help=f"separated by semicolons ({';'.join(WAYS)})")
    parser.add_argument("--note", help="kept in the record: versions of peers, what was limited")
    parser.add_argument("--tiny", action="store_true", help="one small layer, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    names = inputs.chosen(parser, "--case", args.case, CASES)
    ways = inputs.chosen(parser, "--way", args.way, WAYS, separator=";")
    if not args.tiny:
        inputs.expect_gpu(parser)
    rows: list[dict] = []
    record = measure.record(**({"note": args.note} if args.note else {}), rows=rows)
    tiny = replace(cases.TINY, h=32)  # grouped_mm takes rows of multiples of 16 bytes
    for case in [tiny] if args.tiny else [CASES[name] for name in names]:
        rows += measured(case, ways)
        measure.release()
        if args.out:  # after each case, as a run may be cut
            measure.write_record(record, args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
