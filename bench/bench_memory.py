"""Memory of the layer per save policy, beside the formulas of `moeblaze_cupy.memory` and a routed-buffer layer.

The paper's Figures 3 and 5 and the memory columns of Tables 2, 4 and 5. A row's time is of one forward and backward.
"""

import pytest

from bench import cases, measure, providers
from bench.conftest import layer_specs, parametrize
from moeblaze_cupy import memory

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="memory")
POLICIES = {"moeblaze": "minimal", "moeblaze_recompute": "recompute", "moeblaze_paper": "paper"}
PASS = ("forward_backward",)


def pytest_generate_tests(metafunc):
    tiny = [(cases.TINY, "transposed", providers.PROVIDERS[name], *PASS) for name in (*POLICIES, "torch_grouped_mm")]
    names = ",".join((*POLICIES, "torch_grouped_mm"))

    def combinations(name, config):
        return (spec for spec in layer_specs(names, PASS)(name, config) if spec[1] == "transposed" and spec[2].checked)

    parametrize(metafunc, "table1,table1_silu,table2,table2_silu", combinations, tiny)


def formula(case, provider: str) -> memory.Plan:
    """The plan of what a provider keeps and allocates; x is among what it keeps."""
    shape = memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation)
    return memory.layer(shape, POLICIES[provider]) if provider in POLICIES else memory.routed_layer(shape)


def test_memory(spec, current, time_device):
    case, order, provider, what = spec
    layer = current.layer_of(case, order, provider)
    plan = formula(case, provider.name)
    x_bytes = layer.inputs["x"].nbytes
    held = sum(term.nbytes for term in plan.saved if term.name != "x")
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
