"""Programmatic dependent launches: how the driver is asked, which kernels wait, and that results do not change."""

import concurrent.futures
import ctypes
import functools
import importlib.util
import inspect
import itertools
import re
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import moeblaze_cupy as mb
from bench import nvrtc
from moeblaze_cupy.cuda import loader, overlapping_launch, runtime
from moeblaze_cupy.cuda.structs import params_of
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.router import launches as router
from moeblaze_cupy.router.options import RouterOptions
from moeblaze_cupy.selection import balance
from moeblaze_cupy.selection import launches as selection
from moeblaze_cupy.types import LayerOptions
from tests import fakes
from tests.cuda.test_compile import DISASSEMBLER, LIMITS, compiled

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
        assert len(ctypes.string_at(attributes, 72)) == overlapping_launch._ATTRIBUTE.nbytes


def test_threads_that_come_first_together_share_the_attribute():
    """Launches hold its address alone: an attribute that one thread makes and drops would leave it dangling."""
    spec = importlib.util.spec_from_file_location("no_launch_yet", overlapping_launch.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    driver, together = Driver(), threading.Barrier(2)
    module._driver = lambda: driver

    def array(*arguments):
        together.wait(60)
        return np.array(*arguments)

    module.np = SimpleNamespace(array=array, int32=np.int32)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda kernel: module.launcher(kernel, (1, 1, 1, 32, 1, 1, 0))(0, 0, 0), (77, 78)))
    one, other = (struct.unpack_from("Q", config, 40) for config, *_ in driver.calls)
    assert one == other


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


def code_of(launch) -> str:
    variant = launch.variant
    module = loader.Variant(variant.source, variant.entry if variant.macros else "", variant.macros)
    return opcodes_of(module)[variant.entry]


def has(launch, opcode) -> bool:
    return re.search(rf"\b{opcode}\b", code_of(launch)) is not None


@pytest.mark.parametrize("name", chains())
def test_the_first_launch_of_a_call_overlaps_with_nothing(name):
    first, *others = chains()[name]
    assert not first.overlaps and all(launch.overlaps for launch in others)


def test_copied_ids_are_read_after_the_launch_that_copies_them():
    listed = dispatch.configure(matrix(L, K, "int64"), E, LIMITS["90a"])
    assert listed.count and not listed.route.overlaps


# By the start of an entry: what kernels touch before they wait. Other overlapping kernels touch nothing.
BEFORE_THE_WAIT = {
    **{"router_sums": {"sequences"}, "dispatch_route": {"ids"}, "tokens_per_expert": {"ids", "sequences"}},
    **{"chosen_bits": {"ids", "chosen"}, "columns_count": {"scores", "sequences"}},
    **{"columns_split": {"scores", "sequences"}, "capacity_count": {"ids", "values", "sequences"}},
    **{"capacity_parts": {"ids", "sequences"}, "capacity_list": {"sequences"}, "capacity_mark": {"sequences"}},
    **{"weights_amax": {"first", "second"}, "quantize_weights": {"first", "second"}},
}
IDS = (np.int32, np.int64)


def of_entry(table, variant):
    return next((names for start, names in table.items() if variant.entry.startswith(start)), set())


def public_calls(device) -> dict[str, Callable[[], object]]:
    """By name: every public function with launches that overlap, in all its forms, on arrays of the fake device."""
    offsets = device.array(("sequences",), (4,), np.int32)
    found = {}
    for dtype, tokens in itertools.product(IDS, (0, 3, 4096, L)):
        named = f"{tokens} {np.dtype(dtype).name}"
        scores = device.array(("scores",), (tokens, E), np.float32)
        ids = device.array(("ids",), (tokens, K), dtype)
        pairs, of_tokens = device.array(("pairs",), (tokens,), dtype), device.array(("offsets",), (9,), np.int32)
        values = {"weights": device.array(("weights",), (tokens, K), np.float32)}
        values["priority"] = device.array(("priority",), (tokens,), np.float32)
        found[f"dispatch {named}"] = partial(mb.build_dispatch, ids, E)
        found[f"dispatch ragged {named}"] = partial(mb.build_dispatch, pairs, E, token_offsets=of_tokens)
        if tokens:
            found[f"dispatch bounded {named}"] = partial(mb.build_dispatch, ids, E, max_slots=2 * tokens)
        for sums, sequences in itertools.product(((), ("softmax", "z"), ("entropy",)), (1, offsets)):
            options = {"sums": sums, "sequences": sequences}
            by = f"{named} {len(sums)} {sequences is offsets}"
            found[f"route {by}"] = partial(mb.route, scores, K, **options)
            found[f"route of ids {by}"] = partial(mb.route, scores, ids=ids, **options)
        for sequences in (1, offsets):
            by = f"{named} {sequences is offsets}"
            for order in ("position", "choice", "weights", "priority"):
                given = {name: array for name, array in values.items() if name == order}
                call = partial(mb.limit_capacity, ids, E, 16, order=order, sequences=sequences, **given)
                found[f"limit_capacity {order} {by}"] = call
            found[f"tokens_per_expert {by}"] = partial(mb.tokens_per_expert, ids, E, sequences=sequences)
            found[f"expert_choice {by}"] = partial(mb.expert_choice, scores, 16, sequences=sequences)
        found[f"round_tokens {named}"] = partial(mb.round_tokens, scores, ids)
        found[f"list_pairs {named}"] = partial(mb.list_pairs, device.array(("mask",), (tokens, E), bool), 500)
        histogram = device.array(("histogram",), (E, 100), np.int32)
        bias, bounds = (device.array((name,), (n,), np.float32) for name, n in (("bias", E), ("bounds", 2)))
        found[f"quantile_histogram {named}"] = partial(mb.quantile_histogram, scores, ids, bias, histogram, bounds)
        for slots in (LayerOptions(), LayerOptions(identity_experts=2)):
            layer = fakes.Layer(tokens, K, E, 64, 64, ids=dtype, slots=slots, save=None)
            found[f"moe_forward {named} {slots.identity_experts}"] = partial(layer.forward, device)
    for order, gate_up in (("row", "halves"), ("row", "interleaved"), ("transposed", "halves"), ("pair", "halves")):
        arguments = fakes.Layer(4, K, 8, 256, 128, order=order).arguments(device)[3:]
        found[f"quantize_weights {order} {gate_up}"] = partial(mb.quantize_weights, *arguments, gate_up=gate_up)
    return found


SOURCES = "".join(path.read_text() for path in sorted(Path(loader.source_folder()).rglob("*.cu*")))


@functools.cache
def written_by(variant) -> set[str]:
    """The pointers of a kernel's struct that are not to const. Both tiers of a product have a struct of this name."""
    params = params_of(variant)
    structs = re.findall(rf"struct {params.struct.partition('<')[0]} {{(.*?)\n}};", SOURCES, re.DOTALL)
    read = [{name for name in params.pointers if re.search(rf"\bconst [^;/]*\*\s*{name}\b", s)} for s in structs]
    return set(params.pointers) - set.intersection(*read)


@pytest.fixture
def device(monkeypatch):
    yield fakes.use(monkeypatch)
    runtime.forget()  # kernels of this device


def test_what_is_touched_before_the_wait_no_launch_uses_that_may_still_run(monkeypatch, device):
    """A launch that does not overlap starts after all before it have ended; those behind it may run with it."""
    launcher = loader._Kernel.launcher

    def noted(self, geometry, overlaps):
        run = launcher(self, geometry, overlaps)

        def launch(*arguments):
            device.log.append(("overlaps", overlaps))
            run(*arguments)

        return launch

    monkeypatch.setattr(loader._Kernel, "launcher", noted)
    seen = set()
    for name, call in public_calls(device).items():
        device.restart()
        results = call()  # so that all that is allocated has an address of its own
        last, used, written, allocated = None, set(), set(), set()  # since the last launch that does not overlap
        for what, *entry in device.log:
            if what == "overlaps":
                overlaps = entry[0]
            elif what == "allocate":
                allocated.add(entry[0])
            elif what == "clear":
                last = what
            elif what == "launch":
                variant, _, _, values, _ = entry
                buffers = {pointer: values[pointer][0] for pointer in params_of(variant).pointers if values[pointer]}
                if overlaps:
                    assert last == "launch", (name, variant.entry)
                    seen.add(variant.entry)
                else:
                    used, written, allocated = set(), set(), set()
                for pointer in of_entry(BEFORE_THE_WAIT, variant) & buffers.keys():
                    barred = used | allocated if pointer in written_by(variant) else written
                    assert buffers[pointer] not in barred, (name, variant.entry, pointer)
                used |= set(buffers.values())
                written |= {buffers[pointer] for pointer in written_by(variant) & buffers.keys()}
                last = what
        del results
    assert seen >= {launch.variant.entry for launches in chains().values() for launch in launches if launch.overlaps}


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)
@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
@pytest.mark.parametrize("name", chains())
def test_overlapping_kernels_wait_and_those_before_let_them_start(name):
    """ACQBULK is griddepcontrol.wait, PREEXIT griddepcontrol.launch_dependents."""
    launches = chains()[name]
    for before, launch in itertools.pairwise(launches):
        assert has(launch, "ACQBULK"), launch.lines[0]
        assert has(before, "PREEXIT"), before.lines[0]


def before_the_wait(code: str, others_wait: bool) -> set[str]:
    """Opcodes of accesses to global memory, and EXIT, that a thread may come to before griddepcontrol.wait.

    BSSY says where BSYNC of the same register goes on. others_wait: a thread need not wait itself, but at the next
    barrier of the block it meets threads that have.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", code)
    place = {int(address, 16): i for i, (address, _) in enumerate(found)}
    opcodes, seen, left = set(), set(), [(0, ())]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        at, joins = state
        predicate, instruction = re.fullmatch(r"(@\S+\s+)?(.*)", found[at][1]).groups()
        opcode, following = re.match(r"\w+", instruction)[0], [at + 1]
        if opcode == "ACQBULK" or (opcode == "BAR" and others_wait):
            continue
        if opcode in ("LD", "LDG", "ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "EXIT"):
            opcodes.add(opcode)
        if opcode == "BSSY":
            register, target = re.search(r"\b(B\d+), 0x([0-9a-f]+)", instruction).groups()
            joins = tuple(sorted((dict(joins) | {register: place[int(target, 16)]}).items()))
        elif opcode == "BSYNC":
            following = [dict(joins)[re.search(r"\bB\d+", instruction)[0]]]
        elif opcode == "BRA":
            target = place[int(re.search(r"0x([0-9a-f]+)", instruction)[1], 16)]
            always = not predicate and re.fullmatch(r"BRA(\.U)?\s+0x[0-9a-f]+", instruction)
            following = [target] if always else [target, at + 1]
        elif opcode == "EXIT" and not predicate:
            following = []
        left += [(step, joins) for step in following]
    return opcodes


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)
@pytest.mark.skipif(not DISASSEMBLER, reason='needs cuobjdump and nvdisasm: pip install -e ".[compile]"')
@pytest.mark.parametrize("name", chains())
def test_machine_code_does_no_more_before_the_wait_than_the_table_says(name):
    for launch in chains()[name]:
        if launch.overlaps:
            touched = of_entry(BEFORE_THE_WAIT, launch.variant)
            written = touched & written_by(launch.variant)
            expected = {"LDG" for _ in touched - written} | {"STG" for _ in written}
            others_wait = launch.variant.entry.startswith("dispatch_route")
            assert before_the_wait(code_of(launch), others_wait) == expected, launch.lines[0]


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
