"""The layer's operators for autograd: when they are wanted, what backward calls, and that there is no second one."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from moeblaze_cupy.interop.torch_ops import (
    DIFFERENTIABLE,
    READ_IN_BACKWARD,
    Layer,
    Options,
    Sums,
    moe_bwd,
    moe_bwd_,
    moe_bwd_acc,
    moe_bwd_acc_,
    moe_fwd,
    split,
)
from moeblaze_cupy.structures import GRADIENTS

Tensor = torch.Tensor
Grads = tuple[Tensor | None, ...]
Backward = Callable[..., Grads]
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_graphs(function: Function) -> Function:
    """`torch.compiler.disable`, which has no types, with the function's own."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch gives it none
    return disabled


class _NoSecondDerivative(torch.autograd.Function):
    """The first `number` tensors as they are. Their graph ends here, in an error."""

    @staticmethod
    def forward(function: str, number: int, *tensors: Tensor) -> Grads:
        return tensors[:number]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{ctx.function}: no second derivatives")


def first_derivatives_only(function: str) -> Callable[[Backward], Backward]:
    """Decorator of a backward: without a graph, and with create_graph=True one that raises where it is used.

    torch's once_differentiable raises only where the incoming gradient requires one, which that of a sum does not.
    What is compiled has no second derivatives in torch, which says so itself.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return backward(ctx, *grad_outputs)
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            present = [grad for grad in grads if grad is not None]
            if not present:
                return grads
            if transformed():  # where tensors cannot be told to require gradients
                tracked = [*present, *(t for t in ctx.saved_tensors if t is not None and t.requires_grad)]
            else:
                tracked = [grad.requires_grad_() for grad in present]
            raising = iter(_NoSecondDerivative.apply(function, len(present), *tracked))  # type: ignore[no-untyped-call]  # torch gives `apply` no types
            return tuple(None if grad is None else next(raising) for grad in grads)

        return wrapped

    return decorate


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def wanted(tensors: Iterable[Any]) -> bool:
    """Whether a call with these tensors must be one of operators, as something is to follow it."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def transformed() -> bool:
    """Whether a transform of torch.func is at work, whose tensors do not say whether they require gradients."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def stand_in(kind: str | None, weight: Tensor) -> Tensor | None:
    """What autograd gets for a gradient that was added elsewhere: None, or "zeros" or "empty" for its hooks."""
    if kind is None:
        return None
    return torch.zeros_like(weight) if kind == "zeros" else torch.empty_like(weight)


class MoE(torch.autograd.Function):
    """The layer by operators. What backward needs are outputs, so that transforms of torch.func may replace them.

    Backward calls an operator that overwrites what was saved only where it runs now. Compilers get one that does not,
    and put the other in its place where the memory is free.
    """

    @staticmethod
    def forward(save: str, keep_saved: bool, announced: tuple[str | None, ...], *arguments: Any) -> tuple[Tensor, ...]:
        """announced: of each of Sums, the kind of its `stand_in`. arguments: of Options, Sums and Layer, in order."""
        options, _, layer = split(arguments, Options, Sums, Layer)
        made: tuple[Tensor, ...] = moe_fwd(*layer, *options, save)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save, ctx.keep_saved, ctx.announced, *arguments = inputs
        options, sums, layer = split(arguments, Options, Sums, Layer)
        ctx.options, ctx.accumulates = tuple(options), any(total is not None for total in sums)
        _, lists, first_layer, y_swi = output
        kept = lists, first_layer if ctx.save != "recompute" else None, y_swi if ctx.save == "paper" else None
        ctx.save_for_backward(*(getattr(layer, name) for name in READ_IN_BACKWARD), *kept, *sums)
        ctx.mark_non_differentiable(lists, first_layer, y_swi)
        ctx.set_materialize_grads(False)

    @staticmethod
    @first_derivatives_only("moe")
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Grads:
        before = (None,) * (3 + len(Options._fields) + len(Sums._fields))
        if grad_out is None:
            return (*before, *(None,) * len(Layer._fields))
        needed = dict(zip(Layer._fields, ctx.needs_input_grad[len(before) :], strict=True))
        needs = [any(needed[name] for name, of in DIFFERENTIABLE.items() if of == gradient) for gradient in GRADIENTS]
        unpacked = ctx.saved_tensors  # asked for once, as checkpointing wants
        saved, sums = unpacked[: -len(Sums._fields)], unpacked[-len(Sums._fields) :]
        in_place = not ctx.keep_saved and not torch.compiler.is_compiling() and not transformed()
        operator = (moe_bwd_acc_ if in_place else moe_bwd_acc) if ctx.accumulates else moe_bwd_ if in_place else moe_bwd
        totals = sums if ctx.accumulates else ()
        made = operator(grad_out.contiguous(), *saved, *totals, *ctx.options, ctx.save, needs)
        grads = dict(zip(DIFFERENTIABLE, made, strict=True))
        weights = dict(zip(READ_IN_BACKWARD, saved, strict=False))
        for name, total, kind in zip(Sums._fields, sums, ctx.announced, strict=True):
            if total is not None:
                grads[name] = stand_in(kind, weights[name])
        return (*before, *(grads[name] if needed[name] else None for name in Layer._fields))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """Of calls with the same experts: one call with all their tokens."""
        before = len(inputs) - len(Layer._fields)
        layer, dims = Layer(*inputs[before:]), dict(zip(Layer._fields, in_dims[before:], strict=True))
        for name, dim in dims.items():
            if dim is not None and name not in ("x", "ids", "weights"):
                raise RuntimeError(
                    f"moe: {name}: expected one tensor for all of vmap's batch, got one for each element"
                )

        def fold(name: str) -> Tensor:
            tensor, dim = getattr(layer, name), dims[name]
            every = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return every.reshape(-1, every.shape[-1]).contiguous()  # type: ignore[no-any-return]

        folded = layer._replace(x=fold("x"), ids=fold("ids"), weights=fold("weights"))
        out, *kept = MoE.apply(*inputs[:before], *folded)  # type: ignore[no-untyped-call]
        return (out.unflatten(0, (info.batch_size, -1)), *kept), (0, None, None, None)
