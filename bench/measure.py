"""Device time, memory, and the machine they were measured on.

How a row is timed. The GPU's clock follows its power limit, and a card that was idle runs its first products faster
than one that trains. So `keep_busy` first calls the very work that is to be timed, back to back, until the GPU has
been at it for a fixed time. For a layer come then calls that the host enqueues without waiting, as a training step
does, for a whole swing of the clock (`back_to_back_seconds`, their mean). Last come the rounds, each between two CUDA
events and waited for, so that a layer's time has the host's share of one call in it. Single kernels get a call ahead
of the first event in each round (`lead`), behind which their launch hides.
"""

import ctypes
import functools
import gc
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.inputs import has_gpu

MIB = 2**20
BUSY_SECONDS = 0.4  # before a row of the layer or its products
BRIEFLY = 0.05  # before one that is bound by memory, far from the power limit
ROUND_SECONDS = 0.4  # of rounds, or as many as asked for if those take longer: the clock swings around its limit
# Of calls back to back. The driver holds an average of the power to its limit: a quarter of a second into a load the
# clock falls for as long, and again a second later, by 10% in cuBLAS and by 20% in these kernels.
SWING_SECONDS = 1.0
# Of a copy, read and written. In a graph, copies of 512, 544 and 1024 MiB ran at 2.76 TB/s, outside of one at 4.2.
LONG_BYTES = 2**28
QUARTILES = ("q1", "median", "q3")
_START = time.monotonic()


class DeviceClock:
    """A clock that only device work moves: pytest-benchmark reads it before and after a round.

    So its statistics, and its comparison of two records, are of device time by CUDA events, never of the host's.
    Without a GPU it runs by the host's clock.
    """

    __name__ = "device_clock"  # pytest-benchmark prints a timer's name

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, work: Callable[[], object], calls: int = 1, lead: bool = False) -> None:
        """Runs `work`, which makes `calls` calls, and moves the clock by the seconds of one of them.

        lead: runs it once more ahead of that, untimed, so that the GPU is at work while the host launches.
        """
        if not has_gpu():
            start = time.perf_counter()
            work()
            self.now += (time.perf_counter() - start) / calls
            return
        if lead:
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        self.now += start.elapsed_time(end) / 1000 / calls


CLOCK = DeviceClock()


def keep_busy(work: Callable[[], object], seconds: float = BUSY_SECONDS) -> tuple[dict[str, float], float]:
    """Calls `work` until the GPU has been at it for `seconds`. Does not wait at the end.

    Calls are enqueued in batches of about 20 ms, of which no more than two are in the queue.
    Returns the GPU's state halfway and the seconds of a first call; ({}, 0.0) without a GPU.
    """
    if not has_gpu():
        return {}, 0.0
    work()  # compiles, tunes, fills allocators
    once = DeviceClock()
    once.run(work)
    batch = max(1, min(64, round(0.02 / once.now)))
    state: dict[str, float] = {}
    start = before = torch.cuda.Event(enable_timing=True)
    start.record()
    elapsed = 0.0
    while elapsed < seconds:
        for _ in range(batch):
            work()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        before.synchronize()
        elapsed, before = start.elapsed_time(before) / 1000, end
        if not state and elapsed >= seconds / 2:
            state = gpu_state()
    return state, once.now


def back_to_back_seconds(work: Callable[[], object], seconds_of_one: float, total: float = SWING_SECONDS) -> float:
    """Mean device seconds of a call among calls that the host enqueues without waiting, for about `total` seconds."""
    calls = max(4, round(total / seconds_of_one)) if has_gpu() else 2

    def run_all():
        for _ in range(calls):
            work()

    work()  # the host is ahead when the first event comes
    clock = DeviceClock()
    clock.run(run_all, calls)
    return clock.now


def host_microseconds(
    named: dict[str, Callable[[], object]], calls: int, rounds: int, *, waits: bool
) -> dict[str, dict[str, float]]:
    """Median and quartiles of one call by name, by the host's clock, over rounds of so many calls without a wait.

    The order of the functions changes from round to round. waits: whether a round ends when the GPU is done.
    """
    wait = torch.cuda.synchronize if has_gpu() else lambda: None
    found: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds):
        for name in random.sample(list(named), len(named)):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                named[name]()
            if waits:
                wait()
            found[name].append((time.perf_counter() - start) / calls * 1e6)
    wait()
    return {name: dict(zip(QUARTILES, statistics.quantiles(us, n=4), strict=True)) for name, us in found.items()}


def in_a_row(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """All `calls` by the host, for copies of so many bytes (`LONG_BYTES`) that it is far ahead of the GPU."""

    def run_all():
        for call in calls:
            call()

    return run_all


def in_graph(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Replays all `calls` as one CUDA graph, so that the host's launch times do not count; a loop without a GPU.

    `calls` that use different buffers keep the L2 cache cold for one another. Results are kept, so that no call
    gets the memory that the one before it has just written.
    """

    def run_all():
        return [call() for call in calls]

    if not has_gpu():
        return run_all
    run_all()  # compiles, and fills allocators
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run_all()

    def replay():
        graph.replay()
        return kept

    return replay


def sets_for_cold_cache(bytes_per_call: int, most: int = 20) -> int:
    """How many input sets to rotate so that they exceed the L2 cache twice."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size if has_gpu() else 0
    return max(2, min(most, -(-2 * cache // max(bytes_per_call, 1)) + 1)) if cache else 2


def saved_mib(run: Callable[[], torch.Tensor], excluded: Sequence[torch.Tensor]) -> float:
    """MiB that saved-tensor hooks see during `run`, each storage once, less those of `excluded`."""
    own = {t.untyped_storage().data_ptr() for t in excluded}
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    del out
    return sum(size for pointer, size in kept.items() if pointer not in own) / MIB


def peak_mib(run: Callable[[], Sequence[torch.Tensor]]) -> float | None:
    """Peak MiB that torch's allocator gives out during `run`, less what was there before and the results.

    None without a GPU. `run` must have run before: tuning and compilation allocate too.
    """
    if not has_gpu():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    size = sum({r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results}.values())
    return (torch.cuda.max_memory_allocated() - before - size) / MIB


def release() -> None:
    """Gives cached memory back: the next provider's peak and allocations start alike."""
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


def copy_gb_per_s() -> float:
    """GB/s read and written by a copy of 1 GiB: what a memory-bound kernel can reach here."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(256)
    target = torch.empty_like(source)
    keep_busy(lambda: target.copy_(source), BRIEFLY)
    clock, times = DeviceClock(), []
    for _ in range(7):
        before = clock()
        clock.run(lambda: target.copy_(source))
        times.append(clock() - before)
    return 2 * 2**30 / statistics.median(times) / 1e9


def matmul_tflops(n: int = 8192) -> float:
    """TFLOP/s of a square bf16 product through cuBLAS in steady use: what a compute-bound kernel can reach here."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    keep_busy(lambda: a @ b)
    clock, times = DeviceClock(), []
    for _ in range(12):
        before = clock()
        clock.run(lambda: a @ b)
        times.append(clock() - before)
    return 2 * n**3 / statistics.median(times) / 1e12


@functools.cache
def ceilings() -> dict[str, float]:
    """What this GPU reaches here and now: a copy's GB/s and a product's TFLOP/s; {} without one."""
    return {"copy_gb_per_s": copy_gb_per_s(), "matmul_tflops": matmul_tflops()} if has_gpu() else {}


def roofline_seconds(flops: int, nbytes: int) -> float | None:
    """The least time for this work at the ceilings, or None without a GPU."""
    if not ceilings():
        return None
    return max(flops / ceilings()["matmul_tflops"] / 1e12, nbytes / ceilings()["copy_gb_per_s"] / 1e9)


@functools.cache
def _bus_id() -> str:
    """The PCI address of this process's GPU, as the driver's tools number GPUs whatever CUDA_VISIBLE_DEVICES says.

    Raises OSError without CuPy.
    """
    from moeblaze_cupy.cuda import loader

    try:
        return loader.import_cupy().cuda.runtime.deviceGetPCIBusId(0)
    except RuntimeError as error:  # CuPy's own errors too
        raise OSError(str(error)) from error


@functools.cache
def _nvml():
    """The driver's management library, and its handle of the GPU. Raises OSError where it is not there."""
    nvml, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(_bus_id().encode(), ctypes.byref(handle)):
        raise OSError("NVML does not answer")
    return nvml, handle


def gpu_state() -> dict[str, float]:
    """Clocks (MHz), power (W) and temperature now, by NVML; {} where it does not answer. Takes well below a
    millisecond, so that a busy GPU stays busy."""
    if not has_gpu():
        return {}

    def ask(what: str, *kind: int) -> int:
        value = ctypes.c_uint()
        if getattr(nvml, f"nvmlDeviceGet{what}")(handle, *kind, ctypes.byref(value)):
            raise OSError(f"NVML does not know {what}")
        return value.value

    try:
        nvml, handle = _nvml()
        sm, memory, gpu_sensor = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU
        return {
            "sm_mhz": ask("ClockInfo", sm),
            "memory_mhz": ask("ClockInfo", memory),
            "power_w": ask("PowerUsage") / 1000,
            "celsius": ask("Temperature", gpu_sensor),
        }
    except (AttributeError, OSError):  # a library without one of these functions, or none
        return {}


def _smi(*fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={_bus_id()}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def commit() -> str:
    """The checkout's commit, or "unknown" where there is no git."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def record(commit_id: str | None = None, **body) -> dict:
    """Returns a record: its machine, its commit, and the body. commit_id: names the commit where there is no git."""
    return {"machine_info": environment(), "commit_info": {"id": commit_id or commit()}, **body}


def write_record(record: dict, path: str | Path) -> None:
    """Writes it with `wall_s`, the seconds since the program started: what it takes to measure this again."""
    whole = {**record, "wall_s": round(time.monotonic() - _START, 1)}
    Path(path).write_text(json.dumps(whole, indent=1) + "\n")


def row_of_own_process(module: str, of_row: Sequence[Any], seconds: float | None = None, **environment: str) -> dict:
    """The row that a benchmark prints for `--row`, measured in a process of its own.

    Raises RuntimeError with the end of what it wrote if it fails, subprocess.TimeoutExpired after so many seconds.
    """
    command = [sys.executable, "-m", module, "--row", json.dumps(of_row)]
    where: dict[str, Any] = {"cwd": Path(__file__).parent.parent, "env": os.environ | environment}
    done = subprocess.run(command, **where, capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{module}: {of_row}: expected a row, got {done.stderr[-2000:]}")
    row: dict = json.loads(done.stdout.splitlines()[-1])
    return row


PEER_PACKAGES = (
    "torchao",
    "sonic-moe",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "liger-kernel",
    "scattermoe",
    "momoe",
    "megablocks",
)


def environment() -> dict:
    """What a record says of its machine: GPU, driver, limits and versions, no host name."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x"),
        "peers": {name: version(name) for name in PEER_PACKAGES if version(name)},
    }
    if not has_gpu():
        return {"gpu": None, **facts}
    properties = torch.cuda.get_device_properties(0)
    try:
        driver, power = (text.strip() for text in _smi("driver_version", "power.limit").split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        driver = power = None
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "power_limit_w": power,
        **ceilings(),
        **facts,
    }
