"""Forwards by the layer for the experts classes that transformers does not dispatch."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from moeblaze_cupy.interop.transformers import lora, private, quantised
from moeblaze_cupy.interop.transformers.experts import fp8_options, layer, set_held, unfit
from moeblaze_cupy.interop.transformers.formula import Formula, foreign_forward, formula_of, name_of, refuse

Tensor = torch.Tensor


class Weights(NamedTuple):
    """Weights of a module in the layer's order, as views of its parameters, or the `QuantizedWeight` of both."""

    w1: Any
    w2: Any
    parameters: tuple[Any, ...]
    lora: Mapping[str, Any] = types.MappingProxyType({})  # the option of `moe`


class Patch(NamedTuple):
    """How the layer serves a class.

    compute: the output, of the module, its formula, its weights and the arguments of forward.
    weights: reads them off a module. turned: whether they are transposed views of its parameters.
    activation: the path of the function of gate columns, or "" for a module with a method for the gate.
    parts: submodules whose weights are read without a call, and the names of their classes.
    own: the class's own output for the same arguments.
    """

    compute: Callable[..., Any]
    weights: Callable[[Any], Weights]
    turned: bool
    activation: str = "act_fn"
    parts: Mapping[str, str] = types.MappingProxyType({})
    own: Callable[..., Any] = lambda module, *arguments, **named: type(module).forward(module, *arguments, **named)


class Caller(NamedTuple):
    """The class that calls experts with other arguments than the layer needs, and a forward that has these."""

    name: str
    forward: Callable[..., Any]


def bind(module: Any, caller: Any, options: dict[str, Any], falls_back: bool) -> str:
    """Replaces the forward of a module of a class in PATCHES. Returns "", or why the layer cannot serve the module.

    caller: for a class in CALLERS, the module that calls it, whose forward is replaced too, or None. options: of `moe`,
    as an attribute of the module, which guards compiled graphs. falls_back: whether a call that the layer cannot
    compute runs the class's own code, with a warning, or raises.
    """
    kind = name_of(type(module))
    if not is_bound(module):
        replaced = {module: FORWARDS[kind]}
        if kind in CALLERS:
            if caller is None:
                return f"it is in no {CALLERS[kind].name}"
            replaced[caller] = CALLERS[kind].forward
        if kind == "LongcatFlashExperts" and module.gate_up_proj is None:
            return "it has no experts with weights"
        reason = next(filter(None, map(_irreplaceable, replaced)), "")
        reason = reason or formula_of(module, PATCHES[kind].activation).reason
        reason = reason or _bypassed(module, PATCHES[kind].parts)
        if reason:
            return reason
        for part, forward in replaced.items():
            part.forward = types.MethodType(forward, part)
    module.moeblaze_options, module.moeblaze_falls_back = options, falls_back
    return ""


def _irreplaceable(module: Any) -> str:
    """Returns why a forward must stay, or ""."""
    reason, forward = foreign_forward(module), module.__dict__.get("forward")
    if not reason and forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        reason = "its forward is wrapped, as by a device_map: patch the model before"
    return reason


def is_bound(module: Any) -> bool:
    """Whether the forward of the module has been replaced. Since then it may have been wrapped."""
    forward = module.__dict__.get("forward")
    found = FORWARDS.get(name_of(type(module)))
    return forward is not None and found is not None and getattr(inspect.unwrap(forward), "__func__", None) is found


def set_held_bound(name: str, module: Any, hold: bool) -> bool:
    """Calls `set_held` for a module whose forward has been replaced."""
    w1, w2, parameters, _ = PATCHES[name_of(type(module))].weights(module)
    return set_held(name, module, parameters, w1, w2, "halves", hold)


def _bypassed(module: Any, parts: Mapping[str, str]) -> str:
    """Returns which part does more in a call than its class does, so that its weights do not tell all, or "".

    The layer takes the factors of peft's adapters around a part.
    """
    for name, kind in parts.items():
        part = lora.unwrapped(getattr(module, name))[0]
        if type(part).__name__ != kind or "forward" in part.__dict__ or private.has_hooks(part):
            return f"its {name} is wrapped or has hooks"
    return ""


def _forward_of(patch: Patch) -> Callable[..., Any]:
    """Returns the method that computes by the layer whatever it can, and the rest as the class does."""

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        formula, adapters = formula_of(self, patch.activation), lora.taken(self)
        reason = formula.reason or _bypassed(self, patch.parts)
        packed = quantised.packed(self, whole=True)
        if not reason:
            weights = patch.weights(self) if packed is None else Weights(*packed, packed)
            used = lora.of_parts(self, patch.parts) if patch.parts else adapters
            reason = unfit(weights.parameters) or lora.unfit(used)
            if not reason:
                weights = weights._replace(lora=lora.option(used, weights.w2, patch.turned))
                return patch.compute(self, formula, weights, *arguments, **named)
        refuse(type(self), reason, "before", self.moeblaze_falls_back and packed is None)
        return lora.call(adapters, patch.own, self, *arguments, **named)

    return forward  # its name is the one that unpickling looks up: it finds the class's own


def _layer_of(
    module: Any, formula: Formula, found: Weights, x: Tensor, ids: Tensor, weights: Tensor, **more: Any
) -> Tensor:
    """Computes the layer with the weights of a module and the options of its patch."""
    options, (w1, w2, parameters, _) = module.moeblaze_options, found
    fp8 = fp8_options(module, parameters, options.get("precision"))
    return layer(x, ids, weights, w1, w2, activation=formula.activation, **more, **options, **fp8, **found.lora)


def _dbrx_weights(module: Any) -> Weights:
    parameters, stored = (module.mlp.w1, module.mlp.v1, module.mlp.w2), (-1, module.ffn_hidden_size, module.hidden_size)
    gate, up, w2 = (weight.view(stored) for weight in parameters)
    return Weights((gate.transpose(1, 2), up.transpose(1, 2)), w2, parameters)


def _dbrx(
    self: Any, formula: Formula, found: Weights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    x = hidden_states.reshape(-1, self.hidden_size)
    out = _layer_of(self, formula, found, x, top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _llama4_weights(module: Any) -> Weights:
    w1, w2 = module.gate_up_proj, module.down_proj
    return Weights(w1, w2, (w1, w2))


def _llama4_moe(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)  # scores (L, E) are 0 for experts that were not chosen
    ids = scores.topk(self.top_k, dim=1).indices
    return self.shared_expert(x) + self.experts(x, ids, scores.gather(1, ids)), logits


_llama4_moe.__name__ = "forward"  # the name that unpickling looks up: it finds the class's own forward


def _llama4(
    self: Any, formula: Formula, found: Weights, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    if ids is None or weights is None:  # another caller
        return _llama4_own(self, x)
    out: Tensor = _layer_of(self, formula, found, x, ids, weights, weights_on="input")
    return out


def _llama4_own(self: Any, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """The class computes every expert's rows for all tokens; its caller adds them."""
    own = type(self).forward
    if ids is None or weights is None:
        rows: Tensor = own(self, x)
        return rows
    scores = weights.new_zeros(len(x), self.num_experts).scatter(1, ids, weights)
    every = own(self, (x * scores.t()[:, :, None]).flatten(0, 1))
    out: Tensor = every.view(self.num_experts, *x.shape).sum(0)
    return out


def _jetmoe_weights(module: Any) -> Weights:
    parameters = tuple(lora.unwrapped(part)[0].weight for part in (module.input_linear, module.output_linear))
    w1, w2 = (weight.transpose(1, 2) for weight in parameters)
    return Weights(w1, w2, parameters)


def _jetmoe(self: Any, formula: Formula, found: Weights, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    by_expert, _, weights, counts, _ = self.router(x)  # slots in the order of their experts
    place = by_expert.argsort()
    ids = torch.arange(len(counts), device=x.device).repeat_interleave(torch.tensor(counts, device=x.device))
    shape = len(x), self.router.top_k
    out = _layer_of(self, formula, found, x, ids[place].view(shape), weights[place].view(shape))
    biased: Tensor = out.view_as(layer_input) + self.bias
    return biased


def _longcat_weights(module: Any) -> Weights:
    """Reads the weights. gate_up_proj has rows for the identity experts too, which nothing reads."""
    parameters = module.gate_up_proj, module.down_proj
    w1, w2 = parameters[0][: module.num_routed_experts].transpose(1, 2), parameters[1].transpose(1, 2)
    return Weights(w1, w2, parameters)


def _longcat(
    self: Any, formula: Formula, found: Weights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    identity = {"identity_experts": self.zero_expert_num}
    return _layer_of(self, formula, found, hidden_states, top_k_index, top_k_weights, **identity)


def _step_weights(module: Any) -> Weights:
    parameters = module.gate_up_proj, module.down_proj
    w1, w2 = (weight.transpose(1, 2) for weight in parameters)
    return Weights(w1, w2, parameters)


def _step(
    self: Any, formula: Formula, found: Weights, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    return _layer_of(self, formula, found, hidden_states, top_k_index, top_k_weights)


PATCHES = {
    "DbrxExperts": Patch(_dbrx, _dbrx_weights, False, "mlp.activation_fn", {"mlp": "DbrxExpertGLU"}),
    "Llama4TextExperts": Patch(_llama4, _llama4_weights, False, own=_llama4_own),
    "JetMoeMoE": Patch(
        _jetmoe,
        _jetmoe_weights,
        True,
        "activation",
        dict.fromkeys(("input_linear", "output_linear"), "JetMoeParallelExperts"),
    ),
    "LongcatFlashExperts": Patch(_longcat, _longcat_weights, True),
    "Step3p7Experts": Patch(_step, _step_weights, True, ""),
}
FORWARDS = {kind: _forward_of(patch) for kind, patch in PATCHES.items()}
CALLERS = {"Llama4TextExperts": Caller("Llama4TextMoe", _llama4_moe)}
OUT_OF_REACH = {
    "JetMoeMoA": "its experts are projections of attention",
    "SwitchTransformersExperts": "its experts are modules of their own",
    "NllbMoeExperts": "its experts are modules of their own",
    "VitPoseNaiveMoe": "its experts are modules of their own",
    "DogeCDMoE": "its experts have one hidden column",
    "Mxfp4GptOssExperts": "its weights are in transformers' own order: load with experts_implementation='moeblaze'",
}
