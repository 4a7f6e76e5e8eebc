"""The model of hf_training.py with its parameters spread over processes by FSDP2 (fully_shard).

python examples/hf_fsdp.py                     two processes on the CPU, or one for each GPU
python examples/hf_fsdp.py --processes 4

Every process sees its own rows of a batch. On GPUs parameters are kept in float32 and computed with in bfloat16.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed

from examples import hf_training
from moeblaze_cupy.tools.command import integer


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Each layer is gathered as a whole when it runs, its experts with it."""
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if torch.cuda.is_available() else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(rank: int, processes: int, port: int, steps: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=processes)
    model = sharded(hf_training.small_model().float())
    optimizer, data, losses = torch.optim.AdamW(model.parameters(), 3e-3), hf_training.Windows(), []
    for step in range(steps):
        first = (step * processes + rank) * hf_training.B
        rows = [data[(first + i) % len(data)]["input_ids"] for i in range(hf_training.B)]
        tokens = torch.stack(rows).to(hf_training.device())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / processes
        dist.all_reduce(mean)
        losses.append(mean)
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    dist.destroy_process_group()
    if rank == 0:
        losses = torch.stack(losses).tolist()
        print(f"{processes} processes, {held} of {whole} parameters in each: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if not hf_training.falls(losses):
        raise SystemExit("expected a loss that falls")


def main(*argv: str) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=integer(1), default=torch.cuda.device_count() or 2)
    parser.add_argument("--steps", type=integer(1), default=20)
    args = parser.parse_args(argv)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (args.processes, port, args.steps), args.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
