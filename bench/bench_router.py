"""Softmax and top-k of the router, forward and backward, beside a copy of the same bytes and torch's operators."""

import pytest
import torch

import moeblaze_cupy as mb
from bench import cases, measure
from bench.conftest import parametrize
from bench.inputs import device

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="router")
PROVIDERS = ("copy", "moeblaze", "torch")


def pytest_generate_tests(metafunc):
    def combinations(name, config):
        return [
            (cases.LAYERS[name], provider, what) for what in ("forward", "backward") for provider in PROVIDERS
        ]  # fmt: skip

    tiny = [(cases.TINY, provider, what) for what in ("forward", "backward") for provider in PROVIDERS]
    parametrize(metafunc, "qwen30b,dsv3,mixtral,conf3", combinations, tiny)


def torch_route(logits: torch.Tensor, k: int):
    """Renormalised softmax then top-k, by torch: weights (L, k) float32 and ids (L, k)."""
    values, ids = torch.softmax(logits, dim=1).topk(k, dim=1)
    return values / values.sum(1, keepdim=True), ids


def torch_route_backward(grad_weights, weights, ids, E: int) -> torch.Tensor:
    """Gradient of the logits (L, E): softmax over the chosen ones, scattered."""
    grad = weights * (grad_weights - (grad_weights * weights).sum(1, keepdim=True))
    return torch.zeros(len(ids), E, device=ids.device).scatter_(1, ids, grad)


def test_router(spec, time_device):
    """Time of one call: graph replays over rotating logits, float32. Results are compared with torch's first."""
    case, provider, what = spec
    L, E, k = case.L, case.E, case.k
    nbytes = 4 * L * E + 8 * L * k + (4 * L * k if what == "backward" else 0)
    calls = measure.sets_for_cold_cache(nbytes)
    generator = torch.Generator(device()).manual_seed(0)
    logits = [torch.randn(L, E, generator=generator, device=device()) for _ in range(calls)]
    routes = [mb.route(x, k) for x in logits]
    grads = [torch.randn(L, k, generator=generator, device=device()) for _ in logits]
    ids = [i.long() for _, i in routes]
    if provider == "copy":
        sources = [torch.empty(nbytes // 2, dtype=torch.uint8, device=device()).random_(256) for _ in logits]
        run = [source.clone for source in sources]
    elif provider == "moeblaze":
        want = torch_route(logits[0], k)
        torch.testing.assert_close(routes[0][0], want[0], rtol=1e-4, atol=1e-6)
        assert (ids[0] == want[1]).float().mean() > 0.999  # equal logits may come in any order
        got = mb.route_backward(grads[0], logits[0], *routes[0])
        want = torch_route_backward(grads[0], routes[0][0], ids[0], E)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
        run = [
            (lambda i=i: mb.route(logits[i], k))
            if what == "forward"
            else (lambda i=i: mb.route_backward(grads[i], logits[i], *routes[i]))
            for i in range(calls)
        ]
    else:
        run = [
            (lambda i=i: torch_route(logits[i], k))
            if what == "forward"
            else (lambda i=i: torch_route_backward(grads[i], routes[i][0], ids[i], E))
            for i in range(calls)
        ]
    time_device(
        measure.in_graph(run),
        calls,
        bound=(case, what, "router"),
        is_bound=provider == "copy",
        busy=measure.BRIEFLY,
        nbytes=nbytes,
        case=case.name,
        shape=case.shape,
        provider=provider,
        **{"pass": what},
    )
