"""Names of torch that are private or undocumented, for `frameworks`, which imports no torch.

Tested with torch 2.6, 2.11 and 2.13. A later version may lack any of them.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


def transform(given: Iterable[Any]) -> str | None:
    """The name of what transforms this call of torch and would take its results for constants, or None.

    `_is_tracing` and `_are_functorch_transforms_active` tell of torch.jit.trace and torch.func. Every tracer of
    torch.fx works under a function mode: asking `get_proxy_mode` each time takes four times as long as asking
    `_len_torch_function_stack` first. `_current_level` counts the levels of forward-mode differentiation.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # a subclass by name alone
        return None
    if torch._C._is_tracing():
        return "torch.jit.trace"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func (functorch wrappers are not supported)"
    if torch._C._len_torch_function_stack():
        proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
        if proxies is not None and proxies.get_proxy_mode() is not None:
            return "make_fx"
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        a is not None and forward_ad.unpack_dual(a).tangent is not None for a in given
    ):
        return "forward-mode differentiation (a tensor with a tangent)"
    return None


def break_at(function: Any, reason: str) -> None:
    """Has torch.compile end its graph at calls of a function, and say why, before anything of torch is imported.

    torch.compiler.disable sets these attributes. The second has a reader in newer versions.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def between_graphs(called: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as compiled code calls it between its graphs, from the frame of `called`, which calls it.

    `function` itself if nothing is compiled yet, as the import of `torch._dynamo` takes seconds. `skip` of its
    decorators is for the frame alone, and what that calls comes under `disable`.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    dynamo = importlib.import_module("torch._dynamo.decorators")
    dynamo.skip(called)
    disabled: Callable[..., Any] = dynamo.disable(function)
    return disabled


def stream(device: int) -> int:
    """The current stream of a device, which `_cuda_getCurrentRawStream` gives without a Stream object around it."""
    pointer: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(device)
    return pointer


def empty_on_current_device() -> tuple[Callable[..., Any], Callable[[], int]] | None:
    """`_empty_strided_cuda` and `_cuda_getDevice`; None where this torch lacks the first.

    torch.compile allocates with the first: on the current device it makes a tensor without the dispatcher, of shape,
    strides and dtype, which are plain tuples. The second tells which device is current.
    """
    core = sys.modules["torch"]._C
    empty = getattr(core._dynamo.guards, "_empty_strided_cuda", None)
    return None if empty is None else (empty, core._cuda_getDevice)
