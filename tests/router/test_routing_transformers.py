"""`route` beside every router of transformers' models, in float64: chosen experts, weights and gradients of the logits.

A row of ROUTERS per class says by which options `route` is that router. A class of a newer transformers fails
test_every_router_is_listed until it has a row, or a reason in NO_ROUTER.
"""

import functools
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import moeblaze_cupy as mb
from tests.cases import relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="an optional comparison with the models' own routers")

from torch.overrides import TorchFunctionMode  # noqa: E402

from moeblaze_cupy.interop.torch import route  # noqa: E402

L, E, K = 64, 40, 6
BATCH = 4  # rows of Switch's batch, L / 4 tokens each
SHARED = 2  # Inkling's columns behind the E of its routed experts
TOLERANCE = 1e-12  # float64, sums of up to E terms
MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"
B = torch.from_numpy(np.random.default_rng(0).standard_normal(E) / 4)


class Row(NamedTuple):
    """name: the class; options: those of `route`; logits: what the class does to the logits before it scores them;
    config: what its configuration has beside CONFIG."""

    name: str
    options: dict
    logits: Callable = lambda x: x
    config: Mapping = types.MappingProxyType({})


# Every class reads what it needs. A class with norm_topk_prob is also tested with False, which is renormalize=False.
CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "top_k"), K),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 2.5),
    **{"hidden_size": E, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
    **{"router_dtype": "float64", "router_bias": False, "router_ignore_padding_tokens": False},
}
SOFTMAX = {"score": "softmax"}
DEEPSEEK_V2 = {"renormalize": False, "groups": (4, 2, 1), "scale": 2.5}
DEEPSEEK_V3 = {"score": "sigmoid", "bias": B, "groups": (4, 2, 2), "eps": 1e-20, "scale": 2.5}
MISTRAL = {"groups": (4, 2, 2), "scale": 2.5}
SIGMOID = {"score": "sigmoid", "bias": B}  # the weights are divided by their sum alone
WITH_EPS = {"score": "sigmoid", "bias": B, "eps": 1e-20, "scale": 2.5}
DEEPSEEK_V4 = {"score": "sqrt_softplus", "eps": 1e-20, "scale": 2.5}
LIMITED = {"topk_method": "group_limited_greedy"}
NLLB = {
    "expert_capacity": 4,
    "second_expert_policy": "all",
    "normalize_router_prob_before_dropping": False,
    "batch_prioritized_routing": False,
    "moe_eval_capacity_token_fraction": -1.0,
}

ROUTERS = [
    Row("AXK1TopkRouter", DEEPSEEK_V3),
    # It fills other groups with 0, so that these win over kept experts whose keys are negative: none is here.
    Row("AXK2TopkRouter", DEEPSEEK_V3 | {"bias": B.abs()}),
    Row("AXK2TopkRouter", WITH_EPS, config={"n_group": None}),
    Row("AfmoeTokenChoiceRouter", WITH_EPS),
    Row("AriaTextTopKRouter", SOFTMAX),
    Row("BailingHybridTopkRouter", DEEPSEEK_V3),
    Row("BeamTopKRouter", DEEPSEEK_V3 | {"scale": 1.0}),
    Row("Cohere2MoeTopKRouter", {"score": "sigmoid"}, config={"expert_selection_fn": "sigmoid"}),
    Row("Cohere2MoeTopKRouter", SOFTMAX | {"renormalize": True}, config={"expert_selection_fn": "softmax"}),
    Row("DbrxFFN", SOFTMAX, config={"moe_normalize_expert_weights": 1}),
    Row("DbrxFFN", {"renormalize": False}, config={"moe_normalize_expert_weights": None}),
    Row("DeepseekOcr2TextTopkRouter", DEEPSEEK_V2, config=LIMITED),
    Row("DeepseekV2TopkRouter", DEEPSEEK_V2, config=LIMITED),
    Row("DeepseekV2TopkRouter", {"renormalize": False, "scale": 2.5}, config={"topk_method": "greedy"}),
    Row("DeepseekV32TopkRouter", DEEPSEEK_V3),
    Row("DeepseekV3TopkRouter", DEEPSEEK_V3),
    Row("DeepseekV3TopkRouter", WITH_EPS, config={"n_group": 1, "topk_group": 1}),
    Row("DeepseekV4HashRouter", DEEPSEEK_V4, config={"scoring_func": "sqrtsoftplus", "vocab_size": 100}),
    Row("DeepseekV4TopKRouter", DEEPSEEK_V4 | {"bias": B}, config={"scoring_func": "sqrtsoftplus"}),
    Row("DiffusionGemmaTextRouter", SOFTMAX),
    Row("Dots1TopkRouter", DEEPSEEK_V3),
    Row("Dots3NoteTextTopkRouter", DEEPSEEK_V3),
    Row("Dots3NoteVisionTopKRouter", WITH_EPS),
    Row("Ernie4_5_MoeTopKRouter", SOFTMAX | {"bias": B}, config={"moe_norm_min": 1e-12}),
    Row("Ernie4_5_VLMoeMoeTopKRouter", SOFTMAX | {"bias": B}, config={"moe_norm_min": 1e-12}),
    Row("ExaoneMoeTopkRouter", DEEPSEEK_V3),
    Row("FlexOlmoTopKRouter", SOFTMAX),
    Row("FlintTopKRouter", {"score": "sigmoid"}),
    Row("Gemma4TextRouter", SOFTMAX),
    Row("Glm4MoeLiteTopkRouter", DEEPSEEK_V3),
    Row("Glm4MoeTopkRouter", DEEPSEEK_V3),
    Row("Glm4vMoeTextTopkRouter", DEEPSEEK_V3),
    Row("Glm5NextTextTopkRouter", DEEPSEEK_V3),
    Row("GlmMoeDsaTopkRouter", DEEPSEEK_V3),
    Row("GptOssTopKRouter", SOFTMAX, lambda x: x + B),  # a bias of the linear map, which trains
    Row("GraniteMoeHybridTopKRouter", SOFTMAX),
    Row("GraniteMoeSWATopKRouter", SOFTMAX),
    Row("GraniteMoeSharedTopKRouter", SOFTMAX),
    Row("GraniteMoeTopKRouter", SOFTMAX),
    Row("HYV3TopKRouter", WITH_EPS),
    Row("HYV4TopkRouter", DEEPSEEK_V3),
    Row("HYV4VLTopkRouter", DEEPSEEK_V3),
    Row("HunYuanMoEV1Gate", SOFTMAX),
    Row("Inkling2TopKRouter", WITH_EPS, config={"scoring_func": "sigmoid"}),
    Row("Inkling2LoopTopKRouter", WITH_EPS, config={"scoring_func": "sigmoid"}),
    Row("InklingTopkRouter", SIGMOID, config={"hidden_size": E + SHARED, "n_shared_experts": SHARED}),
    Row("JambaTopKRouter", {"renormalize": False}),
    Row("JetMoeTopKGating", SOFTMAX),
    Row("KimiLinearTopkRouter", DEEPSEEK_V3),
    Row("Kolibri1TopKRouter", SIGMOID | {"bias_on": "logits"}),
    Row("LagunaTopKRouter", SIGMOID, lambda x: 3 * (x / 3).tanh(), {"moe_router_logit_softcapping": 3.0}),
    Row("LaraMiniTopKRouter", SOFTMAX),
    Row("Lfm2MoeTopKRouter", SIGMOID | {"eps": 1e-6, "scale": 2.5}, config={"use_expert_bias": True}),
    Row("Llama4Router", {"score": "sigmoid", "renormalize": False}),
    Row(
        "LongcatFlashTopkRouter",
        {"renormalize": False, "bias": B, "scale": 2.5},
        config={"n_routed_experts": E - 8, "zero_expert_num": 8},
    ),
    Row("MellumTopKRouter", SOFTMAX),
    Row("MiMoV2FlashTopkRouter", DEEPSEEK_V3),
    Row("MiniMaxM2TopKRouter", SIGMOID),
    Row("MiniMaxM3VLTopKRouter", SIGMOID),
    Row("MiniMaxTopKRouter", SOFTMAX),
    Row("Mistral4TopkRouter", MISTRAL),
    Row("MistralLarge4TextTopkRouter", MISTRAL),
    Row("MixtralTopKRouter", SOFTMAX),
    Row("MuseSparkTopkRouter", WITH_EPS | {"eps": 1e-15}, lambda x: 0.5 * x, {"output_multiplier": 0.5}),
    Row("NemotronHTopkRouter", DEEPSEEK_V3),
    Row("NllbMoeTop2Router", SOFTMAX, config=NLLB),
    Row("NllbMoeTop2Router", SOFTMAX, config=NLLB | {"normalize_router_prob_before_dropping": True}),
    Row("NllbMoeTop2Router", SOFTMAX, config=NLLB | {"batch_prioritized_routing": True}),
    Row("OlmoeTopKRouter", SOFTMAX),
    Row("OpenAIPrivacyFilterTopKRouter", {"scale": 1 / K}, lambda x: x + B),
    Row("PhimoeTopKRouter", {"renormalize": False}, config={"router_jitter_noise": 0.2, "input_jitter_noise": 0.0}),
    Row("Qwen2MoeTopKRouter", SOFTMAX),
    Row("Qwen3MoeTopKRouter", SOFTMAX),
    Row("Qwen3NextTopKRouter", SOFTMAX),
    Row("Qwen3OmniMoeTalkerTextTopKRouter", SOFTMAX),
    Row("Qwen3OmniMoeTextTopKRouter", SOFTMAX),
    Row("Qwen3OmniMoeThinkerTextTopKRouter", SOFTMAX),
    Row("Qwen3VLMoeTextTopKRouter", SOFTMAX),
    Row("Qwen3_5MoeTopKRouter", SOFTMAX),
    Row("Qwen4ExpTextTopKRouter", SOFTMAX),
    Row("SolarOpenTopkRouter", DEEPSEEK_V3),
    Row("Step3p7TopKRouter", SIGMOID),
    Row("SwitchTransformersTop1Router", {}, config={"expert_capacity": 1, "router_jitter_noise": 0.0}),
    Row("UnlimitedOcrTextTopkRouter", DEEPSEEK_V2, config=LIMITED),
    Row(
        "ZayaRouter",
        {"renormalize": False, "bias": B},
        config={"num_experts": E - 1, "router_hidden_size": E},
    ),
]
# What the walk finds beside them, with the reason why it has no row.
NO_ROUTER = {
    "BailingHybridForgetGate": "a gate of attention",
    "DbrxRouter": "the linear map alone: DbrxFFN chooses",
    "DogeCDMoE": "two top-k of sqrt(E) keys each, whose sums rank E experts: no logits (L, E) exist",
    "Glm5NextTextForgetGate": "a gate of attention",
    "Inkling2LoopMessageGate": "a gate of the residual",
    "KimiLinearForgetGate": "a gate of attention",
    "MuseSparkResidualGate": "a gate of the residual",
}


@functools.cache
def found():
    """The module of every class that chooses experts, or is named as if it did, by the class's name.

    Read from source, as the import of all modules takes long. A class that only selects tokens for attention is left
    out: its name ends in Indexer or Attention.
    """
    classes = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search("experts", source, re.IGNORECASE):
            continue
        for part in re.split(r"^(?=class |def |@)", source, flags=re.MULTILINE):
            name = (re.match(r"class (\w+)", part) or [""])[0].removeprefix("class ")
            chooses = "topk(" in part and not name.endswith(("Indexer", "Attention"))
            if name and (chooses or name.endswith(("Router", "Gating", "Gate"))):
                classes[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return classes


def test_every_router_is_listed():
    """This fails for a router that a newer transformers brings."""
    assert len(found()) > 70
    assert sorted(set(found()) - {row.name for row in ROUTERS} - set(NO_ROUTER)) == []


class InFloat64(TorchFunctionMode):
    """A cast to float32 casts to float64 instead: a module's own formula runs in the precision of its input."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def built(row, **config):
    """The class in float64, with the identity as its linear map: hidden states are logits."""
    if row.name not in found():
        pytest.skip(f"this transformers has no {row.name}")
    kind = getattr(importlib.import_module(found()[row.name]), row.name)
    config = types.SimpleNamespace(**CONFIG | row.config | config)
    if row.name == "DbrxFFN":  # its method that chooses needs no more of it
        config.route_tokens_to_experts = types.MethodType(kind.route_tokens_to_experts, config)
        del config.norm_topk_prob  # which it does not have
        return config
    if row.name == "JetMoeTopKGating":
        made = kind(E, E, K)
    else:
        made = kind(config, 0) if row.name == "ZayaRouter" else kind(config)
    made = made.double().eval()
    for name in REPLACED.get(row.name, ()):
        setattr(made, name, torch.nn.Identity())
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*made.named_buffers(), *made.named_parameters()]:
            if name.endswith(("correction_bias", "balancing_biases")):
                tensor.copy_(row.options["bias"].view_as(tensor))
            elif name in ("per_expert_scale", "global_scale"):
                tensor.copy_(torch.rand(len(tensor), generator=seeded) + 0.5)
            elif name == "tid2eid":
                tensor.copy_(torch.rand(len(tensor), E, generator=seeded).argsort(1)[:, :K])
            elif name == "bias":
                tensor.copy_(B)
            elif tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
                tensor.copy_(torch.eye(len(tensor)))
    return made


# What some routers compute of the hidden states before they have logits.
REPLACED = {
    "DiffusionGemmaTextRouter": ("norm",),
    "Gemma4TextRouter": ("norm",),
    "ZayaRouter": ("down_proj", "router_mlp"),
}
INPUT_IDS = torch.arange(L) % 100


def of_module(made, x):
    """The last two results of a module that takes hidden states, and a bias if it asks for one."""
    _, second, *_ = *inspect.signature(made.forward).parameters, "", ""
    return made(x, *[B] * ("bias" in second))[1:3]


def of_llama_4(made, x):
    scores, _ = made(x)  # 0 where an expert was not chosen
    return scores.topk(K, dim=1)


def of_jetmoe(made, x):
    by_expert, _, weights, counts, _ = made(x)
    place = by_expert.argsort()
    ids = torch.arange(E).repeat_interleave(torch.tensor(counts))
    return weights[place].view(L, K), ids[place].view(L, K)


def of_zaya(made, x):
    _, weights, ids, _ = made(x[None])
    return weights, torch.where(weights == 0, -1, ids)  # it gives the last column the expert 0 and no weight


def of_switch(made, x):
    mask, weights, _ = made(x.view(BATCH, -1, E))  # mask 0 for tokens over the capacity of their row of the batch
    mask, weights = mask.view(L, E), weights.view(L, 1)
    kept = mask.any(1, keepdim=True)
    return weights * kept, torch.where(kept, mask.argmax(1, keepdim=True), -1)


def of_nllb(made, x):
    _, gates, _ = made(x)
    weights, ids = gates.topk(2, dim=1)
    return weights, torch.where(weights == 0, -1, ids)


THEIRS = {
    "AfmoeTokenChoiceRouter": lambda made, x: made(x[None], B)[1:],
    "DbrxFFN": lambda made, x: made.route_tokens_to_experts(x),
    "DeepseekV4HashRouter": lambda made, x: made(x, INPUT_IDS)[1:],
    "JetMoeTopKGating": of_jetmoe,
    "Llama4Router": of_llama_4,
    "NllbMoeTop2Router": of_nllb,
    "SwitchTransformersTop1Router": of_switch,
    "ZayaRouter": of_zaya,
}


def in_one_call(x, row, made):
    return route(x, K, **row.options)


def with_a_scale_per_expert(x, row, made):
    weights, ids = route(made.scalar_root_size * x, K, **row.options)
    return weights * made.per_expert_scale[ids], ids


def with_hashed_ids(x, row, made):
    return route(x, ids=made.tid2eid[INPUT_IDS], **row.options)


def beside_shared_experts(x, row, made):
    """The weights of the shared experts, which every token uses, are part of the sum."""
    weights, ids = route(x[:, :E].contiguous(), K, renormalize=False, **row.options)
    total = weights.sum(1, keepdim=True) + x[:, E:].sigmoid().sum(1, keepdim=True)
    return made.route_scale * made.global_scale * weights / total, ids


def with_a_column_for_no_expert(x, row, made):
    weights, ids = route(x, K, **row.options)
    return weights * (ids < E - 1), torch.where(ids < E - 1, ids, -1)


def of_each_row(x, row, made):
    _, ids = route(x, 1)
    return route(x, ids=mb.limit_capacity(ids, E, made.expert_capacity, sequences=BATCH))


def with_first_choices_first(x, row, made):
    weights, ids = route(x, 2)
    order = torch.arange(L)
    if made.batch_prioritized_routing:  # tokens come by their probability
        order = x.detach().softmax(1).amax(1).argsort(descending=True)
    kept = torch.empty_like(ids)
    kept[order] = mb.limit_capacity(ids[order], E, made.expert_capacity, order="choice")
    assert 0 < (kept < 0).sum() < L
    if made.normalize_router_prob_before_dropping:
        return weights * (kept >= 0), kept
    return route(x, ids=kept, renormalize=True)


def in_two_rounds(x, row, made):
    """Two choices of one expert, each a softmax over the logits that are near the largest that is left."""
    left, results = x, []
    for _ in range(2):
        largest = left.amax(1, keepdim=True)
        far = (largest - x) / torch.maximum(x.abs(), largest) > 2 * made.router_jitter_noise
        results.append(route(left.masked_fill(far, -torch.inf), 1, **row.options))
        left = left.scatter(1, results[0][1].long(), -torch.inf)
    return tuple(torch.cat(parts, dim=1) for parts in zip(*results, strict=True))


# Routers that take more than one call of `route`. Others are `in_one_call`.
OURS = {
    "DeepseekV4HashRouter": with_hashed_ids,
    "DiffusionGemmaTextRouter": with_a_scale_per_expert,
    "Gemma4TextRouter": with_a_scale_per_expert,
    "InklingTopkRouter": beside_shared_experts,
    "NllbMoeTop2Router": with_first_choices_first,
    "PhimoeTopKRouter": in_two_rounds,
    "SwitchTransformersTop1Router": of_each_row,
    "ZayaRouter": with_a_column_for_no_expert,
}


def dense(weights, ids):
    """(L, E): the weight of each expert for each token."""
    return torch.zeros(L, E + 1, dtype=weights.dtype).scatter_add(1, ids.long() + 1, weights)[:, 1:]


@pytest.mark.parametrize(("spread", "shift"), [(1, 0), (4, -4)], ids=["normal", "wide"])
@pytest.mark.parametrize("row", ROUTERS, ids=lambda row: row.name)
def test_a_models_own_router(row, spread, shift):
    """With norm_topk_prob and without, where a class has it."""
    columns = row.config.get("hidden_size", E)
    rng = np.random.default_rng(1)
    x = torch.from_numpy(spread * rng.standard_normal((L, columns)) + shift).requires_grad_()
    grad = torch.from_numpy(rng.standard_normal((L, E)))
    for normed in (True, False):
        made = built(row, norm_topk_prob=normed)
        if not normed and not (hasattr(made, "norm_topk_prob") and row.options.get("renormalize") is not False):
            continue
        with InFloat64():
            wanted, wanted_ids = THEIRS.get(row.name, of_module)(made, x)
        used = row if normed else row._replace(options={"renormalize": False} | row.options)
        weights, ids = OURS.get(row.name, in_one_call)(row.logits(x), used, made)
        assert weights.dtype == wanted.dtype == torch.float64 and weights.shape == wanted.shape
        torch.testing.assert_close(ids.sort(1).values.long(), wanted_ids.sort(1).values, rtol=0, atol=0)
        got, want = dense(weights, ids), dense(wanted, wanted_ids)
        assert relative_error(got.detach().numpy(), want.detach().numpy()) < TOLERANCE
        (got,), (want,) = (torch.autograd.grad(result, x, grad) for result in (got, want))
        # Absolute, as 1 - sigmoid of a large logit has few digits.
        assert want.abs().max() > 1e-3 and (got - want).abs().max() < TOLERANCE * max(1, want.abs().max())
