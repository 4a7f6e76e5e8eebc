"""Memory of whole pages of a GPU that the other GPUs of its host read, and that has further addresses here.

torch's symmetric memory can have no others: the driver maps whole allocations alone, and there signals follow.
"""

import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy.interop.parallel import collectives
from moeblaze_cupy.interop.parallel.collectives import gather_objects
from moeblaze_cupy.interop.parallel.driver import Addresses, Physical

Tensor = torch.Tensor
TIMEOUT_S = 600.0  # bound of the wait for another rank's descriptor
MAX_DESCRIPTORS = 253  # the kernel's bound for a message


class Descriptors:
    """Sockets by which the ranks of a group, on one host, give each other descriptors. All ranks make them together.

    A rank has a socket for each other rank, connected to that rank's socket for this one. From then on the kernel takes
    messages from that socket alone. Other processes may have filled its queue before, so it is emptied once. No socket
    has a file.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._sockets = {rank: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for rank in others}
        weakref.finalize(self, _close, list(self._sockets.values()))
        names = {rank: f"\0moeblaze-{secrets.token_hex(16)}" for rank in others}  # no file has them; all see them
        for rank, of_rank in self._sockets.items():
            of_rank.bind(names[rank])
        with collectives.named("descriptors of CopyEngines", group):
            every = gather_objects(names, group)
            failed: OSError | None = None
            try:
                for rank, of_rank in self._sockets.items():
                    of_rank.connect(every[rank][self._rank])
                    _empty(of_rank)
                    of_rank.settimeout(TIMEOUT_S)
            except OSError as error:
                failed = error
            told = gather_objects(failed and str(failed), group)  # no rank sends before all are connected
            if any(told):
                raise RuntimeError(f"sockets of ranks were not connected: {told} by rank") from failed

    def swap(self, descriptor: int) -> list[int]:
        """Returns all ranks' descriptors by rank, which the caller closes. All ranks call it together."""
        every = {self._rank: descriptor}
        with collectives.named("descriptors of CopyEngines", self._group):
            try:
                for apart in range(1, self._size):  # a message to each rank and one from each, as sockets queue few
                    socket.send_fds(self._sockets[(self._rank + apart) % self._size], [b"0"], [descriptor])
                    source = (self._rank - apart) % self._size
                    _, (every[source],), *_ = socket.recv_fds(self._sockets[source], 1, 1)
            except OSError as error:
                for of_rank in every.values():
                    os.close(of_rank)
                raise RuntimeError(str(error)) from error
        return [every[rank] for rank in range(self._size)]


def _empty(connected: socket.socket) -> None:
    """Drops the messages that are there, and closes the descriptors that came with them."""
    connected.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            _, descriptors, *_ = socket.recv_fds(connected, 1, MAX_DESCRIPTORS)
            for descriptor in descriptors:
                os.close(descriptor)


def _close(sockets: Sequence[socket.socket]) -> None:
    for of_rank in sockets:
        of_rank.close()


class Pages:
    """Memory of this rank that the others map, as many bytes of each. All ranks make it together.

    nbytes: a multiple of `driver.granularity`.
    """

    def __init__(self, nbytes: int, device: torch.device, descriptors: Descriptors) -> None:
        self.own = Physical.new(nbytes, device.index, exported=True)
        found = descriptors.swap(self.own.exported())
        try:
            every = [Physical.imported(descriptor) for descriptor in found]
        finally:
            for descriptor in found:
                os.close(descriptor)
        self.at: list[Tensor] = []  #: arrays by rank, uint8
        for memory in every:
            addresses = Addresses(1, nbytes, device.index)
            addresses.map(0, memory)
            self.at.append(addresses.tensor())
