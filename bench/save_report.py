"""The save policies in docs/results.md, from the records of bench.save_policies: when recomputing pays."""

import json
from collections.abc import Callable, Iterable

from bench.recorded import RECORDS
from bench.table import number, span

FOLDER = RECORDS / "save_policies"
GATED = ("table1", "mixtral", "olmoe", "qwen30b", "dsv3", "shapes", "tab2_128k")  # 15 layers
PLAIN = ("conf3_silu", "conf4t_silu", "conf5_silu")
POLICIES = ("minimal", "paper", "fp8", "recompute")
FEWER = POLICIES[2:]  # keep less than the default
HEAD = ["case", *(name for save in FEWER for name in (save, "ms/GiB"))]
ABOUT = """Forward and backward by each policy over `save="minimal"`, and milliseconds for each GiB that it frees.
Recomputing takes d FLOP for a byte. At 50 GB/s copies to the host and back take 43 ms, unless something hides them."""
PAPER = '`"paper"` takes {} of the time of `"minimal"` and keeps more.'


def ms_per_gib(row: dict, save: str) -> float:
    """What a policy takes for each GiB that it frees."""
    least, other = row["saves"]["minimal"], row["saves"][save]
    return (other["ms"] - least["ms"]) / (least["saved_mib"] - other["saved_mib"]) * 1024


def lines(record: dict) -> Iterable[list[str]]:
    """Cells of each case, by HEAD."""
    for row in record["rows"]:
        ms = {save: row["saves"][save]["ms"] for save in POLICIES}
        costs = {save: ms_per_gib(row, save) for save in FEWER}
        of_policies = (cell for save in FEWER for cell in (f"{ms[save] / ms['minimal']:.3f}", number(costs[save])))
        yield [row["case"], *of_policies]


def section(table: Callable[[list[str], Iterable[list[str]]], list[str]]) -> list[str]:
    """Lines of docs/results.md; none without a record."""
    found = []
    for record in (json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))):
        of_paper = span(row["saves"]["paper"]["ms"] / row["saves"]["minimal"]["ms"] for row in record["rows"])
        about = f"{record['machine_info']['gpu']}, commit `{record['commit_info']['id']}`."
        found += ["", f"{about} {PAPER.format(of_paper)}", *table(HEAD, lines(record))]
    return ["", "## When recomputing pays", "", ABOUT, *found] if found else []
