"""The MoE layer on CUDA: the paper's Algorithm 1 over the index lists of dispatch, kernel by kernel.

`configure_forward` and `configure_backward` choose all launches and buffers from layouts alone, once per layout;
`moe_forward` and `moe_backward` allocate and launch, in straight lines.
"""

import functools
from dataclasses import dataclass
from typing import Any

from moeblaze_cupy.arrays import Buffer, Layout
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.ops import aggregation, dispatch, grouped_gemm, panels
from moeblaze_cupy.ops.dispatch import TOKEN_INDEX_MAP, Dispatch, IndexLayout
from moeblaze_cupy.ops.grouped_gemm import Gemm, Operand, Weight, Wgrad
from moeblaze_cupy.ops.panels import Panels
from moeblaze_cupy.runtime import Launch, Runtime, cached
from moeblaze_cupy.structures import SavedForBackward, is_consumed, is_gated

Shape = tuple[int, ...]


def _half_columns(w1: tuple[Layout, ...], h: int, activation: str) -> int | None:
    return h if is_gated(activation) and len(w1) == 1 else None


@dataclass(frozen=True, eq=False)
class Forward:
    """What a forward launches and allocates. Launches are None where there are no tokens."""

    dispatch: Dispatch
    dtype: str
    first_layer: Shape | None  # saved: a then b; None if it is not kept
    y_swi: Shape
    out: Shape
    up: Weight
    down: Weight
    up_fwd: Gemm | None
    down_fwd: Panels | None
    keeps_y_swi: bool


@cached
def configure_forward(
    x: Layout,
    ids: Layout,
    weights: Layout,
    w2: Layout,
    w1: tuple[Layout, ...],
    activation: str,
    save: str | None,
    limits: DeviceLimits,
    max_slots: int | None = None,
) -> Forward:
    """The launches of `moe_forward` for arrays of these layouts, which have passed the checks of `checks.layer`."""
    (L, d), (E, h, _), dtype = x.shape, w2.shape, x.dtype
    steps = dispatch.configure(ids._replace(device=0), E, limits, max_slots)
    R = steps.index.num_rows
    first_layer = (R, h * (1 + is_gated(activation))) if save in ("minimal", "paper") else None
    up, down = Weight.of(w1, _half_columns(w1, h, activation)), Weight.of((w2,))
    up_fwd = down_fwd = None
    if L:
        a = Operand(dtype, d, x.misalignment)
        up_fwd = grouped_gemm.configure("up_fwd", steps.index, a, up, h, d, activation, limits, result_ld=h)
        down_fwd = panels.configure(
            "down_fwd",
            steps.index,
            Operand(dtype, h),
            down,
            h,
            d,
            activation,
            limits,
            weights_dtype=weights.dtype,
            overwrites=save != "paper",
        )
    return Forward(steps, dtype, first_layer, (R, h), (L, d), up, down, up_fwd, down_fwd, save == "paper")


@dataclass(slots=True)
class ForwardResult:
    """`lists`, `ids` (int32 copy of int64 ids), `first_layer` and `y_swi` are what backward needs, None if not kept."""

    out: Buffer
    lists: Buffer
    ids: Buffer | None
    first_layer: Buffer | None
    y_swi: Buffer | None


def moe_forward(
    run: Runtime, steps: Forward, x: int, ids: int, weights: int, w2: int, w1: tuple[int, ...]
) -> ForwardResult:
    """Paper section 3.1, from the addresses of the inputs."""
    lists, ids_copy, index = dispatch.dispatch(run, steps.dispatch, ids)
    first_layer = run.empty(steps.first_layer, steps.dtype) if steps.first_layer else None
    y_swi = run.empty(steps.y_swi, steps.dtype)
    if steps.up_fwd:
        first_layer_ptr = first_layer.ptr if first_layer else 0
        up = steps.up.halves(w1)
        grouped_gemm.gemm(run, steps.up_fwd, index, x, up, first_layer=first_layer_ptr, result=y_swi.ptr)
    out = run.empty(steps.out, steps.dtype)  # after the first launches, which it can wait for
    if steps.down_fwd:
        panels.sum_of_rows(run, steps.down_fwd, index, y_swi.ptr, (w2, w2), weights, out.ptr)
    return ForwardResult(out, lists, ids_copy, first_layer, y_swi if steps.keeps_y_swi else None)


@dataclass(frozen=True, eq=False)
class Backward:
    """What a backward launches and allocates. Launches are None where they are not needed, or without tokens."""

    index: IndexLayout
    dtype: str
    weights_dtype: str
    weights: Shape
    x: Shape
    up: Weight
    down: Weight
    up_gradient: Weight  # w1's, new or the caller's
    down_gradient: Weight
    first_layer: Shape | None  # computed again
    first_layer_grad: Shape | None  # new memory; None if it takes the first layer's place
    weighted_y_swi: Shape | None  # new memory; None if it takes y_swi's place, or is not needed
    consumes: bool  # what was saved is overwritten
    up_fwd: Gemm | None
    weights_by_row: Launch | None
    down_bwd: Gemm | None
    weights_bwd: Launch | None
    down_wgrad: Wgrad | None
    up_bwd: Panels | None
    up_wgrad: Wgrad | None
    needs: tuple[str, ...]
    defers_weights: bool

    @functools.cached_property
    def needs_first_layer_grad(self) -> bool:
        return "x" in self.needs or "w1" in self.needs


@cached
def configure_backward(
    grad_out: Layout,
    x: Layout,
    weights: Layout,
    w2: Layout,
    w1: tuple[Layout, ...],
    first_layer: Layout | None,
    y_swi: Layout | None,
    accumulate: tuple[tuple[str, tuple[Layout, ...]], ...],
    activation: str,
    needs: tuple[str, ...],
    keep_saved: bool,
    limits: DeviceLimits,
    max_slots: int | None = None,
    defers_weights: bool = False,
) -> Backward:
    """The launches of `moe_backward` for arrays of these layouts.

    Unless `keep_saved`, the gradients of a, b (and weighted_y_swi in place of y_swi) overwrite the saved activations.
    accumulate: by name, the layouts of the buffers that gradients of weights are added to, in place of new ones.
    defers_weights: what the gradients of w1 and w2 are products of stays in memory, and the products are not launched.
    """
    (L, d), k, (E, h, _), dtype = x.shape, weights.shape[1], w2.shape, x.dtype
    index, buffers = IndexLayout(L, k, E, max_slots), dict(accumulate)
    R = index.num_rows
    half = _half_columns(w1, h, activation)
    up, down = Weight.of(w1, half), Weight.of((w2,))
    up_gradient = Weight.of(buffers.get("w1") or up.gradient_layouts(), half)
    down_gradient = Weight.of(buffers.get("w2") or down.gradient_layouts())
    first_layer_shape = (R, h * (1 + is_gated(activation)))
    needs_first_layer_grad = "x" in needs or "w1" in needs
    in_place = first_layer is None or not keep_saved
    takes_y_swi = "w2" in needs and y_swi is not None and in_place
    consumes = is_consumed(first_layer is not None, y_swi is not None, needs, keep_saved)

    def misaligned(layout: Layout | None) -> int:
        return 0 if layout is None else layout.misalignment

    x_rows, grad_rows = Operand(dtype, d, x.misalignment), Operand(dtype, d, grad_out.misalignment)
    first_rows = Operand(dtype, first_layer_shape[1], misaligned(first_layer) if in_place else 0)
    y_rows = Operand(dtype, h, misaligned(y_swi) if takes_y_swi else 0)
    launches: dict[str, Any] = {}
    if L and needs:
        if first_layer is None:
            launches["up_fwd"] = grouped_gemm.configure(
                "up_fwd", index, x_rows, up, h, d, activation, limits, result_ld=0
            )
        launches["weights_by_row"] = aggregation.weights_by_row(index, weights.dtype)
        down_bwd = grouped_gemm.configure(
            "down_bwd",
            index,
            grad_rows,
            down,
            h,
            d,
            activation,
            limits,
            result_ld=h if "w2" in needs else 0,
            stored_y_swi=y_swi is not None,
            wants_partial_sums="weights" in needs,
        )
        launches["down_bwd"] = down_bwd
        if down_bwd.partial_sums:
            launches["weights_bwd"] = aggregation.weights_bwd(index, weights.dtype, down_bwd.partial_sums[0])
    wgrad = functools.partial(_configure_wgrad, index, activation, limits)
    if "w2" in needs and not defers_weights:
        launches["down_wgrad"] = wgrad("down_wgrad", (y_rows, 0), (grad_rows, 0), down_gradient, h, d, 1, buffers)
    if "x" in needs and L:
        launches["up_bwd"] = panels.configure("up_bwd", index, first_rows, up, h, d, activation, limits)
    if "w1" in needs and not defers_weights:
        gated = is_gated(activation)
        columns = first_rows, h if gated else 0
        launches["up_wgrad"] = wgrad("up_wgrad", (x_rows, 0), columns, up_gradient, d, h, 1 + gated, buffers)
    return Backward(
        index,
        dtype,
        weights.dtype,
        weights.shape,
        x.shape,
        up,
        down,
        up_gradient,
        down_gradient,
        first_layer_shape if first_layer is None else None,
        first_layer_shape if needs_first_layer_grad and not in_place else None,
        (R, h) if "w2" in needs and not takes_y_swi else None,
        consumes,
        launches.get("up_fwd"),
        launches.get("weights_by_row"),
        launches.get("down_bwd"),
        launches.get("weights_bwd"),
        launches.get("down_wgrad"),
        launches.get("up_bwd"),
        launches.get("up_wgrad"),
        needs,
        defers_weights,
    )


def _configure_wgrad(
    index: IndexLayout,
    activation: str,
    limits: DeviceLimits,
    entry: str,
    rows: tuple[Operand, int],
    columns: tuple[Operand, int],
    gradient: Weight,
    M: int,
    N: int,
    halves: int,
    buffers: dict[str, tuple[Layout, ...]],
) -> Wgrad:
    accumulate = {"down_wgrad": "w2", "up_wgrad": "w1"}[entry] in buffers
    return grouped_gemm.configure_wgrad(
        entry, index, rows, columns, gradient, M, N, halves, activation, limits, accumulate
    )


@dataclass(slots=True)
class BackwardResult:
    """Gradients, None where not asked for; of weights that are accumulated None as well."""

    x: Buffer | None
    weights: Buffer | None
    w1: tuple[Buffer, ...] | None
    w2: tuple[Buffer, ...] | None
    first_layer_grad: Buffer | None = None  # where weight gradients are deferred, memory that is not the saved one
    weighted_y_swi: Buffer | None = None


def moe_backward(
    run: Runtime,
    steps: Backward,
    saved: SavedForBackward,
    grad_out: int,
    x: int,
    weights: int,
    w2: int,
    w1: tuple[int, ...],
    lists: int,
    first_layer: int,
    y_swi: int,
    accumulate: dict[str, tuple[int, ...]],
) -> BackwardResult:
    """Paper section 3.2 and Algorithm 1, lines 15-31, from addresses; SiLU and the product are recomputed.

    lists: the buffer of the index lists. first_layer, y_swi: 0 for what was not saved. accumulate: by name, the buffers
    that gradients of weights are added to. `saved` is told when it is about to be overwritten.
    """
    index = steps.index.addresses(lists)
    token_index_map, up = index[TOKEN_INDEX_MAP], steps.up.halves(w1)

    # Each gradient is allocated when it is due, that of x, whose product needs room, before the largest, that of w1.
    grad_weights = run.empty(steps.weights, steps.weights_dtype) if "weights" in steps.needs else None
    recomputed = run.empty(steps.first_layer, steps.dtype) if steps.first_layer else None
    if recomputed:
        first_layer = recomputed.ptr
        if steps.up_fwd:
            grouped_gemm.gemm(run, steps.up_fwd, index, x, up, first_layer=first_layer)
    separate = run.empty(steps.first_layer_grad, steps.dtype) if steps.first_layer_grad else None
    first_layer_grad = separate.ptr if separate else first_layer
    weighted = run.empty(steps.weighted_y_swi, steps.dtype) if steps.weighted_y_swi else None
    weighted_ptr = weighted.ptr if weighted else y_swi
    saved.consumed = steps.consumes

    if steps.down_bwd and steps.weights_by_row:
        row_weights = run.empty((steps.index.num_rows,), "float32")
        run.launch(steps.weights_by_row, weights, token_index_map, row_weights.ptr)
        partial_sums = grouped_gemm.gemm(
            run,
            steps.down_bwd,
            index,
            grad_out,
            (w2, w2),
            first_layer=first_layer,
            first_layer_grad=first_layer_grad if steps.needs_first_layer_grad else 0,
            result=weighted_ptr if "w2" in steps.needs else 0,
            y_swi=y_swi,
            weights=row_weights.ptr,
        )
        del row_weights
        if partial_sums and steps.weights_bwd and grad_weights:
            run.launch(steps.weights_bwd, partial_sums.ptr, token_index_map, grad_weights.ptr)
        del partial_sums
    grad_w2 = None
    if steps.down_wgrad:
        grad_w2 = None if "w2" in accumulate else steps.down.empty_gradient(run)
        addresses = accumulate["w2"] if grad_w2 is None else _addresses(grad_w2)
        grouped_gemm.wgrad(run, steps.down_wgrad, index, weighted_ptr, grad_out, steps.down_gradient.halves(addresses))
    deferred = (separate or recomputed, weighted) if steps.defers_weights else (None, None)
    del weighted
    grad_x = run.empty(steps.x, steps.dtype) if "x" in steps.needs else None
    if steps.up_bwd and grad_x:
        panels.sum_of_rows(run, steps.up_bwd, index, first_layer_grad, up, 0, grad_x.ptr)
    grad_w1 = None
    if steps.up_wgrad:
        grad_w1 = None if "w1" in accumulate else steps.up.empty_gradient(run)
        addresses = accumulate["w1"] if grad_w1 is None else _addresses(grad_w1)
        grouped_gemm.wgrad(run, steps.up_wgrad, index, x, first_layer_grad, steps.up_gradient.halves(addresses))
    return BackwardResult(grad_x, grad_weights, grad_w1, grad_w2, *deferred)


@dataclass(frozen=True, eq=False)
class Weights:
    """What the gradients of the weights launch, after a backward that deferred them."""

    index: IndexLayout
    up: Weight
    down: Weight
    up_gradient: Weight
    down_gradient: Weight
    down_wgrad: Wgrad | None
    up_wgrad: Wgrad | None


@cached
def configure_weights(
    grad_out: Layout,
    x: Layout,
    w2: Layout,
    w1: tuple[Layout, ...],
    first_layer_grad: Layout,
    weighted_y_swi: Layout,
    accumulate: tuple[tuple[str, tuple[Layout, ...]], ...],
    activation: str,
    needs: tuple[str, ...],
    limits: DeviceLimits,
    index: IndexLayout,
) -> Weights:
    """The launches of `moe_backward_weights` for arrays of these layouts; accumulate as of `configure_backward`."""
    d, h, dtype, gated, buffers = x.shape[1], w2.shape[1], x.dtype, is_gated(activation), dict(accumulate)
    half = _half_columns(w1, h, activation)
    up, down = Weight.of(w1, half), Weight.of((w2,))
    up_gradient = Weight.of(buffers.get("w1") or up.gradient_layouts(), half)
    down_gradient = Weight.of(buffers.get("w2") or down.gradient_layouts())
    x_rows, grad_rows = Operand(dtype, d, x.misalignment), Operand(dtype, d, grad_out.misalignment)
    first_rows = Operand(dtype, h * (1 + gated), first_layer_grad.misalignment)
    y_rows = Operand(dtype, h, weighted_y_swi.misalignment)
    wgrad = functools.partial(_configure_wgrad, index, activation, limits)
    down_wgrad = up_wgrad = None
    if "w2" in needs:
        down_wgrad = wgrad("down_wgrad", (y_rows, 0), (grad_rows, 0), down_gradient, h, d, 1, buffers)
    if "w1" in needs:
        columns = first_rows, h if gated else 0
        up_wgrad = wgrad("up_wgrad", (x_rows, 0), columns, up_gradient, d, h, 1 + gated, buffers)
    return Weights(index, up, down, up_gradient, down_gradient, down_wgrad, up_wgrad)


def moe_backward_weights(
    run: Runtime,
    steps: Weights,
    grad_out: int,
    x: int,
    lists: int,
    first_layer_grad: int,
    weighted_y_swi: int,
    accumulate: dict[str, tuple[int, ...]],
) -> BackwardResult:
    """The gradients of w2 and w1 (Algorithm 1, lines 18 and 29), from addresses as of `moe_backward`."""
    index = steps.index.addresses(lists)
    grad_w1 = grad_w2 = None
    if steps.down_wgrad:
        grad_w2 = None if "w2" in accumulate else steps.down.empty_gradient(run)
        addresses = accumulate["w2"] if grad_w2 is None else _addresses(grad_w2)
        gradient = steps.down_gradient.halves(addresses)
        grouped_gemm.wgrad(run, steps.down_wgrad, index, weighted_y_swi, grad_out, gradient)
    if steps.up_wgrad:
        grad_w1 = None if "w1" in accumulate else steps.up.empty_gradient(run)
        addresses = accumulate["w1"] if grad_w1 is None else _addresses(grad_w1)
        grouped_gemm.wgrad(run, steps.up_wgrad, index, x, first_layer_grad, steps.up_gradient.halves(addresses))
    return BackwardResult(None, None, grad_w1, grad_w2)


def _addresses(buffers: tuple[Buffer, ...]) -> tuple[int, ...]:
    return tuple(buffer.ptr for buffer in buffers)
