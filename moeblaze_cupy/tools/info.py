"""`info`: one fact per line. Every probe is guarded, so a broken installation still gets its report and exit code 0.

CuPy is imported inside the probes only: importing it may be what is broken.
"""

import argparse
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.tools.command import one_line
from moeblaze_cupy.tools.memory import format_bytes

WIDTH = 22


def run(args: argparse.Namespace) -> int:
    for name, probe in _facts():
        print(f"{name:<{WIDTH}}{_guarded(probe)}")
    return 0


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # CuPy hides the dynamic loader's message under a page of advice
            cause = cause.__cause__
        return f"unavailable: {one_line(cause)}"


def _facts() -> list[tuple[str, Callable[[], str]]]:
    facts = [
        ("moeblaze_cupy", _own_version),
        ("python", lambda: f"{platform.python_version()} on {platform.platform()} ({sys.executable})"),
        ("numpy", lambda: __import__("numpy").__version__),
        ("ml_dtypes", lambda: __import__("ml_dtypes").__version__),
        ("cupy", lambda: __import__("cupy").__version__),
        ("torch", lambda: metadata.version("torch")),  # not imported: that takes seconds
        ("CUDA runtime", lambda: _cuda_version(_cupy().cuda.runtime.runtimeGetVersion())),
        ("NVRTC", lambda: "{}.{}".format(*_cupy().cuda.nvrtc.getVersion())),
        ("CUDA driver", _driver_version),
    ]
    try:
        count = _cupy().cuda.runtime.getDeviceCount()
    except Exception:
        count = 0
    for device in range(max(count, 1)):  # without a GPU, the same lines say why
        facts += [
            (f"GPU {device} name", functools.partial(_device_name, device)),
            (f"GPU {device} capability", functools.partial(_device_capability, device)),
            (f"GPU {device} memory", functools.partial(_device_memory, device)),
            (f"GPU {device} kernels", functools.partial(_device_tier, device)),
        ]
    return [*facts, ("kernel cache", _kernel_cache), ("MOEBLAZE_TIER", _forced_tier)]


def _cupy() -> Any:
    import cupy

    return cupy


def _own_version() -> str:
    import moeblaze_cupy

    return f"{moeblaze_cupy.__version__} ({os.path.dirname(moeblaze_cupy.__file__)})"


def _cuda_version(number: int) -> str:
    """13000 -> "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version() -> str:
    """The newest CUDA version the driver supports, asked of the driver itself: CuPy may be absent."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    version = ctypes.c_int(0)
    error = driver.cuDriverGetVersion(ctypes.byref(version))
    if error:
        raise RuntimeError(f"cuDriverGetVersion returned {error}")
    return f"supports CUDA {_cuda_version(version.value)}"


def _properties(device: int) -> dict[str, Any]:
    properties: dict[str, Any] = _cupy().cuda.runtime.getDeviceProperties(device)
    return properties


def _capability(device: int) -> int:
    """90 for compute capability 9.0."""
    properties = _properties(device)
    return 10 * int(properties["major"]) + int(properties["minor"])


def _device_name(device: int) -> str:
    return str(_properties(device)["name"].decode())


def _device_capability(device: int) -> str:
    return "{}.{}".format(*divmod(_capability(device), 10))


def _device_memory(device: int) -> str:
    return format_bytes(_properties(device)["totalGlobalMem"])


def _device_tier(device: int) -> str:
    return launch_config.tier(_capability(device))


def _kernel_cache() -> str:
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    if not os.path.isdir(folder):
        return f"{folder} (does not exist yet)"
    with os.scandir(folder) as entries:
        sizes = [entry.stat().st_size for entry in entries if entry.is_file()]
    return f"{folder} ({len(sizes)} files, {format_bytes(sum(sizes))})"


def _forced_tier() -> str:
    return repr(os.environ["MOEBLAZE_TIER"]) if os.environ.get("MOEBLAZE_TIER") else "not set"
