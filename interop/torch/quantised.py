"""Frozen weights in four and eight bits for `moe` and `MoE`: tensors apart from forms, and as parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.torch.autograd import is_plain
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.types import LayerArrays, NestedScales, QuantizedWeight

Tensor = torch.Tensor


class Frozen(NamedTuple):
    """The frozen weights of a call by name, w1 and w2, without their tensors, which autograd saves."""

    forms: tuple[tuple[str, QuantizedWeight], ...]

    def joined(self, layer: LayerArrays, parts: Sequence[Tensor]) -> LayerArrays:
        """Returns the layer with its frozen weights, joined from the parts that `apart` returned."""
        found, left = {}, list(parts)
        for name, form in self.forms:
            data, scales = left.pop(0), left.pop(0)
            nested = form.nested and NestedScales(left.pop(0), left.pop(0), left.pop(0))
            found[name] = form._replace(data=data, scales=scales, nested=nested)
        return layer.with_weights(found)


def apart(layer: LayerArrays, function: str = "moe") -> tuple[Frozen, LayerArrays, list[Tensor]]:
    """Returns a layer's frozen weights, the layer with None in their place, and their tensors.

    function: what the user called, for the errors of tensors that are none, or require a gradient.
    """
    weights = layer.frozen
    parts: list[Tensor] = []
    forms = []
    for name, weight in weights.items():
        of_weight = quantised_checks.parts_of(function, name, weight)
        _check(function, of_weight)
        parts += of_weight.values()
        nested = weight.nested and NestedScales(None, None, None)
        forms.append((name, weight._replace(data=None, scales=None, nested=nested)))
    return Frozen(tuple(forms)), layer.with_weights(dict.fromkeys(weights)), parts


def _check(function: str, parts: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise checks.bad_type(function, name, "a torch tensor", type(part))
        if part.requires_grad:
            expected = "a part that requires no gradient, as the weight is frozen"
            raise checks.bad_value(function, name, expected, "one that requires it")


def check_eager(tensors: Sequence[Tensor | None]) -> None:
    """Raises RuntimeError where a call would have to be one of operators, which take no `QuantizedWeight` or `Lora`."""
    if not is_plain(tensors):
        expected = "tensors with memory of their own, outside of transforms of torch.func, with lora or QuantizedWeight"
        kinds = ", ".join(sorted({type(tensor).__name__ for tensor in tensors if tensor is not None}))
        where = " on the device meta" if getattr(tensors[0], "is_meta", False) else ""
        raise RuntimeError(f"moe: x: expected {expected}, got {kinds}{where}")


# The dtypes of parts that parameters hold as bytes, so that no cast of a module's floats reaches them.
_DTYPES = {"nf4": (torch.uint8, torch.float32), "mxfp4": (torch.uint8, torch.uint8)} | {
    "e4m3": (torch.float8_e4m3fn, torch.float32),
    "int8": (torch.int8, torch.float32),
}


def as_bytes(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Returns the parts of a weight by name, as uint8. Parts that all experts share have a first dimension of 1."""
    shared = {} if weight.nested is None else weight.nested._asdict()
    parts = {"data": weight.data, "scales": weight.scales, **shared}
    parts.update({name: shared[name].reshape(1, -1) for name in ("code", "offset") if name in shared})
    return {name: part.contiguous().view(torch.uint8) for name, part in parts.items()}


def check_widths(function: str, format: str, d_model: int, d_hidden: int) -> None:
    """Checks the widths of a module whose experts are packed in this format."""
    multiple = quantised_checks.multiple_of(format)
    for name, width in (("d_model", d_model), ("d_hidden", d_hidden)):
        if width % multiple:
            raise checks.bad_value(function, name, f"a multiple of {multiple} for {format!r}", width)


def empty_bytes(form: QuantizedWeight, device: Any) -> dict[str, Tensor]:
    """Returns zeros of the parts of such a weight."""
    expected = quantised_checks.expected_parts("MoE", "weight", form)
    made = {}
    for (name, (_, shapes, _)), dtype in zip(expected.items(), _DTYPES[form.format], strict=True):
        *outer, last = shapes[0]
        made[name] = torch.zeros(*outer, last * dtype.itemsize, dtype=torch.uint8, device=device)
    return made


def from_bytes(form: QuantizedWeight, dtype: torch.dtype, *parts: Tensor) -> QuantizedWeight:
    """Returns the weight with these parts, in the order of `as_bytes`, decoded to `dtype`."""
    of_data, of_scales = _DTYPES[form.format]
    data, scales, *shared = (part.detach() for part in parts)
    nested = None
    if shared:
        code, absmax, offset = (part.view(torch.float32) for part in shared)
        nested, of_scales = NestedScales(code[0], absmax, offset[0]), torch.uint8
    name = str(dtype).removeprefix("torch.")
    return form._replace(data=data.view(of_data), scales=scales.view(of_scales), nested=nested, dtype=name)
