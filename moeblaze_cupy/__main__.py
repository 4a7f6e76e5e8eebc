"""Command line: `moeblaze info|compile|explain|plan|run`, or `python -m moeblaze_cupy` with the same words."""

import argparse
import importlib
import os
import sys

from moeblaze_cupy import __version__
from moeblaze_cupy.lora.checks import MAX_RANK
from moeblaze_cupy.tools.command import integer, run_guarded
from moeblaze_cupy.types import ACTIVATIONS, GATE_UP, SAVE_POLICIES, WEIGHTS_ON

BIAS_DTYPES = ("weights", "float32")
DTYPES = ("float32", "bfloat16", "float16")  # dtypes of the kernels
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ORDERS = ("row", "transposed")
GPUS = ("h200", "h100", "a100", "l40s", "rtx4090", "b200")  # GPUs whose limits `explain` knows
TIERS = ("sm80", "sm90")
SCRIPT = "moeblaze"  # the command that an installation brings
MAX_WIDTH = 2**18  # bounds d and h, wider than any model's; sums over slots have a launch per 2,048 of d's columns


def _add_layer(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a layer and its tokens: sizes, activation, dtype, memory order."""
    parser.add_argument("--tokens", type=integer(1), required=True, metavar="L", help="tokens per step")
    for option, letter, meaning, most in (
        ("--d-model", "d", "model width", MAX_WIDTH),
        ("--d-hidden", "h", "hidden width of one expert", MAX_WIDTH),
        ("--experts", "E", "number of experts", None),
        ("--k", "k", "experts per token", None),
    ):
        parser.add_argument(option, type=integer(1, most), metavar=letter, required=True, help=meaning)
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default="swiglu", metavar="NAME",
        help=f"{', '.join(ACTIVATIONS)} (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--gate-up", choices=GATE_UP, default="halves", help="order of w1's columns (%(default)s)")
    parser.add_argument("--precision", choices=("fp8",), help="of the products, if not that of --dtype")
    parser.add_argument("--tf32", action="store_true", help="products of --dtype float32 on operands rounded to TF32")
    parser.add_argument("--fp8-wgrad", action="store_true", help="weight gradients too, with --precision fp8")
    parser.add_argument(
        "--lora-rank", type=integer(1, MAX_RANK), metavar="R", help="rank of factors beside both weights"
    )
    parser.add_argument("--bias", choices=BIAS_DTYPES, help="biases, in the weights' dtype or float32 (none)")
    parser.add_argument(
        "--dtype", type=lambda text: SHORT.get(text, text), choices=DTYPES, default="bfloat16", help="(%(default)s)"
    )
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


def _add_passes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save",
        choices=[policy or "inference" for policy in SAVE_POLICIES],
        default="minimal",
        help="what forward keeps for backward; inference has no backward (%(default)s)",
    )
    parser.add_argument("--accumulate", action="store_true", help="add weight gradients to a caller's sums in float32")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; sizes are in bytes")


def build_parser() -> argparse.ArgumentParser:
    is_script = os.path.basename(sys.argv[0]).partition(".")[0] == SCRIPT
    parser = argparse.ArgumentParser(
        prog=SCRIPT if is_script else "python -m moeblaze_cupy",
        description="Mixture-of-Experts training kernels without routed buffers.",
    )
    parser.add_argument("--version", action="version", version=f"moeblaze_cupy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    info = commands.add_parser(
        "info",
        help="what this machine runs on, versions, GPUs and kernel cache: what to put in a bug report",
        description="Says whether this machine runs on a GPU or on NumPy, and why. Prints versions, GPUs, driver and "
        "kernel cache, one fact per line, for a bug report. Works also where the installation is broken.",
    )
    _add_json(info)

    compile_ = commands.add_parser(
        "compile",
        help="compile a layer's kernels into CuPy's cache, before the first use",
        description="Compiles into CuPy's cache what a layer launches, in training with --save and in inference: for "
        "L tokens, half as many, and so on to one. Needs CuPy and a GPU.",
    )
    _add_layer(compile_)
    _add_passes(compile_)

    explain = commands.add_parser(
        "explain",
        help="which kernels a layer launches on a GPU, with what geometry and memory, and why",
        description="Lists the launches of a layer in order: kernel, constants, grid, tiles, buffers, and the reasons. "
        "Arrays are packed, ids int32, router weights float32. No GPU is needed.",
    )
    _add_layer(explain)
    _add_passes(explain)
    explain.add_argument("--gpu", choices=GPUS, help="a GPU by name (the one here, or h200 where there is none)")
    explain.add_argument("--tier", choices=TIERS, help="force the portable kernels, or Hopper's (what the GPU has)")
    _add_json(explain)

    plan = commands.add_parser(
        "plan",
        help="the memory a layer will use, per save policy",
        description="Prints the memory of a layer per save policy, from a dry run for an H200. No GPU is needed.",
    )
    _add_layer(plan)
    plan.add_argument(
        "--tier", choices=TIERS, default="sm90",
        help="kernels: Hopper's, where sizes and dtype allow them, or the portable ones (%(default)s)",
    )  # fmt: skip
    plan.add_argument("--memory-limit", type=integer(1), metavar="BYTES", help="memory_limit of the layer (none)")
    _add_json(plan)

    run = commands.add_parser(
        "run",
        help="run a command whose processes use the layer in models of transformers or Megatron-Core",
        usage="%(prog)s [-h] [--import-only | --megatron] -- COMMAND ...",
        description="Runs a command, such as torchrun or accelerate launch. In every Python process that it starts, "
        "models of transformers that name no experts implementation use the layer.",
    )
    modes = run.add_mutually_exclusive_group()
    modes.add_argument("--import-only", action="store_true", help="only register 'moeblaze': models have to name it")
    modes.add_argument("--megatron", action="store_true", help="models of Megatron-Core use the layer, no others")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="a program and its arguments")

    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code, see `run_guarded`. Without a subcommand it prints the help.

    argparse raises SystemExit for options it cannot read.
    """

    def run() -> int:
        parser = build_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        # Only the subcommand's module is imported: `info` must work where what the others need does not.
        return run_guarded(
            f"moeblaze_cupy {args.command}",
            lambda: int(importlib.import_module(f"moeblaze_cupy.tools.{args.command}").run(args)),
        )

    return run_guarded("moeblaze_cupy", run)


if __name__ == "__main__":
    sys.exit(main())
