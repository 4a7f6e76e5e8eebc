"""Sizes of a layer, and the memory of one with routed buffers; `dry_run` has the memory of this package's.

Every size is in bytes.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from moeblaze_cupy.frameworks import ITEMSIZE
from moeblaze_cupy.types import LayerOptions, is_gated

PLAIN = LayerOptions()


@dataclass(frozen=True)
class LayerShape:
    """One layer and its batch: L tokens, d model width, h expert hidden width, E experts, k experts per token."""

    L: int
    d: int
    h: int
    E: int
    k: int
    activation: str = "swiglu"
    dtype: str = "bfloat16"
    ids_are_int64: bool = False  # if True, dispatch keeps an int32 copy of the ids
    weights_dtype: str = "float32"  # dtype of the router weights
    transposed: bool = False  # memory order of both experts' weights
    bias: str | None = None  # the dtype of b1 and b2, if the layer has them; with weights on the input b2's alone
    gate_up: str = "halves"  # "interleaved": the order of w1's columns
    ragged: bool = False  # the L*k slots are pairs; tokens have any number of them
    options: LayerOptions = PLAIN  # options of slots; the other fields hold the rest
    max_slots: int | None = None  # the most slots that have a row; None: all L*k
    precision: str | None = None  # "fp8": products in e4m3 with weights that were quantised before
    fp8_wgrad: bool = False  # weight gradients in e4m3
    memory_limit: int | None = None  # bytes of a pass
    lora_rank: int | None = None  # rank of float32 factors beside both weights, which are frozen then

    def of_layer(self, save: str | None) -> LayerOptions:
        """Returns the options of the layer's calls."""
        return self.options._replace(
            activation=self.activation,
            save=save,
            gate_up=self.gate_up,
            max_slots=self.max_slots,
            precision=self.precision,
            memory_limit=self.memory_limit,
            fp8_wgrad=self.fp8_wgrad,
        )

    @property
    def slots(self) -> int:
        return self.L * self.k

    @property
    def R(self) -> int:
        """Returns the rows in expert order."""
        return self.slots if self.max_slots is None else self.max_slots

    @property
    def has_weights(self) -> bool:
        return self.options.on_input or not self.options.unreduced

    @property
    def b(self) -> int:
        """Returns the bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def g(self) -> int:
        return 2 if is_gated(self.activation) else 1


@dataclass(frozen=True)
class Term:
    """One buffer: what it holds, and its size."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class RoutedLayer:
    """Buffers of one forward and backward with routed buffers.

    A stage is a set of transient buffers that are alive together; backward peaks at its largest stage.
    """

    saved: tuple[Term, ...]  # held from forward to backward
    backward: tuple[tuple[Term, ...], ...]  # stages, beyond `saved`, with the gradients that exist by then

    @cached_property
    def saved_bytes(self) -> int:
        return total(self.saved)

    @cached_property
    def at_peak(self) -> tuple[Term, ...]:
        """Returns the largest stage of backward."""
        return max(self.backward, key=total)

    @cached_property
    def backward_peak_bytes(self) -> int:
        return total(self.at_peak)


def total(terms: tuple[Term, ...]) -> int:
    return sum(term.nbytes for term in terms)


def routed_layer(s: LayerShape) -> RoutedLayer:
    """Returns a layer with routed buffers and nothing recomputed, conventional in the paper (sections 2.1, 2.2, 5.2).

    saved: the routed copy of the tokens, every intermediate of the experts, the expert outputs, which the gradient of
    the router weights needs, and the paper's index lists in int32 (section 4.1) beside the caller's int32 ids.
    Forward has nothing beyond these; the weighted sum over the k outputs is taken to be fused.
    backward: the stages of a layer that frees each gradient after its last use. The saved buffers count as held
    throughout, as for this package's layer.
    """
    routed, hidden = s.R * s.d * s.b, s.R * s.h * s.b
    offsets = s.E + 1 + (s.L + 1 if s.ragged else 0)
    lists = 4 * (2 * s.slots + offsets + (s.slots if s.ids_are_int64 else 0))
    grad_y_swi = Term("gradient of y_swi", hidden)
    grad_first_layer = Term("gradient of the first layer", s.g * hidden)
    found = {term.name: (term,) for term in gradients(replace(s, lora_rank=None))}
    (dx,), (dw1,), (dw2,) = (found[f"gradient of {name}"] for name in ("x", "w1", "w2"))
    dweights, db1, db2 = (found.get(f"gradient of {name}", ()) for name in ("weights", "b1", "b2"))
    return RoutedLayer(
        saved=(
            Term("routed tokens", routed),
            Term("first layer", s.g * hidden),
            *((Term("act(a)", hidden),) if s.g == 2 else ()),
            Term("y_swi", hidden),
            Term("expert outputs", routed),
            Term("index lists", lists),
        ),
        backward=(
            (Term("routed output gradient", routed), grad_y_swi, *dweights, dw2),
            (grad_y_swi, grad_first_layer, *dweights, dw2),
            (grad_first_layer, Term("routed token gradient", routed), *dweights, dw2, dw1, dx, *db1, *db2),
        ),
    )


def gradients(s: LayerShape) -> tuple[Term, ...]:
    """Returns the gradients that backward returns. With factors those of the frozen weights are left out."""
    weights = (("weights", ITEMSIZE[s.weights_dtype] * s.slots),) if s.has_weights else ()
    sizes = [("x", s.L * s.d * s.b), *weights]
    if s.lora_rank is not None:
        widths = {"a1": s.d, "b1": s.g * s.h, "a2": s.h, "b2": s.d}
        sizes += [(f"lora.{name}", 4 * s.E * s.lora_rank * width) for name, width in widths.items()]
    else:
        sizes += [("w1", s.g * s.E * s.d * s.h * s.b), ("w2", s.E * s.h * s.d * s.b)]
    if s.bias and s.lora_rank is None:
        b1 = () if s.options.on_input else (("b1", ITEMSIZE[s.bias] * s.g * s.E * s.h),)
        sizes += [*b1, ("b2", ITEMSIZE[s.bias] * s.E * s.d)]
    return tuple(Term(f"gradient of {name}", nbytes) for name, nbytes in sizes)


def format_bytes(nbytes: int) -> str:
    """Returns bytes with a binary unit: 1536 -> "1.5 KiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:,.1f} {unit}"
