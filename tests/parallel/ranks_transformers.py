"""Cases of models of transformers over two processes of gloo, each compared with one process and its eager experts."""

import functools
import tempfile
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from moeblaze_cupy.interop.parallel import ExpertGroup, collectives
from moeblaze_cupy.interop.transformers import Routing, monitor, pack_experts, patch, register
from moeblaze_cupy.interop.transformers import parallel as transformers_parallel
from moeblaze_cupy.interop.transformers.parallel import parallelize_experts
from tests.parallel.ranks_common import expect, rounded
from tests.torch_versions import NO_EXPERT_PARALLELISM_OF_TRANSFORMERS, NO_SUMS_OF_SHARDING, needs_none

MODEL_CASES = {}
BOUND = 2e-5  # parts of all models compute in float32
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
}

PEFT = tuple(map(int, metadata.version("peft").split(".")[:2])) if find_spec("peft") else (0, 0)
MISSING_PEFT = None if PEFT >= (0, 19) else "needs peft 0.19 or later"


def case(function):
    MODEL_CASES[function.__name__] = function
    return function


def model_of(kind, experts="moeblaze", num_experts=8, **options):
    """The same weights in every process."""
    torch.manual_seed(0)
    sizes = SHAPE | {"num_experts": num_experts, "num_local_experts": num_experts} | options
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if "norm" in name:
            parameter.data += 1
    return model.float()


def tokens_of(rank, length=9):
    return torch.randint(64, (1, length), generator=torch.Generator().manual_seed(rank))


def loss_of(model, tokens):
    logits = model(input_ids=tokens).logits
    return (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum(), logits.detach()


def difference(got, want):
    return float((got.detach() - want).norm() / want.norm())


def assert_gradients(model, reference, summed=None):
    """summed: a group over which gradients that are no DTensors are partial sums."""
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif summed is not None:
            dist.all_reduce(grad, group=summed)
        assert difference(grad, whole.grad) <= BOUND, name


@functools.cache
def saved():
    """A folder with a model, by the name that all processes know."""
    folder = Path(tempfile.gettempdir()) / "model"
    if dist.get_rank() == 0:
        model_of("Qwen3Moe").save_pretrained(folder)
    dist.barrier()
    return folder


def compare_distributed(shares_batch, **config):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        saved(), experts_implementation="moeblaze", distributed_config=DistributedConfig(**config), dtype=torch.float32
    )
    batches = [tokens_of(0)] * 2 if shares_batch else [tokens_of(0), tokens_of(1)]
    mine, reference = batches[dist.get_rank()], model_of("Qwen3Moe", "eager")
    loss, logits = loss_of(loaded, mine)
    loss.backward()
    losses = [loss_of(reference, batch) for batch in batches]
    assert difference(logits, losses[dist.get_rank()][1]) <= BOUND
    (sum(each for each, _ in losses) / 2).backward()  # the mean over ranks, as FSDP2 takes it
    assert_gradients(loaded, reference)
    with torch.no_grad():
        assert difference(loaded(input_ids=mine).logits, losses[dist.get_rank()][1]) <= BOUND
    return loaded


@case
@needs_none(NO_EXPERT_PARALLELISM_OF_TRANSFORMERS)
def plans_of_transformers(rank, size, group):
    """Each expert parallelism of the installed transformers around this layer: its ids are local, or past the last."""
    if hasattr(DistributedConfig, "ep_implementation"):
        for how in ("all_to_all", "all_reduce"):
            compare_distributed(True, tp_size=2, ep_size=2, ep_implementation=how)
        compare_distributed(False, fsdp_size=2, ep_size=2)
    elif hasattr(DistributedConfig, "tp_size"):
        compare_distributed(True, tp_size=2, enable_expert_parallel=True)


@case
@needs_none(NO_EXPERT_PARALLELISM_OF_TRANSFORMERS)
def implementation_for_transformers(rank, size, group):
    """`ep_implementation="moeblaze"`, for ranks with the same tokens and with other tokens."""
    if not hasattr(DistributedConfig, "ep_implementation"):
        return
    for shares_batch, config in ((True, {"tp_size": 2}), (False, {"fsdp_size": 2})):
        loaded = compare_distributed(shares_batch, ep_size=2, ep_implementation="moeblaze", **config)
        experts = loaded.model.layers[0].mlp.experts
        assert isinstance(experts.gate_up_proj, DTensor) and experts.num_experts == 4


@case
def tokens_that_differ(rank, size, group):
    """Sequences of other lengths; experts with and without biases; pieces; a base that has no gradients."""
    mesh = DeviceMesh.from_group(group, "cpu")
    batches = [tokens_of(0, 9), tokens_of(1, 4)]
    for kind in ("Qwen3Moe", "GptOss"):
        reference = model_of(kind, "eager")
        losses = [loss_of(reference, batch) for batch in batches]
        sum(loss for loss, _ in losses).backward()
        for make_group in (ExpertGroup, functools.partial(ExpertGroup, slots=8)):
            model = model_of(kind, "eager")
            names = parallelize_experts(model, mesh, group=make_group)
            if make_group is not ExpertGroup:
                model.train().gradient_checkpointing_enable()
            assert names == tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
            loss, logits = loss_of(model, batches[rank])
            loss.backward()
            assert difference(logits, losses[rank][1]) <= BOUND
            assert_gradients(model, reference, summed=group)
            for parameter in model.model.layers[1].mlp.experts.parameters():
                here = parameter.to_local()
                assert len(here) == 4 and here.untyped_storage().nbytes() == here.nbytes
        with torch.no_grad():
            assert difference(model(input_ids=batches[rank]).logits, losses[rank][1]) <= BOUND


@contextmanager
def dtypes_that_travel():
    """By name, the dtypes of what is sent."""
    found, all_to_all = {}, collectives.all_to_all

    def noted(rows, sent, received, room, what, group):
        found[what.partition("all-to-all of ")[2].partition(" (")[0]] = rows.dtype
        return all_to_all(rows, sent, received, room, what, group)

    with mock.patch.object(collectives, "all_to_all", noted):
        yield found


@case
def packed_experts(rank, size, group):
    """Each rank keeps the bytes of its experts. The numbers are those of the packed model in one process."""
    batches, sizes = [tokens_of(0, 9), tokens_of(1, 4)], {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    for kind, format in (("Qwen3Moe", "nf4"), ("GptOss", "mxfp4")):
        model, reference = (model_of(kind, **sizes, moe_intermediate_size=64) for _ in range(2))
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_("proj" not in name)
            pack_experts(each, format)
        names = parallelize_experts(model, DeviceMesh.from_group(group, "cpu"))
        parts = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
        assert len(names) == 2 and len(parts) == 8
        for name in parts:
            whole, part = reference.get_parameter(name), model.get_parameter(name)
            assert torch.equal(part.to_local(), whole[4 * rank : 4 * rank + 4]), name
        losses = [loss_of(reference, batch) for batch in batches]
        sum(loss for loss, _ in losses).backward()
        loss, logits = loss_of(model, batches[rank])
        loss.backward()
        assert difference(logits, losses[rank][1]) <= BOUND
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                if not isinstance(grad, DTensor):
                    dist.all_reduce(grad, group=group)
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                assert difference(grad, reference.get_parameter(name).grad) <= BOUND, name
        expect(
            ValueError, "model: expected whole experts", parallelize_experts, model, DeviceMesh.from_group(group, "cpu")
        )


@case
def experts_that_layers_share_stay_shared(rank, size, group):
    model = model_of("Qwen3Moe")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    before = len(list(model.parameters()))
    reference = loss_of(model, tokens_of(0))
    parallelize_experts(model, DeviceMesh.from_group(group, "cpu"))
    assert len(list(model.parameters())) == before and second.down_proj is first.down_proj
    assert difference(loss_of(model, tokens_of(0))[1], reference[1]) <= BOUND


@case
def autocast_is_followed(rank, size, group):
    """With one expert per token no sum over ranks rounds, so products in another dtype would show."""
    rng = torch.Generator().manual_seed(rank)
    x, ids = torch.randn(12, 32, generator=rng), torch.randint(8, (12, 1), generator=rng)
    scores = torch.rand(12, 1, generator=rng)
    names = "rows", "results", "results' gradients", "gradients of x"

    def run(experts, dtype, to):
        """out, the gradients of x and weights."""
        leaves = x.to(dtype).clone().requires_grad_(), scores.clone().requires_grad_()
        with torch.autocast("cpu", to):
            out = experts(leaves[0], ids, leaves[1])
        out.sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in experts.parameters())
        return out.detach(), *(leaf.grad for leaf in leaves)

    for kind, with_norm in (("Qwen3Moe", False), ("GptOss", False), ("Qwen3Moe", True)):
        for dtype, to in ((torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16,) * 2):
            experts = model_of(kind).model.layers[0].mlp.experts
            if with_norm:
                experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.RMSNorm(32)
            want = run(experts, dtype, to)
            parallelize_experts(experts, DeviceMesh.from_group(group, "cpu"))
            with dtypes_that_travel() as found:
                got = run(experts, dtype, to)
            of_results = dtype if with_norm else to
            expected = dict(zip(names, (to, of_results, of_results, to), strict=True))
            assert {name: found[name] for name in names} == expected, found
            for mine, whole in zip(got, want, strict=True):
                assert mine.dtype == whole.dtype and difference(mine, whole) <= 1e-4


@case
def experts_in_fp8(rank, size, group):
    """One expert per token, whose numbers then are those of one process, and errors on all ranks."""
    register("moeblaze_fp8", precision="fp8")
    mesh, rng = DeviceMesh.from_group(group, "cpu"), torch.Generator().manual_seed(rank)
    x = torch.randn(12, 32, generator=rng).bfloat16().requires_grad_()
    inputs = x, torch.randint(8, (12, 1), generator=rng), torch.rand(12, 1, generator=rng)

    def experts_of(kind="Qwen3Moe", **options):
        return model_of(kind, "moeblaze_fp8", **options).bfloat16().model.layers[0].mlp.experts

    for kind, width in (("GptOss", "intermediate_size"), ("Qwen3Moe", "moe_intermediate_size")):
        want = experts_of(kind, **{width: 32})(*inputs)
        (grad,) = torch.autograd.grad(want.sum(), x)
        for save in ("minimal", "fp8", "recompute"):
            experts = experts_of(kind, **{width: 32})
            parallelize_experts(experts, mesh, save=save, precision="fp8")
            out = experts(*inputs)
            assert torch.equal(out, want)
            x.grad = None
            out.sum().backward()
            assert save == "fp8" or torch.equal(x.grad, grad)
            assert all(parameter.grad is not None for parameter in experts.parameters())
    if hasattr(DistributedConfig, "ep_implementation"):

        class InFp8(transformers_parallel.ExpertParallel):
            precision = "fp8"

        experts = experts_of(moe_intermediate_size=32)
        experts.num_experts = 4
        for name, whole in list(experts.named_parameters()):
            setattr(experts, name, torch.nn.Parameter(whole.detach()[rank * 4 : rank * 4 + 4]))
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
        assert torch.equal(InFp8(experts, both["ep"], both["tp"])(*inputs), want)
    for error, text, experts, given in (
        (ValueError, "for 'fp8', got (d, h) = (32, 24)", experts_of(), inputs),
        (TypeError, "x: expected bfloat16 with precision='fp8'", experts_of().float(), (x.float(), *inputs[1:])),
    ):
        parallelize_experts(experts, mesh, precision="fp8")
        expect(error, text, experts, *given)
    for name, value in (("precision", "fp4"), ("save", "some")):
        spread = functools.partial(parallelize_experts, experts_of(), mesh, **{name: value})
        expect(ValueError, f"parallelize_experts: {name}: expected one of", spread)


@case
def rows_in_fp8(rank, size, group):
    """The numbers beside bf16 rows and beside one process; by subclasses of `ExpertParallel` too; errors."""
    register("moeblaze_fp8", precision="fp8")
    mesh, in_fp8 = DeviceMesh.from_group(group, "cpu"), {"precision": "fp8", "row_precision": "fp8"}
    rng = torch.Generator().manual_seed(0)
    tokens, grads = (torch.randn(12 * size, 32, generator=rng).bfloat16() for _ in range(2))
    ids = torch.stack([torch.randperm(8, generator=rng)[:3] for _ in tokens])
    weights, here = torch.rand(12 * size, 3, generator=rng), slice(12 * rank, 12 * rank + 12)

    def experts_of(kind="Qwen3Moe", **options):
        sizes = {"moe_intermediate_size": 32, "intermediate_size": 32} | options
        return model_of(kind, "moeblaze_fp8", **sizes).bfloat16().model.layers[0].mlp.experts

    def run(experts, tokens, grads, part):
        """out and the gradients of x, weights and the experts' parameters."""
        x, scores = (tensor[part].clone().requires_grad_() for tensor in (tokens, weights))
        out = experts(x, ids[part], scores)
        out.backward(grads[part])
        of_experts = [parameter.grad for parameter in experts.parameters()]
        return out, x.grad, scores.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in of_experts)

    def spread(**options):
        experts = experts_of()
        parallelize_experts(experts, mesh, **options)
        return experts

    in_bf16 = run(spread(precision="fp8"), tokens, grads, here)
    of_rounded = run(experts_of(), rounded(tokens), rounded(grads), slice(None))
    for save in ("minimal", "recompute"):
        got = run(spread(save=save, **in_fp8), tokens, grads, here)
        assert all(torch.equal(mine, of_bf16) for mine, of_bf16 in zip(got[:3], in_bf16[:3], strict=True))
        for mine, of_bf16, whole in zip(got[3:], in_bf16[3:], of_rounded[3:], strict=True):
            assert torch.equal(mine, whole) and not torch.equal(mine, of_bf16)
    if hasattr(DistributedConfig, "ep_implementation"):

        class InFp8(transformers_parallel.ExpertParallel):
            precision = row_precision = "fp8"

        experts = experts_of()
        experts.num_experts = 4
        for name, whole in list(experts.named_parameters()):
            setattr(experts, name, torch.nn.Parameter(whole.detach()[rank * 4 : rank * 4 + 4]))
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
        InFp8(experts, both["ep"], both["tp"])(tokens[here], ids[here], weights[here]).backward(grads[here])
        for parameter, whole in zip(experts.parameters(), of_rounded[3:], strict=True):
            assert torch.equal(parameter.grad, whole[rank * 4 : rank * 4 + 4])
    inputs = tokens[here], ids[here], weights[here]
    want = spread(**in_fp8)(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(spread(**in_fp8)(*inputs), want)
    with_biases = experts_of("GptOss")
    parallelize_experts(with_biases, mesh, **in_fp8)
    expect(ValueError, "moeblaze: row_precision: expected None for GptOssExperts, as", with_biases, *inputs)
    for text, options in (
        ("expected None without precision='fp8', got 'fp8'", {"row_precision": "fp8"}),
        ("expected one of None, 'fp8', got 'e5m2'", in_fp8 | {"row_precision": "e5m2"}),
    ):
        expect(ValueError, f"parallelize_experts: row_precision: {text}", functools.partial(spread, **options))


@case
@needs_none(NO_SUMS_OF_SHARDING)
def sharded_beside(rank, size, group):
    """FSDP2 shards what is not an expert, after the experts are spread."""
    everyone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    batches = [tokens_of(0, 9), tokens_of(1, 4)]
    model, reference = model_of("Qwen3Moe"), model_of("Qwen3Moe", "eager")
    parallelize_experts(model, everyone["ep"])
    flat = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=everyone["efsdp"])
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    loss_of(model, batches[rank])[0].backward()
    sum(loss_of(reference, batch)[0] for batch in batches).backward()
    assert_gradients(model, reference)


@case
def models_that_cannot_be_spread(rank, size, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = model_of("Qwen3Moe")
    expect(TypeError, "mesh: expected a DeviceMesh of one dimension, got", parallelize_experts, model, group)
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    expect(ValueError, """got a mesh of ('efsdp', 'ep'): pass mesh["ep"]""", parallelize_experts, model, both)
    expect(TypeError, "model: expected a torch.nn.Module, got 'a path'", parallelize_experts, "a path", mesh)
    alone = dist.new_group([rank], use_local_synchronization=True)
    for made, kind, text in (
        (lambda *_: None, TypeError, "one that returns <class 'NoneType'>"),
        (lambda mesh, E: ExpertGroup(mesh, 2 * E), ValueError, f"one of ranks {list(range(size))} and 16 experts"),
        (lambda mesh, E: ExpertGroup(alone, E), ValueError, f"one of ranks [{rank}] and 8 experts"),
    ):
        expect(kind, text, functools.partial(parallelize_experts, model, mesh, group=made))
    assert type(model.model.layers[0].mlp.experts.gate_up_proj) is torch.nn.Parameter
    expect(
        ValueError,
        "num_experts: expected a multiple of",
        parallelize_experts,
        model_of("Qwen3Moe", num_experts=7),
        mesh,
    )
    other = model_of("Qwen3Moe", hidden_act="sigmoid")
    text = "model.layers.0.mlp.experts: Qwen3MoeExperts: its activation is none of"
    expect(NotImplementedError, text, parallelize_experts, other, mesh)
    expect(ValueError, "expected one with experts that transformers", parallelize_experts, torch.nn.Linear(2, 2), mesh)
    assert parallelize_experts(model, mesh)
    expect(ValueError, "expected whole experts, before FSDP2", parallelize_experts, model, mesh)
    experts = (
        {"kv_n_heads": 2, "rope_theta": 1e4},
        {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    )
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64}
    dbrx = transformers.DbrxForCausalLM(transformers.DbrxConfig(**sizes, attn_config=experts[0], ffn_config=experts[1]))
    expect(NotImplementedError, "DbrxExperts: its experts are not dispatched", parallelize_experts, dbrx, mesh)


@case
@needs_none(MISSING_PEFT)
def adapters_on_spread_experts(rank, size, group):
    """Made before or after the experts are spread, one or two, and experts with biases and columns in turn.

    Factors are whole on every rank. Their gradients are sums over ranks of parts.
    """
    import peft

    mesh = init_device_mesh("cpu", (size,))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def adapted(model, number=1):
        torch.manual_seed(3)
        for adapter in range(number):
            options = {"r": 2 + adapter, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": names}
            config = peft.LoraConfig(**options, init_lora_weights=False)
            if adapter:
                model.add_adapter("second", config)
            else:
                model = peft.get_peft_model(model, config)
        model.base_model.set_adapter(["default", "second"][:number])
        return model

    several = [("Qwen3Moe", 2)] if PEFT >= (0, 20) else []  # peft 0.19 takes one
    for kind, number in (("Qwen3Moe", 1), ("GptOss", 1), *several):
        reference = adapted(model_of(kind, "eager"), number)
        losses = [loss_of(reference, tokens_of(of, 9 + of)) for of in range(size)]
        sum(loss for loss, _ in losses).backward()
        for first in ("adapters", "spread"):
            model = model_of(kind)
            if first == "adapters":
                model = adapted(model, number)
                parallelize_experts(model, mesh)
            else:
                parallelize_experts(model, mesh)
                model = adapted(model, number)
            for _ in range(2):
                model.zero_grad()
                loss, logits = loss_of(model, tokens_of(rank, 9 + rank))
                loss.backward()
                assert difference(logits, losses[rank][1]) <= BOUND
            found = dict(model.named_parameters())
            trained = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
            assert {name for name, p in found.items() if p.grad is not None} == trained.keys()
            assert sum("experts" in name for name in trained) == 2 * 2 * 2 * number
            for name, want in trained.items():
                dist.all_reduce(found[name].grad)
                assert difference(found[name].grad, want) <= BOUND, (kind, first, name)
            with model.disable_adapter(), torch.no_grad():
                plain, wanted = (loss_of(of, tokens_of(rank))[1] for of in (model, model_of(kind, "eager")))
            assert difference(plain, wanted) <= BOUND


@case
@needs_none(MISSING_PEFT)
def adapters_beside_e4m3_on_spread_experts(rank, size, group):
    """One expert per token, whose numbers then are those of one process with all tokens; experts in floats and packed.

    Gradients of factors are sums in float32.
    """
    import peft

    register("moeblaze_fp8", precision="fp8")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    on_experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    rng, (own, d) = torch.Generator().manual_seed(4), (12, 64)
    x = torch.randn(own * size, d, generator=rng).bfloat16()
    ids, weights = torch.randint(8, (own * size, 1), generator=rng), torch.rand(own * size, 1, generator=rng)
    sizes = {"hidden_size": d, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
    for kind, packs in (("Qwen3Moe", False), ("Qwen3Moe", True), ("GptOss", False)):
        found = []
        for spread, tokens in ((True, slice(own * rank, own * (rank + 1))), (False, slice(None))):
            model = model_of(kind, "moeblaze_fp8", **sizes).bfloat16()
            model.requires_grad_(False)
            if packs:
                pack_experts(model, "mxfp4")
            if spread:
                parallelize_experts(model, init_device_mesh("cpu", (size,)), precision="fp8")
            torch.manual_seed(3)
            model = peft.get_peft_model(model, on_experts)
            mine = x[tokens].clone().requires_grad_()
            out = model.base_model.model.model.layers[0].mlp.experts(mine, ids[tokens], weights[tokens])
            out.float().square().sum().backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found.append((out.detach(), mine.grad, grads))
        (out, grad, grads), (want, want_grad, wanted) = found
        here = slice(own * rank, own * (rank + 1))
        assert torch.equal(out, want[here]) and torch.equal(grad, want_grad[here]), (kind, packs)
        assert grads.keys() == wanted.keys() and len(grads) == 2 * 2
        for name, value in grads.items():
            dist.all_reduce(value)
            assert difference(value, wanted[name]) <= BOUND, (kind, packs, name)


@case
@needs_none(MISSING_PEFT)
def adapters_on_packed_experts_that_are_spread(rank, size, group):
    """The numbers of the packed model with adapters in one process, also under autocast."""
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    on_experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
    for autocast in (False, True):
        models = []
        for spread in (True, False):
            model = model_of("Qwen3Moe", **sizes)
            model.requires_grad_(False)
            pack_experts(model, "nf4")
            if spread:
                parallelize_experts(model, init_device_mesh("cpu", (size,)))
            torch.manual_seed(3)
            models.append(peft.get_peft_model(model, on_experts))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [loss_of(models[1], tokens_of(of, 9 + of)) for of in range(size)]
            loss, logits = loss_of(models[0], tokens_of(rank, 9 + rank))
        sum(loss for loss, _ in losses).backward()
        loss.backward()
        # bf16 has 8 bits; two layers round some ten times, and the ranks once more.
        bound = 2.0**-5 if autocast else BOUND
        assert difference(logits, losses[rank][1]) <= bound
        want = {name: p.grad for name, p in models[1].named_parameters() if p.requires_grad}
        found = {name: p.grad for name, p in models[0].named_parameters() if p.requires_grad}
        assert found.keys() == want.keys() and len(want) == 2 * 2 * 2
        for name, value in found.items():
            dist.all_reduce(value)
            assert difference(value, want[name]) <= bound, (autocast, name)


@case
@needs_none(MISSING_PEFT or NO_EXPERT_PARALLELISM_OF_TRANSFORMERS)
def adapters_with_the_parallelism_of_transformers(rank, size, group):
    """Each rank has its experts' part of the factors' gradients."""
    import peft

    if not hasattr(DistributedConfig, "ep_implementation"):
        return
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    on_experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)

    def adapted(model):
        torch.manual_seed(3)
        return peft.get_peft_model(model, on_experts)

    reference, config = adapted(model_of("Qwen3Moe", "eager")), {"fsdp_size": 2, "ep_size": 2}
    losses = [loss_of(reference, tokens_of(of)) for of in range(size)]
    sum(loss for loss, _ in losses).backward()
    options = {"experts_implementation": "moeblaze", "dtype": torch.float32}
    distributed = DistributedConfig(**config, ep_implementation="moeblaze")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved(), distributed_config=distributed, **options)
    model = adapted(loaded)
    loss, logits = loss_of(model, tokens_of(rank))
    loss.backward()
    assert difference(logits, losses[rank][1]) <= BOUND
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys() and len(found) == 2 * 2 * 2
    for name, want in wanted.items():
        dist.all_reduce(found[name])
        assert difference(found[name], want) <= BOUND, name


@case
@needs_none(MISSING_PEFT)
def adapters_on_spread_experts_are_refused(rank, size, group):
    """More ranks than the layer takes, merging, rows in e4m3, and other modules around experts than LoRA's."""
    import peft

    mesh = init_device_mesh("cpu", (size,))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"target_modules": [], "target_parameters": names}
    on_experts = peft.LoraConfig(r=2, **options)

    class Around(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def get_base_layer(self):
            return self.inner

    other = model_of("Qwen3Moe")
    other.model.layers[0].mlp.experts = Around(other.model.layers[0].mlp.experts)
    text = "parallelize_experts: model: expected experts without adapters, or with those of LoRA in peft 0.19 or later"
    expect(NotImplementedError, text, lambda: parallelize_experts(other, mesh))
    model = peft.get_peft_model(model_of("Qwen3Moe"), on_experts)
    model.merge_adapter()
    merged = "parallelize_experts: model: expected experts without merged adapters; "
    expect(ValueError, merged, lambda: parallelize_experts(model, mesh))
    model.unmerge_adapter()
    parallelize_experts(model, mesh)  # as nothing has changed
    text_of_merge = "moeblaze: merge: expected experts in floats on one rank, got spread Qwen3MoeExperts"
    expect(RuntimeError, text_of_merge, model.merge_adapter)
    assert not any(getattr(part, "merged", False) for part in model.modules())
    in_fp8 = model_of("Qwen3Moe")
    parallelize_experts(in_fp8, mesh, precision="fp8", row_precision="fp8")
    in_fp8 = peft.get_peft_model(in_fp8, on_experts)
    text = (
        "expert_parallel_moe: row_precision: expected None with lora, as factors multiply rows in bfloat16, got 'fp8'"
    )
    expect(ValueError, text, loss_of, in_fp8, tokens_of(rank))
    wide = peft.get_peft_model(model_of("Qwen3Moe"), peft.LoraConfig(r=257, **options))
    parallelize_experts(wide, mesh)
    text = "moeblaze: Qwen3MoeExperts: the active adapters of a weight have 257 ranks together, more than 256"
    expect(NotImplementedError, text, loss_of, wide, tokens_of(rank))


@case
def patched_experts_that_are_sharded_themselves(rank, size, group):
    """`fully_shard` of Llama 4's experts, whose weights are whole only while they are called."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        return
    results = []
    for patches in (False, True):
        sizes = SHAPE | {"intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1}
        torch.manual_seed(0)
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, interleave_moe_layer_step=1))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if patches:
            assert len(patch(model).served) == sizes["num_hidden_layers"]
            mesh = init_device_mesh("cpu", (size,))
            for layer in model.model.layers:
                fully_shard(layer.feed_forward.experts, mesh=mesh)
        loss, logits = loss_of(model, tokens_of(0))  # the same tokens on all ranks, so that the mean changes nothing
        loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        results.append({"logits": logits, **whole})
    for name, want in results[0].items():
        assert difference(results[1][name], want) < BOUND, name


@case
@needs_none(MISSING_PEFT)
def adapters_beside_experts_that_are_sharded(rank, size, group):
    """DDP, and FSDP2 of layers, of the experts, of peft's wrappers: each as one process with eager experts and peft."""
    import peft

    from moeblaze_cupy.interop.transformers import experts

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    on_experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)

    def adapted(implementation):
        model = model_of("Qwen3Moe", implementation)
        torch.manual_seed(3)
        return peft.get_peft_model(model, on_experts)

    reference = adapted("eager")
    (sum(loss_of(reference, tokens_of(number))[0] for number in range(size)) / size).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.requires_grad}
    shards = hasattr(torch.cpu.Stream, "record_event")  # what FSDP2 on the CPU needs
    for how in ("DDP", *(("layers", "experts", "wrappers") if shards else ())):
        model = adapted("moeblaze")
        if how == "DDP":
            run = torch.nn.parallel.DistributedDataParallel(model)
        else:
            run, mesh = model, init_device_mesh("cpu", (size,))
            for layer in model.base_model.model.model.layers:
                outer = layer.mlp.experts
                parts = {"layers": (), "experts": (outer.get_base_layer(),), "wrappers": (outer.base_layer, outer)}
                for part in (*parts[how], layer):
                    fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with mock.patch.object(experts, "moe", wraps=experts.moe) as layer_calls:
            loss_of(run, tokens_of(rank))[0].backward()
        assert (
            all(call.kwargs["lora"].a2 is not None for call in layer_calls.mock_calls) and layer_calls.call_count == 2
        )
        for name, parameter in model.named_parameters():
            if name in wanted:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                assert difference(grad, wanted[name]) <= BOUND, (how, name)


@case
def replays_and_loads_of_different_tokens(rank, size, group):
    """Under DDP and FSDP2 each rank replays ids of its own tokens; loads of all ranks are those of one process."""
    tokens = [tokens_of(each, 9 + each) for each in range(size)]  # ranks have different numbers of tokens
    reference = model_of("Qwen3Moe", "eager").train()
    routing, watched = Routing(reference), monitor(reference)
    with routing.record() as record, torch.no_grad():
        for each in tokens:
            reference(input_ids=each)
    ids = [of_rank.roll(1, 1) for of_rank in record.calls]
    for of_rank, each in zip(ids, tokens, strict=True):
        with routing.replay(of_rank):
            (loss_of(reference, each)[0] / size).backward()
    wanted, counts = watched.read(), routing.counts()
    assert counts["differ"] > 0 and wanted.tokens.tolist() == [sum(map(torch.numel, tokens))] * 2
    for kind in ("DDP", "FSDP2"):
        model = model_of("Qwen3Moe").train()
        if kind == "DDP":
            wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            wrapped = fully_shard([fully_shard(layer, mesh=mesh) for layer in model.model.layers] and model, mesh=mesh)
        with Routing(wrapped) as routing:
            loads = monitor(wrapped)
            with routing.replay(ids[rank]):
                loss_of(wrapped, tokens[rank])[0].backward()
            forced = torch.tensor([routing.counts()["forced"], routing.counts()["differ"]])
        assert_gradients(model, reference)
        dist.all_reduce(forced, group=group)
        assert forced.tolist() == [counts["forced"], counts["differ"]], kind
        own = loads.read(reset=False)
        got = loads.read(group=group)
        assert own.tokens.tolist() == [tokens[rank].numel()] * 2 and not torch.equal(own.counts, got.counts)
        assert torch.equal(got.counts, wanted.counts) and torch.equal(got.tokens, wanted.tokens), kind
        for name in ("entropy", "max_logit"):  # logits are float32
            torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=1e-5, atol=0)
        assert not loads.read(group=group).tokens.any()
