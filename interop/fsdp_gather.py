"""All-gathers of FSDP2 by copy engines, which bring large parameters straight to where products read them.

FSDP2 would copy a rank's shards into one buffer, and on the stream of the products what was gathered out of it. For
tensors with the hooks `fsdp_pre_all_gather` and `fsdp_post_all_gather` it leaves the place of a parameter to them.
"""

import weakref
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from moeblaze_cupy import checks, loader
from moeblaze_cupy.interop.driver import Addresses, Moment, Physical, capture_of, granularity
from moeblaze_cupy.interop.pages import Descriptors, Pages
from moeblaze_cupy.interop.peers import Form, Peers, others, shared_memory

Tensor = torch.Tensor
BANKS = 2  # at least: the next all-gather writes one while the other is read
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


class Bank:
    """Memory that some modules' whole parameters have, of one module at a time."""

    def __init__(self) -> None:
        self.used = 0  #: the number of the all-gather that had it last
        self.holder: weakref.ref[AllGather] | None = None  #: its module
        self.freed: list[Moment] = []  #: since when nobody reads what FSDP2 has freed
        self.pool: tuple[Any, Any] | None = None  #: a stream that runs nothing, of whose memory arrays are; its keeper
        self._blocks: dict[tuple[Any, int], Physical] = {}

    @property
    def nbytes(self) -> int:
        """Of what torch.cuda does not count."""
        return sum(nbytes for _, nbytes in self._blocks)

    def block(self, name: Any, nbytes: int, device: int) -> Physical:
        """Memory to be mapped, the same for all parts of this name and size."""
        if (name, nbytes) not in self._blocks:
            self._blocks[name, nbytes] = Physical.new(nbytes, device)
        return self._blocks[name, nbytes]


class Memory:
    """What all-gathers of the same ranks share: banks of memory for whole parameters, which modules have in turn.

    FSDP2 frees a whole parameter when the host has called what reads it, which the GPU may not have run. Before an
    all-gather writes, it waits for the readers of what was freed in its bank. It need not wait for those of the module
    before, which runs and has another bank. Where FSDP2 gathers a module whose bank has another one that it has not
    freed, the module moves to another bank, for good.
    """

    def __init__(self, peers: Peers, rank: int, size: int, group: Any) -> None:
        self.peers, self.rank, self.size, self._group = peers, rank, size, group
        self.capture = 0  #: in a CUDA graph, of the last all-gather
        self.opened: Moment | None = None  # no rank reads any longer what was offered before the last all-gather
        self.ended: tuple[Any, Moment] | None = None  # the stream of the last all-gather's first part, and its end
        self.last: Bank | None = None  # of the last all-gather
        self._banks = [Bank() for _ in range(BANKS)]
        self._without = Bank()  # of modules that need none
        self._modules = self._gathers = 0
        # Of those that have memory. Not by weak references, as ranks collect garbage at different times.
        self._used: dict[Shard, Bank] = {}
        self._descriptors: Descriptors | None = None
        self._rooms: dict[tuple[Any, ...], Shared] = {}

    @property
    def nbytes(self) -> int:
        """Of what torch.cuda does not count."""
        rooms = sum(room.own.nbytes for room in self._rooms.values())
        return self.peers.nbytes + rooms + sum(bank.nbytes for bank in self._banks)

    def share(self, form: Form, device: torch.device) -> "Shared":
        """An array of each rank that the others read. A collective call."""
        shape, dtype = form
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        with torch.inference_mode(False):  # what inference allocates training writes, too
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
        """What all-gathers of a bank write for the other ranks. A collective call in the first."""
        key = bank, name, form
        if key not in self._rooms:
            if self.capture:
                raise changed_in_a_graph()
            self._rooms[key] = self.share(form, device)
        return self._rooms[key]

    def next_bank(self, shards: "list[Shard]") -> Bank:
        """For a further module."""
        if not shards:
            return self._without
        self._modules += 1
        return self._banks[self._modules % BANKS]

    def next_offer(self) -> str:
        """The kind of what the all-gather offers, of which there are two in turn."""
        return f"parameters {self._gathers % 2}"

    def begin(self, gather: "AllGather", device: torch.device) -> None:
        """Of an all-gather, on the first stream that it runs on."""
        stream = getattr(torch, device.type).current_stream()
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
        if self.ended is not None and self.ended[0] != stream:  # barriers have one order, on whatever stream they run
            self.ended[1].wait(stream)
        if capture != self.capture:  # what ran before a replay, or an eager call, is not what came before it here
            self.capture = capture
            self.peers.meet()
        gather.was_captured = gather.was_captured or bool(capture)

    def _is_held(self, bank: Bank, gather: "AllGather") -> bool:
        """By another module."""
        holder = None if bank.holder is None else bank.holder()
        return holder is not None and holder is not gather and any(shard in self._used for shard in holder.shards)

    def _free_bank(self, gather: "AllGather") -> Bank:
        """The one whose use is longest ago, or a new one. A module that moves again has one that only it has."""
        free = [bank for bank in self._banks if self._gathers - bank.used > 1 and not self._is_held(bank, gather)]
        if gather.has_moved or not free:
            self._banks.append(Bank())
            return self._banks[-1]
        gather.has_moved = True
        return min(free, key=attrgetter("used"))

    def use(self, shard: "Shard", bank: Bank, wholes: "list[Whole]") -> None:
        """Gives arrays of a whole parameter memory, where they have none."""
        for whole in wholes:
            whole.allocate(bank, self.capture)
        self._used[shard] = bank

    def forget(self, shard: "Shard") -> None:
        """Of a gather that has failed, whose memory nothing will read."""
        self._used.pop(shard, None)

    def note_freed(self, stream: Any) -> None:
        """Of parameters that FSDP2 has freed: from now on their streams run nothing that reads them.

        stream: of the caller.
        """
        capture = capture_of(stream)
        for shard in [shard for shard in self._used if not shard.inner[0].untyped_storage().size()]:
            bank = self._used.pop(shard)
            if capture_of(shard.stream) == capture:
                bank.freed.append(Moment(shard.stream))


class Shared(NamedTuple):
    """An array of this rank that the other ranks read."""

    own: Tensor
    at: list[Tensor]  #: by rank
    pages: Physical | None  #: what can have further addresses
    handle: Any  #: of symmetric memory without them, which lives as long


class Place(NamedTuple):
    """Where a module's whole parameters are to have memory."""

    bank: Bank
    copied: bool  #: this rank's part, as FSDP2 keeps the whole after forward, while the part may change


class Whole:
    """All ranks' parts of an array, `array` (P * n, ...) or `parts` (P, n, ...), that has memory while FSDP2 says so.

    Where parts are whole pages of a GPU, `array` is addresses that have memory of a bank. At the place of this rank's
    part they can have the memory that the other ranks read, so that it needs no copy: a copy within a GPU takes its
    multiprocessors. Otherwise `array` has memory of torch.
    """

    def __init__(self, memory: Memory, part: Shared, place: Place, name: Any, remains: bool = False) -> None:
        """part: this rank's. name: of the array in its module. remains: a small array, whose memory is never freed."""
        own = part.own
        self._memory, self._name = memory, name
        self._at: tuple[Place, int] | None = None
        self._addresses: Addresses | None = None
        self.own_is_mapped = False  #: so that it needs no copy
        shape = memory.size * len(own), *own.shape[1:]
        if part.pages is not None:
            self._addresses = Addresses(memory.size, own.nbytes, own.device.index)
            self._map(part, place)
            self.array = self._addresses.tensor().view(own.dtype).view(shape)
        else:
            self.array = own.new_empty(shape)
        self._remains = remains or self._addresses is not None
        self.token = torch.empty(1, device="cpu") if self._remains else self.array  #: what FSDP2 frees
        self.parts = self.array.view(memory.size, *own.shape)
        self.free()

    def move(self, part: Shared, place: Place, was_captured: bool) -> None:
        """To a place, if it is not there, while nothing in it is needed. was_captured: in a CUDA graph."""
        if self._addresses is None or self._at == (place, part.own.data_ptr()):
            return
        if was_captured or self._memory.capture:
            raise changed_in_a_graph()
        torch.cuda.synchronize(part.own.device)  # kernels may run that read it
        self._map(part, place)

    def _map(self, part: Shared, place: Place) -> None:
        assert self._addresses is not None
        rank, device, self._at = self._memory.rank, part.own.device.index, None  # until all of it is there
        ranks = [r for r in range(self._memory.size) if r != rank or place.copied]
        blocks = {r: place.bank.block((self._name, r), part.own.nbytes, device) for r in ranks} | (
            {} if place.copied or part.pages is None else {rank: part.pages}
        )
        for r, block in blocks.items():
            self._addresses.map(r, block)
        self._at, self.own_is_mapped = (place, part.own.data_ptr()), not place.copied

    def allocate(self, bank: Bank, capture: int) -> None:
        """Memory that this does not have. capture: of the stream that writes it."""
        storage = self.token.untyped_storage()
        if storage.size():
            return
        if self._remains:
            storage.resize_(self.token.nbytes)
            return
        if capture:
            page = granularity(self.array.device.index)
            expected = f"parts of multiples of {page} bytes, whose addresses stay the same"
            got = self.array.nbytes // self._memory.size
            raise RuntimeError(f"CopyEngines: all-gather in a CUDA graph: expected {expected}, got {got} bytes")
        if bank.pool is None:
            bank.pool = _stream_of_its_own(self.array.device)
        with getattr(torch, self.array.device.type).stream(bank.pool[0]):
            storage.resize_(self.array.nbytes)

    def free(self) -> None:
        self.token.untyped_storage().resize_(0)

    @property
    def is_there(self) -> bool:
        return bool(self.token.untyped_storage().size())


class Shard:
    """A rank's part of a parameter of E rows, with the hooks that FSDP2 calls.

    local (E / ranks, ...): contiguous. If it has the dtype that travels, it moves to memory that the other ranks read.
    Otherwise each all-gather writes it to a buffer that they read.
    """

    forms: tuple[Form, ...] = ()  #: of what each all-gather writes to a buffer that the other ranks read
    part: Shared | None = None  #: what the other ranks read, if it is the parameter's own memory
    gather: "AllGather | None" = None
    owner: Any = None  #: `fsdp_sums.Owner` of what has this part's gradient
    stream: Any = None  #: of what reads the whole parameter
    whole: Tensor  #: as products read it
    inner: list[Tensor]  #: what has memory while the parameter is whole, which FSDP2 then frees
    _whole: Whole | None = None

    def __init__(self, memory: Memory, local: Tensor, dtype: torch.dtype) -> None:
        form = tuple(local.shape), dtype
        if local.dtype == dtype:
            self.part = memory.share(form, local.device)
            local = self.part.own.copy_(local)
        else:
            self.forms = (form,)
        self.hook(memory, local, dtype)

    def hook(self, memory: Memory, local: Tensor, dtype: torch.dtype) -> None:
        """Has FSDP2 call this for `local`. dtype: of the whole parameter."""
        self._memory, self.local = memory, local
        self._for_fsdp = local.new_empty(16 // dtype.itemsize, dtype=dtype)  # that its own all-gather has something
        local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]  # FSDP2 looks there
        local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]

    def settle(self, place: Place, name: int, rooms: list[Shared], was_captured: bool) -> None:
        """Has the whole at a place. name: of this in its module. rooms: a buffer of each of `forms`."""
        part = self.part or rooms[0]
        if self._whole is None:
            self._whole = Whole(self._memory, part, place, name)
            self.whole, self.inner = self._whole.array, [self._whole.token]
        self._whole.move(part, place, was_captured)

    def offer(self, rooms: list[Shared]) -> list[tuple[Whole, list[Tensor]]]:
        """Has this rank's part where the other ranks read it. rooms: a buffer of each of `forms`.

        Returns what is to be copied: where to, and by rank what comes there.
        """
        assert self._whole is not None
        if self.part is None:
            rooms[0].own.copy_(self.local)
        return [(self._whole, (self.part or rooms[0]).at)]

    @property
    def is_there(self) -> bool:
        """The whole parameter. If it is not, other modules may have its memory."""
        return self._whole is not None and self._whole.is_there

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
        self._memory.note_freed(self.stream)
        return (self.made(), self.inner) if out is None else None


class AllGather:
    """Of one module, as FSDP2 calls it after the shards' hooks. Other parameters travel in the given tensors.

    A barrier comes before the copies, when all ranks have written their parts. Where parts are the parameters' own
    memory another comes after them, so that whatever follows on any rank may change its part, as an optimizer does. So
    does one in a CUDA graph, as its replay may be followed by anything.
    """

    def __init__(self, memory: Memory, shards: list[Shard], group: Any) -> None:
        """A collective call. group: FSDP2's."""
        self._memory, self.shards, self._group = memory, shards, group
        self._rooms: dict[Shard, list[Shared]] = {}
        self._started: dict[Shard, list[tuple[Whole, list[Tensor]]]] = {}  # what is to be copied, as of `Shard.offer`
        self._stream: Any = None
        self.bank = memory.next_bank(shards)
        self.has_moved = False  #: from the bank that it had first
        self.was_captured = False  #: in a CUDA graph, which has the addresses
        for shard in shards:
            shard.gather = self
        self._settle()

    def _settle(self) -> None:
        """Has memory of the bank for what is gathered, and buffers for the parts."""
        remains = self._group is not None and self._group.post_forward_mesh_info is None
        for name, shard in enumerate(self.shards):
            forms, device = enumerate(shard.forms), shard.local.device
            rooms = [self._memory.room(self.bank, (name, i), form, device) for i, form in forms]
            shard.settle(Place(self.bank, remains and shard.part is not None), name, rooms, self.was_captured)
            self._rooms[shard] = rooms

    def start(self, shard: Shard) -> None:
        """Of one of the shards, all of which come before the other calls."""
        if not self._started or shard in self._started:  # or the last call has failed
            self._begin(shard.local.device)
        try:
            copies = self._started[shard] = shard.offer(self._rooms[shard])
            self._memory.use(shard, self.bank, [whole for whole, _ in copies])
        except Exception:
            self.give_up()
            raise

    def _begin(self, device: torch.device) -> None:
        memory = self._memory
        self.give_up()
        self._stream = getattr(torch, device.type).current_stream()
        memory.begin(self, device)
        if any(shard.forms for shard in self.shards):
            if memory.last is self.bank:  # others may still read what is to be written
                memory.peers.close()
            elif memory.opened is not None:
                memory.opened.wait(self._stream)
        self._settle()

    def give_up(self) -> None:
        """Frees what FSDP2 will not, as it has not got it: of a call that has failed."""
        for shard, copies in self._started.items():
            for whole, _ in copies:
                whole.free()
            self._memory.forget(shard)
        self._started = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of torch, for parameters without hooks. FSDP2 may hold as many results at once as it likes."""
        if len(self._started) < len(self.shards):
            self.give_up()
            raise other_parameters()
        if not self.shards:
            self._begin(device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        memory, own = self._memory, input_tensor.view(-1)
        rank, stream = memory.rank, getattr(torch, own.device.type).current_stream()
        offered = memory.peers.offer(memory.next_offer(), [own], len(own))[0]
        memory.opened, memory.last = Moment(stream), self.bank
        places = output_tensor.view(memory.size, -1)
        copies = [copy for of_shard in self._started.values() for copy in of_shard]
        pairs = [(whole.parts[rank], at[rank]) for whole, at in copies if not whole.own_is_mapped]
        if places[rank].data_ptr() != own.data_ptr():
            pairs.append((places[rank], own))
        wait_for_own = memory.peers.copy(pairs) if pairs else None  # beside the others, which come over links
        for other in others(rank, memory.size):
            places[other].copy_(offered.at[other])
            for whole, at in copies:
                whole.parts[other].copy_(at[other])
        if wait_for_own is not None:
            wait_for_own()
        if memory.capture or any(shard.part is not None for shard in self.shards):
            memory.peers.close()
        memory.ended = self._stream, Moment(stream)
        self._started = {}


def other_parameters() -> RuntimeError:
    """The error of parameters that `CopyEngines.serve` has not been called with."""
    expected = "those that serve was called with"
    got = "others, as after load_state_dict(assign=True) or a conversion: call serve again"
    return RuntimeError(f"CopyEngines: parameters: expected {expected}, got {got}")


def changed_in_a_graph() -> RuntimeError:
    """The error of an all-gather in a CUDA graph whose memory has to change."""
    expected = "the order of gathers, and reshard_after_forward, of two steps before the capture, and after it"
    got = "others: call serve, run two steps, and capture again"
    return RuntimeError(f"CopyEngines: all-gather in a CUDA graph: expected {expected}, got {got}")


# What is read and set here of FSDP2, beside its interface.
_of_group = attrgetter(
    *("fsdp_params", "mesh_info", "post_forward_mesh_info", "mp_policy", "_use_post_forward_mesh"),
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


def shards_of(straight: dict[Any, torch.dtype], memory: Memory, made: Mapping[Any, Shard]) -> list[Shard]:
    """Those of the parameters of `straight_of`, whose hooks FSDP2 then calls. A collective call.

    made: shards of some of them; the others' are made here.
    """
    shards = []
    for parameter, dtype in straight.items():
        shard = made.get(parameter) or Shard(memory, parameter.sharded_param._local_tensor, dtype)
        parameter.sharded_param._local_tensor = shard.local
        parameter._sharded_param_data = shard.local.view(-1)
        parameter._init_extensions()
        # where a forward has run before, FSDP2 has made a whole parameter that is not the shard's
        parameter.__dict__.pop("_unsharded_param", None)
        parameter.all_gather_outputs = []
        shards.append(shard)
    return shards
