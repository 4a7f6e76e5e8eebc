"""The forward of the MoE layer on CUDA: the paper's Algorithm 1 over the index lists of dispatch, kernel by kernel.

`configure_forward` chooses all launches and buffers from layouts alone, once per layout; `moe_forward` allocates and
launches, in a straight line.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moeblaze_cupy import launch_config
from moeblaze_cupy.arrays import ITEMSIZE, Buffer, Layout
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.ops import aggregation, dispatch, fp8, grouped_gemm, panels, push, saved_fp8, square_tiles
from moeblaze_cupy.ops.aggregation import Source
from moeblaze_cupy.ops.biases import Bias
from moeblaze_cupy.ops.dispatch import (
    EXPERT_TOKEN_INDICES,
    EXPERT_TOKEN_OFFSETS,
    TOKEN_INDEX_MAP,
    Dispatch,
    Lists,
)
from moeblaze_cupy.ops.grouped_gemm import NOT_FP8, Fp8, Gemm, Operand, Weight
from moeblaze_cupy.ops.panels import Panels
from moeblaze_cupy.runtime import Launch, Runtime, cached
from moeblaze_cupy.structures import PLAIN_SLOTS, Activation, SlotOptions, is_gated

Shape = tuple[int, ...]


def half_columns(parts: tuple[Layout, ...], h: int, activation: str | Activation, interleaved: bool) -> int | None:
    """h if w1, or b1, is one array of gate columns, then up columns; else None. parts: its arrays."""
    return h if is_gated(activation) and len(parts) == 1 and not interleaved else None


def rows_of_slots(
    run: Runtime, launch: Launch | None, lists: Lists, row_weights: int = 0
) -> tuple[Lists, Buffer | None]:
    """The lists with the slot of each row in place of its token, and the slots' memory; without `launch` as they are.

    row_weights: of each row, to be filled with 1; 0 for none.
    """
    if launch is None:
        return lists, None
    slots = run.empty((int(launch.scalars["num_slots"]),), "int32")
    run.launch(launch, lists[TOKEN_INDEX_MAP], lists[EXPERT_TOKEN_OFFSETS], slots.ptr, row_weights)
    before, after = lists[:EXPERT_TOKEN_INDICES], lists[EXPERT_TOKEN_INDICES + 1 :]
    return (*before, slots.ptr, *after), slots  # type: ignore[return-value]  # as many as before


@dataclass(frozen=True, eq=False)
class Forward:
    """What a forward launches and allocates. Launches are None where there are no tokens or slots, or no need."""

    dispatch: Dispatch
    dtype: str
    first_layer: Shape | None  # saved: a then b; None if it is not kept
    first_layer_dtype: str
    y_swi: Shape
    out: Shape
    up: Weight
    down: Weight
    up_bias: Bias | None
    up_fwd: Gemm | None
    down_fwd: Panels | None
    keeps_y_swi: bool
    weights_by_row: Launch | None = None  # where router weights scale the experts' input
    slots_by_row: Launch | None = None  # where rows go straight to their slots
    scales_slots: bool = True  # the sums over slots take the router weights, of identity experts at least
    quantize_saved: Launch | None = None  # where up_fwd writes a first layer, to be kept in e4m3, in `dtype`
    unquantized: Shape = ()  # of that
    in_e4m3: fp8.Pass | None = None  # where the products are in e4m3
    square_tiles: Launch | None = None  # where a product has square tiles
    quantize: fp8.WeightsMade | None = None  # where the weights are quantised in the call

    @functools.cached_property
    def cleared_bytes(self) -> int:
        """Bytes of out to clear, because no product writes it; else 0."""
        return 0 if self.down_fwd else math.prod(self.out) * ITEMSIZE[self.dtype]


@cached
def configure_forward(
    x: Layout,
    ids: Layout,
    weights: Layout | None,
    w2: Layout,
    w1: tuple[Layout, ...],
    b1: tuple[Layout, ...],
    b2: tuple[Layout, ...],
    activation: str | Activation,
    gate_up: str,
    save: str | None,
    limits: DeviceLimits,
    slots: SlotOptions = PLAIN_SLOTS,
    ragged: bool = False,
    max_slots: int | None = None,
    precision: str | None = None,
    quantizes: bool = False,
    place: push.Place | None = None,
) -> Forward:
    """The launches of `moe_forward` for arrays of these layouts, which have passed the checks of `checks.layer`.

    b1, b2: () without a bias. ragged: ids are pairs, of tokens with any number of slots. precision: "fp8" for products
    in e4m3, of the weights that `moe_forward` is given beside w1 and w2; x may be in e4m3 then (uint8). quantizes: it
    makes these weights itself. place: where the results go, which are then of the tokens of several GPUs.
    """
    (L, d), (E, h, _), dtype = x.shape, w2.shape, w2.dtype
    num_tokens = L if ragged else None
    steps = dispatch.configure(ids._replace(device=0), E, limits, num_tokens, slots.identity_experts, max_slots)
    index, R = steps.index, steps.index.num_rows
    halves, in_fp8 = 1 + is_gated(activation), save == "fp8"
    first_layer: Shape | None = (R, h * halves) if save in ("minimal", "paper") else None
    if in_fp8:
        first_layer = (launch_config.saved_fp8(R, h, halves).nbytes,)
    interleaved = gate_up == "interleaved"
    up, down = Weight.of(w1, half_columns(w1, h, activation, interleaved)), Weight.of((w2,))
    up_bias = Bias.of(b1, half_columns(b1, h, activation, interleaved)) if b1 else None
    up_read, down_read, x_rows, y_rows = up, down, Operand(dtype, d, x.misalignment), Operand(dtype, h)
    in_e4m3 = fp8.configure(x, E, R, h, halves, 1, interleaved) if precision == "fp8" else None
    if in_e4m3:
        up_read, down_read = in_e4m3.weights.up_fwd, in_e4m3.weights.down_fwd
        x_rows, y_rows = in_e4m3.rows_operand, in_e4m3.routed_operand
    up_fwd = down_fwd = weights_by_row = slots_by_row = quantize_saved = None
    if L and R:
        up_fwd = grouped_gemm.configure(
            "up_fwd",
            index,
            x_rows,
            up_read,
            h,
            d,
            activation,
            limits,
            interleaved=interleaved,
            bias=up_bias,
            result_ld=h,
            weights_on_input=slots.on_input,
            fp8_saved=in_fp8,
        )
        if in_fp8 and up_fwd.tier == "sm80":
            quantize_saved = saved_fp8.configure("quantize", index, dtype, h, halves, interleaved, limits)
        down_fwd = panels.configure(
            "down_fwd",
            index.by_slot if slots.unreduced else index,
            y_rows,
            down_read,
            h,
            d,
            activation,
            limits,
            bias=Bias.of(b2) if b2 else None,
            weights_dtype=None if weights is None or slots.on_input else weights.dtype,
            overwrites=save != "paper",
            source=identity_rows(x, weights, slots),
            place=place,
        )
        if slots.on_input and weights is not None:
            weights_by_row = aggregation.weights_by_row(index, weights.dtype)
        if slots.unreduced and not down_fwd.sums:
            slots_by_row = aggregation.slots_by_row(index)
    out = (*index.slots_shape, d) if slots.unreduced else (L, d)
    launches = up_fwd, down_fwd, save == "paper", weights_by_row, slots_by_row
    scales_slots = not slots.on_input or slots.identity_experts > 0
    square = square_tiles.configure(index) if any(step and step.square for step in (up_fwd, down_fwd)) else None
    kept_as, unquantized = "uint8" if in_fp8 else dtype, (R, h * halves)
    made = Forward(
        steps, dtype, first_layer, kept_as, (R, h), out, up, down, up_bias, *launches, scales_slots, square_tiles=square
    )
    if in_e4m3:
        quantize_weights = fp8.configure_weights(w1, w2, interleaved) if quantizes else None
        made = replace(made, in_e4m3=in_e4m3, quantize=quantize_weights)
    return made if quantize_saved is None else replace(made, quantize_saved=quantize_saved, unquantized=unquantized)


def identity_rows(rows: Layout, weights: Layout | None, slots: SlotOptions) -> Source | None:
    """The rows that identity experts add, if there are such experts."""
    return Source(rows.misalignment, weights.dtype) if slots.identity_experts and weights else None


class ForwardResult(NamedTuple):
    """The arrays that forward made. All but `out` are what backward needs, None if not kept."""

    out: Any  # None if it went to several GPUs
    lists: Any
    ids: Any  # the int32 copy of int64 ids
    first_layer: Any
    y_swi: Any


def moe_forward(
    run: Runtime,
    steps: Forward,
    x: int,
    ids: int,
    weights: int,
    gate: int,
    up: int,
    w2: int,
    b1_gate: int,
    b1_up: int,
    b2: int,
    token_offsets: int,
    *,
    out: Buffer | None = None,
    weights_fp8: fp8.Addresses | None = None,
    wait: Callable[[], None] | None = None,
    x_scales: int = 0,
    to: push.Addresses = push.NOWHERE,
) -> ForwardResult:
    """Paper section 3.1, from the addresses of the inputs; 0 for what is not given, as up where w1 is one array.

    out: memory for the result; None allocates it. weights_fp8: where the products are in e4m3. wait: has the stream
    wait for rows of x that are on their way. x_scales: of the rows of x, if these are in e4m3. to: where the result
    goes, in place of an array.
    """
    lists, ids_copy, index = dispatch.dispatch(run, steps.dispatch, ids, token_offsets)
    squares, of_squares = square_tiles.listed(run, steps.square_tiles, steps.dispatch.index, index)
    if wait is not None:
        wait()
    row_weights = None
    if steps.weights_by_row:
        row_weights = run.empty((steps.dispatch.index.num_rows,), "float32")
        run.launch(steps.weights_by_row, weights, index[TOKEN_INDEX_MAP], row_weights.ptr)
    first_layer = run.empty(steps.first_layer, steps.first_layer_dtype) if steps.first_layer else None
    y_swi = run.empty(steps.y_swi, steps.dtype) if steps.keeps_y_swi or not steps.in_e4m3 else None
    y_swi_ptr = y_swi.ptr if y_swi else 0
    up_weight, down_weight, rows = steps.up.halves(gate, up), (w2, w2), x
    of_up_fwd = of_down_fwd = NOT_FP8
    x_e4m3 = y_e4m3 = None
    if steps.in_e4m3 and weights_fp8:
        x_e4m3, y_e4m3 = fp8.quantized_rows(run, steps.in_e4m3, x, x_scales), fp8.routed_rows(run, steps.in_e4m3)
        rows, up_weight = x_e4m3.values, steps.in_e4m3.weights.up_fwd.halves(weights_fp8.w1_transposed)
        down_weight = weights_fp8.w2_transposed, weights_fp8.w2_transposed
        of_up_fwd = Fp8(x_e4m3.scales, weights_fp8.w1_scales, y_e4m3[0].ptr, y_e4m3[1].ptr)
        of_down_fwd = Fp8(y_e4m3[1].ptr, weights_fp8.w2_scales)
    if steps.up_fwd:
        first_layer_ptr = first_layer.ptr if first_layer else 0
        unquantized = None
        if steps.quantize_saved:
            out = out or (None if to.peers else run.empty(steps.out, steps.dtype))
            unquantized = run.empty(steps.unquantized, steps.dtype)
            first_layer_ptr = unquantized.ptr
        row_weights_ptr = row_weights.ptr if row_weights else 0
        bias = steps.up_bias.halves(b1_gate, b1_up) if steps.up_bias else (0, 0)
        grouped_gemm.gemm(
            run,
            steps.up_fwd,
            squares if steps.up_fwd.square else index,
            rows,
            up_weight,
            first_layer=first_layer_ptr,
            result=y_swi_ptr,
            weights=row_weights_ptr,
            bias=bias,
            fp8=of_up_fwd,
        )
        if steps.quantize_saved and unquantized and first_layer:
            offsets = index[EXPERT_TOKEN_OFFSETS]
            run.launch(steps.quantize_saved, unquantized.ptr, offsets, first_layer.ptr)
        del unquantized
    del row_weights, x_e4m3
    if not (out or to.peers):
        out = run.empty(steps.out, steps.dtype)  # after the first launches, which it can wait for
    if steps.down_fwd:
        rows_index, by_row = rows_of_slots(run, steps.slots_by_row, squares if steps.down_fwd.square else index)
        weights = weights if steps.scales_slots else 0
        panels.sum_of_rows(
            run,
            steps.down_fwd,
            rows_index,
            y_e4m3[0].ptr if y_e4m3 else y_swi_ptr,
            down_weight,
            weights,
            out.ptr if out else 0,
            bias=b2,
            source=x,
            fp8=of_down_fwd,
            to=to,
        )
        del by_row, of_squares
    elif steps.cleared_bytes and out:
        run.clear(out.ptr, steps.cleared_bytes)
    return ForwardResult(
        out.array if out else None,
        lists.array,
        ids_copy.array if ids_copy else None,
        first_layer.array if first_layer else None,
        y_swi.array if y_swi and steps.keeps_y_swi else None,
    )
