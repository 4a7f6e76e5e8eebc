"""The options of the router: their checks, from shapes and dtypes alone, and their normal form."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moeblaze_cupy import checks
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.frameworks import CPU, Array
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.types import SCORES, SHARES, SUMS


class RouterOptions(NamedTuple):
    """The checked options that are not arrays. They form a call's key together with the layouts of the arrays."""

    score: str
    renormalize: bool | None  # None: True if k > 1
    eps: float
    scale: float
    bias_on: str
    groups: tuple[int, int, int] | None  # number of groups, groups kept, largest keys that rank a group
    top_p: float | None
    threshold: float | None
    sums: tuple[str, ...]  # names in the order of SUMS
    sequences: int | None  # None: an array of offsets

    @property
    def shares(self) -> str | None:
        """Returns the score whose shares are added to score_sums."""
        return next((name for name in self.sums if name in SHARES), None)

    def renormalized(self, k: int | None) -> "RouterOptions":
        """Returns the options with True or False for renormalize=None. k: slots per token, None if it differs by token.

        The only weight over itself is 1 and has no gradient, so one slot is not renormalised unless this is asked for.
        """
        return self if self.renormalize is not None else self._replace(renormalize=k is None or k > 1)


def _number(function: str, argument: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise checks.bad_type(function, argument, "a number", repr(value))
    try:
        return float(value)
    except OverflowError:  # an int too large for a float
        return math.inf if value > 0 else -math.inf


def _is_finite(value: float) -> bool:
    """Returns whether a value is finite in float32, which kernels take."""
    return abs(value) <= float(np.finfo(np.float32).max)


def _groups(function: str, groups: Any) -> tuple[int, int, int]:
    if not isinstance(groups, (tuple, list)) or len(groups) != 3:
        raise checks.bad_type(function, "groups", "None or three ints (groups, kept, top)", repr(groups))
    n, kept, top = (checks.integer(function, "groups", value) for value in groups)
    if not (n >= 1 and 1 <= kept <= n and top >= 1):
        raise checks.bad_value(function, "groups", "(groups, kept, top) with 1 <= kept <= groups and top >= 1", groups)
    return n, kept, top


def of(function: str, *values: Any) -> RouterOptions:
    """Checks the caller's values, given in the order of RouterOptions, and returns the options.

    Raises TypeError or ValueError with the name of the function and of the option.
    """
    values = tuple(tuple(value) if isinstance(value, list) else value for value in values)
    try:
        return _kept(function, *values)
    except TypeError:  # an unhashable value is not valid either, except a set
        return _checked(function, *values)


def _checked(
    function: str,
    score: Any,
    renormalize: Any,
    eps: Any,
    scale: Any,
    bias_on: Any,
    groups: Any,
    top_p: Any,
    threshold: Any,
    sums: Any,
    sequences: Any,
) -> RouterOptions:
    checks.one_of(function, "score", score, SCORES)
    if renormalize is not None and not isinstance(renormalize, (bool, np.bool_)):
        raise checks.bad_type(function, "renormalize", "True, False or None", repr(renormalize))
    eps, scale = _number(function, "eps", eps), _number(function, "scale", scale)
    if not (eps >= 0 and _is_finite(eps)):
        raise checks.bad_value(function, "eps", "a finite number from 0 on, in float32", eps)
    if not _is_finite(scale) or np.float32(scale) == 0:
        raise checks.bad_value(function, "scale", "a finite number other than 0, in float32", scale)
    checks.one_of(function, "bias_on", bias_on, ("scores", "logits"))
    if top_p is not None and not (top_p := _number(function, "top_p", top_p)) > 0:
        raise checks.bad_value(function, "top_p", "None or a number above 0", top_p)
    if threshold is not None and math.isnan(threshold := _number(function, "threshold", threshold)):
        raise checks.bad_value(function, "threshold", "None or a number", threshold)
    if isinstance(sums, str) or not isinstance(sums, (tuple, list, set, frozenset)):
        raise checks.bad_type(function, "sums", f"a tuple of names from {', '.join(map(repr, SUMS))}", repr(sums))
    for name in sums:
        checks.one_of(function, "sums", name, SUMS)
    if sum(name in sums for name in SHARES) > 1:
        raise checks.bad_value(function, "sums", f"at most one of {', '.join(map(repr, SHARES))}", sums)
    return RouterOptions(
        score,
        None if renormalize is None else bool(renormalize),
        eps,
        scale,
        bias_on,
        None if groups is None else _groups(function, groups),
        top_p,
        threshold,
        tuple(name for name in SUMS if name in sums),
        sequences,
    )


_kept = functools.lru_cache(maxsize=256, typed=True)(_checked)  # True is no 1 here


def _array(function: str, name: str, array: Array, dtypes: tuple[str, ...]) -> None:
    checks.dtype(function, name, array, dtypes)
    checks.contiguous(function, name, array)


def _wide(logits: Array) -> str:
    return "float64" if logits.dtype == "float64" else "float32"


def _logits(function: str, logits: Array) -> None:
    checks.shape(function, "logits", logits, "L, E", (None, None))
    _array(function, "logits", logits, checks.floats(logits))
    if not 1 <= logits.shape[1] <= router_config.MAX_ROUTER_EXPERTS:
        experts = f"1 to {router_config.MAX_ROUTER_EXPERTS} experts"
        raise checks.bad_value(function, "logits", experts, logits.shape[1])


def _k(function: str, argument: str, k: int, E: int) -> None:
    limit = min(E, router_config.MAX_ROUTER_K)
    if not 1 <= k <= limit:
        expected = f"1 to {limit} (E = {E} experts, at most {router_config.MAX_ROUTER_K})"
        raise checks.bad_value(function, argument, expected, k)


def group_sizes(function: str, options: RouterOptions, k: int | None, E: int) -> None:
    """Checks `groups` against E, and against the number k of experts to choose if any are."""
    if options.groups is None:
        return
    n, kept, top = options.groups
    if E % n:
        raise checks.bad_value(function, "groups", f"a number of groups that divides E = {E}", n)
    if top > E // n:
        raise checks.bad_value(function, "groups", f"top of at most the E / groups = {E // n} experts of one", top)
    if k is not None and k > kept * (E // n):
        expected = f"at most the {kept * (E // n)} experts of the {kept} kept groups of {E // n}"
        raise checks.bad_value(function, "k", expected, k)


def _common(function: str, given: Mapping[str, Array], options: RouterOptions) -> int:
    """Checks token_mask, token_offsets and sequences. Returns the number of sequences."""
    L, E = given["logits"].shape
    checks.slots(function, "logits", L)
    if (mask := given.get("token_mask")) is not None:
        checks.shape(function, "token_mask", mask, "L", (L,))
        _array(function, "token_mask", mask, ("bool",))
    if (offsets := given.get("token_offsets")) is not None:
        checks.shape(function, "token_offsets", offsets, "L+1", (L + 1,))
        _array(function, "token_offsets", offsets, ("int32",))
    columns = E if options.shares else 1  # columns of the largest of the sums
    return checks.sequences(function, options.sequences, given.get("sequences"), L, columns)


def forward(function: str, given: Mapping[str, Array], k: int | None, options: RouterOptions) -> None:
    """Checks the arrays of `route`, by name without the absent ones, against k and the options."""
    logits = given["logits"]
    _logits(function, logits)
    L, E = logits.shape
    number, most = _common(function, given, options), launch_config.MAX_GRID_Y
    if options.sums and logits.device != CPU and number > most:  # router_sums.cu has them along the grid's y
        raise checks.bad_value(function, "sequences", f"at most {most} with sums on CUDA", number)
    ids = given.get("ids")
    if ids is not None:
        ragged = "token_offsets" in given
        letters, shape = ("P", (None,)) if ragged else ("L, k", (L, None))
        checks.shape(function, "ids", ids, letters, shape)
        _array(function, "ids", ids, checks.ID_DTYPES)
        if not ragged and ids.shape[1] < 1:
            raise checks.bad_value(function, "ids", "shape (L, k) with k >= 1", ids.shape)
        if k is not None and (ragged or k != ids.shape[1]):
            expected = "None beside token_offsets" if ragged else f"None or the {ids.shape[1]} slots of ids"
            raise checks.bad_value(function, "k", expected, k)
        for name in ("top_p", "threshold"):
            if getattr(options, name) is not None:
                raise checks.bad_value(
                    function, name, "None beside ids, which are not selected", getattr(options, name)
                )
        checks.slots(function, "ids", ids.size)
    else:
        if "token_offsets" in given:
            raise checks.bad_value(function, "token_offsets", "None without ids", "offsets")
        if k is None:
            raise checks.bad_type(function, "k", "an int, as there are no ids", "None")
        _k(function, "k", k, E)
        checks.slots(function, "logits", L * k)
    if (bias := given.get("bias")) is not None:
        if bias.shape not in ((E,), (L, E)):
            raise checks.bad_value(function, "bias", f"shape (E,) = ({E},) or (L, E) = ({L}, {E})", bias.shape)
        _array(function, "bias", bias, tuple(dict.fromkeys(("float32", _wide(logits)))))
    group_sizes(function, options, k if ids is None else None, E)


def backward(function: str, given: Mapping[str, Array], options: RouterOptions) -> None:
    """Checks the arrays of `route_backward` as `forward` does."""
    logits, weights = given["logits"], given["weights"]
    _logits(function, logits)
    L, E = logits.shape
    _common(function, given, options)
    ragged = "token_offsets" in given
    letters, expected = ("P", (None,)) if ragged else ("L, k", (L, None))
    checks.shape(function, "weights", weights, letters, expected)
    wide = _wide(logits)
    for name, dtype in (("grad_weights", wide), ("weights", wide), ("ids", "int32")):
        checks.shape(function, name, given[name], letters, weights.shape)
        _array(function, name, given[name], (dtype,))
    checks.slots(function, "weights", weights.size)
    offsets = given.get("sequences")
    number = options.sequences if offsets is None else offsets.shape[0] - 1
    for name, shape, letters, asked in (
        ("grad_score_sums", (number, E), "S, E", options.shares is not None),
        ("grad_z_sums", (number,), "S", "z" in options.sums),
        ("grad_entropy_sums", (number,), "S", "entropy" in options.sums),
    ):
        if (grad := given.get(name)) is not None:
            if not asked:
                raise checks.bad_value(function, name, "None, as sums does not name it", f"sums={options.sums}")
            checks.shape(function, name, grad, letters, shape)
            _array(function, name, grad, (wide,))
