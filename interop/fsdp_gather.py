"""All-gathers of FSDP2 by copy engines, which bring large parameters straight to where products read them.

FSDP2 would copy a rank's shards into one buffer, and on the stream of the products what was gathered out of it. For
tensors with the hooks `fsdp_pre_all_gather` and `fsdp_post_all_gather` it leaves the place of a parameter to them.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from moeblaze_cupy import checks, loader
from moeblaze_cupy.interop.peers import Form, Offered, Peers, others, shared_memory

Tensor = torch.Tensor
TURNS = 2  # of memory that the next all-gather must not write yet, as the one before may still be read
STRAIGHT_BYTES = 2**25  # of a parameter, from which the copies take longer than the calls that avoid them


def _stream_of_its_own(device: torch.device) -> tuple[Any, Any]:
    """A stream that nobody else has, and what keeps it.

    torch hands out 32 streams in turn, so one of torch's may be a caller's as well.
    """
    if device.type != "cuda":
        return getattr(torch, device.type).Stream(), None
    cuda = loader.import_cupy().cuda
    with cuda.Device(device.index):
        made = cuda.Stream(non_blocking=True)
    return torch.cuda.ExternalStream(made.ptr, device), made  # type: ignore[no-untyped-call]  # torch has no types here


class Memory:
    """What all-gathers of the same ranks share: their turns, and memory for whole parameters.

    FSDP2 frees a whole parameter when the host has called what reads it, which the GPU may not have run. So an
    all-gather takes memory from the pool of a stream that runs nothing, of TURNS pools in turn. Before it writes, it
    waits for the readers of what was freed in this pool. It need not wait for those of the module before, which runs.
    """

    def __init__(self, peers: Peers, rank: int, size: int) -> None:
        self.peers, self.rank, self.size, self.turn = peers, rank, size, 0
        self.opened: Any = None  # event: no rank reads any longer what was offered before the last all-gather
        self.ended: tuple[Any, Any] | None = None  # the stream of the last all-gather's first part, event of its end
        self._pools: list[tuple[Any, Any]] = []  # a stream each, and what keeps it
        self._used: dict[Shard, int] = {}  # the turn whose pool a whole parameter has memory of
        self._freed: list[list[Any]] = [[] for _ in range(TURNS)]  # events: nobody reads what was freed in a pool

    def begin(self, device: torch.device) -> None:
        """Of an all-gather, on the first stream that it runs on."""
        streams = getattr(torch, device.type)
        stream = streams.current_stream()
        if not self._pools:
            self._pools = [_stream_of_its_own(device) for _ in range(TURNS)]
        self.turn = (self.turn + 1) % TURNS
        self.note_freed()
        for event in self._freed[self.turn]:
            stream.wait_event(event)
        self._freed[self.turn].clear()
        if self.ended is not None and self.ended[0] != stream:  # barriers have one order, on whatever stream they run
            stream.wait_event(self.ended[1])

    def allocate(self, shard: "Shard") -> None:
        """Gives a whole parameter memory, where it has none."""
        for whole in shard.inner:
            storage = whole.untyped_storage()
            if not storage.size():
                with getattr(torch, whole.device.type).stream(self._pools[self.turn][0]):
                    storage.resize_(whole.nbytes)
                self._used[shard] = self.turn

    def note_freed(self) -> None:
        """Of parameters that FSDP2 has freed: from now on their streams run nothing that reads them."""
        for shard in [shard for shard in self._used if not shard.inner[0].untyped_storage().size()]:
            self._freed[self._used.pop(shard)].append(shard.stream.record_event())


class Shard:
    """A rank's part of a parameter of E rows, with the hooks that FSDP2 calls.

    local (E / ranks, ...): contiguous. If it has the dtype that travels, it moves to symmetric memory, where the other
    ranks read it. Otherwise each all-gather writes it to a buffer that they read.
    """

    forms: tuple[Form, ...] = ()  #: of what each all-gather writes to a buffer that the other ranks read
    at: list[Tensor] | None = None  #: by rank, where the parts lie, if in memory of their own
    gather: "AllGather | None" = None
    owner: Any = None  #: `fsdp_sums.Owner` of what has this part's gradient
    stream: Any = None  #: of what reads the whole parameter

    def __init__(self, memory: Memory, local: Tensor, dtype: torch.dtype, group: Any) -> None:
        if local.dtype == dtype:
            buffer, self._handle = shared_memory(local.nbytes, local.device, group)
            local = buffer.view(dtype).view(local.shape).copy_(local)
            self.at = [self._handle.get_buffer(rank, local.shape, dtype, 0) for rank in range(memory.size)]
        else:
            self.forms = ((tuple(local.shape), dtype),)
        self.whole = local.new_empty((memory.size * len(local), *local.shape[1:]), dtype=dtype)
        self.whole.untyped_storage().resize_(0)
        self.parts = self.whole.view(memory.size, *local.shape)
        self.inner = [self.whole]  #: what has memory while the parameter is whole, which FSDP2 then frees
        self.hook(memory, local)

    def hook(self, memory: Memory, local: Tensor) -> None:
        """Has FSDP2 call this for `local`."""
        self._memory, self.local = memory, local
        self._for_fsdp = self.whole.new_empty(16 // self.whole.itemsize)  # that its own all-gather has something
        local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]  # FSDP2 looks there
        local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def show(self, staged: list[tuple[Tensor, Offered]]) -> list[tuple[Tensor, list[Tensor]]]:
        """Has the other ranks see this rank's part. staged: a buffer of each of `forms`.

        Returns what is to be copied: places by rank, and by rank what comes there.
        """
        if self.at is not None:
            return [(self.parts, self.at)]
        ((room, offered),) = staged
        room.copy_(self.local)
        return [(self.parts, offered.at)]

    def made(self) -> Tensor:
        """What FSDP2 makes the whole parameter of."""
        return self.whole.data  # autograd counts the writes to a tensor that it has saved; this has a count of its own

    def __deepcopy__(self, memo: Any) -> "Shard":
        """For the copy of a parameter: its hooks raise, as they would gather this one."""
        twin = object.__new__(Shard)
        twin.gather = twin.owner = None
        return twin

    def __reduce__(self) -> Any:
        expected = "the module's state_dict(), or detach() of its parameters"
        raise TypeError(f"CopyEngines: pickle: expected {expected}, got a parameter that serve was called with")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """On a stream of FSDP2 beside the products': gets memory for the whole, and shows others this rank's part."""
        if self.gather is None:
            raise other_parameters()
        self.gather.start(self)
        return (self._for_fsdp,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """On the products' stream, which waits for the copies. The first time FSDP2 is told where the whole lies."""
        self.stream = getattr(torch, self.local.device.type).current_stream()
        self._memory.note_freed()
        return (self.made(), self.inner) if out is None else None


class AllGather:
    """Of one module, as FSDP2 calls it after the shards' hooks. Other parameters travel in the given tensors.

    A barrier comes before the copies, when all ranks have written their parts. Where parts lie in memory of their own
    another comes after them, so that whatever follows on any rank may change its part, as an optimizer does.
    """

    def __init__(self, memory: Memory, shards: list[Shard]) -> None:
        self._memory, self._shards = memory, shards
        self._forms = tuple(form for shard in shards for form in shard.forms)
        self._staged: list[tuple[Tensor, Offered]] = []
        self._started: dict[Shard, list[tuple[Tensor, list[Tensor]]]] = {}  # what is to be copied, as of `Shard.show`
        self._stream: Any = None
        for shard in shards:
            shard.gather = self

    def start(self, shard: Shard) -> None:
        """Of one of the shards, all of which come before the other calls."""
        if not self._started or shard in self._started:  # or the last call has failed
            self._begin(shard.local.device)
        copies = shard.show([self._staged.pop(0) for _ in shard.forms])
        self._memory.allocate(shard)
        self._started[shard] = copies

    def _begin(self, device: torch.device) -> None:
        memory = self._memory
        memory.begin(device)
        self._started, self._stream = {}, getattr(torch, device.type).current_stream()
        if self._forms:
            if memory.opened is not None:
                self._stream.wait_event(memory.opened)
            self._staged = list(zip(*memory.peers.arrays(f"shards {memory.turn}", self._forms, device), strict=True))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of torch, for parameters without hooks. FSDP2 may hold as many results at once as it likes."""
        if len(self._started) < len(self._shards):
            self._started = {}
            raise other_parameters()
        if not self._shards:
            self._begin(device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        memory, own = self._memory, input_tensor.view(-1)
        rank, stream = memory.rank, getattr(torch, own.device.type).current_stream()
        offered = memory.peers.offer(f"parameters {memory.turn}", [own], len(own))[0]
        memory.opened = stream.record_event()
        places = output_tensor.view(memory.size, -1)
        copies = [copy for of_shard in self._started.values() for copy in of_shard]
        pairs = [(parts[rank], at[rank]) for parts, at in copies]
        if places[rank].data_ptr() != own.data_ptr():
            pairs.append((places[rank], own))
        wait_for_own = memory.peers.copy(pairs) if pairs else None  # beside the others, which come over links
        for other in others(rank, memory.size):
            places[other].copy_(offered.at[other])
            for parts, at in copies:
                parts[other].copy_(at[other])
        if wait_for_own is not None:
            wait_for_own()
        if any(shard.at is not None for shard in self._shards):
            memory.peers.close()
        memory.ended = self._stream, stream.record_event()
        self._started = {}


def other_parameters() -> RuntimeError:
    """The error of parameters that `CopyEngines.serve` has not been called with."""
    expected = "those that serve was called with"
    got = "others, as after load_state_dict(assign=True) or a conversion: call serve again"
    return RuntimeError(f"CopyEngines: parameters: expected {expected}, got {got}")


# What is read and set here of FSDP2, beside its interface.
_of_group = attrgetter(
    *("fsdp_params", "mesh_info", "mp_policy", "_use_post_forward_mesh"),
    *("reduce_grads", "gradient_divide_factor", "_all_reduce_hook", "_post_reduce_event"),
)
_of_parameter = attrgetter(
    *("sharded_param._local_tensor", "fsdp_placement.dim", "offload_to_cpu", "all_gather_outputs"),
    *("_orig_size", "_sharded_param_data", "_init_extensions", "_module_info.module", "_module_info.param_name"),
    *("unsharded_accumulated_grad", "to_sharded_dtensor"),
)


def groups_of(module: Any) -> list[Any]:
    """FSDP2's groups of a module's parameters, one for each mesh. TypeError where FSDP2 keeps them in another way."""
    try:
        state = module._get_fsdp_state()
        every = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        groups = [group for group in every if group is not None]
        for group in groups:
            for parameter in _of_group(group)[0]:
                _of_parameter(parameter)
    except AttributeError as error:
        expected = "those of an FSDP2 that is made as this needs it"
        raise checks.bad_type(
            "CopyEngines.serve", "modules", expected, f"torch {torch.__version__}: {error}"
        ) from error
    return groups


def goes_straight(parameter: Any, group: Any, size: int) -> torch.dtype | None:
    """The dtype in which a parameter of FSDP2's group travels, if it can by hooks and is large enough."""
    local = parameter.sharded_param._local_tensor
    dtype: torch.dtype = group.mp_policy.param_dtype or local.dtype
    rows = parameter._orig_size[0] if len(parameter._orig_size) else 0
    is_plain = type(local) is Tensor and local.is_floating_point() and not local.is_meta
    if size == 1 or parameter.offload_to_cpu or not is_plain:
        return None
    if parameter.fsdp_placement.dim != 0 or rows % size or size * local.numel() * dtype.itemsize < STRAIGHT_BYTES:
        return None
    return dtype


def straight_of(group: Any, size: int) -> dict[Any, torch.dtype]:
    """The parameters of FSDP2's group that travel by hooks, and in which dtype."""
    found = {parameter: goes_straight(parameter, group, size) for parameter in group.fsdp_params}
    return {parameter: dtype for parameter, dtype in found.items() if dtype is not None}


def shards_of(
    straight: dict[Any, torch.dtype], memory: Memory, process_group: Any, made: Mapping[Any, Shard]
) -> list[Shard]:
    """Those of the parameters of `straight_of`, whose hooks FSDP2 then calls. A collective call.

    made: shards of some of them; the others' are made here.
    """
    shards = []
    for parameter, dtype in straight.items():
        shard = made.get(parameter) or Shard(memory, parameter.sharded_param._local_tensor, dtype, process_group)
        parameter.sharded_param._local_tensor = shard.local
        parameter._sharded_param_data = shard.local.view(-1)
        parameter._init_extensions()
        # where a forward has run before, FSDP2 has made a whole parameter that is not the shard's
        parameter.__dict__.pop("_unsharded_param", None)
        parameter.all_gather_outputs = []
        shards.append(shard)
    return shards
