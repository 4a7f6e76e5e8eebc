"""The types that the layer hands back: index lists, what is kept for backward, gradients.

Shapes use the paper's letters: L tokens, k experts per token, E experts, d model width, h expert
hidden width. The fields hold arrays of the caller's own kind (NumPy, CuPy, torch, ...), but those of
SavedForBackward are NumPy or CuPy arrays where the caller's are known by DLPack alone, as JAX's are. No type is common
to all these kinds, so the fields are annotated as Any.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np


class Constant(NamedTuple):
    """A number of an activation that each layer chooses. positive: it is above 0, as limits are."""

    name: str
    default: float
    positive: bool = True


class Form(NamedTuple):
    """The formula that the name of an activation stands for: y = V(a) * M(b) with a gate, and y = V(a) without.

    kind: V and M, by their name in kernels_cu/common/activation.cuh and reference/activations.py.
    """

    gated: bool
    kind: str
    constants: tuple[Constant, ...] = ()


# The one table of activations on the host. docs/activations.md gives the formulas.
FORMS = {
    "swiglu": Form(True, "SILU"),
    "geglu": Form(True, "GELU"),
    "reglu": Form(True, "RELU"),
    "geglu_tanh": Form(True, "GELU_TANH"),
    "swiglu_clamp": Form(True, "SWIGLU_CLAMP", (Constant("limit", 10.0),)),
    "swiglu_oai": Form(True, "SWIGLU_OAI", (Constant("alpha", 1.702, positive=False), Constant("limit", 7.0))),
    "swiglu_clamp_after": Form(True, "SWIGLU_CLAMP_AFTER", (Constant("limit", 7.0),)),
    "swiglu_softcap": Form(True, "SWIGLU_SOFTCAP", (Constant("gate_cap", 4.0), Constant("up_cap", 25.0))),
    "silu": Form(False, "SILU"),
    "gelu": Form(False, "GELU"),
    "relu": Form(False, "RELU"),
    "gelu_tanh": Form(False, "GELU_TANH"),
    "relu2": Form(False, "RELU2"),
}

SAVE_POLICIES = ("minimal", "fp8", "paper", "recompute", None)
GATED_ACTIVATIONS = tuple(name for name, form in FORMS.items() if form.gated)
PLAIN_ACTIVATIONS = tuple(name for name, form in FORMS.items() if not form.gated)
ACTIVATIONS = GATED_ACTIVATIONS + PLAIN_ACTIVATIONS
GATE_UP = ("halves", "interleaved")
CAPACITY_ORDERS = ("position", "choice", "weights", "priority")
ROUNDINGS = ("up", "down", "nearest", "balance")
SCORES = ("softmax", "sigmoid", "sqrt_softplus", "identity", "relu")
SHARES = ("softmax", "sigmoid", "sqrt_softplus")  # scores that a token's shares of all experts can be made of
SUMS = (*SHARES, "z", "entropy")
GRADIENTS = ("x", "weights", "w1", "w2")
FIRST_LAYER_GRADIENTS = frozenset(("x", "w1", "b1", "lora"))  # they come from the gradient of the first layer
Y_SWI_GRADIENTS = frozenset(("w2", "lora"))  # they come from y_swi times the router weights
WEIGHTS_ON = ("output", "input")
WEIGHT_FORMATS = ("mxfp4", "nf4", "e4m3", "int8")
IDENTITY = -2  # entry of token_index_map for a slot of an identity expert
BIASES = ("b1", "b2")
FACTORS = ("a1", "b1", "a2", "b2")  # fields of Lora


class Activation:
    """An activation with its constants, for `activation=` of the layer: Activation("swiglu_oai", limit=5.0).

    name: one of ACTIVATIONS. constants: numbers by name, for those that differ from the defaults:
    swiglu_clamp and swiglu_clamp_after have limit, swiglu_oai has alpha and limit, swiglu_softcap has gate_cap and
    up_cap. Layers whose activations differ in constants alone share their compiled kernels.
    Activations are immutable and hashable; two with the same name and constants are equal.
    Raises ValueError for an unknown name or constant, one that is not finite in float32, and a limit or cap that is
    not above 0, and TypeError for one that is no number.
    """

    __slots__ = ("_values", "name")
    name: str
    _values: tuple[float, ...]

    def __init__(self, name: str, **constants: float) -> None:
        if not isinstance(name, str) or name not in FORMS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"Activation: name: expected one of {names}, got {name!r}; docs/activations.md says how to add one"
            )
        known = FORMS[name].constants
        for given in constants:
            if given not in [constant.name for constant in known]:
                wanted = " or ".join(constant.name for constant in known) or "no constants"
                got = f"{given}={constants[given]!r}"
                raise ValueError(f"Activation: {given}: expected {wanted} for {name!r}, got {got}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_values", tuple(_number(c, constants.get(c.name, c.default)) for c in known))

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def constants(self) -> dict[str, float]:
        """Returns the constants by name, in the order of the kernels' parameters."""
        return {constant.name: value for constant, value in zip(self.form.constants, self._values, strict=True)}

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Activation: {name}: cannot be assigned, as activations are immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Activation: {name}: cannot be deleted, as activations are immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Activation) and (self.name, self._values) == (other.name, other._values)

    def __hash__(self) -> int:
        return hash((self.name, self._values))

    def __reduce__(self) -> tuple[Any, ...]:  # copy and pickle need it
        return _activation, (self.name, self.constants)

    def __repr__(self) -> str:
        return f"Activation({', '.join([repr(self.name), *(f'{n}={v}' for n, v in self.constants.items())])})"


def _activation(name: str, constants: dict[str, float]) -> Activation:
    return Activation(name, **constants)


def _number(constant: Constant, value: Any) -> float:
    """Returns the value as a float. Kernels take it as float32: there it must be finite, and above 0 where needed."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"Activation: {constant.name}: expected a number, got {value!r}")
    single = np.finfo(np.float32)
    is_finite = -float(single.max) <= value <= float(single.max)
    if not is_finite or (constant.positive and value < float(single.tiny)):
        wanted = "a finite number above 0" if constant.positive else "a finite number"
        raise ValueError(f"Activation: {constant.name}: expected {wanted}, in float32, got {value!r}")
    return float(value)


@functools.cache
def _named(name: str) -> Activation:
    return Activation(name)


def activation_of(activation: str | Activation) -> Activation:
    """Returns the activation; one given by its name alone has the default constants."""
    return activation if isinstance(activation, Activation) else _named(activation)


def is_gated(activation: str | Activation) -> bool:
    """Returns True where the first layer has a gate and an up half: y = V(x w_gate) * M(x w_up)."""
    return (activation.name if isinstance(activation, Activation) else activation) in GATED_ACTIVATIONS


class Lora(NamedTuple):
    """Low-rank factors beside the experts' weights: expert e has w1[e] + scale1 (b1[e] a1[e])^T, and w2[e] the same.

    Either pair may be None. The pairs may have different ranks r, from 1 to 256. Factors have x's dtype or float32, and
    any memory order; the kernels read them rounded to x's dtype. An a1 or a2 without the dimension E is shared by all
    experts. In `Gradients` the scales are None.
    """

    a1: Any = None  #: (E, r, d) or (r, d)
    b1: Any = None  #: (E, 2h, r), or (E, h, r) without a gate, rows in the order of w1's columns
    a2: Any = None  #: (E, r, h) or (r, h)
    b2: Any = None  #: (E, d, r)
    scale1: Any = 1.0
    scale2: Any = 1.0

    @property
    def factors(self) -> tuple[Any, Any, Any, Any]:
        """Returns all but the scales."""
        return self.a1, self.b1, self.a2, self.b2

    @property
    def scales(self) -> tuple[Any, Any]:
        return self.scale1, self.scale2

    def with_factors(self, factors: Iterable[Any]) -> "Lora":
        """Returns the same scales with these factors, in the order of `factors`."""
        return self._replace(**dict(zip(FACTORS, factors, strict=True)))


class LoraRows(NamedTuple):
    """The products of the experts' rows with the first factors, times the scales, in expert order; None without one."""

    u1: Any = None  #: (R, r): of x and a1
    u2: Any = None  #: (R, r): of y = V(a) * M(b) and a2


NO_LORA_ROWS = LoraRows()


class LayerOptions(NamedTuple):
    """The options of a layer, beside its arrays; see `moeblaze_cupy.moe_forward`. It is part of a record's key."""

    activation: str | Activation = "swiglu"
    save: str | None = "minimal"
    gate_up: str = "halves"
    weights_on: str = "output"
    unreduced: bool = False
    identity_experts: int = 0
    max_slots: int | None = None
    precision: str | None = None
    memory_limit: int | None = None  #: bytes of a pass; see `moeblaze_cupy.layer.chunks`
    fp8_wgrad: bool = False
    tf32: bool = False

    @property
    def gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def halves(self) -> int:
        """Returns 2 where the first layer has gate and up columns, else 1."""
        return 1 + is_gated(self.activation)

    @property
    def interleaved(self) -> bool:
        return self.gate_up == "interleaved"

    @property
    def on_input(self) -> bool:
        """Returns True if the router weights scale the experts' input."""
        return self.weights_on == "input"


def nbytes(array: Any) -> int:
    """Returns the bytes of one array's elements, 0 for None. It works for NumPy, CuPy and torch alike."""
    return 0 if array is None else int(array.nbytes)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes by the array's method, or by a function of its namespace, all that the array API standard asks for."""
    if hasattr(array, "reshape"):
        return array.reshape(shape)
    return array.__array_namespace__().reshape(array, shape)


@dataclass(eq=False)  # not frozen, which would take three times as long to make
class DispatchIndices:
    """The index lists of the paper's section 4.1, all int32, in the caller's kind of array.

    All but `token_expert_indices` lie in one buffer, `lists`. Each list is a view of it, made when it is asked for.
    An id < 0 or >= E is "no expert in this slot": such slots are not listed, and their `token_index_map` entry is -1,
    or -2 where a layer has identity experts and the id is one of theirs.
    With `token_offsets` the slots are P pairs of a token and an expert, in the order of tokens: read P for L*k.
    """

    lists: Any  #: (n,) int32
    ids: Any  #: (L, k) or (P,) int32: the caller's, or what dispatch made of int64 ids
    places: Mapping[str, tuple[int, tuple[int, ...]]]  #: first element and shape of each list in `lists`
    num_experts: int
    ids_copied: bool = False  #: `ids` is not the caller's array (that was int64)
    max_slots: int | None = None  #: bound of the slots that have a row, if there is one

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
        """(L, k) or (P,): the position of a slot in expert_token_indices; -1: no expert, -2: an identity expert."""
        return self._list("token_index_map")

    @property
    def token_offsets(self) -> Any:
        """(L+1,): where each token's pairs begin, within 0 .. P and never falling; None with k slots per token."""
        return self._list("token_offsets") if self.is_ragged else None

    @property
    def row_tiles(self) -> Any:
        """(T+1, 2): the GEMMs' row tiles: row 0 is (count, rows per tile), then (expert, first row) of each tile."""
        return self._list("row_tiles")

    @property
    def experts_by_load(self) -> Any:
        """(E,): the experts by falling slot count, equal counts by rising id."""
        return self._list("experts_by_load")

    @property
    def is_ragged(self) -> bool:
        """Returns True if tokens have any number of slots each, as `token_offsets` says."""
        return "token_offsets" in self.places

    @property
    def dropped(self) -> Any:
        """(1,): how many slots past max_slots count as absent; None without that bound."""
        return None if self.max_slots is None else self._list("dropped")

    @property
    def num_rows(self) -> int:
        """Returns the rows of buffers in expert order: max_slots, or L*k."""
        return self.num_slots if self.max_slots is None else self.max_slots

    @property
    def num_tokens(self) -> int:
        return self.places["token_offsets"][1][0] - 1 if self.is_ragged else self.places["token_index_map"][1][0]

    @property
    def num_slots(self) -> int:
        return math.prod(self.places["token_index_map"][1])

    @property
    def k(self) -> int | None:
        """Returns k, or None where tokens have any number of slots."""
        return None if self.is_ragged else self.places["token_index_map"][1][1]

    @property
    def nbytes(self) -> int:
        """Returns the bytes that these lists hold beyond the caller's ids."""
        held: int = math.prod(self.lists.shape) + (math.prod(self.ids.shape) if self.ids_copied else 0)
        return 4 * held

    def split(self) -> tuple[list[Any], "DispatchIndices"]:
        """Returns the arrays, and the rest, which `joined` puts together again."""
        return [self.lists, self.ids], self.joined([None, None])

    def joined(self, arrays: Sequence[Any]) -> "DispatchIndices":
        lists, ids = arrays
        return DispatchIndices(lists, ids, self.places, self.num_experts, self.ids_copied, self.max_slots)


@dataclass(eq=False)
class ChunkedIndices(DispatchIndices):
    """The index lists of chunks of tokens, one chunk after the other in `lists`; the last one may have fewer tokens.

    No list is that of all tokens, so none can be asked for: RuntimeError says so.
    """

    chunk_tokens: int = 0  #: tokens of a chunk

    def _list(self, name: str) -> Any:
        expected = f"{name} of a layer without memory_limit, or one that needs no chunks"
        raise RuntimeError(f"saved.index: expected {expected}, got lists of chunks of {self.chunk_tokens} tokens")

    def joined(self, arrays: Sequence[Any]) -> "ChunkedIndices":
        lists, ids = arrays
        return ChunkedIndices(lists, ids, self.places, self.num_experts, chunk_tokens=self.chunk_tokens)


def pair(weight: Any) -> tuple[Any, ...]:
    """Returns one weight's array, or its (gate, up), as a tuple."""
    is_pair = isinstance(weight, (tuple, list)) and not isinstance(weight, QuantizedWeight)
    return tuple(weight) if is_pair else (weight,)


def one_or_pair(parts: Sequence[Any]) -> Any:
    """Undoes `pair`: returns the one array, or the tuple (gate, up)."""
    return tuple(parts) if len(parts) == 2 else parts[0]


def gate_and_up(weight: Any) -> tuple[Any, Any]:
    """Returns one weight's array and None, or its (gate, up)."""
    return (*weight, None)[:2] if isinstance(weight, (tuple, list)) else (weight, None)


def joined(gate: Any, up: Any) -> Any:
    """Undoes `gate_and_up`: returns gate alone if up is None, else (gate, up)."""
    return gate if up is None else (gate, up)


def present(*values: Any) -> tuple[Any, ...]:
    """Returns the values that are not None."""
    return tuple(value for value in values if value is not None)


class LayerArrays(NamedTuple):
    """The arrays of a layer, in the one order that they have everywhere; also their layouts, or their addresses.

    An absent array is None, and its address 0. w1 and b1 are one array, which is the gate's, or a pair (gate, up).
    """

    x: Any
    ids: Any
    router_weights: Any
    w1_gate: Any
    w1_up: Any
    w2: Any
    b1_gate: Any = None
    b1_up: Any = None
    b2: Any = None
    token_offsets: Any = None

    @property
    def w1(self) -> Any:
        """Returns one array, or a pair."""
        return joined(self.w1_gate, self.w1_up)

    @property
    def b1(self) -> Any:
        """Returns one array, a pair, or None."""
        return joined(self.b1_gate, self.b1_up)

    @property
    def w1_parts(self) -> tuple[Any, ...]:
        return present(self.w1_gate, self.w1_up)

    @property
    def b1_parts(self) -> tuple[Any, ...]:
        return present(self.b1_gate, self.b1_up)

    @property
    def b2_parts(self) -> tuple[Any, ...]:
        return present(self.b2)

    @property
    def frozen(self) -> "dict[str, QuantizedWeight]":
        """Returns the weights in four or eight bits, by the names that callers know them by."""
        if not (isinstance(self.w1_gate, QuantizedWeight) or isinstance(self.w2, QuantizedWeight)):
            return {}  # of most calls
        found = {"w1": self.w1_gate, "w2": self.w2}
        return {name: weight for name, weight in found.items() if isinstance(weight, QuantizedWeight)}

    def with_weights(self, weights: Mapping[str, Any]) -> "LayerArrays":
        """Returns the layer with these in the place of its weights. weights: by the names of `frozen`."""
        return self._replace(**{"w1_gate" if name == "w1" else name: array for name, array in weights.items()})

    def arguments(self) -> tuple[str, ...]:
        """Returns the names that callers know the arrays by."""
        w1, b1 = ("w1" if self.w1_up is None else "w1[0]"), ("b1" if self.b1_up is None else "b1[0]")
        return "x", "ids", "weights", w1, "w1[1]", "w2", b1, "b1[1]", "b2", "token_offsets"


# This gives what LayerArrays(*values) gives, without a frame of Python: every call makes a few.
layer_arrays: Callable[[Sequence[Any]], LayerArrays] = functools.partial(tuple.__new__, LayerArrays)


class BackwardArrays(NamedTuple):
    """The arrays that a backward reads; also their layouts, or their addresses. `layer` has no ids and offsets."""

    grad_out: Any
    layer: LayerArrays
    lists: Any  #: the buffer of the index lists
    first_layer: Any  #: None if it was not kept
    y_swi: Any

    @classmethod
    def of(cls, values: Sequence[Any]) -> "BackwardArrays":
        """Returns these arrays. values: one for each array, in order, those of the layer among them."""
        return cls(values[0], layer_arrays(values[1:-3]), values[-3], values[-2], values[-1])


class BackwardOptions(NamedTuple):
    """The options of a backward, beside its arrays; see `moeblaze_cupy.moe_backward`."""

    needs: tuple[str, ...]
    keep_saved: bool = False
    defers_weights: bool = False  #: the gradients of w1 and w2 are left to `moe_backward_weights`
    lora_in_float32: bool = False  #: the gradients of low-rank factors are in float32, whatever these are in

    @property
    def first_layer(self) -> bool:
        """Returns True if the gradient of the first layer is needed."""
        return not FIRST_LAYER_GRADIENTS.isdisjoint(self.needs)

    @property
    def weighted_y_swi(self) -> bool:
        """Returns True if y_swi times the router weights is needed."""
        return not Y_SWI_GRADIENTS.isdisjoint(self.needs)


def is_consumed(has_first_layer: bool, has_y_swi: bool, needs: tuple[str, ...], keep_saved: bool) -> bool:
    """Returns True if a backward for the gradients `needs` overwrites what was saved.

    The first layer makes room for its own gradient, y_swi for the operand of w2's; a recomputed first layer is no loss.
    has_first_layer: False also for one in e4m3, where its gradient has no room.
    The CPU overwrites nothing, but counts the same backwards, so that code that runs there runs on CUDA too.
    """
    overwrites_first_layer = has_first_layer and not FIRST_LAYER_GRADIENTS.isdisjoint(needs)
    return not keep_saved and (overwrites_first_layer or (has_y_swi and not Y_SWI_GRADIENTS.isdisjoint(needs)))


@dataclass(eq=False)
class Fp8Weights:
    """The weights of a layer in e4m3, in both orientations, as `quantize_weights` makes them.

    A product in e4m3 reads its right operand along the dimension that it sums over, so each weight is here twice, with
    the same numbers. All arrays are C-contiguous. E4m3 is uint8 in NumPy and CuPy, float8_e4m3fn in torch; a weight is
    its e4m3 number times the scale of its expert, and of its half of w1. Columns of w1 keep the order of the layer's
    w1, a pair (gate, up) lies side by side. With gate_up="interleaved" both halves have the same scale.
    """

    w1: Any  #: (E, d, 2h), or (E, d, h) without a gate: for up_bwd, which sums over h
    w1_transposed: Any  #: (E, 2h, d) or (E, h, d): for up_fwd, which sums over d
    w1_scales: Any  #: (E, 2) float32, of gate and up, or (E, 1)
    w2: Any  #: (E, h, d): for down_bwd, which sums over d
    w2_transposed: Any  #: (E, d, h): for down_fwd, which sums over h
    w2_scales: Any  #: (E, 1) float32
    gate_up: str = "halves"  #: order of w1's columns in gated layers
    amax: Any = (
        None  #: (E, 3), or (E, 2) without a gate, float32: memory of `quantize_weights`, of no meaning to others
    )

    @property
    def nbytes(self) -> int:
        return sum(nbytes(value) for value in vars(self).values() if not isinstance(value, str))


class Fp8Rows(NamedTuple):
    """Rows of x, or of the gradient of out, in e4m3: a number is its e4m3 number times the scale of its row."""

    values: Any  #: (L, d) uint8, of which each byte holds e4m3
    scales: Any  #: (L,) float32

    def part(self, of: slice) -> "Fp8Rows":
        """Returns some of the rows."""
        return Fp8Rows(self.values[of], self.scales[of])


class NestedScales(NamedTuple):
    """The meaning of uint8 scales of "nf4", as in bitsandbytes: scale = code[byte] * absmax of its block + offset."""

    code: Any  #: (256,) float32
    absmax: Any  #: (E, N * K / 16384) float32, one for each 256 scales of an expert
    offset: Any  #: (), or (1,), float32


class QuantizedWeight(NamedTuple):
    """A frozen weight in four or eight bits, which the layer takes as w1 or w2; `quantize_experts` makes it.

    An expert's weight is N rows of K elements, K being what the layer's product sums over: (N, K) is (2h, d) of w1, or
    (h, d) without a gate, and (d, h) of w2. The layer reads it as its transposed view (K, N), so rows keep the order of
    the layer's columns. All parts are C-contiguous, and E is their first dimension: a slice of experts has slices of
    the parts. On CUDA they begin at multiples of 16 bytes.

    ======== ================================ ============================================ ===================
    format   data                             scales                                       sizes
    ======== ================================ ============================================ ===================
    "mxfp4"  (E, N, K/2) uint8, or            (E, N, K/32) uint8 of e8m0                   K % 32 == 0
             (E, N, K/32, 16), the low nibble
             first
    "nf4"    (E, N K / 2) uint8, the high     (E, N K / 64) float32; or uint8 with         N K % 64 == 0, or
             nibble first                     `nested`                                     16384 with `nested`
    "e4m3"   (E, N, K) e4m3                   (E, ceil(N / rows), ceil(K / columns)) of    K and columns are
                                              `block` in float32, or uint8 of e8m0         multiples of 8
    "int8"   (E, N, K) int8                   (E, N, 1) float32                            K % 8 == 0
    ======== ================================ ============================================ ===================

    A weight is code * scale, rounded once to `dtype`. The code of "mxfp4" is a number of e2m1, that of "nf4" an entry
    of its table. A scale s of e8m0 is 2^(s - 127), and 255 is NaN.
    """

    data: Any
    scales: Any
    format: str
    shape: tuple[int, int, int]  #: (E, K, N), that of the weight in the layer
    block: tuple[int, int] | None = None  #: rows and columns that share a scale of "e4m3"
    nested: NestedScales | None = None
    dtype: str = "bfloat16"  #: that of x and of the decoded weight: "bfloat16", or "float32" on the CPU

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, *(self.nested or ()))
        return sum(map(nbytes, parts))


@dataclass(eq=False, slots=True)
class SavedForBackward:
    """The arrays and options that `moe_forward` keeps for `moe_backward`.

    The arrays are the caller's own, not copies: what changes in them before backward changes the gradients. `nbytes`
    counts what is held beyond them.
    """

    arrays: LayerArrays  #: without ids and token_offsets, for which `index` stands
    options: LayerOptions
    index: DispatchIndices
    #: (R, 2h): a, b in the order of w1's columns, or (R, h) if not gated; None if recomputed; with save="fp8" the bytes
    #: (uint8) of `launch_config.saved_fp8`
    first_layer: Any
    y_swi: Any  #: (R, h), R being L*k or max_slots: V(a) * M(b); None unless save="paper"
    consumed: bool = False  #: a backward may have overwritten first_layer or y_swi
    fp8_weights: Fp8Weights | None = None  #: the weights that precision="fp8" multiplies with
    x_scales: Any = None  #: (L,) float32 where x is in e4m3, see `Fp8Rows`; else None
    lora: Lora | None = None  #: the caller's factors
    lora_rows: LoraRows = NO_LORA_ROWS  #: none of a recomputed first layer
    decoded_by: int = 0  #: the number of this forward where it has decoded `QuantizedWeight`; else 0

    @property
    def x(self) -> Any:
        """(L, d)."""
        return self.arrays.x

    @property
    def weights(self) -> Any:
        """(L, k) or (P,); None if the output is unreduced and no weight is on the input."""
        return self.arrays.router_weights

    @property
    def w1(self) -> Any:
        """(E, d, 2h) or (E, d, h), or a pair of (E, d, h); or `QuantizedWeight`."""
        return self.arrays.w1

    @property
    def w2(self) -> Any:
        """(E, h, d), or `QuantizedWeight`."""
        return self.arrays.w2

    @property
    def b1(self) -> Any:
        """(E, 2h) or (E, h), or a pair of (E, h); None without a bias."""
        return self.arrays.b1

    @property
    def b2(self) -> Any:
        """(E, d); None without a bias."""
        return self.arrays.b2

    # Names of 0.1, which stay for one release.
    activation = property(lambda self: self.options.activation)
    save = property(lambda self: self.options.save)
    gate_up = property(lambda self: self.options.gate_up)
    precision = property(lambda self: self.options.precision)

    @property
    def is_overwritable(self) -> bool:
        """Returns True if backward may put the first layer's gradient in its place."""
        return self.first_layer is not None and self.options.save != "fp8"

    @property
    def gradients(self) -> tuple[str, ...]:
        """Returns the names of what this layer has gradients of; "weights" among them always."""
        frozen = self.arrays.frozen
        gradients = tuple(name for name in GRADIENTS if name not in frozen) if frozen else GRADIENTS
        if self.arrays.b1_gate is None and self.arrays.b2 is None and self.lora is None:
            return gradients
        return (*gradients, *(name for name in (*BIASES, "lora") if getattr(self, name) is not None))

    @property
    def default_gradients(self) -> tuple[str, ...]:
        """Returns the names that a backward computes unless it is told: with factors, nothing of what they adapt."""
        return self.gradients if self.lora is None else ("x", "weights", "lora")

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + sum(map(nbytes, (self.first_layer, self.y_swi, *self.lora_rows)))


@dataclass(eq=False)
class PendingWeights:
    """The arrays that `moe_backward_data` leaves for `moe_backward_weights`, which takes them once.

    grad_out and what `saved` refers to are the caller's own arrays. On the CPU the last two are None, and the steps
    before the weight gradients run again.
    """

    grad_out: Any  #: (L, d), or a row per slot if the output is unreduced
    saved: SavedForBackward
    first_layer_grad: Any = None  #: (R, 2h) or (R, h), the first layer's gradient, often in the first layer's memory
    weighted_y_swi: Any = None  #: (R, h), y_swi times the router weight, if that is on the output
    consumed: bool = False  #: the weight gradients have been taken
    grad_scales: Any = None  #: (L,) float32 where grad_out is in e4m3, see `Fp8Rows`; else None


@dataclass(frozen=True)
class RouterSums:
    """Sums over the tokens of each of S sequences in float32 (float64 for such logits); None where not asked for."""

    score_sums: Any = None  #: (S, E): of q, each token's scores as shares of all experts
    z_sums: Any = None  #: (S,): of the squared logarithm of the sum of exp(logits)
    entropy_sums: Any = None  #: (S,): of the entropy of softmax(logits)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, f.name) for f in fields(self))


@dataclass(eq=False)
class Gradients:
    """Gradients of one layer, None where not asked for. Each has the form, dtype and memory order of its input.

    Iteration gives x, weights, w1 and w2; the gradients of biases have names alone.
    """

    x: Any = None  #: (L, d)
    weights: Any = None  #: (L, k) or (P,)
    w1: Any = None  #: like w1: one array, or a pair
    w2: Any = None  #: (E, h, d)
    b1: Any = None  #: like b1: one array, or a pair
    b2: Any = None  #: (E, d)
    lora: Lora | None = None  #: gradients of the factors, in their shapes and dtypes, C-contiguous

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in GRADIENTS)
