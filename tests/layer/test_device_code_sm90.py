"""The Hopper kernels and the host code that launches them, without a GPU: as test_device_code.py, on the emulator's
mbarriers, TMA, wgmma and clusters.

Few multiprocessors make the grids persistent. Sums over K take two or three steps more than the pipeline has
stages, so that it wraps with both phases.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.layer import backward_api as backward
from tests.cases import Case, make_inputs
from tests.emulator import KERNELS, EmulatorError, build
from tests.layer import test_device_code as portable
from tests.layer.test_device_code import DTYPES, MARGIN, TOLERANCES, Layer, differences, emulated, in_float64

ONE_CLUSTER = DeviceLimits(90, 2, 232448, 233472)
TWO_CLUSTERS = replace(ONE_CLUSTER, multiprocessors=4)

# Two experts of 190 rows, the others without any; a last tile of rows, of columns and of K that is not full.
GATED = Case(L=190, k=2, E=5, d=344, h=136, routing="empty_experts")
# Weights that are contiguous the other way. An expert has more rows than a weight gradient looks up at once.
PLAIN = Case(L=530, k=2, E=3, d=72, h=328, routing="one_expert", order="transposed", activation="gelu")
# More tiles to a CTA than the queue of tiles has entries.
SHORT = Case(L=150, k=2, E=20, d=72, h=136)
TO_TOKENS = Case(L=150, k=1, E=3, d=264, h=72, routing="absent")


def choose_schedule(monkeypatch, dynamic=False, clusters=False):
    """Sets how CTAs share the work of products, whatever the sizes: by the dynamic schedule, in clusters."""
    monkeypatch.setattr(gemm_config, "dynamic_schedule", lambda *_: (dynamic, ""))
    monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_: (clusters, ""))
    runtime.forget()


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    """As `choose_schedule`, and whether weight gradients go by split-K."""

    def chosen(dynamic=False, clusters=False, splits=1):
        monkeypatch.setattr(gemm_config, "split_k", lambda *_: (splits, ""))
        choose_schedule(monkeypatch, dynamic, clusters)

    chosen()
    return chosen


def on_hopper(limits=ONE_CLUSTER, **options):
    return emulated(limits, tier="sm90", **options)


def gemms_compiled():
    """(entry, CLUSTER_CTAS or None) of the GEMM kernels that were launched. All are Hopper's."""
    variants = [variant for _, variant in loader._kernels if variant.source.startswith("grouped_")]
    assert all(variant.source.endswith("_sm90.cu") for variant in variants)
    return {(variant.entry, dict(variant.macros).get("CLUSTER_CTAS")) for variant in variants}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("case", "dtype", "save"),
    [(GATED, "bfloat16", "minimal"), (PLAIN, "float16", "minimal"), (TO_TOKENS, "bfloat16", "paper")],
    ids=["gated", "plain", "to_tokens"],
)
def test_layer(case, dtype, save, seed):
    with on_hopper(seed=seed) as device:
        layer = Layer(device, make_inputs(case, 0, DTYPES[dtype]), case.activation)
        results = layer.run(save)
        layer.assert_matches_reference(results)
        assert {"up_fwd", "down_fwd", "down_bwd", "up_bwd"} < {entry for entry, _ in gemms_compiled()}
        idle = np.setdiff1d(np.arange(case.E), layer.inputs[1])
        for name in ("w1", "w2"):
            assert not in_float64(results[name])[idle].any()  # exact zeros


@pytest.mark.parametrize("case", [GATED, SHORT], ids=["few_tiles", "many_tiles"])
def test_schedules_clusters_and_orders_do_not_change_a_bit(choose, case):
    """Whichever CTA comes to a tile first, whichever fetches its weights, one after the other or in turns."""
    inputs, found = make_inputs(case, 0, DTYPES["bfloat16"]), []
    ways = [
        (ONE_CLUSTER, 0, 1, {}),
        (ONE_CLUSTER, 1, 2, {"dynamic": True}),
        (ONE_CLUSTER, 2, 1, {"dynamic": True, "clusters": True}),
        (TWO_CLUSTERS, 0, 2, {"dynamic": True, "clusters": True}),
        (TWO_CLUSTERS, 3, 2, {"dynamic": True, "clusters": True}),
        (replace(ONE_CLUSTER, multiprocessors=64), 4, 2, {"clusters": True}),  # fewer tiles than blocks
    ]
    for limits, seed, clusters_at_once, way in ways:
        choose(**way)
        with on_hopper(limits, seed=seed, clusters_at_once=clusters_at_once) as device:
            layer = Layer(device, inputs)
            found.append(layer.run())
            clusters = "2" if way.get("clusters") else "1"
            assert {("up_fwd", clusters), ("up_bwd", clusters)} < gemms_compiled()
    layer.assert_matches_reference(found[-1])
    assert [differences(found[0], other) for other in found[1:]] == [[]] * (len(ways) - 1)


@pytest.mark.parametrize("case", [GATED, PLAIN], ids=["gated", "plain"])
def test_places_of_rows_do_not_change_a_bit(case):
    """Each token's results, wherever its rows lie in their tiles."""
    inputs, found = make_inputs(case, 0, DTYPES["bfloat16"]), []
    for turn in range(5):
        of_tokens = [np.roll(array, turn, axis=0) for array in (inputs[0], inputs[1], inputs[2], inputs[5])]
        with on_hopper() as device:
            layer = Layer(device, (*of_tokens[:3], *inputs[3:5], of_tokens[3]), case.activation)
            results = layer.run(needs=("x", "weights"))
            found.append({name: np.roll(in_float64(value), -turn, axis=0) for name, value in results.items()})
    assert found[0].keys() == {"out", "x", "weights"} and all(value.any() for value in found[0].values())
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_tiles_and_panels_do_not_change_a_bit(choose, monkeypatch):
    """Whichever of them the number of slots chooses."""
    case, panels = Case(L=60, k=3, E=3, d=776, h=72, routing="absent"), gemm_config.panels.__wrapped__
    inputs, found = make_inputs(case, 0, DTYPES["bfloat16"]), []
    for square, elements in ((False, 2**24), (True, 2**24), (False, 0), (True, 0)):
        monkeypatch.setattr(gemm_config, "square_product", lambda *_, square=square: (square, ""))
        monkeypatch.setattr(gemm_config, "ONE_PANEL_ELEMENTS", elements)
        monkeypatch.setattr(gemm_config, "panels", panels)  # without what it has kept
        choose()
        with on_hopper() as device:
            layer = Layer(device, inputs)
            found.append(layer.run())
            assert device.launched.count("down_fwd") == (1 if elements else 2)
            assert ("square_tiles" in device.launched) == square
    layer.assert_matches_reference(found[-1])
    assert [differences(found[0], other) for other in found[1:]] == [[]] * 3


@pytest.mark.parametrize(("seed", "square"), [(0, False), (1, True)])
def test_weight_gradients_by_split_k_and_accumulated(choose, monkeypatch, seed, square):
    """The gradient of w1 by split-K, in either kind of tiles; that of w2 added to numbers that are there."""
    monkeypatch.setattr(gemm_config, "square_wgrad", lambda *_: (square, ""))
    runtime.forget()
    inputs = make_inputs(GATED, 0, DTYPES["bfloat16"])
    with on_hopper(seed=seed) as device:
        layer = Layer(device, inputs)
        want = layer.run(keep_saved=True)
        _, saved = layer.forward()
        choose(splits=3)
        by_split_k = layer.backward(saved, keep_saved=True, needs=("w1",))
        choose()
        total = device.allocate(inputs[4].shape, np.float32, MARGIN)
        start = np.random.default_rng(1).standard_normal(total.shape).astype(np.float32)
        total[:] = start
        layer.backward(saved, needs=("w2",), accumulate={"w2": total})
        device.synchronize()
        assert "wgrad_parts_bfloat16" in device.launched
        tiles = {dict(variant.macros).get("BM") for _, variant in loader._kernels if variant.source == WGRAD}
        assert tiles == ({"192", None} if square else {None})
        layer.assert_matches_reference(by_split_k)
    added = np.asarray(total) - start
    exact = in_float64(want["w2"])
    assert np.linalg.norm(added - exact) <= TOLERANCES["bfloat16"] * np.linalg.norm(exact)
    idle = np.setdiff1d(np.arange(GATED.E), inputs[1])
    np.testing.assert_array_equal(np.asarray(total)[idle], start[idle])


def test_weight_gradients_are_summed_with_those_of_other_ranks():
    """Of rank 1 of 2; the gradients of rank 0's experts go elsewhere, before the ranks are told."""
    case = replace(GATED, E=6)
    inputs, random = make_inputs(case, 0, DTYPES["bfloat16"]), np.random.default_rng(1)
    with on_hopper(seed=2) as device:
        layer = Layer(device, inputs)
        want = layer.run(keep_saved=True)
        _, saved = layer.forward()
        pending = mb.moe_backward_data(layer.on_device[5], saved, needs=())[1]
        needs, arrays, stored = ("w1", "w2"), {}, {}
        for name, weight in zip(needs, inputs[3:5], strict=True):
            part = 3, *weight.shape[1:]
            given = device.allocate((1, *part), weight.dtype, MARGIN), device.allocate(part, weight.dtype, MARGIN)
            given[0][:] = random.standard_normal((1, *part)).astype(weight.dtype)
            total = device.allocate(part, np.float32 if name == "w1" else weight.dtype, MARGIN)
            arrays[name] = total, *given
        totals, parts = ({name: of[i] for name, of in arrays.items()} for i in (0, 1))
        at = {name: {0: of[2]} for name, of in arrays.items()}

        def tell(name):
            device.synchronize()
            stored[name] = in_float64(arrays[name][2])

        assert backward.summed_weights(pending, needs, [1, 0], 0.5, totals, parts, at, tell, lambda name: None)
        device.synchronize()
    for name in needs:
        of_all = in_float64(want[name])
        expected = 0.5 * (of_all[3:] + in_float64(parts[name])[0])
        for got, exact in ((stored[name], of_all[:3]), (in_float64(totals[name]), expected)):
            assert np.linalg.norm(got - exact) <= TOLERANCES["bfloat16"] * np.linalg.norm(exact), name


PIPELINE, CORE = "pipeline_sm90.cuh", "gemm_core_sm90.cuh"
GEMM, WGRAD, EPILOGUE = "grouped_gemm_sm90.cu", "grouped_wgrad_sm90.cu", "epilogue_bwd_sm90.cuh"
WGRAD_TILES = "wgrad_tiles_sm90.cuh"


class Mutation(NamedTuple):
    """`text`, which is once in `file`, becomes `instead` in one kernel."""

    entry: str
    file: str
    text: str
    instead: str
    clusters: bool = False
    case: Case = GATED


FULL = "barriers.wait_full(state);\n        if (active) multiply(true);"
EMPTY = "void wait_empty(const PipelineState& state) const { wait(empty_of(state.stage), state.phase ^ 1); }"

MUTATIONS = {
    "first wait for a stage dropped": Mutation("up_fwd", CORE, FULL, "if (active) multiply(true);"),
    "phase never flipped": Mutation("up_fwd", PIPELINE, "stage = 0, phase ^= 1", "stage = 0"),
    "stage released before its products": Mutation("up_fwd", CORE, "if (!drain) wgmma_wait<1>();", ""),
    "wait for an empty stage with the other parity": Mutation("up_fwd", PIPELINE, EMPTY, EMPTY.replace(" ^ 1", "")),
    "copies not awaited": Mutation("up_fwd", GEMM, "cp_async_mbarrier_arrive(full);", "mbarrier_arrive(full);"),
    "taken index not awaited": Mutation("up_fwd", GEMM, "wait(taken_full, number / QUEUE & 1);", "", case=SHORT),
    "bytes of A not announced": Mutation("down_fwd", GEMM, "B_BYTES + Rows::TMA_BYTES);", "B_BYTES);"),
    "released in one's own CTA alone": Mutation(
        "up_fwd", PIPELINE, "threadIdx.x % 32 < CTAS", "threadIdx.x % 32 < 1", True
    ),
    "cluster not awaited": Mutation(
        "up_fwd", PIPELINE, "            cluster_arrive();\n            cluster_wait();", "", True
    ),
    "exit before the other CTA's releases": Mutation(
        "up_fwd", GEMM, "CLUSTER_CTAS == 2 && stage < STAGES;", "false;", True
    ),
    "rows of a and b not awaited": Mutation("down_bwd", EPILOGUE, "        cp_async_wait<1>();\n", ""),
    "tokens not awaited": Mutation("down_wgrad", WGRAD_TILES, "named_barrier(PRODUCER_BARRIER, WARPGROUP);\n", ""),
}


@pytest.fixture(scope="module")
def mutated():
    """The mutated kernels in compilation, all of them at once."""
    recorded, plain = {}, portable._compiled

    def compiled(source, code, macros):
        recorded[dict(macros).get("ENTRY"), dict(macros).get("CLUSTER_CTAS") == "2"] = source, code, macros
        return plain(source, code, macros)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "_compiled", compiled)
        for clusters in (False, True):
            patch.setattr(gemm_config, "uses_clusters", lambda *_, clusters=clusters: (clusters, ""))
            with on_hopper() as device:
                Layer(device, make_inputs(GATED, 0, DTYPES["bfloat16"])).run()

    def build_with(mutation):
        source, code, macros = recorded[mutation.entry, mutation.clusters]
        text = code if mutation.file == source else next(KERNELS.rglob(mutation.file)).read_text()
        assert text.count(mutation.text) == 1, (
            f"{mutation.file} has {text.count(mutation.text)} times {mutation.text!r}"
        )
        text = text.replace(mutation.text, mutation.instead)
        if mutation.file == source:
            return build(source, dict(macros), text)
        return build(source, dict(macros), code, {mutation.file: text})

    return {name: portable._compilers().submit(build_with, mutation) for name, mutation in MUTATIONS.items()}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_reported(monkeypatch, choose, mutated, name):
    """By an error or other results, under some order of threads."""
    mutation, plain = MUTATIONS[name], portable._compiled
    choose(dynamic=True, clusters=mutation.clusters)
    inputs = make_inputs(mutation.case, 0, DTYPES["bfloat16"])

    def results_of(seed):
        with on_hopper(seed=seed) as device:
            layer = Layer(device, inputs)
            if not mutation.entry.endswith("_fwd"):
                return layer.run()
            results = {"out": layer.forward()[0]}
            device.synchronize()
            return results

    def compiled(source, code, macros):
        return mutated[name] if dict(macros).get("ENTRY") == mutation.entry else plain(source, code, macros)

    right = results_of(0)
    monkeypatch.setattr(portable, "_compiled", compiled)
    for seed in range(4):
        try:
            if differences(results_of(seed), right):
                return
        except EmulatorError as error:
            assert f"kernel {mutation.entry}, block" in str(error)  # not the compiler's
            return
    pytest.fail("no order of threads shows it")
