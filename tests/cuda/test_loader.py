"""Kernel sources to kernels: which constants a step compiles with, what names a build, what is compiled when."""

import dataclasses
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from bench import kernel_variants as all_variants
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import launch_config, loader, runtime, structs
from moeblaze_cupy.cuda.loader import Variant
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm.variants import gemm_variant
from moeblaze_cupy.types import (
    ACTIVATIONS,
    FORMS,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    WEIGHT_FORMATS,
    LayerOptions,
)
from tests.cases import ORDERS
from tests.cuda.test_compile import SOURCES, router_variants
from tests.fakes import Layer, launches, use

ROOT = Path(loader.__file__).resolve().parent.parent.parent
A100 = launch_config.DeviceLimits(80, 108, 166912, 167936)
GEMMS, WGRADS = ("up_fwd", "down_fwd", "down_bwd", "up_bwd"), ("down_wgrad", "up_wgrad")


def macros(entry, **options):
    defaults = {"dtype": "bfloat16", "activation": "swiglu", "transposed": False, "aligned": True}
    return dict(gemm_variant(entry, **defaults | options).macros)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("entry", "transposed", "k_contiguous"),
    [  # Forward reduces over the rows of a weight, backward over its columns.
        ("up_fwd", False, 0),
        ("up_fwd", True, 1),
        ("down_fwd", False, 0),
        ("down_fwd", True, 1),
        ("down_bwd", False, 1),
        ("down_bwd", True, 0),
        ("up_bwd", False, 1),
        ("up_bwd", True, 0),
    ],
)
def test_memory_order_of_the_weight_within_a_gemm(entry, transposed, k_contiguous, tier):
    assert macros(entry, transposed=transposed, tier=tier)["B_K_CONTIGUOUS"] == str(k_contiguous)


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("entry", WGRADS)
def test_dtype_of_what_a_weight_gradient_is_written_to(entry, tier):
    for accumulate, told in ((None, ("0", "bf16")), ("bfloat16", ("1", "bf16")), ("float32", ("1", "float"))):
        found = macros(entry, tier=tier, accumulate=accumulate)
        assert (found["ACCUMULATE"], found["OUT"]) == told


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("entry", "transposed", "gathered"),
    [  # P spans the strided side of the gradient in memory, Q the contiguous one; x and grad_out are gathered.
        ("up_wgrad", False, "GATHER_P"),
        ("up_wgrad", True, "GATHER_Q"),
        ("down_wgrad", False, "GATHER_Q"),
        ("down_wgrad", True, "GATHER_P"),
    ],
)
def test_operand_that_a_weight_gradient_gathers(entry, transposed, gathered, tier):
    found = macros(entry, transposed=transposed, tier=tier)
    assert {name: found[name] for name in ("GATHER_P", "GATHER_Q")} == {
        name: str(int(name == gathered)) for name in ("GATHER_P", "GATHER_Q")
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_gather_and_segments_of_each_gemm(activation):
    gated = str(int(activation in GATED_ACTIVATIONS))
    kind, number = FORMS[activation].kind, str(len(FORMS[activation].constants))
    keys = ("EPILOGUE", "GATHER", "K_SEGMENTS", "GATED", "ACTIVATION", "CONSTANTS")
    found = {entry: tuple(macros(entry, activation=activation)[key] for key in keys) for entry in GEMMS}
    assert found == {
        "up_fwd": ("ACTIVATE", "1", "1", gated, kind, number),
        "down_fwd": ("STORE", "0", "1", "0", "SILU", "0"),
        "down_bwd": ("ACTIVATE_BWD", "1", "1", gated, kind, number),
        "up_bwd": ("STORE", "0", "2" if gated == "1" else "1", "0", "SILU", "0"),
    }


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_biases_and_interleaved_columns(tier):
    """Only products in forward add a bias. With interleaved columns up_bwd sums over one segment."""
    keys = ("INTERLEAVED", "BIASED", "BIAS", "K_SEGMENTS")
    options = {"activation": "swiglu", "interleaved": True, "bias": "bfloat16", "tier": tier}
    found = {entry: tuple(macros(entry, **options)[key] for key in keys) for entry in GEMMS}
    assert found == {
        "up_fwd": ("1", "1", "bf16", "1"),
        "down_fwd": ("0", "1", "bf16", "1"),
        "down_bwd": ("1", "0", "float", "1"),
        "up_bwd": ("0", "0", "float", "1"),
    }
    epilogue = macros("up_fwd", **options)["EPILOGUE"]
    assert epilogue == ("ActivatePairs" if tier == "sm90" else "ACTIVATE")


HOPPER_EPILOGUES = {
    "up_fwd": "ActivateRows",
    "down_fwd": "StoreRows",
    "down_bwd": "ActivateBwdRows",
    "up_bwd": "StoreRows",
}


@pytest.mark.parametrize("entry", [*GEMMS, *WGRADS])
def test_tiers_have_their_own_sources_and_constants(entry):
    family = "grouped_wgrad" if entry in WGRADS else "grouped_gemm"
    options = {"dtype": "float16", "activation": "swiglu", "transposed": False, "aligned": True, "stages": 4}
    portable, hopper = (gemm_variant(entry, **options, tier=tier) for tier in ("sm80", "sm90"))
    constants = {("SPLIT_K", "0"), ("OTHERS", "0"), ("FP8", "0")}
    if entry in GEMMS:
        plain = {"STORED_Y_SWI": "0", "CLUSTER_CTAS": "1", "WEIGHT": "float"}
        plain |= {"PUSHES": "0", "FP8_SAVED": "0", "FP8": "0", "EXPERT_SCALES": "1"}
        plain |= {"LORA_IN_SPARE": "0", "LORA_STAGES": "0", "FP8_WGRAD": "0"}
        constants = {("EPILOGUE", HOPPER_EPILOGUES[entry]), *plain.items()}
    assert (portable.source, hopper.source) == (f"{family}_sm80.cu", f"{family}_sm90.cu")
    assert portable.entry == hopper.entry == dict(portable.macros)["ENTRY"] == dict(hopper.macros)["ENTRY"] == entry
    of_stages = {("MMA", "mma_fp16"), ("ALIGNED", "1"), ("STAGES", "4"), ("STEP_BYTES", "128")}
    assert of_stages <= set(portable.macros) - set(hopper.macros)
    assert set(hopper.macros) - set(portable.macros) == {("WGMMA", "wgmma_fp16"), *constants}


@functools.cache
def every_variant():
    """Variants of every source, with every option of the products and the router's that differ most."""
    found = all_variants.variants(
        ("bfloat16", "float32"),
        aligned=(True, False),
        accumulates=True,
        gate_ups=("halves", "interleaved"),
        biases=(None, "float32"),
        weights_on=("output", "input"),
        fp8=True,
        fp8_saved=True,
        formats=WEIGHT_FORMATS,
    )
    found += all_variants.variants(lora=True)
    options = {"dtype": "bfloat16", "activation": "swiglu", "transposed": False, "aligned": True, "tier": "sm90"}
    found += [gemm_variant("down_fwd", **options, to_tokens=True, pushes=True)]
    found += [gemm_variant("up_wgrad", **options, summed="float32"), *router_variants()]
    return found


def test_all_variants_of_a_source_are_given_the_same_macros():
    names = {}
    for variant in every_variant():
        given = [option[2:].partition("=")[0] for option in loader.options(variant) if option.startswith("-D")]
        names.setdefault(variant.source, set()).add(frozenset(given))
    assert names.keys() == set(SOURCES) and all(len(found) == 1 for found in names.values())


@pytest.mark.parametrize("source", SOURCES)
def test_conditions_test_macros_that_are_given(source):
    """So that a missing one is an error, a condition tests a value and not whether there is one."""
    variant = next(v for v in every_variant() if v.source == source)
    given = {option[2:].partition("=")[0] for option in loader.options(variant) if option.startswith("-D")}
    conditions = re.findall(r"^#\s*(?:el)?if(.*)", structs._code(source), re.MULTILINE)
    tested = [condition for condition in conditions if condition != "def __CUDACC_RTC__"]
    assert set(re.findall(r"[A-Za-z_]\w*", " ".join(tested))) <= given | {"__CUDA_ARCH__"}


@pytest.mark.parametrize("entry", GEMMS)
def test_options_reach_the_steps_that_have_them(entry):
    """So that a step has no two variants that are the same."""
    options = {"clusters": True, "stored_y_swi": True, "to_tokens": True, "weights_dtype": "float16"}
    found = macros(entry, dtype="float16", tier="sm90", **options)
    gathers = entry in ("up_fwd", "down_bwd")
    assert (found["CLUSTER_CTAS"], found["GATHER"]) == (("2", "1") if gathers else ("1", "0"))
    assert macros(entry, dtype="float16", tier="sm90", clusters=True)["CLUSTER_CTAS"] == "2"
    assert found["STORED_Y_SWI"] == str(int(entry == "down_bwd"))
    stores = entry in ("down_fwd", "up_bwd")
    assert found["EPILOGUE"] == ("StoreTokenRows" if stores else HOPPER_EPILOGUES[entry])
    assert found["WEIGHT"] == ("fp16" if entry == "down_fwd" else "float")
    assert macros(entry, dtype="float16", tier="sm90", weights_dtype="float16")["WEIGHT"] == "float"


@pytest.mark.parametrize("entry", WGRADS)
def test_parts_of_weight_gradients_are_unrounded_sums_on_hopper(entry):
    for accumulate in (None, "float32", "bfloat16"):
        found = macros(entry, tier="sm90", accumulate=accumulate, split_k=True)
        assert (found["SPLIT_K"], found["ACCUMULATE"], found["OUT"]) == ("1", "0", "float")
        assert macros(entry, accumulate=accumulate, split_k=True) == macros(entry, accumulate=accumulate)


@pytest.mark.parametrize("dtype", loader.ELEMENTS)
def test_elements(dtype):
    for entry in (*GEMMS, *WGRADS):
        found = macros(entry, dtype=dtype, weights_dtype=dtype)
        assert found["ELEMENT"] == loader.ELEMENTS[dtype]
        assert found["MMA"] == ("mma_fp16" if dtype == "float16" else "mma_bf16")
        hopper = macros(entry, dtype=dtype, weights_dtype=dtype, to_tokens=True, tier="sm90")
        # only rows of the output that go to their tokens meet router weights as they are
        assert hopper.get("WEIGHT", "float") == (loader.ELEMENTS[dtype] if entry == "down_fwd" else "float")


def test_kernels_that_an_activation_does_not_enter_are_shared():
    def variant(entry, activation):
        return gemm_variant(entry, dtype="bfloat16", activation=activation, transposed=False, aligned=True)

    for entry in ("down_fwd", *WGRADS):
        assert len({variant(entry, activation) for activation in ACTIVATIONS}) == 1
    assert len({variant("up_bwd", activation) for activation in GATED_ACTIVATIONS}) == 1
    assert len({variant("up_bwd", activation) for activation in PLAIN_ACTIVATIONS}) == 1
    for entry in ("up_fwd", "down_bwd"):
        assert len({variant(entry, activation) for activation in ACTIVATIONS}) == len(ACTIVATIONS)


def test_names_tell_variants_apart():
    assert Variant("aggregation.cu", "weights_bwd_float32").name == "weights_bwd_float32"
    name = gemm_variant("up_wgrad", dtype="float32", activation="silu", transposed=True, aligned=False).name
    of_arrays = "gather_p=0 gather_q=1 accumulate=0 out=float"
    assert name == f"up_wgrad element=float tf32=0 aligned=0 stages=3 step_bytes=128 {of_arrays}"
    everything = all_variants.variants(
        tuple(loader.ELEMENTS), ("row", "transposed"), ACTIVATIONS, (True, False), launch_config.H200
    )
    gemms = [v for v in everything if v.entry]
    assert len({(v.source, v.name) for v in gemms}) == len(gemms)


@pytest.mark.parametrize("limits", [A100, launch_config.H200], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("d", "h"), [(24, 40), (25, 40)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("activation", "order"), [*itertools.product(["geglu"], ORDERS), ("relu", "transposed")])
def test_variants_are_those_the_layer_launches(monkeypatch, activation, order, d, h, dtype, limits):
    """`precompile` must prepare what the first step will ask for, no more and no less."""
    device = use(monkeypatch, limits)
    launched, accumulating = set(), set()
    element = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype).type
    for weights_dtype, k, save, clusters in itertools.product(
        (np.float32, element), (1, 2, 9), ("minimal", "paper"), (False, True)
    ):
        monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_, made=clusters: (made, ""))
        monkeypatch.setattr(gemm_config, "split_k", lambda *_, made=1 + 2 * clusters: (made, ""))
        monkeypatch.setattr(gemm_config, "square_wgrad", lambda *_, made=k == 2: (made, ""))
        monkeypatch.setattr(gemm_config, "square_product", lambda *_, made=k == 9: (made, ""))
        runtime.forget()
        layer = Layer(5, k, 9, d, h, order, activation, save, element, weights=weights_dtype, keep_saved=True)
        device.restart()
        _, saved = layer.forward(device)
        layer.backward(device, saved)
        launched |= {variant for variant, *_ in launches(device)}
        for total in (np.float32, element):
            device.restart()
            dataclasses.replace(layer, accumulate=("w1", "w2"), totals=total).backward(device, saved)
            accumulating |= {variant for variant, *_ in launches(device)}
    runtime.forget()
    memory_order = "transposed" if order.endswith("transposed") else "row"
    prepared = all_variants.variants((dtype,), (memory_order,), (activation,), (d % 8 == 0,), limits)
    assert {v for v in launched if v.macros} == {v for v in prepared if v.macros}
    prepared_sums = all_variants.variants(
        (dtype,), (memory_order,), (activation,), (d % 8 == 0,), limits, accumulates=True
    )
    assert {v for v in launched | accumulating if v.macros} == {v for v in prepared_sums if v.macros}
    assert (
        {v.source for v in launched if not v.macros}
        <= {v.source for v in prepared}
        >= set(all_variants.SHAPE_INDEPENDENT)
    )


@pytest.mark.parametrize("limits", [A100, launch_config.H200], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("k", [1, 2])
def test_variants_of_slot_options(monkeypatch, k, limits):
    """Weights on the input have variants of their own, but not of what is computed again; others those of slots.cu."""
    device = use(monkeypatch, limits)
    monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_: (False, ""))
    for options, ragged in itertools.product(
        ({"weights_on": "input"}, {"unreduced": True}, {"identity_experts": 2}, {}), (False, True)
    ):
        runtime.forget()
        device.restart()
        launched = set()
        for save in ("minimal", "paper", "recompute"):
            layer = Layer(5, k, 9, 24, 40, save=save, slots=LayerOptions(**options), ragged=ragged)
            _, saved = layer.forward(device)
            layer.backward(device, saved)
            launched |= {variant for variant, *_ in launches(device)}
        prepared = set(all_variants.variants(("bfloat16",), ("row",), limits=limits, weights_on=("output", "input")))
        assert {v for v in launched if v.macros} <= prepared
        on_input = {v.entry for v in launched if ("WEIGHTS_ON_INPUT", "1") in v.macros}
        assert on_input == ({"up_fwd", "down_bwd"} if "weights_on" in options else set())
        own = {v.entry for v in launched if v.source == "slots.cu"}
        assert bool(own) == (ragged or "unreduced" in options or "identity_experts" in options)
    runtime.forget()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the kernel sources that may be changed."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(loader.source_folder(), folder)
    monkeypatch.setattr(loader, "source_folder", lambda: str(folder))
    forget_sources()
    yield folder
    forget_sources()


def forget_sources():
    for cached in (loader.source_digest, structs.source_text):
        cached.cache_clear()


def fresh_digests():
    forget_sources()
    return {source: loader.source_digest(source) for source in SOURCES}


def test_a_digest_follows_a_source_and_what_it_includes(sources):
    """And nothing else, so that a change compiles no other kernels anew."""
    paths = {path.name: path for path in sources.rglob("*") if path.suffix in (".cu", ".cuh")}
    including = {
        name: set(re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE)) for name, path in paths.items()
    }

    def reaches(name, changed):
        return name == changed or any(reaches(other, changed) for other in including[name])

    before = fresh_digests()
    for changed, path in paths.items():
        with open(path, "a") as file:
            file.write("//\n")
        after = fresh_digests()
        assert {name for name in before if after[name] != before[name]} == {n for n in before if reaches(n, changed)}
        before = after
    assert all(any(reaches(name, header) for name in before) for header in paths)


def test_digests_ignore_other_files(sources):
    before = fresh_digests()
    (sources / "notes.txt").write_text("?")
    (sources / "__init__.py").write_text("x = 1")
    assert fresh_digests() == before


def test_options_name_the_sources_and_the_constants(sources):
    variant = gemm_variant("down_fwd", dtype="bfloat16", activation="swiglu", transposed=False, aligned=True)
    options = loader.options(variant)
    folders = sorted({source.parent for source in sources.glob("*/*.cu*")})
    assert [o for o in options if o.startswith("-I")] == [f"-I{folder}" for folder in folders]
    assert f"-DSOURCE_DIGEST=0x{loader.source_digest(variant.source)}" in options
    assert {f"-D{name}={value}" for name, value in variant.macros} <= set(options)
    with open(sources / "common" / "common.cuh", "a") as file:
        file.write("//\n")
    fresh_digests()
    assert loader.options(variant) != options  # CuPy's cache does not look into headers


def test_only_hoppers_kernels_name_an_architecture():
    options = {"dtype": "bfloat16", "activation": "swiglu", "transposed": False, "aligned": True}
    for entry in (*GEMMS, *WGRADS):
        assert "-arch=sm_90a" in loader.options(gemm_variant(entry, **options, tier="sm90"))
        assert not [o for o in loader.options(gemm_variant(entry, **options)) if "arch" in o]


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_line_information_is_for_those_who_ask(monkeypatch, value):
    """With it the source's name is its path, by which a profiler finds it."""
    if value is None:
        monkeypatch.delenv("MOEBLAZE_LINEINFO", raising=False)
    else:
        monkeypatch.setenv("MOEBLAZE_LINEINFO", value)
    variant = Variant("aggregation.cu", "")
    path = Path(loader.source_folder()) / "rows" / "aggregation.cu"
    name, asked = loader.source(variant).splitlines()[1], value == "1"
    assert name == (f'#line 1 "{path.as_posix()}"' if asked else '#line 1 "aggregation.cu"')
    assert ("-lineinfo" in loader.options(variant)) == asked


class FakeModule:
    """cupy.RawModule; counts what is made."""

    made: ClassVar[list] = []

    def __init__(self, code, options):
        if code != loader.NOTHING:
            self.made.append(self)
        self.code, self.options, self.compiled, self.limits = code, options, 0, []

    def compile(self):
        self.compiled += 1

    def get_function(self, name):
        return FakeFunction(self, name)


class FakeFunction:
    def __init__(self, module, name):
        self.module, self.name = module, name

    @property
    def kernel(self):
        return SimpleNamespace(ptr=100 + sys.modules["cupy"].device)

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.module.limits.append(value)
        object.__setattr__(self, name, value)


class FakeDriver:
    """cupy.cuda.driver; keeps what it is given."""

    def __init__(self):
        self.launches, self.error = [], None

    def launchKernel(self, *launch):
        if self.error:
            raise self.error
        self.launches.append(launch)


@pytest.fixture
def cupy(monkeypatch):
    """As much of CuPy as the loader uses, on a device like an A100; no kernel is loaded yet."""
    attributes = {75: 8, 76: 0, 16: 108, 97: 166912, 81: 167936}
    bound = []  # (thread, device) whose context was asked for
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        driverGetVersion=lambda: 13000,
        getDevice=lambda: fake.device,
        setDevice=lambda device: bound.append((threading.get_ident(), device)),
        memGetInfo=lambda: None,
        deviceGetAttribute=lambda number, device: attributes[number],
    )
    fake = SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, driver=FakeDriver(), nvrtc=SimpleNamespace(getVersion=lambda: (12, 9))),
        RawModule=FakeModule,
        device=0,
        bound=bound,
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_thread", loader._Thread())
    monkeypatch.setattr(FakeModule, "made", [])
    monkeypatch.setattr(loader, "_modules", {})
    monkeypatch.setattr(loader, "_ahead", deque())
    caches = (loader._device_limits, loader._prepare)
    for cache in caches:
        cache.cache_clear()
    yield fake
    for cache in caches:
        cache.cache_clear()


WEIGHTS = Variant("aggregation.cu", "weights_bwd_float32")


def test_device_limits_are_read_from_the_runtime(cupy):
    assert loader.device_limits(0) == A100


def test_entries_of_one_source_share_a_module(cupy):
    loader.kernel(0, WEIGHTS)
    loader.kernel(0, Variant("aggregation.cu", "weights_by_row_float32"))
    loader.kernel(0, WEIGHTS)
    (module,) = FakeModule.made
    text = (Path(loader.source_folder()) / "rows" / "aggregation.cu").read_text()
    assert f'#line 1 "aggregation.cu"\n{text}' in module.code and module.code.endswith(loader.source(WEIGHTS))
    assert set(module.options) < set(loader.options(WEIGHTS))
    for option in set(loader.options(WEIGHTS)) - set(module.options):  # for each list of options CuPy compiles a file
        assert f"#define {option.removeprefix('-D').replace('=', ' ')}\n" in module.code


def test_shared_memory_of_a_kernel_only_grows(cupy):
    for nbytes in (0, 48 * 1024, 64 * 1024, 1024, 96 * 1024, 64 * 1024):
        loader.kernel(0, WEIGHTS, nbytes)
    assert FakeModule.made[0].limits == [64 * 1024, 96 * 1024]  # up to 48 KiB needs no opt-in


def test_threads_get_one_kernel(cupy):
    found, start = [], threading.Barrier(8)

    def load():
        start.wait()
        found.append(loader.kernel(0, WEIGHTS, 64 * 1024))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert FakeModule.made[0].limits == [64 * 1024]


WEIGHTS_LAUNCH = runtime.Launch(
    WEIGHTS,
    (3, 2),
    128,
    ("partial_sums", "token_index_map", "grad_weights"),
    {"num_slots": 1, "num_rows": 1, "parts": 2},
    56 * 1024,
)


def test_launch_passes_geometry_arguments_and_the_stream(cupy):
    WEIGHTS_LAUNCH.bound.clear()
    runtime.Runtime(arrays.CuPy, 0, 1234).launch(WEIGHTS_LAUNCH, 16, 32, 48)
    ((*geometry, arguments, extra),) = cupy.cuda.driver.launches
    assert geometry == [100, 3, 2, 1, 128, 1, 1, 56 * 1024, 1234] and arguments and extra == 0


def test_a_failed_launch_is_named(cupy):
    WEIGHTS_LAUNCH.bound.clear()
    cupy.cuda.driver.error = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(RuntimeError) as caught:
        runtime.Runtime(arrays.CuPy, 0, 0).launch(WEIGHTS_LAUNCH, 16, 32, 48)
    assert str(caught.value) == (
        "moeblaze_cupy: weights_bwd_float32: expected a launch of grid (3, 2, 1), 128 threads and 57344 bytes of "
        "shared memory to succeed, got CUDA_ERROR_INVALID_VALUE: invalid argument"
    )


def test_every_thread_and_device_gets_its_context_once(cupy):
    def bind(device):
        loader.bind_context(device)
        loader.bind_context(device)

    bind(0)
    other = threading.Thread(target=bind, args=(0,))
    other.start()
    other.join()
    bind(1)
    thread = threading.get_ident()
    assert [device for _, device in cupy.bound] == [0, 0, 1]
    assert cupy.bound[0][0] == cupy.bound[2][0] == thread != cupy.bound[1][0]


def test_precompile_compiles_once_per_module(cupy):
    assert loader.precompile(WEIGHTS) >= 0
    loader.kernel(0, WEIGHTS)
    assert [module.compiled for module in FakeModule.made] == [1]


@pytest.mark.parametrize(("version", "splits"), [((12, 9), False), ((13, 0), True)])
def test_many_entries_are_compiled_in_threads_where_nvrtc_can(cupy, version, splits):
    cupy.cuda.nvrtc.getVersion = lambda: version
    product = gemm_variant("down_fwd", dtype="bfloat16", activation="swiglu", transposed=False, aligned=True)
    for variant in (WEIGHTS, product):
        loader.kernel(0, variant)
    assert [loader.SPLIT_COMPILE in module.options for module in FakeModule.made] == [splits, False]


HELPED = [Variant(source, "") for source in ("dispatch.cu", "aggregation.cu", "slots.cu", "clear.cu")]


def test_kernels_are_compiled_ahead_by_other_threads(cupy, monkeypatch):
    """Each once, for the device that was asked for. A launch waits for what a thread compiles."""
    begun, go_on, threads = threading.Event(), threading.Event(), set()

    def compile_it(module):
        threads.add(threading.get_ident())
        begun.set()
        assert go_on.wait(60)
        module.compiled += 1

    monkeypatch.setattr(FakeModule, "compile", compile_it)
    monkeypatch.setattr(loader, "cores", lambda: 2)
    cupy.device = 1
    assert loader.compile_ahead(1, HELPED) is True
    assert begun.wait(60)
    waiting = threading.Thread(target=loader.kernel, args=(1, Variant("dispatch.cu", "dispatch_route_int32")))
    waiting.start()
    go_on.set()
    waiting.join(60)
    for thread in threading.enumerate():
        if thread.name.startswith("moeblaze_cupy"):
            thread.join(60)
    assert [module.compiled for module in FakeModule.made] == [1] * len(HELPED)
    assert {device for _, device in cupy.bound} == {1} and threading.get_ident() not in threads
    assert loader.compile_ahead(1, HELPED) is False


def test_a_thread_that_compiles_for_two_devices_has_each_current(cupy):
    modules = [loader._module(variant) for variant in HELPED[:3]]
    loader._ahead.extend(zip((0, 1, 0), modules, strict=True))
    loader._help()
    assert [device for _, device in cupy.bound] == [0, 1, 0]
    assert [module.devices for module in modules] == [{0}, {1}, {0}]


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute", "fp8", None])
def test_a_forward_asks_for_its_kernels_and_those_of_its_backward(monkeypatch, save, tier):
    """Once: as long as all are compiled, no further call asks for those of a backward."""
    device = use(monkeypatch, dataclasses.replace(launch_config.H200, tier=tier))
    asked, are_new = [], [True]
    monkeypatch.setattr(loader, "compile_ahead", lambda device, variants: asked.append(list(variants)) or are_new[0])
    layer = Layer(700, 2, 4, 64, 32, "transposed", save=save, dtype=np.float16)
    _, saved = layer.forward(device)
    assert len(asked) == (1 if save is None else 2)
    if save is not None:
        layer.backward(device, saved)
        assert asked[2] == asked[1]  # what the forward expected of it
    assert {variant for variants in asked for variant in variants} >= {variant for variant, *_ in launches(device)}
    asked.clear()
    are_new[0] = False
    dataclasses.replace(layer, L=300).forward(device)
    assert len(asked) == 1
    runtime.forget()


def test_threads_prepare_the_compiler_once_for_each_list_of_options(cupy, monkeypatch):
    """CuPy compiles an empty file for each, also in two threads at a time, and before it looks for a cubin."""
    begun = []
    monkeypatch.setattr(
        FakeModule, "compile", lambda module: begun.append((module.code == loader.NOTHING, module.options))
    )
    monkeypatch.setattr(loader, "cores", lambda: 8)
    options = {"dtype": "bfloat16", "activation": "swiglu", "transposed": False, "aligned": True, "tier": "sm90"}
    assert loader.compile_ahead(0, [*HELPED, *(gemm_variant(entry, **options) for entry in GEMMS)])
    for thread in threading.enumerate():
        if thread.name.startswith("moeblaze_cupy"):
            thread.join(60)
    prepared = [options for nothing, options in begun if nothing]
    assert len(begun) == len(prepared) + len(HELPED) + len(GEMMS)
    assert len(prepared) == len(set(prepared)) == len({options for _, options in begun}) > 1
    for options in prepared:
        assert begun.index((True, options)) < begun.index((False, options))


def test_an_error_comes_where_the_kernel_is_launched(cupy, monkeypatch):
    def fail(module):
        raise RuntimeError("nvrtc: error: invalid architecture")

    monkeypatch.setattr(FakeModule, "compile", fail)
    assert loader.compile_ahead(0, HELPED)
    for thread in threading.enumerate():
        if thread.name.startswith("moeblaze_cupy"):
            thread.join(60)
    with pytest.raises(RuntimeError, match="invalid architecture"):
        loader.kernel(0, Variant("dispatch.cu", "dispatch_route_int32"))


def test_a_program_that_ends_compiles_nothing_more():
    code = """
import threading, time
from moeblaze_cupy.cuda import capture, loader
loader.bind_context = lambda device: None
class Module:
    devices, lock = (), threading.Lock()
    def on(self, device): print("compiles", flush=True); time.sleep(0.5)
modules = [Module() for _ in range(3)]
loader.cores, loader._module = (lambda: 1), (lambda number: modules[number])
loader.compile_ahead(0, range(3))
time.sleep(0.2)
"""
    assert run_python(code) == "compiles\n"


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_TIME = """
import time
start = time.process_time()  # of this process: other work on the machine does not count
import moeblaze_cupy
print(time.process_time() - start)
"""


def test_import_takes_less_than_0_4_seconds(tmp_path):
    """NumPy included, from byte code, which the first import writes."""
    written = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(run_python(IMPORT_TIME, **written)) for _ in range(3)) < 0.4


IMPORT = """
import ctypes, sys
opened = []
real = ctypes.CDLL.__init__
def init(self, name, *args, **kwargs):
    opened.append(str(name))
    real(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = init
import moeblaze_cupy
print([name for name in opened if "cuda" in name or "nvrtc" in name], "cupy" in sys.modules)
"""


def test_import_touches_no_gpu():
    """Neither the driver nor CuPy is loaded, so no context is opened and nothing is compiled."""
    assert run_python(IMPORT).strip() == "[] False"


WITHOUT_CUPY = """
import sys
sys.modules["cupy"] = None  # its import raises ImportError
import numpy as np
import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader
weights, ids = mb.route(np.eye(4, dtype=np.float32), 2)
index = mb.build_dispatch(ids, 4)
print(index.expert_token_offsets.tolist(), "torch" in sys.modules)
try:
    loader.import_cupy()
except RuntimeError as error:
    print(error)
"""


def test_the_package_imports_and_runs_on_the_cpu_without_cupy():
    first, second = run_python(WITHOUT_CUPY).splitlines()
    assert first == "[0, 4, 6, 7, 8] False"
    assert second.startswith("moeblaze_cupy: CuPy: expected an importable cupy for CUDA arrays")
