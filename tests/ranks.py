"""What the processes of `test_exchange.py` run: python ranks.py RANK SIZE FOLDER BACKEND. Each case has its own group.

Every rank draws the inputs of all ranks, and compares its results with one process that has all tokens.
"""

import copy
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import moeblaze_cupy as mb
from moeblaze_cupy.interop.exchange import ExpertGroup, collect, exchange
from moeblaze_cupy.interop.expert_parallel import clip_grad_norm_, expert_parallel_moe
from moeblaze_cupy.interop.torch import moe

TIMEOUT = timedelta(seconds=6)
GPU_TIMEOUT = timedelta(seconds=120)  # compiling takes some of it
E, K, D, H = 8, 3, 16, 12
CASES, GPU_CASES = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def gpu_case(function):
    GPU_CASES[function.__name__] = function
    return function


class Inputs:
    """Of all ranks: tokens by rank, ids, weights, gradients; the experts' weights of all E experts."""

    def __init__(self, rank, counts, routing="random", dtype=torch.float64, seed=0, pair=False, transposed=False, k=K):
        rng = torch.Generator().manual_seed(seed)
        L = sum(counts)

        def normal(*shape):
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        self.x, self.grad, self.weights = normal(L, D), normal(L, D), normal(L, k).abs()
        if dtype in (torch.bfloat16, torch.float16):
            self.weights = self.weights.float()
        self.ids = (
            torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(L)]) if L else torch.zeros(0, k).long()
        )
        if routing == "one_rank":
            self.ids %= 2
        elif routing == "absent":
            self.ids = torch.where(torch.rand(L, k, generator=rng) < 0.5, self.ids, -1 - self.ids)
            self.ids[:1] = E
        elif routing == "all_absent":
            self.ids[:] = -1
        elif routing == "duplicate":
            self.ids[::2, -1] = self.ids[::2, 0]
            self.ids[1::4] = 5
        self.ids = self.ids.to(torch.int32)
        w1, w2 = normal(E, D, 2 * H) / D**0.5, normal(E, H, D) / H**0.5
        if transposed:
            w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
        self.w1, self.w2 = tuple(w1.split(H, 2)) if pair else w1, w2
        if pair:
            self.w1 = tuple(half.contiguous() for half in self.w1)
        start = sum(counts[:rank])
        self.here = slice(start, start + counts[rank])
        e = E // len(counts)
        self.experts = slice(rank * e, (rank + 1) * e)

    def leaf(self, tensor, part):
        return tensor[part].clone(memory_format=torch.preserve_format).detach().requires_grad_()

    def local(self):
        """x, ids, weights, w1, w2 of this rank, with gradients."""
        halves = self.w1 if isinstance(self.w1, tuple) else (self.w1,)
        w1 = tuple(self.leaf(half, self.experts) for half in halves)
        x, weights = self.leaf(self.x, self.here), self.leaf(self.weights, self.here)
        return x, self.ids[self.here], weights, w1 if len(w1) == 2 else w1[0], self.leaf(self.w2, self.experts)

    def whole(self, **options):
        """out and gradients by name of one process with all tokens."""
        out, saved = mb.moe_forward(self.x, self.ids, self.weights, self.w1, self.w2, **options)
        grads = mb.moe_backward(self.grad, saved)
        part = {"out": out[self.here], "x": grads.x[self.here], "weights": grads.weights[self.here]}
        w1 = grads.w1 if isinstance(grads.w1, tuple) else (grads.w1,)
        return part | {"w1": torch.cat([half[self.experts] for half in w1]), "w2": grads.w2[self.experts]}


def difference(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm()) if b.norm() else float(a.abs().max() if a.numel() else 0)


def results_of(inputs, experts, **options):
    x, ids, weights, w1, w2 = inputs.local()
    out = expert_parallel_moe(x, ids, weights, w1, w2, experts, **options)
    out.backward(inputs.grad[inputs.here])
    halves = w1 if isinstance(w1, tuple) else (w1,)
    grads = {"x": x.grad, "weights": weights.grad, "w1": torch.cat([half.grad for half in halves]), "w2": w2.grad}
    return {"out": out.detach(), **grads}


def compare(inputs, got, tolerance, same_bits=True, **options):
    want = inputs.whole(**options)
    for name in want:
        error = difference(got[name], want[name])
        assert error <= tolerance, f"{name}: {error}"
    if same_bits:
        for name in ("w1", "w2"):
            assert torch.equal(got[name], want[name]), f"{name} has other bits"


def counts_of(size, kind):
    return {"equal": [24] * size, "uneven": [5, 33, 17, 40][:size], "none_here": [0, 19, 8, 3][:size]}.get(kind) or (
        [1] + [0] * (size - 1) if kind == "one_token" else [0] * size
    )


@case
def parity(rank, size, group):
    """Every routing and every distribution of tokens, in float64; three runs give the same bits."""
    experts = ExpertGroup(group, E)
    for kind in ("equal", "uneven", "none_here", "one_token", "none"):
        for routing in ("random", "one_rank", "absent", "all_absent", "duplicate"):
            inputs = Inputs(rank, counts_of(size, kind), routing)
            got = results_of(inputs, experts)
            compare(inputs, got, 1e-14)
            if kind == "uneven":
                for _ in range(2):
                    again = results_of(inputs, experts)
                    assert all(torch.equal(got[name], again[name]) for name in got)


@case
def parity_of_routes(rank, size, group):
    for route in ("gather", "static"):
        experts = ExpertGroup(group, E, route=route)
        for routing in ("random", "one_rank", "absent", "duplicate", "all_absent"):
            inputs = Inputs(rank, counts_of(size, "equal"), routing)
            compare(inputs, results_of(inputs, experts), 1e-14)
        inputs = Inputs(rank, [0] * size)
        compare(inputs, results_of(inputs, experts), 1e-14)


class PeersOverGloo:
    """For `PeerRows` and the kernels that read from peers: `offer` gathers what the peers' memory would hold."""

    def __init__(self, group):
        self.group = group

    def offer(self, rows):
        held = [torch.empty_like(rows) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(held, rows.contiguous(), group=self.group)
        return held

    @staticmethod
    def pull_rows(peers, sources, rows_per_peer, out):
        out[:] = torch.nan  # what is not pulled must not be used
        for place, source in enumerate(sources.tolist()):
            if source >= 0:
                out[place] = peers[source // rows_per_peer][source % rows_per_peer]

    @staticmethod
    def sum_peer_rows(peers, positions, out):
        out[:] = 0
        for token, row in enumerate(positions.tolist()):
            for peer, position in zip(peers, row, strict=True):
                if position >= 0:
                    out[token] += peer[position]


@case
def pulled_rows(rank, size, group):
    """Route "pull" reads the right rows of the right peers, and leaves the others' alone."""
    module = "moeblaze_cupy.interop.exchange"
    with (
        mock.patch(f"{module}.PeerRows", PeersOverGloo),
        mock.patch(f"{module}.mb_rows", PeersOverGloo),
        mock.patch(f"{module}.dist.get_backend", lambda _: "nccl"),
    ):
        experts = ExpertGroup(group, E, route="pull")
        for routing in ("random", "one_rank", "absent", "duplicate", "all_absent"):
            inputs = Inputs(rank, counts_of(size, "equal"), routing)
            compare(inputs, results_of(inputs, experts), 1e-14)
        assert experts.peer_rows.keys() == {"rows", "results"}
        inputs = Inputs(rank, [0] * size)
        compare(inputs, results_of(inputs, experts), 1e-14)
        inputs = Inputs(rank, counts_of(size, "equal"), "absent")
        x, ids, weights, _, _ = inputs.local()
        rows, _, got, route = exchange(x, ids, weights, experts)
        collect(rows * got.sum(1, keepdim=True), route).backward(inputs.grad[inputs.here])
        # a received row has the weights of all of its token's slots
        ranks_of = torch.where((ids >= 0) & (ids < E), ids // (E // size), -1)
        times = sum((ranks_of == r).any(1, keepdim=True) for r in range(size))
        total = weights.sum(1, keepdim=True) * times
        assert not x.grad.isnan().any() and difference(x.grad, total * inputs.grad[inputs.here]) <= 1e-14


@case
def parity_of_options(rank, size, group):
    """Save policies, forms and orders of weights, activations, float32 and bf16, rows sent again."""
    counts = counts_of(size, "uneven")
    for keep in (True, False):
        experts = ExpertGroup(group, E, keep_received=keep, spare_multiprocessors=4)
        for save in ("minimal", "paper", "recompute"):
            for form in ({}, {"pair": True}, {"transposed": True}):
                inputs = Inputs(rank, counts, "absent", **form)
                compare(inputs, results_of(inputs, experts, save=save), 1e-14)
    experts = ExpertGroup(group, E)
    inputs = Inputs(rank, counts)
    compare(inputs, results_of(inputs, experts, activation="reglu"), 1e-14, activation="reglu")
    inputs = Inputs(rank, counts, dtype=torch.float32)
    compare(inputs, results_of(inputs, experts), 2e-6)
    exact = Inputs(rank, [150] * size)
    low = Inputs(rank, [150] * size, dtype=torch.bfloat16)
    got, one, want = results_of(low, experts), low.whole(), exact.whole()
    for name in want:
        error, of_one = difference(got[name], want[name]), difference(one[name], want[name])
        assert error <= 1.15 * of_one, f"{name}: {error}, {of_one} in one process"


@case
def other_widths(rank, size, group):
    """One expert per token; as many as there are; ids of 64 bits."""
    experts = ExpertGroup(group, E)
    for k in (1, E):
        inputs = Inputs(rank, counts_of(size, "uneven"), k=k)
        inputs.ids = inputs.ids.long() + (2**40 if k == 1 else 0) * (torch.arange(len(inputs.ids))[:, None] % 3 == 0)
        compare(inputs, results_of(inputs, experts), 1e-14)


@case
def shared_expert(rank, size, group):
    inputs = Inputs(rank, counts_of(size, "uneven"))
    x, ids, weights, w1, w2 = inputs.local()
    out = expert_parallel_moe(x, ids, weights, w1, w2, ExpertGroup(group, E), shared=lambda rows: 2 * rows)
    out.backward(inputs.grad[inputs.here])
    want = inputs.whole()
    assert difference(out, want["out"] + 2 * x) <= 1e-14
    assert difference(x.grad, want["x"] + 2 * inputs.grad[inputs.here]) <= 1e-14


@case
def own_experts(rank, size, group):
    """`exchange` and `collect` around experts of the caller's, and what a route tells."""
    inputs = Inputs(rank, counts_of(size, "uneven"), "duplicate")
    x, ids, weights, _, _ = inputs.local()
    for route_name in ("exact", "static", "gather"):
        if route_name != "exact":
            inputs = Inputs(rank, counts_of(size, "equal"), "duplicate")
            x, ids, weights, _, _ = inputs.local()
        experts = ExpertGroup(group, E, route=route_name)
        rows, local_ids, got, route = exchange(x, ids, weights, experts)
        factors = torch.arange(1.0, E + 1, dtype=torch.float64)
        present = local_ids >= 0
        factor = factors[inputs.experts][local_ids.clamp(min=0).long()]
        y = (torch.where(present, got * factor, 0).sum(1, keepdim=True)) * rows
        out = collect(y, route)
        out.backward(inputs.grad[inputs.here])
        valid = (ids >= 0) & (ids < E)
        scale = torch.where(valid, weights * factors[ids.clamp(0, E - 1).long()], 0).sum(1, keepdim=True)
        assert difference(out, (scale * x)) <= 1e-14
        assert difference(x.grad, scale * inputs.grad[inputs.here]) <= 1e-14
        dot = (x * inputs.grad[inputs.here]).sum(1, keepdim=True)
        assert difference(weights.grad, torch.where(valid, factors[ids.clamp(0, E - 1).long()] * dot, 0)) <= 1e-14
        assert torch.equal(route.choices, torch.bincount(ids[valid].long(), minlength=E))
        ranks = torch.where(valid, ids // (E // size), size)
        needed = [int((ranks == r).any(1).sum()) for r in range(size)]
        if route_name == "exact":
            assert route.sent == needed and sum(route.sent) <= min(K, size) * len(x)
            assert route.received <= len(rows) <= route.received * 17 // 16
            assert route.slots == int(present.sum()) and int(present.sum(1).min()) >= (len(rows) == route.received)
        assert int(route.dropped) == 0


@case
def overflow(rank, size, group):
    """A bound of slots below what comes: pieces give the result, "drop" counts, "raise" raises on all ranks."""
    counts = counts_of(size, "uneven")
    inputs = Inputs(rank, counts, "one_rank")
    compare(inputs, results_of(inputs, ExpertGroup(group, E, slots=20)), 1e-14, same_bits=False)
    inputs32 = Inputs(rank, counts, "one_rank", dtype=torch.float32)
    compare(inputs32, results_of(inputs32, ExpertGroup(group, E, slots=20)), 2e-6, same_bits=False)
    raising = ExpertGroup(group, E, slots=20, on_overflow="raise")
    expect(
        ValueError,
        f"slots: expected at most 20 slots of each rank's experts, got [{K * sum(counts)}",
        results_of,
        inputs,
        raising,
    )
    dropping = ExpertGroup(group, E, slots=20, on_overflow="drop")
    got = results_of(inputs, dropping)
    # The first experts' first slots are left: those of expert 0, then of expert 1, by source rank and token.
    limited = Inputs(rank, counts, "one_rank")
    slots = sorted((int(e), t, j) for (t, j), e in zip(indices(limited.ids), limited.ids.flatten(), strict=True))
    for _, t, j in slots[20:]:
        limited.ids[t, j] = -1
    compare(limited, got, 1e-14)


@case
def overflow_of_static(rank, size, group):
    inputs = Inputs(rank, counts_of(size, "equal"), "one_rank")
    results_of(inputs, raising := ExpertGroup(group, E, route="static", rows=10))
    expect(
        ValueError,
        "rows: expected no more than rows=10, slots=None in call 1, got 14 more",
        results_of,
        inputs,
        raising,
    )
    got = results_of(inputs, ExpertGroup(group, E, route="static", rows=10, on_overflow="drop"))
    limited = Inputs(rank, counts_of(size, "equal"), "one_rank")
    limited.ids[torch.arange(len(limited.ids)) % 24 >= 10] = -1  # the last rows of each rank
    compare(limited, got, 1e-14)


def indices(tensor):
    return [(i, j) for i in range(tensor.shape[0]) for j in range(tensor.shape[1])]


@case
def frozen(rank, size, group):
    """Gradients that are not wanted are not computed, and no rank waits."""
    experts = ExpertGroup(group, E)
    inputs = Inputs(rank, counts_of(size, "uneven"))
    want = inputs.whole()
    for which in (("x",), ("weights",), ("w1",), ("w2",), ("x", "w2")):
        x, ids, weights, w1, w2 = inputs.local()
        named = {"x": x, "weights": weights, "w1": w1, "w2": w2}
        for name, tensor in named.items():
            tensor.requires_grad_(name in which)
        expert_parallel_moe(x, ids, weights, w1, w2, experts).backward(inputs.grad[inputs.here])
        for name, tensor in named.items():
            assert (tensor.grad is None) == (name not in which)
            if name in which:
                assert difference(tensor.grad, want[name]) <= 1e-14
    with torch.no_grad():
        assert difference(expert_parallel_moe(*inputs.local(), experts), want["out"]) <= 1e-14


@case
def checkpointing(rank, size, group):
    from torch.utils.checkpoint import checkpoint

    experts = ExpertGroup(group, E)
    inputs = Inputs(rank, counts_of(size, "uneven"))
    for reentrant in (False, True):
        x, ids, weights, w1, w2 = inputs.local()
        arguments = x, ids, weights, w1, w2, experts
        out = checkpoint(expert_parallel_moe, *arguments, use_reentrant=reentrant)
        out.backward(inputs.grad[inputs.here])
        grads = {"out": out.detach(), "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}
        compare(inputs, grads, 1e-14)


def expect(kind, text, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        assert text in str(error), str(error)
        return str(error)
    raise AssertionError(f"expected {kind.__name__}: {text}")


@case
def nan_rows(rank, size, group):
    """A NaN reaches its own token's output and gradient only."""
    inputs = Inputs(rank, counts_of(size, "equal"))
    inputs.x[3] = torch.nan
    got = results_of(inputs, ExpertGroup(group, E))
    bad = torch.arange(len(inputs.x))[inputs.here] == 3
    assert torch.equal(got["out"].isnan().any(1), bad) and torch.equal(got["x"].isnan().any(1), bad)


@case
def faults(rank, size, group):
    """What differs among ranks is the same ValueError on all of them, at once."""
    start = time.monotonic()
    expect(ValueError, "num_experts: expected a multiple of the group's", ExpertGroup, group, E + 1)
    options = "options: expected the same on all ranks, got slots=64 on rank 0 and slots=65 on rank 1"
    expect(ValueError, options, lambda: ExpertGroup(group, E, slots=64 + (rank == 1)))
    expect(ValueError, 'expected another than "pull" on a group of gloo', lambda: ExpertGroup(group, E, route="pull"))
    odd = rank == size - 1

    def attempt(experts, **changes):
        inputs = Inputs(rank, counts_of(size, "equal"))
        x, ids, weights, w1, w2 = inputs.local()
        named = {"x": x, "ids": ids, "weights": weights, "w1": w1, "w2": w2}
        if odd:
            named |= {name: change(named[name]) for name, change in changes.items()}
        return expert_parallel_moe(*named.values(), experts)

    same = [ExpertGroup(group, E) for _ in range(8)]
    got = [K] * (size - 1) + [K - 1]
    shorter = {"ids": lambda t: t[:, 1:].contiguous(), "weights": lambda t: t[:, 1:]}
    texts = [
        expect(
            ValueError, f"exchange: k: expected the same on all ranks, got {got}", lambda: attempt(same[0], **shorter)
        )
    ]
    narrower = {"x": lambda t: t[:, :8], "w1": lambda t: t[:, :8], "w2": lambda t: t[:, :, :8]}
    texts.append(expect(ValueError, "exchange: d: expected the same", lambda: attempt(same[1], **narrower)))
    halved = dict.fromkeys(("x", "w1", "w2", "weights"), lambda t: t.float())
    texts.append(expect(ValueError, "exchange: dtype: expected the same", lambda: attempt(same[2], **halved)))
    detached = {"x": lambda t: t.detach()}
    texts.append(
        expect(
            ValueError,
            "requires_grad: expected the same on all ranks, or backward",
            lambda: attempt(same[3], **detached),
        )
    )
    if odd:
        same[4].calls += 1  # as if it had been called once more
    texts.append(expect(ValueError, "call: expected all ranks at the same exchange", lambda: attempt(same[4])))
    wrong = {"w1": lambda t: t[1:]}
    first, last = (size - 1) * (E // size), E - 1
    text = f"of this rank's experts {first}..{last}, got" if odd else f"got errors on [{size - 1}]"
    expect(ValueError, text, lambda: attempt(same[5], **wrong))
    everyone: list = [None] * size
    dist.all_gather_object(everyone, texts, group=group)
    assert all(other == texts for other in everyone)
    gathering = ExpertGroup(group, E, route="gather")
    inputs = Inputs(rank, counts_of(size, "uneven"))
    expect(ValueError, 'tokens: expected the same on all ranks for routes "gather"', results_of, inputs, gathering)
    assert time.monotonic() - start < TIMEOUT.total_seconds()


class Experts(torch.nn.Module):
    """A module of its own, so that FSDP2 can wrap it apart from the router."""

    def __init__(self, w1, w2):
        super().__init__()
        self.w1, self.w2 = torch.nn.Parameter(w1.clone()), torch.nn.Parameter(w2.clone())

    def forward(self, x, ids, weights, group):
        w1, w2 = (w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2))
        if group is None:
            return moe(x, ids, weights, w1, w2)
        return expert_parallel_moe(x, ids, weights, w1, w2, group)


class Block(torch.nn.Module):
    def __init__(self, inputs, group=None):
        super().__init__()
        self.router = torch.nn.Parameter(torch.linspace(-1, 1, E * D, dtype=torch.float64).view(E, D).sin())
        self.experts, self.group = Experts(inputs.w1, inputs.w2), group

    def forward(self, x):
        probabilities = torch.softmax(x @ self.router.T, 1)
        weights, ids = probabilities.topk(K, 1)
        return x + self.experts(x, ids.int(), weights, self.group)


@case
def fsdp2(rank, size, group):
    """FSDP2 on the mesh (efsdp, ep): losses, norms and parameters after three steps of AdamW with clipping."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    ep = 2
    mesh = DeviceMesh("cpu", torch.arange(size).view(size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    everyone = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("dp",))
    inputs = Inputs(rank, counts_of(size, "uneven"))

    def train(model, parameters, x, clip):
        optimizer, seen = torch.optim.AdamW(parameters, lr=0.05), []
        for _ in range(3):
            loss = model(x).square().sum() / len(inputs.x)  # by the tokens of all ranks
            loss.backward()
            seen.append((loss.detach(), clip(parameters, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    one = Block(inputs)
    want = train(one, list(one.parameters()), inputs.x, torch.nn.utils.clip_grad_norm_)
    model = Block(inputs, ExpertGroup(mesh["ep"], E))
    for name in ("w1", "w2"):
        whole = getattr(model.experts, name).detach()
        setattr(model.experts, name, torch.nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    fully_shard(model.experts, mesh=mesh["efsdp"])
    fully_shard(model, mesh=everyone)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    got = train(model, list(model.parameters()), inputs.x[inputs.here], clip_grad_norm_)
    for (loss, norm), (whole_loss, whole_norm) in zip(got, want, strict=True):
        dist.all_reduce(loss)
        assert difference(loss, whole_loss) <= 1e-12 and difference(norm, whole_norm) <= 1e-12
    for name, parameter in model.named_parameters():
        assert difference(parameter.full_tensor(), dict(one.named_parameters())[name]) <= 1e-12, name


@case
def last_rank_skips(rank, size, group):
    """The others' error names the call within the timeout. The group is of no use after it."""
    experts = ExpertGroup(group, E)
    inputs = Inputs(rank, counts_of(size, "equal"))
    results_of(inputs, experts)
    if rank == size - 1:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return
    start = time.monotonic()
    expect(RuntimeError, "exchange: all-gather of sizes (call 2): rank", results_of, inputs, experts)
    assert time.monotonic() - start < TIMEOUT.total_seconds() + 5


def on_gpu(inputs, dtype):
    """The same inputs on the current GPU: 64-bit reference values rounded to `dtype`."""
    moved = copy.copy(inputs)
    for name in ("x", "grad", "w1", "w2"):
        setattr(moved, name, getattr(inputs, name).to(device="cuda", dtype=dtype))
    moved.weights, moved.ids = inputs.weights.to("cuda", torch.float32), inputs.ids.cuda()
    return moved


GPU_ROUTES = {name: {"route": name} if name != "exact" else {} for name in ("exact", "gather", "static", "pull")}


@gpu_case
def parity_on_gpus(rank, size, group):
    """Every route in bf16 and float32 against one process in float64 on the CPU; three runs give the same bits."""
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        for options in GPU_ROUTES.values():
            experts = ExpertGroup(group, E, spare_multiprocessors=8, **options)
            for kind in ("equal", "uneven", "none_here", "one_token", "none"):
                if options and kind not in ("equal", "none"):
                    continue
                for routing in ("random", "absent", "one_rank", "duplicate"):
                    inputs = Inputs(rank, counts_of(size, kind), routing)
                    moved = on_gpu(inputs, dtype)
                    got = {name: value.cpu() for name, value in results_of(moved, experts).items()}
                    compare(inputs, got, tolerance, same_bits=False)
                again = results_of(moved, experts)
                assert all(torch.equal(got[name], again[name].cpu()) for name in got)


@gpu_case
def weight_gradients_on_gpus(rank, size, group):
    """Those of one process on one GPU, bit for bit, in the portable kernels of float32, which split no sums."""
    inputs = on_gpu(Inputs(rank, counts_of(size, "uneven"), "absent"), torch.float32)
    compare(inputs, results_of(inputs, ExpertGroup(group, E)), 1e-5)


@gpu_case
def overflow_on_gpus(rank, size, group):
    inputs = Inputs(rank, counts_of(size, "uneven"), "one_rank")
    got = results_of(on_gpu(inputs, torch.bfloat16), ExpertGroup(group, E, slots=20, keep_received=False))
    compare(inputs, {name: value.cpu() for name, value in got.items()}, 0.02, same_bits=False)


@gpu_case
def no_host_sync(rank, size, group):
    """With these routes the host waits for nothing."""
    for route in ("gather", "static", "pull"):
        experts = ExpertGroup(group, E, route=route, on_overflow="drop")
        inputs = on_gpu(Inputs(rank, counts_of(size, "equal")), torch.bfloat16)
        x, ids, weights, w1, w2 = inputs.local()
        grad = inputs.grad[inputs.here].contiguous()
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                expert_parallel_moe(x, ids, weights, w1, w2, experts).backward(grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def main():
    rank, size, folder, backend = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    cases, timeout = (CASES, TIMEOUT) if backend == "gloo" else (GPU_CASES, GPU_TIMEOUT)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    results = {}
    for name, function in cases.items():
        group = dist.new_group(timeout=timeout)
        start = time.monotonic()
        try:
            function(rank, size, group)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        print(rank, name, f"{time.monotonic() - start:.1f} s", flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # groups whose collectives failed do not end well


if __name__ == "__main__":
    main()
