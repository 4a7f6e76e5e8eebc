"""The router for autograd: one form over plain calls, one over operators, and the logits."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.interop.torch.autograd import Grads, first_derivatives_only, record_inputs
from moeblaze_cupy.interop.torch.router_operators import READ_BY_ROUTER, Routing, asked_sums, route, route_bwd
from moeblaze_cupy.router.options import RouterOptions

Tensor = torch.Tensor


class OperatorRoute(torch.autograd.Function):
    """The router by operators. It gives weights, ids and ROUTER_SUMS, empty if not asked for."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Routes. arguments: those of Routing, k, and those of RouterOptions."""
        made: tuple[Tensor, ...] = route(*arguments)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        routing = Routing(*inputs[: len(Routing._fields)])
        ctx.options, ctx.inputs = inputs[len(Routing._fields) + 1 :], len(inputs)
        weights, ids, *sums = output
        ctx.save_for_backward(weights, ids, *(getattr(routing, name) for name in READ_BY_ROUTER))
        asked = asked_sums(RouterOptions(*ctx.options).sums)
        ctx.mark_non_differentiable(ids, *(total for total, wanted in zip(sums, asked, strict=True) if not wanted))
        ctx.set_materialize_grads(False)

    @staticmethod
    @first_derivatives_only("route", traceable=True)
    def backward(ctx: Any, grad_weights: Tensor | None, _: None, *grad_sums: Tensor | None) -> Grads:
        rest: Grads = (None,) * (ctx.inputs - 1)
        asked = zip(grad_sums, asked_sums(RouterOptions(*ctx.options).sums), strict=True)
        present = [grad.contiguous() if wanted and grad is not None else None for grad, wanted in asked]
        weights, ids, *read = ctx.saved_tensors
        if grad_weights is None and all(grad is None for grad in present):
            return (None, *rest)
        grad_weights = torch.zeros_like(weights) if grad_weights is None else grad_weights.contiguous()
        return (route_bwd(grad_weights, weights, ids, *present, *read, *ctx.options), *rest)


class EagerRoute(torch.autograd.Function):
    """The router by plain calls.

    call: k, and by name the options of `moeblaze_cupy.route` that are no tensors; an int of sequences is one.
    others: the tensors of ROUTE_OTHERS, None where absent; () if all are, as apply looks at each argument.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[int | None, dict[str, Any]], logits: Tensor, *others: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        k, ctx.options = call
        weights, chosen, *sums = mb.route(logits, k, **ctx.options, **named(ROUTE_OTHERS, others))
        ctx.save_for_backward(logits, weights, chosen, *others[2:])  # the others take part in the choice alone
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return (weights, chosen, *sums[0]) if sums else (weights, chosen)

    @staticmethod
    @first_derivatives_only("route")
    def backward(ctx: Any, grad_weights: Tensor | None, _: None, *grad_sums: Tensor | None) -> Grads:
        logits, weights, chosen, *read = ctx.saved_tensors
        record_inputs(ctx, logits)
        rest = (None,) * (len(ctx.needs_input_grad) - 2)
        if grad_weights is None and not any(grad is not None for grad in grad_sums):
            return (None, None, *rest)
        grad_weights = torch.zeros_like(weights) if grad_weights is None else grad_weights.contiguous()
        of_sums = [None if grad is None else grad.contiguous() for grad in grad_sums]
        grads = named(("grad_score_sums", "grad_z_sums", "grad_entropy_sums"), of_sums)
        masks = named(ROUTE_OTHERS[2:], read)
        return (None, mb.route_backward(grad_weights, logits, weights, chosen, **masks, **ctx.options, **grads), *rest)


ROUTE_OTHERS = ("bias", "ids", "token_offsets", "token_mask", "sequences")


def named(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns the tensors that are not None, by name. tensors: one for each name, or () where all are absent."""
    return {name: tensor for name, tensor in zip(names, tensors, strict=False) if tensor is not None}


_MM_HAS_OUT_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


class _RouterLogits(torch.autograd.Function):
    """The product of x (L, d) and weight (E, d), both bf16 or fp16 on CUDA: (L, E) summed and returned in float32.

    Masked tokens are zeros, as in `router_logits`. Backward makes the copy of x that has them, so that none is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, token_mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, token_mask)
        return without_masked(torch.mm(x, weight.t(), out_dtype=torch.float32), token_mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, weight, token_mask = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad = without_masked(grad.to(x.dtype), token_mask)
            return (
                torch.mm(grad, weight) if ctx.needs_input_grad[0] else None,
                torch.mm(grad.t(), without_masked(x, token_mask)) if ctx.needs_input_grad[1] else None,
                None,
            )


def without_masked(rows: Tensor, token_mask: Tensor | None) -> Tensor:
    """Returns rows (L, n), with zeros where token_mask (L,) is False."""
    return rows if token_mask is None else torch.where(token_mask[:, None], rows, 0)


def router_logits(x: Tensor, weight: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """Returns logits (L, E) in float32 (float64 for such x), under torch.autocast too.

    token_mask: (L,) bool. Tokens where it is False are zeros to the product, whatever is in x. The gradient of the
    weight is a product with x, in which 0 * NaN would be NaN.
    16-bit tensors are not cast where a product of theirs can have a float32 result. A product in float32 would take far
    longer, and its inputs have no more digits.
    """
    # torch.autocast refuses meta tensors, which operators give shapes to.
    plain = contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
    with plain:
        halves = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
        if halves and x.is_cuda and _MM_HAS_OUT_DTYPE:
            logits: Tensor = _RouterLogits.apply(x, weight, token_mask)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
            return logits
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.nn.functional.linear(without_masked(x, token_mask).to(wide), weight.to(wide))
