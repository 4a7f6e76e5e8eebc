"""precision="fp8" on experts in mxfp4: the bits of a layer whose e4m3 weights are made here, of the exact numbers."""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.quantised import scratch
from moeblaze_cupy.types import FACTORS, Fp8Rows
from tests.layer.test_device_code import emulated
from tests.layer_calls import backward_into, forward_into
from tests.quantised.cases import in_float64
from tests.quantised.test_decode import on_device
from tests.quantised.test_layer_quantised import (
    BF16,
    SIZES,
    assert_same,
    decoded,
    frozen,
    inputs_of,
    results,
    some_experts,
    with_biases,
)

PAIRS = {"gate_up": "interleaved", "activation": "swiglu_oai"}
OPTIONS = [
    {},
    PAIRS | {"biases": True},
    {"save": "recompute"},
    PAIRS | {"save": "recompute"},
    {"save": "fp8"},
    {"save": "paper"},
    {"activation": "relu2"},
    {"weights_on": "input"},
    {"factors": (16, 24)},
    PAIRS | {"biases": True, "factors": (40, 16)},
]  # factors: ranks of low-rank factors beside both weights


@pytest.fixture(autouse=True)
def without_scratch():
    mb.release_scratch()
    yield
    mb.release_scratch()


def in_e4m3(w1, w2, gate_up="halves"):
    """Fp8Weights with powers of two, from float64; all numbers are exact in e4m3."""
    fields = []
    halves = w1.shape[2] // w2.shape[1]
    for weight, number in ((w1, halves), (w2, 1)):
        exact = in_float64(weight)
        E, N, K = exact.shape
        groups = 1 if gate_up == "interleaved" else number
        top = weight.scales.reshape(E, groups, -1).max(axis=2).astype(int)
        scales = 2.0 ** (top - 133)
        codes = (exact.reshape(E, groups, -1) / scales[:, :, None]).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(codes.astype(np.float64) * scales[:, :, None], exact.reshape(E, groups, -1))
        stored = codes.view(np.uint8).reshape(E, N, K)
        of_halves = np.array(np.broadcast_to(scales, (E, number)), np.float32)
        fields += [np.ascontiguousarray(stored.swapaxes(1, 2)), stored, of_halves]
    return mb.Fp8Weights(*fields, gate_up)


def layer_of(options, put=lambda array: array, ids_of=lambda ids: ids):
    """Arguments of `results` with packed weights, and those with the test's e4m3."""
    x, ids, weights, grad_out = inputs_of()
    given, gate_up = dict(options), options.get("gate_up", "halves")
    w1, w2 = frozen("mxfp4", columns=1 if options.get("activation") == "relu2" else 2)
    w1.scales[:, : w1.shape[2] // 2] += 3  # gate's and up's scales differ
    given = with_biases(given, *(SIZES[letter] for letter in "Edh"))
    given = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    arrays = [put(array) for array in (x, ids_of(ids), weights)]
    made = in_e4m3(w1, w2, gate_up)
    fields = {
        name: value if name == "gate_up" else put(value) for name, value in vars(made).items() if value is not None
    }
    needs = ("x", "weights", *(name for name in ("b1", "b2") if name in given))
    if ranks := given.pop("factors", None):
        rng, (E, d, h) = np.random.default_rng(2), (SIZES[letter] for letter in "Edh")
        sizes = (ranks[0], d), (2 * h, ranks[0]), (ranks[1], h), (d, ranks[1])
        given["lora"] = mb.Lora(*(put((0.1 * rng.standard_normal((E, *size))).astype(np.float32)) for size in sizes))
        needs = (*needs, "lora")
    packed = (*arrays, w1, w2, put(grad_out)), given | {"precision": "fp8"}
    plain = *arrays, put(decoded(w1)), put(decoded(w2)), put(grad_out), needs
    return packed, (plain, given | {"precision": "fp8", "fp8_weights": mb.Fp8Weights(**fields)})


def run(arguments, options):
    made = results(*arguments, **options)
    lora = made.pop("lora", None)
    return made if lora is None else made | dict(zip(FACTORS, lora.factors, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_the_cpu(options):
    packed, plain = layer_of(options)
    assert_same(run(*packed), run(*plain))


def test_errors_are_those_of_the_products():
    """On normal inputs the rows in e4m3 cost 0.03 to 0.09 of the norm, and the weights nothing."""
    (arguments, options), (plain, _) = layer_of({"gate_up": "interleaved"})
    got = run(arguments, options)
    want = run(plain, {name: value for name, value in options.items() if name != "precision"})
    for name, value in want.items():
        exact = np.asarray(value, np.float64)
        error = np.linalg.norm(np.asarray(got[name], np.float64) - exact) / np.linalg.norm(exact)
        assert 0.02 < error < 0.1, (name, error)


def launches(device):
    return [device.launched.count(name) for name in ("mxfp4_to_e4m3", "mxfp4_to_e4m3_transposed", "decode")]


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_rows_in_e4m3_change_no_bit(save):
    """Rows that another rank has quantised, on the emulator."""
    found = []
    for convert in (lambda rows: rows, lambda rows: Fp8Rows(*reference.fp8.quantize_rows(rows))):
        with emulated(seed=1, tier="sm90") as device:
            x, ids, weights, grad_out = inputs_of()
            rows, grads = (
                Fp8Rows(*map(device.put, of)) if isinstance(of, Fp8Rows) else device.put(of)
                for of in (convert(x), convert(grad_out))
            )
            w1, w2 = (on_device(device, weight) for weight in frozen("mxfp4"))
            out, saved = forward_into(
                None, rows, device.put(ids), device.put(weights), w1, w2, precision="fp8", save=save
            )
            made, _ = backward_into(None, "moe_backward", grads, saved, ("x", "weights"), False, None)
            device.synchronize()
            found.append(
                {name: np.asarray(of) for name, of in (("out", out), ("x", made.x), ("weights", made.weights))}
            )
        mb.release_scratch()
    for name, want in found[0].items():
        assert want.any()
        np.testing.assert_array_equal(found[1][name], want, err_msg=name)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_the_emulator(options, limited):
    """Experts without tokens keep NaN in memory. With a limit both weights have the same memory."""
    with emulated(seed=1, tier="sm90") as device:
        packed, plain = layer_of(options, device.put, some_experts)
        (*arrays, w1, w2, grad_out), given = packed
        of_w1, of_w2 = (np.prod(weight.shape) for weight in (w1, w2))
        try:
            mb.limit_scratch(int(of_w1 + of_w2) - limited)
            before = len(device.allocations)
            got = run((*arrays, on_device(device, w1), on_device(device, w2), grad_out), given)
            device.synchronize()
            (kept,) = scratch._kept.values()
            assert kept.buffer.array.nbytes == of_w1 + (0 if limited else of_w2)
            if "factors" not in options:  # whose other arrays have such sizes, too
                assert sum(a.nbytes == kept.buffer.array.nbytes for a in device.allocations[before:]) == 1
            again = options.get("save") == "recompute"
            assert launches(device) == [2 + again, 2, 0]
        finally:
            mb.limit_scratch(None)
        want = run(*plain)
        device.synchronize()
    assert_same(got, want)


def test_layers_in_turn_and_captured_calls():
    """Other layers overwrite what a forward decoded, and a captured call has memory of its own."""
    with emulated(tier="sm90") as device:
        (arguments, options), plain = layer_of({}, device.put)
        *arrays, w1, w2, grad_out = arguments
        packed = on_device(device, w1), on_device(device, w2)
        other = [on_device(device, weight) for weight in frozen("mxfp4", seed=7)]
        saved = [mb.moe_forward(*arrays, *weights, **options)[1] for weights in (packed, other)]
        assert saved[0].fp8_weights is None
        grads = mb.moe_backward(grad_out, saved[0])
        mb.moe_forward(*arrays, *packed)  # products in bf16 have other memory
        assert len(scratch._kept) == 2
        device.synchronize()
        before = dict(scratch._kept)
        device.capturing = True
        captured = run((*arrays, *packed, grad_out), options)
        device.synchronize()
        device.capturing = False
        assert scratch._kept == before
        want = run(*plain)
        device.synchronize()
    assert_same(captured, want)
    assert_same({"x": grads.x, "weights": grads.weights}, {name: want[name] for name in ("x", "weights")})


def test_chunks_of_tokens():
    """Each chunk has index lists of its own, and the limit counts the memory of the decoded weights."""
    with emulated(tier="sm90") as device:
        (arguments, options), _ = layer_of({}, device.put)
        *arrays, w1, w2, grad_out = arguments
        given = (*arrays, on_device(device, w1), on_device(device, w2), grad_out)
        want = run(given, options)
        with pytest.raises(ValueError, match="moe_forward: memory_limit: expected at least") as caught:
            run(given, options | {"memory_limit": 1})
        least = int(str(caught.value).split("at least ")[1].split(" ")[0])
        got = run(given, options | {"memory_limit": least})
        device.synchronize()
        assert least > np.prod(w1.shape) + np.prod(w2.shape)
    for name, value in want.items():
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32), np.asarray(value, np.float32), rtol=2**-7, atol=2**-7
        )


def test_messages():
    x, ids, weights, grad_out = inputs_of()
    packed, other = frozen("mxfp4"), frozen("nf4")
    of_precision = (
        "moe_forward: precision: expected None with QuantizedWeight, unless w1 and w2 are in 'mxfp4', got 'fp8'"
    )
    for given, got in (
        (other, "and 'nf4' for w1"),
        ((packed[0], other[1]), "and 'nf4' for w2"),
        ((packed[0], decoded(packed[1])), "and 'an array' for w2"),
    ):
        with pytest.raises(ValueError, match=f"^{of_precision} {got}$"):
            mb.moe_forward(x, ids, weights, *given, precision="fp8")
    with pytest.raises(ValueError, match=r"^moe_forward: precision: expected one of None, 'fp8', got 'fp4'$"):
        mb.moe_forward(x, ids, weights, *packed, precision="fp4")
    with pytest.raises(ValueError, match=r"^moe_forward: fp8_weights: expected None with QuantizedWeight, got"):
        mb.moe_forward(x, ids, weights, *packed, precision="fp8", fp8_weights=in_e4m3(*packed))
    saved = mb.moe_forward(x, ids, weights, *packed, precision="fp8")[1]
    with pytest.raises(ValueError, match=r"^moe_backward: needs: expected no gradient of w1, frozen"):
        mb.moe_backward(grad_out, saved, needs=("x", "w1"))
    single = x.astype(np.float32), ids, weights, *(weight._replace(dtype="float32") for weight in packed)
    with pytest.raises(TypeError, match=r"^moe_forward: x: expected bfloat16 with precision='fp8', got float32$"):
        mb.moe_forward(*single, precision="fp8")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_the_gpu(options):
    """The bits of the layer on the test's e4m3."""
    import cupy

    def put(array):
        return cupy.asarray(array.view(np.uint16)).view(BF16) if array.dtype == BF16 else cupy.asarray(array)

    (arguments, given), plain = layer_of(options, put, some_experts)
    *arrays, w1, w2, grad_out = arguments
    packed = [
        weight._replace(data=cupy.asarray(weight.data), scales=cupy.asarray(weight.scales)) for weight in (w1, w2)
    ]
    got, want = run((*arrays, *packed, grad_out), given), run(*plain)
    assert_same({n: cupy.asnumpy(v) for n, v in got.items()}, {n: cupy.asnumpy(v) for n, v in want.items()})
