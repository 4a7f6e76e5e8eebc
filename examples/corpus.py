"""Text that every machine with Python has: the sources and documentation of the standard library and of packages."""

import hashlib
import sysconfig
from collections.abc import Iterable
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


def load(folders: Iterable[Path], limit: int) -> Corpus:
    """All text files below the folders, or as many as `limit` bytes hold, chosen and ordered by a hash of their bytes.

    Whole files are held out, by the same hash: whether a file is does not depend on what else is there.
    Raises ValueError where there is too little text to hold anything out.
    """
    found: dict[str, bytes] = {}
    seen: set[Path] = set()
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.suffix not in SUFFIXES or path in seen or path.is_symlink() or not path.is_file():
                continue
            seen.add(path)
            if not FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                continue
            try:
                text = path.read_bytes()
                text.decode()
            except (OSError, UnicodeDecodeError):
                continue
            found.setdefault(hashlib.sha256(text).hexdigest(), text)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total, digest = 0, hashlib.sha256()
    for name in sorted(found):
        text = found[name] + SEPARATOR
        if total + len(text) > limit:
            break
        total += len(text)
        digest.update(text)
        parts[int(name[-8:], 16) % HELD_OUT_FILES == 0].append(text)
    if not (parts[False] and parts[True]):
        raise ValueError(f"corpus: folders: expected text to train on and to hold out, got {len(found)} files")
    training, held_out = (
        torch.frombuffer(bytearray(b"".join(parts[is_held_out])), dtype=torch.uint8) for is_held_out in (False, True)
    )
    files = len(parts[False]) + len(parts[True])
    return Corpus(training, held_out, files, digest.hexdigest()[:16])
