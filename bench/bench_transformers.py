"""Models of transformers with this layer as their experts' implementation, beside those of transformers.

A row is a training step of a small number of layers at the sizes of a released model (forward, loss, backward, AdamW
in bfloat16), eager or compiled. A model has random weights, and one vocabulary of 8,192 so that its head does not hide
the layers. All rows of a case have the same weights and tokens. The cases with "_lora" in their names train adapters of
peft on attention and experts alone, and are run only if named.

Attention is torch's, causal by its own argument. A compiled model of transformers makes a mask of all pairs of tokens
instead, and attention with that mask takes so long that the experts would be a small part of a step.
"""

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F

from bench import inputs, measure

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="transformers")

IMPLEMENTATIONS = ("moeblaze", "grouped_mm", "sonicmoe", "deepgemm")
VOCABULARY = 8192
ROUNDS = 5
ATTENTION = "causal_without_mask"


@dataclass(frozen=True)
class Model:
    """config: class and sizes. B sequences of T tokens in a training step. rank: of peft's adapters, 0 for none."""

    name: str
    config: str
    B: int
    T: int
    compiled: bool = False  # also timed compiled unless --case says otherwise
    sizes: dict = field(default_factory=dict, hash=False)
    attention: str = ATTENTION
    rank: int = 0


def _heads(heads: int, kv: int, width: int) -> dict:
    return {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": width}


MODELS = {
    m.name: m
    for m in (
        Model("qwen3_30b_a3b", "Qwen3MoeConfig", 8, 4096, True, {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 4, **_heads(32, 4, 128),
        }),
        Model("olmoe_1b_7b", "OlmoeConfig", 8, 4096, False, {
            "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 4, **_heads(16, 16, 128),
        }),
        # Its attention has no fused kernel in transformers, so its sequences are short.
        Model("gpt_oss_20b", "GptOssConfig", 32, 512, False, {
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
            "num_hidden_layers": 4, **_heads(64, 8, 64),
        }, "eager"),
    )
}  # fmt: skip
MODELS |= {
    f"{name}_lora_{tokens // 1024}k": replace(
        MODELS[name], name=f"{name}_lora_{tokens // 1024}k", B=tokens // MODELS[name].T, compiled=False, rank=16
    )
    for name in ("qwen3_30b_a3b", "gpt_oss_20b")
    for tokens in (4096, 32768)
}
TINY = Model("tiny_qwen3", "Qwen3MoeConfig", 2, 16, False, {
    "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 1, **_heads(2, 2, 16),
})  # fmt: skip


def check_names(case: str | None, provider: str | None) -> None:
    """Raises ValueError for a name that is none of this suite's."""
    for option, given, known in (("case", case, MODELS), ("provider", provider, IMPLEMENTATIONS)):
        if unknown := [name for name in (given.split(",") if given else ()) if name not in known]:
            raise ValueError(f"bench: --{option}: expected names among {', '.join(known)}; got {unknown[0]!r}")


def pytest_generate_tests(metafunc):
    config = metafunc.config
    given = config.getoption("--case")
    chosen = (config.getoption("--provider") or ",".join(IMPLEMENTATIONS)).split(",")
    unnamed = [name for name, model in MODELS.items() if not model.rank]
    names = [name for name in (given.split(",") if given else unnamed) if name in MODELS]

    def rows(model, compiled):
        """Those that compile come last, as they take longest and --minutes may leave them out."""
        whats = ["step", "step_compiled"] if compiled and not model.rank else ["step"]
        return [(model, what, name) for what in whats for name in chosen if name in IMPLEMENTATIONS]

    specs = [
        pytest.param(s, marks=pytest.mark.gpu) for n in names for s in rows(MODELS[n], given or MODELS[n].compiled)
    ]
    for tiny in (TINY, replace(TINY, name="tiny_qwen3_lora", rank=4)):
        specs += [pytest.param((tiny, "step", name)) for name in ("moeblaze", "grouped_mm")]
    metafunc.parametrize("spec", specs, ids=["-".join((s.values[0][0].name, *s.values[0][1:])) for s in specs])


class _Current:
    """One model in memory, with its optimizer and the loss of its first implementation."""

    model = optimizer = None
    key = ""
    loss = 0.0

    def of(self, case: Model):
        if self.key != case.name:
            self.close()
            self.model = build(case)
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, 1e-6, fused=inputs.has_gpu())
            self.tokens = torch.randint(VOCABULARY, (case.B, case.T), device=inputs.device())
            self.key = case.name
        return self.model

    def close(self):
        self.model = self.optimizer = self.tokens = None
        self.key, self.loss = "", 0.0
        measure.release()


_CURRENT = _Current()


@pytest.fixture(scope="module", autouse=True)
def _close():
    yield
    _CURRENT.close()


def causal_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """(B, T, heads, width). No sequence is padded, so a mask has nothing to add."""
    causal = query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def build(case: Model):
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("moeblaze_cupy.interop.transformers")
    transformers.AttentionInterface.register(ATTENTION, causal_attention)
    transformers.AttentionMaskInterface.register(ATTENTION, lambda *args, **options: None)
    config = getattr(transformers, case.config)(
        **case.sizes, vocab_size=VOCABULARY, max_position_embeddings=max(case.T, 64), pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    dtype = torch.bfloat16 if inputs.has_gpu() else torch.float32
    torch.manual_seed(0)
    with torch.device(inputs.device()):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="grouped_mm", attn_implementation=case.attention
        ).train()
    return with_adapters(model, case.rank) if case.rank else model


def copy_of(model):
    """A copy that shares the model's parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def with_adapters(model, rank: int):
    """The model with adapters of peft on attention and experts. b is not zero, so that all factors have gradients."""
    peft = pytest.importorskip("peft", minversion="0.18")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config)


def use(model, name: str) -> None:
    """Switches the experts. Skips where the layer cannot compute them, as another implementation would be timed."""
    from moeblaze_cupy.interop import transformers as backend

    model.set_experts_implementation(name)
    if name == "moeblaze" and (refused := backend.patch(model).refused):
        pytest.skip(f"moeblaze: {next(iter(refused.values()))}")


def training_step(model, call):
    def step():
        loss = call(input_ids=_CURRENT.tokens, labels=_CURRENT.tokens, use_cache=False).loss
        loss.backward()
        _CURRENT.optimizer.step()
        _CURRENT.optimizer.zero_grad()
        return loss.detach()

    return step


def compiled(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model)


def check_loss(model, name: str, call) -> None:
    """Implementations differ by rounding. A wrong one gets no time. One that cannot run here, whatever it raises, is
    skipped, but for this package's and the one it is compared with."""
    try:
        with torch.no_grad():
            loss = float(call(input_ids=_CURRENT.tokens, labels=_CURRENT.tokens, use_cache=False).loss)
    except Exception as error:
        if name in ("moeblaze", "grouped_mm"):
            raise
        pytest.skip(f"{name}: {str(error).splitlines()[0]}")
    _CURRENT.loss = _CURRENT.loss or loss
    assert abs(loss - _CURRENT.loss) < 0.02 * _CURRENT.loss, f"{name}: loss {loss}, others {_CURRENT.loss}"


def test_transformers(spec, time_device, benchmark):
    case, what, name = spec
    model = _CURRENT.of(case)
    use(model, name)
    info = {"case": case.name, "provider": name, "pass": what, "layers": model.config.num_hidden_layers}
    tokens = case.B * case.T
    model.train()
    check_loss(model, name, model)
    step = training_step(model, compiled(model) if what == "step_compiled" else model)
    step()
    measure.release()
    info["peak_mib"] = None
    if inputs.has_gpu():
        torch.cuda.reset_peak_memory_stats()
        step()
        info["peak_mib"] = torch.cuda.max_memory_allocated() / measure.MIB
    if what == "step_compiled":
        info["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    seconds = time_device(step, rounds=ROUNDS, tokens=tokens, **info)
    if seconds:
        benchmark.extra_info["tokens_per_second"] = tokens / seconds
        benchmark.extra_info["transformers"] = __import__("transformers").__version__
