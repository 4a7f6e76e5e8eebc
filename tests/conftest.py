"""Skips `gpu` tests where there is no GPU, and fills what the kernels are to write with NaN first."""

import atexit
import gc
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import loader, runtime
from tests import environment, markers

# How long an example takes says nothing on a machine that has other work.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def missing_gpu() -> str | None:
    """Why the gpu tests cannot run here, or None."""
    try:
        loader.import_cupy()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


MISSING_GPU = missing_gpu()
MOST_PROCESSES = 16


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """A process on a GPU takes half a gigabyte of its memory before the first test."""
    return min((yield), MOST_PROCESSES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests share what they compiled, so `pytest -n auto` gives them to one process."""
    if config.getvalue("dist") != "load":  # what was asked for
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None):  # a process per core, whose plug-ins may import NumPy before this
        os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    markers.leave_out_long(config)


def pytest_ignore_collect(collection_path, config):
    file = collection_path.relative_to(environment.ROOT).as_posix()
    return True if markers.has_no_test_of(config.option.markexpr, file) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """A collection of garbage passes over modules and tests, which are many and stay until the process ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    markers.mark(items)
    if MISSING_GPU is None:
        return
    skip = pytest.mark.skip(reason=f"no GPU: {MISSING_GPU}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def on_hopper(monkeypatch):
    """Hopper's kernels whatever MOEBLAZE_TIER says."""
    if loader.import_cupy().cuda.Device().compute_capability != "90":
        pytest.skip("products in e4m3 need Hopper")
    with monkeypatch.context() as patch:
        patch.setenv("MOEBLAZE_TIER", "sm90")
        loader._device_limits.cache_clear()
        runtime.forget()
        yield
    loader._device_limits.cache_clear()
    runtime.forget()


@pytest.fixture(autouse=True)
def poisoned_allocations(request, monkeypatch):
    """Device memory the library allocates starts as NaN (floats, also of e4m3), no code (int8) or no index."""
    if request.node.get_closest_marker("gpu") is None:
        return
    for framework in (arrays.CuPy, arrays.Torch):

        def empty(shape, dtype, device, transposed, plain=framework.empty):
            buffer = plain(shape, dtype, device, transposed)
            if 0 not in shape:
                poison = {"uint8": 255, "int8": -128, "int32": -(2**30), "int64": -(2**30)}
                buffer.array[...] = poison.get(dtype, np.nan)
            return buffer

        monkeypatch.setattr(framework, "empty", staticmethod(empty))
