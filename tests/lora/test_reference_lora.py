"""Low-rank factors on the CPU, through the public functions, against W + scale * B A made explicitly."""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.types import SAVE_POLICIES
from tests.cases import ACTIVATIONS, Case, relative_error
from tests.lora.lora_cases import NAMES, by_name, exact, make_lora, problem
from tests.slot_cases import ragged

# Two float64 evaluations of one formula, as in test_reference.py: a wrong term is apart by more than 1e-3.
SAME_FORMULA = 1e-12
# Every policy but "fp8" gives the same bits; e4m3 has 4 bits, so a and b are off by up to 2^-4, on average by 2^-6.
POLICIES = [policy for policy in SAVE_POLICIES if policy not in (None, "fp8")]
EVERY = ("x", "weights", "w1", "w2", "lora")
BASE = Case(L=40, k=2, E=5, d=19, h=13)


def assert_exact(inputs, lora, needs=EVERY, **options):
    x, ids, weights, w1, w2, grad_out = inputs
    given = {name: value for name, value in options.items() if name != "save"}
    want = exact(inputs, lora, **given)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=lora, **options)
    grads = mb.moe_backward(grad_out, saved, needs=(*needs, *(n for n in ("b1", "b2") if n in options)))
    got = by_name(out, grads)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert relative_error(got[name], value) < SAME_FORMULA, name
    return got


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("rank", [1, 8, 16, 17, 64, 128])
def test_ranks(rank, save):
    assert_exact(*problem(BASE, (rank, rank), np.float64), save=save)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    assert_exact(*problem(Case(40, 2, 5, 19, 13, activation), (4, 3), np.float64), activation=activation)


@pytest.mark.parametrize("order", ["row", "transposed", "pair", "pair_transposed", "interleaved"])
@pytest.mark.parametrize("shared", [False, True])
def test_orders(order, shared):
    case = Case(40, 2, 5, 19, 13, order="transposed" if order == "interleaved" else order)
    options = {"gate_up": "interleaved"} if order == "interleaved" else {}
    inputs, lora = problem(case, (4, 6), np.float64, order=order, shared=shared, strided=True)
    assert_exact(inputs, lora, **options)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("ranks", [(4, None), (None, 4)])
def test_one_pair(ranks, activation):
    got = assert_exact(*problem(Case(40, 2, 5, 19, 13, activation), ranks, np.float64), activation=activation)
    missing = ("lora.a2", "lora.b2") if ranks[1] is None else ("lora.a1", "lora.b1")
    assert not set(missing) & set(got)


@pytest.mark.parametrize("routing", ["one_expert", "absent", "empty_experts", "duplicate"])
def test_routings(routing):
    got = assert_exact(*problem(Case(40, 2, 6, 19, 13, routing=routing), (4, 3), np.float64))
    if routing == "empty_experts":
        assert not any(np.any(got[f"lora.{name}"][0]) for name in NAMES)


@pytest.mark.parametrize("L", [0, 1])
def test_few_tokens(L):
    assert_exact(*problem(Case(L, 2, 5, 19, 13), (4, 3), np.float64))


@pytest.mark.parametrize("save", POLICIES)
def test_slots(save):
    inputs, lora = problem(BASE, (4, 3), np.float64)
    x, ids, _, w1, w2, _ = inputs
    assert_exact(inputs, lora, weights_on="input", save=save)
    assert_exact(inputs, lora, max_slots=50, save=save)
    rng = np.random.default_rng(0)
    biases = {"b1": rng.standard_normal((5, 26)), "b2": rng.standard_normal((5, 19))}
    assert_exact(inputs, lora, save=save, **biases)
    pairs, offsets = ragged(inputs)
    assert_exact(pairs, lora, token_offsets=offsets, save=save)
    per_slot = np.random.default_rng(1).standard_normal((*ids.shape, 19))
    assert_exact((x, ids, None, w1, w2, per_slot), lora, needs=("x", "w1", "w2", "lora"), unreduced=True, save=save)
    with_identity = np.where(ids == 4, 6, ids).astype(np.int32)
    assert_exact((x, with_identity, *inputs[2:]), lora, identity_experts=3, save=save)


@pytest.mark.parametrize("save", SAVE_POLICIES[:-1])
@pytest.mark.parametrize("factor_dtype", [np.float32, ml_dtypes.bfloat16])
def test_low_precision(factor_dtype, save):
    """Gradients have the factors' dtype. A result passes at most six roundings of 2^-8 in a row; e4m3 see POLICIES."""
    inputs, lora = problem(BASE, (16, 8), ml_dtypes.bfloat16, factor_dtype=factor_dtype)
    x, ids, weights, w1, w2, grad_out = inputs
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=lora, save=save)
    assert (saved.lora_rows.u1 is None) == (saved.lora_rows.u2 is None) == (save == "recompute")
    grads = mb.moe_backward(grad_out, saved)
    got, want = by_name(out, grads), exact(inputs, lora)
    assert got.keys() == want.keys() - {"w1", "w2"}
    for name in NAMES:
        assert got[f"lora.{name}"].dtype == getattr(lora, name).dtype
    for name, value in got.items():
        assert relative_error(value, want[name]) < (2**-4 if save == "fp8" else 6 * 2**-8), name


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    inputs, lora = problem(BASE, (4, 3), np.float64, strided=True)
    x, ids, weights, w1, w2, grad_out = map(torch.from_numpy, inputs)
    factors = mb.Lora(*map(torch.from_numpy, lora.factors), *lora[4:])
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=factors)
    assert saved.lora.a1 is factors.a1
    got, want = by_name(out, mb.moe_backward(grad_out, saved)), exact(inputs, lora)
    for name, value in got.items():
        assert isinstance(value, torch.Tensor) and relative_error(value.numpy(), want[name]) < SAME_FORMULA, name


def test_zeros_of_b_change_nothing():
    inputs, lora = problem(BASE, (4, 3), np.float64)
    lora = lora._replace(b1=0 * lora.b1, b2=0 * lora.b2)
    np.testing.assert_array_equal(mb.moe_forward(*inputs[:5], lora=lora)[0], mb.moe_forward(*inputs[:5])[0])


def test_ways_to_be_wrong():
    inputs, lora = problem(BASE, (4, 3), np.float64)

    def refused(error, message, **options):
        with pytest.raises(error, match=message):
            mb.moe_forward(*inputs[:5], **options)

    refused(TypeError, "moe_forward: lora: expected moeblaze_cupy.Lora or None, got <class 'tuple'>", lora=tuple(lora))
    refused(ValueError, "lora.b1: expected a1 and b1, or neither, got None", lora=lora._replace(b1=None))
    refused(ValueError, "lora.a2: expected a2 and b2, or neither, got None", lora=lora._replace(a2=None))
    refused(ValueError, "lora: expected a1 and b1, a2 and b2, or all four, got no factors", lora=mb.Lora())
    refused(TypeError, "lora.scale1: expected a number, got '2'", lora=lora._replace(scale1="2"))
    refused(ValueError, "lora.scale2: expected a number that is finite in float32", lora=lora._replace(scale2=np.inf))
    refused(ValueError, r"lora.a1: expected shape \(E, r, d\) = \(5, any, 19\)", lora=lora._replace(a1=lora.a2))
    refused(ValueError, r"lora.a2: expected shape \(r, h\) = \(any, 13\)", lora=lora._replace(a2=lora.a1[0]))
    refused(ValueError, r"lora.b1: expected shape \(E, 2h, r\) = \(5, 26, 4\)", lora=lora._replace(b1=lora.b1[:, :13]))
    refused(TypeError, "lora.b2: expected dtype float32 or float64", lora=lora._replace(b2=lora.b2.astype(np.float16)))
    too_high = make_lora(BASE, (257, 3), np.float64)
    refused(ValueError, "lora.a1: expected a rank from 1 to 256, got 257", lora=too_high)
    saved = mb.moe_forward(*inputs[:5], lora=lora)[1]
    with pytest.raises(ValueError, match="saved: expected a layer without biases and lora"):
        mb.moe_backward_data(inputs[5], saved)
    with pytest.raises(ValueError, match="accumulate: expected one of 'w1', 'w2'"):
        mb.moe_backward(inputs[5], saved, accumulate={"lora": None})
    without = mb.moe_forward(*inputs[:5])[1]
    with pytest.raises(ValueError, match="needs: expected one of"):
        mb.moe_backward(inputs[5], without, needs=("lora",))
