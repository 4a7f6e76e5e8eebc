"""Weight gradients under FSDP2 that the products store in the memory of the rank that sums them."""

import gc
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.fsdp.sums import GradientSums
from moeblaze_cupy.interop.torch import MoE
from moeblaze_cupy.layer import backward_api as backward
from tests.parallel.ranks_common import gpu_case
from tests.parallel.ranks_copies import (
    HALF,
    WHOLE,
    agree,
    layers_of,
    loss_of,
    on_cpu,
    same,
    straight,
    tokens_of,
    trained,
)
from tests.parallel.ranks_fsdp import are_right, late, steps


@contextmanager
def counted():
    """Counts the gradients that are stored, by name."""
    names, plain = [], GradientSums.sum

    def sum_and_count(self, weights, pending):
        names.extend(weights)
        plain(self, weights, pending)

    with mock.patch.object(GradientSums, "sum", sum_and_count):
        yield names


def gradients_of(layers):
    return [None if p.grad is None else p.grad.full_tensor().clone() for p in layers.parameters()]


@on_cpu
def fsdp_stores_gradients(mesh, size):
    """As often as asked for; where FSDP2 is to reduce them, it does. Gradients and divisors are those of FSDP2."""
    x, found = tokens_of(mesh, 0), []
    for stores in (False, True):
        layers, results = layers_of(mesh, engines=CopyEngines(mesh), force_sum=True, stores_gradients=stores), []

        def backward_and(number, layers=layers, results=results, stores=stores):
            """Of one backward, which stores this many gradients."""
            with counted() as names:
                loss_of(layers, x).backward()
            assert len(names) == number * stores, (len(names), number)
            results.extend(gradients_of(layers))

        backward_and(6)
        backward_and(6)  # adds up on what is there
        layers.zero_grad()
        layers.set_requires_gradient_sync(False)
        backward_and(0)
        layers.set_requires_gradient_sync(True)
        backward_and(0)  # adds up with what each rank has kept
        layers.zero_grad()
        for layer in layers:
            layer.set_gradient_divide_factor(4.0)
        backward_and(6)
        layers.zero_grad()
        layers[1].w1_storage.requires_grad_(False)
        backward_and(5)
        layers.zero_grad()
        seen = []
        handle = layers[2].w2_storage.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad))
        backward_and(3)
        assert len(seen) == 1
        handle.remove()
        found.append([value for value in results if value is not None])
    assert agree(size, *found)


@on_cpu
def fsdp_stores_no_gradients_of_other_tensors(mesh, size):
    """torch.autograd.grad by the input changes no .grad; a rank without tokens takes part."""
    layers = layers_of(mesh, engines=CopyEngines(mesh), force_sum=True)
    x = tokens_of(mesh, 0).requires_grad_()
    with counted() as names:
        (grad,) = torch.autograd.grad(loss_of(layers, x), x)
    assert not names and grad.isfinite().all() and all(p.grad is None for p in layers.parameters())
    found = []
    for stores in (False, True):
        layers = layers_of(mesh, engines=CopyEngines(mesh), force_sum=True, stores_gradients=stores)
        x = tokens_of(mesh, 0, 0 if mesh.get_local_rank() == 1 else 40)
        layers(x).float().sum().backward()
        found.append(gradients_of(layers))
    assert agree(size, *found)


@on_cpu
def fsdp_sums_gradients_that_multiply_e4m3(mesh, size):
    """The products do not store those: FSDP2 reduces them, to the bits without `stores_gradients`."""
    x = tokens_of(mesh, 0)
    for in_e4m3 in (False, True):
        options = {
            "precision": "fp8",
            "fp8_wgrad": True,
            "force_sum": True,
            "widths": (64, 128, 64),
            "in_e4m3": in_e4m3,
        }
        found = []
        for stores in (False, True):
            layers = layers_of(mesh, engines=CopyEngines(mesh), stores_gradients=stores, prefetch=False, **options)
            with counted() as names:
                loss_of(layers, x).backward()
            assert not names, names
            found.append(gradients_of(layers))
        assert all(grad is not None and grad.any() for grad in found[0]) and same(*found), in_e4m3


class Eighth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad / 8


@on_cpu
def fsdp_stores_gradients_as_autograd_would(mesh, size):
    """What lies between the layer and a parameter counts, and a memory order that saved tensors come back in."""
    x = tokens_of(mesh, 0)

    experts, inside = MoE._experts, []

    def scaled(layer, *given):
        inside.append(layer)
        try:
            return experts(layer, *given)
        finally:
            inside.pop()

    def attribute(layer, name):
        found = torch.nn.Module.__getattr__(layer, name)
        return Eighth.apply(found) if inside and name in ("w1_storage", "w2_storage") else found

    scaling = {"_experts": scaled, "_gathered_experts": scaled, "__getattr__": attribute}

    def packed(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)

    ways = {
        "scaled": (mock.patch.multiple(MoE, create=True, **scaling), 0),
        "packed": (torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor), 6),
        "all reduced": (nullcontext(), 0),
    }
    for name, (way, number) in ways.items():
        found = []
        for stores in (False, True):
            options = {"widths": (64, 64, 96, 32), "activation": "relu2", "force_sum": True, "stores_gradients": stores}
            layers = layers_of(mesh, engines=CopyEngines(mesh), **options)
            if name == "all reduced":
                if not hasattr(layers[0], "set_reduce_scatter_unused_params"):
                    break
                for layer in layers:
                    layer.set_reduce_scatter_unused_params(True)
            with counted() as names, way:
                loss_of(layers, x).backward()
            assert len(names) == number * stores, name
            found.append(gradients_of(layers))
        assert not found or agree(size, *found), name
    layers = layers_of(mesh, engines=CopyEngines(mesh), reshard=False)
    weights = layers(x) is not None and [layers[1].w1_storage, layers[1].w2_storage]
    with counted() as names:
        grads = torch.autograd.grad(loss_of(layers, x), weights)
    assert names == [] and all(grad.any() for grad in grads) and all(weight.grad is None for weight in weights)


@gpu_case
def fsdp_stores_gradients_on_gpus(rank, size, group):
    """By Hopper's kernels, with the bits of FSDP2's reduction on two ranks, also where ranks come late."""
    mesh, found, served = DeviceMesh.from_group(group, "cuda"), [], []
    plain = backward.summed_weights

    def note(*arguments):
        served.append(plain(*arguments))
        return served[-1]

    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    with mock.patch.object(backward, "summed_weights", note):
        for dtype in (HALF, WHOLE):
            for layer in ({}, {"precision": "fp8"}, {"activation": "relu2"}):
                options = {"dtype": dtype, "reduce_dtype": WHOLE, "widths": (1024, 4096, 2048, 4096), **layer}
                by_fsdp = steps(layers_of(mesh, **options, engines=CopyEngines(mesh), stores_gradients=False), mesh)
                served.clear()
                runs = []
                for _ in range(3):
                    layers = layers_of(mesh, **options, engines=CopyEngines(mesh))
                    runs.append(steps(layers, mesh, late(layers, rank)))
                by_kernels = all(served) or not is_hopper
                found.append((by_kernels and are_right(by_fsdp, runs, size), options))
                del by_fsdp, runs, layers
                gc.collect()  # engines have gigabytes, and cycles
        with straight():
            options = {"widths": (64, 200, 96, 328), "reduce_dtype": WHOLE}
            runs = [
                trained(mesh, layers_of(mesh, **options, engines=CopyEngines(mesh), stores_gradients=stores))
                for stores in (False, True, True, True)
            ]
            found.append((are_right(runs[0], runs[1:], size), options))
    assert all(is_right for is_right, _ in found), found


@gpu_case
def fsdp_stores_gradients_without_tokens(rank, size, group):
    """A rank without tokens stores by copies, which the others need not know; experts without tokens get the others'
    sums."""
    mesh = DeviceMesh.from_group(group, "cuda")
    found = []
    for stores in (False, True):
        layers = layers_of(mesh, engines=CopyEngines(mesh), stores_gradients=stores, widths=(1024, 4096, 2048, 4096))
        for step in range(4):
            layers(tokens_of(mesh, step, 0 if rank == step % size else 3, 1024)).float().sum().backward()
        found.append(gradients_of(layers))
    assert size > 2 or same(*found)
