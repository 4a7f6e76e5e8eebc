"""Biases, constants and interleaved gates with pairs, weights on the input, outputs per slot and identity experts; and
all of these with a bound of slots and with backward in halves.

On the CPU against loops over slots, in the kernels of both tiers against the CPU in float64, and through torch.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from tests.cases import Case
from tests.layer.test_device_code import DTYPES, OUTLIER, TOLERANCES, emulated, in_float64
from tests.layer.test_device_slots import FEW, TIERS
from tests.layer.test_slots import Problem, problem, ragged, relative_error
from tests.oracle import LIMITED
from tests.slot_cases import IDENTITY, as_bits, inputs_of, without_weights
from tests.slot_cases import ragged as slots_as_pairs

# Smooth: at a limit a value that is rounded has another derivative than one that is not.
CAPPED = {"activation": LIMITED["swiglu_softcap"], "gate_up": "interleaved"}
ON_INPUT = {"weights_on": "input"}
IN_KERNELS = ("on input", "identity", "pairs per slot", "pairs", "identity, pairs on input")
# Options, whether there is b1, whether slots are pairs. All layers have b2.
LAYERS = {
    "pairs": (CAPPED, True, True),
    "on input": (CAPPED | ON_INPUT, False, False),
    "on input, halves": ({"activation": LIMITED["swiglu_softcap"]} | ON_INPUT, False, True),
    "on input, plain": ({"activation": "relu2"} | ON_INPUT, False, False),
    "per slot": (CAPPED | {"unreduced": True}, True, False),
    "pairs per slot": ({"unreduced": True}, True, True),
    "per slot, on input": (CAPPED | ON_INPUT | {"unreduced": True}, False, False),
    "identity": (CAPPED | {"identity_experts": 2}, True, False),
    "identity, pairs on input": (CAPPED | ON_INPUT | {"identity_experts": 2}, False, True),
}


def layer(name, L=11, k=2, E=4, d=5, h=6, seed=0):
    options, has_b1, is_ragged = LAYERS[name]
    named = mb.Activation("swiglu") if "activation" not in options else options["activation"]
    of_case = named if isinstance(named, str) else named.name
    if is_ragged:
        one = ragged(seed, L=L, E=E, d=d, h=h, **{**options, "activation": of_case})
    else:
        one = problem(Case(L=L, k=k, E=E, d=d, h=h, activation=of_case, routing="absent"), seed)
        rng = np.random.default_rng(seed)
        one.ids[rng.random(one.ids.shape) < 0.3] = E  # an identity expert, or none
        if options.get("unreduced") and options.get("weights_on") != "input":
            one.weights = None
    rng = np.random.default_rng(seed + 1)
    b1 = rng.standard_normal((E, one.w1.shape[2])) if has_b1 else None
    offsets = {name: value for name, value in one.options.items() if name == "token_offsets"}
    return replace(one, b1=b1, b2=rng.standard_normal((E, d)), options=options | offsets)


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("name", LAYERS)
def test_on_the_cpu(name, save):
    layer(name).check(save=save)


@pytest.mark.parametrize("name", LAYERS)
def test_b2_alone(name):
    one = layer(name)
    got = one.run(needs=("b2",))
    assert set(got) == {"out", "weights", "b2"} and got["weights"] is None
    assert np.array_equal(got["b2"], one.run()["b2"])


def test_b1_is_not_served_with_weights_on_the_input():
    one = layer("pairs")
    expected = r"^moe_forward: b1: expected None, as weights_on='input' goes without b1, got a bias$"
    with pytest.raises(ValueError, match=expected):
        replace(one, options=one.options | ON_INPUT).run()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", IN_KERNELS)
def test_in_the_kernels(name, tier):
    dtype = DTYPES[TIERS[tier][1]]
    one = layer(name, L=70, E=3, d=72 if tier == "sm90" else 37, h=40 if tier == "sm90" else 45)
    arrays = {n: getattr(one, n) for n in ("x", "ids", "weights", "w1", "w2", "b1", "b2")}
    arrays["w1"], arrays["w2"] = arrays["w1"] / 6, arrays["w2"] / 6
    arrays |= {n: arrays[n].astype(dtype) for n in ("x", "w1", "w2")}
    arrays |= {n: arrays[n].astype(np.float32) for n in ("weights", "b1", "b2") if arrays[n] is not None}
    arrays |= {"token_offsets": one.options.get("token_offsets")}
    options = {n: value for n, value in one.options.items() if n != "token_offsets"}
    exact = {n: a if a is None or a.dtype == np.int32 else in_float64(a) for n, a in arrays.items()}
    want, saved = reference.moe_forward(**exact, **options)
    grad_out = np.random.default_rng(5).standard_normal(want.shape).astype(dtype)
    want = {"out": want} | vars(reference.moe_backward(in_float64(grad_out), saved))
    with emulated(FEW, tier=tier) as device:
        given = {n: None if a is None else device.put(a) for n, a in arrays.items()}
        for save in ("minimal", "recompute"):
            out, saved = mb.moe_forward(**given, **options, save=save)
            found = {"out": out} | vars(mb.moe_backward(device.put(grad_out), saved))
            device.synchronize()
            for n, got in found.items():
                if got is None:
                    assert want[n] is None
                    continue
                got, tolerance = in_float64(got), TOLERANCES[dtype.__name__ if isinstance(dtype, type) else dtype.name]
                assert relative_error(got, want[n]) <= tolerance, n
                scale = np.abs(want[n]) + np.linalg.norm(want[n]) / np.sqrt(max(want[n].size, 1))
                assert (np.abs(got - want[n]) <= OUTLIER * tolerance * scale).all(), n


def cut_off(one, max_slots):
    """The layer whose ids are -1 in the slots past the bound, and their number, by sorting (expert, slot)."""
    E, offsets, ids = len(one.w2), one.options.get("token_offsets"), one.ids.copy()
    first, last = (0, ids.size) if offsets is None else offsets[[0, -1]]
    present = [(e, slot) for slot, e in enumerate(ids.reshape(-1)) if 0 <= e < E and first <= slot < last]
    for _, slot in sorted(present)[max_slots:]:
        ids.reshape(-1)[slot] = -1
    return replace(one, ids=ids), max(len(present) - max_slots, 0)


def bounded(one, max_slots):
    return replace(one, options=one.options | {"max_slots": max_slots})


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for n, values in want.items():
        assert (got[n] is None and values is None) or np.array_equal(got[n], values), n


@pytest.mark.parametrize("max_slots", [1, 6, 60])
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("name", LAYERS)
def test_slots_past_a_bound_are_absent(name, save, max_slots):
    one = layer(name, L=40)
    fitting, dropped = cut_off(one, max_slots)
    assert_same_bits(bounded(one, max_slots).run(save), fitting.run(save))
    assert dropped > 0 or max_slots == 60
    index = mb.build_dispatch(one.ids, len(one.w2), one.options.get("token_offsets"), max_slots=max_slots)
    assert index.dropped[0] == dropped and index.num_rows == max_slots


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("name", LAYERS)
def test_halves_of_backward(name, save):
    """The halves refuse biases; without them they give the bits of the whole."""
    one = layer(name, L=40)
    without = bounded(replace(one, b1=None, b2=None), 6)
    arrays = one.x, one.ids, one.weights, one.w1, one.w2
    _, saved = mb.moe_forward(*arrays, b1=one.b1, b2=one.b2, **one.options)
    biases = "b2" if one.b1 is None else "b1 and b2"
    with pytest.raises(ValueError, match=f"moe_backward_data: saved: expected a layer without biases.*got {biases}$"):
        mb.moe_backward_data(np.zeros(np.shape(one.run()["out"])), saved)
    out, saved = mb.moe_forward(*arrays, save=save, **without.options)
    grad_out = np.random.default_rng(5).standard_normal(out.shape)
    first, pending = mb.moe_backward_data(grad_out, saved)
    second = mb.moe_backward_weights(pending)
    got = {"out": out, "x": first.x, "weights": first.weights, "w1": second.w1, "w2": second.w2}
    assert_same_bits(got, without.run(save))


BOUNDED = {  # options, whether slots are pairs; the variants of tests/layer/test_device_slots.py
    "pairs": ({}, True),
    "on input": ({"weights_on": "input"}, False),
    "identity pairs": ({"identity_experts": IDENTITY}, True),
    "per slot": ({"unreduced": True}, False),
    "pairs per slot, on input": ({"unreduced": True, "weights_on": "input"}, True),
    "interleaved": ({"gate_up": "interleaved"}, False),
}


@pytest.mark.parametrize("save", ["minimal", "paper"])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_and_halves_in_the_kernels(name, tier, save):
    """The bits of the layer whose ids lack what the bound cuts off, in buffers of so many rows, as guards show."""
    options, is_ragged = BOUNDED[name]
    inputs, offsets = inputs_of(tier), None
    if is_ragged:
        inputs, offsets = slots_as_pairs(inputs)
    if options.get("unreduced"):
        weights = inputs[2] if "weights_on" in options else None
        inputs = (*inputs[:2], weights, *inputs[3:5], without_weights(inputs)[5])
    x, ids, weights, w1, w2, grad_out = inputs
    max_slots = 70
    one, dropped = cut_off(Problem(x, ids, weights, w1, w2, {"token_offsets": offsets}), max_slots)
    assert dropped > 0
    with emulated(FEW, tier=tier) as device:
        x, ids, weights, w1, w2, grad_out = (None if a is None else device.put(a) for a in inputs)
        token_offsets = None if offsets is None else device.put(offsets)

        def forward(of_ids, bound):
            given = {"save": save, "token_offsets": token_offsets, "max_slots": bound} | options
            return mb.moe_forward(x, of_ids, weights, w1, w2, **given)

        def whole(of_ids, bound):
            out, saved = forward(of_ids, bound)
            return {"out": out} | vars(mb.moe_backward(grad_out, saved))

        want, got = whole(device.put(one.ids), None), whole(ids, max_slots)
        out, saved = forward(ids, max_slots)
        first, pending = mb.moe_backward_data(grad_out, saved)
        second = mb.moe_backward_weights(pending)
        device.synchronize()
    halves = {"out": out, "x": first.x, "weights": first.weights, "w1": second.w1, "w2": second.w2}
    for found in (got, halves):
        assert not [n for n, values in found.items() if as_bits_of(values) != as_bits_of(want[n])]


def as_bits_of(values):
    return None if values is None else as_bits(values)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_through_torch(name, compiled):
    """Gradients by autograd are those of the array functions, in compiled code and out of it."""
    moe = pytest.importorskip("moeblaze_cupy.interop.torch").moe
    one = layer(name)
    tensors, options = one.tensors(), dict(one.options)
    if "token_offsets" in options:
        options["token_offsets"] = torch.from_numpy(options["token_offsets"])
    given = tensors["x"], torch.from_numpy(one.ids), tensors.get("weights"), tensors["w1"], tensors["w2"]
    biases = {"b1": tensors.get("b1"), "b2": tensors["b2"]}

    def call(*arrays, **further):
        return moe(*arrays, **further, **options)

    torch.compiler.reset()  # else all cases count as one function compiled again
    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    out, want = call(*given, **biases), one.run()
    out.backward(torch.from_numpy(np.random.default_rng(5).standard_normal(out.shape)))
    assert np.array_equal(out.detach(), want["out"])
    for n, tensor in tensors.items():
        assert np.array_equal(tensor.grad, want[n]), n
    with torch.no_grad():
        assert torch.equal(call(*given, **biases), out)
