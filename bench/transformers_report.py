"""The suite `transformers` in docs/results.md: a table, and what the plot shows."""

import json
from pathlib import Path

from bench.other_gpus import card_of
from bench.recorded import RECORDS
from bench.table import number

WHATS = ("step", "step_compiled")
MODELS = {"qwen3_30b_a3b": "Qwen3-30B-A3B", "olmoe_1b_7b": "OLMoE-1B-7B", "gpt_oss_20b": "gpt-oss-20b"}
TUNED = {
    f"{name}_lora_{tokens}k": f"{title}, {tokens}k tokens" for name, title in MODELS.items() for tokens in (4, 32)
}  # cases with low-rank factors
ABOUT = """Models of transformers with random weights at the sizes of the named models, but with 4 layers and a
vocabulary of 8,192, in bf16. A step is forward, loss, backward and AdamW. Ratios are relative to "grouped_mm" in the
same record, and above 1 is faster. Peak memory includes weights and optimizer. Compiled steps use attention that is
causal without a mask."""

GENERATION = RECORDS / "generation"  # of bench.generation, a file by GPU
OF_GENERATION = """Median and quartiles of the time of a token of each sequence, over {rounds} rounds in which both
take turns. The host bounds them at 1 and 8 sequences."""
HEAD_OF_GENERATION = ["model", "sequences", "moeblaze, ms", "quartiles", "grouped_mm, ms", "quartiles", "speed"]

OF_TUNED = """peft's adapters of rank 16 on attention and experts, of which alone AdamW trains anything; eager, without
checkpointing. Beside "grouped_mm" peft adds BA to the experts' weights in every forward."""


def _newest(records: list[dict], cases: dict[str, str] = MODELS) -> dict[tuple[str, str, str], dict]:
    """Rows by case, pass and implementation, in the order of `cases`, ours first; records come oldest first."""
    found = {}
    for record in records:
        for row in record["benchmarks"]:
            info = row["extra_info"]
            if row["group"] == "transformers" and info["case"] in cases and info["pass"] in WHATS:
                found[info["case"], info["pass"], info["provider"]] = info | row["stats"]
    names, passes = list(cases), list(dict.fromkeys(what for _, what, _ in found))
    return dict(
        sorted(found.items(), key=lambda i: (names.index(i[0][0]), passes.index(i[0][1]), i[0][2] != "moeblaze"))
    )


def rows(records: list[dict], cases: dict[str, str] = MODELS) -> list[list[str]]:
    """Cells: case, pass, implementation, tokens/s, speed over grouped_mm, peak GiB, of grouped_mm, spread in %."""
    found, lines = _newest(records, cases), []
    for (case, what, name), row in found.items():
        base = found.get((case, what, "grouped_mm"), {})
        speed = row["tokens_per_second"] / base["tokens_per_second"] if base else None
        peak = row.get("peak_mib")
        share = peak / base["peak_mib"] if peak and base.get("peak_mib") else None
        words = [case, what.replace("_", " "), name, f"{row['tokens_per_second']:,.0f}", number(speed)]
        spread = 100 * row["iqr"] / row["median"]
        lines.append([*words, number(None if peak is None else peak / 1024), number(share), f"{spread:.1f}"])
    return lines


def steps(records: list[dict], cases: dict[str, str] = MODELS) -> dict[tuple[str, str], tuple[dict, dict]]:
    """Training steps with this layer and with grouped_mm, by case and pass, of those that have both."""
    found = _newest(records, cases)
    keys = [(case, what) for case in cases for what in WHATS]
    pairs = {key: tuple(found.get((*key, name)) for name in ("moeblaze", "grouped_mm")) for key in keys}
    return {key: pair for key, pair in pairs.items() if all(pair)}


def gpus(records: list[dict]) -> list[str]:
    """Those that the steps ran on."""
    found = (r for r in records if any(row["group"] == "transformers" for row in r["benchmarks"]))
    return sorted({record["machine_info"]["gpu"] for record in found})


def headline(records: list[dict]) -> list[str]:
    """Of training steps, eager and compiled, in one sentence; none without such rows."""
    parts = []
    for (case, what), (ours, base) in steps(records).items():
        speed = ours["tokens_per_second"] / base["tokens_per_second"]
        mode = "compiled" if what.endswith("compiled") else "eager"
        share = ours["peak_mib"] / base["peak_mib"]
        parts.append(f"{MODELS[case]}, {mode}, {speed:.2f} times as fast in {share:.2f} of the step's whole memory")
    if not parts:
        return []
    about = "transformers: compared with its `grouped_mm`, a training step on 4 layers of these models is:"
    return [about, *(f"{part};" for part in parts[:-1]), f"{parts[-1]}."]


def section(records: list[dict], table) -> list[str]:
    """Lines of the page; none without a record."""
    lines = rows(records)
    if not lines:
        return []
    head = ["model", "pass", "experts", "tokens/s", "speed", "peak, GiB", "share", "spread, %"]
    page = ["", "## transformers", "", "![Training steps](transformers.svg)", "", ABOUT, *table(head, lines)]
    if tuned := rows(records, TUNED):
        tuned = [[TUNED[case], *cells] for case, _, *cells in tuned]
        page += ["", "### Steps with low-rank factors", "", OF_TUNED, *table([head[0], *head[2:]], tuned)]
    return [*page, *generation(table)]


def of_generation(rows: list[dict]) -> list[list[str]]:
    """Cells of HEAD_OF_GENERATION, of rows that alternate between the two."""
    lines = []
    for ours, base in zip(rows[::2], rows[1::2], strict=True):
        cells = []
        for row in (ours, base):
            q1, median, q3 = (number(row[name] / 1000) for name in ("q1", "median", "q3"))
            cells += [median, f"{q1} to {q3}"]
        lines.append([ours["case"], str(ours["sequences"]), *cells, number(base["median"] / ours["median"])])
    return lines


def generation(table, folder: Path = GENERATION) -> list[str]:
    """Lines of the page; none without a record."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        about = f"{card_of(record)}, commit `{record['commit_info']['id']}`."
        lines += ["", "### Generation"] * (not lines)
        lines += ["", about, OF_GENERATION.format(rounds=record["rows"][0]["rounds"])]
        lines += table(HEAD_OF_GENERATION, of_generation(record["rows"]))
    return lines


def bars(records: list[dict]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """By case and pass, of training steps: tokens per second and peak GiB by implementation."""
    found: dict = {}
    for (case, what, name), row in _newest(records).items():
        if what in WHATS and row.get("peak_mib"):
            found.setdefault((case, what), {})[name] = row["tokens_per_second"], row["peak_mib"] / 1024
    return found
