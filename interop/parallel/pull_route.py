"""The route on which nothing is packed: GPUs of one host read each other's rows by index.

A rank's tokens, with their ids and router weights, lie where all ranks read them. The layer's last kernel stores the
results of this rank s for token t of rank r in rank r's memory, at row s * M + t. M is the largest
number of tokens of a rank. Rank r then sums what the ranks have stored. Rows without an expert here, or without a
token, are neither read, nor computed, nor stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import pad

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.fp8 import rows as fp8_rows
from moeblaze_cupy.interop.parallel.group import RankGroup
from moeblaze_cupy.interop.parallel.peers import Form, PeerTensor
from moeblaze_cupy.interop.parallel.routes import RemoteOutput, Route, Rows
from moeblaze_cupy.rows import api as mb_rows
from moeblaze_cupy.rows.push import Destination, PeerOffset
from moeblaze_cupy.types import Fp8Rows

Tensor = torch.Tensor
# A copy of all rows is faster than a kernel that reads the rows it needs if these are more than a share of them: on two
# H200s copies run at 369 GB/s, the kernel at 256.
COPIED_SHARE = 0.75


class PullRoute(Route):
    """Rows that ranks pull. Two buffers take turns: tokens are offered, then results, then tokens again.

    Steps that are `one_by_one`, whose order the caller decides on, share a buffer of their own, and each ends with a
    barrier.
    """

    begins_early = True

    def __init__(self, ids: Tensor, experts: RankGroup) -> None:
        super().__init__(ids, experts, [])
        self._begun: tuple[Rows, Tensor, Tensor] | None = None
        self._landing: Tensor | None = None  # memory in which the ranks store results of this rank's tokens
        self.expect([len(ids)] * experts.size)

    def expect(self, tokens: Sequence[int]) -> None:
        """Takes the numbers of tokens, by rank. If they differ, their room has a size that comes again."""
        most = max(tokens)
        self.rows = most if min(tokens) == most else launch_config.size_class(most)  #: M, of each rank's tokens
        self.arriving = [self.rows] * len(tokens)
        self.sent = list(self.arriving)
        self._tokens = tokens
        self._share = mb_rows.Share(self.experts.rank, self.experts.local_experts, self.rows)

    @property
    def _needs_most(self) -> bool:
        """Returns whether a rank has an expert of most tokens, if a token's k experts are drawn from all."""
        E, k = self.experts.num_experts, self.k
        without = math.comb(E - self.experts.local_experts, k) / max(math.comb(E, k), 1)
        return without <= 1 - COPIED_SHARE

    @property
    def _copies(self) -> bool:
        """Returns whether the rows of all tokens are copied, instead of pulling those that are needed."""
        return self.experts.peers.copies and self._needs_most

    def _copy(self, offered: Sequence[PeerTensor], rows: Rows) -> Callable[[], None]:
        """Starts to copy the rows of all ranks' tokens into (room, columns).

        offered: the rows, or the values and the scales of `Fp8Rows`. The returned function makes the stream
        wait for the copies.
        """
        here, ranks = self.experts.rank, self.experts.size
        pairs = []
        for rank in range(here, here + ranks):  # not all from one rank at once
            start, tokens = rank % ranks * self.rows, self._tokens[rank % ranks]
            for of, to in zip(offered, rows if isinstance(rows, Fp8Rows) else (rows,), strict=True):
                pairs.append((to[start : start + tokens], of.at[rank % ranks][:tokens]))
        own, others = pairs[: len(offered)], pairs[len(offered) :]
        wait = self.experts.peers.copy(others) if others else lambda: None
        for to, source in own:
            to.copy_(source)
        return wait

    def _pull(self, offered: Sequence[PeerTensor], rows: Rows) -> None:
        """Launches a kernel that reads the rows that are needed. offered: see `_copy`."""
        if isinstance(rows, Fp8Rows):
            values, scales = offered
            mb_rows.pull_scaled_rows(values.array, scales.array, self._needed, rows)
        else:
            mb_rows.pull_rows(offered[0].array, self._needed, rows)

    def _offer(self, kind: str, rows: int, *tensors: Tensor) -> list[PeerTensor]:
        return self.experts.peers.offer("one by one" if self.one_by_one else kind, tensors, rows)

    def _offer_tokens(self, *rows: Tensor, others: tuple[Tensor, ...] = ()) -> list[list[PeerTensor]]:
        """Offers rows, as values and scales if `rows_in_fp8`, and other arrays. Returns a list for each of them.

        This rank's rows in e4m3 are written to where other ranks read them.
        """
        if not self.rows_in_fp8:
            return [[of] for of in self._offer("tokens", self.rows, *rows, *others)]
        forms: list[Form] = []
        for of in rows:
            forms += [((self.rows, of.shape[1]), torch.uint8), ((self.rows,), torch.float32)]
        forms += [((self.rows, *of.shape[1:]), of.dtype) for of in others]
        room = self.experts.peers.room("tokens", tuple(forms), rows[0].device)
        written = [tensor[: self.num_tokens] for tensor in room[: 2 * len(rows)]]
        for of, *to in zip(rows, written[::2], written[1::2], strict=True):
            fp8_rows.quantize_rows(of, Fp8Rows(*to))
        offered = self._offer("tokens", self.rows, *written, *others)
        values_and_scales = [offered[i : i + 2] for i in range(0, len(written), 2)]
        return [*values_and_scales, *([of] for of in offered[len(written) :])]

    def _room_for_rows(self, like: Tensor) -> Rows:
        shape = self.room, like.shape[1]
        if not self.rows_in_fp8:
            return like.new_empty(shape)
        return Fp8Rows(like.new_empty(shape, dtype=torch.uint8), like.new_empty(self.room, dtype=torch.float32))

    def _close(self) -> None:
        if self.one_by_one:
            self.experts.peers.close()

    def begin(self, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], None]:
        """Does what `Route.begin` says."""
        rows = self._room_for_rows(x)
        local_ids = ids.new_empty((self.room, self.k), dtype=torch.int32)
        got = weights.new_empty((self.room, self.k))
        self._needed = ids.new_empty(self.room, dtype=torch.bool)  # rows that have an expert here
        self._wait: Callable[[], None] | None = None
        if self.rows:
            if self.num_tokens < self.rows:  # rows without a token have no expert
                beyond = 0, 0, 0, self.rows - self.num_tokens
                ids, weights = pad(ids, beyond, value=-1), pad(weights, beyond)
            of_rows, (of_ids,), (of_weights,) = self._offer_tokens(x, others=(ids, weights))
            copies = self._copies
            if copies:  # the copies start before `pull_slots` and run beside it
                self._wait = self._copy(of_rows, rows)
            mb_rows.pull_slots(of_ids.array, of_weights.array, self._share, local_ids, got, self._needed)
            if not copies:
                self._pull(of_rows, rows)
        self._begun = rows, local_ids, got
        return self._wait or (lambda: None)

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Rows, Tensor, Tensor]:
        self.wait = None
        if self._begun is None:
            self.begin(x, ids, weights)
            self._arrive(self._wait)
        assert self._begun is not None
        received, self._begun = self._begun, None
        if self.rows:
            self._close()
        return received

    def _arrive(self, wait: Callable[[], None] | None) -> None:
        """Sets the route's `wait`, or waits. wait: what `_copy` returned, None without copies."""
        if wait is not None and self.one_by_one:
            wait()
        else:
            self.wait = wait

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Rows, Rows | None]:
        tensors, self.wait = [grad] if x is None else [grad, x], None
        pulled = [self._room_for_rows(tensor) for tensor in tensors]
        if self.rows:
            for offered, rows in zip(self._offer_tokens(*tensors), pulled, strict=True):
                if not self._copies:
                    self._pull(offered, rows)
                elif x is None:
                    self._arrive(self._copy(offered, rows))
                else:
                    self._copy(offered, rows)()
            self._close()
        return pulled[0], None if x is None else pulled[1]

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        back = self._back({"x": rows})
        return lambda: back()["x"]

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        return self._back(grads)

    def _back(self, results: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Offers results of received rows. Returns a function that brings those of this rank's tokens."""
        taken = {name: rows.new_empty((self.num_tokens, rows.shape[1])) for name, rows in results.items()}
        if not self.rows:
            return lambda: taken
        if not results:  # the next call offers tokens again
            self.experts.peers.close()
            return lambda: taken
        is_stored, self._landing = results.get("x") is self._landing, None
        offered = dict(zip(results, self._offer("results", self.room, *results.values()), strict=True))
        peers, share = self.experts.peers, self._share

        def pull() -> dict[str, Tensor]:
            if "x" in results and is_stored:
                stored = peers.by_rank(results["x"], self.rows)
                mb_rows.sum_peer_rows(stored, self.ids, share._replace(rank=0), taken["x"])
            elif "x" in offered:
                mb_rows.sum_peer_rows(offered["x"].array, self.ids, share, taken["x"])
            if "weights" in offered:
                mb_rows.pull_values(offered["weights"].array, self.ids, share, taken["weights"])
            self._close()
            return taken

        return pull

    def remote_results(self, d: int, dtype: torch.dtype) -> RemoteOutput | None:
        # Gradients of weights come beside those of rows later, for which the buffer would have to grow.
        return self._destination((((self.room, d), dtype), ((self.room, self.k), torch.float32)), 0)

    def remote_gradients(
        self, needs: tuple[str, ...], d: int, dtype: torch.dtype, weights: Tensor
    ) -> RemoteOutput | None:
        if "x" not in needs:
            return None
        by_name = {"x": ((self.room, d), dtype), "weights": (tuple(weights.shape), weights.dtype)}
        return self._destination(tuple(by_name[name] for name in needs), needs.index("x"))

    def _destination(self, forms: tuple[Form, ...], which: int) -> RemoteOutput | None:
        """Returns a destination for array `which` of these forms, which all ranks have in their buffers of results."""
        if not self.rows or self.one_by_one or not self.ids.is_cuda:
            return None
        peers, device, share = self.experts.peers, self.ids.device, self._share
        self._landing = peers.room("results", forms, device)[which]
        array = peers.arrays("results", forms, device)[1][which].array
        place = PeerOffset(array.offset, share.rank * self.rows, self.rows)
        return RemoteOutput(Destination(array.addresses, self._needed, place), self._landing)

    def zero_padding(self, rows: Tensor) -> Tensor:
        return torch.where(self._needed[:, None], rows, 0)
