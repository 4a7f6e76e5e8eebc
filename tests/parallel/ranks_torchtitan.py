"""Training of a Qwen3-MoE that torchtitan itself shards, with `examples/torchtitan_experts.py`, over gloo."""

import contextlib
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.parallel.ranks_adapters import OVERRIDE, dense, imported, needs_torchtitan
from tests.parallel.ranks_common import case, difference

STEPS, L = 3, 16
ONE_PROCESS = SimpleNamespace(ep_enabled=False, tp=1, get_optional_mesh=lambda name: None)


def meshes_of(size):
    """Backends, degrees of experts and of tensors, and whether FSDP2 shards the parameters."""
    with_fsdp = [("partial_dtensor", ep, tp, True) for ep, tp in ((2, 1), (1, 1), (1, 2), (2, 2))]
    return [*with_fsdp, ("spmd_types", size, 1, False)]  # FSDP2 of torch 2.13 does not take parameters of spmd_types


def config_of(*overrides, ep=1):
    """torchtitan's small Qwen3-MoE with 2 layers of narrow experts, and attention that has a backward on the CPU."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import qwen3_configs
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    config = qwen3_configs["debugmodel_moe"](attn_backend="flex", moe_comm_backend="standard")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.routed_experts.inner_experts.hidden_dim = 32
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=ep > 1)
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config


def built(config):
    """The model with weights that the seed draws, the same on every rank."""
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model


def sharded(model, size, backend, ep, tp, fsdp=True):
    """model as torchtitan's own function shards it, and its meshes. fsdp: False leaves out FSDP2."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.qwen3 import parallelize_qwen3

    set_spmd_backend(backend)
    degrees = {"dp_replicate": 1, "dp_shard": size // tp, "cp": 1, "tp": tp, "pp": 1, "ep": ep}
    dims = ParallelDims(**degrees, world_size=size, spmd_backend=backend)
    dims.build_mesh()
    parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=backend, expert_parallel_degree=ep, tensor_parallel_degree=tp),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        skip_dp=not fsdp,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return model, dims


def whole(name, tensor, size):
    """tensor on every rank; a plain one of experts is a rank's part."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if size == 1 or "inner_experts" not in name:
        return tensor.clone()
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def trained(model, dims, tokens, rows, size=1, sums=False):
    """The sums of losses of AdamW steps with torchtitan's balancing biases, and the first step's gradients by name.

    tokens: (steps, B, L) of all ranks. rows: those of this rank. sums: gradients of the rest are summed here.
    """
    from torchtitan.components.optimizer import register_moe_load_balancing_hook

    # A step of Adam is the sign of the gradient where eps is small, and rounding would move tokens to other experts.
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, eps=1e-2, foreach=False)
    register_moe_load_balancing_hook(optimizer, [model], dims)
    losses, first = [], {}
    for batch in tokens:
        out = model(batch[rows])
        out = out.full_tensor() if isinstance(out, DTensor) else out
        targets = batch[rows].roll(-1, 1).flatten()
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), targets, reduction="sum") / batch.numel()
        loss.backward()
        for name, parameter in model.named_parameters():
            if sums and "inner_experts" not in name:
                dist.all_reduce(parameter.grad)
        first = first or {name: whole(name, p.grad, size) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), first


@case
@needs_torchtitan
def torchtitan_trains_a_model(rank, size, group):
    """Three steps over ranks beside those of one process in float64, whose experts are `dense`."""
    imported()
    from torchtitan.distributed.utils import get_spmd_context

    tokens = torch.randint(2048, (2 * size, L), generator=torch.Generator().manual_seed(1)).expand(STEPS, -1, -1)
    own = built(config_of())
    start = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    for block in own.double().layers.values():
        experts = block.moe.routed_experts
        experts.forward = lambda *given, inner=experts.inner_experts: dense(*given, inner)
    want, gradients = trained(own, ONE_PROCESS, tokens, slice(None))
    assert want[-1] < want[0] - 0.01
    biases = [block.moe.expert_bias_E for block in own.layers.values()]
    assert all(bias.any() for bias in biases)
    for backend, ep, tp, fsdp in meshes_of(size):
        which = f"{backend}, ep {ep}, tp {tp}"
        model = built(config_of(OVERRIDE, ep=ep))
        assert model.state_dict().keys() == start.keys()
        assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
        model, dims = sharded(model, size, backend, ep, tp, fsdp)
        rows = slice(2 * tp * (rank // tp), 2 * tp * (rank // tp + 1))
        with contextlib.ExitStack() as stack:
            if backend == "spmd_types":
                stack.enter_context(get_spmd_context(parallel_dims=dims, spmd_typechecking=False)())
            losses, got = trained(model, dims, tokens, rows, size, sums=not fsdp)
        dist.all_reduce(losses)
        # float32 rounds numbers by 6e-8. Sums over 256 columns and 2 layers leave 1.5e-6 of it, two more steps no more.
        assert difference(losses / tp, want) <= 3e-6, which
        assert got.keys() == gradients.keys()
        for name, gradient in got.items():
            error = difference(gradient, gradients[name])
            assert error <= 5e-6, f"{which}: {name}: {error}"
        for block, bias in zip(model.layers.values(), biases, strict=True):
            assert difference(whole("", block.moe.expert_bias_E, 1), bias) <= 1e-7, which


@case
@needs_torchtitan
def torchtitan_reads_the_overrides_checkpoint(rank, size, group):
    """One that is saved with experts over ranks, by torchtitan's own experts over another mesh."""
    imported()
    model, _ = sharded(built(config_of(OVERRIDE, ep=size)), size, "partial_dtensor", size, 1)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint.save(model.state_dict(), checkpoint_id=folder[0])
    own = config_of().build()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.fill_(torch.nan)
    own, _ = sharded(own, size, "partial_dtensor", 1, 1)
    checkpoint.load(state := own.state_dict(), checkpoint_id=folder[0])
    own.load_state_dict(state)
    read, start = own.state_dict(), built(config_of()).state_dict()
    assert read.keys() == start.keys() == model.state_dict().keys()
    for name, tensor in start.items():
        assert torch.equal(whole(name, read[name], 1), tensor), name
