"""A layer in e4m3 by torchao's grouped products for training, beside this package's in bench.fp8.

torchao quantises rows and weights in every product, forward and backward, those of weight gradients included. It takes
groups of rows whose sizes are multiples of its recipe's: places that no slot fills have token 0's row, and gradients of
zero. The steps around the products are fused by torch.compile.
"""

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench import cases
from bench.layer import Layer

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # rows, weights, ends of groups
PACKAGE = "torchao.prototype.moe_training"
# Of each recipe: the module, its function, the rows of a group's multiple, and the package that has the product.
# Without deep_gemm torchao would emulate the blockwise product, not multiply e4m3.
RECIPES = {
    "rowwise": ("fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm", 16, "torch"),
    "blockwise": ("blockwise_fp8.grouped_mm", "_to_fp8_blockwise_then_scaled_grouped_mm", 128, "deep_gemm"),
}


def product_of(recipe: str) -> tuple[Product, int]:
    """A recipe's product, and of what the sizes of its groups are multiples.

    Raises ImportError without torchao, or without the package that has the product.
    """
    module, function, multiple, package = RECIPES[recipe]
    importlib.import_module(package)
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
    return lambda rows, weight, ends: found(rows, weight, ends, pad_token_groups_for_grouped_mm=False), multiple


def gated(first: torch.Tensor) -> torch.Tensor:
    gate, up = first.chunk(2, dim=-1)
    return F.silu(gate) * up


def sum_of_slots(slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(L*k, d) and (L, k) -> (L, d)."""
    return (slots.view(*weights.shape, -1) * weights[:, :, None]).sum(1).to(slots.dtype)


class TorchAO(Layer):
    """The layer on what `inputs.layer_inputs` made; made["w1"] and made["w2"] are in transformers' memory order."""

    def __init__(self, case: cases.LayerCase, made: dict, product: Product, multiple: int, compiles: bool = True):
        super().__init__(made, [made[name] for name in ("x", "weights", "w1", "w2")])
        self.case, self.product, self.multiple = case, product, multiple
        steps = gated, sum_of_slots
        self.activate, self.add = (torch.compile(step) for step in steps) if compiles else steps

    def forward(self) -> torch.Tensor:
        case, multiple, flat = self.case, self.multiple, self.inputs["ids"].reshape(-1)
        x, weights, w1, w2 = self.leaves
        experts, order = flat.sort(stable=True)
        every = torch.arange(case.E + 1, device=flat.device, dtype=flat.dtype)
        starts = torch.searchsorted(experts, every)  # of each expert's slots
        sizes = (starts.diff() + multiple - 1) // multiple * multiple
        ends = sizes.cumsum(0)
        shift = ends - sizes - starts[:-1]
        places = torch.empty_like(order)  # of each slot's row
        places[order] = torch.arange(len(order), device=flat.device) + shift[experts.long()]
        room = -(-(case.slots + case.E * (multiple - 1)) // multiple) * multiple
        ends[-1] = room  # a product leaves rows beyond its last group as they were
        ends = ends.int()
        tokens = torch.zeros(room, dtype=torch.int64, device=flat.device)
        tokens[places] = torch.arange(len(order), device=flat.device) // case.k
        first = self.product(x.index_select(0, tokens), w1, ends)
        rows = self.product(self.activate(first), w2, ends)
        return self.add(rows.index_select(0, places), weights)
