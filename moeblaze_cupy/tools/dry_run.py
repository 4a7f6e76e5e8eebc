"""A dry run of a layer: it tells what its passes launch and allocate on a GPU, and needs no GPU.

The passes of `ops` run on a `Recorder` as they run on a GPU, so its notes are what they do.
"""

from dataclasses import dataclass
from typing import Any

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.recorder import Allocation, Recorder, allocation_of
from moeblaze_cupy.cuda.runtime import Launch
from moeblaze_cupy.frameworks import Layout, packed
from moeblaze_cupy.layer import backward, chunks
from moeblaze_cupy.tools.memory import LayerShape
from moeblaze_cupy.types import FACTORS, LayerArrays, Lora, LoraRows

# Contents of an allocation by the name of a field in a kernel's struct. The first of its uses listed here decides.
CONTENTS: dict[str, str | dict[str, str]] = {
    "block_counts": "slots per CTA and expert",
    "row_tiles": {"square_tiles": "square row tiles"},
    "token_index_map": "index lists",
    "token_expert_indices": "int32 copy of the ids",
    "tile_counter": "tile counter",
    "result": {"up_fwd": "y_swi", "down_bwd": "weighted y_swi"},
    "first_layer": {"up_fwd": "first layer, computed again", "down_bwd": "gradient of the first layer"},
    "first_layer_grad": "gradient of the first layer",
    "quantised": {"up_fwd": "y_swi in e4m3", "down_bwd": "gradient of the first layer in e4m3"},
    "quantised_scales": {"up_fwd": "scales of y_swi", "down_bwd": "scales of the gradient of the first layer"},
    "a": {"up_fwd": "x in e4m3", "down_bwd": "gradient of out in e4m3"},
    "a_scales": {"up_fwd": "scales of x", "down_bwd": "scales of the gradient of out"},
    "gathered": {"up_wgrad": "x in e4m3", "down_wgrad": "gradient of out in e4m3"},
    "x_scales": "scales of x",
    "first_layer_grad_amax": "largest magnitudes",
    "rest": "last rows of each expert in e4m3",
    "row_weights": "router weights by row",
    "slots": "slots by row",
    "tokens": "token of each pair",
    "masked_ids": "ids without those of no token",
    "partial_sums": "partial sums for the router weights",
    "panel": "column panel",
    "sums": "split-K sums",
    "factor": "sums over chunks in float32",
    "out": {
        "lora_pack": "packed low-rank factor",
        **{f"lora_{name}": name for name in ("u1", "u2", "v1", "v2")},
        "lora_sums": "gradient of a low-rank factor",
    },
    "weighted": "weighted u2",
    "parts": "partial sums of a low-rank factor's gradient",
}


@dataclass(frozen=True)
class Pass:
    """A recorded pass. kept: arrays that the caller has when it ends, by name; they are not free while this lives."""

    name: str
    run: Recorder
    kept: dict[str, Any]

    @property
    def kept_bytes(self) -> int:
        return sum(allocation_of(array).nbytes for array in self.kept.values())

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes allocated at one time, with kept buffers, without those of an earlier pass."""
        return self.run.peak

    def alive_at(self, launch: int) -> list[Allocation]:
        """Returns the live allocations in the order of their allocation. launch: its number from 0."""
        return [allocation for allocation in self.run.allocations if allocation.is_alive(launch)]

    def at_peak(self) -> list[Allocation]:
        """Returns the allocations at the time of the most bytes."""
        stages = map(self.alive_at, range(len(self.run.launches)))
        return max(stages, key=lambda stage: sum(allocation.nbytes for allocation in stage), default=[])

    def contents(self, allocation: Allocation) -> str:
        """Returns a description of an allocation's contents."""
        for name, kept in self.kept.items():
            if allocation_of(kept) is allocation:
                return name
        for launch, field_name in allocation.uses:
            found = CONTENTS.get(field_name)
            if isinstance(found, dict):
                found = found.get(launch.variant.entry)
            if found and field_name == "first_layer" and self.name == "forward":
                return "first layer, before it is kept in e4m3"
            if found:
                return found
        return "memory"


@dataclass(frozen=True)
class DryRun:
    """The passes of a layer: forward, and backward except in inference. x_bytes: bytes of x, which backward needs.

    chunk_tokens: tokens of a chunk, L without chunks. Of chunks of one size the first is recorded.
    """

    passes: tuple[Pass, ...]
    x_bytes: int
    chunk_tokens: int

    def chunks(self, s: LayerShape) -> int:
        """Returns the number of chunks of the layer's tokens, 1 without any."""
        return launch_config.ceil_div(s.L, self.chunk_tokens)

    @property
    def launches(self) -> list[Launch]:
        return [launch for of_pass in self.passes for launch in of_pass.run.launches]

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes held from forward to backward, x included; 0 for inference."""
        if len(self.passes) == 1:
            return 0
        forward = self.passes[0]
        return self.x_bytes + forward.kept_bytes - allocation_of(forward.kept["out"]).nbytes

    @property
    def forward_peak_bytes(self) -> int:
        """Returns the most bytes that forward has at one time beyond the output and what it saves."""
        forward = self.passes[0]
        return forward.peak_bytes - forward.kept_bytes

    @property
    def backward_peak_bytes(self) -> int:
        """Returns the most bytes that backward has at one time beyond the saved ones, existing gradients included."""
        return self.passes[1].peak_bytes if len(self.passes) > 1 else 0


def layer(
    s: LayerShape, save: str | None, limits: DeviceLimits = launch_config.H200, accumulate: bool = False
) -> DryRun:
    """Records forward, and backward unless `save` is None, with packed arrays, on a GPU with these limits.

    save: see `moe_forward`. accumulate: the gradients of both weights are added to sums in float32. Gradients that
    are added to a caller's buffers take no memory. Raises ValueError for more experts than the GPU's shared memory has
    room for, and for a memory limit below the least.
    """
    of_layer, options = arrays(s), s.of_layer(save)
    factors = _factors(s) if s.lora_rank else None
    forward_steps = chunks.configure_forward("plan", of_layer, options, limits, factors=factors)
    tokens = forward_steps.cut.tokens if isinstance(forward_steps, chunks.ForwardChunks) else s.L
    run, result = chunks.recorded_forward(forward_steps)
    buffers = {"out": result.out, "first layer a, b" if s.g == 2 else "first layer a": result.first_layer}
    buffers |= {"y_swi": result.y_swi, **result.lora_rows._asdict()}
    if save:
        buffers |= {"index lists": result.lists, "int32 copy of the ids": result.ids}
    forward = Pass("forward", run, _present(buffers))
    x_bytes = s.L * s.d * s.b
    if save is None:
        return DryRun((forward,), x_bytes, tokens)
    sums: dict[str, tuple[Layout, ...]] = {}
    if accumulate:
        sums = {"w1": (_weight(s, s.d, s.g * s.h, "float32"),), "w2": (_weight(s, s.h, s.d, "float32"),)}
    how = backward.default_options(of_layer, factors)
    steps = chunks.configure_after(forward_steps, of_layer, limits, how, tuple(sums.items()), factors)
    rows = LoraRows(1, 1) if factors and save != "recompute" else LoraRows(0, 0)
    run, gradients = chunks.recorded_backward(steps, options, sums, rows)
    named = {f"gradient of {name}": array for name, array in vars(gradients).items() if name != "lora"}
    if gradients.lora:
        of_factors = zip(FACTORS, gradients.lora.factors, strict=True)
        named |= {f"gradient of lora.{name}": array for name, array in of_factors}
    return DryRun((forward, Pass("backward", run, _present(named))), x_bytes, tokens)


def arrays(s: LayerShape) -> LayerArrays:
    """Returns the layouts of packed arrays of the layer."""
    slots_shape = (s.slots,) if s.ragged else (s.L, s.k)
    w1, w2 = _weight(s, s.d, s.g * s.h, s.dtype), _weight(s, s.h, s.d, s.dtype)
    x, on_input = packed((s.L, s.d), s.dtype), s.options.on_input
    return LayerArrays(
        x,
        packed(slots_shape, "int64" if s.ids_are_int64 else "int32"),
        packed(slots_shape, s.weights_dtype) if s.has_weights else None,
        w1,
        None,
        w2,
        b1_gate=packed((s.E, s.g * s.h), s.bias) if s.bias and not on_input else None,
        b2=packed((s.E, s.d), s.bias) if s.bias else None,
        token_offsets=packed((s.L + 1,), "int32") if s.ragged else None,
    )


def _factors(s: LayerShape) -> Lora:
    rank = s.lora_rank or 0
    shapes = (s.E, rank, s.d), (s.E, s.g * s.h, rank), (s.E, rank, s.h), (s.E, s.d, rank)
    return Lora(*(packed(shape, "float32") for shape in shapes))


def _weight(s: LayerShape, rows: int, columns: int, dtype: str) -> Layout:
    strides = (rows * columns, 1, rows) if s.transposed else (rows * columns, columns, 1)
    return Layout((s.E, rows, columns), strides, dtype, 0)


def _present(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}
