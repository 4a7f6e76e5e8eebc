"""Routes say which rows of tokens travel to which ranks: here the route of collectives, and the shared base."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.fp8 import rows as fp8_rows
from moeblaze_cupy.interop.parallel import collectives
from moeblaze_cupy.interop.parallel.collectives import Pending
from moeblaze_cupy.interop.parallel.group import RankGroup
from moeblaze_cupy.rows.push import Destination
from moeblaze_cupy.types import Fp8Rows

Tensor = torch.Tensor
Rows = Tensor | Fp8Rows


class RemoteOutput(NamedTuple):
    """The place of stored results, and `landing` (room, d), to which those of this rank's tokens come, by rank."""

    destination: Destination
    landing: Tensor


class Route:
    """The rows that one exchange sends, and their ranks. `exchange` makes it, `collect` and backward follow it."""

    begins_early = False  #: rows can travel before a shared expert is launched, as the host waits for no GPU

    def __init__(self, ids: Tensor, experts: RankGroup, arriving: list[int]) -> None:
        self.experts, self.ids, self.call = experts, ids, experts.calls
        self.num_tokens, self.k = ids.shape  #: L and k
        self.sent = list(arriving)  #: rows to each rank
        self.arriving = arriving  #: rows from each rank
        self.slots: int | None = None  #: this rank's slots in the rows received; None if the host does not know
        self.has_fixed_room = True  # the number of rows received is known from L
        self.one_by_one = False  # its steps are functions of autograd that run in the caller's order
        self.rows_in_fp8 = False  # rows of x and of results' gradients travel in e4m3; never if one_by_one
        self.counted: Tensor | None = None  # (1,) the count of what was dropped; None if nothing can be
        #: makes the stream wait for the rows received last, while they are on their way; never set if one_by_one
        self.wait: Callable[[], None] | None = None

    @property
    def received(self) -> int:
        """Returns the number of rows from all ranks."""
        return sum(self.arriving)

    @property
    def room(self) -> int:
        """Returns the number of rows of their buffer, a size that comes again in other steps."""
        return self.received if self.has_fixed_room else launch_config.size_class(self.received)

    @cached_property
    def choices(self) -> Tensor:
        """Returns (E,) int64: this rank's slots per expert. Their sum over ranks feeds bias rules of the router.

        They are counted when first asked for, from the ids as they are then. `exchange` with route "pull" has a copy.
        """
        counts: Tensor = mb.tokens_per_expert(self.ids, self.experts.num_experts)
        return counts[0].to(torch.int64)

    @property
    def dropped(self) -> Tensor:
        """Returns (1,) int64: the rows and slots that found no place."""
        return self.ids.new_zeros(1, dtype=torch.int64) if self.counted is None else self.counted

    def count_dropped(self, more: Tensor) -> None:
        """Adds to the count of dropped rows and slots. more: (1,) of integers."""
        self.counted = more.to(torch.int64, copy=True) if self.counted is None else self.counted + more

    def meet(self, step: str, failed: bool = False, **same: int) -> None:
        """Calls `RankGroup.meet` for this call."""
        self.experts.meet(step, self.call, failed, **same)

    def begin(self, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], None]:
        """Starts `receive` of the same arguments. The returned function makes the stream wait for rows under way.

        Until then rows travel beside what the stream does. `receive` alone does all of it.
        """
        raise NotImplementedError

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """Returns rows (room, d), local ids (room, k) int32, -1 for other ranks' experts, and router weights (room, k).

        The rows are `Fp8Rows` if `rows_in_fp8`. They may be on their way: see `wait`.
        """
        raise NotImplementedError

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Rows, Rows | None]:
        """Returns gradients of results (room, d), from (L, d), and again the rows of x where they are not kept.

        The gradients may be on their way: see `wait`.
        """
        raise NotImplementedError

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        """Starts the way back of results (room, d). The returned function gives (L, d), the sums over ranks in order.

        rows: `landing` of `remote_results` if they are stored there.
        """
        raise NotImplementedError

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Starts the way back of gradients of received rows: "x" (room, d), "weights" (room, k), both or none.

        The returned function gives them by name: for x the sums over ranks (L, d), for each slot its rank's (L, k). "x"
        is `landing` of `remote_gradients` if it is stored there.
        """
        raise NotImplementedError

    def remote_results(self, d: int, dtype: torch.dtype) -> RemoteOutput | None:
        """Returns where the layer stores its results on CUDA, if not in an array."""
        return None

    def remote_gradients(
        self, needs: tuple[str, ...], d: int, dtype: torch.dtype, weights: Tensor
    ) -> RemoteOutput | None:
        """Returns where the layer stores the gradient of x on CUDA, if not in an array.

        needs: the gradients that there will be. weights: those received.
        """
        return None

    def zero_padding(self, rows: Tensor) -> Tensor:
        """Zeros the rows that only fill the buffer up, or were not asked for."""
        rows[self.received :] = 0
        return rows


class SentRoute(Route):
    """Rows that collectives send, with route "exact" or "static"."""

    def __init__(
        self,
        ids: Tensor,
        experts: RankGroup,
        arriving: list[int],
        ranks: Tensor,
        positions: Tensor,
        tokens: Tensor,
    ) -> None:
        super().__init__(ids, experts, arriving)
        self.has_fixed_room = False
        self.ranks = ranks  # (L, k) int64: the rank of each slot's expert, P for none
        self.positions = positions  # (P, L) int64: where a token's row is among those sent, -1 if it is not sent
        self.tokens = tokens  # (n,) int64: the token of each row that is sent
        self._places: Tensor | None = None  # positions by token, int32

    def _what(self, name: str) -> str:
        return f"all-to-all of {name} (call {self.call}, rows sent {self.sent}, expected {self.arriving})"

    def _send(self, x: Tensor, name: str) -> Pending:
        """Sends rows of tokens (L, columns) to the ranks that need them. The result has `room` rows."""
        chosen, group = x.index_select(0, self.tokens), self.experts.group
        return collectives.all_to_all(chosen, self.sent, self.arriving, self.room, self._what(name), group)

    def _send_rows(self, rows: Tensor, name: str) -> Callable[[], Rows]:
        """Sends rows, in e4m3 if `rows_in_fp8`. The returned function waits for them."""
        if not self.rows_in_fp8:
            return self._send(rows, name).wait
        quantized = Fp8Rows(
            rows.new_empty(rows.shape, dtype=torch.uint8), rows.new_empty(len(rows), dtype=torch.float32)
        )
        fp8_rows.quantize_rows(rows, quantized)
        values = self._send(quantized.values, name)
        scales = self._send(quantized.scales[:, None], f"scales of {name}")
        return lambda: Fp8Rows(values.wait(), scales.wait()[:, 0])

    def _give_back(self, rows: Tensor, name: str) -> Pending:
        """Sends results of received rows (room, columns) back. The result has a row for each row sent."""
        group, what = self.experts.group, self._what(name)
        return collectives.all_to_all(rows[: self.received], self.arriving, self.sent, sum(self.sent), what, group)

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Rows, Tensor, Tensor]:
        experts, k = self.experts, self.k
        packed = torch.cat([collectives.in_bytes(ids), collectives.in_bytes(weights)], 1)
        if experts.route == "static" and self.num_tokens:
            chosen = torch.zeros(len(self.tokens) + 1, dtype=torch.bool, device=ids.device)
            last = len(self.tokens)
            positions = torch.where(self.positions >= 0, self.positions, last).reshape(-1)
            chosen.scatter_(0, positions.to(torch.int64), True)  # an assignment would copy its value from the host
            no_id = packed.new_full((1, 4 * k), 255)  # int32 -1 is four bytes of 255
            absent = torch.cat([no_id, packed[:1, 4 * k :]], 1)
            rows = torch.where(chosen[:last, None], packed.index_select(0, self.tokens), absent)
            what = self._what("ids and weights")
            pending = collectives.all_to_all(rows, self.sent, self.arriving, self.room, what, experts.group)
        else:
            pending = self._send(packed, "ids and weights")
        received = pending.wait()
        ids_bytes, weights_bytes = received[:, : 4 * k], received[:, 4 * k :]
        got_ids = ids_bytes.clone(memory_format=torch.contiguous_format).view(torch.int32)
        got_weights = weights_bytes.clone(memory_format=torch.contiguous_format).view(weights.dtype)
        local = got_ids - experts.rank * experts.local_experts
        local = torch.where((local >= 0) & (local < experts.local_experts), local, -1)
        if self.received < self.room:  # rows that only fill the buffer up
            local[self.received :] = -1
            got_weights[self.received :] = 0
        return self._send_rows(x, "rows")(), local, got_weights

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Rows, Rows | None]:
        wait = self._send_rows(grad, "results' gradients")
        rows = None if x is None else self._send_rows(x, "rows")()
        return wait(), rows

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        pending = self._give_back(rows, "results")
        return lambda: self._sum(pending.wait())

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        pending = {name: self._give_back(grad, f"gradients of {name}") for name, grad in grads.items()}
        take = {"x": self._sum, "weights": self._slots_of}
        return lambda: {name: take[name](of_name.wait()) for name, of_name in pending.items()}

    def _sum(self, returned: Tensor) -> Tensor:
        """Returns (L, columns): each token's rows that came back, added in the order of ranks, in fp32 or wider."""
        if self._places is None:
            self._places = self.positions.T.to(torch.int32).contiguous()
        total: Tensor = mb.sum_rows(returned, self._places)
        return total

    def _slots_of(self, returned: Tensor) -> Tensor:
        """Returns (L, k): the value that each slot's rank gave back in its column; 0 for slots without an expert."""
        shape = self.num_tokens, self.k
        if not len(returned):
            return returned.new_zeros(shape)
        present = self.ranks < self.experts.size
        ranks = torch.where(present, self.ranks, 0)  # (L, k)
        rows = self.positions.gather(0, ranks.T.contiguous()).T  # (L, k)
        columns = torch.arange(self.k, device=returned.device).expand(shape)
        return torch.where(present & (rows >= 0), returned[rows.clamp(min=0), columns], 0)


def sent_route(ids: Tensor, experts: RankGroup) -> tuple[SentRoute, Callable[[], Tensor]]:
    """Returns the route as far as this rank knows it, and what gives (2P,) int64: rows, then slots, by rank."""
    L, P, E, device = len(ids), experts.size, experts.num_experts, ids.device
    wide = ids.to(torch.int64)
    present = (wide >= 0) & (wide < E)  # (L, k)
    ranks = torch.where(present, wide // experts.local_experts, P)
    needed = torch.zeros((P + 1, L), dtype=torch.bool, device=device)
    needed.scatter_(0, ranks.T.contiguous(), True)
    needed = needed[:P]  # (P, L) whether a rank has an expert of a token
    dropped: Tensor | None = None
    token = torch.arange(L, device=device).expand(P, L)
    if experts.route == "exact":
        positions = torch.where(needed, needed.reshape(-1).cumsum(0).view(P, L) - 1, -1)
        room, arriving = P * L, []
    else:
        C = experts.rows or L
        places = needed.to(torch.int64).cumsum(1) - 1
        if experts.rows is not None:
            dropped = (needed & (places >= C)).sum().reshape(1)
            needed = needed & (places < C)
        positions = torch.where(needed, places + C * torch.arange(P, device=device)[:, None], -1)
        room, arriving = P * C, [C] * P
    # Rows without a token are token 0's, whose ids `receive` leaves out. The last element takes what is not sent.
    tokens = torch.zeros(room + 1, dtype=torch.int64, device=device)
    tokens.scatter_(0, torch.where(needed, positions, room).reshape(-1), token.reshape(-1))
    tokens = tokens[:room] if L else tokens[:0]
    if not L:
        arriving = [0] * len(arriving)
    route = SentRoute(ids, experts, arriving, ranks, positions, tokens)
    route.counted = dropped
    return route, lambda: torch.cat([needed.sum(1), mb.tokens_per_expert(ranks, P)[0].to(torch.int64)])
