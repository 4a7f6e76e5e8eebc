"""Weights to four or eight bits: kernels_cu/quantised/encode.cu."""

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Launch, cached
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.quantised import config as quantised_config
from moeblaze_cupy.quantised.decode import FORMATS, scales_of_expert

ADDRESSES = ("weight", "data", "scales")


def variant(form: str) -> loader.Variant:
    return loader.variant_of("encode.cu", "encode", {"FORMAT": FORMATS[form]})


@cached
def configure(form: str, weight: Layout, block: tuple[int, int] | None) -> Launch:
    """The launch for a weight (E, K, N) of this layout, in bf16."""
    E, K, N = weight.shape
    rows, columns = block or (1, K)
    scales = scales_of_expert(form, K, N, (rows, columns))
    threads = quantised_config.ENCODE_THREADS
    of_block = {"int8": threads // 32, "e4m3": 1}.get(form, threads)  # scales
    expert_stride, element_stride, row_stride = weight.strides
    return Launch(
        variant(form),
        (launch_config.ceil_div(scales, of_block), E),
        threads,
        ADDRESSES,
        {
            "expert_stride": expert_stride,
            "row_stride": row_stride,
            "element_stride": element_stride,
            "scales_of_expert": scales,
            "N": N,
            "K": K,
            "block_rows": rows,
            "block_columns": columns,
        },
        why=(f"{of_block} scales per block",),
    )
