"""The MoE layer with its experts on many GPUs, as one function of autograd, so that exchanges and products overlap.

In forward the sizes, or the rows, travel while a shared expert is launched. In backward the gradient of x travels back
while the gradients of the experts' weights are computed, except with route "pull", whose last kernels store it there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import Replicate

import moeblaze_cupy as mb
from moeblaze_cupy import checks
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.parallel import collectives
from moeblaze_cupy.interop.parallel.exchanges import ExpertGroup, PendingExchange, Route, required
from moeblaze_cupy.interop.parallel.routes import Rows
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import private as torch_private
from moeblaze_cupy.interop.torch import quantised as torch_quantised
from moeblaze_cupy.interop.torch.autograd import (
    MainGrad,
    first_derivatives_only,
    main_grads,
    record_inputs,
    stand_in,
    waited,
)
from moeblaze_cupy.interop.torch.operators import count_beside_operators
from moeblaze_cupy.interop.torch.sums import expect_gathered
from moeblaze_cupy.layer.api import LayerExtras, values_and_scales
from moeblaze_cupy.layer.api import forward as layer_forward
from moeblaze_cupy.layer.backward_api import BackwardExtras, described_by_name, run_backward
from moeblaze_cupy.lora import checks as lora_checks
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.types import (
    FACTORS,
    SAVE_POLICIES,
    Activation,
    Fp8Rows,
    Fp8Weights,
    Gradients,
    LayerArrays,
    LayerOptions,
    Lora,
    LoraRows,
    QuantizedWeight,
    SavedForBackward,
    is_gated,
    one_or_pair,
    pair,
    present,
)

Tensor = torch.Tensor
Pieces = list[tuple[int, int, int | None]]  # first row, last row, bound of slots
_NO_ARRAYS = LayerArrays(*[None] * len(LayerArrays._fields))


def _check_arguments(
    layer: LayerArrays,
    options: LayerOptions,
    experts: ExpertGroup,
    fp8_weights: Any,
    row_precision: Any,
    factors: Sequence[Any],
) -> None:
    """Makes the layer's own checks before any rank waits for another. factors: of lora, if it is given."""
    function, precision, (x, ids, weights, gate, up, w2, *_) = "expert_parallel_moe", options.precision, layer
    frozen, parts = layer.frozen, _parts_of(layer)
    checks.activation(function, options.activation)
    checks.one_of(function, "save", options.save, SAVE_POLICIES)
    columns = "2h" if up is None and is_gated(options.activation) else "h"
    first = experts.rank * experts.local_experts
    of_experts = (("w1", gate, f"d, {columns}"), ("w1[1]", up, "d, h"), ("w2", w2, "h, d"))
    of_lora = {name: factor for name, factor in zip(lora_checks.NAMES, factors, strict=False) if factor is not None}
    for name, tensor in (*(of[:2] for of in of_experts), *parts.items(), *of_lora.items()):
        if name in frozen or (tensor is None and name == "w1[1]"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: {name}: expected a torch tensor, got {type(tensor)}")
        if hasattr(tensor, "to_local"):
            raise ValueError(f"{function}: {name}: expected this rank's tensor, got a DTensor; pass .to_local()")
        if tensor.device != x.device:
            raise TypeError(f"{function}: {name}: expected x's device {x.device}, got {tensor.device}")
    for name, weight, letters in of_experts:
        if weight is None:
            continue
        sizes = weight.shape if isinstance(weight.shape, tuple) else ()  # QuantizedWeight may hold anything
        if len(sizes) != 3 or sizes[0] != experts.local_experts:
            last = first + experts.local_experts - 1
            expected = f"the ({experts.local_experts}, {letters}) of this rank's experts {first}..{last}"
            raise checks.bad_value(function, name, expected, tuple(sizes) or weight.shape)
        if name not in frozen and weight.dtype != x.dtype:
            raise TypeError(f"{function}: {name}: expected x's {x.dtype}, got {weight.dtype}")
    named = {"x": x, "ids": ids, "weights": weights, "w1": gate, "w1[1]": up, "w2": w2, **of_lora}
    named |= dict.fromkeys(frozen) | parts
    described = described_by_name(function, arrays.Torch, named)
    for name in ("x", "ids", "weights"):  # these travel packed
        described[name].strides = (described[name].shape[1], 1)
    for name, of_name in frozen.items():
        quantised_checks.weight(function, name, of_name, described)
        described[name] = quantised_checks.decoded(of_name, described[f"{name}.data"])
    arguments = LayerArrays(*map(described.get, list(named)[:6]))
    checks.layer(function, arguments, options._replace(precision=None))
    if factors:
        lora_checks.layer(function, arguments, options, [described.get(name) for name in lora_checks.NAMES])
    of_fp8 = [arrays.Torch.describe(array) for array in fp8_checks.arrays_of(function, precision, fp8_weights)]
    fp8_checks.row_precision(function, row_precision, precision, bool(factors))
    fp8_checks.wgrad(function, options, described["w2"].shape[1], factors=bool(factors), packed=bool(frozen))
    if precision is not None:
        limits = loader.device_limits(x.device.index) if x.is_cuda else None
        order = None if fp8_weights is None else fp8_weights.gate_up
        of_layer = described["x"], described["w2"], options.activation, "halves"
        fp8_checks.layer(function, *of_layer, {}, of_fp8, order, limits)


def _check_forms(
    w1: tuple[Any, ...], frozen: Mapping[str, Any], lora: Lora | None, products: "Fp8Products", accumulate: Any
) -> None:
    """Checks which forms of weights and options go together. w1: one weight or two. frozen: of `LayerArrays`."""
    function = "expert_parallel_moe"
    if len(w1) not in (1, 2):
        raise ValueError(f"{function}: w1: expected one tensor or a pair, got {len(w1)} tensors")
    if len(w1) == 2 and "w1" in frozen:
        raise checks.bad_type(function, "w1", "tensors in a pair, or one QuantizedWeight of both", "a pair with one")
    if frozen and products.precision is not None:
        quantised_checks.in_e4m3(function, frozen)
        if products.given is not None:
            raise checks.bad_value(function, "fp8_weights", "None with QuantizedWeight", type(products.given))
    if lora is not None:
        lora_checks.given(function, lora)
    if accumulate and (frozen or lora is not None):
        expected = "False with lora or QuantizedWeight"
        raise checks.bad_value(function, "accumulate_into_main_grad", expected, repr(accumulate))


def _check_shared(beside: Any, tokens: Tensor, x: Tensor) -> None:
    """Checks what `shared` gave for these tokens. x: the same in the layer's dtype, which autocast may change."""
    if not isinstance(beside, Tensor):
        raise checks.bad_type("expert_parallel_moe", "shared", "a function that returns a tensor", type(beside))
    if beside.shape != tokens.shape or beside.device != x.device or beside.dtype not in (tokens.dtype, x.dtype):
        expected = f"a result of x's shape, dtype and device, {tuple(tokens.shape)} {tokens.dtype} on {tokens.device}"
        got = f"{tuple(beside.shape)} {beside.dtype} on {beside.device}"
        raise checks.bad_value("expert_parallel_moe", "shared", expected, got)


def _parts_of(layer: LayerArrays) -> dict[str, Any]:
    """Returns the tensors of frozen weights by argument name."""
    of_weights = (quantised_checks.parts_of("expert_parallel_moe", *of) for of in layer.frozen.items())
    return {name: part for parts in of_weights for name, part in parts.items()}


def _part(rows: Rows, part: slice) -> Rows:
    return rows.part(part) if isinstance(rows, Fp8Rows) else rows[part]


def _pieces(route: Route, local_ids: Tensor) -> Pieces:
    """Returns the rows that are computed together: all of them, or as many as `slots` of the group bounds."""
    experts, room, k = route.experts, route.room, route.k
    if room == 0:
        return [(0, 0, None)]
    bound = experts.slots
    if route.slots is None:
        return [(0, room, None if bound is None else min(bound, room * k))]
    if bound is None or route.slots <= bound or experts.on_overflow == "drop":
        known = launch_config.size_class(max(route.slots, 1))
        return [(0, room, min(known, room * k, known if bound is None else bound))]
    pieces: Pieces = []
    start = slots = 0
    for row, more in enumerate((local_ids >= 0).sum(1).tolist()):
        if slots + more > bound:
            pieces.append((start, row, min(bound, (row - start) * k)))
            start, slots = row, 0
        slots += more
    return [*pieces, (start, room, min(bound, (room - start) * k))]


class Fp8Products(NamedTuple):
    """The precision of products, and the caller's weights for it."""

    precision: str | None
    given: Fp8Weights | None
    keep: bool  #: forward's are kept for backward
    of_weights: bool  #: gradients of weights multiply e4m3, too

    def weights_of(self, w1: Any, w2: Any) -> Fp8Weights | None:
        """Returns the weights in e4m3; None without, and for frozen ones, which the layer decodes to e4m3 itself."""
        if self.precision is None or self.given is not None or w1 is None:
            return self.given
        made: Fp8Weights = mb.quantize_weights(w1, w2)
        return made

    def kept(self, made: Fp8Weights | None) -> list[Tensor]:
        """Returns what to save of `weights_of`'s result, for `again`."""
        keeps = made is not None and (self.keep or self.given is not None)
        return [getattr(made, field) for field in fp8_checks.FIELDS] if keeps else []

    def again(self, tensors: list[Tensor], w1: Any, w2: Tensor) -> tuple[Fp8Weights | None, list[Tensor]]:
        """Returns what `weights_of` returned in forward, and the saved tensors after those of `kept`."""
        number = len(fp8_checks.FIELDS)
        if self.precision is None:
            return None, tensors
        if self.given is None and not self.keep:
            return self.weights_of(w1, w2), tensors
        fields: dict[str, Any] = dict(zip(fp8_checks.FIELDS, tensors[:number], strict=True))
        return Fp8Weights(**fields), tensors[number:]


class _Call(NamedTuple):
    """What the layer is told beside its tensors."""

    route: Route
    activation: str | Activation
    save: str | None
    into: dict[str, MainGrad]  #: where gradients are added, by weight
    fp8_products: Fp8Products
    lora: Lora | None  #: the scales, beside the factors
    frozen: torch_quantised.Frozen | None  #: of weights in four or eight bits, whose tensors follow the factors

    @property
    def num_factors(self) -> int:
        return 0 if self.lora is None else len(FACTORS)

    def joined(self, layer: LayerArrays, parts: Sequence[Any]) -> LayerArrays:
        """Returns the layer with its frozen weights, if there are some."""
        return layer if self.frozen is None else self.frozen.joined(layer, parts)


@contextmanager
def _no_copies_left(route: Route) -> Iterator[None]:
    """Has the stream wait for rows that are on their way where something fails, as what they come to is freed then."""
    try:
        yield
    except BaseException:
        if route.wait is not None:
            route.wait()
        raise


class _ExpertParallel(torch.autograd.Function):
    """The layer for autograd. up is None where w1 is one tensor; gate and w2 are None where they are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate: Tensor | None,
        up: Tensor | None,
        w2: Tensor | None,
        ids: Tensor,
        call: _Call,
        *tensors_beside: Any,
    ) -> Tensor:
        """tensors_beside: the factors of `call.lora`, then the parts of `call.frozen`."""
        route, activation, save, into, fp8_products, lora, _ = call
        factors, parts = tensors_beside[: call.num_factors], tensors_beside[call.num_factors :]
        experts, w1 = route.experts, gate if up is None else (gate, up)
        rows, local_ids, got = route.receive(x, ids, weights)
        pieces, wait = _pieces(route, local_ids), route.wait
        if len(pieces) > 1 and save is not None:
            save = "recompute"
        made = fp8_products.weights_of(w1, w2)  # made once for all pieces
        place = route.remote_results(x.shape[1], x.dtype) if len(pieces) == 1 else None
        beside = lora and lora.with_factors(factors)
        precision, fp8_wgrad = fp8_products.precision, fp8_products.of_weights
        options = LayerOptions(
            activation, save, precision=precision, tf32=torch_arguments.in_tf32(x), fp8_wgrad=fp8_wgrad
        )
        results, kept, tensors = [], [], []
        for start, stop, bound in pieces:
            part = slice(start, stop)
            x_part, scales = values_and_scales(_part(rows, part))
            layer = call.joined(LayerArrays(x_part, local_ids[part], got[part], gate, up, w2), parts)
            extras = LayerExtras(place and place.destination, wait, made, scales, None, beside)
            out, saved = layer_forward(layer, options._replace(max_slots=bound), extras, "expert_parallel_moe")
            if wait is not None:  # also where nothing has read the rows
                wait()
            results.append(place.landing if place else out)
            if bound is not None and (experts.slots is not None):
                number = experts.local_experts
                index = saved.index if saved else mb.build_dispatch(local_ids[part], number, max_slots=bound)
                route.count_dropped(index.dropped)
            if saved is not None:
                (lists, _), index = saved.index.split()
                number_of = saved.decoded_by
                kept.append(SavedForBackward(_NO_ARRAYS, saved.options, index, None, None, decoded_by=number_of))
                tensors += [saved.first_layer, saved.y_swi, lists, *saved.lora_rows]
        route.wait = None  # an error of backward does not wait for these rows
        y = results[0] if len(results) == 1 else torch.cat(results)
        del results
        experts.count_overflow(route.counted)
        own = call.joined(LayerArrays(x, ids, weights, gate, up, w2), parts)
        count_beside_operators(own, ids.numel(), beside)
        ctx.route, ctx.pieces, ctx.kept, ctx.into, ctx.fp8_products = route, pieces, kept, into, fp8_products
        ctx.call, ctx.width, ctx.dtype = call, x.shape[1], x.dtype
        ctx.set_materialize_grads(False)
        values, scales = values_and_scales(rows) if experts.keep_received else (x, None)
        read_ids = ids if experts.route == "pull" else None  # other routes may see them change before backward
        read = values, scales, got, gate, up, w2, read_ids, *tensors_beside
        ctx.save_for_backward(*read, *fp8_products.kept(made), *tensors)
        return route.bring_back(y)()

    @staticmethod
    @first_derivatives_only("expert_parallel_moe")
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        met = False

        def meet(failed: bool = False) -> None:
            nonlocal met
            met = True
            ctx.route.meet("backward of expert_parallel_moe", failed=failed)

        try:
            with _no_copies_left(ctx.route):
                return _ExpertParallel.backward_at(ctx, grad_out, meet)
        except Exception:
            if not met:
                with suppress(RuntimeError):  # this rank's error says more
                    meet(failed=True)
            raise

    @staticmethod
    def backward_at(ctx: Any, grad_out: Tensor | None, meet: Callable[[], None]) -> tuple[Tensor | None, ...]:
        """Computes the gradients. meet: called when nothing of this rank can fail before rows are on their way."""
        route: Route = ctx.route
        experts = route.experts
        needed, call, lora = ctx.needs_input_grad, ctx.call, ctx.call.lora
        values, scales, got, gate, up, w2, _, *tensors = ctx.saved_tensors
        beside, tensors = tensors[: len(needed) - _TENSORS], tensors[len(needed) - _TENSORS :]
        factors, parts_of_weights = beside[: call.num_factors], beside[call.num_factors :]
        expect_gathered(gate, up, w2, *beside)
        # This comes before rows are on their way, as `run_backward` would raise too late for those that travel.
        read = {"x": values, "w1": gate, "w1[1]": up, "w2": w2, "weights": got}
        read |= zip(lora_checks.NAMES, factors, strict=False)
        weights = call.joined(LayerArrays(None, None, None, gate, up, w2), parts_of_weights)
        read |= _parts_of(weights)
        described_by_name("expert_parallel_moe", arrays.Torch, read)
        kept_rows: Rows = values if scales is None else Fp8Rows(values, scales)
        record_inputs(ctx, gate, up, w2, *factors)  # and x by the incoming gradient, as its own rows may not be kept
        fp8_products: Fp8Products = ctx.fp8_products
        if grad_out is None:  # other ranks may wait for this one
            grad_out = values.new_zeros((route.num_tokens, ctx.width), dtype=ctx.dtype)
        w1 = gate if up is None else (gate, up)
        fp8_weights, tensors = fp8_products.again(tensors, w1, w2)
        of_rows = tuple(compress(("x", "weights"), needed[:2]))
        of_weights = tuple(compress(("w1", "w2"), (needed[2] or needed[3], needed[4])))
        of_lora = ("lora",) if any(needed[_TENSORS:]) else ()
        sent = None if experts.keep_received else values
        alone = len(ctx.pieces) == 1
        # main_grad, or zeros where several pieces add up. It may raise, so it comes before rows are on their way.
        buffers = {name: main_grad.buffer() for name, main_grad in ctx.into.items()}
        sums = _sums(of_weights, w1, w2, buffers, alone)
        if lora is not None:  # several pieces give gradients in float32, whose sums are rounded once
            lora = lora.with_factors(f if f is None or alone else f.to(_wide(f)) for f in factors)
        grad_out = grad_out.contiguous()
        meet()
        grad_rows, sent_again = route.receive_gradients(grad_out, sent)
        rows, wait = kept_rows if sent_again is None else sent_again, route.wait
        x, x_scales = values_and_scales(rows)

        def saved_of(piece: int) -> tuple[slice, SavedForBackward]:
            kept, part = ctx.kept[piece], slice(*ctx.pieces[piece][:2])
            first_layer, y_swi, lists, u1, u2 = tensors[5 * piece : 5 * piece + 5]
            layer = weights._replace(x=x[part], router_weights=got[part])
            made = kept.index.joined((lists, None)), first_layer, y_swi, kept.consumed, fp8_weights
            of_scales = None if x_scales is None else x_scales[part]
            of_call = of_scales, lora, LoraRows(u1, u2), kept.decoded_by
            return part, SavedForBackward(layer, kept.options, *made, *of_call)

        bring: Callable[[], dict[str, Tensor]] = dict
        parts: dict[str, list[Tensor]] = {name: [] for name in of_rows}
        parts_of_lora: list[Lora] = []
        # There is no backward in halves beside factors and frozen weights, whose gradients come with those of rows, nor
        # where gradients of weights multiply e4m3, which needs more of the first half.
        later = bool(of_weights) and lora is call.frozen is None and not fp8_products.of_weights
        needs = (*of_rows, "w1", "w2") if later else (*of_rows, *of_weights, *of_lora)
        asked = *of_rows, *of_weights, *of_lora
        count_beside_operators(
            weights._replace(x=grad_out), route.num_tokens * route.k, lora, ctx.kept[0].options.save, asked
        )
        for piece in range(len(ctx.pieces)):
            part, saved = saved_of(piece)
            place = route.remote_gradients(of_rows, ctx.width, ctx.dtype, got) if alone else None
            try:
                extras = BackwardExtras(place and place.destination, wait, later)
                of_part = _part(grad_rows, part), saved, needs, False, None if later else sums or None
                grads, pending = run_backward("expert_parallel_moe", *of_part, extras)
            finally:
                ctx.kept[piece].consumed = saved.consumed
            if wait is not None:  # also where nothing has read the gradients
                wait()
            for name in of_rows:
                parts[name].append(place.landing if place and name == "x" else getattr(grads, name))
            if piece == len(ctx.pieces) - 1:  # the gradients travel while those of the weights are computed
                wholes = {name: of[0] if len(of) == 1 else torch.cat(of) for name, of in parts.items()}
                bring = route.return_gradients(wholes)
            if pending is not None:
                grads = mb.moe_backward_weights(pending, needs=of_weights, accumulate=sums or None)
            if grads.lora is not None:
                parts_of_lora.append(grads.lora)
        brought = bring()
        of_experts = _of_weights(ctx.into, (gate, up, w2), grads, needed[2:5])
        of_beside = *_of_factors(parts_of_lora, factors), *(None for _ in parts_of_weights)
        return brought.get("x"), brought.get("weights"), *of_experts, None, None, *of_beside


_TENSORS = 7  # arguments of `_ExpertParallel` before those beside them


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sums(names: tuple[str, ...], w1: Any, w2: Tensor, buffers: Mapping[str, Tensor], alone: bool) -> dict[str, Any]:
    """Returns what gradients of these weights are added to, by name; none if one piece of rows is all.

    buffers: of each main_grad.
    """
    of = {"w1": w1, "w2": w2}
    if buffers:
        gate = buffers.get("gate")
        of = {"w1": (gate, buffers["up"]) if "up" in buffers else gate, "w2": buffers.get("w2")}
    elif alone:
        return {}
    else:
        of = {name: one_or_pair(tuple(torch.zeros_like(w, dtype=_wide(w)) for w in pair(of[name]))) for name in names}
    return {name: of[name] for name in names}


def _of_weights(
    into: Mapping[str, MainGrad], weights: tuple[Tensor | None, ...], grads: Gradients, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns what autograd gets for gate, up and w2. grads: their sums."""
    gate, up = (*pair(grads.w1), None)[:2]
    found: list[Tensor | None] = []
    for name, weight, total, need in zip(("gate", "up", "w2"), weights, (gate, up, grads.w2), needed, strict=True):
        if total is None or weight is None or not need:
            found.append(None)
        else:
            found.append(stand_in(into[name].announce(), weight) if name in into else total.to(weight.dtype))
    return found


def _of_factors(parts: Sequence[Lora], factors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of factors, summed over the pieces of rows in order."""
    if not parts:
        return [None] * len(factors)
    by_factor = zip(*(part.factors for part in parts), strict=True)
    return [f if f is None else sum(of[1:], of[0]).to(f.dtype) for f, of in zip(factors, by_factor, strict=True)]


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips as `torch.nn.utils.clip_grad_norm_` does, for DTensors on several meshes too.

    max_norm: above which all gradients are scaled down to it, in place. norm_type: p of the p-norm, also inf.
    Returns the norm of all before, (), on the gradients' device, on the CPU if there are none.
    Each mesh's gradients have a norm of their own, whose powers are added. Plain tensors have to be the same on all
    ranks: give one rank's experts as a DTensor. All ranks call it with the same parameters in the same order, so not
    with a set.
    """
    norm_type = float(norm_type)
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in (parameters,) if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = []
    for mesh, group in by_mesh.items():
        grads = [p.grad for p in group if p.grad is not None]
        if mesh is not None and norm_type == float("inf"):
            norms.append(_largest(grads, mesh))
            continue
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _largest(grads: Iterable[Any], mesh: Any) -> Tensor:
    """Returns the largest |element| of DTensors. torch's norm raises on the ranks alone whose parts are empty."""
    parts = []
    for grad in grads:
        placements = [Replicate() if of.is_partial() else of for of in grad.placements]
        parts.append(waited(grad.redistribute(mesh, placements).to_local()))
    norm = torch.stack([part.abs().amax() if part.numel() else part.new_zeros(()) for part in parts]).amax()
    for dimension in range(mesh.ndim):
        torch.distributed.all_reduce(norm, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dimension))
    return norm


@graph_break
def expert_parallel_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor | tuple[Tensor, Tensor] | QuantizedWeight,
    w2: Tensor | QuantizedWeight,
    experts: ExpertGroup,
    *,
    shared: Callable[[Tensor], Tensor] | None = None,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    accumulate_into_main_grad: bool | Mapping[str, Any] = False,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
    keep_fp8_weights: bool = True,
    row_precision: str | None = None,
    lora: Lora | None = None,
    fp8_wgrad: bool = False,
) -> Tensor:
    """Computes the MoE layer (L, d) with its experts over ranks, differentiable in x, weights, w1, w2 and the factors.

    x, ids, weights: this rank's tokens, ids of all E experts, as `moeblaze_cupy.moe_forward` takes them. With routes
    "exact" and "pull" L may differ by rank, and be 0. w1, w2: this rank's E/P experts, for a DTensor its `.to_local()`.
    Either may be `QuantizedWeight` of such tensors, which require no gradient. Only rows travel. Each piece of rows
    decodes for itself, forward and backward.
    shared: a function of x whose result, of x's shape and dtype, is added, such as a shared expert. It is launched
    while the sizes travel, or with route "pull" the rows. If it fails on a rank, that rank raises the error after its
    part of the forward, and the others get their results.
    activation, save: see `moeblaze_cupy.moe_forward`. More slots than the group's `slots` are computed in pieces with
    save="recompute".
    accumulate_into_main_grad: see `moeblaze_cupy.interop.torch.moe`. Parameters that are DTensors have to be given,
    {"w1": parameter or pair, "w2": parameter}; their main_grad is a DTensor too, or this rank's part.
    precision, fp8_weights, fp8_wgrad: see `moeblaze_cupy.moe_forward`, for this rank's experts. With fp8_wgrad the
    gradient of x travels when those of w1 and w2 are computed. keep_fp8_weights, and what torch.autocast does: see
    `moeblaze_cupy.interop.torch.moe`.
    row_precision: the same on all ranks. None sends rows in x's dtype. "fp8", with precision="fp8", sends rows of x and
    of out's gradient in e4m3 with a float32 scale for each token, and keeps those of x so. Only the gradients of w1 and
    w2 change, which are then those of the e4m3 rows, rounded to bf16; with fp8_wgrad none. Results travel in x's dtype.
    lora: low-rank factors beside w1 and w2, as of `moeblaze_cupy.interop.torch.moe`, of this rank's experts. Their
    gradients are sums over the tokens of all ranks, as those of w1. An a1 or a2 that all experts share gets this rank's
    experts' part. Neither lora nor `QuantizedWeight` with accumulate_into_main_grad, no lora with row_precision.
    Every rank's output is that of one process with all tokens, but for the order of its sums: over the experts of a
    rank in the order of slots, rounded to x's dtype, then over ranks. Gradients of w1 and w2 are sums over the tokens
    of all ranks, in the order of ranks, for the sum of all ranks' losses.
    All ranks call it, forward and backward, equally often. There are no second derivatives.
    Raises TypeError, ValueError or RuntimeError as `moeblaze_cupy.interop.parallel.exchange` does.
    """
    x, ids, weights = map(waited, (x, ids, weights))
    parts = pair(w1)
    gate, up = (*parts, None, None)[:2]
    first, second, given = gate, up, cast(Tensor, w2)  # the caller's form
    tokens = x  # the tokens that `shared` gets
    factors: tuple[Any, ...] = lora.factors if isinstance(lora, Lora) else ()
    frozen = LayerArrays(x, ids, weights, gate, up, w2).frozen
    forms: torch_quantised.Frozen | None = None
    of_frozen: list[Tensor] = []
    if frozen:
        gate, up, w2 = LayerArrays(x, ids, weights, gate, up, w2).with_weights(dict.fromkeys(frozen))[3:6]
    all_given = x, weights, *present(gate, up, w2, *factors)
    are_tensors = torch_private.any_autocast() and all(isinstance(of, Tensor) for of in all_given)
    if are_tensors and torch_arguments.in_autocast(x):
        (x, gate, up, w2), (weights, *factors) = torch_arguments.autocast(  # type: ignore[assignment]
            x.device.type, (x, gate, up, w2), (weights, *factors)
        )

    def check() -> Mapping[str, int]:
        nonlocal forms, of_frozen
        function = "expert_parallel_moe"
        if shared is not None and not callable(shared):
            raise checks.bad_type(function, "shared", "a function of x, or None", type(shared))
        _check_forms(parts, frozen, lora, fp8_products, accumulate_into_main_grad)
        of_fp8 = fp8_checks.arrays_of(function, precision, fp8_weights)
        order = None if fp8_weights is None else fp8_weights.gate_up
        layer = LayerArrays(x, ids, weights, gate, up, w2)
        if frozen:
            layer = layer.with_weights(frozen)
            forms, _, of_frozen = torch_quantised.apart(layer, function)
        of_layer = LayerOptions(activation, save, precision=precision, fp8_wgrad=fp8_wgrad)
        options = of_layer, order, row_precision, experts.local_experts, len(factors), forms
        key, _ = runtime.key_of(function, options, (x, ids, weights, gate, up, w2, *of_fp8, *factors, *of_frozen))
        if not experts.has_passed(key):
            _check_arguments(layer, of_layer, experts, fp8_weights, row_precision, factors)
            if x.is_cuda and key is not None:
                experts.note_passed(key)
        if accumulate_into_main_grad and torch.is_grad_enabled():
            into.update(main_grads(first, second, given, accumulate_into_main_grad, function))
        if grads and save is None:
            expected = "a policy that keeps something, as gradients are required"
            raise ValueError(f"{function}: save: expected {expected}, got None")
        return {
            **collectives.numbers_of(activation),
            "precision": collectives.PRECISIONS.index(precision),
        }

    into: dict[str, MainGrad] = {}
    fp8_products = Fp8Products(precision, fp8_weights, keep_fp8_weights and not frozen, fp8_wgrad)
    grads = required((x,), (weights,), (gate, up, w2, *factors))
    pending = PendingExchange("expert_parallel_moe", x, ids, weights, experts, grads, check, row_precision == "fp8")
    route: Route | None = None
    wait: Callable[[], None] | None = None
    if shared is not None and pending.error is None and pending.route.begins_early:
        route = pending.finish()
        x, weights = x.contiguous(), weights.contiguous()
        wait = route.begin(x.detach(), route.ids, weights.detach())

    def of_experts() -> Tensor:
        found = pending.finish() if route is None else route
        arguments = x.contiguous(), weights.contiguous(), gate, up, w2, found.ids
        scales = lora and lora.with_factors([None] * len(factors))
        call = _Call(found, activation, save if grads else None, into, fp8_products, scales, forms)
        with _no_copies_left(found):
            return cast(Tensor, _ExpertParallel.apply(*arguments, call, *factors, *of_frozen))  # type: ignore[no-untyped-call]  # torch gives `apply` no types

    if shared is None or pending.error is not None:
        return of_experts()
    try:
        try:
            beside = shared(tokens)
            _check_shared(beside, tokens, x)
        finally:
            if wait is not None:
                wait()  # also where `shared` fails, as what is copied to would be freed
    except Exception:
        with suppress(Exception):  # the caller's error says more
            of_experts()  # the other ranks know of no error, and wait for rows and results of this rank
        raise
    return of_experts() + beside
