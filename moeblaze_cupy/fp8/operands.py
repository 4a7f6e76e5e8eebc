"""precision="fp8": the arrays that the experts' products in e4m3 read and write beside those in bf16.

x and grad_out come in bf16, or in e4m3 with their scales. In the latter case the gradients of weights, which multiply
bf16, have them converted, each when its product is due.

x and grad_out have a scale per row. y_swi and first_layer_grad have one per row and GROUP_COLUMNS columns of a half,
(groups, R) of each half, or of all columns where gate and up are interleaved. Weights have one per expert, and per half
of w1: `structures.Fp8Weights`.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.frameworks import Buffer, Layout, Torch
from moeblaze_cupy.gemm.products import Operand, Weight
from moeblaze_cupy.types import LayerArrays

E4M3 = "uint8"  # the dtype that holds it
E4M3_DTYPES = (E4M3, "float8_e4m3fn")  # CuPy's and torch's


class Weights(NamedTuple):
    """The weight that each product reads: e4m3 is contiguous along what the product sums over."""

    up_fwd: Weight
    down_fwd: Weight
    down_bwd: Weight
    up_bwd: Weight


@functools.lru_cache(maxsize=256)
def weights(E: int, d: int, h: int, halves: int, interleaved: bool = False) -> Weights:
    """Returns the layouts of `Fp8Weights`, with w1 as (E, d, halves * h) and w2 as (E, h, d)."""

    def layout(rows: int, columns: int, transposed: bool) -> tuple[Layout]:
        strides = (rows * columns, 1, rows) if transposed else (rows * columns, columns, 1)
        return (Layout((E, rows, columns), strides, E4M3, 0),)

    half = h if halves == 2 and not interleaved else None
    return Weights(
        Weight.of(layout(d, halves * h, True), half),
        Weight.of(layout(h, d, True)),
        Weight.of(layout(h, d, False)),
        Weight.of(layout(d, halves * h, False), half),
    )


def of_bfloat16(layer: LayerArrays) -> LayerArrays:
    """Returns the layouts with weights in e4m3, which are decoded ones, as the bf16 that they stand for."""
    parts = {name: getattr(layer, name) for name in ("w1_gate", "w2")}
    decoded = {name: part._replace(dtype="bfloat16") for name, part in parts.items() if part.dtype in E4M3_DTYPES}
    return layer._replace(**decoded)


@dataclass(frozen=True, eq=False)
class WeightsMade:
    """Launches and shapes of `Fp8Weights` that a forward makes."""

    steps: quantize.Quantize
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def make(self, run: Runtime, w1: tuple[int, int], w2: int) -> tuple[dict[str, Any], "Addresses"]:
        """Returns the arrays by field, and their addresses. w1: addresses of its arrays, the second 0 if it is one."""
        e4m3 = "float8_e4m3fn" if run.framework is Torch else E4M3
        buffers = {
            field: run.empty(shape, e4m3 if field in quantize.E4M3 else "float32") for field, shape in self.shapes
        }
        addresses = [buffer.ptr for buffer in buffers.values()]
        quantize.weights(run, self.steps, [ptr for ptr in w1 if ptr], w2, addresses)
        return {field: buffer.array for field, buffer in buffers.items()}, Addresses(*addresses[:-1])


def configure_weights(w1: tuple[Layout, ...], w2: Layout, interleaved: bool) -> WeightsMade:
    (E, h, d), columns = w2.shape, sum(layout.shape[2] for layout in w1)
    shapes = quantize.shapes_of(E, d, h, columns // h)
    return WeightsMade(quantize.configure(w1, w2, interleaved), tuple(shapes.items()))


class Addresses(NamedTuple):
    """The addresses of the arrays of `Fp8Weights` that products read, in their order."""

    w1: int
    w1_transposed: int
    w1_scales: int
    w2: int
    w2_transposed: int
    w2_scales: int


@dataclass(frozen=True, eq=False)
class Pass:
    """The e4m3 operands of a forward or a backward: its weights, and the memory that it quantises into."""

    weights: Weights
    quantize_rows: Launch | None  # quantises x or grad_out; None without tokens, or if the rows are in e4m3
    rows: tuple[int, int]  # shape of these rows
    routed: tuple[int, int]  # shape of y_swi, or of first_layer_grad
    routed_scales: tuple[int, int]

    @property
    def rows_operand(self) -> Operand:
        return Operand(E4M3, self.rows[1])

    @property
    def routed_operand(self) -> Operand:
        return Operand(E4M3, self.routed[1])


def configure(
    rows: Layout,
    E: int,
    R: int,
    h: int,
    halves: int,
    routed_halves: int,
    interleaved: bool,
    scale_of_zeros: float = 1.0,
) -> Pass:
    """Returns the pass. rows: x, or grad_out as a matrix. routed_halves: halves of the array that products quantise.

    scale_of_zeros: see `quantize.rows`.
    """
    number, d = math.prod(rows.shape[:-1]), rows.shape[-1]
    in_rows = rows._replace(shape=(number, d), strides=(d, 1))
    parts, columns = (1, routed_halves * h) if interleaved else (routed_halves, h)
    groups = launch_config.ceil_div(columns, launch_config.GROUP_COLUMNS)
    of_rows = (R, routed_halves * h), (parts * groups, R)
    quantize_rows = None if rows.dtype == E4M3 else quantize.rows(in_rows, scale_of_zeros)
    return Pass(weights(E, d, h, halves, interleaved), quantize_rows, (number, d), *of_rows)


class RowsRead(NamedTuple):
    """Rows of x or grad_out that a product reads: addresses of rows and scales, and the memory if it is new."""

    values: int
    scales: int
    memory: tuple[Buffer, ...] = ()


def quantized_rows(run: Runtime, step: Pass, address: int, scales: int = 0) -> RowsRead:
    """Returns x or grad_out in e4m3. scales: those of rows that are in e4m3 already, which are read in place."""
    if scales:
        return RowsRead(address, scales)
    made, made_scales = run.empty(step.rows, E4M3), run.empty(step.rows[:1], "float32")
    if step.quantize_rows:
        run.launch(step.quantize_rows, address, made.ptr, made_scales.ptr)
    return RowsRead(made.ptr, made_scales.ptr, (made, made_scales))


@dataclass(frozen=True, eq=False)
class Dequantize:
    """The conversion of x or grad_out from e4m3, for a gradient of weights."""

    launch: Launch | None  # None without tokens
    rows: tuple[int, int]

    def make(self, run: Runtime, address: int, scales: int) -> Buffer:
        """Returns the rows in bf16."""
        made = run.empty(self.rows, "bfloat16")
        if self.launch:
            run.launch(self.launch, address, scales, made.ptr)
        return made


def configure_dequantize(rows: Layout) -> Dequantize | None:
    """Returns the conversion. rows: x, or grad_out with a row per token; None if it is not in e4m3."""
    if rows.dtype != E4M3:
        return None
    number, d = rows.shape
    return Dequantize(quantize.dequantize_rows(rows), (number, d))


def routed_rows(run: Runtime, step: Pass) -> tuple[Buffer, Buffer]:
    """Returns memory for the rows that a product quantises, and their scales."""
    return run.empty(step.routed, E4M3), run.empty(step.routed_scales, "float32")
