"""Training under FSDP2 by collectives of copy engines, beside torch's: over memory of files here, and on GPUs."""

import copy
import itertools
import random
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from ranks_common import case, expect, gpu_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch_versions import NO_SHARDING_ON_THE_CPU

from moeblaze_cupy.interop import fsdp, fsdp_gather, peers
from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.stream_barrier import StreamBarrier
from moeblaze_cupy.interop.torch import MoE

STEPS = 3
HALF, WHOLE = torch.bfloat16, torch.float32
numbers = itertools.count()  # of memory, on all ranks the same


class Files:
    """Stands for torch's symmetric memory among processes without GPUs: what one writes the others read."""

    def __init__(self, rank, size):
        self.rank, self.size, self.folder = rank, size, Path(tempfile.gettempdir())

    def empty(self, nbytes, dtype, device):
        self.number = next(numbers)
        return self.of(self.rank, nbytes)

    def of(self, rank, nbytes):
        path = str(self.folder / f"memory-{self.number}-{rank}")
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def rendezvous(self, memory, group):
        dist.barrier(group)
        return Handle([memory if r == self.rank else self.of(r, len(memory)) for r in range(self.size)], group)


class Handle:
    def __init__(self, every, group):
        self.every, self.group = every, group
        self.buffer_ptrs = [memory.data_ptr() for memory in every]

    def get_buffer(self, rank, shape, dtype, offset):
        return self.every[rank].view(dtype)[offset : offset + torch.Size(shape).numel()].view(shape)

    def barrier(self, channel, timeout_ms):
        dist.barrier(self.group)


@contextmanager
def files_for_memory(rank, size, least=2**14):
    """least: bytes of parameters that have hooks, which are those of experts."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fsdp_gather, "STRAIGHT_BYTES", least))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(peers, "symmetric_memory", Files(rank, size)))
            stack.enter_context(mock.patch.object(fsdp, "reach_each_other", lambda gpus: True))
            stack.enter_context(mock.patch.object(fsdp, "StreamBarrier", lambda group, *_: lambda: dist.barrier(group)))
            stack.enter_context(mock.patch.object(peers.torch.cuda, "synchronize", lambda device: None))
            stack.enter_context(mock.patch.object(peers.torch.cuda, "is_current_stream_capturing", lambda: False))
        yield


def layers_of(
    mesh,
    dtype=HALF,
    reduce_dtype=WHOLE,
    force_sum=False,
    reshard=True,
    prefetch=True,
    engines=None,
    placement=None,
    widths=(64, 96, 32, 160),
    **options,
):
    """widths: d, and h of each. engines: a CopyEngines that serves them, which the plain ones do without."""
    torch.manual_seed(0)
    options |= {"device": mesh.device_type, "dtype": dtype}
    layers = torch.nn.Sequential(*(MoE(widths[0], h, 8, 2, **options) for h in widths[1:]))
    policy = MixedPrecisionPolicy(HALF, reduce_dtype)
    sharding = {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": placement}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **sharding)
    fully_shard(layers, mesh=mesh, mp_policy=policy)
    if engines is not None:
        engines.serve(*layers, layers)
    for layer in layers:
        layer.set_force_sum_reduction_for_comms(force_sum)
    if prefetch:
        layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
    return layers


def tokens_of(mesh, seed, L=40, d=64):
    made = torch.randn(L, d, generator=torch.Generator().manual_seed(100 * seed + mesh.get_local_rank()))
    return made.to(mesh.device_type, HALF)


def loss_of(layers, x):
    return (layers(x).float() - x.float()).square().mean()


def optimizer_of(layers, **options):
    return torch.optim.AdamW(layers.parameters(), lr=1e-2, **options)


def trained(mesh, layers, steps=STEPS, optimizer=None, first=0):
    """Losses of each step, and parameters and the last gradients at the end."""
    optimizer, losses = optimizer or optimizer_of(layers), []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(layers, tokens_of(mesh, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    layers[0].reshard()
    return losses + [t.full_tensor() for p in layers.parameters() for t in (p.detach(), p.grad)]


def hooked(layers):
    return [name for name, p in layers.named_parameters() if hasattr(p._local_tensor, "fsdp_pre_all_gather")]


def same(wanted, got):
    return len(wanted) == len(got) and all(map(torch.equal, wanted, got))


def on_cpu(function):
    """A case of processes that share memory of files."""

    def run(rank, size, group):
        with files_for_memory(rank, size):
            function(DeviceMesh.from_group(group, "cpu"), size)

    run.__name__ = function.__name__
    run.missing = NO_SHARDING_ON_THE_CPU
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        run.missing = "FSDP2 takes no collectives of others"
    return case(run)


@on_cpu
def fsdp_by_copies(mesh, size):
    """The bits of torch's collectives on two ranks, whose sums have no order; parameters are gathered as they are."""
    for dtype in (HALF, WHOLE):
        for reshard, prefetch in ((True, True), (True, False), (False, False)):
            options = {"dtype": dtype, "reshard": reshard, "prefetch": prefetch, "force_sum": True}
            wanted = trained(mesh, layers_of(mesh, **options))
            layers = layers_of(mesh, **options, engines=CopyEngines(mesh))
            assert hooked(layers) == [f"{n}.{w}_storage" for n in range(3) for w in ("w1", "w2")]
            got = trained(mesh, layers)
            if size == 2:
                assert same(wanted, got), options
            for a, b in zip(wanted, got, strict=True):
                torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@on_cpu
def fsdp_gathers_what_ranks_hold(mesh, size):
    """In every forward, also without gradients and after weights were changed or loaded."""
    seen = []

    def look(layer, _):
        seen.extend(p.detach().clone() for p in layer.parameters())

    for dtype in (HALF, WHOLE):
        layers = layers_of(mesh, dtype=dtype, engines=CopyEngines(mesh), force_sum=True)
        for layer in layers:
            layer.register_forward_pre_hook(look)
        state = {name: value.clone() for name, value in layers.state_dict().items()}
        x, outs = tokens_of(mesh, 0), []
        for change in ("none", "add", "load"):
            with torch.no_grad():
                if change == "add":
                    for parameter in layers.parameters():
                        parameter.add_(1)
                if change == "load":
                    layers.load_state_dict(state)
                for mode in (torch.no_grad, torch.enable_grad):
                    with mode():
                        outs.append(layers(x).detach())
                wanted = [p.full_tensor().to(HALF) for p in layers.parameters()]
                assert same(wanted + wanted, seen), change
                seen.clear()
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[4]) and not torch.equal(outs[0], outs[2])


@on_cpu
def fsdp_by_copies_keeps_optimizers_and_states(mesh, size):
    """Serving in the middle of training, with an optimizer made before, and saving and loading change no bit."""
    for options in ({"foreach": True}, {"fused": True}):
        plain = layers_of(mesh, force_sum=True)
        optimizer = optimizer_of(plain, **options)
        wanted = [trained(mesh, plain, optimizer=optimizer, first=first) for first in (0, STEPS)]
        layers, engines = layers_of(mesh, force_sum=True), CopyEngines(mesh)
        optimizer, before = optimizer_of(layers, **options), list(layers.parameters())
        got = [trained(mesh, layers, optimizer=optimizer)]
        engines.serve(*layers)
        assert all(a is b for a, b in zip(before, layers.parameters(), strict=True)) and len(hooked(layers)) == 6
        state = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
        got.append(trained(mesh, layers, optimizer=optimizer, first=STEPS))
        assert size > 2 or all(map(same, wanted, got))
        for assign in (False, True):
            layers.load_state_dict(copy.deepcopy(state[0]), assign=assign)
            if assign:
                expect(RuntimeError, "CopyEngines: parameters: expected those that", layers, tokens_of(mesh, 0))
                engines.serve(*layers)
                optimizer = optimizer_of(layers, **options)
            optimizer.load_state_dict(copy.deepcopy(state[1]))
            again = trained(mesh, layers, optimizer=optimizer, first=STEPS)
            assert size > 2 or same(again, got[1]), assign
        twin = copy.deepcopy(before[1].detach())
        assert torch.equal(twin.to_local(), before[1].to_local())


@on_cpu
def fsdp_by_copies_in_fp8(mesh, size):
    """The layer's copies in e4m3 are of what was gathered last, also where that has the memory of the step before."""
    for options in ({}, {"dtype": WHOLE}, {"reshard": False}):
        options |= {"precision": "fp8", "force_sum": True}
        wanted = trained(mesh, layers_of(mesh, **options), steps=2)
        got = trained(mesh, layers_of(mesh, **options, engines=CopyEngines(mesh)), steps=2)
        assert size > 2 or same(wanted, got), options


@on_cpu
def fsdp_by_copies_accumulates(mesh, size):
    found = []
    for engines in (None, CopyEngines(mesh)):
        layers, results = layers_of(mesh, force_sum=True, engines=engines), []
        optimizer = optimizer_of(layers)
        for step in range(2):
            for micro in range(3):
                layers.set_requires_gradient_sync(micro == 2)
                loss_of(layers, tokens_of(mesh, 3 * step + micro)).backward()
            optimizer.step()
            results += [p.grad.full_tensor() for p in layers.parameters()]
            optimizer.zero_grad()
        found.append(results + [p.detach().full_tensor() for p in layers.parameters()])
    assert len(found[0]) == len(found[1]) and (size > 2 or same(*found))


@on_cpu
def fsdp_by_copies_leaves_the_rest(mesh, size):
    """Parameters whose parts are uneven or along another dimension, and of modules sharded over other ranks."""
    from torch.distributed.tensor import Shard

    engines = CopyEngines(mesh)
    layers = layers_of(mesh, engines=engines, force_sum=True, placement=lambda p: Shard(p.ndim - 1))
    assert hooked(layers) == []
    torch.manual_seed(0)
    odd = torch.nn.Sequential(torch.nn.Linear(64, 8 * size + 1, bias=False), torch.nn.Linear(8 * size + 1, 64))
    whole = copy.deepcopy(odd)
    fully_shard(odd, mesh=mesh)
    with mock.patch.object(fsdp_gather, "STRAIGHT_BYTES", 0):
        engines.serve(odd)
    assert hooked(odd) == ["1.weight", "1.bias"]
    x = tokens_of(mesh, 0).float()
    for _ in range(3):
        assert torch.equal(odd(x), whole(x))
    alone = [dist.new_group([rank]) for rank in range(size)]
    other = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(alone[mesh.get_local_rank()], "cpu"))
    expect(ValueError, "CopyEngines.serve: modules: expected one sharded over", engines.serve, other)


@gpu_case
def fsdp_by_copy_engines(rank, size, group):
    """The bits of NCCL's on two ranks, whose sums have no order; gradients of bf16 may travel in it on any number."""
    mesh = DeviceMesh.from_group(group, "cuda")
    kinds = (WHOLE, WHOLE), (HALF, HALF)
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for least in (2**14, 2**40):  # parameters of experts come straight to their place, or none do
        with files_for_memory(rank, size, least):
            for (dtype, reduce_dtype), force_sum in itertools.product(kinds, (False, True)):
                options = {"dtype": dtype, "force_sum": force_sum}
                wanted = trained(mesh, layers_of(mesh, **options))
                options["reduce_dtype"] = reduce_dtype
                runs = [trained(mesh, layers_of(mesh, **options, engines=CopyEngines(mesh))) for _ in range(2)]
                found.append((wanted, runs, f"{least}, {options}"))
    for wanted, runs, name in found:
        assert same(*runs), name
        if size == 2:
            assert same(wanted, runs[0]), name
        torch.testing.assert_close(torch.stack(runs[0][:STEPS]), torch.stack(wanted[:STEPS]), rtol=1e-2, atol=0)


def late(layers, rank):
    """Has the GPU of this rank come late, now and then, to what the layers do."""
    draw = random.Random(rank)

    def wait(*_):
        torch.cuda._sleep(draw.choice((0, 0, 1_000_000, 4_000_000)))

    def wait_now_and_in_backward(layer, x, out):
        wait()
        if out.requires_grad:
            out.register_hook(wait)

    for layer in layers:
        layer.register_forward_pre_hook(wait)
        layer.register_forward_hook(wait_now_and_in_backward)
    return wait


@gpu_case
def fsdp_ranks_come_late(rank, size, group):
    """Copies of parts of 67 MB have the bits of NCCL's where a rank comes late to read or to write its part.

    After forwards without gradients all parts are changed at once, as nothing else then waits for the other ranks.
    """
    mesh, found = DeviceMesh.from_group(group, "cuda"), []

    def run(layers, wait=lambda: None):
        optimizer, results = optimizer_of(layers, fused=True), []
        for step in range(6):
            x = tokens_of(mesh, step, 512, 1024)
            with torch.no_grad():
                results.append(loss_of(layers, x))
                wait()
                for parameter in layers.parameters():
                    parameter.mul_(1.01)
            loss = loss_of(layers, x)
            loss.backward()
            wait()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        return results + [p.detach().full_tensor() for p in layers.parameters()]

    for dtype, (reshard, prefetch) in itertools.product((HALF, WHOLE), ((True, True), (True, False), (False, False))):
        options = {"dtype": dtype, "reshard": reshard, "prefetch": prefetch, "widths": (1024, 4096, 2048, 4096)}
        wanted, runs = run(layers_of(mesh, **options)), []
        for _ in range(3):
            layers = layers_of(mesh, **options, engines=CopyEngines(mesh))
            assert len(hooked(layers)) == 6
            runs.append(run(layers, late(layers, rank)))
        found.append((wanted, runs, options))
    for wanted, runs, options in found:
        assert same(runs[0], runs[1]) and same(runs[0], runs[2]), options
        assert size > 2 or same(wanted, runs[0]), options


@gpu_case
def streams_meet(rank, size, group):
    """What was written before a barrier of streams is read after it, and not written again before the next."""
    device = torch.device("cuda", rank)
    _, handle = kept = peers.shared_memory(4 * 2**20, device, group)
    barrier, draw = StreamBarrier(group, rank, size), random.Random(rank)
    at = [handle.get_buffer(other, (2**20,), torch.int32, 0) for other in range(size)]
    seen = torch.empty(100, size, 2**20, dtype=torch.int32, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for time, row in enumerate(seen):
            torch.cuda._sleep(draw.choice((0, 0, 100_000, 1_000_000)))
            at[rank].fill_(time)
            barrier()
            for place, source in zip(row, at, strict=True):
                place.copy_(source)
            barrier()
    torch.cuda.synchronize()
    assert torch.equal(seen, torch.arange(100, device=device, dtype=torch.int32).view(-1, 1, 1).expand_as(seen))
    del kept
