"""Dispatch and forward of the layer: check arguments, choose NumPy or CUDA, hand back the caller's kind of array."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

from moeblaze_cupy import arrays, checks, fp8_checks, reference, runtime
from moeblaze_cupy.arrays import Buffer, Export
from moeblaze_cupy.call import Call, keep, untraced
from moeblaze_cupy.ops import dispatch, experts, fp8
from moeblaze_cupy.ops.push import Destination
from moeblaze_cupy.runtime import Runtime, current_device
from moeblaze_cupy.structures import (
    Activation,
    DispatchIndices,
    Fp8Rows,
    Fp8Weights,
    SavedForBackward,
    SlotOptions,
    gate_and_up,
    joined,
    one_or_pair,
    pair,
    present,
)

# activation, save, gate_up, weights_on, unreduced, identity_experts, max_slots
Options = tuple[str | Activation, str | None, str, str, bool, int, int | None]
_SAVED_ARRAYS = ("x", "x_scales", "weights", "w1", "w2", "b1", "b2", "first_layer", "y_swi")


def map_saved(saved: SavedForBackward, convert: Export) -> SavedForBackward:
    """The same, with every array passed through `convert`."""

    def each(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(each(v) for v in value)
        return None if value is None else convert(value)

    return dataclasses.replace(
        saved,
        index=map_index(saved.index, convert),
        **{name: each(getattr(saved, name)) for name in _SAVED_ARRAYS},
        fp8_weights=map_fp8(saved.fp8_weights, convert),
    )


def map_fp8(weights: Fp8Weights | None, convert: Export) -> Fp8Weights | None:
    if weights is None:
        return None
    fields = (*fp8_checks.FIELDS, "amax")
    made = {name: getattr(weights, name) for name in fields}
    return Fp8Weights(**{n: None if a is None else convert(a) for n, a in made.items()}, gate_up=weights.gate_up)


def map_index(index: DispatchIndices, convert: Export) -> DispatchIndices:
    lists, rest = index.split()
    return rest.joined([None if array is None else convert(array) for array in lists])


def named_pair(function: str, name: str, w1: Any) -> dict[str, Any]:
    """The arrays of a weight or a bias by argument name; none for None."""
    if w1 is None:
        return {}
    parts = pair(w1)
    if len(parts) not in (1, 2):
        raise checks.bad_value(function, name, "one array or a pair (gate, up)", f"{len(parts)} arrays")
    return {name: parts[0]} if len(parts) == 1 else {f"{name}[0]": parts[0], f"{name}[1]": parts[1]}


@untraced
def build_dispatch(
    ids: Any, num_experts: int, token_offsets: Any = None, *, max_slots: int | None = None
) -> DispatchIndices:
    """The paper's index lists (section 4.1), built in its three steps (section 4.2).

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is "no expert in this slot", an expert named
    twice by a token is two slots. num_experts <= 4096, L*k <= 2^31 - 128.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each. ids are then (P,), and pair p is of
    token t for token_offsets[t] <= p < token_offsets[t+1]; a pair of no token is no slot. Whatever the offsets hold, a
    pair has at most one token, one whose offsets enclose it, and a larger pair has no smaller token.
    max_slots: at least 1, a bound of the slots that have a position, for buffers in expert order of so many rows.
    Slots past it, by expert, then token, then slot, count as absent, and `dropped` of the result says how many there
    are.
    Returns DispatchIndices of int32 arrays of the caller's kind.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    num_experts = checks.integer("build_dispatch", "num_experts", num_experts)
    named = {"ids": ids} if token_offsets is None else {"ids": ids, "token_offsets": token_offsets}
    key, pointers = runtime.key_of("build_dispatch", (num_experts, max_slots), tuple(named.values()))
    export: Export = keep
    found, kept = runtime.find(key), ids
    if found is None:
        checks.untracked("build_dispatch", named)
        call = Call("build_dispatch", **named)
        offsets = call.described.get("token_offsets")
        checks.ids("build_dispatch", call.described["ids"], num_experts, offsets)
        max_slots = checks.max_slots("build_dispatch", max_slots, call.described["ids"].size)
        if call.on_cpu:
            offsets_on_host = None if offsets is None else call.host("token_offsets")
            on_host = reference.dispatch(call.host("ids"), num_experts, offsets_on_host, max_slots)
            index = map_index(on_host, call.export)
            # The caller's own array, as the view of it may be read-only, of which DLPack makes a copy.
            return index if index.ids_copied or call.export is keep else dataclasses.replace(index, ids=ids)
        (layout,), pointers, export, kept = call.layout("ids"), call.pointers(), call.export, call.owners()[0]
        num_tokens = None if offsets is None else offsets.size - 1
        steps = dispatch.configure(layout, num_experts, call.limits, num_tokens, max_slots=max_slots)
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        lists, copy, _ = dispatch.dispatch(run, found.steps, *pointers)
        return map_index(_index(found.steps, lists.array, copy.array if copy else kept), export)


def _index(steps: dispatch.Dispatch, lists: Any, ids: Any) -> DispatchIndices:
    index = steps.index
    return DispatchIndices(lists, ids, index.places, index.num_experts, steps.copies_ids, index.max_slots)


@overload
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str | Activation = "swiglu",
    save: str = "minimal",
    b1: Any = None,
    b2: Any = None,
    gate_up: str = "halves",
    token_offsets: Any = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    max_slots: int | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> tuple[Any, SavedForBackward]: ...


@overload
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str | Activation = "swiglu",
    save: None,
    b1: Any = None,
    b2: Any = None,
    gate_up: str = "halves",
    token_offsets: Any = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    max_slots: int | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> tuple[Any, None]: ...


@untraced
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    b1: Any = None,
    b2: Any = None,
    gate_up: str = "halves",
    token_offsets: Any = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    max_slots: int | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> tuple[Any, SavedForBackward | None]:
    """out[t] = sum over slots j of weights[t, j] * expert ids[t, j] of x[t] (paper sections 2.3, 3.1, 5).

    x: (L, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. ids: (L, k) int32 or int64, see
    `build_dispatch`. weights: (L, k) float32 or x's dtype.
    w1: (E, d, 2h), gate columns then up columns, or a pair (gate, up) of (E, d, h), for the gated activations swiglu,
    geglu (exact gelu), reglu, geglu_tanh, swiglu_clamp, swiglu_oai, swiglu_clamp_after and swiglu_softcap; (E, d, h)
    for silu, gelu (exact), relu, gelu_tanh and relu2. w2: (E, h, d). Both in x's dtype, read in place, row-major or as
    the transposed view of (E, 2h, d) / (E, d, h) storage.
    activation: a name, or an `Activation` with constants of its own.
    b1, b2: biases of both products, added in float32, or None: b1 (E, 2h), or a pair of (E, h), or (E, h) without a
    gate; b2 (E, d). In x's dtype or float32, the last dimension contiguous. Empty slots get none.
    gate_up: "interleaved" if the columns of w1, and of b1, are gate 0, up 0, gate 1, up 1, ...; else "halves".
    save: "minimal" keeps a, b; "paper" also V(a) * M(b) (Algorithm 1); "recompute" only x; None nothing. "fp8" keeps
    a, b in e4m3 with a float32 scale for each row and 128 columns of either, whatever x's dtype: 0.52 of bf16's bytes.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each, as of `build_dispatch`; ids and
    weights are then (P,).
    weights_on: "output" as above, or "input" for experts of weight * x, as in Llama 4; x is not copied for it. Not with
    b1. b2 is not weighted then.
    unreduced: True returns the experts' outputs of each slot, (L, k, d), or (P, d) with token_offsets, in the order of
    the slots and 0 without an expert: neither weighted nor summed. weights are then None, unless they are on the input.
    This result has L*k rows of d.
    identity_experts: number Z of experts without weights and biases, ids E to E+Z-1, that return their input, as in
    LongCat-Flash; not with unreduced.
    max_slots: None, or a bound of the slots that are present, at least 1; those of identity experts count
    nothing. All buffers in expert order but the index lists then have so many rows in place of L*k. Slots past it count
    as absent; saved.index.dropped says how many.
    precision: None, or "fp8": the products but those of weight gradients multiply e4m3, with a float32 scale for each
    token of x and of out's gradient, for each row and 128 columns of V(a) * M(b) and of the gradients of a, b, and for
    each expert of w2 and half of w1. For bf16 on Hopper, d and h that are multiples of 16, and gate_up="halves".
    fp8_weights: what `quantize_weights` made of w1 and w2, or None: it is made in the call and kept for backward.
    Returns out (L, d) in x's dtype and SavedForBackward (None for save=None).
    The arrays are kept by reference: whoever changes one in place before backward, as by x += out, gets wrong
    gradients. Where 2h = d (w1) or h = d (w2), storage order has the same shape and cannot be told apart.
    A NaN in x reaches its token's output and its gradients of weights, w1, w2 and x, but for "relu" not that of x. One
    in an expert's bias reaches the tokens of that expert alone.
    Raises TypeError (dtype, device, framework), ValueError (shape, memory order, names), or RuntimeError
    where CUDA arrays meet no CuPy, no usable driver or a GPU before sm_80, and of torch tensors that autograd or a
    transform of torch would have to follow: for those use `moeblaze_cupy.interop.torch`.
    """
    gate, up = _gate_and_up("moe_forward", "w1", w1)
    b1_gate, b1_up = (None, None) if b1 is None else _gate_and_up("moe_forward", "b1", b1)
    given = x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets
    others = weights_on, unreduced, identity_experts, max_slots
    return forward(given, (activation, save, gate_up, *others), None, precision, fp8_weights)


def forward_into(
    into: Any,
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    max_slots: int | None = None,
    wait: Callable[[], None] | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> tuple[Any, SavedForBackward | None]:
    """`moe_forward`, whose result on CUDA is `into` where that is given: of out's shape, dtype and kind, aligned.

    It may be a `Destination` of rows of d columns, a multiple of 8; out is then None on CUDA.

    x: may be `Fp8Rows` with precision="fp8"; what is saved then has x and x_scales of these. wait: has the stream wait
    for rows of x that are on their way; None where all are here. It is called after dispatch, beside which they travel.
    """
    x, x_scales = values_and_scales(x)
    given = x, ids, weights, *_gate_and_up("moe_forward", "w1", w1), w2, None, None, None, None
    options = activation, save, "halves", "output", False, 0, max_slots
    return forward(given, options, into, precision, fp8_weights, wait, x_scales)


def values_and_scales(rows: Any) -> tuple[Any, Any]:
    """Of `Fp8Rows`; of other rows these and None."""
    return rows if isinstance(rows, Fp8Rows) else (rows, None)


def forward(
    given: Sequence[Any],
    options: Options,
    into: Any = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
    wait: Callable[[], None] | None = None,
    x_scales: Any = None,
) -> tuple[Any, SavedForBackward | None]:
    """`moe_forward` of its arrays in the order of `experts.moe_forward`, None for what there is not.

    into, wait: as of `forward_into`. x_scales: of x, where it is the values of `Fp8Rows`.
    """
    of_fp8 = fp8_checks.arrays_of("moe_forward", precision, fp8_weights)
    of_key: tuple[Any, ...] = options
    if precision is not None:
        given, of_key = (*given, *of_fp8), (*options, precision, fp8_weights and fp8_weights.gate_up)
    if x_scales is not None:
        given, of_key = (*given, x_scales), (*of_key, "x_scales")
    to = into if isinstance(into, Destination) else None
    place = to.place if to else None
    if place:
        of_key = *of_key, place
    key, pointers = runtime.key_of("moe_forward", of_key, given)
    export: Export = keep
    found = runtime.find(key)  # a record says that such arguments have passed all checks
    activation, save, gate_up, weights_on, unreduced, identity_experts, max_slots = options
    if found is None:
        x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets, *_ = given
        names = (*_forward_names(up is not None, b1_up is not None), *fp8_checks.NAMES[: len(of_fp8)])
        names = (*names, *["x.scales"] * (x_scales is not None))
        required = (*names[:2], names[3], names[5])
        named = {n: array for n, array in zip(names, given, strict=True) if array is not None or n in required}
        checks.untracked("moe_forward", named)
        call = Call("moe_forward", **named)
        slots = SlotOptions(weights_on, unreduced, identity_experts)
        slots = checks.slot_options("moe_forward", slots, weights is not None, b1_gate is not None)
        described: list[Any] = [call.described.get(name) for name in names]
        x_array, ids_array, weights_array, _, _, w2_array, _, _, _, offsets, *fp8_arrays = described
        fp8_arrays = fp8_arrays[: len(of_fp8)]
        if x_scales is not None:  # the checks are of what the rows stand for
            x_array = dataclasses.replace(x_array, dtype=w2_array.dtype)
        w1_arrays, b1_arrays, b2_arrays = w1_b1_b2(described)
        layer = x_array, ids_array, weights_array, w1_arrays, w2_array, activation, save, b1_arrays, b2_arrays, gate_up
        checks.layer("moe_forward", *layer, offsets)
        checks.identity_experts("moe_forward", slots, w2_array)
        max_slots = checks.max_slots("moe_forward", max_slots, ids_array.size)
        limits = None if call.on_cpu else call.limits
        if precision is not None:
            biases = {name: call.described[name] for name in names[6:9] if name in named}
            order = None if fp8_weights is None else fp8_weights.gate_up
            of_layer = x_array, w2_array, activation, gate_up, biases, fp8_arrays, order
            fp8_checks.layer("moe_forward", *of_layer, limits)
        if x_scales is not None:
            if precision is None:
                raise checks.bad_value("moe_forward", "x", "bf16 rows without precision='fp8'", "rows in e4m3")
            fp8_checks.rows("moe_forward", "x", described[0], described[-1])
        if limits is None:
            if wait is not None:
                wait()
            w1_names, b1_names = (tuple(n for n in part if n in named) for part in (names[3:5], names[6:8]))
            in_fp8: dict[str, Any] = {} if precision is None else {"precision": precision}
            if of_fp8:
                on_host = (call.host(name) for name in fp8_checks.NAMES)
                in_fp8["fp8_weights"] = Fp8Weights(
                    **dict(zip(fp8_checks.FIELDS, on_host, strict=True)), gate_up=gate_up
                )
            on_cpu = w1_names, b1_names, activation, save, gate_up, slots, max_slots, in_fp8, x_scales is not None
            out, saved = _forward_on_cpu(call, *on_cpu)
            if saved is not None and fp8_weights is not None:
                saved = dataclasses.replace(saved, fp8_weights=fp8_weights)
            if saved is not None and call.framework is arrays.Torch:
                own = {"x": x, "weights": weights, "w1": joined(gate, up), "w2": w2, "b1": joined(b1_gate, b1_up)}
                saved = dataclasses.replace(saved, b2=b2, x_scales=x_scales, **own)
            return out, saved
        layouts: list[Any] = [array and array.layout for array in described]
        x_layout, ids_layout, weights_layout, _, _, w2_layout, *_ = layouts
        w1_layouts, b1_layouts, b2_layouts = w1_b1_b2(layouts)
        steps = experts.configure_forward(
            x_layout,
            ids_layout,
            weights_layout,
            w2_layout,
            w1_layouts,
            b1_layouts,
            b2_layouts,
            activation,
            gate_up,
            save,
            limits,
            slots,
            token_offsets is not None,
            max_slots,
            precision,
            not of_fp8,
            place,
        )
        given = [array and array.owner for array in described]
        pointers = [array.ptr if array else 0 for array in described]
        export, found = call.export, runtime.keep(key, call.prepared((steps, slots)))
    steps, slots = found.steps
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        memory = None if into is None or to else Buffer(into, found.framework.describe(into).ptr)
        weights_fp8 = fp8.Addresses(*pointers[10 : 10 + len(of_fp8)]) if of_fp8 else None
        if steps.quantize:
            made, weights_fp8 = steps.quantize.make(run, pointers[3:5], pointers[5])
            fp8_weights = Fp8Weights(**made)
        options_of_run: dict[str, Any] = {"out": memory, "weights_fp8": weights_fp8, "wait": wait}
        if x_scales is not None:
            options_of_run["x_scales"] = pointers[-1]
        if to:
            options_of_run["to"] = to.addresses(found.framework)
        made_by_forward = experts.moe_forward(run, steps, *pointers[:10], **options_of_run)
        out, lists, ids_copy, first_layer, y_swi = made_by_forward
        out = None if to else export(out)
        if save is None:
            return out, None
        x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, _, *own_fp8 = given
        own_fp8 = own_fp8[: len(of_fp8)]
        if own_fp8 and export is not keep:  # what it was imported to, as of the other arrays
            fp8_weights = Fp8Weights(**dict(zip(fp8_checks.FIELDS, own_fp8, strict=True)), gate_up=gate_up)
        index = _index(steps.dispatch, lists, ids if ids_copy is None else ids_copy)
        kept = x, weights, joined(gate, up), w2, index, first_layer, y_swi, activation, save, False
        of_biases = joined(b1_gate, b1_up), b2
        return out, SavedForBackward(*kept, *of_biases, gate_up, slots, precision, fp8_weights, x_scales)


def _gate_and_up(function: str, name: str, weight: Any) -> tuple[Any, Any]:
    """The array and None, or the pair (gate, up)."""
    if not isinstance(weight, (tuple, list)):
        return weight, None
    for part, array in named_pair(function, name, weight).items():
        if array is None:
            raise checks.bad_type(function, part, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array))
    return gate_and_up(weight)


def _forward_names(w1_is_pair: bool, b1_is_pair: bool) -> tuple[str, ...]:
    """Argument names of the arrays of a forward, in the order of `experts.moe_forward`."""
    w1, b1 = ("w1[0]" if w1_is_pair else "w1"), ("b1[0]" if b1_is_pair else "b1")
    return "x", "ids", "weights", w1, "w1[1]", "w2", b1, "b1[1]", "b2", "token_offsets"


def w1_b1_b2(values: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """The values of w1, b1 and b2 without None. values: in the order of a forward's arrays, or of a backward's."""
    _, _, _, gate, up, _, b1_gate, b1_up, b2, *_ = values
    return present(gate, up), present(b1_gate, b1_up), present(b2)


def _forward_on_cpu(
    call: Call,
    w1_names: tuple[str, ...],
    b1_names: tuple[str, ...],
    activation: str | Activation,
    save: str | None,
    gate_up: str,
    slots: SlotOptions,
    max_slots: int | None,
    in_fp8: dict[str, Any],
    has_scales: bool,
) -> tuple[Any, SavedForBackward | None]:
    host = {name: call.host(name) for name in call.described}
    if has_scales:
        host["x"] = reference.fp8.dequantize(host["x"], host["x.scales"], host["w2"].dtype)
    w1, b1 = (tuple(host[name] for name in names) for names in (w1_names, b1_names))
    options: dict[str, Any] = {name: host.get(name) for name in ("b2", "token_offsets")} | slots._asdict()
    out, saved = reference.moe_forward(
        host["x"],
        host["ids"],
        host.get("weights"),
        one_or_pair(w1),
        host["w2"],
        activation=activation,
        save=save,
        b1=one_or_pair(b1) if b1 else None,
        gate_up=gate_up,
        max_slots=max_slots,
        **options,
        **in_fp8,
    )
    if saved is not None and call.framework is arrays.Torch:
        saved = map_saved(saved, call.export)
    return call.export(out), saved
