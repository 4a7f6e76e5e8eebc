"""torchtitan's routed experts by this layer, as an override of its configuration, for torchtitan 0.3 and its main.

torchtitan_train --module deepseek_v3 --config ... --override.imports examples.torchtitan_experts.routed_experts

The override takes the place of the token dispatcher and of the grouped products between its two exchanges: rows travel
once to each rank with an expert of theirs, and are neither sorted nor padded. Router, shared experts, sharding and
checkpoints stay torchtitan's, with weights of the same names and shapes. Arguments follow an import as JSON. These have
products and rows between ranks in e4m3, which needs bfloat16 weights and Hopper:

--override.imports 'examples.torchtitan_experts.routed_experts={"precision": "fp8", "row_precision": "fp8"}'
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

try:
    import spmd_types as spmd
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
except ModuleNotFoundError as error:
    needs = "it is for torchtitan 0.3 (pip install torchtitan==0.3.0), which imports it"
    raise ModuleNotFoundError(f"examples/torchtitan_experts.py: {error}; {needs}", name=error.name) from error

from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.interop.torch import moe

Tensor = torch.Tensor

ARGUMENTS = ["x", "topk_scores", "topk_expert_ids", "num_local_tokens_per_expert"]  # of RoutedExperts.forward


class MoeblazeExperts(GroupedExperts):
    """Its call is where FSDP2 gathers the weights, so the whole layer is computed in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        precision: str | None = None  #: of products
        row_precision: str | None = None  #: of rows between ranks, as of `expert_parallel_moe`

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.precision, self.row_precision = config.precision, config.row_precision

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, group: ExpertGroup | None) -> Tensor:
        """x: (B, L, d) or (T, d). scores and ids have k in place of d."""
        stored = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        # The transposes are views: the kernels take either order.
        gate, up, w2 = ((w.to_local() if hasattr(w, "to_local") else w).transpose(1, 2) for w in stored)
        shape, dtype = x.shape, x.dtype
        x, scores, ids = (tensor.flatten(0, -2) for tensor in (x, scores, ids))
        x = x.to(w2.dtype)
        scores = scores if scores.dtype == w2.dtype else scores.float()
        # FSDP2 frees weights after forward, so backward quantises them again rather than keep copies.
        options: dict[str, Any] = {"precision": self.precision, "keep_fp8_weights": False}
        if group is None:
            out = moe(x, ids, scores.contiguous(), (gate, up), w2, **options)
        else:
            options["row_precision"] = self.row_precision
            out = expert_parallel_moe(x, ids, scores, (gate, up), w2, group, **options)
        return out.view(shape).to(dtype)


class MoeblazeRoutedExperts(RoutedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.group: ExpertGroup | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self.group = ExpertGroup(ep_mesh, self.inner_experts.num_experts)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """The counts are not needed: the exchange has its own."""
        with spmd.no_typecheck():  # what the exchange does has no types; the plan states those of its output
            return self.inner_experts(x, scores, ids, self.group)

    # Sharding plans find arguments by their names, which end with the axes of the installed version.
    forward.__signature__ = inspect.signature(RoutedExperts.forward)  # type: ignore[attr-defined]


@override(target=RoutedExperts.Config, description="MoEBlaze experts, whose rows travel unsorted")
def routed_experts(
    cfg: RoutedExperts.Config, precision: str | None = None, row_precision: str | None = None
) -> MoeblazeRoutedExperts.Config:
    """Raises NotImplementedError for experts of another formula, such as gpt-oss's, for those that a converter gave
    other products, and for a torchtitan whose experts take other arguments."""
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        kind = type(cfg.inner_experts).__qualname__.rpartition("<locals>.")[2]
        raise NotImplementedError(f"routed_experts: inner_experts: expected GroupedExperts.Config, got {kind}")
    names = list(inspect.signature(RoutedExperts.forward).parameters)[1:]
    if [name.rpartition("_")[0] for name in names] != ARGUMENTS:
        raise NotImplementedError(f"routed_experts: RoutedExperts.forward: expected {ARGUMENTS} with axes, got {names}")
    inner = derive(cfg.inner_experts, MoeblazeExperts.Config, precision=precision, row_precision=row_precision)
    # The dispatcher does nothing; this one allocates no buffers.
    dispatcher = derive(cfg.token_dispatcher, LocalTokenDispatcher.Config)
    return derive(cfg, MoeblazeRoutedExperts.Config, inner_experts=inner, token_dispatcher=dispatcher)
