"""`plan`: the memory a layer will use, per save policy, beside a layer with routed buffers."""

import argparse
import dataclasses

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.tools import dry_run, memory
from moeblaze_cupy.tools.dry_run import Allocation, DryRun, Pass, allocation_of
from moeblaze_cupy.tools.memory import Term, format_bytes
from moeblaze_cupy.tools.sizes import layer_shape, slot_options

POLICIES = ("recompute", "fp8", "minimal", "paper", None)  # by what they save


def run(args: argparse.Namespace) -> int:
    s = layer_shape(args, args.tier)
    limits = dataclasses.replace(launch_config.H200, tier=args.tier)
    runs = {save or "inference": dry_run.layer(s, save, limits) for save in POLICIES}
    print("\n".join(report(s, runs, memory.routed_layer(s))))
    return 0


def report(s: memory.LayerShape, runs: dict[str, DryRun], routed: memory.RoutedLayer) -> list[str]:
    """Lines of text; `runs` by column heading, `routed` the layer to compare with."""
    on_hopper = any(launch.variant.source.endswith("_sm90.cu") for launch in runs["inference"].launches)
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}"
        f"{slot_options(s)}",
        f"{'Hopper' if on_hopper else 'portable'} kernels",
        "",
    ]
    of_saved, of_forward = (
        [getattr(run, name) for run in runs.values()] for name in ("saved_bytes", "forward_peak_bytes")
    )
    of_saved.append(routed.saved_bytes)
    backward = [format_bytes(run.backward_peak_bytes) if len(run.passes) > 1 else "-" for run in runs.values()]
    rows = [
        ["", *runs, "routed buffers"],
        ["saved for backward", *map(format_bytes, of_saved)],
        ["  of routed buffers' bytes", *(f"{nbytes / routed.saved_bytes:.1%}" for nbytes in of_saved)],
        ["forward transients, peak", *map(format_bytes, (*of_forward, 0))],
        ["backward with gradients, peak", *backward, format_bytes(routed.backward_peak_bytes)],
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))

    forwards = {name: run.passes[0] for name, run in runs.items()}
    backwards = {name: run.passes[1] for name, run in runs.items() if len(run.passes) > 1}
    x, out = Term("x", s.L * s.d * s.b), Term("out", allocation_of(forwards["inference"].kept["out"]).nbytes)
    saved = {name: (x, *_terms(forwards[name], _saved(forwards[name]))) for name in backwards}
    transients = {
        name: _terms(of_pass, [a for a in of_pass.at_peak() if a not in _saved(of_pass)])
        for name, of_pass in forwards.items()
    }
    at_peak = {name: _terms(of_pass, of_pass.at_peak()) for name, of_pass in backwards.items()}
    for heading, columns in (
        (
            "The results, the same for every column; transients come on top of them and of what is saved:",
            {"": (out, *memory.gradients(s))},
        ),
        ("Saved for backward:", saved | {"routed buffers": routed.saved}),
        ("Forward transients at the peak:", transients),
        (
            "Backward at the peak, with the gradients that exist by then:",
            at_peak | {"routed buffers": routed.at_peak},
        ),
    ):
        lines += ["", heading, *_listed(columns)]
    return lines


def _saved(forward: Pass) -> list[Allocation]:
    return [allocation_of(array) for name, array in forward.kept.items() if name != "out"]


def _terms(of_pass: Pass, allocations: list[Allocation]) -> tuple[Term, ...]:
    """But for the output."""
    named = ((of_pass.contents(a), a.nbytes) for a in allocations)
    return tuple(Term(name, nbytes) for name, nbytes in named if name != "out")


def _listed(columns: dict[str, tuple[Term, ...]]) -> list[str]:
    """A line for each buffer, with the columns that have it."""
    users: dict[Term, list[str]] = {}
    for name, terms in columns.items():
        for term in terms:
            users.setdefault(term, []).append(name)
    return [
        f"  {term.name:<36}{format_bytes(term.nbytes):>10}   {', '.join(names)}".rstrip()
        for term, names in users.items()
    ]
