"""Log-probabilities of the tokens that a model samples, in generation and in a training pass.

python -m bench.log_probabilities --out FILE.json

A small Qwen3-MoE in bf16 samples tokens, one after another, for one sequence or for eight at a time. A pass with
gradients over all of them then gives each sampled token's log-probability again. Shown is the largest difference, with
the pass's own choice of experts and with that of the generation, and of how many tokens and layers the choice differs.
The parts around the experts are torch's, whose sums depend on the size of the batch, or "fixed": elementwise operations
that add in one order. With fixed parts a difference is that of the experts. Sequences are not padded.
"""

import argparse
import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import inputs, measure, table

IMPLEMENTATIONS = ("moeblaze", "grouped_mm", "batched_mm", "eager")
SEQUENCES, PROMPT, NEW = 8, 8, 16
PLACES = 32  # of keys, a power of two
FIXED = "fixed_places"


def model_of():
    """Built with the parts of torch."""
    import transformers

    transformers.AttentionInterface.register(FIXED, fixed_attention)
    transformers.AttentionMaskInterface.register(FIXED, lambda *args, **options: None)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "initializer_range": 0.1}
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    with torch.device(inputs.device()):
        config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, **ends)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def halved_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two, in an order that no other dimension changes."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def fixed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = halved_sum(x.float()[..., None, :] * weight.float())
    return (out if bias is None else out + bias).to(x.dtype)


def fixed_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """query: (B, heads, t, width) of the last t of the T places that key and value (B, heads, T, width) have."""
    groups, t, T = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (
        F.pad(each.float(), (0, 0, 0, PLACES - T)).repeat_interleave(groups, 1)[:, :, None] for each in (key, value)
    )
    scores = halved_sum(query.float()[:, :, :, None] * key) * scaling
    last = torch.arange(T - t, T, device=query.device)
    is_later = torch.arange(PLACES, device=query.device) > last[:, None]
    scores = scores.masked_fill(is_later, -torch.inf)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    out = halved_sum((shares[..., None] * value).transpose(-1, -2)) / halved_sum(shares)[..., None]
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def fixed_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    squares = halved_sum(x.float().square()) / x.shape[-1]
    return norm.weight * (x.float() * torch.rsqrt(squares + norm.variance_epsilon)[..., None]).to(x.dtype)


@contextlib.contextmanager
def fixed_parts(model) -> Iterator[None]:
    """Linear layers, norms and attention in a fixed order, those of the router and of eager experts too."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    plain, attention = F.linear, model.config._attn_implementation
    F.linear = fixed_linear  # type: ignore[assignment]
    for norm in norms:
        norm.forward = fixed_norm.__get__(norm)
    model.set_attn_implementation(FIXED)
    try:
        yield
    finally:
        F.linear = plain
        for norm in norms:
            del norm.forward
        model.set_attn_implementation(attention)


def gap(model, routing, batch: int, replays: bool) -> dict:
    """The largest difference, and the tokens of layers whose choice differs. batch: sequences at a time."""
    torch.manual_seed(1)
    prompts = torch.randint(model.config.vocab_size, (SEQUENCES, PROMPT), device=model.device)
    sequences, logits, ids = [], [], []
    model.eval()
    for prompt in prompts.split(batch):
        with routing.record() as record:
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "output_logits": True}
            out = model.generate(prompt, **options, return_dict_in_generate=True)
        sequences.append(out.sequences)
        logits.append(torch.stack(out.logits, 1))
        ids.append(record.ids)
    tokens, sampled = torch.cat(sequences), torch.cat(sequences)[:, PROMPT:, None]

    def of(logits):
        return logits.double().log_softmax(-1).gather(2, sampled)[..., 0]

    model.train()
    generated, before = torch.cat(ids), routing.counts()
    if replays:
        with routing.replay(generated):
            again = model(input_ids=tokens, use_cache=False).logits
        counts = routing.counts()
        differ, rows = (counts[name] - before[name] for name in ("differ", "forced"))
    else:
        with routing.record() as record:
            again = model(input_ids=tokens, use_cache=False).logits
        own = record.ids[:, :-1].sort(-1).values
        differs = (own != generated.sort(-1).values).any(-1)
        differ, rows = int(differs.sum()), differs.numel()
    difference = (of(again[:, PROMPT - 1 : -1]) - of(torch.cat(logits))).abs().max().detach()
    return {"largest": float(difference), "differ": differ / rows}


def measured(implementations: list[str]) -> list[dict]:
    from moeblaze_cupy.interop.transformers import Routing

    model, rows = model_of(), []
    for name in implementations:
        model.set_experts_implementation(name)
        with Routing(model) as routing:
            for parts in ("torch", "fixed"):
                with fixed_parts(model) if parts == "fixed" else contextlib.nullcontext():
                    for batch in (1, SEQUENCES):
                        for replays in (False, True):
                            of_row = {"experts": name, "parts": parts, "batch": batch, "replays": replays}
                            rows.append(of_row | gap(model, routing, batch, replays))
    return rows


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.log_probabilities", description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default=",".join(IMPLEMENTATIONS), metavar="A,B", help="(%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    rows = measured(args.experts.split(","))
    if args.out:
        measure.write_record(measure.record(rows=rows), args.out)
    head = ["experts", "other parts", "sequences", "experts chosen by", "largest difference", "other choices, %"]
    lines = [
        [
            *(r["experts"], r["parts"], str(r["batch"]), "generation" if r["replays"] else "the pass"),
            *(f"{r['largest']:.2g}", f"{100 * r['differ']:.2f}"),
        ]
        for r in rows
    ]
    print("\n".join(table.aligned([head, *lines], 4)))


if __name__ == "__main__":
    main()
