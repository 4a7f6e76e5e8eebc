"""Choice of experts, their weights and the sums that balancing losses are made of (paper section 2.1)."""

from typing import Any

import numpy as np

from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype, sigmoid, softmax

NORMALIZER = 1e-20  # added to the sum of a token's sigmoid or sqrt_softplus scores to make shares of it


def softplus(x: HostArray) -> HostArray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def scores_of(x: HostArray, score: str) -> HostArray:
    """Returns s = f(x) of logits (L, E)."""
    if score == "softmax":
        return softmax(x)
    if score == "sigmoid":
        return sigmoid(x)
    if score == "sqrt_softplus":  # softplus(x) is exp(x) to the last digit there, and would underflow
        return np.where(x < -40, np.exp(np.minimum(x, 0) / 2), np.sqrt(softplus(x)))
    return np.maximum(x, 0) if score == "relu" else x


def log_slope(x: HostArray, score: str) -> HostArray:
    """Returns d log s / dx: "sigmoid" sigma(-x), "sqrt_softplus" sigma(x) / (2 softplus(x)), which tends to 1/2."""
    if score == "sigmoid":
        return sigmoid(-x)
    return np.where(x < -40, 0.5, sigmoid(x) / (2 * np.maximum(softplus(x), 1e-30))).astype(x.dtype)


def _shares(x: HostArray, score: str) -> HostArray:
    """Returns q (L, E): each token's shares of all experts, the summand of score_sums."""
    scores = scores_of(x, score)
    return scores if score == "softmax" else scores / (scores.sum(axis=1, keepdims=True) + NORMALIZER)


def _log_sum_exp(x: HostArray) -> HostArray:
    largest = x.max(axis=1)
    lse: HostArray = largest + np.log(np.exp(x - largest[:, None]).sum(axis=1))
    return lse


def _below_largest(x: HostArray, p: HostArray) -> tuple[HostArray, HostArray]:
    """Returns z (L, E), the logits less their row's largest, and the sums of p z (L,). p: their softmax.

    Entropies are computed from z, as the logits would cancel. An expert without probability adds nothing, even at -inf.
    """
    z = np.where(p == 0, 0, x - x.max(axis=1, keepdims=True))
    return z, (p * z).sum(axis=1)


def _entropies(x: HostArray) -> HostArray:
    """Returns (L,): sum of p (lse - x), as log of the sum of exp(z) less the mean z. Neither term is negative."""
    p = softmax(x)
    _, mean = _below_largest(x, p)
    entropies: HostArray = -np.log(p.max(axis=1)) - mean  # the largest logit has z = 0, so its p is 1 / sum of exp(z)
    return entropies


def _descending(keys: HostArray, last: HostArray | None = None) -> HostArray:
    """Returns the order of each row's keys, largest first: NaN before all, equal ones by id, `last` ones at the end."""
    by = (-keys, ~np.isnan(keys)) if last is None else (-keys, ~np.isnan(keys), last)
    return np.lexsort(by, axis=-1)


def _keys(x: HostArray, score: str, bias: HostArray | None, bias_on: str) -> HostArray:
    """Returns the keys that rank experts (L, E). Scores rise with logits, which have more digits and so rank alone."""
    if bias is None:
        return x
    return (x if bias_on == "logits" else scores_of(x, score)) + cast(bias, x.dtype)


def _outside_of_groups(ranked_by: HostArray, groups: tuple[int, int, int]) -> HostArray:
    """Returns (L, E) bool: experts outside the `kept` groups with the largest sums of their `top` largest entries."""
    n, kept, top = groups
    L, E = ranked_by.shape
    by_group = ranked_by.reshape(L, n, E // n)
    largest = np.take_along_axis(by_group, _descending(by_group)[..., :top], axis=2)
    order = _descending(largest.sum(axis=2))  # (L, n)
    outside = np.ones((L, n), bool)
    np.put_along_axis(outside, order[:, :kept], False, axis=1)
    return np.repeat(outside, E // n, axis=1)


def _select(
    x: HostArray,
    k: int,
    score: str,
    bias: HostArray | None,
    bias_on: str,
    groups: tuple[int, int, int] | None,
    top_p: float | None,
    threshold: float | None,
) -> HostArray:
    """Returns ids (L, k) int32, -1 for slots that top_p or threshold empties."""
    keys = _keys(x, score, bias, bias_on)
    outside = None
    if groups is not None:  # the largest key of a group is at its largest score; sums need the scores themselves
        ranked_by = scores_of(x, score) if bias is None and groups[2] > 1 else keys
        outside = _outside_of_groups(ranked_by, groups)
    ids = _descending(keys, outside)[:, :k].astype(np.int32)  # (L, k)
    stays = np.ones(ids.shape, bool)
    if top_p is not None:
        mass = np.take_along_axis(softmax(x), ids, axis=1).cumsum(axis=1)
        stays[:, 1:] &= ~(mass[:, :-1] >= top_p)  # a NaN stays, so that it shows
    if threshold is not None:
        compared = scores_of(x, score) if bias is None else keys
        stays &= ~(np.take_along_axis(compared, ids, axis=1) < threshold)
    return np.where(np.logical_and.accumulate(stays, axis=1), ids, np.int32(-1))


def _owners(offsets: HostArray, number: int, limit: int) -> HostArray:
    """Returns (number,): the i with offsets[i] <= position < offsets[i + 1], -1 if there is none."""
    found = np.searchsorted(np.clip(offsets, 0, number), np.arange(number), side="right") - 1
    return np.where(found < limit, found, -1)


def _slots(ids: HostArray, L: int, E: int, token_offsets: HostArray | None) -> tuple[HostArray, HostArray, HostArray]:
    """Returns the token and the id of each slot, flat, and whether it has both; -1 for one outside of the offsets."""
    flat = ids.reshape(-1)
    token = np.repeat(np.arange(L), ids.shape[1]) if token_offsets is None else _owners(token_offsets, len(ids), L)
    return token, flat, (flat >= 0) & (flat < E) & (token >= 0)


def _sequences(L: int, sequences: Any, token_mask: HostArray | None) -> tuple[int, HostArray]:
    """Returns the number of sequences, and the sequence of each token (L,), -1 for tokens that are in none."""
    if isinstance(sequences, np.ndarray):
        number = len(sequences) - 1
        owners = _owners(sequences, L, number)
    else:
        number, owners = sequences, np.arange(L) // max(1, L // sequences)
    return number, owners if token_mask is None else np.where(token_mask, owners, -1)


def _per_token(values: HostArray, token: HostArray, L: int, add: Any = np.add, start: float = 0) -> HostArray:
    """Returns the sum (or np.maximum) of each token's pairs, at each of its pairs."""
    total = np.full(L, start, values.dtype)
    add.at(total, token, values)
    return total[token]


def route(
    logits: HostArray,
    k: int | None = None,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    bias: HostArray | None = None,
    bias_on: str = "scores",
    groups: tuple[int, int, int] | None = None,
    ids: HostArray | None = None,
    token_offsets: HostArray | None = None,
    token_mask: HostArray | None = None,
    top_p: float | None = None,
    threshold: float | None = None,
    sums: tuple[str, ...] = (),
    sequences: Any = 1,
) -> tuple[Any, ...]:
    """Does what `moeblaze_cupy.route` does, which describes the arguments. They are not checked here.

    Returns weights and ids, and with `sums` a third result: (score_sums, z_sums, entropy_sums), each None if unasked.
    """
    x = cast(logits, compute_dtype(logits))  # (L, E)
    L, E = x.shape
    if ids is None:
        assert k is not None
        ids = _select(x, k, score, bias, bias_on, groups, top_p, threshold)
    token, flat, present = _slots(ids, L, E, token_offsets)
    if token_mask is not None and L:
        present &= np.asarray(token_mask, bool)[token]
    owner, chosen = token[present], flat[present]
    if score == "softmax" and renormalize:  # p / sum(p) over the chosen is the softmax over the chosen
        values = x[owner, chosen]
        values = np.exp(values - _per_token(values, owner, L, np.maximum, -np.inf))
        values = values / _per_token(values, owner, L)
    else:
        values = scores_of(x, score)[owner, chosen]
        if renormalize:
            values = values / (_per_token(values, owner, L) + x.dtype.type(eps))
    weights = np.zeros(flat.shape, x.dtype)
    weights[present] = values * x.dtype.type(scale)
    kept = np.where(present, flat, -1).astype(np.int32).reshape(ids.shape)
    results = weights.reshape(ids.shape), kept
    return (*results, _sums(x, sums, *_sequences(L, sequences, token_mask))) if sums else results


def _sums(x: HostArray, sums: tuple[str, ...], number: int, sequence: HostArray) -> tuple[HostArray | None, ...]:
    """Returns the sums, added in float64."""
    inside = np.flatnonzero(sequence >= 0)
    x, sequence = x[inside], sequence[inside]

    def added(values: HostArray) -> HostArray:
        total = np.zeros((number, *values.shape[1:]))
        np.add.at(total, sequence, values)
        return total.astype(x.dtype)

    names = [name for name in sums if name not in ("z", "entropy")]
    score_sums = added(_shares(x, names[0])) if names else None
    z_sums = added(_log_sum_exp(x) ** 2) if "z" in sums else None
    entropy_sums = added(_entropies(x)) if "entropy" in sums else None
    return score_sums, z_sums, entropy_sums


def route_backward(
    grad_weights: HostArray,
    logits: HostArray,
    weights: HostArray,
    ids: HostArray,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    bias: HostArray | None = None,
    bias_on: str = "scores",
    groups: tuple[int, int, int] | None = None,
    token_offsets: HostArray | None = None,
    token_mask: HostArray | None = None,
    top_p: float | None = None,
    threshold: float | None = None,
    sums: tuple[str, ...] = (),
    sequences: Any = 1,
    grad_score_sums: HostArray | None = None,
    grad_z_sums: HostArray | None = None,
    grad_entropy_sums: HostArray | None = None,
) -> HostArray:
    """Returns the gradient of `route` with respect to the logits, as `moeblaze_cupy.route_backward` does.

    With g the gradient of the weights w and dot = sum of g w over a token's slots, a renormalised weight's score has
    the logarithmic gradient h = w (g - dot / scale), another's h = w g. Arguments are not checked.
    """
    compute = compute_dtype(logits)
    x = cast(logits, compute)
    L, E = x.shape
    token, flat, present = _slots(ids, L, E, token_offsets)
    owner, chosen = token[present], flat[present]
    w, g = (cast(array.reshape(-1)[present], compute) for array in (weights, grad_weights))
    dots, grad = np.zeros(L, compute), np.zeros((L, E), compute)
    wide = compute.type
    np.add.at(dots, owner, w * g)
    dot, at_ids = dots[owner], x[owner, chosen]
    if score in ("identity", "relu"):
        at_chosen = wide(scale) * g
        if renormalize:
            total = _per_token(scores_of(at_ids, score), owner, L) + wide(eps)
            at_chosen = (at_chosen - dot) / total
        if score == "relu":
            at_chosen = np.where(at_ids > 0, at_chosen, 0)
    else:
        at_chosen = w * (g - dot / wide(scale)) if renormalize else w * g
        if score != "softmax":
            at_chosen = at_chosen * log_slope(at_ids, score)
    np.add.at(grad, (owner, chosen), at_chosen)
    if score == "softmax" and not renormalize:
        grad -= np.where(dots[:, None] == 0, 0, softmax(x) * dots[:, None])  # also of a NaN without a slot
    _, sequence = _sequences(L, sequences, token_mask)
    inside = np.flatnonzero(sequence >= 0)
    grad[inside] += _sums_backward(x[inside], sums, sequence[inside], grad_score_sums, grad_z_sums, grad_entropy_sums)
    return cast(grad, logits.dtype)


def _sums_backward(
    x: HostArray,
    sums: tuple[str, ...],
    sequence: HostArray,
    grad_score_sums: HostArray | None,
    grad_z_sums: HostArray | None,
    grad_entropy_sums: HostArray | None,
) -> HostArray:
    grad = np.zeros_like(x)
    if grad_score_sums is not None:
        (name,) = (name for name in sums if name not in ("z", "entropy"))
        v, q = cast(grad_score_sums, x.dtype)[sequence], _shares(x, name)
        grad += q * (v - (q * v).sum(axis=1, keepdims=True)) * (1 if name == "softmax" else log_slope(x, name))
    if grad_z_sums is not None:
        grad += softmax(x) * (2 * cast(grad_z_sums, x.dtype)[sequence] * _log_sum_exp(x))[:, None]
    if grad_entropy_sums is not None:
        p = softmax(x)
        z, mean = _below_largest(x, p)
        grad -= p * (z - mean[:, None]) * cast(grad_entropy_sums, x.dtype)[sequence][:, None]
    return grad
