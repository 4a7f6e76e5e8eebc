"""Sums over each token's slots, of the output and of the gradient of x, beside a copy of the same bytes.

The aggregation kernel alone; it is part of the rows "+ sums" of the suite grouped_gemm.
"""

import pytest
import torch

from bench import cases, kernels, measure, verify
from bench.conftest import parametrize

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="aggregation")
SUMS = ("aggregate_out", "aggregate_dx")


def pytest_generate_tests(metafunc):
    def combinations(name, config):
        return [(cases.LAYERS[name], provider) for provider in ("copy", *SUMS)]

    parametrize(metafunc, "conf3,conf5,qwen30b,tab2_128k", combinations, [(cases.TINY, "copy")])


@pytest.fixture(scope="module")
def built():
    made = {}
    yield made
    made.clear()


def test_aggregation(spec, current, built, time_device):
    """All panels of one layer, from expert outputs that lie in memory to the tokens' rows."""
    case, name = spec
    inputs = current.inputs_of(case, "transposed")
    nbytes = kernels.aggregation_bytes(case)
    if name == "copy":
        built.clear()
        measure.release()
        device = inputs["x"].device
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device).random_(256)  # read and written
        call = source.clone
    else:
        if case not in built:
            built[case] = kernels.Kernels(case, inputs)
        kernel = built[case]
        call = kernel.calls[name]
        call()
        error = kernel.error(name)
        assert error <= verify.TOLERANCE, f"{name} on {case.name}: relative error {error:.2g}; no time for it"
    time_device(
        call,
        bound=(case, "aggregation"),
        is_bound=name == "copy",
        busy=measure.BRIEFLY,
        lead=True,
        nbytes=nbytes,
        case=case.name,
        shape=case.shape,
        provider="copy" if name == "copy" else "moeblaze",
        kernel=name,
    )
