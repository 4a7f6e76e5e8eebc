"""Activations with constants, biases and interleaved gates on the emulated kernels of both tiers.

The emulator's device is that of test_device_code.py.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.gemm import config as gemm_config
from tests.emulator import KERNELS
from tests.layer import test_device_code as portable
from tests.layer.test_device_code import DTYPES, MARGIN, emulated
from tests.layer.test_device_code_sm90 import ONE_CLUSTER
from tests.oracle import LIMITED, WITHOUT_CONSTANTS, Problem, expected, make_problem, mismatches

TIERS = ("sm80", "sm90")


def on(tier, seed=0):
    return emulated(ONE_CLUSTER, seed, tier) if tier == "sm90" else emulated(seed=seed)


def run(device, problem: Problem, save="minimal", **options):
    """Results by name; the device's arrays."""
    arrays = {name: device.put(value) for name, value in problem.arrays().items()}
    out, saved = mb.moe_forward(**arrays, **problem.options, save=save)
    gradients = vars(mb.moe_backward(device.put(problem.grad_out), saved, **options))
    device.synchronize()
    return {"out": out} | {name: gradient for name, gradient in gradients.items() if gradient is not None}


def assert_right(device, problem, **options):
    got = run(device, problem, **options)
    want = expected(problem)
    assert set(got) == set(want)
    assert not mismatches(got, want, problem.x.dtype)
    for name in ("w1", "w2", "b1", "b2"):
        for part in got[name] if isinstance(got.get(name), tuple) else [got[name]] if name in got else []:
            assert not np.asarray(part[1]).astype(np.float64).any()  # expert 1 has no rows
    return got


# Activation, memory order, gate_up, dtype of the biases: each activation once, each order of columns in both memory
# orders.
LAYERS = [
    ("swiglu_oai", "row", "interleaved", "dtype"),
    ("swiglu_clamp", "pair_transposed", "halves", np.float32),
    ("swiglu_clamp_after", "transposed", "interleaved", np.float32),
    ("swiglu_softcap", "row", "halves", "dtype"),
    ("geglu_tanh", "transposed", "halves", None),
    ("gelu_tanh", "row", "halves", np.float32),
    ("relu2", "transposed", "halves", "dtype"),
]


def test_every_activation_has_a_layer():
    """Those that test_device_code.py does not have."""
    assert {name for name, *_ in LAYERS} == {*LIMITED, *WITHOUT_CONSTANTS}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "order", "gate_up", "bias"), LAYERS, ids=[layer[0] for layer in LAYERS])
def test_layer(name, order, gate_up, bias, tier):
    problem = make_problem(name, DTYPES["bfloat16"], order=order, gate_up=gate_up, bias=bias)
    with on(tier, seed=1) as device:
        assert_right(device, problem)
        gemms = {variant.source for _, variant in loader._kernels if variant.source.startswith("grouped_gemm")}
        assert gemms == {f"grouped_gemm_{tier}.cu"}


@pytest.mark.parametrize(("gate_up", "order"), [("interleaved", "row"), ("halves", "pair_transposed")])
def test_layer_of_odd_sizes_in_float32(gate_up, order):
    sizes = (30, 2, 3, 31, 67)
    problem = make_problem("swiglu_oai", np.float32, sizes=sizes, order=order, gate_up=gate_up)
    with on("sm80") as device:
        assert_right(device, problem)


@pytest.mark.parametrize("tier", TIERS)
def test_one_slot_per_token_and_panels(tier):
    """k = 1 goes to tokens on Hopper; two panels take the bias from their own first column on."""
    with on(tier) as device, pytest.MonkeyPatch.context() as patch:
        assert_right(device, make_problem("swiglu_oai", DTYPES["float16"], sizes=(40, 1, 3, 264, 72)))
        panels = ((0, 256), (256, 8))
        patch.setattr(gemm_config, "panels", lambda *_: (panels, ""))
        runtime.forget()
        assert_right(device, make_problem("swiglu_oai", DTYPES["float16"], sizes=(40, 2, 3, 264, 72)))


@pytest.mark.parametrize("tier", TIERS)
def test_save_policies_and_seeds(tier):
    """The same bits for all orders of threads, and where a, b are computed again; "paper" has rounded V(a) * M(b)."""
    problem = make_problem("swiglu_oai", DTYPES["bfloat16"], gate_up="interleaved")
    with on(tier) as device:
        want = run(device, problem)
    with on(tier, seed=2) as device:
        assert not portable.differences(want, run(device, problem))
        assert not portable.differences(want, run(device, problem, save="recompute"))
        assert not mismatches(run(device, problem, save="paper"), expected(problem), problem.x.dtype)


@pytest.mark.parametrize(
    ("order", "bias", "save"),
    [("row", "dtype", "minimal"), ("transposed", np.float32, "recompute"), ("row", None, "paper")],
)
def test_square_tiles_have_the_bits_of_others(order, bias, save):
    """Of three products; an expert with a full tile of 192 rows and another, one without rows, and one of few."""
    problem = make_problem(
        "swiglu_oai", DTYPES["bfloat16"], sizes=(230, 2, 4, 344, 200), order=order, gate_up="interleaved", bias=bias
    )
    problem.ids[problem.ids == 2] = 3
    problem.ids[:3] = 2
    with pytest.MonkeyPatch.context() as patch:
        results = {}
        for square, seed in ((False, 0), (True, 1), (True, 2)):
            patch.setattr(gemm_config, "square_product", lambda *_, square=square: (square, ""))
            runtime.forget()
            with on("sm90", seed) as device:
                results[square, seed] = run(device, problem, save)
                squares = {v.entry for _, v in loader._kernels if dict(v.macros).get("BM") == "192"}
                assert {"up_fwd", "down_fwd", "up_bwd"} & squares == (
                    {"up_fwd", "down_fwd", "up_bwd"} if square else set()
                )
        want = results.pop((False, 0))
    runtime.forget()
    assert not mismatches(want, expected(problem), problem.x.dtype)
    assert [portable.differences(want, got) for got in results.values()] == [[], []]


@pytest.mark.parametrize("sizes", [(0, 2, 3, 16, 24), (5, 2, 3, 16, 24)], ids=["no_tokens", "no_experts"])
def test_gradients_of_biases_without_rows_are_zeros(sizes):
    problem = make_problem("swiglu_oai", DTYPES["bfloat16"], sizes=sizes, gate_up="interleaved")
    problem.ids[:] = -1
    with on("sm80") as device:
        got = run(device, problem)
    for name in ("out", "b1", "b2", "weights", "w1", "w2"):
        assert not np.asarray(got[name]).astype(np.float64).any()


@pytest.mark.parametrize("tier", TIERS)
def test_nan_in_an_unused_experts_biases_reaches_nobody(tier):
    problem = make_problem("swiglu_oai", DTYPES["bfloat16"], gate_up="interleaved")
    with on(tier) as device:
        want = run(device, problem)
        problem.b1[1] = problem.b2[1] = np.nan
        assert not portable.differences(want, run(device, problem))


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_of_biases_alone_and_accumulated(tier):
    problem = make_problem("swiglu_clamp", DTYPES["bfloat16"], order="pair", bias=np.float32)
    with on(tier) as device:
        want = run(device, problem)
        only = run(device, problem, needs=("b2",))
        assert set(only) == {"out", "b2"} and not portable.differences({"b2": only["b2"]}, want)
        only = run(device, problem, needs=("b1", "weights"), save="recompute")
        assert set(only) == {"out", "weights", "b1"}
        assert not portable.differences({"b1": only["b1"], "weights": only["weights"]}, want)
        totals = {"b1": tuple(device.allocate(b.shape, np.float32, MARGIN) for b in problem.b1)}
        totals["b2"] = device.allocate(problem.b2.shape, DTYPES["bfloat16"], MARGIN)
        for total in (*totals["b1"], totals["b2"]):
            total[:] = 1
        got = run(device, problem, needs=("b1", "b2"), accumulate=totals)
        assert got["b2"] is totals["b2"] and got["b1"][0] is totals["b1"][0]
        for total, gradient in zip((*totals["b1"], totals["b2"]), (*want["b1"], want["b2"]), strict=True):
            exact = 1 + np.asarray(gradient).astype(np.float64)
            tolerance = 2**-8 if total.dtype != np.float32 else 1e-6
            np.testing.assert_allclose(np.asarray(total).astype(np.float64), exact, rtol=tolerance, atol=tolerance)


def test_constants_share_compiled_kernels():
    name = "swiglu_clamp"
    with on("sm90") as device:
        first = make_problem(name, DTYPES["bfloat16"])
        one = run(device, first)
        compiled = set(loader._kernels)
        other = run(device, replace(first, activation=mb.Activation(name, limit=0.5)))
        assert set(loader._kernels) == compiled and portable.differences(one, other)
        assert LIMITED[name] == first.activation


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("const bool outside = fabsf(x) > limit;", "const bool outside = fabsf(x) >= limit;"),
        ("const bool outside = fabsf(x) > limit;", "const bool outside = x > limit;"),
        ("{value, a > limit ? 0.f :", "{value, a >= limit ? 0.f :"),
        ("{value, a > limit ? 0.f :", "{value, a < limit ? 0.f :"),
        ("{value, a > limit ? 0.f :", "{value, false ? 0.f :"),
        ("{clamped.value + 1.f, clamped.derivative}", "{clamped.value + 1.f, 1.f}"),
    ],
)
def test_a_wrong_mask_shows(monkeypatch, text, instead):
    """An exclusive mask, one of the other sign, and none."""
    source = (KERNELS / "common" / "activation.cuh").read_text()
    assert source.count(text) == 1
    build = portable.build

    def built(name, macros, code):
        mutated = {"activation.cuh": source.replace(text, instead)}
        return build(name, macros, code, mutated if macros.get("ENTRY") == "down_bwd" else None)

    monkeypatch.setattr(portable, "_compiled", lambda s, c, m: portable._compilers().submit(built, s, dict(m), c))
    problem = make_problem("swiglu_oai", np.float32)
    with on("sm80") as device:
        assert any(found.startswith("b1") for found in mismatches(run(device, problem), expected(problem), np.float32))
