"""Recorded and replayed routing: every router beside `route` with given ids, and small models beside themselves."""

import contextlib
import copy
import functools
import pickle
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402

from moeblaze_cupy.interop.torch import route  # noqa: E402
from moeblaze_cupy.interop.transformers import UNSET, Routing, align, from_engine, monitor, patch, routing  # noqa: E402
from tests.router import test_routing_transformers as routers  # noqa: E402
from tests.torch_versions import NO_SHARDING_ON_THE_CPU  # noqa: E402

E, K, L = routers.E, routers.K, routers.L
WITHOUT_TOP_K = {
    "DeepseekV4HashRouter": "its ids follow from the tokens",
    "NllbMoeTop2Router": "its experts are modules of their own",
    "PhimoeTopKRouter": "refused",
    "SwitchTransformersTop1Router": "its experts are modules of their own",
}


def given_ids(x, row, made, ids):
    """What `route` makes of given ids, by the options that do not concern the choice."""
    of_weights = {name: value for name, value in row.options.items() if name not in ("groups", "bias", "bias_on")}
    if row.options.get("bias_on") == "logits":
        of_weights |= {"bias": row.options["bias"], "bias_on": "logits"}
    return route(x, ids=ids, **of_weights)


def with_a_scale_per_expert(x, row, made, ids):
    return given_ids(made.scalar_root_size * x, row, made, ids)[0] * made.per_expert_scale[ids], ids


def beside_shared_experts(x, row, made, ids):
    weights, _ = route(x[:, :E].contiguous(), ids=ids, score="sigmoid", renormalize=False)
    total = weights.sum(1, keepdim=True) + x[:, E:].sigmoid().sum(1, keepdim=True)
    return made.route_scale * made.global_scale * weights / total, ids


def with_a_column_for_no_expert(x, row, made, ids):
    weights, _ = given_ids(x, row, made, ids)
    return weights * (ids < E - 1), torch.where(ids < E - 1, ids, -1)


THEIRS = routers.THEIRS | {"Llama4Router": lambda made, x: made(x)}
GIVEN = {
    "DiffusionGemmaTextRouter": with_a_scale_per_expert,
    "Gemma4TextRouter": with_a_scale_per_expert,
    "InklingTopkRouter": beside_shared_experts,
    "ZayaRouter": with_a_column_for_no_expert,
}


@pytest.mark.parametrize("row", [row for row in routers.ROUTERS if row.name not in WITHOUT_TOP_K], ids=lambda r: r.name)
def test_a_router_makes_weights_of_given_ids(row):
    """Weights, and gradients of the logits, in float64. Random ids are of any group."""
    columns = E + routers.SHARED if row.name == "InklingTopkRouter" else E
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((L, columns))).requires_grad_()
    grad = torch.from_numpy(rng.standard_normal((L, E)))
    ids = torch.from_numpy(rng.random((L, E)).argsort(1)[:, :K].copy())
    made = routers.built(row)
    run, chooser = (
        THEIRS.get(row.name, routers.of_module),
        routing.Chooser("", made, "", E - 1),
    )  # Zaya: one is no expert
    with routers.InFloat64(), routing._TopK(chooser) as own:
        run(made, x.detach())
    with routers.InFloat64(), routing._TopK(chooser, ids, ids < 0, E - 1) as seen:
        weights, got_ids = run(made, x)
    if row.name == "Llama4Router":  # scores, 0 where an expert was not chosen, and logits
        weights, got_ids = weights.topk(K)
    wanted, wanted_ids = GIVEN.get(row.name, given_ids)(row.logits(x), row, made, ids)
    assert torch.equal(seen.chosen.reshape(ids.shape), ids) and torch.equal(seen.own, own.chosen)
    assert torch.equal(got_ids.sort(1).values.long(), wanted_ids.sort(1).values)
    got, want = routers.dense(weights, got_ids), routers.dense(wanted, wanted_ids)
    (got_grad,), (want_grad,) = (torch.autograd.grad(result, x, grad) for result in (got, want))
    assert want.abs().max() > 1e-2 and (got - want).abs().max() < routers.TOLERANCE
    assert want_grad.abs().max() > 1e-3 and (got_grad - want_grad).abs().max() < routers.TOLERANCE


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
DEEPSEEK = {**SIZES, **HEADS, **LATENT, **GROUPS, "num_key_value_heads": 4, "first_k_dense_replace": 1}
FEW = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DBRX = {
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}
LLAMA = {"intermediate_size_mlp": 32, "interleave_moe_layer_step": 1, "head_dim": 8}
GRANITE = {**SIZES, **HEADS, "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "DeepseekV2": {**DEEPSEEK, "moe_intermediate_size": 16, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {**DEEPSEEK, "moe_intermediate_size": 16},
    "GptOss": {**SIZES, **HEADS, **FEW, "head_dim": 8, "layer_types": ["full_attention"] * 3},
    "GraniteMoe": GRANITE,
    "Mixtral": {**SIZES, **HEADS, **FEW},
    "Olmoe": {**SIZES, **HEADS, **FEW},
    "Qwen3Moe": {**SIZES, **HEADS, **FEW, "head_dim": 8},
    "Llama4": {**SIZES, **HEADS, **FEW, **LLAMA},
    "Dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 64, **DBRX},
    "JetMoe": {**SIZES, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
PATCHED = ("Llama4", "Dbrx", "JetMoe")
TOKENS = torch.arange(18).view(2, 9) * 7 % 61


def made(kind="Qwen3Moe", patched=False):
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Llama4" else f"{kind}Config")(**MODELS[kind])
    torch.manual_seed(0)
    if kind in PATCHED:
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moeblaze")
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros or as what torch.empty found
            parameter.normal_(std=0.2)
    if patched:
        assert len(patch(model).served) == 3
    return model.train()


def step(model, tokens=TOKENS, **more):
    """Logits and every gradient, by name."""
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens, **more)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


def same_bits(got, wanted):
    assert got.keys() == wanted.keys() and len(wanted) > 10
    return [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []


def shifted(ids):
    """Other experts than those of the router, for most tokens."""
    return ids.roll(1, dims=1)


CASES = [(kind, False) for kind in MODELS] + [(kind, True) for kind in PATCHED]


@pytest.mark.filterwarnings("ignore:moeblaze. JetMoeMoA")
@pytest.mark.parametrize(("kind", "patched"), CASES)
def test_own_ids_change_no_bit_and_others_do(kind, patched):
    model = made(kind, patched)
    wanted = step(model)
    with Routing(model) as routes:
        with routes.record() as record:
            assert same_bits(step(model), wanted)
        layers = 2 if "Deepseek" in kind else 3
        assert record.ids.shape[:3] == (2, 9, layers) == (*TOKENS.shape, len(routes.layers))
        assert record.ids.dtype is torch.int32 and len(record.calls) == 1
        with routes.replay(record.ids):
            assert same_bits(step(model), wanted)
        slots = 18 * layers
        assert routes.counts() == {"forced": slots, "differ": 0, "unset": 0}
        with routes.replay(shifted(record.ids).short()), routes.record() as again:
            got = step(model)
        assert torch.equal(again.ids, shifted(record.ids))
        assert not torch.equal(got["logits"], wanted["logits"])
        assert routes.counts()["differ"] > slots / 4
        found = [grad for name, grad in got.items() if "gate.weight" in name or "router" in name]
        assert len(found) >= layers and all(grad.norm() > 0 for grad in found)
    assert same_bits(step(model), wanted)


def test_patched_models_take_ids_as_their_own_code_does():
    for kind in PATCHED:
        results = []
        for patched in (False, True):
            model = made(kind)
            model = model.double()
            if patched:
                patch(model)
            with Routing(model) as routes:
                with routes.record() as record:
                    step(model)
                with routes.replay(shifted(record.ids)):
                    results.append(step(model))
        for name, wanted in results[0].items():
            torch.testing.assert_close(
                results[1][name], wanted, rtol=1e-10, atol=1e-12, msg=f"{kind} {name}"
            )  # float64


def checkpoint_by_transformers(model, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def checkpoint_by_torch(model, reentrant):
    assert not reentrant
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)


def plain_names(grads):
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in grads.items()}


def two_calls(model, routes, ids, order):
    """Two forwards pending before a backward: of their sum, in reverse order, or with another call between."""
    model.zero_grad()
    with routes.replay(ids):
        first, second = (model(input_ids=t, labels=t, use_cache=False).loss for t in (TOKENS, TOKENS + 1))
    if order == "sum":
        (first + second).backward()
    elif order == "reverse":
        second.backward()
        first.backward()
    else:
        first.backward()
        with torch.no_grad():
            model(input_ids=TOKENS)
        model(input_ids=TOKENS)  # without replay, and without a backward
        second.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"first": first.detach(), "second": second.detach(), **plain_names(grads)}


ORDERS = ("sum", "reverse", "between")
WAYS = [(checkpoint_by_transformers, False), (checkpoint_by_transformers, True), (checkpoint_by_torch, False)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "reentrant"), WAYS)
def test_checkpointing_takes_the_ids_of_each_call(way, reentrant, monkeypatch):
    model = made()
    with Routing(model) as routes, routes.record() as record:
        model(TOKENS)
        model(TOKENS + 1)
    ids = shifted(torch.cat(record.calls))
    with Routing(model) as routes:
        wanted = {order: two_calls(model, routes, ids, order) for order in ORDERS}
    own = step(model)
    way(model, reentrant)
    with Routing(model) as routes:
        for order in ORDERS:
            assert same_bits(two_calls(model, routes, ids, order), wanted[order]), order
        assert routes.counts()["forced"] == 3 * 3 * ids[..., 0, 0].numel()
        with routes.record() as again:
            step(model)
        assert len(again.calls) == 1 and torch.equal(again.ids, record.calls[0])
        assert same_bits(plain_names(step(model)), own)  # a step without replay is an ordinary one
        monkeypatch.setattr(routes, "_bound", lambda function, call: function)  # as if the checkpointing were unknown
        for order in ORDERS:
            with pytest.raises(RuntimeError, match="by a checkpointing that is not known"):
                two_calls(model, routes, ids, order)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_whole_model_raises(reentrant):
    model = made()
    whole = lambda x: model(inputs_embeds=x, use_cache=False).logits  # noqa: E731
    with Routing(model) as routes:
        ids = shifted(routes_of(model, routes))
        with routes.replay(ids):
            x = model.get_input_embeddings()(TOKENS)
            out = torch.utils.checkpoint.checkpoint(whole, x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match="by a checkpointing that is not known"):
            out.sum().backward()


def test_what_generate_records():
    """Prompts are padded on the left. The pass of training pads likewise, and computes one token more."""
    model = made().eval()
    prompt, mask = TOKENS[:, :5] + 1, torch.ones(2, 5, dtype=torch.int64)
    mask[0, :2] = 0
    more = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with Routing(model) as routes:
        with routes.record() as record:
            out = model.generate(prompt, attention_mask=mask, max_new_tokens=6, **more)
        assert record.ids.shape == (2, 10, 3, 2) and len(record.calls) == 6
        whole = torch.cat([mask, torch.ones(2, 6, dtype=torch.int64)], 1)
        with routes.replay(record.ids):
            model(out, attention_mask=whole)
        assert routes.counts() == {"forced": 60, "differ": 0, "unset": 6}
        sequences = [record.ids[0, 2:], record.ids[1]]
        assert torch.equal(align(sequences, whole)[:, :10][whole[:, :10] > 0], record.ids[whole[:, :10] > 0])
        assert (align(sequences, whole)[0, :2] == UNSET).all() and (align(sequences, whole)[:, 10] == UNSET).all()
    assert "generate" not in vars(model)


def test_record_calls_a_generate_of_the_instance():
    model, calls = made().eval(), []
    of_class = model.generate
    model.generate = lambda *args, **named: calls.append(args) or of_class(*args, **named)
    own = model.generate
    with Routing(model) as routes, routes.record() as record:
        model.generate(TOKENS[:, :3], max_new_tokens=2, do_sample=False)
    assert len(calls) == 1 and record.ids.shape[:2] == (2, 4) and model.generate is own


def test_generate_of_other_sequences_raises():
    """An option comes as a keyword, in the call's config, or from the model's where these have none."""
    model, prompt = made().eval(), TOKENS[:1, :5]
    config = transformers.GenerationConfig
    others = {"num_beams": 2, "prompt_lookup_num_tokens": 2, "use_cache": False, "guidance_scale": 1.5}
    others |= {"assistant_early_exit": 1, "use_mtp": True}
    with Routing(model) as routes:

        def refuses(name, *args, **named):
            with pytest.raises(ValueError, match=f"record: {name}: expected"), routes.record():
                model.generate(prompt, *args, **named)

        for name, value in others.items():
            given = config(max_new_tokens=2)
            setattr(given, name, value)  # transformers before 5.24 does not know all
            refuses(name, max_new_tokens=2, **{name: value})
            refuses(name, given)
            refuses(name, generation_config=given)
            setattr(model.generation_config, name, value)
            refuses(name, config(max_new_tokens=2))
            delattr(model.generation_config, name)
        refuses("use_cache", max_new_tokens=2, use_cache=None)  # transformers takes it for False
        refuses("assistant_model", None, None, None, None, None, model, max_new_tokens=2)
        if hasattr(model, "generate_batch"):  # transformers from 4.56 on
            refusal = pytest.raises(ValueError, match=r"record: model: expected generate, .* got continuous batching")
            with refusal, routes.record():
                model.generate_batch(inputs=[[3, 4, 5], [6, 7]], generation_config=config(max_new_tokens=2))
        model.generation_config.num_beams = 3
        with routes.record() as record:
            model.generate(prompt, config(max_new_tokens=2, num_beams=1, guidance_scale=1.0))
        assert record.ids.shape == (1, 6, 3, 2)


def test_packed_sequences():
    """Ids of sequences one by one, packed, give the logits of the sequences one by one."""
    packing = "of all T as position_ids may be of packed sequences"
    model = made().eval()
    lengths, parts = (4, 5), (TOKENS[:1, :4], TOKENS[1:, :5])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"input_ids": torch.cat(parts, 1), "position_ids": positions, "use_cache": False}
    with Routing(model) as routes, torch.no_grad():
        wanted, sequences = [], []
        for part in parts:
            with routes.record() as record:
                model(part)
            with routes.replay(shifted(record.ids)):
                wanted.append(model(part).logits)
            sequences.append(shifted(record.ids)[0])
        ids = align(sequences, lengths=lengths)
        with routes.replay(ids):
            got = model(**packed).logits
        torch.testing.assert_close(got, torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)  # float32, other sums
        with (
            pytest.raises(ValueError, match=re.escape(f"rows for a call of (B, T) = (1, 9), {packing}, got (1, 8)")),
            routes.replay(ids[:, :8]),
        ):
            model(**packed)


def test_unset_ids_are_the_routers_own():
    model = made("DeepseekV2")
    wanted = step(model)
    with Routing(model) as routes:
        with routes.record() as record:
            step(model)
        ids = record.ids.clone()
        ids[0, 3:] = UNSET
        with routes.replay(ids):
            assert same_bits(step(model), wanted)
        assert routes.counts() == {"forced": 24, "differ": 0, "unset": 12}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda ids: ids[:, :, :2], ValueError, r"expected shape \(N, T, 3 layers, k\), got \(2, 9, 2, 2\)"),
        (lambda ids: ids[0], ValueError, r"expected shape \(N, T, 3 layers, k\)"),
        (lambda ids: ids.float(), TypeError, "a tensor of integers, got torch.float32"),
        (lambda ids: ids.numpy(), TypeError, "a tensor of integers, got <class 'numpy.ndarray'>"),
        (lambda ids: ids[:, :6], ValueError, r"\(B, T\) = \(2, 9\), got \(2, 6\) at row 0 of \(2, 6, 3, 2\)"),
        (lambda ids: ids[:1], ValueError, r"\(B, T\) = \(2, 9\), got \(1, 9\)"),
        (lambda ids: torch.cat([ids, ids]), ValueError, "4 sequences in all, as ids has rows, got 2"),
        (
            lambda ids: torch.cat([ids, ids[..., :1] * 0 + 3], -1),
            ValueError,
            "k = 2 experts for a token at layers.0.mlp.gate, got k = 3",
        ),
        (lambda ids: ids + 7, ValueError, "ids below 8 at layers.0.mlp.gate, got 14"),
        (lambda ids: ids - 9, ValueError, "experts from 0, or -1 for unset"),
        (lambda ids: ids * 0, ValueError, "an expert twice for one token"),
        (
            lambda ids: torch.cat([ids[..., :1] * 0, ids[..., 1:] * 0 - 1], -1),
            ValueError,
            "all k ids of a token, or none",
        ),
    ],
)
def test_ids_that_do_not_fit_raise(change, error, message):
    model = made()
    ids = torch.tensor([0, 7]).expand(2, 9, 3, 2)
    with Routing(model) as routes:
        with pytest.raises(error, match=message), routes.replay(change(ids)):
            model(TOKENS)
        with routes.replay(ids):  # the error has left nothing behind
            model(TOKENS)


def test_ids_are_validated_as_asked():
    model, twice = made(), torch.zeros(2, 9, 3, 2, dtype=torch.int64)
    with Routing(model) as routes:
        with routes.replay(twice, validate=False):
            model(TOKENS)
        assert routes.counts()["forced"] == 54
        with pytest.raises(ValueError, match="an expert twice for one token"), routes.replay(twice, validate=True):
            model(TOKENS)


def test_layers_that_run_several_times_in_a_call_raise():
    """Ids have one place for each router. The error leaves nothing behind, and other calls run as they are."""
    model = made()
    with Routing(model) as routes:
        ids = routes_of(model, routes)
        layers, model.model.layers = model.model.layers, torch.nn.ModuleList([*model.model.layers][:2] * 2)
        model.config.num_hidden_layers = 4
        message = "Routing: model: expected routers that run once in a call, as ids have one place for each, got"
        wanted = model(TOKENS, use_cache=False).logits
        with pytest.raises(ValueError, match=message), routes.record():
            model(TOKENS, use_cache=False)
        with pytest.raises(ValueError, match=message), routes.replay(ids):
            model(TOKENS, use_cache=False)
        assert torch.equal(model(TOKENS, use_cache=False).logits, wanted)
        model.model.layers, model.config.num_hidden_layers = layers, 3
        with routes.replay(ids):
            model(TOKENS)


def test_a_model_that_changes_after_routing_raises():
    """Also where one router of several does, as adapters of peft have it trained in a copy."""
    model = made()
    with Routing(model) as routes:
        ids = routes_of(model, routes)
        for layers, number, first in ((model.model.layers[1:2], 1, 1), (model.model.layers[::2], 3, 0)):
            for layer in layers:
                layer.mlp.gate = copy.deepcopy(layer.mlp.gate)
            expected = rf"expected all 3 routers to take part, got {number} that did not \(layers\.{first}"
            with pytest.raises(RuntimeError, match=f"replay: {expected}"), routes.replay(ids):
                model(TOKENS)
            if number < 3:
                with pytest.raises(RuntimeError, match=f"record: {expected}"), routes.record():
                    model(TOKENS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_takes_a_routing_of_its_own(copied):
    """It computes as the model, whose Routing does not see it."""
    model = made()
    with Routing(model) as routes:
        ids = routes_of(model, routes)
        other = copied(model)
        with Routing(other) as of_copy, routes.record() as record:
            assert torch.equal(routes_of(other, of_copy), ids)
        assert record.calls == []
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def test_models_that_do_not_fit_raise():
    for function, call in (
        ("Routing", Routing),
        ("monitor", monitor),
        ("from_engine", lambda model: from_engine(model, tokens=1)),
    ):
        expected = "a transformers model with experts, got a Linear"
        with pytest.raises(ValueError, match=f"^{function}: model: expected {expected}"):
            call(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match=f"^{function}: model: expected a torch.nn.Module, got 'a path'"):
            call("a path")
    model = made()
    with Routing(model) as routes:
        with pytest.raises(ValueError, match="one without a Routing"):
            Routing(model)
        with routes.record() as record, pytest.raises(RuntimeError, match="one at a time"), routes.record():
            pass
        with pytest.raises(RuntimeError, match="expected a recorded call, got none"):
            record.ids  # noqa: B018
        with routes.record() as record:
            model(TOKENS)
            model(TOKENS[:1])
        with pytest.raises(ValueError, match=r"calls of one batch, got \[2, 1\]"):
            record.ids  # noqa: B018
    config = transformers.PhimoeConfig(**SIZES, **HEADS, num_local_experts=4)
    with pytest.raises(NotImplementedError, match="PhimoeTopKRouter: it has no top-k"):
        Routing(transformers.PhimoeForCausalLM(config))


def test_a_call_that_raised_may_come_again():
    """Neither a record nor a replay has it."""
    model = made()
    with Routing(model) as routes:

        def fail(*_):
            raise MemoryError

        def call_twice():
            hook = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                model(TOKENS)
            hook.remove()
            return model(TOKENS).logits

        with routes.record() as record:
            call_twice()
        assert record.ids.shape[:2] == TOKENS.shape
        with routes.replay(shifted(record.ids)):
            got = call_twice()
        tokens = TOKENS.numel() * len(routes.layers)
        assert routes.counts()["forced"] == tokens
        with routes.replay(shifted(record.ids)):
            assert torch.equal(got, model(TOKENS).logits)


def test_a_router_that_draws_is_refused_where_peft_trains_it():
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = transformers.PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = transformers.PhimoeForCausalLM(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["router"]))
    with pytest.raises(NotImplementedError, match="Routing: PhimoeTopKRouter: it has no top-k"):
        Routing(adapted)


def test_a_copy_of_the_model_is_apart():
    model = made()
    with Routing(model) as routes:
        other = copy.deepcopy(model)
        wanted = step(other)
        with Routing(other) as others, routes.record() as record, others.record() as theirs:
            assert same_bits(step(model), wanted)
            other(TOKENS + 1)
        assert torch.equal(record.calls[0], routes_of(model, routes)) and not torch.equal(record.ids, theirs.ids)
        assert len(record.calls) == len(theirs.calls) == 1


def wrap(module):
    """As `add_hook_to_module` of accelerate."""
    old = module.forward
    run = functools.partial(lambda module, *args, **named: module.old_forward(*args, **named), module)
    module.old_forward, module.forward = old, functools.update_wrapper(run, old)


def gates(model):
    return [layer.mlp.gate for layer in model.model.layers]


def test_close_is_for_one_routing_and_may_come_again():
    model = made()
    with Routing(model) as first:
        first.close()
    plain = [set(vars(gate)) for gate in gates(model)]
    assert "moeblaze_routing" not in plain[0] and "forward" not in plain[0]
    with Routing(model) as second:
        first.close()
        assert routes_of(model, second).shape == (2, 9, 3, 2)
    with Routing(model):
        for gate in gates(model):
            del gate.forward
    assert [set(vars(gate)) for gate in gates(model)] == plain


def test_a_router_that_was_wrapped_meanwhile_works_after_close():
    model = made()
    wanted = step(model)
    with Routing(model) as routes:
        ids = routes_of(model, routes)
        for gate in gates(model):
            wrap(gate)
        assert torch.equal(routes_of(model, routes), ids)
    for unwrapped in (False, True):
        for gate in gates(model) if unwrapped else ():
            gate.forward = gate.old_forward
        assert same_bits(step(model), wanted)
        for each in (model, copy.deepcopy(model)):
            with Routing(each) as routes:
                with routes.replay(ids):
                    assert same_bits(step(each), wanted)
                with routes.replay(shifted(ids)):
                    assert not same_bits(step(each), wanted)
                assert torch.equal(routes_of(each, routes), ids)
            assert same_bits(step(each), wanted)
    assert not any("forward" in vars(gate) for gate in gates(model))


def test_a_copy_of_a_router_that_was_wrapped_before_has_its_own_weights():
    model = made()
    wanted = step(model)
    for gate in gates(model):
        wrap(gate)
    with Routing(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for gate in gates(model):
                gate.weight.normal_()
        assert same_bits(step(other), wanted)
        with Routing(other) as routes, routes.replay(routes_of(other, routes)):
            assert same_bits(step(other), wanted)


@pytest.mark.filterwarnings("ignore")
def test_backward_of_a_replay_after_close_raises():
    model = made()
    model.gradient_checkpointing_enable()
    with Routing(model) as routes, routes.replay(routes_of(model, routes)):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with pytest.raises(RuntimeError, match=r"Routing.close: expected it after backward"):
        loss.backward()


def routes_of(model, routes):
    with routes.record() as record, torch.no_grad():
        model(TOKENS)
    return record.ids


def test_arrays_of_engines():
    """One array of n - 1 rows, two that follow one another, all hidden layers, and bytes are the same ids."""
    model = made("DeepseekV3")
    with Routing(model) as routes:
        ids = routes_of(model, routes)[0].numpy()
    n, k = 9, ids.shape[2]
    of_all = np.zeros((n, 3, k), np.int32)
    of_all[:, 1:] = ids  # the first layer has no experts
    for parts in ([ids], [ids[:4], ids[4:]], [ids.astype(np.int16)], [of_all], [of_all.astype(np.uint8)]):
        assert torch.equal(from_engine(model, *parts, tokens=n), torch.from_numpy(ids))
    short = from_engine(model, of_all[:-1].astype(np.uint16), tokens=n)
    assert torch.equal(short[:-1], torch.from_numpy(ids[:-1])) and (short[-1] == UNSET).all()
    for parts, message in (
        ([ids[:-2]], "9 rows in all or one less, got 7"),
        ([ids[:, :1]], "2 or 3 layers, got 1"),
        ([ids[0]], "arrays"),
    ):
        with pytest.raises(ValueError, match=f"from_engine: parts: expected {message}"):
            from_engine(model, *parts, tokens=n)


def test_sequences_that_do_not_fit_their_mask_raise():
    rows, mask = torch.zeros(3, 2, 2, dtype=torch.int32), torch.ones(1, 5)
    with pytest.raises(ValueError, match="5 rows or one less for sequence 0, got 3"):
        align([rows], mask)
    with pytest.raises(ValueError, match="1 of them, got 2"):
        align([rows, rows], mask)
    for parts, shapes in (([], "[]"), ([rows, rows[:, :, :1]], "[(3, 2, 2), (3, 2, 1)]"), ([rows[0]], "[(2, 2)]")):
        expected = f"align: sequences: expected arrays (n, layers, k) with the same layers and k, got {shapes}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            align(parts, lengths=[len(part) for part in parts])
    with pytest.raises(ValueError, match="mask or lengths, got both"):
        align([rows], mask, lengths=[3])
    for parts, of_batch, message in (
        ([rows.float()], {"lengths": [3]}, "sequences: expected arrays of integers, got torch.float32"),
        ("abc", {"lengths": [1, 1, 1]}, "sequences: expected arrays (rows, layers, k) of integers, got 'a'"),
        ([rows], {"mask": [[1, 1, 1]]}, "mask: expected a tensor (B, T), got <class 'list'>"),
        ([rows], {"mask": torch.ones(3)}, "mask: expected a tensor (B, T), got (3,)"),
        ([rows], {"lengths": [-3]}, "lengths: expected numbers from 0, got [-3]"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^align: {re.escape(message)}$"):
            align(parts, **of_batch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend):
    """A graph ends at each router while the routing is at work, and nowhere else."""
    torch._dynamo.reset()
    model = made()
    wanted, compiled = step(model), torch.compile(model, backend=backend)
    run = lambda: {"loss": step_compiled(compiled), **{n: p.grad.clone() for n, p in model.named_parameters()}}  # noqa: E731

    def check(got, wanted):
        for name in wanted.keys() - {"logits"}:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)  # float32, other sums

    def step_compiled(compiled):
        model.zero_grad()
        loss = compiled(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return loss.detach()

    check(run(), wanted)
    with Routing(model) as routes:
        with routes.record() as record:
            check(run(), wanted)
        with routes.replay(record.ids):
            check(run(), wanted)
        ids = record.ids.clone()
        ids[0, :4] = UNSET
        with routes.replay(ids):
            check(run(), wanted)
        assert routes.counts() == {"forced": 54 + 42, "differ": 0, "unset": 12}
        with routes.replay(shifted(record.ids)):
            others = step(model)
        with routes.replay(shifted(record.ids)):
            check(run(), others)
        check(run(), wanted)
        torch._dynamo.reset()
        whole = torch.compile(model, backend=backend, fullgraph=True)
        step_compiled(whole)
        with pytest.raises(torch._dynamo.exc.Unsupported), routes.record():
            whole(TOKENS)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_with_checkpointing_after_a_replay(backend):
    """Backward knows that what it computes again was not replayed."""
    torch._dynamo.reset()
    model = made()
    wanted = step(model)
    model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend=backend)
    with Routing(model) as routes:
        with torch.no_grad(), routes.record() as record:
            model(TOKENS)
        with routes.replay(record.ids):
            step(model)
        model.zero_grad()
        compiled(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5, msg=name)  # float32, other sums
    torch._dynamo.reset()


@contextlib.contextmanager
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_wrappers_of_torch_distributed(kind, checkpointing, tmp_path):
    if kind == "FSDP2" and NO_SHARDING_ON_THE_CPU:
        pytest.skip(NO_SHARDING_ON_THE_CPU)
    from torch.distributed.fsdp import fully_shard

    model = made()
    with Routing(model) as routes:
        ids = shifted(routes_of(model, routes))
        with routes.replay(ids):
            wanted = step(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with one_process(tmp_path):
        if kind == "FSDP2":
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        else:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with Routing(wrapped) as routes, routes.replay(ids):
            got = step(wrapped)
        got = {
            name.removeprefix("module."): getattr(grad, "full_tensor", lambda g=grad: g)() for name, grad in got.items()
        }
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)  # float32, other orders of sums


ADAPTED = {
    "adapter of the router": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]},
    "router that trains": {"target_parameters": ["mlp.experts.gate_up_proj"], "modules_to_save": ["gate"]},
}


@pytest.mark.parametrize("where", ADAPTED)
def test_adapters_of_peft_are_left_as_they_are(where):
    peft = pytest.importorskip("peft")
    model = made()
    targets = {"target_modules": ["q_proj"], **ADAPTED[where]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    wanted, before = step(adapted), str(adapted)
    with Routing(adapted) as routes:
        assert len(routes.layers) == 3
        with routes.record() as record:
            assert same_bits(step(adapted), wanted)
        with routes.replay(record.ids):
            assert same_bits(step(adapted), wanted)
        with routes.replay(shifted(record.ids)):
            others = step(adapted)
        assert not same_bits(others, wanted) and str(adapted) == before
        found = [grad for name, grad in others.items() if "mlp.gate." in name and ".lora_A" not in name]
        assert len(found) == 3 and all(grad.norm() > 0 for grad in found)
