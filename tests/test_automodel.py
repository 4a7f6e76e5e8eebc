"""`examples/automodel_experts.py` beside NeMo AutoModel's own experts, on the CPU."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("nemo_automodel")
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.moe import layers
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts

from examples import automodel_experts

T, D, H, E, K = 12, 6, 5, 4, 2
FORMULAS = [
    {},
    {"swiglu_limit": 0.5},
    {"expert_activation": "swigluoai", "activation_limit": 0.5, "expert_bias": True},
    {"expert_activation": "quick_geglu", "activation_alpha": 1.5, "activation_limit": 0.5},
    {"expert_activation": "geglu"},
    {"expert_activation": "relu2", "expert_bias": True},
]


def config_of(**named):
    of_router = {"n_expert_groups": 1, "n_limited_groups": 1, "train_gate": True, "gate_bias_update_factor": 0.0}
    of_loss = {"aux_loss_coeff": 0.0, "score_func": "softmax", "route_scale": 1.0, "norm_topk_prob": True}
    sizes = {"n_routed_experts": E, "n_activated_experts": K, "n_shared_experts": 0, "dim": D, "moe_inter_dim": H}
    return MoEConfig(**(of_router | of_loss | sizes | named), inter_dim=H, dtype=torch.float64)


@pytest.fixture
def use(monkeypatch):
    """`use`, until the test ends, with AutoModel's activations as they are written rather than compiled."""
    for name in ("__init__", "forward"):
        monkeypatch.setattr(GroupedExperts, name, getattr(GroupedExperts, name))
    with torch.compiler.set_stance("force_eager"):
        yield automodel_experts.use


def drawn(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module


@pytest.mark.parametrize("named", FORMULAS, ids=lambda named: "-".join(map(str, named.values())) or "swiglu")
def test_experts(use, named):
    """Output and every gradient, with padding and weights in float32, which routers give."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(T, D, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(T, K, generator=generator)
    indices = torch.rand(T, E, generator=generator).topk(K).indices
    mask = torch.rand(T, generator=generator) < 0.7
    results = []
    for _ in range(2):
        experts = drawn(GroupedExperts(config_of(**named)))
        leaves = {"x": x.clone().requires_grad_(), "weights": weights.clone().requires_grad_()}
        out = experts(leaves["x"], mask, leaves["weights"], indices)
        out.backward(grad)
        leaves |= dict(experts.named_parameters())
        results.append({"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()})
        use()
    theirs, got = results
    assert got.keys() == theirs.keys() and got["out"].dtype == theirs["out"].dtype
    assert not got["out"][~mask].any() and got["out"][mask].any(1).all()
    for name, want in theirs.items():
        # AutoModel sums outputs in float32, and computes some activations in it.
        assert torch.linalg.norm(got[name] - want) <= 1e-6 * torch.linalg.norm(want), name


def test_a_whole_layer(use):
    """An MoE that AutoModel builds with its router and a shared expert has the same weights and output."""
    config = config_of()
    config.n_shared_experts = 1
    backend = BackendConfig(linear="torch", attn="sdpa", rms_norm="torch", experts="torch", dispatcher="torch")
    x = torch.randn(2, T, D, dtype=torch.float64)
    padding = torch.arange(2 * T).view(2, T) % 5 == 0
    theirs = drawn(layers.MoE(config, backend).double())
    want = theirs(x, padding)
    use()
    own = layers.MoE(config, backend).double()
    own.load_state_dict(theirs.state_dict())
    got = own(x, padding)
    assert type(own.experts).forward is automodel_experts.forward
    assert torch.linalg.norm(got - want) <= 1e-6 * torch.linalg.norm(want)


def test_others_are_refused(use):
    from nemo_automodel.components._peft.lora_experts import GroupedExpertsLoRA
    from nemo_automodel.components.moe.quantized_experts import GroupedExpertsMXFP4

    use()
    experts = drawn(GroupedExperts(config_of()))
    in_mxfp8 = BackendConfig(linear="torch", attn="sdpa", rms_norm="torch", experts="torch_mm_mxfp8")
    for text, build in (
        ("GroupedExpertsLoRA, which computes by itself", lambda: GroupedExpertsLoRA(experts)),
        ("GroupedExpertsMXFP4, which computes by itself", lambda: GroupedExpertsMXFP4(experts)),
        ("torch_mm_mxfp8", lambda: GroupedExperts(config_of(), in_mxfp8)),
        ("apply_router_weight_after_down", lambda: GroupedExperts(config_of(apply_router_weight_after_down=True))),
    ):
        with pytest.raises(NotImplementedError, match=f"automodel_experts: GroupedExperts: expected .*, got .*{text}"):
            build()
