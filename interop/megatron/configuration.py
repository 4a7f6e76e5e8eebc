"""What a TransformerConfig asks of the layer, and which configurations it does not serve."""

from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.utils import get_pg_size

from moeblaze_cupy.interop.megatron import private
from moeblaze_cupy.types import Activation

REFUSED = (  # options that change what experts compute, or where their tensors are
    "fp8",
    "fp4",
    "moe_mlp_glu_interleave_size",
    "use_te_activation_func",
    "activation_func_fp8_input_store",
    "moe_paged_stash",
    "use_kitchen",
    "init_model_with_meta_device",
)
NOT_BIASED = "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad", "moe_apply_probs_on_input"
SHARDED = {"use_megatron_fsdp": "Megatron-FSDP", "use_torch_fsdp2": "FSDP2"}  # by argument of Megatron-LM's programs
OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}  # modules of Transformer Engine's experts
GATED = {F.silu: "swiglu", F.gelu: "geglu", F.relu: "reglu"}
PLAIN = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", squared_relu: "relu2"}


def activation_of(config: Any) -> Activation | None:
    """Returns the layer's name of what `config` has experts compute, or None if it has none."""
    function = config.activation_func
    if not config.gated_linear_unit:
        return Activation(PLAIN[function]) if function in PLAIN else None
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if limit is None:
        return Activation(GATED[function]) if function in GATED and offset == 0 else None
    if function is quick_gelu and offset == 1:
        return Activation("swiglu_oai", limit=limit)
    # Megatron's fused swiglu does not clamp.
    if function is F.silu and offset == 0 and not config.bias_activation_fusion:
        return Activation("swiglu_clamp", limit=limit)
    return None


def refusal(config: Any, pg_collection: Any) -> str | None:
    """Returns what the layer does not serve of a configuration, for a message; None if it serves it.

    Only Megatron-LM's own programs show which optimizer and which FSDP they use.
    """
    for name in REFUSED:
        if value := getattr(config, name, None):
            return f"{name}={value!r}"
    found = next((name for name in NOT_BIASED if getattr(config, name, None)), None)
    if config.add_bias_linear and found:
        return f"add_bias_linear with {found}={getattr(config, found)!r}"
    arguments = private.arguments()
    optimizer = str(getattr(arguments, "optimizer", ""))
    if "muon" in optimizer:  # it would leave parameters of three dimensions to another optimizer
        return f"the optimizer {optimizer!r}, which wants a parameter per expert"
    for name, sharding in SHARDED.items():
        if getattr(arguments, name, False):
            return f"{sharding}, whose checkpoints want a parameter per expert"
    if config.transformer_impl == "inference_optimized":
        return "transformer_impl='inference_optimized'"
    if config.fine_grained_activation_offloading and OFFLOADED & set(config.offload_modules):
        return f"offload_modules={config.offload_modules!r}"
    if (group := getattr(pg_collection, "expt_gtp_remat", None)) is not None and get_pg_size(group) > 1:
        return "experts whose weights are gathered for each product"
    if activation_of(config) is None:
        limits = f"clamp {config.activation_func_clamp_value}, offset {config.glu_linear_offset}"
        gate = "with" if config.gated_linear_unit else "without"
        return f"activation_func={config.activation_func!r} {gate} a gate, {limits}"
    return None
