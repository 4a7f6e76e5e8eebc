"""Models of transformers whose experts are packed in four and eight bits, beside the numbers that they stand for."""

import copy
import gc
import importlib
import io
import json
import re
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")

from test_transformers import (  # noqa: E402
    CLASSES,
    IN_FLOAT32,
    PATCHED,
    Holder,
    check_equal,
    experts_config,
    step,
    text_model,
    tiny,
    tokens,
    train,
)

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy.interop.transformers import api as backend  # noqa: E402
from moeblaze_cupy.interop.transformers import formula as formulas  # noqa: E402
from moeblaze_cupy.interop.transformers import pack_experts, patch, quantised  # noqa: E402
from moeblaze_cupy.types import WEIGHT_FORMATS  # noqa: E402

L, K, E, D, H = 12, 2, 4, 64, 96
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
NAMES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def config(implementation="moeblaze"):
    made = experts_config(implementation)
    made.hidden_size = made.moe_hidden_size = D
    made.intermediate_size = made.moe_intermediate_size = made.expert_ffn_hidden_size = H
    return made


def with_random_weights(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 1.0)
    return freeze(module)


def freeze(module):
    """Weights of experts become frozen; everything else trains."""
    for name, parameter in module.named_parameters():
        parts = ("gate_up_proj", "up_proj", "down_proj")
        parameter.requires_grad_(parameter.is_floating_point() and not name.endswith(parts))
    return module


def decoded(model, plain):
    """Gives `plain`, the model before it was packed, the numbers that the packed one stands for, in their order."""
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        for name, weight in zip(getattr(one, "moeblaze_packed", ()), quantised.packed(one) or (), strict=True):
            rows = mb.dequantize(weight)
            is_transposed = getattr(other, "is_transposed", type(other).__name__ == "Llama4TextExperts")
            if is_transposed:
                getattr(other, name).data = rows.transpose(1, 2)
            else:
                getattr(other, name).data[: len(rows)] = rows
    return plain


def inputs(identities=0):
    torch.manual_seed(1)
    ids = torch.rand(L, E + identities).argsort(1)[:, :K].contiguous()
    return torch.randn(L, D), ids, torch.rand(L, K), torch.randn(L, D)


def results(module, x, ids, weights, grad_out):
    """Output, and gradients of all that trains, by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(x, ids, weights)
    module.zero_grad()
    out.backward(grad_out)
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def assert_same(got, wanted):
    assert got.keys() == wanted.keys() and len(got) > 2
    for name, value in wanted.items():
        assert value.isfinite().all() and torch.equal(got[name], value), name


def check_module(experts, format, given, tolerance, serve=lambda module: None):
    """The bits of this layer with the decoded weights, and the class's own code on these in float64."""
    plain = copy.deepcopy(experts)
    serve(experts)
    assert pack_experts(experts, format) == ("",) or isinstance(experts, Holder)
    decoded(experts, plain)
    own = copy.deepcopy(plain).double()
    serve(plain)
    got = results(experts, *given)
    assert_same(got, results(plain, *given))
    for module in own.modules():
        if hasattr(module, "config"):
            module.config = config("eager")
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    check_equal(got, results(own, *wide), tolerance)


# float32 beside float64 over sums of at most 192 products.
CLOSE = 2e-6


@pytest.mark.parametrize(
    ("module", "name", "format"),
    [(*of, WEIGHT_FORMATS[i % len(WEIGHT_FORMATS)]) for i, of in enumerate(CLASSES)]
    + [(*of, format) for of in CLASSES if of[1] in ("Qwen3MoeExperts", "GptOssExperts") for format in WEIGHT_FORMATS],
)
def test_class(module, name, format):
    torch.manual_seed(0)
    experts = with_random_weights(getattr(importlib.import_module(module), name)(config()))
    check_module(experts, format, inputs(), 2 * CLOSE if name in IN_FLOAT32 else CLOSE)


@pytest.mark.parametrize("kind", ["LongcatFlashExperts", "Step3p7Experts", "Llama4TextExperts"])
def test_patched_class(kind, monkeypatch):
    family = {"L": "llama4", "S": "step3p7"}.get(kind[0] if kind != "LongcatFlashExperts" else "", "longcat_flash")
    family = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if not hasattr(family, kind):
        pytest.skip(f"this transformers has no {kind}")
    monkeypatch.setattr(formulas, "_WARNED", set())
    of_experts, identities = config(), 2 if kind == "LongcatFlashExperts" else 0
    of_experts.zero_expert_num = identities
    torch.manual_seed(0)
    if kind == "Llama4TextExperts":
        sizes = {"hidden_size": D, "intermediate_size": H, "num_local_experts": E, "num_experts_per_tok": 1}
        experts = with_random_weights(family.Llama4TextMoe(transformers.Llama4TextConfig(**sizes)))
        plain = copy.deepcopy(experts)
        patch(experts)
        assert pack_experts(experts, "nf4") == ("experts",)
        x = inputs()[0].requires_grad_()
        found = []
        for module in (experts, decoded(experts, plain)):
            module.zero_grad()
            out, _ = module(x)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            found.append((out, grad))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())
        return
    experts = Holder(with_random_weights(getattr(family, kind)(of_experts)))
    check_module(experts, "mxfp4", inputs(identities), CLOSE, patch)


def both(model_type, format, **sizes):
    """A packed model in bf16 whose router, norms and biases train, and the same one with decoded weights."""
    model = freeze(tiny(model_type, "moeblaze", **SIZES | sizes).bfloat16())
    plain = copy.deepcopy(model)
    assert pack_experts(model, format) == pack_experts(model, format) == NAMES
    return model, decoded(model, plain)


@pytest.mark.parametrize("of", [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "e4m3")], ids=" ".join)
def test_model(of):
    """A step, checkpointing of both kinds, generation, evaluation, autocast, deepcopy, and what compiled code calls."""
    model_type, format = of
    sizes = {"moe_intermediate_size": 128, "intermediate_size": 128} if format == "e4m3" else {}
    model, plain = both(model_type, format, **sizes)
    wanted = step(plain)
    assert any("router" in name or "gate.weight" in name for name in wanted)
    assert_same(step(model), wanted)
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.train()
        assert_same(step(model), wanted)
    model.gradient_checkpointing_disable()
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.eval().generate(tokens(), **options), plain.eval().generate(tokens(), **options))
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    assert_same(step(copy.deepcopy(model)), wanted)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(tokens()).logits, wanted["logits"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.float()(tokens()).logits, plain.float()(tokens()).logits)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_state_dict(format):
    """It has no empty parameters, and goes to models that are packed on the CPU and on meta."""
    model, _ = both("gpt_oss", format)
    state, wanted = model.state_dict(), step(model)
    data = "blocks" if format == "mxfp4" else "data"
    first = {key.removeprefix(NAMES[0] + "."): value for key, value in state.items() if key.startswith(NAMES[0])}
    of_parts = {f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in (data, "scales", "bias")}
    assert set(first) == of_parts
    assert {value.dtype for key, value in first.items() if "bias" not in key} == {torch.uint8}
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    other = tiny("gpt_oss", "moeblaze", **SIZES).bfloat16().requires_grad_(False)
    with torch.device("meta"):
        on_meta = tiny("gpt_oss", "moeblaze", **SIZES).bfloat16().requires_grad_(False)
    for loaded in (other, on_meta):
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.mul_(-1)
        pack_experts(loaded, format)
    other.load_state_dict(torch.load(stored))
    on_meta.load_state_dict(state, assign=True)
    on_meta.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # whose buffers no state dict has
    for loaded in (other, on_meta):
        for name, parameter in loaded.named_parameters():
            parameter.requires_grad_(model.get_parameter(name).requires_grad)
        assert_same(step(loaded), wanted)
    del state[f"{NAMES[0]}.down_proj_scales"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "[^"]*down_proj_scales"\.'):
        other.load_state_dict(state)


def test_weights_are_freed_module_by_module(monkeypatch):
    """When a module is packed, the weights of the ones before have gone, and 0.27 of their bytes are left."""
    model = freeze(tiny("qwen3_moe", "moeblaze", **SIZES).bfloat16())
    whole = [weakref.ref(p) for name in NAMES for p in model.get_submodule(name).parameters()]
    before = sum(ref().nbytes for ref in whole)
    alive = []

    def counted(*arguments, real=quantised.quantised.quantize_experts):
        gc.collect()
        alive.append(sum(ref() is not None for ref in whole))
        return real(*arguments)

    monkeypatch.setattr(quantised.quantised, "quantize_experts", counted)
    pack_experts(model, "mxfp4")
    gc.collect()
    assert alive == [4, 2] and not any(ref() is not None for ref in whole)
    after = sum(p.nbytes for name in NAMES for p in model.get_submodule(name).parameters())
    assert after == before * 4.25 / 16


def test_trainer_with_adapters_on_attention(tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    losses = []
    for model in both("qwen3_moe", "nf4"):
        torch.manual_seed(3)
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        losses.append(train(peft.get_peft_model(model, adapters), tmp_path, gradient_checkpointing=True))
    assert losses[0] == losses[1] and len(losses[0]) == 3 and all(norm > 0 for _, norm in losses[0])


def test_kbit_preparation_leaves_the_bytes():
    """It casts all that is in bf16 to float32; experts stay in bf16, as they were packed."""
    peft = pytest.importorskip("peft")
    model, _ = both("gpt_oss", "nf4")
    parts = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.lm_head.weight.dtype == torch.float32 and len(parts) == 8
    assert all(torch.equal(model.get_parameter(name), value) for name, value in parts.items())
    assert {form.dtype for form in model.get_submodule(NAMES[0]).moeblaze_packed.values()} == {"bfloat16"}
    assert model(tokens()).logits.isfinite().all()


def expect(error, message):
    return pytest.raises(error, match=re.escape(message))


def test_messages():
    model, first = tiny("qwen3_moe", "moeblaze", **SIZES).bfloat16(), NAMES[0]
    with expect(ValueError, "pack_experts: format: expected one of 'mxfp4', 'nf4', 'e4m3', 'int8', got 'fp4'"):
        pack_experts(model, "fp4")
    with expect(ValueError, f"pack_experts: {first}.gate_up_proj: expected a frozen weight; model.requires_grad_"):
        pack_experts(model, "nf4")
    with expect(ValueError, "pack_experts: model: expected experts that transformers dispatches or that `patch`"):
        pack_experts(torch.nn.Linear(2, 2), "nf4")
    with expect(TypeError, "quantize_experts: w1: expected dtype bfloat16 or float32, got float16"):
        pack_experts(copy.deepcopy(model).half().requires_grad_(False), "nf4")
    model.requires_grad_(False)
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    with expect(NotImplementedError, f"pack_experts: {NAMES[1]}: Qwen3MoeExperts: its activation is none of"):
        pack_experts(other, "nf4")
    pack_experts(model, "nf4")
    with expect(ValueError, f"pack_experts: {first}: expected experts in floats or 'int8', got 'nf4'"):
        pack_experts(model, "int8")
    with expect(RuntimeError, "only Tensors of floating point"):
        copy.deepcopy(model).requires_grad_(True)
    experts = model.get_submodule(first)
    experts.gate_up_proj.requires_grad_()
    with expect(ValueError, "moeblaze: Qwen3MoeExperts.gate_up_proj: expected a frozen weight, as it is packed"):
        model(tokens())
    experts.gate_up_proj.requires_grad_(False)
    model.set_experts_implementation("eager")
    with expect(RuntimeError, "moeblaze: experts_implementation: expected a name of `register` for packed experts; "):
        model(tokens())
    backend.register("moeblaze_fp8", precision="fp8")
    model.set_experts_implementation("moeblaze_fp8")
    with expect(ValueError, "moe: precision: expected None with QuantizedWeight, got 'fp8'"):
        model(tokens())
    with expect(ValueError, f"quantize_weights: {first}: expected experts in floats, got packed ones"):
        backend.quantize_weights(model)
    model.set_experts_implementation("moeblaze")
    experts.act_fn = torch.nn.Tanh()  # nothing else can compute with its weights
    with expect(NotImplementedError, "moeblaze: Qwen3MoeExperts: its activation is none of"):
        model(tokens())


def test_what_lies_in_parts_of_a_patched_module_is_refused():
    *family, sizes = PATCHED["DbrxExperts"]
    model = text_model(*family, **sizes).float().requires_grad_(False)
    patch(model)
    name = "transformer.blocks.0.ffn.experts"
    with expect(NotImplementedError, f"pack_experts: {name}: DbrxExperts: its weights are in its parts"):
        pack_experts(model, "nf4")


ROUTER = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with a tiny gpt-oss as its checkpoints are: uint8 of blocks of 16 bytes and of scales."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    safetensors = pytest.importorskip("safetensors.torch")
    model = tiny("gpt_oss", "eager", **SIZES).bfloat16()
    rng, state = torch.Generator().manual_seed(5), {}
    for name, value in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, k, n = value.shape
            blocks = torch.randint(256, (num_experts, n, k // 32, 16), generator=rng)
            state[f"{name}_blocks"] = blocks.to(torch.uint8)
            state[f"{name}_scales"] = torch.randint(119, 124, blocks.shape[:3], generator=rng).to(torch.uint8)
        else:
            state[name] = torch.randn(value.shape, generator=rng).bfloat16() * value.shape[-1] ** -0.5
    safetensors.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    of_model = model.config.to_dict() | {"dtype": "bfloat16"}
    of_model["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ROUTER}
    (folder / "config.json").write_text(json.dumps(of_model))
    return folder


def loaded(folder, implementation="moeblaze", **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation, **options)
    model.generation_config.eos_token_id = None
    return model


def test_published_gpt_oss(published, tmp_path, capsys):
    """Its tensors are the model's, the rest trains, and saving gives the same files, which others read as before."""
    from safetensors.torch import load_file

    model = loaded(published)
    assert model.hf_quantizer.is_trainable and not model.training
    experts = model.get_submodule(NAMES[0])
    stored = load_file(published / "model.safetensors")
    assert {name: value.shape for name, value in model.state_dict().items()} == {n: v.shape for n, v in stored.items()}
    assert torch.equal(experts.gate_up_proj_blocks, stored[f"{NAMES[0]}.gate_up_proj_blocks"])
    assert {form.dtype for form in experts.moeblaze_packed.values()} == {"bfloat16"}
    plain = loaded(published, "eager")  # transformers' own way, which dequantises here
    assert not hasattr(plain.get_submodule(NAMES[0]), "moeblaze_packed")
    for name in NAMES:
        for got, wanted in zip(quantised.packed(model.get_submodule(name)), ("gate_up_proj", "down_proj"), strict=True):
            assert torch.equal(mb.dequantize(got).transpose(1, 2), getattr(plain.get_submodule(name), wanted))
    decoded(model, plain).set_experts_implementation("moeblaze")
    for each in (model, plain):
        freeze(each)
    wanted = step(plain)
    assert f"{NAMES[1]}.gate_up_proj_bias" in wanted and "model.layers.0.mlp.router.weight" in wanted
    assert_same(step(model), wanted)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens(), **options), plain.generate(tokens(), **options))

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    again, others = loaded(tmp_path), loaded(tmp_path, "eager")
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, wanted["logits"])
    assert torch.equal(others.get_submodule(NAMES[0]).down_proj, plain.get_submodule(NAMES[0]).down_proj)
    assert pack_experts(again, "mxfp4") == NAMES


def test_published_gpt_oss_in_floats(published):
    """What the caller asks to dequantise is not packed; float32 on the CPU decodes to float32."""
    floats = loaded(published, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert not hasattr(floats.get_submodule(NAMES[0]), "moeblaze_packed")
    wide = loaded(published, dtype=torch.float32)
    assert {form.dtype for form in wide.get_submodule(NAMES[0]).moeblaze_packed.values()} == {"float32"}
    for name in NAMES:
        for weight, of in zip(quantised.packed(wide.get_submodule(name)), ("gate_up_proj", "down_proj"), strict=True):
            want = getattr(floats.get_submodule(name), of).float()  # four bits are exact in bf16
            assert torch.equal(mb.dequantize(weight).transpose(1, 2), want)


def test_trainer_on_published_gpt_oss(published, tmp_path):
    """Adapters of attention train as over the dequantised model, and their file goes from one to the other."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    losses, plain = [], loaded(published, "eager")
    model = loaded(published)
    decoded(model, plain).set_experts_implementation("moeblaze")
    for base in (model, plain):
        torch.manual_seed(3)
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        adapted = peft.get_peft_model(base, adapters)
        losses.append(train(adapted, tmp_path / "run"))
        adapted.save_pretrained(tmp_path / str(len(losses)))
    assert losses[0] == losses[1] and len(losses[0]) == 3 and all(norm > 0 for _, norm in losses[0])
    restored = peft.PeftModel.from_pretrained(loaded(published), tmp_path / "2").eval()
    with torch.no_grad():
        assert torch.equal(restored(tokens()).logits, adapted.eval()(tokens()).logits)
    with pytest.raises(ValueError, match="purely quantized"):
        train(loaded(published), tmp_path)


def test_fsdp2(published):
    """It shards the bytes; DistributedDataParallel takes the model, too."""
    dist, fsdp = torch.distributed, pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs torch.distributed.fsdp.fully_shard")
    model, plain = both("qwen3_moe", "nf4")
    wanted = step(plain)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(
            torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))(tokens()).logits, wanted["logits"]
        )
        for part in (*model.model.layers, model):
            fsdp.fully_shard(part, reshard_after_forward=True)
        got = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in step(model).items()}
        assert_same(got, wanted)
    finally:
        dist.destroy_process_group()
