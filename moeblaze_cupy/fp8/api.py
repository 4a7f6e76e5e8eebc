"""Weights in e4m3: these functions check arguments, choose NumPy or CUDA, and return the caller's kind."""

from typing import Any

import numpy as np

from moeblaze_cupy import checks, overlaps, reference
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, graph_break
from moeblaze_cupy.checks import named_pair
from moeblaze_cupy.cuda.runtime import Runtime, current_device
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.fp8.checks import MULTIPLE
from moeblaze_cupy.fp8.quantize import E4M3, FIELDS, shapes_of
from moeblaze_cupy.types import GATE_UP, Fp8Weights

NAME = "quantize_weights"


@graph_break
def quantize_weights(w1: Any, w2: Any, out: Fp8Weights | None = None, *, gate_up: str = "halves") -> Fp8Weights:
    """Returns a layer's weights as e4m3 in both orientations, with a float32 scale for each expert (and half of w1).

    w1: (E, d, 2h), or a pair (gate, up) of (E, d, h), of gated layers; (E, d, h) of others. w2: (E, h, d). In bf16,
    fp16 or fp32 (fp64 on the CPU), in the memory orders of `moe_forward`; d and h are multiples of 16.
    The scale is the largest magnitude over 448, and 1 where that is 0; a weight is rounded to the nearest e4m3 number
    after multiplication with 448 over that magnitude. An infinity makes its expert's half NaN; a NaN stays where it is.
    out: what an earlier call for weights of the same shapes returned, which is written again, for a call after each
    step of an optimizer. It allocates nothing then, and CUDA graphs can capture it. A forward of before whose backward
    is still to come has lost its weights then; with torch's `moe` that backward raises RuntimeError.
    gate_up: "interleaved" if the columns of w1 are gate 0, up 0, gate 1, up 1, ...; both halves then share a scale.
    Returns Fp8Weights, `out` if that is given. Gradients do not flow through it.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes).
    """
    named = named_pair(NAME, "w1", w1) if w1 is not None else {"w1": None}
    named |= {"w2": w2}
    checks.untransformed(NAME, next(iter(named)), named.values())
    given = {} if out is None else _arrays_of(out)
    call = Call(NAME, **named, **given)
    parts, of_w2 = tuple(call.described[name] for name in named if name != "w2"), call.described["w2"]
    sizes = check(parts, of_w2, gate_up)
    wanted = shapes_of(*sizes)
    if out is not None:
        _check_out(call, out, wanted, gate_up)
        arrays.count_writes(given.values())
    e4m3 = "float8_e4m3fn" if call.framework is arrays.Torch else "uint8"
    if call.on_cpu:
        return _on_cpu(call, tuple(name for name in named if name != "w2"), out, gate_up)
    steps = quantize.configure(tuple(a.layout for a in parts), of_w2.layout, gate_up == "interleaved")
    with current_device(call.device):
        run = Runtime.current(call.known_record(steps).framework, call.device)
        made, addresses = given, [call.described[f"out.{name}"].ptr for name in FIELDS] if given else []
        if out is None:
            buffers = [run.empty(shape, e4m3 if name in E4M3 else "float32") for name, shape in wanted.items()]
            made = {name: buffer.array for name, buffer in zip(FIELDS, buffers, strict=True)}
            addresses = [buffer.ptr for buffer in buffers]
        quantize.weights(run, steps, [array.ptr for array in parts], of_w2.ptr, addresses)
    return out or Fp8Weights(**{name: call.export(array) for name, array in made.items()}, gate_up=gate_up)


def check(w1: tuple[arrays.Array, ...], w2: arrays.Array, gate_up: str) -> tuple[int, int, int, int]:
    """Checks weights by shape, dtype and strides. Returns E, d, h and the number of halves."""
    checks.one_of(NAME, "gate_up", gate_up, GATE_UP)
    checks.shape(NAME, "w2", w2, "E, h, d", (None, None, None))
    E, h, d = w2.shape
    names, columns = (("w1",), (h, 2 * h)) if len(w1) == 1 else (("w1[0]", "w1[1]"), (h,))
    for name, array in zip(names, w1, strict=True):
        if len(array.shape) != 3 or array.shape[:2] != (E, d) or array.shape[2] not in columns:
            wanted = " or ".join(f"({E}, {d}, {n})" for n in columns)
            raise checks.bad_value(NAME, name, f"shape {wanted}, as w2 is (E, h, d) = {w2.shape}", array.shape)
    for name, array in (*zip(names, w1, strict=True), ("w2", w2)):
        checks.dtype(NAME, name, array, checks.floats(w2))
        checks.dtype(NAME, name, array, (w2.dtype,))
        checks.weight_order(NAME, name, array)
    if len(w1) == 2:
        checks.alike(NAME, "w1", *w1)
    if d % MULTIPLE or h % MULTIPLE or not d * h:
        raise checks.bad_value(NAME, "w2", f"d and h that are multiples of {MULTIPLE}", f"(d, h) = ({d}, {h})")
    checks.experts(NAME, "w2", E)
    halves = sum(array.shape[2] for array in w1) // h
    if gate_up == "interleaved" and (halves == 1 or len(w1) == 2):
        raise checks.bad_value(NAME, "gate_up", "'halves' but for one array (E, d, 2h)", repr(gate_up))
    return E, d, h, halves


def _arrays_of(out: Any) -> dict[str, Any]:
    if not isinstance(out, Fp8Weights):
        raise checks.bad_type(NAME, "out", "Fp8Weights from quantize_weights, or None", type(out))
    found = {f"out.{name}": getattr(out, name) for name in FIELDS}
    for name, array in found.items():
        checks.writable(NAME, name, array)
    return found


def _check_out(call: Call, out: Fp8Weights, wanted: dict[str, tuple[int, ...]], gate_up: str) -> None:
    if out.gate_up != gate_up:
        raise checks.bad_value(NAME, "out.gate_up", repr(gate_up), repr(out.gate_up))
    for field, shape in wanted.items():
        array = call.described[f"out.{field}"]
        if array.shape != shape:
            raise checks.bad_value(NAME, f"out.{field}", f"shape {shape}", array.shape)
        checks.dtype(NAME, f"out.{field}", array, ("uint8", "float8_e4m3fn") if field in E4M3 else ("float32",))
        checks.contiguous(NAME, f"out.{field}", array)
        if array.ptr % arrays.ALIGNMENT and not call.on_cpu:
            raise checks.bad_value(NAME, f"out.{field}", "16-byte aligned memory", hex(array.ptr))
    written = {name: array for name, array in call.described.items() if name.startswith("out.")}
    overlaps.apart(NAME, {name: array for name, array in call.described.items() if name not in written}, written)


def _on_cpu(call: Call, w1: tuple[str, ...], out: Fp8Weights | None, gate_up: str) -> Fp8Weights:
    parts = tuple(call.host(name) for name in w1)
    host = reference.quantize_weights(parts if len(parts) == 2 else parts[0], call.host("w2"), gate_up)
    if out is None:
        return Fp8Weights(**{f: _exported(call, f, getattr(host, f)) for f in FIELDS}, gate_up=gate_up)
    for field in FIELDS:
        into: Any = getattr(out, field)
        if call.framework is arrays.Torch:
            into = arrays.Torch.to_numpy(into)
        np.copyto(into, getattr(host, field))
    return out


def _exported(call: Call, field: str, array: Any) -> Any:
    exported = call.export(array)
    if field in E4M3 and call.framework is arrays.Torch:
        return arrays.Torch.in_e4m3(exported)
    return exported
