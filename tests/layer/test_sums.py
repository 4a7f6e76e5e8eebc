"""Weight gradients that are summed over ranks, `backward.summed_weights`, with ranks that are made up on one GPU."""

import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.layer import backward_api as backward
from moeblaze_cupy.types import is_gated

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# (L, k, E, d, h, activation): tiles that are whole and not, one expert a rank, experts without tokens, a single row.
SHAPES = {
    "whole": (1024, 2, 16, 256, 512, "swiglu"),
    "edges": (300, 3, 8, 328, 200, "swiglu"),
    "ungated": (777, 1, 8, 264, 136, "relu2"),
    "few_tokens": (3, 2, 16, 128, 256, "swiglu"),
    "square": (640, 4, 8, 576, 192, "swiglu"),
}
DTYPES = {"bfloat16": (torch.bfloat16, torch.float32), "float16": (torch.float16,)}


def relative(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_over_ranks(on_hopper, dtype, shape, ranks, order):
    L, k, E, d, h, activation = SHAPES[shape]
    half, width = getattr(torch, dtype), h * (1 + is_gated(activation))
    torch.manual_seed(ranks)

    def normal(*sizes):
        return torch.randn(sizes, device="cuda").to(half)

    def weight(rows, columns):
        made = normal(E, columns, rows).transpose(1, 2) if order == "transposed" else normal(E, rows, columns)
        return made * rows**-0.5

    x, grad_out, w1, w2 = normal(L, d), normal(L, d), weight(d, width), weight(h, d)
    ids = torch.stack([torch.randperm(E - 1, device="cuda")[:k] for _ in range(L)]).int()  # the last expert has none
    weights = torch.rand(L, k, device="cuda")
    saved = mb.moe_forward(x, ids, weights, w1, w2, activation=activation)[1]
    want = mb.moe_backward(grad_out, saved, needs=("w1", "w2"), keep_saved=True)
    rank, each = ranks // 2, E // ranks
    every = [rank, *(other % ranks for other in range(rank + 1, rank + ranks))]
    for total_dtype in DTYPES[dtype]:
        needs, parts, totals, at, order_of = ("w1", "w2"), {}, {}, {}, []
        for name, full in (("w1", w1), ("w2", w2)):

            def packed(number, to, full=full):
                _, M, N = full.shape
                if order == "transposed":
                    return torch.full((*number, N, M), float("nan"), device="cuda", dtype=to).transpose(-1, -2)
                return torch.full((*number, M, N), float("nan"), device="cuda", dtype=to)

            parts[name] = packed((ranks - 1, each), half)
            parts[name].copy_(torch.randn_like(parts[name], dtype=torch.float32))
            totals[name] = packed((each,), total_dtype)
            at[name] = {other: packed((each,), half) for other in every[1:]}

        def tell(name, at=at, order_of=order_of):
            order_of.append([bool(place.isfinite().all()) for place in at[name].values()])

        def wait(name, totals=totals, order_of=order_of):
            order_of.append([len(order_of) > 1 and bool(totals[name].isnan().all())])

        scale = 1 / 3
        pending = mb.moe_backward_data(grad_out, saved, needs=(), keep_saved=True)[1]
        assert backward.summed_weights(pending, needs, every, scale, totals, parts, at, tell, wait)
        assert len(order_of) == 4 and all(map(all, order_of)), "tell after a store, wait before a sum"
        with pytest.raises(RuntimeError, match="moe_backward_weights: pending: expected gradients"):
            mb.moe_backward_weights(pending)
        # Two roundings to 16 bits: of this rank's gradient, which split-K may sum in another order, and of the sum.
        bound = 2 * {"bfloat16": 2**-9, "float16": 2**-12}[dtype]
        for name in needs:
            gradient = getattr(want, name)
            for other, place in at[name].items():
                rows = gradient[other * each : (other + 1) * each]
                assert relative(place, rows.double()) < bound or not (rows.any() or place.any()), (name, other)
            own = gradient[rank * each : (rank + 1) * each].double()
            expected = scale * (own + parts[name].double().sum(0))
            assert relative(totals[name], expected) < bound, name
