"""Kernels in variants with every option compile to cubins with NVRTC, without a GPU, within registers and spills."""

import functools
import inspect
import itertools
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import moeblaze_cupy as mb
from bench import kernel_variants as all_variants
from bench import nvrtc
from bench.machine_code import code_sections
from moeblaze_cupy.cuda import launch_config, loader, structs
from moeblaze_cupy.fp8 import config as fp8_config
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import variants as gemm_variants
from moeblaze_cupy.lora import config as lora_config
from moeblaze_cupy.quantised import config as quantised_config
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.router import launches as router
from moeblaze_cupy.router.options import RouterOptions
from moeblaze_cupy.rows import config as rows_config
from moeblaze_cupy.types import ACTIVATIONS, WEIGHT_FORMATS

SOURCES = sorted(name for name in loader.source_paths(loader.source_folder()) if name.endswith(".cu"))
LIMITS = {
    "80": launch_config.DeviceLimits(80, 108, 166912, 167936),
    "86": launch_config.DeviceLimits(86, 84, 101376, 102400),
    "89": launch_config.DeviceLimits(89, 128, 101376, 102400),
    "90a": launch_config.H200,
    "100": launch_config.DeviceLimits(100, 148, 232448, 233472),
    "120": launch_config.DeviceLimits(120, 170, 101376, 102400),
}

# Registers: 255 leaves two portable GEMM blocks of 128 threads per multiprocessor, 168 is what 384 threads leave each
# thread at entry (setmaxnreg moves them between warpgroups), 64 what 1024 threads leave; 80 leaves aggregation, slots
# and bias_bwd three blocks of 256. Measured: 64 in dispatch, 79 in aggregation, 68 in slots, 44 in wgrad_parts, 77 in
# bias_bwd, 63 in balance on sm_80, 64 in selections of 1024 threads, 57 in router_sums and 40 in pairs on sm_120.
REGISTER_CAPS = {
    "grouped_gemm_sm90.cu": 168,
    "grouped_wgrad_sm90.cu": 168,
    "grouped_wgrad_fp8_sm90.cu": 168,
    "routed_fp8.cu": 80,
    "dispatch.cu": 64,
    "router_sums.cu": 64,
    "router_backward.cu": 128,
    "aggregation.cu": 80,
    "slots.cu": 80,
    "wgrad_parts.cu": 48,
    "quantize.cu": 128,  # two blocks of 256 threads on a multiprocessor, as with 112
    "saved_fp8.cu": 48,
    "selection.cu": 64,
    "pairs.cu": 48,
    "capacity.cu": 64,
    "balance.cu": 64,
    "clear.cu": 32,
    "lora_pack.cu": 56,
    "lora_sums.cu": 48,
    "bias_bwd.cu": 80,
    "bound_slots.cu": 48,
    "square_tiles.cu": 40,
    "rank_experts.cu": 32,
    "pull.cu": 80,
    "push.cu": 64,
    "decode.cu": 64,
    "decode_e4m3.cu": 80,  # three blocks of 256 threads on a multiprocessor
    "encode.cu": 168,
}
# Bytes of spill stores, all outside the main loops. Measured: 28 at most in the portable kernels with 16-byte accesses;
# 188 in those for odd sizes, whose guarded element copies are slow anyway; none in Hopper's, none where a lane routes.
ALIGNED_SPILL_CAP, UNALIGNED_SPILL_CAP = 64, 320
# Measured: 20 at most in Hopper's up_fwd with a low-rank factor in the spare bytes. Its producer gathers rows, and
# stores and loads a few registers once per tile.
GATHERING_SPILL_CAP = 24
# Measured: 40 and 412 at most in portable products with low-rank factors; 64 in TF32, whose lanes load words.
PORTABLE_LORA_SPILL_CAP, UNALIGNED_LORA_SPILL_CAP, TF32_LORA_SPILL_CAP = 40, 416, 64


def spill_cap(variant) -> int:
    macros = dict(variant.macros)
    if macros.get("LORA_IN_SPARE") == "1" and macros["GATHER"] == "1":
        return GATHERING_SPILL_CAP
    if variant.source.endswith("_sm90.cu") or (variant.source == "router_lane.cu" and macros["ALIGNED"] == "1"):
        return 0
    if macros.get("LORA") == "1":
        if macros["TF32"] == "1" and macros["ALIGNED"] == "1":
            return TF32_LORA_SPILL_CAP
        return PORTABLE_LORA_SPILL_CAP if macros["ALIGNED"] == "1" else UNALIGNED_LORA_SPILL_CAP
    return UNALIGNED_SPILL_CAP if macros.get("ALIGNED") == "0" else ALIGNED_SPILL_CAP


SM89_DIFFERS = ("quantize.cu", "saved_fp8.cu", "slots.cu", "decode.cu", "decode_e4m3.cu", "encode.cu")

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)


@dataclass(frozen=True)
class Entry:
    """What ptxas says of one kernel, in registers and bytes."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    static_shared: int


def entries_of(log: str) -> list[Entry]:
    found = []
    for text in log.split("Compiling entry function ")[1:]:
        stack, stores = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", text).groups()
        registers = re.search(r"Used (\d+) registers", text)[1]
        shared = re.search(r"(\d+) bytes smem", text)
        numbers = (registers, stack, stores, shared[1] if shared else 0)
        found.append(Entry(re.match(r"'(\w+)'", text)[1], *map(int, numbers)))
    return found


@functools.cache
def compiled(variant, arch: str) -> nvrtc.Compiled:
    """Raises RuntimeError with the compiler's log if compilation fails."""
    return attempt(loader.source(variant), variant.source, loader.options(variant), arch)


def attempt(source: str, name: str, options: tuple[str, ...], arch: str) -> nvrtc.Compiled:
    """Compiles with the options of `loader.options`."""
    options = tuple(o for o in options if not o.startswith("-arch"))
    return nvrtc.compile_source(source.encode(), name, [*options, f"-arch=sm_{arch}", "--ptxas-options=-v"])


def problems(variant, arch: str) -> list[str]:
    """What is wrong with the compiled entries: warnings, registers, local and shared memory."""
    done, limits = compiled(variant, arch), LIMITS[arch]
    found = [line for line in done.log.splitlines() if re.search(r"warning|C75\d\d|C76\d\d", line)]
    entries = entries_of(done.log)
    if not done.cubin.startswith(b"\x7fELF"):
        found.append("no cubin")
    if (names := {entry.name for entry in entries}) != entry_names(variant):
        found.append(f"entries {sorted(names)}")
    for entry in entries:
        if entry.registers > REGISTER_CAPS.get(variant.source, 255):
            found.append(f"{entry.name}: {entry.registers} registers")
        if entry.spill_stores > spill_cap(variant):
            found.append(f"{entry.name}: {entry.spill_stores} bytes of spill stores")
        if entry.stack > entry.spill_stores + 16:  # 16: rounding; more is an array indexed at run time
            found.append(f"{entry.name}: {entry.stack} bytes of stack for {entry.spill_stores} of spills")
        if entry.static_shared > static_shared_cap(variant, limits):
            found.append(f"{entry.name}: {entry.static_shared} bytes of static shared memory")
    return [f"{variant.name or variant.source} for sm_{arch}: {problem}" for problem in found]


def entry_names(variant) -> set[str]:
    """Kernels of a source, by the names the host asks for."""
    if variant.entry:
        return {variant.entry}
    dtypes = tuple(loader.ELEMENTS)
    ids_dtypes = ("int32", "int64")
    weights = {(dtype, weights) for dtype in dtypes for weights in (dtype, "float32")}
    sums = {f"aggregate_{x}_{w}{suffix}" for x, w in weights for suffix in ("", "_unaligned")}
    return {
        "dispatch.cu": {f"dispatch_{step}_{ids}" for step in ("count", "route") for ids in ("int32", "int64")},
        "router_sums.cu": {"router_sums"},
        "slots.cu": {
            *(f"{step}_{ids}" for step in ("list_tokens", "mark_identity") for ids in ("int32", "int64")),
            *("rows_to_tokens", "slots_by_row"),
            *(name.replace("aggregate", step) for name in sums for step in ("aggregate_slots", "identity_weights")),
        },
        "aggregation.cu": sums | {f"weights_{use}_{dtype}" for use in ("bwd", "by_row") for dtype in dtypes},
        "bias_bwd.cu": {"bias_bwd"},
        "wgrad_parts.cu": {f"wgrad_parts_{dtype}" for dtype in dtypes},
        "quantize.cu": {
            f"{step}_{dtype}{suffix}"
            for step in ("quantize_rows", "weights_amax", "quantize_weights")
            for dtype in dtypes
            for suffix in ("", "_unaligned")
        }
        | {"dequantize_rows_bfloat16"},
        "routed_fp8.cu": {"transpose_routed_bfloat16"},
        "saved_fp8.cu": {f"{step}_saved_{dtype}" for step in ("quantize", "dequantize") for dtype in dtypes},
        "selection.cu": {f"columns_{step}_{dtype}" for step in ("count", "split", "finish") for dtype in dtypes}
        | {f"chosen_bits_{ids}" for ids in ids_dtypes},
        "pairs.cu": {"mask_bits", "pairs_count", "pairs_write"},
        "capacity.cu": {f"capacity_{step}_{ids}" for step in ("count", "list", "parts", "mark") for ids in ids_dtypes}
        | {"capacity_pick", "capacity_finish"},
        "balance.cu": {f"tokens_per_expert_{ids}" for ids in ids_dtypes}
        | {f"quantile_counts_{dtype}" for dtype in dtypes}
        | {f"quantile_lines_{dtype}_{ids}" for dtype in dtypes for ids in ids_dtypes},
        "clear.cu": {"clear"},
        "decode_e4m3.cu": {"mxfp4_tops", "mxfp4_to_e4m3", "mxfp4_to_e4m3_transposed"},
        "bound_slots.cu": {"bound_slots"},
        "square_tiles.cu": {"square_tiles"},
        "rank_experts.cu": {"rank_experts"},
        "pull.cu": {"pull_rows", "pull_scaled_rows"}
        | {f"pull_sum_{dtype}_{ids}" for dtype in dtypes for ids in ids_dtypes}
        | {f"pull_{what}_{ids}_{size}" for what in ("slots", "values") for ids in ids_dtypes for size in (2, 4)},
        "push.cu": {f"push_sum_{dtype}_{of_weights}" for dtype, of_weights in weights},
    }[variant.source]


def static_shared_cap(variant, limits) -> int:
    """What launch_config leaves for static arrays beside the dynamic shared memory."""
    if variant.source.endswith("_sm90.cu"):
        config = gemm_config.gemm("bfloat16", True, False, limits)
        if variant.source == "grouped_gemm_sm90.cu" and ("BM", "192") in variant.macros:
            config = gemm_config.square_gemm(("EPILOGUE", "ActivatePairs") in variant.macros)
        return limits.shared_bytes_per_block - config.shared_bytes
    arrays = {"bias_bwd.cu": 9 * 1024, "router_sums.cu": 4 * 33 * router_config.ROUTER_SUM_ROWS, "bound_slots.cu": 4}
    arrays["pull.cu"] = 4 * rows_config.PULL_SLOT_ROWS
    arrays["square_tiles.cu"] = 4 * (gemm_config.TILES_THREADS + gemm_config.TILES_THREADS // 32)
    arrays["decode.cu"] = 4 * 16 * 32  # a table for each bank
    arrays["decode_e4m3.cu"] = 2 * 256 * 8 + math.prod(quantised_config.E4M3_TILE)  # two tables and a tile
    for name, tile in (("pack", lora_config.LORA_PACK_TILE), ("sums", lora_config.LORA_SUMS_TILE)):
        arrays[f"lora_{name}.cu"] = 4 * (tile + tile // 32)
    arrays["quantize.cu"] = fp8_config.QUANTIZE_TILE**2
    arrays["routed_fp8.cu"] = fp8_config.QUANTIZE_TILE**2 + 12
    return arrays.get(variant.source, 2048 if variant.entry else 0)


def accumulating(arch: str) -> list:
    """Weight gradients that are added to what is there, for each element type and type of the sum."""
    every = all_variants.variants(
        tuple(loader.ELEMENTS), ("row",), ("swiglu",), (True, False), LIMITS[arch], accumulates=True
    )
    found = [(variant, dict(variant.macros)) for variant in every if ("ACCUMULATE", "1") in variant.macros]
    return [v for v, macros in found if macros["OUT"] == ("float" if v.entry == "up_wgrad" else macros["ELEMENT"])]


def summing() -> list:
    """Weight gradients that are summed with those of other ranks, for each type of the sum and each order."""
    every = itertools.product(("down_wgrad", "up_wgrad"), ("bfloat16", "float16"), (False, True), (False, True))
    options = {"activation": "swiglu", "aligned": True, "tier": "sm90"}
    return [
        gemm_variants.gemm_variant(
            step, dtype=dtype, transposed=transposed, summed="float32" if in_float32 else dtype, **options
        )
        for step, dtype, transposed, in_float32 in every
    ]


def logits_of(E: int, dtype: str) -> Layout:
    return Layout((4096, E), (E, 1), dtype, 0)


def router_variants() -> list:
    """Kernels of the router that differ most."""
    row, ids = Layout((4096,), (1,), "float32", 0), Layout((4096, 8), (8, 1), "int32", 0)
    values = {name: inspect.signature(mb.route).parameters[name].default for name in RouterOptions._fields}
    plain = RouterOptions(**values)._replace(renormalize=True)
    deepseek = plain._replace(score="sigmoid", groups=(8, 4, 2), eps=1e-20)
    losses = plain._replace(renormalize=False, sums=("softmax", "z", "entropy"))
    found = []
    for E, dtype, k, options, others in (
        (256, "float32", 8, plain, {}),
        (256, "bfloat16", 8, losses, {}),
        (256, "float32", 8, plain._replace(sums=("softmax", "z")), {}),
        (256, "float32", 12, plain, {}),
        (16, "float32", 4, plain, {}),
        (1001, "float16", 40, plain._replace(top_p=0.5), {}),
        (1024, "float32", 8, losses._replace(score="sqrt_softplus", sums=("sqrt_softplus", "z")), {"bias": row}),
        (256, "float32", 8, deepseek, {"bias": Layout((256,), (1,), "float32", 0)}),
        (256, "float32", 8, plain, {"ids": ids}),
    ):
        layouts = {"logits": logits_of(E, dtype), **others}
        forward = router.configure_forward(tuple(layouts.items()), k, options)
        gradients = {"grad_score_sums": row, "grad_z_sums": row, "grad_entropy_sums": row} if options.sums else {}
        backward = router.configure_backward((("logits", layouts["logits"]), ("ids", ids), *gradients.items()), options)
        found += [forward.route.variant, backward.launch.variant]
    return list(dict.fromkeys(found))


def variants_of(arch: str) -> list:
    """A selection: of sm_80 and sm_90a each value of each option, and the pairs of options that share registers.

    sm_89 is like sm_86 but for conversions to e4m3: sources but SM89_DIFFERS have the same machine code for both.
    Kernels for odd sizes take longest to compile; in these, router weights of x's dtype are one load more. On sm_90a
    they are the portable ones, of which one order is compiled again.
    """
    bf16, fp32, fp16 = ("bfloat16",), ("float32",), ("float16",)
    row, transposed, swiglu, orders = ("row",), ("transposed",), ("swiglu",), ("row", "transposed")
    variants = functools.partial(all_variants.variants, limits=LIMITS[arch])
    every = []
    if arch in ("80", "90a"):
        every += variants((*bf16, *fp32), orders, swiglu, (True,), formats=WEIGHT_FORMATS, tf32=True) + variants(
            fp16, row, swiglu, (True,)
        )
        every += variants(bf16, transposed, swiglu, (False,))
        if arch == "80":
            every += variants(fp32, orders, swiglu, (False,)) + variants(fp16, row, swiglu, (False,))
        # Clusters and a stored y_swi add the same to all activations, biases and orders of columns.
        beside = {("CLUSTER_CTAS", "2"), ("STORED_Y_SWI", "1")}
        on_input = {"weights_on": ("input",)}
        every += variants(bf16, row, swiglu, (True,), **on_input) + variants(fp32, row, swiglu, (False,), **on_input)
        pairs = {"gate_ups": ("interleaved",), "biases": ("weights",)}
        plain = variants(bf16, row, ACTIVATIONS, (True,))
        plain += variants(bf16, transposed, ("gelu", "relu"), (True,), **on_input)
        plain += variants(bf16, row, ("swiglu_softcap",), (True,), **pairs, **on_input)
        both = {"gate_ups": ("halves", "interleaved"), "biases": ("weights", "float32")}
        plain += variants(bf16, row, ("swiglu_oai",), (True,), **both)
        every += [v for v in plain if beside.isdisjoint(v.macros)]
        every += accumulating(arch) + router_variants()
        if arch == "90a":
            in_e4m3 = ("FP8", "1")
            of_fp8 = variants(bf16, row, ("gelu",), (True,), fp8=True, weights_on=("input",))
            of_fp8 += variants(bf16, row, ("swiglu_softcap",), (True,), fp8=True, biases=("weights",))
            of_fp8 += variants(bf16, row, ("swiglu_oai",), (True,), fp8=True, fp8_saved=True, **pairs)
            of_fp8 += variants(bf16, row, ("swiglu_softcap",), (True,), fp8=True, gate_ups=("interleaved",), **on_input)
            of_fp8 = [v for v in of_fp8 if beside.isdisjoint(v.macros)]
            of_fp8 += variants(bf16, orders, swiglu, (True,), accumulates=True, fp8=True, fp8_saved=True)
            every += [v for v in of_fp8 if in_e4m3 in v.macros or v.source == "routed_fp8.cu"]
            to_tokens = {("EPILOGUE", "StoreTokenRows"), ("ELEMENT", "bf16")}
            pushes = [v for v in every if to_tokens <= set(v.macros)]
            every += [replace(v, macros=tuple((dict(v.macros) | {"PUSHES": "1"}).items())) for v in pushes]
            every += summing()
        every += variants(fp32, row, ("swiglu_oai",), (False,), **pairs)
        every += with_lora(variants, arch)
        kept = variants(bf16, row, ("swiglu", "gelu"), (True,), fp8_saved=True)
        kept += variants(bf16, row, ("swiglu_softcap",), (True,), **pairs, fp8_saved=True)
        every += [v for v in kept if ("FP8_SAVED", "1") in v.macros and beside.isdisjoint(v.macros)]
    else:
        every += variants(bf16, row, swiglu, (True,), formats=WEIGHT_FORMATS) + variants(
            fp32, transposed, ("gelu",), (False,), tf32=True
        )
    if arch == "89":
        every = [v for v in every if v.source in SM89_DIFFERS]
    return [v for v in dict.fromkeys(every) if not ({("ALIGNED", "0"), ("WEIGHT", "bf16")} <= set(v.macros))]


def with_lora(variants, arch: str) -> list:
    """Kernels of low-rank factors, and products beside them: all of bf16, one form of other dtypes and options."""
    every = variants(("bfloat16",), ("row", "transposed"), ("swiglu",), (True,), lora=True)
    every += variants(
        ("bfloat16",), ("row",), ("swiglu_oai",), (True,), lora=True, gate_ups=("interleaved",), biases=("float32",)
    )
    every += variants(("float16",), ("row",), ("gelu",), (True,), lora=True, fp8_saved=True, weights_on=("input",))
    if arch == "80":
        every += variants(("float32",), ("row",), ("swiglu",), (True, False), lora=True, tf32=True)
    if arch == "90a":
        biased = {"biases": (None, "weights")}
        in_e4m3 = variants(("bfloat16",), ("row",), ("swiglu",), (True,), lora=True, fp8=True, fp8_saved=True, **biased)
        every += [v for v in in_e4m3 if ("FP8", "1") in v.macros]
    return [v for v in every if ("LORA", "1") in v.macros or v.source.startswith("lora_")]


@pytest.mark.parametrize("arch", LIMITS)
def test_every_variant_compiles_within_its_caps(arch):
    with ThreadPoolExecutor(2) as pool:  # NVRTC runs without the GIL
        found = [p for ps in pool.map(lambda v: problems(v, arch), variants_of(arch)) for p in ps]
    assert not found, "\n".join(found)


def one_of_each_source() -> list:
    """A variant per kernel source, for sm_90a."""
    every = all_variants.variants(aligned=(True, False), biases=(None, "weights"), formats=WEIGHT_FORMATS, lora=True)
    every += all_variants.variants(fp8=True) + router_variants()
    return [next(v for v in every if v.source == source) for source in SOURCES]


@pytest.mark.parametrize("variant", one_of_each_source(), ids=lambda variant: variant.source)
def test_a_missing_macro_is_an_error_that_names_it(variant):
    """Without one that this variant does not use, such as the bias's dtype without a bias, the code is the same."""
    source, options = loader.source(variant), loader.options(variant)
    given = [option for option in options if option.startswith("-D") and "SOURCE_DIGEST" not in option]
    assert given
    for option in given:
        name = option[2:].partition("=")[0]
        try:
            without = attempt(source, variant.source, tuple(o for o in options if o != option), "90a")
        except RuntimeError as error:
            assert re.search(rf'error: ("{name}"|{name}\b|.*"{name}")', str(error)), name
        else:
            assert sorted(code_sections(without.cubin)) == sorted(code_sections(compiled(variant, "90a").cubin)), name


HEADERS = [name for name in loader.source_paths(loader.source_folder()) if name.endswith(".cuh")]


@pytest.mark.parametrize("header", HEADERS)
def test_headers_compile_alone(header):
    """With the macros of a kernel that includes them; those of e4m3 come first, as some headers are theirs alone."""
    in_e4m3 = [
        v
        for v in all_variants.variants(fp8=True, fp8_saved=True)
        if {("FP8", "1"), ("FP8_SAVED", "1")} <= set(v.macros)
    ]
    in_spare = [v for v in all_variants.variants(lora=True) if ("LORA_IN_SPARE", "1") in v.macros]
    which = in_spare if header == "lora_spare_sm90.cuh" else (*in_e4m3, *one_of_each_source())
    variant = next(v for v in which if header in structs.included(v.source))
    attempt(f'#pragma nv_diag_error 193\n#include "{header}"\n', "alone.cu", loader.options(variant), "90a")


WRONG = [
    ("aggregation.cu", "PANEL_COLUMNS", 512),
    ("aggregation.cu", "TOKENS_PER_BLOCK", 64),
    ("bound_slots.cu", "BOUND_THREADS", 2048),
    ("dispatch.cu", "MAX_EXPERTS", 16384),
    ("dispatch.cu", "MAX_K", 65536),
    ("dispatch.cu", "MIN_COLUMNS", 4),
    ("dispatch.cu", "MIN_COUNT_COLUMNS", 2),
    ("dispatch.cu", "EXPERT_LISTS", 4),
    ("dispatch.cu", "MIN_GROUPS", 1),
    ("grouped_gemm_sm80.cu", "BM", 64),
    ("grouped_gemm_sm80.cu", "BN", 128),
    ("grouped_gemm_sm80.cu", "THREADS", 128),
    ("grouped_gemm_sm80.cu", "STEP_BYTES", 32),
    ("grouped_gemm_sm80.cu", "STAGES", 2),
    ("grouped_gemm_sm80.cu", "STATIC_BYTES", 256),
    ("grouped_gemm_sm80.cu", "TILE_COLUMNS", 192),
    ("grouped_gemm_sm90.cu", "BM", 64),
    ("grouped_gemm_sm90.cu", "BN", 128),
    ("grouped_gemm_sm90.cu", "BK", 32),
    ("grouped_gemm_sm90.cu", "THREADS", 256),
    ("grouped_gemm_sm90.cu", "STAGES", 4),
    ("grouped_gemm_sm90.cu", "STAGE_BYTES", 32 * 1024),
    ("grouped_gemm_sm90.cu", "TILE_BYTES", 32 * 1024),
    ("grouped_gemm_sm90.cu", "SPARE_BYTES", 8 * 1024),
    ("grouped_gemm_sm90.cu", "TILE_COLUMNS", 192),
    ("grouped_gemm_sm90.cu", "PRODUCER_REGISTERS", 80),
    ("grouped_gemm_sm90.cu", "CONSUMER_REGISTERS", 220),
    ("grouped_wgrad_sm90.cu", "SPARE_BYTES", 2 * 1024),
    ("pull.cu", "PULL_THREADS", 2048),
    ("square_tiles.cu", "TILES_THREADS", 2048),
    ("pull.cu", "SLOT_ROWS", 1024),
    ("pull.cu", "PANEL_COLUMNS", 512),
    ("router_backward.cu", "LANES", 24),
    ("router_backward.cu", "MAX_ROUTER_EXPERTS", 8192),
    ("router_lane.cu", "LISTED_ROW_BYTES", 192),
    ("router_forward.cu", "MAX_LISTED", 32),
    ("router_forward.cu", "THREADS", 48),
    ("router_forward.cu", "VALUES", 6),
    ("router_sums.cu", "ROWS_AT_ONCE", 64),
    ("slots.cu", "TOKENS_PER_BLOCK", 64),
    ("wgrad_parts.cu", "GROUPS_PER_BLOCK", 2048),
    ("quantize.cu", "TILE", 64),
    ("quantize.cu", "THREADS", 512),
    ("decode.cu", "THREADS", 2048),
    ("decode_e4m3.cu", "PARTS", 8),
    ("decode_e4m3.cu", "TILE_COLUMNS", 192),
    ("encode.cu", "THREADS", 2048),
    ("saved_fp8.cu", "WARPS", 64),
    ("saved_fp8.cu", "GROUP_COLUMNS", 120),
    ("selection.cu", "SELECT_THREADS", 512),
    ("selection.cu", "MAX_EXPERTS", 16384),
    ("pairs.cu", "PAIRS_THREADS", 2048),
    ("pairs.cu", "PAIRS_BLOCKS", 8192),
    ("capacity.cu", "SELECT_THREADS", 2048),
    ("balance.cu", "COUNT_THREADS", 2048),
]


@pytest.mark.parametrize(("name", "macro", "value"), WRONG)
def test_constants_that_a_kernel_does_not_work_with_do_not_compile(name, macro, value):
    (variant,) = (v for v in one_of_each_source() if v.source == name)
    options = [option for option in loader.options(variant) if not option.startswith(f"-D{macro}=")]
    assert len(options) == len(loader.options(variant)) - 1
    with pytest.raises(RuntimeError, match="static assertion failed"):
        attempt(loader.source(variant), name, (*options, f"-D{macro}={value}"), "90a")


WITH_LINES = ("grouped_gemm_sm90.cu", "grouped_wgrad_sm80.cu", "router_backward.cu")


@pytest.mark.parametrize("source", WITH_LINES)
def test_line_information_names_files_and_leaves_the_machine_code_as_it_is(source, monkeypatch):
    variant = next(v for v in one_of_each_source() if v.source == source)
    monkeypatch.delenv("MOEBLAZE_LINEINFO", raising=False)
    plain = compiled(variant, "90a").cubin
    monkeypatch.setenv("MOEBLAZE_LINEINFO", "1")
    with_lines = attempt(loader.source(variant), "a name of CuPy's", loader.options(variant), "90a").cubin
    assert list(code_sections(with_lines)) == list(code_sections(plain))
    assert b".debug_line" not in plain and b".debug_line" in with_lines
    folder = loader.source_folder().encode()
    assert folder in with_lines and variant.source.encode() in with_lines and folder not in plain
    assert b"a name of CuPy's" not in with_lines


def test_errors_name_the_file_and_its_line_or_the_table_of_parameters():
    variant = next(v for v in one_of_each_source() if v.source == "router_forward.cu")
    source, options = loader.source(variant), loader.options(variant)
    with open(loader.source_paths(loader.source_folder())[variant.source]) as file:
        line = next(number for number, text in enumerate(file, start=1) if "__launch_bounds__" in text)
    for text, mistaken, place in (
        ("__launch_bounds__", "__lunch_bounds__", rf"\nrouter_forward\.cu\({line}\): error"),
        (
            "(sizeof(RouterForwardParams) ==",
            "(1 + sizeof(RouterForwardParams) ==",
            r"\n<parameters of router_forward\.cu>\(2\)",
        ),
    ):
        assert text in source
        with pytest.raises(RuntimeError, match=place):
            attempt(source.replace(text, mistaken), "router_forward.cu", options, "90a")


def test_hopper_takes_hoppers_kernels():
    sources = {v.source for v in variants_of("90a")}
    assert {"grouped_gemm_sm90.cu", "grouped_wgrad_sm90.cu", "grouped_gemm_sm80.cu"} <= sources


def find_disassembler():
    """cuobjdump, and the environment in which it finds nvdisasm; None without them."""
    folders = [
        str(Path(path).parent) for path in nvrtc.wheel_files("nvidia-cuda-cuobjdump").values() if path.endswith("dump")
    ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=path)
    return tool and shutil.which("nvdisasm", path=path) and (tool, os.environ | {"PATH": path})


DISASSEMBLER = find_disassembler()
PRODUCTS = ("HMMA", "HGMMA", "FFMA")


def instructions(variant, arch: str, folder: Path) -> list[str]:
    """Opcodes in the order of their addresses."""
    tool, environment = DISASSEMBLER
    file = folder / f"{hash((variant, arch)):x}.cubin"
    file.write_bytes(compiled(variant, arch).cubin)
    done = subprocess.run([tool, "-sass", file], env=environment, capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", done.stdout, re.MULTILINE)


@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
def test_no_kernel_reads_a_variable_of_its_source(tmp_path):
    """Their addresses are in constant bank 4. So bench/machine_code.py need not compare them."""
    tool, environment = DISASSEMBLER
    for variant in one_of_each_source():
        file = tmp_path / "kernels.cubin"
        file.write_bytes(compiled(variant, "90a").cubin)
        done = subprocess.run([tool, "-sass", file], env=environment, capture_output=True, text=True, check=True)
        assert "c[0x0]" in done.stdout and "c[0x4]" not in done.stdout, variant.source


def machine_code_problems(variant, arch: str, folder: Path) -> list[str]:
    opcodes = instructions(variant, arch, folder)
    counts = Counter(opcode.split(".")[0] for opcode in opcodes)
    macros = dict(variant.macros)
    if macros.get("TF32") == "1":
        expected, absent = ("HMMA", "LDGSTS"), ("HGMMA",)
        assert {o for o in opcodes if o.startswith("HMMA")} == {"HMMA.1688.F32.TF32"}
    elif macros["ELEMENT"] == "float":
        expected, absent = ("FFMA", "LDGSTS"), ("HMMA", "HGMMA")  # products of fp32, not of TF32
    elif "WGMMA" in macros:
        gathers = () if macros.get("GATHER") == "0" else ("LDGSTS",)
        expected, absent = ("HGMMA", "UTMALDG", *gathers), ("HMMA",)
        assert (macros.get("CLUSTER_CTAS") == "2") == ("UTMALDG.3D.MULTICAST" in opcodes)
        if macros.get("CLUSTER_CTAS") != "2":  # stores to a cluster's shared memory are illegal here
            absent = (*absent, "STAS", "UCGABAR_ARV", "UCGABAR_WAIT")
    else:
        expected, absent = ("HMMA", "LDGSTS", "LDSM"), ("HGMMA",)
        assert {o for o in opcodes if o.startswith("HMMA")} == {"HMMA.16816.F32.BF16"}
    found = [f"no {opcode}" for opcode in expected if not counts[opcode]]
    found += [opcode for opcode in absent if counts[opcode]]
    product = next(opcode for opcode in PRODUCTS if counts[opcode])
    places = [i for i, opcode in enumerate(opcodes) if opcode.startswith(product)]
    if product != "FFMA":  # which epilogues have as well
        main_loop = opcodes[places[0] : places[-1] + 1]
        found += [f"{opcode} among the products" for opcode in main_loop if opcode.startswith(("LDL", "STL"))]
        found += [opcode for opcode in opcodes if opcode.startswith("MEMBAR") and not opcode.endswith("CTA")]
    found += [
        opcode for opcode in opcodes if opcode.startswith(("ATOMG", "RED.", "REDG")) and macros.get("ACCUMULATE") == "1"
    ]
    return [f"{variant.name} for sm_{arch}: {problem}" for problem in found]


@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_machine_code_has_the_tensor_cores_and_neither_spills_nor_fences_among_the_products(arch, tmp_path):
    def gemms(dtypes, orders):
        every = all_variants.variants(dtypes, orders, limits=LIMITS[arch], tf32=True)
        return [v for v in every if v.entry and v.macros]

    variants = gemms(("bfloat16",), ("row", "transposed"))
    variants += [
        v for v in accumulating(arch) if dict(v.macros)["ELEMENT"] == "bf16" and ("ALIGNED", "0") not in v.macros
    ]
    if arch == "80":
        variants += gemms(("float32",), ("row", "transposed"))
    with ThreadPoolExecutor(2) as pool:
        checked = pool.map(lambda v: machine_code_problems(v, arch, tmp_path), dict.fromkeys(variants))
        found = [problem for problems in checked for problem in problems]
    assert not found, "\n".join(found)
