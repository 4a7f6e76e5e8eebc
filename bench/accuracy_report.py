"""The accuracy suite's records as text and as a section of docs/results.md: errors, and how they compare with torch's.

All numbers of a case are of the newest record that has it.
"""

from collections.abc import Iterable
from math import isfinite
from statistics import mean

RESULTS = ("out", "x", "weights", "logits", "w1", "w2")
BASELINE = "torch_eager"
OTHER_COMPOSITIONS = ("torch_eager_fp32", "torch_grouped_fp32")
MEASURES = {"norm": "norm", "row": "largest row", "row_p999": "row, 99.9%"}
TITLES = {
    "torch_eager": "torch loop with bf16 sums",
    "torch_eager_fp32": "torch loop with fp32 sums",
    "torch_grouped_fp32": "torch grouped_mm with fp32 sums",
    "sonicmoe": "SonicMoE",
}
HEADING = "### Errors against float64, plain and trained-like data"
INTRODUCTION = """All tokens and experts are compared, from bf16 inputs and float32 logits. `gaussian` data have unit
scale. In `trained` data some channels of x are 20 to 60 times larger, gate inputs follow Student's t, gradients of
tokens have log-normal scales, and experts follow Zipf's law, with one expert that gets no token."""
RATIOS = """The largest error among this package's policies and tiers over that of plain bf16 torch as in transformers'
experts (a loop over the experts that adds results in bf16). Both errors are means over {seeds} seeds. Norm: as above.
Largest row: the largest such quotient of a row (a token, an input channel of w1, a hidden unit of w2) whose reference
is not zero. Rows of gradients of router weights and logits nearly cancel, so there the quotient that 99.9% of rows stay
below says more. An error counts as larger if its mean is above the largest of torch's over the seeds. Cells are the
least and the greatest of {cases}."""

Errors = dict[str, dict[str, list[float]]]  # by tensor and measure, a value per seed


def is_ours(provider: str) -> bool:
    return provider.startswith("moeblaze")


def errors_by_provider(records: Iterable[dict]) -> dict[tuple[str, str], dict[str, Errors]]:
    """Errors by (case, data), then provider, from pytest-benchmark records, the oldest first.

    A case of a later record takes the place of all that earlier ones say of it.
    """
    newest: dict[str, list[dict]] = {}
    for record in records:
        rows = [row["extra_info"] for row in record["benchmarks"] if row["group"] == "accuracy"]
        by_case: dict[str, list[dict]] = {}
        for row in rows:
            if "accuracy" in row:  # a provider that failed has none
                by_case.setdefault(row["case"], []).append(row)
        newest |= by_case
    found: dict[tuple[str, str], dict[str, Errors]] = {}
    for rows in newest.values():
        for row in sorted(rows, key=lambda row: row["seed"]):
            entry = found.setdefault((row["case"], row["data"]), {})
            errors = entry.setdefault(row["provider"], {t: {m: [] for m in MEASURES} for t in RESULTS})
            for tensor in RESULTS:
                for measure in MEASURES:
                    errors[tensor][measure].append(row["accuracy"][tensor][measure])
    return found


def _size(value: float) -> tuple[bool, float]:
    """For which a NaN is the largest."""
    return value != value, value


def compare(providers: dict[str, Errors], tensor: str, measure: str, beside: str = BASELINE):
    """(ratio, whether it is no larger): the largest of this package's means over `beside`'s, None without both."""
    ours = [mean(errors[tensor][measure]) for name, errors in providers.items() if is_ours(name)]
    if not ours or beside not in providers:
        return None
    theirs = providers[beside][tensor][measure]
    worst = max(ours, key=_size)
    ratio = worst / mean(theirs) if mean(theirs) else float("nan" if worst else 1)
    return ratio, worst <= max(theirs)


def beside_baseline(found: dict[tuple[str, str], dict[str, Errors]]) -> dict[tuple[str, str], dict[str, Errors]]:
    """Those that `compare` has a ratio of."""
    return {key: providers for key, providers in found.items() if compare(providers, RESULTS[0], "norm") is not None}


def ratio_rows(found: dict[tuple[str, str], dict[str, Errors]]) -> list[list[str]]:
    """A row per case, data and measure: the ratio of every tensor, and what is larger than torch's."""
    lines = []
    for (case, data), providers in beside_baseline(found).items():
        for measure, words in MEASURES.items():
            compared = {tensor: compare(providers, tensor, measure) for tensor in RESULTS}
            larger = [tensor for tensor, (_, holds) in compared.items() if not holds]
            verdict = f"larger: {', '.join(larger)}" if larger else "no larger"
            ratios = [f"{ratio:.3f}" for ratio, _ in compared.values()]
            lines.append([f"{case}, {data}", words, *ratios, verdict])
    return lines


def _span(ratios: list[float]) -> str:
    least, greatest = min(ratios, key=_size), max(ratios, key=_size)
    return f"{least:.3f}" if least == greatest else f"{least:.3f} to {greatest:.3f}"


def rows_over_cases(found: dict[tuple[str, str], dict[str, Errors]]) -> list[list[str]]:
    """A row per data and measure: the cases' ratios of every tensor, and where they are larger than torch's."""
    lines, found = [], beside_baseline(found)
    for data in dict.fromkeys(data for _, data in found):
        for measure, words in MEASURES.items():
            by_case = {
                case: {tensor: compare(providers, tensor, measure) for tensor in RESULTS}
                for (case, of), providers in found.items()
                if of == data
            }
            larger: dict[str, list[str]] = {tensor: [] for tensor in RESULTS}
            for case, compared in by_case.items():
                for tensor, (ratio, holds) in compared.items():
                    if not holds:
                        larger[tensor].append(f"{case} {ratio:.3f}")
            told = [f"{tensor} ({', '.join(cases)})" for tensor, cases in larger.items() if cases]
            ratios = [_span([compared[tensor][0] for compared in by_case.values()]) for tensor in RESULTS]
            lines.append([data, words, *ratios, f"larger: {', '.join(told)}" if told else "no larger"])
    return lines


def error_rows(found: dict[tuple[str, str], dict[str, Errors]]) -> list[list[str]]:
    """A row per case, data and provider: the errors of every tensor in thousandths, as the mean of the norm over the
    seeds, ± half of its range, then the mean of the largest row. Providers with the same numbers share a row."""
    lines = []
    for (case, data), providers in found.items():
        names_by_cells: dict[tuple[str, ...], list[str]] = {}
        for name, errors in providers.items():
            cells = []
            for tensor in RESULTS:
                norms, rows = (errors[tensor][measure] for measure in ("norm", "row"))
                half = 500 * (max(norms) - min(norms))
                cells.append(f"{1e3 * mean(norms):.2f} ±{half:.2f}; {1e3 * mean(rows):.1f}")
            names_by_cells.setdefault(tuple(cells), []).append(TITLES.get(name, f"`{name}`"))
        lines += [[f"{case}, {data}", ", ".join(names), *cells] for cells, names in names_by_cells.items()]
    return lines


RATIO_HEAD = ["case, data", "measure", *RESULTS, "beside torch"]
ERROR_HEAD = ["case, data", "provider", *RESULTS]


def text_rows(record: dict) -> list[list[str]]:
    """Head and lines of a table, two text columns first: ratios to torch where the record has both, else errors."""
    found = errors_by_provider([record])
    if ratios := ratio_rows(found):
        return [["over torch_eager", *RATIO_HEAD[1:]], *ratios]
    return [["thousandths", *ERROR_HEAD[1:]], *error_rows(found)]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    first, *lines = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return ["", first, f"|---|---|{'---:|' * (len(head) - 2)}", *lines, ""]


def beside_others(found: dict[tuple[str, str], dict[str, Errors]]) -> list[str]:
    """A sentence for each other composition: the least and the largest finite ratio of norms."""
    lines = []
    for name in OTHER_COMPOSITIONS:
        compared = [compare(p, tensor, "norm", name) for p in found.values() for tensor in RESULTS]
        ratios = [each[0] for each in compared if each is not None and isfinite(each[0])]
        if ratios:
            spans = f"{min(ratios):.3f} to {max(ratios):.3f}"
            lines.append(f"Ratio of norms to {TITLES[name]}: {spans} over all cases, data and tensors.")
    return lines


def headline(records: Iterable[dict]) -> list[str]:
    """The span of ratios of norms beside the baseline, and the largest of rows; none without a record."""
    found = beside_baseline(errors_by_provider(records)).values()
    if not found:
        return []
    norms, rows = ([compare(p, tensor, measure)[0] for p in found for tensor in RESULTS] for measure in ("norm", "row"))
    spans = f"{min(norms, key=_size):.2f} to {max(norms, key=_size):.2f}"
    return [
        f"Accuracy: errors of output and gradients against float64 are {spans} times those of bf16 torch in",
        f"their norms, and up to {max(rows, key=_size):.2f} times in a tensor's largest row.",
    ]


def section(records: Iterable[dict]) -> list[str]:
    """Markdown lines with their heading, from records, the oldest first; [] where none has this suite."""
    found = errors_by_provider(records)
    if not found:
        return []
    lines = ["", HEADING, "", INTRODUCTION]
    if ratios := rows_over_cases(found):
        head = ["data", *RATIO_HEAD[1:]]
        compared = {case: p for (case, _), p in beside_baseline(found).items()}
        seeds = max(len(p[BASELINE][RESULTS[0]]["norm"]) for p in compared.values())
        lines += ["", RATIOS.format(seeds=seeds, cases=", ".join(compared))]
        lines += [*_markdown(head, ratios), *beside_others(found)]
    return lines
