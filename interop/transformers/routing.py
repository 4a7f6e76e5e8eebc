"""Records the experts that a model's routers choose, and has the routers choose given ones.

A router's own code runs in both cases. One top-k in it chooses; in a replay it returns the given ids with the router's
scores of them, so that whatever follows makes weights, with gradients, as it does of its own choice.
"""

import contextlib
import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from moeblaze_cupy import checks
from moeblaze_cupy.interop.torch.arguments import check_module
from moeblaze_cupy.interop.transformers import private
from moeblaze_cupy.interop.transformers.formula import name_of
from moeblaze_cupy.interop.transformers.patches import PATCHES

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])

UNSET = -1  # ids of tokens for which nothing was computed

# Options of generate, and the values with which each call computes the next tokens of the sequences that it returns;
# the first is what generate takes where none is given.
_OF_GENERATE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (False,),
    "use_cache": (True,),
    "guidance_scale": (None, 1),
}

_NO_CHOICE = {"DeepseekV4HashRouter"}  # its ids follow from the tokens
_REFUSED = {"PhimoeTopKRouter": "it has no top-k and draws its experts at random in training"}
_TOP_K = (torch.topk, torch.Tensor.topk)
_MASKS = (torch.masked_fill, torch.Tensor.masked_fill)


def _outside_graphs(function: F) -> F:
    """Has compiled code end its graph where it calls the function."""
    outside: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch gives it no types
    return outside


class Chooser(NamedTuple):
    """What chooses the experts of a layer: `method` of `module`, which the model has under `name`."""

    name: str
    module: Any
    method: str
    num_experts: int


def routed_model(function: str, model: torch.nn.Module) -> tuple[Any, tuple[Chooser, ...]]:
    """Returns the innermost model of transformers that has all experts, and what chooses them, by layer.

    function: the name in errors.
    """
    check_module(function, model)
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    found = [(inner, _choosers(inner)) for inner in models]
    most = max((len(choosers) for _, choosers in found), default=0)
    if not most:
        raise checks.bad_value(function, "model", "a transformers model with experts", f"a {type(model).__name__}")
    return [pair for pair in found if len(pair[1]) == most][-1]


def kind_of(router: torch.nn.Module) -> str:
    """Returns the name of a router's class, also where peft trains a copy of it beside the original."""
    return name_of(type(getattr(router, "original_module", router)))


def _choosers(model: torch.nn.Module) -> tuple[Chooser, ...]:
    found: dict[int, Chooser] = {}
    for name, module in model.named_modules():
        if not (private.is_dispatched(module) or private.is_fp8(module) or name_of(type(module)) in PATCHES):
            continue
        block = re.sub(r"(\.?\bbase_layer)+$", "", name).rpartition(".")[0]  # peft wraps experts
        for holder, path in ((model.get_submodule(block), block), (module, name)):
            method = "route_tokens_to_experts"
            if not hasattr(holder, method):
                path, method = f"{path}.gate" if hasattr(holder, "gate") else f"{path}.router", "forward"
                holder = getattr(holder, "gate", getattr(holder, "router", None))
            while hasattr(holder, "base_layer"):
                holder = holder.base_layer
            if holder is not None:
                found[id(holder)] = Chooser(path.lstrip("."), holder, method, getattr(module, "num_experts", 0))
                break
    return tuple(chooser for chooser in found.values() if kind_of(chooser.module) not in _NO_CHOICE)


class _TopK(TorchFunctionMode):
    """Watches a router. Its top-k of k among all experts gives `ids` (L, k) where these are set, with their scores."""

    def __init__(
        self, chooser: Chooser, ids: Tensor | None = None, is_unset: Tensor | None = None, largest: int = UNSET
    ) -> None:
        super().__init__()
        self.chooser, self.ids, self.is_unset, self.largest, self.has_replayed = chooser, ids, is_unset, largest, False
        self.chosen: Any = None  # the indices that the last top-k gave
        self.own: Any = None  # and those that it would have given
        self.masked: dict[int, tuple[Tensor, Tensor]] = {}  # results, which must live for their key, and their source

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in _MASKS:  # an id of the replay may be of a group that the router's own choice leaves out
            self.masked[id(out)] = out, self._source(args[0])
        elif function in _TOP_K:  # of groups, then of experts
            self.own = self.chosen = out.indices
            if self._chooses(args[0], self.own):
                return self._replay(args[0], self.ids.view_as(self.own))  # type: ignore[union-attr]
        return out

    def _source(self, scores: Tensor) -> Tensor:
        return self.masked[id(scores)][1] if id(scores) in self.masked else scores

    def _chooses(self, scores: Tensor, own: Tensor) -> bool:
        if self.ids is None or scores.shape[-1] < self.chooser.num_experts:
            return False
        return own.shape[-1] == self.ids.shape[1] and own.numel() == self.ids.numel()

    def _replay(self, scores: Tensor, ids: Tensor) -> Any:
        if self.largest >= scores.shape[-1]:
            expected = f"ids below {scores.shape[-1]} at {self.chooser.name}"
            raise checks.bad_value("Routing.replay", "ids", expected, str(self.largest))
        is_unset = self.is_unset.view_as(ids)  # type: ignore[union-attr]
        self.chosen, self.has_replayed = torch.where(is_unset, self.own, ids), True
        return torch.return_types.topk((self._source(scores).gather(-1, self.chosen), self.chosen))


class _Call:
    """One call of the model. ids: (layers, L, k) int64 or None. recorded: by layer, or None to record nothing.

    is_unset: (layers, L, k). is_same: (layers, L), of the layers in `ran` whether the router would choose the same.
    """

    def __init__(self, shape: Any, ids: Tensor | None, largest: int, recorded: list[Any] | None) -> None:
        self.shape, self.ids, self.largest, self.recorded, self.is_first = shape, ids, largest, recorded, True
        self.is_at_work = ids is not None or recorded is not None
        if ids is not None:
            self.is_unset = ids < 0
            self.is_same = self.is_unset.new_zeros(ids.shape[:2])
        self.ran: set[int] = set()  # layers, in the first pass

    def again(self) -> "_Call":
        """Returns the call for what recomputes a part of it."""
        call = copy.copy(self)
        call.recorded, call.is_first, call.is_at_work = None, False, self.ids is not None
        return call

    def counts(self) -> Tensor:
        """Returns (2,) int64: the tokens of layers whose router would choose the same, and those without ids."""
        layers = sorted(self.ran)
        is_unset = self.is_unset[..., 0]
        if len(layers) < len(is_unset):
            is_unset = torch.stack([is_unset[layer] for layer in layers])
        return torch.stack([self.is_same.sum(), is_unset.sum()])


class _Layer:
    """What stands in for the method of a chooser. A copy of the module is not concerned."""

    def __init__(self, routing: "Routing", number: int, chooser: Chooser) -> None:
        self.routing, self.number, self.chooser = routing, number, chooser
        self.earlier = vars(chooser.module).get(chooser.method)
        self.rows = 0  # that a replay had ids or UNSET for
        if getattr(inspect.unwrap(self.earlier), "__func__", None) is _choose:  # in a copy, or in a wrapper
            self.earlier = chooser.module.moeblaze_routing.earlier
        else:
            setattr(chooser.module, chooser.method, types.MethodType(_choose, chooser.module))
        chooser.module.moeblaze_routing = self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"chooser": self.chooser._replace(module=None)}

    def __deepcopy__(self, memo: Any) -> "_Layer":
        other = copy.copy(self)
        other.earlier = copy.deepcopy(self.earlier, memo)  # which may hold the module
        return other

    def remove(self) -> None:
        """Gives the method back. What has wrapped it calls `_choose` for ever, which calls the router's own code."""
        module, method = self.chooser.module, self.chooser.method
        if module is None:
            return
        self.chooser = self.chooser._replace(module=None)
        found = vars(module).get(method)
        if getattr(found, "__func__", None) is _choose:
            delattr(module, method)
            if self.earlier is not None:
                setattr(module, method, self.earlier)
            found = None
        if found is None:
            del module.moeblaze_routing

    def own(self, module: Any) -> Callable[..., Any]:
        """Returns the method of the chooser, or of a copy of it, that `_choose` stands in for."""
        found: Callable[..., Any] = getattr(type(module), self.chooser.method).__get__(module)
        return found if self.earlier is None else self.earlier

    @_outside_graphs
    def within(self, call: _Call, args: Any, named: Any) -> Any:
        """Calls the router's own code, which ends a graph of compiled code.

        It looks for this code itself: compiled code would hand on a bound method by its name, which is `_choose`.
        """
        if call.is_first and self.number in call.ran:
            expected = "routers that run once in a call, as ids have one place for each"
            raise checks.bad_value("Routing", "model", expected, f"{self.chooser.name} again")
        own = self.own(self.chooser.module)
        device = next(value for value in (*args, *named.values()) if isinstance(value, Tensor)).device
        given = (None, None) if call.ids is None else (call.ids, call.is_unset)
        ids, is_unset = (None if each is None else each[self.number].to(device) for each in given)
        with _TopK(self.chooser, ids, is_unset, call.largest) as seen:
            out = own(*args, **named)
        chosen = seen.chosen.flatten(0, -2)
        if len(chosen) != call.shape[0] * call.shape[1]:
            got = f"{len(chosen)} rows at {self.chooser.name}"
            raise checks.bad_value("Routing", "model", f"a router that sees every token of {call.shape}", got)
        if ids is not None and not seen.has_replayed:
            expected = f"k = {chosen.shape[1]} experts for a token at {self.chooser.name}"
            raise checks.bad_value("Routing.replay", "ids", expected, f"k = {ids.shape[1]}")
        if call.recorded is not None:
            call.recorded[self.number] = chosen
        self.routing.was_replayed |= ids is not None
        if call.is_first:
            call.ran.add(self.number)
        if call.is_first and ids is not None:
            own = seen.own.flatten(0, -2)
            call.is_same[self.number] = (own[:, :, None] == ids[:, None, :]).any(2).all(1)
            self.rows += len(ids)
        return out


def _choose(self: Any, *args: Any, **named: Any) -> Any:
    layer: _Layer = self.moeblaze_routing
    call = layer.routing.call if layer.chooser.module is self else None
    if call is not None and call.is_at_work:
        return layer.within(call, args, named)
    is_watched = call is None and layer.routing.was_replayed and layer.chooser.module is self
    if is_watched and not torch.compiler.is_compiling() and private.in_backward():
        raise RuntimeError(
            "Routing: backward computes a layer again that may have been replayed, by a checkpointing that is not "
            "known. Expected gradient_checkpointing_enable() of transformers or checkpoint_wrapper of torch"
        )
    return layer.own(self)(*args, **named)


_choose.__name__ = "forward"  # the name that unpickling looks up: it finds the class's own


class Record:
    """What `Routing.record` recorded. calls: for each call of the model (B, T, layers, k) int32, on its device."""

    def __init__(self) -> None:
        self.calls: list[Tensor] = []

    @property
    def ids(self) -> Tensor:
        """The calls behind one another, (B, T, layers, k): of `generate`, or of one forward. UNSET: not computed.

        generate does not compute the token that it samples last, so T is the number of tokens less one.
        Raises RuntimeError if no call was recorded, ValueError if calls have other numbers of sequences.
        """
        if not self.calls:
            expected = "expected a recorded call, got none. Was the model compiled before Routing, or changed after it?"
            raise RuntimeError(f"Record.ids: {expected}")
        if len({call.shape[0] for call in self.calls}) > 1:
            sizes = [call.shape[0] for call in self.calls]
            raise ValueError(f"Record.ids: expected calls of one batch, got {sizes} sequences. See Record.calls")
        return torch.cat(self.calls, 1)


class Routing:
    """Records and replays the routing of one model of transformers, also within wrappers such as DDP and peft's.

    layers: the names of the routers in the model, in the order of ids.
    Raises ValueError for a model without experts or with a Routing already, NotImplementedError for Phi-MoE. Calls in
    which a router runs more than once, as those of Inkling2Loop, raise ValueError when they are recorded or replayed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, choosers = routed_model("Routing", model)
        self._outer: Any = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
        for module in (chooser.module for chooser in choosers):
            if getattr(vars(module).get("moeblaze_routing"), "chooser", (0, 0))[1] is module:
                raise checks.bad_value("Routing", "model", "one without a Routing", "one that has it: call its close()")
            if reason := _REFUSED.get(kind_of(module)):
                raise NotImplementedError(f"Routing: {kind_of(module)}: {reason}")
        self.layers = tuple(chooser.name for chooser in choosers)
        self.call: _Call | None = None
        self.was_replayed = False  # maybe by a forward whose checkpointing turns gradients off
        self._counts: Tensor | None = None  # those of all calls
        self._record: Record | None = None
        self._ids: Tensor | None = None  # (N, T, layers, k)
        self._next_row = self._largest = 0
        self._is_active = False
        self._layers = [_Layer(self, number, chooser) for number, chooser in enumerate(choosers)]
        self._restore: list[tuple[Any, str, Any]] = []
        self._hooks: tuple[Any, ...] = (
            self._model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._after, always_call=True),
        )

    def __deepcopy__(self, memo: Any) -> "Routing":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": None}  # a model that is unpickled is not concerned

    def __enter__(self) -> "Routing":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the model back as it was. Backward of calls that were replayed comes before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        for layer in self._layers:
            layer.remove()

    @contextlib.contextmanager
    def record(self) -> Iterator[Record]:
        """Records the calls of the model within the context, on the device and without waiting for it.

        Raises RuntimeError within another `record`, and in calls in which some routers were not recorded. `generate`
        raises ValueError for beams, assisted decoding, guidance and use_cache=False, whose calls are of other sequences
        than those that it returns, and so does continuous batching.
        """
        if self._record is not None:
            raise RuntimeError("Routing.record: expected one at a time, got one within another")
        self._record, self._is_active = Record(), True
        own = vars(self._outer)
        generate = functools.partial(self._generate, getattr(self._outer, "generate", None))
        replaced = {"generate": generate, "init_continuous_batching": self._in_batches}
        before = {name: own[name] for name in replaced if name in own}
        own.update(replaced)
        try:
            yield self._record
        finally:
            self._record, self._is_active = None, self._ids is not None
            for name in replaced:
                del own[name]
            own.update(before)

    def _generate(self, generate: Any, *args: Any, **named: Any) -> Any:
        """Calls the model's own `generate`, which may be one of the instance."""
        given = inspect.signature(type(self._outer).generate).bind(self._outer, *args, **named).arguments | named
        configs = given.get("generation_config"), self._outer.generation_config
        for name, plain in _OF_GENERATE.items():
            of_configs = (getattr(config, name, None) for config in configs)
            value = given[name] if name in given else next((v for v in of_configs if v is not None), plain[0])
            if value not in plain:
                raise checks.bad_value("Routing.record", name, f"{plain[0]} in generate", f"{value!s:.40}")
        return generate(*args, **named)

    def _in_batches(self, *args: Any, **named: Any) -> Any:
        expected = "generate, whose calls are of the sequences that it returns"
        raise checks.bad_value("Routing.record", "model", expected, "continuous batching")

    @contextlib.contextmanager
    def replay(self, ids: Tensor, *, validate: bool | None = None) -> Iterator[None]:
        """Has the calls of the model within the context choose `ids`. Their backward may come later.

        ids: (N, T, layers, k), integers on any device. A call of B sequences of T tokens takes the next B rows. T may
        be one less than the call's, as in what `generate` records: the last token then makes its own choice, as do all
        tokens whose ids are UNSET. The auxiliary loss of transformers counts the routers' own choice.
        validate: whether to look at the values, which waits for a GPU that holds them. None means: if on the CPU.
        Raises TypeError or ValueError for ids of another dtype or shape than the model and its calls need, for an
        expert twice for one token, ids out of range and tokens with some ids, and for calls that take more or fewer
        than N rows. RuntimeError within another `replay`, and if a router took no ids. Backward raises it where another
        checkpointing than that of transformers or torch's checkpoint_wrapper computes a router again: from the first
        replay until `close`, for calls without replay too.
        """
        if self._ids is not None:
            raise RuntimeError("Routing.replay: expected one at a time, got one within another")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
            got = str(ids.dtype if isinstance(ids, Tensor) else type(ids))
            raise checks.bad_type("Routing.replay", "ids", "a tensor of integers", got)
        if ids.dim() != 4 or ids.shape[2] != len(self.layers):
            expected = f"shape (N, T, {len(self.layers)} layers, k)"
            raise checks.bad_value("Routing.replay", "ids", expected, str(tuple(ids.shape)))
        ids = ids if ids.dtype in (torch.int64, torch.int16) else ids.int()
        self._largest = _validated(ids) if (not ids.is_cuda if validate is None else validate) else UNSET
        self._ids, self._next_row, self._is_active = ids, 0, True
        rows = [layer.rows for layer in self._layers]
        try:
            yield
            if self._next_row != len(ids):
                expected = f"calls of the model with {len(ids)} sequences in all, as ids has rows"
                raise checks.bad_value("Routing.replay", "model", expected, str(self._next_row))
            if len(ids):
                self._expect_all("replay", [layer.rows > rows[layer.number] for layer in self._layers])
        finally:
            self._ids, self._is_active = None, self._record is not None

    def _expect_all(self, method: str, have_taken_part: Sequence[bool]) -> None:
        """Raises RuntimeError unless all routers have: those of others would choose for themselves, unseen."""
        missing = [name for name, has in zip(self.layers, have_taken_part, strict=True) if not has]
        if missing:
            expected = f"all {len(self.layers)} routers to take part, got {len(missing)} that did not ({missing[0]})"
            raise RuntimeError(f"Routing.{method}: expected {expected}. Has the model been changed after Routing?")

    def counts(self) -> dict[str, int]:
        """Returns numbers of tokens, summed over layers and replays, and waits for the device.

        "forced": those that were given ids. "differ": those among them whose router would choose other experts; most
        of them do if ids are of other tokens. "unset": those without ids.
        """
        same, unset = (0, 0) if self._counts is None else self._counts.tolist()
        forced = sum(layer.rows for layer in self._layers) - unset
        return {"forced": forced, "differ": forced - same, "unset": unset}

    def _before(self, model: Any, args: Any, named: Any) -> None:
        if model is not self._model:
            return
        if self._is_active:
            self._open(args, named)
        elif self.was_replayed and (not torch.compiler.is_compiling() or private.checkpoints(self._model)):
            self._open_plain()

    @_outside_graphs
    def _open_plain(self) -> None:
        if not private.in_backward():
            self._begin(_Call(None, None, UNSET, None))  # what recomputes a part of it is known not to be replayed

    @_outside_graphs
    def _open(self, args: Any, named: Any) -> None:
        given = (named.get("input_ids"), named.get("inputs_embeds"), *args)
        tokens = next(value for value in given if isinstance(value, Tensor))
        shape = tuple(tokens.shape[:2])
        ids = None
        if self._ids is not None:
            is_packed = shape[0] == 1 and argument(args, named, "position_ids", 2) is not None
            ids = self._rows(self._ids[self._next_row : self._next_row + shape[0]], shape, is_packed)
            self._next_row += shape[0]
            ids = ids.to(tokens.device, torch.int64, non_blocking=True)
            ids = ids.permute(2, 0, 1, 3).flatten(1, 2).contiguous()
        recorded: Any = [None] * len(self.layers) if self._record is not None else None
        self._begin(_Call(shape, ids, self._largest, recorded))

    def _begin(self, call: _Call) -> None:
        self.call = call
        if torch.is_grad_enabled():
            for module, name, function in private.checkpoint_functions(self._model):
                self._restore.append((module, name, function))
                setattr(module, name, self._bound(function, call))

    def _rows(self, ids: Tensor, shape: tuple[int, ...], is_packed: bool) -> Tensor:
        """Returns ids (B, T, layers, k) of a call, of which the last token may be missing."""
        if len(ids) == shape[0] and ids.shape[1] == shape[1] - 1 and not is_packed:
            return torch.nn.functional.pad(ids, (0, 0, 0, 0, 0, 1), value=UNSET)
        if ids.shape[:2] != shape:
            rows = f"{tuple(ids.shape[:2])} at row {self._next_row} of {tuple(self._ids.shape)}"  # type: ignore[union-attr]
            packed = ", of all T as position_ids may be of packed sequences" if is_packed else ""
            raise checks.bad_value("Routing.replay", "ids", f"rows for a call of (B, T) = {shape}{packed}", rows)
        return ids

    def _bound(self, checkpoint: Any, call: _Call) -> Callable[..., Any]:
        """Returns the checkpointing function for layers that, when they are computed again, get ids of their call."""

        @_outside_graphs
        def bound(function: Any, *args: Any, **named: Any) -> Any:
            calls = iter([call])

            def run(*args: Any, **named: Any) -> Any:
                if call.ids is not None and not self._hooks:
                    raise RuntimeError("Routing.close: expected it after backward of what was replayed, got it before")
                before, self.call = self.call, next(calls, None) or call.again()
                try:
                    return function(*args, **named)
                finally:
                    self.call = before

            return checkpoint(run, *args, **named)

        return bound

    def _after(self, model: Any, args: Any, out: Any) -> None:
        if self.call is not None and model is self._model:
            if out is None:  # forward raised, and may be called again
                if self.call.ids is not None:
                    self._next_row -= self.call.shape[0]
                    for number in self.call.ran:
                        self._layers[number].rows -= self.call.ids.shape[1]
                self.call.recorded, self.call.ran = None, set()
            self._close_call()

    @_outside_graphs
    def _close_call(self) -> None:
        call, self.call = self.call, None
        for module, name, function in self._restore:
            setattr(module, name, function)
        self._restore.clear()
        if call.ran and call.ids is not None:  # type: ignore[union-attr]
            counts = call.counts()  # type: ignore[union-attr]
            self._counts = counts if self._counts is None else self._counts + counts
        found = [ids for ids in call.recorded or () if ids is not None]  # type: ignore[union-attr]
        if self._record is None or not found:
            return
        self._expect_all("record", [ids is not None for ids in call.recorded])  # type: ignore[union-attr]
        if len({ids.shape[1] for ids in found}) > 1:
            raise checks.bad_value("Routing.record", "model", "one k for all layers", str([i.shape[1] for i in found]))
        ids = torch.stack([ids.to(found[0].device) for ids in found], 1).int()  # (L, layers, k)
        self._record.calls.append(ids.view(*call.shape, *ids.shape[1:]))  # type: ignore[union-attr]


def argument(args: Any, named: Any, name: str, place: int) -> Any:
    """Returns what a call of a model of transformers has under a name, or at the place that the name always has."""
    return named[name] if name in named else next(iter(args[place : place + 1]), None)


def _validated(ids: Tensor) -> int:
    """Returns the largest of ids (N, T, layers, k), or raises ValueError for what no router would choose."""
    if ids.numel() == 0:
        return UNSET
    least, largest = (int(value) for value in ids.aminmax())
    if least < UNSET:
        raise checks.bad_value("Routing.replay", "ids", "experts from 0, or -1 for unset", str(least))
    ordered = ids.sort(-1).values
    is_unset = ordered[..., 0] < 0
    if bool((is_unset & (ordered[..., -1] >= 0)).any()):
        raise checks.bad_value("Routing.replay", "ids", "all k ids of a token, or none", "tokens with some")
    if bool(((ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~is_unset).any()):
        raise checks.bad_value("Routing.replay", "ids", "k experts for a token", "an expert twice for one token")
    return largest


def align(sequences: Sequence[Any], mask: Tensor | None = None, *, lengths: Sequence[int] | None = None) -> Tensor:
    """Returns ids of sequences without padding, [(n, layers, k)], where a batch has their tokens. The rest is UNSET.

    mask: (B, T), not 0 at the n tokens of each sequence. Returns (B, T, layers, k) int32, on the CPU.
    lengths: in place of it the n of sequences that are packed into one. Returns (1, sum, layers, k).
    A sequence may have n - 1 rows, without the token that was sampled last.
    Raises ValueError for no sequences, for other numbers of them or of rows, and for unequal layers or k, and TypeError
    for others than integers.
    """
    if (mask is None) == (lengths is None):
        raise checks.bad_value("align", "mask", "mask or lengths", "both or neither")
    if lengths is not None:
        lengths = [checks.integer("align", "lengths", length) for length in lengths]
        if min(lengths, default=0) < 0:
            raise checks.bad_value("align", "lengths", "numbers from 0", str(lengths))
        mask = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask)
        raise checks.bad_type("align", "mask", "a tensor (B, T)", got)
    has_token = mask.cpu() != 0
    parts = [_on_host("align", "sequences", sequence) for sequence in sequences]
    numbers = has_token.sum(1).tolist()
    if len(parts) != len(numbers):
        raise checks.bad_value("align", "sequences", f"{len(numbers)} of them", str(len(parts)))
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) != 1 or len(*shapes) != 2:
        expected = "arrays (n, layers, k) with the same layers and k"
        raise checks.bad_value("align", "sequences", expected, str([tuple(part.shape) for part in parts]))
    out = torch.full((*has_token.shape, *parts[0].shape[1:]), UNSET, dtype=torch.int32)
    for row, (part, number) in enumerate(zip(parts, numbers, strict=True)):
        if len(part) not in (number, number - 1):
            expected = f"{number} rows or one less for sequence {row}"
            raise checks.bad_value("align", "sequences", expected, str(len(part)))
        out[row, has_token[row].nonzero()[: len(part), 0]] = part
    return out if lengths is None else out[has_token][None]


def _on_host(function: str, name: str, given: Any) -> Tensor:
    """Returns ids as int32 on the CPU."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise checks.bad_type(function, name, "arrays (rows, layers, k) of integers", f"{given!r:.60}") from None
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise checks.bad_type(function, name, "arrays of integers", str(ids.dtype))
    return ids.int().cpu()


def from_engine(model: torch.nn.Module, *parts: Any, tokens: int) -> Tensor:
    """Returns the ids that vLLM or SGLang gave for one sequence, (tokens, layers, k) int32, for `align`.

    parts: arrays (rows, layers, k) that follow one another, as of prompt and completion. layers: those with experts, or
    all hidden layers of the model. tokens: of the sequence. The last may be missing and is then UNSET.
    Raises ValueError for other numbers of rows or layers, and TypeError for others than integers.
    """
    inner, choosers = routed_model("from_engine", model)
    arrays = [_on_host("from_engine", "parts", part) for part in parts]
    if not arrays or any(array.dim() != 3 for array in arrays):
        shapes = str([tuple(array.shape) for array in arrays])
        raise checks.bad_value("from_engine", "parts", "arrays (rows, layers, k)", shapes)
    ids = torch.cat(arrays)
    if len(ids) not in (tokens, tokens - 1):
        raise checks.bad_value("from_engine", "parts", f"{tokens} rows in all or one less", str(len(ids)))
    hidden = inner.config.get_text_config().num_hidden_layers
    if ids.shape[1] == hidden != len(choosers):
        places = [int(re.findall(r"\.(\d+)\.", f".{name}.")[0]) for name, *_ in choosers]
        ids = ids[:, places]
    elif ids.shape[1] != len(choosers):
        raise checks.bad_value("from_engine", "parts", f"{len(choosers)} or {hidden} layers", str(ids.shape[1]))
    return torch.nn.functional.pad(ids, (0, 0, 0, 0, 0, tokens - len(ids)), value=UNSET)
