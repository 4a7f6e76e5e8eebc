"""Memory of a rank that the other GPUs of its host read in place, in symmetric memory of torch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moeblaze_cupy.interop.parallel.driver import capture_of, current_stream
from moeblaze_cupy.interop.parallel.private import symmetric_memory
from moeblaze_cupy.rows.api import PeerArray

Tensor = torch.Tensor
Form = tuple[tuple[int, ...], torch.dtype]
TIMEOUT_MS = 600_000  # bound of the wait for the other GPUs, on the device
SECTION_BYTES = 256  # arrays begin at multiples of it
MAX_VIEWS = 64  # views that are kept, of arrays of sizes that come again


def others(rank: int, size: int) -> list[int]:
    """Returns the other ranks, from the next one on, so that not all read from one at once."""
    return [other % size for other in range(rank + 1, rank + size)]


def shared_memory(nbytes: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Returns uint8 memory that all ranks of a group can read, and its handle. All ranks' hosts wait in it."""
    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    # Its barriers' signals are zeroed on the stream. A rank that comes late to that would lose a signal of another,
    # which may set it as soon as all have met, and wait for it for ever.
    torch.cuda.synchronize(device)
    return memory, symmetric_memory.rendezvous(memory, group)


class _Buffer(NamedTuple):
    memory: Tensor  # uint8
    handle: Any
    addresses: Tensor  # (P,) int64


class PeerTensor(NamedTuple):
    """A tensor that all ranks have offered."""

    array: PeerArray  #: the form for kernels
    at: list[Tensor]  #: the form for copies, by rank


class Peers:
    """Buffers of this rank, one by kind, that all ranks of a group can read.

    All ranks offer arrays of the same sizes in the same order. A rank reads what was offered before it offers anything
    else. So once a barrier has come after that of an offer, no rank reads the buffer, and any rank may write it. A call
    on another stream than the call before makes its stream wait for that one.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._buffers: dict[str, _Buffer] = {}
        self._views: dict[tuple[str, tuple[Form, ...]], tuple[list[Tensor], list[PeerTensor]]] = {}
        self._read: str | None = None  # the kind that others may read now
        self._stream: Any = None  # the last call's
        self._tables: dict[tuple[Any, ...], Tensor] = {}  # tables of addresses
        self._in_graphs: dict[int, Any] = {}  # memory that CUDA graphs use, by address; it lives as long as they may
        self._beside: torch.cuda.Stream | None = None
        self._copying = False  # there are copies that no stream waits for yet
        self.copies = True  #: whole blocks of rows may be copied, which takes no multiprocessor

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the buffers. torch.cuda counts no symmetric memory."""
        return sum(len(buffer.memory) for buffer in self._buffers.values())

    def room(self, kind: str, forms: tuple[Form, ...], device: torch.device) -> list[Tensor]:
        """Returns arrays of these shapes and dtypes in the buffer, to be written and then offered."""
        self.follow(device)
        if self._read == kind:  # a shared expert offers too, or the last call had nothing more to offer
            self.close()
        return self.arrays(kind, forms, device)[0]

    def offer(self, kind: str, tensors: Sequence[Tensor], rows: int) -> list[PeerTensor]:
        """Lets all ranks read these tensors, which may be in their room already. The stream waits until all offer.

        rows: each array's, as many on all ranks. A tensor may have fewer; the others' contents are then undefined. The
        returned arrays hold until the next offer of the kind.
        """
        forms = tuple(((rows, *tensor.shape[1:]), tensor.dtype) for tensor in tensors)
        for place, tensor in zip(self.room(kind, forms, tensors[0].device), tensors, strict=True):
            if place.data_ptr() != tensor.data_ptr():
                place[: len(tensor)].copy_(tensor)
        self._barrier(kind)
        self._read = kind
        if torch.cuda.is_current_stream_capturing():
            self._in_graphs[self._buffers[kind].memory.data_ptr()] = self._buffers[kind]
        return self._views[kind, forms][1]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Starts copies (to, source) beside the stream's next work. The returned function makes the stream wait.

        They run on the GPU's copy engines, so they take no multiprocessor from products. The stream waits for them
        before the next barrier, as others may then write what they read.
        """
        device = pairs[0][0].device
        if self._beside is None:
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        beside = self._beside
        beside.wait_stream(current_stream(device))
        with torch.cuda.stream(beside):
            for to, source in pairs:
                to.copy_(source)
        self._copying = True
        return self._wait_for_copies

    def _wait_for_copies(self) -> None:
        assert self._beside is not None
        current_stream(self._beside.device).wait_stream(self._beside)
        self._copying = False

    def by_rank(self, rows: Tensor, each: int) -> PeerArray:
        """Returns rows (P * each, d) of this rank's memory, which the ranks have stored, as an array (each, d) of each.

        The host does not wait for the table of addresses.
        """
        key = rows.data_ptr(), rows.shape, rows.dtype, each
        table, capturing = self._tables.get(key), torch.cuda.is_current_stream_capturing()
        if table is None:
            addresses = [rows.data_ptr() + first * rows[0].nbytes for first in range(0, len(rows), each)]
            on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=rows.is_cuda)
            table = on_host.to(rows.device, non_blocking=True)
            if capturing:  # each replay copies the addresses, and nothing has yet
                self._in_graphs[on_host.data_ptr()] = on_host
            else:
                if len(self._tables) >= MAX_VIEWS:
                    self._tables.clear()
                self._tables[key] = table
        if capturing:
            self._in_graphs[table.data_ptr()] = table
        return PeerArray(table, 0, str(rows.dtype).removeprefix("torch."))

    def follow(self, device: torch.device) -> None:
        """Makes the current stream wait for all that is in the stream of the last call.

        It does not wait across a capture in a CUDA graph, which `torch.cuda.graph` begins when the GPU is idle.
        """
        stream, before = current_stream(device), self._stream
        if before is not None and before != stream and capture_of(before) == capture_of(stream):
            stream.wait_event(before.record_event())
        self._stream = stream

    def close(self) -> None:
        """Makes the stream wait until all ranks have read what was offered last."""
        if self._read is not None:
            self._barrier(self._read)
            self._read = None

    def meet(self) -> None:
        """Makes the stream wait until all ranks are here. They then read nothing that was offered before."""
        for kind in list(self._buffers)[:1]:
            self._barrier(kind)
        self._read = None

    def signal(self, kind: str, channel: int) -> None:
        """Signals the other ranks, in the stream's order, that this one has stored what it had to in their buffers.

        channel: from 1 on. They `wait` for it as often.
        """
        handle = self._buffers[kind].handle
        for rank in others(handle.rank, handle.world_size):
            handle.put_signal(rank, channel=channel, timeout_ms=TIMEOUT_MS)

    def wait(self, kind: str, channel: int) -> None:
        """Makes the stream wait until all other ranks have signalled this one."""
        handle = self._buffers[kind].handle
        for rank in others(handle.rank, handle.world_size):
            handle.wait_signal(rank, channel=channel, timeout_ms=TIMEOUT_MS)

    def _barrier(self, kind: str) -> None:
        memory, handle, _ = self._buffers[kind]
        self.follow(memory.device)
        if self._copying:
            self._wait_for_copies()
        handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)

    def arrays(self, kind: str, forms: tuple[Form, ...], device: torch.device) -> tuple[list[Tensor], list[PeerTensor]]:
        found = self._views.get((kind, forms))
        if found is not None:
            return found
        with torch.inference_mode(False):  # training also writes memory that inference allocates
            return self._made(kind, forms, device)

    def _made(self, kind: str, forms: tuple[Form, ...], device: torch.device) -> tuple[list[Tensor], list[PeerTensor]]:
        starts, end = [], 0
        for shape, dtype in forms:
            starts.append(end)
            nbytes = dtype.itemsize * torch.Size(shape).numel()
            end += -(-nbytes // SECTION_BYTES) * SECTION_BYTES
        if kind not in self._buffers or len(self._buffers[kind].memory) < end:
            self._grow(kind, end, device)
        memory, handle, addresses = self._buffers[kind]
        views, arrays = [], []
        for start, (shape, dtype) in zip(starts, forms, strict=True):
            nbytes = dtype.itemsize * torch.Size(shape).numel()
            views.append(memory[start : start + nbytes].view(dtype).view(shape))
            at = [handle.get_buffer(rank, shape, dtype, start // dtype.itemsize) for rank in range(len(addresses))]
            arrays.append(PeerTensor(PeerArray(addresses, start, str(dtype).removeprefix("torch.")), at))
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        self._views[kind, forms] = views, arrays
        return views, arrays

    def _grow(self, kind: str, nbytes: int, device: torch.device) -> None:
        """Makes a larger buffer. All ranks call it together, and their hosts wait."""
        if torch.cuda.is_current_stream_capturing():
            expected = "a step that has run before its capture in a CUDA graph"
            raise RuntimeError(f"exchange: memory: expected {expected}, got one that needs {nbytes} bytes more")
        if kind in self._buffers:  # others may still read it
            self._barrier(kind)
            torch.cuda.synchronize(device)
        self._views = {key: found for key, found in self._views.items() if key[0] != kind}
        memory, handle = shared_memory(nbytes, device, self._group)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._buffers[kind] = _Buffer(memory, handle, addresses)
