"""The forward of the MoE layer on CUDA: the paper's Algorithm 1 over the index lists of dispatch, kernel by kernel.

`configure_forward` chooses all launches and buffers from layouts alone, once per layout; `moe_forward` allocates and
launches, in a straight line.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.dispatch.launches import (
    EXPERT_TOKEN_INDICES,
    EXPERT_TOKEN_OFFSETS,
    TOKEN_INDEX_MAP,
    Dispatch,
    IndexLayout,
    Lists,
)
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.fp8 import saved as saved_fp8
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer, Layout
from moeblaze_cupy.gemm import panels, square_tiles
from moeblaze_cupy.gemm import products as grouped_gemm
from moeblaze_cupy.gemm.biases import Bias
from moeblaze_cupy.gemm.panels import Panels
from moeblaze_cupy.gemm.products import PLAIN, Gemm, GemmExtras, Operand, Product, Rows, Weight
from moeblaze_cupy.lora import launches as lora
from moeblaze_cupy.rows import aggregation, push
from moeblaze_cupy.rows.aggregation import Source
from moeblaze_cupy.types import NO_LORA_ROWS, LayerArrays, LayerOptions, Lora, LoraRows

Shape = tuple[int, ...]


def half_columns(parts: tuple[Layout, ...], h: int, options: LayerOptions) -> int | None:
    """Returns h if w1, or b1, is one array of gate columns, then up columns; else None. parts: its arrays."""
    return h if options.gated and len(parts) == 1 and not options.interleaved else None


def rows_of_slots(
    run: Runtime, launch: Launch | None, lists: Lists, row_weights: int = 0
) -> tuple[Lists, Buffer | None]:
    """Returns the lists with slots of rows in place of tokens, and the slots' memory; without `launch` as they are.

    row_weights: the weight of each row, to be filled with 1; 0 for none.
    """
    if launch is None:
        return lists, None
    slots = run.empty((int(launch.scalars["num_slots"]),), "int32")
    run.launch(launch, lists[TOKEN_INDEX_MAP], lists[EXPERT_TOKEN_OFFSETS], slots.ptr, row_weights)
    before, after = lists[:EXPERT_TOKEN_INDICES], lists[EXPERT_TOKEN_INDICES + 1 :]
    return (*before, slots.ptr, *after), slots  # type: ignore[return-value]  # as many as before


@dataclass(frozen=True, eq=False)
class Forward:
    """The launches and buffers of a forward. Launches are None where there are no tokens or slots, or no need."""

    options: LayerOptions
    dispatch: Dispatch
    dtype: str
    first_layer: Shape | None  # saved: a then b; None if it is not kept
    first_layer_dtype: str
    y_swi: Shape
    out: Shape
    up: Weight
    down: Weight
    up_bias: Bias | None
    unquantized: Shape  # that of the first layer where `quantize_saved` reads it
    up_fwd: Gemm | None = None
    down_fwd: Panels | None = None
    weights_by_row: Launch | None = None  # runs where router weights scale the experts' input
    slots_by_row: Launch | None = None  # runs where rows go straight to their slots
    quantize_saved: Launch | None = None  # runs where up_fwd writes a first layer, to be kept in e4m3, in `dtype`
    in_e4m3: fp8.Pass | None = None  # set where the products are in e4m3
    square_tiles: Launch | None = None  # runs where a product has square tiles
    lora1: lora.Forward | None = None  # set where w1 has low-rank factors, and rows
    lora2: lora.Forward | None = None
    quantize: fp8.WeightsMade | None = None  # set where the weights are quantised in the call

    @functools.cached_property
    def cleared_bytes(self) -> int:
        """Returns the bytes of out to clear, because no product writes it; else 0."""
        return 0 if self.down_fwd else math.prod(self.out) * ITEMSIZE[self.dtype]

    @functools.cached_property
    def keeps_y_swi(self) -> bool:
        return self.options.save == "paper"

    @functools.cached_property
    def writes_y_swi(self) -> bool:
        """Returns True if up_fwd writes y_swi, which in e4m3 a low-rank factor or backward alone reads."""
        return self.keeps_y_swi or not self.in_e4m3 or self.lora2 is not None

    @functools.cached_property
    def keeps_lora_rows(self) -> bool:
        return bool(self.lora1 or self.lora2) and self.options.save != "recompute"

    @functools.cached_property
    def scales_slots(self) -> bool:
        """Returns True if the sums over slots take the router weights, of identity experts at least."""
        return not self.options.on_input or self.options.identity_experts > 0


@cached
def configure_forward(
    layer: LayerArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    quantizes: bool = False,
    place: push.PeerOffset | None = None,
    factors: Lora | None = None,
) -> Forward:
    """Configures `moe_forward` for arrays of these layouts and options, which have passed their checks.

    x may be in e4m3 (uint8) with precision="fp8". quantizes: `moe_forward` makes the weights in e4m3 itself then.
    place: where the results go, which are then of the tokens of several GPUs. factors: low-rank, beside the weights.
    """
    (L, d), (E, h, _), dtype = layer.x.shape, layer.w2.shape, layer.w2.dtype
    num_tokens = None if layer.token_offsets is None else L
    ids = layer.ids._replace(device=0)
    steps = dispatch.configure(ids, E, limits, num_tokens, options.identity_experts, options.max_slots)
    index, R = steps.index, steps.index.num_rows
    keeps_fp8 = options.save == "fp8"
    first_layer: Shape | None = (R, h * options.halves) if options.save in ("minimal", "paper") else None
    if keeps_fp8:
        first_layer = (launch_config.saved_fp8(R, h, options.halves).nbytes,)
    w1, b1 = layer.w1_parts, layer.b1_parts
    up, down = Weight.of(w1, half_columns(w1, h, options)), Weight.of((layer.w2,))
    up_bias = Bias.of(b1, half_columns(b1, h, options)) if b1 else None
    launches: dict[str, Any] = {}
    in_e4m3 = None
    if options.precision == "fp8":
        in_e4m3 = fp8.configure(layer.x, E, R, h, options.halves, 1, options.interleaved)
        launches["quantize"] = fp8.configure_weights(w1, layer.w2, options.interleaved) if quantizes else None
    if L and R:
        launches |= _forward_launches(layer, options, limits, index, (up, down, up_bias), in_e4m3, place, factors)
    return Forward(
        options=options,
        dispatch=steps,
        dtype=dtype,
        first_layer=first_layer,
        first_layer_dtype="uint8" if keeps_fp8 else dtype,
        y_swi=(R, h),
        out=(*index.slots_shape, d) if options.unreduced else (L, d),
        up=up,
        down=down,
        up_bias=up_bias,
        unquantized=(R, h * options.halves),
        in_e4m3=in_e4m3,
        **launches,
    )


def _forward_launches(
    layer: LayerArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    index: IndexLayout,
    parameters: tuple[Weight, Weight, Bias | None],
    in_e4m3: fp8.Pass | None,
    place: push.PeerOffset | None,
    factors: Lora | None,
) -> dict[str, Any]:
    """Returns the launches after dispatch, by the names of `Forward`."""
    (_, d), (_, h, _), dtype = layer.x.shape, layer.w2.shape, layer.w2.dtype
    up_read, down_read, up_bias = parameters
    x_rows, y_rows = Operand(dtype, d, layer.x.misalignment, options.tf32), Operand(dtype, h, tf32=options.tf32)
    x_read, y_read = x_rows, y_rows
    if in_e4m3:
        up_read, down_read = in_e4m3.weights.up_fwd, in_e4m3.weights.down_fwd
        x_read, y_read = in_e4m3.rows_operand, in_e4m3.routed_operand
    beside_up, beside_down = lora.factors_beside(factors, options, True)
    weights, interleaved, keeps_fp8 = layer.router_weights, options.interleaved, options.save == "fp8"
    act = options.activation
    up_product = Product("up_fwd", index, x_read, up_read, h, d, act, interleaved, up_bias, beside_up)
    up_fwd = grouped_gemm.configure(up_product, limits, Rows(h), weights_on_input=options.on_input, fp8_saved=keeps_fp8)
    by_slot = index.by_slot if options.unreduced else index
    down_bias = Bias.of(layer.b2_parts) if layer.b2 else None
    down_fwd = panels.configure(
        Product("down_fwd", by_slot, y_read, down_read, d, h, act, bias=down_bias, lora=beside_down),
        limits,
        weights_dtype=None if weights is None or options.on_input else weights.dtype,
        overwrites=options.save != "paper",
        source=identity_rows(layer.x, weights, options),
        place=place,
    )
    launches: dict[str, Any] = {"up_fwd": up_fwd, "down_fwd": down_fwd}
    if factors and up_fwd.lora:
        of_pair = (factors.a1, factors.b1), factors.scale1, up_fwd.lora
        launches["lora1"] = lora.configure_forward(0, index, x_rows, *of_pair)
    if factors and down_fwd.lora:
        of_pair = (factors.a2, factors.b2), factors.scale2, down_fwd.lora
        launches["lora2"] = lora.configure_forward(1, index, y_rows, *of_pair)
    if keeps_fp8 and up_fwd.tier == "sm80":
        form = dtype, h, options.halves, interleaved
        launches["quantize_saved"] = saved_fp8.configure("quantize", index, *form, limits)
    if options.on_input and weights is not None:
        launches["weights_by_row"] = aggregation.weights_by_row(index, weights.dtype)
    if options.unreduced and not down_fwd.sums:
        launches["slots_by_row"] = aggregation.slots_by_row(index)
    if up_fwd.square or down_fwd.square:
        launches["square_tiles"] = square_tiles.configure(index)
    return launches


def identity_rows(rows: Layout, weights: Layout | None, options: LayerOptions) -> Source | None:
    """Returns the rows that identity experts add, if there are such experts."""
    return Source(rows.misalignment, weights.dtype) if options.identity_experts and weights else None


class ForwardResult(NamedTuple):
    """The arrays that forward made. All but `out` are what backward needs, None if not kept."""

    out: Any  # None if it went to several GPUs
    lists: Any
    ids: Any  # the int32 copy of int64 ids
    first_layer: Any
    y_swi: Any
    lora_rows: LoraRows


class KeptMemory(NamedTuple):
    """The memory of what forward keeps, where that is part of a larger array; None for new memory."""

    lists: Buffer | None = None
    first_layer: Buffer | None = None
    y_swi: Buffer | None = None
    u1: Buffer | None = None
    u2: Buffer | None = None


NEW_MEMORY = KeptMemory()


class PassExtras(NamedTuple):
    """Values that few passes have beside the addresses of their arrays."""

    out: Buffer | None = None  #: memory for the result, which is out or the gradient of x; None allocates it
    wait: Callable[[], None] | None = None  #: makes the stream wait for rows of x or grad_out that are on their way
    weights_fp8: fp8.Addresses | None = None  #: set where the products are in e4m3
    x_scales: int = 0  #: scales of the rows of x, if these are in e4m3
    grad_scales: int = 0  #: scales of the rows of grad_out, if these are in e4m3
    to: push.Addresses = push.NOWHERE  #: the destination of the result, in place of an array
    decode: Callable[..., None] | None = None  #: fills w1 or w2, see `quantised.scratch.Decoded.decode`
    factors: Lora = Lora(0, 0, 0, 0)  #: addresses of the low-rank factors
    lora_rows: LoraRows = LoraRows(0, 0)  #: addresses of what forward kept of them
    kept: KeptMemory = NEW_MEMORY  #: of a forward
    grad_weights: Buffer | None = None  #: memory for the gradient of the router weights; None allocates it
    grad_factors: Lora = Lora(0, 0, 0, 0)  #: addresses of memory for the gradients of the factors; 0 allocates it


PLAIN_PASS = PassExtras()


def moe_forward(run: Runtime, steps: Forward, layer: LayerArrays, extras: PassExtras = PLAIN_PASS) -> ForwardResult:
    """Runs paper section 3.1, from the addresses of the layer's arrays."""
    out, wait, weights_fp8, x_scales, _, to, decode, factors, _, kept, *_ = extras
    lists, ids_copy, index = dispatch.dispatch(run, steps.dispatch, layer.ids, layer.token_offsets, kept.lists)
    if decode is not None:
        decode(run, index[EXPERT_TOKEN_OFFSETS], "up_fwd", begins=True)
    squares, of_squares = square_tiles.listed(run, steps.square_tiles, steps.dispatch.index, index)
    if wait is not None:
        wait()
    row_weights = x_e4m3 = y_e4m3 = u1 = u2 = beside_up = beside_down = None
    if steps.weights_by_row:
        row_weights = run.empty((steps.dispatch.index.num_rows,), "float32")
        run.launch(steps.weights_by_row, layer.router_weights, index[TOKEN_INDEX_MAP], row_weights.ptr)
    first_layer = kept.first_layer or (steps.first_layer and run.empty(steps.first_layer, steps.first_layer_dtype))
    y_swi = kept.y_swi or (run.empty(steps.y_swi, steps.dtype) if steps.writes_y_swi else None)
    y_swi_ptr = y_swi.ptr if y_swi else 0
    up_weight, down_weight, rows = steps.up.halves(layer.w1_gate, layer.w1_up), (layer.w2, layer.w2), layer.x
    of_up_fwd, of_down_fwd = PLAIN, GemmExtras(peers=to.peers, needed=to.needed) if to.peers else PLAIN
    if steps.in_e4m3 and weights_fp8:
        x_e4m3, y_e4m3 = fp8.quantized_rows(run, steps.in_e4m3, rows, x_scales), fp8.routed_rows(run, steps.in_e4m3)
        rows, up_weight = x_e4m3.values, steps.in_e4m3.weights.up_fwd.halves(weights_fp8.w1_transposed)
        down_weight = weights_fp8.w2_transposed, weights_fp8.w2_transposed
        of_up_fwd = GemmExtras(x_e4m3.scales, weights_fp8.w1_scales, y_e4m3[0].ptr, y_e4m3[1].ptr)
        of_down_fwd = GemmExtras(y_e4m3[1].ptr, weights_fp8.w2_scales, 0, 0, *to)
    if steps.lora1:
        u1, of_up_fwd, beside_up = steps.lora1.make(run, index, layer.x, (factors.a1, factors.b1), of_up_fwd, kept.u1)
    if steps.up_fwd:
        first_layer_ptr, unquantized = first_layer.ptr if first_layer else 0, None
        if steps.quantize_saved:
            out = out or (None if to.peers else run.empty(steps.out, steps.dtype))
            unquantized = run.empty(steps.unquantized, steps.dtype)
            first_layer_ptr = unquantized.ptr
        bias = steps.up_bias.halves(layer.b1_gate, layer.b1_up) if steps.up_bias else (0, 0)
        grouped_gemm.gemm(
            run,
            steps.up_fwd,
            squares if steps.up_fwd.square else index,
            rows,
            up_weight,
            first_layer=first_layer_ptr,
            result=y_swi_ptr,
            weights=row_weights.ptr if row_weights else 0,
            bias=bias,
            extras=of_up_fwd,
        )
        if steps.quantize_saved and unquantized and first_layer:
            run.launch(steps.quantize_saved, unquantized.ptr, index[EXPERT_TOKEN_OFFSETS], first_layer.ptr)
        del unquantized
    del row_weights, x_e4m3, beside_up
    if not (out or to.peers):
        out = run.empty(steps.out, steps.dtype)  # comes after the first launches, which it can wait for
    if steps.lora2:
        of_pair = (factors.a2, factors.b2), of_down_fwd, kept.u2
        u2, of_down_fwd, beside_down = steps.lora2.make(run, index, y_swi_ptr, *of_pair)
        y_swi = None if y_e4m3 and not steps.keeps_y_swi else y_swi  # which nothing else reads
    if steps.down_fwd:
        if decode is not None:
            decode(run, index[EXPERT_TOKEN_OFFSETS], "down_fwd")
        rows_index, by_row = rows_of_slots(run, steps.slots_by_row, squares if steps.down_fwd.square else index)
        panels.sum_of_rows(
            run,
            steps.down_fwd,
            rows_index,
            y_e4m3[0].ptr if y_e4m3 else y_swi_ptr,
            down_weight,
            layer.router_weights if steps.scales_slots else 0,
            out.ptr if out else 0,
            bias=layer.b2,
            source=layer.x,
            extras=of_down_fwd,
        )
        del by_row, of_squares, beside_down
    elif steps.cleared_bytes and out:
        run.clear(out.ptr, steps.cleared_bytes)
    return ForwardResult(
        out.array if out else None,
        lists.array,
        ids_copy.array if ids_copy else None,
        first_layer.array if first_layer else None,
        y_swi.array if y_swi and steps.keeps_y_swi else None,
        LoraRows(u1 and u1.array, u2 and u2.array) if steps.keeps_lora_rows else NO_LORA_ROWS,
    )
