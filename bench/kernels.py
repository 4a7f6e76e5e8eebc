"""The single kernels of a layer on CUDA. The only file of the suites that calls `moeblaze_cupy.ops`.

Names are those of `ops/grouped_gemm.py`, `ops/panels.py` and the paper's gradients: up_fwd and down_fwd (forward),
down_bwd (dA), up_wgrad (dW1), down_wgrad (dW2), up_bwd (dX). down_fwd and up_bwd include the sum over each token's
slots. R = L*k routed rows.
"""

from dataclasses import dataclass, replace

import torch

from bench.inputs import routing
from bench.verify import activate

GEMMS = ("up_fwd", "down_fwd", "down_bwd", "down_wgrad", "up_wgrad", "up_bwd")
WGRADS = ("down_wgrad", "up_wgrad")
SUMMED = ("down_fwd", "up_bwd")  # these sum the product over each token's slots
BYTES = 2  # of a bf16 element


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and the fewest bytes: every operand read once and every result written once."""

    flops: int
    nbytes: int


def gemm_work(case, entry: str) -> Work:
    """Of the product. Those of SUMMED write (L, d); their panels and additions do not count."""
    R, d, h, n = case.slots, case.d, case.h, case.first_columns
    x = out = case.L * d
    hidden, first = R * h, R * n
    w1, w2 = case.E * d * n, case.E * d * h
    elements = {
        "up_fwd": x + w1 + first + hidden,
        "down_fwd": hidden + w2 + out,
        "down_bwd": x + w2 + 2 * first + hidden,  # reads a, b, writes their gradients and A'
        "down_wgrad": hidden + x + w2,
        "up_wgrad": x + first + w1,
        "up_bwd": first + w1 + out,
    }[entry]
    columns = n if entry.startswith("up") else h
    return Work(2 * R * d * columns, BYTES * elements)


def dense_product(case, entry: str, device: str = "cuda"):
    """The product alone through cuBLAS: rows contiguous and split evenly over the experts, no epilogue, no sums."""
    T = max(1, case.slots // case.E)
    n = case.first_columns

    def normal(*shape):
        return torch.randn(case.E, *shape, device=device, dtype=torch.bfloat16)

    a, b = {
        "up_fwd": lambda: (normal(T, case.d), normal(n, case.d).transpose(1, 2)),
        "down_fwd": lambda: (normal(T, case.h), normal(case.d, case.h).transpose(1, 2)),
        "down_bwd": lambda: (normal(T, case.d), normal(case.d, case.h)),
        "down_wgrad": lambda: (normal(T, case.d).transpose(1, 2), normal(T, case.h)),
        "up_wgrad": lambda: (normal(T, n).transpose(1, 2), normal(T, case.d)),
        "up_bwd": lambda: (normal(T, n), normal(n, case.d)),
    }[entry]()
    return lambda: torch.bmm(a, b)


class Kernels:
    """The kernels of one layer with their buffers. `calls[name]()` launches, `error(name)` compares with float64.

    contiguous: a token of its own for every routed row, in expert order and with k = 1, so that the gather reads
    neighbouring rows: section 7.3's comparison. accumulate: weight gradients are added to float32 sums, at first zeros.
    """

    def __init__(self, case, inputs: dict, contiguous: bool = False, accumulate: bool = False):
        from moeblaze_cupy import launch_config, loader
        from moeblaze_cupy.arrays import Context, Torch
        from moeblaze_cupy.ops import aggregation, dispatch, grouped_gemm, panels

        self.case, self.inputs = case, dict(inputs)
        if contiguous:
            self._spread_rows()
            self.case = case = replace(case, L=case.slots, k=1)
        made, device = self.inputs, inputs["x"].device.index or 0
        self.context = context = Context(Torch, device, torch.cuda.current_stream(device).cuda_stream)
        describe = context.describe
        R, d, h, n = case.slots, case.d, case.h, case.first_columns
        x, grad_out, weights = (describe(made[name]) for name in ("x", "grad_out", "weights"))
        self.index = index = dispatch.dispatch(context, describe(made["ids"]), case.E)
        lists = grouped_gemm.Index.of(context, index)
        half = h if n == 2 * h else None
        up = grouped_gemm.Weight.of((describe(made["w1"]),), half)
        down = grouped_gemm.Weight.of((describe(made["w2"]),))

        def new(*shape):
            # random, not zeros: the power limit lets zeros run faster than data
            return torch.randn(*shape, device=made["x"].device, dtype=made["x"].dtype)

        tier = launch_config.tier(loader.device_limits(device).compute_capability)
        self.panels = launch_config.panels(d, R, tier)
        self.first, self.product, self.panel = new(R, n), new(R, h), new(R, self.panels[0][1])
        self.first_grad, self.weighted = new(R, n), new(R, h)
        self.grad_w1, self.grad_w2 = (
            torch.zeros_like(made[name], dtype=torch.float32 if accumulate else None) for name in ("w1", "w2")
        )
        self.out = torch.empty_like(made["x"])
        first, product, panel, first_grad, weighted = map(
            describe, (self.first, self.product, self.panel, self.first_grad, self.weighted)
        )
        out, activation = describe(self.out), case.activation
        w1_gradient = grouped_gemm.Weight.of((describe(self.grad_w1),), half)
        w2_gradient = grouped_gemm.Weight.of((describe(self.grad_w2),))
        row_weights = aggregation.weights_by_row(context, weights, lists.token_index_map)

        def down_bwd():
            self.partial_sums = grouped_gemm.down_bwd(
                context, lists, grad_out, down, h, activation, first_layer=first, first_layer_grad=first_grad,
                product=weighted, stored_product=None, row_weights=row_weights, wants_weights_grad=True,
            )  # fmt: skip

        def aggregate(scale):
            for column, columns in self.panels:
                rows = panel.part(0, (R, columns))
                aggregation.aggregate(context, rows, lists.token_index_map, scale, out, column, columns)

        self.calls = {
            "up_fwd": lambda: grouped_gemm.up_fwd(
                context, lists, x, up, h, activation, first_layer=first, product=product
            ),
            "down_fwd": lambda: panels.down_fwd(
                context, lists, product, down, weights, out, activation, overwrites=False
            ),
            "down_bwd": down_bwd,
            "down_wgrad": lambda: grouped_gemm.down_wgrad(
                context, lists, weighted, grad_out, w2_gradient, activation, accumulate
            ),
            "up_wgrad": lambda: grouped_gemm.up_wgrad(
                context, lists, x, first_grad, w1_gradient, h, activation, accumulate
            ),
            "up_bwd": lambda: panels.up_bwd(context, lists, first_grad, up, h, out, activation),
            "aggregate_out": lambda: aggregate(weights),
            "aggregate_dx": lambda: aggregate(None),
        }
        self.results = {
            "up_fwd": lambda: self.product,
            "down_fwd": lambda: self.out,
            "down_bwd": lambda: self.first_grad,
            "down_wgrad": lambda: self.grad_w2,
            "up_wgrad": lambda: self.grad_w1,
            "up_bwd": lambda: self.out,
            "aggregate_out": lambda: self.out,
            "aggregate_dx": lambda: self.out,
        }

    def _spread_rows(self) -> None:
        """A token for every routed row, in expert order: the same number of rows, gathered one after another."""
        flat = self.inputs["ids"].reshape(-1)
        order = torch.argsort(flat, stable=True)
        tokens = order // self.case.k
        self.inputs |= {
            "x": self.inputs["x"][tokens].contiguous(),
            "grad_out": self.inputs["grad_out"][tokens].contiguous(),
            "weights": self.inputs["weights"].reshape(-1)[order][:, None].contiguous(),
            "ids": flat[order][:, None].contiguous(),
        }

    def error(self, name: str) -> float:
        """Relative norm of the last call's result against torch in float64: over all tokens for products with their
        sums, over 512 for sums alone, over the first and the last expert that have rows for the other products."""
        if name.startswith("aggregate"):
            return self._aggregation_error(name)
        got = self.results[name]()
        offsets, tokens = self.index.expert_token_offsets.tolist(), self.index.expert_token_indices.long()
        busy = [e for e in range(self.case.E) if offsets[e] < offsets[e + 1]]
        rows = {e: slice(offsets[e], offsets[e + 1]) for e in busy}
        if name in SUMMED:
            want = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
            for e in busy:
                want.index_add_(0, tokens[rows[e]], self._expected(name, e, rows[e], tokens[rows[e]]))
            return float((got.double() - want).norm() / want.norm())
        difference = norm = 0.0
        for e in sorted({busy[0], busy[-1]}):
            want = self._expected(name, e, rows[e], tokens[rows[e]])
            part = got[e] if name.endswith("_wgrad") else got[rows[e]]
            difference += float((part.double() - want).square().sum())
            norm += float(want.square().sum())
        return (difference / norm) ** 0.5

    def _expected(self, name, expert, rows, tokens) -> torch.Tensor:
        """The part of one expert, whose rows belong to `tokens`."""
        x, grad_out = (self.inputs[n][tokens].double() for n in ("x", "grad_out"))
        w1, w2 = (self.inputs[n][expert].double() for n in ("w1", "w2"))
        if name == "up_fwd":
            return activate(x @ w1, self.case.activation)[0]
        if name == "up_bwd":
            return self.first_grad[rows].double() @ w1.T
        if name == "down_wgrad":
            return self.weighted[rows].double().T @ grad_out
        if name == "up_wgrad":
            return x.T @ self.first_grad[rows].double()
        # the weight of a row: the slot of its token whose place in expert order is this row
        places = self.index.token_index_map[tokens]
        row_numbers = torch.arange(rows.start, rows.stop, device=places.device)[:, None]
        scale = (self.inputs["weights"][tokens].double() * (places == row_numbers)).sum(1, keepdim=True)
        if name == "down_fwd":
            return scale * (self.product[rows].double() @ w2)
        _, *slopes = activate(self.first[rows].double(), self.case.activation)
        grad_product = scale * (grad_out @ w2.T)
        return torch.cat([grad_product * slope for slope in slopes], dim=1)

    def _aggregation_error(self, name: str) -> float:
        """In the last panel's columns. The buffer's rows are packed, and may be narrower there than it is."""
        first_column, columns = self.panels[-1]
        rows = self.panel.flatten()[: self.case.slots * columns].view(self.case.slots, columns)
        tokens = torch.arange(min(512, self.case.L), device=rows.device)
        parts = rows[self.index.token_index_map[tokens].long()].double()
        if name == "aggregate_out":
            parts = parts * self.inputs["weights"][tokens].double()[:, :, None]
        want = parts.sum(1)
        got = self.out[tokens][:, first_column:].double()
        return float((got - want).norm() / want.norm())


def aggregation_bytes(case) -> int:
    """All routed rows read once, all tokens written once, the map and the weights read once."""
    return BYTES * (case.slots + case.L) * case.d + 8 * case.slots


def sorted_lists(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, ...]:
    """expert_token_indices, expert_token_offsets and token_index_map by a stable sort, as others build them."""
    flat = ids.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.numel(), dtype=flat.dtype, device=flat.device)
    ends = torch.arange(E + 1, device=flat.device, dtype=flat.dtype)
    offsets = torch.searchsorted(experts, ends, out_int32=True)
    return (order // ids.shape[1]).int(), offsets, place.reshape(ids.shape)


class SortedDispatch:
    """Context manager: the layer builds its lists by `sorted_lists` in place of its own dispatch kernels.

    The lists are equal, as dispatch is a stable sort too; the layer then goes on with those of `ids`, made here
    beforehand, whose GEMM schedule a sort does not give. No plans are made: a sort cannot be traced.
    """

    def __init__(self, ids: torch.Tensor, E: int):
        self.ids, self.E = ids, E

    def __enter__(self):
        from moeblaze_cupy import plans
        from moeblaze_cupy.arrays import Context, Torch
        from moeblaze_cupy.ops import experts

        self.plans, self.max_plans = plans, plans.MAX_PLANS
        plans.MAX_PLANS = 0
        plans.clear()
        self.module, self.own = experts, experts.dispatch
        context = Context(Torch, self.ids.device.index, torch.cuda.current_stream().cuda_stream)
        index = self.own(context, context.describe(self.ids), self.E)
        for name, want in zip(
            ("expert_token_indices", "expert_token_offsets", "token_index_map"),
            sorted_lists(self.ids, self.E),
            strict=True,
        ):
            if not torch.equal(getattr(index, name), want):
                raise RuntimeError(f"bench: SortedDispatch: {name}: expected the lists of a stable sort")

        def dispatch(_, ids, E):
            sorted_lists(ids.owner, E)
            return index

        experts.dispatch = dispatch
        return self

    def __exit__(self, *_):
        self.module.dispatch = self.own
        self.plans.MAX_PLANS = self.max_plans


def dispatch_inputs(case, sets: int, device: str, seed: int = 0) -> list[torch.Tensor]:
    """`sets` different (L, k) id arrays of the case's routing and dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    return [routing(case.L, case.E, case.k, case.routing, generator).to(dtype) for _ in range(sets)]
