"""Training with FSDP2 in two processes equals that of one: sharding frees and restores the storages of parameters."""

import pytest
from cases import relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp")

from moeblaze_cupy.interop.torch import MoE  # noqa: E402

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
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_training_equals_that_of_one_process(tmp_path):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("needs torch with gloo")
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
        for step, wanted in zip(sharded, gradients, strict=False):
            for got, want in zip(step, wanted, strict=True):
                bound = 2**-7 if options.get("half") else 1e-5
                assert relative_error(got.numpy(), want.float().numpy()) <= bound, name
