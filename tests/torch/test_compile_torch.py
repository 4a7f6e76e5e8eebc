"""The layer under torch.compile and torch.export: one graph, eager mode's bits, and no copy in the backward."""

import functools
import shutil

import pytest
from test_torch_fp8_operators import block as block_in_fp8
from test_torch_fp8_operators import gradients as gradients_in_fp8
from test_torch_ops import POLICIES, leaves_of, overwriting, tensors

import moeblaze_cupy as mb
from moeblaze_cupy.types import pair

torch = pytest.importorskip("torch")

import torch._functorch.config as functorch_config  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moeblaze_cupy.interop.torch import MoE, moe, private, route  # noqa: E402
from moeblaze_cupy.interop.torch import operators as torch_ops  # noqa: E402
from tests.torch_versions import CHECKPOINTS_COMPILED_FUNCTIONS, NAMES_EXCEPTIONS_OF_COMPILED_CODE  # noqa: E402

__all__ = ["overwriting"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


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


def block(x, ids, weights, w1, w2, save="minimal"):
    """The layer among others, so that what it reads and writes is neither input nor output of the graph."""
    return 3 * moe(2 * x, ids, weights, w1, w2, save=save)


def recomputed(*args):
    return checkpoint(block, *args, use_reentrant=False)


def gradients(function, save="minimal", **options):
    """Output and gradients of `function` on the same numbers whenever it is asked."""
    x, ids, weights, w1, w2, grad_out = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    out = function(x, ids, weights, w1, w2, save, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def graphs_of(function, save="minimal"):
    """The operators of this package in the forward and in the backward graph, and what `gradients` gives."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def compiler(graph, _):
        called = [str(node.target) for node in graph.graph.nodes if "moeblaze" in str(node.target)]
        found.append([name.removeprefix("moeblaze.").removesuffix(".default") for name in called])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    return gradients(compiled, save), found


@pytest.mark.parametrize("save", POLICIES)
def test_one_graph_with_the_bits_of_eager_mode(save, overwriting):
    want = gradients(block, save)
    again = ["moe_fwd"] * CHECKPOINTS_COMPILED_FUNCTIONS
    for function, in_backward in ((block, ["moe_bwd"]), (recomputed, [*again, "moe_bwd"])):
        torch._dynamo.reset()
        got, graphs = graphs_of(function, save)
        assert graphs == [["moe_fwd"], in_backward]
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("policy", "in_backward"), [("MUST_SAVE", ["moe_bwd"]), ("MUST_RECOMPUTE", ["moe_fwd", "moe_bwd"])]
)
def test_selective_checkpointing(policy, in_backward):
    def choose(context, operator, *args, **kwargs):
        return CheckpointPolicy[policy if operator is torch_ops.moe_fwd else "PREFER_RECOMPUTE"]

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)

    def selective(*args):
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)

    got, graphs = graphs_of(selective)
    assert graphs == [["moe_fwd"], in_backward]
    assert all(map(torch.equal, got, gradients(block)))


CASES = [
    (block, "minimal", "moe_bwd_"),
    (block, "paper", "moe_bwd_"),
    (block, "recompute", "moe_bwd"),
    (recomputed, "minimal", "moe_bwd_"),
]


@needs_compiler
@pytest.mark.parametrize(("function", "save", "operator"), CASES)
def test_inductor_overwrites_what_was_saved_without_a_copy(function, save, operator, overwriting):
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(function, fullgraph=True)
    got, (_, backward) = run_and_get_code(gradients, compiled, save)
    assert all(map(torch.equal, got, gradients(block, save)))
    assert f"torch.ops.moeblaze.{operator}.default(" in backward
    assert "clone" not in backward and "copy_" not in backward
    others = {"moe_bwd", "moe_bwd_"} - {operator}
    assert not any(f"torch.ops.moeblaze.{other}.default(" in backward for other in others)


@needs_compiler
def test_inductor_copies_no_weights_in_e4m3(overwriting):
    from torch._inductor.utils import run_and_get_code

    compiled = torch.compile(block_in_fp8, fullgraph=True)
    got, (_, backward) = run_and_get_code(gradients_in_fp8, compiled)
    assert all(map(torch.equal, got, gradients_in_fp8(block_in_fp8)))
    assert "torch.ops.moeblaze.moe_bwd_.default(" in backward
    assert "clone" not in backward and "copy_" not in backward


@needs_compiler
def test_two_backwards_of_compiled_code(overwriting):
    """The first tells torch that there is another, or torch gives nothing away to be overwritten."""
    x, ids, weights, w1, w2, grad_out = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    want = torch.autograd.grad(block(x, ids, weights, w1, w2), leaves, grad_out)
    compiled = torch.compile(block, fullgraph=True)
    out = compiled(x, ids, weights, w1, w2)
    for retain in (True, False):
        assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad_out, retain_graph=retain), want))
    torch._dynamo.reset()
    torch.autograd.grad(compiled(x, ids, weights, w1, w2), leaves, grad_out)
    out = compiled(x, ids, weights, w1, w2)
    with pytest.raises(RuntimeError, match="donated buffers"):
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        out = compiled(x, ids, weights, w1, w2)
        for retain in (True, False):
            assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad_out, retain_graph=retain), want))


def test_inductor_of_another_version(monkeypatch):
    """Where its private parts are missing, the operators stay as they are."""
    import torch._inductor.lowering

    pairs = {torch_ops.moe_bwd: torch_ops.moe_bwd_}
    assert private.let_inductor_overwrite(torch_ops.moe_fwd, pairs)
    for operator in pairs:
        monkeypatch.delitem(torch._inductor.lowering.lowerings, operator)
    monkeypatch.delattr(torch._inductor.ir, "DonatedBuffer")
    assert not private.let_inductor_overwrite(torch_ops.moe_fwd, pairs)
    assert torch_ops.moe_bwd not in torch._inductor.lowering.lowerings


MODULES = {
    "plain": {},
    "sigmoid": {
        "score": "sigmoid",
        "bias": True,
        "groups": (2, 1, 2),
        "scale": 2.5,
        "sums": ("sigmoid", "z"),
        "return_routing": True,
    },
}


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_the_module_is_one_graph_for_all_numbers_of_tokens(options):
    torch.manual_seed(0)
    layer = MoE(8, 6, 4, 2, **options)
    if layer.bias is not None:
        layer.bias.normal_()

    def loss(x):
        made = layer(x, sequences=2, token_mask=x.detach()[..., 0] < 1 if options else None)
        if not options:
            return made.square().sum()
        out, routed = made
        return out.square().sum() + routed.sums.z_sums.square().sum() + routed.sums.score_sums.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (150, 3, 0, 1, 64):
        x = torch.randn(2, tokens, 8, requires_grad=True)
        wanted = (x, *layer.parameters())
        got = torch.autograd.grad(compiled(x), wanted)
        assert all(map(torch.equal, got, torch.autograd.grad(loss(x), wanted)))
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(loss.__code__)) <= 3


def test_numbers_of_tokens_without_a_hint():
    want = gradients(block)

    def unbacked(*args):
        for tensor in args[:3]:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        return torch.compile(block, fullgraph=True, backend="aot_eager")(*args)

    assert all(map(torch.equal, gradients(unbacked), want))


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MoE(8, 6, 4, 2, save=None)

    def forward(self, x):
        return self.layer(2 * x)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x = Exported(), torch.randn(7, 8)
    shapes = ({0: torch.export.Dim("tokens", min=2)},)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=strict)
    called = {str(node.target) for node in program.graph.nodes if "moeblaze" in str(node.target)}
    assert called == {"moeblaze.route.default", "moeblaze.moe_infer.default"}
    with torch.no_grad():
        for tokens in (x, torch.randn(30, 8)):
            assert torch.equal(program.module()(tokens), module(tokens))


def forward_and_backward(x, ids, weights, w1, w2, grad_out):
    out, saved = mb.moe_forward(x, ids, weights, w1, w2)
    data, pending = mb.moe_backward_data(grad_out, saved, keep_saved=True)
    halves = data.x, data.weights, mb.moe_backward_weights(pending).w1
    return out, *halves, *tuple(mb.moe_backward(grad_out, saved))  # a star alone is an internal error of torch 2.11


def routed(logits):
    weights, ids = mb.route(logits, 2, score="sigmoid")
    return weights, ids, mb.route_backward(weights.square(), logits, weights, ids, score="sigmoid")


def histogram(logits, ids):
    into = torch.zeros((5, 8), dtype=torch.int32)
    mb.quantile_histogram(logits, ids, torch.zeros(5), into, torch.tensor([-1.0, 1.0]))
    return into


# Of scores (9, 5) and ids (9, 2).
BETWEEN_GRAPHS = {
    "build_dispatch": lambda scores, ids: mb.build_dispatch(ids, 5).lists,
    "expert_choice": lambda scores, ids: mb.expert_choice(scores, 2),
    "limit_capacity": lambda scores, ids: mb.limit_capacity(ids, 5, 2),
    "list_pairs": lambda scores, ids: mb.list_pairs(scores > 0, 20),
    "quantile_histogram": histogram,
    "quantize_weights": lambda scores, ids: (
        mb.quantize_weights(
            scores[:1, :1, None].expand(1, 16, 32).contiguous(), scores[0, 0].expand(1, 16, 16).contiguous()
        ).w1_scales
    ),
    "round_tokens": lambda scores, ids: mb.round_tokens(scores, ids, tile=2),
    "route": lambda scores, ids: routed(scores),
    "sum_rows": lambda scores, ids: mb.sum_rows(scores, ids.int()),
    "tokens_per_expert": lambda scores, ids: mb.tokens_per_expert(ids, 5),
    "moe_forward": lambda scores, ids: forward_and_backward(*(t.detach() for t in tensors())),
}


@pytest.mark.parametrize("name", BETWEEN_GRAPHS)
def test_functions_of_arrays_are_called_between_graphs(name):
    rng = torch.Generator().manual_seed(0)
    scores, ids = torch.randn(9, 5, generator=rng), torch.randint(5, (9, 2), generator=rng)

    def among_others(scores, ids):
        return [1 + made for made in torch.utils._pytree.tree_leaves(BETWEEN_GRAPHS[name](2 * scores, ids + 0))]

    got = torch.compile(among_others, backend="aot_eager")(scores, ids)
    assert all(map(torch.equal, got, among_others(scores, ids))) and got


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", ["moe", "route"])
def test_export_with_gradients_is_refused(function, strict):
    """Its operators have none, so that backward would leave out the layer without an error."""

    class Called(torch.nn.Module):
        def forward(self, tensor, ids, weights, w1, w2):
            return moe(tensor, ids, weights, w1, w2) if function == "moe" else route(tensor, 2)[0]

    x, *others, _ = tensors()
    with pytest.raises(Exception, match=rf"{function}: expected torch\.no_grad\(\) around torch\.export"):
        torch.export.export(Called(), (x.requires_grad_(), *others), strict=strict)


def test_second_derivatives_are_refused():
    x, ids, weights, w1, w2, _ = tensors()
    leaves = leaves_of(x, weights, w1, w2)
    out = torch.compile(block, fullgraph=True, backend="aot_eager")(x, ids, weights, w1, w2)
    with pytest.raises(RuntimeError, match="double backward"):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.sum().backward()
    assert leaves[0].grad is None


def test_errors_are_those_of_eager_mode():
    x, ids, weights, w1, w2, _ = tensors()
    with pytest.raises(Exception, match=r"moe: w1 and w2: expected one h in shapes \(E, d, 2h\) and \(E, h, d\), got"):
        torch.compile(moe, fullgraph=True, backend="aot_eager")(x, ids, weights, w1[:, :, :-1], w2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_and_outside_of_what_is_compiled(dtype):
    def inside(*args):
        with torch.autocast("cpu", dtype):
            return block(*args)

    want = gradients(inside)
    assert want[0].dtype == dtype and {grad.dtype for grad in want[1:]} == {torch.float32}
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    def outside(*args):
        with torch.autocast("cpu", dtype):
            return compiled(*args)

    assert all(map(torch.equal, gradients(outside), want))
    torch._dynamo.reset()
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled), want))


@pytest.mark.parametrize("hooks", [False, True])
def test_main_grad(hooks, overwriting):
    """Two steps add twice. Megatron's hooks see a gradient, and that it was added elsewhere."""
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, accumulate_into_main_grad=True)
    experts, seen = (layer.w1_storage, layer.w2_storage), []
    for parameter in experts:
        parameter.main_grad = torch.zeros_like(parameter)
        if hooks:
            parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = False, True
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad_added_to_main_grad))
    x = torch.randn(7, 8)
    layer(x).square().sum().backward()
    once = [parameter.main_grad.clone() for parameter in experts]
    seen.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for parameter in experts if hooks else ():
            parameter.grad_added_to_main_grad = False
        compiled(x).square().sum().backward()
    for parameter, total in zip(experts, once, strict=True):
        torch.testing.assert_close(parameter.main_grad, 3 * total)
        assert not parameter.grad.any() if hooks else parameter.grad is None
    assert seen == [True] * 4 * hooks


def test_a_part_of_a_parameter_has_no_main_grad_in_a_graph():
    x, ids, weights, w1, w2, _ = tensors()
    storage = torch.nn.Parameter(torch.cat([w1, w1]))
    storage.main_grad = torch.zeros_like(storage)
    accumulate = {"w1": storage, "w2": w2}
    expected = "moe: w1: expected a parameter or a view of a whole one"
    with pytest.raises(Exception, match=expected if NAMES_EXCEPTIONS_OF_COMPILED_CODE else "Observed exception"):
        torch.compile(moe, fullgraph=True, backend="aot_eager")(
            x, ids, weights, storage[:3], w2, accumulate_into_main_grad=accumulate
        )


@pytest.mark.parametrize("order", ["row", "pair", "pair_transposed"])
def test_frozen_tensors_and_pairs(order):
    from tests.cases import Case

    x, ids, weights, w1, w2, grad_out = tensors(Case(L=5, k=2, E=3, d=4, h=6, order=order))
    leaves = leaves_of(x, weights, w1, w2)[2:-1]
    frozen = x.detach(), ids, weights.detach(), w1, w2.detach()
    want = torch.autograd.grad(block(*frozen), leaves, grad_out)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*frozen), leaves, grad_out)
    for grad, wanted, leaf in zip(got, want, pair(w1), strict=True):
        assert torch.equal(grad, wanted) and grad.stride() == leaf.stride()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_compiled_autograd(backend, overwriting):
    """Over a forward of eager mode, which it leaves outside of its graph, and over a compiled one."""
    from torch._dynamo import compiled_autograd

    layer, x = MoE(8, 6, 4, 2), torch.randn(7, 8)
    layer(x).square().sum().backward()
    want = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    function = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    loss = function(x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(layer.parameters(), want, strict=True))
