"""Backward of the layer, whole or in two halves: check arguments, choose NumPy or CUDA, hand back the caller's kind."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moeblaze_cupy import checks, overlaps, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, Lookup, graph_break, keep
from moeblaze_cupy.checks import named_pair
from moeblaze_cupy.cuda.runtime import Runtime, current_device
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.frameworks import Array, DeviceFramework, Export, Framework
from moeblaze_cupy.gemm.products import Summed
from moeblaze_cupy.layer import backward, chunks, weight_gradients
from moeblaze_cupy.layer.api import map_saved, pass_extras, values_and_scales
from moeblaze_cupy.layer.forward import PLAIN_PASS, PassExtras
from moeblaze_cupy.layer.weight_gradients import Totals
from moeblaze_cupy.quantised import scratch, scratch_e4m3
from moeblaze_cupy.rows.push import Destination
from moeblaze_cupy.types import (
    FACTORS,
    GRADIENTS,
    BackwardArrays,
    BackwardOptions,
    ChunkedIndices,
    DispatchIndices,
    Fp8Weights,
    Gradients,
    LayerArrays,
    Lora,
    LoraRows,
    PendingWeights,
    QuantizedWeight,
    SavedForBackward,
    is_consumed,
    one_or_pair,
    pair,
)

Parts = dict[str, dict[str, Any]]  # arrays by argument name of each weight or bias, by its name


def _buffers(function: str, accumulate: Any, needs: tuple[str, ...], saved: SavedForBackward) -> Parts:
    """Returns the arrays of `accumulate` by argument name, for each weight or bias that has one: one or a pair."""
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
            checks.writable(function, part, array)
    return found


def _arrays(buffers: Parts) -> dict[str, Any]:
    """Returns all arrays of `_buffers` by argument name."""
    return {name: array for parts in buffers.values() for name, array in parts.items()}


def _check_accumulated(call: Call, buffers: Parts, saved: SavedForBackward) -> None:
    for name, parts in buffers.items():
        shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
        described = {part: call.described[part] for part in parts}
        checks.accumulated(call.function, described, shapes, call.described["saved.x"].dtype)


def _check_rows(call: Call, saved: SavedForBackward, grad_scales: Any) -> None:
    """Checks x and grad_out in e4m3, which are then described as what they stand for."""
    of_e4m3 = {"saved.x": saved.x_scales, "grad_out": grad_scales}
    for name, scales in of_e4m3.items():
        if scales is not None:
            array = call.described[name]
            (of_scales,) = described_by_name(call.function, call.framework, {f"{name}.scales": scales}).values()
            checks.fp8_rows(call.function, name, array, of_scales)
            call.described[name] = dataclasses.replace(array, dtype="bfloat16")


def _on_host(call: Call, saved: SavedForBackward, grad_scales: Any) -> tuple[reference.HostArray, SavedForBackward]:
    """Returns grad_out and what was saved as NumPy arrays, rows in e4m3 as the numbers they stand for."""
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
        host = dataclasses.replace(host, arrays=host.arrays._replace(x=x), x_scales=None)
    return grad_out, host


def described_by_name(function: str, framework: Framework, given: Mapping[str, Any]) -> dict[str, Array]:
    """Describes the arrays present, by argument name. Raises for one that cannot be read, such as a freed tensor."""
    found = {}
    for name, array in given.items():
        if array is not None:
            try:
                found[name] = framework.describe(array)
            except (TypeError, RuntimeError) as error:
                raise checks.unreadable(function, name, error) from error
    return found


def _read(function: str, framework: Framework, grad_out: Any, saved: SavedForBackward) -> dict[str, Array]:
    """Describes what backward reads, by argument name; rows in e4m3 without their scales."""
    read = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    read |= named_pair(function, "saved.w1", saved.w1)
    read |= named_pair(function, "saved.b1", saved.b1) | {"saved.b2": saved.b2}
    read |= {"saved.first_layer": saved.first_layer, "saved.y_swi": saved.y_swi}
    read |= _of_lora(saved) | {f"saved.lora_rows.{name}": rows for name, rows in saved.lora_rows._asdict().items()}
    read |= {"saved.index.lists": saved.index.lists}
    return described_by_name(function, framework, read)


def _of_lora(saved: SavedForBackward) -> dict[str, Any]:
    """Returns the factors by argument name."""
    return {} if saved.lora is None else {f"saved.lora.{name}": getattr(saved.lora, name) for name in FACTORS}


def _in_e4m3(function: str, framework: Framework, weights: Fp8Weights) -> dict[str, Array]:
    """Describes the arrays of `weights` by argument name, in the order of `fp8_checks.FIELDS`."""
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


@graph_break
def moe_backward(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] | None = None,
    keep_saved: bool = False,
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Computes the gradients of `moe_forward` (paper section 3.2; Algorithm 1, lines 15-31).

    grad_out: of out's shape, (L, d) or per slot, x's dtype, contiguous. needs: which of "x", "weights", "w1", "w2",
    "b1", "b2", "lora" to compute. The others are None, and their kernels do not run. None asks for all that the layer
    has: b1 and b2 only with such a bias, weights only if it has some. Of a layer with lora None asks for x, weights and
    lora, as what the factors adapt is frozen in most uses.
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
    lora is a `Lora` of the factors' gradients, in their dtypes, C-contiguous, its scales None.
    After a forward in chunks, by memory_limit, buffers of `accumulate` are in float32.
    Raises TypeError, ValueError or RuntimeError as `moe_forward` does, and RuntimeError for a second backward.
    """
    return run_backward("moe_backward", grad_out, saved, needs, keep_saved, accumulate)[0]


@graph_break
def moe_backward_data(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] = ("x", "weights"),
    keep_saved: bool = False,
) -> tuple[Gradients, PendingWeights]:
    """Runs the first half of `moe_backward`: the gradients of x and weights, before those of w1 and w2.

    The gradient of x can then travel to other GPUs while `moe_backward_weights` computes, or a pipeline's stage can
    hand it on and compute the gradients of its weights in a bubble. The halves give the bits of the whole.
    grad_out, saved, keep_saved: see `moe_backward`. needs: "x", "weights", both or none.
    Between the halves the saved activations' gradients stay in memory, and with them (R, h) of weighted act(a) * b,
    R being L*k or max_slots. grad_out and saved.x are read again, so they must not change.
    Returns Gradients, of which w1 and w2 are None, and PendingWeights.
    Raises TypeError, ValueError or RuntimeError as `moe_backward` does, and ValueError for a layer with biases.
    """
    needs = checks.gradient_names("moe_backward_data", needs, ("x", "weights"))
    extras = BackwardExtras(defers_weights=True)
    function, all_needs = "moe_backward_data", (*needs, "w1", "w2")
    grads, pending = run_backward(function, grad_out, saved, all_needs, keep_saved, extras=extras)
    assert pending is not None
    return grads, pending


@graph_break
def moe_backward_weights(
    pending: PendingWeights,
    *,
    needs: tuple[str, ...] = ("w1", "w2"),
    accumulate: Mapping[str, Any] | None = None,
) -> Gradients:
    """Runs the second half of `moe_backward`: the gradients of w1 and w2, after `moe_backward_data`.

    pending: what that returned, which is taken once. needs: "w1", "w2" or both. accumulate: see `moe_backward`.
    It runs on the current stream, which must come after that of the first half.
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
    in_memory = call.described["grad_out"], call.described["saved.x"]
    _check_rows(call, saved, pending.grad_scales)
    _check_accumulated(call, buffers, saved)
    read = _read(function, call.framework, call.described["grad_out"].owner, saved) if parts or call.on_cpu else {}
    if parts:
        _check_apart(function, call.framework, read, saved, parts)
        left = {"pending.first_layer_grad": pending.first_layer_grad, "pending.weighted_y_swi": pending.weighted_y_swi}
        kept = described_by_name(function, call.framework, left)
        overlaps.apart(function, kept, {part: call.described[part] for part in parts})
    pending.consumed = True
    if call.on_cpu:
        host_grad, host_saved = _on_host(call, saved, pending.grad_scales)
        totals = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
        host = reference.moe_backward(host_grad, host_saved, needs=needs, accumulate=totals)
        return _exported(call.export, accumulate, host)
    accumulated = tuple((name, tuple(call.described[n].layout for n in names)) for name, names in buffers.items())
    steps, addresses = _configured(call, pending, in_memory, needs, Totals(accumulated))
    record, describe = call.known_record(steps), call.framework.describe
    with current_device(record.device):
        grads = weight_gradients.moe_backward_weights(
            Runtime.current(record.framework, record.device),
            steps,
            addresses,
            {name: tuple(call.described[part].ptr for part in names) for name, names in buffers.items()},
            *(0 if scales is None else describe(scales).ptr for scales in (saved.x_scales, pending.grad_scales)),
        )
        return _exported(call.export, accumulate, grads)


def _configured(
    call: Call, pending: PendingWeights, in_memory: tuple[Array, Array], needs: tuple[str, ...], totals: Totals
) -> tuple[weight_gradients.Weights, BackwardArrays]:
    """Returns the launches of `weight_gradients.configure_weights`, and the addresses of what they read.

    in_memory: grad_out and x as they are.
    """
    saved, (grad_out, x) = pending.saved, in_memory
    left = {"pending.first_layer_grad": pending.first_layer_grad, "pending.weighted_y_swi": pending.weighted_y_swi}
    given = {"saved.index.lists": saved.index.lists, "saved.w2": saved.w2, **left}
    given |= named_pair(call.function, "saved.w1", saved.w1)
    lists, w2, first_layer_grad, weighted, gate, *up = described_by_name(call.function, call.framework, given).values()
    layer = LayerArrays(x, None, None, gate, up[0] if up else None, w2)
    described = grad_out, *layer, lists, first_layer_grad, weighted
    layouts = BackwardArrays.of([array and array.layout for array in described])
    index = _index_layout(saved.index)
    steps = weight_gradients.configure_weights(layouts, saved.options, needs, call.limits, index, totals)
    return steps, BackwardArrays.of([array.ptr if array else 0 for array in described])


def summed_weights(
    pending: PendingWeights,
    needs: tuple[str, ...],
    ranks: Sequence[int],
    scale: float,
    totals: Mapping[str, Any],
    others: Mapping[str, Any],
    at: Mapping[str, Mapping[int, Any]],
    signal: Callable[[str], None],
    wait: Callable[[str], None],
) -> bool:
    """Runs the second half of `moe_backward` where ranks with the same weights own E / P experts each, in order.

    The gradients of other ranks' experts are stored in the memory of those ranks. Those of this one's are added to
    what the others have stored, and the sum is scaled and rounded once.
    pending: what `moe_backward_data` returned. needs: "w1", "w2" or both; w1 is one array. ranks: this one, then the
    others, 8 at most. totals: by name, arrays (E / P, ...) in the memory order of the weights, in their dtype or
    float32. others: by name, arrays (P - 1, E / P, ...) of this rank, in the weights' dtype. at: by name and other
    rank, the array among the `others` of that rank that is this rank's. signal: tells the other ranks, on the current
    stream, that "w1" or "w2" is stored. wait: makes the stream wait until all have.
    Returns False, and does nothing, where Hopper's kernels do not serve: without a GPU or tokens, say.
    """
    function = "moe_backward"
    call = Call(function, **{"saved.x": pending.saved.x}, grad_out=pending.grad_out)
    if call.on_cpu:
        return False
    describe = call.framework.describe
    sums = {name: describe(totals[name]) for name in needs}
    layouts = tuple((name, described.layout) for name, described in sums.items())
    in_memory = call.described["grad_out"], call.described["saved.x"]
    of_ranks = Totals(sums=layouts, summed=Summed(len(ranks) - 1, scale))
    steps, read = _configured(call, pending, in_memory, needs, of_ranks)
    if not steps.all_sm90:
        return False
    to = {}
    for name in needs:
        places = {rank: describe(array).ptr for rank, array in at[name].items()}
        to[name] = weight_gradients.OfRanks(sums[name].ptr, describe(others[name]).ptr, places)
    record = call.known_record(steps)
    pending.consumed = True
    with current_device(record.device):
        run = Runtime.current(record.framework, record.device)
        weight_gradients.summed_weights(run, steps, read, ranks, to, signal, wait)
    return True


class BackwardExtras(NamedTuple):
    """Values that few calls of a backward have beside its arrays and options."""

    into: Any = None  #: the array that the gradient of x is to be on CUDA, see `LayerExtras.into`
    wait: Callable[[], None] | None = None  #: makes the stream wait for rows of grad_out that are on their way
    defers_weights: bool = False  #: the gradients of w1 and w2 are left to `moe_backward_weights`
    decode: Callable[[Runtime, int], None] | None = None  #: see `LayerExtras`

    @property
    def destination(self) -> Destination | None:
        """Returns where the gradients of several GPUs' tokens go; that of x is then None on CUDA."""
        return self.into if isinstance(self.into, Destination) else None


_PLAIN = BackwardExtras()
_READ = len(BackwardArrays._fields) - 1 + len(LayerArrays._fields)  # arrays of a backward without low-rank factors


def run_backward(
    function: str,
    grad_out: Any,
    saved: SavedForBackward,
    needs: tuple[str, ...] | None,
    keep_saved: bool,
    accumulate: Mapping[str, Any] | None = None,
    extras: BackwardExtras = _PLAIN,
) -> tuple[Gradients, PendingWeights | None]:
    """Runs `moe_backward`, or its first half; `function` is the one that messages name.

    grad_out: may be `Fp8Rows` of a layer with precision="fp8", as saved.x may be by saved.x_scales; the gradients of
    weights are then deferred, not needed, or in e4m3 too.
    """
    if not isinstance(saved, SavedForBackward):
        raise checks.bad_type(function, "saved", "SavedForBackward from moe_forward (save is not None)", type(saved))
    if frozen := saved.arrays.frozen:
        return _backward_of_frozen(function, frozen, grad_out, saved, needs, keep_saved, accumulate, extras)
    grad_out, grad_scales = values_and_scales(grad_out)
    needs = checks.gradient_names(function, saved.default_gradients if needs is None else needs, saved.gradients)
    how = BackwardOptions(needs, bool(keep_saved), extras.defers_weights)
    index, to, in_e4m3 = saved.index, extras.destination, (saved.x_scales is not None, grad_scales is not None)
    if extras.defers_weights or True in in_e4m3:
        _check_extras(function, saved, how, True in in_e4m3)
    given: Sequence[Any] = grad_out, *saved.arrays, index.lists, saved.first_layer, saved.y_swi
    options: tuple[Any, ...] = saved.options, how, index.is_ragged, index.max_slots, in_e4m3, to and to.place
    if isinstance(index, ChunkedIndices):
        options = (*options, index.chunk_tokens)
    if saved.lora is not None:
        given, options = (*given, *saved.lora.factors, *saved.lora_rows), (*options, saved.lora.scales)
    totals: tuple[Any, ...] = ()
    if accumulate is not None:
        if not isinstance(accumulate, Mapping):
            checks.accumulated_names(function, accumulate, needs, saved.gradients)  # raises
        for name, total in accumulate.items():
            parts = pair(total)
            totals, options = (*totals, *parts), (*options, name, len(parts))
    look = Lookup("moe_backward", options, (), (*given, *totals) if totals else given)
    record = look.record
    if record is not None:
        checks.not_consumed(function, saved)
        if totals and look.overlaps(len(totals)):
            buffers = _buffers(function, accumulate, needs, saved)
            read_now = _read(function, record.framework, grad_out, saved)
            _check_apart(function, record.framework, read_now, saved, _arrays(buffers))
    else:
        if saved.options.precision is not None and saved.fp8_weights is None:
            raise checks.bad_value(function, "saved", "the e4m3 weights of its forward with precision='fp8'", None)
        call = _checked_backward(function, grad_out, saved, how, grad_scales, accumulate)
        if call.on_cpu:
            return _backward_on_cpu(call, grad_out, saved, how, grad_scales, accumulate, extras.wait)
        given = call.described["grad_out"].owner, *given[1:]
        described: list[Any] = [
            None if array is None else call.framework.describe(array) for array in (*given, *totals)
        ]
        layouts = [array and array.layout for array in described]
        into_layouts = tuple(_by_name(accumulate, layouts[len(given) :]).items())
        read = BackwardArrays.of(layouts[:_READ])
        if saved.options.precision is not None:
            read = read._replace(layer=fp8.of_bfloat16(read.layer))
        form = read, saved.options, how, into_layouts, call.limits, _index_layout(index)
        plan: backward.Backward | chunks.BackwardChunks
        factors_of = saved.lora and saved.lora.with_factors(layouts[_READ : _READ + len(FACTORS)])
        if isinstance(index, ChunkedIndices):
            plan = chunks.configure_backward(*form, index.chunk_tokens, factors_of)
        else:
            plan = backward.configure_backward(*form, to and to.place, factors_of)
        record = look.keep_described(plan, call, described)
    with current_device(record.device):
        run, pointers, into, of_pass = Runtime.current(record.framework, record.device), look.pointers, {}, PLAIN_PASS
        if totals:
            into, pointers = _by_name(accumulate, pointers[len(given) :]), pointers[: len(given)]
        if saved.fp8_weights is not None or extras is not _PLAIN or True in in_e4m3:
            of_pass = _pass_extras(function, record.framework, saved, grad_scales, extras)
        if saved.lora is not None:
            factors, lora_rows = Lora(*pointers[_READ:-2]), LoraRows(*pointers[-2:])
            of_pass, pointers = of_pass._replace(factors=factors, lora_rows=lora_rows), pointers[:_READ]
        addresses = BackwardArrays.of(pointers)
        if isinstance(record.plan, backward.Backward):
            result = backward.moe_backward(run, record.plan, saved, into, addresses, of_pass)
        else:
            result = chunks.moe_backward(run, record.plan, saved, into, addresses, of_pass)
        grads = _exported(look.export, accumulate, result.gradients)
    if not how.defers_weights:
        return grads, None
    first_layer_grad = saved.first_layer if result.first_layer_grad is None else result.first_layer_grad
    weighted = saved.y_swi if result.weighted_y_swi is None else result.weighted_y_swi
    return grads, PendingWeights(grad_out, saved, first_layer_grad, weighted, grad_scales=grad_scales)


def _backward_of_frozen(
    function: str,
    frozen: dict[str, QuantizedWeight],
    grad_out: Any,
    saved: SavedForBackward,
    needs: tuple[str, ...] | None,
    keep_saved: bool,
    accumulate: Mapping[str, Any] | None,
    extras: BackwardExtras,
) -> tuple[Gradients, PendingWeights | None]:
    """Runs `run_backward` for a layer with these weights in four or eight bits, which have no gradients."""
    asked = [name for name in frozen if isinstance(needs, (tuple, list, set, frozenset)) and name in needs]
    if asked:
        expected = f"no gradient of {' and '.join(asked)}, frozen in four or eight bits"
        raise checks.bad_value(function, "needs", expected, needs)
    needs = checks.gradient_names(function, saved.default_gradients if needs is None else needs, saved.gradients)
    decoded: scratch.Decoded | scratch_e4m3.DecodedE4m3
    if saved.options.precision is None:
        decoded = scratch.decoded(function, frozen, "saved.", saved.decoded_by)
    else:
        decoded = scratch_e4m3.decoded(function, frozen, saved.options.gate_up, "saved.")
    read = dataclasses.replace(saved, arrays=decoded.layer(saved.arrays), fp8_weights=decoded.fp8_weights)
    try:
        of_read = function, grad_out, read, needs, keep_saved, accumulate
        result = run_backward(*of_read, extras._replace(decode=decoded.decode))
    finally:
        saved.consumed = read.consumed
    decoded.keep()
    return result


def _check_extras(function: str, saved: SavedForBackward, how: BackwardOptions, in_e4m3: bool) -> None:
    if how.defers_weights and isinstance(saved.index, ChunkedIndices):
        expected = "a layer without memory_limit, as weight gradients of chunks cannot wait"
        raise checks.bad_value(function, "saved", expected, f"memory_limit={saved.options.memory_limit}")
    if how.defers_weights and saved.options.fp8_wgrad:
        expected = "a layer without fp8_wgrad, which moe_backward serves"
        raise checks.bad_value(function, "saved", expected, "fp8_wgrad=True")
    if how.defers_weights and saved.gradients != GRADIENTS:
        others = " and ".join(saved.gradients[len(GRADIENTS) :])
        raise checks.bad_value(function, "saved", "a layer without biases and lora, which moe_backward serves", others)
    read_in_bf16 = () if how.defers_weights else ("lora",) if saved.options.fp8_wgrad else ("w1", "w2", "lora")
    if in_e4m3 and not set(read_in_bf16).isdisjoint(how.needs):
        expected = "'x' and 'weights' alone of rows in e4m3, before the gradients of weights"
        raise checks.bad_value(function, "needs", expected, how.needs)


def _checked_backward(
    function: str,
    grad_out: Any,
    saved: SavedForBackward,
    how: BackwardOptions,
    grad_scales: Any,
    accumulate: Mapping[str, Any] | None,
) -> Call:
    """Returns the call of grad_out, saved.x and the arrays of `accumulate`; raises what checks do."""
    tracked = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    for name in ("w1", "b1", "b2"):
        tracked |= named_pair(function, f"saved.{name}", getattr(saved, name))
    tracked |= _of_lora(saved)
    checks.untracked(function, tracked)
    buffers = _buffers(function, accumulate, how.needs, saved)
    parts = _arrays(buffers)
    call = Call(function, **{"saved.x": saved.x}, grad_out=grad_out, **parts)
    in_memory, d = dict(call.described), call.described
    read = _read(function, call.framework, d["grad_out"].owner, saved)
    _check_rows(call, saved, grad_scales)
    checks.layer_backward(function, d["grad_out"], d["saved.x"], saved)
    _check_accumulated(call, buffers, saved)
    if isinstance(saved.index, ChunkedIndices):
        for part in parts:
            checks.dtype(function, part, d[part], ("float32", "float64"))  # others would round once for every chunk
    if parts:
        _check_apart(function, call.framework, read, saved, parts)
    call.described = in_memory
    return call


def _backward_on_cpu(
    call: Call,
    grad_out: Any,
    saved: SavedForBackward,
    how: BackwardOptions,
    grad_scales: Any,
    accumulate: Mapping[str, Any] | None,
    wait: Callable[[], None] | None,
) -> tuple[Gradients, PendingWeights | None]:
    if wait is not None:
        wait()
    saved.consumed = is_consumed(saved.is_overwritable, saved.y_swi is not None, how.needs, how.keep_saved)
    host_grad, host_saved = _on_host(call, saved, grad_scales)
    buffers = _buffers(call.function, accumulate, how.needs, saved)
    totals = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
    now = tuple(name for name in how.needs if name in ("x", "weights")) if how.defers_weights else how.needs
    on_host = reference.moe_backward(host_grad, host_saved, needs=now, accumulate=totals)
    exported = _exported(call.export, accumulate, on_host)
    return exported, PendingWeights(grad_out, saved, grad_scales=grad_scales) if how.defers_weights else None


def _pass_extras(
    function: str, framework: DeviceFramework, saved: SavedForBackward, grad_scales: Any, extras: BackwardExtras
) -> PassExtras:
    weights_fp8 = None
    if saved.fp8_weights is not None:
        described = _in_e4m3(function, framework, saved.fp8_weights)
        weights_fp8 = fp8.Addresses(*(array.ptr for array in described.values()))
    scales = (0 if array is None else framework.describe(array).ptr for array in (saved.x_scales, grad_scales))
    of_pass = pass_extras(framework, extras.into, extras.wait, weights_fp8, *scales)
    return of_pass._replace(decode=extras.decode)


def _by_name(accumulate: Mapping[str, Any] | None, values: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Returns the values by name. values: one for each array of `accumulate`, in order."""
    found, end = {}, 0
    for name, total in (accumulate or {}).items():
        start, end = end, end + len(pair(total))
        found[name] = tuple(values[start:end])
    return found


def _index_layout(index: DispatchIndices) -> IndexLayout:
    num_pairs = index.num_slots if index.is_ragged else 0
    return IndexLayout(index.num_tokens, index.k, index.num_experts, num_pairs, index.max_slots)


def _exported(export: Export, accumulate: Mapping[str, Any] | None, grads: Gradients) -> Gradients:
    """Returns the gradients as the caller's kind of array. Those that were accumulated are the caller's own arrays."""
    if export is keep and not accumulate:
        return grads
    own = accumulate or {}
    arrays.count_writes(array for total in own.values() for array in pair(total))
    made = {name: value for name, value in vars(grads).items() if value is not None and name not in (*own, "lora")}
    exported = {name: one_or_pair(tuple(map(export, pair(value)))) for name, value in made.items()}
    lora = grads.lora and Lora(*(None if factor is None else export(factor) for factor in grads.lora))
    return Gradients(**exported, **own, lora=lora)
