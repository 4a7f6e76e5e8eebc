"""A byte-level language model whose hidden layer is the MoE layer, through the public array functions only.

python examples/train.py        on a GPU if CuPy and a driver are there, else on the CPU with NumPy

Letters: L bytes to predict per step, c bytes of context each, d model width, E experts, k per token, V = 256 byte
values. The model, in float32 but for the expert layer, which runs in `--dtype`:

    x = the c embedded bytes of context, side by side       (L, d), d = c * e
    y = x + MoE(x), router logits x w_router                 (L, d)
    logits = y w_out + bias                                  (L, V)

The loss is the cross-entropy; the router also follows the load-balancing loss of the Switch Transformer, without which
a few experts get most of the tokens.

Nothing here needs atomics, so a seed gives the same run on the same machine.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

import moeblaze_cupy as mb
from examples.progress import Progress
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.tools import memory
from moeblaze_cupy.tools.command import CommandError, integer, one_line, positive_number, run_guarded
from moeblaze_cupy.tools.memory import format_bytes
from moeblaze_cupy.types import ACTIVATIONS, SAVE_POLICIES, is_gated

PROG = "python examples/train.py"
MAX_WIDTH = 2**24  # of d and h: wider than any model's
CONTEXT_BYTES = 16  # c
VOCABULARY = 256
MIN_TEXT_BYTES, MAX_TEXT_BYTES = 4096, 1 << 30
HELD_OUT_SHARE = 0.1
MAX_HELD_OUT_BYTES = 1 << 16  # so that evaluating stays short beside training, whatever the text
EVALUATION_TOKENS = 2048  # per piece of the held-out text, whatever --batch is
GPU_CHECK_STEPS = 10  # reading a loss waits for the GPU, so that a NaN is found up to this many steps late
WARMUP_SHARE = 0.05
BALANCE_WEIGHT = 0.01  # of the load-balancing loss, as in the Switch Transformer
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.99), 1e-8


@dataclass(frozen=True)
class Text:
    """Bytes to train on and a chunk, the text's end, that training never sees."""

    name: str
    training: np.ndarray  # (n,) uint8
    held_out: np.ndarray  # (m,) uint8

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the held-out chunk: no model that ignores the context does better on it."""
        counts = np.bincount(self.held_out[CONTEXT_BYTES:], minlength=VOCABULARY)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def load_text(path: str | None) -> Text:
    """The file's bytes, or the documentation topics that every Python ships. Raises CommandError."""
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise CommandError(f"--text: expected a file, as this Python ships no pydoc_data ({error})") from error
        # The topics repeat each other's paragraphs: a held-out chunk with paragraphs seen in training proves nothing.
        paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))
        data: bytes | bytearray = "\n\n".join(paragraphs).encode()
        name = "Python's documentation topics (pydoc_data)"
    else:
        try:
            data, name = _read(path), path
        except OSError as error:
            raise CommandError(f"--text: expected a readable file, got {path}: {error.strerror}") from error
    if len(data) > MAX_TEXT_BYTES:
        raise CommandError(f"--text: expected at most {MAX_TEXT_BYTES} bytes, got more in {name}")
    if len(data) < MIN_TEXT_BYTES:
        raise CommandError(f"--text: expected at least {MIN_TEXT_BYTES} bytes, got {len(data)} in {name}")
    values = np.frombuffer(data, np.uint8)
    split = len(values) - min(int(HELD_OUT_SHARE * len(values)), MAX_HELD_OUT_BYTES)
    return Text(name, values[:split], values[split:])


def _read(path: str) -> bytearray:
    """All bytes, or somewhat more than MAX_TEXT_BYTES, as devices and pipes may have no end."""
    data = bytearray()
    with open(path, "rb") as file:
        while len(data) <= MAX_TEXT_BYTES and (piece := file.read(1 << 20)):
            data += piece
    return data


@dataclass(frozen=True)
class Backend:
    xp: Any  # numpy or cupy
    name: str
    dtype: str  # of the expert layer
    note: str = ""  # why the GPU was not taken


def choose_backend(device: str, dtype: str | None) -> Backend:
    """`device` "auto", "cpu" or "gpu"; raises CommandError where "gpu" cannot be had."""
    reason = ""
    if device != "cpu":
        try:
            if dtype == "float64":
                raise RuntimeError("--dtype float64 is for the CPU only")
            cupy = loader.import_cupy()
            loader.device_limits(0)
            name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
            return Backend(cupy, f"cupy on {name}", dtype or "bfloat16")
        except Exception as error:  # a broken CuPy can fail in any way, and "auto" must still train
            reason = one_line(error)
            if device == "gpu":
                raise CommandError(f"--device gpu: {reason}") from error
    return Backend(np, f"numpy on CPU ({os.cpu_count()} cores)", dtype or "float32", reason)


class Model:
    """Parameters as float32 views into one vector, `theta`: one Adam update serves all of them."""

    def __init__(self, xp: Any, args: argparse.Namespace, dtype: str, rng: np.random.Generator) -> None:
        d, h, E = args.d_model, args.d_hidden, args.experts
        self.xp, self.args = xp, args
        # The only weight of a token with one expert, divided by itself, would teach the router nothing.
        self.renormalize = args.k > 1
        self.dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        shapes_and_scales = {
            "embedding": ((VOCABULARY, d // CONTEXT_BYTES), 1.0),
            "w_router": ((d, E), d**-0.5),
            "w1": ((E, d, h * (1 + is_gated(args.activation))), d**-0.5),
            "w2": ((E, h, d), h**-0.5),
            "w_out": ((d, VOCABULARY), 0.0),  # the first prediction is uniform: ln 256 nats per byte
            "bias": ((VOCABULARY,), 0.0),
        }
        # One allocation, before anything is drawn: sizes that do not fit fail at once.
        drawn = np.empty(sum(math.prod(shape) for shape, _ in shapes_and_scales.values()), np.float32)
        places, start = {}, 0
        for name, (shape, scale) in shapes_and_scales.items():
            places[name] = slice(start, start + math.prod(shape))
            start = places[name].stop
            rng.standard_normal(dtype=np.float32, out=drawn[places[name]])
            drawn[places[name]] *= scale
        self.theta = xp.asarray(drawn)
        self.parameters = {n: self.theta[places[n]].reshape(shape) for n, (shape, _) in shapes_and_scales.items()}

    def _forward(self, contexts: Any, save: str | None) -> tuple[Any, ...]:
        """contexts (L, c) -> x, router logits, weights, ids, y, logits (L, V), what the layer saved."""
        p = self.parameters
        x = p["embedding"][contexts].reshape(len(contexts), -1)  # (L, d)
        router_logits = x @ p["w_router"]  # (L, E)
        weights, ids = mb.route(router_logits, self.args.k, renormalize=self.renormalize)  # (L, k), (L, k)
        out, saved = mb.moe_forward(
            self._layer(x), ids, weights, self._layer(p["w1"]), self._layer(p["w2"]),
            activation=self.args.activation, save=save,
        )  # fmt: skip
        y = x + out.astype(np.float32)  # (L, d)
        return x, router_logits, weights, ids, y, y @ p["w_out"] + p["bias"], saved

    def _layer(self, array: Any) -> Any:
        return array.astype(self.dtype, copy=False)

    def loss(self, contexts: Any, targets: Any) -> Any:
        """Summed cross-entropy in nats, a 0-d array: contexts (L, c), targets (L,)."""
        logits = self._forward(contexts, save=None)[-2]
        return _cross_entropy(self.xp, logits, targets)[0].sum()

    def loss_and_gradient(self, contexts: Any, targets: Any) -> tuple[Any, Any, Any]:
        """Mean cross-entropy, a 0-d array; its gradient, as one vector like `theta`; what the layer saved."""
        xp, p = self.xp, self.parameters
        x, router_logits, weights, ids, y, logits, saved = self._forward(contexts, self.args.save)
        losses, dlogits = _cross_entropy(xp, logits, targets)  # (L,), (L, V)
        # Gradients of the sum over the batch, divided at the very end: those of the mean underflow in float16.
        dy = dlogits @ p["w_out"].T  # (L, d)
        grads = mb.moe_backward(self._layer(dy), saved)
        drouter_logits = mb.route_backward(
            grads.weights, router_logits, weights, ids, renormalize=self.renormalize
        )  # (L, E)
        drouter_logits += _balance_gradient(xp, router_logits, saved.index)
        dx = dy + grads.x.astype(np.float32) + drouter_logits @ p["w_router"].T  # (L, d)
        by_name = {
            "embedding": _embedding_gradient(xp, contexts, dx),
            "w_router": x.T @ drouter_logits,
            "w1": grads.w1,
            "w2": grads.w2,
            "w_out": y.T @ dlogits,
            "bias": dlogits.sum(axis=0),
        }
        gradient = xp.empty_like(self.theta)
        start = 0
        for name, parameter in p.items():
            gradient[start : start + parameter.size] = by_name[name].ravel()
            start += parameter.size
        gradient /= len(targets)
        return losses.mean(), gradient, saved


def _cross_entropy(xp: Any, logits: Any, targets: Any) -> tuple[Any, Any]:
    """Per-row loss (L,) and the gradient of its sum (L, V) of logits (L, V), which are overwritten."""
    logits -= logits.max(axis=1, keepdims=True)
    rows = xp.arange(len(targets))
    chosen = logits[rows, targets]  # (L,)
    probabilities = xp.exp(logits, out=logits)
    sums = probabilities.sum(axis=1, keepdims=True)  # (L, 1)
    probabilities /= sums
    probabilities[rows, targets] -= 1
    return xp.log(sums[:, 0]) - chosen, probabilities


def _slot_shares(xp: Any, index: mb.DispatchIndices) -> Any:
    """Each expert's share of the routed slots (E,), by the dispatch's offsets."""
    return xp.diff(index.expert_token_offsets).astype(np.float32) / index.expert_token_indices.size


def _balance_gradient(xp: Any, router_logits: Any, index: mb.DispatchIndices) -> Any:
    """Gradient (L, E), summed over the batch as all of them, of BALANCE_WEIGHT * E * sum_e share_e * mean_e.

    mean_e is the batch mean of softmax(router_logits) (L, E); the shares have no gradient.
    """
    probabilities = xp.exp(router_logits - router_logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    shares = _slot_shares(xp, index)
    weight = BALANCE_WEIGHT * len(shares)
    return weight * probabilities * (shares - (probabilities @ shares)[:, None])


def _embedding_gradient(xp: Any, contexts: Any, dx: Any) -> Any:
    """Sum of dx (L, d) over the uses of each byte -> (V, e); a one-hot product, where scattering needs atomics."""
    values = xp.arange(VOCABULARY, dtype=contexts.dtype)[:, None]
    dx = dx.reshape(*contexts.shape, -1)  # (L, c, e)
    # One position at a time, so that the one-hot matrix (V, L) stays small.
    return sum((contexts[:, j] == values).astype(np.float32) @ dx[:, j] for j in range(contexts.shape[1]))


class Adam:
    """Adam over one vector, in place."""

    def __init__(self, xp: Any, theta: Any) -> None:
        self.xp, self.theta, self.steps = xp, theta, 0
        self.mean, self.square = xp.zeros_like(theta), xp.zeros_like(theta)

    def update(self, gradient: Any, learning_rate: float) -> None:
        """Overwrites `gradient`."""
        self.steps += 1
        beta1, beta2 = ADAM_BETAS
        self.mean *= beta1
        self.mean += (1 - beta1) * gradient
        gradient *= gradient
        gradient *= 1 - beta2
        self.square *= beta2
        self.square += gradient
        # Bias corrections of both moments, folded into the step length and epsilon.
        correction = math.sqrt(1 - beta2**self.steps)
        step = self.xp.sqrt(self.square, out=gradient)
        step += ADAM_EPSILON * correction
        self.xp.divide(self.mean, step, out=step)
        step *= learning_rate * correction / (1 - beta1**self.steps)
        self.theta -= step


def _windows(xp: Any, values: Any, starts: Any) -> tuple[Any, Any]:
    """contexts (n, c) and targets (n,), both int32, of the predictions that begin reading `values` at `starts`."""
    starts = xp.asarray(starts)
    contexts = values[starts[:, None] + xp.arange(CONTEXT_BYTES)]
    # They serve as indices, and index arithmetic on bytes could overflow.
    return contexts.astype(np.int32), values[starts + CONTEXT_BYTES].astype(np.int32)


def held_out_loss(model: Model, held_out: Any) -> float:
    """Mean nats per byte over every byte of held_out (m,) that has a full context."""
    count, total = len(held_out) - CONTEXT_BYTES, 0.0
    progress = Progress(count, "evaluate")
    for first in range(0, count, EVALUATION_TOKENS):
        end = min(first + EVALUATION_TOKENS, count)
        total += float(model.loss(*_windows(model.xp, held_out, np.arange(first, end))))
        progress.update(end)
    return total / count


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _check(args: argparse.Namespace) -> None:
    if args.d_model % CONTEXT_BYTES:
        raise CommandError(f"--d-model: expected a multiple of {CONTEXT_BYTES}, got {args.d_model}")
    if args.experts > router_config.MAX_ROUTER_EXPERTS:
        raise CommandError(f"--experts: expected at most {router_config.MAX_ROUTER_EXPERTS}, got {args.experts}")
    largest_k = min(args.experts, router_config.MAX_ROUTER_K)
    if args.k > largest_k:
        raise CommandError(f"--k: expected at most {largest_k} for --experts {args.experts}, got {args.k}")
    slots = args.batch * args.k
    if slots > launch_config.MAX_SLOTS:
        raise CommandError(f"--batch times --k: expected at most {launch_config.MAX_SLOTS} slots, got {slots}")
    if args.plot is not None:
        _check_plot(args.plot)


def _check_plot(path: str) -> None:
    """Training takes a while: whatever would stop the plot at its end is said before."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(f'--plot: expected matplotlib (pip install -e ".[plot]"), got {error}') from error
    formats = Figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix
    if suffix[1:].lower() not in formats:
        raise CommandError(f"--plot: expected a file ending in .png or another of {', '.join(formats)}, got {path}")
    target = Path(os.path.realpath(path))
    try:
        if not target.parent.is_dir():
            raise CommandError(f"--plot: expected a file in an existing folder, got {path}")
        is_new = not target.exists()
        if not is_new and not target.is_file():
            raise CommandError(f"--plot: expected a file, got a {'folder' if target.is_dir() else 'device'}: {path}")
        target.open("ab").close()  # permissions alone do not tell, in /proc for instance
        if is_new:
            target.unlink()
    except OSError as error:
        raise CommandError(f"--plot: expected a file that can be written, got {path}: {error.strerror}") from error


def _plot(path: str, losses: list[float], before: float, after: float, entropy: float) -> None:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training batch")
    axes.plot([0, len(losses)], [before, after], "o", color="black", label="held-out text, before and after")
    axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of the held-out text")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level language model, MoE hidden layer")
    axes.legend()
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if the loss became NaN or infinite. Ctrl-C raises KeyboardInterrupt with a summary."""
    _check(args)
    text = load_text(args.text)
    backend = choose_backend(args.device, args.dtype)
    xp = backend.xp
    if backend.note:
        print(f"GPU not used: {backend.note}", file=sys.stderr)
    rng = np.random.default_rng(args.seed)
    model = Model(xp, args, backend.dtype, rng)
    setting = [
        ("backend", f"{backend.name}, expert layer in {backend.dtype}"),
        ("text", f"{text.name}: {len(text.training):,} bytes to train on, {len(text.held_out):,} held out"),
        (
            "model",
            f"{model.theta.size:,} parameters, d {args.d_model}, h {args.d_hidden}, {args.experts} experts, "
            f"{args.k} per token, {args.activation}",
        ),
    ]
    _print_facts(setting, sys.stderr)
    training, held_out = xp.asarray(text.training), xp.asarray(text.held_out)

    losses: list[Any] = []
    try:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # a loss that is not finite ends the run
            before = held_out_loss(model, held_out)
            seconds, saved = _train(model, training, args, rng, losses)
            after = held_out_loss(model, held_out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_summary(losses, args.steps)) from None
    _check_finite([after], "held-out loss after step", args)

    busiest = float(_slot_shares(xp, saved.index).max())
    shape = memory.LayerShape(
        args.batch, args.d_model, args.d_hidden, args.experts, args.k, args.activation, backend.dtype
    )
    routed = memory.routed_layer(shape).saved_bytes
    results = [
        ("held-out loss before", _nats_and_bits(before)),
        ("held-out loss after", _nats_and_bits(after)),
        ("unigram entropy", f"{_nats_and_bits(text.unigram_entropy)}, of the held-out text"),
        (
            "speed",
            f"{args.steps * args.batch / seconds:,.0f} tokens/s ({args.steps} steps of {args.batch} tokens "
            f"in {seconds:.1f} s)",
        ),
        ("busiest expert", f"{busiest:.1%} of the last batch's slots, an even share is {1 / args.experts:.1%}"),
        ("saved for backward", f"{format_bytes(saved.nbytes + saved.x.nbytes)} (x and save={args.save!r})"),
        ("with routed buffers", f"{format_bytes(routed)} (by formula, see `python -m moeblaze_cupy plan`)"),
    ]
    _print_facts([*setting, *results], sys.stdout)
    if args.plot is not None:
        _plot(args.plot, losses, before, after, text.unigram_entropy)
        _print_facts([("plot", args.plot)], sys.stdout)
    return 0


def _train(
    model: Model, training: Any, args: argparse.Namespace, rng: np.random.Generator, losses: list[Any]
) -> tuple[float, Any]:
    """Seconds of all steps, and what the layer saved in the last one.

    training: (n,) uint8. losses: gets the mean loss of each step in nats per byte; the last ones may still be 0-d
    arrays if this raises. Raises CommandError at a loss that is not finite.
    """
    xp, read = model.xp, 0
    check_steps = 1 if xp is np else GPU_CHECK_STEPS
    adam = Adam(xp, model.theta)
    model.loss_and_gradient(*_windows(xp, training, np.arange(args.batch) % CONTEXT_BYTES))  # compiles, untimed
    start = time.perf_counter()
    progress = Progress(args.steps, "train")
    for step in range(args.steps):
        starts = rng.integers(0, len(training) - CONTEXT_BYTES, args.batch)
        loss, gradient, saved = model.loss_and_gradient(*_windows(xp, training, starts))
        adam.update(gradient, learning_rate(step, args.steps, args.lr))
        losses.append(loss)
        if len(losses) - read == check_steps or len(losses) == args.steps:
            losses[read:] = map(float, losses[read:])
            _check_finite(losses[read:], "loss at step", args, read + 1)
            read = len(losses)
        progress.update(step + 1, lambda: f"loss {float(losses[-1]):.3f} nats/byte")
    return time.perf_counter() - start, saved


def _check_finite(losses: list[float], what: str, args: argparse.Namespace, first_step: int | None = None) -> None:
    """Raises CommandError for a loss that is not finite. losses: of steps from first_step on, by default the last."""
    for step, loss in enumerate(losses, start=first_step or args.steps):
        if not math.isfinite(loss):
            raise CommandError(
                f"{what} {step} of {args.steps}: expected a finite number, got {loss}; is --lr {args.lr:g} too high?",
                code=1,
            )


def _summary(losses: list[Any], steps: int) -> str:
    """What Ctrl-C leaves of a run."""
    text = f"interrupted after {len(losses)} of {steps} steps"
    if not losses:
        return text
    return f"{text}, loss {float(losses[0]):.3f} at the first, {float(losses[-1]):.3f} nats/byte at the last"


def _print_facts(facts: list[tuple[str, str]], stream: TextIO) -> None:
    for name, value in facts:
        print(f"{name:<22}{value}", file=stream)


def _nats_and_bits(nats: float) -> str:
    return f"{nats:.3f} nats/byte ({nats / math.log(2):.3f} bits)"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Trains a byte-level language model with an MoE hidden layer. Reports its loss, speed and memory. "
        "The default run takes up to four minutes on two CPU cores. Its progress says how long is left.",
    )
    parser.add_argument("--steps", type=integer(1), default=500, metavar="N", help="training steps (%(default)s)")
    parser.add_argument("--batch", type=integer(1), default=2048, metavar="L", help="bytes per step (%(default)s)")
    for option, letter, meaning, most, default in (
        ("--d-model", "d", "model width", MAX_WIDTH, 256),
        ("--d-hidden", "h", "hidden width of one expert", MAX_WIDTH, 128),
        ("--experts", "E", "number of experts", None, 8),
        ("--k", "k", "experts per token", None, 2),
    ):
        parser.add_argument(
            option, type=integer(1, most), metavar=letter, default=default, help=f"{meaning} (%(default)s)"
        )
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default="swiglu", metavar="NAME",
        help=f"{', '.join(ACTIVATIONS)} (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--save",
        choices=[policy for policy in SAVE_POLICIES if policy],
        default="minimal",
        help="what the layer keeps for backward (%(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"),
        help="of the expert layer (float32 on the CPU, bfloat16 on a GPU); float64 on the CPU only",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="(%(default)s)")
    parser.add_argument("--lr", type=positive_number, default=3e-3, help="peak learning rate of Adam (%(default)s)")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of Python's documentation topics")
    parser.add_argument("--plot", metavar="FILE.png", help="write the loss curve (needs matplotlib)")
    return parser


def main(*argv: str) -> int:
    """The exit code, as `run_guarded` has them. argparse raises SystemExit for options it cannot read."""
    return run_guarded(PROG, lambda: run(build_parser().parse_args(argv or None)))


if __name__ == "__main__":
    sys.exit(main())
