"""The suite for several GPUs in docs/results.md: one row per case, way of the rows and number of GPUs."""

import json

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
    "copies-bf16-stored": "copy engines, stored by products",
    "copies-bf16-stored-fp8-e4m3": "copy engines, stored by products; fp8, weights in e4m3",
    "copies-bf16-stored-graph": "copy engines, stored by products; in a CUDA graph",
}
ABOUT = """Weak scaling (`python -m bench.parallel`): every GPU has the case's tokens. P GPUs share the experts, or
under FSDP2 the parameters of four layers. Efficiency is the time of forward and backward on one GPU over that on P.
The time on one GPU was measured on all GPUs at once, for fp8 in fp8, for a CUDA graph in one. The peer is a layer in
the order of torchtitan's default dispatcher, written in public torch calls. Speed is the peer's time over this
package's. Share is this package's peak memory over the peer's in the same run. FSDP2 uses NCCL's collectives or those
of `interop.fsdp.CopyEngines`. Gradients travel in float32 or bfloat16, or the products of the weight gradients
store them where they are summed. The last layer keeps its parameters after forward. The paper's Figure 7 shows only
FSDP and prints no numbers."""


def rows() -> list[dict]:
    """Of all records, a file for each number of GPUs of a machine, by case."""
    found: dict[tuple, dict] = {}
    for path in sorted(FOLDER.glob("*.json")):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            key = tuple(row[name] for name in ("case", "what", "provider", "gpus"))
            ms = row.get("back_to_back_ms", row.get("ms"))  # of calls back to back where the record has them
            found[key] = row | {"ms": ms, "gpu": record["environment"]["gpu"], "commit": record["commit"]}
    return sorted(found.values(), key=lambda row: row["case"])


def expert_cells(found: list[dict]) -> list[list[str]]:
    """Cells: case, GPUs, experts' way, ms, efficiency, speed over the peer, peak MiB, share of the peer's."""
    peers = {(r["case"], r["gpus"]): r for r in found if r["provider"] == PEER and r["ms"]}
    lines = []
    for row in found:
        if row["what"] != "experts" or not row["ms"] or row["gpus"] == 1:
            continue
        peer = peers.get((row["case"], row["gpus"]))
        beside = peer is not None and row is not peer
        peak = row.get("peak_mib")  # None of a CUDA graph
        lines.append(
            [
                row["case"],
                str(row["gpus"]),
                TITLES[row["provider"]],
                number(row["ms"]),
                f"{100 * row['efficiency']:.0f}%",
                number(peer["ms"] / row["ms"] if beside else None),
                "-" if peak is None else f"{peak:,.0f}",
                number(peak / peer["peak_mib"] if beside and peak is not None else None),
            ]
        )
    return lines


def fsdp_cells(found: list[dict]) -> list[list[str]]:
    """Cells: case, GPUs, collectives, ms, efficiency, peak MiB."""
    alone = {"moeblaze": "-", "moeblaze-fp8": "-; fp8", "moeblaze-graph": "-; in a CUDA graph"}
    return [
        [
            r["case"],
            str(r["gpus"]),
            (FSDP_TITLES if r["gpus"] > 1 else alone)[r["provider"]],
            number(r["ms"]),
            f"{100 * r['efficiency']:.0f}%",
            f"{r['peak_mib']:,.0f}" if "peak_mib" in r else "-",
        ]
        for r in found
        if r["what"] == "fsdp" and r["ms"]
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
            f"Under FSDP2 each of {gpus} GPUs reaches {engines} of its speed alone if copy engines move the weights,",
            f"{graph} if steps are a CUDA graph, too, and {nccl} with NCCL's collectives.",
        ]
    return lines


def _percent(found: list[dict]) -> str:
    values = [row["efficiency"] for row in found]
    return f"{100 * min(values):.0f} to {100 * max(values):.0f}%"


def section(table) -> list[str]:
    """Lines of the page; none without a record."""
    found = rows()
    if not found:
        return []
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in found))
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
    head = ["case", "GPUs", "experts", "ms", "efficiency", "speed", "peak, MiB", "share"]
    lines += ["", "### Expert parallelism, forward and backward", *table(head, expert_cells(found))]
    head = ["case", "GPUs", "collectives, gradients", "ms", "efficiency", "peak, MiB"]
    return [*lines, "", "### FSDP2, four layers, forward and backward", *table(head, fsdp_cells(found))]
