"""The layer on other GPUs than the one of docs/results.md's tables.

bench/records/other_gpus/ has a record for each GPU, of `python -m bench --suite layer` or of `python -m bench.card`.
"""

import json
import statistics
from collections.abc import Callable, Iterable

from bench import cases
from bench.recorded import RECORDS, title
from bench.table import PASSES, merged_layers, number, rows_of, span

FOLDER = RECORDS / "other_gpus"
PEER = "torch_grouped_mm"
SHOWN = PASSES[2:]  # calls back to back
ABOUT = f"""Calls back to back on other GPUs. torch's time is that of {title(PEER)} over this package's, and the peak
this package's over that of {title(PEER)}."""


def records() -> list[dict]:
    """Raises ValueError for one without a layer to show."""
    found = {path: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    for path, record in found.items():
        if not layers(record):
            expected = f"a layer that ran both passes as moeblaze, cublas_bound and {PEER}"
            got = sorted({row["provider"] for row in rows_of(record, "layer")})
            raise ValueError(f"bench.report: {path.name}: expected {expected}, got none among the providers {got}")
    return list(found.values())


def name_of(record: dict) -> str:
    """Of the GPU, and of the kernels where bench.card chose them."""
    return record["machine_info"]["gpu"] + (", portable kernels" if "tier" in record else "")


def layers(record: dict) -> list[dict]:
    """Of each case that ran both passes beside its bound and the peer: case, GPU's times, and ratios by name."""
    entries = {(e["case"], e["provider"]): e for e in merged_layers(rows_of(record, "layer"))}
    found = []
    for case in (name for name in cases.LAYERS if (name, "moeblaze") in entries):
        ours, peer = entries[case, "moeblaze"], entries.get((case, PEER), {})
        if all(f"{what}_ratio" in ours and what in peer for what in SHOWN):
            of_passes = {what: (ours[what], ours[f"{what}_ratio"], peer[what] / ours[what]) for what in SHOWN}
            more = peer["peak_mib"] - ours["peak_mib"]
            peaks = {"peak": ours["peak_mib"] / peer["peak_mib"], "peer_more_mib": more}
            found.append({"case": case, "passes": of_passes, **peaks})
    return found


def headline() -> list[str]:
    """One sentence for each GPU; none without a record."""
    lines = []
    for record in records():
        rows = layers(record)
        bound, speed = ([row["passes"][SHOWN[1]][i] for row in rows] for i in (1, 2))
        lines += [
            f"{name_of(record)}: a training pass takes {span(bound)} times as long as its products in",
            f"cuBLAS, and torch's `grouped_mm` {span(speed)} times as long as this layer "
            f"(median {statistics.median(speed):.2f}, {len(rows)} layers).",
        ]
    return lines


def section(table: Callable[[list[str], Iterable[list[str]]], list[str]]) -> list[str]:
    """Lines of docs/results.md; none without a record."""
    lines = []
    for record in records():
        machine = record["machine_info"]
        rows = []
        for row in layers(record):
            cells = [row["case"]]
            for seconds, bound, speed in row["passes"].values():
                cells += [number(seconds * 1e3), f"{bound:.2f}", f"{speed:.2f}"]
            rows.append([*cells, f"{row['peak']:.2f}"])
        about = f"{name_of(record)}, {machine['power_limit_w']} W, driver {machine['driver']}, torch {machine['torch']}"
        lines += ["", f"{about}, commit `{record['commit_info']['id']}`."]
        passes = ("forward", "with backward")
        head = [f"{name}{what}" for name in passes for what in (", ms", ", over bound", ", torch's time")]
        lines += table(["case", *head, "our peak over its"], rows)
    return ["", "## Other GPUs", "", ABOUT, *lines] if lines else []
