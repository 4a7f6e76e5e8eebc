"""`interop.torch` on CPU tensors: gradients, what is kept for backward, and the module."""

import contextlib
import copy
import io
import re
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import checks, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.types import ACTIVATIONS, GRADIENTS, LayerOptions, is_gated, pair
from tests.cases import Case, make_inputs, relative_error
from tests.environment import run_python

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from moeblaze_cupy.interop.torch import MoE, moe, route  # noqa: E402

SMALL = Case(L=4, k=2, E=3, d=3, h=2)
POLICIES = ("minimal", "paper", "recompute", "fp8")


class Operators(TorchDispatchMode):
    """Calls of the layer are calls of its operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def tensors(case, dtype=np.float64, seed=0):
    """x, ids, weights, w1 (a tensor or a pair), w2, grad_out, in the case's memory order."""
    return [
        tuple(map(arrays.Torch.from_numpy, a)) if isinstance(a, tuple) else arrays.Torch.from_numpy(a)
        for a in make_inputs(case, seed, dtype)
    ]


def leaves_of(x, weights, w1, w2):
    """By name, all requiring gradients; a pair as "w1[0]" and "w1[1]"."""
    w1 = {"w1": w1} if torch.is_tensor(w1) else {f"w1[{i}]": half for i, half in enumerate(w1)}
    return {name: t.requires_grad_() for name, t in {"x": x, "weights": weights, **w1, "w2": w2}.items()}


@pytest.fixture
def seen(monkeypatch):
    """What the NumPy backend was asked for: `save` of each forward, `needs` of each backward."""
    calls = {"save": [], "needs": []}
    forward, backward = reference.moe_forward, reference.moe_backward

    def spying_forward(*args, save, **options):
        calls["save"].append(save)
        return forward(*args, save=save, **options)

    def spying_backward(*args, needs, **options):
        calls["needs"].append(needs)
        return backward(*args, needs=needs, **options)

    monkeypatch.setattr(reference, "moe_forward", spying_forward)
    monkeypatch.setattr(reference, "moe_backward", spying_backward)
    return calls


GRADCHECKS = [
    *((replace(SMALL, activation=activation), "minimal") for activation in ACTIVATIONS),
    *((replace(SMALL, order=order), "minimal") for order in ("transposed", "pair", "pair_transposed")),
    *((replace(SMALL, routing=routing), "minimal") for routing in ("absent", "duplicate", "one_expert")),
    *((replace(SMALL, activation=a, order="transposed"), s) for s in POLICIES[1:3] for a in ("swiglu", "gelu")),
    (replace(SMALL, order="pair"), "paper"),
    (replace(SMALL, order="pair_transposed", activation="geglu"), "recompute"),
]


@pytest.mark.parametrize(("case", "save"), GRADCHECKS, ids=lambda value: str(value))
def test_gradients_equal_finite_differences(case, save):
    x, ids, weights, w1, w2, _ = tensors(case)
    leaves = leaves_of(x, weights, w1, w2)

    def layer(x, weights, *experts):
        *w1, w2 = experts
        w1 = w1[0] if len(w1) == 1 else tuple(w1)
        return moe(x, ids, weights, w1, w2, activation=case.activation, save=save, keep_saved=True)

    assert torch.autograd.gradcheck(layer, tuple(leaves.values()))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_of_the_router_equals_finite_differences(renormalize, k):
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: route(logits, k, renormalize=renormalize), logits)


def test_a_bias_may_change_between_forward_and_backward():
    """As where it balances loads: it takes part in the choice alone, and no graph holds it."""
    logits, bias, grad = torch.randn(5, 4).requires_grad_(), torch.randn(4), torch.randn(5, 2)
    (want,) = torch.autograd.grad(route(logits, 2, bias=bias)[0], logits, grad)
    weights, _ = route(logits, 2, bias=bias)
    bias += 1
    (got,) = torch.autograd.grad(weights, logits, grad)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_router_ids_have_no_gradient():
    weights, ids = route(torch.randn(5, 4).requires_grad_(), 2)
    assert weights.requires_grad and not ids.requires_grad
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


@pytest.mark.parametrize("order", ["row", "transposed", "pair", "pair_transposed"])
def test_gradients_have_the_dtype_and_memory_order_of_the_leaves(order):
    x, ids, weights, w1, w2, grad_out = tensors(Case(L=7, k=2, E=3, d=4, h=6, order=order), np.float32)
    x, w2, grad_out = x.bfloat16(), w2.bfloat16(), grad_out.bfloat16()
    w1 = w1.bfloat16() if torch.is_tensor(w1) else tuple(half.bfloat16() for half in w1)
    leaves = leaves_of(x, weights, w1, w2)
    grads = torch.autograd.grad(moe(x, ids, weights, w1, w2), list(leaves.values()), grad_out)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert (grad.dtype, grad.shape, grad.stride()) == (leaf.dtype, leaf.shape, leaf.stride()), name


SUBSETS = [
    ("x",),
    ("weights",),
    ("w1",),
    ("w2",),
    ("w1", "w2"),  # an input that needs no gradient, as below an embedding that is frozen
    ("x", "weights"),  # frozen experts
    ("x", "weights", "w1"),
    GRADIENTS,
]


@pytest.mark.parametrize("trained", SUBSETS, ids=" ".join)
def test_frozen_inputs_cost_nothing(trained, seen):
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves = leaves_of(x, weights, w1, w2)
    everything = torch.autograd.grad(moe(x, ids, weights, w1, w2), list(leaves.values()), grad_out)
    want = dict(zip(leaves, everything, strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    seen["needs"].clear()
    moe(x, ids, weights, w1, w2).backward(grad_out)
    assert seen["needs"] == [tuple(trained)]
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in trained), name
        assert leaf.grad is None or torch.equal(leaf.grad, want[name]), name


@pytest.mark.parametrize("half", [0, 1])
def test_half_of_a_pair_may_be_frozen(half, seen):
    x, ids, weights, w1, w2, grad_out = tensors(replace(SMALL, order="pair"))
    w1[half].requires_grad_()
    moe(x, ids, weights, w1, w2).backward(grad_out)
    assert seen["needs"] == [("w1",)]
    assert w1[half].grad.abs().sum() > 0 and w1[1 - half].grad is None


def test_nothing_is_saved_without_gradients(seen):
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    out = moe(x, ids, weights, w1, w2)
    assert not out.requires_grad
    leaves_of(x, weights, w1, w2)
    with torch.no_grad():
        assert torch.equal(moe(x, ids, weights, w1, w2), out)
    with torch.inference_mode():
        assert torch.equal(moe(x, ids, weights, w1, w2), out)
    assert seen["save"] == [None] * 3
    assert moe(x, ids, weights, w1, w2).requires_grad
    assert seen["save"] == [None] * 3 + ["minimal"]


def test_ids_alone_ask_for_no_gradient(seen):
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    assert not moe(x, ids.long(), weights, w1, w2).requires_grad
    assert seen["save"] == [None]


def test_saving_nothing_and_wanting_gradients():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    with pytest.raises(ValueError) as caught:
        moe(x.requires_grad_(), ids, weights, w1, w2, save=None)
    assert str(caught.value) == (
        "moe: save: expected a policy that keeps something, as gradients are required, got None"
    )
    with torch.no_grad():
        moe(x, ids, weights, w1, w2, save=None)


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("order", ["transposed", "pair"])
def test_saved_tensor_hooks_see_everything_that_is_kept(order, save):
    """Nothing that lives until backward hides from offloading: inputs by their memory, the rest by its values."""
    case = Case(L=9, k=2, E=3, d=4, h=6, order=order)
    x, ids, weights, w1, w2, grad_out = tensors(case)
    leaves = leaves_of(x, weights, w1, w2)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = moe(x, ids, weights, w1, w2, save=save)
    inputs = {leaf.data_ptr() for leaf in leaves.values()}
    assert inputs <= {tensor.data_ptr() for tensor in packed}

    kept = [tensor for tensor in packed if tensor.data_ptr() not in inputs]
    with torch.no_grad():
        _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    slots, lists = case.L * case.k, saved.index
    first_layer, y_swi = {"minimal": (1, 0), "paper": (1, 1), "recompute": (0, 0), "fp8": (1, 0)}[save]
    assert [tuple(tensor.shape) for tensor in kept] == [
        *[tuple(saved.first_layer.shape) if save == "fp8" else (slots, 2 * case.h)] * first_layer,
        *[(slots, case.h)] * y_swi,
        tuple(lists.lists.shape),
    ]
    assert sum(tensor.nbytes for tensor in kept) == saved.nbytes
    wanted = [t for t in (saved.first_layer, saved.y_swi, lists.lists) if t is not None]
    assert all(map(torch.equal, kept, wanted))

    # What the node itself holds are names and numbers.
    node = out.grad_fn
    index = node.kept[0]
    arrays_of = [*node.kept, *(getattr(index, field.name) for field in fields(index))]
    arrays_of.remove(LayerOptions(save=save))
    assert not any(isinstance(value, (torch.Tensor, np.ndarray, tuple)) for value in arrays_of)

    # Backward takes what unpacking returned: here copies.
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    want = torch.autograd.grad(moe(x, ids, weights, w1, w2, save=save), list(leaves.values()), grad_out)
    assert all(map(torch.equal, grads, want))


def test_index_lists_are_taken_apart_and_joined_as_by_autograd():
    ids = torch.tensor([[2, 3], [0, 1], [0, 3], [1, 2], [-1, 3]], dtype=torch.int32)
    index = mb.build_dispatch(ids, 4)
    tensors, rest = index.split()
    assert tensors[1].data_ptr() == ids.data_ptr()
    assert not any(isinstance(value, torch.Tensor) for value in vars(rest).values())
    made = rest.joined([tensor.clone() for tensor in tensors])
    for name in (*index.places, "token_expert_indices"):
        assert torch.equal(getattr(made, name), getattr(index, name)), name
    assert made.nbytes == index.nbytes == tensors[0].nbytes


def test_inputs_changed_before_backward_are_noticed():
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    w1.requires_grad_()
    out = moe(x, ids, weights, w1, w2)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad_out)


def test_halves_are_checked_by_name():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    gate, up = w1.chunk(2, 2)
    for kind, text, given in (
        (TypeError, "w1[0]: expected a torch tensor, got <class 'NoneType'>", (None, up)),
        (TypeError, "w1[1]: expected a torch tensor, got <class 'numpy.ndarray'>", (gate, up.numpy())),
        (ValueError, "w1: expected one array or a pair (gate, up), got 3 arrays; torch.stack", (gate, up, up)),
        (ValueError, "w1: expected one array or a pair (gate, up), got 0 arrays", []),
    ):
        with pytest.raises(kind, match=f"^moe: {re.escape(text)}"):
            moe(x, ids, weights, given, w2)
    with pytest.raises(
        TypeError, match=r"^moe: w2: expected a torch tensor, got <class 'list'>; torch.stack makes one"
    ):
        moe(x, ids, weights, w1, list(w2))
    for name in ("bias", "expert_bias"):
        with pytest.raises(TypeError, match=f"^MoE: {name}: expected True or False, got a tensor$"):
            MoE(8, 8, 4, 2, **{name: torch.zeros(4)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_change_before_backward(dtype):
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves, ids = list(leaves_of(x, weights, w1, w2).values()), ids.to(dtype)
    want = torch.autograd.grad(moe(x, ids, weights, w1, w2), leaves, grad_out)
    out = moe(x, ids, weights, w1, w2)
    ids.fill_(-1)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad_out), want))


def test_gradients_that_are_not_contiguous():
    """Of a sum torch hands over an expanded scalar, of a transposed use a transposed gradient."""
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves = list(leaves_of(x, weights, w1, w2).values())
    out = moe(x, ids, weights, w1, w2, keep_saved=True)
    got = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)))
    got = torch.autograd.grad((out.T * grad_out.T.contiguous()).sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(out, leaves, grad_out)))


def consuming(save, needs):
    """Whether a backward overwrites what was saved, by what `ops.backward.moe_backward` writes into."""
    return {
        "minimal": "x" in needs or "w1" in needs,
        "paper": "x" in needs or "w1" in needs or "w2" in needs,
        "recompute": False,
        "fp8": False,
    }[save]


@pytest.mark.parametrize("keep_saved", [False, True])
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize(
    "needs", [("x",), ("weights",), ("w1",), ("w2",), ("weights", "w2"), GRADIENTS, ()], ids=" ".join
)
def test_backward_over_arrays_consumes_as_on_cuda(needs, save, keep_saved):
    x, ids, weights, w1, w2, grad_out = make_inputs(SMALL, 0)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    first = mb.moe_backward(grad_out, saved, needs=needs, keep_saved=keep_saved)
    assert saved.consumed == (not keep_saved and consuming(save, needs))
    if saved.consumed:
        with pytest.raises(RuntimeError, match=r"^moe_backward: saved: expected activations that are still there"):
            mb.moe_backward(grad_out, saved, needs=needs)
    else:
        again = mb.moe_backward(grad_out, saved, needs=needs)
        assert all(a is b is None or np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("save", POLICIES)
def test_second_backward(save):
    """`keep_saved` allows it, with the same result."""
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves = list(leaves_of(x, weights, w1, w2).values())
    out = moe(x, ids, weights, w1, w2, save=save, keep_saved=True)
    first, second = (torch.autograd.grad(out, leaves, grad_out, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    out = moe(x, ids, weights, w1, w2, save=save)
    assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, grad_out, retain_graph=True)))
    if save in ("fp8", "recompute"):
        assert all(map(torch.equal, first, torch.autograd.grad(out, leaves, grad_out)))
    else:
        with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
            torch.autograd.grad(out, leaves, grad_out)


def test_an_output_used_twice_has_one_backward():
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves = list(leaves_of(x, weights, w1, w2).values())
    want = torch.autograd.grad(moe(x, ids, weights, w1, w2), leaves, 3 * grad_out)
    out = moe(x, ids, weights, w1, w2)
    for got, wanted in zip(torch.autograd.grad([out, 2 * out], leaves, [grad_out] * 2), want, strict=True):
        torch.testing.assert_close(got, wanted)


def test_second_backward_over_consumed_activations():
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    out = moe(x.requires_grad_(), ids, weights, w1, w2)
    out.backward(grad_out, retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        out.backward(grad_out)
    assert str(caught.value) == (
        "moe: saved: expected activations that are still there, got ones that an earlier backward overwrote "
        "with their gradients; pass keep_saved=True to moe or MoE"
    )


def test_consumption_is_remembered_and_keep_saved_handed_on(monkeypatch):
    """The mark that backward leaves on its own view of the saved activations reaches the node."""
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    handed_on = []

    def backward(grad_out, saved, *, needs, keep_saved, accumulate):
        handed_on.append(keep_saved)
        saved.consumed = not keep_saved
        return mb.Gradients(x=torch.zeros_like(grad_out))

    monkeypatch.setattr(mb, "moe_backward", backward)
    x.requires_grad_()
    for keep_saved in (False, True):
        out = moe(x, ids, weights, w1, w2, keep_saved=keep_saved)
        out.backward(grad_out, retain_graph=True)
        assert out.grad_fn.consumed == (not keep_saved)
    assert handed_on == [False, True]


def test_backward_that_fails_half_way_has_overwritten_what_was_saved(monkeypatch):
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)

    def backward(grad_out, saved, **options):
        saved.consumed = True
        raise torch.OutOfMemoryError("for the gradient of w1")

    out = moe(x.requires_grad_(), ids, weights, w1, w2)
    with monkeypatch.context() as patch:
        patch.setattr(mb, "moe_backward", backward)
        with pytest.raises(torch.OutOfMemoryError):
            out.backward(grad_out, retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward overwrote"):
        out.backward(grad_out)


FREED = "memory: expected a tensor whose storage is there, got one whose storage was freed"


@pytest.mark.parametrize("by_operators", [False, True])
@pytest.mark.parametrize("which", ["x", "weights", "w1[0]", "w1[1]", "w2", "b1[0]", "b1[1]", "b2"])
def test_backward_refuses_tensors_whose_storage_was_freed(which, by_operators):
    """FSDP frees the storages of gathered parameters. A tensor at an offset does not have the address 0 then."""
    x, ids, weights, w1, w2, grad_out = tensors(replace(SMALL, order="pair"))
    b1, b2 = torch.zeros(2, SMALL.E, SMALL.h, dtype=x.dtype), torch.zeros(SMALL.E, SMALL.d, dtype=x.dtype)
    given = {"x": x, "weights": weights, "w1[0]": w1[0], "w1[1]": w1[1], "w2": w2}
    given |= {"b1[0]": b1[0], "b1[1]": b1[1], "b2": b2}
    for name, tensor in given.items():  # behind 16 other bytes of a storage of its own
        given[name] = torch.cat([torch.zeros(2, dtype=tensor.dtype), tensor.flatten()])[2:].view(tensor.shape)
    leaf = given["x"].requires_grad_()
    pairs = (given["w1[0]"], given["w1[1]"]), (given["b1[0]"], given["b1[1]"])
    mode = Operators() if by_operators else contextlib.nullcontext()
    with mode:
        out = moe(leaf, ids, given["weights"], pairs[0], given["w2"], b1=pairs[1], b2=given["b2"])
    given[which].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"^moe_backward: saved\.{re.escape(which)}: {FREED}"):
        out.backward(grad_out)


@pytest.mark.parametrize("number", range(3))
def test_backward_refuses_activations_whose_storage_was_freed(number):
    """As hooks of saved tensors may free what they hand out."""
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.clone()) or packed[-1], lambda t: t):
        out = moe(x.requires_grad_(), ids, weights, w1, w2, save="paper")
    packed[-3:][number].untyped_storage().resize_(0)
    name = ("first_layer", "y_swi", "index.lists")[number]
    with pytest.raises(RuntimeError, match=rf"^moe_backward: saved\.{name}: {FREED}"):
        out.backward(grad_out)


def test_backward_of_the_router_refuses_freed_logits():
    logits = torch.randn(4, 5).requires_grad_()
    weights, _ = route(logits, 2)
    logits.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"^route_backward: logits: {FREED}"):
        weights.sum().backward()


@pytest.mark.parametrize("which", ["x", "w1", "w2"])
def test_the_halves_of_backward_refuse_freed_storage(which):
    *given, grad_out = tensors(SMALL)
    _, saved = mb.moe_forward(*given)
    freed = getattr(saved, which).clone()
    freed.untyped_storage().resize_(0)
    _, pending = mb.moe_backward_data(grad_out, saved, keep_saved=True)
    name = {"w1": "w1_gate"}.get(which, which)
    pending.saved = replace(saved, arrays=saved.arrays._replace(**{name: freed}))
    with pytest.raises(RuntimeError, match=f"^moe_backward_weights: saved.{which}: {FREED}"):
        mb.moe_backward_weights(pending)
    with pytest.raises(RuntimeError, match=f"^moe_backward_data: saved.{which}: {FREED}"):
        mb.moe_backward_data(grad_out, pending.saved)


def test_launch_records_do_not_serve_freed_tensors():
    """Their key is that of no tensor that passed the checks, also where the address is not 0."""
    tensor = torch.zeros(3, 8)[1:]
    (before,), (address,) = arrays.Torch.layouts([tensor])
    assert before[4] == address % arrays.ALIGNMENT
    tensor.untyped_storage().resize_(0)
    (after,), (address,) = arrays.Torch.layouts([tensor])
    assert address == 32 and after[4] is None and after[:4] == before[:4]


def test_a_tensor_without_memory_of_its_own_is_refused():
    """Distributed and fake tensors say that they lie at address 0."""

    class Elsewhere(torch.Tensor):
        def data_ptr(self):
            return 0

    x, ids, weights, w1, w2, _ = tensors(SMALL)
    with pytest.raises(TypeError, match=r"^moe: w2: .* memory of its own, got .*Elsewhere"):
        moe(x, ids, weights, w1, w2.as_subclass(Elsewhere))


@pytest.mark.parametrize("order", ["row", "transposed", "pair", "pair_transposed"])
@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_main_grad(order, total):
    """Of parameters as they are stored: where those are transposed, the layer gets views of them."""
    case = Case(L=9, k=2, E=3, d=4, h=6, order=order)
    x, ids, weights, *experts, grad_out = tensors(case, ml_dtypes.bfloat16)
    w1, w2 = experts
    transposed = order.endswith("transposed")
    views = [*pair(w1), w2]
    parameters = [torch.nn.Parameter(w.transpose(1, 2).contiguous() if transposed else w) for w in views]
    start = [torch.randn(p.shape).to(total) for p in parameters]
    for parameter, held in zip(parameters, start, strict=True):
        parameter.main_grad = held.clone()

    def backward(**options):
        *first, second = [p.transpose(1, 2) if transposed else p for p in parameters]
        first = first[0] if len(first) == 1 else tuple(first)
        moe(x, ids, weights, first, second, **options).backward(grad_out)

    x.requires_grad_()
    backward()
    plain, plain_x = [p.grad.float() for p in parameters], x.grad
    for parameter in [x, *parameters]:
        parameter.grad = None
    backward(accumulate_into_main_grad=True)
    backward(accumulate_into_main_grad=True)
    assert torch.equal(x.grad, 2 * plain_x)
    for parameter, held, grad in zip(parameters, start, plain, strict=True):
        assert parameter.grad is None and not hasattr(parameter, "grad_added_to_main_grad")
        assert relative_error(parameter.main_grad.float().numpy(), (held.float() + 2 * grad).numpy()) <= 2**-7


@pytest.mark.parametrize("zeros", [False, True])
def test_main_grad_and_megatrons_hooks(zeros):
    """They run when a gradient arrives, of whatever contents, and look at `grad_added_to_main_grad`."""
    layer = MoE(8, 6, 5, 2, accumulate_into_main_grad=True)
    experts = (layer.w1_storage, layer.w2_storage)
    x = torch.randn(7, 8)
    composed(layer, x).sum().backward()
    want = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    seen = []
    for parameter in experts:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
        parameter.zero_out_wgrad = zeros
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad_added_to_main_grad)))
    layer(x).sum().backward()
    assert {id(p) for p, added in seen if added} == set(map(id, experts)) and len(seen) == 2
    for parameter, expected in zip(experts, want[1:], strict=True):
        assert relative_error(parameter.main_grad.numpy(), expected.numpy()) <= 1e-6
        assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
        assert not zeros or not parameter.grad.any()
    assert relative_error(layer.router.grad.numpy(), want[0].numpy()) <= 1e-5


def test_main_grad_of_halves_of_one_parameter_and_frozen_weights():
    x, ids, weights, w1, w2, grad_out = tensors(replace(SMALL, order="transposed"))
    storage = torch.nn.Parameter(w1.transpose(1, 2))
    halves = [storage[:, : SMALL.h].transpose(1, 2), storage[:, SMALL.h :].transpose(1, 2)]
    (want,) = torch.autograd.grad(moe(x, ids, weights, tuple(halves), w2), storage, grad_out)
    storage.main_grad = torch.ones_like(storage)
    moe(x, ids, weights, tuple(halves), w2, accumulate_into_main_grad=True).backward(grad_out)
    assert storage.grad is None
    torch.testing.assert_close(storage.main_grad.detach(), 1 + want)


def test_errors_of_main_grad():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    w1, w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
    w1.main_grad = torch.zeros_like(w1)
    wanted = "expected a parameter, or a view of one, whose main_grad is a tensor, got <class 'NoneType'>"
    for given in (w2, w2 * 1, w2.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(TypeError) as caught:
            moe(x, ids, weights, w1, given, accumulate_into_main_grad=True)
        assert str(caught.value) == f"moe: w2: {wanted}"
    with pytest.raises(TypeError) as caught:
        MoE(8, 6, 5, 2, accumulate_into_main_grad=True)(torch.randn(7, 8))
    assert str(caught.value) == f"MoE: w1: {wanted}"
    w2.main_grad = torch.zeros(1)
    with pytest.raises(ValueError) as caught:
        moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True)
    assert str(caught.value) == (
        "moe: w2: expected main_grad with the parameter's shape and strides ((3, 2, 3), (6, 3, 1)), got ((1,), (1,))"
    )
    w2.main_grad = torch.zeros_like(w2, dtype=torch.float16)
    with pytest.raises(TypeError) as caught:
        moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True)
    assert str(caught.value) == (
        "moe: w2: expected main_grad with dtype torch.float32 or torch.float64, got torch.float16"
    )
    w2.main_grad = torch.zeros_like(w2, device="meta")
    with pytest.raises(TypeError) as caught:
        moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True)
    assert str(caught.value) == "moe: w2: expected main_grad on the parameter's device cpu, got meta"
    w2.main_grad = torch.zeros_like(w2)
    unrelated = w2.detach().clone().requires_grad_()
    for given in (unrelated, torch.cat((unrelated, unrelated))):
        given.main_grad = torch.zeros_like(given)
        with pytest.raises(ValueError, match=r"w2: expected a view of the parameter, .* got other memory"):
            moe(x, ids, weights, w1, w2, accumulate_into_main_grad={"w1": w1, "w2": given})
    for own in (w2, w2.detach()):
        w2.main_grad = own
        with pytest.raises(ValueError) as caught:
            moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True)
        assert str(caught.value) == "moe: w2: expected main_grad with memory of its own, got the parameter's"
    del w2.main_grad
    with pytest.raises(ValueError) as caught:
        gate, up = w1.detach().chunk(2, dim=2)
        moe(x, ids, weights, (gate.requires_grad_(), up), w2, accumulate_into_main_grad=True)
    assert str(caught.value) == "moe: w1: expected a pair of which both or none require gradients, got one of each"


def main_grads_of_copies(copy_of):
    """(main_grad, gradient) of parameters (E, 2h, d) and (E, d, h) whose bf16 copies the layer gets.

    copy_of: makes the layer's weight, or a pair, from a parameter.
    """
    x, ids, weights, w1, w2, grad_out = tensors(Case(L=9, k=2, E=3, d=4, h=6, order="transposed"), np.float32)
    parameters = [torch.nn.Parameter(w.transpose(1, 2)) for w in (w1, w2)]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    first, second = copy_of(parameters[0]), parameters[1].to(torch.bfloat16).transpose(1, 2)
    into = {"w1": (parameters[0],) * len(pair(first)), "w2": parameters[1]}
    x, grad_out = x.to(torch.bfloat16), grad_out.to(torch.bfloat16)
    moe(x, ids, weights, first, second, accumulate_into_main_grad=into).backward(grad_out)
    moe(x, ids, weights, copy_of(parameters[0]), second.detach()).backward(grad_out)
    return parameters[0].main_grad, parameters[0].grad


COPIES = {
    "cast, then transposed": lambda p: p.to(torch.bfloat16).transpose(1, 2),
    "transposed, then cast": lambda p: p.transpose(1, 2).to(torch.bfloat16),
    "halves of a copy": lambda p: p.to(torch.bfloat16).transpose(1, 2).chunk(2, dim=2),
}


@pytest.mark.parametrize("copy", COPIES)
def test_main_grad_of_a_parameter_that_the_layer_gets_in_another_dtype(copy):
    into, want = main_grads_of_copies(COPIES[copy])
    assert want.any() and relative_error(into.numpy(), want.numpy()) <= 2**-7


@pytest.mark.parametrize(
    "copy, message",
    [
        (
            lambda p: p.transpose(1, 2).to(torch.bfloat16).contiguous(),
            r"moe: w1: expected the parameter's memory order, strides \(48, 4, 1\) of shape \(3, 12, 4\), "
            r"got strides \(48, 12, 1\) of shape \(3, 4, 12\)",
        ),
        (
            lambda p: tuple(half.to(torch.bfloat16) for half in p.transpose(1, 2).chunk(2, dim=2)),
            r"moe: w1\[0\]: expected a view of the parameter, or of a copy of all of it in another dtype, "
            r"got shape \(3, 4, 6\) of other memory",
        ),
    ],
)
def test_copies_whose_elements_lie_otherwise_have_no_main_grad(copy, message):
    """Gradients would be added to other elements of main_grad than theirs."""
    with pytest.raises(ValueError, match=message):
        main_grads_of_copies(copy)


def test_what_names_the_parameters_of_main_grad():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    w1, w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
    for weight in (w1, w2):
        weight.main_grad = torch.zeros_like(weight)
    for given, error, message in (
        ([w1, w2], TypeError, "accumulate_into_main_grad: expected True, False or a mapping from 'w1' and 'w2' to"),
        ({"w_1": w1}, ValueError, "accumulate_into_main_grad: expected one of 'w1', 'w2', got 'w_1'"),
        ({"w1": "w1"}, TypeError, r"accumulate_into_main_grad\['w1'\]: expected a parameter or a pair of them, got"),
        ({"w1": w2}, ValueError, "w1: expected a view of the parameter, or a copy in another dtype, got other memory"),
    ):
        with pytest.raises(error, match=f"moe: {message}"):
            moe(x, ids, weights, w1, w2, accumulate_into_main_grad=given)


REDUCTIONS = {
    "sum": lambda out: out.sum(),  # an incoming gradient that requires none
    "mean": lambda out: out.mean(),
    "squares": lambda out: out.square().sum(),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("of", ["x", "weights", "w1", "w2"])
def test_no_second_derivative(of, reduction):
    """A gradient penalty raises; the first derivatives that it is made of are as without a graph."""
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    leaves = leaves_of(x, weights, w1, w2)
    reduced = REDUCTIONS[reduction]
    want = torch.autograd.grad(reduced(moe(x, ids, weights, w1, w2)), list(leaves.values()))
    out = reduced(moe(x, ids, weights, w1, w2))
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), create_graph=True), strict=True))
    assert all(map(torch.equal, grads.values(), want))
    with pytest.raises(RuntimeError, match=r"^moe: no second derivatives$"):
        grads[of].square().sum().backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_second_derivative_with_other_leaves(reduction):
    """Where the penalty's leaf is another one than that of the loss."""
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    x.requires_grad_(), w1.requires_grad_()
    out = moe(x, ids, weights, w1, w2)
    (grad,) = torch.autograd.grad(REDUCTIONS[reduction](out), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^moe: no second derivatives$"):
        grad.square().sum().backward()
    assert w1.grad is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of", ["x", "weights", "w1", "w2"])
def test_no_second_derivative_by_an_input_beside_other_terms(of, bias):
    """torch.autograd.grad must not return the other terms' part alone."""
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    leaves = leaves_of(x, weights, w1, w2)
    b2 = torch.randn(w2.shape[0], w2.shape[2], dtype=w2.dtype) if bias else None
    loss = moe(x, ids, weights, w1, w2, b2=b2).sum() + sum(leaf.pow(3).sum() for leaf in leaves.values())
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError, match=r"^moe: no second derivatives$"):
        torch.autograd.grad(grads[0].sum() + grads[-1].sum(), leaves[of])


def test_no_second_derivative_of_the_router_beside_other_terms():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = route(logits, 2)[0].square().sum() + logits.pow(3).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^route: no second derivatives$"):
        torch.autograd.grad(grad.sum(), logits)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_second_derivative_of_the_router(reduction):
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reduced = REDUCTIONS[reduction]
    (want,) = torch.autograd.grad(reduced(route(logits, 2)[0]), logits)
    (grad,) = torch.autograd.grad(reduced(route(logits, 2)[0]), logits, create_graph=True)
    assert torch.equal(grad, want)
    with pytest.raises(RuntimeError, match=r"^route: no second derivatives$"):
        grad.square().sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_can_be_used_without_it():
    """As optimizers do that ask for graphs throughout; also into .grad and main_grad."""
    layer = MoE(8, 6, 5, 2, accumulate_into_main_grad=True)
    for parameter in (layer.w1_storage, layer.w2_storage):
        parameter.main_grad = torch.zeros_like(parameter)
    layer(torch.randn(7, 8)).square().sum().backward(create_graph=True)
    assert layer.router.grad.detach().abs().sum() > 0 and layer.w1_storage.main_grad.abs().sum() > 0
    layer.router.grad = None  # else a cycle that only the garbage collector ends


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_transforms_that_cannot_be_followed_are_refused():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    expected = ": expected a call outside of all transforms of torch but torch.compile, .*, got "
    leaf = x.clone().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for call in (lambda: route(dual, 2), lambda: moe(dual, ids, weights, w1, w2)):
            with pytest.raises(RuntimeError, match=expected + "forward-mode differentiation"):
                call()
    with pytest.raises(RuntimeError, match=expected + "forward-mode differentiation"):
        torch.autograd.gradcheck(lambda x: moe(x, ids, weights, w1, w2, keep_saved=True), leaf, check_forward_ad=True)
    with pytest.raises(RuntimeError, match=expected + "torch.jit.trace"):
        torch.jit.trace(lambda x: moe(x, ids, weights, w1, w2), x)
    out = moe(leaf, ids, weights, w1, w2, keep_saved=True)
    with pytest.raises(TypeError, match=r"^moe_backward: grad_out: memory: expected .* batched by vmap"):
        torch.autograd.grad(out, leaf, torch.ones(2, *out.shape, dtype=out.dtype), is_grads_batched=True)


def test_arguments_of_the_router_are_tensors():
    with pytest.raises(TypeError) as caught:
        route(np.zeros((5, 4), np.float32), 2)
    assert str(caught.value) == "route: logits: expected a torch tensor, got <class 'numpy.ndarray'>"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storages_of_the_caller_can_still_be_resized(dtype):
    """As FSDP does with parameters."""
    x, ids, weights, w1, w2, grad_out = tensors(replace(SMALL, order="transposed"), np.float32)
    x, w1, w2, grad_out = (t.to(dtype).clone() for t in (x, w1, w2, grad_out))
    ids, weights = ids.clone(), weights.clone()
    total = torch.zeros_like(w2)
    _, saved = mb.moe_forward(x, ids, weights, w1, w2)
    mb.moe_backward(grad_out, saved, accumulate={"w2": total})
    assert total.abs().sum() > 0
    mb.route(x, 2)
    assert all(t.untyped_storage().resizable() for t in (x, ids, weights, w1, w2, grad_out, total))
    assert saved.x is x and saved.weights is weights and saved.w1 is w1 and saved.w2 is w2


def test_bad_input_raises_through_autograd():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    with pytest.raises(ValueError, match=r"^moe: x: expected a C-contiguous array, as of .*, got strides"):
        moe(x.T.contiguous().T.requires_grad_(), ids, weights, w1, w2)


def test_checkpointing_gives_the_same_gradients():
    x, ids, weights, w1, w2, grad_out = tensors(SMALL)
    leaves = leaves_of(x, weights, w1, w2)
    want = torch.autograd.grad(moe(x, ids, weights, w1, w2), list(leaves.values()), grad_out)
    out = torch.utils.checkpoint.checkpoint(moe, x, ids, weights, w1, w2, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(out, list(leaves.values()), grad_out), want))


def composed(layer, x):
    """`MoE` written in torch operations, in the dtypes that `MoE` promises."""
    tokens = x.reshape(-1, x.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = tokens.to(wide) @ layer.router.to(wide).T
    weights, ids = logits.softmax(-1).topk(layer.k)
    weights = weights / weights.sum(-1, keepdim=True) if layer.renormalize else weights
    act = {
        "swiglu": torch.nn.functional.silu,
        "geglu": torch.nn.functional.gelu,
        "relu": torch.relu,
    }[layer.activation]
    out = torch.zeros_like(tokens)
    for expert, (w1, w2) in enumerate(zip(layer.w1_storage, layer.w2_storage, strict=True)):
        rows, slots = torch.where(ids == expert)
        first = tokens[rows] @ w1.T
        if is_gated(layer.activation):
            a, b = first.chunk(2, dim=-1)
            hidden = act(a) * b
        else:
            hidden = act(first)
        out = out.index_add(0, rows, weights[rows, slots, None].to(out.dtype) * (hidden @ w2.T))
    return out.reshape(x.shape)


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (8,), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("mode", ["eager", "compiled", "operators", "no_grad"])
def test_output_of_the_module_is_no_view(mode, shape):
    """A view that is changed in place loses its hooks, such as those by which FSDP2 gathers weights for backward."""
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, dtype=torch.float64, return_routing=True)
    called = torch.compile(layer, backend="aot_eager", fullgraph=True) if mode == "compiled" else layer
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with contextlib.ExitStack() as stack:
        if mode == "operators":
            stack.enter_context(Operators())
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        out, routed = called(x)
    assert out.shape == x.shape
    assert all(tensor._base is None for tensor in (out, routed.logits, routed.weights, routed.ids))
    if mode == "no_grad":
        return
    hooked = []
    out.register_hook(hooked.append)
    out += x
    out.square().sum().backward()
    assert len(hooked) == 1 and torch.equal(hooked[0], 2 * out)
    again = x.detach().requires_grad_()
    want = layer(again)[0] + again
    want.square().sum().backward()
    assert torch.equal(out, want) and torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu"])
def test_module_equals_torch_operations(renormalize, activation):
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, activation=activation, renormalize=renormalize, dtype=torch.float64)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn_like(x)
    wanted = (x, *layer.parameters())
    out, want = layer(x), composed(layer, x)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert relative_error(out.detach().numpy(), want.detach().numpy()) <= 1e-12
    grads = torch.autograd.grad(out, wanted, grad_out)
    for got, expected in zip(grads, torch.autograd.grad(want, wanted, grad_out), strict=True):
        assert relative_error(got.numpy(), expected.numpy()) <= 1e-12


@pytest.mark.parametrize("options", [{"keep_saved": True}, {"save": "recompute"}], ids=str)
def test_gradients_of_the_module_equal_finite_differences(options):
    torch.manual_seed(0)
    layer = MoE(4, 3, 5, 2, dtype=torch.float64, **options)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_top_1_trains_its_router():
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 1)
    assert layer.renormalize is False and MoE(8, 6, 5, 2).renormalize is True
    x = torch.randn(64, 8)
    layer(x).square().mean().backward()
    composed_layer = copy.deepcopy(layer)
    composed_layer.zero_grad()
    composed(composed_layer, x).square().mean().backward()
    assert layer.router.grad.abs().max() > 0
    assert relative_error(layer.router.grad.numpy(), composed_layer.router.grad.numpy()) <= 1e-5


def test_a_router_that_cannot_train_is_warned_of():
    with pytest.warns(UserWarning, match="MoE: k = 1 with .* trains no router"):
        layer = MoE(8, 6, 5, 1, renormalize=True)
    layer(torch.randn(64, 8)).square().mean().backward()
    assert not layer.router.grad.any()


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arrives", [torch.bfloat16, torch.float32])
def test_autocast_casts_as_for_linear_but_leaves_the_router_in_fp32(arrives, to):
    """Rounded logits would send some tokens to other experts."""
    torch.manual_seed(0)
    layer = MoE(256, 16, 64, 2)
    x = torch.randn(512, 256).to(arrives).requires_grad_()
    grad_out = torch.randn(512, 256).to(to)
    logits = x.float() @ layer.router.T
    weights, ids = route(logits, 2)
    experts = [w.to(to).transpose(1, 2) for w in (layer.w1_storage, layer.w2_storage)]
    want = moe(x.to(to), ids, weights, *experts)
    want_grads = torch.autograd.grad(want, (x, *layer.parameters()), grad_out)
    with torch.autocast("cpu", to):
        out = layer(x)
    grads = torch.autograd.grad(out, (x, *layer.parameters()), grad_out)
    assert out.dtype == to and torch.equal(out, want)
    for got, wanted, leaf in zip(grads, want_grads, (x, *layer.parameters()), strict=True):
        assert got.dtype == leaf.dtype and torch.equal(got, wanted)


def test_experts_that_were_pruned_without_the_router_are_refused():
    """Tokens of the removed experts would lose slots in silence."""
    layer = MoE(8, 6, 5, 2, identity_experts=1)
    for name in ("w1_storage", "w2_storage"):
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).detach()[:3]))
    with pytest.raises(ValueError) as caught:
        layer(torch.zeros(4, 8))
    expected = "MoE: router: expected shape (E + identity_experts, d) = (4, 8), as w1_storage has 3 experts, got (6, 8)"
    assert str(caught.value) == expected
    layer.router = torch.nn.Parameter(layer.router.detach()[2:])
    assert layer(torch.zeros(4, 8)).shape == (4, 8)


def test_the_default_of_renormalize_follows_k():
    torch.manual_seed(0)
    x = torch.randn(7, 8)
    for first, then in ((1, 2), (2, 1)):
        layer = MoE(8, 6, 5, first, return_routing=True)
        layer.k = then
        assert layer.renormalize is (then > 1)
        routed = layer(x)[1]
        want, _ = route(routed.logits, then)
        assert torch.equal(routed.weights, want) and f"renormalize={then > 1}" in repr(layer)
        layer.renormalize = then == 1
        asked, _ = route(routed.logits, then, renormalize=then == 1)
        assert torch.equal(layer(x)[1].weights, asked) and not torch.equal(asked, want)


def test_weights_in_float8_are_named():
    x, ids, weights, w1, w2, _ = tensors(SMALL, np.float32)
    layer = MoE(8, 6, 5, 2)
    layer.w1_storage, layer.w2_storage = (
        torch.nn.Parameter(w.detach().to(torch.float8_e4m3fn), requires_grad=False)
        for w in (layer.w1_storage, layer.w2_storage)
    )
    with pytest.raises(TypeError, match=r"^MoE: w1_storage: expected dtype .* got torch\.float8_e4m3fn$"):
        layer(torch.zeros(4, 8))
    with pytest.raises(TypeError, match=r"^moe: w1: expected dtype float32, that of x, got float8_e4m3fn$"):
        moe(x, ids, weights, w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64, "bf16"], ids=str)
def test_dtypes_that_no_forward_takes_raise_in_the_constructor(dtype):
    with pytest.raises(TypeError, match=r"^MoE: dtype: expected torch\.bfloat16 or .* or torch\.float64, got "):
        MoE(8, 6, 5, 2, dtype=dtype)


@pytest.mark.parametrize("options", [{"lora_rank": 2}, {"expert_format": "nf4"}], ids=str)
def test_modules_without_operators_name_the_device_meta(options):
    with pytest.raises(RuntimeError, match=r"^moe: x: expected tensors with memory .* on the device meta$"):
        MoE(64, 64, 4, 2, device="meta", **options)(torch.empty(3, 64, device="meta"))


def test_autocast_follows_a_linear_layer():
    """Its output is of autocast's dtype, these weights are not. What is float64 stays so, as in linear."""
    layer, linear = MoE(8, 6, 5, 2), torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(linear(torch.randn(3, 8)))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert layer.double()(torch.randn(3, 8, dtype=torch.float64)).dtype == torch.float64
    assert all(p.grad.dtype == torch.float32 for p in linear.parameters())
    with pytest.raises(
        TypeError, match=r"^MoE: x: expected torch.float32, that of the parameters, or torch.autocast, got"
    ):
        MoE(8, 6, 5, 2)(torch.randn(3, 8).bfloat16())


def test_autocast_and_router_weights_of_another_dtype():
    """They stay as they are in float32, and come to it where they are of neither dtype that the layer takes."""
    x, ids, weights, w1, w2, _ = tensors(SMALL, np.float32)
    want = moe(x.half(), ids, weights.bfloat16().float(), w1.half(), w2.half())
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(moe(x, ids, weights.bfloat16(), w1, w2), want)


def test_autocast_and_main_grad():
    """main_grad is the parameter's, though the layer is given a copy of it in another dtype."""
    layer = MoE(8, 6, 5, 2, accumulate_into_main_grad=True)
    for parameter in (layer.w1_storage, layer.w2_storage):
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
        plain = copy.deepcopy(layer)
        plain.accumulate_into_main_grad = False
        plain(x).sum().backward()
    for name in ("w1_storage", "w2_storage"):
        parameter, expected = getattr(layer, name), getattr(plain, name).grad
        assert parameter.grad is None
        assert relative_error(parameter.main_grad.numpy(), expected.numpy()) <= 2**-8


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ((0, 6, 5, 2), {}, ValueError, "d_model: expected at least 1, got 0"),
        ((8, 0, 5, 2), {}, ValueError, "d_hidden: expected at least 1, got 0"),
        ((8, 6, 0, 2), {}, ValueError, "num_experts: expected 1 to 4096, got 0"),
        ((8, 6, 5000, 2), {}, ValueError, "num_experts: expected 1 to 4096, got 5000"),
        ((8, 6, 4, 5), {}, ValueError, "k: expected 1 to 4, got 5"),
        ((8, 6, 128, 65), {}, ValueError, "k: expected 1 to 64, got 65"),
        ((8, 6, 4, 0), {}, ValueError, "k: expected 1 to 4, got 0"),
        ((8, 6, 4, True), {}, TypeError, "k: expected an int, got True"),
        ((8.0, 6, 4, 2), {}, TypeError, "d_model: expected an int, got 8.0"),
        ((8, 6, 4, 2), {"activation": "SwiGLU"}, ValueError, "activation: expected one of 'swiglu', "),
        ((8, 6, 4, 2), {"save": "all"}, ValueError, "save: expected one of 'minimal', "),
        ((8, 6, 4, 2), {"score": "tanh"}, ValueError, "score: expected one of 'softmax', "),
        ((8, 6, 4, 2), {"renormalize": "no"}, TypeError, "renormalize: expected True, False or None, got 'no'"),
        ((16, 8, 4, 2), {"precision": "fp8"}, ValueError, "precision: expected d and h that are multiples of 16"),
    ],
)
def test_errors_of_the_constructor(sizes, options, error, message):
    with pytest.raises(error) as caught:
        MoE(*sizes, **options)
    assert str(caught.value).startswith(f"MoE: {message}")


def test_sizes_read_by_numpy():
    layer = MoE(*np.array([8, 6, 5, 2]))
    assert layer(torch.randn(3, 8)).shape == (3, 8) and type(layer.k) is int


@pytest.mark.parametrize("shape", [(3, 7), (), (8, 3)], ids=str)
def test_shape_of_the_modules_input(shape):
    with pytest.raises(ValueError) as caught:
        MoE(8, 6, 5, 2)(torch.zeros(shape))
    assert str(caught.value) == f"MoE: x: expected shape (..., d) = (..., 8), got {shape}"


def test_module_parameters_and_memory_order():
    layer = MoE(8, 6, 5, 2)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {"router": (5, 8), "w1_storage": (5, 12, 8), "w2_storage": (5, 8, 6)}
    assert dict(MoE(8, 6, 5, 2, activation="relu").named_parameters())["w1_storage"].shape == (5, 6, 8)
    layer(torch.randn(3, 8)).sum().backward()
    assert all(p.grad.stride() == p.stride() for p in layer.parameters())
    assert repr(layer) == (
        "MoE(d_model=8, d_hidden=6, num_experts=5, k=2, activation='swiglu', save='minimal', score='softmax', "
        "renormalize=True, keep_saved=False, accumulate_into_main_grad=False)"
    )


def test_module_state_dict_round_trip():
    torch.manual_seed(0)
    layer, other = MoE(8, 6, 5, 2), MoE(8, 6, 5, 2)
    x = torch.randn(3, 8)
    assert not torch.equal(layer(x), other(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert not any(other.load_state_dict(torch.load(file, weights_only=True)))
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))


def test_module_in_bfloat16():
    torch.manual_seed(0)
    layer = MoE(16, 12, 5, 2, dtype=torch.bfloat16)
    exact = MoE(16, 12, 5, 2, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    grad_out = torch.randn(40, 16, dtype=torch.bfloat16)
    out, want = layer(x), exact(exact_x)
    assert out.dtype == torch.bfloat16
    out.backward(grad_out)
    want.backward(grad_out.double())
    pairs = [(out, want), (x.grad, exact_x.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(layer.parameters(), exact.parameters(), strict=True)]
    for got, expected in pairs:
        assert got.dtype == torch.bfloat16
        # 1.5 units in the last place, for the roundings of the first layer, the product and the result
        assert relative_error(got.detach().float().numpy(), expected.detach().numpy()) <= 1.5 * 2**-8


@pytest.mark.parametrize("x", [np.zeros((3, 8), np.float32), None], ids=["numpy", "None"])
def test_the_module_takes_tensors_alone(x):
    with pytest.raises(TypeError) as caught:
        MoE(8, 4, 4, 2)(x)
    assert str(caught.value) == f"MoE: x: expected a torch tensor, got {type(x)}"


def test_module_takes_any_leading_shape():
    layer = MoE(8, 6, 5, 2)
    x = torch.randn(6, 8)
    want = layer(x)
    assert torch.equal(layer(x.reshape(2, 3, 8)), want.reshape(2, 3, 8))
    assert torch.equal(layer(x.T.contiguous().T), want)  # not contiguous
    torch.testing.assert_close(layer(x[0]), want[0])  # NumPy's products of one row may round differently
    assert layer(x[:0]).shape == (0, 8)


def test_module_without_tokens_has_zero_gradients():
    layer = MoE(8, 6, 5, 2)
    layer(torch.zeros(0, 8)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_module_for_inference_saves_nothing(seen):
    layer = MoE(8, 6, 5, 2, save=None)
    x = torch.randn(3, 8)
    with torch.no_grad():
        layer(x)
    assert seen["save"] == [None]
    with pytest.raises(ValueError, match=r"^moe: save: expected a policy"):
        layer(x)


def test_module_trains():
    torch.manual_seed(0)
    layer = MoE(8, 16, 4, 2)
    x = torch.randn(64, 8)
    target = torch.randn(64, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (layer(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_sums_of_the_router_are_differentiable():
    logits = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.randn(6, dtype=torch.float64)
    offsets, mask = torch.tensor([0, 5, 12], dtype=torch.int32), torch.arange(12) != 3

    def routed(logits):
        options = {"score": "sigmoid", "bias": bias, "groups": (2, 1, 2), "scale": 2.5, "token_mask": mask}
        weights, _, sums = route(logits, 2, **options, sums=("sigmoid", "z", "entropy"), sequences=offsets)
        return weights, *sums

    assert torch.autograd.gradcheck(routed, logits)
    _, _, sums = route(logits, 2, sums=("softmax",))
    assert sums.z_sums is None
    (grad,) = torch.autograd.grad(sums.score_sums[0, 0], logits)  # the weights take no part in it
    (want,) = torch.autograd.grad(logits.softmax(1)[:, 0].sum(), logits)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double()])
def test_the_bias_of_the_module_stays_float32(cast):
    layer = MoE(8, 6, 5, 2, score="sigmoid", bias=True)
    assert layer.bias.dtype == torch.float32 and "bias" in layer.state_dict()
    layer.bias.copy_(torch.arange(5) / 1000 + 1e-6)
    before = layer.bias.clone()
    cast(layer)
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, before)
    assert layer.router.dtype != torch.float32
    assert MoE(8, 6, 5, 2).bias is None


@pytest.mark.parametrize("assign", [False, True])
def test_the_bias_stays_float32_when_a_16_bit_state_is_loaded(assign):
    state = {name: t.bfloat16() for name, t in MoE(8, 6, 5, 2, bias=True).state_dict().items()}
    layer = MoE(8, 6, 5, 2, bias=True, device="meta" if assign else "cpu", dtype=torch.bfloat16)
    layer.load_state_dict(state, assign=assign)
    assert layer.bias.dtype == torch.float32 and layer.bias.device.type == "cpu"
    assert layer(torch.ones(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_module_with_options_of_the_router():
    torch.manual_seed(0)
    options = {"score": "sigmoid", "groups": (4, 2, 2), "scale": 2.5, "eps": 1e-20, "sums": ("sigmoid", "z")}
    layer = MoE(8, 6, 16, 4, bias=True, return_routing=True, **options)
    layer.bias.normal_()
    x = torch.randn(2, 10, 8)
    out, routed = layer(x, sequences=2)
    weights, ids, sums = route(routed.logits, 4, bias=layer.bias, sequences=2, **options)
    assert torch.equal(weights, routed.weights) and torch.equal(ids, routed.ids)
    assert torch.equal(sums.score_sums, routed.sums.score_sums) and sums.score_sums.shape == (2, 16)
    want = moe(x.flatten(0, 1), ids, weights, layer.w1_storage.mT, layer.w2_storage.mT)
    assert torch.equal(out, want.view_as(x))
    routed.sums.z_sums.sum().backward()
    assert layer.router.grad.abs().max() > 0 and layer.w2_storage.grad is None
    mask = torch.arange(20) < 10
    out, routed = layer(x, token_mask=mask.view(2, 10))
    assert (routed.ids[10:] == -1).all() and not out[1].any() and out[0].abs().max() > 0


def test_the_mask_of_the_module_may_be_a_column():
    """Of the mask of a whole text, a step of generation passes the last column."""
    torch.manual_seed(0)
    layer, x, mask = MoE(8, 6, 5, 2), torch.randn(4, 1, 8), torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).bool()
    out = layer(x, token_mask=mask[:, -1:])
    assert torch.equal(out, layer(x, token_mask=mask[:, -1:].clone()))
    assert not out[[0, 3]].any() and out[[1, 2]].abs().max() > 0


@pytest.mark.parametrize(
    "options", [{}, {"expert_bias": True, "identity_experts": 2}, {"weights_on": "input"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masked_tokens_may_be_nan(dtype, options, device="cpu"):
    """As uninitialised padding is, and what a loss then has there: gradients are those of a call without the tokens."""
    torch.manual_seed(0)
    layer = MoE(
        16, 8, 6, 2, dtype=dtype, device=device, return_routing=True, sums=("softmax", "z", "entropy"), **options
    )
    mask = torch.arange(12, device=device).view(3, 4) % 3 > 0
    x = torch.randn(3, 4, 16, dtype=dtype, device=device)
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 1], dtype=dtype, device=device)
    padded = torch.where(mask[..., None], x, anything.repeat(4)).requires_grad_()
    alone = x[mask].requires_grad_()

    def run(x, scale, **masks):
        out, (logits, weights, _, sums) = layer(x, **masks)
        parts = (out * scale, logits.square(), weights.square(), *sums)
        sum(part.sum() for part in parts).backward()
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        return out, logits, grads

    scale = torch.where(mask[..., None], torch.ones((), dtype=dtype, device=device), anything.repeat(4))
    out, logits, grads = run(padded, scale, token_mask=mask)
    want, want_logits, want_grads = run(alone, 1)
    assert not out[~mask].any() and not logits[~mask.flatten()].any() and not padded.grad[~mask].any()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]  # sums in other orders
    named = {
        "out": (out[mask], want),
        "logits": (logits[mask.flatten()], want_logits),
        "x": (padded.grad[mask], alone.grad),
    }
    for name, (got, expected) in (named | {n: (grads[n], g) for n, g in want_grads.items()}).items():
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_may_be_nan_on_a_gpu(dtype):
    test_masked_tokens_may_be_nan(dtype, {}, "cuda")


def test_masked_tokens_of_the_product_on_cuda_may_be_nan(monkeypatch):
    """Without a GPU, where torch has no product of 16-bit tensors with a float32 result."""
    from moeblaze_cupy.interop.torch import router as torch_router

    product = torch.mm

    def mm(a, b, out_dtype=None):
        return product(a, b) if out_dtype is None else product(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    x, w = (torch.randn(n, 16).bfloat16() for n in (9, 5))
    mask, grad = torch.arange(9) % 3 > 0, torch.randn(9, 5)
    x[~mask] = grad[~mask] = torch.nan
    x.requires_grad_(), w.requires_grad_()
    logits = torch_router._RouterLogits.apply(x, w, mask)
    grad_x, grad_w = torch.autograd.grad(logits, (x, w), grad)
    assert not logits[~mask].any() and not grad_x[~mask].any()
    want = torch_router._RouterLogits.apply(x[mask], w, None)
    want_x, want_w = torch.autograd.grad(want, (x, w), grad[mask])
    assert torch.equal(logits[mask], want)
    assert torch.equal(grad_x[mask], want_x[mask])
    torch.testing.assert_close(grad_w, want_w)  # as of bfloat16: sums of other lengths


def test_masks_of_other_kinds_are_refused():
    layer, x = MoE(8, 6, 5, 2), torch.randn(2, 3, 8)
    for mask, expected in (
        (torch.ones(2, 3), "dtype bool, got float32"),
        (torch.ones(2, 1, dtype=torch.bool), "shape (2, 3) or (6,), got (2, 1)"),
        (torch.ones(3, 2, dtype=torch.bool), "shape (2, 3) or (6,), got (3, 2)"),
        (torch.ones(1, 6, dtype=torch.bool), "shape (2, 3) or (6,), got (1, 6)"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), "x's device cpu, got meta"),
        ([True] * 6, "None or a torch tensor, got <class 'list'>"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            layer(x, token_mask=mask)
        assert str(caught.value) == f"MoE: token_mask: expected {expected}"


def test_nested_tensors_are_refused():
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    nested, layer = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), MoE(SMALL.d, 6, 5, 2)
    for function, call in (("moe", lambda: moe(nested, ids, weights, w1, w2)), ("MoE", lambda: layer(nested))):
        with pytest.raises(TypeError) as caught:
            call()
        expected = "a dense tensor, as values() of a nested one is"
        assert str(caught.value) == f"{function}: x: expected {expected}, got a nested one"


def test_module_with_a_router_of_ones_own():
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, return_routing=True)
    x = torch.randn(7, 8)
    out, routed = layer(x)
    replay = MoE(8, 6, 5, 2, routing=lambda logits: route(logits, ids=routed.ids))
    replay.load_state_dict(layer.state_dict())
    assert torch.equal(replay(x), out)
    wide = torch.cat([routed.ids, routed.ids], 1), torch.cat([routed.weights, routed.weights], 1)
    replay.routing = lambda logits: (wide[1][:, :2], wide[0][:, :2])  # slices are not contiguous
    assert torch.equal(replay(x), out)
    with pytest.raises(ValueError) as caught:
        replay(x, token_mask=torch.ones(7, dtype=torch.bool))
    assert str(caught.value) == "MoE: token_mask: expected None with routing, which gets logits alone, got a mask"


def test_a_modules_w1_and_w2_are_those_of_the_array_functions():
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, return_routing=True)
    x = torch.randn(7, 8)
    out, routed = layer(x)
    assert layer.w1.shape == (5, 8, 12) and layer.w2.shape == (5, 6, 8)
    assert torch.equal(moe(x, routed.ids, routed.weights, layer.w1, layer.w2), out)
    assert set(layer.state_dict()) == {"router", "w1_storage", "w2_storage"}


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (lambda logits: None, "a function that returns (weights, ids), as route does, got a NoneType"),
        (lambda logits: logits, "a function that returns (weights, ids), as route does, got a Tensor"),
        (lambda logits: (logits, None), "a function that returns (weights, ids), as route does, got a tuple of "),
        (lambda logits: route(logits, 3), "weights of shape (L, k) = (7, 2), got (7, 3)"),
        (lambda logits: (logits[:, :2], route(logits, 3)[1]), "ids of shape (L, k) = (7, 2), got (7, 3)"),
        (lambda logits: route(logits[1:], 2), "weights of shape (L, k) = (7, 2), got (6, 2)"),
    ],
    ids=["nothing", "a tensor", "no ids", "another k", "another k of ids", "another L"],
)
def test_a_wrong_routing_is_named(routed, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        MoE(8, 6, 5, 2, routing=routed)(torch.randn(7, 8))
    assert str(caught.value).startswith(f"MoE: routing: expected {message}")


def test_a_step_loads_nothing_of_torchs_compiler():
    """Its import takes seconds."""
    code = """
import sys, torch
from moeblaze_cupy.interop.torch import MoE
MoE(8, 6, 5, 2)(torch.randn(4, 8)).sum().backward()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    assert run_python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("by_operators", [False, True])
def test_errors_name_moe(by_operators):
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    stored = w1.transpose(1, 2).contiguous()
    with Operators() if by_operators else contextlib.nullcontext(), pytest.raises(ValueError) as caught:
        moe(x, ids, weights, stored, w2)
    assert str(caught.value).startswith("moe: w1: expected shape (E, d, 2h)")
    assert str(caught.value).endswith("; pass its transposed view, .transpose(1, 2)?")


def test_ids_are_checked_where_it_is_asked_for(monkeypatch):
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    ids[0, 0] = SMALL.E
    moe(x, ids, weights, w1, w2)
    monkeypatch.setattr(checks, "CHECKS_IDS", True)
    for leaf in (x, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=rf"^moe: ids: expected -1 to {SMALL.E - 1} in all slots"):
            moe(leaf, ids, weights, w1, w2)


def test_the_librarys_own_empty_slots_pass_the_check_of_ids(monkeypatch):
    """Those of a masked token, and of pairs past the last token's."""

    def results():
        torch.manual_seed(0)
        masked = MoE(8, 6, 5, 2)(torch.randn(4, 8), token_mask=torch.tensor([True, False, True, True]))
        x, logits, w1, w2 = torch.randn(6, 8), torch.randn(6, 5), torch.randn(5, 8, 12), torch.randn(5, 6, 8)
        offsets, ids = mb.round_tokens(logits, logits.topk(2).indices.int(), tile=4, rounding="up")
        assert (ids == -1).any()
        return masked, mb.moe_forward(x, ids, torch.ones(len(ids)), w1, w2, token_offsets=offsets)[0]

    want = results()
    monkeypatch.setattr(checks, "CHECKS_IDS", True)
    assert all(map(torch.equal, results(), want))


def added_to_total(total):
    x, ids, weights, w1, w2, grad = tensors(SMALL)
    mb.moe_backward(grad, mb.moe_forward(x, ids, weights, w1, w2)[1], accumulate={"w1": total})


def added_by_the_second_half(total):
    x, ids, weights, w1, w2, grad = tensors(SMALL)
    _, pending = mb.moe_backward_data(grad, mb.moe_forward(x, ids, weights, w1, w2)[1])
    mb.moe_backward_weights(pending, accumulate={"w1": total})


def added_to_main_grad(total):
    x, ids, weights, w1, w2, _ = tensors(SMALL)
    w1.requires_grad_().main_grad, w2.requires_grad_().main_grad = total, torch.zeros_like(w2)
    moe(x, ids, weights, w1, w2, accumulate_into_main_grad=True).sum().backward()


def added_to_histogram(total):
    logits = torch.randn(7, len(total))
    counts = total.view(torch.int32).view(len(total), -1)
    mb.quantile_histogram(logits, logits.topk(2).indices, torch.zeros(len(total)), counts, torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize(
    "write",
    [added_to_total, added_by_the_second_half, added_to_main_grad, added_to_histogram],
    ids=lambda f: f.__name__,
)
def test_autograd_knows_of_sums_in_the_callers_tensors(write):
    """A backward that was to read the tensor as it was before raises. Tensors of inference have no count of writes."""
    total = torch.zeros_like(tensors(SMALL)[3])
    total = total.view(len(total), -1)[:, :64].contiguous() if write is added_to_histogram else total
    factor = torch.ones_like(total, requires_grad=True)
    product = (total * factor).sum()
    write(total)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        if write is not added_to_main_grad:
            write(torch.zeros_like(total))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_counts_nothing_twice(use_reentrant):
    torch.manual_seed(0)
    layer = MoE(8, 6, 5, 2, bias=True, sums=("softmax",), return_routing=True)
    x = torch.randn(7, 8, requires_grad=True)
    counts = torch.zeros(5)

    def block(x):
        out, routed = layer(x)
        return out, routed.ids, routed.sums.score_sums

    plain = torch.autograd.grad((block(x)[0].square().sum(), block(x)[2].square().sum()), x)
    out, ids, score_sums = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
    counts += torch.bincount(ids.flatten(), minlength=5)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    (out.square().sum() + score_sums.square().sum()).backward()
    torch.testing.assert_close(x.grad, plain[0])
    assert counts.sum() == 14
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


def test_sums_that_nobody_gets_are_refused():
    with pytest.raises(ValueError, match=r"^MoE: sums: expected \(\) without return_routing=True"):
        MoE(8, 6, 5, 2, sums=("z",))


@pytest.mark.gpu
def test_16_bit_router_logits_are_summed_in_float32():
    from moeblaze_cupy.interop.torch.router import router_logits

    x, w = (torch.randn(n, 2048, device="cuda").bfloat16().requires_grad_() for n in (300, 64))
    logits = router_logits(x, w)
    exact = x.double() @ w.double().T
    assert logits.dtype == torch.float32
    # Tensor cores truncate what they add: 2e-6 was measured. A sum rounded to bfloat16 would be 2e-3 off.
    assert relative_error(logits.detach().cpu().numpy(), exact.detach().cpu().numpy()) < 1e-5
    grad = torch.randn_like(logits)
    for got, want in zip(
        torch.autograd.grad(logits, (x, w), grad), torch.autograd.grad(exact, (x, w), grad.double()), strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert relative_error(got.float().cpu().numpy(), want.float().cpu().numpy()) < 2**-7
