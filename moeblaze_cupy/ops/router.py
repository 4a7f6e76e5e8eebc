"""Softmax and top-k of the router, forward and backward: kernels_cu/router.cu."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Buffer, Layout
from moeblaze_cupy.runtime import Launch, Runtime, cached

ADDRESSES = {
    "router_fwd": ("logits", "weights", "ids"),
    "router_bwd": ("grad_weights", "logits", "weights", "ids", "grad_logits"),
}


@cached
def configure(entry: str, logits: Layout, k: int, kind: str, renormalize: bool) -> Launch | None:
    """The launch of "router_fwd" or "router_bwd" for logits (L, E); None where there are no tokens.

    The renormalised softmax over all experts equals the softmax over the chosen ones.
    """
    L, E = logits.shape
    if L == 0:
        return None
    over_selected = int(kind == "topk_softmax" or renormalize)
    return Launch(
        loader.entry("router.cu", f"{entry}_{logits.dtype}"),
        (launch_config.ceil_div(L, launch_config.ROUTER_TOKENS),),
        32 * launch_config.ROUTER_TOKENS,
        ADDRESSES[entry],
        {"L": L, "num_experts": E, "k": k, "over_selected": over_selected},
        4 * launch_config.ROUTER_TOKENS * E,
    )


def route(run: Runtime, step: Launch | None, logits: int, shape: tuple[int, int]) -> tuple[Buffer, Buffer]:
    """weights (L, k) float32 and ids (L, k) int32, both of `shape`, from logits (L, E)."""
    weights, ids = run.empty(shape, "float32"), run.empty(shape, "int32")
    if step:
        run.launch(step, logits, weights.ptr, ids.ptr)
    return weights, ids


def route_backward(
    run: Runtime, step: Launch | None, grad_weights: int, logits: int, weights: int, ids: int, layout: Layout
) -> Buffer:
    """Gradient of the logits (L, E), in their layout."""
    grad_logits = run.empty(layout.shape, layout.dtype)
    if step:
        run.launch(step, grad_weights, logits, weights, ids, grad_logits.ptr)
    return grad_logits
