"""Rows and weights in e4m3: the reference against numbers worked out here, the kernels against it, bit by bit."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.fp8.api import FIELDS
from moeblaze_cupy.reference.fp8 import from_e4m3, to_e4m3
from tests.cases import in_order
from tests.layer.test_device_code import DTYPES, MARGIN, emulated

# Largest magnitudes: a power of two and just above, e4m3's largest, a denormal, below the clamp, near overflow.
SPECIAL = [0.0, 1.0, 1.0078125, 448.0, 450.0, 2.0**-133, 2.0**-120, 2.0**-100, 1e38, np.inf, np.nan]


def e4m3_values():
    """All magnitudes, by the format's definition."""
    return [bits / 512 if bits < 8 else (1 + (bits & 7) / 8) * 2.0 ** ((bits >> 3) - 7) for bits in range(0x7F)]


def test_e4m3_is_the_nearest_number_and_ties_go_to_even():
    values = e4m3_values()
    np.testing.assert_array_equal(from_e4m3(np.arange(0x7F, dtype=np.uint8)), np.float32(values))
    for bits, (low, high) in enumerate(pairwise(values)):
        middle = np.float32((low + high) / 2)
        got = to_e4m3(np.float32([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(999))]))
        assert got.tolist() == [bits + bits % 2, bits, bits + 1]
    assert to_e4m3(np.float32([449, 1e30, -500, np.nan, -np.nan])).tolist() == [0x7E, 0x7E, 0xFE, 0x7F, 0x7F]


def rows_of(L, d, dtype, seed=0):
    """Random rows; the first ones have the SPECIAL values among others that are smaller, or alone."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((L, d))
    for row, special in enumerate(SPECIAL[: L - 1]):
        rows[row] *= np.where(np.isfinite(special), special, 1) / np.abs(rows[row]).max()
        rows[row, d * row // L] = special
    with np.errstate(over="ignore"):
        return rows.astype(dtype)


def test_the_reference_of_rows():
    rows = rows_of(13, 144, np.float32)
    stored, scales = reference.fp8.quantize(rows, axis=1)
    back = from_e4m3(stored) * scales
    finite = np.isfinite(rows).all(axis=1)
    amax = np.abs(rows).max(axis=1, keepdims=True)
    error = np.abs(back - rows)[finite]
    normal = finite & (amax[:, 0] >= 2.0**-100)
    assert (
        np.abs(back - rows)[normal] <= np.maximum(np.abs(rows[normal]) / 16 * 1.0001, scales[normal] * 2.0**-9)
    ).all()
    assert (error <= 2.0**-100).any() and np.isnan(back[9]).all() and np.isnan(back[10]).sum() == 1
    assert scales[0] == 1 and not (stored[0] & 0x7F).any() and scales[6] == np.float32(2.0**-100) / np.float32(448)
    assert from_e4m3(stored[normal]).max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("L", "d", "offset"), [(20, 144, 0), (14, 24, 0), (13, 31, 0), (13, 40, 1), (13, 8200, 0), (3, 40000, 0)]
)
def test_rows(dtype, L, d, offset):
    """With several rows to a block, several warps to a row, more than fits in registers; odd sizes and addresses."""
    if d > 1000 and dtype != "bfloat16":
        return
    rows = rows_of(L, d, DTYPES[dtype])
    with emulated(seed=1) as device:
        given = device.put(rows, offset)
        out, scales = device.allocate((L, d), np.uint8, MARGIN), device.allocate((L,), np.float32, MARGIN)

        launch = quantize.rows(arrays.CuPy.describe(given).layout)
        Runtime.current(arrays.CuPy, 0).launch(launch, given.data.ptr, out.data.ptr, scales.data.ptr)
        device.synchronize()
    stored, want = reference.fp8.quantize(rows, axis=1)
    np.testing.assert_array_equal(np.asarray(scales), want[:, 0])
    np.testing.assert_array_equal(np.asarray(out), stored)


# E, d, h; form and memory order of w1; order of gate and up.
WEIGHTS = [
    (3, 144, 48, "row", "halves", "bfloat16"),
    (2, 48, 144, "transposed", "halves", "float16"),
    (2, 48, 144, "row", "interleaved", "bfloat16"),
    (2, 48, 80, "transposed", "interleaved", "float32"),
    (2, 16, 144, "pair", "halves", "bfloat16"),
    (2, 144, 16, "pair_transposed", "halves", "bfloat16"),
    (2, 144, 272, "plain", "halves", "bfloat16"),
    (2, 144, 272, "plain_transposed", "halves", "float16"),
]


def weights_of(E, d, h, order, dtype, special=True, seed=0):
    rng = np.random.default_rng(seed)
    w1 = rng.standard_normal((E, d, h if order.startswith("plain") else 2 * h))
    w2 = rng.standard_normal((E, h, d)) * 1e-3
    if special:
        w1[1, d // 2, 3], w2[0, h - 1, d - 1] = np.nan, 448
    w2[1] = 0
    w1, w2, transposed = w1.astype(dtype), w2.astype(dtype), order.endswith("transposed")
    if order.startswith("pair"):
        return tuple(in_order(half, transposed) for half in np.split(w1, 2, axis=2)), in_order(w2, transposed)
    return in_order(w1, transposed), in_order(w2, transposed)


def assert_same(got, want):
    for name in FIELDS:
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), getattr(want, name), err_msg=name)
    assert got.gate_up == want.gate_up


@pytest.mark.parametrize(("E", "d", "h", "order", "gate_up", "dtype"), WEIGHTS)
def test_weights(E, d, h, order, gate_up, dtype):
    w1, w2 = weights_of(E, d, h, order, DTYPES[dtype])
    want = reference.quantize_weights(w1, w2, gate_up)
    others = weights_of(E, d, h, order, DTYPES[dtype], special=False, seed=1)
    with emulated(seed=1) as device:
        given = device.put(w1), device.put(w2)
        made = mb.quantize_weights(*device.put(others), gate_up=gate_up)
        device.synchronize()
        assert not np.isnan(from_e4m3(np.asarray(made.w1))).any()
        allocated = len(device.allocations)
        again = mb.quantize_weights(*given, out=made, gate_up=gate_up)
        assert again is made and len(device.allocations) == allocated
        device.synchronize()
    assert_same(again, want)


def test_unaligned_weights():
    w1, w2 = weights_of(2, 48, 80, "row", DTYPES["bfloat16"])
    with emulated() as device:
        made = mb.quantize_weights(device.put(w1, offset=1), device.put(w2, offset=3))
        device.synchronize()
    assert_same(made, reference.quantize_weights(w1, w2))


@pytest.mark.parametrize(("E", "d", "h", "order", "gate_up", "dtype"), WEIGHTS)
def test_the_reference_of_weights(E, d, h, order, gate_up, dtype):
    w1, w2 = weights_of(E, d, h, order, DTYPES[dtype])
    made = mb.quantize_weights(w1, w2, gate_up=gate_up)
    whole = np.concatenate(w1, axis=2) if isinstance(w1, tuple) else w1
    halves = made.w1_scales.shape[1]
    of_column = np.arange(whole.shape[2]) % 2 if gate_up == "interleaved" else np.arange(whole.shape[2]) // h
    assert halves == (1 if order.startswith("plain") else 2) and made.nbytes > 2 * whole.size
    for got, exact, scales in (
        (made.w1, whole, made.w1_scales[:, of_column][:, None]),
        (made.w2, w2, made.w2_scales[:, None]),
    ):
        exact = exact.astype(np.float64)
        back, present = from_e4m3(got) * scales, np.isfinite(exact)
        assert (np.isnan(back) == ~present).all()
        error = np.abs(back - exact)[present]
        assert (error <= np.maximum(np.abs(exact) / 16 * 1.0001, scales * 2.0**-9)[present]).all()
    np.testing.assert_array_equal(made.w1_transposed, made.w1.swapaxes(1, 2))
    np.testing.assert_array_equal(made.w2_transposed, made.w2.swapaxes(1, 2))


def test_torch_tensors_hold_e4m3():
    w1, w2 = weights_of(2, 32, 48, "row", np.float32)
    made = mb.quantize_weights(torch.from_numpy(w1).requires_grad_(), torch.from_numpy(w2))
    assert made.w1.dtype == made.w2_transposed.dtype == torch.float8_e4m3fn and not made.w1.requires_grad
    want = reference.quantize_weights(w1, w2)
    as_bytes = {name: getattr(made, name) for name in FIELDS}
    as_bytes = {n: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for n, t in as_bytes.items()}
    assert_same(dataclasses.replace(made, **as_bytes), want)
    np.testing.assert_array_equal(made.w1.float().numpy(), from_e4m3(want.w1))
    pointer = made.w1.data_ptr()
    assert mb.quantize_weights(torch.from_numpy(2 * w1), torch.from_numpy(w2), made) is made
    assert made.w1.data_ptr() == pointer and made.w1_scales[0, 0] == 2 * want.w1_scales[0, 0]


def bad_calls():
    w1, w2 = weights_of(2, 32, 48, "row", np.float32)
    made = mb.quantize_weights(w1, w2)
    other = mb.quantize_weights(*weights_of(2, 32, 16, "row", np.float32))
    return [
        ((w1, w2[0]), {}, ValueError, "w2: expected shape (E, h, d) = (any, any, any), got (48, 32)"),
        ((w1[:, :, :90], w2), {}, ValueError, "w1: expected shape (2, 32, 48) or (2, 32, 96), as w2 is"),
        (
            (w1[:, :20], w2[:, :, :20]),
            {},
            ValueError,
            "w2: expected d and h that are multiples of 16, got (d, h) = (20, 48)",
        ),
        ((w1.astype(np.float16), w2), {}, TypeError, "w1: expected dtype float32, got float16"),
        (((w1 > 0).astype(np.int32), w2.astype(np.int32)), {}, TypeError, "w1: expected dtype bfloat16 or float16"),
        ((w1, w2), {"gate_up": "both"}, ValueError, "gate_up: expected one of 'halves', 'interleaved', got 'both'"),
        (
            (w2.swapaxes(1, 2), w2),
            {"gate_up": "interleaved"},
            ValueError,
            "gate_up: expected 'halves' but for one array",
        ),
        ((w1, w2), {"out": w1}, TypeError, "out: expected Fp8Weights from quantize_weights, or None, got"),
        ((w1, w2), {"out": other}, ValueError, "out.w1: expected shape (2, 32, 96), got (2, 32, 32)"),
        (
            (w1, w2),
            {"out": made, "gate_up": "interleaved"},
            ValueError,
            "out.gate_up: expected 'interleaved', got 'halves'",
        ),
        (
            (w1, w2),
            {"out": dataclasses.replace(made, amax=None)},
            TypeError,
            "out.amax: expected a NumPy, CuPy or torch",
        ),
        ((None, w2), {}, TypeError, "w1: expected a NumPy, CuPy or torch array"),
    ]


@pytest.mark.parametrize("number", range(len(bad_calls())))
def test_messages(number):
    arguments, options, error, message = bad_calls()[number]
    with pytest.raises(error) as caught:
        mb.quantize_weights(*arguments, **options)
    assert str(caught.value).startswith("quantize_weights: " + message), str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("order", "gate_up"), [("row", "halves"), ("transposed", "interleaved"), ("pair", "halves")])
def test_weights_on_the_gpu(order, gate_up, dtype):
    """Bit by bit; into the same memory again from a CUDA graph."""
    cupy = pytest.importorskip("cupy")
    w1, w2 = weights_of(3, 272, 400, order, DTYPES[dtype])
    others = weights_of(3, 272, 400, order, DTYPES[dtype], special=False, seed=1)
    to = lambda w: tuple(map(cupy.asarray, w)) if isinstance(w, tuple) else cupy.asarray(w)  # noqa: E731
    given, first = [to(w) for w in (w1, w2)], [to(w) for w in others]
    made = mb.quantize_weights(*first, gate_up=gate_up)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        mb.quantize_weights(*given, out=made, gate_up=gate_up)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    on_host = dataclasses.replace(made, **{name: cupy.asnumpy(getattr(made, name)) for name in FIELDS})
    assert_same(on_host, reference.quantize_weights(w1, w2, gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "d"), [(300, 1024), (300, 7168), (50, 272), (20, 40000)])
def test_rows_on_the_gpu(L, d):
    cupy = pytest.importorskip("cupy")

    rows = rows_of(L, d, DTYPES["bfloat16"])
    given, out, scales = cupy.asarray(rows), cupy.empty((L, d), "uint8"), cupy.empty((L,), "float32")
    run = Runtime.current(arrays.CuPy, 0)
    run.launch(quantize.rows(arrays.CuPy.describe(given).layout), given.data.ptr, out.data.ptr, scales.data.ptr)
    stored, want = reference.fp8.quantize(rows, axis=1)
    np.testing.assert_array_equal(scales.get(), want[:, 0])
    np.testing.assert_array_equal(out.get(), stored)
