"""The layer, forward and forward with backward: this package, the cuBLAS bound, torch and the peers."""

import pytest

from bench import cases, measure, providers
from bench.conftest import layer_specs, parametrize

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="layer")
TINY_PROVIDERS = ("cublas_bound", "moeblaze", "moeblaze_recompute", "torch_grouped_mm", "torch_routed", "sonicmoe")


def pytest_generate_tests(metafunc):
    tiny = [
        (case, "transposed", providers.PROVIDERS[name], what)
        for case in (cases.TINY, cases.TINY_SILU)
        for name in TINY_PROVIDERS
        for what in ("forward", "forward_backward")
    ]
    parametrize(metafunc, "quick,table1,production", layer_specs("quick,torch"), tiny)


def test_layer(spec, current, time_device):
    """Time, and with backward also MiB saved for it (parameters and x excluded) and the peak less the gradients."""
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
    time_device(
        getattr(layer, what),
        bound=(case, order, what),
        is_bound=not provider.checked,
        flops=case.flops(what),
        **info,
    )
