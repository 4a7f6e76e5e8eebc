"""The public functions that choose pairs of tokens and experts beyond the router's top-k, or count them.

Results are integers or counts, so nothing here has a gradient: torch tensors that require one are read as they are.
`sequences` divides the L tokens: a number S of equally long runs, or int32 offsets (S+1,) that rise. Tokens before the
first offset, or from the last on, are in no sequence: they are not counted, and have no pairs. Offsets are clamped to
[0, L]; those that fall give an unspecified choice of pairs, and no fault.
"""

from typing import Any

from moeblaze_cupy import checks, overlaps, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, keep, untraced
from moeblaze_cupy.cuda import launch_config, runtime
from moeblaze_cupy.cuda.runtime import Runtime, current_device
from moeblaze_cupy.frameworks import Export
from moeblaze_cupy.reference import selection as reference_selection
from moeblaze_cupy.selection import balance
from moeblaze_cupy.selection import launches as selection
from moeblaze_cupy.selection.launches import Sequences
from moeblaze_cupy.types import CAPACITY_ORDERS, ROUNDINGS, SCORES


def _call(function: str, given: dict[str, Any]) -> Call:
    if arrays.framework_of(next(iter(given.values()))) is arrays.Torch:
        checks.untransformed(function, next(iter(given)), given.values())
    return Call(function, **given)


def _sequences(function: str, call: Call, number: int | None, num_tokens: int, num_experts: int) -> Sequences:
    offsets = call.described.get("sequences")
    return Sequences(checks.sequences(function, number, offsets, num_tokens, num_experts), offsets is not None)


def _on_host(call: Call, number: int | None) -> Any:
    return call.host("sequences") if number is None else number


def _with(offsets: Any, **given: Any) -> dict[str, Any]:
    """The arrays of a call by name, the offsets of its sequences last if there are any."""
    return given if offsets is None else given | {"sequences": offsets}


def _address(offsets: Any, pointers: list[int]) -> int:
    """The address of the offsets, which are the last of the pointers; 0 without offsets."""
    return 0 if offsets is None else pointers[-1]


@untraced
def tokens_per_expert(ids: Any, num_experts: int, *, sequences: Any = 1) -> Any:
    """How many slots each expert has in each sequence: (S, E) int32.

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is an empty slot. Rows may lie apart, so that
    tokens_per_expert(ids[:, :1], E) counts first choices. num_experts <= 4096.
    sequences: a number S that divides L, or int32 offsets (S+1,), see the module.
    These are the n of all balancing losses (Switch Transformers, arXiv 2101.03961, section 2.2).
    Raises TypeError (dtype, device), ValueError (shape, strides, sizes) or RuntimeError (a transform of torch).
    """
    function = "tokens_per_expert"
    num_experts = checks.integer(function, "num_experts", num_experts)
    number, offsets = checks.divided(function, sequences)
    given = _with(offsets, ids=ids)
    key, pointers = runtime.key_of(function, (num_experts, number), tuple(given.values()))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        call = _call(function, given)
        described = call.described["ids"]
        checks.rows_of_ids(function, described, num_experts)
        divided = _sequences(function, call, number, described.shape[0], num_experts)
        if call.on_cpu:
            host = call.host("ids")
            return call.export(reference.tokens_per_expert(host, num_experts, sequences=_on_host(call, number)))
        step = balance.configure_counts(described.layout, num_experts, divided, call.limits)
        pointers, export = call.pointers(), call.export
        found = runtime.keep(key, call.prepared((step, (divided.number, num_experts))))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        step, shape = found.steps
        return export(balance.tokens_per_expert(run, step, pointers[0], _address(offsets, pointers), shape).array)


@untraced
def limit_capacity(
    ids: Any,
    num_experts: int,
    capacity: int,
    *,
    order: str = "position",
    weights: Any = None,
    priority: Any = None,
    sequences: Any = 1,
) -> Any:
    """ids with at most `capacity` slots per expert and sequence: (L, k) int32, dropped and empty slots -1.

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is an empty slot. num_experts <= 4096; capacity >= 0.
    order: which slots of an expert stay. "position": the first by token, then slot (Switch Transformers; "position" of
    Megatron and DeepSpeed). "choice": first choices before second ones, then by token (GShard, arXiv 2006.16668; Tutel;
    NLLB). "weights": the largest of weights (L, k) (Megatron's and DeepSpeed's "probs"). "priority": those of tokens
    with the largest priority (L,) (batch-prioritised routing, arXiv 2106.05974; with random numbers DeepSpeed's random
    token selection).
    Equal ones stay by rising token, then slot; NaN is the largest. weights and priority have any float dtype.
    sequences: a number S that divides L, or int32 offsets (S+1,), see the module: capacity counts per sequence.
    Weights of the slots that stay are route(logits, ids=...) of the result, which renormalises after dropping.
    Raises TypeError (dtype, device), ValueError (shape, order, sizes) or RuntimeError (a transform of torch).
    """
    function = "limit_capacity"
    num_experts = checks.integer(function, "num_experts", num_experts)
    capacity = checks.integer(function, "capacity", capacity)
    number, offsets = checks.divided(function, sequences)
    values = {"weights": weights, "priority": priority}
    values = {name: array for name, array in values.items() if array is not None}
    given = _with(offsets, ids=ids, **values)
    options = (num_experts, capacity, order, number, *values)
    key, pointers = runtime.key_of(function, options, tuple(given.values()))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        checks.one_of(function, "order", order, CAPACITY_ORDERS)
        if capacity < 0:
            raise checks.bad_value(function, "capacity", "0 or more slots per expert", capacity)
        for name in ("weights", "priority"):
            if (name == order) != (name in values):
                expected = "an array" if name == order else "None"
                got = "None" if name == order else "an array"
                raise checks.bad_value(function, name, f"{expected} with order {order!r}", got)
        call = _call(function, given)
        described = call.described["ids"]
        checks.ids(function, described, num_experts)
        L, k = described.shape
        value = next((call.described[name] for name in values), None)
        if value is not None:
            letters, shape = ("L, k", (L, k)) if order == "weights" else ("L", (L,))
            checks.shape(function, order, value, letters, shape)
            checks.dtype(function, order, value, checks.floats(value))
            checks.contiguous(function, order, value)
        divided = _sequences(function, call, number, L, num_experts)
        if call.on_cpu:
            chosen = {name: call.host(name) for name in values}
            host, runs = call.host("ids"), _on_host(call, number)
            kept = reference.limit_capacity(host, num_experts, capacity, order=order, sequences=runs, **chosen)
            return call.export(kept)
        dtype = None if value is None else value.dtype
        steps = selection.configure_capacity(
            described.layout, num_experts, capacity, order, dtype, divided, call.limits
        )
        pointers, export = call.pointers(), call.export
        found = runtime.keep(key, call.prepared((steps, (L, k))))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        steps, shape = found.steps
        value_ptr, offsets_ptr = pointers[1] if values else 0, _address(offsets, pointers)
        return export(selection.limit_capacity(run, steps, pointers[0], value_ptr, offsets_ptr, shape).array)


@untraced
def expert_choice(scores: Any, capacity: int, *, sequences: Any = 1) -> tuple[Any, Any]:
    """Pairs of each expert with its `capacity` tokens of largest scores in each sequence (arXiv 2202.09368).

    scores: (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 4096: for instance the softmax of the logits over experts.
    Equal scores go to the lower token, NaN is the largest. capacity >= 0; all tokens where it is larger.
    sequences: a number S that divides L, or int32 offsets (S+1,), see the module.
    Returns token_offsets (L+1,) and ids (P,), int32: the experts of token t, rising, are ids[token_offsets[t] :
    token_offsets[t + 1]]. P = S E min(capacity, L / S); with offsets P = E min(S capacity, L), and ids past
    token_offsets[L] are -1.
    Raises TypeError (dtype, device), ValueError (shape, memory order, sizes) or RuntimeError (a transform of torch).
    """
    function = "expert_choice"
    capacity = checks.integer(function, "capacity", capacity)
    number, offsets = checks.divided(function, sequences)
    given = _with(offsets, scores=scores)
    key, pointers = runtime.key_of(function, (capacity, number), tuple(given.values()))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        if capacity < 0:
            raise checks.bad_value(function, "capacity", "0 or more tokens per expert", capacity)
        call = _call(function, given)
        described = call.described["scores"]
        checks.columns(function, "scores", described, checks.floats(described))
        L, E = described.shape
        divided = _sequences(function, call, number, L, E)
        num_pairs = reference_selection.expert_choice_pairs(L, E, capacity, divided.number, not divided.by_offsets)
        checks.pairs(function, "capacity", num_pairs)
        if call.on_cpu:
            token_offsets, ids = reference.expert_choice(
                call.host("scores"), capacity, sequences=_on_host(call, number)
            )
            return call.export(token_offsets), call.export(ids)
        steps = selection.configure_expert_choice(described.layout, capacity, divided, num_pairs, call.limits)
        pointers, export = call.pointers(), call.export
        found = runtime.keep(key, call.prepared((steps, num_pairs)))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        steps, num_pairs = found.steps
        scores_ptr, offsets_ptr = pointers[0], _address(offsets, pointers)
        if steps is None:
            chosen = selection.no_pairs(run, num_pairs)
        else:
            chosen = selection.select(run, steps, scores_ptr, offsets=offsets_ptr)
        return export(chosen[0].array), export(chosen[1].array)


@untraced
def round_tokens(scores: Any, ids: Any, *, tile: int = 128, rounding: str = "nearest") -> tuple[Any, Any]:
    """Pairs in which each expert has a multiple of `tile` tokens: token rounding (SonicMoE, arXiv 2512.14080).

    scores: (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 4096. ids: (L, k) int32 or int64, the router's choice; an
    id < 0 or >= E is an empty slot. Of f tokens that chose an expert, n are kept: those that chose it rank first, by
    their score, then all others by theirs; equal ones by rising token, NaN first.
    For chosen tokens to rank by their normalised weights put these into the scores: scores.scatter(1, ids, weights).
    rounding: "up" and "down" are the multiples of tile on either side of f; "nearest" is the nearer one, and half a
    tile goes down; "balance" goes through the experts in order and takes the one for which the sum of all changes so
    far is nearer to 0, so that the total changes by half a tile at most. n is L at most. 1 <= tile <= 2^30.
    Returns token_offsets (L+1,) and ids (P,), int32: the experts of token t, rising, are ids[token_offsets[t] :
    token_offsets[t + 1]]. P = min(L k + room, L E), where room is E (tile - 1), 0, E ((tile - 1) // 2) or tile // 2 for
    "up", "down", "nearest" and "balance"; ids past token_offsets[L] are -1.
    Raises TypeError (dtype, device), ValueError (shape, memory order, sizes) or RuntimeError (a transform of torch).
    """
    function = "round_tokens"
    tile = checks.integer(function, "tile", tile)
    given = {"scores": scores, "ids": ids}
    key, pointers = runtime.key_of(function, (tile, rounding), (scores, ids))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        checks.one_of(function, "rounding", rounding, ROUNDINGS)
        if not 1 <= tile <= launch_config.MAX_TILE:
            raise checks.bad_value(function, "tile", f"1 to {launch_config.MAX_TILE} tokens", tile)
        call = _call(function, given)
        d = call.described
        checks.columns(function, "scores", d["scores"], checks.floats(d["scores"]))
        L, E = d["scores"].shape
        checks.shape(function, "ids", d["ids"], "L, k", (L, None))
        checks.ids(function, d["ids"], E)
        num_pairs = reference_selection.rounded_pairs(L, d["ids"].shape[1], E, tile, rounding)
        checks.pairs(function, "tile", num_pairs)
        if call.on_cpu:
            host = (call.host(name) for name in ("scores", "ids"))
            token_offsets, chosen = reference.round_tokens(*host, tile=tile, rounding=rounding)
            return call.export(token_offsets), call.export(chosen)
        of_scores, of_ids = call.layout("scores", "ids")
        steps = selection.configure_round_tokens(of_scores, of_ids, tile, rounding, num_pairs, call.limits)
        pointers, export = call.pointers(), call.export
        found = runtime.keep(key, call.prepared((steps, num_pairs)))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        steps, num_pairs = found.steps
        pairs = selection.select(run, steps, *pointers) if steps else selection.no_pairs(run, num_pairs)
        return export(pairs[0].array), export(pairs[1].array)


@untraced
def list_pairs(mask: Any, num_pairs: int) -> tuple[Any, Any]:
    """The pairs that are set in a mask, by token, then expert; at most num_pairs, the first ones.

    mask: (L, E) bool or uint8, E <= 4096: any dense routing map, such as logits > 0 (ReMoE, arXiv 2412.14711).
    Returns token_offsets (L+1,) and ids (num_pairs,), int32: the experts of token t, rising, are ids[token_offsets[t] :
    token_offsets[t + 1]]; ids past token_offsets[L] are -1.
    Raises TypeError (dtype, device), ValueError (shape, memory order, sizes) or RuntimeError (a transform of torch).
    """
    function = "list_pairs"
    num_pairs = checks.integer(function, "num_pairs", num_pairs)
    key, pointers = runtime.key_of(function, (num_pairs,), (mask,))
    export: Export = keep
    found = runtime.find(key)
    if found is None:
        checks.pairs(function, "num_pairs", num_pairs)
        call = _call(function, {"mask": mask})
        described = call.described["mask"]
        checks.columns(function, "mask", described, ("bool", "uint8"))
        if call.on_cpu:
            token_offsets, ids = reference.list_pairs(call.host("mask"), num_pairs)
            return call.export(token_offsets), call.export(ids)
        L, E = described.shape
        steps = selection.configure_pairs(L, E, num_pairs, True)
        pointers, export = call.pointers(), call.export
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        pairs = selection.list_pairs(run, found.steps, *pointers)
        return export(pairs[0].array), export(pairs[1].array)


@untraced
def quantile_histogram(
    logits: Any, ids: Any, bias: Any, histogram: Any, bounds: Any, *, score: str = "sigmoid"
) -> None:
    """Adds to a histogram per expert, from which quantile balancing takes the next bias; returns nothing.

    A token's line is the largest of its scores plus bias among the experts it did not choose: an expert that is to be
    chosen has to pass it. `histogram` counts, over tokens, the line less the expert's score without bias: the bias with
    which the expert would just be chosen. Its k/E quantile is the bias with which k/E of the tokens choose the expert.
    logits: (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 4096. ids: (L, k) int32 or int64 with k < E, the router's
    choice; a token whose slots are all empty is left out, as is a NaN. bias: (E,) float32.
    histogram: (E, bins) int32, at most 8192 bins, is added to in place: sums over micro-batches need no other memory.
    bounds: (2,) float32, where the first bin begins and the last ends; values beyond count in these two.
    score: "softmax", "sigmoid", "sqrt_softplus", "identity" or "relu", as given to the router.
    Raises TypeError (dtype, device), ValueError (shape, memory order, sizes) or RuntimeError (a transform of torch).
    """
    function = "quantile_histogram"
    given = {"logits": logits, "ids": ids, "bias": bias, "bounds": bounds, "histogram": histogram}
    key, pointers = runtime.key_of(function, (score,), tuple(given.values()))
    found = runtime.find(key)
    if found and key and overlaps.ranges_meet(found.framework is arrays.CuPy, key[-len(given) :], pointers, 1):
        found = None
    if found is None:
        checks.one_of(function, "score", score, SCORES)
        checks.writable(function, "histogram", histogram)
        call = _call(function, given)
        d = call.described
        checks.columns(function, "logits", d["logits"], checks.floats(d["logits"]))
        L, E = d["logits"].shape
        checks.shape(function, "ids", d["ids"], "L, k", (L, None))
        checks.ids(function, d["ids"], E)
        if d["ids"].shape[1] >= E:
            raise checks.bad_value(function, "ids", f"fewer slots than the E = {E} experts", d["ids"].shape)
        checks.vector(function, "bias", d["bias"], "E", E, ("float32",))
        checks.vector(function, "bounds", d["bounds"], "2", 2, ("float32",))
        checks.shape(function, "histogram", d["histogram"], "E, bins", (E, None))
        checks.dtype(function, "histogram", d["histogram"], ("int32",))
        checks.contiguous(function, "histogram", d["histogram"])
        bins = d["histogram"].shape[1]
        if not 1 <= bins <= launch_config.MAX_BINS:
            raise checks.bad_value(function, "histogram", f"1 to {launch_config.MAX_BINS} bins", bins)
        read = {name: array for name, array in d.items() if name != "histogram"}
        overlaps.apart(function, read, {"histogram": d["histogram"]})
        if call.on_cpu:
            host = {name: call.host(name) for name in given}
            reference.quantile_histogram(**host, score=score)
            return
        of_logits, of_ids = call.layout("logits", "ids")
        steps = balance.configure_quantiles(of_logits, of_ids, bins, score, call.limits)
        pointers = call.pointers()
        found = runtime.keep(key, call.prepared(steps))
    with current_device(found.device):
        run = Runtime.current(found.framework, found.device)
        balance.quantile_histogram(run, found.steps, *pointers)
