"""Training with FSDP2 in two processes equals that of one: sharding frees and restores the storages of parameters."""

from unittest import mock

import pytest

from tests.cases import relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe  # noqa: E402
from moeblaze_cupy.interop.torch import MoE, moe, route  # noqa: E402
from tests.torch_versions import NO_SHARDING_ON_THE_CPU  # noqa: E402

STEPS, TOKENS = 2, 32
CASES = {
    "minimal": {},
    "recompute, kept whole": {"save": "recompute", "reshard": False},
    "paper, checkpointed": {"save": "paper", "checkpointed": True},
    "experts that two processes cannot share alike": {"num_experts": 3},
    "two batches between reductions": {"batches": 2},
    "compiled": {"compiled": True},
    "16-bit parameters": {"half": True},
}


def _layer(num_experts=4, save="minimal", **_):
    torch.manual_seed(0)
    return MoE(8, 6, num_experts, 2, save=save)


def _loss(layer, x, target, checkpointed=False, **_):
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    return (out.float() - target).square().mean()


def _data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 2, 2, TOKENS, 8, generator=generator)  # steps, batches, (x, target)


def _train(layer, share, batches=1, synchronise=lambda on: None, **options):
    """Losses' gradients of each step, of the first `batches` batches; share: of the tokens, those of this process."""
    optimizer, written = torch.optim.SGD(layer.parameters(), lr=0.1), []
    for step in _data():
        optimizer.zero_grad()
        for number in range(batches):
            synchronise(number == batches - 1)
            _loss(layer, *share(step[number]), **options).backward()
        written.append([p.grad for p in layer.parameters()])
        optimizer.step()
    return written


IN_FP8 = (
    {"reshard": False},
    {"around": True},
    {"masters": torch.float32, "checkpointed": True},
    {"compiled": True},
)


def _follow_in_fp8(rank, mesh, reshard=True, around=False, masters=torch.bfloat16, checkpointed=False, compiled=False):
    """In every step, that of a module of one process with the parameters as they are then: the same bits.

    around: FSDP2 is told of a module that has the layer within.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes, options, steps = (32, 48, 4, 2), {"precision": "fp8", "dtype": masters}, 3
    torch.manual_seed(0)
    layer = MoE(*sizes, **options)
    model, one = torch.nn.Sequential(layer) if around else layer, MoE(*sizes, **options)
    if compiled:
        layer.compile(fullgraph=True, backend="aot_eager")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    tokens = torch.randn(steps, 40, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    made, shards, gradients = [], [], []
    for x in tokens:
        shards.append([parameter.detach().clone() for parameter in layer.parameters()])
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        (out.float() - x.float()).square().mean().backward()
        made.append(out.detach())
        gradients.append([parameter.grad for parameter in layer.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        made.append(model(tokens[0]))
    model.reshard()
    shards.append(layer.parameters())
    for step in range(steps + 1):
        x = tokens[step % steps]
        for (name, _), shard in zip(one.named_parameters(), shards[step], strict=True):
            setattr(one, name, torch.nn.Parameter(shard.full_tensor().detach().bfloat16()))
        want = one(x)
        assert torch.equal(made[step], want), step
        if step == steps:
            break
        (want.float() - x.float()).square().mean().backward()
        for parameter, gradient in zip(one.parameters(), gradients[step], strict=True):
            whole = parameter.grad.float()
            torch.distributed.all_reduce(whole)
            assert relative_error(gradient.full_tensor().float().numpy(), whole.numpy() / 2) <= 2**-7, step
    # Nothing is kept of what lies in the memory that FSDP2 frees.
    assert layer.fp8_weights is None
    with pytest.raises(RuntimeError, match="MoE: quantize_weights: expected whole parameters"):
        layer.quantize_weights()


def _process(rank, folder):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for name, options in CASES.items():
            layer = _layer(**options)
            if options.get("compiled"):
                layer.compile(fullgraph=True, backend="aot_eager")
            dtypes = (torch.bfloat16, torch.float32) if options.get("half") else (None, None)
            policy, reshard = MixedPrecisionPolicy(*dtypes), options.get("reshard", True)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            written = _train(
                layer,
                lambda both: both.chunk(2, dim=1)[rank].unbind(),
                synchronise=layer.set_requires_gradient_sync,
                **options,
            )
            whole = [[gradient.full_tensor() for gradient in step] for step in written]
            if rank == 0:
                torch.save(whole, f"{folder}/{name}.pt")
        for options in IN_FP8:
            _follow_in_fp8(rank, mesh, **options)
        # As allocators do when they can, gathered parameters get the memory of the step before. FSDP2 keeps versions.
        with mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param.free_storage"):
            _follow_in_fp8(rank, mesh)
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_training_equals_that_of_one_process(tmp_path):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs torch with gloo")
    if NO_SHARDING_ON_THE_CPU:
        pytest.skip(NO_SHARDING_ON_THE_CPU)
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    for name, options in CASES.items():
        layer = _layer(**options)
        share = torch.Tensor.unbind
        sharded = torch.load(tmp_path / f"{name}.pt")
        if options.get("half"):  # the masters stay in float32; one step, as roundings differ from then on
            layer, sharded = layer.bfloat16(), sharded[:1]

            def share(both):
                x, target = both
                return x.bfloat16(), target

        gradients = _train(layer, share, **options)
        assert len(sharded) == (1 if options.get("half") else len(gradients))
        for step, wanted in zip(sharded, gradients, strict=False):
            for got, want in zip(step, wanted, strict=True):
                bound = 2**-7 if options.get("half") else 1e-5
                assert relative_error(got.numpy(), want.float().numpy()) <= bound, name


@pytest.fixture
def one_rank(tmp_path):
    """A mesh of this process alone, which shards and gathers as one of many does."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs torch with gloo")
    if NO_SHARDING_ON_THE_CPU:
        pytest.skip(NO_SHARDING_ON_THE_CPU)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_a_sharded_layer_whose_output_is_changed_in_place(one_rank):
    """FSDP2 hangs the gathering of weights for backward on the output, and loses it where that is a view."""
    from torch.distributed.fsdp import fully_shard

    x, grads = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3)), {}
    for sharded in (False, True):
        first, layer = torch.nn.Linear(8, 8, bias=False), _layer()
        with torch.no_grad():
            first.weight.copy_(torch.eye(8))
        if sharded:
            fully_shard(layer, mesh=one_rank)
        hidden = first(x)
        out = layer(hidden)
        out += hidden
        out.square().sum().backward()
        named = {"first": first.weight.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        grads[sharded] = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named.items()}
    for name, want in grads[False].items():
        assert torch.equal(grads[True][name], want), name


def test_backward_after_the_weights_were_resharded(one_rank):
    from torch.distributed.fsdp import fully_shard

    layer = _layer()
    fully_shard(layer, mesh=one_rank)
    x = torch.randn(6, 8)
    weights, ids = route(x @ torch.randn(8, 4), 2)
    layer.unshard()
    out = moe(x, ids, weights, layer.w1_storage.transpose(1, 2), layer.w2_storage.transpose(1, 2))
    layer.reshard()
    with pytest.raises(
        RuntimeError, match=r"^moe_backward: saved\.w2: memory: expected a tensor whose storage is there"
    ):
        out.sum().backward()


@pytest.mark.parametrize("keep_received", [False, True])
@pytest.mark.parametrize("which", ["x", "w1", "w2"])
def test_expert_parallel_backward_refuses_freed_storage(one_rank, which, keep_received):
    experts = ExpertGroup(torch.distributed.group.WORLD, 4, keep_received=keep_received)
    given = {"x": torch.randn(6, 8), "w1": torch.randn(4, 8, 12), "w2": torch.randn(4, 6, 8)}
    weights, ids = route(torch.randn(6, 4), 2)
    out = expert_parallel_moe(given["x"].requires_grad_(), ids, weights, given["w1"], given["w2"], experts)
    if which == "x" and keep_received:  # backward does not read it
        given["x"].untyped_storage().resize_(0)
        out.sum().backward()
        return
    given[which].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"^expert_parallel_moe: {which}: .* got one whose storage was freed"):
        out.sum().backward()
