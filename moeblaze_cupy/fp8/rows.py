"""Rows in e4m3, before they travel."""

from typing import Any

import numpy as np

from moeblaze_cupy import checks, reference
from moeblaze_cupy.calls import Lookup, graph_break, launched
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.types import Fp8Rows


@graph_break
def quantize_rows(rows: Any, out: Fp8Rows) -> None:
    """Writes rows in e4m3 into `out`, with a float32 scale for each, as precision="fp8" has x and out's gradient.

    rows: (L, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. out: (L, d) uint8 and (L,) float32, contiguous, which
    share no memory with the rows. A row's scale is its largest magnitude over 448, also where that is 0. A NaN stays in
    its element, and an infinity makes its row NaN.
    Raises TypeError (dtype, device), ValueError (shape, memory order), or RuntimeError for tensors that autograd or a
    transform of torch would have to follow.
    """
    function, names = "quantize_rows", ("rows", "out.values", "out.scales")
    look = Lookup(function, (), names, (rows, *out))
    if look.record is None:
        call = look.begin(required=3)
        given, values, scales = call.described.values()
        checks.shape(function, "rows", given, "L, d", (None, None))
        checks.dtype(function, "rows", given, checks.floats(given))
        checks.contiguous(function, "rows", given)
        checks.shape(function, "out.values", values, "L, d", given.shape)
        checks.contiguous(function, "out.values", values)
        checks.fp8_rows(function, "out", values, scales)
        if call.on_cpu:
            stored, of_rows = reference.fp8.quantize_rows(call.host("rows"))
            np.copyto(call.host("out.values"), stored)
            np.copyto(call.host("out.scales"), of_rows)
            return
        look.keep(quantize.rows(given.layout, scale_of_zeros=0.0))
    look.run(launched)
