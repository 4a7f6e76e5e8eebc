"""PyTorch: `moe`, a differentiable function, and `MoE`, a module with a router.

Outputs and workspace come from torch's allocator and launches go to torch's current stream, in
backward too, which autograd runs on another thread. Everything kept for backward goes through
save_for_backward, so saved-tensor hooks see it. CPU tensors run on the NumPy backend.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import autograd as torch_autograd
from moeblaze_cupy.interop.torch import fp8 as torch_fp8
from moeblaze_cupy.interop.torch import operators as torch_ops
from moeblaze_cupy.interop.torch import private
from moeblaze_cupy.interop.torch import quantised as torch_quantised
from moeblaze_cupy.interop.torch import router as torch_router
from moeblaze_cupy.interop.torch import router_operators as torch_router_ops
from moeblaze_cupy.interop.torch import sums as torch_sums
from moeblaze_cupy.interop.torch.operators import Options, Sums
from moeblaze_cupy.layer.api import LayerExtras, forward
from moeblaze_cupy.lora import checks as lora_checks
from moeblaze_cupy.quantised import api as quantised
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.router import options as router_options
from moeblaze_cupy.router.options import RouterOptions
from moeblaze_cupy.types import (
    SAVE_POLICIES,
    WEIGHT_FORMATS,
    Activation,
    Fp8Weights,
    LayerArrays,
    LayerOptions,
    Lora,
    QuantizedWeight,
    RouterSums,
    is_gated,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of MoE's parameters


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w1: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | QuantizedWeight,
    w2: torch.Tensor | QuantizedWeight,
    *,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    keep_saved: bool = False,
    accumulate_into_main_grad: bool | Mapping[str, Any] = False,
    b1: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    b2: torch.Tensor | None = None,
    gate_up: str = "halves",
    token_offsets: torch.Tensor | None = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
    keep_fp8_weights: bool = True,
    lora: Lora | None = None,
    memory_limit: int | None = None,
    fp8_wgrad: bool = False,
) -> torch.Tensor:
    """The MoE layer without its router: (L, d), differentiable in x, weights, w1, w2, b1, b2 and the factors of lora.

    x: (L, d) bfloat16, float16 or float32, on the CPU also float64.
    ids: (L, k) int32 or int64, or (P,) with token_offsets; an id below 0 or from E on is an empty slot. So ids that
    count from 1 leave expert 0 without tokens and raise nothing: MOEBLAZE_CHECK_IDS=1 finds them.
    weights: (L, k) or (P,), float32 or x's dtype, the router's; None with unreduced, unless they are on the input.
    w1: (E, d, 2h), gate columns before up columns, or a pair of (E, d, h), or (E, d, h) for an activation without a
    gate; x's dtype. Transposed views of (E, 2h, d) are read as they lie.
    w2: (E, h, d) in x's dtype.
    activation: a name or `moeblaze_cupy.Activation`. save: what is kept for backward, "minimal", "recompute", "fp8",
    "paper" or, where no gradient is asked for, None.
    b1, b2: (E, 2h), or in w1's form, and (E, d) biases in float32 or w1's dtype.
    gate_up: "halves", or "interleaved" where gate and up columns alternate. weights_on: "output" or "input".
    token_offsets: (L + 1,) int32, where each token's pairs begin. identity_experts: Z, ids E to E + Z - 1 return x.
    unreduced: True returns the outputs of the slots, (L, k, d), or (P, d) with token_offsets.
    Where no gradient can be asked for, nothing is saved. Backward overwrites the saved activations with
    their gradients, so a second backward through the same graph raises RuntimeError unless `keep_saved`, on the CPU
    too, where nothing is overwritten. With save="recompute" or "fp8" it needs no `keep_saved`. torch's gradcheck runs
    several backwards.
    Backward computes the gradients of all tensors that required one in forward, also where torch.autograd.grad asks
    for some of them only, and adds to every main_grad.
    accumulate_into_main_grad: Megatron's contract for w1 and w2, which then are parameters, or views of parameters
    such as transposed ones. Backward adds their gradients to `main_grad` of the parameter, a tensor of the
    parameter's shape and strides in float32 or its dtype, as `accumulate` of `moeblaze_cupy.moe_backward` does, and
    .grad stays None. main_grad shares no memory with the parameter. A parameter with the attribute
    `grad_added_to_main_grad` has it set to True and gets a .grad of no meaning (zeros if its `zero_out_wgrad` is true),
    for hooks that wait for one. In what torch.compile compiles a view does not tell its parameter: give the
    parameters, {"w1": parameter or pair, "w2": parameter}, of which w1 and w2 are views as a whole. The attribute is
    then set in forward.
    There are no second derivatives: a graph made by create_graph=True raises RuntimeError where it is used.
    torch.compile, torch.export, make_fx, dispatch modes, tensor subclasses, and grad and vjp of torch.func get
    operators of the namespace `moeblaze`. vmap, forward-mode differentiation, is_grads_batched, torch.jit.trace, and
    torch.export with gradients are refused.
    Under torch.autocast x, w1 and w2 are cast as linear casts its tensors, and out is in autocast's dtype. weights stay
    in float32; of another dtype than that and autocast's they come to it.
    w1, w2: either may be `QuantizedWeight` of tensors that require no gradient. Its parts are saved for backward, which
    decodes them again.
    lora: low-rank factors beside w1 and w2, as of `moeblaze_cupy.moe_forward`. Those that require a gradient get one in
    their dtype, and so do w1 and w2 if they require it. autocast leaves factors in float32. accumulate_into_main_grad
    is then refused.
    torch.compile calls a layer with `QuantizedWeight` or lora between its graphs. Tensor subclasses and transforms of
    torch.func are refused beside them.
    precision, fp8_weights, fp8_wgrad: as of `moeblaze_cupy.moe_forward`. Gradients are those of w1 and w2. Where
    `fp8_weights` is None, an operator of its own quantises the weights in a compiled graph.
    keep_fp8_weights: False quantises the weights in backward again, rather than keep what forward made: for parameters
    whose memory is freed after forward, as FSDP2 does.
    memory_limit: as of `moeblaze_cupy.moe_forward`. torch.compile calls such a layer between its graphs. Where else
    operators are needed, and with token_offsets, it is refused.
    Where torch multiplies float32 matrices on CUDA in TF32 (torch.backends.cuda.matmul.fp32_precision or allow_tf32, at
    the time of forward), products of float32 layers are in TF32 too, as with tf32=True of `moeblaze_cupy.moe_forward`.
    Raises TypeError, ValueError or RuntimeError as `moeblaze_cupy.moe_forward` does. Backward raises RuntimeError for a
    tensor whose storage has been freed since forward, as FSDP2 frees that of gathered parameters.
    """
    gate, up = torch_arguments.gate_and_up("w1", w1)
    b1_gate, b1_up = (None, None) if b1 is None else torch_arguments.gate_and_up("b1", b1)
    layer = LayerArrays(x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets)
    options = LayerOptions(
        activation, save, gate_up, weights_on, unreduced, identity_experts, None, precision, memory_limit, fp8_wgrad
    )
    return _moe(layer, options, _Call(keep_saved, accumulate_into_main_grad, fp8_weights, keep_fp8_weights, None, lora))


class _Call(NamedTuple):
    """What `moe` is told beside a layer's tensors and options."""

    keep_saved: bool
    accumulate: bool | Mapping[str, Any]  #: into main_grad
    fp8_weights: Fp8Weights | None
    keep_fp8_weights: bool
    #: The shape of out, which is no view then; None for (L, d), or that of unreduced outputs.
    shape: tuple[int, ...] | None = None
    lora: Lora | None = None
    function: str = "moe"  #: which errors about main_grad name


def _in_tf32(options: LayerOptions, x: torch.Tensor) -> LayerOptions:
    """Returns the options with torch's setting for x in place of `tf32`."""
    if not torch_arguments.in_tf32(x):
        return options
    fields: list[Any] = list(options)
    fields[LayerOptions._fields.index("tf32")] = True
    return LayerOptions(*fields)  # torch 2.6 compiles no `_replace`


def _moe(layer: LayerArrays, options: LayerOptions, call: _Call) -> torch.Tensor:
    x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets = layer
    if call.lora is not None or isinstance(gate, QuantizedWeight) or isinstance(w2, QuantizedWeight):
        if torch.compiler.is_compiling():
            private.break_graph("moe: expected no lora and no QuantizedWeight in a graph, as they have no operators")
        return _moe_without_operators(layer, options, call)
    if options.memory_limit is not None:
        if torch.compiler.is_compiling():
            private.break_graph("moe: expected no memory_limit in a graph, as chunks have no operators")
            return _moe_between_graphs(layer, options, call)
        layer = LayerArrays(*map(torch_autograd.waited, layer))
        x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets = layer
        if private.number_of_dispatch_modes() and torch_autograd.is_plain(layer) and not call.accumulate:
            return _moe_without_operators(layer, options, call)
    fp8_weights = call.fp8_weights
    of_fp8 = fp8_checks.arrays_of("moe", options.precision, fp8_weights)
    as_operators = torch_autograd.needs_operators((*layer, *of_fp8) if of_fp8 else layer)
    no_weights = weights is None and not options.unreduced
    if as_operators or no_weights or x is None or ids is None or gate is None or w2 is None:
        torch_arguments.check_tensors(layer, options.unreduced)
    if not as_operators:
        checks.untransformed("moe", "x", layer)
    main_grads = {}
    if call.accumulate and torch.is_grad_enabled():
        main_grads = torch_autograd.main_grads(gate, up, w2, call.accumulate, call.function)
    autocast = as_operators or private.any_autocast()
    if autocast and torch_arguments.in_autocast(x):
        (x, gate, up, w2), (weights, b1_gate, b1_up, b2) = torch_arguments.autocast(
            x.device.type, (x, gate, up, w2), (weights, b1_gate, b1_up, b2)
        )
        layer = LayerArrays(x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets)
    options = _in_tf32(options, x)
    differentiable = torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or any(t is not None and t.requires_grad for t in layer[2:])
    )
    if not differentiable:  # nothing else looks at it
        checks.one_of("moe", "save", options.save, SAVE_POLICIES)
    elif options.save is None:
        raise ValueError("moe: save: expected a policy that keeps something, as gradients are required, got None")
    if as_operators:
        return _by_operators(layer, options, call, of_fp8, main_grads, differentiable)
    out: torch.Tensor
    if not differentiable:
        extras = None if fp8_weights is None else LayerExtras(fp8_weights=fp8_weights)
        out = forward(layer, _unsaved(options), extras, "moe")[0]
        return torch_autograd.in_shape(out, call.shape)
    # apply looks at each argument, so it gets the tensors that there are.
    tensors = layer[:6] if b1_gate is b1_up is b2 is token_offsets is None else layer
    # Owners take gradients of weights after those of x, which chunks and products in e4m3 do not leave to them.
    shared = up is None and len(tensors) == 6 and not main_grads and options.memory_limit is None
    owners = torch_sums.owners_of(gate, w2) if shared and not options.fp8_wgrad else None
    of_fp8_call = fp8_weights, call.keep_fp8_weights
    told = torch_autograd.EagerCall(call.keep_saved, main_grads, options, *of_fp8_call, owners, call.shape)
    out = torch_autograd.EagerMoE.apply(told, *tensors)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return out


_moe_between_graphs = graph_break(_moe)


def _unsaved(options: LayerOptions) -> LayerOptions:
    """The same with save=None. `_make` takes a third of the time of `_replace`."""
    return LayerOptions._make((options.activation, None, *options[2:]))


@graph_break
def _moe_without_operators(layer: LayerArrays, options: LayerOptions, call: _Call) -> torch.Tensor:
    """`_moe` with w1 or w2 in four or eight bits, low-rank factors, or, under a dispatch mode, in chunks of tokens.

    Compiled code calls it between its graphs.
    """
    lora = None if call.lora is None else lora_checks.given("moe", call.lora)
    factors: list[Any] = [] if lora is None else list(lora.factors)
    frozen, plain, parts = torch_quantised.apart(LayerArrays(*map(torch_autograd.waited, layer)))
    x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets = plain
    given = ("w1", gate), ("w2", w2), *zip(lora_checks.NAMES, factors, strict=False)
    for name, tensor in (("x", x), ("ids", ids), *((n, t) for n, t in given if t is not None)):
        torch_arguments.check_tensor(name, tensor)
    torch_quantised.check_eager((*plain, *parts, *factors))
    checks.untransformed("moe", "x", (*plain, *factors))
    if call.accumulate:
        expected = "False with lora or QuantizedWeight, which has no gradient"
        got = "True" if call.accumulate is True else type(call.accumulate)  # not the tensors in it
        raise checks.bad_value("moe", "accumulate_into_main_grad", expected, got)
    if private.any_autocast() and torch_arguments.in_autocast(x):
        (x, gate, up, w2), (weights, b1_gate, b1_up, b2, *factors) = torch_arguments.autocast(
            x.device.type, (x, gate, up, w2), (weights, b1_gate, b1_up, b2, *factors)
        )
    plain = LayerArrays(x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets)
    options = _in_tf32(options, x)
    checks.one_of("moe", "save", options.save, SAVE_POLICIES)
    out: torch.Tensor
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*plain, *factors))):
        options = _unsaved(options)
        extras = LayerExtras(fp8_weights=call.fp8_weights, lora=lora and lora.with_factors(factors))
        out = forward(frozen.joined(plain, parts), options, extras, "moe")[0]
        torch_ops.count_beside_operators(frozen.joined(plain, parts), ids.numel(), extras.lora)
        return torch_autograd.in_shape(out, call.shape)
    if options.save is None:
        raise ValueError("moe: save: expected a policy that keeps something, as gradients are required, got None")
    scales = lora and lora.with_factors([None] * len(factors))
    of_fp8 = call.fp8_weights, call.keep_fp8_weights
    told = torch_autograd.EagerCall(call.keep_saved, {}, options, *of_fp8, None, call.shape, frozen, scales)
    out = torch_autograd.EagerMoE.apply(told, *plain, *parts, *factors)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return out


def _by_operators(
    layer: LayerArrays,
    options: LayerOptions,
    call: _Call,
    of_fp8: tuple[Any, ...],
    main_grads: dict[str, torch_autograd.MainGrad],
    differentiable: bool,
) -> torch.Tensor:
    """`_moe` for compilers, dispatch modes and transforms. of_fp8: the arrays of `call.fp8_weights`."""
    torch_autograd.outside_of_vmap("moe", "x", (*layer, *of_fp8))
    if options.memory_limit is not None:
        expected = "None with the device meta, tensor subclasses, transforms, and main_grad under a dispatch mode"
        raise checks.bad_value("moe", "memory_limit", expected, options.memory_limit)
    fp8_weights, save = call.fp8_weights, options.save
    of_slots = options.weights_on, options.unreduced, options.identity_experts
    of_operators = Options.of(
        options.activation, options.gate_up, *of_slots, options.precision, options.tf32, options.fp8_wgrad
    )
    in_fp8 = _in_fp8(of_fp8, fp8_weights, options.gate_up)
    out: torch.Tensor
    if not differentiable and not torch_autograd.transformed():
        out = torch_ops.moe_infer(*layer, *in_fp8, *of_operators)
        return torch_autograd.in_shape(out, call.shape, traceable=True)
    if save is None:
        save = "recompute"  # of what torch.func may differentiate
    if differentiable:
        torch_autograd.no_export("moe")
    sums = Sums(**{name: main_grad.buffer() for name, main_grad in main_grads.items()})
    # Compiled code changes no attributes in backward, so it is told here.
    announced = tuple(main_grads[name].announce() if name in main_grads else None for name in Sums._fields)
    in_backward = getattr(fp8_weights, "in_backward", None)
    of_call = call.keep_saved, announced, call.keep_fp8_weights, in_backward, call.shape
    told = torch_autograd.OperatorCall(save, *of_call)
    out, *_ = torch_autograd.OperatorMoE.apply(told, *of_operators, *sums, *layer, *in_fp8)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return out


def _in_fp8(arrays: tuple[Any, ...], fp8_weights: Fp8Weights | None, gate_up: str) -> tuple[Any, ...]:
    """The last tensors of torch_ops.Layer: `arrays` of `fp8_weights`, or None for each.

    Operators get no `fp8_weights.gate_up`, so it is compared here.
    """
    if fp8_weights is None:
        return (None,) * len(torch_ops.IN_FP8)
    if fp8_weights.gate_up != gate_up:
        raise checks.bad_value("moe", "fp8_weights.gate_up", repr(gate_up), repr(fp8_weights.gate_up))
    return arrays


def route(
    logits: torch.Tensor,
    k: int | None = None,
    *,
    score: str = "softmax",
    renormalize: bool | None = None,
    eps: float = 0.0,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    bias_on: str = "scores",
    groups: tuple[int, int, int] | None = None,
    ids: torch.Tensor | None = None,
    token_offsets: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    top_p: float | None = None,
    threshold: float | None = None,
    sums: tuple[str, ...] = (),
    sequences: int | torch.Tensor = 1,
) -> tuple[Any, ...]:
    """`moeblaze_cupy.route` on tensors: weights (L, k), differentiable in logits (L, E), and ids (L, k) int32.

    With `sums` a `moeblaze_cupy.RouterSums` follows, whose tensors are differentiable in the logits too: a balancing
    loss is a function of them, and no gradient of its own of size (L, E) exists. The bias gets no gradient.
    renormalize: None means k > 1. Where k = 1, True makes every weight of softmax 1 and its gradient 0.
    Backward needs the ids as they are: to drop tokens, pass torch.where(mask, -1, ids) on, and change none in place.
    Second derivatives and transforms as for `moe`.
    Raises TypeError, ValueError or RuntimeError as `moeblaze_cupy.route` does.
    """
    offsets = sequences if isinstance(sequences, torch.Tensor) else None
    tensors = logits, bias, ids, token_offsets, token_mask, offsets
    as_operators = torch_autograd.needs_operators(tensors)
    if as_operators or logits is None:
        for name, tensor in zip(("logits", *torch_router.ROUTE_OTHERS), tensors, strict=True):
            if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "logits"):
                raise TypeError(f"route: {name}: expected a torch tensor, got {type(tensor)}")
    if not as_operators:
        checks.untransformed("route", "logits", tensors)
    others = None if bias is None else bias.detach(), *tensors[2:]
    options: dict[str, Any] = {
        "score": score,
        "renormalize": renormalize,
        "eps": eps,
        "scale": scale,
        "bias_on": bias_on,
        "groups": groups,
        "top_p": top_p,
        "threshold": threshold,
        "sums": sums,
    }
    if as_operators:
        torch_autograd.outside_of_vmap("route", "logits", tensors)
        options |= {"sums": tuple(sums), "sequences": sequences if offsets is None else None}
        arguments = (logits, *others, k, *RouterOptions(**options))
        differentiable = torch.is_grad_enabled() and logits.requires_grad
        if differentiable:
            torch_autograd.no_export("route")
        if differentiable or torch_autograd.transformed():
            routed = torch_router.OperatorRoute.apply(*arguments)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
        else:
            routed = torch_router_ops.route(*arguments)
        asked = zip(routed[2:], torch_router_ops.asked_sums(sums), strict=True)
        routed = *routed[:2], *(total if wanted else None for total, wanted in asked)
    else:
        if offsets is None:
            options["sequences"] = sequences
        present = others if any(tensor is not None for tensor in others) else ()
        routed = torch_router.EagerRoute.apply((k, options), logits, *present)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return (*routed[:2], RouterSums(*routed[2:])) if sums else routed[:2]


class Routed(NamedTuple):
    """What a MoE routed in one forward."""

    logits: torch.Tensor  #: (L, E) float32 (float64 of such x)
    weights: torch.Tensor  #: (L, k)
    ids: torch.Tensor  #: (L, k) int32
    sums: Any  #: `moeblaze_cupy.RouterSums`, or None without `sums`


def _size(argument: str, value: int, most: int | None = None) -> int:
    size = checks.integer("MoE", argument, value)
    if size < 1 or (most is not None and size > most):
        raise checks.bad_value("MoE", argument, "at least 1" if most is None else f"1 to {most}", size)
    return size


def _lora_rank(rank: int | None, alpha: float | None, accumulate: bool) -> int | None:
    """Checks the options of MoE that go with low-rank factors."""
    if rank is None:
        if alpha is not None:
            raise checks.bad_value("MoE", "lora_alpha", "None without lora_rank", repr(alpha))
        return None
    size = _size("lora_rank", rank, lora_checks.MAX_RANK)
    if accumulate:
        raise checks.bad_value("MoE", "accumulate_into_main_grad", "False with lora_rank", repr(accumulate))
    if alpha is not None:
        lora_checks.scale("MoE", "lora_alpha", alpha)
    return size


class MoE(torch.nn.Module):
    """A router and its experts: (..., d) -> (..., d).

    Parameters are `router` (E, d), `w1_storage` (E, 2h, d), gate rows before up rows, or (E, h, d) without a gate, and
    `w2_storage` (E, d, h), as transformers and vLLM store them. w1 and w2 below are their transposed views. Router
    logits are float32 (fp64 of such x), under torch.autocast too. On CUDA those of 16-bit tokens and a router of their
    dtype come from one product with a float32 result.
    d_model: d, the width of x.
    d_hidden: h, the hidden width of one expert.
    num_experts: E, 1 to 4096.
    k: experts per token, 1 to 64 and at most E.
    activation: a name, such as "swiglu", or `moeblaze_cupy.Activation`.
    device, dtype: of the parameters, bfloat16, float16, float32, on the CPU also float64.
    score, renormalize, eps, scale, bias_on, groups, sums: as of `route`; a choice for k = 1 that makes every weight the
    same, so that the router is not trained, is warned of.
    bias: True makes a buffer `bias` (E,) of zeros that `route` gets as its bias. It stays float32 whatever dtype the
    module is cast to, or the state has that it loads. A rule of the caller's changes it; no forward does.
    routing: a callable to be used instead of `route`, of logits (L, E), that returns weights, ids and at will
    RouterSums, such as one that takes given ids; the options of `route` then have no effect. It takes no token_mask.
    return_routing: forward returns (out, Routed), from which losses and rules for the bias are computed. The module
    keeps no state of a forward, so recomputation in backward counts nothing twice.
    keep_saved, save, gate_up, weights_on: as of `moe`; accumulate_into_main_grad too, for w1 and w2.
    expert_bias: True makes parameters `b1` (E, 2h) or (E, h) and `b2` (E, d) of zeros.
    identity_experts: Z more outputs of the router, (E + Z, d), whose experts return their input.
    precision, fp8_wgrad: as of `moe`. With "fp8" every forward quantises w1 and w2, in CUDA graphs and compiled code
    too, unless they are held by `quantize_weights`. Of parameters that FSDP2 has gathered no e4m3 weights are kept for
    backward, which quantises again. Where `CopyEngines.attach` has these parameters travel in e4m3, both use what came,
    and torch.compile calls the experts between its graphs.
    expert_format: None, or a format of `moeblaze_cupy.quantize_experts`: the experts are frozen, in four or eight bits.
    With precision="fp8" that is "mxfp4".
    In place of w1_storage and w2_storage, which are None, there are parameters w1_data, w1_scales, w2_data and
    w2_scales: bytes (uint8) with E first, that require no gradient and that no cast of the module's floats changes.
    They are zeros, for a state that is loaded; `quantize_experts` makes them of a module's own weights.
    lora_rank: None, or the rank r, 1 to 256, of low-rank factors: w1, w2, b1 and b2 then require no gradient, and there
    are float32 parameters `lora_a1` (E, r, d), `lora_b1` (E, 2h, r) or (E, h, r), `lora_a2` (E, r, h) and `lora_b2`
    (E, d, r), those of `moeblaze_cupy.Lora`. The router trains as it did. Of each pair a is uniform within
    1 / sqrt(fan in), as of peft, and b is 0.
    lora_alpha: the factors' products are multiplied by lora_alpha / lora_rank; None makes that 1.
    memory_limit: as of `moe`, for each layer and pass.
    Raises TypeError or ValueError for sizes and names that no forward would take.
    """

    bias: torch.Tensor | None
    w1_storage: torch.nn.Parameter | None
    w2_storage: torch.nn.Parameter | None
    w1_data: torch.nn.Parameter
    w1_scales: torch.nn.Parameter
    w2_data: torch.nn.Parameter
    w2_scales: torch.nn.Parameter
    lora_a1: torch.nn.Parameter
    lora_b1: torch.nn.Parameter
    lora_a2: torch.nn.Parameter
    lora_b2: torch.nn.Parameter

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        k: int,
        *,
        activation: str | Activation = "swiglu",
        save: str | None = "minimal",
        score: str = "softmax",
        renormalize: bool | None = None,
        eps: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
        bias_on: str = "scores",
        groups: tuple[int, int, int] | None = None,
        sums: tuple[str, ...] = (),
        routing: Callable[[torch.Tensor], tuple[Any, ...]] | None = None,
        return_routing: bool = False,
        keep_saved: bool = False,
        accumulate_into_main_grad: bool = False,
        expert_bias: bool = False,
        gate_up: str = "halves",
        weights_on: str = "output",
        identity_experts: int = 0,
        precision: str | None = None,
        expert_format: str | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        memory_limit: int | None = None,
        fp8_wgrad: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, d_hidden = _size("d_model", d_model), _size("d_hidden", d_hidden)
        num_experts = _size("num_experts", num_experts, router_config.MAX_ROUTER_EXPERTS)
        identity_experts = checks.integer("MoE", "identity_experts", identity_experts)
        most = router_config.MAX_ROUTER_EXPERTS - num_experts
        if not 0 <= identity_experts <= most:
            raise checks.bad_value("MoE", "identity_experts", f"0 to {most}", identity_experts)
        routed = num_experts + identity_experts
        k = _size("k", k, min(routed, router_config.MAX_ROUTER_K))
        checks.activation("MoE", activation)
        checks.gate_up("MoE", gate_up, activation)
        checks.layer_options("MoE", LayerOptions(weights_on=weights_on), True, expert_bias)
        checks.one_of("MoE", "save", save, SAVE_POLICIES)
        for name, flag in (("bias", bias), ("expert_bias", expert_bias)):
            if isinstance(flag, torch.Tensor):
                raise checks.bad_type("MoE", name, "True or False", "a tensor")
        options = router_options.of("MoE", score, renormalize, eps, scale, bias_on, groups, None, None, sums, 1)
        router_options.group_sizes("MoE", options, k, routed)
        if routing is not None and not callable(routing):
            raise checks.bad_type("MoE", "routing", "None or a function of the logits", repr(routing))
        if sums and not return_routing:
            raise checks.bad_value("MoE", "sums", "() without return_routing=True", repr(sums))
        if k == 1 and score == "softmax" and renormalize and routing is None:
            advice = "leave renormalize out"
            warnings.warn(
                f"MoE: k = 1 with renormalize=True trains no router, as every weight is 1; {advice}", stacklevel=2
            )
        self.k, self.activation, self.save, self._renormalize = k, activation, save, options.renormalize
        self.score, self.eps, self.scale, self.bias_on = score, eps, scale, bias_on
        self.groups, self.sums = options.groups, options.sums
        self.routing, self.return_routing = routing, return_routing
        self.keep_saved, self.accumulate_into_main_grad = keep_saved, accumulate_into_main_grad
        self.gate_up, self.weights_on, self.identity_experts = gate_up, weights_on, identity_experts
        checks.one_of("MoE", "precision", precision, fp8_checks.PRECISIONS)
        if precision is not None:
            fp8_checks.form("MoE", d_model, d_hidden)
        of_products = LayerOptions(gate_up=gate_up, precision=precision, memory_limit=memory_limit, fp8_wgrad=fp8_wgrad)
        beside = {"factors": lora_rank is not None, "packed": expert_format is not None}
        fp8_checks.wgrad("MoE", of_products, d_hidden, **beside)
        self.precision, self.fp8_wgrad = precision, bool(fp8_wgrad)
        self._fp8 = torch_fp8.HeldFp8Weights()
        self._sharded = False  # FSDP2 gathers the experts' parameters for each forward
        width = d_hidden * (2 if is_gated(activation) else 1)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        checks.one_of("MoE", "expert_format", expert_format, (None, *WEIGHT_FORMATS))
        if expert_format not in (None, "mxfp4") and precision is not None:
            expected = "None with expert_format, unless that is 'mxfp4'"
            raise checks.bad_value("MoE", "precision", expected, f"{precision!r} and {expert_format!r}")
        if expert_format is not None:
            torch_quantised.check_widths("MoE", expert_format, d_model, d_hidden)
        self.expert_format, self._d_hidden = expert_format, d_hidden
        lora_rank = _lora_rank(lora_rank, lora_alpha, accumulate_into_main_grad)
        self.lora_rank, self.lora_alpha = lora_rank, lora_alpha
        self.memory_limit = checks.memory_limit("MoE", memory_limit)
        if dtype is not None and dtype not in DTYPES:
            raise checks.bad_type("MoE", "dtype", " or ".join(map(str, DTYPES)), repr(dtype))
        self.router = parameter(routed, d_model)
        if expert_format is None:
            self.w1_storage = parameter(num_experts, width, d_model)
            self.w2_storage = parameter(num_experts, d_model, d_hidden)
        else:
            self._hold_packed(*(torch_quantised.empty_bytes(form, device) for form in self._forms()))
        self.b1 = parameter(num_experts, width) if expert_bias else None
        self.b2 = parameter(num_experts, d_model) if expert_bias else None
        if lora_rank is not None:
            for frozen in (self.w1_storage, self.w2_storage, self.b1, self.b2):
                if frozen is not None:
                    frozen.requires_grad_(False)
            for pair, (inner, outer) in (("1", (d_model, width)), ("2", (d_hidden, d_model))):
                for letter, shape in (("a", (lora_rank, inner)), ("b", (outer, lora_rank))):
                    factor = torch.empty(num_experts, *shape, device=device, dtype=torch.float32)
                    self.register_parameter(f"lora_{letter}{pair}", torch.nn.Parameter(factor))
        self.register_buffer("bias", torch.zeros(routed, device=device, dtype=torch.float32) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1 / sqrt(fan in); biases are 0. Experts in four or eight bits stay.

        Low-rank factors are as the class says.
        """
        for parameter in (self.router, self.w1_storage, self.w2_storage):
            if parameter is not None:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        for bias in (self.b1, self.b2, self.bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)
        if self.lora_rank is not None:
            for first, second in ((self.lora_a1, self.lora_b1), (self.lora_a2, self.lora_b2)):
                bound = first.shape[-1] ** -0.5
                torch.nn.init.uniform_(first, -bound, bound)
                torch.nn.init.zeros_(second)

    def _lora(self) -> Lora | None:
        if self.lora_rank is None:
            return None
        scale = 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank
        return Lora(self.lora_a1, self.lora_b1, self.lora_a2, self.lora_b2, scale, scale)

    @property
    def renormalize(self) -> bool:
        """Whether a token's weights are divided by their sum: what was asked for, else whether k is above 1 now."""
        return self.k > 1 if self._renormalize is None else self._renormalize

    @renormalize.setter
    def renormalize(self, value: bool | None) -> None:
        self._renormalize = value

    @property
    def fp8_weights(self) -> Fp8Weights | None:
        """What is held; None where each forward quantises."""
        return self._fp8.weights

    def quantize_weights(self, *, hold: bool = True) -> Fp8Weights | None:
        """Quantises the parameters once for all forwards until the next call, eager, compiled and captured ones.

        The caller answers for what is written to the parameters meanwhile, which these forwards do not see: call this
        again after each step of an optimizer, and after loading weights. A forward with other parameter objects
        quantises for itself. The call writes the memory of the last one, so a backward of a forward before raises
        RuntimeError. In a CUDA graph it is for what is captured after it.
        An adapter of peft or a parametrisation ends it, and modules with these hold nothing: their forwards quantise
        the weights that they are given.
        hold: False ends it and makes nothing.
        Returns what is held, or None. Raises ValueError without precision="fp8", RuntimeError for experts that are
        packed, or that FSDP2 shards.
        """
        if not hold:
            self._fp8.release()
            return None
        of_w1, of_w2 = self._whole_weights("MoE: quantize_weights")
        if self.precision is None:
            raise checks.bad_value("MoE: quantize_weights", "precision", "'fp8'", None)
        w1, w2 = of_w1.transpose(1, 2), of_w2.transpose(1, 2)
        made: Fp8Weights | None = self._fp8.hold(self, (of_w1, of_w2), w1, w2, self.gate_up)
        return made

    @property
    def travel_in_e4m3(self) -> tuple[str, ...]:
        """The names of the parameters of w1 and w2, if all-gathers may bring them in e4m3 alone."""
        only = self.precision is not None and not self.accumulate_into_main_grad and self.gate_up == "halves"
        return ("w1_storage", "w2_storage") if only else ()

    def gather_in_e4m3(self, experts: Any) -> None:
        """Has forwards use what all-gathers bring in e4m3. experts: a `fsdp.e4m3.Experts`, or None to end it."""
        self._fp8.gathered = experts

    def _whole_weights(self, function: str) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """Returns both parameters. Raises RuntimeError for experts that are packed, or that FSDP2 shards."""
        w1, w2 = self.w1_storage, self.w2_storage
        if w1 is None or w2 is None:
            raise RuntimeError(f"{function}: expected experts in floats, got expert_format={self.expert_format!r}")
        torch_fp8.refuse_parts(function, self._sharded)
        return w1, w2

    @property
    def w1(self) -> torch.Tensor:
        """`w1_storage` as the array functions' w1: a view (E, d, 2h), or (E, d, h) for an activation without a gate.

        Raises AttributeError, as `w2` does, where the experts are packed or FSDP2 shards them.
        """
        return self._view(self.w1_storage)

    @property
    def w2(self) -> torch.Tensor:
        """`w2_storage` as the array functions' w2: a view (E, h, d)."""
        return self._view(self.w2_storage)

    def _view(self, weight: torch.nn.Parameter | None) -> torch.Tensor:
        if weight is None or self._sharded:
            raise AttributeError  # torch then says that the module has no such attribute
        return weight.transpose(1, 2)

    def quantize_experts(self, format: str) -> None:
        """Freezes the experts in a format of `moeblaze_cupy.quantize_experts`, in the place of their parameters.

        The module is then one of expert_format=format. Its parameters are in bf16, on the CPU also in fp32.
        Make the optimizer afterwards: one that was made before keeps the old parameters, and their memory.
        Raises TypeError, ValueError or RuntimeError as that function does, and where the experts are frozen already.
        """
        w1, w2 = self._whole_weights("MoE: quantize_experts")
        if torch_fp8.is_adapted(self, "w1_storage", "w2_storage"):
            expected = "a module without adapters or parametrizations, which come afterwards"
            raise RuntimeError(f"MoE: quantize_experts: expected {expected}, got one with some")
        checks.one_of("MoE: quantize_experts", "format", format, WEIGHT_FORMATS)
        if self.precision is not None and format != "mxfp4":
            raise checks.bad_value("MoE: quantize_experts", "format", "'mxfp4' with precision='fp8'", repr(format))
        of_products = LayerOptions(precision=self.precision, fp8_wgrad=self.fp8_wgrad)
        fp8_checks.wgrad("MoE: quantize_experts", of_products, self._d_hidden, packed=True)
        torch_quantised.check_widths("MoE: quantize_experts", format, *w2.shape[1:])
        made = quantised.quantize_experts(w1.transpose(1, 2), w2.transpose(1, 2), format)
        self.expert_format = format
        self._fp8.release()
        self._hold_packed(*map(torch_quantised.as_bytes, made))

    def _hold_packed(self, w1: Mapping[str, torch.Tensor], w2: Mapping[str, torch.Tensor]) -> None:
        for name in ("w1_storage", "w2_storage"):
            self.register_parameter(name, None)
        others = [pair for pair in self.named_parameters(recurse=False) if pair[0] != "router"]
        for name, parts in (("w1", w1), ("w2", w2)):
            for part, tensor in parts.items():
                self.register_parameter(f"{name}_{part}", torch.nn.Parameter(tensor, requires_grad=False))
        for name, parameter in others:  # states of optimizers go by the order of a module that was made packed
            delattr(self, name)
            self.register_parameter(name, parameter)

    def _forms(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        assert self.expert_format is not None
        (routed, d), h = self.router.shape, self._d_hidden
        E = routed - self.identity_experts
        shapes = (E, d, h * (2 if is_gated(self.activation) else 1)), (E, h, d)
        return quantised.forms("MoE", self.expert_format, *shapes, "bfloat16")

    def _frozen_weights(self, dtype: torch.dtype) -> tuple[QuantizedWeight, QuantizedWeight]:
        """dtype: of the tokens, and so of the decoded weights."""
        up, down = self._forms()
        w1 = torch_quantised.from_bytes(up, dtype, self.w1_data, self.w1_scales)
        return w1, torch_quantised.from_bytes(down, dtype, self.w2_data, self.w2_scales)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What the class did not have yet when the module was pickled is off.
        of_others = "bias", "renormalize", "expert_bias", "device", "dtype"
        new = {n: value for n, value in (MoE.__init__.__kwdefaults__ or {}).items() if n not in of_others}
        new |= {"_fp8": torch_fp8.HeldFp8Weights(), "_sharded": False}
        if "_d_hidden" not in state:
            new["_d_hidden"] = state["_parameters"]["w2_storage"].shape[-1]
        super().__setstate__(new | state)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("w1", "w2"):
            raise AttributeError(f"MoE.{name}: expected a new {name}_storage, of which it is a view, got a new {name}")
        super().__setattr__(name, value)
        if name in ("w1_storage", "w2_storage") and hasattr(value, "to_local"):  # FSDP2 sets its parameters here
            self._sharded = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MoE":
        bias = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        if bias is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)  # its small steps are lost in fewer digits
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        floats, packed = (
            [prefix + name for name in names if prefix + name in state_dict]
            for names in (("w1_storage", "w2_storage"), ("w1_data", "w2_data"))
        )
        # strict=False would leave the experts as they are made.
        if self.w1_storage is not None and packed:
            expected = "experts in floats, or MoE(expert_format=...)"
            arguments[-1].append(f"MoE: load_state_dict: expected {expected}, got {', '.join(packed)}")
        if self.w1_storage is None and floats:
            expected = f"packed experts for expert_format={self.expert_format!r}"
            advice = "load floats into MoE without expert_format, then call quantize_experts(format)"
            arguments[-1].append(f"MoE: load_state_dict: expected {expected}, got {', '.join(floats)}; {advice}")
        if self.bias is not None and self.bias.dtype != torch.float32:  # assign=True takes that of the state
            self.bias = self.bias.float()

    def forward(
        self, x: torch.Tensor, *, token_mask: torch.Tensor | None = None, sequences: int | torch.Tensor = 1
    ) -> Any:
        """out, or (out, Routed) with `return_routing`. x: (..., d). sequences: as of `route`, of x's tokens in order.

        token_mask: bool, of x's shape without d, or (L,) in the order of its tokens.
        A token whose token_mask is False has logits and an output of 0, and no part in any gradient, even if it is NaN.
        """
        router, w1 = self.router, self.w1_storage  # each is looked up in a dict of the module
        routed, d = router.shape
        if not isinstance(x, torch.Tensor):
            raise checks.bad_type("MoE", "x", "a torch tensor", type(x))
        if x.is_nested:
            raise checks.bad_type("MoE", "x", torch_arguments.DENSE, "a nested one")
        if x.dim() == 0 or x.shape[-1] != d:
            raise ValueError(f"MoE: x: expected shape (..., d) = (..., {d}), got {tuple(x.shape)}")
        dtype = router.dtype if w1 is None else w1.dtype
        name, of_experts = ("w1_data", self.w1_data) if w1 is None else ("w1_storage", w1)
        experts = of_experts.shape[0] + self.identity_experts
        if routed != experts:
            own = f"as {name} has {of_experts.shape[0]} experts"
            expected = f"shape (E + identity_experts, d) = ({experts}, {d}), {own}"
            raise checks.bad_value("MoE", "router", expected, tuple(router.shape))
        if x.dtype != dtype and not torch_arguments.in_autocast(x):
            if dtype not in DTYPES:
                names = " or ".join(map(str, DTYPES))
                expected = f"dtype {names}, of which precision='fp8' makes copies in e4m3"
                raise checks.bad_type("MoE", "w1_storage", expected, dtype)
            raise checks.bad_type("MoE", "x", f"{dtype}, that of the parameters, or torch.autocast", x.dtype)
        if not isinstance(token_mask, (torch.Tensor, type(None))):
            raise checks.bad_type("MoE", "token_mask", "None or a torch tensor", type(token_mask))
        tokens = x.reshape(-1, d).contiguous()
        if token_mask is not None:
            if self.routing is not None:
                raise checks.bad_value("MoE", "token_mask", "None with routing, which gets logits alone", "a mask")
            torch_arguments.check_mask(token_mask, x)
            token_mask = token_mask.reshape(-1).contiguous()
        logits = torch_router.router_logits(tokens, router, token_mask)
        if self.routing is not None:
            weights, ids, *sums = torch_arguments.routed(self.routing(logits), tokens.shape[0], self.k)
        else:
            weights, ids, *sums = route(
                logits,
                self.k,
                score=self.score,
                renormalize=self._renormalize,
                eps=self.eps,
                scale=self.scale,
                bias=self.bias,
                bias_on=self.bias_on,
                groups=self.groups,
                token_mask=token_mask,
                sums=self.sums,
                sequences=sequences,
            )
        layer = self._experts if self._fp8.gathered is None else self._gathered_experts
        out = layer(tokens, ids, weights, None if x.dim() == 2 else x.shape)
        return (out, Routed(logits, weights, ids, sums[0] if sums else None)) if self.return_routing else out

    def _experts(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shape: tuple[int, ...] | None
    ) -> torch.Tensor:
        gathered, parameters = self._fp8.gathered, (self.w1_storage, self.w2_storage)
        w1: Any
        w2: Any
        fp8_weights = None
        accumulate: bool | dict[str, Any] = False
        if parameters[0] is None or parameters[1] is None:
            autocast = torch_arguments.in_autocast(tokens)
            dtype = torch.get_autocast_dtype(tokens.device.type) if autocast else tokens.dtype
            if dtype not in (torch.bfloat16, torch.float32):
                name, expected = "torch.autocast" if autocast else "x", "bfloat16, on the CPU also float32,"
                raise checks.bad_type("MoE", name, f"{expected} for packed experts", dtype)
            w1, w2 = self._frozen_weights(dtype)
        else:
            if gathered is not None and gathered.have(*parameters):
                w1, w2, fp8_weights = gathered.weights(*parameters)
            else:
                w1, w2 = parameters[0].transpose(1, 2), parameters[1].transpose(1, 2)
                fp8_weights = self._fp8.of(parameters[0], parameters[1])
            if self.accumulate_into_main_grad:
                accumulate = dict(zip(("w1", "w2"), parameters, strict=True))
        layer = LayerArrays(tokens, ids, weights, w1, None, w2, self.b1, None, self.b2)
        of_slots = self.weights_on, False, self.identity_experts, None
        of_products = self.precision, self.memory_limit, self.fp8_wgrad
        options = LayerOptions(self.activation, self.save, self.gate_up, *of_slots, *of_products)
        of_call = self.keep_saved, accumulate, fp8_weights, not self._sharded, shape, self._lora(), "MoE"
        return _moe(layer, options, _Call(*of_call))

    # Compilers would look into parameters that have no numbers.
    _gathered_experts = graph_break(_experts)

    def extra_repr(self) -> str:
        (routed, d), h = self.router.shape, self._d_hidden
        E = routed - self.identity_experts
        options = ("activation", "save", "score", "renormalize", "keep_saved", "accumulate_into_main_grad")
        unusual = {"eps": 0.0, "scale": 1.0, "bias_on": "scores", "groups": None, "sums": (), "return_routing": False}
        unusual |= {"gate_up": "halves", "weights_on": "output", "identity_experts": 0, "precision": None}
        unusual |= {"fp8_wgrad": False}
        unusual |= {"expert_format": None, "lora_rank": None, "lora_alpha": None, "memory_limit": None}
        named = [*options, *(name for name, usual in unusual.items() if getattr(self, name) != usual)]
        sizes = f"d_model={d}, d_hidden={h}, num_experts={E}, k={self.k}"
        shown = [sizes, *(f"{name}={getattr(self, name)!r}" for name in named)]
        biases = {"bias=True": self.bias, "expert_bias=True": self.b1}
        return ", ".join([*shown, *(name for name, bias in biases.items() if bias is not None)])
