"""Shapes, routings and random inputs that the tests of every backend share."""

from dataclasses import dataclass, replace

import numpy as np

from moeblaze_cupy.types import ACTIVATIONS, is_gated

# What CASES have. The other activations have tests of their own, against tests/oracle.py.
BASIC_GATED = ("swiglu", "geglu", "reglu")
BASIC = (*BASIC_GATED, "silu", "gelu", "relu")
ORDERS = ("row", "transposed", "pair", "pair_transposed")
ROUTINGS = ("random", "skewed", "one_expert", "absent", "duplicate", "empty_experts")


@dataclass(frozen=True)
class Case:
    """One problem. L tokens, k slots per token, E experts, d model width, h expert hidden width.

    order: memory order of the expert weights. "row" as indexed, (E, d, 2h) and (E, h, d); "transposed" the two inner
    dimensions the other way round in memory; "pair" w1 as two arrays (gate, up), only for gated activations.
    routing: "random" k distinct experts, uniform; "skewed" k distinct, low ids far likelier; "one_expert" all tokens
    the same k experts in the same slots, so k = 1 sends all to one; "absent" random with ids < 0 or >= E in about
    half of the slots and all slots of token 0; "duplicate" with replacement, and every even token names one expert
    in its first and last slot; "empty_experts" only experts of odd id, others only if fewer than k are odd.
    """

    L: int
    k: int
    E: int
    d: int
    h: int
    activation: str = "swiglu"
    order: str = "row"
    routing: str = "random"

    def __post_init__(self):
        if self.activation not in ACTIVATIONS or self.order not in ORDERS or self.routing not in ROUTINGS:
            raise ValueError(f"Case: unknown activation, order or routing in {self}")
        if self.order.startswith("pair") and not is_gated(self.activation):
            raise ValueError(f"Case: order {self.order!r} needs a gated activation, got {self.activation!r}")
        if not 1 <= self.k <= self.E:
            raise ValueError(f"Case: expected 1 <= k <= E, got k = {self.k}, E = {self.E}")

    def __str__(self):
        sizes = f"L{self.L}-k{self.k}-E{self.E}-d{self.d}-h{self.h}"
        return f"{sizes}-{self.activation}-{self.order}-{self.routing}"


def make_ids(case, rng):
    """(L, k) int32 expert ids of the case's routing."""
    L, k, E = case.L, case.k, case.E
    expert = np.arange(E)
    bias = np.zeros(E)
    if case.routing == "skewed":
        bias = -2 * np.log1p(expert)
    if case.routing == "empty_experts":
        bias = np.where(expert % 2 == 1, 0, -np.inf)
    # The k largest of Gumbel noise plus bias are k distinct experts drawn with probability proportional to exp(bias).
    ids = np.argsort(-(rng.gumbel(size=(L, E)) + bias), axis=1, kind="stable")[:, :k].astype(np.int32)
    if case.routing == "one_expert":
        ids[:] = (E // 2 + np.arange(k)) % E
    if case.routing == "duplicate":
        ids = rng.integers(E, size=(L, k)).astype(np.int32)
        ids[::2, -1] = ids[::2, 0]
    if case.routing == "absent":
        no_expert = rng.choice(np.array([-1, E, -(2**31), 2**31 - 1]), size=(L, k))
        is_absent = rng.random((L, k)) < 0.5
        is_absent[:1] = True
        ids = np.where(is_absent, no_expert, ids).astype(np.int32)
    return ids


def in_order(w, transposed):
    """The same values; with `transposed` in memory order (E, columns, rows)."""
    return np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2) if transposed else np.ascontiguousarray(w)


# NaN that any arithmetic, even the addition of 0, would turn into another.
_SIGNALING = {"float32": 0x7FA5A5A5, "bfloat16": 0x7FA5, "float16": 0x7DA5}


def mark(array, idle):
    """Fills the experts of a weight's gradient that nothing is to be added to; see `is_marked`."""
    array.view(f"u{array.itemsize}")[idle] = _SIGNALING[array.dtype.name]


def is_marked(array, idle):
    return bool((array.view(f"u{array.itemsize}")[idle] == _SIGNALING[array.dtype.name]).all())


def make_inputs(case, seed, dtype=np.float64):
    """x (L, d), ids (L, k) int32, weights (L, k), w1, w2 (E, h, d), grad_out (L, d), all of unit scale.

    x and grad_out ~ N(0, 1); expert weights ~ N(0, 1) / sqrt(fan-in); router weights positive, their sum 1 over a
    token's slots, float64 if dtype is float64, else float32. All others have `dtype`. The values are drawn in float64
    and rounded: they do not depend on the order of the weights, nor otherwise on the dtype.
    """
    rng = np.random.default_rng(seed)
    L, k, E, d, h = case.L, case.k, case.E, case.d, case.h
    columns = 2 * h if is_gated(case.activation) else h
    transposed = case.order.endswith("transposed")
    x = rng.standard_normal((L, d)).astype(dtype)
    w1 = (rng.standard_normal((E, d, columns)) / np.sqrt(d)).astype(dtype)
    w2 = in_order((rng.standard_normal((E, h, d)) / np.sqrt(h)).astype(dtype), transposed)
    grad_out = rng.standard_normal((L, d)).astype(dtype)
    weights = rng.random((L, k)) + 0.1
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float64 if x.dtype == np.float64 else np.float32)
    if case.order.startswith("pair"):
        w1 = tuple(in_order(half, transposed) for half in np.split(w1, 2, axis=2))
    else:
        w1 = in_order(w1, transposed)
    return x, make_ids(case, rng), weights, w1, w2, grad_out


def relative_error(got, want):
    """||got - want|| / ||want|| in float64, of arrays or of pairs of arrays; 0 / 0 is 0, any NaN is inf."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"relative_error: expected equal shapes, got {got.shape} and {want.shape}")
    with np.errstate(invalid="ignore"):  # inf - inf is a NaN, and so an infinite error
        difference = np.linalg.norm((got - want).ravel())
    if difference == 0:
        return 0.0
    norm = np.linalg.norm(want.ravel())
    return float(difference / norm) if norm > 0 and np.isfinite(difference) else np.inf


# 31 and 45 are multiples of nothing that a kernel tiles by; 24 and 40 are multiples of 8 but of no larger tile.
_BASE = Case(L=100, k=2, E=5, d=31, h=45)
_ALIGNED = Case(L=100, k=2, E=8, d=24, h=40)

CASES = [
    *(replace(_BASE, activation=a) for a in BASIC),
    *(replace(_ALIGNED, activation=a, order="transposed") for a in BASIC),
    *(replace(_BASE, activation=a, order="pair") for a in BASIC_GATED),
    *(replace(_ALIGNED, activation=a, order="pair_transposed") for a in BASIC_GATED),
    *(replace(_BASE, order=o) for o in ("transposed", "pair_transposed")),
    *(replace(_ALIGNED, order=o) for o in ("row", "pair")),
    *(replace(c, k=3, routing=r) for r in ROUTINGS[1:] for c in (_BASE, _ALIGNED)),
    *(replace(_BASE, k=1, routing=r) for r in ROUTINGS if r != "duplicate"),
    *(replace(_ALIGNED, k=8, activation=a) for a in ("swiglu", "silu")),
    *(replace(_BASE, L=L, k=k, routing=r) for L in (1, 7) for k, r in ((2, "random"), (5, "random"), (3, "absent"))),
    *(replace(_BASE, L=L, k=1, E=1, d=8, h=16) for L in (1, 7, 100)),
    *(replace(_BASE, L=0, activation=a, order=o) for a, o in (("swiglu", "row"), ("relu", "row"), ("geglu", "pair"))),
    replace(_ALIGNED, L=0),
    Case(L=7, k=2, E=3, d=1, h=1),
    Case(L=100, k=8, E=64, d=64, h=32, routing="skewed"),
    Case(L=100, k=1, E=4, d=16, h=128, activation="gelu", routing="one_expert"),
]


# Options of the router that take slots away, and those whose gradient is one of all logits.
CUTS = {"top_p": 0.9}, {"threshold": -5.0, "score": "sigmoid"}, {"threshold": 0.01, "top_p": 0.9}
DENSE_GRADIENTS = {"k": 1}, *({"sums": (name,)} for name in ("z", "entropy", "softmax", "sigmoid", "sqrt_softplus"))


# Options of route that leave slots of a token without an expert, for 9 tokens.
EMPTYING = (
    {"top_p": 0.4},
    {"threshold": 0.15},
    {"threshold": 0.7, "score": "sigmoid"},
    {"token_mask": np.arange(9) % 3 > 0},
    {"token_mask": np.arange(9) % 3 > 0, "score": "sigmoid"},
)


def with_anything_in_empty_slots(grad_weights, ids):
    """These gradients, but NaN and infinities where ids are -1."""
    anything = np.resize(np.array([np.nan, np.inf, -np.inf], grad_weights.dtype), ids.shape)
    return np.where(ids < 0, anything, grad_weights)


def peaked_logits(L, E, offset):
    """float32 rows around `offset`, from flat ones to those where one expert has nearly all the probability."""
    logits = np.random.default_rng(0).standard_normal((L, E)) * 3 + offset
    logits[np.arange(L), np.arange(L) % E] += np.linspace(0, 40, L)
    return logits.astype(np.float32)


def assert_same_entropies(entropies, grad, want, want_grad, rounding=0.0):
    """Of the rows of `peaked_logits`, one by one, with their gradients.

    The exponentials of differences down to -20, which are what matters, have an error of 22 * 2^-23. The log of a sum
    near 1 has that of E additions, each of up to 2^-24 and of either sign. 1e-15 is for autograd in float64, where
    terms cancel. rounding: of the gradient to its dtype.
    """
    assert (want < 1e-3).mean() > 0.1 and (want > 0.1).mean() > 0.1
    np.testing.assert_allclose(entropies, want, rtol=4e-6, atol=2 * grad.shape[1] ** 0.5 * 2**-24)
    largest = np.abs(want_grad).max(axis=1, keepdims=True)
    assert (np.abs(grad - want_grad) <= (4e-6 + rounding) * largest + 1e-15).all()


def special_logits(E):
    """(7, E): rows with a NaN, an infinity, nothing but either, and none."""
    nan, inf = np.nan, np.inf
    logits = np.zeros((7, E), np.float32)
    rows = [[1, 2, 3, 0], [1, nan, 2, 0], [1, inf, 2, 0], [1, 2, 3, -inf], [inf, inf, 2, 0]]
    logits[:5, np.linspace(0, E - 1, 4).astype(int)] = rows
    logits[5:] = [[nan], [-inf]]
    return logits
