"""`explain`: which kernels a layer launches on a GPU, with what geometry and memory, and why. It needs no GPU."""

import dataclasses
import math
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Layout
from moeblaze_cupy.cli.command import CommandError, one_line
from moeblaze_cupy.cli.sizes import layer_shape, slot_options
from moeblaze_cupy.launch_config import DeviceLimits
from moeblaze_cupy.memory import LayerShape, format_bytes
from moeblaze_cupy.ops import backward, experts, fp8
from moeblaze_cupy.rehearsal import Allocation, Rehearsal, allocation_of
from moeblaze_cupy.structures import BIASES, GRADIENTS

# Multiprocessors from NVIDIA's data sheets; shared memory per CTA and per multiprocessor from the table of compute
# capabilities in NVIDIA's CUDA programming guide.
GPUS = {
    "h200": launch_config.H200,
    "h100": DeviceLimits(90, 132, 232448, 233472, "sm90"),  # SXM
    "a100": DeviceLimits(80, 108, 166912, 167936),
    "l40s": DeviceLimits(89, 142, 101376, 102400),
    "rtx4090": DeviceLimits(89, 128, 101376, 102400),
    "b200": DeviceLimits(100, 148, 232448, 233472),
}

# What an allocation is, by the name of a field in a kernel's struct: the first of its uses that is listed here tells.
CONTENTS: dict[str, str | dict[str, str]] = {
    "block_counts": "slots per CTA and expert",
    "row_tiles": {"square_tiles": "square row tiles"},
    "token_index_map": "index lists",
    "tile_counter": "tile counter",
    "result": {"up_fwd": "y_swi", "down_bwd": "weighted y_swi"},
    "first_layer": {"up_fwd": "first layer, computed again", "down_bwd": "gradient of the first layer"},
    "first_layer_grad": "gradient of the first layer",
    "row_weights": "router weights by row",
    "slots": "slots by row",
    "tokens": "token of each pair",
    "masked_ids": "ids without those of no token",
    "partial_sums": "partial sums for the router weights",
    "panel": "column panel",
    "sums": "split-K sums",
}
LISTED = 3  # of the numbers of launches that are alike


def run(args: Namespace) -> int:
    name, limits = _gpu(args.gpu, args.tier)
    s = layer_shape(args, limits.tier)
    save = None if args.save == "inference" else args.save
    try:
        passes = rehearse(s, save, limits, args.accumulate)
    except ValueError as error:  # what this GPU's dispatch cannot take
        raise CommandError(one_line(error)) from error
    print("\n".join(report(s, save, name, limits, passes)))
    return 0


def _gpu(preset: str | None, tier: str | None) -> tuple[str, DeviceLimits]:
    """Name and limits of the preset, else of the current GPU, else of an H200. tier: one to force."""
    if preset is not None:
        name, limits = preset, GPUS[preset]
    else:
        try:
            device = loader.import_cupy().cuda.runtime.getDevice()
        except Exception:  # a broken CuPy can fail in any way
            name, limits = "h200, as no GPU is here", launch_config.H200
        else:
            try:
                name, limits = "the GPU here", loader.device_limits(device)
            except (RuntimeError, ValueError) as error:
                raise CommandError(one_line(error)) from error
    if tier is None:
        return name, limits
    capability = limits.compute_capability
    if tier == "sm90" and capability != 90:
        got = f"{capability // 10}.{capability % 10} ({name})"
        raise CommandError(f"--tier sm90: expected a GPU of compute capability 9.0, got {got}")
    return name, dataclasses.replace(limits, tier=tier)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass as it was rehearsed. kept: what the caller has when it ends, by name; not free while this lives."""

    name: str
    rehearsal: Rehearsal
    kept: dict[str, Any]

    @property
    def kept_bytes(self) -> int:
        return sum(allocation_of(array).nbytes for array in self.kept.values())

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at one time, kept buffers included, those of an earlier pass not."""
        return self.rehearsal.peak

    def contents(self, allocation: Allocation) -> str:
        """What it holds."""
        for name, kept in self.kept.items():
            if allocation_of(kept) is allocation:
                return name
        for launch, field in allocation.uses:
            found = CONTENTS.get(field)
            if isinstance(found, dict):
                found = found.get(launch.variant.entry)
            if found and field == "first_layer" and self.name == "forward":
                return "first layer, before it is kept in e4m3"
            if found:
                return found
        return "memory"


def rehearse(s: LayerShape, save: str | None, limits: DeviceLimits, accumulate: bool = False) -> list[Pass]:
    """Forward, and backward unless `save` is None, of packed arrays and float32 router weights.

    accumulate: the gradients of both weights are added to sums in float32. Raises ValueError for more experts than the
    GPU's shared memory has room for.
    """
    x, options = _rows((s.L, s.d), s.dtype), s.options
    slots_shape = (s.slots,) if s.ragged else (s.L, s.k)
    ids = _rows(slots_shape, "int64" if s.ids_are_int64 else "int32")
    weights = _rows(slots_shape, "float32") if s.has_weights else None
    w1, w2 = _weight(s, s.d, s.g * s.h, s.dtype), _weight(s, s.h, s.d, s.dtype)
    b1 = (_rows((s.E, s.g * s.h), s.bias),) if s.bias and not options.on_input else ()
    b2 = (_rows((s.E, s.d), s.bias),) if s.bias else ()
    arrays, shared = (x, weights, w2, (w1,), b1, b2), (s.activation, s.gate_up)
    slot_limits = s.ragged, s.max_slots
    forward_steps = experts.configure_forward(
        x, ids, *arrays[1:], *shared, save, limits, options, *slot_limits, s.precision
    )
    run, weights_fp8 = Rehearsal(), fp8.Addresses(0, 0, 0, 0, 0, 0) if s.precision else None
    result = experts.moe_forward(run, forward_steps, *[0] * 10, weights_fp8=weights_fp8)
    buffers = {"out": result.out, "first layer a, b" if s.g == 2 else "first layer a": result.first_layer}
    buffers |= {"y_swi": result.y_swi}
    if save:
        buffers |= {"index lists": result.lists, "int32 copy of the ids": result.ids}
    forward = Pass("forward", run, _present(buffers))
    if save is None:
        return [forward]
    first_layer = _rows((s.R, s.g * s.h), s.dtype) if result.first_layer else None
    if save == "fp8":
        first_layer = _rows((launch_config.saved_fp8(s.R, s.h, s.g).nbytes,), "uint8")
    y_swi = _rows((s.R, s.h), s.dtype) if result.y_swi else None
    grad_out = _rows((*slots_shape, s.d), s.dtype) if options.unreduced else x
    sums: dict[str, tuple[Layout, ...]] = {}
    if accumulate:
        sums = {"w1": (_weight(s, s.d, s.g * s.h, "float32"),), "w2": (_weight(s, s.h, s.d, "float32"),)}
    saved_layouts = first_layer, y_swi, tuple(sums.items())
    needs = (*GRADIENTS, *(name for name, given in zip(BIASES, (b1, b2), strict=True) if given))
    index = forward_steps.dispatch.index
    backward_steps = backward.configure_backward(
        grad_out, *arrays, *saved_layouts, *shared, needs, False, limits, index, options, False, s.precision
    )
    run = Rehearsal()
    saved: Any = SimpleNamespace(consumed=False)  # all that backward touches of SavedForBackward
    given: dict[str, tuple[int, ...]] = dict.fromkeys(sums, (0,))
    gradients = backward.moe_backward(run, backward_steps, saved, given, *[0] * 12, weights_fp8=weights_fp8)[0]
    named = {f"gradient of {name}": array for name, array in vars(gradients).items()}
    return [forward, Pass("backward", run, _present(named))]


def _rows(shape: tuple[int, ...], dtype: str) -> Layout:
    """Of a packed array."""
    return Layout(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype, 0)


def _weight(s: LayerShape, rows: int, columns: int, dtype: str) -> Layout:
    strides = (rows * columns, 1, rows) if s.transposed else (rows * columns, columns, 1)
    return Layout((s.E, rows, columns), strides, dtype, 0)


def _present(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


def report(s: LayerShape, save: str | None, gpu: str, limits: DeviceLimits, passes: list[Pass]) -> list[str]:
    """Lines of text."""
    capability = f"{limits.compute_capability // 10}.{limits.compute_capability % 10}"
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}, "
        f"weights {'transposed' if s.transposed else 'row-major'}, {f'save={save!r}' if save else 'inference'}"
        f"{slot_options(s)}",
        f"GPU: {gpu} (compute capability {capability}, {limits.multiprocessors} multiprocessors, "
        f"{limits.shared_bytes_per_block // 1024} KiB of shared memory per CTA)",
        "+ allocates, - frees; launches by number",
    ]
    for of_pass in passes:
        lines += ["", of_pass.name, *_steps(of_pass), *_totals(of_pass)]
    return lines


def _steps(of_pass: Pass) -> list[str]:
    """Allocations and launches in their order. Launches that are alike are described once."""
    texts = [launch.lines for launch in of_pass.rehearsal.launches]
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(texts, start=1):
        alike.setdefault(text, []).append(number)
    lines: list[str] = []
    for number, text in enumerate(texts):
        for allocation in of_pass.rehearsal.allocations:
            if allocation.made == number:
                stays = ", kept" if allocation.freed is None else ""
                lines.append(f"  + {_described(of_pass, allocation)}{stays}")
        if alike[text][0] == number + 1:
            lines += [f"  {_numbers(alike[text])}  {text[0]}", *(f"       {line}" for line in text[1:])]
        for allocation in of_pass.rehearsal.allocations:
            if allocation.freed == number + 1:
                lines.append(f"  - {of_pass.contents(allocation)}")
    return lines


def _numbers(numbers: list[int]) -> str:
    """1 -> "1"; many: the first, the last, and how many there are."""
    if len(numbers) <= LISTED:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]} .. {numbers[-1]} ({len(numbers)} launches)"


def _described(of_pass: Pass, allocation: Allocation) -> str:
    shape = " x ".join(map(str, allocation.shape))
    return f"{of_pass.contents(allocation)}: {shape} {allocation.dtype}, {format_bytes(allocation.nbytes)}"


def _totals(of_pass: Pass) -> list[str]:
    allocated, kept = of_pass.peak_bytes, of_pass.kept_bytes
    names = ", ".join(of_pass.kept)
    return [
        f"  {len(of_pass.rehearsal.launches)} launches; at the peak {format_bytes(allocated)} allocated "
        f"({allocated} bytes)",
        f"  kept: {format_bytes(kept)} ({kept} bytes): {names}",
    ]
