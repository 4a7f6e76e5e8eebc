"""An experts module of transformers computed by the layer, and the e4m3 weights that it holds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import fp8 as torch_fp8
from moeblaze_cupy.interop.torch.api import moe
from moeblaze_cupy.interop.transformers import lora, quantised
from moeblaze_cupy.interop.transformers.formula import Formula
from moeblaze_cupy.types import BIASES, QuantizedWeight

Tensor = torch.Tensor
Weight = torch_fp8.Weight


def experts(
    module: Any,
    formula: Formula,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    given: Mapping[str, Any],
    of: Callable[[Any], Any] = lambda parameter: parameter,
    parameters: tuple[Any, Any] | None = None,
    adapters: lora.Adapters = lora.NONE,
    start: int = 0,
) -> Tensor:
    """The output (L, d) of a module that transformers dispatches. An id from E on is an empty slot, of another rank.

    given: what `layer_options` returned. parameters: what `weights_of` returned, if the caller has read them.
    adapters: those of this call, from peft. start: the first of the module's experts among those with adapters.
    """
    parameters = weights_of(module) if parameters is None else parameters
    w1, w2, biases = arguments_of(module, of, parameters)
    options = {  # `|` of dictionaries would end a graph of torch 2.6
        **biases,
        "activation": formula.activation,
        "gate_up": formula.gate_up,
        **given,
        **fp8_options(module, parameters, given.get("precision")),
        **lora.option(adapters, w2, turned=not getattr(module, "is_transposed", False), start=start),
    }
    if not getattr(module, "has_post_expert_norm", False):
        return layer(x, ids, weights, w1, w2, **options)
    slots = module.post_expert_norm(layer(x, ids, None, w1, w2, unreduced=True, **options))
    out: Tensor = (slots * weights[:, :, None]).sum(1).to(x.dtype)
    return out


def weights_of(module: Any, whole: bool = False) -> tuple[Any, Any]:
    """Returns the parameters with the weights of both products, in the module's own layout, or what they are packed in.

    The latter are two `QuantizedWeight`, in the layer's order, of this rank's experts. whole: see `quantised.packed`.
    """
    packed = quantised.packed(module, whole)
    if packed is not None:
        return packed
    return module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj, module.down_proj


def arguments_of(
    module: Any,
    of: Callable[[Any], Any] = lambda parameter: parameter,
    parameters: tuple[Any, Any] | None = None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns w1, w2 and the biases by name, in the layer's order. `of` is applied first to what is not packed."""
    w1, w2 = weights_of(module) if parameters is None else parameters
    if not isinstance(w1, QuantizedWeight):
        w1, w2 = of(w1), of(w2)
        if not getattr(module, "is_transposed", False):
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    if not getattr(module, "has_bias", False):
        return w1, w2, {}
    b1 = module.gate_up_proj_bias if getattr(module, "has_gate", True) else module.up_proj_bias
    return w1, w2, {"b1": of(b1), "b2": of(module.down_proj_bias)}


def layer(x: Tensor, ids: Tensor, weights: Tensor | None, w1: Any, w2: Any, **options: Any) -> Tensor:
    """Computes `moe` in the dtype of the weights, or in autocast's. The result has the dtype of x."""
    if isinstance(w2, QuantizedWeight):
        rows, w1, w2 = quantised.in_one_dtype(x, w1, w2)
        for name in BIASES:
            if name in options:
                options[name] = torch_arguments.widened(options[name], rows.dtype)
    else:
        rows = x if torch_arguments.in_autocast(x) else x.to(w2.dtype)
    if weights is not None:
        weights = torch_arguments.widened(weights, rows.dtype).contiguous()
    out = moe(rows.contiguous(), ids.contiguous(), weights, w1, w2, **options)
    return out.to(x.dtype)


def layer_options(
    save: str, precision: str | None, keep_saved: bool = False, memory_limit: int | None = None
) -> dict[str, Any]:
    """Returns the options of `moe` for those of `register`."""
    options: dict[str, Any] = {"save": save}
    if keep_saved:
        options["keep_saved"] = True
    if memory_limit is not None:
        options["memory_limit"] = memory_limit
    if precision is not None:
        options.update(precision=precision, keep_fp8_weights=save != "recompute")
    return options


def unfit(weights: tuple[Any, ...]) -> str:
    """Returns why the layer cannot compute with these weights of a module, or ""."""
    if isinstance(weights[0], QuantizedWeight):
        return ""  # `moe` checks them
    dtype = weights[0].dtype
    for weight in weights:
        if weight.dtype is not dtype and not torch_arguments.in_autocast(weight):
            return f"its weights have two dtypes, {dtype} and {weight.dtype}"
        if type(weight) is not torch.nn.Parameter and type(weight) is not Tensor and _is_packed(weight):
            return f"its weights are tensors of a class of their own, {type(weight).__name__}: see `pack_experts`"
    return ""


def _is_packed(weight: Tensor) -> bool:
    """Whether a tensor is made of others, as quantised ones are. A DTensor, which has a local part, is not."""
    return hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "to_local")


def fp8_options(module: Any, parameters: tuple[Tensor, ...], precision: str | None) -> dict[str, Any]:
    """Returns the option `fp8_weights` of `moe`: what the module holds of these parameters, else none."""
    held: torch_fp8.HeldFp8Weights | None = None if precision is None else getattr(module, lora.HELD, None)
    return {} if held is None else {"fp8_weights": held.of(*parameters)}


def set_held(
    name: str,
    module: Any,
    parameters: tuple[Tensor, ...],
    w1: Weight,
    w2: Tensor,
    gate_up: str,
    hold: bool,
    beside_factors: bool = False,
) -> bool:
    """Has a module hold its weights in e4m3, or no longer. w1, w2: views of the parameters. Returns whether it does.

    beside_factors: that of `HeldFp8Weights.hold`.
    """
    held: torch_fp8.HeldFp8Weights = vars(module).setdefault(lora.HELD, torch_fp8.HeldFp8Weights())
    if not hold:
        held.release()
        return False
    are_parts = any(hasattr(parameter, "to_local") for parameter in parameters)
    torch_fp8.refuse_parts(f"quantize_weights: {name}", are_parts)
    return held.hold(module, parameters, w1, w2, gate_up, beside_factors) is not None
