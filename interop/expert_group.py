"""The group of ranks that experts are spread over, and the counts of what it had no room for."""

from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy import checks
from moeblaze_cupy.interop import collectives
from moeblaze_cupy.interop.peers import Peers

Tensor = torch.Tensor
ROUTES = ("auto", "exact", "gather", "static", "pull")
OVERFLOWS = ("chunk", "drop", "raise")


class RankGroup:
    """The options of an `ExpertGroup`, which all ranks have agreed on, and what it counts."""

    _numbers = 0  # the highest that is in use

    def __init__(
        self,
        group: Any,
        num_experts: int,
        *,
        route: str = "auto",
        rows: int | None = None,
        slots: int | None = None,
        on_overflow: str | None = None,
        keep_received: bool = True,
        spare_multiprocessors: int = 0,
    ) -> None:
        if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
            if group.ndim != 1:
                expected = "a process group or a one-dimensional DeviceMesh"
                names, last = group.mesh_dim_names, (group.mesh_dim_names or ["ep"])[-1]
                got = f'a mesh of {names}: pass mesh["{last}"]'
                raise ValueError(f"ExpertGroup: group: expected {expected}, got {got}")
            group = group.get_group()
        group = dist.group.WORLD if group is None else group
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("ExpertGroup: group: expected one that this process is in, got another")
        self.num_experts = checks.integer("ExpertGroup", "num_experts", num_experts)
        checks.one_of("ExpertGroup", "route", route, ROUTES)
        self.route = "exact" if route == "auto" else route
        exact = self.route == "exact"
        on_overflow = on_overflow or ("chunk" if exact else "raise")
        checks.one_of("ExpertGroup", "on_overflow", on_overflow, OVERFLOWS if exact else OVERFLOWS[1:])
        self.on_overflow = on_overflow
        for name, value in (("rows", rows), ("slots", slots)):
            if value is not None and checks.integer("ExpertGroup", name, value) < 1:
                raise checks.bad_value("ExpertGroup", name, "None, or at least 1", value)
        if rows is not None and self.route != "static":
            raise checks.bad_value("ExpertGroup", "rows", f'None for route "{self.route}"', rows)
        self.rows, self.slots, self.keep_received = rows, slots, bool(keep_received)
        self.spare_multiprocessors = checks.spare_multiprocessors("ExpertGroup", spare_multiprocessors, None)
        self.number = self._agree()  #: the same on all ranks, another for every ExpertGroup of a rank
        if self.num_experts < 1 or self.num_experts % self.size:
            expected = f"a multiple of the group's {self.size} ranks"
            raise checks.bad_value("ExpertGroup", "num_experts", expected, num_experts)
        if self.route == "pull" and "nccl" not in dist.get_backend(group):
            backend = dist.get_backend(group)
            raise ValueError(f'ExpertGroup: route: expected another than "pull" on a group of {backend}, got "pull"')
        self.calls = 0
        self.peers = Peers(group)  # of route "pull"
        self._overflow: tuple[Tensor, Any, int] | None = None  # counted by an earlier call

    @property
    def local_experts(self) -> int:
        """E/P."""
        return self.num_experts // self.size

    def _agree(self) -> int:
        """Raises ValueError on all ranks if their options differ; returns the group's number."""
        names = ("num_experts", "route", "rows", "slots", "on_overflow", "keep_received")
        options = {"kind": type(self).__name__} | {name: getattr(self, name) for name in names}
        here = options | {"numbers": RankGroup._numbers}
        by_rank: list[Any] = [None] * self.size
        with collectives.named("options of ExpertGroup", self.group):
            dist.all_gather_object(by_rank, here, group=self.group)
        # Ranks may have made unequally many groups with others, so it is the highest of all that counts.
        RankGroup._numbers = 1 + max(other["numbers"] for other in by_rank)
        for name in options:
            for rank, other in enumerate(by_rank):
                if other[name] != by_rank[0][name]:
                    got = f"{name}={by_rank[0][name]!r} on rank 0 and {name}={other[name]!r} on rank {rank}"
                    raise ValueError(f"ExpertGroup: options: expected the same on all ranks, got {got}")
        return RankGroup._numbers

    def count_overflow(self, dropped: Tensor | None) -> None:
        """Remembers a count of what was dropped; a later call raises for it if that was asked for.

        Nothing can be dropped where the count is None. In a CUDA graph no host reads it, and nothing is raised.
        """
        if dropped is None or self.on_overflow != "raise" or self.route == "exact" or _is_captured(dropped):
            return
        arrived = None
        if dropped.is_cuda:
            on_host = torch.empty(dropped.shape, dtype=dropped.dtype, pin_memory=True)
            dropped = on_host.copy_(dropped, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            arrived.record()
        self._overflow = dropped, arrived, self.calls

    def check_overflow(self) -> None:
        """Raises ValueError for what an earlier call has dropped, as far as that is known; never waits."""
        if self._overflow is None:
            return
        dropped, arrived, call = self._overflow
        if arrived is not None and (torch.cuda.is_current_stream_capturing() or not arrived.query()):
            return
        self._overflow = None
        number = int(dropped.sum())
        if number:
            expected = f"no more than rows={self.rows}, slots={self.slots} in call {call}"
            raise ValueError(f"exchange: rows: expected {expected}, got {number} more; raise them or use None")


def _is_captured(tensor: Tensor) -> bool:
    """Whether what is done with the tensor now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
