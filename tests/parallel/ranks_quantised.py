"""Cases of frozen weights in four and eight bits over ranks, beside one process with their numbers in float64."""

import copy

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moeblaze_cupy as mb
from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.types import FACTORS, NestedScales, QuantizedWeight
from tests.parallel.ranks_common import D, E, Inputs, case, counts_of, difference, expect, gpu_case
from tests.parallel.ranks_exchange import peers_over_gloo
from tests.parallel.ranks_gpus import GPU_ROUTES, on_gpu
from tests.parallel.ranks_lora import ROUTES, part_of, wanted
from tests.quantised.cases import random_weight

# float32 has 24 bits. Sums of up to 300 terms of unit scale, in four products after each other, lose five of them.
SINGLE = 2.0**-19
NESTED = 512  # the hidden width for which w1 of D columns is whole blocks of nested scales


def factors_of(h, shared=False, ranks=(2, 5), d=D):
    rng, sizes = torch.Generator().manual_seed(7), ((d, 2 * h), (h, d))
    made = []
    for rank, (inner, outer) in zip(ranks, sizes, strict=True):
        made.append(torch.randn(*(() if shared else (E,)), rank, inner, generator=rng) / inner**0.5)
        made.append(torch.randn(E, outer, rank, generator=rng) / rank**0.5)
    return mb.Lora(*made, 0.5, 2.0)


def packed(inputs, formats):
    """The weights of all experts in formats, of which None leaves one that trains, and inputs with their numbers."""
    weights, numbers = [], copy.copy(inputs)
    for place, (name, format) in enumerate(zip(("w1", "w2"), formats, strict=True)):
        weight = getattr(inputs, name)
        if format == "nested":
            made = random_weight(format, tuple(weight.shape))
            nested = NestedScales(*map(torch.from_numpy, made.nested))
            data, scales = torch.from_numpy(made.data), torch.from_numpy(made.scales)
            weight = made._replace(data=data, scales=scales, nested=nested, dtype="float32")
        elif format is not None:
            weight = mb.quantize_experts(inputs.w1, inputs.w2, format)[place]
        if format is not None:
            setattr(numbers, name, mb.dequantize(weight).transpose(1, 2))
        weights.append(weight)
    return weights, numbers


def of_experts(weight, experts):
    """A slice of a weight, which the layer's first two dimensions after E do not change."""
    nested = weight.nested and weight.nested._replace(absmax=weight.nested.absmax[experts].clone())
    data, scales = weight.data[experts].clone(), weight.scales[experts].clone()
    return weight._replace(data=data, scales=scales, nested=nested, shape=(len(data), *weight.shape[1:]))


def results_of(inputs, weights, experts, lora=None, layer=expert_parallel_moe, trains=(False, False), **options):
    x, ids, router_weights, *_ = inputs.local()
    here, leaves = [], {"x": x, "weights": router_weights}
    for name, weight, trained in zip(("w1", "w2"), weights, trains, strict=True):
        if isinstance(weight, QuantizedWeight):
            here.append(of_experts(weight, inputs.experts))
            continue
        here.append(inputs.leaf(weight, inputs.experts).requires_grad_(trained))
        if trained:
            leaves[name] = here[-1]
    if lora is not None:
        options["lora"] = part_of(lora, inputs.experts)
        leaves |= {f"lora.{n}": f for n, f in zip(FACTORS, options["lora"].factors, strict=True)}
    out = layer(x, ids, router_weights, *here, experts, **options)
    out.backward(inputs.grad[inputs.here])
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    for name, grad in grads.items():
        if name.startswith("lora.") and grad.dim() == 2:
            dist.all_reduce(grad, group=experts.group)
    return {"out": out.detach(), **grads}


def in_float64(inputs, lora):
    if lora is not None:
        return wanted(inputs, lora)
    doubled = copy.copy(inputs)
    for name in ("x", "grad", "weights", "w1", "w2"):
        setattr(doubled, name, getattr(inputs, name).double())
    return doubled.whole()


def compare(inputs, formats, experts, lora=None, **options):
    """Every result by name, and the bits of the same ranks with the numbers of the weights in their place."""
    weights, numbers = packed(inputs, formats)
    trains = [format is None for format in formats]
    got = results_of(inputs, weights, experts, lora, trains=trains, **options)
    want = in_float64(numbers, lora)
    assert want.keys() - got.keys() == {n for n, trained in zip(("w1", "w2"), trains, strict=True) if not trained}
    plain = results_of(numbers, (numbers.w1, numbers.w2), experts, lora, trains=trains, **options)
    assert got.keys() == plain.keys()
    for name, value in got.items():
        error = difference(value, want[name])
        assert error <= SINGLE, f"{name}: {error}"
        assert bool(value.any()) == bool(want[name].any()), name
        assert torch.equal(value, plain[name]), f"{name} has other bits"


@case
def frozen_weights_over_ranks(rank, size, group):
    """Every route, pieces, and rows that are sent again; both weights packed, and one beside one that trains."""
    with peers_over_gloo():
        for route, options in ROUTES:
            experts = ExpertGroup(group, E, route=route, **options)
            for kind in ("equal",) if route == "static" else ("uneven", "none_here"):
                for routing, formats in (
                    ("random", ("int8", "int8")),
                    ("absent", ("nf4", "e4m3")),
                    ("one_rank", ("e4m3", None)),
                    ("duplicate", (None, "int8")),
                ):
                    inputs = Inputs(rank, counts_of(size, kind), routing, dtype=torch.float32, h=32)
                    compare(inputs, formats, experts)
    experts = ExpertGroup(group, E)
    for save in ("paper", "recompute"):
        inputs = Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32, h=32)
        compare(inputs, ("nf4", "nf4"), experts, save=save)
    compare(Inputs(rank, [0] * size, dtype=torch.float32, h=32), ("int8", "nf4"), experts)
    compare(Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32, h=NESTED), ("nested", "int8"), experts)


@case
def factors_beside_frozen_weights(rank, size, group):
    with peers_over_gloo():
        for route, options in (("exact", {}), ("exact", {"slots": 20}), ("pull", {"keep_received": False})):
            experts = ExpertGroup(group, E, route=route, **options)
            for kind, formats in (("uneven", ("int8", "nf4")), ("none_here", (None, "e4m3"))):
                inputs = Inputs(rank, counts_of(size, kind), "absent", dtype=torch.float32, h=32)
                compare(inputs, formats, experts, factors_of(32))
    inputs = Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32, h=32)
    compare(inputs, ("nf4", "nf4"), ExpertGroup(group, E), factors_of(32, shared=True))


@case
def frozen_weights_with_autocast_checkpointing_and_no_grad(rank, size, group):
    experts, lora = ExpertGroup(group, E), factors_of(32)
    inputs = Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32, h=32)

    for reentrant in (False, True):

        def again(x, ids, weights, w1, w2, experts, lora, reentrant=reentrant):
            def layer(x, weights, *factors):
                return expert_parallel_moe(x, ids, weights, w1, w2, experts, lora=lora.with_factors(factors))

            return checkpoint(layer, x, weights, *lora.factors, use_reentrant=reentrant)

        compare(inputs, ("int8", "nf4"), experts, lora, layer=again)
    weights, _ = packed(inputs, ("int8", "nf4"))
    in_half = [of_experts(weight, inputs.experts)._replace(dtype="bfloat16") for weight in weights]
    x, ids, router_weights, *_ = inputs.local()
    with torch.autocast("cpu", torch.bfloat16):
        out = expert_parallel_moe(x, ids, router_weights, *in_half, experts)
    out.backward(torch.ones_like(out))
    halved = x.detach().bfloat16().requires_grad_()
    want = expert_parallel_moe(halved, ids, router_weights, *in_half, experts)
    want.backward(torch.ones_like(want))
    assert torch.equal(out, want) and torch.equal(x.grad, halved.grad.float())
    with torch.no_grad():
        assert torch.equal(expert_parallel_moe(halved, ids, router_weights, *in_half, experts), want)


@case
def frozen_weights_are_checked(rank, size, group):
    """Errors of one rank reach all, and the ranks go on."""
    experts = ExpertGroup(group, E)
    inputs = Inputs(rank, counts_of(size, "equal"), dtype=torch.float32, h=32)
    weights, _ = packed(inputs, ("int8", "nf4"))
    w1, w2 = (of_experts(weight, inputs.experts) for weight in weights)
    x, ids, router_weights, *plain = inputs.local()
    halves = plain[0].chunk(2, 2)
    scales = w1.scales.clone().requires_grad_()
    for given, options, error, text in (
        (weights[0], {}, ValueError, f"w1: expected the ({E // size}, d, 2h) of this rank's experts"),
        (w1._replace(shape=None), {}, ValueError, f"w1: expected the ({E // size}, d, 2h) of this rank's experts"),
        (w1._replace(data=w1.data.numpy()), {}, TypeError, "w1.data: expected a torch tensor, got <class 'numpy"),
        (w1._replace(data=w1.data.to("meta")), {}, TypeError, "w1.data: expected x's device cpu, got meta"),
        (w1._replace(scales=scales), {}, ValueError, "w1.scales: expected a part that requires no gradient"),
        (w1._replace(scales=w1.scales[:, 1:]), {}, ValueError, "w1.scales: expected shape (E, N, 1) = "),
        (w1._replace(dtype="bfloat16"), {}, TypeError, "w1: expected dtype float32, that of x, got bfloat16"),
        ((w1, halves[1]), {}, TypeError, "w1: expected tensors in a pair, or one QuantizedWeight of both"),
        ((halves[0], w1), {}, TypeError, "w1[1]: expected a torch tensor, got"),
        (
            w1,
            {"precision": "fp8"},
            ValueError,
            "precision: expected None with QuantizedWeight, unless w1 and w2 are in",
        ),
        (w1, {"accumulate_into_main_grad": True}, ValueError, "accumulate_into_main_grad: expected False with lora"),
    ):
        others = (ValueError, "moe: arguments: expected ones that pass the checks on all ranks, got errors on [1]")
        expected = (error, f"expert_parallel_moe: {text}") if rank == 1 else others
        chosen, told = (given, options) if rank == 1 else (w1, {})
        call = lambda g=chosen, o=told: expert_parallel_moe(x, ids, router_weights, g, w2, experts, **o)  # noqa: E731
        expect(*expected, call)
    compare(inputs, ("int8", "nf4"), experts)


@gpu_case
def frozen_weights_on_gpus(rank, size, group):
    """Every route in bf16: the bits of the same ranks with the decoded weights, twice, beside factors in float32."""
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for name, options in (*GPU_ROUTES.items(), ("pull by kernels", {"route": "pull"}), ("pieces", {"slots": 20})):
        experts = ExpertGroup(group, E, **options)
        experts.peers.copies = name != "pull by kernels"
        kind = "equal" if experts.route == "static" else "uneven"
        inputs = on_gpu(Inputs(rank, counts_of(size, kind), "absent", h=32), torch.bfloat16)
        lora = factors_of(32)
        for beside in (None, lora.with_factors(factor.cuda() for factor in lora.factors)):
            weights, numbers = packed(inputs, ("int8", "nf4"))
            given = weights, weights, (numbers.w1, numbers.w2)
            found.append([results_of(inputs, each, experts, beside) for each in given])
    for runs in found:
        for name, value in runs[0].items():
            assert value.any(), name
            assert all(torch.equal(value, run[name]) for run in runs[1:]), name
