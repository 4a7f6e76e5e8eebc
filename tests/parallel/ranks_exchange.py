"""Cases of the exchange of tokens over gloo: parity with one process, options and overflow."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import moeblaze_cupy as mb
from moeblaze_cupy.fp8.rows import quantize_rows
from moeblaze_cupy.interop.parallel import ExpertGroup, collect, exchange, expert_parallel_moe, hosts
from moeblaze_cupy.interop.parallel.peers import PeerTensor
from moeblaze_cupy.rows.api import Share
from tests.parallel.ranks_common import (
    TIMEOUT,
    E,
    Inputs,
    K,
    case,
    compare,
    compare_rows_in_fp8,
    counts_of,
    difference,
    expect,
    results_of,
)

NAN_BYTE = 0x7F  # of e4m3


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
def one_choice(rank, size, group):
    """Of ranks without tokens, elementwise functions of torch make (0, 1) with strides that no view takes."""
    for route in ("exact", "static"):
        experts = ExpertGroup(group, E, route=route)
        for kind in ("none_here", "one_token", "none") if route == "exact" else ("none",):
            inputs = Inputs(rank, counts_of(size, kind), k=1)
            inputs.ids = inputs.ids.long()
            inputs.weights = inputs.weights * 1
            compare(inputs, results_of(inputs, experts), 1e-14)


@case
def another_default_device(rank, size, group):
    """What the host needs stays on it."""
    inputs = Inputs(rank, counts_of(size, "equal"), "absent")
    local = inputs.local()
    with peers_over_gloo(), torch.device("meta"):
        for route in ("exact", "static", "pull"):
            experts = ExpertGroup(group, E, route=route)
            x, _, weights, w1, w2 = named = [t.detach().requires_grad_(t.is_floating_point()) for t in local]
            out = expert_parallel_moe(*named, experts)
            out.backward(inputs.grad[inputs.here])
            got = {"out": out, "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}
            with torch.device("cpu"):
                compare(inputs, got, 1e-14)
        found = hosts.HostGloo(10**6 + 2, 5, group)
        assert found.send([rank, 7], "sizes").read() == [[other, 7] for other in range(size)]


@case
def copied_layers(rank, size, group):
    """Deep copies of a module have its ExpertGroup."""

    class Layer(torch.nn.Module):
        def __init__(self, w1, w2):
            super().__init__()
            self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
            self.experts = ExpertGroup(group, E)

        def forward(self, x, ids, weights):
            return expert_parallel_moe(x, ids, weights, self.w1, self.w2, self.experts)

    inputs = Inputs(rank, counts_of(size, "uneven"))
    *tokens, w1, w2 = inputs.local()
    layer = Layer(w1, w2)
    copied = copy.deepcopy(layer)
    assert copied.experts is layer.experts
    for of in (layer, copied, layer):
        assert difference(of(*tokens), inputs.whole()["out"]) <= 1e-14


@case
def second_derivatives(rank, size, group):
    """They raise also where the loss is a sum, whose gradient requires none."""
    experts = ExpertGroup(group, E)
    for reduce in (torch.sum, lambda out: out.square().sum()):
        x, ids, weights, w1, w2 = Inputs(rank, counts_of(size, "equal")).local()
        loss = reduce(expert_parallel_moe(x, ids, weights, w1, w2, experts)) + sum(t.pow(3).sum() for t in (x, w1, w2))
        of_x, of_w1 = torch.autograd.grad(loss, (x, w1), create_graph=True)
        for again in (
            lambda g=of_x: g.sum().backward(retain_graph=True),
            lambda g=of_w1, w=w2: torch.autograd.grad(g.sum(), w),
        ):
            expect(RuntimeError, "expert_parallel_moe: no second derivatives", again)


@case
def parity_of_static(rank, size, group):
    experts = ExpertGroup(group, E, route="static")
    for routing in ("random", "one_rank", "absent", "duplicate", "all_absent"):
        inputs = Inputs(rank, counts_of(size, "equal"), routing)
        compare(inputs, results_of(inputs, experts), 1e-14)
    inputs = Inputs(rank, [0] * size)
    compare(inputs, results_of(inputs, experts), 1e-14)


class PeersOverGloo:
    """For `Peers` and the kernels that read from peers: `offer` gathers what the peers' memory would hold."""

    def __init__(self, group):
        self.group, self.read, self.calls, self.rooms = group, None, [], {}
        self.copies, self.written = True, None  # written: the room that is written before it is offered

    def room(self, kind, forms, device):
        if self.read == kind:
            self.close()
        found = self.rooms.setdefault((kind, forms), [torch.empty(s, dtype=dtype, device=device) for s, dtype in forms])
        for tensor in found if self.written is not found else ():
            tensor[:] = NAN_BYTE if tensor.dtype == torch.uint8 else torch.nan if tensor.is_floating_point() else 0
        self.written = found
        return found

    def offer(self, kind, tensors, rows):
        if self.read == kind:
            self.close()
        self.calls.append(kind)
        self.read, self.written = kind, None
        offered = []
        for tensor in tensors:
            nothing = torch.nan if tensor.is_floating_point() else 0  # ids of an expert, if they were read
            nothing = NAN_BYTE if tensor.dtype == torch.uint8 else nothing
            padding = tensor.new_full((rows - len(tensor), *tensor.shape[1:]), nothing)
            held = [tensor.new_empty((rows, *tensor.shape[1:])) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(held, torch.cat([tensor, padding]), group=self.group)
            offered.append(PeerTensor(held, held))
        return offered

    def copy(self, pairs):
        self.calls.append("copy")
        for to, _ in pairs:
            to[:] = NAN_BYTE if to.dtype == torch.uint8 else torch.nan

        def wait():
            for to, source in pairs:
                to.copy_(source)

        return wait

    def close(self):
        if self.read is not None:
            self.calls.append("close")
        self.read = None

    @staticmethod
    def pull_slots(ids, weights, share, local_ids, pulled, needed):
        every = torch.cat(ids)
        here = every.div(share.experts, rounding_mode="floor") == share.rank
        local_ids[:] = torch.where(here, every - share.rank * share.experts, -1)
        pulled[:], needed[:] = torch.cat(weights), here.any(1)

    @staticmethod
    def pull_rows(rows, needed, out):
        out[:] = torch.where(needed[:, None], torch.cat(rows), torch.nan)  # what is not pulled must not be used

    @staticmethod
    def pull_scaled_rows(values, scales, needed, out):
        out.values[:] = torch.where(needed[:, None], torch.cat(values), NAN_BYTE)
        out.scales[:] = torch.where(needed, torch.cat(scales), torch.nan)

    @staticmethod
    def sum_peer_rows(rows, ids, share, out):
        out[:] = 0
        here = share.rank * share.tokens
        for peer, of_peer in enumerate(rows):
            present = (ids.div(share.experts, rounding_mode="floor") == peer).any(1)
            out[present] += of_peer[here : here + len(ids)][present]

    @staticmethod
    def pull_values(values, ids, share, out):
        out[:] = 0
        here = share.rank * share.tokens
        for peer, of_peer in enumerate(values):
            present = ids.div(share.experts, rounding_mode="floor") == peer
            out[present] = of_peer[here : here + len(ids)][present]


@contextmanager
def peers_over_gloo(timeout=TIMEOUT):
    """Route "pull" works on the CPU."""
    package = "moeblaze_cupy.interop.parallel"
    with (
        mock.patch(f"{package}.group.Peers", PeersOverGloo),
        mock.patch(f"{package}.group.TIMEOUT_MS", 1000 * timeout.total_seconds()),
        mock.patch(
            f"{package}.pull_route.mb_rows",
            SimpleNamespace(Share=Share, quantize_rows=quantize_rows, **vars(PeersOverGloo)),
        ),
        mock.patch(f"{package}.group.backend_of", lambda _: (True, ("cpu",))),
    ):
        yield


@case
def layers_follow_autocast(rank, size, group):
    """As `moe` does: operands in its dtype, router weights in float32, gradients in the parameters' dtypes."""
    inputs = Inputs(rank, counts_of(size, "equal"), dtype=torch.float32)
    experts = ExpertGroup(group, E)
    for dtypes in ((torch.float32,) * 2, (torch.bfloat16, torch.float32)):
        x, ids, weights, w1, w2 = inputs.local()
        tokens = x.to(dtypes[0])
        seen = []

        def shared(given, seen=seen):
            seen.append(given)
            return given.to(torch.bfloat16)

        with torch.autocast("cpu", torch.bfloat16):
            out = expert_parallel_moe(tokens, ids, weights, w1, w2, experts, shared=shared)
        assert seen[0] is tokens and out.dtype == torch.bfloat16
        out.backward(inputs.grad[inputs.here].to(out.dtype))
        half = [of.detach().to(torch.bfloat16).requires_grad_() for of in (x, w1, w2)]
        want = expert_parallel_moe(half[0], ids, weights.detach(), *half[1:], experts)
        want.backward(inputs.grad[inputs.here].to(want.dtype))
        assert torch.equal(out, want + half[0])
        for got, expected in zip((w1, w2), half[1:], strict=True):
            assert got.grad.dtype == torch.float32 and torch.equal(got.grad, expected.grad.float())


@case
def pulled_rows(rank, size, group):
    """Route "pull" reads the right rows of the right peers, and leaves the others' alone.

    Nothing is written where others may still read it: between two offers of a kind there is another barrier.
    """
    with peers_over_gloo():
        experts = ExpertGroup(group, E, route="pull")
        for routing in ("random", "one_rank", "absent", "duplicate", "all_absent"):
            inputs = Inputs(rank, counts_of(size, "equal"), routing)
            compare(inputs, results_of(inputs, experts), 1e-14)
        # Of 8 experts a rank has 4, and some expert of 13 in 14 tokens, or 2, and some of 9 in 14.
        rows = ["tokens", "copy"] if size == 2 else ["tokens"]
        assert experts.peers.calls == [*rows, "results", *rows, "results"] * 5
        inputs = Inputs(rank, [0] * size)
        compare(inputs, results_of(inputs, experts), 1e-14)
        inputs = Inputs(rank, counts_of(size, "none_here"), "absent")
        for is_wide in (rank == 0, True):  # ids of another width than on other ranks, then ids of no expert that are
            if is_wide:  # some in 32 bits
                inputs.ids = torch.where(inputs.ids == E, 2**32 + 1, inputs.ids.long())
            compare(inputs, results_of(inputs, experts), 1e-14)
        for kind in ("uneven", "none_here", "one_token"):
            for routing in ("random", "absent", "one_rank"):
                inputs = Inputs(rank, counts_of(size, kind), routing)
                inputs.weights[inputs.ids < 0] = torch.nan  # of no slot
                got = results_of(inputs, experts)
                inputs.weights[inputs.ids < 0] = 0
                compare(inputs, got, 1e-14)
        inputs = Inputs(rank, counts_of(size, "equal"), "absent")
        again = ExpertGroup(group, E, route="pull", keep_received=False)
        compare(inputs, results_of(inputs, again), 1e-14)
        assert again.peers.calls == [*rows, "results", *rows, *rows[1:], "results"]
        inputs = Inputs(rank, counts_of(size, "uneven"), "absent")
        compare(inputs, results_of(inputs, ExpertGroup(group, E, route="pull", keep_received=False)), 1e-14)
        frozen = ExpertGroup(group, E, route="pull")
        for _ in range(2):
            x, ids, weights, w1, w2 = inputs.local()
            expert_parallel_moe(x.detach(), ids, weights.detach(), w1, w2, frozen).sum().backward()
        assert frozen.peers.calls == [*rows, "results", *rows, "close"] * 2
        pulled = ExpertGroup(group, E, route="pull")
        pulled.peers.copies = False
        compare(inputs, results_of(inputs, pulled), 1e-14)
        assert pulled.peers.calls == ["tokens", "results"] * 2
        beside = ExpertGroup(group, E, route="pull")
        x, ids, weights, w1, w2 = inputs.local()

        def shared(tokens):
            assert beside.peers.calls == rows  # which travel already
            return 2 * tokens

        out = expert_parallel_moe(x, ids, weights, w1, w2, beside, shared=shared)
        out.backward(inputs.grad[inputs.here])
        want = inputs.whole()
        assert difference(out, want["out"] + 2 * x) <= 1e-14
        assert difference(x.grad, want["x"] + 2 * inputs.grad[inputs.here]) <= 1e-14
        assert torch.equal(w1.grad, want["w1"]) and torch.equal(w2.grad, want["w2"])
        for kind in ("equal", "uneven", "none_here"):
            inputs = Inputs(rank, counts_of(size, kind), "absent")
            experts.peers.calls.clear()
            x, ids, weights, _, _ = inputs.local()
            received, _, got, route = exchange(x, ids, weights, experts)
            collect(received * got.sum(1, keepdim=True), route).backward(inputs.grad[inputs.here])
            # a received row has the weights of all of its token's slots
            ranks_of = torch.where((ids >= 0) & (ids < E), ids // (E // size), -1)
            times = sum((ranks_of == r).any(1, keepdim=True) for r in range(size))
            total = weights.sum(1, keepdim=True) * times
            with_rows, sums = ["one by one", *rows[1:], "close"], ["one by one", "close"]
            assert experts.peers.calls == [*with_rows, *sums, *with_rows, *sums]
            assert not x.grad.isnan().any() and difference(x.grad, total * inputs.grad[inputs.here]) <= 1e-14


@case
def auto_route(rank, size, group):
    """Rows are pulled where `slots` bounds memory, more may be dropped, and all GPUs access each other's memory."""

    def route_of(gpu, **options):
        with mock.patch("moeblaze_cupy.interop.parallel.group.this_gpu", lambda: gpu):
            return ExpertGroup(group, E, **options).route

    names = [f"GPU-{r}" for r in range(size)]
    here = "host", names[rank], names[:rank] + names[rank + 1 :]
    elsewhere = f"host {rank == 0}", *here[1:]
    apart = "host", names[rank], names[rank + 1 :]
    the_same = "host", "GPU-0", names[1:]
    assert route_of(here, slots=64, on_overflow="drop") == "exact"  # on gloo
    with peers_over_gloo():
        assert route_of(here, slots=64, on_overflow="raise") == route_of(here, slots=64, on_overflow="drop") == "pull"
        assert route_of(here, on_overflow="drop") == route_of(here, slots=64, on_overflow="chunk") == "exact"
        assert route_of(here, slots=64) == "exact"  # whose default drops nothing
        for gpu in (elsewhere, apart, the_same):
            assert route_of(gpu, slots=64, on_overflow="drop") == "exact"
        experts = ExpertGroup(group, E, slots=64, route="exact")
        assert experts.route == "exact" and experts.on_overflow == "chunk"


@case
def parity_of_options(rank, size, group):
    """Save policies, forms and orders of weights, activations, float32 and bf16, rows sent again."""
    counts = counts_of(size, "uneven")
    for keep in (True, False):
        experts = ExpertGroup(group, E, keep_received=keep)
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
def products_in_fp8(rank, size, group):
    """Those of one process in fp8; weights that are given, made in the call and kept, or made again in backward."""
    counts = counts_of(size, "uneven")
    inputs = Inputs(rank, counts, "absent", dtype=torch.bfloat16, h=32)
    given = mb.quantize_weights(inputs.w1[inputs.experts], inputs.w2[inputs.experts])
    for route in ("exact", "chunk"):
        bound = {"slots": 8, "on_overflow": "chunk"} if route == "chunk" else {}
        for options in ({}, {"fp8_weights": given}, {"keep_fp8_weights": False}):
            got = results_of(inputs, ExpertGroup(group, E, **bound), precision="fp8", **options)
            # sums over ranks of results that are rounded to bf16, and in pieces sums of gradients likewise
            compare(inputs, got, 2.0**-7, same_bits=route == "exact", precision="fp8")
    wrong = Inputs(rank, counts, dtype=torch.bfloat16)  # h = 12
    x, ids, weights, w1, w2 = wrong.local()
    expected = "expert_parallel_moe: precision: expected d and h that are multiples of 16"
    told = lambda: expert_parallel_moe(x, ids, weights, w1, w2, ExpertGroup(group, E), precision="fp8")  # noqa: E731
    expect(ValueError, expected, told)


@case
def rows_in_fp8(rank, size, group):
    """Rows that travel in e4m3, on all routes: what `compare_rows_in_fp8` says, and which ranks must agree on them."""
    options = {"precision": "fp8", "row_precision": "fp8"}
    for kind in ("equal", "uneven", "none_here", "one_token", "none"):
        inputs = Inputs(rank, counts_of(size, kind), "absent", dtype=torch.bfloat16, h=32)
        routes = [{"route": "exact"}, {"keep_received": False}]
        if kind == "equal":
            routes += [{"route": "static"}]
        for of_group in routes:
            compare_rows_in_fp8(inputs, ExpertGroup(group, E, **of_group), same_bits=of_group.get("route") == "exact")
        for save in ("recompute", "fp8"):
            compare_rows_in_fp8(inputs, ExpertGroup(group, E), save=save)
        chunks = ExpertGroup(group, E, slots=8, on_overflow="chunk")
        compare_rows_in_fp8(inputs, chunks, same_bits=False)
        with peers_over_gloo():
            for copies in (True, False):
                for keep in (True, False):
                    experts = ExpertGroup(group, E, route="pull", keep_received=keep)
                    experts.peers.copies = copies
                    compare_rows_in_fp8(inputs, experts)
    x, ids, weights, w1, w2 = inputs.local()
    experts = ExpertGroup(group, E)
    differs = lambda: expert_parallel_moe(  # noqa: E731
        x, ids, weights, w1, w2, experts, precision="fp8", row_precision="fp8" if rank else None
    )
    got = expect(
        ValueError, "expert_parallel_moe: dtype: expected the same on all ranks, got ['torch.bfloat16'", differs
    )
    assert "torch.float8_e4m3fn" in got
    alone = lambda: expert_parallel_moe(x, ids, weights, w1, w2, experts, row_precision="fp8")  # noqa: E731
    expect(ValueError, "expert_parallel_moe: row_precision: expected None without precision='fp8'", alone)
    other = lambda: expert_parallel_moe(x, ids, weights, w1, w2, experts, **options | {"row_precision": "e5m2"})  # noqa: E731
    expect(ValueError, "expert_parallel_moe: row_precision: expected one of None, 'fp8', got 'e5m2'", other)


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
def between_graphs(rank, size, group):
    """torch.compile calls the exchange as it is, between its graphs."""
    experts, inputs = ExpertGroup(group, E), Inputs(rank, counts_of(size, "uneven"))
    x, ids, weights, w1, w2 = inputs.local()

    def layer(x):
        out = expert_parallel_moe(2 * x, ids, weights, w1, w2, experts)
        rows, local_ids, _, route = exchange(2 * x, ids, weights, experts)
        return 3 * out, collect(rows * (local_ids >= 0).sum(1, keepdim=True), route)

    got, want = (call(x) for call in (torch.compile(layer, backend="eager"), layer))
    assert all(map(torch.equal, got, want))
    (grad, wanted) = (torch.autograd.grad(out[0].sum() + out[1].sum(), x)[0] for out in (got, want))
    assert torch.equal(grad, wanted)


@case
def own_experts(rank, size, group):
    """`exchange` and `collect` around experts of the caller's, and what a route tells."""
    inputs = Inputs(rank, counts_of(size, "uneven"), "duplicate")
    x, ids, weights, _, _ = inputs.local()
    for route_name in ("exact", "static"):
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
    bounded = ExpertGroup(group, E, route="static", slots=20)
    expect(
        ValueError,
        "expert_parallel_moe: rows: expected no more than rows=10 in call 1, got 14 more; raise rows or use None",
        results_of,
        inputs,
        raising,
    )
    got = results_of(inputs, ExpertGroup(group, E, route="static", rows=10, on_overflow="drop"))
    limited = Inputs(rank, counts_of(size, "equal"), "one_rank")
    limited.ids[torch.arange(len(limited.ids)) % 24 >= 10] = -1  # the last rows of each rank
    compare(limited, got, 1e-14)
    expect(
        ValueError,
        "got errors on [0]" if rank else "expert_parallel_moe: slots: expected no more than slots=20 in call 1, got",
        lambda: [results_of(inputs, bounded) for _ in range(2)],
    )
    for number in (3, 0):  # as of two calls before the GPU has counted for the first
        raising.count_overflow(torch.tensor([number]))
    expect(ValueError, "in call 2, got 3 more", raising.check_overflow, "exchange")


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
def counted_products(rank, size, group):
    """FlopCounterMode counts those of a rank's own slots: 6 d h for each forward, 12 with all gradients."""
    for options in ({}, {"save": "recompute"}):
        inputs = Inputs(rank, counts_of(size, "uneven"))
        x, ids, weights, w1, w2 = inputs.local()
        leaves = [tensor.requires_grad_() for tensor in (x, weights, w1, w2)]
        with FlopCounterMode(display=False) as counter:
            out = expert_parallel_moe(x, ids, weights, w1, w2, ExpertGroup(group, E), **options)
            torch.autograd.grad(out, leaves, inputs.grad[inputs.here])
        _, h, d = w2.shape
        again = 4 * d * h if options else 0
        assert counter.get_total_flops() == ids.numel() * (18 * d * h + again)


@case
def nan_rows(rank, size, group):
    """A NaN reaches its own token's output and gradient only."""
    inputs = Inputs(rank, counts_of(size, "equal"))
    inputs.x[3] = torch.nan
    got = results_of(inputs, ExpertGroup(group, E))
    bad = torch.arange(len(inputs.x))[inputs.here] == 3
    assert torch.equal(got["out"].isnan().any(1), bad) and torch.equal(got["x"].isnan().any(1), bad)
