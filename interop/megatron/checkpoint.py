"""The experts' state under Megatron's names, expert by expert: in state dicts, and in sharded ones."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch.distributed.tensor import DTensor

LINEARS = ("linear_fc1", "linear_fc2")


def _parameters(experts: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The name of each linear, "weight" or "bias", and the parameter of all experts."""
    for name in LINEARS:
        for kind in ("weight", "bias"):
            if (parameter := getattr(getattr(experts, name), kind)) is not None:
                yield name, kind, parameter


def write_indexed(experts: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of `state_dict`: has weight0, weight1 and so on, views, in the place of each weight."""
    for name, kind, _parameter in _parameters(experts):
        stacked = state_dict.pop(f"{prefix}{name}.{kind}")
        if isinstance(stacked, DTensor):
            expected = "parameters of plain tensors, as checkpoints of Megatron-FSDP want one per expert"
            raise TypeError(f"MoeblazeGroupedMLP.state_dict: {name}.{kind}: expected {expected}, got a DTensor")
        state_dict.update({f"{prefix}{name}.{kind}{i}": of_expert for i, of_expert in enumerate(stacked)})


def read_indexed(experts: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`: puts each weight in the place of its experts', and drops what holds no weights."""
    indices = range(experts.num_local_experts)
    for name, kind, _parameter in _parameters(experts):
        for form in (f"{prefix}{name}.{kind}{{}}", f"{prefix}local_experts.{{}}.{name}.{kind}"):
            keys = [form.format(i) for i in indices]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{name}.{kind}"] = torch.stack([state_dict.pop(key) for key in keys])
    extra = re.compile(re.escape(prefix) + r"(local_experts\.\d+\.)?linear_fc[12]\._extra_state\d*")
    for key in [key for key in state_dict if extra.fullmatch(key)]:
        del state_dict[key]


def sharded(experts: Any, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
    """`sharded_state_dict` of the experts. metadata: with "singleton_local_shards", each expert has keys of its own."""
    groups, n = experts.groups, experts.num_local_experts
    first, total = get_pg_rank(groups.ep) * n, get_pg_size(groups.ep) * n
    single = metadata.get("singleton_local_shards", False)
    of_data = get_pg_rank(groups.expt_dp)
    replica, of_extra = (0, 0, of_data), (0, get_pg_rank(groups.expt_tp), of_data)
    state: dict[str, Any] = {}
    for name, kind, parameter in _parameters(experts):
        parts = 2 if name == "linear_fc1" and experts.config.gated_linear_unit else 1
        shards = _Shards(name, offsets, first, total, single, parts, groups.expt_tp)
        key = f"{prefix}experts.{name}.{kind}"
        state[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(key, parameter, shards.build, shards.merge, replica)
        for i in range(n):  # Megatron's experts keep nothing there, but expect it in a checkpoint
            of_expert = prefix + shards.of_expert(f"experts.{name}._extra_state", i)
            extra = make_sharded_object_for_checkpoint(None, of_expert, shards.offsets_of(i), of_extra)
            state[f"{prefix}{name}._extra_state{i}"] = extra
    return state


class _Shards:
    """How a weight (E, rows, columns) or a bias (E, rows) lies in a checkpoint, or a state of the optimizer."""

    def __init__(
        self, name: str, offsets: tuple[Any, ...], first: int, total: int, single: bool, parts: int, group: Any
    ) -> None:
        """offsets: of dimensions in front, such as layers. first, total: experts. parts: gate and up, or one."""
        self.name, self.offsets, self.single, self.parts = name, offsets, single, parts
        self.first, self.total = first, total
        self.rank, self.size = get_pg_rank(group), get_pg_size(group)

    def of_expert(self, key: str, i: int) -> str:
        """`key` for local expert i."""
        head, found, tail = key.rpartition(f"experts.{self.name}")
        return f"{head}experts.{self.first + i}.{self.name}{tail}" if self.single and found else key

    def offsets_of(self, i: int) -> tuple[Any, ...]:
        return self.offsets if self.single else (*self.offsets, (len(self.offsets), self.first + i, self.total))

    @torch.no_grad()
    def build(self, key: str, stacked: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[list[Any]]:
        """Returns the ShardedTensors of each expert. key: of the weight, or the optimizer's own."""
        if flattened_range is not None:
            expected = "None, as the state of a part of a weight is not served"
            raise ValueError(f"MoeblazeGroupedMLP: flattened_range: expected {expected}, got {flattened_range}")
        return [self._of_expert(self.of_expert(key, i), i, weight, replica_id) for i, weight in enumerate(stacked)]

    def _of_expert(self, key: str, i: int, weight: torch.Tensor, replica_id: Any) -> list[Any]:
        offsets = self.offsets_of(i)
        axis = len(offsets) + (self.name == "linear_fc2" and weight.dim() == 2)
        apart = self.single and self.parts == 2  # gate and up under names of their own
        shards = []
        for part, tensor in enumerate(weight.chunk(self.parts)):
            of_part = key + ("_w", "_v")[part] if apart else key
            place, places = (self.rank, self.size) if apart else (part * self.size + self.rank, self.parts * self.size)
            shards.append(
                ShardedTensor.from_rank_offsets(
                    of_part,
                    tensor,
                    *offsets,
                    (axis, place, places),
                    replica_id=replica_id,
                    prepend_axis_num=len(offsets),
                )
            )
        return shards

    @torch.no_grad()
    def merge(self, loaded: list[list[torch.Tensor]]) -> torch.Tensor:
        """The inverse of `build`, of what was loaded."""
        return torch.stack([torch.cat(parts) for parts in loaded])
