"""Experts on several GPUs of one host, a process each: python -m bench.parallel [--case A,B] [--gpus 1,2,4].

Weak scaling: every GPU has the case's L tokens. P GPUs share its E experts, or under FSDP2 the parameters of a stack of
layers. Efficiency is the time of forward and backward on one GPU over that on P, of calls back to back, as in
training. The time on one GPU is taken on all GPUs at once, whose clocks and power are then alike. Without GPUs a tiny
case runs on the CPU over gloo, which shows that the suite runs and nothing else.

Route "pull" has memory for SLOTS times the slots that balanced routing gives a rank. With --plain there is also route
"pull" whose rows are all read by kernels, none copied beside products.

With --fp8 FSDP2 has rows of layers with precision="fp8" too, whose gradients travel in bfloat16: by copy engines that
bring weights in bfloat16 ("copies-bf16-fp8") and in e4m3 ("copies-bf16-fp8-e4m3").

With --fp8 there is also route "pull" with precision="fp8" ("pull-fp8"), and with row_precision="fp8" as well
("pull-fp8-rows"), of weights that are quantised before the calls. Their efficiency is that beside one GPU's layer in
fp8. Their errors are those of e4m3, from the results of bf16. On the CPU their route is "exact".

With --graphs the layer of one GPU and route "pull" are also timed as replays of one CUDA graph of forward and backward
("moeblaze-graph", "pull-graph"), for which the host launches nothing, and so are the stack on one GPU and FSDP2 with
stored gradients ("copies-bf16-stored-graph").

The peer `slots` is a layer in the order of torchtitan's default dispatcher, written from public torch calls: slots
sorted by expert, counts exchanged and read on the host, an all-to-all of a row per slot, a permutation by local expert,
grouped products, the way back, and a sum over each token's slots.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import moeblaze_cupy as mb
from bench import cases, measure
from bench.inputs import device, has_gpu, layer_inputs
from bench.providers import activated
from bench.providers import grouped_mm as grouped_product
from moeblaze_cupy.interop.fsdp import CopyEngines
from moeblaze_cupy.interop.parallel import ExpertGroup, expert_parallel_moe
from moeblaze_cupy.interop.torch import MoE, moe

TOLERANCE = 0.02
FP8_TOLERANCE = 0.07  # with rows in e4m3 the gradients of w1 and w2 come to 0.062 and 0.060
STACKED = 4  # layers under FSDP2
SLOTS = 1.125  # of balanced routing's slots, for which route "pull" has memory
PIECE_ELEMENTS = 2**26  # that are compared at a time
ROUTES = ("exact", "pull")
PLAIN = "pull-plain"  # route "pull" without copies
COPIES, COPIES_BF16 = "copies", "copies-bf16"  # FSDP2's collectives by copy engines; gradients travel in bfloat16
STORED = f"{COPIES_BF16}-stored"  # products store weight gradients where they are summed
GRAPH = "graph"  # all as a replay of one CUDA graph
FSDP = ("moeblaze", COPIES_BF16, STORED)
FSDP_FP8 = (f"{COPIES_BF16}-fp8-e4m3", f"{STORED}-fp8-e4m3")  # weights travel in e4m3
MOST_FSDP_BYTES = 24 * 2**30  # of a stack's parameters, for which FSDP2 has a row: dsv3's are for expert parallelism


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.splits = sent, received, group
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.splits
        return _AllToAll.apply(grad, received, sent, group), None, None, None


def slots_layer(x, ids, weights, w1, w2, num_experts, activation, group):
    """The peer `slots`."""
    k, size, local = ids.shape[1], dist.get_world_size(group), len(w2)
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)  # (E,)
    arriving = torch.empty_like(counts)  # by source rank, then local expert
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, size, local).sum(2).cpu().tolist()
    rows = _AllToAll.apply(x[order // k], sent, received, group)
    by_source = torch.arange(local, device=x.device).repeat(size).repeat_interleave(arriving, output_size=sum(received))
    permutation = torch.argsort(by_source, stable=True)
    ends = arriving.view(size, local).sum(0).cumsum(0).int()
    y = grouped_product(activated(grouped_product(rows[permutation], w1, ends), activation), w2, ends)
    back = torch.zeros_like(y).index_copy(0, permutation, y)
    slots = _AllToAll.apply(back, received, sent, group) * weights.reshape(-1)[order][:, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, order // k, slots)


def relative_error(got, want):
    """In float32 norms, a piece of rows at a time."""
    got, want = (t.reshape(-1, t.shape[-1]) for t in (got, want))
    rows = max(1, PIECE_ELEMENTS // got.shape[1])
    parts = zip(got.split(rows), want.split(rows), strict=True)
    squares = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in parts]
    difference, size = (float(torch.stack(column).sum()) for column in zip(*squares, strict=True))
    return (difference / size) ** 0.5


class Timer:
    """Milliseconds of a call by CUDA events, the largest over the ranks."""

    def __init__(self, group, rounds):
        self.group, self.rounds = group, rounds

    def __call__(self, work):
        """ms: median of calls that are waited for. back_to_back_ms: mean of calls that follow one another for a second.
        peak_mib: what a call takes beyond what was there before; rows add what stays and torch does not count.
        """
        for _ in range(2):
            work()
        self._wait()
        peak, calls = 0.0, 2
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            peak = (torch.cuda.max_memory_allocated() - before) / measure.MIB
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            # as many calls on all ranks, or collectives would wait for ever
            seconds = self._most(max(time.perf_counter() - start, 1e-4))
            calls = max(4, round(measure.SWING_SECONDS / seconds))
            for _ in range(round(calls * measure.BUSY_SECONDS / measure.SWING_SECONDS)):
                work()

        def run_all():
            for _ in range(calls):
                work()

        clock = measure.DeviceClock()
        clock.run(run_all, calls)
        times = [1000 * clock.now]
        for _ in range(self.rounds):
            self._wait()
            clock = measure.DeviceClock()
            clock.run(work)
            times.append(1000 * clock.now)
        every = torch.tensor([*times, peak], dtype=torch.float64, device=device())
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group)
        back_to_back, *single, peak = every.tolist()
        return {"ms": statistics.median(single), "back_to_back_ms": back_to_back, "peak_mib": peak}

    def _most(self, value):
        tensor = torch.tensor([value], dtype=torch.float64, device=device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return float(tensor)

    def _wait(self):
        dist.barrier(group=self.group)
        if has_gpu():
            torch.cuda.synchronize()


def captured(work):
    """What replays `work` as one CUDA graph; it keeps what `work` returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = work()

    def replay(made=made):
        graph.replay()

    return replay


class ExpertParallel:
    """A case's layer on a group, where each rank has its own tokens and its share of the experts.

    provider: a route, "slots" for the peer, or "moeblaze" for the layer of one GPU; "-plain", "-fp8" and "-fp8-rows"
    after a name as the module's docstring says.
    """

    def __init__(self, case, group, provider):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.case, self.group, self.rank = case, group, rank
        inputs = []
        for seed in range(size):
            made = layer_inputs(case, seed=seed)
            inputs.append({n: t for n, t in made.items() if seed == 0 or n not in ("w1", "w2")})
        self.whole = inputs  # the first has the experts
        mine, share = inputs[rank], slice(rank * case.E // size, (rank + 1) * case.E // size)
        self.ids, self.grad = mine["ids"], mine["grad_out"]
        weights = [inputs[0][name][share].clone(memory_format=torch.preserve_format) for name in ("w1", "w2")]
        self.leaves = [t.detach().requires_grad_() for t in (mine["x"], mine["weights"], *weights)]
        route, *how = provider.split("-")
        slots = None if route == "exact" else max(case.k, round(SLOTS * case.L * case.k))
        self.experts = ExpertGroup(group, case.E, route=route, slots=slots) if route in ROUTES else None
        if "plain" in how:
            self.experts.peers.copies = False
        self.provider, self.options = route, {}
        self.tolerance = FP8_TOLERANCE if "fp8" in how else TOLERANCE
        if "fp8" in how:
            self.options = {"precision": "fp8", "fp8_weights": mb.quantize_weights(*weights)}
        if "rows" in how:
            self.options["row_precision"] = "fp8"

    def forward(self):
        x, weights, w1, w2 = self.leaves
        if self.provider == "moeblaze":
            return moe(x, self.ids, weights, w1, w2, activation=self.case.activation, **self.options)
        if self.provider == "slots":
            return slots_layer(x, self.ids, weights, w1, w2, self.case.E, self.case.activation, self.group)
        options = {"activation": self.case.activation, **self.options}
        return expert_parallel_moe(x, self.ids, weights, w1, w2, self.experts, **options)

    def forward_backward(self):
        return torch.autograd.grad(self.forward(), self.leaves, self.grad)

    def errors(self):
        """Relative norms of the differences from one GPU's layer on the tokens of all ranks, by name."""
        first = self.whole[0]
        leaves = [torch.cat([i[name] for i in self.whole]) for name in ("x", "weights")] + [first["w1"], first["w2"]]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        x, weights, w1, w2 = leaves
        ids, grad = (torch.cat([i[name] for i in self.whole]) for name in ("ids", "grad_out"))
        want = moe(x, ids, weights, w1, w2, activation=self.case.activation)
        wanted = torch.autograd.grad(want, leaves, grad)
        size, got = len(self.whole), self.forward()
        made = torch.autograd.grad(got, self.leaves, self.grad)
        pairs = zip((got.detach(), *made), (want.detach(), *wanted), strict=True)
        named = dict(zip(cases.RESULTS, pairs, strict=True))
        return {name: relative_error(a, b.chunk(size)[self.rank]) for name, (a, b) in named.items()}

    @property
    def symmetric_mib(self):
        """MiB of symmetric memory, which torch does not count."""
        return self.experts.peers.nbytes / measure.MIB if self.experts is not None else 0.0

    def release(self):
        """Drops what only `errors` reads."""
        self.whole = None


def stack_of(case, mesh, reduce_dtype=torch.float32, precision=None):
    """STACKED layers of norm, router and experts with residuals, under FSDP2 on a mesh, or plain without one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.RMSNorm(case.d, device=device(), dtype=torch.bfloat16)
            options = {"activation": case.activation, "device": device(), "dtype": torch.bfloat16}
            options["precision"] = precision
            self.moe = MoE(case.d, case.h, case.E, case.k, **options)

        def forward(self, x):
            return x + self.moe(self.norm(x))

    stack = torch.nn.Sequential(*(Block() for _ in range(STACKED)))
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for block in stack:  # backward begins with the last, which would only be gathered again at once
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not stack[-1])
        fully_shard(stack, mesh=mesh, mp_policy=policy)
        for block, following in itertools.pairwise(stack):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return stack


def expert_rows(case, sizes, rank, rounds, everyone, plain=False, in_fp8=False, in_graphs=False):
    """Rows of expert parallelism: one GPU, then each size, route and peer."""
    rows, alone = [], dist.new_group([rank], use_local_synchronization=True)
    in_graphs = in_graphs and has_gpu()
    for size in sizes:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
        if case.E % size:
            continue
        group = alone if size == 1 else groups[rank // size]
        pulled = ("pull", *[PLAIN] * plain) if has_gpu() else ()  # the CPU has no peers
        several = (*(route for route in ROUTES if route != "pull"), *pulled, "slots")
        providers = ("moeblaze",) if size == 1 else several
        if in_fp8:
            of_bf16 = "moeblaze" if size == 1 else "pull" if has_gpu() else "exact"
            providers = (*providers, f"{of_bf16}-fp8", *[f"{of_bf16}-fp8-rows"] * (size > 1))
        if in_graphs:
            providers = (*providers, f"{'moeblaze' if size == 1 else 'pull'}-{GRAPH}")
        for provider in providers:
            layer = ExpertParallel(case, group, provider)
            errors = layer.errors()
            layer.release()
            largest = max(errors.values())
            row = {"case": case.name, "what": "experts", "provider": provider, "gpus": size, "errors": errors}
            above = largest > layer.tolerance or largest != largest
            flags = torch.tensor([above], dtype=torch.int64, device=device())
            dist.all_reduce(flags, group=everyone)
            if int(flags):
                row["wrong"] = f"an error of {largest:.3f} or another rank's is above {layer.tolerance}"
            else:
                of_graph, work = GRAPH in provider.split("-"), layer.forward_backward
                row |= Timer(everyone, rounds)(captured(work) if of_graph else work)
                row["peak_mib"] += layer.symmetric_mib
                if of_graph:  # whose memory is taken when it is captured
                    del row["peak_mib"]
                row["state"] = measure.gpu_state()
            rows.append(row)
            del layer
            if has_gpu():
                torch.cuda.empty_cache()
    return rows


def fsdp_rows(case, sizes, rank, rounds, everyone, in_fp8=False, in_graphs=False):
    """Rows of FSDP2: the plain stack on each GPU, then sharded over each size."""
    from torch.distributed.device_mesh import DeviceMesh

    nbytes = 2 * STACKED * case.E * case.d * (case.first_columns + case.h)
    if nbytes > MOST_FSDP_BYTES:
        return []
    rows = []
    for size in sizes:
        mesh, world = None, dist.get_world_size()
        if size > 1:
            table = torch.arange(world // size * size).view(-1, size)
            mesh = DeviceMesh(device(), table, mesh_dim_names=("replicate", "shard"))["shard"]
        alone = size == 1 or not has_gpu()
        providers = ("moeblaze",) if alone else FSDP
        if in_fp8:
            providers = (*providers, *(("moeblaze-fp8",) if alone else FSDP_FP8))
        if in_graphs and has_gpu():
            providers = (*providers, f"{'moeblaze' if alone else STORED}-{GRAPH}")
        for provider in providers:
            torch.manual_seed(0)
            collectives, *how = provider.split("-")
            reduce_dtype = torch.bfloat16 if "bf16" in how else torch.float32
            stack, engines = stack_of(case, mesh, reduce_dtype, "fp8" if "fp8" in how else None), None
            if collectives == COPIES:
                engines = CopyEngines(mesh)
                engines.attach(*stack, stack, in_e4m3="e4m3" in how, stores_gradients="stored" in how)
            x = torch.randn(case.L, case.d, device=device(), dtype=torch.bfloat16)

            def work(stack=stack, x=x):
                stack(x).backward(x)
                stack.zero_grad()

            row = {"case": case.name, "what": "fsdp", "provider": provider, "gpus": size}
            row |= Timer(everyone, rounds)(captured(work) if GRAPH in how else work)
            row["peak_mib"] += engines.nbytes / measure.MIB if engines else 0
            if GRAPH in how:  # whose memory is taken when it is captured
                del row["peak_mib"]
            rows.append(row)
            del stack, work, engines
            gc.collect()  # modules of FSDP2 refer to themselves
            if has_gpu():
                torch.cuda.empty_cache()
    return rows


def with_efficiency(rows):
    """Each row with the time of one GPU over its own, in the same precision, both in CUDA graphs or both not."""

    def layer(row):
        how = row["provider"].split("-")
        return row["case"], row["what"], "fp8" in how, GRAPH in how

    alone = {layer(row): row["back_to_back_ms"] for row in rows if row["gpus"] == 1 and "ms" in row}
    for row in rows:
        if "ms" in row and layer(row) in alone:
            row["efficiency"] = alone[layer(row)] / row["back_to_back_ms"]
    return rows


def table(rows):
    lines = [
        "case        what     provider             GPUs        ms  back to back   of one GPU   peak MiB   largest error"
    ]
    for row in rows:
        head = f"{row['case']:<12}{row['what']:<9}{row['provider']:<21}{row['gpus']:>4}"
        if "ms" not in row:
            lines.append(f"{head}   {row['wrong']}")
            continue
        efficiency = f"{row['efficiency']:.1%}" if "efficiency" in row else "-"
        peak = f"{row['peak_mib']:.0f}" if "peak_mib" in row else "-"
        error = f"{max(row['errors'].values()):.4f}" if "errors" in row else "-"
        lines.append(f"{head}{row['ms']:>10.3f}{row['back_to_back_ms']:>14.3f}{efficiency:>13}{peak:>11}{error:>16}")
    return lines


def work_of_rank(args):
    """One process; rank 0 writes what all have measured."""
    rank, size = args.rank, args.world
    backend = "nccl" if has_gpu() else "gloo"
    if has_gpu():
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(args.store, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    everyone = dist.group.WORLD
    tiny = dataclasses.replace(cases.TINY, h=32)  # a width that e4m3 can have
    chosen = [cases.LAYERS[name] for name in cases.select(args.case, "conf1,conf5,qwen30b")] if has_gpu() else [tiny]
    sizes = [int(n) for n in args.gpus.split(",") if int(n) <= size]
    facts = measure.environment() if rank == 0 else {}
    rows, end = [], time.monotonic() + 60 * args.minutes
    for case in chosen:
        late = torch.tensor([int(time.monotonic() > end)], device=device())
        dist.broadcast(late, 0)
        if int(late):
            break
        of_case = []
        if args.experts:
            of_case += expert_rows(case, sizes, rank, args.rounds, everyone, args.plain, args.fp8, args.graphs)
        if args.fsdp:
            of_case += fsdp_rows(case, sizes, rank, args.rounds, everyone, args.fp8, args.graphs)
        rows += with_efficiency(of_case)
        if rank == 0:  # what there is, should the run be cut
            record = {"environment": facts, "commit": args.commit or measure.commit(), "rows": rows}
            measure.write_record(record, args.result)
            print("\n".join(table(of_case)[bool(len(rows) - len(of_case)) :]), flush=True)
    dist.barrier()
    os._exit(0)  # NCCL's groups take long to end


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.parallel", description=__doc__.split("\n")[0])
    parser.add_argument("--case", help="cases or groups of bench/cases.py (conf1,conf5,qwen30b)")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs (%(default)s); the largest is what starts")
    parser.add_argument("--rounds", type=int, default=12, help="timed calls of each row (%(default)s)")
    parser.add_argument("--minutes", type=float, default=8, help="start no case later than this (%(default)s)")
    parser.add_argument("--no-fsdp", dest="fsdp", action="store_false", help="leave out the rows of FSDP2")
    parser.add_argument("--no-experts", dest="experts", action="store_false", help="leave out expert parallelism")
    parser.add_argument("--plain", action="store_true", help='add route "pull" without copies beside products')
    parser.add_argument("--fp8", action="store_true", help='add precision="fp8", with what travels in bf16 and e4m3')
    parser.add_argument("--graphs", action="store_true", help="add replays of CUDA graphs")
    parser.add_argument("--commit", default="", help="commit to write into the record (git's)")
    parser.add_argument("--out", help="write the record there, as JSON")
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--store", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return work_of_rank(args)
    most = torch.cuda.device_count() if has_gpu() else 2
    world = max((int(n) for n in args.gpus.split(",") if int(n) <= most), default=0)
    if world < 1:
        parser.error(f"--gpus: expected some number up to the {most} GPUs here, got {args.gpus}")
    if odd := [n for n in args.gpus.split(",") if int(n) <= most and world % int(n)]:
        parser.error(f"--gpus: expected divisors of the largest number, {world}, got {odd}")
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(args.out).resolve() if args.out else Path(folder) / "record.json"
        result.unlink(missing_ok=True)
        own = ["--world", str(world), "--store", str(Path(folder) / "store"), "--result", str(result)]
        command = [sys.executable, "-m", "bench.parallel", *sys.argv[1:], *own]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(world)]
        codes = [process.wait() for process in ranks]
        if any(codes) or not result.exists():
            print(f"exit codes of the ranks: {codes}", file=sys.stderr)
        if not result.exists():
            return 1
        record = json.loads(result.read_text())
    return int(any(codes) or any("wrong" in row for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
