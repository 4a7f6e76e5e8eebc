"""Watches how a model's routers spread tokens over experts in training."""

import math
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.transformers.formula import name_of
from moeblaze_cupy.interop.transformers.routing import Chooser, routed_model

Tensor = torch.Tensor

_ENTROPY, _TOKENS, _LARGEST, _COUNTS = range(4)  # where the sums of a layer stand, the last those of its experts
_PROBABILITIES = ("Gemma4TextRouter", "DiffusionGemmaTextRouter")  # they return these in place of logits


class Load(NamedTuple):
    """What routers did since the last read.

    layers: the names of routers. counts: (layers, E) int64, the slots of each expert. tokens: (layers,) int64. entropy:
    (layers,) float64, the mean of the tokens' softmax over logits, over log E. max_logit: (layers,) float64, absolute.
    """

    layers: tuple[str, ...]
    counts: Tensor
    tokens: Tensor
    entropy: Tensor
    max_logit: Tensor

    def summary(self) -> dict[str, float]:
        """Returns seven numbers for a logger, whatever the model; none if no token was counted.

        max_violation: the largest load of an expert over the mean of its layer, less one, in the worst layer.
        effective_experts: exp of the entropy of a layer's loads, over E; the mean of layers. without_tokens: experts.
        """
        if not bool(self.tokens.any()):
            return {}
        share = self.counts.double() / self.counts.sum(1, keepdim=True).clamp(min=1)
        spread = torch.special.entr(share).sum(1).exp() / self.counts.shape[1]
        return {
            "moe/max_violation": float(share.max()) * self.counts.shape[1] - 1,
            "moe/effective_experts": float(spread.mean()),
            "moe/without_tokens": float((self.counts == 0).sum()),
            "moe/router_entropy": float(self.entropy.mean()),
            "moe/least_router_entropy": float(self.entropy.min()),
            "moe/max_logit": float(self.max_logit.max()),
            "moe/tokens": float(self.tokens.max()),
        }


class Monitor:
    """What `monitor` returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, choosers = routed_model(model)
        for chooser in choosers:
            if chooser.method != "forward" or name_of(type(chooser.module)) == "JetMoeTopKGating":
                got = f"{chooser.name} of {name_of(type(chooser.module))}"
                raise checks.bad_value("monitor", "model", "routers that return logits and ids", got)
        self.layers = tuple(chooser.name for chooser in choosers)
        self._sums = [self._zeros(chooser) for chooser in choosers]  # (_COUNTS + E,) each
        self._is_counting = False
        self._mask: Tensor | None = None  # (B, T), 0 for padding
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, always_call=True),
            *(c.module.register_forward_hook(self._hook(number)) for number, c in enumerate(choosers)),
        ]

    @staticmethod
    def _zeros(chooser: Chooser) -> Tensor:
        parameters = list(chooser.module.parameters())
        rows = [len(parameter) for parameter in parameters if parameter.dim() == 2]  # of a weight: experts
        number = rows[-1] if rows else chooser.num_experts  # DeepSpeed and FSDP1 leave weights without a shape
        device = parameters[-1].device if parameters else None
        return torch.zeros(_COUNTS + number, dtype=torch.float64, device=device)  # exact for integers

    def close(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, args: Any, named: Any) -> None:
        mask = named.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._is_counting = model is self._model and model.training and torch.is_grad_enabled()

    def _after(self, model: Any, args: Any, out: Any) -> None:
        self._is_counting, self._mask = False, None  # what checkpointing computes again is not counted

    def _hook(self, number: int) -> Any:
        def count(router: Any, args: Any, out: Any) -> None:
            if self._is_counting:
                with torch.no_grad():
                    self._count(number, name_of(type(router)), router, out)

        return count

    def _count(self, number: int, kind: str, router: Any, out: Any) -> None:
        if kind == "Llama4Router":  # scores, 0 for experts that were not chosen, and logits
            logits, ids = out[1], out[0].topk(router.top_k, dim=1).indices
        else:
            logits, ids = out[0], out[2].flatten(0, -2)
        logits, sums = logits.flatten(0, -2), self._sums[number]
        if sums.device != logits.device:
            sums = self._sums[number] = sums.to(logits.device)
        mask = self._mask if self._mask is not None and self._mask.numel() == len(logits) else None
        shares = (logits.float().log() if kind in _PROBABILITIES else logits).softmax(-1, torch.float32)
        entropy, ones = torch.special.entr(shares), sums.new_ones(1)
        if mask is not None:
            is_token = mask.flatten().to(shares)[:, None]
            logits, entropy, ones = logits * is_token, entropy * is_token, is_token.double()
        sums[_ENTROPY].add_(entropy.sum())
        sums[_TOKENS].add_(len(logits) if mask is None else ones.sum())
        sums[_LARGEST].clamp_(min=torch.linalg.vector_norm(logits, torch.inf))
        sums[_COUNTS:].index_add_(0, ids.flatten(), ones.expand(ids.shape).flatten())

    def read(self, *, group: Any = None, reset: bool = True) -> Load:
        """Returns what was counted and starts anew, with one copy to the host.

        group: a process group, over which every rank reads: counts are summed. The ranks of tensor parallelism see the
        same tokens and count them once each. reset: False goes on counting.
        """
        device = self._sums[0].device
        sums = torch.nn.utils.rnn.pad_sequence([layer.to(device) for layer in self._sums], batch_first=True)
        if group is not None:
            largest = sums[:, _LARGEST].contiguous()
            torch.distributed.all_reduce(sums, group=group)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
            sums[:, _LARGEST] = largest
        sums = sums.cpu()
        if reset:
            for layer in self._sums:
                layer.zero_()
        tokens, counts = sums[:, _TOKENS], sums[:, _COUNTS:].long()
        entropy = sums[:, _ENTROPY] / tokens.clamp(min=1) / math.log(max(2, counts.shape[1]))
        return Load(self.layers, counts, tokens.long(), entropy, sums[:, _LARGEST])


def monitor(model: torch.nn.Module) -> Monitor:
    """Counts the tokens of each expert of a transformers model from now on, in training, until `close()`.

    `read()` gives the counts. They are kept on the model's device, without waiting for it. Counted are calls in
    training mode with gradients, without what checkpointing computes again, and without padding if the call has an
    attention_mask (B, T). Hooks on the routers count: call `monitor` before the model is compiled.
    Raises ValueError for a model without experts, and for Dbrx and JetMoe, whose routers return no logits and ids.
    """
    return Monitor(model)
