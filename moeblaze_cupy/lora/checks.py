"""Checks of low-rank factors, from shapes and dtypes alone; see `moeblaze_cupy.checks`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import checks
from moeblaze_cupy.frameworks import Array
from moeblaze_cupy.types import FACTORS, LayerArrays, LayerOptions, Lora

MAX_RANK = 256


NAMES = tuple(f"lora.{name}" for name in FACTORS)
SUMMED = 8  # elements that a thread adds of a gradient in chunks


def given(function: str, lora: Any) -> Lora:
    """The argument `lora`, if its pairs are whole and its scales are numbers, which are then floats."""
    if not isinstance(lora, Lora):
        raise checks.bad_type(function, "lora", "moeblaze_cupy.Lora or None", type(lora))
    for first, second in (("a1", "b1"), ("a2", "b2")):
        if (getattr(lora, first) is None) != (getattr(lora, second) is None):
            missing = first if getattr(lora, first) is None else second
            raise checks.bad_value(function, f"lora.{missing}", f"{first} and {second}, or neither", None)
    if lora.a1 is None and lora.a2 is None:
        raise checks.bad_value(function, "lora", "a1 and b1, a2 and b2, or all four", "no factors")
    names = "scale1", "scale2"
    return lora._replace(**{name: scale(function, f"lora.{name}", getattr(lora, name)) for name in names})


def scale(function: str, argument: str, value: Any) -> float:
    """What factors' products are multiplied by, as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise checks.bad_type(function, argument, "a number", repr(value))
    try:
        number = float(value)
    except OverflowError:  # of an int
        number = math.inf
    if not math.isfinite(np.float32(number)):
        raise checks.bad_value(function, argument, "a number that is finite in float32", number)
    return number


def layer(function: str, of: LayerArrays, options: LayerOptions, factors: Sequence[Array | None]) -> None:
    """of: a layer that has passed its checks, `frameworks.Array` of each. factors: in the order of NAMES."""
    d, (E, h, _) = of.x.shape[1], of.w2.shape
    gate = "2h" if options.gated else "h"
    sizes = {"lora.a1": ("d", d), "lora.b1": (gate, h * options.halves), "lora.a2": ("h", h), "lora.b2": ("d", d)}
    arrays = dict(zip(NAMES, factors, strict=True))
    for first, second in (("lora.a1", "lora.b1"), ("lora.a2", "lora.b2")):
        a, b = arrays[first], arrays[second]
        if a is None or b is None:
            continue
        letter, columns = sizes[first]
        if len(a.shape) == 2:
            checks.shape(function, first, a, f"r, {letter}", (None, columns))
        else:
            checks.shape(function, first, a, f"E, r, {letter}", (E, None, columns))
        rank = a.shape[-2]
        if not 1 <= rank <= MAX_RANK:
            raise checks.bad_value(function, first, f"a rank from 1 to {MAX_RANK}", rank)
        letter, rows = sizes[second]
        checks.shape(function, second, b, f"E, {letter}, r", (E, rows, rank))
        for name, array in ((first, a), (second, b)):
            checks.dtype(function, name, array, tuple(dict.fromkeys(("float32", of.x.dtype))))


def summed(function: str, factors: Sequence[Array | None]) -> None:
    """Checks that the gradients of these factors can be sums over chunks of tokens. factors: in the order of NAMES."""
    for name, factor in zip(NAMES, factors, strict=True):
        if factor is not None and factor.size % SUMMED:
            expected = f"a multiple of {SUMMED} elements with memory_limit"
            raise checks.bad_value(function, name, expected, factor.size)
