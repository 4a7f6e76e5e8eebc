"""Arrays of any framework, seen as a kernel sees them: pointer, shape, strides, dtype, device.

CuPy and torch are read directly; other DLPack arrays come in through `dlpack`. Nothing here
imports CuPy or torch: an array can only exist if its framework is loaded.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from moeblaze_cupy import private

ITEMSIZE = {
    **{"bool": 1, "uint8": 1, "float8_e4m3fn": 1, "int32": 4, "int64": 8},
    **{"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8},
}
CPU = -1
ALIGNMENT = 16  # bytes: the largest access of a kernel to global memory, and less than what every allocation has


class Layout(NamedTuple):
    """All of an array that checks and launches depend on, but not its contents. `strides` are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    misalignment: int = 0  # the address modulo ALIGNMENT

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


def packed(shape: tuple[int, ...], dtype: str, device: int = 0) -> Layout:
    """Returns the layout of new memory, in the order of the dimensions."""
    return Layout(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), dtype, device)


def in_memory(sizes: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Returns the sizes or strides of new memory in the order of memory. transposed: see `DeviceFramework.empty`."""
    return (sizes[0], sizes[2], sizes[1]) if transposed else sizes


class Buffer:
    """New memory: an array of the caller's framework, and its address."""

    __slots__ = ("array", "ptr")

    def __init__(self, array: Any, ptr: int) -> None:
        self.array, self.ptr = array, ptr


@dataclass(slots=True, eq=False)  # not frozen, which would take three times as long to make
class Array:
    """One array. `strides` are in elements; `device` is a CUDA ordinal, or -1 for the CPU; `owner` keeps it alive."""

    owner: Any
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.strides, self.dtype, self.device, self.ptr % ALIGNMENT)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def is_contiguous(self) -> bool:
        """Returns True if the array is in C order; strides of dimensions of size 1 do not matter."""
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return self.size == 0
            expected *= n
        return True


def _describe_strided(array: Any, pointer: int, device: int) -> Array:
    """Describes a NumPy or CuPy array, whose strides are in bytes."""
    itemsize = array.dtype.itemsize
    if not itemsize:  # JAX's float0, for example
        raise TypeError(f"moeblaze_cupy: dtype: expected numbers, got {array.dtype}")
    return Array(
        array, pointer, tuple(array.shape), tuple(s // itemsize for s in array.strides), array.dtype.name, device
    )


class Framework(Protocol):
    """The library whose arrays these are. The classes below serve as they are, without instances."""

    @property
    def name(self) -> str: ...

    def describe(self, array: Any, /) -> Array:
        """Describes an array. Raises TypeError or RuntimeError for one whose memory kernels and NumPy cannot read."""


class DeviceFramework(Framework, Protocol):
    """A framework with arrays on CUDA devices, memory for them, and a stream."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, transposed: bool, /) -> Buffer:
        """Returns new memory on the device, without contents: packed, in the order of the dimensions.

        transposed: the last two of three dimensions are exchanged in memory. The device is current.
        """

    def layouts(self, given: Sequence[Any], /) -> tuple[tuple[Any, ...], list[int]]:
        """Returns a key of what `describe` tells of these arrays, with the remainders of addresses; and the addresses.

        An absent array is None, also in the key, and has the address 0.
        """

    def stream(self, device: int, /) -> int:
        """Returns the current stream of the device, which must be current."""


class NumPy:
    """Host arrays: NumPy's own."""

    name: ClassVar[str] = "numpy"

    @staticmethod
    def describe(array: Any) -> Array:
        if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"moeblaze_cupy: mask: expected an array without one, got {type(array)}")
        if not array.dtype.isnative:  # its dtype has the name of the native one, but does not compare equal
            raise TypeError(f"moeblaze_cupy: byte order: expected the machine's own, got dtype {array.dtype.str}")
        return _describe_strided(array, array.ctypes.data, CPU)


class CuPy:
    name: ClassVar[str] = "cupy"

    @staticmethod
    def describe(array: Any) -> Array:
        return _describe_strided(array, array.data.ptr, array.device.id)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int, transposed: bool) -> Buffer:
        stored = in_memory(shape, transposed) if transposed else shape
        array = sys.modules["cupy"].empty(stored, dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return Buffer(array.swapaxes(1, 2) if transposed else array, array.data.ptr)

    @staticmethod
    def layouts(given: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
        layouts: list[Any] = []
        pointers = []
        for a in given:
            if a is None:
                layouts.append(None)
                pointers.append(0)
            else:
                pointer = a.data.ptr
                layouts.append((a.shape, a.strides, a.dtype, a.device.id, pointer % ALIGNMENT))
                pointers.append(pointer)
        return tuple(layouts), pointers

    @staticmethod
    def stream(device: int) -> int:
        pointer: int = sys.modules["cupy"].cuda.get_current_stream().ptr
        return pointer


# A tensor whose storage has been freed lies at its offset in that, which is less than all memory there is.
_PAST_OFFSETS = 1 << 44


class Torch:
    """CUDA tensors by pointer, memory from torch's allocator, torch's current stream; CPU tensors through NumPy."""

    name: ClassVar[str] = "torch"

    @staticmethod
    def describe(array: Any) -> Array:
        if array.is_cuda:
            device = array.get_device()
        elif array.is_cpu:
            device = CPU
        else:
            raise TypeError(f"moeblaze_cupy: device: expected a tensor on cpu or cuda, got {array.device.type}")
        try:
            pointer, shape, strides = array.data_ptr(), tuple(array.shape), array.stride()
        except RuntimeError as error:
            expected = "a dense tensor with memory of its own: none that is sparse, nested or batched by vmap"
            raise TypeError(f"moeblaze_cupy: memory: expected {expected}, got {error}") from error
        if pointer < _PAST_OFFSETS and array.numel() > 0:
            if _is_freed(array):
                expected = "a tensor whose storage is there, got one whose storage was freed"
                raise RuntimeError(f"moeblaze_cupy: memory: expected {expected}, as FSDP frees gathered parameters")
            if pointer == 0:  # distributed and fake tensors
                raise TypeError(f"moeblaze_cupy: memory: expected a tensor with memory of its own, got {type(array)}")
        if array.is_neg():  # its memory holds the values with the other sign
            raise TypeError("moeblaze_cupy: memory: expected a tensor's own values, got a lazy negation: resolve_neg()")
        return Array(array, pointer, shape, strides, _torch_name(array.dtype), device)

    #: The transform of a call with these tensors that would take its results for constants, or None.
    transformed: ClassVar[Callable[[Iterable[Any]], str | None]] = staticmethod(private.transform)
    stream: ClassVar[Callable[[int], int]] = staticmethod(private.stream)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: int, transposed: bool) -> Buffer:
        array = _torch_empty(shape, dtype, device, transposed)()
        return Buffer(array, array.data_ptr())

    @staticmethod
    def layouts(given: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
        """See `DeviceFramework`. The key holds what `checks.untracked` reads, so a call with a record has passed it.

        A tensor without memory of its own, such as a DTensor, has the address 0, and shares no record with others. Nor
        does one whose storage has been freed. Its address tells that in most cases, as asking each storage would take
        more than a microsecond of a call.
        Raises RuntimeError where a transform of torch would have to follow the call.
        """
        if Torch.transformed(given) is not None:
            raise RuntimeError
        torch = sys.modules.get("torch")  # None where the arrays only behave like tensors
        tracked = torch is not None and torch.is_grad_enabled()
        pointers = [0 if a is None else a.data_ptr() for a in given]
        layouts = [
            None
            if a is None
            else (
                a.shape,
                a.stride(),
                a.dtype,
                a.device,
                pointer % ALIGNMENT if pointer >= _PAST_OFFSETS or (pointer and not _is_freed(a)) else None,
                tracked and a.requires_grad,
            )
            for a, pointer in zip(given, pointers, strict=True)
        ]
        return tuple(layouts), pointers

    @staticmethod
    def to_numpy(array: Any) -> "np.ndarray[Any, Any]":
        torch = sys.modules["torch"]
        array = array.detach()
        if array.dtype == torch.bfloat16:
            return Torch.to_numpy(array.view(torch.int16)).view(ml_dtypes.bfloat16)
        if array.element_size() == 1 and array.is_floating_point():  # e4m3 and e8m0, which NumPy knows by their bytes
            return Torch.to_numpy(array.view(torch.uint8))
        host = np.from_dlpack(array)  # Tensor.numpy would leave the storage unable to be resized, which FSDP does
        return host if host.flags.writeable else np.asarray(_Writeable(host))

    @staticmethod
    def in_e4m3(array: Any) -> Any:
        """Returns a tensor of bytes as one of e4m3."""
        return array.view(sys.modules["torch"].float8_e4m3fn)

    @staticmethod
    def from_numpy(array: "np.ndarray[Any, Any]") -> Any:
        torch = sys.modules["torch"]
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


class _Writeable:
    """An array whose memory may be written, though DLPack before torch 2.9 cannot say so."""

    def __init__(self, host: "np.ndarray[Any, Any]") -> None:
        self._host = host  # keeps the memory
        interface = host.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _is_freed(tensor: Any) -> bool:
    """Returns True if the storage of a tensor with elements has no bytes."""
    freed: bool = tensor.untyped_storage().nbytes() == 0
    return freed


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype)[6:]


@functools.lru_cache(maxsize=1024)
def _torch_empty(shape: tuple[int, ...], dtype: str, device: int, transposed: bool) -> Callable[[], Any]:
    """Returns a function that makes such tensors.

    It has the objects that torch would take several microseconds to parse from text. On torch's current device they
    come from the function that torch.compile allocates with.
    """
    torch = sys.modules["torch"]
    shape = tuple(map(int, shape))  # that function takes nothing derived from tuple and int
    stored = in_memory(shape, transposed)
    packed = tuple(math.prod(max(n, 1) for n in stored[i + 1 :]) for i in range(len(stored)))
    strides = in_memory(packed, transposed)
    kind = getattr(torch, dtype)
    by_dispatcher = functools.partial(
        torch.empty_strided, shape, strides, dtype=kind, device=torch.device("cuda", device)
    )
    found = private.empty_on_current_device()
    if found is None:
        return by_dispatcher
    on_current, current_device = found
    return lambda: on_current(shape, strides, kind) if current_device() == device else by_dispatcher()


_DEVICE_FRAMEWORKS: dict[str, DeviceFramework] = {"cupy": CuPy, "torch": Torch}
_FRAMEWORKS: Mapping[str, Framework] = {"numpy": NumPy, **_DEVICE_FRAMEWORKS}


def framework_of(array: Any) -> Framework | None:
    """Returns NumPy, CuPy or Torch by the array's type (or a base of it); None for anything else."""
    return _framework_of_type(type(array))  # type: ignore[arg-type]  # mypy takes classes for unhashable


def count_writes(written: Iterable[Any]) -> None:
    """Tells autograd of torch of writes through pointers, so that a backward that was to read these arrays raises."""
    for array in written:
        if framework_of(array) is Torch and not array.is_inference():  # those have no count, and no backward reads them
            sys.modules["torch"].autograd.graph.increment_version(array)


@functools.cache
def _framework_of_type(kind: type) -> Framework | None:
    for base in kind.__mro__:
        found = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if found is not None and base.__name__ in ("ndarray", "Tensor", "Parameter"):
            return found
    return None


@functools.cache
def device_framework_of(kinds: tuple[type, ...]) -> DeviceFramework | None:
    """Returns CuPy or Torch if arrays of all these types are of this one; else None. Absent arrays are None."""
    found = {_framework_of_type(kind) for kind in kinds if kind is not type(None)}
    framework = found.pop() if len(found) == 1 else None
    return None if framework is None else _DEVICE_FRAMEWORKS.get(framework.name)


Export = Callable[[Any], Any]  # working array -> the caller's kind of array
