"""What follows the import of a module, beside loaders that others have put there."""

import copy
import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader

import pytest

pytest.importorskip("torch")

from moeblaze_cupy.interop.torch.following import follow

FOLLOWED, OTHER = "moeblaze_test_followed", "moeblaze_test_other"


class Slotted:
    """A loader whose attributes cannot be set, as one in C."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.inner.exec_module(module)


class Finder:
    """of: the loader by a module's name and path. A function that returns the same for all has one for many modules."""

    def __init__(self, folder, of):
        self.folder, self.of = folder, of

    def find_spec(self, name, path=None, target=None):
        if name in (FOLLOWED, OTHER):
            return importlib.util.spec_from_loader(name, self.of(name, str(self.folder / f"{name}.py")))
        return None


class OfMany:
    """One loader for all modules, as of a zip file."""

    def __init__(self, folder):
        self.folder = folder

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        SourceFileLoader(module.__name__, str(self.folder / f"{module.__name__}.py")).exec_module(module)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The modules that have been followed, once `kind` of loader is there. Two files, of which one fails at first."""
    for name in (FOLLOWED, OTHER):
        (tmp_path / f"{name}.py").write_text("number = 3\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    followed = []

    def install(kind):
        shared = OfMany(tmp_path)
        of = {
            "source": SourceFileLoader,
            "slotted": lambda *file: Slotted(SourceFileLoader(*file)),
            "shared": lambda *_: shared,
        }
        sys.meta_path.insert(0, Finder(tmp_path, of[kind]))
        follow(FOLLOWED, lambda module: followed.append((module.__name__, module.number)))
        return followed

    yield install
    for name in (FOLLOWED, OTHER):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["source", "slotted", "shared"])
def test_each_import_of_one_module_is_followed(found, kind):
    """Also after someone has only looked for it. In the end module and spec have the loader that others gave them."""
    followed = found(kind)
    for _ in range(2):
        assert importlib.util.find_spec(FOLLOWED) is not None
    importlib.import_module(OTHER)
    assert followed == []
    module = importlib.import_module(FOLLOWED)
    for times in (1, 2):
        assert followed == [(FOLLOWED, 3)] * times
        assert type(module.__loader__).__module__ != follow.__module__
        assert module.__spec__.loader is module.__loader__
        module = importlib.reload(module)


def test_a_module_that_fails_is_followed_at_its_next_import(found, tmp_path):
    followed = found("source")
    (tmp_path / f"{FOLLOWED}.py").write_text("raise OSError('no number')\n")
    with pytest.raises(OSError, match="no number"):
        importlib.import_module(FOLLOWED)
    (tmp_path / f"{FOLLOWED}.py").write_text("the_number = number = 3\n")
    importlib.import_module(FOLLOWED)
    assert followed == [(FOLLOWED, 3)]


def test_what_was_found_serves_as_the_loader_does(found):
    """Also a copy of it, whose attributes come after it is made."""
    found("source")
    loader = importlib.util.find_spec(FOLLOWED).loader
    for each in (loader, copy.copy(loader)):
        assert each.get_source(FOLLOWED) == "number = 3\n" and not each.is_package(FOLLOWED)
