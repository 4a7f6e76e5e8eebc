"""The kernels that quantise, on the emulator and on a GPU: bit for bit what NumPy makes."""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.quantised import encode
from moeblaze_cupy.types import WEIGHT_FORMATS
from tests.cases import in_order
from tests.cuda.test_compile import DISASSEMBLER, instructions
from tests.layer.test_device_code import emulated
from tests.quantised.cases import bits

BF16 = ml_dtypes.bfloat16


def weights_of(E, d, h, transposed=False, gated=True):
    """Of many magnitudes, with zeros, denormals, an outlier, and numbers half way between two codes."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.standard_normal((E, d, (1 + gated) * h)), rng.standard_t(2, (E, h, d))
    w1 *= np.exp2(rng.integers(-140, 100, (E, d, 1)))
    w1[0, :, 0], w1[0, : d // 2, 1] = 0, 1e-39
    w1[1, 0, 5], w1[1, :, 6] = 3e38, rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 4, -0.0], d)
    w2[0, 0, :] = 1e-40
    return tuple(in_order(w.astype(BF16), transposed) for w in (w1, w2))


def assert_same(got, want):
    for weight, of_numpy in zip(got, want, strict=True):
        assert weight.format == of_numpy.format and weight.shape == of_numpy.shape and weight.block == of_numpy.block
        np.testing.assert_array_equal(np.asarray(weight.data).view(np.uint8), of_numpy.data.view(np.uint8))
        scales, of_scales = np.asarray(weight.scales), of_numpy.scales
        np.testing.assert_array_equal(scales.view(f"u{scales.itemsize}"), of_scales.view(f"u{scales.itemsize}"))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("d", "h", "gated"), [(64, 96, True), (160, 32, False)])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_on_the_emulator(name, d, h, gated, transposed):
    given = weights_of(2, d, h, transposed, gated)
    with emulated(seed=1) as device:
        got = mb.quantize_experts(*map(device.put, given), name)
        decoded = [mb.dequantize(weight) for weight in got]
        device.synchronize()
    want = mb.quantize_experts(*given, name)
    assert_same(got, want)
    for array, weight in zip(decoded, want, strict=True):
        np.testing.assert_array_equal(bits(np.asarray(array)), bits(mb.dequantize(weight)))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_weights_that_are_not_finite_decode_to_nan(name):
    w1, w2 = weights_of(2, 64, 64)
    w1[0, 3, 2], w1[1, 5, 4] = np.nan, np.inf
    with emulated() as device:
        made, _ = mb.quantize_experts(device.put(w1), device.put(w2), name)
        decoded = mb.dequantize(made)
        device.synchronize()
    found = np.isnan(np.asarray(decoded).astype(np.float32))
    assert found[0, 2, 3] and found[1, 4, 5] and not found[0, 40:].any()


def test_float32_is_for_the_cpu():
    with emulated() as device:
        w1, w2 = (device.put(w.astype(np.float32)) for w in weights_of(2, 64, 64))
        with pytest.raises(
            TypeError, match="quantize_experts: w2: expected bfloat16, to which CUDA decodes, got float32"
        ):
            mb.quantize_experts(w1, w2, "nf4")


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_on_the_gpu(name, transposed):
    cupy = pytest.importorskip("cupy")
    given = weights_of(3, 1024, 768, transposed)
    got = mb.quantize_experts(*map(cupy.asarray, given), name)
    got = [weight._replace(data=weight.data.get(), scales=weight.scales.get()) for weight in got]
    assert_same(got, mb.quantize_experts(*given, name))


@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
def test_machine_code_keeps_denormals(tmp_path):
    """But for e4m3's factors, which are quotients of normal numbers."""
    for variant in map(encode.variant, ("mxfp4", "nf4", "int8")):
        assert "FMUL.FTZ" not in instructions(variant, "90a", tmp_path), variant.name
