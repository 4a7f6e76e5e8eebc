"""`moe` and `MoE` with low-rank factors, against torch's autograd of W + scale * B A made explicitly in float64."""

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy import frameworks as arrays  # noqa: E402
from moeblaze_cupy.interop.torch import MoE, moe  # noqa: E402
from moeblaze_cupy.interop.torch.private import GRAPH_BREAKS_HAVE_REASONS  # noqa: E402
from moeblaze_cupy.types import FACTORS, WEIGHT_FORMATS, pair  # noqa: E402
from tests.cases import Case, relative_error  # noqa: E402
from tests.lora.lora_cases import problem  # noqa: E402

BASE = Case(L=40, k=2, E=5, d=19, h=13, order="transposed")
BLOCKS = Case(L=40, k=2, E=4, d=64, h=32, order="transposed")  # sizes that every format takes
# Two float64 evaluations of one formula: a wrong term is apart by more than 1e-3.
SAME_FORMULA = 1e-12
FROZEN = {"x", "weights", *(f"lora.{name}" for name in FACTORS)}


def to_torch(value):
    if value is None or isinstance(value, float):
        return value
    return tuple(map(to_torch, value)) if isinstance(value, tuple) else arrays.Torch.from_numpy(np.array(value))


def case_of(case=BASE, dtype=np.float64, ranks=(4, 3), **of_lora):
    """x, ids, weights, w1, w2, grad_out and a Lora of leaves. No weight requires a gradient."""
    inputs, lora = problem(case, ranks, dtype, **of_lora)
    x, ids, weights, w1, w2, grad_out = map(to_torch, inputs)
    w1, w2 = (t if case.order != "transposed" else t.mT.contiguous().mT for t in (w1, w2))
    lora = mb.Lora(*map(to_torch, lora))
    for leaf in (x, weights, *lora.factors):
        if leaf is not None:
            leaf.requires_grad_()
    return [x, ids, weights, w1, w2, grad_out], lora


def leaves_of(inputs, lora, biases=()):
    """Those that require gradients, by name."""
    x, _, weights, w1, w2, _ = inputs
    named = {"x": x, "weights": weights, "w2": w2, **{f"w1[{i}]": half for i, half in enumerate(pair(w1))}}
    named |= {f"lora.{name}": factor for name, factor in zip(FACTORS, lora.factors, strict=True)} | dict(biases)
    return {name: leaf for name, leaf in named.items() if torch.is_tensor(leaf) and leaf.requires_grad}


def gradients(out, grad_out, leaves):
    found = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return {"out": out.detach()} | dict(zip(leaves, found, strict=True))


def explicit(inputs, lora, b1=None, b2=None, gate_up="halves"):
    """out of torch's own operations, with each expert's merged weights, for a layer of swiglu."""
    x, ids, weights, w1, w2, _ = inputs
    w1 = torch.cat(pair(w1), dim=-1)
    if lora.a1 is not None:
        w1 = w1 + lora.scale1 * (lora.b1 @ lora.a1).mT
    if lora.a2 is not None:
        w2 = w2 + lora.scale2 * (lora.b2 @ lora.a2).mT
    out = torch.zeros_like(x)
    for e in range(len(w2)):
        tokens, slots = torch.where(ids == e)
        ab = x[tokens] @ w1[e] + (0 if b1 is None else b1[e])
        gate, up = ab.chunk(2, dim=-1) if gate_up == "halves" else (ab[:, ::2], ab[:, 1::2])
        y = (torch.nn.functional.silu(gate) * up) @ w2[e] + (0 if b2 is None else b2[e])
        out = out.index_add(0, tokens, weights[tokens, slots, None] * y)
    return out


def widened(value):
    """Leaves of the same values in float64."""
    if not torch.is_tensor(value) or not value.is_floating_point():
        return tuple(map(widened, value)) if isinstance(value, tuple) else value
    return value.detach().double().requires_grad_(value.requires_grad)


def assert_near(got, want, tolerance=SAME_FORMULA):
    assert got.keys() == want.keys() and len(got) > 1
    for name, value in want.items():
        found, wanted = (t.detach().double().cpu().numpy() for t in (got[name], value))
        assert wanted.any() and relative_error(found, wanted) <= tolerance, name


def assert_exact(inputs, lora, biases=(), **options):
    want_inputs, want_lora = list(map(widened, inputs)), mb.Lora(*map(widened, lora))
    named, want_biases = dict(biases), {name: widened(bias) for name, bias in dict(biases).items()}
    leaves, want_leaves = leaves_of(inputs, lora, named), leaves_of(want_inputs, want_lora, want_biases)
    gate_up = options.get("gate_up", "halves")
    want = gradients(explicit(want_inputs, want_lora, **want_biases, gate_up=gate_up), want_inputs[-1], want_leaves)
    got = gradients(moe(*inputs[:-1], lora=lora, **named, **options), inputs[-1], leaves)
    for name, leaf in leaves.items():
        assert got[name].dtype == leaf.dtype and got[name].shape == leaf.shape, name
    assert_near(got, want)
    return got


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("shared", [False, True])
def test_moe(shared, save):
    got = assert_exact(*case_of(shared=shared, strided=True), save=save)
    assert got.keys() == {"out", *FROZEN}


@pytest.mark.parametrize("ranks", [(4, None), (None, 4)])
def test_one_pair(ranks):
    got = assert_exact(*case_of(ranks=ranks))
    assert len(got) == 5


@pytest.mark.parametrize("order", ["row", "pair", "pair_transposed", "interleaved"])
def test_weights_that_train_get_gradients_too(order):
    case = Case(40, 2, 5, 19, 13, order="transposed" if order == "interleaved" else order)
    inputs, lora = case_of(case, order=order if order == "interleaved" else None)
    for weight in (*pair(inputs[3]), inputs[4]):
        weight.requires_grad_()
    biases = {"b1": torch.randn(5, 26).double().requires_grad_(), "b2": torch.randn(5, 19).double().requires_grad_()}
    if order.startswith("pair"):
        biases = {"b2": biases["b2"]}
    options = {"gate_up": "interleaved"} if order == "interleaved" else {}
    got = assert_exact(inputs, lora, biases, **options)
    assert {"w1[0]", "w2", "b2"} < set(got)


@pytest.mark.parametrize("trains", ["a1", "b2", None])
def test_some_leaves_alone(trains):
    """One factor trains, or x alone beside factors that do not."""
    inputs, lora = case_of()
    inputs[2].requires_grad_(False)
    inputs[0].requires_grad_(trains is None)
    for name in FACTORS:
        getattr(lora, name).requires_grad_(name == trains)
    got = assert_exact(inputs, lora)
    assert set(got) == {"out", "x" if trains is None else f"lora.{trains}"}


def test_slots_and_unreduced():
    """The array functions are the reference here, which tests/lora compares with merged weights."""
    inputs, lora = case_of()
    x, ids, weights, w1, w2, _ = inputs
    plain = mb.Lora(*(f.detach() if torch.is_tensor(f) else f for f in lora))
    options = {"weights_on": "input", "unreduced": True}
    out, saved = mb.moe_forward(x.detach(), ids, weights.detach(), w1, w2, lora=plain, **options)
    grad_out = torch.randn_like(out)
    grads = mb.moe_backward(grad_out, saved)
    want = {"out": out, "x": grads.x, "weights": grads.weights}
    want |= {f"lora.{name}": getattr(grads.lora, name) for name in FACTORS}
    got = gradients(moe(x, ids, weights, w1, w2, lora=lora, **options), grad_out, leaves_of(inputs, lora))
    assert all(torch.equal(got[name], value) for name, value in want.items()) and got.keys() == want.keys()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_experts_in_four_and_eight_bits(name, save):
    """In float32, of which the products round each term once: 2^-24 of 64 terms, over the chain of three products."""
    inputs, lora = case_of(BLOCKS, np.float32)
    packed = mb.quantize_experts(*inputs[3:5], name)
    decoded = [mb.dequantize(weight).mT for weight in packed]
    leaves = leaves_of(inputs, lora)
    got = gradients(moe(*inputs[:3], *packed, lora=lora, save=save), inputs[-1], leaves)
    want_inputs, want_lora = list(map(widened, inputs)), mb.Lora(*map(widened, lora))
    want_inputs[3:5] = map(widened, decoded)
    want = gradients(explicit(want_inputs, want_lora), want_inputs[-1], leaves_of(want_inputs, want_lora))
    assert got.keys() == {"out", *FROZEN}
    assert_near(got, want, 4e-6)


def test_factors_in_float32_beside_bfloat16():
    """They are rounded to bfloat16 in the products, as a user's cast would; their gradients are float32."""
    inputs, lora = case_of(dtype=np.float32)
    for i in (0, 3, 4, 5):  # x, w1, w2, grad_out
        inputs[i] = inputs[i].detach().bfloat16().requires_grad_(inputs[i].requires_grad)
    got = gradients(moe(*inputs[:-1], lora=lora), inputs[-1], leaves_of(inputs, lora))
    cast = mb.Lora(*(f.detach().bfloat16().requires_grad_() if torch.is_tensor(f) else f for f in lora))
    want = gradients(moe(*inputs[:-1], lora=cast), inputs[-1], leaves_of(inputs, cast))
    for name, value in want.items():
        of_factor = name.startswith("lora.")
        assert got[name].dtype == (torch.float32 if of_factor else value.dtype), name
        assert torch.equal(got[name].to(value.dtype), value), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    inputs, lora = case_of()
    x, ids, weights, w1, w2, grad_out = inputs
    leaves = leaves_of(inputs, lora)

    def layer(x, weights, *factors):
        return moe(x, ids, weights, w1, w2, lora=lora.with_factors(factors))

    checkpoint(layer, x, weights, *lora.factors, use_reentrant=use_reentrant).backward(grad_out)
    want = gradients(layer(x, weights, *lora.factors), grad_out, leaves)
    assert all(torch.equal(leaf.grad, want[name]) for name, leaf in leaves.items())


def test_autocast():
    """x and the weights are cast; factors stay in float32, and so do their gradients."""
    inputs, lora = case_of(dtype=np.float32)
    x, ids, weights, w1, w2, grad_out = inputs
    leaves = leaves_of(inputs, lora)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(*inputs[:-1], lora=lora)
    assert out.dtype == torch.bfloat16
    got = gradients(out, grad_out.bfloat16(), leaves)
    by_hand = moe(x.bfloat16(), ids, weights, w1.bfloat16(), w2.bfloat16(), lora=lora)
    want = gradients(by_hand, grad_out.bfloat16(), leaves)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    of_half = lora.with_factors(factor.detach().half().requires_grad_() for factor in lora.factors)
    in_single = lora.with_factors(factor.detach().float().requires_grad_() for factor in of_half.factors)
    with torch.autocast("cpu", torch.bfloat16):  # neither autocast's dtype nor float32, so they become float32
        of_both = [(moe(*inputs[:-1], lora=given), leaves_of(inputs, given)) for given in (of_half, in_single)]
    got, want = (gradients(out, grad_out.bfloat16(), leaves) for out, leaves in of_both)
    for name, value in want.items():
        assert torch.equal(got[name], value.to(got[name].dtype)), name
        assert got[name].dtype == (torch.float16 if name.startswith("lora.") else value.dtype), name


def test_second_backward_and_no_grad():
    inputs, lora = case_of()
    grad_out, leaves = inputs[-1], leaves_of(inputs, lora)
    out = moe(*inputs[:-1], lora=lora, keep_saved=True)
    first = torch.autograd.grad(out, list(leaves.values()), grad_out, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, list(leaves.values()), grad_out)))
    once = moe(*inputs[:-1], lora=lora)
    once.backward(grad_out, retain_graph=True)
    with pytest.raises(RuntimeError, match="keep_saved=True"):
        once.backward(grad_out)
    with torch.no_grad():
        assert torch.equal(moe(*inputs[:-1], lora=lora), out) and torch.equal(once, out)
    (grad,) = torch.autograd.grad(moe(*inputs[:-1], lora=lora).sum(), lora.a1, create_graph=True)
    with pytest.raises(RuntimeError, match="moe: no second derivatives"):
        torch.autograd.grad(grad.sum(), lora.b1)


def test_saved_tensor_hooks_see_the_factors():
    """Nothing of the size of a weight is kept beside the weights themselves."""
    inputs, lora = case_of()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = moe(*inputs[:-1], lora=lora)
    kept = {tensor.data_ptr(): tensor for tensor in saved}
    assert {factor.data_ptr() for factor in lora.factors} < set(kept)
    assert sum(tensor.numel() >= inputs[4].numel() for tensor in kept.values()) == 3  # w1, w2, and a and b of the slots
    out.backward(inputs[-1])


def test_compiled_code_calls_it_between_graphs():
    inputs, lora = case_of()
    leaves = leaves_of(inputs, lora)

    def step(x, ids, weights, w1, w2, *factors):
        return 2 * moe(x + 1, ids, weights, w1, w2, lora=mb.Lora(*factors, 0.5, 2.0))

    given = *inputs[:-1], *lora.factors
    got = gradients(torch.compile(step, backend="aot_eager")(*given), inputs[-1], leaves)
    want = gradients(step(*given), inputs[-1], leaves)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_one_graph_is_refused_with_the_reason():
    inputs, lora = case_of()
    compiled = torch.compile(lambda x: moe(x, *inputs[1:5], lora=lora), backend="aot_eager", fullgraph=True)
    expected = "moe: expected no lora and no QuantizedWeight in a graph" if GRAPH_BREAKS_HAVE_REASONS else ""
    with pytest.raises(RuntimeError, match=expected):
        compiled(inputs[0])


def test_messages():
    inputs, lora = case_of()
    layer = inputs[:-1]
    for given, options, error, message in [
        (tuple(lora), {}, TypeError, "moe: lora: expected moeblaze_cupy.Lora or None"),
        (lora._replace(b1=None), {}, ValueError, "moe: lora.b1: expected a1 and b1, or neither"),
        (lora._replace(a1=lora.a1.detach().numpy()), {}, TypeError, "moe: lora.a1: expected a torch tensor"),
        (lora._replace(a2=lora.a2[:, :, 1:]), {}, ValueError, "moe: lora.a2: expected shape"),
        (lora._replace(b2=lora.b2.half()), {}, TypeError, "moe: lora.b2: expected dtype"),
        (lora, {"save": None}, ValueError, "moe: save: expected a policy that keeps something"),
        (lora, {"accumulate_into_main_grad": True}, ValueError, "moe: accumulate_into_main_grad: expected False with"),
        (
            lora,
            {"accumulate_into_main_grad": {"w1": lora.a1}},
            ValueError,
            "moe: accumulate_into_main_grad: expected False with lora or QuantizedWeight, which has no gradient, "
            "got <class 'dict'>",
        ),
        (
            lora._replace(scale1=10**400),
            {},
            ValueError,
            "moe: lora.scale1: expected a number that is finite in float32, got inf",
        ),
    ]:
        with pytest.raises(error) as caught:
            moe(*layer, lora=given, **options)
        assert str(caught.value).startswith(message), str(caught.value)
    with pytest.raises(RuntimeError, match="moe: x: expected tensors with memory of their own, outside of transforms"):
        torch.func.vmap(lambda x: moe(x, *layer[1:], lora=lora))(layer[0].detach()[None])
    tangent = torch.ones_like(lora.a1)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"moe: x: .* forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(lora.a1.detach(), tangent)
        moe(*layer, lora=lora._replace(a1=dual))


def module(lora_rank=4, **options):
    torch.manual_seed(3)
    options = {"lora_alpha": 8} | options if lora_rank else options
    return MoE(64, 32, 4, 2, lora_rank=lora_rank, **options)


TRAINED = {"router", "lora_a1", "lora_b1", "lora_a2", "lora_b2"}


def test_modules_parameters():
    """a as peft draws it, b zero: the first outputs are those of the layer without factors."""
    own, plain = module(expert_bias=True), module(None, expert_bias=True)
    assert {name for name, parameter in own.named_parameters() if parameter.requires_grad} == TRAINED
    assert set(dict(own.named_parameters())) - set(dict(plain.named_parameters())) == TRAINED - {"router"}
    shapes = {"lora_a1": (4, 4, 64), "lora_b1": (4, 64, 4), "lora_a2": (4, 4, 32), "lora_b2": (4, 64, 4)}
    assert {name: tuple(getattr(own, name).shape) for name in shapes} == shapes
    for a, b in ((own.lora_a1, own.lora_b1), (own.lora_a2, own.lora_b2)):
        bound = a.shape[-1] ** -0.5  # that of torch's kaiming_uniform_(a=sqrt(5)) on a weight (E r, fan in)
        assert bound * 0.9 < a.abs().max() <= bound and not b.any()
    plain.load_state_dict({name: value for name, value in own.state_dict().items() if "lora" not in name})
    x = torch.randn(3, 7, 64)
    assert torch.equal(own(x), plain(x))
    assert "lora_rank=4, lora_alpha=8" in repr(own) and "lora" not in repr(plain)
    before = own.lora_a1.detach().clone()
    torch.nn.init.ones_(own.lora_b2)
    own.reset_parameters()
    assert not torch.equal(own.lora_a1, before) and not own.lora_b2.any()
    half = module(dtype=torch.bfloat16)
    assert half.w1_storage.dtype == torch.bfloat16 and half.lora_a1.dtype == torch.float32


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_module_is_that_of_merged_weights(alpha):
    """In float64, of the same routing."""
    own, merged = module(lora_alpha=alpha, dtype=torch.float64), module(None, dtype=torch.float64)
    torch.nn.init.normal_(own.lora_b1), torch.nn.init.normal_(own.lora_b2)
    for name, factor in list(own.named_parameters()):
        if "lora" in name:
            setattr(own, name, torch.nn.Parameter(factor.double()))
    alpha_by_rank = 1.0 if alpha is None else alpha / 4
    with torch.no_grad():
        merged.router.copy_(own.router)
        merged.w1_storage.copy_(own.w1_storage + alpha_by_rank * (own.lora_b1 @ own.lora_a1))
        merged.w2_storage.copy_(own.w2_storage + alpha_by_rank * (own.lora_b2 @ own.lora_a2))
    x = torch.randn(3, 7, 64, dtype=torch.float64)
    assert_near({"out": own(x), "again": own(x)}, {"out": merged(x), "again": merged(x)})


@pytest.mark.parametrize("expert_format", [None, "nf4"])
def test_training_lowers_the_loss_and_changes_the_trained_parameters_alone(expert_format):
    own = module(expert_bias=True)
    if expert_format is not None:
        own.quantize_experts(expert_format)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    x, target = torch.randn(2, 40, 64)
    optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (own(x) - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    changed = {name for name, value in own.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == TRAINED


@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
@pytest.mark.parametrize("quantised", ["before", "in forward", "in both passes"])
@pytest.mark.parametrize("save", ["minimal", "recompute", "fp8"])
def test_beside_e4m3(save, quantised, gate_up):
    """The bits of the array functions, which tests/lora compares, whenever the weights are quantised."""
    inputs, lora = case_of(BLOCKS, np.float32)
    inputs = [t.detach().bfloat16() if i in (0, 3, 4, 5) else t for i, t in enumerate(inputs)]
    inputs[0].requires_grad_()
    x, ids, weights, w1, w2, grad_out = inputs
    options = {"precision": "fp8", "save": save, "gate_up": gate_up}
    if quantised == "before":
        options["fp8_weights"] = mb.quantize_weights(w1, w2, gate_up=gate_up)
    out = moe(x, ids, weights, w1, w2, lora=lora, keep_fp8_weights=quantised != "in both passes", **options)
    got = gradients(out, grad_out, leaves_of(inputs, lora))
    x, ids, weights, w1, w2, grad_out = (t.detach() for t in inputs)
    factors = lora.with_factors(factor.detach() for factor in lora.factors)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=factors, **options)
    grads = mb.moe_backward(grad_out, saved)
    want = {"out": out, "x": grads.x, "weights": grads.weights}
    want |= {f"lora.{name}": getattr(grads.lora, name) for name in FACTORS}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.any() and torch.equal(got[name], value), name


def test_module_in_e4m3():
    """Factors of zeros change nothing. Then they train beside weights that were quantised once."""
    own = module(precision="fp8", dtype=torch.bfloat16)
    plain = MoE(64, 32, 4, 2, precision="fp8", dtype=torch.bfloat16)
    plain.load_state_dict({name: own.state_dict()[name] for name in plain.state_dict()})
    x = torch.randn(50, 64).bfloat16()
    assert torch.equal(own(x), plain(x))
    own.quantize_weights()
    before = own(x)
    before.float().square().sum().backward()
    assert own.lora_b1.grad.any() and own.lora_b2.grad.any() and not own.lora_a1.grad.any()
    assert own.w1_storage.grad is None
    with torch.no_grad():
        for factor in (own.lora_b1, own.lora_b2):
            factor -= 0.01 * factor.grad
    assert own(x).float().square().sum() < before.float().square().sum()


@pytest.mark.parametrize("expert_format", [None, "int8"])
def test_state(expert_format):
    own, other = module(dtype=torch.bfloat16), module(expert_format=expert_format, dtype=torch.bfloat16)
    if expert_format is not None:
        own.quantize_experts(expert_format)
    for parameter in own.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    stored = io.BytesIO()
    torch.save(own.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored))
    found = dict(other.named_parameters())
    assert found.keys() == dict(own.named_parameters()).keys()
    for name, value in own.named_parameters():
        loaded = found[name]
        assert torch.equal(value, loaded) and value.dtype == loaded.dtype, name
        assert value.requires_grad == loaded.requires_grad == (name in TRAINED), name
    x = torch.randn(7, 64).bfloat16()
    assert own(x).isfinite().all() and torch.equal(own(x), other(x))


def test_module_under_autocast_and_compiled():
    own = module()
    torch.nn.init.normal_(own.lora_b1)
    x = torch.randn(7, 64)
    want = own(x)
    assert torch.equal(torch.compile(own, backend="aot_eager")(x), want)
    with torch.autocast("cpu", torch.bfloat16):
        out = own(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {name for name, p in own.named_parameters() if p.grad is not None and p.grad.any()} <= TRAINED
    assert own.lora_b1.grad.dtype == torch.float32 and own.lora_b1.grad.any()


def test_modules_messages():
    for options, error, message in [
        ({"lora_rank": 0}, ValueError, "MoE: lora_rank: expected 1 to 256, got 0"),
        ({"lora_rank": 257}, ValueError, "MoE: lora_rank: expected 1 to 256, got 257"),
        ({"lora_alpha": 8}, ValueError, "MoE: lora_alpha: expected None without lora_rank, got 8"),
        ({"lora_rank": 4, "lora_alpha": "8"}, TypeError, "MoE: lora_alpha: expected a number, got '8'"),
        (
            {"lora_rank": 4, "accumulate_into_main_grad": True},
            ValueError,
            "MoE: accumulate_into_main_grad: expected False with lora_rank, got True",
        ),
    ]:
        with pytest.raises(error) as caught:
            MoE(64, 32, 4, 2, **options)
        assert str(caught.value) == message


@pytest.mark.gpu
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(8, 16), (40, 17)])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_on_a_gpu(save, ranks, factor_dtype):
    """bfloat16 has 8 bits; as in tests/lora, three roundings in a row of independent terms stay within 1.5 * 2^-8."""
    inputs, lora = case_of(Case(L=300, k=2, E=5, d=128, h=96, order="transposed"), np.float32, ranks)
    leaf = [t.requires_grad for t in inputs]
    of_dtype = (0, 3, 4, 5)  # x, w1, w2, grad_out
    values = [t.detach().bfloat16() if i in of_dtype else t.detach() for i, t in enumerate(inputs)]
    on_gpu = [t.cuda().requires_grad_(needs) for t, needs in zip(values, leaf, strict=True)]
    factors = (factor.detach().bfloat16().cuda() for factor in lora.factors)
    of_gpu = lora.with_factors(factor.to(factor_dtype).requires_grad_() for factor in factors)
    leaves = leaves_of(on_gpu, of_gpu)
    got = gradients(moe(*on_gpu[:-1], lora=of_gpu, save=save), on_gpu[-1], leaves)
    want_inputs, want_lora = list(map(widened, on_gpu)), mb.Lora(*map(widened, of_gpu))
    want = gradients(explicit(want_inputs, want_lora), want_inputs[-1], leaves_of(want_inputs, want_lora))
    for name, value in leaves.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
    assert_near(got, want, 1.5 * 2**-8)
