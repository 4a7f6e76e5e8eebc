"""Activations with constants, biases and interleaved gates on a GPU, against torch's float64 autograd on the CPU.

Run once with MOEBLAZE_TIER=sm90 and once with sm80 on a Hopper GPU, as test_layer.py.
"""

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.types import is_gated
from tests.layer.test_layer import DTYPES, on_gpu, same_bits, to_float64
from tests.oracle import LIMITED, WITHOUT_CONSTANTS, expected, make_problem, mismatches

pytestmark = pytest.mark.gpu

SIZES = (301, 3, 5, 136, 264)  # L, k, E, d, h: several tiles of rows, of columns and of depth, none of them full
ODD = (301, 3, 5, 131, 267)
NAMES = (*LIMITED, *WITHOUT_CONSTANTS)
GEMM = "grouped_gemm_sm90.cu"


def run(problem, save="minimal", xp_name="cupy", **options):
    given = {name: on_gpu(xp_name, value) for name, value in problem.arrays().items()}
    out, saved = mb.moe_forward(**given, **problem.options, save=save)
    gradients = vars(mb.moe_backward(on_gpu(xp_name, problem.grad_out), saved, **options))
    return {"out": out} | {name: value for name, value in gradients.items() if value is not None}


def assert_right(problem, **options):
    got = run(problem, **options)
    want = expected(problem)
    assert set(got) == set(want)
    assert not mismatches({name: to_float64(value) for name, value in got.items()}, want, problem.x.dtype)
    for name in {"w1", "w2", "b1", "b2"} & set(got):
        for part in got[name] if isinstance(got[name], tuple) else (got[name],):
            assert not to_float64(part[1]).any()  # expert 1 has no rows
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("name", NAMES)
def test_layer(name, order, dtype):
    """Gate and up alternate in one memory order and are halves in the other; biases in the weights' dtype or fp32."""
    gate_up = "interleaved" if is_gated(name) and (order == "row") == (NAMES.index(name) % 2 == 0) else "halves"
    bias = "dtype" if NAMES.index(name) % 3 else np.float32
    assert_right(make_problem(name, DTYPES[dtype], sizes=SIZES, order=order, gate_up=gate_up, bias=bias))


@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_odd_sizes(dtype, gate_up):
    assert_right(make_problem("swiglu_oai", DTYPES[dtype], sizes=ODD, gate_up=gate_up))


@pytest.mark.parametrize("order", ["pair", "pair_transposed"])
def test_pairs(order):
    assert_right(make_problem("swiglu_clamp", DTYPES["bfloat16"], sizes=SIZES, order=order), xp_name="torch")


TO_TOKENS, TWO_PANELS, CLUSTERS = (1500, 1, 3, 1032, 520), (4100, 4, 3, 1032, 520), (600, 2, 3, 4104, 72)


@pytest.mark.parametrize("sizes", [TO_TOKENS, TWO_PANELS, CLUSTERS], ids=["to_tokens", "two_panels", "clusters"])
def test_gpt_oss_in_small(sizes):
    """All at once, by the ways that Hopper's products take for these sizes."""
    problem = make_problem("swiglu_oai", DTYPES["bfloat16"], sizes=sizes, gate_up="interleaved")
    got = assert_right(problem)
    assert same_bits(got, run(problem))
    assert same_bits(got, run(problem, save="recompute"))
    assert_right(problem, save="paper")


@pytest.mark.skipif(os.environ.get("MOEBLAZE_TIER") == "sm80", reason="the portable tier has no square tiles")
@pytest.mark.parametrize(("order", "save"), [("row", "minimal"), ("transposed", "recompute")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_square_tiles_have_the_bits_of_others(monkeypatch, order, save, dtype):
    """Experts have many tiles of 192 rows, or less than one; a row of the product has ragged tiles in two panels."""
    sizes = (4100, 4, 40, 2760, 1384)
    problem = make_problem("swiglu_oai", DTYPES[dtype], sizes=sizes, order=order, gate_up="interleaved")
    problem.ids[problem.ids > 8] %= 8
    problem.ids[::900] = 39
    results = []
    for square in (False, True):
        monkeypatch.setattr(gemm_config, "square_product", lambda *_, square=square: (square, ""))
        runtime.forget()
        results.append(run(problem, save))
        squares = {v.entry for _, v in loader._kernels if dict(v.macros).get("BM") == "192" and v.source == GEMM}
        assert not square or squares == {"up_fwd", "down_fwd", "up_bwd"}
    runtime.forget()
    assert same_bits(*results)


def test_nan_in_an_unused_experts_biases_and_other_constants():
    problem = make_problem("swiglu_oai", DTYPES["bfloat16"], sizes=SIZES, gate_up="interleaved")
    want = run(problem)
    compiled = set(loader._kernels)
    other = run(replace(problem, activation=mb.Activation("swiglu_oai", limit=2.0)))
    assert set(loader._kernels) == compiled and not same_bits(want["b1"], other["b1"])
    problem.b1[1] = problem.b2[1] = ml_dtypes.bfloat16(np.nan)
    assert same_bits(want, run(problem))


def test_gradients_of_biases_accumulate():
    problem = make_problem("swiglu_clamp", DTYPES["bfloat16"], sizes=SIZES, order="pair", bias=np.float32)
    want = run(problem)
    ones = {"b1": tuple(np.ones_like(b) for b in problem.b1), "b2": np.ones_like(problem.b2)}
    totals = {name: on_gpu("cupy", value) for name, value in ones.items()}
    run(problem, needs=("b1", "b2"), accumulate=totals)
    for total, gradient in zip((*totals["b1"], totals["b2"]), (*want["b1"], want["b2"]), strict=True):
        np.testing.assert_allclose(to_float64(total), 1 + to_float64(gradient), rtol=1e-5, atol=1e-5)
