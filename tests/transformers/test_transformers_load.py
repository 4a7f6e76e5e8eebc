"""What `monitor` counts, beside the ids that `Routing` records and the logits that routers return."""

import copy
import gc
import math
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from moeblaze_cupy.interop.transformers import Routing, load, monitor  # noqa: E402
from tests.torch_versions import needs_models_that_compile  # noqa: E402
from tests.transformers.test_transformers_routing import MODELS, TOKENS, made, one_process, step  # noqa: E402

MASK = torch.ones(2, 9, dtype=torch.int64)
MASK[0, :3] = 0
KINDS = {"Qwen3Moe": 8, "DeepseekV3": 16, "GptOss": 8, "Llama4": 8, "Gemma4": 8}


def model_of(kind):
    if kind != "Gemma4":
        return made(kind)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 8}
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
    small = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, **heads, **experts, **small)).train()


def expected(model, kind, mask=MASK):
    """Counts (layers, E) int64, mean entropies over log E and largest logits, in float64."""
    logits, handles = [], []
    with Routing(model) as routes, routes.record() as record:
        for name in routes.layers:
            router = next(part for path, part in model.named_modules() if path.endswith(name))
            place = 1 if kind == "Llama4" else 0
            handles.append(
                router.register_forward_hook(lambda _, args, out, place=place: logits.append(out[place].detach()))
            )
        model(TOKENS, attention_mask=mask)
    for handle in handles:
        handle.remove()
    kept = mask.bool()
    ids = record.ids[kept]  # (tokens, layers, k)
    counts = [torch.bincount(ids[:, layer].flatten(), minlength=KINDS[kind]) for layer in range(ids.shape[1])]
    rows = [layer.double()[kept.flatten()] for layer in logits]
    shares = [layer if kind == "Gemma4" else layer.softmax(1) for layer in rows]
    entropies = [-(p * p.log()).sum(1).mean() / math.log(KINDS[kind]) for p in shares]
    return torch.stack(counts), torch.stack(entropies), torch.stack([layer.abs().max() for layer in rows])


def check(load, wanted, calls=1):
    counts, entropies, largest = wanted
    assert torch.equal(load.counts, counts * calls)
    assert load.tokens.tolist() == [15 * calls] * len(counts)
    torch.testing.assert_close(load.entropy, entropies, rtol=1e-5, atol=1e-6)  # sums of float32
    if load.max_logit is not None:
        torch.testing.assert_close(load.max_logit, largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_each_expert(kind):
    model = model_of(kind)
    wanted = expected(model, kind)
    before = step(model, attention_mask=MASK)
    seen = monitor(model)
    after = step(model, attention_mask=MASK)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    check(seen.read(reset=False), wanted)
    step(model, attention_mask=MASK)
    check(seen.read(), wanted, calls=2)
    with torch.no_grad():
        model(TOKENS)
    model.eval()(TOKENS)
    load = seen.read()
    assert not load.counts.any() and not load.tokens.any() and load.summary() == {}
    seen.close()
    step(model.train())
    assert not seen.read().counts.any()


def test_routers_whose_weights_have_no_shape_yet():
    """DeepSpeed's ZeRO-3 and FSDP1 leave parameters empty outside of forward."""
    model = made()
    wanted, weights = expected(model, "Qwen3Moe"), {}
    for number, layer in enumerate(model.model.layers):
        weights[number], layer.mlp.gate.weight.data = layer.mlp.gate.weight.data, torch.empty(0)
    seen = monitor(model)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.weight.data = weights[number]
    step(model, attention_mask=MASK)
    check(seen.read(), wanted)


def test_summary():
    model = made()
    counts, entropies, largest = expected(model, "Qwen3Moe")
    seen = monitor(model)
    step(model, attention_mask=MASK)
    share = counts / counts.sum(1, keepdim=True)
    effective = [math.exp(-sum(p * math.log(p) for p in layer if p > 0)) / 8 for layer in share.tolist()]
    assert seen.read().summary() == pytest.approx(
        {
            "moe/max_violation": share.max().item() * 8 - 1,
            "moe/effective_experts": sum(effective) / 3,
            "moe/without_tokens": (counts == 0).sum().item(),
            "moe/router_entropy": entropies.mean().item(),
            "moe/least_router_entropy": entropies.min().item(),
            "moe/max_logit": largest.max().item(),
            "moe/tokens": 15,
        },
        rel=1e-5,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("replays", [False, True])
def test_checkpointing_does_not_count_twice(reentrant, replays):
    model = made()
    wanted = expected(model, "Qwen3Moe")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    seen = monitor(model)
    if not replays:
        step(model, attention_mask=MASK)
        check(seen.read(), wanted)
        return
    with Routing(model) as routes:
        with routes.record() as record:
            step(model, attention_mask=MASK)
        check(seen.read(), wanted)
        ids = record.ids.roll(1, 1)
        with routes.replay(ids):
            step(model, attention_mask=MASK)
    counts = [torch.bincount(ids[:, :, layer][MASK.bool()].flatten(), minlength=8) for layer in range(3)]
    assert torch.equal(seen.read().counts, torch.stack(counts))  # of the ids that were replayed


@needs_models_that_compile
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("part", ["model", "layers", "second layer"])
def test_compiled_models(part, checkpointing):
    model = made()
    wanted = expected(model, "Qwen3Moe")
    if checkpointing:
        model.gradient_checkpointing_enable()
    breaks = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        seen = monitor(model)
        compiled = model
        if part == "model":
            compiled = torch.compile(model, backend="aot_eager")
        else:
            for layer in model.model.layers[1:2] if part == "second layer" else model.model.layers:
                layer.compile(backend="aot_eager")
        if not watched:
            seen.close()
        for calls in (1, 2):
            compiled(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS).loss.backward()
            if watched:
                check(seen.read(reset=False), wanted, calls)
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    assert breaks[0] == breaks[1]
    seen.close()
    seen.close()
    compiled(input_ids=TOKENS, attention_mask=MASK, labels=TOKENS).loss.backward()
    check(seen.read(), wanted, 2)  # those before close
    assert seen.read().tokens.tolist() == [0, 0, 0]
    assert not any("moeblaze_load" in name for part in model.modules() for name in vars(part))
    torch._dynamo.reset()


@needs_models_that_compile
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_share_their_code():
    """Dynamo compiles a function at most 8 times, and runs further layers without."""
    sizes = MODELS["Qwen3Moe"] | {"num_hidden_layers": 10}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).train()
    model.set_experts_implementation("batched_mm")
    seen = monitor(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model(TOKENS, use_cache=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert seen.read().tokens.tolist() == [18] * 10
    torch._dynamo.reset()


def test_a_router_whose_last_matrix_has_no_row_for_each_expert():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**sizes, **heads, **experts)).train()
    with Routing(model) as routes, routes.record() as record:
        model(TOKENS)
    seen = monitor(model)
    model(TOKENS)
    counts = [torch.bincount(record.ids[:, :, layer].flatten(), minlength=8) for layer in range(2)]
    assert torch.equal(seen.read().counts, torch.stack(counts))


def test_numbered_sequences_of_a_packed_batch_are_tokens():
    model = made()
    wanted = expected(model, "Qwen3Moe")
    numbered = MASK * torch.tensor([[2], [3]])
    seen = monitor(model)
    hook = model.model.register_forward_pre_hook(
        lambda _, args, named: (args, {**named, "attention_mask": MASK}), with_kwargs=True
    )
    model(TOKENS, attention_mask=numbered)
    hook.remove()
    check(seen.read(), wanted)


def test_closed_in_a_forward_and_copied():
    model = made()
    seen = monitor(model)
    copied = copy.deepcopy(model)
    step(copied)
    assert not seen.read().tokens.any()
    hook = model.model.norm.register_forward_pre_hook(lambda *_: seen.close())
    step(model)
    hook.remove()
    assert not seen._kept and not seen.read().tokens.any()


def test_a_copy_that_runs_within_a_call_is_not_counted():
    model = model_of("Qwen3Moe")
    wanted = expected(model, "Qwen3Moe")
    seen = monitor(model)
    copied = copy.deepcopy(model)
    hook = model.model.layers[0].register_forward_hook(lambda *_: step(copied) and None)
    step(model, attention_mask=MASK)
    hook.remove()
    check(seen.read(), wanted)
    copied.model.layers[0].register_forward_hook(lambda *_: step(model, attention_mask=MASK) and None)
    step(copied)
    check(seen.read(), wanted)


class Operations(TorchDispatchMode):
    """Lists the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_a_pickled_model_has_a_monitor_of_its_own():
    model = model_of("Qwen3Moe")
    seen = monitor(model)
    again = pickle.loads(pickle.dumps(model))
    step(again, attention_mask=MASK)
    assert not seen.read().tokens.any()
    wanted = expected(model, "Qwen3Moe")
    step(model, attention_mask=MASK)
    check(seen.read(), wanted, calls=2)  # one is that of `expected`


@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_routers_that_peft_trains_whole(kind, comes_first):
    """peft copies each, and calls the copy: it is counted as its layer, and brings no copy of the model."""
    peft = pytest.importorskip("peft")
    model = model_of(kind)
    wanted = expected(model, kind)
    router = "router" if kind in ("GptOss", "Llama4", "Gemma4") else "gate"
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "q_a_proj"], modules_to_save=[router])
    seen = monitor(model) if comes_first else None

    def models():
        gc.collect()
        return sum(type(found) is type(model) for found in gc.get_objects())

    before = models()
    adapted = peft.get_peft_model(model, config)
    assert models() == before
    seen = seen or monitor(adapted)
    step(adapted, attention_mask=MASK)
    check(seen.read(), wanted)
    seen.close()
    step(adapted, attention_mask=MASK)
    assert not seen.read().tokens.any()
    assert not [name for module in adapted.modules() for name in vars(module) if "moeblaze_load" in name]


def operations(model):
    with Operations() as seen:
        step(model, attention_mask=MASK)
    return seen.names


def test_layers_are_counted_together():
    """The host bounds an eager step of few tokens, so each operation costs time there, whatever its size."""
    added = []
    for layers in (4, 8):
        sizes = MODELS["Qwen3Moe"] | {"num_hidden_layers": layers}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).train()
        before = len(operations(model))
        monitor(model)
        added.append(len(operations(model)) - before)
    assert added[0] == added[1] <= 30  # 21 with torch 2.13, and about 20 more for each layer that is counted alone


@pytest.mark.parametrize(("of_layers", "groups"), [(0, 3), (1.5, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Llama4"])
def test_layers_that_hold_much_memory_do_not_wait(kind, of_layers, groups, monkeypatch):
    model = made(kind)
    wanted, seen = expected(model, kind), monitor(model)
    ids = 4 * 8 if kind == "Llama4" else 8 * 2  # bytes of a token: scores in float32, or ids in int64
    monkeypatch.setattr(load, "_BYTES", int(of_layers * TOKENS.numel() * (4 * 8 + ids)))
    assert operations(model).count("linalg_vector_norm") == groups
    check(seen.read(), wanted)


def test_a_mask_by_place_leaves_padding_out():
    model = made()
    wanted, seen = expected(model, "Qwen3Moe"), monitor(model)
    model.model(TOKENS, MASK)
    check(seen.read(), wanted)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_is_not_counted(error, monkeypatch):
    """Hooks of torch see no KeyboardInterrupt, so the next forward drops what that one left."""
    model = made()
    wanted, seen = expected(model, "Qwen3Moe"), monitor(model)

    def fail(*_):
        assert len(seen._kept) == 3
        raise error

    with monkeypatch.context() as patches, pytest.raises(error):
        patches.setattr(model.model.norm, "forward", fail)
        step(model, attention_mask=MASK)
    assert error is KeyboardInterrupt or not seen._kept
    assert not seen.read(reset=False).tokens.any()
    step(model, attention_mask=MASK)
    check(seen.read(), wanted)


@pytest.mark.gpu
def test_a_model_that_moves_and_a_captured_step():
    model = made()
    wanted, seen = expected(model, "Qwen3Moe", torch.ones_like(MASK)), monitor(model)
    step(model)
    model.cuda().set_experts_implementation("batched_mm")  # eager experts wait for the GPU
    tokens, graph, stream = TOKENS.cuda(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    load = seen.read()
    assert torch.equal(load.counts, 2 * wanted[0]) and load.tokens.tolist() == [36] * 3
    with torch.cuda.graph(graph):
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    assert not seen.read(reset=False).tokens.any()
    for _ in range(3):
        graph.replay()
    load = seen.read()
    assert torch.equal(load.counts, 3 * wanted[0]) and load.tokens.tolist() == [54] * 3
    torch.testing.assert_close(load.entropy, wanted[1], rtol=1e-5, atol=1e-6)  # sums of float32


def test_trainer_logs_it(tmp_path):
    pytest.importorskip("accelerate")
    model = made()
    seen = monitor(model)

    class Trainer(transformers.Trainer):
        def log(self, logs, *args, **named):
            super().log({**logs, **seen.read().summary()}, *args, **named)

    options = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "use_cpu": True}
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = Trainer(model, transformers.TrainingArguments(str(tmp_path), **options), train_dataset=rows)
    trainer.train()
    steps = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert [logs["moe/tokens"] for logs in steps] == [18, 18]


def test_ranks_are_summed(tmp_path):
    model = made()
    wanted = expected(model, "Qwen3Moe")
    seen = monitor(model)
    step(model, attention_mask=MASK)
    with one_process(tmp_path):
        check(seen.read(group=torch.distributed.group.WORLD), wanted)


@pytest.mark.parametrize("kind", ["Dbrx", "JetMoe"])
def test_routers_without_logits_and_ids_raise(kind):
    with pytest.raises(ValueError, match="monitor: model: expected routers that return logits and ids, got"):
        monitor(made(kind))
