"""Names of torch that are private or undocumented: of autograd, torch.func, storages, dynamo and inductor.

Tested with torch 2.6, 2.11 and 2.13. A later version may lack any of them. Of Python's `inspect` it fills a table that
is not documented, tested with Python 3.10 to 3.13. Beside these, `MoE` overrides `_apply` and
`_load_from_state_dict` of torch.nn.Module.
"""

import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

#: Says whether autocast is on for any device. It is quicker than the question for one, which follows a True.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

#: Says whether transforms of torch.func are at work.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

#: The number of dispatch modes that see the operators of this thread.
number_of_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

#: Names of autograd's nodes that pass a gradient on as it is, in another shape: of views, and of DTensor.to_local.
VIEW_NODES = (
    *("TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AliasBackward0"),
    "_ToTorchTensorBackward",
)

#: Says whether `graph_break` takes a reason, which torch 2.6 does not.
GRAPH_BREAKS_HAVE_REASONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def tell_inspect(file: str, module: str) -> None:
    """Tells `inspect` which module a file belongs to. Else it asks every module for its file, and lazy ones then load.

    torch has `inspect` find the place of each fake. With CuPy imported this would load SciPy and pytest.
    """
    getattr(inspect, "modulesbyfile", {})[file] = module


def mark_static_address(tensor: Tensor, guard: bool) -> None:
    """Makes graphs of compiled code read a tensor at its address, which stays the same."""
    import torch._dynamo  # takes seconds, and few layers are in fp8

    torch._dynamo.mark_static_address(tensor, guard=guard)


def constant_in_graphs(function: Callable[[], bool]) -> Callable[[], bool]:
    """Has compilers take what the function returns then, as `assume_constant_result`, which would import dynamo now."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what it sets
    return function


def break_graph(reason: str) -> None:
    """Ends a graph of compiled code. With fullgraph=True this raises torch's error, which has the reason."""
    if GRAPH_BREAKS_HAVE_REASONS:
        torch._dynamo.graph_break(msg=reason)
    else:
        torch._dynamo.graph_break()


def is_batched(tensor: Tensor | None) -> bool:
    """Returns whether vmap, at any level of nested transforms of torch.func, has made this tensor of many."""
    functorch = torch._C._functorch
    while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def base_of(view: Tensor) -> Tensor | None:
    """Returns the tensor that a view was made of, by `_base`."""
    return view._base


def storage_id(tensor: Tensor) -> int:
    """Returns a number that a tensor's storage has as long as it lives, also while it has no memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def is_reached(node: Any) -> bool:
    """Returns whether this backward goes on to a node, which torch.autograd.grad by other tensors does not."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad by the node's own tensor, which is to be returned
        return False


def waited(tensor: Tensor) -> Tensor:
    """Returns the plain tensor of an AsyncCollectiveTensor, which a collective fills, once it has on this stream."""
    found: Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]  # torch documents no type of it
    return found.detach()


#: torch 2.6 sets no flag while torch.export runs, 2.7 and 2.8 set none while dynamo traces.
HAS_EXPORT_FLAG = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def is_exporting() -> bool:
    """Returns whether torch.export runs. torch.compiler.is_exporting is true in all that torch 2.11 compiles.

    Before torch 2.9, dynamo's tracer knows it while it traces. Outside of dynamo only torch.export sets the flag of
    compilation.
    """
    if HAS_EXPORT_FLAG:
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tracing = None if dynamo is None else getattr(dynamo.tls, "current_tx", None)
    return bool(torch.compiler._is_compiling_flag if tracing is None else getattr(tracing, "export", False))


# The way inductor compiles a backward that may overwrite saved tensors: a compiled graph holds the operator that leaves
# the saved tensors as they are, so that the graph stays right wherever it is run again. Where torch gives the compiled
# code a saved tensor to dispose of, and this operator alone reads it, the overwriting operator takes its place: no
# copy, no further buffer.


def _dies_here(value: Any, node: Any, current: torch.fx.Node, forward: Any) -> bool:
    """Returns whether the operator at `current` may overwrite `value`, that of `node` in inductor's representation."""
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
    """Returns inductor's lowering of `pure`: as it is, or as `in_place`, which has the same arguments."""
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


def has_inductor() -> bool:
    """Returns whether `torch._inductor.graph` is imported, which takes seconds. Else inductor compiles nothing yet."""
    return "torch._inductor.graph" in sys.modules


def let_inductor_overwrite(forward: Any, overwriting: dict[Any, Any]) -> bool:
    """Tells inductor, once, which operator overwrites the tensors that another of the same arguments reads.

    forward: the operator that makes the saved tensors, for graphs that compute them again. overwriting: the operators
    by those that leave them as they are. Returns False, and backward takes a buffer more, if this torch lacks support.
    """
    try:
        from torch._inductor.ir import DonatedBuffer, MultiOutput  # noqa: F401  # the check needs them to exist
        from torch._inductor.lowering import lowerings, register_lowering

        if not overwriting.keys() <= lowerings.keys():
            for pure, in_place in overwriting.items():
                register_lowering(pure, type_promotion_kind=None)(_lowering(forward, pure, in_place))
    except (ImportError, AttributeError):
        return False
    return True
