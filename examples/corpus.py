"""Text that every machine with Python has: the sources and documentation of the standard library and of packages."""

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

SUFFIXES = {".py", ".pyi", ".rst", ".md", ".txt", ".h", ".hpp", ".cuh"}
FILE_BYTES = 256, 1 << 20  # shorter files are mostly licences of empty packages, longer ones mostly tables
HELD_OUT_FILES = 40  # one file of so many
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Bytes of files, each ended by a zero byte. No file is in both parts, nor is any file there twice."""

    training: torch.Tensor  # (n,) uint8
    held_out: torch.Tensor  # (m,) uint8
    files: int
    digest: str  # of all bytes: runs of equal digest saw the same text

    @property
    def about(self) -> dict:
        return {
            "files": self.files,
            "training_bytes": len(self.training),
            "held_out_bytes": len(self.held_out),
            "digest": self.digest,
        }

    def unigram_loss(self) -> float:
        """Nats per held-out byte of a model that knows how often each byte comes in training, and nothing else."""
        counts = self.training.int().bincount(minlength=256).double() + 1
        shares = self.held_out.int().bincount(minlength=256).double() / len(self.held_out)
        return float(-(shares * (counts / counts.sum()).log()).sum())


def default_folders() -> list[Path]:
    """The standard library and the installed packages."""
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _by_name(folders: Iterable[Path], suffixes: Collection[str]) -> list[Path]:
    """Files below the folders, each once, in the order of a hash of their names: a mixture of all packages."""
    found: dict[Path, bytes] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                if path.suffix in suffixes and path not in found:
                    found[path] = hashlib.sha256(str(path.relative_to(folder)).encode()).digest()
    return sorted(found, key=lambda path: (found[path], path))


def load(folders: Iterable[Path], limit: int, suffixes: Collection[str] = SUFFIXES) -> Corpus:
    """All files of these suffixes below the folders, or as many as `limit` bytes hold; no more than these are read.

    Whole files are held out, by a hash of their bytes: whether a file is does not depend on what else is there.
    Raises ValueError where there is too little text to hold anything out.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    seen: set[bytes] = set()
    total, digest = 0, hashlib.sha256()
    for path in _by_name(folders, suffixes):
        try:
            if path.is_symlink() or not FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                continue
            text = path.read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        key = hashlib.sha256(text).digest()
        if key in seen:
            continue
        seen.add(key)
        total += len(text) + len(SEPARATOR)
        if total > limit:
            break
        digest.update(text + SEPARATOR)
        parts[int.from_bytes(key[-4:], "big") % HELD_OUT_FILES == 0].append(text + SEPARATOR)
    if not (parts[False] and parts[True]):
        raise ValueError(f"corpus: folders: expected text to train on and to hold out, got {len(seen)} files")
    training, held_out = (
        torch.frombuffer(bytearray(b"".join(parts[is_held_out])), dtype=torch.uint8) for is_held_out in (False, True)
    )
    files = len(parts[False]) + len(parts[True])
    return Corpus(training, held_out, files, digest.hexdigest()[:16])
