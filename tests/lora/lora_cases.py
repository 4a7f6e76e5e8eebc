"""Layers with low-rank factors, and the same layers with W + scale * B A made explicitly, in float64."""

import numpy as np

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.types import is_gated, pair
from tests.cases import in_order, make_inputs

NAMES = ("a1", "b1", "a2", "b2")


def in_float64(values):
    if values is None:
        return None
    return tuple(map(in_float64, values)) if isinstance(values, tuple) else np.asarray(values).astype(np.float64)


def make_lora(case, ranks, dtype, *, shared=False, scales=(0.5, 2.0), seed=7, strided=False):
    """ranks: of both pairs, None for a missing one. strided: b lies as (out, r, E), which is how peft has it."""
    rng = np.random.default_rng(seed)
    E, d, h = case.E, case.d, case.h
    columns = 2 * h if is_gated(case.activation) else h
    factors = []
    for rank, inner, outer in zip(ranks, (d, h), (columns, d), strict=True):
        if rank is None:
            factors += [None, None]
            continue
        a = (rng.standard_normal((E, rank, inner)) / np.sqrt(inner)).astype(dtype)
        b = (rng.standard_normal((E, outer, rank)) / np.sqrt(rank)).astype(dtype)
        if strided:  # (out, r, E) in memory
            b = np.ascontiguousarray(b.transpose(1, 2, 0)).transpose(2, 0, 1)
        factors += [a[0] if shared else a, b]
    return mb.Lora(*factors, *scales)


def _delta(first, second, scale):
    return scale * (in_float64(second) @ in_float64(first)).swapaxes(1, 2)


def merged(w1, w2, lora):
    """w1 in its form and w2, float64, with the factors' products added."""
    w1, w2 = in_float64(w1), in_float64(w2)
    if lora.a1 is not None:
        delta = _delta(lora.a1, lora.b1, lora.scale1)
        parts = pair(w1)
        sums = [w + of for w, of in zip(parts, np.split(delta, len(parts), axis=2), strict=True)]
        w1 = tuple(sums) if isinstance(w1, tuple) else sums[0]
    if lora.a2 is not None:
        w2 = w2 + _delta(lora.a2, lora.b2, lora.scale2)
    return w1, w2


def factor_gradients(grad_w1, grad_w2, lora):
    """By the chain rule from the gradients of the merged weights: by name, None without the pair."""
    found = dict.fromkeys(NAMES)
    joined = np.concatenate(pair(grad_w1), axis=2)
    for grad, first, second, scale in ((joined, "a1", "b1", lora.scale1), (grad_w2, "a2", "b2", lora.scale2)):
        a, b = in_float64(getattr(lora, first)), in_float64(getattr(lora, second))
        if a is None:
            continue
        of_product = scale * grad.swapaxes(1, 2)  # (E, out, in), of b a
        of_first = b.swapaxes(1, 2) @ of_product
        found[first] = of_first.sum(axis=0) if a.ndim == 2 else of_first
        found[second] = of_product @ (a.T if a.ndim == 2 else a.swapaxes(1, 2))
    return found


def exact(inputs, lora, **options):
    """out and the gradients by name in float64, of the merged weights; those of factors are "lora.a1" and so on."""
    x, ids, weights, w1, w2, grad_out = inputs
    w1, w2 = merged(w1, w2, lora)
    for name in ("b1", "b2"):
        if options.get(name) is not None:
            options[name] = in_float64(options[name])
    out, saved = reference.moe_forward(in_float64(x), ids, in_float64(weights), w1, w2, **options)
    grads = reference.moe_backward(in_float64(grad_out), saved)
    found = {"out": out, "x": grads.x, "weights": grads.weights, "w1": grads.w1, "w2": grads.w2}
    of_factors = factor_gradients(grads.w1, grads.w2, lora)
    found |= {f"lora.{name}": of_factors[name] for name in NAMES if of_factors[name] is not None}
    found |= {name: getattr(grads, name) for name in ("b1", "b2") if getattr(grads, name) is not None}
    return {name: value for name, value in found.items() if value is not None}


def by_name(out, grads):
    """out and all gradients that there are, under the names of `exact`."""
    found = {"out": out} | {name: value for name, value in vars(grads).items() if value is not None and name != "lora"}
    if grads.lora is not None:
        found |= {f"lora.{n}": getattr(grads.lora, n) for n in NAMES if getattr(grads.lora, n) is not None}
        assert grads.lora.scale1 is None and grads.lora.scale2 is None
    return found


def interleaved(inputs, lora):
    """The same layer with the columns of gate and up in turn, in the memory order of w1."""
    x, ids, weights, w1, w2, grad_out = inputs
    transposed = w1.strides[1] < w1.strides[2]
    w1 = in_order(np.stack(np.split(w1, 2, axis=2), axis=3).reshape(w1.shape), transposed)
    if lora.b1 is not None:
        lora = lora._replace(b1=np.stack(np.split(lora.b1, 2, axis=1), axis=2).reshape(lora.b1.shape))
    return (x, ids, weights, w1, w2, grad_out), lora


def problem(case, ranks, dtype, *, seed=0, factor_dtype=None, order=None, **of_lora):
    """Inputs of `make_inputs` and a Lora of their dtype, or of factor_dtype."""
    inputs, lora = make_inputs(case, seed, dtype), make_lora(case, ranks, factor_dtype or dtype, **of_lora)
    return interleaved(inputs, lora) if order == "interleaved" else (inputs, lora)
