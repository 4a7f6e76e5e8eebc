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
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy.interop.transformers import api as backend  # noqa: E402
from moeblaze_cupy.interop.transformers import formula as formulas  # noqa: E402
from moeblaze_cupy.interop.transformers import pack_experts, patch, private, quantised  # noqa: E402
from moeblaze_cupy.types import WEIGHT_FORMATS  # noqa: E402
from tests.torch_versions import NO_SHARDING_ON_THE_CPU, needs_models_that_compile  # noqa: E402

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
    """A step, checkpointing of both kinds, generation, evaluation, autocast and deepcopy."""
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
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.float()(tokens()).logits, plain.float()(tokens()).logits)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_casts_after_packing(model_type):
    """Packed weights keep the dtype that they multiply in, to which biases are brought."""
    model, _ = both(model_type, "mxfp4")
    experts = model.get_submodule(NAMES[0])
    x, ids, weights = torch.randn(6, 64).bfloat16(), torch.arange(12).view(6, 2) % 4, torch.rand(6, 2)
    wanted = experts(x, ids, weights)
    for dtype in (torch.float32, torch.float64):
        got = experts.to(dtype)(x.to(dtype), ids, weights.to(dtype))
        assert got.dtype == dtype and torch.equal(got, wanted.to(dtype))
    expected = "bfloat16 for packed experts, got float16"
    with expect(TypeError, f"moeblaze: torch.autocast: expected {expected}"), torch.autocast("cpu", torch.float16):
        experts(x, ids, weights)


@needs_models_that_compile
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_compiled_code_calls_it_between_graphs(model_type):
    model, plain = both(model_type, "nf4")
    wanted = step(plain)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(tokens(), labels=tokens())
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same({"logits": out.logits.detach(), **grads}, wanted)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_state_dict(format):
    """It goes to models that are packed on the CPU and on meta, also without the empty parameters."""
    model, _ = both("gpt_oss", format)
    state, wanted = model.state_dict(), step(model)
    data = "blocks" if format == "mxfp4" else "data"
    first = {key.removeprefix(NAMES[0] + "."): value for key, value in state.items() if key.startswith(NAMES[0])}
    places = "gate_up_proj", "down_proj"
    of_parts = {f"{name}_{part}" for name in places for part in (data, "scales", "bias")}
    assert set(first) == {*of_parts, *places}
    assert {first.pop(name).numel() for name in places} == {0}
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
    on_meta.load_state_dict({key: value for key, value in state.items() if not key.endswith(places)}, assign=True)
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
    held = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert held() is None  # not only when cycles are collected


def test_trainer_with_adapters_on_attention(tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    losses = []
    for model in both("qwen3_moe", "nf4"):
        torch.manual_seed(3)
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        losses.append(train(peft.get_peft_model(model, adapters), tmp_path, gradient_checkpointing=True))
    assert losses[0] == losses[1] and len(losses[0]) == 3 and all(norm > 0 for _, norm in losses[0])


ON_EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(model, **options):
    """Factors are random, so that all have gradients."""
    peft = pytest.importorskip("peft", minversion="0.21", reason="older ones look at the shape of the empty parameter")
    torch.manual_seed(3)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **ON_EXPERTS | options)
    )


@pytest.mark.parametrize(("model_type", "format"), [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4")])
def test_adapters_on_packed_experts(model_type, format, tmp_path):
    """They have the shapes, the numbers and the file of adapters on weights in floats."""
    peft = pytest.importorskip("peft")
    model, plain = both(model_type, format)
    bare, copied = step(plain)["logits"], copy.deepcopy(model)
    packed, floats = adapted(model), adapted(plain)
    wanted = step(floats)
    assert_same(step(adapted(copied)), wanted)
    assert sum("lora_" in name for name in wanted) == 8 and not torch.equal(wanted["logits"], bare)
    assert_same(step(packed), wanted)
    with packed.disable_adapter():
        assert torch.equal(packed(tokens()).logits, bare)
    floats.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(both(model_type, format)[0], tmp_path)
    assert torch.equal(loaded(tokens()).logits, wanted["logits"])


def test_merging_on_packed_experts_changes_nothing():
    """Adapters of attention stay as they were, too, and merged ones are refused before packing."""
    packed = adapted(both("qwen3_moe", "nf4")[0], target_modules=["q_proj"])
    wanted = step(packed)
    assert any("q_proj.lora_A" in name for name in wanted)
    for merge in (packed.merge_adapter, packed.merge_and_unload):
        with expect(RuntimeError, "moeblaze: merge: expected experts in floats on one rank, got packed Qwen3Moe"):
            merge()
        assert_same(step(packed), wanted)
    wrapper = packed.get_submodule(f"base_model.model.{NAMES[0]}")
    wrapper.merged_adapters.append("default")
    with expect(RuntimeError, "moeblaze: unmerge: expected experts in floats on one rank, got packed "):
        packed.unmerge_adapter()
    assert wrapper.merged_adapters == ["default"]
    merged = adapted(freeze(tiny("qwen3_moe", "moeblaze", **SIZES).bfloat16()))
    merged.merge_adapter()
    with expect(ValueError, "pack_experts: model: expected experts without merged adapters; "):
        pack_experts(merged, "nf4")
    merged.unmerge_adapter()
    assert len(pack_experts(merged, "nf4")) == 2


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


def expect_refusals_by_implementation(model, other):
    """Packed experts run neither by transformers' own implementation `other` nor with products in e4m3."""
    model.set_experts_implementation(other)
    with expect(RuntimeError, "moeblaze: experts_implementation: expected a name of `register` for packed experts; "):
        model(tokens())
    backend.register("moeblaze_fp8", precision="fp8")
    model.set_experts_implementation("moeblaze_fp8")
    with expect(
        ValueError, "moe: precision: expected None with QuantizedWeight, unless w1 and w2 are in 'mxfp4', got 'fp8'"
    ):
        model(tokens())


def test_messages(tmp_path):
    model, first = tiny("qwen3_moe", "moeblaze", **SIZES).bfloat16(), NAMES[0]
    with expect(ValueError, "pack_experts: format: expected one of None, 'mxfp4', 'nf4', 'e4m3', 'int8', got 'fp4'"):
        pack_experts(model, "fp4")
    with expect(ValueError, f"pack_experts: {first}.gate_up_proj: expected a frozen weight; model.requires_grad_"):
        pack_experts(model, "nf4")
    with expect(ValueError, "pack_experts: model: expected experts that transformers dispatches or that `patch`"):
        pack_experts(torch.nn.Linear(2, 2), "nf4")
    half = copy.deepcopy(model).half().requires_grad_(False)
    for given in (half, copy.deepcopy(half).to("meta")):
        text = f"pack_experts: {first}.gate_up_proj: expected bfloat16 or float32 for packed experts, got float16"
        with expect(TypeError, text):
            pack_experts(given, "nf4")
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
    expect_refusals_by_implementation(model, "eager")
    with expect(ValueError, f"quantize_weights: {first}: expected experts in floats, got packed ones"):
        backend.quantize_weights(model)
    around = tiny("qwen3_moe", "moeblaze", **SIZES)
    around.model.layers[0] = model.model.layers[0]  # what is around a packed part does not know of it
    for part in (model, copy.deepcopy(model), model.model, around):
        with expect(RuntimeError, "save_pretrained: model: expected experts in floats, got those of pack_experts: "):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.set_experts_implementation("moeblaze")
    experts.act_fn = torch.nn.Tanh()  # nothing else can compute with its weights
    with expect(NotImplementedError, "moeblaze: Qwen3MoeExperts: its activation is none of"):
        model(tokens())


ONE = ("num_experts", "num_local_experts", "num_experts_per_tok")


def test_adapters_of_transformers_are_saved_alone(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    # transformers 5.24 asks for peft 0.22. What is called here is there in 0.21, too.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    model = tiny("qwen3_moe", "moeblaze", **SIZES)
    model.requires_grad_(False)
    pack_experts(model, "nf4")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    saved = {path.name for path in tmp_path.iterdir()}
    assert saved >= {"adapter_config.json", "adapter_model.safetensors"} and "model.safetensors" not in saved


def test_adapters_on_packed_experts_that_do_not_take_them():
    """Errors are those without adapters. A single expert, a plain matrix to peft, has its own."""
    expect_refusals_by_implementation(adapted(both("qwen3_moe", "nf4")[0]), "grouped_mm")
    single = adapted(both("qwen3_moe", "nf4", **dict.fromkeys(ONE, 1))[0])
    with expect(RuntimeError, "moeblaze: Qwen3MoeExperts: expected experts in floats, or several and a known version"):
        single(tokens())
    with single.disable_adapter():
        assert single(tokens()).logits.isfinite().all()


def test_unpickled_patched_experts_need_patch():
    """Unpickling gives them the forward of their class, which would meet empty weights."""
    *family, sizes = PATCHED["Llama4TextExperts"]
    model = text_model(*family, **sizes).float().requires_grad_(False)
    patch(model)
    pack_experts(model, "int8")
    wanted = model(tokens()).logits
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    with expect(RuntimeError, "moeblaze: Llama4TextExperts: call `patch` for packed experts, as before packing"):
        again(tokens())
    patch(again)
    assert torch.equal(again(tokens()).logits, wanted)


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
    parts = {name: value.shape for name, value in model.state_dict().items() if value.numel()}
    assert parts == {n: v.shape for n, v in stored.items()}
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
    again.save_pretrained(tmp_path / "again")


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
    with expect(TypeError, "from_pretrained: dtype: expected bfloat16 or float32 for packed experts, got float16"):
        loaded(published, dtype=torch.float16)


def test_a_checkpoint_without_a_tensor_is_refused(published, tmp_path):
    """Nothing else would fill the memory of its part."""
    from safetensors.torch import load_file, save_file

    state = load_file(published / "model.safetensors")
    gone = [f"{NAMES[1]}.{name}" for name in ("gate_up_proj_bias", "down_proj_scales")]
    save_file({n: v for n, v in state.items() if n not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ValueError, match="from_pretrained: checkpoint: expected one with all tensors of ") as caught:
        loaded(tmp_path)
    named = str(caught.value).partition("got none for ")[2].split(", ")
    assert sorted(named) == sorted(gone)


def test_layers_that_a_checkpoint_has_in_floats_stay(published, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(published / "model.safetensors")
    floats = loaded(published, "eager").state_dict()
    state = {name: value for name, value in state.items() if NAMES[0] not in name or "bias" in name}
    state |= {name: value.contiguous() for name, value in floats.items() if NAMES[0] in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    of_model = json.loads((published / "config.json").read_text())
    of_model["quantization_config"]["modules_to_not_convert"] = [*ROUTER, NAMES[0]]
    (tmp_path / "config.json").write_text(json.dumps(of_model))
    model = loaded(tmp_path)
    assert [hasattr(model.get_submodule(name), "moeblaze_packed") for name in NAMES] == [False, True]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, loaded(published)(tokens()).logits, rtol=0.02, atol=0.02)


def test_trainer_on_published_gpt_oss(published, tmp_path):
    """Adapters of attention and of experts train as over the dequantised model, and load from its file."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    losses, plain = [], loaded(published, "eager")
    model = loaded(published)
    decoded(model, plain).set_experts_implementation("moeblaze")
    for base in (model, plain):
        over = adapted(base, target_modules=["q_proj", "v_proj"])
        losses.append(train(over, tmp_path / "run"))
        over.save_pretrained(tmp_path / str(len(losses)))
    assert losses[0] == losses[1] and len(losses[0]) == 3 and all(norm > 0 for _, norm in losses[0])
    restored = peft.PeftModel.from_pretrained(loaded(published), tmp_path / "2").eval()
    with torch.no_grad():
        assert torch.equal(restored(tokens()).logits, over.eval()(tokens()).logits)
    with pytest.raises(ValueError, match="purely quantized"):
        train(loaded(published), tmp_path)


def test_fsdp2(tmp_path):
    """It shards the bytes; DistributedDataParallel takes the model, too. Checkpoints are of all, or of what trains."""
    if NO_SHARDING_ON_THE_CPU:
        pytest.skip(NO_SHARDING_ON_THE_CPU)
    dist, fsdp = torch.distributed, importlib.import_module("torch.distributed.fsdp")
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
        x, ids, weights = torch.zeros(2, 64).bfloat16(), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        with expect(RuntimeError, "moeblaze: Qwen3MoeExperts: expected whole packed experts; "):
            model.get_submodule(NAMES[0])(x, ids, weights)
        checkpoint = importlib.import_module("torch.distributed.checkpoint")
        states = importlib.import_module("torch.distributed.checkpoint.state_dict")
        options = states.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        trained = states.get_model_state_dict(model, options=options)
        assert set(trained) == {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
        state = states.get_model_state_dict(model)
        checkpoint.save({"model": state}, checkpoint_id=tmp_path)
        for part in state.values():
            part.detach().zero_()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path)
        states.set_model_state_dict(model, state)
        got = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in step(model).items()}
        assert_same(got, wanted)
    finally:
        dist.destroy_process_group()


def test_patched_experts_that_fsdp2_shards_are_not_called_alone():
    if NO_SHARDING_ON_THE_CPU:
        pytest.skip(NO_SHARDING_ON_THE_CPU)
    dist, fsdp = torch.distributed, importlib.import_module("torch.distributed.fsdp")
    *family, sizes = PATCHED["Llama4TextExperts"]
    model = text_model(*family, **sizes).bfloat16().requires_grad_(False)
    patch(model)
    pack_experts(model, "int8")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(model)
        with expect(RuntimeError, "moeblaze: Llama4TextExperts: expected whole packed experts; "):
            model.model.layers[0].feed_forward.experts(torch.zeros(8, model.config.hidden_size).bfloat16())
    finally:
        dist.destroy_process_group()


NO_FP8 = not hasattr(private, "FP8Experts") and "this transformers has no FP8Experts"


def fp8_experts(of_config=None, **options):
    """`FP8Experts` as a quantiser of transformers makes it, with random codes and scales."""
    made = use_experts_implementation(
        experts_class=private.FP8Experts,
        experts_interface=private.ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=options.get("has_gate", True),
    )
    experts = made(of_config or config(), **{"block_size": (32, 32)} | options)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in experts.named_parameters():
        if parameter.dtype == torch.float32:
            parameter.data = torch.rand(parameter.shape, generator=rng) / 20 + 0.02
        elif "scale" in name:
            codes = torch.randint(121, 125, parameter.shape, generator=rng)
            parameter.data = codes.to(torch.uint8).view(parameter.dtype)
        elif parameter.dtype == torch.int8:
            parameter.data = torch.randint(-128, 128, parameter.shape, generator=rng).to(torch.int8)
        else:
            parameter.data = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
    return experts.requires_grad_(False)


def of_fp8(experts, name):
    """(E, N, K) in float64."""
    codes, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
    if codes.dtype == torch.int8:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        nibbles = codes.view(torch.uint8).long()
        codes = torch.stack([table[nibbles & 15], table[nibbles >> 4]], -1).flatten(-2)
    if scales.element_size() == 1:
        scales = 2.0 ** (scales.view(torch.uint8).double() - 127)
    _, n, k = codes.shape
    rows, columns = (-(-size // of) for size, of in zip((n, k), scales.shape[1:], strict=True))
    if experts.block_size is not None and codes is getattr(experts, name):
        rows, columns = experts.block_size
    scales = scales.double().repeat_interleave(rows, 1)[:, :n]
    return codes.double() * scales.repeat_interleave(columns, 2)[:, :, :k]


class Decoded(torch.nn.Module):
    """What experts compute with their numbers in bf16, all else in float64."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        self.weights = [of_fp8(experts, name).bfloat16().double() for name in quantised.projections(experts)]

    def forward(self, x, ids, weights):
        out = 0
        for slot in range(ids.shape[1]):
            up, down = (w[ids[:, slot]] for w in self.weights)
            hidden = torch.einsum("lnk,lk->ln", up, x.double())
            hidden = self.experts._apply_gate(hidden) if self.experts.has_gate else self.experts.act_fn(hidden)
            out = out + torch.einsum("lnk,lk->ln", down, hidden.double()) * weights[:, slot, None].double()
        return out


FP8 = {
    "blocks": {},
    "blocks that do not divide": {"block_size": (40, 40)},
    "no blocks": {"block_size": None},
    "powers of two": {"scale_fmt": "ue8m0"},
    "static": {"activation_scheme": "static"},
    "four bits": {"expert_dtype": "fp4", "scale_fmt": "ue8m0"},
    "no gate": {"has_gate": False},
    "oai": {"swiglu_alpha": 1.702, "swiglu_limit": 0.7},
    "clamp": {"swiglu_limit": 0.7},
    "softcap": {"mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5},
}


CONSTANTS = ("swiglu_alpha", "swiglu_limit", "mlp_gate_softcap", "mlp_up_softcap")


def swiglu_config(**constants):
    """Without constants `FP8Experts` has a plain swiglu."""
    made = config()
    for name in CONSTANTS:
        setattr(made, name, constants.get(name))
    made.hidden_activation = "silu"
    return made


@pytest.mark.skipif(bool(NO_FP8), reason=str(NO_FP8))
@pytest.mark.parametrize("case", FP8)
def test_fp8_experts(case):
    """They are read in place. bf16 beside float64, the hidden rows rounded once."""
    of_config = swiglu_config(**{name: value for name, value in FP8[case].items() if name in CONSTANTS})
    of_config.hidden_activation = "relu2" if case == "no gate" else "silu"
    options = {name: value for name, value in FP8[case].items() if name not in CONSTANTS}
    if "scale_fmt" in options and not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this torch has no e8m0")
    try:
        experts = fp8_experts(of_config, **options)
    except TypeError:
        pytest.skip(f"this transformers has no {options}")
    x, ids, weights, grad_out = inputs()
    got = results(experts, x.bfloat16(), ids, weights, grad_out.bfloat16())
    wanted = results(Decoded(experts), x.bfloat16().double(), ids, weights.double(), grad_out.bfloat16().double())
    check_equal({name: value.double() for name, value in got.items()}, wanted, 6e-3)
    for weight, name in zip(quantised.packed(experts), quantised.projections(experts), strict=True):
        assert torch.equal(mb.dequantize(weight).double(), of_fp8(experts, name).bfloat16().double())
        assert weight.data.data_ptr() == getattr(experts, name).data_ptr()
    assert patch(Holder(experts)) == (("experts",), {}) and pack_experts(experts) == ("",)


@pytest.mark.skipif(bool(NO_FP8), reason=str(NO_FP8))
def test_fp8_experts_that_train_nothing_are_refused():
    experts, given = fp8_experts(), inputs()[:3]
    experts.requires_grad_(True)
    with expect(
        ValueError, "moeblaze: FP8Experts.gate_up_proj: expected a frozen weight, as it is packed; requires_grad"
    ):
        experts(*given)
    assert experts.eval()(*given).isfinite().all()
    with expect(ValueError, "pack_experts: : expected experts in floats or 'nf4', got 'e4m3'"):
        pack_experts(experts, "nf4")
    experts.requires_grad_(False).train()._apply_gate = lambda columns: columns.chunk(2, -1)[0]
    with pytest.raises(NotImplementedError, match="moeblaze: FP8Experts: "):
        experts(*given)


@pytest.mark.skipif(bool(NO_FP8), reason=str(NO_FP8))
def test_adapters_on_fp8_experts():
    """peft's own way adds BA to codes without their scales, and gives factors no gradient."""
    model = torch.nn.Module()
    model.mlp = Holder(fp8_experts(swiglu_config()))
    plain = Holder(importlib.import_module(CLASS[0]).Qwen3MoeExperts(config()).bfloat16().requires_grad_(False))
    for name in ("gate_up_proj", "down_proj"):
        getattr(plain.experts, name).data = of_fp8(model.mlp.experts, name).bfloat16()
    around = torch.nn.Module()
    around.mlp = plain
    x, ids, weights, grad_out = inputs()
    packed, floats = (adapted(each).base_model.model.mlp for each in (model, around))
    factors = {name: p for name, p in packed.named_parameters() if "lora_" in name}  # which peft rounds to e4m3 first
    floats.load_state_dict(factors, strict=False)
    found = [results(each, x.bfloat16(), ids, weights, grad_out.bfloat16()) for each in (packed, floats)]
    assert_same(*found)
    assert sum("lora_" in name and value.norm() > 0 for name, value in found[0].items()) == 4


@pytest.mark.skipif(bool(NO_FP8), reason=str(NO_FP8))
def test_published_fp8(tmp_path, monkeypatch):
    """An e4m3 checkpoint in blocks, one tensor for each expert. Without a GPU transformers would dequantise it."""
    from safetensors.torch import load_file, save_file
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    tiny("qwen3_moe", "eager", **SIZES).bfloat16().save_pretrained(tmp_path)
    state, rounded = load_file(tmp_path / "model.safetensors"), {}
    for name, value in list(state.items()):
        if ".experts." in name:
            blocks = value.float().view(2, 32, 2, 32)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            state[name], state[f"{name}_scale_inv"] = codes.reshape(64, 64), scales
            rounded[name] = (codes.float() * scales[:, None, :, None]).reshape(64, 64).bfloat16()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    of_model = json.loads((tmp_path / "config.json").read_text())
    skipped = ["self_attn", "lm_head", "model.embed_tokens", "mlp.gate"]
    plan = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ROUTER[:1] + skipped}
    (tmp_path / "config.json").write_text(json.dumps(of_model | {"quantization_config": plan}))
    model = loaded(tmp_path)
    assert type(model.get_submodule(NAMES[0])).__name__ == "FP8Experts"
    plain = loaded(tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    for i, name in enumerate(NAMES):
        experts = plain.get_submodule(name)
        with torch.no_grad():
            for e in range(4):
                parts = [
                    rounded[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")
                ]
                experts.gate_up_proj[e], experts.down_proj[e] = torch.cat(parts[:2]), parts[2]
        up, down = quantised.packed(model.get_submodule(name))
        assert torch.equal(mb.dequantize(up)[3, 64:], rounded[f"model.layers.{i}.mlp.experts.3.up_proj.weight"])
        assert torch.equal(mb.dequantize(down)[3], rounded[f"model.layers.{i}.mlp.experts.3.down_proj.weight"])
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("experts" not in name)
    assert_same(step(model.train()), step(plain.train()))


def check_taken_over(pack, dequantised, exact=True):
    """pack(experts, name) has another library pack a weight; dequantised(experts, name): its numbers."""
    experts = with_random_weights(importlib.import_module(CLASS[0]).Qwen3MoeExperts(config())).bfloat16()
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            pack(experts, name)
    plain = importlib.import_module(CLASS[0]).Qwen3MoeExperts(config()).bfloat16().requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        getattr(plain, name).data = dequantised(experts, name).to(torch.bfloat16)
    with expect(ValueError, "pack_experts: : expected experts in floats or 'mxfp4', got "):
        pack_experts(copy.deepcopy(experts), "mxfp4")
    assert pack_experts(experts) == ("",)
    for weight, name in zip(quantised.packed(experts), ("gate_up_proj", "down_proj"), strict=True):
        assert torch.equal(mb.dequantize(weight), getattr(plain, name))
        assert experts.moeblaze_shapes[name] == tuple(getattr(plain, name).shape)
    x, ids, weights, grad_out = inputs()
    given = x.bfloat16(), ids, weights, grad_out.bfloat16()
    wanted = results(plain, *given)
    assert_same(results(experts, *given), wanted)
    state, other = copy.deepcopy(experts.state_dict()), copy.deepcopy(experts)
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(state)
    assert_same(results(other, *given), wanted)


CLASS = next(of for of in CLASSES if of[1] == "Qwen3MoeExperts")


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested, monkeypatch):
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(globals(), "H", 128)  # nested scales come in blocks of 16,384 elements
    replace = importlib.import_module("bitsandbytes.nn.parametrize").replace_parameter_4bit
    options = {"compress_statistics": nested, "quant_type": "nf4"}

    def dequantised(experts, name):
        packed = experts.parametrizations[name]
        return bnb.functional.dequantize_4bit(packed.original, packed[0].quant_state)

    monkeypatch.setitem(globals(), "D", 128)
    check_taken_over(lambda experts, name: replace(experts, name, **options), dequantised)
    experts = with_random_weights(importlib.import_module(CLASS[0]).Qwen3MoeExperts(config())).bfloat16()
    replace(experts, "down_proj", quant_type="fp4")
    with expect(NotImplementedError, "cannot be read, as they are not in nf4 and blocks of 64: load the model in bf16"):
        pack_experts(experts)


@pytest.mark.parametrize("kind", ["Int8Tensor", "Float8Tensor", "Float8Tensor of one scale"])
def test_torchao(kind):
    torchao = pytest.importorskip("torchao.quantization")
    of_scale = torchao.PerTensor() if "one scale" in kind else torchao.PerRow()
    make = getattr(torchao, kind.split()[0]).from_hp

    def pack(experts, name):
        packed = make(getattr(experts, name).detach(), granularity=of_scale)
        setattr(experts, name, torch.nn.Parameter(packed, requires_grad=False))

    def dequantised(experts, name):
        packed = getattr(experts, name)
        return (packed.qdata.double() * packed.scale.double()).float()

    check_taken_over(pack, dequantised)


def test_experts_in_floats_are_not_taken_over():
    with expect(ValueError, f"pack_experts: format: expected a format for {NAMES[0]}, whose experts are in floats"):
        pack_experts(tiny("qwen3_moe", "moeblaze"))


def step_on_gpu(model):
    model.zero_grad()
    out = model(tokens().cuda(), labels=tokens().cuda())
    out.loss.backward()
    return {"logits": out.logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_close_on_gpu(model, plain):
    """Logits have the same bits. Attention and the embedding add gradients in any order, in bf16."""
    got, wanted = step_on_gpu(model), step_on_gpu(plain)
    assert got.keys() == wanted.keys() and torch.equal(got["logits"], wanted["logits"])
    for name, value in wanted.items():
        assert ((got[name] - value).float().norm() / value.float().norm()).item() < 1e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("of", [("qwen3_moe", "nf4"), ("qwen3_moe", "int8"), ("gpt_oss", "mxfp4")], ids=" ".join)
def test_on_a_gpu(of):
    """Packed on the GPU, with adapters on the experts."""
    model = freeze(tiny(of[0], "moeblaze", **SIZES).bfloat16()).cuda()
    plain = copy.deepcopy(model)
    pack_experts(model, of[1])
    assert all(parameter.is_cuda for parameter in model.parameters())
    decoded(model, plain)
    assert_close_on_gpu(model, plain)
    assert_close_on_gpu(adapted(model), adapted(plain))


@pytest.mark.gpu
def test_published_gpt_oss_on_a_gpu(published):
    pytest.importorskip("accelerate")
    model = loaded(published, device_map="cuda")
    assert all(parameter.is_cuda for parameter in model.parameters())
    plain = loaded(published, quantization_config=transformers.Mxfp4Config(dequantize=True), device_map="cuda")
    decoded(model, plain)
    assert_close_on_gpu(adapted(model), adapted(plain))


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_FP8), reason=str(NO_FP8))
def test_fp8_experts_on_a_gpu():
    experts = fp8_experts(swiglu_config()).cuda()
    plain = importlib.import_module(CLASS[0]).Qwen3MoeExperts(config()).bfloat16().requires_grad_(False).cuda()
    for name in ("gate_up_proj", "down_proj"):
        getattr(plain, name).data = of_fp8(experts, name).bfloat16()
    x, ids, weights, grad_out = (tensor.cuda() for tensor in inputs())
    given = x.bfloat16(), ids, weights, grad_out.bfloat16()
    assert_same(results(experts, *given), results(plain, *given))
