"""The kernel sources and the host code that launches them, without a GPU: CuPy is replaced by a stand-in whose arrays
lie in host memory and whose modules the emulator compiles with g++, and the public functions run on it.

Launches wait in a stream until `synchronize`, so their modules compile side by side, and host code that looked at
device data would see poison.
"""

import copy
import ctypes
import functools
import os
import platform
import re
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
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import loader, runtime, tensor_map
from moeblaze_cupy.cuda import structs as params
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.dispatch import config as dispatch_config
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.types import GRADIENTS, SAVE_POLICIES, pair
from tests.cases import CASES, Case, is_marked, make_ids, make_inputs, mark, relative_error
from tests.emulator import COMPILER, EmulatedTensorMap, build

if COMPILER is None or platform.system() != "Linux":
    pytest.skip("the emulator needs Linux and g++", allow_module_level=True)

# Few multiprocessors, so that small problems have every multiprocessor busy.
DEEP_STAGES = DeviceLimits(90, 2, 232448, 233472)
SHORT_STAGES = DeviceLimits(86, 2, 101376, 102400)
A100 = DeviceLimits(80, 2, 166912, 167936)
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
def _compiled(source: str, code: str, macros: tuple):
    return _compilers().submit(build, source, dict(macros), code)


class Module:
    """cupy.RawModule."""

    def __init__(self, device, code: str, options: tuple):
        if code == loader.NOTHING:
            return
        self.device = device
        self.source = re.search(r'^#line 1 "(\w+\.cu)"\n', code, re.MULTILINE)[1]
        defines, pragma, rest = code.partition("#pragma")
        self.macros = tuple(re.findall(r"^#define (\w+) (.*)$", defines, re.MULTILINE))
        self.compiled = _compiled(self.source, pragma + rest, self.macros)

    def compile(self):
        """Its result is asked for at the launches."""

    def get_function(self, name: str):
        return Function(self, name)


class Function:
    def __init__(self, module: Module, name: str):
        self.module, self.name = module, name
        self.params = params.params_of(loader.Variant(module.source, name, module.macros))
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self.kernel = SimpleNamespace(ptr=id(self))
        module.device.functions[id(self)] = self

    def launch(self, grid, block, shared_mem, stream, arguments):
        device = self.module.device
        assert stream == device.stream
        assert shared_mem <= min(self.max_dynamic_shared_size_bytes, device.limits.shared_bytes_per_block)
        (address,) = (ctypes.c_uint64 * 1).from_address(arguments)
        (packed,) = np.frombuffer(ctypes.string_at(address, self.params.size), self.params.dtype)
        values = dict(zip(packed.dtype.names, packed.tolist(), strict=True))
        alive = [(allocation, allocation.memory()) for allocation in device.allocations]
        device.queue.append((self, grid, block, values, shared_mem, [a for a in alive if a[1] is not None]))


class Device:
    def __init__(self, limits: DeviceLimits, seed: int = 0, clusters_at_once: int = 1):
        """A `seed` other than 0 shuffles the order of blocks and threads; as of `Emulated.launch`."""
        self.limits, self.seed, self.clusters_at_once = limits, seed, clusters_at_once
        self.stream, self.capturing = STREAM, False
        self.allocations: list[Allocation] = []
        self.queue: list = []
        self.launched: list[str] = []
        self.functions: dict[int, Function] = {}  # by the driver's pointer

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

    def launch(self, pointer, x, y, z, block, block_y, block_z, shared_mem, stream, arguments, extra):
        assert (block_y, block_z, extra) == (1, 1, 0)
        self.functions[pointer].launch((x, y, z), block, shared_mem, stream, arguments)

    def synchronize(self):
        for function, grid, block, values, shared_mem, alive in self.queue:
            module = function.module.compiled.result()

            def array_at(address, alive=alive):
                if address == 0:
                    return None
                found = [a for a, _ in alive if a.start <= address < a.start + a.nbytes]
                assert len(found) == 1, f"{address:#x} is not in an allocation that is alive"
                return found[0].argument(address)

            table = function.params
            values |= {name: array_at(values[name]) for name in table.pointers}
            for name in table.maps:
                address, described = EmulatedTensorMap.unpack(values[name])
                values[name] = replace(described, **dict(zip(("array", "offset"), array_at(address), strict=True)))
            module.launch(function.name, grid, block, table, values, shared_mem, self.seed, self.clusters_at_once)
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
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            driver=SimpleNamespace(launchKernel=self.launch),
            nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
            runtime=SimpleNamespace(
                getDevice=lambda: 0,
                setDevice=lambda number: None,
                memGetInfo=lambda: None,
                getDeviceCount=lambda: 1,
                driverGetVersion=lambda: 0,  # whose launches do not overlap
                streamIsCapturing=lambda stream: self.capturing,
                deviceGetAttribute=lambda number, device: attributes[number],
                memsetAsync=lambda pointer, value, nbytes, stream: ctypes.memset(pointer, value, nbytes),  # new memory
            ),
        )
        return cupy


def encoded_map(pointer, tensor):
    """tensor_map.encode."""
    dtype, shape, strides, box = tensor
    return EmulatedTensorMap(None, shape, strides, box, itemsize={"uint8": 1, "bfloat16": 2, "float16": 2}[dtype]).pack(
        pointer
    )


@contextmanager
def emulated(limits: DeviceLimits = DEEP_STAGES, seed: int = 0, tier: str = "sm80", clusters_at_once: int = 1):
    device = Device(limits, seed, clusters_at_once)
    caches = (loader._device_limits,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", device.cupy())
        patch.setenv("MOEBLAZE_TIER", tier)
        patch.setattr(tensor_map, "encode", encoded_map)
        patch.setattr(loader, "_kernels", {})
        patch.setattr(loader, "_modules", {})
        patch.setattr(loader, "compile_ahead", lambda device, variants: False)
        for cache in caches:
            cache.cache_clear()
        runtime.forget()
        try:
            yield device
        finally:
            for cache in caches:
                cache.cache_clear()
            runtime.forget()


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


def differences(first, second):
    """Names of the results whose bits differ."""
    return [name for name in first if as_bits(first[name]) != as_bits(second[name])]


# Relative norms. A value rounded to bf16 carries an error of 0.4 * 2^-8 (root mean square), and the results that are
# rounded most often depend on five such values: a, b, their gradients, a panel's element and the result itself; the
# activation can amplify that of a. fp32 carries the rounding of sums of some 150 terms.
TOLERANCES = {"bfloat16": 1.2 * 2**-8, "float16": 1.2 * 2**-11, "float32": 1e-6}
# The largest error of one element, in units of TOLERANCES and of its own size plus the result's root mean square.
OUTLIER = 10


@dataclass
class Layer:
    """The layer on the device. `inputs` as `make_inputs` returns them, each on the host or already on the device."""

    device: Device
    inputs: tuple
    activation: str = "swiglu"
    max_slots: int | None = None

    def __post_init__(self):
        self.on_device = [a if is_on_device(a) else self.device.put(a) for a in self.inputs]

    def forward(self, save="minimal"):
        x, ids, weights, w1, w2, _ = self.on_device
        options = {"activation": self.activation, "save": save, "max_slots": self.max_slots}
        return mb.moe_forward(x, ids, weights, w1, w2, **options)

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
            got, exact = np.asarray(in_float64(got)), np.asarray(want[name])
            assert relative_error(got, exact) <= tolerance, name
            scale = np.abs(exact) + np.linalg.norm(exact) / np.sqrt(max(exact.size, 1))
            assert (np.abs(got - exact) <= OUTLIER * tolerance * scale).all(), name


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
# Compiling the variants takes most of the time. fp16 differs from bf16 in one instruction, so one variant per kernel
# is enough; fp32 does without the aligned transposed ones.
TILES_OF = {"bfloat16": TILES, "float32": TILES[:6], "float16": TILES[:2]}


@pytest.mark.parametrize(
    ("dtype", "case"), [pytest.param(t, c, id=f"{t}-{c}") for t, cases in TILES_OF.items() for c in cases]
)
def test_layer_across_tile_boundaries(device, dtype, case):
    layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]))
    layer.assert_matches_reference(layer.run())


# Activations are the same code in every dtype: all of them in fp32, which shows the smallest error, two in bf16.
@pytest.mark.parametrize("case", [c for c in CASES if not is_aligned(c) or c.activation in ("swiglu", "relu")], ids=str)
def test_layer_on_the_shared_cases(device, case):
    inputs = make_inputs(case, 0, DTYPES["bfloat16" if is_aligned(case) else "float32"])
    layer = Layer(device, inputs, case.activation)
    results = layer.run()
    layer.assert_matches_reference(results)
    idle = np.setdiff1d(np.arange(case.E), inputs[1])
    for gradient in (results["w2"], *pair(results["w1"])):
        assert not np.asarray(gradient)[idle].astype(np.float32).any()  # exact zeros


def total_of(device, weight, dtype, order, used):
    """Random numbers in a weight's form, in an allocation that may be written; experts that are not used are marked."""
    if isinstance(weight, tuple):
        return tuple(total_of(device, half, dtype, order, used) for half in weight)
    E, rows, columns = weight.shape
    total = device.allocate((E, columns, rows) if order == "transposed" else weight.shape, DTYPES[dtype], MARGIN)
    total = total.swapaxes(1, 2) if order == "transposed" else total
    total[:] = np.random.default_rng(1).standard_normal(weight.shape).astype(total.dtype)
    mark(total, ~used)
    return total


def plain_sum(start, sums):
    """In float32, rounded once."""
    if isinstance(start, tuple):
        return tuple(map(plain_sum, start, sums))
    with np.errstate(invalid="ignore"):  # the marks
        return (np.asarray(start).astype(np.float32) + np.asarray(sums)).astype(start.dtype)


ACCUMULATED = [
    (replace(TILES[0], E=5, routing="empty_experts"), "bfloat16"),
    (replace(TILES[1], E=6, routing="empty_experts"), "bfloat16"),
    (replace(TILES[2], E=5, routing="empty_experts"), "float32"),
    (replace(UNALIGNED, E=5, routing="empty_experts"), "bfloat16"),
]


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize(("case", "dtype"), ACCUMULATED, ids=str)
def test_accumulated_weight_gradients(device, case, dtype, order):
    """The products' fp32 sums, found by adding them to zeros, are added bit for bit as NumPy adds them."""
    layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]))
    used = np.isin(np.arange(case.E), layer.inputs[1])
    assert not used.all()
    weights = {"w1": layer.inputs[3], "w2": layer.inputs[4]}
    _, saved = layer.forward()
    device.synchronize()

    def run(totals):
        gradients = layer.backward(saved, keep_saved=True, accumulate=totals)
        device.synchronize()
        for name, total in totals.items():
            assert gradients[name] is total
        return gradients

    sums = {name: total_of(device, w, "float32", order, np.ones(case.E, bool)) for name, w in weights.items()}
    for total in (sums["w2"], *pair(sums["w1"])):
        total[:] = 0
    plain, got = layer.backward(saved, keep_saved=True), run(sums)
    assert not differences({"x": plain["x"], "weights": plain["weights"]}, got)
    for name in weights:
        assert relative_error(*map(in_float64, (got[name], plain[name]))) <= TOLERANCES[dtype]
    for total_dtype in dict.fromkeys(("float32", dtype)):
        totals = {name: total_of(device, w, total_dtype, order, used) for name, w in weights.items()}
        want = {name: copy.deepcopy(total) for name, total in totals.items()}
        for _ in range(2):
            run(totals)
            want = {name: plain_sum(want[name], sums[name]) for name in want}
            for name, total in totals.items():
                for got, exact in zip(pair(total), pair(want[name]), strict=True):
                    assert as_bits(got[used]) == as_bits(exact[used]), name
                    assert is_marked(got, ~used), name


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_weight_gradients_are_added_up(device, dtype, accumulate):
    """In order and in float32, into a gradient within a larger array; of an expert without rows to zeros, or not."""
    E, splits, halves, rows, columns, ld = 3, 5, 2, 70, 24, 32
    rng = np.random.default_rng(0)
    sums = rng.standard_normal((E, splits, halves, rows, columns)).astype(np.float32)
    sums[1] = 0
    start = rng.standard_normal((halves, E, rows, ld)).astype(DTYPES[dtype])
    outs = [device.allocate(start.shape[1:], start.dtype) for _ in range(halves)]
    for out, values in zip(outs, start, strict=True):
        out[:] = values
    offsets = np.array([0, 4, 4, 9], np.int32)
    given = [device.put(array) for array in (sums, offsets)]
    pointers = [array.ctypes.data for array in (*given, *outs)]
    sizes = {
        "expert_stride": rows * ld,
        "ldo": ld,
        "rows": rows,
        "columns": columns,
        "halves": halves,
        "splits": splits,
    }
    threads = gemm_config.PARTS_GROUPS
    launch = runtime.Launch(
        loader.entry("wgrad_parts.cu", f"wgrad_parts_{dtype}"),
        (-(-rows * columns // 8 // threads), E, halves),
        threads,
        ("sums", "expert_token_offsets", "out0", "out1"),
        sizes | {"accumulate": int(accumulate)},
    )
    runtime.Runtime(arrays.framework_of(outs[0]), 0, STREAM).launch(launch, *pointers)
    device.synchronize()
    for half, out in enumerate(outs):
        total = np.zeros((E, rows, columns), np.float32)
        for part in range(splits):
            total += sums[:, part, half]
        if accumulate:
            total += start[half][..., :columns].astype(np.float32)
        want = start[half].copy()
        want[..., :columns] = total
        if accumulate:
            want[1] = start[half][1]
        assert as_bits(want) == as_bits(np.asarray(out))


def test_pipelines_of_other_depths():
    pipelines = [gemm_config.portable_stages(limits) for limits in (DEEP_STAGES, A100, SHORT_STAGES)]
    assert pipelines == [(4, 128), (3, 128), (4, 64)]
    with emulated(A100) as device:
        layer = Layer(device, make_inputs(TILES[0], 0, DTYPES["bfloat16"]))
        results = layer.run()
        layer.assert_matches_reference(results)
    for limits in (DEEP_STAGES, SHORT_STAGES):  # other copies in flight, the same sums
        with emulated(limits) as device:
            assert not differences(results, Layer(device, layer.inputs).run())


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_short_stages(dtype, order):
    """As cards with 99 KiB of shared memory per CTA have them."""
    inputs = make_inputs(replace(TILES[2], order=order), 1, DTYPES[dtype])
    with emulated(SHORT_STAGES) as device:
        layer = Layer(device, inputs)
        layer.assert_matches_reference(layer.run())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_order_of_threads_and_blocks_does_not_change_a_bit(dtype):
    case = TILES[0 if dtype == "bfloat16" else 2]
    inputs, found = make_inputs(case, 0, DTYPES[dtype]), []
    for seed in range(4):
        with emulated(seed=seed) as device:
            found.append(Layer(device, inputs).run("paper"))
    assert [differences(found[0], other) for other in found[1:]] == [[]] * 3


@pytest.mark.parametrize("save", [save for save in SAVE_POLICIES if save != "fp8"])  # see test_saved_fp8.py
@pytest.mark.parametrize(
    ("case", "dtype"), [(ALIGNED, "bfloat16"), (UNALIGNED, "float32")], ids=["aligned-bfloat16", "unaligned-float32"]
)
def test_save_policies(device, case, dtype, save):
    layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]))
    results = layer.run(save)
    layer.assert_matches_reference(results)
    if save != "paper":  # which keeps the product rounded
        minimal = layer.run("minimal", keep_saved=True)
        assert not differences(results, minimal)


@pytest.mark.parametrize("save", [save for save in SAVE_POLICIES if save])
def test_keep_saved_keeps_every_bit_and_otherwise_backward_runs_once(device, save):
    layer = Layer(device, make_inputs(ALIGNED, 0, DTYPES["bfloat16"]))
    _, saved = layer.forward(save)
    device.synchronize()
    names = [name for name in ("first_layer", "y_swi") if getattr(saved, name) is not None]
    before = {name: np.array(getattr(saved, name)) for name in names}
    gradients = [layer.backward(saved, keep_saved=True), layer.backward(saved, keep_saved=True)]
    device.synchronize()
    assert not differences(*gradients)
    assert not differences(before, {name: getattr(saved, name) for name in names})
    gradients.append(layer.backward(saved))
    device.synchronize()
    assert not differences(gradients[0], gradients[2])
    if save in ("fp8", "recompute"):  # nothing was overwritten
        layer.backward(saved)
    else:
        assert differences(before, {name: getattr(saved, name) for name in names})
        with pytest.raises(RuntimeError, match="expected activations that are still there"):
            layer.backward(saved)


LAUNCHED_FOR = {"weights": {"weights_bwd_float32"}, "w1": {"up_wgrad"}, "w2": {"down_wgrad"}, "x": {"up_bwd"}}


@pytest.mark.parametrize("needs", [n for size in range(5) for n in combinations(GRADIENTS, size)], ids=str)
def test_any_subset_of_the_gradients(device, needs):
    layer = Layer(device, make_inputs(replace(ALIGNED, L=30, E=3), 0, DTYPES["bfloat16"]))
    everything = layer.run()
    for save in ("minimal", "paper", "recompute"):
        _, saved = layer.forward(save)
        device.synchronize()
        device.launched.clear()
        some = layer.backward(saved, needs=needs)
        device.synchronize()
        assert set(some) == set(needs)
        if save != "paper":
            assert not differences(some, everything)
        assert ("down_bwd" in device.launched) == bool(needs)
        for name, entries in LAUNCHED_FOR.items():
            assert entries.isdisjoint(device.launched) == (name not in needs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_router_weights_in_the_dtype_of_x(device, dtype):
    x, ids, weights, w1, w2, grad_out = make_inputs(TILES[0], 0, DTYPES[dtype])
    layer = Layer(device, (x, ids, weights.astype(x.dtype), w1, w2, grad_out))
    layer.assert_matches_reference(layer.run())
    assert {f"weights_bwd_{dtype}", f"aggregate_{dtype}_{dtype}"} < set(device.launched)


def test_int64_ids_give_the_bits_of_int32(device):
    inputs = make_inputs(replace(ALIGNED, routing="absent"), 0, DTYPES["bfloat16"])
    wide = (inputs[0], inputs[1].astype(np.int64), *inputs[2:])
    assert not differences(Layer(device, inputs).run(), Layer(device, wide).run())


@pytest.mark.parametrize("misaligned", ["x", "w1", "w2", "grad_out"])
def test_aligned_sizes_at_unaligned_addresses(device, misaligned):
    """A view that starts within a 16-byte group takes the scalar copies; the sums stay the same."""
    names = ("x", "ids", "weights", "w1", "w2", "grad_out")
    inputs = make_inputs(TILES[0], 0, DTYPES["bfloat16"])
    shifted = [device.put(a, offset=int(n == misaligned)) for n, a in zip(names, inputs, strict=True)]
    assert not differences(Layer(device, inputs).run(), Layer(device, shifted).run())


@pytest.mark.parametrize("gap", [1, 8])
@pytest.mark.parametrize("order", ["row", "pair_transposed"])
def test_weights_within_larger_arrays(device, order, gap):
    """Only one of the inner dimensions has to be contiguous."""
    case = replace(ALIGNED, order=order)
    inputs = make_inputs(case, 0, DTYPES["bfloat16"])

    def within_larger(weight):
        if isinstance(weight, tuple):
            return tuple(map(within_larger, weight))
        if order.endswith("transposed"):
            return within_rows(weight.swapaxes(1, 2)).swapaxes(1, 2)
        return within_rows(weight)

    def within_rows(weight):
        E, rows, columns = weight.shape
        larger = np.full((E, rows + 1, columns + gap), np.nan, weight.dtype)
        larger[:, :rows, :columns] = weight
        return device.put(larger)[:, :rows, :columns]

    strided = (*inputs[:3], within_larger(inputs[3]), within_larger(inputs[4]), inputs[5])
    assert not differences(Layer(device, inputs).run(), Layer(device, strided).run())


def test_rows_without_an_expert_are_not_written(device):
    layer = Layer(device, make_inputs(replace(ALIGNED, routing="absent"), 0, DTYPES["bfloat16"]))
    _, saved = layer.forward("paper")
    device.synchronize()
    routed = saved.index.expert_token_offsets[-1]
    assert 0 < routed < layer.inputs[1].size
    for buffer in (saved.first_layer, saved.y_swi):
        assert np.isfinite(np.asarray(buffer[:routed]).astype(np.float32)).all()
        assert set(as_bits(buffer[routed:])) == {0xFF}


def test_no_tokens(device):
    layer = Layer(device, make_inputs(replace(ALIGNED, L=0), 0, DTYPES["bfloat16"]))
    results = layer.run()
    layer.assert_matches_reference(results)
    assert {name: np.count_nonzero(results[name]) for name in results} == dict.fromkeys(results, 0)
    assert "up_fwd" not in device.launched


@pytest.mark.parametrize("routing", ["absent", "duplicate"])
def test_layer_with_64_slots_per_token(device, routing):
    """More slots than experts, so that a token names an expert many times."""
    case = replace(ALIGNED, L=5, E=3)
    x, _, _, w1, w2, grad_out = make_inputs(case, 0, DTYPES["bfloat16"])
    rng = np.random.default_rng(1)
    ids = rng.integers(-3 if routing == "absent" else 0, case.E, (case.L, 64)).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32) / 64
    layer = Layer(device, (x, ids, weights, w1, w2, grad_out))
    layer.assert_matches_reference(layer.run())


def test_layer_with_more_experts_than_lanes(device):
    layer = Layer(device, make_inputs(replace(ALIGNED, L=20, k=3, E=70), 0, DTYPES["bfloat16"]))
    layer.assert_matches_reference(layer.run())


LISTS = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map", "experts_by_load")


def assert_dispatch_matches_reference(device, ids, num_experts, offset=0):
    on_device = device.put(ids, offset)
    got, want = mb.build_dispatch(on_device, num_experts), reference.dispatch(ids, num_experts)
    device.synchronize()
    for name in LISTS:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name, strict=False)
        assert getattr(got, name).dtype == np.int32, name
    assert (got.token_expert_indices.data.ptr == on_device.data.ptr) == (ids.dtype == np.int32) or not ids.size
    first_rows = want.expert_token_offsets
    tiles = [(e, row) for e in range(num_experts) for row in range(first_rows[e], first_rows[e + 1], 128)]
    row_tiles = np.asarray(got.row_tiles)
    assert len(tiles) <= len(row_tiles) - 1
    assert tuple(row_tiles[0]) == (len(tiles), 128)
    np.testing.assert_array_equal(row_tiles[1 : 1 + len(tiles)], np.array(tiles, np.int32).reshape(-1, 2))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("routing", ["random", "skewed", "one_expert", "absent", "duplicate", "empty_experts"])
@pytest.mark.parametrize(("L", "k", "E"), [(1, 1, 1), (101, 3, 5), (40, 8, 64), (500, 2, 200)])
def test_dispatch_of_every_routing(device, L, k, E, routing, dtype):
    case = Case(L=L, k=k, E=E, d=1, h=1, routing=routing)
    assert_dispatch_matches_reference(device, make_ids(case, np.random.default_rng(0)).astype(dtype), E)


def dispatch_limits(multiprocessors, shared_bytes=232448):
    return DeviceLimits(90, multiprocessors, shared_bytes, shared_bytes + 1024)


# (L, k, E, limits, what dispatch_config.dispatch makes of it). With more experts than threads, each sums for several.
GEOMETRIES = {
    "one_block": (37, 7, 16, dispatch_limits(2), {"blocks": 1, "parts": 1, "columns": 32, "route_threads": 512}),
    "one_block_of_more_threads": (
        3000,
        1,
        200,
        dispatch_limits(1),
        {"blocks": 1, "columns": 128, "route_threads": 1024},
    ),
    "two_blocks": (1100, 3, 128, dispatch_limits(1), {"blocks": 2, "parts": 1, "columns": 64}),
    "five_blocks": (1200, 3, 129, dispatch_limits(5), {"blocks": 5, "parts": 1, "columns": 32, "counted_together": 2}),
    "parts": (3500, 4, 8, dispatch_limits(1, 60 * 1024), {"blocks": 2, "parts": 3}),
    "blocks_of_parts": (9000, 4, 9, dispatch_limits(3, 56 * 1024), {"blocks": 6, "parts": 3}),
    "one_block_of_parts": (
        9000,
        4,
        300,
        dispatch_limits(1, 100 * 1024),
        {"blocks": 1, "parts": 6, "counted_together": 1},
    ),
    "64_slots_per_token": (50, 64, 40, dispatch_limits(2), {"blocks": 4}),
    "1000_experts": (700, 4, 1000, dispatch_limits(2), {"blocks": 2}),
    "4096_experts": (1400, 2, 4096, dispatch_limits(2), {"blocks": 2, "columns": 8, "count_columns": 8}),
    "3001_experts": (1400, 2, 3001, dispatch_limits(2), {"blocks": 2, "count_columns": 16}),
    "few_slots_for_1000_experts": (3, 1, 1000, dispatch_limits(2), {"blocks": 1}),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_dispatch_geometries(name, seed, dtype):
    L, k, E, limits, expected = GEOMETRIES[name]
    config = vars(dispatch_config.dispatch(L * k, E, limits))
    assert {key: config[key] for key in expected} == expected
    ids = np.random.default_rng(seed).integers(-1, E + 1, (L, k)).astype(dtype)
    with emulated(limits, seed) as device:
        assert_dispatch_matches_reference(device, ids, E)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_dispatch_of_no_tokens(device, dtype):
    assert_dispatch_matches_reference(device, np.zeros((0, 2), dtype), 3)


@pytest.mark.parametrize("L", [33, 1100])
def test_dispatch_of_ids_at_an_unaligned_address(device, L):
    ids = np.random.default_rng(0).integers(-1, 7, (L, 3)).astype(np.int32)
    assert_dispatch_matches_reference(device, ids, 7, offset=1)


def test_dispatch_of_ids_outside_int32(device):
    ids = np.array([[2**32, 1], [-(2**40), 0], [2**32 + 1, 1], [2**31, -1]])
    assert_dispatch_matches_reference(device, ids, 2)


@settings(max_examples=40)
@given(data=st.data())
def test_dispatch_of_any_ids(data):
    L, k, E = (data.draw(st.integers(low, high)) for low, high in ((0, 900), (1, 9), (1, 40)))
    limits = dispatch_limits(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([44 * 1024, 232448])))
    low, high = data.draw(st.sampled_from([(0, E), (-2, E + 2), (0, 1), (E - 1, E), (-9, 0)]))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    ids = np.random.default_rng(data.draw(st.integers(0, 99))).integers(low, high, (L, k)).astype(dtype)
    with emulated(limits, seed=data.draw(st.integers(0, 3))) as device:
        assert_dispatch_matches_reference(device, ids, E, offset=data.draw(st.integers(0, 3)))
