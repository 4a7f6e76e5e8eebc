"""Names of transformers, of peft and of torch that are private or undocumented.

Tested with transformers 5.17, 5.23 and 5.24, peft 0.19.1, 0.20.0 and 0.21.2, and torch 2.6, 2.11 and 2.13. A later
version may lack any of them.
"""

import re
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.quantizers import quantizer_mxfp4
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizers_utils import should_convert_module

# `ExpertsInterface.register` is documented. Its module and the function, which computes by grouped products, are not.
__all__ = [
    "Mxfp4HfQuantizer",
    "activated",
    "can_activate",
    "can_set_experts",
    "checkpoint_functions",
    "converts",
    "expect_missing",
    "experts_implementation",
    "fill_buffers",
    "gate_method",
    "grouped_mm_experts_forward",
    "has_hooks",
    "in_backward",
    "is_dispatched",
    "is_fp8",
    "is_loaded",
    "is_of_layer",
    "is_registered",
    "is_swapped",
    "keep_as_loaded",
    "own_parameter",
    "param_wrapper",
    "parameter_names",
    "register",
    "saves_adapters",
    "set_quantizer",
    "stand_in",
    "without_modes",
    "wrap_merge_check",
]

Mxfp4HfQuantizer: Any = quantizer_mxfp4.Mxfp4HfQuantizer
_INTERFACES: tuple[Any, ...] = (ExpertsInterface,)
_FP8_EXPERTS: tuple[type, ...] = ()
try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
except ImportError:  # of transformers before 5.1
    pass
else:
    _INTERFACES += (ALL_FP8_EXPERTS_FUNCTIONS,)
    _FP8_EXPERTS = (FP8Experts,)


def is_registered(name: str) -> bool:
    """Whether transformers has an experts implementation of this name, its own or another library's."""
    return name in ExpertsInterface._global_mapping


def register(name: str, forward: Any) -> None:
    """Registers an implementation of experts, those in blocks of e4m3 included."""
    for interface in _INTERFACES:
        interface.register(name, forward)


def is_fp8(module: Any) -> bool:
    """Whether the module has its weights in blocks of e4m3, or in four bits, as `FineGrainedFP8Config` makes it."""
    return isinstance(module, _FP8_EXPERTS)


def is_of_layer(name: str) -> bool:
    """Whether this layer is registered under the name."""
    return str(getattr(ExpertsInterface._global_mapping.get(name), "__module__", "")).startswith(__package__)


def experts_implementation(module: Any) -> str:
    """The name of the implementation that transformers has compute this module, as the model's config has it."""
    name: str = module.config._experts_implementation
    return name


def can_set_experts(model: Any) -> bool:
    """Whether transformers lets an implementation compute the experts of this model's class."""
    return bool(model._can_set_experts_implementation())


def is_dispatched(module: Any) -> bool:
    """Whether transformers lets an implementation compute this module: its decorator sets both attributes."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def gate_method(module: Any) -> Any:
    """`_apply_gate` of the module's class, which makes hidden rows of gate and up columns; None if it is replaced."""
    return None if "_apply_gate" in module.__dict__ else type(module)._apply_gate


def has_hooks(module: Any) -> bool:
    """Whether a call of the module runs more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def own_parameter(module: Any, name: str) -> Any:
    """The module's own parameter of this name, or None where a parametrisation stands in its place."""
    return module._parameters.get(name)


def parameter_names(module: Any) -> set[str]:
    """The names of the module's own parameters, without making tensors of them as parametrisations do."""
    return set(module._parameters)


def param_wrapper() -> Any:
    """peft's class of modules that adapt a parameter of another one, or None before peft is imported."""
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)


def wrap_merge_check(mark: str, wrap: Any) -> None:
    """Wraps what peft's models with LoRA run before they merge, unless it has the attribute `mark`."""
    models = getattr(sys.modules.get("peft.tuners.lora.model"), "LoraModel", None)
    if models is not None and not hasattr(models._check_merge_allowed, mark):
        models._check_merge_allowed = wrap(models._check_merge_allowed)


def activated(wrapper: Any) -> Any:
    """The context in which the adapted parameter reads as W + BA."""
    return wrapper._activate_lora(wrapper.active_adapters)


def can_activate(wrappers: type) -> bool:
    """Whether this class has what `activated` calls."""
    return hasattr(wrappers, "_activate_lora")


def is_swapped(wrapper: Any) -> bool:
    """Whether peft takes each expert's weight for (out, in), as most classes have it, rather than (in, out)."""
    swapped: bool = wrapper._did_swap_in_out_features
    return swapped


def stand_in(first: Any, second: Any, weight: Any, swapped: bool) -> Any:
    """What `get_delta_weight` of `ParamWrapper` reads of a wrapper with one adapter, of two experts' weight."""
    return types.SimpleNamespace(
        num_experts=2,
        active_adapters=["one"],
        lora_A={"one": types.SimpleNamespace(weight=first)},
        lora_B={"one": types.SimpleNamespace(weight=second)},
        scaling={"one": 0.5},
        get_param=lambda: weight,
        _did_swap_in_out_features=swapped,
    )


def without_modes() -> Any:
    """The context in which operators do what they do outside modes such as FakeTensorMode."""
    return _disable_current_modes()


def set_quantizer(method: str, quantizer: Any) -> None:
    """Has `from_pretrained` read a method's checkpoints by this class. `register_quantizer` takes only new methods."""
    AUTO_QUANTIZER_MAPPING[method] = quantizer


def converts(name: str, kept: list[str] | None) -> bool:
    """Whether a quantiser converts the module of this name. kept: patterns of those that it leaves."""
    found: bool = should_convert_module(name, kept)
    return found


def keep_as_loaded(module: Any) -> None:
    """Has `from_pretrained` leave the module to its checkpoint, rather than initialise weights that it expects."""
    module._is_hf_initialized = True


def expect_missing(model: Any, names: Iterable[str]) -> None:
    """Has `from_pretrained` say nothing of parameters that checkpoints do not have."""
    ignored = model._keys_to_ignore_on_load_missing or ()
    model._keys_to_ignore_on_load_missing = {*ignored, *(f"^{re.escape(name)}$" for name in names)}


def fill_buffers(model: Any) -> None:
    """Computes the buffers on meta that no state dict has, as `from_pretrained` does: frequencies of rotary embeddings.

    Buffers that transformers does not compute stay on meta, and so do those of modules with parameters of their own.
    """
    owners: dict[Any, Any] = {}
    for outer in model.modules():
        if isinstance(outer, PreTrainedModel):  # an inner one comes later, and has its own rules
            owners.update(dict.fromkeys(outer.modules(), outer))
    for module, owner in owners.items():
        found = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        found = {name: b for name, b in found.items() if b is not None and b.is_meta and b.is_floating_point()}
        if not found or module._parameters:
            continue
        with torch.device("cpu"), torch.no_grad():
            for name, buffer in found.items():
                module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")
            owner._init_weights(module)
        module._buffers.update({name: b for name, b in found.items() if module._buffers[name].isnan().any()})


def is_loaded(parameter: Any) -> bool:
    """Whether `from_pretrained` found this parameter of a model in the checkpoint. Others get memory as it was."""
    return getattr(parameter, "_is_hf_initialized", False)


def checkpoint_functions(model: Any) -> list[tuple[Any, str, Any]]:
    """Returns modules with the attribute that holds their checkpointing function, as (module, attribute, function).

    transformers' layers have the one, torch's `checkpoint_wrapper` has the other.
    """
    names = ("_gradient_checkpointing_func", "checkpoint_fn")
    return [(part, name, vars(part)[name]) for part in model.modules() for name in names if name in vars(part)]


def checkpoints(model: Any) -> bool:
    """Whether parts of a model are checkpointed. Compiled code can tell this, but not by `checkpoint_functions`."""
    return any(
        getattr(part, "gradient_checkpointing", False) or hasattr(part, "checkpoint_fn") for part in model.modules()
    )


def in_backward() -> bool:
    """Whether autograd is computing gradients in this thread, as it is while it computes a checkpointed part again."""
    return bool(torch._C._current_graph_task_id() != -1)


def saves_adapters(model: Any) -> bool:
    """Returns whether `save_pretrained` of a model writes its adapters alone, those of `model.add_adapter`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))
