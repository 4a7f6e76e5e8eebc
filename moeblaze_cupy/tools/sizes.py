"""The sizes of a layer among a subcommand's options, checked as the layer checks them."""

from argparse import Namespace
from typing import Any

from moeblaze_cupy import checks
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.lora.checks import SUMMED
from moeblaze_cupy.tools.command import CommandError
from moeblaze_cupy.tools.memory import PLAIN, LayerShape
from moeblaze_cupy.types import LayerOptions


def layer_shape(args: Namespace, tier: str) -> LayerShape:
    """Returns the layer's shape. Raises CommandError for sizes that the layer refuses. tier: the kernels' tier."""
    if args.unreduced and args.identity_experts:
        raise CommandError(f"--identity-experts: expected 0 with --unreduced, got {args.identity_experts}")
    s = LayerShape(
        L=args.tokens,
        d=args.d_model,
        h=args.d_hidden,
        E=args.experts,
        k=args.k,
        activation=args.activation,
        dtype=args.dtype,
        transposed=args.order == "transposed",
        ragged=args.pairs,
        options=LayerOptions(
            weights_on=args.weights_on,
            unreduced=args.unreduced,
            identity_experts=args.identity_experts,
            tf32=args.tf32,
        ),
        bias=args.dtype if args.bias == "weights" else args.bias,
        gate_up=args.gate_up,
        precision=args.precision,
        fp8_wgrad=args.fp8_wgrad,
        lora_rank=args.lora_rank,
        memory_limit=getattr(args, "memory_limit", None),
    )
    if s.memory_limit is not None:
        if s.ragged:
            raise CommandError("--memory-limit: expected none with --pairs")
        if s.lora_rank and (s.E * s.lora_rank * s.d % SUMMED or s.E * s.lora_rank * s.h % SUMMED):
            expected = f"factors with a multiple of {SUMMED} elements with --memory-limit"
            raise CommandError(f"--lora-rank: expected {expected}, got {s.lora_rank}")
        if s.b == 2 and (s.d % 8 or s.h % 8):
            expected = f"none with {s.dtype} and d or h that are no multiples of 8"
            raise CommandError(f"--memory-limit: expected {expected}, got {s.d} and {s.h}")
    if s.options.tf32 and s.dtype != "float32":
        raise CommandError(f"--tf32: expected --dtype float32 with it, got {s.dtype}")
    if s.gate_up == "interleaved" and s.g == 1:
        raise CommandError(f"--gate-up: expected halves for --activation {s.activation}, which has no gate")
    on_fp8 = tier == "sm90" and s.dtype == "bfloat16" and not (s.d % fp8_checks.MULTIPLE or s.h % fp8_checks.MULTIPLE)
    if s.precision == "fp8" and not on_fp8:
        expected = f"Hopper's kernels, bfloat16, d and h that are multiples of {fp8_checks.MULTIPLE}"
        raise CommandError(f"--precision fp8: expected {expected}, got {tier}, {s.dtype}, {s.d} and {s.h}")
    try:
        fp8_checks.wgrad("--fp8-wgrad", s.of_layer(None), s.h, factors=bool(s.lora_rank))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if s.slots > launch_config.MAX_SLOTS:
        raise CommandError(f"--tokens times --k: expected at most {launch_config.MAX_SLOTS} slots, got {s.slots}")
    if s.E > launch_config.MAX_EXPERTS:
        raise CommandError(f"--experts: expected at most {launch_config.MAX_EXPERTS}, got {s.E}")
    try:
        checks.identity_experts("--identity-experts", s.options, s.E)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if s.k > s.E:
        raise CommandError(f"--k: expected at most {s.E} for --experts {s.E}, got {s.k}")
    return s


def save_policy(args: Namespace) -> str | None:
    return None if args.save == "inference" else args.save


def slot_options(s: LayerShape) -> str:
    """Returns the differences from the plain layer, each after a comma."""
    found = ["L*k pairs"] if s.ragged else []
    found += [f"gate_up={s.gate_up!r}"] if s.gate_up != PLAIN.gate_up else []
    found += [f"biases in {s.bias}"] if s.bias else []
    found += [f"precision={s.precision!r}"] if s.precision else []
    found += ["fp8_wgrad=True"] if s.fp8_wgrad else []
    found += [f"low-rank factors of rank {s.lora_rank}"] if s.lora_rank else []
    found += [f"memory_limit={s.memory_limit}"] if s.memory_limit is not None else []
    plain = PLAIN._asdict()
    found += [f"{name}={value!r}" for name, value in s.options._asdict().items() if value != plain[name]]
    return "".join(f", {text}" for text in found)


def as_json(s: LayerShape) -> dict[str, Any]:
    """Returns the layer by the names of the command's options."""
    return {
        "tokens": s.L,
        "d_model": s.d,
        "d_hidden": s.h,
        "experts": s.E,
        "k": s.k,
        "activation": s.activation,
        "gate_up": s.gate_up,
        "precision": s.precision,
        "tf32": s.options.tf32,
        "fp8_wgrad": s.fp8_wgrad,
        "bias": s.bias,
        "dtype": s.dtype,
        "order": "transposed" if s.transposed else "row",
        "pairs": s.ragged,
        "weights_on": s.options.weights_on,
        "unreduced": s.options.unreduced,
        "identity_experts": s.options.identity_experts,
        "lora_rank": s.lora_rank,
        **({} if s.memory_limit is None else {"memory_limit": s.memory_limit}),
    }
