"""A barrier of streams of one host's GPUs, without a kernel, through ctypes (torch and CuPy have no binding).

The barrier of torch's symmetric memory is a kernel, which waits until products leave it a place on a multiprocessor.
"""

import ctypes
import functools
from typing import Any

import torch

from moeblaze_cupy.interop.peers import TIMEOUT_MS, shared_memory

_NUMBER_BYTES = 4
_AT_LEAST = 0  # a CUstreamWaitValue_flags: the wait ends when the number minus the awaited one, mod 2^32, is below 2^31


class StreamBarrier:
    """A call has the current stream wait until the streams of all ranks have come to as many calls.

    What a stream has written before it comes the other streams can read afterwards. All ranks make it, and call it, in
    the same order. It has no timeout: where a rank never comes the others wait until their processes end.

    Each rank has a number for every rank, how often that has come, which the streams of the ranks write and await.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory, self._handle = shared_memory(_NUMBER_BYTES * size, device, group)
        self._memory.zero_()
        self._handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)
        torch.cuda.synchronize(device)  # streams of other ranks now write here
        others = [other for other in range(size) if other != rank]
        self._there = [self._handle.buffer_ptrs[other] + _NUMBER_BYTES * rank for other in others]
        self._here = [self._memory.data_ptr() + _NUMBER_BYTES * other for other in others]
        self._times = 0

    def __call__(self) -> None:
        self._times = (self._times + 1) % 2**32
        stream, (write, wait) = torch.cuda.current_stream().cuda_stream, _operations()
        for address in self._there:
            _check("cuStreamWriteValue32", write(stream, address, self._times, 0))
        for address in self._here:
            _check("cuStreamWaitValue32", wait(stream, address, self._times, _AT_LEAST))


@functools.cache
def _operations() -> tuple[Any, Any]:
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    for function in found:
        function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        function.restype = ctypes.c_int
    return found


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"CopyEngines: barrier: expected success of {name}, got the driver's error {status}")
