"""Every kernel and variant compiles to a cubin with NVRTC, without a GPU, within recorded registers and spills."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.structures import ACTIVATIONS

LIMITS = {
    "80": launch_config.DeviceLimits(80, 108, 166912, 167936),
    "86": launch_config.DeviceLimits(86, 84, 101376, 102400),
    "89": launch_config.DeviceLimits(89, 128, 101376, 102400),
    "90a": launch_config.H200,
    "100": launch_config.DeviceLimits(100, 148, 232448, 233472),
    "120": launch_config.DeviceLimits(120, 170, 101376, 102400),
}

# Registers per entry: 255 leaves two portable GEMM blocks of 128 threads per multiprocessor, 168 is what 384 threads
# leave each thread at entry (setmaxnreg moves them between warpgroups), 64 what 1024 threads leave.
REGISTER_CAPS = {"grouped_gemm_sm90.cu": 168, "grouped_wgrad_sm90.cu": 168, "dispatch.cu": 64, "router.cu": 64}
# Bytes of spill stores, all outside the main loops. Measured: 28 at most in the portable kernels with 16-byte accesses;
# 188 in those for odd sizes, whose guarded element copies are slow anyway; 128 in Hopper's down_bwd, whose epilogue
# holds 128 accumulators, two operands and a product.
ALIGNED_SPILL_CAP, UNALIGNED_SPILL_CAP, HOPPER_DOWN_BWD_SPILL_CAP = 64, 320, 192


def spill_cap(variant) -> int:
    if variant.source == "grouped_gemm_sm90.cu":
        return HOPPER_DOWN_BWD_SPILL_CAP if variant.entry == "down_bwd" else 0
    return UNALIGNED_SPILL_CAP if dict(variant.macros).get("ALIGNED") == "0" else ALIGNED_SPILL_CAP


def find_nvrtc():
    """NVRTC of the installed wheel, or None."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            paths = {file.name: str(file.locate()) for file in metadata.files(package) or ()}
        except metadata.PackageNotFoundError:
            continue
        for name, path in paths.items():
            if name.startswith("libnvrtc-builtins"):  # NVRTC looks for it by name, which finds it only if it is loaded
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        for name, path in paths.items():
            if re.fullmatch(r"libnvrtc\.so\.\d+", name):
                return ctypes.CDLL(path)
    return None


NVRTC = find_nvrtc()
pytestmark = pytest.mark.skipif(NVRTC is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


def compile_variant(variant, arch: str) -> str:
    """The compiler's log, ptxas's included. Raises AssertionError with it if compilation fails."""
    with open(f"{loader.source_folder()}/{variant.source}", "rb") as file:
        source = file.read()
    options = [o for o in loader.options(variant) if not o.startswith("-arch")]
    options += [f"-arch=sm_{arch}", "-ftz=true", "--ptxas-options=-v"]
    encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    program = ctypes.c_void_p()
    assert NVRTC.nvrtcCreateProgram(ctypes.byref(program), source, variant.source.encode(), 0, None, None) == 0
    status = NVRTC.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetProgramLog(program, log)
    cubin = ctypes.c_size_t()
    NVRTC.nvrtcGetCUBINSize(program, ctypes.byref(cubin))
    NVRTC.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    assert status == 0 and cubin.value > 0, f"{variant.name} for sm_{arch}:\n{text}"
    return text


def problems(variant, arch: str) -> list[str]:
    """What is wrong with the compiled entries: warnings, registers, spills."""
    log = compile_variant(variant, arch)
    found = [line for line in log.splitlines() if re.search(r"warning|C75\d\d|C76\d\d", line)]
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", log, re.DOTALL
    )
    assert entries, log
    for entry, spilled, registers in entries:
        if int(registers) > REGISTER_CAPS.get(variant.source, 255):
            found.append(f"{entry}: {registers} registers")
        if int(spilled) > spill_cap(variant):
            found.append(f"{entry}: {spilled} bytes of spill stores")
    return [f"{variant.name or variant.source} for sm_{arch}: {problem}" for problem in found]


def variants_of(arch: str) -> list:
    """All dtypes, orders and alignments of one activation, and all activations of one dtype and order."""
    limits = LIMITS[arch]
    every = {}
    dtypes = tuple(loader.ELEMENTS)
    if arch in ("80", "90a"):
        every |= dict.fromkeys(loader.variants(dtypes, ("row", "transposed"), ("swiglu",), (True, False), limits))
        every |= dict.fromkeys(loader.variants(("bfloat16",), ("row",), ACTIVATIONS, (True,), limits))
    else:
        every |= dict.fromkeys(loader.variants(dtypes, ("row",), ("swiglu",), (True,), limits))
        every |= dict.fromkeys(loader.variants(("bfloat16",), ("transposed",), ("gelu",), (True, False), limits))
    return list(every)


@pytest.mark.parametrize("arch", LIMITS)
def test_every_variant_compiles_within_its_caps(arch):
    with ThreadPoolExecutor(2) as pool:  # NVRTC runs without the GIL
        found = [p for ps in pool.map(lambda v: problems(v, arch), variants_of(arch)) for p in ps]
    assert not found, "\n".join(found)


def test_hopper_takes_hoppers_kernels():
    sources = {v.source for v in variants_of("90a")}
    assert {"grouped_gemm_sm90.cu", "grouped_wgrad_sm90.cu", "grouped_gemm_sm80.cu"} <= sources
