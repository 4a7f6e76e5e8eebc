"""Numbers in e4m3 with float32 scales, as in kernels_cu/common/fp8.cuh.

A number is its e4m3 number times the scale of its group: scale = amax / 448, amax being the group's largest magnitude
and at least 2^-100, and e4m3 = v * (448 / amax), rounded to nearest even, all in float32. A group of zeros has the
scale 1; denormals of float32 count as zeros. An infinity makes all of its group NaN; a NaN stays where it is.
"""

from typing import Any

import ml_dtypes
import numpy as np

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.reference.numerics import HostArray
from moeblaze_cupy.types import Fp8Weights

E4M3_MAX = np.float32(448)
MIN_AMAX = np.float32(2.0**-100)
MIN_NORMAL = np.finfo(np.float32).smallest_normal


def scaling(amax: HostArray) -> tuple[HostArray, HostArray]:
    """Returns scale and factor of largest magnitudes, float32."""
    limited = np.where(amax < MIN_NORMAL, E4M3_MAX, np.maximum(amax, MIN_AMAX)).astype(np.float32)
    return limited / E4M3_MAX, E4M3_MAX / limited


def amax_over(values: HostArray, axis: int | tuple[int, ...]) -> HostArray:
    """Returns the largest magnitudes of float32 values along `axis`, which stays with size 1. NaN does not count."""
    found: HostArray = np.fmax.reduce(np.abs(values), axis=axis, keepdims=True, initial=np.float32(0))
    return found


def to_e4m3(values: HostArray) -> HostArray:
    """Returns float32 as bytes of e4m3: rounded to nearest even, beyond 448 to 448, NaN as 0x7f."""
    rounded = np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    stored: HostArray = np.where(np.isnan(values), np.uint8(0x7F), rounded)
    return stored


def from_e4m3(stored: HostArray) -> HostArray:
    """Returns bytes of e4m3 as float32."""
    values: HostArray = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def quantize(values: HostArray, axis: int | tuple[int, ...]) -> tuple[HostArray, HostArray]:
    """Returns values of any float dtype as bytes of e4m3, and float32 scales with size 1 along `axis`."""
    single = values.astype(np.float32)
    with np.errstate(invalid="ignore"):  # an infinity times 0
        scale, factor = scaling(amax_over(single, axis))
        return to_e4m3(single * factor), scale


def quantize_rows(rows: HostArray) -> tuple[HostArray, HostArray]:
    """Returns rows (L, d) as bytes of e4m3, and float32 scales (L,).

    A row of zeros has the scale 0, as gradients of weights multiply other numbers by scales.
    """
    stored, scales = quantize(rows, axis=1)
    is_zero = amax_over(rows.astype(np.float32), axis=1) < MIN_NORMAL
    return stored, np.where(is_zero, np.float32(0), scales)[:, 0]


def dequantize(stored: HostArray, scales: HostArray, dtype: Any) -> HostArray:
    """Returns e4m3 rows (L, d) times float32 scales (L,), each number rounded to `dtype`.

    `quantize` along rows makes the same bytes and scales from them again, except scales of rows that are all NaN or 0.
    """
    with np.errstate(all="ignore"):  # an infinite scale times 0; rows that were never written
        rows: HostArray = (from_e4m3(stored) * scales[:, None]).astype(dtype)
    return rows


def _in_groups(first_layer: HostArray, h: int, interleaved: bool) -> HostArray:
    """Returns (R, halves * h) as (R, groups, GROUP_COLUMNS, halves), with zeros past the last column."""
    R, columns = first_layer.shape
    halves, groups = columns // h, launch_config.ceil_div(h, launch_config.GROUP_COLUMNS)
    by_half = first_layer.reshape(R, h, halves) if interleaved else first_layer.reshape(R, halves, h).swapaxes(1, 2)
    padded = np.zeros((R, groups * launch_config.GROUP_COLUMNS, halves), first_layer.dtype)
    padded[:, :h] = by_half
    return padded.reshape(R, groups, launch_config.GROUP_COLUMNS, halves)


def _from_groups(grouped: HostArray, h: int, interleaved: bool) -> HostArray:
    R, groups, width, halves = grouped.shape
    by_half = grouped.reshape(R, groups * width, halves)[:, :h]
    return (by_half if interleaved else by_half.swapaxes(1, 2)).reshape(R, halves * h)


def quantize_weights(w1: HostArray | tuple[HostArray, HostArray], w2: HostArray, gate_up: str = "halves") -> Fp8Weights:
    """Does what `moeblaze_cupy.quantize_weights` does, without checks of the arguments."""
    joined = np.concatenate(w1, axis=2) if isinstance(w1, tuple) else w1  # (E, d, 2h) or (E, d, h)
    E, d, columns = joined.shape
    halves = columns // w2.shape[1]
    groups = 1 if gate_up == "interleaved" else halves
    up, up_scales = quantize(joined.reshape(E, d, groups, columns // groups), axis=(1, 3))
    down, down_scales = quantize(w2, axis=(1, 2))
    up = np.ascontiguousarray(up.reshape(E, d, columns))
    amax = np.zeros((E, halves + 1), np.float32)
    amax[:, :groups] = amax_over(joined.reshape(E, d, groups, -1).astype(np.float32), (1, 3)).reshape(E, groups)
    amax[:, halves] = amax_over(w2.astype(np.float32), (1, 2)).reshape(E)
    return Fp8Weights(
        up,
        np.ascontiguousarray(up.swapaxes(1, 2)),
        np.array(np.broadcast_to(up_scales.reshape(E, groups), (E, halves))),
        np.ascontiguousarray(down),
        np.ascontiguousarray(down.swapaxes(1, 2)),
        down_scales.reshape(E, 1),
        gate_up,
        amax,
    )


def save_first_layer(first_layer: HostArray, h: int, interleaved: bool) -> HostArray:
    """Returns (R, 2h) or (R, h) in any float dtype as the bytes of `launch_config.saved_fp8`."""
    R, columns = first_layer.shape
    place = launch_config.saved_fp8(R, h, columns // h)
    stored, scales = quantize(_in_groups(first_layer, h, interleaved), axis=2)
    saved = np.zeros(place.nbytes, np.uint8)
    saved[: R * columns] = _from_groups(stored, h, interleaved).reshape(-1)
    saved[place.scales :] = np.ascontiguousarray(scales[:, :, 0]).view(np.uint8).reshape(-1)
    return saved


def first_layer_of(saved: HostArray, R: int, h: int, halves: int, interleaved: bool) -> HostArray:
    """Returns the inverse of `save_first_layer`, (R, halves * h) float32."""
    place = launch_config.saved_fp8(R, h, halves)
    stored = _in_groups(from_e4m3(saved[: R * halves * h].reshape(R, halves * h)), h, interleaved)
    scales = saved[place.scales :].view(np.float32).reshape(R, place.groups, 1, halves)
    with np.errstate(invalid="ignore"):
        return _from_groups(stored * scales, h, interleaved)
