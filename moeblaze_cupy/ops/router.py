"""Softmax and top-k of the router, forward and backward: kernels_cu/router.cu."""

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context

TOKENS_PER_BLOCK = launch_config.ROUTER_TOKENS


def _over_selected(kind: str, renormalize: bool) -> int:
    """Renormalised softmax over all experts equals the softmax over the chosen ones."""
    return int(kind == "topk_softmax" or renormalize)


def _launch(context: Context, entry: str, tokens: int, num_experts: int, args: tuple) -> None:
    context.launch(
        loader.entry("router.cu", entry),
        (launch_config.ceil_div(tokens, TOKENS_PER_BLOCK),),
        32 * TOKENS_PER_BLOCK,
        args,
        4 * TOKENS_PER_BLOCK * num_experts,
    )


def route(context: Context, logits: Array, k: int, *, kind: str, renormalize: bool) -> tuple[Array, Array]:
    """weights (L, k) float32 and ids (L, k) int32 from logits (L, E)."""
    L, E = logits.shape
    weights, ids = context.empty((L, k), "float32"), context.empty((L, k), "int32")
    if L:
        args = (logits.ptr, weights.ptr, ids.ptr, L, E, k, _over_selected(kind, renormalize))
        _launch(context, f"router_fwd_{logits.dtype}", L, E, args)
    return weights, ids


def route_backward(
    context: Context, grad_weights: Array, logits: Array, weights: Array, ids: Array, *, kind: str, renormalize: bool
) -> Array:
    """Gradient of the logits (L, E), in their dtype."""
    L, E = logits.shape
    grad_logits = context.empty((L, E), logits.dtype)
    if L:
        pointers = (grad_weights.ptr, logits.ptr, weights.ptr, ids.ptr, grad_logits.ptr)
        args = (*pointers, L, E, ids.shape[1], _over_selected(kind, renormalize))
        _launch(context, f"router_bwd_{logits.dtype}", L, E, args)
    return grad_logits
