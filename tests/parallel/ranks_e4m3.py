"""Training under FSDP2 where copy engines bring the experts' weights in e4m3: with the bits of weights in bfloat16."""

import copy
import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moeblaze_cupy as mb
from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.fsdp import e4m3 as fsdp_e4m3
from tests.parallel.ranks_common import expect, gpu_case
from tests.parallel.ranks_copies import (
    HALF,
    STEPS,
    WHOLE,
    agree,
    hooked,
    layers_of,
    on_cpu,
    optimizer_of,
    same,
    straight,
    tokens_of,
    trained,
)

FP8 = {"precision": "fp8", "force_sum": True}


@contextmanager
def watched():
    """Lists how many experts were quantised in a call, and for every use of a parameter what had come and was read."""
    quantised, used = [], []
    quantize, read = mb.quantize_weights, fsdp_e4m3.Part.read

    def quantize_watched(w1, w2, *arguments, **options):
        quantised.append(len(w2))
        return quantize(w1, w2, *arguments, **options)

    def read_watched(part, orientation):
        used.append((set(part._here), orientation))
        return read(part, orientation)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mb, "quantize_weights", quantize_watched))
        stack.enter_context(mock.patch.object(fsdp_e4m3.Part, "read", read_watched))
        yield quantised, used


@on_cpu
def fsdp_in_e4m3(mesh, size):
    """Each rank quantises its own experts, once in forward and once in backward, and gathers what each pass reads."""
    plain = {"activation": "relu2", "expert_bias": True, "save": "fp8"}
    for options in ({}, {"dtype": WHOLE, "prefetch": False}, plain, {"save": "paper", "reduce_dtype": HALF}):
        options = FP8 | options
        # AdamW makes more of sums that are rounded at each addition.
        steps = 1 if size > 2 and "reduce_dtype" in options else STEPS
        wanted, engines = trained(mesh, layers_of(mesh, **options), steps), CopyEngines(mesh)
        layers = layers_of(mesh, **options, engines=engines)
        assert hooked(layers) == [f"{n}.{w}_storage" for n in range(3) for w in ("w1", "w2")]
        with watched() as (quantised, used):
            got = trained(mesh, layers, steps)
        assert set(quantised) == {8 // size} and len(quantised) >= 2 * 3 * steps, quantised
        assert used and all(here == {orientation} for here, orientation in used), used
        parts = [part for layer in layers for part in layer._fp8.gathered.parts]
        assert not any(array.untyped_storage().size() for part in parts for array in part.e4m3)
        in_bf16 = trained(mesh, layers_of(mesh, **options, engines=engines, in_e4m3=False), steps)
        assert same(got, in_bf16) and agree(size, wanted, got), options


@on_cpu
def fsdp_in_e4m3_where_both_passes_read_a_gather(mesh, size):
    """What did not come is made of what did, in the first step. Later gathers bring it."""
    engines = CopyEngines(mesh)
    for options in ({"reshard": False}, {"save": "recompute"}, {"reshard": False, "dtype": WHOLE, "prefetch": False}):
        options = FP8 | options
        wanted = trained(mesh, layers_of(mesh, **options, engines=engines, in_e4m3=False))
        layers, got = layers_of(mesh, **options, engines=engines), []
        optimizer = optimizer_of(layers)
        for step in range(STEPS):
            with watched() as (_, used):
                one = trained(mesh, layers, 1, optimizer=optimizer, first=step)
            got.append(one[0])
            made = [orientation for here, orientation in used if orientation not in here]
            assert bool(made) == (step == 0), (options, step, used)
        assert same(wanted, got + one[1:]), options


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def modes(layers, x):
    """By name, what a step may do with the layers; each returns a tensor for backward."""
    inside = copy.copy(layers._modules)

    def by_layer(**options):
        def run():
            out = x
            for layer in inside.values():
                out = checkpoint(layer, out, **options)
            return out

        return run

    def accumulated():
        layers.set_requires_gradient_sync(False)
        layers(x).float().square().sum().backward()
        layers.set_requires_gradient_sync(True)
        return layers(-x)

    def without_gradients():
        with torch.no_grad():
            first = layers(x)
        with torch.inference_mode():
            second = layers(x)
        return layers(x + first + second.clone())

    def under_a_mode():
        with Counting():
            return layers(x)

    def under_autocast():
        with torch.autocast(x.device.type, torch.bfloat16):
            return layers(x)

    def by_hand():
        for layer in inside.values():
            layer.unshard()
        return layers(x)

    def frozen():
        for layer in layers:
            layer.w1_storage.requires_grad_(False)
        return layers(x)

    def twice():
        return layers(layers(x))

    found = {"recomputed": by_layer(use_reentrant=False), "reentrant": by_layer(use_reentrant=True)}
    found |= {"whole": lambda: checkpoint(layers, x, use_reentrant=False)}
    others = accumulated, without_gradients, under_a_mode, under_autocast, by_hand, twice, frozen
    return found | {function.__name__: function for function in others}


def in_other_modes(mesh):
    """Recomputed forwards, accumulation, inference and operators give the bits of weights gathered in bfloat16."""
    engines = CopyEngines(mesh)
    for reshard, save in ((True, "minimal"), (False, "recompute")):
        found = []
        for in_e4m3 in (True, False):
            options = FP8 | {"reshard": reshard, "save": save, "in_e4m3": in_e4m3}
            layers, results = layers_of(mesh, **options, engines=engines), {}
            x = tokens_of(mesh, 0).requires_grad_()
            optimizer = optimizer_of(layers)
            layers(x)  # which makes it the root
            for name, mode in modes(layers, x).items():
                for turn in range(
                    1 + (name in ("recomputed", "reentrant", "whole"))
                ):  # the first turn makes what is missing
                    x.grad = None
                    out = mode()
                    out.float().square().sum().backward()
                    grads = [p.grad.full_tensor() for p in layers.parameters() if p.grad is not None]
                    results[name, turn] = [out.detach(), x.grad.clone(), *grads]
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(results)
        for name, got in found[0].items():
            assert same(found[1][name], got), (name, reshard, save)


@on_cpu
def fsdp_in_e4m3_in_other_modes(mesh, size):
    in_other_modes(mesh)


@on_cpu
def fsdp_in_e4m3_compiled(mesh, size):
    """torch.compile calls the experts between its graphs."""
    found = []
    for in_e4m3, compiled in ((True, True), (True, False), (False, True)):
        layers = layers_of(mesh, **FP8, engines=CopyEngines(mesh), in_e4m3=in_e4m3)
        if compiled:
            for layer in layers:
                layer.compile(backend="eager")
        found.append(trained(mesh, layers))
        torch._dynamo.reset()
    assert same(*found[:2]) and same(found[0], found[2])


@on_cpu
def fsdp_in_e4m3_leaves_the_rest(mesh, size):
    """Layers of bfloat16, with main gradients, in parts and below the threshold, and those that are served so."""
    engines = CopyEngines(mesh)
    hooks = [f"{n}.{w}_storage" for n in range(3) for w in ("w1", "w2")]
    kinds = [({}, hooks), ({**FP8, "in_e4m3": False}, hooks), ({**FP8, "accumulate_into_main_grad": True}, hooks)]
    for options, wanted in kinds:
        layers = layers_of(mesh, engines=engines, **options)
        assert hooked(layers) == wanted and all(layer._fp8.gathered is None for layer in layers), options
    with straight(2**40):
        layers = layers_of(mesh, **FP8, engines=engines)
    assert hooked(layers) == [] and all(layer._fp8.gathered is None for layer in layers)
    with straight(2**17):  # w1 of two layers, and w2 of one, are larger
        layers = layers_of(mesh, **FP8, engines=engines)
    assert [layer._fp8.gathered is not None for layer in layers] == [False, False, True] and len(hooked(layers)) == 3
    wanted, got = trained(mesh, layers_of(mesh, **FP8)), trained(mesh, layers)
    assert agree(size, wanted, got)
    engines.attach(*layers, in_e4m3=False)
    assert all(layer._fp8.gathered is None for layer in layers)
    trained(mesh, layers)


@on_cpu
def fsdp_in_e4m3_says_what_it_cannot(mesh, size):
    layers, x = layers_of(mesh, **FP8, engines=CopyEngines(mesh)), tokens_of(mesh, 0)
    layers(x)
    layers[0].unshard()
    w1 = layers[0].w1_storage
    assert w1.shape == (8, 192, 64) and w1.dtype == HALF and w1.requires_grad and "w1_storage" in repr(w1)
    assert not torch.zeros_like(w1).any() and w1.detach().shape == w1.shape
    text = "CopyEngines: w1_storage: expected the forward of its MoE alone to use what travels in e4m3"
    readers = w1.sum, w1.clone, w1.float, lambda: w1[0], lambda: x @ w1[0].T, lambda: torch.cat([w1, w1])
    for reader in (*readers, lambda: w1.detach().mul_(2), lambda: x.new_zeros(8, 192, 64).copy_(w1)):
        expect(RuntimeError, text, reader)
    expect(RuntimeError, "MoE: quantize_weights: expected whole parameters", layers[0].quantize_weights)
    layers[0].reshard()
    with torch.autocast("cpu", torch.float16):
        expect(TypeError, "moe: x: expected bfloat16 with precision='fp8', got autocast", layers, x)
    layers = layers_of(mesh, **FP8, engines=CopyEngines(mesh))
    out = layers(x.requires_grad_())
    layers[2].set_unshard_in_backward(False)
    expect(RuntimeError, "_storage: expected a gathered parameter, got one that", out.float().sum().backward)


@gpu_case
def fsdp_in_e4m3_on_gpus(rank, size, group):
    """The bits of NCCL's collectives on two ranks, and of weights gathered in bfloat16 on any number."""
    mesh, found = DeviceMesh.from_group(group, "cuda"), []
    kinds = [{}, {"reshard": False}, {"save": "recompute"}, {"activation": "relu2", "save": "fp8"}, {"prefetch": False}]
    with straight():
        for options, dtype in itertools.product(kinds, (HALF, WHOLE)):
            options = FP8 | options | {"dtype": dtype}
            wanted = trained(mesh, layers_of(mesh, **options))
            plain = trained(mesh, layers_of(mesh, **options, engines=CopyEngines(mesh), in_e4m3=False))
            layers = layers_of(mesh, **options, engines=CopyEngines(mesh))
            found.append((options, wanted, plain, trained(mesh, layers)))
            assert all(layer._fp8.gathered is not None for layer in layers)
    for options, wanted, plain, got in found:
        assert same(plain, got) and (size > 2 or same(wanted, got)), options


@gpu_case
def fsdp_in_e4m3_in_other_modes_on_gpus(rank, size, group):
    with straight():
        in_other_modes(DeviceMesh.from_group(group, "cuda"))
