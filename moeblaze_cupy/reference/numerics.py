"""Arithmetic that the steps share: the precision of their computation, softmax, the error function."""

import math
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]

# Rows of a block of `product_of_rows`. Kernels of OpenBLAS treat 8 rows alike; those for AVX2 alone do not treat 32 so.
ROWS = 8


def compute_dtype(array: HostArray) -> np.dtype[Any]:
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def cast(array: HostArray, dtype: Any) -> HostArray:
    return array.astype(dtype, copy=False)


def product_of_rows(rows: HostArray, weight: HostArray) -> HostArray:
    """Returns rows (n, K) times weight (K, N), whose bits for a row depend on no other row.

    A BLAS adds in an order that depends on the number of rows, and on a row's place among many. So it gets small blocks
    of one size, filled up with zeros.
    """
    blocks = -(-len(rows) // ROWS)
    filled = np.zeros((blocks * ROWS, rows.shape[1]), rows.dtype)
    filled[: len(rows)] = rows
    product: HostArray = filled.reshape(blocks, ROWS, rows.shape[1]) @ weight
    return product.reshape(blocks * ROWS, weight.shape[1])[: len(rows)]


def to_tf32(array: HostArray) -> HostArray:
    """Returns a float32 array rounded to TF32, which has 10 bits of mantissa: to nearest, ties away from zero."""
    rounded = ((array.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def softmax(scores: HostArray) -> HostArray:
    # A row with an infinite or NaN maximum is NaN, as intended.
    exp: HostArray = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: HostArray = exp.sum(axis=-1, keepdims=True)
    return exp / total


def sigmoid(x: HostArray) -> HostArray:
    small = np.exp(-np.abs(x))  # it does not overflow, and keeps the digits of values near 0
    values: HostArray = np.where(np.signbit(x), small, 1) / (1 + small)
    return values


_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: HostArray) -> HostArray:
    """Returns the error function of a float32 or float64 array, in its dtype."""
    return np.asarray(_erf(cast(x, np.float64)), x.dtype)
