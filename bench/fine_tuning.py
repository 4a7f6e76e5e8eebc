"""Low-rank factors beside frozen experts, trained on other text by several ways: whether their losses are the same.

python -m bench.fine_tuning --out FILE.json [--arm eager,fused] [--seed 0,1,2] [--size small]

The model of examples/language_model.py is trained on Python sources, once for all arms. Then its weights are frozen,
and factors of all experts are trained on C and C++ headers. Arms of one seed begin with the same factors and see the
same batches. "eager" runs expert by expert in torch, with the factors' products beside the weights'. "W + BA" makes
these weights in bfloat16 in every step, and trains through them. "fused" hands the factors to the layer, whose frozen
experts are in bfloat16, or packed as the arm says. Weights and activations are in bfloat16, factors in float32.
"""

import argparse
import copy
import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import moeblaze_cupy as mb
from bench import inputs, measure, table
from bench.language_model_report import EAGER, TUNED_HEAD, tuned_rows
from examples import corpus
from examples import language_model as lm
from moeblaze_cupy.interop.torch import moe, route
from moeblaze_cupy.types import FACTORS

IN_MEMORY, FUSED = "W + BA", "fused"
PACKED = {f"{FUSED}, {name}": name for name in ("nf4", "mxfp4")}
ARMS = (EAGER, IN_MEMORY, FUSED, *PACKED)
RANK, SCALE = 16, 2.0
BASE_TEXT, OTHER_TEXT = (".py", ".pyi"), (".h", ".hpp", ".cuh")
TEXT_BYTES = 16 << 20  # of each
BASES = {"small": replace(lm.SIZES["small"], steps=600), "toy": replace(lm.SIZES["toy"], h=32)}
SIZES = {
    "small": (BASES["small"], replace(BASES["small"], steps=300, lr=3e-3, evaluate_every=50)),
    "toy": (BASES["toy"], replace(BASES["toy"], steps=20, evaluate_every=10)),
}  # settings of the base's training, and of the runs with factors


class Adapted(lm.Experts):
    """Frozen experts of a trained model, and factors of both weights. The factors `b` begin at zero."""

    def __init__(self, trained: lm.Experts, arm: str, generator: torch.Generator):
        torch.nn.Module.__init__(self)
        self.k, self.arm, self.balance = trained.k, arm, None
        self.router = trained.router
        self.w1, self.w2 = trained.w1.detach().transpose(1, 2), trained.w2.detach().transpose(1, 2)
        (E, d, n), h = self.w1.shape, self.w2.shape[1]
        shapes = (E, RANK, d), (E, n, RANK), (E, RANK, h), (E, d, RANK)
        for name, shape in zip(FACTORS, shapes, strict=True):
            factor = torch.zeros(shape)
            if name.startswith("a"):
                factor.normal_(std=shape[-1] ** -0.5, generator=generator)
            setattr(self, name, torch.nn.Parameter(factor.to(self.router.device)))
        if arm in PACKED:
            self.w1, self.w2 = mb.quantize_experts(self.w1, self.w2, PACKED[arm])

    def mixed(self, tokens, logits):
        factors = [getattr(self, name) for name in FACTORS]
        if self.arm == EAGER:
            weights, ids = lm.chosen(logits, self.k)
            return in_turn(tokens, ids, weights, self.w1, self.w2, factors), ids
        weights, ids = route(logits, self.k)
        if self.arm == IN_MEMORY:
            a1, b1, a2, b2 = (factor.to(tokens.dtype) for factor in factors)
            w1, w2 = (w + SCALE * (b @ a).mT for w, a, b in ((self.w1, a1, b1), (self.w2, a2, b2)))
            return moe(tokens, ids, weights, w1, w2), ids
        return moe(tokens, ids, weights, self.w1, self.w2, lora=mb.Lora(*factors, SCALE, SCALE)), ids


def in_turn(x, ids, weights, w1, w2, factors):
    """(L, d) by a loop over the experts in torch alone, in x's dtype."""
    a1, b1, a2, b2 = (factor.to(x.dtype) for factor in factors)
    flat = ids.reshape(-1)
    out = torch.zeros_like(x)
    for e, slots in enumerate(flat.argsort(stable=True).split(flat.bincount(minlength=len(w1)).tolist())):
        tokens = slots // ids.shape[1]
        rows = x[tokens]
        y = lm.activate(rows @ w1[e] + SCALE * (rows @ a1[e].T @ b1[e].T))
        rows = y @ w2[e] + SCALE * (y @ a2[e].T @ b2[e].T)
        out = out.index_add(0, tokens, (rows * weights.reshape(-1)[slots, None]).to(x.dtype))
    return out


def texts(folders: list[Path]) -> dict[str, corpus.Corpus]:
    """Raises ValueError where there is none of a kind."""
    return {
        name: corpus.load(folders, TEXT_BYTES, suffixes)
        for name, suffixes in (("base", BASE_TEXT), ("other", OTHER_TEXT))
    }


def base_model(s: lm.Settings, data: corpus.Corpus) -> tuple[lm.Model, float]:
    """Trained in bfloat16, with float32 main weights, and frozen; and its held-out loss."""
    model = lm.Model(s, "minimal", seed=0).to(inputs.device())
    weights, training = lm.MainWeights(model, torch.bfloat16), data.training.to(inputs.device())
    for step in range(s.steps):
        nats, balance = model.loss(lm.batch(training, 0, step, s))
        (nats + lm.BALANCE * balance).backward()
        weights.step(lm.learning_rate(step, s))
    return model.requires_grad_(False), lm.held_out_loss(model, data.held_out.to(inputs.device()), s)


def adapted(base: lm.Model, arm: str, seed: int) -> lm.Model:
    """A copy of the model whose only parameters with gradients are the factors, which depend on the seed alone."""
    model, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    for block in model.blocks:
        block.experts = Adapted(block.experts, arm, generator)
    return model


def fine_tuned(base: lm.Model, arm: str, seed: int, s: lm.Settings, data: corpus.Corpus) -> dict[str, Any]:
    """Trains the factors. Returns held-out losses by step, from before the first on, and seconds."""
    device, model = inputs.device(), adapted(base, arm, seed)
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(factors, betas=lm.BETAS, weight_decay=0.0, fused=device == "cuda")
    training, held_out = data.training.to(device), data.held_out.to(device)
    start, history = time.perf_counter(), [{"step": 0, "held_out": lm.held_out_loss(model, held_out, s)}]
    for step in range(s.steps):
        nats, _ = model.loss(lm.batch(training, seed, step, s))
        nats.backward()
        torch.nn.utils.clip_grad_norm_(factors, lm.CLIP)
        adam.param_groups[0]["lr"] = lm.learning_rate(step, s)
        adam.step()
        adam.zero_grad()
        if (step + 1) % s.evaluate_every == 0 or step + 1 == s.steps:
            history.append({"step": step + 1, "held_out": lm.held_out_loss(model, held_out, s)})
    mb.release_scratch()
    seconds = time.perf_counter() - start
    return {"arm": arm, "seed": seed, "history": history, "held_out_loss": history[-1]["held_out"], "seconds": seconds}


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fine_tuning", description=__doc__.splitlines()[0])
    parser.add_argument("--arm", type=lm.choices(ARMS), default=list(ARMS), metavar="A,B", help=" | ".join(ARMS))
    parser.add_argument("--seed", type=lm.choices((), int), default=[0, 1, 2], metavar="0,1")
    parser.add_argument("--size", choices=SIZES, default="small" if inputs.has_gpu() else "toy", help="(%(default)s)")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    torch.set_float32_matmul_precision("highest")  # no TF32
    of_base, s = SIZES[args.size]
    data = texts(args.text or corpus.default_folders())
    start = time.perf_counter()
    base, loss = base_model(of_base, data["base"])
    print(f"base: held-out loss {loss:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
    runs: list[dict] = []
    record = measure.record(
        settings=asdict(s),
        rank=RANK,
        scale=SCALE,
        base={"settings": asdict(of_base), "text": data["base"].about, "held_out_loss": loss},
        text=data["other"].about,
        runs=runs,
    )
    for seed, arm in itertools.product(args.seed, args.arm):
        runs.append(run := fine_tuned(base, arm, seed, s, data["other"]))
        print(f"{arm}, seed {seed}: held-out loss {run['held_out_loss']:.4f}, {run['seconds']:.0f} s", flush=True)
        if args.out:  # after each run, as the rest may be cut
            measure.write_record(record, args.out)
    print("\n".join(table.aligned([TUNED_HEAD, *tuned_rows(record)])))


if __name__ == "__main__":
    main()
