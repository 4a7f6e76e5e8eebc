"""The bound of slots and the halves of backward in the emulator, on both tiers' kernels."""

from dataclasses import replace

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import loader
from tests.cases import Case, make_ids, make_inputs
from tests.layer.test_device_code import ALIGNED, DTYPES, UNALIGNED, Layer, differences, dispatch_limits, emulated
from tests.layer.test_max_slots import LISTS, slots_that_fit


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("L", "k", "E"), [(101, 3, 5), (500, 2, 200), (1100, 3, 128)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bounded_dispatch(L, k, E, dtype, seed):
    """Below, at and above what is routed; within an expert's rows, at the end of one, and in its first row."""
    ids = make_ids(Case(L=L, k=k, E=E, d=1, h=1, routing="absent"), np.random.default_rng(seed)).astype(dtype)
    offsets = reference.dispatch(ids, E).expert_token_offsets
    middle = int(offsets[E // 2])
    with emulated(dispatch_limits(2), seed) as device:
        for max_slots in (1, 127, middle, middle + 1, int(offsets[-1]), int(offsets[-1]) + 1, L * k):
            got = mb.build_dispatch(device.put(ids), E, max_slots=max_slots)
            device.synchronize()
            want = reference.dispatch(ids, E, max_slots=max_slots)
            for name in (*LISTS, "dropped"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), f"{name}, {max_slots}")
            tiles = want.row_tiles[0, 0] + 1
            np.testing.assert_array_equal(got.row_tiles[:tiles], want.row_tiles[:tiles], str(max_slots))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bounded_dispatch_without_slots(dtype):
    with emulated(dispatch_limits(2)) as device:
        got = mb.build_dispatch(device.put(np.zeros((0, 2), dtype)), 5, max_slots=3)
        device.synchronize()
        want = reference.dispatch(np.zeros((0, 2), dtype), 5, max_slots=0)
        for name in (*LISTS, "dropped"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
        assert got.dropped.shape == (1,) and got.dropped[0] == 0 and got.row_tiles[0, 0] == 0


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute", "fp8"])
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_bounded_layer_without_tokens(tier, save):
    inputs = make_inputs(replace(ALIGNED, L=0), 0, DTYPES["bfloat16"])
    with emulated(tier=tier) as device:
        layer = Layer(device, inputs, max_slots=4)
        results = layer.run(save)
        layer.assert_matches_reference(results)
        _, saved = layer.forward(save)
        device.synchronize()
        assert saved.index.dropped[0] == 0
    assert {name: np.count_nonzero(results[name]) for name in results} == dict.fromkeys(results, 0)


TIERS = [("sm80", "bfloat16", ALIGNED), ("sm90", "bfloat16", ALIGNED), ("sm80", "bfloat16", UNALIGNED)]


@pytest.mark.parametrize(("tier", "dtype", "case"), TIERS, ids=str)
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
def test_bounded_layer(tier, dtype, case, save):
    """The bits of the layer whose ids lack what the bound cuts off; buffers of so many rows, as guards would show."""
    x, ids, weights, w1, w2, grad_out = make_inputs(replace(case, routing="absent"), 0, DTYPES[dtype])
    present = int(((ids >= 0) & (ids < case.E)).sum())
    for max_slots in (present, present // 2):
        fitting, _ = slots_that_fit(ids, case.E, max_slots)
        with emulated(tier=tier) as device:
            plain = Layer(device, (x, fitting, weights, w1, w2, grad_out)).run(save)
            bounded = Layer(device, (x, ids, weights, w1, w2, grad_out), max_slots=max_slots).run(save)
        assert not differences(plain, bounded)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("save", "keep_saved"), [("minimal", False), ("minimal", True), ("paper", False), ("recompute", False)]
)
def test_halves_of_backward(tier, save, keep_saved):
    with emulated(tier=tier) as device:
        layer = Layer(device, make_inputs(ALIGNED, 0, DTYPES["bfloat16"]))
        whole = layer.run(save)
        out, saved = layer.forward(save)
        first, pending = mb.moe_backward_data(layer.on_device[5], saved, keep_saved=keep_saved)
        second = mb.moe_backward_weights(pending)
        device.synchronize()
        halves = {"out": out, "x": first.x, "weights": first.weights, "w1": second.w1, "w2": second.w2}
    assert not differences(whole, halves)


def test_a_further_step_in_halves_looks_for_no_kernels():
    """To go through a plan's launches takes a tenth of the host's time of such a step."""
    steps = []
    with emulated() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "compile_ahead", lambda device, variants: steps[-1].append(len(list(variants))))
        layer = Layer(device, make_inputs(ALIGNED, 0, DTYPES["bfloat16"]))
        for _ in range(3):
            steps.append([])
            _, saved = layer.forward("minimal")
            mb.moe_backward_weights(mb.moe_backward_data(layer.on_device[5], saved)[1])
        device.synchronize()
    assert len(steps[0]) == 3 and all(steps[0]) and steps[1:] == [[], []]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("d", [24, 264, 31])
def test_sum_rows(d, offset):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, d)).astype(DTYPES["bfloat16"])
    positions = rng.integers(-1, 40, (33, 4)).astype(np.int32)
    with emulated() as device:
        got = mb.sum_rows(device.put(rows, offset), device.put(positions))
        empty = mb.sum_rows(device.put(rows, offset), device.put(positions[:0]))
        device.synchronize()
        assert device.launched == [f"aggregate_bfloat16_float32{'' if d % 8 == 0 and not offset else '_unaligned'}"]
    np.testing.assert_array_equal(got, reference.sum_rows(rows, positions))
    assert empty.shape == (0, d)
