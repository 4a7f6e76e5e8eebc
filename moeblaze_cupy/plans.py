"""A call of the layer as a list of allocations, launches and releases: traced once per layout, then replayed.

What the operations do depends on their options and on the layouts of arrays, not on what arrays hold, and of an address
only its remainder by 16 matters. So the second call with one set of layouts and options runs the same operations over
stand-ins for arrays, whose addresses name a buffer and an offset in it, and keeps what they ask of their context as a
plan. Later calls only allocate, launch and release what the plan says, in its order. A first call leaves nothing but
its key: layouts that come once, such as those of a varying number of tokens, are not worth a trace.
"""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import arrays, loader, tensor_map
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.ops import experts
from moeblaze_cupy.structures import Gradients, PackedIndices, SavedForBackward, one_or_pair, pair

MAX_PLANS = 0  # none are made: a plan keeps an address for each argument, and kernels take one struct
_ALIGNMENT = 16  # of which every allocation is a multiple
_BITS, _MIDDLE = 44, 1 << 43  # of a stand-in's offset, which is negative if strides are
_MAX_STRIDE = 1 << 40  # no argument but an address is as large as 1 << _BITS
_ALLOCATE, _RELEASE, _CLEAR, _LAUNCH, _CONSUME = range(5)

_lock = threading.Lock()
_seen: dict[tuple, None] = {}  # keys of one call so far
_plans: dict[tuple, "Plan"] = {}


def key_of(function: str, options: tuple, given: Sequence) -> tuple[tuple | None, list[int]]:
    """What tells the plans of calls apart, None if such a call has none, and the addresses of the arrays `given`."""
    framework = arrays.framework_of(given[0])
    if framework in (None, arrays.NumPy) or any(arrays.framework_of(array) is not framework for array in given):
        return None, []
    try:
        layouts, pointers = framework.layouts(given, _ALIGNMENT)
    except (AttributeError, RuntimeError, TypeError):  # arrays of another kind, or that cannot be read: checks say why
        return None, []
    return (function, options, os.environ.get("MOEBLAZE_TIER"), layouts), pointers


def find(key: tuple | None) -> "Plan | None":
    try:
        return _plans.get(key)
    except TypeError:  # an option that is not hashable is not a valid one
        return None


def is_due(key: tuple | None) -> bool:
    """Whether to trace a call that has no plan: at its second time, from when on it is known to come again."""
    if key is None or any(abs(stride) > _MAX_STRIDE for _, _, strides, *_ in key[-1] for stride in strides):
        return False  # such strides are those of dimensions of size 1, which may have any
    with _lock:
        due = key in _seen
        _keep(_seen, key, None)
    return due


def _keep(kept: dict, key: tuple, value: Any) -> None:
    """Beside the latest others."""
    kept[key] = value
    if len(kept) > MAX_PLANS:
        del kept[next(iter(kept))]


def clear() -> None:
    """Forgets all plans and keys."""
    with _lock:
        _seen.clear()
        _plans.clear()


class _Owner:
    """The memory of a stand-in. Its end is a step of the trace, as memory is free once nothing holds it.

    A profiler that holds frames while a call is traced makes its plan keep memory for longer.
    """

    axes = ()

    def __init__(self, number: int, steps: list, layout: tuple):
        self.number, self.steps, self.layout = number, steps, layout

    def __del__(self):
        self.steps.append((_RELEASE, self.number))

    def swapaxes(self, *axes: int) -> "_View":
        return _View(self, axes)


class _View:
    """An owner with two axes swapped, which it keeps alive."""

    def __init__(self, base: _Owner, axes: tuple[int, ...]):
        self.base, self.number, self.axes = base, base.number, axes


class _Map(tuple):
    """Arguments of `tensor_map.encode`, in place of what it returns."""


class _Trace(Context):
    """A context that records what it is asked for, as steps (kind, what it needs), over stand-ins for arrays."""

    def __init__(self, context: Context):
        super().__init__(context.framework, context.device, context.stream)
        self.steps: list[tuple] = []
        self.buffers = 0

    def stand_in(self, array: Array) -> Array:
        """An array of this layout, at an address that tells its buffer's number."""
        self.buffers += 1
        pointer = (self.buffers << _BITS) + _MIDDLE + array.ptr % _ALIGNMENT
        layout = pointer, *array.layout
        return Array(_Owner(self.buffers - 1, self.steps, layout), *layout)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        self.steps.append((_ALLOCATE, (shape, dtype)))
        strides = tuple(math.prod(shape[i:]) for i in range(1, len(shape) + 1))
        return self.stand_in(Array(None, 0, tuple(shape), strides, dtype, self.device))

    def describe(self, array: _Owner | None) -> Array | None:
        return None if array is None else Array(array, *array.layout)

    def launch(self, *launch: Any) -> None:
        self.steps.append((_LAUNCH, launch))

    def clear(self, array: Array) -> None:
        self.steps.append((_CLEAR, (array.ptr, array.size * array.itemsize)))

    def tensor_map(self, *arguments: Any) -> _Map:
        return _Map(arguments)


class _TracedSaved(SavedForBackward):
    """Records when backward says whether it overwrites what was saved."""

    steps = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "consumed" and self.steps is not None:
            self.steps.append((_CONSUME, value))
        super().__setattr__(name, value)


def _place(address: int, inputs: tuple[Array, ...]) -> tuple[int, int]:
    """Buffer and offset of an address within a stand-in."""
    number = (address >> _BITS) - 1
    alignment = inputs[number].ptr % _ALIGNMENT if number < len(inputs) else 0
    return number, address % (1 << _BITS) - _MIDDLE - alignment


class Plan:
    """The steps of one call over numbered buffers: its inputs, then what it allocates.

    The arguments of its launches lie in one memory, each distinct value once: most are written once for all calls,
    addresses once a call, and tensor maps when their address is another one than in the memory's last call.
    """

    def __init__(self, trace: _Trace, inputs: tuple[Array, ...], handed: list, index: tuple = ()):
        """`handed`: owners, or None, that the result holds; `index`: what else the result's index lists are made of."""
        self.framework, self.device, self.index = trace.framework, trace.device, index
        self.handed = [None if owner is None else (owner.number, owner.axes) for owner in handed]
        self.words: dict[Any, int] = {}  # place of each int, or (buffer, offset)
        self.maps: dict[_Map, int] = {}
        self.arguments: list[Any] = []  # of all launches: keys of these two
        self.memories: list[_Memory] = []  # that no call in progress uses
        self.steps: list[tuple] = []
        self.writes: list[list[tuple[int, int]]] = [[] for _ in range(trace.buffers)]  # of each buffer: word, offset
        number = len(inputs)
        for kind, step in tuple(trace.steps):
            if kind == _ALLOCATE:
                step = *step, self.writes[number]
                number += 1
            elif kind == _CLEAR:
                step = *_place(step[0], inputs), step[1]
            elif kind == _LAUNCH:
                step = self._launch(inputs, *step)
            self.steps.append((kind, step))

    def _launch(
        self, inputs: tuple[Array, ...], variant: loader.Variant, grid: tuple, block: int, args: tuple, shared_bytes=0
    ) -> tuple:
        first, maps = len(self.arguments), []
        for arg in args:
            if isinstance(arg, _Map):
                arg = _Map((_place(arg[0], inputs), *arg[1:]))
                if arg not in self.maps:
                    self.maps[arg] = len(self.maps)
                    maps.append((self.maps[arg], *arg[0], arg[1:]))
            elif arg >= 1 << _BITS:
                arg = _place(arg, inputs)
                if arg not in self.words:
                    self.words[arg] = len(self.words)
                    self.writes[arg[0]].append((self.words[arg], arg[1]))
            else:
                self.words.setdefault(arg, len(self.words))
            self.arguments.append(arg)
        return loader.kernel(self.device, variant, shared_bytes), grid, block, shared_bytes, 8 * first, maps

    def replay(self, given: Sequence, pointers: list[int], saved: SavedForBackward | None = None) -> list:
        """The call over the inputs `given`, which lie at `pointers`; returns what its result holds.

        Their device must be current. A call in progress has a memory to itself, until the driver has copied the
        arguments of its last launch.
        """
        loader.bind_context()
        framework, device = self.framework, self.device
        stream = framework.stream(device)
        try:
            memory = self.memories.pop()
        except IndexError:
            memory = _Memory(self)
        words, arguments = memory.words, memory.pointer
        owners, addresses = list(given), list(pointers)
        for pointer, writes in zip(pointers, self.writes, strict=False):  # of the inputs
            for word, offset in writes:
                words[word] = pointer + offset
        for kind, step in self.steps:
            if kind == _LAUNCH:
                kernel, grid, block, shared_bytes, first, maps = step
                for index, number, offset, spec in maps:
                    memory.write_map(index, addresses[number] + offset, spec)
                kernel.launch_at(arguments + first, grid, block, shared_bytes, stream)
            elif kind == _ALLOCATE:
                shape, dtype, writes = step
                array = framework.empty(shape, dtype, device)
                pointer = array.ptr
                owners.append(array.owner)
                addresses.append(pointer)
                for word, offset in writes:
                    words[word] = pointer + offset
                array = None  # else it would live until the next one
            elif kind == _RELEASE:
                owners[step] = None
            elif kind == _CLEAR:
                number, offset, nbytes = step
                loader.clear(addresses[number] + offset, nbytes, stream)
            else:
                saved.consumed = step
        self.memories.append(memory)
        return [None if h is None else owners[h[0]].swapaxes(*h[1]) if h[1] else owners[h[0]] for h in self.handed]


class _Memory:
    """A plan's arguments as the driver takes them: words of 8 bytes, tensor maps, and the address of each argument."""

    def __init__(self, plan: Plan):
        first_map = -(-8 * len(plan.words) // 64) * 64  # tensor maps lie on multiples of 64
        raw = np.zeros(64 + first_map + 128 * len(plan.maps), np.uint8)
        raw = raw[-raw.ctypes.data % 64 :]
        self.words = memoryview(raw[:first_map]).cast("q")
        for value, word in plan.words.items():
            if not isinstance(value, tuple):
                self.words[word] = value
        self.maps = memoryview(raw[first_map:])
        self.encoded: list[int | None] = [None] * len(plan.maps)  # the address in each
        offsets = [first_map + 128 * plan.maps[a] if isinstance(a, _Map) else 8 * plan.words[a] for a in plan.arguments]
        self.addresses = np.array([raw.ctypes.data + offset for offset in offsets], np.uint64)
        self.pointer = self.addresses.ctypes.data

    def write_map(self, index: int, pointer: int, spec: tuple) -> None:
        if pointer != self.encoded[index]:
            self.maps[128 * index : 128 * index + 128] = tensor_map.encode(pointer, *spec)
            self.encoded[index] = pointer


def forward_inputs(x: Any, ids: Any, weights: Any, w1: tuple, w2: Any) -> tuple:
    """In the order of `Plan.replay`."""
    return x, ids, weights, w2, *w1


def trace_forward(key: tuple, context: Context, inputs: tuple[Array, ...], activation: str, save: str | None) -> Plan:
    """The plan of experts.moe_forward, from now on that of `key`; inputs as of `forward_inputs`."""
    trace = _Trace(context)
    x, ids, weights, w2, *w1 = stand_ins = [trace.stand_in(array) for array in inputs]
    out, saved = experts.moe_forward(trace, x, ids, weights, tuple(w1), w2, activation=activation, save=save)
    handed, index = [out.owner], ()
    if saved is not None:
        index = saved.index.places, saved.index.num_experts, saved.index.ids_copied
        handed += [saved.index.lists, saved.index.ids, saved.first_layer, saved.y_swi]
    plan = Plan(trace, inputs, handed, index)
    del stand_ins  # not before: their end is no step
    return _remember(key, plan)


def replay_forward(
    plan: Plan, given: Sequence, pointers: list[int], activation: str, save: str | None
) -> tuple[Any, SavedForBackward | None]:
    """As experts.moe_forward, but the output itself in place of its Array."""
    out, *kept = plan.replay(given, pointers)
    if not kept:
        return out, None
    lists, ids, first_layer, y_swi = kept
    x, _, weights, w2, *w1 = given
    index = PackedIndices(lists, ids, *plan.index)
    return out, SavedForBackward(x, weights, one_or_pair(tuple(w1)), w2, index, first_layer, y_swi, activation, save)


def backward_key(
    grad_out: Any, saved: SavedForBackward, needs: tuple, keep_saved: Any, accumulate: Any
) -> tuple[tuple | None, list, list[int]]:
    """As `key_of`, with the inputs between, in the order of `Plan.replay`."""
    index, totals = saved.index, {} if accumulate is None else accumulate
    if not isinstance(index, PackedIndices) or not isinstance(totals, Mapping):
        return None, [], []
    w1, kept = pair(saved.w1), [array for array in (saved.first_layer, saved.y_swi) if array is not None]
    given = [grad_out, saved.x, saved.weights, saved.w2, index.lists, *w1, *kept]
    forms = [len(w1), saved.first_layer is None, saved.y_swi is None]  # tell which of these is what
    for name, total in totals.items():
        parts = pair(total)
        given += parts
        forms += name, len(parts)
    options = saved.activation, needs, bool(keep_saved), tuple(forms)
    key, pointers = key_of("moe_backward", options, given)
    return key, given, pointers


def trace_backward(
    key: tuple, context: Context, grad_out: Array, saved: SavedForBackward, accumulate: dict[str, tuple], **options: Any
) -> Plan:
    """The plan of experts.moe_backward, from now on that of `key`; `accumulate` and options as experts take them."""
    trace, inputs = _Trace(context), []

    def stand_in(owner: Any) -> _Owner | None:
        return None if owner is None else stand_in_of(context.describe(owner)).owner

    def stand_in_of(array: Array) -> Array:
        inputs.append(array)
        return trace.stand_in(array)

    first = stand_in_of(grad_out)
    x, weights, w2, lists = map(stand_in, (saved.x, saved.weights, saved.w2, saved.index.lists))
    w1 = one_or_pair(tuple(map(stand_in, pair(saved.w1))))
    first_layer, y_swi = stand_in(saved.first_layer), stand_in(saved.y_swi)
    index = saved.index.joined([lists, None])
    traced = _TracedSaved(x, weights, w1, w2, index, first_layer, y_swi, saved.activation, saved.save)
    traced.steps = trace.steps
    totals = {name: tuple(map(stand_in_of, parts)) for name, parts in accumulate.items()}
    grads = experts.moe_backward(trace, first, traced, accumulate=totals, **options)
    plan = Plan(trace, tuple(inputs), [grads.x, grads.weights, grads.w2, *pair(grads.w1)])
    return _remember(key, plan)


def replay_backward(
    plan: Plan, given: Sequence, pointers: list[int], saved: SavedForBackward, accumulate: dict[str, Any]
) -> Gradients:
    """As experts.moe_backward; `accumulate`: by name, what the gradients added to the caller's are handed back as."""
    x, weights, w2, *w1 = plan.replay(given, pointers, saved)
    return Gradients(x, weights, accumulate.get("w1", one_or_pair(tuple(w1))), accumulate.get("w2", w2))


def _remember(key: tuple, plan: Plan) -> Plan:
    with _lock:
        _keep(_plans, key, plan)
    return plan
