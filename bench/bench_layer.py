"""The layer, forward and forward with backward: this package, the cuBLAS bound, torch and the peers.

Sweeps of one number of a shape, forward with backward. And forward alone on small batches, as a step of inference
calls it, beside the time to read the weights it touches.
"""

import pytest
import torch

import moeblaze_cupy as mb
from bench import cases, inputs, measure, providers, verify
from bench.conftest import layer_specs, parametrize

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="layer")
TINY_PROVIDERS = (
    *("cublas_bound", "cublas_and_traffic", "moeblaze", "moeblaze_recompute"),
    *("torch_grouped_mm", "torch_routed", "sonicmoe"),
)
SWEPT_PASS = ("forward_backward",)
SMALL_SETS = 4  # of tokens, in turn, over the same weights


def defaults(name: str) -> tuple[str, str]:
    """Providers and orders of a case: all of this package's on the quick ones, which bounds the time of a run."""
    if name in cases.GROUPS["quick"]:
        return "ours,torch", "transposed,row"
    return "quick" if name in cases.GROUPS["skewed"] else "quick,torch_grouped_mm", "transposed"


def pytest_generate_tests(metafunc):
    small, swept = set(cases.GROUPS["small"]), {*cases.GROUPS["granularity"], *cases.GROUPS["sparsity"]}
    if metafunc.function is test_small_batch:
        parametrize(metafunc, "small", lambda name, config: [(cases.LAYERS[name],)], [(cases.TINY,)], small)
        return
    if metafunc.function is test_sweep:
        combinations = layer_specs(lambda name: ("quick,torch_grouped_mm,sonicmoe", "transposed"), SWEPT_PASS)
        tiny = [(cases.TINY, "transposed", providers.PROVIDERS[n], *SWEPT_PASS) for n in ("cublas_bound", "moeblaze")]
        parametrize(metafunc, "granularity,sparsity", combinations, tiny, swept)
        return
    tiny = [
        (case, "transposed", providers.PROVIDERS[name], what)
        for case in (cases.TINY, cases.TINY_SILU)
        for name in TINY_PROVIDERS
        for what in ("forward", "forward_backward")
    ]
    default = "quick,table1,production,today,shapes,skewed"
    parametrize(metafunc, default, layer_specs(defaults), tiny, but=small | swept)


def test_layer(spec, current, time_device):
    """Time, and with backward also MiB saved for it (parameters and x excluded), the peak less the gradients, and the
    relative errors of output and gradients."""
    case, order, provider, what = spec
    layer = current.layer_of(case, order, provider)
    info = {
        **case.info,
        "order": order,
        "provider": provider.name,
        "pass": what,
    }
    if provider.checked and what == "forward_backward":
        excluded = [*layer.leaves, *layer.inputs.values()]
        info["saved_mib"] = measure.saved_mib(layer.forward, excluded)
        info["peak_mib"] = measure.peak_mib(layer.forward_backward)
        info["errors"] = {name: float(f"{error:.3g}") for name, error in current.errors.items()}
    time_device(
        getattr(layer, what),
        bound=(case, order, what),
        is_bound=provider.name == "cublas_bound",
        flops=case.flops(what),
        back_to_back=True,
        **info,
    )


@pytest.mark.benchmark(timer=measure.CLOCK, group="sweep")
def test_sweep(spec, current, time_device):
    """As `test_layer`, in a group of its own: the layer's tables leave these cases out."""
    test_layer(spec, current, time_device)


@pytest.mark.benchmark(timer=measure.CLOCK, group="small_batch")
def test_small_batch(spec, current, time_device):
    """Time of one forward that keeps nothing: graph replays over token sets in turn. The experts' weights that a set
    touches are more than the L2 cache holds, and the bound is to read them once, as fast as a copy reads and writes.
    """
    (case,) = spec
    if reason := providers.PROVIDERS["moeblaze"].missing():
        pytest.skip(f"moeblaze: {reason}")
    made = current.inputs_of(case, "transposed")
    generator = torch.Generator(inputs.device()).manual_seed(1)
    sets = [made]
    for _ in range(SMALL_SETS - 1):
        ids = inputs.routing(case.L, case.E, case.k, case.routing, generator).int()
        sets.append({**made, "ids": ids, "x": torch.randn_like(made["x"])})
    names = ("x", "ids", "weights", "w1", "w2")

    def forward(i):
        return mb.moe_forward(*(sets[i][name] for name in names), activation=case.activation, save=None)[0]

    wrong = verify.problems(verify.relative_errors(case, made, forward(0), {}), made["x"].dtype)
    assert wrong is None, f"moeblaze on {case.name}: {wrong}; no time for it"
    touched = sum(len(each["ids"].unique()) for each in sets) / len(sets)
    nbytes = round(touched * (made["w1"][0].nbytes + made["w2"][0].nbytes))
    copied = measure.ceilings().get("copy_gb_per_s")
    time_device(
        measure.in_graph([lambda i=i: forward(i) for i in range(len(sets))]),
        len(sets),
        floor=nbytes / copied / 1e9 if copied else None,
        flops=case.flops("forward"),
        nbytes=nbytes,
        order="transposed",
        provider="moeblaze",
        touched_experts=touched,
        **case.info,
        **{"pass": "forward"},
    )
