"""The products of an expert, in the layer's precision and in e4m3.

A product in e4m3 multiplies e4m3 numbers exactly, adds in float64, and only then applies the scales. x and the
gradient of out have one for each row, y = V(a) * M(b) and the gradients of a and b one for each row and 128 columns,
weights one for each expert and half. Interleaved columns of a and b share the scales of their 128 columns.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from moeblaze_cupy.cuda.launch_config import GROUP_COLUMNS
from moeblaze_cupy.reference.fp8 import from_e4m3, quantize, quantize_rows
from moeblaze_cupy.reference.numerics import HostArray, cast, product_of_rows
from moeblaze_cupy.types import Fp8Weights

Read = Callable[[HostArray], HostArray]


class Products(Protocol):
    """The products of one expert with its n rows. Results are in the dtype of the computation."""

    def up_fwd(self, expert: int, x_rows: HostArray) -> list[HostArray]:
        """Returns x (n, d) times the halves of w1: (n, h) each, without a bias."""

    def down_fwd(self, expert: int, y: HostArray) -> HostArray:
        """Returns y (n, h), as it was computed, times w2: (n, d)."""

    def down_bwd(self, expert: int, grad_rows: HostArray) -> HostArray:
        """Returns the gradient (n, d) of out's rows times w2 transposed: (n, h)."""

    def up_bwd(self, expert: int, grad_ab: Sequence[HostArray]) -> HostArray:
        """Returns the gradients (n, h) of a and b times the halves of w1, transposed: (n, d), summed."""


class Plain:
    """The products in the layer's precision. y is rounded to the dtype `store` before it is multiplied.

    read: gives the numbers of an operand that are multiplied.
    """

    def __init__(self, w1_parts: Sequence[HostArray], w2: HostArray, compute: Any, store: Any, read: Read) -> None:
        self.w1_parts, self.w2, self.compute, self.store, self.read = w1_parts, w2, compute, store, read

    def _weight(self, weight: HostArray) -> HostArray:
        return self.read(cast(weight, self.compute))

    def up_fwd(self, expert: int, x_rows: HostArray) -> list[HostArray]:
        return [product_of_rows(self.read(x_rows), self._weight(part[expert])) for part in self.w1_parts]

    def down_fwd(self, expert: int, y: HostArray) -> HostArray:
        rounded = cast(cast(y, self.store), self.compute)
        return product_of_rows(self.read(rounded), self._weight(self.w2[expert]))

    def down_bwd(self, expert: int, grad_rows: HostArray) -> HostArray:
        return product_of_rows(self.read(grad_rows), self._weight(self.w2[expert]).T)

    def up_bwd(self, expert: int, grad_ab: Sequence[HostArray]) -> HostArray:
        pairs = zip(grad_ab, self.w1_parts, strict=True)
        first, *others = (product_of_rows(self.read(half), self._weight(part[expert]).T) for half, part in pairs)
        return sum(others, first)


def _numbers(stored: HostArray) -> HostArray:
    return from_e4m3(stored).astype(np.float64)


class InFp8:
    """Each product reads the orientation that its kernel reads, as the other may hold anything.

    parts: gives the halves (E, d, h) of a w1. joined: puts (n, h) of interleaved halves together; None of others.
    """

    def __init__(
        self,
        weights: Fp8Weights,
        parts: Callable[[HostArray], Sequence[HostArray]],
        joined: Callable[[Sequence[HostArray]], HostArray] | None,
        compute: Any,
    ) -> None:
        self.weights, self.compute, self._joined = weights, compute, joined
        self._up_fwd, self._up_bwd = parts(weights.w1_transposed.swapaxes(1, 2)), parts(weights.w1)
        self._down_fwd, self._down_bwd = weights.w2_transposed.swapaxes(1, 2), weights.w2  # (E, h, d)

    def _by_row(self, rows: HostArray, weight: HostArray, scale: HostArray) -> HostArray:
        """Returns rows (n, K) with a scale each, times weight (K, N) with one scale."""
        stored, scales = quantize(rows, axis=1)
        sums = (from_e4m3(stored).astype(np.float64) @ weight).astype(np.float32)
        return cast(sums * (scales * scale), self.compute)

    def _by_group(self, rows: HostArray, weight: HostArray, scale: HostArray) -> HostArray:
        """Returns rows (n, K) with a scale for each 128 columns, times weight (K, N) with one scale; float64."""
        total = np.zeros((len(rows), weight.shape[1]))
        for first in range(0, rows.shape[1], GROUP_COLUMNS):
            group = slice(first, first + GROUP_COLUMNS)
            stored, scales = quantize(rows[:, group], axis=1)
            total += from_e4m3(stored).astype(np.float64) @ weight[group] * scales
        return total * scale

    def up_fwd(self, expert: int, x_rows: HostArray) -> list[HostArray]:
        scales = self.weights.w1_scales[expert]
        return [self._by_row(x_rows, _numbers(part[expert]), scales[half]) for half, part in enumerate(self._up_fwd)]

    def down_fwd(self, expert: int, y: HostArray) -> HostArray:
        return cast(
            self._by_group(y, _numbers(self._down_fwd[expert]), self.weights.w2_scales[expert, 0]), self.compute
        )

    def down_bwd(self, expert: int, grad_rows: HostArray) -> HostArray:
        return self._by_row(grad_rows, _numbers(self._down_bwd[expert]).T, self.weights.w2_scales[expert, 0])

    def up_bwd(self, expert: int, grad_ab: Sequence[HostArray]) -> HostArray:
        scales = self.weights.w1_scales[expert]
        if self._joined is not None:
            w1 = _numbers(self.weights.w1[expert])
            return cast(self._by_group(self._joined(grad_ab), w1.T, scales[0]), self.compute)
        halves = enumerate(zip(grad_ab, self._up_bwd, strict=True))
        total = sum(self._by_group(grad, _numbers(part[expert]).T, scales[half]) for half, (grad, part) in halves)
        return cast(np.asarray(total), self.compute)


def plain_wgrad(gathered: HostArray, routed: HostArray) -> HostArray:
    """Returns the gradient (M, N) of a weight, summed over an expert's rows: gathered (n, M), routed (n, N)."""
    product: HostArray = gathered.T @ routed
    return product


def wgrad_in_fp8(gathered: HostArray, routed: HostArray, store: Any) -> HostArray:
    """Returns the same from e4m3: `gathered` with a scale for each row, `routed` with one for 128 columns of all rows.

    A row of routed, rounded to `store`, is first multiplied by the scale of gathered's row, which is 0 for zeros.
    """
    stored, scales = quantize_rows(gathered)
    scaled = routed.astype(store).astype(np.float32) * scales[:, None]
    total, rows = np.empty((gathered.shape[1], routed.shape[1])), _numbers(stored).T
    for first in range(0, routed.shape[1], GROUP_COLUMNS):
        group = slice(first, first + GROUP_COLUMNS)
        columns, scale = quantize(scaled[:, group], axis=(0, 1))
        total[:, group] = rows @ _numbers(columns) * scale
    return cast(total, gathered.dtype)
