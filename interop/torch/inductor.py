"""How inductor compiles a backward that may overwrite what was saved: over it, wherever that memory is free by then.

A compiled graph holds the operator that leaves the saved tensors as they are, so that the graph stays right wherever it
is run again. Where torch gives the compiled code a saved tensor to dispose of, and this operator alone reads it, the
overwriting operator takes its place: no copy, no further buffer. All this is private to torch. In a version that lacks
some of it, backward takes that buffer.
"""

import operator
from typing import Any

import torch


def _dies_here(value: Any, node: Any, current: torch.fx.Node, forward: Any) -> bool:
    """Whether the operator at `current` may overwrite `value`, that of `node` in inductor's representation."""
    from torch._inductor import ir

    if set(node.users) != {current}:
        return False
    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    if isinstance(value, ir.DonatedBuffer):  # saved by a forward graph that will not be asked for it again
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(value, ir.MultiOutput) and isinstance(source, torch.fx.Node) and source.target is forward


def _lowering(forward: Any, pure: Any, in_place: Any) -> Any:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    given, written = pure._schema.arguments, in_place._schema.arguments
    places = [i for i, (a, b) in enumerate(zip(given, written, strict=True)) if a.alias_info is None and b.alias_info]
    as_it_is, overwriting = (fallback_handler(op, add_to_fallback_set=False) for op in (pure, in_place))  # type: ignore[no-untyped-call]  # torch gives it no types

    def lower(*arguments: Any) -> Any:
        current = V.graph.current_node
        saved = [(arguments[i], current.args[i]) for i in places if arguments[i] is not None]
        dies = bool(saved) and all(_dies_here(value, node, current, forward) for value, node in saved)
        return (overwriting if dies else as_it_is)(*arguments)

    return lower


def register(forward: Any, overwriting: dict[Any, Any]) -> bool:
    """Tells inductor, once, which operator overwrites what another of the same arguments reads.

    forward: the operator that makes what is saved, for graphs that compute it again. overwriting: by the operator that
    leaves it as it is. Returns False where this version of torch lacks what it takes.
    """
    try:
        from torch._inductor.ir import DonatedBuffer, MultiOutput  # noqa: F401  # that they are there
        from torch._inductor.lowering import lowerings, register_lowering

        if not overwriting.keys() <= lowerings.keys():
            for pure, in_place in overwriting.items():
                register_lowering(pure, type_promotion_kind=None)(_lowering(forward, pure, in_place))
    except (ImportError, AttributeError):
        return False
    return True
