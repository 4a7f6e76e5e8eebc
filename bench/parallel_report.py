"""The suite for several GPUs in docs/results.md: one row per case and number of GPUs, a column per way."""

import json
import statistics
from pathlib import Path

from bench.recorded import RECORDS
from bench.table import number, span

FOLDER = RECORDS / "parallel"
PEER = "slots"
STORED = "copies-bf16-stored"
TITLES = {
    "pull": "moeblaze-cupy, pull",
    "pull-plain": "moeblaze-cupy, pull without copies",
    "pull-fp8": "moeblaze-cupy, pull, fp8",
    "pull-fp8-rows": "moeblaze-cupy, pull, fp8, rows in e4m3",
    "pull-graph": "moeblaze-cupy, pull, in a CUDA graph",
    "exact": "moeblaze-cupy, exact",
    PEER: "torchtitan's order in torch",
}
FSDP_TITLES = {
    "moeblaze": "NCCL, float32",
    "copies": "copy engines, float32",
    "copies-bf16": "copy engines, bfloat16",
    "moeblaze-fp8": "NCCL, float32; fp8",
    "copies-bf16-fp8": "copy engines, bfloat16; fp8",
    "copies-bf16-fp8-e4m3": "copy engines, bfloat16; fp8, weights in e4m3",
    "copies-bf16-stored": "copy engines, bfloat16 stored by products",
    "copies-bf16-stored-fp8-e4m3": "copy engines, bfloat16 stored by products; fp8, weights in e4m3",
    "copies-bf16-stored-graph": "copy engines, bfloat16 stored by products; in a CUDA graph",
}
ABOUT = """Weak scaling: every GPU has the case's tokens. P GPUs share the experts, or under FSDP2 the parameters of
four layers. Efficiency is the time of forward and backward on one GPU over that on P. The time on one GPU was measured
on all GPUs at once, for fp8 in fp8, for a CUDA graph in one. The peer is a layer in the order of torchtitan's default
dispatcher, written in public torch calls. Speed is the peer's time over this package's. Share is this package's peak
memory over the peer's. Gradients of FSDP2 travel in float32 or bfloat16, or the products of the weight gradients store
them where they are summed. The last layer keeps its parameters after forward."""


def rows(folder: Path = FOLDER) -> list[dict]:
    """Of all records of a folder, by case. Raises ValueError for two kinds of GPU."""
    found: dict[tuple, dict] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            key = tuple(row[name] for name in ("case", "what", "provider", "gpus"))
            ms = row.get("back_to_back_ms", row.get("ms"))  # of calls back to back where the record has them
            found[key] = row | {"ms": ms, "gpu": record["environment"]["gpu"], "commit": record["commit"]}
    if len(gpus := {row["gpu"] for row in found.values()}) > 1:
        raise ValueError(f"bench.report: {folder.name}/: expected records of one kind of GPU, got {sorted(gpus)}")
    return sorted(found.values(), key=lambda row: row["case"])


def of_other_gpus() -> list[list[dict]]:
    """`rows` of each other kind of GPU, which has a folder."""
    return [rows(path) for path in sorted(FOLDER.iterdir()) if path.is_dir()]


def _pivot(found: list[dict], titles: dict[str, str], cell) -> tuple[list[str], list[list[str]]]:
    """Head and lines: a line per case and number of GPUs, a column per provider that any has; `cell` writes a row."""
    ways = [name for name in titles if any(row["provider"] == name and cell(row) for row in found)]
    by_place: dict[tuple[str, int], dict[str, dict]] = {}
    for row in found:
        by_place.setdefault((row["case"], row["gpus"]), {})[row["provider"]] = row
    lines = [
        [case, str(gpus), *((cell(rows[name]) if name in rows else "") or "-" for name in ways)]
        for (case, gpus), rows in by_place.items()
    ]
    return ["case", "GPUs", *(titles[name] for name in ways)], lines


def _ms(row: dict) -> str:
    return f"{number(row['ms'])} ({100 * row['efficiency']:.0f}%)"


def _peak(row: dict) -> str:
    return f"{row['peak_mib']:,.0f}" if "peak_mib" in row else ""  # a CUDA graph has none


def expert_tables(found: list[dict], table, with_peaks: bool = True) -> list[str]:
    """Times with efficiency and speed over the peer, then peak memory with its share of the peer's."""
    spread = [row for row in found if row["what"] == "experts" and row["ms"] and row["gpus"] > 1]
    peers = {(row["case"], row["gpus"]): row for row in spread if row["provider"] == PEER}

    def peer_of(row: dict) -> dict | None:
        return None if row["provider"] == PEER else peers.get((row["case"], row["gpus"]))

    def time(row: dict) -> str:
        peer = peer_of(row)
        return _ms(row) if peer is None else f"{_ms(row)[:-1]}, {number(peer['ms'] / row['ms'])})"

    def peak(row: dict) -> str:
        peer, mib = peer_of(row), _peak(row)
        return f"{mib} ({number(row['peak_mib'] / peer['peak_mib'])})" if mib and peer is not None else mib

    peaks = ["", "Peak memory in MiB, and in brackets the share:", *table(*_pivot(spread, TITLES, peak))]
    return [
        *("", "Milliseconds, and in brackets efficiency and speed:", *table(*_pivot(spread, TITLES, time))),
        *(peaks if with_peaks else ()),
    ]


def fsdp_tables(found: list[dict], table) -> list[str]:
    """Times, efficiency and peak memory; a GPU alone has a table of its own, without the 100%."""
    alone = {"moeblaze": "bf16", "moeblaze-fp8": "fp8", "moeblaze-graph": "in a CUDA graph"}
    fsdp = [row for row in found if row["what"] == "fsdp" and row["ms"]]
    one, several = ([row for row in fsdp if (row["gpus"] == 1) is here] for here in (True, False))

    def with_peak(time: str, row: dict) -> str:
        return f"{time}; {_peak(row)}" if _peak(row) else time

    head, lines = _pivot(one, alone, lambda row: with_peak(number(row["ms"]), row))
    about = ["", "Milliseconds, on several GPUs in brackets efficiency, and peak memory in MiB:"]
    return [
        *(*about, *table(head, lines)),
        *table(*_pivot(several, FSDP_TITLES, lambda row: with_peak(_ms(row), row))),
    ]


def efficiencies() -> dict[str, dict[str, float]]:
    """By case, then series: percent, on the most GPUs of the records."""
    found = rows()
    most = max((row["gpus"] for row in found), default=0)
    by_case: dict[str, dict[str, float]] = {}
    for row in found:
        if row["gpus"] == most and "efficiency" in row:
            series = row["provider"] if row["what"] == "experts" else f"FSDP2, {FSDP_TITLES[row['provider']]}"
            by_case.setdefault(row["case"], {})[series] = 100 * row["efficiency"]
    return by_case


def headline(route: str = "pull") -> list[str]:
    """On the most GPUs of the records: speed beside the peer, efficiency and share of memory; FSDP2's efficiencies.

    None without a record.
    """
    every = rows()
    found = [row for row in every if row["what"] == "experts" and row["ms"]]
    gpus = max((row["gpus"] for row in found), default=1)
    of_gpus = {name: {r["case"]: r for r in found if (r["provider"], r["gpus"]) == (name, gpus)} for name in TITLES}
    pairs = [(ours, of_gpus[PEER][case]) for case, ours in of_gpus[route].items() if case in of_gpus[PEER]]
    one_commit = statistics.mode(ours["commit"] for ours, _ in pairs) if pairs else None
    pairs = [(ours, peer) for ours, peer in pairs if ours["commit"] == one_commit]
    if gpus == 1 or not pairs:
        return []
    lines = [
        f"Experts spread over {gpus} GPUs: a training pass is {span(p['ms'] / o['ms'] for o, p in pairs)} times as",
        "fast as torch's own functions in torchtitan's order, in "
        f"{span(o['peak_mib'] / p['peak_mib'] for o, p in pairs)} of their peak memory.",
        f"Each GPU reaches {_percent([ours for ours, _ in pairs])} of its speed alone ({len(pairs)} layers).",
    ]
    fsdp = [row for row in every if row["what"] == "fsdp" and row["gpus"] == gpus]
    of_way = {
        name: [row for row in fsdp if row["provider"] == name] for name in ("moeblaze", STORED, f"{STORED}-graph")
    }
    if all(of_way.values()):
        nccl, engines, graph = map(_percent, of_way.values())
        lines += [
            f"Under FSDP2 each of {gpus} GPUs reaches {engines} of its speed alone if copy engines move the weights",
            f"and gradients are stored in bfloat16, {graph} if steps are a CUDA graph, too, and {nccl} with NCCL's",
            "collectives and gradients in float32.",
        ]
    for others in of_other_gpus():
        pulled = [row for row in others if row["provider"] == route and row["ms"]]
        sizes = sorted({row["gpus"] for row in pulled})
        kept = " and ".join(f"{_percent([row for row in pulled if row['gpus'] == size])} on {size}" for size in sizes)
        layers = len({row["case"] for row in pulled})
        lines += [f"{others[0]['gpu']}: with experts spread a GPU reaches {kept}", f"GPUs ({layers} layers)."]
    return lines


def _percent(found: list[dict]) -> str:
    values = [row["efficiency"] for row in found]
    return f"{100 * min(values):.0f} to {100 * max(values):.0f}%"


def section(table) -> list[str]:
    """Lines of the page; none without a record."""
    found = rows()
    if not found:
        return []
    of_commits: dict[str, dict[str, None]] = {}
    for row in found:
        of_commits.setdefault(row["commit"], {})[row["case"] if row["what"] == "experts" else "FSDP2"] = None
    commits = ", ".join(f"`{commit}` ({', '.join(names)})" for commit, names in of_commits.items())
    lines = [
        "",
        "## Several GPUs",
        "",
        "![Efficiency](parallel.svg)",
        "",
        ABOUT,
        "",
        f"{found[0]['gpu']}, commit {commits}.",
    ]
    lines += ["", "### Expert parallelism, forward and backward", *expert_tables(found, table)]
    lines += ["", "### FSDP2, four layers, forward and backward", *fsdp_tables(found, table)]
    for others in of_other_gpus():
        about = f"{others[0]['gpu']}, commit {', '.join(dict.fromkeys(row['commit'] for row in others))}"
        lines += ["", f"### Expert parallelism on {about}", *expert_tables(others, table, with_peaks=False)]
    return lines
