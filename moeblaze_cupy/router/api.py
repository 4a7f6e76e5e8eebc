"""The public functions of routing: which experts a token goes to, with what weights, and what balances their load."""

from typing import Any

from moeblaze_cupy import checks, reference
from moeblaze_cupy.calls import Lookup, graph_break
from moeblaze_cupy.router import launches as router
from moeblaze_cupy.router import options as router_options
from moeblaze_cupy.types import RouterSums


def _settled(function: str, sums: Any, groups: Any, sequences: Any) -> tuple[Any, Any, Any, Any]:
    """Returns sums and groups with lists made tuples, and sequences as (the number, None) or (None, the offsets).

    The results can be part of a call's key as they are, before any check.
    """
    if isinstance(sums, (list, set, frozenset)):
        sums = tuple(sums)
    if isinstance(groups, list):
        groups = tuple(groups)
    return sums, groups, *checks.divided(function, sequences)


@graph_break
def route(
    logits: Any,
    k: int | None = None,
    *,
    score: str = "softmax",
    renormalize: bool | None = None,
    eps: float = 0.0,
    scale: float = 1.0,
    bias: Any = None,
    bias_on: str = "scores",
    groups: tuple[int, int, int] | None = None,
    ids: Any = None,
    token_offsets: Any = None,
    token_mask: Any = None,
    top_p: float | None = None,
    threshold: float | None = None,
    sums: tuple[str, ...] = (),
    sequences: Any = 1,
) -> tuple[Any, ...]:
    """Chooses k experts per token, and their weights (paper section 2.1): w = s[ids], w /= sum(w) + eps, times scale.

    logits: x (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 4096; k <= min(E, 64).
    score: s = softmax(x), sigmoid(x), "sqrt_softplus" (its square root), "identity" (x) or "relu" (max(x, 0)).
    renormalize: divide by the sum; None means k > 1: one weight over itself is always 1, and the logits then get
    no gradient. eps >= 0 is added to the sum, but for softmax, whose renormalised form is the softmax over the chosen.
    bias: (E,) or (L, E) float32, added to s, or with bias_on="logits" to x, for the choice alone; it has no gradient.
    Without it the logits rank the experts, which is the same order. -inf forbids an expert as long as k others remain.
    groups: (n, kept, top): experts form n equal groups of consecutive ones, and the `kept` groups with the largest
    sums of their `top` largest s + bias compete; k <= kept * E / n.
    ids: (L, k) int32 or int64: these experts instead of a choice, whatever bias and groups; k is None or theirs. An id
    < 0 or >= E is an empty slot. With token_offsets (L+1,) int32 ids are (P,), and pair p is token t's for
    token_offsets[t] <= p < token_offsets[t+1]; renormalize=None then means True.
    token_mask: (L,) bool; a token that is False gets empty slots and has no share in the sums.
    top_p: a slot stays while the softmax(x) of the slots before it adds up to less; threshold: while its key, s or what
    bias makes of it, is at least this. Other slots are empty, and no part of the sum of weights. A NaN stays.
    sums: any of "z", "entropy" and one of "softmax", "sigmoid", "sqrt_softplus": what RouterSums is to hold. The
    last adds softmax(x), or the scores over their sum + 1e-20, to score_sums.
    sequences: S equal runs of consecutive tokens, or offsets (S+1,) int32 of S runs, to add up apart. S E, or S without
    score_sums, is at most 2^31 - 128. With sums on CUDA S is at most 65,535.

    Returns weights (L, k) float32 (float64 of such logits) and ids (L, k) int32, largest key first, ties to the lower
    id, or (P,) each; with `sums` also a RouterSums. An empty slot has the id -1 and the weight 0. Arithmetic is fp32.
    A NaN logit ranks first; its weight is NaN, and with softmax or renormalize those of its whole token.
    Scores that are all 0 make NaN of renormalised weights if eps = 0.
    The contents of ids, token_offsets and sequences are not checked: offsets that fall make results without meaning.
    Raises TypeError (dtype, device), ValueError (shape, k, options), or RuntimeError for tensors that autograd or
    a transform of torch would have to follow.
    """
    if k is not None and type(k) is not int:
        k = checks.integer("route", "k", k)
    number, offsets = sequences, None
    if type(sums) is not tuple or isinstance(groups, list) or type(sequences) is not int:
        sums, groups, number, offsets = _settled("route", sums, groups, sequences)
    options = (score, renormalize, eps, scale, bias_on, groups, top_p, threshold, sums, number)
    arrays = (logits, bias, ids, token_offsets, token_mask, offsets)
    # The types tell True from 1, which are equal.
    look = Lookup("route", (k, options, *map(type, options)), router.ROUTED, arrays)
    if look.record is None:
        checked = router_options.of("route", *options)
        call = look.begin()
        router_options.forward("route", call.described, k, checked)
        ragged = token_offsets is not None
        slots = None if ragged else (k if ids is None else call.described["ids"].shape[1])
        checked = checked.renormalized(slots)
        if call.on_cpu:
            made = call.on_host(reference.route, k=k, **checked._asdict())
            return (*made[:2], RouterSums(*made[2])) if sums else made
        look.keep(router.configure_forward(tuple(call.layouts.items()), slots, checked))
    weights, chosen, *added = look.run(router.route)
    return (weights, chosen, RouterSums(*added)) if sums else (weights, chosen)


@graph_break
def route_backward(
    grad_weights: Any,
    logits: Any,
    weights: Any,
    ids: Any,
    *,
    score: str = "softmax",
    renormalize: bool | None = None,
    eps: float = 0.0,
    scale: float = 1.0,
    bias: Any = None,
    bias_on: str = "scores",
    groups: tuple[int, int, int] | None = None,
    token_offsets: Any = None,
    token_mask: Any = None,
    top_p: float | None = None,
    threshold: float | None = None,
    sums: tuple[str, ...] = (),
    sequences: Any = 1,
    grad_score_sums: Any = None,
    grad_z_sums: Any = None,
    grad_entropy_sums: Any = None,
) -> Any:
    """Returns the gradient of `route`'s weights and sums with respect to its logits, (L, E) in their dtype.

    grad_weights and weights (L, k) float32 (float64 of such logits), ids (L, k) int32 as `route` returned them, or (P,)
    each with token_offsets. score, renormalize, eps, scale, token_mask, sums and sequences: as given to `route`. bias,
    bias_on, groups, top_p and threshold take part in the choice alone, which has no gradient: they may be given, and
    the arrays among them are not looked at. An empty slot has no gradient.
    grad_score_sums (S, E), grad_z_sums (S,), grad_entropy_sums (S,): gradients of what `sums` names, of the weights'
    dtype; None is 0. Raises TypeError, ValueError or RuntimeError as `route` does.
    """
    number, offsets = sequences, None
    if type(sums) is not tuple or isinstance(groups, list) or type(sequences) is not int:
        sums, groups, number, offsets = _settled("route_backward", sums, groups, sequences)
    options = (score, renormalize, eps, scale, bias_on, groups, top_p, threshold, sums, number)
    masks = (token_offsets, token_mask, offsets)
    arrays = (logits, grad_weights, weights, ids, *masks, grad_score_sums, grad_z_sums, grad_entropy_sums)
    look = Lookup("route_backward", (options, *map(type, options)), router.BACKWARD[:-1], arrays)
    if look.record is None:
        checked = router_options.of("route_backward", *options)
        call = look.begin(required=4)
        router_options.backward("route_backward", call.described, checked)
        shape = call.described["ids"].shape
        checked = checked.renormalized(shape[1] if token_offsets is None else None)
        if call.on_cpu:
            return call.on_host(reference.route_backward, **checked._asdict())
        look.keep(router.configure_backward(tuple(call.layouts.items()), checked))
    return look.run(router.route_backward)
