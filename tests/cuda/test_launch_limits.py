"""Every launch of every operation is one that CUDA and the GPU allow: grids, threads, shared memory, tensor maps.

Sizes are drawn from the edges of what the public functions take, on every kind of GPU. Nothing is launched.
"""

import dataclasses
import math
import random

import pytest

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.launch_config import MAX_GRID_Y, MAX_SLOTS
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.frameworks import ITEMSIZE, Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.layer import backward
from moeblaze_cupy.layer import forward as experts
from moeblaze_cupy.reference import selection as reference_selection
from moeblaze_cupy.router import launches as router
from moeblaze_cupy.router.options import RouterOptions
from moeblaze_cupy.rows import api as rows
from moeblaze_cupy.selection import balance
from moeblaze_cupy.selection import config as selection_config
from moeblaze_cupy.selection import launches as selection
from moeblaze_cupy.types import (
    CAPACITY_ORDERS,
    GRADIENTS,
    ROUNDINGS,
    SCORES,
    BackwardArrays,
    BackwardOptions,
    LayerArrays,
    LayerOptions,
    is_gated,
)
from tests.cuda.test_launch_config import A100, B200, H200, JETSON_ORIN, RTX_3090, RTX_4090, RTX_5090

# The portable tier on Hopper, too.
LIMITS = [A100, RTX_3090, JETSON_ORIN, RTX_4090, H200, B200, RTX_5090]
LIMITS += [dataclasses.replace(H200, tier="sm80")]
ARRAY_BYTES = 3 * 10**11  # more than a GPU has
SIZES = (1, 2, 7, 8, 31, 64, 127, 128, 129, 256, 511, 512, 1000, 2048, 4096, 4097, 30000, 65535, 65536)
NUMBERS = (0, 1, 3, 127, 128, 2047, 2048, 2049, 65535, 65536, 10**6, 2**24, 10**8, MAX_SLOTS)
EXPERTS = (1, 2, 3, 31, 32, 33, 64, 128, 255, 256, 257, 512, 513, 1024, 2000, 2800, 4095, 4096)


class Draw(random.Random):
    """Random sizes and layouts."""

    def one(self, *values):
        return self.choice(values)

    def tokens(self, k, row_bytes=1):
        return min(self.one(*NUMBERS), MAX_SLOTS // k, ARRAY_BYTES // row_bytes)

    def sequences(self, L, most):
        """Their number, and whether it is one of offsets."""
        if self.random() < 0.5:
            return min(self.one(1, 2, 1000, MAX_GRID_Y), most), True
        return (L if 0 < L <= most else 1), False

    def rows(self, *shape, dtype="float32", misaligned=False):
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return Layout(shape, strides, dtype, 0, ITEMSIZE[dtype] if misaligned else 0)

    def weight(self, E, rows, columns, dtype):
        strides = self.one((rows * columns, 1, rows), (rows * columns, columns, 1))
        return Layout((E, rows, columns), strides, dtype, 0)


def of_dispatch(draw, limits):
    k, ragged, E = draw.one(1, 2, 8, 64, 1000, 32768), draw.one(True, False), draw.one(*EXPERTS)
    L = draw.tokens(k)
    ids = draw.rows(*((L * k,) if ragged else (L, k)), dtype=draw.one("int32", "int64"))
    bound = draw.one(None, draw.randint(1, L * k)) if L else None
    return dispatch.configure(ids, E, limits, L if ragged else None, draw.one(0, 3, 2**31 - 1 - E), bound)


def of_router(draw, limits):
    dtype, E, mode = draw.one("bfloat16", "float32"), draw.one(*EXPERTS), draw.one("choose", "given", "pairs")
    k = min(E, draw.one(1, 2, 4, 8, 9, 16, 17, 33, 64)) if mode == "choose" else draw.one(1, 8, 1000)
    L = draw.tokens(k, E * ITEMSIZE[dtype])
    n = draw.choice([n for n in range(1, E + 1) if E % n == 0])
    groups = (n, draw.randint(1, n), draw.randint(1, E // n))
    groups = groups if mode == "choose" and k <= groups[1] * (E // n) and draw.one(True, False) else None
    sums = tuple(name for name in ("softmax", "z", "entropy") if draw.one(True, False))
    most = MAX_SLOTS // (E if "softmax" in sums else 1)
    number, by_offsets = draw.sequences(L, min(most, MAX_GRID_Y) if sums else most)
    slots = (draw.one(0, 5, MAX_SLOTS),) if mode == "pairs" else (L, k)
    layouts = {"logits": draw.rows(L, E, dtype=dtype, misaligned=draw.random() < 0.3)}
    if draw.one(True, False):
        layouts["bias"] = draw.rows(*draw.one((E,), (L, E)))
    if mode != "choose":
        layouts["ids"] = draw.rows(*slots, dtype=draw.one("int32", "int64"))
    if mode == "pairs":
        layouts["token_offsets"] = draw.rows(L + 1, dtype="int32")
    if by_offsets:
        layouts["sequences"] = draw.rows(number + 1, dtype="int32")
    cut = draw.one(None, 0.5) if mode == "choose" else None
    scores = draw.one(*SCORES), draw.one(True, False), 0.0, 1.0, draw.one("scores", "logits")
    options = RouterOptions(*scores, groups, cut, cut, sums, None if by_offsets else number)
    forward = router.configure_forward(tuple(layouts.items()), None if mode == "pairs" else k, options)
    layouts |= {"ids": draw.rows(*slots, dtype="int32"), "weights": draw.rows(*slots)}
    return forward, router.configure_backward(tuple(layouts.items()), options)


def of_selections(draw, limits):
    E, k, dtype = draw.one(*EXPERTS), draw.one(1, 2, 8, 64, 1000), draw.one("bfloat16", "float32")
    L = draw.tokens(k, 4 * E)
    number, by_offsets = draw.sequences(L, MAX_SLOTS // E)
    sequences, order = selection.Sequences(number, by_offsets), draw.one(*CAPACITY_ORDERS)
    scores, ids = draw.rows(L, E, dtype=dtype), draw.rows(L, k, dtype=draw.one("int32", "int64"))
    values = dtype if order in ("weights", "priority") else None
    capacity, tile, rounding = draw.one(0, 1, 128, 2**40), draw.one(1, 128, 2**30), draw.one(*ROUNDINGS)
    found = [balance.configure_counts(ids, E, sequences, limits)]
    if not by_offsets or number * L < 2**31:  # a part of a sequence by offsets has a block, however short it turns out
        found.append(selection.configure_capacity(ids, E, capacity, order, values, sequences, limits))
    pairs = reference_selection.expert_choice_pairs(L, E, capacity, number, not by_offsets)
    if pairs <= MAX_SLOTS:
        found.append(selection.configure_expert_choice(scores, capacity, sequences, pairs, limits))
    pairs = reference_selection.rounded_pairs(L, k, E, tile, rounding)
    if pairs <= MAX_SLOTS:
        found.append(selection.configure_round_tokens(scores, ids, tile, rounding, pairs, limits))
    found.append(selection.configure_pairs(L, E, draw.one(0, 1, MAX_SLOTS), True))
    bins = draw.one(1, 2, 1000, selection_config.MAX_BINS)
    found.append(balance.configure_quantiles(scores, ids, bins, draw.one(*SCORES), limits))
    P, d = draw.one(1, 2, 8, 64), draw.one(*SIZES)
    found.append(rows._configure(draw.tokens(P, 4 * d), P, d, dtype, draw.one(0, ITEMSIZE[dtype])))
    return found


def of_layer(draw, limits):
    dtype, activation = draw.one("bfloat16", "float32"), draw.one("swiglu", "silu", "swiglu_oai")
    E, d, h, k = draw.one(*EXPERTS), draw.one(*SIZES), draw.one(*SIZES), draw.one(1, 2, 8, 64, 1000)
    g, itemsize = 1 + is_gated(activation), ITEMSIZE[dtype]
    E = max(1, min(E, ARRAY_BYTES // (g * d * h * itemsize)))
    options = LayerOptions(weights_on=draw.one("output", "input"), unreduced=draw.random() < 0.3)
    if not options.unreduced:
        options = options._replace(identity_experts=draw.one(0, 100))
    L = draw.tokens(k, d * itemsize * (k if options.unreduced else 1))
    bound = None
    if L and draw.one(True, False):
        bound = max(1, min(draw.randint(1, L * k), ARRAY_BYTES // (g * h * itemsize)))
    else:
        L = min(L, ARRAY_BYTES // (k * g * h * itemsize))
    ragged, gate_up = draw.random() < 0.3, draw.one("halves", "interleaved") if g == 2 else "halves"
    slots_shape = (L * k,) if ragged else (L, k)
    x = draw.rows(L, d, dtype=dtype, misaligned=draw.random() < 0.2)
    ids = draw.rows(*slots_shape, dtype=draw.one("int32", "int64"))
    weights = draw.rows(*slots_shape) if options.on_input or not options.unreduced else None
    w1, w2 = (draw.weight(E, d, g * h, dtype),), draw.weight(E, h, d, dtype)
    if g == 2 and gate_up == "halves" and draw.one(True, False):
        w1 = (draw.weight(E, d, h, dtype),) * 2
    b1 = tuple(draw.rows(E, w.shape[2]) for w in w1) if draw.one(True, False) and not options.on_input else ()
    b2 = (draw.rows(E, d, dtype=draw.one(dtype, "float32")),) if draw.one(True, False) else ()
    in_fp8 = limits.tier == "sm90" and dtype == "bfloat16" and not (d % 16 or h % 16)
    precision = draw.one(None, "fp8") if in_fp8 else None
    save = draw.one("minimal", "fp8", "paper", "recompute")
    parts = [(*pair, None)[:2] if pair else (None, None) for pair in (w1, b1)]
    offsets = draw.rows(L + 1, dtype="int32") if ragged else None
    layer = LayerArrays(x, ids, weights, *parts[0], w2, *parts[1], b2[0] if b2 else None, offsets)
    own = {"activation": activation, "gate_up": gate_up, "save": save, "max_slots": bound, "precision": precision}
    options = options._replace(**own)
    forward = experts.configure_forward(layer, options, limits, precision is not None)
    R = forward.dispatch.index.num_rows
    first_layer = draw.rows(R, h * g, dtype=dtype) if save in ("minimal", "paper") else None
    if save == "fp8":
        first_layer = draw.rows(launch_config.saved_fp8(R, h, g).nbytes, dtype="uint8")
    y_swi = draw.rows(R, h, dtype=dtype) if save == "paper" else None
    grad_out = draw.rows(*((*slots_shape, d) if options.unreduced else (L, d)), dtype=dtype)
    needs = tuple(name for name in GRADIENTS if draw.random() < 0.8)
    needs += tuple(name for name, of in (("b1", b1), ("b2", b2)) if of)
    sums = ()
    if "w2" in needs and draw.one(True, False):
        sums = (("w2", (draw.weight(E, h, d, draw.one(dtype, "float32")),)),)
    how = BackwardOptions(needs, draw.one(True, False))
    read = BackwardArrays(grad_out, layer, None, first_layer, y_swi)
    return forward, backward.configure_backward(read, options, how, sums, limits, forward.dispatch.index)


def of_quantized_weights(draw, limits):
    E, dtype, interleaved = draw.one(*EXPERTS), draw.one("bfloat16", "float32"), draw.one(True, False)
    d, h = (16 * draw.one(1, 2, 8, 100, 256, 4096) for _ in range(2))
    E = max(1, min(E, ARRAY_BYTES // (8 * d * h)))
    w1 = (draw.weight(E, d, 2 * h, dtype),) if interleaved else (draw.weight(E, d, h, dtype),) * draw.one(1, 2)
    return fp8.configure_weights(w1, draw.weight(E, h, d, dtype), interleaved)


def launches(made):
    """All that an operation's records hold."""
    if isinstance(made, Launch):
        yield made
    elif dataclasses.is_dataclass(made):
        for field in dataclasses.fields(made):
            yield from launches(getattr(made, field.name))
    elif isinstance(made, (tuple, list)):
        for part in made:
            yield from launches(part)


def problems(launch, limits):
    x, y, z = launch.blocks
    if not (1 <= x < 2**31 and 1 <= y <= MAX_GRID_Y and 1 <= z <= MAX_GRID_Y):
        yield f"grid {launch.blocks}"
    if not 1 <= launch.threads <= 1024 or launch.threads % 32:
        yield f"{launch.threads} threads"
    static = gemm_config.STATIC_BYTES if launch.variant.source.endswith("_sm80.cu") else 0
    if not 0 <= launch.shared_bytes + static <= limits.shared_bytes_per_block:
        yield f"{launch.shared_bytes} bytes of shared memory"
    params = launch.params
    for names, bits in ((params.int64, 63), (params.int32, 31)):
        yield from (
            f"{name} = {launch.scalars[name]}" for name in names if not -(2**bits) <= launch.scalars[name] < 2**bits
        )
    for name, tensor_map in launch.maps.items():
        strides = [stride * ITEMSIZE[tensor_map.dtype] for stride in tensor_map.strides]
        sizes = all(1 <= n <= 2**32 for n in tensor_map.shape) and all(1 <= n <= 256 for n in tensor_map.box)
        if not sizes or not all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides):
            yield f"{name}: {tensor_map}"


@pytest.mark.parametrize("operation", [of_dispatch, of_router, of_selections, of_layer, of_quantized_weights])
def test_launches_are_within_the_limits_of_cuda(operation):
    refused = 0
    for seed in range(400):
        draw = Draw(seed)
        limits = draw.choice(LIMITS)
        try:
            made = operation(draw, limits)
        except ValueError as error:
            assert "dispatch: num_experts: expected few enough for 101376 bytes of shared memory" in str(error)
            refused += 1
            continue
        for launch in launches(made):
            assert not (found := list(problems(launch, limits))), (seed, limits, launch.variant.entry, found)
    assert refused < 40
