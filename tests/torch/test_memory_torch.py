"""`memory_limit` and `fit_saves` in torch."""

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy.interop.torch import MoE, fit_saves, moe  # noqa: E402
from moeblaze_cupy.interop.torch import autograd as torch_autograd  # noqa: E402
from moeblaze_cupy.interop.torch.private import GRAPH_BREAKS_HAVE_REASONS  # noqa: E402
from moeblaze_cupy.interop.torch.saves import kept_bytes  # noqa: E402
from moeblaze_cupy.types import ChunkedIndices  # noqa: E402

SIZES = {"d_model": 32, "d_hidden": 24, "num_experts": 5, "k": 2}


def inputs_of(L=40, device="cpu", dtype=torch.float32, requires_grad=True, **sizes):
    """x, ids, weights, w1, w2; all but ids require a gradient."""
    d, h, E, k = (sizes.get(name, SIZES[name]) for name in SIZES)
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(L, d), torch.randn(E, 2 * h, d) / d**0.5, torch.randn(E, d, h) / h**0.5
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(L)]).int()
    x, w1, w2 = (t.to(device, dtype) for t in (x, w1, w2))
    weights, ids = torch.rand(L, k).to(device), ids.to(device)
    if requires_grad:
        x, weights, w1, w2 = (t.requires_grad_() for t in (x, weights, w1, w2))
    return x, ids, weights, w1.mT, w2.mT


def step(inputs, grad_out, **options):
    leaves = [t for t in inputs if t.is_leaf and t.requires_grad] + [t._base for t in inputs if not t.is_leaf]
    out = moe(*inputs, **options)
    found = torch.autograd.grad(out, leaves, grad_out)
    return dict(zip(("out", "x", "weights", "w1", "w2"), (out.detach(), *found), strict=True))


def test_the_limit_reaches_both_passes(monkeypatch):
    """Backward gets the lists, the limit and the tokens of a chunk that forward returned. Chunks run on CUDA alone, so
    here the lists of one chunk stand for those of many."""
    inputs, grad_out, seen = inputs_of(), torch.randn(40, 32), []
    forward, backward = torch_autograd.layer.forward, mb.moe_backward

    def chunked(layer, options, *rest):
        out, saved = forward(layer, options, *rest)
        seen.append(options.memory_limit)
        index = saved.index
        saved.index = ChunkedIndices(index.lists, index.ids, index.places, index.num_experts, chunk_tokens=16)
        return out, saved

    def plain(grad_out, saved, **options):
        assert isinstance(saved.index, ChunkedIndices)
        seen.append((saved.options.memory_limit, saved.index.chunk_tokens))
        index = saved.index
        saved.index = mb.DispatchIndices(index.lists, index.ids, index.places, index.num_experts)
        return backward(grad_out, saved, **options)

    want = step(inputs, grad_out)
    monkeypatch.setattr(torch_autograd.layer, "forward", chunked)
    monkeypatch.setattr(mb, "moe_backward", plain)
    got = step(inputs, grad_out, memory_limit=12345)
    assert seen == [12345, (12345, 16)]
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_compiled_code_calls_it_between_graphs():
    inputs, grad_out = inputs_of(), torch.randn(40, 32)

    def layer(x, ids, weights, w1, w2):
        return 2 * moe(x + 1, ids, weights, w1, w2, memory_limit=10**9)

    def gradients(function):
        out = function(*inputs)
        return out, *torch.autograd.grad(out, (inputs[0], inputs[2]), grad_out)

    for got, want in zip(gradients(torch.compile(layer, backend="aot_eager")), gradients(layer), strict=True):
        assert torch.equal(got, want)


def test_one_graph_is_refused_with_the_reason():
    inputs = inputs_of()
    compiled = torch.compile(lambda x: moe(x, *inputs[1:], memory_limit=10**9), backend="aot_eager", fullgraph=True)
    expected = "moe: expected no memory_limit in a graph" if GRAPH_BREAKS_HAVE_REASONS else ""
    with pytest.raises(RuntimeError, match=expected):
        compiled(inputs[0])


def test_transforms_are_refused():
    inputs = inputs_of(requires_grad=False)
    with pytest.raises(ValueError, match="expected None with the device meta, tensor subclasses, transforms"):
        torch.func.grad(lambda x: moe(x, *inputs[1:], memory_limit=10**9).sum())(inputs[0])


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_products_are_counted(save):
    """As those of a layer without a limit, which is an operator under such a mode, and with its results."""
    inputs, grad_out, counts = inputs_of(), torch.randn(40, 32), []
    want = step(inputs, grad_out, save=save)
    for limit in (None, 10**9):
        with FlopCounterMode(display=False) as counter:
            got = step(inputs, grad_out, save=save, memory_limit=limit)
            with torch.no_grad():
                moe(*inputs, memory_limit=limit)
        counts.append(counter.get_total_flops())
        assert all(torch.equal(got[name], value) for name, value in want.items())
    assert counts[0] == counts[1] >= 4 * 2 * 40 * 2 * 32 * 24 * 3


def test_main_grad_under_a_dispatch_mode_is_refused():
    x, ids, weights, *_ = inputs_of(requires_grad=False)
    w1, w2 = torch.nn.Parameter(torch.randn(5, 32, 48)), torch.nn.Parameter(torch.randn(5, 24, 32))
    w1.main_grad, w2.main_grad = torch.zeros_like(w1), torch.zeros_like(w2)
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="main_grad under a dispatch mode"):
        moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True, memory_limit=10**9)


def test_module():
    layer = MoE(**SIZES, memory_limit=10**9)
    assert "memory_limit=1000000000" in repr(layer) and "memory_limit" not in repr(MoE(**SIZES))
    x, plain = torch.randn(7, 32), MoE(**SIZES)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain(x))
    factors = MoE(**SIZES, memory_limit=10**9, lora_rank=4)
    factors(x).sum().backward()
    assert factors.lora_b1.grad.abs().max() > 0 and factors.w1.grad is None
    for options, error, message in [
        ({"memory_limit": 0}, ValueError, "MoE: memory_limit: expected None, or at least 1 byte, got 0"),
        ({"memory_limit": 1.5}, TypeError, "MoE: memory_limit: expected an int, got 1.5"),
    ]:
        with pytest.raises(error, match=message):
            MoE(**SIZES, **options)


def model_of(*layers, **options):
    return torch.nn.ModuleDict({f"layer{i}": MoE(**(SIZES | sizes), **options) for i, sizes in enumerate(layers)})


@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute"])
@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"identity_experts": 3}, {"lora_rank": 5}], ids=str)
def test_bytes_that_a_forward_keeps(options, save):
    """As the layer itself counts them."""
    layer, L = MoE(**SIZES, save=save, **options), 37
    x, ids, weights, *_ = inputs_of(L, requires_grad=False)
    given = {name: options[name] for name in ("activation", "identity_experts") if name in options}
    factors = (layer.lora_a1, layer.lora_b1, layer.lora_a2, layer.lora_b2) if "lora_rank" in options else ()
    lora = mb.Lora(*(factor.detach() for factor in factors)) if factors else None
    _, saved = mb.moe_forward(x, ids, weights, layer.w1.detach(), layer.w2.detach(), save=save, lora=lora, **given)
    padding = 0 if not factors or save == "recompute" else 2 * L * 2 * (16 - 5) * 4  # which rows have on CUDA alone
    assert kept_bytes(layer, L, save) == saved.nbytes + padding


def test_layers_get_what_fits():
    """All of "fp8" before any of "minimal", in the order of the layers; a layer that is too large is passed over."""
    model = model_of({}, {"d_hidden": 240}, {}, {})
    of = {save: [kept_bytes(layer, 100, save) for layer in model.values()] for save in ("minimal", "fp8", "recompute")}
    cases = [
        (sum(of["minimal"]), "minimal minimal minimal minimal"),
        (sum(of["minimal"]) - 1, "minimal minimal minimal fp8"),
        (sum(of["fp8"]), "fp8 fp8 fp8 fp8"),
        (sum(of["fp8"]) - 1, "fp8 fp8 fp8 recompute"),
        (sum(of["recompute"]) + of["fp8"][0] * 3, "fp8 recompute fp8 fp8"),
        (sum(of["recompute"]), "recompute recompute recompute recompute"),
    ]
    for budget, wanted in cases:
        lines = []
        found = fit_saves(model, 100, budget, report=lines.append)
        assert " ".join(chosen.save for chosen in found) == wanted
        assert [layer.save for layer in model.values()] == wanted.split()
        assert sum(chosen.nbytes for chosen in found) <= budget
        assert [line.split(":")[0] for line in lines] == list(model)
    assert "save='fp8' keeps" in lines[0] and lines[0].endswith("of 0 that are left")
    exact = fit_saves(model, 100, sum(of["fp8"]), policies=("minimal", "recompute"), report=None)
    assert {chosen.save for chosen in exact} == {"minimal", "recompute"}


def test_a_shared_layer_keeps_something_for_each_name():
    model = model_of({}, {})
    model["again"] = model["layer0"]
    of = {save: kept_bytes(model["layer0"], 100, save) for save in ("minimal", "recompute")}
    budget = 2 * of["recompute"] + of["minimal"]
    shared, other = fit_saves(model, 100, budget, policies=("minimal", "recompute"), report=None)
    assert (shared.save, shared.nbytes) == ("recompute", 2 * of["recompute"]) and other.save == "minimal"
    with pytest.raises(ValueError, match=f"expected at least {3 * of['recompute']} bytes for 2 layers"):
        fit_saves(model, 100, 3 * of["recompute"] - 1)


def test_budgets_and_policies_that_cannot_be():
    model = model_of({}, {}, save="paper")
    least = 2 * kept_bytes(model["layer0"], 50, "recompute")
    with pytest.raises(ValueError, match=f"fit_saves: budget: expected at least {least} bytes for 2 layers"):
        fit_saves(model, 50, least - 1)
    for policies in ((), ("paper",), ("recompute", "minimal")):
        with pytest.raises(ValueError, match="fit_saves: policies: expected some of"):
            fit_saves(model, 50, 10**9, policies=policies)
    with pytest.raises(ValueError, match="fit_saves: model: expected one with an MoE, got a Linear without"):
        fit_saves(torch.nn.Linear(2, 2), 50, 10**9)
    with pytest.raises(ValueError, match="fit_saves: tokens: expected at least 0, got -1"):
        fit_saves(model, -1, 10**9)
    with pytest.raises(
        TypeError, match=r"fit_saves: dtype: expected None or one of torch.bfloat16, .*, got torch.int8"
    ):
        fit_saves(model, 50, 10**9, dtype=torch.int8)
    assert [layer.save for layer in model.values()] == ["paper", "paper"]


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_peaks_on_a_gpu(save):
    """torch's allocator gives multiples of 512 bytes, so each of some 20 buffers may take more."""
    sizes = {"d_model": 512, "d_hidden": 256, "num_experts": 8, "k": 4}
    inputs = inputs_of(20_000, "cuda", torch.bfloat16, **sizes)
    grad_out = torch.randn(20_000, 512, device="cuda", dtype=torch.bfloat16)
    want = step(inputs, grad_out, save=save)
    limit = 96 << 20
    out = moe(*inputs, save=save, memory_limit=limit)  # compiles
    torch.autograd.grad(out, (inputs[0], inputs[2], inputs[3]._base, inputs[4]._base), grad_out)
    del out
    gc.collect()  # of earlier tests, whose memory may else be freed between the readings
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = moe(*inputs, save=save, memory_limit=limit)
    kept = torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() - kept <= limit + 20 * 512
    assert kept > before
    torch.cuda.reset_peak_memory_stats()
    got = torch.autograd.grad(out, (inputs[0], inputs[2], inputs[3]._base, inputs[4]._base), grad_out)
    assert torch.cuda.max_memory_allocated() - kept <= limit + 20 * 512
    got = dict(zip(("out", "x", "weights", "w1", "w2"), (out.detach(), *got), strict=True))
    for name, tolerance in (("out", 0), ("x", 0), ("weights", 1e-5), ("w1", 2**-8), ("w2", 2**-8)):
        difference = (got[name].double() - want[name].double()).norm()
        assert difference <= tolerance * want[name].double().norm(), name
