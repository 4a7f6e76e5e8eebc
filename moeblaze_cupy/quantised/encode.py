"""Weights to four or eight bits: kernels_cu/quantised/encode.cu."""

import math

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, cached
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.quantised.decode import FORMATS
from moeblaze_cupy.reference.quantised import MXFP4_BLOCK, NF4_BLOCK

ADDRESSES = ("weight", "data", "scales")


def variant(form: str) -> loader.Variant:
    return loader.variant_of("encode.cu", "encode", {"FORMAT": FORMATS[form]})


@cached
def configure(form: str, weight: Layout, block: tuple[int, int] | None) -> Launch:
    """The launch for a weight (E, K, N) of this layout, in bf16."""
    E, K, N = weight.shape
    rows, columns = block or (1, K)
    scales = {"mxfp4": N * K // MXFP4_BLOCK, "nf4": N * K // NF4_BLOCK, "int8": N}
    scales_of_expert = scales.get(form, math.ceil(N / rows) * math.ceil(K / columns))
    threads = launch_config.ENCODE_THREADS
    of_block = {"int8": threads // 32, "e4m3": 1}.get(form, threads)  # scales
    expert_stride, element_stride, row_stride = weight.strides
    return Launch(
        variant(form),
        (launch_config.ceil_div(scales_of_expert, of_block), E),
        threads,
        ADDRESSES,
        {
            "expert_stride": expert_stride,
            "row_stride": row_stride,
            "element_stride": element_stride,
            "scales_of_expert": scales_of_expert,
            "N": N,
            "K": K,
            "block_rows": rows,
            "block_columns": columns,
        },
        why=(f"{of_block} scales per block",),
    )
