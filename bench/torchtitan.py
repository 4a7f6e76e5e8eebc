"""torchtitan's MoE layer over GPUs, with its own experts and with those of examples/torchtitan_experts.py.

python -m bench.torchtitan [--gpus 2] --out FILE.json

A row has milliseconds and peak memory of a forward with backward, the largest of a rank, under FSDP2 alone or with
expert parallelism over all GPUs. Products are in bf16, parameters and sums of gradients in float32. A block is a norm
and the MoE layer of torchtitan 0.3. Times are of a stack of blocks, so that FSDP2 can gather the weights of one while
another computes. Errors are of one block, as relative norms of what differs from the first row's.

torch's public function applies FSDP2 here, with the meshes that torchtitan takes: experts over what expert parallelism
leaves of the ranks, the rest over all ranks. torchtitan's own function needs names that torch 2.11 does not have.
"""

import argparse
import random
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist

from bench import inputs, measure, ranks

CALLS, ROUNDS = 3, 7
SHAPE = (8192, 2048, 768, 128, 8)  # tokens of a rank, hidden size, hidden size of an expert, experts, per token
TINY = (12, 32, 16, 4, 2)
STACKED = 4
EXPERTS = {"torchtitan": [], "moeblaze": ["examples.torchtitan_experts.routed_experts"]}  # imports of --override


def config_of(shape: tuple[int, ...], ep: int, overrides: list[str]) -> Any:
    """The configuration of a layer, as torchtitan's models make theirs."""
    import spmd_types as spmd
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    _, d, h, E, k = shape
    router = {"dim": d, "num_experts": E, "top_k": k, "score_func": "softmax", "route_norm": True}
    experts = {"dim": d, "hidden_dim": h, "num_experts": E, "top_k": k, "comm_backend": "standard"}
    config = make_moe_config(
        num_experts=E,
        router=make_router_config(**router, gate_param_init={}),
        routed_experts=make_routed_experts_config(**experts, param_init={}),
    )
    names = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=ep > 1, enable_sp=False, expert_param_layout=names)
    apply_overrides(OverrideConfig(imports=overrides), config)
    return config


def stack_of(shape: tuple[int, ...], dims: Any, overrides: list[str], blocks: int) -> torch.nn.Sequential:
    """Blocks with weights that the seed draws, the same on every rank and for all experts, sharded as `dims` says."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    with torch.device(inputs.device()):
        stack = torch.nn.Sequential()
        for _ in range(blocks):
            block = {"norm": torch.nn.RMSNorm(shape[1]), "moe": config_of(shape, dims.ep, overrides).build()}
            stack.append(torch.nn.Sequential(OrderedDict(block)))
    for name, parameter in stack.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for buffer in stack.buffers():
        buffer.zero_()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in stack:
        if dims.ep_enabled:
            block.moe.parallelize(dims)
            fully_shard(block.moe.routed_experts.inner_experts, mesh=dims.get_mesh("efsdp"), mp_policy=policy)
        fully_shard(block, mesh=dims.get_mesh("fsdp"), mp_policy=policy)
    fully_shard(stack, mesh=dims.get_mesh("fsdp"), mp_policy=policy)
    for module in stack.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # as torchtitan, whose losses are divided before
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return stack


def step_of(stack: torch.nn.Sequential, x: torch.Tensor, grad_out: torch.Tensor) -> Any:
    def step() -> dict[str, torch.Tensor]:
        stack.zero_grad()
        x.grad = None
        out = stack(x)
        out.backward(grad_out)
        return {"out": out.detach(), "x": x.grad}

    return step


def results(shape: tuple[int, ...], dims: Any, overrides: list[str], x: Any, grad_out: Any) -> dict[str, torch.Tensor]:
    """By name, of one block. A rank has its shard of the gradients, of the same experts for all meshes."""
    stack = stack_of(shape, dims, overrides, 1)
    found = step_of(stack, x, grad_out)()
    return found | {name.removeprefix("0."): p.grad.to_local() for name, p in stack.named_parameters()}


def measured(shape: tuple[int, ...]) -> list[dict]:
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = inputs.device()  # what is imported next reads it
    import torchtitan.models.common.moe_sharding  # registers a backend that meshes name
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # torch 2.11 has no such tracing
        torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    backend, size, rows, own = "partial_dtensor", dist.get_world_size(), [], None
    set_spmd_backend(backend)
    random.seed(0)  # the order of the layers is that of the other ranks
    torch.manual_seed(dist.get_rank() + 1)
    options: dict[str, Any] = {"device": inputs.device(), "dtype": torch.bfloat16}
    x, grad_out = (torch.randn(1, shape[0], shape[1], **options) for _ in range(2))
    x.requires_grad_()
    for how, ep in (("FSDP2", 1), (f"FSDP2, EP = {size}", size)):
        degrees = {"dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "pp": 1, "ep": ep}
        dims = ParallelDims(**degrees, world_size=size, spmd_backend=backend)
        dims.build_mesh()
        errors = {}
        for which, overrides in EXPERTS.items():
            found = results(shape, dims, overrides, x, grad_out)
            own = own or found
            errors[which] = ranks.largest({name: ranks.error(tensor, own[name]) for name, tensor in found.items()})
        stacks = {which: stack_of(shape, dims, overrides, STACKED) for which, overrides in EXPERTS.items()}
        steps = {which: step_of(stack, x, grad_out) for which, stack in stacks.items()}
        times = ranks.timed(steps, CALLS, ROUNDS)
        for which, row in times.items():
            row |= {"speed": times["torchtitan"]["median_ms"] / row["median_ms"], "errors": errors[which]}
            rows.append({"how": how, "experts": which, "sizes": shape, "gpus": size, "blocks": STACKED} | row)
        del stacks, steps, found
        measure.release()
    return rows


def work(out: str | None) -> None:
    """Measures in each rank; the first writes and prints."""
    warnings.filterwarnings("ignore")  # torchtitan's casts on the CPU
    rows = measured(SHAPE if inputs.has_gpu() else TINY)
    if dist.get_rank():
        return
    if out:
        measure.write_record(measure.record(rows=rows, torchtitan=measure.version("torchtitan")), out)
    ranks.show(rows, {"sharded by": "how", "experts": "experts"})


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torchtitan", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    parser.add_argument("--gpus", type=int, default=2, help="a process each (%(default)s); on the CPU a tiny layer")
    args = parser.parse_args(argv or None)
    ranks.run(parser, work, args.gpus, args.out)


if __name__ == "__main__":
    main()
