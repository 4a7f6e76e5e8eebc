"""mxfp4 as e4m3 with powers of two: the kernels bit for bit what NumPy decodes, and these near the exact numbers."""

import ml_dtypes
import numpy as np
import pytest

from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import QuantizedWeight
from tests.layer.test_device_code import emulated
from tests.quantised.cases import every_code, in_float64, random_weight
from tests.quantised.test_decode import on_device

E4M3 = ml_dtypes.float8_e4m3fn
# E, K, N: parts of tiles and chunks; several of them; two groups that meet within a tile and within a chunk.
SHAPES = [(3, 32, 64), (2, 288, 192), (1, 544, 320)]


def values_of(stored, scales):
    """(E, N, K) in float64."""
    groups, rows = scales.shape[1], stored.shape[1]
    of_row = np.repeat(scales.astype(np.float64), rows // groups, axis=1)
    return stored.view(E4M3).astype(np.float64) * of_row[:, :, None]


def assert_within_the_bound(weight, groups):
    """Exact for blocks at most 14 below the group's top, else to 2^-10 of the scale. NaN where a scale is 255."""
    stored, scales = reference.mxfp4_as_e4m3(weight, groups)
    exact, got = in_float64(weight), values_of(stored, scales)
    E, K, N = weight.shape
    blocks = weight.scales.astype(int).reshape(E, groups, -1)
    top = np.maximum(np.where(blocks == 255, 0, blocks).max(axis=2), 7)
    np.testing.assert_array_equal(scales, 2.0 ** (top - 133))
    bytes_of = np.repeat(weight.scales.astype(int), 32, axis=2).reshape(E, groups, N // groups, K)
    is_exact = ((bytes_of >= top[:, :, None, None] - 14) & (bytes_of < 255)).reshape(E, N, K)
    assert is_exact.any()
    np.testing.assert_array_equal(got[is_exact], exact[is_exact])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact) | np.isnan(exact) & np.signbit(got))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    numbers = ~np.isnan(exact)
    unit = np.repeat(scales.astype(np.float64), N // groups, axis=1)[:, :, None]
    assert (np.abs(got - exact)[numbers] <= (unit * 2.0**-10 * np.ones_like(exact))[numbers]).all()
    return is_exact


def test_every_code_and_scale():
    """An expert that has all scales has 15 exact ones; and each scale is the largest of some expert."""
    assert_within_the_bound(every_code("mxfp4"), 1)
    codes = np.arange(256, dtype=np.uint8).repeat(4)  # both nibbles; 32 bytes are two blocks
    data = np.broadcast_to(codes.reshape(1, 32, 32), (256, 32, 32)).copy()
    scales = np.maximum(np.arange(256)[:, None, None] - np.arange(64).reshape(1, 32, 2) % 15, 0).astype(np.uint8)
    assert assert_within_the_bound(QuantizedWeight(data, scales, "mxfp4", (256, 64, 32)), 1)[:255].all()


@pytest.mark.parametrize("spread", [14, 15, 20, 40, 200])
def test_blocks_far_below_the_largest_are_rounded(spread):
    weight = random_weight("mxfp4", (2, 128, 64))
    scales = np.random.default_rng(0).integers(250 - spread, 251, weight.scales.shape, dtype=np.uint8)
    scales[:, ::32] = 250
    is_exact = assert_within_the_bound(weight._replace(scales=scales), 2)
    assert is_exact.all() == (spread == 14)


def decoded(device, weight, groups, scales_ld, transposed, offsets=None):
    """What the kernels make; memory that they leave has all bits set."""
    E, K, N = weight.shape
    packed = on_device(device, weight)
    tops = device.allocate((decode.tops_bytes(E, groups),), np.uint8)
    out, scales = (
        device.allocate((E, K, N) if transposed else (E, N, K), np.uint8),
        device.allocate((E, scales_ld), np.float32),
    )
    offsets = None if offsets is None else device.put(np.int32(offsets))
    run = Runtime.current(arrays.CuPy, 0)
    for launch in decode.steps_e4m3(weight.shape, groups, scales_ld, transposed):
        parts = packed.data.data.ptr, packed.scales.data.ptr
        run.launch(
            launch, *parts, tops.data.ptr, 0 if offsets is None else offsets.data.ptr, out.data.ptr, scales.data.ptr
        )
    device.synchronize()
    return np.array(out), np.array(scales)


def assert_same(found, weight, groups, scales_ld, transposed, experts=slice(None)):
    stored, scales = reference.mxfp4_as_e4m3(weight, groups)
    want = stored.swapaxes(1, 2) if transposed else stored
    np.testing.assert_array_equal(found[0][experts], want[experts])
    of_groups = np.broadcast_to(scales, (len(scales), scales_ld)) if groups == 1 else scales
    np.testing.assert_array_equal(found[1][experts], of_groups[experts])


@pytest.mark.parametrize("transposed", [False, True])
def test_every_code_and_scale_on_the_emulator(transposed):
    weight = every_code("mxfp4")
    with emulated(seed=1) as device:
        assert_same(decoded(device, weight, 2, 2, transposed), weight, 2, 2, transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "scales_ld"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, groups, scales_ld, transposed):
    weight = random_weight("mxfp4", shape)
    weight.scales[:, shape[2] // 2 :] += 20  # the groups' scales differ
    with emulated() as device:
        assert_same(decoded(device, weight, groups, scales_ld, transposed), weight, groups, scales_ld, transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_without_tokens_are_left_out(transposed):
    weight = random_weight("mxfp4", (5, 64, 32))
    with emulated() as device:
        found = decoded(device, weight, 2, 2, transposed, [0, 0, 3, 3, 10, 10])
    assert_same(found, weight, 2, 2, transposed, [1, 3])
    for expert in (0, 2, 4):
        assert (found[0][expert] == 0xFF).all() and np.isnan(found[1][expert]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [None, *SHAPES, (4, 2880, 5760)], ids=str)
def test_on_the_gpu(shape, transposed):
    """None: all codes and scales."""
    cupy = pytest.importorskip("cupy")
    weight = every_code("mxfp4") if shape is None else random_weight("mxfp4", shape)
    E, K, N = weight.shape
    packed = weight._replace(data=cupy.asarray(weight.data), scales=cupy.asarray(weight.scales))
    tops, scales = cupy.empty(decode.tops_bytes(E, 2), cupy.uint8), cupy.empty((E, 2), cupy.float32)
    out = cupy.empty((E, K, N) if transposed else (E, N, K), cupy.uint8)
    run = Runtime.current(arrays.CuPy, 0)
    for launch in decode.steps_e4m3(weight.shape, 2, 2, transposed):
        run.launch(
            launch, packed.data.data.ptr, packed.scales.data.ptr, tops.data.ptr, 0, out.data.ptr, scales.data.ptr
        )
    assert_same((cupy.asnumpy(out), cupy.asnumpy(scales)), weight, 2, 2, transposed)
