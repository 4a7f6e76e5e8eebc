"""Where the time of selections goes: each kernel of one call, as the GPU's own clock times it.

python -m bench.kernel_times [--case qwen30b_65536] [--calls 8] [--only expert_choice weights]

A row per kernel in the order of launches: median microseconds over the calls, and those from the end of the kernel
before. Inputs rotate, so that no call finds its own in the L2 cache. Calls wait for the GPU between two of them, so the
gaps are those of single launches, not of a graph's replay.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench import bench_selection, cases, inputs, table

CALLS = {
    "copy": "experts",
    "expert_choice": "experts",
    "round_tokens": "experts",
    "dispatch": "capacity",
    "position": "capacity",
    "choice": "capacity",
    "weights": "capacity",
    "priority": "capacity",
    "tokens_per_expert": "counts",
    "quantile_histogram": "quantile",
}
SHOWN = ("copy", "expert_choice", "round_tokens", "dispatch", "weights", "quantile_histogram")


def on_gpu(events: list) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of what ran on the GPU, by start."""
    found = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in found), key=lambda e: e[1])


def by_position(calls: int, events: list[tuple[str, float, float]]) -> list[list[str]]:
    """A row of each kernel of a call: name, median time, median gap before it. All calls launch the same kernels."""
    number = len(events) // calls
    names = [name for name, _, _ in events]
    if names != names[:number] * calls:
        raise RuntimeError(f"calls launch different kernels: {names}")
    rows, total = [], 0.0
    for i in range(number):
        of_kernel = range(i, len(events), number)
        time = statistics.median(events[j][2] - events[j][1] for j in of_kernel)
        gap = statistics.median(events[j][1] - events[j - 1][2] for j in of_kernel) if i else 0.0
        total += time
        rows.append([f"  {names[i][:60]}", f"{time:.2f}", f"{gap:.2f}"])
    return [*rows, ["  sum", f"{total:.2f}", ""]]


def kernels(work: list[Callable[[], object]]) -> list[list[str]]:
    """Rows of what all calls of `work` have in common."""
    for call in work:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in work:
            call()
            torch.cuda.synchronize()
    return by_position(len(work), on_gpu(found.events()))


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_times", description=__doc__.splitlines()[0])
    parser.add_argument("--case", default=bench_selection.MANY, choices=cases.LAYERS | cases.DISPATCHES, metavar="CASE")
    parser.add_argument("--calls", type=int, default=8, help="of which the medians are taken (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=CALLS, default=SHOWN)
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    case = (cases.LAYERS | cases.DISPATCHES)[args.case]
    sets = [bench_selection.Data(case, seed) for seed in range(args.calls)]
    logits = [data.logits() for data in sets]
    rows = [["kernel", "us", "gap us"]]
    kernels([lambda: logits[0].clone()] * 2)  # the profiler's own start
    for provider in args.only:
        part = CALLS[provider]
        work = [
            lambda i=i, part=part, provider=provider: bench_selection.call(sets[i], part, provider, logits[i])
            for i in range(args.calls)
        ]
        rows += [[provider, "", ""], *kernels(work)]
    print(f"{torch.cuda.get_device_name()}: {case.name}")
    print("\n".join(table.aligned(rows, 1)))


if __name__ == "__main__":
    main()
