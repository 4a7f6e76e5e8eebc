"""precision="fp8" of the reference: exact where numbers are small integers, near the exact layer elsewhere."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.fp8 import checks as fp8_checks
from tests.layer.test_device_code import DTYPES
from tests.oracle import expected, make_problem

NAMES = ("x", "weights", "w1", "w2")


def run(problem, precision, **options):
    arrays = problem.arrays()
    out, saved = reference.moe_forward(**arrays, **problem.options, precision=precision, **options)
    grads = vars(reference.moe_backward(problem.grad_out, saved))
    return {"out": out} | {name: grads[name] for name in NAMES}, saved


def integers(L, k, E, d, h, activation, gate_up="halves", seed=0):
    """Every row, column and group of 128 has a 7 among integers up to 7, so that all scales are 2^-6.

    Few are not 0, so that y and the gradients of a and b are at most 16 and their scales are powers of two.
    """
    problem = make_problem(activation, np.float64, sizes=(L, k, E, d, h), gate_up=gate_up, bias=None)
    rng = np.random.default_rng(seed)
    gated = problem.activation.form.gated
    problem.x[:] = rng.integers(-2, 3, problem.x.shape) * (rng.random(problem.x.shape) < 0.1)
    problem.x[:, 0] = 7  # meets zeros of w1
    problem.grad_out[:] = rng.integers(-2, 3, problem.grad_out.shape) * (rng.random(problem.grad_out.shape) < 0.1)
    problem.grad_out[:, 0] = 7  # meets zeros of w2
    for w in (problem.w1, problem.w2):
        w[:] = rng.integers(-1, 2, w.shape) * (rng.random(w.shape) < 0.1)
    problem.w1[:, 0], problem.w2[:, :, 0] = 0, 0
    # The last row of x's columns is for weights alone: x is 0 there, and so is grad_out in its last column.
    problem.x[:, -1] = problem.grad_out[:, -1] = 0
    problem.w1[:, -1] = problem.w2[:, :, -1] = 7
    problem.weights[:] = 2.0 ** rng.integers(-1, 2, problem.weights.shape)
    return problem, gated


@pytest.mark.parametrize(("activation", "gate_up"), [("relu", "halves"), ("reglu", "halves"), ("reglu", "interleaved")])
def test_small_integers_are_exact_but_for_the_scales_of_groups(activation, gate_up):
    """a, b, and the gradient of y are exact, so are those of w1 and w2, which come from these alone."""
    problem, _ = integers(40, 2, 3, 32, 272, activation, gate_up)
    want, exact_saved = run(problem, None)
    got, saved = run(problem, "fp8")
    np.testing.assert_array_equal(saved.first_layer, exact_saved.first_layer)
    for name in ("w1", "w2", "weights"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert (saved.fp8_weights.w1_scales == 2.0**-6).all() and (saved.fp8_weights.w2_scales == 2.0**-6).all()


def test_small_integers_are_exact_in_all_results():
    """y and the gradient of a are 7 times a power of two where a group's magnitude is largest: their scales are 2^n."""
    d, h = 32, 144
    problem, _ = integers(24, 1, 2, d, h, "relu")
    problem.x[:], problem.grad_out[:] = 0, 0
    rng = np.random.default_rng(1)
    problem.x[:, :2], problem.grad_out[:, :2] = 7, 7
    problem.w1[:] = rng.integers(-1, 2, problem.w1.shape)
    problem.w2[:] = rng.integers(-1, 2, problem.w2.shape)
    problem.w1[:, 0], problem.w1[:, 1:] = rng.integers(0, 2, (2, h)), problem.w1[:, 1:] * (np.arange(1, d) > 1)[:, None]
    problem.w2[:, :, 0] = rng.integers(-1, 2, (2, h))
    problem.w2[:, :, 1] = 0
    problem.w1[:, 0, ::128], problem.w2[:, ::128, 0] = 1, 1  # each group has a largest y, and a largest gradient
    problem.w1[:, -1], problem.w2[:, :, -1] = 7, 7
    want, _ = run(problem, None)
    got, _ = run(problem, "fp8")
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    assert want["out"].any() and want["x"].any()


@pytest.mark.parametrize(
    ("activation", "gate_up", "order", "h"),
    [
        ("swiglu", "halves", "row", 272),
        ("swiglu_softcap", "interleaved", "transposed", 144),
        ("gelu", "halves", "pair", 48),
    ],
)
@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute"])
def test_layers_are_near_the_exact_ones(activation, gate_up, order, h, save):
    """Errors of e4m3 with these scales on normal inputs are 0.04 to 0.08 of the norm."""
    bias = "dtype" if activation == "swiglu_softcap" else None
    order = "row" if activation == "gelu" else order
    problem = make_problem(
        activation, DTYPES["bfloat16"], sizes=(80, 2, 5, 144, h), gate_up=gate_up, order=order, bias=bias
    )
    want = expected(problem)
    got, _ = run(problem, "fp8", save=save)
    for name, values in got.items():
        error = np.linalg.norm(values.astype(np.float64) - want[name]) / np.linalg.norm(want[name])
        assert 0.02 < error < 0.11, (name, error)


def test_given_weights_are_used_and_kept():
    problem = make_problem("swiglu", DTYPES["bfloat16"], sizes=(40, 2, 5, 48, 144), bias=None)
    quantised = reference.quantize_weights(problem.w1, problem.w2)
    want, _ = run(problem, "fp8")
    got, saved = run(problem, "fp8", fp8_weights=quantised)
    assert saved.fp8_weights is quantised
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    quantised.w1_scales[:] *= 2
    other, _ = run(problem, "fp8", fp8_weights=quantised)
    assert (np.asarray(other["out"]) != np.asarray(got["out"])).any()


@pytest.mark.parametrize("field", fp8_checks.FIELDS)
def test_weights_without_an_array_are_named(field):
    from moeblaze_cupy.interop.torch import moe

    problem = make_problem("swiglu", DTYPES["bfloat16"], sizes=(40, 2, 5, 48, 144), bias=None)
    given = dataclasses.replace(mb.quantize_weights(problem.w1, problem.w2), **{field: None})
    named = rf"fp8_weights\.{field}: expected an array, as quantize_weights makes, got None$"
    options = problem.options | {"precision": "fp8", "fp8_weights": given}
    with pytest.raises(TypeError, match=f"^moe_forward: {named}"):
        mb.moe_forward(**problem.arrays(), **options)
    tensors = {
        name: array if array is None else arrays.Torch.from_numpy(array) for name, array in problem.arrays().items()
    }
    with pytest.raises(TypeError, match=f"^moe: {named}"):
        moe(**tensors, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(value):
    problem = make_problem("swiglu", np.float32, sizes=(40, 2, 5, 48, 144), bias=None)
    want, _ = run(problem, "fp8")
    problem.x[3, 5] = value
    got, _ = run(problem, "fp8")
    others = np.arange(40) != 3
    assert (problem.ids[3] >= 0).any() and np.isnan(got["out"][3]).all()
    for name in ("out", "x", "weights"):
        np.testing.assert_array_equal(got[name][others], want[name][others], err_msg=name)
