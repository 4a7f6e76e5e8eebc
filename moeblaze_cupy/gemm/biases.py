"""Biases of the experts' two products, and their gradients: kernels_cu/gemm/bias_bwd.cu."""

import math
from dataclasses import dataclass
from typing import Any

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.dispatch.launches import (
    EXPERT_TOKEN_INDICES,
    EXPERT_TOKEN_OFFSETS,
    EXPERTS_BY_LOAD,
    IndexLayout,
    Lists,
)
from moeblaze_cupy.frameworks import ALIGNMENT, Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import variants as gemm_variants


class Parameter:
    """The common part of the layouts of a weight and of a bias: one array, or the pair (gate, up), which are alike."""

    layouts: tuple[Layout, ...]
    up_offset: int
    transposed: bool  # the last dimension but one is the contiguous one

    @property
    def dtype(self) -> str:
        return self.layouts[0].dtype

    def halves(self, first: int, second: int = 0) -> tuple[int, int]:
        """Returns where gate and up begin, from the addresses of the two arrays, or of the only one."""
        return first, (second or first) + self.up_offset

    def empty_gradient(self, run: Runtime) -> tuple[Any, tuple[int, ...]]:
        """Returns a new array or pair (gate, up), in the parameter's shapes and memory order, and the addresses."""
        form = self.layouts[0].shape, self.layouts[0].dtype, self.transposed
        first = run.empty(*form)
        if len(self.layouts) == 1:
            return first.array, (first.ptr,)
        second = run.empty(*form)
        return (first.array, second.array), (first.ptr, second.ptr)


@dataclass(frozen=True)
class Bias(Parameter):
    """The layout of a bias or of its gradient: (E, columns), or the pair (gate, up).

    `up_offset` separates the up half's start, in bytes, from that of the last array; `half` is the number of columns
    before it. `stride` is from expert to expert, in elements.
    """

    layouts: tuple[Layout, ...]
    half: int
    up_offset: int
    stride: int
    misalignment: int  # that of the halves' starts; 0 if both are aligned
    transposed: bool = False

    @classmethod
    def of(cls, layouts: tuple[Layout, ...], half_columns: int | None = None) -> "Bias":
        """Returns the layout. half_columns: h, if this is the only array (E, 2h) and w1 has gate, then up columns."""
        first = layouts[0]
        up_offset = half_columns * first.itemsize if half_columns is not None and len(layouts) == 1 else 0
        half = half_columns if up_offset and half_columns is not None else first.shape[1]
        starts = first.misalignment, layouts[-1].misalignment + up_offset
        return cls(layouts, half, up_offset, first.strides[0], math.gcd(ALIGNMENT, *starts) % ALIGNMENT)

    @property
    def columns(self) -> int:
        """Returns the number of columns of all halves together."""
        return sum(layout.shape[1] for layout in self.layouts)

    def gradient_layouts(self) -> tuple[Layout, ...]:
        """Returns the layouts of new arrays for the gradient: packed, in the shapes of the bias."""
        return tuple(layout._replace(strides=(layout.shape[1], 1), misalignment=0) for layout in self.layouts)


_ADDRESSES = (
    *("rows", "expert_token_indices", "expert_token_offsets", "experts_by_load", "row_weights", "bias"),
    *("partial_sums", "out0", "out1"),
)


@dataclass(frozen=True, eq=False)
class BiasBwd:
    """One launch of bias_bwd.cu. gathers: its rows are those of tokens, and scaled by the router weights."""

    launch: Launch
    gathers: bool
    parts: int  # parts of the partial sums


def configure(
    index: IndexLayout,
    dtype: str,
    misalignment: int,
    bias: Bias,
    gradient: Bias,
    gathers: bool,
    accumulate: bool,
) -> BiasBwd:
    """Configures the sums over each expert's rows of `bias.columns` elements; zeros for experts without any.

    `accumulate` adds to what the gradient holds; experts without rows are then left alone. misalignment: of the rows.
    """
    columns, stride = bias.columns, bias.stride
    # Without `gathers` the bias itself is not read, and neither are addresses that only single elements are stored to.
    sizes, starts = ((columns, stride), (misalignment, bias.misalignment)) if gathers else ((columns,), (misalignment,))
    aligned = not any(starts) and math.gcd(8, *sizes) == 8
    parts = launch_config.ceil_div(columns, gemm_config.BIAS_COLUMNS)
    launch = Launch(
        gemm_variants.bias_variant(dtype, aligned, bias.dtype, gradient.dtype),
        (parts, index.num_experts),
        gemm_config.BIAS_THREADS,
        _ADDRESSES,
        {
            "ld": columns,
            "bias_stride": stride,
            "out_stride": gradient.stride,
            "columns": columns,
            "half": gradient.half,
            "num_slots": index.num_rows,
            "accumulate": int(accumulate),
        },
        why=(
            "16 bytes at a time: rows and biases are aligned to 16 bytes"
            if aligned
            else "an element at a time: rows or biases are not aligned to 16 bytes",
        ),
    )
    return BiasBwd(launch, gathers, parts)


def bias_bwd(
    run: Runtime,
    step: BiasBwd,
    lists: Lists,
    rows: int,
    gradient: tuple[int, int],
    *,
    row_weights: int = 0,
    bias: int = 0,
    partial_sums: int = 0,
) -> None:
    """Launches the step. gradient: where its gate and up begin, 0 if it is not wanted.

    partial_sums: where those of the router weights' gradient begin, 0 if they are not wanted.
    """
    tokens = lists[EXPERT_TOKEN_INDICES] if step.gathers else 0
    offsets, by_load = lists[EXPERT_TOKEN_OFFSETS], lists[EXPERTS_BY_LOAD]
    run.launch(step.launch, rows, tokens, offsets, by_load, row_weights, bias, partial_sums, *gradient)
