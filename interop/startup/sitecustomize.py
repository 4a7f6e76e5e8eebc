"""Python runs this file when it starts. It has imports of moeblaze_cupy follow those of transformers or Megatron-Core.

The variable MOEBLAZE_RUN says which: "default", "import", "megatron" or "off". Nothing else is imported at start-up, so
a program without either pays for this file alone. If this file hides another `sitecustomize`, it runs that one too.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the import of typing would take longer than all of this file
    from typing import Any

FOLDER = os.path.dirname(os.path.realpath(__file__))
MEGATRON = "moeblaze_cupy.interop.megatron:install_loaded"
MODES = {  # by a module that all models import: the module of this package that follows, or its function
    "default": {"transformers.modeling_utils": "moeblaze_cupy.interop.transformers.default"},
    "import": {"transformers.modeling_utils": "moeblaze_cupy.interop.transformers"},
    "megatron": {  # right after each: importing `hybrid_layer_specs` calls what they define
        "megatron.core.models.backends": MEGATRON,
        "megatron.core.extensions.transformer_engine_spec_provider": MEGATRON,
    },
}
MODE = os.environ.get("MOEBLAZE_RUN", "default")


class Finder:
    """Finds the modules of a table as the other finders do, and has another import follow each."""

    def __init__(self, follows: dict[str, str]) -> None:
        self.follows = follows

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        follows = self.follows.pop(name, None)  # this finder is among those that are asked next
        if follows is None:
            return None
        try:
            spec = find(name, path)
        finally:
            self.follows[name] = follows
        if spec is not None:
            spec.loader = Loader(spec.loader, self.follows)
        return spec


class Loader:
    """The loader of a module, with another import after it."""

    def __init__(self, loader: "Any", follows: dict[str, str]) -> None:
        self.loader, self.follows = loader, follows

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def exec_module(self, module: "Any") -> None:
        # transformers reads the sources of its modules, which inspect finds by their own loaders.
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        follows = self.follows.get(module.__name__)
        if follows is None:
            return
        name, _, function = follows.partition(":")
        try:
            __import__(name)
            if function:
                getattr(sys.modules[name], function)()
        except Exception as error:
            self.follows.clear()
            tell(f"{sys.executable} cannot import {name}, so the layer is not used: {error!r}")
        else:
            if MODE == "import":
                tell("'moeblaze' is registered with transformers, for models that name it")


def tell(text: str) -> None:
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0" and sys.stderr is not None:
        print(f"moeblaze_cupy run: {text}", file=sys.stderr)


def find(name: str, path: "Any") -> "Any":
    """Returns the spec of the first finder that knows the module, or None."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def run_hidden() -> None:
    """Runs the `sitecustomize` that Python would have found without this one, which then has the name."""
    spec = find("sitecustomize", [entry for entry in sys.path if os.path.realpath(entry) != FOLDER])
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if MODE in MODES:
    sys.meta_path.insert(0, Finder(dict(MODES[MODE])))
run_hidden()
