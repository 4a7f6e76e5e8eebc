"""The parameters of every kernel, read from its source: a kernel takes one argument, a struct by value.

The source states the struct once, with types, shapes and directions. `Params.dtype` lays its fields out in host memory,
and `Params.assertions` makes the compilation fail if the compiler lays them out otherwise.

A struct declares tensor maps first, then pointers, 64-bit and 32-bit numbers, so that only its end is padded.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, NamedTuple, Protocol

import numpy as np

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # a CUtensorMap's size and alignment
_KINDS = (
    *(("maps", MAP_BYTES, f"V{MAP_BYTES}"), ("pointers", 8, "u8")),
    *(("int64", 8, "i8"), ("int32", 4, "i4"), ("float32", 4, "f4")),
)
_KIND_OF_TYPE = {"TensorMap": "maps", "int64": "int64", "int": "int32", "float": "float32"}


class Variant(Protocol):
    """The part of a `loader.Variant` that `params_of` reads."""

    @property
    def source(self) -> str: ...

    @property
    def entry(self) -> str: ...

    @property
    def macros(self) -> tuple[tuple[str, str], ...]: ...


class Field(NamedTuple):
    """A field of a kernel's struct: its name, and its size and offset in bytes."""

    name: str
    size: int
    offset: int


@dataclass(frozen=True)
class Params:
    """The fields of one kernel's struct, by kind.

    struct: the struct's name in C++, or one instance of it if it is a template.
    maps: tensor maps, 128 bytes each. pointers: device addresses, 0 for an absent array.
    """

    struct: str
    maps: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    int64: tuple[str, ...] = ()
    int32: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()

    @property
    def scalars(self) -> tuple[str, ...]:
        """Returns the numbers among the fields."""
        return (*self.int64, *self.int32, *self.float32)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Returns the fields in the order of their offsets, in which a launch is given their values."""
        found, offset = [], 0
        for kind, size, _ in _KINDS:
            for name in getattr(self, kind):
                found.append(Field(name, size, offset))
                offset += size
        return tuple(found)

    @cached_property
    def size(self) -> int:
        """Returns the bytes of the struct, a multiple of its alignment."""
        end = self.fields[-1].offset + self.fields[-1].size
        alignment = MAP_ALIGNMENT if self.maps else 8
        return -(-end // alignment) * alignment

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Returns a structured dtype with the struct's offsets and size."""
        formats = [form for kind, _, form in _KINDS for _ in getattr(self, kind)]
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": formats,
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.size,
            }
        )

    def assertions(self) -> str:
        """Returns C++ to follow the struct's definition and common.cuh: size, fields, their sizes and offsets."""
        checks = [(f"sizeof({self.struct})", self.size)]
        for name, size, offset in self.fields:
            checks += [(f"OFFSET_OF({name}, {self.struct})", offset), (f"sizeof({self.struct}::{name})", size)]
        text = '"moeblaze_cupy/cuda/structs.py has another layout"'
        # A binding has as many names as the struct has fields: one more field might lie in the padding at the end.
        names = ", ".join(field.name for field in self.fields)
        binding = f"[[maybe_unused]] const auto& [{names}] = all;"
        count = f"inline __device__ void all_fields(const {self.struct}& all) {{ {binding} }}\n"
        return count + "".join(f"static_assert({what} == {number}, {text});\n" for what, number in checks)


@cache
def source_folder() -> str:
    """Returns the folder of the kernel sources."""
    return str(resources.files("moeblaze_cupy.kernels_cu"))


@cache
def source_paths(folder: str) -> dict[str, str]:
    """Returns the paths of kernel sources and headers in a folder's folders, by name. No two folders share a name."""
    found = {
        name: os.path.join(inside, name)
        for inside, _, names in os.walk(folder)
        for name in names
        if name.endswith((".cu", ".cuh"))
    }
    return dict(sorted(found.items()))


@cache
def source_text(path: str) -> str:
    """Returns the text of a source or header, which a process reads once."""
    with open(path) as file:
        return file.read()


@cache
def _without_comments(path: str) -> str:
    return re.sub(r"//.*", "", source_text(path))


def included(source: str) -> list[str]:
    """Returns the source and all headers that it includes, by name, also those under conditions."""
    paths, names = source_paths(source_folder()), [source]
    for name in names:
        headers = re.findall(r'^#include "(.+)"', _without_comments(paths[name]), re.MULTILINE)
        names += [header for header in dict.fromkeys(headers) if header not in names]
    return names


@cache
def _code(source: str) -> str:
    """Returns a source with its includes, without comments, each macro on one line."""
    paths = source_paths(source_folder())
    return "".join(_without_comments(paths[name]) for name in included(source)).replace("\\\n", " ")


def _declarations(body: str, macros: Mapping[str, str]) -> Iterable[str]:
    """Returns a struct's declarations under these macros: a condition names one macro, by #if or #if !."""
    conditions, kept = [True], []
    for line in map(str.strip, body.splitlines()):
        if condition := re.fullmatch(r"#if (!?)(\w+)", line):
            negated, name = condition.groups()
            conditions.append((macros[name] != "0") != bool(negated))
        elif line == "#endif":
            conditions.pop()
        elif all(conditions):
            kept.append(line)
    constants = "".join(f"float constant{i};" for i in range(int(macros.get("CONSTANTS", "0"))))
    text = " ".join(kept).replace("ACTIVATION_CONSTANTS", constants)
    return filter(None, map(str.strip, text.split(";")))


def _struct(source: str, name: str, macros: Mapping[str, str]) -> Params:
    code, head = _code(source), f"struct {name} {{\n"
    start = code.find(head)
    if start < 0:
        raise KeyError(f"{source}: no struct {name}")
    template = re.search(r"template <([^>]*)>\s*\Z", code[code.rfind(";", 0, start) + 1 : start])
    body = code[start + len(head) : code.index("\n};", start)]
    fields: list[tuple[str, str]] = []
    for declaration in _declarations(body, macros):
        first, *others = declaration.split(",")
        *_, field = re.findall(r"\w+", first)
        type_name = first[: first.rindex(field)].strip()
        fields.append(("pointers" if "*" in type_name else _KIND_OF_TYPE[type_name], field))
        fields += [("pointers" if "*" in other else _KIND_OF_TYPE[type_name], other.strip(" *")) for other in others]
    kinds = [kind for kind, _, _ in _KINDS]
    if fields != sorted(fields, key=lambda field: kinds.index(field[0])):
        raise ValueError(f"{source}: {name}: expected fields in the order {', '.join(kinds)}, got {fields}")
    instance = f"<{', '.join(['float'] * len(template[1].split(',')))}>" if template else ""
    by_kind = {kind: tuple(field for of, field in fields if of == kind) for kind in kinds}
    return Params(name + instance, **by_kind)


@cache
def _entries(source: str) -> dict[str, str]:
    """Returns the name of each kernel's struct, by the start of the kernel's name.

    A macro's argument may end a name, or be the whole name. ENTRY stands for any name.
    """
    code, found = _code(source), {}
    for match in re.finditer(r'extern\s+"C"[^{};]*?([\w#]+)\s*\(\s*const (?:__grid_constant__ )?(\w+)', code):
        name, struct = match.groups()
        macro = re.match(rf"#define (\w+)\({name},", code[code.rindex("\n", 0, match.start()) + 1 :])
        calls = re.findall(rf"(?<!#define ){macro[1]}\(([\w#]+)", code) if macro else [name]
        for call in calls:
            found["" if call == "ENTRY" else call.partition("##")[0]] = struct
    return found


@cache
def tables(source: str, macros: tuple[tuple[str, str], ...] = ()) -> dict[str, Params]:
    """Returns the structs of a source's kernels under these JIT constants, by the start of an entry's name."""
    return {start: _struct(source, name, dict(macros)) for start, name in _entries(source).items()}


@cache
def _params_of(source: str, entry: str, macros: tuple[tuple[str, str], ...]) -> Params:
    found = tables(source, macros)
    starts = [start for start in found if entry.startswith(start)]
    if not entry or not starts:
        raise KeyError(f"{source}: no parameters of an entry {entry!r}")
    return found[max(starts, key=len)]


def params_of(variant: Variant) -> Params:
    """Returns the struct of a kernel, a `loader.Variant` with an entry. Raises KeyError for one that does not exist."""
    return _params_of(variant.source, variant.entry, variant.macros)
