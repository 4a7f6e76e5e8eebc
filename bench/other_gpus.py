"""The layer on other GPUs than the one of docs/results.md's tables.

bench/records/other_gpus/ has a record for each GPU, of `python -m bench --suite layer` or of `python -m bench.card`.
"""

import json
import statistics
from collections.abc import Callable, Iterable

from bench import cases
from bench.recorded import RECORDS, Records, title
from bench.table import PASSES, merged_layers, number, rows_of, span

FOLDER = RECORDS / "other_gpus"
PEER, SONICMOE = "torch_grouped_mm", "sonicmoe"
SHOWN = PASSES[2:]  # calls back to back
ABOUT = f"""Calls back to back on other GPUs. Times of torch ({title(PEER)}) and SonicMoE are over this package's,
peaks this package's over theirs."""


def records() -> list[dict]:
    """Oldest first, those of bench.card last. Raises ValueError for one without a layer to show."""
    found = {path: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    for path, record in found.items():
        if not layers(record):
            expected = f"a layer that ran both passes as moeblaze, cublas_bound and {PEER}"
            got = sorted({row["provider"] for row in rows_of(record, "layer")})
            raise ValueError(f"bench.report: {path.name}: expected {expected}, got none among the providers {got}")
    return sorted(found.values(), key=lambda record: ("tier" in record, record["datetime"]))


def name_of(record: dict) -> str:
    """Of the GPU, and of the kernels where bench.card chose them."""
    return record["machine_info"]["gpu"] + (", portable kernels" if "tier" in record else "")


def by_gpu() -> dict[str, list[dict]]:
    """Rows of `layers` by `name_of`, of the newest record that has the case, in the order of cases."""
    found: dict[str, dict[str, dict]] = {}
    for record in records():
        of_gpu = found.setdefault(name_of(record), {})
        of_gpu |= {row["case"]: row for row in layers(record)}
    return {gpu: [rows[case] for case in cases.LAYERS if case in rows] for gpu, rows in found.items()}


def layers(record: dict) -> list[dict]:
    """Of each case that ran both passes beside its bound and the peer: case, GPU's times, and ratios by name; of
    SonicMoE those of a training pass, or None."""
    entries = {(e["case"], e["provider"]): e for e in merged_layers(rows_of(record, "layer"))}
    found = []
    for case in (name for name in cases.LAYERS if (name, "moeblaze") in entries):
        ours, peer = entries[case, "moeblaze"], entries.get((case, PEER), {})
        if all(f"{what}_ratio" in ours and what in peer for what in SHOWN):
            of_passes = {what: (ours[what], ours[f"{what}_ratio"], peer[what] / ours[what]) for what in SHOWN}
            more = peer["peak_mib"] - ours["peak_mib"]
            peaks = {"peak": ours["peak_mib"] / peer["peak_mib"], "peer_more_mib": more}
            about = {"card": card_of(record), "commit": record["commit_info"]["id"]}
            sonicmoe = entries.get((case, SONICMOE)) and {
                "time": entries[case, SONICMOE][SHOWN[1]] / ours[SHOWN[1]],
                "more": entries[case, SONICMOE]["peak_mib"] - ours["peak_mib"],
                "peak": ours["peak_mib"] / entries[case, SONICMOE]["peak_mib"],
            }
            found.append({"case": case, "passes": of_passes, SONICMOE: sonicmoe, **peaks, **about})
    return found


def card_of(record: dict) -> str:
    """The GPU, its power limit, driver and torch."""
    machine = record["machine_info"]
    return f"{name_of(record)}, {machine['power_limit_w']} W, driver {machine['driver']}, torch {machine['torch']}"


def sources(rows: list[dict]) -> str:
    """Each card and commit of the rows, where there are several with their cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        found.setdefault((row["card"], row["commit"]), []).append(row["case"])
    lines, before = [], None
    for (card, commit), names in found.items():
        about = f"commit `{commit}`" + (f" ({', '.join(names)})" if len(found) > 1 else "")
        lines.append(about if card == before else f"{card}, {about}")
        before = card
    return "; ".join(lines) + "."


def headline() -> list[str]:
    """One sentence for each GPU; none without a record."""
    lines = []
    for gpu, rows in by_gpu().items():
        bound, speed = ([row["passes"][SHOWN[1]][i] for row in rows] for i in (1, 2))
        lines += [
            f"{gpu}: a training pass takes {span(bound)} times as long as its products in",
            f"cuBLAS, and torch's `grouped_mm` {span(speed)} times as long as this layer "
            f"(median {statistics.median(speed):.2f}, {len(rows)} layers).",
        ]
        if beside := [row[SONICMOE] for row in rows if row[SONICMOE]]:
            times, peaks = ([found[name] for found in beside] for name in ("time", "peak"))
            lines += [
                f"SonicMoE takes {span(times)} times as long (median {statistics.median(times):.2f}, "
                f"{len(beside)} layers),",
                f"and this layer needs {statistics.median(peaks):.2f} of its peak memory ({span(peaks)}).",
            ]
    return lines


def of_gpu(gpu: str) -> Records:
    """All records of a GPU by `name_of`, those of its folder too, oldest first."""
    found = {str(path): json.loads(path.read_text()) for path in FOLDER.rglob("*.json") if path.stem != "fp8"}
    mine = {path: record for path, record in found.items() if name_of(record) == gpu}
    return Records(dict(sorted(mine.items(), key=lambda item: (item[1]["datetime"], item[0]))))


def section(
    table: Callable[[list[str], Iterable[list[str]]], list[str]],
    peers: Callable[[Records], list[str]],
) -> list[str]:
    """Lines of docs/results.md; none without a record.

    peers: lines of a table of layers that have no column, in records.
    """
    lines = []
    for gpu, rows in by_gpu().items():
        lines += ["", sources(rows)]
        passes = ("forward", "with backward")
        head = [f"{name}{what}" for name in passes for what in (", ms", ", over bound", ", torch's time")]
        head = ["case", *head, "our peak over its"]
        with_sonicmoe = any(row[SONICMOE] for row in rows)
        head += ["with backward, SonicMoE's time", "our peak over its"] * with_sonicmoe
        made = []
        for row in rows:
            cells = [row["case"]]
            for seconds, bound, speed in row["passes"].values():
                cells += [number(seconds * 1e3), f"{bound:.2f}", f"{speed:.2f}"]
            cells.append(f"{row['peak']:.2f}")
            if with_sonicmoe:
                found = row[SONICMOE]
                cells += [f"{found['time']:.2f}", f"{found['peak']:.2f}"] if found else ["-", "-"]
            made.append(cells)
        lines += table(head, made)
        every = of_gpu(gpu)
        if beside := peers(every):
            notes = dict.fromkeys(record["note"] for record in every.by_name.values() if "note" in record)
            lines += ["", f"Other layers on {gpu}:", *beside, *notes]
    return ["", "## Other GPUs", "", ABOUT, *lines] if lines else []
