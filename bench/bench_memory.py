"""Memory of the layer per save policy, beside a dry run and a routed-buffer layer.

The paper's Figures 3 and 5 and the memory columns of Tables 2, 4 and 5. A row's time is of one forward and backward,
so that Table 2 stands here with both of its columns, up to 2M tokens.
"""

from dataclasses import replace

import pytest
import torch

from bench import cases, inputs, measure, providers
from bench.conftest import layer_specs, parametrize
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.tools import dry_run, memory

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="memory")
POLICIES = {"moeblaze": "minimal", "moeblaze_recompute": "recompute", "moeblaze_paper": "paper"}
PASS = ("forward_backward",)


def defaults(name: str) -> tuple[str, str]:
    """Every policy on Table 1's shapes, the default one on the 20 of Table 2. torch's layer up to 2**31 elements in
    its first product: what fails beyond ends the CUDA context for all rows after it."""
    case = cases.LAYERS[name]
    ours = "moeblaze" if name.startswith("tab2_") else ",".join(POLICIES)
    return ours + (",torch_grouped_mm" if case.slots * case.first_columns <= 2**31 else ""), "transposed"


def pytest_generate_tests(metafunc):
    tiny = [(cases.TINY, "transposed", providers.PROVIDERS[name], *PASS) for name in (*POLICIES, "torch_grouped_mm")]
    specs = layer_specs(defaults, PASS)

    def combinations(name, config):
        return (spec for spec in specs(name, config) if spec[1] == "transposed" and spec[2].checked)

    parametrize(metafunc, "table2,table2_silu,table1,table1_silu", combinations, tiny)


def expected(case, provider: str) -> dry_run.DryRun | memory.RoutedLayer:
    """What a provider saves and allocates."""
    shape = memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation, transposed=True)
    if provider not in POLICIES:
        return memory.routed_layer(shape)
    limits = replace(launch_config.H200, tier="sm80")
    if inputs.has_gpu():
        limits = loader.device_limits(torch.cuda.current_device())
    return dry_run.layer(shape, POLICIES[provider], limits)


def test_memory(spec, current, time_device):
    case, order, provider, what = spec
    layer = current.layer_of(case, order, provider)
    plan = expected(case, provider.name)
    x_bytes = layer.inputs["x"].nbytes
    held = plan.saved_bytes - (x_bytes if provider.name in POLICIES else 0)
    info = {
        **case.info,
        "provider": provider.name,
        "pass": what,
        "x_mib": x_bytes / measure.MIB,
        "saved_mib": measure.saved_mib(layer.forward, [*layer.leaves, *layer.inputs.values()]),
        "saved_formula_mib": held / measure.MIB,
        "peak_mib": measure.peak_mib(layer.forward_backward),
        "backward_peak_formula_mib": (held + plan.backward_peak_bytes) / measure.MIB,
    }
    time_device(layer.forward_backward, rounds=3, flops=case.flops(what), **info)
