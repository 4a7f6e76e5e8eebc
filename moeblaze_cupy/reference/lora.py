"""Low-rank factors beside the weights of the experts, forward and backward, for one expert's rows at a time.

Pair 0 is (a1, b1) beside w1, pair 1 (a2, b2) beside w2. X are the rows that a product multiplies, G the gradient of
its result, u = scale X a^T and v = scale G b. The product becomes X w + u b^T, and the gradient of X becomes
G w^T + v a. The gradient of b is G^T u, that of a is v^T X. Factors, u and v are rounded to x's dtype, as the kernels
read them.
"""

from typing import Any

import numpy as np

from moeblaze_cupy.reference.numerics import HostArray, cast, product_of_rows
from moeblaze_cupy.reference.products import Read
from moeblaze_cupy.types import Lora


class Factors:
    """The factors of a layer, and the sums of their gradients. store: x's dtype. read: that of `products.Plain`."""

    def __init__(self, lora: Lora | None, store: np.dtype[Any], compute: np.dtype[Any], read: Read) -> None:
        self.lora, self.store, self.compute, self.operand = lora or Lora(), store, compute, read
        self.scales = self.lora.scale1, self.lora.scale2
        given = self.lora.factors
        self.read = [None if f is None else cast(cast(f, store), compute) for f in given]
        self.sums = [None if f is None else np.zeros(f.shape, compute) for f in given]

    def rows(self, pair: int, num_rows: int) -> HostArray | None:
        """Returns zeros (R, r) for u; None without the pair."""
        a = self.read[2 * pair]
        return None if a is None else np.zeros((num_rows, a.shape[-2]), self.store)

    def _of(self, number: int, expert: int) -> HostArray:
        """Returns the expert's factor, or that of all experts."""
        factor = self.read[number]
        assert factor is not None
        own: HostArray = factor if factor.ndim == 2 else factor[expert]
        return own

    def _rounded(self, rows: HostArray) -> HostArray:
        return cast(cast(rows, self.store), self.compute)

    def first(self, pair: int, expert: int, rows: HostArray) -> HostArray:
        """Returns u (n, r) of rows X (n, d or h)."""
        return self._rounded(self.scales[pair] * product_of_rows(rows, self._of(2 * pair, expert).T))

    def second(self, pair: int, expert: int, u: HostArray) -> HostArray:
        """Returns the term added to the product: u b^T, (n, 2h or h) or (n, d)."""
        return product_of_rows(self.operand(cast(u, self.compute)), self.operand(self._of(2 * pair + 1, expert)).T)

    def first_bwd(self, pair: int, expert: int, grad: HostArray) -> HostArray:
        """Returns v (n, r) of the gradient G of the product."""
        return self._rounded(self.scales[pair] * product_of_rows(grad, self._of(2 * pair + 1, expert)))

    def second_bwd(self, pair: int, expert: int, v: HostArray) -> HostArray:
        """Returns the term added to the gradient of X: v a."""
        return product_of_rows(self.operand(v), self.operand(self._of(2 * pair, expert)))

    def add_gradients(
        self, pair: int, expert: int, of_a: tuple[HostArray, HostArray], of_b: tuple[HostArray, HostArray]
    ) -> None:
        """Adds the factors' gradients. of_a: X and v. of_b: G and u. The router weight is on X or v, and on G or u."""
        (x, v), (grad, u) = of_a, of_b
        sums_a, sums_b = self.sums[2 * pair : 2 * pair + 2]
        assert sums_a is not None and sums_b is not None
        (sums_a if sums_a.ndim == 2 else sums_a[expert])[...] += v.T @ x
        sums_b[expert] += grad.T @ cast(u, self.compute)

    def gradients(self) -> Lora:
        """Returns the gradients in the factors' dtypes."""
        factors = zip(self.sums, self.lora.factors, strict=True)
        a1, b1, a2, b2 = (None if sums is None else cast(sums, factor.dtype) for sums, factor in factors)
        return Lora(a1, b1, a2, b2, None, None)
