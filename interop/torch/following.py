"""A function that is called with a module of torch once someone imports it, for modules whose import takes long."""

import importlib.util
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
            spec = importlib.util.find_spec(name)
        finally:
            self.asks_others = False
        loader: Any = spec and spec.loader
        if loader is not None:

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # that of its class follows
                loader.exec_module(module)
                self.function(module)

            loader.exec_module = exec_module
        return spec
