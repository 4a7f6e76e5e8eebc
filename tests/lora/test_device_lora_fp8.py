"""Low-rank factors beside products in e4m3 without a GPU: the layer on the emulator, against the NumPy backend."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import loader
from tests.cases import Case, relative_error
from tests.fp8.test_device_fp8 import TOLERANCE, assert_near, host
from tests.layer.test_device_code import emulated, in_float64
from tests.lora.lora_cases import by_name, exact, problem
from tests.lora.test_device_lora import HOPPER, assert_schedules_change_no_bit, run

BF16 = ml_dtypes.bfloat16
# Last steps and tiles that are not full, and an expert without rows.
CASE = Case(L=100, k=2, E=3, d=144, h=144, routing="absent")
RAGGED = Case(L=190, k=2, E=5, d=272, h=144, order="transposed", routing="empty_experts")
IN_BF16 = 1.5 * 2**-8  # that of layers in bf16, see test_device_lora.py
PLAIN = "x", "weights", "w1", "w2"


def on_hopper(**options):
    return emulated(HOPPER, seed=1, tier="sm90", **options)


def of_reference(inputs, lora, **options):
    x, ids, weights, w1, w2, grad_out = inputs
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, lora=lora, precision="fp8", **options)
    biases = [name for name in ("b1", "b2") if name in options]
    return by_name(out, reference.moe_backward(grad_out, saved, needs=(*PLAIN, "lora", *biases)))


def check(inputs, lora, **options):
    with on_hopper() as device:
        got = run(device, inputs, lora, precision="fp8", **options)
        products = [dict(v.macros) for _, v in loader._kernels if v.source.startswith("grouped_gemm")]
        assert products and all(m["FP8"] == "1" for m in products)
    want = of_reference(inputs, lora, **options)
    assert got.keys() == want.keys()
    assert_near(got, want)


@pytest.mark.parametrize(
    ("ranks", "save"),
    [((16, 40), "minimal"), ((80, 16), "fp8"), ((17, 64), "recompute"), ((None, 8), "paper"), ((128, None), "minimal")],
)
def test_ranks_and_policies(ranks, save):
    check(*problem(CASE, ranks, BF16, factor_dtype=np.float32), save=save)


@pytest.mark.parametrize("ranks", [(16, 16), (24, 24)])
@pytest.mark.parametrize("name", ["pair", "plain", "to_tokens", "biases", "input", "unreduced", "interleaved"])
def test_forms_of_the_layer(name, ranks):
    cases = {
        "pair": replace(RAGGED, order="pair"),
        "plain": replace(CASE, activation="gelu"),
        "to_tokens": replace(CASE, k=1),
    }
    case = cases.get(name, RAGGED)
    inputs, lora = problem(case, ranks, BF16, strided=True)
    rng, options = np.random.default_rng(1), {"activation": case.activation}
    if name == "biases":
        options["b1"] = rng.standard_normal((case.E, 2 * case.h)).astype(np.float32)
        options["b2"] = rng.standard_normal((case.E, case.d)).astype(BF16)
    if name == "input":
        options["weights_on"] = "input"
    if name == "interleaved":
        options["gate_up"] = "interleaved"
    if name == "unreduced":
        options["unreduced"] = True
        per_slot = rng.standard_normal((case.L, case.k, case.d)).astype(BF16)
        inputs = (*inputs[:2], None, *inputs[3:5], per_slot)
    check(inputs, lora, **options)


@pytest.mark.parametrize("ranks", [(16, 16), (24, 24)])
def test_zeros_of_second_factors_change_no_bit(ranks):
    """Of a layer whose weights were quantised before."""
    inputs, lora = problem(CASE, ranks, BF16)
    lora = lora._replace(b1=0 * lora.b1, b2=0 * lora.b2)
    with on_hopper() as device:
        x, ids, weights, w1, w2, grad_out = map(device.put, inputs)
        options = {"precision": "fp8", "fp8_weights": mb.quantize_weights(w1, w2)}
        got = run(device, inputs, lora, needs=PLAIN, **options)
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, **options)
        plain = by_name(out, mb.moe_backward(grad_out, saved, needs=PLAIN))
        device.synchronize()
    assert plain.keys() == got.keys()
    for name, values in plain.items():
        assert np.asarray(values).tobytes() == np.asarray(got[name]).tobytes(), name


@pytest.mark.parametrize("ranks", [(16, 16), (80, 40)])
def test_factors_are_multiplied_in_bf16(ranks):
    """Beside weights whose products are less than a thousandth of the factors', errors are those of bf16."""
    inputs, lora = problem(CASE, ranks, BF16)
    x, ids, weights, w1, w2, grad_out = inputs
    inputs = x, ids, weights, (w1 * BF16(2**-11)), (w2 * BF16(2**-11)), grad_out
    with on_hopper() as device:
        got = run(device, inputs, lora, precision="fp8", needs=("x", "weights", "lora"))
    want = exact(inputs, lora)
    for name, values in got.items():
        assert relative_error(host(values), host(want[name])) <= IN_BF16, name


def test_tiny_and_huge_rows_stay_apart():
    """Rows of zeros, and with NaN, infinities and products of scales below float32's range, change no other row."""
    inputs, lora = problem(CASE, (16, 24), BF16)
    x, ids, weights, w1, w2, grad_out = inputs
    special = x.copy(), grad_out.copy()
    for array in special:
        array[0], array[1], array[2, 3], array[3, 5] = 0, BF16(2.0**-120), np.nan, np.inf
    results = []
    for x_of, grad_of in ((x, grad_out), special):
        with on_hopper() as device:
            of_call = x_of, ids, weights, w1, w2, grad_of
            results.append(run(device, of_call, lora, precision="fp8", needs=("x", "weights")))
    plain, found = ({n: in_float64(v) for n, v in result.items()} for result in results)
    for name in plain:
        np.testing.assert_array_equal(found[name][4:], plain[name][4:], err_msg=name)
    routed = (ids >= 0).any(axis=1) & (ids < CASE.E).any(axis=1)
    assert not found["x"][0].any() and np.isfinite(found["x"][1]).all()
    for row in (2, 3):
        assert not routed[row] or not np.isfinite(found["x"][row]).all()


def test_schedules_and_clusters_change_no_bit(monkeypatch):
    inputs, lora = problem(Case(L=300, k=2, E=2, d=272, h=144), (16, 80), BF16)
    assert_schedules_change_no_bit(monkeypatch, inputs, lora, precision="fp8")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("ranks", [(16, 64), (40, 16)])
@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
@pytest.mark.parametrize("save", ["minimal", "recompute", "fp8"])
def test_layer_on_a_gpu(save, gate_up, ranks):
    """The same claims on large tiles in 2-CTA clusters: near NumPy, equal bits on repeat, for zeros, in torch."""
    torch = pytest.importorskip("torch")
    from moeblaze_cupy import frameworks

    inputs, lora = problem(Case(L=2048, k=2, E=4, d=512, h=384, order="transposed", routing="absent"), ranks, BF16)

    def put(array):
        return None if array is None else frameworks.Torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def in_memory_order(array):
        return put(array.swapaxes(1, 2)).transpose(1, 2)

    x, ids, weights, w1, w2, grad_out = inputs
    layer = put(x), put(ids), put(weights), in_memory_order(w1), in_memory_order(w2)

    def passes(factors, needs):
        out, saved = mb.moe_forward(*layer, lora=factors, precision="fp8", save=save, gate_up=gate_up)
        return by_name(out, mb.moe_backward(put(grad_out), saved, needs=needs))

    factors = lora.with_factors(map(put, lora.factors))
    got, again = (passes(factors, ("x", "weights", "lora")) for _ in range(2))
    want = of_reference(inputs, lora, save=save, gate_up=gate_up)
    for name, values in got.items():
        assert torch.equal(values, again[name]), name
        assert relative_error(host(values.double().cpu().numpy()), host(want[name])) <= TOLERANCE, name
    zeros = factors._replace(b1=torch.zeros_like(factors.b1), b2=torch.zeros_like(factors.b2))
    plain, of_zeros = passes(None, ("x", "weights")), passes(zeros, ("x", "weights"))
    for name, values in plain.items():
        assert torch.equal(values, of_zeros[name]), name
    if save == "minimal":
        from moeblaze_cupy.interop.torch import moe

        leaves = [tensor.requires_grad_() for tensor in (layer[0], layer[2], *factors.factors)]
        out = moe(*layer, lora=factors, precision="fp8", gate_up=gate_up)
        of_torch = (out.detach(), *torch.autograd.grad(out, leaves, put(grad_out)))
        for (name, values), found in zip(got.items(), of_torch, strict=True):
            assert torch.equal(values, found), name
