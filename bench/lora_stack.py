"""LoRA over a whole stack of layers whose frozen experts are in bf16, eight or four bits: memory and tokens per second.

python -m bench.lora_stack --out FILE.json [--case qwen30b,gptoss20b] [--format bf16,mxfp4] [--tokens 4096] [--tiny]

A layer has norms, causal attention with frozen projections and no rotary embeddings, and a `MoE` with a frozen router
and factors of rank 16 in float32. There are no embeddings and no head. Weights are random. Experts are packed layer by
layer, so that one layer's alone exist in bf16. A step recomputes every layer in backward and ends with AdamW in
float32. Each row is a process of its own. The peak is that of torch's allocator in steps after the first ones. A row
that runs out of memory has no numbers. A row whose factors do not all change, or are not finite, is an error.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench import inputs, measure, table, training_step
from moeblaze_cupy.interop.torch import MoE
from moeblaze_cupy.types import WEIGHT_FORMATS

RANK = 16
SEQUENCE = 4096  # tokens that attend to each other
FORMATS = ("bf16", *WEIGHT_FORMATS)
LEARNING_RATE = 1e-3


class Stack(NamedTuple):
    """heads: of queries, then of keys and values. experts: options of `MoE`."""

    layers: int
    d: int
    h: int
    E: int
    k: int
    heads: tuple[int, int]
    head_width: int
    tokens: tuple[int, ...] = (4096, 16384)
    experts: dict[str, Any] = {}  # noqa: RUF012  # never changed


_GPT_OSS = {"activation": "swiglu_oai", "gate_up": "interleaved", "expert_bias": True}
STACKS = {
    "qwen30b": Stack(48, 2048, 768, 128, 8, (32, 4), 128),
    "gptoss20b": Stack(24, 2880, 2880, 32, 4, (64, 8), 64, experts=_GPT_OSS),
    "gptoss120b": Stack(36, 2880, 2880, 128, 4, (64, 8), 64, experts=_GPT_OSS),
}
TINY = {"tiny": Stack(2, 64, 64, 4, 2, (4, 2), 16, (48,), _GPT_OSS)}


class Layer(torch.nn.Module):
    """(sequences, tokens, d) in bf16 to the same. made_by: `MoE` or a class of its parameters; options: of it."""

    def __init__(self, of: Stack, device: str, made_by: type[MoE] = MoE, **options: Any) -> None:
        super().__init__()
        self.of, made = of, {"device": device, "dtype": torch.bfloat16}
        queries, others = (number * of.head_width for number in of.heads)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(of.d, **made) for _ in range(2))
        self.qkv = torch.nn.Linear(of.d, queries + 2 * others, bias=False, **made)
        self.out = torch.nn.Linear(queries, of.d, bias=False, **made)
        self.moe = made_by(of.d, of.h, of.E, of.k, **of.experts, **options, **made)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """x with what its sequences attend to."""
        (queries, others), width = self.of.heads, self.of.head_width
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (-1, width)).transpose(1, 2)
        q, k, v = parts.split((queries, others, others), dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attended(x)
        return x + self.moe(self.norms[1](x))


def adapted(of: Stack, format: str, device: str) -> Layer:
    """A layer of which only the factors of its experts train."""
    layer = Layer(of, device, lora_rank=RANK)
    if format != "bf16":
        layer.moe.quantize_experts(format)
    for name, parameter in layer.named_parameters():
        if "lora" not in name:
            parameter.requires_grad_(False)
    return layer


def row_of(name: str, format: str, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    """A row, measured in this process."""
    of = (STACKS | TINY)[name]
    row = {"case": name, "layers": of.layers, "format": format, "tokens": tokens, "rank": RANK}
    try:
        return row | _measured(of, format, tokens, seconds, rounds)
    except torch.OutOfMemoryError:
        return row | {"peak_mib": None, "tokens_per_second": None}


def _measured(of: Stack, format: str, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    device = inputs.device()
    layers = [adapted(of, format, device) for _ in range(of.layers)]
    measure.release()
    factors = {f"{i}.{n}": p for i, layer in enumerate(layers) for n, p in layer.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(factors.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=inputs.has_gpu())
    before = {name: factor.sum(dtype=torch.float64) for name, factor in factors.items()}
    length = min(SEQUENCE, tokens)
    x = torch.randn(tokens // length, length, of.d, device=device, dtype=torch.bfloat16)

    def step() -> None:
        rows = x
        for layer in layers:
            rows = checkpoint(layer, rows, use_reentrant=False)
        rows.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    if inputs.has_gpu():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    speed = training_step.speeds({"lora": step}, tokens, rounds, seconds)["lora"]
    for name, factor in factors.items():
        total = factor.sum(dtype=torch.float64)
        moved = torch.isfinite(total) and total != before[name]
        assert moved, f"{name} did not change, or is not finite; a wrong result gets no time"
    frozen = sum(p.nbytes for layer in layers for n, p in layer.moe.named_parameters() if not n.startswith("lora"))
    peak = torch.cuda.max_memory_allocated() / measure.MIB if inputs.has_gpu() else None
    of_bytes = {"experts_bytes": frozen, "factors_bytes": sum(factor.nbytes for factor in factors.values())}
    return {**of_bytes, "peak_mib": peak, "tokens_per_second": speed}


def in_own_process(*of_row: Any) -> dict[str, Any]:
    """`row_of` in a process of its own."""
    return measure.row_of_own_process("bench.lora_stack", of_row)


def text(rows: list[dict]) -> list[str]:
    """Lines of a table."""
    lines = [["case", "experts", "tokens", "tokens/s", "peak GiB"]]
    for row in rows:
        speed, peak = row["tokens_per_second"], row["peak_mib"]
        cells = f"{speed['median']:,.0f}" if speed else "out of memory", table.number(peak and peak / 1024)
        lines.append([row["case"], row["format"], str(row["tokens"]), *cells])
    return table.aligned(lines, 2)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lora_stack", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=",".join(STACKS), metavar="CASES", help="(%(default)s)")
    parser.add_argument("--format", default=",".join(FORMATS), metavar="FORMATS", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, help="of a step, in place of 4096 and 16384; a multiple of 4096 or less")
    parser.add_argument("--rounds", type=int, default=6, help="windows of each row (%(default)s)")
    parser.add_argument("--window", type=float, default=5.0, metavar="SECONDS", help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="two small layers, also without a GPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    if args.row:
        print(json.dumps(row_of(*json.loads(args.row))))
        return
    names = inputs.chosen(parser, "--case", args.case, STACKS)
    formats = inputs.chosen(parser, "--format", args.format, FORMATS)
    if not args.tiny:
        inputs.expect_gpu(parser)
    stacks = TINY if args.tiny else {name: STACKS[name] for name in names}
    rows: list[dict] = []
    record = measure.record(rows=rows)
    for name, of in stacks.items():
        for tokens in (args.tokens,) if args.tokens else of.tokens:
            for format in formats:
                rows.append(in_own_process(name, format, tokens, args.window, args.rounds))
                if args.out:  # after each row, as a run may be cut
                    measure.write_record(record, args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
