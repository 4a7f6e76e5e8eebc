"""Training under FSDP2 on GPUs, by collectives of copy engines beside those of NCCL."""

import gc
import itertools
import random

import torch
from torch.distributed.device_mesh import DeviceMesh

from moeblaze_cupy.interop.fsdp import CopyEngines
from tests.parallel.ranks_common import expect, gpu_case
from tests.parallel.ranks_composition import PAGE
from tests.parallel.ranks_copies import (
    HALF,
    STEPS,
    WHOLE,
    hooked,
    layers_of,
    loss_of,
    optimizer_of,
    same,
    straight,
    tokens_of,
    trained,
)


@gpu_case
def fsdp_by_copy_engines(rank, size, group):
    """The bits of NCCL's on two ranks, whose sums have no order; gradients of bf16 may travel in it on any number."""
    mesh = DeviceMesh.from_group(group, "cuda")
    kinds = (WHOLE, WHOLE), (HALF, HALF)
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for least in (2**14, 2**40):  # parameters of experts come straight to their place, or none do
        with straight(least):
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


def steps(layers, mesh, wait=lambda: None):
    """Six, with forwards without gradients, after which all parts are changed at once."""
    optimizer, parts, results = optimizer_of(layers, 1e-3, fused=True), list(layers.parameters()), []
    for step in range(6):
        x = tokens_of(mesh, step, 512, 1024)
        with torch.no_grad():
            results.append(loss_of(layers, x))
            wait()
            for part in parts:
                part.mul_(1.01)
        loss = loss_of(layers, x)
        loss.backward()
        wait()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return results + [p.detach().full_tensor() for p in layers.parameters()]


def are_right(wanted, runs, size):
    """All runs have the same bits, on two ranks those wanted."""
    is_finite = all(value.isfinite().all() for value in wanted)
    return is_finite and all(same(runs[0], run) for run in runs) and (size > 2 or same(wanted, runs[0]))


def come_late(rank, size, group, **layer):
    """Copies of parts of 67 MB, or of half as many bytes in e4m3, have the bits of NCCL's where a rank comes late to
    read or to write its part."""
    mesh, found = DeviceMesh.from_group(group, "cuda"), []  # asserted at the end: no rank leaves the others waiting
    for dtype, (reshard, prefetch) in itertools.product((HALF, WHOLE), ((True, True), (True, False), (False, False))):
        layer |= {"dtype": dtype, "reshard": reshard, "prefetch": prefetch}
        options = {"widths": (1024, 4096, 2048, 4096), **layer}
        wanted, runs = steps(layers_of(mesh, **options), mesh), []
        for _ in range(3):
            layers = layers_of(mesh, **options, engines=CopyEngines(mesh))
            assert len(hooked(layers)) == 6
            runs.append(steps(layers, mesh, late(layers, rank)))
        found.append((are_right(wanted, runs, size), options))
        del wanted, runs, layers
        gc.collect()  # engines have gigabytes, and cycles
    assert all(is_right for is_right, _ in found), found


@gpu_case
def fsdp_ranks_come_late(rank, size, group):
    come_late(rank, size, group)


@gpu_case
def fsdp_ranks_come_late_in_e4m3(rank, size, group):
    come_late(rank, size, group, precision="fp8")


def replayed(layers, mesh, d, in_graph, updates):
    """Losses, and each gradient and parameter after every step. Tokens change between the steps, and weights there or,
    by `updates`, in them."""
    x, results, parts = tokens_of(mesh, 0, 512, d), [], list(layers.parameters())

    def update():
        with torch.no_grad():
            for part in parts:
                part.sub_(part.grad, alpha=10)

    def step():
        loss = loss_of(layers, x)
        loss.backward()
        if updates:
            update()
        return loss.detach()

    def forget():
        for part in parts:
            part.grad = None

    if in_graph:
        graph, captured = PAGE.capture(step, parts)
    else:
        for _ in range(2):  # as `capture` does
            step()
            forget()
    for number in range(4):
        x.copy_(tokens_of(mesh, number, 512, d))
        if in_graph:
            graph.replay()
            results.append(captured.clone())
        else:
            forget()
            results.append(step())
        results += [part.grad.to_local().clone() for part in parts]
        if not updates:
            update()
        results += [part.to_local().clone() for part in parts]
    forget()
    results.append(step())  # called by the host after replays
    return results


@gpu_case
def fsdp_steps_in_a_graph(rank, size, group):
    """Replays have the bits of steps that the host calls, of odd numbers of layers, and where a rank comes late."""
    mesh, found = DeviceMesh.from_group(group, "cuda"), []
    wide, narrow = {"widths": (1024, 4096, 2048, 4096)}, {"widths": (64, 96, 32, 160)}
    kinds = [wide, wide | {"precision": "fp8"}, wide | {"reshard": False}, wide | {"stores_gradients": False}, narrow]
    for (options, dtype), updates in zip(
        itertools.product(kinds, (HALF, WHOLE)), itertools.cycle((True, False, False))
    ):
        runs = []
        for in_graph in (False, True):
            layers = layers_of(mesh, **options, dtype=dtype, engines=CopyEngines(mesh))
            assert len(hooked(layers)) == (0 if options is narrow else 6)
            late(layers, rank)
            runs.append(replayed(layers, mesh, options["widths"][0], in_graph, updates))
        if options is wide and dtype == HALF:
            layers[0].set_reshard_after_forward(False)
            expected = (
                "CopyEngines: all-gather in a CUDA graph: expected the order of gathers, and reshard_after_forward"
            )
            expect(RuntimeError, expected, layers, tokens_of(mesh, 0, 512, 1024))
        found.append((are_right(runs[0], runs[1:], 2), options, dtype))
        del runs, layers
        gc.collect()
    assert all(is_right for is_right, *_ in found), found
