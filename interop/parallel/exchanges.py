"""Experts on many GPUs: each token's row travels once to every rank that has an expert of it, and comes back summed.

Rows travel over torch.distributed, NCCL or gloo. Rank r of P has the experts r*E/P to (r+1)*E/P - 1. A rank hands
received rows to the layer as they are: ids of other ranks' experts are absent slots, so no row is permuted or copied
per slot. Received rows are in the order of source ranks, then tokens. That is the order of one process with all
tokens, so the gradients of the experts' weights are sums in that order too.

Letters: L tokens here, k slots per token, P ranks, E experts in all, d model width.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from moeblaze_cupy import checks
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.interop.parallel import collectives
from moeblaze_cupy.interop.parallel.collectives import SAME, PendingHeaders
from moeblaze_cupy.interop.parallel.group import RankGroup
from moeblaze_cupy.interop.parallel.hosts import HostHeaders
from moeblaze_cupy.interop.parallel.pull_route import PullRoute
from moeblaze_cupy.interop.parallel.routes import Route, SentRoute, sent_route
from moeblaze_cupy.layer.backward_api import described_by_name

__all__ = ["ExpertGroup", "Route", "collect", "exchange"]
Tensor = torch.Tensor


class ExpertGroup(RankGroup):
    """The spread of a layer's experts over a process group, and the way rows travel. Only its counters change.

    group: a process group of torch.distributed or a DeviceMesh of one dimension; None is the default group.
    num_experts: E, a multiple of the group's size.
    route: "exact" sends just the rows that are needed, any number per rank, and reads P*(16+2P) integers on the host.
    "static" sends `rows` rows from each rank to each, or all L if that is None. It needs as many tokens on all ranks,
    and on CUDA reads nothing on the host. "pull" is for GPUs that reach each other's memory, as by NVLink: ranks read
    the rows that they need by index in symmetric memory of torch. The host reads nothing of the device, and tells the
    other ranks its sizes in memory that processes share. d is a multiple of 8 then, and results take the memory of P
    times the rows of the rank with most tokens, once for all layers that share the ExpertGroup. "auto" is "pull" if
    `slots` bounds the layer's memory, on_overflow is "drop" or "raise", and the GPUs are of one host and access each
    other's memory; otherwise it is "exact".
    rows: for "static"; rows past it are dropped.
    slots: a bound of the slots of this rank's experts, for which the layer has memory; at least k. None: those that
    come in "exact", all P*L*k in the others.
    on_overflow: "chunk", the default of "exact" and only for it, computes received rows in pieces of at most `slots`
    slots, which costs time but neither memory nor tokens. "drop" drops the last slots or rows. "raise", the default
    of the other routes, raises ValueError: "exact" at once on all ranks, the others at a later call.
    keep_received: False sends received rows again in backward in place of keeping them.
    All ranks make the group with the same options, and call it equally often, with tokens or without.
    Raises TypeError, ValueError, or RuntimeError if other ranks do not answer.
    """

    def plan(self, ids: Tensor) -> tuple[Route, Callable[[], Tensor] | None]:
        """Returns the route of ids (L, k) as far as this rank knows it, and what gives (2P,) int64: rows, then slots.

        Route "pull" counts none, and has None.
        """
        if ids.dtype == torch.int64:  # ranks may have either; some would be ids of experts in 32 bits
            ids = torch.where((ids >= 0) & (ids < self.num_experts), ids, -1).to(torch.int32)
        if self.route == "pull":
            return PullRoute(ids, self), None
        return sent_route(ids, self)


def _check(function: str, x: Any, ids: Any, weights: Any, experts: Any) -> None:
    for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name}: expected a torch tensor, got {type(tensor)}")
        if tensor.dim() != 2:
            letters = "(L, d)" if name == "x" else "(L, k)"
            raise checks.bad_value(function, name, f"shape {letters}", tuple(tensor.shape))
        if tensor.device.type not in experts.devices:
            expected = f"a tensor on {' or '.join(experts.devices)}, as the group's backend carries"
            raise TypeError(f"{function}: {name}: expected {expected}, got one on {tensor.device}")
        if tensor.device != x.device:
            raise TypeError(f"{function}: {name}: expected x's device {x.device}, got {tensor.device}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: ids: expected int32 or int64, got {ids.dtype}")
    if ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        raise checks.bad_value(function, "ids", f"shape (L, k) = ({x.shape[0]}, k >= 1)", tuple(ids.shape))
    if weights.shape != ids.shape:
        raise checks.bad_value(function, "weights", f"ids' shape {tuple(ids.shape)}", tuple(weights.shape))
    for name, tensor in (("x", x), ("weights", weights)):
        if tensor.dtype not in collectives.DTYPES:
            raise TypeError(f"{function}: {name}: expected a float dtype, got {tensor.dtype}")
    if experts.route == "pull" and x.shape[1] % 8:
        raise checks.bad_value(function, "x", 'd in multiples of 8, or route="exact"', tuple(x.shape))
    if experts.slots is not None and experts.slots < ids.shape[1]:
        raise checks.bad_value(function, "slots", f"at least k = {ids.shape[1]}", experts.slots)


class PendingExchange:
    """An exchange whose header is under way; `finish` waits for it and gives the route."""

    def __init__(
        self,
        function: str,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertGroup,
        grads: int,
        check: Callable[[], Mapping[str, int]] = dict,
        rows_in_fp8: bool = False,
    ) -> None:
        """Starts the exchange of headers.

        function: what the caller called, one of `FIRST_STEPS`. check: raises an error for the caller's arguments, which
        then reaches all ranks, or returns further values that must be the same on all ranks, by their names in `SAME`.
        rows_in_fp8: rows travel in e4m3.
        """
        if not isinstance(experts, ExpertGroup):
            raise TypeError(f"{function}: experts: expected an ExpertGroup, got {type(experts)}")
        experts.calls += 1
        self.experts, self.function = experts, function
        self.error: Exception | None = None
        device = torch.device(experts.devices[0])  # the header's device, whatever x is on
        if isinstance(x, Tensor) and x.device.type == device.type:
            device = x.device
        by_hosts = experts.route == "pull"
        gathers = not by_hosts and (device.type == "cpu" or experts.route == "exact")
        counts: Tensor | None = None
        step = collectives.STEPS.index(function)
        try:
            _check(function, x, ids, weights, experts)
            options = check()
            experts.check_overflow(function)
            self.route, count = experts.plan(ids.detach().contiguous())
            if gathers and count is not None:
                counts = count().to(device)
            number_of = collectives.SENT_DTYPES.index
            values = collectives.header(
                step=step,
                group=experts.number,
                call=experts.calls,
                d=x.shape[1],
                k=ids.shape[1],
                experts=experts.num_experts,
                dtype=number_of(torch.float8_e4m3fn if rows_in_fp8 else x.dtype),
                weights=number_of(weights.dtype),
                device=collectives.DEVICES.index(x.device.type),
                requires_grad=grads,
                tokens=len(x),
                **options,
            )
            self.route.rows_in_fp8 = rows_in_fp8
        except Exception as error:  # any error counts, as the others would wait for this rank until their timeout
            self.error, values = error, collectives.header(failed=True, step=step)
        self.header: PendingHeaders | HostHeaders | None = None
        what = f"all-gather of sizes (call {experts.calls})"
        if by_hosts:  # they know what is compared
            assert experts.hosts is not None
            self.header = experts.hosts.send(values, what)
        elif gathers:
            if counts is None:
                counts = torch.zeros(2 * experts.size, dtype=torch.int64, device=device)
            on_host = torch.tensor(values, dtype=torch.int64, device="cpu")
            header = torch.cat([on_host.to(device, non_blocking=True), counts])
            self.header = PendingHeaders(collectives.all_gather(header[None], what, experts.group), header.is_cuda)

    def finish(self) -> Route:
        """Raises one ValueError on all ranks if their arguments do not fit together."""
        experts, P, same = self.experts, self.experts.size, len(SAME)
        exact = experts.route == "exact"
        if self.error is not None:
            with suppress(RuntimeError):  # the other ranks are told of it first
                if self.header is not None:
                    self.header.sent()
            try:
                raise self.error
            finally:
                self.error = None  # its frames hold this object, and so the caller's tensors
        route = self.route
        if self.header is None:  # the sizes are known, and the host does not wait
            return route
        by_rank = self.header.read()
        collectives.check_same(by_rank, same_tokens=experts.route == "static")
        if isinstance(route, PullRoute):
            route.expect([values[SAME.index("tokens")] for values in by_rank])
        if exact:
            here = experts.rank
            route.sent = by_rank[here][same : same + P]
            route.arriving = [values[same + here] for values in by_rank]
            route.slots = sum(values[same + P + here] for values in by_rank)
            if isinstance(route, SentRoute):
                route.tokens = route.tokens[: sum(route.sent)]
            loads = [sum(values[same + P + rank] for values in by_rank) for rank in range(P)]
            if experts.slots is not None and experts.on_overflow == "raise" and max(loads) > experts.slots:
                expected = f"at most {experts.slots} slots of each rank's experts"
                got = f"{loads} by rank; raise slots or use None"
                raise ValueError(f"{self.function}: slots: expected {expected}, got {got}")
        return route


def _check_results(y: Any, route: Route) -> None:
    """Checks what `collect` gets, whose numbers of columns and dtypes ranks then compare."""
    if not isinstance(y, Tensor):
        raise TypeError(f"collect: y: expected a torch tensor, got {type(y)}")
    if y.dim() != 2 or len(y) != route.room or not y.shape[1]:
        expected = f"shape ({route.room}, d >= 1), a row for each row of exchange"
        raise checks.bad_value("collect", "y", expected, tuple(y.shape))
    if y.device != route.ids.device:
        raise TypeError(f"collect: y: expected the device of exchange, {route.ids.device}, got {y.device}")
    if y.dtype not in collectives.DTYPES:
        raise TypeError(f"collect: y: expected a float dtype, got {y.dtype}")
    described_by_name("collect", arrays.Torch, {"y": y})


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        ctx.route = route
        rows, local_ids, got = route.receive(x.contiguous(), ids, weights.contiguous())
        ctx.mark_non_differentiable(local_ids)
        return route.zero_padding(cast(Tensor, rows)), local_ids, got

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, _: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grads = {"x": grad_rows.contiguous(), "weights": grad_weights.contiguous()}
        needed = compress(grads, ctx.needs_input_grad)
        ctx.route.meet("backward of exchange")
        back = ctx.route.return_gradients({name: grads[name] for name in needed})()
        return back.get("x"), back.get("weights"), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.bring_back(y.contiguous())()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        route.meet("backward of collect")
        return route.zero_padding(cast(Tensor, route.receive_gradients(grad.contiguous(), None)[0])), None


def required(*tensors: Sequence[Any]) -> int:
    """Returns a bit for each group of tensors whose gradients are to be computed."""
    if not torch.is_grad_enabled():
        return 0
    return sum(
        1 << bit for bit, group in enumerate(tensors) if any(isinstance(t, Tensor) and t.requires_grad for t in group)
    )


@graph_break
def exchange(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertGroup) -> tuple[Tensor, Tensor, Tensor, Route]:
    """Sends the rows of tokens to the ranks of their experts.

    x: (L, d). ids: (L, k) int32 or int64 of all E experts; others are no expert. weights: (L, k) router weights.
    Returns rows (n, d), local ids (n, k) int32 from 0 to E/P - 1 or -1, weights (n, k), and the Route for `collect`.
    Rows and weights are differentiable. n is the number of rows received, rounded up by a sixteenth at most; the rows
    that fill up have no ids.
    Raises ValueError on all ranks at once if their sizes, dtypes, devices, steps, call numbers or requires_grad differ,
    TypeError, and RuntimeError if a rank does not answer within the group's timeout, with "pull" within ten minutes.
    With "static" on CUDA ranks are not compared, as the host would have to wait, nor are they in backward and `collect`
    of "exact" on CUDA, unless the ranks share memory of one host.
    """

    def check() -> Mapping[str, int]:
        described_by_name("exchange", arrays.Torch, {"x": x, "ids": ids, "weights": weights})
        return {}

    pending = PendingExchange("exchange", x, ids, weights, experts, required((x,), (weights,)), check)
    route = pending.finish()
    route.one_by_one = True
    if experts.route == "pull":  # the only one that reads ids again, later, when the caller may have written to them
        route.ids = route.ids.clone()
    rows, local_ids, got = _Exchange.apply(x, weights, route.ids, route)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    experts.count_overflow(route.counted)
    return rows, local_ids, got, route


@graph_break
def collect(y: Tensor, route: Route) -> Tensor:
    """Sends the results (n, d) of received rows back to where these came from: (L, d), sums over ranks in their order.

    y: differentiable, a result for each row of `exchange`; those of rows that fill up are not read.
    Raises ValueError for another number of rows or where d or the dtype differs among ranks, TypeError for another
    device or a dtype that is no float, and RuntimeError as `exchange` does.
    """
    if not isinstance(route, Route):
        raise TypeError(f"collect: route: expected what exchange returned, got {type(route)}")
    try:
        _check_results(y, route)
    except (TypeError, ValueError, RuntimeError):
        route.meet("collect", failed=True)
        raise
    dtype = collectives.SENT_DTYPES.index(y.dtype)
    route.meet("collect", d=y.shape[1], dtype=dtype, requires_grad=required((), (), (), (y,)))
    collected: Tensor = _Collect.apply(y, route)  # type: ignore[no-untyped-call]
    return collected
