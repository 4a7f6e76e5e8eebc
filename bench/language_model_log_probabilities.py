"""Log-probabilities of held-out bytes by one trained language model, whose experts are computed in several ways.

python -m bench.language_model_log_probabilities --out FILE.json

The model of examples/language_model.py is trained in bfloat16 with this package's experts. Then all ways evaluate the
same held-out windows on the same weights: torch expert by expert in float32 throughout, the same in bfloat16, torch's
grouped_mm and this package. Shown are quantiles of the absolute difference per byte, and the difference of the means.
"""

import argparse
import copy
from dataclasses import asdict
from pathlib import Path

import torch

from bench import inputs, measure, table
from bench.fine_tuning import base_model
from bench.language_model_report import APART_HEAD, BASELINE, EAGER, QUANTILES, apart_rows
from examples import corpus
from examples import language_model as lm

REFERENCE, OURS = "fp32", "minimal"
WAYS = {
    REFERENCE: ("fp32", torch.float32),
    EAGER: ("fp32", torch.bfloat16),
    BASELINE: (BASELINE, torch.bfloat16),
    OURS: (OURS, torch.bfloat16),
}  # the arm of examples/language_model.py that computes the experts, and the dtype of the whole model
PAIRS = ((EAGER, REFERENCE), (BASELINE, REFERENCE), (OURS, REFERENCE), (OURS, BASELINE))


@torch.no_grad()
def log_probabilities(trained: lm.Model, way: str, held_out: torch.Tensor, s: lm.Settings) -> torch.Tensor:
    """(held-out windows * T,) float64."""
    arm, dtype = WAYS[way]
    model = copy.deepcopy(trained).to(dtype).eval()
    for block in model.blocks:
        block.experts.arm = arm
    found = []
    for windows in lm.held_out_windows(held_out, s):
        every = model(windows[:, :-1]).double().log_softmax(-1)
        found.append(every.gather(2, windows[:, 1:, None]).flatten())
    return torch.cat(found)


def compared(by_way: dict[str, torch.Tensor]) -> list[dict]:
    """A row per pair. cross_entropy: that of `experts` less that of `less`, in nats per byte."""
    rows = []
    for way, other in PAIRS:
        apart = by_way[way] - by_way[other]
        quantiles = apart.abs().quantile(torch.tensor(QUANTILES, dtype=apart.dtype, device=apart.device))
        rows.append(
            {"experts": way, "less": other, "quantiles": quantiles.tolist(), "cross_entropy": -float(apart.mean())}
        )
    return rows


def main(*argv: str) -> None:
    name = "python -m bench.language_model_log_probabilities"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", choices=lm.SIZES, default="small" if inputs.has_gpu() else "toy", help="(%(default)s)"
    )
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    torch.set_float32_matmul_precision("highest")  # no TF32
    s, data = lm.SIZES[args.size], corpus.load(args.text or corpus.default_folders(), lm.TEXT_BYTES)
    trained, loss = base_model(s, data)
    print(f"trained: held-out loss {loss:.4f}", flush=True)
    held_out = data.held_out.to(inputs.device())
    rows = compared({way: log_probabilities(trained, way, held_out, s) for way in WAYS})
    record = measure.record(settings=asdict(s), text=data.about, held_out_loss=loss, rows=rows)
    if args.out:
        measure.write_record(record, args.out)
    print("\n".join(table.aligned([APART_HEAD, *apart_rows(record)], 2)))


if __name__ == "__main__":
    main()
