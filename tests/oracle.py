"""The layer with every activation, biases and both orders of gate and up, in torch's float64 autograd.

The activations are written as the models that have them write them, with torch's own functions. Nothing is shared with
moeblaze_cupy/reference.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional as F

from moeblaze_cupy import Activation
from tests.cases import in_order

FORMULAS = {
    "swiglu": lambda a, b: F.silu(a) * b,
    "geglu": lambda a, b: F.gelu(a) * b,
    "reglu": lambda a, b: F.relu(a) * b,
    "geglu_tanh": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "swiglu_clamp": lambda a, b, limit: F.silu(a.clamp(max=limit)) * b.clamp(min=-limit, max=limit),
    "swiglu_oai": lambda a, b, alpha, limit: (
        (b.clamp(min=-limit, max=limit) + 1) * (a.clamp(max=limit) * torch.sigmoid(a.clamp(max=limit) * alpha))
    ),
    "swiglu_clamp_after": lambda a, b, limit: F.silu(a).clamp(max=limit) * b.clamp(min=-limit, max=limit),
    "swiglu_softcap": lambda a, b, gate_cap, up_cap: (
        gate_cap * torch.tanh(a / gate_cap) * torch.sigmoid(a) * up_cap * torch.tanh(b / up_cap)
    ),
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "relu2": lambda a: F.relu(a).square(),
}
# Limits that a third of unit-scale values exceed, and that every dtype has exactly.
LIMITED = {
    "swiglu_clamp": Activation("swiglu_clamp", limit=0.75),
    "swiglu_oai": Activation("swiglu_oai", limit=0.75),
    "swiglu_clamp_after": Activation("swiglu_clamp_after", limit=0.25),
    "swiglu_softcap": Activation("swiglu_softcap", gate_cap=1.5, up_cap=0.75),
}
WITHOUT_CONSTANTS = ("geglu_tanh", "gelu_tanh", "relu2")


@dataclass
class Problem:
    """Inputs of one layer as NumPy arrays, and its options. Values of all arrays are representable in `dtype`."""

    activation: Activation
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    w1: object
    w2: np.ndarray
    grad_out: np.ndarray
    b1: object = None
    b2: object = None
    gate_up: str = "halves"

    @property
    def options(self):
        return {"activation": self.activation, "gate_up": self.gate_up}

    def arrays(self):
        """By name, without what is absent."""
        names = ("x", "ids", "weights", "w1", "w2", "b1", "b2")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def make_problem(
    activation,
    dtype,
    *,
    sizes=(40, 2, 5, 40, 136),
    order="row",
    gate_up="halves",
    bias="dtype",
    weights_dtype=np.float32,
    seed=0,
):
    """sizes: L, k, E, d, h. bias: None, "dtype" or a dtype. No token goes to expert 1; a tenth of the slots is empty.

    With a bias every third column of a, and of b, is exactly at an activation's limit, or minus it, in every row: its
    weights are zero and its bias is the limit. Of others some are above, some below.
    """
    activation = LIMITED.get(activation, activation)
    activation = activation if isinstance(activation, Activation) else Activation(activation)
    rng, (L, k, E, d, h) = np.random.default_rng(seed), sizes
    gated, transposed, is_pair = activation.form.gated, order.endswith("transposed"), order.startswith("pair")

    def random(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(dtype)

    halves = [random(E, d, h, scale=d**-0.5) for _ in range(1 + gated)]
    ids = rng.integers(E, size=(L, k)).astype(np.int32)
    ids[ids == 1] = 0 if E == 1 else 2 % E
    ids[rng.random((L, k)) < 0.1] = -1
    b1 = b2 = None
    if bias is not None:
        bias_dtype = dtype if bias == "dtype" else bias
        biases = [random(E, h, scale=0.5) for _ in halves]
        if "limit" in activation.constants:
            limit = activation.constants["limit"]
            for half, of_half in zip(halves, biases, strict=True):
                half[:, :, ::3] = 0
                of_half[:, ::3] = limit
                of_half[:, ::6] = -limit
        biases = [b.astype(bias_dtype) for b in biases]
        b1 = tuple(biases) if is_pair else _joined(biases, gate_up)
        b2 = random(E, d, scale=0.5).astype(bias_dtype)
    w1 = (
        tuple(in_order(half, transposed) for half in halves)
        if is_pair
        else in_order(_joined(halves, gate_up), transposed)
    )
    w2 = in_order(random(E, h, d, scale=h**-0.5), transposed)
    weights = rng.random((L, k)).astype(weights_dtype)
    return Problem(activation, random(L, d), ids, weights, w1, w2, random(L, d), b1, b2, gate_up)


def _joined(halves, gate_up):
    if gate_up == "interleaved":
        return np.stack(halves, axis=-1).reshape(*halves[0].shape[:-1], -1)
    return np.concatenate(halves, axis=-1)


def _rounded(values, dtype):
    """To what the layer stores, as if the gradient did not notice."""
    if dtype == np.float64:
        return values
    stored = values.detach().numpy().astype(dtype).astype(np.float64)
    return values + (torch.from_numpy(stored) - values).detach()


def expected(problem):
    """out and the gradients by name, in float64; a and b are rounded as the layer stores them."""
    dtype = problem.x.dtype
    leaves = {}
    for name, value in problem.arrays().items():
        parts = value if isinstance(value, tuple) else (value,)
        if name != "ids":
            leaves[name] = [torch.tensor(np.asarray(p).astype(np.float64), requires_grad=True) for p in parts]
    (x,), (weights,), (w2,) = leaves["x"], leaves["weights"], leaves["w2"]
    gated, ids = problem.activation.form.gated, torch.from_numpy(np.asarray(problem.ids).astype(np.int64))

    def halves(parts):
        if len(parts) == 2 or not gated:
            return parts
        (both,) = parts
        return (both[..., 0::2], both[..., 1::2]) if problem.gate_up == "interleaved" else both.chunk(2, dim=-1)

    out = torch.zeros_like(x)
    for expert in range(w2.shape[0]):
        ab = [x @ half[expert] for half in halves(leaves["w1"])]
        if "b1" in leaves:
            ab = [half + bias[expert] for half, bias in zip(ab, halves(leaves["b1"]), strict=True)]
        y = FORMULAS[problem.activation.name](*(_rounded(half, dtype) for half in ab), **problem.activation.constants)
        z = y @ w2[expert]
        if "b2" in leaves:
            z = z + leaves["b2"][0][expert]
        chosen = ids == expert
        rows = chosen.any(dim=1)
        share = (weights * chosen).sum(dim=1, keepdim=True)
        out = out.index_add(0, rows.nonzero()[:, 0], (share * z)[rows])
    flat = [leaf for parts in leaves.values() for leaf in parts]
    gradients = iter(torch.autograd.grad(out, flat, torch.from_numpy(problem.grad_out.astype(np.float64))))
    found = {"out": out.detach().numpy()}
    for name, parts in leaves.items():
        values = tuple(next(gradients).numpy() for _ in parts)
        found[name] = values if len(values) == 2 else values[0]
    return found


# Relative norms. A result depends on up to six values rounded to 16 bits in a row; fp32 on sums of some 150 terms.
TOLERANCES = {
    np.dtype(ml_dtypes.bfloat16): 1.4 * 2**-8,
    np.dtype(np.float16): 1.4 * 2**-11,
    np.dtype(np.float32): 2e-6,
    np.dtype(np.float64): 1e-12,
}


def mismatches(got, want, dtype, outlier=10):
    """What is wrong with results by name: norms, and elements against their size and the root mean square."""
    found, tolerance = [], TOLERANCES[np.dtype(dtype)]
    for name, exact in want.items():
        for values, exact_values in zip(_parts(got[name]), _parts(exact), strict=True):
            values = np.asarray(values).astype(np.float64)
            assert values.shape == exact_values.shape, name
            difference, norm = np.abs(values - exact_values), np.linalg.norm(exact_values)
            error = np.linalg.norm(difference) / norm if norm else np.linalg.norm(difference)
            if not error <= tolerance:
                found.append(f"{name}: relative error {error:.2e}")
            scale = np.abs(exact_values) + norm / np.sqrt(max(exact_values.size, 1))
            if not (difference <= outlier * tolerance * scale).all():
                found.append(f"{name}: an element is off by {(difference / np.maximum(scale, 1e-300)).max():.2e}")
    return found


def _parts(values):
    return values if isinstance(values, tuple) else (values,)
