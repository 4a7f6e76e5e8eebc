"""torchtitan's routed experts by this layer, as an override of its configuration.

torchtitan_train --module deepseek_v3 --config ... --override.imports examples.torchtitan_experts.routed_experts

The override takes the place of the token dispatcher and of the grouped products between its two exchanges: rows travel
once to each rank with an expert of theirs, and are neither sorted nor padded. Router, shared experts, sharding and
checkpoints stay torchtitan's, with weights of the same names and shapes. It is written for a torchtitan of 2026 whose
GroupedExperts has w1_EFD, w2_EDF and w3_EFD. For products and rows in e4m3 (bfloat16 weights, Hopper), have
`routed_experts` pass `precision="fp8", row_precision="fp8"` to its first `derive`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from moeblaze_cupy.interop.exchange import ExpertGroup
from moeblaze_cupy.interop.expert_parallel import expert_parallel_moe
from moeblaze_cupy.interop.torch import moe

Tensor = torch.Tensor


class MoeblazeExperts(GroupedExperts):
    """Its call is where FSDP2 gathers the weights, so the whole layer is computed in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        precision: str | None = None  #: of products
        row_precision: str | None = None  #: of rows between ranks, as of `expert_parallel_moe`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.precision, self.row_precision = config.precision, config.row_precision

    def forward(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, group: ExpertGroup | None) -> Tensor:
        stored = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (w.to_local() if hasattr(w, "to_local") else w for w in stored)
        w1, w2 = (
            (gate.transpose(1, 2), up.transpose(1, 2)),
            down.transpose(1, 2),
        )  # views: the kernels take either order
        rows = x_TD.to(w2.dtype)
        scores = scores_TK if scores_TK.dtype == w2.dtype else scores_TK.float()
        # FSDP2 frees weights after forward, so backward quantises them again rather than keep copies.
        options: dict[str, Any] = {"precision": self.precision, "keep_fp8_weights": False}
        if group is None:
            return moe(rows, ids_TK, scores.contiguous(), w1, w2, **options).to(x_TD.dtype)
        options["row_precision"] = self.row_precision
        return expert_parallel_moe(rows, ids_TK, scores, w1, w2, group, **options).to(x_TD.dtype)


class MoeblazeRoutedExperts(RoutedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_experts = config.inner_experts.num_experts
        self.group: ExpertGroup | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self.group = ExpertGroup(ep_mesh, self.num_experts)

    def forward(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """The counts are not needed: the exchange has its own."""
        return self.inner_experts(x_TD, topk_scores_TK, topk_expert_ids_TK, self.group)


@override(target=RoutedExperts.Config, description="MoEBlaze experts, whose rows travel unsorted")
def routed_experts(cfg: RoutedExperts.Config) -> MoeblazeRoutedExperts.Config:
    if getattr(cfg.token_dispatcher, "score_before_experts", False):
        raise NotImplementedError("routed_experts: expected score_before_experts=False: scores are on the output")
    inner = derive(cfg.inner_experts, MoeblazeExperts.Config)
    return derive(cfg, MoeblazeRoutedExperts.Config, inner_experts=inner)
