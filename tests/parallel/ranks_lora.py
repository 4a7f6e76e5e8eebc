"""Cases of layers with low-rank factors over ranks, beside one process with the weights W + scale * B A in float64."""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import moeblaze_cupy as mb
from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.parallel import ExpertGroup, clip_grad_norm_, collect, exchange, expert_parallel_moe
from moeblaze_cupy.interop.torch import MoE, moe
from moeblaze_cupy.types import FACTORS
from tests.lora.lora_cases import exact
from tests.parallel.ranks_common import D, E, H, Inputs, case, counts_of, difference, expect, gpu_case
from tests.parallel.ranks_composition import Meshes, batches, model_of, shapes_of, whole
from tests.parallel.ranks_copies import hooked, on_cpu, straight
from tests.parallel.ranks_exchange import peers_over_gloo
from tests.parallel.ranks_gpus import GPU_ROUTES, on_gpu
from tests.torch_versions import NO_SUMS_OF_SHARDING, needs_none

ROUTES = (
    ("exact", {}),
    ("exact", {"slots": 20}),  # in pieces
    ("exact", {"keep_received": False}),
    ("static", {}),
    ("pull", {}),
    ("pull", {"keep_received": False}),
)
# Sums of up to 300 terms of unit scale, and of three products after each other, in float64.
EXACT = 1e-13
BOTH = (2, 5)  # ranks of the factors
IN_FP8 = {"precision": "fp8"}


def factors_of(ranks=BOTH, shared=False, dtype=torch.float64):
    """Of all E experts. ranks: None for a pair that is missing. b1 and b2 lie as peft has them, (columns, r, E)."""
    rng, made = torch.Generator().manual_seed(11), []
    for rank, inner, outer in zip(ranks, (D, H), (2 * H, D), strict=True):
        if rank is None:
            made += [None, None]
            continue
        a = torch.randn(E, rank, inner, generator=rng, dtype=torch.float64) / inner**0.5
        b = torch.randn(outer, rank, E, generator=rng, dtype=torch.float64) / rank**0.5
        made += [(a[0] if shared else a).to(dtype), b.to(dtype).permute(2, 0, 1)]
    return mb.Lora(*made, 0.5, 2.0)


def part_of(lora, experts):
    """The factors of these experts, as leaves. What all experts share is whole."""
    return lora.with_factors(
        None if f is None else (f if f.dim() == 2 else f[experts]).detach().clone().requires_grad_()
        for f in lora.factors
    )


def wanted(inputs, lora):
    """By name, of this rank's tokens and experts. The gradient of a factor that is shared is that of all experts."""
    w1 = (
        tuple(half.double().numpy() for half in inputs.w1)
        if isinstance(inputs.w1, tuple)
        else inputs.w1.double().numpy()
    )
    arrays = inputs.x, inputs.ids, inputs.weights, inputs.w2, inputs.grad
    x, ids, weights, w2, grad = (t.numpy() if t.dtype == torch.int32 else t.double().numpy() for t in arrays)
    given = lora.with_factors(None if f is None else f.double().numpy() for f in lora.factors)
    found = exact((x, ids, weights, w1, w2, grad), given)
    if isinstance(w1, tuple):
        found["w1"] = np.concatenate(found["w1"], axis=2)
    own = {"out": inputs.here, "x": inputs.here, "weights": inputs.here}
    parts = {name: own.get(name, inputs.experts) for name in found if found[name].ndim != 2 or name in own}
    return {name: torch.from_numpy(value[parts[name]] if name in parts else value) for name, value in found.items()}


def results_of(inputs, experts, lora, trained=True, layer=expert_parallel_moe, **options):
    x, ids, weights, w1, w2 = inputs.local()
    halves = w1 if isinstance(w1, tuple) else (w1,)
    for weight in (*halves, w2):
        weight.requires_grad_(trained)
    here = part_of(lora, inputs.experts)
    out = layer(x, ids, weights, w1, w2, experts, lora=here, **options)
    out.backward(inputs.grad[inputs.here].to(out.dtype))
    got = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    if trained:
        got |= {"w1": torch.cat([half.grad for half in halves], 2), "w2": w2.grad}
    else:
        assert all(weight.grad is None for weight in (*halves, w2))
    for name, factor in zip(FACTORS, here.factors, strict=True):
        if factor is None:
            continue
        assert factor.grad.dtype == factor.dtype, name
        if factor.dim() == 2:
            dist.all_reduce(factor.grad, group=experts.group)
        got[f"lora.{name}"] = factor.grad
    return got


def compare(inputs, experts, lora, tolerance=EXACT, trained=True, **options):
    got = results_of(inputs, experts, lora, trained, **options)
    compared(inputs, lora, got, tolerance, trained)
    return got


def compared(inputs, lora, got, tolerance, trained):
    want = wanted(inputs, lora)
    assert got.keys() == (want.keys() if trained else want.keys() - {"w1", "w2"})
    for name, value in got.items():
        error = difference(value, want[name])
        assert error <= tolerance, f"{name}: {error}"
        assert bool(value.any()) == bool(want[name].any()), name


@case
def factors_beside_experts(rank, size, group):
    """Every route and form: experts trained and frozen, pieces, rows that are sent again; a second run has the bits."""
    with peers_over_gloo():
        for route, options in ROUTES:
            experts = ExpertGroup(group, E, route=route, **options)
            for kind in ("equal",) if route == "static" else ("uneven", "none_here"):
                for routing, pair, ranks, trained in (
                    ("random", False, BOTH, False),
                    ("absent", True, BOTH, True),
                    ("one_rank", False, (3, None), False),
                    ("duplicate", False, (None, 1), True),
                ):
                    inputs, lora = Inputs(rank, counts_of(size, kind), routing, pair=pair), factors_of(ranks)
                    got = compare(inputs, experts, lora, trained=trained)
                    again = results_of(inputs, experts, lora, trained)
                    assert all(torch.equal(got[name], again[name]) for name in got), (route, kind, routing)
    for save in ("paper", "recompute"):
        compare(Inputs(rank, counts_of(size, "uneven")), ExpertGroup(group, E), factors_of(), save=save)
    compare(Inputs(rank, [0] * size), ExpertGroup(group, E), factors_of())


@case
def factors_alone_are_trained(rank, size, group):
    """As in a first layer with a frozen router: no gradient travels back."""
    inputs, lora = Inputs(rank, counts_of(size, "uneven"), "absent"), factors_of()
    want = wanted(inputs, lora)
    with peers_over_gloo():
        for route in ("exact", "pull"):
            experts, here = ExpertGroup(group, E, route=route), part_of(lora, inputs.experts)
            arguments = (t.detach() for t in inputs.local())
            expert_parallel_moe(*arguments, experts, lora=here).backward(inputs.grad[inputs.here])
            for name, factor in zip(FACTORS, here.factors, strict=True):
                assert difference(factor.grad, want[f"lora.{name}"]) <= EXACT, (route, name)


@case
def factors_that_experts_share(rank, size, group):
    """Each rank has its experts' part of the gradient, which is the caller's to sum."""
    for options in ({}, {"slots": 20}):
        inputs = Inputs(rank, counts_of(size, "uneven"))
        compare(inputs, ExpertGroup(group, E, **options), factors_of(shared=True), trained=False)


@case
def factors_in_other_dtypes(rank, size, group):
    """Float32 beside bf16; of pieces the gradients are summed in float32, and rounded once."""
    inputs = Inputs(rank, counts_of(size, "uneven"), dtype=torch.bfloat16)
    # bf16 has 8 bits. Three roundings in a row of independent terms stay within 1.5 * 2^-8, a fourth is over ranks.
    for options in ({}, {"slots": 20}):
        experts = ExpertGroup(group, E, **options)
        in_half = factors_of(dtype=torch.bfloat16)
        in_single = in_half.with_factors(factor.float() for factor in in_half.factors)
        of_both = [compare(inputs, experts, lora, 2 * 2.0**-8, trained=False) for lora in (in_half, in_single)]
        for name, value in of_both[0].items():
            assert torch.equal(value, of_both[1][name].to(value.dtype)), name


@case
def factors_under_autocast_and_checkpointing(rank, size, group):
    experts = ExpertGroup(group, E)
    inputs, lora = Inputs(rank, counts_of(size, "uneven")), factors_of()

    for reentrant in (False, True):

        def again(x, ids, weights, w1, w2, experts, lora, reentrant=reentrant):
            def layer(x, weights, *factors):
                return expert_parallel_moe(x, ids, weights, w1, w2, experts, lora=lora.with_factors(factors))

            return checkpoint(layer, x, weights, *lora.factors, use_reentrant=reentrant)

        compare(inputs, experts, lora, trained=False, layer=again)
    inputs, lora = Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32), factors_of(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = results_of(inputs, experts, lora, trained=False)
    assert got["out"].dtype == torch.bfloat16 and got["x"].dtype == got["lora.a1"].dtype == torch.float32
    halved = Inputs(rank, counts_of(size, "uneven"), dtype=torch.float32)
    halved.x, halved.w1, halved.w2, halved.grad = (t.bfloat16() for t in (inputs.x, inputs.w1, inputs.w2, inputs.grad))
    want = results_of(halved, experts, lora, trained=False)
    for name, value in want.items():
        assert torch.equal(got[name].to(value.dtype), value), name


@case
def factors_between_exchange_and_collect(rank, size, group):
    def layer(x, ids, weights, w1, w2, experts, lora):
        rows, local_ids, got, route = exchange(x, ids, weights, experts)
        return collect(moe(rows, local_ids, got, w1, w2, lora=lora), route)

    inputs = Inputs(rank, counts_of(size, "uneven"), "absent")
    compare(inputs, ExpertGroup(group, E), factors_of(), layer=layer)


@case
def factors_are_checked(rank, size, group):
    """Errors of one rank reach all, and the ranks go on."""
    experts = ExpertGroup(group, E)
    inputs, lora = Inputs(rank, counts_of(size, "equal")), factors_of()
    *layer, w1, w2 = inputs.local()
    here = part_of(lora, inputs.experts)
    for given, options, error, text in (
        (tuple(here), {}, TypeError, "lora: expected moeblaze_cupy.Lora or None, got"),
        (here._replace(b1=None), {}, ValueError, "lora.b1: expected a1 and b1, or neither, got None"),
        (here._replace(a1=here.a1.detach().numpy()), {}, TypeError, "lora.a1: expected a torch tensor, got"),
        (here._replace(a1=here.a1.detach().to("meta")), {}, TypeError, "lora.a1: expected x's device cpu, got meta"),
        (lora, {}, ValueError, f"lora.a1: expected shape (E, r, d) = ({E // size}, any, {D}), got ({E}, 2, {D})"),
        (here._replace(b2=here.b2.half()), {}, TypeError, "lora.b2: expected dtype"),
        (here, IN_FP8 | {"row_precision": "fp8"}, ValueError, "row_precision: expected None with lora, as factors"),
        (here, IN_FP8 | {"fp8_wgrad": True}, ValueError, "fp8_wgrad: expected False with low-rank factors, got True"),
        (here, {"accumulate_into_main_grad": True}, ValueError, "accumulate_into_main_grad: expected False with lora"),
        (here, {"save": None}, ValueError, "save: expected a policy that keeps something"),
    ):
        wrong = rank == 1
        others = (ValueError, "moe: arguments: expected ones that pass the checks on all ranks, got errors on [1]")
        expected = (error, f"expert_parallel_moe: {text}") if wrong else others
        chosen, told = (given, options) if wrong else (here, {})
        expect(*expected, lambda g=chosen, o=told: expert_parallel_moe(*layer, w1, w2, experts, lora=g, **o))
    compare(inputs, experts, lora)
    *layer, w1, w2 = inputs.local()
    here, frozen = part_of(lora, inputs.experts), [t.detach() for t in (*layer, w1, w2)]
    if rank == 0:  # ranks whose factors are trained call backward, others do not
        here = here.with_factors(factor.detach() for factor in here.factors)
    text = "expert_parallel_moe: requires_grad: expected the same on all ranks, or backward would wait for ever"
    expect(ValueError, text, lambda: expert_parallel_moe(*frozen, experts, lora=here))


WIDTHS = 64, 48  # d and h
TOKENS = 24  # of each rank, in each step; a multiple of E


def by_place(logits):
    """A choice that no rounding changes; the router weights depend on logits."""
    first = torch.arange(len(logits)) % E
    ids = torch.stack([first, (first + 3) % E], 1)
    return logits.softmax(1).gather(1, ids).to(logits.dtype), ids.int()


def layers_with_factors(dtype=torch.float32, trains_router=True, expert_format=None, **options):
    """Two layers. Their trained parameters are in float32, frozen ones in dtype; b is not zero, so that all count."""
    torch.manual_seed(5)
    layers = torch.nn.Sequential(*(MoE(*WIDTHS, E, 2, lora_rank=8, lora_alpha=12.0, **options) for _ in range(2)))
    for name, parameter in layers.named_parameters():
        if name.endswith(("lora_b1", "lora_b2")):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("router"):
            parameter.requires_grad_(trains_router)
        elif not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for layer in layers if expert_format else ():
        layer.quantize_experts(expert_format)
    return layers


def cast(layers, x):
    """What mixed precision of FSDP2 computes, in one process."""
    parameters = dict(layers.named_parameters())
    parameters = {name: p.to(x.dtype) if p.is_floating_point() else p for name, p in parameters.items()}
    return torch.func.functional_call(layers, parameters, x)


def trained_twice(rank, size, layers, dtype=torch.float32, forward=lambda layers, x: layers(x)):
    """By name: the loss of each of two steps over the tokens of all ranks, and the gradients of what is trained.

    size: 1 for one process with the tokens of all. dtype: of the products.
    """
    # Adam's first steps have one size, so that the sign of a gradient near 0 would count.
    optimizer = torch.optim.SGD([p for p in layers.parameters() if p.requires_grad], 0.02)
    found = {}
    for step in range(2):
        every = torch.randn(dist.get_world_size(), TOKENS, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        x = (every[rank] if size > 1 else every.flatten(0, 1)).to(dtype)
        loss = (forward(layers, x).float() - x.float()).square().mean()
        loss.backward()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        found[f"loss {step}"] = total / size
        for name, parameter in layers.named_parameters():
            name = name.removeprefix("module.")
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if parameter.requires_grad:
                grad = parameter.grad
                found[f"{name} {step}"] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare_training(got, want, tolerance):
    assert got.keys() == want.keys() and sum("lora" in name for name in got) == 16
    for name, value in want.items():
        assert got[name].dtype == value.dtype and value.any(), name
        error = difference(got[name], value)
        assert error <= tolerance, f"{name}: {error}"


def sharded(mesh, layers, engines=None, **policy):
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(layers, **options)
    if engines is not None:
        engines.attach(*layers, layers)
    for layer in layers:
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return layers


# Sums of the ranks' tokens in another order, in float32, through two layers and a step.
SINGLE = 4e-6
# bf16 has 8 bits, and gradients are rounded to it on each rank in place of once. Those of the first layer pass through
# the second one's rounding, and in the second step through that of the parameters.
HALF = 4 * 2.0**-8


@on_cpu
def factors_under_fsdp(mesh, size):
    """Frozen experts and trained factors, by torch's collectives and by those of copy engines, beside one process."""
    rank = mesh.get_local_rank()
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for frozen, options, policy, tolerance in (
        (torch.float32, {}, {}, SINGLE),
        (torch.bfloat16, {"routing": by_place}, half, HALF),
        (torch.float32, {"trains_router": False}, {}, SINGLE),
        (torch.float32, {"expert_bias": True, "save": "recompute"}, {}, SINGLE),
        (torch.float32, {"expert_format": "nf4"}, {}, SINGLE),
    ):
        dtype = policy.get("param_dtype", torch.float32)
        want = trained_twice(rank, 1, layers_with_factors(frozen, **options), dtype, cast)
        found = []
        for engines in (None, CopyEngines(mesh)):
            with straight(2**11):
                layers = sharded(mesh, layers_with_factors(frozen, **options), engines, **policy)
            found.append(trained_twice(rank, size, layers, dtype))
            compare_training(found[-1], want, tolerance)
        assert size > 2 or all(torch.equal(value, found[1][name]) for name, value in found[0].items())
        of_experts = set() if "expert_format" in options else {"w1_storage", "w2_storage"}
        by_copies = {name.partition(".")[2] for name in hooked(layers)}
        assert {"lora_a1", "lora_b1", "lora_a2", "lora_b2"} | of_experts <= by_copies


@case
def factors_under_ddp(rank, size, group):
    for options in ({}, {"trains_router": False}, {"expert_bias": True}, {"expert_format": "int8"}):
        want = trained_twice(rank, 1, layers_with_factors(**options))
        layers = torch.nn.parallel.DistributedDataParallel(layers_with_factors(**options), process_group=group)
        compare_training(trained_twice(rank, size, layers), want, SINGLE)


class AdaptedExperts(torch.nn.Module):
    """Frozen experts with factors, of all experts, or with an ExpertGroup of this rank's, as DTensors."""

    def __init__(self, w1, w2, experts=None):
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(w, requires_grad=False) for w in (w1, w2))
        for name, factor in zip(FACTORS, factors_of().factors, strict=True):
            self.register_parameter(name, torch.nn.Parameter(factor.clone(memory_format=torch.contiguous_format)))
        self.experts = experts

    def forward(self, x, ids, weights):
        if self.experts is None:
            return moe(x, ids, weights, self.w1, self.w2, lora=mb.Lora(self.a1, self.b1, self.a2, self.b2))
        w1, w2, *factors = (parameter.to_local() for parameter in self.parameters())
        return expert_parallel_moe(x, ids, weights, w1, w2, self.experts, lora=mb.Lora(*factors))


@case
@needs_none(NO_SUMS_OF_SHARDING)
def factors_on_meshes(rank, size, group):
    """Experts and factors over ranks, then over FSDP2: gradients of one process, and their norm."""
    one, counts = model_of(experts_of=AdaptedExperts), counts_of(size, "uneven")
    (x,), tokens = batches(0, [sum(counts)], 1)
    (one(x).square().sum() / tokens).backward()
    want = {name: parameter.grad for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert len(want) == 2 * 5
    for shape in shapes_of(size):
        model = Meshes(*shape).model(experts_of=AdaptedExperts)
        (model(batches(rank, counts, 1)[0][0]).square().sum() / tokens).backward()
        got = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert got.keys() == want.keys()
        for name, value in got.items():
            assert difference(value, want[name]) <= EXACT, (shape, name)
        norm = clip_grad_norm_(list(model.parameters()), torch.inf)
        assert difference(norm, torch.stack([value.norm() for value in want.values()]).norm()) <= EXACT


@gpu_case
def factors_on_gpus(rank, size, group):
    """Every route, with factors in float32; on each, a second run has the bits of the first."""
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        for name, options in (*GPU_ROUTES.items(), ("pull by kernels", {"route": "pull"}), ("pieces", {"slots": 20})):
            experts = ExpertGroup(group, E, **options)
            experts.peers.copies = name != "pull by kernels"
            for kind in ("equal",) if experts.route == "static" else ("uneven", "none_here"):
                for trained, ranks in ((False, BOTH), (True, (None, 17))):
                    inputs, lora = Inputs(rank, counts_of(size, kind), "absent"), factors_of(ranks)
                    moved, single = (
                        on_gpu(inputs, dtype),
                        (None if f is None else f.cuda().float() for f in lora.factors),
                    )
                    of_gpu = lora.with_factors(single)
                    runs = [results_of(moved, experts, of_gpu, trained) for _ in range(2)]
                    found.append((inputs, lora, runs, tolerance, trained))
    for inputs, lora, (first, second), tolerance, trained in found:
        assert all(torch.equal(first[name], second[name]) for name in first)
        compared(inputs, lora, {name: value.cpu() for name, value in first.items()}, tolerance, trained)
