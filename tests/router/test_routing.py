"""The router's options on the CPU, against routers as models write them, in torch, float64 and autograd."""

import functools

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from tests.cases import EMPTYING, assert_same_entropies, peaked_logits, relative_error, with_anything_in_empty_slots

torch = pytest.importorskip("torch")
F = torch.nn.functional
EXACT = 1e-12  # float64, sums of up to a few hundred terms


def top(scores, by, k):
    ids = by.topk(k, dim=1).indices
    return scores.gather(1, ids), ids


def divided(w, eps=0.0):
    return w / (w.sum(1, keepdim=True) + eps)


def without_groups(by, n, kept, rank, fill=-torch.inf):
    """`by` (L, E), `fill` outside of the groups whose sums of `rank` largest entries are the largest."""
    chosen = by.unflatten(1, (n, -1)).topk(rank, dim=2).values.sum(2).topk(kept, dim=1).indices
    mask = torch.zeros(len(by), n).scatter_(1, chosen, 1).bool()
    return by.masked_fill(~mask.repeat_interleave(by.shape[1] // n, dim=1), fill)


def mixtral(x, k, b):
    w, ids = top(x.softmax(1), x, k)
    return divided(w), ids


def gpt_oss(x, k, b):
    values, ids = x.topk(k, dim=1)
    return values.softmax(1), ids


def olmoe(x, k, b):
    return top(x.softmax(1), x, k)


def deepseek_v2(x, k, b):
    p = x.softmax(1)
    w, ids = top(p, without_groups(p, 4, 2, 1, fill=0.0), k)
    return 16 * w, ids


def mistral_4(x, k, b):
    p = x.softmax(1)
    w, ids = top(p, without_groups(p, 4, 2, 2, fill=0.0), k)
    return divided(w, 1e-20), ids


def deepseek_v3(x, k, b):
    s = x.sigmoid()
    w, ids = top(s, without_groups(s + b, 4, 2, 2), k)
    return 2.5 * divided(w, 1e-20), ids


def minimax_m2(x, k, b):
    s = x.sigmoid()
    w, ids = top(s, s + b, k)
    return divided(w), ids


def lfm2(x, k, b):
    s = x.sigmoid()
    w, ids = top(s, s + b, k)
    return 2 * divided(w, 1e-6), ids


def flint(x, k, b):
    w, ids = top(x.sigmoid(), x, k)
    return divided(w), ids


def llama_4(x, k, b):
    values, ids = x.topk(k, dim=1)
    return values.sigmoid(), ids


def kolibri(x, k, b):
    w, ids = top(x.sigmoid(), x + b, k)
    return divided(w), ids


def deepseek_v4(x, k, b):
    s = F.softplus(x, threshold=700).sqrt()
    w, ids = top(s, s + b, k)
    return 1.5 * divided(w, 1e-20), ids


def ernie(x, k, b):
    s = x.softmax(1)
    w, ids = top(s, s + b, k)
    return w / w.sum(1, keepdim=True).clamp(min=1e-12), ids


def longcat(x, k, b):
    s = x.softmax(1)
    w, ids = top(s, s + b, k)
    return 6 * w, ids


def deepseek_without_bias(x, k, b):
    """DeepSeek's own code of V3, where there is no bias: a group ranks by its largest score, and no eps is added."""
    s = x.sigmoid()
    w, ids = top(s, without_groups(s, 4, 2, 1), k)
    return 2.5 * divided(w), ids


def megatron_groups(x, k, b):
    """Megatron-Core and TransformerEngine: as many of a group's largest keys count as it has slots on average."""
    s = x.sigmoid()
    w, ids = top(s, without_groups(s + b, 4, 2, k // 2), k)
    return 2.5 * divided(w, 1e-20), ids


def megatron_pre_softmax(x, k, b):
    p = x.softmax(1)
    w, ids = top(p, without_groups(p, 4, 2, k // 2), k)
    return 2.5 * w, ids


def megatron_sqrt_softplus(x, k, b):
    s = F.softplus(x, threshold=700).sqrt()
    w, ids = top(s, without_groups(s + b, 4, 2, k // 2), k)
    return divided(w, 1e-20), ids


def torchtitan(x, k, b):
    p = x.softmax(1)
    w, ids = top(p, without_groups(p + b, 4, 2, 2), k)
    return 2.5 * w, ids


def identity(x, k, b):
    w, ids = top(x, x + b, k)
    return divided(w, 30.0), ids


def relu(x, k, b):
    w, ids = top(x.relu(), x, k)
    return divided(w, 1.0), ids


DEEPSEEK_V3 = {"score": "sigmoid", "groups": (4, 2, 2), "eps": 1e-20, "scale": 2.5}
# The options, whether there is a bias, and the model's own formula.
ROWS = {
    mixtral: ({}, False),
    gpt_oss: ({}, False),
    olmoe: ({"renormalize": False}, False),
    deepseek_v2: ({"renormalize": False, "groups": (4, 2, 1), "scale": 16}, False),
    mistral_4: ({"groups": (4, 2, 2), "eps": 1e-20}, False),
    deepseek_v3: (DEEPSEEK_V3, True),
    minimax_m2: ({"score": "sigmoid"}, True),
    lfm2: ({"score": "sigmoid", "eps": 1e-6, "scale": 2}, True),
    flint: ({"score": "sigmoid"}, False),
    llama_4: ({"score": "sigmoid", "renormalize": False}, False),
    kolibri: ({"score": "sigmoid", "bias_on": "logits"}, True),
    deepseek_v4: ({"score": "sqrt_softplus", "eps": 1e-20, "scale": 1.5}, True),
    ernie: ({}, True),
    longcat: ({"renormalize": False, "scale": 6}, True),
    deepseek_without_bias: ({"score": "sigmoid", "groups": (4, 2, 1), "scale": 2.5}, False),
    megatron_groups: (DEEPSEEK_V3 | {"groups": (4, 2, 3)}, True),
    megatron_pre_softmax: ({"renormalize": False, "groups": (4, 2, 3), "scale": 2.5}, False),
    megatron_sqrt_softplus: ({"score": "sqrt_softplus", "groups": (4, 2, 3), "eps": 1e-20}, True),
    torchtitan: ({"renormalize": False, "groups": (4, 2, 2), "scale": 2.5}, True),
    identity: ({"score": "identity", "eps": 30.0}, True),
    relu: ({"score": "relu", "eps": 1.0}, False),
}


def by_row(test, formulas=tuple(ROWS)):
    rows = [pytest.param(formula, *ROWS[formula], id=formula.__name__) for formula in formulas]
    return pytest.mark.parametrize(("formula", "options", "biased"), rows)(test)


def inputs(L=64, E=40, k=6, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((L, E)) * spread, rng.standard_normal(E) / 4, rng.standard_normal((L, k))


@pytest.mark.parametrize("spread", [1, 12])
@by_row
def test_every_router_of_the_table(formula, options, biased, spread):
    x, b, g = inputs(spread=spread)
    given = options | ({"bias": b} if biased else {})
    weights, ids = mb.route(x, 6, **given)
    leaf = torch.from_numpy(x).requires_grad_()
    want, want_ids = formula(leaf, 6, torch.from_numpy(b))
    np.testing.assert_array_equal(ids, want_ids)
    assert relative_error(weights, want.detach().numpy()) < EXACT
    (want,) = torch.autograd.grad(want, leaf, torch.from_numpy(g))
    # Not relative: torch's 1 - sigmoid of a large logit has few digits.
    np.testing.assert_allclose(mb.route_backward(g, x, weights, ids, **given), want.numpy(), rtol=0, atol=EXACT)


@by_row
def test_float32_against_float64(formula, options, biased):
    x, b, g = (array.astype(np.float32) for array in inputs())
    given = options | ({"bias": b} if biased else {})
    weights, ids = mb.route(x, 6, **given)
    exact = mb.route(x.astype(float), 6, **given)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(ids, exact[1])
    assert relative_error(weights, exact[0]) < 1e-6
    grad = mb.route_backward(g, x, weights, ids, **given)
    assert relative_error(grad, mb.route_backward(g.astype(float), x.astype(float), *exact, **given)) < 1e-6


@by_row
def test_given_ids_weigh_as_if_they_had_been_chosen(formula, options, biased):
    x, b, g = (array.astype(np.float32) for array in inputs())
    given = options | ({"bias": b} if biased else {})
    weights, ids = mb.route(x, 6, **given)
    for dtype in (np.int32, np.int64):
        again, same = mb.route(x, ids=ids.astype(dtype), **given)
        np.testing.assert_array_equal(same, ids)
        np.testing.assert_array_equal(again, weights)
    pairs = {"token_offsets": np.arange(0, 6 * 64 + 1, 6, dtype=np.int32)}
    again, same = mb.route(x, ids=ids.ravel(), **pairs, **given)
    np.testing.assert_array_equal(again, weights.ravel())
    want = mb.route_backward(g, x, weights, ids, **given)
    grad = mb.route_backward(g.ravel(), x, again, same, **pairs, **given)
    np.testing.assert_array_equal(grad, want)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "identity", "relu"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_given_ids_that_repeat_are_absent_or_are_unlikely(score, renormalize):
    """Gradients flow to the least likely experts too, as a replayed routing needs them to."""
    x, _, _ = inputs(4, 7)
    ids = np.array([[3, 3, 1], [-1, 6, 7], [5, -9, 100], [-1, -1, -1]])
    ids[0, 2] = x[0].argmin()
    g = np.random.default_rng(1).standard_normal(ids.shape)
    options = {"score": score, "renormalize": renormalize, "eps": 3.0}
    weights, chosen = mb.route(x, ids=ids, **options)
    present = (ids >= 0) & (ids < 7)
    np.testing.assert_array_equal(chosen, np.where(present, ids, -1))
    leaf, mask = torch.from_numpy(x).requires_grad_(), torch.from_numpy(present)
    at = torch.from_numpy(np.where(present, ids, 0))
    f = {
        "softmax": lambda t: t.softmax(1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda t: F.softplus(t).sqrt(),
        "identity": lambda t: t,
        "relu": torch.relu,
    }[score]
    want = f(leaf).gather(1, at) * mask
    if renormalize:
        total = want.sum(1, keepdim=True) + (0 if score == "softmax" else 3.0)
        want = want / torch.where(mask.any(1, keepdim=True), total, 1)
    (grad,) = torch.autograd.grad(want, leaf, torch.from_numpy(g))
    assert relative_error(weights, want.detach().numpy()) < EXACT
    got = mb.route_backward(with_anything_in_empty_slots(g, chosen), x, weights, chosen, **options)
    assert relative_error(got, grad.numpy()) < EXACT
    if not (score == "relu" and x[0, ids[0, 2]] <= 0):
        assert got[0, ids[0, 2]] != 0


@pytest.mark.parametrize("options", EMPTYING, ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_empty_slots_do_not_count(renormalize, options):
    """torch.special.entr of the weights, whose derivative at 0 is infinite, is finite there, and so is its gradient."""
    x, _, _ = inputs(9, 12, seed=5)
    options = options | {"renormalize": renormalize}
    weights, ids = mb.route(x, 4, **options)
    leaf, stays = torch.from_numpy(x).requires_grad_(), torch.from_numpy(ids >= 0)
    scores = leaf.sigmoid() if options.get("score") == "sigmoid" else leaf.softmax(1)
    values = scores.gather(1, torch.from_numpy(ids).long().clamp(min=0)) * stays
    if renormalize:
        values = values / torch.where(stays.any(1, keepdim=True), values.sum(1, keepdim=True), 1)
    (want,) = torch.autograd.grad(torch.special.entr(values[stays]).sum(), leaf)
    grad_weights = with_anything_in_empty_slots(-np.log(np.where(ids < 0, 1, weights)) - 1, ids)
    assert not np.isfinite(grad_weights).all()
    grad = mb.route_backward(grad_weights, x, weights, ids, **options)
    np.testing.assert_allclose(grad, want.numpy(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("offset", [0, 100, -1000])
def test_entropies_of_peaked_rows_keep_their_digits(offset):
    """As differences of numbers of the logits' size, entropies would have an error of that size."""
    x = peaked_logits(300, 24, offset)
    leaf = torch.from_numpy(x.astype(float)).requires_grad_()
    want = -(leaf.softmax(1) * leaf.log_softmax(1)).sum(1)
    (want_grad,) = torch.autograd.grad(want.sum(), leaf)
    weights, ids, sums = mb.route(x, 2, sums=("entropy",), sequences=300)
    grad = mb.route_backward(
        *(0 * weights, x, weights, ids), sums=("entropy",), sequences=300, grad_entropy_sums=np.ones(300, np.float32)
    )
    assert_same_entropies(sums.entropy_sums, grad, want.detach().numpy(), want_grad.numpy())


def sums_by_torch(x, names, owners, number):
    """Independent of the package: added row by row of a one-hot matrix."""
    member = F.one_hot(torch.from_numpy(owners) + 1, number + 1)[:, 1:].T.to(x.dtype)
    softplus = F.softplus(x).sqrt()
    shares = {"softmax": x.softmax(1), "sigmoid": divided(x.sigmoid()), "sqrt_softplus": divided(softplus)}
    (name,) = (name for name in names if name in shares)
    p = x.softmax(1)
    return member @ shares[name], member @ x.logsumexp(1) ** 2, member @ -(p * p.log()).sum(1)


OFFSETS = np.array([3, 3, 20, 49, 60], np.int32)  # an empty sequence; tokens before the first and behind the last


@pytest.mark.parametrize("sequences", [1, 4, OFFSETS], ids=["one", "four", "offsets"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", ["softmax", "sigmoid", "sqrt_softplus"])
@functools.partial(by_row, formulas=(olmoe, deepseek_v3, deepseek_v4))
def test_sums_and_their_gradients(formula, options, biased, share, masked, sequences):
    x, b, g = inputs(seed=2)
    rng = np.random.default_rng(3)
    number = sequences if isinstance(sequences, int) else len(sequences) - 1
    owners = np.arange(64) // (64 // number)
    if not isinstance(sequences, int):
        owners = np.array([next((i for i in range(4) if OFFSETS[i] <= t < OFFSETS[i + 1]), -1) for t in range(64)])
    mask = rng.random(64) < 0.7
    given = options | {"sums": (share, "z", "entropy"), "sequences": sequences} | ({"bias": b} if biased else {})
    if masked:
        given["token_mask"] = mask
        owners = np.where(mask, owners, -1)
    weights, ids, sums = mb.route(x, 6, **given)
    leaf = torch.from_numpy(x).requires_grad_()
    want = sums_by_torch(leaf, given["sums"], owners, number)
    for got, expected in zip(sums, want, strict=True):
        assert relative_error(got, expected.detach().numpy()) < EXACT
    want_weights, _ = formula(leaf, 6, torch.from_numpy(b))
    if masked:
        want_weights = want_weights * torch.from_numpy(mask)[:, None]
        assert (ids[~mask] == -1).all() and not weights[~mask].any()
    grads = [rng.standard_normal(s.shape) for s in sums]
    (want,) = torch.autograd.grad((want_weights, *want), leaf, [torch.from_numpy(a) for a in (g, *grads)])
    names = ("grad_score_sums", "grad_z_sums", "grad_entropy_sums")
    got = mb.route_backward(g, x, weights, ids, **given, **dict(zip(names, grads, strict=True)))
    assert relative_error(got, want.numpy()) < EXACT
    for name, grad in zip(names, grads, strict=True):  # each alone
        alone = mb.route_backward(0 * g, x, weights, ids, **given, **{name: grad})
        (want,) = torch.autograd.grad(
            sums_by_torch(leaf, given["sums"], owners, number)[names.index(name)], leaf, torch.from_numpy(grad)
        )
        assert relative_error(alone, want.numpy()) < EXACT


def test_sums_that_are_not_asked_for_are_none():
    sums = mb.route(inputs()[0], 2, sums=("z",))[2]
    assert isinstance(sums, mb.RouterSums)
    assert sums.score_sums is None and sums.entropy_sums is None and sums.z_sums.shape == (1,)
    assert len(mb.route(inputs()[0], 2)) == 2


def test_groups_rank_by_the_largest_or_by_the_sum_of_two():
    s = np.array([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1]])
    x = np.log(s / (1 - s))
    for rank, want in ((1, [[0, 1]]), (2, [[3, 4]])):
        ids = mb.route(x, 2, score="sigmoid", bias=np.zeros(6), groups=(2, 1, rank))[1]
        np.testing.assert_array_equal(np.sort(ids), want)


def test_bias_on_logits_and_on_scores_choose_differently():
    x, bias = np.array([[6.0, 5.0, 0.0]]), np.array([0.0, 0.0, 0.6])
    assert mb.route(x, 1, score="sigmoid", bias=bias)[1] == 2
    assert mb.route(x, 1, score="sigmoid", bias=bias, bias_on="logits")[1] == 0


def test_a_bias_per_token():
    x = np.zeros((2, 3))
    np.testing.assert_array_equal(mb.route(x, 1, bias=np.array([[0.0, 1, 0], [0, 0, 1]]))[1], [[1], [2]])
    forbidden = np.array([[-np.inf, 0, 0], [0, -np.inf, 0]])
    np.testing.assert_array_equal(mb.route(x, 2, bias=forbidden)[1], [[1, 2], [0, 2]])


def test_eps_and_scale_are_where_they_belong():
    x = np.full((1, 4), -50.0)
    s = np.exp(-50.0) / (1 + np.exp(-50.0))
    for eps in (0.0, 1e-20, 1e-6):
        weights = mb.route(x, 4, score="sigmoid", eps=eps, scale=2.5)[0]
        assert relative_error(weights, np.full((1, 4), 2.5 * s / (4 * s + eps))) < EXACT
    x = np.full((1, 2), -800.0)
    assert np.isnan(mb.route(x, 2, score="sigmoid")[0]).all()
    assert not mb.route(x, 2, score="sigmoid", eps=1e-20)[0].any()


def test_gradients_far_from_zero_are_the_limits():
    """Where torch's sqrt(softplus) gives NaN, and 1 - sigmoid 0."""
    x = np.array([[-130.0, -110, 30, 25]], np.float32)
    ids, g = np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32)
    options = {"score": "sqrt_softplus", "renormalize": False}
    weights, _ = mb.route(x, ids=ids, **options)
    grad = mb.route_backward(g, x, weights, ids, **options)
    assert relative_error(weights, np.exp(x[:, :2].astype(float) / 2)) < 1e-6
    assert relative_error(grad[:, :2], np.exp(x[:, :2].astype(float) / 2) / 2) < 1e-6
    ids, options = np.array([[2, 3]], np.int32), {"score": "sigmoid", "renormalize": False}
    grad = mb.route_backward(g, x, mb.route(x, ids=ids, **options)[0], ids, **options)
    assert relative_error(grad[:, 2:], np.exp(-x[:, 2:].astype(float))) < 1e-6


def test_one_slot_is_renormalised_on_demand_alone():
    x, g = np.array([[1.0, 2.0]]), np.ones((1, 1))
    weights, ids = mb.route(x, 1, score="sigmoid")
    assert weights == 1 / (1 + np.exp(-2.0))
    weights, ids = mb.route(x, 1, score="sigmoid", renormalize=True)
    assert weights == 1 and not mb.route_backward(g, x, weights, ids, score="sigmoid", renormalize=True).any()


def test_top_p_and_threshold_empty_the_last_slots():
    p = np.array([[0.5, 0.3, 0.15, 0.05]])
    x = np.log(p)
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.81, 3), (2, 4)):
        weights, ids = mb.route(x, 4, top_p=top_p)
        np.testing.assert_array_equal(ids, [[*range(kept), *[-1] * (4 - kept)]])
        assert relative_error(weights[:, :kept], p[:, :kept] / p[:, :kept].sum()) < EXACT
        assert not weights[:, kept:].any()
    assert mb.route(x, 4, threshold=0.1)[1].tolist() == [[0, 1, 2, -1]]
    assert mb.route(x, 4, threshold=0.1, renormalize=False)[0].tolist()[0][3] == 0
    assert mb.route(x, 4, threshold=0.1, bias=np.array([0, 0, 0, 0.1]))[1].tolist() == [[0, 1, 2, 3]]
    assert mb.route(np.array([[1.0, -1, 0, 2]]), 4, score="relu", threshold=1e-300)[1].tolist() == [[3, 0, -1, -1]]


def test_renormalising_after_dropping():
    x, _, _ = inputs(5, 8)
    _, ids = mb.route(x, 3)
    ids[2, 0] = ids[3] = -1
    weights, kept = mb.route(x, ids=ids)
    np.testing.assert_array_equal(kept, ids)
    np.testing.assert_allclose(weights.sum(1), [1, 1, 1, 0, 1])


def test_ragged_pairs():
    x, _, _ = inputs(4, 6)
    ids = np.array([9, 1, 2, 3, 5, 0, 1, 2, 3, 4, 5, 4, 4], np.int32)
    offsets = np.array([1, 3, 3, 4, 11], np.int32)  # a token without pairs, one with all experts, pairs of no token
    weights, kept = mb.route(x, ids=ids, token_offsets=offsets, score="sigmoid")
    np.testing.assert_array_equal(kept, [-1, *ids[1:11], -1, -1])
    for t in range(4):
        mine = slice(offsets[t], offsets[t + 1])
        s = 1 / (1 + np.exp(-x[t, ids[mine]]))
        np.testing.assert_allclose(weights[mine], s / s.sum(), rtol=1e-12)
    assert not weights[0] and not weights[11:].any()
    garbage = np.array([-5, 100, 3, 2**31 - 1, -(2**31)], np.int32)
    assert mb.route(x, ids=ids, token_offsets=garbage)[0].shape == ids.shape


def test_special_values():
    nan, inf = np.nan, np.inf
    x = np.array([[1, nan, 2], [-inf, -inf, -inf], [inf, 0, 1]])
    weights, ids = mb.route(x, 2, score="sigmoid", renormalize=False, sums=("softmax", "z"), sequences=3)[:2]
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1], [0, 2]])
    assert np.isnan(weights[0]).tolist() == [True, False] and weights[2, 0] == 1
    sums = mb.route(np.vstack([x[:1], np.ones((2, 3))]), 2, sums=("softmax", "z"), sequences=3)[2]
    assert np.isnan(sums.score_sums).all(axis=1).tolist() == [True, False, False]
    assert np.isnan(sums.z_sums).tolist() == [True, False, False]
    assert not mb.route(x[1:2], 2, score="sqrt_softplus", eps=1e-20)[0].any()
    assert np.isnan(mb.route(x[1:2], 2)[0]).all()


def test_the_reference_alone_takes_the_defaults_of_the_package():
    x = inputs()[0]
    np.testing.assert_array_equal(reference.route(x, 3)[0], mb.route(x, 3)[0])
