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
from moeblaze_cupy.fp8 import wgrad as fp8_wgrad
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer, Layout
from moeblaze_cupy.gemm import biases, panels, square_tiles
from moeblaze_cupy.gemm import products as grouped_gemm
from moeblaze_cupy.gemm.biases import Bias, BiasBwd
from moeblaze_cupy.gemm.panels import Panels
from moeblaze_cupy.gemm.products import PLAIN, Gemm, GemmExtras, Operand, Product, Rows, Weight, Wgrad
from moeblaze_cupy.layer.forward import (
    PLAIN_PASS,
    PassExtras,
    Shape,
    half_columns,
    identity_rows,
    rows_of_slots,
)
from moeblaze_cupy.layer.weight_gradients import gradient_memory, up_columns
from moeblaze_cupy.lora import launches as lora
from moeblaze_cupy.rows import aggregation, push
from moeblaze_cupy.types import (
    BIASES,
    GRADIENTS,
    BackwardArrays,
    BackwardOptions,
    Gradients,
    LayerArrays,
    LayerOptions,
    Lora,
    SavedForBackward,
    is_consumed,
)

Accumulated = tuple[tuple[str, tuple[Layout, ...]], ...]  # the buffers that gradients are added to, by name


@dataclass(frozen=True, eq=False)
class Backward:
    """The launches and buffers of a backward. Launches are None where they are not needed, or without tokens."""

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
    consumes: bool  # the saved arrays are overwritten
    reads_y_swi: bool  # it is the operand of w2's gradient as it was saved
    stored_y_swi: bool  # down_bwd reads it
    scales_slots: bool  # the sum over slots takes the router weights, for identity experts
    weights_on_output: bool  # there are any, and they scale the rows of grad_out
    in_e4m3: fp8.Pass | None  # set where up_fwd, down_bwd and up_bwd are in e4m3
    x_in_e4m3: fp8.Pass | None  # set where up_fwd runs again in e4m3, of x
    wgrad_in_e4m3: fp8_wgrad.Pass | None  # set where down_wgrad and up_wgrad are in e4m3
    further_parts: int = 0  # parts of the partial sums that down_bias_bwd writes
    up_fwd: Gemm | None = None
    dequantize_saved: Launch | None = None  # runs where down_bwd cannot read e4m3
    weights_by_row: Launch | None = None
    slots_by_row: Launch | None = None  # runs where grad_out has a row per slot
    down_bwd: Gemm | None = None
    weights_bwd: Launch | None = None
    identity_weights: Launch | None = None
    down_bias_bwd: BiasBwd | None = None
    down_wgrad: Wgrad | fp8_wgrad.Wgrad | None = None
    up_bwd: Panels | None = None
    up_wgrad: Wgrad | fp8_wgrad.Wgrad | None = None
    up_bias_bwd: BiasBwd | None = None
    square_tiles: Launch | None = None  # runs where a product has square tiles
    lora1: lora.Backward | None = None  # set where w1 has low-rank factors
    lora2: lora.Backward | None = None
    lora1_again: lora.Forward | None = None  # set where the first layer is computed again

    @functools.cached_property
    def cleared_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the gradients of x and of weights to clear, because no kernel writes them; else 0."""
        of_x = 0 if self.up_bwd else math.prod(self.x) * ITEMSIZE[self.dtype]
        of_weights = 0 if self.weights_bwd else self.index.num_slots * ITEMSIZE[self.weights_dtype]
        return of_x, of_weights


@dataclass(frozen=True, eq=False)
class _Operands:
    """The operands that the products of a backward read."""

    up: Weight
    down_product: Product  # that of down_bwd
    x: Operand
    grad: Operand
    first_layer: Operand  # and its gradient
    y_swi: Operand  # weighted, for w2's gradient
    up_bias: Bias | None
    in_e4m3: fp8.Pass | None
    x_in_e4m3: fp8.Pass | None
    saved_in_fp8: bool  # the first layer
    is_recomputed: bool  # the first layer, or it is converted from e4m3
    factors: Lora | None  # low-rank, their layouts


@cached
def configure_backward(
    arrays: BackwardArrays,
    options: LayerOptions,
    how: BackwardOptions,
    accumulate: Accumulated,
    limits: DeviceLimits,
    index: IndexLayout,
    place: push.PeerOffset | None = None,
    factors: Lora | None = None,
) -> Backward:
    """Configures the launches of `moe_backward` for arrays of these layouts.

    Unless `how.keep_saved`, the gradients of a, b (and weighted_y_swi in place of y_swi) overwrite the saved
    activations. accumulate: by name, the layouts of the buffers that gradients of weights and biases are added to, in
    place of new ones. With `how.defers_weights` what the gradients of w1 and w2 are products of stays in memory; there
    are no biases then, and x and grad_out may be in e4m3 (uint8). place: where the gradient of x goes, which is then of
    the tokens of several GPUs. factors: low-rank, beside the weights.
    """
    layer, first_layer, y_swi, R = arrays.layer, arrays.first_layer, arrays.y_swi, index.num_rows
    (L, d), h, dtype, weights = layer.x.shape, layer.w2.shape[1], layer.w2.dtype, layer.router_weights
    if weights is None:
        how = how._replace(needs=tuple(name for name in how.needs if name != "weights"))
    needs, w1, b1, buffers = how.needs, layer.w1_parts, layer.b1_parts, dict(accumulate)
    half, bias_half = (half_columns(parts, h, options) for parts in (w1, b1))
    up, down = Weight.of(w1, half), Weight.of((layer.w2,))
    up_bias, down_bias = Bias.of(b1, bias_half) if b1 else None, Bias.of(layer.b2_parts) if layer.b2 else None
    saved_in_fp8 = first_layer is not None and first_layer.dtype == "uint8"
    rows_of = functools.partial(Operand, dtype, tf32=options.tf32)
    x_rows, grad_rows = rows_of(d, layer.x.misalignment), rows_of(d, arrays.grad_out.misalignment)
    in_e4m3, x_in_e4m3, wgrad_in_e4m3 = _in_e4m3(arrays, options, needs, R)
    grad_read, down_read = (in_e4m3.rows_operand, in_e4m3.weights.down_bwd) if in_e4m3 else (grad_rows, down)
    _, beside_down = lora.factors_beside(factors, options, False)
    form = h, d, options.activation, options.interleaved
    down_product = Product("down_bwd", index, grad_read, down_read, *form, lora=beside_down)
    portable = grouped_gemm.config_of(down_product, limits)[0].tier == "sm80"
    is_recomputed = first_layer is None or (saved_in_fp8 and portable)
    in_place = is_recomputed or not (how.keep_saved or saved_in_fp8)
    reads_y_swi = options.on_input and how.weighted_y_swi and y_swi is not None and not wgrad_in_e4m3
    takes_y_swi = how.weighted_y_swi and y_swi is not None and (in_place or reads_y_swi)
    overwritable = None if saved_in_fp8 else first_layer
    operands = _Operands(
        up=up,
        down_product=down_product,
        x=x_rows,
        grad=grad_rows,
        first_layer=rows_of(h * options.halves, overwritable.misalignment if overwritable and in_place else 0),
        y_swi=rows_of(h, y_swi.misalignment if takes_y_swi else 0),
        up_bias=up_bias,
        in_e4m3=in_e4m3,
        x_in_e4m3=x_in_e4m3,
        saved_in_fp8=saved_in_fp8,
        is_recomputed=is_recomputed,
        factors=factors,
    )
    b1_gradient = Bias.of(buffers.get("b1") or up_bias.gradient_layouts(), bias_half) if up_bias else None
    fields: dict[str, Any] = {
        "wgrad_in_e4m3": wgrad_in_e4m3,
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
    fields |= _lora_launches(index, operands, limits, factors, fields, "float32" if how.lora_in_float32 else None)
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
        weighted_y_swi=(R, h) if how.weighted_y_swi and not takes_y_swi else None,
        consumes=is_consumed(overwritable is not None, y_swi is not None, needs, how.keep_saved),
        scales_slots=options.identity_experts > 0,
        in_e4m3=in_e4m3,
        x_in_e4m3=x_in_e4m3,
        square_tiles=square_tiles.configure(index) if any(step and step.square for step in in_tiles) else None,
        **fields,
    )


def default_options(layer: LayerArrays, factors: Lora | None = None, frozen: tuple[str, ...] = ()) -> BackwardOptions:
    """Returns the options of a backward for the gradients that one computes unless told.

    layer, factors: layouts. frozen: the names of weights that have no gradients.
    """
    biases = (name for name, given in zip(BIASES, (layer.b1_gate, layer.b2), strict=True) if given)
    needs = ("x", "weights", "lora") if factors else (*GRADIENTS, *biases)
    return BackwardOptions(tuple(name for name in needs if name not in frozen))


def _in_e4m3(
    arrays: BackwardArrays, options: LayerOptions, needs: tuple[str, ...], rows: int
) -> tuple[fp8.Pass | None, fp8.Pass | None, fp8_wgrad.Pass | None]:
    """Returns what products of the rows of grad_out and of x, and weight gradients, read in e4m3; None without such."""
    if options.precision != "fp8":
        return None, None, None
    E, h, _ = arrays.layer.w2.shape
    form = E, rows, h, options.halves
    scale_of_zeros = 0.0 if options.fp8_wgrad else 1.0
    of_grad = fp8.configure(arrays.grad_out, *form, options.halves, options.interleaved, scale_of_zeros)
    of_x = of_wgrad = None
    if arrays.first_layer is None:
        of_x = fp8.configure(arrays.layer.x, *form, 1, options.interleaved)
    if options.fp8_wgrad and rows and not {"w1", "w2"}.isdisjoint(needs):
        of_wgrad = fp8_wgrad.configure_pass(arrays.layer.x, E, rows, h, options.halves)
    return of_grad, of_x, of_wgrad


def _lora_launches(
    index: IndexLayout,
    operands: _Operands,
    limits: DeviceLimits,
    factors: Lora | None,
    fields: Mapping[str, Any],
    of: str | None,
) -> dict[str, Any]:
    """Returns the launches of low-rank factors, by the names of `Backward`.

    fields: those of the products. of: the dtype of the factors' gradients, None for theirs.
    """
    made: dict[str, Any] = {}
    if factors is None:
        return made
    up_fwd, up_bwd, down_bwd = (fields.get(name) for name in ("up_fwd", "up_bwd", "down_bwd"))
    grads, rows = (operands.first_layer, operands.grad), (operands.x, operands.y_swi)
    pairs, scales = ((factors.a1, factors.b1), (factors.a2, factors.b2)), (factors.scale1, factors.scale2)
    for pair, product in enumerate((up_bwd, down_bwd)):
        if pairs[pair][0]:
            of_pair = index, grads[pair], rows[pair], pairs[pair], scales[pair], limits, product and product.lora
            made[f"lora{pair + 1}"] = lora.configure_backward(pair, *of_pair, up_fwd is not None, of)
    if up_fwd and up_fwd.lora:
        made["lora1_again"] = lora.configure_forward(0, index, operands.x, pairs[0], factors.scale1, up_fwd.lora)
    return made


def _bias_launches(
    arrays: BackwardArrays,
    how: BackwardOptions,
    buffers: Mapping[str, tuple[Layout, ...]],
    index: IndexLayout,
    operands: _Operands,
    down_bias: Bias | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the launches of the gradients of biases, by the names of `Backward`. fields: those that are known."""
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
    """Returns the launches up to down_bwd and the gradient of the router weights, by the names of `Backward`."""
    layer, made = arrays.layer, dict[str, Any]()
    h, d, weights = layer.w2.shape[1], layer.x.shape[1], layer.router_weights
    if arrays.first_layer is None:
        x_rows, up = operands.x, operands.up
        if operands.x_in_e4m3:
            x_rows, up = operands.x_in_e4m3.rows_operand, operands.x_in_e4m3.weights.up_fwd
        beside_up, _ = lora.factors_beside(operands.factors, options, True)
        of_layer = h, d, options.activation, options.interleaved, operands.up_bias, beside_up
        made["up_fwd"] = grouped_gemm.configure(Product("up_fwd", index, x_rows, up, *of_layer), limits)
    elif operands.is_recomputed:
        form = operands.x.dtype, h, options.halves, options.interleaved
        made["dequantize_saved"] = saved_fp8.configure("dequantize", index, *form, limits)
    down_bwd = grouped_gemm.configure(
        operands.down_product,
        limits,
        Rows(h if how.weighted_y_swi and not fields["reads_y_swi"] else 0),
        stored_y_swi=fields["stored_y_swi"],
        further_parts=fields.get("further_parts", 0) if "weights" in how.needs else None,
        weights_on_input=options.on_input,
        fp8_saved=operands.saved_in_fp8 and not operands.is_recomputed,
        fp8_wgrad=fields["wgrad_in_e4m3"] is not None,
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
    beside_up, _ = lora.factors_beside(operands.factors, options, False)
    form = d, depth, options.activation, options.interleaved
    product = Product("up_bwd", index, rows, up, *form, lora=beside_up)
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
    """Returns the launches of the gradients of w1 and w2, by the names of `Backward`; none where they are deferred."""
    made: dict[str, Any] = {}
    if how.defers_weights:
        return made
    if fields["wgrad_in_e4m3"]:
        d, h, halves = operands.x.ld, operands.y_swi.ld, options.halves
        for name, entry, of_routed in (("w2", "down_wgrad", 1), ("w1", "up_wgrad", halves)):
            if name in how.needs:
                gradient = fields["down_gradient" if name == "w2" else "up_gradient"]
                in_e4m3 = index, limits, entry, d, h, of_routed, gradient, name in buffers
                made[entry] = fp8_wgrad.configure(*in_e4m3, fields["wgrad_in_e4m3"].beside if name == "w1" else None)
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
    """The results of `moe_backward`."""

    gradients: Gradients  # None where not asked for, and of what is accumulated
    #: The arrays of what weight gradients are products of, where these are deferred; None where they lie in the memory
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
    """Runs paper section 3.2 and Algorithm 1, lines 15-31, from addresses; SiLU and the product are recomputed.

    accumulate: by name, the buffers that gradients of weights and biases are added to. `saved` is told when it is about
    to be overwritten. extras: `wait` is for a layer without biases.
    """
    grad_x, wait, to, decode, factors = extras.out, extras.wait, extras.to, extras.decode, extras.factors
    layer, needs, index = arrays.layer, steps.how.needs, steps.index.addresses(arrays.lists)
    if decode is not None:
        decode(run, index[EXPERT_TOKEN_OFFSETS], begins=True)
    squares, of_squares = square_tiles.listed(run, steps.square_tiles, steps.index, index)
    # Each gradient is allocated when it is due, that of x, whose product needs room, before the largest, that of w1.
    grad_weights = extras.grad_weights
    if "weights" in needs and not grad_weights:
        grad_weights = run.empty(steps.index.slots_shape, steps.weights_dtype)
    recomputed = u1 = None
    if steps.first_layer:
        recomputed, u1 = _recomputed(run, steps, steps.first_layer, arrays, (index, squares), extras)
    first_layer = recomputed.ptr if recomputed else arrays.first_layer
    separate = run.empty(steps.first_layer_grad, steps.dtype) if steps.first_layer_grad else None
    first_layer_grad = separate.ptr if separate else first_layer
    weighted = run.empty(steps.weighted_y_swi, steps.dtype) if steps.weighted_y_swi else None
    weighted_ptr = weighted.ptr if weighted else arrays.y_swi
    saved.consumed = steps.consumes

    if grad_weights and steps.cleared_bytes[1]:
        run.clear(grad_weights.ptr, steps.cleared_bytes[1])
    row_weights, grad_rows, by_row = None, index, None
    if steps.weights_by_row or steps.slots_by_row:
        row_weights = run.empty((steps.index.num_rows,), "float32")
        if steps.weights_by_row:
            run.launch(steps.weights_by_row, layer.router_weights, index[TOKEN_INDEX_MAP], row_weights.ptr)
        ones = 0 if steps.weights_by_row else row_weights.ptr
        grad_rows, by_row = rows_of_slots(run, steps.slots_by_row, index, ones)
    if wait is not None:
        wait()
    row_weights_ptr = row_weights.ptr if row_weights else 0
    begun = steps.wgrad_in_e4m3.begin(run, layer.x, extras.x_scales) if steps.wgrad_in_e4m3 else None
    to_layer = first_layer, first_layer_grad if steps.how.first_layer else 0, weighted_ptr
    of_down_bwd = _down_bwd(run, steps, arrays, grad_rows, to_layer, row_weights_ptr, extras, begun)
    partial_sums, first_layer_grad_e4m3, v2, weighted_u2, grad_e4m3 = of_down_bwd
    del of_down_bwd
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
        of_wgrad = run, steps.down_wgrad, grad_rows, steps.down_gradient.halves(*addresses)
        routed = weighted_ptr, begun.result_amax if begun else 0
        _wgrad(*of_wgrad, (weighted_ptr, arrays.grad_out), grad_e4m3, routed)
    del grad_e4m3
    of_pair2 = None, None
    if steps.lora2 and "lora" in needs:
        rows_of_pair = (index, weighted_ptr), (grad_rows, arrays.grad_out)
        to_pair = extras.grad_factors.a2, extras.grad_factors.b2
        of_pair2 = steps.lora2.gradients(run, *rows_of_pair, v2, weighted_u2, factors.a2, to_pair)
    del v2, weighted_u2
    kept = (separate or recomputed, weighted) if steps.how.defers_weights else (None, None)
    del weighted, by_row
    if "x" in needs and not (grad_x or to.peers):
        grad_x = run.empty(steps.x, steps.dtype)
    to_x, lists = grad_x.ptr if grad_x else 0, (index, squares)
    of_pair1 = _up_bwd_pass(run, steps, arrays, lists, first_layer_grad, first_layer_grad_e4m3, to_x, u1, extras)
    del first_layer_grad_e4m3, of_squares
    grad_w1 = grad_b1 = None
    if steps.up_bias_bwd and steps.up_bias and steps.up_bias_gradient:
        grad_b1, addresses = gradient_memory(run, steps.up_bias, accumulate.get("b1"))
        biases.bias_bwd(run, steps.up_bias_bwd, index, first_layer_grad, steps.up_bias_gradient.halves(*addresses))
    if steps.up_wgrad:
        grad_w1, addresses = gradient_memory(run, steps.up, accumulate.get("w1"))
        of_wgrad = run, steps.up_wgrad, index, steps.up_gradient.halves(*addresses)
        x_read = steps.wgrad_in_e4m3.gathered_x(run, layer.x, begun) if steps.wgrad_in_e4m3 and begun else None
        routed = first_layer_grad, begun.amax.ptr if begun else 0
        _wgrad(*of_wgrad, (layer.x, first_layer_grad), x_read, routed)
    of_x, of_weights = grad_x and grad_x.array, grad_weights and grad_weights.array
    of_factors = Lora(*of_pair1, *of_pair2, None, None) if "lora" in needs else None
    grads = Gradients(of_x, of_weights, grad_w1, grad_w2, grad_b1, grad_b2, of_factors)
    return Results(grads, *(buffer and buffer.array for buffer in kept))


def _wgrad(
    run: Runtime,
    step: Wgrad | fp8_wgrad.Wgrad,
    lists: Lists,
    gradient: tuple[int, int],
    operands: tuple[int, int],
    gathered: fp8.RowsRead | None,
    routed: tuple[int, int],
) -> None:
    """Launches a weight gradient. operands: those of `gemm.products.wgrad`.

    gathered, routed: those of `fp8.wgrad.wgrad`, which take their place in a product of e4m3.
    """
    if isinstance(step, Wgrad):
        grouped_gemm.wgrad(run, step, lists, *operands, gradient)
    elif gathered:
        fp8_wgrad.wgrad(run, step, lists, (gathered.values, gathered.scales), routed, gradient)


def _recomputed(
    run: Runtime,
    steps: Backward,
    shape: Shape,
    arrays: BackwardArrays,
    lists: tuple[Lists, Lists],
    extras: PassExtras,
) -> tuple[Buffer, Buffer | None]:
    """Returns the first layer in memory of its own, computed again or converted from e4m3; and u1, if made again.

    lists: dispatch's, and those of square tiles.
    """
    layer, (index, squares), weights_fp8, factors = arrays.layer, lists, extras.weights_fp8, extras.factors
    made, u1, beside = run.empty(shape, steps.dtype), None, None
    if steps.dequantize_saved:
        run.launch(steps.dequantize_saved, made.ptr, index[EXPERT_TOKEN_OFFSETS], arrays.first_layer)
    if steps.up_fwd:
        if extras.decode is not None:
            extras.decode(run, index[EXPERT_TOKEN_OFFSETS], "up_fwd")
        bias = steps.up_bias.halves(layer.b1_gate, layer.b1_up) if steps.up_bias else (0, 0)
        x, up, of_up_fwd, x_e4m3 = layer.x, steps.up.halves(layer.w1_gate, layer.w1_up), PLAIN, None
        if steps.x_in_e4m3 and weights_fp8:
            x_e4m3 = fp8.quantized_rows(run, steps.x_in_e4m3, x, extras.x_scales)
            x, up = x_e4m3.values, steps.x_in_e4m3.weights.up_fwd.halves(weights_fp8.w1_transposed)
            of_up_fwd = GemmExtras(x_e4m3.scales, weights_fp8.w1_scales)
        if steps.lora1_again:
            u1, of_up_fwd, beside = steps.lora1_again.make(run, index, layer.x, (factors.a1, factors.b1), of_up_fwd)
        read = squares if steps.up_fwd.square else index
        grouped_gemm.gemm(run, steps.up_fwd, read, x, up, first_layer=made.ptr, bias=bias, extras=of_up_fwd)
    del beside
    return made, u1


class _DownBwd(NamedTuple):
    """The buffers that `_down_bwd` makes; None where there is no such thing."""

    partial_sums: Buffer | None  # those of the router weights' gradient
    first_layer_grad: tuple[Buffer, Buffer] | None  # set, in e4m3, where up_bwd reads it
    v2: Buffer | None
    weighted_u2: Buffer | None  # u2 that forward kept, times the weights of the rows
    grad_out: fp8.RowsRead | None  # in e4m3, where down_wgrad reads it


def _down_bwd(
    run: Runtime,
    steps: Backward,
    arrays: BackwardArrays,
    grad_rows: Lists,
    to: tuple[int, int, int],
    row_weights: int,
    extras: PassExtras,
    begun: fp8_wgrad.Begun | None,
) -> _DownBwd:
    """Launches down_bwd. to: the addresses of first_layer, first_layer_grad and weighted_y_swi."""
    if not steps.down_bwd:
        return _DownBwd(None, None, None, None, None)
    if extras.decode is not None:
        extras.decode(run, grad_rows[EXPERT_TOKEN_OFFSETS], "down_bwd")
    w2, first_layer, first_layer_grad, weighted = arrays.layer.w2, *to
    weights_fp8, factors = extras.weights_fp8, extras.factors
    grad, down, of_down_bwd = arrays.grad_out, (w2, w2), PLAIN
    grad_e4m3 = made = v2 = weighted_u2 = beside = None
    if steps.in_e4m3 and weights_fp8:
        grad_e4m3 = fp8.quantized_rows(run, steps.in_e4m3, grad, extras.grad_scales)
        grad, down = grad_e4m3.values, (weights_fp8.w2, weights_fp8.w2)
        of_down_bwd = GemmExtras(grad_e4m3.scales, weights_fp8.w2_scales)
        if steps.up_bwd:
            made = fp8.routed_rows(run, steps.in_e4m3)
            of_down_bwd = of_down_bwd._replace(quantised=made[0].ptr, quantised_scales=made[1].ptr)
        if begun:
            x_scales, amax, result_amax = begun
            of_wgrad = {"first_layer_grad_amax": amax.ptr, "result_amax": result_amax}
            of_down_bwd = of_down_bwd._replace(x_scales=x_scales.ptr, **of_wgrad)
    if steps.lora2 and steps.lora2.second:
        u2 = extras.lora_rows.u2 if "lora" in steps.how.needs else 0
        of_rows = factors.b2, u2, row_weights if steps.weights_on_output else 0
        v2, weighted_u2 = steps.lora2.rows.make_weighted(run, grad_rows, arrays.grad_out, *of_rows)
        of_down_bwd, beside = steps.lora2.second.make(run, v2, factors.a2, of_down_bwd)
    partial_sums = grouped_gemm.gemm(
        run,
        steps.down_bwd,
        grad_rows,
        grad,
        down,
        first_layer=first_layer,
        first_layer_grad=first_layer_grad,
        result=weighted if steps.how.weighted_y_swi and not steps.reads_y_swi else 0,
        y_swi=arrays.y_swi if steps.stored_y_swi else 0,
        weights=row_weights,
        extras=of_down_bwd,
    )
    del beside
    return _DownBwd(partial_sums, made, v2, weighted_u2, grad_e4m3 if begun else None)


def _up_bwd_pass(
    run: Runtime,
    steps: Backward,
    arrays: BackwardArrays,
    lists: tuple[Lists, Lists],
    first_layer_grad: int,
    in_e4m3: tuple[Buffer, Buffer] | None,
    out: int,
    u1: Buffer | None,
    extras: PassExtras,
) -> tuple[Any, Any]:
    """Writes the gradient of x, and returns those of a1 and b1, None if not asked for.

    lists: dispatch's, and those of square tiles. in_e4m3: first_layer_grad, where up_bwd reads it. out: 0 without a
    gradient of x, or where it goes to several GPUs. u1: where it was made again.
    """
    layer, (index, squares), factors, to = arrays.layer, lists, extras.factors, extras.to
    of_up_bwd = GemmExtras(peers=to.peers, needed=to.needed) if to.peers else PLAIN
    made, v1, beside = (None, None), None, None
    if steps.lora1:
        if steps.down_bwd and steps.how.first_layer:
            v1 = steps.lora1.rows.make(run, index, first_layer_grad, factors.b1)
            if steps.lora1.second:
                of_up_bwd, beside = steps.lora1.second.make(run, v1, factors.a1, of_up_bwd)
        if "lora" in steps.how.needs:
            of_pair = (index, layer.x), (index, first_layer_grad), v1, u1 or extras.lora_rows.u1 or None
            made = steps.lora1.gradients(run, *of_pair, factors.a1, (extras.grad_factors.a1, extras.grad_factors.b1))
    if steps.up_bwd:
        if extras.decode is not None:
            extras.decode(run, index[EXPERT_TOKEN_OFFSETS], "up_bwd")
        rows, up = first_layer_grad, steps.up.halves(layer.w1_gate, layer.w1_up)
        if steps.in_e4m3 and extras.weights_fp8 and in_e4m3:
            rows, up = in_e4m3[0].ptr, steps.in_e4m3.weights.up_bwd.halves(extras.weights_fp8.w1)
            of_up_bwd = of_up_bwd._replace(a_scales=in_e4m3[1].ptr, b_scales=extras.weights_fp8.w1_scales)
        read, scale = squares if steps.up_bwd.square else index, layer.router_weights if steps.scales_slots else 0
        panels.sum_of_rows(run, steps.up_bwd, read, rows, up, scale, out, source=arrays.grad_out, extras=of_up_bwd)
    elif out and steps.cleared_bytes[0]:
        run.clear(out, steps.cleared_bytes[0])
    del beside
    return made


def _down_bias_bwd(
    run: Runtime,
    steps: Backward,
    arrays: BackwardArrays,
    grad_rows: Lists,
    row_weights: int,
    partial_sums: Buffer | None,
    accumulate: Mapping[str, Sequence[int]],
) -> Any:
    """Returns b2's gradient, None if not asked for or accumulated; also writes its part of the router weights'."""
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
