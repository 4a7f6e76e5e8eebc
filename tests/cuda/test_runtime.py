"""Launch records: a call of known layouts asks the device for the very same things, in the same order, as a first one.

The second call with one set of layouts finds its record. What a call launches is checked by name against what the
operations are to read and write, on a GPU that only logs (tests/fakes.py).
"""

import dataclasses
import itertools
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.layer import backward
from moeblaze_cupy.layer import forward as experts
from moeblaze_cupy.types import GRADIENTS, LayerArrays, LayerOptions
from tests.fakes import STREAM, DeviceArray, Layer, launches, limits_of, use


@pytest.fixture
def device(monkeypatch):
    yield use(monkeypatch)
    runtime.forget()  # kernels of this device


@pytest.fixture
def configured(monkeypatch):
    """Names of the functions that have made records."""
    names = []
    for module, name in ((experts, "configure_forward"), (backward, "configure_backward")):
        run = getattr(module, name)

        def counted(*args, name=name, run=run, **options):
            names.append(name.removeprefix("configure_"))
            return run(*args, **options)

        monkeypatch.setattr(module, name, counted)
    return names


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
    device.restart()
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
def test_a_second_call_asks_for_what_the_first_did(monkeypatch, tier):
    device = use(monkeypatch, limits_of(tier))
    for layer in LAYERS:
        runtime.forget()
        first, second = (step(device, layer) for _ in range(2))
        assert second == first, layer
        assert "nowhere" not in str(first)
        assert not device.alive
    runtime.forget()


def test_the_log_tells_what_is_compared(device):
    """The test above proves nothing if its log is empty."""
    forward, _, backward, form, _ = step(device, Layer(8201, 3, 3, 1032, 72, "transposed"))
    kinds = {entry[0] for entry in forward}
    assert kinds == {"allocate", "free", "clear", "launch"} == {entry[0] for entry in backward}
    assert any(
        isinstance(a, tuple) and a[0] == "map" for entry in forward if entry[0] == "launch" for a in entry[4].values()
    )
    assert form[1]["w1"][-1] == form[1]["w2"][-1] == (1, 2)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("order", ["row", "transposed", "pair", "pair_transposed"])
def test_kernels_are_given_the_arrays_of_their_names(monkeypatch, tier, order):
    """Of one call, with d = h so that a mistaken array would fit."""
    device = use(monkeypatch, limits_of(tier))
    layer = Layer(3000, 3, 5, 2056, 2056, order, save="paper")
    _, result, _ = logged(device, lambda: layer.forward(device))
    out, saved = result
    forward = launches(device)
    device.restart()
    grads = layer.backward(device, saved)
    backward = launches(device)

    def place(array):
        return array.buffer.label, array.data.ptr - array.buffer.start

    def address(value):  # of an argument that is an array or a tensor map over one
        return value[1] if value[0] == "map" else value

    def of(launched, entry):
        return [values for variant, _, values in launched if variant.entry.startswith(entry)]

    itemsize, half = 2, layer.h * (1 if order == "row" else layer.d) * 2
    gate, up = (place(w) for w in (saved.w1 if order.startswith("pair") else (saved.w1, saved.w1)))
    up = up if order.startswith("pair") else (up[0], half)
    lists = place(saved.index.lists)[0]
    (fwd,) = of(forward, "up_fwd")
    assert address(fwd["a"]) == place(saved.x)
    assert (address(fwd["b0"]), address(fwd["b1"])) == (gate, up)
    assert (fwd["first_layer"], fwd["result"]) == (place(saved.first_layer), place(saved.y_swi))
    for name in ("expert_token_indices", "expert_token_offsets", "row_tiles"):
        assert fwd[name] == (lists, 4 * saved.index.places[name][0])
    products, sums = of(forward, "down_fwd"), of(forward, "aggregate")
    assert len(products) == len(sums) > 1
    column = 0
    for product, summed in zip(products, sums, strict=True):
        assert address(product["a"]) == place(saved.y_swi) and product["result"] == summed["panel"]
        step = itemsize * (layer.h if order.endswith("transposed") else 1)
        assert address(product["b0"]) == address(product["b1"]) == (("w2",), column * step)
        assert (summed["weights"], summed["out"]) == (place(saved.weights), place(out))
        assert summed["first_column"] == column and summed["columns"] == product["columns"]
        column += summed["columns"]
    assert column == layer.d
    (bwd,) = of(backward, "down_bwd")
    assert address(bwd["a"]) == (("grad_out",), 0) and address(bwd["b0"]) == (("w2",), 0)
    assert bwd["first_layer"] == bwd["first_layer_grad"] == place(saved.first_layer)
    assert bwd["result"] == bwd["y_swi"] == place(saved.y_swi)
    (by_row,), (weights_bwd,) = of(backward, "weights_by_row"), of(backward, "weights_bwd")
    assert by_row["weights"] == place(saved.weights)
    assert by_row["row_weights"] == bwd["row_weights" if tier == "sm80" else "weights"]
    assert weights_bwd["partial_sums"] == bwd["partial_sums"]
    assert weights_bwd["grad_weights"] == place(grads.weights)
    (down,), (ups,) = of(backward, "down_wgrad"), of(backward, "up_wgrad")
    swapped = order.endswith("transposed")
    assert (down["p"], down["q"])[:: -1 if swapped else 1] == (place(saved.y_swi), (("grad_out",), 0))
    assert (ups["p"], ups["q"])[:: -1 if swapped else 1] == (place(saved.x), place(saved.first_layer))
    assert (down["out0"], down["out1"]) == (place(grads.w2), place(grads.w2))
    w1 = grads.w1 if isinstance(grads.w1, tuple) else (grads.w1, grads.w1)
    assert ups["out0"] == place(w1[0])
    assert ups["out1"] == (place(w1[1]) if order.startswith("pair") else (place(w1[1])[0], half))
    if tier == "sm90":
        assert address(down["routed"]) == place(saved.y_swi) and address(ups["routed"]) == place(saved.first_layer)
    for product, summed in zip(of(backward, "up_bwd"), of(backward, "aggregate"), strict=True):
        assert address(product["a"]) == place(saved.first_layer) and product["result"] == summed["panel"]
        assert address(product["b1"])[0] == up[0] and (summed["weights"], summed["out"]) == (0, place(grads.x))
    del out, result, saved, grads
    runtime.forget()


def test_strides_may_be_negative(device):
    """The up half of a transposed w1 then lies before the gate, at a negative offset."""

    def run():
        layer = Layer(20, 2, 5, 64, 32, "transposed")
        x, ids, weights, w1, w2 = layer.arguments(device)
        w1 = DeviceArray(w1.buffer, w1.shape, (w1.strides[0], w1.strides[1], -w1.strides[2]), w1.dtype, 63 * 64 * 2)
        return mb.moe_forward(x, ids, weights, w1, w2)

    logs = [logged(device, run)[0] for _ in range(3)]
    assert logs[0] == logs[1] == logs[2]
    assert str((("w1",), (63 - 32) * 64 * 2)) in str(logs[0])


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
def test_calls_that_differ_have_records_of_their_own(device, configured, other):
    step(device, BASE)
    del configured[:]
    layer = dataclasses.replace(BASE, **other)
    first = step(device, layer)
    of_one = {"keep_saved": "backward", "needs": "backward", "accumulate": "backward", "ids": "forward"}
    (name,) = other
    assert configured == ([of_one[name]] if name in of_one else ["forward", "backward"])
    assert [step(device, layer) for _ in range(2)] == [first] * 2


def test_sums_of_equal_layouts_have_records_of_their_own(device, configured):
    layers = [Layer(30, 2, 5, 64, 64, activation="silu", accumulate=(name,)) for name in ("w1", "w2")]
    first = [step(device, layer) for layer in layers]
    assert configured == ["forward", "backward", "backward"]
    assert [step(device, layer) for layer in layers] == first


def test_what_is_kept_may_be_dropped(device):
    """Backward computes a first layer again that is not there, whatever else is."""
    layer = dataclasses.replace(BASE, activation="silu")

    def backward(**dropped):
        _, saved = layer.forward(device)
        return logged(device, lambda: layer.backward(device, dataclasses.replace(saved, **dropped)))[0]

    def launched(log):
        return [entry[1].entry for entry in log if entry[0] == "launch"]

    without = [[launched(backward(**{name: None})) for name in ("first_layer", "y_swi")] for _ in range(2)]
    assert without[0] == without[1] and without[0][0] != without[0][1]


def test_sums_are_handed_back_as_they_came(device):
    layer = dataclasses.replace(BASE, order="pair")
    for _ in range(2):
        sums = layer.weights_of(device, "sum of ", np.float32)
        sums["w1"], sums["w2"] = list(sums["w1"]), (sums["w2"],)
        _, saved = layer.forward(device)
        grads = mb.moe_backward(device.array(("grad_out",), (30, 64), layer.dtype), saved, accumulate=sums)
        assert grads.w1 is sums["w1"] and grads.w2 is sums["w2"]


def test_records_are_those_of_another_tier_once_they_were_forgotten(device, configured, monkeypatch):
    step(device, BASE)
    monkeypatch.setattr(loader, "device_limits", lambda device: limits_of("sm80"))
    runtime.forget()
    device.restart()
    BASE.forward(device)
    assert configured == ["forward", "backward", "forward"]
    assert {variant.source for variant, *_ in launches(device) if variant.macros} == {"grouped_gemm_sm80.cu"}


def test_of_an_address_only_its_alignment_counts(device, configured):
    for offset in (0, 16, 32, 160):
        step(device, dataclasses.replace(BASE, offset=offset))
    assert configured == ["forward", "backward"]


def test_as_many_records_are_kept_as_there_is_room_for(device, configured, monkeypatch):
    monkeypatch.setattr(runtime, "MAX_RECORDS", 6)
    for L in range(1, 11):
        step(device, dataclasses.replace(BASE, L=L))
    assert len(runtime._records) == 6
    del configured[:]
    step(device, dataclasses.replace(BASE, L=10))
    assert not configured
    step(device, dataclasses.replace(BASE, L=1))
    assert configured == ["forward", "backward"]


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("keep_saved", [False, True])
def test_out_of_memory(device, save, keep_saved):
    """All is free again, with a record as without one, and `consumed` says if there is harm done."""
    layer = dataclasses.replace(BASE, d=600, save=save, keep_saved=keep_saved)

    def outcomes(prepare, run, *args):
        found = []
        for device.fails_at in itertools.count():
            prepare()
            device.restart()
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
    direct = outcomes(runtime.forget, layer.forward), outcomes(runtime.forget, layer.backward, saved)
    del saved
    runtime.forget()
    step(device, layer)
    saved = logged(device, lambda: layer.forward(device))[1][1]
    assert (outcomes(list, layer.forward), outcomes(list, layer.backward, saved)) == direct
    assert len(direct[0]) >= 4 and len(direct[1]) >= 6
    del saved
    assert not device.alive


def test_arrays_of_another_kind_among_the_inputs_have_no_record(device):
    """Such as a wrapper that looks like a CuPy array and is handed back results of its own kind."""

    class Wrapper:
        def __init__(self, array):
            self.array = array

        def __getattr__(self, name):
            return getattr(self.array, name)

    x, ids, weights, w1, w2 = BASE.arguments(device)
    assert runtime.key_of("moe_forward", ("swiglu", "minimal"), (x, ids, weights, w2, w1))[0] is not None
    assert runtime.key_of("moe_forward", ("swiglu", "minimal"), (x, ids, Wrapper(weights), w2, w1)) == (None, [])


def test_a_second_backward_still_raises(device):
    for _ in range(2):
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


def test_threads_share_a_record_but_no_memory(device):
    layer = Layer(8201, 3, 3, 1032, 72, "pair_transposed")
    first = step(device, layer)
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
    assert found["a"] == found["b"] == [first] * 3


def test_a_record_lists_why_and_its_first_launch_is_printed_on_request(device, monkeypatch, capsys):
    monkeypatch.setenv("MOEBLAZE_LOG", "1")
    BASE.forward(device)
    first = capsys.readouterr().err
    BASE.forward(device)
    assert not capsys.readouterr().err
    assert "up_fwd" in first and "Hopper's kernels: " in first and "dispatch_route_int32" in first


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_size_beyond_32_bits_is_refused(device, value):
    scalars, addresses = {"num_slots": value, "parts": 1}, ("partial_sums", "token_index_map", "grad_weights")
    launch = Launch(loader.entry("aggregation.cu", "weights_bwd_float32"), (1,), 32, addresses, scalars)
    with pytest.raises(OverflowError):
        runtime.Runtime(arrays.CuPy, 0, STREAM).launch(launch, 1, 2, 3)


def test_records_are_made_without_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    runtime.forget()
    x, ids, weights, w2 = (
        arrays.Layout(shape, strides, dtype, 0)
        for shape, strides, dtype in (
            ((40, 64), (64, 1), "bfloat16"),
            ((40, 2), (2, 1), "int32"),
            ((40, 2), (2, 1), "float32"),
            ((5, 32, 64), (2048, 64, 1), "bfloat16"),
        )
    )
    layer = LayerArrays(x, ids, weights, arrays.Layout((5, 64, 64), (4096, 64, 1), "bfloat16", 0), None, w2)
    steps = experts.configure_forward(layer, LayerOptions(), limits_of("sm90"))
    assert isinstance(steps.up_fwd.launch, Launch) and steps.first_layer == (80, 64)
    assert experts.configure_forward(layer, LayerOptions(), limits_of("sm90")) is steps


def test_the_cpu_has_no_records():
    runtime.forget()
    x, ids, weights = np.ones((3, 4), np.float32), np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
    w1, w2 = np.ones((2, 4, 6), np.float32), np.ones((2, 3, 4), np.float32)
    for _ in range(2):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2)
        mb.moe_backward(out, saved)
    assert not runtime._records


@pytest.fixture
def torch():
    """Imported before another module stands for CuPy."""
    module = pytest.importorskip("torch")
    pytest.importorskip("moeblaze_cupy.interop.torch")
    return module


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype", "transposed"),
    [((3, 5), "bfloat16", False), ((7,), "int32", False), ((2, 3, 5), "float32", True), ((0, 5), "float16", False)],
)
def test_new_memory_of_torch(torch, monkeypatch, current, shape, dtype, transposed):
    """By the function of compiled code on torch's current device, else by the one that is told the device."""
    used, strided, device = [], torch.empty_strided, torch.device("cuda", 1)

    def of_compiled_code(*arguments):
        used.append("compiled")
        return torch._C._dynamo.guards._empty_strided_cpu(*arguments)

    def told(*arguments, dtype, device):
        used.append(device)
        return strided(*arguments, dtype=dtype)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", of_compiled_code)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1 if current else 0, raising=False)
    monkeypatch.setattr(torch, "empty_strided", told)
    arrays._torch_empty.cache_clear()
    made = arrays.Torch.empty(torch.Size(shape), dtype, 1, transposed)
    arrays._torch_empty.cache_clear()
    want = torch.empty(shape, dtype=getattr(torch, dtype))
    if transposed:
        want = want.transpose(1, 2).contiguous().transpose(1, 2)
    assert used == (["compiled"] if current else [device])
    assert (made.array.shape, made.array.stride(), made.array.dtype) == (want.shape, want.stride(), want.dtype)
    assert made.ptr == made.array.data_ptr() and made.array._base is None


def test_a_tensor_without_memory_finds_no_record(torch, device, monkeypatch):
    """Its address is 0, which a kernel must not get. DTensors are of this kind too."""
    describe = arrays.Torch.describe
    replaced = {"describe": lambda a: dataclasses.replace(describe(a), device=0), "stream": lambda device: STREAM}
    replaced["empty"] = lambda shape, *_: arrays.Buffer(torch.zeros(shape), 1 << 20)
    for name, function in replaced.items():
        monkeypatch.setattr(arrays.Torch, name, staticmethod(function))
    monkeypatch.setattr(device, "where", lambda address: ("address",))
    plain, without = torch.zeros(40, 8), torch._efficientzerotensor((40, 8))
    for _ in range(2):
        mb.route(plain, 2)
        assert [entry for entry in device.log if entry[0] == "launch"]
        device.log.clear()
        with pytest.raises(TypeError, match=r"^route: logits: memory: expected a tensor with memory of its own"):
            mb.route(without, 2)
        assert not device.log


def test_torch_finds_records(torch, device, configured, monkeypatch):
    """CPU tensors that the layer takes for a GPU's, through autograd; their addresses are real ones."""
    moe = sys.modules["moeblaze_cupy.interop.torch"].moe

    def describe(a):
        return arrays.Array(a, a.data_ptr(), tuple(a.shape), a.stride(), str(a.dtype)[6:], 0)

    def empty(shape, dtype, device, transposed):
        E, *stored = shape
        made = torch.zeros((E, *(reversed(stored) if transposed else stored)), dtype=getattr(torch, dtype))
        return arrays.Buffer(made.swapaxes(1, 2) if transposed else made, made.data_ptr())

    for name, replaced in {"describe": describe, "empty": empty, "stream": lambda device: STREAM}.items():
        monkeypatch.setattr(arrays.Torch, name, staticmethod(replaced))
    monkeypatch.setattr(device, "where", lambda address: address if abs(address) < 1 << 24 else ("address",))

    def launched():
        found = [entry[1:] for entry in device.log if entry[0] == "launch"]
        device.log.clear()
        return found

    steps = []
    for _ in range(3):
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
        forward = launched()
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
            out.sum().backward()
        steps.append((forward, launched(), [(t.grad.shape, t.grad.stride(), t.grad.dtype) for t in inputs]))
    assert steps == steps[:1] * 3 and len(steps[0][0]) >= 3 and len(steps[0][1]) >= 5
    assert configured == ["forward", "backward"]
