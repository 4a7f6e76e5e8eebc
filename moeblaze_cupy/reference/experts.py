"""The layer, forward and backward (paper sections 2.3, 3 and 5, Algorithm 1)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy.reference.activations import activate
from moeblaze_cupy.reference.dispatch import dispatch
from moeblaze_cupy.reference.fp8 import first_layer_of, quantize_weights, save_first_layer
from moeblaze_cupy.reference.lora import Factors
from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype, to_tf32
from moeblaze_cupy.reference.products import InFp8, Plain, Products, Read, plain_wgrad, wgrad_in_fp8
from moeblaze_cupy.types import (
    IDENTITY,
    Activation,
    DispatchIndices,
    Fp8Weights,
    Gradients,
    LayerArrays,
    LayerOptions,
    Lora,
    LoraRows,
    SavedForBackward,
    activation_of,
    gate_and_up,
    is_gated,
)


def _parts(w: Any, activation: Activation, gate_up: str) -> tuple[HostArray, ...]:
    """Returns the blocks of w1 (E, d, 2h), or b1 (E, 2h), as views with h columns: (gate, up) if gated, else (w,)."""
    if isinstance(w, (tuple, list)):
        return tuple(w)
    if gate_up == "interleaved":
        return w[..., 0::2], w[..., 1::2]
    return tuple(np.split(w, 2, axis=-1)) if is_gated(activation) else (w,)


def _zeros_like(w: Any) -> Any:
    """Returns zeros of w's form, dtype and memory order: row-major, or the transposed view if w is one."""
    if isinstance(w, (tuple, list)):
        return tuple(_zeros_like(part) for part in w)
    if w.ndim == 3 and w.strides[1] < w.strides[2] and w.shape[2] > 1:  # see `checks.weight_order`
        return _zeros_like(w.swapaxes(1, 2)).swapaxes(1, 2)
    return np.zeros(w.shape, w.dtype)


def _add(total: HostArray, expert: int, term: HostArray) -> None:
    """Adds the term to total[expert], in term's dtype and rounded once."""
    total[expert] = cast(total[expert], term.dtype) + term


def _experts_with_tokens(index: DispatchIndices) -> Iterator[tuple[int, slice, HostArray]]:
    """Yields (expert, its rows in the lists of length L*k as a slice, its tokens (n,)); skips experts with none."""
    for expert in range(index.num_experts):
        start, stop = index.expert_token_offsets[expert : expert + 2]
        if start < stop:
            yield expert, slice(start, stop), index.expert_token_indices[start:stop]


def _first_layer(
    x_rows: HostArray,
    products: Products,
    b1_parts: Sequence[HostArray],
    expert: int,
    store: np.dtype[Any],
    gate_up: str,
    factors: Factors,
    u1: HostArray | None,
    rows: slice,
) -> HostArray:
    """Returns x w1 + b1 of one expert's tokens: x_rows (n, d) -> (n, 2h) in w1's column order, or (n, h) if not gated.

    Rounded to `store`. b1_parts is empty without a bias. u1 (R, r): None without a factor of w1; its rows are written.
    """
    compute = x_rows.dtype
    blocks = products.up_fwd(expert, x_rows)  # each (n, h)
    for block, part in zip(blocks, b1_parts, strict=False):
        block += cast(part[expert], compute)
    ab = _side_by_side(blocks, gate_up)
    if u1 is not None:
        u1[rows] = factors.first(0, expert, x_rows)
        ab += factors.second(0, expert, u1[rows])
    return cast(cast(ab, store), compute)


def _products(
    w1_parts: Sequence[HostArray],
    w2: HostArray,
    fp8_weights: Fp8Weights | None,
    activation: Activation,
    gate_up: str,
    x: HostArray,
    read: Read,
) -> Products:
    compute = compute_dtype(x)
    if fp8_weights is None:
        return Plain(w1_parts, w2, compute, x.dtype, read)
    joined = functools.partial(_side_by_side, gate_up=gate_up) if gate_up == "interleaved" else None
    return InFp8(fp8_weights, lambda w1: _parts(w1, activation, gate_up), joined, compute)


def _read(options: LayerOptions) -> Read:
    """Returns what gives the numbers of an operand that products multiply."""
    return to_tf32 if options.tf32 else lambda array: array


def _side_by_side(halves: Sequence[HostArray], gate_up: str) -> HostArray:
    """Returns the halves (n, h) as (n, 2h), or the only one without a gate."""
    if gate_up == "interleaved":
        return np.stack(halves, axis=2).reshape(len(halves[0]), -1)
    return np.concatenate(halves, axis=1)


def _halves(ab: HostArray, activation: Activation, gate_up: str) -> tuple[HostArray, HostArray | None]:
    """Returns a, b of y_swi = V(a) * M(b); without a gate b is None."""
    gate, *up = _parts(ab, activation, gate_up)
    return gate, up[0] if up else None


def _tokens_of_slots(index: DispatchIndices) -> HostArray:
    """Returns (L*k,) or (P,): the token of each slot; any token for pairs without one."""
    if index.k is not None:
        return np.arange(index.num_slots) // index.k
    found = np.searchsorted(index.token_offsets, np.arange(index.num_slots), "right") - 1
    return np.clip(found, 0, max(index.num_tokens - 1, 0))


def _sum_over_slots(
    rows: HostArray, index: DispatchIndices, scale: HostArray | None = None, source: HostArray | None = None
) -> HostArray:
    """Returns out[t], the sum of scale * row over token t's slots in order: rows are of `rows`, identity's of `source`.

    rows (L*k, d) at token_index_map; scale (L, k) or (P,), or None for 1; source (L, d) -> (L, d). Slots without a
    row or an identity expert add nothing.
    """
    out = np.zeros((index.num_tokens, rows.shape[1]), rows.dtype)  # (L, d)
    positions, tokens = index.token_index_map.reshape(-1), _tokens_of_slots(index)  # (L*k,), (L*k,)
    first = index.token_offsets if index.k is None else np.arange(index.num_tokens + 1) * index.k  # (L+1,)
    nth = np.arange(index.num_slots) - first[tokens]  # (L*k,)
    listed = (positions >= 0) | ((positions == IDENTITY) & (source is not None))  # (L*k,)
    order = np.flatnonzero(listed)
    order = order[np.argsort(nth[order], kind="stable")]  # (n,) the first slots of all tokens, then the second, ...
    for slots in np.split(order, np.flatnonzero(np.diff(nth[order])) + 1):  # (m,) no two of one token
        routed = rows[np.maximum(positions[slots], 0)]  # (m, d)
        if source is not None:
            routed = np.where((positions[slots] == IDENTITY)[:, None], source[tokens[slots]], routed)
        out[tokens[slots]] += routed if scale is None else scale.reshape(-1)[slots, None] * routed
    return out


def _has_token(index: DispatchIndices) -> HostArray:
    """Returns (P,): whether some token has each pair; True for slots if tokens have k each."""
    slots = np.arange(index.num_slots)
    if index.k is not None:
        return slots >= 0
    has_token: HostArray = (slots >= index.token_offsets[0]) & (slots < index.token_offsets[-1])
    return has_token


def _row_weights(weights: HostArray | None, index: DispatchIndices, compute: np.dtype[Any]) -> HostArray:
    """Returns (R, 1): the router weight of each of the experts' rows; 1 without weights."""
    positions = index.token_index_map.reshape(-1)  # (L*k,)
    row_weights = np.ones((index.num_rows, 1), compute)
    if weights is not None:
        row_weights[positions[positions >= 0], 0] = weights.reshape(-1)[positions >= 0]
    return row_weights


def _slot_weights(
    weights: HostArray | None,
    index: DispatchIndices,
    options: LayerOptions,
    compute: np.dtype[Any],
    on_rows: bool = True,
) -> HostArray | None:
    """Returns (L*k,): the scale of each slot in a sum, 1 for all rows if not on_rows or if weights are on the input."""
    if weights is None or (not options.identity_experts and not (on_rows and not options.on_input)):
        return None
    scale = cast(weights.reshape(-1), compute)  # (L*k,)
    if on_rows and not options.on_input:
        return scale
    return np.where(index.token_index_map.reshape(-1) == IDENTITY, scale, 1)


def _source(rows: HostArray, options: LayerOptions, compute: np.dtype[Any]) -> HostArray | None:
    """Returns the rows that identity experts add, or None without such experts."""
    return cast(rows, compute) if options.identity_experts else None


def sum_rows(rows: HostArray, positions: HostArray) -> HostArray:
    """Returns out[t], the sum over j, in order, of rows[positions[t, j]] for positions that are not below 0.

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
    weights: HostArray | None,
    w1: HostArray | tuple[HostArray, HostArray],
    w2: HostArray,
    *,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    b1: HostArray | tuple[HostArray, HostArray] | None = None,
    b2: HostArray | None = None,
    gate_up: str = "halves",
    token_offsets: HostArray | None = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    max_slots: int | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
    lora: Lora | None = None,
    memory_limit: int | None = None,
    tf32: bool = False,
    fp8_wgrad: bool = False,
) -> tuple[HostArray, SavedForBackward | None]:
    """Returns out[t], the sum over slots j, in order, of weights[t, j] * E_{ids[t, j]}(x[t]) (Sections 2.3 and 3.1).

    E_e(x) = (V(a) * M(b)) w2[e] + b2[e] with a = x w1_gate[e] + b1_gate[e] and b = x w1_up[e] + b1_up[e] if gated, else
    V(x w1[e] + b1[e]) w2[e] + b2[e] (Sections 2.2 and 5.1). V and M are the activation's.

    x        (L, d) float64, float32, float16 or bfloat16
    ids      (L, k) int32 or int64; < 0 or >= E is no expert in this slot, which then adds nothing
    weights  (L, k) any float dtype
    w1       (E, d, 2h), gate columns then up columns, or a pair (gate, up) of (E, d, h); (E, d, h) if not gated
    w2       (E, h, d); w1 and w2 in any memory order, used in place
    b1, b2   any float dtype or None: b1 in the form of w1 without d, or a pair of (E, h); b2 (E, d)
    gate_up  "interleaved": columns of w1 and b1 are gate 0, up 0, gate 1, up 1, ..., and so are those of first_layer
    save     what to keep for backward: "minimal" the first layer, "fp8" that in e4m3, "paper" also y_swi (Algorithm 1,
             line 11), "recompute" neither, None nothing at all
    token_offsets     (L+1,) int32: ids and weights are (P,), pairs as in `dispatch`
    weights_on        "input": E_e(weight * x) without a weight on the output; b1 is None then
    unreduced         the outputs of each slot, (L, k, d) or (P, d), without weights, which are None if not on the input
    identity_experts  Z: ids E .. E + Z - 1 are E_e(x) = x
    max_slots  rows of what is kept, R, in place of L*k; see dispatch
    precision, fp8_weights  "fp8": see reference.products; quantised w1 and w2, or None: they are quantised here
    lora     factors beside w1 and w2, or None: see reference.lora
    memory_limit  bounds nothing here
    tf32     operands of products are float32 rounded to TF32, but those that make the rows of `lora` and its gradients
    fp8_wgrad  gradients of w1 and w2 multiply e4m3: see reference.products

    Returns out (L, d) in x's dtype and SavedForBackward, or None if save is None. Arguments are not checked.
    """
    num_experts, h, d = w2.shape
    compute = compute_dtype(x)
    act = activation_of(activation)
    w1_parts = _parts(w1, act, gate_up)  # each (E, d, h)
    b1_parts = () if b1 is None else _parts(b1, act, gate_up)  # each (E, h)
    if precision == "fp8" and fp8_weights is None:
        fp8_weights = quantize_weights(w1, w2, gate_up)
    of_slots = weights_on, unreduced, identity_experts, max_slots
    options = LayerOptions(activation, save, gate_up, *of_slots, precision, memory_limit, fp8_wgrad, tf32)
    read = _read(options)
    products = _products(w1_parts, w2, fp8_weights if precision == "fp8" else None, act, gate_up, x, read)
    # Token dispatch: index lists only, no routed copy of x.
    index = dispatch(ids, num_experts, token_offsets, max_slots)
    num_rows = index.num_rows
    factors = Factors(lora, x.dtype, compute, read)
    positions = index.token_index_map.reshape(-1)  # (L*k,)
    if identity_experts:
        is_identity = (ids.reshape(-1) >= num_experts) & (ids.reshape(-1) < num_experts + identity_experts)  # (L*k,)
        positions[is_identity & _has_token(index)] = IDENTITY
    row_weights = _row_weights(weights, index, compute) if options.on_input else None  # (R, 1)

    first_layer = y_swi = None
    if save in ("minimal", "fp8", "paper"):
        first_layer = np.zeros((num_rows, h * len(w1_parts)), x.dtype)  # (R, 2h) or (R, h)
    if save == "paper":
        y_swi = np.zeros((num_rows, h), x.dtype)  # (R, h)
    u1, u2 = (factors.rows(pair, num_rows) for pair in (0, 1))  # (R, r) each

    # Expert computation. All experts' results are held at once because the sum over slots is in slot order.
    expert_out = np.empty((num_rows, d), compute)  # (R, d)
    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        ab = _first_layer(x_rows, products, b1_parts, expert, x.dtype, gate_up, factors, u1, rows)  # (n, 2h or h)
        scaled = ab if row_weights is None else ab * row_weights[rows]  # (w x) w1 = w (x w1)
        (V, _), (M, _) = activate(*_halves(scaled, act, gate_up), act)  # (n, h) each
        expert_out[rows] = products.down_fwd(expert, V * M)  # (n, d)
        if u2 is not None:
            u2[rows] = factors.first(1, expert, cast(cast(V * M, x.dtype), compute))
            expert_out[rows] += factors.second(1, expert, u2[rows])
        if b2 is not None:
            expert_out[rows] += cast(b2[expert], compute)
        if first_layer is not None:
            first_layer[rows] = ab
        if y_swi is not None:
            y_swi[rows] = cast(V * M, x.dtype)

    # Output aggregation.
    if unreduced:
        out = np.zeros((ids.size, d), x.dtype)  # (L*k, d)
        out[positions >= 0] = expert_out[positions[positions >= 0]]
        out = out.reshape(*ids.shape, d)  # (L, k, d) or (P, d)
    else:
        scale = _slot_weights(weights, index, options, compute)  # (L*k,)
        out = cast(_sum_over_slots(expert_out, index, scale, _source(x, options, compute)), x.dtype)  # (L, d)
    if save is None:
        return out, None
    if save == "fp8" and first_layer is not None:
        first_layer = save_first_layer(first_layer, h, gate_up == "interleaved")
    arrays = LayerArrays(x, None, weights, *gate_and_up(w1), w2, *gate_and_up(b1), b2)
    multiplied = fp8_weights if precision == "fp8" else None
    saved = SavedForBackward(arrays, options, index, first_layer, y_swi, fp8_weights=multiplied, lora=lora)
    if save != "recompute":
        saved.lora_rows = LoraRows(u1, u2)
    return out, saved


def moe_backward(
    grad_out: HostArray,
    saved: SavedForBackward,
    *,
    needs: Sequence[str] | None = None,
    keep_saved: bool = True,
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Returns gradients of `moe_forward` (Section 3.2, procedure FusedBackward of Algorithm 1).

    grad_out    (L, d) any float dtype; (L, k, d) or (P, d) for an unreduced output
    saved       what moe_forward returned; any save policy
    needs       the gradients to compute, by name; the work for the others is skipped; None for all that there are
    keep_saved  for symmetry with the GPU backend: this backend never consumes `saved`
    accumulate  arrays, by name of weight or bias, that gradients are added to, in the weight's form and any dtype and
                memory order; the parts of experts with no token are not touched

    Returns Gradients, None where not in `needs`: x (L, d); weights (L, k) or (P,), 0 for absent slots; w1, w2, b1 and
    b2 in the form and memory order of the weights, exactly zero for experts with no token, or what `accumulate` names.
    Each has the dtype of its input. Arguments are not checked.
    """
    x, w2, b2, index, options = saved.x, saved.w2, saved.b2, saved.index, saved.options
    activation, gate_up = activation_of(options.activation), options.gate_up
    needs = saved.default_gradients if needs is None else needs
    compute = compute_dtype(x)
    num_rows = index.num_rows
    read = _read(options)
    factors = Factors(saved.lora, x.dtype, compute, read)
    w1_parts = _parts(saved.w1, activation, gate_up)  # each (E, d, h)
    b1_parts = () if saved.b1 is None else _parts(saved.b1, activation, gate_up)  # each (E, h)
    products = _products(w1_parts, w2, saved.fp8_weights, activation, gate_up, x, read)
    wgrad = functools.partial(wgrad_in_fp8, store=x.dtype) if options.fp8_wgrad else plain_wgrad
    buffers = accumulate or {}
    totals: dict[str, Any] = {  # they have the forms of the weights and biases
        name: buffers[name] if name in buffers else _zeros_like(getattr(saved, name))
        for name in ("w1", "w2", "b1", "b2")
        if name in needs
    }
    # Views, each (E, d, h) or (E, h).
    w1_totals, b1_totals = (_parts(totals[name], activation, gate_up) if name in needs else () for name in ("w1", "b1"))
    grad_x_rows: Any = np.empty((num_rows, x.shape[1]), compute) if "x" in needs else None  # (R, d)
    grad_row_weights = np.empty(num_rows, compute)  # (R,)
    kept = saved.first_layer
    if options.save == "fp8":
        kept = first_layer_of(kept, num_rows, w2.shape[1], len(w1_parts), gate_up == "interleaved")  # (R, 2h) or (R, h)
    u1, u2 = saved.lora_rows if kept is not None else (factors.rows(pair, num_rows) for pair in (0, 1))  # (R, r) each
    weights = saved.weights
    positions = index.token_index_map.reshape(-1)  # (L*k,)
    present = positions >= 0  # (L*k,)
    row_weights = _row_weights(weights, index, compute)  # (R, 1)
    grad_of_row = index.expert_token_indices  # (L*k,) which of grad_out's rows is a row's
    if options.unreduced:
        grad_of_row = np.empty(num_rows, int)
        grad_of_row[positions[present]] = np.flatnonzero(present)
        grad_out = grad_out.reshape(-1, x.shape[1])  # (L*k, d)

    for expert, rows, tokens in _experts_with_tokens(index):
        x_rows = cast(x[tokens], compute)  # (n, d) gathered on the fly
        if kept is None:
            ab = _first_layer(x_rows, products, b1_parts, expert, x.dtype, gate_up, factors, u1, rows)  # (n, 2h or h)
        else:
            ab = cast(kept[rows], compute)  # (n, 2h) or (n, h)
        scale = row_weights[rows]  # (n, 1)
        scaled = ab * scale if options.on_input else ab  # (n, 2h) or (n, h)
        (V, V_slope), (M, M_slope) = activate(*_halves(scaled, activation, gate_up), activation)  # (n, h) each, line 24
        y = cast(V * M, x.dtype) if saved.y_swi is None else saved.y_swi[rows]  # (n, h)
        y = cast(y, compute)  # (n, h)

        # 1. Expert summation backward: the routed gradient is gathered by token.
        grad_rows = cast(grad_out[grad_of_row[rows]], compute)  # (n, d) still without the router weight
        on_output = 1 if options.on_input else scale

        # 2. Expert computation backward.
        if "w2" in needs:
            _add(totals["w2"], expert, wgrad(read(grad_rows), read(on_output * y)).T)  # (h, d) line 18
        if "b2" in needs:
            _add(totals["b2"], expert, (on_output * grad_rows).sum(axis=0))  # (d,)
        if not {"x", "weights", "w1", "b1", "lora"}.intersection(needs):
            continue
        grad_y = products.down_bwd(expert, grad_rows)  # (n, h) line 20, still without the router weight
        if u2 is not None:
            if kept is None:
                u2[rows] = factors.first(1, expert, y)
            v2 = factors.first_bwd(1, expert, grad_rows)  # (n, r) still without the router weight
            grad_y += factors.second_bwd(1, expert, v2)
            factors.add_gradients(1, expert, (y * on_output, v2), (grad_rows * on_output, u2[rows]))
        # The gradient of a router weight is <grad, y w2 + b2>, where <grad, y w2> = <grad w2^T, y>: no need for the
        # expert's result y w2.
        grad_row_weights[rows] = (grad_y * y).sum(axis=1)  # (n,)
        if b2 is not None:
            grad_row_weights[rows] += (grad_rows * cast(b2[expert], compute)).sum(axis=1)
        grad_y *= on_output  # (n, h)
        grad_ab = (grad_y * M * V_slope, grad_y * V * M_slope)[: len(w1_parts)]  # each (n, h) lines 26 and 28
        if options.on_input:  # these are the gradients of w a and w b
            halves = _parts(ab, activation, gate_up)  # each (n, h)
            dots = [(half * g).sum(axis=1) for half, g in zip(halves, grad_ab, strict=True)]  # each (n,)
            grad_row_weights[rows] = sum(dots)
            grad_ab = tuple(scale * g for g in grad_ab)  # each (n, h)
        for total, grad_half in zip(w1_totals, grad_ab, strict=False):
            _add(total, expert, wgrad(read(x_rows), read(grad_half)))  # (d, h) line 29
        for total, grad_half in zip(b1_totals, grad_ab, strict=False):
            _add(total, expert, grad_half.sum(axis=0))  # (h,)
        if "x" in needs:
            grad_x_rows[rows] = products.up_bwd(expert, grad_ab)  # (n, d) line 30
        if u1 is not None:
            of_ab = cast(cast(_side_by_side(grad_ab, gate_up), x.dtype), compute)  # (n, 2h) or (n, h)
            v1 = factors.first_bwd(0, expert, of_ab)  # (n, r)
            factors.add_gradients(0, expert, (x_rows, v1), (of_ab, u1[rows]))
            if "x" in needs:
                grad_x_rows[rows] += factors.second_bwd(0, expert, v1)

    # 3. Token gradient accumulation.
    grad_x = None
    if "x" in needs:
        of_slots = _slot_weights(weights, index, options, compute, on_rows=False)  # (L*k,)
        source = _source(grad_out, options, compute)  # (L, d)
        grad_x = cast(_sum_over_slots(grad_x_rows, index, of_slots, source), x.dtype)  # (L, d)
    grad_weights = None
    if "weights" in needs and weights is not None:
        grad_weights = np.zeros_like(weights)  # (L, k) or (P,)
        flat = grad_weights.reshape(-1)  # (L*k,)
        flat[present] = grad_row_weights[positions[present]]
        identity = positions == IDENTITY  # (L*k,)
        if identity.any():
            tokens = _tokens_of_slots(index)[identity]  # (m,)
            flat[identity] = (cast(grad_out[tokens], compute) * cast(x[tokens], compute)).sum(axis=1)
    of_factors = factors.gradients() if "lora" in needs else None
    return Gradients(x=grad_x, weights=grad_weights, **totals, lora=of_factors)
