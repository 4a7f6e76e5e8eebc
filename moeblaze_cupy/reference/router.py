"""Choice of experts and their weights (paper section 2.1)."""

import numpy as np

from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype, softmax


def route(
    logits: HostArray, k: int, *, kind: str = "softmax_topk", renormalize: bool = True
) -> tuple[HostArray, HostArray]:
    """Choose k experts per token and their weights (Section 2.1: TopK(softmax(W_g x))).

    logits (L, E), any float dtype. Selection is on the logits themselves, largest first, ties to the lower id; -0.0
    equals +0.0; NaN counts as the largest, so a row with a NaN has NaN weights and still k valid, distinct ids.

    kind "softmax_topk": p = softmax over all E, weights = p at ids, divided by their sum if `renormalize`.
    kind "topk_softmax": softmax over the k chosen logits; `renormalize` has no effect.

    Returns weights (L, k) float32 (float64 if logits are float64) and ids (L, k) int32. Arguments are not checked.
    """
    scores = cast(logits, compute_dtype(logits))  # (L, E)
    order = np.lexsort((-scores, ~np.isnan(scores)), axis=-1)  # (L, E) NaN first, then by score; stable: ties by id
    ids = order[:, :k].astype(np.int32)  # (L, k)
    if kind == "topk_softmax":
        return softmax(np.take_along_axis(scores, ids, axis=1)), ids
    weights = np.take_along_axis(softmax(scores), ids, axis=1)  # (L, k)
    if renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)  # (L, k)
    return weights, ids


def route_backward(
    grad_weights: HostArray,
    logits: HostArray,
    weights: HostArray,
    ids: HostArray,
    *,
    kind: str = "softmax_topk",
    renormalize: bool = True,
) -> HostArray:
    """Gradient of `route` with respect to the logits.

    grad_weights (L, k) any float dtype; logits (L, E), weights (L, k) and ids (L, k) as `route` took and gave them. The
    choice of experts is piecewise constant and has no gradient. An id < 0 or >= E receives none.

    Returns (L, E) in logits' dtype. Arguments are not checked.
    """
    compute = compute_dtype(logits)
    w = cast(weights, compute)  # (L, k)
    g = cast(grad_weights, compute)  # (L, k)
    dot = (w * g).sum(axis=1, keepdims=True)  # (L, 1)
    over_selected = kind == "topk_softmax" or renormalize  # p / sum(p) over the chosen is the softmax over the chosen
    at_ids = w * (g - dot) if over_selected else g  # (L, k)
    token, slot = np.nonzero((ids >= 0) & (ids < logits.shape[1]))  # both (number of present slots,)
    grad = np.zeros(logits.shape, compute)  # (L, E)
    grad[token, ids[token, slot]] = at_ids[token, slot]
    if not over_selected:
        grad = softmax(cast(logits, compute)) * (grad - dot)  # (L, E)
    return cast(grad, logits.dtype)
