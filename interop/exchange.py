"""Experts on many GPUs: each token's row travels once to every rank that has an expert of it, and comes back summed.

Over torch.distributed, NCCL or gloo. Rank r of P has the experts r*E/P to (r+1)*E/P - 1. What a rank receives it hands
to the layer as it is: ids of other ranks' experts are absent slots, so no row is permuted or copied per slot. Received
rows are in the order of source ranks, then tokens. That is the order of one process with all tokens, so the gradients
of the experts' weights are sums in that order too.

Letters: L tokens here, k slots per token, P ranks, E experts in all, d model width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import moeblaze_cupy as mb
from moeblaze_cupy import checks, launch_config
from moeblaze_cupy import rows as mb_rows
from moeblaze_cupy.interop import collectives
from moeblaze_cupy.interop.collectives import Header, Pending
from moeblaze_cupy.interop.peers import PeerRows

Tensor = torch.Tensor
ROUTES = ("auto", "exact", "gather", "static", "pull")
OVERFLOWS = ("chunk", "drop", "raise")


class ExpertGroup:
    """How the experts of a layer are spread over a process group, and how rows travel. Immutable but for its counters.

    group: a process group of torch.distributed or a DeviceMesh of one dimension; None is the default group.
    num_experts: E, a multiple of the group's size.
    route: "exact" sends just the rows that are needed, any number per rank, and reads P*(10+2P) integers on the host.
    "gather" sends all rows to all ranks. "static" sends `rows` rows from each rank to each, or L if that is None. Both
    need as many tokens on all ranks, and on CUDA read nothing on the host. So does "pull", for GPUs that reach each
    other's memory, as by NVLink: rows stay in symmetric memory of torch, and ranks read those that they need by index,
    with nothing packed. d is a multiple of 8 then, and results take twice the memory of all ranks' rows, once for all
    layers that share the ExpertGroup. "auto" is "exact".
    rows: of "static"; rows past it are dropped.
    slots: a bound of the slots of this rank's experts, for which the layer has memory; at least k. None: as many as
    come in "exact", all P*L*k in the others.
    on_overflow: what becomes of more slots or rows. "chunk", for "exact" alone and its default, computes received rows
    in pieces of at most `slots` slots, which costs time but neither memory nor tokens. "drop" drops the last. "raise"
    raises ValueError, in "exact" at once on all ranks, in the others, whose default it is, at a later call.
    keep_received: False sends received rows again in backward in place of keeping them.
    spare_multiprocessors: as of `moeblaze_cupy.moe_forward`, for the collectives that run beside.
    All ranks make the group with the same options, and call it equally often, with tokens or without.
    Raises TypeError, ValueError, or RuntimeError if other ranks do not answer.
    """

    _numbers = 0  # the highest that is in use

    def __init__(
        self,
        group: Any,
        num_experts: int,
        *,
        route: str = "auto",
        rows: int | None = None,
        slots: int | None = None,
        on_overflow: str | None = None,
        keep_received: bool = True,
        spare_multiprocessors: int = 0,
    ) -> None:
        if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
            if group.ndim != 1:
                expected = "a process group or a one-dimensional DeviceMesh"
                names, last = group.mesh_dim_names, (group.mesh_dim_names or ["ep"])[-1]
                got = f'a mesh of {names}: pass mesh["{last}"]'
                raise ValueError(f"ExpertGroup: group: expected {expected}, got {got}")
            group = group.get_group()
        group = dist.group.WORLD if group is None else group
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("ExpertGroup: group: expected one that this process is in, got another")
        self.num_experts = checks.integer("ExpertGroup", "num_experts", num_experts)
        checks.one_of("ExpertGroup", "route", route, ROUTES)
        self.route = "exact" if route == "auto" else route
        exact = self.route == "exact"
        on_overflow = on_overflow or ("chunk" if exact else "raise")
        checks.one_of("ExpertGroup", "on_overflow", on_overflow, OVERFLOWS if exact else OVERFLOWS[1:])
        self.on_overflow = on_overflow
        for name, value in (("rows", rows), ("slots", slots)):
            if value is not None and checks.integer("ExpertGroup", name, value) < 1:
                raise checks.bad_value("ExpertGroup", name, "None, or at least 1", value)
        if rows is not None and self.route != "static":
            raise checks.bad_value("ExpertGroup", "rows", f'None for route "{self.route}"', rows)
        self.rows, self.slots, self.keep_received = rows, slots, bool(keep_received)
        self.spare_multiprocessors = checks.spare_multiprocessors("ExpertGroup", spare_multiprocessors, None)
        self.number = self._agree()  #: the same on all ranks, another for every ExpertGroup of a rank
        if self.num_experts < 1 or self.num_experts % self.size:
            expected = f"a multiple of the group's {self.size} ranks"
            raise checks.bad_value("ExpertGroup", "num_experts", expected, num_experts)
        if self.route == "pull" and "nccl" not in dist.get_backend(group):
            backend = dist.get_backend(group)
            raise ValueError(f'ExpertGroup: route: expected another than "pull" on a group of {backend}, got "pull"')
        self.calls = 0
        self.peer_rows: dict[str, PeerRows] = {}  # by what is sent
        self._overflow: tuple[Tensor, Any, int] | None = None  # counted by an earlier call

    @property
    def local_experts(self) -> int:
        """E/P."""
        return self.num_experts // self.size

    def _agree(self) -> int:
        """Raises ValueError on all ranks if their options differ; returns the group's number."""
        names = ("num_experts", "route", "rows", "slots", "on_overflow", "keep_received")
        options = {"kind": type(self).__name__} | {name: getattr(self, name) for name in names}
        here = options | {"numbers": ExpertGroup._numbers}
        by_rank: list[Any] = [None] * self.size
        with collectives.named("options of ExpertGroup", self.group):
            dist.all_gather_object(by_rank, here, group=self.group)
        # Ranks may have made unequally many groups with others, so it is the highest of all that counts.
        ExpertGroup._numbers = 1 + max(other["numbers"] for other in by_rank)
        for name in options:
            for rank, other in enumerate(by_rank):
                if other[name] != by_rank[0][name]:
                    got = f"{name}={by_rank[0][name]!r} on rank 0 and {name}={other[name]!r} on rank {rank}"
                    raise ValueError(f"ExpertGroup: options: expected the same on all ranks, got {got}")
        return ExpertGroup._numbers

    def plan(self, ids: Tensor) -> tuple["Route", Tensor]:
        """The route of ids (L, k) as far as this rank knows it, and (2P,) int64: rows, then slots, for each rank."""
        return _route(ids, self)

    def offer(self, kind: str, rows: Tensor) -> Tensor:
        """Of route "pull": puts rows where the other ranks read them; see `PeerRows.offer`."""
        if kind not in self.peer_rows:
            self.peer_rows[kind] = PeerRows(self.group)
        return self.peer_rows[kind].offer(rows)

    def count_overflow(self, dropped: Tensor) -> None:
        """Remembers a count of what was dropped; a later call raises for it if that was asked for."""
        if self.on_overflow != "raise" or self.route == "exact":
            return
        arrived = None
        if dropped.is_cuda:
            on_host = torch.empty(dropped.shape, dtype=dropped.dtype, pin_memory=True)
            dropped = on_host.copy_(dropped, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            arrived.record()
        self._overflow = dropped, arrived, self.calls

    def check_overflow(self) -> None:
        """Raises ValueError for what an earlier call has dropped, as far as that is known; never waits."""
        if self._overflow is None or (self._overflow[1] is not None and not self._overflow[1].query()):
            return
        (dropped, _, call), self._overflow = self._overflow, None
        number = int(dropped.sum())
        if number:
            expected = f"no more than rows={self.rows}, slots={self.slots} in call {call}"
            raise ValueError(f"exchange: rows: expected {expected}, got {number} more; raise them or use None")


@dataclass
class Route:
    """Which rows one exchange sends where. `exchange` makes it, `collect` and backward follow it."""

    experts: ExpertGroup
    num_tokens: int  #: L
    k: int
    ranks: Tensor  #: (L, k) int64: the rank of each slot's expert, P for none
    positions: Tensor  #: (P, L) int64: where a token's row is among those sent, -1 if it is not sent
    tokens: Tensor | None  #: (n,) int64: the token of each row that is sent; None where all are sent to all
    choices: Tensor  #: (E,) int64: this rank's slots per expert; their sum over ranks feeds bias rules of the router
    dropped: Tensor  #: (1,) int64: rows that found no place
    call: int
    sent: list[int] = field(default_factory=list)  #: rows to each rank
    arriving: list[int] = field(default_factory=list)  #: rows from each rank
    slots: int | None = None  #: of this rank's experts in the rows received; None if the host does not know it
    sources: Tensor | None = None  #: (P*L,) int32, of "pull": the rows of all ranks that this one needs, -1 for others
    _places: Tensor | None = None  # positions by token, int32

    @property
    def received(self) -> int:
        """Rows from all ranks."""
        return sum(self.arriving)

    @property
    def room(self) -> int:
        """Rows of the buffer they are in, a size that comes again in other steps."""
        return launch_config.size_class(self.received) if self.tokens is not None else self.received

    def _what(self, name: str) -> str:
        return f"all-to-all of {name} (call {self.call}, rows sent {self.sent}, expected {self.arriving})"

    def send(self, x: Tensor, name: str) -> Pending:
        """Rows of tokens (L, columns) to the ranks that need them; the result has `room` rows."""
        if self.sources is not None:
            rows = x.new_empty((self.room, x.shape[1]))
            if self.num_tokens:
                mb_rows.pull_rows(self.experts.offer("rows", x), self.sources, self.num_tokens, rows)
            return Pending(rows, None, name, self.experts.group, None)
        if self.tokens is None:
            return collectives.all_gather(x, f"all-gather of {name} (call {self.call})", self.experts.group)
        return collectives.all_to_all(
            x.index_select(0, self.tokens), self.sent, self.arriving, self.room, self._what(name), self.experts.group
        )

    def give_back(self, rows: Tensor, name: str) -> Pending:
        """Results of received rows (room, columns) to where the rows came from; the result has a row per row sent."""
        group = self.experts.group
        arriving, sent, what = self.arriving, self.sent, self._what(name)
        return collectives.all_to_all(rows[: self.received], arriving, sent, sum(sent), what, group)

    def bring_back(self, rows: Tensor, name: str) -> Callable[[], Tensor]:
        """Starts the way back of results (room, columns). What it returns gives (L, columns), the sums over ranks."""
        if self.sources is None:
            pending = self.give_back(rows, name)
            return lambda: self.sum(pending.wait())
        out = rows.new_empty((self.num_tokens, rows.shape[1]))
        if not self.num_tokens:
            return lambda: out
        addresses = self.experts.offer("results", rows)
        if self._places is None:  # each rank has this one's tokens at the same rows
            first = self.num_tokens * torch.arange(self.experts.size, device=rows.device)[:, None]
            at_peers = torch.where(
                self.positions >= 0, self.positions - first + self.num_tokens * self.experts.rank, -1
            )
            self._places = at_peers.T.to(torch.int32).contiguous()
        places = self._places

        def pull_sums() -> Tensor:
            mb_rows.sum_peer_rows(addresses, places, out)
            return out

        return pull_sums

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (room, d) of all ranks for this one's experts, local ids and weights (room, k), from x, ids, weights."""
        local_ids, got = send_meta(self, ids, weights)
        return self.send(x, "rows").wait(), local_ids, got

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Starts the way back of the gradients by "x" and "weights", or one of them, of received rows (room, columns).

        What it returns gives them for this rank's tokens: (L, d) and (L, k).
        """
        back = self.bring_back(grads["x"], "gradients of x") if "x" in grads else None
        pending = self.give_back(grads["weights"], "gradients of weights") if "weights" in grads else None

        def wait() -> dict[str, Tensor]:
            sums = {} if back is None else {"x": back()}
            return sums if pending is None else sums | {"weights": self.slots_of(pending.wait())}

        return wait

    def sum(self, returned: Tensor) -> Tensor:
        """(L, columns): of each token the rows that came back, added in the order of ranks, in fp32 or wider."""
        if self._places is None:
            self._places = self.positions.T.to(torch.int32).contiguous()
        total: Tensor = mb.sum_rows(returned, self._places)
        return total

    def slots_of(self, returned: Tensor) -> Tensor:
        """(L, k): what each slot's rank gave back in the slot's column; 0 for slots without an expert."""
        shape = self.num_tokens, self.k
        if not len(returned):
            return returned.new_zeros(shape)
        present = self.ranks < self.experts.size
        ranks = torch.where(present, self.ranks, 0)  # (L, k)
        rows = self.positions.gather(0, ranks.T.contiguous()).T  # (L, k)
        columns = torch.arange(self.k, device=returned.device).expand(shape)
        return torch.where(present & (rows >= 0), returned[rows.clamp(min=0), columns], 0)


def _check(x: Any, ids: Any, weights: Any, experts: Any) -> None:
    for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"exchange: {name}: expected a torch tensor, got {type(tensor)}")
        if tensor.dim() != 2:
            letters = "(L, d)" if name == "x" else "(L, k)"
            raise checks.bad_value("exchange", name, f"shape {letters}", tuple(tensor.shape))
        if tensor.device != x.device:
            raise TypeError(f"exchange: {name}: expected x's device {x.device}, got {tensor.device}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"exchange: ids: expected int32 or int64, got {ids.dtype}")
    if ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        raise checks.bad_value("exchange", "ids", f"shape (L, k) = ({x.shape[0]}, k >= 1)", tuple(ids.shape))
    if weights.shape != ids.shape:
        raise checks.bad_value("exchange", "weights", f"ids' shape {tuple(ids.shape)}", tuple(weights.shape))
    for name, tensor in (("x", x), ("weights", weights)):
        if tensor.dtype not in collectives.DTYPES:
            raise TypeError(f"exchange: {name}: expected a float dtype, got {tensor.dtype}")
    if experts.route == "pull" and x.shape[1] % 8:
        raise checks.bad_value("exchange", "x", 'd in multiples of 8 for route "pull"', tuple(x.shape))
    if experts.slots is not None and experts.slots < ids.shape[1]:
        raise checks.bad_value("exchange", "slots", f"at least k = {ids.shape[1]}", experts.slots)


class Begun:
    """An exchange whose header is under way; `finish` waits for it and gives the route."""

    def __init__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertGroup,
        grads: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """check: raises TypeError or ValueError for arguments of the caller's, which then reaches all ranks."""
        if not isinstance(experts, ExpertGroup):
            raise TypeError(f"exchange: experts: expected an ExpertGroup, got {type(experts)}")
        experts.calls += 1
        self.experts = experts
        self.error: Exception | None = None
        P = experts.size
        try:
            _check(x, ids, weights, experts)
            check()
            experts.check_overflow()
        except (TypeError, ValueError) as error:
            self.error = error
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        values = [1] + [0] * (len(collectives.SAME) - 1)
        counts = torch.zeros(2 * P, dtype=torch.int64, device=device)
        if self.error is None:
            dtypes = (collectives.DTYPES.index(t.dtype) for t in (x, weights))
            values = [0, experts.number, experts.calls, x.shape[1], ids.shape[1], experts.num_experts]
            values += [*dtypes, grads, len(x)]
            self.route, counts = experts.plan(ids)
        self.header: Header | None = None
        if device.type == "cpu" or experts.route == "exact":
            header = torch.cat([torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True), counts])
            self.header = Header(header, f"all-gather of sizes (call {experts.calls})", experts.group)

    def finish(self) -> Route:
        """Raises one ValueError on all ranks if their arguments do not fit together."""
        experts, P, same = self.experts, self.experts.size, len(collectives.SAME)
        exact = experts.route == "exact"
        if self.error is not None:
            raise self.error
        route = self.route
        if self.header is None:  # the sizes are known, and the host does not wait
            return route
        by_rank = self.header.read()
        collectives.check_same(by_rank, same_tokens=not exact)
        if exact:
            here = experts.rank
            route.sent = by_rank[here][same : same + P]
            route.arriving = [values[same + here] for values in by_rank]
            route.slots = sum(values[same + P + here] for values in by_rank)
            route.tokens = route.tokens[: sum(route.sent)] if route.tokens is not None else None
            loads = [sum(values[same + P + rank] for values in by_rank) for rank in range(P)]
            if experts.slots is not None and experts.on_overflow == "raise" and max(loads) > experts.slots:
                expected = f"at most {experts.slots} slots of each rank's experts"
                raise ValueError(f"exchange: slots: expected {expected}, got {loads} by rank; raise slots or use None")
        return route


def _route(ids: Tensor, experts: ExpertGroup) -> tuple[Route, Tensor]:
    """See `ExpertGroup.plan`."""
    (L, k), P, E, device = ids.shape, experts.size, experts.num_experts, ids.device
    wide = ids.to(torch.int64)
    present = (wide >= 0) & (wide < E)  # (L, k)
    ranks = torch.where(present, wide // experts.local_experts, P)
    choices = torch.zeros(E + 1, dtype=torch.int64, device=device)
    choices.scatter_add_(0, torch.where(present, wide, E).reshape(-1), torch.ones_like(wide).reshape(-1))
    needed = torch.zeros((P + 1, L), dtype=torch.bool, device=device)
    needed.scatter_(0, ranks.T.contiguous(), True)
    needed = needed[:P]  # (P, L) whether a rank has an expert of a token
    slots = choices[:E].view(P, -1).sum(1)
    tokens: Tensor | None = None
    token = torch.arange(L, device=device).expand(P, L)
    dropped = torch.zeros(1, dtype=torch.int64, device=device)
    if experts.route in ("gather", "pull"):
        positions = torch.where(needed, token + L * torch.arange(P, device=device)[:, None], -1)
        arriving = [L] * P
    else:
        if experts.route == "exact":
            positions = torch.where(needed, needed.reshape(-1).cumsum(0).view(P, L) - 1, -1)
            room, arriving = P * L, []
        else:
            C = experts.rows or L
            places = needed.to(torch.int64).cumsum(1) - 1
            dropped = (needed & (places >= C)).sum().reshape(1)
            needed = needed & (places < C)
            positions = torch.where(needed, places + C * torch.arange(P, device=device)[:, None], -1)
            room, arriving = P * C, [C] * P
        # Rows without a token are token 0's, whose ids `send_meta` leaves out. The last element takes what is not sent.
        tokens = torch.zeros(room + 1, dtype=torch.int64, device=device)
        tokens.scatter_(0, torch.where(needed, positions, room).reshape(-1), token.reshape(-1))
        tokens = tokens[:room] if L else tokens[:0]
        if not L:
            arriving = [0] * len(arriving)
    sent = list(arriving)
    route = Route(experts, L, k, ranks, positions, tokens, choices[:E], dropped, experts.calls, sent, arriving)
    return route, torch.cat([needed.sum(1), slots])


def send_meta(route: Route, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Local ids (room, k) int32, -1 for what is not this rank's, and router weights (room, k), of the rows received."""
    experts, k = route.experts, route.k
    wide = ids.to(torch.int64)
    global_ids = torch.where((wide >= 0) & (wide < experts.num_experts), wide, -1).to(torch.int32)
    packed = torch.cat([global_ids.contiguous().view(torch.uint8), weights.contiguous().view(torch.uint8)], 1)
    if route.tokens is not None and experts.route == "static" and route.num_tokens:
        chosen = torch.zeros(len(route.tokens) + 1, dtype=torch.bool, device=ids.device)
        last = len(route.tokens)
        positions = torch.where(route.positions >= 0, route.positions, last).reshape(-1)
        chosen.scatter_(0, positions.to(torch.int64), True)  # an assignment would copy its value from the host
        absent = torch.cat([packed.new_full((1, 4 * k), 255), packed[:1, 4 * k :]], 1)  # int32 -1 is four bytes of 255
        rows = torch.where(chosen[:last, None], packed.index_select(0, route.tokens), absent)
        what = route._what("ids and weights")
        group = experts.group
        pending = collectives.all_to_all(rows, route.sent, route.arriving, route.room, what, group)
    else:
        pending = route.send(packed, "ids and weights")
    received = pending.wait()
    ids_bytes, weights_bytes = received[:, : 4 * k], received[:, 4 * k :]
    got_ids = ids_bytes.clone(memory_format=torch.contiguous_format).view(torch.int32)
    got_weights = weights_bytes.clone(memory_format=torch.contiguous_format).view(weights.dtype)
    local = got_ids - experts.rank * experts.local_experts
    local = torch.where((got_ids >= 0) & (local >= 0) & (local < experts.local_experts), local, -1)
    local[route.received :] = -1  # rows that only fill the buffer up
    got_weights[route.received :] = 0
    if experts.route == "pull":
        every = torch.arange(route.received, dtype=torch.int32, device=ids.device)
        route.sources = torch.where((local >= 0).any(1), every, -1)
    return local.contiguous(), got_weights


def _without_garbage(route: Route, rows: Tensor) -> Tensor:
    """Zeros in rows that only fill the buffer up, or were not asked for."""
    if route.sources is not None:
        return torch.where((route.sources >= 0)[:, None], rows, 0)
    rows[route.received :] = 0
    return rows


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route = route
        rows, local_ids, got = route.receive(x.contiguous(), ids, weights)
        ctx.mark_non_differentiable(local_ids)
        return _without_garbage(route, rows), local_ids, got

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, _: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grads = {"x": grad_rows.contiguous(), "weights": grad_weights.contiguous()}
        needed = compress(grads, ctx.needs_input_grad)
        back = ctx.route.return_gradients({name: grads[name] for name in needed})()
        return back.get("x"), back.get("weights"), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.bring_back(y.contiguous(), "results")()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        return _without_garbage(route, route.send(grad.contiguous(), "results' gradients").wait()), None


def required(*tensors: Sequence[Any]) -> int:
    """A bit for each group of tensors of which gradients are to be computed."""
    if not torch.is_grad_enabled():
        return 0
    return sum(
        1 << bit for bit, group in enumerate(tensors) if any(isinstance(t, Tensor) and t.requires_grad for t in group)
    )


def exchange(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertGroup) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Sends the rows of tokens to the ranks of their experts.

    x: (L, d). ids: (L, k) int32 or int64 of all E experts; others are no expert. weights: (L, k) router weights.
    Returns rows (n, d), local ids (n, k) int32 from 0 to E/P - 1 or -1, weights (n, k), and the Route for `collect`.
    Rows and weights are differentiable. n is the number of rows received, rounded up by a sixteenth at most; the rows
    that fill up have no ids.
    Raises ValueError on all ranks at once if their sizes, dtypes, call numbers or requires_grad differ, TypeError, and
    RuntimeError if a rank does not answer within the group's timeout. With routes "gather" and "static" on CUDA ranks
    are not compared, as the host would have to wait.
    """
    begun = Begun(x, ids, weights, experts, required((x,), (weights,)))
    route = begun.finish()
    rows, local_ids, got = _Exchange.apply(x, weights, ids, route)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    experts.count_overflow(route.dropped)
    return rows, local_ids, got, route


def collect(y: Tensor, route: Route) -> Tensor:
    """The results (n, d) of received rows to where these came from: (L, d), sums over ranks in their order.

    y: differentiable, of the rows of `exchange`; those that only fill up are not read.
    Raises ValueError for another number of rows, and RuntimeError as `exchange` does.
    """
    if not isinstance(route, Route):
        raise TypeError(f"collect: route: expected what exchange returned, got {type(route)}")
    if not isinstance(y, Tensor) or y.dim() != 2 or len(y) != route.room:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y)
        raise checks.bad_value("collect", "y", f"shape ({route.room}, d), a row for each row of exchange", got)
    collected: Tensor = _Collect.apply(y, route)  # type: ignore[no-untyped-call]
    return collected
