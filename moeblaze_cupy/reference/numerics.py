"""Arithmetic that the steps share: the precision of their computation, softmax, the error function."""

from collections.abc import Sequence
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]


def compute_dtype(array: HostArray) -> np.dtype[Any]:
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def cast(array: HostArray, dtype: Any) -> HostArray:
    return array.astype(dtype, copy=False)


def softmax(scores: HostArray) -> HostArray:
    with np.errstate(invalid="ignore"):  # inf - inf: a row with an infinite or NaN maximum is NaN, as intended
        exp: HostArray = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: HostArray = exp.sum(axis=-1, keepdims=True)
    return exp / total


# W. J. Cody, Rational Chebyshev approximations for the error function, Math. Comp. 23 (1969): numerator and
# denominator, highest power first, of erf(x) / x in x^2 for |x| <= 0.46875, and of exp(x^2) erfc(x) in x above.
# fmt: off
_ERF_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560, 113.864154151050156, 377.485237685302021, 3209.37758913846947),
    (1.0, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)
_ERFC_LARGE = (
    (2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295, 298.635138197400131,
     881.952221241769090, 1712.04761263407058, 2051.07837782607147, 1230.33935479799725),
    (1.0, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019, 3290.79923573345963,
     4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)
# fmt: on


def _polynomial(coefficients: Sequence[float], x: HostArray) -> HostArray:
    total = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total *= x  # it works in place: fresh temporaries would take most of the time
        total += c
    return total


def erf(x: HostArray) -> HostArray:
    """Returns the error function of a float32 or float64 array, in its dtype; absolute error < 1e-15 in float64.

    Cody's second formula is for |x| <= 4. It serves up to 6 here, where erfc < 2e-8 no longer needs all its digits,
    and beyond 6 erf is 1 to the last bit.
    """
    magnitude = np.minimum(np.abs(x), 6)
    small = np.minimum(magnitude, 0.46875)  # each formula sees only its own range: no overflow in the other
    small *= small
    near = x * _polynomial(_ERF_SMALL[0], small) / _polynomial(_ERF_SMALL[1], small)
    tail = _polynomial(_ERFC_LARGE[0], magnitude) / _polynomial(_ERFC_LARGE[1], magnitude)
    tail *= np.exp(-magnitude * magnitude)
    return np.where(magnitude <= 0.46875, near, np.copysign(1 - tail, x))
