"""The Hopper kernels and the host code that launches them, without a GPU: as test_device_code.py, on the emulator's
mbarriers, bulk tensor copies, wgmma and clusters.

Few multiprocessors make the grids persistent. Sums over K take more steps than the ring has stages, so that it wraps in
both parities.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import test_device_code as portable
from cases import Case, make_inputs
from emulator import KERNELS, EmulatorError, build
from test_device_code import DTYPES, MARGIN, TOLERANCES, Layer, differences, emulated, in_float64

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.launch_config import DeviceLimits

ONE_PAIR = DeviceLimits(90, 2, 232448, 233472)
TWO_PAIRS = replace(ONE_PAIR, multiprocessors=4)

# Two experts of 190 rows, the others without any; a last tile of rows, of columns and of K that is not full.
GATED = Case(L=190, k=2, E=5, d=344, h=136, routing="empty_experts")
# Weights that are contiguous the other way. An expert has more rows than a weight gradient looks up at once.
PLAIN = Case(L=530, k=2, E=3, d=72, h=328, routing="one_expert", order="transposed", activation="gelu")
# More tiles to a block than it keeps notes of.
SHORT = Case(L=150, k=2, E=20, d=72, h=136)
TO_TOKENS = Case(L=150, k=1, E=3, d=264, h=72, routing="absent")


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    """Sets how blocks share the work, whatever the sizes: by claims, in pairs, an expert's rows in parts."""

    def chosen(claims=False, paired=False, parts=1):
        monkeypatch.setattr(launch_config, "claims_tiles", lambda *_: claims)
        monkeypatch.setattr(launch_config, "pairs_blocks", lambda *_: paired)
        monkeypatch.setattr(launch_config, "wgrad_parts", lambda *_: parts)

    chosen()
    return chosen


def on_hopper(limits=ONE_PAIR, **options):
    return emulated(limits, tier="sm90", **options)


def gemms_compiled():
    """(entry, PAIRED or None) of the GEMM kernels that were launched. All are Hopper's."""
    variants = [variant for _, variant in loader._kernels if variant.source.startswith("grouped_")]
    assert all(variant.source.endswith("_sm90.cu") for variant in variants)
    return {(variant.entry, dict(variant.macros).get("PAIRED")) for variant in variants}


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
def test_claims_pairs_and_orders_do_not_change_a_bit(choose, case):
    """Whichever block comes to a tile first, whichever fetches its weights, one after the other or in turns."""
    inputs, found = make_inputs(case, 0, DTYPES["bfloat16"]), []
    ways = [
        (ONE_PAIR, 0, 1, {}),
        (ONE_PAIR, 1, 2, {"claims": True}),
        (ONE_PAIR, 2, 1, {"claims": True, "paired": True}),
        (TWO_PAIRS, 0, 2, {"claims": True, "paired": True}),
        (TWO_PAIRS, 3, 2, {"claims": True, "paired": True}),
        (replace(ONE_PAIR, multiprocessors=64), 4, 2, {"paired": True}),  # fewer tiles than blocks
    ]
    for limits, seed, clusters_at_once, way in ways:
        choose(**way)
        with on_hopper(limits, seed=seed, clusters_at_once=clusters_at_once) as device:
            layer = Layer(device, inputs)
            found.append(layer.run())
            paired = str(int(way.get("paired", False)))
            assert {("up_fwd", paired), ("up_bwd", paired)} < gemms_compiled()
    layer.assert_matches_reference(found[-1])
    assert [differences(found[0], other) for other in found[1:]] == [[]] * (len(ways) - 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_weight_gradients_in_parts_and_accumulated(choose, seed):
    """The gradient of w1 from parts of each expert's rows; that of w2 added to numbers that are there."""
    inputs = make_inputs(GATED, 0, DTYPES["bfloat16"])
    with on_hopper(seed=seed) as device:
        layer = Layer(device, inputs)
        want = layer.run(keep_saved=True)
        _, saved = layer.forward()
        choose(parts=3)
        in_parts = layer.backward(saved, keep_saved=True, needs=("w1",))
        choose()
        total = device.allocate(inputs[4].shape, np.float32, MARGIN)
        start = np.random.default_rng(1).standard_normal(total.shape).astype(np.float32)
        total[:] = start
        layer.backward(saved, needs=("w2",), accumulate={"w2": total})
        device.synchronize()
        assert "wgrad_parts_bfloat16" in device.launched
        layer.assert_matches_reference(in_parts)
    added = np.asarray(total) - start
    exact = in_float64(want["w2"])
    assert np.linalg.norm(added - exact) <= TOLERANCES["bfloat16"] * np.linalg.norm(exact)
    idle = np.setdiff1d(np.arange(GATED.E), inputs[1])
    np.testing.assert_array_equal(np.asarray(total)[idle], start[idle])


CORE, GEMM, WGRAD, EPILOGUE = "gemm_core_sm90.cuh", "grouped_gemm_sm90.cu", "grouped_wgrad_sm90.cu", "epilogue_sm90.cuh"


class Mutation(NamedTuple):
    """`text`, which is once in `file`, becomes `instead` in one kernel."""

    entry: str
    file: str
    text: str
    instead: str
    paired: bool = False
    case: Case = GATED


FULL = "wait(barriers.full + 8 * ring.stage, ring.parity);\n        if (active) multiply(true);"
EMPTY = "wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);\n                if (step =="

MUTATIONS = {
    "first wait for a stage dropped": Mutation("up_fwd", CORE, FULL, "if (active) multiply(true);"),
    "parity never flipped": Mutation("up_fwd", CORE, "stage = 0, parity ^= 1", "stage = 0"),
    "stage released before its products": Mutation("up_fwd", CORE, "if (!drains) wgmma_wait<1>();", ""),
    "wait for a free stage with the other parity": Mutation("up_fwd", GEMM, EMPTY, EMPTY.replace(" ^ 1", "")),
    "copies not awaited": Mutation("up_fwd", GEMM, "cp_async_mbarrier_arrive(full);", "mbarrier_arrive(full);"),
    "claim not awaited": Mutation("up_fwd", GEMM, "wait(claim_full, number / FOUND & 1);", "", case=SHORT),
    "bytes of A not announced": Mutation("down_fwd", GEMM, "B_BYTES + Rows::BYTES);", "B_BYTES);"),
    "released to one's own block alone": Mutation(
        "up_fwd", CORE, "threadIdx.x % 32 < BLOCKS", "threadIdx.x % 32 < 1", True
    ),
    "cluster not awaited": Mutation(
        "up_fwd", CORE, "            cluster_arrive();\n            cluster_wait();", "", True
    ),
    "exit before the other block's releases": Mutation(
        "up_fwd", GEMM, "BLOCKS == 2 && stage < STAGES;", "false;", True
    ),
    "rows of a and b not awaited": Mutation("down_bwd", EPILOGUE, "        cp_async_wait<1>();\n", ""),
    "tokens not awaited": Mutation("down_wgrad", WGRAD, "                named_barrier(1, 128);\n", ""),
}


@pytest.fixture(scope="module")
def mutated():
    """The mutated kernels in compilation, all of them at once."""
    recorded, plain = {}, portable._compiled

    def compiled(source, code, macros):
        recorded[dict(macros).get("ENTRY"), dict(macros).get("PAIRED") == "1"] = source, code, macros
        return plain(source, code, macros)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "_compiled", compiled)
        for paired in (False, True):
            patch.setattr(launch_config, "pairs_blocks", lambda *_, paired=paired: paired)
            with on_hopper() as device:
                Layer(device, make_inputs(GATED, 0, DTYPES["bfloat16"])).run()

    def build_with(mutation):
        source, code, macros = recorded[mutation.entry, mutation.paired]
        text = code if mutation.file == source else (KERNELS / mutation.file).read_text()
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
    choose(claims=True, paired=mutation.paired)
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
