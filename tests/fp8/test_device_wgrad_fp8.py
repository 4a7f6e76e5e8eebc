"""Weight gradients of e4m3 on the emulator, each by itself.

The oracle quantises the routed operand by the recipe, and sums its products with the gathered one in float64.
"""

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.fp8 import wgrad
from moeblaze_cupy.frameworks import CuPy
from moeblaze_cupy.gemm.products import Weight
from tests.cases import Case, make_inputs, relative_error
from tests.fp8.test_device_fp8 import Routed, assert_near, host
from tests.layer.test_device_code import MARGIN, emulated, in_float64
from tests.layer.test_device_code_sm90 import ONE_CLUSTER

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
# Columns of either side end within a tile, those of the routed one within a group of 128.
L, k, E, d, h = 700, 2, 5, 144, 320


def inputs(halves, seed=0):
    """ids, e4m3 with scales, bf16 rows, and the tokens and experts of these."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((L, k), np.int32)  # expert 0 has more rows than the producer looks up at once
    ids[:, 1] = rng.integers(1, 4, L)  # expert 4 has none
    ids[ids == 3] = 2
    ids[:100:9, 1] = 3  # and expert 3 fewer than a k-step
    ids[::9, 0] = -1
    x = np.clip(rng.standard_normal((L, d)) * 100, -448, 448).astype(E4M3)
    scales = (np.exp(rng.standard_normal(L) * 2) / 100).astype(np.float32)
    scales[5], x[5] = 0, 0  # of a row of zeros
    rows = (rng.standard_normal((L * k, halves * h)) * np.exp(rng.standard_normal((L * k, 1)))).astype(BF16)
    routed = Routed(ids)
    rows[routed.count :] = np.nan  # no slot's
    return ids, x, scales, rows, routed.tokens, routed.experts


def in_groups(values, halves):
    """(n, halves * h) as n rows of each half's groups of 128 columns, with zeros past a half's last column."""
    padded = np.zeros((len(values), halves, wgrad.groups(h, 1) * launch_config.GROUP_COLUMNS), values.dtype)
    padded[:, :, :h] = values.reshape(-1, halves, h)
    return padded.reshape(len(values), wgrad.groups(h, halves), -1)


def expected(halves, made, entry):
    """The largest magnitudes (E, groups), and the gradient in float64."""
    _, x, scales, rows, tokens, experts = made
    amax, out = np.zeros((E, wgrad.groups(h, halves)), np.float32), np.zeros((E, d, halves * h))
    gathered = in_float64(x)
    for e in range(E - 1):
        mine = np.flatnonzero(experts == e)
        routed = in_groups(rows[mine].astype(np.float32) * scales[tokens[mine], None], halves)
        amax[e] = reference.fp8.amax_over(routed, axis=(0, 2))[0, :, 0]
        stored, scale = reference.fp8.quantize(routed, axis=(0, 2))
        values = (in_float64(reference.fp8.from_e4m3(stored)) * scale).reshape(len(mine), halves, -1)[:, :, :h]
        out[e] = gathered[tokens[mine]].T @ values.reshape(len(mine), -1)
    return amax, out if entry == "up_wgrad" else out.swapaxes(1, 2)


def run(made, amax, entry, halves, order, total=None, **options):
    ids, x, scales, rows, *_ = made
    shape = (E, d, halves * h) if entry == "up_wgrad" else (E, h, d)
    with emulated(ONE_CLUSTER, tier="sm90", **options) as device:
        dtype = BF16 if total is None else np.float32
        stored = shape if order == "row" else (shape[0], shape[2], shape[1])
        out = device.allocate(stored, dtype, MARGIN)
        view = np.asarray(out) if order == "row" else np.asarray(out).swapaxes(1, 2)
        if total is not None:
            view[...] = total
        overwritten = device.allocate(rows.shape, BF16, MARGIN)
        np.asarray(overwritten)[...] = rows
        arrays = [device.put(a.view(np.uint8) if a.dtype == E4M3 else a) for a in (ids, x, scales, amax)]
        ids, x, scales, amax, rows = (CuPy().describe(a) for a in (*arrays, overwritten))
        runtime = Runtime.current(CuPy(), 0)
        steps = dispatch.configure(ids.layout, E, loader.device_limits(0))
        _lists, _copy, lists = dispatch.dispatch(runtime, steps, ids.ptr)
        described = CuPy().describe(out if order == "row" else out.swapaxes(1, 2))
        gradient = Weight.of((described.layout,), h if halves == 2 else None)
        sizes = steps.index, loader.device_limits(0), entry, d, h, halves, gradient
        step = wgrad.configure(*sizes, total is not None)
        routed, halves_of = (rows.ptr, amax.ptr), gradient.halves(described.ptr)
        wgrad.wgrad(runtime, step, lists, (x.ptr, scales.ptr), routed, halves_of)
        device.synchronize()
        return np.array(view)


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize(("entry", "halves"), [("up_wgrad", 2), ("down_wgrad", 1)])
def test_wgrad(entry, halves, order):
    made = inputs(halves)
    amax, want = expected(halves, made, entry)
    for total in (None, np.ones_like(want, np.float32)):
        got = in_float64(run(made, amax, entry, halves, order, total, seed=3)) - (0 if total is None else total)
        # a rounding to bf16, or of a float32 sum with 1; sums of e4m3 are all but exact
        tolerance = 2**-8 if total is None else 1e-5
        for e in range(E - 1):
            assert np.linalg.norm(got[e] - want[e]) <= tolerance * np.linalg.norm(want[e])
        assert not got[E - 1].any()


LAYERS = {
    "transposed": (Case(L=300, k=2, E=3, d=144, h=192, order="transposed"), {}),
    "row": (Case(L=300, k=2, E=4, d=144, h=64), {"save": "recompute"}),
    "pair": (Case(L=150, k=1, E=3, d=272, h=128, order="pair", routing="absent"), {"save": "fp8"}),
    "plain": (Case(L=60, k=2, E=5, d=144, h=320, activation="silu", routing="empty_experts"), {"save": "paper"}),
    "beside": (Case(L=150, k=2, E=3, d=256, h=128), {}),
    "input": (Case(L=150, k=2, E=3, d=144, h=192), {"weights_on": "input", "save": "paper"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """Against the reference of the recipe. Tokens whose gradient is 0, and tiny gradients, do not disturb others."""
    case, options = LAYERS[name]
    options = {"activation": case.activation, "precision": "fp8", "fp8_wgrad": True} | options
    made = make_inputs(case, 0, BF16)
    made[0][3], made[5][5:40] = 0, 0
    made[5][...] = (in_float64(made[5]) * 2.0**-20).astype(BF16)
    out, saved = reference.moe_forward(*made[:5], **options)
    want = {"out": out, **vars(reference.moe_backward(made[5], saved))}
    exact = vars(reference.moe_backward(made[5], reference.moe_forward(*made[:5], activation=case.activation)[1]))
    with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
        *layer, grad_out = (device.put(array) for array in made)
        got, saved = mb.moe_forward(*layer, **options)
        found = {"out": got, **vars(mb.moe_backward(grad_out, saved))}
        device.synchronize()
        assert_near(found, want)
        entries = {variant.source: variant for _, variant in loader._kernels}
        assert "grouped_wgrad_fp8_sm90.cu" in entries and "grouped_wgrad_sm90.cu" not in entries
    if name != "input":
        for key in ("w1", "w2"):
            error = relative_error(host(want[key]), host(exact[key]))
            assert 0.05 < error < 0.08, (key, error)
