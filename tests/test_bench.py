"""The benchmark suites without a GPU: cases, routings, the check before timing, the clock, records and tables."""

import importlib.util
import json
import os
import subprocess
import sys
import types
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.environment import plain_environment

torch = pytest.importorskip("torch")

from bench import (  # noqa: E402
    ampere,
    cases,
    compare,
    first_use,
    fp8,
    generation,
    graphs,
    host_time,
    inputs,
    kernel_times,
    kernels,
    long_sequences,
    lora,
    lora_stack,
    measure,
    megatron,
    merge,
    peers,
    providers,
    quantised,
    save_policies,
    table,
    variants,
    verify,
    watched_steps,
)
from bench.layer import Layer  # noqa: E402
from bench.recorded import routed_mib  # noqa: E402
from moeblaze_cupy import frameworks as arrays  # noqa: E402
from moeblaze_cupy import reference  # noqa: E402
from moeblaze_cupy.gemm import config as gemm_config  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def generator():
    return torch.Generator().manual_seed(1)


def test_names_are_unique_and_groups_name_cases():
    assert all(case.name == name for name, case in (cases.LAYERS | cases.DISPATCHES).items())
    for group, names in cases.GROUPS.items():
        assert names, group
        assert set(names) <= {*cases.LAYERS, *cases.DISPATCHES}, group


@pytest.mark.parametrize("name", cases.LAYERS)
def test_shapes_are_possible(name):
    case = cases.LAYERS[name]
    assert 1 <= case.k <= case.E
    assert case.d % 8 == 0 and case.h % 8 == 0  # else the portable kernels without 16-byte accesses would be timed
    assert case.slots < 2**31


def test_models_of_today_and_sweeps_fit_80_gb_beside_torchs_layer():
    """Weights, their gradients in bfloat16, float64 of the check, and twice what routed buffers keep."""
    for name in (*cases.GROUPS["today"], *cases.GROUPS["granularity"], *cases.GROUPS["sparsity"]):
        case = cases.LAYERS[name]
        weights, checked = 2 * case.E * (case.first_columns + case.h) * case.d, 8 * 2 * case.L * case.d
        assert 2 * weights + checked + 2 * routed_mib(case) * 2**20 < 40e9, name


def test_a_sweep_changes_what_it_says_and_not_the_products():
    for sweep, number, least, most in (("granularity", "h", 128, 2048), ("sparsity", "E", 16, 512)):
        swept = [cases.LAYERS[name] for name in cases.GROUPS[sweep]]
        changed = [getattr(case, number) for case in swept]
        assert (changed[0], changed[-1]) == (least, most) and changed == sorted(set(changed))
        assert len({case.flops("forward_backward") for case in swept}) == 1
    fixed = {(case.L, case.d, case.E * case.h) for case in map(cases.LAYERS.get, cases.GROUPS["granularity"])}
    assert len(fixed) == 1


def test_table_1_is_the_papers():
    """d, E, k, batch and sequence as Table 1 prints them."""
    printed = {
        "conf1": (512, 4, 1, 32, 2048),
        "conf2": (1024, 8, 2, 32, 2048),
        "conf3": (1024, 16, 4, 32, 2048),
        "conf4": (512, 16, 4, 32, 1024),
        "conf5": (1024, 16, 4, 16, 1024),
        "conf6": (2048, 8, 4, 16, 512),
    }
    for name, (d, E, k, batch, sequence) in printed.items():
        for case in (cases.LAYERS[name], cases.LAYERS[f"{name}_silu"]):
            assert (case.d, case.E, case.k, case.L, case.h) == (d, E, k, batch * sequence, 4 * d)


def test_printed_numbers_agree_with_printed_speedups():
    """Tables 2 and 3 print ratios as well, which a mistyped number would miss."""
    table2 = {"8k": 1.9, "32k": 2.6, "128k": 2.9}  # SwiGLU; 1.8 / 1.0 is printed as 1.9
    for size, speedup in table2.items():
        blaze, block = cases.LAYERS[f"tab2_{size}_h256"].paper
        assert block.time_ms / blaze.time_ms == pytest.approx(speedup, rel=0.06)
    saved = {("8k", ""): 68.6, ("32k", ""): 75.3, ("128k", ""): 77.0, ("8k", "_silu"): 64.5, ("128k", "_silu"): 73.1}
    for (size, activation), percent in saved.items():
        blaze, block = cases.LAYERS[f"tab2_{size}_h256{activation}"].paper
        assert 100 * (1 - blaze.memory_mb / block.memory_mb) == pytest.approx(percent, abs=0.2)
    table3 = {"qwen3": 2.4, "dsv3": 2.2, "dbrx": 1.8, "mixtral": 1.3, "gptoss": 1.9, "granite": 2.3}
    for name, speedup in table3.items():
        sorting, hashing = cases.DISPATCHES[f"{name}_1m"].paper
        assert sorting.time_ms / hashing.time_ms == pytest.approx(speedup, rel=0.06)


def test_select():
    assert cases.select("conf5,table1", "quick")[:2] == ["conf5", "conf1"]  # each once
    assert cases.select(None, "quick") == list(cases.GROUPS["quick"])
    with pytest.raises(ValueError, match=r"--case: expected sizes such as L.*, or names among .*got 'conf9'"):
        cases.select("conf9", "quick")
    with pytest.raises(ValueError, match=r"--case: expected k at most E in 'L8-d32-h16-E2-k3', got k = 3, E = 2"):
        cases.select("L8-d32-h16-E2-k3", "quick")


def test_sizes_are_a_case(monkeypatch):
    monkeypatch.setattr(cases, "LAYERS", dict(cases.LAYERS))
    name = "L640-d64-h48-E12-k5"
    assert cases.select(f"conf5,{name},{name}", "quick") == ["conf5", name]
    case = cases.LAYERS[name]
    assert (case.name, case.L, case.d, case.h, case.E, case.k) == (name, 640, 64, 48, 12, 5)
    assert case.shape == name
    assert providers.select("moeblaze,cublas_bound", "quick")[0] == "cublas_bound"
    with pytest.raises(ValueError, match=r"--provider: expected names among .*got 'nobody'"):
        providers.select("nobody", "quick")


@pytest.mark.parametrize(
    ("k", "activation", "forward", "backward"),
    # R = 80 k rows: act(a) b; rows and sums; a, b and their gradients; gradients of x and their sums
    [
        (2, "swiglu", 160 * 24 + 240 * 64, 160 * 4 * 24 + 240 * 64),
        (2, "silu", 160 * 24 + 240 * 64, 160 * 2 * 24 + 240 * 64),
        (1, "swiglu", 80 * 24, 80 * 4 * 24),
    ],
)
def test_traffic_beside_the_bound(k, activation, forward, backward):
    case = cases.LayerCase("c", L=80, d=64, h=24, E=4, k=k, source="", activation=activation)
    layer = providers.PROVIDERS["cublas_and_traffic"].build(case, inputs.layer_inputs(case, "transposed"))
    copies = []
    target = torch.full_like(layer.source, torch.nan)

    class Target:
        def __getitem__(self, part):
            copies.append(part.stop - part.start)
            return target[part]

    def copied():
        """Elements, each once: of what is copied again the L2 cache would hold a part."""
        assert sum(copies) == int((target == layer.source).sum())
        return sum(copies)

    layer.target = Target()
    bound = providers.PROVIDERS["cublas_bound"].build(case, inputs.layer_inputs(case, "transposed"))
    assert layer.forward().shape == bound.forward().shape
    assert 2 * copied() == pytest.approx(forward, abs=16)  # each element read and written
    copies.clear()
    target.fill_(torch.nan)
    assert layer.forward_backward() == ()
    assert 2 * copied() == pytest.approx(forward + backward, abs=16)


def test_flops():
    case = cases.LayerCase("c", L=10, d=3, h=5, E=4, k=2, source="")
    assert case.forward_flops == 2 * 20 * (3 * 10 + 5 * 3)
    assert case.flops("forward_backward") == 3 * case.forward_flops
    assert replace(case, activation="silu").forward_flops == 2 * 20 * (3 * 5 + 5 * 3)
    assert sum(kernels.gemm_work(case, entry).flops for entry in kernels.GEMMS) == case.flops("forward_backward")


def test_products_with_sums_write_the_tokens_rows():
    """(L, d), not the routed rows that lie between."""
    case = cases.LayerCase("c", L=10, d=3, h=5, E=4, k=2, source="")
    assert kernels.gemm_work(case, "down_fwd").nbytes == 2 * (20 * 5 + 4 * 5 * 3 + 10 * 3)
    assert kernels.gemm_work(case, "up_bwd").nbytes == 2 * (20 * 10 + 4 * 3 * 10 + 10 * 3)


@pytest.mark.parametrize("kind", ["random", "balanced", "skewed"])
@pytest.mark.parametrize(("L", "E", "k"), [(4096, 16, 4), (4096, 8, 2), (1000, 4, 1), (512, 128, 8), (64, 4, 4)])
def test_routings_name_distinct_experts(kind, L, E, k):
    ids = inputs.routing(L, E, k, kind, generator())
    assert ids.shape == (L, k) and ids.min() >= 0 and ids.max() < E
    assert all(len(set(row)) == k for row in ids.tolist())


def test_balanced_routing_is_balanced():
    counts = torch.bincount(inputs.routing(4096, 16, 4, "balanced", generator()).flatten(), minlength=16)
    assert counts.tolist() == [1024] * 16


@pytest.mark.parametrize(("E", "k"), [(16, 4), (8, 2), (128, 8), (64, 6)])
def test_skewed_routing_gives_a_quarter_of_experts_80_percent(E, k):
    counts = torch.bincount(inputs.routing(8192, E, k, "skewed", generator()).flatten(), minlength=E)
    busiest = counts.sort(descending=True).values[: E // 4].sum() / counts.sum()
    assert float(busiest) == pytest.approx(0.8, abs=0.02)


def test_routing_repeats_and_names_what_it_knows():
    assert torch.equal(*(inputs.routing(100, 8, 2, "skewed", generator()) for _ in range(2)))
    assert inputs.routing(100, 8, 2, "one", generator()).unique().tolist() == [4]
    with pytest.raises(ValueError, match="expected random, balanced"):
        inputs.routing(100, 8, 2, "sticky", generator())


@pytest.mark.parametrize("order", ["row", "transposed"])
def test_orders_of_the_weights(order):
    made = inputs.layer_inputs(cases.TINY, order)
    for name, shape in (("w1", (6, 32, 48)), ("w2", (6, 24, 32))):
        assert tuple(made[name].shape) == shape
        assert made[name].is_contiguous() == (order == "row")
    torch.testing.assert_close(made["weights"].sum(1), torch.ones(48))
    assert 0.8 < made["x"].float().std() < 1.2


@pytest.mark.parametrize("case", [cases.TINY, cases.TINY_SILU], ids=lambda case: case.name)
def test_float64_layer_agrees_with_the_numpy_reference(case):
    """Two derivations of the gradients: autograd's operands by hand here, the paper's steps there."""
    made = inputs.layer_inputs(case, "row", dtype=torch.float64)
    made["weights"] = made["weights"].double()
    arrays = {name: tensor.numpy() for name, tensor in made.items()}
    grad_out = arrays.pop("grad_out")
    out, saved = reference.moe_forward(**arrays, activation=case.activation)
    grads = reference.moe_backward(grad_out, saved)
    named = {name: torch.from_numpy(np.asarray(getattr(grads, name))) for name in ("x", "weights", "w1", "w2")}
    errors = verify.relative_errors(case, made, torch.from_numpy(out), named)
    assert set(errors) == set(cases.RESULTS)
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("name", cases.RESULTS)
@pytest.mark.parametrize("damage", ["scale", "nan", "one_expert"])
def test_a_wrong_result_is_named(name, damage):
    """The check is there to fail: 5% off, one NaN, one expert's part missing."""
    case, made = cases.TINY, inputs.layer_inputs(cases.TINY)
    layer = providers.PROVIDERS["torch_routed"].build(case, made)
    results = {"out": layer.forward().detach(), **layer.named(layer.forward_backward())}
    clean = verify.relative_errors(case, made, results["out"], {n: results[n] for n in layer.names})
    assert verify.problems(clean, torch.bfloat16) is None
    wrong = results[name].clone()
    if damage == "scale":
        wrong *= 1.05
    elif damage == "nan":
        wrong.view(-1)[3] = float("nan")
    else:
        wrong[: len(wrong) // 4] = 0
    results[name] = wrong
    errors = verify.relative_errors(case, made, results["out"], {n: results[n] for n in layer.names})
    problem = verify.problems(errors, torch.bfloat16)
    assert problem.startswith(f"relative error above 0.02: {name} ")
    assert problem.count(",") == 0  # that one alone


def test_a_sample_of_many_tokens_finds_what_is_wrong(monkeypatch):
    """Every third token and half of the experts: right results pass, a wrong one among the compared does not."""
    monkeypatch.setattr(verify, "SAMPLED_ABOVE", 16)
    monkeypatch.setattr(verify, "SAMPLED_EXPERTS", 3)
    case, made = cases.TINY, inputs.layer_inputs(cases.TINY)
    layer = providers.PROVIDERS["torch_routed"].build(case, made)
    results = {"out": layer.forward().detach(), **layer.named(layer.forward_backward())}
    for name in (None, *cases.RESULTS):
        for place, is_compared in ((0, True), (1, False)):  # tokens 0, 3, .. and experts 0, 2, 4
            tried = dict(results)
            if name:
                tried[name] = results[name].clone()
                tried[name][place] *= 1.5
            problem = verify.problems(verify.relative_errors(case, made, tried.pop("out"), tried), torch.bfloat16)
            assert (problem is not None) == (name is not None and is_compared), (name, place)
            assert problem is None or name in problem


def test_running_out_of_memory_skips_others_and_fails_ours():
    from bench import conftest

    def build(case, made):
        raise torch.OutOfMemoryError("too much")

    current = conftest._Current()
    with pytest.raises(pytest.skip.Exception, match="other: out of memory on tiny"):
        current.layer_of(cases.TINY, "row", providers.Provider("other", build))
    with pytest.raises(torch.OutOfMemoryError):
        current.layer_of(cases.TINY, "row", providers.Provider("moeblaze", build))


def test_a_wrong_provider_gets_no_time(monkeypatch):
    """Through the suite itself: its row fails, and nothing of it is left to time."""
    from bench import conftest

    class Wrong(Layer):
        def forward(self):
            x, weights, w1, w2 = self.leaves
            return (x * weights.sum() * w1.sum() * w2.sum()).contiguous()

    def build(case, made):
        return Wrong(made, [made[name] for name in Wrong.names])

    current = conftest._Current()
    with pytest.raises(pytest.fail.Exception, match=r"wrong on tiny, row: relative error above .*no time"):
        current.layer_of(cases.TINY, "row", providers.Provider("wrong", build))
    assert current.layer is None


@pytest.mark.parametrize(
    "name", ["moeblaze", "moeblaze_recompute", "moeblaze_paper", "torch_grouped_mm", "torch_routed"]
)
@pytest.mark.parametrize("case", [cases.TINY, cases.TINY_SILU], ids=lambda case: case.name)
def test_providers_on_the_cpu_are_right(name, case):
    made = inputs.layer_inputs(case)
    layer = providers.PROVIDERS[name].build(case, made)
    errors = verify.relative_errors(case, made, layer.forward().detach(), layer.named(layer.forward_backward()))
    assert verify.problems(errors, torch.bfloat16) is None


def test_the_tier_is_forced_only_while_its_provider_runs(monkeypatch):
    monkeypatch.delenv("MOEBLAZE_TIER", raising=False)
    with providers.PROVIDERS["moeblaze_sm80"].active():
        assert os.environ["MOEBLAZE_TIER"] == "sm80"
    assert "MOEBLAZE_TIER" not in os.environ


@pytest.mark.skipif(torch.cuda.is_available(), reason="peers may be there")
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_absent_peers_say_how_to_install_them(peer):
    assert "pip install" in peer.missing()


def test_sonicmoe_refuses_what_it_cannot_run():
    sonicmoe = providers.PROVIDERS["sonicmoe"]
    assert sonicmoe.refuses(cases.LAYERS["conf3"]) is None
    assert "silu" in sonicmoe.refuses(cases.LAYERS["conf3_silu"])


def test_sorted_lists_are_the_dispatch_lists():
    ids = inputs.routing(200, 8, 3, "random", generator()).int()
    index = reference.dispatch(ids.numpy(), 8)
    names = ("expert_token_indices", "expert_token_offsets", "token_index_map")
    for name, got in zip(names, kernels.sorted_lists(ids, 8), strict=True):
        assert np.array_equal(got.numpy(), getattr(index, name))


def test_clock_moves_by_one_calls_share():
    clock = measure.DeviceClock()
    before = clock()
    clock.run(lambda: measure.time.sleep(0.02), calls=4)
    assert 0.005 <= clock() - before < 0.02


class FakeGPU:
    """Calls of 5 ms that the host enqueues at once; events know when the GPU reaches them. Milliseconds."""

    def __init__(self, monkeypatch):
        self.host = self.queued_until = self.longest_queue = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                gpu.queued_until = self.time = max(gpu.host, gpu.queued_until)

            def synchronize(self):
                gpu.host = max(gpu.host, self.time)

            def elapsed_time(self, end):
                return end.time - self.time

        monkeypatch.setattr(measure, "has_gpu", lambda: True)
        monkeypatch.setattr(measure, "gpu_state", lambda: {"sm_mhz": self.host})
        monkeypatch.setattr(torch.cuda, "Event", Event)

    def call(self):
        self.host += 1  # to launch
        self.queued_until = max(self.host, self.queued_until) + 5
        self.longest_queue = max(self.longest_queue, self.queued_until - self.host)


def test_the_gpu_is_kept_busy_with_a_short_queue(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    state, of_one = measure.keep_busy(gpu.call, 0.4)
    assert 400 <= gpu.queued_until < 460
    assert gpu.queued_until > gpu.host  # what comes next finds no idle GPU
    assert gpu.longest_queue <= 45
    assert 200 <= state["sm_mhz"] < 260 and of_one == pytest.approx(0.005)


def test_a_call_alone_has_the_hosts_time_in_it_and_others_have_not(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    alone, led = measure.DeviceClock(), measure.DeviceClock()
    alone.run(gpu.call)
    led.run(gpu.call, lead=True)
    assert alone() == pytest.approx(0.006) and led() == pytest.approx(0.005)
    assert measure.back_to_back_seconds(gpu.call, alone(), total=0.05) == pytest.approx(0.005)


def test_saved_counts_storages_once_and_not_the_excluded():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB

    def run():
        y = x.exp()  # saves y
        return (y * y).sum()  # saves y twice more

    assert measure.saved_mib(run, [x]) == 1
    assert measure.saved_mib(lambda: (x * x).sum(), [x]) == 0
    assert measure.saved_mib(lambda: (x * x).sum(), []) == 1


def record(*rows):
    """A pytest-benchmark record of layer rows (provider, pass, ms, more)."""
    return {
        "benchmarks": [
            {
                "group": "layer",
                "stats": {"median": milliseconds / 1e3, "iqr": 0.0},
                "extra_info": {"case": "conf3", "order": "row", "provider": provider, "pass": what, **more},
            }
            for provider, what, milliseconds, more in rows
        ]
    }


RULES = ("uses_clusters", "dynamic_schedule", "split_k", "square_wgrad", "square_product")


def test_variants_are_what_the_kernels_find_while_they_are_timed(monkeypatch, tmp_path, capsys):
    """And nothing else has changed afterwards."""
    before = {name: getattr(gemm_config, name) for name in RULES}
    by_load, seen = torch.tensor([2, 0, 1], dtype=torch.int32), {}

    class Kernels:
        def __init__(self, case, made, accumulate, gate_up):
            self.case, self.index = case, types.SimpleNamespace(experts_by_load=by_load)
            self.calls = self.configured()

        @staticmethod
        def configured():
            rules = [getattr(gemm_config, name) for name in RULES]
            answers = [rule()[0] if rule not in before.values() else None for rule in rules]
            return {
                name: lambda name=name: seen.setdefault(name, set()).add((*answers, *by_load.tolist()))
                for name in kernels.GEMMS
            }

    monkeypatch.setattr(variants.kernels, "Kernels", Kernels)
    monkeypatch.setattr(variants.inputs, "layer_inputs", lambda *_: {})
    monkeypatch.setattr(variants.inputs, "expect_gpu", lambda _: None)
    monkeypatch.setitem(cases.LAYERS, "tiny", cases.TINY)
    variants.main("--case", "tiny", "--out", str(tmp_path / "record"))
    loaded, by_id = (2, 0, 1), (0, 1, 2)
    clusters = {(answer, None, None, None, None, *loaded) for answer in (False, True)}
    schedules = {(None, dynamic, None, None, None, *loaded) for dynamic in (False, True)}
    splits = {(None, None, n, None, None, *loaded) for n in variants.SPLITS}
    tiles = {(None, None, None, square, None, *loaded) for square in (False, True)}
    of_products = {(None, None, None, None, square, *loaded) for square in (False, True)}
    orders = {(None, None, None, None, None, *order) for order in (loaded, by_id)}
    gathered, summed = clusters | schedules | of_products, clusters | of_products
    asked = {
        "up_fwd": gathered,
        "down_fwd": summed,
        "down_bwd": clusters | schedules,
        "up_wgrad": splits | tiles | orders,
    }
    for entry, wanted in asked.items():
        assert seen[entry] == wanted
    assert by_load.tolist() == [2, 0, 1]
    assert all(getattr(gemm_config, name) is rule for name, rule in before.items())
    rows = json.loads((tmp_path / "record").read_text())["rows"]
    lines = capsys.readouterr().out.splitlines()
    assert len(rows) == len(lines) - 1 == 2 * (4 + 2 + 2 + 2 + 3) + 2 * len(variants.SPLITS)
    assert {"case": "tiny", "kernel": "up_bwd", "variant": "clusters"}.items() <= rows[7].items()


class FakeSide:
    """Of bench.compare: calls of 2 and 3 seconds, and one that the other side does not have."""

    def __init__(self, factor, extra):
        self.factor, self.names, self.asked = factor, ["up_fwd", "down_fwd", extra], []

    def ask(self, what, name, *_):
        self.asked.append((what, name))
        return self.names if what == "kernels" else self.factor * {"up_fwd": 2.0, "down_fwd": 3.0}[name]


def test_two_checkouts_are_compared_in_turn(capsys):
    sides = {"before": FakeSide(1.0, "old"), "after": FakeSide(0.5, "new")}
    rows = list(compare.compared(sides, ("kernels", "conf1", "row"), 3, 1.0))
    assert [(row["name"], row["before"], row["after"], row["ratio"]) for row in rows] == [
        ("up_fwd", 2.0, 1.0, 0.5),
        ("down_fwd", 3.0, 1.5, 0.5),
    ]
    for side in sides.values():
        assert side.asked == [("kernels", "conf1")] + 3 * [("window", "up_fwd")] + 3 * [("window", "down_fwd")]
    assert len(capsys.readouterr().out.splitlines()) == 2


class FakeHost:
    """A process whose calls take as many seconds as it says, but for one window that another program disturbed."""

    def __init__(self, seconds):
        self.seconds, self.windows = seconds, 0

    def ask(self, what, *_):
        if what == "host":
            return ["route", "forward"]
        self.windows += 1
        return self.seconds * (10 if self.windows == 3 else 1)


def test_host_times_are_of_several_pairs_of_processes(capsys):
    """A process differs from the next of one checkout by more than a tenth, so a ratio is that of a pair."""
    pairs = [(1.0, 1.1), (1.2, 1.2), (1.0, 1.05)]
    rows = compare.host_rows(({"before": FakeHost(a), "after": FakeHost(b)} for a, b in pairs), 100)
    assert [row["name"] for row in rows] == ["route", "forward"]
    for row in rows:
        assert row["rounds"] == {"before": [1.0, 1.2, 1.0], "after": [1.1, 1.2, 1.05]}
        assert (row["before"], row["after"]) == (1.0, 1.1)
        assert (row["ratio"], row["least"], row["greatest"]) == pytest.approx((1.05, 1.0, 1.1))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows)
    assert all(line.endswith("1.050 (1.000 to 1.100)") for line in lines)


@pytest.mark.skipif(inputs.has_gpu(), reason="would measure on the GPU")
def test_host_times_of_this_checkout_beside_itself(tmp_path):
    """With a process of its own for each side of each pair."""
    compare.main(str(ROOT), "--host", "--pairs", "2", "--calls", "1", "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["name"] for row in record["rows"]] == list(host_time.functions("cpu"))
    assert all(len(row["rounds"]["before"]) == len(row["rounds"]["after"]) == 2 for row in record["rows"])
    assert record["sides"]["before"]["commit"] == record["sides"]["after"]["commit"] == measure.commit()


def test_first_use_on_the_cpu():
    """A row of its own process for each kind of cache, on the cores that there are."""
    cores = len(os.sched_getaffinity(0))
    rows = first_use.measured((1, cores + 1), "cpu", cases.TINY)
    assert [(row["cores"], row["cache"]) for row in rows] == [(1, "cold"), (1, "warm")]
    head, *lines = first_use.text(rows)
    assert head.endswith("first step, s") and len(lines) == 2
    first = rows[0]["seconds"]
    assert first.keys() == {"import torch", "import moeblaze_cupy.interop.torch", *first_use.STEPS}
    assert lines[0].endswith(f"{first['forward'] + first['backward']:.2f}")


@pytest.mark.skipif(inputs.has_gpu(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "program",
    [
        *(ampere, first_use, fp8, generation, graphs, host_time, kernel_times, long_sequences, lora),
        *(lora_stack, megatron, quantised),
        *(save_policies, variants, watched_steps),
    ],
    ids=lambda module: module.__name__,
)
def test_programs_that_need_a_gpu_say_so(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main("--out" if program is not kernel_times else "--calls", "1")
    assert ended.value.code == 2
    assert f"python -m {program.__name__}: error: expected a CUDA device" in capsys.readouterr().err


def test_runs_of_one_commit_are_merged(tmp_path):
    def record(commit, *names):
        rows = [{"fullname": name} for name in names]
        return {
            "machine_info": {"gpu": "a GPU"},
            "commit_info": {"id": commit},
            "benchmarks": rows,
            "version": names[0],
            "wall_s": float(len(names)),
        }

    for name, of in (("1", record("c", "a", "b")), ("2", record("c", "d")), ("3", record("e", "f"))):
        (tmp_path / name).write_text(json.dumps(of))
    paths = [str(tmp_path / name) for name in "123"]
    merge.main(str(tmp_path / "all"), "two runs", *paths[:2])
    merged = json.loads((tmp_path / "all").read_text())
    assert merged == {"note": "two runs", **record("c", "a", "b", "d")}  # of three seconds
    parts = [{"case": "conf3", "kernel": kernel} for kernel in ("up_fwd", "forward")]
    of_fp8 = [
        {"machine_info": {"gpu": "a GPU"}, "commit_info": {"id": "c"}, "rows": [part], "wall_s": 2.0} for part in parts
    ]
    joined = merge.merge("of two windows", of_fp8)
    assert (joined["rows"], joined["note"], joined["wall_s"]) == (parts, "of two windows", 4.0)
    with pytest.raises(ValueError, match="got again conf3: up_fwd"):
        merge.merge("", of_fp8[:1] * 2)
    for wrong, why in ((paths, "one commit, got c, e"), (paths[:1] * 2, "each row once, got again a, b")):
        with pytest.raises(ValueError, match=why):
            merge.main(str(tmp_path / "none"), "", *wrong)
    assert not (tmp_path / "none").exists()


def test_layer_table():
    made = record(
        ("cublas_bound", "forward", 10.0, {}),
        ("cublas_bound", "forward_backward", 30.0, {}),
        ("moeblaze", "forward", 12.0, {}),
        ("moeblaze", "forward_backward", 39.0, {"saved_mib": 4098.2, "peak_mib": 6290.0}),
    )
    head, line = table.tables(made)[1:]
    assert line.split() == [
        "conf3",
        "row",
        "moeblaze",
        "10.0",
        "12.0",
        "1.20",
        "30.0",
        "39.0",
        "1.30",
        "4,098",
        "6,290",
    ]
    assert head.split()[:3] == ["case", "order", "provider"]


def test_merged_layers_know_their_bound():
    made = record(
        ("cublas_bound", "forward", 10.0, {"back_to_back_ms": 8.0}),
        ("moeblaze", "forward", 12.0, {"back_to_back_ms": 10.0}),
        ("moeblaze", "forward", 18.0, {"case": "conf3_skewed", "routing": "skewed"}),
    )
    _, random, skewed = table.merged_layers(table.rows_of(made))
    assert random["forward_ratio"] == pytest.approx(1.2)
    assert random["forward_back_to_back_ratio"] == pytest.approx(1.25)
    assert "forward_bound" not in skewed


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0123, 3, "0.012"),
        (1.234, 3, "1.23"),
        (12.34, 3, "12.3"),
        (1234.5, 3, "1,234"),
        (None, 3, "-"),
        (0, 3, "0.000"),
    ],
)
def test_number(value, digits, text):
    assert table.number(value, digits) == text


def run_pytest(*options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *options]
    return subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def record_path(tmp_path_factory):
    """The record of all suites on tiny shapes, made as a user would: `pytest bench` in a process of its own."""
    path = tmp_path_factory.mktemp("bench") / "record.json"
    run = run_pytest("bench", "--commit=abc1234", f"--benchmark-json={path}")
    assert run.returncode == 0, run.stdout[-3000:]
    return path


def test_suites_run_and_their_record_says_what_it_is_of(record_path):
    written = json.loads(record_path.read_text())
    assert written["commit_info"]["id"] == "abc1234"
    assert "node" not in written["machine_info"] and "torch" in written["machine_info"]
    suites = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
    if importlib.util.find_spec("transformers") is None:
        suites.remove("transformers")
    assert {row["group"] for row in written["benchmarks"]} == {*suites, "small_batch", "sweep"}
    rows = {(r["group"], r["extra_info"]["provider"], r["extra_info"].get("pass")): r for r in written["benchmarks"]}
    layer = rows["layer", "moeblaze", "forward_backward"]["extra_info"]
    assert layer["saved_mib"] > 0 and layer["times_bound"] > 0 and layer["tflops"] > 0
    assert layer["back_to_back_ms"] > 0 and set(layer["errors"]) == set(cases.RESULTS)
    assert rows["small_batch", "moeblaze", "forward"]["extra_info"]["touched_experts"] == 6
    assert rows["dispatch", "moeblaze", None]["extra_info"]["gb_per_s"] > 0
    assert not [row for row in written["benchmarks"] if row["extra_info"]["provider"] == "sonicmoe"]


@pytest.mark.parametrize(("seconds", "code"), [(1e-9, 1), (1e3, 0)], ids=["slower", "faster"])
def test_a_regression_against_a_record_fails(record_path, tmp_path, seconds, code):
    """As bench/README.md documents it, against a record that is faster or slower than anything."""
    written = json.loads(record_path.read_text())
    for row in written["benchmarks"]:
        row["stats"]["median"] = seconds
    path = tmp_path / "record.json"
    path.write_text(json.dumps(written))
    options = [f"--benchmark-compare={path}", "--benchmark-compare-fail=median:5%"]
    compared = run_pytest("bench/bench_dispatch.py", *options)
    assert compared.returncode == code, compared.stdout[-2000:] + compared.stderr[-2000:]
    assert ("Performance has regressed" in compared.stdout + compared.stderr) == bool(code)


EDGES = cases.LayerCase("edges", 150, 264, 72, 3, 2, "tiles and panels that end early", routing="skewed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("case", "order", "options"),
    [
        (cases.TINY, "transposed", {}),
        (cases.TINY, "transposed", {"accumulate": True}),
        (cases.TINY_SILU, "row", {}),
        (EDGES, "row", {}),
        (EDGES, "transposed", {"contiguous": True}),
        (replace(EDGES, name="two_panels", d=520, L=60, activation="silu", k=3), "row", {}),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_single_kernels_on_the_emulator(case, order, options, monkeypatch):
    """The suites' calls of ops, launched on the CPU, and their check against float64: right, and sharp for sums."""
    from tests.layer import test_device_code as emulation  # skips where there is no compiler

    with emulation.emulated() as device:
        known = {}

        def describe(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                known[storage.data_ptr()] = raw, tensor
                device.allocations.append(
                    emulation.Allocation(storage.data_ptr(), storage.nbytes(), True, weakref.ref(raw))
                )
            return arrays.Array(
                tensor, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), arrays._torch_name(tensor.dtype), 0
            )

        def empty(shape, dtype, _, transposed):
            assert not transposed
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            made = describe(tensor.fill_(-(2**30) if dtype.startswith("int") else float("nan")))
            return arrays.Buffer(tensor, made.ptr)

        monkeypatch.setattr(arrays.Torch, "describe", staticmethod(describe))
        monkeypatch.setattr(arrays.Torch, "empty", staticmethod(empty))
        monkeypatch.setattr(arrays.Torch, "stream", staticmethod(lambda device: emulation.STREAM))
        single = kernels.Kernels(case, inputs.layer_inputs(case, order), **options)
        for name, call in single.calls.items():
            result = single.results[name]()
            adds = "accumulate" in options and name.endswith("_wgrad")
            assert result.dtype == (torch.float32 if adds else torch.bfloat16)
            if not adds:
                result.fill_(float("nan"))
            call()
            device.synchronize()
            assert single.error(name) < 6e-3, name
            if name in kernels.SUMMED:
                result[7] = 0
                assert single.error(name) > verify.TOLERANCE, name


def test_a_timed_dispatch_is_one(monkeypatch):
    """The lists that all providers make come from one build per call."""
    from bench import bench_dispatch

    built = []
    monkeypatch.setattr(bench_dispatch.mb, "build_dispatch", lambda ids, E: built.append(E) or reference_lists(ids, E))
    ids = torch.tensor([[0, 2], [1, 0]])
    bench_dispatch.builder("moeblaze", 3)(ids)
    assert built == [3]


def reference_lists(ids, E):
    return reference.dispatch(ids.numpy(), E)


def test_steps_of_graphs_run_without_a_gpu():
    """Where there is no GPU, of eager mode alone."""
    (row,) = graphs.measured(1, "cpu")
    assert row["step"] == "eager" and row["median"] > 0


def test_times_of_kernels_are_medians_by_position():
    """Of two calls with two kernels each."""
    events = [("a", 0.0, 2.0), ("b", 5.0, 6.0), ("a", 20.0, 24.0), ("b", 25.0, 28.0)]
    rows = kernel_times.by_position(2, events)
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["a", "3.00", "0.00"],
        ["b", "2.00", "2.00"],
        ["sum", "5.00", ""],
    ]
    with pytest.raises(RuntimeError, match="different kernels"):
        kernel_times.by_position(2, [*events[:3], events[0]])
