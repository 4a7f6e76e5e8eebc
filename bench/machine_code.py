"""The machine code of every kernel variant at two commits, compared byte for byte, without a GPU.

`python -m bench.machine_code BEFORE [AFTER]`: commits, or folders with a checkout; AFTER is this checkout if left out.
For whoever renames, moves or comments kernel code, which must change nothing, or wants to know which variants an edit
reaches. Each side lists its variants by its own loader, all are compiled by one NVRTC. What is compared are the
sections of instructions (.text.*) and of the constants that they hold; names of sections and debugging data are left
out. So are variables of the source (.nv.global*), which no kernel reads: the compiler lists the constants of a header
among them, wherever it is included.
"""

import argparse
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import nvrtc

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = ("90a", "80")

# Runs in either checkout. `tier` is a field of DeviceLimits at some commits and read from the environment at others.
LIST = """
import dataclasses, json, os, sys
try:
    from moeblaze_cupy.cuda import launch_config, loader
    try:
        from bench.kernel_variants import variants
    except ModuleNotFoundError:  # commits with the list in the package
        from moeblaze_cupy.tools.variants import variants
    from moeblaze_cupy.types import ACTIVATIONS
    paths = loader.source_paths(loader.source_folder())
except ModuleNotFoundError:  # commits with all modules in one folder
    from moeblaze_cupy import launch_config, loader
    from moeblaze_cupy.structures import ACTIVATIONS
    variants = loader.variants
    paths = {name: os.path.join(loader.source_folder(), name) for name in os.listdir(loader.source_folder())}
limits = launch_config.H200
if sys.argv[1] == "80":
    a100 = dict(compute_capability=80, multiprocessors=108)
    a100 |= dict(shared_bytes_per_block=166912, shared_bytes_per_multiprocessor=167936)
    a100 |= dict(tier="sm80") if hasattr(limits, "tier") else {}
    limits = dataclasses.replace(limits, **a100)
orders = ("row", "transposed")
found = variants(tuple(loader.ELEMENTS), orders, ACTIVATIONS, (True, False), limits, accumulates=True)
print(json.dumps([(v.source, v.name or v.source, os.path.dirname(paths[v.source]), loader.options(v)) for v in found]))
"""


@dataclass(frozen=True)
class Variant:
    """One compilation: a source of a checkout with the options of its loader."""

    arch: str
    source: str
    name: str
    folder: str
    options: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"sm_{self.arch} {self.source}: {self.name}"

    def code(self) -> str:
        """Digest of its instructions and constants."""
        options = [o for o in self.options if not o.startswith(("-arch", "-DSOURCE_DIGEST"))]
        source = (Path(self.folder) / self.source).read_bytes()
        cubin = nvrtc.compile_source(source, self.source, [*options, f"-arch=sm_{self.arch}"]).cubin
        digest = hashlib.sha256()
        for contents in sorted(code_sections(cubin)):
            digest.update(len(contents).to_bytes(8, "little") + contents)
        return digest.hexdigest()


def code_sections(cubin: bytes) -> Iterator[bytes]:
    """Contents of the sections of an ELF64 file that hold instructions or constants.

    Raises ValueError for something else, and for a file without instructions.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"machine_code: expected a 64-bit ELF file, got one that begins with {cubin[:5]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names_start = headers[names_index][4]
    has_text = False
    for name_offset, kind, _, _, start, size in headers:
        first = names_start + name_offset
        name = cubin[first : cubin.index(b"\0", first)]
        has_text |= name.startswith(b".text.")
        if kind != 1 or name == b".nv.constant4":  # 1: SHT_PROGBITS; 4: addresses, one for each variable of the source
            continue
        if name.startswith((b".text.", b".nv.constant")):
            yield cubin[start : start + size]
    if not has_text:
        raise ValueError("machine_code: expected sections .text.*, got none")


def checkout(place: str, stack: ExitStack) -> Path:
    """The folder itself, or the commit's files in a folder that goes with the stack."""
    if Path(place).is_dir():
        return Path(place).resolve()
    done = subprocess.run(["git", "-C", ROOT, "archive", place], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"machine_code: expected a commit or a folder, got {place!r}: {done.stderr.decode().strip()}")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)
    return folder


def variants(folder: Path, arch: str) -> list[Variant]:
    """All that the checkout's loader can ask for on an H200 (90a) or an A100 (80)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MOEBLAZE_TIER", "MOEBLAZE_LINEINFO")}
    environment["MOEBLAZE_COMPILE"] = "lazy"
    command = [sys.executable, "-c", LIST, arch]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"machine_code: {folder}: expected its loader to list its variants, got\n{done.stderr}")
    return [Variant(arch, source, name, f, tuple(options)) for source, name, f, options in json.loads(done.stdout)]


@dataclass(frozen=True)
class Comparison:
    """Labels of variants, by what became of them."""

    same: list[str]
    different: list[str]
    renamed: list[tuple[str, str]]  # other labels, the same code
    removed: list[str]
    added: list[str]

    def lines(self) -> list[str]:
        """One per variant, and a summary."""
        found = [f"same       {label}" for label in self.same]
        found += [f"renamed    {before} -> {after}" for before, after in self.renamed]
        found += [f"removed    {label}" for label in self.removed]
        found += [f"added      {label}" for label in self.added]
        found += [f"DIFFERENT  {label}" for label in self.different]
        counts = f"{len(self.same)} the same, {len(self.renamed)} renamed, {len(self.different)} different"
        return [*found, f"{counts}, {len(self.removed)} removed, {len(self.added)} added"]


def compare(before: dict[str, str], after: dict[str, str]) -> Comparison:
    """Digests by label. A label of one side alone is paired with one of the other side that has the same code."""
    both = [label for label in before if label in after]
    added = {label: code for label, code in after.items() if label not in before}
    renamed, removed = [], []
    for label, code in before.items():
        if label not in after:
            match = next((other for other, of_other in added.items() if of_other == code), None)
            if match is None:
                removed.append(label)
            else:
                renamed.append((label, match))
                del added[match]
    return Comparison(
        same=[label for label in both if before[label] == after[label]],
        different=[label for label in both if before[label] != after[label]],
        renamed=renamed,
        removed=removed,
        added=list(added),
    )


def main(arguments: list[str] | None = None) -> int:
    """0 if no variant differs, was removed or was added; else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.machine_code", description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a commit, or a folder with a checkout")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="likewise; this checkout if left out")
    parser.add_argument("--arch", choices=ARCHITECTURES, action="append", help="one architecture instead of both")
    parser.add_argument("--match", default="", metavar="TEXT", help="only variants whose line contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time")
    options = parser.parse_args(arguments)
    if nvrtc.library() is None:
        raise SystemExit(f"machine_code: {nvrtc.INSTALL}")
    with ExitStack() as stack, ThreadPoolExecutor(options.jobs) as pool:
        digests = []
        for place in (options.before, options.after):
            folder = checkout(place, stack)
            found = [v for arch in options.arch or ARCHITECTURES for v in variants(folder, arch)]
            chosen = [variant for variant in found if options.match in variant.label]
            digests.append(dict(zip((v.label for v in chosen), pool.map(Variant.code, chosen), strict=True)))
    if not any(digests):
        raise SystemExit(f"machine_code: --match: expected a part of a variant's line, got {options.match!r}")
    result = compare(*digests)
    print("\n".join(result.lines()))
    return 1 if result.different or result.removed or result.added else 0


if __name__ == "__main__":
    sys.exit(main())
