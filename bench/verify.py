"""The layer in float64, expert by expert, and how far a result is from it. A provider that is wrong gets no time.

The reference starts from the same 16-bit inputs and computes in float64 throughout. Up to SAMPLED_ABOVE tokens it
covers every token and every expert. Above, where it would take longer than what is timed, it covers every n-th token
with all of that token's experts, and the weight gradients of SAMPLED_EXPERTS experts over all their tokens.
"""

import torch

from bench.cases import SAMPLED_ABOVE

TOLERANCE = 2e-2  # relative norm; correct bf16 layers are at 3e-3 to 8e-3
FLOAT32_TOLERANCE = 1e-4
SAMPLED_EXPERTS = 8


def activate(first: torch.Tensor, activation: str) -> tuple[torch.Tensor, ...]:
    """act(a) * b, and its derivatives by the columns of `first`: (gate, up), or one."""
    gate, up = first.chunk(2, dim=1) if activation == "swiglu" else (first, None)
    sigmoid = torch.sigmoid(gate)
    silu, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    return (silu, slope) if up is None else (silu * up, slope * up, silu)


def relative_errors(case, inputs: dict, out: torch.Tensor, grads: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference over norm of the reference for "out" and each gradient in `grads`.

    Gradients by the names of `inputs`, in their shapes. Weight gradients are compared expert by expert: a second
    copy of them in float64 would not fit beside the largest layers.
    """
    L, k = inputs["ids"].shape
    step = max(1, -(-L // SAMPLED_ABOVE))  # between the tokens that are compared
    compared = slice(None, None, step)
    whole = range(0, case.E, 1 if step == 1 else max(1, case.E // SAMPLED_EXPERTS))  # experts with all their tokens
    flat = inputs["ids"].reshape(-1)
    by_expert = torch.argsort(flat, stable=True)
    every = torch.arange(case.E + 1, device=flat.device, dtype=flat.dtype)
    offsets = torch.searchsorted(flat[by_expert], every).tolist()
    weights = inputs["weights"].reshape(-1)
    sums = {name: [0.0, 0.0] for name in (*grads, "out")}
    want = {"out": torch.zeros(L, case.d, dtype=torch.float64, device=flat.device)}
    want |= {"x": torch.zeros_like(want["out"])} if "x" in grads else {}
    want |= {"weights": torch.zeros(L * k, dtype=torch.float64, device=flat.device)} if "weights" in grads else {}

    def add(name, got, reference):
        sums[name][0] += float((got.double() - reference).square().sum())
        sums[name][1] += float(reference.square().sum())

    for expert in range(case.E):
        slots = by_expert[offsets[expert] : offsets[expert + 1]]
        if expert not in whole:
            slots = slots[slots // k % step == 0]
        tokens, scale = slots // k, weights[slots].double()[:, None]
        w1, w2 = inputs["w1"][expert].double(), inputs["w2"][expert].double()
        rows = inputs["x"][tokens].double()
        product, *slopes = activate(rows @ w1, case.activation)
        result = product @ w2
        want["out"].index_add_(0, tokens, result * scale)
        if not grads:
            continue
        grad_rows = inputs["grad_out"][tokens].double()
        if "weights" in grads:
            want["weights"][slots] = (grad_rows * result).sum(1)
        grad_product = scale * (grad_rows @ w2.T)
        grad_first = torch.cat([grad_product * slope for slope in slopes], dim=1)
        if "x" in grads:
            want["x"].index_add_(0, tokens, grad_first @ w1.T)
        if "w1" in grads and expert in whole:
            add("w1", grads["w1"][expert], rows.T @ grad_first)
        if "w2" in grads and expert in whole:
            add("w2", grads["w2"][expert], (product * scale).T @ grad_rows)
    for name, reference in want.items():
        got = out if name == "out" else grads[name]
        add(name, got[compared], reference.view(got.shape)[compared])
    return {name: (error / norm) ** 0.5 if norm else error**0.5 for name, (error, norm) in sums.items()}


def problems(errors: dict[str, float], dtype: torch.dtype, tolerance: float | None = None) -> str | None:
    """What is wrong, in words, or None. A NaN is wrong. tolerance: that of the dtype if None."""
    if tolerance is None:
        tolerance = TOLERANCE if dtype in (torch.bfloat16, torch.float16) else FLOAT32_TOLERANCE
    wrong = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= tolerance]
    return f"relative error above {tolerance:g}: {', '.join(wrong)}" if wrong else None
