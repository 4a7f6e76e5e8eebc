"""save="fp8": what is kept of the first layer in e4m3, and the gradients from it, on the reference and on the emulated
kernels of both tiers.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.reference import fp8
from moeblaze_cupy.types import GRADIENTS, pair
from tests.layer import test_device_code as portable
from tests.layer.test_device_code import DTYPES
from tests.layer.test_device_experts import TIERS, on
from tests.layer.test_layer import on_gpu, to_float64
from tests.oracle import make_problem

# Activation, memory order, order of gate and up, h: groups of 128 columns that are full, and last ones that are not. No
# activation with limits: the portable kernels round a number at a limit to the other side of it.
LAYERS = [
    ("swiglu", "row", "halves", 136),
    ("swiglu_softcap", "transposed", "interleaved", 264),
    ("gelu", "row", "halves", 328),
]

# Activation, order of gate and up, dtype, arrays, sizes, tier: panels, clusters, rows that go to tokens, odd sizes.
SMALL = (700, 4, 6, 264, 136)
ON_GPU = [
    ("swiglu", "halves", "bfloat16", "cupy", SMALL, "sm90"),
    ("swiglu", "halves", "bfloat16", "torch", (600, 2, 3, 4104, 72), "sm90"),
    ("swiglu", "halves", "bfloat16", "cupy", (700, 1, 6, 520, 264), "sm90"),
    ("swiglu_softcap", "interleaved", "bfloat16", "torch", SMALL, "sm90"),
    ("gelu", "halves", "float16", "cupy", SMALL, "sm90"),
    ("swiglu", "halves", "bfloat16", "cupy", (300, 3, 5, 301, 157), "sm80"),
    ("swiglu", "halves", "float32", "cupy", SMALL, "sm80"),
]


def parts(saved):
    """(R, halves, h) as float64 numbers, and the scales (R, groups, halves)."""
    h, R = saved.w2.shape[1], saved.index.num_rows
    halves = 2 if isinstance(saved.w1, tuple) or saved.w1.shape[2] == 2 * h else 1
    place, buffer = launch_config.saved_fp8(R, h, halves), np.asarray(saved.first_layer)
    values = buffer[: R * h * halves].view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(R, -1)
    by_half = (
        values.reshape(R, h, halves).swapaxes(1, 2)
        if saved.options.gate_up == "interleaved"
        else values.reshape(R, halves, h)
    )
    return by_half, buffer[place.scales :].view(np.float32).reshape(R, place.groups, halves)


def kept_by_minimal(problem):
    _, saved = reference.moe_forward(**problem.arrays(), **problem.options)
    return saved


def halves_of(saved):
    """(R, halves, h) of a first layer that is kept as it is."""
    R, h = saved.index.num_rows, saved.w2.shape[1]
    both = np.asarray(saved.first_layer).astype(np.float64)
    return both.reshape(R, h, -1).swapaxes(1, 2) if saved.options.gate_up == "interleaved" else both.reshape(R, -1, h)


def test_the_reference_keeps_the_nearest_numbers():
    problem = make_problem("swiglu", DTYPES["bfloat16"], sizes=(40, 2, 5, 40, 136))
    _, saved = reference.moe_forward(**problem.arrays(), **problem.options, save="fp8")
    exact = halves_of(kept_by_minimal(problem))
    stored, scales = parts(saved)
    assert saved.first_layer.dtype == np.uint8 and saved.nbytes == saved.index.nbytes + saved.first_layer.size
    for first in (0, 128):
        group, scale = exact[:, :, first : first + 128], scales[:, first // 128, :, None].astype(np.float64)
        amax = np.abs(group).max(axis=2, keepdims=True)
        np.testing.assert_array_equal(scale, np.where(amax == 0, 1, (amax.astype(np.float32) / np.float32(448))))
        error = np.abs(stored[:, :, first : first + 128] * scale - group)
        assert (error <= np.maximum(np.abs(group) * (2**-4 + 2**-20), scale * 2**-10)).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "order", "gate_up", "h"), LAYERS)
def test_layer(name, order, gate_up, h, tier):
    """Gradients of the reference from the very bytes that the kernels kept; these are near the exact values."""
    problem = make_problem(name, DTYPES["bfloat16"], sizes=(40, 2, 5, 40, h), order=order, gate_up=gate_up)
    with on(tier, seed=1) as device:
        arrays = {key: device.put(value) for key, value in problem.arrays().items()}
        out, saved = mb.moe_forward(**arrays, **problem.options, save="fp8")
        device.synchronize()
        rows = int(saved.index.expert_token_offsets[-1])
        stored, scales = parts(saved)
        grads = {n: g for n, g in vars(mb.moe_backward(device.put(problem.grad_out), saved)).items() if g is not None}
        again = mb.moe_backward(device.put(problem.grad_out), saved)  # nothing was overwritten
        minimal = mb.moe_forward(**arrays, **problem.options)[0] if name == "swiglu" else out
        device.synchronize()
        fp8 = [v for _, v in loader._kernels if dict(v.macros).get("FP8_SAVED") == "1"]
        assert len(fp8) == (2 if tier == "sm90" else 0)
    assert not portable.differences({"out": out}, {"out": minimal})
    assert not portable.differences(grads, vars(again))
    exact = halves_of(kept_by_minimal(problem))[:rows]
    by_column = np.repeat(scales[:rows].swapaxes(1, 2), 128, axis=2)[:, :, :h].astype(np.float64)
    error = np.abs(stored[:rows] * by_column - exact)
    assert (error <= np.maximum(np.abs(exact) * (2**-4 + 2**-8), by_column * 2**-9)).all()
    amax = np.stack([np.abs(exact[:, :, c : c + 128]).max(axis=2) for c in range(0, h, 128)], axis=1)
    np.testing.assert_allclose(scales[:rows], np.where(amax == 0, 1, amax / 448), rtol=2**-8)
    _, on_host = reference.moe_forward(**problem.arrays(), **problem.options, save="fp8")
    of_kernels = dataclasses.replace(on_host, first_layer=np.array(saved.first_layer))
    want = vars(reference.moe_backward(problem.grad_out, of_kernels))
    for key, got in grads.items():
        for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want[key])), strict=True):
            a, b = np.asarray(a).astype(np.float64), b.astype(np.float64)
            assert np.linalg.norm(a - b) <= 1.5 * 2**-8 * np.linalg.norm(b), key


SPECIAL = [
    ("swiglu", "halves", "bfloat16"),
    ("swiglu_softcap", "interleaved", "bfloat16"),
    ("gelu", "halves", "float16"),
]


@pytest.mark.parametrize(("name", "gate_up", "dtype"), SPECIAL)
def test_hopper_keeps_the_recipe_of_the_numbers_that_minimal_keeps(name, gate_up, dtype):
    """Bit for bit, with zeros, infinities and NaNs in all columns of a row or in single ones."""
    problem = make_problem(name, DTYPES[dtype], sizes=(20, 2, 2, 40, 136), gate_up=gate_up, bias=None)
    x, w1 = problem.x, problem.w1
    x[0], x[1], x[2, 5], x[3] = 0, np.nan, np.nan, np.asarray(x[3], np.float32) * 2.0**-20
    x[4:10, 7], w1[0, 7, 30] = 8, 3e38 if dtype == "bfloat16" else 6e4  # products that are infinite
    w1[0, :, 3], w1[0, :, 9] = np.nan, -np.nan
    with on("sm90", seed=1) as device:
        arrays = {key: device.put(value) for key, value in problem.arrays().items()}
        saved = [mb.moe_forward(**arrays, **problem.options, save=save)[1] for save in ("minimal", "fp8")]
        device.synchronize()
        rows = int(saved[0].index.expert_token_offsets[-1])
        plain, kept = (np.array(s.first_layer) for s in saved)
    h, halves = 136, plain.shape[1] // 136
    of_all, of_rows = (launch_config.saved_fp8(n, h, halves) for n in (len(plain), rows))
    want = fp8.save_first_layer(plain[:rows], h, gate_up == "interleaved")
    np.testing.assert_array_equal(kept[: plain[:rows].size], want[: plain[:rows].size])
    scales = kept[of_all.scales :].view(np.float32)[: rows * of_rows.groups * halves]
    np.testing.assert_array_equal(scales, want[of_rows.scales :].view(np.float32))
    assert np.isinf(scales).any() and (scales == 1).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "gate_up", "dtype", "xp_name", "sizes", "tier"), ON_GPU)
def test_layer_on_the_gpu(name, gate_up, dtype, xp_name, sizes, tier, monkeypatch):
    """Gradients as the reference has them from the kept bytes."""
    monkeypatch.setenv("MOEBLAZE_TIER", tier)
    loader._device_limits.cache_clear()
    runtime.forget()
    problem = make_problem(name, DTYPES[dtype], sizes=sizes, gate_up=gate_up, bias=None)
    given = {key: on_gpu(xp_name, value) for key, value in problem.arrays().items()}
    out, saved = mb.moe_forward(**given, **problem.options, save="fp8")
    minimal, _ = mb.moe_forward(**given, **problem.options)
    assert (to_float64(out) == to_float64(minimal)).all()
    grads = vars(mb.moe_backward(on_gpu(xp_name, problem.grad_out), saved))
    again = vars(mb.moe_backward(on_gpu(xp_name, problem.grad_out), saved))
    _, on_host = reference.moe_forward(**problem.arrays(), **problem.options, save="fp8")
    kept = to_float64(saved.first_layer).astype(np.uint8)
    # The products' sums are in another order, so a few elements are rounded to the next number.
    rows = int(on_host.index.expert_token_offsets[-1]) * sum(w.shape[2] for w in pair(problem.w1))
    assert (kept[:rows] != on_host.first_layer[:rows]).mean() < 0.05
    want = vars(reference.moe_backward(problem.grad_out, dataclasses.replace(on_host, first_layer=kept)))
    tolerance = {"bfloat16": 1.5 * 2**-8, "float16": 1.5 * 2**-11, "float32": 1e-5}[dtype]
    for key in GRADIENTS:
        got = grads[key]
        for a, b, c in zip(pair(got), pair(want[key]), pair(again[key]), strict=True):
            a, b = to_float64(a), b.astype(np.float64)
            assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), key
            assert (a == to_float64(c)).all()
    loader._device_limits.cache_clear()
    runtime.forget()
