"""The Hopper kernels and the host code that launches them, without a GPU: as test_device_code.py, on the emulator's
mbarriers, bulk tensor copies, wgmma and clusters.

Few multiprocessors make the grids persistent. Sums over K take two or three steps more than the ring has stages, so that
it wraps in both parities.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import test_device_code as portable
from cases import Case, make_inputs
from emulator import KERNELS, EmulatorError, build
from test_device_code import DTYPES, MARGIN, TOLERANCES, Layer, differences, emulated, in_float64

from moeblaze_cupy import launch_config, loader, runtime
from moeblaze_cupy.launch_config import DeviceLimits

ONE_PAIR = DeviceLimits(90, 2, 232448, 233472)
TWO_PAIRS = replace(ONE_PAIR, multiprocessors=4)

# Two experts of 190 rows, the others without any; a last tile of rows, of columns and of K that is not full.
GATED = Case(L=190, k=2, E=5, d=344, h=136, routing="empty_experts")
# Weights that are contiguous the other way. An expert has more rows than a weight gradient looks up at once.
PLAIN = Case(L=530, k=2, E=3, d=72, h=328, routing="one_expert", order="transposed", activation="gelu")
TO_TOKENS = Case(L=150, k=1, E=3, d=264, h=72, routing="absent")


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    """Sets how blocks share the work, whatever the sizes: by claims, in pairs, an expert's rows in parts."""

    def chosen(claims=False, paired=False, parts=1):
        monkeypatch.setattr(launch_config, "claims_tiles", lambda *_: claims)
        monkeypatch.setattr(launch_config, "pairs_blocks", lambda *_: paired)
        monkeypatch.setattr(launch_config, "wgrad_parts", lambda *_: parts)
        runtime.forget()

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


def test_claims_pairs_and_orders_do_not_change_a_bit(choose):
    """Whichever block comes to a tile first, whichever fetches its weights, one after the other or in turns."""
    inputs, found = make_inputs(GATED, 0, DTYPES["bfloat16"]), []
    ways = [
        (ONE_PAIR, 0, 1, {}),
        (ONE_PAIR, 1, 2, {"claims": True}),
        (ONE_PAIR, 0, 1, {"paired": True}),
        (TWO_PAIRS, 2, 4, {"claims": True}),
        (TWO_PAIRS, 0, 2, {"claims": True, "paired": True}),
        (TWO_PAIRS, 3, 2, {"claims": True, "paired": True}),
        (TWO_PAIRS, 4, 1, {"claims": True, "paired": True}),
        (replace(ONE_PAIR, multiprocessors=64), 5, 2, {"paired": True}),  # fewer tiles than blocks
    ]
    for limits, seed, clusters_at_once, way in ways:
        choose(**way)
        with on_hopper(limits, seed=seed, clusters_at_once=clusters_at_once) as device:
            found.append(Layer(device, inputs).run())
            paired = str(int(way.get("paired", False)))
            assert {("up_fwd", paired), ("up_bwd", paired)} < gemms_compiled()
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
FULL = "wait(barriers.full + 8 * ring.stage, ring.parity);"
EMPTY = "wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);"

# By name: the entry and whether in pairs, the file, a text in it, and what takes its place.
MUTATIONS = {
    "first wait for a stage dropped": (
        "up_fwd",
        False,
        CORE,
        f"        {FULL}\n        if (active) multiply(true);",
        "multiply(true);",
    ),
    "later waits for stages dropped": ("up_fwd", False, CORE, f"if (!full) {FULL}", ""),
    "parity never flipped": ("up_fwd", False, CORE, "stage = 0, parity ^= 1", "stage = 0"),
    "stage released before its products": ("up_fwd", False, CORE, "if (!drains) wgmma_wait<1>();", ""),
    "last products not awaited": (
        "up_fwd",
        False,
        CORE,
        "    wgmma_wait<0>();\n    if (steps > 0)",
        "    if (steps > 0)",
    ),
    "no wgmma.fence": ("up_fwd", False, CORE, "        wgmma_fence();\n", ""),
    "wait for a free stage dropped": (
        "up_fwd",
        False,
        GEMM,
        f"                {EMPTY}\n                if (step",
        "if (step",
    ),
    "wait for a free stage with the other parity": (
        "up_fwd",
        False,
        GEMM,
        f"                {EMPTY}\n                if (step",
        "wait(barriers.empty + 8 * ring.stage, ring.parity);\nif (step",
    ),
    "copies' arrival not awaited": ("up_fwd", False, GEMM, "cp_async_mbarrier_arrive(full);", "mbarrier_arrive(full);"),
    "one arrival too few": ("up_fwd", False, GEMM, "ARRIVALS = 128 + 1", "ARRIVALS = 128"),
    "claim not awaited": ("up_fwd", False, GEMM, "wait(claim_full, number / FOUND & 1);", ""),
    "claim awaited with the other parity": ("up_fwd", False, GEMM, "number / FOUND & 1", "~number / FOUND & 1"),
    "bytes of A not announced": ("down_fwd", False, GEMM, "B_BYTES + Rows::BYTES);", "B_BYTES);"),
    "too many bytes announced": ("down_fwd", False, GEMM, "B_BYTES + Rows::BYTES);", "B_BYTES + Rows::BYTES + 16);"),
    "released to one's own block alone": ("up_fwd", True, CORE, "threadIdx.x % 32 < BLOCKS", "threadIdx.x % 32 < 1"),
    "cluster not awaited": ("up_fwd", True, CORE, "            cluster_arrive();\n            cluster_wait();\n", ""),
    "block does not wait for the other's releases": (
        "up_fwd",
        True,
        GEMM,
        "BLOCKS == 2 && stage < STAGES; ++stage",
        "false; ++stage",
    ),
    "rows overwritten while read": ("down_bwd", False, EPILOGUE, "        cp_async_wait<1>();\n", ""),
    "tokens not awaited": ("down_wgrad", False, WGRAD, "                named_barrier(1, 128);\n", ""),
    "wait for a free stage of rows dropped": ("down_wgrad", False, WGRAD, f"                {EMPTY}\n", ""),
}


@cache
def _pool():
    return ThreadPoolExecutor(2)


@cache
def _mutated(name, source, code, macros):
    _, _, file, text, instead = MUTATIONS[name]
    if file == source:
        assert code.count(text) == 1, f"{file} has {code.count(text)} times {text!r}"
        return _pool().submit(build, source, dict(macros), code.replace(text, instead))
    header = (KERNELS / file).read_text()
    assert header.count(text) == 1, f"{file} has {header.count(text)} times {text!r}"
    return _pool().submit(build, source, dict(macros), code, {file: header.replace(text, instead)})


@cache
def _right(paired):
    """Results without mutations."""
    with on_hopper() as device:
        return Layer(device, make_inputs(GATED, 0, DTYPES["bfloat16"])).run()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_reported(monkeypatch, choose, name):
    """An error or another result, under some order of threads."""
    entry, paired, *_ = MUTATIONS[name]
    plain = portable._compiled
    choose(claims=True, paired=paired)
    right = _right(paired)

    def compiled(source, code, macros):
        return (
            _mutated(name, source, code, macros) if dict(macros).get("ENTRY") == entry else plain(source, code, macros)
        )

    monkeypatch.setattr(portable, "_compiled", compiled)
    for seed in range(4):
        with on_hopper(seed=seed) as device:
            layer = Layer(device, make_inputs(GATED, 0, DTYPES["bfloat16"]))
            try:
                results = {"out": layer.forward()[0]} if entry.endswith("_fwd") else layer.run()
                device.synchronize()
            except EmulatorError as error:
                print(error)
                return
            if differences(results, right):
                print("other results:", differences(results, right))
                return
    pytest.fail("no order of threads shows it")
