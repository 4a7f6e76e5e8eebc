"""Text tables of a record: what `python -m bench` prints."""

from collections.abc import Iterable

from bench import accuracy_report

Row = dict  # extra_info of one benchmark, and "seconds", its median
PASSES = ("forward", "forward_backward", "forward_back_to_back", "forward_backward_back_to_back")


def rows_of(record: dict, group: str | None = None) -> list[Row]:
    """Rows of a pytest-benchmark record, or of one of its groups."""
    return [
        row["extra_info"] | {"seconds": row["stats"]["median"], "iqr": row["stats"]["iqr"], "group": row["group"]}
        for row in record["benchmarks"]
        if group in (None, row["group"])
    ]


def aligned(rows: list[list[str]], left: int = 1) -> list[str]:
    """Lines with columns of equal width, the first `left` of them left-justified."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def span(values: Iterable[float]) -> str:
    """The least and the greatest, "-" of none."""
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}" if found else "-"


def number(value: float | None, digits: int = 3) -> str:
    """With at least `digits` significant digits, "-" for None."""
    if value is None:
        return "-"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, min(digits, digits - whole + (abs(value) < 1)))}f}"


def merged_layers(rows: Iterable[Row]) -> list[dict]:
    """Layer rows with both passes side by side: case, order, provider, seconds by the names of PASSES, MiB, errors.

    With each time NAME come NAME_bound and NAME_ratio, of the bound of the same case and order. forward_watts and
    forward_backward_watts are the power of calls back to back.
    """
    merged: dict[tuple, dict] = {}
    for row in rows:
        key = (row["case"], row.get("order", "transposed"), row["provider"])
        entry = merged.setdefault(key, dict(zip(("case", "order", "provider"), key, strict=True)))
        entry[row["pass"]] = row["seconds"]
        if "back_to_back_ms" in row:
            entry[f"{row['pass']}_back_to_back"] = row["back_to_back_ms"] / 1e3
        if "back_to_back_w" in row:
            entry[f"{row['pass']}_watts"] = row["back_to_back_w"]
        entry["shape"], entry["routing"] = row.get("shape"), row.get("routing", "random")
        for name in ("saved_mib", "peak_mib", "errors"):
            if row.get(name) is not None:
                entry[name] = row[name]
    for (case, order, _), entry in merged.items():
        bound = merged.get((case, order, "cublas_bound"), {})
        for what in PASSES:
            if what in entry and what in bound:
                entry[f"{what}_bound"] = bound[what]
                entry[f"{what}_ratio"] = entry[what] / bound[what]
    return list(merged.values())


def layer_table(rows: Iterable[Row]) -> list[str]:
    """Bound, provider and their ratio for forward (f) and for forward with backward (f+b); saved and peak memory."""
    merged = merged_layers(rows)
    bounds = {(e["case"], e["order"]): e for e in merged if e["provider"] == "cublas_bound"}
    head = ["case", "order", "provider", "bound f ms", "f ms", "times bound", "bound f+b ms", "f+b ms", "times bound"]
    lines = [[*head, "saved MiB", "peak MiB"]]
    for entry in [e for e in merged if e["provider"] != "cublas_bound"] or merged:
        bound = bounds.get((entry["case"], entry["order"]), {})
        cells = [entry["case"], entry["order"], entry["provider"]]
        for what in ("forward", "forward_backward"):
            cells += [number(d[what] * 1e3) if what in d else "-" for d in (bound, entry)]
            cells.append(number(entry.get(f"{what}_ratio")))
        cells += [number(entry.get(name), 1) for name in ("saved_mib", "peak_mib")]
        lines.append(cells)
    return aligned(lines, 3)


_NAMES = ("case", "order", "kernel", "rows", "provider", "pass", "routing")
_FIGURES = (
    ("times bound", "times_bound", 3),
    ("tokens/s", "tokens_per_second", 3),
    ("times base", "times_base", 3),
    ("TFLOP/s", "tflops", 3),
    ("GB/s", "gb_per_s", 3),
    ("of roofline", "share_of_roofline", 3),
    ("saved MiB", "saved_mib", 1),
    ("by formula", "saved_formula_mib", 1),
    ("peak MiB", "peak_mib", 1),
)


def plain_table(rows: list[Row]) -> list[str]:
    """One line per row: its names, µs, and the figures that any row of the table has."""
    names = [name for name in _NAMES if any(name in row for row in rows)]
    figures = [f for f in _FIGURES if any(row.get(f[1]) is not None for row in rows)]
    lines = [[*names, "µs", *(title for title, _, _ in figures)]]
    for row in rows:
        cells = [str(row.get(name, "")) for name in names] + [number(row["seconds"] * 1e6)]
        lines.append(cells + [number(row.get(key), digits) for _, key, digits in figures])
    return aligned(lines, len(names))


def tables(record: dict) -> list[str]:
    """Lines for every group of a record."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in record["benchmarks"]):
        rows = rows_of(record, group)
        if group == "accuracy":
            body = aligned(accuracy_report.text_rows(record), 2)
        else:
            body = layer_table(rows) if group == "layer" else plain_table(rows)
        lines += ["", group, *body]
    return lines[1:]
