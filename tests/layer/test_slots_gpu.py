"""Pairs of tokens, router weights on the input, outputs per slot and identity experts on a GPU, and in a CUDA graph."""

from dataclasses import replace

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from tests.cases import Case, make_inputs, relative_error
from tests.slot_cases import assert_right, inputs_of, ragged, same_bits, without_weights

pytestmark = pytest.mark.gpu

# Column panels and several row tiles per expert; in bfloat16 Hopper's kernels, in float32 the portable ones.
CASES = {
    "sm90": Case(L=700, k=3, E=6, d=520, h=136, routing="absent"),
    "sm80": Case(L=300, k=3, E=6, d=259, h=45, routing="absent"),
}
OPTIONS = [
    {},
    {"weights_on": "input"},
    {"identity_experts": 3},
    {"identity_experts": 3, "weights_on": "input"},
    {"unreduced": True},
]


def on_host(value):
    return tuple(map(on_host, value)) if isinstance(value, tuple) else value.get()


def run(cupy, inputs, offsets=None, save="minimal", **options):
    x, ids, weights, w1, w2, grad_out = (None if a is None else cupy.asarray(a) for a in inputs)
    token_offsets = None if offsets is None else cupy.asarray(offsets)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save, token_offsets=token_offsets, **options)
    found = {"out": out} | vars(mb.moe_backward(grad_out, saved))
    return {name: on_host(value) for name, value in found.items() if value is not None}


@pytest.mark.parametrize("save", ["minimal", "paper"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tier", CASES)
def test_options(tier, options, save):
    cupy = pytest.importorskip("cupy")
    inputs = inputs_of(tier, **vars(CASES[tier]))
    uneven, offsets = ragged(inputs)
    if options.get("unreduced"):
        inputs, uneven = without_weights(inputs), without_weights(uneven)
    for given, token_offsets in ((inputs, None), (uneven, offsets)):
        found = run(cupy, given, token_offsets, save, **options)
        assert_right(found, given, token_offsets, **options)
        assert same_bits(found, run(cupy, given, token_offsets, save, **options))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("tier", CASES)
def test_fixed_k_given_as_pairs_gives_the_same_bits(tier, k):
    cupy = pytest.importorskip("cupy")
    inputs = inputs_of(tier, **vars(replace(CASES[tier], k=k)))
    pairs, offsets = ragged(inputs, np.arange(len(inputs[0]) + 1) * k)
    assert same_bits(run(cupy, inputs), run(cupy, pairs, offsets))


@pytest.mark.parametrize("L", [1, 5000, 300_000])
def test_dispatch_of_pairs(L):
    """Also of offsets that mean nothing: no fault, and the reference's lists."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(L)
    P, E = 4 * L, 64
    ids = rng.integers(-2, E + 2, P).astype(np.int32)
    rising = np.sort(rng.integers(0, P + 1, L + 1))
    for offsets in (rising, rng.permutation(rising), rng.integers(-(2**31), 2**31, L + 1)):
        offsets = offsets.astype(np.int32)
        got, want = mb.build_dispatch(cupy.asarray(ids), E, cupy.asarray(offsets)), reference.dispatch(ids, E, offsets)
        for name in ("expert_token_indices", "expert_token_offsets", "token_index_map", "token_offsets"):
            assert np.array_equal(getattr(got, name).get(), getattr(want, name)), name


def test_one_graph_serves_other_pairs():
    """Forward and backward of pairs and identity experts, captured once and replayed with other ids and offsets."""
    torch = pytest.importorskip("torch")
    moe = pytest.importorskip("moeblaze_cupy.interop.torch").moe
    case = replace(CASES["sm90"], L=200)
    x, _, _, w1, w2, grad_out = make_inputs(case, 0, np.float32)
    half = {
        name: torch.tensor(a, device="cuda", dtype=torch.bfloat16) for name, a in (("x", x), ("w1", w1), ("w2", w2))
    }
    leaves = {name: tensor.requires_grad_() for name, tensor in half.items()}
    grad = torch.tensor(grad_out, device="cuda", dtype=torch.bfloat16)
    P, options = 600, {"identity_experts": 2, "weights_on": "input"}

    def made(seed):
        rng = np.random.default_rng(seed)
        offsets = np.sort(rng.integers(0, P, case.L + 1)).astype(np.int32)
        ids, weights = rng.integers(-1, case.E + 3, P).astype(np.int32), rng.random(P).astype(np.float32)
        return [torch.tensor(a, device="cuda") for a in (ids, weights, offsets)]

    def step(ids, weights, offsets):
        tensors = leaves["x"], ids, weights, leaves["w1"], leaves["w2"]
        out = moe(*tensors, token_offsets=offsets, **options)
        return (out, *torch.autograd.grad(out, tuple(leaves.values()), grad))

    static = made(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for seed in (1, 2):
        fresh = made(seed)
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        want = step(*fresh)
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
        exact = [t.detach().double().cpu().numpy() for t in (leaves["x"], fresh[1], leaves["w1"], leaves["w2"])]
        ids, offsets = fresh[0].cpu().numpy(), fresh[2].cpu().numpy()
        out, _ = reference.moe_forward(exact[0], ids, *exact[1:], token_offsets=offsets, **options)
        assert relative_error(want[0].detach().double().cpu().numpy(), out) <= 1e-2
