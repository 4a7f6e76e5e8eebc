"""The save policy of each `MoE` of a model, by how many bytes their forwards may keep for backward."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.interop.torch.api import DTYPES, MoE
from moeblaze_cupy.interop.torch.arguments import check_module
from moeblaze_cupy.layer.chunks import Kept
from moeblaze_cupy.types import LayerOptions

#: From the policy whose backward takes the least time to the one that keeps the fewest bytes.
POLICIES = ("minimal", "fp8", "recompute")


class LayerSave(NamedTuple):
    """The policy that `fit_saves` chose for a layer."""

    name: str  #: of the module in its model
    save: str
    nbytes: int  #: what its forwards keep beyond x, one for each name that it has
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: save={self.save!r} keeps {self.nbytes:,} bytes: {self.reason}"


def fit_saves(
    model: torch.nn.Module,
    tokens: int,
    budget: int,
    *,
    policies: Sequence[str] = POLICIES,
    dtype: torch.dtype | None = None,
    report: Callable[[str], object] | None = print,
) -> tuple[LayerSave, ...]:
    """Sets `save` of every `MoE` in a model, so that what all their forwards keep for backward fits in a budget.

    Call it before the first step. It looks at shapes alone. Each layer begins with the policy that keeps the fewest
    bytes. Then all layers in order get the one before that in `policies` while it fits, and so on to the first.
    tokens: the most that each layer gets in a step. budget: bytes of all layers, beyond x and weights in e4m3. The
    chunks of a memory limit add an index list's few bytes for each expert, which are not counted. A module with several
    names counts once for each, as it is called by each.
    policies: of "minimal", "fp8" and "recompute", by falling bytes; without "fp8" no layer rounds a and b to e4m3.
    dtype: of the tokens, under torch.autocast its dtype; None means that of the router.
    report: a function that gets a line for each layer with the reason; None for no lines.
    Returns the policies in the order of the layers. Raises ValueError for a model without `MoE`, for policies that are
    not in this order, for tokens below 0, and for a budget below the least possible, which the message names, and
    TypeError for a dtype that no layer has; nothing is set then.
    """
    check_module("fit_saves", model)
    tokens, budget = checks.integer("fit_saves", "tokens", tokens), checks.integer("fit_saves", "budget", budget)
    if tokens < 0:
        raise checks.bad_value("fit_saves", "tokens", "at least 0", tokens)
    if dtype not in (None, *DTYPES):
        raise checks.bad_type("fit_saves", "dtype", f"None or one of {', '.join(map(str, DTYPES))}", repr(dtype))
    policies = tuple(policies)
    if not policies or policies != tuple(policy for policy in POLICIES if policy in policies):
        raise checks.bad_value("fit_saves", "policies", f"some of {POLICIES}, in this order", policies)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise checks.bad_value("fit_saves", "model", "one with an MoE", f"a {type(model).__name__} without")
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    sizes = [
        {save: names[layer] * kept_bytes(layer, tokens, save, dtype) for save in policies} for layer in layers.values()
    ]
    chosen, left = [policies[-1]] * len(sizes), budget - sum(of[policies[-1]] for of in sizes)
    if left < 0:
        expected = f"at least {budget - left} bytes for {len(sizes)} layers with save={policies[-1]!r}"
        raise checks.bad_value("fit_saves", "budget", expected, budget)
    reasons = ["no other policy is allowed"] * len(sizes)
    for save, kept_by in zip(policies[-2::-1], policies[:0:-1], strict=True):
        for i in [i for i, policy in enumerate(chosen) if policy == kept_by]:
            more = sizes[i][save] - sizes[i][kept_by]
            if more <= left:
                chosen[i], reasons[i], left = save, "backward computes the least", left - more
            else:
                reasons[i] = f"save={save!r} keeps {more:,} bytes more, of {left:,} that are left"
    found = []
    for (name, layer), save, of, reason in zip(layers.items(), chosen, sizes, reasons, strict=True):
        layer.save = save
        found.append(LayerSave(name, save, of[save], reason))
        if report is not None:
            report(str(found[-1]))
    return tuple(found)


def kept_bytes(layer: MoE, tokens: int, save: str, dtype: torch.dtype | None = None) -> int:
    """Returns the bytes that a forward of so many tokens keeps, without x and weights in e4m3.

    dtype: of the tokens; None means that of the router.
    """
    routed, h = layer.router.shape[0], layer._d_hidden
    index = IndexLayout(tokens, layer.k, routed - layer.identity_experts)
    of_rows = str(dtype or layer.router.dtype).removeprefix("torch.")
    ranks = layer.lora_rank, layer.lora_rank
    return Kept.of(index, LayerOptions(layer.activation, save), h, of_rows, ranks).nbytes
