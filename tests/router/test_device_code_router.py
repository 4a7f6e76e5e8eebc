"""The router's kernels and the host code that launches them, without a GPU: see test_device_code.py."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from tests.cases import (
    CUTS,
    DENSE_GRADIENTS,
    EMPTYING,
    assert_same_entropies,
    peaked_logits,
    relative_error,
    special_logits,
    with_anything_in_empty_slots,
)
from tests.layer.test_device_code import DTYPES, device, differences, emulated, in_float64  # noqa: F401  # device is a fixture

# fp32 sums over at most 4096 probabilities; the gradient is rounded to the logits' dtype, which alone is an error of at
# most half a unit in the last place of each element.
WEIGHTS_TOLERANCE = 1e-6
LOGITS_TOLERANCES = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
GRADS = ("grad_score_sums", "grad_z_sums", "grad_entropy_sums")


def exactly(value):
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def run_router(device, logits, grad_weights, k=None, ids=None, grads=(), **options):  # noqa: F811
    def put(value):
        return device.put(value) if isinstance(value, np.ndarray) else value

    logits, grad_weights, ids = put(logits), put(grad_weights), put(ids)
    options = {name: put(value) for name, value in options.items()}
    weights, chosen, *sums = mb.route(logits, k, ids=ids, **options)
    given = {name: put(grad) for name, grad in zip(GRADS, grads, strict=False) if grad is not None}
    grad_logits = mb.route_backward(grad_weights, logits, weights, chosen, **options, **given)
    device.synchronize()
    results = {"weights": weights, "ids": chosen, "grad_logits": grad_logits}
    return results | (dict(zip(("score_sums", "z_sums", "entropy_sums"), sums[0], strict=True)) if sums else {})


def assert_equals_reference(device, logits, grad_weights, k=None, ids=None, grads=(), **options):  # noqa: F811
    got = run_router(device, logits, grad_weights, k, ids, grads, **options)
    exact = {name: exactly(value) for name, value in options.items()}
    slots = grad_weights.shape[1] if grad_weights.ndim == 2 else None
    exact.setdefault("renormalize", slots is None or slots > 1)
    weights, chosen, *sums = reference.route(exactly(logits), k, ids=ids, **exact)
    np.testing.assert_array_equal(got["ids"], chosen)
    np.testing.assert_array_equal(np.isnan(got["weights"]), np.isnan(weights))
    assert relative_error(np.nan_to_num(got["weights"]), np.nan_to_num(weights)) <= WEIGHTS_TOLERANCE
    if sums:
        for name, want in zip(("score_sums", "z_sums", "entropy_sums"), sums[0], strict=True):
            assert (got[name] is None) == (want is None)
            if want is not None:
                assert relative_error(got[name], want) <= 4 * WEIGHTS_TOLERANCE, name
    given = {name: exactly(grad) for name, grad in zip(GRADS, grads, strict=False) if grad is not None}
    want = reference.route_backward(exactly(grad_weights), exactly(logits), weights, chosen, **exact, **given)
    assert got["grad_logits"].dtype == logits.dtype
    grad, tolerance = in_float64(got["grad_logits"]), LOGITS_TOLERANCES[logits.dtype.name]
    assert np.abs(grad - want).max(initial=0) <= 4 * tolerance * max(np.abs(want).max(initial=0), 1)
    if np.linalg.norm(want) > 1e-3:
        assert relative_error(grad, want) <= 2 * tolerance
    return got


def inputs(L, E, k, dtype="float32", seed=0):
    rng = np.random.default_rng(seed + L + E)
    return rng.standard_normal((L, E)).astype(DTYPES[dtype]), rng.standard_normal((L, k)).astype(np.float32)


SHAPES = [
    (1, 1, 1),
    (5, 8, 2),
    (37, 16, 4),
    (9, 33, 32),
    (3, 1000, 8),
    (21, 64, 8),
    (6, 40, 5),
    (11, 128, 8),
    (2, 64, 1),
]
SHAPES += [
    (7, 256, 22),
    (5, 384, 16),
    (3, 896, 16),
    (2, 2304, 36),
    (2, 4096, 64),
    (3, 128, 64),
    (4, 7, 7),
    (70, 160, 6),
]


@pytest.mark.parametrize(("L", "E", "k"), SHAPES)
def test_router_of_any_size(device, L, E, k):  # noqa: F811
    assert_equals_reference(device, *inputs(L, E, k), k, renormalize=True)


@pytest.mark.parametrize(("L", "E", "k"), [(5, 8, 2), (9, 33, 32), (6, 40, 5), (11, 128, 8), (3, 896, 16)])
def test_softmax_over_all(device, L, E, k):  # noqa: F811
    assert_equals_reference(device, *inputs(L, E, k), k, renormalize=False)


# The dtypes differ in how an element, or eight of them, are read and written: float16 takes one shape for each.
@pytest.mark.parametrize(
    ("L", "E", "k", "dtype"),
    [
        (9, 33, 32, "float16"),
        (11, 128, 8, "float16"),
        (9, 33, 32, "bfloat16"),
        (37, 16, 4, "bfloat16"),
        (11, 128, 8, "bfloat16"),
        (6, 40, 5, "bfloat16"),
    ],
)
def test_router_of_16_bit_logits(device, L, E, k, dtype):  # noqa: F811
    """They tie often: ties go to the lower id."""
    assert_equals_reference(device, *inputs(L, E, k, dtype), k, renormalize=False)
    assert_equals_reference(device, *inputs(L, E, k, dtype), k)


SCORED = [("softmax", "vector"), ("sigmoid", "vector"), ("sqrt_softplus", "vector"), ("identity", None), ("relu", None)]
SCORED += [("sigmoid", "matrix"), ("softmax", "logits"), ("sqrt_softplus", None)]
# Each score with one lane for a token; where several lanes hold it, each kind of bias.
OVER_LANES = [("softmax", "vector"), ("sigmoid", "matrix"), ("softmax", "logits"), ("relu", None)]


@pytest.mark.parametrize(
    ("score", "bias", "E"), [(*case, 16) for case in SCORED] + [(*case, 96) for case in OVER_LANES]
)
def test_scores_and_biases(device, score, bias, E):  # noqa: F811
    logits, grad_weights = inputs(19, E, 4)
    rng = np.random.default_rng(1)
    options = {"score": score, "eps": 0.5, "scale": 2.5, "renormalize": score != "identity"}
    if bias:
        options["bias"] = rng.standard_normal((19, E) if bias == "matrix" else E).astype(np.float32) / 4
        options["bias_on"] = "logits" if bias == "logits" else "scores"
    assert_equals_reference(device, logits, grad_weights, 4, **options)


@pytest.mark.parametrize(
    ("E", "groups", "k"),
    [
        (32, (8, 4, 2), 6),
        (128, (8, 4, 2), 8),
        (64, (4, 2, 1), 8),
        (96, (4, 2, 1), 8),
        (60, (5, 2, 3), 4),
        (96, (96, 9, 1), 9),
        (256, (8, 4, 2), 8),
        (160, (5, 2, 2), 6),
        (224, (7, 3, 1), 9),
        (64, (16, 3, 2), 5),
    ],
)
@pytest.mark.parametrize(("score", "biased"), [("sigmoid", True), ("softmax", False)])
def test_groups(device, score, biased, E, groups, k):  # noqa: F811
    logits, grad_weights = inputs(13, E, k)
    options = {"score": score, "groups": groups, "eps": 1e-20}
    if biased:
        options["bias"] = np.random.default_rng(0).standard_normal(E).astype(np.float32) - 2
    assert_equals_reference(device, logits, grad_weights, k, **options)


@pytest.mark.parametrize(("E", "groups"), [(64, (4, 2, 2)), (256, (8, 4, 2))])
def test_groups_of_blocks_that_choose_several_times(E, groups, monkeypatch):
    """Blocks of 160 tokens. Every fifth has more equal logits than a list has room for. Warps overlap in any order."""
    from moeblaze_cupy.cuda import runtime
    from moeblaze_cupy.router import config as router_config

    monkeypatch.setattr(router_config, "ROUTER_SUM_BLOCKS", 2)
    runtime.forget()
    logits, grad_weights = inputs(300, E, 6)
    logits[::5] = np.round(logits[::5])
    bias = np.linspace(-1, 1, groups[0], dtype=np.float32).repeat(E // groups[0])
    for seed in range(2):
        with emulated(seed=seed) as device:  # noqa: F811
            assert_equals_reference(device, logits, grad_weights, 6, score="sigmoid", groups=groups, bias=bias)
    runtime.forget()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("E", "groups"),
    [(256, (8, 4, 2)), (160, (5, 2, 2)), (224, (7, 3, 1)), (128, (8, 3, 2)), (1024, (16, 5, 2)), (96, (4, 2, 1))],
)
def test_ties_of_groups_go_to_the_lowest(device, E, groups, dtype):  # noqa: F811
    number = groups[0]
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3, (9, E)).astype(np.float32)
    logits[0] = 1
    logits[1] = np.arange(E) // (E // number)
    logits[2] = -logits[1]
    logits[3] = -np.inf
    logits[4, : E // number] = -np.inf
    logits[5] = np.where(np.arange(E) < E - E // number, -np.inf, 1)
    logits = logits.astype(DTYPES[dtype])
    options = {"score": "identity", "groups": groups, "renormalize": False}
    got = run_router(device, logits, np.ones((9, 8), np.float32), 8, **options)
    np.testing.assert_array_equal(got["ids"], reference.route(exactly(logits), 8, **options)[1])


@pytest.mark.parametrize("E", [20, 64])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.5}, {"threshold": 0.05}, {"threshold": 0.75, "score": "sigmoid"}], ids=str
)
def test_cut_slots(device, options, E):  # noqa: F811
    got = assert_equals_reference(device, *inputs(19, E, 8), 8, **options)
    assert (got["ids"] < 0).any() and (got["ids"][:, 1] >= 0).any()


@pytest.mark.parametrize("E", [16, 100])
@pytest.mark.parametrize(("score", "dtype"), [("softmax", np.int32), ("sigmoid", np.int64), ("relu", np.int64)])
def test_given_ids(device, score, dtype, E):  # noqa: F811
    """Absent, repeated, far outside."""
    logits, grad_weights = inputs(41, E, 40)
    ids = np.random.default_rng(0).integers(-2, E + 2, (41, 40)).astype(dtype)
    ids[3] = -1
    if dtype == np.int64:
        ids[4, 0] = 2**32
    for renormalize in (True, False):
        assert_equals_reference(device, logits, grad_weights, None, ids, score=score, eps=1.0, renormalize=renormalize)


@pytest.mark.parametrize(
    ("E", "options"),
    [
        (16, {}),
        *((E, {"renormalize": False}) for E in (40, 64, 100, 160, 256, 300)),
        (16, {"score": "sigmoid"}),
        (600, {}),
        (100, {"score": "sigmoid"}),
    ],
    ids=str,
)
def test_given_ids_weigh_as_if_they_had_been_chosen(device, options, E):  # noqa: F811
    logits, grad_weights = inputs(19, E, 5)
    mask = np.arange(19) % 4 != 0
    first = run_router(device, logits, grad_weights, 5, **options)
    again = run_router(device, logits, grad_weights, None, np.asarray(first["ids"]), **options)
    assert not differences(first, again)
    with_sums = run_router(device, logits, grad_weights, 5, sums=("softmax", "z"), **options)
    assert all(np.array_equal(first[name], with_sums[name]) for name in ("weights", "ids"))
    offsets = np.arange(0, 19 * 5 + 1, 5, dtype=np.int32)
    flat = {"ids": np.asarray(first["ids"]).ravel(), "token_offsets": offsets}
    pairs = run_router(device, logits, grad_weights.ravel(), **flat, **options)
    assert not differences(first, {name: value.reshape(first[name].shape) for name, value in pairs.items()})
    masked = assert_equals_reference(device, logits, grad_weights, 5, token_mask=mask, **options)
    assert (masked["ids"][~mask] == -1).all() and not masked["grad_logits"][~mask].any()


@pytest.mark.parametrize(
    "offsets",
    [[1, 3, 3, 4, 45], [0, 0, 0, 0, 0], [-5, 100, 3, 2**31 - 1, -(2**31)]],
    ids=["ragged", "empty", "garbage"],
)
def test_ragged_pairs(device, offsets):  # noqa: F811
    logits, _ = inputs(4, 6, 1)
    rng = np.random.default_rng(0)
    ids, grads = rng.integers(-1, 7, 50).astype(np.int32), rng.standard_normal(50).astype(np.float32)
    given = {"ids": ids, "token_offsets": np.array(offsets, np.int32)}
    if offsets[0] < 0:
        run_router(device, logits, grads, **given)  # no fault, nothing else is promised
        return
    for options in ({}, {"score": "sigmoid", "renormalize": False}):
        assert_equals_reference(device, logits, grads, **given, **options)


def test_ragged_pairs_of_no_tokens(device):  # noqa: F811
    given = {"ids": np.ones(3, np.int32), "token_offsets": np.zeros(1, np.int32)}
    assert_equals_reference(device, np.zeros((0, 6), np.float32), np.ones(3, np.float32), **given)


OFFSETS = np.array([3, 3, 20, 49, 60], np.int32)


@pytest.mark.parametrize("sequences", [1, 4, OFFSETS], ids=["one", "four", "offsets"])
@pytest.mark.parametrize(("E", "share"), [(16, "softmax"), (100, "sigmoid"), (39, "sqrt_softplus")])
def test_sums(device, share, E, sequences, monkeypatch):  # noqa: F811
    from moeblaze_cupy.cuda import runtime
    from moeblaze_cupy.router import config as router_config

    monkeypatch.setattr(router_config, "ROUTER_SUM_BLOCKS", 3)  # several tokens and sequences per block
    runtime.forget()
    logits, grad_weights = inputs(64, E, 4)
    rng = np.random.default_rng(2)
    number = sequences if isinstance(sequences, int) else 4
    grads = [rng.standard_normal(s).astype(np.float32) for s in ((number, E), (number,), (number,))]
    options = {
        "sums": (share, "z", "entropy"),
        "sequences": sequences,
        "score": share,
        "token_mask": rng.random(64) < 0.8,
    }
    assert_equals_reference(device, logits, grad_weights, 4, grads=grads, renormalize=False, **options)
    bias = rng.standard_normal(E).astype(np.float32)
    assert_equals_reference(device, logits, grad_weights, 4, grads=grads[:1], bias=bias, **options)
    runtime.forget()


@pytest.mark.parametrize("E", [60, 200])
def test_sums_of_blocks_that_choose_several_times(E, monkeypatch):
    """Blocks of 96 tokens, which sequences begin and end in. Warps overlap in any order."""
    from moeblaze_cupy.cuda import runtime
    from moeblaze_cupy.router import config as router_config

    monkeypatch.setattr(router_config, "ROUTER_SUM_BLOCKS", 2)
    runtime.forget()
    logits, grad_weights = inputs(150, E, 3)
    grads = [np.ones((3, E), np.float32), np.ones(3, np.float32)]
    options = {"score": "sigmoid", "sums": ("sigmoid", "z"), "sequences": np.array([2, 30, 141, 150], np.int32)}
    for seed in range(2):
        with emulated(seed=seed) as device:  # noqa: F811
            assert_equals_reference(device, logits, grad_weights, 3, grads=grads, **options)
    runtime.forget()


@pytest.mark.parametrize("E", [32, 256])
def test_sums_add_up_over_sequences_and_repeat(device, E):  # noqa: F811
    logits, grad_weights = inputs(48, E, 2)
    found = [run_router(device, logits, grad_weights, 2, sums=("sigmoid", "z"), sequences=s) for s in (1, 1, 4)]
    assert not differences(*({n: v for n, v in f.items() if v is not None} for f in found[:2]))
    for name in ("score_sums", "z_sums"):
        assert relative_error(found[2][name].sum(0), found[0][name][0]) <= WEIGHTS_TOLERANCE


def test_sums_of_garbage_sequences_stay_in_bounds(device):  # noqa: F811
    logits, grad_weights = inputs(48, 40, 2)
    offsets = np.array([60, -4, 2**31 - 1, 7, -(2**31), 30], np.int32)
    run_router(device, logits, grad_weights, 2, sums=("softmax", "z"), sequences=offsets)


def assert_routes_as_reference(device, logits, **options):  # noqa: F811
    """To 3 experts. Gradients may be NaN."""
    with np.errstate(invalid="ignore"):
        weights, ids = reference.route(logits.astype(np.float64), 3, **options)
    got = run_router(device, logits, np.ones((len(logits), 3), np.float32), 3, **options)
    np.testing.assert_array_equal(got["ids"], ids)
    np.testing.assert_allclose(got["weights"], weights, rtol=WEIGHTS_TOLERANCE, atol=1e-30)


@pytest.mark.parametrize("E", [4, 40])
@pytest.mark.parametrize(("dtype", "renormalize"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_router_on_ties_zeros_infinities_and_nan(device, renormalize, dtype, E):  # noqa: F811
    nan, inf = np.nan, np.inf
    rows = [[1, 1, 1, 1], [0.0, -0.0, 0.0, -1], [-1, -0.0, 0.0, -2], [-inf, 2, -inf, 1], [2, nan, 1, -nan], [nan] * 4]
    rows = np.array([*rows, [inf, 0, 1, 2], [-inf, -inf, -inf, -inf], [inf, inf, 0, 1]])
    logits = np.full((len(rows), E), -inf)
    logits[:, np.linspace(0, E - 1, 4).astype(int)] = rows
    assert_routes_as_reference(device, logits.astype(DTYPES[dtype]), renormalize=renormalize)


@pytest.mark.parametrize("options", CUTS, ids=str)
@pytest.mark.parametrize("E", [4, 40])
def test_slots_of_nan_and_infinity_are_not_cut(device, options, E):  # noqa: F811
    assert_routes_as_reference(device, special_logits(E), renormalize=True, **options)


@pytest.mark.parametrize("options", DENSE_GRADIENTS, ids=str)
@pytest.mark.parametrize("E", [4, 40])
def test_masked_tokens_have_no_gradient_whatever_their_logits(device, options, E):  # noqa: F811
    logits = special_logits(E)
    mask = np.arange(len(logits)) == 0
    k, sums = options.get("k", 3), options.get("sums", ())
    *_, totals = reference.route(logits, k, sums=sums) if sums else ((),)
    grads = [None if total is None else np.ones_like(total) for total in totals]
    options = {"token_mask": mask, "sums": sums}
    got = run_router(device, logits, np.ones((len(logits), k), np.float32), k, grads=grads, **options)
    assert not got["grad_logits"][1:].any() and np.isfinite(got["grad_logits"]).all()


@pytest.mark.parametrize("E", [12, 40])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("options", (*EMPTYING, {"score": "identity", "threshold": 0.7, "eps": 9.0}), ids=str)
def test_gradients_of_empty_slots_do_not_count(device, options, renormalize, E):  # noqa: F811
    logits, grad_weights = inputs(9, E, E // 2)
    k, options = E // 2, options | {"renormalize": renormalize}
    ids = assert_equals_reference(device, logits, grad_weights, k, **options)["ids"]
    assert (ids < 0).any() and (ids >= 0).any()
    want = run_router(device, logits, np.where(ids < 0, np.float32(0), grad_weights), k, **options)
    assert not differences(
        want, run_router(device, logits, with_anything_in_empty_slots(grad_weights, ids), k, **options)
    )
    # Ids that were given may leave any slots empty, and more of them than a token has lanes.
    given = np.tile(np.asarray(ids), 8)
    grad_weights = np.tile(grad_weights, 8)
    options = {"score": options.get("score", "softmax"), "renormalize": renormalize, "eps": options.get("eps", 0.0)}
    want = run_router(device, logits, np.where(given < 0, np.float32(0), grad_weights), None, given, **options)
    anything = with_anything_in_empty_slots(grad_weights, given)
    assert not differences(want, run_router(device, logits, anything, None, given, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("E", "options"), [(13, {}), (24, {}), (100, {}), (256, {"bias": np.zeros(256, np.float32)})])
def test_entropies_of_peaked_rows_keep_their_digits(device, E, options, dtype):  # noqa: F811
    logits = peaked_logits(60, E, 100).astype(DTYPES[dtype])
    options = options | {"sums": ("entropy",), "sequences": 60}
    grads = [None, None, np.ones(60, np.float32)]
    got = run_router(device, logits, np.zeros((60, 2), np.float32), 2, grads=grads, **options)
    exact = {"renormalize": True, "sums": ("entropy",), "sequences": 60}
    *routed, (_, _, want) = reference.route(logits.astype(np.float64), 2, **exact)
    given = np.zeros((60, 2)), logits.astype(np.float64), *routed
    want_grad = reference.route_backward(*given, **exact, grad_entropy_sums=np.ones(60))
    grad = in_float64(got["grad_logits"])
    assert_same_entropies(got["entropy_sums"], grad, want, want_grad, LOGITS_TOLERANCES[dtype])


@pytest.mark.parametrize(("E", "k"), [(30, 9), (100, 8), (100, 32), (1000, 20), (200, 50), (64, 8)])
def test_ties_of_the_router_go_to_the_lowest_ids(device, E, k):  # noqa: F811
    """Also where one lane holds several of the experts that tie, and where all of the largest are in few lanes."""
    logits = np.random.default_rng(0).integers(0, 3, (9, E)).astype(np.float32)
    logits[0] = 1
    logits[1] = np.arange(E)
    logits[2] = -np.arange(E)
    logits[3] = 0
    logits[3, E // 2] = 1
    logits[4] = -np.inf
    got = run_router(device, logits, np.ones((9, k), np.float32), k)
    np.testing.assert_array_equal(got["ids"], reference.route(logits, k)[1])


@pytest.mark.parametrize("E", [24, 70])
def test_router_in_any_order_of_threads_and_blocks(E):
    logits, grad_weights = inputs(11, E, 6)
    grads = [np.ones((1, E), np.float32), np.ones(1, np.float32), None]
    found = []
    for seed in range(3):
        with emulated(seed=seed) as device:  # noqa: F811
            options = {"renormalize": False, "sums": ("softmax", "z", "entropy"), "groups": (2, 2, 2)}
            found.append(run_router(device, logits, grad_weights, 6, grads=grads, **options))
    assert [differences(found[0], other) for other in found[1:]] == [[]] * 2


def test_router_of_no_tokens(device):  # noqa: F811
    got = run_router(device, np.zeros((0, 5), np.float32), np.zeros((0, 2), np.float32), 2, sums=("softmax",))
    assert got["weights"].shape == got["ids"].shape == (0, 2) and got["grad_logits"].shape == (0, 5)
    assert got["score_sums"].tolist() == [[0.0] * 5]
