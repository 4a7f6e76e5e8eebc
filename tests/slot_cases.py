"""Layers whose slots are pairs, or have the options of slots: inputs, and what results must be."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from moeblaze_cupy import reference
from tests.cases import Case, make_inputs, relative_error

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
NAMES = ("x", "weights", "w1", "w2")
# Relative norms, as of tests/layer/test_layer.py, and the largest error of one element, in units of these and of its
# own size plus the result's root mean square.
TOLERANCES = {"bfloat16": 1.5 * 2**-8, "float16": 1.5 * 2**-11, "float32": 3e-6}
OUTLIER = 10
TIERS = {  # an expert with more than 128 rows, a last tile that is not full
    "sm80": (Case(L=170, k=2, E=3, d=259, h=45, routing="absent"), "float32"),
    "sm90": (Case(L=170, k=2, E=3, d=264, h=72, routing="absent"), "bfloat16"),
}
IDENTITY = 3  # identity experts


def in_float64(values):
    if isinstance(values, tuple):
        return tuple(map(in_float64, values))
    return np.asarray(values).astype(np.float64)


def as_bits(values):
    return b"".join(map(as_bits, values)) if isinstance(values, tuple) else np.ascontiguousarray(values).tobytes()


def inputs_of(tier, **changes):
    case, dtype = TIERS[tier]
    case = replace(case, **changes)
    x, ids, weights, w1, w2, grad_out = make_inputs(case, 0, DTYPES[dtype])
    rng = np.random.default_rng(1)
    some = rng.random(ids.shape) < 0.3
    ids = np.where(some, case.E + rng.integers(0, IDENTITY + 1, ids.shape), ids).astype(ids.dtype)  # one is none
    return x, ids, weights, w1, w2, grad_out


def ragged(inputs, offsets=None):
    """The same slots in the hands of other tokens: of some none, of one many; or as `offsets` say."""
    x, ids, weights, w1, w2, grad_out = inputs
    P = ids.size
    if offsets is None:
        rng = np.random.default_rng(2)
        offsets = np.sort(rng.integers(1, P - 20, x.shape[0] + 1))
        offsets[len(offsets) // 2 :] += 17
    return (x, ids.reshape(-1), weights.reshape(-1), w1, w2, grad_out), offsets.astype(np.int32)


def assert_right(found, inputs, offsets=None, **options):
    x, ids, weights, w1, w2, grad_out = inputs
    exact = [None if a is None else in_float64(a) for a in (x, weights, w1, w2, grad_out)]
    want_out, saved = reference.moe_forward(exact[0], ids, *exact[1:4], token_offsets=offsets, **options)
    want = {"out": want_out} | vars(reference.moe_backward(exact[4], saved))
    tolerance = TOLERANCES[x.dtype.name]
    for name, got in found.items():
        assert (got is None) == (want[name] is None), name
        if got is None:
            continue
        got, true = in_float64(got), want[name]
        assert got.shape == true.shape, name
        assert relative_error(got, true) <= tolerance, name
        scale = np.abs(true) + np.linalg.norm(true) / np.sqrt(max(true.size, 1))
        assert (np.abs(got - true) <= OUTLIER * tolerance * scale).all(), name


def same_bits(first, second):
    return [name for name in first if as_bits(np.ravel(first[name])) != as_bits(np.ravel(second[name]))] == []


def without_weights(inputs, seed=3):
    """Inputs for an output per slot."""
    x, ids, _, w1, w2, _ = inputs
    grad_out = np.random.default_rng(seed).standard_normal((*ids.shape, x.shape[1])).astype(x.dtype)
    return x, ids, None, w1, w2, grad_out
