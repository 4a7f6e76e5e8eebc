"""Command line: `python -m moeblaze_cupy train|info|compile|explain|plan|bench`."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moeblaze_cupy import __version__
from moeblaze_cupy.structures import ACTIVATIONS, GATE_UP, SAVE_POLICIES, WEIGHTS_ON

BIAS_DTYPES = ("weights", "float32")
SUITES = (
    *("layer", "experts", "memory", "grouped_gemm", "aggregation", "dispatch", "router", "selection", "slots"),
    *("ablation", "accuracy"),
)
DTYPES = ("float32", "bfloat16", "float16")  # of the kernels
ORDERS = ("row", "transposed")
GPUS = ("h200", "h100", "a100", "l40s", "rtx4090", "b200")  # whose limits `explain` knows
TIERS = ("sm80", "sm90")
MAX_WIDTH = 2**24  # of d and h: wider than any model's, and `plan` lists the panels of d at once


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's type: whole numbers from `least` to `most`."""
    expected = f"a whole number from {least} {'on' if most is None else f'to {most}'}"

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def positive_number(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def orders(text: str) -> str:
    """Comma-separated memory orders, as the suites of bench/ take them."""
    unknown = [name for name in text.split(",") if name not in ORDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(ORDERS)}, comma-separated, got {unknown[0]!r}")
    return text


class _Choices(argparse.Action):
    """A repeatable option; "all" stands for every choice. The first use replaces the default."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, every: Sequence[str], **rest: Any) -> None:
        super().__init__(option_strings, dest, choices=(*every, "all"), **rest)
        self.every = every

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        earlier = () if given is self.default else given
        setattr(namespace, self.dest, tuple(dict.fromkeys((*earlier, *(self.every if value == "all" else (value,))))))


def _add_activation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default="swiglu", metavar="NAME",
        help=f"{', '.join(ACTIVATIONS)} (%(default)s)",
    )  # fmt: skip


def _add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """--tokens or --batch, --d-model, --d-hidden, --experts, --k: required where there is no default."""
    for option, letter, meaning, most in (
        ("--d-model", "d", "model width", MAX_WIDTH),
        ("--d-hidden", "h", "hidden width of one expert", MAX_WIDTH),
        ("--experts", "E", "number of experts", None),
        ("--k", "k", "experts per token", None),
    ):
        default = defaults.get(letter)
        shown = meaning if default is None else f"{meaning} (%(default)s)"
        parser.add_argument(
            option, type=integer(1, most), metavar=letter, default=default, required=default is None, help=shown
        )


def _add_layer(parser: argparse.ArgumentParser) -> None:
    """A layer and its tokens: sizes, activation, dtype, memory order."""
    parser.add_argument("--tokens", type=integer(1), required=True, metavar="L", help="tokens per step")
    _add_sizes(parser)
    _add_activation(parser)
    parser.add_argument("--gate-up", choices=GATE_UP, default="halves", help="order of w1's columns (%(default)s)")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="of the products (%(default)s)")
    parser.add_argument("--bias", choices=BIAS_DTYPES, help="biases, in the weights' dtype or float32 (none)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(%(default)s)")
    parser.add_argument(
        "--order", choices=ORDERS, default="transposed", help="memory order of the weights (%(default)s)"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="slots as pairs with token_offsets, k of a token on average"
    )
    parser.add_argument("--weights-on", choices=WEIGHTS_ON, default="output", help="(%(default)s)")
    parser.add_argument("--unreduced", action="store_true", help="an output row per slot, neither weighted nor summed")
    parser.add_argument(
        "--identity-experts",
        type=integer(0),
        default=0,
        metavar="Z",
        help="experts that return their input (%(default)s)",
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_cupy", description="Mixture-of-Experts training kernels without routed buffers."
    )
    parser.add_argument("--version", action="version", version=f"moeblaze_cupy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    train = commands.add_parser(
        "train",
        help="train a byte-level language model with an MoE hidden layer",
        description="Trains a byte-level language model with an MoE hidden layer. Reports its loss, speed and memory. "
        "The default run takes a minute or two on two CPU cores. The progress line says how long is left.",
    )
    train.add_argument("--steps", type=integer(1), default=500, metavar="N", help="training steps (%(default)s)")
    train.add_argument("--batch", type=integer(1), default=2048, metavar="L", help="bytes per step (%(default)s)")
    _add_sizes(train, d=256, h=128, E=8, k=2)
    _add_activation(train)
    train.add_argument(
        "--save",
        choices=[policy for policy in SAVE_POLICIES if policy],
        default="minimal",
        help="what the layer keeps for backward (%(default)s)",
    )
    train.add_argument(
        "--dtype", choices=(*DTYPES, "float64"),
        help="of the expert layer (float32 on the CPU, bfloat16 on a GPU); float64 on the CPU only",
    )  # fmt: skip
    train.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="(%(default)s)")
    train.add_argument("--lr", type=positive_number, default=3e-3, help="peak learning rate of Adam (%(default)s)")
    train.add_argument("--seed", type=integer(0), default=0, metavar="N", help="(%(default)s)")
    train.add_argument("--text", metavar="FILE", help="train on this file instead of Python's documentation topics")
    train.add_argument("--plot", metavar="FILE.png", help="write the loss curve (needs matplotlib)")

    commands.add_parser(
        "info",
        help="versions, GPUs and kernel cache: what to put in a bug report",
        description="Prints versions, GPUs, driver and kernel cache, one fact per line, for a bug report. Works also "
        "where the installation is broken.",
    )

    compile_ = commands.add_parser(
        "compile",
        help="compile kernels into CuPy's cache, before the first use",
        description="Compiles the kernels of layers with these options into CuPy's cache, for sizes that are multiples "
        "of 8. Needs CuPy and a GPU.",
    )
    for option, every, default, meaning in (
        ("--dtype", DTYPES, ("bfloat16",), "element type of the layer"),
        ("--order", ORDERS, ORDERS, "memory order of the weights"),
        ("--activation", ACTIVATIONS, ("swiglu",), "activation of the experts"),
        ("--weights-on", WEIGHTS_ON, ("output",), "what the router weights scale"),
        ("--gate-up", GATE_UP, ("halves",), "order of gate and up columns in w1"),
        ("--bias", ("none", *BIAS_DTYPES), ("none",), "dtype of the biases, weights for that of the weights"),
    ):
        compile_.add_argument(
            option, action=_Choices, every=every, default=default, metavar="NAME",
            help=f"{meaning}: {', '.join(every)}, all; repeatable (default: {' '.join(default)})",
        )  # fmt: skip

    compile_.add_argument(
        "--accumulate", action="store_true",
        help="also the kernels that add weight gradients to a caller's sums, in float32 or the weights' dtype",
    )  # fmt: skip

    compile_.add_argument("--save-fp8", action="store_true", help='also the kernels of save="fp8"')
    compile_.add_argument("--precision-fp8", action="store_true", help='also the products of precision="fp8"')

    explain = commands.add_parser(
        "explain",
        help="which kernels a layer launches on a GPU, with what geometry and memory, and why",
        description="Lists the launches of a layer in order: kernel, constants, grid, tiles, buffers, and the reasons. "
        "Arrays are packed, ids int32, router weights float32. No GPU is needed.",
    )
    _add_layer(explain)
    explain.add_argument(
        "--save",
        choices=[policy or "inference" for policy in SAVE_POLICIES],
        default="minimal",
        help="what forward keeps for backward; inference has no backward (%(default)s)",
    )
    explain.add_argument("--accumulate", action="store_true", help="add weight gradients to a caller's sums in float32")
    explain.add_argument("--gpu", choices=GPUS, help="a GPU by name (the one here, or h200 where there is none)")
    explain.add_argument("--tier", choices=TIERS, help="force the portable kernels, or Hopper's (what the GPU has)")

    plan = commands.add_parser(
        "plan",
        help="the memory a layer will use, per save policy, by formula",
        description="Prints the memory of a layer per save policy, by formula. No GPU is needed.",
    )
    _add_layer(plan)
    plan.add_argument(
        "--tier", choices=TIERS, default="sm90",
        help="kernels: Hopper's, where sizes and dtype allow them, or the portable ones (%(default)s)",
    )  # fmt: skip

    bench = commands.add_parser(
        "bench",
        help="time the layer and its kernels beside their bounds and peers",
        description="Times the layer and its kernels beside their bounds and other implementations. Runs in a checkout "
        "and needs torch, pytest and pytest-benchmark. bench/README.md describes suites, cases and providers. Without "
        "a GPU it runs tiny shapes, to show that the suites work.",
    )
    bench.add_argument("--quick", action="store_true", help="the layer on five cases, beside the cuBLAS bound")
    bench.add_argument(
        "--suite", action="append", choices=(*SUITES, "transformers"), metavar="NAME",
        help=f"{', '.join(SUITES)}, transformers; repeatable (default: all but transformers, or layer with --case)",
    )  # fmt: skip
    bench.add_argument("--case", metavar="A,B", help="cases or groups of bench/cases.py")
    bench.add_argument("--provider", metavar="A,B", help="providers or groups of bench/providers.py")
    bench.add_argument(
        "--order", type=orders, metavar="A,B", help="memory orders of the weights: transposed, row (differs by suite)"
    )
    bench.add_argument("--rounds", type=integer(1), metavar="N", help="timed repetitions of each row (12)")
    bench.add_argument("--minutes", type=positive_number, metavar="T", help="start no row later than this into the run")
    bench.add_argument("--commit", metavar="ID", help="commit to write into the records (git's)")
    bench.add_argument("--out", metavar="DIR", help="write one JSON record per suite there")
    bench.set_defaults(suites=SUITES)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code. argparse raises SystemExit for options it cannot read.

    0: done. 1: it ran and failed. 2: it cannot run as asked. 130: Ctrl-C. 141: the reader of stdout left.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: what goes there is not wanted
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    from moeblaze_cupy.cli.progress import CommandError, one_line

    prefix = "moeblaze_cupy"
    try:
        try:
            args = build_parser().parse_args(argv)
            prefix += f" {args.command}"
            # Only the subcommand's module is imported: `info` must work where what the others need does not.
            return int(importlib.import_module(f"moeblaze_cupy.cli.{args.command}").run(args))
        finally:
            sys.stdout.flush()
    except CommandError as error:
        code, message = error.code, str(error)
    except KeyboardInterrupt as error:
        code, message = 130, str(error) or "interrupted"
    except MemoryError as error:  # also CuPy's
        code, message = 1, f"out of memory: {one_line(error)}"
    except BrokenPipeError:  # the reader, `head` for instance, has enough
        _discard_output()
        return 141
    except OSError as error:
        code, message = 1, one_line(error)
        _discard_output()
    with contextlib.suppress(OSError):
        print(f"{prefix}: {message}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Python flushes stdout once more at its exit, which would fail again."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stdout without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
