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
from moeblaze_cupy.quantised import decode, encode
from moeblaze_cupy.reference import quantised as reference
from moeblaze_cupy.types import WEIGHT_FORMATS, NestedScales, QuantizedWeight

E4M3_BLOCK = 128  # rows and columns of a block, as in the checkpoints of DeepSeek-V3


@graph_break
def quantize_experts(w1: Any, w2: Any, format: str) -> tuple[QuantizedWeight, QuantizedWeight]:
    """The weights of a layer in four or eight bits, frozen: `moe_forward` takes the results as w1 and w2.

    w1: (E, d, 2h), or (E, d, h) without a gate; w2: (E, h, d). In bf16, on the CPU also in fp32, and in the memory
    orders of `moe_forward`; the weights' dtype is that of the layer's x. d and h are multiples of 8, of 32 for "mxfp4",
    and 2h d and h d of 64 for "nf4".
    format: "mxfp4", by the rule of OCP, blocks of 32 with a power of two; "nf4", as bitsandbytes has it, blocks of 64
    with a float32 scale; "e4m3", blocks of 128 x 128 with a float32 scale (of fewer rows where 128 does not divide h,
    so that gate and up share none); "int8", a float32 scale for each column of the weight.
    Codes are the nearest ones, of two the even one; of "nf4" the lower one. Scales that are denormals become 0.
    Returns the two `QuantizedWeight`, of which `dequantize` gives the numbers.
    On CUDA a scale of weights that are not all finite is NaN or infinite, as nothing waits for the device.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, sizes, and on the CPU weights that are not
    finite).
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
    if 0 in down.shape:
        raise checks.bad_value(name, "w2", "shape (E, h, d) with sizes of at least 1", down.shape)
    checks.experts(name, "w2", E)
    if len(up.shape) != 3 or up.shape[:2] != (E, d) or up.shape[2] not in (h, 2 * h):
        expected = f"shape ({E}, {d}, {h}) or ({E}, {d}, {2 * h}), as w2 is (E, h, d) = {down.shape}"
        raise checks.bad_value(name, "w1", expected, up.shape)
    for argument, array in (("w1", up), ("w2", down)):
        checks.dtype(name, argument, array, quantised_checks.DTYPES)
        checks.dtype(name, argument, array, (down.dtype,))
        checks.weight_order(name, argument, array)
    made = forms(name, format, up.shape, down.shape, down.dtype)
    of_arguments = zip(("w1", "w2"), made, strict=True)
    if call.on_cpu:
        w1, w2 = (_encoded_on_cpu(call, argument, form) for argument, form in of_arguments)
        return w1, w2
    if down.dtype != "bfloat16":
        raise checks.bad_type(name, "w2", "bfloat16, to which CUDA decodes", down.dtype)
    with current_device(call.device):
        run = Runtime.current(cast(DeviceFramework, call.framework), call.device)  # CUDA arrays are CuPy's or torch's
        w1, w2 = (_encoded(run, call, argument, form) for argument, form in of_arguments)
    return w1, w2


def _encoded_on_cpu(call: Call, argument: str, form: QuantizedWeight) -> QuantizedWeight:
    host = call.host(argument)
    if not all(np.isfinite(host[expert].astype(np.float32)).all() for expert in range(len(host))):
        raise checks.bad_value(call.function, argument, "finite weights", "infinities or NaN")
    made = reference.quantize(host, form.format, form.block)
    data, scales = call.export(made.data), call.export(made.scales)
    if form.format == "e4m3" and call.framework is arrays.Torch:
        data = arrays.Torch.in_e4m3(data)
    return form._replace(data=data, scales=scales)


def _encoded(run: Runtime, call: Call, argument: str, form: QuantizedWeight) -> QuantizedWeight:
    given = call.described[argument]
    e4m3 = "float8_e4m3fn" if run.framework is arrays.Torch else "uint8"
    dtypes = {"data": {"int8": "int8", "e4m3": e4m3}, "scales": dict.fromkeys(("nf4", "e4m3", "int8"), "float32")}
    made = {}
    for part, (_, shapes, _) in quantised_checks.expected_parts(call.function, argument, form).items():
        made[part] = run.empty(shapes[0], dtypes[part].get(form.format, "uint8"))
    launch = encode.configure(form.format, given.layout, form.block)
    run.launch(launch, given.ptr, *(buffer.ptr for buffer in made.values()))
    return form._replace(**{part: call.export(buffer.array) for part, buffer in made.items()})


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

    nested = weight.nested and NestedScales(*(part(f"nested.{name}") for name in NestedScales._fields))
    return weight._replace(data=part("data"), scales=part("scales"), nested=nested)
