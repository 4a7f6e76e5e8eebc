"""Hugging Face transformers: importing this module registers `experts_implementation="moeblaze"`.

A module that the layer cannot compute runs as "grouped_mm" does, with one warning for its class. `patch` serves the
classes that transformers does not dispatch.
"""

import os
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.torch import fp8 as torch_fp8
from moeblaze_cupy.interop.torch.arguments import check_module
from moeblaze_cupy.interop.transformers import lora, private, quantised
from moeblaze_cupy.interop.transformers.experts import arguments_of, experts, layer_options, set_held, unfit, weights_of
from moeblaze_cupy.interop.transformers.formula import foreign_forward, formula_of, has_own_forward, name_of, refuse
from moeblaze_cupy.interop.transformers.patches import (
    CALLERS,
    OUT_OF_REACH,
    PATCHES,
    Weights,
    bind,
    is_bound,
    set_held_bound,
)
from moeblaze_cupy.types import SAVE_POLICIES, WEIGHT_FORMATS, QuantizedWeight


def register(
    name: str = "moeblaze",
    *,
    save: str = "minimal",
    keep_saved: bool = False,
    precision: str | None = None,
    memory_limit: int | None = None,
    fallback: bool | None = None,
) -> None:
    """Registers the layer with transformers as `experts_implementation=name`. The import does so with the defaults.

    save: a save policy of `moeblaze_cupy.moe_forward`, for models in training.
    keep_saved: whether a second backward through the same graph works, as in `moe`.
    precision: None, or "fp8" as in `moe`. Every forward quantises the weights, in compiled code, in CUDA graphs and on
    weights that FSDP2 gathered too, unless `quantize_weights` has the model hold them. Backward uses the same e4m3
    weights; with save="recompute" it quantises again. Experts that e4m3 does not serve raise the errors of `moe`:
    nothing falls back.
    memory_limit: as of `moe`, for each layer and pass.
    fallback: True runs experts that the layer cannot compute as "grouped_mm", with one warning that names the class and
    the reason. False raises NotImplementedError. None reads the environment variable MOEBLAZE_FALLBACK: "0" means
    False.
    """
    checks.one_of("register", "save", save, SAVE_POLICIES)
    checks.one_of("register", "precision", precision, fp8_checks.PRECISIONS)
    options = layer_options(save, precision, keep_saved, checks.memory_limit("register", memory_limit))
    if not isinstance(name, str) or name in ("", "eager") or (private.is_registered(name) and name not in _PRECISIONS):
        raise checks.bad_value("register", "name", "one that transformers does not use itself", repr(name))
    falls_back = _falls_back(fallback) and precision is None

    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        formula = formula_of(self)
        parameters, adapters = weights_of(self, whole=True), lora.taken(self)
        reason = formula.reason or unfit(parameters) or lora.unfit(adapters)
        if reason:
            refuse(type(self), reason, "grouped_mm", falls_back and not isinstance(parameters[0], QuantizedWeight))
            grouped_mm, arguments = private.grouped_mm_experts_forward, (hidden_states, top_k_index, top_k_weights)
            out: torch.Tensor = lora.call(adapters, grouped_mm, self, *arguments)
            return out
        return experts(
            self,
            formula,
            hidden_states,
            top_k_index,
            top_k_weights,
            options,
            parameters=parameters,
            adapters=adapters,
        )

    _PRECISIONS[name] = precision
    private.register(name, forward)


_PRECISIONS: dict[str, str | None] = {}  # by the names under which the layer is registered


def _falls_back(fallback: bool | None) -> bool:
    return os.environ.get("MOEBLAZE_FALLBACK", "1") != "0" if fallback is None else fallback


def _takes_adapters(module: Any) -> bool:
    """Whether the forward of the module is this layer's, and hands factors on."""
    if lora.TAKES in vars(module) or is_bound(module):
        return True
    is_ours = private.is_dispatched(module) and private.experts_implementation(module) in _PRECISIONS
    return is_ours and has_own_forward(module)


def quantize_weights(model: torch.nn.Module, *, hold: bool = True) -> tuple[str, ...]:
    """Quantises the experts' weights of a model once, for precision="fp8": all forwards use them until the next call.

    As with `MoE.quantize_weights`, forwards do not see what is written to the parameters meanwhile. Modules with
    adapters of peft hold what is beside the factors, until these are merged; those that `patch` serves hold nothing.
    hold: False ends it, and every forward quantises again.
    Returns the names of the modules that hold weights: those whose implementation was registered with precision="fp8",
    and those that `patch` serves with it.
    Raises ValueError if the model has none of these, RuntimeError for parameters that are DTensors, NotImplementedError
    for experts that the layer cannot compute, and the errors of `moeblaze_cupy.quantize_weights`.
    """
    check_module("quantize_weights", model)
    held, beside_factors = {}, lora.beside_factors(model)
    for name, module in model.named_modules():
        if is_bound(module):
            if module.moeblaze_options.get("precision") is not None:
                held[name] = set_held_bound(name, module, hold)
        elif private.is_dispatched(module) and _PRECISIONS.get(private.experts_implementation(module)) is not None:
            formula = formula_of(module)
            if formula.activation is None:
                raise NotImplementedError(f"moeblaze: {name_of(type(module))}: {formula.reason}")
            if quantised.packed(module) is not None:
                raise checks.bad_value("quantize_weights", name, "experts in floats", "packed ones")
            w1, w2, _ = arguments_of(module)
            of_weights = weights_of(module), w1, w2, formula.gate_up, hold
            held[name] = set_held(name, module, *of_weights, module in beside_factors)
    if not held:
        expected = 'experts with precision="fp8", of register or patch'
        raise checks.bad_value("quantize_weights", "model", expected, f"a {type(model).__name__} without")
    return tuple(name for name, holds in held.items() if holds)


def pack_experts(model: torch.nn.Module, format: str | None = None) -> tuple[str, ...]:
    """Packs the frozen experts of a model in four or eight bits, in place, module by module.

    Each weight is freed once its module is packed. Forwards then need the experts implementation "moeblaze", or another
    name of `register`, without `precision`. Biases and routers stay parameters, which may train.
    model: in bf16, on the CPU also in fp32. On the device meta it gets empty parts, for
    `load_state_dict(state, assign=True)`, and on the CPU the buffers that no state dict has.
    format: of `moeblaze_cupy.quantize_experts`. Experts that are packed in it stay as they are. None takes over what
    others have packed, in its memory: parameters that bitsandbytes' `replace_parameter_4bit` has in nf4 and blocks of
    64, and torchao's `Int8Tensor` and `Float8Tensor` with scales along K; both of (E, N, K). Tested with bitsandbytes
    0.50 and torchao 0.18.
    In the place of a parameter such as `gate_up_proj` are uint8 parameters `gate_up_proj_data` and
    `gate_up_proj_scales`, or `gate_up_proj_blocks` and `gate_up_proj_scales` in "mxfp4". The state dict has these.
    `save_pretrained` of the model raises RuntimeError from here on, as `from_pretrained` would not find the weights.
    Covers the classes that transformers dispatches, and Llama4TextExperts, LongcatFlashExperts and Step3p7Experts after
    `patch`.
    Returns the names of the modules with packed experts. Raises ValueError for experts that train, for those in another
    format, for merged adapters of peft on them and for a model without experts, NotImplementedError for experts that
    the layer cannot compute, TypeError for other dtypes, RuntimeError for DTensors, and the errors of
    `quantize_experts`. Modules before the one with an error are packed then, but none if adapters are merged.
    """
    check_module("pack_experts", model)
    checks.one_of("pack_experts", "format", format, (None, *WEIGHT_FORMATS))
    found = {n: m for n, m in model.named_modules() if is_bound(m) or private.is_dispatched(m)}
    lora.refuse_merged("pack_experts", model, found.values())
    for name, module in found.items():
        if _pack(name, module, format):
            quantised.refuse_saving(module)
    if any(parameter.is_meta for parameter in model.parameters()):
        private.fill_buffers(model)
    if not found:
        expected = "experts that transformers dispatches or that `patch` serves"
        raise checks.bad_value("pack_experts", "model", expected, f"a {type(model).__name__} without")
    return tuple(found)


def _pack(name: str, module: Any, format: str | None) -> bool:
    """Packs a module. Returns False for one that was packed by this layer before."""
    packed, by_others = quantised.packed(module), quantised.packed_by_others(name, module)
    for weight in packed or by_others or ():
        if format not in (None, weight.format):
            raise checks.bad_value("pack_experts", name, f"experts in floats or {format!r}", repr(weight.format))
    if by_others is not None:
        quantised.take_over(module, by_others)
    if packed is not None or by_others is not None:
        return by_others is not None
    if format is None:
        raise checks.bad_value("pack_experts", "format", f"a format for {name}, whose experts are in floats", "None")
    kind = name_of(type(module))
    if is_bound(module):
        weights = PATCHES[kind].weights(module)
        reason = "" if len(weights.parameters) == 2 and hasattr(module, "down_proj") else "its weights are in its parts"
    else:
        w1, w2, _ = arguments_of(module)
        weights, reason = Weights(w1, w2, weights_of(module)), formula_of(module).reason
    reason = reason or unfit(weights.parameters)
    if reason:
        raise NotImplementedError(f"pack_experts: {name}: {kind}: {reason}")
    for of, parameter in zip(quantised.projections(module), weights.parameters, strict=True):
        torch_fp8.refuse_parts(f"pack_experts: {name}.{of}", hasattr(parameter, "to_local"))
        if parameter.requires_grad:
            expected = "a frozen weight; model.requires_grad_(False) before freezes all"
            raise checks.bad_value("pack_experts", f"{name}.{of}", expected, "one that requires a gradient")
        quantised.check_dtype("pack_experts", f"{name}.{of}", parameter.dtype)
    quantised.pack(module, weights.w1, weights.w2, format)
    return True


class Patched(NamedTuple):
    """What `patch` did: names of modules it serves, and reasons by the names of those that it cannot serve."""

    served: tuple[str, ...]
    refused: dict[str, str]


def patch(
    model: torch.nn.Module,
    *,
    save: str = "minimal",
    keep_saved: bool = False,
    precision: str | None = None,
    memory_limit: int | None = None,
    fallback: bool | None = None,
) -> Patched:
    """Serves modules that transformers does not dispatch, and finds the formulas of those that it does.

    It replaces the forward of every DbrxExperts, Llama4TextExperts, JetMoeMoE, LongcatFlashExperts and Step3p7Experts
    within the model, and of every Llama4TextMoe around such experts, on the instance. Weights stay where they are.
    Another call changes only the options. For modules whose experts implementation is "moeblaze" it finds the formulas,
    so that parts of a model that are compiled one by one share their graphs.
    save, keep_saved, precision, memory_limit: see `register`, which decides for modules that transformers dispatches.
    fallback: see `register`. A module that cannot be served keeps its forward, with a warning. If a call later cannot
    be computed by the layer, as with adapters on parts of the module, it runs the class's own code.
    Raises ValueError for another `save` or `precision`, and NotImplementedError for a module that cannot be served if
    `fallback` is False, or if `precision` is given and the module is of these classes.
    """
    check_module("patch", model)
    checks.one_of("patch", "save", save, SAVE_POLICIES)
    checks.one_of("patch", "precision", precision, fp8_checks.PRECISIONS)
    served, refused, falls_back = [], {}, _falls_back(fallback)
    options = layer_options(save, precision, keep_saved, checks.memory_limit("patch", memory_limit))
    callers: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if name_of(type(module)) in {caller.name for caller in CALLERS.values()}:
            callers.update(dict.fromkeys(module.modules(), module))
        serves = falls_back and precision is None
        reason = _serve(module, callers.get(module), options, serves)
        if reason:
            refused[name] = reason
            must_serve = precision is not None and name_of(type(module)) in PATCHES
            refuse(type(module), reason, "before", falls_back and not must_serve)
        elif reason is not None:
            served.append(name)
    return Patched(tuple(served), refused)


def _serve(module: Any, caller: Any, options: dict[str, Any], falls_back: bool) -> str | None:
    """Patches the module if its class needs that.

    Returns "" if the layer serves the module, or a reason, or None for one without experts. caller, options,
    falls_back: what `bind` takes, for modules that are patched.
    """
    kind = name_of(type(module))
    if kind in PATCHES:
        return bind(module, caller, options, falls_back)
    if kind in OUT_OF_REACH:
        return OUT_OF_REACH[kind]
    if not private.is_dispatched(module):
        has_experts = private.parameter_names(module) >= _EXPERTS
        return "transformers does not dispatch its class" if has_experts else None
    implementation = private.experts_implementation(module)
    if implementation not in _PRECISIONS:
        return f"its experts implementation is {implementation!r}"
    return foreign_forward(module) or formula_of(module).reason


_EXPERTS = {"gate_up_proj", "down_proj"}  # parameters that experts classes have, whoever wrote them


register()
lora.follow_peft(_takes_adapters)
private.set_quantizer("mxfp4", quantised.Mxfp4Quantizer)
