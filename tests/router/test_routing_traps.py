"""Mistakes that routers are known to make, each with data on which the mistake gives another result.

More are where their subject is: limits of gradients, one slot, bias on logits and replay in test_routing.py; capacity
and rounding in test_selection.py; losses in test_balancing.py; recomputation and the bias's dtype in test_torch.py;
weights on the input in test_slots.py; ties and special values on a GPU in test_device_code_router.py; offsets of rows
that need 64 bits in test_router.py.
"""

import math

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from tests.cases import relative_error

SIZES = [(E, k) for E in (1, 2, 7, 16, 64, 128, 255, 256, 512, 1000, 2048, 4096) for k in (1, 2, 8, 64) if k <= E]
SIZES += [(E, 8) for E in (8, 33, 40, 160, 288, 384, 768, 896, 1024, 2304)]  # of published models, and beside lanes
SIZES += [(128, k) for k in (6, 10, 12, 16, 22, 32, 33)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_loop(row, k, score, bias, renormalize):
    """Weights and ids of one token, in plain Python."""
    total = sum(math.exp(x) for x in row)
    scores = [math.exp(x) / total if score == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
    keys = [s + b for s, b in zip(scores, bias, strict=True)]
    ids = sorted(range(len(row)), key=lambda e: (-keys[e], e))[:k]
    divisor = sum(scores[e] for e in ids) if renormalize else 1
    return [scores[e] / divisor for e in ids], ids


@pytest.mark.parametrize(("E", "k"), SIZES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_any_size(E, k, score):
    """Sizes that are no power of two, and more slots than experts of a warp's lanes, are sizes as any other."""
    rng = np.random.default_rng(E + k)
    x, bias = rng.standard_normal((3, E)), rng.standard_normal(E).astype(np.float32)
    for renormalize in (True, False):
        weights, ids = mb.route(x, k, score=score, bias=bias, renormalize=renormalize)
        want = [by_loop(row, k, score, map(float, bias), renormalize) for row in x.tolist()]
        np.testing.assert_array_equal(ids, [chosen for _, chosen in want])
        np.testing.assert_allclose(weights, [values for values, _ in want], rtol=1e-12)
        upstream = rng.standard_normal((3, k))
        grad = mb.route_backward(upstream, x, weights, ids, score=score, bias=bias, renormalize=renormalize)
        along, step = rng.standard_normal((3, E)), 1e-5
        ends = [
            (mb.route(x + sign * step * along, ids=ids, score=score, renormalize=renormalize)[0] * upstream).sum()
            for sign in (1, -1)
        ]
        assert abs((grad * along).sum() - (ends[0] - ends[1]) / (2 * step)) < 1e-7


@pytest.mark.parametrize("L", [0, 1, 513])
def test_any_number_of_tokens(L):
    """Each is routed as if it were alone, and none at all is a number too."""
    x = np.random.default_rng(L).standard_normal((L, 12))
    options = {"score": "sigmoid", "groups": (3, 2, 2), "sums": ("softmax", "z", "entropy")}
    weights, ids, sums = mb.route(x, 5, **options)
    assert weights.shape == ids.shape == (L, 5) and sums.score_sums.shape == (1, 12)
    grad = mb.route_backward(weights, x, weights, ids, **options, grad_z_sums=np.ones(1))
    alone = [mb.route(x[t : t + 1], 5, **options) for t in range(L)]
    for t, (of_one, chosen, _) in enumerate(alone):
        np.testing.assert_array_equal(ids[t], chosen[0])
        np.testing.assert_allclose(weights[t], of_one[0], rtol=1e-14)
        row = mb.route_backward(of_one, x[t : t + 1], of_one, chosen, **options, grad_z_sums=np.ones(1))
        np.testing.assert_allclose(grad[t], row[0], rtol=0, atol=1e-13)
    for name, total in vars(sums).items():
        np.testing.assert_allclose(total, sum(getattr(s, name) for _, _, s in alone) + np.zeros(total.shape))


def test_experts_outside_of_the_kept_groups_lose_to_every_key():
    """Filled with 0 instead of -inf, they win over kept experts with negative keys."""
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal((200, 32)), rng.standard_normal(32).astype(np.float32) / 4 - 3
    keys = sigmoid(x) + bias
    by_group = np.sort(keys.reshape(200, 4, 8), axis=2)[:, :, -2:].sum(axis=2)
    inside = np.zeros((200, 4), bool)
    np.put_along_axis(inside, np.argsort(-by_group, axis=1)[:, :2], True, axis=1)
    inside = inside.repeat(8, axis=1)
    ids = mb.route(x, 6, score="sigmoid", bias=bias, groups=(4, 2, 2))[1]
    assert np.take_along_axis(inside, ids, axis=1).all()
    filled = np.argsort(-np.where(inside, keys, 0), axis=1)[:, :6]
    assert not np.take_along_axis(inside, filled, axis=1).any()


def test_no_expert_of_other_groups_fills_the_last_slots():
    """A top-k over keys that are -inf outside of the kept groups goes on with those, and gives them real weights."""
    x = np.random.default_rng(1).standard_normal((50, 32))
    ids = mb.route(x, 16, score="sigmoid", groups=(4, 2, 2))[1]
    assert all(len(set(row // 8)) == 2 and len(set(row)) == 16 for row in ids)
    with pytest.raises(
        ValueError, match=r"^route: k: expected at most the 16 experts of the 2 kept groups of 8, got 17"
    ):
        mb.route(x, 17, score="sigmoid", groups=(4, 2, 2))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "identity"])
def test_ties_go_to_the_lower_id(score):
    """Libraries leave their order open. Logits of 16 bits tie at the last slot of one token in ten."""
    x = np.random.default_rng(2).standard_normal((500, 256)).astype(ml_dtypes.bfloat16)
    x[0] = 0
    x[1, 1:] = x[1, 0]
    order = np.argsort(-x.astype(np.float64), axis=1, kind="stable")
    last = np.take_along_axis(x, order, axis=1)
    assert (last[:, 7] == last[:, 8]).mean() > 0.05
    np.testing.assert_array_equal(mb.route(x, 8, score=score)[1], order[:, :8])
    same = mb.route(x, 8, score=score, bias=np.zeros(256, np.float32), bias_on="logits")[1]
    np.testing.assert_array_equal(same, order[:, :8])
    groups = mb.route(np.zeros((3, 12)), 4, groups=(6, 2, 1))[1]
    np.testing.assert_array_equal(groups, [[0, 1, 2, 3]] * 3)


def test_signs_of_zero_and_nan_do_not_count():
    """As bits, -0 is below +0, and a NaN with a sign below every number."""
    x = np.array([[-0.0, 0.0, -0.0, 0.0], [1, -np.nan, 2, np.nan], [-np.inf, -0.0, 0.0, -np.nan]], np.float32)
    assert np.signbit(x[1, 1]) and np.signbit(x[0, 0])
    for bias in (None, np.zeros(4, np.float32)):
        ids = mb.route(x, 4, score="identity", renormalize=False, bias=bias)[1]
        np.testing.assert_array_equal(ids, [[0, 1, 2, 3], [1, 3, 2, 0], [3, 1, 2, 0]])


def test_nan_is_not_cut_and_masked_nan_has_no_gradient():
    """A comparison with NaN is false, and 0 * NaN is NaN."""
    x = np.array([[1, np.nan, 2, 0], [1, np.inf, 2, 0], [1, 2, 3, 0]], np.float32)
    for options in ({"top_p": 0.9}, {"threshold": 0.0}):
        weights, ids = mb.route(x, 2, **options)
        np.testing.assert_array_equal(ids[:2], [[1, 2], [1, 2]])
        assert np.isnan(weights[:2]).all() and np.isfinite(weights[2]).all()
    mask = np.array([False, False, True])
    for k, sums in ((1, ()), (2, ("z", "entropy", "softmax"))):
        weights, ids, *found = mb.route(x, k, token_mask=mask, sums=sums)
        names = "grad_score_sums", "grad_z_sums", "grad_entropy_sums"
        named = dict(zip(names, map(np.ones_like, found[0]), strict=True)) if found else {}
        grad = mb.route_backward(np.ones_like(weights), x, weights, ids, token_mask=mask, sums=sums, **named)
        assert not grad[:2].any() and np.isfinite(grad).all() and (grad[2].any() or not sums)


def test_logits_rank_where_probabilities_are_all_zero():
    """Probabilities below the smallest number tie, so that a top-k of them takes the lowest ids."""
    x = np.linspace(-2000, -1000, 64, dtype=np.float32)[None].copy()
    x[0, 0] = 0
    ids = mb.route(x, 8)[1]
    np.testing.assert_array_equal(ids[0], [0, 63, 62, 61, 60, 59, 58, 57])
    p = np.exp(x)
    assert (np.argsort(-p, axis=1, kind="stable")[:, :8] == np.arange(8)).all()


def test_neighbouring_numbers_are_told_apart():
    """Keys with the id in their last bits have fewer digits than the logits."""
    E = 1000
    places = np.random.default_rng(3).permutation(E)
    x = (np.float32(1) + places * np.float32(2.0**-23)).astype(np.float32)[None]
    np.testing.assert_array_equal(mb.route(x, 64)[1][0], np.argsort(-places)[:64])


def test_what_eps_guards():
    """1e-20 is more than four sigmoids of -50: their weights add up to 0.07. 1e-6 shows in fp32 with any scores."""
    small = np.full((1, 4), -50.0)
    assert abs(mb.route(small, 4, score="sigmoid", eps=1e-20)[0].sum() - 0.0716) < 1e-3
    assert abs(mb.route(small, 4, score="sigmoid")[0].sum() - 1) < 1e-12
    x = np.random.default_rng(4).standard_normal((20, 16)).astype(np.float32) - 2
    plain, guarded = (mb.route(x, 4, score="sigmoid", eps=eps)[0] for eps in (0, 1e-6))
    assert 1e-7 < relative_error(guarded, plain) < 1e-5
    total = sigmoid(np.sort(x.astype(np.float64))[:, -4:]).sum(axis=1)
    assert relative_error(guarded.sum(axis=1), total / (total + 1e-6)) < 2e-7


def test_weights_are_scores_and_not_keys_less_the_bias():
    """(s + b) - b keeps few digits of a small s in fp32."""
    rng = np.random.default_rng(5)
    x, bias = (rng.standard_normal((50, 16)) - 12).astype(np.float32), (rng.random(16) + 1).astype(np.float32)
    weights, ids = mb.route(x, 4, score="sigmoid", bias=bias, renormalize=False)
    s = sigmoid(x.astype(np.float64))
    assert relative_error(weights, np.take_along_axis(s, ids, axis=1)) < 1e-6
    subtracted = (s.astype(np.float32) + bias) - bias
    assert relative_error(np.take_along_axis(subtracted, ids, axis=1), np.take_along_axis(s, ids, axis=1)) > 1e-3


def test_rounding_down_leaves_tokens_without_experts():
    """Fewer tokens than a tile chose an expert, so it gets none; and the tile is the one that is asked for."""
    rng = np.random.default_rng(6)
    scores = rng.random((200, 8)).astype(np.float32)
    ids = np.argsort(-scores, axis=1)[:, :1].astype(np.int32)
    for tile, largest in ((1, 200), (8, 200), (40, 160), (128, 0)):
        token_offsets, found = mb.round_tokens(scores, ids, tile=tile, rounding="down")
        counts = np.bincount(found[: token_offsets[-1]], minlength=8)
        assert (counts % tile == 0).all() and counts.sum() <= largest
        assert (counts == mb.tokens_per_expert(ids, 8)[0] // tile * tile).all()
        assert (np.diff(token_offsets) == 0).sum() == 200 - counts.sum()
        weights, _ = mb.route(scores, score="identity", ids=found, token_offsets=token_offsets, renormalize=False)
        assert weights.shape == found.shape and np.isfinite(weights).all()


def test_counts_are_of_what_was_routed():
    """A plain top-k of the logits, which some losses count, differs as soon as there is a bias or are groups."""
    rng = np.random.default_rng(7)
    x, bias = rng.standard_normal((128, 32)), rng.standard_normal(32).astype(np.float32) / 4
    ids = mb.route(x, 8, score="sigmoid", bias=bias, groups=(4, 2, 2))[1]
    counts = mb.tokens_per_expert(ids, 32)[0]
    np.testing.assert_array_equal(counts, [(ids == e).sum() for e in range(32)])
    plain = mb.tokens_per_expert(mb.route(x, 8)[1], 32)[0]
    np.testing.assert_array_equal(plain, np.bincount(np.argsort(-x, axis=1)[:, :8].ravel(), minlength=32))
    assert abs(counts - plain).sum() > 0.1 * 1024


@pytest.mark.parametrize("offsets", [[7, 5, 3, 1], [6, 0, 6, 0], [-9, 100, 2, -(2**31)], [9, 9, 2**31 - 1, 9]], ids=str)
def test_offsets_that_fall_or_run_past_the_end_give_results(offsets):
    """Without meaning, but of the right shape, and never an error or a read beyond the arrays."""
    rng = np.random.default_rng(8)
    x, ids, offsets = rng.standard_normal((6, 8)), rng.integers(-1, 9, (6, 3)), np.array(offsets, np.int32)
    names = ("softmax", "z", "entropy")
    weights, chosen, sums = mb.route(x, 2, sums=names, sequences=offsets)
    assert [s.shape for s in sums] == [(3, 8), (3,), (3,)]
    grads = {f"grad_{name}": total for name, total in vars(sums).items()}
    grad = mb.route_backward(weights, x, weights, chosen, sums=names, sequences=offsets, **grads)
    assert grad.shape == x.shape and np.isfinite(grad).all()
    assert mb.tokens_per_expert(ids, 8, sequences=offsets).shape == (3, 8)
    values = {"weights": rng.random((6, 3)), "priority": rng.random(6)}
    for order in ("position", "choice", "weights", "priority"):
        options = {order: values[order]} if order in values else {}
        kept = mb.limit_capacity(ids, 8, 1, order=order, sequences=offsets, **options)
        assert ((kept == ids) | (kept == -1)).all()
    token_offsets, found = mb.expert_choice(x, 2, sequences=offsets)
    assert token_offsets.shape == (7,) and ((found >= -1) & (found < 8)).all()
    per_token = np.resize(offsets, 7)
    for score in ("softmax", "sigmoid", "relu"):
        pairs = {"token_offsets": per_token, "score": score, "eps": 1.0}
        weights, kept = mb.route(x, ids=ids.ravel(), **pairs)
        assert weights.shape == kept.shape == (18,) and ((kept >= -1) & (kept < 8)).all()
        assert np.isfinite(mb.route_backward(weights, x, weights, kept, **pairs)).all()


def test_the_bias_chooses_in_evaluation_too_and_no_forward_changes_it():
    """A bias that forward steps would move twice under recomputation, and stand still or be left out in eval mode."""
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import MoE

    torch.manual_seed(0)
    layer = MoE(8, 6, 16, 4, score="sigmoid", bias=True, return_routing=True)
    x = torch.randn(50, 8)
    unbiased = layer(x)[1].ids
    layer.bias.normal_()
    before = layer.bias.clone()
    trained, evaluated = layer.train()(x)[1].ids, layer.eval()(x)[1].ids
    assert torch.equal(trained, evaluated) and (trained != unbiased).any()
    assert torch.equal(layer.bias, before)
