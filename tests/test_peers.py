"""The buffers that other GPUs read, with memory and barriers of a fake in place of symmetric memory."""

import pytest

torch = pytest.importorskip("torch")
from moeblaze_cupy.interop import peers  # noqa: E402

CPU = torch.device("cpu")


class Handle:
    def __init__(self, memory, log):
        self.buffer_ptrs, self.log = [memory.data_ptr(), 64], log

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
    assert [array.dtype for array in offered] == ["bfloat16", "int64", "float32"] and len(log) == 1
    assert [array.offset % peers.SECTION_BYTES for array in offered] == [0, 0, 0]
    assert all(array.addresses.tolist() == [log[0], 64] for array in offered)
    forms = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    held = found._views["tokens", forms][0]
    for tensor, there, array in zip(tensors, held, offered, strict=True):
        assert torch.equal(tensor, there) and there.data_ptr() == log[0] + array.offset


def test_a_rank_may_have_fewer_rows(log):
    """Its arrays lie where those of the ranks with all rows do, and what lies there beyond them stays."""
    found, rows = peers.Peers(None), [normal(6, 8), normal(6, 3, dtype=torch.float32)]
    whole = found.offer("tokens", rows, 6)
    part = found.offer("tokens", [torch.zeros_like(tensor[:2]) for tensor in rows], 6)
    assert part == whole
    held = found.room("tokens", tuple((tuple(tensor.shape), tensor.dtype) for tensor in rows), CPU)
    for tensor, there in zip(rows, held, strict=True):
        assert not there[:2].any() and torch.equal(there[2:], tensor[2:])
    assert found.offer("tokens", [tensor[:0] for tensor in rows], 6) == whole


def test_what_lies_in_its_room_is_not_copied(log):
    found = peers.Peers(None)
    rows, weights = normal(6, 8), normal(6, 2, dtype=torch.float32)
    forms = ((6, 8), rows.dtype), ((6, 2), weights.dtype)
    room = found.room("results", forms, CPU)[0]
    room.copy_(rows)
    copies = room._version
    of_rows, of_weights = found.offer("results", (room, weights), 6)
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
    (array,) = found.offer("tokens", (rows,), 400)
    assert log[before] == first and log[-1] != first and array.addresses.tolist()[0] == log[-1]
    assert first in found._in_graphs  # its memory is alive


def test_views_of_many_sizes_do_not_pile_up(log):
    found = peers.Peers(None)
    found.offer("tokens", (normal(200, 8),), 200)
    for n in range(1, 200):
        rows = normal(n, 8)
        (array,) = found.offer("tokens", (rows,), n)
        assert array.offset == 0
    assert len(found._views) <= peers.MAX_VIEWS and len({*log}) == 1
