"""Experts of transformers' models in four and eight bits, in the place of their weights."""

from typing import Any

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import quantised as torch_quantised
from moeblaze_cupy.interop.transformers import private
from moeblaze_cupy.interop.transformers.formula import name_of
from moeblaze_cupy.quantised import api as quantised
from moeblaze_cupy.types import QuantizedWeight

Tensor = torch.Tensor
Pair = tuple[QuantizedWeight, QuantizedWeight]


def projections(module: Any) -> tuple[str, str]:
    """Returns the names of the parameters of w1 and w2."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def pack(module: Any, w1: Tensor, w2: Tensor, format: str) -> None:
    """Packs the weights of a module in the place of its parameters. On the device meta it makes room for the parts.

    w1, w2: views of the parameters in the layer's order.
    """
    if w1.is_meta:
        dtype = str(w2.dtype).removeprefix("torch.")
        made = quantised.forms("pack_experts", format, tuple(w1.shape), tuple(w2.shape), dtype)
        hold(module, made, [torch_quantised.empty_bytes(form, "meta") for form in made])
    else:
        made = quantised.quantize_experts(w1.detach(), w2.detach(), format)
        hold(module, made, list(map(torch_quantised.as_bytes, made)))


def hold(module: Any, weights: Pair, parts: list[dict[str, Tensor]]) -> None:
    """Puts parts, in bytes, in the place of a module's parameters, of which empty ones are left.

    By the attribute `ds_shape` peft learns the shapes of these, as it does where DeepSpeed has emptied parameters.
    """
    module.moeblaze_packed = {}
    for name, weight, of_weight in zip(projections(module), weights, parts, strict=True):
        whole = getattr(module, name)
        device = "cpu" if whole.is_meta else whole.device
        place = torch.nn.Parameter(torch.empty(0, dtype=whole.dtype, device=device), requires_grad=False)
        place.ds_shape = whole.shape  # type: ignore[attr-defined]
        setattr(module, name, place)
        for part, suffix in _suffixes(weight).items():
            tensor = of_weight[part]
            if suffix == "blocks":
                tensor = tensor.view(*tensor.shape[:2], -1, 16)
            module.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(tensor, requires_grad=False))
        module.moeblaze_packed[name] = weight._replace(data=None, scales=None)
    module.register_state_dict_post_hook(_leave_out_places)
    module.register_load_state_dict_pre_hook(_expect_no_places)
    module.register_forward_pre_hook(_refuse_own_forward)


def _suffixes(weight: QuantizedWeight) -> dict[str, str]:
    """Returns by part the end of its parameter's name; those of "mxfp4" are of gpt-oss's checkpoints."""
    return {"data": "blocks" if weight.format == "mxfp4" else "data", "scales": "scales"}


def packed(module: Any) -> Pair | None:
    """Returns the frozen w1 and w2 of a module, of this rank's experts, or None if it has weights in floats."""
    forms = getattr(module, "moeblaze_packed", None)
    if not forms:
        return None
    w1, w2 = (_packed(module, name, form) for name, form in forms.items())
    return w1, w2


def _packed(module: Any, name: str, form: QuantizedWeight) -> QuantizedWeight:
    place = private.own_parameter(module, name)
    if place is None or place.requires_grad:
        got = "W + BA, of a parametrisation" if place is None else "one that requires a gradient"
        raise checks.bad_value("moeblaze", f"{name_of(type(module))}.{name}", "a frozen weight, as it is packed", got)
    parts = (getattr(module, f"{name}_{suffix}") for suffix in _suffixes(form).values())
    data, scales = (part.to_local() if hasattr(part, "to_local") else part for part in parts)
    form = form._replace(shape=(len(data), *form.shape[1:]))
    return torch_quantised.from_bytes(form, data, scales, getattr(torch, form.dtype))


def in_one_dtype(x: Tensor, w1: QuantizedWeight, w2: QuantizedWeight) -> tuple[Tensor, Any, Any]:
    """Returns x in the dtype to which the weights are decoded; or all of it in autocast's, to which `moe` casts x."""
    if not torch_arguments.in_autocast(x):
        return x.to(getattr(torch, w2.dtype)), w1, w2
    dtype = str(torch.get_autocast_dtype(x.device.type)).removeprefix("torch.")
    return x, w1._replace(dtype=dtype), w2._replace(dtype=dtype)


def _leave_out_places(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module.moeblaze_packed:
        state.pop(prefix + name, None)


def _expect_no_places(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in module.moeblaze_packed:
        state.setdefault(prefix + name, private.own_parameter(module, name))


def _refuse_own_forward(module: Any, _: Any) -> None:
    if "forward" in module.__dict__:
        return
    if not private.is_dispatched(module):
        raise RuntimeError(f"moeblaze: {name_of(type(module))}: call `patch` for packed experts, as before packing")
    name = private.experts_implementation(module)
    if not private.is_of_layer(name):
        expected = "a name of `register` for packed experts; model.set_experts_implementation('moeblaze') sets it"
        raise RuntimeError(f"moeblaze: experts_implementation: expected {expected}, got {name!r}")


class Mxfp4Quantizer(private.Mxfp4HfQuantizer):  # type: ignore[misc]  # transformers gives its modules no types
    """gpt-oss's checkpoints as published, read into packed experts if the experts implementation is the layer's.

    Otherwise it is transformers' own, whose experts do not train. Its checks of the environment would choose to
    dequantise, so they wait until the model's implementation is known.
    """

    packs = False

    def validate_environment(self, *arguments: Any, **named: Any) -> None:
        self._environment = arguments, named
        if not self.pre_quantized or self.quantization_config.dequantize:
            super().validate_environment(*arguments, **named)

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> Any:
        own = [module for module in model.modules() if name_of(type(module)) == "GptOssExperts"]
        self.packs = self.pre_quantized and not (self.quantization_config.dequantize or named.get("use_kernels"))
        self.packs = self.packs and all(private.is_of_layer(private.experts_implementation(module)) for module in own)
        if not self.packs:
            if self.pre_quantized:
                super().validate_environment(*self._environment[0], **self._environment[1])
            return super()._process_model_before_weight_loading(model, **named)
        for module in own:
            pack(module, module.gate_up_proj, module.down_proj, "mxfp4")
            private.keep_as_loaded(module)
        return model

    def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
        if not self.packs:
            return super()._process_model_after_weight_loading(model, **named)
        for module in model.modules():
            for name in getattr(module, "moeblaze_packed", ()):
                place = getattr(module, name)
                place.data = place.data.to(getattr(module, f"{name}_scales").device)
        return model

    def get_load_operations(self) -> dict[str, Any]:
        return {} if self.packs else super().get_load_operations()

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, Any]]:
        return (None, {}) if self.packs else super().get_state_dict_and_metadata(model)

    @property
    def is_trainable(self) -> bool:
        """Adapters and other parameters may train beside packed experts."""
        return self.packs or super().is_trainable
