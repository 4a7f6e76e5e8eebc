"""Rows that are in e4m3 before the layer sees them: kernels that read those of other GPUs, and the layer.

A rank quantises its tokens once, and others read them. The layer then has the results of bf16 rows but for the
gradients of weights, which are those of the numbers that e4m3 and scale stand for.
"""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.fp8 import rows as fp8_rows
from moeblaze_cupy.rows import api as mb_rows
from moeblaze_cupy.rows import config as rows_config
from moeblaze_cupy.rows import pull
from moeblaze_cupy.types import Fp8Rows
from tests.cases import Case
from tests.cases import make_inputs as make_layer_inputs
from tests.fp8.test_device_fp8 import LAYERS, host
from tests.fp8.test_quantize import rows_of
from tests.layer.test_device_code import MARGIN, emulated
from tests.layer.test_device_code_sm90 import ONE_CLUSTER
from tests.layer_calls import backward_into, forward_into
from tests.rows.test_device_code_pull import Peers

BF16 = ml_dtypes.bfloat16


def quantised(rows):
    return Fp8Rows(*reference.fp8.quantize_rows(rows))


def rounded(rows):
    return reference.fp8.dequantize(*quantised(rows), rows.dtype)


@pytest.mark.parametrize(("L", "d"), [(20, 144), (14, 16), (13, 688), (13, 8208), (3, 40000)])
def test_rows_come_back_in_bf16(L, d):
    """Several rows to a block, several warps to a row; a last vector that few threads have; NaN and infinities."""
    stored = quantised(rows_of(L, d, BF16))
    with emulated(seed=1) as device:
        values, scales = device.put(stored.values), device.put(stored.scales)
        out = device.allocate((L, d), BF16, MARGIN)
        launch = quantize.dequantize_rows(arrays.CuPy.describe(values).layout)
        Runtime.current(arrays.CuPy, 0).launch(launch, values.data.ptr, scales.data.ptr, out.data.ptr)
        device.synchronize()
    want = reference.fp8.dequantize(*stored, BF16)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), want.astype(np.float32))
    assert quantize.dequantize_rows(arrays.Layout((0, d), (d, 1), "uint8", 0)) is None


def test_rows_in_bf16_give_the_same_e4m3_again():
    """So that a layer of rounded rows is the oracle of one that is given e4m3.

    A row with an infinity is all NaN, and one below 2^-110 all 0, whatever the scale.
    """
    rows = rows_of(20, 144, BF16)
    first, again = quantised(rows), quantised(rounded(rows))
    infinite = np.isinf(rows.astype(np.float32)).any(axis=1)
    assert infinite.any() and np.isnan(rounded(rows)[infinite].astype(np.float32)).all()
    np.testing.assert_array_equal(first.values[~infinite], again.values[~infinite])
    told = ~infinite & (first.values & 0x7F).any(axis=1)
    np.testing.assert_array_equal(first.scales[told], again.scales[told])
    assert told.sum() >= len(rows) - 4


@pytest.mark.parametrize("d", [16, 48, 5136])
def test_rows_of_peers(d):
    """A rank writes its own e4m3 to where others read; rows that are not needed keep what they have, and scales too."""
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((40, d)).astype(BF16) for _ in range(3)]
    needed = rng.random(120) < 0.7
    with emulated() as device:
        made = [Fp8Rows(device.allocate((40, d), np.uint8), device.allocate((40,), np.float32)) for _ in rows]
        for of_rank, into in zip(rows, made, strict=True):
            fp8_rows.quantize_rows(device.put(of_rank), into)
        device.synchronize()
        peers = Peers(device, [np.asarray(m.values) for m in made], [np.asarray(m.scales) for m in made])
        out = Fp8Rows(device.allocate((120, d), np.uint8), device.allocate((120,), np.float32))
        np.asarray(out.values)[:] = 0x55
        mb_rows.pull_scaled_rows(*peers.arrays, device.put(needed), out)
        device.synchronize()
    want = quantised(np.concatenate(rows))
    np.testing.assert_array_equal(np.asarray(out.values), np.where(needed[:, None], want.values, 0x55))
    np.testing.assert_array_equal(np.asarray(out.scales), np.where(needed, want.scales, np.nan))


def test_launches():
    far = 5 << 32
    rows = pull.pull_scaled_rows(2, 100_000, 4096, far, far + 64)
    assert rows.grid == (rows_config.PULL_BLOCKS,) and pull.pull_scaled_rows(2, 9999, 512, 0, 64).grid == (512,)
    assert pull.pull_scaled_rows(2, 9, 16, 0, 64).grid == (2,)
    assert rows.scalars["pieces"] == 4096 // 16 and rows.scalars["scales_offset"] == far + 64
    with emulated() as device:
        empty = Fp8Rows(device.allocate((0, 16), np.uint8), device.allocate((0,), np.float32))
        peers = Peers(device, [np.zeros((0, 16), np.uint8)] * 2, [np.zeros(0, np.float32)] * 2)
        mb_rows.pull_scaled_rows(*peers.arrays, device.allocate((0,), np.bool_), empty)
        fp8_rows.quantize_rows(device.allocate((0, 16), BF16), empty)
        device.synchronize()
        assert device.launched == []


def in_halves(into, x, ids, weights, w1, w2, grad_out, options):
    """out and gradients by name, by the calls of a layer on many GPUs."""
    out, saved = forward_into(into, x, ids, weights, w1, w2, precision="fp8", **options)
    of_all = ("x", "weights", "w1", "w2"), False, None, True
    grads, pending = backward_into(None, "moe_backward_data", grad_out, saved, *of_all)
    made = mb.moe_backward_weights(pending)
    return {"out": out, "x": grads.x, "weights": grads.weights, "w1": made.w1, "w2": made.w2}


def as_expected(found, plain, of_rounded):
    """Bit for bit: gradients of weights are those of rounded rows, and the rest of both."""
    for name, array in found.items():
        for want in (plain, of_rounded) if name in ("out", "x", "weights") else (of_rounded,):
            np.testing.assert_array_equal(array, want[name], err_msg=name)


@pytest.mark.parametrize(("number", "save"), [(0, "minimal"), (1, "recompute"), (2, "fp8")])
def test_layer(number, save):
    case = LAYERS[number]
    inputs = make_layer_inputs(case, 0, BF16)
    options, results = {"activation": case.activation, "save": save}, []
    for convert in (lambda rows: rows, rounded, quantised):
        with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
            x, *others, grad_out = inputs

            def put(rows, device=device):
                return Fp8Rows(*map(device.put, rows)) if isinstance(rows, Fp8Rows) else device.put(rows)

            x, grad_out = put(convert(x)), put(convert(grad_out))
            found = in_halves(None, x, *map(device.put, others), grad_out, options)
            device.synchronize()
            results.append({name: host(array) for name, array in found.items()})
            entries = [name.partition("_bfloat16")[0] for name in device.launched]
    plain, of_rounded, found = results
    as_expected(found, plain, of_rounded)
    assert entries.count("dequantize_rows") == 2 and "quantize_rows" not in entries
    assert not np.array_equal(plain["w1"], found["w1"]) and not np.array_equal(plain["w2"], found["w2"])


@pytest.mark.parametrize(("save", "width"), [("minimal", 128), ("recompute", 144)])
def test_layer_whose_weight_gradients_multiply_e4m3(save, width):
    """It reads the rows as they are, so all results have the bits of bf16 rows; those of zeros disturb no others.

    With 128 columns and bf16 rows x becomes e4m3 in memory that the gradients of a and b leave free.
    """
    case = Case(L=150, k=2, E=3, d=width, h=128, routing="absent")
    inputs, results = make_layer_inputs(case, 0, BF16), []
    inputs[0][3], inputs[-1][5:40] = 0, 0
    options = {"precision": "fp8", "fp8_wgrad": True, "save": save}
    for convert in (lambda rows: rows, quantised):
        with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
            x, *others, grad_out = inputs
            x, grad_out = (
                Fp8Rows(*map(device.put, of)) if isinstance(of, Fp8Rows) else device.put(of)
                for of in (convert(x), convert(grad_out))
            )
            out, saved = forward_into(None, x, *map(device.put, others), **options)
            grads, _ = backward_into(None, "moe_backward", grad_out, saved, None, False, None)
            device.synchronize()
            results.append(
                {name: host(array) for name, array in {"out": out, **vars(grads)}.items() if array is not None}
            )
            entries = [name.partition("_bfloat16")[0] for name in device.launched]
    assert results[0].keys() == {"out", "x", "weights", "w1", "w2"}
    for name, array in results[0].items():
        assert array.any()
        np.testing.assert_array_equal(array, results[1][name], err_msg=name)
    assert not {"dequantize_rows", "quantize_rows"} & set(entries)


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_rows_that_arrive(precision):
    """No kernel reads rows or scales before the stream has waited for them, and dispatch runs beside their copies."""
    inputs = make_layer_inputs(LAYERS[0], 0, BF16)
    results, launched = [], []
    for late in (False, True):
        with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
            x, *others, grad_out = inputs
            others = [device.put(array) for array in others]

            def arriving(rows, device=device, late=late):
                whole = tuple(quantised(rows)) if precision else (rows,)
                arrays = [device.allocate(part.shape, part.dtype) for part in whole]

                def come():
                    for array, part in zip(arrays, whole, strict=True):
                        np.asarray(array)[:] = part

                def wait():
                    device.synchronize()  # what has been launched does not read these rows
                    launched.append(list(device.launched))
                    come()

                for array in arrays:
                    np.asarray(array).view(np.uint8)[:] = 0xFF  # NaN in each of the dtypes
                if not late:
                    come()
                made = Fp8Rows(*arrays) if precision else arrays[0]
                return (made, wait) if late else (made, None)

            rows, comes = arriving(x)
            out, saved = forward_into(None, rows, *others, precision=precision, wait=comes)
            device.synchronize()
            rows, comes = arriving(grad_out)
            of_all = ("x", "weights", "w1", "w2"), False, None, True, comes
            grads, pending = backward_into(None, "moe_backward_data", rows, saved, *of_all)
            made = mb.moe_backward_weights(pending)
            device.synchronize()
            found = {"out": out, "x": grads.x, "weights": grads.weights, "w1": made.w1, "w2": made.w2}
            results.append({name: host(array) for name, array in found.items()})
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name], err_msg=name)
    assert len(launched) == 2 and not {"up_fwd", "quantize_rows_bfloat16"} & set(launched[0])
    assert not any(name.startswith("down_bwd") for name in launched[1])
    assert any(name.startswith("dispatch") for name in launched[0])


SMALL = Case(L=37, k=2, E=4, d=48, h=32, routing="absent")


def test_layer_on_the_cpu():
    torch = pytest.importorskip("torch")
    inputs, options = make_layer_inputs(SMALL, 0, BF16), {"save": "minimal"}
    for to in (lambda array: array, arrays.Torch.from_numpy):

        def put(rows, to=to):
            return Fp8Rows(*map(to, rows)) if isinstance(rows, Fp8Rows) else to(rows)

        results = []
        for convert in (lambda rows: rows, rounded, quantised):
            x, *others, grad_out = inputs
            found = in_halves(None, put(convert(x)), *map(to, others), put(convert(grad_out)), options)
            results.append({name: host(a.float().numpy() if torch.is_tensor(a) else a) for name, a in found.items()})
        plain, of_rounded, found = results
        as_expected(found, plain, of_rounded)


def in_e4m3(rows):
    """Tensors on a GPU."""
    out = Fp8Rows(rows.byte(), rows[:, 0].float())
    fp8_rows.quantize_rows(rows, out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "recompute", "fp8"])
def test_layer_on_a_gpu(save, on_hopper):
    """The same claims on large tiles, and the kernels of rows against the reference, NaN and infinities too."""
    torch = pytest.importorskip("torch")
    inputs = make_layer_inputs(Case(L=8192, k=2, E=8, d=1024, h=512, routing="absent"), 0, np.float32)
    x, ids, weights, w1, w2, grad_out = (torch.from_numpy(array).cuda() for array in inputs)
    x, w1, w2, grad_out = (tensor.bfloat16() for tensor in (x, w1, w2, grad_out))
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf

    def back(rows):
        made = in_e4m3(rows)
        host = (arrays.Torch.to_numpy(part.cpu()) for part in made)
        return arrays.Torch.from_numpy(reference.fp8.dequantize(*host, BF16)).cuda()

    stored = quantised(arrays.Torch.to_numpy(x.cpu()))
    for part, want in zip(in_e4m3(x), stored, strict=True):
        np.testing.assert_array_equal(part.cpu().numpy(), want)
    results = []
    for convert in (lambda rows: rows, back, in_e4m3):
        found = in_halves(None, convert(x), ids, weights, w1, w2, convert(grad_out), {"save": save})
        results.append({name: value.float().nan_to_num(7) for name, value in found.items()})
    plain, of_rounded, found = results
    for name, array in found.items():
        assert torch.equal(array, of_rounded[name]), name
        assert torch.equal(array, plain[name]) == (name in ("out", "x", "weights")), name


@pytest.mark.gpu
@pytest.mark.parametrize("h", [512, 576])
def test_weight_gradients_in_e4m3_on_a_gpu(h, on_hopper):
    """All results have the bits of bf16 rows. With the first width x in bf16 becomes e4m3 beside other rows."""
    torch = pytest.importorskip("torch")
    inputs = make_layer_inputs(Case(L=8192, k=2, E=8, d=1024, h=h, routing="absent"), 0, np.float32)
    x, ids, weights, w1, w2, grad_out = (torch.from_numpy(array).cuda() for array in inputs)
    x, w1, w2, grad_out = (tensor.bfloat16() for tensor in (x, w1, w2, grad_out))
    x[::5], grad_out[::7] = 0, 0
    results = []
    for rows, grads in ((x, grad_out), map(in_e4m3, (x, grad_out))):
        out, saved = forward_into(None, rows, ids, weights, w1, w2, precision="fp8", fp8_wgrad=True)
        made, _ = backward_into(None, "moe_backward", grads, saved, None, False, None)
        results.append({"out": out, "x": made.x, "weights": made.weights, "w1": made.w1, "w2": made.w2})
    for name, want in results[0].items():
        assert want.any() and torch.equal(results[1][name], want), name


def test_quantized_rows_on_the_cpu():
    torch = pytest.importorskip("torch")
    rows = rows_of(13, 144, BF16)
    out = Fp8Rows(torch.empty(13, 144, dtype=torch.uint8), torch.empty(13))
    fp8_rows.quantize_rows(arrays.Torch.from_numpy(rows), out)
    np.testing.assert_array_equal(out.values.numpy(), quantised(rows).values)
    np.testing.assert_array_equal(out.scales.numpy(), quantised(rows).scales)


def test_messages():
    rows = np.zeros((4, 32), BF16)
    values, scales = np.zeros((4, 32), np.uint8), np.ones(4, np.float32)
    for wrong, text in (
        ((values[:3], scales), r"quantize_rows: out\.values: expected shape"),
        ((values, scales[:3]), r"quantize_rows: out\.scales: expected shape"),
        ((rows, scales), r"quantize_rows: out\.values: expected dtype uint8"),
        ((values, values[:, 0].copy()), r"quantize_rows: out\.scales: expected dtype float32"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            fp8_rows.quantize_rows(rows, Fp8Rows(*wrong))
    x, *others, grad_out = make_layer_inputs(SMALL, 0, BF16)
    with pytest.raises(TypeError, match=r"moe_forward: x: expected dtype"):  # bytes without scales
        forward_into(None, quantised(x).values, *others, precision="fp8")
    with pytest.raises(ValueError, match=r"moe_forward: x\.scales: expected shape"):
        forward_into(None, Fp8Rows(quantised(x).values, scales), *others, precision="fp8")
    with pytest.raises(ValueError, match=r"moe_forward: x: expected bf16 rows without precision='fp8'"):
        forward_into(None, quantised(x), *others)
    _, saved = forward_into(None, quantised(x), *others, precision="fp8")
    with pytest.raises(ValueError, match="moe_backward: needs: expected 'x' and 'weights' alone"):
        backward_into(None, "moe_backward", quantised(grad_out), saved, None, False, None)
    with emulated() as device:
        peers = Peers(device, [np.zeros((4, 24), np.uint8)] * 2, [np.zeros(4, np.float32)] * 2)
        needed = device.put(np.ones(8, np.bool_))
        narrow = Fp8Rows(device.allocate((8, 24), np.uint8), device.allocate((8,), np.float32))
        with pytest.raises(ValueError, match=r"pull_scaled_rows: out\.values: expected columns in multiples of 16"):
            mb_rows.pull_scaled_rows(*peers.arrays, needed, narrow)
