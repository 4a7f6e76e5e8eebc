"""`moe` and `MoE` in e4m3 under torch.compile and torch.func: eager mode's bits, and never weights of before."""

import copy
import dataclasses
import functools
import pickle

import ml_dtypes
import pytest
from test_torch_ops import Recorder, check_operators

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.frameworks import Torch
from moeblaze_cupy.layer.api import map_fp8
from moeblaze_cupy.types import pair
from tests.cases import Case
from tests.cases import make_inputs as make_layer_inputs

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from moeblaze_cupy.interop.torch import MoE, moe  # noqa: E402
from moeblaze_cupy.interop.torch import fp8 as torch_fp8  # noqa: E402
from moeblaze_cupy.interop.torch import operators as torch_ops  # noqa: E402
from tests.torch_versions import CHECKPOINTS_COMPILED_FUNCTIONS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
CASE = Case(L=9, k=2, E=3, d=16, h=32, order="transposed")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before, or kept on disk, stands in for what is compiled here."""
    import torch._inductor.config

    config = torch._inductor.config
    before, config.force_disable_caches = config.force_disable_caches, True
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    config.force_disable_caches = before


def tensors(order="transposed"):
    """x, ids, weights, w1, w2, grad_out."""
    made = make_layer_inputs(dataclasses.replace(CASE, order=order), 0, ml_dtypes.bfloat16)
    return [tuple(map(Torch.from_numpy, a)) if isinstance(a, tuple) else Torch.from_numpy(a) for a in made]


def gradients(function, order="transposed", ready=False):
    """Output and gradients of `function` on the same numbers whenever it is asked."""
    x, ids, weights, w1, w2, grad_out = tensors(order)
    fp8_weights = mb.quantize_weights(w1, w2) if ready else None
    leaves = [tensor.requires_grad_() for tensor in (x, weights, *pair(w1), w2)]
    out = function(x, ids, weights, w1, w2, fp8_weights)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def block(x, ids, weights, w1, w2, fp8_weights, **options):
    """The layer among others, so that what it reads and writes is neither input nor output of the graph."""
    return 2 * moe(-x, ids, weights, w1, w2, precision="fp8", fp8_weights=fp8_weights, **options)


def recomputed(*args):
    return checkpoint(block, *args, use_reentrant=False)


made_again = functools.partial(block, keep_fp8_weights=False)


def same(got, want):
    return all(map(torch.equal, got, want))


@pytest.mark.parametrize(("ready", "order"), [(False, "transposed"), (False, "pair"), (True, "pair")])
def test_operators_keep_what_they_promise(ready, order):
    x, ids, weights, w1, w2, grad_out = tensors(order)
    gate, up = (*pair(w1), None)[:2]
    made = torch_ops.quantize_weights(gate, up, w2, "halves")
    torch.library.opcheck(torch_ops.quantize_weights, (gate, up, w2, "halves"))
    layer = torch_ops.Layer(x, ids, weights, gate, up, w2)
    options = torch_ops.Options("swiglu", precision="fp8")
    if ready:  # as bytes, of which opcheck can make what it compares
        made = (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in made)
        check_operators(layer._replace(**dict(zip(torch_ops.IN_FP8, made, strict=True))), options, "fp8", grad_out)
    else:
        torch.library.opcheck(torch_ops.moe_infer, (*layer, *options))


@pytest.mark.parametrize("order", ["transposed", "pair"])
@pytest.mark.parametrize("ready", [False, True])
def test_calls_by_operators_are_those_of_eager_mode(ready, order):
    for function in (block, made_again):
        want = gradients(function, order, ready)
        with Recorder() as mode:
            assert same(gradients(function, order, ready), want)
        made = [] if ready else ["quantize_weights"]
        again = made if function is made_again else []
        assert mode.seen == [*made, "moe_fwd", *again, "moe_bwd_"]
    x, ids, weights, w1, w2, _ = tensors(order)
    with Recorder() as mode, torch.no_grad():
        assert torch.equal(2 * moe(-x, ids, weights, w1, w2, precision="fp8"), want[0])
    assert mode.seen == ["moe_infer"]


@pytest.mark.parametrize(
    ("function", "ready", "in_backward"),
    [
        (block, False, ["moe_bwd"]),
        (block, True, ["moe_bwd"]),
        (made_again, False, ["quantize_weights", "moe_bwd"]),
        (recomputed, False, [*["quantize_weights", "moe_fwd"] * CHECKPOINTS_COMPILED_FUNCTIONS, "moe_bwd"]),
    ],
)
def test_one_graph_with_the_bits_of_eager_mode(function, ready, in_backward):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def compiler(graph, _):
        called = [str(node.target) for node in graph.graph.nodes if "moeblaze" in str(node.target)]
        found.append([name.removeprefix("moeblaze.").removesuffix(".default") for name in called])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    assert same(gradients(compiled, ready=ready), gradients(function, ready=ready))
    assert found == [["moe_fwd"] if ready else ["quantize_weights", "moe_fwd"], in_backward]


def test_weights_made_for_backward_are_not_kept():
    kept = []

    def keep(tensor):
        kept.append((tensor.dim(), tensor.itemsize))
        return tensor

    for function, wanted in ((block, 4), (made_again, 0)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradients(function)
        assert kept.count((3, 1)) == wanted
    assert same(gradients(made_again), gradients(block))


def test_transforms():
    x, ids, weights, w1, w2, _ = tensors()
    options = {"precision": "fp8"}

    def loss(x, w2):
        return moe(x, ids, weights, w1, w2, **options).float().square().sum()

    leaves = x.clone().requires_grad_(), w2.clone().requires_grad_()
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert same(torch.func.grad(loss, argnums=(0, 1))(x, w2), want)


BAD = {
    "dtype": lambda x, w1, w2: ({"x": x.float(), "w1": w1.float(), "w2": w2.float()}, {}),
    "size": lambda x, w1, w2: ({"w1": (w1[:, :, :20], w1[:, :, 32:52]), "w2": w2[:, :20]}, {"ready": True}),
    "gate_up": lambda x, w1, w2: ({}, {"gate_up": "interleaved", "ready": True}),
    "another layer": lambda x, w1, w2: ({"w1": w1[:2], "w2": w2[:2]}, {"ready": True}),
    "precision": lambda x, w1, w2: ({}, {"precision": "fp4"}),
    "no precision": lambda x, w1, w2: ({}, {"precision": None, "ready": True}),
}


@pytest.mark.parametrize("bad", BAD)
def test_fakes_make_the_checks_of_calls(bad):
    x, ids, weights, w1, w2, _ = tensors()
    fp8_weights = mb.quantize_weights(w1, w2)
    changed, options = BAD[bad](x, w1, w2)
    options = {"precision": "fp8", **options}
    if options.pop("ready", False):
        options["fp8_weights"] = fp8_weights
    given = {"x": x, "ids": ids, "weights": weights, "w1": w1, "w2": w2, **changed}
    with pytest.raises((TypeError, ValueError)) as eager:
        moe(**given, **options)
    with Recorder(), pytest.raises(type(eager.value)) as by_operators:
        moe(**given, **options)
    assert str(by_operators.value) == str(eager.value)
    if bad != "gate_up":
        with torch._subclasses.FakeTensorMode() as mode, pytest.raises(type(eager.value)) as fake:
            w1_of_mode = tuple(map(mode.from_tensor, pair(given.pop("w1"))))
            fakes = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
            if "fp8_weights" in options:
                options["fp8_weights"] = map_fp8(fp8_weights, lambda tensor: mode.from_tensor(tensor))
            moe(**fakes, w1=w1_of_mode if len(w1_of_mode) == 2 else w1_of_mode[0], **options)
        assert str(fake.value) == str(eager.value)


def layer_of(**options):
    torch.manual_seed(0)
    return MoE(16, 32, 4, 2, precision="fp8", dtype=torch.bfloat16, **options)


def tokens(seed, number=40):
    return torch.randn(number, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step_of(function, layer, x):
    """Output and gradients, and then other parameters."""
    out = function(x)
    grads = torch.autograd.grad((out.float() - x.float()).square().mean(), list(layer.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(layer.parameters(), grads, strict=True):
            parameter -= grad
    return out.detach(), *grads


def test_the_compiled_module_follows_its_parameters():
    from torch._dynamo.utils import counters

    counters.clear()
    layer, eager = layer_of(), layer_of()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for step in range(4):
        found.append(step_of(compiled, layer, tokens(step)))
        assert same(found[-1], step_of(eager, eager, tokens(step)))
    assert not same(found[0], found[1]) and counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        assert torch.equal(compiled(tokens(9)), eager(tokens(9)))
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(3):  # written once for two micro-batches
        for module in (layer, eager):
            module.quantize_weights()
        for number in range(2):
            assert same(step_of(compiled, layer, tokens(number)), step_of(eager, eager, tokens(number)))
    assert counters["stats"]["unique_graphs"] == graphs + 1
    for module in (layer, eager):
        module.quantize_weights(hold=False)
    assert same(step_of(compiled, layer, tokens(1)), step_of(eager, eager, tokens(1)))
    assert counters["stats"]["unique_graphs"] == graphs + 1


def test_one_graph_for_all_numbers_of_tokens():
    layer = layer_of()

    def loss(x):
        return layer(x).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for number in (150, 3):
        x = tokens(number, number).requires_grad_()
        wanted = x, *layer.parameters()
        assert same(torch.autograd.grad(compiled(x), wanted), torch.autograd.grad(loss(x), wanted))
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(loss.__code__)) == 1


def test_quantize_weights_ends_a_graph():
    """It is Python that changes the module, so it has no place in one graph with a forward."""
    layer, eager, x = layer_of(), layer_of(), tokens(1)

    def run(module):
        module.quantize_weights()
        return module(x)

    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            layer.w1_storage.mul_(1.25), eager.w1_storage.mul_(1.25)
        assert torch.equal(compiled(layer), run(eager))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="aot_eager", fullgraph=True)(layer)


def test_export():
    layer, x = layer_of(save=None).requires_grad_(False), tokens(1)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
    for number in (40, 7):
        assert torch.equal(program.module()(tokens(2, number)), layer(tokens(2, number)))


def set_another(layer):
    layer.w2_storage = torch.nn.Parameter(layer.w2_storage.detach() * 0.5)


def fresh_of(layer):
    """Another layer, with the parameters that this one has now."""
    made = layer_of()
    made.load_state_dict(layer.state_dict())
    return made


def test_weights_that_are_held():
    layer, x = layer_of(), tokens(1)
    assert layer.quantize_weights() is layer.fp8_weights
    before, memory = layer(x), layer.fp8_weights.w1.data_ptr()
    with torch.no_grad():
        layer.w2_storage.mul_(-1)
    assert torch.equal(layer(x), before)
    for end in (layer.quantize_weights, lambda: layer.quantize_weights(hold=False), lambda: set_another(layer)):
        layer.quantize_weights()
        assert layer.fp8_weights.w1.data_ptr() == memory or end is not layer.quantize_weights
        with torch.no_grad():
            layer.w2_storage.mul_(2)
        end()
        assert torch.equal(layer(x), fresh_of(layer)(x))
    assert layer.quantize_weights(hold=False) is None and layer.fp8_weights is None


class Scaled(torch.nn.Module):
    def forward(self, weight):
        return weight * 1.5


@pytest.mark.parametrize("compiled", [False, True])
def test_forwards_with_other_tensors_quantise_them(compiled):
    """Of functional calls and parametrisations. What is held stays for the module's own parameters."""
    layer, x = layer_of(), tokens(1)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    layer.quantize_weights()
    with torch.no_grad():
        held = forward(x)
        others = {name: 2 * parameter.detach() for name, parameter in layer.named_parameters()}
        other = layer_of()
        other.load_state_dict(others)
        assert torch.equal(torch.func.functional_call(layer, others, (x,)), other(x))
        assert torch.equal(forward(x), held)
        set_another(layer)
        assert torch.equal(forward(x), fresh_of(layer)(x))


def test_parametrisations_end_what_is_held():
    """Their end writes to the parameter that the weights were made of."""
    layer, x = layer_of(), tokens(1)
    layer.quantize_weights()
    torch.nn.utils.parametrize.register_parametrization(layer, "w2_storage", Scaled())
    assert layer.quantize_weights() is None
    within = layer(x)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "w2_storage")
    assert torch.equal(layer(x), within) and torch.equal(within, fresh_of(layer)(x))
    assert layer.quantize_weights() is not None


@pytest.mark.parametrize("copied", [False, True])
def test_adapters_end_what_is_held(copied):
    """peft merges into `.data`. A forward of the adapted module has other tensors; none came before the merge."""
    peft = pytest.importorskip("peft")
    model, x = torch.nn.Sequential(layer_of()), tokens(1)
    model[0].quantize_weights()
    before = model(x)
    options = {"target_parameters": ["0.w1_storage", "0.w2_storage"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    if copied:
        adapted = copy.deepcopy(adapted)
    (layer,) = (module for module in adapted.modules() if isinstance(module, MoE))
    assert layer.fp8_weights is None and layer.quantize_weights() is None
    merged = adapted.merge_and_unload()
    want = fresh_of(merged[0])(x)
    assert torch.equal(merged(x), want) and not torch.equal(want, before)
    assert merged[0].quantize_weights() is not None and torch.equal(merged(x), want)


def test_another_storage_at_the_same_address():
    """As allocators hand out memory that they got back: neither the address nor the version tells."""
    layer, x = layer_of(), tokens(1)
    memory = layer.w2_storage.detach().view(torch.uint8).numpy()
    parameter = torch.nn.Parameter(torch.from_numpy(memory).view(torch.bfloat16))
    layer._parameters["w2_storage"] = parameter  # as torch.func.functional_call does
    before = layer(x)
    memory[:] = (-parameter.detach()).view(torch.uint8).numpy()
    parameter.data = torch.from_numpy(memory).view(torch.bfloat16)
    assert parameter._version == 0 and torch.equal(layer(x), -before)


def test_frozen_weights_that_are_held(monkeypatch):
    calls, plain = [], reference.experts.quantize_weights
    monkeypatch.setattr(reference.experts, "quantize_weights", lambda *args: calls.append(1) or plain(*args))
    layer, x = layer_of().requires_grad_(False), tokens(1).requires_grad_()
    found = []
    for hold in (False, True):
        layer.quantize_weights(hold=hold)
        for _ in range(3):
            found += torch.autograd.grad(layer(x).float().sum(), x)
        assert len(calls) == 3
    assert all(torch.equal(grad, found[0]) for grad in found) and found[0].norm() > 0


def test_copies_of_a_module_have_weights_of_their_own():
    layer, x = layer_of(), tokens(1)
    layer.quantize_weights()
    want = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.fp8_weights is None and torch.equal(other(x), want)
        with torch.no_grad():
            other.w2_storage.mul_(-1)
        assert torch.equal(other(x), -want)
    assert torch.equal(layer(x), want)


def test_modules_that_were_pickled_by_an_older_class():
    """What it did not have is off, and none of its values shadows a buffer or a parameter."""
    layer, x = MoE(16, 32, 4, 2, bias=True, expert_bias=True, save="recompute", renormalize=False), torch.randn(3, 16)
    names = {"precision", "fp8_wgrad", "expert_format", "lora_rank", "lora_alpha", "memory_limit", "identity_experts"}
    newer = {**vars(layer)}
    older = {name: value for name, value in newer.items() if name not in names | {"_fp8", "_sharded", "_d_hidden"}}
    found = MoE.__new__(MoE)
    found.__setstate__(older)
    assert vars(found).keys() == newer.keys()
    assert found.save == "recompute" and not found.renormalize and found._d_hidden == 32
    assert torch.equal(found(x), layer(x)) and found.state_dict().keys() == layer.state_dict().keys()
    found.quantize_experts("nf4")


@pytest.mark.parametrize("hold", [False, True])
def test_training_after_inference_mode(hold):
    layer, x = layer_of(), tokens(1)
    with torch.inference_mode():
        layer.quantize_weights(hold=hold)
        want = layer(x)
    out = layer(x)
    out.float().sum().backward()
    assert torch.equal(out, want)


def test_what_a_capture_holds_serves_captures(monkeypatch):
    """A capture runs nothing, so nothing else reads what it is to write. Nor is that memory written elsewhere."""
    layer, x = layer_of(), tokens(1)
    eager = layer.quantize_weights()
    with monkeypatch.context() as patch:
        patch.setattr(torch_fp8, "_capturing", lambda tensor: True)
        assert layer._fp8.of(layer.w1_storage, layer.w2_storage) is eager
        captured = layer.quantize_weights()
        assert captured is not eager and layer._fp8.of(layer.w1_storage, layer.w2_storage) is captured
    captured.w2_scales.fill_(torch.nan)
    assert torch.equal(layer(x), fresh_of(layer)(x))
    for _ in range(2):  # a graph reads what eager calls write
        layer.quantize_weights(hold=False)
        assert layer.quantize_weights() is eager
    assert torch.equal(layer(x), fresh_of(layer)(x))
