"""The memory formulas: numbers worked out by hand, text against number, and the buffers the layer really allocates."""

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import arrays, launch_config, loader, memory, params, tensor_map
from moeblaze_cupy.ops import experts
from moeblaze_cupy.structures import ACTIVATIONS

MIB = 2**20
QWEN3_30B = memory.LayerShape(L=32768, d=2048, h=768, E=128, k=8)
SHAPES = (
    QWEN3_30B,
    memory.LayerShape(L=1000, d=96, h=200, E=7, k=3, activation="gelu", dtype="float32"),
    memory.LayerShape(L=3, d=8, h=8, E=300, k=1, activation="reglu", dtype="float16", ids_are_int64=True),
    memory.LayerShape(L=4096, d=256, h=129, E=8, k=2, activation="relu"),
    memory.LayerShape(L=100, d=4360, h=64, E=2, k=2),  # on Hopper one panel, as rows are few
    memory.LayerShape(L=2000, d=4360, h=64, E=2, k=2),  # three
    memory.LayerShape(L=20000, d=264, h=136, E=2, k=1, activation="silu"),  # weight gradients in parts
)


def by_name(terms):
    return {term.name: term.nbytes for term in terms}


def test_numbers_of_qwen3_30b():
    # R = 32768 * 8 = 262144 slots; a routed (R, 768) bf16 array is 384 MiB, a routed (R, 2048) one 1024 MiB.
    index = 4 * 262144 + 4 * 262144 + 4 * 129
    tiles = 8 * (2048 + 128 + 1) + 4 * 128  # and experts_by_load
    x = 128 * MIB
    assert memory.layer(QWEN3_30B, "recompute").saved_bytes == x + index + tiles
    assert memory.layer(QWEN3_30B, "minimal").saved_bytes == x + index + tiles + 768 * MIB
    assert memory.layer(QWEN3_30B, "paper").saved_bytes == x + index + tiles + (768 + 384) * MIB
    assert memory.layer(QWEN3_30B, None).saved_bytes == 0
    assert memory.routed_layer(QWEN3_30B).saved_bytes == (1024 + 768 + 384 + 384 + 1024) * MIB + index

    # One panel is (R, 256): 128 MiB. Partial sums: 6 column tiles of R float32, 6 MiB.
    portable = replace(QWEN3_30B, tier="sm80")
    assert memory.layer(portable, "recompute").forward_peak_bytes == (384 + 128) * MIB
    assert memory.layer(portable, "minimal").forward_peak_bytes == (384 + 128) * MIB
    assert memory.layer(portable, "paper").forward_peak_bytes == 128 * MIB
    assert memory.layer(portable, None).forward_peak_bytes == (384 + 128) * MIB + index + tiles
    # Hopper's is (R, 1024).
    assert memory.layer(QWEN3_30B, "recompute").forward_peak_bytes == (384 + 512) * MIB
    assert memory.layer(QWEN3_30B, "minimal").forward_peak_bytes == (384 + 512) * MIB
    assert memory.layer(QWEN3_30B, "paper").forward_peak_bytes == 512 * MIB
    assert memory.layer(QWEN3_30B, None).forward_peak_bytes == (384 + 512) * MIB + index + tiles
    # The gradients are 128 (dx) + 1 + 768 (dw1) + 384 (dw2) MiB; the largest stage is that of all of them.
    assert memory.layer(QWEN3_30B, "recompute").backward_peak_bytes == (768 + 1281) * MIB
    assert memory.layer(QWEN3_30B, "minimal").backward_peak_bytes == 1281 * MIB
    assert memory.layer(QWEN3_30B, "paper").backward_peak_bytes == 1281 * MIB
    few_experts = replace(QWEN3_30B, E=8)  # then the weighted product, dweights and dw2 are; on Hopper dx and its panel
    assert memory.layer(replace(few_experts, tier="sm80"), "minimal").backward_peak_bytes == (384 + 1 + 24) * MIB
    assert memory.layer(few_experts, "minimal").backward_peak_bytes == (512 + 1 + 24 + 128) * MIB
    assert memory.routed_layer(QWEN3_30B).forward_peak_bytes == 0
    assert memory.routed_layer(QWEN3_30B).backward_peak_bytes == (768 + 1024 + 1281) * MIB

    assert memory.output(QWEN3_30B).nbytes == 128 * MIB
    expected = {"dx": 128 * MIB, "dweights": MIB, "dw1": 768 * MIB, "dw2": 384 * MIB}
    assert by_name(memory.gradients(QWEN3_30B)) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula_text_gives_the_number(shape):
    letters = {name: getattr(shape, name) for name in ("L", "d", "h", "E", "k", "b", "g")}
    names = letters | {"min": min, "max": max}
    plans = [memory.layer(shape, save) for save in memory.POLICIES] + [memory.routed_layer(shape)]
    terms = [memory.output(shape), *memory.gradients(shape)]
    for plan in plans:
        terms += [*plan.saved, *(term for stage in (*plan.forward, *plan.backward) for term in stage)]
    for term in terms:
        formula = term.formula.replace("ceil(L/4)", str(math.ceil(shape.L / 4)))
        for columns in (128, 256):
            formula = formula.replace(f"ceil(h/{columns})", str(math.ceil(shape.h / columns)))
        assert eval(formula, {"__builtins__": {}}, names) == term.nbytes, term


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_policies_are_ordered(shape):
    recompute, minimal, paper = (memory.layer(shape, save) for save in ("recompute", "minimal", "paper"))
    assert memory.layer(shape, None).saved_bytes == 0
    assert recompute.saved_bytes < minimal.saved_bytes < paper.saved_bytes
    order = 4 * shape.E  # experts_by_load, which a routed layer does without
    assert minimal.saved_bytes - order < memory.routed_layer(shape).saved_bytes
    hidden = shape.slots * shape.h * shape.b
    assert minimal.saved_bytes - recompute.saved_bytes == shape.g * hidden
    assert paper.saved_bytes - recompute.saved_bytes == (shape.g + 1) * hidden
    assert paper.backward_peak_bytes <= minimal.backward_peak_bytes < recompute.backward_peak_bytes


def test_int64_ids_cost_a_copy():
    for save in ("recompute", "minimal", "paper"):
        wide = memory.layer(replace(QWEN3_30B, ids_are_int64=True), save).saved_bytes
        assert wide - memory.layer(QWEN3_30B, save).saved_bytes == 4 * QWEN3_30B.slots


def test_activations_scale_with_the_element_size():
    index = sum(term.nbytes for term in memory.layer(QWEN3_30B, "minimal").saved if term.formula.startswith(("4", "8")))
    half = memory.layer(QWEN3_30B, "minimal").saved_bytes - index
    full = memory.layer(replace(QWEN3_30B, dtype="float32"), "minimal").saved_bytes - index
    assert full == 2 * half


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save", ["recompute", "minimal", "paper"])
def test_saved_bytes_on_the_cpu(activation, save):
    """The NumPy backend saves what the formula says, less the GEMMs' row tiles, which it has no use for."""
    s = memory.LayerShape(L=50, d=24, h=40, E=6, k=2, activation=activation, dtype="float32")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((s.L, s.d), np.float32)
    weights, ids = mb.route(rng.standard_normal((s.L, s.E), np.float32), s.k)
    w1 = rng.standard_normal((s.E, s.d, s.g * s.h), np.float32)
    w2 = rng.standard_normal((s.E, s.h, s.d), np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, activation=activation, save=save)
    plan = memory.layer(s, save)
    tiles = 0 if saved.index.row_tiles is not None else by_name(plan.saved)["GEMM row tiles"]
    assert saved.nbytes + x.nbytes == plan.saved_bytes - tiles


class CountedMemory:
    """A framework for `arrays.Context` that makes NumPy arrays and counts the bytes alive."""

    name = "counted"

    def __init__(self):
        self.alive = self.peak = 0

    @staticmethod
    def describe(array):
        return replace(arrays.NumPy.describe(array), device=0)

    def empty(self, shape, dtype, device):
        array = np.zeros(shape, dtype)
        self.alive += array.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(array, self.free, array.nbytes)
        return self.describe(array)

    def free(self, nbytes):
        self.alive -= nbytes

    def layer(self, s):
        """x, ids, weights, w1 and w2 of a layer of 16-bit elements, not counted."""
        shapes = ((s.L, s.d), (s.L, s.k), (s.L, s.k), (s.E, s.d, s.g * s.h), (s.E, s.h, s.d))
        dtypes = ("float16", "int64" if s.ids_are_int64 else "int32", "float32", "float16", "float16")
        return [self.describe(np.zeros(*made)) for made in zip(shapes, dtypes, strict=True)]


@pytest.fixture
def no_launches(monkeypatch):
    """Runs the CUDA code path as far as its allocations: every kernel launch does nothing."""
    limits = launch_config.DeviceLimits(90, 132, 227 * 1024, 228 * 1024)
    monkeypatch.setattr(loader, "device_limits", lambda device: limits)
    monkeypatch.setattr(loader, "clear", lambda *args: None)
    monkeypatch.setattr(loader, "launch", lambda *args, **kwargs: None)
    monkeypatch.setattr(tensor_map, "encode", lambda pointer, *args: pointer)


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("d", "k", "E"), [(64, 2, 5), (600, 2, 5), (600, 1, 5), (512, 3, 5), (2056, 2, 5), (600, 17, 1)]
)
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", memory.POLICIES)
def test_formulas_are_what_the_cuda_layer_allocates(
    save, tier, d, k, E, activation, ids_dtype, no_launches, monkeypatch
):
    monkeypatch.setenv("MOEBLAZE_TIER", tier)
    sizes = {"L": 512, "d": d, "h": 200, "E": E, "k": k}
    s = memory.LayerShape(
        **sizes, activation=activation, dtype="float16", ids_are_int64=ids_dtype == "int64", tier=tier
    )
    counted = CountedMemory()
    context = arrays.Context(counted, 0, 0)
    x, ids, weights, w1, w2 = counted.layer(s)
    plan = memory.layer(s, save)
    out, saved = experts.moe_forward(context, x, ids, weights, (w1,), w2, activation=activation, save=save)
    saved_beyond_x = max(plan.saved_bytes - x.owner.nbytes, 0)
    assert counted.peak == saved_beyond_x + memory.output(s).nbytes + plan.forward_peak_bytes
    assert counted.alive == saved_beyond_x + memory.output(s).nbytes
    if save is None:
        return
    assert saved.nbytes == saved_beyond_x

    before = counted.peak = counted.alive
    gradients = experts.moe_backward(context, out, saved, needs=("x", "weights", "w1", "w2"), keep_saved=False)
    assert counted.peak - before == plan.backward_peak_bytes
    assert counted.alive - before == memory.total(memory.gradients(s))
    assert {name: getattr(gradients, name).nbytes for name in ("x", "weights", "w1", "w2")} == {
        name[1:]: nbytes for name, nbytes in by_name(memory.gradients(s)).items()
    }


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_few_large_experts_take_sums_of_parts(activation, transposed, no_launches, monkeypatch):
    """A gradient of 3 tiles in one memory order has 4 in the other, and other parts: dw2 3 and transposed 4, each half
    of dw1 4 and 3. Launches and memory are those of the order at hand."""
    monkeypatch.setenv("MOEBLAZE_TIER", "sm90")
    s = memory.LayerShape(
        L=30000, d=136, h=264, E=1, k=1, activation=activation, dtype="float16", transposed=transposed
    )
    counted = CountedMemory()
    x, ids, weights, w1, w2 = counted.layer(s)
    if transposed:
        w1, w2 = (counted.describe(np.zeros((s.E, w.shape[2], w.shape[1]), "float16").swapaxes(1, 2)) for w in (w1, w2))
    launched = []
    monkeypatch.setattr(loader, "launch", lambda context, variant, *launch: launched.append((variant, launch)))
    context = arrays.Context(counted, 0, 0)
    out, saved = experts.moe_forward(context, x, ids, weights, (w1,), w2, activation=activation, save="minimal")
    before = counted.peak = counted.alive
    launched.clear()
    experts.moe_backward(context, out, saved, needs=("x", "weights", "w1", "w2"), keep_saved=False)
    plan = memory.layer(s, "minimal")
    assert counted.peak - before == plan.backward_peak_bytes
    sums = [term.nbytes for stage in plan.backward for term in stage if term.name.startswith("sums of ")]
    assert len(sums) == 2
    products = [(v, by_field(v, args)) for v, (_, _, args, *_) in launched if v.entry.endswith("_wgrad")]
    added = [(v, grid, by_field(v, args)) for v, (grid, _, args, *_) in launched if v.entry.startswith("wgrad_parts")]
    assert len(products) == len(added) == 2
    for (product, given), (add, grid, adding), nbytes in zip(products, added, sums, strict=True):
        assert {("PARTS", "1"), ("ACCUMULATE", "0"), ("OUT", "float")} <= set(product.macros)
        halves, parts, M, N = (adding[name] for name in ("halves", "parts", "rows", "columns"))
        # packed sums, an "expert" for every part
        packed = {"out0": adding["sums"], "out1": adding["sums"] + 4 * M * N, "expert_stride": halves * M * N, "ldo": N}
        sizes = {"rows": M, "columns": N, "halves": halves, "parts": parts}
        assert given.items() >= (packed | sizes).items()
        assert add.entry == "wgrad_parts_float16" and adding["accumulate"] == 0
        assert grid == (-(-M * N // 8 // 256), s.E, halves)
        assert nbytes == 4 * parts * s.E * halves * M * N and parts > 1


def by_field(variant, args):
    """A launch's values by the names of its kernel's fields."""
    return dict(zip((field.name for field in params.params_of(variant).fields), args, strict=True))


def test_accumulated_gradients_take_no_memory(no_launches):
    s = memory.LayerShape(L=400, d=64, h=32, E=4, k=2)
    counted = CountedMemory()
    context = arrays.Context(counted, 0, 0)
    x, ids, weights, w1, w2 = counted.layer(s)
    totals = [counted.describe(np.zeros(weight.shape, "float32")) for weight in (w1, w2)]
    _, saved = experts.moe_forward(context, x, ids, weights, (w1,), w2, activation="swiglu", save="minimal")
    before = counted.alive
    given = {"w1": (totals[0],), "w2": (totals[1],)}
    needs = ("x", "weights", "w1", "w2")
    gradients = experts.moe_backward(context, x, saved, needs=needs, keep_saved=False, accumulate=given)
    assert gradients.w1 is totals[0].owner and gradients.w2 is totals[1].owner
    assert counted.alive - before == memory.total(memory.gradients(s)[:2])  # dx and dweights


@pytest.fixture
def inference_on_hopper(no_launches, monkeypatch):
    """A function of a layer's shape and w2's memory order: its forward's launches, (variant, arguments), what is
    cleared, (pointer, bytes), and the memory it took."""

    def run(s, order="row"):
        counted = CountedMemory()
        x, ids, weights, w1, w2 = counted.layer(s)
        if order == "transposed":
            w2 = counted.describe(np.zeros((s.E, s.d, s.h), "float16").swapaxes(1, 2))
        context = arrays.Context(counted, 0, 0)
        experts.moe_forward(context, x, ids, weights, (w1,), w2, activation=s.activation, save=None)
        return launches, cleared, counted

    monkeypatch.setenv("MOEBLAZE_TIER", "sm90")
    launches, cleared = [], []
    monkeypatch.setattr(
        loader, "launch", lambda context, variant, grid, block, args, *_: launches.append((variant, args))
    )
    monkeypatch.setattr(loader, "clear", lambda pointer, nbytes, stream: cleared.append((pointer, nbytes)))
    return run


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("d", [64, 256, 264, 600, 2048, 4616])
def test_hoppers_panels_follow_one_another_through_one_buffer(d, order, inference_on_hopper):
    """Each with its columns of the weight, and summed before the next; one that is no wider than h takes the place of
    the product."""
    L, k, E, h = 8000, 3, 5, 64
    s = memory.LayerShape(L, d, h, E, k, dtype="float16")
    launches, _, counted = inference_on_hopper(s, order)
    products = [by_field(v, args) for v, args in launches if v.entry == "down_fwd"]
    sums = [by_field(v, args) for v, args in launches if v.entry.startswith("aggregate")]
    panels, in_place = launch_config.panels(d, L * k, "sm90"), d <= h
    assert [v.entry.split("_")[0] for v, _ in launches][-2 * len(panels) :] == ["down", "aggregate"] * len(panels)
    first_a, first_b, panel = (products[0][name] for name in ("a", "b0", "product"))
    assert (panel == first_a) == in_place
    step = 2 if order == "row" else 2 * h
    for (column, width), product, summed in zip(panels, products, sums, strict=True):
        ld = h if in_place else width
        b = first_b + column * step
        operands = {"a": first_a, "b0": b, "b1": b, "columns": width, "depth": h, "num_slots": L * k}
        outputs = {"first_layer": 0, "first_layer_grad": 0, "product": panel, "product_ld": ld}
        absent = dict.fromkeys(("stored_product", "weights", "partial_sums", "claims"), 0)
        assert product.items() >= (operands | outputs | absent).items()
        sizes = {"L": L, "k": k, "d": d, "first_column": column, "columns": width, "panel_ld": ld}
        assert summed.items() >= ({"panel": panel} | sizes).items()
    lists = 4 * launch_config.index_lists(L, k, E)[1]
    workspace = 0 if in_place else L * k * panels[0][1] * 2
    assert counted.peak == lists + L * k * h * 2 + L * d * 2 + workspace


@pytest.mark.parametrize("long", [False, True])
def test_one_expert_per_token_needs_no_panel_on_hopper(long, inference_on_hopper, monkeypatch):
    """Nor do blocks then work in pairs, however long the product is."""
    monkeypatch.setattr(launch_config, "pairs_blocks", lambda *_: long)
    L, d, h, E = 40, 600, 64, 5
    launches, _, counted = inference_on_hopper(memory.LayerShape(L, d, h, E, 1, dtype="float16"))
    (variant, args) = launches[-1]
    assert variant.entry == "down_fwd" and {("EPILOGUE", "StoreTokenRows"), ("PAIRED", "0")} <= set(variant.macros)
    given = by_field(variant, args)
    assert given["weights"]
    assert given.items() >= {"columns": d, "depth": h, "product_ld": d, "num_slots": L, "claims": 0}.items()
    assert counted.peak == 4 * launch_config.index_lists(L, 1, E)[1] + L * h * 2 + L * d * 2


def test_claims_start_as_zeros(monkeypatch, inference_on_hopper):
    monkeypatch.setattr(launch_config, "claims_tiles", lambda *_: True)
    launches, cleared, _ = inference_on_hopper(memory.LayerShape(40, 600, 64, 5, 3, dtype="float16"))
    claims = {v.entry: by_field(v, args)["claims"] for v, args in launches if v.entry in ("up_fwd", "down_fwd")}
    assert claims["up_fwd"] and cleared == [(claims["up_fwd"], 4)] and claims["down_fwd"] == 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (898 * MIB, "898.0 MiB"), (2**40, "1.0 TiB")]
)
def test_format_bytes(nbytes, text):
    assert memory.format_bytes(nbytes) == text
