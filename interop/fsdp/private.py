"""Names of FSDP2 and of torch's tensor subclasses that are private or undocumented.

Experimental: FSDP2's classes below are its own, so another version of torch may lack any name of them. Tested with
torch 2.11 and 2.13, and as far as it shards on the CPU with 2.6.
"""

from operator import attrgetter
from typing import Any

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.parallel.driver import current_stream

Tensor = torch.Tensor

# The attributes of FSDP2's FSDPParamGroup and FSDPParam that `Group` and `Parameter` read or set.
_of_group = attrgetter(
    *("fsdp_params", "mesh_info", "post_forward_mesh_info", "mp_policy", "_use_post_forward_mesh"),
    *("reduce_grads", "gradient_divide_factor", "_all_reduce_hook", "_post_reduce_event"),
    *("is_unsharded", "_all_gather_result"),
)
_of_parameter = attrgetter(
    *("sharded_param._local_tensor", "fsdp_placement.dim", "offload_to_cpu", "all_gather_outputs"),
    *("_orig_size", "_sharded_param_data", "_init_extensions", "_module_info.module", "_module_info.param_name"),
    *("unsharded_accumulated_grad", "to_sharded_dtensor"),
)


class Parameter:
    """A parameter that FSDP2 shards, its FSDPParam. Raises AttributeError if FSDP2 is built in another way."""

    def __init__(self, of: Any) -> None:
        _of_parameter(of)
        self._of = of
        #: the module, and the name of the parameter there
        self.module, self.name = of._module_info.module, of._module_info.param_name

    @property
    def local(self) -> Tensor:
        """Returns this rank's part."""
        part: Tensor = self._of.sharded_param._local_tensor
        return part

    @property
    def rows(self) -> int:
        """Returns the size of the first dimension; 0 if FSDP2 shards another one, or keeps the parts on the host."""
        size, is_by_rows = self._of._orig_size, self._of.fsdp_placement.dim == 0
        return size[0] if len(size) and is_by_rows and not self._of.offload_to_cpu else 0

    @property
    def is_alone(self) -> bool:
        """Returns whether no other module has this parameter, and no other plan shards it."""
        return not (getattr(self._of, "is_dtensor", False) or self._of._module_info.shared_modules)

    def gather_from(self, local: Tensor) -> None:
        """Makes FSDP2 gather the parameter from another tensor, whose `fsdp_pre_all_gather` it then calls."""
        self._of.sharded_param._local_tensor = local
        self._of._sharded_param_data = local.view(-1)
        self._of._init_extensions()
        # if a forward has run before, FSDP2 has made a whole parameter that is not the hooks'
        self._of.__dict__.pop("_unsharded_param", None)
        self._of.all_gather_outputs = []

    def is_whole(self, variable: Any) -> bool:
        """Returns whether a leaf of autograd is the gathered parameter."""
        return variable is not None and variable is getattr(self._of, "_unsharded_param", None)

    @property
    def has_other_gradients(self) -> bool:
        """Returns whether gradients of this rank add up before a reduction, or a hook is to see the reduced one."""
        adds_up = self._of.unsharded_accumulated_grad is not None or self._of._unsharded_param.grad is not None
        return adds_up or bool(getattr(self._of.sharded_param, "_post_accumulate_grad_hooks", None))

    def accumulate_gradient(self, total: Tensor, group: "Group") -> None:
        """Sets the part's gradient, or adds to it, as FSDP2 does after a reduce-scatter. total: as many elements."""
        parameter, total = self._of.sharded_param, total.view(self.local.shape)
        if parameter.grad is None:
            parameter.grad = self._of.to_sharded_dtensor(total)
            return
        group.wait_for_reduction(total.device)
        parameter.grad._local_tensor += total


class Group:
    """The parameters of a module that FSDP2 gathers at once, its FSDPParamGroup."""

    def __init__(self, of: Any) -> None:
        parameters, *_ = _of_group(of)
        self._of = of
        self.parameters = [Parameter(parameter) for parameter in parameters]

    @property
    def process_group(self) -> Any:
        """Returns the ranks over which the parameters are sharded; None if they are replicated alone."""
        return getattr(self._of.mesh_info, "shard_process_group", None)

    @property
    def is_replicated(self) -> bool:
        """Returns whether other ranks have the same parts, over which FSDP2 sums gradients as well."""
        return getattr(self._of.mesh_info, "replicate_process_group", None) is not None

    @property
    def has_fewer_after_forward(self) -> bool:
        """Returns whether the parameters are sharded over fewer ranks after forward."""
        return bool(self._of._use_post_forward_mesh)

    @property
    def stays_gathered(self) -> bool:
        """Returns whether the parameters stay gathered after forward."""
        return self._of.post_forward_mesh_info is None

    @property
    def is_gathered(self) -> bool:
        """Returns whether the parameters are gathered, or an all-gather of them waits to be read."""
        return self._of.is_unsharded or self._of._all_gather_result is not None

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Returns `MixedPrecisionPolicy.param_dtype`."""
        dtype: torch.dtype | None = self._of.mp_policy.param_dtype
        return dtype

    @property
    def reduces_only_gradients(self) -> bool:
        """Returns whether this backward reduces, calls no hook for it, and reduces only what has a gradient."""
        reduces_all = getattr(self._of, "reduce_scatter_unused_params", False)
        return bool(self._of.reduce_grads and not (self._of._all_reduce_hook or reduces_all))

    @property
    def divide_factor(self) -> float | None:
        """Returns the divisor of a sum of gradients; None for the number of ranks."""
        factor: float | None = self._of.gradient_divide_factor
        return factor

    @property
    def state(self) -> str:
        """Returns the name of FSDP2's TrainingState, such as "FORWARD" or "PRE_BACKWARD"; "" if it has none."""
        return getattr(getattr(self._of, "_training_state", None), "name", "")

    def wait_for_reduction(self, device: torch.device) -> None:
        """Makes the current stream wait for the last reduction of another backward."""
        if self._of._post_reduce_event is not None:
            current_stream(device).wait_event(self._of._post_reduce_event)


def groups_of(module: Any, function: str) -> list[Group]:
    """Returns FSDP2's groups of a module's parameters, one for each mesh.

    Raises TypeError if FSDP2 keeps them in another way.
    """
    try:
        state = module._get_fsdp_state()
        every = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        return [Group(group) for group in every if group is not None]
    except AttributeError as error:
        expected, got = "those of an FSDP2 that is made as this needs it", f"torch {torch.__version__}: {error}"
        raise checks.bad_type(function, "modules", expected, got) from error


def is_in_backward() -> bool:
    """Returns whether autograd runs a backward on this thread, see `_current_graph_task_id`."""
    return torch._C._current_graph_task_id() != -1


#: The `__torch_function__` of a subclass of Tensor that overrides operators alone.
only_dispatch: Any = torch._C._disabled_torch_function_impl


def without_memory(kind: Any, like: Tensor) -> Any:
    """Returns a tensor of a subclass, for autograd of the same shape, strides, dtype and device as `like`."""
    options: dict[str, Any] = {"strides": like.stride(), "dtype": like.dtype, "device": like.device}
    return Tensor._make_wrapper_subclass(kind, like.shape, **options)
