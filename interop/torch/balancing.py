"""Losses and the bias step that balance the load of the experts, computed from results of `route` or a `MoE`."""

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.types import RouterSums


def _asked(function: str, sums: RouterSums | None, field: str, name: str) -> torch.Tensor:
    found = getattr(sums, field, None)
    if found is None:
        expected = f"RouterSums with {field}: pass sums=({name},) to route or to MoE"
        raise checks.bad_type(function, "sums", expected, "None" if sums is None else "none of them")
    tensor: torch.Tensor = found
    return tensor


def _counts(function: str, counts: torch.Tensor, experts: int) -> torch.Tensor:
    if not isinstance(counts, torch.Tensor):
        raise checks.bad_type(function, "counts", "a torch tensor", type(counts))
    if counts.dim() not in (1, 2) or counts.shape[-1] != experts:
        raise checks.bad_value(function, "counts", f"shape (S, E) or (E,) with E = {experts}", tuple(counts.shape))
    return counts


def load_balancing_loss(counts: torch.Tensor, sums: RouterSums) -> torch.Tensor:
    """Returns E Σ f q, a scalar: 1 at balance, and E if one expert has all tokens and all of their scores.

    f is an expert's share of the slots and has no gradient. q is its share of the tokens' scores. With S sequences
    the loss is the mean of the losses of each, which is DeepSeek's and Megatron's loss per sequence. That of a sequence
    without tokens is 0.
    counts: (S, E) as the sums, or (E,) for S = 1, of any integer or floating-point dtype: slots of each expert, as
    `moeblaze_cupy.tokens_per_expert` gives them. For a larger batch than this call,
    first add them up over micro-batches, or over ranks by all_reduce.
    sums: `moeblaze_cupy.RouterSums` with score_sums (S, E), from `route` or `MoE` with sums=("softmax",), or another
    score's name.
    Returns float32, or float64 for such logits, differentiable in the logits. Raises TypeError for sums without
    score_sums, and ValueError for counts of another number of experts, or of sequences: counts and sums need the same
    `sequences`.
    Source: Switch Transformers, arXiv 2101.03961, section 2.2, for k experts per token.
    """
    scores = _asked("load_balancing_loss", sums, "score_sums", '"softmax"')
    slots = _counts("load_balancing_loss", counts, scores.shape[1]).detach().to(scores.dtype)
    of_counts = slots.shape[0] if slots.dim() == 2 else 1
    if of_counts != scores.shape[0]:
        expected = (
            f"those of S = {scores.shape[0]} sequences, as the sums (sequences= of tokens_per_expert and of route)"
        )
        raise checks.bad_value("load_balancing_loss", "counts", expected, f"S = {of_counts}")
    slots = slots / slots.sum(dim=-1, keepdim=True).clamp(min=1)
    tokens = scores.detach().sum(dim=1, keepdim=True).clamp(min=1)  # a token's scores add up to 1
    return scores.shape[1] * (slots * scores / tokens).sum(dim=1).mean()


def z_loss(sums: RouterSums, tokens: int | torch.Tensor) -> torch.Tensor:
    """Returns the mean over tokens of the squared log-sum-exp of their logits, a scalar. It keeps logits small.

    sums: `moeblaze_cupy.RouterSums` with z_sums (S,), from `route` or `MoE` with sums=("z",).
    tokens: their number, L without a token_mask. Of none the loss is 0.
    Returns float32, or float64 for such logits, differentiable in the logits. Raises TypeError for sums without z_sums.
    Source: ST-MoE, arXiv 2202.08906, equation 5.
    """
    total = _asked("z_loss", sums, "z_sums", '"z"').sum()
    return total / (tokens.clamp(min=1) if isinstance(tokens, torch.Tensor) else max(tokens, 1))


@torch.no_grad()
def update_bias(bias: torch.Tensor, counts: torch.Tensor, step: float = 1e-3) -> None:
    """Moves each expert's selection bias by `step`, in place: up below the mean load, down above it.

    Call it once per optimizer step, after backward, in which checkpointing has the router choose again.
    bias: (E,) float32, such as the buffer `bias` of MoE(bias=True).
    counts: (S, E) or (E,): slots of each expert since the last step, of all micro-batches and ranks.
    Raises TypeError for None, or a bias that is not float32, as small steps would be lost, and ValueError for counts of
    another number of experts.
    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    if not isinstance(bias, torch.Tensor):
        raise checks.bad_type("update_bias", "bias", "a float32 tensor, as MoE(bias=True) has", f"{bias!r:.60}")
    if bias.dtype != torch.float32:
        raise checks.bad_type("update_bias", "bias", "torch.float32", bias.dtype)
    slots = _counts("update_bias", counts, len(bias)).reshape(-1, len(bias)).sum(dim=0)
    bias += step * torch.sign(slots.sum() - len(bias) * slots)  # integers, which float32 would round
