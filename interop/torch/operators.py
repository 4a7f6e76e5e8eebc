"""The layer as torch operators, for all that has to see a call to follow it: compilers, dispatch modes, torch.func.

Every operator's fake makes the checks that its implementation makes, so bad arguments are named at compile time. What
an operator does not keep or compute is an empty tensor. Shapes of results depend on shapes alone.

A new argument of the layer is a line in `Layer` or `Options`, from which the schemas are made, one in `DIFFERENTIABLE`
if it has a gradient, and one wherever it is handed on: `_check_forward`, `_call_forward`, `_saved`, and `_sizes` if it
changes a shape.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.fp8 import api as quantization
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.frameworks import count_writes
from moeblaze_cupy.interop.torch import private
from moeblaze_cupy.interop.torch.following import follow
from moeblaze_cupy.interop.torch.schema import concrete, declared, define, describe, nothing, split
from moeblaze_cupy.layer.api import LayerExtras, forward
from moeblaze_cupy.types import (
    BIASES,
    FORMS,
    GRADIENTS,
    Activation,
    DispatchIndices,
    Fp8Weights,
    Gradients,
    LayerArrays,
    LayerOptions,
    Lora,
    SavedForBackward,
    gate_and_up,
    is_gated,
    joined,
)

Tensor = torch.Tensor
Places = tuple[dict[str, tuple[int, tuple[int, ...]]], int]  # what `launch_config.index_lists` returns


class Layer(NamedTuple):
    """The layer's tensors. w1 is `gate` and `up`; `up` is None where w1 is one tensor. So it is with b1.

    The last six are those of Fp8Weights, in the order of `fp8_checks.FIELDS`: all, or none.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor | None
    gate: Tensor
    up: Tensor | None
    w2: Tensor
    b1_gate: Tensor | None = None
    b1_up: Tensor | None = None
    b2: Tensor | None = None
    token_offsets: Tensor | None = None
    fp8_w1: Tensor | None = None
    fp8_w1_transposed: Tensor | None = None
    fp8_w1_scales: Tensor | None = None
    fp8_w2: Tensor | None = None
    fp8_w2_transposed: Tensor | None = None
    fp8_w2_scales: Tensor | None = None

    @property
    def arrays(self) -> LayerArrays:
        """All but the weights in e4m3."""
        return LayerArrays(*list(self)[: len(LayerArrays._fields)])

    def with_fp8(self, made: Sequence[Tensor]) -> "Layer":
        """The layer with these weights in e4m3. torch 2.6 compiles no `_replace` and no slice of a NamedTuple."""
        others: list[Any] = list(self)[: -len(IN_FP8)]
        return Layer(*others, *made)

    def argument(self, name: str) -> str:
        """What the caller calls the tensor of this name."""
        w1, b1 = ("w1" if self.up is None else "w1[0]"), ("b1" if self.b1_up is None else "b1[0]")
        of_parts = {"gate": w1, "up": "w1[1]", "b1_gate": b1, "b1_up": "b1[1]"}
        return of_parts.get(name) or _IN_WORDS.get(name, name)


IN_FP8 = Layer._fields[-len(fp8_checks.FIELDS) :]
_IN_WORDS = dict(zip(IN_FP8, fp8_checks.NAMES, strict=True))  # what errors call them


class Options(NamedTuple):
    """What else the layer is told, forward and backward alike; numbers, names and tuples of numbers."""

    name: str  #: of the activation
    constants: tuple[float, ...] = ()  #: of the activation, in their order; () for the defaults
    gate_up: str = "halves"
    weights_on: str = "output"
    unreduced: bool = False
    identity_experts: int = 0
    precision: str | None = None
    tf32: bool = False
    fp8_wgrad: bool = False

    @classmethod
    def of(cls, activation: str | Activation, *others: Any) -> "Options":
        if isinstance(activation, Activation):
            # Not by the property `constants`: dynamo calls none of an object that is a constant to it.
            return cls(activation.name, activation._values, *others)
        return cls(activation, (), *others)

    @property
    def activation(self) -> str | Activation:
        if not self.constants:
            return self.name
        names = (constant.name for constant in FORMS[self.name].constants)
        return Activation(self.name, **dict(zip(names, self.constants, strict=True)))

    def of_layer(self, save: str | None) -> LayerOptions:
        others = self.gate_up, self.weights_on, self.unreduced, self.identity_experts, None, self.precision
        return LayerOptions(self.activation, save, *others, tf32=self.tf32, fp8_wgrad=self.fp8_wgrad)


class Kept(NamedTuple):
    """What forward makes for backward."""

    lists: Tensor
    first_layer: Tensor | None
    y_swi: Tensor | None


class Sums(NamedTuple):
    """What the gradients of weights are added to: tensors like the weights."""

    gate: Tensor | None = None
    up: Tensor | None = None
    w2: Tensor | None = None


# By name of the gradient: tensors of `Sums`, the second where there is a pair.
SUMMED = {"w1": ("gate", "up"), "w2": ("w2", "")}
# By tensor of `Layer`, the name in `needs` of its gradient.
DIFFERENTIABLE = {
    **{"x": "x", "weights": "weights", "gate": "w1", "up": "w1", "w2": "w2"},
    **{"b1_gate": "b1", "b1_up": "b1", "b2": "b2"},
}
READ_IN_BACKWARD = (*DIFFERENTIABLE, *IN_FP8)
NEEDS = GRADIENTS + BIASES


class _Sizes(NamedTuple):
    """Shapes of what forward makes. What is not kept has the shape (0,)."""

    out: tuple[Any, ...]
    lists: tuple[Any, ...]
    first_layer: tuple[Any, ...]
    y_swi: tuple[Any, ...]


def _index_lists(L: Any, slots_shape: Sequence[Any], num_experts: int) -> Places:
    """`launch_config.index_lists` of sizes that may be symbolic. slots_shape: (L, k), or (P,) of pairs."""
    uncached: Any = launch_config.index_lists.__wrapped__  # a cache would compare sizes
    k, pairs = (None, slots_shape[0]) if len(slots_shape) == 1 else (slots_shape[1], None)
    found: Places = uncached(L, k, num_experts, pairs, torch.sym_min)
    return found


def _out_shape(x: Any, slots_shape: Sequence[Any], options: Options) -> tuple[Any, ...]:
    return (*slots_shape, x.shape[1]) if options.unreduced else tuple(x.shape)


def _sizes(tensors: Mapping[str, Any], slots_shape: Sequence[Any], options: Options, save: str | None) -> _Sizes:
    """tensors: at least those of READ_IN_BACKWARD, whose shapes may be symbolic. slots_shape: of `_index_lists`."""
    L, (E, h, _), slots = tensors["x"].shape[0], tensors["w2"].shape, math.prod(slots_shape)
    out = _out_shape(tensors["x"], slots_shape, options)
    first_layer = (slots, h * (1 + is_gated(options.name))) if save in ("minimal", "paper") else (0,)
    size = _index_lists(L, slots_shape, E)[1]
    if save == "fp8":
        first_layer = (launch_config.saved_fp8(slots, h, 1 + is_gated(options.name)).nbytes,)
    return _Sizes(out, (size,), first_layer, (slots, h) if save == "paper" else (0,))


def _check_forward(layer: Layer, options: Options, save: str | None) -> None:
    given = layer._asdict().items()
    d = {layer.argument(name): describe(tensor) for name, tensor in given if tensor is not None}
    checks.same_device("moe", **d)
    arrays, of_layer = LayerArrays(*map(d.get, layer.arrays.arguments())), options.of_layer(save)
    checks.layer_options("moe", of_layer, arrays.router_weights is not None, arrays.b1_gate is not None)
    checks.layer("moe", arrays, of_layer)
    checks.tf32("moe", options.tf32, d["x"])
    checks.identity_experts("moe", of_layer, d["w2"].shape[0])
    fp8_checks.wgrad("moe", of_layer, d["w2"].shape[1])
    if options.precision is not None:  # the implementation asks the GPU as well
        in_fp8 = [d[name] for name in fp8_checks.NAMES if name in d]
        described = d["x"], d["w2"], options.activation, options.gate_up
        fp8_checks.layer("moe", *described, {}, in_fp8, options.gate_up, None)


def _call_forward(layer: Layer, options: Options, save: str | None) -> tuple[Any, SavedForBackward | None]:
    fp8_weights = _fp8_weights(layer._asdict(), options)
    with torch.no_grad():
        extras = None if fp8_weights is None else LayerExtras(fp8_weights=fp8_weights)
        return forward(layer.arrays, options.of_layer(save), extras, "moe")


def _fp8_weights(tensors: Mapping[str, Any], options: Options) -> Fp8Weights | None:
    """tensors: at least those of IN_FP8."""
    if tensors[IN_FP8[0]] is None:
        return None
    fields = zip(fp8_checks.FIELDS, IN_FP8, strict=True)
    return Fp8Weights(**{field: tensors[name] for field, name in fields}, gate_up=options.gate_up)


def _slots_shape(read: dict[str, Any], grad_out: Tensor) -> tuple[Any, ...]:
    """(L, k), or (P,) of pairs. Without router weights the output, and so its gradient, has a row per slot."""
    return tuple(grad_out.shape[:-1] if read["weights"] is None else read["weights"].shape)


def _saved(read: dict[str, Any], grad_out: Tensor, kept: Kept, options: Options, save: str) -> SavedForBackward:
    """What `moe_forward` returned, from its tensors; read: those of READ_IN_BACKWARD by name."""
    weights, w2 = read["weights"], read["w2"]
    slots_shape, num_experts = tuple(map(concrete, _slots_shape(read, grad_out))), w2.shape[0]
    places, _ = _index_lists(concrete(read["x"].shape[0]), slots_shape, num_experts)
    index = DispatchIndices(kept.lists, None, places, num_experts)
    biases = read["b1_gate"], read["b1_up"], read["b2"]
    arrays = LayerArrays(read["x"], None, weights, read["gate"], read["up"], w2, *biases)
    made = index, kept.first_layer, kept.y_swi
    return SavedForBackward(arrays, options.of_layer(save), *made, fp8_weights=_fp8_weights(read, options))


def _moe_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    layer, options, save = split(arguments, Layer, Options, 1)
    out, saved = _call_forward(layer, options, save)
    assert saved is not None
    kept = (saved.first_layer, saved.y_swi)
    return out, saved.index.lists, *(nothing(layer.x) if tensor is None else tensor for tensor in kept)


def _fake_moe_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    layer, options, save = split(arguments, Layer, Options, 1)
    _check_forward(layer, options, save)
    x, sizes = layer.x, _sizes(layer._asdict(), layer.ids.shape, options, save)
    lists = x.new_empty(sizes.lists, dtype=torch.int32)
    kept_as = torch.uint8 if save == "fp8" else x.dtype
    return x.new_empty(sizes.out), lists, x.new_empty(sizes.first_layer, dtype=kept_as), x.new_empty(sizes.y_swi)


def _moe_infer(*arguments: Any) -> Tensor:
    layer, options = split(arguments, Layer, Options)
    out: Tensor = _call_forward(layer, options, None)[0]
    return out


def _fake_moe_infer(*arguments: Any) -> Tensor:
    layer, options = split(arguments, Layer, Options)
    _check_forward(layer, options, None)
    x: Tensor = layer.x
    # Not by `_sizes`: torch 2.6 and 2.7 compare what sym_min gets, and export then refuses few tokens.
    return x.new_empty(_out_shape(x, layer.ids.shape, options))


class _BackwardCall(NamedTuple):
    """The arguments of a backward operator."""

    grad_out: Tensor
    read: dict[str, Any]
    kept: Kept
    sums: Sums
    options: Options
    save: str
    needs: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Sequence[Any], accumulates: bool) -> "_BackwardCall":
        kinds = (1, len(READ_IN_BACKWARD), Kept, *([Sums] if accumulates else []), Options, 2)
        grad_out, *rest = split(arguments, *kinds)
        read, rest = dict(zip(READ_IN_BACKWARD, rest, strict=False)), rest[len(READ_IN_BACKWARD) :]
        kept, *sums, options, save, needed = rest
        needs = tuple(compress(NEEDS, needed))
        return cls(grad_out, read, kept, sums[0] if sums else Sums(), options, save, needs)

    def check_kept(self) -> None:
        """Raises ValueError if these are not what the forward of these tensors made."""
        slots_shape = _slots_shape(self.read, self.grad_out)
        sizes = _sizes(self.read, slots_shape, self.options, self.save)._asdict()
        for name, tensor in self.kept._asdict().items():
            got = (0,) if tensor is None else tuple(map(concrete, tensor.shape))
            expected = tuple(map(concrete, sizes[name]))
            if got != expected:
                raise checks.bad_value("moe_backward", f"saved.{name}", f"shape {expected}", got)

    def adds(self, name: str) -> bool:
        """Whether the gradient of this tensor of `Layer` goes to a sum."""
        return getattr(self.sums, name, None) is not None

    def results(self, make: Callable[[str], Tensor]) -> tuple[Tensor, ...]:
        """One tensor for each of DIFFERENTIABLE: what `make` gives, or nothing."""
        wanted = [
            gradient in self.needs and self.read[name] is not None and not self.adds(name)
            for name, gradient in DIFFERENTIABLE.items()
        ]
        return tuple(
            make(name) if want else nothing(self.grad_out) for name, want in zip(DIFFERENTIABLE, wanted, strict=True)
        )


def by_tensor(grads: Gradients) -> dict[str, Any]:
    """The gradients by the names of DIFFERENTIABLE."""
    of_layer = grads.x, grads.weights, *gate_and_up(grads.w1), grads.w2, *gate_and_up(grads.b1), grads.b2
    return dict(zip(DIFFERENTIABLE, of_layer, strict=True))


def _backward(accumulates: bool, overwrites: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The implementation and the fake of a backward operator."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        call = _BackwardCall.of(arguments, accumulates)
        call.check_kept()
        sums = call.sums._asdict()
        accumulate = {
            name: joined(sums[parts[0]], sums.get(parts[1]))
            for name, parts in SUMMED.items()
            if sums[parts[0]] is not None
        }
        saved = _saved(call.read, call.grad_out, call.kept, call.options, call.save)
        try:
            with torch.no_grad():
                grads = mb.moe_backward(
                    call.grad_out, saved, needs=call.needs, keep_saved=not overwrites, accumulate=accumulate
                )
        finally:  # kernels write through pointers, which autograd does not see
            if saved.consumed:
                count_writes(call.kept[1:])
        return call.results(by_tensor(grads).__getitem__)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        if private.has_inductor():
            private.let_inductor_overwrite(moe_fwd, {moe_bwd: moe_bwd_, moe_bwd_acc: moe_bwd_acc_})
        call = _BackwardCall.of(arguments, accumulates)
        call.check_kept()
        read = {name: describe(tensor) for name, tensor in call.read.items() if tensor is not None}
        saved = _saved(call.read, call.grad_out, call.kept, call.options, call.save)
        checks.layer_backward("moe_backward", describe(call.grad_out), read["x"], saved)
        sums = {name: tensor for name, tensor in call.sums._asdict().items() if tensor is not None}
        for names in SUMMED.values():
            if given := {f"sum of {name}": describe(sums[name]) for name in names if name in sums}:
                shapes = [read[name].shape for name in names if name in sums]
                checks.accumulated("moe_backward", given, shapes, read["x"].dtype)

        def gradient(name: str) -> Tensor:
            tensor: Tensor = call.read[name]
            if tensor.dim() == 3 and checks.weight_order("moe_backward", name, read[name]):
                E, rows, columns = tensor.shape
                return tensor.new_empty((E, columns, rows)).transpose(1, 2)
            return tensor.new_empty(tensor.shape)

        return call.results(gradient)

    return run, fake


def _quantize_weights(gate: Tensor, up: Tensor | None, w2: Tensor, gate_up: str) -> tuple[Tensor, ...]:
    with torch.no_grad():
        made = mb.quantize_weights(joined(gate, up), w2, gate_up=gate_up)
    return tuple(getattr(made, field) for field in fp8_checks.FIELDS)


def _fake_quantize_weights(gate: Tensor, up: Tensor | None, w2: Tensor, gate_up: str) -> tuple[Tensor, ...]:
    parts = tuple(describe(part) for part in (gate, up) if part is not None)
    halves = quantization.check(parts, describe(w2), gate_up)[-1]
    (E, h, d), in_e4m3 = w2.shape, quantize.E4M3
    return tuple(
        w2.new_empty(shape, dtype=torch.float8_e4m3fn if field in in_e4m3 else torch.float32)
        for field, shape in quantize.shapes_of(E, d, h, halves).items()
        if field in fp8_checks.FIELDS
    )


_tensors, _options = declared(Layer), declared(Options)
define("moe_fwd", [_tensors, _options, "str save"], "(Tensor, Tensor, Tensor, Tensor)", _moe_fwd, _fake_moe_fwd)
define("moe_infer", [_tensors, _options], "Tensor", _moe_infer, _fake_moe_infer)
for _accumulates in (False, True):
    for _overwrites in (False, True):
        define(
            "moe_bwd" + "_acc" * _accumulates + "_" * _overwrites,
            [
                "Tensor grad_out",
                declared(Layer, READ_IN_BACKWARD),
                "Tensor lists",
                declared(Kept, Kept._fields[1:], written="ab" if _overwrites else ""),
                *([declared(Sums, prefix="sum_", written="cde")] if _accumulates else []),
                _options,
                "str save, bool[] needs",
            ],
            f"({', '.join(['Tensor'] * len(DIFFERENTIABLE))})",
            *_backward(_accumulates, _overwrites),
        )

moe_fwd, moe_infer = torch.ops.moeblaze.moe_fwd.default, torch.ops.moeblaze.moe_infer.default
moe_bwd, moe_bwd_ = torch.ops.moeblaze.moe_bwd.default, torch.ops.moeblaze.moe_bwd_.default
moe_bwd_acc, moe_bwd_acc_ = torch.ops.moeblaze.moe_bwd_acc.default, torch.ops.moeblaze.moe_bwd_acc_.default
define(
    "quantize_weights",
    ["Tensor gate, Tensor? up, Tensor w2, str gate_up"],
    f"({', '.join(['Tensor'] * len(IN_FP8))})",
    _quantize_weights,
    _fake_quantize_weights,
)
quantize_weights = torch.ops.moeblaze.quantize_weights.default
define("count_flops", ["Tensor like, SymInt flops"], "()", *[lambda like, flops: None] * 2)  # for dispatch modes
count_flops = torch.ops.moeblaze.count_flops.default


def _product_flops(slots_shape: Sequence[int], tensors: Mapping[str, Any]) -> tuple[int, int]:
    """Operations of x by w1 and of act(a) * b by w2; tensors: at least those of READ_IN_BACKWARD.

    All slots count, empty ones too, as only the GPU knows which these are.
    """
    _, h, d = tensors["w2"].shape
    columns = sum(tensors[name].shape[2] for name in ("gate", "up") if tensors[name] is not None)
    slots = math.prod(slots_shape)
    return 2 * slots * d * columns, 2 * slots * h * d


def _forward_flops(*arguments: Any, out_val: Any = None) -> int:
    layer, *_ = split(arguments, Layer, len(arguments) - len(Layer._fields))
    return sum(_product_flops(layer.ids.shape, layer._asdict()))


_NEEDS_DOWN_BWD = {"x", "weights", "w1", "b1"}


def _flops_of_backward(first: int, second: int, save: str | None, needs: Sequence[str], down_bwd: bool) -> int:
    """first, second: of `_product_flops`. down_bwd: whether the gradient of act(a) * b is computed."""
    flops = first * sum(name in needs for name in ("x", "w1")) + second * ("w2" in needs)
    return flops + first * (save == "recompute" and bool(needs)) + second * down_bwd


def _backward_flops(accumulates: bool) -> Callable[..., int]:
    def count(*arguments: Any, out_val: Any = None) -> int:
        call = _BackwardCall.of(arguments, accumulates)
        products = _product_flops(_slots_shape(call.read, call.grad_out), call.read)
        return _flops_of_backward(*products, call.save, call.needs, not _NEEDS_DOWN_BWD.isdisjoint(call.needs))

    return count


def count_beside_operators(
    layer: LayerArrays, slots: int, lora: Lora | None, save: str | None = None, needs: Sequence[str] | None = None
) -> None:
    """Tells `FlopCounterMode` of a call that is no operator, as with factors or packed weights, or over many ranks.

    needs: of a backward; None for a forward.
    """
    if not private.number_of_dispatch_modes():
        return
    first, second = _product_flops((slots,), {"w2": layer.w2, "gate": layer.w1_gate, "up": layer.w1_up})
    pairs = () if lora is None else ((lora.a1, lora.b1), (lora.a2, lora.b2))
    # Of each pair: x a^T, then (x a^T) b^T.
    low = [(0, 0) if a is None else (2 * slots * a.shape[-2] * a.shape[-1], 2 * slots * b[0].numel()) for a, b in pairs]
    if needs is None:
        flops = first + second + sum(map(sum, low))
    else:
        trains = "lora" in needs
        down_bwd = not _NEEDS_DOWN_BWD.isdisjoint(needs) or (trains and low[0] != (0, 0))
        flops = _flops_of_backward(first, second, save, needs, down_bwd)
        for (to_ranks, from_ranks), passes in zip(low, ("x" in needs, down_bwd), strict=False):
            flops += (to_ranks + from_ranks) * trains + from_ranks * (trains or passes) + to_ranks * passes
        flops += sum(low[0]) if low and save == "recompute" else 0
    count_flops(layer.x, flops)


def _register_flops(flop_counter: Any) -> None:
    ours, register = torch.ops.moeblaze, flop_counter.register_flop_formula
    register(ours.count_flops, get_raw=True)(lambda like, flops, out_val=None: flops)
    register([ours.moe_fwd, ours.moe_infer], get_raw=True)(_forward_flops)
    register([ours.moe_bwd, ours.moe_bwd_], get_raw=True)(_backward_flops(False))
    register([ours.moe_bwd_acc, ours.moe_bwd_acc_], get_raw=True)(_backward_flops(True))


follow("torch.utils.flop_counter", _register_flops)  # which imports Triton
