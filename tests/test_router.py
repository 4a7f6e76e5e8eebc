"""The router's softmax and top-k on a GPU against the float64 reference."""

import ml_dtypes
import numpy as np
import pytest
from cases import relative_error

import moeblaze_cupy as mb
from moeblaze_cupy import reference

pytestmark = pytest.mark.gpu

KINDS = [("softmax_topk", True), ("softmax_topk", False), ("topk_softmax", True)]
SHAPES = [
    (1, 1, 1),
    (7, 8, 2),
    (100, 33, 33 - 1),
    (513, 128, 8),
    (1000, 1000, 32),
    (64, 1024, 8),
    (300, 40, 8),
    (0, 4, 2),
]

# fp32 sums over at most 1024 probabilities; 16-bit logits are exact inputs, their gradients are rounded on output.
WEIGHTS_TOLERANCE = 1e-6
GRADIENT_TOLERANCES = {np.float32: 1e-6, np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCES)
@pytest.mark.parametrize(("kind", "renormalize"), KINDS)
@pytest.mark.parametrize(("L", "E", "k"), SHAPES)
def test_router_matches_float64_reference(L, E, k, kind, renormalize, dtype):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(L + E)
    logits = rng.standard_normal((L, E)).astype(dtype)
    grad_weights = rng.standard_normal((L, k)).astype(np.float32)
    exact = logits.astype(np.float64)
    want_weights, want_ids = reference.route(exact, k, kind=kind, renormalize=renormalize)
    options = {"kind": kind, "renormalize": renormalize}
    want = reference.route_backward(grad_weights.astype(np.float64), exact, want_weights, want_ids, **options)

    weights, ids = mb.route(cupy.asarray(logits), k, **options)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    assert np.array_equal(ids.get(), want_ids)  # 16-bit logits tie often: ties go to the lower id
    assert relative_error(weights.get(), want_weights) <= WEIGHTS_TOLERANCE
    got = mb.route_backward(cupy.asarray(grad_weights), cupy.asarray(logits), weights, ids, **options)
    assert got.dtype == dtype
    if E == 1 or (k == 1 and renormalize):
        assert np.abs(got.get().astype(np.float64)).max() <= 1e-6  # the weights are constant 1
    else:
        assert relative_error(got.get(), want) <= GRADIENT_TOLERANCES[dtype]


def test_ties_zeros_and_special_values():
    cupy = pytest.importorskip("cupy")
    logits = np.array(
        [[1, 1, 1, 1], [0.0, -0.0, 0.0, -1], [-np.inf, 2, -np.inf, 1], [np.nan, 5, 6, 7], [np.inf, 0, 1, 2]], np.float32
    )
    weights, ids = (a.get() for a in mb.route(cupy.asarray(logits), 2))
    want_weights, want_ids = reference.route(logits.astype(np.float64), 2)
    assert np.array_equal(ids, want_ids)
    assert np.array_equal(np.isnan(weights), np.isnan(want_weights))
    finite = ~np.isnan(want_weights)
    assert relative_error(weights[finite], want_weights[finite]) <= WEIGHTS_TOLERANCE


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
