"""Pairs of tokens, router weights on the input, outputs per slot and identity experts on the CPU, against loops over
slots in float64, finite differences, and the formulas of models that use them."""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moeblaze_cupy as mb
from moeblaze_cupy.types import ACTIVATIONS, activation_of
from tests.cases import Case, make_inputs, relative_error

pytest.importorskip("torch")
import torch

from tests.oracle import FORMULAS

CASE = Case(L=9, k=3, E=5, d=6, h=7, routing="absent")
NAMES = ("x", "weights", "w1", "w2", "b1", "b2")


def expert(x, w1, w2, activation, b1=None, b2=None, gate_up="halves"):
    """(d,) -> (d,)"""
    activation = activation_of(activation)
    first = x @ w1 if b1 is None else x @ w1 + b1
    halves = [first]
    if activation.form.gated:
        halves = [first[0::2], first[1::2]] if gate_up == "interleaved" else first.chunk(2)
    out = FORMULAS[activation.name](*halves, **activation.constants) @ w2
    return out if b2 is None else out + b2


def oracle(
    x,
    ids,
    weights,
    w1,
    w2,
    *,
    token_offsets=None,
    activation="swiglu",
    weights_on="output",
    unreduced=False,
    identity_experts=0,
    b1=None,
    b2=None,
    gate_up="halves",
):
    """The layer, slot after slot, on torch tensors. token_offsets must be valid."""
    L, (E, _, d) = x.shape[0], w2.shape
    k = ids.shape[1] if ids.ndim == 2 else None
    slots = ids.reshape(-1)
    flat = None if weights is None else weights.reshape(-1)
    outs = [torch.zeros(d, dtype=x.dtype) for _ in range(L)]
    per_slot = [torch.zeros(d, dtype=x.dtype) for _ in slots]
    for t in range(L):
        of_token = range(t * k, t * k + k) if k else range(int(token_offsets[t]), int(token_offsets[t + 1]))
        for slot in of_token:
            e = int(slots[slot])
            given_x = x[t] if weights_on == "output" else flat[slot] * x[t]
            if 0 <= e < E:
                biases = (None if b is None else b[e] for b in (b1, b2))
                per_slot[slot] = expert(given_x, w1[e], w2[e], activation, *biases, gate_up)
            elif E <= e < E + identity_experts:
                per_slot[slot] = given_x
            else:
                continue
            outs[t] = outs[t] + (per_slot[slot] if unreduced or weights_on == "input" else flat[slot] * per_slot[slot])
    if unreduced:
        return torch.stack(per_slot).reshape(*ids.shape, d) if len(slots) else torch.zeros(*ids.shape, d)
    return torch.stack(outs) if L else torch.zeros(0, d, dtype=x.dtype)


@dataclass
class Problem:
    """One call: arrays in float64, and options."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None
    w1: np.ndarray
    w2: np.ndarray
    options: dict = field(default_factory=dict)
    b1: np.ndarray | None = None
    b2: np.ndarray | None = None

    def tensors(self):
        present = {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}
        return {name: torch.tensor(array, requires_grad=True) for name, array in present.items()}

    def run(self, save="minimal", **backward):
        arrays = self.x, self.ids, self.weights, self.w1, self.w2
        out, saved = mb.moe_forward(*arrays, save=save, b1=self.b1, b2=self.b2, **self.options)
        grad_out = np.random.default_rng(5).standard_normal(out.shape)
        gradients = vars(mb.moe_backward(grad_out, saved, **backward))
        return {"out": out} | {name: g for name, g in gradients.items() if name == "weights" or g is not None}

    def expected(self):
        tensors = self.tensors()
        given_tensors = tensors["x"], self.ids, tensors.get("weights"), tensors["w1"], tensors["w2"]
        out = oracle(*given_tensors, b1=tensors.get("b1"), b2=tensors.get("b2"), **self.options)
        grad_out = np.random.default_rng(5).standard_normal(tuple(out.shape))
        if out.requires_grad:
            out.backward(torch.tensor(grad_out))
        found = {name: None if t.grad is None else t.grad.numpy() for name, t in tensors.items()}
        return {"out": out.detach().numpy()} | found

    def check(self, **options):
        got, want = self.run(**options), self.expected()
        for name, exact in want.items():
            exact = np.zeros_like(got[name]) if exact is None else exact
            assert relative_error(got[name], exact) <= 1e-13, name
        assert self.weights is not None or got["weights"] is None


def problem(case=CASE, seed=0, **options):
    x, ids, weights, w1, w2, _ = make_inputs(case, seed)
    return Problem(x, ids, weights, w1, w2, options)


def ragged(seed=0, L=11, E=4, d=5, h=6, activation="swiglu", **options):
    """Tokens with 0 to 3 pairs, one with 2 E; pairs before the first token and after the last."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, L)
    counts[L // 2] = 2 * E
    offsets = (2 + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)
    P = int(offsets[-1]) + 3
    x, _, _, w1, w2, _ = make_inputs(Case(L=L, k=1, E=E, d=d, h=h, activation=activation), seed)
    ids = rng.integers(-1, E + 3, P).astype(np.int32)
    weights = None if options.get("unreduced") and options.get("weights_on") != "input" else rng.standard_normal(P)
    options |= {"activation": activation, "token_offsets": offsets}
    return Problem(x, ids, weights, w1, w2, options)


COMBINATIONS = [
    {"weights_on": "input"},
    {"identity_experts": 2},
    {"identity_experts": 2, "weights_on": "input"},
    {"unreduced": True},
    {"unreduced": True, "weights_on": "input"},
]


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_fixed_k(k, options, save):
    one = problem(replace(CASE, k=k), **options)
    if options.get("unreduced") and options.get("weights_on") != "input":
        one.weights = None
    if options.get("identity_experts"):
        one.ids[1, 0], one.ids[3, 0], one.ids[5, -1] = CASE.E, CASE.E + 1, CASE.E + 2  # the last is no expert
    one.check(save=save)


@pytest.mark.parametrize("options", [{}, *COMBINATIONS], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_ragged(seed, options):
    ragged(seed, **options).check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_on_the_input_of_every_activation(activation):
    """Scaling the output instead is another function: the activations are not linear."""
    one = problem(replace(CASE, activation=activation), weights_on="input", activation=activation)
    one.check()
    on_output = problem(replace(CASE, activation=activation), activation=activation)
    if activation not in ("relu",):  # which is positively homogeneous
        assert relative_error(on_output.run()["out"], one.expected()["out"]) > 0.1


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("k", [1, 4])
def test_fixed_k_given_as_pairs_gives_the_same_bits(k, save, dtype):
    one = problem(replace(CASE, k=k))
    pairs = Problem(one.x, one.ids.reshape(-1).astype(dtype), one.weights.reshape(-1), one.w1, one.w2)
    pairs.options = {"token_offsets": (np.arange(CASE.L + 1) * k).astype(np.int32)}
    got, want = pairs.run(save), one.run(save)
    assert got["weights"].shape == (CASE.L * k,)
    for name in want:
        assert np.array_equal(got[name].ravel(), want[name].ravel()), name


@pytest.mark.parametrize(
    "options", [{}, {"weights_on": "input"}, {"identity_experts": 2}, {"unreduced": True}], ids=str
)
def test_finite_differences(options):
    one = ragged(3, **options)
    names = [name for name in NAMES if getattr(one, name) is not None]
    got, rng, step = one.run(), np.random.default_rng(7), 1e-6
    shape = got["out"].shape
    grad_out = np.random.default_rng(5).standard_normal(shape)
    for name in names:
        direction = rng.standard_normal(getattr(one, name).shape)
        values = []
        for sign in (1, -1):
            moved = replace(one, **{name: getattr(one, name) + sign * step * direction})
            values.append((moved.run()["out"] * grad_out).sum())
        numeric = (values[0] - values[1]) / (2 * step)
        assert abs(numeric - (got[name] * direction).sum()) <= 1e-6 * max(1, abs(numeric)), name


def clean_offsets(offsets, num_pairs):
    """As the layer reads them."""
    return np.asarray(mb.build_dispatch(np.zeros(num_pairs, np.int32), 1, offsets).token_offsets)


@settings(max_examples=200)
@given(
    offsets=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-4, 24), min_size=1, max_size=20),
    num_pairs=st.integers(0, 20),
)
def test_any_offsets_give_each_pair_to_one_token_that_encloses_it(offsets, num_pairs):
    given_offsets = np.array(offsets, np.int32)
    clean = clean_offsets(given_offsets, num_pairs)
    assert (np.diff(clean) >= 0).all() and clean[0] >= 0 and clean[-1] <= num_pairs
    for token, (start, end) in enumerate(itertools.pairwise(clean)):
        for pair in range(start, end):
            assert given_offsets[token] <= pair < given_offsets[token + 1]
    if (np.diff(given_offsets.astype(np.int64)) >= 0).all():
        np.testing.assert_array_equal(clean, np.clip(given_offsets, 0, num_pairs))


def test_garbage_offsets_compute_what_their_clean_form_does():
    one = ragged()
    garbage = np.random.default_rng(0).integers(-9, 60, one.options["token_offsets"].size).astype(np.int32)
    clean = clean_offsets(garbage, one.ids.size)
    got = replace(one, options=one.options | {"token_offsets": garbage}).run()
    want = replace(one, options=one.options | {"token_offsets": clean})
    for name, exact in want.run().items():
        assert np.array_equal(got[name], exact), name
    want.check()


def test_lists_of_pairs():
    ids = np.array([2, 0, 9, 1, 0, 1, 2], np.int64)
    index = mb.build_dispatch(ids, 3, np.array([1, 3, 3, 6], np.int32))
    assert (index.num_tokens, index.k, index.num_slots, index.is_ragged) == (3, None, 7, True)
    assert index.expert_token_indices.tolist() == [0, 2, 2, 2, -1, -1, -1]
    assert index.expert_token_offsets.tolist() == [0, 2, 4, 4]
    assert index.token_index_map.tolist() == [-1, 0, -1, 2, 1, 3, -1]
    assert index.token_offsets.tolist() == [1, 3, 3, 6]
    assert index.token_expert_indices.tolist() == [-1, 0, -1, 1, 0, 1, -1]
    fixed = mb.build_dispatch(ids[:6].reshape(3, 2), 3)
    assert (fixed.is_ragged, fixed.token_offsets, fixed.k, fixed.num_slots) == (False, None, 2, 6)


@pytest.mark.parametrize("options", [{}, {"unreduced": True}], ids=str)
@pytest.mark.parametrize(("L", "P"), [(0, 0), (0, 5), (4, 0)])
def test_no_tokens_or_no_pairs(L, P, options):
    x, _, _, w1, w2, _ = make_inputs(replace(CASE, L=L, k=1), 0)
    offsets = np.arange(L + 1, dtype=np.int32)
    weights = None if options else np.ones(P)
    got = Problem(x, np.zeros(P, np.int32), weights, w1, w2, options | {"token_offsets": offsets}).run()
    assert got["out"].shape == ((P, CASE.d) if options else (L, CASE.d))
    for name, value in got.items():
        assert value is None if (name == "weights" and options) else not value.any()


def test_token_index_map_tells_identity_experts():
    one = problem(identity_experts=2)
    one.ids[:] = [[0, CASE.E, CASE.E + 2]] * CASE.L
    _, saved = mb.moe_forward(one.x, one.ids, one.weights, one.w1, one.w2, identity_experts=2)
    assert saved.index.token_index_map[:, 1:].tolist() == [[-2, -1]] * CASE.L
    assert (saved.index.token_index_map[:, 0] >= 0).all()


def test_llama4():
    """Llama4TextMoe: sigmoid of the chosen logits on the input, experts of all tokens, summed."""
    rng = np.random.default_rng(0)
    L, E, d, h, k = 13, 4, 8, 10, 2
    x, logits = rng.standard_normal((L, d)), rng.standard_normal((L, E))
    gate_up, down = rng.standard_normal((E, d, 2 * h)) / d**0.5, rng.standard_normal((E, h, d)) / h**0.5
    ids = np.argsort(-logits, axis=1)[:, :k].astype(np.int32)
    scores = np.zeros((L, E))
    np.put_along_axis(scores, ids, 1 / (1 + np.exp(-np.take_along_axis(logits, ids, axis=1))), axis=1)
    hidden = torch.tensor(x).expand(E, L, d) * torch.tensor(scores.T)[..., None]  # (E, L, d)
    gate, up = torch.bmm(hidden, torch.tensor(gate_up)).chunk(2, dim=-1)
    want = torch.bmm(up * torch.nn.functional.silu(gate), torch.tensor(down)).sum(dim=0)
    weights = np.take_along_axis(scores, ids, axis=1)
    got, _ = mb.moe_forward(x, ids, weights, gate_up, down, weights_on="input")
    assert relative_error(got, want) <= 1e-14
    on_output, _ = mb.moe_forward(x, ids, weights, gate_up, down)
    assert relative_error(on_output, want) > 0.1


def test_longcat():
    """LongcatFlashExperts: ids from E on add x times the weight."""
    rng = np.random.default_rng(0)
    L, E, Z, d, h, k = 13, 4, 3, 8, 10, 3
    x, weights = rng.standard_normal((L, d)), rng.random((L, k))
    ids = np.argsort(rng.random((L, E + Z)), axis=1)[:, :k].copy()
    w1, w2 = rng.standard_normal((E, d, 2 * h)) / d**0.5, rng.standard_normal((E, h, d)) / h**0.5
    want = (weights * (ids >= E)).sum(axis=1, keepdims=True) * x
    for t, j in itertools.product(range(L), range(k)):
        if ids[t, j] < E:
            y = expert(*map(torch.tensor, (x[t], w1[ids[t, j]], w2[ids[t, j]])), "swiglu")
            want[t] += weights[t, j] * y.numpy()
    got, _ = mb.moe_forward(x, ids, weights, w1, w2, identity_experts=Z)
    assert relative_error(got, want) <= 1e-14
    without, _ = mb.moe_forward(x, ids, weights, w1, w2)
    assert relative_error(without, want) > 0.1


def test_against_transformers():
    """The two formulas above are those of the models."""
    transformers = pytest.importorskip("transformers", reason="an optional comparison with the models' own modules")
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = transformers.Llama4TextConfig(
        hidden_size=8, intermediate_size=10, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    module = Llama4TextMoe(config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 13, 8, dtype=torch.float64)
    want = module(x)[0] - module.shared_expert(x.reshape(-1, 8)).reshape(1, 13, 8)
    scores, logits = module.router(x.reshape(-1, 8))
    ids = logits.topk(2).indices
    weights = scores.gather(1, ids).detach()  # a sigmoid that the model takes in float32
    arrays = [a.detach().numpy() for a in (module.experts.gate_up_proj, module.experts.down_proj)]
    got, _ = mb.moe_forward(x[0].numpy(), ids.to(torch.int32).numpy(), weights.numpy(), *arrays, weights_on="input")
    assert relative_error(got, want.detach().reshape(13, 8)) <= 1e-12


def arguments(**changes):
    one = problem()
    given_arguments = {"x": one.x, "ids": one.ids, "weights": one.weights, "w1": one.w1, "w2": one.w2}
    pairs = {"ids": one.ids.reshape(-1), "weights": one.weights.reshape(-1)}
    pairs["token_offsets"] = (np.arange(CASE.L + 1) * CASE.k).astype(np.int32)
    if changes.pop("pairs", False):
        given_arguments |= pairs
    return given_arguments | changes


OFFSETS = arguments(pairs=True)["token_offsets"]
WRONG = [
    ({"weights_on": "x"}, ValueError, "weights_on: expected one of 'output', 'input', got 'x'"),
    ({"unreduced": 1}, TypeError, "unreduced: expected True or False, got 1"),
    ({"identity_experts": -1}, ValueError, "identity_experts: expected at least 0, got -1"),
    ({"identity_experts": 2.5}, TypeError, "identity_experts: expected an int, got 2.5"),
    ({"identity_experts": 2**31}, ValueError, f"identity_experts: expected at most {2**31 - 6}, as ids are int32, got"),
    ({"identity_experts": 1, "unreduced": True, "weights": None}, ValueError, "identity_experts: expected 0 with unre"),
    ({"unreduced": True}, ValueError, "weights: expected None with unreduced=True, whose output is not weighted"),
    ({"weights": None}, TypeError, "weights: expected an array, as only unreduced=True goes without one, got None"),
    ({"weights": None, "unreduced": True, "weights_on": "input"}, TypeError, "weights: expected an array, as only"),
    (
        {"pairs": True, "ids": problem().ids},
        ValueError,
        "ids: expected shape (P) = (any), got (9, 3); with token_offsets",
    ),
    ({"pairs": True, "weights": problem().weights}, ValueError, "weights: expected shape (P) = (27), got (9, 3)"),
    (
        {"pairs": True, "token_offsets": OFFSETS[:-1]},
        ValueError,
        "token_offsets: expected shape (L + 1) = (10), got (9,)",
    ),
    (
        {"pairs": True, "token_offsets": OFFSETS[:, None]},
        ValueError,
        "token_offsets: expected shape (L + 1) = (10), got",
    ),
    (
        {"pairs": True, "token_offsets": OFFSETS.astype(np.int64)},
        TypeError,
        "token_offsets: expected dtype int32, got int64",
    ),
    (
        {"pairs": True, "token_offsets": np.repeat(OFFSETS, 2)[::2]},
        ValueError,
        "token_offsets: expected a C-contiguous",
    ),
    (
        {"pairs": True, "token_offsets": list(OFFSETS)},
        TypeError,
        "token_offsets: expected a NumPy, CuPy or torch array",
    ),
    ({"ids": problem().ids.reshape(-1)}, ValueError, "ids: expected shape (L, k) = (9, any), got (27,)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_bad_input(changes, error, message):
    with pytest.raises(error) as caught:
        mb.moe_forward(**arguments(**changes))
    assert str(caught.value).startswith(f"moe_forward: {message}")


def test_bad_input_of_dispatch_and_backward():
    one = ragged(unreduced=True)
    with pytest.raises(ValueError, match=r"^build_dispatch: token_offsets: expected shape \(L \+ 1,\), got \(0,\)$"):
        mb.build_dispatch(one.ids, 4, np.zeros(0, np.int32))
    out, saved = mb.moe_forward(one.x, one.ids, None, one.w1, one.w2, **one.options)
    with pytest.raises(
        ValueError, match=r"^moe_backward: grad_out: expected shape \(P, d\) = \(\d+, 5\), got \(11, 5\)$"
    ):
        mb.moe_backward(np.ones_like(one.x), saved)
    assert mb.moe_backward(np.ones_like(out), saved, needs=("weights",)).weights is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_int32_ids_of_pairs_are_not_copied(dtype):
    one = ragged()
    ids = one.ids.astype(dtype)
    _, saved = mb.moe_forward(one.x, ids, one.weights, one.w1, one.w2, **one.options)
    assert np.shares_memory(saved.index.ids, ids) == (dtype is np.int32) == (not saved.index.ids_copied)


def interop():
    return pytest.importorskip("moeblaze_cupy.interop.torch")


@pytest.mark.parametrize("options", [{}, *COMBINATIONS], ids=str)
def test_torch(options):
    """Gradients by autograd are those of the array functions."""
    one = ragged(1, **options)
    tensors = one.tensors()
    passed = one.options | {"token_offsets": torch.tensor(one.options["token_offsets"])}
    arguments_of_moe = tensors["x"], torch.tensor(one.ids), tensors.get("weights"), tensors["w1"], tensors["w2"]
    out = interop().moe(*arguments_of_moe, **passed)
    want = one.run()
    out.backward(torch.tensor(np.random.default_rng(5).standard_normal(out.shape)))
    assert np.array_equal(out.detach(), want["out"])
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.grad, want[name]), name
    with torch.no_grad():
        assert torch.equal(interop().moe(*arguments_of_moe, **passed), out)


def test_torch_module():
    """Identity experts have outputs of the router alone, and gradients reach it."""
    torch.manual_seed(0)
    module = interop().MoE(6, 7, 4, 2, weights_on="input", identity_experts=3, dtype=torch.float64)
    assert module.router.shape == (7, 6) and module.w1_storage.shape == (4, 14, 6)
    x = torch.randn(11, 6, dtype=torch.float64)
    out = module(x)
    weights, ids = interop().route(x @ module.router.T, 2)
    w1, w2 = module.w1_storage.transpose(1, 2), module.w2_storage.transpose(1, 2)
    want = oracle(x, ids.numpy(), weights, w1, w2, weights_on="input", identity_experts=3)
    assert (ids >= 4).any() and relative_error(out.detach(), want.detach()) <= 1e-14
    found = torch.autograd.grad(out.square().sum(), tuple(module.parameters()))
    for got, exact in zip(found, torch.autograd.grad(want.square().sum(), tuple(module.parameters())), strict=True):
        assert relative_error(got, exact) <= 1e-12
    assert "weights_on='input', identity_experts=3" in repr(module)
    with pytest.raises(ValueError, match=r"^MoE: identity_experts: expected 0 to 4092, got 4093$"):
        interop().MoE(6, 7, 4, 2, identity_experts=4093)
    with pytest.raises(TypeError, match=r"^moe: token_offsets: expected a torch tensor, got <class 'list'>; torch"):
        interop().moe(x, ids, weights, w1, w2, token_offsets=[0, 1])
