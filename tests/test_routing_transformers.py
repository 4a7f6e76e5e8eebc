"""`route` on the CPU beside the routers of transformers' own models."""

import importlib
import types

import numpy as np
import pytest
from cases import relative_error

import moeblaze_cupy as mb

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="an optional comparison with the models' own routers")

L, E, K = 64, 40, 6
V3 = {"score": "sigmoid", "groups": (4, 2, 2), "eps": 1e-20, "scale": 2.5}
V2 = {"renormalize": False, "groups": (4, 2, 1), "scale": 16.0}
# By module and class: the options, and what the configuration has beside sizes.
ROUTERS = {
    ("mixtral", "Mixtral"): ({}, {}),
    ("qwen3_moe", "Qwen3Moe"): ({}, {"norm_topk_prob": True}),
    ("olmoe", "Olmoe"): ({"renormalize": False}, {"norm_topk_prob": False}),
    ("gpt_oss", "GptOss"): ({}, {}),
    ("deepseek_v2", "DeepseekV2"): (V2, {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
    ("deepseek_v3", "DeepseekV3"): (V3, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("glm4_moe", "Glm4Moe"): (V3, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("minimax_m2", "MiniMaxM2"): ({"score": "sigmoid"}, {}),
    ("ernie4_5_moe", "Ernie4_5_Moe"): ({}, {"moe_norm_min": 1e-12}),
    ("lfm2_moe", "Lfm2Moe"): (
        {"score": "sigmoid", "eps": 1e-6, "scale": 2.0},
        {"norm_topk_prob": True, "routed_scaling_factor": 2.0, "use_expert_bias": True},
    ),
    ("deepseek_v4", "DeepseekV4"): (
        {"score": "sqrt_softplus", "eps": 1e-20, "scale": 1.5},
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
    ),
}


def router(folder, prefix, config):
    """The model's own router, with the identity as its weight: hidden states are logits."""
    family = f"transformers.models.{folder}.modeling_{folder}"
    try:
        module = importlib.import_module(family)
    except ModuleNotFoundError as error:
        if not family.startswith(error.name):
            raise
        pytest.skip(f"this transformers has no {folder}")
    names = (f"{prefix}TopKRouter", f"{prefix}TopkRouter")
    made = next(getattr(module, name) for name in names if hasattr(module, name))(config)
    with torch.no_grad():
        made.weight.copy_(torch.eye(E))
    return made


@pytest.mark.parametrize(("folder", "prefix"), ROUTERS, ids=[prefix for _, prefix in ROUTERS])
def test_a_models_own_router(folder, prefix):
    """Both in float32, which several of the routers compute in whatever comes."""
    options, own = ROUTERS[folder, prefix]
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E)
    groups = {"n_group": 4, "num_group": 4, "topk_group": 2}
    config = types.SimpleNamespace(**sizes, **groups, **own, hidden_size=E, num_experts_per_tok=K)
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((L, E), (L, K)))
    b = (rng.standard_normal(E) / 4).astype(np.float32)
    theirs = router(folder, prefix, config)
    arguments = ()
    if prefix in ("MiniMaxM2", "Lfm2Moe"):
        arguments = (torch.from_numpy(b),)
    places = [t for n, t in [*theirs.named_buffers(), *theirs.named_parameters()] if n.endswith("correction_bias")]
    with torch.no_grad():
        for place in places:
            place.copy_(torch.from_numpy(b).view_as(place))
    biased = bool(arguments or places)
    assert biased == (prefix in ("DeepseekV3", "Glm4Moe", "MiniMaxM2", "Ernie4_5_Moe", "Lfm2Moe", "DeepseekV4"))

    leaf = torch.from_numpy(x).requires_grad_()
    _, wanted, wanted_ids = theirs(leaf, *arguments)
    given = options | ({"bias": b} if biased else {})
    weights, ids = mb.route(x, K, **given)
    order, wanted_order = ids.argsort(1), wanted_ids.argsort(1)  # some leave the chosen unsorted
    np.testing.assert_array_equal(np.take_along_axis(ids, order, 1), wanted_ids.gather(1, wanted_order).numpy())
    by_id = wanted.gather(1, wanted_order)
    assert relative_error(np.take_along_axis(weights, order, 1), by_id.detach().numpy()) < 1e-6

    by_id.backward(torch.from_numpy(np.take_along_axis(g, order, 1)))
    assert relative_error(mb.route_backward(g, x, weights, ids, **given), leaf.grad.numpy()) < 2e-6
