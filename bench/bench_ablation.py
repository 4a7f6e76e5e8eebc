"""Tables 4 and 5: from a routed-buffer torch layer to this package, one step at a time.

routed torch, sort          tokens sorted into a routed buffer, grouped products by torch
fused kernels, sort         this package's kernels with save="paper", lists by torch's stable sort
and recomputation, sort     save="minimal": act(a) * b is computed again in backward
and dispatch                the lists by this package's dispatch kernels
"""

import contextlib

import pytest

from bench import cases, kernels, measure, providers
from bench.conftest import parametrize
from bench.inputs import has_gpu

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="ablation")
PASS = "forward_backward"
STEPS = {  # step: provider, and whether a sort takes the place of dispatch
    cases.ABLATION[0]: ("torch_grouped_mm", False),
    cases.ABLATION[1]: ("moeblaze_paper", True),
    cases.ABLATION[2]: ("moeblaze", True),
    cases.ABLATION[3]: ("moeblaze", False),
}


def pytest_generate_tests(metafunc):
    def combinations(name, config):
        return [(cases.LAYERS[name], step) for step in STEPS]

    parametrize(metafunc, "ablation", combinations, [(cases.TINY, step) for step in STEPS])


def test_ablation(spec, current, time_device):
    case, step = spec
    name, sorts = STEPS[step]
    provider = providers.PROVIDERS[name]
    layer = current.layer_of(case, provider.orders[0], provider)
    # without a GPU the lists are NumPy's anyway
    lists = kernels.SortedDispatch(layer.inputs["ids"], case.E) if sorts and has_gpu() else contextlib.nullcontext()
    with lists:
        time_device(
            layer.forward_backward,
            flops=case.flops(PASS),
            case=case.name,
            source=case.source,
            shape=case.shape,
            provider=step,
            saved_mib=measure.saved_mib(layer.forward, [*layer.leaves, *layer.inputs.values()]),
            peak_mib=measure.peak_mib(layer.forward_backward),
            **{"pass": PASS},
        )
