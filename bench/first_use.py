"""First use: seconds from the imports to the first forward and backward, with an empty kernel cache and a filled one.

python -m bench.first_use --out FILE.json [--cores 2,8,16]

Each row is a process of its own on so many cores. It imports torch, CuPy and this package one after another. A step of
torch alone follows. Then it makes a `MoE` and its tokens on the GPU, and waits for the GPU after the first forward,
after the first backward of a loss, and after both again. The cold row has an empty folder for CuPy's kernel cache, the
warm row has what the cold one left there. The package's modules are compiled to bytecode first, as by an installation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import cases, table

ROOT = Path(__file__).resolve().parent.parent
CASE = "qwen30b"
CORES = (2, 8, 16)
IMPORTS = ("import torch", "import cupy", "import moeblaze_cupy.interop.torch")
STEPS = ("torch alone", "tensors", "forward", "backward", "both again")  # after the imports
PROCESS = """
import json, sys, time
device, tokens, *sizes = sys.argv[1], *map(int, sys.argv[2:])
seconds = {}

def timed(name, step):
    start = time.perf_counter()
    found = step()
    if device == "cuda" and "torch" in sys.modules and name not in IMPORTS:
        sys.modules["torch"].cuda.synchronize()
    seconds[name] = time.perf_counter() - start
    return found

for line in IMPORTS:
    if device == "cuda" or "cupy" not in line.split():
        timed(line, lambda: exec(line))
torch, MoE = sys.modules["torch"], sys.modules["moeblaze_cupy.interop.torch"].MoE
options = {"device": device, "dtype": torch.bfloat16}
plain = torch.randn(128, 128, requires_grad=True, **options)
timed("torch alone", lambda: (plain @ plain).sum().backward())
x, layer = timed("tensors", lambda: (torch.randn(tokens, sizes[0], **options).requires_grad_(), MoE(*sizes, **options)))
out = timed("forward", lambda: layer(x))
timed("backward", lambda: out.square().mean().backward())
timed("both again", lambda: layer(x).square().mean().backward())
print(json.dumps(seconds))
"""


def first_use(cores: int, cache: str, device: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each step in a new process on the first `cores` cores of this one. sizes: L, d, h, E, k."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    code = f"IMPORTS = {IMPORTS!r}\n{PROCESS}"
    done = subprocess.run(
        [sys.executable, "-c", code, device, *map(str, sizes)],
        cwd=ROOT,
        env=os.environ | {"CUPY_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    if done.returncode:
        raise RuntimeError(f"bench.first_use: expected a process that runs a layer, got\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(numbers: tuple[int, ...], device: str, case: cases.LayerCase) -> list[dict[str, Any]]:
    """A cold and a warm row for each number of cores that this machine has."""
    sizes, rows = (case.L, case.d, case.h, case.E, case.k), []
    subprocess.run([sys.executable, "-m", "compileall", "-q", "moeblaze_cupy", "interop"], cwd=ROOT, check=True)
    for cores in (number for number in numbers if number <= len(os.sched_getaffinity(0))):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                rows.append({"cores": cores, "cache": kind, "seconds": first_use(cores, cache, device, sizes)})
                print(f"first use on {cores} cores, {kind}: done", file=sys.stderr)
    return rows


def text(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table."""
    steps = [step for step in (*IMPORTS, *STEPS) if any(step in row["seconds"] for row in rows)]
    lines = [
        [
            "cores",
            "kernel cache",
            *(f"{step.removeprefix('import ').split('.')[0]}, s" for step in steps),
            "first step, s",
        ]
    ]
    for row in rows:
        seconds = row["seconds"]
        first = seconds["forward"] + seconds["backward"]
        lines.append([str(row["cores"]), row["cache"], *(f"{seconds[step]:.2f}" for step in steps), f"{first:.2f}"])
    return table.aligned(lines, 2)


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_use", description=__doc__.splitlines()[0])
    parser.add_argument("--cores", default=",".join(map(str, CORES)), metavar="N,N", help="(%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    from bench import inputs, measure

    inputs.expect_gpu(parser)
    rows = measured(tuple(map(int, args.cores.split(","))), "cuda", cases.LAYERS[CASE])
    if args.out:
        measure.write_record(measure.record(rows=rows), args.out)
    print("\n".join(text(rows)))


if __name__ == "__main__":
    main()
