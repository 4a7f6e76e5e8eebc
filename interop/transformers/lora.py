"""Adapters of peft on experts (`target_parameters`): their factors go to the layer, and W + BA is not made.

A `ParamWrapper` of peft is a module around experts that adapts one of their parameters. Wrappers are nested. peft's own
forward puts W + BA in the place of the parameter. The forward here leaves the wrapper with the experts instead, whose
forward takes it and hands its factors to `moe`.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from moeblaze_cupy import checks
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.interop.transformers import private, quantised
from moeblaze_cupy.lora.checks import MAX_RANK
from moeblaze_cupy.types import Lora


class Adapters(NamedTuple):
    """The wrappers of peft around the experts of a call, outer ones first, by the weight that they adapt."""

    w1: tuple[Any, ...] = ()
    w2: tuple[Any, ...] = ()


NONE = Adapters()
TAKES = "moeblaze_takes_adapters"  # attribute of experts over ranks, whose forward takes adapters
HELD = "moeblaze_fp8"  # attribute of experts: the `HeldFp8Weights` of their weights
_LEFT = "moeblaze_adapters"  # attribute of experts: the wrappers of a call by its thread, until they are taken
_W1, _W2 = ("gate_up_proj", "up_proj"), ("down_proj",)


def follow_peft(takes: Callable[[Any], bool]) -> None:
    """Replaces the forward of peft's wrappers, now or when peft makes the first one.

    takes: whether the forward of a module takes adapters.
    """

    def replace() -> None:
        wrappers = private.param_wrapper()
        if wrappers is not None and not hasattr(wrappers.forward, _LEFT):
            wrappers.forward = _forward_of(wrappers.forward, takes)
            wrappers.merge = _refusing(wrappers.merge, "merge", lambda wrapper: [wrapper])
            wrappers.unmerge = _refusing(wrappers.unmerge, "unmerge", lambda wrapper: [wrapper] * wrapper.merged)
        private.wrap_merge_check(_LEFT, lambda own: _refusing(own, "merge", _wrappers_in))

    def on_registration(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if name == "base_layer":  # as peft calls what it wraps
            replace()
            quantised.tell_shapes(module)

    replace()
    register_module_module_registration_hook(on_registration)


def _forward_of(own: Callable[..., Any], takes: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns the forward of peft's wrappers, whose own is used where factors do not serve."""

    @graph_break
    def leave(wrapper: Any, experts: Any, *arguments: Any, **named: Any) -> Any:
        if not takes(experts) or not _counts(wrapper) or not _reads(wrapper.__class__):
            if hasattr(experts, "moeblaze_packed"):  # peft would add BA to an empty weight
                wrapper.base_layer(*arguments, **named)  # raises what it does without adapters
                expected = "experts in floats, or several and a known version of peft, for adapters"
                got = f"packed ones, {wrapper.num_experts} in number"
                raise RuntimeError(f"moeblaze: {type(experts).__name__}: expected {expected}, got {got}")
            return own(wrapper, *arguments, **named)
        left = vars(experts).setdefault(_LEFT, {}).setdefault(threading.get_ident(), [])
        is_outer = not left
        left.append(wrapper)
        try:
            out = wrapper.base_layer(*arguments, **named)
        finally:
            forgotten = is_outer and vars(experts)[_LEFT].pop(threading.get_ident(), None)
        if forgotten:
            raise RuntimeError(f"moeblaze: {type(experts).__name__}: its forward did not take the adapters of peft")
        return out

    @functools.wraps(own)
    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        experts = self.get_base_layer()
        counts = _counts(self) or (_is_on(self) and hasattr(experts, "moeblaze_packed"))
        if self.parameter_name not in _W1 + _W2 or not counts or named.get("adapter_names") is not None:
            return own(self, *arguments, **named)
        return leave(self, experts, *arguments, **named)

    setattr(forward, _LEFT, True)
    return forward


def _refusing(own: Callable[..., Any], name: str, wrappers: Callable[[Any], Iterable[Any]]) -> Callable[..., Any]:
    """Returns a method of peft that refuses before it adds BA to weights which are packed, or a part of all experts.

    Of others it releases what they hold in e4m3.
    name: "merge" or "unmerge". wrappers: those that the method would merge or unmerge, of self.
    """

    @functools.wraps(own)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        for wrapper in wrappers(self):
            experts = wrapper.get_base_layer()
            is_packed = quantised.packed(experts) is not None
            if is_packed or TAKES in vars(experts):
                got = f"{'packed' if is_packed else 'spread'} {type(experts).__name__}"
                instead = "load the model in bf16 and the adapters from their file"
                raise RuntimeError(f"moeblaze: {name}: expected experts in floats on one rank, got {got}: {instead}")
            if HELD in vars(experts):
                vars(experts)[HELD].release()
        return own(self, *arguments, **named)

    setattr(method, _LEFT, True)
    return method


def _wrappers_in(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, private.param_wrapper())]


def refuse_merged(function: str, model: torch.nn.Module, modules: Iterable[Any]) -> None:
    """Raises ValueError if adapters are merged in one of these modules of the model: nothing could unmerge them."""
    found, kind = set(modules), private.param_wrapper()
    for name, part in model.named_modules():
        if kind is not None and isinstance(part, kind) and part.merged and part.get_base_layer() in found:
            expected = "experts without merged adapters; unmerge_adapter() before, or merge_and_unload(), gives them"
            raise checks.bad_value(function, "model", expected, f"merged {part.merged_adapters} at {name}")


def beside_factors(model: torch.nn.Module) -> set[Any]:
    """Returns the experts of a model whose adapters are all beside their weights, as factors that the layer takes."""
    found: dict[Any, bool] = {}
    for wrapper in _wrappers_in(model) if private.param_wrapper() else ():
        inner = wrapper.base_layer
        experts = wrapper.get_base_layer()
        are_factors = serves(wrapper) and not wrapper.merged and (inner is experts or serves(inner))
        found[experts] = found.get(experts, True) and are_factors
    return {experts for experts, are_factors in found.items() if are_factors}


def _is_on(wrapper: Any) -> bool:
    """Whether the wrapper has factors that are not in the weight yet."""
    return not wrapper.disable_adapters and not wrapper.merged


def _counts(wrapper: Any) -> bool:
    """Whether the wrapper has factors for the layer. peft takes the weight of a single expert for a plain matrix."""
    return _is_on(wrapper) and wrapper.num_experts > 1


def serves(wrapper: Any) -> bool:
    """Whether the layer takes the factors of a module of peft around experts: it is one of LoRA, as it is known."""
    return type(wrapper) is private.param_wrapper() and _reads(wrapper.__class__)


def taken(experts: Any) -> Adapters:
    """Returns the adapters of this call of the experts."""
    return _taken(experts) if getattr(experts, _LEFT, None) else NONE


@graph_break
def _taken(experts: Any) -> Adapters:
    left = vars(experts)[_LEFT].pop(threading.get_ident(), ())
    return Adapters(*(tuple(w for w in left if w.parameter_name in names) for names in (_W1, _W2)))


def unwrapped(part: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a submodule without the wrappers around it, and those of them that count.

    Its weights are read without calling it, so a wrapper that does more than adapt, such as unmerging, stays around it.
    """
    found = []
    while type(part) is private.param_wrapper() and _is_plain(part):
        found.append(part)
        part = part.base_layer
    return part, tuple(filter(_counts, found))


def of_parts(module: Any, names: Iterable[str]) -> Adapters:
    """Returns the adapters around the submodules that have w1 and w2."""
    return Adapters(*(unwrapped(getattr(module, name))[1] for name in names))


def _is_plain(wrapper: Any) -> bool:
    more = private.has_hooks(wrapper) or "forward" in vars(wrapper) or (wrapper.disable_adapters and wrapper.merged)
    return not more and wrapper.num_experts > 1 and wrapper.parameter_name == "weight" and _reads(wrapper.__class__)


def unfit(adapters: Adapters) -> str:
    """Returns why the layer cannot compute with these adapters, or ""."""
    for wrappers in adapters:
        ranks = sum(wrapper.r[name] for wrapper, name in _active(wrappers))
        if ranks > MAX_RANK:
            return f"the active adapters of a weight have {ranks} ranks together, more than {MAX_RANK}"
    return ""


def call(adapters: Adapters, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a function that knows no adapters. The adapted parameters read as W + BA in it, as by peft itself."""
    return _call(adapters, function, *arguments, **named) if any(adapters) else function(*arguments, **named)


@graph_break
def _call(adapters: Adapters, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for wrapper in (*adapters.w1, *adapters.w2):
            stack.enter_context(private.activated(wrapper))
        return function(*arguments, **named)


def option(adapters: Adapters, w2: Any, turned: bool, start: int = 0) -> dict[str, Lora]:
    """Returns the option `lora` of `moe`, or none.

    w2: the layer's. turned: whether it is a transposed parameter. start: the first of the layer's experts.
    """
    return _option(adapters, w2, turned, start) if any(adapters) else {}


@graph_break
def _option(adapters: Adapters, w2: Any, turned: bool, start: int) -> dict[str, Lora]:
    (a1, b1, scale1), (a2, b2, scale2) = (_factors(wrappers, w2, turned, start) for wrappers in adapters)
    return {} if a1 is a2 is None else {"lora": Lora(a1, b1, a2, b2, scale1, scale2)}


def _active(wrappers: tuple[Any, ...]) -> list[tuple[Any, str]]:
    return [(wrapper, name) for wrapper in wrappers for name in wrapper.active_adapters if name in wrapper.lora_A]


def _factors(wrappers: tuple[Any, ...], w2: Any, turned: bool, start: int = 0) -> tuple[Any, Any, float]:
    """Returns a, b and the scale of a `Lora`, views of peft's parameters if one adapter is active.

    They are those of the layer's experts, the number of which w2 has. Factors are in float32 or get the dtype of w2.
    """
    here = slice(start, start + w2.shape[0])
    dtype = w2.dtype if isinstance(w2.dtype, torch.dtype) else getattr(torch, w2.dtype)
    factors = []
    for wrapper, name in _active(wrappers):
        first, second = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        a = first.reshape(wrapper.num_experts, -1, first.shape[1])
        b = second.reshape(second.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        if private.is_swapped(wrapper) != turned:  # peft takes the weight's columns for its rows
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        a, b = (f[here] if f.dtype == torch.float32 else f[here].to(dtype) for f in (a, b))
        factors.append((a, b, float(wrapper.scaling[name])))
    if len(factors) < 2:
        return factors[0] if factors else (None, None, 1.0)
    return torch.cat([a * scale for a, _, scale in factors], 1), torch.cat([b for _, b, _ in factors], 2), 1.0


@functools.cache
def _reads(kind: Any) -> bool:
    """Whether wrappers of this class have factors as `_factors` reads them. peft's own BA of a stand-in tells it."""
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    try:
        with private.without_modes(), torch.autocast("cpu", enabled=False):  # the answer is for later calls, too
            for swapped in (False, True):
                first, second = torch.randn(6, 4, **options), torch.randn(5, 6, **options)
                weight = torch.zeros((2, 5, 4) if swapped else (2, 4, 5), device="cpu", dtype=torch.float32)
                stand_in = private.stand_in(first, second, weight, swapped)
                a, b, scale = _factors((stand_in,), weight, turned=True)
                wanted = kind.get_delta_weight(stand_in, stand_in.active_adapters[0])
                torch.testing.assert_close(scale * (b @ a), wanted)
        return private.can_activate(kind)
    except Exception as error:  # whatever a later version of peft raises
        warnings.warn(
            "moeblaze: adapters on experts run as by peft itself, which copies whole weights in every forward: this "
            f"version of peft is not known ({error!s:.200})",
            stacklevel=2,
        )
        return False
