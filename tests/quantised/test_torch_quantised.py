"""`moe` and `MoE` with frozen experts in four and eight bits, on CPU tensors."""

import copy
import io

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy import frameworks as arrays  # noqa: E402
from moeblaze_cupy.interop.torch import MoE, moe  # noqa: E402
from moeblaze_cupy.types import WEIGHT_FORMATS  # noqa: E402
from tests.quantised.test_layer_e4m3 import in_e4m3  # noqa: E402
from tests.quantised.test_layer_quantised import SIZES, decoded, frozen, inputs_of, with_biases  # noqa: E402

NAMES = (*WEIGHT_FORMATS, "mxfp8")


def to_torch(array):
    return arrays.Torch.from_numpy(np.array(array))


def in_torch(weight):
    data = to_torch(weight.data)
    if weight.format == "e4m3":
        data = data.view(torch.float8_e4m3fn)
    return weight._replace(data=data, scales=to_torch(weight.scales))


def case(name="mxfp4", dtype=torch.float32, **options):
    """Inputs that require gradients, the frozen weights, and the same ones as tensors."""
    x, ids, weights, grad_out = inputs_of(dtype=np.float32 if dtype == torch.float32 else ml_dtypes.bfloat16)
    given = [weight._replace(dtype=str(dtype)[6:]) for weight in frozen(name)]
    options = with_biases(options, *(SIZES[letter] for letter in "Edh"))
    of_biases = {n: to_torch(v).requires_grad_() for n, v in options.items() if isinstance(v, np.ndarray)}
    inputs = to_torch(x).requires_grad_(), to_torch(ids), to_torch(weights).requires_grad_()
    plain = [to_torch(np.ascontiguousarray(decoded(weight).swapaxes(1, 2))).transpose(1, 2) for weight in given]
    return inputs, list(map(in_torch, given)), plain, to_torch(grad_out), options | of_biases


def gradients(out, grad_out, inputs, options):
    leaves = [inputs[0], inputs[2], *(v for v in options.values() if isinstance(v, torch.Tensor))]
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def assert_equal(got, want):
    assert len(got) == len(want) > 2
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.isfinite(b).all() and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"save": "recompute"}, {"save": "paper", "keep_saved": True}, {"biases": True}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_moe(name, options, dtype):
    inputs, packed, plain, grad_out, options = case(name, dtype, **options)
    got = gradients(moe(*inputs, *packed, **options), grad_out, inputs, options)
    assert_equal(got, gradients(moe(*inputs, *plain, **options), grad_out, inputs, options))


def fp8_weights_of(gate_up="halves"):
    """Those of `case`'s weights, made by the test."""
    made = in_e4m3(*frozen("mxfp4"), gate_up)
    fields = {name: to_torch(value) for name, value in vars(made).items() if isinstance(value, np.ndarray)}
    of_e4m3 = {name: t.view(torch.float8_e4m3fn) for name, t in fields.items() if t.dtype == torch.uint8}
    return mb.Fp8Weights(**(fields | of_e4m3), gate_up=gate_up)


@pytest.mark.parametrize("options", [{}, {"save": "recompute"}, {"gate_up": "interleaved", "biases": True}], ids=str)
def test_products_in_e4m3(options):
    """Nothing in e4m3 is kept for backward."""
    inputs, packed, plain, grad_out, options = case("mxfp4", torch.bfloat16, **options)
    options["precision"], saved = "fp8", []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = moe(*inputs, *packed, **options)
    assert not [t for t in saved if t.dtype == torch.float8_e4m3fn]
    got = gradients(out, grad_out, inputs, options)
    made = fp8_weights_of(options.get("gate_up", "halves"))
    assert_equal(got, gradients(moe(*inputs, *plain, **options, fp8_weights=made), grad_out, inputs, options))
    with torch.no_grad():
        assert torch.equal(moe(*inputs, *packed, **options), got[0])


def test_modules_with_products_in_e4m3():
    """Packed before or afterwards; near the same experts with products in bf16."""
    own, exact = (module(dtype=torch.bfloat16, precision=precision) for precision in ("fp8", None))
    own.quantize_experts("mxfp4")
    exact.quantize_experts("mxfp4")
    loaded = module(dtype=torch.bfloat16, precision="fp8", expert_format="mxfp4")
    loaded.load_state_dict(own.state_dict())
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for layer in (own, loaded, exact):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.backward(torch.ones_like(out))
        found.append((out.detach(), given.grad, layer.router.grad))
    assert_equal(*found[:2])
    for got, want in zip(found[0], found[2], strict=True):
        assert 0.01 < (got - want).float().norm() / want.float().norm() < 0.1


def test_one_weight_trains_beside_a_frozen_one():
    inputs, packed, plain, grad_out, _ = case("int8")
    w2 = plain[1].detach().requires_grad_()
    got = torch.autograd.grad(moe(*inputs, packed[0], w2), [inputs[0], w2], grad_out)
    want = torch.autograd.grad(moe(*inputs, plain[0], w2), [inputs[0], w2], grad_out)
    assert all(map(torch.equal, got, want))


def test_nothing_of_a_weights_size_is_saved():
    inputs, packed, _, grad_out, _ = case()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = moe(*inputs, *packed, save="recompute")
    parts = {part.data_ptr() for weight in packed for part in (weight.data, weight.scales)}
    assert parts <= {tensor.data_ptr() for tensor in saved}
    assert max(tensor.nbytes for tensor in saved) == packed[0].data.nbytes
    out.backward(grad_out)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    inputs, packed, plain, grad_out, _ = case("nf4")
    out = checkpoint(lambda *given: moe(*given, *packed), *inputs, use_reentrant=use_reentrant)
    out.backward(grad_out)
    got = inputs[0].grad, inputs[2].grad
    want = torch.autograd.grad(moe(*inputs, *plain), [inputs[0], inputs[2]], grad_out)
    assert all(map(torch.equal, got, want))


def test_autocast_and_no_grad():
    inputs, packed, plain, _, _ = case(dtype=torch.bfloat16)
    x = inputs[0].detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x, *inputs[1:], *packed)
        assert torch.equal(out, moe(x, *inputs[1:], *plain)) and out.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(moe(*inputs, *packed), moe(*inputs, *plain))


def test_compiled_code_calls_it_between_graphs():
    inputs, packed, plain, grad_out, options = case()

    def step(x, ids, weights):
        return 2 * moe(x + 1, ids, weights, *packed)

    compiled = torch.compile(step, backend="aot_eager")
    got = gradients(compiled(*inputs), grad_out, inputs, options)
    assert_equal(got, gradients(2 * moe(inputs[0] + 1, *inputs[1:], *plain), grad_out, inputs, options))


def test_messages():
    inputs, packed, *_ = case("nf4")
    trained = packed[0]._replace(scales=packed[0].scales.clone().requires_grad_())
    for given, options, error, message in [
        ((trained, packed[1]), {}, ValueError, "moe: w1.scales: expected a part that requires no gradient"),
        (
            packed,
            {"accumulate_into_main_grad": True},
            ValueError,
            "moe: accumulate_into_main_grad: expected False with",
        ),
        (
            case("nf4")[1],
            {"precision": "fp8"},
            ValueError,
            "moe: precision: expected None with QuantizedWeight, unless",
        ),
        ((packed[0]._replace(data=packed[0].data.numpy()), packed[1]), {}, TypeError, "moe: w1.data: expected a torch"),
        (packed, {"save": None}, ValueError, "moe: save: expected a policy that keeps something"),
    ]:
        with pytest.raises(error) as caught:
            moe(*inputs, *given, **options)
        assert str(caught.value).startswith(message), str(caught.value)
    with pytest.raises(RuntimeError, match="moe: x: expected tensors with memory of their own, outside of transforms"):
        torch.func.vmap(lambda x: moe(x, *inputs[1:], *packed))(inputs[0].detach()[None])


def module(**options):
    torch.manual_seed(3)
    return MoE(64, 64, 4, 2, **options)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_module_is_that_of_the_decoded_weights(name):
    """It trains its router and biases; its state goes to a module that is made for it."""
    own, plain = (module(dtype=torch.bfloat16, expert_bias=True) for _ in range(2))
    made = mb.quantize_experts(own.w1_storage.transpose(1, 2), own.w2_storage.transpose(1, 2), name)
    own.quantize_experts(name)
    with torch.no_grad():
        for parameter, weight in zip((plain.w1_storage, plain.w2_storage), made, strict=True):
            parameter.copy_(mb.dequantize(weight))
    state = own.state_dict()
    packed = {f"w{i}_{part}" for i in (1, 2) for part in ("data", "scales")}
    assert set(state) == {"router", "b1", "b2", *packed}
    assert all(state[key].dtype == torch.uint8 and state[key].shape[0] == 4 for key in packed)
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    loaded = module(dtype=torch.bfloat16, expert_bias=True, expert_format=name)
    loaded.load_state_dict(torch.load(stored))
    on_meta = module(dtype=torch.bfloat16, expert_bias=True, expert_format=name, device="meta")
    on_meta.load_state_dict(state, assign=True)
    for layer in (loaded, on_meta):
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter.dtype != torch.uint8)
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = None
    for layer in (plain, own, loaded, on_meta, copy.deepcopy(own)):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.backward(torch.ones_like(out))
        found = out.detach(), given.grad, layer.router.grad, layer.b1.grad, layer.b2.grad
        want = want or found
        assert all(map(torch.equal, found, want))
    assert f"expert_format={name!r}" in repr(own) and "expert_format" not in repr(plain)


@pytest.mark.parametrize("name", ["nf4", "e4m3"])
def test_casts_of_the_module_leave_the_bytes(name):
    own = module(expert_format=name)
    own.w1_scales.data.random_(1, 60)
    before = {key: value.clone() for key, value in own.state_dict().items() if value.dtype == torch.uint8}
    own.to(torch.bfloat16)
    assert len(before) == 4 and own.router.dtype == torch.bfloat16
    assert all(torch.equal(own.state_dict()[key], value) for key, value in before.items())
    assert own(torch.zeros(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert own(torch.zeros(3, 64)).dtype == torch.bfloat16


def test_fsdp2_shards_bytes():
    """It frees the gathered parts after forward and gathers them again for backward; its casts reach floats alone."""
    dist, fsdp = torch.distributed, pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs torch.distributed.fsdp.fully_shard")
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    plain, sharded = module(), module()
    for layer in (plain, sharded):
        layer.quantize_experts("nf4")
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(sharded, mp_policy=policy, reshard_after_forward=True)
        out = sharded(x)
        out.sum().backward()
        gradient = sharded.router.grad.full_tensor()
        assert {p.dtype for n, p in sharded.named_parameters() if n != "router"} == {torch.uint8}
    finally:
        dist.destroy_process_group()
    plain.bfloat16()
    want = plain(x.bfloat16())
    want.sum().backward()
    assert torch.equal(out, want) and torch.equal(gradient, plain.router.grad.float())


def test_messages_of_the_module():
    with pytest.raises(ValueError, match="MoE: expert_format: expected one of None, 'mxfp4'"):
        module(expert_format="fp4")
    expected = "None with expert_format, unless that is 'mxfp4', got 'fp8' and 'nf4'"
    with pytest.raises(ValueError, match=f"^MoE: precision: expected {expected}$"):
        module(expert_format="nf4", precision="fp8")
    expected = "MoE: quantize_experts: format: expected 'mxfp4' with precision='fp8', got 'nf4'"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        module(precision="fp8", dtype=torch.bfloat16).quantize_experts("nf4")
    for sizes, form, message in (
        ((40, 32), "mxfp4", "d_model: expected a multiple of 32 for 'mxfp4', got 40"),
        ((64, 30), "nf4", "d_hidden: expected a multiple of 8 for 'nf4', got 30"),
    ):
        with pytest.raises(ValueError, match=f"^MoE: {message}$"):
            MoE(*sizes, 2, 1, expert_format=form)
        with pytest.raises(ValueError, match=f"^MoE: quantize_experts: {message}$"):
            MoE(*sizes, 2, 1).quantize_experts(form)
    own = module(expert_format="nf4")
    expected = "expected bfloat16, on the CPU also float32, for packed experts, got torch.float"
    with torch.autocast("cpu", torch.float16), pytest.raises(TypeError, match=f"^MoE: torch.autocast: {expected}16$"):
        own(torch.zeros(3, 64))
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match=f"^MoE: x: {expected}{dtype.itemsize * 8}$"):
            module(expert_format="nf4").to(dtype)(torch.zeros(3, 64, dtype=dtype))
    with pytest.raises(
        RuntimeError, match="MoE: quantize_experts: expected experts in floats, got expert_format='nf4'"
    ):
        own.quantize_experts("nf4")
    with pytest.raises(
        RuntimeError, match="MoE: quantize_weights: expected experts in floats, got expert_format='nf4'"
    ):
        own.quantize_weights()
    for name in ("w1", "w2"):
        assert not hasattr(own, name) and getattr(own, name, 5) == 5
        with pytest.raises(AttributeError, match=f"'MoE' object has no attribute '{name}'"):
            getattr(own, name)
        with pytest.raises(AttributeError, match=f"^MoE.{name}: expected a new {name}_storage, of which it is a view"):
            setattr(own, name, torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AttributeError, match="'MoE' object has no attribute 'w3'"):
        _ = own.w3


def test_optimizers_states_come_to_the_same_parameters():
    """Their states go by place, so a module that was packed has the order of one that was made packed."""
    options = {"lora_rank": 2, "expert_bias": True}
    packed, made = MoE(64, 32, 4, 2, **options), MoE(64, 32, 4, 2, expert_format="nf4", **options)
    packed.quantize_experts("nf4")
    assert list(packed.state_dict()) == list(made.state_dict())
    assert [name for name, _ in packed.named_parameters()] == [name for name, _ in made.named_parameters()]


def test_floats_are_not_loaded_into_packed_experts():
    """Not in silence with strict=False either: the experts would stay zero. An adapter's state has neither."""
    own = torch.nn.ModuleDict({"mlp": MoE(64, 32, 8, 2, expert_format="nf4", lora_rank=8)})
    plain = torch.nn.ModuleDict({"mlp": MoE(64, 32, 8, 2, lora_rank=8)})
    expected = "MoE: load_state_dict: expected packed experts for expert_format='nf4', got mlp.w1_storage, "
    for assign in (False, True):
        with pytest.raises(
            RuntimeError, match=expected + r"mlp.w2_storage; load floats into MoE without expert_format"
        ):
            own.load_state_dict(plain.state_dict(), strict=False, assign=assign)
    own.load_state_dict({name: value for name, value in plain.state_dict().items() if "lora" in name}, strict=False)
    plain["mlp"].quantize_experts("nf4")
    own.load_state_dict(plain.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(own["mlp"](x), plain["mlp"](x)) and own["mlp"](x).any()


def test_packed_experts_are_not_loaded_into_floats():
    """Not in silence with strict=False either: the experts would stay random. Nor with a part that is packed."""
    packed, plain = MoE(64, 32, 4, 2), MoE(64, 32, 4, 2, lora_rank=4)
    packed.quantize_experts("nf4")
    before = plain.w1_storage.clone()
    expected = r"MoE: load_state_dict: expected experts in floats, or MoE\(expert_format=...\), got w1_data, w2_data"
    with pytest.raises(RuntimeError, match=expected):
        plain.load_state_dict(packed.state_dict(), strict=False)
    assert torch.equal(plain.w1_storage, before)
    with pytest.raises(RuntimeError, match="expected packed experts for expert_format='nf4', got w1_storage"):
        packed.load_state_dict(plain.state_dict() | {"w1_data": packed.w1_data}, strict=False)


@pytest.mark.parametrize("merged", [False, True])
def test_adapted_experts_are_not_quantised(merged):
    """Their adapters would be without weights. The module stays as it is."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(MoE(64, 32, 4, 2))
    inner, x = model[0], torch.randn(5, 64)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.w1_storage", "0.w2_storage"])
    adapted = peft.get_peft_model(model, config)
    if merged:
        adapted.merge_adapter()
    want = adapted(x)
    with pytest.raises(RuntimeError, match="MoE: quantize_experts: expected a module without adapters or parametri"):
        inner.quantize_experts("int8")
    assert inner.expert_format is None and torch.equal(adapted(x), want)
    adapted.unload()
    inner.quantize_experts("int8")


def test_parametrized_experts_are_not_quantised():
    layer = MoE(64, 32, 4, 2)
    torch.nn.utils.parametrize.register_parametrization(layer, "w2_storage", torch.nn.Identity())
    with pytest.raises(RuntimeError, match="MoE: quantize_experts: expected a module without adapters or parametri"):
        layer.quantize_experts("int8")
    assert layer.expert_format is None


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_weights_in_turn_on_the_gpu(save):
    """The bits of decoded weights, twice, with another layer's decoding between forward and backward."""
    E, d, h, L = 8, 512, 256, 700
    rng = torch.Generator("cuda").manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    x, grad_out = normal(L, d).requires_grad_(), normal(L, d)
    ids = torch.stack([torch.randperm(E, generator=rng, device="cuda")[:2] for _ in range(L)]).int()
    weights = normal(L, 2).float().abs().requires_grad_()
    given = normal(E, d, 2 * h) / d**0.5, normal(E, h, d) / h**0.5
    packed, other = mb.quantize_experts(*given, "mxfp4"), mb.quantize_experts(*given, "int8")

    def run(w1, w2):
        out = moe(x, ids, weights, w1, w2, save=save)
        with torch.no_grad():
            moe(x, ids, weights, *other)
        return out, *torch.autograd.grad(out, [x, weights], grad_out)

    want = run(*(mb.dequantize(weight).transpose(1, 2) for weight in packed))
    try:
        for limit in (None, 2 * E * 3 * d * h - 1, 2 * E * 2 * d * h):
            mb.limit_scratch(limit)
            for _ in range(2):
                assert all(map(torch.equal, run(*packed), want)), limit
        mb.limit_scratch(2 * E * 2 * d * h - 1)
        with pytest.raises(ValueError, match=r"^moe: w1: expected a weight of at most"):
            run(*packed)
    finally:
        mb.limit_scratch(None)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_products_in_e4m3_in_a_graph_on_the_gpu():
    """Replays give the bits of eager calls, with another layer's decoding before each."""
    layers = [
        MoE(
            512, 256, 8, 2, device="cuda", dtype=torch.bfloat16, precision="fp8", gate_up=order, activation="swiglu_oai"
        )
        for order in ("interleaved", "halves")
    ]
    for layer in layers:
        layer.quantize_experts("mxfp4")
    x = torch.randn(700, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad_out = torch.randn_like(x)

    def step():
        out = layers[0](x)
        return out.detach(), *torch.autograd.grad(out, [x, layers[0].router], grad_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(2):
        layers[1](x)
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, want))
