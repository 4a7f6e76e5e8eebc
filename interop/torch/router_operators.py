"""The router as torch operators; see `torch_ops`, whose rules these follow."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy import checks
from moeblaze_cupy.interop.torch.schema import concrete, declared, define, describe, nothing, split
from moeblaze_cupy.router import options as router_options
from moeblaze_cupy.router.options import RouterOptions
from moeblaze_cupy.types import SHARES

Tensor = torch.Tensor


class Routing(NamedTuple):
    """The router's tensors."""

    logits: Tensor
    bias: Tensor | None
    ids: Tensor | None
    token_offsets: Tensor | None
    token_mask: Tensor | None
    sequences: Tensor | None

    def present(self, but: str = "") -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None and name != but}


# Tensors of a call that the router's backward reads beside the returned weights and ids.
READ_BY_ROUTER = ("logits", "token_offsets", "token_mask", "sequences")
ROUTER_SUMS = ("score_sums", "z_sums", "entropy_sums")


def _router_options(options: RouterOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that `route` takes beside these tensors, without sequences if those are a tensor."""
    named = options._asdict()
    if "sequences" in given:
        del named["sequences"]
    return named


def _route(*arguments: Any) -> tuple[Tensor, ...]:
    routing, k, options = split(arguments, Routing, 1, RouterOptions)
    given = routing.present()
    with torch.no_grad():
        weights, ids, *sums = mb.route(k=k, **given, **_router_options(options, given))
    if routing.ids is not None and ids.data_ptr() == routing.ids.data_ptr():
        ids = ids.clone()  # an operator may not return memory that it was given
    made = tuple(sums[0]) if sums else (None,) * len(ROUTER_SUMS)
    return weights, ids, *(nothing(weights) if total is None else total for total in made)


def _checked_router_options(function: str, options: RouterOptions) -> RouterOptions:
    sequences = None if options.sequences is None else concrete(options.sequences)
    return router_options.of(function, *options._replace(sequences=sequences))


def asked_sums(names: Sequence[str]) -> tuple[bool, ...]:
    """Returns those of ROUTER_SUMS that these names of `route`'s argument sums ask for."""
    return any(name in names for name in SHARES), "z" in names, "entropy" in names


def _sums_shapes(options: RouterOptions, given: Mapping[str, Any], E: Any) -> tuple[tuple[Any, ...], ...]:
    """Returns the shapes of ROUTER_SUMS, (0,) for a sum that is not asked for."""
    S = given["sequences"].shape[0] - 1 if "sequences" in given else options.sequences
    asked = zip(((S, E), (S,), (S,)), asked_sums(options.sums), strict=True)
    return tuple(shape if wanted else (0,) for shape, wanted in asked)


def _fake_route(*arguments: Any) -> tuple[Tensor, ...]:
    routing, k, options = split(arguments, Routing, 1, RouterOptions)
    given = routing.present()
    described = {name: describe(tensor) for name, tensor in given.items()}
    checks.same_device("route", **described)
    router_options.forward("route", described, k, _checked_router_options("route", options))
    logits = routing.logits
    shape = (logits.shape[0], k) if routing.ids is None else routing.ids.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    sums = _sums_shapes(options, given, logits.shape[1])
    ids = logits.new_empty(shape, dtype=torch.int32)
    return logits.new_empty(shape, dtype=wide), ids, *(logits.new_empty(s, dtype=wide) for s in sums)


class _RouterGrads(NamedTuple):
    grad_weights: Tensor
    weights: Tensor
    chosen: Tensor
    grad_score_sums: Tensor | None
    grad_z_sums: Tensor | None
    grad_entropy_sums: Tensor | None


def _router_backward(arguments: Sequence[Any]) -> tuple[dict[str, Any], RouterOptions]:
    """Returns the tensors of a call of `route_backward` by name, and its options."""
    grads, *read, options = split(arguments, _RouterGrads, len(READ_BY_ROUTER), RouterOptions)
    given = {**grads._asdict(), **dict(zip(READ_BY_ROUTER, read, strict=True))}
    given["ids"] = given.pop("chosen")
    return {name: tensor for name, tensor in given.items() if tensor is not None}, options


def _route_bwd(*arguments: Any) -> Tensor:
    given, options = _router_backward(arguments)
    with torch.no_grad():
        grad: Tensor = mb.route_backward(**given, **_router_options(options, given))
    return grad


def _fake_route_bwd(*arguments: Any) -> Tensor:
    given, options = _router_backward(arguments)
    described = {name: describe(tensor) for name, tensor in given.items()}
    router_options.backward("route_backward", described, _checked_router_options("route_backward", options))
    logits: Tensor = given["logits"]
    return logits.new_empty(logits.shape)


_router = declared(RouterOptions).replace("SymInt? sequences", "SymInt? num_sequences")
define(
    "route",
    [declared(Routing), "int? k", _router],
    f"({', '.join(['Tensor'] * (2 + len(ROUTER_SUMS)))})",
    _route,
    _fake_route,
)
define(
    "route_bwd",
    [declared(_RouterGrads), declared(Routing, READ_BY_ROUTER), _router],
    "Tensor",
    _route_bwd,
    _fake_route_bwd,
)
route, route_bwd = torch.ops.moeblaze.route.default, torch.ops.moeblaze.route_bwd.default
