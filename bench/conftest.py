"""Options of the suites, device time into pytest-benchmark, and one layer at a time in GPU memory.

pytest bench -m gpu --benchmark-json=FILE          on a GPU
pytest bench                                       anywhere: tiny shapes on the CPU
"""

import contextlib
import time

import pytest
import torch

from bench import cases, inputs, measure, providers, verify

ROUNDS = 12
_START = time.monotonic()  # of the first suite
_STARTED = pytest.StashKey[float]()  # this suite


def pytest_addoption(parser):
    group = parser.getgroup("bench", "benchmarks of moeblaze_cupy")
    group.addoption("--case", help="cases or groups, comma-separated; the default differs by suite")
    group.addoption("--provider", help="providers or groups, comma-separated; the default differs by suite")
    group.addoption("--order", help="memory orders of the weights: transposed, row; the default differs by suite")
    group.addoption("--commit", help="commit to write into the record (git's)")
    group.addoption("--minutes", type=float, help="skip what would start later than this into the run")
    group.addoption("--rounds", type=int, default=ROUNDS, help="timed repetitions (%(default)s)")


def pytest_sessionstart(session):
    session.config.stash[_STARTED] = time.monotonic()


def pytest_collection_modifyitems(items):
    if inputs.has_gpu():
        return
    skip = pytest.mark.skip(reason="no GPU: needs a CUDA device that torch can use")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _START > 60 * minutes:
        pytest.skip(f"later than --minutes {minutes:g}")


def pytest_benchmark_update_machine_info(config, machine_info):
    """The GPU in place of the host: a record says nothing of host names or users."""
    machine_info.clear()
    machine_info.update(measure.environment())


def pytest_benchmark_generate_commit_info(config):
    return {"id": config.getoption("--commit") or measure.commit()}


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Adds `wall_s`, the suite's seconds. Drops what only fills a committed record: options that are the same in every
    row, parameters that the name and extra_info hold, single rounds."""
    output_json["wall_s"] = round(time.monotonic() - config.stash[_STARTED], 1)
    for row in output_json["benchmarks"]:
        for name in ("options", "params"):
            row.pop(name, None)
        row["stats"].pop("data", None)


def parametrize(metafunc, default: str, combinations, tiny, among=cases.LAYERS, but=frozenset()) -> None:
    """Parameters for the function in `metafunc`: `combinations(case name, config)` for the chosen cases, marked gpu,
    and the `tiny` ones, which run anywhere. Each is a tuple for the argument named `spec`, and its id its words.
    Chosen cases that are not `among` this suite's, and those in `but`, are another suite's."""
    config = metafunc.config
    try:
        names = cases.select(config.getoption("--case"), default)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    ours = [name for name in names if name in among and name not in but]
    chosen = [(spec, pytest.mark.gpu) for name in ours for spec in combinations(name, config)]
    chosen += [(spec, ()) for spec in tiny]

    def words(spec):
        return "-".join(getattr(part, "name", part) for part in spec)

    metafunc.parametrize("spec", [pytest.param(spec, marks=marks, id=words(spec)) for spec, marks in chosen])


class _Current:
    """The inputs and the layer in use. Asking for others lets go of these first."""

    def __init__(self):
        self.inputs_key = self.layer_key = self.inputs = self.layer = None
        self.errors: dict[str, float] = {}  # of the layer's results against float64
        self.stack = contextlib.ExitStack()

    def inputs_of(self, case, order: str) -> dict:
        if (case, order) != self.inputs_key:
            self.close()
            self.inputs, self.inputs_key = inputs.layer_inputs(case, order), (case, order)
        return self.inputs

    def layer_of(self, case, order: str, provider):
        """The provider's layer, run once and checked. Skips where it cannot run, or other systems than this package
        run out of memory; fails where it is wrong."""
        made = self.inputs_of(case, order)
        if (case, order, provider.name) != self.layer_key:
            self.drop_layer()
            reason = provider.missing() or provider.refuses(case)
            if reason:
                pytest.skip(f"{provider.name}: {reason}")
            self.stack.enter_context(provider.active())
            layer = None
            try:
                layer = provider.build(case, made)
                self.errors = errors_of(case, made, layer) if provider.checked else {}
            except torch.OutOfMemoryError:
                if provider.is_ours:
                    raise
                self.errors, layer = {}, None
            if layer is None:
                pytest.skip(f"{provider.name}: out of memory on {case.name}")
            wrong = verify.problems(self.errors, made["x"].dtype)
            if wrong:
                layer = None
                pytest.fail(f"{provider.name} on {case.name}, {order}: {wrong}; a wrong result gets no time")
            self.layer, self.layer_key = layer, (case, order, provider.name)
        return self.layer

    def drop_layer(self):
        self.layer = self.layer_key = None
        self.stack.close()
        measure.release()

    def close(self):
        self.inputs = self.inputs_key = None
        self.drop_layer()


def errors_of(case, made: dict, layer) -> dict[str, float]:
    """Relative errors of a layer's output and gradients against float64, by name."""
    out = layer.forward().detach()
    return verify.relative_errors(case, made, out, layer.named(layer.forward_backward()))


_CURRENT = _Current()


@pytest.fixture
def current():
    yield _CURRENT


@pytest.fixture(scope="session", autouse=True)
def _close():
    measure.ceilings()  # now: a record is still complete if a provider ends the CUDA context
    yield
    _CURRENT.close()


_BOUNDS: dict[tuple, float] = {}  # seconds of the bound, by what it bounds


@pytest.fixture
def time_device(benchmark, request):
    """time_device(work, calls=1, bound=key, flops=.., nbytes=.., **info): device seconds into the record.

    `work` makes `calls` calls. `info` goes to extra_info, with TFLOP/s and GB/s by the median, and the GPU's state
    while it was busy. A row with is_bound=True sets the bound of `key`; later rows of the same key get their share of
    it. floor: seconds that are the bound where no row sets one. busy, lead and back_to_back as in bench/measure.py.
    """
    rounds = request.config.getoption("--rounds")

    def run(
        work, calls=1, *, bound=None, is_bound=False, floor=None, flops=None, nbytes=None, rounds=rounds,
        busy=measure.BUSY_SECONDS, lead=False, back_to_back=False, **info,
    ):  # fmt: skip
        has_gpu = inputs.has_gpu()
        extra = benchmark.extra_info
        extra.update(info)
        if has_gpu:
            extra["busy_s"] = busy
            extra["gpu_state"], of_one = measure.keep_busy(work, busy)
            swing = measure.ROUND_SECONDS if busy == measure.BUSY_SECONDS else 0
            rounds = max(rounds, min(100, round(swing / of_one)))
        if back_to_back and not benchmark.disabled:
            extra["back_to_back_ms"] = 1e3 * measure.back_to_back_seconds(work, of_one if has_gpu else 0)
            if "power_w" in (state := measure.gpu_state()):
                extra["back_to_back_w"] = state["power_w"]  # NVML's mean of the last second, which is that of the calls
        benchmark.pedantic(
            measure.CLOCK.run, args=(work, calls, lead), rounds=rounds if has_gpu else 2, warmup_rounds=int(has_gpu)
        )
        if benchmark.stats is None:  # --benchmark-disable
            return None
        seconds = benchmark.stats.stats.median
        if flops:
            extra["flops"], extra["tflops"] = flops, flops / seconds / 1e12
        if nbytes:
            extra["bytes"], extra["gb_per_s"] = nbytes, nbytes / seconds / 1e9
        if flops and nbytes and (roofline := measure.roofline_seconds(flops, nbytes)):
            extra["share_of_roofline"] = roofline / seconds
        if bound is not None and is_bound:
            _BOUNDS[bound] = seconds
        elif floor := floor or _BOUNDS.get(bound):
            extra["times_bound"], extra["share_of_bound"] = seconds / floor, floor / seconds
        return seconds

    return run


def orders(config, default: str = "transposed,row") -> list[str]:
    """Memory orders of the weights to time."""
    return (config.getoption("--order") or default).split(",")


def layer_specs(defaults, passes=("forward", "forward_backward")):
    """Combinations of a layer suite: (case, order, provider, pass), the bound before the others of its order.

    defaults(case name) -> the providers and the orders, each comma-separated, that are timed unless options say.
    """

    def combinations(name, config):
        case = cases.LAYERS[name]
        default_providers, default_orders = defaults(name)
        chosen = providers.select(config.getoption("--provider"), default_providers)
        for order in orders(config, default_orders):
            for provider in (providers.PROVIDERS[p] for p in chosen):
                if order in provider.orders:
                    for what in passes:
                        yield case, order, provider, what

    return combinations
