"""Experimental: all-gathers of FSDP2 by copy engines, which bring large parameters straight to where they are read.

FSDP2 would copy a rank's shards into one buffer, and gathered parameters out of it on the stream of the products. For
tensors with the hooks `fsdp_pre_all_gather` and `fsdp_post_all_gather` it leaves the place of a parameter to them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from moeblaze_cupy.interop.fsdp.memory import Memory, Place, Shared, Whole
from moeblaze_cupy.interop.fsdp.private import Group, Parameter
from moeblaze_cupy.interop.parallel.driver import current_stream
from moeblaze_cupy.interop.parallel.peers import Form, others
from moeblaze_cupy.interop.torch import sums as torch_sums

Tensor = torch.Tensor
STRAIGHT_BYTES = 2**25  # bytes of a parameter from which the copies take longer than the calls that avoid them


class Shard:
    """A rank's part of a parameter of E rows, with the hooks that FSDP2 calls.

    local (E / ranks, ...): contiguous. If it has the dtype that travels, it moves to memory that the other ranks read.
    Otherwise each all-gather writes it to a buffer that they read.
    """

    forms: tuple[Form, ...] = ()  #: forms of arrays that each all-gather writes to a buffer for the other ranks
    part: Shared | None = None  #: the array that the other ranks read, if it is the parameter's own memory
    gather: "AllGather | None" = None
    owner: Any = None  #: the `fsdp_sums.ShardReducer` of this part's gradient, for `torch_sums`
    name = ""  #: the parameter's name in its module
    stream: Any = None  #: the stream of the whole parameter's readers
    whole: Tensor  #: the form that products read
    inner: list[Tensor]  #: tensors that have memory while the parameter is whole; FSDP2 frees it after that
    _whole: Whole | None = None

    def __init__(self, memory: Memory, local: Tensor, dtype: torch.dtype) -> None:
        form = tuple(local.shape), dtype
        if local.dtype == dtype:
            self.part = memory.share(form, local.device)
            local = self.part.own.copy_(local)
        else:
            self.forms = (form,)
        self.keep(memory, local, dtype)

    def keep(self, memory: Memory, local: Tensor, dtype: torch.dtype) -> None:
        """Keeps this rank's part. dtype: the whole parameter's."""
        self._memory, self.local = memory, local
        self._for_fsdp = local.new_empty(16 // dtype.itemsize, dtype=dtype)  # something for its own all-gather

    def hook(self, parameter: Parameter) -> None:
        """Makes FSDP2 call this shard's hooks for its parameter."""
        local, self.name = self.local, parameter.name
        torch_sums.register(self.whole, self)
        local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]  # FSDP2 looks there
        local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
        parameter.gather_from(local)

    def settle(self, place: Place, name: int, rooms: list[Shared], was_captured: bool) -> None:
        """Gives the whole parameter a place. name: this shard's in its module. rooms: a buffer for each of `forms`."""
        part = self.part or rooms[0]
        if self._whole is None:
            self._whole = Whole(self._memory, part, place, name)
            self.whole, self.inner = self._whole.array, [self._whole.freed_by_fsdp]
        self._whole.move(part, place, was_captured)

    def offer(self, rooms: list[Shared]) -> list[tuple[Whole, list[Tensor]]]:
        """Makes this rank's part readable for the other ranks. rooms: a buffer for each of `forms`.

        Returns the copies to do: each destination, and by rank its source.
        """
        assert self._whole is not None
        if self.part is None:
            rooms[0].own.copy_(self.local)
        return [(self._whole, (self.part or rooms[0]).at)]

    @property
    def is_there(self) -> bool:
        """Returns whether the whole parameter has memory. If not, other modules may have it."""
        return self._whole is not None and self._whole.is_there

    def expect_there(self) -> None:
        if not self.is_there:
            expected, got = "a gathered parameter", "one that FSDP2 has freed"
            raise RuntimeError(f"CopyEngines: {self.name}: expected {expected}, got {got}")

    def made(self) -> Tensor:
        """Returns the tensor of which FSDP2 makes the whole parameter."""
        return self.whole.data  # autograd counts the writes to a tensor that it has saved; this has a count of its own

    def __deepcopy__(self, memo: Any) -> "Shard":
        """Makes a shard for the copy of a parameter, whose hooks raise, as they would gather this one."""
        twin = object.__new__(Shard)
        twin.gather = twin.owner = None
        return twin

    def __reduce__(self) -> Any:
        expected = "the module's state_dict(), or detach() of its parameters"
        raise TypeError(f"CopyEngines: pickle: expected {expected}, got a parameter that attach was called with")

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Gives the whole memory, and shows the others this rank's part.

        It runs on a stream of FSDP2 beside the products'.
        """
        if self.gather is None:
            raise other_parameters()
        self.gather.start(self)
        return (self._for_fsdp,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Tells FSDP2, the first time, where the whole lies.

        It runs on the products' stream, which waits for the copies.
        """
        self.stream = current_stream(self.local.device)
        self._memory.note_freed(self.stream)
        return (self.made(), self.inner) if out is None else None


class AllGather:
    """FSDP2's protocol of an all-gather for one module, called after the shards' hooks.

    Parameters without hooks travel in the given tensors. One barrier comes before the copies, when all ranks have
    written their parts. Where parts are the parameters' own memory, another follows the copies, so that an optimizer
    may then change them.
    """

    def __init__(self, memory: Memory, shards: list[Shard], group: Group | None) -> None:
        """Gives shards memory. All ranks call it together. group: None for a module without parameters of its own."""
        self._memory, self.shards, self._group = memory, shards, group
        self._rooms: dict[Shard, list[Shared]] = {}
        self._started: dict[Shard, list[tuple[Whole, list[Tensor]]]] = {}  # the copies to do, from `Shard.offer`
        self.bank = memory.next_bank(shards)
        self.has_moved = False  #: it has left the bank that it had first
        self.was_captured = False  #: a CUDA graph captured it and has the addresses
        for shard in shards:
            shard.gather = self
        self._settle()

    def _settle(self) -> None:
        """Gives gathered parameters memory of the bank, and the parts buffers."""
        is_kept = self._group is not None and self._group.stays_gathered  # it stays gathered after forward
        for name, shard in enumerate(self.shards):
            forms, device = enumerate(shard.forms), shard.local.device
            rooms = [self._memory.room(self.bank, (name, i), form, device) for i, form in forms]
            shard.settle(Place(self.bank, is_kept and shard.part is not None), name, rooms, self.was_captured)
            self._rooms[shard] = rooms

    def start(self, shard: Shard) -> None:
        """Begins with one of the shards, all of which come before the other calls."""
        if not self._started or shard in self._started:  # or the last call has failed
            self._begin(shard.local.device)
        try:
            copies = self._started[shard] = shard.offer(self._rooms[shard])
            self._memory.use(shard, self.bank, [whole for whole, _ in copies])
        except Exception:
            self.give_up()
            raise

    def _begin(self, device: torch.device) -> None:
        self.give_up()
        self._memory.begin(self, device)
        self._settle()

    def give_up(self) -> None:
        """Frees the memory that a failed call has not handed to FSDP2."""
        for shard in self._started:
            self._memory.free(shard)
        self._started = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory of torch for parameters without hooks, as FSDP2 may hold any number of results at once."""
        if len(self._started) < len(self.shards):
            self.give_up()
            raise other_parameters()
        if not self.shards:
            self._begin(device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        memory, own = self._memory, input_tensor.view(-1)
        rank, offered = memory.rank, memory.offer(own, self.bank)
        places = output_tensor.view(memory.size, -1)
        copies = [copy for of_shard in self._started.values() for copy in of_shard]
        pairs = [(whole.parts[rank], at[rank]) for whole, at in copies if not whole.own_is_mapped]
        if places[rank].data_ptr() != own.data_ptr():
            pairs.append((places[rank], own))
        wait_for_own = memory.peers.copy(pairs) if pairs else None  # they run beside the others, which use links
        for other in others(rank, memory.size):
            places[other].copy_(offered.at[other])
            for whole, at in copies:
                whole.parts[other].copy_(at[other])
        if wait_for_own is not None:
            wait_for_own()
        memory.end(own.device, any(shard.part is not None for shard in self.shards))
        self._started = {}

    @property
    def is_dropped(self) -> bool:
        """Returns whether FSDP2 let go of the result unread, as when it prefetched a module that did not run."""
        return not (self._started or (self._group is not None and self._group.is_gathered))


def other_parameters() -> RuntimeError:
    """Returns the error of parameters that `CopyEngines.attach` has not been called with."""
    expected = "those that attach was called with"
    got = "others, as after load_state_dict(assign=True) or a conversion: call attach again"
    return RuntimeError(f"CopyEngines: parameters: expected {expected}, got {got}")


def straight_of(group: Group, size: int) -> dict[Parameter, torch.dtype]:
    """Returns a group's parameters that are large enough to travel by hooks and can, and their dtype on the way."""
    found: dict[Parameter, torch.dtype] = {}
    for parameter in group.parameters:
        local = parameter.local
        dtype = group.param_dtype or local.dtype
        is_plain = type(local) is Tensor and local.is_floating_point() and not local.is_meta
        is_large = size * local.numel() * dtype.itemsize >= STRAIGHT_BYTES
        if size > 1 and is_plain and is_large and parameter.rows and parameter.rows % size == 0:
            found[parameter] = dtype
    return found


def shards_of(straight: dict[Parameter, torch.dtype], memory: Memory, made: Mapping[Parameter, Shard]) -> list[Shard]:
    """Returns the shards of the parameters of `straight_of`. All ranks call it together.

    made: the shards of some of them. The others' are made here.
    """
    return [made.get(parameter) or Shard(memory, parameter.local, dtype) for parameter, dtype in straight.items()]
