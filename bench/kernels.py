"""The single kernels of a layer on CUDA. The only file of the suites that calls their launches.

Names are those of `gemm/products.py`, `gemm/panels.py` and the paper's gradients: up_fwd and down_fwd (forward),
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
        "down_bwd": x + w2 + 2 * first + hidden,  # reads a, b, writes their gradients and weighted_y_swi
        "down_wgrad": hidden + x + w2,
        "up_wgrad": x + first + w1,
        "up_bwd": first + w1 + out,
    }[entry]
    columns = n if entry.startswith("up") else h
    return Work(2 * R * d * columns, BYTES * elements)


def dense_operands(case, entry: str, device: str = "cuda", dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands of the product, (E, rows, depth) and (E, depth, columns): tokens split evenly over the experts."""
    T = max(1, case.slots // case.E)
    n = case.first_columns

    def normal(*shape):
        return torch.randn(case.E, *shape, device=device, dtype=dtype)

    return {
        "up_fwd": lambda: (normal(T, case.d), normal(n, case.d).transpose(1, 2)),
        "down_fwd": lambda: (normal(T, case.h), normal(case.d, case.h).transpose(1, 2)),
        "down_bwd": lambda: (normal(T, case.d), normal(case.d, case.h)),
        "down_wgrad": lambda: (normal(T, case.d).transpose(1, 2), normal(T, case.h)),
        "up_wgrad": lambda: (normal(T, n).transpose(1, 2), normal(T, case.d)),
        "up_bwd": lambda: (normal(T, n), normal(n, case.d)),
    }[entry]()


def dense_product(case, entry: str, device: str = "cuda"):
    """The product alone through cuBLAS: rows contiguous and split evenly over the experts, no epilogue, no sums."""
    a, b = dense_operands(case, entry, device)
    return lambda: torch.bmm(a, b)


class Kernels:
    """The kernels of one layer with their buffers. `calls[name]()` launches, `error(name)` compares with float64.

    contiguous: a token of its own for every routed row, in expert order and with k = 1, so that the gather reads
    neighbouring rows: section 7.3's comparison. accumulate: weight gradients are added to float32 sums, at first zeros.
    """

    def __init__(
        self,
        case,
        inputs: dict,
        contiguous: bool = False,
        accumulate: bool = False,
        gate_up: str = "halves",
        tf32: bool = False,
    ):
        from moeblaze_cupy.cuda import loader
        from moeblaze_cupy.cuda.runtime import Runtime
        from moeblaze_cupy.dispatch import launches as dispatch
        from moeblaze_cupy.frameworks import Torch
        from moeblaze_cupy.gemm import config as gemm_config
        from moeblaze_cupy.types import DispatchIndices

        self.case, self.inputs, self.accumulate = case, dict(inputs), accumulate
        self.gate_up, self.tf32 = gate_up, tf32
        if contiguous:
            self._spread_rows()
            self.case = case = replace(case, L=case.slots, k=1)
        made, device = self.inputs, inputs["x"].device.index or 0
        R, d, h, n = case.slots, case.d, case.h, case.first_columns

        def new(*shape):
            # random, not zeros: the power limit lets zeros run faster than data
            return torch.randn(*shape, device=made["x"].device, dtype=made["x"].dtype)

        self.limits, self.run = loader.device_limits(device), Runtime.current(Torch, device)
        self.panels, _ = gemm_config.panels(d, R)
        self.first, self.y_swi, self.panel = new(R, n), new(R, h), new(R, self.panels[0][1])
        self.first_grad, self.weighted_y_swi = new(R, n), new(R, h)
        self.grad_w1, self.grad_w2 = (
            torch.zeros_like(made[name], dtype=torch.float32 if accumulate else None) for name in ("w1", "w2")
        )
        self.out = torch.empty_like(made["x"])
        self.row_weights = torch.empty(R, device=made["x"].device, dtype=torch.float32)
        ids = made["ids"]
        described = Torch.describe(ids)
        steps = dispatch.configure(described.layout, case.E, self.limits)
        self.index_layout = steps.index
        lists, copy, self.addresses = dispatch.dispatch(self.run, steps, described.ptr)
        kept = copy.array if copy else ids
        self.index = DispatchIndices(lists.array, kept, steps.index.places, case.E, copy is not None)
        self.calls = self.configured()
        self.results = {
            "up_fwd": lambda: self.y_swi,
            "down_fwd": lambda: self.out,
            "down_bwd": lambda: self.first_grad,
            "down_wgrad": lambda: self.grad_w2,
            "up_wgrad": lambda: self.grad_w1,
            "up_bwd": lambda: self.out,
            "aggregate_out": lambda: self.out,
            "aggregate_dx": lambda: self.out,
        }

    def configured(self) -> dict:
        """Calls by name, of records made now."""
        from moeblaze_cupy.dispatch import launches as dispatch
        from moeblaze_cupy.frameworks import Torch
        from moeblaze_cupy.gemm import square_tiles
        from moeblaze_cupy.gemm.panels import sum_of_rows
        from moeblaze_cupy.gemm.products import gemm, wgrad
        from moeblaze_cupy.layer.backward import configure_backward
        from moeblaze_cupy.layer.forward import configure_forward
        from moeblaze_cupy.rows import aggregation
        from moeblaze_cupy.types import GRADIENTS, BackwardArrays, BackwardOptions, LayerArrays, LayerOptions

        def layout(array):
            return Torch.describe(array).layout

        def address(array):
            return Torch.describe(array).ptr

        run, index, d, activation = self.run, self.addresses, self.case.d, self.case.activation
        names = ("x", "ids", "weights", "w1", "w2", "grad_out")
        x, ids, weights, w1, w2, grad_out = (self.inputs[name] for name in names)
        # save="paper" leaves the product alone, and keep_saved the first layer, so that calls can be repeated
        layer = LayerArrays(layout(x), layout(ids), layout(weights), layout(w1), None, layout(w2))
        options = LayerOptions(activation, "paper", self.gate_up, tf32=self.tf32)
        forward = configure_forward(layer, options, self.limits)
        totals = {"w1": (layout(self.grad_w1),), "w2": (layout(self.grad_w2),)} if self.accumulate else {}
        backward = configure_backward(
            BackwardArrays(layout(grad_out), layer, None, layout(self.first), None),
            options,
            BackwardOptions(GRADIENTS, keep_saved=True),
            tuple(totals.items()),
            self.limits,
            self.index_layout,
        )
        token_index_map, row_weights = index[dispatch.TOKEN_INDEX_MAP], address(self.row_weights)
        x, grad_out, weights, w1, w2 = map(address, (x, grad_out, weights, w1, w2))
        run.launch(backward.weights_by_row, weights, token_index_map, row_weights)
        squares, self.squares = square_tiles.listed(
            run, square_tiles.configure(self.index_layout), self.index_layout, index
        )

        def lists_of(step):
            return squares if step.square else index

        up, down = backward.up.halves(w1), (w2, w2)
        up_gradient = backward.up_gradient.halves(address(self.grad_w1))
        down_gradient = backward.down_gradient.halves(address(self.grad_w2))
        buffers = (self.first, self.y_swi, self.panel, self.first_grad, self.weighted_y_swi, self.out)
        first, y_swi, panel, first_grad, weighted_y_swi, out = map(address, buffers)

        def down_bwd():
            self.partial_sums = gemm(
                run, backward.down_bwd, index, grad_out, down, first_layer=first, first_layer_grad=first_grad,
                result=weighted_y_swi, weights=row_weights,
            )  # fmt: skip

        def aggregate(weights_dtype, scale):
            shape, dtype = forward.dispatch.index, forward.dtype
            sums = [aggregation.aggregate(shape, dtype, weights_dtype, d, *part, part[1]) for part in self.panels]

            def call():
                for step in sums:
                    run.launch(step, panel, token_index_map, scale, out)

            return call

        return {
            "up_fwd": lambda: gemm(
                run, forward.up_fwd, lists_of(forward.up_fwd), x, up, first_layer=first, result=y_swi
            ),
            "down_fwd": lambda: sum_of_rows(
                run, forward.down_fwd, lists_of(forward.down_fwd), y_swi, down, weights, out
            ),
            "down_bwd": down_bwd,
            "down_wgrad": lambda: wgrad(run, backward.down_wgrad, index, weighted_y_swi, grad_out, down_gradient),
            "up_wgrad": lambda: wgrad(run, backward.up_wgrad, index, x, first_grad, up_gradient),
            "up_bwd": lambda: sum_of_rows(run, backward.up_bwd, lists_of(backward.up_bwd), first_grad, up, 0, out),
            "aggregate_out": aggregate(str(self.inputs["weights"].dtype).removeprefix("torch."), weights),
            "aggregate_dx": aggregate(None, 0),
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
            return self.weighted_y_swi[rows].double().T @ grad_out
        if name == "up_wgrad":
            return x.T @ self.first_grad[rows].double()
        # the weight of a row: the slot of its token whose place in expert order is this row
        places = self.index.token_index_map[tokens]
        row_numbers = torch.arange(rows.start, rows.stop, device=places.device)[:, None]
        scale = (self.inputs["weights"][tokens].double() * (places == row_numbers)).sum(1, keepdim=True)
        if name == "down_fwd":
            return scale * (self.y_swi[rows].double() @ w2)
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
    beforehand, whose GEMM schedule a sort does not give.
    """

    def __init__(self, ids: torch.Tensor, E: int):
        self.ids, self.E = ids, E

    def __enter__(self):
        from moeblaze_cupy import build_dispatch
        from moeblaze_cupy.dispatch import launches as dispatch
        from moeblaze_cupy.frameworks import Buffer

        index = build_dispatch(self.ids, self.E)
        for name, want in zip(
            ("expert_token_indices", "expert_token_offsets", "token_index_map"),
            sorted_lists(self.ids, self.E),
            strict=True,
        ):
            if not torch.equal(getattr(index, name), want):
                raise RuntimeError(f"bench: SortedDispatch: {name}: expected the lists of a stable sort")
        lists = Buffer(index.lists, index.lists.data_ptr())
        copy = Buffer(index.ids, index.ids.data_ptr()) if index.ids_copied else None

        def sort(_run, steps, *_):
            sorted_lists(self.ids, self.E)
            return lists, copy, steps.index.addresses(lists.ptr)

        self.module, self.own, dispatch.dispatch = dispatch, dispatch.dispatch, sort
        return self

    def __exit__(self, *_):
        self.module.dispatch = self.own


def dispatch_inputs(case, sets: int, device: str, seed: int = 0) -> list[torch.Tensor]:
    """`sets` different (L, k) id arrays of the case's routing and dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    return [routing(case.L, case.E, case.k, case.routing, generator).to(dtype) for _ in range(sets)]
