"""`plan`: the memory a layer will use, per save policy, beside a layer with routed buffers; and on many ranks."""

import argparse

from moeblaze_cupy import memory
from moeblaze_cupy.cli.progress import CommandError
from moeblaze_cupy.cli.sizes import layer_shape, slot_options
from moeblaze_cupy.expert_parallel_plan import ExpertParallel, Machine
from moeblaze_cupy.memory import format_bytes


def run(args: argparse.Namespace) -> int:
    s = layer_shape(args, args.tier)
    plans = {save or "inference": memory.layer(s, save) for save in memory.POLICIES}
    plans["routed buffers"] = memory.routed_layer(s)
    if args.ranks is None:
        if args.nodes != 1 or args.limit_nodes is not None:
            raise CommandError("--nodes, --limit-nodes: expected with --ranks alone")
        print("\n".join(report(s, plans)))
        return 0
    if args.ranks % args.nodes:
        raise CommandError(f"--nodes: expected a divisor of --ranks {args.ranks}, got {args.nodes}")
    machine = Machine(args.ranks // args.nodes, 1e9 * args.nvlink, 1e9 * args.network, flops=1e12 * args.tflops)
    print("\n".join(parallel_report(s, args.ranks, machine, args.limit_nodes)))
    return 0


def parallel_report(s: memory.LayerShape, ranks: int, machine: Machine, limit_nodes: int | None) -> list[str]:
    """Lines of text: what each number of ranks that can share the experts costs; the others hold copies of them."""
    lines = [
        f"L = {s.L} tokens per rank, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}",
        f"{ranks} ranks, {machine.ranks_per_node} per node; {machine.nvlink / 1e9:g} GB/s in a node, "
        f"{machine.network / 1e9:g} GB/s between nodes, {machine.flops / 1e12:g} TFLOP/s; uniform routing",
        "",
    ]
    heads = ("ranks", "nodes", "rows/token", "nodes/token", "exchange ms", "products ms", "efficiency", "experts")
    rows = [[*heads, "saved", "backward peak"]]
    for P in (n for n in range(1, min(ranks, s.E) + 1) if ranks % n == 0 and s.E % n == 0):
        try:
            shared = ExpertParallel(s, P, machine, limit_nodes)
        except ValueError:  # the nodes of a token have too few experts
            continue
        plan, experts = shared.plan("minimal"), s.E // P * s.h * s.d * (s.g + 1) * s.b
        rows.append(
            [
                *(f"{P}", f"{shared.nodes}", f"{shared.rows_per_token:.2f}", f"{shared.nodes_per_token:.2f}"),
                *(f"{1e3 * shared.exchange_seconds:.2f}", f"{1e3 * shared.compute_seconds:.2f}"),
                *(f"{shared.efficiency:.0%}", format_bytes(experts)),
                *(format_bytes(plan.saved_bytes), format_bytes(plan.backward_peak_bytes)),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [
        *lines,
        "",
        "ranks: that share the experts. Four exchanges of a layer; efficiency is that of the layer alone, where the",
        'gradient of x travels behind those of the weights. saved, backward peak: per rank and layer, save="minimal".',
    ]


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
