"""The router, forward and backward: kernels_cu/router.cu."""

from typing import Any

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Buffer
from moeblaze_cupy.router_options import RouterOptions
from moeblaze_cupy.runtime import Launch, Runtime

ADDRESSES = {
    "router_fwd": ("logits", "weights", "ids"),
    "router_bwd": ("grad_weights", "logits", "weights", "ids", "grad_logits"),
}


def _launch(entry: str, layouts: Any, k: Any, options: RouterOptions) -> Launch | None:
    by_name = dict(layouts)
    known = RouterOptions("softmax", options.renormalize, 0.0, 1.0, "scores", None, None, None, (), 1)
    L, E = by_name["logits"].shape
    if options != known or set(by_name) - set(ADDRESSES[entry]) or (entry == "router_fwd" and "ids" in by_name):
        raise NotImplementedError("route: options: expected those of softmax on CUDA, got others")
    if E > 1024 or k > 32:
        raise NotImplementedError("route: logits: expected at most 1024 experts and k of at most 32 on CUDA, got more")
    if L == 0:
        return None
    return Launch(
        loader.entry("router.cu", f"{entry}_{by_name['logits'].dtype}"),
        (launch_config.ceil_div(L, launch_config.ROUTER_TOKENS),),
        32 * launch_config.ROUTER_TOKENS,
        ADDRESSES[entry],
        {"L": L, "num_experts": E, "k": k, "over_selected": int(options.renormalize or 0)},
        4 * launch_config.ROUTER_TOKENS * E,
    )


def configure_forward(layouts: Any, k: int | None, options: RouterOptions, limits: Any) -> Any:
    """The launch, and the shape of weights and ids."""
    return _launch("router_fwd", layouts, k, options), (dict(layouts)["logits"].shape[0], k)


def route(run: Runtime, steps: Any, pointers: dict[str, int]) -> tuple[Buffer, Buffer, tuple[Any, ...]]:
    """weights, ids, and what was added up."""
    step, shape = steps
    weights, ids = run.empty(shape, "float32"), run.empty(shape, "int32")
    if step:
        run.launch(step, pointers["logits"], weights.ptr, ids.ptr)
    return weights, ids, ()


def configure_backward(layouts: Any, options: RouterOptions, limits: Any) -> Any:
    """The launch, and the layout of the gradient."""
    by_name = dict(layouts)
    return _launch("router_bwd", layouts, by_name["ids"].shape[-1], options), by_name["logits"]


def route_backward(run: Runtime, steps: Any, pointers: dict[str, int]) -> Buffer:
    """Gradient of the logits (L, E)."""
    step, layout = steps
    grad = run.empty(layout.shape, layout.dtype)
    if step:
        run.launch(step, *(pointers[name] for name in ADDRESSES["router_bwd"][:-1]), grad.ptr)
    return grad
