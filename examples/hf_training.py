"""A small Qwen3-MoE of transformers, trained on bytes with this package's experts.

python examples/hf_training.py                     a bare loop with AdamW
python examples/hf_training.py --how trainer       transformers' Trainer
python examples/hf_training.py --lora              LoRA on the experts' weights, the rest frozen, in either way

Needs transformers; Trainer needs accelerate (pip install accelerate), LoRA needs peft (pip install peft). To train a
checkpoint, make the model by AutoModelForCausalLM.from_pretrained(path, experts_implementation="moeblaze").
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

import transformers  # noqa: E402

import moeblaze_cupy.interop.transformers  # noqa: E402, F401  # registers "moeblaze"
from moeblaze_cupy.tools.command import integer  # noqa: E402

B, T = 8, 64  # sequences of a step, bytes of a sequence


def small_model(experts_implementation: str = "moeblaze") -> torch.nn.Module:
    """A byte-level Qwen3-MoE with 8 experts, of which each token takes 2; in bfloat16 on a GPU."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=T, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts_implementation)
    return model.to(device(), torch.bfloat16 if device() == "cuda" else torch.float32)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """Low-rank factors beside the experts' stacked weights, which are parameters and no modules."""
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))


class Windows(torch.utils.data.Dataset):
    """Windows of T bytes of this checkout's pages."""

    def __init__(self):
        text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // T * T].view(-1, T)
        self.windows = self.windows[torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(0))]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


def bare_loop(model: torch.nn.Module, steps: int, lr: float) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, data, losses = torch.optim.AdamW(trained, lr), Windows(), []
    for step in range(steps):
        rows = [data[(step * B + i) % len(data)]["input_ids"] for i in range(B)]
        tokens = torch.stack(rows).to(device())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def with_trainer(model: torch.nn.Module, steps: int, lr: float) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=B, learning_rate=lr, logging_steps=1,
            lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Windows())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def falls(losses) -> bool:
    """Of the first steps, three if there are as many, beside the last ones."""
    few = max(min(3, len(losses) // 2), 1)
    return bool(sum(losses[-few:]) < sum(losses[:few]))


def main(*argv: str) -> int:
    """1 if the loss did not fall."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--how", choices=("loop", "trainer"), default="loop")
    parser.add_argument("--lora", action="store_true", help="train low-rank updates of the experts alone")
    parser.add_argument("--steps", type=integer(1), default=20)
    parser.add_argument("--lr", type=float, help="3e-3, and 1e-2 for LoRA")
    args = parser.parse_args(argv)
    model = small_model()
    if args.lora:
        model = with_lora(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lr = args.lr or (1e-2 if args.lora else 3e-3)
    losses = (with_trainer if args.how == "trainer" else bare_loop)(model, args.steps, lr)
    print(f"{trained} parameters, {len(losses)} steps on {device()}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return 0 if falls(losses) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
