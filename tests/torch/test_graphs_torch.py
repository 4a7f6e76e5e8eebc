"""CUDA graphs of the torch layer: replays have eager mode's bits, and nothing on the way waits for the GPU."""

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from moeblaze_cupy.interop.torch import MoE, moe, route  # noqa: E402
from moeblaze_cupy.interop.torch import autograd as torch_autograd  # noqa: E402

pytestmark = pytest.mark.gpu
L, D, H, E, K = 96, 64, 48, 8, 2


@pytest.fixture(autouse=True)
def nothing_to_collect():
    """A graph of the test before that goes while another is captured would end the capture."""
    gc.collect()


@pytest.fixture(params=[None, "fp8"])
def precision(request):
    if request.param == "fp8":
        request.getfixturevalue("on_hopper")
    return request.param


def tokens(number=1, L=L, d=D):
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randn(L, d, device="cuda", dtype=torch.bfloat16, generator=generator)


def layer_of(**options):
    torch.manual_seed(0)
    return MoE(D, H, E, K, device="cuda", dtype=torch.bfloat16, **options)


def gradients(function, x, parameters, grad_out):
    x = x.clone().requires_grad_()
    out = function(x)
    return [tensor.clone() for tensor in (out.detach(), *torch.autograd.grad(out, (x, *parameters), grad_out))]


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("by_operators", [False, True])
def test_nothing_waits_for_the_gpu(save, by_operators, precision, monkeypatch):
    layer = layer_of(save=save, sums=("softmax", "z"), return_routing=True, precision=precision)
    x, grad_out = tokens(), tokens(2)

    def run(x):
        out, routing = layer(x)
        return out + routing.sums.z_sums.to(out.dtype)

    gradients(run, x, layer.parameters(), grad_out)  # compiles the kernels
    if by_operators:
        monkeypatch.setattr(torch_autograd, "needs_operators", lambda tensors: True)
    with torch.no_grad():
        layer.w1_storage.mul_(2)  # which "fp8" has to tell
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(run, x, layer.parameters(), grad_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
def test_graphed_callables(save, precision):
    layer = layer_of(save=save, precision=precision)
    eager = copy.deepcopy(layer)
    graphed = torch.cuda.make_graphed_callables(layer, (tokens().requires_grad_(),))
    for step in range(3):
        x, grad_out = tokens(step), tokens(10 + step)
        got = gradients(graphed, x, layer.parameters(), grad_out)
        assert all(map(torch.equal, got, gradients(eager, x, eager.parameters(), grad_out)))


def test_a_whole_training_step_in_a_graph(precision):
    """Forward, backward and AdamW, replayed with other tokens, which go to other experts. Outside of the graph the
    layer follows what replays made of its parameters."""

    def training(layer):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, capturable=True)

        def step(x, target):
            optimizer.zero_grad(set_to_none=True)
            loss = (layer(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured, eager = layer_of(precision=precision), layer_of(precision=precision)
    by_graph, by_eager = training(captured), training(eager)
    x, target = tokens(), tokens(2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            by_graph(x, target)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        by_eager(x, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = by_graph(x, target)
    losses = []
    for step in range(4):
        x.copy_(tokens(20 + step)), target.copy_(tokens(30 + step))
        graph.replay()
        losses.append(loss.item())
        assert losses[-1] == by_eager(x, target).item()
        with torch.no_grad():
            assert torch.equal(captured(target), eager(target))
    assert len(set(losses)) == len(losses)
    for got, want in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("trains", [False, True])
def test_graphs_in_fp8_follow_tokens_and_weights(trains, on_hopper):
    """The first call of all may be the captured one, but for its kernels, which another layer compiles."""
    layer, eager, x, grad_out = layer_of(precision="fp8"), layer_of(precision="fp8"), tokens(), tokens(2)

    def run(layer, x):
        with torch.set_grad_enabled(trains):
            return gradients(layer, x, layer.parameters(), grad_out) if trains else [layer(x)]

    run(eager, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(layer, x)
    seen = []
    for step in range(3):
        x.copy_(tokens(20 + step)), grad_out.copy_(tokens(30 + step))
        with torch.no_grad():
            for parameter, other in zip(layer.parameters(), eager.parameters(), strict=True):
                parameter.data.mul_(1.5), other.mul_(1.5)  # one of them uncounted
        graph.replay()
        assert all(map(torch.equal, got, run(eager, x)))
        assert torch.equal(layer(x), got[0])
        seen.append(got[0].clone())
    assert not torch.equal(seen[0], seen[1])


def test_graphs_with_weights_that_are_held(on_hopper):
    """Two micro-batches by replays of one graph, between calls of `quantize_weights`."""
    layer, x = layer_of(precision="fp8"), tokens()
    layer.quantize_weights()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for step in range(4):
        x.copy_(tokens(20 + step))
        before = layer(x)
        with torch.no_grad():
            layer.w2_storage.neg_()
        graph.replay()
        assert torch.equal(out, before)
        layer.quantize_weights()
        graph.replay()
        assert torch.equal(out, -before)


def test_micro_batches_in_a_graph_share_what_is_held(on_hopper):
    """The whole step in a graph, with one quantisation, beside eager steps with one for each micro-batch."""

    def training(layer, holds):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x, target):
            optimizer.zero_grad(set_to_none=True)
            if holds:
                layer.quantize_weights()
            for batch, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
                loss = (layer(batch) - wanted).square().mean()
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured, eager = layer_of(precision="fp8"), layer_of(precision="fp8")
    by_graph, by_eager = training(captured, True), training(eager, False)
    x, target = tokens(), tokens(2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        by_graph(x, target)
    torch.cuda.current_stream().wait_stream(stream)
    by_eager(x, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = by_graph(x, target)
    for step in range(3):
        x.copy_(tokens(20 + step)), target.copy_(tokens(30 + step))
        graph.replay()
        assert loss.item() == by_eager(x, target).item()
        with torch.no_grad():
            assert torch.equal(captured(target), eager(target))


@pytest.fixture
def compiling():
    import torch._inductor.config
    from torch._dynamo.utils import counters

    config = torch._inductor.config
    before, config.force_disable_caches = config.force_disable_caches, True
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    config.force_disable_caches = before


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
def test_reduce_overhead(save, precision, compiling):
    """Of the operators alone, as compilers fuse what is around them, which then rounds in other places."""
    layer = layer_of()
    experts = layer.w1_storage, layer.w2_storage

    def run(x, logits):
        weights, ids = route(logits, K)
        return moe(x, ids, weights, *(w.transpose(1, 2) for w in experts), save=save, precision=precision)

    compiled = torch.compile(run, mode="reduce-overhead", fullgraph=True)
    for step in range(5):  # the first ones warm up and record
        x, logits = tokens(step).requires_grad_(), tokens(20 + step, L, E).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        found = []
        for function in (compiled, run):
            out = function(x, logits)
            grads = torch.autograd.grad(out, (x, logits, *experts), tokens(10 + step))
            found.append([tensor.clone() for tensor in (out.detach(), *grads)])
        assert all(map(torch.equal, *found))
        with torch.no_grad():
            experts[0].mul_(1.25)
    assert compiling["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("held", [False, True])
def test_the_module_by_reduce_overhead(held, precision, compiling):
    """Its router's product is the compiler's to choose, so outputs agree up to rounding, in e4m3 of what has a weight
    of the router as a factor."""
    layer = layer_of(score="sigmoid", bias=True, precision=precision)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for step in range(4):
        x, grad_out = tokens(step), tokens(10 + step)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            layer.w1_storage.mul_(1.25)
        if held and precision == "fp8":
            layer.quantize_weights()
        got = gradients(compiled, x, layer.parameters(), grad_out)
        for tensor, want in zip(got, gradients(layer, x, layer.parameters(), grad_out), strict=True):
            distance = (tensor.float() - want.float()).norm() / want.float().norm()
            assert distance <= (2**-7 if precision is None else 2**-5)
    assert compiling["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("save", ["minimal", "paper"])
def test_compiled_backward_takes_the_memory_of_eager_mode(save, compiling):
    torch.manual_seed(0)
    rows, d, h = 4096, 512, 512
    x, grad_out = tokens(1, rows, d).requires_grad_(), tokens(2, rows, d)
    ids = torch.randint(0, E, (rows, K), device="cuda", dtype=torch.int32)
    weights = torch.rand(rows, K, device="cuda").requires_grad_()
    w1 = (torch.randn(E, 2 * h, d, device="cuda") / d**0.5).bfloat16().transpose(1, 2).requires_grad_()
    w2 = (torch.randn(E, d, h, device="cuda") / h**0.5).bfloat16().transpose(1, 2).requires_grad_()
    leaves = x, weights, w1, w2

    def run(x, weights, w1, w2):
        return moe(x, ids, weights, w1, w2, save=save)

    def peak(function):
        for _ in range(2):
            grads = torch.autograd.grad(function(*leaves), leaves, grad_out)
            del grads
        gc.collect()  # what goes while the peak is measured would lower it
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(function(*leaves), leaves, grad_out)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, grads

    eager, want = peak(run)
    compiled, got = peak(torch.compile(run, fullgraph=True))
    assert all(map(torch.equal, got, want))
    assert compiled <= 1.01 * eager
