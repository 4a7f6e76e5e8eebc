"""Sweeps of one number of a layer's shape: time over the cuBLAS bound by that number, of each GPU that has a record.

Their rows are those of the suite `layer` in the group "sweep", in any of bench/records/*.json.
"""

from bench import cases
from bench.recorded import Records
from bench.table import merged_layers, rows_of

RATIO = "forward_backward_back_to_back_ratio"
# The number that a sweep changes, and what it keeps.
SWEEPS = {
    "granularity": ("h", "Granularity: h by equal k*h and E*h"),
    "sparsity": ("E", "Sparsity: E by equal k and h"),
}
ABOUT = """Training passes back to back with L 32,768 and d 2,048. `granularity` has k\\*h = 2,048 and E\\*h = 65,536:
as many products and weights at every h. `sparsity` has k = 8 and h = 512: the same products, and weights that grow with
E."""


def points(records: Records, sweep: str) -> dict[str, dict[str, dict[int, float]]]:
    """Times the bound of the same run by GPU, provider and the number that changes; of two records the newer speaks."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for record in records.by_name.values():
        for entry in merged_layers(rows_of(record, "sweep")):
            if entry["case"] in cases.GROUPS[sweep] and RATIO in entry and entry["provider"] != "cublas_bound":
                number = getattr(cases.LAYERS[entry["case"]], SWEEPS[sweep][0])
                of_gpu = found.setdefault(record["machine_info"]["gpu"], {})
                of_gpu.setdefault(entry["provider"], {})[number] = entry[RATIO]
    return found


def commits(records: Records) -> dict[str, list[str]]:
    """Of the records with sweeps, by GPU."""
    found: dict[str, list[str]] = {}
    for record in records.by_name.values():
        if rows_of(record, "sweep"):
            found.setdefault(record["machine_info"]["gpu"], []).append(record["commit_info"]["id"])
    return found


def section(records: Records) -> list[str]:
    """Lines of docs/results.md; none without a record."""
    shown = [sweep for sweep in SWEEPS if points(records, sweep)]
    if not shown:
        return []
    of_gpus = (
        f"{gpu}, commit {', '.join(f'`{c}`' for c in dict.fromkeys(ids))}" for gpu, ids in commits(records).items()
    )
    plots = [f"![{SWEEPS[sweep][1]}]({sweep}.svg)" for sweep in shown]
    return ["", "### Granularity and sparsity", "", ABOUT, "", f"{'; '.join(of_gpus)}.", "", *plots]
