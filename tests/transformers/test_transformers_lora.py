"""Adapters of peft on experts beside peft's own way, which computes with W + BA."""

import copy
import importlib
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")
peft = pytest.importorskip("peft", minversion="0.19", reason="needs peft 0.19 or later")

from test_transformers import (  # noqa: E402
    CLASSES,
    IN_FLOAT32,
    D,
    E,
    H,
    Holder,
    check_equal,
    experts_config,
    inputs,
    made,
    patched,
    step,
    tiny,
    tokens,
    train,
)
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from moeblaze_cupy.interop.transformers import api as backend  # noqa: E402
from moeblaze_cupy.interop.transformers import experts as layers  # noqa: E402
from moeblaze_cupy.interop.transformers import formula as formulas  # noqa: E402
from moeblaze_cupy.interop.transformers import lora as adapters  # noqa: E402
from moeblaze_cupy.interop.transformers import private  # noqa: E402

VERSION = tuple(map(int, peft.__version__.split(".")[:2]))
BOTH = ("gate_up_proj", "down_proj")
QWEN = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")
GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")  # (E, in, out), and biases


@pytest.fixture
def calls(monkeypatch):
    """w1, w2 and `lora` of every call of the layer."""
    seen = []

    def spying(x, ids, weights, w1, w2, real=layers.moe, **options):
        seen.append((w1, w2, options.get("lora")))
        return real(x, ids, weights, w1, w2, **options)

    monkeypatch.setattr(layers, "moe", spying)
    monkeypatch.setattr(formulas, "_WARNED", set())
    return seen


@pytest.fixture
def sums(monkeypatch):
    """How often W + BA was made."""
    seen, plain = [], private.param_wrapper()._activate_lora

    def spying(self, *arguments):
        seen.append(self.parameter_name)
        return plain(self, *arguments)

    monkeypatch.setattr(private.param_wrapper(), "_activate_lora", spying)
    return seen


def wrappers_of(module):
    """From the outer one to the inner one."""
    return [part for part in module.modules() if isinstance(part, private.param_wrapper())]


def config_of(names=BOTH, prefix="experts.", **options):
    options = {"r": 3, "lora_alpha": 4, "init_lora_weights": False} | options
    return peft.LoraConfig(target_modules=[], target_parameters=[f"{prefix}{name}" for name in names], **options)


def adapted(experts, names=BOTH, **options):
    """A module around experts with adapters, random ones for both factors."""
    torch.manual_seed(3)
    return peft.inject_adapter_in_model(config_of(names, **options), Holder(experts))


def outcome(module):
    """Output and gradients by name, of x, of the router weights and of what is trained."""
    dtype = next(module.parameters()).dtype
    x, ids, weights, grad_out = (t.to(dtype) if t.is_floating_point() else t for t in inputs())
    x, weights = x.requires_grad_(), weights.requires_grad_()
    module.zero_grad()
    out = module(x, ids, weights)
    out.backward(grad_out)
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def switched(module, implementation):
    module.experts.get_base_layer().config._experts_implementation = implementation
    return module


def compare(module, calls, sums, tolerance=1e-12, pairs=(True, True)):
    """One module by eager peft and by the layer. W + BA is not made, and weights and factors are those of peft."""
    sums.clear()
    wanted = outcome(switched(module, "eager"))
    assert len(sums) == sum(pairs) and not calls
    sums.clear()
    check_equal(outcome(switched(module, "moeblaze")), wanted, tolerance)
    ((w1, w2, lora),) = calls
    calls.clear()
    assert not sums
    parameters = dict(module.named_parameters())
    pointers = {parameter.data_ptr() for parameter in parameters.values()}
    given = [w1, w2, *(factor for factor in lora.factors if factor is not None)]
    assert {tensor.data_ptr() for tensor in given} <= pointers and len(given) == 2 + 2 * sum(pairs)
    assert (lora.a1 is not None, lora.a2 is not None) == pairs
    return lora


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_every_class(module, name, calls, sums):
    experts = made(module, name)
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    tolerance = 2e-6 if name in IN_FLOAT32 else 1e-12  # some classes compute in float32
    compare(adapted(experts, (first, "down_proj")), calls, sums, tolerance)


@pytest.mark.parametrize("of", [QWEN, GPT_OSS], ids=["out first", "in first"])
@pytest.mark.parametrize("width", [D, 2 * H])
@pytest.mark.parametrize("names", [BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]], ids=" ".join)
def test_which_weights_in_which_order(names, width, of, calls, sums, monkeypatch):
    """Wrappers nest in the order of the module's parameters. Square weights do not show how they lie."""
    test_transformers = importlib.import_module("test_transformers")
    monkeypatch.setattr(test_transformers, "H", width // (1 if width == D else 2))
    monkeypatch.setattr(test_transformers, "D", width)
    experts = made(*of)
    parameters = {name: experts._parameters.pop(name) for name in BOTH}
    experts._parameters.update({name: parameters[name] for name in (*names, *BOTH)})
    module = adapted(experts, names)
    around, found = module.experts, []
    while around is not experts:
        found.insert(0, around.parameter_name)
        around = around.base_layer
    assert tuple(found) == names
    compare(module, calls, sums, pairs=("gate_up_proj" in names, "down_proj" in names))


@pytest.mark.parametrize(
    "options",
    [{"use_rslora": True}, {"rank_pattern": {"experts.down_proj": 5}, "alpha_pattern": {"experts.down_proj": 7}}],
    ids=["rslora", "patterns"],
)
def test_scales_and_ranks(options, calls, sums):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following .* keys did not match")  # though they did
        lora = compare(adapted(made(*QWEN), **options), calls, sums)
    ranks, scales = ((3, 3), (4 / 3**0.5,) * 2) if "use_rslora" in options else ((3, 5), (4 / 3, 7 / 5))
    assert (lora.a1.shape[1], lora.a2.shape[1]) == ranks and lora.scales == pytest.approx(scales)


def test_experts_that_are_trained_too(calls, sums):
    compare(adapted(made(*QWEN)).requires_grad_(True), calls, sums)


def test_two_adapters(calls, sums):
    """One after the other, and together."""
    if VERSION < (0, 20):
        pytest.skip("peft 0.19 refuses a second adapter of this kind")
    module = adapted(made(*QWEN))
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")
        peft.inject_adapter_in_model(config_of(r=2, lora_alpha=5), module, adapter_name="second")
    wrappers = wrappers_of(module)
    outs = []
    for active in ("default", "second", ["default", "second"], ["second", "default"]):
        for wrapper in wrappers:
            wrapper.set_adapter(active)
        calls.clear()
        wanted, got = (outcome(switched(module, name)) for name in ("eager", "moeblaze"))
        check_equal(got, wanted, 1e-12)
        ((w1, _, lora),) = calls
        assert w1.data_ptr() == wrappers[0].get_base_layer().gate_up_proj.data_ptr()
        assert lora.a1.shape == (E, 5 if isinstance(active, list) else {"default": 3, "second": 2}[active], D)
        outs.append(got["out"])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_disabled_and_merged_adapters(calls, sums):
    module = adapted(made(*QWEN))
    outer, inner = wrappers_of(module)
    wanted, without = switched(module, "eager")(*inputs()[:3]), made(*QWEN)(*inputs()[:3])
    switched(module, "moeblaze")
    sums.clear()

    def ranks():
        """Of the call, whose output is the right one in every state."""
        expected = without if outer.disable_adapters else wanted
        torch.testing.assert_close(module(*inputs()[:3]), expected, rtol=1e-12, atol=1e-12)
        lora = calls.pop()[2]
        return None if lora is None else tuple(None if a is None else a.shape[1] for a in (lora.a1, lora.a2))

    assert ranks() == (3, 3)
    for wrapper in (outer, inner):
        wrapper.enable_adapters(False)
    assert ranks() is None
    for wrapper in (outer, inner):
        wrapper.enable_adapters(True)
        wrapper.merge()
    assert ranks() is None
    outer.unmerge()
    assert outer.parameter_name == "down_proj" and ranks() == (None, 3)
    for wrapper in (outer, inner):
        wrapper.enable_adapters(False)
    assert ranks() is None  # the forward unmerges
    for wrapper in (outer, inner):
        wrapper.enable_adapters(True)
    assert ranks() == (3, 3) and not sums and not calls


def test_what_peft_refuses_stays_refused():
    for options in ({"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}):
        with pytest.raises(ValueError, match=r"lora\.ParamWrapper does not work"):
            adapted(made(*QWEN, "moeblaze"), **options)


def falls_back(module, calls, sums, match):
    """peft's own way, with one warning, gives the numbers of eager peft: in float32, as grouped_mm has no float64."""
    module.float()
    wanted = outcome(switched(module, "eager"))
    sums.clear()
    switched(module, "moeblaze")
    with pytest.warns(UserWarning, match=match):
        got = outcome(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moeblaze")
        outcome(module)
    check_equal(got, wanted, 1e-5)
    assert len(sums) == 4 and all(lora is None for *_, lora in calls)


def test_more_ranks_than_the_layer_has(calls, sums):
    reason = (
        "Qwen3MoeExperts runs as grouped_mm: the active adapters of a weight have 257 ranks together, more than 256"
    )
    falls_back(adapted(made(*QWEN), r=257), calls, sums, reason)


def test_experts_that_the_layer_cannot_compute(calls, sums):
    experts = made(*QWEN)
    experts.act_fn = torch.nn.Tanh()
    falls_back(adapted(experts), calls, sums, "Qwen3MoeExperts runs as grouped_mm: its activation")


def test_versions_of_peft_with_another_layout(calls, sums, monkeypatch):
    """Here lora_B has the experts before the ranks, which its shape does not tell."""
    wrappers = private.param_wrapper()

    def delta(self, name):
        first = self.lora_A[name].weight.reshape(self.num_experts, -1, self.lora_A[name].weight.shape[1])
        second = self.lora_B[name].weight.reshape(self.lora_B[name].weight.shape[0], self.num_experts, -1)
        return torch.einsum("oer,eri->eoi", second, first) * self.scaling[name]

    monkeypatch.setattr(wrappers, "get_delta_weight", delta)
    adapters._reads.cache_clear()
    try:
        falls_back(adapted(made(*QWEN)), calls, sums, "this version of peft is not known")
    finally:
        adapters._reads.cache_clear()


def test_threads_that_share_a_model():
    """One waits within its call of the experts until another one has been in its own."""
    module = switched(adapted(made(*QWEN)), "moeblaze")
    experts, given = module.experts.get_base_layer(), inputs()[:3]
    wanted = module(*given).detach()
    barrier, found = threading.Barrier(2, timeout=60), []
    experts.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
    run = lambda: found.append(module(*given).detach())  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all(torch.equal(out, wanted) for out in found)


def test_fake_tensors_do_not_decide_for_later_calls():
    """Tools that estimate memory make the first call with them."""
    wrappers = private.param_wrapper()
    adapters._reads.cache_clear()
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("error")
        assert adapters._reads(wrappers)
    assert adapters._reads(wrappers)


def test_a_forward_that_is_not_the_layers(calls, sums):
    """Of another library: peft's own way. Of one that hides behind the layer's implementation: an error."""
    module = switched(adapted(made(*QWEN)), "moeblaze")
    experts = module.experts.get_base_layer()
    experts.forward = lambda x, ids, weights: x * experts.down_proj.sum()
    module(*inputs()[:3])
    assert len(sums) == 2 and not calls
    del experts.forward
    backend.register("moeblaze_other")
    switched(module, "moeblaze_other")
    private.ExpertsInterface.register("moeblaze_other", lambda self, x, ids, weights: x)
    with pytest.raises(RuntimeError, match="Qwen3MoeExperts: its forward did not take the adapters of peft"):
        module(*inputs()[:3])
    switched(module, "moeblaze")
    assert module(*inputs()[:3]).isfinite().all() and calls.pop()[2] is not None


def test_adapters_within_a_limit_of_memory(calls, sums):
    """On the CPU it changes nothing."""
    module = adapted(made(*QWEN))
    wanted = outcome(switched(module, "moeblaze"))
    backend.register("moeblaze_limited", memory_limit=10**9)
    check_equal(outcome(switched(module, "moeblaze_limited")), wanted, 1e-12)
    assert [lora is not None for *_, lora in calls] == [True, True] and not sums


def test_peft_that_is_imported_later(calls, sums, monkeypatch):
    """Its class has its own forward until it wraps the first module."""
    wrappers = private.param_wrapper()
    monkeypatch.setattr(wrappers, "forward", wrappers.forward.__wrapped__)
    compare(adapted(made(*QWEN)), calls, sums)


def test_offloaded_experts(calls, sums):
    """accelerate brings weights when a module is called. peft alone looks at them before."""
    hooks = pytest.importorskip("accelerate.hooks")
    module = adapted(made(*QWEN, "moeblaze"))
    x, ids, weights, _ = inputs()
    wanted, experts = module(x, ids, weights).detach(), module.experts.get_base_layer()
    hooks.attach_align_device_hook(experts, execution_device="cpu", offload=True)
    assert experts.down_proj.is_meta
    assert torch.equal(module(x, ids, weights), wanted)
    assert len(calls) == 2 and all(lora is not None for *_, lora in calls) and not sums


def test_adapters_of_biases_are_pefts(calls, sums):
    module = adapted(made(*GPT_OSS), (*BOTH, "down_proj_bias"))
    wanted = outcome(switched(module, "eager"))
    sums.clear()
    check_equal(outcome(switched(module, "moeblaze")), wanted, 1e-12)
    assert sums == ["down_proj_bias"] and calls.pop()[2].a2 is not None


PATCHED_ALONE = {
    "Step3p7Experts": ("step3p7", {"swiglu_limit": 0.3}),
    "LongcatFlashExperts": ("longcat_flash", {}),
}


@pytest.mark.parametrize("name", PATCHED_ALONE)
def test_patched_classes(name, calls, sums):
    folder, options = PATCHED_ALONE[name]
    family = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    if not hasattr(family, name):
        pytest.skip(f"this transformers has no {name}")
    config = experts_config()
    config.expert_ffn_hidden_size, config.zero_expert_num = H, 3
    experts = getattr(family, name)(config, **options).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    module = adapted(experts)
    wanted = outcome(module)
    assert backend.patch(module).served == ("experts.base_layer.base_layer",)
    sums.clear()
    check_equal(outcome(module), wanted, 1e-12)
    assert not sums and calls.pop()[2].a2 is not None


@pytest.mark.parametrize("end", ["merge", "disable", "disable merged"])
def test_states_of_a_patched_submodule(end, calls, sums):
    """JetMoe's weights are read without a call of the modules that have them."""
    model, other, _ = patched("JetMoeMoE")
    config = config_of(("input_linear.weight", "output_linear.weight"), "mlp.")
    both = []
    for one in (model, other):
        torch.manual_seed(3)
        both.append(peft.get_peft_model(one, config))
    for one in both:
        if "merge" in end:
            one.merge_adapter()
        if "disable" in end:
            one.base_model.disable_adapter_layers()
    got = []
    for one in both:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the class's own code unmerges
            got.append(one(tokens()).logits)
            got.append(one(tokens()).logits)
    torch.testing.assert_close(got[2:], got[:2], rtol=1e-6, atol=1e-9)
    assert len(calls) == (2 if end == "disable merged" else 4) and all(lora is None for *_, lora in calls)


def model_of(implementation, model_type="qwen3_moe", dtype=torch.float32, **options):
    model = tiny(model_type, implementation).to(dtype)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config_of(prefix="mlp.experts.", r=4, **options))


TYPES = "mixtral qwen3_moe olmoe deepseek_v3 gpt_oss glm4_moe"


@pytest.mark.parametrize("model_type", TYPES.split())
def test_steps_of_a_model_and_its_adapters_on_disk(model_type, calls, sums, tmp_path):
    """20 steps of AdamW in float32, as eager and grouped_mm do them with peft. Each loads what the other saved."""
    losses, models = {}, {}
    for implementation in ("eager", "grouped_mm", "moeblaze"):
        sums.clear()
        model = models[implementation] = model_of(implementation, model_type, init_lora_weights=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        losses[implementation] = []
        for _ in range(20):
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())
    assert not sums and len(calls) == 40 and losses["eager"][-1] < losses["eager"][0]
    for implementation in ("grouped_mm", "moeblaze"):  # AdamW divides by norms that may be small
        assert losses[implementation] == pytest.approx(losses["eager"], rel=1e-4)
    if VERSION < (0, 20):
        return  # peft 0.19 cannot load adapters of this kind with transformers 5.24
    for saves, loads in (("moeblaze", "eager"), ("eager", "moeblaze")):
        models[saves].save_pretrained(tmp_path / saves)
        model = peft.PeftModel.from_pretrained(tiny(model_type, loads), tmp_path / saves)
        with torch.no_grad():
            want = models[saves](tokens()).logits
            torch.testing.assert_close(model(tokens()).logits, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model.merge_and_unload()(tokens()).logits, want, rtol=1e-4, atol=1e-5)


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, calls, sums):
    plain, again = (model_of("moeblaze", dtype=torch.float64) for _ in range(2))
    again.enable_input_require_grads()
    again.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wanted, got = step(plain), step(again.train())
    check_equal(got, wanted, 1e-12)
    assert len(calls) == 2 + 4 and not sums  # each layer's forward runs twice


def in_bf16(module, device="cpu", autocast=False):
    """Errors beside float64 by name, of float32 factors with bf16 weights, or with float32 weights under autocast.

    All numbers are those of bf16, so that errors are those of the computation.
    """
    exact = copy.deepcopy(module).bfloat16().double()
    grads, outs = [], []
    for one in (exact, copy.deepcopy(exact).to(device, torch.float32 if autocast else torch.bfloat16)):
        for key, parameter in one.named_parameters():
            if "lora_" in key and one is not exact:
                parameter.data = parameter.data.float()
        x, ids, weights, grad_out = (t.to(device) if one is not exact else t for t in inputs())
        x, grad_out = x.bfloat16(), grad_out.bfloat16()
        x = x.double() if one is exact else x.float() if autocast else x
        with torch.autocast(device, torch.bfloat16, enabled=autocast and one is not exact):
            out = one(x, ids, weights.bfloat16().to(torch.float64 if one is exact else torch.float32))
        out.backward(grad_out.to(out.dtype))
        outs.append(out.detach())
        grads.append(grads_of(one))
        assert one is exact or all(grad.dtype == torch.float32 for grad in grads[-1].values())
    wanted, got = ({"out": out, **found} for out, found in zip(outs, grads, strict=True))
    return {key: ((got[key].cpu() - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted}


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_factors_beside_bf16_weights(autocast, calls, sums):
    """bf16 has 8 bits; as in tests/lora, roundings of independent terms in a row stay within 1.5 * 2^-8."""
    errors = in_bf16(adapted(made(*QWEN, "moeblaze")), autocast=autocast)
    assert len(errors) == 5 and max(errors.values()) < 1.5 * 2**-8, errors
    assert calls[-1][2].a1.dtype == torch.float32 and len(calls) == 2 and not sums


def test_compiled_model(calls, sums):
    """A layer's experts run between the graphs. The next call and another adapter compile nothing again."""
    torch._dynamo.reset()
    model = model_of("moeblaze", dtype=torch.float64)
    wanted = step(model)
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    out = compiled(tokens(), labels=tokens())
    out.loss.backward()
    torch.testing.assert_close(out.logits, wanted["logits"])
    check_equal(grads_of(model), {key: value for key, value in wanted.items() if key != "logits"}, 1e-9)
    graphs = counters["stats"]["unique_graphs"]
    assert not sums and len(calls) == 4
    compiled(tokens(), labels=tokens())
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_trainer(mode, tmp_path, calls, sums):
    pytest.importorskip("accelerate")
    wanted = train(model_of("eager"), tmp_path, **mode)
    sums.clear()
    got = train(model_of("moeblaze"), tmp_path, **mode)
    assert calls and not sums and all(lora is not None for *_, lora in calls)
    loss_error, norm_error = (1e-3, 0.05) if mode.get("bf16") else (1e-5, 1e-4)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(got, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=loss_error)
        assert norm == pytest.approx(wanted_norm, rel=norm_error) and norm > 0


@pytest.mark.gpu
def test_on_a_gpu(calls, sums):
    errors = in_bf16(adapted(made(*QWEN, "moeblaze")), "cuda")
    assert max(errors.values()) < 1.5 * 2**-8, errors
    assert calls[-1][2] is not None and not sums


@pytest.mark.gpu
def test_memory_on_a_gpu(calls, sums):
    """A step of few tokens takes less than half of w1's bytes. W + BA, or a weight's gradient, would take more."""
    config = experts_config("moeblaze")
    config.num_experts, config.hidden_size, config.moe_intermediate_size = 16, 512, 512
    module, name = QWEN
    experts = getattr(importlib.import_module(module), name)(config).to("cuda", torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=512**-0.5)
    one = adapted(experts, r=8).requires_grad_(False)
    for key, parameter in one.named_parameters():
        if "lora_" in key:
            parameter.requires_grad_().data = parameter.data.float()
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(64, 16, device="cuda").argsort(1)[:, :2].contiguous()
    weights = torch.rand(64, 2, device="cuda")
    for _ in range(2):  # the first one loads kernels
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        one(x, ids, weights).sum().backward()
        one.zero_grad()
    assert torch.cuda.max_memory_allocated() - before < experts.gate_up_proj.nbytes / 2
    assert len(calls) == 2 and calls[-1][2].b2 is not None and not sums
