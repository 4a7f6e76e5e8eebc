"""Weights in four and eight bits as bf16, or mxfp4 as e4m3: kernels_cu/quantised/decode.cu and decode_e4m3.cu."""

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


E4M3_ADDRESSES = ("data", "scales", "tops", "expert_token_offsets", "out", "out_scales")


def tops_bytes(E: int, groups: int) -> int:
    """Returns the bytes that the launches of `steps_e4m3` need beside their results."""
    return E * groups * quantised_config.E4M3_PARTS


@cached
def steps_e4m3(shape: tuple[int, int, int], groups: int, scales_ld: int, transposed: bool) -> tuple[Launch, Launch]:
    """The launches for a weight in mxfp4 of shape (E, K, N): the largest scales, then e4m3. Addresses: all but offsets.

    groups: 1, or 2 for scales of each half of the N rows. scales_ld: of the result (E, scales_ld), which repeats the
    last group's. transposed: the result is (E, K, N), else (E, N, K).
    """
    E, K, N = shape
    threads, parts = quantised_config.DECODE_THREADS, quantised_config.E4M3_PARTS
    sizes = {"size": N * K, "N": N, "K": K, "groups": groups, "scales_ld": scales_ld}
    if transposed:
        rows, columns = quantised_config.E4M3_TILE
        blocks, why = (
            launch_config.ceil_div(N, rows) * launch_config.ceil_div(K, columns),
            f"tiles of {rows} x {columns}",
        )
    else:
        chunk = threads * quantised_config.E4M3_STEPS * 16
        blocks, why = launch_config.ceil_div(N * K, chunk), f"{chunk} elements of an expert per block"

    def launch(name: str, grid: tuple[int, int], because: str) -> Launch:
        variant = loader.entry("decode_e4m3.cu", name)
        return Launch(variant, grid, threads, E4M3_ADDRESSES, sizes, why=(because,))

    name = "mxfp4_to_e4m3_transposed" if transposed else "mxfp4_to_e4m3"
    tops = launch("mxfp4_tops", (parts, E * groups), f"{parts} blocks for each expert and group of rows")
    return tops, launch(name, (blocks, E), why)
