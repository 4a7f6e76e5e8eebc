"""The buffers that other GPUs read, with memory and barriers of a fake in place of symmetric memory."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
from moeblaze_cupy.interop.parallel import peers  # noqa: E402

CPU = torch.device("cpu")


class Handle:
    """Rank 0 of two, whose peer has the same memory."""

    rank = 0

    def __init__(self, memory, log):
        self.memory, self.buffer_ptrs, self.log = memory, [memory.data_ptr(), 64], log

    def get_buffer(self, rank, shape, dtype, offset):
        return self.memory.view(dtype)[offset : offset + torch.Size(shape).numel()].view(shape)

    def barrier(self, channel, timeout_ms):
        self.log.append(self.buffer_ptrs[0])


@pytest.fixture
def log(monkeypatch):
    """Addresses of the buffers whose barriers were called."""
    calls = []
    monkeypatch.setattr(peers.symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(peers.symmetric_memory, "rendezvous", lambda memory, group: Handle(memory, calls))
    monkeypatch.setattr(peers.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peers.torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def test_arrays_of_an_offer_lie_apart_in_one_buffer(log):
    found, tensors = peers.Peers(None), [normal(5, 8), torch.arange(15).view(5, 3), normal(5, 3, dtype=torch.float32)]
    offered = found.offer("tokens", tensors, 5)
    arrays = [of.array for of in offered]
    assert [array.dtype for array in arrays] == ["bfloat16", "int64", "float32"] and len(log) == 1
    assert [array.offset % peers.SECTION_BYTES for array in arrays] == [0, 0, 0]
    assert all(array.addresses.tolist() == [log[0], 64] for array in arrays)
    forms = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    held = found._views["tokens", forms][0]
    for tensor, there, array in zip(tensors, held, arrays, strict=True):
        assert torch.equal(tensor, there) and there.data_ptr() == log[0] + array.offset


def test_what_inference_allocates_training_writes(log):
    found, rows = peers.Peers(None), normal(4, 8)
    with torch.inference_mode():
        found.offer("tokens", [torch.zeros_like(rows)], 4)
    assert torch.equal(found.offer("tokens", [rows], 4)[0].at[0], rows)


def test_a_rank_may_have_fewer_rows(log):
    """Its arrays lie where those of the ranks with all rows do, and what lies there beyond them stays."""
    found, rows = peers.Peers(None), [normal(6, 8), normal(6, 3, dtype=torch.float32)]
    whole = found.offer("tokens", rows, 6)
    part = found.offer("tokens", [torch.zeros_like(tensor[:2]) for tensor in rows], 6)
    assert [of.array for of in part] == [of.array for of in whole]
    held = found.room("tokens", tuple((tuple(tensor.shape), tensor.dtype) for tensor in rows), CPU)
    for tensor, there in zip(rows, held, strict=True):
        assert not there[:2].any() and torch.equal(there[2:], tensor[2:])
    assert found.offer("tokens", [tensor[:0] for tensor in rows], 6)[1].array == whole[1].array


@pytest.fixture
def beside(monkeypatch):
    """Streams do nothing; what waited for which is listed."""
    waits = []

    class Stream:
        device = CPU

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            waits.append((self.name, other.name))

    plain = Stream("plain")
    monkeypatch.setattr(peers.torch.cuda, "Stream", lambda device: Stream("beside"))
    monkeypatch.setattr(peers, "current_stream", lambda device: plain)
    monkeypatch.setattr(peers.torch.cuda, "stream", lambda stream: nullcontext())
    return waits


def test_rows_that_others_have_stored_are_arrays_of_theirs(log):
    """With the addresses of one table."""
    found, forms = peers.Peers(None), (((6, 8), torch.bfloat16),)
    (rows,) = found.room("results", forms, CPU)
    array = found.by_rank(rows, 2)
    assert array.addresses.tolist() == [rows[2 * rank :].data_ptr() for rank in range(3)]
    assert (array.offset, array.dtype) == (0, "bfloat16") and found.by_rank(rows, 2).addresses is array.addresses
    assert found.by_rank(rows, 3).addresses.tolist() == [rows.data_ptr(), rows[3:].data_ptr()] and not log


def test_addresses_of_ranks_follow_the_dtype(log):
    """Of arrays of one shape at one address, as of a layer in float32 and one in bfloat16."""
    found = peers.Peers(None)
    for dtype in (torch.float32, torch.bfloat16):
        (rows,) = found.room("results", (((6, 8), dtype),), CPU)
        assert found.by_rank(rows, 2).addresses.tolist() == [rows[2 * rank :].data_ptr() for rank in range(3)]


def test_addresses_that_a_graph_copies_stay_with_it(log, monkeypatch):
    """Its replays read the host's memory, and plain calls have addresses of their own."""
    found = peers.Peers(None)
    (rows,) = found.room("results", (((6, 8), torch.bfloat16),), CPU)
    monkeypatch.setattr(peers.torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = found.by_rank(rows, 2).addresses
    assert any(held is captured for held in found._in_graphs.values()) and not found._tables
    monkeypatch.setattr(peers.torch.cuda, "is_current_stream_capturing", lambda: False)
    assert found.by_rank(rows, 2).addresses is not captured


def test_copies_to_other_memory_end_before_the_next_barrier(log, beside):
    """Products run meanwhile, which need room for their results."""
    found, own = peers.Peers(None), torch.zeros(3, 8, dtype=torch.bfloat16)
    (offered,) = found.offer("tokens", (normal(3, 8),), 3)
    wait = found.copy([(own, offered.at[1])])
    assert torch.equal(own, offered.at[1])
    (room,) = found.room("results", (((6, 8), own.dtype),), CPU)
    assert beside == [("beside", "plain")]
    found.offer("results", (room,), 6)
    assert beside == [("beside", "plain"), ("plain", "beside")]
    wait()  # again, which is harmless
    assert beside[1:] == 2 * [("plain", "beside")]


def test_a_call_on_another_stream_waits_for_the_one_before(log, monkeypatch):
    """But not for one of another capture in a CUDA graph, which the driver refuses."""
    waits, capture = [], {}

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            return self.name

        def wait_event(self, event):
            waits.append((self.name, event))

    streams = {name: Stream(name) for name in ("first", "second", "captured")}
    monkeypatch.setattr(peers, "capture_of", lambda stream: capture.get(stream.name, 0))
    found, rows = peers.Peers(None), normal(4, 8)

    def on(name, call):
        waits.clear()
        monkeypatch.setattr(torch.cpu, "current_stream", lambda device: streams[name])
        call()
        return list(waits)

    def offer():
        found.offer("tokens", [rows], 4)

    assert on("first", offer) == [] and on("first", offer) == []
    assert on("second", offer) == [("second", "first")] and on("second", offer) == []
    assert on("first", found.close) == [("first", "second")]
    capture["captured"] = 5
    assert on("captured", offer) == [] and on("captured", found.close) == []
    capture.clear()
    assert on("first", found.meet) == [("first", "captured")]


def test_what_lies_in_its_room_is_not_copied(log):
    found = peers.Peers(None)
    rows, weights = normal(6, 8), normal(6, 2, dtype=torch.float32)
    forms = ((6, 8), rows.dtype), ((6, 2), weights.dtype)
    room = found.room("results", forms, CPU)[0]
    room.copy_(rows)
    copies = room._version
    (of_rows, _), (of_weights, _) = found.offer("results", (room, weights), 6)
    assert room._version == copies + 1  # of the weights; all arrays of a buffer count together
    assert of_rows.addresses.tolist()[0] + of_rows.offset == room.data_ptr()
    assert torch.equal(found.room("results", forms, CPU)[1], weights) and of_weights.offset == peers.SECTION_BYTES


def test_a_buffer_is_written_only_after_a_later_barrier(log):
    found, rows = peers.Peers(None), normal(4, 8)
    for kind in ("tokens", "results", "tokens", "results"):
        found.offer(kind, (rows,), 4)
    assert len(log) == 4 and log[0] == log[2] != log[1] == log[3]  # they take turns
    found.offer("results", (rows,), 4)
    assert len(log) == 6  # one before the copy
    found.close()
    found.close()
    found.offer("results", (rows,), 4)
    assert len(log) == 8


def test_growing_waits_for_the_others_and_keeps_what_graphs_use(log, monkeypatch):
    found = peers.Peers(None)
    found.offer("tokens", (normal(4, 8),), 4)
    found.offer("tokens", (normal(3, 8),), 3)  # fits
    first = log[0]
    assert set(log) == {first}
    monkeypatch.setattr(peers.torch.cuda, "is_current_stream_capturing", lambda: True)
    found.close()
    found.offer("tokens", (normal(4, 8),), 4)
    with pytest.raises(RuntimeError, match="expected a step that has run before its capture in a CUDA graph"):
        found.offer("tokens", (normal(400, 8),), 400)
    monkeypatch.setattr(peers.torch.cuda, "is_current_stream_capturing", lambda: False)
    found.close()
    before = len(log)
    rows = normal(400, 8)
    ((array, _),) = found.offer("tokens", (rows,), 400)
    assert log[before] == first and log[-1] != first and array.addresses.tolist()[0] == log[-1]
    assert first in found._in_graphs  # its memory is alive


def test_views_of_many_sizes_do_not_pile_up(log):
    found = peers.Peers(None)
    found.offer("tokens", (normal(200, 8),), 200)
    for n in range(1, 200):
        rows = normal(n, 8)
        ((array, _),) = found.offer("tokens", (rows,), n)
        assert array.offset == 0
    assert len(found._views) <= peers.MAX_VIEWS and len({*log}) == 1
