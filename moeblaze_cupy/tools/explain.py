"""`explain`: it says which kernels a layer launches on a GPU, their geometry and memory, and why. It needs no GPU."""

import dataclasses
from argparse import Namespace
from typing import Any

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.recorder import Allocation
from moeblaze_cupy.tools import dry_run, expected
from moeblaze_cupy.tools.command import CommandError, one_line, print_json
from moeblaze_cupy.tools.dry_run import DryRun, Pass
from moeblaze_cupy.tools.memory import LayerShape, format_bytes
from moeblaze_cupy.tools.sizes import as_json, layer_shape, save_policy, slot_options

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

LISTED = 3  # greatest count of launch numbers listed for launches that are alike


def run(args: Namespace) -> int:
    name, limits = _gpu(args.gpu, args.tier)
    s = layer_shape(args, limits.tier)
    save = save_policy(args)
    try:
        run = dry_run.layer(s, save, limits, args.accumulate)
    except ValueError as error:  # this GPU's dispatch cannot take the layer
        raise CommandError(one_line(error)) from error
    if args.json:
        print_json(facts(s, save, name, limits, run))
    else:
        print("\n".join(report(s, save, name, limits, run)))
    return 0


def _gpu(preset: str | None, tier: str | None) -> tuple[str, DeviceLimits]:
    """Returns name and limits of the preset, else of the current GPU, else of an H200. tier: one to force."""
    if preset is not None:
        name, limits = preset, GPUS[preset]
    else:
        try:
            device = loader.import_cupy().cuda.runtime.getDevice()
        except Exception:  # a broken CuPy can fail in any way
            name, limits = "h200, as no GPU is here", launch_config.H200
        else:
            try:
                name, limits = _name_here(device), loader.device_limits(device)
            except (RuntimeError, ValueError) as error:
                raise CommandError(one_line(error)) from error
    if tier is None:
        return name, limits
    capability = limits.compute_capability
    if tier == "sm90" and capability != 90:
        got = f"{capability // 10}.{capability % 10} ({name})"
        raise CommandError(f"--tier sm90: expected a GPU of compute capability 9.0, got {got}")
    return name, dataclasses.replace(limits, tier=tier)


def _name_here(device: int) -> str:
    try:
        name = loader.import_cupy().cuda.runtime.getDeviceProperties(device)["name"].decode()
    except Exception:  # only the time to expect needs it
        return "the GPU here"
    return f"the GPU here, {name}"


def _cards(gpu: str) -> list[str]:
    """Returns the names in `expected.CARDS` that a GPU's name holds."""
    return [key for key in expected.CARDS if key in gpu.lower()]


def facts(s: LayerShape, save: str | None, gpu: str, limits: DeviceLimits, run: DryRun) -> dict[str, Any]:
    """Returns the content of `report` for JSON. A buffer is alive during launches made .. freed - 1, counted from 0."""
    return {
        "layer": as_json(s) | {"save": save},
        "gpu": {"name": gpu, **dataclasses.asdict(limits)},
        "passes": [
            {
                "pass": of_pass.name,
                "launches": [
                    {
                        "source": launch.variant.source,
                        "kernel": launch.variant.entry,
                        "constants": dict(launch.variant.macros),
                        "grid": launch.blocks,
                        "threads": launch.threads,
                        "shared_bytes": launch.shared_bytes,
                        "tiles": launch.tiles and launch.tiles._asdict(),
                        "why": launch.why,
                    }
                    for launch in of_pass.run.launches
                ],
                "buffers": [
                    {
                        "name": of_pass.contents(allocation),
                        "shape": allocation.shape,
                        "dtype": allocation.dtype,
                        "nbytes": allocation.nbytes,
                        "made": allocation.made,
                        "freed": allocation.freed,
                    }
                    for allocation in of_pass.run.allocations
                ],
                "peak_bytes": of_pass.peak_bytes,
                "kept_bytes": of_pass.kept_bytes,
                "kept": list(of_pass.kept),
            }
            for of_pass in run.passes
        ],
        **expected.facts(s, run, _cards(gpu), save),
    }


def report(s: LayerShape, save: str | None, gpu: str, limits: DeviceLimits, run: DryRun) -> list[str]:
    """Returns lines of text."""
    capability = f"{limits.compute_capability // 10}.{limits.compute_capability % 10}"
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}, "
        f"weights {'transposed' if s.transposed else 'row-major'}, {f'save={save!r}' if save else 'inference'}"
        f"{slot_options(s)}",
        f"GPU: {gpu} (compute capability {capability}, {limits.multiprocessors} multiprocessors, "
        f"{limits.shared_bytes_per_block // 1024} KiB of shared memory per CTA)",
        "+ allocates, - frees; launches by number",
    ]
    for of_pass in run.passes:
        lines += ["", of_pass.name, *_steps(of_pass), *_totals(of_pass)]
    return [*lines, "", *expected.report(s, run, _cards(gpu), save)]


def _steps(of_pass: Pass) -> list[str]:
    """Returns allocations and launches in their order. Launches that are alike are described once."""
    texts = [launch.lines for launch in of_pass.run.launches]
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(texts, start=1):
        alike.setdefault(text, []).append(number)
    lines: list[str] = []
    for number, text in enumerate(texts):
        for allocation in of_pass.run.allocations:
            if allocation.made == number:
                stays = ", kept" if allocation.freed is None else ""
                lines.append(f"  + {_described(of_pass, allocation)}{stays}")
        if alike[text][0] == number + 1:
            lines += [f"  {_numbers(alike[text])}  {text[0]}", *(f"       {line}" for line in text[1:])]
        for allocation in of_pass.run.allocations:
            if allocation.freed == number + 1:
                lines.append(f"  - {of_pass.contents(allocation)}")
    return lines


def _numbers(numbers: list[int]) -> str:
    """Returns "1" for 1; for many numbers the first, the last, and how many there are."""
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
        f"  {len(of_pass.run.launches)} launches; at the peak {format_bytes(allocated)} allocated ({allocated} bytes)",
        f"  kept: {format_bytes(kept)} ({kept} bytes): {names}",
    ]
