"""Forwards by the layer for the experts classes that transformers does not dispatch."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moeblaze_cupy.interop.torch_fp8 import Weight
from moeblaze_cupy.interop.transformers_experts import fp8_options, layer, set_held
from moeblaze_cupy.interop.transformers_formula import constants_of, name_of, recognise

Tensor = torch.Tensor


class Weights(NamedTuple):
    """Weights of a module in the layer's order, as views of its parameters."""

    w1: Weight
    w2: Tensor
    parameters: tuple[Tensor, ...]


class Patch(NamedTuple):
    """How the layer serves a class.

    forward: takes the place of the module's own.
    gate: the module's function of gate and up columns.
    weights: reads them off a module.
    """

    forward: Callable[..., Any]
    gate: Callable[[Any], Callable[[Tensor], Tensor]]
    weights: Callable[[Any], Weights]


def bind(module: Any, options: dict[str, Any]) -> str:
    """Replaces the forward of a module of a class in PATCHES. Returns "", or why the layer cannot serve the module.

    options: of `moe`. They are an attribute of the module, which guards compiled graphs.
    """
    kind = name_of(type(module))
    found = PATCHES[kind]
    if is_bound(module):
        module.moeblaze_options = {"activation": module.moeblaze_options["activation"], **options}
        return ""
    if kind == "LongcatFlashExperts" and module.gate_up_proj is None:
        return "it has no experts with weights"
    activation, _, reason = recognise(found.gate(module), True, constants_of(module))
    if not reason:
        module.moeblaze_options = {"activation": activation, **options}
        module.forward = types.MethodType(found.forward, module)
    return reason


def is_bound(module: Any) -> bool:
    """Whether the forward of the module has been replaced."""
    found = PATCHES.get(name_of(type(module)))
    return found is not None and getattr(vars(module).get("forward"), "__func__", None) is found.forward


def set_held_bound(name: str, module: Any, hold: bool) -> bool:
    """As `set_held`, of a module whose forward has been replaced."""
    w1, w2, parameters = PATCHES[name_of(type(module))].weights(module)
    return set_held(name, module, parameters, w1, w2, "halves", hold)


def _layer_of(module: Any, found: Weights, x: Tensor, ids: Tensor, weights: Tensor, **more: Any) -> Tensor:
    """The layer with the weights of a module and the options of its patch."""
    options, (w1, w2, parameters) = module.moeblaze_options, found
    fp8 = fp8_options(module, parameters, options.get("precision"))
    return layer(x, ids, weights, w1, w2, **more, **options, **fp8)


def _glu(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gate of a module that has only the activation: gate columns, then up columns."""

    def gate(columns: Tensor) -> Tensor:
        a, b = columns.chunk(2, dim=-1)
        return activation(a) * b

    return gate


def _dbrx_weights(module: Any) -> Weights:
    parameters, stored = (module.mlp.w1, module.mlp.v1, module.mlp.w2), (-1, module.ffn_hidden_size, module.hidden_size)
    gate, up, w2 = (weight.view(stored) for weight in parameters)
    return Weights((gate.transpose(1, 2), up.transpose(1, 2)), w2, parameters)


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, self.hidden_size)
    out = _layer_of(self, _dbrx_weights(self), x, top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _llama4_weights(module: Any) -> Weights:
    w1, w2 = module.experts.gate_up_proj, module.experts.down_proj
    return Weights(w1, w2, (w1, w2))


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)  # scores (L, E) are 0 for experts that were not chosen
    ids = logits.topk(self.top_k, dim=1).indices
    out = _layer_of(self, _llama4_weights(self), x, ids, scores.gather(1, ids), weights_on="input")
    return self.shared_expert(x) + out, logits


def _jetmoe_weights(module: Any) -> Weights:
    parameters = module.input_linear.weight, module.output_linear.weight
    w1, w2 = (weight.transpose(1, 2) for weight in parameters)
    return Weights(w1, w2, parameters)


def _jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    logits = self.router(x)[4]  # through the router, where transformers records its logits
    chosen, ids = logits.topk(self.router.top_k, dim=1)
    out = _layer_of(self, _jetmoe_weights(self), x, ids, chosen.softmax(1).to(x.dtype))
    biased: Tensor = out.view_as(layer_input) + self.bias
    return biased


def _longcat_weights(module: Any) -> Weights:
    """gate_up_proj has rows for the identity experts too, which nothing reads."""
    parameters = module.gate_up_proj, module.down_proj
    w1, w2 = parameters[0][: module.num_routed_experts].transpose(1, 2), parameters[1].transpose(1, 2)
    return Weights(w1, w2, parameters)


def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    identity = {"identity_experts": self.zero_expert_num}
    return _layer_of(self, _longcat_weights(self), hidden_states, top_k_index, top_k_weights, **identity)


def _step_weights(module: Any) -> Weights:
    parameters = module.gate_up_proj, module.down_proj
    w1, w2 = (weight.transpose(1, 2) for weight in parameters)
    return Weights(w1, w2, parameters)


def _step(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _layer_of(self, _step_weights(self), hidden_states, top_k_index, top_k_weights)


PATCHES = {
    "DbrxExperts": Patch(_dbrx, lambda module: _glu(module.mlp.activation_fn), _dbrx_weights),
    "Llama4TextMoe": Patch(_llama4, lambda module: _glu(module.experts.act_fn), _llama4_weights),
    "JetMoeMoE": Patch(_jetmoe, lambda module: _glu(module.activation), _jetmoe_weights),
    "LongcatFlashExperts": Patch(_longcat, lambda module: _glu(module.act_fn), _longcat_weights),
    "Step3p7Experts": Patch(_step, lambda module: module._apply_gate, _step_weights),
}
for _patched in PATCHES.values():
    _patched.forward.__name__ = "forward"  # the name that unpickling looks up: it finds the class's own forward
_QUANTISED = "its weights are quantised"
OUT_OF_REACH = {
    "JetMoeMoA": "its experts are projections of attention",
    "SwitchTransformersExperts": "its experts are modules of their own",
    "NllbMoeExperts": "its experts are modules of their own",
    "VitPoseNaiveMoe": "its experts are modules of their own",
    "DogeCDMoE": "its experts have one hidden column",
    "FP8Experts": _QUANTISED,
    "Mxfp4GptOssExperts": _QUANTISED,
}
