"""Gradients of weights from e4m3: kernels_cu/fp8/routed_fp8.cu and grouped_wgrad_fp8_sm90.cu.

One operand, x or grad_out, is gathered by token, in e4m3 with a scale per token, 0 for zeros. The other one, the first
layer's gradient or the weighted y_swi, has a row per slot in bf16. It becomes e4m3 in its own memory, contiguous along
the rows, with the tokens' scales multiplied in. down_bwd finds the largest magnitudes that its scales are made of.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from moeblaze_cupy import checks
from moeblaze_cupy.cuda import clear, launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.loader import ELEMENTS, Variant
from moeblaze_cupy.cuda.runtime import Launch, Runtime, Tiles
from moeblaze_cupy.cuda.tensor_map import TensorMap
from moeblaze_cupy.dispatch.launches import LISTS, IndexLayout, Lists
from moeblaze_cupy.fp8 import config as fp8_config
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.fp8.config import QUANTIZE_TILE
from moeblaze_cupy.fp8.operands import E4M3, RowsRead
from moeblaze_cupy.frameworks import Buffer, Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm.products import Weight, is_aligned

ADDRESSES = ("rows", "routed", "gathered", "token_scales", "amax", "rest", "out0", "out1", *LISTS)


@dataclass(frozen=True, eq=False)
class Wgrad:
    """A weight gradient: the routed operand becomes e4m3, then the product.

    quantize: makes the gathered operand from bf16 in between, in the memory that the routed one does not need any more.
    """

    transpose: Launch
    quantize: Launch | None
    product: Launch
    rest: tuple[int, int]  # shape of the e4m3 of each expert's last rows


def groups(h: int, halves: int) -> int:
    """Returns the groups of columns of an expert that have a scale each."""
    return halves * launch_config.ceil_div(h, launch_config.GROUP_COLUMNS)


class Begun(NamedTuple):
    """What weight gradients need from before down_bwd: scales of x, and largest magnitudes, which it writes."""

    x_scales: Buffer
    amax: Buffer
    result_amax: int  # address of those of weighted y_swi, behind those of the first layer's gradient


@dataclass(frozen=True, eq=False)
class Pass:
    """What the weight gradients of a backward have in common."""

    quantize_x: Launch | None  # None if x is in e4m3
    x: tuple[int, int]
    clear: Launch
    of_first_layer: int  # the number of largest magnitudes
    of_result: int
    beside: Layout | None  # that of x, if its e4m3 comes to lie in the first layer's gradient, where that is transposed

    def begin(self, run: Runtime, x: int, x_scales: int) -> Begun:
        """Clears the largest magnitudes. Of x in e4m3 it keeps the scales alone, as `quantized_x` comes much later.

        x_scales: those of x if it is in e4m3 already.
        """
        amax = run.empty((self.of_first_layer + self.of_result,), "int32")
        run.launch(self.clear, amax.ptr)
        scales = Buffer(None, x_scales) if x_scales else self.quantized_x(run, x).memory[1]
        return Begun(scales, amax, amax.ptr + 4 * self.of_first_layer)

    def quantized_x(self, run: Runtime, x: int) -> RowsRead:
        """Returns x in e4m3."""
        values, scales = run.empty(self.x, "uint8"), run.empty(self.x[:1], "float32")
        if self.quantize_x:
            run.launch(self.quantize_x, x, values.ptr, scales.ptr)
        return RowsRead(values.ptr, scales.ptr, (values, scales))

    def gathered_x(self, run: Runtime, x: int, begun: Begun) -> RowsRead:
        """Returns what up_wgrad gathers: x in e4m3, or x as it is if that step quantises it."""
        as_it_is = self.beside or self.quantize_x is None
        return RowsRead(x, begun.x_scales.ptr) if as_it_is else self.quantized_x(run, x)


def configure_pass(x: Layout, E: int, R: int, h: int, halves: int) -> Pass | None:
    """Returns None without tokens."""
    number, d = x.shape
    if not number:
        return None
    quantize_x = None if x.dtype == E4M3 else quantize.rows(x, scale_of_zeros=0.0)
    of_first_layer, of_result = E * groups(h, halves), E * groups(h, 1)
    # Of each 256 bytes of a row, 128 columns, the transposed rows leave the last 128 free.
    fits = quantize_x and d % QUANTIZE_TILE == 0 and h % QUANTIZE_TILE == 0 and number * d <= R * halves * h
    clears = clear.configure(of_first_layer + of_result)
    return Pass(quantize_x, (number, d), clears, of_first_layer, of_result, x if fits else None)


@functools.cache
def product_variant(entry: str, transposed: bool, dtype: str, accumulate: bool) -> Variant:
    """Returns the product's kernel. transposed, dtype: of the gradient's memory."""
    macros: dict[str, str | int] = {"ENTRY": entry, "ELEMENT": "bf16", "WGMMA": "wgmma_e4m3", "FP8": 1, "SPLIT_K": 0}
    macros |= {"ACCUMULATE": int(accumulate), "OUT": ELEMENTS[dtype]}
    macros |= {"TRANSPOSED": int((entry == "up_wgrad") == transposed)}
    return loader.variant_of("grouped_wgrad_fp8_sm90.cu", entry, macros)


def configure(
    index: IndexLayout,
    limits: DeviceLimits,
    entry: str,
    d: int,
    h: int,
    halves: int,
    gradient: Weight,
    accumulate: bool,
    gathered: Layout | None = None,
) -> Wgrad:
    """Configures "up_wgrad" or "down_wgrad". halves: those of the routed operand, of h columns each.

    gathered: the layout of that operand in bf16, if it is to be quantised here.

    accumulate: adds to what the gradient holds, in bf16 or float32; experts without rows are then left alone.
    Raises ValueError for such memory that is not aligned.
    """
    if not is_aligned((gradient.misalignment,), (gradient.ld, gradient.expert_stride)):
        expected = "rows at multiples of 16 bytes with fp8_wgrad"
        got = f"strides {gradient.layouts[0].strides} and an address {gradient.misalignment} bytes past one"
        raise checks.bad_value("moe_backward", f"accumulate['{'w1' if entry == 'up_wgrad' else 'w2'}']", expected, got)
    E, R = index.num_experts, index.num_rows
    columns, sizes = halves * h, {"columns": h, "halves": halves, "groups": groups(h, halves), "num_experts": E}
    blocks = sizes["groups"] * (R // QUANTIZE_TILE + E)
    variant = loader.entry("routed_fp8.cu", "transpose_routed_bfloat16")
    transpose = Launch(variant, (blocks,), fp8_config.QUANTIZE_THREADS, ADDRESSES, sizes)
    tile_rows, tile_columns = launch_config.TILE_ROWS, launch_config.PANEL_COLUMNS
    tiles = launch_config.ceil_div(d, tile_rows) * launch_config.ceil_div(h, tile_columns) * E * halves
    box = (QUANTIZE_TILE, QUANTIZE_TILE, 1)
    maps = {
        "routed": TensorMap("uint8", (2 * columns, R, 1), (2 * columns, 2 * columns * R), box),
        "rest": TensorMap("uint8", (QUANTIZE_TILE, E * columns, 1), (QUANTIZE_TILE, QUANTIZE_TILE * E * columns), box),
    }
    result = {"expert_stride": gradient.expert_stride, "ldo": gradient.ld, "rows": d}
    gap = QUANTIZE_TILE if gathered else 0  # of each 2 * QUANTIZE_TILE bytes of a routed row every other half
    product = Launch(
        product_variant(entry, gradient.transposed, gradient.dtype, accumulate),
        (min(tiles, limits.multiprocessors),),
        gemm_config.HOPPER_THREADS,
        ADDRESSES,
        {"ld": 2 * d if gathered else d, "gap": gap, **result, **sizes},
        gemm_config.wgrad("bfloat16", True, False, limits).shared_bytes,
        maps,
        ("e4m3 operands: the gathered one is read as it is, the other one is made contiguous along the rows",),
        Tiles(tile_rows, tile_columns, tiles),
    )
    quantize_gathered = quantize.rows(gathered, 0.0, gap) if gathered else None
    return Wgrad(transpose, quantize_gathered, product, (E * columns, QUANTIZE_TILE))


def wgrad(
    run: Runtime,
    step: Wgrad,
    lists: Lists,
    gathered: tuple[int, int],
    routed: tuple[int, int],
    gradient: tuple[int, int],
) -> None:
    """Launches, on addresses. The routed operand is overwritten.

    gathered: e4m3, or bf16 if the step quantises it, and its scales. routed: bf16 and the largest magnitudes.
    gradient: where the result's gate and up begin.
    """
    rest = run.empty(step.rest, "uint8")
    values, token_scales = gathered
    if step.quantize:
        values = routed[0] + QUANTIZE_TILE
    addresses = routed[0], routed[0], values, token_scales, routed[1], rest.ptr, *gradient, *lists
    run.launch(step.transpose, *addresses)
    if step.quantize:
        run.launch(step.quantize, gathered[0], values, token_scales)
    run.launch(step.product, *addresses)
