"""The layer as torch operators, for all that has to see a call to follow it: compilers, dispatch modes, torch.func.

Every operator's fake makes the checks that its implementation makes, so bad arguments are named at compile time. What
an operator does not keep or compute is an empty tensor. Shapes of results depend on shapes alone.

A new argument of the layer is a line in `Layer` or `Options`, from which the schemas are made, one in `DIFFERENTIABLE`
if it has a gradient, and one wherever it is handed on: `_check_forward`, `_call_forward`, `_saved`, and `_sizes` if it
changes a shape.
"""

import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks, launch_config, router_options
from moeblaze_cupy.arrays import CPU, Array
from moeblaze_cupy.interop import inductor
from moeblaze_cupy.router_options import RouterOptions
from moeblaze_cupy.structures import (
    BIASES,
    FORMS,
    GRADIENTS,
    SHARES,
    Activation,
    DispatchIndices,
    Gradients,
    SavedForBackward,
    SlotOptions,
    gate_and_up,
    is_gated,
    joined,
)

Tensor = torch.Tensor
Places = tuple[dict[str, tuple[int, tuple[int, ...]]], int]  # what `launch_config.index_lists` returns


class Layer(NamedTuple):
    """The layer's tensors. w1 is `gate` and `up`; `up` is None where w1 is one tensor. So it is with b1."""

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

    @property
    def w1(self) -> Any:
        return joined(self.gate, self.up)

    @property
    def b1(self) -> Any:
        return joined(self.b1_gate, self.b1_up)


class Options(NamedTuple):
    """What else the layer is told, forward and backward alike; numbers, names and tuples of numbers."""

    name: str  #: of the activation
    constants: tuple[float, ...] = ()  #: of the activation, in their order; () for the defaults
    gate_up: str = "halves"
    weights_on: str = "output"
    unreduced: bool = False
    identity_experts: int = 0

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

    @property
    def slots(self) -> SlotOptions:
        return SlotOptions(self.weights_on, self.unreduced, self.identity_experts)


class Kept(NamedTuple):
    """What forward makes for backward."""

    lists: Tensor
    first_layer: Tensor | None
    y_swi: Tensor | None


class Routing(NamedTuple):
    """The router's tensors."""

    logits: Tensor
    bias: Tensor | None
    ids: Tensor | None
    token_offsets: Tensor | None
    token_mask: Tensor | None
    sequences: Tensor | None

    def present(self, but: str = "") -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None and name != but}


# What the router's backward reads of a call, beside weights and ids as they were handed out.
READ_BY_ROUTER = ("logits", "token_offsets", "token_mask", "sequences")
ROUTER_SUMS = ("score_sums", "z_sums", "entropy_sums")


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
READ_IN_BACKWARD = tuple(DIFFERENTIABLE)
NEEDS = GRADIENTS + BIASES
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    bool | None: "bool?",
    int: "int",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    tuple[float, ...]: "float[]",
    tuple[str, ...]: "str[]",
    tuple[int, int, int] | None: "int[]?",
}


def _declared(fields: type, names: Sequence[str] | None = None, prefix: str = "", written: str = "") -> str:
    """The schema's part of a NamedTuple's fields; `written`: letters of those whose memory is overwritten, in order."""
    letters, declared = iter(written), []
    for name, annotation in typing.get_type_hints(fields).items():
        if names is None or name in names:
            kind = _TYPES[annotation]
            if written and kind.startswith("Tensor"):
                kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
            declared.append(f"{kind} {prefix}{name}")
    return ", ".join(declared)


def _concrete(size: Any) -> int:
    """A size for checks: of a symbolic one its hint, so that no guard is made; the implementation checks again."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else int(node.expr.xreplace(dict.fromkeys(node.expr.free_symbols, 1009)))


def _described(tensor: Tensor) -> Array:
    """A fake tensor as checks see arrays."""
    shape, strides = (tuple(map(_concrete, sizes)) for sizes in (tensor.shape, tensor.stride()))
    device = CPU if tensor.device.type in ("cpu", "meta") else tensor.device.index or 0
    return Array(tensor, 0, shape, strides, str(tensor.dtype).removeprefix("torch."), device)


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


def _sizes(tensors: Mapping[str, Any], slots_shape: Sequence[Any], options: Options, save: str | None) -> _Sizes:
    """tensors: at least those of READ_IN_BACKWARD, whose shapes may be symbolic. slots_shape: of `_index_lists`."""
    (L, d), (E, h, _), slots = tensors["x"].shape, tensors["w2"].shape, math.prod(slots_shape)
    out = (*slots_shape, d) if options.unreduced else (L, d)
    first_layer = (slots, h * (1 + is_gated(options.name))) if save in ("minimal", "paper") else (0,)
    size = _index_lists(L, slots_shape, E)[1]
    if save == "fp8":
        first_layer = (launch_config.saved_fp8(slots, h, 1 + is_gated(options.name)).nbytes,)
    return _Sizes(out, (size,), first_layer, (slots, h) if save == "paper" else (0,))


def _check_forward(layer: Layer, options: Options, save: str | None) -> None:
    d = {name: _described(tensor) for name, tensor in layer._asdict().items() if tensor is not None}
    checks.same_device("moe_forward", **d)
    w1, b1, b2 = (
        tuple(d[name] for name in names if name in d) for names in (("gate", "up"), ("b1_gate", "b1_up"), ("b2",))
    )
    weights, slots = d.get("weights"), options.slots
    checks.slot_options("moe_forward", slots, weights is not None, bool(b1))
    arrays = d["x"], d["ids"], weights, w1, d["w2"]
    checks.layer("moe_forward", *arrays, options.activation, save, b1, b2, options.gate_up, d.get("token_offsets"))
    checks.identity_experts("moe_forward", slots, d["w2"])


def _call_forward(layer: Layer, options: Options, save: str | None) -> tuple[Any, SavedForBackward | None]:
    with torch.no_grad():
        out, saved = mb.moe_forward(
            layer.x,
            layer.ids,
            layer.weights,
            layer.w1,
            layer.w2,
            activation=options.activation,
            save=save,
            b1=layer.b1,
            b2=layer.b2,
            gate_up=options.gate_up,
            token_offsets=layer.token_offsets,
            **options.slots._asdict(),
        )
    return out, saved


def _slots_shape(read: dict[str, Any], grad_out: Tensor) -> tuple[Any, ...]:
    """(L, k), or (P,) of pairs. Without router weights the output, and so its gradient, has a row per slot."""
    return tuple(grad_out.shape[:-1] if read["weights"] is None else read["weights"].shape)


def _saved(read: dict[str, Any], grad_out: Tensor, kept: Kept, options: Options, save: str) -> SavedForBackward:
    """What `moe_forward` returned, from its tensors; read: those of READ_IN_BACKWARD by name."""
    weights, w2 = read["weights"], read["w2"]
    slots_shape, num_experts = tuple(map(_concrete, _slots_shape(read, grad_out))), w2.shape[0]
    places, _ = _index_lists(_concrete(read["x"].shape[0]), slots_shape, num_experts)
    index = DispatchIndices(kept.lists, None, places, num_experts)
    w1, b1 = joined(read["gate"], read["up"]), joined(read["b1_gate"], read["b1_up"])
    made = index, kept.first_layer, kept.y_swi, options.activation, save
    other = {"b1": b1, "b2": read["b2"], "gate_up": options.gate_up, "slots": options.slots}
    return SavedForBackward(read["x"], weights, w1, w2, *made, **other)


def split(arguments: Sequence[Any], *kinds: Any) -> list[Any]:
    """Positional arguments as NamedTuples of these types; an int stands for so many arguments as they are."""
    parts: list[Any] = []
    for kind in kinds:
        number = kind if isinstance(kind, int) else len(kind._fields)
        taken, arguments = arguments[:number], arguments[number:]
        parts += taken if isinstance(kind, int) else [kind(*taken)]
    assert not arguments
    return parts


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,))


def _moe_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    layer, options, save = split(arguments, Layer, Options, 1)
    out, saved = _call_forward(layer, options, save)
    assert saved is not None
    kept = (saved.first_layer, saved.y_swi)
    return out, saved.index.lists, *(_nothing(layer.x) if tensor is None else tensor for tensor in kept)


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
    return x.new_empty(_sizes(layer._asdict(), layer.ids.shape, options, None).out)


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
        """Raises ValueError if these are not what the forward of these tensors made, as under vmap of a backward."""
        slots_shape = _slots_shape(self.read, self.grad_out)
        sizes = _sizes(self.read, slots_shape, self.options, self.save)._asdict()
        for name, tensor in self.kept._asdict().items():
            got = (0,) if tensor is None else tuple(map(_concrete, tensor.shape))
            expected = tuple(map(_concrete, sizes[name]))
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
            make(name) if want else _nothing(self.grad_out) for name, want in zip(DIFFERENTIABLE, wanted, strict=True)
        )


def by_tensor(grads: Gradients) -> dict[str, Any]:
    """The gradients by the names of Layer, None for its integers."""
    gate, up = gate_and_up(grads.w1)
    b1_gate, b1_up = gate_and_up(grads.b1)
    of_inputs, of_biases = (grads.x, None, grads.weights), (b1_gate, b1_up, grads.b2)
    return dict(zip(Layer._fields, (*of_inputs, gate, up, grads.w2, *of_biases, None), strict=True))


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
            for tensor in (*(call.kept[1:] if saved.consumed else ()), *call.sums):
                if tensor is not None:
                    torch.autograd.graph.increment_version(tensor)
        return call.results(by_tensor(grads).__getitem__)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        if "torch._inductor.graph" in sys.modules:  # else nothing is being compiled by it, and its import takes seconds
            inductor.register(moe_fwd, {moe_bwd: moe_bwd_, moe_bwd_acc: moe_bwd_acc_})
        call = _BackwardCall.of(arguments, accumulates)
        call.check_kept()
        read = {name: _described(tensor) for name, tensor in call.read.items() if tensor is not None}
        saved = _saved(call.read, call.grad_out, call.kept, call.options, call.save)
        checks.layer_backward("moe_backward", _described(call.grad_out), read["x"], saved)
        sums = {name: tensor for name, tensor in call.sums._asdict().items() if tensor is not None}
        for names in SUMMED.values():
            if given := {f"sum of {name}": _described(sums[name]) for name in names if name in sums}:
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


def _router_options(options: RouterOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """As `route` takes them: sequences are a tensor or a number."""
    named = options._asdict()
    if "sequences" in given:
        del named["sequences"]
    return named


def _route(*arguments: Any) -> tuple[Tensor, ...]:
    routing, k, options = split(arguments, Routing, 1, RouterOptions)
    given = routing.present()
    with torch.no_grad():
        weights, ids, *sums = mb.route(k=k, **given, **_router_options(options, given))
    if routing.ids is not None and ids.data_ptr() == routing.ids.data_ptr():
        ids = ids.clone()  # an operator hands out no memory that it was given
    made = tuple(sums[0]) if sums else (None,) * len(ROUTER_SUMS)
    return weights, ids, *(_nothing(weights) if total is None else total for total in made)


def _checked_router_options(function: str, options: RouterOptions) -> RouterOptions:
    sequences = None if options.sequences is None else _concrete(options.sequences)
    return router_options.of(function, *options._replace(sequences=sequences))


def asked_sums(names: Sequence[str]) -> tuple[bool, ...]:
    """Which of ROUTER_SUMS these names of `route`'s argument sums ask for."""
    return any(name in names for name in SHARES), "z" in names, "entropy" in names


def _sums_shapes(options: RouterOptions, given: Mapping[str, Any], E: Any) -> tuple[tuple[Any, ...], ...]:
    """Those of ROUTER_SUMS, (0,) of what is not asked for."""
    S = given["sequences"].shape[0] - 1 if "sequences" in given else options.sequences
    asked = zip(((S, E), (S,), (S,)), asked_sums(options.sums), strict=True)
    return tuple(shape if wanted else (0,) for shape, wanted in asked)


def _fake_route(*arguments: Any) -> tuple[Tensor, ...]:
    routing, k, options = split(arguments, Routing, 1, RouterOptions)
    given = routing.present()
    described = {name: _described(tensor) for name, tensor in given.items()}
    checks.same_device("route", **described)
    router_options.forward("route", described, k, _checked_router_options("route", options))
    logits = routing.logits
    shape = (logits.shape[0], k) if routing.ids is None else routing.ids.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    sums = _sums_shapes(options, given, logits.shape[1])
    ids = logits.new_empty(shape, dtype=torch.int32)
    return logits.new_empty(shape, dtype=wide), ids, *(logits.new_empty(s, dtype=wide) for s in sums)


class _RouterGrads(NamedTuple):
    grad_weights: Tensor
    weights: Tensor
    chosen: Tensor
    grad_score_sums: Tensor | None
    grad_z_sums: Tensor | None
    grad_entropy_sums: Tensor | None


def _router_backward(arguments: Sequence[Any]) -> tuple[dict[str, Any], RouterOptions]:
    """The tensors of a call of `route_backward` by name, and its options."""
    grads, *read, options = split(arguments, _RouterGrads, len(READ_BY_ROUTER), RouterOptions)
    given = {**grads._asdict(), **dict(zip(READ_BY_ROUTER, read, strict=True))}
    given["ids"] = given.pop("chosen")
    return {name: tensor for name, tensor in given.items() if tensor is not None}, options


def _route_bwd(*arguments: Any) -> Tensor:
    given, options = _router_backward(arguments)
    with torch.no_grad():
        grad: Tensor = mb.route_backward(**given, **_router_options(options, given))
    return grad


def _fake_route_bwd(*arguments: Any) -> Tensor:
    given, options = _router_backward(arguments)
    described = {name: _described(tensor) for name, tensor in given.items()}
    router_options.backward("route_backward", described, _checked_router_options("route_backward", options))
    logits: Tensor = given["logits"]
    return logits.new_empty(logits.shape)


_library: Any = torch.library.Library("moeblaze", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no types
# Compilers hand over strides as the fakes saw them, as the transposed views of weights.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


def _define(
    name: str, arguments: Sequence[str], returns: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _library.define(f"{name}({', '.join(arguments)}) -> {returns}", tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"moeblaze::{name}", fake, lib=_library)


_tensors, _options = _declared(Layer), _declared(Options)
_define("moe_fwd", [_tensors, _options, "str save"], "(Tensor, Tensor, Tensor, Tensor)", _moe_fwd, _fake_moe_fwd)
_define("moe_infer", [_tensors, _options], "Tensor", _moe_infer, _fake_moe_infer)
for _accumulates in (False, True):
    for _overwrites in (False, True):
        _define(
            "moe_bwd" + "_acc" * _accumulates + "_" * _overwrites,
            [
                "Tensor grad_out",
                _declared(Layer, READ_IN_BACKWARD),
                "Tensor lists",
                _declared(Kept, Kept._fields[1:], written="ab" if _overwrites else ""),
                *([_declared(Sums, prefix="sum_", written="cde")] if _accumulates else []),
                _options,
                "str save, bool[] needs",
            ],
            f"({', '.join(['Tensor'] * len(DIFFERENTIABLE))})",
            *_backward(_accumulates, _overwrites),
        )

moe_fwd, moe_infer = torch.ops.moeblaze.moe_fwd.default, torch.ops.moeblaze.moe_infer.default
moe_bwd, moe_bwd_ = torch.ops.moeblaze.moe_bwd.default, torch.ops.moeblaze.moe_bwd_.default
moe_bwd_acc, moe_bwd_acc_ = torch.ops.moeblaze.moe_bwd_acc.default, torch.ops.moeblaze.moe_bwd_acc_.default

_router = _declared(RouterOptions).replace("SymInt? sequences", "SymInt? num_sequences")
_define(
    "route",
    [_declared(Routing), "int? k", _router],
    f"({', '.join(['Tensor'] * (2 + len(ROUTER_SUMS)))})",
    _route,
    _fake_route,
)
_define(
    "route_bwd",
    [_declared(_RouterGrads), _declared(Routing, READ_BY_ROUTER), _router],
    "Tensor",
    _route_bwd,
    _fake_route_bwd,
)
route, route_bwd = torch.ops.moeblaze.route.default, torch.ops.moeblaze.route_bwd.default
