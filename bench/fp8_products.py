"""The four e4m3 products of a layer, each by itself, on arrays of CuPy, torch or the tests' emulator.

R = L*k routed rows, g = 2 in gated layers, else 1. e4m3 arrays are uint8. Groups are 128 columns of a half of a row.
"""

from collections.abc import Callable
from typing import Any

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.gemm.panels import configure as configure_panels
from moeblaze_cupy.gemm.panels import sum_of_rows
from moeblaze_cupy.gemm.products import GemmExtras, Operand, Product, Weight, configure, gemm
from moeblaze_cupy.rows import aggregation
from moeblaze_cupy.types import is_gated

PRODUCTS = ("up_fwd", "down_fwd", "down_bwd", "up_bwd")


def weight_layouts(E: int, d: int, h: int, g: int) -> dict[str, Layout]:
    """Of w1 as (E, d, g*h) and w2 as (E, h, d), by the product that reads it: e4m3 is contiguous along the sum."""

    def layout(rows: int, columns: int, transposed: bool) -> Layout:
        strides = (rows * columns, 1, rows) if transposed else (rows * columns, columns, 1)
        return Layout((E, rows, columns), strides, "uint8", 0)

    return {
        "up_fwd": layout(d, g * h, True),
        "down_fwd": layout(h, d, True),
        "down_bwd": layout(h, d, False),
        "up_bwd": layout(d, g * h, False),
    }


def buffer_shapes(R: int, L: int, d: int, h: int, g: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """What the products write."""
    groups = launch_config.ceil_div(h, launch_config.GROUP_COLUMNS)
    return {
        "first_layer": ((R, g * h), "bfloat16"),
        "y": ((R, h), "uint8"),
        "y_scales": ((groups, R), "float32"),
        "out": ((L, d), "bfloat16"),
        "first_layer_grad": ((R, g * h), "bfloat16"),
        "dh": ((R, g * h), "uint8"),
        "dh_scales": ((g * groups, R), "float32"),
        "weighted_y_swi": ((R, h), "bfloat16"),
        "row_weights": ((R,), "float32"),
        "grad_x": ((L, d), "bfloat16"),
    }


class Products:
    """`calls[name]()` launches. Arrays by name: ids and weights (L, k); x and grad_out (L, d) e4m3 with x_scales and
    grad_scales (L,); up_fwd (E, g*h, d), down_fwd (E, d, h), down_bwd (E, h, d) and up_bwd (E, d, g*h), the weights in
    memory order, with w1_scales (E, g) and w2_scales (E, 1); and those of `buffer_shapes`, which are written."""

    def __init__(self, framework: Any, limits: Any, arrays: dict[str, Any], activation: str) -> None:
        self.arrays = arrays
        given = {name: framework.describe(array) for name, array in arrays.items()}
        address = {name: array.ptr for name, array in given.items()}
        (_, d), (E, h, _) = given["x"].shape, given["down_bwd"].shape
        g = 1 + is_gated(activation)
        self.run = run = Runtime.current(framework, 0)
        described = given["ids"]
        steps = dispatch.configure(described.layout, E, limits)
        self.index_layout = index = steps.index
        self.lists, self._copy, lists = dispatch.dispatch(run, steps, described.ptr)
        layouts = weight_layouts(E, d, h, g)
        up, down = Weight.of((layouts["up_fwd"],), h if g == 2 else None), Weight.of((layouts["down_fwd"],))
        up_back, down_back = Weight.of((layouts["up_bwd"],), h if g == 2 else None), Weight.of((layouts["down_bwd"],))
        rows = Operand("uint8", d)
        weights_dtype = given["weights"].dtype
        up_fwd = configure(Product("up_fwd", index, rows, up, h, d, activation), limits)
        down_bwd = configure(Product("down_bwd", index, rows, down_back, h, d, activation), limits, further_parts=0)
        of_down_fwd = Product("down_fwd", index, Operand("uint8", h), down, d, h, activation)
        down_fwd = configure_panels(of_down_fwd, limits, weights_dtype=weights_dtype)
        of_up_bwd = Product("up_bwd", index, Operand("uint8", g * h), up_back, d, h, activation)
        up_bwd = configure_panels(of_up_bwd, limits)
        self.launches = {"up_fwd": up_fwd, "down_fwd": down_fwd, "down_bwd": down_bwd, "up_bwd": up_bwd}
        by_row = aggregation.weights_by_row(index, weights_dtype)
        run.launch(by_row, address["weights"], lists[dispatch.TOKEN_INDEX_MAP], address["row_weights"])
        forward = GemmExtras(address["x_scales"], address["w1_scales"], address["y"], address["y_scales"])
        backward = GemmExtras(address["grad_scales"], address["w2_scales"], address["dh"], address["dh_scales"])
        of_y = GemmExtras(address["y_scales"], address["w2_scales"])
        of_dh = GemmExtras(address["dh_scales"], address["w1_scales"])
        starts = {name: weight.halves(address[name]) for name, weight in (("up_fwd", up), ("up_bwd", up_back))}
        starts |= {name: (address[name],) * 2 for name in ("down_fwd", "down_bwd")}

        def run_down_bwd() -> None:
            self.partial_sums = gemm(
                run,
                down_bwd,
                lists,
                address["grad_out"],
                starts["down_bwd"],
                first_layer=address["first_layer"],
                first_layer_grad=address["first_layer_grad"],
                result=address["weighted_y_swi"],
                weights=address["row_weights"],
                extras=backward,
            )

        self.calls: dict[str, Callable[[], Any]] = {
            "up_fwd": lambda: gemm(
                run, up_fwd, lists, address["x"], starts["up_fwd"], first_layer=address["first_layer"], extras=forward
            ),
            "down_fwd": lambda: sum_of_rows(
                run, down_fwd, lists, address["y"], starts["down_fwd"], address["weights"], address["out"], extras=of_y
            ),
            "down_bwd": run_down_bwd,
            "up_bwd": lambda: sum_of_rows(
                run, up_bwd, lists, address["dh"], starts["up_bwd"], 0, address["grad_x"], extras=of_dh
            ),
        }
