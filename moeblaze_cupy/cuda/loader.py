"""Makes kernels and their launches from kernel sources; it is the only user of `cupy.RawModule`.

A kernel is named by its source file, its entry and its JIT constants. CuPy keeps the compiled cubins on
disk (`CUPY_CACHE_DIR`, else ~/.cupy/kernel_cache). Its key does not see included headers, so a digest of those that
a source includes goes with it. `compile_ahead` has other threads compile what a call will launch.
"""

import contextlib
import functools
import hashlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from moeblaze_cupy.cuda import capture, launch_config, overlapping_launch
from moeblaze_cupy.cuda import structs as params
from moeblaze_cupy.cuda.structs import source_folder as source_folder  # a name for readers of the kernels
from moeblaze_cupy.cuda.structs import source_paths as source_paths

ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}
IMPLIED_MACROS = (
    *("ENTRY", "MMA", "WGMMA", "TILE_COLUMNS", "CONSTANTS", "EXPERT_SCALES"),
    *("BK", "PRODUCER_REGISTERS", "CONSUMER_REGISTERS", "TILE_BYTES", "SPARE_BYTES"),
)  # implied by the other constants

NOTHING = 'extern "C" __global__ void nothing() {}\n'
SPLIT_COMPILE = "-split-compile=4"  # threads for the entries of a source that has many; NVRTC 13 takes it

_lock = threading.Lock()
_one_at_a_time = threading.Lock()  # for what is done once and kept, so that threads do not all do it
_kernels: dict[tuple[int, "Variant"], "_Kernel"] = {}
_modules: dict[tuple[str, tuple[tuple[str, str], ...]], "_Module"] = {}
_ahead: deque[tuple[int, "_Module"]] = deque()  # requests of `compile_ahead` that no thread has begun
_usable: Any = None  # CuPy, once it has found a device


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
        """Returns the JIT constants as text, except those that others imply."""
        return " ".join(f"{k.lower()}={v}" for k, v in self.macros if k not in IMPLIED_MACROS)


@functools.cache
def entry(source: str, name: str) -> Variant:
    """Returns the variant of an entry whose source has no JIT constants."""
    return Variant(source, name)


def variant_of(source: str, entry: str, macros: Mapping[str, str | int]) -> Variant:
    """Returns the variant of an entry whose source has JIT constants."""
    return Variant(source, entry, tuple((k, str(v)) for k, v in macros.items()))


@functools.cache
def source_digest(source: str) -> str:
    """Returns a digest over a kernel source and the headers that it includes, directly or through others."""
    paths, names, digest = source_paths(source_folder()), [source], hashlib.sha256()
    for name in names:  # the list grows in the loop
        code = params.source_text(paths[name])
        digest.update(f"{name}\0{code}\0".encode())
        included = re.findall(r'^\s*#\s*include\s+"([^"]+)"', code, re.MULTILINE)
        names += [found for found in dict.fromkeys(included) if found not in names]
    return digest.hexdigest()[:16]


def has_line_info() -> bool:
    """Returns whether MOEBLAZE_LINEINFO asks for kernels compiled for Nsight Compute's source view."""
    return os.environ.get("MOEBLAZE_LINEINFO", "0") not in ("", "0")


def source(variant: Variant) -> str:
    """Returns the text to compile: the source file, then assertions on the layout of its parameters.

    All variants of a source are given the same macros, and an option that is off is 0. A missing macro is an error: the
    pragma makes one of #if with an undefined name, which C++ takes for 0.

    File and assertions have names for the compiler's messages. With line information the file's name is its path, by
    which Nsight Compute and cuda-gdb find it.
    """
    path = source_paths(source_folder())[variant.source]
    code = params.source_text(path)
    name = path.replace("\\", "/") if has_line_info() else variant.source
    structs = {table.struct: table for table in params.tables(variant.source, variant.macros).values()}
    checks = "".join(table.assertions() for table in structs.values())
    return f'#pragma nv_diag_error 193\n#line 1 "{name}"\n{code}\n#line 1 "<parameters of {variant.source}>"\n{checks}'


def kernel_constants(source: str) -> dict[str, int]:
    """Returns the constants that every variant of a kernel source gets as -DNAME=value.

    They are those that the configuration of its feature states: of kernels_cu/rows/pull.cu, in moeblaze_cupy/rows/.
    """
    feature = os.path.basename(os.path.dirname(source_paths(source_folder())[source]))
    config: Any = launch_config if feature == "common" else import_module(f"moeblaze_cupy.{feature}.config")
    return dict(config.CONSTANTS[source])


def options(variant: Variant) -> tuple[str, ...]:
    """Returns the NVRTC options of a variant, without the architecture."""
    return (*_common_options(variant), *(f"-D{name}={value}" for name, value in _constants(variant).items()))


def _constants(variant: Variant) -> dict[str, str | int]:
    constants = kernel_constants(variant.source) | dict(variant.macros)  # e4m3 has a few of its own
    return {"SOURCE_DIGEST": "0x" + source_digest(variant.source), **constants}


def _common_options(variant: Variant) -> tuple[str, ...]:
    """Returns the options that variants have in common, one list for each tier."""
    # CuPy appends -arch=sm_90; beside it NVRTC 12.9 and later let the "a" of this one stand
    arch = ("-arch=sm_90a",) if variant.source.endswith("_sm90.cu") else ()
    line_info = ("-lineinfo",) if has_line_info() else ()
    folders = dict.fromkeys(os.path.dirname(path) for path in source_paths(source_folder()).values())
    includes = [f"-I{folder}" for folder in sorted(folders)]
    return ("-std=c++17", *includes, *arch, *line_info)


def import_cupy() -> Any:
    """Returns CuPy with a usable device. Raises RuntimeError saying what is missing and what to install or update."""
    global _usable
    if _usable is not None and sys.modules.get("cupy") is _usable:
        return _usable
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "moeblaze_cupy: CuPy: expected an importable cupy for CUDA arrays "
            f'(pip install "moeblaze-cupy[cuda13]" or "moeblaze-cupy[cuda12]"), got {error!r}'
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
    """Returns the device's limits for launch configurations. MOEBLAZE_TIER is read here alone, for a new layout."""
    return _device_limits(device, os.environ.get("MOEBLAZE_TIER"))


def check_forced_tier() -> None:
    """Raises ValueError for a MOEBLAZE_TIER that no GPU has, where NumPy takes the place of kernels."""
    launch_config.check_forced_tier(os.environ.get("MOEBLAZE_TIER"))


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


class _Module:
    """A compiled source. Whoever needs it first compiles it, and others wait."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.lock = variant, threading.Lock()
        self.devices: set[int] = set()  # devices on which it is loaded
        self._raw: Any = None

    def on(self, device: int) -> Any:
        """Returns a `cupy.RawModule`, compiled or from the disk, loaded on this device, which is the current one."""
        with self.lock:
            if self._raw is None:
                with _one_at_a_time:
                    self._raw = self._new()
            if device not in self.devices:
                self._raw.compile()
                self.devices.add(device)
            return self._raw

    def _new(self) -> Any:
        """Puts constants into the source, as CuPy compiles an empty file for its cache for each new list of options."""
        cupy, variant = import_cupy(), self.variant
        defines = "".join(f"#define {name} {value}\n" for name, value in _constants(variant).items())
        options = _common_options(variant)
        if not variant.macros and cupy.cuda.nvrtc.getVersion() >= (13, 0):
            options = (*options, SPLIT_COMPILE)
        _prepare(options)
        return cupy.RawModule(code=defines + source(variant), options=options)


@functools.cache
def _prepare(options: tuple[str, ...]) -> None:
    """Makes CuPy compile its empty file for these options, which it does even where the cubin is on the disk.

    Else every thread would do so that comes before the first one has ended.
    """
    import_cupy().RawModule(code=NOTHING, options=options).compile()


def _module(variant: Variant) -> _Module:
    key = variant.source, variant.macros
    with _lock:
        return _modules.get(key) or _modules.setdefault(key, _Module(variant))


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_ahead(device: int, variants: Iterable[Variant]) -> bool:
    """Makes other threads compile and load what the device still lacks, in this order.

    Returns at once, and says whether anything was missing.

    A launch compiles its kernel itself if no thread has begun, else it waits for that thread. Errors come there, too.
    """
    modules = dict.fromkeys(map(_module, variants))
    new = [(device, module) for module in modules if device not in module.devices]
    _ahead.extend(new)
    for _ in range(min(len(new), cores())):
        threading.Thread(target=_help, name="moeblaze_cupy compiles").start()
    return bool(new)


def _help() -> None:
    """Compiles until nothing is left, or the program ends."""
    capture.allow_unsafe_calls()
    while threading.main_thread().is_alive():
        try:
            device, module = _ahead.popleft()
        except IndexError:
            return
        if not module.lock.locked():
            with contextlib.suppress(Exception):  # the launch that needs it raises it
                _thread.bound.clear()  # the device of the last request is current, which may be another one
                bind_context(device)
                module.on(device)


class _Thread(threading.local):
    """The state of one thread: the devices whose contexts it has."""

    def __init__(self) -> None:
        self.bound: set[int] = set()


_thread = _Thread()


class _Kernel:
    """A compiled entry on one device, and the dynamic shared memory it may be launched with."""

    def __init__(self, device: int, variant: Variant) -> None:
        self.compute_capability = device_limits(device).compute_capability  # raises for a GPU that is too old
        self.name = variant.name
        self.function = _module(variant).on(device).get_function(variant.entry)
        self.loaded = self.function.kernel  # compiled here, and kept: it holds the module that `pointer` is in
        self.pointer = self.loaded.ptr
        self.shared_bytes = launch_config.DEFAULT_SHARED_BYTES

    def launcher(self, geometry: tuple[int, ...], overlaps: bool) -> Callable[[int, int, int], None]:
        """Returns a function of a stream, a pointer to the argument list, and 0, for threads with the device's context.

        geometry: grid and block, three numbers each, and bytes of shared memory. overlaps: it may overlap with the
        launch before it, if device and driver can do that.
        """
        cuda = sys.modules["cupy"].cuda
        if overlaps and overlapping_launch.supported(self.compute_capability, cuda.runtime.driverGetVersion()):
            return overlapping_launch.launcher(self.pointer, geometry)
        # CuPy's binding of the driver: a call of CuPy's RawKernel would make a NumPy scalar of every argument.
        return functools.partial(cuda.driver.launchKernel, self.pointer, *geometry)

    def refused(self, geometry: tuple[int, ...], error: RuntimeError) -> RuntimeError:
        """Returns the driver's error with the kernel's name. geometry: grid, block and bytes of shared memory."""
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
    """Returns the launchable kernel on a device (which must be current), compiled at first use."""
    found = _kernels.get((device, variant))
    if found is None:
        made = _Kernel(device, variant)  # not under the lock: other threads compile other kernels meanwhile
        with _lock:
            found = _kernels.setdefault((device, variant), made)
    if found.shared_bytes < shared_bytes:
        with _lock:
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


def is_capturing(stream: int) -> bool:
    """Returns whether a graph is being captured from this stream of the current device."""
    return bool(import_cupy().cuda.runtime.streamIsCapturing(stream))


def precompile(variant: Variant) -> float:
    """Compiles one variant for the current device, or takes it from the disk cache; returns the seconds it took."""
    start = time.perf_counter()
    _module(variant).on(import_cupy().cuda.runtime.getDevice())
    return time.perf_counter() - start
