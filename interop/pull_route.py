"""The route on which nothing is sent: GPUs of one host read each other's rows by index.

A rank's tokens, with their ids and router weights, lie where all ranks read them, and so do its results: those of all
ranks' tokens, at rows r * M + t for token t of rank r. M is the largest number of tokens of a rank. Rows without an
expert here, or without a token, are neither read nor computed.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from moeblaze_cupy import launch_config
from moeblaze_cupy import rows as mb_rows
from moeblaze_cupy.interop.expert_group import RankGroup
from moeblaze_cupy.interop.routes import Route
from moeblaze_cupy.rows import PeerArray

Tensor = torch.Tensor


class PullRoute(Route):
    """Rows that ranks pull. Two buffers take turns, as tokens are offered, then results, then tokens again.

    Where `one_by_one` is set the caller decides on the order. Such steps share a buffer of their own, and each ends
    with a barrier.
    """

    def __init__(self, ids: Tensor, experts: RankGroup) -> None:
        super().__init__(ids, experts, [])
        self.expect([len(ids)] * experts.size)

    def expect(self, tokens: Sequence[int]) -> None:
        """tokens: of each rank. Where they differ their room is of a size that comes again."""
        most = max(tokens)
        self.rows = most if min(tokens) == most else launch_config.size_class(most)  #: M, of each rank's tokens
        self.arriving = [self.rows] * len(tokens)
        self.sent = list(self.arriving)
        self._share = mb_rows.Share(self.experts.rank, self.experts.local_experts, self.rows)

    def _offer(self, kind: str, rows: int, *tensors: Tensor) -> list[PeerArray]:
        return self.experts.peers.offer("one by one" if self.one_by_one else kind, tensors, rows)

    def _close(self) -> None:
        if self.one_by_one:
            self.experts.peers.close()

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.new_empty((self.room, x.shape[1]))
        local_ids = ids.new_empty((self.room, self.k), dtype=torch.int32)
        got = weights.new_empty((self.room, self.k))
        self._needed = ids.new_empty(self.room, dtype=torch.bool)  # rows that have an expert here
        if self.rows:
            if self.num_tokens < self.rows:  # rows without a token have no expert
                beyond = 0, 0, 0, self.rows - self.num_tokens
                ids, weights = pad(ids, beyond, value=-1), pad(weights, beyond)
            of_rows, of_ids, of_weights = self._offer("tokens", self.rows, x, ids, weights)
            mb_rows.pull_slots(of_ids, of_weights, self._share, local_ids, got, self._needed)
            mb_rows.pull_rows(of_rows, self._needed, rows)
            self._close()
        return rows, local_ids, got

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        tensors = [grad] if x is None else [grad, x]
        pulled = [tensor.new_empty((self.room, tensor.shape[1])) for tensor in tensors]
        if self.rows:
            for of_rows, rows in zip(self._offer("tokens", self.rows, *tensors), pulled, strict=True):
                mb_rows.pull_rows(of_rows, self._needed, rows)
            self._close()
        return pulled[0], None if x is None else pulled[1]

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        back = self._back({"x": rows})
        return lambda: back()["x"]

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return self._back(grads)

    def _back(self, of_rows: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Offers results of received rows, and gives a function that pulls those of this rank's tokens."""
        taken = {name: rows.new_empty((self.num_tokens, rows.shape[1])) for name, rows in of_rows.items()}
        if not self.rows:
            return lambda: taken
        if not of_rows:  # the next call offers tokens again
            self.experts.peers.close()
            return lambda: taken
        offered = dict(zip(of_rows, self._offer("results", self.room, *of_rows.values()), strict=True))

        def pull() -> dict[str, Tensor]:
            for name, at_peers in offered.items():
                take = mb_rows.pull_values if name == "weights" else mb_rows.sum_peer_rows
                take(at_peers, self.ids, self._share, taken[name])
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
