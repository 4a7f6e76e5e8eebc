"""Formats of four and eight bits on the CPU: every code, scale and place, by ml_dtypes or by the formula."""

import math

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.types import WEIGHT_FORMATS, NestedScales, QuantizedWeight
from tests.cases import in_order
from tests.quantised.cases import NF4_TABLE, bits, every_code, in_float64, random_weight

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "mxfp8", "nested"])
def test_every_code_and_scale(name, dtype):
    """Each code with each scale byte, or with scales at the ends of float32, in each place of a word."""
    weight = every_code(name)._replace(dtype=dtype)
    E, K, N = weight.shape
    got, exact = mb.dequantize(weight), in_float64(weight)
    assert got.shape == (E, N, K) and got.dtype.name == dtype
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32)  # products of two short numbers round once in float64 and float32 alike
        want = want.astype(BF16) if dtype == "bfloat16" else want
    np.testing.assert_array_equal(bits(got), bits(want))
    assert np.isnan(got.astype(np.float32)).any() == (name not in ("nf4", "int8", "nested"))


def test_denormals_and_negative_zero_of_mxfp4():
    data = np.full((1, 1, 16), 0x81, np.uint8)  # 0.5 and -0
    weight = QuantizedWeight(data, np.zeros((1, 1, 1), np.uint8), "mxfp4", (1, 32, 1))
    pairs = mb.dequantize(weight).view(np.uint16).reshape(-1, 2)
    assert (pairs == [0x0020, 0x8000]).all()  # 2^-128


def test_published_layout_is_read_in_place():
    weight = random_weight("mxfp4", (2, 64, 5))
    as_published = weight._replace(
        data=weight.data.reshape(2, 5, 2, 16), scales=weight.scales.view(ml_dtypes.float8_e8m0fnu)
    )
    np.testing.assert_array_equal(bits(mb.dequantize(as_published)), bits(mb.dequantize(weight)))
    np.testing.assert_array_equal(
        bits(mb.dequantize(weight._replace(data=weight.data.view(np.int8)))), bits(mb.dequantize(weight))
    )


@pytest.mark.parametrize("block", [(128, 128), (40, 96), (3, 8), (1, 160), (77, 160), (5, 1000)])
def test_blocks_of_e4m3(block):
    """Ragged ones, a row, the whole expert, columns past the end."""
    weight = random_weight("e4m3", (2, 160, 77), block)
    np.testing.assert_array_equal(bits(mb.dequantize(weight)), bits(in_float64(weight).astype(np.float32).astype(BF16)))


def test_slices_of_experts_are_slices_of_parts():
    weight = random_weight("nested", (3, 256, 64))
    whole = mb.dequantize(weight)
    nested = weight.nested._replace(absmax=weight.nested.absmax[1:2])
    part = weight._replace(data=weight.data[1:2], scales=weight.scales[1:2], shape=(1, 256, 64), nested=nested)
    np.testing.assert_array_equal(mb.dequantize(part), whole[1:2])


def layer_weights(E, d, h, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    w1, w2 = rng.standard_normal((E, d, 2 * h)), rng.standard_t(3, (E, h, d))
    return w1.astype(dtype), w2.astype(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_codes_are_the_nearest(name, dtype, transposed):
    """No other code of the block's scale is nearer, by all codes of the format."""
    given = layer_weights(2, 64, 96, dtype)
    made = mb.quantize_experts(*(in_order(w, transposed) for w in given), name)
    for w, weight in zip(given, made, strict=True):
        assert weight.format == name and weight.shape == w.shape and weight.dtype == w.dtype.name
        exact = w.swapaxes(1, 2).astype(np.float64)
        scales = in_float64(weight, of_scales=True)
        nearest = np.full(exact.shape, np.inf)
        for code in codes_of(name):
            nearest = np.minimum(nearest, np.abs(code * scales - exact))
        error = np.abs(in_float64(weight) - exact)
        slack = np.abs(exact) * 2**-22  # the quotient by the scale is rounded before it is compared
        assert (error <= nearest + slack).all()
        assert weight.nbytes < {"mxfp4": 0.54, "nf4": 0.57, "e4m3": 1.01, "int8": 1.07}[name] * w.size


def codes_of(name):
    if name == "mxfp4":
        return np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if name == "nf4":
        return NF4_TABLE
    if name == "int8":
        return np.arange(-127, 128)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return every[np.isfinite(every)]


def test_scales_by_the_rules():
    w1, w2 = layer_weights(1, 64, 96)
    w2[0, :, :32] = 0
    w2[0, 0, 0], w2[0, 96 // 2, 1] = 3e38, 1e-38
    rows = np.abs(w2[0].T)  # (d, h)
    of_mxfp4 = mb.quantize_experts(w1, w2, "mxfp4")[1].scales[0]
    amax = rows.reshape(64, 3, 32).max(axis=2)
    want = [[0 if a == 0 else max(math.floor(math.log2(a)) - 2 + 127, 0) for a in row] for row in amax]
    assert of_mxfp4.tolist() == want and want[2] == [0, 0, 0] and max(map(max, want)) == 127 + 127 - 2
    of_nf4 = mb.quantize_experts(w1, w2, "nf4")[1]
    absmax = rows.reshape(-1, 64).max(axis=1)
    assert (absmax == np.float32(1e-38)).sum() == 1  # a denormal, which counts as 0
    np.testing.assert_array_equal(of_nf4.scales[0], np.where(absmax < 2.0**-126, 0, absmax))
    assert (mb.dequantize(of_nf4)[0, 2:32] == 0).all()
    of_int8 = mb.quantize_experts(w1, w2, "int8")[1]
    want_int8 = rows.max(axis=1) / np.float32(127)
    np.testing.assert_array_equal(of_int8.scales[0, :, 0], np.where(want_int8 < 2.0**-126, 0, want_int8))
    assert (of_int8.data[0, 2:32] == 0).all()
    of_e4m3 = mb.quantize_experts(w1, w2, "e4m3")
    assert of_e4m3[0].block == (32, 128) and of_e4m3[1].block == (128, 128)  # 32: gcd of 128 and h
    assert of_e4m3[1].scales[0, 0, 0] == np.float32(3e38) / np.float32(448)


def test_ties_of_mxfp4_go_to_even_codes():
    """Against ml_dtypes, at every middle, just below and just above."""
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7.99])
    near = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9))[:-1]])
    values = np.concatenate([near, -near, np.zeros(64 - 2 * len(near), np.float32)]).astype(np.float32)
    values = np.where(np.abs(values) < 8, values, np.copysign(np.float32(7.99), values))
    values[[31, 63]] = 4  # so that the scale is 1
    w1 = np.tile(values[:, None], (1, 1, 64)).reshape(1, 64, 64)
    weight, _ = mb.quantize_experts(np.ascontiguousarray(w1), np.ones((1, 32, 64), np.float32), "mxfp4")
    assert (weight.scales == 127).all()
    clipped = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(mb.dequantize(weight)[0, 5], clipped)


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    w1, w2 = layer_weights(2, 64, 96)
    rows = torch.from_numpy(np.ascontiguousarray(w1.swapaxes(1, 2)))
    packed, state = functional.quantize_4bit(rows, blocksize=64, quant_type="nf4")
    weight = QuantizedWeight(
        packed.reshape(2, -1).numpy(), state.absmax.reshape(2, -1).numpy(), "nf4", w1.shape, dtype="float32"
    )
    np.testing.assert_array_equal(
        mb.dequantize(weight), functional.dequantize_4bit(packed, state).reshape(rows.shape).numpy()
    )
    made, _ = mb.quantize_experts(w1, w2, "nf4")
    assert (made.data != weight.data).mean() < 1e-3 and (made.scales == weight.scales).all()


@pytest.mark.parametrize("name", ["mxfp4", "nf4"])
def test_decoded_numbers_are_quantised_to_themselves(name):
    """Blocks with the largest code, as those of a quantised weight have."""
    w1, w2 = layer_weights(2, 64, 96)
    first = mb.quantize_experts(w1, w2, name)
    decoded = [np.ascontiguousarray(mb.dequantize(weight).swapaxes(1, 2)) for weight in first]
    for again, weight in zip(mb.quantize_experts(*decoded, name), first, strict=True):
        np.testing.assert_array_equal(bits(mb.dequantize(again)), bits(mb.dequantize(weight)))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    w1, w2 = layer_weights(2, 64, 96)
    dtypes = {"mxfp4": torch.uint8, "nf4": torch.uint8, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    for name, dtype in dtypes.items():
        made = mb.quantize_experts(torch.from_numpy(w1).requires_grad_(), torch.from_numpy(w2), name)
        want = mb.quantize_experts(w1, w2, name)
        for weight, of_numpy in zip(made, want, strict=True):
            assert weight.data.dtype == dtype and not weight.data.requires_grad
            np.testing.assert_array_equal(weight.data.view(torch.uint8).numpy(), of_numpy.data.view(np.uint8))
            got = mb.dequantize(weight._replace(dtype="bfloat16"))
            assert got.dtype == torch.bfloat16
            want_bits = bits(mb.dequantize(of_numpy._replace(dtype="bfloat16")))
            np.testing.assert_array_equal(got.view(torch.int16).numpy().view(np.uint16), want_bits)
    if hasattr(torch, "float8_e8m0fnu"):
        weight = mb.quantize_experts(torch.from_numpy(w1), torch.from_numpy(w2), "mxfp4")[0]
        as_e8m0 = weight._replace(scales=weight.scales.view(torch.float8_e8m0fnu))
        assert torch.equal(mb.dequantize(as_e8m0), mb.dequantize(weight))


def bad_calls():
    w1, w2 = layer_weights(2, 64, 96)
    weight, good = mb.quantize_experts(w1, w2, "mxfp4")[0], mb.quantize_experts
    nan = w1.copy()
    nan[1, 2, 3] = np.nan
    scales = weight.scales
    return [
        (
            good,
            (w1, w2, "nvfp4"),
            ValueError,
            "quantize_experts: format: expected one of 'mxfp4', 'nf4', 'e4m3', 'int8'",
        ),
        (good, ((w1, w1), w2, "nf4"), TypeError, "quantize_experts: w1: expected one array (E, d, 2h)"),
        (
            good,
            (w1[:, :, :90], w2, "nf4"),
            ValueError,
            "quantize_experts: w1: expected shape (2, 64, 96) or (2, 64, 192)",
        ),
        (
            good,
            (w1.astype(np.float16), w2, "nf4"),
            TypeError,
            "quantize_experts: w1: expected dtype bfloat16 or float32",
        ),
        (
            good,
            (w1[:0], w2[:0], "nf4"),
            ValueError,
            "quantize_experts: w2: expected shape (E, h, d) with sizes of at least 1, got (0, 96, 64)",
        ),
        (good, (nan, w2, "int8"), ValueError, "quantize_experts: w1: expected finite weights, got infinities or NaN"),
        (
            good,
            (w1[:, :40], w2[:, :, :40], "mxfp4"),
            ValueError,
            "quantize_experts: w1.shape: expected (E, K, N) with K that is a multiple of 32 for 'mxfp4', got (2, 40",
        ),
        (mb.dequantize, (w1,), TypeError, "dequantize: weight: expected QuantizedWeight, got"),
        (
            mb.dequantize,
            (weight._replace(scales=scales[:, :5]),),
            ValueError,
            "dequantize: weight.scales: expected shape (E, N, K / 32) = (2, 192, 2), got (2, 5, 2)",
        ),
        (
            mb.dequantize,
            (weight._replace(scales=scales.astype(np.float32)),),
            TypeError,
            "dequantize: weight.scales: expected dtype uint8 or float8_e8m0fnu, got float32",
        ),
        (
            mb.dequantize,
            (weight._replace(block=(128, 128)),),
            ValueError,
            "dequantize: weight.block: expected (rows, columns) for 'e4m3', else None, got (128, 128) for 'mxfp4'",
        ),
        (
            mb.dequantize,
            (weight._replace(nested=NestedScales(1, 2, 3)),),
            TypeError,
            "dequantize: weight.nested.code: expected a NumPy, CuPy or torch array",
        ),
        (
            mb.dequantize,
            (weight._replace(data=np.asfortranarray(weight.data)),),
            ValueError,
            "dequantize: weight.data: expected a C-contiguous array",
        ),
        (
            mb.dequantize,
            (random_weight("e4m3", (1, 64, 8), (8, 8))._replace(block=(8, 12)),),
            ValueError,
            "dequantize: weight.block: expected (rows, columns), columns being a multiple of 8 or all K, got (8, 12)",
        ),
    ]


@pytest.mark.parametrize("number", range(len(bad_calls())))
def test_messages(number):
    function, arguments, error, message = bad_calls()[number]
    with pytest.raises(error) as caught:
        function(*arguments)
    assert str(caught.value).startswith(message), str(caught.value)
