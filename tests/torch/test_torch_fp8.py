"""`moe` and `MoE` in e4m3 on torch tensors: the layer's own results, and the weights that a forward has."""

import re

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.frameworks import Torch
from tests.cases import Case
from tests.cases import make_inputs as make_layer_inputs

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


def test_weights_are_held_in_fp8_alone():
    with pytest.raises(ValueError, match=r"^MoE: quantize_weights: precision: expected 'fp8', got None$"):
        MoE(48, 144, 4, 2).quantize_weights()


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


def pair_of_layers():
    torch.manual_seed(0)
    made = [MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16) for _ in range(2)]
    return *made, torch.randn(40, 48).bfloat16()


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("swapped", [by_call, by_data, by_assignment])
def test_other_parameters_between_forward_and_backward(swapped, hold):
    """As those of an averaged model: backward has the e4m3 weights of its own forward."""
    layer, others, x = pair_of_layers()
    x.requires_grad_()
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    layer.quantize_weights(hold=hold)
    out = layer(x)
    with torch.no_grad():
        swapped(layer, others, x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, want)
    assert torch.equal(layer(x), out)


def by_module(x):
    layer, *_ = pair_of_layers()
    layer.quantize_weights()
    return lambda: layer(x), layer.quantize_weights


def by_function(x):
    _, ids, weights, w1, w2, _ = tensors()
    made = mb.quantize_weights(w1, w2)
    options = {"precision": "fp8", "fp8_weights": made}
    return lambda: moe(x, ids, weights, w1, w2, **options), lambda: mb.quantize_weights(-w1, -w2, out=made)


@pytest.mark.parametrize("way", [by_module, by_function])
def test_weights_written_again_between_forward_and_backward(way):
    """Backward was to read what has been overwritten, also that of a forward by operators."""
    x = torch.randn(40, 48).bfloat16().requires_grad_()
    forward, write = way(x)
    outs = [forward()]
    with Mode():
        outs.append(forward())
    write()
    for out in outs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    forward().sum().backward()


def test_weights_written_again_in_inference_mode():
    """Whose tensors have no count of writes."""
    with torch.inference_mode():
        w1, w2 = tensors()[3:5]
        made = mb.quantize_weights(-w1, w2)
        again = mb.quantize_weights(w1, w2, out=made)
    assert again is made and torch.equal(bits_of(made.w1), bits_of(mb.quantize_weights(w1, w2).w1))


def bits_of(tensor):
    return tensor.view(torch.uint8)


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def test_replicas_have_weights_of_their_own():
    """DataParallel's run at once, in threads, each on another GPU."""
    layer, _, x = pair_of_layers()
    held = layer.quantize_weights()
    out, replica = layer(x), layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, -parameter)  # as DataParallel does with what it sends
    assert torch.equal(replica(x), fresh(replica)(x))
    assert layer.fp8_weights is held and torch.equal(layer(x), out)


def test_a_hook_quantises_once_for_each_step_of_an_optimizer():
    """Also with several groups of parameters: it trains as a layer does whose every forward quantises."""
    layer, other, _ = pair_of_layers()
    other.load_state_dict(layer.state_dict())
    calls, trained = [], []
    for module in (layer, other):
        groups = [{"params": [module.w1_storage], "lr": 0.5}, {"params": [module.w2_storage, module.router]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if module is layer:
            module.quantize_weights()
            optimizer.register_step_post_hook(lambda *_: calls.append(layer.quantize_weights()))
        torch.manual_seed(1)
        for _ in range(3):
            for _ in range(2):
                (module(torch.randn(40, 48).bfloat16()).float() - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: parameter.detach().clone() for name, parameter in module.named_parameters()})
    assert len(calls) == 3
    for name, parameter in trained[0].items():
        assert torch.equal(parameter, trained[1][name]), name
    assert not torch.equal(trained[0]["w1_storage"], pair_of_layers()[0].w1_storage)


def fresh(layer):
    """Another layer, with the parameters that this one has now."""
    made = MoE(48, 144, 4, 2, precision="fp8", dtype=torch.bfloat16)
    made.load_state_dict({name: getattr(layer, name).detach() for name in made.state_dict()})
    return made


def counted(parameter, grad):
    with torch.no_grad():
        parameter.add_(grad, alpha=-0.5)


WRITES = {
    "counted": counted,
    "data": lambda parameter, grad: parameter.data.add_(grad, alpha=-0.5),
    "another address": lambda parameter, grad: setattr(parameter, "data", parameter.data - 0.5 * grad),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_every_forward_has_the_weights_as_they_are(write, evaluates):
    """However an optimizer writes, and whether or not a forward came between backward and step."""
    layer, _, x = pair_of_layers()
    seen = [layer(x)]
    for _ in range(2):
        layer.zero_grad()
        layer(x).float().square().mean().backward()
        if evaluates:
            with torch.no_grad():
                layer(x)
        for parameter in layer.parameters():
            WRITES[write](parameter, 50 * parameter.grad)
        seen.append(layer(x))
        assert torch.equal(seen[-1], fresh(layer)(x)) and not torch.equal(seen[-1], seen[-2])
    assert layer.fp8_weights is None
    assert "precision='fp8'" in repr(layer) and len(layer.state_dict()) == 3


SHORT = {"w1": lambda w1: (w1[:, :, :140], w1[:, :, 144:284]), "w2": lambda w2: w2[:, :140]}
REFUSED = [
    (ValueError, "moe: fp8_weights: expected None without precision='fp8'", {"precision": None, "other": True}),
    (ValueError, "moe: fp8_weights: expected those of w1 (4, 48, 288)", {"other": True}),
    (ValueError, "moe: precision: expected one of None, 'fp8', got 'fp4'", {"precision": "fp4"}),
    (TypeError, "moe: x: expected bfloat16 with precision='fp8', got float32", {"cast": torch.float32}),
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
@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute"])
@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
@pytest.mark.parametrize("k", [1, 2])
def test_on_the_gpu(k, gate_up, save, on_hopper):
    """As the reference of the recipe; the same bits again. L, d and h of several tiles, groups and k-steps.

    Interleaved columns have the activation and the biases of gpt-oss.
    """
    case = Case(L=700, k=k, E=4, d=1040, h=400, order="transposed", routing="absent")
    inputs = make_layer_inputs(case, 0, ml_dtypes.bfloat16)
    options, names = {"save": save, "precision": "fp8", "gate_up": gate_up}, ["out", "x", "weights", "w1", "w2"]
    biases = {}
    if gate_up == "interleaved":
        rng = np.random.default_rng(1)
        biases = {n: rng.standard_normal((case.E, c)).astype(np.float32) for n, c in (("b1", 800), ("b2", case.d))}
        options["activation"] = "swiglu_oai"
    x, ids, weights, w1, w2, grad_out = inputs
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, **options, **biases)
    want = {"out": out, **vars(reference.moe_backward(grad_out, saved))}
    x, ids, weights, w1, w2, grad_out = (Torch.from_numpy(array).cuda() for array in inputs)
    options |= {name: Torch.from_numpy(array).cuda() for name, array in biases.items()}
    found = []
    for fp8_weights in (mb.quantize_weights(w1, w2, gate_up=gate_up), None):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, **options, fp8_weights=fp8_weights)
        found.append({"out": out, **vars(mb.moe_backward(grad_out, saved))})
    for name in (*names, *biases):
        exact, got = want[name].astype(np.float64), found[0][name]
        error = np.linalg.norm(got.double().cpu().numpy() - exact) / np.linalg.norm(exact)
        assert error <= 0.02, (name, error)
        assert torch.equal(got, found[1][name]), name
