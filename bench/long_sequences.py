"""Long sequences on one 80 GB card: a layer within a limit of memory, and training steps of four layers.

python -m bench.long_sequences --out FILE.json [--part layer step] [--arm moeblaze_limit grouped_mm] [--tiny]

Each row is a process of its own with a bound of time. A row that does not fit has no numbers.
layer: one layer with save="recompute" without and with `memory_limit`, beside the peaks of a dry run.
step: four layers of Qwen3-30B-A3B in training, with an embedding, a head and AdamW, all in bf16. Tokens are random and
have no positions. Documents have 32,768. Backward recomputes each layer, and in it the attention of each document. The
loss is computed in chunks, in backward once more. "moeblaze_limit" has 16 KiB for a token and the policy of `fit_saves`
that the rest of the card has room for. The larger sizes of an arm are left out after one that does not fit.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench import cases, fp8, inputs, lora_stack, measure, providers, table, verify
from moeblaze_cupy.interop.torch import MoE, fit_saves, route
from moeblaze_cupy.tools import dry_run, memory

GIB = 2**30
CARD = 78 * GIB  # what torch may take, also on a larger card
SPARE = 3 * GIB  # for workspaces, logits and the attention of a document
LEARNING_RATE = 1e-4
ROW_SECONDS = 180.0
ROUNDS = 4  # of which the first is dropped
# Relative norms. Weight gradients are sums over chunks in float32, rounded to bf16 once.
TOLERANCES = {"out": 0.0, "x": 0.0, "weights": 1e-5, "w1": 2**-8, "w2": 2**-8}
AGREES = {"loss": 0.01, "gradient_norm": 0.02}  # between arms, whose products in bf16 are rounded differently
# Of eight ranks each has 32 of DeepSeek-V3's experts, and as many rows as its own 128k tokens have slots.
_RANK = replace(cases.LAYERS["dsv3"], name="dsv3_rank", L=2**17, E=32)
LAYERS = {
    "qwen30b_1m": (replace(cases.LAYERS["qwen30b"], L=2**20), 16 * GIB),
    "dsv3_rank": (_RANK, 12 * GIB),
    "tiny": (cases.TINY, GIB),
}


class Setting(NamedTuple):
    """document, chunk: tokens of a document, and of a chunk of the loss. sizes: tokens of a step by arm."""

    stack: lora_stack.Stack
    vocabulary: int
    document: int
    chunk: int
    sizes: dict[str, tuple[int, ...]]


LIMITED, GROUPED = "moeblaze_limit", "grouped_mm"
_SIZES = {
    LIMITED: tuple(2**n for n in (17, 18, 19, 20)),
    "moeblaze": (2**19, 2**20),
    GROUPED: tuple(n * 2**16 for n in (2, 4, 5, 6, 7)),
}
SETTINGS = {
    "qwen30b": Setting(lora_stack.STACKS["qwen30b"]._replace(layers=4), 151_936, 2**15, 4096, _SIZES),
    "tiny": Setting(lora_stack.Stack(2, 64, 64, 4, 2, (4, 2), 16), 97, 16, 24, dict.fromkeys(_SIZES, (32, 48))),
}


class GroupedMM(MoE):
    """The parameters of `MoE`, and torch's grouped products over a routed buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        weights, ids = route(functional.linear(tokens, self.router), self.k)
        return providers.over_routed_rows(tokens, ids, weights, self.w1, self.w2).view_as(x)


class DocumentLayer(lora_stack.Layer):
    def attended(self, x: torch.Tensor) -> torch.Tensor:
        whole = super().attended
        return torch.cat([checkpoint(whole, document, use_reentrant=False) for document in x.split(1)])


class Model(torch.nn.Module):
    def __init__(self, s: Setting, arm: str, tokens: int) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": inputs.device(), "dtype": torch.bfloat16}
        self.s, self.limit = s, max(4 * GIB, tokens * 2**14) if arm == LIMITED else None
        of = s.stack, made["device"], GroupedMM if arm == GROUPED else MoE
        self.embedding = torch.nn.Embedding(s.vocabulary, s.stack.d, **made)
        self.layers = torch.nn.ModuleList(DocumentLayer(*of, memory_limit=self.limit) for _ in range(s.stack.layers))
        self.norm = torch.nn.RMSNorm(s.stack.d, **made)
        self.head = torch.nn.Linear(s.stack.d, s.vocabulary, bias=False, **made)
        if self.limit is not None:
            self._fit(tokens, self.limit)

    def _fit(self, tokens: int, limit: int) -> None:
        """Gives each layer what is left while it is in backward, as the others keep their inputs alone.

        There are weights, gradients, two moments and, as (tokens, d), the inputs of all layers, those of the second
        norm and of the experts, and a gradient.
        """
        held = 4 * sum(parameter.nbytes for parameter in self.parameters())
        left = CARD - SPARE - limit - held - (len(self.layers) + 3) * tokens * self.s.stack.d * 2
        for layer in self.layers:
            fit_saves(layer, tokens, left, policies=("minimal", "recompute"), report=None)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats of targets (documents, tokens)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        parts = zip(x.flatten(0, 1).split(self.s.chunk), targets.flatten().split(self.s.chunk), strict=True)
        return torch.stack([checkpoint(self._nats, *part, use_reentrant=False) for part in parts]).sum() / ids.numel()

    def _nats(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.norm(rows)).float(), targets, reduction="sum")


def step_row(name: str, arm: str, tokens: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of steps after the first, and the peak. Raises AssertionError if the loss does not fall."""
    torch.manual_seed(0)
    s = SETTINGS[name]
    model = Model(s, arm, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=inputs.has_gpu())
    shape = tokens // s.document, s.document
    ids, targets = (torch.randint(s.vocabulary, shape, device=inputs.device()) for _ in range(2))
    norm, losses, times = 0.0, [], []
    while len(times) < 2 or sum(times[1:]) < seconds:
        start = time.perf_counter()
        loss = model.loss(ids, targets)
        loss.backward()
        if not losses:
            norm = math.hypot(*(float(p.grad.norm(dtype=torch.float32)) for p in model.layers.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # waits for the GPU
        times.append(time.perf_counter() - start)
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert falls, f"{arm}, {tokens} tokens: expected losses that fall, got {losses}; a wrong result gets no time"
    about = {"save": None if arm == GROUPED else model.layers[0].moe.save, "limit_bytes": model.limit}
    peak = torch.cuda.max_memory_allocated() if inputs.has_gpu() else None
    speed = {"tokens_per_second": tokens / statistics.median(times[1:]), "step_seconds": times[1:]}
    return {**about, **speed, "peak_bytes": peak, "loss": losses[0], "gradient_norm": norm}


def layer_row(name: str, seconds: float) -> dict[str, Any]:
    """Times and peaks of both passes of a case without and with its limit. Raises AssertionError for a wrong result."""
    case, limit = LAYERS[name]
    made, calls, results = inputs.layer_inputs(case), {}, {}
    row: dict[str, Any] = {"shape": case.shape, "limit_bytes": limit, "ways": {}}
    shape = memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation, transposed=True)
    for way in (None, limit):
        calls[way] = layer = providers.Ours(case, made, "recompute", memory_limit=way)
        passes_of(layer)  # compiles
        results[way], peaks = passes_of(layer)
        plan = dry_run.layer(replace(shape, memory_limit=way), "recompute")
        planned = plan.forward_peak_bytes, plan.backward_peak_bytes
        row["ways"][str(way)] = {"chunk_tokens": plan.chunk_tokens, "peak_bytes": peaks, "planned_bytes": planned}
    for key, tolerance in TOLERANCES.items():
        got, want = (results[way][key] for way in (limit, None))
        apart = 0.0 if torch.equal(got, want) else float((got.double() - want.double()).norm() / want.double().norm())
        assert apart <= tolerance, f"{name}: {key} within the limit differs by {apart:.2g}; a wrong result gets no time"
        row[f"{key}_difference"] = apart
    found = results.pop(None)
    results.clear()
    row["errors"] = verify.relative_errors(case, made, found.pop("out"), found)
    wrong = verify.problems(row["errors"], made["x"].dtype)
    assert wrong is None, f"{name}: {wrong}; a wrong result gets no time"
    del found, got, want
    measure.release()
    for what in ("forward", "forward_backward"):
        in_turn = fp8.in_turn({str(way): getattr(layer, what) for way, layer in calls.items()}, seconds, ROUNDS)
        for way, took in in_turn.items():
            row["ways"][way][f"{what}_ms"] = took * 1e3
    return row


def passes_of(layer: providers.Ours) -> tuple[dict[str, torch.Tensor], list[int | None]]:
    """out and the gradients; bytes of forward beyond out and what it saves, and of backward with its gradients."""
    on_gpu = inputs.has_gpu()
    gc.collect()  # garbage that is collected in between would count as a part of the pass
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    out = layer.forward()
    peaks = [torch.cuda.max_memory_allocated() if on_gpu else None]
    kept = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, layer.leaves, layer.inputs["grad_out"])
    peaks.append(torch.cuda.max_memory_allocated() if on_gpu else None)
    return {"out": out.detach(), **layer.named(gradients)}, [None if peak is None else peak - kept for peak in peaks]


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"layer": layer_row, "step": step_row}


def row_of(part: str, *of_row: Any) -> dict[str, Any]:
    """A row, measured in this process within the memory of the card. of_row: arguments of the part's function."""
    if inputs.has_gpu():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CARD / total))
    try:
        return PARTS[part](*of_row)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}


def in_own_process(part: str, *of_row: Any) -> dict[str, Any]:
    """`row_of` with its names, in a process that is ended after ROW_SECONDS. Its errors are in the row."""
    # Buffers of many sizes leave holes between segments of fixed sizes, so segments grow.
    named = {"part": part, **dict(zip(("case", "arm", "tokens"), of_row[:-1], strict=False))}
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        return named | measure.row_of_own_process("bench.long_sequences", (part, *of_row), ROW_SECONDS, **growing)
    except subprocess.TimeoutExpired:
        return named | {"failed": f"longer than {ROW_SECONDS:.0f} s"}
    except RuntimeError as error:
        return named | {"failed": "error", "error": str(error)}


def check_arms(rows: list[dict]) -> None:
    """Raises AssertionError if arms of one size differ in the first loss or in the norm of its gradients."""
    first: dict[int, dict] = {}
    for row in (row for row in rows if "loss" in row):
        other = first.setdefault(row["tokens"], row)
        for name, tolerance in AGREES.items():
            close = abs(row[name] - other[name]) <= tolerance * other[name]
            assert close, f"{name} of {row['tokens']} tokens: {row['arm']} {row[name]}, {other['arm']} {other[name]}"


def gib(nbytes: int | None) -> str:
    return table.number(nbytes and nbytes / GIB)


def text(rows: list[dict]) -> list[str]:
    """Lines of a table of each part."""
    layers = [["case", "limit GiB", "pass", "ms", "of none", "peak GiB", "planned GiB"]]
    steps = [["arm", "tokens", "save", "limit GiB", "tokens/s", "peak GiB"]]
    for row in rows:
        if row["part"] == "step":
            speed = row.get("failed") or f"{row['tokens_per_second']:,.0f}"
            about = row["arm"], f"{row['tokens']:,}", row.get("save") or "-", gib(row.get("limit_bytes"))
            steps.append([*about, speed, gib(row.get("peak_bytes"))])
        elif "failed" in row:
            layers.append([row["case"], "-", "-", row["failed"], "-", "-", "-"])
        for way, found in row.get("ways", {}).items():
            for i, what in enumerate(("forward", "forward_backward")):
                ratio = found[f"{what}_ms"] / row["ways"]["None"][f"{what}_ms"]
                about = row["case"], "-" if way == "None" else gib(int(way)), what.replace("_", ", ")
                bytes_of = (gib(found[key][i]) for key in ("peak_bytes", "planned_bytes"))
                layers.append([*about, table.number(found[f"{what}_ms"], 4), f"{ratio:.3f}", *bytes_of])
    return [line for part in (layers, steps) if len(part) > 1 for line in table.aligned(part, 3)]


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.long_sequences", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="(%(default)s)")
    parser.add_argument("--arm", nargs="+", choices=_SIZES, default=list(_SIZES), help="of the steps (%(default)s)")
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 5.0), help="of calls, of steps %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small layers, also without a GPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    if args.row:
        print(json.dumps(row_of(*json.loads(args.row))))
        return
    if not args.tiny:
        inputs.expect_gpu(parser)
    rows: list[dict] = []
    record, of_layers, of_steps = measure.record(rows=rows), *args.seconds
    name, layers = ("tiny", ["tiny"]) if args.tiny else ("qwen30b", ["qwen30b_1m", "dsv3_rank"])
    planned = [("layer", case, of_layers) for case in layers]
    planned += [("step", name, arm, tokens, of_steps) for arm in args.arm for tokens in SETTINGS[name].sizes[arm]]
    full: set[str] = set()
    for part, case, *rest in planned:
        if part in args.part and rest[0] not in full:
            rows.append(row := in_own_process(part, case, *rest))
            if "failed" in row and part == "step":
                full.add(rest[0])
            if args.out:  # after each row, as a run may be cut
                measure.write_record(record, args.out)
    print("\n".join(text(rows)))
    check_arms(rows)
    if errors := [row["error"] for row in rows if "error" in row]:
        raise SystemExit("\n".join(errors))


if __name__ == "__main__":
    main()
