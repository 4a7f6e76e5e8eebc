"""The public functions of the layer: check arguments, choose NumPy or CUDA, hand back the caller's kind of array."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

from moeblaze_cupy import arrays, checks, launch_config, reference, runtime
from moeblaze_cupy.arrays import Export, Framework
from moeblaze_cupy.call import Call, keep
from moeblaze_cupy.ops import dispatch, experts
from moeblaze_cupy.ops.dispatch import IndexLayout
from moeblaze_cupy.runtime import Key, Runtime, current_device
from moeblaze_cupy.structures import (
    GRADIENTS,
    DispatchIndices,
    Gradients,
    PendingWeights,
    SavedForBackward,
    is_consumed,
    one_or_pair,
    pair,
)


def _map_saved(saved: SavedForBackward, convert: Export) -> SavedForBackward:
    """The same, with every array passed through `convert`."""

    def each(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(each(v) for v in value)
        return None if value is None else convert(value)

    return dataclasses.replace(
        saved,
        index=_map_index(saved.index, convert),
        **{name: each(getattr(saved, name)) for name in ("x", "weights", "w1", "w2", "first_layer", "y_swi")},
    )


def _map_index(index: DispatchIndices, convert: Export) -> DispatchIndices:
    lists, rest = index.split()
    return rest.joined([None if array is None else convert(array) for array in lists])


def _named_pair(function: str, name: str, w1: Any) -> dict[str, Any]:
    parts = pair(w1)
    if len(parts) not in (1, 2):
        raise checks.bad_value(function, name, "one array or a pair (gate, up)", f"{len(parts)} arrays")
    return {name: parts[0]} if len(parts) == 1 else {f"{name}[0]": parts[0], f"{name}[1]": parts[1]}


def _buffers(
    function: str, accumulate: Any, needs: tuple[str, ...], saved: SavedForBackward
) -> dict[str, dict[str, Any]]:
    """Of each weight whose gradient is added to the caller's: these arrays by argument name, in the weight's form."""
    checks.accumulated_names(function, accumulate, needs)
    found: dict[str, dict[str, Any]] = {}
    for name, given in accumulate.items():
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


def _check_apart(
    function: str, framework: Framework, grad_out: Any, saved: SavedForBackward, buffers: Mapping[str, Any]
) -> None:
    """What gradients are added to is no memory that backward reads; see `checks.apart`."""
    read = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    read |= _named_pair(function, "saved.w1", saved.w1)
    read |= {"saved.first_layer": saved.first_layer, "saved.y_swi": saved.y_swi}
    read |= {"saved.index.lists": saved.index.lists, "saved.index.ids": saved.index.ids}
    present = {name: framework.describe(array) for name, array in read.items() if array is not None}
    checks.apart(function, present, {name: framework.describe(array) for name, array in buffers.items()})


def build_dispatch(ids: Any, num_experts: int, *, max_slots: int | None = None) -> DispatchIndices:
    """The paper's index lists (section 4.1), built in its three steps (section 4.2).

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is "no expert in this slot", an expert named
    twice by a token is two slots. num_experts <= 4096, L*k <= 2^31 - 128.
    max_slots: 1 to L*k, a bound of the slots that have a position, for buffers in expert order of so many rows. Slots
    past it, by expert, then token, then slot, count as absent, and `dropped` of the result says how many there are.
    Returns DispatchIndices of int32 arrays of the caller's kind.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    num_experts = checks.integer("build_dispatch", "num_experts", num_experts)
    key, pointers = runtime.key_of("build_dispatch", (num_experts, max_slots), (ids,))
    export: Export = keep
    found, kept = runtime.find(key), ids
    if found is None:
        checks.untracked("build_dispatch", {"ids": ids})
        call = Call("build_dispatch", ids=ids)
        checks.ids("build_dispatch", call.described["ids"], num_experts)
        max_slots = checks.max_slots("build_dispatch", max_slots, call.described["ids"].size)
        if call.on_cpu:
            index = _map_index(reference.dispatch(call.host("ids"), num_experts, max_slots), call.export)
            # The caller's own array, as the view of it may be read-only, of which DLPack makes a copy.
            return index if index.ids_copied or call.export is keep else dataclasses.replace(index, ids=ids)
        (layout,), pointers, export, (kept,) = call.layout("ids"), call.pointers(), call.export, call.owners()
        found = runtime.keep(key, call.prepared(dispatch.configure(layout, num_experts, call.limits, max_slots)))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        lists, copy, _ = dispatch.dispatch(run, found.steps, pointers[0])
        return _map_index(_index(found.steps, lists, copy, kept), export)


def _index(steps: dispatch.Dispatch, lists: arrays.Buffer, copy: arrays.Buffer | None, ids: Any) -> DispatchIndices:
    index = steps.index
    kept = copy.array if copy else ids
    return DispatchIndices(lists.array, kept, index.places, index.num_experts, steps.copies_ids, index.max_slots)


@overload
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str = "swiglu",
    save: str = "minimal",
    max_slots: int | None = None,
    spare_multiprocessors: int = 0,
) -> tuple[Any, SavedForBackward]: ...


@overload
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str = "swiglu",
    save: None,
    max_slots: int | None = None,
    spare_multiprocessors: int = 0,
) -> tuple[Any, None]: ...


def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str = "swiglu",
    save: str | None = "minimal",
    max_slots: int | None = None,
    spare_multiprocessors: int = 0,
) -> tuple[Any, SavedForBackward | None]:
    """out[t] = sum over slots j of weights[t, j] * expert ids[t, j] of x[t] (paper sections 2.3, 3.1, 5).

    x: (L, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. ids: (L, k) int32 or int64, see
    `build_dispatch`. weights: (L, k) float32 or x's dtype.
    w1: (E, d, 2h), gate columns then up columns, for activation swiglu, geglu or reglu, or a pair (gate, up) of
    (E, d, h); (E, d, h) for silu, gelu (exact) and relu. w2: (E, h, d). Both in x's dtype, read in place,
    row-major or as the transposed view of (E, 2h, d) / (E, d, h) storage.
    save: "minimal" keeps a, b; "paper" also act(a) * b (Algorithm 1); "recompute" only x; None nothing.
    max_slots: None, or a bound of the slots that are present, from 1 to L*k. All buffers in expert order but the index
    lists then have so many rows in place of L*k. Slots past it count as absent; saved.index.dropped says how many.
    spare_multiprocessors: how many of the GPU's multiprocessors the experts' products leave to other work, such as
    kernels of NCCL; of the portable kernels dispatch alone does. On the CPU it says nothing.
    Returns out (L, d) in x's dtype and SavedForBackward (None for save=None).
    x, ids, weights, w1 and w2 are kept by reference: whoever changes one in place before backward, as by x += out,
    gets wrong gradients. Where 2h = d (w1) or h = d (w2), storage order has the same shape and cannot be told apart.
    A NaN in x reaches its token's output and its gradients of weights, w1, w2 and x, but for "relu" not that of x.
    Raises TypeError (dtype, device, framework), ValueError (shape, memory order, names), or RuntimeError
    where CUDA arrays meet no CuPy, no usable driver or a GPU before sm_80, and of torch tensors that autograd or a
    transform of torch would have to follow: for those use `moeblaze_cupy.interop.torch`.
    """
    w1_by_name = _named_pair("moe_forward", "w1", w1)
    named = {"x": x, "ids": ids, "weights": weights, "w2": w2, **w1_by_name}
    given: Sequence[Any] = tuple(named.values())
    options = activation, save, max_slots, spare_multiprocessors
    key, pointers = runtime.key_of("moe_forward", options, given)
    export: Export = keep
    found = runtime.find(key)  # a record says that such arguments have passed all checks
    if found is None:
        checks.untracked("moe_forward", named)
        call = Call("moe_forward", **named)
        d = call.described
        w1_arrays = tuple(d[name] for name in w1_by_name)
        checks.layer("moe_forward", d["x"], d["ids"], d["weights"], w1_arrays, d["w2"], activation, save)
        max_slots = checks.max_slots("moe_forward", max_slots, d["ids"].size)
        limits = _spared("moe_forward", call, spare_multiprocessors)
        if limits is None:
            out, saved = _forward_on_cpu(call, tuple(w1_by_name), activation, save, max_slots)
            if saved is not None and call.framework is arrays.Torch:
                own = {"x": x, "weights": weights, "w1": one_or_pair(tuple(w1_by_name.values())), "w2": w2}
                saved = dataclasses.replace(saved, **own)
            return out, saved
        x_layout, ids_layout, weights_layout, w2_layout, *w1_layouts = call.layout(*named)
        layouts = x_layout, ids_layout, weights_layout, w2_layout, tuple(w1_layouts)
        steps = experts.configure_forward(*layouts, activation, save, limits, max_slots)
        given, pointers, export = call.owners(), call.pointers(), call.export
        found = runtime.keep(key, call.prepared(steps))
    steps = found.steps
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        x_ptr, ids_ptr, weights_ptr, w2_ptr, *w1_ptrs = pointers
        result = experts.moe_forward(run, steps, x_ptr, ids_ptr, weights_ptr, w2_ptr, tuple(w1_ptrs))
        out = export(result.out.array)
        if save is None:
            return out, None
        x, ids, weights, w2, *w1_parts = given
        index = _index(steps.dispatch, result.lists, result.ids, ids)
        first_layer = result.first_layer.array if result.first_layer else None
        y_swi = result.y_swi.array if result.y_swi else None
        w1 = one_or_pair(tuple(w1_parts))
        return out, SavedForBackward(x, weights, w1, w2, index, first_layer, y_swi, activation, save)


def _spared(function: str, call: Call, spare_multiprocessors: int) -> launch_config.DeviceLimits | None:
    """The limits of a call's launches; None on the CPU."""
    limits = None if call.on_cpu else call.limits
    spare = checks.spare_multiprocessors(function, spare_multiprocessors, limits)
    return None if limits is None else launch_config.spared(limits, spare)


def _forward_on_cpu(
    call: Call, w1_names: tuple[str, ...], activation: str, save: str | None, max_slots: int | None
) -> tuple[Any, SavedForBackward | None]:
    host = {name: call.host(name) for name in call.described}
    w1 = one_or_pair(tuple(host[name] for name in w1_names))
    x, ids, weights, w2 = (host[name] for name in ("x", "ids", "weights", "w2"))
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, activation=activation, save=save, max_slots=max_slots)
    if saved is not None and call.framework is arrays.Torch:
        saved = _map_saved(saved, call.export)
    return call.export(out), saved


def moe_backward(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] = GRADIENTS,
    keep_saved: bool = False,
    accumulate: Mapping[str, Any] | None = None,
    spare_multiprocessors: int = 0,
) -> Gradients:
    """Gradients of `moe_forward` (paper section 3.2; Algorithm 1, lines 15-31).

    grad_out: (L, d), x's dtype, contiguous. needs: which of "x", "weights", "w1", "w2" to compute; the
    others stay None and their kernels do not run.
    On CUDA the saved activations are overwritten by their own gradients unless `keep_saved`; a second
    backward over them raises RuntimeError, on the CPU too. With save="recompute" there are none to overwrite.
    accumulate: NumPy, CuPy or torch arrays that the gradients of w1, w2 or both are added to, {"w2": total}, of the
    weight's shape, a pair for a pair, in float32 or the weights' dtype, in either memory order of the weights. The
    products' float32 sums are added unrounded, and the total is rounded once to the array's dtype. No other
    memory is taken for these gradients, but while backward runs up to 66 MiB for those of few large experts, and
    nothing of experts without tokens is written. They share no memory with each other or with what backward reads;
    views of one buffer may lie among each other. If backward fails, say for want of memory, some may have been added.
    spare_multiprocessors: as of `moe_forward`.
    Returns Gradients: x (L, d), weights (L, k) (0 for empty slots), w1 and w2 in the form, dtype and
    memory order of the weights, exactly zero for experts without tokens; or the very arrays of `accumulate`.
    Raises TypeError, ValueError or RuntimeError as `moe_forward` does, and RuntimeError for a second backward.
    """
    return _backward("moe_backward", grad_out, saved, needs, keep_saved, accumulate, spare_multiprocessors)[0]


def moe_backward_data(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] = ("x", "weights"),
    keep_saved: bool = False,
    spare_multiprocessors: int = 0,
) -> tuple[Gradients, PendingWeights]:
    """The first half of `moe_backward`: the gradients of x and weights, before those of w1 and w2.

    The gradient of x can then travel to other GPUs while `moe_backward_weights` computes, or a pipeline's stage can
    hand it on and compute the gradients of its weights in a bubble. The halves give the bits of the whole.
    grad_out, saved, keep_saved, spare_multiprocessors: as of `moe_backward`. needs: "x", "weights", both or none.
    Between the halves the saved activations' gradients stay in memory, and with them (R, h) of weighted act(a) * b,
    R being L*k or max_slots. grad_out and saved.x are read again, so they must not change.
    Returns Gradients, of which w1 and w2 are None, and PendingWeights.
    Raises TypeError, ValueError or RuntimeError as `moe_backward` does.
    """
    for name in (needs := checks.gradient_names("moe_backward_data", needs)):
        checks.one_of("moe_backward_data", "needs", name, ("x", "weights"))
    all_needs = (*needs, "w1", "w2")
    grads, pending = _backward(
        "moe_backward_data", grad_out, saved, all_needs, keep_saved, None, spare_multiprocessors, defers_weights=True
    )
    assert pending is not None
    return grads, pending


def moe_backward_weights(
    pending: PendingWeights,
    *,
    needs: tuple[str, ...] = ("w1", "w2"),
    accumulate: Mapping[str, Any] | None = None,
    spare_multiprocessors: int = 0,
) -> Gradients:
    """The second half of `moe_backward`: the gradients of w1 and w2, after `moe_backward_data`.

    pending: what that returned, which is taken once. needs: "w1", "w2" or both. accumulate, spare_multiprocessors: as
    of `moe_backward`. It runs on the current stream, which must come after that of the first half.
    Returns Gradients, of which x and weights are None.
    Raises TypeError, ValueError or RuntimeError as `moe_backward` does, and RuntimeError for a pending taken before.
    """
    function = "moe_backward_weights"
    if not isinstance(pending, PendingWeights):
        raise checks.bad_type(function, "pending", "PendingWeights from moe_backward_data", type(pending))
    for name in (needs := checks.gradient_names(function, needs)):
        checks.one_of(function, "needs", name, ("w1", "w2"))
    if pending.consumed:
        raise RuntimeError(f"{function}: pending: expected gradients that are still to be taken, got ones taken before")
    grad_out, saved = pending.grad_out, pending.saved
    buffers = _buffers(function, accumulate, needs, saved) if accumulate is not None else {}
    parts = {part: array for of_weight in buffers.values() for part, array in of_weight.items()}
    call = Call(function, **{"saved.x": saved.x}, grad_out=grad_out, **parts)
    for name, of_weight in buffers.items():
        shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
        checks.accumulated(
            function, {part: call.described[part] for part in of_weight}, shapes, call.described["saved.x"].dtype
        )
    describe = call.framework.describe
    if parts:
        _check_apart(function, call.framework, grad_out, saved, parts)
        left = {"pending.first_layer_grad": pending.first_layer_grad, "pending.weighted_y_swi": pending.weighted_y_swi}
        kept = {name: describe(array) for name, array in left.items() if array is not None}
        checks.apart(function, kept, {part: call.described[part] for part in parts})
    limits = _spared(function, call, spare_multiprocessors)
    pending.consumed = True
    if limits is None:
        host_saved = _map_saved(saved, call.framework.to_numpy) if call.framework is arrays.Torch else saved
        totals = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
        host = reference.moe_backward(call.host("grad_out"), host_saved, needs=needs, accumulate=totals)
        w1, w2 = (None if g is None else pair(g) for g in (host.w1, host.w2))
        return _export_gradients(call.export, accumulate, None, None, w1, w2)
    index = saved.index
    w1_layouts = tuple(describe(part).layout for part in pair(saved.w1))
    lists = describe(index.lists)
    read = {name: describe(getattr(pending, name)) for name in ("first_layer_grad", "weighted_y_swi")}
    steps = experts.configure_weights(
        call.described["grad_out"].layout,
        call.described["saved.x"].layout,
        describe(saved.w2).layout,
        w1_layouts,
        read["first_layer_grad"].layout,
        read["weighted_y_swi"].layout,
        tuple((name, tuple(call.layout(*names))) for name, names in buffers.items()),
        saved.activation,
        needs,
        limits,
        IndexLayout(index.num_tokens, index.k, index.num_experts, index.max_slots),
    )
    prepared = call.prepared(steps)
    with current_device(prepared.device):
        grads = experts.moe_backward_weights(
            Runtime.current(prepared.framework, prepared.device),
            steps,
            call.described["grad_out"].ptr,
            call.described["saved.x"].ptr,
            lists.ptr,
            read["first_layer_grad"].ptr,
            read["weighted_y_swi"].ptr,
            {name: tuple(call.described[part].ptr for part in names) for name, names in buffers.items()},
        )
        w1, w2 = (None if g is None else tuple(buffer.array for buffer in g) for g in (grads.w1, grads.w2))
        return _export_gradients(call.export, accumulate, None, None, w1, w2)


def _backward(
    function: str,
    grad_out: Any,
    saved: SavedForBackward,
    needs: tuple[str, ...],
    keep_saved: bool,
    accumulate: Mapping[str, Any] | None,
    spare_multiprocessors: int,
    defers_weights: bool = False,
) -> tuple[Gradients, PendingWeights | None]:
    """`moe_backward`, or its first half; `function` is the one that messages name."""
    if not isinstance(saved, SavedForBackward):
        raise checks.bad_type(function, "saved", "SavedForBackward from moe_forward (save is not None)", type(saved))
    needs = checks.gradient_names(function, needs)
    options = bool(keep_saved), spare_multiprocessors, defers_weights
    key, given, pointers = _backward_key(grad_out, saved, needs, options, accumulate)
    export: Export = keep
    found = runtime.find(key)
    if found is not None:
        checks.not_consumed(function, saved)
        totals_given = sum(len(pair(total)) for total in (accumulate or {}).values())
        strides_in_bytes = found.framework is arrays.CuPy
        if totals_given and key and checks.ranges_meet(strides_in_bytes, key[-len(given) :], pointers, totals_given):
            buffers = _buffers(function, accumulate, needs, saved)
            parts = {part: array for parts in buffers.values() for part, array in parts.items()}
            _check_apart(function, found.framework, grad_out, saved, parts)
    else:
        tracked = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
        checks.untracked(function, tracked | _named_pair(function, "saved.w1", saved.w1))
        buffers = _buffers(function, accumulate, needs, saved) if accumulate is not None else {}
        parts = {part: array for parts in buffers.values() for part, array in parts.items()}
        call = Call(function, **{"saved.x": saved.x}, grad_out=grad_out, **parts)
        d = call.described
        checks.layer_backward(function, d["grad_out"], d["saved.x"], saved)
        for name, of_weight in buffers.items():
            shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
            checks.accumulated(function, {part: d[part] for part in of_weight}, shapes, d["saved.x"].dtype)
        if parts:
            _check_apart(function, call.framework, d["grad_out"].owner, saved, parts)
        limits = _spared(function, call, spare_multiprocessors)
        if limits is None:
            saved.consumed = is_consumed(saved.first_layer is not None, saved.y_swi is not None, needs, keep_saved)
            host_saved = _map_saved(saved, call.framework.to_numpy) if call.framework is arrays.Torch else saved
            host_buffers = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
            now = tuple(name for name in needs if name in ("x", "weights")) if defers_weights else needs
            on_host = reference.moe_backward(call.host("grad_out"), host_saved, needs=now, accumulate=host_buffers)
            w1, w2 = (None if g is None else pair(g) for g in (on_host.w1, on_host.w2))
            exported = _export_gradients(call.export, accumulate, on_host.x, on_host.weights, w1, w2)
            return exported, PendingWeights(grad_out, saved) if defers_weights else None
        given[0], export = d["grad_out"].owner, call.export
        described = [call.framework.describe(array) for array in given]
        pointers = [array.ptr for array in described]
        layouts = [array.layout for array in described]
        *inputs, _, first_layer, y_swi, totals = _backward_values(saved, accumulate, layouts, None)
        grad_layout, x_layout, weights_layout, w2_layout, w1_layouts = inputs
        steps = experts.configure_backward(
            grad_layout,
            x_layout,
            weights_layout,
            w2_layout,
            w1_layouts,
            first_layer,
            y_swi,
            tuple(totals.items()),
            saved.activation,
            needs,
            bool(keep_saved),
            limits,
            saved.index.max_slots,
            defers_weights,
        )
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        grads = experts.moe_backward(run, found.steps, saved, *_backward_values(saved, accumulate, pointers, 0))
        exported = _export_gradients(
            export,
            accumulate,
            grads.x and grads.x.array,
            grads.weights and grads.weights.array,
            grads.w1 and tuple(buffer.array for buffer in grads.w1),
            grads.w2 and tuple(buffer.array for buffer in grads.w2),
        )
        if not defers_weights:
            return exported, None
        first_layer_grad = grads.first_layer_grad.array if grads.first_layer_grad else saved.first_layer
        weighted = grads.weighted_y_swi.array if grads.weighted_y_swi else saved.y_swi
        return exported, PendingWeights(grad_out, saved, first_layer_grad, weighted)


def _backward_key(
    grad_out: Any, saved: SavedForBackward, needs: tuple[str, ...], options: tuple[Any, ...], accumulate: Any
) -> tuple[Key | None, list[Any], list[int]]:
    """As `runtime.key_of`, with the arrays between, in the order of `_backward_values`."""
    totals = {} if accumulate is None else accumulate
    if not isinstance(totals, Mapping):
        return None, [], []
    w1, kept = pair(saved.w1), [array for array in (saved.first_layer, saved.y_swi) if array is not None]
    given = [grad_out, saved.x, saved.weights, saved.w2, saved.index.lists, *w1, *kept]
    forms = [len(w1), saved.first_layer is None, saved.y_swi is None]  # tell which of these is what
    for name, total in totals.items():
        parts = pair(total)
        given += parts
        forms += name, len(parts)
    key, pointers = runtime.key_of(
        "moe_backward", (saved.activation, needs, *options, saved.index.max_slots, *forms), given
    )
    return key, given, pointers


def _backward_values(
    saved: SavedForBackward, accumulate: Mapping[str, Any] | None, values: Sequence[Any], absent: Any
) -> tuple[Any, ...]:
    """What `values` says of the arrays of `_backward_key`, in the order of experts.moe_backward."""
    end = 5 + len(pair(saved.w1))
    w1 = tuple(values[5:end])
    first_layer = y_swi = absent
    if saved.first_layer is not None:
        first_layer, end = values[end], end + 1
    if saved.y_swi is not None:
        y_swi, end = values[end], end + 1
    totals = {}
    for name, total in (accumulate or {}).items():
        start, end = end, end + len(pair(total))
        totals[name] = tuple(values[start:end])
    return *values[:4], w1, values[4], first_layer, y_swi, totals


def _export_gradients(
    export: Export,
    accumulate: Mapping[str, Any] | None,
    x: Any,
    weights: Any,
    w1: tuple[Any, ...] | None,
    w2: tuple[Any, ...] | None,
) -> Gradients:
    """In the caller's kind; what was accumulated is the caller's own."""
    if export is keep and not accumulate:
        return Gradients(x, weights, w1 and one_or_pair(w1), w2 and one_or_pair(w2))
    own = accumulate or {}

    def one(array: Any) -> Any:
        return None if array is None else export(array)

    def parts(name: str, given: tuple[Any, ...] | None) -> Any:
        return own[name] if name in own else None if given is None else one_or_pair(tuple(map(export, given)))

    return Gradients(one(x), one(weights), parts("w1", w1), parts("w2", w2))
