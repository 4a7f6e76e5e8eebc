"""The public functions that choose pairs of tokens and experts beyond the router's top-k, or count them.

Results are integers or counts, so nothing here has a gradient: torch tensors that require one are read as they are.
`sequences` divides the L tokens: a number S of equally long runs, or int32 offsets (S+1,) that rise. Tokens before the
first offset, or from the last on, are in no sequence: they are not counted, and have no pairs. Offsets are clamped to
[0, L]; those that fall give an unspecified choice of pairs, and no fault.
"""

from typing import Any

from moeblaze_cupy import checks, overlaps, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, Lookup, graph_break
from moeblaze_cupy.reference import selection as reference_selection
from moeblaze_cupy.selection import balance
from moeblaze_cupy.selection import config as selection_config
from moeblaze_cupy.selection import launches as selection
from moeblaze_cupy.selection.launches import Sequences
from moeblaze_cupy.types import CAPACITY_ORDERS, ROUNDINGS, SCORES


def _sequences(call: Call, number: int | None, num_tokens: int, num_experts: int) -> Sequences:
    offsets = call.described.get("sequences")
    return Sequences(checks.sequences(call.function, number, offsets, num_tokens, num_experts), offsets is not None)


@graph_break
def tokens_per_expert(ids: Any, num_experts: int, *, sequences: Any = 1) -> Any:
    """Returns how many slots each expert has in each sequence: (S, E) int32.

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is an empty slot. Rows may lie apart, so that
    tokens_per_expert(ids[:, :1], E) counts first choices. num_experts <= 4096.
    sequences: a number S that divides L, or int32 offsets (S+1,), see the module.
    These are the n of all balancing losses (Switch Transformers, arXiv 2101.03961, section 2.2).
    Raises TypeError (dtype, device), ValueError (shape, strides, sizes) or RuntimeError (a transform of torch).
    """
    function = "tokens_per_expert"
    num_experts = checks.integer(function, "num_experts", num_experts)
    number, offsets = checks.divided(function, sequences)
    look = Lookup(function, (num_experts, number), ("ids", "sequences"), (ids, offsets))
    if look.record is None:
        call = look.begin(counts=True)
        described = call.described["ids"]
        checks.rows_of_ids(function, described, num_experts)
        divided = _sequences(call, number, described.shape[0], num_experts)
        if call.on_cpu:
            return call.on_host(reference.tokens_per_expert, num_experts=num_experts, sequences=number)
        step = balance.configure_counts(described.layout, num_experts, divided, call.limits)
        look.keep((step, (divided.number, num_experts)))
    return look.run(balance.tokens_per_expert)


@graph_break
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
    """Returns ids with at most `capacity` slots per expert and sequence: (L, k) int32, dropped and empty slots -1.

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
    given = ids, weights, priority, offsets
    look = Lookup(function, (num_experts, capacity, order, number), ("ids", "weights", "priority", "sequences"), given)
    if look.record is None:
        checks.one_of(function, "order", order, CAPACITY_ORDERS)
        if capacity < 0:
            raise checks.bad_value(function, "capacity", "0 or more slots per expert", capacity)
        for name, array in (("weights", weights), ("priority", priority)):
            if (name == order) != (array is not None):
                expected = "an array" if name == order else "None"
                got = "None" if name == order else "an array"
                raise checks.bad_value(function, name, f"{expected} with order {order!r}", got)
        call = look.begin(counts=True)
        described, value = call.described["ids"], call.described.get(order)
        checks.ids(function, described, num_experts)
        L, k = described.shape
        if value is not None:
            letters, shape = ("L, k", (L, k)) if order == "weights" else ("L", (L,))
            checks.shape(function, order, value, letters, shape)
            checks.dtype(function, order, value, checks.floats(value))
            checks.contiguous(function, order, value)
        divided = _sequences(call, number, L, num_experts)
        if call.on_cpu:
            options = {"num_experts": num_experts, "capacity": capacity, "order": order, "sequences": number}
            return call.on_host(reference.limit_capacity, **options)
        form = described.layout, num_experts, capacity, order, None if value is None else value.dtype, divided
        look.keep((selection.configure_capacity(*form, call.limits), (L, k)))
    return look.run(selection.limit_capacity)


@graph_break
def expert_choice(scores: Any, capacity: int, *, sequences: Any = 1) -> tuple[Any, Any]:
    """Returns pairs of each expert with its `capacity` tokens of largest scores in each sequence (arXiv 2202.09368).

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
    look = Lookup(function, (capacity, number), ("scores", "sequences"), (scores, offsets))
    if look.record is None:
        if capacity < 0:
            raise checks.bad_value(function, "capacity", "0 or more tokens per expert", capacity)
        call = look.begin(counts=True)
        described = call.described["scores"]
        checks.columns(function, "scores", described, checks.floats(described))
        L, E = described.shape
        divided = _sequences(call, number, L, E)
        num_pairs = reference_selection.expert_choice_pairs(L, E, capacity, divided.number, not divided.by_offsets)
        checks.pairs(function, "capacity", num_pairs)
        if call.on_cpu:
            return call.on_host(reference.expert_choice, capacity=capacity, sequences=number)
        steps = selection.configure_expert_choice(described.layout, capacity, divided, num_pairs, call.limits)
        look.keep((steps, num_pairs))
    pairs: tuple[Any, Any] = look.run(selection.expert_choice)
    return pairs


@graph_break
def round_tokens(scores: Any, ids: Any, *, tile: int = 128, rounding: str = "nearest") -> tuple[Any, Any]:
    """Returns pairs in which each expert has a multiple of `tile` tokens: token rounding (SonicMoE, arXiv 2512.14080).

    scores: (L, E) bf16, fp16 or fp32 (fp64 on the CPU), E <= 4096. ids: (L, k) int32 or int64, the router's choice; an
    id < 0 or >= E is an empty slot. An expert that f tokens chose keeps n tokens: those that chose it rank first, by
    their score, then all others by theirs; equal ones by rising token, NaN first.
    Chosen tokens rank by their normalised weights if the scores hold these: scores.scatter(1, ids, weights).
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
    look = Lookup(function, (tile, rounding), ("scores", "ids"), (scores, ids))
    if look.record is None:
        checks.one_of(function, "rounding", rounding, ROUNDINGS)
        if not 1 <= tile <= selection_config.MAX_TILE:
            raise checks.bad_value(function, "tile", f"1 to {selection_config.MAX_TILE} tokens", tile)
        call = look.begin(required=2, counts=True)
        d = call.described
        checks.columns(function, "scores", d["scores"], checks.floats(d["scores"]))
        L, E = d["scores"].shape
        checks.shape(function, "ids", d["ids"], "L, k", (L, None))
        checks.ids(function, d["ids"], E)
        num_pairs = reference_selection.rounded_pairs(L, d["ids"].shape[1], E, tile, rounding)
        checks.pairs(function, "tile", num_pairs)
        if call.on_cpu:
            return call.on_host(reference.round_tokens, tile=tile, rounding=rounding)
        form = d["scores"].layout, d["ids"].layout, tile, rounding, num_pairs
        look.keep((selection.configure_round_tokens(*form, call.limits), num_pairs))
    pairs: tuple[Any, Any] = look.run(selection.round_tokens)
    return pairs


@graph_break
def list_pairs(mask: Any, num_pairs: int) -> tuple[Any, Any]:
    """Returns the pairs that are set in a mask, by token, then expert; at most num_pairs, the first ones.

    mask: (L, E) bool or uint8, E <= 4096: any dense routing map, such as logits > 0 (ReMoE, arXiv 2412.14711).
    Returns token_offsets (L+1,) and ids (num_pairs,), int32: the experts of token t, rising, are ids[token_offsets[t] :
    token_offsets[t + 1]]; ids past token_offsets[L] are -1.
    Raises TypeError (dtype, device), ValueError (shape, memory order, sizes) or RuntimeError (a transform of torch).
    """
    function = "list_pairs"
    num_pairs = checks.integer(function, "num_pairs", num_pairs)
    look = Lookup(function, (num_pairs,), ("mask",), (mask,))
    if look.record is None:
        checks.pairs(function, "num_pairs", num_pairs)
        call = look.begin(counts=True)
        described = call.described["mask"]
        checks.columns(function, "mask", described, ("bool", "uint8"))
        if call.on_cpu:
            return call.on_host(reference.list_pairs, num_pairs=num_pairs)
        L, E = described.shape
        look.keep(selection.configure_pairs(L, E, num_pairs, True))
    pairs: tuple[Any, Any] = look.run(selection.list_pairs)
    return pairs


@graph_break
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
    function, names = "quantile_histogram", ("logits", "ids", "bias", "bounds", "histogram")
    look = Lookup(function, (score,), names, (logits, ids, bias, bounds, histogram))
    if look.overlaps(1):
        look.record = None  # the checks say whether elements are shared
    if look.record is None:
        checks.one_of(function, "score", score, SCORES)
        checks.writable(function, "histogram", histogram)
        call = look.begin(required=len(names), counts=True)
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
        if not 1 <= bins <= selection_config.MAX_BINS:
            raise checks.bad_value(function, "histogram", f"1 to {selection_config.MAX_BINS} bins", bins)
        overlaps.apart(function, {name: d[name] for name in names[:-1]}, {"histogram": d["histogram"]})
        if not call.on_cpu:
            look.keep(balance.configure_quantiles(d["logits"].layout, d["ids"].layout, bins, score, call.limits))
    if look.record is None:
        look.call.on_host(reference.quantile_histogram, score=score)
    else:
        look.run(balance.quantile_histogram)
    arrays.count_writes((histogram,))
