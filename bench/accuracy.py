"""The accuracy suite's data, the layer in float64 with its router, and measures of an error.

Letters as in the README. A row of a result is its last dimension: a token of out, of the gradients of x, router weights
and logits; an input channel of one expert in w1's gradient; a hidden unit of one expert in w2's.
"""

import math

import torch

from bench import inputs as make
from bench import verify

KINDS = ("gaussian", "trained")
SEEDS = (0, 1)
WRONG = 0.1  # relative norm; correct bf16 layers are an order of magnitude below on either kind of data
OUTLIER_CHANNELS, OUTLIER_GAIN = 512, (20.0, 60.0)  # one channel of so many, and at least two; times unit scale
DEGREES_OF_FREEDOM, MOST_SCALE = 3, 20.0  # of Student's t, and where the scale of a gate column is cut
ZIPF = 1.2
DEAD_LOGIT = -60.0


def layer_inputs(case, kind: str, seed: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """What `bench.inputs.layer_inputs` makes in transposed order, its ids and weights by logits (L, E) float32.

    gaussian: x, grad_out, logits of unit scale, weights so that every product has unit variance.
    trained: the same with what large models show after training. Some channels of x are 20 to 60 times larger. Columns
    of the gate half of w1 are scaled so that gate inputs follow Student's t over all columns. Rows of grad_out have
    log-normal scales. A token draws its experts without replacement, the r-th of them with probability 1/r^1.2, and
    one expert gets no token (if k < E). ids: the k largest logits, ties to the lower id; weights: `router`.
    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"bench: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    made = make.layer_inputs(case, "transposed", seed, dtype)
    generator = torch.Generator(make.device()).manual_seed(seed + 1000)
    options = {"generator": generator, "device": generator.device}
    L, d, h, E, k = case.L, case.d, case.h, case.E, case.k
    logits = torch.randn(L, E, **options)
    if kind == "trained":
        channels = torch.randperm(d, **options)[: max(2, d // OUTLIER_CHANNELS)]
        low, high = OUTLIER_GAIN
        made["x"][:, channels] *= low + (high - low) * torch.rand(len(channels), **options)
        made["grad_out"] *= torch.randn(L, 1, **options).exp()
        if case.first_columns == 2 * h:
            chi_squared = torch.randn(DEGREES_OF_FREEDOM, E, 1, h, **options).square().sum(0)
            made["w1"][:, :, :h] *= (DEGREES_OF_FREEDOM / chi_squared).sqrt().clamp(max=MOST_SCALE)
        ranks = torch.randperm(E, **options) + 1
        # the k largest of Gumbel noise plus log p are k draws without replacement from p
        gumbel = -torch.empty(L, E, device=generator.device).exponential_(generator=generator).log()
        logits = gumbel - ZIPF * ranks.float().log()
        if k < E:
            logits[:, ranks == E] = DEAD_LOGIT
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k].int().contiguous()
    return made | {"logits": logits, "ids": ids, "weights": router(logits, ids)}


def router(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights (L, k) by torch in logits' dtype, differentiable: softmax over all experts, the chosen over their sum."""
    chosen = torch.softmax(logits, dim=1).gather(1, ids.long())
    return chosen / chosen.sum(1, keepdim=True)


def reference(case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """RESULTS in float64 from the same inputs, expert by expert.

    It holds the results, and the float64 copies and products of one expert's tokens at a time.
    """
    x, w1, w2, grad_out = (inputs[name] for name in ("x", "w1", "w2", "grad_out"))
    L, k = inputs["ids"].shape
    ids = inputs["ids"].long()
    # the softmax over all experts, over the sum of the chosen, is the softmax over the chosen
    weights = torch.softmax(inputs["logits"].double().gather(1, ids), dim=1)
    flat, scales = ids.reshape(-1), weights.reshape(-1, 1)
    by_expert = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=case.E).tolist()
    want = {name: torch.zeros(L, case.d, dtype=torch.float64, device=x.device) for name in ("out", "x")}
    want["weights"] = torch.zeros(L * k, dtype=torch.float64, device=x.device)
    want |= {name: torch.zeros(w.shape, dtype=torch.float64, device=x.device) for name, w in (("w1", w1), ("w2", w2))}
    for expert, slots in enumerate(by_expert.split(counts)):
        if not len(slots):
            continue
        tokens, scale = slots // k, scales[slots]
        rows, grad_rows = x[tokens].double(), grad_out[tokens].double()
        first, second = w1[expert].double(), w2[expert].double()
        product, *slopes = verify.activate(rows @ first, case.activation)
        result = product @ second
        want["out"].index_add_(0, tokens, result * scale)
        want["weights"][slots] = (grad_rows * result).sum(1)
        grad_product = (grad_rows * scale) @ second.T
        grad_first = torch.cat([grad_product * slope for slope in slopes], dim=1)
        want["x"].index_add_(0, tokens, grad_first @ first.T)
        want["w1"][expert] = rows.T @ grad_first
        want["w2"][expert] = (product * scale).T @ grad_rows
    grad_weights = want["weights"] = want["weights"].view(L, k)
    at_ids = weights * (grad_weights - (weights * grad_weights).sum(1, keepdim=True))
    want["logits"] = torch.zeros(L, case.E, dtype=torch.float64, device=x.device).scatter_(1, ids, at_ids)
    return want


def results(case, inputs: dict[str, torch.Tensor], provider) -> dict[str, torch.Tensor]:
    """RESULTS of a provider: this package's with its own router, others' with torch's in float32.

    Raises ValueError where a router chose other experts than `inputs` holds.
    """
    logits = inputs["logits"].detach().requires_grad_()
    weights, ids = router(logits, inputs["ids"]), inputs["ids"]
    if provider.is_ours:
        from moeblaze_cupy.interop.torch import route

        weights, ids = route(logits, case.k)
        if not torch.equal(ids, inputs["ids"]):
            raise ValueError(f"bench: route: expected the experts of the {case.k} largest logits, got others")
    layer = provider.build(case, {**inputs, "weights": weights.detach(), "ids": ids})
    found = {"out": layer.forward().detach()} | layer.named(layer.forward_backward())
    (found["logits"],) = torch.autograd.grad(weights, logits, found["weights"].to(weights.dtype))
    return found


def error(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """How far `got` is from `want`, float64 of the same shape, two or three dimensions.

    norm: norm of the difference over that of `want`. row: the largest such quotient of a row whose reference is not
    zero. row_p999: 99.9% of these rows have no larger one, which a single row that nearly cancels does not move.
    zero_rows: how many are zero; wrong_zero_rows: in how many of these `got` is not. A NaN in `got` makes norm and row
    NaN. Raises ValueError for unequal shapes.
    """
    if got.shape != want.shape:
        raise ValueError(f"bench: error: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    parts = zip(got, want, strict=True) if want.dim() == 3 else [(got, want)]  # one at a time bounds the copies' memory
    squares = [((part.double() - exact).square().sum(1), exact.square().sum(1)) for part, exact in parts]
    distances, sizes = (torch.cat(each) for each in zip(*squares, strict=True))
    is_zero = sizes == 0
    rows = (distances / sizes)[~is_zero].sqrt().sort().values  # NaN last
    different, whole = (each.sum().sqrt().item() for each in (distances, sizes))
    norm = different / whole if whole else math.inf if different else 0.0
    found = {"norm": norm, "row": 0.0, "row_p999": 0.0}
    if len(rows):
        found |= {"row": rows[-1].item(), "row_p999": rows[math.ceil(0.999 * len(rows)) - 1].item()}
    counts = {"zero_rows": is_zero.sum().item(), "wrong_zero_rows": (is_zero & (distances != 0)).sum().item()}
    return {name: float(f"{value:.4g}") for name, value in found.items()} | counts


def problems(errors: dict[str, dict[str, float]]) -> str | None:
    """What is wrong, in words, or None. A NaN is wrong, and so is anything but zero where the reference is zero."""
    wrong = [f"{name} {found['norm']:.2g}" for name, found in errors.items() if not found["norm"] <= WRONG]
    said = [f"relative error above {WRONG:g}: {', '.join(wrong)}"] if wrong else []
    said += [f"{found['wrong_zero_rows']} rows of {name} are not zero" for name, found in errors.items()
             if found["wrong_zero_rows"]]  # fmt: skip
    return "; ".join(said) or None
