"""The torch operators: what they promise torch, and that calls by them are the calls of eager mode."""

import functools
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.types import is_consumed, pair
from tests.cases import Case, make_inputs

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from moeblaze_cupy.interop.torch import MoE, moe, route  # noqa: E402
from moeblaze_cupy.interop.torch import operators as torch_ops  # noqa: E402
from moeblaze_cupy.interop.torch import router_operators as torch_router_ops  # noqa: E402

SMALL = Case(L=5, k=2, E=3, d=4, h=6, order="transposed")
POLICIES = ("minimal", "fp8", "paper", "recompute")


def tensors(case=SMALL, dtype=np.float32, device="cpu", seed=0):
    """x, ids, weights, w1 (a tensor or a pair), w2, grad_out, in the case's memory order."""

    def to(array):
        return arrays.Torch.from_numpy(array).to(device)

    return [tuple(map(to, a)) if isinstance(a, tuple) else to(a) for a in make_inputs(case, seed, dtype)]


def leaves_of(x, weights, w1, w2):
    return [tensor.requires_grad_() for tensor in (x, weights, *pair(w1), w2)]


class Recorder(TorchDispatchMode):
    """Sees every operator, as selective checkpointing and FLOP counters do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moeblaze":
            self.seen.append(func.name().removeprefix("moeblaze::"))
        return func(*args, **kwargs or {})


@pytest.fixture
def overwriting(monkeypatch):
    """Makes the CPU overwrite what was saved where CUDA does."""
    backward = mb.moe_backward

    def spoiling(grad_out, saved, *, needs, keep_saved=False, accumulate=None):
        grads = backward(grad_out, saved, needs=needs, keep_saved=keep_saved, accumulate=accumulate)
        if is_consumed(saved.is_overwritable, saved.y_swi is not None, needs, keep_saved):
            for tensor in (saved.first_layer, saved.y_swi):
                if tensor is not None:
                    arrays.Torch.to_numpy(tensor)[...] = np.nan
        return grads

    monkeypatch.setattr(mb, "moe_backward", spoiling)


OPERATORS = [("minimal", "transposed"), ("paper", "pair"), ("recompute", "row"), ("fp8", "row")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("save", "order"), OPERATORS)
def test_operators_keep_what_they_promise(save, order, device):
    """Schemas, fakes with their strides, static and dynamic shapes, by torch's own checks. No slot is empty, as rows of
    empty slots hold nothing."""
    case = Case(L=5, k=2, E=3, d=4, h=6, order=order)
    x, ids, weights, w1, w2, grad_out = tensors(case, np.float32, device)
    assert (ids >= 0).all() and (ids < case.E).all()
    gate, up = (*pair(w1), None)[:2]
    options = torch_ops.Options("swiglu")
    check_operators(torch_ops.Layer(x, ids, weights, gate, up, w2), options, save, grad_out)


@pytest.mark.parametrize("pairs", [False, True])
def test_operators_keep_what_they_promise_of_all_options(pairs):
    case = Case(L=5, k=2, E=3, d=4, h=6)
    x, ids, _, w1, w2, _ = tensors(case, np.float32)
    grad_out, offsets = torch.randn(5, 2, 4), None
    if pairs:
        ids, grad_out, offsets = ids.reshape(-1), grad_out.reshape(-1, 4), torch.tensor([0, 3, 3, 5, 9, 10]).int()
    layer = torch_ops.Layer(x, ids, None, w1, None, w2, torch.randn(3, 12), None, torch.randn(3, 4), offsets)
    activation = mb.Activation("swiglu_softcap", up_cap=3.0)
    options = torch_ops.Options.of(activation, "interleaved", "output", True, 0)
    check_operators(layer, options, "paper", grad_out)


def check_operators(layer, options, save, grad_out):
    forward, check = (*layer, *options), torch.library.opcheck
    check(torch_ops.moe_fwd, (*forward, save))
    check(torch_ops.moe_infer, forward)
    _, lists, first_layer, y_swi = torch_ops.moe_fwd(*forward, save)
    kept = torch_ops.Kept(lists, first_layer if save != "recompute" else None, y_swi if save == "paper" else None)
    backward = (grad_out, *(getattr(layer, name) for name in torch_ops.READ_IN_BACKWARD), *kept)
    sums = torch_ops.Sums(*(None if w is None else torch.zeros_like(w) for w in (layer.gate, layer.up, layer.w2)))
    needs = [True, layer.weights is not None, True, True, layer.b1_gate is not None, layer.b2 is not None]
    check(torch_ops.moe_bwd, (*backward, *options, save, needs))
    check(torch_ops.moe_bwd_, (*backward, *options, save, [False, *needs[1:2], False, *needs[3:]]))
    check(torch_ops.moe_bwd_acc, (*backward, *sums, *options, save, needs))
    check(torch_ops.moe_bwd_acc_, (*backward, *sums, *options, save, needs))


def test_operators_of_the_router_keep_what_they_promise():
    logits = torch.randn(6, 4)
    options = ("sigmoid", True, 0.0, 1.0, "scores", (2, 1, 2), None, None, ("z", "entropy", "softmax"), 2)
    arguments = (logits, torch.randn(4), None, None, None, None, 2, *options)
    torch.library.opcheck(torch_router_ops.route, arguments)
    weights, ids, *sums = torch_router_ops.route(*arguments)
    read = (logits, None, None, None)
    grads = map(torch.ones_like, (weights, *sums))
    torch.library.opcheck(torch_router_ops.route_bwd, (next(grads), weights, ids, *grads, *read, *options))
    given = (logits, None, ids, None, torch.rand(6) < 0.5, torch.tensor([0, 2, 6], dtype=torch.int32), None)
    torch.library.opcheck(torch_router_ops.route, (*given, *options[:5], None, None, None, ("z",), None))


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("order", ["row", "transposed", "pair"])
def test_calls_by_operators_are_those_of_eager_mode(order, save, overwriting):
    """Bit for bit. Only a mode that is to see them has them; its absence leaves plain Python."""
    case = Case(L=9, k=2, E=3, d=4, h=6, order=order)
    x, ids, weights, w1, w2, grad_out = tensors(case)
    leaves = leaves_of(x, weights, w1, w2)
    out = moe(x, ids, weights, w1, w2, save=save)
    grads = torch.autograd.grad(out, leaves, grad_out)
    with Recorder() as mode:
        followed = moe(x, ids, weights, w1, w2, save=save)
        assert torch.equal(followed, out)
        for got, want in zip(torch.autograd.grad(followed, leaves, grad_out), grads, strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
        with torch.no_grad():
            assert torch.equal(moe(x, ids, weights, w1, w2), out)
    assert mode.seen == ["moe_fwd", "moe_bwd_", "moe_infer"]


def test_router_by_operators_is_that_of_eager_mode():
    logits = torch.randn(12, 6).requires_grad_()
    options = {"score": "sigmoid", "bias": torch.randn(6), "groups": (2, 1, 2), "scale": 2.5, "sums": ("sigmoid", "z")}

    def run():
        weights, ids, sums = route(logits, 2, sequences=3, **options)
        assert sums.entropy_sums is None
        loss = weights.square().sum() + sums.z_sums.square().sum() + sums.score_sums.square().sum()
        return weights, ids, *torch.autograd.grad(loss, logits)

    want = run()
    with Recorder() as mode:
        assert all(map(torch.equal, run(), want))
    assert mode.seen == ["route", "route_bwd"]


def test_tensor_subclasses_are_called_by_operators():
    """One that wraps another tensor gets the operator, as it may stand for more than one."""
    from torch.testing._internal.two_tensor import TwoTensor

    x, ids, weights, w1, w2, _ = tensors()
    want = [moe(tokens, ids, weights, w1, w2) for tokens in (x, -x)]
    out = moe(TwoTensor(x, -x), *(TwoTensor(t, t) for t in (ids, weights, w1, w2)))
    assert torch.equal(out.a, want[0]) and torch.equal(out.b, want[1])


BAD = {
    "shape": lambda x, ids, weights, w1, w2: (x, ids, weights, w1[:, :-1], w2),
    "dtype": lambda x, ids, weights, w1, w2: (x, ids.float(), weights, w1, w2),
    "strides": lambda x, ids, weights, w1, w2: (x.T.contiguous().T, ids, weights, w1, w2),
    "slots": lambda x, ids, weights, w1, w2: (x, ids, weights[:, :1], w1, w2),
}


@pytest.mark.parametrize("bad", BAD)
def test_fakes_make_the_checks_of_calls(bad):
    given = BAD[bad](*tensors()[:5])
    with pytest.raises((TypeError, ValueError)) as eager:
        moe(*given)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(type(eager.value)) as fake:
        moe(*map(mode.from_tensor, given))
    assert str(fake.value) == str(eager.value)


@pytest.mark.parametrize("argument", ["w1", "w1[0]", "w1[1]", "w2", "b1", "b1[1]"])
def test_errors_name_the_callers_arguments(argument):
    """Those of a compiled or transformed call, which gets a pair as two tensors."""
    x, ids, weights, w1, w2, _ = tensors()
    (E, _, columns), is_pair = w1.shape, "[" in argument
    given = {"w1": w1, "w2": w2, "b1": x.new_ones(E, columns)}
    name, part = argument.removesuffix("[0]").removesuffix("[1]"), int(argument.endswith("[1]"))
    parts = list(given[name].chunk(2, -1)) if is_pair else [given[name]]

    def call(tensor):
        whole = [*parts[:part], tensor, *parts[part + 1 :]]
        both = {"w1": given["w1"].chunk(2, -1)} if is_pair else {}
        changed = given | both | {name: tuple(whole) if is_pair else tensor}
        return moe(x, ids, weights, changed["w1"], changed["w2"], b1=changed["b1"])

    escaped = re.escape(argument)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = torch.empty_like(parts[part], device="cuda")
        with pytest.raises(TypeError, match=f"^moe: {escaped}: expected x's device cpu, got cuda:0"):
            call(elsewhere)


def test_meta_tensors_have_shapes():
    x, ids, weights, w1, w2, grad_out = (t.to("meta") for t in tensors())
    leaves = leaves_of(x, weights, w1, w2)
    for mode in (Recorder, nullcontext):
        with mode():
            grads = torch.autograd.grad(moe(x, ids, weights, w1, w2), leaves, grad_out)
        assert [(g.shape, g.stride()) for g in grads] == [(leaf.shape, leaf.stride()) for leaf in leaves]


def test_a_module_on_meta_has_shapes():
    layer, x = MoE(8, 6, 4, 2, bias=True, device="meta"), torch.zeros(3, 5, 8, device="meta", requires_grad=True)
    for mode in (Recorder, nullcontext):
        x.grad = None
        layer.zero_grad()
        with mode():
            layer(x).sum().backward()
        assert x.grad.shape == x.shape and all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("save", POLICIES)
def test_second_backward_by_operators(save, overwriting):
    x, ids, weights, w1, w2, grad_out = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    with Recorder():
        kept = moe(x, ids, weights, w1, w2, save=save, keep_saved=True)
        out = moe(x, ids, weights, w1, w2, save=save)
    first, second = (torch.autograd.grad(kept, leaves, grad_out, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, grad_out, retain_graph=True)))
    if save in ("fp8", "recompute"):
        assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, grad_out)))
    else:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*pass keep_saved=True to moe or MoE"):
            torch.autograd.grad(out, leaves, grad_out)


def test_second_derivatives_by_operators():
    x, ids, weights, w1, w2, _ = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    with Recorder():
        out = moe(x, ids, weights, w1, w2).square().sum()
        grads = torch.autograd.grad(out, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^moe: no second derivatives$"):
        grads[0].square().sum().backward()


@pytest.mark.parametrize(("policy", "forwards"), [("MUST_SAVE", 1), ("PREFER_RECOMPUTE", 2)])
def test_selective_checkpointing_sees_the_operators(policy, forwards, monkeypatch):
    calls, asked = [], []
    forward = reference.moe_forward
    monkeypatch.setattr(reference, "moe_forward", lambda *a, **o: calls.append(0) or forward(*a, **o))
    x, ids, weights, w1, w2, grad_out = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    want = torch.autograd.grad(moe(x, ids, weights, w1, w2), leaves, grad_out)
    calls.clear()

    def choose(context, operator, *args, **kwargs):
        asked.append(operator)
        return CheckpointPolicy[policy if operator is torch_ops.moe_fwd else "PREFER_RECOMPUTE"]

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    out = checkpoint(moe, x, ids, weights, w1, w2, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad_out), want))
    assert torch_ops.moe_fwd in asked and len(calls) == forwards


@pytest.mark.parametrize("save", POLICIES)
def test_transforms_of_torch_func(save, overwriting):
    x, ids, weights, w1, w2, grad_out = tensors()

    def layer(x, weights, w1, w2):
        return moe(x, ids, weights, w1, w2, save=save)

    given = (x, weights, w1, w2)
    grads = torch.func.grad(lambda *given: (layer(*given) * grad_out).sum(), (0, 1, 2, 3))(*given)
    out, vjp = torch.func.vjp(layer, *given)
    leaves = leaves_of(x.clone(), weights.clone(), w1.clone(), w2.clone())
    want = torch.autograd.grad(layer(*leaves), leaves, grad_out)
    assert torch.equal(out, layer(*given))
    for got in (grads, vjp(grad_out)):
        assert all(map(torch.equal, got, want))


def test_transforms_of_the_module():
    layer, x = MoE(8, 6, 4, 2, score="sigmoid", bias=True), torch.randn(7, 8)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)(parameters, x)
    loss(dict(layer.named_parameters()), x).backward()
    assert all(torch.equal(grads[name], p.grad) for name, p in layer.named_parameters())


def test_transforms_without_a_rule_are_refused():
    x, ids, weights, w1, w2, _ = tensors()

    def loss(x):
        return moe(x, ids, weights, w1, w2).square().sum()

    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x)
    with pytest.raises(RuntimeError):
        torch.func.jvp(loss, (x,), (x,))
    of_router = torch.func.grad(lambda logits: route(logits, 2)[0].square().sum())
    outside = "expected a call outside of vmap"
    for name, per_sample in (("moe: x", torch.func.grad(loss)), ("route: logits", of_router)):
        for batch in (1, 2):
            with pytest.raises(RuntimeError, match=f"^{name}: {outside}"):
                torch.vmap(per_sample)(torch.stack([x] * batch))
    for call in (loss, MoE(x.shape[1], 6, 4, 2), lambda logits: route(logits, 2)[0]):
        with torch.no_grad(), pytest.raises(RuntimeError, match=outside):
            torch.vmap(call)(torch.stack([x, x]))
    with pytest.raises(RuntimeError, match=f"^moe: x: {outside}"):
        torch.vmap(lambda w2: moe(x, ids, weights, w1, w2))(torch.stack([w2, w2]))
    _, pull_back = torch.func.vjp(lambda x: moe(x, ids, weights, w1, w2), x)
    with pytest.raises(RuntimeError, match=f"^moe: gradient: {outside}"):
        torch.vmap(pull_back)(torch.stack([x, x]))


def test_make_fx_holds_the_operators():
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = MoE(8, 6, 4, 2), torch.randn(7, 8)
    with torch.no_grad():
        graph = make_fx(layer)(x)
        assert torch.equal(graph(x), layer(x))
    called = {str(node.target) for node in graph.graph.nodes if "moeblaze" in str(node.target)}
    assert called == {"moeblaze.route.default", "moeblaze.moe_infer.default"}


@pytest.mark.parametrize("needs", [("x", "weights", "w1", "w2"), ("x",), ("weights",), ("w1",), ("w2",), ()])
@pytest.mark.parametrize("kind", ["one tensor", "pair", "relu", "pairs of tokens and experts"])
def test_flops_are_those_of_the_products(kind, needs):
    """As torch counts a loop over the experts, whose experts' rows are all slots."""
    L, k, E, d, h = 40, 2, 4, 24, 16
    gated = kind != "relu"
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(L)])
    tensors = {"x": torch.randn(L, d), "weights": torch.rand(L, k)}
    tensors |= {"w1": torch.randn(E, d, h * (1 + gated)), "w2": torch.randn(E, h, d)}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in needs)
    options = {"activation": "swiglu" if gated else "relu"}

    def by_experts(x, weights, w1, w2):
        out = torch.zeros(L, d)
        for e in range(E):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            first = x[tokens] @ w1[e]
            y = torch.nn.functional.silu(first[:, :h]) * first[:, h:] if gated else first.relu()
            out = out.index_add(0, tokens, (y * weights[tokens, slots, None]) @ w2[e])
        return out

    def by_layer(x, weights, w1, w2, save="minimal"):
        w1 = (w1[:, :, :h], w1[:, :, h:]) if kind == "pair" else w1
        if kind.startswith("pairs"):
            offsets = torch.arange(0, L * k + 1, k, dtype=torch.int32)
            return moe(x, ids.flatten(), weights.flatten(), w1, w2, save=save, token_offsets=offsets, **options)
        return moe(x, ids, weights, w1, w2, save=save, **options)

    def counted(layer, **given):
        with FlopCounterMode(display=False) as counter:
            out = layer(**tensors, **given)
            if needs:
                out.sum().backward()
        return counter.get_total_flops()

    flops = counted(by_layer)
    assert flops == counted(by_experts) and flops >= 2 * L * k * d * h * (2 + gated)
    again = 2 * L * k * d * h * (1 + gated) if needs else 0
    assert counted(by_layer, save="recompute") == flops + again


def test_flops_of_sums_are_those_of_gradients():
    L, k, E, d, h = 40, 2, 4, 24, 16
    x, weights, ids = torch.randn(L, d), torch.rand(L, k), torch.randint(E, (L, k))
    w1, w2 = torch.nn.Parameter(torch.randn(E, d, 2 * h)), torch.nn.Parameter(torch.randn(E, h, d))
    found = []
    for accumulates in (False, True):
        w1.main_grad, w2.main_grad = torch.zeros_like(w1), torch.zeros_like(w2)
        with FlopCounterMode(display=False) as counter:
            moe(x, ids, weights, w1, w2, accumulate_into_main_grad=accumulates).sum().backward()
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


def test_the_import_asks_no_other_module_for_anything():
    """Modules such as `cupy.testing` load their contents when they are asked for their file."""
    code = """
import sys, types
import torch
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        print("asked for", name)
        raise AttributeError(name)
sys.modules["lazy"] = Lazy("lazy")
import moeblaze_cupy.interop.torch
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_flops_are_counted_whenever_the_counter_is_imported():
    """The counter imports Triton, so the adapter leaves its import to whoever counts."""
    code = """
import importlib, sys
from moeblaze_cupy.interop.torch import MoE
import torch
assert not {"torch.utils.flop_counter", "triton"} & sys.modules.keys()
import torch.utils.flop_counter as flop_counter
layer, x = MoE(8, 6, 4, 2), torch.randn(5, 8, requires_grad=True)
operators = torch.ops.moeblaze.moe_fwd, torch.ops.moeblaze.moe_bwd_
for module in (flop_counter, importlib.reload(flop_counter)):
    with module.FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    print(*map(counter.get_flop_counts()["Global"].get, operators))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    products = 3 * 2 * (5 * 2) * 8 * 6  # of gate, up and down: L k slots by d by h
    assert done.stdout == f"{products} {2 * products}\n" * 2, done.stderr


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("needs", [("x", "weights", "lora"), ("lora",), ("x",), ()], ids=str)
@pytest.mark.parametrize(("ranks", "packed"), [((3, 5), True), ((None, 5), False), ((3, None), False), (None, True)])
def test_flops_of_factors_and_packed_experts(ranks, packed, needs, save):
    """Those of torch's products on the decoded weights, with x a^T and (x a^T) b^T apart."""
    L, k, E, d, h = 40, 2, 4, 64, 32
    x, weights = torch.randn(L, d), torch.rand(L, k)
    ids = torch.randint(E, (L, k), generator=torch.Generator().manual_seed(1))
    w1, w2 = torch.randn(E, d, 2 * h), torch.randn(E, h, d)
    given = mb.quantize_experts(w1, w2, "nf4") if packed else (w1, w2)
    factors = []
    for rank, (inner, outer) in zip(ranks or (), ((d, 2 * h), (h, d)), strict=False):
        factors += [None, None] if rank is None else [torch.randn(E, rank, inner), torch.randn(E, outer, rank)]
    lora = mb.Lora(*factors) if ranks else None
    x.requires_grad_("x" in needs)
    weights.requires_grad_("weights" in needs)
    for factor in factors:
        if factor is not None:
            factor.requires_grad_("lora" in needs)

    def product(rows, weight, number, expert):
        found = rows @ weight[expert]
        a, b = factors[2 * number : 2 * number + 2] if ranks else (None, None)
        return found if a is None else found + (rows @ a[expert].T) @ b[expert].T

    def by_experts():
        out = torch.zeros(L, d)
        for e in range(E):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            first = product(x[tokens], w1, 0, e)
            y = torch.nn.functional.silu(first[:, :h]) * first[:, h:]
            out = out.index_add(0, tokens, product(y * weights[tokens, slots, None], w2, 1, e))
        return out

    def counted(layer):
        with FlopCounterMode(display=False) as counter:
            out = layer()
            if out.requires_grad:
                out.sum().backward()
        return counter.get_total_flops()

    again = 0
    trains = x.requires_grad or weights.requires_grad or any(f is not None and f.requires_grad for f in factors)
    if save == "recompute" and trains:
        again = 2 * L * k * (d * 2 * h + (ranks[0] * (d + 2 * h) if ranks and ranks[0] else 0))
    got = counted(lambda: moe(x, ids, weights, *given, lora=lora, save=save))
    assert got == counted(by_experts) + again > 0
