"""`info`: it prints what this machine runs on, then one fact per line.

Every probe is guarded, so a broken installation still gets its report and exit code 0. CuPy is imported inside the
probes only: importing it may be what is broken.
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
from moeblaze_cupy.tools.command import one_line, print_json
from moeblaze_cupy.tools.memory import format_bytes

WIDTH = 22
KERNELS = {"sm80": "the portable kernels", "sm90": "the Hopper kernels"}
EXTRA = '"moeblaze-cupy[{}]"'
# Arguments of `pip install` for optional distributions.
INSTALLS = {"torch": EXTRA.format("torch"), "triton": "triton", "transformers": EXTRA.format("transformers")}


def run(args: argparse.Namespace) -> int:
    facts = {name: _guarded(probe) for name, probe in _facts()}
    if args.json:
        print_json(facts)
    else:
        print("\n".join(f"{name:<{WIDTH}}{fact}" for name, fact in facts.items()))
    return 0


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:
        return f"unavailable: {_reason(error)}"


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:  # CuPy hides the dynamic loader's message under a page of advice
        error = error.__cause__
    return one_line(error)


def _facts() -> list[tuple[str, Callable[[], str]]]:
    facts: list[tuple[str, Callable[[], str]]] = [
        ("this machine", _verdict),
        ("moeblaze_cupy", _own_version),
        ("python", lambda: f"{platform.python_version()} on {platform.platform()} ({sys.executable})"),
        ("numpy", lambda: __import__("numpy").__version__),
        ("ml_dtypes", lambda: __import__("ml_dtypes").__version__),
        ("cupy", _cupy_version),
        *((name, functools.partial(_version, name)) for name in INSTALLS),
        ("CUDA driver", lambda: f"supports CUDA {_cuda_version(_driver())}"),
    ]
    try:
        runtime = _cupy().cuda.runtime
    except Exception:  # the line of CuPy says why
        runtime = None
    if runtime:
        facts += [
            ("CUDA runtime", lambda: _cuda_version(runtime.runtimeGetVersion())),
            ("NVRTC", lambda: "{}.{}".format(*_cupy().cuda.nvrtc.getVersion())),
            ("GPUs", lambda: str(runtime.getDeviceCount())),
        ]
    for device in range(_count()):
        facts += [
            (f"GPU {device} name", functools.partial(_device_name, device)),
            (f"GPU {device} capability", functools.partial(_device_capability, device)),
            (f"GPU {device} memory", functools.partial(_device_memory, device)),
            (f"GPU {device} kernels", functools.partial(_device_tier, device)),
        ]
    return [*facts, ("kernel cache", _kernel_cache), ("MOEBLAZE_TIER", _forced_tier)]


def _verdict() -> str:
    """Returns the kernels of each GPU, or the reason for NumPy in their place."""
    uses: dict[str, list[str]] = {}
    refused = []
    for device in range(_count()):
        name = _guarded(functools.partial(_device_name, device))
        try:
            uses.setdefault(KERNELS[_device_tier(device)], []).append(name)
        except Exception as error:
            refused.append(f"{name}: {_reason(error)}")
    if uses:
        return "; ".join(f"uses {kernels} on {', '.join(names)}" for kernels, names in uses.items())
    return f"runs on NumPy, because {'; '.join(refused) or _why_no_gpu()}"


def _why_no_gpu() -> str:
    try:
        _driver()
    except Exception as error:
        return f"it has no NVIDIA driver: {_reason(error)}"
    try:
        _cupy().cuda.runtime.getDeviceCount()
    except Exception as error:
        return _no_cupy() if _is_missing(error) else f"CuPy cannot be used: {_reason(error)}"
    return "the NVIDIA driver finds no GPU"


def _count() -> int:
    """Returns the number of GPUs that CuPy can use."""
    try:
        return int(_cupy().cuda.runtime.getDeviceCount())
    except Exception:
        return 0


def _cupy() -> Any:
    import cupy

    return cupy


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "cupy"


def _no_cupy() -> str:
    try:
        extras = ["cuda13" if _driver() >= 13000 else "cuda12"]
    except Exception:
        extras = ["cuda13", "cuda12"]
    return f"CuPy is not installed: pip install {' or '.join(map(EXTRA.format, extras))}"


def _cupy_version() -> str:
    try:
        return str(_cupy().__version__)
    except Exception as error:
        if _is_missing(error):
            return _no_cupy().removeprefix("CuPy is ")
        raise


def _version(distribution: str) -> str:
    """Returns a package's version without importing it, which may take seconds."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"not installed: pip install {INSTALLS[distribution]}"


def _own_version() -> str:
    import moeblaze_cupy

    return f"{moeblaze_cupy.__version__} ({os.path.dirname(moeblaze_cupy.__file__)})"


def _cuda_version(number: int) -> str:
    """Returns "13.0" for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> int:
    """Returns the driver's newest CUDA version, 13000 for 13.0. It asks the driver itself, as CuPy may be absent."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    version = ctypes.c_int(0)
    error = driver.cuDriverGetVersion(ctypes.byref(version))
    if error:
        raise RuntimeError(f"cuDriverGetVersion returned {error}")
    return version.value


def _properties(device: int) -> dict[str, Any]:
    properties: dict[str, Any] = _cupy().cuda.runtime.getDeviceProperties(device)
    return properties


def _capability(device: int) -> int:
    """Returns 90 for compute capability 9.0."""
    properties = _properties(device)
    return 10 * int(properties["major"]) + int(properties["minor"])


def _device_name(device: int) -> str:
    return str(_properties(device)["name"].decode())


def _device_capability(device: int) -> str:
    return "{}.{}".format(*divmod(_capability(device), 10))


def _device_memory(device: int) -> str:
    return format_bytes(_properties(device)["totalGlobalMem"])


def _device_tier(device: int) -> str:
    return launch_config.tier(_capability(device), os.environ.get("MOEBLAZE_TIER"))


def _kernel_cache() -> str:
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    if not os.path.isdir(folder):
        return f"{folder} (does not exist yet)"
    with os.scandir(folder) as entries:
        sizes = [entry.stat().st_size for entry in entries if entry.is_file()]
    return f"{folder} ({len(sizes)} files, {format_bytes(sum(sizes))})"


def _forced_tier() -> str:
    return repr(os.environ["MOEBLAZE_TIER"]) if os.environ.get("MOEBLAZE_TIER") else "not set"
