"""Of the processes of `ranks.py`: their inputs, and comparisons with one process that has all tokens.

Every rank draws the inputs of all ranks. A case is a function of the rank, the number of ranks and a group of its own.
"""

from datetime import timedelta

import ml_dtypes
import torch

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.interop.parallel import expert_parallel_moe

TIMEOUT = timedelta(seconds=6)
GPU_TIMEOUT = timedelta(seconds=120)  # compiling takes some of it
E, K, D, H = 8, 3, 16, 12
CASES, GPU_CASES = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def gpu_case(function):
    GPU_CASES[function.__name__] = function
    return function


class Inputs:
    """Of all ranks: tokens by rank, ids, weights, gradients; the experts' weights of all E experts."""

    def __init__(
        self, rank, counts, routing="random", dtype=torch.float64, seed=0, pair=False, transposed=False, k=K, h=H, d=D
    ):
        rng = torch.Generator().manual_seed(seed)
        L = sum(counts)

        def normal(*shape):
            return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)

        self.x, self.grad, self.weights = normal(L, d), normal(L, d), normal(L, k).abs()
        if dtype in (torch.bfloat16, torch.float16):
            self.weights = self.weights.float()
        self.ids = (
            torch.stack([torch.randperm(E, generator=rng)[:k] for _ in range(L)]) if L else torch.zeros(0, k).long()
        )
        if routing == "one_rank":
            self.ids %= 2
        elif routing == "absent":
            self.ids = torch.where(torch.rand(L, k, generator=rng) < 0.5, self.ids, -1 - self.ids)
            self.ids[:1] = E
        elif routing == "all_absent":
            self.ids[:] = -1
        elif routing == "duplicate":
            self.ids[::2, -1] = self.ids[::2, 0]
            self.ids[1::4] = 5
        self.ids = self.ids.to(torch.int32)
        w1, w2 = normal(E, d, 2 * h) / d**0.5, normal(E, h, d) / h**0.5
        if transposed:
            w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
        self.w1, self.w2 = tuple(w1.split(h, 2)) if pair else w1, w2
        if pair:
            self.w1 = tuple(half.contiguous() for half in self.w1)
        start = sum(counts[:rank])
        self.here = slice(start, start + counts[rank])
        e = E // len(counts)
        self.experts = slice(rank * e, (rank + 1) * e)

    def leaf(self, tensor, part):
        return tensor[part].clone(memory_format=torch.preserve_format).detach().requires_grad_()

    def local(self):
        """x, ids, weights, w1, w2 of this rank, with gradients."""
        halves = self.w1 if isinstance(self.w1, tuple) else (self.w1,)
        w1 = tuple(self.leaf(half, self.experts) for half in halves)
        x, weights = self.leaf(self.x, self.here), self.leaf(self.weights, self.here)
        return x, self.ids[self.here], weights, w1 if len(w1) == 2 else w1[0], self.leaf(self.w2, self.experts)

    def whole(self, **options):
        """out and gradients by name of one process with all tokens."""
        out, saved = mb.moe_forward(self.x, self.ids, self.weights, self.w1, self.w2, **options)
        grads = mb.moe_backward(self.grad, saved)
        part = {"out": out[self.here], "x": grads.x[self.here], "weights": grads.weights[self.here]}
        w1 = grads.w1 if isinstance(grads.w1, tuple) else (grads.w1,)
        return part | {"w1": torch.cat([half[self.experts] for half in w1]), "w2": grads.w2[self.experts]}


def difference(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm()) if b.norm() else float(a.abs().max() if a.numel() else 0)


def results_of(inputs, experts, **options):
    x, ids, weights, w1, w2 = inputs.local()
    out = expert_parallel_moe(x, ids, weights, w1, w2, experts, **options)
    out.backward(inputs.grad[inputs.here])
    halves = w1 if isinstance(w1, tuple) else (w1,)
    grads = {"x": x.grad, "weights": weights.grad, "w1": torch.cat([half.grad for half in halves]), "w2": w2.grad}
    return {"out": out.detach(), **grads}


def compare(inputs, got, tolerance, same_bits=True, **options):
    want = inputs.whole(**options)
    for name in want:
        error = difference(got[name], want[name])
        assert error <= tolerance, f"{name}: {error}"
    if same_bits:
        for name in ("w1", "w2"):
            assert torch.equal(got[name], want[name]), f"{name} has other bits"


def rounded(rows):
    """What e4m3 with a scale for each row stands for, in the rows' dtype."""
    host = rows.detach().cpu()
    stored, scales = reference.fp8.quantize(arrays.Torch.to_numpy(host), axis=1)
    back = reference.fp8.dequantize(stored, scales[:, 0], ml_dtypes.bfloat16)
    return arrays.Torch.from_numpy(back).to(rows.device)


def compare_rows_in_fp8(inputs, experts, same_bits=True, **options):
    """Runs rows in e4m3 and bf16 rows, and compares as `compared_rows_in_fp8` says."""
    in_fp8 = {"precision": "fp8", **options}
    want = results_of(inputs, experts, **in_fp8)
    found = [results_of(inputs, experts, row_precision="fp8", **in_fp8) for _ in range(2)]
    compared_rows_in_fp8(inputs, want, *found, same_bits, **in_fp8)


def compared_rows_in_fp8(inputs, want, got, again, same_bits, tolerance=2.0**-7, **in_fp8):
    """Two runs with rows in e4m3 against one with bf16 rows, and against one process.

    Out and the gradients of x and weights have the bits that they have with bf16 rows. The gradients of w1 and w2 are
    those of one process with rounded rows, in bits if `same_bits`, and near those of its bf16 rows.
    """
    for name in got:
        assert torch.equal(got[name], again[name]), f"{name}: other bits in a second run"
    for name in ("out", "x", "weights"):
        assert torch.equal(got[name], want[name]), f"{name}: other bits than with bf16 rows"
    x, grad = inputs.x, inputs.grad
    whole = inputs.whole(**in_fp8)
    inputs.x, inputs.grad = rounded(x), rounded(grad)
    of_rounded = inputs.whole(**in_fp8)
    inputs.x, inputs.grad = x, grad
    for name in ("w1", "w2"):
        error = difference(got[name], of_rounded[name])
        assert error <= tolerance, f"{name}: {error}"
        assert torch.equal(got[name], of_rounded[name]) or not same_bits, f"{name} has other bits"
        # 0.026 is the rounding error of e4m3 in the norm; a sum has that of one factor, beside those of both runs
        error = difference(got[name], whole[name])
        assert error <= 0.04, f"{name}: {error} beside bf16 rows"


def counts_of(size, kind):
    return {"equal": [24] * size, "uneven": [5, 33, 17, 40][:size], "none_here": [0, 19, 8, 3][:size]}.get(kind) or (
        [1] + [0] * (size - 1) if kind == "one_token" else [0] * size
    )


def expect(kind, text, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        assert text in str(error), str(error)
        return str(error)
    raise AssertionError(f"expected {kind.__name__}: {text}")
