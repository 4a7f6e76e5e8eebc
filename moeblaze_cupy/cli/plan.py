"""`plan`: the memory a layer will use, per save policy, beside a layer with routed buffers."""

from moeblaze_cupy import launch_config, memory
from moeblaze_cupy.cli.progress import CommandError
from moeblaze_cupy.memory import format_bytes


def run(args) -> int:
    s = memory.LayerShape(
        L=args.tokens,
        d=args.d_model,
        h=args.d_hidden,
        E=args.experts,
        k=args.k,
        activation=args.activation,
        dtype=args.dtype,
    )
    if s.slots > launch_config.MAX_SLOTS:
        raise CommandError(f"--tokens times --k: expected at most {launch_config.MAX_SLOTS} slots, got {s.slots}")
    if s.E > launch_config.MAX_EXPERTS:
        raise CommandError(f"--experts: expected at most {launch_config.MAX_EXPERTS}, got {s.E}")
    plans = {save or "inference": memory.layer(s, save) for save in memory.POLICIES}
    plans["routed buffers"] = memory.routed_layer(s)
    print("\n".join(report(s, plans)))
    return 0


def report(s: memory.LayerShape, plans: dict[str, memory.Plan]) -> list[str]:
    """Lines of text; `plans` by column heading, the last one the layer to compare with."""
    routed = plans["routed buffers"]
    lines = [
        f"L = {s.L} tokens, d = {s.d}, h = {s.h}, E = {s.E} experts, k = {s.k}, {s.activation}, {s.dtype}",
        f"b = {s.b} bytes per element, g = {s.g} (2 if gated, else 1), L*k = {s.slots} routed slots",
        "",
    ]
    rows = [["", *plans]]
    rows.append(["saved for backward", *(format_bytes(p.saved_bytes) for p in plans.values())])
    rows.append(
        ["  of routed buffers' bytes", *(f"{100 * p.saved_bytes / routed.saved_bytes:.1f} %" for p in plans.values())]
    )
    rows.append(["forward transients, peak", *(format_bytes(p.forward_peak_bytes) for p in plans.values())])
    rows.append(
        ["backward transients, peak", *(format_bytes(p.backward_peak_bytes) if p.backward else "-" for p in plans.values())]
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))

    lines += ["", "Transients come on top of what is saved and of the results, the same for every column:"]
    lines += _terms([(term, "") for term in (memory.output(s), *memory.gradients(s))])
    lines += ["", "Saved for backward:"]
    lines += _terms(_with_users({name: plan.saved for name, plan in plans.items()}))
    for heading, stages in (
        ("Forward transients:", {name: plan.forward for name, plan in plans.items()}),
        ("Backward transients, by stage (a pass peaks at its largest):", {n: p.backward for n, p in plans.items()}),
    ):
        lines += ["", heading]
        for number in range(max(len(of_plan) for of_plan in stages.values())):
            if number:
                lines.append("  then")
            lines += _terms(_with_users({name: st[number] for name, st in stages.items() if number < len(st)}))
    return lines


def _with_users(terms_by_plan: dict[str, tuple[memory.Term, ...]]) -> list[tuple[memory.Term, str]]:
    """Each distinct term once, with the columns that have it."""
    users: dict[memory.Term, list[str]] = {}
    for name, terms in terms_by_plan.items():
        for term in terms:
            users.setdefault(term, []).append(name)
    return [(term, ", ".join(names)) for term, names in users.items()]


def _terms(terms: list[tuple[memory.Term, str]]) -> list[str]:
    return [
        f"  {term.name:<28}{term.formula:<32}{format_bytes(term.nbytes):>12}  {users}".rstrip() for term, users in terms
    ]
