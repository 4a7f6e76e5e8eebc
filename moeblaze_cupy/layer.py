"""The public functions of the layer: check arguments, choose NumPy or CUDA, hand back the caller's kind of array."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

from moeblaze_cupy import arrays, checks, reference, runtime
from moeblaze_cupy.arrays import Export, Framework
from moeblaze_cupy.call import Call, keep
from moeblaze_cupy.ops import dispatch, experts
from moeblaze_cupy.ops.dispatch import IndexLayout
from moeblaze_cupy.runtime import Key, Runtime, current_device
from moeblaze_cupy.structures import (
    Activation,
    DispatchIndices,
    Gradients,
    SavedForBackward,
    SlotOptions,
    is_consumed,
    one_or_pair,
    pair,
)

_SAVED_ARRAYS = ("x", "weights", "w1", "w2", "b1", "b2", "first_layer", "y_swi")


def _map_saved(saved: SavedForBackward, convert: Export) -> SavedForBackward:
    """The same, with every array passed through `convert`."""

    def each(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(each(v) for v in value)
        return None if value is None else convert(value)

    return dataclasses.replace(
        saved,
        index=_map_index(saved.index, convert),
        **{name: each(getattr(saved, name)) for name in _SAVED_ARRAYS},
    )


def _map_index(index: DispatchIndices, convert: Export) -> DispatchIndices:
    lists, rest = index.split()
    return rest.joined([None if array is None else convert(array) for array in lists])


def _named_pair(function: str, name: str, w1: Any) -> dict[str, Any]:
    """The arrays of a weight or a bias by argument name; none for None."""
    if w1 is None:
        return {}
    parts = pair(w1)
    if len(parts) not in (1, 2):
        raise checks.bad_value(function, name, "one array or a pair (gate, up)", f"{len(parts)} arrays")
    return {name: parts[0]} if len(parts) == 1 else {f"{name}[0]": parts[0], f"{name}[1]": parts[1]}


def _buffers(
    function: str, accumulate: Any, needs: tuple[str, ...], saved: SavedForBackward
) -> dict[str, dict[str, Any]]:
    """Of each weight whose gradient is added to the caller's: these arrays by argument name, in the weight's form."""
    checks.accumulated_names(function, accumulate, needs, saved.gradients)
    found: dict[str, dict[str, Any]] = {}
    for name, given in accumulate.items():
        if given is None:
            raise checks.bad_type(function, f"accumulate[{name!r}]", "a NumPy, CuPy or torch array", type(given))
        argument, wanted = f"accumulate[{name!r}]", len(pair(getattr(saved, name)))
        found[name] = _named_pair(function, argument, given)
        if len(found[name]) != wanted:
            forms = {1: "one array", 2: "a pair (gate, up)"}
            raise checks.bad_value(function, argument, f"{forms[wanted]}, as the weight is", forms[len(found[name])])
        for part, array in found[name].items():
            framework = arrays.framework_of(array)
            if framework is None:  # what speaks DLPack alone may be immutable
                raise checks.bad_type(function, part, "a NumPy, CuPy or torch array", type(array))
            if framework is arrays.NumPy and not array.flags.writeable:
                raise checks.bad_value(function, part, "an array that can be written", "a read-only one")
    return found


def _check_apart(framework: Framework, grad_out: Any, saved: SavedForBackward, buffers: Mapping[str, Any]) -> None:
    """What gradients are added to is no memory that backward reads; see `checks.apart`."""
    read = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    read |= _named_pair("moe_backward", "saved.w1", saved.w1)
    read |= _named_pair("moe_backward", "saved.b1", saved.b1) | {"saved.b2": saved.b2}
    read |= {"saved.first_layer": saved.first_layer, "saved.y_swi": saved.y_swi}
    read |= {"saved.index.lists": saved.index.lists, "saved.index.ids": saved.index.ids}
    present = {name: framework.describe(array) for name, array in read.items() if array is not None}
    checks.apart("moe_backward", present, {name: framework.describe(array) for name, array in buffers.items()})


def build_dispatch(ids: Any, num_experts: int, token_offsets: Any = None) -> DispatchIndices:
    """The paper's index lists (section 4.1), built in its three steps (section 4.2).

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is "no expert in this slot", an expert named
    twice by a token is two slots. num_experts <= 4096, L*k <= 2^31 - 128.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each. ids are then (P,), and pair p is of
    token t for token_offsets[t] <= p < token_offsets[t+1]; a pair of no token is no slot. Whatever the offsets hold, a
    pair has at most one token, one whose offsets enclose it, and a larger pair has no smaller token.
    Returns DispatchIndices of int32 arrays of the caller's kind.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    num_experts = checks.integer("build_dispatch", "num_experts", num_experts)
    named = {"ids": ids} if token_offsets is None else {"ids": ids, "token_offsets": token_offsets}
    key, pointers = runtime.key_of("build_dispatch", (num_experts,), tuple(named.values()))
    export: Export = keep
    found, kept = runtime.find(key), ids
    if found is None:
        checks.untracked("build_dispatch", named)
        call = Call("build_dispatch", **named)
        offsets = call.described.get("token_offsets")
        checks.ids("build_dispatch", call.described["ids"], num_experts, offsets)
        if call.on_cpu:
            offsets_on_host = None if offsets is None else call.host("token_offsets")
            index = _map_index(reference.dispatch(call.host("ids"), num_experts, offsets_on_host), call.export)
            # The caller's own array, as the view of it may be read-only, of which DLPack makes a copy.
            return index if index.ids_copied or call.export is keep else dataclasses.replace(index, ids=ids)
        (layout,), pointers, export, kept = call.layout("ids"), call.pointers(), call.export, call.owners()[0]
        num_tokens = None if offsets is None else offsets.size - 1
        found = runtime.keep(key, call.prepared(dispatch.configure(layout, num_experts, call.limits, num_tokens)))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        lists, copy, _ = dispatch.dispatch(run, found.steps, *pointers)
        return _map_index(_index(found.steps, lists, copy, kept), export)


def _index(steps: dispatch.Dispatch, lists: arrays.Buffer, copy: arrays.Buffer | None, ids: Any) -> DispatchIndices:
    index = steps.index
    return DispatchIndices(lists.array, copy.array if copy else ids, index.places, index.num_experts, steps.copies_ids)


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
) -> tuple[Any, None]: ...


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
    save: "minimal" keeps a, b; "paper" also V(a) * M(b) (Algorithm 1); "recompute" only x; None nothing.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each, as of `build_dispatch`; ids and
    weights are then (P,).
    weights_on: "output" as above, or "input" for experts of weight * x, as in Llama 4; x is not copied for it. Not with
    b1. b2 is not weighted then.
    unreduced: True returns the experts' outputs of each slot, (L, k, d), or (P, d) with token_offsets, in the order of
    the slots and 0 without an expert: neither weighted nor summed. weights are then None, unless they are on the input.
    This is the one option with a buffer of L*k rows of d.
    identity_experts: number Z of experts without weights and biases, ids E to E+Z-1, that return their input, as in
    LongCat-Flash; not with unreduced.
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
    given: Sequence[Any] = (x, ids, weights, w2, gate, up, b1_gate, b1_up, b2, token_offsets)
    options = activation, save, gate_up, weights_on, unreduced, identity_experts
    key, pointers = runtime.key_of("moe_forward", options, given)
    export: Export = keep
    found = runtime.find(key)  # a record says that such arguments have passed all checks
    if found is None:
        names = _forward_names(up is not None, b1_up is not None)
        required = (*names[:2], *names[3:5])
        named = {n: array for n, array in zip(names, given, strict=True) if array is not None or n in required}
        checks.untracked("moe_forward", named)
        call = Call("moe_forward", **named)
        slots = SlotOptions(weights_on, unreduced, identity_experts)
        slots = checks.slot_options("moe_forward", slots, weights is not None, b1 is not None)
        described = _forward_values([call.described.get(name) for name in names])
        x_array, ids_array, weights_array, w2_array, w1_arrays, b1_arrays, b2_arrays, offsets = described
        layer = x_array, ids_array, weights_array, w1_arrays, w2_array, activation, save, b1_arrays, b2_arrays, gate_up
        checks.layer("moe_forward", *layer, offsets)
        checks.identity_experts("moe_forward", slots, w2_array)
        if call.on_cpu:
            w1_names, b1_names = (tuple(n for n in part if n in named) for part in (names[4:6], names[6:8]))
            out, saved = _forward_on_cpu(call, w1_names, b1_names, activation, save, gate_up, slots)
            if saved is not None and call.framework is arrays.Torch:
                own = {"x": x, "weights": weights, "w1": _joined(gate, up), "w2": w2, "b1": _joined(b1_gate, b1_up)}
                saved = dataclasses.replace(saved, b2=b2, **own)
            return out, saved
        present = [call.described.get(name) for name in names]
        *layouts, _ = _forward_values([array and array.layout for array in present])
        x_layout, ids_layout, weights_layout, w2_layout, w1_layouts, b1_layouts, b2_layouts = layouts
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
            call.limits,
            slots,
            token_offsets is not None,
        )
        given, pointers = [array and array.owner for array in present], [array.ptr if array else 0 for array in present]
        export, found = call.export, runtime.keep(key, call.prepared((steps, slots)))
    steps, slots = found.steps
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        result = experts.moe_forward(run, steps, *_forward_values(pointers))
        out = export(result.out.array)
        if save is None:
            return out, None
        x, ids, weights, w2, gate, up, b1_gate, b1_up, b2, _ = given
        index = _index(steps.dispatch, result.lists, result.ids, ids)
        first_layer = result.first_layer.array if result.first_layer else None
        y_swi = result.y_swi.array if result.y_swi else None
        kept = x, weights, _joined(gate, up), w2, index, first_layer, y_swi, activation, save, False
        return out, SavedForBackward(*kept, _joined(b1_gate, b1_up), b2, gate_up, slots)


def _gate_and_up(function: str, name: str, weight: Any) -> tuple[Any, Any]:
    """The array and None, or the pair (gate, up)."""
    if not isinstance(weight, (tuple, list)):
        return weight, None
    parts = _named_pair(function, name, weight)
    for part, array in parts.items():
        if array is None:
            raise checks.bad_type(function, part, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array))
    gate, up = (*parts.values(), None)[:2]
    return gate, up


def _joined(gate: Any, up: Any) -> Any:
    """What `_gate_and_up` was given."""
    return gate if up is None else (gate, up)


def _forward_names(w1_is_pair: bool, b1_is_pair: bool) -> tuple[str, ...]:
    """Argument names of the arrays of a forward, in the order of `_forward_values`."""
    w1, b1 = ("w1[0]" if w1_is_pair else "w1"), ("b1[0]" if b1_is_pair else "b1")
    return "x", "ids", "weights", "w2", w1, "w1[1]", b1, "b1[1]", "b2", "token_offsets"


def _forward_values(values: Sequence[Any]) -> tuple[Any, ...]:
    """What `values` says of the arrays of a forward, in the order of experts.moe_forward: w1, b1 and b2 as tuples.

    What says nothing, None or an address of 0, is an array that there is not.
    """
    x, ids, weights, w2, gate, up, b1_gate, b1_up, b2, token_offsets = values
    w1 = (gate, up) if up else (gate,)
    b1 = (b1_gate, b1_up) if b1_up else (b1_gate,) if b1_gate else ()
    return x, ids, weights, w2, w1, b1, (b2,) if b2 else (), token_offsets


def _forward_on_cpu(
    call: Call,
    w1_names: tuple[str, ...],
    b1_names: tuple[str, ...],
    activation: str | Activation,
    save: str | None,
    gate_up: str,
    slots: SlotOptions,
) -> tuple[Any, SavedForBackward | None]:
    host = {name: call.host(name) for name in call.described}
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
        **options,
    )
    if saved is not None and call.framework is arrays.Torch:
        saved = _map_saved(saved, call.export)
    return call.export(out), saved


def moe_backward(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] | None = None,
    keep_saved: bool = False,
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Gradients of `moe_forward` (paper section 3.2; Algorithm 1, lines 15-31).

    grad_out: of out's shape, (L, d) or per slot, x's dtype, contiguous. needs: which of "x", "weights", "w1", "w2",
    "b1", "b2" to compute; the others stay None and their kernels do not run, as does that of weights which there are
    not. None is all that the layer has: b1 and b2 only with such a bias.
    On CUDA the saved activations are overwritten by their own gradients unless `keep_saved`; a second
    backward over them raises RuntimeError, on the CPU too. With save="recompute" there are none to overwrite.
    accumulate: NumPy, CuPy or torch arrays that the gradients of w1, w2, b1 or b2 are added to, {"w2": total}, of the
    weight's shape, a pair for a pair, in float32 or the weights' dtype, in either memory order of the weights. The
    products' float32 sums are added unrounded, and the total is rounded once to the array's dtype. No other
    memory is taken for these gradients, but while backward runs up to 66 MiB for those of few large experts, and
    nothing of experts without tokens is written. They share no memory with each other or with what backward reads;
    views of one buffer may lie among each other. If backward fails, say for want of memory, some may have been added.
    Returns Gradients: x (L, d), weights (L, k) or (P,) (0 for empty slots), w1, w2, b1 and b2 in the form, dtype and
    memory order of the weights and biases, exactly zero for experts without tokens; or the very arrays of `accumulate`.
    Raises TypeError, ValueError or RuntimeError as `moe_forward` does, and RuntimeError for a second backward.
    """
    if not isinstance(saved, SavedForBackward):
        raise checks.bad_type(
            "moe_backward", "saved", "SavedForBackward from moe_forward (save is not None)", type(saved)
        )
    needs = checks.gradient_names("moe_backward", needs, saved.gradients)
    key, given, pointers = _backward_key(grad_out, saved, needs, keep_saved, accumulate)
    export: Export = keep
    found = runtime.find(key)
    if found is not None:
        checks.not_consumed("moe_backward", saved)
        totals_given = sum(len(pair(total)) for total in (accumulate or {}).values())
        strides_in_bytes = found.framework is arrays.CuPy
        if totals_given and key and checks.ranges_meet(strides_in_bytes, key[-len(given) :], pointers, totals_given):
            buffers = _buffers("moe_backward", accumulate, needs, saved)
            parts = {part: array for parts in buffers.values() for part, array in parts.items()}
            _check_apart(found.framework, grad_out, saved, parts)
    else:
        tracked = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
        for name in ("w1", "b1", "b2"):
            tracked |= _named_pair("moe_backward", f"saved.{name}", getattr(saved, name))
        checks.untracked("moe_backward", tracked)
        buffers = _buffers("moe_backward", accumulate, needs, saved) if accumulate is not None else {}
        parts = {part: array for parts in buffers.values() for part, array in parts.items()}
        call = Call("moe_backward", **{"saved.x": saved.x}, grad_out=grad_out, **parts)
        d = call.described
        checks.layer_backward("moe_backward", d["grad_out"], d["saved.x"], saved)
        for name, of_weight in buffers.items():
            shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
            checks.accumulated("moe_backward", {part: d[part] for part in of_weight}, shapes, d["saved.x"].dtype)
        if parts:
            _check_apart(call.framework, d["grad_out"].owner, saved, parts)
        if call.on_cpu:
            saved.consumed = is_consumed(saved.first_layer is not None, saved.y_swi is not None, needs, keep_saved)
            host_saved = _map_saved(saved, call.framework.to_numpy) if call.framework is arrays.Torch else saved
            host_buffers = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
            on_host = reference.moe_backward(call.host("grad_out"), host_saved, needs=needs, accumulate=host_buffers)
            of_weights = (on_host.w1, on_host.w2, on_host.b1, on_host.b2)
            parts_of = (None if g is None else pair(g) for g in of_weights)
            return _export_gradients(call.export, accumulate, on_host.x, on_host.weights, *parts_of)
        given = d["grad_out"].owner, *given[1:]
        described = [None if array is None else call.framework.describe(array) for array in given]
        pointers, export = [array.ptr if array else 0 for array in described], call.export
        layouts = [array and array.layout for array in described]
        *inputs, _, first_layer, y_swi, totals = _backward_values(accumulate, layouts)
        grad_layout, x_layout, weights_layout, w2_layout, w1_layouts, b1_layouts, b2_layouts = inputs
        steps = experts.configure_backward(
            grad_layout,
            x_layout,
            weights_layout,
            w2_layout,
            w1_layouts,
            b1_layouts,
            b2_layouts,
            first_layer,
            y_swi,
            tuple(totals.items()),
            saved.activation,
            saved.gate_up,
            needs,
            bool(keep_saved),
            call.limits,
            _index_layout(saved.index),
            saved.slots,
        )
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        grads = experts.moe_backward(run, found.steps, saved, *_backward_values(accumulate, pointers))
        return _export_gradients(
            export,
            accumulate,
            grads.x and grads.x.array,
            grads.weights and grads.weights.array,
            *(g and tuple(buffer.array for buffer in g) for g in (grads.w1, grads.w2, grads.b1, grads.b2)),
        )


def _backward_key(
    grad_out: Any, saved: SavedForBackward, needs: tuple[str, ...], keep_saved: Any, accumulate: Any
) -> tuple[Key | None, tuple[Any, ...], list[int]]:
    """As `runtime.key_of`, with the arrays between, in the order of `_backward_values`."""
    if not (accumulate is None or isinstance(accumulate, Mapping)):
        return None, (), []
    w1, b1, index = saved.w1, saved.b1, saved.index
    gate, up = w1 if isinstance(w1, (tuple, list)) else (w1, None)
    b1_gate, b1_up = b1 if isinstance(b1, (tuple, list)) else (b1, None)
    arrays_of = grad_out, saved.x, saved.weights, saved.w2, gate, up, b1_gate, b1_up, saved.b2, index.lists
    given: tuple[Any, ...] = *arrays_of, saved.first_layer, saved.y_swi
    options: tuple[Any, ...]
    options = saved.activation, saved.gate_up, needs, bool(keep_saved), saved.slots, index.is_ragged
    for name, total in (accumulate or {}).items():
        parts = pair(total)
        given, options = (*given, *parts), (*options, name, len(parts))
    key, pointers = runtime.key_of("moe_backward", options, given)
    return key, given, pointers


def _backward_values(accumulate: Mapping[str, Any] | None, values: Sequence[Any]) -> tuple[Any, ...]:
    """What `values` says of the arrays of `_backward_key`, in the order of experts.moe_backward.

    What says nothing, None or an address of 0, is an array that there is not.
    """
    grad_out, x, weights, w2, gate, up, b1_gate, b1_up, b2, lists, first_layer, y_swi = values[:12]
    totals, end = {}, 12
    for name, total in (accumulate or {}).items():
        start, end = end, end + len(pair(total))
        totals[name] = tuple(values[start:end])
    w1 = (gate, up) if up else (gate,)
    b1 = (b1_gate, b1_up) if b1_up else (b1_gate,) if b1_gate else ()
    return grad_out, x, weights, w2, w1, b1, (b2,) if b2 else (), lists, first_layer, y_swi, totals


def _index_layout(index: DispatchIndices) -> IndexLayout:
    return IndexLayout(index.num_tokens, index.k, index.num_experts, index.num_slots if index.is_ragged else 0)


def _export_gradients(
    export: Export,
    accumulate: Mapping[str, Any] | None,
    x: Any,
    weights: Any,
    w1: tuple[Any, ...] | None,
    w2: tuple[Any, ...] | None,
    b1: tuple[Any, ...] | None,
    b2: tuple[Any, ...] | None,
) -> Gradients:
    """In the caller's kind; what was accumulated is the caller's own."""
    if export is keep and not accumulate:
        return Gradients(x, weights, *(parts and one_or_pair(parts) for parts in (w1, w2, b1, b2)))
    own = accumulate or {}

    def one(array: Any) -> Any:
        return None if array is None else export(array)

    def parts(name: str, given: tuple[Any, ...] | None) -> Any:
        return own[name] if name in own else None if given is None else one_or_pair(tuple(map(export, given)))

    by_name = {"w1": w1, "w2": w2, "b1": b1, "b2": b2}
    return Gradients(one(x), one(weights), **{name: parts(name, given) for name, given in by_name.items()})
