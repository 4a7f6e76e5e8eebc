"""The tensors of a call of `moe`: what they must be, and their dtypes under torch.autocast."""

from collections.abc import Sequence
from typing import Any

import torch

from moeblaze_cupy import checks
from moeblaze_cupy import types as structures
from moeblaze_cupy.checks import named_pair
from moeblaze_cupy.interop.torch import private

HAS_FP32_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")
DENSE = "a dense tensor, as values() of a nested one is"


def gate_and_up(name: str, weight: Any) -> tuple[Any, Any]:
    """w1 or b1 as (gate, up): a tensor alone is the gate, and up is None then."""
    if not isinstance(weight, (tuple, list)) or isinstance(weight, structures.QuantizedWeight):
        return weight, None
    for part, tensor in named_pair("moe", name, weight).items():
        check_tensor(part, tensor)
    return structures.gate_and_up(weight)


def check_tensors(layer: Sequence[Any], unreduced: bool) -> None:
    """layer: the first tensors of torch_ops.Layer, in order. Optional ones, such as biases, may be None."""
    x, ids, weights, gate, _, w2, b1_gate, _, b2, token_offsets = layer  # `gate_and_up` has checked the up halves
    for name, tensor in (("x", x), ("ids", ids), ("w1", gate), ("w2", w2)):
        check_tensor(name, tensor)
    if weights is not None or not unreduced:
        check_tensor("weights", weights)
    for name, optional in (("b1", b1_gate), ("b2", b2), ("token_offsets", token_offsets)):
        if optional is not None:
            check_tensor(name, optional)


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        advice = "; torch.stack makes one of its tensors" if isinstance(tensor, list) else ""
        raise checks.bad_type("moe", name, "a torch tensor", f"{type(tensor)}{advice}")
    if tensor.is_nested:  # there are no operators for them
        raise checks.bad_type("moe", name, DENSE, "a nested one")


def check_module(function: str, model: Any) -> None:
    """Raises TypeError for another model than a torch.nn.Module."""
    if not isinstance(model, torch.nn.Module):
        raise checks.bad_type(function, "model", "a torch.nn.Module", f"{model!r:.60}")


def check_mask(token_mask: Any, x: torch.Tensor) -> None:
    """The token_mask of `MoE` against its x (..., d)."""
    if token_mask.dtype != torch.bool:
        raise checks.bad_type("MoE", "token_mask", "dtype bool", str(token_mask.dtype).removeprefix("torch."))
    shape, num_tokens = tuple(x.shape[:-1]), x.shape[:-1].numel()
    if token_mask.shape not in (shape, (num_tokens,)):  # another order of as many tokens would mask other ones
        raise checks.bad_value("MoE", "token_mask", f"shape {shape} or ({num_tokens},)", tuple(token_mask.shape))
    if token_mask.device != x.device:
        raise checks.bad_type("MoE", "token_mask", f"x's device {x.device}", token_mask.device)


def routed(found: Any, num_tokens: int, k: int) -> tuple[Any, ...]:
    """What the routing of `MoE` returned: weights and ids (L, k), which may be views, and maybe sums."""
    are_two = isinstance(found, (tuple, list)) and len(found) in (2, 3)
    if not are_two or not all(isinstance(tensor, torch.Tensor) for tensor in found[:2]):
        got = f"a {type(found).__name__}" + (f" of {[type(one).__name__ for one in found]}" if are_two else "")
        raise checks.bad_type("MoE", "routing", "a function that returns (weights, ids), as route does", got)
    for name, tensor in zip(("weights", "ids"), found, strict=False):
        if tensor.dim() != 2 or tensor.shape[0] != num_tokens or tensor.shape[1] != k:
            expected = f"{name} of shape (L, k) = ({num_tokens}, {k})"
            raise checks.bad_value("MoE", "routing", expected, tuple(tensor.shape))
    return found[0].contiguous(), found[1].contiguous(), *found[2:]


def in_autocast(x: torch.Tensor) -> bool:
    """Whether torch.autocast is on for the tensor's device. It knows no meta tensors, which give models shapes."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def autocast(device: str, operands: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """operands, x first: cast to autocast's dtype, as torch casts those of a linear layer. float64 is not cast.

    others: router weights and biases. One in float32 or in the new dtype of x stays as it is. Another becomes float32.
    """
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Any) -> Any:  # a tensor or None, which torch 2.6 cannot compile as an annotation
        of_autocast = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if tensor is not None and of_autocast else tensor

    def beside(tensor: Any) -> Any:
        return widened(tensor, of_x) if tensor is not None and tensor.is_floating_point() else tensor

    products = list(map(cast, operands))
    of_x = products[0].dtype
    return products, list(map(beside, others))


@private.constant_in_graphs
def _matmuls_in_tf32() -> bool:
    """Returns whether torch multiplies float32 matrices on CUDA in TF32. Compiled code guards this setting itself."""
    matmul = torch.backends.cuda.matmul
    if HAS_FP32_PRECISION:  # it shows what was set by older names too, which raise an error once it has been set
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def in_tf32(x: torch.Tensor) -> bool:
    """Returns whether torch would multiply x in TF32, by its setting."""
    return x.dtype == torch.float32 and x.device.type == "cuda" and _matmuls_in_tf32()


def widened(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns router weights or biases as `moe` takes them beside x of this dtype: in float32 unless they have it."""
    return weights if weights.dtype in (torch.float32, dtype) else weights.float()
