"""A training step repeated from one state, and a run whose routing collapses: the same bits, and no memory that grows.

python -m bench.long_run --out FILE.json [--repeats 1000] [--steps 2000]

The model is that of examples/language_model.py, whose experts are this package's. Its other parts run under torch's
deterministic algorithms, as atomics in torch's attention or embedding would change the bits of every gradient.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it before cuBLAS is deterministic

import torch

from bench import measure
from examples import corpus
from examples import language_model as lm
from examples.progress import Progress

TEXT_BYTES = 16 << 20
SHARES = 50  # of a run, between which memory is read


def _same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """Whether all bits are equal, on the device: NaNs of equal bits are, zeros of either sign are not."""
    bits = {2: torch.int16, 4: torch.int32}
    pairs = zip(tensors, others, strict=True)
    return torch.stack([(a.view(bits[a.itemsize]) == b.view(bits[b.itemsize])).all() for a, b in pairs]).all()


def repeated(s: lm.Settings, arm: str, data: corpus.Corpus, device: str, repeats: int) -> dict:
    """How many of the repeats of one step gave the first's loss, gradients and weights, bit for bit."""
    model = lm.Model(s, arm, seed=0).to(device)
    weights = lm.MainWeights(model, torch.bfloat16)
    windows = lm.batch(data.training.to(device), 0, 0, s)
    start = [main.clone() for main in weights.main]
    first, equal = None, torch.zeros((), dtype=torch.int64, device=device)
    progress = Progress(repeats, f"repeats, {arm}")
    for repeat in range(repeats):
        with torch.no_grad():
            torch._foreach_copy_(weights.main, start)
        weights.adam.state.clear()
        weights._round()
        nats, balance = model.loss(windows)
        (nats + lm.BALANCE * balance).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        weights.step(s.lr)
        results = [nats.detach(), *gradients, *weights.main]
        first = [result.clone() for result in results] if first is None else first
        equal += _same(results, first)
        progress.update(repeat + 1)
    return {"arm": arm, "repeats": repeats, "equal": int(equal)}


def collapsing(s: lm.Settings, arm: str, data: corpus.Corpus, device: str, steps: int) -> dict:
    """Losses and memory of a run in whose middle fifth every token goes to expert 0 alone."""
    model = lm.Model(s, arm, seed=0).to(device)
    weights = lm.MainWeights(model, torch.bfloat16)
    training, held_out = data.training.to(device), data.held_out.to(device)
    between, collapsed = max(1, steps // SHARES), range(2 * steps // 5, 3 * steps // 5)
    history, plain = [], lm.route

    def route_to_one(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, ids = plain(logits, k)
        one = torch.full_like(ids, -1)
        one[:, 0] = 0
        return chosen, one

    try:
        progress = Progress(steps, f"steps, {arm}")
        for step in range(steps):
            lm.route = route_to_one if step in collapsed else plain
            nats, balance = model.loss(lm.batch(training, 0, step, s))
            (nats + lm.BALANCE * balance).backward()
            weights.step(s.lr)
            progress.update(step + 1)
            if (step + 1) % between == 0:
                loss = float(nats.detach())
                history.append({"step": step + 1, "is_collapsed": step in collapsed, "loss": loss, **_memory(device)})
    finally:
        lm.route = plain
    return {"arm": arm, "steps": steps, "history": history, "held_out_loss": lm.held_out_loss(model, held_out, s)}


def _memory(device: str) -> dict[str, int]:
    """Bytes that the frameworks hold after a step; their peaks since the last reading are let go of."""
    if device == "cpu":
        return {}
    torch.cuda.synchronize()
    import cupy

    pool = cupy.get_default_memory_pool()
    free, total = torch.cuda.mem_get_info()
    return {
        "torch_allocated": torch.cuda.memory_allocated(),
        "torch_reserved": torch.cuda.memory_reserved(),
        "cupy_used": pool.used_bytes(),
        "cupy_held": pool.total_bytes(),
        "device_used": total - free,
    }


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.long_run", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000, help="of one step (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of the run (%(default)s)")
    parser.add_argument("--size", choices=lm.SIZES, default="small", help="(%(default)s)")
    parser.add_argument("--arm", choices=("minimal", "recompute"), default="minimal", help="(%(default)s)")
    parser.add_argument("--text", type=Path, action="append", metavar="DIR", help="instead of this Python's packages")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    torch.use_deterministic_algorithms(True)
    try:
        device, s = "cuda" if torch.cuda.is_available() else "cpu", lm.SIZES[args.size]
        data = corpus.load(args.text or corpus.default_folders(), TEXT_BYTES)
        record = measure.record(size=args.size)
        for name, part, count in (("repeated", repeated, args.repeats), ("collapsing", collapsing, args.steps)):
            began = time.perf_counter()
            record[name] = part(s, args.arm, data, device, count)
            record[name]["seconds"] = time.perf_counter() - began
            if args.out:  # what there is, should the next one fail
                measure.write_record(record, args.out)
    finally:
        torch.use_deterministic_algorithms(False)
    print(f"{record['repeated']['equal']} of {args.repeats} repeats gave the same bits")
    history = record["collapsing"]["history"]
    for entry in (history[0], *(e for e in history if e["is_collapsed"]), history[-1]):
        print(", ".join(f"{name} {value:,}" for name, value in entry.items()))


if __name__ == "__main__":
    main()
