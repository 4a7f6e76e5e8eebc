"""Plans: a replayed call must ask the device for the very same things, in the same order, as the operations do."""

import ctypes
import dataclasses
import itertools
import struct
import sys
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import arrays, launch_config, loader, plans, tensor_map
from moeblaze_cupy.ops import experts
from moeblaze_cupy.structures import GRADIENTS, is_gated, pair

GAP = 1 << 20  # bytes around every buffer, so that an address is in one or near one
SMALL = 1 << 40  # buffers lie beyond: no size or stride of these tests is as large


class Buffer:
    """Device memory without bytes behind it."""

    def __init__(self, device, label, nbytes):
        self.device, self.label, self.start = device, label, device.place(nbytes)
        device.alive[self.start] = label, nbytes

    def __del__(self):
        del self.device.alive[self.start]
        if self.label[0] == "allocated":
            self.device.log.append(("free", self.label))


class DeviceArray:
    """As much of a CuPy array as the layer looks at."""

    def __init__(self, buffer, shape, strides, dtype, offset=0, axes=()):
        self.buffer, self.shape, self.strides, self.dtype, self.axes = buffer, shape, strides, dtype, axes
        self.data, self.device = SimpleNamespace(ptr=buffer.start + offset), SimpleNamespace(id=0)

    def swapaxes(self, *axes):
        order = list(range(len(self.shape)))
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
        shape, strides = (tuple(values[i] for i in order) for values in (self.shape, self.strides))
        return DeviceArray(self.buffer, shape, strides, self.dtype, self.data.ptr - self.buffer.start, axes)


DeviceArray.__name__, DeviceArray.__module__ = "ndarray", "cupy"


class Device:
    """Logs allocations, their ends, clears and launches; addresses as (buffer, offset)."""

    def __init__(self):
        self.alive, self.end, self.allocations, self.fails_at = {}, SMALL, 0, None
        self.local = threading.local()
        self.maps, self.kinds = [], {}
        self.before_reading = lambda: None
        self.lock = threading.Lock()

    @property
    def log(self):
        if not hasattr(self.local, "log"):
            self.local.log, self.local.count = [], 0
        return self.local.log

    def place(self, nbytes):
        with self.lock:
            start, self.end = self.end + GAP, self.end + GAP + -(-nbytes // 512) * 512
        return start

    def array(self, label, shape, dtype, offset=0):
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=object)) * dtype.itemsize for i in range(len(shape)))
        return DeviceArray(Buffer(self, label, nbytes + offset), tuple(shape), strides, dtype, offset)

    def empty(self, shape, dtype):
        log = self.log
        if self.fails_at == self.local.count:
            raise MemoryError
        label = ("allocated", self.local.count)
        self.local.count += 1
        log.append(("allocate", label, tuple(shape), np.dtype(dtype).name))
        return self.array(label, shape, dtype)

    def where(self, address):
        if abs(address) < SMALL or address == 1 << 46:
            return address
        for start, (label, nbytes) in list(self.alive.items()):
            if -GAP // 2 <= address - start < nbytes + GAP // 2:
                return label, address - start
        return "nowhere", address

    def encode(self, pointer, *spec):
        self.maps.append((pointer, spec))
        return struct.pack("q120x", len(self.maps) - 1)

    def argument(self, value):
        if not isinstance(value, bytes):
            return self.where(value)
        pointer, spec = self.maps[struct.unpack_from("q", value)[0]]
        return ("map", self.where(pointer), spec)

    def launched(self, variant, grid, block, args, shared_bytes, stream):
        self.kinds[variant] = [isinstance(a, bytes) for a in args]
        self.log.append(("launch", variant, grid, block, [self.argument(a) for a in args], shared_bytes, stream))

    def cupy(self):
        runtime = SimpleNamespace(
            getDevice=lambda: 0,
            setDevice=lambda device: None,
            memGetInfo=lambda: None,
            memsetAsync=lambda pointer, value, n, stream: self.log.append(
                ("clear", self.where(pointer), value, n, stream)
            ),
        )
        stream = SimpleNamespace(ptr=7)
        return SimpleNamespace(
            empty=self.empty, cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
        )


class Kernel:
    """Stands for loader._Kernel, and reads arguments where the driver would."""

    device: Device

    def __init__(self, device, variant):
        self.variant, self.shared_bytes = variant, 0

    def allow(self, shared_bytes):
        self.shared_bytes = shared_bytes

    def launch(self, grid, block, args, shared_bytes, stream):
        assert shared_bytes <= self.shared_bytes
        self.device.launched(self.variant, grid, block, args, shared_bytes, stream)

    def launch_at(self, arguments, grid, block, shared_bytes, stream):
        self.device.before_reading()
        kinds = self.device.kinds[self.variant]
        addresses = (ctypes.c_uint64 * len(kinds)).from_address(arguments)
        assert all(address % (64 if is_map else 8) == 0 for address, is_map in zip(addresses, kinds, strict=True))
        args = [
            ctypes.string_at(address, 128) if is_map else ctypes.c_int64.from_address(address).value
            for address, is_map in zip(addresses, kinds, strict=True)
        ]
        self.launch(grid, block, args, shared_bytes, stream)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(plans, "MAX_PLANS", 256)
    cupy = made.cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(loader, "import_cupy", lambda: cupy)
    monkeypatch.setattr(loader, "device_limits", lambda device: launch_config.H200)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_Kernel", type("Kernel", (Kernel,), {"device": made}))
    monkeypatch.setattr(loader, "_thread", loader._Thread())
    monkeypatch.setattr(tensor_map, "encode", made.encode)
    monkeypatch.delenv("MOEBLAZE_TIER", raising=False)
    yield made
    plans.clear()  # kernels of this device


@pytest.fixture
def ran(monkeypatch):
    """Names of the operations that have run, for a call or a trace."""
    names = []
    for name in ("moe_forward", "moe_backward"):
        run = getattr(experts, name)

        def counted(context, *args, name=name, run=run, **options):
            names.append(("traced " if isinstance(context, plans._Trace) else "") + name)
            return run(context, *args, **options)

        monkeypatch.setattr(experts, name, counted)
    return names


@dataclasses.dataclass(frozen=True)
class Layer:
    L: int
    k: int
    E: int
    d: int
    h: int
    order: str = "row"
    activation: str = "swiglu"
    save: str | None = "minimal"
    dtype: type = ml_dtypes.bfloat16
    ids: type = np.int32
    weights: type = np.float32
    offset: int = 0  # of x, in bytes
    needs: tuple = GRADIENTS
    keep_saved: bool = False
    accumulate: tuple = ()
    totals: type = np.float32

    def weight(self, device, label, E, rows, columns, dtype):
        if self.order.endswith("transposed"):
            return device.array(label, (E, columns, rows), dtype).swapaxes(1, 2)
        return device.array(label, (E, rows, columns), dtype)

    def weights_of(self, device, prefix, dtype):
        E, d, h = self.E, self.d, self.h
        if self.order.startswith("pair"):
            w1 = tuple(self.weight(device, (prefix + "w1", i), E, d, h, dtype) for i in range(2))
        else:
            w1 = self.weight(device, (prefix + "w1",), E, d, h * (1 + is_gated(self.activation)), dtype)
        return {"w1": w1, "w2": self.weight(device, (prefix + "w2",), E, h, d, dtype)}

    def arguments(self, device):
        x = device.array(("x",), (self.L, self.d), self.dtype, self.offset)
        ids, weights = (
            device.array((name,), (self.L, self.k), dtype) for name, dtype in (("ids", self.ids), ("w", self.weights))
        )
        return x, ids, weights, *self.weights_of(device, "", self.dtype).values()

    def forward(self, device):
        return mb.moe_forward(*self.arguments(device), activation=self.activation, save=self.save)

    def backward(self, device, saved):
        options = {"needs": self.needs, "keep_saved": self.keep_saved}
        if self.accumulate:
            sums = self.weights_of(device, "sum of ", self.totals)
            options["accumulate"] = {name: sums[name] for name in self.accumulate}
        grad_out = device.array(("grad_out",), (self.L, self.d), self.dtype)
        return mb.moe_backward(grad_out, saved, **options)


def described(value):
    """A result's structure, arrays as the buffers that they are."""
    if isinstance(value, DeviceArray):
        offset = value.data.ptr - value.buffer.start
        return value.buffer.label, offset, value.shape, value.strides, value.dtype.name, value.axes
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return tuple(map(described, value)) if isinstance(value, tuple) else value


def logged(device, run):
    """What `run` asked the device for; then its result, and the result's structure."""
    device.log.clear()
    device.local.count = 0
    result = run()
    log = list(device.log)
    return log, result, described(result)


def step(device, layer):
    """Log and structure of a forward and its backward, and of the end of what they made."""
    forward, result, form = logged(device, lambda: layer.forward(device))
    if layer.save is None:
        return forward, form
    saved = result[1]
    backward, _, form_of_gradients = logged(device, lambda: layer.backward(device, saved))
    return forward, form, backward, form_of_gradients, saved.consumed


SIZES = [(20, 11, 64, 328), (20, 11, 200, 256), (20, 11, 600, 328), (20, 11, 2048, 1032), (20, 11, 31, 45)]
LAYERS = [
    *(
        Layer(L, k, E, d, h, order, activation, save)
        for order, activation, (L, E, d, h), k, save in itertools.product(
            ("row", "transposed", "pair", "pair_transposed"),
            ("swiglu", "gelu"),
            SIZES,
            (1, 2, 9),
            ("minimal", "paper", "recompute", None),
        )
        if activation == "swiglu" or not order.startswith("pair")
    ),
    *(
        Layer(L, 2, 5, 64, 32, order, save=save, accumulate=accumulate, totals=totals)
        for L, order, save, accumulate, totals in itertools.product(
            (0, 30),
            ("row", "pair_transposed"),
            ("minimal", "paper"),
            (("w1",), ("w2",), ("w1", "w2"), ("w2", "w1")),
            (np.float32, ml_dtypes.bfloat16),
        )
    ),
    *(
        Layer(30, 2, 5, 64, 32, order, save=save, needs=needs, keep_saved=keep_saved)
        for order, save, keep_saved, n in itertools.product(
            ("transposed", "pair"), ("minimal", "paper", "recompute"), (False, True), range(5)
        )
        for needs in itertools.combinations(GRADIENTS, n)
    ),
    *(
        Layer(L, 2, 5, 600, 32, dtype=dtype, ids=ids, weights=weights, offset=offset)
        for L, dtype, ids, weights, offset in itertools.product(
            (0, 1, 5000), (ml_dtypes.bfloat16, np.float32), (np.int32, np.int64), (np.float32, None), (0, 4, 16)
        )
        for weights in (weights or dtype,)
    ),
]


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_a_replay_is_what_the_operations_do(device, ran, monkeypatch, tier):
    monkeypatch.setenv("MOEBLAZE_TIER", tier)
    for layer in LAYERS:
        plans.clear()
        ran.clear()
        direct, traced, replayed = (step(device, layer) for _ in range(3))
        assert traced == direct, layer
        assert replayed == direct, layer
        assert "nowhere" not in str(direct)
        names = ["moe_forward"] if layer.save is None else ["moe_forward", "moe_backward"]
        assert ran == [*names, *("traced " + name for name in names)]
        assert not device.alive


def test_the_log_tells_what_is_compared(device):
    """The test above proves nothing if its log is empty."""
    forward, _, backward, form, _ = step(device, Layer(8201, 3, 3, 1032, 72, "transposed"))
    kinds = {entry[0] for entry in forward}
    assert kinds == {"allocate", "free", "clear", "launch"} == {entry[0] for entry in backward}
    assert any(isinstance(a, tuple) and a[0] == "map" for entry in forward if entry[0] == "launch" for a in entry[4])
    assert form[1]["w1"][-1] == form[1]["w2"][-1] == (1, 2)


def test_strides_may_be_negative(device, ran):
    """The up half of a transposed w1 then lies before the gate, at a negative offset."""

    def run():
        layer = Layer(20, 2, 5, 64, 32, "transposed")
        x, ids, weights, w1, w2 = layer.arguments(device)
        w1 = DeviceArray(w1.buffer, w1.shape, (w1.strides[0], w1.strides[1], -w1.strides[2]), w1.dtype, 63 * 64 * 2)
        return mb.moe_forward(x, ids, weights, w1, w2)

    logs = [logged(device, run)[0] for _ in range(3)]
    assert logs[0] == logs[1] == logs[2] and len(ran) == 2
    assert str((("w1",), (63 - 32) * 64 * 2)) in str(logs[0])


def test_strides_may_be_anything_where_they_do_not_matter(device, ran):
    """Such as one that looks like the address of a stand-in."""

    def run():
        layer = Layer(20, 2, 1, 64, 32)
        x, ids, weights, w1, w2 = layer.arguments(device)
        w1 = DeviceArray(w1.buffer, w1.shape, (2 << 46, *w1.strides[1:]), w1.dtype)
        return mb.moe_forward(x, ids, weights, w1, w2)

    logs = [logged(device, run)[0] for _ in range(4)]
    assert logs == logs[:1] * 4 and ran == ["moe_forward"] * 4 and not plans._plans


BASE = Layer(30, 2, 5, 64, 32, save="paper")
OTHERS = [
    {"offset": 2},
    {"L": 31},
    {"order": "transposed"},
    {"order": "pair"},
    {"activation": "geglu"},
    {"save": "minimal"},
    {"ids": np.int64},
    {"weights": ml_dtypes.bfloat16},
    {"dtype": np.float16},
    {"keep_saved": True},
    {"needs": ("x", "w1")},
    {"accumulate": ("w2",)},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_calls_that_differ_have_plans_of_their_own(device, ran, other):
    for _ in range(2):
        step(device, BASE)
    del ran[:]
    layer = dataclasses.replace(BASE, **other)
    direct = step(device, layer)
    of_one = {"keep_saved": "moe_backward", "needs": "moe_backward", "accumulate": "moe_backward", "ids": "moe_forward"}
    (name,) = other
    assert ran == ([of_one[name]] if name in of_one else ["moe_forward", "moe_backward"])
    assert [step(device, layer) for _ in range(2)] == [direct] * 2


def test_sums_of_equal_layouts_have_plans_of_their_own(device, ran):
    layers = [Layer(30, 2, 5, 64, 64, activation="silu", accumulate=(name,)) for name in ("w1", "w2")]
    direct = [step(device, layer) for layer in layers]
    assert ran == ["moe_forward", "moe_backward", "traced moe_forward", "moe_backward"]
    assert [[step(device, layer) for layer in layers] for _ in range(2)] == [direct] * 2


def test_what_is_kept_may_be_dropped(device, ran):
    """Backward computes a first layer again that is not there, whatever else is."""
    layer = dataclasses.replace(BASE, activation="silu")

    def backward(**dropped):
        _, saved = layer.forward(device)
        return logged(device, lambda: layer.backward(device, dataclasses.replace(saved, **dropped)))[0]

    def launched(log):
        return [entry[1].entry for entry in log if entry[0] == "launch"]

    without = [[launched(backward(**{name: None})) for name in ("first_layer", "y_swi")] for _ in range(3)]
    assert without == without[:1] * 3 and without[0][0] != without[0][1]
    assert ran.count("traced moe_backward") == 2


def test_sums_are_handed_back_as_they_came(device):
    layer = dataclasses.replace(BASE, order="pair")
    for _ in range(3):
        sums = layer.weights_of(device, "sum of ", np.float32)
        sums["w1"], sums["w2"] = list(sums["w1"]), (sums["w2"],)
        _, saved = layer.forward(device)
        grads = mb.moe_backward(device.array(("grad_out",), (30, 64), layer.dtype), saved, accumulate=sums)
        assert grads.w1 is sums["w1"] and grads.w2 is sums["w2"]


def test_the_tier_is_part_of_the_key(device, ran, monkeypatch):
    for _ in range(2):
        step(device, BASE)
    del ran[:]
    monkeypatch.setenv("MOEBLAZE_TIER", "sm80")
    step(device, BASE)
    assert ran == ["moe_forward", "moe_backward"]


def test_what_an_address_is_beyond_its_alignment_is_not(device, ran):
    for offset in (0, 16, 32, 160):
        step(device, dataclasses.replace(BASE, offset=offset))
    assert ran == ["moe_forward", "moe_backward", "traced moe_forward", "traced moe_backward"]


def test_layouts_seen_once_are_not_traced(device, ran):
    for L in range(1, 40):
        step(device, dataclasses.replace(BASE, L=L))
    assert ran == ["moe_forward", "moe_backward"] * 39 and not plans._plans


def test_as_many_are_kept_as_there_is_room_for(device, ran, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 6)
    for L in range(1, 11):
        for _ in range(2):
            step(device, dataclasses.replace(BASE, L=L))
    assert len(plans._plans) == 6
    for L in range(11, 30):
        step(device, dataclasses.replace(BASE, L=L))
    assert len(plans._seen) == 6 and len(plans._plans) == 6
    del ran[:]
    step(device, dataclasses.replace(BASE, L=10))
    assert not ran
    step(device, dataclasses.replace(BASE, L=1))
    assert ran == ["moe_forward", "moe_backward"]


def test_none_are_made_without_room(device, ran, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 0)
    for _ in range(3):
        step(device, BASE)
    assert ran == ["moe_forward", "moe_backward"] * 3


def test_a_failed_trace_leaves_nothing(device, ran, monkeypatch):
    direct = step(device, BASE)
    with monkeypatch.context() as patch:
        patch.setattr(plans._Trace, "launch", lambda self, *launch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(device, BASE)
    assert not plans._plans and not device.alive
    assert [step(device, BASE) for _ in range(2)] == [direct] * 2


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("keep_saved", [False, True])
def test_out_of_memory(device, ran, save, keep_saved):
    """After a replay that fails, as after the operations: all is free, and `consumed` says if there is harm done."""
    layer = dataclasses.replace(BASE, d=600, save=save, keep_saved=keep_saved)

    def outcomes(prepare, run, *args):
        found = []
        for device.fails_at in itertools.count():
            prepare()
            device.log.clear()
            device.local.count = 0
            try:
                run(device, *args)
            except MemoryError:
                consumed = [a.consumed for a in args]
                for a in args:
                    a.consumed = False
                found.append((list(device.log), consumed))
            else:
                device.fails_at = None
                return found

    saved = logged(device, lambda: layer.forward(device))[1][1]
    direct = outcomes(plans.clear, layer.forward), outcomes(plans.clear, layer.backward, saved)
    del saved
    plans.clear()
    for _ in range(2):
        step(device, layer)
    saved = logged(device, lambda: layer.forward(device))[1][1]
    del ran[:]
    assert (outcomes(ran.copy, layer.forward), outcomes(ran.copy, layer.backward, saved)) == direct
    assert not ran
    assert len(direct[0]) >= 4 and len(direct[1]) >= 6
    del saved
    assert not device.alive


def test_arrays_of_another_kind_among_the_inputs_have_no_plan(device):
    """Such as a wrapper that looks like a CuPy array and is handed back results of its own kind."""

    class Wrapper:
        def __init__(self, array):
            self.array = array

        def __getattr__(self, name):
            return getattr(self.array, name)

    x, ids, weights, w1, w2 = BASE.arguments(device)
    inputs = plans.forward_inputs(x, ids, weights, (w1,), w2)
    assert plans.key_of("moe_forward", ("swiglu", "minimal"), inputs)[0] is not None
    inputs = plans.forward_inputs(x, ids, Wrapper(weights), (w1,), w2)
    assert plans.key_of("moe_forward", ("swiglu", "minimal"), inputs) == (None, [])


def test_a_second_backward_still_raises(device):
    for _ in range(3):
        _, saved = BASE.forward(device)
        BASE.backward(device, saved)
        with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
            BASE.backward(device, saved)


@pytest.mark.parametrize(
    "wrong",
    [{"activation": ["swiglu"]}, {"activation": "tanh"}, {"save": {}}, {"save": True}, {"x": None}, {"w2": np.ones(3)}],
    ids=str,
)
def test_wrong_arguments_are_named_as_before(device, wrong):
    errors = []
    for _ in range(3):
        arguments = dict(zip(("x", "ids", "weights", "w1", "w2"), BASE.arguments(device), strict=True))
        with pytest.raises((TypeError, ValueError)) as caught:
            mb.moe_forward(**(arguments | {"activation": "swiglu", "save": "paper"} | wrong))
        errors.append(str(caught.value))
        step(device, BASE)
        step(device, BASE)
    assert errors == errors[:1] * 3 and errors[0].startswith("moe_forward: ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"accumulate": np.ones(3)},
        {"accumulate": []},
        {"accumulate": {"w2": None}},
        {"needs": "x"},
        {"needs": (["x"],)},
        {"saved": None},
        {"grad_out": None},
    ],
    ids=str,
)
def test_wrong_arguments_of_backward_are_named_as_before(device, wrong):
    errors = []
    for _ in range(3):
        _, saved = BASE.forward(device)
        arguments = {"grad_out": device.array(("grad_out",), (30, 64), BASE.dtype), "saved": saved}
        with pytest.raises((TypeError, ValueError)) as caught:
            mb.moe_backward(**(arguments | wrong))
        errors.append(str(caught.value))
        step(device, BASE)
    assert errors == errors[:1] * 3 and errors[0].startswith("moe_backward: ")


def test_threads_replay_one_plan_at_once(device):
    layer = Layer(8201, 3, 3, 1032, 72, "pair_transposed")
    direct = step(device, layer)
    step(device, layer)
    found, errors, together = {}, [], threading.Barrier(2, timeout=10)

    def run(name):
        try:
            found[name] = [step(device, layer) for _ in range(3)]
        except Exception as error:
            errors.append(error)
            together.abort()

    # each thread prepares a launch, and only then do they read their arguments
    device.before_reading = together.wait
    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found["a"] == found["b"] == [direct] * 3
    kept = [len(plan.memories) for plan in plans._plans.values()]
    assert kept and max(kept) == 2


def test_every_layer_of_a_model_shares_a_plan(device):
    for _ in range(5):
        step(device, BASE)
    assert len(plans._plans) == 2 and all(len(plan.memories) == 1 for plan in plans._plans.values())


def test_the_cpu_has_no_plans():
    x, ids, weights = np.ones((3, 4), np.float32), np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    w1, w2 = np.ones((2, 4, 6), np.float32), np.ones((2, 3, 4), np.float32)
    for _ in range(3):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2)
        mb.moe_backward(out, saved)
    assert not plans._plans and not plans._seen and pair(w1) == (w1,)


@pytest.fixture
def torch():
    """Imported before another module stands for CuPy."""
    module = pytest.importorskip("torch")
    pytest.importorskip("moeblaze_cupy.interop.torch")
    return module


def test_torch_runs_plans(torch, device, ran, monkeypatch):
    """CPU tensors that the layer takes for a GPU's, through autograd; their addresses are real ones."""
    moe = sys.modules["moeblaze_cupy.interop.torch"].moe

    def describe(a):
        return arrays.Array(a, a.data_ptr(), tuple(a.shape), a.stride(), str(a.dtype)[6:], 0)

    def empty(shape, dtype, device):
        return describe(torch.zeros(shape, dtype=getattr(torch, dtype)))

    for name, replaced in {"describe": describe, "empty": empty, "stream": lambda device: 7}.items():
        monkeypatch.setattr(arrays.Torch, name, staticmethod(replaced))

    def launches():
        found = [(entry[1:4], [a for a in entry[4] if isinstance(a, int)], entry[5:]) for entry in device.log]
        device.log.clear()
        return found

    monkeypatch.setattr(device, "where", lambda address: address if abs(address) < 1 << 32 else ("address",))
    steps = []
    for _ in range(4):
        x, w1_storage, w2_storage, weights = (
            torch.ones(shape, dtype=dtype, requires_grad=True)
            for shape, dtype in (
                ((40, 64), torch.bfloat16),
                ((5, 96, 64), torch.bfloat16),
                ((5, 64, 48), torch.bfloat16),
                ((40, 2), torch.float32),
            )
        )
        ids = torch.zeros((40, 2), dtype=torch.int32)
        inputs = x, weights, w1_storage, w2_storage
        out = moe(x, ids, weights, w1_storage.transpose(1, 2), w2_storage.transpose(1, 2))
        forward = launches()
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
            out.sum().backward()
        steps.append((forward, launches(), [(t.grad.shape, t.grad.stride(), t.grad.dtype) for t in inputs]))
    assert steps == steps[:1] * 4 and len(steps[0][0]) >= 3 and len(steps[0][1]) >= 5
    assert ran == ["moe_forward", "moe_backward", "traced moe_forward", "traced moe_backward"]
