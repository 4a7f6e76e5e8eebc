"""The layer on the CPU, in NumPy: the specification of the layer and the oracle of all tests.

Letters: L tokens, k slots (experts per token), E experts, d model width, h expert hidden width, n slots of the expert
at hand. The paper's W1, W2, W3 are here the gate half and the up half of `w1`, and `w2`.

Arithmetic is float64 if x (or the logits) is float64, else float32. What the layer stores (first layer, y_swi,
results) is rounded to x's dtype, and whatever follows a stored value is computed from the rounded one, stored or not:
so all save policies give the same gradients.

No function here checks its arguments: the package's public functions do that before they call this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import launch_config
from moeblaze_cupy.structures import GRADIENTS, DispatchIndices, Gradients, SavedForBackward, is_gated

HostArray = np.ndarray[Any, Any]


def _compute_dtype(array: HostArray) -> np.dtype[Any]:
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def _cast(array: HostArray, dtype: Any) -> HostArray:
    return array.astype(dtype, copy=False)


def _softmax(scores: HostArray) -> HostArray:
    with np.errstate(invalid="ignore"):  # inf - inf: a row with an infinite or NaN maximum is NaN, as intended
        exp: HostArray = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: HostArray = exp.sum(axis=-1, keepdims=True)
    return exp / total


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
    scores = _cast(logits, _compute_dtype(logits))  # (L, E)
    order = np.lexsort((-scores, ~np.isnan(scores)), axis=-1)  # (L, E) NaN first, then by score; stable: ties by id
    ids = order[:, :k].astype(np.int32)  # (L, k)
    if kind == "topk_softmax":
        return _softmax(np.take_along_axis(scores, ids, axis=1)), ids
    weights = np.take_along_axis(_softmax(scores), ids, axis=1)  # (L, k)
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
    compute = _compute_dtype(logits)
    w = _cast(weights, compute)  # (L, k)
    g = _cast(grad_weights, compute)  # (L, k)
    dot = (w * g).sum(axis=1, keepdims=True)  # (L, 1)
    over_selected = kind == "topk_softmax" or renormalize  # p / sum(p) over the chosen is the softmax over the chosen
    at_ids = w * (g - dot) if over_selected else g  # (L, k)
    token, slot = np.nonzero((ids >= 0) & (ids < logits.shape[1]))  # both (number of present slots,)
    grad = np.zeros(logits.shape, compute)  # (L, E)
    grad[token, ids[token, slot]] = at_ids[token, slot]
    if not over_selected:
        grad = _softmax(_cast(logits, compute)) * (grad - dot)  # (L, E)
    return _cast(grad, logits.dtype)


def dispatch(ids: HostArray, num_experts: int) -> DispatchIndices:
    """Build the index lists of Section 4.1 in the three steps of Section 4.2.

    ids (L, k) int32 or int64, contiguous: the experts of each token. An id < 0 or >= E is "no expert in this slot": its
    token_index_map entry is -1, and the end of expert_token_indices is filled with -1. A token that names an expert
    twice has two slots there. Within an expert the order is by token, then slot.

    Returns DispatchIndices, all int32; row_tiles is -1 past its last tile. token_expert_indices is a view of int32 ids;
    of int64 ids it is an int32 copy in which absent slots are -1. Arguments are not checked.
    """
    k = ids.shape[1]
    token_expert_indices = ids.reshape(-1)  # (L*k,)
    if ids.dtype != np.int32:
        present = (token_expert_indices >= 0) & (token_expert_indices < num_experts)  # (L*k,)
        token_expert_indices = np.where(present, token_expert_indices, -1).astype(np.int32)  # (L*k,)
    num_slots = token_expert_indices.size

    # Step 1, dense token-expert map, one column (expert) at a time and a row per slot, not per token: a token may
    # name an expert twice. Only the rows that are set are kept, in order.
    slots_of_expert = [np.flatnonzero(token_expert_indices == expert) for expert in range(num_experts)]  # E x (n,)

    # Step 2, expert lengths and their exclusive prefix sum.
    expert_token_offsets = np.zeros(num_experts + 1, np.int32)  # (E+1,)
    np.cumsum([slots.size for slots in slots_of_expert], out=expert_token_offsets[1:])

    # Step 3, route indices to gates: a slot's position (the location map) is its expert's offset plus its rank there.
    slot_at_position = np.concatenate(slots_of_expert)  # (offsets[E],)
    num_routed = slot_at_position.size
    expert_token_indices = np.full(num_slots, -1, np.int32)  # (L*k,)
    expert_token_indices[:num_routed] = slot_at_position // k
    token_index_map = np.full(num_slots, -1, np.int32)  # (L*k,)
    token_index_map[slot_at_position] = np.arange(num_routed)

    # The GEMMs' row tiles, and the order in which weight gradients take the experts.
    tile_rows, offsets = launch_config.TILE_ROWS, expert_token_offsets
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], tile_rows)]
    places, size = launch_config.index_lists(*ids.shape, num_experts)
    index = DispatchIndices(
        np.full(size, -1, np.int32), token_expert_indices.reshape(ids.shape), places, num_experts, ids.dtype != np.int32
    )
    index.expert_token_indices[:] = expert_token_indices
    index.expert_token_offsets[:] = expert_token_offsets
    index.token_index_map[:] = token_index_map.reshape(ids.shape)
    index.row_tiles[: 1 + len(tiles)] = [(len(tiles), tile_rows), *tiles]
    index.experts_by_load[:] = np.argsort(-np.diff(expert_token_offsets), kind="stable")
    return index


# W. J. Cody, Rational Chebyshev approximations for the error function, Math. Comp. 23 (1969): numerator and
# denominator, highest power first, of erf(x) / x in x^2 for |x| <= 0.46875, and of exp(x^2) erfc(x) in x above.
# fmt: off
_ERF_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560, 113.864154151050156, 377.485237685302021, 3209.37758913846947),
    (1.0, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)
_ERFC_LARGE = (
    (2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295, 298.635138197400131,
     881.952221241769090, 1712.04761263407058, 2051.07837782607147, 1230.33935479799725),
    (1.0, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019, 3290.79923573345963,
     4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)
# fmt: on


def _polynomial(coefficients: Sequence[float], x: HostArray) -> HostArray:
    total = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total *= x  # in place: fresh temporaries would take most of the time
        total += c
    return total


def erf(x: HostArray) -> HostArray:
    """Error function of a float32 or float64 array, in its dtype; absolute error < 1e-15 in float64.

    Cody's second formula is for |x| <= 4. It serves up to 6 here, where erfc < 2e-8 no longer needs all its digits,
    and beyond 6 erf is 1 to the last bit.
    """
    magnitude = np.minimum(np.abs(x), 6)
    small = np.minimum(magnitude, 0.46875)  # each formula sees only its own range: no overflow in the other
    small *= small
    near = x * _polynomial(_ERF_SMALL[0], small) / _polynomial(_ERF_SMALL[1], small)
    tail = _polynomial(_ERFC_LARGE[0], magnitude) / _polynomial(_ERFC_LARGE[1], magnitude)
    tail *= np.exp(-magnitude * magnitude)
    return np.where(magnitude <= 0.46875, near, np.copysign(1 - tail, x))


def _activate(u: HostArray, activation: str) -> tuple[HostArray, HostArray]:
    """act(u) and act'(u), elementwise; gelu is the exact erf form, relu'(0) = 0."""
    if activation in ("silu", "swiglu"):
        small = np.exp(-np.abs(u))  # never overflows
        sigmoid = np.where(u >= 0, 1, small) / (1 + small)
        return u * sigmoid, sigmoid * (1 + u * (1 - sigmoid))
    if activation in ("gelu", "geglu"):
        cdf = (1 + erf(u * 0.5**0.5)) / 2  # of the normal distribution
        return u * cdf, cdf + u * np.exp(-u * u / 2) * (2 * np.pi) ** -0.5
    return np.maximum(u, 0), _cast(u > 0, u.dtype)


def _parts(w1: Any, activation: str) -> tuple[HostArray, ...]:
    """The (E, d, h) blocks of w1 as views: (gate, up) if gated, else (w1,)."""
    if isinstance(w1, (tuple, list)):
        return tuple(w1)
    return tuple(np.split(w1, 2, axis=2)) if is_gated(activation) else (w1,)


def _zeros_like(w: Any) -> Any:
    """Zeros of w's form, dtype and memory order: row-major, or the transposed view if w is one."""
    if isinstance(w, (tuple, list)):
        return tuple(_zeros_like(part) for part in w)
    if w.strides[1] < w.strides[2]:
        return _zeros_like(w.swapaxes(1, 2)).swapaxes(1, 2)
    return np.zeros(w.shape, w.dtype)


def _add(total: HostArray, expert: int, term: HostArray) -> None:
    """total[expert] += term, in term's dtype and rounded once."""
    total[expert] = _cast(total[expert], term.dtype) + term


def _experts_with_tokens(index: DispatchIndices) -> Iterator[tuple[int, slice, HostArray]]:
    """Yields (expert, its rows in the lists of length L*k as a slice, its tokens (n,)); skips experts with none."""
    for expert in range(index.num_experts):
        start, stop = index.expert_token_offsets[expert : expert + 2]
        if start < stop:
            yield expert, slice(start, stop), index.expert_token_indices[start:stop]


def _first_layer(x_rows: HostArray, w1_parts: Sequence[HostArray], expert: int, store: np.dtype[Any]) -> HostArray:
    """x w1 of one expert's tokens: x_rows (n, d) -> [a | b] (n, 2h), or a (n, h) if not gated; rounded to `store`."""
    blocks = [x_rows @ _cast(part[expert], x_rows.dtype) for part in w1_parts]  # each (n, h)
    return _cast(_cast(np.concatenate(blocks, axis=1), store), x_rows.dtype)  # (n, 2h) or (n, h)


def _halves(ab: HostArray, activation: str) -> Sequence[Any]:
    """a, b of y_swi = act(a) * b; without a gate b is 1."""
    return np.split(ab, 2, axis=1) if is_gated(activation) else (ab, 1)


def _sum_over_slots(rows: HostArray, index: DispatchIndices, scale: HostArray | None = None) -> HostArray:
    """out[t] = sum over present slots j, in slot order, of scale[t, j] * rows[token_index_map[t, j]].

    rows (L*k, d), scale (L, k) or None for 1 -> (L, d).
    """
    out = np.zeros((index.num_tokens, rows.shape[1]), rows.dtype)  # (L, d)
    for j in range(index.k):
        present = index.token_index_map[:, j] >= 0  # (L,)
        routed = rows[index.token_index_map[present, j]]  # (m, d) m tokens have an expert in slot j
        out[present] += routed if scale is None else scale[present, j, None] * routed
    return out


def moe_forward(
    x: HostArray,
    ids: HostArray,
    weights: HostArray,
    w1: HostArray | tuple[HostArray, HostArray],
    w2: HostArray,
    *,
    activation: str = "swiglu",
    save: str | None = "minimal",
) -> tuple[HostArray, SavedForBackward | None]:
    """out[t] = sum over slots j, in slot order, of weights[t, j] * E_{ids[t, j]}(x[t]) (Sections 2.3 and 3.1).

    E_e(x) = (act(x w1_gate[e]) * (x w1_up[e])) w2[e] if gated, else act(x w1[e]) w2[e] (Sections 2.2 and 5.1).

    x        (L, d) float64, float32, float16 or bfloat16
    ids      (L, k) int32 or int64; < 0 or >= E is no expert in this slot, which then adds nothing
    weights  (L, k) any float dtype
    w1       (E, d, 2h), gate columns then up columns, or a pair (gate, up) of (E, d, h); (E, d, h) if not gated
    w2       (E, h, d); w1 and w2 in any memory order, used in place
    save     what to keep for backward: "minimal" the first layer, "paper" also y_swi (Algorithm 1, line 11),
             "recompute" neither, None nothing at all

    Returns out (L, d) in x's dtype and SavedForBackward, or None if save is None. Arguments are not checked.
    """
    num_experts, h, d = w2.shape
    compute = _compute_dtype(x)
    w1_parts = _parts(w1, activation)  # each (E, d, h)
    first_layer = y_swi = None
    if save in ("minimal", "paper"):
        first_layer = np.zeros((ids.size, h * len(w1_parts)), x.dtype)  # (L*k, 2h) or (L*k, h)
    if save == "paper":
        y_swi = np.zeros((ids.size, h), x.dtype)  # (L*k, h)

    # Token dispatch: index lists only, no routed copy of x.
    index = dispatch(ids, num_experts)

    # Expert computation. All experts' results are held at once because the sum over slots is in slot order.
    expert_out = np.empty((ids.size, d), compute)  # (L*k, d)
    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = _cast(x[tokens], compute)  # (n, d) gathered on the fly
        ab = _first_layer(x_rows, w1_parts, expert, x.dtype)  # (n, 2h) or (n, h)
        a, b = _halves(ab, activation)  # (n, h), (n, h)
        y = _cast(_activate(a, activation)[0] * b, x.dtype)  # (n, h)
        expert_out[rows] = _cast(y, compute) @ _cast(w2[expert], compute)  # (n, d)
        if first_layer is not None:
            first_layer[rows] = ab
        if y_swi is not None:
            y_swi[rows] = y

    # Output aggregation.
    out = _cast(_sum_over_slots(expert_out, index, _cast(weights, compute)), x.dtype)  # (L, d)
    if save is None:
        return out, None
    return out, SavedForBackward(x, weights, w1, w2, index, first_layer, y_swi, activation, save)


def moe_backward(
    grad_out: HostArray,
    saved: SavedForBackward,
    *,
    needs: Sequence[str] = GRADIENTS,
    keep_saved: bool = True,
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Gradients of `moe_forward` (Section 3.2, procedure FusedBackward of Algorithm 1).

    grad_out    (L, d) any float dtype
    saved       what moe_forward returned; any save policy
    needs       the gradients to compute, names from GRADIENTS; the work for the others is skipped
    keep_saved  for symmetry with the GPU backend: this backend never consumes `saved`
    accumulate  by name, "w1" or "w2", what that gradient is added to, in the weight's form and any dtype and memory
                order; nothing of experts with no token is touched

    Returns Gradients, None where not in `needs`: x (L, d); weights (L, k), 0 for absent slots; w1 and w2 in the form
    and memory order of the weights, exactly zero for experts with no token, or what `accumulate` names. Each has the
    dtype of its input. Arguments are not checked.
    """
    x, w2, index, activation = saved.x, saved.w2, saved.index, saved.activation
    compute = _compute_dtype(x)
    num_slots = index.token_expert_indices.size
    w1_parts = _parts(saved.w1, activation)  # each (E, d, h)
    buffers = accumulate or {}
    grad_w1: Any = None
    grad_w2: Any = None
    if "w1" in needs:
        grad_w1 = buffers["w1"] if "w1" in buffers else _zeros_like(saved.w1)  # as w1
    if "w2" in needs:
        grad_w2 = buffers["w2"] if "w2" in buffers else _zeros_like(w2)  # (E, h, d)
    grad_w1_parts = _parts(grad_w1, activation) if "w1" in needs else ()  # views of grad_w1, each (E, d, h)
    grad_x_rows: Any = np.empty((num_slots, x.shape[1]), compute) if "x" in needs else None  # (L*k, d)
    grad_row_weights = np.empty(num_slots, compute)  # (L*k,)
    present = index.token_index_map >= 0  # (L, k)
    position = index.token_index_map[present]  # (offsets[E],)
    row_weights = np.empty(num_slots, compute)  # (L*k,) the router weights in expert order
    row_weights[position] = saved.weights[present]

    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = _cast(x[tokens], compute)  # (n, d) gathered on the fly
        if saved.first_layer is None:
            ab = _first_layer(x_rows, w1_parts, expert, x.dtype)  # (n, 2h) or (n, h)
        else:
            ab = _cast(saved.first_layer[rows], compute)  # (n, 2h) or (n, h)
        a, b = _halves(ab, activation)  # (n, h), (n, h)
        act, slope = _activate(a, activation)  # (n, h), (n, h) line 24
        y = _cast(act * b, x.dtype) if saved.y_swi is None else saved.y_swi[rows]  # (n, h)
        y = _cast(y, compute)  # (n, h)

        # 1. Expert summation backward: the routed gradient is gathered by token.
        grad_rows = _cast(grad_out[tokens], compute)  # (n, d) still without the router weight
        scale = row_weights[rows, None]  # (n, 1)

        # 2. Expert computation backward.
        if "w2" in needs:
            _add(grad_w2, expert, (scale * y).T @ grad_rows)  # (h, d) line 18
        if not {"x", "weights", "w1"}.intersection(needs):
            continue
        grad_y = grad_rows @ _cast(w2[expert], compute).T  # (n, h) line 20, still without the router weight
        # The gradient of a router weight is <grad, y w2> = <grad w2^T, y>: no need for the expert's result y w2.
        grad_row_weights[rows] = (grad_y * y).sum(axis=1)  # (n,)
        grad_y *= scale  # (n, h)
        grad_ab = (grad_y * b * slope, grad_y * act)[: len(w1_parts)]  # each (n, h) lines 26 and 28
        if "w1" in needs:
            for grad_part, grad_half in zip(grad_w1_parts, grad_ab, strict=True):
                _add(grad_part, expert, x_rows.T @ grad_half)  # (d, h) line 29
        if "x" in needs:
            pairs = zip(grad_ab, w1_parts, strict=True)
            grad_x_rows[rows] = sum(half @ _cast(part[expert], compute).T for half, part in pairs)  # (n, d) line 30

    # 3. Token gradient accumulation.
    grad_x = _cast(_sum_over_slots(grad_x_rows, index), x.dtype) if "x" in needs else None  # (L, d)
    grad_weights = np.zeros_like(saved.weights) if "weights" in needs else None  # (L, k)
    if grad_weights is not None:
        grad_weights[present] = grad_row_weights[position]
    return Gradients(x=grad_x, weights=grad_weights, w1=grad_w1, w2=grad_w2)
