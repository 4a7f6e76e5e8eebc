"""A GPU without memory or arithmetic: it logs what the layer asks CuPy and the driver for."""

import ctypes
import struct
import sys
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import launch_config, loader, runtime, tensor_map
from moeblaze_cupy.cuda.structs import params_of
from moeblaze_cupy.tools.memory import PLAIN
from moeblaze_cupy.types import GRADIENTS, LayerOptions, is_gated

GAP = 1 << 20  # bytes around every buffer, so that an address is in one or near one
SMALL = 1 << 40  # buffers lie beyond: no size or stride of these tests is as large
STREAM = 7


class Buffer:
    """Device memory without bytes behind it."""

    def __init__(self, device, label, nbytes):
        self.device, self.label, self.start, self.nbytes = device, label, device.place(nbytes), nbytes
        device.alive[self.start] = label, nbytes
        self.counts = label[0] == "allocated"
        if self.counts:
            device.used += nbytes
            device.peak = max(device.peak, device.used)

    def __del__(self):
        del self.device.alive[self.start]
        if self.counts:
            self.device.used -= self.nbytes
            self.device.log.append(("free", self.label))


class DeviceArray:
    """As much of a CuPy array as the layer looks at."""

    def __init__(self, buffer, shape, strides, dtype, offset=0, axes=()):
        self.buffer, self.shape, self.strides, self.dtype, self.axes = buffer, shape, strides, dtype, axes
        self.data, self.device = SimpleNamespace(ptr=buffer.start + offset), SimpleNamespace(id=0)

    def swapaxes(self, *axes):
        order = list(range(len(self.shape)))
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
        shape, strides = (tuple(values[i] for i in order) for values in (self.shape, self.strides))
        return DeviceArray(self.buffer, shape, strides, self.dtype, self.data.ptr - self.buffer.start, axes)

    @property
    def nbytes(self):
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


DeviceArray.__name__, DeviceArray.__module__ = "ndarray", "cupy"


class Device:
    """Logs allocations, their ends, clears and launches; addresses as (buffer, offset)."""

    def __init__(self):
        self.alive, self.end, self.fails_at = {}, SMALL, None
        self.used = self.peak = 0  # bytes that were allocated, not those of inputs
        self.local = threading.local()
        self.maps = []
        self.before_reading = lambda: None
        self.lock = threading.Lock()

    @property
    def log(self):
        if not hasattr(self.local, "log"):
            self.local.log, self.local.count = [], 0
        return self.local.log

    def restart(self):
        """Begins a log, in which allocations count from 0."""
        self.log.clear()
        self.local.count = 0

    def place(self, nbytes):
        with self.lock:
            start, self.end = self.end + GAP, self.end + GAP + -(-nbytes // 512) * 512
        return start

    def array(self, label, shape, dtype, offset=0):
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        strides = tuple(int(np.prod(shape[i + 1 :], dtype=object)) * dtype.itemsize for i in range(len(shape)))
        return DeviceArray(Buffer(self, label, nbytes + offset), tuple(shape), strides, dtype, offset)

    def empty(self, shape, dtype):
        log = self.log
        if self.fails_at == self.local.count:
            raise MemoryError
        label = ("allocated", self.local.count)
        self.local.count += 1
        log.append(("allocate", label, tuple(shape), np.dtype(dtype).name))
        return self.array(label, shape, dtype)

    def where(self, address):
        if abs(address) < SMALL:
            return address
        for start, (label, nbytes) in list(self.alive.items()):
            if -GAP // 2 <= address - start < nbytes + GAP // 2:
                return label, address - start
        return "nowhere", address

    def encode(self, pointer, spec):
        self.maps.append((pointer, spec))
        return struct.pack("q120x", len(self.maps) - 1)

    def parameters(self, variant, arguments):
        """The struct that the driver would read: values by name, addresses as places."""
        self.before_reading()
        params = params_of(variant)
        (address,) = (ctypes.c_uint64 * 1).from_address(arguments)
        assert address % 64 == 0
        values = np.frombuffer(ctypes.string_at(address, params.size), params.dtype)[0]
        found = {}
        for name in params.maps:
            pointer, spec = self.maps[struct.unpack_from("q", values[name].tobytes())[0]]
            found[name] = ("map", self.where(pointer), tuple(spec))
        found |= {name: self.where(int(values[name])) for name in params.pointers}
        return found | {name: values[name].item() for name in params.scalars}

    def launched(self, variant, geometry, arguments, stream):
        assert stream == STREAM
        grid, block, shared_bytes = geometry[:3], geometry[3], geometry[6]
        self.log.append(("launch", variant, grid, block, self.parameters(variant, arguments), shared_bytes))

    def cupy(self):
        runtime = SimpleNamespace(
            getDevice=lambda: 0,
            setDevice=lambda device: None,
            memGetInfo=lambda: None,
            memsetAsync=lambda pointer, value, n, stream: self.log.append(("clear", self.where(pointer), value, n)),
        )
        stream = SimpleNamespace(ptr=STREAM)
        return SimpleNamespace(
            empty=self.empty, cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
        )


class Kernel:
    """Stands for loader._Kernel."""

    device: Device

    def __init__(self, device, variant):
        self.variant, self.shared_bytes, self.pointer = variant, 0, id(self)

    def allow(self, shared_bytes):
        self.shared_bytes = shared_bytes

    def launcher(self, geometry, overlaps):
        def launch(stream, arguments, extra):
            assert geometry[6] <= self.shared_bytes and extra == 0
            self.device.launched(self.variant, geometry, arguments, stream)

        return launch


def use(monkeypatch, limits=launch_config.H200) -> Device:
    """Puts the fake in CuPy's place. MOEBLAZE_TIER is left out of account: `limits` has the tier."""
    made = Device()
    cupy = made.cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(loader, "import_cupy", lambda: cupy)
    monkeypatch.setattr(loader, "device_limits", lambda device: limits)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "compile_ahead", lambda device, variants: False)
    monkeypatch.setattr(loader, "_Kernel", type("Kernel", (Kernel,), {"device": made}))
    monkeypatch.setattr(loader, "_thread", loader._Thread())
    monkeypatch.setattr(tensor_map, "encode", made.encode)
    monkeypatch.delenv("MOEBLAZE_TIER", raising=False)
    runtime.forget()
    return made


def limits_of(tier: str) -> launch_config.DeviceLimits:
    """An H200 with this tier's kernels."""
    return replace(launch_config.H200, tier=tier)


@dataclass(frozen=True)
class Layer:
    """A layer's call on a fake device."""

    L: int
    k: int
    E: int
    d: int
    h: int
    order: str = "row"
    activation: str = "swiglu"
    save: str | None = "minimal"
    dtype: type = ml_dtypes.bfloat16
    ids: type = np.int32
    weights: type = np.float32
    offset: int = 0  # of x, in bytes
    needs: tuple = GRADIENTS
    keep_saved: bool = False
    accumulate: tuple = ()
    totals: type = np.float32
    max_slots: int | None = None
    slots: LayerOptions = PLAIN  # of which what slots do is taken
    ragged: bool = False  # the L*k slots as pairs
    memory_limit: int | None = None
    rank: int | None = None  # of float32 factors beside both weights

    @property
    def slots_shape(self):
        return (self.L * self.k,) if self.ragged else (self.L, self.k)

    def weight(self, device, label, E, rows, columns, dtype):
        if self.order.endswith("transposed"):
            return device.array(label, (E, columns, rows), dtype).swapaxes(1, 2)
        return device.array(label, (E, rows, columns), dtype)

    def weights_of(self, device, prefix, dtype):
        E, d, h = self.E, self.d, self.h
        if self.order.startswith("pair"):
            w1 = tuple(self.weight(device, (prefix + "w1", i), E, d, h, dtype) for i in range(2))
        else:
            w1 = self.weight(device, (prefix + "w1",), E, d, h * (1 + is_gated(self.activation)), dtype)
        return {"w1": w1, "w2": self.weight(device, (prefix + "w2",), E, h, d, dtype)}

    def arguments(self, device):
        x = device.array(("x",), (self.L, self.d), self.dtype, self.offset)
        ids = device.array(("ids",), self.slots_shape, self.ids)
        has_weights = self.slots.on_input or not self.slots.unreduced
        weights = device.array(("w",), self.slots_shape, self.weights) if has_weights else None
        return x, ids, weights, *self.weights_of(device, "", self.dtype).values()

    def forward(self, device):
        offsets = device.array(("token_offsets",), (self.L + 1,), np.int32) if self.ragged else None
        options = {"activation": self.activation, "save": self.save, "max_slots": self.max_slots}
        of_slots = {name: getattr(self.slots, name) for name in ("weights_on", "unreduced", "identity_experts")}
        options |= {"token_offsets": offsets, "memory_limit": self.memory_limit, **of_slots}
        if self.rank:
            E, d, h, columns = self.E, self.d, self.h, self.h * (1 + is_gated(self.activation))
            shapes = (E, self.rank, d), (E, columns, self.rank), (E, self.rank, h), (E, d, self.rank)
            options["lora"] = mb.Lora(*(device.array(("factor", i), s, np.float32) for i, s in enumerate(shapes)))
        return mb.moe_forward(*self.arguments(device), **options)

    def backward(self, device, saved):
        options = {"needs": self.needs, "keep_saved": self.keep_saved}
        if self.accumulate:
            sums = self.weights_of(device, "sum of ", self.totals)
            options["accumulate"] = {name: sums[name] for name in self.accumulate}
        shape = (*self.slots_shape, self.d) if self.slots.unreduced else (self.L, self.d)
        grad_out = device.array(("grad_out",), shape, self.dtype)
        return mb.moe_backward(grad_out, saved, **options)


def launches(device):
    """(variant, grid, values by name) of each launch in the log."""
    return [(entry[1], entry[2], entry[4]) for entry in device.log if entry[0] == "launch"]
