"""Memory of whole pages of a GPU that the other GPUs of its host read, and that has further addresses here.

torch's symmetric memory can have no others: the driver maps whole allocations alone, and there signals follow.
"""

import os
import secrets
import socket
import struct
import weakref
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy.interop import collectives
from moeblaze_cupy.interop.driver import Addresses, Physical

Tensor = torch.Tensor
TIMEOUT_S = 600.0  # of the wait for another rank's descriptor


class Descriptors:
    """Descriptors of files that the ranks of a group, which are on one host, give each other. A collective call."""

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._size, self._calls = group, dist.get_rank(group), dist.get_world_size(group), 0
        self._came: dict[tuple[int, int], int] = {}  # by call and rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(TIMEOUT_S)
        weakref.finalize(self, self._socket.close)
        name, secret = f"\0moeblaze-{secrets.token_hex(16)}", secrets.token_hex(16)  # a name of no file, which all see
        self._socket.bind(name)
        every: list[Any] = [None] * self._size
        with collectives.named("descriptors of CopyEngines", group):
            dist.all_gather_object(every, (name, secret), group=group)
        self._names, every_secret = zip(*every, strict=True)
        self._secret, self._ranks = secret, {of_rank.encode(): rank for rank, of_rank in enumerate(every_secret)}

    def swap(self, descriptor: int) -> list[int]:
        """By rank, the descriptors of all, which this rank then closes. A collective call."""
        call, size = self._calls, self._size
        self._calls += 1
        self._came[call, self._rank] = descriptor
        with collectives.named("descriptors of CopyEngines", self._group):
            try:
                for apart in range(1, size):  # a message to each rank and one from each, as sockets queue few
                    self._send(call, descriptor, (self._rank + apart) % size)
                    while (call, (self._rank - apart) % size) not in self._came:
                        self._receive()
            except OSError as error:
                while self._came:
                    os.close(self._came.popitem()[1])
                raise RuntimeError(str(error)) from error
        return [self._came.pop((call, rank)) for rank in range(size)]

    def _send(self, call: int, descriptor: int, rank: int) -> None:
        message = f"{call} {self._secret}".encode()
        given = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", descriptor)  # socket.send_fds takes no address
        self._socket.sendmsg([message], [given], 0, self._names[rank])

    def _receive(self) -> None:
        message, received, *_ = socket.recv_fds(self._socket, 256, 1)
        call, _, secret = message.partition(b" ")
        rank = self._ranks.get(secret)
        if rank is not None and len(received) == 1:
            self._came[int(call), rank] = received[0]
        else:  # of another process
            for descriptor in received:
                os.close(descriptor)


class Pages:
    """Memory of this rank, of which every rank has as much. A collective call.

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
        self.at: list[Tensor] = []  #: by rank, uint8
        for memory in every:
            addresses = Addresses(1, nbytes, device.index)
            addresses.map(0, memory)
            self.at.append(addresses.tensor())
