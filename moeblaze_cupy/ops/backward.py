"""The backward of the MoE layer on CUDA, whole or without the gradients of weights: Algorithm 1, lines 15-31.

`configure_backward` chooses all launches and buffers from layouts alone, once per layout; `moe_backward` allocates and
launches, in a straight line. `weight_gradients` has the other half of a divided backward.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeblaze_cupy.arrays import ITEMSIZE, Buffer, Layout
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.ops import aggregation, biases, fp8, grouped_gemm, panels, push, saved_fp8, square_tiles
from moeblaze_cupy.ops.biases import Bias, BiasBwd
from moeblaze_cupy.ops.dispatch import EXPERT_TOKEN_OFFSETS, TOKEN_INDEX_MAP, TOKEN_OFFSETS, IndexLayout
from moeblaze_cupy.ops.experts import Shape, half_columns, identity_rows, rows_of_slots
from moeblaze_cupy.ops.grouped_gemm import NOT_FP8, Fp8, Gemm, Operand, Weight, Wgrad
from moeblaze_cupy.ops.panels import Panels
from moeblaze_cupy.ops.weight_gradients import gradient_memory, up_columns
from moeblaze_cupy.runtime import Launch, Runtime, cached
from moeblaze_cupy.structures import (
    PLAIN_SLOTS,
    Activation,
    Gradients,
    SavedForBackward,
    SlotOptions,
    is_consumed,
    is_gated,
)


@dataclass(frozen=True, eq=False)
class Backward:
    """What a backward launches and allocates. Launches are None where they are not needed, or without tokens."""

    index: IndexLayout
    dtype: str
    weights_dtype: str
    x: Shape
    up: Weight
    down: Weight
    up_gradient: Weight  # w1's, new or the caller's
    down_gradient: Weight
    up_bias: Bias | None
    up_bias_gradient: Bias | None
    down_bias: Bias | None
    first_layer: Shape | None  # computed again, or from e4m3 in memory of its own
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
    up_bias_bwd: BiasBwd | None
    down_bias_bwd: BiasBwd | None
    further_parts: int  # of the partial sums, which down_bias_bwd writes
    needs: tuple[str, ...]
    slots_by_row: Launch | None  # where grad_out has a row per slot
    identity_weights: Launch | None
    reads_y_swi: bool  # it is the operand of w2's gradient as it was saved
    stored_y_swi: bool  # down_bwd reads it
    scales_slots: bool  # the sum over slots takes the router weights, for identity experts
    dequantize_saved: Launch | None  # where down_bwd cannot read e4m3
    weights_on_output: bool  # there are any, and they scale the rows of grad_out
    defers_weights: bool
    in_e4m3: fp8.Pass | None  # where up_fwd, down_bwd and up_bwd are in e4m3
    x_in_e4m3: fp8.Pass | None  # where up_fwd runs again in e4m3, of x
    square_tiles: Launch | None  # where a product has square tiles

    @functools.cached_property
    def cleared_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients of x and of weights to clear, because no kernel writes them; else 0."""
        of_x = 0 if self.up_bwd else math.prod(self.x) * ITEMSIZE[self.dtype]
        of_weights = 0 if self.weights_bwd else self.index.num_slots * ITEMSIZE[self.weights_dtype]
        return of_x, of_weights

    @functools.cached_property
    def needs_first_layer_grad(self) -> bool:
        return not {"x", "w1", "b1"}.isdisjoint(self.needs)


@cached
def configure_backward(
    grad_out: Layout,
    x: Layout,
    weights: Layout | None,
    w2: Layout,
    w1: tuple[Layout, ...],
    b1: tuple[Layout, ...],
    b2: tuple[Layout, ...],
    first_layer: Layout | None,
    y_swi: Layout | None,
    accumulate: tuple[tuple[str, tuple[Layout, ...]], ...],
    activation: str | Activation,
    gate_up: str,
    needs: tuple[str, ...],
    keep_saved: bool,
    limits: DeviceLimits,
    index: IndexLayout,
    slots: SlotOptions = PLAIN_SLOTS,
    defers_weights: bool = False,
    precision: str | None = None,
    place: push.Place | None = None,
) -> Backward:
    """The launches of `moe_backward` for arrays of these layouts.

    Unless `keep_saved`, the gradients of a, b (and weighted_y_swi in place of y_swi) overwrite the saved activations.
    b1, b2: () without a bias. accumulate: by name, the layouts of the buffers that gradients of weights and biases are
    added to, in place of new ones. defers_weights: what the gradients of w1 and w2 are products of stays in memory, and
    the products are not launched; there are no biases then. precision: "fp8" for products in e4m3 but those of weight
    gradients; x and grad_out may be in e4m3 then (uint8), if the gradients of weights are deferred. place: where the
    gradient of x goes, which is then of the tokens of several GPUs.
    """
    (L, d), h, dtype = x.shape, w2.shape[1], w2.dtype
    R, buffers = index.num_rows, dict(accumulate)
    if weights is None:
        needs = tuple(name for name in needs if name != "weights")
    gated, interleaved = is_gated(activation), gate_up == "interleaved"
    half, bias_half = (half_columns(parts, h, activation, interleaved) for parts in (w1, b1))
    up, down = Weight.of(w1, half), Weight.of((w2,))
    up_gradient = Weight.of(buffers.get("w1") or up.gradient_layouts(), half)
    down_gradient = Weight.of(buffers.get("w2") or down.gradient_layouts())
    up_bias, down_bias = Bias.of(b1, bias_half) if b1 else None, Bias.of(b2) if b2 else None
    up_bias_gradient = None
    first_layer_shape = (R, h * (1 + gated))
    needs_first_layer_grad = not {"x", "w1", "b1"}.isdisjoint(needs)
    x_rows, grad_rows = Operand(dtype, d, x.misalignment), Operand(dtype, d, grad_out.misalignment)
    in_fp8 = first_layer is not None and first_layer.dtype == "uint8"
    overwritable = None if in_fp8 else first_layer
    up_read, down_read, grad_read = up, down, grad_rows
    in_e4m3 = x_in_e4m3 = None
    if precision == "fp8":
        E, halves = w2.shape[0], 1 + gated
        in_e4m3 = fp8.configure(grad_out, E, R, h, halves, halves, interleaved)
        x_in_e4m3 = fp8.configure(x, E, R, h, halves, 1, interleaved) if first_layer is None else None
        up_read, down_read, grad_read = in_e4m3.weights.up_bwd, in_e4m3.weights.down_bwd, in_e4m3.rows_operand
    portable = grouped_gemm.config_of("down_bwd", grad_read, down_read, h, d, activation, limits)[0].tier == "sm80"
    is_made_anew = first_layer is None or (in_fp8 and portable)
    in_place = is_made_anew or not (keep_saved or in_fp8)
    reads_y_swi = slots.on_input and "w2" in needs and y_swi is not None  # no weight is to be put on it
    takes_y_swi = "w2" in needs and y_swi is not None and (in_place or reads_y_swi)
    stored_y_swi = y_swi is not None and not slots.on_input and in_e4m3 is None
    consumes = is_consumed(overwritable is not None, y_swi is not None, needs, keep_saved)

    def misaligned(layout: Layout | None) -> int:
        return 0 if layout is None else layout.misalignment

    first_rows = Operand(dtype, first_layer_shape[1], misaligned(overwritable) if in_place else 0)
    y_rows = Operand(dtype, h, misaligned(y_swi) if takes_y_swi else 0)
    launches: dict[str, Any] = {}
    further_parts, on_output = 0, weights is not None and not slots.on_input
    if down_bias and ("b2" in needs or ("weights" in needs and on_output)):
        gradient = Bias.of(buffers.get("b2") or down_bias.gradient_layouts())
        step = biases.configure(index, dtype, grad_out.misalignment, down_bias, gradient, True, "b2" in buffers)
        launches["down_bias_bwd"] = step
        further_parts = step.parts if on_output else 0
    beyond_b2 = bool(set(needs) - {"b2"})
    if L and R and needs:
        if weights is not None and (on_output or beyond_b2):
            launches["weights_by_row"] = aggregation.weights_by_row(index, weights.dtype)
        if slots.unreduced:
            launches["slots_by_row"] = aggregation.slots_by_row(index)
    if L and R and beyond_b2:
        if first_layer is None:
            launches["up_fwd"] = grouped_gemm.configure(
                "up_fwd",
                index,
                x_in_e4m3.rows_operand if x_in_e4m3 else x_rows,
                x_in_e4m3.weights.up_fwd if x_in_e4m3 else up,
                h,
                d,
                activation,
                limits,
                interleaved=interleaved,
                bias=up_bias,
                result_ld=0,
            )
        if in_fp8 and is_made_anew:
            layout = dtype, h, 1 + gated, interleaved
            launches["dequantize_saved"] = saved_fp8.configure("dequantize", index, *layout, limits)
        down_bwd = grouped_gemm.configure(
            "down_bwd",
            index,
            grad_read,
            down_read,
            h,
            d,
            activation,
            limits,
            interleaved=interleaved,
            result_ld=h if "w2" in needs and not reads_y_swi else 0,
            stored_y_swi=stored_y_swi,
            wants_partial_sums="weights" in needs,
            further_parts=further_parts,
            weights_on_input=slots.on_input,
            fp8_saved=in_fp8 and not is_made_anew,
        )
        launches["down_bwd"] = down_bwd
        if down_bwd.partial_sums and weights is not None:
            launches["weights_bwd"] = aggregation.weights_bwd(index, weights.dtype, down_bwd.partial_sums[0])
            if slots.identity_experts:
                launches["identity_weights"] = aggregation.identity_weights(index, x, grad_out, weights.dtype)
    wgrad = functools.partial(grouped_gemm.configure_wgrad, index, activation, limits)
    if "w2" in needs and not defers_weights:
        launches["down_wgrad"] = wgrad(
            "down_wgrad", (y_rows, 0), (grad_rows, 0), down_gradient, h, d, 1, "w2" in buffers
        )
    if "x" in needs and L and R:
        depth, source = 2 * h if interleaved else h, identity_rows(grad_out, weights, slots)
        rows = in_e4m3.routed_operand if in_e4m3 else first_rows
        options: dict[str, Any] = {"interleaved": interleaved, "source": source, "place": place}
        call = "up_bwd", index, rows, up_read, depth, d, activation, limits
        launches["up_bwd"] = panels.configure(*call, **options)
    if "w1" in needs and not defers_weights:
        columns, operand, halves = up_columns(first_rows, h, gated, interleaved)
        launches["up_wgrad"] = wgrad("up_wgrad", (x_rows, 0), operand, up_gradient, d, columns, halves, "w1" in buffers)
    if "b1" in needs and up_bias:
        up_bias_gradient = Bias.of(buffers.get("b1") or up_bias.gradient_layouts(), bias_half)
        launches["up_bias_bwd"] = biases.configure(
            index, dtype, first_rows.misalignment, up_bias, up_bias_gradient, False, "b1" in buffers
        )
    in_tiles = launches.get("up_fwd"), launches.get("up_bwd")
    return Backward(
        index,
        dtype,
        dtype if weights is None else weights.dtype,
        x.shape,
        up,
        down,
        up_gradient,
        down_gradient,
        up_bias,
        up_bias_gradient,
        down_bias,
        first_layer_shape if is_made_anew and beyond_b2 else None,
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
        launches.get("up_bias_bwd"),
        launches.get("down_bias_bwd"),
        further_parts,
        needs,
        launches.get("slots_by_row"),
        launches.get("identity_weights"),
        reads_y_swi,
        stored_y_swi,
        slots.identity_experts > 0,
        launches.get("dequantize_saved"),
        on_output,
        defers_weights,
        in_e4m3,
        x_in_e4m3,
        square_tiles.configure(index) if any(step and step.square for step in in_tiles) else None,
    )


def moe_backward(
    run: Runtime,
    steps: Backward,
    saved: SavedForBackward,
    accumulate: Mapping[str, Sequence[int]],
    grad_out: int,
    x: int,
    weights: int,
    gate: int,
    up: int,
    w2: int,
    b1_gate: int,
    b1_up: int,
    b2: int,
    lists: int,
    first_layer: int,
    y_swi: int,
    *,
    grad_x: Buffer | None = None,
    weights_fp8: fp8.Addresses | None = None,
    wait: Callable[[], None] | None = None,
    x_scales: int = 0,
    grad_scales: int = 0,
    to: push.Addresses = push.NOWHERE,
) -> tuple[Gradients, Any, Any]:
    """Paper section 3.2 and Algorithm 1, lines 15-31, from addresses; SiLU and the product are recomputed.

    The address of what there is not is 0, as of up where w1 is one array, and of first_layer where it was not saved.
    lists: the buffer of the index lists. accumulate: by name, the buffers that gradients of weights and biases are
    added to. grad_x: memory for it; None allocates it. wait: has the stream wait for rows of grad_out that are on their
    way, for a layer without biases. `saved` is told when it is about to be overwritten. x_scales, grad_scales: of the
    rows of x and grad_out in e4m3. to: where the gradient of x goes, in place of an array.
    Returns gradients, None where not asked for, and of what is accumulated; and where weight gradients are deferred,
    the arrays of first_layer_grad and weighted_y_swi, None where they lie in the memory of what was saved.
    """
    index = steps.index.addresses(lists)
    squares, of_squares = square_tiles.listed(run, steps.square_tiles, steps.index, index)
    token_index_map, w1 = index[TOKEN_INDEX_MAP], steps.up.halves(gate, up)

    # Each gradient is allocated when it is due, that of x, whose product needs room, before the largest, that of w1.
    grad_weights = run.empty(steps.index.slots_shape, steps.weights_dtype) if "weights" in steps.needs else None
    recomputed = run.empty(steps.first_layer, steps.dtype) if steps.first_layer else None
    if recomputed:
        in_e4m3, first_layer = first_layer, recomputed.ptr
        if steps.dequantize_saved:
            run.launch(steps.dequantize_saved, first_layer, index[EXPERT_TOKEN_OFFSETS], in_e4m3)
        if steps.up_fwd:
            bias = steps.up_bias.halves(b1_gate, b1_up) if steps.up_bias else (0, 0)
            x_read, up_read, of_up_fwd, x_e4m3 = x, w1, NOT_FP8, None
            if steps.x_in_e4m3 and weights_fp8:
                x_e4m3 = fp8.quantized_rows(run, steps.x_in_e4m3, x, x_scales)
                x_read, up_read = x_e4m3.values, steps.x_in_e4m3.weights.up_fwd.halves(weights_fp8.w1_transposed)
                of_up_fwd = Fp8(x_e4m3.scales, weights_fp8.w1_scales)
            lists_read = squares if steps.up_fwd.square else index
            grouped_gemm.gemm(
                run, steps.up_fwd, lists_read, x_read, up_read, first_layer=first_layer, bias=bias, fp8=of_up_fwd
            )
            del x_e4m3
    separate = run.empty(steps.first_layer_grad, steps.dtype) if steps.first_layer_grad else None
    first_layer_grad = separate.ptr if separate else first_layer
    weighted = run.empty(steps.weighted_y_swi, steps.dtype) if steps.weighted_y_swi else None
    weighted_ptr = weighted.ptr if weighted else y_swi
    saved.consumed = steps.consumes

    cleared_of_x, cleared_of_weights = steps.cleared_bytes
    if grad_weights and cleared_of_weights:
        run.clear(grad_weights.ptr, cleared_of_weights)
    row_weights = partial_sums = grad_b2 = None
    grad_rows, by_row = index, None
    if steps.weights_by_row or steps.slots_by_row:
        row_weights = run.empty((steps.index.num_rows,), "float32")
        if steps.weights_by_row:
            run.launch(steps.weights_by_row, weights, token_index_map, row_weights.ptr)
        ones = 0 if steps.weights_by_row else row_weights.ptr
        grad_rows, by_row = rows_of_slots(run, steps.slots_by_row, index, ones)
    row_weights_ptr = row_weights.ptr if row_weights else 0
    grad_read, down_read, up_read, of_down_bwd, of_up_bwd = grad_out, (w2, w2), w1, NOT_FP8, NOT_FP8
    grad_e4m3 = first_layer_grad_e4m3 = None
    if wait is not None:
        wait()
    if steps.in_e4m3 and weights_fp8 and steps.down_bwd:
        grad_e4m3 = fp8.quantized_rows(run, steps.in_e4m3, grad_out, grad_scales)
        grad_read, down_read = grad_e4m3.values, (weights_fp8.w2, weights_fp8.w2)
        of_down_bwd = Fp8(grad_e4m3.scales, weights_fp8.w2_scales)
        if steps.up_bwd:
            first_layer_grad_e4m3 = fp8.routed_rows(run, steps.in_e4m3)
            quantised, quantised_scales = (buffer.ptr for buffer in first_layer_grad_e4m3)
            of_down_bwd = of_down_bwd._replace(quantised=quantised, quantised_scales=quantised_scales)
            up_read = steps.in_e4m3.weights.up_bwd.halves(weights_fp8.w1)
            of_up_bwd = Fp8(quantised_scales, weights_fp8.w1_scales)
    if steps.down_bwd:
        partial_sums = grouped_gemm.gemm(
            run,
            steps.down_bwd,
            grad_rows,
            grad_read,
            down_read,
            first_layer=first_layer,
            first_layer_grad=first_layer_grad if steps.needs_first_layer_grad else 0,
            result=weighted_ptr if "w2" in steps.needs and not steps.reads_y_swi else 0,
            y_swi=y_swi if steps.stored_y_swi else 0,
            weights=row_weights_ptr,
            fp8=of_down_bwd,
        )
    del grad_e4m3
    if steps.down_bias_bwd and steps.down_bias:
        own = "b2" in steps.needs and "b2" not in accumulate
        grad_b2, addresses = gradient_memory(run, steps.down_bias, None if own else accumulate.get("b2", (0,)))
        further = 0
        if partial_sums and steps.further_parts and steps.down_bwd and steps.down_bwd.partial_sums:
            parts, slots = steps.down_bwd.partial_sums
            further = partial_sums.ptr + 4 * slots * (parts - steps.further_parts)
        biases.bias_bwd(
            run,
            steps.down_bias_bwd,
            grad_rows,
            grad_out,
            (addresses[0], addresses[0]),
            row_weights=row_weights_ptr if steps.weights_on_output else 0,
            bias=b2,
            partial_sums=further,
        )
    del row_weights
    if partial_sums and steps.weights_bwd and grad_weights:
        run.launch(steps.weights_bwd, partial_sums.ptr, token_index_map, grad_weights.ptr)
        if steps.identity_weights:
            token_offsets = index[TOKEN_OFFSETS]
            run.launch(steps.identity_weights, x, grad_out, token_index_map, token_offsets, grad_weights.ptr)
    del partial_sums
    grad_w2 = None
    if steps.down_wgrad:
        grad_w2, addresses = gradient_memory(run, steps.down, accumulate.get("w2"))
        down_gradient = steps.down_gradient.halves(*addresses)
        grouped_gemm.wgrad(run, steps.down_wgrad, grad_rows, weighted_ptr, grad_out, down_gradient)
    first_layer_kept = weighted_kept = None
    if steps.defers_weights:
        own_first_layer = separate or recomputed
        first_layer_kept = own_first_layer.array if own_first_layer else None
        weighted_kept = weighted.array if weighted else None
    del weighted, by_row
    if "x" in steps.needs and not (grad_x or to.peers):
        grad_x = run.empty(steps.x, steps.dtype)
    if steps.up_bwd:
        weights = weights if steps.scales_slots else 0
        rows = first_layer_grad_e4m3[0].ptr if first_layer_grad_e4m3 else first_layer_grad
        out, lists_read = (weights, grad_x.ptr if grad_x else 0), squares if steps.up_bwd.square else index
        options: dict[str, Any] = {"source": grad_out, "fp8": of_up_bwd, "to": to}
        panels.sum_of_rows(run, steps.up_bwd, lists_read, rows, up_read, *out, **options)
    elif grad_x and cleared_of_x:
        run.clear(grad_x.ptr, cleared_of_x)
    del first_layer_grad_e4m3, of_squares
    grad_w1 = None
    if steps.up_wgrad:
        grad_w1, addresses = gradient_memory(run, steps.up, accumulate.get("w1"))
        grouped_gemm.wgrad(run, steps.up_wgrad, index, x, first_layer_grad, steps.up_gradient.halves(*addresses))
    grad_b1 = None
    if steps.up_bias_bwd and steps.up_bias and steps.up_bias_gradient:
        grad_b1, addresses = gradient_memory(run, steps.up_bias, accumulate.get("b1"))
        sums = steps.up_bias_gradient.halves(*addresses)
        biases.bias_bwd(run, steps.up_bias_bwd, index, first_layer_grad, sums)
    of_x, of_weights = grad_x.array if grad_x else None, grad_weights.array if grad_weights else None
    return Gradients(of_x, of_weights, grad_w1, grad_w2, grad_b1, grad_b2), first_layer_kept, weighted_kept
