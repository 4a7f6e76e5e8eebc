"""The layer for autograd: `EagerMoE` over plain calls, `OperatorMoE` over operators, and gradients in main_grad."""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.torch import private
from moeblaze_cupy.interop.torch import sums as torch_sums
from moeblaze_cupy.interop.torch.operators import (
    DIFFERENTIABLE,
    IN_FP8,
    NEEDS,
    READ_IN_BACKWARD,
    Layer,
    Options,
    Sums,
    count_beside_operators,
    moe_bwd,
    moe_bwd_,
    moe_bwd_acc,
    moe_bwd_acc_,
    moe_fwd,
    quantize_weights,
)
from moeblaze_cupy.interop.torch.schema import split
from moeblaze_cupy.layer import api as layer
from moeblaze_cupy.types import (
    FACTORS,
    NO_LORA_ROWS,
    Fp8Weights,
    LayerArrays,
    LayerOptions,
    Lora,
    LoraRows,
    SavedForBackward,
    gate_and_up,
    joined,
    pair,
)

Tensor = torch.Tensor
Grads = tuple[Tensor | None, ...]
Backward = Callable[..., Grads]


class _NoSecondDerivative(torch.autograd.Function):
    """Returns the first `number` tensors as they are. A derivative of them raises an error."""

    @staticmethod
    def forward(function: str, number: int, *tensors: Tensor) -> Grads:
        return tensors[:number]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{ctx.function}: no second derivatives")


def record_inputs(ctx: Any, *tensors: Tensor | None) -> None:
    """Called by a backward in eager mode: these are the inputs that it reads, for `first_derivatives_only`.

    They are noted only while create_graph=True makes a graph. Otherwise they would stay alive after backward.
    """
    if hasattr(ctx, "inputs_read"):
        ctx.inputs_read = tensors


def first_derivatives_only(function: str, traceable: bool = False) -> Callable[[Backward], Backward]:
    """Decorator of a backward, which then runs without a graph. The graph of create_graph=True raises where it is used.

    torch's once_differentiable raises only if the incoming gradient requires one. That of out.sum() does not.
    The raising graph depends on the gradients and on the inputs of `record_inputs`, so that torch.autograd.grad by any
    of these raises.
    function: the name in errors. traceable: the backward calls operators, so compilers may trace into it. torch itself
    raises an error for second derivatives of what it compiled. Compiled autograd calls other backwards between graphs.
    """

    def decorate(backward: Backward) -> Backward:
        def eager(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
            if not _PLAIN.issuperset(map(type, grad_outputs)):
                grad_outputs = tuple(map(waited, grad_outputs))
            if transformed():  # saved tensors are otherwise to be asked for once, by the backward
                outside_of_vmap(function, "gradient", (*grad_outputs, *ctx.saved_tensors))
            if not torch.is_grad_enabled():
                return backward(ctx, *grad_outputs)
            ctx.inputs_read = ()
            try:
                with torch.no_grad():
                    grads = backward(ctx, *grad_outputs)
                # torch.autograd.grad runs no node without a path to what it differentiates by.
                read = [t for t in (*ctx.inputs_read, *grad_outputs) if t is not None and t.requires_grad]
            finally:
                del ctx.inputs_read
            present = [grad for grad in grads if grad is not None]
            if not present:
                return grads
            if transformed():  # where tensors cannot be told to require gradients
                tracked = [*present, *(t for t in ctx.saved_tensors if t is not None and t.requires_grad)]
            else:
                tracked = [*(grad.requires_grad_() for grad in present), *read]
            raising = iter(_NoSecondDerivative.apply(function, len(present), *tracked))  # type: ignore[no-untyped-call]  # torch gives `apply` no types
            return tuple(None if grad is None else next(raising) for grad in grads)

        compiled = backward if traceable else graph_break(eager)

        @functools.wraps(backward)
        def wrapped(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
            grads: Grads = (compiled if torch.compiler.is_compiling() else eager)(ctx, *grad_outputs)
            return grads

        return wrapped

    return decorate


KEEP_SAVED = "pass keep_saved=True to moe or MoE"  # what allows a second backward
OF_GATHERED = ("gate", "up", "w2", *IN_FP8)  # what `fsdp_e4m3.Gathered` gives again in backward
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return private.waited(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def waited(tensor: Any) -> Any:
    """Returns what a functional collective of torch.distributed is still to fill as a plain tensor, others as is.

    DTensor.redistribute(async_op=True) gives such tensors, forward and as gradients. They have no memory of their own.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    return _Waited.apply(tensor)  # type: ignore[no-untyped-call]  # torch gives `apply` no types


def needs_operators(tensors: Sequence[Any]) -> bool:
    """Whether a call with these tensors must be one of operators, for what follows it or needs its shapes alone."""
    return torch.compiler.is_compiling() or private.number_of_dispatch_modes() > 0 or not is_plain(tensors)


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors with memory of their own, or None, that no transform of torch.func follows."""
    if getattr(tensors[0], "is_meta", False) or private.has_transforms():
        return False
    return _PLAIN.issuperset(map(type, tensors))


def transformed() -> bool:
    """Whether a transform of torch.func is at work, whose tensors do not say whether they require gradients."""
    return not torch.compiler.is_compiling() and private.has_transforms()


def outside_of_vmap(function: str, argument: str, tensors: Sequence[Any]) -> None:
    """Raises RuntimeError for tensors that vmap has made of many. argument: the one that the message names."""
    if transformed() and any(map(private.is_batched, tensors)):
        expected = "a call outside of vmap, as the tokens of a batch are rows of one call"
        raise RuntimeError(f"{function}: {argument}: expected {expected}, got tensors batched by vmap")


def no_export(function: str) -> None:
    """Raises RuntimeError under torch.export, for a call with gradients.

    An exported program has operators in place of autograd Functions, and these have no gradients.
    """
    if private.is_exporting():
        expected = "torch.no_grad() around torch.export, as an exported program has no gradients"
        raise RuntimeError(f"{function}: expected {expected}, got tensors that require a gradient")


if not private.HAS_EXPORT_FLAG:
    # Dynamo calls such a function rather than trace it, and keeps the message of what it raises.
    no_export = torch.compiler.assume_constant_result(no_export)  # type: ignore[no-untyped-call]  # torch gives no types


def in_shape(out: Tensor, shape: tuple[int, ...] | None, traceable: bool = False) -> Tensor:
    """`out` in a shape of as many elements, and no view of it: autograd drops the hooks of a view that changes.

    FSDP2 has such hooks on what a module returns. traceable: as compilers and transforms want it; else `out` changes.
    """
    if shape is None:
        return out
    return out.view(shape).detach() if traceable else out.resize_(shape)  # by a third of the time


def stand_in(kind: str | None, weight: Tensor) -> Tensor | None:
    """What autograd gets for a gradient that was added elsewhere: None, or "zeros" or "empty" for its hooks."""
    if kind is None:
        return None
    return torch.zeros_like(weight) if kind == "zeros" else torch.empty_like(weight)


def _unpacked(ctx: Any) -> tuple[Tensor, ...]:
    """ctx.saved_tensors, to be asked for once, as checkpointing wants; says what allows a second backward."""
    unpacked: tuple[Tensor, ...]
    if torch.compiler.is_compiling():
        unpacked = ctx.saved_tensors
        return unpacked
    try:
        unpacked = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(f"moe: saved tensors: {error}; if an earlier backward did that, {KEEP_SAVED}") from error
    return unpacked


class OperatorCall(NamedTuple):
    """What `OperatorMoE` is told beside options and tensors."""

    save: str
    keep_saved: bool
    announced: tuple[str | None, ...]  #: of each of Sums, the kind of its `stand_in`
    keep_fp8_weights: bool
    in_backward: Any = None  #: of `fsdp_e4m3.Gathered`
    shape: tuple[int, ...] | None = None  #: of out, if that is another one than (L, d)


class OperatorMoE(torch.autograd.Function):
    """The layer by operators. What backward needs are outputs, so that transforms of torch.func may replace them.

    In eager mode backward calls an operator that overwrites what was saved. In a graph it calls one that does not, and
    inductor puts the other in its place where that memory is free.
    """

    @staticmethod
    def forward(call: OperatorCall, *arguments: Any) -> tuple[Tensor, ...]:
        """arguments: of Options, Sums and Layer, in order. Weights in e4m3 that are made and kept are outputs too."""
        options, _, layer = split(arguments, Options, Sums, Layer)
        quantized: tuple[Tensor, ...] = ()
        if options.precision is not None and layer.fp8_w1 is None:
            quantized = quantize_weights(layer.gate, layer.up, layer.w2, options.gate_up)
            layer = layer.with_fp8(quantized)
        out, *kept = moe_fwd(*layer, *options, call.save)
        return in_shape(out, call.shape, traceable=True), *kept, *(quantized if call.keep_fp8_weights else ())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *arguments = inputs
        options, sums, layer = split(arguments, Options, Sums, Layer)
        ctx.options, ctx.accumulates = tuple(options), any(total is not None for total in sums)
        _, lists, first_layer, y_swi, *quantized = output
        if quantized:
            layer = layer.with_fp8(quantized)
        kept = lists, first_layer if ctx.call.save != "recompute" else None, y_swi if ctx.call.save == "paper" else None
        left = OF_GATHERED if ctx.call.in_backward is not None else ()
        read = (None if name in left else getattr(layer, name) for name in READ_IN_BACKWARD)
        ctx.save_for_backward(*read, *kept, *sums)
        ctx.mark_non_differentiable(lists, first_layer, y_swi, *quantized)
        ctx.set_materialize_grads(False)

    @staticmethod
    @first_derivatives_only("moe", traceable=True)
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Grads:
        before = (None,) * (1 + len(Options._fields) + len(Sums._fields))
        if grad_out is None:
            return (*before, *(None,) * len(Layer._fields))
        needed = dict(zip(Layer._fields, ctx.needs_input_grad[len(before) :], strict=True))
        needs = [any(needed[name] for name, of in DIFFERENTIABLE.items() if of == gradient) for gradient in NEEDS]
        unpacked = _unpacked(ctx)
        saved, sums = unpacked[: -len(Sums._fields)], unpacked[-len(Sums._fields) :]
        read = dict(zip(READ_IN_BACKWARD, saved[: len(READ_IN_BACKWARD)], strict=True))
        options = Options(*ctx.options)
        if ctx.call.in_backward is not None:
            read["gate"], read["w2"], fp8_weights = ctx.call.in_backward(ctx.call.save)
            read.update(zip(IN_FP8, fp8_checks.arrays_of("moe", options.precision, fp8_weights), strict=True))
        elif options.precision is not None and read["fp8_w1"] is None:
            quantized = quantize_weights(read["gate"], read["up"], read["w2"], options.gate_up)
            read.update(zip(IN_FP8, quantized, strict=True))
        in_place = not ctx.call.keep_saved and not torch.compiler.is_compiling() and not transformed()
        operator = (moe_bwd_acc_ if in_place else moe_bwd_acc) if ctx.accumulates else moe_bwd_ if in_place else moe_bwd
        totals = sums if ctx.accumulates else ()
        kept = saved[len(read) :]
        if ctx.call.shape is not None:
            grad_out = grad_out.reshape(read["x"].shape)
        made = operator(grad_out.contiguous(), *read.values(), *kept, *totals, *options, ctx.call.save, needs)
        grads = dict(zip(DIFFERENTIABLE, made, strict=True))
        for name, total, kind in zip(Sums._fields, sums, ctx.call.announced, strict=True):
            if total is not None:
                grads[name] = stand_in(kind, read[name])
        return (*before, *(grads[name] if needed[name] else None for name in Layer._fields))


def _here(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def _is_within(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor lies in the memory of another."""
    return 0 <= part.data_ptr() - whole.data_ptr() <= whole.nbytes - part.nbytes


def _has_order_of(weight: Tensor, parameter: Tensor) -> bool:
    """Whether the strides of both, which have equally many elements, are views of one order of memory."""
    of_both = [
        sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1)
        for tensor in (weight, parameter)
    ]
    if of_both[0] == of_both[1]:
        return True
    ends: list[list[int]] = []
    for steps in of_both:  # dimensions may be joined, or taken apart, where there are no gaps
        end, found = 1, []
        for stride, n in steps:
            if stride != end:
                return False
            end *= n
            found.append(end)
        ends.append(found)
    few, many = sorted(ends, key=len)
    return all(end in many for end in few)


class MainGrad:
    """Where the gradient of a weight is accumulated: main_grad of the parameter that it is, or is a view of."""

    def __init__(self, name: str, weight: Tensor, parameter: Tensor | None) -> None:
        """name: of the function and its argument, for errors."""
        self.name, self.parameter = name, weight if weight.is_leaf else private.base_of(weight)
        if parameter is not None:
            self.parameter = parameter
        self.shape, self.strides = weight.shape, weight.stride()
        self.first: Any = 0  # element of the parameter
        if self.parameter is not None:
            self._place(weight, _here(self.parameter))
        self.buffer()  # raises now what backward would raise

    def _place(self, weight: Tensor, whole: Tensor) -> None:
        """Sets `first`. Raises for a weight that is no view of the parameter, and no copy in its memory order."""
        compiling, is_part = torch.compiler.is_compiling(), whole.numel() != weight.numel()
        if compiling and is_part:  # where nobody knows at which element a view begins
            expected = "a parameter or a view of a whole one, in what torch.compile compiles"
            raise TypeError(f"{self.name}: expected {expected}, got a view of a part")
        if weight.dtype == whole.dtype and not compiling:
            if not _is_within(weight, whole):
                expected = "a view of the parameter, or a copy in another dtype"
                raise ValueError(f"{self.name}: expected {expected}, got other memory")
            self.first = weight.storage_offset() - whole.storage_offset() if is_part else 0
            return
        copy = private.base_of(weight) if is_part else weight  # of all of the parameter
        if copy is None or copy.numel() != whole.numel():
            expected = "a view of the parameter, or of a copy of all of it in another dtype"
            raise ValueError(f"{self.name}: expected {expected}, got shape {tuple(weight.shape)} of other memory")
        if not _has_order_of(copy, whole):
            shape, strides = tuple(copy.shape), copy.stride()
            expected = f"the parameter's memory order, strides {whole.stride()} of shape {tuple(whole.shape)}"
            raise ValueError(f"{self.name}: expected {expected}, got strides {strides} of shape {shape}")
        if is_part:
            self.first = weight.storage_offset() - copy.storage_offset()

    def buffer(self) -> Tensor:
        parameter, main_grad = self.parameter, getattr(self.parameter, "main_grad", None)
        if parameter is None or not isinstance(main_grad, torch.Tensor):
            expected = "a parameter, or a view of one, whose main_grad is a tensor"
            raise TypeError(f"{self.name}: expected {expected}, got {type(main_grad)}")
        parameter, main_grad = _here(parameter), _here(main_grad)
        got, wanted = ((tuple(t.shape), t.stride()) for t in (main_grad, parameter))
        if got != wanted:
            raise ValueError(
                f"{self.name}: expected main_grad with the parameter's shape and strides {wanted}, got {got}"
            )
        if main_grad.dtype not in (torch.float32, parameter.dtype):
            dtypes = " or ".join(dict.fromkeys(str(dtype) for dtype in (torch.float32, parameter.dtype)))
            raise TypeError(f"{self.name}: expected main_grad with dtype {dtypes}, got {main_grad.dtype}")
        if main_grad.device != parameter.device:
            expected = f"main_grad on the parameter's device {parameter.device}"
            raise TypeError(f"{self.name}: expected {expected}, got {main_grad.device}")
        compiling = torch.compiler.is_compiling()  # where tensors have no addresses; backward checks them
        if not compiling and main_grad.data_ptr() == parameter.data_ptr() and main_grad.numel():
            raise ValueError(f"{self.name}: expected main_grad with memory of its own, got the parameter's")
        first = main_grad.storage_offset() + self.first if self.first else None
        return main_grad.detach().as_strided(self.shape, self.strides, first)

    def announce(self) -> str | None:
        """What autograd gets in place of the gradient, as in Megatron, whose hooks wait for it: see `stand_in`."""
        if self.parameter is None or not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        return "zeros" if getattr(self.parameter, "zero_out_wgrad", False) else "empty"


class EagerCall(NamedTuple):
    """What `EagerMoE` is told beside the layer's tensors."""

    keep_saved: bool
    main_grads: "dict[str, MainGrad]"  #: by name, of gate, up and w2
    options: LayerOptions
    fp8_weights: Fp8Weights | None = None
    keep_fp8_weights: bool = True  #: where none are given
    owners: "torch_sums.Owners | None" = None  #: of w1 and w2, where their gradients are summed over ranks
    shape: tuple[int, ...] | None = None  #: of out, if that is another one than (L, d)
    frozen: Any = None  #: a `quantised.Frozen`, whose tensors follow those of the layer
    lora: Lora | None = None  #: the scales, beside `frozen`, whose tensors the factors follow


class EagerMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: EagerCall, *tensors: Tensor | None) -> Tensor:
        """tensors: of Layer, in order; the last four may be missing, but not beside those of `call.frozen`."""
        ctx.keep_saved, ctx.main_grads, options, fp8_weights, keep_fp8_weights, ctx.owners, shape, *others = call
        ctx.frozen, ctx.lora = others
        out: Tensor
        extras = None if fp8_weights is None else layer.LayerExtras(fp8_weights=fp8_weights)
        number = len(LayerArrays._fields)
        arrays, parts = LayerArrays(*tensors[:number]), tensors[number:]
        of_lora: tuple[Any, ...] = ()
        if ctx.lora is not None:
            parts, of_lora = parts[: -len(FACTORS)], parts[-len(FACTORS) :]
            extras = layer.LayerExtras(fp8_weights=fp8_weights, lora=ctx.lora.with_factors(of_lora))
        if ctx.frozen is not None:
            arrays = ctx.frozen.joined(arrays, parts)
        out, saved = layer.forward(arrays, options, extras, "moe")
        assert saved is not None
        if ctx.frozen is not None:
            count_beside_operators(arrays, saved.index.num_slots, saved.lora)
        (lists, _), index = saved.index.split()  # without ids, which no backward reads: they may change meanwhile
        kept = saved.fp8_weights if keep_fp8_weights else fp8_weights
        weights = tensors[3:6]
        ctx.in_backward = getattr(fp8_weights, "in_backward", None)
        if ctx.in_backward is not None:
            kept, weights = None, (None,) * 3
        of_fp8 = fp8_checks.arrays_of("moe", options.precision, kept)
        if ctx.lora is not None:
            of_lora = *of_lora, *saved.lora_rows
        read = tensors[0], tensors[2], *weights, *tensors[6:9]
        ctx.save_for_backward(*of_fp8, *parts, *of_lora, *read, saved.first_layer, saved.y_swi, lists)
        ctx.has_fp8_weights, ctx.parts = kept is not None, len(parts)
        ctx.shape = shape
        ctx.kept, ctx.consumed = (index, saved.options, saved.decoded_by), False
        ctx.set_materialize_grads(False)
        return in_shape(out, shape)

    @staticmethod
    @first_derivatives_only("moe")
    def backward(ctx: Any, grad_out: Tensor | None) -> Grads:
        needed = ctx.needs_input_grad[1:]
        if grad_out is None:
            return (None, *(None for _ in needed))
        if ctx.consumed:
            raise checks.consumed("moe", KEEP_SAVED)
        if grad_out.layout != torch.strided:
            raise checks.bad_type("moe", "gradient", "a dense tensor, as to_dense() makes", grad_out.layout)
        unpacked, fp8_weights = ctx.saved_tensors, None
        index, options, decoded_by = ctx.kept
        if ctx.has_fp8_weights:
            fields = fp8_checks.FIELDS
            fp8_weights = Fp8Weights(**dict(zip(fields, unpacked, strict=False)), gate_up=options.gate_up)
            unpacked = unpacked[len(fields) :]
        parts, unpacked = unpacked[: ctx.parts], unpacked[ctx.parts :]
        lora, lora_rows, factors = None, NO_LORA_ROWS, unpacked[:0]
        if ctx.lora is not None:
            factors, unpacked = unpacked[: len(FACTORS)], unpacked[len(FACTORS) :]
            u1, u2, *unpacked = unpacked
            lora, lora_rows = ctx.lora.with_factors(factors), LoraRows(u1, u2)
        x, weights, gate, up, w2, *biases, first_layer, y_swi, lists = unpacked
        if ctx.in_backward is not None:
            gate, w2, fp8_weights = ctx.in_backward(options.save)
        torch_sums.expect_gathered(gate, up, w2, *parts, *factors)
        if ctx.shape is not None:
            grad_out = grad_out.reshape(x.shape)
        record_inputs(ctx, x, weights, gate, up, w2, *biases, *factors)
        is_packed = ctx.frozen is not None and ctx.frozen.forms  # and backward decodes it to e4m3
        if options.precision is not None and fp8_weights is None and not is_packed:
            fp8_weights = mb.quantize_weights(joined(gate, up), w2, gate_up=options.gate_up)
        needed_biases = (needed[6] or needed[7], needed[8]) if biases else ()
        arrays = LayerArrays(x, None, weights, gate, up, w2, *biases)
        if ctx.frozen is not None:
            arrays = ctx.frozen.joined(arrays, parts)
        made = index.joined((lists, None)), first_layer, y_swi, ctx.consumed, fp8_weights, None
        saved = SavedForBackward(arrays, options, *made, lora, lora_rows, decoded_by)
        needs = tuple(compress(NEEDS, (needed[0], needed[2], needed[3] or needed[4], needed[5], *needed_biases)))
        if lora is not None and any(needed[-len(FACTORS) :]):
            needs = (*needs, "lora")
        if ctx.frozen is not None:
            count_beside_operators(arrays, index.num_slots, lora, options.save, needs)
        accumulate = _buffers(ctx.main_grads, needs) if ctx.main_grads else None
        summed = () if ctx.owners is None else ctx.owners.ready(needs)
        try:
            if summed:
                rest = tuple(name for name in needs if name not in summed)
                grads, pending = mb.moe_backward_data(
                    grad_out.contiguous(), saved, needs=rest, keep_saved=ctx.keep_saved
                )
                ctx.owners.sum((gate, w2), pending, summed)
            else:
                grads = mb.moe_backward(
                    grad_out.contiguous(), saved, needs=needs, keep_saved=ctx.keep_saved, accumulate=accumulate
                )
        finally:  # what runs out of memory half way may have overwritten them as well
            ctx.consumed = saved.consumed
        of_weights = *gate_and_up(grads.w1), grads.w2
        if ctx.main_grads:
            of_weights = _announced(ctx.main_grads, (gate, up, w2), of_weights)
        # Autograd drops those that nobody asked for.
        of_layer = None, grads.x, None, grads.weights, *of_weights
        if not biases:
            return of_layer
        of_factors = (None,) * len(factors) if grads.lora is None else grads.lora.factors
        return (*of_layer, *gate_and_up(grads.b1), grads.b2, None, *(None for _ in parts), *of_factors)


def _buffers(main_grads: Mapping[str, MainGrad], needs: tuple[str, ...]) -> dict[str, Any]:
    """The argument `accumulate` of `mb.moe_backward`."""
    buffers = {name: main_grad.buffer() for name, main_grad in main_grads.items()}
    w1 = joined(buffers.get("gate"), buffers.get("up"))
    return {name: into for name, into in (("w1", w1), ("w2", buffers.get("w2"))) if into is not None and name in needs}


def _announced(main_grads: Mapping[str, MainGrad], weights: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of gate, up and w2, with a `stand_in` of each that was added to a main_grad."""
    return tuple(
        stand_in(main_grads[name].announce(), weight) if name in main_grads and grad is not None else grad
        for name, weight, grad in zip(("gate", "up", "w2"), weights, grads, strict=True)
    )


def main_grads(
    gate: Tensor, up: Tensor | None, w2: Tensor, accumulate: bool | Mapping[str, Any], function: str
) -> dict[str, MainGrad]:
    """MainGrads of the weights that require gradients, by name. accumulate: as of `moe`. function: named in errors."""
    if up is not None and gate.requires_grad != up.requires_grad:
        raise ValueError(f"{function}: w1: expected a pair of which both or none require gradients, got one of each")
    given = {} if isinstance(accumulate, bool) else accumulate
    if not isinstance(given, Mapping):
        expected = "True, False or a mapping from 'w1' and 'w2' to parameters"
        raise checks.bad_type(function, "accumulate_into_main_grad", expected, type(accumulate))
    for name, value in given.items():
        checks.one_of(function, "accumulate_into_main_grad", name, ("w1", "w2"))
        for parameter in pair(value):
            if parameter is not None and not isinstance(parameter, torch.Tensor):
                which = f"accumulate_into_main_grad[{name!r}]"
                raise checks.bad_type(function, which, "a parameter or a pair of them", type(parameter))
    of_gate, of_up = (*pair(given.get("w1")), None)[:2]
    by_name = {
        "gate": ("w1" if up is None else "w1[0]", gate, of_gate),
        "up": ("w1[1]", up, of_up),
        "w2": ("w2", w2, given.get("w2")),
    }
    return {
        name: MainGrad(f"{function}: {argument}", weight, parameter)
        for name, (argument, weight, parameter) in by_name.items()
        if weight is not None and weight.requires_grad
    }
