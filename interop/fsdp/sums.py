"""Experimental: gradients of weights under FSDP2, summed on the rank that has the weight, without a reduce-scatter.

FSDP2 would copy a layer's gradients into one buffer on the stream of the products, have that reduced by a collective,
and sum on multiprocessors that the next layer's products need. Here the products store the gradients of other ranks'
experts in the memory of those ranks, and those of this rank's add to what the other ranks have stored.
"""

from collections.abc import Mapping
from typing import Any

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.interop.fsdp.private import Group, Parameter
from moeblaze_cupy.interop.parallel.driver import capture_of, current_stream
from moeblaze_cupy.interop.parallel.peers import Peers, others
from moeblaze_cupy.layer import backward_api as backward

Tensor = torch.Tensor
TURNS = 2  # turns of memory: ranks may store a layer's gradients while another still reads those of the layer before
MOST_RANKS = 8  # most ranks whose parts the kernel adds


class GradientSums:
    """Memory that the other ranks store gradients in, of two turns, for all layers of the same ranks.

    On the stream of the products a rank signals that it has stored a layer's gradients, and waits for the others'
    signals before it adds. The others signal after they have read what this rank stored for the layer before. So a rank
    that has waited may write the memory of the other turn again.
    """

    def __init__(self, peers: Peers, rank: int, size: int) -> None:
        self.peers, self.rank, self.size, self._turn = peers, rank, size, 0
        self._capture = 0  # the last sums' capture in a CUDA graph

    def sum(self, weights: Mapping[str, tuple[Tensor, bool, "ShardReducer"]], pending: Any) -> None:
        """Hands the reducers of "w1" and "w2", or of one of them, the sums of their gradients.

        weights: each (E, M, N), whether the parameter's memory order is that of (E, N, M), and its reducer. pending:
        what `moe_backward_data` returned.
        """
        needs, every = tuple(weights), others(self.rank, self.size)
        of_any, _, owner = weights[needs[0]]
        device = of_any.device
        self.peers.follow(device)
        self._turn = (self._turn + 1) % TURNS
        kinds = [f"sums {turn}" for turn in range(TURNS)]
        kind = kinds[self._turn]
        forms = tuple(
            ((self.size - 1, len(weight) // self.size, *weight.shape[1:]), weight.dtype)
            for weight, *_ in weights.values()
        )
        arrays = [self.peers.arrays(of_turn, forms, device) for of_turn in kinds]  # all are made in the first step
        capture = capture_of(current_stream(device))
        if capture != self._capture:  # a replay, or an eager step after some, may have the turn of the sums before it
            self._capture = capture
            self.peers.meet()
        parts: dict[str, Tensor] = {}
        at: dict[str, dict[int, Tensor]] = {}
        totals: dict[str, Tensor] = {}
        for name, stored, offered in zip(needs, *arrays[self._turn], strict=True):
            _, transposed, of = weights[name]
            parts[name] = _in_order(stored, transposed)
            own = {rank: offered.at[rank][others(rank, self.size).index(self.rank)] for rank in every}
            at[name] = {rank: _in_order(place, transposed) for rank, place in own.items()}
            total = torch.empty(stored.shape[1:], dtype=of.dtype, device=device)
            totals[name] = _in_order(total, transposed)
        scale, channels = 1 / owner.divisor(self.size), {"w1": 1, "w2": 2}

        def signal(name: str) -> None:
            self.peers.signal(kind, channels[name])

        def wait(name: str) -> None:
            self.peers.wait(kind, channels[name])

        ranks = [self.rank, *every]
        # tensors from hooks of saved tensors may have another memory order than the parameter
        as_they_were = all((weight.stride(-1) != 1) == transposed for weight, transposed, _ in weights.values())
        places = totals, parts, at, signal, wait
        if not (as_they_were and backward.summed_weights(pending, needs, ranks, scale, *places)):
            self._sum_by_copies(pending, needs, scale, *places)
        for name, (_, transposed, of) in weights.items():
            of.accumulate(totals[name].transpose(1, 2) if transposed else totals[name])

    def _sum_by_copies(
        self,
        pending: Any,
        needs: tuple[str, ...],
        scale: float,
        totals: Mapping[str, Tensor],
        parts: Mapping[str, Tensor],
        at: Mapping[str, Mapping[int, Tensor]],
        signal: Any,
        wait: Any,
    ) -> None:
        """Sums on a rank that Hopper's kernels cannot serve, which the others need not know."""
        grads = mb.moe_backward_weights(pending, needs=needs)
        for name in needs:
            by_rank = getattr(grads, name).unflatten(0, (self.size, -1))
            for rank, place in at[name].items():
                place.copy_(by_rank[rank])
            signal(name)
        for name in needs:
            wait(name)
            total = getattr(grads, name).unflatten(0, (self.size, -1))[self.rank].float()
            for part in parts[name]:
                total += part
            totals[name].copy_(total * scale)


def _in_order(array: Tensor, transposed: bool) -> Tensor:
    """Returns a view of a packed array as (..., M, N), or one whose memory order is that of (..., N, M)."""
    if not transposed:
        return array
    return array.view(*array.shape[:-2], *array.shape[:-3:-1]).transpose(-1, -2)


class ShardReducer:
    """Takes the summed gradient of this rank's part of a parameter of E experts that FSDP2 shards."""

    def __init__(self, sums: GradientSums, shard: Any, parameter: Parameter, group: Group) -> None:
        """Reduces gradients of a `gather.Shard`."""
        self.sums, self._parameter, self._group = sums, parameter, group
        self.numel, self.dtype = shard.whole.numel(), parameter.local.dtype
        self.sums_with = id(sums), id(group)

    def is_of(self, variable: Any) -> bool:
        """Returns whether a leaf of autograd is the whole parameter."""
        return self._parameter.is_whole(variable)

    def is_ready(self) -> bool:
        """Returns whether it takes the gradient of this backward, which all ranks decide alike.

        It is False while gradients add up on each rank, if a hook is to see what FSDP2 reduces, or if FSDP2 also
        reduces parameters without a gradient.
        """
        return self._group.reduces_only_gradients and not self._parameter.has_other_gradients

    def divisor(self, size: int) -> float:
        given = self._group.divide_factor
        return size if given is None else given

    def accumulate(self, total: Tensor) -> None:
        """Sets the gradient of the part, or adds to it. total: contiguous."""
        self._parameter.accumulate_gradient(total, self._group)


def can_be_summed(parameter: Parameter, whole: Tensor, group: Group, size: int) -> bool:
    """Returns whether a parameter's gradient can be stored and summed by the products. whole: in the products' dtype.

    It cannot where other ranks have the same part, over which FSDP2 sums as well.
    """
    halves = torch.bfloat16, torch.float16
    dtypes = whole.dtype, torch.float32
    fits = whole.dtype in halves and whole.dim() == 3 and parameter.local.dtype in dtypes
    return fits and size <= MOST_RANKS and not group.is_replicated
