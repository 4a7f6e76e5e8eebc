"""The router, forward and backward, beside a copy of the same bytes, torch's operators, these compiled, and other
libraries' kernels of softmax and top-k where they are installed.

A case with sums is a router and its balancing losses: backward takes the gradients of both.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moeblaze_cupy as mb
from bench import cases, measure
from bench.cases import RouterCase
from bench.conftest import parametrize
from bench.inputs import device

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="router")
PROVIDERS = ("copy", "moeblaze", "torch")
PEERS = ("sonicmoe", "quack")
COMPILED = ("dsv3", "dsv3_grouped")  # a compilation takes seconds
BESIDE_TORCH = ("dsv3", "dsv3_grouped", "dsv3_sums", "qwen30b", "conf3", "mixtral")


def pytest_generate_tests(metafunc):
    def specs(case: RouterCase) -> list[tuple[RouterCase, str, str]]:
        providers = [p for p in PROVIDERS if p != "torch" or case.name in (*BESIDE_TORCH, "tiny")]
        found = [(case, provider, what) for what in ("forward", "backward") for provider in providers]
        found += [(case, "torch_compile", "forward")] * (case.name in COMPILED)
        is_plain = case.score == "softmax" and case.renormalize and not case.sums
        return found + [(case, peer, "forward") for peer in PEERS if is_plain and case.name in BESIDE_TORCH]

    chosen = metafunc.config.getoption("--provider")
    wanted = chosen.split(",") if chosen else (*PROVIDERS, "torch_compile", *PEERS)

    def combinations(name, config):
        return [spec for spec in specs(cases.ROUTERS[name]) if spec[1] in wanted]

    parametrize(metafunc, ",".join(cases.ROUTERS), combinations, specs(cases.TINY_ROUTER), cases.ROUTERS)


def options_of(case: RouterCase, bias: torch.Tensor) -> dict[str, Any]:
    named = {"score": case.score, "renormalize": case.renormalize, "groups": case.groups, "sums": case.sums}
    return named | ({"bias": bias} if case.biased else {})


def torch_route(case: RouterCase, logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By torch's operators: weights (L, k) float32, ids (L, k), then the sums: shares (E,), z ()."""
    logits = logits.float()
    scores = logits.softmax(dim=1) if case.score == "softmax" else logits.sigmoid()
    keys = scores + bias if case.biased else scores
    if case.groups:
        n, kept, top = case.groups
        best = keys.unflatten(1, (n, -1)).topk(top, dim=2).values.sum(dim=2).topk(kept, dim=1).indices
        outside = torch.ones(len(keys), n, dtype=torch.bool, device=keys.device).scatter_(1, best, False)
        keys = keys.masked_fill(outside.repeat_interleave(case.E // n, dim=1), -torch.inf)
    ids = keys.topk(case.k, dim=1).indices
    weights = scores.gather(1, ids)
    if case.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    sums = []
    if case.sums:
        sums.append((scores if case.score == "softmax" else scores / scores.sum(1, keepdim=True)).sum(0))
    if "z" in case.sums:
        sums.append(logits.logsumexp(1).square().sum())
    return weights, ids, *sums


class Problem:
    """One set of tensors of a case, and the calls that are timed."""

    def __init__(self, case: RouterCase, generator: torch.Generator) -> None:
        make = functools.partial(torch.randn, generator=generator, device=device())
        self.case, self.bias = case, make(case.E) / 8
        self.logits = make(case.L, case.E).to(getattr(torch, case.dtype))
        self.options = options_of(case, self.bias)
        self.weights, self.ids, *self.sums = mb.route(self.logits, case.k, **self.options)
        self.grad = make(case.L, case.k)
        v, z = make(1, case.E) / case.L, make(1) / case.L
        self.grads = {"grad_score_sums": v, "grad_z_sums": z} if "z" in case.sums else {}
        self.grads |= {"grad_score_sums": v} if case.sums else {}

    def forward(self) -> Any:
        return mb.route(self.logits, self.case.k, **self.options)

    def backward(self) -> torch.Tensor:
        return mb.route_backward(self.grad, self.logits, self.weights, self.ids, **self.options, **self.grads)

    def torch_forward(self, route: Callable[..., Any] = torch_route) -> Any:
        return route(self.case, self.logits, self.bias)

    def torch_backward(self) -> torch.Tensor:
        """Autograd's, through the gather that forward would have kept: the whole chain, forward and backward."""
        leaf = self.logits.detach().requires_grad_()
        weights, _, *sums = torch_route(self.case, leaf, self.bias)
        (grad,) = torch.autograd.grad((weights, *sums), leaf, (self.grad, *(g[0] for g in self.grads.values())))
        return grad

    def check(self) -> None:
        weights, ids, *sums = torch_route(self.case, self.logits, self.bias)
        same = (self.ids == ids).all(dim=1)
        assert same.float().mean() > (0.5 if self.case.dtype == "bfloat16" else 0.999)  # ties may come in any order
        torch.testing.assert_close(self.weights[same], weights[same], rtol=1e-4, atol=1e-6)
        for got, want in zip((s for s in (self.sums[0] if self.sums else ()) if s is not None), sums, strict=True):
            torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4)
        close = {"rtol": 1e-3, "atol": 1e-5} if self.case.dtype == "float32" else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(self.backward()[same], self.torch_backward()[same], **close)

    def nbytes(self, what: str) -> int:
        """Read and written once: logits where they count, weights and ids, the gradient of either."""
        logits, slots = self.logits.nbytes, 8 * self.case.L * self.case.k
        if what == "forward":
            return logits + slots
        over_all = self.case.sums or (self.case.score == "softmax" and not self.case.renormalize)
        gathered = 0 if self.case.score == "softmax" else 32 * self.case.L * self.case.k  # a sector of each
        return logits + (logits if over_all else min(gathered, logits)) + slots + 4 * self.case.L * self.case.k


def peer_route(peer: str, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By another library: weights (L, k) float32, ids (L, k) int32. Skips where it is not installed."""
    if peer == "quack":
        weights, ids = pytest.importorskip("quack.topk", exc_type=ImportError).topk_fwd(logits, k, softmax=True)
        return weights, ids
    forward = pytest.importorskip("sonicmoe.functional.forward", exc_type=ImportError)
    weights = logits.new_empty((len(logits), k))
    ids = logits.new_empty((len(logits), k), dtype=torch.int32)
    forward._topk_softmax_fwd(logits, weights, ids, logits.shape[1], k, True, False)
    return weights, ids


@functools.cache
def compiled() -> Callable[..., Any]:
    return torch.compile(torch_route, dynamic=False)


def test_router(spec, time_device):
    """Time of one call: graph replays over rotating inputs. Results are compared with torch's first.

    torch's backward is autograd's with the forward that it needs.
    """
    case, provider, what = spec
    generator = torch.Generator(device()).manual_seed(0)
    problems = [Problem(case, generator)]
    nbytes = problems[0].nbytes(what)
    problems += [Problem(case, generator) for _ in range(measure.sets_for_cold_cache(nbytes) - 1)]
    if provider == "copy":
        sources = [torch.empty(nbytes // 2, dtype=torch.uint8, device=device()) for _ in problems]
        run = [source.clone for source in sources]
    elif provider == "moeblaze":
        if case.L < 2**20:
            problems[0].check()
        run = [getattr(problem, what) for problem in problems]
    elif provider == "torch_compile":
        compiled()(case, problems[0].logits, problems[0].bias)
        run = [functools.partial(problem.torch_forward, compiled()) for problem in problems]
    elif provider in PEERS:
        weights, ids = peer_route(provider, problems[0].logits, case.k)
        same = (problems[0].ids == ids).all(dim=1)
        assert same.float().mean() > 0.999
        torch.testing.assert_close(problems[0].weights[same], weights[same], rtol=1e-4, atol=1e-6)
        run = [functools.partial(peer_route, provider, problem.logits, case.k) for problem in problems]
    else:
        run = [getattr(problem, f"torch_{what}") for problem in problems]
    time_device(
        measure.in_a_row(run) if provider == "copy" and nbytes > measure.LONG_BYTES else measure.in_graph(run),
        len(run),
        bound=(case, what, "router"),
        is_bound=provider == "copy",
        busy=measure.BRIEFLY,
        nbytes=nbytes,
        case=case.name,
        shape=case.shape,
        provider=provider,
        dtype=case.dtype,
        **{"pass": what},
    )
