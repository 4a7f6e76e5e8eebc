"""The kernel sources and the host code that launches them, without a GPU: CuPy is replaced by a stand-in whose arrays
lie in host memory and whose modules the emulator compiles with g++, and the public functions run on it.

Launches wait in a stream until `synchronize`, so their modules compile side by side, and host code that looked at
device data would see poison.
"""

import functools
import os
import platform
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cases import CASES, Case, make_ids, make_inputs, relative_error
from emulator import COMPILER, KERNELS, build
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb
from moeblaze_cupy import launch_config, loader, reference
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.structures import ACTIVATIONS, GRADIENTS, SAVE_POLICIES, is_gated

if COMPILER is None or platform.system() != "Linux":
    pytest.skip("the emulator needs Linux and g++", allow_module_level=True)

# Few multiprocessors, so that small problems have every multiprocessor busy.
THREE_STAGES = DeviceLimits(90, 2, 232448, 233472)
TWO_STAGES = DeviceLimits(80, 2, 166912, 167936)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
STREAM = 0x57
ALIGNMENT = 256  # of device allocations
MARGIN = 256  # bytes of NaN on either side of an input: what is read out of bounds shows


class DeviceArray(np.ndarray):
    """What the library sees of a CuPy array."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data if self.size else 0)

    @property
    def device(self):
        return SimpleNamespace(id=0)


DeviceArray.__name__, DeviceArray.__module__ = "ndarray", "cupy"


@dataclass(frozen=True)
class Allocation:
    """Device memory; alive as long as an array in it is."""

    start: int
    nbytes: int
    writable: bool
    memory: weakref.ref

    def argument(self, pointer: int):
        """(array, byte offset) for the emulator."""
        memory = self.memory()
        skip = self.start - memory.ctypes.data
        whole = memory[skip : skip + self.nbytes]
        whole.flags.writeable = self.writable
        return whole, pointer - self.start


@functools.cache
def _compilers():
    return ThreadPoolExecutor(os.cpu_count())


@functools.cache
def _compiled(source: str, macros: tuple):
    return _compilers().submit(build, source, dict(macros))


class Module:
    """cupy.RawModule."""

    def __init__(self, device, code: str, options: tuple):
        self.device = device
        (source,) = (path.name for path in KERNELS.glob("*.cu") if path.read_text() == code)
        macros = (option[2:].split("=") for option in options if option.startswith("-D"))
        self.compiled = _compiled(source, tuple((name, value) for name, value in macros))

    def get_function(self, name: str):
        return Function(self, name)


class Function:
    def __init__(self, module: Module, name: str):
        self.module, self.name = module, name
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid, block, args, *, shared_mem, stream):
        device = self.module.device
        assert stream.ptr == STREAM
        assert shared_mem <= self.max_dynamic_shared_size_bytes <= device.limits.shared_bytes_per_block
        alive = [(allocation, allocation.memory()) for allocation in device.allocations]
        device.queue.append((self, grid, block, args, shared_mem, [a for a in alive if a[1] is not None]))


class Device:
    def __init__(self, limits: DeviceLimits, seed: int = 0):
        """A `seed` other than 0 shuffles the order of blocks and threads."""
        self.limits, self.seed = limits, seed
        self.allocations: list[Allocation] = []
        self.queue: list = []
        self.launched: list[str] = []

    def allocate(self, shape, dtype, margin: int = 0, writable: bool = True) -> DeviceArray:
        """Floats are NaN, integers neither an index nor the -1 of an absent slot."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(nbytes + 2 * margin + ALIGNMENT, 0x99 if dtype.kind == "i" else 0xFF, np.uint8)
        start = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.allocations.append(Allocation(start, nbytes + 2 * margin, writable, weakref.ref(memory)))
        skip = start - memory.ctypes.data + margin
        return memory[skip : skip + nbytes].view(dtype).reshape(shape).view(DeviceArray)

    def put(self, array, offset: int = 0):
        """A host array, or tuple of them, in its memory order, `offset` elements after an aligned address."""
        if isinstance(array, tuple):
            return tuple(self.put(a, offset) for a in array)
        if array.ndim == 3 and array.strides[1] < array.strides[2]:
            return self.put(array.swapaxes(1, 2), offset).swapaxes(1, 2)
        flat = self.allocate((offset + array.size,), array.dtype, MARGIN, writable=False)
        flat[offset:] = array.ravel()
        return flat[offset:].reshape(array.shape)

    def synchronize(self):
        for function, grid, block, args, shared_mem, alive in self.queue:
            module = function.module.compiled.result()

            def argument(value, is_pointer, alive=alive):
                if not is_pointer or value == 0:
                    return value or (None if is_pointer else 0)
                found = [a for a, _ in alive if a.start <= value < a.start + a.nbytes]
                assert len(found) == 1, f"{value:#x} is not in an allocation that is alive"
                return found[0].argument(value)

            arguments = [argument(*pair) for pair in zip(args, module.kernels[function.name], strict=True)]
            module.launch(function.name, grid, block, arguments, shared_mem, self.seed)
            self.launched.append(function.name)
        self.queue.clear()

    def cupy(self):
        limits = self.limits
        attributes = {
            75: limits.compute_capability // 10,
            76: limits.compute_capability % 10,
            16: limits.multiprocessors,
            97: limits.shared_bytes_per_block,
            81: limits.shared_bytes_per_multiprocessor,
        }
        cupy = ModuleType("cupy")
        cupy.empty = lambda shape, dtype: self.allocate(shape, dtype)
        cupy.RawModule = lambda code, options: Module(self, code, options)
        cupy.cuda = SimpleNamespace(
            Device=lambda number: nullcontext(),
            get_current_stream=lambda: SimpleNamespace(ptr=STREAM),
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 1, deviceGetAttribute=lambda number, device: attributes[number]
            ),
        )
        return cupy


@contextmanager
def emulated(limits: DeviceLimits = THREE_STAGES, seed: int = 0):
    device = Device(limits, seed)
    caches = (loader._module, loader.device_limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", device.cupy())
        patch.setenv("MOEBLAZE_TIER", "sm80")  # the emulator has no wgmma
        patch.setattr(loader, "_kernels", {})
        for cache in caches:
            cache.cache_clear()
        try:
            yield device
        finally:
            for cache in caches:
                cache.cache_clear()
