"""Programmatic dependent launches: how the driver is asked, which kernels wait, and that results do not change."""

import ctypes
import functools
import inspect
import itertools
import re
import struct
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
from test_compile import DISASSEMBLER, LIMITS, compiled

import moeblaze_cupy as mb
from bench import nvrtc
from moeblaze_cupy import loader, overlapping_launch, runtime
from moeblaze_cupy.arrays import Layout
from moeblaze_cupy.ops import balance, dispatch, quantize, router, selection
from moeblaze_cupy.router_options import RouterOptions

L, E, K = 65536, 128, 8


@pytest.mark.parametrize(
    ("capability", "driver", "answer"),
    [(80, 13000, False), (90, 12020, False), (90, 12030, True), (100, 13000, True), (120, 12080, True)],
)
def test_which_devices_and_drivers_have_it(capability, driver, answer):
    assert overlapping_launch.supported(capability, driver) == answer


class Driver:
    """libcuda, which keeps what it is given."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def cuLaunchKernelEx(self, config, kernel, arguments, extra):
        self.calls.append((bytes(config), kernel, arguments, extra))
        return self.status


def test_the_driver_gets_geometry_stream_and_attribute(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(overlapping_launch, "_driver", lambda: driver)
    launch = overlapping_launch.launcher(77, (2, 3, 4, 128, 1, 1, 4096))
    launch(5, 99, 0)
    launch(6, 98, 0)
    for (config, kernel, arguments, extra), stream, pointer in zip(driver.calls, (5, 6), (99, 98), strict=True):
        # CUlaunchConfig: seven uint32, the stream and the attributes at multiples of 8, and their number.
        *geometry, found_stream, attributes, number = struct.unpack("7I4xQQI4x", config)
        assert (geometry, found_stream, number) == ([2, 3, 4, 128, 1, 1, 4096], stream, 1)
        assert (kernel, arguments, extra) == (77, pointer, 0)
        # CUlaunchAttribute: the id, and at byte 8 a union of 64 bytes.
        assert struct.unpack("i4xi", ctypes.string_at(attributes, 12)) == (6, 1)
        assert len(ctypes.string_at(attributes, 72)) == overlapping_launch._attribute().nbytes


def test_an_error_of_the_driver_is_raised(monkeypatch):
    monkeypatch.setattr(overlapping_launch, "_driver", lambda: Driver(status=9))
    with pytest.raises(RuntimeError, match="the driver's error 9"):
        overlapping_launch.launcher(77, (1, 1, 1, 32, 1, 1, 0))(0, 0, 0)


@pytest.mark.parametrize(
    ("overlaps", "capability", "driver", "overlapping"),
    [(True, 90, 13000, True), (False, 90, 13000, False), (True, 80, 13000, False), (True, 90, 12020, False)],
)
def test_only_launches_that_may_overlap_do(monkeypatch, overlaps, capability, driver, overlapping):
    launched = []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(driverGetVersion=lambda: driver),
        driver=SimpleNamespace(launchKernel=lambda *launch: launched.append(("plain", launch))),
    )
    monkeypatch.setitem(loader.sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(
        overlapping_launch,
        "launcher",
        lambda kernel, geometry: lambda *rest: launched.append(("overlapping", (kernel, *geometry, *rest))),
    )
    kernel = object.__new__(loader._Kernel)
    kernel.pointer, kernel.compute_capability = 77, capability
    kernel.launcher((1, 1, 1, 32, 1, 1, 0), overlaps)(5, 99, 0)
    assert launched == [("overlapping" if overlapping else "plain", (77, 1, 1, 1, 32, 1, 1, 0, 5, 99, 0))]


def matrix(rows, columns, dtype):
    return Layout((rows, columns), (columns, 1), dtype, 0)


def chains() -> dict[str, list]:
    """The launches of a call, in their order, by a name."""
    scores, ids, limits = matrix(L, E, "float32"), matrix(L, K, "int32"), LIMITS["90a"]
    sequences = selection.Sequences(1, False)
    defaults = {name: inspect.signature(mb.route).parameters[name].default for name in RouterOptions._fields}
    routed = router.configure_forward((("logits", scores),), K, RouterOptions(**defaults | {"sums": ("softmax", "z")}))
    found = {"route": [routed.route, routed.sum]}
    listed = dispatch.configure(ids, E, limits)
    found["dispatch"] = [listed.count, listed.route]
    for name, steps in (
        ("expert_choice", selection.configure_expert_choice(scores, 512, sequences, 512 * E, limits)),
        ("round_tokens", selection.configure_round_tokens(scores, ids, 128, "nearest", L * (K + 1), limits)),
    ):
        chosen = [steps.choose] if steps.choose else []
        found[name] = [steps.zeros.clear, *chosen, steps.count, steps.split, steps.finish, steps.pairs.write]
    offsets = selection.Sequences(5, True)
    steps = selection.configure_expert_choice(scores, 512, offsets, 512 * E, limits)
    found["expert_choice by offsets, to the memset"] = [steps.zeros.clear, steps.count]
    found["expert_choice by offsets, from there"] = [steps.split, steps.finish, steps.pairs.count, steps.pairs.write]
    pairs = selection.configure_pairs(L, E, L * K, True)
    found["list_pairs"] = [pairs.pack, pairs.count, pairs.write]
    for order, values in (("position", None), ("choice", None), ("weights", "float32"), ("priority", "bfloat16")):
        steps = selection.configure_capacity(ids, E, 512, order, values, sequences, limits)
        if isinstance(steps, selection.CapacityByKey):
            found[order] = [steps.zeros.clear, steps.count, steps.pick, steps.select, steps.finish]
        else:
            found[order] = [*([steps.totals.clear] if steps.totals else []), steps.count, steps.mark]
    counts = balance.configure_counts(ids, E, sequences, limits)
    found["tokens_per_expert"] = [counts.clear, counts.count]
    quantiles = balance.configure_quantiles(scores, ids, 1000, "sigmoid", limits)
    found["quantile_histogram"] = [quantiles.lines, quantiles.counts]
    w1 = Layout((E, 256, 512), (256 * 512, 512, 1), "bfloat16", 0)
    w2 = Layout((E, 256, 256), (256 * 256, 256, 1), "bfloat16", 0)
    weights = quantize.configure((w1,), w2, False)
    found["quantize_weights"] = [weights.clear, *weights.up_launches, *weights.down_launches]
    return found


@functools.cache
def opcodes_of(variant) -> dict[str, str]:
    """The machine code of each kernel of a module, for sm_90a."""
    tool, environment = DISASSEMBLER
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(variant, "90a").cubin)
        file.flush()
        command = [tool, "-sass", file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return {text.split()[0]: text for text in done.split("Function : ")[1:]}


def has(launch, opcode) -> bool:
    variant = launch.variant
    module = loader.Variant(variant.source, variant.entry if variant.macros else "", variant.macros)
    return re.search(rf"\b{opcode}\b", opcodes_of(module)[variant.entry]) is not None


@pytest.mark.parametrize("name", chains())
def test_the_first_launch_of_a_call_overlaps_with_nothing(name):
    first, *others = chains()[name]
    assert not first.overlaps and all(launch.overlaps for launch in others)


def test_copied_ids_are_read_after_the_launch_that_copies_them():
    listed = dispatch.configure(matrix(L, K, "int64"), E, LIMITS["90a"])
    assert listed.count and not listed.route.overlaps


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)
@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
@pytest.mark.parametrize("name", chains())
def test_overlapping_kernels_wait_and_those_before_let_them_start(name):
    """ACQBULK is griddepcontrol.wait, PREEXIT griddepcontrol.launch_dependents."""
    launches = chains()[name]
    for before, launch in itertools.pairwise(launches):
        assert has(launch, "ACQBULK"), launch.lines[0]
        assert has(before, "PREEXIT"), before.lines[0]


def calls():
    """By name: calls on torch arrays of a GPU, whose launches are those of `chains`."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(L, E, generator=generator, device="cuda")
    weights, ids = mb.route(scores, K)
    w1 = torch.randn(8, 256, 512, generator=generator, device="cuda").bfloat16()
    w2 = torch.randn(8, 256, 256, generator=generator, device="cuda").bfloat16()

    def lists():
        made = mb.build_dispatch(ids, E)
        return made.expert_token_indices, made.expert_token_offsets, made.token_index_map, made.experts_by_load

    def in_e4m3():
        made = mb.quantize_weights(w1, w2)
        return made.w1.view(torch.uint8), made.w1_scales, made.w2_transposed.view(torch.uint8), made.w2_scales

    def limit(**options):
        return lambda: (mb.limit_capacity(ids, E, 4000, **options),)

    def routed():
        routed_weights, routed_ids, sums = mb.route(scores, K, sums=("softmax", "z"))
        return routed_weights, routed_ids, sums.score_sums, sums.z_sums

    return {
        "route": routed,
        "dispatch": lists,
        "expert_choice": lambda: mb.expert_choice(scores, 4096),
        "round_tokens": lambda: mb.round_tokens(scores, ids),
        "list_pairs": lambda: mb.list_pairs(scores > 1, 2_000_000),
        "position": limit(),
        "choice": limit(order="choice"),
        "weights": limit(order="weights", weights=weights),
        "priority": limit(order="priority", priority=weights.amax(dim=1)),
        "tokens_per_expert": lambda: (mb.tokens_per_expert(ids, E),),
        "quantize_weights": in_e4m3,
    }


@pytest.mark.gpu
def test_results_do_not_change(monkeypatch):
    """Calls in a row and graph replays of them, with outputs that are poisoned between two of them."""
    import torch

    named = calls()
    with monkeypatch.context() as patch:
        patch.setattr(overlapping_launch, "supported", lambda *_: False)
        runtime.forget()
        want = {name: [array.cpu() for array in call()] for name, call in named.items()}
    runtime.forget()
    for _ in range(20):
        found = {name: call() for name, call in named.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = {name: call() for name, call in named.items()}
    for repetition in range(50):
        for arrays in captured.values():
            for array in arrays:
                array.fill_(77)
        graph.replay()
        for name, arrays in (found if repetition == 0 else captured).items():
            for i, (array, expected) in enumerate(zip(arrays, want[name], strict=True)):
                assert torch.equal(array.cpu(), expected), (name, i, repetition)
