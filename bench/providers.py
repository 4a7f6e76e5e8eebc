"""What is timed: our layer through torch, and the cuBLAS bound, six balanced dense products per layer.

A provider is built once per case and offers `forward()` and `forward_backward()` on fixed random inputs.
"""

import torch
from moeblaze_cupy.interop.torch import moe


def layer_inputs(case, order: str = "transposed", seed: int = 0, dtype=torch.bfloat16) -> dict:
    """Unit-scale random inputs and a random top-k routing of one SwiGLU layer, on the current CUDA device."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).mul_(scale).to(dtype)

    L, d, h, E, k = case.L, case.d, case.h, case.E, case.k
    scores, ids = torch.rand(L, E, generator=generator, device="cuda").topk(k, dim=1)
    if order == "transposed":
        w1 = normal(E, 2 * h, d, scale=d**-0.5).transpose(1, 2)
        w2 = normal(E, d, h, scale=h**-0.5).transpose(1, 2)
    else:
        w1, w2 = normal(E, d, 2 * h, scale=d**-0.5), normal(E, h, d, scale=h**-0.5)
    return {
        "x": normal(L, d),
        "ids": ids.int(),
        "weights": scores / scores.sum(1, keepdim=True),
        "w1": w1,
        "w2": w2,
        "grad_out": normal(L, d),
    }


class Ours:
    """`interop.torch.moe`, dispatch included, router excluded."""

    def __init__(self, case, inputs: dict, save: str = "minimal"):
        self.inputs, self.save = inputs, save
        self.leaves = [inputs[n].detach().requires_grad_() for n in ("x", "weights", "w1", "w2")]

    def forward(self):
        x, weights, w1, w2 = self.leaves
        return moe(x, self.inputs["ids"], weights, w1, w2, save=self.save)

    def forward_backward(self):
        return torch.autograd.grad(self.forward(), self.leaves, self.inputs["grad_out"])


class Bound:
    """The layer's dense products alone through cuBLAS, tokens split evenly: no routing, no activation."""

    def __init__(self, case, inputs: dict):
        T = case.L * case.k // case.E

        def normal(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.x, self.product, self.first = (normal(case.E, T, n) for n in (case.d, case.h, 2 * case.h))
        self.w1, self.w2 = inputs["w1"], inputs["w2"]

    def forward(self):
        torch.bmm(self.x, self.w1)
        torch.bmm(self.product, self.w2)

    def forward_backward(self):
        self.forward()
        torch.bmm(self.x, self.w2.transpose(1, 2))
        torch.bmm(self.product.transpose(1, 2), self.x)
        torch.bmm(self.first, self.w1.transpose(1, 2))
        torch.bmm(self.x.transpose(1, 2), self.first)
