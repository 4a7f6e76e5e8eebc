"""Arithmetic that the steps share: the precision of their computation, softmax, the error function."""

import math
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]


def compute_dtype(array: HostArray) -> np.dtype[Any]:
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def cast(array: HostArray, dtype: Any) -> HostArray:
    return array.astype(dtype, copy=False)


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
