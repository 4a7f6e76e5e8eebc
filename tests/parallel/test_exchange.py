"""Experts on 2 and 4 processes over gloo, and on as many GPUs over NCCL.

`ranks.py` runs the cases, which are in `ranks_*.py`.
"""

import gc
import signal
import subprocess
import sys
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from tests.environment import ROOT, plain_environment

pytest.importorskip("torch")
from tests.parallel import ranks
from tests.parallel.rank_processes import RankProcesses

RANKS = "-m", "tests.parallel.ranks"


def parameters_of(cases, *quick):
    """The names of cases. All but the quick ones are `long`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in cases]


def skip_if_missing(function):
    """function: a case, which may need what the installed torch lacks."""
    if getattr(function, "missing", None):
        pytest.skip(function.missing)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def processes(request, tmp_path_factory):
    with closing(RankProcesses(request.param, tmp_path_factory.mktemp("ranks"), *RANKS, "gloo")) as processes:
        yield processes


@pytest.mark.parametrize("name", parameters_of(ranks.CASES, "parity", "own_experts"))
def test_case(processes, name):
    skip_if_missing(ranks.CASES[name])
    processes.run(name)


@pytest.fixture(scope="module", params=[2, 4])
def gpu_processes(request, tmp_path_factory):
    if ranks.torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, here are {ranks.torch.cuda.device_count()}")
    with closing(RankProcesses(request.param, tmp_path_factory.mktemp("ranks"), *RANKS, "nccl")) as processes:
        yield processes


@pytest.mark.gpus
@pytest.mark.parametrize("name", ranks.GPU_CASES)
def test_case_on_gpus(gpu_processes, name):
    skip_if_missing(ranks.GPU_CASES[name])
    gpu_processes.run(name)


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    """Not in its folders, when it has made the memory in which hosts tell each other sizes."""
    killed = """
import os, signal
import torch.distributed as dist
from moeblaze_cupy.interop.parallel import hosts
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hosts.gather_objects = lambda value, group: os.kill(os.getpid(), signal.SIGKILL)
hosts.share_memory(10, 3, dist.group.WORLD)
"""
    folders = Path("/dev/shm"), tmp_path
    before = [set(folder.glob("moeblaze*")) for folder in folders]
    environment = plain_environment() | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
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


@pytest.fixture
def one_rank(tmp_path):
    dist = ranks.torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fails", ["_pieces", "count_beside_operators"])  # before the layer waits
def test_the_stream_waits_for_rows_where_a_pass_fails(one_rank, monkeypatch, fails):
    """What copies of them come to is freed then."""
    from moeblaze_cupy.interop.parallel import ExpertGroup, api
    from moeblaze_cupy.interop.parallel.routes import SentRoute

    def fail(*_):
        raise MemoryError

    torch, waits = ranks.torch, []
    for receive in (SentRoute.receive, SentRoute.receive_gradients):

        def begin(route, *args, receive=receive):
            route.wait = lambda: waits.append(receive.__name__)
            return receive(route, *args)

        monkeypatch.setattr(SentRoute, receive.__name__, begin)
    x = torch.zeros(3, 8, requires_grad=True)
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    w1, w2 = torch.zeros(2, 8, 8), torch.zeros(2, 4, 8)
    group = ExpertGroup(None, 2, route="exact")
    if fails == "_pieces":
        monkeypatch.setattr(api, fails, fail)
        with pytest.raises(MemoryError):
            api.expert_parallel_moe(x, ids, weights, w1, w2, group)
    else:
        out = api.expert_parallel_moe(x, ids, weights, w1, w2, group)
        monkeypatch.setattr(api, fails, fail)
        waits.clear()
        with pytest.raises(MemoryError):
            out.sum().backward()
    assert waits == ["receive" if fails == "_pieces" else "receive_gradients"]


def test_a_refused_exchange_keeps_no_tensors(one_rank):
    from moeblaze_cupy.interop.parallel import ExpertGroup, exchange

    group = ExpertGroup(None, 2, route="exact")
    x = ranks.torch.zeros(3, 8)
    left = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(TypeError, match=r"^exchange: ids: expected int32 or int64"):
            exchange(x, ranks.torch.zeros(3, 1), ranks.torch.ones(3, 1), group)
        del x
        assert left() is None
    finally:
        gc.enable()


def test_one_parameter_is_clipped_as_a_list_of_it():
    from moeblaze_cupy.interop.parallel import clip_grad_norm_

    parameter = ranks.torch.nn.Parameter(ranks.torch.ones(2, 2))
    parameter.grad = ranks.torch.full((2, 2), 4.0)
    assert clip_grad_norm_(parameter, 2.0) == 8
    ranks.torch.testing.assert_close(parameter.grad, ranks.torch.ones(2, 2))
