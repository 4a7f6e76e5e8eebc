"""Checks of precision="fp8" and of the weights for it, from shapes and dtypes alone as in `checks`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import checks
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.frameworks import Array
from moeblaze_cupy.types import Activation, Fp8Weights, LayerOptions, is_gated

PRECISIONS = (None, "fp8")
MULTIPLE = 16  # divides d and h: rows of e4m3 then begin at multiples of 16 bytes, which TMA requires
WGRAD_MULTIPLE = 64  # divides h with fp8_wgrad: 64 columns of bf16 then have room for a line of 128 rows of e4m3
FIELDS = ("w1", "w1_transposed", "w1_scales", "w2", "w2_transposed", "w2_scales")  # Fp8Weights' fields for products
NAMES = tuple(f"fp8_weights.{field}" for field in FIELDS)


def arrays_of(function: str, precision: Any, fp8_weights: Any) -> tuple[Any, ...]:
    """Returns the arrays of `fp8_weights` in the order of FIELDS; () for None."""
    if precision is None and fp8_weights is None:
        return ()
    checks.one_of(function, "precision", precision, PRECISIONS)
    if fp8_weights is None:
        return ()
    if precision != "fp8":
        raise checks.bad_value(function, "fp8_weights", "None without precision='fp8'", type(fp8_weights))
    if not isinstance(fp8_weights, Fp8Weights):
        raise checks.bad_type(function, "fp8_weights", "Fp8Weights from quantize_weights, or None", type(fp8_weights))
    found = tuple([getattr(fp8_weights, field) for field in FIELDS])
    for array in found:  # `in` would compare arrays
        if array is None:
            name = NAMES[[of is None for of in found].index(True)]
            raise checks.bad_type(function, name, "an array, as quantize_weights makes", None)
    return found


def row_precision(function: str, row_precision: Any, precision: Any, factors: bool = False) -> None:
    """Checks how rows travel between ranks, beside the precision of products, which is checked already."""
    checks.one_of(function, "row_precision", row_precision, PRECISIONS)
    if row_precision is not None and (precision is None or factors):
        where = "without precision='fp8'" if precision is None else "with lora, as factors multiply rows in bfloat16"
        raise checks.bad_value(function, "row_precision", f"None {where}", repr(row_precision))


def wgrad(function: str, options: LayerOptions, h: int, *, factors: bool = False, packed: bool = False) -> None:
    """Checks fp8_wgrad beside the other options, and beside what a layer has. packed: w1 or w2."""
    if not isinstance(options.fp8_wgrad, (bool, np.bool_)):
        raise checks.bad_type(function, "fp8_wgrad", "True or False", repr(options.fp8_wgrad))
    if not options.fp8_wgrad:
        return
    others = {
        "without precision='fp8'": options.precision != "fp8",
        "with gate_up='interleaved'": options.gate_up == "interleaved",
        "with unreduced": options.unreduced,
        "with memory_limit": options.memory_limit is not None,
        "with low-rank factors": factors,
        "with packed weights": packed,
    }
    for where, is_so in others.items():
        if is_so:
            raise checks.bad_value(function, "fp8_wgrad", f"False {where}", True)
    if h % WGRAD_MULTIPLE:
        raise checks.bad_value(function, "fp8_wgrad", f"False unless h is a multiple of {WGRAD_MULTIPLE}", f"h = {h}")


def form(function: str, d: int, h: int) -> None:
    """Checks the sizes of a layer in e4m3, which a module knows before its arrays."""
    if d % MULTIPLE or h % MULTIPLE:
        expected = f"d and h that are multiples of {MULTIPLE} for 'fp8'"
        raise checks.bad_value(function, "precision", expected, f"(d, h) = ({d}, {h})")


def layer(
    function: str,
    x: Array,
    w2: Array,
    activation: str | Activation,
    gate_up: str,
    biases: Mapping[str, Array],
    weights: Sequence[Array],
    weights_gate_up: str | None,
    limits: DeviceLimits | None,
) -> None:
    """Checks that a layer that has passed `checks.layer` can run in e4m3. limits: None on the CPU.

    weights: the arrays of Fp8Weights in the order of FIELDS, or none. weights_gate_up: their gate_up.
    """
    E, h, d = w2.shape
    if limits is not None and limits.tier != "sm90":
        capability = f"{limits.compute_capability // 10}.{limits.compute_capability % 10}"
        expected = f"Hopper's kernels for 'fp8', got compute capability {capability}"
        forced = " and MOEBLAZE_TIER=sm80" if limits.compute_capability == 90 else ""
        raise RuntimeError(f"{function}: precision: expected {expected}{forced}")
    if x.dtype != "bfloat16":
        raise checks.bad_type(function, "x", "bfloat16 with precision='fp8'", x.dtype)
    form(function, d, h)
    for name, bias in biases.items():  # Hopper's kernels read 16 bytes at a time
        past = bias.ptr % arrays.ALIGNMENT
        if limits is not None and (past or bias.strides[0] % 8):
            got = f"strides {bias.strides} and an address {past} bytes past a multiple of 16"
            raise checks.bad_value(function, name, "rows at multiples of 16 bytes with precision='fp8'", got)
    if not weights:
        return
    columns = h * (1 + is_gated(activation))
    up, down = (E, d, columns), (E, h, d)
    shapes = up, (E, columns, d), (E, 1 + is_gated(activation)), down, (E, d, h), (E, 1)
    if weights_gate_up != gate_up:
        raise checks.bad_value(function, "fp8_weights.gate_up", repr(gate_up), repr(weights_gate_up))
    if tuple(array.shape for array in weights) != shapes:
        got = f"those of w1 {weights[0].shape} and w2 {weights[3].shape}"
        raise checks.bad_value(function, "fp8_weights", f"those of w1 {up} and w2 {down}", got)
    for name, array in zip(NAMES, weights, strict=True):
        checks.dtype(function, name, array, ("float32",) if name.endswith("scales") else ("uint8", "float8_e4m3fn"))
        checks.contiguous(function, name, array)
        if limits is not None and array.ptr % arrays.ALIGNMENT:
            raise checks.bad_value(function, name, "16-byte aligned memory", hex(array.ptr))
