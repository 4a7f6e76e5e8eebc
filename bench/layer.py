"""The protocol between a provider and the suites."""

import torch


class Layer:
    """One layer with its inputs, ready to run.

    leaves: differentiable tensors, first x (L, d) and weights (L, k), then the expert weights in the provider's own
    layout. `named` gives their gradients back in the layout of the inputs, so that they can be compared.
    """

    names: tuple[str, ...] = ("x", "weights", "w1", "w2")

    def __init__(self, inputs: dict, leaves: list[torch.Tensor]):
        self.inputs = inputs
        self.leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def forward(self) -> torch.Tensor:
        """out (L, d), with what autograd needs."""
        raise NotImplementedError

    def forward_backward(self) -> tuple:
        """Gradients of the leaves, in their order."""
        return torch.autograd.grad(self.forward(), self.leaves, self.inputs["grad_out"])

    def named(self, gradients: tuple) -> dict[str, torch.Tensor]:
        """Gradients by the names of the inputs and in their shapes."""
        return dict(zip(self.names, gradients, strict=True))
