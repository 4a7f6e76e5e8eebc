"""Cases of expert parallelism beside other ways to share work, with the recipes of docs/parallel.md as it has them.

Each compares with one process that has all tokens and all experts.
"""

import re
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from moeblaze_cupy import Lora
from moeblaze_cupy.interop.parallel import ExpertGroup, clip_grad_norm_, exchange, expert_parallel_moe
from moeblaze_cupy.interop.torch import moe, route
from tests.parallel.ranks_common import D, E, H, Inputs, K, case, compare, counts_of, difference, expect, gpu_case
from tests.parallel.ranks_gpus import on_gpu
from tests.torch_versions import LEAVES_DTENSORS_WITHOUT_GRADIENTS, NO_SUMS_OF_SHARDING, needs_none


def recipes():
    names = {}
    page = Path(__file__).parent.parent.parent / "docs" / "parallel.md"
    for block in re.findall(
        r"```python\n(.*?)```", page.read_text().partition("## Recipes")[2].partition("## Adapters")[0], re.DOTALL
    ):
        exec(compile(block, "docs/parallel.md", "exec"), names)
    return SimpleNamespace(**names)


PAGE = recipes()


class WholeExperts(torch.nn.Module):
    """All experts in one process, under the names that `Experts` of the recipe gives them."""

    def __init__(self, w1, w2):
        super().__init__()
        self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)

    def forward(self, x, ids, weights):
        return moe(x, ids, weights, self.w1, self.w2)


class Block(torch.nn.Module):
    """x plus its experts' output, by a router of its own; checkpointed: None, or a value of `use_reentrant`."""

    def __init__(self, experts, generator, checkpointed=None):
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(E, D, generator=generator, dtype=torch.float64))
        self.experts, self.checkpointed = experts, checkpointed

    def compute(self, x):
        weights, ids = torch.softmax(x @ self.router.T, 1).topk(K, 1)
        return x + self.experts(x, ids.int(), weights)

    def forward(self, x):
        if self.checkpointed is None:
            return self.compute(x)
        return checkpoint(self.compute, x.requires_grad_(), use_reentrant=self.checkpointed)


def model_of(seed=0, experts_of=WholeExperts, checkpointed=None):
    """Two blocks; the same parameters for the same seed, whatever the class of the experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [(normal(E, D, 2 * H) / D**0.5, normal(E, H, D) / H**0.5) for _ in range(2)]
    return torch.nn.Sequential(*(Block(experts_of(*both), generator, checkpointed) for both in weights))


class Meshes:
    """(efsdp, ep) over the first ranks of all, and one dimension with the same ranks. All ranks make it."""

    def __init__(self, efsdp, ep):
        ranks = torch.arange(efsdp * ep)
        self.both = DeviceMesh("cpu", ranks.view(efsdp, ep), mesh_dim_names=("efsdp", "ep"))
        self.everyone = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))

    def model(self, seed=0, checkpointed=None, dtype=torch.float64, experts_of=PAGE.Experts, **options):
        experts = ExpertGroup(self.both["ep"], E)
        model = model_of(seed, partial(experts_of, experts=experts), checkpointed).to(dtype)
        for block in model:
            PAGE.shard_block(block, self.both, self.everyone, **options)
        return model


def shapes_of(size):
    return [(size // ep, ep) for ep in (1, 2, 4) if ep <= size]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batches(rank, counts, number):
    """x of this rank, by step, and the number of all ranks' tokens."""
    every = [Inputs(rank, counts, seed=seed) for seed in range(number)]
    return [inputs.x[inputs.here] for inputs in every], sum(counts)


def train(model, optimizer, steps, tokens, clip=None):
    """Losses of this rank's tokens, and norms."""
    losses, norms = [], []
    for x in steps:
        loss = model(x).square().sum() / tokens
        loss.backward()
        losses.append(loss.detach())
        if clip is not None:
            norms.append(clip(list(model.parameters()), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@case
@needs_none(NO_SUMS_OF_SHARDING)
def gradients_on_meshes(rank, size, group):
    """Of one process, in scale too, after two micro-batches of which only the second reduces; norms of all kinds."""
    one, counts = model_of(), counts_of(size, "uneven")
    (first, second), tokens = batches(0, [sum(counts)], 2)
    for x in (first, second):
        (one(x).square().sum() / tokens).backward()
    want = {name: parameter.grad.clone() for name, parameter in one.named_parameters()}
    for shape in shapes_of(size):
        model = Meshes(*shape).model()
        for x, last in zip(batches(rank, counts, 2)[0], (False, True), strict=True):
            for block in model:
                block.set_requires_gradient_sync(last)
            (model(x).square().sum() / tokens).backward()
        for name, parameter in model.named_parameters():
            assert difference(whole(parameter.grad), want[name]) <= 1e-13, (shape, name)
        for kind in (1.0, 2.0, torch.inf):
            got = clip_grad_norm_(list(model.parameters()), torch.inf, kind)
            of_one = torch.nn.utils.clip_grad_norm_(one.parameters(), torch.inf, kind)
            assert difference(got, of_one) <= 1e-13, (shape, kind)
        for parameter in (model[1].router, model[0].experts.w2):  # frozen ones have none
            parameter.grad = None
        clip_grad_norm_(list(model.parameters()), 0.5)
        left = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([want[name].norm() for name in left]).norm()
        assert norm > 1 and len(left) == len(want) - 2
        for name, grad in left.items():
            assert difference(whole(grad), want[name] * 0.5 / norm) <= 1e-6, (shape, name)


@case
@needs_none(NO_SUMS_OF_SHARDING)
def mixed_precision_on_meshes(rank, size, group):
    """In float32, and computed in bf16 with sums in float32: errors of these, where a wrong scale were 0.5 or more."""
    one, inputs = model_of(), Inputs(rank, counts_of(size, "uneven"))
    one(inputs.x).square().sum().backward()
    want = {name: parameter.grad for name, parameter in one.named_parameters()}
    half = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for shape in shapes_of(size):
        meshes = Meshes(*shape)
        for options, tolerance in (({}, 1e-5), (half, 0.08)):
            model = meshes.model(dtype=torch.float32, **options)
            model(inputs.x[inputs.here].float()).float().square().sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad.dtype == torch.float32
                assert difference(whole(parameter.grad), want[name]) <= tolerance, (shape, name)


@case
@needs_none(NO_SUMS_OF_SHARDING)
def training_on_meshes(rank, size, group):
    """Losses, norms and parameters after three steps of AdamW with clipping."""
    one, counts = model_of(), counts_of(size, "uneven")
    steps, tokens = batches(0, [sum(counts)], 3)
    want, want_norms = train(one, adamw(one), steps, tokens, torch.nn.utils.clip_grad_norm_)
    parameters = dict(one.named_parameters())
    for shape in shapes_of(size):
        model = Meshes(*shape).model()
        losses, norms = train(model, adamw(model), batches(rank, counts, 3)[0], tokens, clip_grad_norm_)
        for loss, norm, want_loss, want_norm in zip(losses, norms, want, want_norms, strict=True):
            dist.all_reduce(loss)
            assert difference(loss, want_loss) <= 1e-12 and difference(norm, want_norm) <= 1e-12, shape
        for name, parameter in model.named_parameters():
            assert difference(whole(parameter), parameters[name]) <= 1e-11, (shape, name)


@case
@needs_none(NO_SUMS_OF_SHARDING)
def checkpoints_on_meshes(rank, size, group):
    """Written at (efsdp, ep) with AdamW's state; read there with the same bits, and elsewhere to rounding."""
    counts = counts_of(size, "uneven")
    steps, tokens = batches(rank, counts, 4)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    written = Meshes(size // 2, 2)
    model = written.model()
    optimizer = adamw(model)
    train(model, optimizer, steps[:2], tokens)
    PAGE.save(folder[0], model, optimizer)
    want, _ = train(model, optimizer, steps[2:], tokens)
    summed = torch.stack(want)
    dist.all_reduce(summed)
    parameters = {name: whole(p).detach() for name, p in model.named_parameters()}

    again = written.model(seed=1)
    optimizer = adamw(again)
    PAGE.load(folder[0], again, optimizer)
    got, _ = train(again, optimizer, steps[2:], tokens)
    assert torch.equal(torch.stack(got), torch.stack(want))
    for name, parameter in again.named_parameters():
        assert torch.equal(whole(parameter), parameters[name]), name

    others = [(shape, {}) for shape in shapes_of(size) if shape != (size // 2, 2)]
    others += [((size // 2, 2), {"shard_placement_fn": lambda _: Shard(1)}), ((1, 1), {})]
    for shape, options in others + ([((1, 2), {})] if size == 4 else []):
        ranks = shape[0] * shape[1]
        meshes, some = Meshes(*shape), dist.new_group(list(range(ranks)))
        if rank >= ranks:
            continue
        if ranks == 1:
            model, here = model_of(seed=2), [sum(counts)]  # without DTensors
        else:
            model, here = meshes.model(seed=2, **options), counts if ranks == size else [sum(counts) - 40, 40]
        optimizer = adamw(model)
        PAGE.load(folder[0], model, optimizer, some)
        losses, _ = train(model, optimizer, batches(rank, here, 4)[0][2:], tokens)
        losses = torch.stack(losses)
        dist.all_reduce(losses, group=some)
        assert difference(losses, summed) <= 1e-13, shape
        for name, parameter in model.named_parameters():
            assert difference(whole(parameter), parameters[name]) <= 1e-12, (shape, name)


@case
def parts_without_elements_are_clipped(rank, size, group):
    """By the largest element, of which torch's norm raises on the ranks alone that have none, and by sums."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(-4.0, 2.0, dtype=torch.float64).view(1, 6)  # all of rank 0
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
    sums = torch.nn.Parameter(distribute_tensor(torch.zeros(2, dtype=torch.float64), mesh, [Replicate()]))
    for kind, norm in ((torch.inf, 5.0), ("inf", 5.0), (1, 18.0)):
        parameter.grad = distribute_tensor(whole, mesh, [Shard(0)])
        share = torch.tensor([5.0, -2.0], dtype=torch.float64) / size
        sums.grad = DTensor.from_local(share, mesh, [Partial()])
        got = clip_grad_norm_([parameter, sums], 1.0, kind)
        assert difference(got, torch.tensor(norm, dtype=torch.float64)) <= 1e-14, (kind, got)
        assert difference(parameter.grad.full_tensor(), whole / norm) <= 1e-5  # torch divides by norm + 1e-6


@case
def hidden_width_is_split(rank, size, group):
    """Tensor parallelism of h alone, and within expert parallelism."""
    for ep in (1, 2) if size == 4 else (1,):
        mesh = DeviceMesh("cpu", torch.arange(size).view(ep, size // ep), mesh_dim_names=("ep", "tp"))
        position, tp = mesh["ep"].get_local_rank(), mesh["tp"]
        inputs = Inputs(position, counts_of(size, "uneven")[:ep] if ep > 1 else [40], "absent", pair=True)
        want = inputs.whole()
        x, ids, weights, (gate, up), w2 = inputs.local()
        layer = moe if ep == 1 else partial(expert_parallel_moe, experts=ExpertGroup(mesh["ep"], E))
        parameters = PAGE.shard_hidden(gate, up, w2, tp)
        out = PAGE.tensor_parallel(layer, x, ids, weights, *parameters, tp)
        out.backward(inputs.grad[inputs.here])
        of_gate, of_up, of_w2 = (parameter.grad.full_tensor() for parameter in parameters)
        got = {"out": out, "x": x.grad, "weights": weights.grad, "w1": torch.cat([of_gate, of_up]), "w2": of_w2}
        compare(inputs, got, 1e-14, same_bits=False)
        norm = torch.cat([want["w1"].flatten(), want["w2"].flatten()]).norm()
        if ep == 1:
            assert difference(clip_grad_norm_(parameters, 1.0), norm) <= 1e-14

        x, ids, weights, _, _ = inputs.local()  # each rank's own results, which are parts of sums
        gate, up, w2 = (parameter.detach().to_local() for parameter in parameters)
        out = layer(x, ids, weights, (gate, up), w2)
        out.backward(inputs.grad[inputs.here])
        for name, part in (("out", out.detach()), ("x", x.grad), ("weights", weights.grad)):
            assert difference(part, want[name]) > 0.01, name
            dist.all_reduce(part, group=tp.get_group())
            assert difference(part, want[name]) <= 1e-14, name


@case
def two_levels(rank, size, group):
    """Nodes, then ranks: a row goes once to each node, to as many as the router is limited to, and comes back."""
    nodes = 2
    mesh = DeviceMesh("cpu", torch.arange(size).view(nodes, size // nodes), mesh_dim_names=("node", "rank"))
    layer = PAGE.TwoLevels(mesh, E)
    for kind in ("uneven", "none_here", "none"):
        for routing in ("random", "one_rank", "absent", "duplicate", "limited"):
            inputs = Inputs(rank, counts_of(size, kind), "random" if routing == "limited" else routing)
            if routing == "limited":
                logits = torch.randn(len(inputs.x), E, generator=torch.Generator().manual_seed(3))
                inputs.ids = route(logits, K, score="sigmoid", groups=(nodes, 1, 2))[1]
            for reentrant in (None, False, True) if routing == "absent" else (None,):
                x, ids, weights, w1, w2 = inputs.local()
                call = layer if reentrant is None else partial(checkpoint, layer, use_reentrant=reentrant)
                out = call(x, ids, weights, w1, w2)
                out.backward(inputs.grad[inputs.here])
                got = {"out": out, "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}
                compare(inputs, got, 1e-14, same_bits=False)
            found = exchange(x, ids, weights, layer.nodes)[-1]
            present = (ids >= 0) & (ids < E)
            of_nodes = torch.where(present, ids // (E // nodes), -1)
            assert found.sent == [int((of_nodes == n).any(1).sum()) for n in range(nodes)]
            if routing == "limited":
                assert sum(found.sent) == len(x)


@case
def sums_in_main_grad(rank, size, group):
    """Three micro-batches are added up by the kernels, with the bits of one process that adds them up."""
    counts = [counts_of(size, kind) for kind in ("uneven", "none_here", "equal")]
    for dtype, form, options in (
        (torch.float64, {}, {}),
        (torch.float32, {"pair": True}, {}),
        (torch.bfloat16, {}, {"keep_received": False}),
        (torch.float64, {"pair": True}, {"slots": 20}),  # in pieces
    ):
        every = [Inputs(rank, number, dtype=dtype, seed=3, **form) for number in counts]
        for inputs in every:
            inputs.w1, inputs.w2 = every[0].w1, every[0].w2
        _, _, _, w1, w2 = every[0].local()
        parameters = [*(w1 if form else (w1,)), w2]
        for parameter in parameters:
            parameter.grad_added_to_main_grad = False
        experts = ExpertGroup(group, E, **options)
        if form:  # the recipe's w1 is one tensor
            for parameter in parameters:
                parameter.main_grad = torch.zeros_like(parameter)
            for inputs in every:
                x, ids, weights, _, _ = inputs.local()
                out = expert_parallel_moe(x, ids, weights, w1, w2, experts, accumulate_into_main_grad=True)
                out.backward(inputs.grad[inputs.here])
        else:
            batches = [inputs.local()[:3] for inputs in every]
            grads = iter(inputs.grad[inputs.here] for inputs in every)
            PAGE.accumulate(batches, lambda out: (out * next(grads)).sum(), w1, w2, experts)  # noqa: B023
        assert all(parameter.grad_added_to_main_grad for parameter in parameters)

        halves = every[0].w1 if form else (every[0].w1,)
        of_one = [w.clone().requires_grad_() for w in (*halves, every[0].w2)]
        for parameter, own in zip(of_one, parameters, strict=True):
            parameter.main_grad = torch.zeros_like(parameter, dtype=own.main_grad.dtype)
        for inputs in every:
            arguments = inputs.x, inputs.ids, inputs.weights, tuple(of_one[:2]) if form else of_one[0], of_one[-1]
            moe(*arguments, accumulate_into_main_grad=True).backward(inputs.grad)
        for parameter, own in zip(of_one, parameters, strict=True):
            want = parameter.main_grad[every[0].experts]
            assert own.main_grad.abs().max() > 0.1
            if options.get("slots"):
                assert difference(own.main_grad, want) <= 1e-14
            else:
                assert torch.equal(own.main_grad, want), dtype


@case
def main_grad_is_checked(rank, size, group):
    """Some weights frozen, checkpointing, DTensors, and errors that reach all ranks."""
    inputs = Inputs(rank, counts_of(size, "uneven"))
    want = inputs.whole()
    for reentrant in (False, True):
        x, ids, weights, w1, w2 = inputs.local()
        w1.requires_grad_(False)
        w2.main_grad = torch.ones_like(w2)
        call = partial(expert_parallel_moe, experts=ExpertGroup(group, E), accumulate_into_main_grad={"w2": w2})
        out = checkpoint(call, x, ids, weights, w1, w2, use_reentrant=reentrant)
        out.backward(inputs.grad[inputs.here])
        assert w2.grad is None and difference(w2.main_grad - 1, want["w2"]) <= 1e-14
        assert difference(x.grad, want["x"]) <= 1e-14
    mesh = DeviceMesh("cpu", torch.arange(size))
    for on_mesh in (True, False):
        x, ids, weights, *_ = inputs.local()
        shards = [torch.nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in (inputs.w1, inputs.w2)]
        for shard in shards:
            shard.main_grad = torch.zeros_like(shard if on_mesh else shard.to_local())
        into = dict(zip(("w1", "w2"), shards, strict=True))
        call = partial(expert_parallel_moe, experts=ExpertGroup(group, E), accumulate_into_main_grad=into)
        call(x, ids, weights, *(shard.to_local() for shard in shards)).backward(inputs.grad[inputs.here])
        for name, shard in into.items():
            main_grad = shard.main_grad.to_local() if on_mesh else shard.main_grad
            assert torch.equal(main_grad, want[name])
            if LEAVES_DTENSORS_WITHOUT_GRADIENTS:
                assert shard.grad is None
            else:
                assert not shard.grad.to_local().any()
    x, ids, weights, w1, w2 = inputs.local()
    for weight in (w1, w2):
        weight.main_grad = torch.zeros_like(weight)
    if rank == size - 1:
        w2.main_grad = w2.main_grad[1:]
        expected = ValueError, "expert_parallel_moe: w2: expected main_grad with the parameter's shape"
    else:
        expected = ValueError, f"got errors on [{size - 1}]"
    call = partial(expert_parallel_moe, experts=ExpertGroup(group, E), accumulate_into_main_grad=True)
    expect(*expected, call, x, ids, weights, w1, w2)


@case
@needs_none(NO_SUMS_OF_SHARDING)
def activation_checkpointing(rank, size, group):
    """Both kinds, around the layer and around blocks under FSDP2, also on ranks without tokens."""
    for kind in ("uneven", "none_here"):
        counts = counts_of(size, kind)
        inputs = Inputs(rank, counts)
        for keep in (True, False):
            layer = partial(expert_parallel_moe, experts=ExpertGroup(group, E, keep_received=keep))
            for reentrant in (False, True):
                x, ids, weights, w1, w2 = inputs.local()
                out = checkpoint(layer, x, ids, weights, w1, w2, use_reentrant=reentrant)
                out.backward(inputs.grad[inputs.here])
                got = {"out": out, "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}
                compare(inputs, got, 1e-14)
        one = model_of()
        one(inputs.x).square().sum().backward()
        want = {name: parameter.grad for name, parameter in one.named_parameters()}
        meshes = Meshes(size // 2, 2)
        for reentrant in (False, True):
            model = meshes.model(checkpointed=reentrant)
            model(inputs.x[inputs.here].clone()).square().sum().backward()
            for name, parameter in model.named_parameters():
                assert difference(whole(parameter.grad), want[name]) <= 1e-13, (reentrant, name)


@case
def bias_of_the_router(rank, size, group):
    """Equal on all ranks, and that of one process, after steps whose choices it took part in."""
    counts = counts_of(size, "none_here")
    bias, of_one = torch.zeros(E), torch.zeros(E)
    for step in range(4):
        logits = torch.randn(sum(counts), E, generator=torch.Generator().manual_seed(step)) + torch.linspace(-2, 2, E)
        inputs = Inputs(rank, counts)
        _, ids = route(logits[inputs.here], K, score="sigmoid", bias=bias)
        PAGE.update_bias_of_all(bias, ids, 0.2)
        _, chosen = route(logits, K, score="sigmoid", bias=of_one)
        load = torch.bincount(chosen.flatten().long(), minlength=E).float()
        of_one += 0.2 * torch.sign(load.mean() - load)
        assert torch.equal(bias, of_one)
    assert bias[-1] < 0 < bias[0]


class Engine:
    """Another engine's rows by torch's collectives: everyone's tokens, of which those with an expert here are kept."""

    def __init__(self, rank, size, group, ids):
        self.group, self.here = group, slice(rank * len(ids), (rank + 1) * len(ids))
        self.everyone = [torch.empty_like(ids) for _ in range(size)]
        dist.all_gather(self.everyone, ids, group=group)
        local = torch.cat(self.everyone) - rank * (E // size)
        local = torch.where((local >= 0) & (local < E // size), local, -1)
        self.kept = (local >= 0).any(1).nonzero()[:, 0].flip(0)
        self.ids = local[self.kept]

    def send(self, mine):
        parts = [torch.empty_like(mine) for _ in self.everyone]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts)[self.kept]

    def add_up(self, rows):
        total = rows.new_zeros(sum(map(len, self.everyone)), rows.shape[1]).index_copy(0, self.kept, rows)
        dist.all_reduce(total, group=self.group)
        return total[self.here]


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, engine):
        ctx.engine = engine
        return engine.send(x), engine.send(weights)

    @staticmethod
    def backward(ctx, *grads):
        return *map(ctx.engine.add_up, grads), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, engine):
        ctx.engine = engine
        return engine.add_up(y)

    @staticmethod
    def backward(ctx, grad):
        return ctx.engine.send(grad), None


@case
def rows_by_another_engine(rank, size, group):
    """The contract of `exchange` that docs/parallel.md states, kept by functions that are none of the package's."""
    inputs = Inputs(rank, counts_of(size, "equal"), "absent")
    x, ids, weights, w1, w2 = inputs.local()
    engine = Engine(rank, size, group, ids)
    rows, got = Dispatch.apply(x, weights, engine)
    out = Combine.apply(moe(rows, engine.ids, got, w1, w2), engine)
    out.backward(inputs.grad[inputs.here])
    grads = {"out": out.detach(), "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}
    compare(inputs, grads, 1e-14, same_bits=False)


@case
def tensors_that_collectives_still_fill(rank, size, group):
    compare_with_unfilled(Inputs(0, counts_of(size, "equal")), rank, size, group)


@gpu_case
def tensors_that_collectives_still_fill_on_gpus(rank, size, group):
    compare_with_unfilled(on_gpu(Inputs(0, counts_of(size, "equal")), torch.float32), rank, size, group)


def compare_with_unfilled(inputs, rank, size, group):
    """Results of DTensor.redistribute(async_op=True) in place of what they hold, forward and as gradients."""
    mesh = DeviceMesh.from_group(group, inputs.x.device.type)

    def on_its_way(tensor):
        """tensor by a sum over ranks, to which rank 0 adds it."""
        part = DTensor.from_local(tensor * int(rank == 0), mesh, [Partial()])
        found = part.redistribute(placements=[Replicate()], async_op=True).to_local()
        assert type(found) is not torch.Tensor
        return found

    x, weights, ids, w1, w2, grad = inputs.x, inputs.weights, inputs.ids, inputs.w1, inputs.w2, inputs.grad
    own = slice(rank * E // size, (rank + 1) * E // size)
    experts = ExpertGroup(group, E)
    logits = torch.randn(len(x), E, generator=torch.Generator().manual_seed(0)).to(x)
    ones = torch.ones(K, D).to(x)
    lora = Lora(w1[:, :2, :1].expand(E, 2, D).clone(), w1[:, :1].expand(E, 2, 2 * H).mT.clone())
    calls = {
        "moe": lambda x, weights, ids: moe(x, ids, weights, w1, w2),
        "memory_limit": lambda x, weights, ids: moe(x, ids, weights, w1, w2, memory_limit=10**9),
        "lora": lambda x, weights, ids: moe(x, ids, weights, w1, w2, lora=lora),
        "expert_parallel_moe": lambda x, weights, ids: expert_parallel_moe(x, ids, weights, w1[own], w2[own], experts),
        "route": lambda x, weights, ids: route(x[:, :1] + logits, K)[0] @ ones + x,
    }
    for name, call in calls.items():
        results = []
        for passed in (torch.clone, on_its_way):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
            out = call(*map(passed, leaves), passed(ids))
            out.backward(passed(grad))
            results.append([out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        want, got = results
        got[1:] = [DTensor.from_local(tensor, mesh, [Partial()]).full_tensor() for tensor in got[1:]]
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine, theirs), name
