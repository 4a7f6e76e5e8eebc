"""Backward of the layer, whole or in two halves: check arguments, choose NumPy or CUDA, hand back the caller's kind."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import arrays, checks, fp8_checks, overlaps, reference, runtime
from moeblaze_cupy.arrays import Array, Buffer, Export, Framework, Layout
from moeblaze_cupy.call import Call, keep, untraced
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.layer import map_saved, named_pair, values_and_scales, w1_b1_b2
from moeblaze_cupy.ops import backward, fp8, weight_gradients
from moeblaze_cupy.ops.dispatch import IndexLayout
from moeblaze_cupy.ops.grouped_gemm import Summed
from moeblaze_cupy.ops.push import Destination
from moeblaze_cupy.runtime import Key, Runtime, current_device
from moeblaze_cupy.structures import (
    GRADIENTS,
    DispatchIndices,
    Fp8Weights,
    Gradients,
    PendingWeights,
    SavedForBackward,
    gate_and_up,
    is_consumed,
    one_or_pair,
    pair,
)

Parts = dict[str, dict[str, Any]]  # of a weight or bias by name: its arrays by argument name


def _buffers(function: str, accumulate: Any, needs: tuple[str, ...], saved: SavedForBackward) -> Parts:
    """The arrays of `accumulate` by argument name, for each weight or bias that has one, in its form: one or a pair."""
    if accumulate is None:
        return {}
    checks.accumulated_names(function, accumulate, needs, saved.gradients)
    found: Parts = {}
    for name, given in accumulate.items():
        if given is None:
            raise checks.bad_type(function, f"accumulate[{name!r}]", "a NumPy, CuPy or torch array", type(given))
        argument, wanted = f"accumulate[{name!r}]", len(pair(getattr(saved, name)))
        found[name] = named_pair(function, argument, given)
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


def _arrays(buffers: Parts) -> dict[str, Any]:
    """All arrays of `_buffers` by argument name."""
    return {name: array for parts in buffers.values() for name, array in parts.items()}


def _check_accumulated(call: Call, buffers: Parts, saved: SavedForBackward) -> None:
    for name, parts in buffers.items():
        shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
        described = {part: call.described[part] for part in parts}
        checks.accumulated(call.function, described, shapes, call.described["saved.x"].dtype)


def _check_rows(call: Call, saved: SavedForBackward, grad_scales: Any) -> None:
    """Of x and grad_out in e4m3, which are then described as what they stand for."""
    of_e4m3 = {"saved.x": saved.x_scales, "grad_out": grad_scales}
    for name, scales in of_e4m3.items():
        if scales is not None:
            array = call.described[name]
            given = {f"{name}.scales": scales, "saved.w2": saved.w2}
            of_scales, w2 = described_by_name(call.function, call.framework, given).values()
            fp8_checks.rows(call.function, name, array, of_scales)
            call.described[name] = dataclasses.replace(array, dtype=w2.dtype)


def _on_host(call: Call, saved: SavedForBackward, grad_scales: Any) -> tuple[reference.HostArray, SavedForBackward]:
    """grad_out and what was saved as NumPy arrays, rows in e4m3 as the numbers they stand for."""
    host = saved
    if call.framework is arrays.Torch:
        if saved.fp8_weights is not None:
            _in_e4m3(call.function, call.framework, saved.fp8_weights)  # the rest has been described
        host = map_saved(saved, call.framework.to_numpy)
    grad_out, dtype = call.host("grad_out"), np.asarray(host.w2).dtype
    if grad_scales is not None:
        scales = arrays.Torch.to_numpy(grad_scales) if call.framework is arrays.Torch else grad_scales
        grad_out = reference.fp8.dequantize(grad_out, scales, dtype)
    if saved.x_scales is not None:
        x = reference.fp8.dequantize(host.x, host.x_scales, dtype)
        host = dataclasses.replace(host, x=x, x_scales=None)
    return grad_out, host


def described_by_name(function: str, framework: Framework, given: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays that there are, by argument name. Raises for one that cannot be read, such as a freed tensor."""
    found = {}
    for name, array in given.items():
        if array is not None:
            try:
                found[name] = framework.describe(array)
            except (TypeError, RuntimeError) as error:
                raise checks.unreadable(function, name, error) from error
    return found


def _read(function: str, framework: Framework, grad_out: Any, saved: SavedForBackward) -> dict[str, Array]:
    """What backward reads, by argument name; rows in e4m3 without their scales."""
    read = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    read |= named_pair(function, "saved.w1", saved.w1)
    read |= named_pair(function, "saved.b1", saved.b1) | {"saved.b2": saved.b2}
    read |= {"saved.first_layer": saved.first_layer, "saved.y_swi": saved.y_swi}
    read |= {"saved.index.lists": saved.index.lists}
    return described_by_name(function, framework, read)


def _in_e4m3(function: str, framework: Framework, weights: Fp8Weights) -> dict[str, Array]:
    """Its arrays by argument name, in the order of `fp8_checks.FIELDS`."""
    fields = zip(fp8_checks.NAMES, fp8_checks.FIELDS, strict=True)
    return described_by_name(function, framework, {name: getattr(weights, field) for name, field in fields})


def _check_apart(
    function: str,
    framework: Framework,
    read: dict[str, Array],
    saved: SavedForBackward,
    buffers: Mapping[str, Any],
) -> None:
    """Checks that `buffers`, to which gradients are added, share no memory with what backward reads, or each other."""
    read = read | described_by_name(function, framework, {"saved.index.ids": saved.index.ids})
    overlaps.apart(function, read, described_by_name(function, framework, buffers))


@untraced
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
    "b1", "b2" to compute. The others are None, and their kernels do not run. None asks for all that the layer has: b1
    and b2 only with such a bias, weights only if it has some.
    On CUDA the saved activations are overwritten by their own gradients unless `keep_saved`; a second
    backward over them raises RuntimeError, on the CPU too. With save="recompute" or "fp8" there are none to overwrite.
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
    return backward_into(None, "moe_backward", grad_out, saved, needs, keep_saved, accumulate)[0]


@untraced
def moe_backward_data(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] = ("x", "weights"),
    keep_saved: bool = False,
) -> tuple[Gradients, PendingWeights]:
    """The first half of `moe_backward`: the gradients of x and weights, before those of w1 and w2.

    The gradient of x can then travel to other GPUs while `moe_backward_weights` computes, or a pipeline's stage can
    hand it on and compute the gradients of its weights in a bubble. The halves give the bits of the whole.
    grad_out, saved, keep_saved: as of `moe_backward`. needs: "x", "weights", both or none.
    Between the halves the saved activations' gradients stay in memory, and with them (R, h) of weighted act(a) * b,
    R being L*k or max_slots. grad_out and saved.x are read again, so they must not change.
    Returns Gradients, of which w1 and w2 are None, and PendingWeights.
    Raises TypeError, ValueError or RuntimeError as `moe_backward` does, and ValueError for a layer with biases.
    """
    needs = checks.gradient_names("moe_backward_data", needs, ("x", "weights"))
    all_needs = (*needs, "w1", "w2")
    options: tuple[Any, ...] = all_needs, keep_saved, None, True
    grads, pending = backward_into(None, "moe_backward_data", grad_out, saved, *options)
    assert pending is not None
    return grads, pending


@untraced
def moe_backward_weights(
    pending: PendingWeights,
    *,
    needs: tuple[str, ...] = ("w1", "w2"),
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """The second half of `moe_backward`: the gradients of w1 and w2, after `moe_backward_data`.

    pending: what that returned, which is taken once. needs: "w1", "w2" or both. accumulate: as of
    `moe_backward`. It runs on the current stream, which must come after that of the first half.
    Returns Gradients, of which x and weights are None.
    Raises TypeError, ValueError or RuntimeError as `moe_backward` does, and RuntimeError for a pending taken before.
    """
    function = "moe_backward_weights"
    if not isinstance(pending, PendingWeights):
        raise checks.bad_type(function, "pending", "PendingWeights from moe_backward_data", type(pending))
    needs = checks.gradient_names(function, needs, ("w1", "w2"))
    if pending.consumed:
        raise RuntimeError(f"{function}: pending: expected gradients that are still to be taken, got ones taken before")
    grad_out, saved = pending.grad_out, pending.saved
    buffers = _buffers(function, accumulate, needs, saved)
    parts = _arrays(buffers)
    call = Call(function, **{"saved.x": saved.x}, grad_out=grad_out, **parts)
    grad_layout, x_layout = call.layout("grad_out", "saved.x")
    _check_rows(call, saved, pending.grad_scales)
    _check_accumulated(call, buffers, saved)
    read = _read(function, call.framework, call.described["grad_out"].owner, saved) if parts or call.on_cpu else {}
    if parts:
        _check_apart(function, call.framework, read, saved, parts)
        left = {"pending.first_layer_grad": pending.first_layer_grad, "pending.weighted_y_swi": pending.weighted_y_swi}
        kept = described_by_name(function, call.framework, left)
        overlaps.apart(function, kept, {part: call.described[part] for part in parts})
    limits = None if call.on_cpu else call.limits
    pending.consumed = True
    if limits is None:
        host_grad, host_saved = _on_host(call, saved, pending.grad_scales)
        totals = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
        host = reference.moe_backward(host_grad, host_saved, needs=needs, accumulate=totals)
        return _exported(call.export, accumulate, host)
    accumulated = tuple((name, tuple(call.layout(*names))) for name, names in buffers.items())
    steps, addresses = _configured(call, pending, grad_layout, x_layout, needs, limits, accumulated)
    prepared, describe = call.prepared(steps), call.framework.describe
    with current_device(prepared.device):
        grads = weight_gradients.moe_backward_weights(
            Runtime.current(prepared.framework, prepared.device),
            steps,
            *addresses,
            {name: tuple(call.described[part].ptr for part in names) for name, names in buffers.items()},
            *(0 if scales is None else describe(scales).ptr for scales in (saved.x_scales, pending.grad_scales)),
        )
        return _exported(call.export, accumulate, grads)


def _configured(
    call: Call,
    pending: PendingWeights,
    grad_out: Layout,
    x: Layout,
    needs: tuple[str, ...],
    limits: DeviceLimits,
    accumulated: tuple[tuple[str, tuple[Layout, ...]], ...] = (),
    sums: tuple[tuple[str, Layout], ...] = (),
    summed: Summed | None = None,
) -> tuple[weight_gradients.Weights, tuple[int, int, int, int, int]]:
    """The launches of `weight_gradients.configure_weights`, and the addresses of what all of them read.

    grad_out, x: as they are in memory.
    """
    saved = pending.saved
    given = {"saved.index.lists": saved.index.lists, "saved.w2": saved.w2}
    given |= {"pending.first_layer_grad": pending.first_layer_grad, "pending.weighted_y_swi": pending.weighted_y_swi}
    given |= named_pair(call.function, "saved.w1", saved.w1)
    lists, w2, first_layer_grad, weighted, *w1 = described_by_name(call.function, call.framework, given).values()
    steps = weight_gradients.configure_weights(
        grad_out,
        x,
        w2.layout,
        tuple(part.layout for part in w1),
        first_layer_grad.layout,
        weighted.layout,
        accumulated,
        saved.activation,
        saved.gate_up,
        needs,
        limits,
        _index_layout(saved.index),
        saved.slots,
        sums,
        summed,
    )
    rows = call.described["grad_out"].ptr, call.described["saved.x"].ptr
    return steps, (*rows, lists.ptr, first_layer_grad.ptr, weighted.ptr)


def summed_weights(
    pending: PendingWeights,
    needs: tuple[str, ...],
    ranks: Sequence[int],
    scale: float,
    totals: Mapping[str, Any],
    others: Mapping[str, Any],
    at: Mapping[str, Mapping[int, Any]],
    tell: Callable[[str], None],
    wait: Callable[[str], None],
) -> bool:
    """The second half of `moe_backward` where ranks with the same weights own E / P experts each, in order.

    The gradients of other ranks' experts are stored in the memory of those ranks. Those of this one's are added to
    what the others have stored, and the sum is scaled and rounded once.
    pending: what `moe_backward_data` returned. needs: "w1", "w2" or both; w1 is one array. ranks: this one, then the
    others, 8 at most. totals: by name, arrays (E / P, ...) in the memory order of the weights, in their dtype or
    float32. others: by name, arrays (P - 1, E / P, ...) of this rank, in the weights' dtype. at: by name and other
    rank, the array among the `others` of that rank that is this rank's. tell: tells the other ranks, on the current
    stream, that "w1" or "w2" is stored. wait: has the stream wait until all have.
    Returns False, and does nothing, where Hopper's kernels do not serve: without a GPU or tokens, say.
    """
    function = "moe_backward"
    call = Call(function, **{"saved.x": pending.saved.x}, grad_out=pending.grad_out)
    limits = None if call.on_cpu else call.limits
    if limits is None:
        return False
    describe = call.framework.describe
    sums = {name: describe(totals[name]) for name in needs}
    layouts = tuple((name, described.layout) for name, described in sums.items())
    grad_layout, x_layout = call.layout("grad_out", "saved.x")
    summed = Summed(len(ranks) - 1, scale)
    steps, read = _configured(call, pending, grad_layout, x_layout, needs, limits, sums=layouts, summed=summed)
    if not steps.are_hoppers:
        return False
    to = {}
    for name in needs:
        places = {rank: describe(array).ptr for rank, array in at[name].items()}
        to[name] = weight_gradients.OfRanks(sums[name].ptr, describe(others[name]).ptr, places)
    prepared = call.prepared(steps)
    pending.consumed = True
    with current_device(prepared.device):
        weight_gradients.summed_weights(
            Runtime.current(prepared.framework, prepared.device),
            steps,
            *read,
            ranks,
            to,
            tell,
            wait,
        )
    return True


def backward_into(
    grad_x: Any,
    function: str,
    grad_out: Any,
    saved: SavedForBackward,
    needs: tuple[str, ...] | None,
    keep_saved: bool,
    accumulate: Mapping[str, Any] | None,
    defers_weights: bool = False,
    wait: Callable[[], None] | None = None,
) -> tuple[Gradients, PendingWeights | None]:
    """`moe_backward`, or its first half; `function` is the one that messages name.

    grad_x: None, or what the gradient of x is to be on CUDA: of out's shape, dtype and kind, and aligned. It may be a
    `Destination` of rows of d columns, a multiple of 8; the gradient is then None on CUDA. grad_out: may be `Fp8Rows`
    of a layer with precision="fp8", as saved.x may be by saved.x_scales; the gradients of weights are then
    deferred, or not needed. wait: has the stream wait for rows of grad_out that are on their way; None where all are
    here.
    """
    grad_out, grad_scales = values_and_scales(grad_out)
    if not isinstance(saved, SavedForBackward):
        raise checks.bad_type(function, "saved", "SavedForBackward from moe_forward (save is not None)", type(saved))
    needs = checks.gradient_names(function, needs, saved.gradients)
    if defers_weights and saved.gradients != GRADIENTS:
        given_biases = " and ".join(saved.gradients[len(GRADIENTS) :])
        raise checks.bad_value(function, "saved", "a layer without biases, which moe_backward serves", given_biases)
    in_e4m3 = saved.x_scales is not None, grad_scales is not None
    if any(in_e4m3) and not (defers_weights or {"w1", "w2"}.isdisjoint(needs)):
        expected = "'x' and 'weights' alone of rows in e4m3, before the gradients of weights"
        raise checks.bad_value(function, "needs", expected, needs)
    to = grad_x if isinstance(grad_x, Destination) else None
    place = to.place if to else None
    options = bool(keep_saved), defers_weights, in_e4m3, place
    key, given, pointers = _backward_key(grad_out, saved, needs, options, accumulate)
    export: Export = keep
    found = runtime.find(key)
    if found is not None:
        checks.not_consumed(function, saved)
        if accumulate and key:
            totals, strides_in_bytes = len(given) - _READ, found.framework is arrays.CuPy
            if overlaps.ranges_meet(strides_in_bytes, key[-len(given) :], pointers, totals):
                buffers = _buffers(function, accumulate, needs, saved)
                read = _read(function, found.framework, grad_out, saved)
                _check_apart(function, found.framework, read, saved, _arrays(buffers))
    else:
        tracked = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
        for name in ("w1", "b1", "b2"):
            tracked |= named_pair(function, f"saved.{name}", getattr(saved, name))
        checks.untracked(function, tracked)
        buffers = _buffers(function, accumulate, needs, saved)
        parts = _arrays(buffers)
        call = Call(function, **{"saved.x": saved.x}, grad_out=grad_out, **parts)
        d = call.described
        read = _read(function, call.framework, d["grad_out"].owner, saved)
        _check_rows(call, saved, grad_scales)
        checks.layer_backward(function, d["grad_out"], d["saved.x"], saved)
        _check_accumulated(call, buffers, saved)
        if parts:
            _check_apart(function, call.framework, read, saved, parts)
        limits = None if call.on_cpu else call.limits
        if limits is None:
            if wait is not None:
                wait()
            saved.consumed = is_consumed(saved.is_overwritable, saved.y_swi is not None, needs, keep_saved)
            host_grad, host_saved = _on_host(call, saved, grad_scales)
            host_buffers = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
            now = tuple(name for name in needs if name in ("x", "weights")) if defers_weights else needs
            on_host = reference.moe_backward(host_grad, host_saved, needs=now, accumulate=host_buffers)
            exported = _exported(call.export, accumulate, on_host)
            return exported, PendingWeights(grad_out, saved, grad_scales=grad_scales) if defers_weights else None
        given = d["grad_out"].owner, *given[1:]
        described = [None if array is None else call.framework.describe(array) for array in given]
        pointers, export = [array.ptr if array else 0 for array in described], call.export
        layouts: list[Any] = [array and array.layout for array in described]
        grad_layout, x_layout, weights_layout, _, _, w2_layout, *_, first_layer, y_swi = layouts[:_READ]
        w1_layouts, b1_layouts, b2_layouts = w1_b1_b2(layouts)
        steps = backward.configure_backward(
            grad_layout,
            x_layout,
            weights_layout,
            w2_layout,
            w1_layouts,
            b1_layouts,
            b2_layouts,
            first_layer,
            y_swi,
            tuple(_totals(accumulate, layouts).items()),
            saved.activation,
            saved.gate_up,
            needs,
            bool(keep_saved),
            limits,
            _index_layout(saved.index),
            saved.slots,
            defers_weights,
            saved.precision,
            place,
        )
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        into = _totals(accumulate, pointers) if accumulate else {}
        of_x = None if grad_x is None or to else Buffer(grad_x, found.framework.describe(grad_x).ptr)
        weights_fp8 = None
        if saved.fp8_weights is not None:
            described_fp8 = _in_e4m3(function, found.framework, saved.fp8_weights)
            weights_fp8 = fp8.Addresses(*(array.ptr for array in described_fp8.values()))
        options_of_run: dict[str, Any] = {"grad_x": of_x, "weights_fp8": weights_fp8, "wait": wait}
        for name, scales in (("x_scales", saved.x_scales), ("grad_scales", grad_scales)):
            if scales is not None:
                options_of_run[name] = found.framework.describe(scales).ptr
        if to:
            options_of_run["to"] = to.addresses(found.framework)
        made = backward.moe_backward(run, found.steps, saved, into, *pointers[:_READ], **options_of_run)
        grads, first_layer_grad, weighted = made
        exported = _exported(export, accumulate, grads)
        if not defers_weights:
            return exported, None
        first_layer_grad = saved.first_layer if first_layer_grad is None else first_layer_grad
        weighted = saved.y_swi if weighted is None else weighted
        return exported, PendingWeights(grad_out, saved, first_layer_grad, weighted, grad_scales=grad_scales)


_READ = 12  # arrays of `_backward_key` before those that gradients are added to: what `backward.moe_backward` reads


def _backward_key(
    grad_out: Any, saved: SavedForBackward, needs: tuple[str, ...], of_call: tuple[Any, ...], accumulate: Any
) -> tuple[Key | None, tuple[Any, ...], list[int]]:
    """`runtime.key_of` of a backward: its key, its arrays in the order of `backward.moe_backward`, their addresses."""
    if not (accumulate is None or isinstance(accumulate, Mapping)):
        return None, (), []
    index, w1, b1 = saved.index, gate_and_up(saved.w1), gate_and_up(saved.b1)
    of_layer = saved.x, saved.weights, *w1, saved.w2, *b1, saved.b2
    given: tuple[Any, ...] = grad_out, *of_layer, index.lists, saved.first_layer, saved.y_swi
    options: tuple[Any, ...]
    of_layer_options = saved.slots, index.is_ragged, index.max_slots, saved.precision
    options = saved.activation, saved.gate_up, needs, *of_call, *of_layer_options
    if accumulate:
        for name, total in accumulate.items():
            parts = pair(total)
            given, options = (*given, *parts), (*options, name, len(parts))
    key, pointers = runtime.key_of("moe_backward", options, given)
    return key, given, pointers


def _totals(accumulate: Mapping[str, Any] | None, values: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """The values of the arrays of `accumulate`, by name. values: one for each array of `_backward_key`."""
    totals, end = {}, _READ
    for name, total in (accumulate or {}).items():
        start, end = end, end + len(pair(total))
        totals[name] = tuple(values[start:end])
    return totals


def _index_layout(index: DispatchIndices) -> IndexLayout:
    num_pairs = index.num_slots if index.is_ragged else 0
    return IndexLayout(index.num_tokens, index.k, index.num_experts, num_pairs, index.max_slots)


def _exported(export: Export, accumulate: Mapping[str, Any] | None, grads: Gradients) -> Gradients:
    """The gradients as the caller's kind of array. Those that were accumulated are the caller's own arrays."""
    if export is keep and not accumulate:
        return grads
    own = accumulate or {}
    made = {name: value for name, value in vars(grads).items() if value is not None and name not in own}
    return Gradients(**{name: one_or_pair(tuple(map(export, pair(value)))) for name, value in made.items()}, **own)
