"""Models of transformers with experts in e4m3: beside bf16, and never with weights of before."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")

from test_transformers import PATCHED, step, text_model, tiny, tokens  # noqa: E402

from moeblaze_cupy import reference  # noqa: E402
from moeblaze_cupy.interop.transformers import api as backend  # noqa: E402
from moeblaze_cupy.interop.transformers.patches import PATCHES  # noqa: E402
from tests.torch_versions import needs_models_that_compile  # noqa: E402

NAME, NAMES = "moeblaze_fp8", ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


@pytest.fixture(autouse=True)
def registered():
    backend.register(NAME, precision="fp8")


def model_of(name=NAME, model_type="qwen3_moe", **sizes):
    return tiny(model_type, name, **sizes).bfloat16()


@pytest.fixture
def quantised(monkeypatch):
    """How often weights were."""
    calls, plain = [], reference.quantize_weights

    def counted(*arguments):
        calls.append(1)
        return plain(*arguments)

    for module in (reference, reference.experts):  # of `quantize_weights`, and of a layer that has got none
        monkeypatch.setattr(module, "quantize_weights", counted)
    return calls


def moved(model):
    """Another model of the same class with these parameters."""
    with torch.no_grad():
        other = model_of()
        other.load_state_dict(model.state_dict())
    return other


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.25)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_training_beside_bf16(model_type):
    """Gradients of experts: e4m3 costs a layer up to 0.07, in layer 0 that of layer 1 as well. What the experts'
    outputs are added to has no such error. No token of these goes to another expert for it."""
    wanted, got = (step(model_of(name, model_type)) for name in ("moeblaze", NAME))
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        error = ((got[name] - value).float().norm() / value.float().norm()).item()
        if "experts" in name:
            assert "bias" in name or error >= 0.02, name
            assert error <= (0.07 if "layers.1" in name else 0.14), name
        assert name != "logits" or error <= 0.07


def test_save_policies():
    """With "recompute" the weights are quantised again in backward."""
    backend.register(f"{NAME}_recompute", save="recompute", precision="fp8")
    kept = []

    def keep(tensor):
        kept.append((tensor.dim(), tensor.itemsize))
        return tensor

    wanted = None
    for name, number in ((NAME, 8), (f"{NAME}_recompute", 0)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            got = step(model_of(name))
        assert kept.count((3, 1)) == number
        wanted = wanted or got
        assert all(torch.equal(got[key], value) for key, value in wanted.items())


@pytest.mark.parametrize(
    ("model_type", "width"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")]
)
def test_packed_experts(model_type, width):
    """mxfp4 beside products in bf16 on the same numbers; the rest of the model has the same bits."""
    model = model_of(NAME, model_type, **{width: 32})
    model.requires_grad_(False)
    assert backend.pack_experts(model, "mxfp4") == NAMES
    got = logits(model)
    model.set_experts_implementation("moeblaze")
    wanted = logits(model)
    assert 0.001 <= ((got - wanted).float().norm() / wanted.float().norm()).item() <= 0.05
    model = model_of(NAME, model_type, **{width: 32})
    model.requires_grad_(False)
    backend.pack_experts(model, "int8")
    with pytest.raises(
        ValueError, match=r"^moe: precision: expected None with QuantizedWeight, unless w1 and w2 are in"
    ):
        logits(model)


def test_weights_are_those_of_the_forward(quantised):
    model = model_of()
    for _ in range(2):
        assert torch.equal(logits(model), logits(moved(model)))
        change(model)
        model.get_submodule(NAMES[0]).down_proj.data.mul_(2)  # uncounted
    quantised.clear()
    logits(model), logits(model)
    assert len(quantised) == 4


def test_quantize_weights(quantised):
    """Once for all forwards with the same parameters, until the next call."""
    model = model_of()
    want = logits(model)
    quantised.clear()
    assert backend.quantize_weights(model) == NAMES
    assert torch.equal(logits(model), want) and torch.equal(logits(model), want)
    assert len(quantised) == 2
    change(model)
    assert backend.quantize_weights(model) == NAMES
    assert torch.equal(logits(model), logits(moved(model)))
    experts = model.get_submodule(NAMES[0])
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 2)  # another parameter, as FSDP2 sets them
    for _ in range(2):
        assert torch.equal(logits(model), logits(moved(model)))
        experts.down_proj.data.mul_(2)
    quantised.clear()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), logits(model))
    assert len(quantised) == 2 * 2 + 2 * 1  # copies hold nothing, and the model holds those of one layer
    assert backend.quantize_weights(model, hold=False) == ()
    change(model)
    assert torch.equal(logits(model), logits(moved(model)))


@needs_models_that_compile
def test_weights_that_are_held(quantised):
    """In compiled and eager forwards: written once, for generation among others."""
    model = model_of()
    backend.quantize_weights(model)
    quantised.clear()
    want = logits(model)
    generated = model.generate(tokens(), max_new_tokens=3, do_sample=False)
    assert not quantised
    model.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(generated, model_of().generate(tokens(), max_new_tokens=3, do_sample=False))
    with torch.no_grad():
        model.get_submodule(NAMES[0]).down_proj.mul_(-3)
    assert torch.equal(logits(model), want)
    for hold in (True, False):
        backend.quantize_weights(model, hold=hold)
        assert torch.equal(logits(model), logits(moved(model))) and not torch.equal(logits(model), want)
    torch._dynamo.reset()


@needs_models_that_compile
def test_compiled_models_follow_their_weights():
    model = model_of(num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(compiled(tokens()).logits, logits(model))
        change(model)
    torch._dynamo.reset()


class Sharded(torch.Tensor):
    """What FSDP2 leaves of a parameter between forwards, as far as it is looked at."""

    def to_local(self):
        raise AssertionError


def test_what_is_not_served_is_named():
    with pytest.raises(ValueError, match="register: precision: expected one of None, 'fp8', got 'fp4'"):
        backend.register("other", precision="fp4")
    with pytest.raises(TypeError, match="moe: x: expected bfloat16 with precision='fp8', got float32"):
        logits(tiny("qwen3_moe", NAME))
    with pytest.raises(ValueError, match=r"for 'fp8', got \(d, h\) = \(32, 24\)"):
        logits(model_of(moe_intermediate_size=24))
    model = model_of()
    model.get_submodule(NAMES[1]).act_fn = torch.nn.Tanh()
    for call in (logits, backend.quantize_weights):
        with pytest.raises(NotImplementedError, match="moeblaze: Qwen3MoeExperts: its activation is none of"):
            call(model)
    model = model_of()
    experts = model.get_submodule(NAMES[1])
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().as_subclass(Sharded))
    with pytest.raises(RuntimeError, match=f"quantize_weights: {NAMES[1]}: expected whole parameters"):
        backend.quantize_weights(model)


def with_adapter(model):
    """Of peft, on the weights of the experts."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=targets, init_lora_weights=False))


def test_adapters_beside_bf16(monkeypatch):
    """The layer has their factors, and W + BA is not made. Errors are as without adapters, of factors too."""
    from moeblaze_cupy.interop.transformers import private

    adapted = [with_adapter(model_of(name)) for name in ("moeblaze", NAME)]
    monkeypatch.setattr(private.param_wrapper(), "_activate_lora", lambda *_: pytest.fail("W + BA"))
    wanted, got = map(step, adapted)
    assert wanted.keys() == got.keys() and any("lora_B" in name for name in got)
    for name, value in wanted.items():
        error = ((got[name] - value).float().norm() / value.float().norm()).item()
        if "experts" in name:
            assert 0.01 <= error <= (0.07 if "layers.1" in name else 0.14), name
        assert name != "logits" or error <= 0.07


def losses(model, before_step):
    optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5), []
    for _ in range(4):
        before_step(model)
        optimizer.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_of_adapters_beside_what_is_held(quantised):
    """The weights that are held stay, as adapters alone train. An adapter that comes later ends what is held."""
    want = losses(with_adapter(model_of()), lambda model: None)
    model = model_of()
    backend.quantize_weights(model)
    for adapted in (with_adapter(model), with_adapter(model_of())):
        before = copy.deepcopy(adapted.state_dict())
        quantised.clear()
        assert losses(adapted, lambda model: None) == want and len(quantised) == 8  # two layers, four times
        adapted.load_state_dict(before)
        assert len(backend.quantize_weights(adapted)) == 2
        quantised.clear()
        assert losses(adapted, lambda model: None) == want and not quantised
    assert len(set(want)) == 4


def merge_and_unload(adapted):
    return adapted.merge_and_unload()


def merge_into_other_memory(adapted):
    return adapted.merge_and_unload(safe_merge=True)


def merge(adapted):
    adapted.merge_adapter()
    return adapted


def unmerge(adapted):
    adapted.merge_adapter()
    assert backend.quantize_weights(adapted) == ()
    adapted.unmerge_adapter()
    return adapted


def disable(adapted):
    adapted.merge_adapter()
    assert backend.quantize_weights(adapted) == ()
    adapted.base_model.disable_adapter_layers()  # whose forward unmerges
    return adapted


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("held", ["never", "before the adapter", "with the adapter", "before and with"])
@pytest.mark.parametrize("end", [merge_and_unload, merge_into_other_memory, merge, unmerge, disable])
def test_what_peft_merges(end, held, frozen):
    """As a model that has held nothing, with a forward before or none. peft writes what torch does not count."""
    found = []
    for holds, runs in ((False, False), (True, False), (True, True)):
        model = model_of(initializer_range=0.3).requires_grad_(not frozen)
        if holds and "before" in held:
            assert backend.quantize_weights(model) == NAMES
        adapted = with_adapter(model)
        if holds and "with" in held:
            assert len(backend.quantize_weights(adapted)) == 2
        if runs:
            logits(adapted)
        ended = end(adapted)
        found.append(logits(ended))
        if ended is not adapted:
            assert backend.quantize_weights(ended) == NAMES
            found.append(logits(ended))
    assert all(torch.equal(got, found[0]) for got in found)
    if end is not disable:
        assert not torch.equal(found[0], logits(model_of(initializer_range=0.3)))


@pytest.mark.parametrize("name", ["DbrxExperts", "Llama4TextExperts"])
def test_patched_models(name):
    """Beside bf16, with one layer, so that no token goes to another expert for it; "recompute" has the same bits, and
    the last call of `patch` decides."""
    *family, sizes = PATCHED[name]
    one = (
        {"n_layers": 1, "num_hidden_layers": 1}
        if name == "DbrxExperts"
        else {"num_hidden_layers": 1, "moe_layers": [0], "intermediate_size": 16}
    )
    model = text_model(*family, **(sizes | one)).bfloat16()
    results = []
    for options in ({}, {"precision": "fp8"}, {"precision": "fp8", "save": "recompute"}, {"save": "fp8"}, {}):
        assert len(backend.patch(model, **options).served) == 1
        results.append(step(model))
    bf16, fp8, again, saved, last = results
    experts = [key for key in bf16 if "experts" in key and bf16[key].abs().max() > 0]
    assert experts and all(torch.equal(bf16[key], last[key]) and torch.equal(fp8[key], again[key]) for key in bf16)
    assert torch.equal(bf16["logits"], saved["logits"])
    for got, least in ((fp8, 0.02), (saved, 0.003)):
        errors = {key: ((got[key] - bf16[key]).float().norm() / bf16[key].float().norm()).item() for key in experts}
        assert least < max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("name", PATCHED)
def test_weights_of_patched_models(name, quantised):
    """Held for all forwards, until the next call. Modules in bf16 get none."""
    *family, sizes = PATCHED[name]
    model = text_model(*family, **sizes).bfloat16()
    backend.patch(model)
    with pytest.raises(ValueError, match=r'^quantize_weights: model: expected experts with precision="fp8"'):
        backend.quantize_weights(model)
    served = backend.patch(model, precision="fp8").served
    quantises = copy.deepcopy(model)
    assert backend.patch(quantises, precision="fp8").served == served
    for _ in range(2):
        assert backend.quantize_weights(model) == served
        want = logits(quantises)
        quantised.clear()
        assert torch.equal(logits(model), want) and torch.equal(logits(model), want)
        assert not quantised
        change(model), change(quantises)
    backend.quantize_weights(model)
    want = logits(model)
    for module in map(model.get_submodule, served):
        module.moeblaze_fp8.weights.w2_scales.mul_(2)
        torch.nn.init.zeros_(PATCHES[name].weights(module).w2)
    assert not torch.equal(logits(model), want)
    with torch.no_grad():
        for module in map(model.get_submodule, served):
            module.moeblaze_fp8.weights.w2_scales.div_(2)
    assert torch.equal(logits(model), want)
    assert backend.quantize_weights(model, hold=False) == ()
    assert not torch.equal(logits(model), want)


def test_what_patched_models_do_not_take_is_named():
    *family, sizes = PATCHED["DbrxExperts"]
    model = text_model(*family, **sizes)
    for options, text in (
        ({"precision": "fp4"}, "patch: precision: expected one of"),
        ({"save": "some"}, "patch: save: "),
    ):
        with pytest.raises(ValueError, match=text):
            backend.patch(model, **options)
    backend.patch(model, precision="fp8")
    with pytest.raises(TypeError, match="expected bfloat16 with precision='fp8', got float"):
        logits(model.float())
    wrong = {**sizes, "ffn_config": {**sizes["ffn_config"], "ffn_hidden_size": 24}}
    model = text_model(*family, **wrong).bfloat16()
    backend.patch(model, precision="fp8")
    with pytest.raises(ValueError, match=r"for 'fp8', got \(d, h\) = \(32, 24\)"):
        logits(model)
    fresh = text_model(*family, **sizes)
    fresh.transformer.blocks[0].ffn.experts.mlp.activation_fn = torch.nn.Tanh()
    with pytest.raises(NotImplementedError, match="moeblaze: DbrxExperts: its activation is none of"):
        backend.patch(fresh, precision="fp8")
