"""Selections of pairs, and counts, on a GPU: the reference's in every element, and captured in a graph."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference

pytestmark = pytest.mark.gpu

L, E, K = 8000, 160, 6
OFFSETS = np.array([0, 17, 17, 5000, L], np.int32)
BOUNDS = np.array([-4.0625, 3.9375], np.float32)


def inputs(seed, kind="normal"):
    """By name: scores (L, E), 16-bit scores, ids and weights (L, k), priority (L,), a mask, a bias, a histogram."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((L, E)).astype(np.float32)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "denormal":  # of either sign, and zeros: what arithmetic on them would flush
        scores = (rng.integers(-500, 500, (L, E)) * 1e-43).astype(np.float32)
    ids = np.argpartition(-scores - np.linspace(0, 1, E, dtype=np.float32), K, axis=1)[:, :K].astype(np.int32)
    ids[rng.random((L, K)) < 0.05] = -1
    return {
        "scores": scores,
        "halves": scores.astype(np.float16),
        "eighths": np.round(8 * scores) / np.float32(8),
        "ids": ids,
        "weights": np.take_along_axis(scores, np.maximum(ids, 0), axis=1),
        "priority": scores.max(axis=1),
        "mask": scores > 1,
        "bias": (rng.integers(-8, 8, E) / 8).astype(np.float32),
        "histogram": rng.integers(0, 9, (E, 64)).astype(np.int32),
        "offsets": OFFSETS,
        "bounds": BOUNDS,
    }


def quantiles(module, a):
    module.quantile_histogram(a["eighths"], a["ids"], a["bias"], a["histogram"], a["bounds"], score="identity")
    return a["histogram"]


CALLS = {
    "expert_choice": lambda m, a: m.expert_choice(a["scores"], 900),
    "expert_choice of float16": lambda m, a: m.expert_choice(a["halves"], 900),
    "expert_choice in sequences": lambda m, a: m.expert_choice(a["scores"], 20, sequences=250),
    "expert_choice by offsets": lambda m, a: m.expert_choice(a["scores"], 300, sequences=a["offsets"]),
    **{
        f"round_tokens {rounding}": lambda m, a, r=rounding: m.round_tokens(a["scores"], a["ids"], rounding=r)
        for rounding in ("up", "down", "nearest", "balance")
    },
    "position": lambda m, a: m.limit_capacity(a["ids"], E, 500),
    "position by offsets": lambda m, a: m.limit_capacity(a["ids"], E, 100, sequences=a["offsets"]),
    "choice": lambda m, a: m.limit_capacity(a["ids"], E, 500, order="choice"),
    "weights": lambda m, a: m.limit_capacity(a["ids"], E, 500, order="weights", weights=a["weights"]),
    "priority": lambda m, a: m.limit_capacity(a["ids"], E, 9, order="priority", priority=a["priority"], sequences=50),
    "tokens_per_expert": lambda m, a: m.tokens_per_expert(a["ids"], E, sequences=8),
    "first choices": lambda m, a: m.tokens_per_expert(a["ids"][:, :1], E),
    "list_pairs": lambda m, a: m.list_pairs(a["mask"], 400_000),
    "quantile_histogram": quantiles,
}


def assert_equal(got, want):
    got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.get() if hasattr(one, "get") else one.cpu().numpy(), other)


@pytest.mark.parametrize("kind", ["normal", "ties", "denormal"])
@pytest.mark.parametrize("name", CALLS)
def test_matches_the_reference_bit_for_bit(name, kind):
    cupy = pytest.importorskip("cupy")
    host = inputs(0, kind)
    on_device = {key: cupy.asarray(value) for key, value in host.items()}
    assert_equal(CALLS[name](mb, on_device), CALLS[name](reference, host))


@pytest.mark.parametrize("name", CALLS)
def test_replays_on_other_contents_and_repeats_bit_for_bit(name):
    torch = pytest.importorskip("torch")
    first, second = inputs(1, "ties"), inputs(2)
    on_device = {key: torch.from_numpy(value).cuda() for key, value in first.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        CALLS[name](mb, on_device)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = CALLS[name](mb, on_device)
    want = CALLS[name](reference, {key: value.copy() for key, value in second.items()})
    for _ in range(3):
        for key, value in second.items():
            on_device[key].copy_(torch.from_numpy(value))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(got, want)


def test_a_million_tokens_and_all_of_them_alike():
    cupy = pytest.importorskip("cupy")
    scores = cupy.zeros((2**20, 24), cupy.float32)
    token_offsets, ids = mb.expert_choice(scores, 300_001)
    assert (token_offsets[:300_002] == 24 * cupy.arange(300_002)).all() and (
        token_offsets[300_001:] == 24 * 300_001
    ).all()
    assert (ids.reshape(-1, 24) == cupy.arange(24)).all()
    kept = mb.limit_capacity(cupy.zeros((2**20, 8), cupy.int32), 3, 1_000_001)
    assert (kept.ravel()[:1_000_001] == 0).all() and (kept.ravel()[1_000_001:] == -1).all()


@pytest.mark.parametrize("offsets", [[0, 400, -7, 200, L], [2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 5]], ids=str)
def test_offsets_with_garbage_give_no_fault(offsets):
    cupy = pytest.importorskip("cupy")
    host = inputs(3)
    a = {key: cupy.asarray(value) for key, value in host.items()} | {"offsets": cupy.asarray(offsets, cupy.int32)}
    token_offsets, ids = CALLS["expert_choice by offsets"](mb, a)
    CALLS["position by offsets"](mb, a)
    mb.tokens_per_expert(a["ids"], E, sequences=a["offsets"])
    assert (cupy.diff(token_offsets) >= 0).all() and 0 <= int(token_offsets[-1]) <= ids.size
