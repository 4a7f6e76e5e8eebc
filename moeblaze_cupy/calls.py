"""One public call: its record or its arguments in working form, and the way back to the caller's kind of array."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from moeblaze_cupy import checks, dlpack, frameworks, overlaps, private
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.cuda.runtime import Record, Runtime, current_device
from moeblaze_cupy.frameworks import Array, Buffer, DeviceFramework, Export, Framework, Layout
from moeblaze_cupy.reference import HostArray

Function = TypeVar("Function", bound=Callable[..., Any])
Made = TypeVar("Made")


def keep(array: Any) -> Any:
    return array


def graph_break(function: Function) -> Function:
    """Returns a function that torch.compile calls between its graphs: it cannot follow addresses and NumPy's code."""
    by_torch: Callable[..., Any] = function  # until torch compiles anything

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal by_torch
        if by_torch is function:
            by_torch = private.between_graphs(called, function)
        return by_torch(*arguments, **options)

    private.break_at(called, f"{function.__name__} of moeblaze_cupy has no operator, so it runs between two graphs")
    return cast("Function", called)


class Call:
    """One public call's arrays in working form (NumPy on the CPU; CuPy or torch on CUDA) and the way back.

    compiles: True if kernels of `record` are not compiled yet.
    """

    compiles = False

    def __init__(self, function: str, **given: Any) -> None:
        self.function = function
        self.export: Export = keep
        self.described: dict[str, Array] = {}
        found: dict[str, Framework] = {}
        for name, array in given.items():
            framework = frameworks.framework_of(array)
            if framework is None and not dlpack.is_dlpack(array):
                raise checks.bad_type(
                    function, name, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array)
                )
            try:
                if framework is None:
                    imported = dlpack.import_array(array)
                    if self.export is keep:
                        self.export = dlpack.exporter(array)
                    array, framework = imported, frameworks.framework_of(imported)
                    assert framework is not None  # NumPy or CuPy
                self.described[name] = framework.describe(array)
            except (TypeError, ValueError, BufferError, RuntimeError) as error:
                raise checks.unreadable(function, name, error) from error
            found[name] = framework
        first = next(iter(given))
        self.framework = found[first]
        for name, framework in found.items():
            if framework is not self.framework:
                raise checks.bad_type(function, name, f"a {self.framework.name} array like {first}", framework.name)
        self.device = self.described[first].device
        checks.same_device(function, **self.described)
        self.on_cpu = self.device == frameworks.CPU
        if self.on_cpu:
            loader.check_forced_tier()
        if self.on_cpu and self.framework is frameworks.Torch:
            self.export = frameworks.Torch.from_numpy

    def host(self, name: str) -> HostArray:
        """Returns a working array as NumPy, on the CPU; subclasses such as np.matrix have another arithmetic."""
        owner = self.described[name].owner
        return np.asarray(frameworks.Torch.to_numpy(owner) if self.framework is frameworks.Torch else owner)

    def on_host(self, function: Callable[..., Made], **options: Any) -> Made:
        """Returns what a function of `reference` makes of the arrays, by name, and the options.

        An array replaces an option of the same name.
        """
        given = options | {name: self.host(name) for name in self.described}
        made: Made = exported(self.export, function(**given))
        return made

    def record(self, plan: Any) -> Record:
        self.compiles = runtime.compile_ahead(self.device, plan)
        # CUDA arrays are CuPy's or torch's.
        return Record(cast(DeviceFramework, self.framework), self.device, plan)

    def known_record(self, plan: Any) -> Record:
        """Returns the record of a plan that `runtime.cached` keeps. Only its first call compiles the plan's kernels."""
        key = plan, self.framework, self.device
        return runtime.find(key) or runtime.keep(key, self.record(plan))

    @property
    def limits(self) -> launch_config.DeviceLimits:
        return loader.device_limits(self.device)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Returns the layouts of the arrays that are present, by name."""
        return {name: array.layout for name, array in self.described.items()}


def exported(export: Export, made: Any) -> Any:
    """Returns a working array, a buffer, or a tuple of these and None, with the arrays as the caller's kind."""
    if isinstance(made, Buffer):
        return made.array if export is keep else export(made.array)
    if isinstance(made, tuple):
        return tuple([exported(export, part) for part in made])
    return None if made is None else export(made)


class Lookup:
    """The record of one public call: what an earlier call of such arguments left, or what this one makes.

        look = Lookup("list_pairs", (num_pairs,), ("mask",), (mask,))
        if look.record is None:
            call = look.begin()
            ...  # the checks, of call.described
            if call.on_cpu:
                return call.on_host(reference.list_pairs, num_pairs=num_pairs)
            look.keep(plan)
        return look.run(launch)

    options: what decides the plan beside the layouts of the arrays. names: the names of the arrays, for `begin` and
    `keep`. given: the arrays, None for one that is absent; after `keep` in working form.
    """

    __slots__ = ("call", "export", "function", "given", "key", "names", "pointers", "record")

    def __init__(self, function: str, options: Any, names: tuple[str, ...], given: Sequence[Any]) -> None:
        self.function, self.names, self.given = function, names, given
        self.export: Export = keep
        self.key, self.pointers = runtime.key_of(function, options, given)
        self.record = runtime.find(self.key)

    def begin(self, required: int = 1, counts: bool = False) -> Call:
        """Returns the call, for the checks. required: the number of first arrays that are not optional.

        counts: the results are integers, so tensors that require a gradient are read as they are.
        """
        given = {
            name: array
            for i, (name, array) in enumerate(zip(self.names, self.given, strict=True))
            if array is not None or i < required
        }
        (checks.no_transform if counts else checks.untracked)(self.function, given)
        self.call = Call(self.function, **given)
        return self.call

    def overlaps(self, written: int) -> bool:
        """Returns True if the record serves arrays of whose last `written` one may share memory with another."""
        record = self.record
        if record is None or self.key is None:
            return False
        return overlaps.ranges_meet(record.framework is frameworks.CuPy, self.key[-1], self.pointers, written)

    def keep(self, plan: Any) -> Record:
        """Keeps the plan of a call on CUDA that has passed all checks."""
        return self.keep_described(plan, self.call, [self.call.described.get(name) for name in self.names])

    def keep_described(self, plan: Any, call: Call, described: Sequence[Array | None]) -> Record:
        """Keeps the plan, like `keep`, with the arrays of the call in their order."""
        self.pointers = [array.ptr if array else 0 for array in described]
        self.given, self.export = [array and array.owner for array in described], call.export
        self.record = runtime.keep(self.key, call.record(plan))
        return self.record

    def run(self, launch: Callable[[Runtime, Any, list[int]], Any]) -> Any:
        """Launches with the plan and the addresses of the arrays, 0 for an absent one. Exports what that returns."""
        record = self.record
        assert record is not None
        with current_device(record.device):
            here = Runtime.current(record.framework, record.device)
            return exported(self.export, launch(here, record.plan, self.pointers))


def launched(run: Runtime, launch: runtime.Launch | None, pointers: list[int]) -> None:
    """Launches the plan of a call that is one launch to the caller's arrays; does nothing for None."""
    if launch is not None:
        run.launch(launch, *pointers)
