"""PyTorch: `moe`, a differentiable function, and `MoE`, a module with a router.

Outputs and workspace come from torch's allocator and launches go to torch's current stream, in
backward too, which autograd runs on another thread. Everything kept for backward goes through
save_for_backward, so saved-tensor hooks see it. CPU tensors run on the NumPy backend.
"""

import functools
import warnings
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeVar

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks, launch_config
from moeblaze_cupy.structures import (
    BIASES,
    GRADIENTS,
    ROUTER_KINDS,
    SAVE_POLICIES,
    Activation,
    SavedForBackward,
    is_gated,
    pair,
)

Grads = tuple[torch.Tensor | None, ...]
Backward = Callable[..., Grads]
Function = TypeVar("Function", bound=Callable[..., Any])


def _outside_of_graphs(function: Function) -> Function:
    """`torch.compiler.disable`, which has no types, with the function's own."""
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch gives it none
    return disabled


class _NoSecondDerivative(torch.autograd.Function):
    """First derivatives as they are. Their graph ends here, in an error."""

    @staticmethod
    def forward(ctx: Any, function: str, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function = function
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{ctx.function}: no second derivatives")


def _first_derivatives_only(function: str) -> Callable[[Backward], Backward]:
    """Decorator of a backward: without a graph, and with create_graph=True one that raises where it is used.

    torch's once_differentiable raises only where the incoming gradient requires one, which that of a sum does not.
    """

    def decorate(backward: Backward) -> Backward:
        def eager(ctx: Any, *grad_outputs: torch.Tensor | None) -> Grads:
            if not torch.is_grad_enabled():
                return backward(ctx, *grad_outputs)
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            present = [grad for grad in grads if grad is not None]
            if not present:
                return grads
            tracked = (grad.requires_grad_() for grad in present)
            raising = iter(_NoSecondDerivative.apply(function, *tracked))  # type: ignore[no-untyped-call]  # torch gives `apply` no types
            return tuple(None if grad is None else next(raising) for grad in grads)

        outside = _outside_of_graphs(eager)

        @functools.wraps(backward)
        def wrapped(ctx: Any, *grad_outputs: torch.Tensor | None) -> Grads:
            # Compiled autograd would trace into it. What is kept outside is slow to call, so eager mode goes past it.
            return (outside if torch.compiler.is_compiling() else eager)(ctx, *grad_outputs)

        return wrapped

    return decorate


class _MainGrad:
    """Where the gradient of a weight is accumulated: main_grad of the parameter that it is, or is a view of."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.name, self.parameter = name, weight if weight.is_leaf else weight._base
        first = weight.storage_offset() - (0 if self.parameter is None else self.parameter.storage_offset())
        self.view = weight.shape, weight.stride(), first
        self.buffer()  # raises now what backward would raise

    def buffer(self) -> torch.Tensor:
        parameter, main_grad = self.parameter, getattr(self.parameter, "main_grad", None)
        if parameter is None or not isinstance(main_grad, torch.Tensor):
            expected = "a parameter, or a view of one, whose main_grad is a tensor"
            raise TypeError(f"moe: {self.name}: expected {expected}, got {type(main_grad)}")
        got, wanted = ((tuple(t.shape), t.stride()) for t in (main_grad, parameter))
        if got != wanted:
            raise ValueError(
                f"moe: {self.name}: expected main_grad with the parameter's shape and strides {wanted}, got {got}"
            )
        if main_grad.dtype not in (torch.float32, parameter.dtype):
            dtypes = " or ".join(dict.fromkeys(str(dtype) for dtype in (torch.float32, parameter.dtype)))
            raise TypeError(f"moe: {self.name}: expected main_grad with dtype {dtypes}, got {main_grad.dtype}")
        if main_grad.device != parameter.device:
            expected = f"main_grad on the parameter's device {parameter.device}"
            raise TypeError(f"moe: {self.name}: expected {expected}, got {main_grad.device}")
        if main_grad.data_ptr() == parameter.data_ptr() and main_grad.numel():
            raise ValueError(f"moe: {self.name}: expected main_grad with memory of its own, got the parameter's")
        shape, strides, first = self.view
        return main_grad.detach().as_strided(shape, strides, main_grad.storage_offset() + first)

    def gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What autograd gets in place of the gradient, as in Megatron: its hooks wait for a tensor, of any contents."""
        if self.parameter is None or not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        zeros = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


class _MoE(torch.autograd.Function):
    """w1 and b1 arrive as gate and up; up is None for one tensor. main_grads: by name, of gate, up and w2."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor | None,
        w2: torch.Tensor,
        b1_gate: torch.Tensor | None,
        b1_up: torch.Tensor | None,
        b2: torch.Tensor | None,
        activation: str | Activation,
        gate_up: str,
        save: str,
        keep_saved: bool,
        main_grads: dict[str, _MainGrad],
    ) -> torch.Tensor:
        w1, b1 = _one_or_pair(gate, up), _one_or_pair(b1_gate, b1_up)
        out: torch.Tensor
        out, saved = mb.moe_forward(
            x, ids, weights, w1, w2, activation=activation, save=save, b1=b1, b2=b2, gate_up=gate_up
        )
        lists, index = saved.index.split()
        biases = b1_gate, b1_up, b2
        ctx.save_for_backward(x, weights, gate, up, w2, *biases, saved.first_layer, saved.y_swi, *lists)
        ctx.saved = SavedForBackward(None, None, None, None, index, None, None, activation, save, gate_up=gate_up)
        ctx.keep_saved, ctx.main_grads = keep_saved, main_grads
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @_first_derivatives_only("moe")
    def backward(ctx: Any, grad_out: torch.Tensor | None) -> Grads:
        if grad_out is None:
            return (None,) * 14
        x, weights, gate, up, w2, b1_gate, b1_up, b2, first_layer, y_swi, *lists = ctx.saved_tensors
        kept, w1, b1 = ctx.saved, _one_or_pair(gate, up), _one_or_pair(b1_gate, b1_up)
        index = kept.index.joined(lists)
        saved = SavedForBackward(
            *(x, weights, w1, w2, index, first_layer, y_swi, kept.activation, kept.save, kept.consumed),
            b1=b1,
            b2=b2,
            gate_up=kept.gate_up,
        )
        needed = ctx.needs_input_grad
        of_weights = needed[0], needed[2], needed[3] or needed[4], needed[5]
        needs = tuple(compress(GRADIENTS + BIASES, (*of_weights, needed[6] or needed[7], needed[8])))
        buffers = {name: main_grad.buffer() for name, main_grad in ctx.main_grads.items()}
        accumulate = {}
        if "w1" in needs and "gate" in buffers:
            accumulate["w1"] = buffers["gate"] if up is None else (buffers["gate"], buffers["up"])
        if "w2" in needs and "w2" in buffers:
            accumulate["w2"] = buffers["w2"]
        try:
            grads = mb.moe_backward(
                grad_out.contiguous(), saved, needs=needs, keep_saved=ctx.keep_saved, accumulate=accumulate
            )
        finally:  # what runs out of memory half way may have overwritten them as well
            kept.consumed = saved.consumed
        grad_gate, grad_up = grads.w1 if isinstance(grads.w1, tuple) else (grads.w1, None)
        grad_w2 = grads.w2
        grad_b1 = grads.b1 if isinstance(grads.b1, tuple) else (grads.b1, None)
        if buffers:
            by_weight = {"gate": (gate, grad_gate), "up": (up, grad_up), "w2": (w2, grads.w2)}
            grad_gate, grad_up, grad_w2 = (
                ctx.main_grads[name].gradient(weight) if name in buffers and grad is not None else grad
                for name, (weight, grad) in by_weight.items()
            )
        return (
            grads.x,
            None,
            grads.weights,
            grad_gate if needed[3] else None,
            grad_up if needed[4] else None,
            grad_w2,
            *(grad if wanted else None for grad, wanted in zip(grad_b1, needed[6:8], strict=True)),
            grads.b2,
            *(None,) * 5,
        )


def _one_or_pair(gate: torch.Tensor | None, up: torch.Tensor | None) -> Any:
    return gate if up is None else (gate, up)


@_outside_of_graphs
def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor,
    *,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    keep_saved: bool = False,
    accumulate_into_main_grad: bool = False,
    b1: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    b2: torch.Tensor | None = None,
    gate_up: str = "halves",
) -> torch.Tensor:
    """The MoE layer (L, d), differentiable in x, weights, w1, w2, b1, b2; arguments as `moeblaze_cupy.moe_forward`.

    Where no gradient can be asked for, nothing is saved. Backward overwrites the saved activations with
    their gradients, so a second backward through the same graph raises RuntimeError unless `keep_saved`, on the CPU
    too, where nothing is overwritten; with save="recompute" it is allowed. gradcheck is such a case.
    Backward computes the gradients of all tensors that required one in forward, also where torch.autograd.grad asks
    for some of them only, and adds to every main_grad.
    accumulate_into_main_grad: Megatron's contract for w1 and w2, which then are parameters, or views of parameters
    such as transposed ones. Backward adds their gradients to `main_grad` of the parameter, a tensor of the
    parameter's shape and strides in float32 or its dtype, as `accumulate` of `moeblaze_cupy.moe_backward` does, and
    .grad stays None. main_grad shares no memory with the parameter. A parameter with the attribute
    `grad_added_to_main_grad` has it set to True and gets a .grad of no meaning (zeros if its `zero_out_wgrad` is true),
    for hooks that wait for one.
    There are no second derivatives: a graph made by create_graph=True raises RuntimeError where it is used.
    Forward-mode differentiation, torch.func, vmap, is_grads_batched, make_fx, torch.export and torch.jit.trace are
    refused, and torch.compile runs the layer outside of its graphs.
    Under torch.autocast nothing is cast: x, w1 and w2 come in one dtype.
    Raises TypeError, ValueError or RuntimeError as `moeblaze_cupy.moe_forward` does.
    """
    parts = pair(w1)
    if len(parts) not in (1, 2):
        raise ValueError(f"moe: w1: expected one tensor or a pair (gate, up), got {len(parts)} tensors")
    gate, up = (*parts, None)[:2]
    of_b1 = () if b1 is None else pair(b1)
    if len(of_b1) > 2 or (b1 is not None and not of_b1):
        raise ValueError(f"moe: b1: expected one tensor or a pair (gate, up), got {len(of_b1)} tensors")
    b1_gate, b1_up = (*of_b1, None, None)[:2]
    tensors = {"x": x, "ids": ids, "weights": weights, "w1": gate, "w2": w2} | ({} if gate is w1 else {"w1[1]": up})
    biases = dict(zip(("b1", "b1[1]"), of_b1, strict=False)) | ({} if b2 is None else {"b2": b2})
    tensors |= biases
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"moe: {name}: expected a torch tensor, got {type(tensor)}")
    checks.untransformed("moe", tensors)
    if gate.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
        expected = f"x's dtype {x.dtype}, as torch.autocast casts other layers' outputs but not these weights"
        raise TypeError(f"moe: w1: expected {expected}, got {gate.dtype}; pass x.to(w1.dtype), or all in one dtype")
    differentiable = x.requires_grad or weights.requires_grad or gate.requires_grad or w2.requires_grad
    differentiable = differentiable or any(bias.requires_grad for bias in biases.values())
    if not (torch.is_grad_enabled() and (differentiable or (up is not None and up.requires_grad))):
        out: torch.Tensor = mb.moe_forward(
            x, ids, weights, w1, w2, activation=activation, save=None, b1=b1, b2=b2, gate_up=gate_up
        )[0]
        return out
    if save is None:
        raise ValueError("moe: save: expected a policy that keeps something, as gradients are required, got None")
    main_grads = {}
    if accumulate_into_main_grad:
        if up is not None and gate.requires_grad != up.requires_grad:
            raise ValueError("moe: w1: expected a pair of which both or none require gradients, got one of each")
        by_name = {"gate": ("w1" if up is None else "w1[0]", gate), "up": ("w1[1]", up), "w2": ("w2", w2)}
        main_grads = {
            n: _MainGrad(*weight) for n, weight in by_name.items() if getattr(weight[1], "requires_grad", False)
        }
    arrays = x, ids, weights, gate, up, w2, b1_gate, b1_up, b2
    out = _MoE.apply(*arrays, activation, gate_up, save, keep_saved, main_grads)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return out


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, k: int, kind: str, renormalize: bool | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights: torch.Tensor
        ids: torch.Tensor
        weights, ids = mb.route(logits, k, kind=kind, renormalize=renormalize)
        ctx.save_for_backward(logits, weights, ids)
        ctx.options = {"kind": kind, "renormalize": renormalize}
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @_first_derivatives_only("route")
    def backward(ctx: Any, grad_weights: torch.Tensor, _: None) -> Grads:
        logits, weights, ids = ctx.saved_tensors
        return mb.route_backward(grad_weights.contiguous(), logits, weights, ids, **ctx.options), None, None, None


@_outside_of_graphs
def route(
    logits: torch.Tensor, k: int, kind: str = "softmax_topk", renormalize: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moeblaze_cupy.route` on tensors: weights (L, k), differentiable in logits (L, E), and ids (L, k) int32.

    renormalize: None means k > 1. Where k = 1, True or kind "topk_softmax" make every weight 1 and its gradient 0.
    Backward needs the ids as they are: to drop tokens, pass torch.where(mask, -1, ids) on, and change none in place.
    No second derivatives and no transforms, as for `moe`. Raises TypeError, ValueError or RuntimeError as
    `moeblaze_cupy.route` does.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"route: logits: expected a torch tensor, got {type(logits)}")
    checks.untransformed("route", {"logits": logits})
    routed: tuple[torch.Tensor, torch.Tensor]
    routed = _Route.apply(logits, k, kind, renormalize)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return routed


def _size(argument: str, value: int, most: int | None = None) -> int:
    size = checks.integer("MoE", argument, value)
    if size < 1 or (most is not None and size > most):
        raise checks.bad_value("MoE", argument, "at least 1" if most is None else f"1 to {most}", size)
    return size


class MoE(torch.nn.Module):
    """A router and its experts: (..., d) -> (..., d).

    w1 is (E, d, 2h), or (E, d, h) without a gate, and w2 (E, h, d), each the transposed view of a parameter
    stored as transformers and vLLM store it (`w1_storage` (E, 2h, d), `w2_storage` (E, d, h)). Router
    logits are computed and normalised in fp32 (fp64 of such x), under torch.autocast too. renormalize, kind: as of
    `route`; a choice for k = 1 that makes every weight 1, so that the router is not trained, is warned of.
    bias: b1 (E, 2h) or (E, h) and b2 (E, d) as parameters, which begin as zeros. gate_up: the order of w1's and b1's
    columns. keep_saved, save, activation: as of `moe`; accumulate_into_main_grad too, for the experts' weights.
    Raises TypeError or ValueError for sizes and names that no forward would take.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        k: int,
        *,
        activation: str | Activation = "swiglu",
        save: str | None = "minimal",
        kind: str = "softmax_topk",
        renormalize: bool | None = None,
        keep_saved: bool = False,
        accumulate_into_main_grad: bool = False,
        bias: bool = False,
        gate_up: str = "halves",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, d_hidden = _size("d_model", d_model), _size("d_hidden", d_hidden)
        num_experts = _size("num_experts", num_experts, launch_config.MAX_ROUTER_EXPERTS)
        k = _size("k", k, min(num_experts, launch_config.MAX_ROUTER_K))
        checks.activation("MoE", activation)
        checks.gate_up("MoE", gate_up, activation)
        checks.one_of("MoE", "save", save, SAVE_POLICIES)
        checks.one_of("MoE", "kind", kind, ROUTER_KINDS)
        renormalize = checks.renormalized("MoE", renormalize, k)
        if k == 1 and (renormalize or kind == "topk_softmax"):
            made = "renormalize=True" if renormalize else f"kind={kind!r}"
            advice = 'pass kind="softmax_topk" and leave renormalize out'
            warnings.warn(f"MoE: k = 1 with {made} trains no router, as every weight is 1; {advice}", stacklevel=2)
        self.k, self.activation, self.save, self.kind, self.renormalize = k, activation, save, kind, renormalize
        self.keep_saved, self.accumulate_into_main_grad = keep_saved, accumulate_into_main_grad
        self.gate_up = gate_up
        width = d_hidden * (2 if is_gated(activation) else 1)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(num_experts, d_model)
        self.w1_storage = parameter(num_experts, width, d_model)
        self.w2_storage = parameter(num_experts, d_model, d_hidden)
        self.b1 = parameter(num_experts, width) if bias else None
        self.b2 = parameter(num_experts, d_model) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1 / sqrt(fan in); biases are zeros."""
        for parameter in (self.router, self.w1_storage, self.w2_storage):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        for bias in (self.b1, self.b2):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        d = self.router.shape[1]
        if x.dim() == 0 or x.shape[-1] != d:
            raise ValueError(f"MoE: x: expected shape (..., d) = (..., {d}), got {tuple(x.shape)}")
        tokens = x.reshape(-1, d).contiguous()
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.nn.functional.linear(tokens.to(wide), self.router.to(wide))
        weights, ids = route(logits, self.k, self.kind, self.renormalize)
        w1, w2 = self.w1_storage.transpose(1, 2), self.w2_storage.transpose(1, 2)
        out = moe(
            tokens,
            ids,
            weights,
            w1,
            w2,
            activation=self.activation,
            save=self.save,
            keep_saved=self.keep_saved,
            accumulate_into_main_grad=self.accumulate_into_main_grad,
            b1=self.b1,
            b2=self.b2,
            gate_up=self.gate_up,
        )
        return out.reshape(x.shape)

    def extra_repr(self) -> str:
        E, d, h = self.w2_storage.shape
        options = ("activation", "save", "kind", "renormalize", "keep_saved", "accumulate_into_main_grad", "gate_up")
        sizes = f"d_model={d}, d_hidden={h}, num_experts={E}, k={self.k}"
        bias = f"bias={self.b1 is not None}"
        return ", ".join([sizes, *(f"{name}={getattr(self, name)!r}" for name in options), bias])
