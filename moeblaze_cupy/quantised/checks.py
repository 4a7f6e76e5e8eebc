"""Checks of `types.QuantizedWeight`; as `checks`, from shapes and dtypes alone."""

import math
from collections.abc import Mapping
from typing import Any

from moeblaze_cupy import checks
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.frameworks import CPU, Array
from moeblaze_cupy.reference.quantised import MXFP4_BLOCK, NESTED_BLOCK, NF4_BLOCK
from moeblaze_cupy.types import WEIGHT_FORMATS, NestedScales, QuantizedWeight

MULTIPLE = 8  # elements that a thread decodes at a time
MOST_ELEMENTS = 2**31 - 1  # of an expert, which the kernel counts in 32 bits
E8M0 = ("uint8", "float8_e8m0fnu")
DTYPES = ("bfloat16", "float32")


def parts_of(function: str, argument: str, weight: QuantizedWeight) -> dict[str, Any]:
    """The arrays of a weight by argument name."""
    found = {f"{argument}.data": weight.data, f"{argument}.scales": weight.scales}
    if weight.nested is not None:
        if not isinstance(weight.nested, NestedScales):
            raise checks.bad_type(function, f"{argument}.nested", "NestedScales or None", type(weight.nested))
        found |= {f"{argument}.nested.{name}": part for name, part in weight.nested._asdict().items()}
    return found


def weight(function: str, argument: str, given: QuantizedWeight, parts: Mapping[str, Array]) -> None:
    """parts: of `parts_of`, described."""
    form, sizes = given.format, given.shape
    checks.one_of(function, f"{argument}.format", form, WEIGHT_FORMATS)
    if not (isinstance(sizes, tuple) and len(sizes) == 3 and all(isinstance(n, int) and n >= 1 for n in sizes)):
        raise checks.bad_value(function, f"{argument}.shape", "(E, K, N), sizes of at least 1", repr(sizes))
    checks.experts(function, f"{argument}.shape", sizes[0])
    on_cpu = parts[f"{argument}.data"].device == CPU
    checks.one_of(function, f"{argument}.dtype", given.dtype, DTYPES if on_cpu else DTYPES[:1])
    if (given.nested is not None) > (form == "nf4"):
        raise checks.bad_value(function, f"{argument}.nested", f"None for {form!r}", "nested scales")
    if (given.block is not None) != (form == "e4m3"):
        expected = "(rows, columns) for 'e4m3', else None"
        raise checks.bad_value(function, f"{argument}.block", expected, f"{given.block!r} for {form!r}")
    for name, (letters, shapes, dtypes) in expected_parts(function, argument, given).items():
        array = parts[f"{argument}.{name}"]
        if array.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise checks.bad_value(function, f"{argument}.{name}", f"shape ({letters}) = {wanted}", array.shape)
        checks.dtype(function, f"{argument}.{name}", array, dtypes)
        checks.contiguous(function, f"{argument}.{name}", array)
        if not on_cpu and array.ptr % arrays.ALIGNMENT:
            raise checks.bad_value(function, f"{argument}.{name}", "16-byte aligned memory", hex(array.ptr))


def in_e4m3(function: str, weights: Mapping[str, QuantizedWeight]) -> None:
    """Checks that products in e4m3 take these frozen weights, by "w1" and "w2"."""
    for name in ("w1", "w2"):
        got = weights[name].format if name in weights else "an array"
        if got != "mxfp4":
            expected = "None with QuantizedWeight, unless w1 and w2 are in 'mxfp4'"
            raise checks.bad_value(function, "precision", expected, f"'fp8' and {got!r} for {name}")


def decoded(given: QuantizedWeight, data: Array) -> Array:
    """Returns the array that the layer reads in place of a weight, for checks. data: its part, described."""
    _, K, N = given.shape
    return Array(data.owner, data.ptr, given.shape, (N * K, 1, K), given.dtype, data.device)


def multiple_of(format: str) -> int:
    """Returns what K has to be a multiple of: d of w1, h of w2. N K is then one of nf4's blocks."""
    return MXFP4_BLOCK if format == "mxfp4" else MULTIPLE


Expected = dict[str, tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]]


def expected_parts(function: str, argument: str, given: QuantizedWeight) -> Expected:
    """Of each part: its shape in letters, the shapes and the dtypes that it may have."""
    E, K, N = given.shape

    def multiple(size: int, letters: str, of: int) -> None:
        if size % of:
            expected = f"{letters} that is a multiple of {of} for {given.format!r}"
            raise checks.bad_value(function, f"{argument}.shape", f"(E, K, N) with {expected}", given.shape)

    multiple(K, "K", multiple_of(given.format))
    if N * K > MOST_ELEMENTS:
        raise checks.bad_value(function, f"{argument}.shape", f"K * N of at most {MOST_ELEMENTS}", given.shape)
    if given.format == "mxfp4":
        blocks = E, N, K // MXFP4_BLOCK
        packed = (E, N, K // 2), (*blocks, MXFP4_BLOCK // 2)
        return {"data": ("E, N, K / 2", packed, ("uint8", "int8")), "scales": ("E, N, K / 32", (blocks,), E8M0)}
    if given.format == "nf4":
        multiple(N * K, "N * K", NF4_BLOCK * (1 if given.nested is None else NESTED_BLOCK))
        blocks_of_expert = N * K // NF4_BLOCK
        single = ("float32",)
        found: Expected = {
            "data": ("E, N * K / 2", ((E, N * K // 2),), ("uint8",)),
            "scales": ("E, N * K / 64", ((E, blocks_of_expert),), single if given.nested is None else ("uint8",)),
        }
        if given.nested is not None:
            found |= {
                "nested.code": ("256", ((256,),), single),
                "nested.absmax": ("E, N * K / 16384", ((E, blocks_of_expert // NESTED_BLOCK),), single),
                "nested.offset": ("", ((), (1,)), single),
            }
        return found
    if given.format == "int8":
        return {"data": ("E, N, K", ((E, N, K),), ("int8",)), "scales": ("E, N, 1", ((E, N, 1),), ("float32",))}
    block = given.block
    fits = isinstance(block, tuple) and len(block) == 2 and all(isinstance(n, int) and n >= 1 for n in block)
    if block is None or not fits or (block[1] % MULTIPLE and block[1] < K):
        expected = f"(rows, columns), columns being a multiple of {MULTIPLE} or all K"
        raise checks.bad_value(function, f"{argument}.block", expected, repr(block))
    grid = E, math.ceil(N / block[0]), math.ceil(K / block[1])
    of_scales = "E, N / rows, K / columns", (grid,), ("float32", *E8M0)
    return {"data": ("E, N, K", ((E, N, K),), ("uint8", "float8_e4m3fn")), "scales": of_scales}
