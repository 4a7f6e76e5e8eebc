"""Low-rank factors on both tiers without a GPU: the layer on the emulator, against W + scale * B A in float64."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.lora import config as lora_config
from tests.cases import Case, relative_error
from tests.layer.test_device_code import DEEP_STAGES, OUTLIER, emulated, in_float64
from tests.layer.test_device_code_sm90 import choose_schedule
from tests.lora.lora_cases import NAMES, by_name, exact, problem
from tests.quantised.cases import random_weight
from tests.quantised.test_decode import on_device

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# Relative norms, as of test_device_code.py. u and v are one more value that is rounded on the way to each result.
TOLERANCES = {"bfloat16": 1.5 * 2**-8, "float16": 1.5 * 2**-11, "float32": 2e-6}
HOPPER = DeviceLimits(90, 2, 232448, 233472)
# Two experts of 190 rows, the others without any; a last tile of rows, of columns and of K that is not full.
RAGGED = Case(L=190, k=2, E=5, d=344, h=136, routing="empty_experts")
SMALL = Case(L=150, k=2, E=3, d=72, h=136, routing="absent")
ODD = Case(L=150, k=2, E=3, d=71, h=45, routing="absent")


def on(tier):
    return emulated(HOPPER if tier == "sm90" else DEEP_STAGES, tier=tier)


def put(device, array):
    """A factor in its memory order, whichever it is."""
    if array is None:
        return None
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return (
        device.put(np.ascontiguousarray(array.transpose(order)).reshape(-1))
        .reshape([array.shape[i] for i in order])
        .transpose(np.argsort(order))
    )


def run(device, inputs, lora, *, needs=("x", "weights", "w1", "w2", "lora"), keep_saved=False, **options):
    x, ids, weights, w1, w2, grad_out = (None if a is None else device.put(a) for a in inputs)
    options |= {n: device.put(options[n]) for n in ("b1", "b2", "token_offsets") if n in options}
    factors = mb.Lora(*(put(device, factor) for factor in lora.factors), lora.scale1, lora.scale2)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=factors, **options)
    if saved is None:
        device.synchronize()
        return {"out": out}
    needs = (*needs, *(n for n in ("b1", "b2") if n in options))
    grads = mb.moe_backward(grad_out, saved, needs=needs, keep_saved=keep_saved)
    device.synchronize()
    return by_name(out, grads)


def assert_right(got, inputs, lora, save="minimal", **options):
    want, dtype = exact(inputs, lora, **options), inputs[0].dtype.name
    tolerance = 2**-4 if save == "fp8" else TOLERANCES[dtype]  # e4m3 has 4 bits
    for name, values in got.items():
        values, wanted = np.asarray(in_float64(values)), np.asarray(want[name])
        assert relative_error(values, wanted) <= tolerance, name
        scale = np.abs(wanted) + np.linalg.norm(wanted) / np.sqrt(max(wanted.size, 1))
        assert (np.abs(values - wanted) <= OUTLIER * tolerance * scale).all(), name
    return want


def check(tier, inputs, lora, **options):
    with on(tier) as device:
        got = run(device, inputs, lora, **options)
        of_products = [v for _, v in loader._kernels if v.source.startswith("grouped_gemm")]
        assert of_products and all(v.source.endswith(f"_{tier}.cu") for v in of_products)
    given = {name: value for name, value in options.items() if name not in ("save", "needs", "keep_saved")}
    assert_right(got, inputs, lora, options.get("save", "minimal"), **given)
    for name in NAMES:
        if f"lora.{name}" in got:
            assert got[f"lora.{name}"].dtype == getattr(lora, name).dtype
    return got


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("rank", [1, 8, 16, 17, 64, 128])
def test_ranks(tier, rank):
    inputs, lora = problem(SMALL, (rank, rank), DTYPES["bfloat16"], factor_dtype=np.float32)
    check(tier, inputs, lora)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("order", ["row", "transposed", "pair", "pair_transposed", "interleaved"])
def test_orders(tier, order):
    """Experts without rows get zeros; factors as peft's lie, and such that are read in place."""
    case = replace(RAGGED, order="row" if order == "interleaved" else order)
    options = {"gate_up": "interleaved"} if order == "interleaved" else {}
    of_factors = {"strided": True} if order != "row" else {}
    inputs, lora = problem(case, (16, 24), DTYPES["bfloat16"], order=order, **of_factors)
    got = check(tier, inputs, lora, **options)
    assert not any(np.any(in_float64(got[f"lora.{name}"])[::2]) for name in NAMES)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("ranks", [(16, 24), (8, 80)])
def test_orders_of_factors_change_no_bit(tier, ranks):
    """Along columns, rows and experts, each with 16-byte accesses."""
    inputs, lora = problem(replace(SMALL, E=8), ranks, DTYPES["bfloat16"], factor_dtype=np.float32)
    first = None
    for order in itertools.permutations(range(3)):
        factors = (np.ascontiguousarray(f.transpose(order)).transpose(np.argsort(order)) for f in lora.factors)
        with on(tier) as device:
            got = run(device, inputs, lora.with_factors(factors))
            packs = [dict(v.macros)["VECTOR"] for _, v in loader._kernels if v.entry == "lora_pack"]
        assert packs == ["1"]
        if first is None:
            first = got
            assert_right(got, inputs, lora)
        assert all(np.asarray(got[n]).tobytes() == np.asarray(first[n]).tobytes() for n in first)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", ["paper", "recompute", "fp8", None])
def test_policies(tier, save):
    for weights_on in ("output", "input"):
        inputs, lora = problem(SMALL, (16, 16), DTYPES["float16"], shared=True)
        check(tier, inputs, lora, save=save, weights_on=weights_on)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_sizes_of_any_multiple(dtype, save):
    inputs, lora = problem(ODD, (5, 33), DTYPES[dtype])
    check("sm80", inputs, lora, save=save)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("ranks", [(16, None), (None, 16)])
def test_one_pair(tier, ranks):
    for activation in ("swiglu", "gelu"):
        inputs, lora = problem(replace(SMALL, activation=activation), ranks, DTYPES["bfloat16"])
        for save in ("minimal", "recompute"):
            check(tier, inputs, lora, activation=activation, save=save)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_slots(tier):
    inputs, lora = problem(SMALL, (16, 16), DTYPES["bfloat16"])
    x, ids, _, w1, w2, _ = inputs
    rng = np.random.default_rng(0)
    check(tier, inputs, lora, max_slots=120)
    biases = {
        "b1": rng.standard_normal((3, 272)).astype(x.dtype),
        "b2": rng.standard_normal((3, 72)).astype(np.float32),
    }
    check(tier, inputs, lora, **biases)
    per_slot = rng.standard_normal((*ids.shape, 72)).astype(x.dtype)
    for save in ("minimal", "recompute"):
        check(tier, (x, ids, None, w1, w2, per_slot), lora, unreduced=True, save=save)
    one_each, lora = problem(replace(SMALL, k=1), (16, 16), DTYPES["bfloat16"])
    check(tier, one_each, lora)  # rows go to their tokens


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("L", [0, 1])
def test_few_tokens(tier, L):
    inputs, lora = problem(replace(SMALL, L=L, routing="random"), (16, 16), DTYPES["bfloat16"])
    with on(tier) as device:
        got = run(device, inputs, lora)
    assert_right(got, inputs, lora)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_needs(tier):
    """Each gradient alone has the bits that it has beside the others, and what was saved may be kept."""
    inputs, lora = problem(SMALL, (16, 16), DTYPES["bfloat16"])
    with on(tier) as device:
        every = run(device, inputs, lora, keep_saved=True)
        for name in ("x", "weights", "w1", "w2", "lora"):
            alone = run(device, inputs, lora, needs=(name,))
            assert len(alone) > 1
            for key, values in alone.items():
                assert np.asarray(values).tobytes() == np.asarray(every[key]).tobytes(), (name, key)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_zeros_of_second_factors_change_no_bit(tier):
    inputs, lora = problem(SMALL, (16, 16), DTYPES["bfloat16"])
    lora = lora._replace(b1=0 * lora.b1, b2=0 * lora.b2)
    with on(tier) as device:
        got = run(device, inputs, lora, needs=("x", "weights", "w1", "w2"))
        x, ids, weights, w1, w2, grad_out = map(device.put, inputs)
        out, saved = mb.moe_forward(x, ids, weights, w1, w2)
        plain = by_name(out, mb.moe_backward(grad_out, saved))
        device.synchronize()
    assert plain.keys() == got.keys()
    for name, values in plain.items():
        assert np.asarray(values).tobytes() == np.asarray(got[name]).tobytes(), name


def assert_schedules_change_no_bit(monkeypatch, inputs, lora, **options):
    """Returns the results, which are the same by the dynamic schedule and in clusters."""
    found = []
    for dynamic, clusters in ((False, False), (True, False), (True, True), (False, True)):
        choose_schedule(monkeypatch, dynamic, clusters)
        with emulated(replace(HOPPER, multiprocessors=4), tier="sm90", clusters_at_once=2) as device:
            found.append(run(device, inputs, lora, needs=("x", "weights", "lora"), **options))
        for name, values in found[0].items():
            assert np.asarray(found[-1][name]).tobytes() == np.asarray(values).tobytes(), (name, dynamic, clusters)
    return found[0]


@pytest.mark.parametrize("case", [RAGGED, Case(L=150, k=2, E=20, d=72, h=136)], ids=["few_tiles", "many_tiles"])
def test_hoppers_schedules_and_clusters_change_no_bit(monkeypatch, case):
    inputs, lora = problem(case, (16, 80), DTYPES["bfloat16"])
    assert_right(assert_schedules_change_no_bit(monkeypatch, inputs, lora), inputs, lora)


@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
def test_square_tiles(monkeypatch, gate_up):
    monkeypatch.setattr(gemm_config, "square_product", lambda *_: (True, ""))
    case = Case(L=300, k=2, E=3, d=200, h=104)
    inputs, lora = problem(case, (16, 16), DTYPES["bfloat16"], order=gate_up)
    check("sm90", inputs, lora, gate_up=gate_up)


@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
def test_places_of_factors_change_no_bit(monkeypatch, gate_up):
    """16 ranks in the spare bytes, or in stages where tiles are square and a bias has the bytes."""
    inputs, lora = problem(Case(L=300, k=2, E=3, d=328, h=264), (16, 16), DTYPES["bfloat16"], order=gate_up)
    rng, found = np.random.default_rng(0), []
    biases = {n: rng.standard_normal((3, size)).astype(np.float32) for n, size in (("b1", 528), ("b2", 328))}
    for square in (False, True):
        monkeypatch.setattr(gemm_config, "square_product", lambda *_, square=square: (square, ""))
        runtime.forget()
        with on("sm90") as device:
            found.append(run(device, inputs, lora, gate_up=gate_up, **biases))
            of_factors = [dict(v.macros)["LORA_STAGES"] for _, v in loader._kernels if v.entry == "down_fwd"]
            assert of_factors == [str(int(square))]
        assert_right(found[-1], inputs, lora, gate_up=gate_up, **biases)
    for name in ("out", "x", "weights"):
        assert np.asarray(found[0][name]).tobytes() == np.asarray(found[1][name]).tobytes(), name


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_many_chunks(monkeypatch, tier):
    """Gradients are sums of parts, in their order; and several blocks of ranks."""
    monkeypatch.setattr(lora_config, "MIN_CHUNK", 5)
    monkeypatch.setattr(lora_config, "MAX_CHUNK", 5)
    for shared, rank in itertools.product((False, True), (16, 80)):
        inputs, lora = problem(SMALL, (rank, rank), DTYPES["bfloat16"], factor_dtype=np.float32, shared=shared)
        check(tier, inputs, lora)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("save", "ranks", "of_lora"),
    [
        ("minimal", (4, 17), {"factor_dtype": np.float32}),
        ("recompute", (4, 8), {"shared": True}),
        ("paper", (None, 8), {"strided": True}),
        ("fp8", (8, None), {}),
        (None, (8, 8), {}),
    ],
    ids=str,
)
def test_chunks_of_tokens(tier, save, ranks, of_lora):
    """Within a limit of memory: the bits of what each token has, and sums over the chunks in float32.

    "recompute" also asks for the gradients of what the factors adapt.
    """
    case = replace(SMALL, L=330, E=5, routing="empty_experts")
    inputs, lora = problem(case, ranks, DTYPES["bfloat16"], **of_lora)
    needs = ("x", "weights", "lora", *(("w1", "w2") if save == "recompute" else ()))
    with on(tier) as device:
        want = run(device, inputs, lora, needs=needs, save=save)
        with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
            run(device, inputs, lora, save=save, memory_limit=1)
        least = int(str(error.value).split("at least ")[1].split()[0])
        device.launched.clear()
        got = run(device, inputs, lora, needs=needs, save=save, memory_limit=least * 6 // 5)
        assert sum(entry == "down_fwd" for entry in device.launched) > 2
    assert_right(got, inputs, lora, save)
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert got[name].dtype == values.dtype
        if name in ("out", "x", "weights"):
            np.testing.assert_array_equal(got[name], values, name)
        else:  # a few sums in another order lie on the other side of a tie
            assert relative_error(in_float64(got[name]), in_float64(values)) <= 2**-9, name
    for name in NAMES:
        if f"lora.{name}" in got and not (of_lora.get("shared") and name in ("a1", "a2")):
            assert not np.any(in_float64(got[f"lora.{name}"])[::2])  # experts without rows


def test_chunks_of_float32_layers():
    """d and h are odd, but the factors have multiples of 8 elements; others are refused unless nothing is saved."""
    inputs, lora = problem(replace(ODD, L=330), (8, 8), DTYPES["float32"])
    with on("sm80") as device:
        with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
            run(device, inputs, lora, memory_limit=1)
        least = int(str(error.value).split("at least ")[1].split()[0])
        device.launched.clear()
        assert_right(run(device, inputs, lora, needs=("x", "weights", "lora"), memory_limit=least), inputs, lora)
        assert sum(entry == "down_fwd" for entry in device.launched) > 2
        inputs, lora = problem(ODD, (5, 33), DTYPES["float32"])
        expected = r"moe_forward: lora.a1: expected a multiple of 8 elements with memory_limit, got 1065"
        with pytest.raises(ValueError, match=expected):
            run(device, inputs, lora, memory_limit=10**9)
        run(device, inputs, lora, memory_limit=10**9, save=None)


def test_chunks_over_frozen_experts():
    """The bits of what each token has; the factors of experts that each chunk decodes."""
    inputs, lora = problem(Case(L=330, k=2, E=3, d=64, h=64), (4, 4), DTYPES["bfloat16"], factor_dtype=np.float32)
    x, ids, weights, *_, grad_out = inputs
    packed = [random_weight("mxfp4", (3, 64, columns), None, i) for i, columns in enumerate((128, 64))]
    with on("sm80") as device:
        arrays = [device.put(a) for a in (x, ids, weights)] + [on_device(device, weight) for weight in packed]
        grad_out, factors = device.put(grad_out), lora.with_factors(put(device, factor) for factor in lora.factors)

        def results(limit):
            out, saved = mb.moe_forward(*arrays, lora=factors, memory_limit=limit)
            found = by_name(out, mb.moe_backward(grad_out, saved))
            device.synchronize()
            return found

        want = results(None)
        with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
            results(1)
        device.launched.clear()
        got = results(int(str(error.value).split("at least ")[1].split()[0]) * 6 // 5)
        assert sum(entry == "down_fwd" for entry in device.launched) > 2
    assert got.keys() == want.keys() == {"out", "x", "weights", *(f"lora.{name}" for name in NAMES)}
    for name, values in want.items():
        tolerance = {"out": 0, "x": 0, "weights": 0}.get(name, 2**-20)
        assert relative_error(in_float64(got[name]), in_float64(values)) <= tolerance, name
