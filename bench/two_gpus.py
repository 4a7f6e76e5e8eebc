"""Figures of other suites than `layer` on two GPUs: what both have a record of, least to greatest.

bench/records/other_gpus/ has a folder for each other GPU, with the records of its suites, and in fp8.json that of
bench.fp8.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import cases, fp8_report, other_gpus, transformers_report
from bench.recorded import Records
from bench.table import PASSES, span

Figures = dict[str, dict[tuple, float]]  # by what they say, then by case and kernel or pass
ABOUT = "Each cell is the least to the greatest of the rows that both GPUs have, of the newest record of each."


def _bound(records: Records, group: str, chosen: Callable[[dict], bool] = lambda row: True) -> dict[tuple, float]:
    """Times the bound of this package's rows of a group with transposed weights, where they have any."""
    return {
        tuple(row.get(name) for name in ("case", "kernel", "pass", "rows")): row["times_bound"]
        for row in records.rows(group)
        if row["provider"] == "moeblaze" and row.get("order") != "row" and "times_bound" in row and chosen(row)
    }


def figures(records: Records, fp8: Path) -> Figures:
    """All that this table may show, of records of one GPU; fp8 is the file that bench.fp8 wrote."""
    skewed = [row for row in records.rows("layer") if row["routing"] == "skewed" and row["provider"] == "moeblaze"]
    of_fp8 = fp8_report.by_case(fp8).items()
    steps = transformers_report.steps(list(records.by_name.values()))
    return {
        "a product of the experts, times cuBLAS's": _bound(records, "grouped_gemm", lambda r: r["rows"] == "gathered"),
        "skewed over random routing": {
            (row["case"], what): row[what] / row[f"{what}_random"]
            for row in skewed
            for what in PASSES
            if f"{what}_random" in row
        },
        "forward of 16 to 1,024 tokens, times reading the weights": _bound(records, "small_batch"),
        "dispatch of a million tokens, times a copy": _bound(
            records, "dispatch", lambda r: r["case"] in cases.GROUPS["table3"]
        ),
        "aggregation, times a copy": _bound(records, "aggregation"),
        "step of a model, times the speed of grouped_mm": {
            key: ours["tokens_per_second"] / base["tokens_per_second"] for key, (ours, base) in steps.items()
        },
        **{
            f"{words} in fp8, times the speed of bf16": {
                (case,): rows[what]["seconds"]["bf16"] / rows[what]["seconds"][kind]
                for case, rows in of_fp8
                if kind in rows[what]["seconds"]
            }
            for words, what, kind in (
                ("forward", fp8_report.PASSES[0], "fp8"),
                ("training pass", fp8_report.PASSES[1], "fp8"),
                ("training pass with fp8_wgrad", fp8_report.PASSES[1], fp8_report.WGRAD),
            )
        },
    }


def _sources(records: Records, fp8: Path) -> str:
    """The GPUs and commits of these records."""
    found = list(records.by_name.values()) + ([json.loads(fp8.read_text())] if fp8.is_file() else [])
    gpus = dict.fromkeys(record["machine_info"]["gpu"] for record in found)
    commits = dict.fromkeys(record["commit_info"]["id"] for record in found)
    return f"{' and '.join(gpus)}, commits {', '.join(f'`{commit}`' for commit in commits)}"


def section(
    table: Callable[[list[str], Iterable[list[str]]], list[str]], main: Records, folder: Path = other_gpus.FOLDER
) -> list[str]:
    """Lines of docs/results.md for each GPU that has a row of `main`'s, too; none without one."""
    lines = []
    ours = figures(main, fp8_report.RECORD)
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        fp8 = path / "fp8.json"
        others = Records.load(path, ("fp8",))
        made = []
        for words, of_other in figures(others, fp8).items():
            if both := ours[words].keys() & of_other.keys():
                made.append([words, str(len(both)), *(span(of[key] for key in both) for of in (ours[words], of_other))])
        if made:
            lines += ["", f"{_sources(main, fp8_report.RECORD)}; {_sources(others, fp8)}."]
            lines += table(["figure", "rows", "the former", "the latter"], made)
    return ["", "### Other suites on two GPUs", "", ABOUT, *lines] if lines else []
