"""Experimental: all-gathers of FSDP2 that bring w1 and w2 of `MoE(precision="fp8")` in e4m3, with their scales.

A scale is of one expert, so a rank quantises its own experts and gets the others' numbers as the other ranks made them.
Whole parameters exist in e4m3 alone, in the orientations that are read: one in forward, the other in backward.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.fp8.checks import FIELDS
from moeblaze_cupy.interop.fsdp import private
from moeblaze_cupy.interop.fsdp.gather import Shard
from moeblaze_cupy.interop.fsdp.memory import Memory, Place, Shared, Whole
from moeblaze_cupy.interop.fsdp.private import Group, Parameter
from moeblaze_cupy.types import Fp8Weights

Tensor = torch.Tensor
aten = torch.ops.aten
BACKWARD, FORWARD = 0, 1  # orientations by their readers: the layer's weight, and the parameter
READ = {"FORWARD": {FORWARD}, "PRE_BACKWARD": {BACKWARD}}  # orientations gathered in FSDP2's states; others have both
SAME = (aten.detach, aten.alias, aten.as_strided)  # functions that FSDP2 and Parameter call on all of a tensor
LEAST_BYTES = 2**26  # bytes of a bfloat16 parameter from which e4m3 gains more than its calls take the host
LIKE = (aten.zeros_like, aten.ones_like, aten.empty_like, aten.new_zeros, aten.new_empty)  # they read no numbers


class Gathered(Fp8Weights):
    """The weights of a layer whose parameters came in e4m3. Arrays that forward does not read have undefined values.

    in_backward: returns, for a save policy, arrays of the shapes and strides of w1 and w2, and the `Fp8Weights` that
    backward reads. Autograd saves none of these, as they may lie elsewhere by then.
    """

    __slots__ = ("in_backward",)  # apart from the fields of the weights
    in_backward: Callable[[str], tuple[Tensor, Tensor, Fp8Weights]]


class Part(Shard):
    """A rank's part of one of the two weights of `Experts`.

    local (E / ranks, N, K): any float dtype, rounded to bfloat16 first, as FSDP2 does. halves: the parts of N that
    have a scale each.
    """

    def __init__(self, memory: Memory, local: Tensor, halves: int, experts: "Experts") -> None:
        self.experts = experts
        number, N, K = local.shape
        of_e4m3 = tuple((shape, torch.uint8) for shape in ((number, K, N), (number, N, K)))
        self.forms = (*of_e4m3, ((number, halves), torch.float32))
        # Autograd and the layer's checks look at this: a shape, strides and an address, without memory for its numbers.
        self.whole = local.new_empty((memory.size * number, N, K), dtype=torch.bfloat16)
        self.weight = self.whole.transpose(1, 2)
        self.whole.untyped_storage().resize_(16)
        self.inner, self._here = [], {BACKWARD, FORWARD}
        self._arrays: list[Whole] = []
        self._state, self._read = "", dict[str, set[int]]()  # FSDP2's state in a gather; orientations read, by state
        self.keep(memory, local, torch.bfloat16)

    def settle(self, place: Place, name: int, rooms: list[Shared], was_captured: bool) -> None:
        if not self._arrays:
            self._arrays = [Whole(self._memory, room, place, (name, i), i == 2) for i, room in enumerate(rooms)]
            self.scales = self._arrays[2].array
            self.e4m3 = [whole.array for whole in self._arrays[:2]]
            self._as_other = [array.view(other.shape) for array, other in zip(self.e4m3[::-1], self.e4m3, strict=True)]
            self.inner[:] = [whole.freed_by_fsdp for whole in self._arrays]
        for whole, room in zip(self._arrays, rooms, strict=True):
            whole.move(room, place, was_captured)

    def offer(self, rooms: list[Shared]) -> list[tuple[Whole, list[Tensor]]]:
        """Does what `Shard.offer` does. The second of the two parts quantises both."""
        self._state = self.experts.state()
        here = self._here = set(self._read.setdefault(self._state, set(READ.get(self._state, (BACKWARD, FORWARD)))))
        for orientation in {BACKWARD, FORWARD} - here:  # rooms that a failed gather may have left
            self._arrays[orientation].free()
        self.inner[:] = [self._arrays[i].freed_by_fsdp for i in (2, *sorted(here))]
        self.experts.offer(self, [room.own for room in rooms])
        return [(self._arrays[i], rooms[i].at) for i in (*sorted(here), 2)]

    @property
    def is_there(self) -> bool:
        return bool(self._arrays) and self._arrays[2].is_there

    def made(self) -> Tensor:
        return InE4m3(self)

    def read(self, orientation: int) -> Tensor:
        """Returns the whole in e4m3. An orientation that did not come is made; later gathers of this state bring it."""
        self.expect_there()
        self._read[self._state].add(orientation)
        if orientation in self._here:
            return self.e4m3[orientation]
        return self.e4m3[1 - orientation].transpose(1, 2).contiguous()

    def unread(self, orientation: int) -> Tensor:
        """Returns an array of the shape of an orientation, with undefined values."""
        return self.e4m3[orientation] if orientation in self._here else self._as_other[orientation]


class Experts:
    """The parameters of w1 (E, 2h, d) or (E, h, d), and of w2 (E, d, h), of a MoE that FSDP2 shards.

    w1, w2: this rank's experts.
    """

    def __init__(self, memory: Memory, group: Group, w1: Tensor, w2: Tensor) -> None:
        self._group, halves = group, w1.shape[1] // w2.shape[2]
        self.parts = Part(memory, w1, halves, self), Part(memory, w2, 1, self)
        self._rooms: dict[Part, list[Tensor]] = {}
        self._amax = w1.new_empty((len(w1), halves + 1), dtype=torch.float32)

    def state(self) -> str:
        """Returns FSDP2's state, or "recomputation" for a forward in backward, which reads gathers too."""
        state = self._group.state
        return "recomputation" if state == "FORWARD" and private.is_in_backward() else state

    def offer(self, part: Part, rooms: list[Tensor]) -> None:
        """Quantises this rank's experts when both parts have called it. rooms: buffers for `part.forms`."""
        if part in self._rooms:  # a gather has failed since
            self._rooms.clear()
        self._rooms[part] = rooms
        if len(self._rooms) == len(self.parts):
            arrays = (*self._rooms[self.parts[0]], *self._rooms[self.parts[1]])
            named: dict[str, Any] = dict(zip(FIELDS, arrays, strict=True))
            w1, w2 = (part.local.to(torch.bfloat16).transpose(1, 2) for part in self.parts)
            self._rooms.clear()
            mb.quantize_weights(w1, w2, Fp8Weights(**named, amax=self._amax))

    def have(self, w1: Any, w2: Any) -> bool:
        """Returns whether these two parameters are those that were gathered."""
        return all(getattr(w, "part", None) is part for w, part in zip((w1, w2), self.parts, strict=True))

    def weights(self, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Gathered]:
        """Returns w1 (E, d, 2h) and w2 (E, h, d) for `moe`, which pass gradients to the parameters, and their e4m3."""
        device = w1.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.bfloat16:
            got = f"autocast to {torch.get_autocast_dtype(device)}"
            raise TypeError(f"moe: x: expected bfloat16 with precision='fp8', got {got}")
        arrays = [(part.unread(BACKWARD), part.read(FORWARD), part.scales) for part in self.parts]
        gathered = Gathered(*arrays[0], *arrays[1])
        gathered.in_backward = self._in_backward
        w1, w2 = (_Shape.apply(w, part) for w, part in zip((w1, w2), self.parts, strict=True))  # type: ignore[no-untyped-call]  # torch gives `apply` no types
        return w1, w2, gathered

    def _in_backward(self, save: str) -> tuple[Tensor, Tensor, Fp8Weights]:
        w1, w2 = self.parts
        of_w1 = w1.read(BACKWARD), w1.read(FORWARD) if save == "recompute" else w1.unread(FORWARD), w1.scales
        of_w2 = w2.read(BACKWARD), w2.unread(FORWARD), w2.scales
        return w1.weight, w2.weight, Fp8Weights(*of_w1, *of_w2)


class _Shape(torch.autograd.Function):
    """Stands for a transposed parameter without its numbers, and hands the gradient on to it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, part: Part) -> Tensor:
        ctx.set_materialize_grads(False)  # there is none where it is summed over ranks
        return part.weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None if grad is None else grad.transpose(1, 2), None


class InE4m3(Tensor):
    """A parameter (E, N, K) in bfloat16 for autograd and FSDP2, of which this rank has only e4m3."""

    part: Part

    @staticmethod
    def __new__(cls: Any, part: Part) -> "InE4m3":
        made: InE4m3 = private.without_memory(cls, part.whole)
        made.part = part
        return made

    __torch_function__ = private.only_dispatch

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return f"InE4m3({self.part.name}, shape={tuple(self.shape)}, requires_grad={self.requires_grad})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:  # type: ignore[override]  # torch's is a placeholder
        call, (first, *rest) = func.overloadpacket, arguments
        if call in SAME and (not rest or (list(rest[0]), list(rest[1])) == (list(first.shape), list(first.stride()))):
            return cls(first.part)
        if call in LIKE:
            return func(first.part.whole, *rest, **(options or {}))
        given = [*arguments, *(options or {}).values()]
        leaves = [leaf for value in given for leaf in (value if isinstance(value, (list, tuple)) else (value,))]
        name = next(leaf.part.name for leaf in leaves if isinstance(leaf, InE4m3))
        expected = "the forward of its MoE alone to use what travels in e4m3"
        raise RuntimeError(f"CopyEngines: {name}: expected {expected}, or attach(..., in_e4m3=False), got {func}")


def parts_of(straight: Mapping[Parameter, torch.dtype], group: Group, memory: Memory) -> dict[Parameter, Part]:
    """Returns the parts of a group's parameters that travel in e4m3. straight: those of `straight_of`, or none."""
    by_module: dict[Any, dict[str, Parameter]] = {}
    for parameter in group.parameters:
        if parameter.name not in getattr(parameter.module, "travel_in_e4m3", ()):
            continue
        is_large = 2 * memory.size * parameter.local.numel() >= LEAST_BYTES
        if is_large and parameter.is_alone and straight.get(parameter) == torch.bfloat16:
            by_module.setdefault(parameter.module, {})[parameter.name] = parameter
    parts: dict[Parameter, Part] = {}
    for module, found in by_module.items():
        if len(found) == len(module.travel_in_e4m3):
            both = [found[name] for name in module.travel_in_e4m3]
            experts = Experts(memory, group, *(parameter.local for parameter in both))
            parts |= dict(zip(both, experts.parts, strict=True))
    return parts


def attach_parts(group: Group, parts: Mapping[Parameter, Part]) -> None:
    """Makes modules use the parts that `parts_of` found, and modules without any use their parameters."""
    for parameter in group.parameters:
        if parameter.name in getattr(parameter.module, "travel_in_e4m3", ()):
            parameter.module.gather_in_e4m3(parts[parameter].experts if parameter in parts else None)
