"""DeepGEMM's grouped products of an expert's rows, in bf16, for the suite grouped_gemm.

Rows lie in the order of experts. Each expert's start at a multiple of DeepGEMM's alignment, and rows of zeros, which
belong to no expert, fill what is between. This layout is made here, outside of the time. Products have no epilogue and
no sums; weight gradients are added to float32 sums, at first zeros, because DeepGEMM has no others.
"""

import importlib

import torch

from bench.kernels import WGRADS
from bench.peers import Peer


class Product:
    """One product, by its name in bench/kernels.py: `call()` launches, `error()` compares its first result with
    float64, over the first and the last expert that have rows."""

    def __init__(self, case, inputs: dict, entry: str):
        module = importlib.import_module("deep_gemm")
        alignment = module.get_theoretical_mk_alignment_for_contiguous_layout()
        module.set_mk_alignment_for_contiguous_layout(alignment)
        experts, order = inputs["ids"].reshape(-1).long().sort(stable=True)
        counts = torch.bincount(experts, minlength=case.E)
        padded = (counts + alignment - 1) // alignment * alignment
        skipped = (padded - counts).cumsum(0) - (padded - counts)  # rows of zeros ahead of each expert
        places = torch.arange(len(order), device=order.device) + skipped[experts]
        sizes, ends = padded.tolist(), padded.cumsum(0).tolist()

        def by_expert(rows: torch.Tensor) -> torch.Tensor:
            return rows.new_zeros(ends[-1], rows.shape[1]).index_copy_(0, places, rows)

        def made(columns: int) -> torch.Tensor:
            return by_expert(torch.randn(len(order), columns, device=order.device, dtype=inputs["x"].dtype))

        def given(name: str) -> torch.Tensor:
            return by_expert(inputs[name][order // case.k])

        w1, w2 = inputs["w1"], inputs["w2"]
        # rows by weights as (E, columns, depth), or rows by rows, of which (E, columns of a, columns of b) is the sum
        self.a, self.b = {
            "up_fwd": lambda: (given("x"), w1.transpose(1, 2)),
            "down_fwd": lambda: (made(case.h), w2.transpose(1, 2)),
            "down_bwd": lambda: (given("grad_out"), w2),
            "up_bwd": lambda: (made(case.first_columns), w1),
            "down_wgrad": lambda: (given("grad_out"), made(case.h)),
            "up_wgrad": lambda: (made(case.first_columns), given("x")),
        }[entry]()
        self.is_wgrad = entry in WGRADS
        if self.is_wgrad:
            a, b, groups = self.a, self.b, padded.int()
            self.result = result = a.new_zeros(case.E, a.shape[1], b.shape[1], dtype=torch.float32)
            self.call = lambda: module.k_grouped_bf16_gemm_tn_contiguous(a, b, result, sizes, groups, result)
        else:
            groups = torch.full((ends[-1],), -1, device=order.device, dtype=torch.int32)
            groups[places] = experts.int()
            self.result = self.a.new_empty(ends[-1], self.b.shape[1])
            arguments = self.a, self.b, self.result, groups
            self.call = lambda: module.m_grouped_bf16_gemm_nt_contiguous(*arguments)
        self.rows = {int(expert): places[experts == expert] for expert in (experts[0], experts[-1])}

    def error(self) -> float:
        difference = norm = 0.0
        for expert, rows in self.rows.items():
            a = self.a[rows].double()
            b = (self.b[rows] if self.is_wgrad else self.b[expert].T).double()
            want, got = (a.T @ b, self.result[expert]) if self.is_wgrad else (a @ b, self.result[rows])
            difference += float((got.double() - want).square().sum())
            norm += float(want.square().sum())
        return (difference / norm) ** 0.5


def _refuses(case) -> str | None:
    if torch.cuda.get_device_capability()[0] < 9:
        return "needs Hopper or later"
    return "needs d and h in multiples of 64" if case.d % 64 or case.h % 64 else None


DEEP_GEMM = Peer("deep_gemm", "deep_gemm", "build https://github.com/deepseek-ai/DeepGEMM", Product, _refuses)
