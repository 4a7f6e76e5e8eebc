"""A layer within a limit of memory: its passes run on one chunk of tokens after another.

Every chunk has a dispatch of its own, so its launches are those of a layer with so few tokens, at the addresses of its
part of each array. Results and what is kept are whole arrays, of which chunks write their parts. The gradients of
weights, biases and low-rank factors are sums over the chunks, in float32 and in the order of the chunks.

The limit is for what forward allocates beyond out and what it keeps, and for all that backward allocates, gradients
included. Chunks are as few as keep forward and its largest backward within it, by what a `Recorder` notes of them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from moeblaze_cupy import checks
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.launch_config import DeviceLimits, ceil_div
from moeblaze_cupy.cuda.recorder import Recorder, allocation_of
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.fp8.operands import WeightsMade
from moeblaze_cupy.frameworks import ALIGNMENT, ITEMSIZE, Buffer, Layout, packed
from moeblaze_cupy.gemm.biases import Bias
from moeblaze_cupy.gemm.products import Weight
from moeblaze_cupy.layer import backward
from moeblaze_cupy.layer import forward as experts
from moeblaze_cupy.layer.backward import Accumulated, Backward, Results
from moeblaze_cupy.layer.forward import PLAIN_PASS, Forward, ForwardResult, KeptMemory, PassExtras, half_columns
from moeblaze_cupy.lora import config as lora_config
from moeblaze_cupy.lora import launches as lora
from moeblaze_cupy.rows import push
from moeblaze_cupy.types import (
    FACTORS,
    BackwardArrays,
    BackwardOptions,
    ChunkedIndices,
    Gradients,
    LayerArrays,
    LayerOptions,
    Lora,
    LoraRows,
    SavedForBackward,
)

#: The tokens of a chunk are a multiple, so that parts of arrays of any width are as aligned as the arrays.
STEP = ALIGNMENT
NO_LAYER = LayerArrays(*[0] * len(LayerArrays._fields))


class Cut(NamedTuple):
    """Tokens in chunks of equal size, of which the last one may have fewer."""

    num_tokens: int
    tokens: int  # of a chunk, a multiple of STEP unless it is the only one

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the tokens of the first chunk, and of the last one if these are fewer."""
        last = (self.num_tokens - 1) % self.tokens + 1
        return (self.tokens,) if last == self.tokens else (self.tokens, last)

    @property
    def starts(self) -> range:
        return range(0, self.num_tokens, self.tokens)

    def chunks(self, steps: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
        """Yields each chunk's number, first token and launches. steps: those of `sizes`."""
        for number, first in enumerate(self.starts):
            yield number, first, steps[0 if first + self.tokens <= self.num_tokens else -1]

    @property
    def shortest(self) -> "Cut":
        """Returns as many tokens as have all sizes of chunks, which allocate at most what all chunks do."""
        return self._replace(num_tokens=sum(self.sizes))


def _first_rows(array: Layout | None, number: int) -> Layout | None:
    return array and array._replace(shape=(number, *array.shape[1:]))


def _row_bytes(array: Layout | None) -> int:
    return 0 if array is None else math.prod(array.shape[1:]) * array.itemsize


def _part_of_layer(layer: LayerArrays, number: int) -> LayerArrays:
    """Returns the layouts of a chunk's part of the arrays with a row for each token."""
    rows = {name: _first_rows(getattr(layer, name), number) for name in ("x", "ids", "router_weights")}
    return layer._replace(**rows)


def _steps_of_layer(layer: LayerArrays) -> LayerArrays:
    """Returns the bytes from one token to the next in each array of the layer."""
    rows = {name: _row_bytes(getattr(layer, name)) for name in ("x", "ids", "router_weights")}
    return NO_LAYER._replace(**rows)


def _moved(addresses: LayerArrays, steps: LayerArrays, first: int) -> LayerArrays:
    return LayerArrays(*(start + first * step for start, step in zip(addresses, steps, strict=True)))


class Kept(NamedTuple):
    """The layouts of what forward keeps for backward."""

    lists: Layout
    first_layer: Layout | None
    y_swi: Layout | None
    u1: Layout | None
    u2: Layout | None

    @classmethod
    def of(
        cls, index: IndexLayout, options: LayerOptions, h: int, dtype: str, ranks: Iterable[int | None] = (None, None)
    ) -> "Kept":
        """Returns those of one chunk. ranks: of both pairs of low-rank factors."""
        rows, first_layer = index.num_rows, None
        if options.save in ("minimal", "paper"):
            first_layer = packed((rows, h * options.halves), dtype)
        elif options.save == "fp8":
            first_layer = packed((launch_config.saved_fp8(rows, h, options.halves).nbytes,), "uint8")
        y_swi = packed((rows, h), dtype) if options.save == "paper" else None
        u1, u2 = (
            packed((rows, lora_config.padded(rank)), dtype) if rank and options.save != "recompute" else None
            for rank in ranks
        )
        return cls(packed((index.size,), "int32"), first_layer, y_swi, u1, u2)

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self))

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the bytes from one chunk's part to the next, for chunks of these sizes."""
        return tuple(ceil_div(_nbytes(part), ALIGNMENT) * ALIGNMENT for part in self)

    def joined(self, last: "Kept", number: int) -> "Kept":
        """Returns those of so many chunks, of which the last has these sizes."""
        whole = []
        for part, step, end in zip(self, self.steps, last, strict=True):
            if part is not None and end is not None:
                rows = (number - 1) * step // _row_bytes(part) + end.shape[0]
                part = packed((rows, *part.shape[1:]), part.dtype)
            whole.append(part)
        return Kept(*whole)  # type: ignore[arg-type]  # as many


def _ranks(factors: Lora | None) -> tuple[int | None, ...]:
    return tuple(a and a.shape[-2] for a in (factors.a1, factors.a2)) if factors else (None, None)


def _nbytes(array: Layout | None) -> int:
    return 0 if array is None else array.shape[0] * _row_bytes(array)


@dataclass(frozen=True, eq=False)
class ForwardChunks:
    """A forward in chunks. steps: the launches of `cut.sizes`."""

    options: LayerOptions
    cut: Cut
    index: IndexLayout  # of all tokens
    steps: tuple[Forward, ...]
    out: tuple[int, ...]
    dtype: str
    row_bytes: LayerArrays  # from one token to the next
    kept: Kept  # of all chunks
    kept_steps: tuple[int, ...]

    @property
    def quantize(self) -> WeightsMade | None:
        return self.steps[0].quantize

    def indices(self, lists: Any, ids: Any) -> ChunkedIndices:
        places = {"token_index_map": (0, self.index.slots_shape)}  # the shape alone has a meaning
        return ChunkedIndices(lists, ids, places, self.index.num_experts, chunk_tokens=self.cut.tokens)


def moe_forward(
    run: Runtime, steps: ForwardChunks, layer: LayerArrays, extras: PassExtras = PLAIN_PASS
) -> ForwardResult:
    """Runs `layer.forward.moe_forward` on each chunk, from the addresses of the layer's arrays."""
    out = run.empty(steps.out, steps.dtype)
    keeps = steps.options.save is not None
    memory = [run.empty(part.shape, part.dtype) if keeps and part else None for part in steps.kept]
    row_bytes = math.prod(steps.out[1:]) * ITEMSIZE[steps.dtype]
    for number, first, of_chunk in steps.cut.chunks(steps.steps):
        parts = [
            whole and Buffer(None, whole.ptr + number * step)
            for whole, step in zip(memory, steps.kept_steps, strict=True)
        ]
        to = extras._replace(out=Buffer(None, out.ptr + first * row_bytes), kept=KeptMemory(*parts))
        experts.moe_forward(run, of_chunk, _moved(layer, steps.row_bytes, first), to)
    lists, first_layer, y_swi, *lora_rows = (whole and whole.array for whole in memory)
    return ForwardResult(out.array, lists, None, first_layer, y_swi, LoraRows(*lora_rows))


@cached
def _forward_chunks(
    layer: LayerArrays, options: LayerOptions, limits: DeviceLimits, quantizes: bool, cut: Cut, factors: Lora | None
) -> ForwardChunks:
    (L, d), (E, h, _), dtype, k = layer.x.shape, layer.w2.shape, layer.w2.dtype, layer.ids.shape[1]
    parts = (_part_of_layer(layer, number) for number in cut.sizes)
    steps = tuple(experts.configure_forward(part, options, limits, quantizes, None, factors) for part in parts)
    kept = [Kept.of(IndexLayout(number, k, E), options, h, dtype, _ranks(factors)) for number in cut.sizes]
    index = IndexLayout(L, k, E)
    return ForwardChunks(
        options=options,
        cut=cut,
        index=index,
        steps=steps,
        out=(*index.slots_shape, d) if options.unreduced else (L, d),
        dtype=dtype,
        row_bytes=_steps_of_layer(layer),
        kept=kept[0].joined(kept[-1], len(cut.starts)),
        kept_steps=kept[0].steps,
    )


class Fit(NamedTuple):
    """Chunks, and the most bytes that their passes allocate at one time."""

    cut: Cut
    nbytes: int


@cached
def fit(
    layer: LayerArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    frozen: tuple[str, ...] = (),
    decoded_bytes: int = 0,
    factors: Lora | None = None,
) -> Fit:
    """Returns the fewest chunks within `options.memory_limit`; if there are none, those that allocate least.

    frozen: "w1" or "w2" that are decoded in the call. decoded_bytes: of the memory that they are decoded to. factors:
    low-rank, their layouts.
    """
    L, limit = layer.x.shape[0], options.memory_limit
    assert limit is not None

    @functools.cache
    def in_chunks(number: int) -> Fit:
        tokens = ceil_div(ceil_div(L, number), STEP) * STEP
        cut = Cut(L, max(min(tokens, L), 1))
        return Fit(cut, decoded_bytes + peak_bytes(layer, options, limits, frozen, cut, factors))

    number = 1
    while in_chunks(number).nbytes > limit and in_chunks(number).cut.tokens > STEP:
        number *= 2
    if in_chunks(number).nbytes > limit:
        return min((in_chunks(1 << n) for n in range(number.bit_length())), key=lambda tried: tried.nbytes)
    too_few = number // 2
    while number - too_few > 1:
        middle = (number + too_few) // 2
        number, too_few = (middle, too_few) if in_chunks(middle).nbytes <= limit else (number, middle)
    return in_chunks(number)


def configure_forward(
    function: str,
    layer: LayerArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    quantizes: bool = False,
    place: push.PeerOffset | None = None,
    factors: Lora | None = None,
    frozen: tuple[str, ...] = (),
    decoded_bytes: int = 0,
) -> Forward | ForwardChunks:
    """Configures a forward of arrays of these layouts: in chunks only if `options.memory_limit` needs some.

    function: what messages name. frozen, decoded_bytes: as of `fit`. For the other arguments see `layer.forward`.
    Raises ValueError, with the least possible, for a limit below that.
    """
    if options.memory_limit is None:
        return experts.configure_forward(layer, options, limits, quantizes, place, factors)
    found = fit(layer, options, limits, frozen, decoded_bytes, factors)
    if found.nbytes > options.memory_limit:
        expected = f"at least {found.nbytes} bytes for {found.cut.num_tokens} tokens of this layer"
        raise checks.bad_value(function, "memory_limit", expected, options.memory_limit)
    return _in_chunks(layer, options, limits, quantizes, found.cut, factors)


def _in_chunks(
    layer: LayerArrays, options: LayerOptions, limits: DeviceLimits, quantizes: bool, cut: Cut, factors: Lora | None
) -> Forward | ForwardChunks:
    if cut.tokens >= cut.num_tokens:
        return experts.configure_forward(layer, options, limits, quantizes, None, factors)
    return _forward_chunks(layer, options, limits, quantizes, cut, factors)


def peak_bytes(
    layer: LayerArrays,
    options: LayerOptions,
    limits: DeviceLimits,
    frozen: tuple[str, ...],
    cut: Cut,
    factors: Lora | None = None,
) -> int:
    """Returns the most bytes that forward allocates beyond what it returns, or its largest backward with gradients.

    With low-rank factors it is the backward without gradients of what they adapt. Memory of decoded weights is not
    among them.
    """
    steps = _in_chunks(layer, options, limits, False, cut, factors)
    run, made = recorded_forward(steps)
    kept = (made.lists, made.ids, made.first_layer, made.y_swi, *made.lora_rows) if options.save is not None else ()
    peak = run.peak - sum(allocation_of(array).nbytes for array in (made.out, *kept) if array is not None)
    if options.save is not None:
        how = backward.default_options(layer, factors, frozen)._replace(keep_saved=True)
        after = configure_after(steps, layer, limits, how, factors=factors)
        kept_rows = LoraRows(*(1 if rows is not None else 0 for rows in made.lora_rows))
        peak = max(peak, recorded_backward(after, options, lora_rows=kept_rows)[0].peak)
    return peak


def recorded_forward(steps: Forward | ForwardChunks) -> tuple[Recorder, ForwardResult]:
    """Returns what a forward allocates and launches, once for each size of chunks; and what it makes."""
    run, extras = Recorder(), _recorded_extras(steps.options)
    if isinstance(steps, Forward):
        return run, experts.moe_forward(run, steps, NO_LAYER, extras)
    return run, moe_forward(run, dataclasses.replace(steps, cut=steps.cut.shortest), NO_LAYER, extras)


def configure_after(
    forward: Forward | ForwardChunks,
    layer: LayerArrays,
    limits: DeviceLimits,
    how: BackwardOptions,
    accumulate: Accumulated = (),
    factors: Lora | None = None,
) -> "Backward | BackwardChunks":
    """Configures the backward after a forward, of packed memory.

    layer, factors: the layouts that the forward was configured with. how, accumulate: see `layer.backward`.
    """
    if isinstance(forward, Forward):
        index = forward.dispatch.index
        kept = Kept.of(index, forward.options, layer.w2.shape[1], forward.dtype, _ranks(factors))
    else:
        index, kept = forward.index, forward.kept
    of_backward = layer._replace(ids=None, token_offsets=None)
    arrays = BackwardArrays(packed(forward.out, forward.dtype, layer.x.device), of_backward, *kept[:3])
    form = arrays, forward.options, how, accumulate, limits, index
    if isinstance(forward, ForwardChunks):
        return configure_backward(*form, forward.cut.tokens, factors)
    return backward.configure_backward(*form, factors=factors)


def recorded_backward(
    steps: "Backward | BackwardChunks",
    options: LayerOptions,
    accumulate: Iterable[str] = (),
    lora_rows: LoraRows = PLAIN_PASS.lora_rows,
) -> tuple[Recorder, Gradients]:
    """Returns what a backward allocates and launches, once for each size of chunks; and its gradients.

    accumulate: names of gradients that are added to a caller's buffers. lora_rows: 1 for rows that forward kept.
    """
    run, saved, into = Recorder(), SimpleNamespace(consumed=False), dict.fromkeys(accumulate, (0,))
    arrays = BackwardArrays(0, NO_LAYER, 0, 0, 0)
    of_pass: tuple[Any, ...] = saved, into, arrays, _recorded_extras(options)._replace(lora_rows=lora_rows)
    if isinstance(steps, Backward):
        return run, backward.moe_backward(run, steps, *of_pass).gradients
    return run, moe_backward(run, dataclasses.replace(steps, cut=steps.cut.shortest), *of_pass).gradients


def _recorded_extras(options: LayerOptions) -> PassExtras:
    return PassExtras(weights_fp8=fp8.Addresses(0, 0, 0, 0, 0, 0) if options.precision else None)


class Sum(NamedTuple):
    """The gradient of a weight or bias as a sum over chunks, in float32 or float64.

    rounded: the launch that rounds one of its arrays, and the gradient that it is rounded to; None if it is the sum.
    """

    total: Weight | Bias
    rounded: tuple[Launch, Weight | Bias] | None

    @classmethod
    def of(cls, parameter: Weight | Bias, half: int | None) -> "Sum":
        layouts = parameter.gradient_layouts()
        if ITEMSIZE[parameter.dtype] >= ITEMSIZE["float32"]:
            return cls(type(parameter).of(layouts, half), None)
        sums = tuple(layout._replace(dtype="float32") for layout in layouts)
        return cls(type(parameter).of(sums, half), (lora.rounding(sums[0], parameter.dtype), parameter))

    def make(self, run: Runtime) -> tuple[Any, tuple[int, ...]]:
        """Returns zeros, and their addresses."""
        array, addresses = self.total.empty_gradient(run)
        for address in addresses:
            run.clear(address, _nbytes(self.total.layouts[0]))
        return array, addresses

    def finish(self, run: Runtime, array: Any, addresses: Sequence[int]) -> Any:
        """Returns the gradient, of what `make` returned."""
        if self.rounded is None:
            return array
        launch, parameter = self.rounded
        made, to = parameter.empty_gradient(run)
        for start, end in zip(addresses, to, strict=True):
            run.launch(launch, start, end)
        return made


@dataclass(frozen=True, eq=False)
class BackwardChunks:
    """A backward in chunks. steps: the launches of `cut.sizes`."""

    cut: Cut
    steps: tuple[Backward, ...]
    x: tuple[int, ...]
    slots_shape: tuple[int, ...]
    sums: Mapping[str, Sum]  # by name, of what has no buffer of the caller's
    factor_sums: Mapping[str, lora.SummedGradient]  # by name, of low-rank factors
    grad_out_bytes: int  # from one token to the next, as of the following
    row_bytes: LayerArrays
    kept_steps: tuple[int, ...]  # from one chunk to the next

    def of_chunk(
        self, arrays: BackwardArrays, lora_rows: LoraRows, number: int, first: int
    ) -> tuple[BackwardArrays, LoraRows]:
        """Returns a chunk's addresses. An array that was not kept is 0."""
        starts = (*arrays[2:], *lora_rows)
        kept = [start and start + number * step for start, step in zip(starts, self.kept_steps, strict=True)]
        layer = _moved(arrays.layer, self.row_bytes, first)
        return BackwardArrays(arrays.grad_out + first * self.grad_out_bytes, layer, *kept[:3]), LoraRows(*kept[3:])


@cached
def configure_backward(
    arrays: BackwardArrays,
    options: LayerOptions,
    how: BackwardOptions,
    accumulate: Accumulated,
    limits: DeviceLimits,
    index: IndexLayout,
    tokens: int,
    factors: Lora | None = None,
) -> BackwardChunks:
    """Configures `moe_backward` for arrays of these layouts and chunks of so many tokens; see `layer.backward`."""
    layer, cut, buffers = arrays.layer, Cut(index.num_tokens, tokens), dict(accumulate)
    how = how._replace(lora_in_float32=factors is not None)
    h, dtype, k, E = layer.w2.shape[1], layer.w2.dtype, index.k, index.num_experts
    of_parameters: dict[str, tuple[type[Weight] | type[Bias], tuple[Layout, ...]]]
    of_parameters = {"w1": (Weight, layer.w1_parts), "w2": (Weight, (layer.w2,))}
    of_parameters |= {"b1": (Bias, layer.b1_parts), "b2": (Bias, layer.b2_parts)}
    sums = {}
    for name, (kind, parts) in of_parameters.items():
        if name in how.needs and name not in buffers and parts:
            half = half_columns(parts, h, options) if name in ("w1", "b1") else None
            sums[name] = Sum.of(kind.of(parts, half), half)
    into = (*accumulate, *((name, of.total.layouts) for name, of in sums.items()))
    steps = []
    for number in cut.sizes:
        of_chunk = IndexLayout(number, k, E)
        kept = (
            part and part._replace(misalignment=whole.misalignment)
            for part, whole in zip(Kept.of(of_chunk, options, h, dtype)[:3], arrays[2:], strict=True)
        )
        part = BackwardArrays(_first_rows(arrays.grad_out, number), _part_of_layer(layer, number), *kept)
        steps.append(backward.configure_backward(part, options, how, into, limits, of_chunk, None, factors))
    of_factors = zip(FACTORS, factors.factors, strict=True) if factors and "lora" in how.needs else ()
    return BackwardChunks(
        cut=cut,
        steps=tuple(steps),
        x=layer.x.shape,
        slots_shape=index.slots_shape,
        sums=sums,
        factor_sums={name: lora.SummedGradient.of(factor) for name, factor in of_factors if factor},
        grad_out_bytes=_row_bytes(arrays.grad_out),
        row_bytes=_steps_of_layer(layer),
        kept_steps=Kept.of(IndexLayout(cut.sizes[0], k, E), options, h, dtype, _ranks(factors)).steps,
    )


def moe_backward(
    run: Runtime,
    steps: BackwardChunks,
    saved: SavedForBackward,
    accumulate: Mapping[str, Sequence[int]],
    arrays: BackwardArrays,
    extras: PassExtras = PLAIN_PASS,
) -> Results:
    """Runs `layer.backward.moe_backward` on each chunk, from addresses."""
    whole = steps.steps[0]
    needs, dtype, of_weights = whole.how.needs, whole.dtype, whole.weights_dtype
    grad_x = run.empty(steps.x, dtype) if "x" in needs else None
    grad_weights = run.empty(steps.slots_shape, of_weights) if "weights" in needs else None
    sums = {name: of.make(run) for name, of in steps.sums.items()}
    into = {**accumulate, **{name: addresses for name, (_, addresses) in sums.items()}}
    of_factors = {name: of.memory(run) for name, of in steps.factor_sums.items()}
    made: dict[str, Any] = {}
    x_bytes = math.prod(steps.x[1:]) * ITEMSIZE[dtype]
    weights_bytes = math.prod(steps.slots_shape[1:]) * ITEMSIZE[of_weights]
    for number, first, of_chunk in steps.cut.chunks(steps.steps):
        addresses, lora_rows = steps.of_chunk(arrays, extras.lora_rows, number, first)
        places = {name: of.place(of_factors[name], number == 0) for name, of in steps.factor_sums.items()}
        to = extras._replace(
            out=grad_x and Buffer(None, grad_x.ptr + first * x_bytes),
            grad_weights=grad_weights and Buffer(None, grad_weights.ptr + first * weights_bytes),
            lora_rows=lora_rows,
            grad_factors=extras.grad_factors._replace(**places),
        )
        backward.moe_backward(run, of_chunk, saved, into, addresses, to)
        is_last = first + steps.cut.tokens >= steps.cut.num_tokens
        if number or is_last:  # a record of one size of chunks has one alone
            for name, of in steps.factor_sums.items():  # each of the last sums makes room
                made[name] = of.added(run, of_factors.pop(name) if is_last else of_factors[name], is_last)
    if steps.factor_sums:
        made = {"lora": Lora(**made, scale1=None, scale2=None)}
    for name in reversed(list(sums)):  # w2 before w1: what it is a sum of makes room
        made[name] = steps.sums[name].finish(run, *sums.pop(name))
    return Results(Gradients(grad_x and grad_x.array, grad_weights and grad_weights.array, **made), None, None)
