"""Weights in four and eight bits as bf16, in the order in which they are packed: kernels_cu/quantised/decode.cu."""

import math

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, cached
from moeblaze_cupy.quantised import config as quantised_config
from moeblaze_cupy.reference.quantised import MXFP4_BLOCK, NF4_BLOCK
from moeblaze_cupy.types import QuantizedWeight

FORMATS = {"mxfp4": "Mxfp4", "nf4": "Nf4", "e4m3": "E4m3", "int8": "Int8"}
SCALES = {"mxfp4": ("E8m0",), "nf4": ("Single", "Nested"), "e4m3": ("Single", "E8m0"), "int8": ("Single",)}
PARTS = ("data", "scales", "nested_code", "nested_absmax", "nested_offset")  # of which the last three may be absent
ADDRESSES = (*PARTS, "expert_token_offsets", "out")


def divisor(name: str, number: int) -> dict[str, int]:
    """What the kernel divides by this number with; see `quotient` there. The factor is an int32 of the same bits."""
    shift = 31 + (number - 1).bit_length()
    factor = -(-(1 << shift) // number)
    return {f"{name}_factor": factor - (1 << 32 if factor >> 31 else 0), f"{name}_shift": shift}


def variants(form: str) -> list[loader.Variant]:
    """Of a format, with each kind of scales that it may have."""
    return [_variant(form, scale) for scale in SCALES[form]]


def _variant(form: str, scale: str) -> loader.Variant:
    return loader.variant_of("decode.cu", "decode", {"FORMAT": FORMATS[form], "SCALE": scale})


def scales_of_expert(form: str, K: int, N: int, block: tuple[int, int]) -> int:
    """block: rows and columns of one of "e4m3"."""
    fixed = {"mxfp4": N * K // MXFP4_BLOCK, "nf4": N * K // NF4_BLOCK, "int8": N}
    return fixed.get(form, math.ceil(N / block[0]) * math.ceil(K / block[1]))


@cached
def configure(form: str, shape: tuple[int, int, int], block: tuple[int, int] | None, scale: str) -> Launch:
    """The launch for a weight of this format, shape (E, K, N) and block. Addresses: 0 for absent parts.

    scale: of SCALES. expert_token_offsets: of dispatch, (E+1,), to decode experts with tokens alone; 0 for all experts.
    """
    E, K, N = shape
    rows, columns = block or (1, K)
    chunk = quantised_config.DECODE_THREADS * quantised_config.DECODE_STEPS * 8
    return Launch(
        _variant(form, scale),
        (launch_config.ceil_div(N * K, chunk), E),
        quantised_config.DECODE_THREADS,
        ADDRESSES,
        {
            "size": N * K,
            "scales_of_expert": scales_of_expert(form, K, N, (rows, columns)),
            "K": K,
            "columns_of_blocks": math.ceil(K / columns),
            **divisor("K", K),
            **divisor("rows", rows),
            **divisor("columns", columns),
        },
        why=(f"{chunk} elements of an expert per block",),
    )


def step(weight: QuantizedWeight, scales_dtype: str) -> Launch:
    """The launch for a weight that has passed its checks."""
    scale = "Nested" if weight.nested is not None else "Single" if scales_dtype == "float32" else "E8m0"
    return configure(weight.format, weight.shape, weight.block, scale)
