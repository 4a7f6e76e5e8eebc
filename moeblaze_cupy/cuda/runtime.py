"""Launch records, and what carries them out: the device, the stream and the allocator of one public call.

A `Launch` is all of a kernel launch but its addresses. It depends on shapes, strides, dtypes and options alone, so the
operations make it once per layout. `Runtime.launch` fills in addresses and passes the kernel's struct to the driver.
"""

import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, is_dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import loader, tensor_map
from moeblaze_cupy.cuda.loader import Variant
from moeblaze_cupy.cuda.structs import Params, params_of
from moeblaze_cupy.cuda.tensor_map import TensorMap
from moeblaze_cupy.frameworks import Buffer


class Tiles(NamedTuple):
    """The tiles of a product: rows and columns of each, and how many there are; `at_most`: the routing decides."""

    rows: int
    columns: int
    number: int
    at_most: bool = False


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch without its addresses.

    addresses: the names, in the kernel's struct, of `Runtime.launch`'s addresses, in that order. Names that the struct
    does not have are left out, as the tiers' kernels differ in a few. scalars: the struct's numbers. maps: its
    tensor maps, without their addresses. why: the reasons for this variant and grid, for `explain`. overlaps: it may
    start while the launch before it in the stream ends; see wait_for_last_launch in kernels_cu/common/ptx_sm80.cuh.
    """

    variant: Variant
    grid: tuple[int, ...]
    threads: int
    addresses: tuple[str, ...]
    scalars: Mapping[str, float]
    shared_bytes: int = 0
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    tiles: Tiles | None = None
    overlaps: bool = False
    bound: dict[int, "_Bound"] = field(default_factory=dict, repr=False)  # bound launches by device

    @property
    def params(self) -> Params:
        return params_of(self.variant)

    @property
    def blocks(self) -> tuple[int, int, int]:
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    @property
    def lines(self) -> tuple[str, ...]:
        """Returns `explain`'s and MOEBLAZE_LOG's lines: kernel, geometry, the variant's constants, tiles, reasons."""
        grid = " x ".join(map(str, self.grid))
        shared = f", {self.shared_bytes:,} bytes of dynamic shared memory" if self.shared_bytes else ""
        found = [f"{self.variant.source}:{self.variant.entry}, grid {grid}, {self.threads} threads{shared}"]
        if constants := self.variant.constants:
            found.append(f"constants: {constants}")
        if self.tiles:
            rows, columns, number, at_most = self.tiles
            found.append(f"tiles: {rows} rows x {columns} columns, {'at most ' if at_most else ''}{number:,}")
        if self.overlaps:
            found.append("from sm_90 on it may start while the launch before it ends")
        return (*found, *self.why)


class _Arguments:
    """One struct of parameters in host memory, and the list of one pointer to it that the driver reads.

    pack: writes the addresses that are no tensor maps, in the order of the struct.
    """

    __slots__ = ("_keep", "encoded", "memory", "pack", "pointer")

    def __init__(self, params: Params, scalars: Mapping[str, float]) -> None:
        raw = np.zeros(params.size + 64, np.uint8)
        raw = raw[-raw.ctypes.data % 64 :][: params.size]  # tensor maps lie on multiples of 64
        values = raw.view(params.dtype)
        for name in params.scalars:
            values[name] = scalars[name]
        addresses = np.array([raw.ctypes.data], np.uint64)
        self.memory, self.pointer = raw.data, addresses.ctypes.data
        self.encoded: tuple[int | None, ...] = (None,) * len(params.maps)  # address in each map
        pointers = struct.Struct(f"={len(params.pointers)}Q")
        self.pack = functools.partial(pointers.pack_into, self.memory, 128 * len(params.maps))
        self._keep = addresses


class _Bound:
    """A launch on one device: its kernel, and memory for its arguments.

    A launch in progress has a struct to itself, so threads do not share one. The driver copies it while it launches.
    """

    __slots__ = (
        *("driver_launch", "free", "geometry", "kernel", "map_addresses", "maps", "params", "pointers", "scalars"),
    )

    def __init__(self, device: int, launch: Launch) -> None:
        self.kernel = loader.kernel(device, launch.variant, launch.shared_bytes)
        params = self.params = launch.params  # after the kernel: who loaded it has read them
        self.scalars = launch.scalars
        self.geometry = (*launch.blocks, launch.threads, 1, 1, launch.shared_bytes)
        self.driver_launch = self.kernel.launcher(self.geometry, launch.overlaps)
        self.maps = [launch.maps[name] for name in params.maps]
        self.map_addresses, self.pointers = (
            _picked(launch.addresses, names) for names in (params.maps, params.pointers)
        )
        self.free: list[_Arguments] = []
        if os.environ.get("MOEBLAZE_LOG", "0") not in ("", "0"):
            print(
                "\n    ".join((f"moeblaze_cupy: device {device}: {launch.lines[0]}", *launch.lines[1:])),
                file=sys.stderr,
            )

    def run(self, stream: int, values: tuple[int, ...]) -> None:
        """Raises RuntimeError with the kernel's name if the driver refuses the launch."""
        try:
            arguments = self.free.pop()
        except IndexError:
            arguments = _Arguments(self.params, self.scalars)
        if self.maps:
            addresses = self.map_addresses(values)
            if addresses != arguments.encoded:
                self._encode(arguments, addresses)
        arguments.pack(*self.pointers(values))
        try:
            self.driver_launch(stream, arguments.pointer, 0)
        except RuntimeError as error:
            raise self.kernel.refused(self.geometry, error) from error
        self.free.append(arguments)

    def _encode(self, arguments: _Arguments, addresses: tuple[int, ...]) -> None:
        """Writes the tensor maps whose addresses differ from those of the last launch."""
        for i, (address, before) in enumerate(zip(addresses, arguments.encoded, strict=True)):
            if address != before:
                arguments.memory[128 * i : 128 * (i + 1)] = tensor_map.encode(address, self.maps[i])
        arguments.encoded = addresses


def _picked(names: tuple[str, ...], picked: tuple[str, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Returns a function that picks the values of `picked` from a sequence with one value for each of `names`."""
    first, *others = map(names.index, picked or names[:1])
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))  # a tuple in both cases


@dataclass(slots=True)
class Runtime:
    """The place where one call runs: allocator (a framework of `frameworks`), device, stream (a pointer)."""

    framework: arrays.DeviceFramework
    device: int
    stream: int

    @classmethod
    def current(cls, framework: arrays.DeviceFramework, device: int) -> "Runtime":
        """Returns a runtime on the framework's current stream of the device, which must be current."""
        loader.bind_context(device)
        return cls(framework, device, framework.stream(device))

    def empty(self, shape: tuple[int, ...], dtype: str, transposed: bool = False) -> Buffer:
        """Returns new uninitialised memory of the framework; see `arrays.DeviceFramework`."""
        return self.framework.empty(shape, dtype, self.device, transposed)

    def clear(self, address: int, nbytes: int) -> None:
        """Zeroes memory, in the stream's order."""
        loader.clear(address, nbytes, self.stream)

    def launch(self, launch: Launch, *values: int) -> None:
        """Launches with these addresses, in the order of `launch.addresses`; 0 for an absent array."""
        bound = launch.bound.get(self.device)
        if bound is None:
            bound = launch.bound[self.device] = _Bound(self.device, launch)
        bound.run(self.stream, values)


def launches_in(steps: Any) -> Iterator[Launch]:
    """Returns the launches among the fields of an operation's configuration, in their order."""
    if isinstance(steps, Launch):
        yield steps
    elif isinstance(steps, tuple):
        for part in steps:
            yield from launches_in(part)
    elif is_dataclass(steps):
        yield from launches_in(tuple(vars(steps).values()))


def compile_ahead(device: int, steps: Any) -> bool:
    """Makes other threads compile the kernels of an operation. Returns False if all are compiled."""
    return loader.compile_ahead(device, (launch.variant for launch in launches_in(steps)))


def current_device(device: int) -> AbstractContextManager[Any]:
    """Returns a context manager within which the device is current."""
    cuda = loader.import_cupy().cuda
    return _ALREADY_CURRENT if cuda.runtime.getDevice() == device else cuda.Device(device)


_ALREADY_CURRENT = nullcontext()


MAX_RECORDS = 256  # records per cache: layouts that come once, as with varying numbers of tokens, push others out
Key = tuple[Any, ...]  # a key that two calls share if one record serves both
Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.Lock()
_records: dict[Key, "Record"] = {}
_caches: list[Any] = []


@dataclass(slots=True, eq=False)
class Record:
    """A public call whose arguments have passed all checks: where it runs, and its plan."""

    framework: arrays.DeviceFramework
    device: int
    plan: Any  # the configuration of the public function's operation


def cached(configure: Function) -> Function:
    """Keeps the results of a pure function of layouts, options and device limits."""
    kept = functools.lru_cache(maxsize=MAX_RECORDS)(configure)
    _caches.append(kept)
    return kept  # type: ignore[return-value]  # it is called as `configure` is


def key_of(function: str, options: Any, given: Sequence[Any]) -> tuple[Key | None, list[int]]:
    """Returns the key of a call's record, its layouts last, and the addresses of its arrays: 0 for an absent one, None.

    The key is None for arrays that neither CuPy nor torch made, and for arrays of more than one framework. Such calls
    have no record. A call on the CPU has none either, though tensors there have a key.
    """
    framework = arrays.device_framework_of(tuple(map(type, given)))
    if framework is None:
        return None, []
    try:
        layouts, pointers = framework.layouts(given)
    except (AttributeError, RuntimeError, TypeError):  # arrays that cannot be read: checks say why
        return None, []
    return (function, options, framework, layouts), pointers


def find(key: Key | None) -> Record | None:
    try:
        return _records.get(key)  # type: ignore[arg-type]  # None is no key of it
    except TypeError:  # an option that is not hashable is not a valid one
        return None


def keep(key: Key | None, record: Record) -> Record:
    """Keeps a record, drops the oldest of too many, and returns it. Options that are not hashable have no record."""
    if key is not None:
        with _lock, suppress(TypeError):
            _records[key] = record
            if len(_records) > MAX_RECORDS:
                del _records[next(iter(_records))]
    return record


def forget() -> None:
    """Drops all records. A caller that changes their inputs, such as MOEBLAZE_TIER, needs it."""
    with _lock:
        _records.clear()
    for cache in _caches:
        cache.cache_clear()
