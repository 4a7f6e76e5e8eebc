"""The route on which nothing is sent: GPUs of one host read each other's rows by index.

A rank's tokens, with their ids and router weights, lie where all ranks read them, and so do its results: those of all
ranks' tokens, at rows r * M + t for token t of rank r. M is the largest number of tokens of a rank. Rows without an
expert here, or without a token, are neither read nor computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from moeblaze_cupy import launch_config
from moeblaze_cupy import rows as mb_rows
from moeblaze_cupy.interop.expert_group import RankGroup
from moeblaze_cupy.interop.peers import Offered
from moeblaze_cupy.interop.routes import Route
from moeblaze_cupy.ops.split_tiles import Arrival

Tensor = torch.Tensor
# A copy of all rows is faster than a kernel that reads the rows it needs if these are more than a share of them: on two
# H200s copies run at 369 GB/s, the kernel at 256.
COPIED_SHARE = 0.75
FETCHED_RANKS = 4  # at most, of which rows are copied beside products: the copies take memory of P - 1 times the tokens


class PullRoute(Route):
    """Rows that ranks pull. Two buffers take turns, as tokens are offered, then results, then tokens again.

    Where `one_by_one` is set the caller decides on the order. Such steps share a buffer of their own, and each ends
    with a barrier.
    """

    begins_early = True

    def __init__(self, ids: Tensor, experts: RankGroup) -> None:
        super().__init__(ids, experts, [])
        self._begun: tuple[Tensor, Tensor, Tensor] | None = None
        self.expect([len(ids)] * experts.size)

    def expect(self, tokens: Sequence[int]) -> None:
        """tokens: of each rank. Where they differ their room is of a size that comes again."""
        most = max(tokens)
        self.rows = most if min(tokens) == most else launch_config.size_class(most)  #: M, of each rank's tokens
        self.arriving = [self.rows] * len(tokens)
        self.sent = list(self.arriving)
        self._tokens = tokens
        self._share = mb_rows.Share(self.experts.rank, self.experts.local_experts, self.rows)

    @property
    def _needs_most(self) -> bool:
        """Whether a rank has an expert of most tokens, if a token's k experts are drawn from all."""
        E, k = self.experts.num_experts, self.k
        without = math.comb(E - self.experts.local_experts, k) / max(math.comb(E, k), 1)
        return without <= 1 - COPIED_SHARE

    def _copy(self, offered: Offered, rows: Tensor) -> Callable[[], None] | None:
        """Starts to copy the rows of all ranks' tokens into (room, columns); None where those needed have to be pulled.

        What it returns has the stream wait for them.
        """
        if not (self.experts.peers.copies and self._needs_most):
            return None
        here, ranks = self.experts.rank, self.experts.size
        pairs = []
        for rank in range(here, here + ranks):  # not all from one rank at once
            start, tokens = rank % ranks * self.rows, self._tokens[rank % ranks]
            pairs.append((rows[start : start + tokens], offered.at[rank % ranks][:tokens]))
        (own, source), *others = pairs
        wait = self.experts.peers.copy(others) if others else lambda: None
        own.copy_(source)
        return wait

    def _offer(self, kind: str, rows: int, *tensors: Tensor) -> list[Offered]:
        return self.experts.peers.offer("one by one" if self.one_by_one else kind, tensors, rows)

    def _close(self) -> None:
        if self.one_by_one:
            self.experts.peers.close()

    def begin(self, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], None]:
        """See `Route.begin`."""
        rows = x.new_empty((self.room, x.shape[1]))
        local_ids = ids.new_empty((self.room, self.k), dtype=torch.int32)
        got = weights.new_empty((self.room, self.k))
        self._needed = ids.new_empty(self.room, dtype=torch.bool)  # rows that have an expert here
        self._wait: Callable[[], None] | None = None
        if self.rows:
            if self.num_tokens < self.rows:  # rows without a token have no expert
                beyond = 0, 0, 0, self.rows - self.num_tokens
                ids, weights = pad(ids, beyond, value=-1), pad(weights, beyond)
            of_rows, of_ids, of_weights = self._offer("tokens", self.rows, x, ids, weights)
            self._wait = self._copy(of_rows, rows)
            mb_rows.pull_slots(of_ids.array, of_weights.array, self._share, local_ids, got, self._needed)
            if self._wait is None:
                mb_rows.pull_rows(of_rows.array, self._needed, rows)
        self._begun = rows, local_ids, got
        return self._wait or (lambda: None)

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.arrival = None
        if self._begun is None:
            self.begin(x, ids, weights)
            self._arrive(self._wait)
        assert self._begun is not None
        received, self._begun = self._begun, None
        if self.rows:
            self._close()
        return received

    def _arrive(self, wait: Callable[[], None] | None) -> None:
        """Sets `arrival`, or waits; wait: as of `_copy`."""
        if wait is not None and self.one_by_one:
            wait()
        elif wait is not None:
            first = self._share.rank * self.rows
            self.arrival = Arrival(first, first + self.rows, wait)

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tensors, self.arrival = [grad] if x is None else [grad, x], None
        pulled = [tensor.new_empty((self.room, tensor.shape[1])) for tensor in tensors]
        if self.rows:
            for offered, rows in zip(self._offer("tokens", self.rows, *tensors), pulled, strict=True):
                wait = self._copy(offered, rows)
                if wait is None:
                    mb_rows.pull_rows(offered.array, self._needed, rows)
                elif x is None:
                    self._arrive(wait)
                else:
                    wait()
            self._close()
        return pulled[0], None if x is None else pulled[1]

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        back = self._back({"x": rows})
        return lambda: back()["x"]

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return self._back(grads, beside=True)

    def _back(self, of_rows: Mapping[str, Tensor], beside: bool = False) -> Callable[[], dict[str, Tensor]]:
        """Offers results of received rows, and gives a function that pulls those of this rank's tokens.

        beside: rows are copied to this rank meanwhile, if that takes little memory.
        """
        taken = {name: rows.new_empty((self.num_tokens, rows.shape[1])) for name, rows in of_rows.items()}
        if not self.rows:
            return lambda: taken
        if not of_rows:  # the next call offers tokens again
            self.experts.peers.close()
            return lambda: taken
        offered = dict(zip(of_rows, self._offer("results", self.room, *of_rows.values()), strict=True))
        peers, share, fetched = self.experts.peers, self._share, None
        if (
            beside
            and "x" in offered
            and peers.copies
            and not self.one_by_one
            and 1 < self.experts.size <= FETCHED_RANKS
        ):
            fetched = peers.fetch(offered["x"], share.rank * self.rows, self.rows, self.num_tokens)

        def pull() -> dict[str, Tensor]:
            if fetched is not None:
                mb_rows.sum_peer_rows(fetched(), self.ids, share._replace(rank=0), taken["x"])
            elif "x" in offered:
                mb_rows.sum_peer_rows(offered["x"].array, self.ids, share, taken["x"])
            if "weights" in offered:
                mb_rows.pull_values(offered["weights"].array, self.ids, share, taken["weights"])
            self._close()
            return taken

        return pull

    def room_for_results(self, rows: Tensor) -> Tensor | None:
        if not self.rows or self.one_by_one:
            return None
        # Gradients of weights come beside those of rows later, for which the buffer would have to grow.
        forms = (tuple(rows.shape), rows.dtype), ((self.room, self.k), torch.float32)
        return self.experts.peers.room("results", forms, rows.device)[0]

    def room_for_gradients(self, needs: tuple[str, ...], rows: Tensor, weights: Tensor) -> Tensor | None:
        if not self.rows or "x" not in needs:
            return None
        like = {"x": rows, "weights": weights}
        forms = tuple((tuple(like[name].shape), like[name].dtype) for name in needs)
        return self.experts.peers.room("results", forms, rows.device)[needs.index("x")]

    def without_garbage(self, rows: Tensor) -> Tensor:
        return torch.where(self._needed[:, None], rows, 0)
