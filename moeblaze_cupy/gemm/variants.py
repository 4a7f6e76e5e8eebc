"""Chooses the variant of its kernel that a product of the layer is: the JIT constants of each step."""

import functools

from moeblaze_cupy.cuda.loader import ELEMENTS, Variant, variant_of
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.types import FORMS

EPILOGUES = {"up_fwd": "ACTIVATE", "down_fwd": "STORE", "down_bwd": "ACTIVATE_BWD", "up_bwd": "STORE"}
EPILOGUES_SM90 = {"ACTIVATE": "ActivateRows", "STORE": "StoreRows", "ACTIVATE_BWD": "ActivateBwdRows"}


def gathers(entry: str) -> bool:
    """Returns True if a grouped GEMM's left operand is read through expert_token_indices."""
    return EPILOGUES[entry] != "STORE"


def k_segments(entry: str, gated: bool, interleaved: bool = False) -> int:
    """Returns into how many segments a grouped GEMM divides what it sums over.

    up_bwd of a gated layer sums over gate's columns, then over up's. Interleaved columns are one segment.
    """
    return 2 if entry == "up_bwd" and gated and not interleaved else 1


def is_split(entry: str, gated: bool) -> bool:
    """Returns True if half of a grouped GEMM's tile is gate and half is up, side by side or interleaved."""
    return entry == "up_fwd" and gated


@functools.cache
def gemm_variant(
    entry: str,
    *,
    dtype: str,
    activation: str,
    transposed: bool,
    aligned: bool,
    weights_dtype: str = "float32",
    stages: int = 3,
    step_bytes: int = 128,
    tier: str = "sm80",
    stored_y_swi: bool = False,
    clusters: bool = False,
    to_tokens: bool = False,
    accumulate: str | None = None,
    split_k: bool = False,
    interleaved: bool = False,
    bias: str | None = None,
    weights_on_input: bool = False,
    fp8: bool = False,
    fp8_saved: bool = False,
    fp8_wgrad: bool = False,
    square: bool = False,
    pushes: bool = False,
    summed: str | None = None,
    lora: bool = False,
    lora_in_spare: bool = False,
    tf32: bool = False,
) -> Variant:
    """Returns the variant of one step's grouped GEMM or weight gradient.

    transposed: the weight is stored (E, columns, rows). stored_y_swi: down_bwd reads the y_swi of forward.
    clusters: 2-CTA clusters with TMA multicast of the weight, on Hopper.
    to_tokens: rows of Hopper's down_fwd and up_bwd go to their tokens, where k = 1, and never in clusters.
    accumulate: the dtype of the buffer that a weight gradient is added to, if it is. split_k: a weight gradient of
    Hopper's is float32 sums over parts of each expert's rows, whatever these are added to later. interleaved: gate and
    up columns alternate in w1 and in the first layer. bias: the dtype of what a product in forward adds, if it does.
    weights_on_input: up_fwd and down_bwd scale a and b by the row's router weight; up_fwd then adds no bias.
    fp8: the operands of a grouped GEMM on Hopper are e4m3, the weight contiguous along what is summed over.
    fp8_saved: up_fwd and down_bwd of Hopper's keep and read the first layer in e4m3.
    fp8_wgrad: down_bwd of e4m3 finds the largest magnitudes that weight gradients in e4m3 need.
    square: Hopper's tiles are square. It has no effect on weight gradients that are accumulated or take split-K, on
    down_bwd, on up_fwd but for interleaved columns, with fp8, fp8_saved or clusters, and where rows go to tokens.
    pushes: rows that go to tokens go to the memory of the GPUs that have these.
    summed: the dtype of the sum of this GPU's weight gradient and those of others, on Hopper.
    lora: a grouped GEMM adds a low-rank factor's products. lora_in_spare: the factor has 16 ranks, which lie in the
    spare bytes of Hopper's kernel. tf32: operands, which are float32, are rounded to TF32.
    """
    form = FORMS[activation]
    gated = form.gated
    half = "tf32" if tf32 else "fp16" if dtype == "float16" else "bf16"
    macros: dict[str, str | int] = {"ENTRY": entry, "ELEMENT": ELEMENTS[dtype]}
    if tier == "sm80":
        macros |= {"MMA": f"mma_{half}", "TF32": int(tf32), "ALIGNED": int(aligned)}
        macros |= {"STAGES": stages, "STEP_BYTES": step_bytes}
    else:
        macros |= {"WGMMA": f"wgmma_{half}"}
    forward = entry.endswith("_fwd")
    epilogue = EPILOGUES.get(entry)
    if epilogue is None:
        gathers_p = (entry == "up_wgrad") != transposed  # x is P of up_wgrad, grad_out is Q of down_wgrad
        macros |= {"GATHER_P": int(gathers_p), "GATHER_Q": int(not gathers_p)}
        if tier == "sm90":
            accumulate = None if split_k else accumulate
            macros |= {"SPLIT_K": int(split_k), "OTHERS": int(summed is not None), "FP8": 0}
            if square and not split_k and accumulate is None:
                macros |= gemm_config.square_constants(152)
        out = "float32" if macros.get("SPLIT_K") else accumulate or summed or dtype
        macros |= {"ACCUMULATE": int(accumulate is not None), "OUT": ELEMENTS[out]}
        return variant_of(f"grouped_wgrad_{tier}.cu", entry, macros)
    macros |= {
        "EPILOGUE": epilogue,
        "GATED": int(gated and epilogue != "STORE"),
        "INTERLEAVED": int(interleaved and gated and epilogue != "STORE"),
        "ACTIVATION": "SILU" if epilogue == "STORE" else form.kind,
        "CONSTANTS": 0 if epilogue == "STORE" else len(form.constants),
        "BIASED": int(bias is not None and forward),
        "BIAS": ELEMENTS[bias] if bias is not None and forward else "float",
        "GATHER": int(gathers(entry)),
        "B_K_CONTIGUOUS": int(transposed == forward),
        "K_SEGMENTS": k_segments(entry, gated, interleaved),
        "TILE_COLUMNS": gemm_config.tile_columns(is_split(entry, gated)),
        "WEIGHTS_ON_INPUT": int(weights_on_input and epilogue != "STORE"),
        "LORA": int(lora),
    }
    if tier == "sm90":
        to_tokens = to_tokens and epilogue == "STORE"
        name = EPILOGUES_SM90[epilogue]
        if to_tokens:
            name = "StoreTokenRows"
        if epilogue == "ACTIVATE" and macros["INTERLEAVED"]:
            name = "ActivatePairs"
        macros |= {
            "EPILOGUE": name,
            "STORED_Y_SWI": int(stored_y_swi and epilogue == "ACTIVATE_BWD"),
            "CLUSTER_CTAS": 2 if clusters and not to_tokens else 1,
            "WEIGHT": ELEMENTS[weights_dtype] if to_tokens and forward else "float",
            "PUSHES": int(pushes and to_tokens),
            "FP8_SAVED": int(fp8_saved and epilogue != "STORE"),
            "FP8": int(fp8),
            "FP8_WGRAD": int(fp8_wgrad and epilogue == "ACTIVATE_BWD"),
            "LORA_IN_SPARE": int(lora and lora_in_spare),
            "LORA_STAGES": int(lora and not lora_in_spare),
            "EXPERT_SCALES": 2 if fp8 and gated and entry.startswith("up") else 1,
        }
        if square and not (fp8 or macros["FP8_SAVED"] or macros["CLUSTER_CTAS"] == 2):
            macros |= gemm_config.square_product_constants(name)
    if fp8:
        macros |= {"WGMMA": "wgmma_e4m3", "B_K_CONTIGUOUS": 1}
        macros |= gemm_config.fp8_constants(gathers(entry), to_tokens)
    return variant_of(f"grouped_gemm_{tier}.cu", entry, macros)


@functools.cache
def bias_variant(dtype: str, aligned: bool, bias: str, out: str) -> Variant:
    """Returns the variant of a bias's gradient. dtype: that of the summed rows; bias, out: of bias and gradient."""
    types = {"ELEMENT": ELEMENTS[dtype], "BIAS": ELEMENTS[bias], "OUT": ELEMENTS[out]}
    return variant_of("bias_bwd.cu", "bias_bwd", {"ENTRY": "bias_bwd", **types, "ALIGNED": int(aligned)})
