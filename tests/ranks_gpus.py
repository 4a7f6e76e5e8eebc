"""Cases of the exchange of tokens on GPUs, over NCCL."""

import copy
from time import monotonic

import torch
from ranks_common import E, Inputs, K, compare, counts_of, difference, expect, gpu_case, results_of

from moeblaze_cupy.interop.exchange import ExpertGroup, collect, exchange
from moeblaze_cupy.interop.expert_parallel import expert_parallel_moe


def on_gpu(inputs, dtype):
    """The same inputs on the current GPU: 64-bit reference values rounded to `dtype`."""
    moved = copy.copy(inputs)
    for name in ("x", "grad", "w1", "w2"):
        setattr(moved, name, getattr(inputs, name).to(device="cuda", dtype=dtype))
    moved.weights, moved.ids = inputs.weights.to("cuda", torch.float32), inputs.ids.cuda()
    return moved


GPU_ROUTES = {name: {"route": name} if name != "exact" else {} for name in ("exact", "gather", "static", "pull")}


@gpu_case
def parity_on_gpus(rank, size, group):
    """Every route in bf16 and float32 against one process in float64 on the CPU; three runs give the same bits."""
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        for name, options in (*GPU_ROUTES.items(), ("pull by kernels", {"route": "pull"})):
            experts = ExpertGroup(group, E, spare_multiprocessors=8, **options)
            experts.peers.copies = name != "pull by kernels"
            for kind in ("equal", "uneven", "none_here", "one_token", "none"):
                if experts.route in ("gather", "static") and kind not in ("equal", "none"):
                    continue
                for routing in ("random", "absent", "one_rank", "duplicate"):
                    inputs = Inputs(rank, counts_of(size, kind), routing)
                    moved = on_gpu(inputs, dtype)
                    got = {name: value.cpu() for name, value in results_of(moved, experts).items()}
                    compare(inputs, got, tolerance, same_bits=False)
                again = results_of(moved, experts)
                assert all(torch.equal(got[name], again[name].cpu()) for name in got)


@gpu_case
def weight_gradients_on_gpus(rank, size, group):
    """Those of one process on one GPU, bit for bit, in the portable kernels of float32, which split no sums."""
    inputs = on_gpu(Inputs(rank, counts_of(size, "uneven"), "absent"), torch.float32)
    for route in ("exact", "pull"):
        compare(inputs, results_of(inputs, ExpertGroup(group, E, route=route)), 1e-5)


@gpu_case
def products_in_fp8_on_gpus(rank, size, group):
    """Those of one process on one GPU, as a slot's numbers in e4m3 are the same; sums over ranks are rounded."""
    inputs = Inputs(rank, counts_of(size, "uneven"), "absent", dtype=torch.bfloat16, h=32)
    moved = on_gpu(inputs, torch.bfloat16)
    found = []  # compared when all ranks have them: a rank that fails would leave the others waiting
    for route in ("exact", "pull"):
        for keep in (True, False):
            options = {"precision": "fp8", "keep_fp8_weights": keep}
            found.append(results_of(moved, ExpertGroup(group, E, route=route), **options))
    for got in found:
        compare(moved, got, 2.0**-7, same_bits=False, precision="fp8")


@gpu_case
def faults_of_pulled_rows(rank, size, group):
    """What differs among ranks is one ValueError on all, before a GPU waits; then the group is of use again."""
    start, odd = monotonic(), rank == size - 1
    experts = ExpertGroup(group, E, slots=size * 40 * K, on_overflow="raise")
    assert experts.route == "pull"  # "auto", on GPUs that access each other's memory
    inputs = on_gpu(Inputs(rank, counts_of(size, "uneven")), torch.float32)
    x, ids, weights, w1, w2 = inputs.local()
    narrow = x[:, :8], ids, weights, w1[:, :8], w2[:, :, :8]
    call = expert_parallel_moe
    expect(ValueError, "d: expected the same", call, *(narrow if odd else (x, ids, weights, w1, w2)), experts)
    detached = x.detach() if odd else x
    expect(ValueError, "requires_grad: expected the same", call, detached, ids, weights, w1, w2, experts)
    wrong = "of this rank's experts" if odd else f"got errors on [{size - 1}]"
    expect(ValueError, wrong, call, x, ids, weights, w1[odd:], w2, experts)
    compare(inputs, results_of(inputs, experts), 1e-5, same_bits=False)
    assert monotonic() - start < 60


@gpu_case
def overflow_on_gpus(rank, size, group):
    inputs = Inputs(rank, counts_of(size, "uneven"), "one_rank")
    got = results_of(on_gpu(inputs, torch.bfloat16), ExpertGroup(group, E, slots=20, keep_received=False))
    compare(inputs, {name: value.cpu() for name, value in got.items()}, 0.02, same_bits=False)


@gpu_case
def no_host_sync(rank, size, group):
    """With these routes the host waits for nothing."""
    for route in ("gather", "static", "pull"):
        for options in ({"on_overflow": "drop"}, {}, {"slots": size * 24 * K}):
            experts = ExpertGroup(group, E, route=route, **options)
            kind = "uneven" if route == "pull" else "equal"
            inputs = on_gpu(Inputs(rank, counts_of(size, kind)), torch.bfloat16)
            x, ids, weights, w1, w2 = inputs.local()
            grad = inputs.grad[inputs.here].contiguous()
            for mode in ("default", "error"):
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode(mode)
                try:
                    expert_parallel_moe(x, ids, weights, w1, w2, experts).backward(grad)
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@gpu_case
def pulled_steps_in_a_graph(rank, size, group):
    """Forward and backward of two layers in one CUDA graph, replayed with other contents, have the bits of plain calls.

    Ranks come to their replays at different times, and plain calls lie between.
    """
    experts = ExpertGroup(group, E, route="pull")
    every = [on_gpu(Inputs(rank, counts_of(size, "equal"), seed=seed), torch.bfloat16) for seed in range(4)]
    for inputs in every:
        inputs.ids = inputs.ids.long()
    x, ids, weights, w1, w2 = every[0].local()
    ids, grad, leaves = ids.clone(), every[0].grad[every[0].here].clone(), (x, weights, w1, w2)

    def step():
        first = expert_parallel_moe(x, ids, weights, w1, w2, experts)
        out = expert_parallel_moe(first, ids, weights, w1, w2, experts, save="recompute", shared=torch.sin)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    def fill(inputs):
        given = *inputs.local(), inputs.grad[inputs.here]
        with torch.no_grad():
            for to, source in zip((x, ids, weights, w1, w2, grad), given, strict=True):
                to.copy_(source)

    want = []
    for inputs in every:
        fill(inputs)
        want.append(step())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog has a thread
        got = step()
    for time, seed in enumerate((1, 2, 3, 0, 2)):
        fill(every[seed])
        if time % size == rank:
            torch.cuda._sleep(10_000_000)
        graph.replay()
        same = [torch.equal(a, b) for a, b in zip(got, want[seed], strict=True)]
        assert all(same), (time, seed, same)
        if time == 2:
            assert all(torch.equal(a, b) for a, b in zip(step(), want[seed], strict=True))
    for _ in range(20):
        graph.replay()  # one after the other, without the host
    assert all(torch.equal(a, b) for a, b in zip(got, want[2], strict=True))


@gpu_case
def pulled_exchange_on_gpus(rank, size, group):
    """`exchange` and `collect` of route "pull", where other rows are zeros; two begin before one ends."""
    experts = ExpertGroup(group, E, route="pull")
    for kind in ("equal", "uneven"):
        inputs = on_gpu(Inputs(rank, counts_of(size, kind), "absent"), torch.float32)
        x, ids, weights, _, _ = inputs.local()
        exchanged = [exchange(x, ids, weights, experts) for _ in range(2)]
        out = sum(collect(rows * got.sum(1, keepdim=True), route) for rows, _, got, route in exchanged)
        out.backward(inputs.grad[inputs.here])
        ranks_of = torch.where((ids >= 0) & (ids < E), ids // (E // size), -1)
        times = sum((ranks_of == r).any(1, keepdim=True) for r in range(size))
        total = 2 * weights.sum(1, keepdim=True) * times
        assert difference(out, total * x) <= 1e-6
        assert difference(x.grad, total * inputs.grad[inputs.here]) <= 1e-6
        present = (ids >= 0) & (ids < E)
        choices = torch.bincount(ids[present].long(), minlength=E)
        assert torch.equal(exchanged[0][3].choices, choices) and int(exchanged[0][3].dropped) == 0
