"""The backward of the MoE layer on CUDA, whole or without the gradients of weights: Algorithm 1, lines 15-31.

`configure_backward` chooses all launches and buffers from layouts alone, once per layout; `moe_backward` allocates and
launches, in a straight line. `weight_gradients` has the other half of a divided backward.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.dispatch.launches import EXPERT_TOKEN_OFFSETS, TOKEN_INDEX_MAP, TOKEN_OFFSETS, IndexLayout, Lists
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.fp8 import saved as saved_fp8
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer, Layout, packed
from moeblaze_cupy.gemm import biases, panels, square_tiles
from moeblaze_cupy.gemm import products as grouped_gemm
from moeblaze_cupy.gemm.biases import Bias, BiasBwd
from moeblaze_cupy.gemm.panels import Panels
from moeblaze_cupy.gemm.products import PLAIN, Gemm, GemmExtras, Operand, Product, Rows, Weight, Wgrad
from moeblaze_cupy.layer.forward import (
    PLAIN_PASS,
    Forward,
    PassExtras,
    Shape,
    half_columns,
    identity_rows,
    rows_of_slots,
)
from moeblaze_cupy.layer.weight_gradients import gradient_memory, up_columns
from moeblaze_cupy.rows import aggregation, push
from moeblaze_cupy.types import (
    BIASES,
    GRADIENTS,
    BackwardArrays,
    BackwardOptions,
    Gradients,
    LayerArrays,
    LayerOptions,
    SavedForBackward,
    is_consumed,
)

Accumulated = tuple[tuple[str, tuple[Layout, ...]], ...]  # by name, the buffers that gradients are added to


@dataclass(frozen=True, eq=False)
class Backward:
    """What a backward launches and allocates. Launches are None where they are not needed, or without tokens."""

    how: BackwardOptions  # without "weights" among the needs where the layer has none
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
    reads_y_swi: bool  # it is the operand of w2's gradient as it was saved
    stored_y_swi: bool  # down_bwd reads it
    scales_slots: bool  # the sum over slots takes the router weights, for identity experts
    weights_on_output: bool  # there are any, and they scale the rows of grad_out
    in_e4m3: fp8.Pass | None  # where up_fwd, down_bwd and up_bwd are in e4m3
    x_in_e4m3: fp8.Pass | None  # where up_fwd runs again in e4m3, of x
    further_parts: int = 0  # of the partial sums, which down_bias_bwd writes
    up_fwd: Gemm | None = None
    dequantize_saved: Launch | None = None  # where down_bwd cannot read e4m3
    weights_by_row: Launch | None = None
    slots_by_row: Launch | None = None  # where grad_out has a row per slot
    down_bwd: Gemm | None = None
    weights_bwd: Launch | None = None
    identity_weights: Launch | None = None
    down_bias_bwd: BiasBwd | None = None
    down_wgrad: Wgrad | None = None
    up_bwd: Panels | None = None
    up_wgrad: Wgrad | None = None
    up_bias_bwd: BiasBwd | None = None
    square_tiles: Launch | None = None  # where a product has square tiles

    @functools.cached_property
    def cleared_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients of x and of weights to clear, because no kernel writes them; else 0."""
        of_x = 0 if self.up_bwd else math.prod(self.x) * ITEMSIZE[self.dtype]
        of_weights = 0 if self.weights_bwd else self.index.num_slots * ITEMSIZE[self.weights_dtype]
        return of_x, of_weights


@dataclass(frozen=True, eq=False)
class _Operands:
    """What the products of a backward read."""

    up: Weight
    down_product: Product  # of down_bwd
    x: Operand
    grad: Operand
    first_layer: Operand  # and its gradient
    y_swi: Operand  # weighted, for w2's gradient
    up_bias: Bias | None
    in_e4m3: fp8.Pass | None
    x_in_e4m3: fp8.Pass | None
    saved_in_fp8: bool  # the first layer
    is_recomputed: bool  # the first layer, or it is converted from e4m3


@cached
def configure_backward(
    arrays: BackwardArrays,
    options: LayerOptions,
    how: BackwardOptions,
    accumulate: Accumulated,
    limits: DeviceLimits,
    index: IndexLayout,
    place: push.PeerOffset | None = None,
) -> Backward:
    """The launches of `moe_backward` for arrays of these layouts.

    Unless `how.keep_saved`, the gradients of a, b (and weighted_y_swi in place of y_swi) overwrite the saved
    activations. accumulate: by name, the layouts of the buffers that gradients of weights and biases are added to, in
    place of new ones. With `how.defers_weights` what the gradients of w1 and w2 are products of stays in memory; there
    are no biases then, and x and grad_out may be in e4m3 (uint8). place: where the gradient of x goes, which is then of
    the tokens of several GPUs.
    """
    layer, first_layer, y_swi = arrays.layer, arrays.first_layer, arrays.y_swi
    (L, d), h, dtype, weights = layer.x.shape, layer.w2.shape[1], layer.w2.dtype, layer.router_weights
    R, buffers = index.num_rows, dict(accumulate)
    if weights is None:
        how = how._replace(needs=tuple(name for name in how.needs if name != "weights"))
    needs, w1, b1 = how.needs, layer.w1_parts, layer.b1_parts
    half, bias_half = (half_columns(parts, h, options) for parts in (w1, b1))
    up, down = Weight.of(w1, half), Weight.of((layer.w2,))
    up_bias, down_bias = Bias.of(b1, bias_half) if b1 else None, Bias.of(layer.b2_parts) if layer.b2 else None
    saved_in_fp8 = first_layer is not None and first_layer.dtype == "uint8"
    in_e4m3 = x_in_e4m3 = None
    x_rows, grad_rows = Operand(dtype, d, layer.x.misalignment), Operand(dtype, d, arrays.grad_out.misalignment)
    down_read, grad_read = down, grad_rows
    if options.precision == "fp8":
        form = layer.w2.shape[0], R, h, options.halves
        in_e4m3 = fp8.configure(arrays.grad_out, *form, options.halves, options.interleaved)
        x_in_e4m3 = fp8.configure(layer.x, *form, 1, options.interleaved) if first_layer is None else None
        down_read, grad_read = in_e4m3.weights.down_bwd, in_e4m3.rows_operand
    down_product = Product("down_bwd", index, grad_read, down_read, h, d, options.activation, options.interleaved)
    portable = grouped_gemm.config_of(down_product, limits)[0].tier == "sm80"
    is_recomputed = first_layer is None or (saved_in_fp8 and portable)
    in_place = is_recomputed or not (how.keep_saved or saved_in_fp8)
    reads_y_swi = options.on_input and "w2" in needs and y_swi is not None  # no weight is to be put on it
    takes_y_swi = "w2" in needs and y_swi is not None and (in_place or reads_y_swi)
    overwritable = None if saved_in_fp8 else first_layer
    operands = _Operands(
        up=up,
        down_product=down_product,
        x=x_rows,
        grad=grad_rows,
        first_layer=Operand(dtype, h * options.halves, overwritable.misalignment if overwritable and in_place else 0),
        y_swi=Operand(dtype, h, y_swi.misalignment if takes_y_swi else 0),
        up_bias=up_bias,
        in_e4m3=in_e4m3,
        x_in_e4m3=x_in_e4m3,
        saved_in_fp8=saved_in_fp8,
        is_recomputed=is_recomputed,
    )
    b1_gradient = Bias.of(buffers.get("b1") or up_bias.gradient_layouts(), bias_half) if up_bias else None
    fields: dict[str, Any] = {
        "reads_y_swi": reads_y_swi,
        "stored_y_swi": y_swi is not None and not options.on_input and in_e4m3 is None,
        "weights_on_output": weights is not None and not options.on_input,
        "up_gradient": Weight.of(buffers.get("w1") or up.gradient_layouts(), half),
        "down_gradient": Weight.of(buffers.get("w2") or down.gradient_layouts()),
        "up_bias_gradient": b1_gradient if "b1" in needs else None,
    }
    fields |= _bias_launches(arrays, how, buffers, index, operands, down_bias, fields)
    beyond_b2 = bool(set(needs) - {"b2"})
    if L and R and needs:
        if weights is not None and (fields["weights_on_output"] or beyond_b2):
            fields["weights_by_row"] = aggregation.weights_by_row(index, weights.dtype)
        if options.unreduced:
            fields["slots_by_row"] = aggregation.slots_by_row(index)
    if L and R and beyond_b2:
        fields |= _first_half(arrays, options, how, limits, index, operands, fields)
        if "x" in needs:
            fields["up_bwd"] = _up_bwd(arrays, options, limits, index, operands, place)
    fields |= _weight_launches(options, how, limits, index, operands, buffers, fields)
    in_tiles = fields.get("up_fwd"), fields.get("up_bwd")
    return Backward(
        how=how,
        index=index,
        dtype=dtype,
        weights_dtype=dtype if weights is None else weights.dtype,
        x=layer.x.shape,
        up=up,
        down=down,
        up_bias=up_bias,
        down_bias=down_bias,
        first_layer=(R, h * options.halves) if is_recomputed and beyond_b2 else None,
        first_layer_grad=(R, h * options.halves) if how.first_layer and not in_place else None,
        weighted_y_swi=(R, h) if "w2" in needs and not takes_y_swi else None,
        consumes=is_consumed(overwritable is not None, y_swi is not None, needs, how.keep_saved),
        scales_slots=options.identity_experts > 0,
        in_e4m3=in_e4m3,
        x_in_e4m3=x_in_e4m3,
        square_tiles=square_tiles.configure(index) if any(step and step.square for step in in_tiles) else None,
        **fields,
    )


def configure_after(
    forward: Forward, layer: LayerArrays, limits: DeviceLimits, accumulate: Accumulated = ()
) -> Backward:
    """The backward that follows a forward, for all gradients, of packed memory.

    layer: the layouts that the forward was configured with. accumulate: as of `configure_backward`.
    """
    options, index, device = forward.options, forward.dispatch.index, layer.x.device
    biases = (name for name, given in zip(BIASES, (layer.b1_gate, layer.b2), strict=True) if given)
    arrays = BackwardArrays(
        packed(forward.out, forward.dtype, device),
        layer._replace(ids=None, token_offsets=None),
        packed((index.size,), "int32", device),
        forward.first_layer and packed(forward.first_layer, forward.first_layer_dtype, device),
        packed(forward.y_swi, forward.dtype, device) if forward.keeps_y_swi else None,
    )
    return configure_backward(arrays, options, BackwardOptions((*GRADIENTS, *biases)), accumulate, limits, index)


def _bias_launches(
    arrays: BackwardArrays,
    how: BackwardOptions,
    buffers: Mapping[str, tuple[Layout, ...]],
    index: IndexLayout,
    operands: _Operands,
    down_bias: Bias | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The launches of the gradients of biases, by the names of `Backward`. fields: those that are known."""
    made: dict[str, Any] = {}
    dtype, needs, on_output = operands.x.dtype, how.needs, fields["weights_on_output"]
    if down_bias and ("b2" in needs or ("weights" in needs and on_output)):
        gradient = Bias.of(buffers.get("b2") or down_bias.gradient_layouts())
        of_rows = index, dtype, arrays.grad_out.misalignment
        step = biases.configure(*of_rows, down_bias, gradient, True, "b2" in buffers)
        made |= {"down_bias_bwd": step, "further_parts": step.parts if on_output else 0}
    if fields["up_bias_gradient"] and operands.up_bias:
        of_rows = index, dtype, operands.first_layer.misalignment
        gradient = fields["up_bias_gradient"]
        made["up_bias_bwd"] = biases.configure(*of_rows, operands.up_bias, gradient, False, "b1" in buffers)
    return made


def _first_half(
    arrays: BackwardArrays,
    options: LayerOptions,
    how: BackwardOptions,
    limits: DeviceLimits,
    index: IndexLayout,
    operands: _Operands,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The launches up to down_bwd and the gradient of the router weights, by the names of `Backward`."""
    layer, made = arrays.layer, dict[str, Any]()
    h, d, weights = layer.w2.shape[1], layer.x.shape[1], layer.router_weights
    if arrays.first_layer is None:
        x_rows, up = operands.x, operands.up
        if operands.x_in_e4m3:
            x_rows, up = operands.x_in_e4m3.rows_operand, operands.x_in_e4m3.weights.up_fwd
        of_layer = h, d, options.activation, options.interleaved, operands.up_bias
        made["up_fwd"] = grouped_gemm.configure(Product("up_fwd", index, x_rows, up, *of_layer), limits)
    elif operands.is_recomputed:
        form = operands.x.dtype, h, options.halves, options.interleaved
        made["dequantize_saved"] = saved_fp8.configure("dequantize", index, *form, limits)
    down_bwd = grouped_gemm.configure(
        operands.down_product,
        limits,
        Rows(h if "w2" in how.needs and not fields["reads_y_swi"] else 0),
        stored_y_swi=fields["stored_y_swi"],
        further_parts=fields.get("further_parts", 0) if "weights" in how.needs else None,
        weights_on_input=options.on_input,
        fp8_saved=operands.saved_in_fp8 and not operands.is_recomputed,
    )
    made["down_bwd"] = down_bwd
    if down_bwd.partial_sums and weights is not None:
        made["weights_bwd"] = aggregation.weights_bwd(index, weights.dtype, down_bwd.partial_sums[0])
        if options.identity_experts:
            of_rows = layer.x, arrays.grad_out, weights.dtype
            made["identity_weights"] = aggregation.identity_weights(index, *of_rows)
    return made


def _up_bwd(
    arrays: BackwardArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    index: IndexLayout,
    operands: _Operands,
    place: push.PeerOffset | None,
) -> Panels:
    rows, up = operands.first_layer, operands.up
    if operands.in_e4m3:
        rows, up = operands.in_e4m3.routed_operand, operands.in_e4m3.weights.up_bwd
    (_, d), h = arrays.layer.x.shape, arrays.layer.w2.shape[1]
    depth = 2 * h if options.interleaved else h
    source = identity_rows(arrays.grad_out, arrays.layer.router_weights, options)
    product = Product("up_bwd", index, rows, up, d, depth, options.activation, options.interleaved)
    return panels.configure(product, limits, source=source, place=place)


def _weight_launches(
    options: LayerOptions,
    how: BackwardOptions,
    limits: DeviceLimits,
    index: IndexLayout,
    operands: _Operands,
    buffers: Mapping[str, tuple[Layout, ...]],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The launches of the gradients of w1 and w2, by the names of `Backward`; none where they are deferred."""
    made: dict[str, Any] = {}
    if how.defers_weights:
        return made
    wgrad = functools.partial(grouped_gemm.configure_wgrad, index, options.activation, limits)
    if "w2" in how.needs:
        rows = (operands.y_swi, 0), (operands.grad, 0)
        made["down_wgrad"] = wgrad("down_wgrad", *rows, fields["down_gradient"], 1, "w2" in buffers)
    if "w1" in how.needs:
        operand, halves = up_columns(operands.first_layer, operands.y_swi.ld, options)
        rows = (operands.x, 0), operand
        made["up_wgrad"] = wgrad("up_wgrad", *rows, fields["up_gradient"], halves, "w1" in buffers)
    return made


class Results(NamedTuple):
    """What `moe_backward` makes."""

    gradients: Gradients  # None where not asked for, and of what is accumulated
    #: Where weight gradients are deferred, the arrays of what they are products of; None where these lie in the memory
    #: of what was saved.
    first_layer_grad: Any
    weighted_y_swi: Any


def moe_backward(
    run: Runtime,
    steps: Backward,
    saved: SavedForBackward,
    accumulate: Mapping[str, Sequence[int]],
    arrays: BackwardArrays,
    extras: PassExtras = PLAIN_PASS,
) -> Results:
    """Paper section 3.2 and Algorithm 1, lines 15-31, from addresses; SiLU and the product are recomputed.

    accumulate: by name, the buffers that gradients of weights and biases are added to. `saved` is told when it is about
    to be overwritten. extras: `wait` is for a layer without biases.
    """
    grad_x, wait, weights_fp8, x_scales, grad_scales, to, decode = extras
    layer, needs, index = arrays.layer, steps.how.needs, steps.index.addresses(arrays.lists)
    if decode is not None:
        decode(run, index[EXPERT_TOKEN_OFFSETS])
    squares, of_squares = square_tiles.listed(run, steps.square_tiles, steps.index, index)
    # Each gradient is allocated when it is due, that of x, whose product needs room, before the largest, that of w1.
    grad_weights = run.empty(steps.index.slots_shape, steps.weights_dtype) if "weights" in needs else None
    recomputed = None
    if steps.first_layer:
        recomputed = _recomputed(run, steps, steps.first_layer, arrays, (index, squares), weights_fp8, x_scales)
    first_layer = recomputed.ptr if recomputed else arrays.first_layer
    separate = run.empty(steps.first_layer_grad, steps.dtype) if steps.first_layer_grad else None
    first_layer_grad = separate.ptr if separate else first_layer
    weighted = run.empty(steps.weighted_y_swi, steps.dtype) if steps.weighted_y_swi else None
    weighted_ptr = weighted.ptr if weighted else arrays.y_swi
    saved.consumed = steps.consumes

    cleared_of_x, cleared_of_weights = steps.cleared_bytes
    if grad_weights and cleared_of_weights:
        run.clear(grad_weights.ptr, cleared_of_weights)
    row_weights = None
    grad_rows, by_row = index, None
    if steps.weights_by_row or steps.slots_by_row:
        row_weights = run.empty((steps.index.num_rows,), "float32")
        if steps.weights_by_row:
            run.launch(steps.weights_by_row, layer.router_weights, index[TOKEN_INDEX_MAP], row_weights.ptr)
        ones = 0 if steps.weights_by_row else row_weights.ptr
        grad_rows, by_row = rows_of_slots(run, steps.slots_by_row, index, ones)
    if wait is not None:
        wait()
    row_weights_ptr = row_weights.ptr if row_weights else 0
    to_layer = first_layer, first_layer_grad if steps.how.first_layer else 0, weighted_ptr
    partial_sums, first_layer_grad_e4m3 = _down_bwd(
        run, steps, arrays, grad_rows, to_layer, row_weights_ptr, weights_fp8, grad_scales
    )
    grad_b2 = None
    if steps.down_bias:
        grad_b2 = _down_bias_bwd(run, steps, arrays, grad_rows, row_weights_ptr, partial_sums, accumulate)
    del row_weights
    if partial_sums and steps.weights_bwd and grad_weights:
        run.launch(steps.weights_bwd, partial_sums.ptr, index[TOKEN_INDEX_MAP], grad_weights.ptr)
        if steps.identity_weights:
            of_tokens = layer.x, arrays.grad_out, index[TOKEN_INDEX_MAP], index[TOKEN_OFFSETS]
            run.launch(steps.identity_weights, *of_tokens, grad_weights.ptr)
    del partial_sums
    grad_w2 = None
    if steps.down_wgrad:
        grad_w2, addresses = gradient_memory(run, steps.down, accumulate.get("w2"))
        down_gradient = steps.down_gradient.halves(*addresses)
        grouped_gemm.wgrad(run, steps.down_wgrad, grad_rows, weighted_ptr, arrays.grad_out, down_gradient)
    kept = (separate or recomputed, weighted) if steps.how.defers_weights else (None, None)
    del weighted, by_row
    if "x" in needs and not (grad_x or to.peers):
        grad_x = run.empty(steps.x, steps.dtype)
    if steps.up_bwd:
        rows, up, of_up_bwd = first_layer_grad, steps.up.halves(layer.w1_gate, layer.w1_up), PLAIN
        if to.peers:
            of_up_bwd = GemmExtras(peers=to.peers, needed=to.needed)
        if steps.in_e4m3 and weights_fp8 and first_layer_grad_e4m3:
            rows, up = first_layer_grad_e4m3[0].ptr, steps.in_e4m3.weights.up_bwd.halves(weights_fp8.w1)
            of_up_bwd = GemmExtras(first_layer_grad_e4m3[1].ptr, weights_fp8.w1_scales, 0, 0, *to)
        lists, scale = squares if steps.up_bwd.square else index, layer.router_weights if steps.scales_slots else 0
        out = grad_x.ptr if grad_x else 0
        panels.sum_of_rows(run, steps.up_bwd, lists, rows, up, scale, out, source=arrays.grad_out, extras=of_up_bwd)
    elif grad_x and cleared_of_x:
        run.clear(grad_x.ptr, cleared_of_x)
    del first_layer_grad_e4m3, of_squares
    grad_w1 = grad_b1 = None
    if steps.up_wgrad:
        grad_w1, addresses = gradient_memory(run, steps.up, accumulate.get("w1"))
        up_gradient = steps.up_gradient.halves(*addresses)
        grouped_gemm.wgrad(run, steps.up_wgrad, index, layer.x, first_layer_grad, up_gradient)
    if steps.up_bias_bwd and steps.up_bias and steps.up_bias_gradient:
        grad_b1, addresses = gradient_memory(run, steps.up_bias, accumulate.get("b1"))
        biases.bias_bwd(run, steps.up_bias_bwd, index, first_layer_grad, steps.up_bias_gradient.halves(*addresses))
    of_x, of_weights = grad_x and grad_x.array, grad_weights and grad_weights.array
    grads = Gradients(of_x, of_weights, grad_w1, grad_w2, grad_b1, grad_b2)
    return Results(grads, *(buffer and buffer.array for buffer in kept))


def _recomputed(
    run: Runtime,
    steps: Backward,
    shape: Shape,
    arrays: BackwardArrays,
    lists: tuple[Lists, Lists],
    weights_fp8: fp8.Addresses | None,
    x_scales: int,
) -> Buffer:
    """The first layer in memory of its own, computed again or converted from e4m3.

    lists: dispatch's, and those of square tiles.
    """
    layer, (index, squares) = arrays.layer, lists
    made = run.empty(shape, steps.dtype)
    if steps.dequantize_saved:
        run.launch(steps.dequantize_saved, made.ptr, index[EXPERT_TOKEN_OFFSETS], arrays.first_layer)
    if steps.up_fwd:
        bias = steps.up_bias.halves(layer.b1_gate, layer.b1_up) if steps.up_bias else (0, 0)
        x, up, of_up_fwd, x_e4m3 = layer.x, steps.up.halves(layer.w1_gate, layer.w1_up), PLAIN, None
        if steps.x_in_e4m3 and weights_fp8:
            x_e4m3 = fp8.quantized_rows(run, steps.x_in_e4m3, x, x_scales)
            x, up = x_e4m3.values, steps.x_in_e4m3.weights.up_fwd.halves(weights_fp8.w1_transposed)
            of_up_fwd = GemmExtras(x_e4m3.scales, weights_fp8.w1_scales)
        read = squares if steps.up_fwd.square else index
        grouped_gemm.gemm(run, steps.up_fwd, read, x, up, first_layer=made.ptr, bias=bias, extras=of_up_fwd)
    return made


def _down_bwd(
    run: Runtime,
    steps: Backward,
    arrays: BackwardArrays,
    grad_rows: Lists,
    to: tuple[int, int, int],
    row_weights: int,
    weights_fp8: fp8.Addresses | None,
    grad_scales: int,
) -> tuple[Buffer | None, tuple[Buffer, Buffer] | None]:
    """The partial sums of the router weights' gradient, and the first layer's gradient in e4m3 where up_bwd reads it.

    to: the addresses of first_layer, first_layer_grad and weighted_y_swi.
    """
    if not steps.down_bwd:
        return None, None
    w2, first_layer, first_layer_grad, weighted = arrays.layer.w2, *to
    grad, down, of_down_bwd, grad_e4m3, made = arrays.grad_out, (w2, w2), PLAIN, None, None
    if steps.in_e4m3 and weights_fp8:
        grad_e4m3 = fp8.quantized_rows(run, steps.in_e4m3, grad, grad_scales)
        grad, down = grad_e4m3.values, (weights_fp8.w2, weights_fp8.w2)
        of_down_bwd = GemmExtras(grad_e4m3.scales, weights_fp8.w2_scales)
        if steps.up_bwd:
            made = fp8.routed_rows(run, steps.in_e4m3)
            of_down_bwd = of_down_bwd._replace(quantised=made[0].ptr, quantised_scales=made[1].ptr)
    partial_sums = grouped_gemm.gemm(
        run,
        steps.down_bwd,
        grad_rows,
        grad,
        down,
        first_layer=first_layer,
        first_layer_grad=first_layer_grad,
        result=weighted if "w2" in steps.how.needs and not steps.reads_y_swi else 0,
        y_swi=arrays.y_swi if steps.stored_y_swi else 0,
        weights=row_weights,
        extras=of_down_bwd,
    )
    return partial_sums, made


def _down_bias_bwd(
    run: Runtime,
    steps: Backward,
    arrays: BackwardArrays,
    grad_rows: Lists,
    row_weights: int,
    partial_sums: Buffer | None,
    accumulate: Mapping[str, Sequence[int]],
) -> Any:
    """The gradient of b2, None if not asked for or accumulated; also b2's part of the router weights' gradient."""
    if not (steps.down_bias_bwd and steps.down_bias):
        return None
    own = "b2" in steps.how.needs and "b2" not in accumulate
    made, addresses = gradient_memory(run, steps.down_bias, None if own else accumulate.get("b2", (0,)))
    further = 0
    if partial_sums and steps.further_parts and steps.down_bwd and steps.down_bwd.partial_sums:
        parts, slots = steps.down_bwd.partial_sums
        further = partial_sums.ptr + 4 * slots * (parts - steps.further_parts)
    biases.bias_bwd(
        run,
        steps.down_bias_bwd,
        grad_rows,
        arrays.grad_out,
        (addresses[0], addresses[0]),
        row_weights=row_weights if steps.weights_on_output else 0,
        bias=arrays.layer.b2,
        partial_sums=further,
    )
    return made
