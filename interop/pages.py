"""Memory of whole pages of a GPU that the other GPUs of its host read, and that has further addresses here.

torch's symmetric memory can have no others: the driver maps none but whole allocations, and there signals follow.
"""

import os
import secrets
import socket
import struct
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy.interop import collectives
from moeblaze_cupy.interop.driver import Addresses, Physical
from moeblaze_cupy.interop.peers import others

Tensor = torch.Tensor
TIMEOUT_S = 600.0  # of the wait for another rank's descriptor


class Descriptors:
    """Descriptors of files that the ranks of a group, which are on one host, give each other. A collective call."""

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._size, self._calls = group, dist.get_rank(group), dist.get_world_size(group), 0
        self._came: dict[tuple[int, int], int] = {}  # by call and rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(TIMEOUT_S)
        name = f"\0moeblaze-{secrets.token_hex(16)}"  # of no file
        self._socket.bind(name)
        self._names: list[Any] = [None] * self._size
        with collectives.named("descriptors of CopyEngines", group):
            dist.all_gather_object(self._names, name, group=group)

    def swap(self, descriptor: int) -> list[int]:
        """By rank, the descriptors of all, which this rank then closes. A collective call."""
        every, call = others(self._rank, self._size), self._calls
        self._calls += 1
        with collectives.named("descriptors of CopyEngines", self._group):
            try:
                for rank in every:
                    message, data = f"{call} {self._rank}".encode(), struct.pack("=i", descriptor)
                    given = socket.SOL_SOCKET, socket.SCM_RIGHTS, data  # socket.send_fds takes no address
                    self._socket.sendmsg([message], [given], 0, self._names[rank])
                while any((call, rank) not in self._came for rank in every):  # a rank may be a call ahead
                    message, received, *_ = socket.recv_fds(self._socket, 64, 1)
                    of_call, rank = map(int, message.split())
                    self._came[of_call, rank] = received[0]
            except OSError as error:
                raise RuntimeError(str(error)) from error
        self._came[call, self._rank] = descriptor
        return [self._came.pop((call, rank)) for rank in range(self._size)]


class Pages:
    """Memory of this rank, of which every rank has as much. A collective call.

    nbytes: a multiple of `driver.granularity`.
    """

    def __init__(self, nbytes: int, device: torch.device, descriptors: Descriptors) -> None:
        self.own = Physical.new(nbytes, device.index, exported=True)
        found = descriptors.swap(self.own.exported())
        self.at: list[Tensor] = []  #: by rank, uint8
        for descriptor in found:
            addresses = Addresses(1, nbytes, device.index)
            addresses.show(0, Physical.imported(descriptor))
            os.close(descriptor)
            self.at.append(addresses.tensor())
