"""The kernels that decode, on the emulator and on a GPU: bit for bit what NumPy decodes."""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.quantised import config as quantised_config
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import WEIGHT_FORMATS, QuantizedWeight
from tests.cuda.test_compile import DISASSEMBLER, instructions
from tests.layer.test_device_code import emulated
from tests.quantised.cases import every_code, random_weight

NAMES = (*WEIGHT_FORMATS, "mxfp8", "nested")
# E, K, N; a block has 16,384 elements: whole blocks and a rest; most of a block missing; whole ones alone.
SHAPES = {"rest": (2, 64, 256 + 8), "small": (3, 32, 2), "whole": (1, 256, 128)}


def assert_same_bits(got, weight):
    want = reference.dequantize(weight)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


def on_device(device, weight):
    nested = weight.nested and weight.nested._make(map(device.put, weight.nested))
    return weight._replace(data=device.put(weight.data), scales=device.put(weight.scales), nested=nested)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_and_scale(name):
    weight = every_code(name)
    with emulated(seed=1) as device:
        got = mb.dequantize(on_device(device, weight))
        device.synchronize()
    assert_same_bits(got, weight)


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "nested"])
def test_shapes(name, size):
    shape = SHAPES[size]
    weight = random_weight(name, shape, {"mxfp8": (1, 32), "e4m3": (24, 40)}.get(name))
    with emulated() as device:
        got = mb.dequantize(on_device(device, weight))
        device.synchronize()
    assert got.shape == (shape[0], shape[2], shape[1])
    assert_same_bits(got, weight)


@pytest.mark.parametrize("block", [(128, 128), (3, 8), (1, 168), (77, 168), (5, 1000), (50, 48)])
def test_blocks_of_e4m3(block):
    weight = random_weight("e4m3", (2, 168, 77), block)
    with emulated() as device:
        got = mb.dequantize(on_device(device, weight))
        device.synchronize()
    assert_same_bits(got, weight)


def test_experts_without_tokens_are_left_out():
    weight = random_weight("mxfp4", (5, 64, 24))
    with emulated() as device:
        packed, out = on_device(device, weight), device.allocate((5, 24, 64), ml_dtypes.bfloat16)
        offsets = device.put(np.int32([0, 0, 3, 3, 10, 10]))
        pointers = [packed.data.data.ptr, packed.scales.data.ptr, 0, 0, 0, offsets.data.ptr, out.data.ptr]
        Runtime.current(arrays.CuPy, 0).launch(decode.step(weight, "uint8"), *pointers)
        device.synchronize()
    want = reference.dequantize(weight)
    for expert, has_tokens in enumerate([False, True, False, True, False]):
        if has_tokens:
            np.testing.assert_array_equal(out[expert].view(np.uint16), want[expert].view(np.uint16))
        else:
            assert (out[expert].view(np.uint16) == 0xFFFF).all()  # as it was


def test_quotients_are_exact():
    """For divisors of all sizes, around their multiples."""
    for number in (1, 2, 3, 5, 7, 8, 40, 64, 128, 2880, 2881, 5760, 7168, 2**20 - 1, 2**20, 2**30 + 1, 2**31 - 1):
        of = decode.divisor("K", number)
        factor, shift = of["K_factor"] % 2**32, of["K_shift"]
        assert -(2**31) <= of["K_factor"] < 2**31
        for multiple in {0, 1, 2, 1000, (2**31 - 1) // number}:
            for i in range(multiple * number - 2, multiple * number + 3):
                if 0 <= i < 2**31:
                    assert i * factor >> shift == i // number


def test_a_weight_on_another_place_than_a_multiple_of_16():
    weight = random_weight("int8", (1, 64, 8))
    with emulated() as device:
        packed = weight._replace(data=device.put(weight.data, offset=8), scales=device.put(weight.scales))
        with pytest.raises(ValueError, match=r"dequantize: weight.data: expected 16-byte aligned memory, got 0x"):
            mb.dequantize(packed)
        with pytest.raises(ValueError, match=r"weight.dtype: expected one of 'bfloat16', got 'float32'"):
            mb.dequantize(on_device(device, weight)._replace(dtype="float32"))


@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_machine_code_keeps_denormals_and_stores_16_bytes(arch, tmp_path):
    for variant in [variant for form in WEIGHT_FORMATS for variant in decode.variants(form)]:
        opcodes = instructions(variant, arch, tmp_path)
        assert not [opcode for opcode in opcodes if opcode == "FMUL.FTZ" or opcode.startswith(("LDL", "STL"))], (
            variant.name
        )
        stores = [opcode for opcode in opcodes if opcode.startswith("STG")]
        assert (
            set(stores) == {"STG.E.128"} and len(stores) == 2 * quantised_config.DECODE_STEPS
        )  # of whole blocks and others
        if variant.macros[0] == ("FORMAT", "Mxfp4"):  # a block's code and that of the rest
            assert opcodes.count("PRMT") == 2 * 10 * quantised_config.DECODE_STEPS and len(opcodes) < 800


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_gpu(name):
    cupy = pytest.importorskip("cupy")
    for weight in (every_code(name), random_weight(name, (3, 2880, 1024))):
        nested = weight.nested and weight.nested._make(map(cupy.asarray, weight.nested))
        packed = QuantizedWeight(
            cupy.asarray(weight.data), cupy.asarray(weight.scales), *weight[2:5], nested, weight.dtype
        )
        assert_same_bits(cupy.asnumpy(mb.dequantize(packed)), weight)
