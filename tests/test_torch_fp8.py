"""`moe` and `MoE` in e4m3 on torch tensors: the layer's own results, and weights that are quantised as they change."""

import re

import ml_dtypes
import numpy as np
import pytest
from cases import Case
from cases import make_inputs as make_layer_inputs

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.arrays import Torch

torch = pytest.importorskip("torch")
from moeblaze_cupy.interop.torch import MoE, moe  # noqa: E402

CASE = Case(L=40, k=2, E=4, d=48, h=144, order="transposed")


def tensors(case=CASE):
    """x, ids, weights, w1, w2, grad_out."""
    return [Torch.from_numpy(array) for array in make_layer_inputs(case, 0, ml_dtypes.bfloat16)]


def bits(tensor):
    return Torch.to_numpy(tensor.detach().contiguous()).view(np.uint8)


@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute"])
@pytest.mark.parametrize("ready", [True, False])
def test_moe_is_the_layer(save, ready):
    x, ids, weights, w1, w2, grad_out = tensors()
    fp8_weights = mb.quantize_weights(w1, w2)
    options = {"save": save, "precision": "fp8", "fp8_weights": fp8_weights if ready else None}
    want, saved = mb.moe_forward(x, ids, weights, w1, w2, **options)
    gradients = mb.moe_backward(grad_out, saved, keep_saved=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, w1, w2)]
    out = moe(leaves[0], ids, *leaves[1:], **options)
    out.backward(grad_out)
    np.testing.assert_array_equal(bits(out), bits(want))
    for leaf, name in zip(leaves, ("x", "weights", "w1", "w2"), strict=True):
        np.testing.assert_array_equal(bits(leaf.grad), bits(getattr(gradients, name)), err_msg=name)
    with torch.no_grad():
        inferred = moe(x, ids, weights, w1, w2, **options)
        plain = moe(x, ids, weights, w1, w2)
    np.testing.assert_array_equal(bits(inferred), bits(want))
    assert 0.02 < (plain.float() - want.float()).norm() / plain.float().norm() < 0.1  # it is in e4m3


def by_call(layer, others, x):
    torch.func.functional_call(layer, dict(others.named_parameters()), (x,))


def by_data(layer, others, x):
    for call in (layer, lambda _: None):
        for own, other in zip(layer.parameters(), others.parameters(), strict=True):
            own.data, other.data = other.data, own.data
        call(x)


def by_assignment(layer, others, x):
    own = layer.w1_storage, layer.w2_storage
    layer.w1_storage, layer.w2_storage = others.w1_storage, others.w2_storage
    layer(x)
    layer.w1_storage, layer.w2_storage = own


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("swapped", [by_call, by_data, by_assignment])
def test_other_parameters_between_forward_and_backward(swapped, in_graphs):
    """As those of an averaged model: backward has the e4m3 weights of its own forward, or says that they are gone."""
    torch.manual_seed(0)
    layer = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    others = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(40, 48).bfloat16().requires_grad_()
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    if in_graphs:  # which read the weights where they are
        layer.quantize_weights(hold=True)
        layer.quantize_weights()
    out = layer(x)
    with torch.no_grad():
        swapped(layer, others, x)
    if in_graphs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, want)
    assert torch.equal(layer(x), out)


def test_replicas_have_weights_of_their_own():
    """DataParallel's run at once, in threads, each on another GPU."""
    layer = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    x = torch.randn(40, 48).bfloat16()
    out, replica = layer(x), layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, -parameter)  # as DataParallel does with what it sends
    other = replica(x)
    assert replica.fp8_weights is not layer.fp8_weights
    assert torch.equal(layer(x), out) and not torch.equal(other, out)


def test_module_quantises_its_weights_when_they_have_changed(monkeypatch):
    calls, plain = [], mb.quantize_weights

    def counted(*arguments, **options):
        calls.append(1)
        return plain(*arguments, **options)

    monkeypatch.setattr(mb, "quantize_weights", counted)
    torch.manual_seed(0)
    layer = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x = torch.randn(40, 48, dtype=torch.bfloat16)
    first = layer(x)
    memory = layer.fp8_weights.w1.data_ptr()
    layer(x).float().square().mean().backward()
    assert len(calls) == 1
    optimizer.step()
    second = layer(x)
    layer(x)
    assert len(calls) == 2 and layer.fp8_weights.w1.data_ptr() == memory
    assert not torch.equal(first, second)
    fresh = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    fresh.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(bits(fresh(x)), bits(second))
    assert "precision='fp8'" in repr(layer) and len(layer.state_dict()) == 3
    layer.w2_storage.data = layer.w2_storage.data * 2  # another address, the same version
    layer(x)
    assert len(calls) == 4


SHORT = {"w1": lambda w1: (w1[:, :, :140], w1[:, :, 144:284]), "w2": lambda w2: w2[:, :140]}
REFUSED = [
    (ValueError, "moe_forward: fp8_weights: expected None without precision='fp8'", {"precision": None, "other": True}),
    (ValueError, "moe_forward: fp8_weights: expected those of w1 (4, 48, 288)", {"other": True}),
    (ValueError, "moe_forward: precision: expected one of None, 'fp8', got 'fp4'", {"precision": "fp4"}),
    (ValueError, "moe_forward: gate_up: expected 'halves' with precision='fp8'", {"gate_up": "interleaved"}),
    (TypeError, "moe_forward: x: expected bfloat16 with precision='fp8', got float32", {"cast": torch.float32}),
    (ValueError, "for 'fp8', got (d, h) = (48, 140)", {"change": SHORT}),
]


@pytest.mark.parametrize(("error", "message", "given"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_is_not_served_is_named(error, message, given):
    x, ids, weights, w1, w2, _ = tensors()
    options = {"precision": "fp8", **given}
    if options.pop("other", False):
        options["fp8_weights"] = mb.quantize_weights(w1[:, :, :144].contiguous(), w2)
    dtype, change = options.pop("cast", torch.bfloat16), options.pop("change", {})
    w1, w2 = change.get("w1", lambda w: w)(w1.to(dtype)), change.get("w2", lambda w: w)(w2.to(dtype))
    with pytest.raises(error, match=re.escape(message)):
        moe(x.to(dtype), ids, weights, w1, w2, **options)


def test_modules_name_what_they_do_not_serve():
    with pytest.raises(ValueError, match="MoE: precision: expected one of None, 'fp8', got 'fp4'"):
        MoE(48, 144, 4, 2, precision="fp4")


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "fp8"])
@pytest.mark.parametrize("k", [1, 2])
def test_on_the_gpu(k, save, on_hopper):
    """As the reference of the recipe; the same bits again. L, d and h of several tiles, groups and k-steps."""
    case = Case(L=700, k=k, E=4, d=1040, h=400, order="transposed", routing="absent")
    inputs = make_layer_inputs(case, 0, ml_dtypes.bfloat16)
    x, ids, weights, w1, w2, grad_out = inputs
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, save=save, precision="fp8")
    want = {"out": out, **vars(reference.moe_backward(grad_out, saved))}
    x, ids, weights, w1, w2, grad_out = (Torch.from_numpy(array).cuda() for array in inputs)
    found = []
    for fp8_weights in (mb.quantize_weights(w1, w2), None):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save, precision="fp8", fp8_weights=fp8_weights)
        found.append({"out": out, **vars(mb.moe_backward(grad_out, saved))})
    for name in ("out", "x", "weights", "w1", "w2"):
        exact, got = want[name].astype(np.float64), found[0][name]
        assert np.linalg.norm(got.double().cpu().numpy() - exact) <= 0.02 * np.linalg.norm(exact), name
        assert torch.equal(got, found[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("hold", [False, True])
def test_copies_that_another_stream_writes(hold, on_hopper):
    """A forward on this stream, while the other one has yet to write what its forward made of new weights."""
    torch.manual_seed(0)
    layer = MoE(256, 256, 4, 2, precision="fp8", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    with torch.no_grad():
        before = layer(x)
        layer.w2_storage.mul_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(500_000_000)
            layer.quantize_weights(hold=hold)
        got = layer(x)
        torch.cuda.synchronize()
        assert torch.equal(got, -before) and torch.equal(layer(x), got)
