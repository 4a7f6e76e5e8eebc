"""NeMo AutoModel's routed experts by this layer, in the models that AutoModel builds itself, for nemo-automodel 0.7.

    from examples.automodel_experts import use
    use()  # before a recipe builds its model

`GroupedExperts` then computes by the layer. It is what AutoModel builds with `backend.dispatcher: torch`, whatever
`backend.experts` says, and with any dispatcher in one process. Weights, their names, the router and checkpoints stay.
With expert parallelism each token travels once to each rank with an expert of it, where AutoModel gathers all tokens.
"""

from typing import Any

import torch

try:
    from nemo_automodel.components.moe.experts import GroupedExperts
except ModuleNotFoundError as error:
    needs = "it is for nemo-automodel 0.7 (pip install nemo-automodel==0.7.0), which imports it"
    raise ModuleNotFoundError(f"examples/automodel_experts.py: {error}; {needs}", name=error.name) from error

from moeblaze_cupy import Activation
from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.interop.torch import moe

Tensor = torch.Tensor

own_init = GroupedExperts.__init__


def formula(config: Any) -> dict[str, Any]:
    """The options of `moe` for experts of this MoEConfig."""
    kind, of_oai = config.expert_activation, {"alpha": config.activation_alpha, "limit": config.activation_limit}
    if kind == "swiglu" and config.swiglu_limit > 0:
        return {"activation": Activation("swiglu_clamp", limit=config.swiglu_limit)}
    if kind in ("swigluoai", "quick_geglu"):
        gate_up = "interleaved" if kind == "quick_geglu" else "halves"
        return {"activation": Activation("swiglu_oai", **of_oai), "gate_up": gate_up}
    return {"activation": {"geglu": "geglu_tanh"}.get(kind, kind)}


def initialise(self: Any, config: Any, backend: Any = None) -> None:
    """Raises NotImplementedError for a subclass, which has products of its own, as of LoRA or of packed weights, for
    products in MXFP8, and for weights that are rounded before they multiply the experts' outputs."""
    for refused, got in (
        (type(self) is not GroupedExperts, f"{type(self).__name__}, which computes by itself"),
        (getattr(backend, "experts", None) == "torch_mm_mxfp8", "backend.experts torch_mm_mxfp8"),
        (config.apply_router_weight_after_down, "apply_router_weight_after_down"),
    ):
        if refused:
            raise NotImplementedError(f"automodel_experts: GroupedExperts: expected plain experts, got {got}")
    own_init(self, config, backend)
    self.expert_group = None


def forward(self: Any, x: Tensor, token_mask: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """x: (T, d). token_mask: (T,), false for padding. weights, indices: (T, k). Returns (T, d) in x's dtype."""
    stored = self.gate_and_up_projs, self.down_projs, self.gate_up_proj_bias, self.down_proj_bias
    stored = [w.to_local() if hasattr(w, "to_local") else w for w in stored]
    w1, w2, b1, b2 = (w if w is None else w.to(x.dtype) for w in stored)
    ids = indices.masked_fill(~token_mask[:, None], -1)
    weights = weights if weights.dtype == x.dtype else weights.float()
    options, mesh = formula(self.config), getattr(self.gate_and_up_projs, "device_mesh", None)
    if mesh is None or mesh.size() == 1:
        return moe(x, ids, weights, w1, w2, b1=b1, b2=b2, **options)
    if b1 is not None or options.pop("gate_up", "halves") != "halves":
        raise NotImplementedError("automodel_experts: expected no biases and gates in halves over ranks, got others")
    self.expert_group = self.expert_group or ExpertGroup(mesh, self.n_routed_experts)
    return expert_parallel_moe(x, ids, weights, w1, w2, self.expert_group, **options)


def use() -> None:
    """Has every GroupedExperts that is built from now on compute by the layer."""
    GroupedExperts.__init__, GroupedExperts.forward = initialise, forward
