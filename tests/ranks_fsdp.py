"""Training under FSDP2 on GPUs, by collectives of copy engines beside those of NCCL."""

import torch
from ranks_common import gpu_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.torch import MoE

STEPS = 4


def trained(mesh, rank, dtype, reduce_dtype, by_copies, force_sum=False):
    """Losses of each step, and parameters at the end, of layers of unlike sizes."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(MoE(64, h, 8, 2, device="cuda", dtype=dtype) for h in (96, 32, 160)))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(layers, mesh=mesh, mp_policy=policy)
    if by_copies:
        CopyEngines(mesh).serve(*layers)
    for layer in layers:
        layer.set_force_sum_reduction_for_comms(force_sum)
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
    optimizer, losses = torch.optim.AdamW(layers.parameters(), lr=1e-2), []
    generator = torch.Generator("cuda").manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(100, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        loss = (layers(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.full_tensor() for parameter in layers.parameters()]


@gpu_case
def fsdp_by_copy_engines(rank, size, group):
    """The bits of NCCL's on two ranks, whose sums have no order; gradients of bf16 may travel in it on any number."""
    mesh = DeviceMesh.from_group(group, "cuda")
    kinds = (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for dtype, reduce_dtype in kinds:
        for force_sum in (False, True):
            wanted = trained(mesh, rank, dtype, torch.float32, False, force_sum)
            runs = [trained(mesh, rank, dtype, reduce_dtype, True, force_sum) for _ in range(2)]
            found.append((wanted, runs, f"{dtype}, {'sums' if force_sum else 'means'}"))
    for (losses, parameters), runs, name in found:
        assert runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1], runs[1][1])), name
        if size == 2:
            assert losses == runs[0][0] and all(map(torch.equal, parameters, runs[0][1])), name
        else:
            torch.testing.assert_close(torch.tensor(runs[0][0]), torch.tensor(losses), rtol=1e-2, atol=0)
