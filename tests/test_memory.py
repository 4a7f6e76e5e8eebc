"""The memory formulas: numbers worked out by hand, text against number, and the buffers the layer really allocates."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import Layer, launches, limits_of, use

import moeblaze_cupy as mb
from moeblaze_cupy import gemm_config, launch_config, memory, runtime
from moeblaze_cupy.cli import explain
from moeblaze_cupy.structures import ACTIVATIONS, SlotOptions

MIB = 2**20
QWEN3_30B = memory.LayerShape(L=32768, d=2048, h=768, E=128, k=8)
SHAPES = (
    QWEN3_30B,
    memory.LayerShape(L=1000, d=96, h=200, E=7, k=3, activation="gelu", dtype="float32"),
    memory.LayerShape(L=3, d=8, h=8, E=300, k=1, activation="reglu", dtype="float16", ids_are_int64=True),
    memory.LayerShape(L=4096, d=256, h=129, E=8, k=2, activation="relu"),
    memory.LayerShape(L=100, d=4360, h=64, E=2, k=2),  # on Hopper one panel, as rows are few
    memory.LayerShape(L=2000, d=4360, h=64, E=2, k=2),  # three
    memory.LayerShape(L=4096, d=256, h=136, E=8, k=4, max_slots=5000),
    memory.LayerShape(L=20000, d=264, h=136, E=2, k=1, activation="silu"),  # weight gradients by split-K
    memory.LayerShape(L=300, d=96, h=200, E=7, k=3, ragged=True, ids_are_int64=True),
    memory.LayerShape(L=300, d=264, h=200, E=7, k=1, options=SlotOptions(identity_experts=2)),
    memory.LayerShape(L=300, d=96, h=200, E=7, k=3, options=SlotOptions(unreduced=True)),
    memory.LayerShape(L=300, d=96, h=200, E=7, k=3, ragged=True, tier="sm80", options=SlotOptions(unreduced=True)),
)


RECORDED = {
    "conf1": memory.LayerShape(L=65536, d=512, h=2048, E=4, k=1),
    "qwen30b": QWEN3_30B,
    "gpt-oss, biases": memory.LayerShape(
        *(16384, 2880, 2880, 32, 4), activation="swiglu_oai", bias="bfloat16", gate_up="interleaved", transposed=True
    ),
    "float32, portable": memory.LayerShape(1000, 96, 200, 7, 3, activation="gelu", dtype="float32", tier="sm80"),
    "k = 1 in e4m3": memory.LayerShape(512, 608, 208, 5, 1, precision="fp8"),
    "few rows": memory.LayerShape(L=3, d=8, h=8, E=300, k=1, activation="reglu", dtype="float16", ids_are_int64=True),
    "pairs with a bound": memory.LayerShape(300, 264, 200, 7, 3, ragged=True, ids_are_int64=True, max_slots=500),
    "unreduced": memory.LayerShape(300, 96, 200, 7, 3, options=SlotOptions(unreduced=True)),
}


def recorded(s, save):
    """Saved bytes, x among them, and both peaks as the formulas define them: without tile counters."""
    forward, *backward = explain.rehearse(s, save, limits_of(s.tier))

    def peak(of_pass):
        counted = [a for a in of_pass.rehearsal.allocations if of_pass.contents(a) != "tile counter"]
        return max(sum(a.nbytes for a in counted if a.is_alive(n)) for n in range(len(of_pass.rehearsal.launches)))

    saved = forward.kept_bytes - memory.output(s).nbytes + (s.L * s.d * s.b if save else 0)
    return saved, peak(forward) - forward.kept_bytes, *map(peak, backward)


@pytest.mark.parametrize("save", memory.POLICIES)
@pytest.mark.parametrize("name", RECORDED)
def test_formulas_equal_what_the_recorder_allocates(name, save):
    plan = memory.layer(RECORDED[name], save)
    expected = plan.saved_bytes, plan.forward_peak_bytes, plan.backward_peak_bytes
    assert recorded(RECORDED[name], save) == (expected if save else expected[:2])


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
    letters = {name: getattr(shape, name) for name in ("L", "d", "h", "E", "k", "b", "g", "R")}
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
    recompute, minimal, paper, fp8 = (memory.layer(shape, p) for p in ("recompute", "minimal", "paper", "fp8"))
    assert memory.layer(shape, None).saved_bytes == 0
    assert recompute.saved_bytes < minimal.saved_bytes < paper.saved_bytes
    order = 4 * shape.E  # experts_by_load, which a routed layer does without
    assert minimal.saved_bytes - order < memory.routed_layer(shape).saved_bytes
    hidden = shape.R * shape.h * shape.b
    assert minimal.saved_bytes - recompute.saved_bytes == shape.g * hidden
    kept = fp8.saved_bytes - recompute.saved_bytes
    assert kept - 16 < shape.g * shape.R * (shape.h + 4 * math.ceil(shape.h / 128)) <= kept
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
@pytest.mark.parametrize("save", ["recompute", "minimal", "paper", "fp8"])
def test_saved_bytes_on_the_cpu(activation, save):
    """The NumPy backend saves what the formula says."""
    s = memory.LayerShape(L=50, d=24, h=40, E=6, k=2, activation=activation, dtype="float32")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((s.L, s.d), np.float32)
    weights, ids = mb.route(rng.standard_normal((s.L, s.E), np.float32), s.k)
    w1 = rng.standard_normal((s.E, s.d, s.g * s.h), np.float32)
    w2 = rng.standard_normal((s.E, s.h, s.d), np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, activation=activation, save=save)
    assert saved.nbytes + x.nbytes == memory.layer(s, save).saved_bytes


def layer_of(s, save, **options):
    """The call of a shape, on a fake device."""
    order = "transposed" if s.transposed else "row"
    ids = np.int64 if s.ids_are_int64 else np.int32
    fields = {"activation": s.activation, "save": save, "dtype": np.float16, "ids": ids, "max_slots": s.max_slots}
    options |= {"slots": s.options, "ragged": s.ragged}
    return Layer(s.L, s.k, s.E, s.d, s.h, order, **fields, **options)


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("d", "k", "E", "max_slots"),
    [
        *((64, 2, 5, None), (600, 2, 5, None), (600, 1, 5, None), (512, 3, 5, None), (2056, 2, 5, None)),
        *((600, 17, 1, None), (600, 2, 5, 300), (600, 1, 5, 300), (2056, 8, 5, 1100)),
    ],
)
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", memory.POLICIES)
def test_formulas_are_what_the_cuda_layer_allocates(save, tier, d, k, E, max_slots, activation, ids_dtype, monkeypatch):
    device = use(monkeypatch, limits_of(tier))
    fields = {"activation": activation, "dtype": "float16", "tier": tier, "max_slots": max_slots}
    s = memory.LayerShape(512, d, 200, E, k, ids_are_int64=ids_dtype == "int64", **fields)
    assert_allocates(device, s, save)


OPTIONS = [
    (False, SlotOptions(weights_on="input")),
    (False, SlotOptions(identity_experts=3)),
    (False, SlotOptions(unreduced=True)),
    (True, SlotOptions(unreduced=True, weights_on="input")),
    (True, SlotOptions(identity_experts=3, weights_on="input")),
    (True, SlotOptions()),
]


@pytest.mark.parametrize("ids_are_int64", [False, True])
@pytest.mark.parametrize(("ragged", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize(("d", "k", "max_slots"), [(64, 1, None), (600, 3, None), (600, 3, 700)])
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", memory.POLICIES)
def test_formulas_of_slot_options(save, tier, d, k, max_slots, ragged, options, ids_are_int64, monkeypatch):
    s = memory.LayerShape(512, d, 200, 5, k, dtype="float16", tier=tier, ragged=ragged, options=options)
    s = replace(s, ids_are_int64=ids_are_int64, max_slots=max_slots)
    assert_allocates(use(monkeypatch, limits_of(tier)), s, save)


def assert_allocates(device, s, save):
    """What the formulas say, at the peaks and in the end."""
    plan, layer = memory.layer(s, save), layer_of(s, save)
    out, saved = layer.forward(device)
    tier = s.tier
    x_bytes = s.L * s.d * s.b
    saved_beyond_x = max(plan.saved_bytes - x_bytes, 0)
    counter = 4 if tier == "sm90" and takes_tile_counter(device) else 0
    assert device.peak - counter <= saved_beyond_x + memory.output(s).nbytes + plan.forward_peak_bytes <= device.peak
    assert device.used == saved_beyond_x + memory.output(s).nbytes
    if save is None:
        return
    assert saved.nbytes == saved_beyond_x

    before = device.peak = device.used
    gradients = layer.backward(device, saved)
    assert device.peak - before == plan.backward_peak_bytes
    assert device.used - before == memory.total(memory.gradients(s))
    held = {name: getattr(gradients, name) for name in ("x", "weights", "w1", "w2")}
    assert {name: gradient.nbytes for name, gradient in held.items() if gradient is not None} == {
        name[1:]: nbytes for name, nbytes in by_name(memory.gradients(s)).items()
    }
    del held
    del out, saved, gradients
    runtime.forget()


def takes_tile_counter(device):
    return any(values.get("tile_counter") for _, _, values in launches(device))


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize(
    ("sizes", "gate_up", "bias"),
    [
        ((512, 600, 200, 5, 2), "interleaved", "float16"),
        ((512, 600, 200, 5, 2), "halves", "float32"),
        ((1600, 328, 72, 2, 2), "interleaved", "float16"),  # square tiles of all three products that have them
        ((1600, 256, 72, 2, 2), "interleaved", "float16"),  # of up_fwd alone
        ((30000, 136, 264, 1, 1), "interleaved", "float32"),  # split-K
        ((9, 24, 16, 1000, 2), "halves", "float32"),  # large gradients of biases
    ],
)
def test_formulas_with_biases_and_interleaved_gates(sizes, gate_up, bias, save, tier):
    s = memory.LayerShape(*sizes, activation="swiglu_oai", dtype="float16", bias=bias, gate_up=gate_up, tier=tier)
    forward, backward = explain.rehearse(s, save, limits_of(tier))
    plan = memory.layer(s, save)
    assert backward.peak_bytes - plan.backward_peak_bytes in (0, 4)  # 4: a tile counter
    assert backward.kept_bytes == memory.total(memory.gradients(s))
    of_names = by_name(memory.gradients(s))
    width = {"float16": 2, "float32": 4}[bias]
    assert of_names["db1"] == width * 2 * s.E * s.h and of_names["db2"] == width * s.E * s.d
    without = replace(s, bias=None)
    assert forward.peak_bytes == explain.rehearse(without, save, limits_of(tier))[0].peak_bytes


@pytest.mark.parametrize("save", memory.POLICIES)
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize(("d", "h", "k"), [(64, 208, 1), (64, 208, 3), (608, 208, 1), (608, 208, 3), (608, 16, 3)])
def test_formulas_of_products_in_e4m3(d, h, k, activation, save):
    s = memory.LayerShape(512, d, h, 5, k, activation=activation, precision="fp8")
    plan, (forward, *backward) = memory.layer(s, save), explain.rehearse(s, save, limits_of("sm90"))
    saved_beyond_x = max(plan.saved_bytes - s.L * s.d * s.b, 0)
    of_forward = saved_beyond_x + memory.output(s).nbytes + plan.forward_peak_bytes
    assert forward.peak_bytes - of_forward in (0, 4)  # 4: a tile counter
    for of_pass in backward:
        assert of_pass.peak_bytes - plan.backward_peak_bytes in (0, 4)
        assert of_pass.kept_bytes == memory.total(memory.gradients(s))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_few_large_experts_take_split_k(activation, transposed, monkeypatch):
    """A gradient of 3 tiles in one memory order has 4 in the other, and other splits: dw2 3 and transposed 4, each half
    of dw1 4 and 3. Launches and memory are those of the order at hand."""
    device = use(monkeypatch)
    s = memory.LayerShape(
        L=30000, d=136, h=264, E=1, k=1, activation=activation, dtype="float16", transposed=transposed
    )
    layer = layer_of(s, "minimal")
    out, saved = layer.forward(device)
    before = device.peak = device.used
    device.restart()
    gradients = layer.backward(device, saved)
    plan = memory.layer(s, "minimal")
    assert device.peak - before == plan.backward_peak_bytes
    sums = [term.nbytes for stage in plan.backward for term in stage if term.name.startswith("split-K sums of ")]
    assert len(sums) == 2
    launched = launches(device)
    products = [launch for launch in launched if launch[0].entry.endswith("_wgrad")]
    added = [launch for launch in launched if launch[0].entry.startswith("wgrad_parts")]
    assert len(products) == len(added) == 2
    for (product, _, values), (add, grid, add_values), nbytes in zip(products, added, sums, strict=True):
        assert {("SPLIT_K", "1"), ("ACCUMULATE", "0"), ("OUT", "float")} <= set(product.macros)
        halves, splits, M, N = (add_values[name] for name in ("halves", "splits", "rows", "columns"))
        label, offset = add_values["sums"]
        assert values["out0"] == (label, offset) and values["out1"] == (label, offset + 4 * M * N)  # packed
        assert {"expert_stride": halves * M * N, "ldo": N, "rows": M, "columns": N}.items() <= values.items()
        assert (values["halves"], values["splits"]) == (halves, splits) and add_values["accumulate"] == 0
        assert add.entry == "wgrad_parts_float16" and grid == (-(-M * N // 8 // 256), s.E, halves)
        assert nbytes == 4 * splits * s.E * halves * M * N and splits > 1
    del out, saved, gradients
    runtime.forget()


def test_accumulated_gradients_take_no_memory(monkeypatch):
    device = use(monkeypatch)
    s = memory.LayerShape(L=400, d=64, h=32, E=4, k=2)
    layer = layer_of(s, "minimal", accumulate=("w1", "w2"))
    _, saved = layer.forward(device)
    before = device.used
    gradients = layer.backward(device, saved)
    assert gradients.w1.buffer.label == ("sum of w1",) and gradients.w2.buffer.label == ("sum of w2",)
    assert device.used - before == memory.total(memory.gradients(s)[:2])  # dx and dweights
    runtime.forget()


@pytest.fixture
def hopper(monkeypatch):
    yield use(monkeypatch)
    runtime.forget()


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("d", [64, 256, 264, 600, 2048, 4616])
def test_hoppers_panels_follow_one_another_through_one_buffer(d, order, hopper):
    """Each with its columns of the weight, and summed before the next; one that is no wider than h takes the place of
    the product."""
    L, k, E, h = 8000, 3, 5, 64
    Layer(L, k, E, d, h, order, save=None, dtype=np.float16).forward(hopper)
    launched = launches(hopper)
    products = [values for variant, _, values in launched if variant.entry == "down_fwd"]
    sums = [values for variant, _, values in launched if variant.entry.startswith("aggregate")]
    panels, in_place = gemm_config.panels(d, L * k, "sm90"), d <= h
    names = [variant.entry.split("_")[0] for variant, *_ in launched]
    assert names[-2 * len(panels) :] == ["down", "aggregate"] * len(panels)
    _, first_a, _ = products[0]["a"]
    _, (weight, first_b), _ = products[0]["b0"]
    panel = products[0]["result"]
    assert (panel == first_a) == in_place
    step = 2 if order == "row" else 2 * h
    for (column, width), product, summed in zip(panels, products, sums, strict=True):
        ld = h if in_place else width
        assert product["a"][1] == first_a
        assert product["b0"][1] == product["b1"][1] == (weight, first_b + column * step)
        expected = {"columns": width, "depth": h, "result": panel, "result_ld": ld, "num_slots": L * k}
        absent = ("first_layer", "first_layer_grad", "y_swi", "weights", "partial_sums", "tile_counter")
        assert expected.items() <= product.items() and not any(product[name] for name in absent)
        sizes = {"L": L, "k": k, "d": d, "first_column": column, "columns": width, "panel_ld": ld}
        assert summed["panel"] == panel and sizes.items() <= summed.items()
    lists = 4 * launch_config.index_lists(L, k, E)[1]
    workspace = 0 if in_place else L * k * panels[0][1] * 2
    counter = 4 if takes_tile_counter(hopper) else 0
    square = gemm_config.square_product(tuple(width for _, width in panels), L * k, E)
    row_tiles = 8 * (L * k // 192 + E + 1) if square else 0
    want = lists + row_tiles + L * k * h * 2 + L * d * 2 + workspace
    assert want <= hopper.peak <= want + counter


@pytest.mark.parametrize("long", [False, True])
def test_one_expert_per_token_needs_no_panel_on_hopper(long, hopper, monkeypatch):
    """Nor do its CTAs then form clusters, however long the product is."""
    monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_: long)
    L, d, h, E = 40, 600, 64, 5
    Layer(L, 1, E, d, h, save=None, dtype=np.float16).forward(hopper)
    variant, _, values = launches(hopper)[-1]
    assert variant.entry == "down_fwd"
    assert {("EPILOGUE", "StoreTokenRows"), ("CLUSTER_CTAS", "1")} <= set(variant.macros)
    assert {"columns": d, "depth": h, "result_ld": d, "num_slots": L, "tile_counter": 0}.items() <= values.items()
    assert values["weights"] == (("w",), 0)
    assert hopper.peak == 4 * launch_config.index_lists(L, 1, E)[1] + L * h * 2 + L * d * 2


def test_tile_counters_start_as_zeros(monkeypatch, hopper):
    monkeypatch.setattr(gemm_config, "dynamic_schedule", lambda *_: True)
    Layer(40, 3, 5, 600, 64, save=None, dtype=np.float16).forward(hopper)
    counters = {variant.entry: values.get("tile_counter") for variant, _, values in launches(hopper)}
    cleared = [entry[1:] for entry in hopper.log if entry[0] == "clear"]
    assert counters["up_fwd"] and cleared == [(counters["up_fwd"], 0, 4)] and counters["down_fwd"] == 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (898 * MIB, "898.0 MiB"), (2**40, "1.0 TiB")]
)
def test_format_bytes(nbytes, text):
    assert memory.format_bytes(nbytes) == text
