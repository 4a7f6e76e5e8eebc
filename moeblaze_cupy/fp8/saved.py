"""The first layer of save="fp8" for portable GEMMs that make or read it: kernels_cu/fp8/saved_fp8.cu."""

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.fp8 import config as fp8_config


def configure(
    step: str, index: IndexLayout, dtype: str, h: int, halves: int, interleaved: bool, limits: DeviceLimits
) -> Launch:
    """Returns the launch.

    Addresses: first_layer (R, halves * h) of `dtype`, expert_token_offsets, saved of `launch_config.saved_fp8`.
    step: "quantize", from first_layer to saved, or "dequantize".
    """
    groups = index.num_rows * launch_config.saved_fp8(index.num_rows, h, halves).groups
    blocks = launch_config.ceil_div(groups, fp8_config.SAVED_WARPS)
    return Launch(
        loader.entry("saved_fp8.cu", f"{step}_saved_{dtype}"),
        (min(blocks, fp8_config.SAVED_BLOCKS * limits.multiprocessors),),
        32 * fp8_config.SAVED_WARPS,
        ("first_layer", "expert_token_offsets", "saved"),
        {
            "num_rows": index.num_rows,
            "num_experts": index.num_experts,
            "columns": h,
            "halves": halves,
            "interleaved": int(interleaved),
        },
        why=("the portable GEMMs know the first layer in its own dtype alone",),
    )
