"""Experts on 2 and 4 processes over gloo, and on as many GPUs over NCCL. One start of the processes runs all cases.

`ranks.py` runs the cases, which are in `ranks_*.py`.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.environment import plain_environment

pytest.importorskip("torch")
from tests.parallel import ranks

ROOT = Path(__file__).resolve().parent.parent.parent


def run(size, folder, backend):
    """By rank, then case: None, or what went wrong."""
    environment = plain_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"NCCL_NVLS_ENABLE": "0"}  # not all machines that share GPUs allow NVLink's multicast
    command = [sys.executable, "-m", "tests.parallel.ranks"]
    said = [folder / f"{rank}.txt" for rank in range(size)]
    processes, end = [], time.monotonic() + 900
    try:
        for rank, path in enumerate(said):
            words = [*command, str(rank), str(size), str(folder), backend]
            with path.open("w") as file:
                processes.append(
                    subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        for process in processes:
            process.wait(timeout=max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        pass  # where one rank fails others may wait for it; each has written what it came to
    finally:
        for process in processes:
            process.kill()
    found = [folder / f"{rank}.json" for rank in range(size)]
    assert all(path.exists() for path in found), "\n".join(path.read_text() for path in said)
    return [json.loads(path.read_text()) for path in found]


def assert_right(results, name, function):
    """function: the case of this name."""
    if getattr(function, "missing", None):
        pytest.skip(function.missing)
    wrong = {rank: found.get(name, "did not come so far") for rank, found in enumerate(results)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    return run(request.param, tmp_path_factory.mktemp("ranks"), "gloo")


@pytest.mark.parametrize("name", ranks.CASES)
def test_case(results, name):
    assert_right(results, name, ranks.CASES[name])


@pytest.fixture(scope="module", params=[2, 4])
def gpu_results(request, tmp_path_factory):
    if ranks.torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, here are {ranks.torch.cuda.device_count()}")
    return run(request.param, tmp_path_factory.mktemp("ranks"), "nccl")


@pytest.mark.gpus
@pytest.mark.parametrize("name", ranks.GPU_CASES)
def test_case_on_gpus(gpu_results, name):
    assert_right(gpu_results, name, ranks.GPU_CASES[name])


def test_a_process_that_is_killed_leaves_no_file():
    """Not in its folders, when it has made the memory in which hosts tell each other sizes."""
    killed = """
import os, signal
import torch.distributed as dist
from moeblaze_cupy.interop.parallel import hosts
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hosts._tell = lambda value, group: os.kill(os.getpid(), signal.SIGKILL)
hosts.share_memory(10, 3, dist.group.WORLD)
"""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    before = [set(folder.glob("moeblaze*")) for folder in folders]
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", killed], env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [set(folder.glob("moeblaze*")) for folder in folders] == before


@pytest.mark.parametrize(
    ("config", "has_gpu", "found"),
    [
        ("cpu:gloo,cuda:gloo", True, (False, ("cpu", "cuda"))),
        ("cuda:nccl", True, (True, ("cuda",))),
        ("cpu:nccl,cuda:nccl", True, (True, ("cuda",))),
        ("cpu:gloo,cuda:nccl", True, (True, ("cuda", "cpu"))),
        ("cpu:gloo,cuda:nccl", False, (False, ("cpu",))),
    ],
)
def test_devices_of_a_group(monkeypatch, config, has_gpu, found):
    """Of one that is configured for both kinds, headers are on the GPU wherever a rank has its tokens."""
    from moeblaze_cupy.interop.parallel import group as expert_group

    monkeypatch.setattr(expert_group.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(expert_group.torch.cuda, "is_available", lambda: has_gpu)
    assert expert_group.backend_of(None) == found


def test_one_parameter_is_clipped_as_a_list_of_it():
    from moeblaze_cupy.interop.parallel import clip_grad_norm_

    parameter = ranks.torch.nn.Parameter(ranks.torch.ones(2, 2))
    parameter.grad = ranks.torch.full((2, 2), 4.0)
    assert clip_grad_norm_(parameter, 2.0) == 8
    ranks.torch.testing.assert_close(parameter.grad, ranks.torch.ones(2, 2))
