"""Weights gathered from the shards of ranks: their presence, and the owners that sum their gradients over ranks.

Autograd does not get a gradient that its owner sums, a `fsdp.sums.ShardReducer`. The layer looks here for its weights.
"""

import weakref
from typing import Any, NamedTuple

import torch

from moeblaze_cupy.interop.torch import private

Tensor = torch.Tensor
_shards: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # keyed by the whole parameter's storage

# Nodes of autograd that pass a gradient on as it is, in another shape. The first is for weights in e4m3.
VIEWS = ("_ShapeBackward", *private.VIEW_NODES)


class Owners(NamedTuple):
    """The owners of a layer's weights; None for a weight that requires no gradient."""

    w1: Any
    w2: Any
    nodes: tuple[Any, Any]  #: autograd's nodes where the gradients would end
    transposed: tuple[bool, bool]  #: the memory order of each weight (E, M, N) is that of (E, N, M)

    def ready(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of "w1" and "w2" in `needs` if their owners take them in this backward, else none."""
        names = tuple(name for name in ("w1", "w2") if name in needs)
        taken = all(getattr(self, name).is_ready() and private.is_reached(self.nodes[name == "w2"]) for name in names)
        return names if taken else ()

    def sum(self, weights: tuple[Tensor, Tensor], pending: Any, names: tuple[str, ...]) -> None:
        """Takes the gradients of w1 (E, d, 2h) or (E, d, h), and w2 (E, h, d). pending: `moe_backward_data`'s."""
        of = {name: (weights[name == "w2"], self.transposed[name == "w2"], getattr(self, name)) for name in names}
        getattr(self, names[0]).sums.sum(of, pending)


def register(whole: Tensor, shard: Any) -> None:
    """Registers a `fsdp_gather.Shard` of the parameter in whole's storage until its end. The shard keeps `whole`."""
    _shards[private.storage_id(whole)] = shard


def expect_gathered(*weights: Tensor | None) -> None:
    """Raises RuntimeError for a weight that has been freed, as other modules may have its memory."""
    if _shards:
        for weight in weights:
            shard = None if weight is None else _shards.get(private.storage_id(weight))
            if shard is not None:
                shard.expect_there()


def _owner(weight: Tensor) -> Any:
    """Returns the owner of a weight (E, M, N) that is all of a parameter, in either memory order; None without one."""
    owner = getattr(_shards.get(private.storage_id(weight)), "owner", None)
    if owner is None or weight.dim() != 3:  # the layer's checks name such a weight
        return None
    E, M, N = weight.shape
    whole = weight.storage_offset() == 0 and weight.stride() in ((M * N, N, 1), (M * N, 1, M))
    return owner if whole and owner.numel == E * M * N else None


def _end_of(weight: Tensor) -> Any:
    """Returns the node of autograd where a weight's gradient ends, if it gets there as it is."""
    node: Any = torch.autograd.graph.get_gradient_edge(weight).node
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node


def owners_of(w1: Tensor, w2: Tensor) -> Owners | None:
    """Returns the owners of a layer's weights, if each that requires a gradient has one, and they sum alike."""
    if not _shards:
        return None
    owners: list[Any] = [None, None]
    nodes: list[Any] = [None, None]
    for i, weight in enumerate((w1, w2)):
        if weight.requires_grad:
            owners[i], nodes[i] = _owner(weight), _end_of(weight)
            if owners[i] is None or not owners[i].is_of(getattr(nodes[i], "variable", None)):
                return None
    found = [owner for owner in owners if owner is not None]
    if not found or any(owner.sums_with != found[0].sums_with for owner in found):
        return None
    transposed = w1.stride(-1) != 1, w2.stride(-1) != 1
    return Owners(owners[0], owners[1], (nodes[0], nodes[1]), transposed)
