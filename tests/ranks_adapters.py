"""Cases of the adapters to other exchanges and trainers, over gloo, with stand-ins for what is not installed."""

import torch
import torch.distributed as dist
from ranks_common import E, Inputs, K, case, compare, counts_of, difference, expect, results_of

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
