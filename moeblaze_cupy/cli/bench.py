"""`bench`: runs the suites of a checkout's bench/ folder, with a progress bar, and prints their tables."""

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import moeblaze_cupy
from moeblaze_cupy.cli.progress import CommandError, Progress


def run(args: argparse.Namespace) -> int:
    """0 if every row was measured or skipped for a stated reason, 1 if one failed or was wrong, or all were skipped."""
    folder = _folder()
    pytest, torch = _needed()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        print("no GPU: tiny shapes on the CPU, which show that the suites run and nothing else", file=sys.stderr)
    suites = list(dict.fromkeys(args.suite or (("layer",) if args.quick or args.case else args.suites)))
    out = Path(args.out) if args.out else None
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--out: {error}") from error
    _check_names(args, suites)
    failed, measured = False, False
    for suite in suites:
        options = [str(folder / f"bench_{suite}.py"), "-m", "gpu" if has_gpu else "not gpu"]
        options += _options(args, suite)
        record, report = _run_suite(pytest, folder, suite, options, out)
        failed |= bool(report.failed)
        measured |= bool(record["benchmarks"])
        print("\n".join(importlib.import_module("bench.table").tables(record)) or f"{suite}: nothing was measured")
        for kind, notes in (("skipped", report.skipped), ("failed", report.failed)):
            for note in dict.fromkeys(notes):
                print(f"{kind}: {note}")
        print()
    return 1 if failed or not measured else 0


def _folder() -> Path:
    """bench/ beside the package: it is part of a checkout, not of an installed wheel."""
    folder = Path(moeblaze_cupy.__file__).resolve().parent.parent / "bench"
    if not (folder / "conftest.py").is_file():
        raise CommandError(f"the suites are in a checkout's bench/ folder: expected {folder}, got no such folder")
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    return folder


def _needed() -> tuple[Any, Any]:
    """pytest and torch, with pytest-benchmark there too."""
    try:
        importlib.import_module("pytest_benchmark")
        return importlib.import_module("pytest"), importlib.import_module("torch")
    except ImportError as error:
        raise CommandError(f"needs pytest, pytest-benchmark and torch: {error}") from error


def _check_names(args: argparse.Namespace, suites: list[str]) -> None:
    """Unknown cases and providers end the run before anything is measured. Those of "transformers" are its own."""
    try:
        if suites == ["transformers"]:
            importlib.import_module("bench.bench_transformers").check_names(args.case, args.provider)
            return
        importlib.import_module("bench.cases").select(args.case, "quick")
        importlib.import_module("bench.providers").select(args.provider, "quick")
    except ValueError as error:
        raise CommandError(str(error).removeprefix("bench: ")) from error


def _options(args: argparse.Namespace, suite: str) -> list[str]:
    options: list[str] = []
    case = args.case or ("quick" if args.quick and suite == "layer" else None)
    provider = args.provider or ("quick" if args.quick and suite == "layer" else None)
    for name, value in (
        ("--case", case),
        ("--provider", provider),
        ("--order", args.order),
        ("--commit", args.commit),
        ("--minutes", args.minutes),
        ("--rounds", args.rounds),
    ):
        options += [] if value is None else [f"{name}={value}"]
    return options


class _Report:
    """Follows pytest's reports with the progress bar, and keeps why rows are missing."""

    def __init__(self, suite: str) -> None:
        self.suite, self.done = suite, 0
        self.skipped: list[str] = []
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.progress = Progress(len(session.items), f"bench {self.suite}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("[")[2].rstrip("]") or report.nodeid
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped.append(reason.removeprefix("Skipped: "))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.failed.append(f"{name}: {message.splitlines()[0].removeprefix('Failed: ')}")
        if report.when == "call" or (report.when == "setup" and report.skipped):
            self.done += 1
            self.progress.update(self.done, name)


def _run_suite(
    pytest: Any, folder: Path, suite: str, options: list[str], out: Path | None
) -> tuple[dict[str, Any], _Report]:
    """The suite's record, written to OUT/<suite>.json as well, and what became of its rows."""
    report, text = _Report(suite), io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        path = (out or Path(scratch)) / f"{suite}.json"
        with contextlib.redirect_stdout(text):
            code = pytest.main(
                [
                    *options,
                    f"--benchmark-json={path}",
                    f"--rootdir={folder.parent}",
                    "--capture=no",  # the progress bar is on stderr; stdout is kept out of the way here
                    "-p",
                    "no:cacheprovider",
                ],
                plugins=[report],
            )
        if code == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            last = [line for line in text.getvalue().splitlines() if line.strip()][-1:]
            raise CommandError(f"{suite}: pytest ended with {code!r}: {' '.join(last)}")
        written = path.read_text() if path.is_file() else ""
        return json.loads(written) if written else {"benchmarks": []}, report
