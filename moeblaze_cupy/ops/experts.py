"""The MoE layer on CUDA: the paper's Algorithm 1 over the index lists of dispatch, kernel by kernel."""

from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.ops import grouped_gemm, panels
from moeblaze_cupy.ops.aggregation import weights_bwd, weights_by_row
from moeblaze_cupy.ops.dispatch import dispatch
from moeblaze_cupy.ops.grouped_gemm import Index, Weight, empty_weight_gradient
from moeblaze_cupy.structures import Gradients, SavedForBackward, is_gated, one_or_pair, pair


def _as_passed(arrays: tuple[Array, ...]):
    """One weight's array, or its (gate, up) pair, in the caller's form."""
    return one_or_pair(tuple(array.owner for array in arrays))


def _half_columns(w1: tuple[Array, ...], h: int, activation: str) -> int | None:
    return h if is_gated(activation) and len(w1) == 1 else None


def moe_forward(
    context: Context, x: Array, ids: Array, weights: Array, w1: tuple[Array, ...], w2: Array, *, activation: str, save
) -> tuple[Array, SavedForBackward | None]:
    """Paper section 3.1: out (L, d), and what backward needs."""
    (L, d), (E, h, _), R = x.shape, w2.shape, ids.size
    keeps_first_layer = save in ("minimal", "paper")
    index = dispatch(context, ids, E)
    first_layer = context.empty((R, h * (1 + is_gated(activation))), x.dtype) if keeps_first_layer else None
    product = context.empty((R, h), x.dtype)
    lists = Index.of(context, index)
    if L:
        up = Weight.of(w1, _half_columns(w1, h, activation))
        grouped_gemm.up_fwd(context, lists, x, up, h, activation, first_layer=first_layer, product=product)
    out = context.empty((L, d), x.dtype)  # after the first launches, which it can wait for
    if L:
        down, overwrites = Weight.of((w2,)), save != "paper"
        panels.down_fwd(context, lists, product, down, weights, out, activation, overwrites=overwrites)
    if save is None:
        return out, None
    saved = SavedForBackward(
        x=x.owner,
        weights=weights.owner,
        w1=_as_passed(w1),
        w2=w2.owner,
        index=index,
        first_layer=first_layer.owner if keeps_first_layer else None,
        y_swi=product.owner if save == "paper" else None,
        activation=activation,
        save=save,
    )
    return out, saved


def moe_backward(
    context: Context,
    grad_out: Array,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...],
    keep_saved: bool,
    accumulate: dict[str, tuple[Array, ...]] | None = None,
) -> Gradients:
    """Paper section 3.2 and Algorithm 1, lines 15-31; SiLU and the product are recomputed in the epilogue.

    Unless `keep_saved`, the gradients of a, b (and A' in place of y_swi) overwrite the saved activations.
    `accumulate`: by name, the buffers that gradients of weights are added to, in place of new ones.
    """
    activation, buffers = saved.activation, accumulate or {}
    x, weights, w2 = (context.describe(a) for a in (saved.x, saved.weights, saved.w2))
    w1 = tuple(context.describe(a) for a in pair(saved.w1))
    (L, d), h, R = x.shape, w2.shape[1], weights.size
    lists = Index.of(context, saved.index)
    up, down = Weight.of(w1, _half_columns(w1, h, activation)), Weight.of((w2,))
    needs_first_layer_grad = "x" in needs or "w1" in needs

    # Each gradient is allocated when it is due, that of x, whose product needs room, before the largest, that of w1.
    grad_x = grad_weights = grad_w1 = grad_w2 = None
    if "weights" in needs:
        grad_weights = context.empty(weights.shape, weights.dtype)

    y_swi = context.describe(saved.y_swi)
    first_layer = context.describe(saved.first_layer)
    if first_layer is None:
        first_layer = context.empty((R, h * (1 + is_gated(activation))), x.dtype)
        if L and needs:
            grouped_gemm.up_fwd(context, lists, x, up, h, activation, first_layer=first_layer, product=None)
    in_place = saved.first_layer is None or not keep_saved
    first_layer_grad = None
    if needs_first_layer_grad:
        first_layer_grad = first_layer if in_place else context.empty(first_layer.shape, x.dtype)
    product = None
    if "w2" in needs:
        product = y_swi if y_swi is not None and in_place else context.empty((R, h), x.dtype)
    saved.consumed = saved.is_consumed_by(needs, keep_saved)

    if L and needs:
        partial_sums = grouped_gemm.down_bwd(
            context,
            lists,
            grad_out,
            down,
            h,
            activation,
            first_layer=first_layer,
            first_layer_grad=first_layer_grad,
            product=product,
            stored_product=y_swi,
            row_weights=weights_by_row(context, weights, lists.token_index_map),
            wants_weights_grad=grad_weights is not None,
        )
        if grad_weights is not None:
            weights_bwd(context, partial_sums, lists.token_index_map, grad_weights)
        del partial_sums
    if "w2" in needs:
        grad_w2 = buffers.get("w2") or empty_weight_gradient(context, down)
        gradient = Weight.of(grad_w2)
        grouped_gemm.down_wgrad(context, lists, product, grad_out, gradient, activation, "w2" in buffers)
    del product
    if "x" in needs:
        grad_x = context.empty((L, d), x.dtype)
        if L:
            panels.up_bwd(context, lists, first_layer_grad, up, h, grad_x, activation)
    if "w1" in needs:
        grad_w1 = buffers.get("w1") or empty_weight_gradient(context, up)
        gradient = Weight.of(grad_w1, _half_columns(w1, h, activation))
        grouped_gemm.up_wgrad(context, lists, x, first_layer_grad, gradient, h, activation, "w1" in buffers)
    return Gradients(
        x=grad_x and grad_x.owner,
        weights=grad_weights and grad_weights.owner,
        w1=_as_passed(grad_w1) if grad_w1 else None,
        w2=_as_passed(grad_w2) if grad_w2 else None,
    )
