"""Dispatch and forward of the layer: check arguments, choose NumPy or CUDA, hand back the caller's kind of array."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moeblaze_cupy import checks, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, Lookup, exported, graph_break, keep
from moeblaze_cupy.checks import named_pair
from moeblaze_cupy.cuda import runtime
from moeblaze_cupy.cuda.runtime import Record, Runtime, current_device
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.frameworks import Buffer, DeviceFramework, Export
from moeblaze_cupy.layer import backward, chunks
from moeblaze_cupy.layer import forward as experts
from moeblaze_cupy.layer.forward import PLAIN_PASS, PassExtras
from moeblaze_cupy.lora import checks as lora_checks
from moeblaze_cupy.quantised import scratch, scratch_e4m3
from moeblaze_cupy.rows.push import Destination
from moeblaze_cupy.types import (
    FACTORS,
    Activation,
    DispatchIndices,
    Fp8Rows,
    Fp8Weights,
    LayerArrays,
    LayerOptions,
    Lora,
    LoraRows,
    QuantizedWeight,
    SavedForBackward,
    gate_and_up,
    layer_arrays,
)


class LayerExtras(NamedTuple):
    """Values that few calls of the layer have beside its arrays and options."""

    into: Any = None  #: array that out is to be on CUDA, of its shape, dtype and kind, aligned; or a `Destination`
    wait: Callable[[], None] | None = None  #: makes the stream wait for rows of x, which travel beside dispatch
    fp8_weights: Fp8Weights | None = None
    x_scales: Any = None  #: scales of x, where it is the values of `Fp8Rows`
    decode: Callable[[Runtime, int], None] | None = None  #: the one of `PassExtras`, where it fills w1 or w2
    lora: Lora | None = None
    frozen: tuple[str, ...] = ()  #: "w1" and "w2" of those that `decode` fills, which have no gradients
    decoded_bytes: int = 0  #: of the memory that `decode` fills

    @property
    def destination(self) -> Destination | None:
        """Returns where results of several GPUs' tokens go, rows of d columns, d % 8 == 0; out is then None on CUDA."""
        return self.into if isinstance(self.into, Destination) else None


def map_saved(saved: SavedForBackward, convert: Export) -> SavedForBackward:
    """Returns the same, with every array passed through `convert`."""

    def each(value: Any) -> Any:
        return None if value is None else convert(value)

    return SavedForBackward(
        LayerArrays(*map(each, saved.arrays)),
        saved.options,
        map_index(saved.index, convert),
        each(saved.first_layer),
        each(saved.y_swi),
        saved.consumed,
        map_fp8(saved.fp8_weights, convert),
        each(saved.x_scales),
        saved.lora and saved.lora.with_factors(map(each, saved.lora.factors)),
        LoraRows(*map(each, saved.lora_rows)),
    )


def map_fp8(weights: Fp8Weights | None, convert: Export) -> Fp8Weights | None:
    if weights is None:
        return None
    made = {name: getattr(weights, name) for name in quantize.FIELDS}
    return Fp8Weights(**{n: None if a is None else convert(a) for n, a in made.items()}, gate_up=weights.gate_up)


def map_index(index: DispatchIndices, convert: Export) -> DispatchIndices:
    lists, rest = index.split()
    return rest.joined([None if array is None else convert(array) for array in lists])


@graph_break
def build_dispatch(
    ids: Any, num_experts: int, token_offsets: Any = None, *, max_slots: int | None = None
) -> DispatchIndices:
    """Builds the paper's index lists (section 4.1) in its three steps (section 4.2).

    ids: (L, k) int32 or int64; an id < 0 or >= num_experts is "no expert in this slot", an expert named
    twice by a token is two slots. num_experts <= 4096, L*k <= 2^31 - 128.
    With MOEBLAZE_CHECK_IDS=1 in the environment of the import, any of these but -1 is a ValueError here and in
    `moe_forward` and `moe`, each of whose calls then waits for the device and cannot be part of a CUDA graph.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each. ids are then (P,), and pair p is of
    token t for token_offsets[t] <= p < token_offsets[t+1]; a pair of no token is no slot. Whatever the offsets hold, a
    pair has at most one token, one whose offsets enclose it, and a larger pair has no smaller token.
    max_slots: at least 1, a bound of the slots that have a position, for buffers in expert order of so many rows.
    Slots past it, by expert, then token, then slot, count as absent, and `dropped` of the result says how many there
    are.
    Returns DispatchIndices of int32 arrays of the caller's kind.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    num_experts = checks.integer("build_dispatch", "num_experts", num_experts)
    look = Lookup("build_dispatch", (num_experts, max_slots), ("ids", "token_offsets"), (ids, token_offsets))
    record = None if checks.CHECKS_IDS else look.record
    if record is None:
        call = look.begin()
        offsets = call.described.get("token_offsets")
        checks.ids("build_dispatch", call.described["ids"], num_experts, offsets)
        if checks.CHECKS_IDS:
            checks.known_ids("build_dispatch", call.described["ids"], num_experts)
        max_slots = checks.max_slots("build_dispatch", max_slots, call.described["ids"].size)
        if call.on_cpu:
            offsets_on_host = None if offsets is None else call.host("token_offsets")
            on_host = reference.dispatch(call.host("ids"), num_experts, offsets_on_host, max_slots)
            index = map_index(on_host, call.export)
            # The caller's own array, as the view of it may be read-only, and DLPack copies such arrays.
            return index if index.ids_copied or call.export is keep else dataclasses.replace(index, ids=ids)
        num_tokens = None if offsets is None else offsets.size - 1
        layout = call.described["ids"].layout
        record = look.keep(dispatch.configure(layout, num_experts, call.limits, num_tokens, max_slots=max_slots))
    lists, copy = look.run(dispatch.index_lists)
    return _index(record.plan, lists, ids if copy is None else copy)


def _index(steps: dispatch.Dispatch, lists: Any, ids: Any) -> DispatchIndices:
    index = steps.index
    return DispatchIndices(lists, ids, index.places, index.num_experts, steps.copies_ids, index.max_slots)


@graph_break
def moe_forward(
    x: Any,
    ids: Any,
    weights: Any,
    w1: Any,
    w2: Any,
    *,
    activation: str | Activation = "swiglu",
    save: str | None = "minimal",
    b1: Any = None,
    b2: Any = None,
    gate_up: str = "halves",
    token_offsets: Any = None,
    weights_on: str = "output",
    unreduced: bool = False,
    identity_experts: int = 0,
    max_slots: int | None = None,
    precision: str | None = None,
    fp8_weights: Fp8Weights | None = None,
    lora: Lora | None = None,
    memory_limit: int | None = None,
    tf32: bool = False,
    fp8_wgrad: bool = False,
) -> tuple[Any, Any]:
    """Computes out[t] = sum over slots j of weights[t, j] * expert ids[t, j] of x[t] (paper sections 2.3, 3.1, 5).

    x: (L, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. ids: (L, k) int32 or int64, see
    `build_dispatch`. weights: (L, k) float32 or x's dtype.
    w1: (E, d, 2h), gate columns then up columns, or a pair (gate, up) of (E, d, h), for the gated activations swiglu,
    geglu (exact gelu), reglu, geglu_tanh, swiglu_clamp, swiglu_oai, swiglu_clamp_after and swiglu_softcap; (E, d, h)
    for silu, gelu (exact), relu, gelu_tanh and relu2. w2: (E, h, d). Both in x's dtype, read in place, row-major or as
    the transposed view of (E, 2h, d) / (E, d, h) storage. Either may be `QuantizedWeight`, frozen: it is decoded here,
    and again in backward, for the experts that have tokens, to memory that all layers of a stream share.
    activation: a name, or an `Activation` with constants of its own.
    b1, b2: biases of both products, added in float32, or None: b1 (E, 2h), or a pair of (E, h), or (E, h) without a
    gate; b2 (E, d). In x's dtype or float32, the last dimension contiguous. Empty slots get none.
    gate_up: "interleaved" if the columns of w1, and of b1, are gate 0, up 0, gate 1, up 1, ...; else "halves".
    save: "minimal" keeps a, b; "paper" also V(a) * M(b) (Algorithm 1); "recompute" only x; None nothing. "fp8" keeps
    a, b in e4m3 with a float32 scale for each row and 128 columns of either, whatever x's dtype: 0.52 of bf16's bytes.
    token_offsets: None, or (L+1,) int32 of tokens with any number of experts each, see `build_dispatch`; ids and
    weights are then (P,).
    weights_on: "output" as above, or "input" for experts of weight * x, as in Llama 4; x is not copied for it. Not with
    b1. b2 is not weighted then.
    unreduced: True returns the experts' outputs of each slot, (L, k, d), or (P, d) with token_offsets, in the order of
    the slots and 0 without an expert: neither weighted nor summed. weights are then None, unless they are on the input.
    This result has L*k rows of d.
    identity_experts: number Z of experts without weights and biases, ids E to E+Z-1, that return their input, as in
    LongCat-Flash; not with unreduced.
    max_slots: None, or a bound of the slots that are present, at least 1; those of identity experts count
    nothing. All buffers in expert order but the index lists then have so many rows in place of L*k. Slots past it count
    as absent; saved.index.dropped says how many.
    precision: None, or "fp8": the products but those of weight gradients multiply e4m3, with a float32 scale for each
    token of x and of out's gradient, for each row and 128 columns of V(a) * M(b) and of the gradients of a, b, and for
    each expert of w2 and half of w1. For bf16 on Hopper, d and h that are multiples of 16. `QuantizedWeight` have to be
    w1 and w2 in "mxfp4", whose numbers become e4m3 with scales that are powers of two: exact where the scales of an
    expert's blocks, and of a half's, differ by at most 2^14, else within 2^-10 of such a scale.
    fp8_weights: what `quantize_weights` made of w1 and w2, or None: it is made in the call and kept for backward.
    lora: low-rank factors beside w1 and w2, a `Lora`, or None. They enter the products themselves: nothing of the size
    of w1 or w2 is made. With precision="fp8" they multiply in x's dtype, and are added to the products of e4m3 in
    float32.
    memory_limit: None, or bytes, on CUDA, for what forward allocates at one time beyond out and what it saves, and for
    what backward allocates, gradients included; with lora those of x, weights and lora. Both run in the fewest chunks
    of tokens that keep within it. Gradients of weights, biases and lora are then sums over the chunks in float32,
    rounded once. ValueError names the least limit that is possible. Not with token_offsets or max_slots. With
    backward, d and h in 16 bits are multiples of 8, and arrays of lora have a multiple of 8 elements.
    tf32: True rounds the operands of the products of a float32 layer, forward and backward, to TF32, for tensor cores.
    fp8_wgrad: True has the gradients of w1 and w2 multiply e4m3 too, with precision="fp8". Their other operands, the
    gradients of a, b and the weighted V(a) * M(b), have a scale for each expert and 128 columns. For h that is a
    multiple of 64; not with unreduced, memory_limit or `moe_backward_data`.
    Returns out (L, d) in x's dtype and SavedForBackward (None for save=None).
    The arrays are kept by reference: whoever changes one in place before backward, as by x += out, gets wrong
    gradients. Where 2h = d (w1) or h = d (w2), storage order has the same shape and cannot be told apart.
    A NaN in x reaches its token's output and its gradients of weights, w1, w2 and x, but for "relu" not that of x. One
    in an expert's bias reaches the tokens of that expert alone.
    Raises TypeError (dtype, device, framework), ValueError (shape, memory order, names), or RuntimeError
    where CUDA arrays meet no CuPy, no usable driver or a GPU before sm_80, and of torch tensors that autograd or a
    transform of torch would have to follow: for those use `moeblaze_cupy.interop.torch`.
    """
    gate, up = _gate_and_up("moe_forward", "w1", w1)
    b1_gate, b1_up = (None, None) if b1 is None else _gate_and_up("moe_forward", "b1", b1)
    layer = layer_arrays((x, ids, weights, gate, up, w2, b1_gate, b1_up, b2, token_offsets))
    of_slots = weights_on, unreduced, identity_experts, max_slots
    options = LayerOptions(activation, save, gate_up, *of_slots, precision, memory_limit, fp8_wgrad, tf32)
    if fp8_weights is None and lora is None:
        return forward(layer, options)
    return forward(layer, options, LayerExtras(fp8_weights=fp8_weights, lora=lora))


def values_and_scales(rows: Any) -> tuple[Any, Any]:
    """Returns the values and scales of `Fp8Rows`, or other rows and None."""
    return rows if isinstance(rows, Fp8Rows) else (rows, None)


def forward(
    layer: LayerArrays, options: LayerOptions, extras: LayerExtras | None = None, function: str = "moe_forward"
) -> tuple[Any, SavedForBackward | None]:
    """Runs `moe_forward` on arrays and options that are not checked yet.

    extras: None for a plain call. function: what the caller's user called, the head of messages.
    """
    if frozen := layer.frozen:
        return _forward_of_frozen(frozen, layer, options, extras or LayerExtras(), function)
    key_options: Any = options
    given: Sequence[Any] = layer
    fp8_arrays: tuple[Any, ...] = ()
    if extras is not None:
        if extras.lora is not None:
            extras = extras._replace(lora=lora_checks.given(function, extras.lora))
        fp8_arrays = fp8_checks.arrays_of(function, options.precision, extras.fp8_weights)
        given = (*layer, *fp8_arrays, extras.x_scales, *(extras.lora.factors if extras.lora else ()))
        order, to = extras.fp8_weights and extras.fp8_weights.gate_up, extras.destination
        of_frozen = extras.frozen, extras.decoded_bytes
        key_options = options, order, to and to.place, extras.lora and extras.lora.scales, of_frozen
    look = Lookup("moe_forward", key_options, (), given)
    # A record says that such arguments have passed all checks. Only their contents may be other ones.
    record = None if checks.CHECKS_IDS else look.record
    if record is None:
        extras_given = extras or LayerExtras()
        call, options, described = _checked_forward(function, layer, options, extras_given, fp8_arrays)
        if call.on_cpu:
            return _forward_on_cpu(call, layer, options, extras_given)
        to, layouts = extras_given.destination, [array and array.layout for array in described]
        factors = extras_given.lora and extras_given.lora.with_factors(layouts[-len(FACTORS) :])
        form = layer_arrays(layouts[:_LAYER]), options, call.limits, not fp8_arrays, to and to.place, factors
        plan = chunks.configure_forward(function, *form, extras_given.frozen, extras_given.decoded_bytes)
        record = look.keep_described(plan, call, described)
        if call.compiles and options.save is not None and not to:
            how = backward.default_options(form[0], factors, extras_given.frozen)
            after = chunks.configure_after(plan, form[0], call.limits, how, factors=factors)
            runtime.compile_ahead(call.device, after)
    with current_device(record.device):
        return _launched_forward(look, record, extras)


def _forward_of_frozen(
    frozen: dict[str, QuantizedWeight], layer: LayerArrays, options: LayerOptions, extras: LayerExtras, function: str
) -> tuple[Any, SavedForBackward | None]:
    """Runs `forward` with these weights in four or eight bits: it reads arrays that they are decoded to."""
    if layer.w1_up is not None:
        raise checks.bad_type(function, "w1", "arrays in a pair, or one QuantizedWeight of both", "a pair with one")
    checks.one_of(function, "precision", options.precision, fp8_checks.PRECISIONS)
    decoded: scratch.Decoded | scratch_e4m3.DecodedE4m3
    if options.precision is None:
        decoded = scratch.decoded(function, frozen)
    else:
        if extras.fp8_weights is not None:
            raise checks.bad_value(function, "fp8_weights", "None with QuantizedWeight", type(extras.fp8_weights))
        decoded = scratch_e4m3.decoded(function, frozen, options.gate_up)
        extras = extras._replace(fp8_weights=decoded.fp8_weights)
    of_frozen = extras._replace(decode=decoded.decode, frozen=tuple(frozen), decoded_bytes=decoded.nbytes)
    out, saved = forward(decoded.layer(layer), options, of_frozen, function)
    if saved is None:
        return out, None
    decoded.keep()
    arrays = saved.arrays.with_weights(frozen)
    return out, dataclasses.replace(saved, arrays=arrays, decoded_by=decoded.number, fp8_weights=None)


def _launched_forward(look: Lookup, record: Record, extras: LayerExtras | None) -> tuple[Any, SavedForBackward | None]:
    """Launches the forward of a record and exports its results.

    look: has `LayerArrays`, and with extras the arrays of `Fp8Weights` if given, x's scales, and factors if given.
    """
    plan: experts.Forward | chunks.ForwardChunks = record.plan
    run = Runtime.current(record.framework, record.device)
    pointers, given = look.pointers, look.given
    fp8_weights = x_scales = lora = None
    of_pass = PLAIN_PASS
    if extras is not None:
        fp8_weights, x_scales, lora = extras.fp8_weights, extras.x_scales, extras.lora
        weights_fp8, factors = None, PLAIN_PASS.factors
        if lora is not None:
            end = -len(FACTORS)
            factors, lora = Lora(*pointers[end:]), lora.with_factors(given[end:])
            pointers, given = pointers[:end], given[:end]
        if fp8_weights is not None:
            weights_fp8 = fp8.Addresses(*pointers[_LAYER:-1])
            if look.export is not keep:  # the array it was imported to, as for the other arrays
                imported = dict(zip(fp8_checks.FIELDS, given[_LAYER:-1], strict=True))
                fp8_weights = Fp8Weights(**imported, gate_up=fp8_weights.gate_up)
        of_pass = pass_extras(record.framework, extras.into, extras.wait, weights_fp8, pointers[-1])
        of_pass = of_pass._replace(decode=extras.decode, factors=factors)
    if plan.quantize:
        made, weights_fp8 = plan.quantize.make(run, (pointers[3], pointers[4]), pointers[5])
        fp8_weights = Fp8Weights(**made, gate_up=plan.options.gate_up)
        of_pass = of_pass._replace(weights_fp8=weights_fp8)
    addresses = layer_arrays(pointers[:_LAYER])
    if isinstance(plan, experts.Forward):
        result = experts.moe_forward(run, plan, addresses, of_pass)
    else:
        result = chunks.moe_forward(run, plan, addresses, of_pass)
    out = result.out if look.export is keep else exported(look.export, result.out)
    if plan.options.save is None:
        return out, None
    x, ids, weights, gate, up, w2, b1_gate, b1_up, b2 = given[:9]
    if isinstance(plan, experts.Forward):
        index = _index(plan.dispatch, result.lists, ids if result.ids is None else result.ids)
    else:
        index = plan.indices(result.lists, ids)
    kept = layer_arrays((x, None, weights, gate, up, w2, b1_gate, b1_up, b2, None))
    made_by_forward = result.first_layer, result.y_swi, False, fp8_weights, x_scales, lora, result.lora_rows
    return out, SavedForBackward(kept, plan.options, index, *made_by_forward)


def pass_extras(
    framework: DeviceFramework,
    into: Any,
    wait: Callable[[], None] | None,
    weights_fp8: fp8.Addresses | None,
    x_scales: int,
    grad_scales: int = 0,
) -> PassExtras:
    """Returns the extras of a pass. into: that of `LayerExtras`."""
    if isinstance(into, Destination):
        return PassExtras(None, wait, weights_fp8, x_scales, grad_scales, into.addresses(framework))
    out = None if into is None else Buffer(into, framework.describe(into).ptr)
    return PassExtras(out, wait, weights_fp8, x_scales, grad_scales)


_LAYER = len(LayerArrays._fields)
NAMES_EXPERTS = ("moe_forward", "moe")  # their ids name experts that the call has; those of ranks name others, too


def _checked_forward(
    function: str, layer: LayerArrays, options: LayerOptions, extras: LayerExtras, fp8_arrays: tuple[Any, ...]
) -> tuple[Call, LayerOptions, list[Any]]:
    """Returns the call, its options as launches have them, and its arrays in `forward`'s order; raises as checks do."""
    names = layer.arguments()
    required = names[0], names[1], names[3], names[5]
    named = {n: array for n, array in zip(names, layer, strict=True) if array is not None or n in required}
    named |= dict(zip(fp8_checks.NAMES, fp8_arrays, strict=False))
    if extras.lora is not None:
        named |= {n: a for n, a in zip(lora_checks.NAMES, extras.lora.factors, strict=True) if a is not None}
    if extras.x_scales is not None:
        named["x.scales"] = extras.x_scales
    checks.untracked(function, named)
    call = Call(function, **named)
    options = checks.layer_options(function, options, layer.router_weights is not None, layer.b1_gate is not None)
    in_e4m3 = call.described["x"]
    if extras.x_scales is not None:  # the checks see what the rows stand for
        call.described["x"] = dataclasses.replace(in_e4m3, dtype="bfloat16")
    if options.precision is not None:
        decoded = [name for name in extras.frozen if call.described[name].dtype in fp8.E4M3_DTYPES]
        call.described |= {n: dataclasses.replace(call.described[n], dtype="bfloat16") for n in decoded}
    d = LayerArrays(*map(call.described.get, names))
    checks.layer(function, d, options)
    checks.tf32(function, options.tf32, d.x)
    checks.identity_experts(function, options, d.w2.shape[0])
    if extras.lora is not None:
        lora_checks.layer(function, d, options, [call.described.get(name) for name in lora_checks.NAMES])
    if checks.CHECKS_IDS and function in NAMES_EXPERTS:
        checks.known_ids(function, d.ids, d.w2.shape[0] + options.identity_experts)
    options = options._replace(max_slots=checks.max_slots(function, options.max_slots, d.ids.size))
    if options.memory_limit is not None:
        given = options.memory_limit, None if options.save is None else d.w2
        without = {"token_offsets": d.token_offsets, "max_slots": options.max_slots}
        options = options._replace(memory_limit=checks.memory_limit(function, *given, **without))
        if extras.lora is not None and options.save is not None:
            lora_checks.summed(function, [call.described.get(name) for name in lora_checks.NAMES])
    checks.one_of(function, "precision", options.precision, fp8_checks.PRECISIONS)
    beside = {"factors": extras.lora is not None, "packed": bool(extras.frozen)}
    fp8_checks.wgrad(function, options, d.w2.shape[1], **beside)
    if options.precision is not None:
        limits = None if call.on_cpu else call.limits
        order = None if extras.fp8_weights is None else extras.fp8_weights.gate_up
        biases = {name: call.described[name] for name in names[6:9] if name in named}
        weights = [call.described[name] for name in fp8_checks.NAMES if name in named]
        fp8_checks.layer(function, d.x, d.w2, options.activation, options.gate_up, biases, weights, order, limits)
    if extras.x_scales is not None:
        if options.precision is None:
            raise checks.bad_value(function, "x", "bf16 rows without precision='fp8'", "rows in e4m3")
        checks.fp8_rows(function, "x", in_e4m3, call.described["x.scales"])
    others = [*map(call.described.get, fp8_checks.NAMES[: len(fp8_arrays)]), call.described.get("x.scales")]
    others += [call.described.get(name) for name in lora_checks.NAMES] if extras.lora else []
    call.described["x"] = in_e4m3
    return call, options, [in_e4m3, *d[1:], *others]


def _gate_and_up(function: str, name: str, weight: Any) -> tuple[Any, Any]:
    """Returns the array and None, or the pair (gate, up)."""
    if not isinstance(weight, (tuple, list)) or isinstance(weight, QuantizedWeight):
        return weight, None
    for part, array in named_pair(function, name, weight).items():
        if array is None:
            raise checks.bad_type(function, part, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array))
    return gate_and_up(weight)


def _forward_on_cpu(
    call: Call, layer: LayerArrays, options: LayerOptions, extras: LayerExtras
) -> tuple[Any, SavedForBackward | None]:
    if extras.wait is not None:
        extras.wait()
    given = {name: call.host(name) for name in call.described}
    host = LayerArrays(*map(given.get, layer.arguments()))
    fp8_weights = None
    if extras.fp8_weights is not None:
        fields = zip(fp8_checks.FIELDS, map(given.get, fp8_checks.NAMES), strict=True)
        fp8_weights = Fp8Weights(**dict(fields), gate_up=options.gate_up)
    x = host.x
    if extras.x_scales is not None:
        x = reference.fp8.dequantize(x, given["x.scales"], host.w2.dtype)
    lora = None
    if extras.lora is not None:
        lora = extras.lora.with_factors(map(given.get, lora_checks.NAMES))
    out, saved = reference.moe_forward(
        x,
        *host[1:3],
        host.w1,
        host.w2,
        b1=host.b1,
        b2=host.b2,
        token_offsets=host.token_offsets,
        fp8_weights=fp8_weights,
        lora=lora,
        **options._asdict(),
    )
    if saved is not None:
        if call.framework is arrays.Torch:
            saved = map_saved(saved, call.export)
            own = layer._replace(ids=None, token_offsets=None)
            saved = dataclasses.replace(saved, arrays=own, x_scales=extras.x_scales, lora=extras.lora)
        if extras.fp8_weights is not None:
            saved = dataclasses.replace(saved, fp8_weights=extras.fp8_weights)
    return call.export(out), saved
