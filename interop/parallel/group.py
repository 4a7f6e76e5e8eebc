"""The group of ranks that experts are spread over, and the counts of rows and slots that found no room."""

import socket
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy import checks
from moeblaze_cupy.interop.parallel import collectives, hosts
from moeblaze_cupy.interop.parallel.peers import TIMEOUT_MS, Peers

Tensor = torch.Tensor
ROUTES = ("auto", "exact", "static", "pull")
OVERFLOWS = ("chunk", "drop", "raise")
MAX_PASSED = 64  # calls that are remembered; varying numbers of tokens bring ever new ones


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
        on_nccl, self.devices = backend_of(group)  # kinds of devices whose tensors travel; headers do on the first
        error: Exception | None = None
        try:
            _check_options(num_experts, route, rows, slots, on_overflow)
            self.num_experts, self.keep_received = int(num_experts), bool(keep_received)
        except (TypeError, ValueError) as found:  # the others are to be told first
            error = found
        self.route, self.rows, self.slots, self.on_overflow = route, rows, slots, on_overflow
        # The layer of "pull" would have memory for all slots of all ranks without a bound. With one it cannot compute
        # in pieces, so it is only chosen for callers who said what else becomes of an overflow.
        is_bounded = error is None and slots is not None and on_overflow in ("drop", "raise")
        may_pull = on_nccl and is_bounded and route == "auto"
        #: the connection by which ranks tell each other where they are, without their GPUs
        self.hosts: hosts.HostMemory | hosts.HostGloo | None = hosts.connected(group) if on_nccl else None
        self.number = 0
        #: the same on all ranks, another for each ExpertGroup
        self.number = self._agree(this_gpu() if may_pull else None, error)
        if self.num_experts < 1 or self.num_experts % self.size:
            expected = f"a multiple of the group's {self.size} ranks"
            raise checks.bad_value("ExpertGroup", "num_experts", expected, num_experts)
        if self.route == "pull" and not on_nccl:
            backend = dist.get_backend(group)
            raise ValueError(f'ExpertGroup: route: expected another than "pull" on a group of {backend}, got "pull"')
        if self.on_overflow is None:
            self.on_overflow = "chunk" if self.route == "exact" else "raise"
        self.calls = 0
        self._passed: set[Any] = set()  # keys of calls whose arguments have passed the checks
        self.peers = Peers(group)  # used by route "pull"
        self.hosts = None
        if on_nccl and self.route != "static":
            words, timeout = len(collectives.SAME), TIMEOUT_MS / 1000
            self.hosts = hosts.connect(self.number, words, timeout, group, only_memory=self.route == "exact")
        # Counts by earlier calls, on the host or on their way there: the count, the event of its arrival, the call.
        self._overflows: deque[tuple[Tensor, Any, int]] = deque()
        self._read: list[tuple[Tensor, Any]] = []  # memory and events of those that have been read

    def has_passed(self, key: Any) -> bool:
        """Returns whether `note_passed` was called with this key of `runtime.key_of`."""
        try:
            return key in self._passed
        except TypeError:  # an option that is not hashable is not a valid one
            return False

    def note_passed(self, key: Any) -> None:
        """Remembers that a call's arguments passed the checks. Forgets the others if they are many."""
        if len(self._passed) >= MAX_PASSED:
            self._passed.clear()
        self._passed.add(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankGroup":
        """Returns itself: a process group has no copies, and ranks count the calls of all layers of one ExpertGroup."""
        return self

    def meet(self, step: str, call: int = 0, failed: bool = False, **same: int) -> None:
        """Raises one ValueError on all ranks unless all are at this step of this call, before they send anything.

        step: one of `collectives.STEPS`. failed: this rank has an error of its own to raise, of which it tells the
        others. same: what else must be the same, by the names in `collectives.SAME`. Nothing is compared where the host
        would have to wait for a GPU.
        """
        what = f"{step} (call {call})" if call else step
        values = collectives.header(
            failed=failed,
            step=collectives.STEPS.index(step),
            group=self.number,
            call=call,
            **same,
        )
        header: collectives.PendingHeaders | hosts.HostHeaders
        if self.hosts is not None:
            header = self.hosts.send(values, what)
        elif self.devices[0] == "cpu":  # it has as many integers as headers with counts
            on_host = torch.tensor([values + 2 * self.size * [0]], dtype=torch.int64, device="cpu")
            header = collectives.PendingHeaders(collectives.all_gather(on_host, what, self.group))
        else:
            return
        if failed:
            header.sent()
        else:
            collectives.check_same(header.read(), same_tokens=False)

    @property
    def local_experts(self) -> int:
        """Returns the number of this rank's experts, E/P."""
        return self.num_experts // self.size

    def _agree(self, gpu: Any, error: Exception | None) -> int:
        """Raises ValueError on all ranks if their options differ. Returns the group's number, and decides on "auto".

        gpu: what `this_gpu` returned, or None where "auto" is "exact". error: this rank's own, raised once all know.
        """
        names = ("num_experts", "route", "rows", "slots", "on_overflow", "keep_received")
        options = {name: getattr(self, name) for name in names} if error is None else {}
        self.meet("options of ExpertGroup")
        here = options | {"failed": error is not None, "numbers": RankGroup._numbers, "gpu": gpu}
        with collectives.named("options of ExpertGroup", self.group):
            by_rank = collectives.gather_objects(here, self.group)
        if error is not None:
            raise error
        if failed := [rank for rank, other in enumerate(by_rank) if other["failed"]]:
            expected = "ones that pass the checks on all ranks"
            raise ValueError(f"ExpertGroup: options: expected {expected}, got errors on {failed}")
        # Ranks may have made unequally many groups with others, so it is the highest of all that counts.
        RankGroup._numbers = 1 + max(other["numbers"] for other in by_rank)
        for name in options:
            for rank, other in enumerate(by_rank):
                if other[name] != by_rank[0][name]:
                    got = f"{name}={by_rank[0][name]!r} on rank 0 and {name}={other[name]!r} on rank {rank}"
                    raise ValueError(f"ExpertGroup: options: expected the same on all ranks, got {got}")
        if self.route == "auto":
            self.route = "pull" if reach_each_other([other["gpu"] for other in by_rank]) else "exact"
        return RankGroup._numbers

    def count_overflow(self, dropped: Tensor | None) -> None:
        """Remembers a count of dropped rows or slots. With on_overflow="raise" a later call raises for it.

        Nothing can be dropped where the count is None. In a CUDA graph no host reads it, and nothing is raised.
        """
        if dropped is None or self.on_overflow != "raise" or self.route == "exact" or _is_captured(dropped):
            return
        arrived = None
        if dropped.is_cuda:
            if not self._read:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
                with torch.inference_mode(False):  # training also writes memory that inference allocates
                    count = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
                    self._read.append((count, event))
            on_host, arrived = self._read.pop()
            dropped = on_host.copy_(dropped, non_blocking=True)
            arrived.record()
        self._overflows.append((dropped, arrived, self.calls))

    def check_overflow(self, function: str) -> None:
        """Raises ValueError if an earlier call has dropped something, as far as the host knows. It never waits.

        function: what the caller called. Calls are launched ahead of the GPU, so several counts may be on their way.
        """
        while self._overflows:
            dropped, arrived, call = self._overflows[0]
            if arrived is not None and (torch.cuda.is_current_stream_capturing() or not arrived.query()):
                return
            self._overflows.popleft()
            number = int(dropped)
            if arrived is not None:
                self._read.append((dropped, arrived))
            if number:
                # The count is of rows and slots together.
                bounds = {name: of for name, of in (("rows", self.rows), ("slots", self.slots)) if of is not None}
                name, limits = " or ".join(bounds), ", ".join(f"{name}={of}" for name, of in bounds.items())
                got = f"{number} more; raise {name} or use None"
                raise checks.bad_value(function, name, f"no more than {limits} in call {call}", got)


def _check_options(num_experts: Any, route: Any, rows: Any, slots: Any, on_overflow: Any) -> None:
    """Checks options of `ExpertGroup` but for those that depend on the process group."""
    checks.integer("ExpertGroup", "num_experts", num_experts)
    checks.one_of("ExpertGroup", "route", route, ROUTES)
    if on_overflow is not None:
        may_chunk = route in ("auto", "exact")
        checks.one_of("ExpertGroup", "on_overflow", on_overflow, OVERFLOWS if may_chunk else OVERFLOWS[1:])
    for name, value in (("rows", rows), ("slots", slots)):
        if value is not None and checks.integer("ExpertGroup", name, value) < 1:
            raise checks.bad_value("ExpertGroup", name, "None, or at least 1", value)
    if rows is not None and route != "static":
        raise checks.bad_value("ExpertGroup", "rows", f'None for route "{route}"', rows)


def backend_of(group: Any) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the group is on NCCL, and the kinds of devices it carries, NCCL's or else the CPU first."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get("cuda") != "nccl" or not torch.cuda.is_available():  # both may be configured without a GPU
        return False, tuple(device for device in collectives.DEVICES if backends.get(device, "nccl") != "nccl")
    return True, ("cuda",) if backends.get("cpu", "nccl") == "nccl" else ("cuda", "cpu")


def this_gpu() -> tuple[str, str, list[str]]:
    """Returns this process's host, its GPU, and the GPUs whose memory this GPU can access."""
    here, devices = torch.cuda.current_device(), range(torch.cuda.device_count())
    names = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    others = [names[i] for i in devices if i != here and torch.cuda.can_device_access_peer(here, i)]
    return socket.gethostname(), names[here], others


def reach_each_other(gpus: list[Any]) -> bool:
    """Returns whether all ranks' GPUs can read each other's memory. gpus: `this_gpu`'s results by rank, or None."""
    if None in gpus or len({host for host, _, _ in gpus}) > 1:
        return False
    names = [name for _, name, _ in gpus]
    return len(set(names)) == len(names) and all(set(names) <= {name, *others} for _, name, others in gpus)


def _is_captured(tensor: Tensor) -> bool:
    """Returns whether work on the tensor now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
