"""Where the layer decodes its frozen weights to: memory that all layers of a device and stream share.

A call takes this memory, decodes its weights there once it knows which experts have tokens, and leaves it to the next
one with its own number. Only the backward of this call may read again what it decoded: addresses and versions of the
packed parts tell nothing, as weights of other layers come to the same place, and parts may be written meanwhile.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.calls import Lookup
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.runtime import Launch, Runtime, current_device
from moeblaze_cupy.frameworks import Buffer
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.quantised.api import on_host
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import LayerArrays, QuantizedWeight

_numbers = itertools.count(1)


class _Memory(NamedTuple):
    """Decoded weights by name, and the number of the call that decoded them."""

    number: int
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, Buffer]


# By framework, device and stream. A call in progress has its memory to itself, so threads do not share one.
_kept: dict[tuple[Any, int, int], _Memory] = {}


def release_scratch() -> None:
    """Frees the memory that `QuantizedWeight` of layers has been decoded to. The next forward allocates it again.

    Raises nothing: a backward that is still to come decodes again.
    """
    _kept.clear()


@dataclass(eq=False)
class Decoded:
    """The arrays that a call of the layer reads in place of its frozen weights.

    `decode` fills them on CUDA. `keep` leaves them to other calls when all that reads them has been launched.
    """

    arrays: dict[str, Any]  #: (E, K, N) by name, transposed views of (E, N, K)
    number: int = 0  #: of the call of the layer that decodes, or has decoded
    _place: tuple[Any, int, int] | None = None  #: None where they are not to be kept
    _memory: _Memory | None = None
    _launches: tuple[tuple[Launch, list[int], int], ...] = ()  #: with the addresses of the parts and of the result
    _parts: tuple[Any, ...] = ()  #: held until then

    def layer(self, of: LayerArrays) -> LayerArrays:
        return of.with_weights(self.arrays)

    def decode(self, run: Runtime, expert_token_offsets: int) -> None:
        """Decodes the experts that have tokens, unless that has been done."""
        for launch, parts, out in self._launches:
            run.launch(launch, *parts, expert_token_offsets, out)

    def keep(self) -> None:
        if self._place is not None and self._memory is not None:
            _kept[self._place] = self._memory


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
        capturing = loader.is_capturing(run.stream)
        place = run.framework, run.device, run.stream
        # A graph has memory of its own: other calls write what is kept here between its replays.
        memory = None if capturing else _kept.pop(place, None)
        shapes = {name: weight.shape for name, weight in weights.items()}
        fits = memory is not None and memory.shapes == shapes
        has_decoded = fits and memory is not None and number != 0 and memory.number == number
        if memory is None or not fits:
            memory = None  # freed before as much is allocated
            made = {name: run.empty(shape, "bfloat16", True) for name, shape in shapes.items()}
        else:
            made = dict(memory.buffers)
    memory = _Memory(number or next(_numbers), shapes, made)
    launches, end = [], 0
    for name in weights:
        start, end = end, end + len(parts[name])
        addresses = [*look.pointers[start:end], *(0,) * (len(decode.PARTS) - len(parts[name]))]
        launches.append((record.plan[name], addresses, made[name].ptr))
    arrays = {name: buffer.array for name, buffer in made.items()}
    to_do = () if has_decoded else tuple(launches)
    return Decoded(arrays, memory.number, None if capturing else place, memory, to_do, tuple(look.given))
