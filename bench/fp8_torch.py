"""A layer's forward in e4m3 by torch's own products, beside this package's in bench.fp8.

Each token is quantised with a scale of its own, then rows are gathered in the order of experts. Both products are
`torch._scaled_grouped_mm` with a scale for each row and each column of a weight, and bf16 results; act(a) * b is
quantised between them. The steps around the products are fused by torch.compile. torch has no gradient of this product.
"""

from collections.abc import Callable

import torch

from bench import cases, verify

E4M3, LARGEST, LEAST = torch.float8_e4m3fn, 448.0, 2.0**-100


def rows_in_e4m3(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, columns) -> e4m3 of the same shape, and float32 scales (n,)."""
    values = values.float()
    amax = values.abs().amax(1, keepdim=True).clamp(min=LEAST)
    return (values * (LARGEST / amax)).clamp(-LARGEST, LARGEST).to(E4M3), amax.flatten() / LARGEST


def weight_in_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, rows, columns) -> e4m3 of the same shape, whose columns are contiguous, and float32 scales (E, columns)."""
    experts, rows, columns = weight.shape
    stored = torch.empty(experts, columns, rows, device=weight.device, dtype=E4M3)
    scales = torch.empty(experts, columns, device=weight.device)
    for expert in range(experts):  # all of a large layer in float32 would not fit
        stored[expert], scales[expert] = rows_in_e4m3(weight[expert].T)
    return stored.transpose(1, 2), scales


def activated_in_e4m3(first: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    return rows_in_e4m3(verify.activate(first.float(), activation)[0])


def sum_of_slots(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rows (L*k, d), where the slots of a token lie in them and their weights (L, k) -> (L, d) in rows' dtype."""
    return (rows[places].float() * weights[:, :, None]).sum(1).to(rows.dtype)


def available() -> bool:
    return hasattr(torch, "_scaled_grouped_mm")


def forward(case: cases.LayerCase, made: dict[str, torch.Tensor], compiles: bool = True) -> Callable[[], torch.Tensor]:
    """The forward of a case's layer on what `inputs.layer_inputs` made; weights are quantised here."""
    (w1, w1_scales), (w2, w2_scales) = weight_in_e4m3(made["w1"]), weight_in_e4m3(made["w2"])
    x, ids, weights = made["x"], made["ids"], made["weights"]
    every = torch.arange(1, case.E + 1, device=ids.device, dtype=ids.dtype)
    numbers = torch.arange(ids.numel(), device=ids.device)
    fused = [rows_in_e4m3, activated_in_e4m3, sum_of_slots]
    quantise, activate, add = (torch.compile(step) if compiles else step for step in fused)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def call() -> torch.Tensor:
        experts, order = ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(experts, every, out_int32=True)  # of each expert's rows
        tokens = order // case.k
        q, scales = quantise(x)
        rows = q.view(torch.uint8)[tokens].view(E4M3)  # torch has no gather of e4m3
        first = torch._scaled_grouped_mm(rows, w1, scales[tokens], w1_scales, offs=ends, **options)
        y, y_scales = activate(first, case.activation)
        out = torch._scaled_grouped_mm(y, w2, y_scales, w2_scales, offs=ends, **options)
        places = torch.empty_like(order)
        places[order] = numbers
        return add(out, places.view_as(ids), weights)

    return call
