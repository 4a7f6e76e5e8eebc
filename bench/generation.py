"""Generation with this layer and with other experts of transformers, a token at a time, in turn in one process.

python -m bench.generation --out FILE.json

The host takes a few milliseconds for a token of one or 8 sequences, and its speed shifts by a third for seconds at a
time. So each round has all kinds of experts, in an order that changes, and quartiles are of all rounds. Run it alone on
the machine. The models are those of the suite `transformers`. They share their parameters.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch

from bench import bench_transformers, inputs, measure, table
from bench import transformers_report as report

KINDS = ("moeblaze", "grouped_mm")
MODELS = ("qwen3_30b_a3b", "olmoe_1b_7b")
SEQUENCES, PROMPT, NEW = (1, 8, 64), 16, 16
ROUNDS = 60
TOLERANCE = 0.02  # of losses: kinds of experts round differently


def models_of(case: bench_transformers.Model) -> dict[str, Any]:
    """The same model by its kind of experts."""
    model = bench_transformers.build(case).eval()
    found = {kind: bench_transformers.copy_of(model) for kind in KINDS}
    for kind, each in found.items():
        bench_transformers.use(each, kind)
    return found


def generate(model: Any, prompt: torch.Tensor) -> None:
    model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)


def measured(case: bench_transformers.Model, sequences: Sequence[int] = SEQUENCES, rounds: int = ROUNDS) -> list[dict]:
    """A row for each number of sequences and kind, quartiles in microseconds of a token of each sequence."""
    models, rows = models_of(case), []
    tokens = torch.randint(bench_transformers.VOCABULARY, (1, PROMPT), device=inputs.device())
    with torch.no_grad():
        losses = [float(model(tokens, labels=tokens, use_cache=False).loss) for model in models.values()]
    if max(losses) - min(losses) > TOLERANCE * min(losses):
        raise RuntimeError(f"bench.generation: expected losses that differ by rounding, got {losses}")
    for number in sequences:
        prompt = tokens.expand(number, -1).contiguous()
        calls = {kind: functools.partial(generate, model, prompt) for kind, model in models.items()}
        for call in calls.values():
            call()
        times = measure.host_microseconds(calls, 1, rounds, waits=True)
        for kind, quartiles in times.items():
            per_token = {name: value / NEW for name, value in quartiles.items()}
            rows.append({"case": case.name, "sequences": number, "experts": kind, "rounds": rounds, **per_token})
    return rows


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    parser.add_argument("--commit", help="to write into the record where there is no git")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    rows: list[dict] = []
    for name in MODELS:
        rows += measured(bench_transformers.MODELS[name])
        measure.release()
        if args.out:
            record = measure.record(args.commit, rows=rows, transformers=measure.version("transformers"))
            measure.write_record(record, args.out)
    print("\n".join(table.aligned([report.HEAD_OF_GENERATION, *report.of_generation(rows)], 1)))


if __name__ == "__main__":
    main()
