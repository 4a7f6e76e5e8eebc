"""Capacity, expert choice, token rounding, lists of pairs and counts, on the CPU, against loops over their definitions.

tests/selection/test_device_code_selection.py compares the kernels with the functions tested here.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb

ROUNDINGS = ("up", "down", "nearest", "balance")


def rank(value):
    """To sort by: largest first, NaN before all, -0 as +0."""
    return (0, 0.0) if np.isnan(value) else (1, -float(value))


def pairs_of(token_offsets, ids):
    assert token_offsets.dtype == ids.dtype == np.int32 and token_offsets[0] == 0
    assert (ids[token_offsets[-1] :] == -1).all()
    found = [list(ids[a:b]) for a, b in itertools.pairwise(token_offsets)]
    assert all(experts == sorted(set(experts)) for experts in found)
    return {(t, int(e)) for t, experts in enumerate(found) for e in experts}


def kept_by_definition(ids, E, capacity, order, values, length):
    """A list per expert and sequence in the order in which slots stay, cut off at the capacity."""
    L, k = ids.shape
    kept = np.full((L, k), -1)
    for begin in range(0, L, length):
        for expert in range(E):
            slots = [(t, j) for t in range(begin, begin + length) for j in range(k) if ids[t, j] == expert]
            by = {
                "position": lambda t, j: 0,
                "choice": lambda t, j: j,
                "weights": lambda t, j: rank(values[t, j]),
                "priority": lambda t, j: rank(values[t]),
            }[order]
            for t, j in sorted(slots, key=lambda slot: (by(*slot), slot))[:capacity]:
                kept[t, j] = expert
    return kept


@settings(max_examples=80)
@given(st.data())
def test_limit_capacity_keeps_the_first_of_each_expert(data):
    L, k, E = (data.draw(st.integers(1, n)) for n in (24, 4, 6))
    S = data.draw(st.sampled_from([s for s in range(1, L + 1) if L % s == 0]))
    capacity, order = (
        data.draw(st.integers(0, 12)),
        data.draw(st.sampled_from(("position", "choice", "weights", "priority"))),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ids = rng.integers(-1, E + 1, (L, k)).astype(rng.choice([np.int32, np.int64]))
    special = [0.0, -0.0, 0.5, 0.25, np.nan, np.inf, np.finfo(np.float32).max, 1e-42]
    values = rng.choice(np.array(special, np.float32), (L, k) if order == "weights" else L)
    options = {order: values} if order in ("weights", "priority") else {}
    kept = mb.limit_capacity(ids, E, capacity, order=order, sequences=S, **options)
    np.testing.assert_array_equal(kept, kept_by_definition(ids, E, capacity, order, values, L // S))
    offsets = np.arange(S + 1, dtype=np.int32) * (L // S)
    np.testing.assert_array_equal(mb.limit_capacity(ids, E, capacity, order=order, sequences=offsets, **options), kept)


def test_capacity_of_each_sequence_is_not_that_of_the_batch():
    """As transformers' Switch counts per row of the batch."""
    ids = np.random.default_rng(0).integers(0, 4, (120, 1)).astype(np.int32)
    whole, each = (mb.limit_capacity(ids, 4, 30 // s, sequences=s) for s in (1, 6))
    counts = mb.tokens_per_expert(each, 4, sequences=6)
    assert counts.max() == 5 and (mb.tokens_per_expert(whole, 4) <= 30).all()
    assert (whole != each).any()


def test_position_keeps_the_first_in_position():
    """Not any of those that tie, which top-k of a mask would keep."""
    ids = np.zeros((1000, 1), np.int32)
    kept = mb.limit_capacity(ids, 3, 955)
    assert (kept[:955] == 0).all() and (kept[955:] == -1).all()


@pytest.mark.parametrize("order", ["position", "choice", "weights", "priority"])
def test_number_of_slots_that_stay(order):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 7, (300, 3)).astype(np.int32)
    values = {"weights": rng.random((300, 3)), "priority": rng.random(300)}
    options = {order: values[order]} if order in values else {}
    counts = mb.tokens_per_expert(ids, 7)
    for capacity in (0, 1, 60, 130, 10**9):
        kept = mb.limit_capacity(ids, 7, capacity, order=order, **options)
        np.testing.assert_array_equal(mb.tokens_per_expert(kept, 7), np.minimum(counts, capacity))
        assert ((kept == ids) | (kept == -1)).all()


def test_weights_of_dropped_slots_have_no_gradient():
    """A dropped slot is an empty one for the layer."""
    rng = np.random.default_rng(2)
    ids = mb.limit_capacity(rng.integers(0, 4, (20, 2)).astype(np.int32), 4, 5)
    x, w1, w2 = rng.standard_normal((20, 6)), rng.standard_normal((4, 6, 8)), rng.standard_normal((4, 4, 6))
    _, saved = mb.moe_forward(x, ids, rng.random((20, 2)), w1, w2)
    grads = mb.moe_backward(rng.standard_normal((20, 6)), saved)
    assert (ids == -1).sum() == 20 and not grads.weights[ids == -1].any() and grads.weights[ids >= 0].all()


def choice_by_definition(scores, capacity, length):
    L, E = scores.shape
    found = set()
    for begin in range(0, L, length):
        for e in range(E):
            tokens = sorted(range(begin, begin + length), key=lambda t: (rank(scores[t, e]), t))
            found |= {(t, e) for t in tokens[:capacity]}
    return found


@settings(max_examples=60)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 25), st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_expert_choice_takes_the_largest_scores(L, E, capacity, seed, S):
    L *= S
    scores = np.random.default_rng(seed).choice([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 3e38], (L, E))
    scores = scores.astype(np.float32)
    found = mb.expert_choice(scores, capacity, sequences=S)
    assert pairs_of(*found) == choice_by_definition(scores, capacity, L // S)
    assert found[1].size == found[0][-1] == S * E * min(capacity, L // S)
    offsets = np.arange(S + 1, dtype=np.int32) * (L // S)
    by_offsets = mb.expert_choice(scores, capacity, sequences=offsets)
    assert pairs_of(*by_offsets) == pairs_of(*found)
    assert by_offsets[1].size == E * min(S * capacity, L)


def target_by_definition(frequencies, L, tile, rounding):
    targets, z = [], 0
    for f in frequencies:
        down, up = f // tile * tile, min(-(-f // tile) * tile, L)
        to = {"up": up, "down": down}.get(rounding)
        if rounding == "nearest":  # by the distance to whole tiles, also where there are fewer tokens than that
            to = up if -(-f // tile) * tile - f < f - down else down
        elif rounding == "balance":
            to = up if abs(z + up - f) < abs(z + down - f) else down
            z += to - f
        targets.append(to)
    return targets


@settings(max_examples=80)
@given(
    st.integers(1, 30), st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.sampled_from(ROUNDINGS),
    st.integers(0, 99),
)  # fmt: skip
def test_round_tokens_keeps_those_that_chose_and_adds_the_largest_scores(L, E, k, tile, rounding, seed):
    rng = np.random.default_rng(seed)
    scores = rng.choice(np.array([0.0, 0.25, 0.5, 1.0, np.nan, -np.inf], np.float32), (L, E))
    ids = rng.integers(-1, E + 1, (L, k))
    chosen = [[e in ids[t] for e in range(E)] for t in range(L)]
    frequencies = [sum(row[e] for row in chosen) for e in range(E)]
    want = set()
    for e, n in enumerate(target_by_definition(frequencies, L, tile, rounding)):
        tokens = sorted(range(L), key=lambda t: (not chosen[t][e], rank(scores[t, e]), t))
        want |= {(t, e) for t in tokens[:n]}
    found = mb.round_tokens(scores, ids, tile=tile, rounding=rounding)
    assert pairs_of(*found) == want
    changes = [n - f for f, n in zip(frequencies, target_by_definition(frequencies, L, tile, rounding), strict=True)]
    assert rounding != "balance" or abs(sum(changes)) <= tile / 2
    assert len(want) <= found[1].size <= L * E


@pytest.fixture
def routed():
    """Scores, ids and weights of a top-8 router over 64 experts, as in SonicMoE's token rounding."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((2048, 64))
    ids = np.argsort(-logits, axis=1)[:, :8].astype(np.int32)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    weights = np.take_along_axis(scores, ids, axis=1)
    return scores.astype(np.float32), ids, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_counts_are_multiples_of_the_tile(routed, rounding):
    scores, ids, _ = routed
    counts = np.bincount([e for _, e in pairs_of(*mb.round_tokens(scores, ids, rounding=rounding))], minlength=64)
    before = mb.tokens_per_expert(ids, 64)[0]
    assert (counts % 128 == 0).all() and (np.abs(counts - before) < 128).all()
    if rounding == "balance":
        assert abs(counts.sum() - before.sum()) <= 64
    if rounding == "nearest":
        assert (np.abs(counts - before) <= 64).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_tiles_of_one_token_are_the_routers_choice(routed, rounding):
    scores, ids, _ = routed
    assert pairs_of(*mb.round_tokens(scores, ids, tile=1, rounding=rounding)) == {
        (t, int(e)) for t, row in enumerate(ids) for e in row
    }


def test_added_tokens_rank_by_scores_in_full_precision(routed):
    """Scores less 1 in bfloat16 have few values, so that most of the added tokens would be arbitrary."""
    import ml_dtypes

    scores, ids, weights = routed
    combined = scores.copy()
    np.put_along_axis(combined, ids, weights, axis=1)  # chosen ones rank by their normalised weights
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, ids, True, axis=1)
    found = pairs_of(*mb.round_tokens(combined, ids, rounding="up"))
    lost = pairs_of(
        *mb.round_tokens(np.where(chosen, combined, (combined - 1).astype(ml_dtypes.bfloat16)), ids, rounding="up")
    )
    assert len(found) == len(lost) and len(found - lost) > 0.01 * len(found)
    counts = np.bincount([e for _, e in found], minlength=64)
    for e in range(64):
        added = [scores[t, e] for t in range(2048) if (t, e) in found and not chosen[t, e]]
        left = scores[:, e][~chosen[:, e] & ~np.isin(np.arange(2048), [t for t, f in found if f == e])]
        assert not added or min(added) >= left.max()
        assert counts[e] == len(added) + chosen[:, e].sum()


def test_half_a_tile_goes_down():
    """Rounding half to even would give 0, 2 and 2 tiles of 2."""
    ids = np.full((5, 3), -1)
    ids[:1, 0], ids[:3, 1], ids[:5, 2] = 0, 1, 2
    token_offsets, found = mb.round_tokens(np.ones((5, 3), np.float32), ids, tile=2, rounding="nearest")
    assert np.bincount(found[: token_offsets[-1]], minlength=3).tolist() == [0, 2, 4]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_list_pairs_keeps_the_first_by_token(dtype):
    rng = np.random.default_rng(4)
    mask = (rng.random((40, 9)) < 0.4).astype(dtype) * dtype(7)
    every = [(t, e) for t in range(40) for e in range(9) if mask[t, e]]
    for room in (0, 1, 17, len(every), 400):
        token_offsets, ids = mb.list_pairs(mask, room)
        assert ids.size == room and sorted(pairs_of(token_offsets, ids)) == every[:room]


def test_tokens_per_expert_of_sequences_and_first_choices():
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, 6, (24, 3))
    counts = mb.tokens_per_expert(ids, 5)
    assert counts.shape == (1, 5) and counts.dtype == np.int32
    assert counts[0].tolist() == [(ids == e).sum() for e in range(5)]
    by_sequence = mb.tokens_per_expert(ids, 5, sequences=4)
    assert by_sequence.shape == (4, 5) and (by_sequence.sum(axis=0) == counts[0]).all()
    assert mb.tokens_per_expert(ids[:, :1], 5)[0].tolist() == [(ids[:, 0] == e).sum() for e in range(5)]
    offsets = np.array([0, 0, 7, 24], np.int32)
    assert (mb.tokens_per_expert(ids, 5, sequences=offsets)[2] == mb.tokens_per_expert(ids[7:], 5)[0]).all()


SCORES = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrt_softplus": lambda x: np.sqrt(np.log(1 + np.exp(x))),
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("score", SCORES)
def test_quantile_histogram_counts_what_the_next_bias_would_have_to_be(score):
    rng = np.random.default_rng(6)
    L, E, k, bins = 200, 12, 3, 64
    logits, bias = rng.standard_normal((L, E)), (0.2 * rng.standard_normal(E)).astype(np.float32)
    scores = np.array([SCORES[score](row) for row in logits])
    ids = np.argsort(-(scores + bias), axis=1)[:, :k].copy()
    bounds = np.array([bias.min() - 1, bias.max() + 1], np.float32)
    histogram = np.full((E, bins), 5, np.int32)
    mb.quantile_histogram(logits, ids, bias, histogram, bounds, score=score)
    line = np.sort(scores + bias, axis=1)[:, -k - 1]  # the (k+1)-th largest
    edges = np.linspace(*bounds.astype(np.float64), bins + 1)
    edges[0], edges[-1] = -np.inf, np.inf
    want = np.array([np.histogram(line - scores[:, e], edges)[0] for e in range(E)])
    np.testing.assert_array_equal(histogram - 5, want)


def test_quantile_balancing_evens_out_the_load():
    rng = np.random.default_rng(7)
    L, E, k, bins = 4096, 32, 4, 1000
    logits, bias = rng.standard_normal((L, E)) + rng.standard_normal(E), np.zeros(E, np.float32)

    def choose():
        return np.argsort(-(1 / (1 + np.exp(-logits)) + bias), axis=1)[:, :k].copy()

    def violation():
        counts = mb.tokens_per_expert(choose(), E)[0]
        return counts.max() / counts.mean() - 1

    before = violation()
    histogram, bounds = np.zeros((E, bins), np.int32), np.array([bias.min() - 1, bias.max() + 1], np.float32)
    mb.quantile_histogram(logits, choose(), bias, histogram, bounds)
    place = (np.cumsum(histogram, axis=1) < k / E * L).sum(axis=1)
    bias = (bounds[0] + (bounds[1] - bounds[0]) * (place + 0.5) / bins).astype(np.float32)
    assert before > 1 and violation() < 0.3


def test_tokens_outside_of_all_sequences_have_no_pairs():
    rng = np.random.default_rng(8)
    ids, scores = rng.integers(0, 3, (20, 2)).astype(np.int32), rng.random((20, 3)).astype(np.float32)
    offsets = np.array([2, 9, 15], np.int32)
    assert mb.tokens_per_expert(ids, 3, sequences=offsets).sum() == 2 * 13
    kept = mb.limit_capacity(ids, 3, 100, sequences=offsets)
    np.testing.assert_array_equal(kept[2:15], ids[2:15])
    assert (kept[:2] == -1).all() and (kept[15:] == -1).all()
    assert {t for t, _ in pairs_of(*mb.expert_choice(scores, 100, sequences=offsets))} == set(range(2, 15))


def test_no_tokens():
    ids, scores = np.zeros((0, 2), np.int32), np.zeros((0, 5), np.float32)
    assert mb.tokens_per_expert(ids, 5, sequences=3).tolist() == [[0] * 5] * 3
    assert mb.limit_capacity(ids, 5, 3).shape == (0, 2)
    assert mb.limit_capacity(ids, 5, 3, order="weights", weights=np.zeros((0, 2))).shape == (0, 2)
    for found in (mb.expert_choice(scores, 3), mb.round_tokens(scores, ids), mb.list_pairs(scores > 0, 0)):
        assert [a.tolist() for a in found] == [[0], []]
    assert mb.list_pairs(scores > 0, 2)[1].tolist() == [-1, -1]


IDS, F32 = np.zeros((6, 2), np.int32), np.float32
SCORES_6 = np.zeros((6, 4), F32)
WRONG = {
    "tokens_per_expert ids": (lambda: mb.tokens_per_expert(IDS[0], 4), ValueError, "ids: expected shape"),
    "tokens_per_expert dtype": (lambda: mb.tokens_per_expert(SCORES_6, 4), TypeError, "ids: expected dtype"),
    "tokens_per_expert strides": (lambda: mb.tokens_per_expert(IDS.T.copy().T, 4), ValueError, "consecutive"),
    "tokens_per_expert experts": (lambda: mb.tokens_per_expert(IDS, 4097), ValueError, "num_experts.*4096.*4097"),
    "sequences": (lambda: mb.tokens_per_expert(IDS, 4, sequences=4), ValueError, "sequences.*divides L = 6.*4"),
    "sequences 0": (lambda: mb.limit_capacity(IDS, 4, 1, sequences=0), ValueError, "sequences"),
    "sequences float": (lambda: mb.limit_capacity(IDS, 4, 1, sequences=1.5), TypeError, "sequences: expected an int"),
    "sequences int64": (
        lambda: mb.expert_choice(SCORES_6, 1, sequences=np.array([0, 6])), TypeError, "sequences: expected dtype int32",
    ),
    "sequences shape": (
        lambda: mb.expert_choice(SCORES_6, 1, sequences=np.zeros((1, 2), np.int32)), ValueError, "sequences: expected",
    ),
    "limit_capacity capacity": (lambda: mb.limit_capacity(IDS, 4, -1), ValueError, "capacity: expected 0 or more.*-1"),
    "limit_capacity float": (lambda: mb.limit_capacity(IDS, 4, 1.5), TypeError, "capacity: expected an int"),
    "limit_capacity order": (lambda: mb.limit_capacity(IDS, 4, 1, order="last"), ValueError, "order: expected one"),
    "limit_capacity list": (lambda: mb.limit_capacity(IDS, 4, 1, order=["choice"]), ValueError, "order: expected one"),
    "limit_capacity weights": (lambda: mb.limit_capacity(IDS, 4, 1, order="weights"), ValueError, "weights: expect"),
    "limit_capacity more": (
        lambda: mb.limit_capacity(IDS, 4, 1, weights=np.zeros((6, 2), F32)), ValueError, "weights: expected None",
    ),
    "limit_capacity shape": (
        lambda: mb.limit_capacity(IDS, 4, 1, order="priority", priority=np.zeros(5, F32)), ValueError, "priority.*shap",
    ),
    "limit_capacity dtype": (
        lambda: mb.limit_capacity(IDS, 4, 1, order="priority", priority=np.zeros(6, int)), TypeError, "priority.*dtype",
    ),
    "expert_choice capacity": (lambda: mb.expert_choice(SCORES_6, -2), ValueError, "capacity: expected 0 or more.*-2"),
    "expert_choice dtype": (lambda: mb.expert_choice(IDS, 2), TypeError, "scores: expected dtype"),
    "expert_choice shape": (lambda: mb.expert_choice(SCORES_6[0], 2), ValueError, "scores: expected shape"),
    "expert_choice order": (lambda: mb.expert_choice(SCORES_6.T, 2), ValueError, "scores: expected a C-contiguous"),
    "expert_choice experts": (lambda: mb.expert_choice(np.zeros((0, 4097), F32), 2), ValueError, "scores.*4096"),
    "round_tokens ids": (lambda: mb.round_tokens(SCORES_6, IDS[:5]), ValueError, "ids: expected shape"),
    "round_tokens tile": (lambda: mb.round_tokens(SCORES_6, IDS, tile=0), ValueError, "tile: expected 1 to"),
    "round_tokens rounding": (lambda: mb.round_tokens(SCORES_6, IDS, rounding="nr"), ValueError, "rounding.*one of"),
    "list_pairs dtype": (lambda: mb.list_pairs(IDS, 2), TypeError, "mask: expected dtype bool or uint8"),
    "list_pairs room": (lambda: mb.list_pairs(SCORES_6 > 0, -1), ValueError, "num_pairs: expected 0 to"),
    "list_pairs large": (lambda: mb.list_pairs(SCORES_6 > 0, 2**31), ValueError, "num_pairs: expected 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_errors_that_name_them(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith(tuple(f"{f}: " for f in mb.__all__))


def test_quantile_histogram_refuses_what_it_cannot_write_or_compare():
    logits, ids, bias, bounds = SCORES_6, IDS, np.zeros(4, F32), np.zeros(2, F32)
    histogram = np.zeros((4, 8), np.int32)
    frozen = histogram.copy()
    frozen.flags.writeable = False
    wrong = {
        "histogram: expected an array that can be written": {"histogram": frozen},
        "histogram: expected a NumPy": {"histogram": [[0]]},
        "histogram: expected dtype int32": {"histogram": histogram.astype(np.int64)},
        r"histogram: expected shape \(E, bins\)": {"histogram": histogram[:3]},
        "histogram: expected 1 to 8192 bins": {"histogram": np.zeros((4, 8193), np.int32)},
        "histogram: expected memory apart from ids": {"histogram": IDS.reshape(-1)[:8].reshape(4, 2)},
        "ids: expected fewer slots than the E = 4": {"ids": np.zeros((6, 4), np.int32)},
        "bias: expected shape": {"bias": np.zeros(5, F32)},
        "bias: expected dtype float32": {"bias": np.zeros(4)},
        "bounds: expected shape": {"bounds": np.zeros(3, F32)},
        "score: expected one of": {"score": "tanh"},
    }
    for message, replaced in wrong.items():
        given_ = {"logits": logits, "ids": ids, "bias": bias, "histogram": histogram, "bounds": bounds} | replaced
        with pytest.raises((TypeError, ValueError), match=f"quantile_histogram: {message}"):
            mb.quantile_histogram(**given_)


def test_tensors_that_require_gradients_are_read_as_they_are():
    """Integers have no gradient, so none is lost."""
    torch = pytest.importorskip("torch")
    logits = torch.randn(64, 8, requires_grad=True)
    scores = logits.softmax(dim=1)
    weights, ids = scores.topk(2, dim=1)
    counts = mb.tokens_per_expert(ids, 8)
    assert type(counts) is torch.Tensor and counts.dtype == torch.int32 and counts.sum() == 128
    kept = mb.limit_capacity(ids, 8, 10, order="weights", weights=weights)
    token_offsets, chosen = mb.expert_choice(scores, 16)
    rounded = mb.round_tokens(scores, ids, tile=8)
    histogram = torch.zeros(8, 10, dtype=torch.int32)
    mb.quantile_histogram(logits, ids, torch.zeros(8), histogram, torch.tensor([-1.0, 1.0]), score="softmax")
    listed = mb.list_pairs(logits > 0, 512)
    for result in (kept, token_offsets, chosen, *rounded, *listed):
        assert type(result) is torch.Tensor and result.dtype == torch.int32 and not result.requires_grad
    assert (histogram.sum(dim=1) == 64).all() and int(listed[0][-1]) == int((logits > 0).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits.detach(), torch.ones(64, 8))
        with pytest.raises(RuntimeError, match="expert_choice: scores"):
            mb.expert_choice(dual, 4)
