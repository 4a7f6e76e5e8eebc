"""The layer with frozen weights in four and eight bits: the bits of the layer on the decoded weights, at all times."""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.quantised import scratch
from moeblaze_cupy.types import WEIGHT_FORMATS
from tests.cases import Case, make_inputs
from tests.layer.test_device_code import STREAM, emulated
from tests.quantised.cases import random_weight
from tests.quantised.test_decode import on_device

BF16 = ml_dtypes.bfloat16
SIZES = {"L": 21, "k": 2, "E": 4, "d": 64, "h": 64}
NAMES = (*WEIGHT_FORMATS, "mxfp8")


@pytest.fixture(autouse=True)
def without_scratch():
    mb.release_scratch()
    yield
    mb.release_scratch()


def frozen(name, seed=0, columns=2, **sizes):
    """The weights of a layer."""
    E, d, h = (sizes.get(letter, SIZES[letter]) for letter in "Edh")
    block = {"mxfp8": (1, 32), "e4m3": (64, 40)}.get(name)
    return random_weight(name, (E, d, columns * h), block, seed), random_weight(name, (E, h, d), block, seed + 1)


def decoded(weight):
    """The array that the layer would get."""
    if not isinstance(weight, mb.QuantizedWeight):
        return weight
    return mb.dequantize(weight).swapaxes(1, 2)


def inputs_of(seed=0, dtype=BF16, **sizes):
    case = Case(*(sizes.get(letter, SIZES[letter]) for letter in ("L", "k", "E", "d", "h")))
    x, ids, weights, _, _, grad_out = make_inputs(case, seed, dtype)
    return x, ids, weights, grad_out


def results(x, ids, weights, w1, w2, grad_out, needs=None, **options):
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, **options)
    grads = mb.moe_backward(grad_out, saved, needs=needs)
    return {"out": out, **{name: value for name, value in vars(grads).items() if value is not None}}


def assert_same(got, want):
    assert got.keys() == want.keys() and len(got) > 1
    for name, value in want.items():
        assert np.isfinite(np.asarray(value, np.float64)).all(), name
        unsigned = f"u{value.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(got[name]).view(unsigned), np.asarray(value).view(unsigned), name)


OPTIONS = [
    {},
    {"save": "paper"},
    {"save": "recompute"},
    {"save": "fp8"},
    {"gate_up": "interleaved", "activation": "swiglu_oai", "biases": True},
    {"activation": "relu2"},
    {"weights_on": "input"},
]


def with_biases(options, E, d, h):
    options = dict(options)
    if options.pop("biases", False):
        rng = np.random.default_rng(5)
        options |= {
            "b1": rng.standard_normal((E, 2 * h)).astype(np.float32),
            "b2": rng.standard_normal((E, d)).astype(np.float32),
        }
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu(name, options):
    x, ids, weights, grad_out = inputs_of()
    w1, w2 = frozen(name, columns=1 if options.get("activation") == "relu2" else 2)
    options = with_biases(options, *(SIZES[letter] for letter in "Edh"))
    got = results(x, ids, weights, w1, w2, grad_out, **options)
    of_biases = ("b1", "b2") if "b1" in options else ()
    assert got.keys() == {"out", "x", "weights", *of_biases}
    plain = decoded(w1), decoded(w2)
    assert_same(got, results(x, ids, weights, *plain, grad_out, ("x", "weights", *of_biases), **options))


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_both_is_packed(which):
    """The other one has its gradient, in float32 here."""
    x, ids, weights, grad_out = inputs_of(dtype=np.float32)
    given = [weight._replace(dtype="float32") for weight in frozen("nf4")]
    given[1 - which] = decoded(given[1 - which])
    got = results(x, ids, weights, *given, grad_out)
    want = results(x, ids, weights, *map(decoded, given), grad_out)
    assert want.pop(f"w{which + 1}") is not None
    assert_same(got, want)


# Experts 0 and 2 have no tokens: their memory stays NaN.
def some_experts(ids):
    return np.where(ids % 2 == 0, 3, 1).astype(np.int32)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_on_the_emulator(name, options):
    x, ids, weights, grad_out = inputs_of()
    ids = some_experts(ids)
    w1, w2 = frozen(name)
    options = with_biases(options, *(SIZES[letter] for letter in "Edh"))
    with emulated(seed=1) as device:
        to_device = {name: device.put(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
        arrays = [device.put(array) for array in (x, ids, weights)]
        of_layer = *arrays, on_device(device, w1), on_device(device, w2), device.put(grad_out)
        got = results(*of_layer, **to_device)
        device.synchronize()
        assert device.launched.count("decode") == 2  # backward reads what forward decoded
        plain = *arrays, device.put(decoded(w1)), device.put(decoded(w2)), device.put(grad_out)
        needs = ("x", "weights", *(("b1", "b2") if "b1" in options else ()))
        want = results(*plain, needs, **to_device)
        device.synchronize()
    assert_same(got, want)


class Layers:
    """Two layers on the emulator whose weights differ, and their results with plain weights."""

    def __init__(self, device, name="mxfp4", of_second=None):
        self.device = device
        self.inputs = [inputs_of(seed, **(of_second or {} if seed else {})) for seed in (0, 1)]
        self.weights = [frozen(name, 10 * seed, **(of_second or {} if seed else {})) for seed in (0, 1)]
        self.arrays = [[device.put(array) for array in inputs] for inputs in self.inputs]
        self.packed = [[on_device(device, weight) for weight in weights] for weights in self.weights]

    def forward(self, i, **options):
        return mb.moe_forward(*self.arrays[i][:3], *self.packed[i], **options)

    def backward(self, i, saved, **options):
        return mb.moe_backward(self.arrays[i][3], saved, **options)

    def want(self, i):
        plain = [self.device.put(decoded(weight)) for weight in self.weights[i]]
        found = results(*self.arrays[i][:3], *plain, self.arrays[i][3], ("x", "weights"))
        self.device.synchronize()
        return found

    def decodes(self):
        """Launches since the last call."""
        self.device.synchronize()
        number = self.device.launched.count("decode")
        self.device.launched.clear()
        return number

    def check(self, i, out, grads):
        self.device.synchronize()
        assert_same({"out": out, "x": grads.x, "weights": grads.weights}, self.want(i))


@pytest.mark.parametrize("of_second", [{}, {"h": 32}, {"E": 3}])
def test_two_layers_in_turn(of_second):
    """Each overwrites, or frees, what the other has decoded; only the last one's backward has it still."""
    with emulated() as device:
        layers = Layers(device, of_second=of_second)
        results_of = [layers.forward(i) for i in (0, 1)]
        assert layers.decodes() == 4
        grads = {1: layers.backward(1, results_of[1][1])}
        assert layers.decodes() == 0
        grads[0] = layers.backward(0, results_of[0][1])
        assert layers.decodes() == 2
        for i in (0, 1):
            layers.check(i, results_of[i][0], grads[i])


def test_checkpointing_decodes_once_for_a_recomputation_and_its_backward():
    with emulated() as device:
        layers = Layers(device)
        for i in (0, 1):
            layers.forward(i)
        assert layers.decodes() == 4
        for i in (1, 0):
            out, saved = layers.forward(i)
            layers.check(i, out, layers.backward(i, saved))
            device.launched.clear()
        out, saved = layers.forward(0)
        layers.backward(0, saved)
        assert layers.decodes() == 2


def test_memory_is_shared_and_kept():
    with emulated() as device:
        layers = Layers(device)
        _, saved = layers.forward(0)
        (kept,) = scratch._kept.values()
        addresses = [buffer.ptr for buffer in kept.buffers.values()]
        allocated = len(device.allocations)
        layers.backward(0, saved)
        layers.forward(1)
        sizes = [a.nbytes for a in device.allocations[allocated:]]
        assert max(sizes) < 2 * 4 * 64 * 64  # bytes of w2
        (kept,) = scratch._kept.values()
        assert [buffer.ptr for buffer in kept.buffers.values()] == addresses
        layers.forward(0, save=None)
        assert not scratch._kept  # nothing is left after a forward without a backward
        layers.decodes()


def test_parts_that_are_written_decode_again_in_the_next_call():
    with emulated() as device:
        layers = Layers(device)
        layers.forward(0)
        device.synchronize()
        others = layers.weights[1]
        for packed, other in zip(layers.packed[0], others, strict=True):
            for array, new in ((packed.data, other.data), (packed.scales, other.scales)):
                memory = array.base.base if array.base.base is not None else array.base
                memory.flags.writeable = True
                np.asarray(array)[...] = new
        layers.weights[0] = others
        out, saved = layers.forward(0)
        layers.check(0, out, layers.backward(0, saved))


def test_another_stream_has_memory_of_its_own():
    with emulated() as device:
        layers = Layers(device)
        first = layers.forward(0)
        device.synchronize()
        device.stream = STREAM + 1
        second = layers.forward(1)
        assert len(scratch._kept) == 2
        assert layers.decodes() == 2 + 2
        grads = layers.backward(0, first[1])  # of the call on the other stream
        assert layers.decodes() == 2
        layers.check(0, first[0], grads)
        device.stream = STREAM
        grads = layers.backward(1, second[1])
        layers.check(1, second[0], grads)


def test_calls_on_the_default_stream_per_thread_keep_nothing():
    """Each thread has another stream there, and all have one handle."""
    with emulated() as device:
        layers = Layers(device)
        device.stream = 2  # cudaStreamPerThread
        out, saved = layers.forward(0)
        layers.check(0, out, layers.backward(0, saved))
        assert layers.decodes() == 4 and not scratch._kept


def test_a_captured_call_decodes_for_itself():
    """A replay runs when other layers' weights are in the memory of eager calls."""
    with emulated() as device:
        layers = Layers(device)
        eager = layers.forward(0)
        device.synchronize()
        before = dict(scratch._kept)
        device.launched.clear()
        device.capturing = True
        captured = layers.forward(1)
        grads = layers.backward(1, captured[1])
        assert layers.decodes() == 4
        layers.check(1, captured[0], grads)
        device.capturing = False
        assert scratch._kept == before
        device.launched.clear()
        grads = layers.backward(0, eager[1])  # another call: the kept memory still holds its weights
        assert layers.decodes() == 0
        layers.check(0, eager[0], grads)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("packed", [("w1", "w2"), ("w1",), ("w2",), ()])
def test_a_first_call_compiles_no_gradients_of_frozen_weights(packed, biases):
    """What its forward asks for ahead is what its backward asks for, whatever a call with other weights compiled."""
    x, ids, weights, grad_out = inputs_of()
    options = with_biases({"biases": biases}, *(SIZES[letter] for letter in "Edh"))
    with emulated() as device, pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(loader, "compile_ahead", lambda _, variants: asked.append(list(variants)) or True)
        arrays = [device.put(array) for array in (x, ids, weights)]
        options = {name: device.put(value) for name, value in options.items()}
        given = [
            on_device(device, weight) if name in packed else device.put(decoded(weight))
            for name, weight in zip(("w1", "w2"), frozen("int8"), strict=True)
        ]
        _, saved = mb.moe_forward(*arrays, *given, **options)
        mb.moe_backward(device.put(grad_out), saved)
        device.synchronize()
    _, by_forward, by_backward = (variants for variants in asked if len(variants) > 1)
    assert by_forward == by_backward
    names = {variant.entry for variant in by_forward}
    assert any("wgrad" in name for name in names) == (len(packed) < 2), names


@pytest.fixture
def one_weight_at_a_time():
    """The limit is one byte less than both weights take in bf16."""
    mb.limit_scratch(2 * 3 * SIZES["E"] * SIZES["d"] * SIZES["h"] - 1)
    yield
    mb.limit_scratch(None)


@pytest.mark.usefixtures("one_weight_at_a_time")
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("options", [*OPTIONS[:5], {"lora": True}, {"needs": ("weights",)}], ids=str)
def test_weights_in_turn(options, tier):
    """The bits of the decoded weights. Another layer before backward leaves nothing of what forward decoded."""
    x, ids, weights, grad_out = inputs_of()
    ids = some_experts(ids)
    options, given = with_biases(options, *(SIZES[letter] for letter in "Edh")), frozen("mxfp4")
    needs = options.pop("needs", ("x", "weights", *(("b1", "b2") if "b1" in options else ())))
    if options.pop("lora", False):
        options["lora"], needs = factors(), (*needs, "lora")

    def run(put, w1, w2, other=None):
        named = {n: v.with_factors(map(put, v.factors)) if n == "lora" else v for n, v in options.items()}
        named = {n: put(v) if isinstance(v, np.ndarray) else v for n, v in named.items()}
        out, saved = mb.moe_forward(*map(put, (x, ids, weights)), w1, w2, **named)
        if other is not None:
            other.forward(1)
        grads = mb.moe_backward(put(grad_out), saved, needs=needs)
        found = {"out": out, **{n: v for n, v in vars(grads).items() if v is not None and n != "lora"}}
        return found | (dict(zip("abcd", grads.lora.factors, strict=True)) if grads.lora else {})

    with emulated(seed=1, tier=tier) as device:
        packed = [on_device(device, weight) for weight in given]
        want = run(device.put, *(device.put(decoded(weight)) for weight in given))
        device.synchronize()
        device.launched.clear()
        allocated = len(device.allocations)
        got = run(device.put, *packed)
        device.synchronize()
        (kept,) = scratch._kept.values()
        assert len({buffer.ptr for buffer in kept.buffers.values()}) == 1
        of_w2 = 2 * SIZES["E"] * SIZES["d"] * SIZES["h"]
        large = [a.nbytes for a in device.allocations[allocated:] if a.nbytes >= of_w2]
        assert "lora" in options or (len(large) == 1 and large[0] < 2.1 * of_w2)
        backward_reads_w1 = "x" in needs
        of_backward = (2 if options.get("save") == "recompute" else 0) + backward_reads_w1
        assert device.launched.count("decode") == 2 + of_backward
        with_another = run(device.put, *packed, other=Layers(device))
        device.synchronize()
    assert_same(got, want)
    assert_same(with_another, want)


def factors(rank=8):
    rng, (E, d, h) = np.random.default_rng(4), (SIZES[letter] for letter in "Edh")
    shapes = (E, rank, d), (E, 2 * h, rank), (E, rank, h), (E, d, rank)
    return mb.Lora(*((rng.standard_normal(shape) / 8).astype(np.float32) for shape in shapes))


@pytest.mark.usefixtures("one_weight_at_a_time")
def test_weights_in_turn_in_captured_calls_and_in_one_layer_after_another():
    with emulated() as device:
        layers = Layers(device)
        eager = layers.forward(0)
        device.synchronize()
        device.capturing = True
        captured = layers.forward(1)
        layers.check(1, captured[0], layers.backward(1, captured[1]))
        device.capturing = False
        device.launched.clear()
        grads = layers.backward(0, eager[1])
        assert layers.decodes() == 1  # w2 is there since forward
        layers.check(0, eager[0], grads)
        results_of = [layers.forward(i) for i in (0, 1)]
        for i in (0, 1):
            layers.check(i, results_of[i][0], layers.backward(i, results_of[i][1]))


def test_limits_of_scratch():
    needed = 2 * 2 * SIZES["E"] * SIZES["d"] * SIZES["h"]
    for wrong, error, got in ((0, ValueError, "at least 1, or None, got 0"), ("1", TypeError, "an int, got")):
        with pytest.raises(error, match=f"^limit_scratch: nbytes: expected {got}"):
            mb.limit_scratch(wrong)
    try:
        with emulated() as device:
            layers = Layers(device)
            out, saved = layers.forward(0)
            mb.limit_scratch(needed - 1)
            expected = f"a weight of at most {needed - 1} bytes in bfloat16, the limit of limit_scratch, got {needed}"
            with pytest.raises(ValueError, match=f"^moe_forward: w1: expected {expected} bytes$"):
                layers.forward(0)
            with pytest.raises(ValueError, match=f"^moe_backward: saved.w1: expected {expected} bytes$"):
                layers.backward(0, saved)
            x, ids, weights, _ = inputs_of()
            mb.moe_forward(x, ids, weights, *layers.weights[0])  # the CPU has no such memory
            mb.limit_scratch(None)
            layers.check(0, out, layers.backward(0, saved))
    finally:
        mb.limit_scratch(None)


def test_no_tokens():
    with emulated() as device:
        layers = Layers(device)
        x, ids, weights, grad_out = (device.put(array[:0]) for array in layers.inputs[0])
        out, saved = mb.moe_forward(x, ids, weights, *layers.packed[0])
        grads = mb.moe_backward(grad_out, saved)
        device.synchronize()
        assert out.shape == grads.x.shape == (0, SIZES["d"])


def bad_calls():
    x, ids, weights, grad_out = inputs_of()
    w1, w2 = frozen("mxfp4")
    given = x, ids, weights
    saved = mb.moe_forward(*given, w1, w2)[1]
    both = w1, w1
    scales = w2._replace(scales=w2.scales[:1])
    return [
        (
            mb.moe_backward,
            (grad_out, saved),
            {"needs": ("x", "w1")},
            ValueError,
            "moe_backward: needs: expected no gradient of w1",
        ),
        (
            mb.moe_backward_data,
            (grad_out, saved),
            {},
            ValueError,
            "moe_backward_data: needs: expected no gradient of w1 and w2",
        ),
        (
            mb.moe_forward,
            (*given, *frozen("nf4")),
            {"precision": "fp8"},
            ValueError,
            "moe_forward: precision: expected None with",
        ),
        (mb.moe_forward, (*given, both, w2), {}, TypeError, "moe_forward: w1: expected arrays in a pair, or one"),
        (mb.moe_forward, (*given, w1, scales), {}, ValueError, "moe_forward: w2.scales: expected shape (E, N, K / 32)"),
        (
            mb.moe_forward,
            (*given, w2, w2),
            {},
            ValueError,
            "moe_forward: w1 and w2: expected one h in shapes (E, d, 2h) and (E, h, d), got",
        ),
        (
            mb.moe_forward,
            (x.astype(np.float32), ids, weights, w1, w2),
            {},
            TypeError,
            "moe_forward: w1: expected dtype float32",
        ),
    ]


@pytest.mark.parametrize("number", range(7))
def test_messages(number):
    function, arguments, options, error, message = bad_calls()[number]
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    assert str(caught.value).startswith(message), str(caught.value)
