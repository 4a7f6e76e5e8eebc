"""Where the layer decodes frozen weights in mxfp4 to for products in e4m3: memory that layers share, as in `scratch`.

A product reads e4m3 along what it sums over. Forward reads weights in the order in which they are packed, and backward
reads them transposed. Both come to the same place, each before the product that reads it, so this memory has half the
bytes of that of weights in bf16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.calls import Call, Lookup
from moeblaze_cupy.cuda.runtime import Launch, Runtime, current_device
from moeblaze_cupy.frameworks import Buffer, Torch
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.quantised import decode, scratch
from moeblaze_cupy.quantised.api import on_host
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import Fp8Weights, LayerArrays, QuantizedWeight, reshaped


class _Step(NamedTuple):
    """The launches before a product, and the bytes that they need beside their results."""

    tops: Launch
    to_e4m3: Launch
    tops_bytes: int


class _Steps(NamedTuple):
    """By product."""

    up_fwd: _Step
    down_fwd: _Step
    down_bwd: _Step
    up_bwd: _Step


FIELDS = ("w1", "w1_transposed", "w1_scales", "w2", "w2_transposed", "w2_scales")  # of Fp8Weights
_DTYPE = "uint8"  # e4m3
PRODUCTS = {"w1": ("up_fwd", "up_bwd"), "w2": ("down_fwd", "down_bwd")}  # those that read each weight


class _Addresses(NamedTuple):
    """Of a weight: its packed parts, the memory that it is decoded to, and its scales."""

    data: int
    scales: int
    out: int
    out_scales: int


class _Memory(NamedTuple):
    """The memory, and the bytes of w1 and w2, one after the other there unless they come in turn."""

    sizes: list[int]
    in_turn: bool
    buffer: Buffer


@dataclass(eq=False)
class DecodedE4m3:
    """What a call of the layer reads in place of its frozen weights; see `scratch.Decoded`."""

    arrays: dict[str, Any]  #: (E, K, N) by name; on CUDA e4m3 without numbers, for the checks of shapes and devices
    fp8_weights: Fp8Weights  #: on CUDA both orientations of a weight are in the same memory
    nbytes: int = 0  #: of that memory, 0 on the CPU
    number: int = 0  #: backward reads nothing of what forward decoded
    _steps: Mapping[str, tuple[_Step, _Addresses]] | None = None  #: by product; None on the CPU
    _place: tuple[Any, ...] | None = None  #: None where the memory is not to be kept
    _memory: Any = None
    _held: tuple[Any, ...] = ()  #: what is read until then

    def layer(self, of: LayerArrays) -> LayerArrays:
        return of.with_weights(self.arrays)

    def decode(self, run: Runtime, expert_token_offsets: int, product: str = "", begins: bool = False) -> None:
        """Decodes the experts that have tokens, for this product, which is launched once after it."""
        if self._steps is None or not product:
            return
        step, (data, scales, out, out_scales) = self._steps[product]
        tops = run.empty((step.tops_bytes,), "uint8")
        for launch in (step.tops, step.to_e4m3):
            run.launch(launch, data, scales, tops.ptr, expert_token_offsets, out, out_scales)

    def keep(self) -> None:
        if self._place is not None:
            scratch.keep_memory(self._place, self._memory)


def decoded(function: str, weights: Mapping[str, QuantizedWeight], gate_up: str, prefix: str = "") -> DecodedE4m3:
    """Memory for both weights, which pass their checks first; on the CPU the decoded weights.

    function, prefix: for messages, as of `scratch.decoded`. Raises ValueError unless w1 and w2 are in mxfp4.
    """
    quantised_checks.in_e4m3(function, weights)
    arguments = {name: prefix + name for name in weights}
    parts = [quantised_checks.parts_of(function, arguments[name], weight) for name, weight in weights.items()]
    every = {argument: part for of in parts for argument, part in of.items()}
    forms = tuple((weight.shape, weight.block, weight.dtype) for weight in weights.values())
    look = Lookup(function, ("e4m3", gate_up, *forms), tuple(every), tuple(every.values()))
    shapes = {name: weight.shape for name, weight in weights.items()}
    halves = 2 if shapes["w1"][2] == 2 * shapes["w2"][1] else 1  # whether these fit is for the checks of the layer
    if look.record is None:
        call = look.begin(len(every))
        for name, weight in weights.items():
            quantised_checks.weight(function, arguments[name], weight, call.described)
        if call.on_cpu:
            return _on_cpu(call, arguments, weights, gate_up)
        look.keep(_configure(shapes, gate_up, halves))
    record = look.record
    assert record is not None
    sizes = [math.prod(shape) for shape in shapes.values()]
    with current_device(record.device):
        run = Runtime.current(record.framework, record.device)
        place = scratch.place_of(run, _DTYPE)
        in_turn = scratch.is_in_turn(function, arguments, shapes, _DTYPE)
        memory = scratch.take_memory(place)
        if memory is None or memory.sizes != sizes or memory.in_turn != in_turn:
            memory = None  # freed before as much is allocated
            room = max(sizes) if in_turn else sum(sizes)
            memory = _Memory(sizes, in_turn, run.empty((room,), "float8_e4m3fn" if run.framework is Torch else "uint8"))
        scales = [run.empty((shapes[name][0], number), "float32") for name, number in (("w1", halves), ("w2", 1))]
    arrays: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    steps: dict[str, tuple[_Step, _Addresses]] = {}
    for i, (name, (E, K, N)) in enumerate(shapes.items()):
        start = 0 if in_turn else sum(sizes[:i])
        view = memory.buffer.array[start : start + sizes[i]]
        packed = reshaped(view, (E, N, K))
        arrays[name] = packed.swapaxes(1, 2)
        both = {name: reshaped(view, (E, K, N)), f"{name}_transposed": packed}
        fields |= {**both, f"{name}_scales": scales[i].array}
        data, of_data = look.pointers[2 * i : 2 * i + 2]
        addresses = _Addresses(data, of_data, memory.buffer.ptr + start, scales[i].ptr)
        steps |= {product: (getattr(record.plan, product), addresses) for product in PRODUCTS[name]}
    nbytes = memory.buffer.array.nbytes
    return DecodedE4m3(
        arrays, Fp8Weights(**fields, gate_up=gate_up), nbytes, 0, steps, place, memory, (*look.given, *scales)
    )


def _configure(shapes: Mapping[str, tuple[int, int, int]], gate_up: str, halves: int) -> _Steps:
    E = shapes["w1"][0]

    def step(product: str) -> _Step:
        name = "w1" if product.startswith("up") else "w2"
        scales = halves if name == "w1" else 1
        groups = 1 if gate_up == "interleaved" else scales
        launches = decode.steps_e4m3(shapes[name], groups, scales, product.endswith("_bwd"))
        return _Step(*launches, decode.tops_bytes(E, groups))

    return _Steps(*map(step, _Steps._fields))


def _on_cpu(
    call: Call, arguments: Mapping[str, str], weights: Mapping[str, QuantizedWeight], gate_up: str
) -> DecodedE4m3:
    hosts = {name: on_host(call, arguments[name], weight) for name, weight in weights.items()}
    arrays = {name: call.export(reference.dequantize(host)).swapaxes(1, 2) for name, host in hosts.items()}
    made = {}
    for name, array in vars(reference.fp8_weights(hosts["w1"], hosts["w2"], gate_up)).items():
        if name in FIELDS:
            exported = call.export(array)
            is_e4m3 = call.framework is Torch and not name.endswith("scales")
            made[name] = Torch.in_e4m3(exported) if is_e4m3 else exported
    return DecodedE4m3(arrays, Fp8Weights(**made, gate_up=gate_up))
