"""The e4m3 products of Hopper's kernels, each by itself, on the emulator.

An operand is e4m3 times scales that the test chooses. The oracle is the product of these numbers in float64, and of
what a kernel quantises itself the recipe in float32: scale = amax / 448, elements rounded to nearest even.
"""

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from bench.fp8_products import PRODUCTS, Products, buffer_shapes
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.frameworks import CuPy, Torch
from moeblaze_cupy.reference.activations import activate
from moeblaze_cupy.types import activation_of, is_gated, pair
from tests.cases import Case, relative_error
from tests.cases import make_inputs as make_layer_inputs
from tests.layer.test_device_code import MARGIN, emulated, in_float64
from tests.layer.test_device_code_sm90 import ONE_CLUSTER, TWO_CLUSTERS, choose_schedule

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
GROUP = launch_config.GROUP_COLUMNS
DTYPES = {"uint8": np.uint8, "bfloat16": BF16, "float32": np.float32}


@dataclass(frozen=True)
class Shape:
    L: int
    k: int
    E: int
    d: int
    h: int
    activation: str = "swiglu"

    @property
    def g(self) -> int:
        return 1 + is_gated(self.activation)


# Rows, columns and sums over K that end within a tile, a group of 128 columns and a stage. Sums have more steps than
# the pipeline has stages.
GATED = Shape(L=150, k=2, E=3, d=688, h=272)
PLAIN = Shape(L=140, k=2, E=4, d=272, h=400, activation="silu")
TO_TOKENS = Shape(L=150, k=1, E=3, d=272, h=144)


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    chosen = functools.partial(choose_schedule, monkeypatch)
    chosen()
    return chosen


def make_inputs(shape, seed=0, integers=False):
    """On the host. integers: small ones with scales that are powers of two, so that all sums are exact."""
    rng = np.random.default_rng(seed)
    L, k, E, d, h, g = shape.L, shape.k, shape.E, shape.d, shape.h, shape.g

    def e4m3(*shape):
        values = rng.integers(-2, 3, shape) if integers else rng.standard_normal(shape) * 100
        return np.clip(values, -448, 448).astype(E4M3)

    def scales(*shape):
        exponents = rng.integers(-3, 2, shape)
        return (2.0**exponents if integers else rng.uniform(0.5, 2, shape) / 100).astype(np.float32)

    ids = np.stack([rng.choice(E, k, replace=False) for _ in range(L)]).astype(np.int32)
    ids[::7, 0] = -1  # rows fewer than slots
    w1, w2 = e4m3(E, d, g * h), e4m3(E, h, d)
    groups = -(-h // GROUP)
    R = L * k
    inputs = {
        "ids": ids,
        "weights": (rng.integers(1, 3, (L, k)) if integers else rng.uniform(0.1, 1, (L, k))).astype(np.float32),
        "x": e4m3(L, d), "x_scales": scales(L), "grad_out": e4m3(L, d), "grad_scales": scales(L),
        "up_fwd": w1.swapaxes(1, 2).copy(), "up_bwd": w1, "w1_scales": scales(E, g),
        "down_fwd": w2.swapaxes(1, 2).copy(), "down_bwd": w2, "w2_scales": scales(E, 1),
        "y": e4m3(R, h), "y_scales": scales(groups, R), "dh": e4m3(R, g * h), "dh_scales": scales(g * groups, R),
        "first_layer": (rng.integers(-2, 3, (R, g * h)) if integers else rng.standard_normal((R, g * h))).astype(BF16),
    }  # fmt: skip
    if not integers:  # sums of about 1
        inputs["w1_scales"] /= 10 * d**0.5
        inputs["w2_scales"] /= 10 * d**0.5
        inputs["x_scales"] *= 10
        inputs["grad_scales"] *= 10
    return inputs


def as_bytes(array):
    return array.view(np.uint8) if array.dtype == E4M3 else array


def by_group(scales, halves, columns):
    """(groups, R) of each half -> (R, columns)."""
    parts = [np.repeat(part.T, GROUP, axis=1)[:, : columns // halves] for part in np.split(scales, halves)]
    return np.concatenate(parts, axis=1).astype(np.float64)


class Routed:
    """The rows in expert order: their tokens, experts and slots."""

    def __init__(self, ids):
        flat = ids.ravel()
        order = np.argsort(flat, kind="stable")
        order = order[flat[order] >= 0]
        self.slots, self.tokens, self.experts, self.count = order, order // ids.shape[1], flat[order], order.size


def product(rows, weights, experts):
    out = np.zeros((rows.shape[0], weights.shape[2]))
    for e in range(weights.shape[0]):
        out[experts == e] = rows[experts == e] @ weights[e]
    return out


def expected(name, shape, inputs, panel=np.float64):
    """In float64: of up_fwd and down_bwd the product, of the others its sum over slots, of rows rounded to `panel`."""
    routed, g, h = Routed(inputs["ids"]), shape.g, shape.h
    f = in_float64
    w1 = f(inputs["up_bwd"]) * np.repeat(f(inputs["w1_scales"]), h, axis=1)[:, None]
    w2 = f(inputs["down_bwd"]) * f(inputs["w2_scales"])[:, None]
    x, grad_out = (f(inputs[n]) * f(inputs[s])[:, None] for n, s in (("x", "x_scales"), ("grad_out", "grad_scales")))
    weights = f(inputs["weights"]).ravel()[routed.slots][:, None]
    if name == "up_fwd":
        return product(x[routed.tokens], w1, routed.experts)
    if name == "down_bwd":
        return product(grad_out[routed.tokens], w2.swapaxes(1, 2), routed.experts)
    key, w, scale = ("y", w2, weights) if name == "down_fwd" else ("dh", w1.swapaxes(1, 2), 1)
    halves = 1 if name == "down_fwd" else g
    values = f(inputs[key]) * by_group(inputs[f"{key}_scales"], halves, inputs[key].shape[1])
    rows = product(values[: routed.count], w, routed.experts).astype(panel).astype(np.float64) * scale
    out = np.zeros((shape.L, rows.shape[1]))
    np.add.at(out, routed.tokens, rows)
    return out


def run(shape, inputs, names, limits=ONE_CLUSTER, **options):
    """Buffers after the named products. What a product reads is as `inputs` have it."""
    with emulated(limits, tier="sm90", **options) as device:
        arrays = {name: device.put(as_bytes(array)) for name, array in inputs.items()}
        R = shape.L * shape.k
        outputs = {}
        for name, (size, dtype) in buffer_shapes(R, shape.L, shape.d, shape.h, shape.g).items():
            outputs[name] = device.allocate(size, DTYPES[dtype], MARGIN)
        written = {"up_fwd": ("first_layer", "y", "y_scales"), "down_fwd": ("out",), "up_bwd": ("grad_x",)}
        written["down_bwd"] = ("first_layer_grad", "dh", "dh_scales", "weighted_y_swi")
        found = {}
        for name in names:
            used = (
                {**outputs, **arrays} | {n: outputs[n] for n in written[name]} | {"row_weights": outputs["row_weights"]}
            )
            products = Products(CuPy(), loader.device_limits(0), used, shape.activation)
            products.calls[name]()
            device.synchronize()
            found |= {n: np.asarray(outputs[n]).copy() for n in written[name]}
            if name == "down_bwd":
                found["partial_sums"] = np.asarray(products.partial_sums.array).copy()
        assert all(
            function.module.source.endswith(("sm90.cu", "dispatch.cu", "aggregation.cu"))
            for function in device.functions.values()
        )
        return found


def activated(shape, first, grad=None):
    """y_swi, and with `grad` the gradients of a and b, in float64."""
    a, b = np.split(first, 2, axis=1) if shape.g == 2 else (first, None)
    (value, slope), (up, up_slope) = activate(a, b, activation_of(shape.activation))
    if grad is None:
        return value * up, None
    parts = (grad * up * slope, grad * value * up_slope)
    return value * up, np.concatenate(parts[: shape.g], axis=1)


def assert_quantised(got, scales, want, halves, rounding=2e-6, ties=1e-3):
    """By the recipe, from values that differ from `want` by a relative `rounding`, which changes a part of `ties`."""
    want = want.astype(np.float32)
    for half, part in enumerate(np.split(want, halves, axis=1)):
        groups = scales.shape[0] // halves
        for i in range(groups):
            columns = slice(i * GROUP, (i + 1) * GROUP)
            amax = np.abs(part[:, columns]).max(axis=1)
            scale = scales[half * groups + i, : want.shape[0]]
            np.testing.assert_allclose(scale, np.where(amax == 0, 1, amax / 448), rtol=rounding)
            first = half * part.shape[1]
            bits = got[: want.shape[0], first + columns.start : first + min(columns.stop, part.shape[1])]
            values = bits.view(E4M3).astype(np.float32) * scale[:, None]
            nearest = (part[:, columns] / scale[:, None]).astype(E4M3).astype(np.float32) * scale[:, None]
            step = np.maximum(np.abs(nearest) / 8, scale[:, None] * 2**-9)
            assert (np.abs(values - nearest) <= step * 1.01).all()
            assert (values != nearest).mean() <= ties


@pytest.mark.parametrize("shape", [GATED, PLAIN, TO_TOKENS], ids=["gated", "plain", "to_tokens"])
def test_products(shape):
    inputs = make_inputs(shape)
    found = run(shape, inputs, PRODUCTS, seed=1)
    routed = Routed(inputs["ids"])
    n = routed.count

    def close(got, want, tolerance=1.5 * 2**-8):
        assert np.linalg.norm(in_float64(got) - want) <= tolerance * np.linalg.norm(want)

    first = expected("up_fwd", shape, inputs)
    close(found["first_layer"][:n], first)
    y, _ = activated(shape, in_float64(found["first_layer"][:n]))
    assert_quantised(found["y"], found["y_scales"], y, 1)
    close(found["out"], expected("down_fwd", shape, inputs))
    close(found["grad_x"], expected("up_bwd", shape, inputs))
    weights = in_float64(inputs["weights"]).ravel()[routed.slots][:, None]
    grad = expected("down_bwd", shape, inputs)
    y, dh = activated(shape, in_float64(inputs["first_layer"][:n]), grad * weights)
    close(found["first_layer_grad"][:n], dh)
    close(found["weighted_y_swi"][:n], y * weights)
    close(found["partial_sums"].sum(0)[:n], (grad * y).sum(1), 0.02)
    assert_quantised(found["dh"], found["dh_scales"], dh, shape.g, rounding=2**-8, ties=0.06)  # of the product in bf16


def test_integers_are_exact(choose):
    """Bit for bit, in clusters and by the dynamic schedule too: sums of integers below 2^13 times powers of two."""
    shape = GATED
    inputs = make_inputs(shape, integers=True)
    found = [run(shape, inputs, PRODUCTS)]
    choose(dynamic=True, clusters=True)
    found.append(run(shape, inputs, PRODUCTS, TWO_CLUSTERS, seed=2, clusters_at_once=2))
    n = Routed(inputs["ids"]).count
    for results in found:
        np.testing.assert_array_equal(results["first_layer"][:n], expected("up_fwd", shape, inputs).astype(BF16))
        for name, entry in (("out", "down_fwd"), ("grad_x", "up_bwd")):
            np.testing.assert_array_equal(
                results[name], expected(entry, shape, inputs, BF16).astype(BF16), err_msg=name
            )
        for name in ("y", "y_scales", "dh", "dh_scales", "first_layer_grad", "weighted_y_swi", "partial_sums"):
            rows = (slice(None), slice(n)) if name.endswith(("scales", "sums")) else slice(n)
            np.testing.assert_array_equal(results[name][rows], found[0][name][rows], err_msg=name)


def test_zeros_tiny_numbers_infinities_and_nans_stay_in_their_rows():
    """A row of zeros has scales of 1. Below 2^-100 amax counts as that."""
    shape, special = PLAIN, {"zero": 3, "tiny": 9, "infinite": 17, "nan": 25}
    inputs = make_inputs(shape)
    plain = run(shape, inputs, ("up_fwd", "down_bwd"))
    inputs["x"][special["zero"]] = 0
    inputs["x_scales"][special["tiny"]] = 2.0**-115
    inputs["x_scales"][special["infinite"]] = np.inf
    inputs["x"][special["nan"], 5] = np.nan
    inputs["grad_out"][special["nan"], 5] = np.nan
    found = run(shape, inputs, ("up_fwd", "down_bwd"))
    routed = Routed(inputs["ids"])
    values = found["y"].view(E4M3).astype(np.float32) * by_group(found["y_scales"], 1, shape.h)
    rows = {name: np.flatnonzero(routed.tokens == token) for name, token in special.items()}
    assert all(r.size for r in rows.values())
    assert not found["y"][rows["zero"]].any() and (found["y_scales"][:, rows["zero"]] == 1).all()
    np.testing.assert_allclose(found["y_scales"][:, rows["tiny"]], 2.0**-100 / 448, rtol=1e-6)
    assert np.isnan(values[rows["infinite"]]).all() and np.isnan(values[rows["nan"]]).all()
    assert np.isnan(found["dh"][rows["nan"]].view(E4M3).astype(np.float32)).all()
    others = np.setdiff1d(np.arange(routed.count), np.concatenate(list(rows.values())))
    for name in ("y", "first_layer", "dh", "first_layer_grad"):
        np.testing.assert_array_equal(found[name][others], plain[name][others], err_msg=name)
    np.testing.assert_array_equal(found["y_scales"][:, others], plain["y_scales"][:, others])


LAYERS = [
    Case(L=150, k=2, E=3, d=272, h=208, order="transposed"),
    Case(L=150, k=1, E=3, d=272, h=144, order="pair", routing="absent"),
    Case(L=60, k=2, E=5, d=144, h=272, activation="silu", routing="empty_experts"),
]


# Of the norm. The kernels round a product to bf16 before they quantise what follows from it, and one element in twenty
# then becomes the next e4m3, 6% away. The recipe's own error is 0.06.
TOLERANCE = 0.02


def host(values):
    """In float64, pairs side by side."""
    return np.concatenate([in_float64(np.asarray(v)).ravel() for v in pair(values)])


def assert_near(found, want):
    """Arrays by name; those that are None are left out."""
    for name, array in found.items():
        assert array is None or relative_error(host(array), host(want[name])) <= TOLERANCE, name


WAYS = [(0, "minimal"), (0, "fp8"), (0, "recompute"), (0, "paper"), (1, "minimal"), (2, "minimal"), (2, "recompute")]


@pytest.mark.parametrize(("number", "save"), WAYS)
def test_layer(number, save):
    """Against the reference of the recipe, with weights that are quantised before, or in the call."""
    case = LAYERS[number]
    inputs = make_layer_inputs(case, 0, BF16)
    x, ids, weights, w1, w2, grad_out = inputs
    options = {"activation": case.activation, "save": save, "precision": "fp8"}
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, **options)
    want = {"out": out, **vars(reference.moe_backward(grad_out, saved))}
    found = []
    for is_given in (True, False) if save == "minimal" else (False,):
        with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
            x, ids, weights, w1, w2, grad_out = (device.put(array) for array in inputs)
            given = {"fp8_weights": mb.quantize_weights(w1, w2)} if is_given else {}
            got, saved = mb.moe_forward(x, ids, weights, w1, w2, **options, **given)
            found.append({"out": got, **vars(mb.moe_backward(grad_out, saved))})
            device.synchronize()
            assert_near(found[-1], want)
            found[-1] = {name: host(array) for name, array in found[-1].items() if array is not None}
    for name, array in found[0].items():
        for other in found[1:]:
            np.testing.assert_array_equal(array, other[name], err_msg=name)


PAIRS = {"gate_up": "interleaved", "activation": "swiglu_oai"}
OPTIONS = {
    "pairs": PAIRS | {"biases": True},
    "biases": {"biases": True},
    "input": {"weights_on": "input"},
    "max_slots": {"max_slots": 200},
    "pairs, kept in e4m3": PAIRS | {"save": "fp8"},
    "pairs, y_swi kept": PAIRS | {"save": "paper"},
    "pairs, computed again": PAIRS | {"save": "recompute"},
    "pairs, input": {"gate_up": "interleaved", "weights_on": "input"},
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_layer(name, number):
    """Biases are added to scaled products; weights on the input scale a and b; fewer rows than slots.

    Pairs of gate and up end within a tile's second half, or within its first one. Their groups have both.
    """
    case, rng, options = LAYERS[number], np.random.default_rng(1), dict(OPTIONS[name])
    if number == 1:
        if "max_slots" in options:
            options["max_slots"] = 100
        case = replace(case, order="row", h=272)
    inputs = make_layer_inputs(case, 0, BF16)
    if options.pop("biases", False):
        b1, b2 = (rng.standard_normal((case.E, n)).astype(np.float32) for n in (2 * case.h, case.d))
        options |= {"b1": b1, "b2": b2}
    out, saved = reference.moe_forward(*inputs[:5], precision="fp8", **options)
    want = {"out": out, **vars(reference.moe_backward(inputs[5], saved))}
    with emulated(ONE_CLUSTER, seed=1, tier="sm90") as device:
        *layer, grad_out = (device.put(array) for array in inputs)
        given = {key: device.put(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
        got, saved = mb.moe_forward(*layer, precision="fp8", **given)
        found = {"out": got, **vars(mb.moe_backward(grad_out, saved))}
        device.synchronize()
        assert_near(found, want)


def test_the_checks_of_the_bench():
    """Its oracle in torch agrees with the kernels, and notices another result."""
    torch = pytest.importorskip("torch")
    from bench import cases, fp8, inputs

    def tensor(array):
        array = np.array(array)
        return (
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            if array.dtype == BF16
            else torch.from_numpy(array)
        )

    shape = Shape(L=150, k=2, E=3, d=272, h=208)
    case = cases.LayerCase("tiny", shape.L, shape.d, shape.h, shape.E, shape.k, "test")
    given = fp8.operands(case, inputs.layer_inputs(case))
    with emulated(ONE_CLUSTER, tier="sm90") as device:
        arrays = {name: device.put(Torch.to_numpy(array)) for name, array in given.items()}
        sizes = buffer_shapes(shape.L * shape.k, shape.L, shape.d, shape.h, shape.g)
        arrays |= {name: device.allocate(size, DTYPES[dtype], MARGIN) for name, (size, dtype) in sizes.items()}
        products = Products(CuPy(), loader.device_limits(0), arrays, case.activation)
        for name in PRODUCTS:
            products.calls[name]()
        device.synchronize()
        lists, places = np.array(products.lists.array), products.index_layout.places
        index = {n: tensor(lists[at : at + math.prod(size)].reshape(size)) for n, (at, size) in places.items()}
        checked = object.__new__(fp8.Checked)
        checked.case, checked.g, checked.kernel = case, shape.g, SimpleNamespace(index=SimpleNamespace(**index))
        checked.arrays = {name: tensor(array) for name, array in arrays.items()}
        checked.tokens = index["expert_token_indices"].long()
    for name in PRODUCTS:
        errors = checked.errors(name)
        assert errors["sums"] < fp8.TOLERANCE and errors.get("others", 0) < fp8.OTHERS, name
    for scales in ("w1_scales", "w2_scales"):
        checked.arrays[scales] = checked.arrays[scales] * 1.05
    assert all(checked.errors(name)["sums"] > fp8.TOLERANCE for name in PRODUCTS)


def test_the_product_that_the_comparison_times():
    """bench.compare's call keeps what the layer keeps."""
    pytest.importorskip("torch")
    from bench import cases, compare

    shape = Shape(L=30, k=2, E=2, d=48, h=136)
    inputs = make_layer_inputs(Case(shape.L, shape.k, shape.E, shape.d, shape.h), 0, BF16)
    case = cases.LayerCase("tiny", shape.L, shape.d, shape.h, shape.E, shape.k, "test")
    with emulated(ONE_CLUSTER, tier="sm90") as device:
        x, ids, weights, w1, w2 = (device.put(array) for array in inputs[:5])
        _, kept = mb.moe_forward(x, ids, weights, w1, w2, save="fp8")
        framework, limits = CuPy(), loader.device_limits(0)
        of_ids, of_w1 = framework.describe(ids), framework.describe(w1)
        run, steps = runtime.Runtime.current(framework, 0), dispatch.configure(of_ids.layout, shape.E, limits)
        _lists, _, addresses = dispatch.dispatch(run, steps, of_ids.ptr)
        y = device.allocate((shape.L * shape.k, shape.h), BF16, MARGIN)
        given = framework, run, addresses, steps.index, limits, case, x, of_w1.layout, of_w1.ptr, y
        saved, _ = compare.saved_up_fwd(*given)()
        device.synchronize()
        np.testing.assert_array_equal(np.array(saved), np.array(kept.first_layer))
