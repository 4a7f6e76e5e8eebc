"""Models of Hugging Face transformers whose experts are spread over ranks that have tokens of their own.

`parallelize_experts` does so for a model in memory. If transformers offers a choice of implementations of expert
parallelism, as 5.23 does and 5.17 does not, the import registers `DistributedConfig(ep_implementation="moeblaze")`.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import moeblaze_cupy.interop.transformers  # noqa: F401  # registers "moeblaze"
from moeblaze_cupy import checks
from moeblaze_cupy.fp8 import checks as fp8_checks
from moeblaze_cupy.interop.parallel.api import expert_parallel_moe
from moeblaze_cupy.interop.parallel.exchanges import ExpertGroup, collect, exchange
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.transformers import experts as transformers_experts
from moeblaze_cupy.interop.transformers import lora, private, quantised
from moeblaze_cupy.interop.transformers.formula import formula_of, name_of
from moeblaze_cupy.interop.transformers.patches import OUT_OF_REACH, PATCHES
from moeblaze_cupy.types import SAVE_POLICIES, QuantizedWeight

Tensor = torch.Tensor


def parallelize_experts(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    group: Callable[[DeviceMesh, int], ExpertGroup] = ExpertGroup,
    save: str = "minimal",
    precision: str | None = None,
    row_precision: str | None = None,
) -> tuple[str, ...]:
    """Spreads the experts of every layer over the ranks of a mesh; returns the names of their modules.

    model: has all experts, of classes that transformers dispatches; the experts implementation of its config does not
    matter from here on. Call this before FSDP2 and before the optimizer is made.
    mesh: of one dimension. Its rank r keeps the experts r*E/P to (r+1)*E/P - 1 of every layer: parameters whose first
    dimension is E become DTensors that are sharded along it, each with memory of its own, so that the whole is freed.
    group: makes the ExpertGroup of all layers with E experts from the mesh and E, such as
    `functools.partial(ExpertGroup, slots=65536)`.
    save: a save policy of `moeblaze_cupy.moe_forward`.
    precision: see `moeblaze_cupy.interop.transformers.register`. With "fp8" what cannot be computed in e4m3 raises the
    errors of `expert_parallel_moe` and `moe` in forward.
    row_precision: see `expert_parallel_moe`. With "fp8" experts that run by `exchange`, such as those with biases, and
    experts with adapters raise ValueError in forward.
    Under torch.autocast rows, and results but those of a norm, travel in autocast's dtype.
    Ranks have tokens of their own, also in unequal numbers, and run the layers equally often. Gradients of the experts
    are sums over the tokens of all ranks of the mesh; those of other parameters are the caller's to sum.
    Adapters of peft's LoRA on experts (`target_parameters`) may be there, or come later. Their factors stay whole on
    every rank, and a rank's gradients of them are its own experts' part: they are the caller's to sum, too. Merged ones
    raise ValueError, and merging raises RuntimeError from here on.
    Nothing is changed if an error is raised: TypeError, ValueError for a mesh, a model or a name that does not fit,
    NotImplementedError for experts that the layer cannot compute, and for other adapters on experts. Experts that get
    such adapters later raise it in forward. What `group` raises is raised on all ranks, and TypeError or ValueError if
    its ExpertGroup is of other ranks or experts.
    """
    function = "parallelize_experts"
    torch_arguments.check_module(function, model)
    checks.one_of(function, "save", save, SAVE_POLICIES)
    checks.one_of(function, "precision", precision, fp8_checks.PRECISIONS)
    fp8_checks.row_precision(function, row_precision, precision)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{function}: mesh: expected a DeviceMesh of one dimension, got {type(mesh)}")
    found = {name: module for name, module in model.named_modules() if _has_experts(name, module)}
    for name, module in model.named_modules():
        _refuse_adapters(name, module)
    lora.refuse_merged(function, model, found.values())
    if not found:
        raise ValueError(
            f"{function}: model: expected one with experts that transformers dispatches, got {type(model)}"
        )
    groups: dict[int, ExpertGroup] = {}
    for module in found.values():
        number = transformers_experts.weights_of(module)[0].shape[0]
        if number not in groups:
            groups[number] = _of_mesh(group(mesh, number), mesh, number)
    options = _Options(save, precision, row_precision)
    parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in found.values():
        experts = groups[transformers_experts.weights_of(module)[0].shape[0]]
        _keep_part(module, mesh, experts, parts)
        module.forward = types.MethodType(_forward_over(experts, options), module)
        setattr(module, lora.TAKES, True)
    for name in filter(None, found):
        caller, _, part = name.rpartition(".")
        hook = functools.partial(_refuse_later_adapters, name, part)
        model.get_submodule(caller).register_forward_pre_hook(hook)
    return tuple(found)


def _of_mesh(experts: Any, mesh: DeviceMesh, number: int) -> ExpertGroup:
    """Returns the ExpertGroup that a caller has made, if it is of this mesh and number of experts."""
    expected = f"a function that makes an ExpertGroup of the mesh and {number} experts"
    if not isinstance(experts, ExpertGroup):
        raise checks.bad_type("parallelize_experts", "group", expected, f"one that returns {type(experts)}")
    ranks, of_mesh = map(torch.distributed.get_process_group_ranks, (experts.group, mesh.get_group()))
    if experts.num_experts != number or ranks != of_mesh:
        got = f"one of ranks {ranks} and {experts.num_experts} experts, where the mesh has ranks {of_mesh}"
        raise checks.bad_value("parallelize_experts", "group", expected, got)
    return experts


def _refuse_adapters(name: str, wrapper: Any) -> None:
    """Refuses a module of peft around experts that do not take its factors, as peft's own error is one of DTensors."""
    if not hasattr(wrapper, "get_base_layer") or not private.is_dispatched(wrapper.get_base_layer()):
        return
    if not lora.serves(wrapper):
        expected = "experts without adapters, or with those of LoRA in peft 0.19 or later"
        kind = type(wrapper)
        got = f"{kind.__module__}.{kind.__name__} at {name}"
        raise NotImplementedError(f"parallelize_experts: model: expected {expected}, got {got}")


def _refuse_later_adapters(name: str, part: str, caller: torch.nn.Module, _: Any) -> None:
    """Calls `_refuse_adapters` for what peft has wrapped around experts since."""
    wrapper = getattr(caller, part)
    while "forward" not in vars(wrapper) and hasattr(wrapper, "base_layer"):
        _refuse_adapters(name, wrapper)
        wrapper = wrapper.base_layer


def _has_experts(name: str, module: Any) -> bool:
    """Whether the module has experts to spread. Raises for those that cannot be spread."""
    kind = name_of(type(module))
    if kind in PATCHES or kind in OUT_OF_REACH:
        raise NotImplementedError(
            f"parallelize_experts: {name}: {kind}: its experts are not dispatched by transformers"
        )
    if not private.is_dispatched(module):
        return False
    weights = transformers_experts.weights_of(module)
    reason = formula_of(module).reason or transformers_experts.unfit(weights)
    if reason:
        raise NotImplementedError(f"parallelize_experts: {name}: {kind}: {reason}")
    if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        expected = "whole experts, before FSDP2 and any other plan"
        raise ValueError(f"parallelize_experts: model: expected {expected}, got DTensors in {name}")
    return True


def _keep_part(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    experts: ExpertGroup,
    parts: dict[torch.nn.Parameter, torch.nn.Parameter],
) -> None:
    """Leaves the module this rank's part of its parameters. parts: of parameters, which modules may share."""
    first = experts.rank * experts.local_experts
    for name, whole in list(module.named_parameters(recurse=False)):
        if whole.shape[:1] != (experts.num_experts,):
            continue
        if whole not in parts:
            part = whole.detach()[first : first + experts.local_experts].clone(memory_format=torch.preserve_format)
            sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            parts[whole] = torch.nn.Parameter(sharded, requires_grad=whole.requires_grad)
        setattr(module, name, parts[whole])


class _Options(NamedTuple):
    """Of `parallelize_experts`."""

    save: str
    precision: str | None
    row_precision: str | None


def _forward_over(experts: ExpertGroup, options: _Options) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _over_ranks(self, hidden_states, top_k_index, top_k_weights, experts, options)

    return forward


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _over_ranks(
    module: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertGroup,
    options: _Options,
) -> Tensor:
    """Returns (L, d) for this rank's tokens x (L, d), whose ids (L, k) are of all E experts; module has this rank's."""
    formula, name, adapters = formula_of(module), name_of(type(module)), lora.taken(module)
    reason = formula.reason if formula.activation is None else lora.unfit(adapters)
    if formula.activation is None or reason:
        raise NotImplementedError(f"moeblaze: {name}: {reason}")
    save, precision, row_precision = options
    start = experts.rank * experts.local_experts
    w1, w2, biases = transformers_experts.arguments_of(module, _local)
    has_norm = getattr(module, "has_post_expert_norm", False)
    plain = not (biases or has_norm or formula.gate_up != "halves")
    rows, wide = x, weights
    follows_autocast = torch_arguments.in_autocast(x)
    if follows_autocast and not plain:  # before rows travel; `expert_parallel_moe` does so itself
        (rows,), (wide,) = torch_arguments.autocast(x.device.type, (x,), (weights,))
    elif plain and isinstance(w2, QuantizedWeight):
        rows, w1, w2 = quantised.in_one_dtype(x, w1, w2)
    elif plain and not follows_autocast:
        rows = x.to(w2.dtype)
    if plain and not follows_autocast:
        wide = torch_arguments.widened(weights, rows.dtype)
    if plain:
        of_layer = transformers_experts.layer_options(save, precision)
        of_layer.update(activation=formula.activation, row_precision=row_precision)
        of_layer.update(lora.option(adapters, w2, not getattr(module, "is_transposed", False), start))
        out = expert_parallel_moe(rows, ids, wide, w1, w2, experts, **of_layer)
    elif row_precision is not None:
        expected = f"None for {name}, as `exchange` sends rows as they are"
        raise checks.bad_value("moeblaze", "row_precision", expected, repr(row_precision))
    else:
        rows, local_ids, got, route = exchange(rows, ids, wide, experts)
        if has_norm:  # which computes in the dtype that experts get
            rows = rows.to(x.dtype)
        of_layer = transformers_experts.layer_options(save, precision)
        given = module, formula, rows, local_ids, got, of_layer, _local
        out = collect(transformers_experts.experts(*given, adapters=adapters, start=start), route)
    return out.to(x.dtype)


try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError:  # transformers has none to choose from
    pass
else:

    class ExpertParallel(EPImplementation):
        """`DistributedConfig(ep_implementation="moeblaze")`: a row travels once to each rank with an expert of it.

        The ranks of a tensor parallel group have the same tokens. Each rank sends its part of them.
        A subclass sets `save`, `precision` and `row_precision`, of `parallelize_experts`, and is registered under its
        own name.
        """

        save: str = "minimal"
        precision: str | None = None
        row_precision: str | None = None

        def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            setattr(experts, lora.TAKES, True)
            local: Any = self.num_local_experts
            self.group = ExpertGroup(ep_mesh, local * ep_mesh.size())

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            x, ids, weights = hidden_states, top_k_index, top_k_weights
            if self.tp_mesh.size() > 1:
                x, ids, weights = (
                    DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
                    .redistribute(placements=[Shard(0)])
                    .to_local()
                    for tensor in (x, ids, weights)
                )
            options = _Options(self.save, self.precision, self.row_precision)
            out = _over_ranks(self.experts, x, ids, weights, self.group, options)
            if self.tp_mesh.size() == 1:
                return out
            shape = hidden_states.shape
            parts = DTensor.from_local(
                out, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
            whole: Tensor = parts.full_tensor()
            return whole

    EPImplementationInterface.register("moeblaze", ExpertParallel)
