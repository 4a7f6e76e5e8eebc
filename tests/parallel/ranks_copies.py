"""Training under FSDP2 by collectives of copy engines, beside torch's, over memory of files without GPUs."""

import copy
import io
import itertools
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.fsdp import api as fsdp
from moeblaze_cupy.interop.fsdp import e4m3 as fsdp_e4m3
from moeblaze_cupy.interop.fsdp import gather as fsdp_gather
from moeblaze_cupy.interop.fsdp import memory as fsdp_memory
from moeblaze_cupy.interop.parallel import peers
from moeblaze_cupy.interop.torch import MoE
from tests.parallel.ranks_common import case, expect
from tests.torch_versions import NO_SHARDING_ON_THE_CPU

STEPS = 3
HALF, WHOLE = torch.bfloat16, torch.float32
numbers = itertools.count()  # of memory, on all ranks the same


class Files:
    """Stands for torch's symmetric memory among processes without GPUs: what one writes the others read."""

    def __init__(self, rank):
        self.rank, self.folder = rank, Path(tempfile.gettempdir())

    def empty(self, nbytes, dtype, device):
        self.number = next(numbers)
        return self.of(self.rank, nbytes)

    def of(self, rank, nbytes):
        path = str(self.folder / f"memory-{self.number}-{rank}")
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def rendezvous(self, memory, group):
        dist.barrier(group)
        ranks = dist.get_process_group_ranks(group)
        return Handle([memory if rank == self.rank else self.of(rank, len(memory)) for rank in ranks], group)


class Handle:
    def __init__(self, every, group):
        self.every, self.group = every, group
        self.rank, self.world_size = dist.get_rank(group), len(every)
        self.buffer_ptrs = [memory.data_ptr() for memory in every]

    def get_buffer(self, rank, shape, dtype, offset):
        return self.every[rank].view(dtype)[offset : offset + torch.Size(shape).numel()].view(shape)

    def barrier(self, channel, timeout_ms):
        dist.barrier(self.group)

    def put_signal(self, rank, channel, timeout_ms):
        """Others wait for it in a barrier."""

    def wait_signal(self, rank, channel, timeout_ms):
        dist.barrier(self.group)


@contextmanager
def straight(least=2**14):
    """Parameters of as many bytes have hooks, which are those of experts here, and may travel in e4m3."""
    with (
        mock.patch.object(fsdp_gather, "STRAIGHT_BYTES", least),
        mock.patch.object(fsdp_e4m3, "LEAST_BYTES", least),
    ):
        yield


def copied(peers, pairs):
    """At once, in place of `Peers.copy`."""
    for to, source in pairs:
        to.copy_(source)
    return lambda: None


@contextmanager
def files_for_memory(rank):
    with ExitStack() as stack:
        stack.enter_context(straight())
        stack.enter_context(mock.patch.object(peers, "symmetric_memory", Files(rank)))
        stack.enter_context(mock.patch.object(peers.Peers, "copy", copied))
        stack.enter_context(mock.patch.object(fsdp, "reach_each_other", lambda gpus: True))
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
    in_e4m3=True,
    stores_gradients=True,
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
        engines.attach(*layers, layers, in_e4m3=in_e4m3, stores_gradients=stores_gradients)
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


def optimizer_of(layers, lr=1e-2, **options):
    return torch.optim.AdamW(layers.parameters(), lr, **options)


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


def agree(size, wanted, got):
    """On two ranks the bits are the same. More ranks add in another order, in at most the eight bits of bfloat16."""
    near = [(a.double() - b.double()).norm() <= 2**-7 * a.double().norm() for a, b in zip(wanted, got, strict=True)]
    return same(wanted, got) if size == 2 else all(near)


def on_cpu(function):
    """A case of processes that share memory of files."""

    def run(rank, size, group):
        with files_for_memory(rank):
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
            assert agree(size, wanted, got), options


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
    for options, of_layer in itertools.product(({"foreach": True}, {"fused": True}), ({}, {"precision": "fp8"})):
        of_layer = of_layer | {"force_sum": True}
        plain = layers_of(mesh, **of_layer)
        optimizer = optimizer_of(plain, **options)
        wanted = [trained(mesh, plain, optimizer=optimizer, first=first) for first in (0, STEPS)]
        layers, engines = layers_of(mesh, **of_layer), CopyEngines(mesh)
        optimizer, before = optimizer_of(layers, **options), list(layers.parameters())
        got = [trained(mesh, layers, optimizer=optimizer)]
        engines.attach(*layers)
        assert all(a is b for a, b in zip(before, layers.parameters(), strict=True)) and len(hooked(layers)) == 6
        state = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
        got.append(trained(mesh, layers, optimizer=optimizer, first=STEPS))
        assert all(agree(size, *pair) for pair in zip(wanted, got, strict=True))
        for assign in (False, True):
            layers.load_state_dict(copy.deepcopy(state[0]), assign=assign)
            if assign:
                expect(RuntimeError, "CopyEngines: parameters: expected those that", layers, tokens_of(mesh, 0))
                engines.attach(*layers)
                optimizer = optimizer_of(layers, **options)
            optimizer.load_state_dict(copy.deepcopy(state[1]))
            again = trained(mesh, layers, optimizer=optimizer, first=STEPS)
            assert agree(size, again, got[1]), assign
        twin = copy.deepcopy(before[1].detach())
        assert torch.equal(twin.to_local(), before[1].to_local())


@on_cpu
def fsdp_by_copies_of_parameters_that_are_copied(mesh, size):
    """A copy that becomes a module's parameter has the hooks of the one that it is of, which must not be gathered."""
    engines, x = CopyEngines(mesh), tokens_of(mesh, 0)
    for precision in (None, "fp8"):
        layers = layers_of(mesh, engines=engines, force_sum=True, precision=precision)
        before = layers(x)
        copies = {name: copy.deepcopy(parameter) for name, parameter in layers.named_parameters()}
        with torch.no_grad():
            for parameter in copies.values():
                parameter.mul_(2)
        layers.load_state_dict(copies, assign=True)
        expect(RuntimeError, "CopyEngines: parameters: expected those that", layers, x)
        engines.attach(*layers)
        after = layers(x)
        assert not torch.equal(before, after)
        engines.attach(*layers, in_e4m3=False)
        assert torch.equal(layers(x), after)
        layers[0].unshard()
        shown = [parameter.detach().clone() for parameter in layers[0].parameters()]
        layers[0].reshard()
        assert same([parameter.full_tensor() for parameter in layers[0].parameters()], shown)


@on_cpu
def fsdp_by_copies_after_a_gather_that_failed(mesh, size):
    """A module without the hooks of one parameter holds no memory of the other, so that others stay where they are."""
    engines, x = CopyEngines(mesh), tokens_of(mesh, 0)
    layers = layers_of(mesh, engines=engines, force_sum=True, prefetch=False)
    before = layers(x)
    copies = {name: copy.deepcopy(parameter) for name, parameter in layers.named_parameters()}
    layers[0].load_state_dict({"w2_storage": copies["0.w2_storage"]}, strict=False, assign=True)
    for _ in range(2):
        expect(RuntimeError, "CopyEngines: parameters: expected those that", layers, x)
    engines.attach(*layers)
    assert not any(shard.is_there for shard in engines._memory._used)
    assert torch.equal(layers(x), before) and len(engines._memory._banks) == 2


@on_cpu
def fsdp_by_copies_reads_no_weight_that_is_freed(mesh, size):
    kinds = (True, {}), (False, {}), (True, {"stores_gradients": False}), (True, {"precision": "fp8"})
    for trained, options in kinds:
        layers = layers_of(mesh, engines=CopyEngines(mesh), **options)
        layers[2].requires_grad_(trained)
        out = layers(tokens_of(mesh, 0).requires_grad_())
        layers[2].set_unshard_in_backward(False)
        expect(RuntimeError, "expected a gathered parameter, got one that", out.float().sum().backward)


@on_cpu
def fsdp_by_copies_frees_what_nobody_waits_for(mesh, size):
    """In backward FSDP2 prefetches a frozen module, which does not run, and drops what came."""
    for frozen in (1, 2):
        found = []
        for engines in (None, CopyEngines(mesh)):
            layers = layers_of(mesh, engines=engines, force_sum=True, prefetch=False)
            for layer in layers[:frozen]:
                layer.requires_grad_(False)
            optimizer = optimizer_of(layers[frozen:])
            for step in range(STEPS):
                loss_of(layers, tokens_of(mesh, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([parameter.detach().full_tensor() for parameter in layers.parameters()])
        assert agree(size, *found)
        for _ in range(2):
            engines.attach(*layers)  # gives modules the other bank
            loss_of(layers, tokens_of(mesh, 0)).backward()
        layers(tokens_of(mesh, 0))
        assert len(engines._memory._banks) == 2


@on_cpu
def fsdp_by_copies_that_find_no_memory(mesh, size):
    """A call of attach that fails changes nothing, neither before the first nor after it."""
    x, rooms = tokens_of(mesh, 0), []

    def room(memory, bank, name, form, device):
        if len(rooms) == 3:
            raise torch.OutOfMemoryError("no room")
        rooms.append(name)
        return memory.share(form, device)

    for options in ({"dtype": WHOLE}, {"precision": "fp8"}):
        engines, layers = CopyEngines(mesh), layers_of(mesh, force_sum=True, **options)
        want = layers(x)
        for _ in range(2):
            rooms.clear()
            with mock.patch.object(fsdp_memory.Memory, "room", room):
                expect(torch.OutOfMemoryError, "no room", engines.attach, *layers)
            assert torch.equal(layers(x), want)
            engines.attach(*layers)
            assert torch.equal(layers(x), want)


@on_cpu
def fsdp_by_copies_after_a_graph(mesh, size):
    """Replays leave the number of their capture, but attach is in none."""
    engines, layers = CopyEngines(mesh), layers_of(mesh, dtype=WHOLE, force_sum=True)
    want = layers(tokens_of(mesh, 0))
    engines._memory._capture = 7
    engines.attach(*layers)
    assert torch.equal(layers(tokens_of(mesh, 0)), want)


@on_cpu
def fsdp_by_copies_saves_what_can_be_loaded(mesh, size):
    parameters = list(layers_of(mesh, engines=CopyEngines(mesh), precision="fp8").parameters())
    expect(TypeError, "CopyEngines: pickle: expected the module's state_dict()", torch.save, parameters, io.BytesIO())
    saved = io.BytesIO()
    torch.save([parameter.detach() for parameter in parameters], saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert same([p.to_local() for p in parameters], [p.to_local() for p in loaded])


@on_cpu
def fsdp_in_a_graph_needs_addresses_that_stay(mesh, size):
    for dtype in (HALF, WHOLE):
        layers, x = layers_of(mesh, dtype=dtype, engines=CopyEngines(mesh)), tokens_of(mesh, 0)
        loss_of(layers, x).backward()
        with (
            mock.patch.object(fsdp_memory, "capture_of", lambda stream: 7),
            mock.patch.object(fsdp_memory, "granularity", lambda device: 2**21),
        ):
            expected = "CopyEngines: all-gather in a CUDA graph: expected parts of multiples of 2097152 bytes"
            expect(RuntimeError, expected, layers, x)


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
    assert agree(size, *found)


@on_cpu
def fsdp_by_copies_in_other_modes(mesh, size):
    """Inference, recomputed forwards, parameters gathered by hand, and all-gathers on the stream of the products."""
    x = tokens_of(mesh, 0)
    for reshard in (True, False):
        found = []
        for engines in (None, CopyEngines(mesh)):
            layers, results = layers_of(mesh, force_sum=True, reshard=reshard, engines=engines), []
            for _ in range(2):
                results += trained(mesh, layers, 1)
                with torch.inference_mode():
                    results.append(layers(x))
            out = torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False)
            out.float().sum().backward()
            for layer in layers:
                layer.unshard()
            results += [layers(x), *(p.detach().clone() for p in layers[1].parameters())]
            for layer in layers:
                layer.reshard()
            layers[0].unshard(async_op=True).wait()
            results += [p.detach().clone() for p in layers[0].parameters()]
            layers[0].reshard()
            layers._set_unshard_async_op(True)
            found.append(results + trained(mesh, layers, 1))
        assert agree(size, *found), reshard


@on_cpu
def fsdp_by_copies_beside_expert_parallelism(mesh, size):
    """Parameters that are DTensors already, of a mesh's other dimension; or whole on each rank of that dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor

    class Experts(torch.nn.Module):
        def __init__(self, mesh):
            super().__init__()
            torch.manual_seed(0)
            self.w = torch.nn.Parameter(distribute_tensor(torch.randn(8, 64, 64) / 8, mesh, [Shard(0)]))

        def forward(self, x):
            return torch.tanh(x @ self.w.to_local()).sum(0)

    if size < 4:
        return
    both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = trained(mesh, layers_of(both, force_sum=True))
    assert same(wanted, trained(mesh, layers_of(both, force_sum=True, engines=CopyEngines(both["shard"]))))
    both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("efsdp", "ep"))
    found = []
    for engines in (None, CopyEngines(both["efsdp"])):
        layers = torch.nn.Sequential(Experts(both["ep"]), Experts(both["ep"]))
        for layer in layers:
            fully_shard(layer, mesh=both["efsdp"])
            layer.set_force_sum_reduction_for_comms(True)
        if engines is not None:
            engines.attach(*layers)
            assert hooked(layers) == ["0.w", "1.w"]
        optimizer, results = optimizer_of(layers), []
        for step in range(3):
            out = layers(tokens_of(mesh, step).float())
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(out.detach())
        found.append(results + [p.to_local() for p in layers.parameters()])
    assert same(*found)


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
        engines.attach(odd)
    assert hooked(odd) == ["1.weight", "1.bias"]
    x = tokens_of(mesh, 0).float()
    for _ in range(3):
        assert torch.equal(odd(x), whole(x))
    alone = DeviceMesh.from_group([dist.new_group([rank]) for rank in range(size)][mesh.get_local_rank()], "cpu")
    other = fully_shard(torch.nn.Linear(4, 4), mesh=alone)
    expect(ValueError, "CopyEngines.attach: modules: expected one sharded over ranks [", engines.attach, other)
    with suppress(ImportError):  # of newer versions of torch
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

        whole = replicate(torch.nn.Linear(4, 4), mesh=mesh)
        expect(ValueError, "expected one sharded over ranks [", engines.attach, whole)
        infos = [FSDPMeshInfo(of, 0) for of in (mesh, alone)]
        over_both = torch.nn.Linear(4, 4)
        fully_shard(
            over_both, mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), infos[p.ndim - 1])
        )
        expect(ValueError, " and over [", engines.attach, over_both)
    before = layers_of(mesh)
    parameter = before[2]._get_fsdp_state()._fsdp_param_group.fsdp_params[-1]
    held = parameter.__dict__.pop("_orig_size")
    expect(TypeError, "CopyEngines.attach: modules: expected those of an FSDP2 that", engines.attach, *before)
    assert hooked(before) == []
    parameter._orig_size = held
    if size > 2:
        other = layers_of(mesh, reshard=2)[0]
        expect(ValueError, ", but fewer after forward", engines.attach, other)
