"""Runs the suites of this folder, with their progress on stderr, and prints their tables: `python -m bench`."""

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.table import tables
from examples.progress import Progress
from moeblaze_cupy.tools.command import CommandError, integer, positive_number, run_guarded

FOLDER = Path(__file__).resolve().parent
PROG = "python -m bench"
SUITES = (
    *("layer", "experts", "memory", "grouped_gemm", "aggregation", "dispatch", "router", "selection", "slots"),
    *("ablation", "accuracy"),
)
ORDERS = ("row", "transposed")


def orders(text: str) -> str:
    """Comma-separated memory orders, as the suites take them."""
    unknown = [name for name in text.split(",") if name not in ORDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(ORDERS)}, comma-separated, got {unknown[0]!r}")
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Times the layer and its kernels beside their bounds and other implementations. Needs torch, "
        "pytest and pytest-benchmark. bench/README.md describes suites, cases and providers. Without a GPU it runs "
        "tiny shapes, to show that the suites work.",
    )
    parser.add_argument("--quick", action="store_true", help="the layer on five cases, beside the cuBLAS bound")
    parser.add_argument(
        "--suite", action="append", choices=(*SUITES, "transformers"), metavar="NAME",
        help=f"{', '.join(SUITES)}, transformers; repeatable (default: all but transformers, or layer with --case)",
    )  # fmt: skip
    sizes = "L8192-d2048-h768-E128-k8"
    parser.add_argument("--case", metavar="A,B", help=f"cases or groups of bench/cases.py, or sizes such as {sizes}")
    parser.add_argument("--provider", metavar="A,B", help="providers or groups of bench/providers.py")
    parser.add_argument(
        "--order", type=orders, metavar="A,B", help="memory orders of the weights: transposed, row (differs by suite)"
    )
    parser.add_argument("--rounds", type=integer(1), metavar="N", help="timed repetitions of each row (12)")
    parser.add_argument(
        "--minutes", type=positive_number, metavar="T", help="start no row later than this into the run"
    )
    parser.add_argument("--commit", metavar="ID", help="commit to write into the records (git's)")
    parser.add_argument("--out", metavar="DIR", help="write one JSON record per suite there")
    return parser


def run(args: argparse.Namespace) -> int:
    """0 if every row was measured or skipped for a stated reason, 1 if one failed or was wrong, or all were skipped."""
    pytest, torch = _needed()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        print("no GPU: tiny shapes on the CPU, which show that the suites run and nothing else", file=sys.stderr)
    suites = list(dict.fromkeys(args.suite or (("layer",) if args.quick or args.case else SUITES)))
    out = Path(args.out) if args.out else None
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--out: {error}") from error
    _check_names(args, suites)
    failed, measured = False, False
    for suite in suites:
        options = [str(FOLDER / f"bench_{suite}.py"), "-m", "gpu" if has_gpu else "not gpu"]
        options += _options(args, suite)
        record, report = _run_suite(pytest, suite, options, out)
        failed |= bool(report.failed)
        measured |= bool(record["benchmarks"])
        print("\n".join(tables(record)) or f"{suite}: nothing was measured")
        for kind, notes in (("skipped", report.skipped), ("failed", report.failed)):
            for note in dict.fromkeys(notes):
                print(f"{kind}: {note}")
        print()
    return 1 if failed or not measured else 0


def _needed() -> tuple[Any, Any]:
    """pytest and torch, with pytest-benchmark there too."""
    try:
        importlib.import_module("pytest_benchmark")
        return importlib.import_module("pytest"), importlib.import_module("torch")
    except ImportError as error:
        raise CommandError(
            f'needs pytest, pytest-benchmark and torch: pip install -e ".[test,torch]" ({error})'
        ) from error


def _check_names(args: argparse.Namespace, suites: list[str]) -> None:
    """Unknown cases and providers end the run before anything is measured. Those of "transformers" are its own."""
    try:
        if suites == ["transformers"]:
            from bench import bench_transformers

            bench_transformers.check_names(args.case, args.provider)
            return
        from bench import cases, providers

        cases.select(args.case, "quick")
        providers.select(args.provider, "quick")
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
    """Follows pytest's reports with lines of progress, and keeps why rows are missing."""

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


def _run_suite(pytest: Any, suite: str, options: list[str], out: Path | None) -> tuple[dict[str, Any], _Report]:
    """The suite's record, written to OUT/<suite>.json as well, and what became of its rows."""
    report, text = _Report(suite), io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        path = (out or Path(scratch)) / f"{suite}.json"
        with contextlib.redirect_stdout(text):
            code = pytest.main(
                [
                    *options,
                    f"--benchmark-json={path}",
                    f"--rootdir={FOLDER.parent}",
                    "--capture=no",  # the progress is on stderr; stdout is kept out of the way here
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


def main(*argv: str) -> int:
    """The exit code, as `run_guarded` has them. argparse raises SystemExit for options it cannot read."""
    return run_guarded(PROG, lambda: run(build_parser().parse_args(argv or None)))


if __name__ == "__main__":
    sys.exit(main())
