"""The layer as torch operators, for all that has to see a call to follow it: compilers, dispatch modes, torch.func.

Every operator's fake makes the checks that its implementation makes, so bad arguments are named at compile time. What
an operator does not keep or compute is an empty tensor. Shapes of results depend on shapes alone. `Layer`, `Options`
and `DIFFERENTIABLE` are all that schemas, implementations and fakes know of the layer's arguments: a new one is a new
line there, and a line in `_call_forward` or `_saved`.
"""

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, cast

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks, launch_config, router_options
from moeblaze_cupy.arrays import CPU, Array
from moeblaze_cupy.interop import inductor
from moeblaze_cupy.router_options import RouterOptions
from moeblaze_cupy.structures import GRADIENTS, SHARES, DispatchIndices, SavedForBackward, is_gated

Tensor = torch.Tensor
Places = tuple[dict[str, tuple[int, tuple[int, ...]]], int]  # what `launch_config.index_lists` returns


class Layer(NamedTuple):
    """The layer's tensors. w1 is `gate` and `up`; `up` is None where w1 is one tensor."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor | None
    w2: Tensor

    @property
    def w1(self) -> Any:
        return self.gate if self.up is None else (self.gate, self.up)


class Options(NamedTuple):
    """What else the layer is told, forward and backward alike; numbers, names and tuples of numbers."""

    activation: str


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


# By tensor of `Layer`, the name in `needs` of its gradient.
DIFFERENTIABLE = {"x": "x", "weights": "weights", "gate": "w1", "up": "w1", "w2": "w2"}
READ_IN_BACKWARD = tuple(name for name in Layer._fields if name != "ids")
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


def _index_lists(L: Any, k: Any, num_experts: int) -> Places:
    """`launch_config.index_lists` of sizes that may be symbolic."""
    uncached: Any = launch_config.index_lists.__wrapped__  # a cache would compare sizes
    return cast(Places, uncached(L, k, num_experts, torch.sym_min))


def _check_forward(layer: Layer, options: Options, save: str | None) -> None:
    d = {name: _described(tensor) for name, tensor in layer._asdict().items() if tensor is not None}
    w1 = (d["gate"],) if layer.up is None else (d["gate"], d["up"])
    checks.same_device("moe_forward", **d)
    checks.layer("moe_forward", d["x"], d["ids"], d["weights"], w1, d["w2"], options.activation, save)


def _call_forward(layer: Layer, options: Options, save: str | None) -> tuple[Any, SavedForBackward | None]:
    with torch.no_grad():
        out, saved = mb.moe_forward(
            layer.x, layer.ids, layer.weights, layer.w1, layer.w2, activation=options.activation, save=save
        )
    return out, saved


def _saved(read: dict[str, Any], kept: Kept, options: Options, save: str) -> SavedForBackward:
    """What `moe_forward` returned, from its tensors; read: those of READ_IN_BACKWARD by name."""
    weights, w2 = read["weights"], read["w2"]
    (L, k), num_experts = weights.shape, w2.shape[0]
    places, _ = _index_lists(L, k, num_experts)
    index = DispatchIndices(kept.lists, None, places, num_experts)
    w1 = read["gate"] if read["up"] is None else (read["gate"], read["up"])
    return SavedForBackward(read["x"], weights, w1, w2, index, kept.first_layer, kept.y_swi, options.activation, save)


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
    x, (L, k), (E, h, _) = layer.x, layer.ids.shape, layer.w2.shape
    lists = x.new_empty((_index_lists(L, k, E)[1],), dtype=torch.int32)
    first_layer = (L * k, h * (1 + is_gated(options.activation))) if save in ("minimal", "paper") else (0,)
    y_swi = (L * k, h) if save == "paper" else (0,)
    return x.new_empty(x.shape), lists, x.new_empty(first_layer), x.new_empty(y_swi)


def _moe_infer(*arguments: Any) -> Tensor:
    layer, options = split(arguments, Layer, Options)
    out: Tensor = _call_forward(layer, options, None)[0]
    return out


def _fake_moe_infer(*arguments: Any) -> Tensor:
    layer, options = split(arguments, Layer, Options)
    _check_forward(layer, options, None)
    x: Tensor = layer.x
    return x.new_empty(x.shape)


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
        needs = tuple(compress(GRADIENTS, needed))
        return cls(grad_out, read, kept, sums[0] if sums else Sums(), options, save, needs)

    def check_kept(self) -> None:
        """Raises ValueError if these are not what the forward of these tensors made, as under vmap of a backward."""
        L, k = self.read["weights"].shape
        E, h, _ = self.read["w2"].shape
        columns = h * (1 + is_gated(self.options.activation))
        wanted: dict[str, tuple[Any, ...]] = {"lists": (_index_lists(L, k, E)[1],)}
        wanted |= {"first_layer": (L * k, columns)} if self.save != "recompute" else {}
        wanted |= {"y_swi": (L * k, h)} if self.save == "paper" else {}
        for name, tensor in self.kept._asdict().items():
            got = None if tensor is None else tuple(map(_concrete, tensor.shape))
            expected = tuple(map(_concrete, wanted[name])) if name in wanted else None
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


def _backward(accumulates: bool, overwrites: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The implementation and the fake of a backward operator."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        call = _BackwardCall.of(arguments, accumulates)
        call.check_kept()
        sums, accumulate = call.sums, {}
        if sums.gate is not None:
            accumulate["w1"] = sums.gate if sums.up is None else (sums.gate, sums.up)
        if sums.w2 is not None:
            accumulate["w2"] = sums.w2
        saved = _saved(call.read, call.kept, call.options, call.save)
        with torch.no_grad():
            grads = mb.moe_backward(
                call.grad_out, saved, needs=call.needs, keep_saved=not overwrites, accumulate=accumulate
            )
        # Kernels write through pointers, which autograd does not see.
        touched = [*(call.kept[1:] if overwrites else ()), *sums]
        torch.autograd.graph.increment_version([tensor for tensor in touched if tensor is not None])
        gate, up = grads.w1 if isinstance(grads.w1, tuple) else (grads.w1, None)
        return call.results(
            {"x": grads.x, "weights": grads.weights, "gate": gate, "up": up, "w2": grads.w2}.__getitem__
        )

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        if "torch._inductor.graph" in sys.modules:  # else nothing is being compiled by it, and its import takes seconds
            inductor.register(moe_fwd, {moe_bwd: moe_bwd_, moe_bwd_acc: moe_bwd_acc_})
        call = _BackwardCall.of(arguments, accumulates)
        call.check_kept()
        read = {name: _described(tensor) for name, tensor in call.read.items() if tensor is not None}
        saved = _saved(call.read, call.kept, call.options, call.save)
        checks.layer_backward("moe_backward", _described(call.grad_out), read["x"], saved)
        sums = {name: tensor for name, tensor in call.sums._asdict().items() if tensor is not None}
        for names in (("gate", "up"), ("w2",)):
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
