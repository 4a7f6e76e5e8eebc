"""The layer, forward and backward (paper sections 2.3, 3 and 5, Algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy.reference.dispatch import dispatch
from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype, erf
from moeblaze_cupy.structures import GRADIENTS, DispatchIndices, Gradients, SavedForBackward, is_gated


def _activate(u: HostArray, activation: str) -> tuple[HostArray, HostArray]:
    """act(u) and act'(u), elementwise; gelu is the exact erf form, relu'(0) = 0."""
    if activation in ("silu", "swiglu"):
        small = np.exp(-np.abs(u))  # never overflows
        sigmoid = np.where(u >= 0, 1, small) / (1 + small)
        return u * sigmoid, sigmoid * (1 + u * (1 - sigmoid))
    if activation in ("gelu", "geglu"):
        cdf = (1 + erf(u * 0.5**0.5)) / 2  # of the normal distribution
        return u * cdf, cdf + u * np.exp(-u * u / 2) * (2 * np.pi) ** -0.5
    return np.maximum(u, 0), cast(u > 0, u.dtype)


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
    total[expert] = cast(total[expert], term.dtype) + term


def _experts_with_tokens(index: DispatchIndices) -> Iterator[tuple[int, slice, HostArray]]:
    """Yields (expert, its rows in the lists of length L*k as a slice, its tokens (n,)); skips experts with none."""
    for expert in range(index.num_experts):
        start, stop = index.expert_token_offsets[expert : expert + 2]
        if start < stop:
            yield expert, slice(start, stop), index.expert_token_indices[start:stop]


def _first_layer(x_rows: HostArray, w1_parts: Sequence[HostArray], expert: int, store: np.dtype[Any]) -> HostArray:
    """x w1 of one expert's tokens: x_rows (n, d) -> [a | b] (n, 2h), or a (n, h) if not gated; rounded to `store`."""
    blocks = [x_rows @ cast(part[expert], x_rows.dtype) for part in w1_parts]  # each (n, h)
    return cast(cast(np.concatenate(blocks, axis=1), store), x_rows.dtype)  # (n, 2h) or (n, h)


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


def sum_rows(rows: HostArray, positions: HostArray) -> HostArray:
    """out[t] = sum over j, in order, of rows[positions[t, j]] where that is not below 0.

    rows (n, d) any float dtype, positions (L, P) int32 -> (L, d) in rows' dtype. Arguments are not checked.
    """
    compute = compute_dtype(rows)
    out = np.zeros((len(positions), rows.shape[1]), compute)  # (L, d)
    for column in positions.T:  # (L,)
        present = column >= 0  # (L,)
        out[present] += cast(rows[column[present]], compute)
    return cast(out, rows.dtype)


def moe_forward(
    x: HostArray,
    ids: HostArray,
    weights: HostArray,
    w1: HostArray | tuple[HostArray, HostArray],
    w2: HostArray,
    *,
    activation: str = "swiglu",
    save: str | None = "minimal",
    max_slots: int | None = None,
    spare_multiprocessors: int = 0,
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
    max_slots  rows of what is kept, R, in place of L*k; see dispatch
    spare_multiprocessors  for symmetry with the GPU backend: this backend has none

    Returns out (L, d) in x's dtype and SavedForBackward, or None if save is None. Arguments are not checked.
    """
    num_experts, h, d = w2.shape
    compute = compute_dtype(x)
    w1_parts = _parts(w1, activation)  # each (E, d, h)
    # Token dispatch: index lists only, no routed copy of x.
    index = dispatch(ids, num_experts, max_slots)
    num_rows = index.num_rows

    first_layer = y_swi = None
    if save in ("minimal", "paper"):
        first_layer = np.zeros((num_rows, h * len(w1_parts)), x.dtype)  # (R, 2h) or (R, h)
    if save == "paper":
        y_swi = np.zeros((num_rows, h), x.dtype)  # (R, h)

    # Expert computation. All experts' results are held at once because the sum over slots is in slot order.
    expert_out = np.empty((num_rows, d), compute)  # (R, d)
    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        ab = _first_layer(x_rows, w1_parts, expert, x.dtype)  # (n, 2h) or (n, h)
        a, b = _halves(ab, activation)  # (n, h), (n, h)
        y = cast(_activate(a, activation)[0] * b, x.dtype)  # (n, h)
        expert_out[rows] = cast(y, compute) @ cast(w2[expert], compute)  # (n, d)
        if first_layer is not None:
            first_layer[rows] = ab
        if y_swi is not None:
            y_swi[rows] = y

    # Output aggregation.
    out = cast(_sum_over_slots(expert_out, index, cast(weights, compute)), x.dtype)  # (L, d)
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
    spare_multiprocessors: int = 0,
) -> Gradients:
    """Gradients of `moe_forward` (Section 3.2, procedure FusedBackward of Algorithm 1).

    grad_out    (L, d) any float dtype
    saved       what moe_forward returned; any save policy
    needs       the gradients to compute, names from GRADIENTS; the work for the others is skipped
    keep_saved  for symmetry with the GPU backend: this backend never consumes `saved`
    accumulate  by name, "w1" or "w2", what that gradient is added to, in the weight's form and any dtype and memory
                order; nothing of experts with no token is touched
    spare_multiprocessors  as of moe_forward

    Returns Gradients, None where not in `needs`: x (L, d); weights (L, k), 0 for absent slots; w1 and w2 in the form
    and memory order of the weights, exactly zero for experts with no token, or what `accumulate` names. Each has the
    dtype of its input. Arguments are not checked.
    """
    x, w2, index, activation = saved.x, saved.w2, saved.index, saved.activation
    compute = compute_dtype(x)
    num_rows = index.num_rows
    w1_parts = _parts(saved.w1, activation)  # each (E, d, h)
    buffers = accumulate or {}
    grad_w1: Any = None
    grad_w2: Any = None
    if "w1" in needs:
        grad_w1 = buffers["w1"] if "w1" in buffers else _zeros_like(saved.w1)  # as w1
    if "w2" in needs:
        grad_w2 = buffers["w2"] if "w2" in buffers else _zeros_like(w2)  # (E, h, d)
    grad_w1_parts = _parts(grad_w1, activation) if "w1" in needs else ()  # views of grad_w1, each (E, d, h)
    grad_x_rows: Any = np.empty((num_rows, x.shape[1]), compute) if "x" in needs else None  # (R, d)
    grad_row_weights = np.empty(num_rows, compute)  # (R,)
    present = index.token_index_map >= 0  # (L, k)
    position = index.token_index_map[present]  # (offsets[E],)
    row_weights = np.empty(num_rows, compute)  # (R,) the router weights in expert order
    row_weights[position] = saved.weights[present]

    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        if saved.first_layer is None:
            ab = _first_layer(x_rows, w1_parts, expert, x.dtype)  # (n, 2h) or (n, h)
        else:
            ab = cast(saved.first_layer[rows], compute)  # (n, 2h) or (n, h)
        a, b = _halves(ab, activation)  # (n, h), (n, h)
        act, slope = _activate(a, activation)  # (n, h), (n, h) line 24
        y = cast(act * b, x.dtype) if saved.y_swi is None else saved.y_swi[rows]  # (n, h)
        y = cast(y, compute)  # (n, h)

        # 1. Expert summation backward: the routed gradient is gathered by token.
        grad_rows = cast(grad_out[tokens], compute)  # (n, d) still without the router weight
        scale = row_weights[rows, None]  # (n, 1)

        # 2. Expert computation backward.
        if "w2" in needs:
            _add(grad_w2, expert, (scale * y).T @ grad_rows)  # (h, d) line 18
        if not {"x", "weights", "w1"}.intersection(needs):
            continue
        grad_y = grad_rows @ cast(w2[expert], compute).T  # (n, h) line 20, still without the router weight
        # The gradient of a router weight is <grad, y w2> = <grad w2^T, y>: no need for the expert's result y w2.
        grad_row_weights[rows] = (grad_y * y).sum(axis=1)  # (n,)
        grad_y *= scale  # (n, h)
        grad_ab = (grad_y * b * slope, grad_y * act)[: len(w1_parts)]  # each (n, h) lines 26 and 28
        if "w1" in needs:
            for grad_part, grad_half in zip(grad_w1_parts, grad_ab, strict=True):
                _add(grad_part, expert, x_rows.T @ grad_half)  # (d, h) line 29
        if "x" in needs:
            pairs = zip(grad_ab, w1_parts, strict=True)
            grad_x_rows[rows] = sum(half @ cast(part[expert], compute).T for half, part in pairs)  # (n, d) line 30

    # 3. Token gradient accumulation.
    grad_x = cast(_sum_over_slots(grad_x_rows, index), x.dtype) if "x" in needs else None  # (L, d)
    grad_weights = np.zeros_like(saved.weights) if "weights" in needs else None  # (L, k)
    if grad_weights is not None:
        grad_weights[present] = grad_row_weights[position]
    return Gradients(x=grad_x, weights=grad_weights, w1=grad_w1, w2=grad_w2)
