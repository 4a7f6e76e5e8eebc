"""Adapters on experts in transformers' Trainer and in TRL's, beside eager experts, which compute with W + BA."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="needs transformers 5 or later")
pytest.importorskip("accelerate")
pytest.importorskip("peft", minversion="0.20", reason="peft 0.19 cannot load adapters of this kind")
import peft
import torch
import transformers
from test_transformers import Rows, tiny

from moeblaze_cupy.interop.transformers import Routing, align, monitor
from moeblaze_cupy.interop.transformers import experts as layers
from tests.environment import ROOT

NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Numbers are float64, so that what AdamW divides by, which may be small, changes none of 9 digits.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture
def calls(monkeypatch):
    """ids and `lora` of every call of the layer."""
    seen = []

    def spying(x, ids, *others, real=layers.moe, **options):
        seen.append((ids, options.get("lora")))
        return real(x, ids, *others, **options)

    monkeypatch.setattr(layers, "moe", spying)
    return seen


def adapted(implementation):
    model = tiny("qwen3_moe", implementation).double()
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=NAMES, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def factors_of(model):
    found = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert len(found) == 8 and all(".lora_" in name for name in found)  # two layers, two weights, A and B
    return found


def arguments_of(kind, folder, **options):
    common = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False}
    return kind(output_dir=str(folder), **(common | quiet | options))


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_saves_and_resumes(checkpointing, calls, tmp_path):
    """Losses and factors of three steps, the same after a resumption of the second, and adapters that eager loads."""
    ended = {}
    for implementation in ("eager", "moeblaze"):
        saved = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": checkpointing}
        arguments = arguments_of(transformers.TrainingArguments, tmp_path / implementation, **saved)
        trainer = transformers.Trainer(adapted(implementation), arguments, train_dataset=Rows())
        trainer.train()
        ended[implementation] = losses_of(trainer), factors_of(trainer.model)
    (wanted_losses, wanted), (losses, got) = ended.values()
    assert len(calls) == 3 * 2 * (2 if checkpointing else 1) and all(lora is not None for _, lora in calls)
    assert losses == pytest.approx(wanted_losses, rel=1e-9) and len(losses) == 3
    torch.testing.assert_close(got, wanted, **CLOSE)
    start = factors_of(adapted("eager"))
    assert all((factor - start[name]).abs().max() > 1e-2 for name, factor in got.items())

    again = transformers.Trainer(adapted("moeblaze"), arguments, train_dataset=Rows())
    again.train(resume_from_checkpoint=str(tmp_path / "moeblaze" / "checkpoint-2"))
    resumed = factors_of(again.model)
    assert all(torch.equal(resumed[name], factor) for name, factor in got.items())
    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(tiny("qwen3_moe", "eager").double(), tmp_path / "saved")
    rows = torch.stack([Rows()[i]["input_ids"] for i in range(2)])
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows).logits, trainer.model(rows).logits, **CLOSE)


@pytest.fixture
def trl():
    return pytest.importorskip("trl", minversion="1.16", reason="needs TRL 1.16")


def tokenizer():
    """One token for each of 62 words, beside the two that the vocabulary of `tiny` has for padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[EOS]": 1} | {f"w{number}": number for number in range(2, 64)}
    made = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def dataset(name, words):
    """Eight rows of 3 to `words` words."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, words + 1, (8,), generator=generator).tolist()
    rows = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_list([{name: " ".join(f"w{word}" for word in row)} for row in rows])


def rewards(completion_ids, **_):
    """Between 0 and 1, of every second word."""
    return [sum(ids[::2]) / 64 / len(ids[::2]) for ids in completion_ids]


def grpo(trl, kind, implementation, folder, **options):
    """A trainer whose batches are two prompts with two completions each, used for two steps."""
    sizes = {"num_generations": 2, "max_completion_length": 6, "num_iterations": 2, "beta": 0.1}
    sizes |= {"per_device_train_batch_size": 4, "max_steps": 4}
    arguments = arguments_of(trl.GRPOConfig, folder, **(sizes | options))
    model = adapted(implementation)
    return kind(model, rewards, args=arguments, train_dataset=dataset("prompt", 6), processing_class=tokenizer())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_of_trl(checkpointing, trl, calls, tmp_path):
    ended = []
    for implementation in ("eager", "moeblaze"):
        arguments = arguments_of(trl.SFTConfig, tmp_path, gradient_checkpointing=checkpointing, max_length=16)
        rows = dataset("text", 12)
        trainer = trl.SFTTrainer(adapted(implementation), arguments, train_dataset=rows, processing_class=tokenizer())
        trainer.train()
        ended.append((losses_of(trainer), factors_of(trainer.model)))
    (wanted_losses, wanted), (losses, got) = ended
    assert calls and all(lora is not None for _, lora in calls)
    assert losses == pytest.approx(wanted_losses, rel=1e-9) and len(losses) == 3
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_grpo_of_trl(checkpointing, trl, calls, tmp_path):
    """Losses, distances from the reference model, sampled tokens, rewards and factors of four steps."""
    ended = []
    for implementation in ("eager", "moeblaze"):
        trainer = grpo(trl, trl.GRPOTrainer, implementation, tmp_path, gradient_checkpointing=checkpointing)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        names = ("loss", "kl", "grad_norm", "num_tokens", "reward")  # the last two once for each batch of completions
        ended.append(([entry[name] for entry in entries for name in names if name in entry], factors_of(trainer.model)))
    (wanted_numbers, wanted), (numbers, got) = ended
    assert calls and all(lora is not None for _, lora in calls)  # TRL's reference model is another adapter
    assert numbers == pytest.approx(wanted_numbers, rel=1e-6) and len(numbers) == 4 * 3 + 2 * 2 and numbers[6] > 0
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_grpo_of_trl_replays_routing(trl, calls, tmp_path):
    """By the trainer of docs/replay.md: both steps of a batch compute with the experts that chose in generation."""
    block = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "replay.md").read_text(), re.DOTALL)[0]
    exec(block, names := {"torch": torch, "align": align, "GRPOTrainer": trl.GRPOTrainer})
    has_ids = []

    class Checked(names["ReplayTrainer"]):
        def _compute_loss(self, model, inputs):
            before = len(calls)
            loss = super()._compute_loss(model, inputs)
            used = torch.stack([ids for ids, _ in calls[before:]], 1).view(self.ids.shape)
            has_ids.append(self.ids >= 0)
            assert torch.equal(used[has_ids[-1]], self.ids[has_ids[-1]].long())
            tokens = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).sum(1)
            assert torch.equal(has_ids[-1][:, :, 0, 0].sum(1), tokens - 1)  # the last one was sampled, not computed
            return loss

    trainer = grpo(trl, Checked, "moeblaze", tmp_path)
    trainer.routing, loads = Routing(trainer.model), monitor(trainer.model)
    trainer.train()
    counts = trainer.routing.counts()
    assert len(has_ids) == 4 and 0 < counts["differ"] < counts["forced"] / 10  # a step moves few tokens
    tokens = sum(mask[:, :, 0, 0].sum() + len(mask) for mask in has_ids)
    assert loads.read().tokens.tolist() == [tokens, tokens]
