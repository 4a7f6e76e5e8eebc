"""`plan`: the memory a layer will use, per save policy, beside a layer with routed buffers."""

import argparse

from moeblaze_cupy import memory
from moeblaze_cupy.cli.sizes import layer_shape, slot_options
from moeblaze_cupy.memory import format_bytes


def run(args: argparse.Namespace) -> int:
    s = layer_shape(args, args.tier)
    plans = {save or "inference": memory.layer(s, save) for save in memory.POLICIES}
    plans["routed buffers"] = memory.routed_layer(s)
    print("\n".join(report(s, plans)))
    return 0


def report(s: memory.LayerShape, plans: dict[str, memory.Plan]) -> list[str]:
    """Lines of text; `plans` by column heading, the last one the layer to compare with."""
    routed = plans["routed buffers"]
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}"
        f"{slot_options(s)}",
        f"b = {s.b} bytes per element, g = {s.g} (2 if gated, else 1), L*k = {s.slots} routed slots",
        f"{'Hopper' if s.on_hopper else 'portable'} kernels",
        "",
    ]
    columns = list(plans.values())
    rows = [
        ["", *plans],
        ["saved for backward", *(format_bytes(p.saved_bytes) for p in columns)],
        ["  of routed buffers' bytes", *(f"{p.saved_bytes / routed.saved_bytes:.1%}" for p in columns)],
        ["forward transients, peak", *(format_bytes(p.forward_peak_bytes) for p in columns)],
        [
            "backward with gradients, peak",
            *(format_bytes(p.backward_peak_bytes) if p.backward else "-" for p in columns),
        ],
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))

    lines += ["", "The results, the same for every column; transients come on top of them and of what is saved:"]
    lines += _terms({term: [] for term in (memory.output(s), *memory.gradients(s))})
    lines += ["", "Saved for backward:"]
    lines += _terms(_users({name: plan.saved for name, plan in plans.items()}))
    for heading, stages_by_plan in (
        ("Forward transients:", {name: plan.forward for name, plan in plans.items()}),
        (
            "Backward, with the gradients that exist by then, a peak being the largest stage:",
            {name: plan.backward for name, plan in plans.items()},
        ),
    ):
        lines += ["", heading]
        for number in range(max(map(len, stages_by_plan.values()))):
            if number:
                lines.append("  then")
            lines += _terms(_users({n: stages[number] for n, stages in stages_by_plan.items() if number < len(stages)}))
    return lines


def _users(terms_by_plan: dict[str, tuple[memory.Term, ...]]) -> dict[memory.Term, list[str]]:
    """Each distinct term with the columns that have it."""
    users: dict[memory.Term, list[str]] = {}
    for name, terms in terms_by_plan.items():
        for term in terms:
            users.setdefault(term, []).append(name)
    return users


def _terms(users: dict[memory.Term, list[str]]) -> list[str]:
    return [
        f"  {term.name:<30}{term.formula:<32}{format_bytes(term.nbytes):>10}   {', '.join(names)}".rstrip()
        for term, names in users.items()
    ]
