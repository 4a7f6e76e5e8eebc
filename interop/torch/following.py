"""A function that is called with a module of torch once someone imports it, for modules whose import takes long."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def follow(name: str, function: Callable[[ModuleType], None]) -> None:
    """Calls the function with the module of this name: now if it is imported, else after each of its imports."""
    if name in sys.modules:
        function(importlib.import_module(name))  # waits for an import in another thread
    sys.meta_path.insert(0, _Finder(name, function))


class _Finder:
    """Finds one module as the other finders do, and has the function follow its execution."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function, self.asks_others = name, function, False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or self.asks_others:
            return None
        self.asks_others = True
        try:
            others = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec: ModuleSpec | None = next(filter(None, (find(name, path, target) for find in others)), None)
        finally:
            self.asks_others = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            stands_for: Any = _Loader(spec.loader, self.function)
            spec.loader = stands_for
        return spec


class _Loader:
    """Stands for a loader, which may serve other modules too, until the module is executed."""

    def __init__(self, loader: Any, function: Callable[[ModuleType], None]) -> None:
        self._loader, self._function = loader, function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copies are made without attributes
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._function(module)
