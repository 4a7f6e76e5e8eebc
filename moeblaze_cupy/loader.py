"""Kernel sources to kernels and their launches: the only user of `cupy.RawModule`.

A kernel is named by its source file, its entry and its JIT constants. CuPy keeps the compiled cubins on
disk (`CUPY_CACHE_DIR`, else ~/.cupy/kernel_cache); its key does not see included headers, so a digest of
every kernel source goes into the options.
"""

import functools
import hashlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeblaze_cupy import gemm_config, launch_config, overlapping_launch, params, router_config
from moeblaze_cupy.params import source_folder as source_folder  # for whoever reads the kernels
from moeblaze_cupy.structures import FORMS

ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}
SELECTIONS = ("selection.cu", "pairs.cu", "capacity.cu", "balance.cu", "clear.cu")
SHAPE_INDEPENDENT = (
    *("dispatch.cu", "bound_slots.cu", "router_sums.cu", "aggregation.cu", "slots.cu", "wgrad_parts.cu", "pull.cu"),
    "push.cu",
    *("quantize.cu", "saved_fp8.cu", "square_tiles.cu", "rank_experts.cu"),
    *SELECTIONS,
)
EPILOGUES = {"up_fwd": "ACTIVATE", "down_fwd": "STORE", "down_bwd": "ACTIVATE_BWD", "up_bwd": "STORE"}
IMPLIED_MACROS = (
    *("ENTRY", "MMA", "WGMMA", "TILE_COLUMNS", "CONSTANTS", "EXPERT_SCALES"),
    *("BK", "PRODUCER_REGISTERS", "CONSUMER_REGISTERS", "TILE_BYTES", "SPARE_BYTES"),
)  # by the others
EPILOGUES_SM90 = {"ACTIVATE": "ActivateRows", "STORE": "StoreRows", "ACTIVATE_BWD": "ActivateBwdRows"}

_lock = threading.Lock()
_kernels: dict[tuple[int, "Variant"], "_Kernel"] = {}
_usable: Any = None  # CuPy, from when it has found a device


@dataclass(frozen=True)
class Variant:
    """One compiled entry: source file, entry name, JIT constants."""

    source: str
    entry: str
    macros: tuple[tuple[str, str], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # every launch looks its kernel up
        object.__setattr__(self, "_hash", hash((self.source, self.entry, self.macros)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def name(self) -> str:
        return f"{self.entry} {self.constants}".rstrip()

    @property
    def constants(self) -> str:
        """The JIT constants as text, but for those that others imply."""
        return " ".join(f"{k.lower()}={v}" for k, v in self.macros if k not in IMPLIED_MACROS)


@functools.cache
def entry(source: str, name: str) -> Variant:
    """An entry of a source without JIT constants."""
    return Variant(source, name)


def gathers(entry: str) -> bool:
    """Whether a grouped GEMM's left operand is read through expert_token_indices."""
    return EPILOGUES[entry] != "STORE"


def k_segments(entry: str, gated: bool, interleaved: bool = False) -> int:
    """Into how many segments a grouped GEMM divides what it sums over.

    up_bwd of a gated layer sums over gate's columns, then over up's. Interleaved columns are one segment.
    """
    return 2 if entry == "up_bwd" and gated and not interleaved else 1


def is_split(entry: str, gated: bool) -> bool:
    """Whether half of a grouped GEMM's tile is gate and half is up, side by side or interleaved."""
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
    square: bool = False,
    pushes: bool = False,
    summed: str | None = None,
) -> Variant:
    """The grouped GEMM or weight gradient of one step; `transposed`: the weight is stored (E, columns, rows).

    stored_y_swi: down_bwd reads the y_swi of forward. clusters: 2-CTA clusters with TMA multicast of the weight, on
    Hopper. to_tokens: rows of Hopper's down_fwd and up_bwd go to their tokens, where k = 1, and never in clusters.
    accumulate: the dtype of the buffer that a weight gradient is added to, if it is. split_k: a weight gradient of
    Hopper's is float32 sums over parts of each expert's rows, whatever these are added to later. interleaved: gate and
    up columns alternate in w1 and in the first layer. bias: the dtype of what a product in forward adds, if it does.
    weights_on_input: up_fwd and down_bwd scale a and b by the row's router weight; up_fwd then adds no bias.
    fp8: the operands of a grouped GEMM on Hopper are e4m3, the weight contiguous along what is summed over.
    fp8_saved: up_fwd and down_bwd of Hopper's keep and read the first layer in e4m3.
    square: Hopper's tiles are square. Without effect on weight gradients that are accumulated or take split-K, on
    down_bwd, on up_fwd but for interleaved columns, with fp8, fp8_saved or clusters, and where rows go to tokens.
    pushes: rows that go to tokens go to the memory of the GPUs that have these.
    summed: the dtype of the sum of this GPU's weight gradient and those of others, on Hopper.
    """
    form = FORMS[activation]
    gated = form.gated
    half = "fp16" if dtype == "float16" else "bf16"
    macros: dict[str, str | int] = {"ENTRY": entry, "ELEMENT": ELEMENTS[dtype]}
    if tier == "sm80":
        macros |= {"MMA": f"mma_{half}", "ALIGNED": int(aligned), "STAGES": stages}
    else:
        macros |= {"WGMMA": f"wgmma_{half}"}
    forward = entry.endswith("_fwd")
    epilogue = EPILOGUES.get(entry)
    if epilogue is None:
        gathers_p = (entry == "up_wgrad") != transposed  # x is P of up_wgrad, grad_out is Q of down_wgrad
        macros |= {"GATHER_P": int(gathers_p), "GATHER_Q": int(not gathers_p)}
        if tier == "sm90":
            accumulate = None if split_k else accumulate
            macros |= {
                "SPLIT_K": int(split_k),
                **(gemm_config.square_constants(152) if square and not split_k and accumulate is None else {}),
            }
            if summed is not None:
                macros |= {"OTHERS": 1}
        out = "float32" if macros.get("SPLIT_K") else accumulate or summed or dtype
        macros |= {"ACCUMULATE": int(accumulate is not None), "OUT": ELEMENTS[out]}
        return _variant(f"grouped_wgrad_{tier}.cu", entry, macros)
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
        "TILE_COLUMNS": gemm_config.tile_columns(tier, is_split(entry, gated)),
        "WEIGHTS_ON_INPUT": int(weights_on_input and epilogue != "STORE"),
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
        }
        if pushes and to_tokens:
            macros |= {"PUSHES": 1}
        if fp8_saved and epilogue != "STORE":
            macros |= {"FP8_SAVED": 1}
        if square and not (fp8 or "FP8_SAVED" in macros or macros["CLUSTER_CTAS"] == 2):
            macros |= gemm_config.square_product_constants(name)
    if fp8:
        scales = 2 if gated and entry.startswith("up") else 1
        macros |= {"WGMMA": "wgmma_e4m3", "OPERAND": "e4m3", "B_K_CONTIGUOUS": 1, "EXPERT_SCALES": scales}
        macros |= gemm_config.fp8_constants(gathers(entry), to_tokens)
    return _variant(f"grouped_gemm_{tier}.cu", entry, macros)


@functools.cache
def bias_variant(dtype: str, aligned: bool, bias: str, out: str) -> Variant:
    """The gradient of a bias. dtype: of the rows that are summed. bias: of the bias itself. out: of the gradient."""
    types = {"ELEMENT": ELEMENTS[dtype], "BIAS": ELEMENTS[bias], "OUT": ELEMENTS[out]}
    return _variant("bias_bwd.cu", "bias_bwd", {"ENTRY": "bias_bwd", **types, "ALIGNED": int(aligned)})


def router_variant(
    entry: str, config: router_config.RouterConfig, *, dtype: str, score: str, renormalize: bool, **macros: str | int
) -> Variant:
    """ "router_forward" or "router_backward" for a configuration and the options that are compiled in.

    Where a kernel does not hold whole rows, `values` of the configuration counts for nothing.
    """
    common: dict[str, str | int] = {
        "ELEMENT": ELEMENTS[dtype],
        "LANES": config.lanes,
        "VALUES": config.values,
        "THREADS": config.threads,
        "ALIGNED": int(config.aligned),
        "FULL": int(config.full),
        "SCORE": score.upper(),
        "RENORMALIZE": int(renormalize),
    }
    return _variant(f"{entry}.cu", entry, common | macros)


def _variant(source: str, entry: str, macros: Mapping[str, str | int]) -> Variant:
    return Variant(source, entry, tuple((k, str(v)) for k, v in macros.items()))


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
) -> list[Variant]:
    """Every module that callers with these dtypes, weight memory orders and activations can need, of any sizes.

    accumulates: also those that add weight gradients to sums in float32 or the weights' dtype. Of sizes that are not
    multiples of 8 (`aligned` False) whole panels of 256 columns may take kernels for those that are, too.
    gate_ups: "halves", "interleaved" or both. biases: "weights" for biases in the weights' dtype, "float32", None for
    layers without, or several of these. weights_on: "output", "input" or both.
    fp8: also the products of precision="fp8", which bfloat16 layers with gate_up="halves" have on Hopper.
    fp8_saved: also those of save="fp8".
    """
    found = dict.fromkeys(Variant(source, "") for source in SHAPE_INDEPENDENT)
    entries = (*EPILOGUES, "down_wgrad", "up_wgrad")
    for dtype, order, activation, is_aligned, entry, gate_up, bias in itertools.product(
        dtypes, orders, activations, aligned, entries, gate_ups, biases
    ):
        bias_dtype = dtype if bias == "weights" else bias
        config = gemm_config.gemm(dtype, is_aligned, False, limits)
        weights_dtypes = dict.fromkeys(("float32", dtype)) if entry == "down_fwd" else ("float32",)
        totals = (None, *dict.fromkeys(("float32", dtype))) if accumulates and entry.endswith("_wgrad") else (None,)
        either, on_input = (False, True), [place == "input" for place in weights_on]
        takes_fp8 = config.tier == "sm90" and dtype == "bfloat16" and gate_up == "halves" and entry in EPILOGUES
        plain_and_e4m3, plain_and_saved = either[: 1 + (fp8 and takes_fp8)], either[: 1 + fp8_saved]
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
        ) in itertools.product(
            weights_dtypes, totals, either, either, either, either, on_input, plain_and_e4m3, plain_and_saved, either
        ):
            if stored_y_swi and (weights_on_input or e4m3 or in_fp8):  # then down_bwd reads no y_swi
                continue
            variant = gemm_variant(
                entry,
                dtype=dtype,
                activation=activation,
                transposed=order == "transposed",
                aligned=is_aligned,
                weights_dtype=weights_dtype,
                stages=config.stages,
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
            )
            found[variant] = None
        if bias_dtype is not None:
            outs = dict.fromkeys((bias_dtype, "float32", dtype) if accumulates else (bias_dtype,))
            found |= dict.fromkeys(bias_variant(dtype, is_aligned, bias_dtype, out) for out in outs)
    return list(found)


def sources() -> list[str]:
    """Names of the kernel sources, without headers."""
    return sorted(name for name in os.listdir(source_folder()) if name.endswith(".cu"))


@functools.cache
def source_digest() -> str:
    """Digest over every kernel source and header."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(source_folder())):
        if name.endswith((".cu", ".cuh")):
            with open(os.path.join(source_folder(), name), "rb") as file:
                digest.update(name.encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:16]


def has_line_info() -> bool:
    """Whether kernels are compiled for Nsight Compute's source view, which MOEBLAZE_LINEINFO asks for."""
    return os.environ.get("MOEBLAZE_LINEINFO", "0") not in ("", "0")


def source(variant: Variant) -> str:
    """What is compiled: the source file, and after it assertions on the layout of its parameters.

    Both have names for the compiler's messages. With line information that of the file is its path, by which Nsight
    Compute and cuda-gdb find it.
    """
    path = os.path.join(source_folder(), variant.source)
    with open(path) as file:
        code = file.read()
    name = path.replace("\\", "/") if has_line_info() else variant.source
    structs = {table.struct: table for table in params.tables(variant.source, variant.macros).values()}
    checks = "".join(table.assertions() for table in structs.values())
    return f'#line 1 "{name}"\n{code}\n#line 1 "<parameters of {variant.source}>"\n{checks}'


def options(variant: Variant) -> tuple[str, ...]:
    """NVRTC options of a variant, without the architecture."""
    constants = launch_config.kernel_constants(variant.source) | dict(variant.macros)  # e4m3 has a few of its own
    defines = tuple(f"-D{key}={value}" for key, value in constants.items())
    # CuPy appends -arch=sm_90; beside it NVRTC 12.9 and later let the "a" of this one stand
    arch = ("-arch=sm_90a",) if variant.source.endswith("_sm90.cu") else ()
    line_info = ("-lineinfo",) if has_line_info() else ()
    return ("-std=c++17", "-I" + source_folder(), "-DSOURCE_DIGEST=0x" + source_digest(), *defines, *arch, *line_info)


def import_cupy() -> Any:
    """CuPy with a usable device. Raises RuntimeError saying what is missing and what to install or update."""
    global _usable
    if _usable is not None and sys.modules.get("cupy") is _usable:
        return _usable
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "moeblaze_cupy: CuPy: expected an importable cupy for CUDA arrays "
            f'(in a checkout: pip install -e ".[cuda13]" or ".[cuda12]"), got {error!r}'
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            "moeblaze_cupy: CUDA driver: expected a GPU and a driver that supports CUDA "
            f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}, got {error}"
        ) from error
    if count == 0:
        raise RuntimeError("moeblaze_cupy: GPU: expected at least one CUDA device, got 0")
    _usable = cupy
    return cupy


def device_limits(device: int) -> launch_config.DeviceLimits:
    """What launch configurations depend on. MOEBLAZE_TIER is read here alone, where a layout is new."""
    return _device_limits(device, os.environ.get("MOEBLAZE_TIER"))


@functools.cache
def _device_limits(device: int, forced_tier: str | None) -> launch_config.DeviceLimits:
    runtime = import_cupy().cuda.runtime

    def attribute(number: int) -> int:  # a cudaDeviceAttr
        return int(runtime.deviceGetAttribute(number, device))

    compute_capability = 10 * attribute(75) + attribute(76)
    return launch_config.DeviceLimits(
        compute_capability=compute_capability,
        multiprocessors=attribute(16),
        shared_bytes_per_block=attribute(97),
        shared_bytes_per_multiprocessor=attribute(81),
        tier=launch_config.tier(compute_capability, forced_tier),
    )


@functools.cache
def _module(name: str, macros: tuple[tuple[str, str], ...]) -> Any:
    variant = Variant(name, "", macros)
    return import_cupy().RawModule(code=source(variant), options=options(variant))


class _Thread(threading.local):
    """What one thread keeps: the devices whose contexts it has."""

    def __init__(self) -> None:
        self.bound: set[int] = set()


_thread = _Thread()


class _Kernel:
    """A compiled entry on one device, and the dynamic shared memory it may be launched with."""

    def __init__(self, device: int, variant: Variant) -> None:
        self.compute_capability = device_limits(device).compute_capability  # raises for a GPU that is too old
        self.name = variant.name
        self.function = _module(variant.source, variant.macros).get_function(variant.entry)
        self.loaded = self.function.kernel  # compiled here, and kept: it holds the module that `pointer` is in
        self.pointer = self.loaded.ptr
        self.shared_bytes = launch_config.DEFAULT_SHARED_BYTES

    def launcher(self, geometry: tuple[int, ...], overlaps: bool) -> Callable[[int, int, int], None]:
        """A function of a stream, a pointer to the list of arguments, and 0, for threads with the device's context.

        geometry: grid and block, three numbers each, and bytes of shared memory. overlaps: with the launch before it,
        where device and driver can.
        """
        cuda = sys.modules["cupy"].cuda
        if overlaps and overlapping_launch.supported(self.compute_capability, cuda.runtime.driverGetVersion()):
            return overlapping_launch.launcher(self.pointer, geometry)
        # CuPy's binding of the driver: a call of CuPy's RawKernel would make a NumPy scalar of every argument.
        return functools.partial(cuda.driver.launchKernel, self.pointer, *geometry)

    def refused(self, geometry: tuple[int, ...], error: RuntimeError) -> RuntimeError:
        """The driver's error with the kernel's name. geometry: grid, block and bytes of shared memory."""
        return RuntimeError(
            f"moeblaze_cupy: {self.name}: expected a launch of grid {geometry[:3]}, {geometry[3]} threads and "
            f"{geometry[6]} bytes of shared memory to succeed, got {error}"
        )

    def allow(self, shared_bytes: int) -> None:
        """Raises the limit. It belongs to the function, not to a launch, so it must never go down again."""
        if shared_bytes > self.shared_bytes:
            self.function.max_dynamic_shared_size_bytes = shared_bytes
            self.shared_bytes = shared_bytes


def kernel(device: int, variant: Variant, shared_bytes: int = 0) -> _Kernel:
    """The launchable kernel on a device (which must be current), compiled at first use."""
    found = _kernels.get((device, variant))
    if found is None or found.shared_bytes < shared_bytes:
        with _lock:
            found = _kernels.get((device, variant)) or _kernels.setdefault((device, variant), _Kernel(device, variant))
            found.allow(shared_bytes)
    return found


def bind_context(device: int) -> None:
    """Makes the context of the current device current to this thread: autograd's threads have only named the device."""
    if device not in _thread.bound:
        runtime = import_cupy().cuda.runtime
        runtime.setDevice(device)
        runtime.memGetInfo()
        _thread.bound.add(device)


def clear(pointer: int, nbytes: int, stream: int) -> None:
    """Zeroes, in the stream's order."""
    import_cupy().cuda.runtime.memsetAsync(pointer, 0, nbytes, stream)


def precompile(variant: Variant) -> float:
    """Compiles one variant for the current device, or takes it from the disk cache; returns the seconds it took."""
    start = time.perf_counter()
    import_cupy()
    _module(variant.source, variant.macros).compile()
    return time.perf_counter() - start
