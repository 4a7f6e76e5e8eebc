"""The bound of slots and the two halves of backward, on the CPU and on fake GPUs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import launch_config, runtime
from moeblaze_cupy.types import GRADIENTS, SAVE_POLICIES, pair
from tests.cases import Case, make_inputs
from tests.fakes import Layer, launches, use

ROUTINGS = ("random", "skewed", "one_expert", "absent", "duplicate", "empty_experts")
CASE = Case(L=37, k=3, E=6, d=8, h=12)
SAVED = [save for save in SAVE_POLICIES if save]
LISTS = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map", "experts_by_load")


def slots_that_fit(ids, num_experts, max_slots):
    """ids with -1 in the slots that the bound cuts off, and how many these are, by sorting (expert, token, slot)."""
    present = [(e, t, j) for (t, j), e in np.ndenumerate(ids) if 0 <= e < num_experts]
    kept = ids.copy()
    for _, t, j in sorted(present)[max_slots:]:
        kept[t, j] = -1
    return kept, max(len(present) - max_slots, 0)


@settings(max_examples=60)
@given(data=st.data())
def test_slots_past_the_bound_are_absent(data):
    L, k, E = (data.draw(st.integers(1, most)) for most in (40, 5, 9))
    ids = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-1, E + 1, (L, k))
    ids = ids.astype(data.draw(st.sampled_from([np.int32, np.int64])))
    max_slots = data.draw(st.integers(1, L * k))
    kept, dropped = slots_that_fit(ids, E, max_slots)
    got, want = mb.build_dispatch(ids, E, max_slots=max_slots), mb.build_dispatch(kept, E)
    for name in set(LISTS) - {"token_expert_indices"}:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    np.testing.assert_array_equal(got.row_tiles, want.row_tiles)
    assert got.dropped.shape == (1,) and got.dropped[0] == dropped and got.num_rows == max_slots
    assert want.dropped is None and want.num_rows == L * k


@pytest.mark.parametrize("shape", [(0, 2), (0,)], ids=str)
def test_a_bound_without_slots_drops_none(shape):
    """A rank may get no tokens, and its counts are then as those of others."""
    ids, weights, offsets = np.zeros(shape, np.int32), np.zeros(shape), np.zeros(4, np.int32)
    ragged = {"token_offsets": offsets} if len(shape) == 1 else {}
    x, w1, w2 = np.ones((3 if ragged else 0, 8)), np.ones((6, 8, 24)), np.ones((6, 12, 8))
    index = mb.build_dispatch(ids, 6, **ragged, max_slots=5)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, **ragged, max_slots=5)
    for of in (index, saved.index):
        assert of.dropped.shape == (1,) and of.dropped[0] == 0 and of.num_rows == 0
    grads = mb.moe_backward(out, saved)
    assert not out.any() and not any(grad.any() for grad in grads)


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(pair(a), pair(b), strict=True))


@pytest.mark.parametrize("save", SAVED)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_bound_that_suffices_changes_no_bit(routing, save):
    x, ids, weights, w1, w2, grad_out = make_inputs(replace(CASE, routing=routing), 0)
    present = int(((ids >= 0) & (ids < CASE.E)).sum())
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    want = mb.moe_backward(grad_out, saved)
    bounded, kept = mb.moe_forward(x, ids, weights, w1, w2, save=save, max_slots=present)
    got = mb.moe_backward(grad_out, kept)
    assert np.array_equal(out, bounded) and kept.index.dropped[0] == 0
    assert all(map(same_bits, got, want))
    # Bytes of a row beyond the lists, whose size no bound changes: a and b in float64, y_swi; of each a scale in e4m3.
    row = {"recompute": 0, "minimal": 2 * 12 * 8, "paper": 3 * 12 * 8, "fp8": 2 * (12 + 4)}[save]
    of_lists = mb.moe_forward(x, ids, weights, w1, w2, save="recompute")[1].nbytes + 4  # and `dropped`
    assert 0 <= kept.nbytes - of_lists - row * present < (16 if save == "fp8" else 1)  # scales begin at whole 16 bytes
    assert kept.nbytes < saved.nbytes or present == ids.size or save == "recompute"


@pytest.mark.parametrize("max_slots", [1, 20, 50])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_bound_that_does_not_suffice_drops_the_last_slots(routing, max_slots):
    x, ids, weights, w1, w2, grad_out = make_inputs(replace(CASE, routing=routing), 0)
    fitting, dropped = slots_that_fit(ids, CASE.E, max_slots)
    assert dropped > 0
    want, saved = mb.moe_forward(x, fitting, weights, w1, w2)
    got, kept = mb.moe_forward(x, ids, weights, w1, w2, max_slots=max_slots)
    assert np.array_equal(got, want) and kept.index.dropped[0] == dropped
    assert all(map(same_bits, mb.moe_backward(grad_out, kept), mb.moe_backward(grad_out, saved)))


def test_a_bound_above_the_slots_is_that_of_the_slots():
    """So a bound serves the last, smaller batch, too."""
    x, ids, weights, w1, w2, _ = make_inputs(CASE, 0)
    want, wanted = mb.moe_forward(x, ids, weights, w1, w2, max_slots=111)
    got, saved = mb.moe_forward(x, ids, weights, w1, w2, max_slots=10**6)
    assert np.array_equal(got, want) and saved.index.max_slots == wanted.index.max_slots == 111
    assert mb.moe_forward(x[:0], ids[:0], weights[:0], w1, w2, max_slots=5)[0].shape == (0, x.shape[1])


@pytest.mark.parametrize("bound", [0, -1])
def test_bounds_that_are_none(bound):
    x, ids, weights, w1, w2, _ = make_inputs(CASE, 0)
    message = rf"max_slots: expected None, or at least 1, got {bound}"
    with pytest.raises(ValueError, match=f"moe_forward: {message}"):
        mb.moe_forward(x, ids, weights, w1, w2, max_slots=bound)
    with pytest.raises(ValueError, match=f"build_dispatch: {message}"):
        mb.build_dispatch(ids, CASE.E, max_slots=bound)
    with pytest.raises(TypeError, match="max_slots: expected an int"):
        mb.build_dispatch(ids, CASE.E, max_slots=2.5)


@pytest.mark.parametrize("needs", [("x", "weights"), ("x",), ("weights",), ()])
@pytest.mark.parametrize("save", SAVED)
def test_the_halves_of_backward_give_the_bits_of_the_whole(save, needs):
    case = replace(CASE, order="pair", routing="absent")
    x, ids, weights, w1, w2, grad_out = make_inputs(case, 0, np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    whole = mb.moe_backward(grad_out, saved, keep_saved=True)
    first, pending = mb.moe_backward_data(grad_out, saved, needs=needs)
    second = mb.moe_backward_weights(pending)
    for name in GRADIENTS:
        half = first if name in ("x", "weights") else second
        other = second if half is first else first
        assert getattr(other, name) is None
        if name in (*needs, "w1", "w2"):
            assert same_bits(getattr(half, name), getattr(whole, name)), name
        else:
            assert getattr(half, name) is None
    assert saved.consumed == (save not in ("fp8", "recompute"))


def test_the_second_half_accumulates():
    x, ids, weights, w1, w2, grad_out = make_inputs(CASE, 0, np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2)
    whole = mb.moe_backward(grad_out, saved, keep_saved=True)
    _, pending = mb.moe_backward_data(grad_out, saved)
    total = np.ones_like(w2)
    grads = mb.moe_backward_weights(pending, needs=("w2",), accumulate={"w2": total})
    assert grads.w1 is None and grads.w2 is total
    np.testing.assert_allclose(total, 1 + whole.w2, atol=1e-5)


def test_messages_of_the_halves():
    x, ids, weights, w1, w2, grad_out = make_inputs(CASE, 0, np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2)
    with pytest.raises(ValueError, match="moe_backward_data: needs: expected one of 'x', 'weights', got 'w1'"):
        mb.moe_backward_data(grad_out, saved, needs=("w1",))
    with pytest.raises(TypeError, match="moe_backward_data: saved: expected SavedForBackward"):
        mb.moe_backward_data(grad_out, None)
    with pytest.raises(ValueError, match="moe_backward_data: grad_out: expected shape"):
        mb.moe_backward_data(grad_out[:-1], saved)
    _, pending = mb.moe_backward_data(grad_out, saved)
    with pytest.raises(RuntimeError, match="moe_backward_data: saved: expected activations that are still there"):
        mb.moe_backward_data(grad_out, saved)
    with pytest.raises(ValueError, match="moe_backward_weights: needs: expected one of 'w1', 'w2', got 'x'"):
        mb.moe_backward_weights(pending, needs=("x",))
    with pytest.raises(TypeError, match="moe_backward_weights: pending: expected PendingWeights"):
        mb.moe_backward_weights(saved)
    with pytest.raises(ValueError, match=r"accumulate\['w2'\]: expected the weight's shape"):
        mb.moe_backward_weights(pending, accumulate={"w2": np.zeros_like(w2[1:])})
    mb.moe_backward_weights(pending)
    with pytest.raises(RuntimeError, match="moe_backward_weights: pending: expected gradients that are still"):
        mb.moe_backward_weights(pending)


@pytest.fixture
def hopper(monkeypatch):
    yield use(monkeypatch)
    runtime.forget()


def test_the_first_half_launches_no_weight_gradient(hopper):
    layer = Layer(300, 2, 8, 64, 32)
    _, saved = layer.forward(hopper)
    grad_out = hopper.array(("grad_out",), (300, 64), layer.dtype)
    hopper.restart()
    grads, pending = mb.moe_backward_data(grad_out, saved)
    entries = [v.entry for v, _, _ in launches(hopper)]
    assert "up_bwd" in entries and not [e for e in entries if e.endswith("_wgrad")]
    assert grads.w1 is None and pending.first_layer_grad is saved.first_layer
    hopper.restart()
    mb.moe_backward_weights(pending)
    assert [v.entry for v, _, _ in launches(hopper)] == ["down_wgrad", "up_wgrad"]


def test_records_are_per_option(hopper):
    """A call with another bound takes launches of its own."""
    layer = Layer(300, 2, 8, 64, 32, save=None)
    rows = []
    for options in ({}, {"max_slots": 100}, {"max_slots": 200}, {}, {"max_slots": 100}):
        hopper.restart()
        mb.moe_forward(*layer.arguments(hopper), save=None, **options)
        rows.append([(v.entry, values.get("num_slots")) for v, _, values in launches(hopper)])
    bounds = [dict(found)["up_fwd"] for found in rows]
    assert bounds == [600, 100, 200, 600, 100]
    assert [("bound_slots" in dict(found)) for found in rows] == [False, True, True, False, True]


def test_size_classes():
    sizes = [launch_config.size_class(n) for n in range(1, 5000)]
    assert all(n <= size <= n + n // 16 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 16 * 10 and sorted(sizes) == sizes
    assert [launch_config.size_class(n) for n in (0, 1, 16, 17, 32, 33, 1000, 1024, 1025)] == [
        *(0, 1, 16, 17, 32, 34, 1024, 1024, 1088)
    ]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_sum_rows(dtype):
    rng = np.random.default_rng(0)
    rows, positions = rng.standard_normal((20, 5)).astype(dtype), rng.integers(-1, 20, (30, 3)).astype(np.int32)
    wide = np.vstack([rows.astype(np.float64), np.zeros(5)])
    got = mb.sum_rows(rows, positions)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, wide[positions].sum(1), rtol=1e-14 if dtype == np.float64 else 2e-3, atol=1e-6)
    with pytest.raises(ValueError, match="sum_rows: positions: expected rows below 20, got 20"):
        mb.sum_rows(rows, positions * 0 + 20)
    with pytest.raises(TypeError, match="sum_rows: positions: expected dtype int32"):
        mb.sum_rows(rows, positions.astype(np.int64))
    with pytest.raises(ValueError, match="sum_rows: rows: expected at least one column"):
        mb.sum_rows(rows[:, :0].copy(), positions)
    assert mb.sum_rows(rows, positions[:0]).shape == (0, 5)
