"""What all operators share: schemas from NamedTuples, tensors as fakes see them, and their registration."""

import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moeblaze_cupy.frameworks import CPU, Array
from moeblaze_cupy.interop.torch import private

Tensor = torch.Tensor
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    str | None: "str?",
    bool: "bool",
    bool | None: "bool?",
    int: "int",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    tuple[float, ...]: "float[]",
    tuple[str, ...]: "str[]",
    tuple[int, int, int] | None: "int[]?",
}


def declared(fields: type, names: Sequence[str] | None = None, prefix: str = "", written: str = "") -> str:
    """The schema's part of a NamedTuple's fields; `written`: letters of those whose memory is overwritten, in order."""
    letters, parts = iter(written), []
    for name, annotation in typing.get_type_hints(fields).items():
        if names is None or name in names:
            kind = _TYPES[annotation]
            if written and kind.startswith("Tensor"):
                kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
            parts.append(f"{kind} {prefix}{name}")
    return ", ".join(parts)


def concrete(size: Any) -> int:
    """A size for checks: of a symbolic one its hint, so that no guard is made; the implementation checks again."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else int(node.expr.xreplace(dict.fromkeys(node.expr.free_symbols, 1009)))


def describe(tensor: Tensor) -> Array:
    """A fake tensor as checks see arrays."""
    shape, strides = (tuple(map(concrete, sizes)) for sizes in (tensor.shape, tensor.stride()))
    device = CPU if tensor.device.type in ("cpu", "meta") else tensor.device.index or 0
    return Array(tensor, 0, shape, strides, str(tensor.dtype).removeprefix("torch."), device)


def split(arguments: Sequence[Any], *kinds: Any) -> list[Any]:
    """Positional arguments as NamedTuples of these types; an int stands for so many arguments as they are."""
    parts: list[Any] = []
    for kind in kinds:
        number = kind if isinstance(kind, int) else len(kind._fields)
        taken, arguments = arguments[:number], arguments[number:]
        parts += taken if isinstance(kind, int) else [kind(*taken)]
    assert not arguments
    return parts


def nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,))


private.tell_inspect(__file__, __name__)
_library: Any = torch.library.Library("moeblaze", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no types
# Compilers hand over strides as the fakes saw them, as the transposed views of weights.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


def define(
    name: str, arguments: Sequence[str], returns: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _library.define(f"{name}({', '.join(arguments)}) -> {returns}", tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"moeblaze::{name}", fake, lib=_library)
