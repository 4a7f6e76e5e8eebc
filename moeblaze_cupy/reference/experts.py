"""The layer, forward and backward (paper sections 2.3, 3 and 5, Algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy.reference.activations import activate
from moeblaze_cupy.reference.dispatch import dispatch
from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype
from moeblaze_cupy.structures import (
    Activation,
    DispatchIndices,
    Gradients,
    SavedForBackward,
    activation_of,
    is_gated,
)


def _parts(w: Any, activation: Activation, gate_up: str) -> tuple[HostArray, ...]:
    """The blocks of w1 (E, d, 2h), or of b1 (E, 2h), as views with h columns: (gate, up) if gated, else (w,)."""
    if isinstance(w, (tuple, list)):
        return tuple(w)
    if gate_up == "interleaved":
        return w[..., 0::2], w[..., 1::2]
    return tuple(np.split(w, 2, axis=-1)) if is_gated(activation) else (w,)


def _zeros_like(w: Any) -> Any:
    """Zeros of w's form, dtype and memory order: row-major, or the transposed view if w is one."""
    if isinstance(w, (tuple, list)):
        return tuple(_zeros_like(part) for part in w)
    if w.ndim == 3 and w.strides[1] < w.strides[2] and w.shape[2] > 1:  # as `checks.weight_order`
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


def _first_layer(
    x_rows: HostArray,
    w1_parts: Sequence[HostArray],
    b1_parts: Sequence[HostArray],
    expert: int,
    store: np.dtype[Any],
    gate_up: str,
) -> HostArray:
    """x w1 + b1 of one expert's tokens: x_rows (n, d) -> (n, 2h) in the order of w1's columns, or (n, h) if not gated.

    Rounded to `store`. b1_parts is empty without a bias.
    """
    compute = x_rows.dtype
    blocks = [x_rows @ cast(part[expert], compute) for part in w1_parts]  # each (n, h)
    for block, part in zip(blocks, b1_parts, strict=False):
        block += cast(part[expert], compute)
    return cast(cast(_side_by_side(blocks, gate_up), store), compute)


def _side_by_side(halves: Sequence[HostArray], gate_up: str) -> HostArray:
    """(n, h) each -> (n, 2h), or what there is without a gate."""
    if gate_up == "interleaved":
        return np.stack(halves, axis=2).reshape(len(halves[0]), -1)
    return np.concatenate(halves, axis=1)


def _halves(ab: HostArray, activation: Activation, gate_up: str) -> tuple[HostArray, HostArray | None]:
    """a, b of y_swi = V(a) * M(b); without a gate b is None."""
    gate, *up = _parts(ab, activation, gate_up)
    return gate, up[0] if up else None


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
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    b1: HostArray | tuple[HostArray, HostArray] | None = None,
    b2: HostArray | None = None,
    gate_up: str = "halves",
) -> tuple[HostArray, SavedForBackward | None]:
    """out[t] = sum over slots j, in slot order, of weights[t, j] * E_{ids[t, j]}(x[t]) (Sections 2.3 and 3.1).

    E_e(x) = (V(a) * M(b)) w2[e] + b2[e] with a = x w1_gate[e] + b1_gate[e] and b = x w1_up[e] + b1_up[e] if gated, else
    V(x w1[e] + b1[e]) w2[e] + b2[e] (Sections 2.2 and 5.1). V and M are the activation's.

    x        (L, d) float64, float32, float16 or bfloat16
    ids      (L, k) int32 or int64; < 0 or >= E is no expert in this slot, which then adds nothing
    weights  (L, k) any float dtype
    w1       (E, d, 2h), gate columns then up columns, or a pair (gate, up) of (E, d, h); (E, d, h) if not gated
    w2       (E, h, d); w1 and w2 in any memory order, used in place
    b1, b2   any float dtype or None: b1 in the form of w1 without d, or a pair of (E, h); b2 (E, d)
    gate_up  "interleaved": columns of w1 and b1 are gate 0, up 0, gate 1, up 1, ..., and so are those of first_layer
    save     what to keep for backward: "minimal" the first layer, "paper" also y_swi (Algorithm 1, line 11),
             "recompute" neither, None nothing at all

    Returns out (L, d) in x's dtype and SavedForBackward, or None if save is None. Arguments are not checked.
    """
    num_experts, h, d = w2.shape
    compute = compute_dtype(x)
    act = activation_of(activation)
    w1_parts = _parts(w1, act, gate_up)  # each (E, d, h)
    b1_parts = () if b1 is None else _parts(b1, act, gate_up)  # each (E, h)
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
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        ab = _first_layer(x_rows, w1_parts, b1_parts, expert, x.dtype, gate_up)  # (n, 2h) or (n, h)
        (V, _), (M, _) = activate(*_halves(ab, act, gate_up), act)  # (n, h) each
        y = cast(V * M, x.dtype)  # (n, h)
        expert_out[rows] = cast(y, compute) @ cast(w2[expert], compute)  # (n, d)
        if b2 is not None:
            expert_out[rows] += cast(b2[expert], compute)
        if first_layer is not None:
            first_layer[rows] = ab
        if y_swi is not None:
            y_swi[rows] = y

    # Output aggregation.
    out = cast(_sum_over_slots(expert_out, index, cast(weights, compute)), x.dtype)  # (L, d)
    if save is None:
        return out, None
    kept = first_layer, y_swi, activation, save
    return out, SavedForBackward(x, weights, w1, w2, index, *kept, b1=b1, b2=b2, gate_up=gate_up)


def moe_backward(
    grad_out: HostArray,
    saved: SavedForBackward,
    *,
    needs: Sequence[str] | None = None,
    keep_saved: bool = True,
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Gradients of `moe_forward` (Section 3.2, procedure FusedBackward of Algorithm 1).

    grad_out    (L, d) any float dtype
    saved       what moe_forward returned; any save policy
    needs       the gradients to compute, by name; the work for the others is skipped; None for all that there are
    keep_saved  for symmetry with the GPU backend: this backend never consumes `saved`
    accumulate  by name, of weights and biases, what that gradient is added to, in the weight's form and any dtype and
                memory order; nothing of experts with no token is touched

    Returns Gradients, None where not in `needs`: x (L, d); weights (L, k), 0 for absent slots; w1, w2, b1 and b2 in the
    form and memory order of the weights, exactly zero for experts with no token, or what `accumulate` names. Each has
    the dtype of its input. Arguments are not checked.
    """
    x, w2, b2, index, activation = saved.x, saved.w2, saved.b2, saved.index, activation_of(saved.activation)
    needs, gate_up = saved.gradients if needs is None else needs, saved.gate_up
    compute = compute_dtype(x)
    num_slots = index.expert_token_indices.size
    w1_parts = _parts(saved.w1, activation, gate_up)  # each (E, d, h)
    b1_parts = () if saved.b1 is None else _parts(saved.b1, activation, gate_up)  # each (E, h)
    buffers = accumulate or {}
    totals: dict[str, Any] = {  # as the weights and biases
        name: buffers[name] if name in buffers else _zeros_like(getattr(saved, name))
        for name in ("w1", "w2", "b1", "b2")
        if name in needs
    }
    # Views, each (E, d, h) or (E, h).
    w1_totals, b1_totals = (_parts(totals[name], activation, gate_up) if name in needs else () for name in ("w1", "b1"))
    grad_x_rows: Any = np.empty((num_slots, x.shape[1]), compute) if "x" in needs else None  # (L*k, d)
    grad_row_weights = np.empty(num_slots, compute)  # (L*k,)
    present = index.token_index_map >= 0  # (L, k)
    position = index.token_index_map[present]  # (offsets[E],)
    row_weights = np.empty(num_slots, compute)  # (L*k,) the router weights in expert order
    row_weights[position] = saved.weights[present]

    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        if saved.first_layer is None:
            ab = _first_layer(x_rows, w1_parts, b1_parts, expert, x.dtype, gate_up)  # (n, 2h) or (n, h)
        else:
            ab = cast(saved.first_layer[rows], compute)  # (n, 2h) or (n, h)
        (V, V_slope), (M, M_slope) = activate(*_halves(ab, activation, gate_up), activation)  # (n, h) each, line 24
        y = cast(V * M, x.dtype) if saved.y_swi is None else saved.y_swi[rows]  # (n, h)
        y = cast(y, compute)  # (n, h)

        # 1. Expert summation backward: the routed gradient is gathered by token.
        grad_rows = cast(grad_out[tokens], compute)  # (n, d) still without the router weight
        scale = row_weights[rows, None]  # (n, 1)

        # 2. Expert computation backward.
        if "w2" in needs:
            _add(totals["w2"], expert, (scale * y).T @ grad_rows)  # (h, d) line 18
        if "b2" in needs:
            _add(totals["b2"], expert, (scale * grad_rows).sum(axis=0))  # (d,)
        if not {"x", "weights", "w1", "b1"}.intersection(needs):
            continue
        grad_y = grad_rows @ cast(w2[expert], compute).T  # (n, h) line 20, still without the router weight
        # The gradient of a router weight is <grad, y w2 + b2>, where <grad, y w2> = <grad w2^T, y>: no need for the
        # expert's result y w2.
        grad_row_weights[rows] = (grad_y * y).sum(axis=1)  # (n,)
        if b2 is not None:
            grad_row_weights[rows] += grad_rows @ cast(b2[expert], compute)
        grad_y *= scale  # (n, h)
        grad_ab = (grad_y * M * V_slope, grad_y * V * M_slope)[: len(w1_parts)]  # each (n, h) lines 26 and 28
        for total, grad_half in zip(w1_totals, grad_ab, strict=False):
            _add(total, expert, x_rows.T @ grad_half)  # (d, h) line 29
        for total, grad_half in zip(b1_totals, grad_ab, strict=False):
            _add(total, expert, grad_half.sum(axis=0))  # (h,)
        if "x" in needs:
            pairs = zip(grad_ab, w1_parts, strict=True)
            grad_x_rows[rows] = sum(half @ cast(part[expert], compute).T for half, part in pairs)  # (n, d) line 30

    # 3. Token gradient accumulation.
    grad_x = cast(_sum_over_slots(grad_x_rows, index), x.dtype) if "x" in needs else None  # (L, d)
    grad_weights = np.zeros_like(saved.weights) if "weights" in needs else None  # (L, k)
    if grad_weights is not None:
        grad_weights[present] = grad_row_weights[position]
    return Gradients(x=grad_x, weights=grad_weights, **totals)
