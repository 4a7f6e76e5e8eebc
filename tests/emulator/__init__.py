"""Runs the CUDA sources of kernels_cu on the CPU: g++ compiles them against cuemu.h, one fibre per thread.

Covers indexing, shared memory layout, fragments, barriers and cp.async waits, of Hopper mbarriers, bulk tensor copies,
wgmma and clusters. Does not cover what depends on the order of writes to memory.

The engine (fibres, blocks, mbarriers, products: the .cc files) is compiled once, and cuemu.h to a precompiled header.
Every library links the engine and has its state to itself.
"""

import ctypes
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from .tensor_map import EmulatedTensorMap as EmulatedTensorMap

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "kernels_cu"
COMPILER = shutil.which("g++")
# The sanitizers trap, which needs no run-time library: cuemu.h turns the trap into an error with its line.
FLAGS = shlex.split(
    "-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -fno-gnu-unique -fno-exceptions -fno-extern-tls-init "
    "-fsanitize=alignment,bounds,shift,signed-integer-overflow -fsanitize-undefined-trap-on-error "
    "-fno-optimize-sibling-calls -fno-crossjumping -fno-tree-tail-merge -U_FORTIFY_SOURCE -Wno-attributes -Wno-psabi "
    "-Werror=undef"  # a macro that is missing is an error here as it is for NVRTC
)
ENGINE_FLAGS = ("-O3", "-fno-sanitize=all")  # in addition: kernels' accesses are in their own library's code
# Added to the preprocessed source for each of its kernels.
ENTRY = """
extern "C" __attribute__((visibility("default"))) const cuemu::Entry cuemu_entry_{name} =
    {{cuemu::Call<{name}>::with, cuemu::bytes_of({name})}};
"""
GUARD_BYTES = 4096
GUARD = 0xAB
MAX_SHARED_BYTES = 227 * 1024  # what a block of an sm_90 device may ask for

_launch_lock = threading.Lock()  # the fault handlers belong to the process, the fibres to the library
_engine_lock = threading.Lock()
_stacks = None  # of the fibres: shared by all libraries, whose guard pages would exhaust the process's mappings


class EmulatorError(RuntimeError):
    """A source that does not compile, or a launch that broke a rule of the device."""


class _Launch(ctypes.Structure):
    """cuemu::Launch."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("params", ctypes.c_void_p),
        ("arrays", ctypes.POINTER(ctypes.c_size_t)),
        ("stacks", ctypes.c_void_p),
        ("num_arrays", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("cluster_blocks", ctypes.c_uint64),
        ("clusters_at_once", ctypes.c_uint64),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
    )


class _Entry(ctypes.Structure):
    """cuemu::Entry."""

    _fields_ = (("call", ctypes.c_void_p), ("params_bytes", ctypes.c_uint64))


# NumPy arrays that kernels may access by addresses in memory, as they do the memory of other GPUs.
reachable: list = []


class Emulated:
    """A compiled source. `kernels` maps each entry point to the number of blocks in its clusters."""

    def __init__(self, library: Path, kernels: dict[str, int]):
        self.path = library
        self.kernels = kernels
        self._library = ctypes.CDLL(str(library))
        self._library.cuemu_stacks.restype = ctypes.c_void_p
        self._launch = self._library.cuemu_launch
        self._launch.argtypes = [ctypes.POINTER(_Launch)]
        self._launch.restype = ctypes.c_char_p

    def launch(self, name, grid, block, table, values, shared_mem=0, seed=0, clusters_at_once=1):
        """Run kernel `name` to its end; arrays are updated in place.

        `grid` and `block` are ints or up to three of them. `table` is the kernel's `params.Params`; `values` has one
        for each of its fields, by name: for a pointer a NumPy array, a pair (array, byte offset) or None, for an
        integer an int, for a float32 a float, for a tensor map an EmulatedTensorMap. Every array runs as a copy between
        guard bytes, so that a write outside it is reported; the same array given twice is one copy. A `seed` other than
        0 shuffles the order of blocks and threads, which brings out races. As many clusters as `clusters_at_once` says
        (of one block each, for a kernel without clusters) take turns.
        """
        if name not in self.kernels:
            raise EmulatorError(f"no kernel {name!r}, expected one of {sorted(self.kernels)}")
        grid, block = _three(grid), _three(block)
        if min(grid) < 1 or max(grid[1:]) > 65535 or grid[0] * grid[1] * grid[2] >= 2**31:
            raise EmulatorError(f"kernel {name}: grid {grid} is empty or too large")
        if min(block) < 1 or block[0] * block[1] * block[2] > 1024:
            raise EmulatorError(f"kernel {name}: block {block} must have 1 to 1024 threads")
        if not 0 <= shared_mem <= MAX_SHARED_BYTES:
            raise EmulatorError(f"kernel {name}: {shared_mem} bytes of shared memory, at most {MAX_SHARED_BYTES}")
        cluster = self.kernels[name]
        if grid[0] % cluster:
            raise EmulatorError(f"kernel {name}: grid {grid} is not of whole clusters of {cluster} blocks")
        entry = _Entry.in_dll(self._library, f"cuemu_entry_{name}")
        if entry.params_bytes != table.size:
            raise EmulatorError(
                f"kernel {name}: its struct has {entry.params_bytes} bytes, {table.struct} {table.size}"
            )
        buffers = {}
        packed = _pack(name, table, values, buffers)
        ranges = [(buffer.start, buffer.array.nbytes) for buffer in buffers.values()]
        ranges += [(array.ctypes.data, array.nbytes) for array in reachable]
        bounds = [bound for start, nbytes in ranges for bound in (start, start + nbytes)]
        global _stacks
        with _launch_lock:
            if _stacks is None:
                _stacks = self._library.cuemu_stacks()
            text = self._launch(
                _Launch(
                    entry.call,
                    name.encode(),
                    packed.ctypes.data,
                    (ctypes.c_size_t * len(bounds))(*bounds),
                    _stacks,
                    len(ranges),
                    shared_mem,
                    seed,
                    cluster,
                    clusters_at_once,
                    grid,
                    block,
                )
            )
        problems = [] if text is None else [self._locate(text.decode())]
        problems += filter(None, (buffer.check() for buffer in buffers.values()))
        if problems:
            raise EmulatorError("\n".join(problems))
        for buffer in buffers.values():
            buffer.copy_back()

    def _locate(self, text: str) -> str:
        """Replace code addresses by source lines, the innermost inlined call first."""

        own = own_sources()

        def lines(match):
            tool = shutil.which("addr2line")
            if tool is None:
                return match[0]
            command = [tool, "-i", "-e", str(self.path), match[1]]
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
            places = [Path(line.split(" ")[0]).name for line in found if line and not line.startswith("?")]
            return " at " + " < ".join([p for p in places if p.partition(":")[0] not in own] or places or [match[1]])

        return re.sub(r" \[pc\+(0x[0-9a-f]+)\]", lines, text)


def build(source_name, macros=None, source_text=None, headers=None) -> Emulated:
    """Compile `kernels_cu/<source_name>`, or `source_text` under that name, with macros as -D options.

    headers: texts by name, in place of those in kernels_cu.
    """
    if COMPILER is None:
        raise EmulatorError("g++ not found")
    sources = {path.name: path.read_bytes() for path in sorted(KERNELS.rglob("*.cu*"))}
    sources |= own_sources()
    sources |= {name: text.encode() for name, text in (headers or {}).items()}
    if source_text is not None:
        sources[source_name] = source_text.encode()
    if source_name not in sources:
        raise EmulatorError(f"no source {source_name} in {KERNELS}")
    sources = included_by(source_name, sources) | {name: sources[name] for name in own_sources()}
    defines = [
        f"-D{name}" if value is None else f"-D{name}={_literal(value)}"
        for name, value in (macros or {}).items()
        if name != "SOURCE_DIGEST"  # of all sources, for CuPy's cache
    ]
    key = _key(source_name, sources, defines)
    stem = _cache_directory() / f"{Path(source_name).stem}-{key}"
    library, signatures = stem.with_suffix(".so"), stem.with_suffix(".json")
    if not library.exists():
        own = {name: sources.pop(name) for name in own_sources()}
        engine = engine_of(own, [define for define in defines if define.startswith("-DCUEMU_")])
        with tempfile.TemporaryDirectory(dir=stem.parent) as directory:
            for name, content in sources.items():
                (Path(directory) / name).write_bytes(content)
            run_compiler([*preprocess_with(engine), *defines, source_name, "-o", "unit.ii"], directory)
            kernels = _entry_points((Path(directory) / "unit.ii").read_text())
            with (Path(directory) / "unit.ii").open("a") as unit:
                unit.writelines(ENTRY.format(name=name) for name in kernels)
            library_of = ["-shared", "-Wl,-u,cuemu_launch", "unit.ii", str(engine / "engine.a")]
            run_compiler(["-fpch-preprocess", *library_of, "-o", "unit.so"], directory)
            (Path(directory) / "unit.json").write_text(json.dumps(kernels))
            # The library last: where it is, its signatures are.
            os.replace(Path(directory) / "unit.json", signatures)
            os.replace(Path(directory) / "unit.so", library)
    return Emulated(library, json.loads(signatures.read_text()))


def included_by(name: str, sources: dict[str, bytes]) -> dict[str, bytes]:
    """The source of that name and what it includes, so that a change of others compiles nothing again."""
    found, names = {}, [name]
    while names:
        name = names.pop()
        if name in sources and name not in found:
            found[name] = sources[name]
            names += re.findall(r'^\s*#\s*include\s+"([^"]+)"', sources[name].decode(), re.MULTILINE)
    return found


def own_sources() -> dict[str, bytes]:
    """The emulator's headers and the engine's files."""
    return {path.name: path.read_bytes() for path in sorted([*HERE.glob("*.*h"), *HERE.glob("*.cc")])}


@functools.cache
def _compiler_version() -> bytes:
    return subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout


def _key(name, sources, defines) -> str:
    text = repr((name, sorted(sources.items()), sorted(defines), FLAGS, ENGINE_FLAGS, _compiler_version()))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def preprocess_with(engine) -> list[str]:
    """Options, for a text that names the precompiled header in place of its content."""
    return ["-E", "-fpch-preprocess", f"-I{engine}", "-include", str(engine / "cuemu.h"), "-x", "c++"]


def engine_of(sources, defines) -> Path:
    """A directory in the cache with the engine's headers, cuemu.h precompiled, and engine.a."""
    place = _cache_directory() / f"engine-{_key('engine', sources, defines)}"
    with _engine_lock:
        if place.exists():
            return place
        with tempfile.TemporaryDirectory(dir=place.parent) as directory:
            built = Path(directory) / "engine"
            built.mkdir()
            for name, content in sources.items():
                (built / name).write_bytes(content)
            run_compiler([*defines, "-x", "c++-header", "cuemu.h", "-o", "cuemu.h.gch"], built)
            units = sorted(name for name in sources if name.endswith(".cc"))
            run_compiler([*defines, *ENGINE_FLAGS, "-c", *units], built)
            # Of an archive a library takes what its kernels use: the Hopper part keeps more state for each thread.
            objects = [str(Path(name).with_suffix(".o")) for name in units]
            subprocess.run(["ar", "rcs", "engine.a", *objects], cwd=built, capture_output=True, check=True)
            try:
                built.rename(place)
            except OSError:  # another process was first
                if not place.exists():
                    raise
    return place


def run_compiler(arguments, directory):
    done = subprocess.run([COMPILER, *FLAGS, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"g++ {' '.join(arguments)} failed:\n{done.stderr}")


def _literal(value) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _entry_points(text: str) -> dict[str, int]:
    """Kernels of preprocessed source, and the blocks of their clusters."""
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    attribute = r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*"
    pattern = rf'extern\s+"C"\s+{attribute}void\s+((?:{attribute})*)(\w+)\s*\([^(){{}};]*\)\s*{{'
    sizes = {name: re.search(r"cuemu_cluster\((\d+)\)", attributes) for attributes, name in re.findall(pattern, text)}
    return {name: int(size[1]) if size else 1 for name, size in sizes.items()}


def _cache_directory() -> Path:
    """A directory only this user can write: libraries are loaded from it."""
    path = Path(tempfile.gettempdir()) / f"moeblaze-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    state = path.lstat()
    if path.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise EmulatorError(f"{path} belongs to, or is writable by, another user")
    return path


def _three(size) -> tuple[int, int, int]:
    size = (size,) if np.ndim(size) == 0 else tuple(size)
    return tuple(int(n) for n in (*size, 1, 1)[:3])


class _Guarded:
    """A copy of `array` on a 4 KiB boundary between two guards."""

    def __init__(self, name: str, array: np.ndarray):
        self.name = name
        self.array = array
        memory = np.full(array.nbytes + 3 * GUARD_BYTES, GUARD, np.uint8)
        skip = -memory.ctypes.data % GUARD_BYTES
        self.memory = memory[skip : skip + array.nbytes + 2 * GUARD_BYTES]
        self.data = self.memory[GUARD_BYTES : GUARD_BYTES + array.nbytes]
        self.start = self.memory.ctypes.data + GUARD_BYTES
        self.bytes = array.reshape(-1).view(np.uint8)
        self.data[:] = self.bytes

    def check(self) -> str | None:
        which = f"{self.name} ({self.array.dtype} {self.array.shape})"
        before, after = self.memory[:GUARD_BYTES], self.memory[GUARD_BYTES + self.data.size :]
        for name, guard in (("before its start", before), ("past its end", after)):
            changed = np.flatnonzero(guard != GUARD)
            if changed.size:
                nearest = changed[-1] - GUARD_BYTES if guard is before else changed[0] + self.data.size
                return f"{which}: {changed.size} guard bytes changed {name}, the nearest at byte {nearest}"
        if not self.array.flags.writeable and (self.data != self.bytes).any():
            return f"{which} is read-only and was written"
        return None

    def copy_back(self):
        if self.array.flags.writeable:
            self.bytes[:] = self.data


def _pack(kernel, table, values, buffers) -> np.ndarray:
    """The bytes of a kernel's struct, which may add guarded copies to `buffers`."""
    if set(values) != {field.name for field in table.fields}:
        odd = sorted(set(values) ^ {field.name for field in table.fields})
        raise EmulatorError(f"kernel {kernel}: missing or unknown parameters {odd}")
    memory = np.zeros(table.size + 64, np.uint8)
    skip = -memory.ctypes.data % 64
    packed = memory[skip : skip + table.size]
    record = packed.view(table.dtype)[0]
    for name in table.maps:
        record[name] = np.void(values[name].pack(_address(kernel, name, values[name].array, buffers)))
    for name in table.pointers:
        array, offset = values[name] if isinstance(values[name], tuple) else (values[name], 0)
        record[name] = 0 if array is None else _address(kernel, name, array, buffers) + offset
    for name in (*table.int64, *table.int32):
        if not isinstance(values[name], (int, np.integer)):
            raise EmulatorError(f"kernel {kernel}: {name} is {values[name]!r}, expected an int")
        try:
            record[name] = int(values[name])
        except OverflowError as error:
            raise EmulatorError(f"kernel {kernel}: {name} is {values[name]}: {error}") from error
    for name in table.float32:
        if not isinstance(values[name], (float, np.floating)):
            raise EmulatorError(f"kernel {kernel}: {name} is {values[name]!r}, expected a float")
        record[name] = values[name]
    return packed


def _address(kernel, name, array, buffers) -> int:
    """Where the guarded copy of an array starts."""
    if not isinstance(array, np.ndarray):
        raise EmulatorError(f"kernel {kernel}: {name} is {array!r}, expected an array or None")
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise EmulatorError(f"kernel {kernel}: {name} must be a C-contiguous array of numbers")
    span = (array.ctypes.data if array.nbytes else -1 - len(buffers), array.nbytes)  # empty arrays may share an address
    for (start, size), other in buffers.items():
        if (start, size) != span and start < sum(span) and span[0] < start + size:
            raise EmulatorError(f"kernel {kernel}: {other.name} and {name} overlap without being equal")
    if span not in buffers:
        buffers[span] = _Guarded(name, array)
    return buffers[span].start
