"""Experimental: memory for parameters that all-gathers of FSDP2 bring, and for the parts that other ranks read."""

import weakref
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from moeblaze_cupy.cuda import loader
from moeblaze_cupy.interop.parallel.driver import Addresses, Moment, Physical, capture_of, current_stream, granularity
from moeblaze_cupy.interop.parallel.pages import Descriptors, Pages
from moeblaze_cupy.interop.parallel.peers import Form, Peers, PeerTensor, shared_memory

Tensor = torch.Tensor
BANKS = 2  # the fewest: the next all-gather writes one while the other is read


def _stream_of_its_own(device: torch.device) -> tuple[Any, Any]:
    """Returns a stream that has no other user, and the object that keeps it.

    torch hands out 32 streams in turn, so one of torch's may be a caller's as well.
    """
    if device.type != "cuda":
        return getattr(torch, device.type).Stream(), None
    cuda = loader.import_cupy().cuda
    with cuda.Device(device.index):
        made = cuda.Stream(non_blocking=True)
    return torch.cuda.ExternalStream(made.ptr, device), made  # type: ignore[no-untyped-call]  # torch has no types here


class Bank:
    """Memory that some modules' whole parameters have, one module at a time."""

    def __init__(self) -> None:
        self.used = 0  #: the number of the all-gather that had it last
        self.holder: weakref.ref[Any] | None = None  #: its `AllGather`
        self.freed: list[Moment] = []  #: moments since which no rank reads what FSDP2 has freed
        self.pool: tuple[Any, Any] | None = None  #: a stream that runs nothing, whose memory arrays have; its keeper
        self._blocks: dict[tuple[Any, int], Physical] = {}

    @property
    def nbytes(self) -> int:
        """Returns the bytes that torch.cuda does not count."""
        return sum(nbytes for _, nbytes in self._blocks)

    def block(self, name: Any, nbytes: int, device: int) -> Physical:
        """Returns memory to be mapped, the same for all parts of this name and size."""
        if (name, nbytes) not in self._blocks:
            self._blocks[name, nbytes] = Physical.new(nbytes, device)
        return self._blocks[name, nbytes]


class Memory:
    """The shared state of all-gathers of the same ranks: banks of memory for whole parameters, used by modules in turn.

    FSDP2 frees a whole parameter when the host has called its readers, which the GPU may not have run. So an
    all-gather first waits for the readers of what was freed in its bank. The module that runs meanwhile has another
    bank. If FSDP2 gathers a module whose bank another one still holds, the module moves to another bank for good.
    A module is its `gather.AllGather` here, and its large parameters are `gather.Shard`.
    """

    def __init__(self, peers: Peers, rank: int, size: int, group: Any) -> None:
        self.peers, self.rank, self.size, self._group = peers, rank, size, group
        self._capture = 0  # the last all-gather's capture in a CUDA graph
        self._opened: Moment | None = None  # no rank reads any longer what was offered before the last all-gather
        self._ended: tuple[Any, Moment] | None = None  # the stream of the last all-gather's first part, and its end
        self._last: Bank | None = None  # the last all-gather's bank
        self._first: Any = None  # the stream of this all-gather's first part
        self._banks = [Bank() for _ in range(BANKS)]
        self._modules = self._gathers = 0
        # Parameters that have memory. References are not weak, as ranks collect garbage at different times.
        self._used: dict[Any, Bank] = {}
        self._descriptors: Descriptors | None = None
        self._rooms: dict[tuple[Any, ...], Shared] = {}

    @property
    def nbytes(self) -> int:
        """Returns the bytes that torch.cuda does not count."""
        rooms = sum(room.own.nbytes for room in self._rooms.values())
        return self.peers.nbytes + rooms + sum(bank.nbytes for bank in self._banks)

    def share(self, form: Form, device: torch.device) -> "Shared":
        """Makes an array of each rank that the others read. All ranks call it together."""
        shape, dtype = form
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        with torch.inference_mode(False):  # training also writes memory that inference allocates
            if device.type == "cuda" and nbytes % granularity(device.index) == 0:
                if self._descriptors is None:
                    self._descriptors = Descriptors(self._group)
                pages = Pages(nbytes, device, self._descriptors)
                at = [memory.view(dtype).view(shape) for memory in pages.at]
                return Shared(at[self.rank], at, pages.own, None)
            memory, handle = shared_memory(nbytes, device, self._group)
            at = [handle.get_buffer(rank, shape, dtype, 0) for rank in range(self.size)]
            return Shared(memory.view(dtype).view(shape), at, None, handle)

    def room(self, bank: Bank, name: tuple[int, int], form: Form, device: torch.device) -> "Shared":
        """Returns a buffer that all-gathers of a bank write for the other ranks. All ranks make it together."""
        key = bank, name, form
        if key not in self._rooms:
            if is_captured(device):
                raise changed_in_a_graph()
            self._rooms[key] = self.share(form, device)
        return self._rooms[key]

    def next_bank(self, shards: list[Any]) -> Bank:
        """Returns the bank of a further module."""
        if not shards:
            return Bank()
        self._modules += 1
        return self._banks[self._modules % BANKS]

    def begin(self, gather: Any, device: torch.device) -> None:
        """Begins an all-gather, on the first stream that it runs on."""
        stream = self._first = current_stream(device)
        self._gathers += 1
        self.note_freed(stream)
        capture = capture_of(stream)
        if self._is_held(gather.bank, gather):
            if capture or gather.was_captured:
                raise changed_in_a_graph()
            gather.bank = self._free_bank(gather)
        bank = gather.bank
        bank.holder, bank.used = weakref.ref(gather), self._gathers
        for moment in bank.freed:
            moment.wait(stream)
        bank.freed.clear()
        if self._ended is not None and self._ended[0] != stream:  # barriers have one order, on whatever stream they run
            self._ended[1].wait(stream)
        if capture != self._capture:  # a replay, or an eager call, need not follow the call that is before it here
            self._capture = capture
            self.peers.meet()
        gather.was_captured = gather.was_captured or bool(capture)
        if any(shard.forms for shard in gather.shards):
            if self._last is bank:  # others may still read what is to be written
                self.peers.close()
            elif self._opened is not None:
                self._opened.wait(stream)

    def offer(self, own: Tensor, bank: Bank) -> PeerTensor:
        """Waits until all ranks offer an array of the all-gather, and with it what its shards have written."""
        offered = self.peers.offer(f"parameters {self._gathers % 2}", [own], len(own))[0]  # two kinds take turns
        self._opened, self._last = Moment(current_stream(own.device)), bank
        return offered

    def end(self, device: torch.device, may_change: bool) -> None:
        """Ends the all-gather. may_change: what was offered may change after it, so all ranks have to have read it.

        A replay of a CUDA graph may be followed by anything.
        """
        if may_change or self._capture:
            self.peers.close()
        self._ended = self._first, Moment(current_stream(device))

    def _is_held(self, bank: Bank, gather: Any) -> bool:
        """Returns whether another module holds the bank."""
        holder = None if bank.holder is None else bank.holder()
        return holder is not None and holder is not gather and any(shard in self._used for shard in holder.shards)

    def _free_bank(self, gather: Any) -> Bank:
        """Returns the bank whose use is longest ago, or a new one. A module that moves again gets a bank of its own."""
        free = [bank for bank in self._banks if self._gathers - bank.used > 1 and not self._is_held(bank, gather)]
        if gather.has_moved or not free:
            self._banks.append(Bank())
            return self._banks[-1]
        gather.has_moved = True
        return min(free, key=attrgetter("used"))

    def use(self, shard: Any, bank: Bank, wholes: "list[Whole]") -> None:
        """Gives arrays of a whole parameter memory, where they have none."""
        for whole in wholes:
            whole.allocate(bank)
        self._used[shard] = bank

    def free(self, shard: Any) -> None:
        """Frees a shard of a gather that has failed, or that FSDP2 has dropped. Nothing reads its memory."""
        for token in shard.inner:
            token.untyped_storage().resize_(0)
        self._used.pop(shard, None)

    def note_freed(self, stream: Any) -> None:
        """Notes the memory that FSDP2 has freed: from now on nothing that reads it is launched. stream: the caller's.

        It frees the parameters that FSDP2 has dropped unread.
        """
        for shard in [shard for shard in self._used if shard.gather.is_dropped and shard.is_there]:
            self.free(shard)
        capture = capture_of(stream)
        for shard in [shard for shard in self._used if not shard.is_there]:
            bank = self._used.pop(shard)
            if capture_of(shard.stream) == capture:
                bank.freed.append(Moment(shard.stream))


class Shared(NamedTuple):
    """An array of this rank that the other ranks read."""

    own: Tensor
    at: list[Tensor]  #: arrays by rank
    pages: Physical | None  #: memory that can have further addresses
    handle: Any  #: handle of symmetric memory without such addresses, which lives as long


class Place(NamedTuple):
    """The place where a module's whole parameters have memory."""

    bank: Bank
    copied: bool  #: this rank's part is copied, as FSDP2 keeps the whole after forward, while the part may change


class Whole:
    """All ranks' parts of an array, `array` (P * n, ...) or `parts` (P, n, ...), which has memory while FSDP2 says so.

    Where parts are whole pages of a GPU, `array` is addresses that are mapped to memory of a bank. This rank's part of
    them can be the memory that the other ranks read. It needs no copy then, which would take the GPU's multiprocessors.
    Otherwise `array` has memory of torch.
    """

    def __init__(self, memory: Memory, part: Shared, place: Place, name: Any, remains: bool = False) -> None:
        """Takes this rank's part. name: the array's in its module. remains: it is small; its memory is never freed."""
        own = part.own
        self._memory, self._name = memory, name
        self._at: tuple[Place, int] | None = None
        self._addresses: Addresses | None = None
        self.own_is_mapped = False  #: this rank's part needs no copy then
        shape = memory.size * len(own), *own.shape[1:]
        if part.pages is not None:
            self._addresses = Addresses(memory.size, own.nbytes, own.device.index)
            self._map(part, place)
            self.array = self._addresses.tensor().view(own.dtype).view(shape)
        else:
            self.array = own.new_empty(shape)
        self._remains = remains or self._addresses is not None
        self.freed_by_fsdp = torch.empty(1, device="cpu") if self._remains else self.array  #: FSDP2 frees this
        self.parts = self.array.view(memory.size, *own.shape)
        self.free()

    def move(self, part: Shared, place: Place, was_captured: bool) -> None:
        """Moves to a place while nothing here is needed. was_captured: a CUDA graph has the addresses."""
        if self._addresses is None or self._at == (place, part.own.data_ptr()):
            return
        if was_captured or is_captured(part.own.device):
            raise changed_in_a_graph()
        torch.cuda.synchronize(part.own.device)  # kernels may run that read it
        self._map(part, place)

    def _map(self, part: Shared, place: Place) -> None:
        assert self._addresses is not None
        rank, device, self._at = self._memory.rank, part.own.device.index, None  # until all of it is there
        ranks = [r for r in range(self._memory.size) if r != rank or place.copied]
        blocks = {r: place.bank.block((self._name, r), part.own.nbytes, device) for r in ranks}
        if not place.copied:
            assert part.pages is not None
            blocks[rank] = part.pages
        for r, block in blocks.items():
            self._addresses.map(r, block)
        self._at, self.own_is_mapped = (place, part.own.data_ptr()), not place.copied

    def allocate(self, bank: Bank) -> None:
        """Gives the array memory, if it has none."""
        storage = self.freed_by_fsdp.untyped_storage()
        if self.is_there:
            return
        if self._remains:
            storage.resize_(self.freed_by_fsdp.nbytes)
            return
        if is_captured(self.array.device):
            page = granularity(self.array.device.index)
            expected = f"parts of multiples of {page} bytes, whose addresses stay the same"
            got = self.array.nbytes // self._memory.size
            raise RuntimeError(f"CopyEngines: all-gather in a CUDA graph: expected {expected}, got {got} bytes")
        if bank.pool is None:
            bank.pool = _stream_of_its_own(self.array.device)
        with getattr(torch, self.array.device.type).stream(bank.pool[0]):
            storage.resize_(self.array.nbytes)

    def free(self) -> None:
        self.freed_by_fsdp.untyped_storage().resize_(0)

    @property
    def is_there(self) -> bool:
        return bool(self.freed_by_fsdp.untyped_storage().size())


def is_captured(device: torch.device) -> bool:
    """Returns whether work on the current stream becomes part of a CUDA graph."""
    return bool(capture_of(current_stream(device)))


def changed_in_a_graph() -> RuntimeError:
    """Returns the error of an all-gather in a CUDA graph whose memory has to change."""
    expected = "the order of gathers, and reshard_after_forward, of two steps before the capture, and after it"
    got = "others: call attach, run two steps, and capture again"
    return RuntimeError(f"CopyEngines: all-gather in a CUDA graph: expected {expected}, got {got}")
