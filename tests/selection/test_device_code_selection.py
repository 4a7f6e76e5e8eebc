"""Selections of pairs, and counts, on the CPU emulator against the NumPy reference: equal in every element."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from tests.layer.test_device_code import DEEP_STAGES, DTYPES, emulated

SMALL = DeviceLimits(89, 3, 101376, 102400)  # a digit has 10 bits
LARGE = DeviceLimits(89, 128, 101376, 102400)  # parts have fewer tokens
IDS = {"int32": np.int32, "int64": np.int64}


@pytest.fixture
def device():
    with emulated() as found:
        yield found


def run(device, function, *given, **options):
    """The function's results on the device and by the reference, as tuples of NumPy arrays."""

    def on_device(value):
        return device.put(value) if isinstance(value, np.ndarray) else value

    got = getattr(mb, function)(*map(on_device, given), **{name: on_device(v) for name, v in options.items()})
    device.synchronize()
    want = getattr(reference, function)(*given, **options)
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    return tuple(np.array(value) for value in got), want


def assert_equal(device, function, *given, **options):
    got, want = run(device, function, *given, **options)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, other, strict=True)
    return got


def scores_of(kind, L, E, dtype, rng):
    if kind == "normal":
        return rng.standard_normal((L, E)).astype(dtype)
    if kind == "ties":
        return rng.integers(-2, 2, (L, E)).astype(dtype)
    if kind == "constant":
        return np.full((L, E), 0.25, dtype)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], np.float32)
    return rng.choice(special, (L, E)).astype(dtype)


KINDS = ("normal", "ties", "constant", "special")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_expert_choice(device, kind, dtype):
    scores = scores_of(kind, 700, 37, DTYPES[dtype], np.random.default_rng(0))
    assert_equal(device, "expert_choice", scores, 90)


@pytest.mark.parametrize("capacity", [0, 1, 3, 512, 513, 2**40])
def test_expert_choice_from_none_to_all(device, capacity):
    for kind in ("ties", "special"):
        scores = scores_of(kind, 513, 3, np.float32, np.random.default_rng(1))
        assert_equal(device, "expert_choice", scores, capacity)


@pytest.mark.parametrize("kind", ["normal", "constant"])
@pytest.mark.parametrize("L", [3000, 6000])
def test_expert_choice_among_candidates_without_room_in_the_list(device, L, kind):
    """Scores that begin with the same bits. A block's shared memory holds about 4,200 of them."""
    scores = scores_of(kind, L, 2, np.float32, np.random.default_rng(4)) / 1e3 + 1
    assert_equal(device, "expert_choice", scores.astype(np.float32), 1250)


@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_expert_choice_among_listed_candidates_that_shared_memory_does_not_hold(kind):
    """One column of 64 with 5,000 candidates, where an eighth of all scores have room in the list."""
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((5000, 64)).astype(np.float32) * 100
    scores[:, 33] = scores_of(kind, 5000, 1, np.float32, rng)[:, 0] / 1e3 + 1
    with emulated(LARGE) as large:
        assert_equal(large, "expert_choice", scores, 20)


@pytest.mark.parametrize("alike", [0, 1000, 3000])
def test_expert_choice_in_parts_of_many_tokens(alike):
    """Blocks pass candidates on after every 2,048 tokens. Of more than 383 in a column they lose the others."""
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((7000, 16)).astype(np.float32)
    scores[1500 : 1500 + alike, 3] = 1 + rng.random(alike, dtype=np.float32) / 4
    with emulated(SMALL) as small:
        assert_equal(small, "expert_choice", scores, 900)


OFFSETS = np.array([0, 5, 5, 130, 301], np.int32)
APART = np.array([7, 20, 260], np.int32)  # tokens on either side are in no sequence


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("sequences", [7, 301, OFFSETS, APART], ids=["7", "each", "offsets", "apart"])
def test_expert_choice_in_sequences(device, sequences, kind):
    scores = scores_of(kind, 301, 40, np.float32, np.random.default_rng(2))
    assert_equal(device, "expert_choice", scores, 6, sequences=sequences)


@pytest.mark.parametrize("seed", [0, 1])
def test_expert_choice_where_blocks_have_less_shared_memory(seed):
    with emulated(SMALL, seed=seed) as small:
        scores = scores_of("ties", 900, 70, np.float32, np.random.default_rng(3))
        scores[::3] += np.random.default_rng(4).standard_normal(scores[::3].shape).astype(np.float32)
        assert_equal(small, "expert_choice", scores, 300)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["up", "down", "nearest", "balance"])
def test_round_tokens(device, rounding, kind):
    rng = np.random.default_rng(5)
    L, E, k = 600, 35, 4
    scores = scores_of(kind, L, E, np.float32, rng)
    ids = reference.route(rng.standard_normal((L, E)) + np.linspace(-2, 2, E), k)[1]
    ids[rng.random((L, k)) < 0.1] = -1
    assert_equal(device, "round_tokens", scores, ids, tile=32, rounding=rounding)


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 64, 128, 2**30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_tokens_to_any_tile(device, tile, dtype):
    rng = np.random.default_rng(6)
    scores = rng.random((70, 9)).astype(DTYPES[dtype])
    ids = rng.integers(-1, 10, (70, 3))  # names experts twice, and slots without an expert
    for rounding in ("up", "down", "nearest", "balance"):
        assert_equal(device, "round_tokens", scores, ids, tile=tile, rounding=rounding)


@pytest.mark.parametrize("rounding", ["up", "down"])
def test_round_tokens_in_parts_of_many_tokens(rounding):
    """A warp has more than 32 tokens, whose chosen pairs it reads 32 at a time."""
    rng = np.random.default_rng(7)
    scores, ids = rng.standard_normal((4000, 5)).astype(np.float32), rng.integers(-1, 5, (4000, 2))
    with emulated(SMALL) as small:
        assert_equal(small, "round_tokens", scores, ids, tile=512, rounding=rounding)


CAPACITY = [("position", None), ("choice", None), ("weights", "values"), ("priority", "values")]


def capacity_inputs(L, k, E, order, dtype, kind, rng):
    ids = rng.integers(-1, E + 1, (L, k))
    options = {"order": order}
    if order in ("weights", "priority"):
        options[order] = scores_of(kind, L, k, dtype, rng)
        options[order] = options[order] if order == "weights" else options[order][:, 0].copy()
    return ids, options


@pytest.mark.parametrize("ids_dtype", IDS)
@pytest.mark.parametrize("capacity", [0, 7, 100, 10**12])
@pytest.mark.parametrize("order", ["position", "choice", "weights", "priority"])
def test_limit_capacity(device, order, capacity, ids_dtype):
    for kind in ("normal", "ties", "special"):
        ids, options = capacity_inputs(3000, 3, 5, order, np.float32, kind, np.random.default_rng(7))
        assert_equal(device, "limit_capacity", ids.astype(IDS[ids_dtype]), 5, capacity, **options)


@pytest.mark.parametrize("order", ["choice", "weights", "priority"])
@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_limit_capacity_among_more_candidates_than_shared_memory_holds(order, kind):
    """About 5,300 slots of one expert, in parts of which a block lists 4,096 slots at a time."""
    ids, options = capacity_inputs(8000, 2, 1, order, np.float32, kind, np.random.default_rng(10))
    with emulated(SMALL) as small:
        assert_equal(small, "limit_capacity", ids.astype(np.int32), 1, 2000, **options)


@pytest.mark.parametrize("E", [3, 300, 4096])
@pytest.mark.parametrize("order", ["weights", "priority"])
def test_limit_capacity_by_values_of_any_size(device, order, E):
    """Of both signs, within the steps of the digit and beyond them, and with digits of 10, 7 and 4 bits."""
    rng = np.random.default_rng(19)
    ids = rng.integers(0, 3, (2000, 3)).astype(np.int32)
    sizes = 10 ** np.repeat(rng.uniform(-9, 5, (1, 20)), 100, axis=1).T
    values = (rng.standard_normal((2000, 3)) * sizes).astype(np.float32)
    values = values if order == "weights" else values[:, 0].copy()
    for capacity in (20, 300, 1000, 1700):
        assert_equal(device, "limit_capacity", ids, E, capacity, order=order, **{order: values})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["weights", "priority"])
def test_limit_capacity_by_16_bit_values(device, order, dtype):
    ids, options = capacity_inputs(800, 2, 70, order, DTYPES[dtype], "normal", np.random.default_rng(8))
    assert_equal(device, "limit_capacity", ids.astype(np.int32), 70, 9, **options)


@pytest.mark.parametrize("sequences", [7, 301, OFFSETS, APART], ids=["7", "each", "offsets", "apart"])
@pytest.mark.parametrize("order", ["position", "choice", "weights", "priority"])
def test_limit_capacity_in_sequences(device, order, sequences):
    for kind in ("normal", "ties"):
        ids, options = capacity_inputs(301, 3, 5, order, np.float32, kind, np.random.default_rng(9))
        assert_equal(device, "limit_capacity", ids.astype(np.int32), 5, 4, sequences=sequences, **options)


@pytest.mark.parametrize("order", ["position", "choice"])
def test_limit_capacity_with_many_slots_and_experts(device, order):
    """A digit of few bits, several of them, and fewer warps that rank than there are."""
    ids = np.random.default_rng(10).integers(0, 4096, (40, 200)).astype(np.int32)
    ids[:, :20] = 17
    assert_equal(device, "limit_capacity", ids, 4096, 2, order=order)


@pytest.mark.parametrize("k", [16, 17, 40])
@pytest.mark.parametrize("capacity", [0, 50, 600, 700, 5000])
def test_limit_capacity_by_many_choices(device, capacity, k):
    """Choices are counted apart, 16 of them summed at a time."""
    ids = np.random.default_rng(12).integers(-1, 3, (150, k)).astype(np.int32)
    assert_equal(device, "limit_capacity", ids, 3, capacity, order="choice")


@pytest.mark.parametrize(
    ("order", "E", "counted"), [("position", 4096, True), ("choice", 8, True), ("choice", 4096, False)]
)
def test_choices_are_counted_apart_where_their_counts_fit(order, E, counted):
    from moeblaze_cupy.cuda.launch_config import H200
    from moeblaze_cupy.frameworks import Layout
    from moeblaze_cupy.selection import launches as selection

    ids, sequences = Layout((2**20, 16), (16, 1), "int32", 0), selection.Sequences(2**14, False)
    found = selection.configure_capacity(ids, E, 5, order, None, sequences, H200)
    assert isinstance(found, selection.CapacityByCounts) == counted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(seed):
    rng = np.random.default_rng(11)
    scores, ids = scores_of("ties", 600, 33, np.float32, rng), rng.integers(0, 33, (600, 3)).astype(np.int32)
    with emulated(seed=seed) as shuffled:
        assert_equal(shuffled, "expert_choice", scores, 100)
        assert_equal(shuffled, "round_tokens", scores, ids, tile=16, rounding="balance")
        assert_equal(shuffled, "limit_capacity", ids, 33, 40)
        assert_equal(shuffled, "limit_capacity", ids, 33, 40, order="weights", weights=scores[:, :3].copy())
        assert_equal(shuffled, "tokens_per_expert", ids, 33, sequences=3)
        assert_equal(shuffled, "list_pairs", scores > 0, 4000)


@pytest.mark.parametrize("ids_dtype", IDS)
@pytest.mark.parametrize(("L", "k", "E"), [(1, 1, 1), (513, 3, 40), (2000, 8, 4096)])
def test_tokens_per_expert(device, L, k, E, ids_dtype):
    ids = np.random.default_rng(12).integers(-2, E + 2, (L, k)).astype(IDS[ids_dtype])
    counts = assert_equal(device, "tokens_per_expert", ids, E)[0]
    assert counts.sum() == ((ids >= 0) & (ids < E)).sum()


@pytest.mark.parametrize("sequences", [1, 7, OFFSETS, APART], ids=["1", "7", "offsets", "apart"])
@pytest.mark.parametrize("columns", [slice(0, 1), slice(1, 3), slice(0, 4)], ids=["first", "inner", "all"])
def test_tokens_per_expert_of_rows_that_lie_apart(device, columns, sequences):
    ids = np.random.default_rng(13).integers(0, 9, (301, 4)).astype(np.int32)
    got = mb.tokens_per_expert(
        device.put(ids)[:, columns], 9, sequences=sequences if isinstance(sequences, int) else device.put(sequences)
    )
    device.synchronize()
    np.testing.assert_array_equal(got, reference.tokens_per_expert(ids[:, columns], 9, sequences=sequences))


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
@pytest.mark.parametrize(("L", "E"), [(1, 1), (70, 31), (1500, 33), (40, 300)])
def test_list_pairs(device, L, E, dtype):
    mask = (np.random.default_rng(14).random((L, E)) < 0.3).astype(dtype) * dtype(1)
    for num_pairs in (0, 1, int((mask != 0).sum()), L * E):
        assert_equal(device, "list_pairs", mask, num_pairs)


def histograms(device, logits, ids, bias, bounds, bins, score):
    """From counts that are not zero."""
    start = np.arange(logits.shape[1] * bins, dtype=np.int32).reshape(-1, bins) % 5
    on_device = device.allocate(start.shape, np.int32)
    on_device[:] = start
    want = start.copy()
    result = mb.quantile_histogram(*map(device.put, (logits, ids, bias)), on_device, device.put(bounds), score=score)
    assert result is None
    device.synchronize()
    reference.quantile_histogram(logits, ids, bias, want, bounds, score=score)
    return np.array(on_device) - start, want - start


def quantile_inputs(L, E, k, dtype, rng):
    logits = rng.standard_normal((L, E)).astype(dtype)
    bias = (0.1 * rng.standard_normal(E)).astype(np.float32)
    ids = np.argsort(-(1 / (1 + np.exp(-logits.astype(np.float64))) + bias), axis=1)[:, :k]
    return logits, ids, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "identity", "relu"])
def test_quantile_histogram(device, score, dtype):
    """Values at the border of two bins may count in either: exp differs in its last bits."""
    logits, ids, bias = quantile_inputs(400, 21, 3, DTYPES[dtype], np.random.default_rng(15))
    bounds = np.array([bias.min() - 1, bias.max() + 1], np.float32)
    got, want = histograms(device, logits, ids.astype(np.int32), bias, bounds, 100, score)
    assert (got.sum(axis=1) == 400).all() and (got >= 0).all()
    assert np.abs(np.cumsum(got, axis=1) - np.cumsum(want, axis=1)).max() <= 1


def test_quantile_histogram_of_exact_scores(device):
    """Multiples of 1/8 between -4 and 4, some of them beyond the bounds, tokens without an expert, and NaN."""
    rng = np.random.default_rng(16)
    logits = (rng.integers(-32, 33, (300, 40)) / 8).astype(np.float32)
    logits[5, 7] = logits[6, 0] = np.nan
    ids = np.argsort(-logits, axis=1)[:, :4].astype(np.int64)
    ids[10:20] = -1
    bias = (rng.integers(-8, 9, 40) / 8).astype(np.float32)
    got, want = histograms(device, logits, ids, bias, np.array([1.9375, 6.9375], np.float32), 40, "identity")
    np.testing.assert_array_equal(got, want)
    assert got[:, 0].sum() > 100 and got[:, -1].sum() > 100


def test_no_tokens(device):
    ids, scores = np.zeros((0, 2), np.int32), np.zeros((0, 5), np.float32)
    assert_equal(device, "tokens_per_expert", ids, 5)
    for order, values in CAPACITY:
        options = {order: np.zeros((0, 2) if order == "weights" else 0, np.float32)} if values else {}
        assert_equal(device, "limit_capacity", ids, 5, 3, order=order, **options)
    assert_equal(device, "expert_choice", scores, 3)
    assert_equal(device, "expert_choice", scores, 3, sequences=np.zeros(3, np.int32))
    assert_equal(device, "round_tokens", scores, ids)
    assert_equal(device, "list_pairs", scores > 0, 4)
    got, _ = histograms(device, scores, ids, np.zeros(5, np.float32), np.ones(2, np.float32), 3, "sigmoid")
    assert not got.any()


@pytest.mark.parametrize(
    "offsets", [[0, 400, -7, 200, 301], [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 5], [9, 9, 9, 9, 9]], ids=str
)
def test_offsets_with_garbage_give_no_fault(device, offsets):
    """And still no more than each sequence and expert may have."""
    rng = np.random.default_rng(17)
    offsets = device.put(np.array(offsets, np.int32))
    scores, ids = rng.random((301, 5)).astype(np.float32), rng.integers(0, 5, (301, 3)).astype(np.int32)
    token_offsets, chosen = mb.expert_choice(device.put(scores), 4, sequences=offsets)
    mb.limit_capacity(device.put(ids), 5, 4, sequences=offsets)
    mb.limit_capacity(device.put(ids), 5, 4, order="weights", weights=device.put(scores[:, :3]), sequences=offsets)
    counts = mb.tokens_per_expert(device.put(ids), 5, sequences=offsets)
    device.synchronize()
    assert (np.diff(token_offsets) >= 0).all() and 0 <= token_offsets[-1] <= chosen.size
    assert (np.asarray(counts) >= 0).all()


def test_repeated_calls_take_what_was_prepared(device, monkeypatch):
    """The second call of a layout checks nothing, and other options are another record."""
    rng = np.random.default_rng(18)
    scores = device.put(rng.random((64, 8)).astype(np.float32))
    ids = device.put(rng.integers(0, 8, (64, 2)).astype(np.int32))
    first = mb.limit_capacity(ids, 8, 5), mb.expert_choice(scores, 5), mb.round_tokens(scores, ids, tile=4)
    device.synchronize()
    monkeypatch.setattr("moeblaze_cupy.calls.Call", None)
    again = mb.limit_capacity(ids, 8, 5), mb.expert_choice(scores, 5), mb.round_tokens(scores, ids, tile=4)
    device.synchronize()
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(
            np.concatenate([np.ravel(a) for a in one]), np.concatenate([np.ravel(a) for a in other])
        )
    for call in (
        lambda: mb.limit_capacity(ids, 8, 6),
        lambda: mb.limit_capacity(ids, 8, 5, order="choice"),
        lambda: mb.limit_capacity(ids, 8, 5, sequences=2),
        lambda: mb.expert_choice(scores, 6),
        lambda: mb.round_tokens(scores, ids, tile=8),
        lambda: mb.round_tokens(scores, ids, tile=4, rounding="up"),
    ):
        with pytest.raises(TypeError, match="NoneType"):
            call()


def test_digits_and_parts_of_large_problems():
    """What the emulator is too slow for: more than 65535 tokens per part are never counted in 16 bits."""
    from moeblaze_cupy.cuda import launch_config
    from moeblaze_cupy.selection import config as selection_config

    for L, S, E in ((2**20, 1, 128), (2**31 - 128, 1, 1), (2**24, 2**10, 64), (2**16, 2**16, 4096)):
        for limits in (launch_config.H200, SMALL, DEEP_STAGES):
            parts = selection_config.parts_of_sequence(S, L // S, limits.multiprocessors, 256, 65535)
            assert launch_config.ceil_div(L // S, parts) <= 65535
            for row_bytes in (128, 2 * E):
                width = selection_config.digit_bits(row_bytes, S * E, limits)
                assert row_bytes << width <= limits.shared_bytes_per_block
                assert S * E << width <= 2**24 or width == 1
