"""Watches how a model's routers spread tokens over experts in training."""

import math
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.transformers.routing import argument, kind_of, routed_model

Tensor = torch.Tensor

_ENTROPY, _TOKENS, _LARGEST, _COUNTS = range(4)  # where the sums of a layer stand, the last those of its experts
_BYTES = 2**24  # of layers that wait: checkpointing would free them, and with more the host does not bound a step
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


class _Routed(NamedTuple):
    """What a router returned. logits: (..., E). ids: (..., k), or the scores (..., E) of a Llama4Router."""

    layer: int
    router: Any
    logits: Tensor
    ids: Tensor

    def key(self) -> tuple[Any, ...]:
        """Returns what layers that are counted together have in common."""
        logits, top_k = self.logits, getattr(self.router, "top_k", None)
        return type(self.router), top_k, logits.device, logits.dtype, logits.shape, self.ids.shape


class _Compiled:
    """What compiled code counts of a layer. Copies of its router, as peft makes for modules_to_save, share it."""

    def __init__(self, layer: int, sums: Tensor) -> None:
        self.layer, self.sums = layer, sums  # sums: (1, 1, _COUNTS + E)

    def __deepcopy__(self, memo: Any) -> "_Compiled":
        return self


class Monitor:
    """What `monitor` returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, choosers = routed_model("monitor", model)
        for chooser in choosers:
            if chooser.method != "forward" or kind_of(chooser.module) == "JetMoeTopKGating":
                got = f"{chooser.name} of {kind_of(chooser.module)}"
                raise checks.bad_value("monitor", "model", "routers that return logits and ids", got)
        self.layers = tuple(chooser.name for chooser in choosers)
        # A router's last matrix is (E, d), but Ernie's is (1, E). DeepSpeed and FSDP1 leave weights without a shape.
        weights = [[p for p in c.module.parameters() if p.dim() == 2] for c in choosers]
        rows = [len(of_router[-1]) for of_router in weights if of_router]
        self._width = _COUNTS + max(*rows, *(c.num_experts for c in choosers), 0)
        devices = [next((p.device for p in c.module.parameters()), torch.device("cpu")) for c in choosers]
        self._sums = {device: self._zeros(len(devices), device) for device in devices}  # of eager layers
        # Those of compiled layers are apart, because compiled code may copy all of a tensor that it changes. The router
        # holds them, because layers share compiled code only if it finds them by one name.
        self._name = f"_moeblaze_load_{id(self)}"
        self._compiled = [_Compiled(layer, self._zeros(1, device)) for layer, device in enumerate(devices)]
        for chooser, compiled in zip(choosers, self._compiled, strict=True):
            setattr(chooser.module, self._name, compiled)
        self._is_counting = False
        self._outer_calls: list[bool] = []  # whether the calls are counted within which copies of the model run
        self._mask: Tensor | None = None  # (B, T), 0 for padding
        self._kept: list[_Routed] = []  # layers in order that wait to be counted, all alike
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, always_call=True),
            *(chooser.module.register_forward_hook(self._keep) for chooser in choosers),
        ]

    def __deepcopy__(self, memo: Any) -> "Monitor":
        """Returns itself: a copy of a router would have one of the model, with the copies that are there already."""
        return self

    def _zeros(self, rows: int, device: torch.device) -> Tensor:
        """Returns a copy of zeros, which raises in a CUDA graph. Zeros made in one would be set in each replay."""
        return torch.zeros(rows, 1, self._width, dtype=torch.float64, device="cpu").to(device)  # exact for integers

    def close(self) -> None:
        """Removes the hooks from the model. A forward that is under way is not counted."""
        for hook in self._hooks:
            hook.remove()
        for router in self._model.modules():
            vars(router).pop(self._name, None)
        self._is_counting, self._mask, self._kept = False, None, []

    def _before(self, model: Any, args: Any, named: Any) -> None:
        if model is not self._model:  # a copy, which may run within a call of the model
            self._outer_calls.append(self._is_counting)
            self._is_counting = False
            return
        mask = argument(args, named, "attention_mask", 1)
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._is_counting = model.training and torch.is_grad_enabled()
        self._kept = []  # without what an interrupt left

    def _after(self, model: Any, args: Any, out: Any) -> None:
        if model is not self._model:
            self._is_counting = self._outer_calls.pop()
            return
        if self._kept and out is not None:  # it is None if forward raised
            self._count_kept()
        self._is_counting, self._mask, self._kept = False, None, []  # checkpointing computes again, uncounted

    def _keep(self, router: Any, args: Any, out: Any) -> None:
        if not self._is_counting:
            return
        logits, ids = (out[1], out[0]) if kind_of(router) == "Llama4Router" else (out[0], out[2])
        if torch.compiler.is_compiling():  # compiled code fuses what counts a layer
            compiled = getattr(router, self._name)
            if compiled.sums.device != logits.device:
                compiled.sums = compiled.sums.to(logits.device)
            self._count(compiled.sums, _Routed(0, router, logits[None], ids[None]))
            return
        routed = _Routed(getattr(router, self._name).layer, router, logits, ids)
        if self._kept and (self._kept[-1].layer + 1 != routed.layer or self._kept[-1].key() != routed.key()):
            self._count_kept()
        self._kept.append(routed)
        if len(self._kept) * (logits.nbytes + ids.nbytes) > _BYTES:
            self._count_kept()

    @torch.no_grad()
    def _count_kept(self) -> None:
        """Counts layers with the launches of one, because the host takes longer for them than the device."""
        kept, self._kept = self._kept, []
        logits, ids = torch.stack([routed.logits for routed in kept]), torch.stack([routed.ids for routed in kept])
        if logits.device not in self._sums:
            self._sums[logits.device] = self._zeros(len(self.layers), logits.device)
        sums = self._sums[logits.device][kept[0].layer : kept[0].layer + len(kept)]
        self._count(sums, kept[0]._replace(logits=logits, ids=ids))

    @torch.no_grad()
    def _count(self, sums: Tensor, first: _Routed) -> None:
        """Counts n layers. logits: (n, ..., E). ids: (n, ..., k or E). sums: (n, 1, _COUNTS + E)."""
        kind, logits, ids = kind_of(first.router), first.logits.flatten(1, -2), first.ids.flatten(1, -2)
        if kind == "Llama4Router":  # scores are 0 for experts that were not chosen
            ids = ids.topk(first.router.top_k).indices
        number: int | Tensor = logits.shape[1]
        of_shares = logits.float().log() if kind in _PROBABILITIES else logits
        entropy = torch.special.entr(of_shares.softmax(-1, torch.float32))
        ones = torch.ones_like(ids, dtype=torch.float64)
        if self._mask is not None and self._mask.numel() == number:
            is_token = (self._mask != 0).reshape(-1, 1).to(entropy)  # packed batches number their sequences
            logits, entropy, ones = logits * is_token, entropy * is_token, ones * is_token
            number = is_token.sum(dtype=torch.float64)
        entropies, tokens, largest, counts = sums.split_with_sizes([1, 1, 1, sums.shape[-1] - _COUNTS], -1)
        entropies.add_(entropy.sum((1, 2), keepdim=True))
        tokens.add_(number)
        largest.clamp_(min=torch.linalg.vector_norm(logits, torch.inf, (1, 2), keepdim=True))
        counts.scatter_add_(-1, ids.long().reshape(len(ids), 1, -1), ones.reshape(len(ids), 1, -1))

    def read(self, *, group: Any = None, reset: bool = True) -> Load:
        """Returns what was counted and starts anew, with one copy to the host.

        group: a process group, over which every rank reads: counts are summed. The ranks of tensor parallelism see the
        same tokens and count them once each. reset: False goes on counting.
        """
        device = max(self._sums, key=lambda device: device.type != "cpu")  # the model may have moved to a GPU
        held = [compiled.sums for compiled in self._compiled]
        compiled = torch.cat([each.to(device) for each in held])
        parts = torch.cat([compiled, *(each.to(device) for each in self._sums.values())], 1)
        sums, largest = parts.sum(1), parts[..., _LARGEST].amax(1)
        if group is not None:
            torch.distributed.all_reduce(sums, group=group)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        sums[:, _LARGEST] = largest
        sums = sums.cpu()
        if reset:
            for each in (*held, *self._sums.values()):
                each.zero_()
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
