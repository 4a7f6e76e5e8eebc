"""Cases of the exchange of tokens on GPUs, over NCCL."""

import copy

import torch
from ranks_common import E, Inputs, compare, counts_of, gpu_case, results_of

from moeblaze_cupy.interop.exchange import ExpertGroup
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
        for options in GPU_ROUTES.values():
            experts = ExpertGroup(group, E, spare_multiprocessors=8, **options)
            for kind in ("equal", "uneven", "none_here", "one_token", "none"):
                if options and kind not in ("equal", "none"):
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
    compare(inputs, results_of(inputs, ExpertGroup(group, E)), 1e-5)


@gpu_case
def overflow_on_gpus(rank, size, group):
    inputs = Inputs(rank, counts_of(size, "uneven"), "one_rank")
    got = results_of(on_gpu(inputs, torch.bfloat16), ExpertGroup(group, E, slots=20, keep_received=False))
    compare(inputs, {name: value.cpu() for name, value in got.items()}, 0.02, same_bits=False)


@gpu_case
def no_host_sync(rank, size, group):
    """With these routes the host waits for nothing."""
    for route in ("gather", "static", "pull"):
        experts = ExpertGroup(group, E, route=route, on_overflow="drop")
        inputs = on_gpu(Inputs(rank, counts_of(size, "equal")), torch.bfloat16)
        x, ids, weights, w1, w2 = inputs.local()
        grad = inputs.grad[inputs.here].contiguous()
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                expert_parallel_moe(x, ids, weights, w1, w2, experts).backward(grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")
