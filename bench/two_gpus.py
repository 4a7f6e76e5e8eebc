"""Figures of other suites than `layer` on two GPUs: what both have a record of, least to greatest.

bench/records/other_gpus/ has a folder for each other GPU, with the records of its suites, and in fp8.json that of
bench.fp8.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import accuracy_report, cases, fp8_report, other_gpus, transformers_report
from bench.recorded import Records
from bench.table import span

Figures = dict[str, dict[tuple, float]]  # by what they say, then by case and kernel or pass
SKEWED = f"{other_gpus.SHOWN[1]}_ratio"
ABOUT = (
    "Cells are the least to the greatest of the rows that both kinds of GPU have: fewer than above, of other commits."
)


def _bound(records: Records, group: str, chosen: Callable[[dict], bool] = lambda row: True) -> dict[tuple, float]:
    """Times the bound of this package's rows of a group with transposed weights, where they have any."""
    return {
        tuple(row.get(name) for name in ("case", "kernel", "pass", "rows")): row["times_bound"]
        for row in records.rows(group)
        if row["provider"] == "moeblaze" and row.get("order") != "row" and "times_bound" in row and chosen(row)
    }


def _peaks(records: Records) -> dict[tuple, float]:
    """Of `grouped_mm` over this package's, by case."""
    peaks = {(row["case"], row["provider"]): row["peak_mib"] for row in records.rows("memory") if "peak_mib" in row}
    both = {case for case, provider in peaks if provider == "moeblaze" and (case, other_gpus.PEER) in peaks}
    return {(case,): peaks[case, other_gpus.PEER] / peaks[case, "moeblaze"] for case in both}


def _errors(records: Records) -> dict[tuple, float]:
    """The norms of this package's errors, in thousandths, as means over the seeds."""
    found = accuracy_report.errors_by_provider(records.by_name.values())
    return {
        (case, data, provider, tensor): 1e3 * statistics.mean(errors[tensor]["norm"])
        for (case, data), providers in found.items()
        for provider, errors in providers.items()
        if accuracy_report.is_ours(provider)
        for tensor in accuracy_report.RESULTS
    }


def _ablation(records: Records) -> dict[tuple, float]:
    """Of the first step of Tables 4 and 5, which is torch's, over the last one, which is this layer, by case."""
    seconds = {(row["case"], row["provider"]): row["seconds"] for row in records.rows("ablation")}
    first, *_, last = cases.ABLATION
    return {(case,): found / seconds[case, last] for (case, step), found in seconds.items() if step == first}


def figures(records: Records, fp8: Path) -> Figures:
    """All that this table may show, of records of one GPU; fp8 is the file that bench.fp8 wrote."""
    of_fp8 = fp8_report.by_case(fp8, needed=fp8_report.PASSES).items()
    steps = transformers_report.steps(list(records.by_name.values()))
    selections = [
        row
        for row in records.rows("selection")
        if "times_bound" in row and row["pass"] != "layer" and not row["provider"].startswith("torch")
    ]
    activations = [row for row in records.rows("experts") if "back_to_back_times_base" in row]
    return {
        "product of the experts with gather, epilogue and sums, times cuBLAS's": _bound(
            records, "grouped_gemm", lambda r: r["rows"] == "gathered"
        ),
        "training pass with skewed routing, times its products in cuBLAS": {
            (row["case"],): row[SKEWED]
            for row in records.rows("layer")
            if row["routing"] == "skewed" and row["provider"] == "moeblaze" and row["order"] != "row" and SKEWED in row
        },
        "Tables 4 and 5: a training pass of torch with routed buffers, times this layer's": _ablation(records),
        "the paper's layers: peak of grouped_mm, times this layer's": _peaks(records),
        "error of a result against float64, thousandths": _errors(records),
        "gpt-oss-20b's layer: another activation, biases or interleaved columns, times swiglu or relu": {
            tuple(row[name] for name in ("case", "provider", "pass")): row["back_to_back_times_base"]
            for row in activations
        },
        "Qwen3-30B-A3B's layer: forward of 16 to 1,024 tokens, times reading the weights": _bound(
            records, "small_batch"
        ),
        "dispatch of a million tokens, times a copy": _bound(
            records, "dispatch", lambda r: r["case"] in cases.GROUPS["table3"]
        ),
        "aggregation, times a copy": _bound(records, "aggregation"),
        "router, forward or backward, times a copy": _bound(records, "router"),
        "selection of pairs, times a copy or index lists": {
            tuple(row[name] for name in ("case", "provider", "pass")): row["times_bound"] for row in selections
        },
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


def _gpus(records: Records) -> str:
    return " and ".join(dict.fromkeys(record["machine_info"]["gpu"] for record in records.by_name.values()))


def _commits(records: Records, fp8: Path) -> str:
    found = list(records.by_name.values()) + ([json.loads(fp8.read_text())] if fp8.is_file() else [])
    return ", ".join(dict.fromkeys(f"`{record['commit_info']['id']}`" for record in found))


def section(
    table: Callable[[list[str], Iterable[list[str]]], list[str]], main: Records, folder: Path = other_gpus.FOLDER
) -> list[str]:
    """Lines of docs/results.md for each GPU that has a row of `main`'s, too; none without one."""
    lines = []
    ours = figures(main, fp8_report.LONG_RECORD)
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        fp8 = path / "fp8.json"
        others = Records.load(path, ("fp8",))
        made = []
        for words, of_other in figures(others, fp8).items():
            if both := ours[words].keys() & of_other.keys():
                made.append([words, str(len(both)), *(span(of[key] for key in both) for of in (ours[words], of_other))])
        if made:
            lines += ["", f"The commits of {_gpus(main)} are named below, and beside the products in fp8."]
            lines += [f"Those of {_gpus(others)} are {_commits(others, fp8)}."]
            lines += table(["figure", "rows", _gpus(main), _gpus(others)], made)
    return ["", "### Other suites on two kinds of GPU", "", ABOUT, *lines] if lines else []
