"""Cases of the adapters to other exchanges and trainers, over gloo, with stand-ins for what is not installed."""

from types import SimpleNamespace

import titan
import torch
import torch.distributed as dist
from ranks_common import D, E, H, Inputs, K, case, compare, counts_of, difference, expect, results_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moeblaze_cupy.interop.deepep import DeepEPGroup
from moeblaze_cupy.interop.exchange import ExpertGroup, collect, exchange
from moeblaze_cupy.interop.expert_parallel import expert_parallel_moe


class GatheringBuffer:
    """The methods of DeepEP's Buffer over gathered objects. Rows arrive in an order of no meaning."""

    def __init__(self, group):
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.called = []

    def gathered(self, mine):
        everyone = [None] * self.group_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def get_dispatch_layout(self, topk_idx, num_experts):
        self.experts_here = num_experts // self.group_size
        ranks = torch.where(topk_idx >= 0, topk_idx // self.experts_here, -1)
        in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.group_size)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        *,
        async_finish=False,
    ):
        self.called.append("dispatch")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            rows = self.gathered(x)
            received = [rows[rank][token] for rank, token in handle["sources"]]
            return torch.stack(received) if received else x.new_empty((0, x.shape[1])), None, None, None, None, None
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype in (torch.float32, torch.float64)
        everyone = self.gathered((x, topk_idx, topk_weights, is_token_in_rank))
        sources = [(r, t) for r, of in enumerate(everyone) for t in range(len(of[0])) if of[3][t, self.rank]]
        order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(5)).tolist()
        sources = [sources[place] for place in order]
        rows, ids, weights = (
            torch.stack([everyone[r][part][t] for r, t in sources]) if sources else mine.new_empty((0, mine.shape[1]))
            for part, mine in enumerate((x, topk_idx, topk_weights))
        )
        local = ids - self.rank * self.experts_here
        local = torch.where((ids >= 0) & (local >= 0) & (local < self.experts_here), local, -1)
        counts = torch.bincount(local[local >= 0], minlength=self.experts_here).tolist()
        handle = {"sources": sources, "tokens": len(x)}
        return rows, local, torch.where(local >= 0, weights, 0), counts, handle, None

    def combine(self, x, handle, topk_weights=None, *, async_finish=False):
        self.called.append("combine")
        assert not async_finish and len(x) == len(handle["sources"])
        everyone = self.gathered((x, topk_weights, handle["sources"]))
        out = x.new_zeros((handle["tokens"], x.shape[1]))
        sums = None if topk_weights is None else topk_weights.new_zeros((handle["tokens"], topk_weights.shape[1]))
        for rows, weights, sources in everyone:
            for place, (rank, token) in enumerate(sources):
                if rank == self.rank:
                    out[token] += rows[place]
                    if sums is not None:
                        sums[token] += weights[place]
        return out, sums, None


@case
def rows_by_deepep(rank, size, group):
    """Every routing and distribution of tokens; pieces; rows sent again; gradients that are not wanted."""
    buffer = GatheringBuffer(group)
    experts = DeepEPGroup(buffer, E)
    for kind in ("equal", "uneven", "none_here", "none"):
        for routing in ("random", "one_rank", "absent", "all_absent"):
            inputs = Inputs(rank, counts_of(size, kind), routing)
            compare(inputs, results_of(inputs, experts), 1e-14, same_bits=False)
    assert buffer.called[:4] == ["dispatch", "combine", "dispatch", "combine"] and len(buffer.called) == 64
    inputs = Inputs(rank, counts_of(size, "uneven"), "absent", pair=True)
    for options in ({"keep_received": False}, {"slots": 20}):
        compare(inputs, results_of(inputs, DeepEPGroup(buffer, E, **options)), 1e-14, same_bits=False)
    low = Inputs(rank, counts_of(size, "uneven"), dtype=torch.bfloat16)
    got, want = results_of(low, experts), low.whole()
    assert all(difference(got[name], want[name]) < 1e-2 for name in want)
    want = inputs.whole()
    for which in ("x", "weights", "w2"):
        x, ids, weights, w1, w2 = inputs.local()
        named = {"x": x, "weights": weights, "w2": w2}
        for name, tensor in (*named.items(), *(("w1", half) for half in w1)):
            tensor.requires_grad_(name == which)
        expert_parallel_moe(x, ids, weights, w1, w2, experts).backward(inputs.grad[inputs.here])
        assert difference(named[which].grad, want[which]) <= 1e-14


@case
def own_experts_by_deepep(rank, size, group):
    """`exchange` and `collect`, with experts of the caller's that multiply by the sum of a row's weights here."""
    inputs = Inputs(rank, counts_of(size, "uneven"), "absent")
    x, ids, weights, _, _ = inputs.local()
    rows, local_ids, got, route = exchange(x, ids, weights, DeepEPGroup(GatheringBuffer(group), E))
    assert route.slots == int((local_ids >= 0).sum()) and route.received == len(rows)
    collect(rows * torch.where(local_ids >= 0, got, 0).sum(1, keepdim=True), route).backward(inputs.grad[inputs.here])
    valid = (ids >= 0) & (ids < E)
    total = torch.where(valid, weights, 0).sum(1, keepdim=True)
    assert difference(x.grad, total * inputs.grad[inputs.here]) <= 1e-14
    dot = (x * inputs.grad[inputs.here]).sum(1, keepdim=True)
    assert difference(weights.grad, torch.where(valid, dot, 0)) <= 1e-14
    assert torch.equal(route.choices, torch.bincount(ids[valid].long(), minlength=E))


@case
def faults_by_deepep(rank, size, group):
    """Ranks that differ raise before DeepEP is asked to send anything."""
    expect(TypeError, "buffer: expected one with DeepEP's get_dispatch_layout, got", DeepEPGroup, group, E)
    buffer = GatheringBuffer(group)
    text = "got kind='ExpertGroup' on rank 0 and kind='DeepEPGroup' on rank"
    expect(ValueError, text, lambda: DeepEPGroup(buffer, E) if rank == size - 1 else ExpertGroup(group, E))
    expect(ValueError, "route: expected none, as the buffer decides", lambda: DeepEPGroup(buffer, E, route="gather"))
    experts = DeepEPGroup(buffer, E)
    x, ids, weights, w1, w2 = Inputs(rank, counts_of(size, "equal"), dtype=torch.bfloat16, h=32).local()
    in_fp8 = lambda: expert_parallel_moe(  # noqa: E731
        x, ids, weights, w1, w2, experts, precision="fp8", row_precision="fp8"
    )
    expect(ValueError, "row_precision: expected None with DeepEPGroup, got 'fp8'", in_fp8)
    inputs = Inputs(rank, counts_of(size, "equal"), k=K - (rank == size - 1))
    got = [K] * (size - 1) + [K - 1]
    expect(ValueError, f"exchange: k: expected the same on all ranks, got {got}", results_of, inputs, experts)
    assert not buffer.called


def config_of_torchtitan(h):
    """torchtitan's, and the function of the example's override that replaces it."""
    with titan.installed():
        import examples.torchtitan_experts  # noqa: F401
    config = titan.RoutedExperts.Config(
        inner_experts=titan.GroupedExperts.Config(dim=D, hidden_dim=h, num_experts=E),
        token_dispatcher=titan.LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    return config, titan.OVERRIDES[titan.RoutedExperts.Config]


@case
def override_of_torchtitan(rank, size, group):
    """The example's override of RoutedExperts, over ranks and in one process, beside the class that it replaces."""
    config, replace = config_of_torchtitan(H)
    inputs = Inputs(rank, counts_of(size, "uneven"))
    weights = {"w1_EFD": inputs.w1[:, :, :H].mT, "w2_EDF": inputs.w2.mT, "w3_EFD": inputs.w1[:, :, H:].mT}
    for mesh in (DeviceMesh.from_group(group, "cpu"), None):
        here = inputs.here if mesh else slice(None)
        results = []
        for kind, part in ((config, slice(None)), (replace(config), here)):
            module = kind.build()
            module.inner_experts.load_state_dict(weights)
            if kind is not config:
                module.parallelize(SimpleNamespace(get_optional_mesh=lambda name, mesh=mesh: mesh))
            x, scores = inputs.leaf(inputs.x, part), inputs.leaf(inputs.weights, part)
            ids = inputs.ids[part].long()
            out = module(x, scores, ids, torch.bincount(ids.reshape(-1), minlength=E))
            out.backward(inputs.grad[part])
            named = {name: parameter.grad for name, parameter in module.inner_experts.named_parameters()}
            named |= {"out": out, "x": x.grad, "scores": scores.grad}
            if kind is config:
                named |= {name: named[name][here] for name in ("out", "x", "scores")}
            results.append({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named.items()})
        want, got = results
        assert got.keys() == want.keys() == {*weights, "out", "x", "scores"}
        for name, tensor in got.items():
            assert difference(tensor, want[name]) <= 1e-14, name
    config.token_dispatcher.score_before_experts = True
    expect(NotImplementedError, "expected score_before_experts=False", replace, config)


@case
def override_of_torchtitan_in_fp8(rank, size, group):
    """Products and rows in e4m3, over ranks, and products in one process."""
    config, replace = config_of_torchtitan(32)
    inputs = Inputs(rank, counts_of(size, "uneven"), dtype=torch.bfloat16, h=32, pair=True)
    in_fp8 = {"precision": "fp8"}
    stored = {"w1_EFD": inputs.w1[0].mT, "w2_EDF": inputs.w2.mT, "w3_EFD": inputs.w1[1].mT}
    over_ranks = results_of(inputs, ExpertGroup(group, E), row_precision="fp8", **in_fp8)
    for mesh, want in ((DeviceMesh.from_group(group, "cpu"), over_ranks), (None, inputs.whole(**in_fp8))):
        made = replace(config)
        made.inner_experts = titan.derive(made.inner_experts, type(made.inner_experts), row_precision="fp8", **in_fp8)
        module = made.build().bfloat16()
        module.inner_experts.load_state_dict(stored)
        module.parallelize(SimpleNamespace(get_optional_mesh=lambda name, mesh=mesh: mesh))
        part = inputs.here if mesh else slice(None)
        x, scores = inputs.leaf(inputs.x, part), inputs.leaf(inputs.weights, part)
        out = module(x, scores, inputs.ids[part], None)
        out.backward(inputs.grad[part])
        own = inputs.experts if mesh is None else slice(None)
        grads = {
            name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)[own].mT
            for name, p in module.inner_experts.named_parameters()
        }
        got = {"out": out.detach(), "x": x.grad, "weights": scores.grad}
        got = {name: tensor if mesh else tensor[inputs.here] for name, tensor in got.items()}
        got |= {"w1": torch.cat([grads["w1_EFD"], grads["w3_EFD"]]), "w2": grads["w2_EDF"]}
        for name in want:
            assert torch.equal(got[name], want[name]), name
