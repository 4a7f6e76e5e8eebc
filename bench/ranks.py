"""A process for each GPU of one host, over NCCL, or over gloo on the CPU."""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench import inputs, measure, table

SECONDS = 120  # after which a collective gives up
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # not all machines allow multicast


def join(rank: int, size: int, folder: str) -> None:
    """The process group of all ranks, which meet in a file of the folder, and the GPU of this one."""
    if inputs.has_gpu():
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    options: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=SECONDS)}
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("nccl" if inputs.has_gpu() else "gloo", store=store, **options)


def _process(rank: int, work: Callable, size: int, folder: str, given: tuple[Any, ...]) -> None:
    join(rank, size, folder)
    work(*given)
    dist.barrier()
    os._exit(0)  # NCCL's groups take long to end


def run(parser: argparse.ArgumentParser, work: Callable[..., None], size: int, *given: Any) -> None:
    """Calls work(*given) in so many processes, and ends with exit status 2 where there are fewer GPUs.

    Raises torch.multiprocessing's ProcessRaisedException for a process that failed.
    """
    if inputs.has_gpu() and size > torch.cuda.device_count():
        parser.error(f"--gpus: expected up to {torch.cuda.device_count()}, got {size}")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (work, size, folder, given), nprocs=size)


def largest(values: Mapping[str, float]) -> dict[str, float]:
    """The largest of each over the ranks, which all have the same names. NaN stays."""
    every = torch.tensor(list(values.values()), dtype=torch.float64, device=inputs.device())
    if dist.get_world_size() > 1:
        parts = [torch.empty_like(every) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, every)
        every = torch.stack(parts).amax(0)
    return dict(zip(values, every.tolist(), strict=True))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative norm of the difference."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def timed(steps: dict[str, Callable[[], dict[str, torch.Tensor]]], calls: int, rounds: int) -> dict[str, dict]:
    """Quartiles of milliseconds and peak memory of each step, the largest of a rank. All ranks have one random seed.

    Steps return their results by name, and each has run before it is timed.
    """
    found: dict[str, dict] = {}
    for name, step in steps.items():
        step()
        peak = measure.peak_mib(lambda step=step: [*step().values()])  # type: ignore[misc]
        found[name] = {"peak_mib": peak and largest({"peak": peak})["peak"]}
    for name, quartiles in measure.host_microseconds(dict(steps), calls, rounds, waits=True).items():
        found[name] |= {f"{q}_ms": us / 1e3 for q, us in largest(quartiles).items()}
    return found


def show(rows: list[dict], names: Mapping[str, str]) -> None:
    """Prints a table. names: keys of a row that come first, by their titles."""
    lines = [[*names, "median ms", "speed", "peak MiB", "largest error"]]
    for row in rows:
        figures = f"{row['median_ms']:.2f}", f"{row['speed']:.2f}", table.number(row["peak_mib"])
        lines.append([*(row[key] for key in names.values()), *figures, f"{max(row['errors'].values()):.1e}"])
    print("\n".join(table.aligned(lines, len(names))), flush=True)
