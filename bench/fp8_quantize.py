"""The kernels that make rows and weights e4m3, by themselves, and copies of as many bytes.

A row of n elements of 16 bits is read once and written as n bytes and a scale. Weights are read twice, for the largest
magnitudes and for the numbers, and written in both orientations: 6 bytes for each element, if nothing is read again
from the L2 cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

import moeblaze_cupy as mb
from moeblaze_cupy.cuda.runtime import Runtime
from moeblaze_cupy.fp8 import quantize
from moeblaze_cupy.frameworks import Torch

KERNELS = ("quantize_rows", "quantize_weights")
MOST_COPIED = 1 << 30  # bytes that a copy reads and writes; the time of more is in proportion


class Quantization(NamedTuple):
    """A call, and the bytes that it reads and writes."""

    call: Callable[[], object]
    nbytes: int


def of_rows(x: torch.Tensor) -> tuple[Quantization, torch.Tensor, torch.Tensor]:
    """Of x (L, d): the call, and where it writes e4m3 and scales, which are to outlive it."""
    (L, d), described = x.shape, Torch.describe(x)
    out = torch.empty(L, d, device=x.device, dtype=torch.uint8)
    scales = torch.empty(L, device=x.device)
    launch = quantize.rows(described.layout)
    addresses = described.ptr, Torch.describe(out).ptr, Torch.describe(scales).ptr

    def call() -> None:
        Runtime.current(Torch, x.device.index or 0).launch(launch, *addresses)

    return Quantization(call, x.nbytes + out.nbytes + scales.nbytes), out, scales


def of_weights(w1: torch.Tensor, w2: torch.Tensor) -> Quantization:
    """Into memory that is there."""
    made = mb.quantize_weights(w1, w2)
    return Quantization(lambda: mb.quantize_weights(w1, w2, made), 3 * (w1.nbytes + w2.nbytes))


def copy_of(nbytes: int, device: torch.device) -> tuple[Callable[[], object], float]:
    """A copy that reads and writes `nbytes` in all, and what its time is to be multiplied with."""
    copied = min(nbytes, MOST_COPIED)
    source, to = (torch.randint(256, (copied // 2,), device=device, dtype=torch.uint8) for _ in range(2))
    return lambda: to.copy_(source), nbytes / copied
