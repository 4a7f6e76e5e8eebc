"""Where the layer decodes its frozen weights to: memory that all layers of a device and stream share.

A call takes this memory, decodes its weights there once it knows which experts have tokens, and leaves it to the next
one with its own number. Only the backward of this call may read again what it decoded: addresses and versions of the
packed parts tell nothing, as weights of other layers come to the same place, and parts may be written meanwhile.

`limit_scratch` bounds this memory. Where it has no room for both weights of a layer, each is decoded before the
products that read it, to the same place.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy import checks
from moeblaze_cupy.calls import Lookup
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.runtime import Launch, Runtime, current_device
from moeblaze_cupy.frameworks import ITEMSIZE, Buffer
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.quantised.api import on_host
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import LayerArrays, QuantizedWeight, reshaped

_DTYPE = "bfloat16"  # of decoded weights on CUDA
_numbers = itertools.count(1)


class _Memory(NamedTuple):
    """Decoded weights by name, and the number of the call that decoded them."""

    number: int
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, Buffer]
    in_turn: bool  #: the buffers are one
    holds: str = ""  #: in turn, the name of the weight that is there


# By framework, device, stream and dtype. A call in progress has its memory to itself, so threads do not share one.
_kept: dict[tuple[Any, ...] | None, Any] = {}
_PER_THREAD = 2  # cudaStreamPerThread
_limit: int | None = None  # bytes


def limit_scratch(nbytes: int | None) -> None:
    """Bounds the memory that a layer's `QuantizedWeight` are decoded to on CUDA, in the calls of this process from now.

    nbytes: None for no bound, as at first. A layer whose w1 and w2 take more in bf16 decodes one at a time, each before
    the products that read it, to memory of the larger one: two thirds for a gated layer. Results have the same bits. A
    training step then decodes four weights if backward finds nothing of its forward's, as without a bound, or three if
    it does, in place of two. With save="recompute" it decodes five. A layer whose larger weight takes more raises
    ValueError. Memory that is kept now is freed. The CPU decodes both weights at a time whatever the bound.
    With precision="fp8" the bytes are those in e4m3, and a step decodes as often as without a bound.
    Raises TypeError or ValueError for what is no positive integer.
    """
    global _limit
    if nbytes is not None:
        nbytes = checks.integer("limit_scratch", "nbytes", nbytes)
        if nbytes < 1:
            raise checks.bad_value("limit_scratch", "nbytes", "at least 1, or None", nbytes)
    _limit = nbytes
    release_scratch()


def release_scratch() -> None:
    """Frees the memory that `QuantizedWeight` of layers has been decoded to. The next forward allocates it again.

    Raises nothing: a backward that is still to come decodes again.
    """
    _kept.clear()


def place_of(run: Runtime, dtype: str = _DTYPE) -> tuple[Any, ...] | None:
    """Returns where the memory of a call is kept, or None where no other call may have it.

    A graph has memory of its own, because other calls write what is kept between its replays. CUDA's default stream per
    thread has one handle for the streams of all threads.
    """
    alone = run.stream == _PER_THREAD or loader.is_capturing(run.stream)
    return None if alone else (run.framework, run.device, run.stream, dtype)


def take_memory(place: tuple[Any, ...] | None) -> Any:
    """Returns the memory that `keep_memory` was last given for this place, or None."""
    return _kept.pop(place, None)


def keep_memory(place: tuple[Any, ...], memory: Any) -> None:
    """Keeps the memory of a call that has launched all that reads it."""
    _kept[place] = memory


_READ = {"up_fwd": "w1", "up_bwd": "w1", "down_fwd": "w2", "down_bwd": "w2"}  # the weight of each product


@dataclass(eq=False)
class Decoded:
    """The arrays that a call of the layer reads in place of its frozen weights.

    `decode` fills them on CUDA. `keep` leaves them to other calls when all that reads them has been launched.
    """

    arrays: dict[str, Any]  #: (E, K, N) by name, transposed views of (E, N, K)
    number: int = 0  #: of the call of the layer that decodes, or has decoded
    _place: tuple[Any, ...] | None = None  #: None where they are not to be kept
    _memory: _Memory | None = None
    _launches: tuple[tuple[str, Launch, list[int], int], ...] = ()  #: by name, addresses of the parts and the result
    _parts: tuple[Any, ...] = ()  #: held until then
    _holds: str = ""  #: in turn, the name of the weight that is there
    _lists: int = 0  #: in turn, how many index lists came

    @property
    def nbytes(self) -> int:
        """Returns the bytes of that memory, 0 on the CPU."""
        if self._memory is None:
            return 0
        sizes = _sizes(self._memory.shapes).values()
        return max(sizes) if self._memory.in_turn else sum(sizes)

    def layer(self, of: LayerArrays) -> LayerArrays:
        return of.with_weights(self.arrays)

    fp8_weights = None  #: there are some in `scratch_e4m3`

    def decode(self, run: Runtime, expert_token_offsets: int, product: str = "", begins: bool = False) -> None:
        """Decodes the experts that have tokens, unless that has been done.

        begins: these are new index lists, for which both weights are decoded, unless they come in turn. product: which
        is about to read its weight, to decode that one if they do.
        """
        in_turn = self._memory is not None and self._memory.in_turn
        if begins and in_turn:
            self._lists += 1
            if self._lists > 1:  # other experts have tokens
                self._holds = ""
        wanted = {_READ.get(product, "")} - {"", self._holds} if in_turn else {"w1", "w2"} if begins else ()
        for of, launch, parts, out in self._launches:
            if of in wanted:
                run.launch(launch, *parts, expert_token_offsets, out)
                self._holds = of

    def keep(self) -> None:
        if self._place is not None and self._memory is not None:
            keep_memory(self._place, self._memory._replace(holds=self._holds if self._lists == 1 else ""))


def decoded(function: str, weights: Mapping[str, QuantizedWeight], prefix: str = "", number: int = 0) -> Decoded:
    """Memory for these weights, by "w1" and "w2", which pass their checks first; on the CPU the decoded weights.

    function, prefix: for messages, what was called and what comes before the names of its arguments. number: of the
    call that this one is the backward of, or 0 for a call of its own.
    """
    arguments = {name: prefix + name for name in weights}
    parts: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        parts[name] = quantised_checks.parts_of(function, arguments[name], weight)
    every = {argument: part for of in parts.values() for argument, part in of.items()}
    forms = tuple((name, w.format, w.shape, w.block, w.dtype, len(parts[name])) for name, w in weights.items())
    look = Lookup(function, forms, tuple(every), tuple(every.values()))
    if look.record is None:
        call = look.begin(len(every))
        for name, weight in weights.items():
            quantised_checks.weight(function, arguments[name], weight, call.described)
        if call.on_cpu:
            hosts = {name: on_host(call, arguments[name], weight) for name, weight in weights.items()}
            return Decoded({name: call.export(reference.dequantize(w)).swapaxes(1, 2) for name, w in hosts.items()})
        of_scales = {name: call.described[f"{arguments[name]}.scales"].dtype for name in weights}
        steps = {name: decode.step(weight, of_scales[name]) for name, weight in weights.items()}
        look.keep(steps)
    record = look.record
    assert record is not None
    with current_device(record.device):
        run = Runtime.current(record.framework, record.device)
        place = place_of(run)
        memory = take_memory(place)
        shapes = {name: weight.shape for name, weight in weights.items()}
        in_turn = is_in_turn(function, arguments, shapes)
        fits = memory is not None and memory.shapes == shapes and memory.in_turn == in_turn
        has_decoded = fits and memory is not None and number != 0 and memory.number == number
        holds = memory.holds if memory is not None and has_decoded else ""
        if memory is None or not fits:
            memory = None  # freed before as much is allocated
            made = _buffers(run, shapes, in_turn)
        else:
            made = dict(memory.buffers)
    memory = _Memory(number or next(_numbers), shapes, made, in_turn)
    launches, end = [], 0
    for name in weights:
        start, end = end, end + len(parts[name])
        addresses = [*look.pointers[start:end], *(0,) * (len(decode.PARTS) - len(parts[name]))]
        launches.append((name, record.plan[name], addresses, made[name].ptr))
    arrays = {name: buffer.array for name, buffer in made.items()}
    to_do = () if has_decoded and not in_turn else tuple(launches)
    return Decoded(arrays, memory.number, place, memory, to_do, tuple(look.given), holds)


def is_in_turn(
    function: str, arguments: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], dtype: str = _DTYPE
) -> bool:
    """Whether these weights are decoded to one place. Raises ValueError where the larger one does not fit.

    arguments: what messages call the weights.
    """
    if _limit is None:
        return False
    sizes = _sizes(shapes, dtype)
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] > _limit:
        expected = f"a weight of at most {_limit} bytes in {dtype}, the limit of limit_scratch"
        raise checks.bad_value(function, arguments[largest], expected, f"{sizes[largest]} bytes")
    return sum(sizes.values()) > _limit


def _sizes(shapes: Mapping[str, tuple[int, ...]], dtype: str = _DTYPE) -> dict[str, int]:
    """Returns the bytes of decoded weights by name."""
    return {name: math.prod(shape) * ITEMSIZE[dtype] for name, shape in shapes.items()}


def _buffers(run: Runtime, shapes: Mapping[str, tuple[int, ...]], in_turn: bool) -> dict[str, Buffer]:
    """Returns new memory for weights (E, K, N), which lie as (E, N, K). in_turn: it is one memory."""
    if not in_turn:
        return {name: run.empty(shape, _DTYPE, True) for name, shape in shapes.items()}
    memory = run.empty((max(map(math.prod, shapes.values())),), _DTYPE)
    made = {}
    for name, (E, K, N) in shapes.items():
        array = reshaped(memory.array[: E * K * N], (E, N, K)).swapaxes(1, 2)
        made[name] = Buffer(array, memory.ptr)
    return made
