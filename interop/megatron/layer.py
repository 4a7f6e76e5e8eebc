"""A whole Megatron layer by index: Megatron's router, then the layer without a permuted copy of the tokens."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_pg_size, log_single_rank

from moeblaze_cupy.interop.megatron.experts import MoeblazeGroupedMLP
from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import moe

REFUSED = (  # options of parts that do not run here, or of experts that do more than rows
    "moe_pad_expert_input_to_capacity",
    "moe_latent_size",
    "moe_shared_expert_overlap",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
)
Tensor = torch.Tensor


class MoeblazeMoELayer(MoELayer):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's MoELayer, whose tokens go from the router to the experts and back by index.

    It stands in a spec in MoELayer's place, functools.partial(MoeblazeMoELayer, submodules=...), and has the parts and
    checkpoints of it. Megatron's dispatcher does not run. With expert parallelism `expert_parallel_moe` moves the rows,
    while the shared expert computes. A configuration that this does not serve runs as MoELayer, with a reason in the
    log: experts that are not `MoeblazeGroupedMLP`, or over ranks of tensor parallelism, and the options in REFUSED.
    """

    def __init__(self, *arguments: Any, exchange: Mapping[str, Any] | None = None, **named: Any) -> None:
        """exchange: options of `ExpertGroup`, such as slots; `arguments` and `named` are MoELayer's."""
        super().__init__(*arguments, **named)
        self.exchange = tuple(sorted((exchange or {}).items()))
        self.refused = self._refusal()
        if self.refused is not None:
            text = f"the MoE layer stays Megatron's around its experts, as moeblaze_cupy does not serve {self.refused}"
            log_single_rank(logging.getLogger(__name__), logging.WARNING, text)

    def _refusal(self) -> str | None:
        config = self.config
        if not isinstance(self.experts, MoeblazeGroupedMLP):
            return f"experts of {type(self.experts).__name__}"
        if (size := get_pg_size(self.experts.groups.expt_tp)) > 1:
            return f"expert_tensor_parallel_size={size}"
        if config.moe_apply_probs_on_input and get_pg_size(self.ep_group) > 1:
            return "moe_apply_probs_on_input with expert parallelism"
        if config.add_bias_linear and get_pg_size(self.ep_group) > 1:
            return "add_bias_linear with expert parallelism"
        if config.cuda_graph_impl != "none":
            return f"cuda_graph_impl={config.cuda_graph_impl!r}"
        found = (name for name in REFUSED if getattr(config, name, None))
        return next((f"{name}={getattr(config, name)!r}" for name in found), None)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, of hidden_states' shape (s, b, d), and None in the place of a bias.

        padding_mask: (b, s), True at tokens that losses and biases of the router leave out.
        Raises ValueError for intermediate_tensors, which a captured router hands over, and, as MoELayer, in training
        with tensor parallelism and without sequence parallelism.
        """
        if self.refused is not None:
            whole: tuple[Tensor, Tensor | None] = super().forward(hidden_states, intermediate_tensors, padding_mask)
            return whole
        if intermediate_tensors is not None:
            expected, got = "None, as no part of the layer runs alone", type(intermediate_tensors)
            raise ValueError(f"MoeblazeMoELayer: intermediate_tensors: expected {expected}, got {got}")
        if self.training and get_pg_size(self.attn_tp_group) > 1 and not self.config.sequence_parallel:
            expected = "True in training with tensor parallelism"
            raise ValueError(f"MoeblazeMoELayer: sequence_parallel: expected {expected}, got False")
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            out = tensor_parallel.checkpoint(self._compute, False, hidden_states, padding_mask)
        else:
            out = self._compute(hidden_states, padding_mask)
        return out, None

    def _compute(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        probs, routing_map = self.route(hidden_states, padding_mask)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, weights = by_token(probs, routing_map, self.config.moe_router_topk)
        weights = torch_arguments.widened(weights, tokens.dtype)
        experts, options = self.experts, dict(self.experts.options)
        fc1, fc2 = experts.linear_fc1.weight, experts.linear_fc2.weight
        if self.config.gradient_accumulation_fusion:
            options["accumulate_into_main_grad"] = {"w1": fc1, "w2": fc2}
        layer = tokens, ids, weights, fc1.transpose(1, 2), fc2.transpose(1, 2)

        def shared(of_tokens: Tensor) -> Tensor:
            computed: Tensor = self.shared_experts_compute(of_tokens.view(hidden_states.shape))
            return computed.reshape(of_tokens.shape)

        if get_pg_size(self.ep_group) > 1:
            group = _expert_group(self.ep_group, self.config.num_moe_experts, self.exchange)
            del options["weights_on"]
            out = expert_parallel_moe(*layer, group, shared=shared if self.use_shared_expert else None, **options)
        else:
            out = moe(*layer, **(options | experts.biases))
            out = out + shared(tokens) if self.use_shared_expert else out
        return out.view(hidden_states.shape)


def by_token(probs: Tensor, routing_map: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns each token's experts in ascending order, ids (T, k) with -1 behind the last, and their weights (T, k).

    probs: (T, E), whose gradient comes through the weights. routing_map: (T, E) bool, at most k True in a row.
    """
    E = routing_map.shape[1]
    key = routing_map * torch.arange(E, 0, -1, dtype=torch.int32, device=routing_map.device)
    found, ids = key.topk(k, dim=1)
    return torch.where(found > 0, ids, -1), probs.gather(1, ids)


@functools.cache  # layers that share one share its memory
def _expert_group(group: Any, num_experts: int, options: tuple[tuple[str, Any], ...]) -> ExpertGroup:
    return ExpertGroup(group, num_experts, **dict(options))
