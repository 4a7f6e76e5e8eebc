"""What the committed records say: rows of the newest record that has them, and ratios within one record.

Ratios are of rows of one record, measured in one run: the GPU's clocks move with its power limit, so times of two
runs do not compare well. Where two records hold the same row, the newer one speaks.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from bench import cases
from bench.table import PASSES, merged_layers, rows_of
from moeblaze_cupy.tools import memory

RECORDS = Path(__file__).resolve().parent / "records"
MIB = 2**20
OURS = ("moeblaze", "moeblaze_recompute", "moeblaze_paper")
POLICIES = {"moeblaze": "minimal", "moeblaze_recompute": "recompute", "moeblaze_paper": "paper"}
# how others are called in tables; ours keep their names
TITLES = {
    "cublas_bound": "cuBLAS bound",
    "cublas_and_traffic": "cuBLAS and copies",
    "torch_grouped_mm": "torch grouped_mm",
    "torch_routed": "torch, loop over experts",
    "torch_sort": "torch.sort",
    "sonicmoe": "SonicMoE",
    "quack": "QuACK",
    "liger": "Liger",
    "scattermoe": "ScatterMoE",
    "momoe_100": "MoMoE, all saved",
    "momoe_0": "MoMoE, none saved",
    "megablocks": "MegaBlocks",
}


@dataclass(frozen=True)
class Records:
    """All committed records, oldest first, by file name."""

    by_name: dict[str, dict]

    @classmethod
    def load(cls, folder: Path = RECORDS, others: tuple[str, ...] = ()) -> "Records":
        """Those of a folder, without what the names in `others` are of."""
        paths = (path for path in sorted(folder.glob("*.json")) if path.stem not in others)
        found = {path.stem: json.loads(path.read_text()) for path in paths}
        return cls(dict(sorted(found.items(), key=lambda item: (item[1]["datetime"], item[0]))))

    def rows(self, group: str) -> list[dict]:
        """Rows of a group, each of the newest record that has it, with ratios to that record's own bound."""
        newest: dict[tuple, dict] = {}
        for record in self.by_name.values():
            rows = merged_layers(rows_of(record, group)) if group == "layer" else rows_of(record, group)
            for row in rows:
                names = ("case", "order", "provider", "pass", "kernel", "rows")
                newest[tuple(row.get(name) for name in names)] = row
        return list(newest.values())

    def layers(self) -> list[dict]:
        """Layer rows with random routing: others stand beside these in a table of their own."""
        return [row for row in self.rows("layer") if row["routing"] == "random"]

    def entries(self) -> dict[tuple[str, str, str], dict]:
        """The same by case, memory order and provider."""
        return {(row["case"], row["order"], row["provider"]): row for row in self.layers()}


def title(name: str) -> str:
    """A provider's name in tables and plots."""
    return TITLES.get(name, name)


def beside_peers(records: Records) -> dict[tuple[str, str], dict[str, float]]:
    """By case and other layer, of the newest record that holds both: its times over this package's, by the names of
    PASSES, and "peak", this package's over its."""
    found = {}
    for record in records.by_name.values():
        entries = merged_layers(rows_of(record, "layer"))
        rows = {(e["case"], e["provider"]): e for e in entries if e["order"] == "transposed"}
        for (case, name), entry in rows.items():
            ours = rows.get((case, "moeblaze"), {})
            times = {what: entry[what] / ours[what] for what in PASSES if what in entry and what in ours}
            if name in (*OURS, "cublas_bound", "cublas_and_traffic") or not times:
                continue
            if "peak_mib" in entry and "peak_mib" in ours:
                times["peak"] = ours["peak_mib"] / entry["peak_mib"]
            found[case, name] = times
    return found


def routed_mib(case: cases.LayerCase) -> float:
    """What a layer with routed buffers would keep."""
    shape = memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation)
    return memory.routed_layer(shape).saved_bytes / MIB
