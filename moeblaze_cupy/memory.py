"""Memory of one MoE layer on CUDA, by formula: with index lists only (this package), and with routed buffers.

Letters: L tokens, k experts per token, E experts, d model width, h expert hidden width; b bytes per element, g = 2 for
gated activations, else 1. L*k is the number of slots. R is the number of rows in expert order, L*k or max_slots. Every
size is in bytes.

Each term carries its formula as text, written so that Python can evaluate it over these letters, `min`, `max` and
`ceil`; the tests do, so the text and the number cannot drift apart.

The buffers are those that `ops.experts` and `ops.backward` allocate. Left out is what never makes a peak: what dispatch
has for itself, and the router weights by row of weights_on="input" in forward, which are free again before the output
is allocated, and the 4-byte tile counter of up_fwd and down_bwd.
"""

from dataclasses import dataclass
from functools import cached_property

from moeblaze_cupy import gemm_config, launch_config
from moeblaze_cupy.arrays import ITEMSIZE
from moeblaze_cupy.structures import PLAIN_SLOTS, SlotOptions, is_gated

INDEX_BYTES = 4  # the index lists are int32
POLICIES = ("recompute", "fp8", "minimal", "paper", None)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer and its batch, in the letters of the module."""

    L: int
    d: int
    h: int
    E: int
    k: int
    activation: str = "swiglu"
    dtype: str = "bfloat16"
    ids_are_int64: bool = False  # then dispatch keeps an int32 copy of the ids
    tier: str = "sm90"  # "sm80": the portable kernels, which also serve what Hopper's do not take
    transposed: bool = False  # the memory order of the experts' weights, of both
    bias: str | None = None  # the dtype of b1 and b2, if the layer has them; of b2 alone with weights on the input
    gate_up: str = "halves"  # "interleaved": the order of w1's columns
    ragged: bool = False  # the L*k slots are pairs, of tokens with any number of them
    options: SlotOptions = PLAIN_SLOTS
    max_slots: int | None = None  # of slots that have a row; None: all L*k
    precision: str | None = None  # "fp8": products in e4m3, of weights that were quantised before

    @property
    def slots(self) -> int:
        return self.L * self.k

    @property
    def R(self) -> int:
        return self.slots if self.max_slots is None else self.max_slots

    @property
    def rows(self) -> str:
        """R in a formula's text."""
        return "L*k" if self.max_slots is None else "R"

    @property
    def has_weights(self) -> bool:
        return self.options.on_input or not self.options.unreduced

    @property
    def b(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def g(self) -> int:
        return 2 if is_gated(self.activation) else 1

    @property
    def on_hopper(self) -> bool:
        """Whether kernels are Hopper's, which take 16-bit elements, and d and h that are multiples of 8."""
        return self.tier == "sm90" and self.b == 2 and self.d % 8 == self.h % 8 == 0


@dataclass(frozen=True)
class Term:
    """One buffer: what it holds, its size as a formula over the module's letters, its size in bytes."""

    name: str
    formula: str
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Buffers of one forward and backward.

    A stage is a set of transient buffers that are alive together; a pass peaks at its largest stage.
    """

    saved: tuple[Term, ...]  # held from forward to backward, x included
    forward: tuple[tuple[Term, ...], ...]  # stages, beyond `saved` and the output
    backward: tuple[tuple[Term, ...], ...]  # stages, beyond `saved`, with the gradients that exist by then

    @cached_property
    def saved_bytes(self) -> int:
        return total(self.saved)

    @cached_property
    def forward_peak_bytes(self) -> int:
        return max(map(total, self.forward))

    @cached_property
    def backward_peak_bytes(self) -> int:
        return max(map(total, self.backward), default=0)


def total(terms: tuple[Term, ...]) -> int:
    return sum(term.nbytes for term in terms)


def _index_lists(s: LayerShape) -> tuple[Term, ...]:
    """The paper's section 4.1 lists that are new memory: the caller's int32 ids serve as token_expert_indices."""
    lists: tuple[Term, ...] = (
        Term("expert_token_indices", "4*L*k", INDEX_BYTES * s.slots),
        Term("token_index_map", "4*L*k", INDEX_BYTES * s.slots),
        Term("expert_token_offsets", "4*(E + 1)", INDEX_BYTES * (s.E + 1)),
    )
    if s.ragged:
        lists = (*lists, Term("token_offsets", "4*(L + 1)", INDEX_BYTES * (s.L + 1)))
    return (*lists, Term("int32 copy of the ids", "4*L*k", INDEX_BYTES * s.slots)) if s.ids_are_int64 else lists


def _first_layer(s: LayerShape, name: str) -> Term:
    return Term(name, f"g*{s.rows}*h*b", s.g * s.R * s.h * s.b)


def _first_layer_in_fp8(s: LayerShape, name: str) -> Term:
    formula = f"(g*{s.rows}*h + 15)//16*16 + 4*g*{s.rows}*ceil(h/{launch_config.GROUP_COLUMNS})"
    return Term(name, formula, launch_config.saved_fp8(s.R, s.h, s.g).nbytes)


def _per_slot_in_fp8(s: LayerShape, name: str, halves: int) -> Term:
    """E4m3 and its scales, of y_swi or, with g halves, of the first layer's gradient."""
    width, g = launch_config.GROUP_COLUMNS, "" if name.startswith("y_swi") else "g*"
    nbytes = s.R * halves * (s.h + 4 * launch_config.ceil_div(s.h, width))
    return Term(name, f"{g}{s.rows}*(h + 4*ceil(h/{width}))", nbytes)


def _grad_out_in_fp8(s: LayerShape) -> Term:
    rows, letters = (s.slots, "L*k") if s.options.unreduced else (s.L, "L")
    return Term("gradient of out in e4m3", f"{letters}*(d + 4)", rows * (s.d + 4))


def _per_slot(s: LayerShape, name: str) -> Term:
    return Term(name, f"{s.rows}*h*b", s.R * s.h * s.b)


def _routed(s: LayerShape, name: str) -> Term:
    return Term(name, f"{s.rows}*d*b", s.R * s.d * s.b)


def _slots_by_row(s: LayerShape) -> Term:
    return Term("slots by row", "4*L*k", INDEX_BYTES * s.slots)


def _panels(s: LayerShape, overwrites: bool, per_slot: bool = False) -> tuple[Term, ...]:
    """Expert outputs, or token gradients, pass through a buffer of one panel's columns.

    On Hopper k = 1 needs none, nor a panel that takes the place of y_swi, which `overwrites` says is no longer
    needed. per_slot: rows are not summed; on Hopper they go to their slots by a list.
    """
    tier = "sm90" if s.on_hopper else "sm80"
    spare_columns = s.h if overwrites else 0
    k = 1 if per_slot else None if s.ragged else s.k
    has_none = gemm_config.rows_go_to_tokens(k, tier) and not s.options.identity_experts
    if has_none and per_slot:
        return (_slots_by_row(s),)
    if has_none or gemm_config.panel_takes_left_operands_rows(s.d, spare_columns, tier):
        return ()
    width = gemm_config.panels(s.d, s.R, tier)[0][1]
    return (Term("one panel of the routed rows", f"{s.rows}*{width}*b", s.R * width * s.b),)


def _square_tiles(s: LayerShape, up_fwd: bool, per_slot: bool = False) -> tuple[Term, ...]:
    """The row tiles of products in square tiles: of the one that is summed over slots, of up_fwd if it is launched."""
    k = 1 if per_slot else None if s.ragged else s.k
    to_tokens = gemm_config.rows_go_to_tokens(k, "sm90") and not s.options.identity_experts
    sums = () if to_tokens else (tuple(width for _, width in gemm_config.panels(s.d, s.R, "sm90")),)
    pairs = ((2 * s.h,),) if up_fwd and s.g == 2 and s.gate_up == "interleaved" else ()
    if not s.on_hopper or s.precision == "fp8" or s.slots == 0:
        return ()
    if not any(gemm_config.square_product(widths, s.R, s.E) for widths in (*sums, *pairs)):
        return ()
    height = launch_config.SQUARE_TILE
    number = launch_config.max_row_tiles(s.R, s.E, height=height) + 1
    return (Term("square row tiles", f"8*({s.rows}//{height} + min(E, {s.rows}) + 1)", 2 * INDEX_BYTES * number),)


def _split_k_sums(s: LayerShape, name: str, rows: int, columns: int, halves: int) -> tuple[Term, ...]:
    """The float32 sums of split-K, by which a weight gradient of few tiles fills Hopper's multiprocessors."""
    if not s.on_hopper or s.slots == 0:
        return ()
    M, N = (columns, rows) if s.transposed else (rows, columns)
    tiles = gemm_config.wgrad_tiles(M, N, s.E * halves)
    splits = gemm_config.split_k(tiles, s.R, s.E, launch_config.H200)
    formula = f"4*{splits}*{'g*' if halves * rows * columns == 2 * s.d * s.h else ''}E*d*h"
    sums = Term(f"split-K sums of {name}", formula, 4 * splits * s.E * halves * M * N)
    return () if splits == 1 else (sums,)


def layer(s: LayerShape, save: str | None) -> Plan:
    """This package's layer under a save policy; None is inference, which keeps nothing.

    saved: x and the index lists, with the GEMMs' row tiles and order of experts; "minimal" adds the first layer
    (a, b), "fp8" these in e4m3, "paper" also y_swi = act(a) * b.
    forward: y_swi, unless it is saved, and a panel of expert outputs. Portable kernels make the first layer in its own
    dtype before it becomes e4m3.
    backward: the first layer's gradient takes the place of the first layer, which "recompute" has to write again. With
    "fp8" it is new memory. The weighted y_swi, for the gradient of w2, takes the place of y_swi under "paper". It is
    freed before the gradients of x and w1 are allocated. Split-K of a weight gradient is for an H200's multiprocessors.
    precision="fp8": y_swi is in e4m3, and so are, beside them, the gradients of out and of the first layer.
    max_slots bounds every buffer in expert order but the index lists; their row tiles are for L*k slots too.
    Gradients that backward is told to accumulate in a caller's buffers take no memory: subtract them, not their parts.
    With unreduced=True, and no other option, the output and its gradient have a row of d for each of the L*k slots.
    """
    tiles = Term(
        "GEMM row tiles",
        "8*(L*k//128 + min(E, L*k) + 1)",
        2 * INDEX_BYTES * (launch_config.max_row_tiles(s.slots, s.E) + 1),
    )
    order = Term("experts_by_load", "4*E", INDEX_BYTES * s.E)
    dropped = () if s.max_slots is None else (Term("dropped", "4", INDEX_BYTES),)
    index = (*_index_lists(s), tiles, order, *dropped)
    first_layer = (_first_layer(s, "first layer a, b" if s.g == 2 else "first layer a"),)
    y_swi = (_per_slot(s, "y_swi = act(a) * b" if s.g == 2 else "y_swi = act(a)"),)
    kept_first_layer = first_layer if save in ("minimal", "paper") else ()
    if save == "fp8":
        kept_first_layer = (_first_layer_in_fp8(s, f"{first_layer[0].name} in e4m3"),)
    kept_y_swi = y_swi if save == "paper" else ()
    new_y_swi = () if kept_y_swi else y_swi
    in_fp8 = s.precision == "fp8"
    new_y_swi = (_per_slot_in_fp8(s, "y_swi in e4m3", 1),) if in_fp8 else new_y_swi
    grad_out = (_grad_out_in_fp8(s),) if in_fp8 else ()
    first_layer_grad = (_per_slot_in_fp8(s, "gradient of the first layer in e4m3", s.g),) if in_fp8 else ()

    tiles_of_forward = _square_tiles(s, save != "fp8", s.options.unreduced)
    tiles_of_backward = _square_tiles(s, not kept_first_layer and save != "fp8")
    if save is None:
        panels = _panels(s, not in_fp8, s.options.unreduced)
        return Plan(saved=(), forward=((*index, *tiles_of_forward, *new_y_swi, *panels),), backward=())
    columns = 256 if s.on_hopper else 128
    parts, formula = gemm_config.column_tiles(s.h, columns), f"4*{s.rows}*ceil(h/{columns})"
    if s.bias and not s.options.on_input:
        width = launch_config.BIAS_COLUMNS
        parts += gemm_config.column_tiles(s.d, width)
        formula = f"4*{s.rows}*(ceil(h/{columns}) + ceil(d/{width}))"
    partial_sums = (Term("partial sums of dweights", formula, 4 * s.R * parts),) if s.has_weights else ()
    recomputed = () if kept_first_layer else (_first_layer(s, "first layer, computed again"),)
    if save == "fp8":
        recomputed = (_first_layer(s, "gradient of the first layer"),)
    weighted = () if kept_y_swi else (_per_slot(s, "weighted y_swi, for dw2"),)
    row_weights = Term("router weights by row", f"4*{s.rows}", 4 * s.R)
    columns_of_dw1 = (s.g * s.h, 1) if s.gate_up == "interleaved" else (s.h, s.g)  # of each of its halves
    found = {term.name: (term,) for term in gradients(s)}
    dx, dw1, dw2 = (found[name][0] for name in ("dx", "dw1", "dw2"))
    dweights, db1, db2 = (found.get(name, ()) for name in ("dweights", "db1", "db2"))
    by_row = (_slots_by_row(s),) if s.options.unreduced else ()
    of_down_bwd = *recomputed, *weighted, *first_layer_grad
    unquantized = (*new_y_swi, *first_layer, *((row_weights,) if s.options.on_input else ()))
    return Plan(
        saved=(Term("x", "L*d*b", s.L * s.d * s.b), *index, *kept_first_layer, *kept_y_swi),
        forward=(
            *((unquantized,) if save == "fp8" and not s.on_hopper else ()),
            (*tiles_of_forward, *new_y_swi, *_panels(s, not kept_y_swi and not in_fp8, s.options.unreduced)),
        ),
        backward=(
            (*tiles_of_backward, *of_down_bwd, *grad_out, row_weights, *by_row, *partial_sums, *dweights, *db2),
            (*tiles_of_backward, *of_down_bwd, *by_row, *dweights, *db2, dw2, *_split_k_sums(s, "dw2", s.h, s.d, 1)),
            (*tiles_of_backward, *recomputed, *first_layer_grad, *_panels(s, False), *dweights, *db2, dw2, dx),
            (*recomputed, *dweights, *db2, dw2, dx, dw1, *_split_k_sums(s, "dw1", s.d, *columns_of_dw1)),
            *(((*recomputed, *dweights, *db2, dw2, dx, dw1, *db1),) if db1 else ()),
        ),
    )


def routed_layer(s: LayerShape) -> Plan:
    """A layer with routed buffers and nothing recomputed: what the paper calls conventional (sections 2.1, 2.2, 5.2).

    saved: the routed copy of the tokens, every intermediate of the experts, and the expert outputs, which the gradient
    of the router weights needs.
    forward: nothing beyond these; the weighted sum over the k outputs is taken to be fused.
    backward: the stages of a layer that frees each gradient after its last use. The saved buffers count as held
    throughout, as for `layer`.
    """
    gated = (_per_slot(s, "act(a)"),) if s.g == 2 else ()
    first_layer = _first_layer(s, "a, b" if s.g == 2 else "a")
    y_swi = _per_slot(s, "y_swi = act(a) * b" if s.g == 2 else "y_swi = act(a)")
    grad_first_layer = _first_layer(s, "gradient of a, b" if s.g == 2 else "gradient of a")
    grad_y_swi = _per_slot(s, "gradient of y_swi")
    found = {term.name: (term,) for term in gradients(s)}
    dx, dw1, dw2 = (found[name][0] for name in ("dx", "dw1", "dw2"))
    dweights, db1, db2 = (found.get(name, ()) for name in ("dweights", "db1", "db2"))
    experts = (_routed(s, "routed tokens"), first_layer, *gated, y_swi, _routed(s, "expert outputs"))
    return Plan(
        saved=(*experts, *_index_lists(s)),
        forward=((),),
        backward=(
            (_routed(s, "routed output gradient"), grad_y_swi, *dweights, dw2),
            (grad_y_swi, grad_first_layer, *dweights, dw2),
            (grad_first_layer, _routed(s, "routed token gradient"), *dweights, dw2, dw1, dx, *db1, *db2),
        ),
    )


def output(s: LayerShape) -> Term:
    if s.options.unreduced:
        return Term("out, a row per slot", "L*k*d*b", s.slots * s.d * s.b)
    return Term("out", "L*d*b", s.L * s.d * s.b)


def gradients(s: LayerShape) -> tuple[Term, ...]:
    """What backward returns, the same for every layer; dweights in float32."""
    of_weights = (
        Term("dx", "L*d*b", s.L * s.d * s.b),
        *((Term("dweights", "4*L*k", 4 * s.slots),) if s.has_weights else ()),
        Term("dw1", "g*E*d*h*b", s.g * s.E * s.d * s.h * s.b),
        Term("dw2", "E*h*d*b", s.E * s.h * s.d * s.b),
    )
    if s.bias is None:
        return of_weights
    b = ITEMSIZE[s.bias]
    db1 = () if s.options.on_input else (Term("db1", f"{b}*g*E*h", b * s.g * s.E * s.h),)
    return *of_weights, *db1, Term("db2", f"{b}*E*d", b * s.E * s.d)


def format_bytes(nbytes: int) -> str:
    """With a binary unit: 1536 -> "1.5 KiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:,.1f} {unit}"
