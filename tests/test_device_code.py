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


@pytest.fixture
def device():
    with emulated() as found:
        yield found


def in_float64(values):
    if isinstance(values, tuple):
        return tuple(map(in_float64, values))
    return np.asarray(values).astype(np.float64)


def as_bits(values):
    if isinstance(values, tuple):
        return b"".join(map(as_bits, values))
    return np.ascontiguousarray(values).tobytes()


def same_bits(first, second):
    """Names of the results that differ: none."""
    return [name for name in first if as_bits(first[name]) != as_bits(second[name])] == []


# Relative norms. A value rounded to bf16 carries an error of 0.4 * 2^-8 (root mean square), and the results that are
# rounded most often depend on five such values: a, b, their gradients, a panel's element and the result itself; the
# activation can amplify that of a. fp32 carries the rounding of sums of some 150 terms.
TOLERANCES = {"bfloat16": 1.2 * 2**-8, "float16": 1.2 * 2**-11, "float32": 1e-6}
# The largest error of any one element, in units of TOLERANCES and of the root mean square of the result.
OUTLIER = 10


@dataclass
class Layer:
    """The layer on the device. `inputs` as `make_inputs` returns them, each on the host or already on the device."""

    device: Device
    inputs: tuple
    activation: str = "swiglu"

    def __post_init__(self):
        self.on_device = [a if is_on_device(a) else self.device.put(a) for a in self.inputs]

    def forward(self, save="minimal"):
        x, ids, weights, w1, w2, _ = self.on_device
        return mb.moe_forward(x, ids, weights, w1, w2, activation=self.activation, save=save)

    def backward(self, saved, **options):
        gradients = vars(mb.moe_backward(self.on_device[5], saved, **options))
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def run(self, save="minimal", **options):
        """Results by name."""
        out, saved = self.forward(save)
        results = {"out": out} if saved is None else {"out": out, **self.backward(saved, **options)}
        self.device.synchronize()
        return results

    def assert_matches_reference(self, results):
        x, ids, weights, w1, w2, grad_out = (a if i == 1 else in_float64(a) for i, a in enumerate(self.inputs))
        out, saved = reference.moe_forward(x, np.asarray(ids), weights, w1, w2, activation=self.activation)
        want = {"out": out, **vars(reference.moe_backward(grad_out, saved))}
        tolerance = TOLERANCES[self.inputs[0].dtype.name]
        inputs = dict(zip(("x", "ids", "weights", "w1", "w2", "out"), self.inputs, strict=True))
        for name, got in results.items():
            assert form(got) == form(inputs[name]), name
            got = in_float64(got)
            assert relative_error(got, want[name]) <= tolerance, name
            exact = np.asarray(want[name])
            scale = np.sqrt(np.mean(exact**2)) if exact.size else 0
            assert np.abs(np.asarray(got) - exact).max(initial=0) <= OUTLIER * tolerance * scale, name


def is_on_device(values):
    return isinstance(values[0] if isinstance(values, tuple) else values, DeviceArray)


def form(values):
    """Shape, dtype and whether the inner dimensions are exchanged in memory."""
    if isinstance(values, tuple):
        return tuple(map(form, values))
    transposed = values.ndim == 3 and values.strides[1] < values.strides[2]
    return values.shape, values.dtype.name, transposed


def is_aligned(case):
    return case.d % 8 == 0 and case.h % 8 == 0


ALIGNED = Case(L=100, k=2, E=8, d=24, h=40)
UNALIGNED = Case(L=100, k=2, E=5, d=31, h=45, order="pair_transposed")

# An expert with more than 128 rows, and d and h on either side of 64 and 128; or d beyond the 256 columns of a panel.
TILES = [
    Case(L=150, k=2, E=3, d=136, h=72, routing="skewed"),
    Case(L=60, k=2, E=3, d=264, h=24, order="pair"),
    Case(L=150, k=2, E=3, d=131, h=67, routing="skewed", order="transposed"),
    Case(L=60, k=2, E=3, d=259, h=19, order="pair_transposed"),
    Case(L=150, k=2, E=3, d=67, h=131, routing="skewed", order="pair"),
    Case(L=60, k=2, E=3, d=259, h=19),
    Case(L=150, k=2, E=3, d=72, h=136, routing="skewed", order="pair_transposed"),
    Case(L=60, k=2, E=3, d=264, h=24, order="transposed"),
]
# The halves of a kernel's variants that compilation time leaves out: fp16 differs from bf16 in one instruction.
TILES_OF = {"bfloat16": TILES, "float32": TILES[:6], "float16": TILES[:2]}


@pytest.mark.parametrize(
    ("dtype", "case"), [pytest.param(t, c, id=f"{t}-{c}") for t, cases in TILES_OF.items() for c in cases]
)
def test_layer_across_tile_boundaries(device, dtype, case):
    layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]))
    layer.assert_matches_reference(layer.run())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_on_the_shared_cases(device, case):
    inputs = make_inputs(case, 0, DTYPES["bfloat16" if is_aligned(case) else "float32"])
    layer = Layer(device, inputs, case.activation)
    results = layer.run()
    layer.assert_matches_reference(results)
    idle = np.setdiff1d(np.arange(case.E), inputs[1])
    for gradient in (results["w2"], *(results["w1"] if isinstance(results["w1"], tuple) else (results["w1"],))):
        assert not np.asarray(gradient)[idle].astype(np.float32).any()  # exact zeros
