"""Activations with constants, biases and interleaved gates on the CPU, against float64 autograd and differences."""

import copy
import itertools
import pickle
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import Activation, reference
from moeblaze_cupy.types import ACTIVATIONS, FORMS, SAVE_POLICIES, is_gated

pytest.importorskip("torch")
from tests.oracle import FORMULAS, LIMITED, WITHOUT_CONSTANTS, expected, make_problem, mismatches

ORDERS = ("row", "transposed", "pair", "pair_transposed")
WITH_LIMIT = tuple(name for name, form in FORMS.items() if any(c.name == "limit" for c in form.constants))


def run(problem, save="minimal", **options):
    out, saved = mb.moe_forward(**problem.arrays(), **problem.options, save=save)
    gradients = vars(mb.moe_backward(problem.grad_out, saved, **options))
    return {"out": out} | {name: gradient for name, gradient in gradients.items() if gradient is not None}


def combinations():
    """Every activation in every form of w1, with the kinds of biases in turn."""
    biases = itertools.cycle([None, "dtype", np.float32])
    for name in ACTIVATIONS:
        for order in ORDERS if is_gated(name) else ORDERS[:2]:
            yield name, order, "halves", next(biases)
            if is_gated(name) and not order.startswith("pair"):
                yield name, order, "interleaved", next(biases)


@pytest.mark.parametrize(("name", "order", "gate_up", "bias"), list(combinations()))
def test_layer(name, order, gate_up, bias):
    problem = make_problem(name, np.float64, order=order, gate_up=gate_up, bias=bias, weights_dtype=np.float64)
    got = run(problem)
    assert set(got) == set(problem.arrays()) - {"ids"} | {"out"}
    for part, exact in zip((got["b1"], problem.b1), (problem.b1, problem.b1), strict=True) if bias else ():
        assert type(part) is type(exact)
    wide = replace(problem, b1=_wide(problem.b1), b2=_wide(problem.b2))
    dtype = np.float32 if bias == np.float32 else np.float64  # the gradients of such biases are rounded
    assert not mismatches(got, expected(wide), dtype)


def test_every_activation_has_a_formula_and_a_case_on_gpus():
    """swiglu, geglu, reglu, silu, gelu and relu are those of test_layer.py."""
    assert set(FORMULAS) == set(ACTIVATIONS)
    with_constants = {name for name, form in FORMS.items() if form.constants}
    assert set(LIMITED) == with_constants
    in_test_layer = {"swiglu", "geglu", "reglu", "silu", "gelu", "relu"}
    assert set(WITHOUT_CONSTANTS) == set(ACTIVATIONS) - with_constants - in_test_layer


def _wide(bias):
    if isinstance(bias, tuple):
        return tuple(map(_wide, bias))
    return None if bias is None else bias.astype(np.float64)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
def test_layer_of_fewer_bits(gate_up, dtype):
    for name in LIMITED:
        problem = make_problem(name, dtype, gate_up=gate_up, sizes=(40, 2, 5, 16, 24))
        got = run(problem)
        assert got["b1"].dtype == got["b2"].dtype == dtype
        assert not mismatches(got, expected(problem), dtype)


@pytest.mark.parametrize("name", sorted(LIMITED))
def test_finite_differences(name):
    """Of the biases, which move every value of a and b; away from limits, where there is no derivative."""
    problem = make_problem(name, np.float64, sizes=(12, 2, 3, 4, 5), weights_dtype=np.float64, gate_up="interleaved")
    problem.b1 += 1e-3  # off the limits
    got, step = run(problem), 1e-6
    for values, gradient in ((problem.b1, got["b1"]), (problem.b2, got["b2"]), (problem.weights, got["weights"])):
        for at in np.ndindex(values.shape):
            value, losses = values[at], []
            for moved in (value + step, value - step):
                values[at] = moved
                losses.append(np.sum(run(problem, needs=())["out"] * problem.grad_out))
            values[at] = value
            assert abs((losses[0] - losses[1]) / (2 * step) - gradient[at]) < 1e-6


@pytest.mark.parametrize("name", WITH_LIMIT)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_masks_at_above_and_below_the_limits(name, dtype):
    """At a limit the derivative is that of the inside, as torch.clamp has it; a NaN stays one."""
    from torch import tensor

    activation = LIMITED[name]
    limit = activation.constants["limit"]
    around = [-2 * limit, -limit, -limit / 2, 0.0, limit / 2, limit, 2 * limit]
    a, b = (np.array(values, dtype) for values in zip(*((x, y) for x in around for y in around), strict=True))
    (V, dV), (M, dM) = reference.activations.activate(a, b, activation)
    ta, tb = (tensor(values.astype(np.float64), requires_grad=True) for values in (a, b))
    y = FORMULAS[name](ta, tb, **activation.constants)
    y.sum().backward()
    tolerance = 1e-12 if dtype == np.float64 else 1e-6
    for got, want in ((V * M, y.detach()), (dV * M, ta.grad), (V * dM, tb.grad)):
        np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance)
    nan = np.full(1, np.nan, dtype)
    for values in reference.activations.activate(nan, nan, activation):
        assert np.isnan(values[0]).all()


@pytest.mark.parametrize("save", [policy for policy in SAVE_POLICIES if policy not in ("fp8", None)])
def test_save_policies_and_nan_of_unused_experts_change_no_bit(save):
    problem = make_problem("swiglu_oai", np.float32, gate_up="interleaved")
    want = run(problem)
    problem.b1[1] = problem.b2[1] = np.nan
    got = run(problem, save=save)
    for name, values in want.items():
        np.testing.assert_array_equal(values, got[name], err_msg=name)
        if name in ("w1", "w2", "b1", "b2"):
            assert not values[1].any()


def test_nan_of_a_used_experts_bias_reaches_its_tokens_alone():
    problem = make_problem("swiglu_oai", np.float32)
    problem.b2[0] = np.nan
    hit = (problem.ids == 0).any(axis=1)
    assert hit.any() and not hit.all()
    np.testing.assert_array_equal(np.isnan(run(problem)["out"]).all(axis=1), hit)


def test_biases_accumulate_and_are_needed_by_name():
    problem = make_problem("swiglu_clamp", np.float32, order="pair", bias="dtype")
    want = run(problem)
    assert set(run(problem, needs=("b2", "weights"))) == {"out", "b2", "weights"}
    totals = {"b1": tuple(np.ones_like(b) for b in problem.b1), "b2": np.ones_like(problem.b2)}
    got = run(problem, needs=("b1", "b2"), accumulate=totals)
    assert got["b2"] is totals["b2"] and got["b1"][1] is totals["b1"][1]
    for total, gradient in zip((*totals["b1"], totals["b2"]), (*want["b1"], want["b2"]), strict=True):
        np.testing.assert_allclose(total, 1 + gradient, rtol=1e-6, atol=1e-6)
    for part in (*totals["b1"], totals["b2"]):
        np.testing.assert_array_equal(part[1], 1)  # no rows


def test_iteration_gives_the_four_gradients_that_every_layer_has():
    problem = make_problem("swiglu", np.float32)
    _, saved = mb.moe_forward(**problem.arrays())
    gradients = mb.moe_backward(problem.grad_out, saved)
    x, weights, w1, w2 = gradients
    assert x is gradients.x and weights is gradients.weights and w1 is gradients.w1 and w2 is gradients.w2
    assert gradients.b1 is not None and gradients.b2 is not None


def test_activations_are_values():
    first, second = Activation("swiglu_oai"), Activation("swiglu_oai", alpha=1.702, limit=7)
    assert first == second and hash(first) == hash(second) and first != Activation("swiglu_oai", limit=6.0)
    assert first != "swiglu_oai" and len({first, second, Activation("swiglu")}) == 2
    assert repr(first) == "Activation('swiglu_oai', alpha=1.702, limit=7.0)" and eval(repr(first)) == first
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
    assert Activation("swiglu_clamp", limit=np.float32(2)).constants == {"limit": 2.0}
    with pytest.raises(AttributeError, match="immutable"):
        first.name = "swiglu"


@pytest.mark.parametrize(
    ("error", "message", "name", "constants"),
    [
        (ValueError, "Activation: name: expected one of 'swiglu', .*, got 'swish'", "swish", {}),
        (ValueError, "Activation: limit: expected no constants for 'swiglu', got limit=1.0", "swiglu", {"limit": 1.0}),
        (ValueError, "Activation: cap: expected alpha or limit for", "swiglu_oai", {"cap": 1.0}),
        (ValueError, "Activation: limit: expected a finite number above 0.*got 0", "swiglu_clamp", {"limit": 0}),
        (ValueError, "Activation: limit: expected .* got -1.0", "swiglu_clamp_after", {"limit": -1.0}),
        (ValueError, "Activation: limit: expected .* got inf", "swiglu_oai", {"limit": float("inf")}),
        (ValueError, "Activation: alpha: expected a finite number, .*got nan", "swiglu_oai", {"alpha": float("nan")}),
        (ValueError, "Activation: alpha: expected a finite number, .*got 1e\\+39", "swiglu_oai", {"alpha": 1e39}),
        (ValueError, "Activation: up_cap: expected .* got 1e-40", "swiglu_softcap", {"up_cap": 1e-40}),
        (TypeError, "Activation: limit: expected a number, got '7'", "swiglu_clamp", {"limit": "7"}),
        (TypeError, "Activation: limit: expected a number, got True", "swiglu_clamp", {"limit": True}),
    ],
)
def test_bad_constants(error, message, name, constants):
    with pytest.raises(error, match=message):
        Activation(name, **constants)


BAD_LAYERS = [
    ("b1: expected shape (E, 2h) = (5, 48), got (5, 24)", "swiglu", {"b1": np.zeros((5, 24))}),
    ("b1[1]: expected shape (E, h) = (5, 24), got (5, 25)", "swiglu", {"b1": (np.zeros((5, 24)), np.zeros((5, 25)))}),
    ("b1: expected shape (E, h) = (5, 24), got (5, 48)", "relu2", {"b1": np.zeros((5, 48))}),
    ("b1: expected one array (E, h) for activation 'relu2', got a pair", "relu2", {"b1": (np.zeros((5, 24)),) * 2}),
    ("b1: expected one array or a pair (gate, up), got 3 arrays", "swiglu", {"b1": (np.zeros((5, 24)),) * 3}),
    ("b2: expected shape (E, d) = (5, 16), got (16,)", "swiglu", {"b2": np.zeros(16)}),
    ("b2: expected dtype float32 or float64, got float16", "swiglu", {"b2": np.zeros((5, 16), np.float16)}),
    ("b2: expected a contiguous last dimension, got strides", "swiglu", {"b2": np.zeros((16, 5)).T}),
    ("gate_up: expected one of 'halves', 'interleaved', got 'mixed'", "swiglu", {"gate_up": "mixed"}),
    ("gate_up: expected 'halves' for an activation without a gate, 'relu2', got", "relu2", {"gate_up": "interleaved"}),
    ("activation: expected one of", "swish", {}),
]


@pytest.mark.parametrize(("message", "name", "options"), BAD_LAYERS)
def test_bad_layers(message, name, options):
    problem = make_problem(name if name in FORMS else "swiglu", np.float64, sizes=(40, 2, 5, 16, 24), bias=None)
    given = {**problem.arrays(), **problem.options, "activation": name, **options}
    with pytest.raises((TypeError, ValueError), match=re.escape(f"moe_forward: {message}")):
        mb.moe_forward(**given)


@pytest.mark.parametrize("name", ["w1", "b1"])
def test_interleaved_columns_are_one_array(name):
    problem = make_problem("swiglu", np.float64, order="pair")
    one = make_problem("swiglu", np.float64, gate_up="interleaved")
    given = {**one.arrays(), **one.options, name: getattr(problem, name)}
    with pytest.raises(
        ValueError, match=rf"moe_forward: {name}: expected one array .* for gate_up='interleaved', got a"
    ):
        mb.moe_forward(**given)


def test_bad_needs_and_sums_of_biases():
    problem = make_problem("swiglu", np.float64, bias=None)
    _, saved = mb.moe_forward(**problem.arrays())
    with pytest.raises(ValueError, match="moe_backward: needs: expected one of 'x', 'weights', 'w1', 'w2', got 'b1'"):
        mb.moe_backward(problem.grad_out, saved, needs=("b1",))
    with pytest.raises(ValueError, match="moe_backward: accumulate: expected one of 'w1', 'w2', got 'b2'"):
        mb.moe_backward(problem.grad_out, saved, accumulate={"b2": np.zeros((5, 40))})
    problem = make_problem("swiglu", np.float64)
    _, saved = mb.moe_forward(**problem.arrays())
    with pytest.raises(ValueError, match=r"moe_backward: accumulate\['b2'\]: expected the weight's shape \(5, 40\)"):
        mb.moe_backward(problem.grad_out, saved, accumulate={"b2": np.zeros((5, 41))})
    with pytest.raises(ValueError, match=r"moe_backward: accumulate\['b1'\]: expected memory apart from saved.b1"):
        mb.moe_backward(problem.grad_out, saved, accumulate={"b1": problem.b1})


@pytest.mark.parametrize(("order", "gate_up"), [("pair", "halves"), ("row", "interleaved")])
def test_torch_function(order, gate_up):
    import torch

    from moeblaze_cupy.interop.torch import moe

    problem = make_problem("swiglu_oai", np.float64, order=order, gate_up=gate_up, weights_dtype=np.float64)
    tensors, leaves = {}, {}
    for name, value in problem.arrays().items():
        parts = [torch.from_numpy(part) for part in (value if isinstance(value, tuple) else (value,))]
        leaves[name] = [part if name == "ids" else part.clone().requires_grad_() for part in parts]
        tensors[name] = tuple(leaves[name]) if isinstance(value, tuple) else leaves[name][0]
    out = moe(**tensors, **problem.options)
    out.backward(torch.from_numpy(problem.grad_out))
    got = {"out": out.detach().numpy()}
    for name, parts in leaves.items():
        if name != "ids":
            values = tuple(part.grad.numpy() for part in parts)
            got[name] = values if len(values) == 2 else values[0]
    assert not mismatches(got, expected(problem), np.float64)
    only_b2 = [part.detach().requires_grad_(name == "b2") for name, (part, *_) in leaves.items() if name == "b2"]
    out = moe(**{name: _detached(value) for name, value in tensors.items()} | {"b2": only_b2[0]}, **problem.options)
    out.backward(torch.from_numpy(problem.grad_out))
    np.testing.assert_array_equal(only_b2[0].grad.numpy(), got["b2"])


def _detached(value):
    return tuple(part.detach() for part in value) if isinstance(value, tuple) else value.detach()


def test_torch_module_with_biases():
    import torch

    from moeblaze_cupy.interop.torch import MoE

    layer = MoE(16, 24, 5, 2, activation=Activation("swiglu_oai"), expert_bias=True, gate_up="interleaved")
    assert {name for name, _ in layer.named_parameters()} == {"router", "w1_storage", "w2_storage", "b1", "b2"}
    assert layer.b1.shape == (5, 48) and layer.b2.shape == (5, 16) and not layer.b1.any() and not layer.b2.any()
    torch.nn.init.normal_(layer.b2)
    layer(torch.randn(7, 16)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert repr(layer).endswith("gate_up='interleaved', expert_bias=True)")
    assert {name for name, _ in MoE(16, 24, 5, 2).named_parameters()} == {"router", "w1_storage", "w2_storage"}
    with pytest.raises(ValueError, match="MoE: gate_up: expected 'halves' for an activation without a gate, 'relu2'"):
        MoE(16, 24, 5, 2, activation="relu2", gate_up="interleaved")
