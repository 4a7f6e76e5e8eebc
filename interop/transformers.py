"""Hugging Face transformers: importing this module registers `experts_implementation="moeblaze"`.

What an experts module computes between its two products is read off its numbers: it is asked for the values of a grid,
and the activation of the layer that gives the same values is taken. A module that fits none runs as "grouped_mm" does,
with one warning for its class. `patch` serves the classes that transformers does not dispatch.
"""

import itertools
import os
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

import moeblaze_cupy as mb
from moeblaze_cupy import checks, fp8_checks
from moeblaze_cupy.interop import torch_autograd, torch_fp8
from moeblaze_cupy.interop.torch import moe
from moeblaze_cupy.structures import ACTIVATIONS, SAVE_POLICIES, Fp8Weights, is_gated

Constants = tuple[tuple[tuple[str, ...], float | str], ...]

# Gate and up values. The largest lie beyond any limit that a class clamps to.
GRID = np.array([-3e4, -40.0, -11.0, -7.5, -4.0, -1.3, -0.4, 0.0, 0.3, 1.1, 3.2, 8.0, 26.0, 3e4])
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # some classes compute in float32 whatever comes


class Formula(NamedTuple):
    """What an experts module computes, in the layer's words.

    activation: a name, or an Activation with constants; None where the layer has none such, for `reason`.
    gate_up: how gate and up columns lie, "halves" or "interleaved".
    constants: attributes of the module and its activation, by path, and the values under which this was found.
    """

    activation: str | mb.Activation | None
    gate_up: str
    reason: str
    constants: Constants


def register(
    name: str = "moeblaze", *, save: str = "minimal", precision: str | None = None, fallback: bool | None = None
) -> None:
    """Registers the layer with transformers as `experts_implementation=name`. The import does so with the defaults.

    save: a save policy of `moeblaze_cupy.moe_forward`, for models in training.
    precision: None, or "fp8" as of `moe`. Every forward quantises the weights, also when it is compiled, captured in a
    CUDA graph or run on what FSDP2 gathered, unless `quantize_weights` was called for the model. They are kept for
    backward, or with save="recompute" quantised again. What cannot be computed in e4m3 raises the errors of `moe`, and
    nothing falls back.
    fallback: True runs what the layer cannot compute as "grouped_mm", with one warning that names the class and the
    reason; False raises NotImplementedError. None takes the environment variable MOEBLAZE_FALLBACK, of which "0" means
    False.
    """
    checks.one_of("register", "save", save, SAVE_POLICIES)
    checks.one_of("register", "precision", precision, fp8_checks.PRECISIONS)
    falls_back = _falls_back(fallback) and precision is None

    def experts(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        formula = _formula_of(self)
        if formula.activation is None:
            _refuse(type(self), formula.reason, "grouped_mm", falls_back)
            out: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
            return out
        return _experts(self, formula, hidden_states, top_k_index, top_k_weights, save, precision=precision)

    _NAMES.add(name)
    ExpertsInterface.register(name, experts)


_NAMES: set[str] = set()  # that the layer is registered by


def _falls_back(fallback: bool | None) -> bool:
    return os.environ.get("MOEBLAZE_FALLBACK", "1") != "0" if fallback is None else fallback


def _parameters_of(
    module: Any, of: Callable[[Any], Any] = lambda parameter: parameter
) -> tuple[Any, Any, dict[str, Any]]:
    """w1, w2 and biases by name of a decorated module, in the layer's order; of: applied to each parameter."""
    gated = getattr(module, "has_gate", True)
    w1, w2 = map(of, _weights_of(module))
    if not getattr(module, "is_transposed", False):
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    if not getattr(module, "has_bias", False):
        return w1, w2, {}
    return (
        w1,
        w2,
        {"b1": of(module.gate_up_proj_bias if gated else module.up_proj_bias), "b2": of(module.down_proj_bias)},
    )


def _experts(
    module: Any,
    formula: Formula,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    save: str,
    of: Callable[[Any], Any] = lambda parameter: parameter,
    precision: str | None = None,
) -> torch.Tensor:
    """A decorated module's output (L, d). An id of another rank's expert is past the last one: an empty slot."""
    w1, w2, biases = _parameters_of(module, of)
    options = biases | {"activation": formula.activation, "gate_up": formula.gate_up, "save": save}
    if precision is not None:
        fp8_weights = _current_fp8_weights(module, w1, w2, formula.gate_up)
        options |= {"precision": precision, "fp8_weights": fp8_weights, "keep_fp8_weights": save != "recompute"}
    if not getattr(module, "has_post_expert_norm", False):
        return _layer(x, ids, weights, w1, w2, **options)
    slots = module.post_expert_norm(_layer(x, ids, None, w1, w2, unreduced=True, **options))
    out: torch.Tensor = (slots * weights[:, :, None]).sum(1).to(x.dtype)
    return out


def quantize_weights(model: torch.nn.Module, *, hold: bool = False) -> tuple[str, ...]:
    """Gives the experts of a model weights in e4m3 that last from forward to forward, for register(precision="fp8").

    Eager forwards write them again when the memory, the address or the version of a parameter has changed, and after a
    backward, as `MoE` does; other writes that torch does not count are followed by another call. Where a module has
    other parameters than at the call, as under FSDP2, its forwards quantise for themselves.
    hold: forwards, compiled and captured ones too, use them as they are until the next call: for inference, and for
    several micro-batches in a step.
    Returns the names of the modules: those whose experts implementation is the layer.
    Raises RuntimeError for parameters that are DTensors, NotImplementedError for experts that the layer cannot compute,
    and as `moeblaze_cupy.quantize_weights` does.
    """
    names = []
    for name, module in model.named_modules():
        if not _is_dispatched(module) or module.config._experts_implementation not in _NAMES:
            continue
        formula = _formula_of(module)
        if formula.activation is None:
            raise NotImplementedError(f"moeblaze: {_name_of(type(module))}: {formula.reason}")
        parameters = _weights_of(module)
        torch_fp8.refuse_parts(f"quantize_weights: {name}", parameters)
        w1, w2, _ = _parameters_of(module)
        copies = getattr(module, "moeblaze_fp8", None) or torch_fp8.Copies()
        copies.quantize(w1, w2, formula.gate_up, hold)
        copies.assign(*parameters)
        module.moeblaze_fp8 = copies
        names.append(name)
    return tuple(names)


def _current_fp8_weights(module: Any, w1: Any, w2: Any, gate_up: str) -> Fp8Weights | None:
    """None has the call make them."""
    copies: torch_fp8.Copies | None = getattr(module, "moeblaze_fp8", None)
    if copies is None:
        return None
    if copies.held:
        return copies.weights
    if torch_autograd.wanted((w1, w2)) or not copies.belong_to(*_weights_of(module)):
        return None
    return copies.current(w1, w2, gate_up)


def _weights_of(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As the module has them, without biases."""
    return module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj, module.down_proj


def _layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, w1: Any, w2: torch.Tensor, **options: Any
) -> torch.Tensor:
    """`moe` in the dtype of the weights, or in autocast's, with a result in x's."""
    rows = x if torch.is_autocast_enabled(x.device.type) else x.to(w2.dtype)
    if weights is not None:
        weights = (weights if weights.dtype in (torch.float32, rows.dtype) else weights.float()).contiguous()
    out = moe(rows.contiguous(), ids.contiguous(), weights, w1, w2, **options)
    return out.to(x.dtype)


# Formulas by kind of module. Written in eager calls only: tracing that starts again must find what it found before.
_FOUND: dict[tuple[Any, ...], tuple[Formula, ...]] = {}
_WARNED: set[tuple[str, str]] = set()


def _formula_of(module: Any) -> Formula:
    """The module's formula, found once for all modules of its kind with its constants.

    A compiled graph is guarded by both. A kind that no eager call has met is probed while it is traced, which guards
    the graph by the module itself.
    """
    kind = _kind(module)
    formula: Formula
    for formula in _found(*kind):
        if _has(module, formula.constants):
            return formula
    probed: Formula = _probe(module)
    if not torch.compiler.is_compiling():
        _FOUND[kind] = (*_FOUND.get(kind, ()), probed)
    return probed


def _kind(module: Any) -> tuple[Any, ...]:
    """What decides a formula beside constants. Wrappers such as peft's and FSDP's make classes, but keep the method."""
    activation = getattr(module, "act_fn", None)
    kind = type(activation) if isinstance(activation, torch.nn.Module) else activation
    flags = [getattr(module, name, default) for name, default in _FLAGS]
    return getattr(type(module), "_apply_gate", None), kind, *flags


_FLAGS = (("has_gate", True), ("has_bias", False), ("has_post_expert_norm", False))


def _has(module: Any, constants: Constants) -> bool:
    for path, value in constants:
        part = module
        for name in path:
            part = getattr(part, name)
        if part != value:
            return False
    return True


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _found(*kind: Any) -> tuple[Formula, ...]:
    return _FOUND.get(kind, ())


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _probe(module: Any) -> Formula:
    """A decorated module's formula by its values on a grid."""
    gated = getattr(module, "has_gate", True)
    constants = _constants(module)
    try:
        activation, gate_up, reason = recognise(module._apply_gate if gated else module.act_fn, gated, constants)
    except Exception as error:  # whatever a class of someone else raises for values on the CPU
        activation, gate_up = None, "halves"
        reason = f"its activation cannot be evaluated: {type(error).__name__}: {error}"
    return Formula(activation, gate_up, reason, constants)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch gives it none
def _refuse(kind: type, reason: str, instead: str, falls_back: bool) -> None:
    """Warns, once for each class and reason, or raises NotImplementedError."""
    name = _name_of(kind)
    if not falls_back:
        raise NotImplementedError(f"moeblaze: {name}: {reason}")
    if (name, reason) not in _WARNED:
        _WARNED.add((name, reason))
        warnings.warn(f"moeblaze: {name} runs as {instead}: {reason}", stacklevel=2)


def _name_of(kind: type) -> str:
    """The name of the class that transformers wrote: wrappers put theirs before it."""
    names = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    return names[0] if names else kind.__name__


def _constants(module: torch.nn.Module, path: tuple[str, ...] = ()) -> Constants:
    """Attributes by which activations of one class differ, of the module and of its activation, by path."""
    found: Constants = ()
    for name, value in vars(module).items():
        is_number = type(value) is float or (type(value) is int and any(word in name for word in _CONSTANT_WORDS))
        if is_number or (path and type(value) is str):  # such as `approximate` of torch.nn.GELU
            found += (((*path, name), value),)
    for name, child in module.named_children():
        if path or name == "act_fn":
            found += _constants(child, (*path, name))
    return found


_CONSTANT_WORDS = ("limit", "alpha", "cap")  # other integers are sizes


def recognise(
    gate: Callable[[torch.Tensor], torch.Tensor], gated: bool, constants: Constants
) -> tuple[str | mb.Activation | None, str, str]:
    """Which activation of the layer a function is: (activation, order of gate and up columns, "") or (None, "halves",
    reason).

    gate: takes (n, 2 m) gate and up columns, or (n, m) without a gate, to (n, m). It is asked in float64 on the CPU.
    constants: what may be a constant of an activation, by path, such as ("limit",) or ("act_fn", "gate_softcap").
    """
    if any(True for _ in getattr(gate, "parameters", tuple)()):
        return None, "halves", "its activation has parameters"
    a, b = (values.ravel() for values in np.meshgrid(GRID, GRID, indexing="ij"))
    got = _values(gate, np.stack([a, b], 1) if gated else a[:, None])[:, 0]
    for activation in _candidates(gated, constants):
        wanted = layer_values(activation, gated, a, b)
        if not _alike(got, wanted):
            continue
        if not gated:
            return activation, "halves", ""
        table, places = wanted.reshape(len(GRID), -1), np.random.default_rng(0).integers(len(GRID), size=(64, 4))
        wide = _values(gate, GRID[places])
        for order, columns in (("halves", ((0, 2), (1, 3))), ("interleaved", ((0, 1), (2, 3)))):
            expected = np.stack([table[places[:, g], places[:, u]] for g, u in columns], 1)
            if _alike(wide, expected):
                return activation, order, ""
        return None, "halves", "its gate and up columns neither lie in halves nor alternate"
    return None, "halves", f"its activation is none of {', '.join(n for n in ACTIVATIONS if is_gated(n) == gated)}"


def _values(function: Callable[[torch.Tensor], torch.Tensor], columns: Any) -> Any:
    with _disable_current_modes(), torch.no_grad():
        return function(torch.from_numpy(columns)).double().numpy()


def _alike(got: Any, wanted: Any) -> bool:
    return got.shape == wanted.shape and bool((abs(got - wanted) <= RELATIVE * abs(wanted) + ABSOLUTE).all())


def _candidates(gated: bool, constants: Constants) -> Iterable[str | mb.Activation]:
    """Activations with every choice of constants: numbers whose path has the words of a constant's name."""
    numbers = [(".".join(path), value) for path, value in constants if not isinstance(value, str)]
    for name in ACTIVATIONS:
        if is_gated(name) != gated:
            continue
        names = tuple(mb.Activation(name).constants)
        values = [{n for path, n in numbers if all(word in path for word in wanted.split("_"))} for wanted in names]
        for chosen in itertools.product(*values):
            if all(np.isfinite(number) and number > 0 for number in chosen):
                yield mb.Activation(name, **dict(zip(names, chosen, strict=True))) if names else name


def layer_values(activation: str | mb.Activation, gated: bool, a: Any, b: Any) -> Any:
    """(n,) float64: what the layer itself makes of gate values a (n,) and up values b (n,)."""
    columns = 2 if gated else 1
    x, w1, w2 = np.stack([a, b], 1)[:, :columns], np.eye(columns)[None], np.eye(columns)[None, :1]
    ids, weights = np.zeros((len(a), 1), np.int32), np.ones((len(a), 1))
    return mb.moe_forward(np.ascontiguousarray(x), ids, weights, w1, w2, activation=activation, save=None)[0][:, 0]


class Patched(NamedTuple):
    """What `patch` did: names of modules it serves, and reasons by the names of those that it cannot serve."""

    served: tuple[str, ...]
    refused: dict[str, str]


def patch(
    model: torch.nn.Module, *, save: str = "minimal", precision: str | None = None, fallback: bool | None = None
) -> Patched:
    """Serves modules that transformers does not dispatch, and finds the formulas of those that it does.

    The forward of every DbrxExperts, Llama4TextMoe, JetMoeMoE, LongcatFlashExperts and Step3p7Experts within the model
    is replaced on the instance. Weights stay where they are. Another call changes nothing but `save` and `precision`.
    Modules with "moeblaze" as their experts implementation are probed, so that parts of a model that are compiled one
    by one share their graphs.
    save, precision: as of `register`, which decides for modules that transformers dispatches. With "fp8" every forward
    quantises the weights.
    fallback: as of `register`. A module that cannot be served keeps its forward, with a warning.
    Raises ValueError for another `save` or `precision`, and NotImplementedError for a module that cannot be served if
    `fallback` is False, or if `precision` is given and the module is of these classes.
    """
    checks.one_of("patch", "save", save, SAVE_POLICIES)
    checks.one_of("patch", "precision", precision, fp8_checks.PRECISIONS)
    served, refused, falls_back = [], {}, _falls_back(fallback)
    options: dict[str, Any] = {"save": save}
    if precision is not None:
        options |= {"precision": precision, "keep_fp8_weights": save != "recompute"}
    for name, module in model.named_modules():
        kind = _name_of(type(module))
        reason = _served(kind, module, options)
        if reason:
            refused[name] = reason
            _refuse(type(module), reason, "before", falls_back and (precision is None or kind not in _PATCHES))
        elif reason is not None:
            served.append(name)
    return Patched(tuple(served), refused)


def _served(kind: str, module: Any, options: dict[str, Any]) -> str | None:
    """Patches where that is possible: "" for a module that the layer serves, else a reason. None for other modules.

    options: of `moe`, for modules that are patched.
    """
    if kind in _PATCHES:
        return _patch_one(kind, module, options)
    if kind in _OUT_OF_REACH:
        return _OUT_OF_REACH[kind]
    if not _is_dispatched(module):
        return None
    implementation = module.config._experts_implementation
    if implementation not in _NAMES:
        return f"its experts implementation is {implementation!r}"
    return _formula_of(module).reason


def _is_dispatched(module: Any) -> bool:
    """Whether transformers asks for an implementation of this module's experts; its decorator sets both attributes."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def _patch_one(kind: str, module: Any, options: dict[str, Any]) -> str:
    """Binds the forward, unless a reason comes back. Graphs are guarded by the attribute with the options."""
    found = _PATCHES[kind]
    if getattr(vars(module).get("forward"), "__func__", None) is found.forward:
        module.moeblaze_options = {"activation": module.moeblaze_options["activation"], **options}
        return ""
    if kind == "LongcatFlashExperts" and module.gate_up_proj is None:
        return "it has no experts with weights"
    activation, _, reason = recognise(found.gate(module), True, _constants(module))
    if not reason:
        module.moeblaze_options = {"activation": activation, **options}
        module.forward = types.MethodType(found.forward, module)
    return reason


def _glu(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate of a module that has only the activation: gate columns, then up columns."""

    def gate(columns: torch.Tensor) -> torch.Tensor:
        a, b = columns.chunk(2, dim=-1)
        return activation(a) * b

    return gate


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    batch, stored = hidden_states.shape[0], (-1, self.ffn_hidden_size, self.hidden_size)
    gate, up, w2 = (weight.view(stored) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    x, w1 = hidden_states.reshape(-1, self.hidden_size), (gate.transpose(1, 2), up.transpose(1, 2))
    out = _layer(x, top_k_index, top_k_weights, w1, w2, **self.moeblaze_options)
    return out.view(batch, -1, self.hidden_size)


def _llama4(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)  # scores (L, E) are 0 for experts that were not chosen
    ids = logits.topk(self.top_k, dim=1).indices
    w1, w2 = self.experts.gate_up_proj, self.experts.down_proj
    out = _layer(x, ids, scores.gather(1, ids), w1, w2, weights_on="input", **self.moeblaze_options)
    return self.shared_expert(x) + out, logits


def _jetmoe(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    logits = self.router(x)[4]  # through the router, where transformers records its logits
    chosen, ids = logits.topk(self.router.top_k, dim=1)
    weights = chosen.softmax(1).to(x.dtype)
    w1, w2 = self.input_linear.weight.transpose(1, 2), self.output_linear.weight.transpose(1, 2)
    out = _layer(x, ids, weights, w1, w2, **self.moeblaze_options)
    biased: torch.Tensor = out.view_as(layer_input) + self.bias
    return biased


def _longcat(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """gate_up_proj has rows for the identity experts too, which nothing reads."""
    w1, w2 = self.gate_up_proj[: self.num_routed_experts].transpose(1, 2), self.down_proj.transpose(1, 2)
    options = {"identity_experts": self.zero_expert_num, **self.moeblaze_options}
    return _layer(hidden_states, top_k_index, top_k_weights, w1, w2, **options)


def _step(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    w1, w2 = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
    return _layer(hidden_states, top_k_index, top_k_weights, w1, w2, **self.moeblaze_options)


class _Patch(NamedTuple):
    forward: Callable[..., Any]
    gate: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]  # the module's, of gate and up columns


_PATCHES = {
    "DbrxExperts": _Patch(_dbrx, lambda module: _glu(module.mlp.activation_fn)),
    "Llama4TextMoe": _Patch(_llama4, lambda module: _glu(module.experts.act_fn)),
    "JetMoeMoE": _Patch(_jetmoe, lambda module: _glu(module.activation)),
    "LongcatFlashExperts": _Patch(_longcat, lambda module: _glu(module.act_fn)),
    "Step3p7Experts": _Patch(_step, lambda module: module._apply_gate),
}
for _patched in _PATCHES.values():
    _patched.forward.__name__ = "forward"  # what a pickled model looks up: it comes back with its class's own
_QUANTISED = "its weights are quantised"
_OUT_OF_REACH = {
    "JetMoeMoA": "its experts are projections of attention",
    "SwitchTransformersExperts": "its experts are modules of their own",
    "NllbMoeExperts": "its experts are modules of their own",
    "VitPoseNaiveMoe": "its experts are modules of their own",
    "DogeCDMoE": "its experts have one hidden column",
    "FP8Experts": _QUANTISED,
    "Mxfp4GptOssExperts": _QUANTISED,
}

register()
