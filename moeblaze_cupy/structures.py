"""What the layer hands back: index lists, what is kept for backward, gradients.

Shapes use the paper's letters: L tokens, k experts per token, E experts, d model width, h expert
hidden width. The fields hold arrays of the caller's own kind (NumPy, CuPy, torch, ...), but those of
SavedForBackward are NumPy or CuPy arrays where the caller's are known by DLPack alone, as JAX's are. No type is common
to all these kinds, so the fields are annotated as Any.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
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


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """By the array's method, or by a function of its namespace, which is all that the array API standard asks for."""
    if hasattr(array, "reshape"):
        return array.reshape(shape)
    return array.__array_namespace__().reshape(array, shape)


@dataclass(frozen=True)
class DispatchIndices:
    """The index lists of the paper's section 4.1, all int32, in the caller's kind of array.

    All but `token_expert_indices` lie in one buffer, `lists`. Each list is a view of it, made when it is asked for.
    An id < 0 or >= E is "no expert in this slot": such slots are not listed, and their `token_index_map` entry is -1.
    """

    lists: Any  #: (n,) int32
    ids: Any  #: (L, k) int32: the caller's, or what dispatch made of int64 ids
    places: Mapping[str, tuple[int, tuple[int, ...]]]  #: first element and shape of each list in `lists`
    num_experts: int
    ids_copied: bool = False  #: `ids` is not the caller's array (that was int64)
    max_slots: int | None = None  #: of slots that have a row, if that is bounded

    def _list(self, name: str) -> Any:
        start, shape = self.places[name]
        return reshaped(self.lists[start : start + math.prod(shape)], shape)

    @property
    def expert_token_indices(self) -> Any:
        """(L*k,): the token of each routed slot, by expert, then token, then slot; -1 past the last routed slot."""
        return self._list("expert_token_indices")

    @property
    def expert_token_offsets(self) -> Any:
        """(E+1,): where each expert's slots begin in expert_token_indices; the last entry is their number."""
        return self._list("expert_token_offsets")

    @property
    def token_expert_indices(self) -> Any:
        """(L*k,): the expert of each slot, by token; the caller's ids if they are int32."""
        return reshaped(self.ids, (-1,))

    @property
    def token_index_map(self) -> Any:
        """(L, k): the position of slot (token, j) in expert_token_indices, or -1."""
        return self._list("token_index_map")

    @property
    def row_tiles(self) -> Any:
        """(T+1, 2): the GEMMs' row tiles: row 0 is (count, rows per tile), then (expert, first row) of each tile."""
        return self._list("row_tiles")

    @property
    def experts_by_load(self) -> Any:
        """(E,): the experts by falling slot count, equal counts by rising id."""
        return self._list("experts_by_load")

    @property
    def dropped(self) -> Any:
        """(1,): how many slots past max_slots count as absent; None without that bound."""
        return None if self.max_slots is None else self._list("dropped")

    @property
    def num_rows(self) -> int:
        """Of buffers in expert order: max_slots, or L*k."""
        return math.prod(self.places["token_index_map"][1]) if self.max_slots is None else self.max_slots

    @property
    def num_tokens(self) -> int:
        return self.places["token_index_map"][1][0]

    @property
    def k(self) -> int:
        return self.places["token_index_map"][1][1]

    @property
    def nbytes(self) -> int:
        """Bytes that these lists hold beyond the caller's ids."""
        held: int = math.prod(self.lists.shape) + (math.prod(self.ids.shape) if self.ids_copied else 0)
        return 4 * held

    def split(self) -> tuple[list[Any], "DispatchIndices"]:
        """The arrays, and the rest, which `joined` puts together again."""
        return [self.lists, self.ids], self.joined([None, None])

    def joined(self, arrays: Sequence[Any]) -> "DispatchIndices":
        lists, ids = arrays
        return DispatchIndices(lists, ids, self.places, self.num_experts, self.ids_copied, self.max_slots)


def pair(weight: Any) -> tuple[Any, ...]:
    """One weight's array, or its (gate, up), as a tuple."""
    return tuple(weight) if isinstance(weight, (tuple, list)) else (weight,)


def one_or_pair(parts: tuple[Any, ...]) -> Any:
    """What `pair` was given."""
    return parts if len(parts) == 2 else parts[0]


def is_consumed(has_first_layer: bool, has_y_swi: bool, needs: tuple[str, ...], keep_saved: bool) -> bool:
    """Whether a backward for the gradients `needs` overwrites what was saved.

    The first layer makes room for its own gradient, y_swi for the operand of w2's; a recomputed first layer is no loss.
    The CPU overwrites nothing, but counts the same backwards, so that code that runs there runs on CUDA too.
    """
    overwrites_first_layer = has_first_layer and ("x" in needs or "w1" in needs)
    return not keep_saved and (overwrites_first_layer or (has_y_swi and "w2" in needs))


@dataclass
class SavedForBackward:
    """What `moe_forward` keeps for `moe_backward`.

    x, weights, w1, w2 and int32 ids are the caller's own arrays, not copies: what changes in them before backward
    changes the gradients. `nbytes` counts what is held beyond them.
    """

    x: Any  #: (L, d)
    weights: Any  #: (L, k)
    w1: Any  #: (E, d, 2h) or (E, d, h), or a pair of (E, d, h)
    w2: Any  #: (E, h, d)
    index: DispatchIndices
    first_layer: Any  #: (R, 2h): a then b, or (R, h) if not gated, R = L*k or max_slots; None if recomputed
    y_swi: Any  #: (R, h): activation(a) * b; None unless save="paper"
    activation: str
    save: str
    consumed: bool = False  #: a backward may have overwritten first_layer or y_swi

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + nbytes(self.first_layer) + nbytes(self.y_swi)


@dataclass
class PendingWeights:
    """What `moe_backward_data` leaves for `moe_backward_weights`, which takes it once.

    grad_out and what `saved` refers to are the caller's own arrays. On the CPU the last two are None, and the steps
    before the weight gradients run again.
    """

    grad_out: Any  #: (L, d)
    saved: SavedForBackward
    first_layer_grad: Any = None  #: (R, 2h) or (R, h), the first layer's gradient, often in the first layer's memory
    weighted_y_swi: Any = None  #: (R, h), y_swi times the router weight
    consumed: bool = False  #: the weight gradients have been taken


@dataclass(frozen=True)
class Gradients:
    """Gradients of one layer, None where not asked for. Each in the form, dtype and memory order of its input."""

    x: Any = None  #: (L, d)
    weights: Any = None  #: (L, k)
    w1: Any = None  #: as w1: one array, or a pair
    w2: Any = None  #: (E, h, d)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, f.name) for f in fields(self))
