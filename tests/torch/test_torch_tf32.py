"""`moe` multiplies float32 in TF32 where torch does, by torch's setting at the time of forward."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy.interop.torch import arguments, moe  # noqa: E402
from tests.cases import Case, make_inputs  # noqa: E402

matmul = torch.backends.cuda.matmul
NEW = arguments.HAS_FP32_PRECISION


@pytest.fixture(autouse=True)
def setting():
    yield
    matmul.allow_tf32 = False
    if NEW:  # which the older name has set, and which then hides what is set for all
        torch.backends.fp32_precision = matmul.fp32_precision = "none"


def on_cuda(dtype):
    with FakeTensorMode():
        return torch.empty(2, 3, device="cuda", dtype=dtype)


def set_precision(where, value):
    where.fp32_precision = value


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda: None, False),
        (lambda: setattr(matmul, "allow_tf32", True), True),
        (lambda: torch.set_float32_matmul_precision("high"), True),
        (lambda: torch.set_float32_matmul_precision("highest"), False),
        *(
            pytest.param(choose, expected, marks=pytest.mark.skipif(not NEW, reason="since torch 2.9"))
            for choose, expected in (
                (lambda: set_precision(matmul, "tf32"), True),
                (lambda: set_precision(torch.backends, "tf32"), True),
                # asked for allow_tf32, torch raises RuntimeError then
                (lambda: [setattr(matmul, "allow_tf32", True), set_precision(matmul, "ieee")], False),
                (lambda: [set_precision(torch.backends, "tf32"), set_precision(matmul, "ieee")], False),
            )
        ),
    ],
)
def test_torchs_setting(choose, expected):
    choose()
    assert arguments.in_tf32(on_cuda(torch.float32)) is expected
    assert not arguments.in_tf32(on_cuda(torch.bfloat16))
    assert not arguments.in_tf32(torch.empty(2, 3))  # of CUDA's products alone


def test_compiled_code_follows_the_setting():
    @torch.compile(fullgraph=True, backend="eager")
    def chosen(x):
        return x + 1 if arguments._matmuls_in_tf32() else x

    found = []
    for allowed in (False, True, False):
        matmul.allow_tf32 = allowed
        found.append(float(chosen(torch.zeros(()))))
    assert found == [0, 1, 0]


@pytest.mark.parametrize("compiles", [False, True])
def test_backward_is_in_the_precision_of_its_forward(monkeypatch, compiles):
    case = Case(L=40, k=2, E=3, d=16, h=24)
    inputs = make_inputs(case, 0, np.float32)
    x, ids, weights, w1, w2, grad_out = map(torch.from_numpy, inputs)
    leaves = [t.requires_grad_() for t in (x, weights, w1, w2)]
    layer = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiles else moe
    monkeypatch.setattr(arguments, "in_tf32", lambda _: True)  # on the CPU, whose products can be rounded too
    out = layer(x, ids, weights, w1, w2)
    monkeypatch.setattr(arguments, "in_tf32", lambda _: False)
    got = dict(zip(("x", "weights", "w1", "w2"), torch.autograd.grad(out, leaves, grad_out), strict=True))
    rounded, saved = mb.moe_forward(*inputs[:5], tf32=True)
    np.testing.assert_array_equal(out.detach().numpy(), rounded)
    want, exact = (vars(mb.moe_backward(grad_out.numpy(), s)) for s in (saved, mb.moe_forward(*inputs[:5])[1]))
    for name, gradient in got.items():
        np.testing.assert_array_equal(gradient.numpy(), want[name], err_msg=name)
        assert (want[name] != exact[name]).any(), name


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
def test_gpu_follows_torchs_setting(compiles):
    inputs = make_inputs(Case(L=300, k=2, E=3, d=136, h=72), 0, np.float32)
    x, ids, weights, w1, w2, grad_out = (torch.from_numpy(a).cuda() for a in inputs)
    leaves = [t.requires_grad_() for t in (x, weights, w1, w2)]
    layer = torch.compile(moe, fullgraph=True, backend="aot_eager") if compiles else moe
    for allowed in (False, True, False):
        matmul.allow_tf32 = allowed
        out = layer(x, ids, weights, w1, w2)
        matmul.allow_tf32 = not allowed
        got = torch.autograd.grad(out, leaves, grad_out)
        want, saved = mb.moe_forward(x.detach(), ids, weights.detach(), w1.detach(), w2.detach(), tf32=allowed)
        gradients = vars(mb.moe_backward(grad_out, saved))
        assert torch.equal(out, want)
        assert all(torch.equal(g, gradients[n]) for g, n in zip(got, ("x", "weights", "w1", "w2"), strict=True))
