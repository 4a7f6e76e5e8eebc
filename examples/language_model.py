"""A decoder-only language model on bytes with MoE layers in every block, trained in torch with one kind of experts.

python examples/language_model.py --arm minimal,grouped_mm --seed 0,1,2 --out runs     train; the same again resumes
python examples/plot_losses.py runs                                                    the losses, a band per arm

The sizes "base" and "small" are for a GPU. On a CPU the size is "toy", which takes seconds, unless `--size` says more.

Arms see the same initial weights and the same batches of a seed. `fp32` is the reference: float32 throughout, TF32 off,
experts in turn. The others have bfloat16 weights and activations: `grouped_mm` torch's grouped products, `minimal` and
`recompute` this package's layer under that save policy, `save_fp8` under save="fp8", `fp8` with products in e4m3, whose
weights are quantised in each step, `fp8_wgrad` with weight gradients in e4m3, too. `rounded` trains by token rounding,
which gives each expert whole tiles of tokens, and is evaluated by the plain choice. Every arm's optimizer has float32
main weights.

Letters: B sequences of T bytes per step, L = B*T tokens, d model width, E experts of hidden width h, k per token.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

import moeblaze_cupy as mb
from examples import corpus as text
from examples.progress import Progress
from moeblaze_cupy.interop.torch import moe, route
from moeblaze_cupy.tools.command import integer

OURS = {
    "minimal": {"save": "minimal"},
    "recompute": {"save": "recompute"},
    "save_fp8": {"save": "fp8"},
    "fp8": {"save": "minimal", "precision": "fp8"},
    "fp8_wgrad": {"save": "minimal", "precision": "fp8", "fp8_wgrad": True},
    "rounded": {"save": "minimal"},
}  # the options of this package's layer by arm
ARMS = ("fp32", "grouped_mm", *OURS)
TILE = 128  # tokens, of the arm "rounded"
VOCABULARY = 256
BALANCE = 0.01  # weight of the load-balancing loss
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WARMUP_SHARE, LAST_SHARE = 0.05, 0.1  # of the steps; of the peak learning rate
TEXT_BYTES = 64 << 20
CHECKPOINT_SECONDS = 120.0  # at least so long between two, which are three times the float32 weights


@dataclass(frozen=True)
class Settings:
    """What a run is of. A checkpoint of other settings is not resumed."""

    layers: int = 8
    d: int = 768
    heads: int = 12
    E: int = 32
    h: int = 256
    k: int = 4
    B: int = 32
    T: int = 1024
    steps: int = 2000
    lr: float = 1e-3
    held_out_windows: int = 256
    evaluate_every: int = 100


SIZES = {
    "base": Settings(),  # 172 million parameters
    "small": Settings(layers=4, d=384, heads=6, E=16, h=192, B=32, T=512, steps=1500),
    "toy": Settings(2, 32, 2, E=4, h=64, k=2, B=8, T=32, steps=40, lr=1e-2, held_out_windows=8, evaluate_every=10),
}


def activate(first):
    gate, up = first.chunk(2, dim=-1)
    return F.silu(gate) * up


def chosen(logits, k):
    """Weights and experts (L, k) by torch: the k largest logits, their softmax over their sum."""
    weights, ids = logits.softmax(1).topk(k, dim=1)
    return weights / weights.sum(1, keepdim=True), ids


def rounded(logits, weights, ids):
    """token_offsets, ids and weights by token rounding of a choice (L, k). Added pairs weigh their probability."""
    scores = logits.softmax(1).scatter(1, ids.long(), weights)
    token_offsets, ids = mb.round_tokens(scores, ids, tile=TILE)
    weights, ids = route(scores, score="identity", ids=ids, token_offsets=token_offsets, renormalize=False)
    return token_offsets, ids, weights


def experts_in_turn(x, ids, weights, w1, w2):
    """(L, d) by a loop over the experts, in the inputs' dtype."""
    flat = ids.reshape(-1)
    counts = flat.bincount(minlength=len(w1)).tolist()
    out = torch.zeros_like(x)
    for expert, slots in enumerate(flat.argsort(stable=True).split(counts)):
        tokens = slots // ids.shape[1]
        rows = activate(x[tokens] @ w1[expert]) @ w2[expert]
        out = out.index_add(0, tokens, (rows * weights.reshape(-1)[slots, None]).to(x.dtype))
    return out


def experts_grouped(x, ids, weights, w1, w2):
    """(L, d) by torch's grouped products over a routed buffer; weighted and summed in float32."""
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    experts, order = ids.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(1, len(w1) + 1, device=x.device, dtype=ids.dtype), out_int32=True)
    rows = product(activate(product(x[order // ids.shape[1]], w1, offs=ends)), w2, offs=ends)
    rows = (rows * weights.reshape(-1)[order, None])[order.argsort()]
    return rows.view(*ids.shape, -1).sum(1).to(x.dtype)


class Experts(torch.nn.Module):
    """A router in float32 and its experts, stored as transformers stores them. Keeps the balance loss of a call."""

    def __init__(self, s: Settings, arm: str):
        super().__init__()
        self.k, self.arm = s.k, arm
        self.router = torch.nn.Parameter(torch.empty(s.E, s.d))
        self.w1 = torch.nn.Parameter(torch.empty(s.E, 2 * s.h, s.d))
        self.w2 = torch.nn.Parameter(torch.empty(s.E, s.d, s.h))
        self.balance = None

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        logits, E = F.linear(tokens.float(), self.router.float()), len(self.router)
        out, ids = self.mixed(tokens, logits)
        slots = ids.reshape(-1, 1) == torch.arange(E, device=x.device)  # bincount would wait for the GPU
        load = slots.sum(0) / ids.numel()
        self.balance = E * (load * logits.softmax(1).mean(0)).sum()
        return out.view_as(x)

    def mixed(self, tokens, logits):
        """The experts' weighted sum (L, d), and the experts (L, k) that the logits (L, E) choose."""
        w1, w2 = self.w1.transpose(1, 2), self.w2.transpose(1, 2)
        if self.arm in OURS:
            weights, ids = route(logits, self.k)
            if self.arm == "rounded" and self.training:  # a token's pairs depend on later tokens
                offsets, pairs, weights = rounded(logits, weights, ids)
                return moe(tokens, pairs, weights, w1, w2, token_offsets=offsets, **OURS[self.arm]), ids
            return moe(tokens, ids, weights, w1, w2, **OURS[self.arm]), ids
        weights, ids = chosen(logits, self.k)
        return (experts_in_turn if self.arm == "fp32" else experts_grouped)(tokens, ids, weights, w1, w2), ids


def rotate(x):
    """Rotary positions: x (B, heads, T, width), pairs of channels half a width apart turned by their position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000 ** -(
        torch.arange(half, device=x.device) / half
    )
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(torch.nn.Module):
    def __init__(self, s: Settings, arm: str):
        super().__init__()
        self.heads = s.heads
        self.before_attention, self.before_experts = torch.nn.RMSNorm(s.d), torch.nn.RMSNorm(s.d)
        self.qkv, self.projection = torch.nn.Linear(s.d, 3 * s.d, bias=False), torch.nn.Linear(s.d, s.d, bias=False)
        self.experts = Experts(s, arm)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(B, T, d))
        return x + self.experts(self.before_experts(x))


class Model(torch.nn.Module):
    """Initial weights depend on the seed alone, not on the arm."""

    def __init__(self, s: Settings, arm: str, seed: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, s.d)
        self.blocks = torch.nn.ModuleList(Block(s, arm) for _ in range(s.layers))
        self.last_norm = torch.nn.RMSNorm(s.d)
        self.head = torch.nn.Linear(s.d, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("projection.weight", "w2"))
                std = parameter.shape[-1] ** -0.5 * ((2 * s.layers) ** -0.5 if into_residual else 1)
                torch.nn.init.normal_(parameter, std=1.0 if name.startswith("embedding") else std, generator=generator)

    def forward(self, tokens):
        """tokens (B, T) -> logits (B, T, 256) float32."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last_norm(x)).float()

    def loss(self, windows):
        """Mean nats per byte of windows (B, T+1), and the mean balance loss of the layers."""
        logits = self(windows[:, :-1])
        nats = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        return nats, torch.stack([block.experts.balance for block in self.blocks]).mean()


class MainWeights:
    """AdamW on float32 copies, from which the model's weights are rounded after each step."""

    def __init__(self, model: Model, dtype: torch.dtype):
        names, weights = zip(*model.named_parameters(), strict=True)
        self.main = [weight.detach().clone() for weight in weights]
        model.to(dtype)
        self.working = [dict(model.named_parameters())[name] for name in names]
        groups = [[w for w in self.main if (w.dim() > 1) == decays] for decays in (True, False)]
        options = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (DECAY, 0), strict=True)]
        self.adam = torch.optim.AdamW(options, betas=BETAS, fused=self.main[0].is_cuda)

    def step(self, lr: float) -> None:
        for main, working in zip(self.main, self.working, strict=True):
            main.grad, working.grad = working.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.main, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.adam.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        torch._foreach_copy_(self.working, self.main)

    def state(self) -> dict:
        return {"main": self.main, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load(self, state: dict) -> None:
        torch._foreach_copy_(self.main, [w.to(self.main[0].device) for w in state["main"]])
        self.adam.load_state_dict(state["adam"])
        self._round()


def learning_rate(step: int, s: Settings) -> float:
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warmup = max(1, round(WARMUP_SHARE * s.steps))
    if step < warmup:
        return s.lr * (step + 1) / warmup
    cosine = (1 + math.cos(math.pi * (step - warmup) / max(1, s.steps - warmup))) / 2
    return s.lr * (LAST_SHARE + (1 - LAST_SHARE) * cosine)


def batch(data: torch.Tensor, seed: int, step: int, s: Settings) -> torch.Tensor:
    """Windows (B, T+1) of a step: a function of seed and step alone, so a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed * 10**9 + step)
    starts = torch.randint(len(data) - s.T, (s.B, 1), generator=generator)
    return data[(starts + torch.arange(s.T + 1)).to(data.device)].long()


def held_out_windows(data: torch.Tensor, s: Settings) -> list[torch.Tensor]:
    """Windows (B, T+1) spread evenly over the held-out text."""
    starts = torch.linspace(0, len(data) - s.T - 1, s.held_out_windows, dtype=torch.float64).long()[:, None]
    return [data[part.to(data.device)].long() for part in (starts + torch.arange(s.T + 1)).split(s.B)]


@torch.no_grad()
def held_out_loss(model: Model, data: torch.Tensor, s: Settings) -> float:
    """Nats per byte over the held-out windows."""
    model.eval()
    losses = [model.loss(windows)[0].double() * len(windows) for windows in held_out_windows(data, s)]
    model.train()
    return float(torch.stack(losses).sum() / s.held_out_windows)


def synchronize(device: str) -> float:
    """The time once the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def save(path: Path, contents, write) -> None:
    """Writes beside `path` first: a run that is cut leaves the last whole file."""
    unfinished = path.with_suffix(".tmp")
    write(contents, unfinished)
    os.replace(unfinished, path)


def train(arm: str, seed: int, s: Settings, data: text.Corpus, out: Path, deadline: float | None = None) -> dict | None:
    """Trains or resumes one run; returns its result, which is in OUT/ARM-SEED.json too, or None if the deadline (of
    time.monotonic) came first, with a checkpoint in OUT/ARM-SEED.pt. Raises ValueError for a checkpoint of another run.
    """
    path = out / f"{arm}-{seed}"
    about = {"arm": arm, "seed": seed, "settings": asdict(s), "text": data.about}
    if path.with_suffix(".json").is_file():
        result = json.loads(path.with_suffix(".json").read_text())
        if {name: result[name] for name in about} != about:
            raise ValueError(f"language_model: {path}.json: expected a result of these settings and text, got others")
        return result
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")  # no TF32
    model = Model(s, arm, seed).to(device)
    weights = MainWeights(model, torch.float32 if arm == "fp32" else torch.bfloat16)
    training, held_out = data.training.to(device), data.held_out.to(device)
    first, history, speeds, seconds = 0, [], [], []
    if path.with_suffix(".pt").is_file():
        kept = torch.load(path.with_suffix(".pt"), map_location="cpu", weights_only=True)
        if kept["about"] != about:
            raise ValueError(f"language_model: {path}.pt: expected a checkpoint of these settings and text, got others")
        weights.load(kept["weights"])
        first, history, speeds, seconds = (kept[name] for name in ("step", "history", "speeds", "seconds"))
    gc.collect()  # an earlier run's memory is no part of this one's peak
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model.loss(batch(training, seed, first, s))[0].backward()  # compiles the kernels, before the clock starts
    model.zero_grad()
    since, since_step, saved_at = synchronize(device), first, time.monotonic()
    progress = Progress(s.steps, f"{arm}, seed {seed}", done=first)
    for step in range(first, s.steps):
        nats, balance = model.loss(batch(training, seed, step, s))
        (nats + BALANCE * balance).backward()
        weights.step(learning_rate(step, s))
        done = step + 1
        progress.update(done, lambda nats=nats: f"loss {float(nats.detach()):.3f}")
        if done % s.evaluate_every and done < s.steps:
            continue
        passed = synchronize(device) - since
        speeds.append((done - since_step) * s.B * s.T / passed)
        seconds.append(passed + (seconds[-1] if seconds else 0.0))
        entry = {"step": done, "training": float(nats.detach()), "held_out": held_out_loss(model, held_out, s)}
        history.append(entry)
        is_late = deadline is not None and time.monotonic() > deadline
        if done < s.steps and (is_late or time.monotonic() - saved_at >= CHECKPOINT_SECONDS):
            kept = {"about": about, "step": done, "history": history, "speeds": speeds, "seconds": seconds}
            kept["weights"] = weights.state()
            save(path.with_suffix(".pt"), kept, torch.save)
            saved_at = time.monotonic()
            if is_late:
                return None
        since, since_step = synchronize(device), done
    result = {
        **about,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "parameters": sum(w.numel() for w in weights.main),
        "unigram_loss": data.unigram_loss(),
        "tokens_per_second": statistics.median(speeds[1:] or speeds),  # the first also warms up
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
        "history": history,
        "seconds": seconds,  # of training alone, up to each entry of the history
        "held_out_loss": history[-1]["held_out"],
    }
    save(path.with_suffix(".json"), json.dumps(result, indent=1) + "\n", lambda words, to: to.write_text(words))
    path.with_suffix(".pt").unlink(missing_ok=True)
    return result


def choices(allowed, kind=str):
    """An argparse type: a comma-separated list."""

    def parse(given: str) -> list:
        values = [kind(part) for part in given.split(",")]
        if allowed and (unknown := [value for value in values if value not in allowed]):
            raise argparse.ArgumentTypeError(f"expected names among {', '.join(allowed)}, got {unknown[0]}")
        return values

    return parse


def main(*argv: str) -> int:
    """0 if every run ended, 3 if the time was up before: the same command goes on."""
    parser = argparse.ArgumentParser(
        prog="python examples/language_model.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arm", type=choices(ARMS), default=list(ARMS), metavar="A,B", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seed", type=choices((), int), default=[0], metavar="0,1", help="(0)")
    parser.add_argument("--size", choices=SIZES, help="(base on a GPU, toy on a CPU)")
    parser.add_argument("--steps", type=integer(1), help="instead of the size's")
    parser.add_argument("--batch", type=integer(1), metavar="B", help="sequences per step, instead of the size's")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--minutes", type=float, help="stop at the first checkpoint after so long")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results and checkpoints")
    args = parser.parse_args(argv or None)
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    changed = {name: value for name, value in (("steps", args.steps), ("B", args.batch)) if value is not None}
    size = args.size or ("base" if torch.cuda.is_available() else "toy")
    settings = Settings(**asdict(SIZES[size]) | changed)
    if not torch.cuda.is_available():
        print(f"no GPU: size {size!r} on the CPU" + (", which takes hours" if size != "toy" else ""))
    args.out.mkdir(parents=True, exist_ok=True)
    data = text.load(args.text or text.default_folders(), TEXT_BYTES)
    print(f"text: {data.about}, a unigram model's loss {data.unigram_loss():.3f}")
    for seed in args.seed:
        for arm in args.arm:
            result = train(arm, seed, settings, data, args.out, deadline)
            if result is None:
                print(f"{arm}, seed {seed}: the time is up; the same command goes on from its checkpoint")
                return 3
            memory = "" if result["peak_mib"] is None else f", peak {result['peak_mib']:,.0f} MiB"
            speed = f"{result['tokens_per_second']:,.0f} tokens/s"
            print(f"{arm}, seed {seed}: held-out loss {result['held_out_loss']:.4f}, {speed}{memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
