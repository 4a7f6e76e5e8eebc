"""What the layer hands back: index lists, what is kept for backward, gradients.

Shapes use the paper's letters: L tokens, k experts per token, E experts, d model width, h expert
hidden width. The fields hold arrays of the caller's own kind (NumPy, CuPy, torch, ...), but those of
SavedForBackward are NumPy or CuPy arrays where the caller's are known by DLPack alone, as JAX's are.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

SAVE_POLICIES = ("minimal", "paper", "recompute", None)
GATED_ACTIVATIONS = ("swiglu", "geglu", "reglu")
PLAIN_ACTIVATIONS = ("silu", "gelu", "relu")
ACTIVATIONS = GATED_ACTIVATIONS + PLAIN_ACTIVATIONS
ROUTER_KINDS = ("softmax_topk", "topk_softmax")
GRADIENTS = ("x", "weights", "w1", "w2")


def is_gated(activation: str) -> bool:
    """True where the first layer has a gate and an up half: y = act(x w_gate) * (x w_up)."""
    return activation in GATED_ACTIVATIONS


def nbytes(array: Any) -> int:
    """Bytes of one array's elements, 0 for None. Works for NumPy, CuPy and torch alike."""
    return 0 if array is None else int(array.nbytes)


@dataclass(frozen=True)
class DispatchIndices:
    """The index lists of the paper's section 4.1, all int32, in the caller's kind of array.

    An id < 0 or >= E is "no expert in this slot": such slots are not listed, and their
    `token_index_map` entry is -1. Entries of `expert_token_indices` past the last listed slot,
    `expert_token_offsets[E]`, are -1.
    """

    expert_token_indices: Any  # (L*k,) token of each routed slot; by expert, then token, then slot
    expert_token_offsets: Any  # (E+1,) exclusive prefix sum of the experts' slot counts
    token_expert_indices: Any  # (L*k,) expert of each slot, by token; the ids themselves if int32
    token_index_map: Any  # (L, k) position of slot (token, j) in expert_token_indices, or -1
    num_experts: int
    row_tiles: Any = None  # (T+1, 2) GEMM schedule: row 0 (count, rows per tile), then (expert, first row)
    experts_by_load: Any = None  # (E,) expert ids by falling slot count, equal counts by rising id
    ids_copied: bool = False  # token_expert_indices is not the caller's ids (they were int64)

    def split(self) -> tuple[list, "DispatchIndices"]:
        """The arrays, and the rest."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.type is Any}
        return list(arrays.values()), replace(self, **dict.fromkeys(arrays))

    def joined(self, arrays: list) -> "DispatchIndices":
        """What `split` took apart."""
        names = (f.name for f in fields(self) if f.type is Any)
        return replace(self, **dict(zip(names, arrays, strict=True)))

    @property
    def num_tokens(self) -> int:
        return self.token_index_map.shape[0]

    @property
    def k(self) -> int:
        return self.token_index_map.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes these lists hold beyond the caller's ids."""
        own_ids = nbytes(self.token_expert_indices) if self.ids_copied else 0
        return own_ids + sum(
            nbytes(a)
            for a in (
                self.expert_token_indices,
                self.expert_token_offsets,
                self.token_index_map,
                self.row_tiles,
                self.experts_by_load,
            )
        )


@dataclass(frozen=True)
class PackedIndices:
    """The lists of `DispatchIndices` as they are on a GPU: in one buffer, each an array of its own once asked for."""

    lists: Any  # (n,) int32
    ids: Any  # (L, k) int32: the caller's, or what dispatch made of int64 ids
    places: dict  # first element and shape of each list in `lists`
    num_experts: int
    ids_copied: bool

    def _list(self, name: str) -> Any:
        start, shape = self.places[name]
        return self.lists[start : start + math.prod(shape)].reshape(shape)

    expert_token_indices = property(lambda self: self._list("expert_token_indices"))
    expert_token_offsets = property(lambda self: self._list("expert_token_offsets"))
    token_expert_indices = property(lambda self: self.ids.reshape(-1))
    token_index_map = property(lambda self: self._list("token_index_map"))
    row_tiles = property(lambda self: self._list("row_tiles"))
    experts_by_load = property(lambda self: self._list("experts_by_load"))
    num_tokens = property(lambda self: self.places["token_index_map"][1][0])
    k = property(lambda self: self.places["token_index_map"][1][1])

    @property
    def nbytes(self) -> int:
        """Bytes these lists hold beyond the caller's ids."""
        return nbytes(self.lists) + (nbytes(self.ids) if self.ids_copied else 0)

    def split(self) -> tuple[list, "PackedIndices"]:
        return [self.lists, self.ids], self.joined([None, None])

    def joined(self, arrays: list) -> "PackedIndices":
        return PackedIndices(*arrays, self.places, self.num_experts, self.ids_copied)

    def unpacked(self) -> DispatchIndices:
        return DispatchIndices(**{field.name: getattr(self, field.name) for field in fields(DispatchIndices)})


def pair(weight: Any) -> tuple:
    """One weight's array, or its (gate, up), as a tuple."""
    return tuple(weight) if isinstance(weight, (tuple, list)) else (weight,)


def one_or_pair(parts: tuple) -> Any:
    """What `pair` was given."""
    return parts if len(parts) == 2 else parts[0]


@dataclass
class SavedForBackward:
    """What `moe_forward` keeps for `moe_backward`.

    x, weights, w1, w2 and int32 ids are the caller's own arrays, not copies: what changes in them before backward
    changes the gradients. `nbytes` counts what is held beyond them.
    """

    x: Any  # (L, d)
    weights: Any  # (L, k)
    w1: Any  # (E, d, 2h) or (E, d, h), or a pair of (E, d, h)
    w2: Any  # (E, h, d)
    index: DispatchIndices | PackedIndices
    first_layer: Any  # (L*k, 2h): a then b, or (L*k, h) if not gated; None if recomputed
    y_swi: Any  # (L*k, h): activation(a) * b; None unless save="paper"
    activation: str
    save: str
    consumed: bool = field(default=False)  # a backward may have overwritten first_layer or y_swi

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + nbytes(self.first_layer) + nbytes(self.y_swi)

    def is_consumed_by(self, needs: tuple[str, ...], keep_saved: bool) -> bool:
        """Whether a backward for the gradients `needs` overwrites what is kept: first_layer with its own gradient,
        y_swi with the operand of w2's. On the CPU nothing is overwritten, yet the same backwards count as consuming.
        """
        first_layer = self.first_layer is not None and ("x" in needs or "w1" in needs)
        return not keep_saved and (first_layer or (self.y_swi is not None and "w2" in needs))


@dataclass(frozen=True)
class Gradients:
    """Gradients of one layer, None where not asked for. Each in the form, dtype and memory order of its input."""

    x: Any = None  # (L, d)
    weights: Any = None  # (L, k)
    w1: Any = None  # as w1: one array, or a pair
    w2: Any = None  # (E, h, d)

    def __iter__(self):
        return (getattr(self, f.name) for f in fields(self))
