"""One public call: its arguments in working form, where they are, and the way back to the caller's kind of array."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from moeblaze_cupy import checks, dlpack
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.runtime import Prepared
from moeblaze_cupy.frameworks import DeviceFramework, Export, Framework
from moeblaze_cupy.reference import HostArray

Function = TypeVar("Function", bound=Callable[..., Any])


def keep(array: Any) -> Any:
    return array


def untraced(function: Function) -> Function:
    """A function that torch.compile calls between its graphs, as it cannot follow addresses and NumPy's code."""
    by_torch: Callable[..., Any] | None = None

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal by_torch
        if by_torch is None:
            if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and its import takes seconds
                return function(*arguments, **options)
            dynamo = importlib.import_module("torch._dynamo.decorators")
            dynamo.skip(called)  # this frame alone; what it calls comes under `disable`
            by_torch = dynamo.disable(function)
        return by_torch(*arguments, **options)

    return cast("Function", called)


class Call:
    """One public call's arrays in working form (NumPy on the CPU; CuPy or torch on CUDA) and the way back."""

    def __init__(self, function: str, **given: Any) -> None:
        self.function = function
        self.export: Export = keep
        self.described: dict[str, arrays.Array] = {}
        frameworks: dict[str, Framework] = {}
        for name, array in given.items():
            framework = arrays.framework_of(array)
            if framework is None and not dlpack.is_dlpack(array):
                raise checks.bad_type(
                    function, name, "a NumPy, CuPy or torch array, or one with __dlpack__", type(array)
                )
            try:
                if framework is None:
                    imported = dlpack.import_array(array)
                    if self.export is keep:
                        self.export = dlpack.exporter(array)
                    array, framework = imported, arrays.framework_of(imported)
                    assert framework is not None  # NumPy or CuPy
                self.described[name] = framework.describe(array)
            except (TypeError, ValueError, BufferError, RuntimeError) as error:
                raise checks.unreadable(function, name, error) from error
            frameworks[name] = framework
        first = next(iter(given))
        self.framework = frameworks[first]
        for name, framework in frameworks.items():
            if framework is not self.framework:
                raise checks.bad_type(function, name, f"a {self.framework.name} array like {first}", framework.name)
        self.device = self.described[first].device
        checks.same_device(function, **self.described)
        self.on_cpu = self.device == arrays.CPU
        if self.on_cpu:
            loader.check_forced_tier()
        if self.on_cpu and self.framework is arrays.Torch:
            self.export = arrays.Torch.from_numpy

    def host(self, name: str) -> HostArray:
        """A working array as NumPy, on the CPU; subclasses such as np.matrix have their own idea of arithmetic."""
        owner = self.described[name].owner
        return np.asarray(arrays.Torch.to_numpy(owner) if self.framework is arrays.Torch else owner)

    def prepared(self, steps: Any) -> Prepared:
        # CUDA arrays are CuPy's or torch's.
        return Prepared(cast(DeviceFramework, self.framework), self.device, steps)

    @property
    def limits(self) -> launch_config.DeviceLimits:
        return loader.device_limits(self.device)

    def layout(self, *names: str) -> list[arrays.Layout]:
        return [self.described[name].layout for name in names]

    def pointers(self) -> list[int]:
        """In the order in which the arrays were given."""
        return [array.ptr for array in self.described.values()]

    def owners(self) -> list[Any]:
        return [array.owner for array in self.described.values()]
