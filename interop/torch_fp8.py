"""Copies in e4m3 of a module's weights, and what tells whether they still are those of the weights."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch.multiprocessing.reductions import StorageWeakRef

import moeblaze_cupy as mb
from moeblaze_cupy import fp8_checks
from moeblaze_cupy.structures import Fp8Weights

Tensor = torch.Tensor
Weight = Tensor | tuple[Tensor, Tensor]  # w1 may be a pair (gate, up)


# What backward has used since it was written: optimizers may change weights in ways that torch does not count.
_used_in_backward: "weakref.WeakSet[Fp8Weights]" = weakref.WeakSet()


def after_backward(weights: Fp8Weights | None) -> None:
    """A backward that made gradients of weights calls this with the e4m3 weights that it used."""
    if weights is not None:
        _used_in_backward.add(weights)


class Gathered(Fp8Weights):
    """Of parameters that come in e4m3 and are freed after forward: arrays that forward does not read hold anything.

    in_backward: given the save policy, returns arrays of the shapes and strides of w1 and w2, and `Fp8Weights` of which
    backward may read what it needs. Autograd saves none of these, because they may lie elsewhere by then.
    """

    __slots__ = ("in_backward",)  # apart from the fields of the weights
    in_backward: Callable[[str], tuple[Tensor, Tensor, Fp8Weights]]


class Copies:
    """`Fp8Weights` of w1 and w2, written again, in the same memory, when these may have changed.

    A storage, an address or a version that is another one tells that, and a backward with gradients of weights since
    they were written. Reading these takes no wait for the GPU. A weak reference to a storage keeps a later one from
    having its identity.
    Other storages than before are those of other parameters, such as averaged ones that are swapped in. A backward that
    is still to come may need what was written from the first, so theirs are written to new memory. Where a graph may
    know the address they are not, and such a backward raises RuntimeError.
    A use on another CUDA stream than the one that wrote them waits for that stream. What another stream has read, or is
    written on another one, gets new memory, but where a graph may know the address.
    A copy of a module, by deepcopy or pickle, begins without any.
    """

    def __init__(self) -> None:
        self.weights: Fp8Weights | None = None
        self.held = False  #: `weights` are used as they are
        self._held_in_capture = False  # by what a graph captures after them
        self.captured = False  #: a CUDA graph writes `weights`, and its replays may change w1 and w2 uncounted
        self._shapes: tuple[tuple[torch.Size, torch.device], ...] = ()  # of w1, or its parts, and w2 when written
        self._in_graphs = False  # captured and compiled graphs may read `weights`
        self._storages: tuple[StorageWeakRef, ...] = ()  # of w1 and w2 when written
        self._fresh = False  # False has w1 and w2 read anew
        self._versions: tuple[int, ...] = ()
        self._parameters: tuple[weakref.ref[Tensor], ...] = ()
        self._stream: torch.cuda.Stream | None = None  # that wrote `weights` outside of captures
        self._written: torch.cuda.Event | None = None
        self._read_elsewhere = False  # on another stream
        self.gathered: Any = None  #: the `fsdp_e4m3.Experts` that have w1 and w2 travel in e4m3, if any do

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Copies, ()

    def forget(self) -> None:
        """The next use reads w1 and w2 anew."""
        self._fresh = self.held = self._held_in_capture = False

    def belong_to(self, *parameters: Tensor) -> bool:
        """Whether `assign` was last called with these very objects."""
        told = tuple(reference() for reference in self._parameters)
        return len(told) == len(parameters) and all(a is b for a, b in zip(told, parameters, strict=True))

    def assign(self, *parameters: Tensor) -> None:
        """Notes whose copies these are, for `belong_to`."""
        self._parameters = tuple(map(weakref.ref, parameters))

    def current(self, w1: Weight, w2: Tensor, gate_up: str) -> Fp8Weights:
        """The copies of w1 and w2 as they are now. A capture writes them in its graph. From then on every call does."""
        capturing, tensors = _capturing(w2), (*parts_of(w1), w2)
        fresh = self._held_in_capture if capturing else not self.captured and self._are_of(tensors)
        if self.weights is None or not fresh:
            if not (capturing or self._in_graphs or self._have_storages(tensors)):
                self.weights = None
            self.quantize(w1, w2, gate_up)
        found = self.in_order()
        assert found is not None
        return found

    def in_order(self) -> Fp8Weights | None:
        """`weights`, to be read on the current stream after they have been written."""
        if torch.compiler.is_compiling() or self._stream is None or torch.cuda.is_current_stream_capturing():
            return self.weights  # a capture begins when the GPU is idle
        stream = torch.cuda.current_stream(self._stream.device.index)
        if stream != self._stream and self.weights is not None and self._written is not None:
            stream.wait_event(self._written)
            for field in fp8_checks.FIELDS:
                getattr(self.weights, field).record_stream(stream)
            self._read_elsewhere = True
        return self.weights

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it none
    def quantize(self, w1: Weight, w2: Tensor, gate_up: str, hold: bool = False) -> Fp8Weights:
        """w1 (E, d, 2h), a pair of (E, d, h), or (E, d, h); w2 (E, h, d); hold: until the next call, or `forget`.

        What a graph captured is not written yet, so a hold in a capture is one for captured forwards.
        """
        tensors = (*parts_of(w1), w2)
        shapes = tuple((tensor.shape, tensor.device) for tensor in tensors)
        into = self.weights if shapes == self._shapes else None
        stream = torch.cuda.current_stream(w2.device.index) if w2.is_cuda and not _capturing(w2) else None
        if stream is not None and self._stream is not None and (self._read_elsewhere or stream != self._stream):
            if not self._in_graphs:
                into = None
            elif self._written is not None:
                stream.wait_event(self._written)
        if into is not None and not self._have_storages(tensors):
            for field in fp8_checks.FIELDS:
                torch.autograd.graph.increment_version(getattr(into, field))
        # Backward keeps no tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.weights = mb.quantize_weights(w1, w2, into, gate_up=gate_up)
        if stream is not None:
            self._stream, self._written, self._read_elsewhere = stream, stream.record_event(), False
        self._shapes = shapes
        _used_in_backward.discard(self.weights)
        capturing = _capturing(w2)
        self.held, self._held_in_capture = hold and not capturing, hold and capturing
        if hold:  # graphs of compiled code need no copies of them
            for tensor in (getattr(self.weights, field) for field in fp8_checks.FIELDS):
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.captured |= capturing
        self._in_graphs |= capturing or hold
        self._storages = tuple(map(_identity, tensors))
        self._fresh = not any(tensor.is_inference() for tensor in tensors)
        self._versions = _versions(tensors) if self._fresh else ()
        return self.weights

    def _are_of(self, tensors: Sequence[Tensor]) -> bool:
        uncounted = self.weights in _used_in_backward or any(tensor.is_inference() for tensor in tensors)
        if uncounted or not (self._fresh and self._have_storages(tensors)):
            return False
        return self._versions == _versions(tensors)

    def _have_storages(self, tensors: Sequence[Tensor]) -> bool:
        if len(self._storages) != len(tensors):
            return False
        same = zip(self._storages, tensors, strict=True)
        return all(ref.cdata == tensor.untyped_storage()._cdata for ref, tensor in same)


def parts_of(w1: Weight) -> tuple[Tensor, ...]:
    """The arrays of w1: one, or gate and up."""
    return w1 if isinstance(w1, tuple) else (w1,)


def _identity(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch gives it no types


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(n for tensor in tensors for n in (tensor.data_ptr(), tensor._version))


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_parts(function: str, parameters: Sequence[Any]) -> None:
    """Raises RuntimeError for DTensors, as FSDP2 leaves parameters between forwards."""
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        expected = "whole parameters; of FSDP2's each forward quantises what it gathered"
        raise RuntimeError(f"{function}: expected {expected}, got DTensors")
