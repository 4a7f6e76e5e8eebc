"""Times of the dispatch build beside a copy of the same bytes and torch.sort, as one JSON record.

python bench/record_dispatch.py --out bench/records/NAME.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from record import environment

import moeblaze_cupy as mb

MODELS = {  # E, k, most times the copy at a million tokens
    "qwen3": (128, 8, 2.5),
    "dsv3": (256, 8, 3.0),
    "dbrx": (16, 4, 2.5),
    "mixtral": (8, 2, 3.0),
    "gptoss": (128, 4, 2.5),
    "granite": (40, 8, 2.5),
}


def routing(L: int, E: int, k: int, kind: str, dtype=torch.int32) -> torch.Tensor:
    """(L, k) ids: k distinct uniform experts, all slots on one expert, or Zipf(1.2) over the experts with repeats."""
    if kind == "one":
        return torch.full((L, k), E // 2, dtype=dtype, device="cuda")
    if kind == "zipf":
        p = torch.arange(1, E + 1, device="cuda", dtype=torch.float64) ** -1.2
        return torch.multinomial(p, L * k, replacement=True).reshape(L, k).to(dtype)
    chunks = [torch.rand(min(2**18, L - i), E, device="cuda").topk(k, dim=1).indices for i in range(0, L, 2**18)]
    return torch.cat(chunks).to(dtype)


def sort_dispatch(ids: torch.Tensor, E: int):
    """The same lists by a stable sort."""
    flat = ids.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(flat)
    inverse[order] = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    offsets = torch.searchsorted(experts, torch.arange(E + 1, device=flat.device, dtype=torch.int32), out_int32=True)
    return (order // ids.shape[1]).int(), offsets, inverse


def graph_us(calls, repeats: int = 15) -> float:
    """Median over graph replays of the time of one of `calls`, in us; several sets of buffers keep the L2 cold."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for call in calls:
            kept.append(call())
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(calls))
    return sorted(times)[repeats // 2]


def measure(name: str, L: int, E: int, k: int, kind: str = "uniform", dtype=torch.int32, peers: bool = True) -> dict:
    slots = L * k
    sets = 2 if slots > 2**25 else max(4, min(20, 2**26 // max(slots, 1)))
    ids = [routing(L, E, k, kind, dtype) for _ in range(min(sets, 4))]
    row = {"case": name, "L": L, "E": E, "k": k, "routing": kind, "dtype": str(dtype)[6:]}
    row["moeblaze_us"] = graph_us([lambda i=i: mb.build_dispatch(ids[i % len(ids)], E) for i in range(sets)])
    # 12 bytes per slot, read and written together: 4 read, 8 written by dispatch; 6 and 6 by the copy
    buffers = [
        torch.zeros(max(6 * slots, 16), dtype=torch.uint8, device="cuda").random_(256) for _ in range(min(sets, 4))
    ]
    row["copy_us"] = graph_us([lambda i=i: buffers[i % len(buffers)].clone() for i in range(sets)])
    if peers:
        row["torch_sort_us"] = graph_us([lambda i=i: sort_dispatch(ids[i % len(ids)], E) for i in range(min(sets, 4))])
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--quick", action="store_true", help="only the million-token and the small cases")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    rows = []
    for name, (E, k, _) in MODELS.items():
        rows.append(measure(name, 2**20, E, k))
        rows.append(measure(name, 8192, E, k, peers=False))
        rows.append(measure(name, 64, E, k, peers=False))
    for name in ("qwen3", "mixtral") if options.quick else MODELS:
        E, k, _ = MODELS[name]
        rows += [measure(name, 2**20, E, k, kind, peers=False) for kind in ("one", "zipf")]
    if not options.quick:
        rows.append(measure("qwen3", 2**20, 128, 8, dtype=torch.int64, peers=False))
        rows.append(measure("qwen3", 2**24, 128, 8, peers=False))
        rows.append(measure("E1024", 2**20, 1024, 8, peers=False))
        rows.append(measure("E4096", 2**20, 4096, 8, peers=False))
        rows.append(measure("k64", 2**17, 128, 64, peers=False))
    record = {"environment": environment(options.commit), "rows": rows}
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    columns = ("L", "E", "k", "routing", "dtype", "ours us", "copy us", "ratio", "sort us")
    print(f"{'case':8}", *(f"{c:>9}" for c in columns))
    for r in rows:
        shape = (r["L"], r["E"], r["k"], r["routing"], r["dtype"])
        times = (r["moeblaze_us"], r["copy_us"], r["moeblaze_us"] / r["copy_us"], r.get("torch_sort_us", float("nan")))
        print(f"{r['case']:8}", *(f"{v:>9}" for v in shape), *(f"{v:9.2f}" for v in times))


if __name__ == "__main__":
    main()
