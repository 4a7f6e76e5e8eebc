"""memory_limit on the emulated kernels of both tiers: the bits of the layer without a limit, and its sums."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import moeblaze_cupy as mb
from moeblaze_cupy.types import ChunkedIndices, pair
from tests.cases import Case, make_inputs, relative_error
from tests.layer.test_device_code import DTYPES, Layer, differences
from tests.layer.test_device_experts import on
from tests.oracle import expected, make_problem, mismatches
from tests.quantised.cases import random_weight
from tests.quantised.test_decode import on_device

CASE = Case(L=200, k=2, E=3, d=24, h=40, order="transposed", routing="absent")
ODD = Case(L=200, k=2, E=3, d=31, h=45, order="pair_transposed", routing="absent")
SAME = ("out", "x", "weights")  # sums of as many terms in the same order
# Gradients of weights are float32 sums of some 100 products, rounded once; a few lie on either side of a tie.
OF_SUMS = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-20}


def least_of(arrays, options):
    """The smallest limit that the layer takes."""
    with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
        mb.moe_forward(**arrays, **options, memory_limit=1)
    return int(str(error.value).split("at least ")[1].split()[0])


def run(device, arrays, grad_out, options, limit=None, **of_backward):
    """Results by name, and how many tokens a chunk has."""
    out, saved = mb.moe_forward(**arrays, **options, memory_limit=limit)
    gradients = vars(mb.moe_backward(grad_out, saved, **of_backward))
    device.synchronize()
    tokens = saved.index.chunk_tokens if isinstance(saved.index, ChunkedIndices) else None
    return {"out": out} | {name: gradient for name, gradient in gradients.items() if gradient is not None}, tokens


def arrays_of(layer):
    return dict(zip(("x", "ids", "weights", "w1", "w2"), layer.on_device, strict=False))


def assert_agree(got, want, dtype):
    """Bits, or the difference of sums in another order."""
    assert not {*SAME} & {*differences(want, got)}
    for name in want.keys() - {*SAME}:
        for part, plain in zip(pair(got[name]), pair(want[name]), strict=True):
            assert relative_error(*(np.asarray(a).astype(np.float64) for a in (part, plain))) <= OF_SUMS[dtype], name


@pytest.mark.parametrize("save", ["minimal", "recompute", "fp8", "paper"])
@pytest.mark.parametrize(
    ("tier", "dtype", "case"),
    [
        ("sm80", "bfloat16", CASE),
        ("sm90", "bfloat16", CASE),
        ("sm80", "float32", ODD),
        ("sm80", "float16", replace(CASE, activation="relu", order="row")),
        ("sm90", "bfloat16", replace(CASE, k=1, L=400)),
    ],
    ids=str,
)
def test_chunks_give_the_bits_of_the_layer(tier, dtype, case, save):
    with on(tier, seed=1) as device:
        layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]), case.activation)
        arrays, grad_out, options = arrays_of(layer), layer.on_device[5], {"activation": case.activation, "save": save}
        want, whole = run(device, arrays, grad_out, options)
        least, found = least_of(arrays, options), []
        for limit in (least, least * 4 // 3):
            got, tokens = run(device, arrays, grad_out, options, limit)
            found.append(tokens)
            assert_agree(got, want, dtype)
            if save != "fp8":  # whose error is its own
                layer.assert_matches_reference(got)
        assert whole is None and found[0] == 16 < found[1] < case.L


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("name", "gate_up", "bias"),
    [("swiglu_oai", "interleaved", "dtype"), ("swiglu", "halves", np.float32), ("relu2", "halves", "dtype")],
)
def test_biases_against_float64(tier, name, gate_up, bias):
    problem = make_problem(
        name, DTYPES["bfloat16"], sizes=(120, 2, 3, 24, 40), order="transposed", gate_up=gate_up, bias=bias
    )
    with on(tier) as device:
        arrays = {argument: device.put(value) for argument, value in problem.arrays().items()}
        grad_out, options = device.put(problem.grad_out), problem.options
        want, _ = run(device, arrays, grad_out, options)
        got, tokens = run(device, arrays, grad_out, options, least_of(arrays, options))
        assert tokens == 16
        assert_agree(got, want, "bfloat16")
        assert not mismatches(got, expected(problem), problem.x.dtype)
        for parameter in ("w1", "w2", "b1", "b2"):  # expert 1 has no rows
            assert got[parameter].dtype == arrays[parameter].dtype and not np.asarray(got[parameter][1]).any()


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    "options",
    [
        {"unreduced": True},
        {"weights_on": "input"},
        {"identity_experts": 2},
        {"ids": np.int64},
        {"keep_saved": True},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_options(tier, options):
    precision = options.get("precision")
    if precision and tier == "sm80":
        pytest.skip("products in e4m3 are Hopper's alone")
    case = replace(CASE, d=32, h=48, routing="random") if precision else CASE
    x, ids, weights, w1, w2, grad_out = make_inputs(case, 0, DTYPES["bfloat16"])
    if options.get("identity_experts"):
        ids = np.where(ids < 0, case.E + 1, ids)
    ids = ids.astype(options.get("ids", np.int32))
    if options.get("unreduced"):
        weights, grad_out = None, np.stack([grad_out, -grad_out], axis=1)
    of_backward = {"keep_saved": True} if "keep_saved" in options else {}
    of_forward = {name: value for name, value in options.items() if name not in ("ids", "keep_saved")}
    with on(tier) as device:
        given = {"x": x, "ids": ids, "weights": weights, "w1": w1, "w2": w2}
        arrays = {name: array if array is None else device.put(array) for name, array in given.items()}
        grad_out = device.put(grad_out)
        want, _ = run(device, arrays, grad_out, of_forward, **of_backward)
        got, tokens = run(device, arrays, grad_out, of_forward, least_of(arrays, of_forward), **of_backward)
        assert tokens == 16
        assert_agree(got, want, "bfloat16")


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_sums_are_added_to_a_callers(tier):
    """To float32 totals, which the experts without tokens leave alone; only the gradient of w2 is asked for besides."""
    case = replace(CASE, E=5, routing="empty_experts")
    with on(tier) as device:
        layer = Layer(device, make_inputs(case, 0, DTYPES["bfloat16"]))
        arrays, grad_out = arrays_of(layer), layer.on_device[5]
        plain, _ = run(device, arrays, grad_out, {})
        total = device.allocate((case.E, 2 * case.h, case.d), np.float32).swapaxes(1, 2)
        total[:] = 1
        limit = least_of(arrays, {})
        got, tokens = run(device, arrays, grad_out, {}, limit, needs=("w1", "w2"), accumulate={"w1": total})
        assert tokens == 16 and got["w1"] is total and got.keys() == {"out", "w1", "w2"}
        np.testing.assert_array_equal(total[::2], 1)
        want = np.asarray(plain["w1"]).astype(np.float64)
        assert relative_error(np.asarray(total).astype(np.float64) - 1, want) <= 2**-8  # that of bf16 in `want`


@pytest.fixture
def without_scratch():
    yield
    mb.limit_scratch(None)  # which frees it


@pytest.mark.parametrize(("name", "in_turn"), [("mxfp4", False), ("int8", True)])
def test_frozen_weights(name, in_turn, without_scratch):
    """The scratch that they are decoded to counts, and their gradients take nothing. in_turn: w1 and w2 have one place,
    so every chunk decodes both."""
    case = Case(L=120, k=2, E=3, d=64, h=64)
    x, ids, weights, _, _, grad_out = make_inputs(case, 0, DTYPES["bfloat16"])
    w1, w2 = (random_weight(name, (3, 64, columns), None, i) for i, columns in enumerate((128, 64)))
    mb.limit_scratch(2 * 3 * 64 * 128 if in_turn else None)
    with on("sm80") as device:
        arrays = {"x": device.put(x), "ids": device.put(ids), "weights": device.put(weights)}
        arrays |= {"w1": on_device(device, w1), "w2": on_device(device, w2)}
        want, _ = run(device, arrays, device.put(grad_out), {})
        least = least_of(arrays, {})
        got, tokens = run(device, arrays, device.put(grad_out), {}, least)
        assert tokens == 16 and not differences(want, got) and got.keys() == {"out", "x", "weights"}
        scratch = 2 * 3 * (64 * 128 + (0 if in_turn else 64 * 64))
        assert scratch < least < scratch + 40_000
        decoded = [kernel for kernel in device.launched if kernel.startswith("decode")]
        assert len(decoded) > 2 * 120 // 16
