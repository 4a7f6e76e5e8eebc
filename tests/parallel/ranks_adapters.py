"""Cases of `examples/torchtitan_experts.py` and `automodel_experts.py` over gloo, with what is installed of both."""

import contextlib
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import signature

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from moeblaze_cupy.interop.parallel import ExpertGroup
from tests.environment import ROOT
from tests.parallel.ranks_common import D, E, Inputs, K, case, counts_of, difference, expect, results_of
from tests.torch_versions import needs_none

OVERRIDE = "examples.torchtitan_experts.routed_experts"
IN_FP8 = {"precision": "fp8", "row_precision": "fp8"}
B, L = 2, 12  # of a rank
H = 16  # torchtitan's own products need multiples of 16 bytes
# Only absence is a reason: where it is installed and cannot be imported, the cases fail.
needs_torchtitan = needs_none(None if find_spec("torchtitan") else "torchtitan is not installed")


def imported():
    """torchtitan for the CPU, whose groups are made when all ranks have imported it, which takes seconds."""
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = "cpu"  # what is imported next reads it
    import torchtitan.distributed
    import torchtitan.models.common.config_utils
    import torchtitan.models.common.moe_sharding

    dist.barrier()


def config_of(*overrides, h=H):
    """That of an MoE with a router, a plan of sharding by experts, and these imports of --override."""
    import spmd_types as spmd
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    experts = {"dim": D, "hidden_dim": h, "num_experts": E, "top_k": K, "param_init": {}, "comm_backend": "standard"}
    config = make_moe_config(
        num_experts=E,
        router=make_router_config(dim=D, num_experts=E, top_k=K, gate_param_init={}, route_norm=True),
        routed_experts=make_routed_experts_config(**experts),
    )
    names = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=names)
    said = apply_overrides(OverrideConfig(imports=list(overrides)), config)
    assert len(said) == len(overrides)
    return config


def dims_of(size, backend):
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend(backend)
    degrees = {"dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "pp": 1, "ep": size}
    dims = ParallelDims(**degrees, world_size=size, spmd_backend=backend)
    dims.build_mesh()
    return dims


def dense(x_BLD, scores_BLK, ids_BLK, _, experts):
    """Every expert for every token, the chosen ones weighted."""
    gate, up = (torch.einsum("bld,efd->blef", x_BLD, w) for w in (experts.w1_EFD, experts.w3_EFD))
    outs = torch.einsum("blef,edf->bled", torch.nn.functional.silu(gate) * up, experts.w2_EDF)
    chosen = outs.gather(2, ids_BLK.unsqueeze(3).expand(*ids_BLK.shape, outs.shape[-1]))
    return torch.einsum("blkd,blk->bld", chosen, scores_BLK)


def leaves(size):
    """Of all ranks: x and the gradient of out (B, L, D), and the weights by name."""
    rng = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)  # noqa: E731
    weights = {
        "router.gate.weight": normal(E, D) / D**0.5,
        "routed_experts.inner_experts.w1_EFD": normal(E, H, D) / D**0.5,
        "routed_experts.inner_experts.w2_EDF": normal(E, D, H) / H**0.5,
        "routed_experts.inner_experts.w3_EFD": normal(E, H, D) / D**0.5,
    }
    return normal(size * B, L, D), normal(size * B, L, D), weights


def built(config, weights, dtype=torch.float64):
    module = config.build().to(dtype)
    buffers = {name: torch.zeros_like(module.state_dict()[name]) for name in ("expert_bias_E",)}
    module.load_state_dict(weights | buffers)  # strict: the names are torchtitan's
    return module


def results(module, x, grad):
    """out and gradients by name."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(grad)
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return named | {"out": out, "x": x.grad}


def expected(size):
    """`results` of all tokens by torchtitan's router and `dense`."""
    x, grad, weights = leaves(size)
    module = built(config_of(), weights)
    experts = module.routed_experts
    experts.forward = lambda *given: dense(*given, experts.inner_experts)
    return results(module, x, grad)


@case
@needs_torchtitan
def torchtitan_by_the_override(rank, size, group):
    """An MoE that torchtitan shards over ranks by each of its backends, beside one process with all tokens."""
    imported()
    from torchtitan.distributed.utils import get_spmd_context

    want = expected(size)
    x, grad, weights = leaves(size)
    here = slice(rank * B, (rank + 1) * B)
    for backend, checks in (
        ("partial_dtensor", False),
        ("full_dtensor", False),
        ("spmd_types", False),
        ("spmd_types", True),
    ):
        dims = dims_of(size, backend)
        module = built(config_of(OVERRIDE), weights)
        module.parallelize(dims)
        mine, gradient = x[here].clone(), grad[here]
        with contextlib.ExitStack() as stack:
            if backend == "spmd_types":
                stack.enter_context(get_spmd_context(parallel_dims=dims, spmd_typechecking=checks)())
            if checks:
                import spmd_types as spmd

                for tensor in (mine, gradient):
                    spmd.assert_type(tensor, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.R})
            if backend == "full_dtensor":
                mesh = dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
                mine, gradient = (DTensor.from_local(t, mesh, [Shard(0)] * mesh.ndim) for t in (mine, gradient))
            got = results(module, mine, gradient)
        for name, tensor in ((name, tensor.detach()) for name, tensor in got.items()):
            if isinstance(tensor, DTensor):
                got[name] = tensor.full_tensor()
            elif name == "router.gate.weight":
                dist.all_reduce(tensor)
            else:  # a part of the experts or of the tokens
                parts = [torch.empty_like(tensor) for _ in range(size)]
                dist.all_gather(parts, tensor.contiguous())
                got[name] = torch.cat(parts)
        assert got.keys() == want.keys() == {*weights, "out", "x"}
        for name, tensor in got.items():
            assert tensor.shape == want[name].shape, name
            error = difference(tensor, want[name])
            assert error <= 1e-14, f"{backend}: {name}: {error}"


@case
@needs_torchtitan
def torchtitan_in_one_process(rank, size, group):
    """The override without a mesh, beside `dense` and torchtitan's own experts, whose products are in bfloat16."""
    imported()
    x, grad, weights = leaves(1)
    exact = expected(1)
    got = results(built(config_of(OVERRIDE), weights), x, grad)
    their, low = (
        results(built(config_of(*names), weights, torch.float32), x.float(), grad.float()) for names in ((), [OVERRIDE])
    )
    for name, want in exact.items():
        assert difference(got[name], want) <= 1e-14, name
        # bfloat16 rounds rows, weights and products by up to 0.4 %, float32 each number by 6e-8
        assert difference(their[name], want) <= 1e-2, name
        assert difference(low[name], want) <= 1e-6, name


@case
@needs_torchtitan
def torchtitan_in_fp8(rank, size, group):
    """Products and rows in e4m3, over ranks, and products in one process, by the arguments of the import."""
    imported()
    inputs = Inputs(rank, counts_of(size, "equal"), dtype=torch.bfloat16, h=32, pair=True)
    stored = {"w1_EFD": inputs.w1[0].mT, "w2_EDF": inputs.w2.mT, "w3_EFD": inputs.w1[1].mT}
    over_ranks = results_of(inputs, ExpertGroup(group, E), **IN_FP8)
    for dims, want in ((dims_of(size, "spmd_types"), over_ranks), (None, inputs.whole(precision="fp8"))):
        module = config_of((OVERRIDE, IN_FP8), h=32).routed_experts.build().bfloat16()
        module.inner_experts.load_state_dict(stored)
        if dims:
            module.parallelize(dims)
        part = inputs.here if dims else slice(None)
        x, scores = inputs.leaf(inputs.x, part), inputs.leaf(inputs.weights, part)
        ids = inputs.ids[part].long()
        counts = torch.bincount(ids.reshape(-1), minlength=E)
        out = module(*(tensor.unflatten(0, (-1, L)) for tensor in (x, scores, ids)), counts)
        out.backward(inputs.grad[part].view(out.shape))
        own = slice(None) if dims else inputs.experts
        grads = {name: parameter.grad[own].mT for name, parameter in module.inner_experts.named_parameters()}
        got = {"out": out.detach().flatten(0, 1), "x": x.grad, "weights": scores.grad}
        got = {name: tensor if dims else tensor[inputs.here] for name, tensor in got.items()}
        got |= {"w1": torch.cat([grads["w1_EFD"], grads["w3_EFD"]]), "w2": grads["w2_EDF"]}
        for name in want:
            assert torch.equal(got[name], want[name]), name


@case
@needs_torchtitan
def torchtitans_other_experts(rank, size, group):
    """Experts of another formula and those that a converter gave other products are refused."""
    imported()
    from torchtitan.components.quantization import float8, mx
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss import gptoss_configs

    from examples.torchtitan_experts import routed_experts

    config = gptoss_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    text = "inner_experts: expected GroupedExperts.Config, got "
    expect(NotImplementedError, text + "GptOss", routed_experts, config.layers[0].moe.routed_experts)
    config = config_of().routed_experts
    for kind in (float8._get_float8_grouped_experts_cls, mx._get_mxfp8_grouped_experts_cls):  # what converters put
        converted = kind(GroupedExperts)
        config.inner_experts = converted.Config(dim=D, hidden_dim=H, num_experts=E)
        expect(NotImplementedError, f"{text}{converted.__name__}.Config", routed_experts, config)


def forward_of_main(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
    """Has the arguments of torchtitan's main."""


def forward_of_tomorrow(self, x_TD, plan):
    """Has arguments that no torchtitan had."""


@case
@needs_torchtitan
def torchtitans_other_arguments(rank, size, group):
    """Main's (T, d) in place of (B, L, d), under the names that its plans of sharding have, and unknown ones."""
    imported()
    from torchtitan.models.common.moe import RoutedExperts

    own = RoutedExperts.forward
    try:
        for forward in (forward_of_main, forward_of_tomorrow):
            RoutedExperts.forward = forward
            place = spec_from_file_location(f"examples.{forward.__name__}", ROOT / "examples/torchtitan_experts.py")
            place.loader.exec_module(example := module_from_spec(place))
            if forward is forward_of_main:
                module = example.routed_experts(config_of().routed_experts).build().double()
        text = "RoutedExperts.forward: expected ['x', 'topk_scores', 'topk_expert_ids', 'num_local_tokens_per"
        expect(NotImplementedError, text, example.routed_experts, config_of().routed_experts)
    finally:
        RoutedExperts.forward = own
    assert list(signature(type(module).forward).parameters) == list(signature(forward_of_main).parameters)
    x, _, weights = leaves(1)
    module.load_state_dict({name[len("routed_experts.") :]: w for name, w in weights.items() if "inner" in name})
    scores, ids = torch.rand(B * L, K, dtype=torch.float64), torch.rand(B * L, E).topk(K).indices
    got = module(x.view(-1, D), scores, ids, None)
    want = dense(x, scores.view(B, L, K), ids.view(B, L, K), None, module.inner_experts).flatten(0, 1)
    assert difference(got, want) <= 1e-14


@case
@needs_none(None if find_spec("nemo_automodel") else "nemo-automodel is not installed")
def automodel_over_ranks(rank, size, group):
    """NeMo AutoModel's experts, that its plan shards, with and without `use`, beside its experts in one process."""
    from nemo_automodel.components.moe.experts import GroupedExperts
    from nemo_automodel.components.moe.parallelizer import ExpertParallel

    from examples import automodel_experts
    from tests.test_automodel import config_of

    dist.barrier()  # the imports take seconds
    inputs = Inputs(rank, counts_of(size, "uneven"), h=H)
    mask = torch.arange(len(inputs.x)) % 5 > 0
    config = config_of(n_routed_experts=E, n_activated_experts=K, dim=D, moe_inter_dim=H)
    mesh = DeviceMesh.from_group(group, "cpu")

    def results_of(part, plan=None):
        experts = GroupedExperts(config)
        experts.load_state_dict({"gate_and_up_projs": inputs.w1, "down_projs": inputs.w2})
        if plan:
            parallelize_module(experts, mesh, plan)
        x, weights = inputs.leaf(inputs.x, part), inputs.leaf(inputs.weights, part)
        out = experts(x, mask[part], weights, inputs.ids[part].long())
        out.backward(inputs.grad[part])
        grads = {name: p.grad.full_tensor() if plan else p.grad for name, p in experts.named_parameters()}
        return {"out": out.detach(), "x": x.grad, "weights": weights.grad} | grads

    own = GroupedExperts.__init__, GroupedExperts.forward
    with torch.compiler.set_stance("force_eager"):
        want = results_of(slice(None))
        want |= {name: want[name][inputs.here] for name in ("out", "x", "weights")}
        theirs = results_of(inputs.here, ExpertParallel())
        try:
            automodel_experts.use()
            got = results_of(inputs.here, ExpertParallel())
            config.expert_activation = "quick_geglu"  # its gates are interleaved
            expect(NotImplementedError, "gates in halves over ranks", results_of, inputs.here, ExpertParallel())
        finally:
            GroupedExperts.__init__, GroupedExperts.forward = own
    for name in want:
        # AutoModel sums in float32.
        assert difference(got[name], want[name]) <= 1e-6, name
        assert difference(theirs[name], want[name]) <= 1e-6, name
