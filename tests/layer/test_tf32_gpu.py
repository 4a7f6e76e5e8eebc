"""Products of float32 layers whose operands are rounded to TF32, on a GPU; and what all tests of TF32 share."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.types import GRADIENTS
from tests.cases import CASES, Case, make_inputs, relative_error
from tests.layer import test_layer

# Relative norms. A rounded operand is off by at most 2^-11 of its size, by 0.42 of that in the root mean square, so a
# product of two by 0.6 * 2^-11. At most three such products come before a result, and the activation can amplify one.
# What is not rounded is off by 1e-6.
TOLERANCE, LEAST = 1.5 * 2**-11, 0.3 * 2**-11


def run(x, ids, weights, w1, w2, grad_out, **options):
    """Results by name."""
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, tf32=True, **options)
    gradients = mb.moe_backward(grad_out, saved)
    return {"out": out, **{name: getattr(gradients, name) for name in GRADIENTS}}


def joined(results):
    """The results in float64, and pairs of w1's gradients as one array."""
    exact = {name: test_layer.to_float64(value) for name, value in results.items()}
    return {n: np.concatenate(v, axis=-1) if isinstance(v, tuple) else v for n, v in exact.items()}


def assert_rounded(case, inputs, got):
    """got: results of these inputs, in float32, by name."""
    want, got = joined(test_layer.reference_results(case, test_layer.in_float64(inputs))), joined(got)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert all(LEAST <= error <= TOLERANCE for error in errors.values()), errors


GPU_CASES = [
    CASES[0],
    test_layer.RAGGED,
    test_layer.GEGLU,
    test_layer.GATE_UP_PAIR,
    test_layer.GATE_UP_TRANSPOSED,
    test_layer.UNALIGNED,
    test_layer.PANELS,
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_layer_rounds_operands(case):
    inputs = make_inputs(case, 0, np.float32)
    assert_rounded(case, inputs, run(*(test_layer.on_gpu("cupy", a) for a in inputs), activation=case.activation))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["row", "transposed"])
def test_numbers_of_few_bits_come_out_exact(order):
    """A product left out, counted twice or of the wrong row is seen."""
    case = Case(L=700, k=2, E=5, d=328, h=264, activation="relu", order=order)
    made = test_layer.small_integers(case, "float32")
    got, want = run(*(test_layer.on_gpu("cupy", a) for a in made), activation="relu"), test_layer.in_float64(made)
    for name, value in test_layer.reference_results(case, want).items():
        assert np.count_nonzero(value) > value.size // 20, name
        assert np.array_equal(test_layer.to_float64(got[name]), value), name


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000])
def test_what_is_not_finite_reaches_its_token_alone(bits):
    """All ones would overflow to a number if half a unit in the last place were added to it."""
    case = Case(L=200, k=2, E=3, d=136, h=72)
    x, *others = make_inputs(case, 0, np.float32)
    x.view(np.uint32)[7, 3] = bits
    out = test_layer.to_float64(run(*(test_layer.on_gpu("cupy", a) for a in (x, *others)))["out"])
    assert np.flatnonzero(~np.isfinite(out).all(axis=1)).tolist() == [7]
