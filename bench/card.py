"""The portable kernels on this card in a few minutes, as a record to send back: for Ampere, Ada and consumer Blackwell.

python -m bench.card --out FILE.json

mma.sync on operands in registers comes first, which no portable kernel can exceed. Then the suites `grouped_gemm` and
`layer` of `python -m bench` run with the portable kernels, whatever the card is: the six products of two layers beside
cuBLAS, and the layers beside their products in cuBLAS and torch's grouped_mm. The layers are small enough for
16 GB. Every result is compared with float64 before it is timed. The record has the form of those of `python -m bench`.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from bench import __main__ as command
from bench import inputs, kernels, measure, merge, mma, providers
from bench.recorded import title
from bench.table import aligned, number, rows_of
from moeblaze_cupy.tools.command import run_guarded

PROG = "python -m bench.card"
SUITES = ("grouped_gemm", "layer")
OURS, PEER = "moeblaze", "torch_grouped_mm"
OPTIONS = ("--case", "conf5,qwen30b", "--order", "transposed", "--provider", f"cublas_bound,{OURS},{PEER}")
DRAM = "limited by DRAM"
# Percent of mma.sync by card, in the order of the products: of a model that runs the machine code, measured nowhere.
EXPECTED = {
    "A100|A800": ("74 to 80", "70 to 78", "56 to 66", "72 to 80", "72 to 80", "70 to 78"),
    "RTX 4090|RTX 5090": ("85 to 92", "82 to 90", "75 to 85", "88 to 93", "88 to 93", "82 to 90"),
    "L40S|RTX 6000 Ada": ("72 to 80", DRAM, DRAM, "75 to 82", "75 to 82", DRAM),
    "RTX PRO 6000": ("72 to 80", "-", "-", "75 to 82", "75 to 82", "-"),
}


def card_text(record: dict) -> list[str]:
    """Lines of what the suites do not print: the ceilings, each product's share of mma.sync, and torch's time."""
    machine, ceiling = record["machine_info"], record["ceiling"]
    of_mma, of_cublas = (f"{number(rate)} TFLOP/s" for rate in (ceiling["mma_tflops"], machine["matmul_tflops"]))
    copied = f"{number(machine['copy_gb_per_s'])} GB/s"
    lines = [f"{machine['gpu']}: mma.sync {of_mma}, cuBLAS {of_cublas}, a copy {copied}"]
    expected = next((spans for names, spans in EXPECTED.items() if re.search(names, machine["gpu"])), ())
    by_entry = dict(zip(kernels.GEMMS, expected, strict=False))
    cells = [["case", "product", "TFLOP/s", "% of mma.sync", "expected"]]
    for row in rows_of(record, "grouped_gemm"):
        if row["provider"] == OURS:
            share = 100 * row["tflops"] / ceiling["mma_tflops"]
            span = by_entry.get(row["kernel"].partition(" + ")[0], "-")
            cells.append([row["case"], row["kernel"], number(row["tflops"]), f"{share:.0f}", span])
    lines += [*aligned(cells, 2), "What is expected is of a model. No such card has been measured."]
    times = {(row["case"], row["pass"], row["provider"]): row["seconds"] for row in rows_of(record, "layer")}
    for (case, what, provider), seconds in times.items():
        if provider == PEER and (case, what, OURS) in times:
            ratio = seconds / times[case, what, OURS]
            lines.append(f"{case}, {what}: {title(PEER)} takes {ratio:.2f} times as long as this layer")
    return lines


def run(out: Path) -> int:
    """The exit code of the suites; writes the record in any case."""
    ceiling = mma.ceiling() if inputs.has_gpu() else {}
    with tempfile.TemporaryDirectory() as folder, providers.PROVIDERS["moeblaze_sm80"].active():
        suites = [word for suite in SUITES for word in ("--suite", suite)]
        code = command.run(command.build_parser().parse_args([*suites, *OPTIONS, "--out", folder]))
        found = [json.loads(Path(folder, f"{suite}.json").read_text()) for suite in SUITES]
    record = {**merge.merge("python -m bench.card: the portable kernels", found), "tier": "sm80", "ceiling": ceiling}
    measure.write_record(record, out)
    if ceiling:
        print("\n".join(card_text(record)))
    print(f"\n{out} is the record. Please send it back.")
    return code


def main(*argv: str) -> int:
    """0 if every row was measured or skipped for a stated reason, else as `python -m bench`."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("card.json"), metavar="FILE.json", help="(%(default)s)")
    args = parser.parse_args(argv or None)
    return run_guarded(PROG, lambda: run(args.out))


if __name__ == "__main__":
    sys.exit(main())
