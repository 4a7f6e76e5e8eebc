"""Timing and the JSON record of one run on one GPU.

python bench/record.py --cases conf3,qwen30b --out bench/records/NAME.json
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import LAYERS
from providers import Bound, Ours, layer_inputs


def median_ms(run, repeats: int = 12, warmups: int = 3) -> tuple[float, float]:
    """Median and half the inter-quartile range of CUDA-event times, in ms."""
    for _ in range(warmups):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    n = len(times)
    return times[n // 2], (times[3 * n // 4] - times[n // 4]) / 2


def saved_mib(run, excluded) -> float:
    """MiB that saved-tensor hooks see during `run`, less the storages in `excluded`."""
    storages = {t.untyped_storage().data_ptr() for t in excluded}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    del out
    return sum(size for pointer, size in kept.items() if pointer not in storages) / 2**20


def peak_mib(run) -> float:
    """Peak MiB allocated while `run` runs, less what was there before and the gradients it returns."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = run()
    torch.cuda.synchronize()
    results = sum(g.untyped_storage().nbytes() for g in gradients)
    return (torch.cuda.max_memory_allocated() - before - results) / 2**20


def environment(commit: str) -> dict:
    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    properties = torch.cuda.get_device_properties(0)
    smi = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    driver = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver_and_power_limit": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cupy": version("cupy-cuda13x") or version("cupy-cuda12x"),
        "commit": commit,
    }


def measure(case, order: str) -> list[dict]:
    inputs = layer_inputs(case, order)
    rows = []
    for name, provider in (("cublas_bound", Bound(case, inputs)), ("moeblaze", Ours(case, inputs))):
        forward, forward_spread = median_ms(provider.forward)
        both, both_spread = median_ms(provider.forward_backward)
        row = {
            "case": case.name,
            "order": order,
            "provider": name,
            "shape": [case.L, case.d, case.h, case.E, case.k],
            "forward_ms": forward,
            "forward_spread_ms": forward_spread,
            "forward_backward_ms": both,
            "forward_backward_spread_ms": both_spread,
        }
        if isinstance(provider, Ours):
            row["saved_mib"] = saved_mib(provider.forward, [*provider.leaves, inputs["ids"]])
            row["saved_formula_mib"] = (
                2 * case.L * case.k * case.h * 2 + 20 * case.L * case.k
            ) / 2**20  # 2*L*k*h elements and at most 20 bytes per slot, x excluded
            row["peak_mib"] = peak_mib(provider.forward_backward)
        rows.append(row)
        provider = None
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="conf1,conf3,conf5,qwen30b,tab2_128k")
    parser.add_argument("--orders", default="transposed,row")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--suite", help="file whose last line is the gpu suite's summary")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    record = {"environment": environment(options.commit), "rows": []}
    if options.suite:
        record["gpu_suite"] = Path(options.suite).read_text().strip().splitlines()[-1].strip("= ")
    for name in options.cases.split(","):
        for order in options.orders.split(","):
            record["rows"] += measure(LAYERS[name], order)
            torch.cuda.empty_cache()
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    columns = ("bound f", "f+b", "ours f", "f+b", "f/bound", "fb/bound")
    print(f"{'case':10} {'order':10}", *(f"{c:>8}" for c in columns), "saved peak MiB")
    for bound, ours in zip(record["rows"][::2], record["rows"][1::2], strict=True):
        times = [row[f"{what}_ms"] for row in (bound, ours) for what in ("forward", "forward_backward")]
        ratios = times[2] / times[0], times[3] / times[1]
        print(
            f"{ours['case']:10} {ours['order']:10}",
            *(f"{t:8.3f}" for t in times),
            *(f"{r:8.2f}" for r in ratios),
            end="",
        )
        print(f" {ours['saved_mib']:.0f} {ours['peak_mib']:.0f}")


if __name__ == "__main__":
    main()
