"""Weights in four and eight bits for the tests, and the numbers that they stand for, worked out here in float64."""

import ml_dtypes
import numpy as np

from moeblaze_cupy.types import NestedScales, QuantizedWeight

# Of QLoRA, as bitsandbytes has them; bnb.functional.get_4bit_type("nf4") prints these digits.
NF4_TABLE = np.float32(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
# Ends of float32, a denormal, powers of two, and numbers with all bits.
FLOAT_SCALES = np.float32([0, 1e-45, 3e-39, 2.0**-126, 2.0**-127, 1.7e-20, 0.3, 1, 448 / 3, 1e20, 1e36, 7e35])


def bits(array):
    """As unsigned integers; NaN as 1, whatever its bits are in float32, as they are in bfloat16 (0x7fff)."""
    found = np.array(array).view(f"u{array.dtype.itemsize}")
    nan = np.isnan(np.asarray(array).astype(np.float32))
    if array.dtype == ml_dtypes.bfloat16:
        found[nan] = 0x7FFF
    else:
        found[nan] = 1
    return found


def in_float64(weight, of_scales=False):
    """(E, N, K) in float64: code * scale, element by element, or the scale of each element."""
    E, K, N = weight.shape
    e, n, k = np.ogrid[:E, :N, :K]
    data = np.asarray(weight.data).view(np.uint8).reshape(E, -1)
    flat = n * K + k
    if weight.format in ("mxfp4", "nf4"):
        byte, is_high = data[e, flat // 2], (flat % 2 == 1) == (weight.format == "mxfp4")
        nibble = np.where(is_high, byte >> 4, byte & 15).astype(np.uint8)
        if weight.format == "nf4":
            codes = NF4_TABLE[nibble].astype(np.float64)
        else:
            codes = nibble.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    elif weight.format == "e4m3":
        codes = data[e, flat].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        codes = data[e, flat].view(np.int8).astype(np.float64)
    scales = np.asarray(weight.scales)
    if weight.nested is not None:
        code, absmax, offset = weight.nested
        products = code[scales].astype(np.float64) * np.repeat(absmax, 256, axis=1)
        scales = (products.astype(np.float32) + np.float32(offset)).astype(np.float64)  # rounded twice, as bitsandbytes
    elif scales.dtype != np.float32:
        scales = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    if weight.format == "mxfp4":
        scale = scales[e, n, k // 32]
    elif weight.format == "nf4":
        scale = scales[e, flat // 64]
    elif weight.format == "e4m3":
        scale = scales[e, n // weight.block[0], k // weight.block[1]]
    else:
        scale = scales[e, n, 0]
    with np.errstate(all="ignore"):
        return scale * np.ones_like(codes) if of_scales else codes * scale.astype(np.float64)


def _nested(rng, E, blocks):
    code = np.sort(rng.standard_normal(256)).astype(np.float32)
    absmax = (rng.random((E, blocks // 256)) + 0.5).astype(np.float32)
    return NestedScales(code, absmax, np.array(0.7, np.float32))


def random_weight(name, shape, block=None, seed=0):
    """Random codes and scales that keep all numbers finite, as far as the format lets them. shape: (E, K, N)."""
    rng = np.random.default_rng(seed)
    E, K, N = shape

    def bytes_of(*sizes):
        return rng.integers(256, size=sizes, dtype=np.uint8)

    if name == "mxfp4":
        scales = rng.integers(118, 130, size=(E, N, K // 32), dtype=np.uint8)
        return QuantizedWeight(bytes_of(E, N, K // 2), scales, "mxfp4", shape)
    if name == "nf4":
        scales = (rng.random((E, N * K // 64)) / 10).astype(np.float32)
        return QuantizedWeight(bytes_of(E, N * K // 2), scales, "nf4", shape)
    if name == "nested":
        blocks = N * K // 64
        nested = _nested(rng, E, blocks)
        return QuantizedWeight(bytes_of(E, N * K // 2), bytes_of(E, blocks), "nf4", shape, None, nested)
    if name == "int8":
        scales = (rng.random((E, N, 1)) / 500).astype(np.float32)
        return QuantizedWeight(bytes_of(E, N, K).view(np.int8), scales, "int8", shape)
    block = block or (128, 128)
    data = bytes_of(E, N, K)
    data[(data & 0x7F) == 0x7F] = 0x40  # no NaN
    grid = E, -(-N // block[0]), -(-K // block[1])
    if name == "mxfp8":
        return QuantizedWeight(data, rng.integers(110, 122, size=grid, dtype=np.uint8), "e4m3", shape, block)
    return QuantizedWeight(data, (rng.random(grid) / 100).astype(np.float32), "e4m3", shape, block)


def every_code(name, K=64):
    """Each code with each scale, in each place of eight elements; the second expert is the first one reversed."""
    rng = np.random.default_rng(1)
    if name in ("mxfp4", "nf4", "nested"):
        scales = np.arange(256, dtype=np.uint8) if name != "nf4" else FLOAT_SCALES
        per_block = 32 if name == "mxfp4" else 64
        # A block has each code twice or four times; shifted by one from row to row, each comes to every place.
        rows = np.array([[(i + shift) % 16 for i in range(per_block)] for shift in range(16)], np.uint8)
        nibbles = np.concatenate([np.tile(row, (len(scales), 1)) for row in rows])  # (16 * scales, per_block)
        of_block = np.tile(scales, 16)
        first, second = nibbles[:, 0::2], nibbles[:, 1::2]
        packed = first | second << 4 if name == "mxfp4" else first << 4 | second
        both = np.stack([packed, packed[::-1]]), np.stack([of_block, of_block[::-1]])
        blocks_of_row = K // per_block
        N = len(of_block) // blocks_of_row
        if name == "mxfp4":
            return QuantizedWeight(both[0].reshape(2, N, K // 2), both[1].reshape(2, N, -1), "mxfp4", (2, K, N))
        nested = _nested(rng, 2, len(of_block)) if name == "nested" else None
        return QuantizedWeight(both[0].reshape(2, -1), both[1].reshape(2, -1), "nf4", (2, K, N), None, nested)
    codes = np.stack([(np.arange(256) + shift) % 256 for shift in range(8)]).astype(np.uint8)  # (8, 256)
    if name == "mxfp8":
        scales = np.arange(256, dtype=np.uint8)  # a row for each, 8 blocks of 32 columns
        data = np.concatenate([np.roll(codes, -scale, axis=1)[scale % 8][None] for scale in range(256)])
        data = np.concatenate([data[(np.arange(256) + 37 * i) % 256] for i in range(8)])  # (2048, 256)
        of_row = np.tile(scales, 8)
        both = np.stack([data, data[::-1]]), np.stack([of_row, of_row[::-1]])
        return QuantizedWeight(both[0], np.repeat(both[1][..., None], 8, axis=2), "e4m3", (2, 256, 2048), (1, 32))
    scales = FLOAT_SCALES
    data = np.tile(codes, (len(scales), 1))  # (8 * scales, 256)
    of_row = np.repeat(scales, 8)
    both = np.stack([data, data[::-1]]), np.stack([of_row, of_row[::-1]])[..., None]
    if name == "int8":
        return QuantizedWeight(both[0].view(np.int8), both[1], "int8", (2, 256, len(data)))
    return QuantizedWeight(both[0], both[1], "e4m3", (2, 256, len(data)), (1, 256))
