"""How far the layer's output and gradients are from float64: each save policy and tier, torch's compositions, peers.

A row's errors are in extra_info["accuracy"]. Its time is that of one cold call and stands for nothing.
"""

import pytest
import torch

from bench import accuracy, accuracy_report, cases, measure, providers
from bench.conftest import parametrize

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="accuracy")


def pytest_generate_tests(metafunc):
    def specs(case, chosen):
        return [
            (case, kind, f"seed{seed}", providers.PROVIDERS[name])
            for kind in accuracy.KINDS
            for seed in accuracy.SEEDS
            for name in chosen
            if providers.PROVIDERS[name].checked
        ]

    def combinations(name, config):
        return specs(cases.LAYERS[name], providers.select(config.getoption("--provider"), "accuracy"))

    among = {name for name, case in cases.LAYERS.items() if case.routing == "random"}
    parametrize(metafunc, "accuracy", combinations, specs(cases.TINY, providers.GROUPS["accuracy"]), among)


class _Problem:
    """The inputs in use and their results in float64. Asking for others lets go of these first."""

    def __init__(self):
        self.key = self.inputs = self.want = None

    def of(self, *key):
        if key != self.key:
            self.close()
            self.inputs = accuracy.layer_inputs(*key)
            self.want, self.key = accuracy.reference(key[0], self.inputs), key
        return self.inputs, self.want

    def close(self):
        self.key = self.inputs = self.want = None
        measure.release()


@pytest.fixture(scope="module")
def problem():
    current = _Problem()
    yield current
    current.close()


def test_accuracy(spec, problem, benchmark):
    """Errors of out and of every gradient. They are in the record even where one is that of a wrong result, which fails
    this package's row and is a note on another's."""
    case, kind, seed, provider = spec
    if reason := provider.missing() or provider.refuses(case):
        pytest.skip(f"{provider.name}: {reason}")
    number = int(seed.removeprefix("seed"))
    inputs, want = problem.of(case, kind, number)
    info = {name: case.info[name] for name in ("case", "source", "shape", "activation")}
    benchmark.extra_info.update(info, data=kind, seed=number, provider=provider.name)
    found = {}
    with provider.active():
        try:
            work = (lambda: found.update(accuracy.results(case, inputs, provider)),)
            benchmark.pedantic(measure.CLOCK.run, args=work, rounds=1)
        except torch.OutOfMemoryError:
            if provider.is_ours:
                raise
            found = None
    if found is None:
        pytest.skip(f"{provider.name}: out of memory on {case.name}")
    errors = {name: accuracy.error(found[name], want[name]) for name in accuracy_report.RESULTS}
    benchmark.extra_info["accuracy"] = errors
    if wrong := accuracy.problems(errors):
        told = f"{provider.name} on {case.name}, {kind} data, {seed}: recorded, but {wrong}"
        pytest.fail(told) if provider.is_ours else pytest.skip(told)
