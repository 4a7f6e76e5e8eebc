"""Who is timed on a layer: this package by tier and save policy, the cuBLAS bound, torch, and the peers.

A provider builds a `Layer` from a case and its inputs. Dispatch belongs to the layer, the router does not.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from bench import inputs as make
from bench import peers
from bench.layer import Layer
from moeblaze_cupy.cuda import runtime


class Ours(Layer):
    """`interop.torch.moe` with a save policy and further options."""

    def __init__(self, case, inputs: dict, save: str, **options):
        from moeblaze_cupy.interop.torch import moe

        super().__init__(inputs, [inputs[name] for name in ("x", "weights", "w1", "w2")])
        self.moe, self.options = moe, {"activation": case.activation, "save": save, **options}

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        return self.moe(x, self.inputs["ids"], weights, w1, w2, **self.options)


class _Bound(Layer):
    """The layer's dense products alone through cuBLAS, tokens split evenly: no routing, no activation, no autograd.

    forward has the two products, forward_backward those and the four of their gradients.
    """

    def __init__(self, case, inputs: dict):
        T = max(1, case.slots // case.E)

        def normal(n):
            return torch.randn(case.E, T, n, device=inputs["x"].device, dtype=inputs["x"].dtype)

        super().__init__(inputs, [])
        self.x, self.product, self.first = normal(case.d), normal(case.h), normal(case.first_columns)
        self.w1, self.w2 = inputs["w1"], inputs["w2"]

    def forward(self) -> torch.Tensor:
        torch.bmm(self.x, self.w1)
        return torch.bmm(self.product, self.w2)

    def forward_backward(self) -> tuple:
        self.forward()
        torch.bmm(self.x, self.w2.transpose(1, 2))
        torch.bmm(self.product.transpose(1, 2), self.x)
        torch.bmm(self.first, self.w1.transpose(1, 2))
        torch.bmm(self.x.transpose(1, 2), self.first)
        return ()


class _BoundWithTraffic(Layer):
    """The bound's products while another stream copies as many bytes as a layer reads and writes beyond them.

    With R = L*k: act(a) * b is written, and for k > 1 rows are read for their sums, which are written; with backward a
    and b are read, their gradients written, the weighted product written in place of dA, and gradients of x summed. It
    shows what such traffic costs that runs beside products. It is no bound, as copies wait for multiprocessors that
    cuBLAS has taken.
    """

    PIECES = 8

    def __init__(self, case, inputs: dict):
        super().__init__(inputs, [])
        self.bound = _Bound(case, inputs)
        sums = (case.slots + case.L) * case.d if case.k > 1 else 0
        forward = case.slots * case.h + sums
        moved = {"forward": forward, "forward_backward": forward + 2 * case.slots * case.first_columns + sums}
        self.copied = {what: max(1, elements // 2 // self.PIECES) for what, elements in moved.items()}
        # not zeros: the power limit lets zeros be copied faster than data; all of it, which the L2 cache does not hold
        elements = self.PIECES * max(self.copied.values())
        self.source = torch.randn(elements, device=inputs["x"].device, dtype=inputs["x"].dtype)
        self.target = torch.empty_like(self.source)
        self.stream = torch.cuda.Stream() if self.source.is_cuda else None

    def _copy(self, what: str) -> None:
        size = self.copied[what]
        for first in range(0, self.PIECES * size, size):
            self.target[first : first + size].copy_(self.source[first : first + size])

    def _with_copies(self, what: str):
        products = getattr(self.bound, what)
        if self.stream is None:
            self._copy(what)
            return products()
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self._copy(what)
        result = products()
        main.wait_stream(self.stream)
        return result

    def forward(self) -> torch.Tensor:
        return self._with_copies("forward")

    def forward_backward(self) -> tuple:
        return self._with_copies("forward_backward")


def activated(first: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(first)
    gate, up = first.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Routed(Layer):
    """Tokens copied into a routed buffer by a stable sort, experts over it, results added up per token.

    grouped: both products through torch's grouped_mm. Else a loop over the experts, one cuBLAS product each, which
    has to read the experts' counts back: what the paper calls conventional.
    """

    def __init__(self, case, inputs: dict, grouped: bool):
        super().__init__(inputs, [inputs[name] for name in ("x", "weights", "w1", "w2")])
        self.case, self.grouped = case, grouped

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        return over_routed_rows(x, self.inputs["ids"], weights, w1, w2, self.case.activation, self.grouped)


def over_routed_rows(x, ids, weights, w1, w2, activation: str = "swiglu", grouped: bool = True) -> torch.Tensor:
    """out (L, d) as of `_Routed`, for ids (L, k)."""
    experts, order = torch.sort(ids.reshape(-1), stable=True)
    every = torch.arange(1, len(w1) + 1, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(experts, every, out_int32=True)
    products = grouped_mm if grouped else _products_in_turn
    first = products(x[order // ids.shape[1]], w1, ends)
    rows = products(activated(first, activation), w2, ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    slots = rows[back].view(*ids.shape, -1)
    return (slots * weights[:, :, None].to(slots.dtype)).sum(1)


def _products_in_turn(rows, weight, ends):
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ weight[e] for e, part in enumerate(rows.split(counts))])


class _Composition(Layer):
    """The layer as transformers has it in plain torch operations, with float32 router weights, for errors beside it.

    eager: a loop over the experts, whose weighted results are added to the tokens' rows in x's dtype.
    eager_fp32: the same, added in float32 and rounded once.
    grouped: routed rows in a buffer, torch's grouped products, the weighted results summed in float32.
    """

    def __init__(self, case, inputs: dict, how: str):
        super().__init__(inputs, [inputs[name] for name in ("x", "weights", "w1", "w2")])
        self.case, self.how = case, how

    def forward(self) -> torch.Tensor:
        flat = self.inputs["ids"].reshape(-1)
        experts, order = torch.sort(flat, stable=True)
        return self._grouped(experts, order) if self.how == "grouped" else self._eager(experts, order)

    def _eager(self, experts, order):
        x, weights, w1, w2 = self.leaves
        counts = torch.bincount(experts, minlength=self.case.E).tolist()
        out = torch.zeros_like(x, dtype=x.dtype if self.how == "eager" else torch.float32)
        for expert, slots in enumerate(order.split(counts)):
            if len(slots):
                tokens = slots // self.case.k
                rows = activated(x[tokens] @ w1[expert], self.case.activation) @ w2[expert]
                rows = rows * weights.reshape(-1)[slots, None]
                out.index_add_(0, tokens, rows.to(out.dtype))
        return out.to(x.dtype)

    def _grouped(self, experts, order):
        x, weights, w1, w2 = self.leaves
        case = self.case
        every = torch.arange(1, case.E + 1, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, every, out_int32=True)
        product = activated(grouped_mm(x[order // case.k], w1, ends), case.activation)
        rows = grouped_mm(product, w2, ends) * weights.reshape(-1)[order, None]
        return rows[order.argsort()].view(case.L, case.k, case.d).sum(1).to(x.dtype)


def grouped_mm(rows, weight, ends):
    """torch's grouped product by its public name where there is one (2.10 on)."""
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    return product(rows, weight, offs=ends)


@dataclass(frozen=True)
class Provider:
    """`build(case, inputs)` makes a Layer; `missing()` says what to install, or None; `refuses(case)` why not.

    orders: memory orders of the weights that it reads without a copy. checked: its results can be compared.
    environment: set while it is built and runs.
    """

    name: str
    build: Callable[..., Layer]
    missing: Callable[[], str | None] = lambda: None
    refuses: Callable[[object], str | None] = lambda case: None
    orders: tuple[str, ...] = ("transposed",)
    checked: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("moeblaze")

    @contextmanager
    def active(self):
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        self._forget()
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._forget()

    def _forget(self) -> None:
        """A layout's launches are those of the tier that was forced when it was new."""
        if "MOEBLAZE_TIER" in self.environment:
            runtime.forget()


def _lacks_grouped_mm() -> str | None:
    return None if hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm") else "needs torch 2.8 or later"


def _lacks_cupy() -> str | None:
    """This package on CUDA needs CuPy; on the CPU it runs on NumPy."""
    if not make.has_gpu():
        return None
    from moeblaze_cupy.cuda import loader

    try:
        loader.import_cupy()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


_BOTH = ("transposed", "row")


def _ours(name: str, save: str, orders=("transposed",), checked: bool = True, **environment: str) -> Provider:
    return Provider(
        name, lambda case, x: Ours(case, x, save), _lacks_cupy, orders=orders, checked=checked, environment=environment
    )  # fmt: skip


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cublas_bound", _Bound, orders=_BOTH, checked=False),
        Provider("cublas_and_traffic", _BoundWithTraffic, orders=_BOTH, checked=False),
        _ours("moeblaze", "minimal", _BOTH),
        _ours("moeblaze_recompute", "recompute"),
        _ours("moeblaze_paper", "paper"),
        _ours("moeblaze_save_fp8", "fp8", checked=False),
        _ours("moeblaze_sm80", "minimal", MOEBLAZE_TIER="sm80"),
        _ours("moeblaze_sm80_recompute", "recompute", MOEBLAZE_TIER="sm80"),
        _ours("moeblaze_sm80_paper", "paper", MOEBLAZE_TIER="sm80"),
        Provider("torch_grouped_mm", lambda case, x: _Routed(case, x, True), _lacks_grouped_mm),
        Provider("torch_routed", lambda case, x: _Routed(case, x, False)),
        Provider("torch_eager", lambda case, x: _Composition(case, x, "eager")),
        Provider("torch_eager_fp32", lambda case, x: _Composition(case, x, "eager_fp32")),
        Provider("torch_grouped_fp32", lambda case, x: _Composition(case, x, "grouped"), _lacks_grouped_mm),
        *(
            Provider(peer.name, peer.build, peer.missing, peer.refuses)
            for peer in peers.PEERS
        ),
    )
}  # fmt: skip

GROUPS = {
    "quick": ("cublas_bound", "moeblaze"),
    "ours": ("cublas_bound", "moeblaze", "moeblaze_recompute", "moeblaze_paper", "moeblaze_sm80"),
    "torch": ("torch_grouped_mm", "torch_routed"),
    "accuracy": (
        *("moeblaze", "moeblaze_recompute", "moeblaze_paper"),
        *("moeblaze_sm80", "moeblaze_sm80_recompute", "moeblaze_sm80_paper"),
        *("torch_eager", "torch_eager_fp32", "torch_grouped_fp32", "sonicmoe"),
    ),
    "peers": tuple(peer.name for peer in peers.PEERS),
}


def select(names: str | None, default: str) -> list[str]:
    """Provider names from a comma-separated list of providers and groups. The bound comes first: others' share of it
    is computed from its row. Raises ValueError for a name that is neither."""
    chosen: list[str] = []
    for name in (names or default).split(","):
        if name not in GROUPS and name not in PROVIDERS:
            known = ", ".join((*GROUPS, *PROVIDERS))
            raise ValueError(f"bench: --provider: expected names among {known}; got {name!r}")
        chosen += GROUPS.get(name, (name,))
    return sorted(dict.fromkeys(chosen), key=lambda name: name != "cublas_bound")
