"""The router on a GPU against the float64 reference."""

import ml_dtypes
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

pytestmark = pytest.mark.gpu

# fp32 sums over at most 4096 probabilities; 16-bit logits are exact inputs, their gradients are rounded on output.
WEIGHTS_TOLERANCE = 1e-6
SUMS_TOLERANCE = 4e-6
GRADIENT_TOLERANCES = {np.float32: 2e-6, np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}
GRADS = ("grad_score_sums", "grad_z_sums", "grad_entropy_sums")
DEEPSEEK = {"score": "sigmoid", "groups": (8, 4, 2), "eps": 1e-20, "scale": 2.5}
CASES = [
    (1, 1, 1, {"renormalize": False}),
    (513, 16, 4, {}),
    (4097, 64, 8, {"renormalize": False}),
    (1000, 1000, 32, {}),
    (513, 256, 8, {}),
    (700, 128, 8, {"score": "sqrt_softplus", "eps": 1e-20, "bias": True}),
    (513, 256, 8, DEEPSEEK | {"bias": True}),
    (300, 512, 22, DEEPSEEK | {"bias": True}),
    (300, 768, 12, {"renormalize": False, "bias": True, "scale": 6.0}),
    (65, 4096, 64, {"score": "identity", "renormalize": False}),
    (4100, 16, 4, {"sums": ("softmax", "z", "entropy")}),
    (4100, 256, 8, DEEPSEEK | {"bias": True, "sums": ("sigmoid", "z"), "sequences": 5}),
    (4100, 200, 6, {"sums": ("sqrt_softplus",), "sequences": np.array([3, 900, 900, 4099], np.int32)}),
    (0, 4, 2, {"sums": ("softmax",)}),
]


def exactly(value):
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype != np.int32 else value


@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCES)
@pytest.mark.parametrize(("L", "E", "k", "options"), CASES)
def test_router_matches_float64_reference(L, E, k, options, dtype):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(L + E)
    logits = rng.standard_normal((L, E)).astype(dtype)
    grad_weights = rng.standard_normal((L, k)).astype(np.float32)
    options = dict(options)
    if options.get("bias"):
        options["bias"] = rng.standard_normal(E).astype(np.float32) / 4
    exact = {"renormalize": k > 1} | {name: exactly(value) for name, value in options.items()}
    want = reference.route(logits.astype(np.float64), k, **exact)
    grads = (
        {n: rng.standard_normal(s.shape) for n, s in zip(GRADS, want[2], strict=True) if s is not None}
        if len(want) > 2
        else {}
    )
    want_grad = reference.route_backward(
        grad_weights.astype(np.float64), logits.astype(np.float64), *want[:2], **exact, **grads
    )

    on_gpu = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    weights, ids, *sums = mb.route(cupy.asarray(logits), k, **on_gpu)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    if "bias" in options:  # keys that differ by a rounding may change places
        assert (ids.get() == want[1]).mean() > 0.9999
    else:
        assert np.array_equal(ids.get(), want[1])  # 16-bit logits tie often: ties go to the lower id
    assert relative_error(weights.get(), want[0]) <= WEIGHTS_TOLERANCE
    for got, expected in zip(sums[0] if sums else (), want[2] if sums else (), strict=True):
        assert got is expected is None or relative_error(got.get(), expected) <= SUMS_TOLERANCE
    grads = {name: cupy.asarray(grad.astype(np.float32)) for name, grad in grads.items()}
    got = mb.route_backward(cupy.asarray(grad_weights), cupy.asarray(logits), weights, ids, **on_gpu, **grads)
    assert got.dtype == dtype
    if E == 1:
        assert np.abs(got.get().astype(np.float64)).max() <= 1e-6  # the weight is constant 1
    else:
        assert relative_error(got.get(), want_grad) <= GRADIENT_TOLERANCES[dtype]


@pytest.mark.parametrize("E", [5, 40, 1000])
def test_ties_zeros_and_special_values(E):
    cupy = pytest.importorskip("cupy")
    rows = np.array(
        [[1, 1, 1, 1], [0.0, -0.0, 0.0, -1], [-np.inf, 2, -np.inf, 1], [np.nan, 5, -np.nan, 7], [np.inf, 0, 1, 2]]
    )
    logits = np.zeros((len(rows), E), np.float32)
    logits[:, np.linspace(0, E - 1, 4).astype(int)] = rows
    weights, ids = (a.get() for a in mb.route(cupy.asarray(logits), 4))
    want_weights, want_ids = reference.route(logits.astype(np.float64), 4)
    assert np.array_equal(ids, want_ids)
    assert np.array_equal(np.isnan(weights), np.isnan(want_weights))
    finite = ~np.isnan(want_weights)
    assert relative_error(weights[finite], want_weights[finite]) <= WEIGHTS_TOLERANCE


@pytest.mark.parametrize("options", CUTS, ids=str)
@pytest.mark.parametrize("E", [4, 40, 1000])
def test_slots_of_nan_and_infinity_are_not_cut(options, E):
    cupy = pytest.importorskip("cupy")
    logits = special_logits(E)
    weights, ids = (a.get() for a in mb.route(cupy.asarray(logits), 3, **options))
    want_weights, want_ids = reference.route(logits.astype(np.float64), 3, **{"renormalize": True} | options)
    assert np.array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=WEIGHTS_TOLERANCE, atol=1e-30)


@pytest.mark.parametrize("options", DENSE_GRADIENTS, ids=str)
@pytest.mark.parametrize("E", [4, 40, 1000])
def test_masked_tokens_have_no_gradient_whatever_their_logits(options, E):
    cupy = pytest.importorskip("cupy")
    logits = cupy.asarray(special_logits(E))
    k, sums, mask = options.get("k", 3), options.get("sums", ()), cupy.arange(len(logits)) == 0
    weights, ids, *found = mb.route(logits, k, token_mask=mask, sums=sums)
    of_sums = dict(zip(GRADS, *found, strict=True)) if found else {}
    given = {name: cupy.ones_like(total) for name, total in of_sums.items() if total is not None}
    grad = mb.route_backward(cupy.ones_like(weights), logits, weights, ids, token_mask=mask, sums=sums, **given).get()
    assert not grad[1:].any() and np.isfinite(grad).all()


@pytest.mark.parametrize("options", EMPTYING, ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("E", [12, 40])
def test_gradients_of_empty_slots_do_not_count(E, renormalize, options):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(E)
    logits = cupy.asarray(rng.standard_normal((9, E)).astype(np.float32))
    options = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    options["renormalize"] = renormalize
    weights, ids = mb.route(logits, E // 2, **options)
    grad_weights, chosen = rng.standard_normal((9, E // 2)).astype(np.float32), ids.get()
    found = [
        mb.route_backward(cupy.asarray(given), logits, weights, ids, **options).get()
        for given in (np.where(chosen < 0, 0, grad_weights), with_anything_in_empty_slots(grad_weights, chosen))
    ]
    assert (chosen < 0).any() and np.isfinite(found[0]).all()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("E", [24, 100, 1000])
def test_entropies_of_peaked_rows_keep_their_digits(E):
    cupy = pytest.importorskip("cupy")
    logits = peaked_logits(300, E, 100)
    exact = {"renormalize": True, "sums": ("entropy",), "sequences": 300}
    *routed, (_, _, want) = reference.route(logits.astype(np.float64), 2, **exact)
    given = np.zeros((300, 2)), logits.astype(np.float64), *routed
    want_grad = reference.route_backward(*given, **exact, grad_entropy_sums=np.ones(300))
    logits = cupy.asarray(logits)
    weights, ids, sums = mb.route(logits, 2, **exact)
    ones = cupy.ones(300, np.float32)
    grad = mb.route_backward(cupy.zeros_like(weights), logits, weights, ids, **exact, grad_entropy_sums=ones)
    assert_same_entropies(sums.entropy_sums.get(), grad.get(), want, want_grad)


@pytest.mark.parametrize("E", [16, 256])
def test_capture_replay_and_repetition(E):
    """A captured graph gives the bits of plain calls, for contents that it was not captured with."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    old, new = (cupy.asarray(rng.standard_normal((3000, E)).astype(np.float32)) for _ in range(2))
    bias, v = (cupy.asarray(rng.standard_normal(s).astype(np.float32)) for s in (E, (1, E)))
    mask = cupy.asarray(rng.random(3000) < 0.9)
    options = {"score": "sigmoid", "groups": (4, 2, 2), "sums": ("sigmoid", "z"), "bias": bias, "token_mask": mask}

    def run(logits):
        weights, ids, sums = mb.route(logits, 4, **options)
        grad = mb.route_backward(weights, logits, weights, ids, **options, grad_score_sums=v)
        again, same = mb.route(logits, ids=ids, **(options | {"sums": ()}))
        return weights, ids, sums.score_sums, sums.z_sums, grad, again, same

    want = [a.get() for a in run(new)]
    assert all(np.array_equal(a.get(), b) for a, b in zip(run(new), want, strict=True))
    assert np.array_equal(want[0], want[5]) and np.array_equal(want[1], want[6])
    logits = old.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run(logits)
        stream.synchronize()
        stream.begin_capture()
        results = run(logits)
        graph = stream.end_capture()
        logits[...] = new
        graph.launch(stream)
        stream.synchronize()
    assert all(np.array_equal(a.get(), b) for a, b in zip(results, want, strict=True))


def test_offsets_with_garbage_stay_in_bounds():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    logits = cupy.asarray(rng.standard_normal((4, 40)).astype(np.float32))
    ids = cupy.asarray(rng.integers(-1, 41, 50).astype(np.int32))
    offsets = cupy.asarray(np.array([-5, 100, 3, 2**31 - 1, -(2**31)], np.int32))
    weights, chosen, _ = mb.route(logits, ids=ids, token_offsets=offsets, sums=("z",), sequences=offsets)
    mb.route_backward(weights, logits, weights, chosen, token_offsets=offsets)
    cupy.cuda.Device().synchronize()
    good = cupy.asarray(np.array([1, 3, 3, 4, 45], np.int32))
    weights, chosen = mb.route(logits, ids=ids, token_offsets=good, score="sigmoid")
    want = reference.route(logits.get().astype(float), ids=ids.get(), token_offsets=good.get(), score="sigmoid")
    assert np.array_equal(chosen.get(), want[1])
    assert relative_error(weights.get(), want[0]) <= WEIGHTS_TOLERANCE


def test_rows_past_two_billion_logits():
    """An offset of 32 bits would wrap in the last rows, and read and write those at the beginning."""
    cupy = pytest.importorskip("cupy")
    L, E, k = 2**19 + 3, 4096, 8
    if cupy.cuda.Device().mem_info[0] < 3 * 2 * L * E:
        pytest.skip("less than 13 GB of GPU memory are free")
    rng = np.random.default_rng(0)
    logits = cupy.zeros((L, E), np.float16)
    last = rng.standard_normal((4, E)).astype(np.float16)
    logits[-4:] = cupy.asarray(last)
    options = {"score": "sigmoid", "sums": ("softmax",)}
    weights, ids, sums = mb.route(logits, k, **options)
    exact = {"score": "sigmoid", "renormalize": True}
    want, want_ids = reference.route(last.astype(np.float64), k, **exact)
    assert np.array_equal(ids[-4:].get(), want_ids)
    assert relative_error(weights[-4:].get(), want) <= WEIGHTS_TOLERANCE
    assert np.array_equal(ids[:3].get(), [[*range(k)]] * 3)
    assert abs(float(sums.score_sums.sum()) - L) <= 1e-3 * L
    grad_weights = rng.standard_normal((L, k)).astype(np.float32)
    grad = mb.route_backward(cupy.asarray(grad_weights), logits, weights, ids, score="sigmoid")
    for rows in (slice(0, 3), slice(-4, None)):
        given = grad_weights[rows].astype(np.float64), logits[rows].get().astype(np.float64)
        exactly_routed = reference.route(given[1], k, **exact)
        want = reference.route_backward(*given, *exactly_routed, **exact)
        assert relative_error(grad[rows].get(), want) <= GRADIENT_TOLERANCES[np.float16]


def test_losses_take_no_memory_of_the_logits_size():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import route

    L, E = 65536, 128
    logits = torch.randn(L, E, device="cuda", requires_grad=True)

    def step():
        weights, ids, sums = route(logits, 8, renormalize=False, sums=("softmax", "z"))
        counts = torch.bincount(ids.flatten(), minlength=E)
        (weights.square().sum() + (counts * sums.score_sums[0]).sum() / L + sums.z_sums.sum() / L).backward()

    step()
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 1.6 * logits.nbytes  # the gradient, (L, k) arrays, and partial sums


def test_torch_router_is_differentiable():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import route

    logits = torch.randn(100, 16, device="cuda", requires_grad=True)
    grad_weights = torch.randn(100, 4, device="cuda")
    weights, ids = route(logits, 4)
    (got,) = torch.autograd.grad(weights, logits, grad_weights)
    probabilities = logits.double().softmax(-1).gather(1, ids.long())
    (want,) = torch.autograd.grad(probabilities / probabilities.sum(-1, keepdim=True), logits, grad_weights.double())
    assert relative_error(got.cpu().numpy(), want.cpu().numpy()) <= GRADIENT_TOLERANCES[np.float32]
