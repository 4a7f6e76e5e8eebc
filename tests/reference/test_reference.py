"""The CPU reference against code that shares nothing with it: loops over tokens, finite differences, torch autograd."""

import copy
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.types import GRADIENTS, SAVE_POLICIES, is_gated, pair
from tests.cases import BASIC, CASES, ORDERS, ROUTINGS, Case, in_order, make_ids, make_inputs, relative_error

# Two float64 evaluations of one formula: sums of at most a few hundred products, each rounded to 2^-53 = 1.1e-16,
# are apart by some 1e-15; a wrong term is apart by more than 1e-3.
SAME_FORMULA = 1e-12
# Central differences with step 1e-5 on values of order 1: truncation is of the order of step^2 = 1e-10, rounding of
# 2^-53 / step = 1e-11, times sums of some hundred terms.
STEP = 1e-5
FINITE_DIFFERENCE = 1e-7
# The unit roundoff u of the dtype, times 4 because a result passes at most four roundings to it in a row: a or b, y,
# the result, and (backward) the result that saved values imply. float32 has no such roundings, but float32 sums of up
# to a few hundred terms.
LOW_PRECISION = {ml_dtypes.bfloat16: 4 * 2**-8, np.float16: 4 * 2**-11, np.float32: 16 * 2**-24}

SMALL = Case(L=5, k=2, E=3, d=4, h=3)
POLICIES = [policy for policy in SAVE_POLICIES if policy is not None]


def by_case(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def by_seed_of(case):
    """A seed of the case's own, so that cases do not share their random numbers."""
    return CASES.index(case) if case in CASES else 0


def run_layer(case, inputs, save="minimal", needs=GRADIENTS):
    x, ids, weights, w1, w2, grad_out = inputs
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, activation=case.activation, save=save)
    return out, reference.moe_backward(grad_out, saved, needs=needs)


def gate_and_up(w1):
    """w1 as one array (E, d, 2h or h), whatever its form."""
    return np.concatenate(w1, axis=2) if isinstance(w1, tuple) else w1


def scalar_activation(u, name):
    if name in ("swiglu", "silu"):
        return u / (1 + math.exp(-u))
    if name in ("geglu", "gelu"):
        return u * 0.5 * (1 + math.erf(u / math.sqrt(2)))
    return u if u > 0 else 0.0


def layer_by_loops(case, x, ids, weights, w1, w2):
    w1, h = gate_and_up(w1), w2.shape[1]
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            expert = int(ids[t, j])
            if not 0 <= expert < w2.shape[0]:
                continue
            first = [float(np.dot(x[t], w1[expert, :, column])) for column in range(w1.shape[2])]
            y = [scalar_activation(first[i], case.activation) for i in range(h)]
            if is_gated(case.activation):
                y = [y[i] * first[h + i] for i in range(h)]
            for column in range(x.shape[1]):
                out[t, column] += weights[t, j] * np.dot(y, w2[expert, :, column])
    return out


def finite_difference(loss, array):
    """d loss() / d array by central differences; changes array in place and puts it back."""
    grad = np.zeros(array.shape)
    for at in np.ndindex(array.shape):
        value = array[at]
        array[at] = value + STEP
        above = loss()
        array[at] = value - STEP
        below = loss()
        array[at] = value
        grad[at] = (above - below) / (2 * STEP)
    return grad


def route_by_loops(logits, k, renormalize):
    """Plain Python on finite logits."""
    weights, ids = [], []
    for row in logits.tolist():
        chosen = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
        p = [math.exp(row[e] - max(row)) / sum(math.exp(v - max(row)) for v in row) for e in chosen]
        total = sum(p) if renormalize else 1.0
        ids.append(chosen)
        weights.append([v / total for v in p])
    return np.array(weights), np.array(ids)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("L", "k", "E"), [(1, 1, 1), (7, 1, 5), (40, 3, 8), (40, 8, 8)])
def test_route_equals_loops(L, k, E, renormalize):
    logits = np.random.default_rng(0).standard_normal((L, E)) * 3
    logits[:, E // 2] = logits[:, 0]  # a tie in every row
    weights, ids = reference.route(logits, k, renormalize=renormalize)
    want_weights, want_ids = route_by_loops(logits, k, renormalize)
    assert weights.dtype == np.float64 and ids.dtype == np.int32
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_error(weights, want_weights) < SAME_FORMULA


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_route_gives_float32_weights(dtype):
    logits = (np.random.default_rng(1).standard_normal((9, 6)) * 3).astype(dtype)
    weights, ids = reference.route(logits, 2)
    want_weights, want_ids = reference.route(logits.astype(np.float64), 2)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_error(weights, want_weights) < LOW_PRECISION[np.float32]


def test_route_breaks_ties_by_id_and_takes_negative_zero_as_zero():
    logits = np.array([[0.0, -0.0, 0.0, -1.0], [-0.0, 0.0, 1.0, 1.0]], np.float32)
    np.testing.assert_array_equal(reference.route(logits, 3)[1], [[0, 1, 2], [2, 3, 0]])


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_takes_nan_first(renormalize):
    nan, inf = np.nan, np.inf
    logits = np.array([[1, nan, inf, -nan], [nan, nan, nan, nan], [1, 2, 3, 4]], np.float32)
    weights, ids = reference.route(logits, 3, renormalize=renormalize)
    np.testing.assert_array_equal(ids, [[1, 3, 2], [0, 1, 2], [3, 2, 1]])
    assert np.isnan(weights[:2]).all() and np.isfinite(weights[2]).all()


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_is_stable_for_huge_logits(renormalize):
    logits = np.array([[1e4, 1e4 - 1, -1e4], [-1e30, -1e30, -np.inf]], np.float32)
    weights, ids = reference.route(logits, 2, renormalize=renormalize)
    np.testing.assert_array_equal(ids, [[0, 1], [0, 1]])
    share = 1 / (1 + math.exp(-1))
    assert relative_error(weights, [[share, 1 - share], [0.5, 0.5]]) < LOW_PRECISION[np.float32]


def test_route_of_no_tokens():
    weights, ids = reference.route(np.zeros((0, 4), np.float32), 2)
    assert weights.shape == ids.shape == (0, 2) and ids.dtype == np.int32
    assert reference.route_backward(weights, np.zeros((0, 4), np.float32), weights, ids).shape == (0, 4)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_route_backward_equals_finite_differences(k, renormalize):
    rng = np.random.default_rng(2)
    logits = rng.permuted(np.tile(np.arange(5.0), (6, 1)), axis=1)  # 1 apart: a step changes no choice
    logits += rng.random((6, 5)) / 4
    grad_weights = rng.standard_normal((6, k))
    options = {"renormalize": renormalize}
    weights, ids = reference.route(logits, k, **options)
    grad = reference.route_backward(grad_weights, logits, weights, ids, **options)
    want = finite_difference(lambda: np.sum(reference.route(logits, k, **options)[0] * grad_weights), logits)
    # Not relative: k = 1 renormalised is constant and its gradient zero.
    np.testing.assert_allclose(grad, want, rtol=0, atol=FINITE_DIFFERENCE)


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_backward_in_low_precision_and_with_absent_ids(renormalize):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((8, 6)).astype(ml_dtypes.bfloat16)
    options = {"renormalize": renormalize}
    weights, ids = reference.route(logits, 3, **options)
    grad_weights = rng.standard_normal((8, 3)).astype(np.float32)
    grad = reference.route_backward(grad_weights, logits, weights, ids, **options)
    assert grad.dtype == logits.dtype
    exact = logits.astype(np.float64)
    want = reference.route_backward(grad_weights, exact, reference.route(exact, 3, **options)[0], ids, **options)
    assert relative_error(grad, want) < LOW_PRECISION[ml_dtypes.bfloat16]

    # An absent slot counts as one whose weight has no gradient, whatever is there. Where the softmax is over those
    # that were chosen, its logit gets nothing.
    dropped, of_present = ids.copy(), grad_weights.copy()
    dropped[:, 1], of_present[:, 1] = -1, 0
    got = reference.route_backward(grad_weights, exact, weights, dropped, **options)
    want = reference.route_backward(of_present, exact, weights, ids, **options)
    if renormalize:
        assert not np.take_along_axis(got, ids[:, 1:2], axis=1).any()
    first = ids[:, :1]
    got, want = (np.take_along_axis(grad, first, axis=1) for grad in (got, want))
    assert relative_error(got, want) < LOW_PRECISION[np.float32]  # the weights are float32


def assert_dispatch_equals_sort(ids, num_experts):
    """The lists of a stable sort of the slots by expert, absent ones last."""
    index = reference.dispatch(ids, num_experts)
    L, k = ids.shape
    flat = ids.reshape(-1).astype(np.int64)
    present = (flat >= 0) & (flat < num_experts)
    order = np.argsort(np.where(present, flat, num_experts), kind="stable")[: present.sum()]
    tokens = np.full(L * k, -1)
    tokens[: order.size] = order // k
    positions = np.full(L * k, -1)
    positions[order] = np.arange(order.size)
    np.testing.assert_array_equal(index.expert_token_indices, tokens)
    np.testing.assert_array_equal(index.token_index_map, positions.reshape(L, k))
    np.testing.assert_array_equal(
        index.expert_token_offsets, np.searchsorted(flat[order], np.arange(num_experts + 1), side="left")
    )
    if ids.dtype == np.int32:
        assert index.token_expert_indices.ctypes.data == ids.ctypes.data  # the ids themselves
        assert index.token_expert_indices.shape == (L * k,) and not index.ids_copied
    else:
        np.testing.assert_array_equal(index.token_expert_indices, np.where(present, flat, -1))
        assert index.ids_copied
    counts = np.bincount(flat[present], minlength=num_experts)
    assert index.experts_by_load.tolist() == sorted(range(num_experts), key=lambda e: (-counts[e], e))
    lists = (index.expert_token_indices, index.expert_token_offsets, index.token_index_map, index.experts_by_load)
    assert all(a.dtype == np.int32 for a in (*lists, index.token_expert_indices))
    assert (index.num_tokens, index.k, index.num_experts) == (L, k, num_experts)
    starts = np.cumsum(counts) - counts
    tiles = [(e, row) for e in range(num_experts) for row in range(starts[e], starts[e] + counts[e], 128)]
    assert index.row_tiles.shape == (launch_config.max_row_tiles(L * k, num_experts) + 1, 2)
    assert index.row_tiles[: 1 + len(tiles)].tolist() == [[len(tiles), 128], *map(list, tiles)]
    assert (index.row_tiles[1 + len(tiles) :] == -1).all()
    own = 2 * L * k + 2 * num_experts + 1 + index.row_tiles.size + (L * k if index.ids_copied else 0)
    assert index.nbytes == 4 * own


def test_dispatch_of_the_papers_example():
    # Section 4.1, Figure 2. The text says L = 6 but lists five tokens, and prints token_expert_indices without the
    # last two entries; the other lists are those of the five tokens.
    ids = np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
    index = reference.dispatch(ids, 4)
    assert index.token_expert_indices.tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
    assert index.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert index.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
    assert index.token_index_map[0].tolist() == [5, 7]
    by_expert = np.split(index.expert_token_indices, index.expert_token_offsets[1:-1])
    assert [tokens.tolist() for tokens in by_expert] == [[1, 2, 4], [1, 3], [0, 3], [0, 2, 4]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@by_case(CASES)
def test_dispatch_equals_stable_sort(case, dtype):
    ids = make_ids(case, np.random.default_rng(by_seed_of(case)))
    assert_dispatch_equals_sort(ids.astype(dtype), case.E)


@settings(max_examples=200)
@given(data=st.data())
def test_dispatch_equals_stable_sort_for_any_ids(data):
    L, k, num_experts = (data.draw(st.integers(low, high)) for low, high in ((0, 20), (1, 5), (1, 9)))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    limits = np.iinfo(dtype)
    # 2^32 is 0 in the low 32 bits: an id to be cast only after it is known to be absent.
    far = [i for i in (limits.min, limits.max, 2**32) if i <= limits.max]
    one_id = st.integers(-2, num_experts + 1) | st.sampled_from(far)
    ids = data.draw(st.lists(one_id, min_size=L * k, max_size=L * k))
    assert_dispatch_equals_sort(np.array(ids, dtype).reshape(L, k), num_experts)


def test_dispatch_lists_a_duplicate_expert_by_slot():
    index = reference.dispatch(np.array([[1, 0, 1], [1, 1, -1]], np.int32), 2)
    assert index.expert_token_indices.tolist() == [0, 0, 0, 1, 1, -1]
    assert index.token_index_map.tolist() == [[1, 0, 2], [3, 4, -1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf_of_arrays(dtype):
    got = reference.erf(np.array([[0.5, -3], [np.inf, np.nan]], dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.array([[math.erf(0.5), math.erf(-3)], [1, np.nan]], dtype))
    assert reference.erf(np.zeros((0, 3), dtype)).shape == (0, 3)


@by_case(CASES)
def test_forward_equals_loops(case):
    x, ids, weights, w1, w2, _ = make_inputs(case, by_seed_of(case))
    tokens = slice(0, 12)  # the loops are slow; experts see all tokens
    out, _ = reference.moe_forward(x, ids, weights, w1, w2, activation=case.activation)
    assert out.shape == x.shape and out.dtype == x.dtype
    want = layer_by_loops(case, x[tokens], ids[tokens], weights[tokens], w1, w2)
    assert relative_error(out[tokens], want) < SAME_FORMULA


@by_case(
    [replace(SMALL, activation=a) for a in BASIC]
    + [replace(SMALL, order=o) for o in ORDERS]
    + [replace(SMALL, routing=r) for r in ROUTINGS]
)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_equals_finite_differences(case, name):
    x, ids, weights, w1, w2, grad_out = inputs = make_inputs(case, seed=1)

    def loss():
        out, _ = reference.moe_forward(x, ids, weights, w1, w2, activation=case.activation, save=None)
        return np.sum(out * grad_out)

    got = getattr(run_layer(case, inputs)[1], name)
    variable = {"x": x, "weights": weights, "w1": w1, "w2": w2}[name]
    is_pair = isinstance(variable, tuple)
    want = tuple(finite_difference(loss, part) for part in variable) if is_pair else finite_difference(loss, variable)
    assert relative_error(got, want) < FINITE_DIFFERENCE


def torch_layer(torch, case, x, ids, weights, w1, w2):
    """The layer in torch: all slots at once, each with its own copy of its expert's matrices."""
    act = {"s": torch.nn.functional.silu, "g": torch.nn.functional.gelu, "r": torch.relu}[case.activation[0]]
    present = (ids >= 0) & (ids < case.E)
    at = torch.where(present, ids, 0).long()
    w1 = torch.cat(w1, dim=2) if isinstance(w1, tuple) else w1
    first = torch.einsum("td,tjdc->tjc", x, w1[at])
    y = act(first[..., : case.h])
    if is_gated(case.activation):
        y = y * first[..., case.h :]
    slots = torch.einsum("tjh,tjhd->tjd", y, w2[at])
    return torch.einsum("tj,tjd->td", weights * present, slots)


@by_case(CASES)
def test_layer_equals_torch_autograd(case):
    torch = pytest.importorskip("torch")
    x, ids, weights, w1, w2, grad_out = inputs = make_inputs(case, by_seed_of(case))
    out, grads = run_layer(case, inputs)

    def leaf(a):
        return tuple(map(leaf, a)) if isinstance(a, tuple) else torch.from_numpy(a.copy()).requires_grad_()

    leaves = dict(zip(GRADIENTS, map(leaf, (x, weights, w1, w2)), strict=True))
    want = torch_layer(torch, case, leaves["x"], torch.from_numpy(ids), *(leaves[n] for n in GRADIENTS[1:]))
    assert relative_error(out, want.detach().numpy()) < SAME_FORMULA
    want.backward(torch.from_numpy(grad_out))
    for name, variable in leaves.items():
        grad = tuple(v.grad for v in variable) if isinstance(variable, tuple) else variable.grad
        assert relative_error(getattr(grads, name), np.asarray(grad)) < SAME_FORMULA, name


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_equals_torch_autograd(renormalize):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    logits, grad_weights = rng.standard_normal((50, 9)), rng.standard_normal((50, 4))
    options = {"renormalize": renormalize}
    weights, ids = reference.route(logits, 4, **options)
    leaf = torch.from_numpy(logits.copy()).requires_grad_()
    want, want_ids = leaf.softmax(dim=1).topk(4, dim=1)
    want = want / want.sum(dim=1, keepdim=True) if renormalize else want
    want.backward(torch.from_numpy(grad_weights))
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_error(weights, want.detach().numpy()) < SAME_FORMULA
    grad = reference.route_backward(grad_weights, logits, weights, ids, **options)
    assert relative_error(grad, leaf.grad.numpy()) < SAME_FORMULA


@pytest.mark.parametrize("dtype", [np.float64, *LOW_PRECISION], ids=lambda dtype: np.dtype(dtype).name)
@by_case([replace(SMALL, L=40, d=24, h=40, activation=a, routing="absent") for a in BASIC])
def test_save_policies_give_identical_results(case, dtype):
    inputs = make_inputs(case, seed=5, dtype=dtype)
    out, grads = run_layer(case, inputs, save="minimal")
    for save in ("paper", "recompute"):
        other_out, other_grads = run_layer(case, inputs, save=save)
        np.testing.assert_array_equal(other_out, out)
        for name in GRADIENTS:
            np.testing.assert_array_equal(getattr(other_grads, name), getattr(grads, name), err_msg=f"{save}: {name}")
    unsaved_out, unsaved = reference.moe_forward(*inputs[:5], activation=case.activation, save=None)
    np.testing.assert_array_equal(unsaved_out, out)
    assert unsaved is None


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@by_case([SMALL, replace(SMALL, activation="gelu"), replace(SMALL, order="pair")])
def test_saved_holds_what_the_policy_says(case, dtype):
    x, ids, weights, w1, w2, _ = make_inputs(case, seed=6, dtype=dtype)
    columns = 2 * case.h if is_gated(case.activation) else case.h
    slots, item = case.L * case.k, np.dtype(dtype).itemsize
    for save in POLICIES:
        _, saved = reference.moe_forward(x, ids, weights, w1, w2, activation=case.activation, save=save)
        kept = ((saved.x, x), (saved.weights, weights), *zip(pair(saved.w1), pair(w1), strict=True), (saved.w2, w2))
        assert all(mine is given for mine, given in kept)
        assert (saved.options.save, saved.options.activation, saved.consumed) == (save, case.activation, False)
        shapes = [None if a is None else (a.shape, a.dtype) for a in (saved.first_layer, saved.y_swi)]
        first_layer, y_swi = ((slots, columns), np.dtype(dtype)), ((slots, case.h), np.dtype(dtype))
        in_fp8 = (launch_config.saved_fp8(slots, case.h, columns // case.h).nbytes,), np.dtype(np.uint8)
        want = {"minimal": [first_layer, None], "paper": [first_layer, y_swi], "recompute": [None, None]}
        want = (want | {"fp8": [in_fp8, None]})[save]
        assert shapes == want
        per_slot = {"minimal": columns, "paper": columns + case.h, "recompute": 0}
        kept = in_fp8[0][0] if save == "fp8" else slots * per_slot[save] * item
        assert saved.nbytes == saved.index.nbytes + kept


@pytest.mark.parametrize("dtype", list(LOW_PRECISION), ids=lambda dtype: np.dtype(dtype).name)
@by_case([replace(SMALL, L=100, d=24, h=40, activation=a, order=o) for a in BASIC for o in ("row", "transposed")])
def test_low_precision_equals_float64(case, dtype):
    inputs = make_inputs(case, seed=7, dtype=dtype)
    exact_inputs = [tuple(map(np.float64, a)) if isinstance(a, tuple) else a.astype(np.float64) for a in inputs]
    exact_inputs[1] = inputs[1]
    out, grads = run_layer(case, inputs)
    want_out, want = run_layer(case, exact_inputs)
    assert out.dtype == dtype and relative_error(out, want_out) < LOW_PRECISION[dtype]
    for name, given_array in zip(GRADIENTS, (inputs[0], *inputs[2:5]), strict=True):
        assert getattr(grads, name).dtype == given_array.dtype, name
        assert relative_error(getattr(grads, name), getattr(want, name)) < LOW_PRECISION[dtype], name


@by_case(
    [replace(c, order=o) for c in (SMALL, replace(SMALL, k=1, E=1), replace(SMALL, L=0)) for o in ORDERS]
    + [replace(SMALL, activation="gelu", order=o) for o in ORDERS[:2]]
)
def test_gradients_have_the_form_and_memory_order_of_the_weights(case):
    inputs = make_inputs(case, seed=8)
    _, grads = run_layer(case, inputs)
    w1, w2 = inputs[3:5]
    assert type(grads.w1) is type(w1)
    w1_pairs = zip(grads.w1, w1, strict=True) if isinstance(w1, tuple) else [(grads.w1, w1)]
    for grad, w in (*w1_pairs, (grads.w2, w2)):
        assert (grad.shape, grad.dtype, grad.strides) == (w.shape, w.dtype, w.strides)


@by_case([SMALL, replace(SMALL, activation="reglu")])
def test_values_do_not_depend_on_the_memory_order(case):
    want_out, want = run_layer(case, make_inputs(case, seed=9))
    for order in ORDERS[1:]:
        other = replace(case, order=order)
        out, grads = run_layer(other, make_inputs(other, seed=9))
        # Not bit for bit: BLAS sums transposed operands in another order.
        assert relative_error(out, want_out) < SAME_FORMULA
        for name in GRADIENTS:
            assert relative_error(gate_and_up(getattr(grads, name)), getattr(want, name)) < SAME_FORMULA, (order, name)


def test_pair_of_views_into_one_array():
    case = replace(SMALL, order="transposed")
    x, ids, weights, w1, w2, grad_out = make_inputs(case, seed=10)
    pair = (w1[:, :, : case.h], w1[:, :, case.h :])
    out, grads = run_layer(case, (x, ids, weights, pair, w2, grad_out))
    want_out, want = run_layer(case, (x, ids, weights, w1, w2, grad_out))
    np.testing.assert_array_equal(out, want_out)
    np.testing.assert_array_equal(np.concatenate(grads.w1, axis=2), want.w1)
    assert all(np.argsort(grad.strides).tolist() == [1, 2, 0] for grad in grads.w1)


@by_case([c for c in CASES if c.routing == "absent"])
def test_absent_slot_is_a_slot_of_weight_zero(case):
    x, ids, weights, w1, w2, grad_out = inputs = make_inputs(case, by_seed_of(case))
    absent = (ids < 0) | (ids >= case.E)
    assert absent[0].all()
    weights[absent] = np.nan  # never looked at
    out, grads = run_layer(case, inputs)
    assert not grads.weights[absent].any() and not out[0].any() and not grads.x[0].any()
    zeroed = x, np.where(absent, 0, ids), np.where(absent, 0, weights), w1, w2, grad_out
    want_out, want = run_layer(case, zeroed)
    assert relative_error(out, want_out) < SAME_FORMULA
    for name in ("x", "w1", "w2"):
        assert relative_error(getattr(grads, name), getattr(want, name)) < SAME_FORMULA, name
    assert relative_error(grads.weights, np.where(absent, 0, want.weights)) < SAME_FORMULA


def test_all_slots_absent():
    x, ids, weights, w1, w2, grad_out = make_inputs(SMALL, seed=11)
    out, grads = run_layer(SMALL, (x, np.full_like(ids, -1), weights, w1, w2, grad_out))
    assert not out.any() and not any(grad.any() for grad in grads)


def test_duplicate_slots_add_up():
    """An expert named twice with weights p and q is that expert named once with weight p + q."""
    case = Case(L=30, k=2, E=4, d=6, h=5)
    x, ids, weights, w1, w2, grad_out = make_inputs(case, seed=12)
    ids[:, 1] = ids[:, 0]
    out, grads = run_layer(case, (x, ids, weights, w1, w2, grad_out))
    once = x, ids[:, :1].copy(), weights.sum(axis=1, keepdims=True), w1, w2, grad_out
    want_out, want = run_layer(case, once)
    assert relative_error(out, want_out) < SAME_FORMULA
    for name in ("x", "w1", "w2"):
        assert relative_error(getattr(grads, name), getattr(want, name)) < SAME_FORMULA, name
    assert relative_error(grads.weights, np.repeat(want.weights, 2, axis=1)) < SAME_FORMULA


@by_case([c for c in CASES if c.routing == "empty_experts"] + [replace(SMALL, L=0, order=o) for o in ORDERS])
def test_gradient_of_an_empty_expert_is_exactly_zero(case):
    inputs = make_inputs(case, by_seed_of(case), dtype=np.float32)
    ids = inputs[1]
    _, grads = run_layer(case, inputs)
    parts = (*grads.w1, grads.w2) if isinstance(grads.w1, tuple) else (grads.w1, grads.w2)
    empty = np.setdiff1d(np.arange(case.E), ids)
    used = np.unique(ids)
    assert empty.size
    for grad in parts:
        assert not grad[empty].any() and grad[used].any(axis=(1, 2)).all()


def test_no_tokens():
    x, ids, weights, w1, w2, grad_out = make_inputs(replace(SMALL, L=0), seed=13)
    for save in POLICIES:
        out, grads = run_layer(SMALL, (x, ids, weights, w1, w2, grad_out), save=save)
        assert out.shape == grads.x.shape == (0, SMALL.d) and grads.weights.shape == (0, SMALL.k)


@by_case([replace(SMALL, activation=a, order=o) for a, o in (("swiglu", "row"), ("geglu", "pair"), ("relu", "row"))])
@pytest.mark.parametrize("save", POLICIES)
def test_only_needed_gradients_are_computed(case, save):
    inputs = make_inputs(case, seed=14)
    _, want = run_layer(case, inputs, save=save)
    for needs in ((), ("w2",), ("weights",), ("x", "weights"), ("w1",), ("x", "w1", "w2")):
        _, grads = run_layer(case, inputs, save=save, needs=needs)
        for name in GRADIENTS:
            if name in needs:
                np.testing.assert_array_equal(getattr(grads, name), getattr(want, name), err_msg=f"{needs}: {name}")
            else:
                assert getattr(grads, name) is None, (needs, name)


@by_case([replace(SMALL, L=40, routing=r) for r in ("random", "absent", "duplicate")])
def test_int64_ids_give_the_same(case):
    x, ids, weights, w1, w2, grad_out = make_inputs(case, seed=15)
    want_out, want = run_layer(case, (x, ids, weights, w1, w2, grad_out))
    out, grads = run_layer(case, (x, ids.astype(np.int64), weights, w1, w2, grad_out))
    np.testing.assert_array_equal(out, want_out)
    for name in GRADIENTS:
        np.testing.assert_array_equal(getattr(grads, name), getattr(want, name), err_msg=name)


@pytest.mark.parametrize("save", POLICIES)
def test_nothing_given_is_changed_and_backward_can_be_repeated(save):
    inputs = make_inputs(SMALL, seed=16)
    for array in inputs:
        array.flags.writeable = False
    _, saved = reference.moe_forward(*inputs[:5], activation=SMALL.activation, save=save)
    first, second = (reference.moe_backward(inputs[5], saved, keep_saved=keep) for keep in (False, True))
    for name in GRADIENTS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
    assert not saved.consumed


def prefilled(weight, dtype, transposed, used):
    """Random numbers in a weight's form, NaN for experts that are not `used`."""
    if isinstance(weight, tuple):
        return tuple(prefilled(part, dtype, transposed, used) for part in weight)
    total = np.random.default_rng(20).standard_normal(weight.shape).astype(dtype)
    total[~used] = np.nan
    return in_order(total, transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@by_case([replace(SMALL, E=5, routing="empty_experts", order=order) for order in ("row", "pair_transposed")])
def test_accumulated_gradients_are_plain_sums(case, dtype, transposed):
    inputs = make_inputs(case, seed=19)
    used = np.isin(np.arange(case.E), inputs[1])
    assert not used.all()
    _, want = run_layer(case, inputs)
    _, saved = reference.moe_forward(*inputs[:5], activation=case.activation)
    totals = {
        name: prefilled(weight, dtype, transposed, used) for name, weight in (("w1", inputs[3]), ("w2", inputs[4]))
    }
    before = copy.deepcopy(totals)
    for times in (1, 2):
        grads = reference.moe_backward(inputs[5], saved, accumulate=totals)
        assert grads.w1 is totals["w1"] and grads.w2 is totals["w2"]
        for name, total in totals.items():
            got, start, plain = (gate_and_up(v) for v in (total, before[name], getattr(want, name)))
            assert relative_error(got[used], (start + times * plain)[used]) <= 4 * np.finfo(dtype).eps
            assert np.isnan(got[~used]).all()
    np.testing.assert_array_equal(grads.x, want.x)
    only_w2 = reference.moe_backward(inputs[5], saved, accumulate={"w2": totals["w2"]})
    np.testing.assert_array_equal(gate_and_up(only_w2.w1), gate_and_up(want.w1))


def test_accumulated_gradients_are_rounded_once():
    """float32 sums added to bfloat16: neither their rounding to bfloat16 nor the total's differs from this."""
    inputs = make_inputs(SMALL, seed=21, dtype=ml_dtypes.bfloat16)
    _, saved = reference.moe_forward(*inputs[:5], activation=SMALL.activation)
    sums = np.zeros(inputs[4].shape, np.float32)
    reference.moe_backward(inputs[5], saved, needs=("w2",), accumulate={"w2": sums})
    assert (sums != sums.astype(ml_dtypes.bfloat16)).any()
    start = prefilled(inputs[4], ml_dtypes.bfloat16, False, np.ones(SMALL.E, bool))
    total = start.copy()
    reference.moe_backward(inputs[5], saved, needs=("w2",), accumulate={"w2": total})
    np.testing.assert_array_equal(total, (start.astype(np.float32) + sums).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_relu_has_no_slope_at_zero(activation):
    case = replace(SMALL, activation=activation)
    x, ids, weights, w1, w2, grad_out = make_inputs(case, seed=17)
    _, grads = run_layer(case, (np.zeros_like(x), ids, weights, w1, w2, grad_out))  # a = 0 everywhere
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("activation", BASIC)
def test_huge_preactivations_stay_finite(activation, monkeypatch):
    # 1e4 overflows exp in float32; a warning from NumPy would be an error here.
    case = replace(SMALL, activation=activation)
    x, ids, weights, w1, w2, grad_out = make_inputs(case, seed=18, dtype=np.float32)
    for name in ("moe_forward", "moe_backward"):
        monkeypatch.setattr(reference, name, getattr(reference, name).__wrapped__)  # which obeys np.errstate
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out, grads = run_layer(case, (1e4 * x, ids, weights, w1, w2, grad_out))
    assert np.isfinite(out).all() and all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("state", ["raise", "warn"])
def test_results_do_not_depend_on_errstate(state):
    """Tails of exp underflow by design, and overflow gives infinity as on a GPU."""
    x, ids, weights, w1, w2, grad_out = make_inputs(SMALL, seed=18, dtype=np.float32)
    logits, half = np.array([[0.0, 200.0, 3.0]], np.float32), x.astype(np.float16)

    def results():
        made = []
        for tokens, first, second, upstream in (
            (50 * x, w1, w2, grad_out),
            (np.float32(1e38) * x, w1, w2, grad_out),
            (half, *(a.astype(np.float16) * np.float16(200) for a in (w1, w2)), grad_out.astype(np.float16)),
        ):
            out, saved = mb.moe_forward(tokens, ids, weights, first, second)
            made += [out, *mb.moe_backward(upstream, saved)]
        made.append(mb.sum_rows(np.full((2, 3), 6e4, np.float16), np.array([[0, 1]], np.int32)))
        for options in ({}, {"score": "sigmoid"}, {"score": "sqrt_softplus"}, {"sums": ("softmax", "z", "entropy")}):
            routed, chosen, *sums = mb.route(100 * logits, 2, **options)
            made += [routed, *(total for group in sums for total in group)]
            grads = {"grad_z_sums": sums[0].z_sums} if sums else {}
            made.append(mb.route_backward(routed, 100 * logits, routed, chosen, **options, **grads))
        return made

    with np.errstate(all="ignore"):
        want = results()
    with np.errstate(all=state):
        got = results()
    assert not all(np.isfinite(array).all() for array in want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_relative_error():
    assert relative_error(np.zeros(3), np.zeros(3)) == 0
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    for got, want in (([np.nan], [1]), ([1], [np.nan]), ([np.inf], [np.inf]), ([1], [0])):
        assert relative_error(got, want) == math.inf
    with pytest.raises(ValueError, match="equal shapes"):
        relative_error(np.zeros(3), np.zeros((3, 1)))
