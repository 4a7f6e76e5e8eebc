"""Calls of the CUDA driver that neither CuPy nor torch binds, through ctypes.

Addresses of a GPU that have memory of several owners side by side, and which capture in a CUDA graph a stream is in.
"""

import ctypes
import functools
import struct
import weakref
from typing import Any

import torch

Tensor = torch.Tensor
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_
_OUT_OF_MEMORY = 2  # CUDA_ERROR_
_SIZE, _POINTER, _FLAGS, _NUMBER = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int
_ARGUMENTS = {
    "cuMemGetAllocationGranularity": (_POINTER, ctypes.c_char_p, _NUMBER),
    "cuMemCreate": (_POINTER, _SIZE, ctypes.c_char_p, _FLAGS),
    "cuMemExportToShareableHandle": (_POINTER, _FLAGS, _NUMBER, _FLAGS),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _NUMBER),
    "cuMemRelease": (_FLAGS,),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _FLAGS, _FLAGS),
    "cuMemAddressFree": (_FLAGS, _SIZE),
    "cuMemMap": (_FLAGS, _SIZE, _SIZE, _FLAGS, _FLAGS),
    "cuMemSetAccess": (_FLAGS, _SIZE, ctypes.c_char_p, _SIZE),
    "cuMemUnmap": (_FLAGS, _SIZE),
    "cuStreamGetCaptureInfo": (_POINTER, _POINTER, _POINTER),  # the first version, which headers name _v2 and later
}


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver


def _status(name: str, *arguments: Any) -> int:
    status: int = getattr(_driver(), name)(*arguments)
    return status


def _call(name: str, *arguments: Any) -> None:
    if status := _status(name, *arguments):
        raise RuntimeError(f"the driver's error {status} of {name}")


def _location(device: int) -> bytes:
    """Packs a CUmemLocation."""
    return struct.pack("=2i", _ON_DEVICE, device)


def _properties(device: int, exported: bool = False) -> bytes:
    """Packs a CUmemAllocationProp: kind, what other processes get, location, and 16 bytes that ask for nothing."""
    return struct.pack("=2i", _PINNED, _DESCRIPTOR if exported else 0) + _location(device) + bytes(16)


@functools.cache
def granularity(device: int) -> int:
    """Returns the granularity: mapped memory begins and ends at multiples of so many bytes."""
    found = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), _properties(device), 0)
    return found.value


class Physical:
    """Memory of a GPU, which has no address until an `Addresses` maps it. It lives as long as one does, or this."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, _call, "cuMemRelease", handle).atexit = False

    @classmethod
    def new(cls, nbytes: int, device: int, exported: bool = False) -> "Physical":
        """Takes memory. nbytes: a multiple of the granularity. exported: other processes may have it as well."""
        handle = ctypes.c_ulonglong()
        create = "cuMemCreate", ctypes.byref(handle), nbytes, _properties(device, exported), 0
        if _status(*create) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # memory that torch keeps for tensors to come
            if _status(*create) == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"CopyEngines: memory: expected {nbytes} bytes on GPU {device}, got none")
        if not handle.value:
            _call(*create)
        return cls(handle.value)

    def exported(self) -> int:
        """Returns a file's descriptor, which stands for the memory in other processes."""
        descriptor = ctypes.c_int()
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), self.handle, _DESCRIPTOR, 0)
        return descriptor.value

    @classmethod
    def imported(cls, descriptor: int) -> "Physical":
        handle = ctypes.c_ulonglong()
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _DESCRIPTOR)
        return cls(handle.value)


class Addresses:
    """Addresses of a GPU for parts of equal size. The caller stops the GPU from using them before they end."""

    def __init__(self, parts: int, nbytes: int, device: int) -> None:
        """Reserves addresses. nbytes: a part's, a multiple of the granularity."""
        while _to_free and not torch.cuda.is_current_stream_capturing():
            _free(*_to_free.pop())
        self._nbytes, self._device = nbytes, device
        start = ctypes.c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(start), parts * nbytes, 0, 0, 0)
        self._start, self._mapped = start.value, [False] * parts
        weakref.finalize(self, _free, self._start, nbytes, self._mapped, device).atexit = False

    def map(self, part: int, memory: Physical) -> None:
        """Maps a part to a memory of as many bytes."""
        start = self._start + part * self._nbytes
        if self._mapped[part]:
            _call("cuMemUnmap", start, self._nbytes)
        self._mapped[part] = False
        _call("cuMemMap", start, self._nbytes, 0, memory.handle, 0)
        self._mapped[part] = True
        _call("cuMemSetAccess", start, self._nbytes, _location(self._device) + struct.pack("=i", _READ_WRITE), 1)

    def tensor(self) -> Tensor:
        """Returns all parts, which are mapped, as one uint8 tensor that keeps this object."""
        made = torch.as_tensor(self, device=torch.device("cuda", self._device))
        if made.data_ptr() != self._start:  # torch would copy what the driver says is of another GPU
            raise RuntimeError(f"CopyEngines: memory: expected addresses of GPU {self._device}, got a copy")
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (len(self._mapped) * self._nbytes,)
        return {"shape": shape, "typestr": "|u1", "data": (self._start, False), "strides": None, "version": 3}


_to_free: list[tuple[int, int, list[bool], int]] = []  # arguments of `_free`


def _free(start: int, nbytes: int, mapped: list[bool], device: int) -> None:
    if torch.cuda.is_current_stream_capturing():  # a wait for the GPU would end the capture
        _to_free.append((start, nbytes, mapped, device))
        return
    torch.cuda.synchronize(device)  # kernels may run that use it
    for part, is_mapped in enumerate(mapped):
        if is_mapped:
            _call("cuMemUnmap", start + part * nbytes, nbytes)
    _call("cuMemAddressFree", start, len(mapped) * nbytes)


def current_stream(device: torch.device) -> Any:
    """Returns torch's current stream of a device. torch asks the driver, several times, unless it has the index."""
    return getattr(torch, device.type).current_stream(device.index)


def capture_of(stream: Any) -> int:
    """Returns the number of the capture in a CUDA graph that a stream of torch is in; 0 without one."""
    handle = getattr(stream, "cuda_stream", 0)
    if not handle:  # a stream of the CPU, or the default stream, which cannot be captured
        return 0
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    _call("cuStreamGetCaptureInfo", handle, ctypes.byref(status), ctypes.byref(number))
    return number.value if status.value else 0


class Moment:
    """An event of a stream at this moment, for streams of the same capture, or of none.

    A stream of another capture does not wait for it, which the driver refuses. `torch.cuda.graph` begins a capture when
    the GPU is idle, and a replay runs after all that its stream has run before.
    """

    def __init__(self, stream: Any) -> None:
        self._event, self._capture = stream.record_event(), capture_of(stream)

    def wait(self, stream: Any) -> None:
        if capture_of(stream) == self._capture:
            stream.wait_event(self._event)
