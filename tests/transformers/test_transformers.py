"""`interop.transformers`: every experts class of the transformers at hand beside its own code, and small models."""

import ast
import contextlib
import copy
import functools
import importlib
import math
import pickle
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from moeblaze_cupy.interop.transformers import api as backend  # noqa: E402
from moeblaze_cupy.interop.transformers import experts as layers  # noqa: E402
from moeblaze_cupy.interop.transformers import formula as formulas  # noqa: E402
from tests.torch_versions import NO_COMPILED_TRAINER, needs_models_that_compile  # noqa: E402

# Every class that transformers dispatches, without "Experts" at its end, by the activation it is served with. A class
# that is found and not listed fails: look at its layout and its formula, then list it.
SWIGLU = """
    Afmoe Aria AXK1 AXK2 BailingHybrid Beam Cohere2Moe DeepseekOcr2Text DeepseekV2 DeepseekV3 DeepseekV32 Dots1
    Dots3Note Ernie4_5_Moe Ernie4_5_VLMoeMoe ExaoneMoe FlexOlmo Flint Glm4Moe Glm4MoeLite Glm4vMoeText GlmMoeDsa
    GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA HunYuanMoEV1 HYV3 Inkling Jamba KimiLinear Kolibri1
    Laguna LaraMini Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2 Mistral4 MistralLarge4Text Mixtral Olmoe Phimoe
    Qwen2Moe Qwen3_5Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen4ExpText
    SolarOpen UnlimitedOcrText Zaya
"""
OTHERS = {
    "swiglu_clamp": "DeepseekV4 Glm5NextText HYV4 HYV4VL",
    "swiglu_oai": "GptOss MiniMaxM3VL OpenAIPrivacyFilter",
    "swiglu_softcap": "Inkling2 Inkling2Loop",
    "geglu_tanh": "DiffusionGemmaText Gemma4Text",
    "relu2": "NemotronH",
    "swiglu": f"{SWIGLU} MuseSpark",
}
ACTIVATION_OF = {f"{name}Experts": kind for kind, names in OTHERS.items() for name in names.split()}
OPTIONS_OF = {
    "GptOssExperts": {"b1", "b2", "gate_up"},
    "OpenAIPrivacyFilterExperts": {"b1", "b2"},
    "MuseSparkExperts": {"unreduced"},
}
IN_FLOAT32 = (
    "BeamExperts",
    "Inkling2Experts",
    "Inkling2LoopExperts",
    "MuseSparkExperts",
    "OpenAIPrivacyFilterExperts",
)  # in part, whatever comes

L, K, E, D, H = 12, 2, 4, 8, 12


def experts_config(implementation="eager"):
    """What experts modules read of a configuration. Limits are low enough for values of unit scale to pass them."""
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    hidden = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), H)
    return types.SimpleNamespace(
        **experts,
        **hidden,
        hidden_size=D,
        moe_hidden_size=D,
        moe_latent_size=None,
        hidden_act="silu",
        hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2",
        swiglu_limit=0.7,
        swiglu_alpha=1.702,
        mlp_gate_softcap=1.5,
        mlp_up_softcap=2.5,
        post_norm_eps=1e-6,
        _experts_implementation=implementation,
    )


def decorated_classes():
    """(module, class) of every class with @use_experts_implementation, by the source."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if "@use_experts_implementation" in text:
            module = f"transformers.models.{path.parent.name}.{path.stem}"
            for node in ast.parse(text).body:
                decorators = getattr(node, "decorator_list", ())
                if any("use_experts_implementation" in ast.unparse(decorator) for decorator in decorators):
                    found.append((module, node.name))
    return found


CLASSES = decorated_classes()


def made(module, name, implementation="eager"):
    """A module of unit-scale random weights in float64."""
    torch.manual_seed(0)
    made = getattr(importlib.import_module(module), name)(experts_config(implementation)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() == 3 else 1.0)
    return made


def inputs():
    torch.manual_seed(1)
    x = torch.randn(L, D, dtype=torch.float64)
    ids = torch.rand(L, E).argsort(1)[:, :K].contiguous()
    return x, ids, torch.rand(L, K, dtype=torch.float64), torch.randn(L, D, dtype=torch.float64)


def results(module, x, ids, weights, grad_out):
    """Output and gradients of everything, by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(x, ids, weights)
    module.zero_grad()
    out.backward(grad_out)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def check_equal(got, wanted, tolerance):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value is not None and value.norm() > 0, name
        error = ((got[name] - value).norm() / value.norm()).item()
        assert error < tolerance, (name, error)


@pytest.fixture
def calls(monkeypatch):
    """Options of every call of the layer."""
    seen = []

    def spying(*args, real=layers.moe, **options):
        seen.append(options)
        return real(*args, **options)

    monkeypatch.setattr(layers, "moe", spying)
    return seen


def test_every_class_is_listed():
    assert len(CLASSES) > 50
    assert [name for _, name in CLASSES if name not in ACTIVATION_OF] == []


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_class_gives_what_its_own_code_gives(module, name, calls):
    experts = made(module, name)
    wanted = results(experts, *inputs())
    assert not calls
    experts.config._experts_implementation = "moeblaze"
    check_equal(results(experts, *inputs()), wanted, 2e-6 if name in IN_FLOAT32 else 1e-12)
    (options,) = calls
    assert getattr(options["activation"], "name", options["activation"]) == ACTIVATION_OF[name]
    used = {option for option in ("b1", "b2", "unreduced") if option in options}
    assert used | ({"gate_up"} if options["gate_up"] != "halves" else set()) == OPTIONS_OF.get(name, set())


QWEN = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")


def test_ids_past_the_last_expert_are_empty_slots(calls):
    """They are what a rank of expert parallelism gets for the experts of other ranks."""
    experts = made(*QWEN, "moeblaze")
    x, ids, weights, _ = inputs()
    away = ids == 1
    got = experts(x, ids.masked_fill(away, E), weights)
    assert torch.equal(got, experts(x, ids, weights.masked_fill(away, 0))) and len(calls) == 2


@pytest.mark.parametrize("act", [torch.nn.GELU(), torch.nn.ReLU(), torch.nn.GELU(approximate="tanh")], ids=str)
def test_another_activation_of_a_listed_class(act, calls):
    experts = made(*QWEN)
    experts.act_fn = act
    name = {"GELU(approximate='none')": "geglu", "ReLU()": "reglu"}.get(str(act), "geglu_tanh")
    wanted = results(experts, *inputs())
    experts.config._experts_implementation = "moeblaze"
    check_equal(results(experts, *inputs()), wanted, 1e-12)
    assert calls[0]["activation"] == name


def test_a_replaced_activation_is_seen_at_the_next_call(calls):
    experts = made(*QWEN, "moeblaze")
    x, ids, weights, _ = inputs()
    experts(x, ids, weights)
    experts.act_fn = torch.nn.ReLU()
    experts(x, ids, weights)
    assert [call["activation"] for call in calls] == ["swiglu", "reglu"]


@pytest.mark.parametrize("act", [torch.nn.PReLU(init=0.0), torch.nn.Tanh(), torch.nn.Softmax(-1)], ids=str)
def test_what_the_layer_cannot_compute_falls_back_or_raises(act, calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    experts = made(*QWEN, "moeblaze").float()
    experts.act_fn = act
    x, ids, weights, _ = (t.float() if t.is_floating_point() else t for t in inputs())
    with pytest.warns(UserWarning, match="Qwen3MoeExperts runs as grouped_mm: its activation"):
        got = experts(x, ids, weights)
    experts.config._experts_implementation = "eager"
    torch.testing.assert_close(got, experts(x, ids, weights), rtol=1e-4, atol=1e-5)
    experts.config._experts_implementation = "moeblaze"
    try:
        backend.register(fallback=False)
        with pytest.raises(NotImplementedError, match="Qwen3MoeExperts: its activation"):
            experts(x, ids, weights)
        monkeypatch.setenv("MOEBLAZE_FALLBACK", "0")
        backend.register()
        with pytest.raises(NotImplementedError):
            experts(x, ids, weights)
    finally:
        monkeypatch.undo()
        backend.register()
    assert not calls


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        if isinstance(factor, torch.Tensor):
            self.register_buffer("factor", factor)
        else:
            self.factor = factor

    def forward(self, gate):
        return torch.nn.functional.silu(gate) * float(self.factor)


@pytest.mark.parametrize("kind", [int, float, np.float64, bool, torch.tensor], ids=lambda kind: kind.__name__)
def test_activations_of_one_class_are_told_apart_by_what_they_hold(kind, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    x, ids, weights, _ = (t.float() if t.is_floating_point() else t for t in inputs())
    for factor in (1.0, 0.0):
        experts = made(*QWEN, "moeblaze").float()
        experts.act_fn = Scaled(kind(factor))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = experts(x, ids, weights)
        experts.config._experts_implementation = "eager"
        torch.testing.assert_close(got, experts(x, ids, weights), rtol=1e-4, atol=1e-5)


def by_hand(experts, x, ids, weights, gate):
    """The output of a module in float64, an independent loop over slots."""
    w1, w2 = experts.gate_up_proj.double(), experts.down_proj.double()
    rows = []
    for token in range(len(x)):
        slots = [w2[e] @ gate(w1[e] @ x[token].double()) for e in ids[token].tolist()]
        rows.append(sum(weight.double() * slot for weight, slot in zip(weights[token], slots, strict=True)))
    return torch.stack(rows)


def in_float32():
    return [t.float() if t.is_floating_point() else t for t in inputs()[:3]]


@use_experts_implementation
class Chosen(torch.nn.Module):
    """Its gate reads what tells one module from another: a limit that may be None, an object, a parameter."""

    def __init__(self, config, limit=None, kind="", scale=1.0):
        super().__init__()
        self.num_experts, self.limit, self.kind, self.act_fn = (
            E,
            limit,
            types.SimpleNamespace(name=kind),
            torch.nn.SiLU(),
        )
        self.scale = torch.nn.Parameter(torch.tensor(scale))
        self.gate_up_proj = torch.nn.Parameter(torch.randn(E, 2 * H, D, generator=torch.Generator().manual_seed(0)))
        self.down_proj = torch.nn.Parameter(torch.randn(E, D, H, generator=torch.Generator().manual_seed(1)))

    def _apply_gate(self, columns):
        gate, up = columns.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (torch.relu(gate) if self.kind.name == "relu" else self.act_fn(gate)) * up * self.scale

    def forward(self, x, ids, weights):
        raise NotImplementedError


def test_gates_of_an_unknown_source_fall_back(calls, monkeypatch):
    """Each module to its own formula, with gradients of what the gate reads."""
    monkeypatch.setattr(formulas, "_WARNED", set())
    x, ids, weights = in_float32()
    with pytest.warns(
        UserWarning, match="Chosen runs as grouped_mm: the layer does not know the source of Chosen._app"
    ):
        for options in ({"limit": None}, {"limit": 0.5}, {"kind": "relu"}, {"scale": 2.0}, {"limit": 1.5}):
            experts = Chosen(types.SimpleNamespace(_experts_implementation="moeblaze"), **options)
            wanted = by_hand(experts, x, ids, weights, experts._apply_gate)
            got = experts(x, ids, weights)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)  # sums of float32
            (scale,) = torch.autograd.grad(got.sum(), experts.scale)
            torch.testing.assert_close(scale.double(), torch.autograd.grad(wanted.sum(), experts.scale)[0].double(),
                rtol=1e-4, atol=1e-3)  # fmt: skip
    assert not calls


def test_a_gate_of_the_instance_falls_back(calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    x, ids, weights = in_float32()
    experts = Chosen(types.SimpleNamespace(_experts_implementation="moeblaze"), limit=0.5)
    experts._apply_gate = lambda columns: columns.chunk(2, dim=-1)[0]
    with pytest.warns(UserWarning, match="Chosen runs as grouped_mm: its _apply_gate has been replaced"):
        got = experts(x, ids, weights)
    wanted = by_hand(experts, x, ids, weights, experts._apply_gate)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)  # sums of float32
    assert not calls


DEEPSEEK = ("transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts")


def clamped(limit):
    def gate(columns):
        a, b = columns.chunk(2, dim=-1)
        return torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)

    return gate


@pytest.mark.skipif(DEEPSEEK not in CLASSES, reason="this transformers has no DeepseekV4Experts")
def test_constants_are_read_at_every_call(calls):
    experts = made(*DEEPSEEK, "moeblaze")
    x, ids, weights, _ = inputs()
    for limit in (0.5, 1, math.inf, 0.5, 0.75):
        experts.limit = limit
        torch.testing.assert_close(experts(x, ids, weights), by_hand(experts, x, ids, weights, clamped(limit)))
    names = [call["activation"] for call in calls]
    assert names[2] == "swiglu" and [name.constants["limit"] for name in names[:2] + names[3:]] == [0.5, 1, 0.5, 0.75]


@pytest.mark.skipif(DEEPSEEK not in CLASSES, reason="this transformers has no DeepseekV4Experts")
@pytest.mark.parametrize(
    ("limit", "reason"),
    [(0.0, "cannot be expressed: Activation: limit"), (True, "limit is no number"), (math.nan, "cannot be expressed"),
     (torch.tensor(0.5), "limit is no number"), (torch.nn.Parameter(torch.tensor([0.5])), "limit is no number")],
    ids=["zero", "bool", "nan", "tensor", "parameter"],
)  # fmt: skip
def test_constants_that_the_layer_has_not_fall_back(limit, reason, calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    experts = made(*DEEPSEEK, "moeblaze").float()
    experts.limit = 0.5
    x, ids, weights = in_float32()
    experts(x, ids, weights)  # the formula of this one is not that of the next
    experts.limit = limit
    calls.clear()
    with pytest.warns(UserWarning, match=f"DeepseekV4Experts runs as grouped_mm: its .*{reason}"):
        got = experts(x, ids, weights)
    wanted = by_hand(experts, x, ids, weights, lambda columns: experts._apply_gate(columns.float()).double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not calls
    del experts.limit
    experts.limit = 0.5
    experts(x, ids, weights)
    assert len(calls) == 1


@needs_models_that_compile
@pytest.mark.skipif(DEEPSEEK not in CLASSES, reason="this transformers has no DeepseekV4Experts")
@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_compiled_modules_follow_their_constants(first, monkeypatch):
    monkeypatch.setattr(formulas, "_FOUND", {})
    torch._dynamo.reset()
    experts = made(*DEEPSEEK, "moeblaze")
    x, ids, weights, _ = inputs()
    if first == "eager":
        experts(x, ids, weights)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for limit in (0.5, 0.75, 0.5, 0.25):
        experts.limit = limit
        torch.testing.assert_close(compiled(x, ids, weights), by_hand(experts, x, ids, weights, clamped(limit)))
    torch._dynamo.reset()


def test_gates_and_activations_that_were_changed_fall_back(calls, monkeypatch):
    """A gate of the module itself, a decorated one, and an activation with a hook."""

    def doubled(columns):
        a, b = columns.chunk(2, dim=-1)
        return 2 * torch.nn.functional.silu(a) * b

    def decorated(function):
        @functools.wraps(function)
        def double(self, columns):
            return 2 * function(self, columns)

        return double

    def on_the_module(experts):
        experts._apply_gate = doubled

    def on_the_class(experts):
        kind = type(experts)
        experts.__class__ = type("Qwen3MoeExperts", (kind,), {"_apply_gate": decorated(kind._apply_gate)})

    def by_a_hook(experts):
        experts.act_fn.register_forward_hook(lambda module, arguments, out: 2 * out)

    def by_the_forward_of_its_activation(experts):
        own = experts.act_fn.forward
        experts.act_fn.forward = lambda x: 2 * own(x)

    x, ids, weights = in_float32()
    for change in (on_the_module, on_the_class, by_a_hook, by_the_forward_of_its_activation):
        monkeypatch.setattr(formulas, "_WARNED", set())
        experts = made(*QWEN, "moeblaze").float()
        experts(x, ids, weights)
        assert len(calls) == 1
        change(experts)
        with pytest.warns(UserWarning, match="Qwen3MoeExperts runs as grouped_mm: "):
            got = experts(x, ids, weights)
        torch.testing.assert_close(got.double(), by_hand(experts, x, ids, weights, doubled), rtol=1e-4, atol=1e-5)
        assert len(calls) == 1
        calls.clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_activation_within_hooks_of_accelerate_is_the_same(compiled, calls, monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    monkeypatch.setattr(formulas, "_WARNED", set())
    other, experts, x = made(*QWEN, "moeblaze").float(), made(*QWEN, "moeblaze").float(), in_float32()
    del other.act_fn
    other.act_fn = torch.nn.functional.relu
    other(*x)
    run = torch.compile(experts, backend="eager", fullgraph=True) if compiled else experts
    wanted = run(*x)
    hooks.add_hook_to_module(experts.act_fn, hooks.ModelHook())
    seen = len(calls)
    assert torch.equal(run(*x), wanted) and len(calls) > seen
    experts.act_fn.forward = lambda x: -torch.nn.functional.silu(x)
    with pytest.warns(UserWarning, match="its act_fn has hooks or another forward"):
        torch.testing.assert_close(run(*x), -wanted, rtol=1e-4, atol=1e-5)


def test_weights_of_two_dtypes_fall_back(calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    experts = made(*QWEN, "moeblaze").float()
    experts.gate_up_proj.data = experts.gate_up_proj.data.bfloat16()
    x, ids, weights = in_float32()
    with pytest.warns(UserWarning, match="its weights have two dtypes, torch.bfloat16 and torch.float32"):
        got = experts(x, ids, weights)
    wanted = by_hand(experts, x, ids, weights, experts._apply_gate).detach()
    assert not calls and (got - wanted).norm() < 0.02 * wanted.norm()  # the first product is one of bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # which gives both one dtype
        got = experts(x, ids, weights)
    assert len(calls) == 1 and (got - wanted).norm() < 0.02 * wanted.norm()


class Packed(torch.Tensor):
    """A tensor that is made of another one, as quantised ones are."""

    @staticmethod
    def __new__(cls, packed):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=packed.dtype, device=packed.device)

    def __init__(self, packed):
        self.packed = packed

    def __tensor_flatten__(self):
        return ["packed"], None

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), options=None):
        def plain(value):
            return value.packed / 2 if isinstance(value, Packed) else value

        if function is torch.ops.aten.detach.default:
            return Packed(arguments[0].packed)
        return function(*torch.utils._pytree.tree_map(plain, arguments), **(options or {}))


def test_quantised_tensors_fall_back(calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    experts = made(*QWEN, "moeblaze").float()
    x, ids, weights = in_float32()
    wanted = by_hand(experts, x, ids, weights, experts._apply_gate)
    experts.down_proj = torch.nn.Parameter(Packed(2 * experts.down_proj.detach()), requires_grad=False)
    with pytest.warns(UserWarning, match="its weights are tensors of a class of their own, Packed"), torch.no_grad():
        got = experts(x, ids, weights)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    assert not calls


@pytest.mark.parametrize("how", ["register", "patch"])
def test_keep_saved_allows_a_second_backward(how):
    def twice(model):
        loss = model(tokens(), labels=tokens()).loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(loss, parameters, allow_unused=True)
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)

    if how == "register":
        backend.register("moeblaze_keep_saved", keep_saved=True)
        keeping, plain = tiny("mixtral", "moeblaze_keep_saved"), tiny("mixtral", "moeblaze")
    else:
        keeping, plain = (text_model(*PATCHED["DbrxExperts"][:3], **DBRX) for _ in range(2))
        backend.patch(plain, keep_saved=True)
        backend.patch(plain)  # the last call decides
        backend.patch(keeping, keep_saved=True)
    assert twice(keeping)
    with pytest.raises(RuntimeError, match="keep_saved"):
        twice(plain)


SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_dense_layers": 0,
    "moe_layer_start_index": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MODELS = """
    mixtral qwen2_moe qwen3_moe olmoe flex_olmo deepseek_v2 deepseek_v3 granitemoe granitemoeshared glm4_moe
    glm4_moe_lite minimax minimax_m2 phimoe dots1 ernie4_5_moe hunyuan_v1_moe afmoe cohere2_moe exaone_moe
"""


def tiny(model_type, implementation, **sizes):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    own = {"head_dim": 8, "v_head_dim": 8} if model_type == "deepseek_v3" else {}
    config = transformers.AutoConfig.for_model(model_type, **SIZES | own | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    model.generation_config.eos_token_id = None
    return model


def tokens():
    return torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(2))


def step(model):
    """Logits and gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(4)  # some routers draw noise
    out = model(tokens(), labels=tokens())
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().clone(), **grads}


@pytest.mark.parametrize("model_type", MODELS.split())
def test_model(model_type, calls, tmp_path):
    """Logits, gradients, checkpointing, greedy tokens, save and load, bfloat16."""
    reference, model = tiny(model_type, "eager"), tiny(model_type, "moeblaze")
    layers = sum(hasattr(module, "is_concatenated") for module in model.modules())
    wanted, got = step(reference), step(model)
    assert len(calls) == layers > 0
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5 * max(value.abs().max().item(), 1e-3))

    model.gradient_checkpointing_enable()
    calls.clear()
    again = step(model)
    assert len(calls) == 2 * layers
    assert all(torch.equal(again[name], value) for name, value in got.items())
    model.gradient_checkpointing_disable()

    options = {"max_new_tokens": 4, "do_sample": False}
    calls.clear()
    assert torch.equal(model.generate(tokens(), **options), reference.generate(tokens(), **options))
    assert len(calls) == 4 * layers

    model.save_pretrained(tmp_path)
    assert "moeblaze" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="moeblaze")
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)

    calls.clear()
    half = step(model.bfloat16())
    assert len(calls) == layers and all(torch.isfinite(value).all() for value in half.values())


def test_an_implementation_is_set_on_a_model_in_use(calls):
    model = tiny("qwen3_moe", "eager")
    wanted = step(model)["logits"]
    model.set_experts_implementation("moeblaze")
    torch.testing.assert_close(step(model)["logits"], wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2


def test_autocast_computes_as_linear_does(calls):
    """Experts of float32 weights in bfloat16, their gradients in float32."""
    reference, model = tiny("qwen3_moe", "eager"), tiny("qwen3_moe", "moeblaze")
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = step(reference), step(model)
    assert len(calls) == 2
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        assert (got[name] - value).norm() < 0.03 * value.norm(), name


def test_a_model_on_meta_has_shapes():
    """Also under a dispatch mode, as counters of operations want it."""
    from torch.utils.flop_counter import FlopCounterMode

    for mode in (FlopCounterMode(display=False), contextlib.nullcontext()):
        with torch.device("meta"):
            model = tiny("qwen3_moe", "moeblaze")
        with mode:
            out = model(tokens().to("meta"), labels=tokens().to("meta"))
            out.loss.backward()
        assert out.logits.shape == (2, 8, 64) and all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("policy", ["paper", "recompute"])
def test_save_policies(policy, calls):
    backend.register(f"moeblaze_{policy}", save=policy)
    wanted = step(tiny("mixtral", "moeblaze"))
    got = step(tiny("mixtral", f"moeblaze_{policy}"))
    assert [call["save"] for call in calls] == ["minimal"] * 2 + [policy] * 2
    check_equal(got, wanted, 1e-5)


def test_a_memory_limit_reaches_the_layer(calls):
    """On the CPU it changes nothing."""
    backend.register("moeblaze_limited", memory_limit=10**9)
    wanted = step(tiny("mixtral", "moeblaze"))
    got = step(tiny("mixtral", "moeblaze_limited"))
    assert [call.get("memory_limit") for call in calls] == [None] * 2 + [10**9] * 2
    check_equal(got, wanted, 1e-12)
    with pytest.raises(ValueError, match="register: memory_limit: expected None, or at least 1 byte, got 0"):
        backend.register("moeblaze_limited", memory_limit=0)


@needs_models_that_compile
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_compiles_to_one_graph(model_type):
    model = tiny(model_type, "moeblaze", num_hidden_layers=1)
    wanted = step(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(fullgraph=True, backend="aot_eager")
    check_equal(step(model), wanted, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["GptOssExperts", "DeepseekV4Experts", "Inkling2Experts"])
def test_constants_of_an_activation_reach_the_compiled_operator(name, monkeypatch):
    """`experts_config` has limits other than the defaults. No eager call has met the module."""
    monkeypatch.setattr(formulas, "_FOUND", {})
    module = next(module for module, found in CLASSES if found == name)
    wanted = results(made(module, name), *inputs())
    experts = made(module, name, "moeblaze")
    torch._dynamo.reset()
    experts.compile(fullgraph=True, backend="aot_eager")
    check_equal(results(experts, *inputs()), wanted, 2e-6 if name in IN_FLOAT32 else 1e-12)


@pytest.mark.parametrize("first", ["eager", "patch"])
def test_layers_compiled_one_by_one_share_their_graphs(first):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3_moe", **SIZES | {"num_hidden_layers": 10}),
        experts_implementation="moeblaze",
    )
    if first == "patch":
        formulas._FOUND.clear()
        backend.patch(model)
    with torch.no_grad():
        if first == "eager":
            model(tokens())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in model.model.layers:
            layer.mlp.experts.compile(fullgraph=True, backend="aot_eager")
        model(tokens())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        row = torch.randint(2, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": row, "labels": row}


MODES = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


def train(model, folder, **options):
    """Losses and gradient norms of three steps of two batches each."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("mode", MODES)
def test_trainer(mode, tmp_path, calls):
    pytest.importorskip("accelerate")
    if mode == "compile" and NO_COMPILED_TRAINER:
        pytest.skip(NO_COMPILED_TRAINER)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = {} if mode == "compile" else MODES[mode]  # the loop over experts in plain code breaks graphs
    wanted = train(tiny("qwen3_moe", "eager", num_hidden_layers=1), tmp_path, **eager)
    torch._dynamo.utils.counters.clear()
    got = train(tiny("qwen3_moe", "moeblaze", num_hidden_layers=1), tmp_path, **MODES[mode])
    assert len(got) == 3 and calls
    loss_error, norm_error = (1e-3, 0.05) if mode == "bf16" else (1e-5, 1e-4)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(got, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=loss_error)
        assert norm == pytest.approx(wanted_norm, rel=norm_error) and norm > 0
    if mode == "compile":
        assert not torch._dynamo.utils.counters["graph_break"]


LORA = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


@pytest.mark.parametrize("where", LORA)
def test_lora(where, tmp_path, calls):
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    losses = []
    for implementation in ("eager", "moeblaze"):
        model = tiny("qwen3_moe", implementation)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **LORA[where]))
        assert sum(p.requires_grad for p in model.parameters()) > 0
        losses.append(train(model, tmp_path))
    assert calls
    for pair, expected in zip(*losses, strict=True):
        assert pair == pytest.approx(expected, rel=1e-4) and pair[1] > 0


def text_model(module, config, model, **sizes):
    """A small model of a family that AutoModelForCausalLM has under other names or sizes."""
    family = importlib.import_module(f"transformers.models.{module}")
    torch.manual_seed(0)
    made = getattr(family, model)(getattr(family, config)(**SIZES | sizes)).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "experts" in name or "mlp" in name:  # some families start with zeros or with what torch.empty found
                parameter.normal_(std=0.2)
    return made


DBRX = {
    "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
PATCHED = {
    "DbrxExperts": ("dbrx", "DbrxConfig", "DbrxForCausalLM", DBRX),
    "JetMoeMoE": ("jetmoe", "JetMoeConfig", "JetMoeForCausalLM", {"kv_channels": 16, "num_key_value_heads": 1}),
    "Llama4TextExperts": (
        "llama4", "Llama4TextConfig", "Llama4ForCausalLM", {"moe_layers": [0, 1], "intermediate_size_mlp": 16}
    ),
}  # fmt: skip


class Holder(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *args):
        return self.experts(*args)


@pytest.mark.parametrize("name", PATCHED)
def test_patch_serves_models_that_are_not_dispatched(name, calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    *family, sizes = PATCHED[name]
    model = text_model(*family, **sizes)
    modules = [path for path, module in model.named_modules() if type(module).__name__ == name]
    wanted = step(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moeblaze: JetMoeMoA")
        first, second = backend.patch(model), backend.patch(model)
    assert list(first.served) == modules and first == second and len(modules) == 2
    got = step(model)
    assert len(calls) == 2
    check_equal(got, wanted, 1e-6)
    copied = copy.deepcopy(model)
    assert all(copied.get_submodule(path).forward.__self__ is copied.get_submodule(path) for path in modules)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_patch_step(limit, calls, monkeypatch):
    """Its experts clamp after the activation; a limit of its own for each layer."""
    monkeypatch.setattr(formulas, "_WARNED", set())
    family = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    if not hasattr(family, "Step3p7Experts"):
        pytest.skip("this transformers has no Step3p7Experts")
    torch.manual_seed(0)
    model = Holder(family.Step3p7Experts(experts_config(), swiglu_limit=limit).double())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    wanted = results(model, *inputs())
    assert backend.patch(model).served == ("experts",)
    check_equal(results(model, *inputs()), wanted, 1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("identities", [0, 3])
def test_patch_longcat(identities, calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    family = importlib.import_module("transformers.models.longcat_flash.modeling_longcat_flash")
    config = experts_config()
    config.expert_ffn_hidden_size, config.zero_expert_num = H, identities
    torch.manual_seed(0)
    model = Holder(family.LongcatFlashExperts(config).double())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x, _, weights, grad_out = inputs()
    ids = torch.rand(L, E + identities).argsort(1)[:, :K].contiguous()
    wanted = results(model, x, ids, weights, grad_out)
    assert backend.patch(model).served == ("experts",)
    check_equal(results(model, x, ids, weights, grad_out), wanted, 1e-12)
    assert len(calls) == 1


def test_patch_tells_of_implementations_that_are_not_the_layers(monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    model = tiny("mixtral", "grouped_mm")
    with pytest.warns(UserWarning, match="MixtralExperts runs as before: its experts implementation is 'grouped_mm'"):
        refused = backend.patch(model).refused
    assert list(refused) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    with pytest.raises(NotImplementedError, match="MixtralExperts: its experts implementation"):
        backend.patch(model, fallback=False)
    model.set_experts_implementation("moeblaze")
    assert backend.patch(model) == (tuple(refused), {})


def patched(name, **options):
    """A model, and one of the same weights that is patched."""
    *family, sizes = PATCHED[name]
    model = text_model(*family, **sizes)
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moeblaze: JetMoeMoA")
        served = backend.patch(other, **options).served
    assert len(served) == 2
    return model, other, served


ADAPTED = {
    "Llama4TextExperts": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    "JetMoeMoE": ["mlp.input_linear.weight", "mlp.output_linear.weight"],
}


@pytest.mark.parametrize("first", ["patch", "LoRA"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_patched_models_count(name, first, calls, monkeypatch):
    """Gradients too, and without the adapters."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(formulas, "_WARNED", set())
    module, config, model, sizes = PATCHED[name]
    got = []
    for patches in (False, True):
        base = text_model(module, config, model, **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if patches and first == "patch":
                assert len(backend.patch(base).served) == 2
            torch.manual_seed(3)
            targets = {"target_modules": [], "target_parameters": ADAPTED[name]}
            adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, **targets))
            if patches and first == "LoRA":
                assert len(backend.patch(adapted).served) == 2
            result = step(adapted)
            with adapted.disable_adapter(), torch.no_grad():
                result["without"] = adapted(tokens()).logits
        got.append(result)
        assert len([key for key in result if "lora" in key]) == 8
        assert ["lora" in options for options in calls] == ([True, True, False, False] if patches else [])
    check_equal(got[1], got[0], 1e-6)
    assert not torch.equal(got[0]["without"], got[0]["logits"])


PARTS = {
    "DbrxExperts": "transformer.blocks.0.ffn.experts.mlp",
    "JetMoeMoE": "model.layers.0.mlp.output_linear",
    "Llama4TextExperts": "model.layers.0.feed_forward.experts",
}


@pytest.mark.parametrize("name", PARTS)
def test_hooks_of_modules_with_weights_run(name, calls, monkeypatch):
    monkeypatch.setattr(formulas, "_WARNED", set())
    model, other, _ = patched(name)
    seen = []

    def doubles(module, arguments, out):
        seen.append(module)
        return 2 * out

    model.get_submodule(PARTS[name]).register_forward_hook(doubles)
    part = other.get_submodule(PARTS[name])
    handle = part.register_forward_hook(doubles)
    wanted = step(model)
    seen.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = step(other)
    reasons = [str(w.message) for w in warned if "is wrapped or has hooks" in str(w.message)]
    assert set(seen) == {part} and (len(calls), len(reasons)) == ((2, 0) if name == "Llama4TextExperts" else (1, 1))
    check_equal(got, wanted, 1e-6)
    handle.remove()
    calls.clear()
    step(other)
    assert len(calls) == 2


def test_a_patched_forward_that_must_not_fall_back_raises():
    _, other, _ = patched("DbrxExperts", fallback=False)
    other.get_submodule(PARTS["DbrxExperts"]).register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"^moeblaze: DbrxExperts: its mlp is wrapped or has hooks"):
        other(tokens())


@pytest.mark.parametrize("first", ["patch", "offload"])
@pytest.mark.parametrize("name", ADAPTED)
def test_offloaded_weights(name, first, calls, monkeypatch):
    """accelerate's hooks bring them when a module is called."""
    hooks = pytest.importorskip("accelerate.hooks")
    monkeypatch.setattr(formulas, "_WARNED", set())
    *family, sizes = PATCHED[name]
    other = text_model(*family, **sizes)
    wanted = other(tokens()).logits
    modules = [path for path, module in other.named_modules() if type(module).__name__ == name]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if first == "patch":
            assert len(backend.patch(other).served) == 2
        for layer in other.model.layers:
            block = layer.mlp if name == "JetMoeMoE" else layer.feed_forward
            hooks.attach_align_device_hook(block, execution_device="cpu", offload=True)
        assert any(parameter.is_meta for parameter in other.parameters())
        found = backend.patch(other)
        if first == "offload":
            reasons = [found.refused[served] for served in modules]
            assert all("forward is wrapped, as by a device_map" in reason for reason in reasons)
        else:
            assert list(found.served) == modules
        calls.clear()
        torch.testing.assert_close(other(tokens()).logits, wanted, rtol=1e-6, atol=1e-9)
    assert len(calls) == (2 if name == "Llama4TextExperts" and first == "patch" else 0)


def test_a_foreign_forward_is_reported(monkeypatch):
    """Of a module, of its class, and of a class that takes the place of transformers'."""
    monkeypatch.setattr(formulas, "_WARNED", set())
    foreign = types.FunctionType((lambda self, x, ids, weights: x).__code__, {"__name__": "liger_kernel.ops"})
    model = tiny("mixtral", "moeblaze")
    names = [name for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts"]
    module = model.get_submodule(names[0])
    module.forward = types.MethodType(foreign, module)
    with pytest.warns(
        UserWarning, match="MixtralExperts runs as before: its forward has been replaced by one of liger"
    ):
        assert backend.patch(model) == (
            (names[1],),
            {names[0]: "its forward has been replaced by one of liger_kernel.ops"},
        )
    del module.forward
    with monkeypatch.context() as patching:
        patching.setattr(type(module), "forward", foreign)
        assert set(backend.patch(model).refused) == set(names)
    assert backend.patch(model).served == tuple(names)
    _, other, served = patched("DbrxExperts")
    other.get_submodule(served[0]).forward = types.MethodType(foreign, other.get_submodule(served[0]))
    assert list(backend.patch(other).refused) == [served[0]]

    class LigerExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.zeros(2, 2, 2)) for _ in range(2))

    with pytest.warns(UserWarning, match="LigerExperts runs as before: transformers does not dispatch its class"):
        assert list(backend.patch(Holder(LigerExperts())).refused) == ["experts"]


def test_a_model_can_be_pickled_and_patched_again(calls):
    model = text_model(*PATCHED["DbrxExperts"][:3], **DBRX)
    backend.patch(model)
    again = pickle.loads(pickle.dumps(model))
    assert backend.patch(again).served == backend.patch(model).served
    assert torch.equal(step(again)["logits"], step(model)["logits"]) and math.prod(tokens().shape)


def test_a_save_policy_is_checked_where_it_is_registered():
    """Inference looks at none, so that the first training step would raise."""
    with pytest.raises(ValueError) as caught:
        backend.register("other", save="minimum")
    assert str(caught.value).startswith("register: save: expected one of 'minimal', ")


@pytest.mark.parametrize("name", ["", None, 5])
def test_names_that_no_model_could_ask_for_are_refused(name):
    with pytest.raises(ValueError, match=r"^register: name: expected one that transformers does not use itself"):
        backend.register(name)


@pytest.mark.parametrize("function", ["patch", "pack_experts", "quantize_weights"])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(TypeError, match=f"^{function}: model: expected a torch.nn.Module, got 'a path'$"):
        getattr(backend, function)("a path")


def test_the_name_is_checked_where_a_model_is_built():
    with pytest.raises(ValueError, match="is not supported"):
        tiny("mixtral", "moeblase")
