"""The public functions of routing: which experts a token goes to, and with what weights."""

from typing import Any

from moeblaze_cupy import checks, reference, runtime
from moeblaze_cupy.arrays import Export
from moeblaze_cupy.call import Call, keep
from moeblaze_cupy.ops import router
from moeblaze_cupy.runtime import Runtime, current_device


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
    key, pointers = runtime.key_of("route", (k, kind, renormalize), (logits,))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        checks.untracked("route", {"logits": logits})
        call = Call("route", logits=logits)
        checks.router("route", call.described["logits"], k, kind)
        if call.on_cpu:
            on_host = reference.route(call.host("logits"), k, kind=kind, renormalize=renormalize)
            return call.export(on_host[0]), call.export(on_host[1])
        (layout,), pointers, export = call.layout("logits"), call.pointers(), call.export
        step = router.configure("router_fwd", layout, k, kind, renormalize)
        found = runtime.keep(key, call.prepared((step, (layout.shape[0], k))))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        step, shape = found.steps
        weights, ids = router.route(run, step, pointers[0], shape)
        return export(weights.array), export(ids.array)


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
    key, pointers = runtime.key_of("route_backward", (kind, renormalize), tuple(given.values()))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        checks.untracked("route_backward", given)
        call = Call("route_backward", **given)
        d = call.described
        checks.router_backward("route_backward", d["grad_weights"], d["logits"], d["weights"], d["ids"], kind)
        renormalize = checks.renormalized("route_backward", renormalize, d["ids"].shape[1])
        if call.on_cpu:
            host = (call.host(name) for name in ("grad_weights", "logits", "weights", "ids"))
            return call.export(reference.route_backward(*host, kind=kind, renormalize=renormalize))
        layout, k, pointers, export = d["logits"].layout, d["ids"].shape[1], call.pointers(), call.export
        step = router.configure("router_bwd", layout, k, kind, renormalize)
        found = runtime.keep(key, call.prepared((step, layout)))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        step, layout = found.steps
        logits_ptr, grad_ptr, weights_ptr, ids_ptr = pointers
        grad = router.route_backward(run, step, grad_ptr, logits_ptr, weights_ptr, ids_ptr, layout)
        return export(grad.array)
