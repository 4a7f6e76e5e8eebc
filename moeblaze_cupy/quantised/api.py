"""Weights in four and eight bits: check arguments, choose NumPy or CUDA, hand back the caller's kind."""

import math
from typing import Any, cast

import numpy as np

from moeblaze_cupy import checks
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.calls import Call, graph_break
from moeblaze_cupy.cuda.runtime import Runtime, current_device
from moeblaze_cupy.frameworks import DeviceFramework
from moeblaze_cupy.quantised import checks as quantised_checks
from moeblaze_cupy.quantised import decode
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import WEIGHT_FORMATS, QuantizedWeight

E4M3_BLOCK = 128  # rows and columns of a block, as in the checkpoints of DeepSeek-V3


@graph_break
def quantize_experts(w1: Any, w2: Any, format: str) -> tuple[QuantizedWeight, QuantizedWeight]:
    """The weights of a layer in four or eight bits, frozen: `moe_forward` takes the results as w1 and w2.

    w1: (E, d, 2h), or (E, d, h) without a gate; w2: (E, h, d). On the CPU, in bf16 or fp32, in the memory orders of
    `moe_forward`; the weights' dtype is that of the layer's x. d and h are multiples of 8, of 32 for "mxfp4", and 2h d
    and h d of 64 for "nf4".
    format: "mxfp4", by the rule of OCP, blocks of 32 with a power of two; "nf4", as bitsandbytes has it, blocks of 64
    with a float32 scale; "e4m3", blocks of 128 x 128 with a float32 scale (of fewer rows where 128 does not divide h,
    so that gate and up share none); "int8", a float32 scale for each column of the weight.
    Codes are the nearest ones, of two the even one; of "nf4" the lower one.
    Returns the two `QuantizedWeight`, of which `dequantize` gives the numbers.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes, weights that are not finite).
    """
    name = "quantize_experts"
    checks.one_of(name, "format", format, WEIGHT_FORMATS)
    if isinstance(w1, (tuple, list)):
        raise checks.bad_type(name, "w1", "one array (E, d, 2h) or (E, d, h)", type(w1))
    checks.untransformed(name, "w1", (w1, w2))
    call = Call(name, w1=w1, w2=w2)
    up, down = call.described["w1"], call.described["w2"]
    checks.shape(name, "w2", down, "E, h, d", (None, None, None))
    E, h, d = down.shape
    if len(up.shape) != 3 or up.shape[:2] != (E, d) or up.shape[2] not in (h, 2 * h):
        expected = f"shape ({E}, {d}, {h}) or ({E}, {d}, {2 * h}), as w2 is (E, h, d) = {down.shape}"
        raise checks.bad_value(name, "w1", expected, up.shape)
    for argument, array in (("w1", up), ("w2", down)):
        if array.device != arrays.CPU:
            raise checks.bad_type(name, argument, "an array on the CPU", checks.device_name(array))
        checks.dtype(name, argument, array, quantised_checks.DTYPES)
        checks.dtype(name, argument, array, (down.dtype,))
        checks.weight_order(name, argument, array)
    quantised: list[QuantizedWeight] = []
    for argument, form in zip(("w1", "w2"), forms(name, format, up.shape, down.shape, down.dtype), strict=True):
        host = call.host(argument)
        if not all(np.isfinite(host[expert].astype(np.float32)).all() for expert in range(E)):
            raise checks.bad_value(name, argument, "finite weights", "infinities or NaN")
        made = reference.quantize(host, format, form.block)
        data, scales = call.export(made.data), call.export(made.scales)
        if format == "e4m3" and call.framework is arrays.Torch:
            data = arrays.Torch.in_e4m3(data)
        quantised.append(form._replace(data=data, scales=scales))
    return quantised[0], quantised[1]


def forms(
    function: str, format: str, w1: tuple[int, ...], w2: tuple[int, ...], dtype: str
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """What `quantize_experts` makes of weights of these shapes, without the parts. Raises for sizes that do not fit."""
    E, d, columns = w1
    _, h, _ = w2
    blocks: tuple[Any, Any] = (None, None)
    if format == "e4m3":
        rows = math.gcd(E4M3_BLOCK, h) if columns == 2 * h else E4M3_BLOCK
        blocks = (rows, E4M3_BLOCK), (E4M3_BLOCK, E4M3_BLOCK)
    up = QuantizedWeight(None, None, format, (E, d, columns), blocks[0], dtype=dtype)
    down = QuantizedWeight(None, None, format, (E, h, d), blocks[1], dtype=dtype)
    for argument, form in (("w1", up), ("w2", down)):
        quantised_checks.expected_parts(function, argument, form)
    return up, down


@graph_break
def dequantize(weight: QuantizedWeight) -> Any:
    """The numbers that a weight in four or eight bits stands for: (E, N, K) in its dtype, of the caller's kind.

    weight: `QuantizedWeight`, of shape (E, K, N). The layer multiplies exactly these numbers, on every backend, and
    reads them as the transposed view (E, K, N).
    Raises TypeError (dtype, device) or ValueError (shape, memory order, format).
    """
    name = "dequantize"
    if not isinstance(weight, QuantizedWeight):
        raise checks.bad_type(name, "weight", "QuantizedWeight", type(weight))
    call = Call(name, **quantised_checks.parts_of(name, "weight", weight))
    quantised_checks.weight(name, "weight", weight, call.described)
    if call.on_cpu:
        return call.export(reference.dequantize(on_host(call, "weight", weight)))
    E, K, N = weight.shape
    launch = decode.step(weight, call.described["weight.scales"].dtype)
    with current_device(call.device):
        run = Runtime.current(cast(DeviceFramework, call.framework), call.device)  # CUDA arrays are CuPy's or torch's
        out = run.empty((E, N, K), weight.dtype)
        parts = [part.ptr for part in call.described.values()]
        run.launch(launch, *parts, *(0,) * (len(decode.PARTS) - len(parts)), 0, out.ptr)
    return call.export(out.array)


def on_host(call: Call, argument: str, weight: QuantizedWeight) -> QuantizedWeight:
    """The weight in NumPy, e4m3 and e8m0 as bytes."""

    def part(name: str) -> Any:
        host = call.host(f"{argument}.{name}")
        keeps = host.dtype == np.float32 or (host.dtype == np.int8 and weight.format == "int8")
        return host if keeps else host.view(np.uint8)

    nested = weight.nested and weight.nested._make(part(f"nested.{name}") for name in weight.nested._fields)
    return weight._replace(data=part("data"), scales=part("scales"), nested=nested)
