"""Memory of a dry run: beside numbers worked out by hand, and beside the buffers that a layer allocates."""

from dataclasses import replace

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import launch_config, runtime
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.tools import dry_run, memory
from moeblaze_cupy.types import ACTIVATIONS, SAVE_POLICIES, LayerOptions
from tests.fakes import Layer, launches, limits_of, use

MIB = 2**20
QWEN3_30B = memory.LayerShape(L=32768, d=2048, h=768, E=128, k=8)
PORTABLE = limits_of("sm80")


def by_name(terms):
    return {term.name: term.nbytes for term in terms}


def test_bytes_of_qwen3_30b():
    # R = 32768 * 8 = 262144 slots; a routed (R, 768) bf16 array is 384 MiB, a routed (R, 2048) one 1024 MiB.
    index = 4 * 262144 + 4 * 262144 + 4 * 129
    tiles = 8 * (2048 + 128 + 1) + 4 * 128  # and experts_by_load
    x = 128 * MIB
    recompute, fp8, minimal, paper, inference = (
        dry_run.layer(QWEN3_30B, save) for save in ("recompute", "fp8", "minimal", "paper", None)
    )
    assert recompute.saved_bytes == x + index + tiles
    assert minimal.saved_bytes == x + index + tiles + 768 * MIB
    assert paper.saved_bytes == x + index + tiles + (768 + 384) * MIB
    assert fp8.saved_bytes == x + index + tiles + 2 * 262144 * (768 + 4 * 6)  # a scale for each 128 of 768 columns
    assert inference.saved_bytes == 0
    assert memory.routed_layer(QWEN3_30B).saved_bytes == (1024 + 768 + 384 + 384 + 1024) * MIB + index

    # A panel of Hopper's is (R, 1024).
    assert recompute.forward_peak_bytes == minimal.forward_peak_bytes == fp8.forward_peak_bytes == (384 + 512) * MIB
    assert paper.forward_peak_bytes == 512 * MIB
    assert inference.forward_peak_bytes == (384 + 512) * MIB + index + tiles
    # The gradients are 128 (x) + 1 + 768 (w1) + 384 (w2) MiB; the largest stage is that of all of them.
    assert recompute.backward_peak_bytes == fp8.backward_peak_bytes == (768 + 1281) * MIB
    assert minimal.backward_peak_bytes == paper.backward_peak_bytes == 1281 * MIB
    assert memory.routed_layer(QWEN3_30B).backward_peak_bytes == (768 + 1024 + 1281) * MIB
    sizes = {"x": 128 * MIB, "weights": MIB, "w1": 768 * MIB, "w2": 384 * MIB}
    assert by_name(memory.gradients(QWEN3_30B)) == {f"gradient of {name}": size for name, size in sizes.items()}

    for save, run in (("recompute", recompute), ("minimal", minimal), ("paper", paper)):
        assert dry_run.layer(QWEN3_30B, save, PORTABLE).forward_peak_bytes == run.forward_peak_bytes
    # With 8 experts the gradient of x with its panel is the largest stage.
    few_experts = replace(QWEN3_30B, E=8)
    for limits in (PORTABLE, launch_config.H200):
        assert dry_run.layer(few_experts, "minimal", limits).backward_peak_bytes == (512 + 1 + 24 + 128) * MIB


def test_bytes_of_a_plain_layer_in_float32():
    s = memory.LayerShape(L=1000, d=96, h=200, E=7, k=3, activation="gelu", dtype="float32")
    run = dry_run.layer(s, "minimal")
    x, hidden = 384_000, 3000 * 200 * 4  # a is as large as y_swi
    lists = 4 * (3000 + 3000 + 8 + 7) + 8 * (3000 // 128 + 7 + 1)
    assert run.saved_bytes == x + lists + hidden
    assert run.forward_peak_bytes == hidden + 3000 * 96 * 4  # y_swi and the one panel, of all columns
    # When the gradient of w2 is computed there are it, the weighted y_swi, and the gradient of the router weights. The
    # router weights by row and the partial sums, one of 256 columns, are free by then, and the panel comes later.
    assert run.backward_peak_bytes == 7 * 200 * 96 * 4 + hidden + 4 * 3000


def test_bytes_of_products_in_e4m3():
    s = memory.LayerShape(L=512, d=608, h=208, E=5, k=3, precision="fp8")
    run = dry_run.layer(s, "minimal")
    x, panel, w2 = 512 * 608 * 2, 1536 * 608 * 2, 5 * 208 * 608 * 2
    lists = 4 * (1536 + 1536 + 6 + 5) + 8 * (1536 // 128 + 5 + 1)
    assert run.saved_bytes == x + lists + 1536 * 416 * 2
    assert run.forward_peak_bytes == 1536 * (208 + 4 * 2) + panel  # y_swi in e4m3, with two scales of a row
    # Of the first layer's gradient a row has 416 columns, and four scales.
    assert run.backward_peak_bytes == 1536 * (416 + 4 * 4) + panel + x + w2 + 4 * 1536


def test_bytes_of_pairs_with_a_bound():
    """Lists have all 900 pairs, other buffers the 500 rows of the bound."""
    s = memory.LayerShape(L=300, d=264, h=200, E=7, k=3, ragged=True, ids_are_int64=True, max_slots=500)
    lists = 4 * (900 + 900 + 8 + 7 + 301 + 1) + 8 * (900 // 128 + 7 + 1)  # with token_offsets and `dropped`
    run = dry_run.layer(s, "minimal")
    assert run.saved_bytes == 300 * 264 * 2 + lists + 4 * 900 + 500 * 400 * 2
    assert run.forward_peak_bytes == 500 * 200 * 2 + 500 * 264 * 2  # y_swi and a panel


def test_bytes_of_an_unreduced_layer():
    """Of the output a row is a slot's. Hopper's rows go there by a list, without a panel."""
    s = memory.LayerShape(L=300, d=96, h=200, E=7, k=3, options=LayerOptions(unreduced=True))
    run = dry_run.layer(s, "recompute")
    forward = run.passes[0]
    assert dry_run.allocation_of(forward.kept["out"]).nbytes == 900 * 96 * 2
    assert run.forward_peak_bytes == 900 * 200 * 2 + 4 * 900
    with_panel = dry_run.layer(s, "recompute", PORTABLE)
    assert with_panel.forward_peak_bytes == 900 * 200 * 2 + 900 * 96 * 2


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("bias", ["float16", "float32"])
def test_bytes_of_biases(bias, tier):
    """The gradients of 1000 experts are the largest stage, all of them."""
    s = memory.LayerShape(9, 24, 16, 1000, 2, activation="swiglu_oai", dtype="float16", gate_up="interleaved")
    biased = replace(s, bias=bias)
    plain, run = (dry_run.layer(layer, "minimal", limits_of(tier)) for layer in (s, biased))
    width = {"float16": 2, "float32": 4}[bias]
    of_biases = {"gradient of b1": width * 1000 * 32, "gradient of b2": width * 1000 * 24}
    gradients = {
        **{"gradient of x": 9 * 24 * 2, "gradient of weights": 4 * 18},
        **{"gradient of w1": 1000 * 24 * 32 * 2, "gradient of w2": 1000 * 16 * 24 * 2},
    }
    assert by_name(memory.gradients(biased)) == gradients | of_biases
    backward = run.passes[1]
    assert {name: dry_run.allocation_of(array).nbytes for name, array in backward.kept.items()} == gradients | of_biases
    assert run.backward_peak_bytes == sum(gradients.values()) + sum(of_biases.values())
    assert plain.backward_peak_bytes == sum(gradients.values())
    assert (run.saved_bytes, run.forward_peak_bytes) == (plain.saved_bytes, plain.forward_peak_bytes)


@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_what_is_alive_at_the_peak_is_the_peak(tier, save):
    for s in (QWEN3_30B, replace(QWEN3_30B, E=8, bias="float32"), replace(QWEN3_30B, L=3, activation="relu")):
        for of_pass in dry_run.layer(s, save, limits_of(tier)).passes:
            assert sum(allocation.nbytes for allocation in of_pass.at_peak()) == of_pass.peak_bytes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save", ["recompute", "minimal", "paper", "fp8"])
def test_saved_bytes_on_the_cpu(activation, save):
    """The NumPy backend saves as much as a GPU."""
    s = memory.LayerShape(L=50, d=24, h=40, E=6, k=2, activation=activation, dtype="float32")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((s.L, s.d), np.float32)
    weights, ids = mb.route(rng.standard_normal((s.L, s.E), np.float32), s.k)
    w1 = rng.standard_normal((s.E, s.d, s.g * s.h), np.float32)
    w2 = rng.standard_normal((s.E, s.h, s.d), np.float32)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, activation=activation, save=save)
    assert saved.nbytes + x.nbytes == dry_run.layer(s, save).saved_bytes


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
@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_a_dry_run_allocates_what_the_layer_does(save, tier, d, k, E, max_slots, activation, ids_dtype, monkeypatch):
    device = use(monkeypatch, limits_of(tier))
    fields = {"activation": activation, "dtype": "float16", "max_slots": max_slots}
    s = memory.LayerShape(512, d, 200, E, k, ids_are_int64=ids_dtype == "int64", **fields)
    assert_allocates(device, s, save, limits_of(tier))


OPTIONS = [
    (False, LayerOptions(weights_on="input")),
    (False, LayerOptions(identity_experts=3)),
    (False, LayerOptions(unreduced=True)),
    (True, LayerOptions(unreduced=True, weights_on="input")),
    (True, LayerOptions(identity_experts=3, weights_on="input")),
    (True, LayerOptions()),
]


@pytest.mark.parametrize("ids_are_int64", [False, True])
@pytest.mark.parametrize(("ragged", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize(("d", "k", "max_slots"), [(64, 1, None), (600, 3, None), (600, 3, 700)])
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_dry_runs_of_slot_options(save, tier, d, k, max_slots, ragged, options, ids_are_int64, monkeypatch):
    s = memory.LayerShape(512, d, 200, 5, k, dtype="float16", ragged=ragged, options=options)
    s = replace(s, ids_are_int64=ids_are_int64, max_slots=max_slots)
    assert_allocates(use(monkeypatch, limits_of(tier)), s, save, limits_of(tier))


def assert_allocates(device, s, save, limits):
    """What a dry run says, at the peaks and in the end."""
    run, layer = dry_run.layer(s, save, limits), layer_of(s, save)
    x_bytes = s.L * s.d * s.b
    out, saved = layer.forward(device)
    of_forward, *of_backward = run.passes
    assert (device.peak, device.used) == (of_forward.peak_bytes, of_forward.kept_bytes)
    assert out.nbytes == (s.k if s.options.unreduced else 1) * x_bytes
    assert bool(of_backward) == (save is not None)
    if save is None:
        return
    assert saved.nbytes == run.saved_bytes - x_bytes == device.used - out.nbytes

    before = device.peak = device.used
    gradients = layer.backward(device, saved)
    assert device.peak - before == run.backward_peak_bytes
    assert device.used - before == of_backward[0].kept_bytes == memory.total(memory.gradients(s))
    held = {name: getattr(gradients, name) for name in ("x", "weights", "w1", "w2")}
    assert {f"gradient of {name}": array.nbytes for name, array in held.items() if array is not None} == by_name(
        memory.gradients(s)
    )
    del held
    del out, saved, gradients
    runtime.forget()


def takes_tile_counter(device):
    return any(values.get("tile_counter") for _, _, values in launches(device))


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
    run = dry_run.layer(s, "minimal")
    assert device.peak - before == run.backward_peak_bytes
    backward = run.passes[1]
    sums = [a.nbytes for a in backward.run.allocations if backward.contents(a) == "split-K sums"]
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
    panels, in_place = gemm_config.panels(d, L * k)[0], d <= h
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
    square, _ = gemm_config.square_product(tuple(width for _, width in panels), L * k, E)
    row_tiles = 8 * (L * k // 192 + E + 1) if square else 0
    want = lists + row_tiles + L * k * h * 2 + L * d * 2 + workspace
    assert want <= hopper.peak <= want + counter


@pytest.mark.parametrize("long", [False, True])
def test_one_expert_per_token_needs_no_panel_on_hopper(long, hopper, monkeypatch):
    """Nor do its CTAs then form clusters, however long the product is."""
    monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_: (long, ""))
    L, d, h, E = 40, 600, 64, 5
    Layer(L, 1, E, d, h, save=None, dtype=np.float16).forward(hopper)
    variant, _, values = launches(hopper)[-1]
    assert variant.entry == "down_fwd"
    assert {("EPILOGUE", "StoreTokenRows"), ("CLUSTER_CTAS", "1")} <= set(variant.macros)
    assert {"columns": d, "depth": h, "result_ld": d, "num_slots": L, "tile_counter": 0}.items() <= values.items()
    assert values["weights"] == (("w",), 0)
    assert hopper.peak == 4 * launch_config.index_lists(L, 1, E)[1] + L * h * 2 + L * d * 2


def test_tile_counters_start_as_zeros(monkeypatch, hopper):
    monkeypatch.setattr(gemm_config, "dynamic_schedule", lambda *_: (True, ""))
    Layer(40, 3, 5, 600, 64, save=None, dtype=np.float16).forward(hopper)
    counters = {variant.entry: values.get("tile_counter") for variant, _, values in launches(hopper)}
    cleared = [entry[1:] for entry in hopper.log if entry[0] == "clear"]
    assert counters["up_fwd"] and cleared == [(counters["up_fwd"], 0, 4)] and counters["down_fwd"] == 0


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (898 * MIB, "898.0 MiB"), (2**40, "1.0 TiB")]
)
def test_format_bytes(nbytes, text):
    assert memory.format_bytes(nbytes) == text
