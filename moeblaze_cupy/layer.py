"""The public functions: check arguments, choose NumPy or CUDA by where the arrays are, hand back the caller's kind."""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from moeblaze_cupy import arrays, checks, loader, plans, reference
from moeblaze_cupy.interop import dlpack
from moeblaze_cupy.ops import dispatch, experts, router
from moeblaze_cupy.structures import GRADIENTS, DispatchIndices, Gradients, SavedForBackward, one_or_pair, pair


def _keep(array: Any) -> Any:
    return array


class _Call:
    """One public call's arrays in working form (NumPy on the CPU; CuPy or torch on CUDA) and the way back."""

    def __init__(self, function: str, **given: Any):
        self.export, self.described = _keep, {}
        frameworks = {}
        for name, array in given.items():
            framework = arrays.framework_of(array)
            if framework is None and not dlpack.is_dlpack(array):
                raise checks.bad_type(
                    function, name, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array)
                )
            try:
                if framework is None:
                    imported = dlpack.import_array(array)
                    if self.export is _keep:
                        self.export = dlpack.exporter(array)
                    array, framework = imported, arrays.framework_of(imported)
                self.described[name] = framework.describe(array)
            except (TypeError, BufferError, RuntimeError) as error:
                raise checks.unreadable(function, name, error) from error
            frameworks[name] = framework
        first = next(iter(given))
        self.framework = frameworks[first]
        for name, framework in frameworks.items():
            if framework is not self.framework:
                raise checks.bad_type(function, name, f"a {self.framework.name} array like {first}", framework.name)
        self.device = self.described[first].device
        if len({array.device for array in self.described.values()}) > 1:
            checks.same_device(function, **self.described)
        self.on_cpu = self.device == arrays.CPU
        if self.on_cpu and self.framework is arrays.Torch:
            self.export = arrays.Torch.from_numpy

    def host(self, name: str):
        """A working array as NumPy, on the CPU; subclasses such as np.matrix have their own idea of arithmetic."""
        return np.asarray(self.framework.to_numpy(self.described[name].owner))

    def current_device(self):
        """Makes the arrays' device current."""
        return nullcontext() if self.on_cpu else _current_device(self.device)

    def context(self) -> arrays.Context:
        return arrays.Context(self.framework, self.device, self.framework.stream(self.device))


def _current_device(device: int):
    cuda = loader.import_cupy().cuda
    return nullcontext() if cuda.runtime.getDevice() == device else cuda.Device(device)


def _map_saved(saved: SavedForBackward, convert) -> SavedForBackward:
    """The same, with every array passed through `convert`."""

    def each(value):
        if isinstance(value, (tuple, list)):
            return tuple(each(v) for v in value)
        return None if value is None else convert(value)

    return dataclasses.replace(
        saved,
        index=_map_index(saved.index, convert),
        **{name: each(getattr(saved, name)) for name in ("x", "weights", "w1", "w2", "first_layer", "y_swi")},
    )


def _map_index(index: DispatchIndices, convert) -> DispatchIndices:
    lists, rest = index.split()
    return rest.joined([None if array is None else convert(array) for array in lists])


def _named_pair(function: str, name: str, w1: Any) -> dict[str, Any]:
    parts = pair(w1)
    if len(parts) not in (1, 2):
        raise checks.bad_value(function, name, "one array or a pair (gate, up)", f"{len(parts)} arrays")
    return {name: parts[0]} if len(parts) == 1 else {f"{name}[0]": parts[0], f"{name}[1]": parts[1]}


def _buffers(function: str, accumulate: Any, needs: tuple, saved: SavedForBackward) -> dict[str, dict[str, Any]]:
    """Of each weight whose gradient is added to the caller's: these arrays by argument name, in the weight's form."""
    checks.accumulated_names(function, accumulate, needs)
    found = {}
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


def _check_apart(framework: Any, grad_out: Any, saved: SavedForBackward, buffers: dict[str, Any]) -> None:
    """What gradients are added to is no memory that backward reads; see `checks.apart`."""
    read = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    read |= _named_pair("moe_backward", "saved.w1", saved.w1)
    read |= {"saved.first_layer": saved.first_layer, "saved.y_swi": saved.y_swi}
    read |= {f"saved.index[{i}]": array for i, array in enumerate(saved.index.split()[0])}
    present = {name: framework.describe(array) for name, array in read.items() if array is not None}
    checks.apart("moe_backward", present, {name: framework.describe(array) for name, array in buffers.items()})


def route(logits: Any, k: int, kind: str = "softmax_topk", renormalize: bool | None = None) -> tuple[Any, Any]:
    """Softmax and top-k over the experts of each token (paper section 2.1).

    logits: (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 1024; k <= min(E, 32).
    kind: "softmax_topk" takes the softmax over all E, then the k largest, divided by their sum if
    `renormalize`; "topk_softmax" takes the softmax over the k largest logits.
    renormalize: None means k > 1, as one weight over itself is 1 whatever the logits, which then get no gradient.
    Returns weights (L, k) float32 (float64 of such logits) and ids (L, k) int32, largest first, ties to the lower id.
    A NaN logit ranks first and makes its token's weights NaN.
    Raises TypeError (dtype, device), ValueError (shape, k, kind), or RuntimeError of tensors that autograd or a
    transform of torch would have to follow.
    """
    k = checks.integer("route", "k", k)
    renormalize = checks.renormalized("route", renormalize, k)
    checks.untracked("route", {"logits": logits})
    call = _Call("route", logits=logits)
    checks.router("route", call.described["logits"], k, kind)
    if call.on_cpu:
        weights, ids = reference.route(call.host("logits"), k, kind=kind, renormalize=renormalize)
        return call.export(weights), call.export(ids)
    with call.current_device():
        weights, ids = router.route(call.context(), call.described["logits"], k, kind=kind, renormalize=renormalize)
        return call.export(weights.owner), call.export(ids.owner)


def route_backward(
    grad_weights: Any,
    logits: Any,
    weights: Any,
    ids: Any,
    kind: str = "softmax_topk",
    renormalize: bool | None = None,
) -> Any:
    """Gradient of `route`'s weights with respect to its logits, (L, E) in their dtype.

    grad_weights and weights (L, k) float32 (float64 of such logits), ids (L, k) int32 as `route` returned them; kind
    and renormalize as given to `route`. Raises TypeError, ValueError or RuntimeError as `route` does.
    """
    given = {"logits": logits, "grad_weights": grad_weights, "weights": weights, "ids": ids}
    checks.untracked("route_backward", given)
    call = _Call("route_backward", **given)
    d = call.described
    checks.router_backward("route_backward", d["grad_weights"], d["logits"], d["weights"], d["ids"], kind)
    renormalize = checks.renormalized("route_backward", renormalize, d["ids"].shape[1])
    if call.on_cpu:
        host = (call.host(name) for name in ("grad_weights", "logits", "weights", "ids"))
        return call.export(reference.route_backward(*host, kind=kind, renormalize=renormalize))
    with call.current_device():
        grad = router.route_backward(
            call.context(), d["grad_weights"], d["logits"], d["weights"], d["ids"], kind=kind, renormalize=renormalize
        )
        return call.export(grad.owner)


def build_dispatch(ids: Any, num_experts: int) -> DispatchIndices:
    """The paper's index lists (section 4.1), built in its three steps (section 4.2).

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is "no expert in this slot", an expert named
    twice by a token is two slots. num_experts <= 4096, L*k <= 2^31 - 128.
    Returns DispatchIndices of int32 arrays of the caller's kind.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    num_experts = checks.integer("build_dispatch", "num_experts", num_experts)
    checks.untracked("build_dispatch", {"ids": ids})
    call = _Call("build_dispatch", ids=ids)
    checks.ids("build_dispatch", call.described["ids"], num_experts)
    if call.on_cpu:
        return _map_index(reference.dispatch(call.host("ids"), num_experts), call.export)
    with call.current_device():
        index = dispatch.dispatch(call.context(), call.described["ids"], num_experts).unpacked()
        if call.export is _keep:
            return index
        return _map_index(index, lambda array: call.export(array.copy()))  # DLPack asks for aligned arrays


def moe_forward(
    x: Any, ids: Any, weights: Any, w1: Any, w2: Any, *, activation: str = "swiglu", save: str | None = "minimal"
) -> tuple[Any, SavedForBackward | None]:
    """out[t] = sum over slots j of weights[t, j] * expert ids[t, j] of x[t] (paper sections 2.3, 3.1, 5).

    x: (L, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. ids: (L, k) int32 or int64, see
    `build_dispatch`. weights: (L, k) float32 or x's dtype.
    w1: (E, d, 2h), gate columns then up columns, for activation swiglu, geglu or reglu, or a pair (gate, up) of
    (E, d, h); (E, d, h) for silu, gelu (exact) and relu. w2: (E, h, d). Both in x's dtype, read in place,
    row-major or as the transposed view of (E, 2h, d) / (E, d, h) storage.
    save: "minimal" keeps a, b; "paper" also act(a) * b (Algorithm 1); "recompute" only x; None nothing.
    Returns out (L, d) in x's dtype and SavedForBackward (None for save=None).
    x, ids, weights, w1 and w2 are kept by reference: whoever changes one in place before backward, as by x += out,
    gets wrong gradients. Where 2h = d (w1) or h = d (w2), storage order has the same shape and cannot be told apart.
    A NaN in x reaches its token's output and its gradients of weights, w1, w2 and x, but for "relu" not that of x.
    Raises TypeError (dtype, device, framework), ValueError (shape, memory order, names), or RuntimeError
    where CUDA arrays meet no CuPy, no usable driver or a GPU before sm_80, and of torch tensors that autograd or a
    transform of torch would have to follow: for those use `moeblaze_cupy.interop.torch`.
    """
    w1_by_name = _named_pair("moe_forward", "w1", w1)
    named = {"x": x, "ids": ids, "weights": weights, **w1_by_name, "w2": w2}
    checks.untracked("moe_forward", named)
    given = plans.forward_inputs(x, ids, weights, tuple(w1_by_name.values()), w2)
    key, pointers = plans.key_of("moe_forward", (activation, save), given)
    plan = plans.find(key)
    if plan is not None:  # which says that these arguments have passed all checks
        with _current_device(plan.device):
            return plans.replay_forward(plan, given, pointers, activation, save)
    call = _Call("moe_forward", **named)
    d = call.described
    w1_arrays = tuple(d[name] for name in w1_by_name)
    checks.layer("moe_forward", d["x"], d["ids"], d["weights"], w1_arrays, d["w2"], activation, save)
    if call.on_cpu:
        host = {name: call.host(name) for name in d}
        host_w1 = one_or_pair(tuple(host[name] for name in w1_by_name))
        out, saved = reference.moe_forward(
            host["x"],
            host["ids"],
            host["weights"],
            host_w1,
            host["w2"],
            activation=activation,
            save=save,
        )
        if saved is not None and call.framework is arrays.Torch:
            own = {"x": x, "weights": weights, "w1": one_or_pair(tuple(w1_by_name.values())), "w2": w2}
            saved = dataclasses.replace(_map_saved(saved, call.export), **own)
        return call.export(out), saved
    with call.current_device():
        if plans.is_due(key):
            described = plans.forward_inputs(d["x"], d["ids"], d["weights"], w1_arrays, d["w2"])
            plan = plans.trace_forward(key, call.context(), described, activation, save)
            return plans.replay_forward(plan, given, pointers, activation, save)
        out, saved = experts.moe_forward(
            call.context(), d["x"], d["ids"], d["weights"], w1_arrays, d["w2"], activation=activation, save=save
        )
        return call.export(out.owner), saved


def moe_backward(
    grad_out: Any,
    saved: SavedForBackward,
    *,
    needs: tuple[str, ...] = GRADIENTS,
    keep_saved: bool = False,
    accumulate: Mapping[str, Any] | None = None,
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
    Returns Gradients: x (L, d), weights (L, k) (0 for empty slots), w1 and w2 in the form, dtype and
    memory order of the weights, exactly zero for experts without tokens; or the very arrays of `accumulate`.
    Raises TypeError, ValueError or RuntimeError as `moe_forward` does, and RuntimeError for a second backward.
    """
    if not isinstance(saved, SavedForBackward):
        raise checks.bad_type(
            "moe_backward", "saved", "SavedForBackward from moe_forward (save is not None)", type(saved)
        )
    needs = checks.gradient_names("moe_backward", needs)
    tracked = {"grad_out": grad_out, "saved.x": saved.x, "saved.weights": saved.weights, "saved.w2": saved.w2}
    checks.untracked("moe_backward", tracked | _named_pair("moe_backward", "saved.w1", saved.w1))
    key, given, pointers = plans.backward_key(grad_out, saved, needs, keep_saved, accumulate)
    plan = plans.find(key)
    if plan is not None:
        checks.not_consumed("moe_backward", saved)
        if accumulate:
            framework = arrays.framework_of(grad_out)
            in_bytes, totals = framework is arrays.CuPy, sum(len(pair(total)) for total in accumulate.values())
            if checks.ranges_meet(in_bytes, key[-1], pointers, totals):
                buffers = _buffers("moe_backward", accumulate, needs, saved)
                _check_apart(framework, grad_out, saved, {n: a for parts in buffers.values() for n, a in parts.items()})
        with _current_device(plan.device):
            return plans.replay_backward(plan, given, pointers, saved, accumulate or {})
    buffers = _buffers("moe_backward", accumulate, needs, saved) if accumulate is not None else {}
    parts = {part: array for parts in buffers.values() for part, array in parts.items()}
    call = _Call("moe_backward", **{"saved.x": saved.x}, grad_out=grad_out, **parts)
    d = call.described
    checks.layer_backward("moe_backward", d["grad_out"], d["saved.x"], saved)
    described = {name: tuple(d[part] for part in parts) for name, parts in buffers.items()}
    for name, of_weight in buffers.items():
        shapes = tuple(tuple(w.shape) for w in pair(getattr(saved, name)))
        checks.accumulated("moe_backward", tuple(of_weight), described[name], shapes, d["saved.x"].dtype)
    if buffers:
        _check_apart(call.framework, d["grad_out"].owner, saved, parts)
    if call.on_cpu:
        saved.consumed = saved.is_consumed_by(needs, keep_saved)
        host_saved = _map_saved(saved, call.framework.to_numpy) if call.framework is arrays.Torch else saved
        host_buffers = {name: one_or_pair(tuple(map(call.host, names))) for name, names in buffers.items()}
        grads = reference.moe_backward(call.host("grad_out"), host_saved, needs=needs, accumulate=host_buffers)
        return _export_gradients(grads, call.export, accumulate)
    with call.current_device():
        context, options = call.context(), {"needs": needs, "keep_saved": keep_saved, "accumulate": described}
        if plans.is_due(key):
            plan = plans.trace_backward(key, context, d["grad_out"], saved, **options)
            return plans.replay_backward(plan, given, pointers, saved, accumulate or {})
        grads = experts.moe_backward(context, d["grad_out"], saved, **options)
        return _export_gradients(grads, call.export, accumulate)


def _export_gradients(grads: Gradients, export, accumulate: Mapping[str, Any] | None) -> Gradients:
    """In the caller's kind; what was accumulated is the caller's own."""
    own = accumulate or {}
    values = {name: getattr(grads, name) for name in GRADIENTS if name not in own}
    exported = {
        name: tuple(map(export, v)) if isinstance(v, tuple) else None if v is None else export(v)
        for name, v in values.items()
    }
    return Gradients(**exported, **own)
