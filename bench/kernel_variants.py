"""Every variant of every kernel that a layer can need, for the tests and for the comparison of machine code."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.loader import Variant
from moeblaze_cupy.fp8 import wgrad
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm.variants import EPILOGUES, bias_variant, gemm_variant
from moeblaze_cupy.lora.launches import pack_variant, product_variant, sums_variant
from moeblaze_cupy.quantised import decode, encode

SELECTIONS = ("selection.cu", "pairs.cu", "capacity.cu", "balance.cu", "clear.cu")
SHAPE_INDEPENDENT = (
    *("dispatch.cu", "bound_slots.cu", "router_sums.cu", "aggregation.cu", "slots.cu", "wgrad_parts.cu", "pull.cu"),
    "push.cu",
    *("quantize.cu", "saved_fp8.cu", "square_tiles.cu", "rank_experts.cu"),
    *SELECTIONS,
)


def variants(
    dtypes: Sequence[str] = ("bfloat16",),
    orders: Sequence[str] = ("row", "transposed"),
    activations: Sequence[str] = ("swiglu",),
    aligned: Sequence[bool] = (True,),
    limits: launch_config.DeviceLimits = launch_config.H200,
    accumulates: bool = False,
    *,
    gate_ups: Sequence[str] = ("halves",),
    biases: Sequence[str | None] = (None,),
    weights_on: Sequence[str] = ("output",),
    fp8: bool = False,
    fp8_saved: bool = False,
    formats: Sequence[str] = (),
    lora: bool = False,
    tf32: bool = False,
) -> list[Variant]:
    """Returns every module that callers with these dtypes, memory orders and activations can need, for any sizes.

    accumulates: also those that add weight gradients to sums in float32 or the weights' dtype. With sizes that are not
    multiples of 8 (`aligned` False) whole panels of 256 columns may also take kernels for aligned sizes.
    gate_ups: "halves", "interleaved" or both. biases: "weights" for biases in the weights' dtype, "float32", None for
    layers without, or several of these. weights_on: "output", "input" or both.
    fp8: also the products of precision="fp8", which bfloat16 layers have on Hopper, and with "halves" of fp8_wgrad.
    fp8_saved: also those of save="fp8". formats: also those of frozen weights in these formats.
    lora: also those of low-rank factors, of any ranks. tf32: also those of float32 that is rounded to TF32.
    """
    found = dict.fromkeys(Variant(source, "") for source in SHAPE_INDEPENDENT)
    found |= dict.fromkeys(variant for form in formats for variant in (*decode.variants(form), encode.variant(form)))
    if "mxfp4" in formats:
        found[Variant("decode_e4m3.cu", "")] = None
    entries = (*EPILOGUES, "down_wgrad", "up_wgrad")
    for dtype, order, activation, is_aligned, entry, gate_up, bias in itertools.product(
        dtypes, orders, activations, aligned, entries, gate_ups, biases
    ):
        bias_dtype = dtype if bias == "weights" else bias
        config = gemm_config.gemm(dtype, is_aligned, False, limits)
        weights_dtypes = dict.fromkeys(("float32", dtype)) if entry == "down_fwd" else ("float32",)
        totals = (None, *dict.fromkeys(("float32", dtype))) if accumulates and entry.endswith("_wgrad") else (None,)
        either, on_input = (False, True), [place == "input" for place in weights_on]
        takes_fp8 = config.tier == "sm90" and dtype == "bfloat16" and entry in EPILOGUES
        plain_and_e4m3, plain_and_saved = either[: 1 + (fp8 and takes_fp8)], either[: 1 + fp8_saved]
        plain_and_lora: tuple[str | None, ...] = (None,)  # place of the factor
        if lora and entry in EPILOGUES:
            in_spare = config.tier == "sm90" and entry != "down_bwd"
            plain_and_lora = (None, "stages", "spare") if in_spare else (None, "stages")
        for (
            weights_dtype,
            accumulate,
            stored_y_swi,
            clusters,
            to_tokens,
            split_k,
            weights_on_input,
            e4m3,
            in_fp8,
            square,
            of_lora,
            in_tf32,
        ) in itertools.product(
            *(
                weights_dtypes,
                totals,
                either,
                either,
                either,
                either,
                on_input,
                plain_and_e4m3,
                plain_and_saved,
                either,
            ),
            plain_and_lora,
            either[: 1 + (tf32 and dtype == "float32")],
        ):
            if stored_y_swi and (weights_on_input or e4m3 or in_fp8):  # then down_bwd reads no y_swi
                continue
            if of_lora == "spare" and square and bias_dtype is not None:  # see gemm_config.lora_in_spare
                continue
            variant = gemm_variant(
                entry,
                dtype=dtype,
                activation=activation,
                transposed=order == "transposed",
                aligned=is_aligned,
                weights_dtype=weights_dtype,
                stages=config.stages,
                step_bytes=config.step_bytes,
                tier=config.tier,
                stored_y_swi=stored_y_swi,
                clusters=clusters,
                to_tokens=to_tokens,
                accumulate=accumulate,
                split_k=split_k,
                interleaved=gate_up == "interleaved",
                bias=None if weights_on_input and entry == "up_fwd" else bias_dtype,
                weights_on_input=weights_on_input,
                fp8=e4m3,
                fp8_saved=in_fp8,
                square=square,
                lora=of_lora is not None,
                lora_in_spare=of_lora == "spare",
                tf32=in_tf32,
            )
            found[variant] = None
            if e4m3 and entry == "down_bwd" and gate_up == "halves" and of_lora is None:
                found[replace(variant, macros=tuple((dict(variant.macros) | {"FP8_WGRAD": "1"}).items()))] = None
        if bias_dtype is not None:
            outs = dict.fromkeys((bias_dtype, "float32", dtype) if accumulates else (bias_dtype,))
            found |= dict.fromkeys(bias_variant(dtype, is_aligned, bias_dtype, out) for out in outs)
    if lora:
        found |= dict.fromkeys(_lora_variants(dtypes, aligned))
    if fp8 and limits.tier == "sm90" and "bfloat16" in dtypes:
        found |= dict.fromkeys(_fp8_wgrad_variants(orders, accumulates))
    return list(found)


def _fp8_wgrad_variants(orders: Sequence[str], accumulates: bool) -> list[Variant]:
    """Returns the variants of weight gradients in e4m3, and of what runs before them."""
    found = [Variant("routed_fp8.cu", "")]
    for entry, order in itertools.product(("down_wgrad", "up_wgrad"), orders):
        found += [wgrad.product_variant(entry, order == "transposed", "bfloat16", False)]
        if accumulates:
            found += [wgrad.product_variant(entry, order == "transposed", out, True) for out in ("bfloat16", "float32")]
    return found


def _lora_variants(dtypes: Sequence[str], aligned: Sequence[bool]) -> list[Variant]:
    """Returns the variants of the kernels of low-rank factors."""
    found = []
    for dtype in dtypes:
        for given in dict.fromkeys(("float32", dtype)):
            for is_aligned in aligned:
                found += [pack_variant(dtype, given, is_aligned), sums_variant(given, is_aligned)]
        for is_aligned, pair, side in itertools.product(aligned, (1, 2), ("u", "v", "da", "db")):
            gathers = (side, pair) in (("u", 1), ("v", 2), ("da", 1), ("db", 2))
            options = f"lora_{side}{pair}", dtype, is_aligned, gathers
            if side in ("u", "v"):
                found += [product_variant("lora_rows.cu", *options, COLUMNS=c) for c in (16, 32, 64, 128)]
            else:
                found += [product_variant("lora_gram.cu", *options, RANKS=r) for r in (16, 32, 64)]
    return found
