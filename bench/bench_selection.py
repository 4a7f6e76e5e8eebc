"""Selections of pairs beside index lists, a copy of the scores and torch's operators; layers that run on pairs.

capacity   limit_capacity beside build_dispatch of the same ids
experts    expert_choice and round_tokens beside a copy of the logits, torch.topk and torch.sort over tokens
counts     tokens_per_expert beside a copy of the ids and torch.bincount
quantile   quantile_histogram beside a copy of the logits
layer      forward and backward of a layer on the pairs of expert choice and token rounding, beside k experts per token
"""

import inspect

import pytest
import torch

import moeblaze_cupy as mb
from bench import cases, inputs, measure
from bench.conftest import parametrize
from bench.inputs import device

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="selection")
PROVIDERS = {
    "capacity": ("dispatch", "position", "choice", "weights", "priority"),
    "experts": ("copy", "expert_choice", "round_tokens", "torch_topk", "torch_sort"),
    "counts": ("copy", "tokens_per_expert", "torch_bincount"),
    "quantile": ("copy", "quantile_histogram"),
    "layer": ("top_k", "expert_choice", "round_tokens"),
}
MANY = "qwen30b_65536"


def pytest_generate_tests(metafunc):
    def specs(case, parts):
        return [(case, part, provider) for part in parts for provider in PROVIDERS[part]]

    def combinations(name, config):
        if name in cases.DISPATCHES:
            return specs(cases.DISPATCHES[name], ("capacity", "counts"))
        parts = ("capacity", "experts", "counts", "quantile") if name == MANY else ("layer",)
        return specs(cases.LAYERS[name], parts)

    among = cases.LAYERS | cases.DISPATCHES
    parametrize(metafunc, f"{MANY},qwen3_1m,olmoe,qwen30b", combinations, specs(cases.TINY, PROVIDERS), among)


class Data:
    """What one case selects from: logits, the ids of their top-k, weights, and buffers to copy."""

    def __init__(self, case, seed: int):
        generator = torch.Generator(device()).manual_seed(seed)
        self.L, self.E, self.k = case.L, case.E, case.k
        self.capacity = case.L * case.k // case.E
        self.ids = inputs.routing(case.L, case.E, case.k, "random", generator).int()
        self.weights = torch.rand(case.L, case.k, generator=generator, device=device())
        self.priority = self.weights.amax(dim=1)
        self.bias = torch.zeros(case.E, device=device())
        self.bounds = torch.tensor([-1.0, 1.0], device=device())
        self.histogram = torch.zeros(case.E, 1000, dtype=torch.int32, device=device())
        self.generator = generator

    def logits(self):
        return torch.randn(self.L, self.E, generator=self.generator, device=device())


def limited(data, order):
    given = {order: getattr(data, order)} if order in ("weights", "priority") else {}
    return mb.limit_capacity(data.ids, data.E, data.capacity, order=order, **given)


def stays(data, order):
    """(L, k) bool, by a stable sort of slots."""
    slot = torch.arange(data.ids.numel(), device=device()).reshape(data.ids.shape)
    key = {
        "position": torch.zeros_like(data.weights),
        "choice": (slot % data.k).float(),
        "weights": -data.weights,
        "priority": -data.priority[:, None].expand(-1, data.k),
    }[order]
    by_key = key.reshape(-1).sort(stable=True).indices
    by_expert = by_key[data.ids.reshape(-1)[by_key].sort(stable=True).indices]
    counts = torch.bincount(data.ids.reshape(-1), minlength=data.E)
    first = (counts.cumsum(0) - counts)[data.ids.reshape(-1)[by_expert].long()]
    kept = torch.empty(data.ids.numel(), dtype=torch.bool, device=device())
    kept[by_expert] = torch.arange(data.ids.numel(), device=device()) - first < data.capacity
    return kept.reshape(data.ids.shape)


def dense(pairs, L, E):
    """(L, E) bool of token_offsets and ids."""
    token_offsets, ids = pairs
    token = torch.repeat_interleave(torch.arange(L, device=device()), token_offsets.diff())
    taken = torch.zeros(L, E, dtype=torch.bool, device=device())
    taken[token, ids[: len(token)].long()] = True
    return taken


def check(data, part, provider, logits):
    """Raises AssertionError where a selection is wrong."""
    if part == "capacity" and provider != "dispatch":
        assert torch.equal(limited(data, provider), torch.where(stays(data, provider), data.ids, -1))
    if provider == "expert_choice":
        taken = dense(mb.expert_choice(logits, data.capacity), data.L, data.E)
        assert (taken.sum(dim=0) == data.capacity).all()
        least = torch.where(taken, logits, torch.inf).amin(dim=0)
        assert (least >= torch.where(taken, -torch.inf, logits).amax(dim=0)).all()
    if provider == "round_tokens":
        taken = dense(mb.round_tokens(logits, data.ids), data.L, data.E)
        assert (taken.sum(dim=0) % 128 == 0).all() or data.L < 128
        chosen = torch.zeros_like(taken).scatter_(1, data.ids.long(), True)
        assert ((chosen & ~taken).any(dim=0) & (taken & ~chosen).any(dim=0)).sum() == 0
    if provider == "tokens_per_expert":
        counts = torch.bincount(data.ids.reshape(-1), minlength=data.E)
        assert torch.equal(mb.tokens_per_expert(data.ids, data.E)[0].long(), counts)
    if provider == "quantile_histogram":
        mb.quantile_histogram(logits, data.ids, data.bias, data.histogram, data.bounds)
        assert (data.histogram.sum(dim=1) == data.L).all()


def call(data, part, provider, logits):
    """One call, to be captured in a graph. torch.bincount waits for the GPU, so scatter_add stands in for it."""
    if part == "capacity":
        return mb.build_dispatch(data.ids, data.E).lists if provider == "dispatch" else limited(data, provider)
    if provider == "copy":
        return (data.ids if part == "counts" else logits).clone()
    if provider == "expert_choice":
        return mb.expert_choice(logits, data.capacity)
    if provider == "round_tokens":
        return mb.round_tokens(logits, data.ids)
    if provider == "torch_topk":
        return logits.topk(max(data.capacity, 1), dim=0)
    if provider == "torch_sort":
        return logits.sort(dim=0, descending=True, stable=True)
    if provider == "tokens_per_expert":
        return mb.tokens_per_expert(data.ids, data.E)
    if provider == "torch_bincount":
        flat = data.ids.reshape(-1).long()
        return torch.zeros(data.E, dtype=torch.int64, device=device()).scatter_add_(0, flat, torch.ones_like(flat))
    return mb.quantile_histogram(logits, data.ids, data.bias, data.histogram, data.bounds)


def test_selection(spec, time_device):
    """Time of one call: graph replays over rotating inputs. Results are compared first."""
    case, part, provider = spec
    if part == "layer":
        return time_layer(case, provider, time_device)
    of_scores = part in ("experts", "quantile")
    nbytes = 8 * case.L * case.E if of_scores else 8 * case.slots if part == "counts" else 12 * case.slots
    calls = measure.sets_for_cold_cache(nbytes, 4)
    sets = [Data(case, seed) for seed in range(calls)]
    logits = [data.logits() if of_scores else None for data in sets]
    check(sets[0], part, provider, logits[0])
    run = [lambda i=i: call(sets[i], part, provider, logits[i]) for i in range(calls)]
    time_device(
        measure.in_graph(run),
        calls,
        bound=(case, part, "selection"),
        is_bound=provider in ("copy", "dispatch"),
        busy=measure.BRIEFLY,
        nbytes=nbytes,
        case=case.name,
        shape=case.shape,
        provider=provider,
        **{"pass": part},
    )


def time_layer(case, provider, time_device):
    """Forward with backward of the layer, on as many pairs as k experts per token are. Weights of pairs are random."""
    if "token_offsets" not in inspect.signature(mb.moe_forward).parameters:
        pytest.skip("moe_forward takes no token_offsets")
    made = inputs.layer_inputs(case)
    x, w1, w2, grad_out = (made[name] for name in ("x", "w1", "w2", "grad_out"))
    ids, options = made["ids"], {}
    if provider != "top_k":
        data = Data(case, 0)
        logits = data.logits()
        if provider == "expert_choice":
            token_offsets, ids = mb.expert_choice(logits, data.capacity)
        else:
            token_offsets, ids = mb.round_tokens(logits, logits.topk(case.k, dim=1).indices.int(), rounding="balance")
        options["token_offsets"] = token_offsets
    weights = torch.rand(ids.shape, device=device())

    def forward_backward():
        _, saved = mb.moe_forward(x, ids, weights, w1, w2, **options)
        return mb.moe_backward(grad_out, saved)

    time_device(
        forward_backward,
        bound=(case, "layer", "selection"),
        is_bound=provider == "top_k",
        flops=case.flops("forward_backward"),
        back_to_back=True,
        case=case.name,
        shape=case.shape,
        provider=provider,
        pairs=int(options["token_offsets"][-1]) if options else case.slots,
        **{"pass": "layer"},
    )
