"""Runs of the language model of examples/ at once, several processes per GPU, for bench/records/language_model/.

python -m bench.language_model_runs --arm fp8,save_fp8 --seed 0,1,2 --size small --out DIR

Results of one table have the same text. The text is that of this machine's Python: where it is not the recorded one,
the recorded arms in bfloat16 run anew beside the others, and all of DIR takes the place of the records.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch

from bench.language_model_report import BASELINE, runs
from examples import corpus
from examples import language_model as lm

SCRIPT = Path(lm.__file__)


def queue(arms: list[str], seeds: list[int], size: str, text: dict) -> list[tuple[str, int]]:
    """(arm, seed) of each run; with the recorded arms in bfloat16 if their text is not `text`."""
    recorded = runs(size)
    if recorded and recorded[BASELINE][0]["text"] != text:
        print(f"text: {text}, not the recorded {recorded[BASELINE][0]['text']}: the recorded arms run anew", flush=True)
        arms = arms + [arm for arm in recorded if arm not in arms and arm != "fp32"]
    return list(product(arms, seeds))


def run(waiting: list[tuple[str, int]], gpus: int, per_gpu: int, size: str, out: Path, options: list[str]) -> int:
    """Runs all, `per_gpu` processes at a time on each GPU. Output goes to OUT/ARM-SEED.log; the number that failed."""
    free = [gpu for _ in range(per_gpu) for gpu in range(max(1, gpus))]
    waiting, going, failed = list(waiting), {}, 0
    while waiting or going:
        while waiting and free:
            (arm, seed), gpu = waiting.pop(0), free.pop(0)
            command = [sys.executable, str(SCRIPT), "--arm", arm, "--seed", str(seed), "--size", size]
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpus else {})
            with (out / f"{arm}-{seed}.log").open("w") as log:
                process = subprocess.Popen(
                    [*command, "--out", str(out), *options], stdout=log, stderr=subprocess.STDOUT, env=environment
                )
            going[process] = arm, seed, gpu, time.monotonic()
        time.sleep(0.2)
        for process in [p for p in going if p.poll() is not None]:
            arm, seed, gpu, since = going.pop(process)
            free.append(gpu)
            failed += process.returncode != 0
            last = (out / f"{arm}-{seed}.log").read_text().strip().splitlines()[-1:]
            print(
                f"GPU {gpu}, {time.monotonic() - since:.0f} s, status {process.returncode}: {''.join(last)}", flush=True
            )
    return failed


def main(*argv: str) -> int:
    """0 if every run ended."""
    parser = argparse.ArgumentParser(prog="python -m bench.language_model_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--arm", type=lm.choices(lm.ARMS), default=["fp8", "save_fp8"], metavar="A,B")
    parser.add_argument("--seed", type=lm.choices((), int), default=[0, 1, 2], metavar="0,1")
    parser.add_argument("--size", choices=lm.SIZES, default="small", help="(%(default)s)")
    parser.add_argument("--per-gpu", type=int, default=3, help="processes per GPU (%(default)s)")
    parser.add_argument("--steps", type=int, help="instead of the size's")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results, checkpoints and logs")
    args = parser.parse_args(argv or None)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.loads(json.dumps(corpus.load(args.text or corpus.default_folders(), lm.TEXT_BYTES).about))
    options = [word for folder in args.text or () for word in ("--text", str(folder))]
    options += [] if args.steps is None else ["--steps", str(args.steps)]
    waiting = queue(args.arm, args.seed, args.size, text)
    return 1 if run(waiting, torch.cuda.device_count(), args.per_gpu, args.size, args.out, options) else 0


if __name__ == "__main__":
    sys.exit(main())
