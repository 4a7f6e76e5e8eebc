"""Weights in four and eight bits: quantisation of arrays, and the numbers that `types.QuantizedWeight` stands for.

A number is code * scale in float32, rounded once to the weight's dtype. E4m3 and e8m0 come as bytes.
"""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from moeblaze_cupy.reference.fp8 import MIN_NORMAL, amax_over, from_e4m3, scaling, to_e4m3
from moeblaze_cupy.reference.numerics import HostArray
from moeblaze_cupy.types import Fp8Weights, QuantizedWeight

MXFP4_BLOCK, NF4_BLOCK, NESTED_BLOCK = 32, 64, 256
E4M3_RANGE = 6  # the exponent of two of e2m1's codes in e4m3 where a group's scale is largest: 6 * 2^6 is below 448
LEAST_TOP = 7  # the least scale byte that sets a group's scale, which is no denormal then
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the magnitudes of the codes 0 to 7; 8 is the sign
# Quantiles of a normal distribution, by Dettmers et al. (QLoRA, arXiv 2305.14314), as bitsandbytes has them.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)


def from_e8m0(scales: HostArray) -> HostArray:
    """Returns bytes s as 2^(s - 127) in float32, 255 as NaN."""
    powers: HostArray = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return np.where(scales == 255, np.float32(np.nan), powers)


def rounded(values: HostArray, dtype: Any) -> HostArray:
    """Returns float32 in `dtype`. A NaN of bfloat16 is 0x7fff, as the kernels round it."""
    found: HostArray = values.astype(dtype)
    if found.dtype == ml_dtypes.bfloat16:
        found.view(np.uint16)[np.isnan(values)] = 0x7FFF
    return found


def nf4_scales(weight: QuantizedWeight) -> HostArray:
    """Returns scales of any experts in float32: nested ones are code[byte] * absmax, rounded, + offset, rounded."""
    scales: HostArray = weight.scales
    if weight.nested is not None:
        code, absmax, offset = weight.nested
        scales = code[scales] * np.repeat(absmax, NESTED_BLOCK, axis=1) + np.reshape(offset, ())
    return scales


def _mxfp4(weight: QuantizedWeight, N: int, K: int) -> HostArray:
    packed = weight.data.reshape(-1, N, K // 2)
    codes = np.stack((packed & 15, packed >> 4), axis=3).reshape(-1, N, K // MXFP4_BLOCK, MXFP4_BLOCK)
    magnitudes = E2M1[codes & 7]
    values: HostArray = np.where(codes & 8, -magnitudes, magnitudes) * from_e8m0(weight.scales)[..., None]
    return values


def _nf4(weight: QuantizedWeight, N: int, K: int) -> HostArray:
    codes = np.stack((weight.data >> 4, weight.data & 15), axis=2)
    values: HostArray = NF4[codes].reshape(-1, N * K // NF4_BLOCK, NF4_BLOCK) * nf4_scales(weight)[..., None]
    return values


def _e4m3(weight: QuantizedWeight, N: int, K: int) -> HostArray:
    assert weight.block is not None
    rows, columns = weight.block
    scales = weight.scales if weight.scales.dtype == np.float32 else from_e8m0(weight.scales)
    spread = scales[:, np.arange(N) // rows][:, :, np.arange(K) // columns]
    values: HostArray = from_e4m3(weight.data) * spread
    return values


def _int8(weight: QuantizedWeight, N: int, K: int) -> HostArray:
    values: HostArray = weight.data.astype(np.float32) * weight.scales
    return values


_DECODE: dict[str, Callable[[QuantizedWeight, int, int], HostArray]] = {
    "mxfp4": _mxfp4,
    "nf4": _nf4,
    "e4m3": _e4m3,
    "int8": _int8,
}


def expert_of(weight: QuantizedWeight, expert: int) -> QuantizedWeight:
    """Returns the weight of one expert, E being 1."""
    here = slice(expert, expert + 1)
    nested = weight.nested and weight.nested._replace(absmax=weight.nested.absmax[here])
    parts = weight.data[here], weight.scales[here]
    return weight._replace(data=parts[0], scales=parts[1], shape=(1, *weight.shape[1:]), nested=nested)


def dequantize(weight: QuantizedWeight) -> HostArray:
    """Returns (E, N, K) in the weight's dtype."""
    E, K, N = weight.shape
    decode, dtype = _DECODE[weight.format], np.dtype(getattr(ml_dtypes, weight.dtype, weight.dtype))
    out = np.empty((E, N, K), dtype)
    with np.errstate(all="ignore"):
        for expert in range(E):
            values = decode(expert_of(weight, expert), N, K)
            out[expert] = rounded(values, dtype).reshape(N, K)
    return out


def mxfp4_as_e4m3(weight: QuantizedWeight, groups: int) -> tuple[HostArray, HostArray]:
    """Returns bytes of e4m3 (E, N, K), and float32 scales (E, groups), which are powers of two.

    A group is a part of the N rows. Its scale is 2^(top - 133), top being the largest scale byte of its blocks, at
    least 7 and not counting 255. Numbers of blocks whose byte is top - 14 or more are exact. Others are rounded.
    """
    E, K, N = weight.shape
    scales = weight.scales.reshape(E, groups, N // groups, K // MXFP4_BLOCK)
    top = np.where(scales == 255, 0, scales).astype(np.int32).max(axis=(2, 3), initial=LEAST_TOP)
    packed = weight.data.reshape(E, N, K // 2)
    codes = np.stack((packed & 15, packed >> 4), axis=3).reshape(E, groups, N // groups, K // MXFP4_BLOCK, MXFP4_BLOCK)
    exponents = scales.astype(np.int32) - top[:, :, None, None] + E4M3_RANGE
    magnitudes = to_e4m3(np.ldexp(E2M1[codes & 7], exponents[..., None]))
    magnitudes[scales == 255] = 0x7F
    stored: HostArray = (magnitudes | (codes & 8) << 4).reshape(E, N, K)
    return stored, np.ldexp(np.float32(1), top - 127 - E4M3_RANGE)


def fp8_weights(w1: QuantizedWeight, w2: QuantizedWeight, gate_up: str) -> Fp8Weights:
    """Returns what precision="fp8" multiplies in place of weights in mxfp4; see `mxfp4_as_e4m3`."""
    halves = w1.shape[2] // w2.shape[1]
    groups = 1 if gate_up == "interleaved" else halves
    (up, up_scales), (down, down_scales) = mxfp4_as_e4m3(w1, groups), mxfp4_as_e4m3(w2, 1)
    in_rows = [np.ascontiguousarray(stored.swapaxes(1, 2)) for stored in (up, down)]
    of_halves = np.array(np.broadcast_to(up_scales, (len(up), halves)))
    return Fp8Weights(in_rows[0], up, of_halves, in_rows[1], down, down_scales, gate_up)


def _without_denormals(scales: HostArray) -> HostArray:
    """Returns values with denormals as 0, as the kernels compare numbers."""
    return np.where(scales >= MIN_NORMAL, scales, np.float32(0))


def _to_mxfp4(rows: HostArray, block: tuple[int, int] | None) -> tuple[HostArray, HostArray]:
    """Applies the OCP rule: the scale's exponent is that of the largest magnitude less 2; codes stop at 6."""
    N, K = rows.shape
    blocks = rows.reshape(N, K // MXFP4_BLOCK, MXFP4_BLOCK)
    amax = amax_over(blocks, 2)
    exponents = np.where(amax > 0, np.frexp(amax)[1] - 1 - 2, -127)
    scales = np.clip(exponents + 127, 0, 254)
    magnitudes = np.ldexp(np.abs(blocks), 127 - scales)
    # Ties go to the even code: the middle below an odd code is still of the code before.
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    middles[::2] = np.nextafter(middles[::2], np.float32(np.inf))
    codes = np.searchsorted(middles, magnitudes, side="right").astype(np.uint8) | np.signbit(blocks) * np.uint8(8)
    pairs = codes.reshape(N, K // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales[..., 0].astype(np.uint8)


def _to_nf4(rows: HostArray, block: tuple[int, int] | None) -> tuple[HostArray, HostArray]:
    """Encodes as bitsandbytes does on CUDA: v * (1 / absmax), and the lower of two equally near entries."""
    blocks = rows.reshape(-1, NF4_BLOCK)
    absmax = _without_denormals(amax_over(blocks, 1))
    factors = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax > 0)
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = np.searchsorted(middles, blocks * factors, side="left").astype(np.uint8).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], absmax[:, 0]


def _to_e4m3(rows: HostArray, block: tuple[int, int] | None) -> tuple[HostArray, HostArray]:
    assert block is not None
    (N, K), (height, width) = rows.shape, block
    grid = math.ceil(N / height), math.ceil(K / width)
    padded = np.zeros((grid[0] * height, grid[1] * width), np.float32)
    padded[:N, :K] = rows
    blocks = padded.reshape(grid[0], height, grid[1], width)
    scales, factors = scaling(amax_over(blocks, (1, 3)))
    return to_e4m3(blocks * factors).reshape(padded.shape)[:N, :K], scales[:, 0, :, 0]


def _to_int8(rows: HostArray, block: tuple[int, int] | None) -> tuple[HostArray, HostArray]:
    scales = _without_denormals(amax_over(rows, 1) / np.float32(127))
    codes = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
    return np.clip(np.rint(codes), -127, 127).astype(np.int8), scales


_ENCODE: dict[str, Callable[[HostArray, tuple[int, int] | None], tuple[HostArray, HostArray]]] = {
    "mxfp4": _to_mxfp4,
    "nf4": _to_nf4,
    "e4m3": _to_e4m3,
    "int8": _to_int8,
}


def quantize(w: HostArray, form: str, block: tuple[int, int] | None = None) -> QuantizedWeight:
    """Returns w (E, K, N), in any memory order, in a format. block: "e4m3"'s. Non-finite weights give no numbers."""
    E, K, N = w.shape
    parts = []
    with np.errstate(all="ignore"):
        for expert in range(E):
            rows = np.ascontiguousarray(w[expert].T, np.float32)
            parts.append(_ENCODE[form](rows, block))
    data, scales = (np.ascontiguousarray(np.stack(part)) for part in zip(*parts, strict=True))
    return QuantizedWeight(data, scales, form, (E, K, N), block, dtype=w.dtype.name)
