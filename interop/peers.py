"""Rows that the other GPUs of a host read where they lie, in symmetric memory of torch."""

from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory

Tensor = torch.Tensor
TIMEOUT_MS = 600_000  # of the wait for the other GPUs, on the device


class PeerRows:
    """Buffers of rows of one kind on every rank of a group, two that take turns.

    A rank writes one while others may still read the other. It writes the first again after the barrier of the second,
    which no rank passes before it has read the first. All ranks offer equally many rows in the same order of calls.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._turn = group, 0
        self._buffers: list[tuple[Tensor, Any, Tensor]] = []

    def offer(self, rows: Tensor) -> Tensor:
        """Copies rows (n, d) to where all ranks can read them, and waits on the stream until all have done so.

        Returns the addresses (P,) int64, by rank. They hold these rows until the next offer but one.
        """
        if not self._fits(rows):
            if self._buffers:  # others may still read them
                self._buffers[self._turn][1].barrier(channel=0, timeout_ms=TIMEOUT_MS)
                torch.cuda.synchronize(rows.device)
            self._buffers = [self._new(rows) for _ in range(2)]
        self._turn ^= 1
        buffer, handle, addresses = self._buffers[self._turn]
        buffer[: len(rows)].copy_(rows)
        handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)
        return addresses

    def _fits(self, rows: Tensor) -> bool:
        held = self._buffers[0][0] if self._buffers else None
        return (
            held is not None
            and held.dtype == rows.dtype
            and held.shape[1:] == rows.shape[1:]
            and len(held) >= len(rows)
        )

    def _new(self, rows: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Buffer, handle and addresses; a collective call, which waits for the other ranks on the host."""
        buffer = symmetric_memory.empty(*rows.shape, dtype=rows.dtype, device=rows.device)
        handle = symmetric_memory.rendezvous(buffer, self._group)
        return buffer, handle, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=rows.device)
