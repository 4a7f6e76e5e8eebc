"""Collectives of FSDP2 by copy engines, over peers that are arrays here; `ranks_copies.py` trains by them."""

import gc
import itertools
from contextlib import nullcontext
from unittest import mock

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from moeblaze_cupy.interop.fsdp import api as fsdp
from moeblaze_cupy.interop.fsdp import memory as fsdp_memory
from moeblaze_cupy.interop.fsdp.gather import AllGather
from moeblaze_cupy.interop.fsdp.memory import Bank, Memory, Place, Shared, Whole
from moeblaze_cupy.interop.parallel import driver
from moeblaze_cupy.interop.parallel.peers import PeerTensor

CPU = torch.device("cpu")


class Ranks:
    """Stands for the `Peers` of one rank; others: by rank, what these offer, this rank's own place being None."""

    def __init__(self, others):
        self.others, self.kinds, self.rooms = others, [], {}

    def room(self, kind, forms, device):
        assert len(forms) == 1
        return [self.rooms.setdefault(kind, torch.full(*forms[0][:1], torch.nan, dtype=forms[0][1]))]

    def close(self):
        self.kinds.append("close")

    def meet(self):
        self.kinds.append("meet")

    def copy(self, pairs):
        for to, source in pairs:
            to.copy_(source)
        return lambda: None

    def offer(self, kind, tensors, rows):
        assert len(tensors) == 1 and len(tensors[0]) == rows
        self.kinds.append(kind)
        return [PeerTensor(None, [tensors[0] if other is None else other for other in self.others])]


@pytest.mark.parametrize("rank", range(3))
def test_all_gather_puts_the_shards_in_the_order_of_ranks(rank):
    shards = torch.randn(3, 5)
    memory = Memory(Ranks([None if r == rank else shards[r] for r in range(3)]), rank, 3, None)
    gather = AllGather(memory, [], None)
    for in_place in (True, False):  # FSDP2 writes a rank's own shard to its place
        out = gather.allocate((15,), dtype=torch.float32, device=CPU).fill_(torch.nan)
        own = shards[rank].clone()
        if in_place:
            own = out[5 * rank : 5 * rank + 5].copy_(own)
        gather(out, own, None)
        assert torch.equal(out, shards.flatten())
    assert len(set(memory.peers.kinds)) == 2  # the others may still read what was offered before


class Stream:
    """Of a GPU that runs nothing: what each stream waits for is listed."""

    current = None

    def __init__(self, name="pool"):
        self.name, self.calls = name, []

    def record_event(self):
        self.calls.append("record")
        return self.name, len(self.calls)

    def wait_event(self, event):
        self.calls.append(event)


@pytest.fixture
def streams(monkeypatch):
    """The products' stream, and one of FSDP2 for all-gathers."""
    products, beside = Stream("products"), Stream("beside")
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: Stream.current)
    return products, beside


class Module:
    """Stands for the `AllGather` of a module with one large parameter, which `products` reads."""

    def __init__(self, memory, products):
        self.memory, self.products, self.has_moved, self.was_captured = memory, products, False, False
        self.shards = [mock.Mock(stream=products, forms=(), inner=[], gather=self)]
        self.bank, self.is_dropped = memory.next_bank(self.shards), False
        self.free()

    def gather(self, beside):
        Stream.current = beside
        self.memory.begin(self, CPU)
        self.shards[0].is_there = True
        self.memory.use(self.shards[0], self.bank, [])
        Stream.current = self.products
        self.memory.note_freed(self.products)
        self.products.calls.append(self)

    def free(self):
        """As FSDP2, when the host has called what reads it."""
        self.shards[0].is_there = False


def test_memory_is_written_after_its_last_readers(streams):
    """An all-gather beside a module that runs waits for the readers of the module before that, not for its own."""
    products, beside = streams
    memory = Memory(Ranks([None, torch.zeros(1)]), 0, 2, None)
    first, second, third = (Module(memory, products) for _ in range(3))
    first.gather(beside)
    first.free()
    second.gather(beside)
    assert beside.calls == [] and products.calls == [first, "record", second]
    second.free()
    third.gather(beside)
    assert beside.calls == [("products", 2)]  # before `second` is read
    third.free()
    assert products.calls[3:] == ["record", third]
    second.gather(beside)  # as backward does
    assert beside.calls[1:] == [("products", 4)]
    assert first.bank is third.bank is not second.bank


def test_modules_that_are_gathered_at_once_have_memory_of_their_own(streams):
    products, beside = streams
    memory = Memory(Ranks([None, torch.zeros(1)]), 0, 2, None)
    modules = [Module(memory, products) for _ in range(6)]
    held = [module.bank for module in modules]
    assert held == 3 * held[:2]
    for module in modules[:3]:
        module.gather(beside)
    assert modules[2].bank not in held  # the banks of the first two are theirs
    modules[0].free()
    modules[3].gather(beside)  # the bank of the first is free again, and its own is that of the second
    assert modules[3].bank is held[0] and products.calls[-2:] == ["record", modules[3]]
    assert beside.calls == [("products", products.calls.index("record") + 1)]
    for module in modules[:4]:
        module.free()
    for module in modules:  # one after the other, where all stay where they are
        before = module.bank
        module.gather(beside)
        module.free()
        assert module.bank is before
    modules[0].gather(beside)
    modules[3].gather(beside)  # a second time, so it gets a bank that only it has
    assert modules[3].bank not in [module.bank for module in modules if module is not modules[3]]


def test_events_of_another_capture_are_not_waited_for(streams, monkeypatch):
    """The driver refuses to, and a capture begins when the GPU is idle."""
    products, beside = streams
    captures = {products: 0, beside: 0}
    monkeypatch.setattr(driver, "capture_of", captures.get)
    before = driver.Moment(products)
    before.wait(beside)
    assert beside.calls == [("products", 1)]
    captures |= {beside: 3}
    before.wait(beside)
    captures |= {products: 3}
    inside = driver.Moment(products)
    inside.wait(beside)
    assert beside.calls == [("products", 1), ("products", 2)]
    captures |= {beside: 4}
    inside.wait(beside)
    assert len(beside.calls) == 2


def test_memory_of_a_captured_gather_stays(streams, monkeypatch):
    """A graph has the addresses, and waits for the readers that there were."""
    products, beside = streams
    memory = Memory(Ranks([None, torch.zeros(1)]), 0, 2, None)
    first, second, third = (Module(memory, products) for _ in range(3))
    monkeypatch.setattr(fsdp_memory, "capture_of", lambda stream: 5)
    for module in (first, second, third):
        module.gather(beside)
        module.free()
    monkeypatch.setattr(fsdp_memory, "capture_of", lambda stream: 0)
    first.gather(beside)
    with pytest.raises(RuntimeError, match="CopyEngines: all-gather in a CUDA graph: expected the order of gathers"):
        third.gather(beside)
    assert third.bank is first.bank
    other = Module(memory, products)  # which no graph has
    second.gather(beside)
    other.gather(beside)
    assert other.bank not in (first.bank, second.bank)


def test_ranks_meet_where_a_capture_begins_and_ends(streams, monkeypatch):
    """A replay may follow any call, so the rooms that the first all-gather writes may still be read."""
    products, beside = streams
    memory = Memory(Ranks([None, torch.zeros(1)]), 0, 2, None)
    modules, met = [Module(memory, products) for _ in range(3)], []
    for capture in (0, 0, 5, 5, 7, 0):
        monkeypatch.setattr(fsdp_memory, "capture_of", lambda stream, capture=capture: capture)
        for module in modules:
            memory.peers.kinds.clear()
            module.gather(beside)
            module.free()
            met.append(memory.peers.kinds == ["meet"])
    assert met == [*[False] * 6, True, *[False] * 5, True, False, False, True, False, False]


class Mapped:
    """Stands for addresses; `parts` is what is at each."""

    def __init__(self, parts, nbytes, device):
        self.parts, self.nbytes = [None] * parts, nbytes

    def map(self, part, memory):
        self.parts[part] = memory

    def tensor(self):
        assert None not in self.parts
        return torch.zeros(len(self.parts) * self.nbytes, dtype=torch.uint8)


def test_what_is_at_the_addresses_of_a_whole_parameter(monkeypatch):
    """This rank's part is its own memory, or a block of the bank where it is copied. Blocks are the bank's."""
    numbers, room = itertools.count(), [8]  # of blocks, and for how many there is memory

    def new(nbytes, device):
        if not room[0]:
            raise torch.OutOfMemoryError
        room[0] -= 1
        return next(numbers)

    monkeypatch.setattr(fsdp_memory, "Addresses", Mapped)
    monkeypatch.setattr(fsdp_memory.Physical, "new", new)
    waits = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    memory, banks = Memory(Ranks([]), 1, 3, None), (Bank(), Bank())
    part = Shared(torch.ones(2, 4), [], "own", None)
    whole = Whole(memory, part, Place(banks[0], False), "w1")
    parts = whole._addresses.parts
    assert parts == [0, "own", 1] and whole.own_is_mapped and whole.array.shape == (6, 4) and not whole.is_there
    assert Whole(memory, part, Place(banks[0], False), "w1")._addresses.parts == parts
    whole.move(part, Place(banks[0], False), True)
    waits.assert_not_called()
    whole.move(part, Place(banks[1], True), False)
    assert parts == [2, 3, 4] and not whole.own_is_mapped and waits.call_count == 1
    room[0] = 0
    other = Shared(torch.ones(2, 4), [], "other", None)
    with pytest.raises(torch.OutOfMemoryError):
        whole.move(other, Place(Bank(), False), False)
    assert parts == [2, 3, 4]
    whole.move(other, Place(banks[1], False), False)  # is not there yet, whatever failed before
    assert parts == [2, "other", 4] and whole.own_is_mapped
    for was_captured, capture in ((True, 0), (False, 3)):
        monkeypatch.setattr(fsdp_memory, "capture_of", lambda stream, capture=capture: capture)
        with pytest.raises(RuntimeError, match="CopyEngines: all-gather in a CUDA graph: expected the order of"):
            whole.move(part, Place(banks[0], False), was_captured)
    assert parts == [2, "other", 4]


def test_addresses_are_freed_after_a_capture(monkeypatch):
    """Python may collect them in it, and to wait for the GPU would end it."""
    calls, is_capturing = [], True
    monkeypatch.setattr(driver, "_call", lambda name, *arguments: calls.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    addresses = driver.Addresses(2, 2**21, 0)
    addresses._mapped[:] = True, False
    calls.clear()
    del addresses
    gc.collect()
    assert calls == []
    is_capturing = False
    other = driver.Addresses(1, 2**21, 0)
    assert calls == ["synchronize", "cuMemUnmap", "cuMemAddressFree", "cuMemAddressReserve"]
    calls.clear()
    del other
    gc.collect()
    assert calls == ["synchronize", "cuMemAddressFree"]


@pytest.mark.parametrize("op", (dist.ReduceOp.AVG, dist.ReduceOp.SUM))
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_reduce_scatter_sums_in_float32_and_rounds_once(size, rank, op):
    exponents = torch.randint(-20, 20, (size, size * 64))
    gradients = torch.randn(size, size * 64, dtype=torch.float64).ldexp(exponents).to(torch.bfloat16)  # by rank
    scatter = fsdp.ReduceScatter(Ranks([None if r == rank else gradients[r] for r in range(size)]), rank, size)
    wanted = gradients.double().sum(0)[64 * rank : 64 * rank + 64]
    if op == dist.ReduceOp.AVG:
        wanted = wanted / size
    for _ in range(3):
        lengths = size * 64, 64
        given, out = (scatter.allocate((n,), dtype=torch.bfloat16, device=torch.device("cpu")) for n in lengths)
        given.copy_(gradients[rank])
        scatter(out.fill_(torch.nan), given, None, op)
        # half a step of bf16, and what float32 rounds of sums whose terms cancel
        rounded = 2.0**-23 * gradients.double().abs().sum(0)[64 * rank : 64 * rank + 64]
        assert ((out.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + rounded).all()
        if size == 2:  # the bits of NCCL
            total = gradients[0] + gradients[1]
            total = total / 2 if op == dist.ReduceOp.AVG else total
            assert torch.equal(out, total[64 * rank : 64 * rank + 64])
    assert scatter.peers.kinds == 3 * ["gradients", "close"]  # others may still read until then
    assert set(scatter.peers.rooms) == {"gradients"}


def test_reduce_scatter_is_right_after_a_step_that_failed():
    """Memory for what was to be reduced has then been given, and none for the result."""
    gradients = torch.randn(2, 8)
    scatter = fsdp.ReduceScatter(Ranks([None, gradients[1]]), 0, 2)
    scatter.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(2):
        given, out = (scatter.allocate((n,), dtype=torch.float32, device=torch.device("cpu")) for n in (8, 4))
        assert given.data_ptr() != out.data_ptr()
        scatter(out, given.copy_(gradients[0]), None, dist.ReduceOp.SUM)
        assert torch.equal(out, gradients.sum(0)[:4])


def test_errors_name_what_was_given(tmp_path):
    scatter = fsdp.ReduceScatter(Ranks([None]), 0, 1)
    with pytest.raises(ValueError, match=r"CopyEngines: reduction: expected a sum or mean.*got .*MAX"):
        scatter(torch.zeros(1), torch.zeros(1), None, dist.ReduceOp.MAX)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"CopyEngines: group: expected GPUs of one host .*got \['gloo'\]"):
            fsdp.CopyEngines(None)
    finally:
        dist.destroy_process_group()
    engines = object.__new__(fsdp.CopyEngines)
    with pytest.raises(TypeError, match=r"CopyEngines.attach: modules: expected modules after .*got .*Linear"):
        engines.attach(torch.nn.Linear(1, 1))
