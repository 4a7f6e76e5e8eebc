"""The shared parts of command lines: numbers among their options, and errors in one line with an exit code."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any


class CommandError(Exception):
    """Ends a command: its one-line message goes to stderr. `code`: 2 if it cannot run as asked, 1 if it failed."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """Returns the error's first line with words in it, without this package's own name in front."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[0].removeprefix("moeblaze_cupy: ") if lines else type(error).__name__


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns an option's type: whole numbers from `least` to `most`."""
    expected = f"a whole number from {least} {'on' if most is None else f'to {most}'}"

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


def positive_number(text: str) -> float:
    """Converts an option's text to a finite number above 0."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def run_guarded(name: str, run: Callable[[], int]) -> int:
    """Returns `run`'s exit code, or that of the error that ended it, which goes to stderr in one line after `name`.

    0: done. 1: it ran and failed. 2: it cannot run as asked. 130: Ctrl-C. 141: the reader of stdout left.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller closed it and wants no output
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except CommandError as error:
        code, message = error.code, str(error)
    except KeyboardInterrupt as error:
        code, message = 130, str(error) or "interrupted"
    except MemoryError as error:  # also CuPy's
        code, message = 1, f"out of memory: {one_line(error)}"
    except BrokenPipeError:  # the reader, `head` for instance, has enough
        _discard_output()
        return 141
    except OSError as error:
        code, message = 1, one_line(error)
        _discard_output()
    with contextlib.suppress(OSError):
        print(f"{name}: {message}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Discards output, as Python flushes stdout once more at its exit, which would fail again."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stdout without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
