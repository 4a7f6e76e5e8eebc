"""Products of float32 layers whose operands are rounded to TF32: in NumPy, and the kernels on the emulator."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.reference.numerics import to_tf32
from moeblaze_cupy.types import FACTORS, GRADIENTS
from tests.cases import CASES, Case, make_inputs, relative_error
from tests.layer import test_device_code as device_code
from tests.layer.test_tf32_gpu import assert_rounded, run


def test_rounding_is_to_nearest_with_ties_away_from_zero():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    halfway = bits & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    for values in (bits.view(np.float32), halfway.view(np.float32)):
        values = values[np.isfinite(values) & (np.abs(values) >= 2.0**-126)]  # with all bits of mantissa
        mantissa, exponent = np.frexp(values.astype(np.float64))
        away = np.sign(mantissa) * np.floor(np.abs(mantissa) * 2**11 + 0.5)
        with np.errstate(over="ignore"):
            want = np.ldexp(away, exponent - 11).astype(np.float32)
        np.testing.assert_array_equal(to_tf32(values), want)
    special = np.array([0, -0.0, np.inf, -np.inf, 1, -1.5, 1 + 2**-10], np.float32)
    assert to_tf32(special).tobytes() == special.tobytes()
    assert np.isnan(to_tf32(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32))).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[9], Case(L=100, k=2, E=5, d=31, h=45, order="pair")], ids=str)
def test_numpy_rounds_operands(case):
    inputs = make_inputs(case, 0, np.float32)
    assert_rounded(case, inputs, run(*inputs, activation=case.activation))


# Weights that are contiguous along what a product sums over, and across; slabs of 32 columns and rows that are not
# full; an expert of several tiles, odd sizes.
ON_EMULATOR = [
    Case(L=150, k=2, E=3, d=136, h=72, routing="skewed"),
    Case(L=150, k=2, E=3, d=72, h=136, routing="skewed", order="pair_transposed"),
    Case(L=60, k=2, E=3, d=259, h=19, order="transposed", activation="gelu"),
    Case(L=60, k=2, E=3, d=67, h=131, order="pair", activation="geglu"),
]


@pytest.mark.parametrize("limits", [device_code.DEEP_STAGES, device_code.SHORT_STAGES], ids=["deep", "short"])
@pytest.mark.parametrize("case", ON_EMULATOR, ids=str)
def test_kernels_round_operands(case, limits):
    inputs = make_inputs(case, 0, np.float32)
    with device_code.emulated(limits) as device:
        got = run(*map(device.put, inputs), activation=case.activation)
        device.synchronize()
        assert_rounded(case, inputs, got)


def beside(rng, case, what):
    """Further arguments of the layer."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    E, d, h = case.E, case.d, case.h
    if what == "biases":
        return {"b1": normal(E, 2 * h), "b2": normal(E, d), "gate_up": "interleaved"}
    if what == "lora":
        factors = normal(E, 8, d), normal(E, 2 * h, 8), normal(8, h), normal(E, d, 8)
        return {"lora": mb.Lora(*factors, scale1=0.1, scale2=0.2)}
    return {"weights_on": "input", "save": "recompute"}


@pytest.mark.parametrize("what", ["biases", "lora", "on_input"])
def test_options_are_beside_it(what):
    """The same operands are rounded in NumPy. Sums in another order move few of them over a boundary of rounding: each
    result is off by 1e-7 of its size, so one operand of some 1000 by 2^-10, which is 3e-5 in norm."""
    case = Case(L=60, k=2, E=3, d=72, h=40)
    inputs, others = make_inputs(case, 0, np.float32), beside(np.random.default_rng(1), case, what)
    want = results(inputs, others)
    with device_code.emulated() as device:
        put = {n: device.put(v) if isinstance(v, np.ndarray) else v for n, v in others.items()}
        if what == "lora":
            put["lora"] = put["lora"].with_factors(map(device.put, put["lora"].factors))
        got = results([device.put(a) for a in inputs], put)
        device.synchronize()
        assert set(got) == set(want) and len(got) >= 5
        for name, value in got.items():
            assert relative_error(np.asarray(value), want[name]) <= 3e-5, name


def results(inputs, others):
    """Results by name, those of factors by their own."""
    out, saved = mb.moe_forward(*inputs[:5], tf32=True, **others)
    found = {
        "out": out,
        **vars(mb.moe_backward(inputs[5], saved, needs=(*GRADIENTS, *others.keys() & {"b1", "b2", "lora"}))),
    }
    of_factors = found.pop("lora")
    found |= {} if of_factors is None else dict(zip(FACTORS, of_factors.factors, strict=True))
    return {name: value for name, value in found.items() if value is not None}
