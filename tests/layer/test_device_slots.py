"""Pairs of tokens, router weights on the input, outputs per slot and identity experts in the kernels of both tiers,
on the emulator, against the NumPy layer in float64."""

from dataclasses import replace

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.gemm import config as gemm_config
from tests.cases import make_inputs
from tests.layer.test_device_code import DTYPES, emulated
from tests.slot_cases import (
    IDENTITY,
    NAMES,
    TIERS,
    assert_right,
    in_float64,
    inputs_of,
    ragged,
    same_bits,
    without_weights,
)

FEW = DeviceLimits(90, 2, 232448, 233472)  # multiprocessors


def run(device, inputs, offsets=None, save="minimal", **options):
    """out and gradients, or without `grad_out` out alone."""
    x, ids, weights, w1, w2, grad_out = (None if a is None else device.put(a) for a in inputs)
    token_offsets = None if offsets is None else device.put(offsets)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save, token_offsets=token_offsets, **options)
    found = {"out": out}
    if saved is not None:
        gradients = mb.moe_backward(grad_out, saved)
        found |= {name: getattr(gradients, name) for name in NAMES if getattr(gradients, name) is not None}
    device.synchronize()
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_pairs(tier):
    """Fixed k as pairs to the bit, of either kind of ids; other tokens' pairs; offsets that mean nothing."""
    inputs = inputs_of(tier)
    x, k = inputs[0], inputs[1].shape[1]
    regular, offsets = ragged(inputs, np.arange(len(x) + 1) * k)
    wide = (x, regular[1].astype(np.int64), *regular[2:])
    with emulated(FEW, tier=tier) as device:
        want = run(device, inputs)
        assert same_bits(want, run(device, regular, offsets))
        assert same_bits(want, run(device, wide, offsets))
        uneven, offsets = ragged(inputs)
        assert_right(run(device, uneven, offsets), uneven, offsets)
        # These fall, lie outside of 0 .. P, and leave some token very many pairs.
        offsets = np.random.default_rng(4).integers(-50, 2 * uneven[1].size, offsets.size).astype(np.int32)
        offsets[::7], offsets[3::11] = -(2**31), 2**31 - 1
        clean = reference.dispatch(uneven[1], 1, offsets).token_offsets
        assert same_bits(run(device, uneven, offsets), run(device, uneven, clean))
        assert "aggregate_slots" in "".join(device.launched)


OPTIONS = [
    ({"weights_on": "input"}, "minimal"),
    ({"weights_on": "input"}, "paper"),
    ({"weights_on": "input", "activation": "gelu"}, "recompute"),
    ({"identity_experts": IDENTITY}, "minimal"),
    ({"identity_experts": IDENTITY, "weights_on": "input"}, "minimal"),
]


@pytest.mark.parametrize(("options", "save"), OPTIONS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_options(tier, options, save):
    """With k slots each, one slot each, and pairs."""
    activation = options.get("activation", "swiglu")
    inputs = inputs_of(tier, activation=activation)
    uneven, offsets = ragged(inputs)
    one = inputs_of(tier, k=1, activation=activation)
    with emulated(FEW, tier=tier) as device:
        for given, token_offsets in ((inputs, None), (one, None), (uneven, offsets)):
            found = run(device, given, token_offsets, save, **options)
            assert_right(found, given, token_offsets, **options)


@pytest.mark.parametrize("tier", TIERS)
def test_outputs_per_slot(tier):
    inputs = inputs_of(tier)
    plain, on_input = without_weights(inputs), (*inputs[:5], without_weights(inputs)[5])
    uneven, offsets = ragged(inputs)
    with emulated(FEW, tier=tier) as device:
        for given, token_offsets, options in (
            (plain, None, {}),
            (on_input, None, {"weights_on": "input"}),
            (without_weights(uneven), offsets, {}),
        ):
            options |= {"unreduced": True}
            found = run(device, given, token_offsets, **options)
            assert_right(found, given, token_offsets, **options)
        empty = inputs[1] >= TIERS[tier][0].E
        assert not in_float64(run(device, plain, unreduced=True)["out"])[empty].any()  # exact zeros


@pytest.mark.parametrize("tier", TIERS)
def test_weights_and_rows_of_a_16_bit_dtype_and_odd_addresses(tier):
    """float16 router weights, and x and grad_out that no 16-byte access may read."""
    case = replace(TIERS[tier][0], L=40, d=72, h=40)
    inputs = make_inputs(case, 0, np.float16)
    inputs = (*inputs[:2], inputs[2].astype(np.float16), *inputs[3:])
    inputs[1][:, 0] = case.E
    uneven, offsets = ragged(inputs)
    with emulated(FEW, tier=tier) as device:
        x, ids, weights, w1, w2, grad_out = (device.put(a) for a in uneven)
        x, grad_out = (device.put(np.asarray(a), offset=1) for a in (x, grad_out))
        options = {"identity_experts": 1, "token_offsets": device.put(offsets)}
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, **options)
        found = {"out": out} | vars(mb.moe_backward(grad_out, saved))
        device.synchronize()
    assert_right(found, uneven, offsets, identity_experts=1)


@pytest.mark.parametrize("tier", TIERS)
def test_orders_of_threads_and_repetitions_give_the_same_bits(tier):
    options = {"identity_experts": IDENTITY, "weights_on": "input"}
    uneven, offsets = ragged(inputs_of(tier, L=60))
    found = []
    for seed in (0, 1, 2):
        with emulated(FEW, seed=seed, tier=tier) as device:
            found += [run(device, uneven, offsets, **options) for _ in range(2)]
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("L", "P"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("unreduced", [False, True])
def test_no_tokens_or_no_pairs(L, P, unreduced):
    case, dtype = TIERS["sm80"]
    x, _, _, w1, w2, grad_out = make_inputs(replace(case, L=L), 0, DTYPES[dtype])
    ids, weights = np.zeros(P, np.int32), None if unreduced else np.ones(P, np.float32)
    grad_out = np.ones((P, case.d), x.dtype) if unreduced else grad_out
    with emulated(FEW) as device:
        options = {"unreduced": unreduced}
        found = run(device, (x, ids, weights, w1, w2, grad_out), np.arange(L + 1, dtype=np.int32), **options)
    assert found["out"].shape == ((P, case.d) if unreduced else (L, case.d))
    assert all(not in_float64(value).any() for value in found.values())


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("L", [1, 7, 500])
def test_dispatch_of_pairs_is_the_references(L, dtype):
    """Lists bit for bit, of offsets that rise and of others; so many pairs that several blocks dispatch them."""
    rng = np.random.default_rng(L)
    P, E = 6 * L, 9
    ids = rng.integers(-2, E + 2, P).astype(dtype)
    rising = np.sort(rng.integers(0, P + 1, L + 1))
    for offsets in (
        rising,
        rng.permutation(rising),
        rng.integers(-(2**31), 2**31, L + 1),
        rng.integers(-9, 2 * P, L + 1),
    ):
        offsets = offsets.astype(np.int32)
        want = reference.dispatch(ids, E, offsets)
        with emulated(FEW) as device:
            index = mb.build_dispatch(device.put(ids), E, device.put(offsets))
            device.synchronize()
        for name in (
            "expert_token_indices",
            "expert_token_offsets",
            "token_index_map",
            "token_offsets",
            "experts_by_load",
        ):
            np.testing.assert_array_equal(getattr(index, name), getattr(want, name), name)
        if dtype is np.int64:
            np.testing.assert_array_equal(index.token_expert_indices, want.token_expert_indices)


def test_one_slot_each_is_no_shortcut_for_pairs(monkeypatch):
    """Pairs may be as many as tokens, and none of the first token's."""
    inputs = inputs_of("sm90", k=1)
    uneven, offsets = ragged(inputs, np.concatenate([[0, 0, 0], np.arange(2, len(inputs[0]))]))
    with emulated(FEW, tier="sm90") as device:
        assert_right(run(device, uneven, offsets), uneven, offsets)
        names = {
            variant.entry for _, variant in loader._kernels if dict(variant.macros).get("EPILOGUE") == "StoreTokenRows"
        }
    assert not names and gemm_config.rows_go_to_tokens(1, "sm90")
