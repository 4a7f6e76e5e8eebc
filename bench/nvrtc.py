"""NVRTC of an installed wheel, through ctypes: CUDA sources to machine code, without a GPU and without CuPy."""

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

INSTALL = 'needs NVRTC: pip install -e ".[compile]"'


def wheel_files(*packages: str) -> dict[str, str]:
    """Paths of the files of the first of the wheels that is installed, by name."""
    for package in packages:
        try:
            return {file.name: str(file.locate()) for file in metadata.files(package) or ()}
        except metadata.PackageNotFoundError:
            continue
    return {}


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC for CUDA 13, else for CUDA 12, or None. CuPy's extras [ctk] bring one, the extra `compile` the first."""
    paths = wheel_files("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    for name, path in paths.items():
        if name.startswith("libnvrtc-builtins"):  # NVRTC looks for it by name, which finds it only if it is loaded
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for name, path in paths.items():
        if re.fullmatch(r"libnvrtc\.so\.\d+", name):
            return ctypes.CDLL(path)
    return None


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave: the compiler's log, and an ELF file for one architecture."""

    log: str
    cubin: bytes


def compile_source(source: bytes, name: str, options: Sequence[str]) -> Compiled:
    """One source with NVRTC's options, as CuPy compiles it. Other threads run meanwhile.

    Raises RuntimeError where NVRTC is not installed, and with the compiler's log where it refuses the source.
    """
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError(INSTALL)
    every = [*options, "-ftz=true", "--device-as-default-execution-space"]  # the last two are CuPy's
    encoded = (ctypes.c_char_p * len(every))(*(option.encode() for option in every))
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    if status != 0:
        raise RuntimeError(f"nvrtc: expected nvrtcCreateProgram to succeed for {name}, got error {status}")
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(every), encoded)
        log = _result(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
        if status != 0:
            raise RuntimeError(f"nvrtc: expected {name} to compile with {' '.join(options)}, got\n{log}")
        return Compiled(log, _result(nvrtc, program, "CUBIN"))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _result(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    for function, argument in ((f"nvrtcGet{kind}Size", ctypes.byref(size)), (f"nvrtcGet{kind}", None)):
        data = ctypes.create_string_buffer(size.value)
        status = getattr(nvrtc, function)(program, argument or data)
        if status != 0:
            raise RuntimeError(f"nvrtc: expected {function} to succeed, got error {status}")
    return data.raw
