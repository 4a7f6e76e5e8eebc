"""`plan`: it shows the memory a layer will use, per save policy, beside a layer with routed buffers."""

import argparse
import dataclasses
from typing import Any

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.cuda.recorder import Allocation, allocation_of
from moeblaze_cupy.tools import dry_run, expected, memory
from moeblaze_cupy.tools.command import CommandError, one_line, print_json
from moeblaze_cupy.tools.dry_run import DryRun, Pass
from moeblaze_cupy.tools.memory import Term, format_bytes
from moeblaze_cupy.tools.sizes import as_json, layer_shape, slot_options

POLICIES = ("recompute", "fp8", "minimal", "paper", None)  # ordered by what they save
ROUTED = "routed buffers"


def run(args: argparse.Namespace) -> int:
    s = layer_shape(args, args.tier)
    limits = dataclasses.replace(launch_config.H200, tier=args.tier)
    runs = {}
    for save in POLICIES:
        try:
            runs[save or "inference"] = dry_run.layer(s, save, limits)
        except ValueError as error:  # a memory limit below the least
            raise CommandError(f"{one_line(error).removeprefix('plan: ')}, with save={save!r}") from error
    if args.json:
        print_json(facts(s, runs))
    else:
        print("\n".join(report(s, runs)))
    return 0


@dataclasses.dataclass(frozen=True)
class Column:
    """The memory of one save policy, or of the layer with routed buffers, in bytes and buffer by buffer.

    Backward's are None in inference. chunk_tokens: None but for a layer with a memory limit; more_traffic: the bytes of
    both passes that its chunks read and write beyond those without the limit.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int | None
    saved: tuple[Term, ...]
    forward_peak: tuple[Term, ...]
    backward_peak: tuple[Term, ...] | None
    chunk_tokens: int | None = None
    more_traffic: int = 0


def columns(s: memory.LayerShape, runs: dict[str, DryRun]) -> dict[str, Column]:
    """Returns columns by their headings: those of `runs`, then the layer to compare with."""
    x = Term("x", s.L * s.d * s.b)
    found = {}
    for name, run in runs.items():
        forward, *backward = run.passes
        transient = _terms(forward, [a for a in forward.at_peak() if a not in _saved(forward)])
        found[name] = Column(
            run.saved_bytes,
            run.forward_peak_bytes,
            run.backward_peak_bytes if backward else None,
            (x, *_terms(forward, _saved(forward))) if backward else (),
            transient,
            _terms(backward[0], backward[0].at_peak()) if backward else None,
            *(() if s.memory_limit is None else (run.chunk_tokens, _more_traffic(s, run))),
        )
    routed = memory.routed_layer(s)
    found[ROUTED] = Column(routed.saved_bytes, 0, routed.backward_peak_bytes, routed.saved, (), routed.at_peak)
    return found


def results(s: memory.LayerShape, runs: dict[str, DryRun]) -> tuple[Term, ...]:
    """Returns the output and the gradients."""
    return Term("out", allocation_of(runs["inference"].passes[0].kept["out"]).nbytes), *memory.gradients(s)


def facts(s: memory.LayerShape, runs: dict[str, DryRun]) -> dict[str, Any]:
    """Returns the content of `report` for JSON."""
    return {
        "layer": as_json(s),
        "kernels": expected.tier_of(runs["minimal"]),
        "results": [dataclasses.asdict(term) for term in results(s, runs)],
        **expected.facts(s, runs["minimal"], expected.CARDS, "minimal"),
        "memory": {name: dataclasses.asdict(column) for name, column in columns(s, runs).items()},
    }


def report(s: memory.LayerShape, runs: dict[str, DryRun]) -> list[str]:
    """Returns lines of text. runs: the dry runs by column heading."""
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}"
        f"{slot_options(s)}",
        f"{'Hopper' if expected.tier_of(runs['minimal']) == 'sm90' else 'portable'} kernels",
        "Weights, the router and optimizer state are not counted. What is saved comes on top of backward's peak.",
        f"{ROUTED}: a layer that copies tokens to the order of experts, keeps every intermediate, recomputes nothing",
        "",
    ]
    found = columns(s, runs)
    routed_bytes = found[ROUTED].saved_bytes
    rows = [
        ["", *found],
        ["saved for backward", *(format_bytes(c.saved_bytes) for c in found.values())],
        ["  of routed buffers' bytes", *(f"{c.saved_bytes / routed_bytes:.1%}" for c in found.values())],
        ["forward transients, peak", *(format_bytes(c.forward_peak_bytes) for c in found.values())],
        [
            "backward with gradients, peak",
            *("-" if c.backward_peak_bytes is None else format_bytes(c.backward_peak_bytes) for c in found.values()),
        ],
    ]
    if s.memory_limit is not None:
        tokens = (c.chunk_tokens for c in found.values())
        rows.append(["tokens of a chunk", *("-" if number is None else f"{number:,}" for number in tokens)])
        rows.append(["  more traffic by chunks", *(format_bytes(c.more_traffic) for c in found.values())])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    for heading, of_columns in (
        (
            "The results, the same for every column. Forward holds out, and backward's peak has its gradients in it:",
            {"": results(s, runs)},
        ),
        ("Saved for backward:", {name: c.saved for name, c in found.items()}),
        ("Forward transients at the peak:", {name: c.forward_peak for name, c in found.items()}),
        (
            "Backward at the peak, with the gradients that exist by then:",
            {name: c.backward_peak or () for name, c in found.items()},
        ),
    ):
        lines += ["", heading, *_listed(of_columns)]
    lines += ["", *expected.report(s, runs["minimal"], expected.CARDS, "minimal")]
    return lines


def _more_traffic(s: memory.LayerShape, run: DryRun) -> int:
    whole = dataclasses.replace(run, chunk_tokens=s.L)
    in_chunks, without = (list(expected.work(s, of).values())[-1].nbytes for of in (run, whole))
    return in_chunks - without


def _saved(forward: Pass) -> list[Allocation]:
    return [allocation_of(array) for name, array in forward.kept.items() if name != "out"]


def _terms(of_pass: Pass, allocations: list[Allocation]) -> tuple[Term, ...]:
    """Returns the terms except the output."""
    named = ((of_pass.contents(a), a.nbytes) for a in allocations)
    return tuple(Term(name, nbytes) for name, nbytes in named if name != "out")


def _listed(columns: dict[str, tuple[Term, ...]]) -> list[str]:
    """Returns a line for each buffer, with the columns that have it."""
    users: dict[Term, list[str]] = {}
    for name, terms in columns.items():
        for term in terms:
            users.setdefault(term, []).append(name)
    return [
        f"  {term.name:<36}{format_bytes(term.nbytes):>10}   {', '.join(names)}".rstrip()
        for term, names in users.items()
    ]
