"""Trainers that import plug-ins by entry points: those of `setup.cfg`, read and loaded by the trainers' own code."""

import configparser
import importlib.util
import os
import subprocess
import sys

import pytest

from tests.environment import ROOT, plain_environment

pytest.importorskip("transformers")


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def python(code, tmp_path, *groups):
    """What Python prints that finds an installation with these groups of entry points."""
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    folder = tmp_path / "moeblaze_cupy-0.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moeblaze_cupy\nVersion: 0.0.0\n")
    points = [f"[{group}]{setup_cfg['options.entry_points'][group]}\n" for group in groups]
    (folder / "entry_points.txt").write_text("".join(points))
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = plain_environment() | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, before)])
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


REGISTERED = "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as F; print('moeblaze' in F)"

AXOLOTL = """
from axolotl.integrations.base import PluginManager, get_builtin_plugins
for name in get_builtin_plugins():
    if "moeblaze" in name:
        PluginManager.get_instance().register(name, required=True)
for plugin in PluginManager.get_instance().plugins.values():
    plugin.register({})
from axolotl.integrations.kernels.args import KernelsArgs
print(KernelsArgs.check_experts_implementation({"experts_implementation": "moeblaze"})["experts_implementation"])
"""

# verl's protocol needs Ray, and its utilities need more libraries, none of which loads plug-ins.
VERL = """
import importlib.util, sys, types
root = importlib.util.find_spec("verl").submodule_search_locations[0]
sys.modules["verl.protocol"] = types.SimpleNamespace(DataProto=None)
sys.modules["verl.utils"] = types.ModuleType("verl.utils")
sys.modules["verl.utils"].__path__ = [root + "/utils"]
import verl
"""


@needs("axolotl")
@pytest.mark.parametrize(("groups", "name"), [(["axolotl.plugins"], "moeblaze"), ([], "eager")])
def test_axolotl_takes_the_name(tmp_path, groups, name):
    """It replaces names that transformers does not know by "eager"."""
    assert python(AXOLOTL + REGISTERED, tmp_path, *groups)[-2:] == [name, str(name == "moeblaze")]


@needs("verl")
@pytest.mark.parametrize("groups", [["verl.plugins"], []], ids=str)
def test_verl_registers_the_name(tmp_path, groups):
    assert python(VERL + REGISTERED, tmp_path, *groups)[-1] == str(bool(groups))
