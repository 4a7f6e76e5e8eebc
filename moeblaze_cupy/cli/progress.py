"""What the subcommands tell the user as they run: a progress bar on stderr, and errors in one line."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

REDRAW_SECONDS = 0.1  # on a terminal
PLAIN_LINES = 10  # about how many lines a log gets
EARLY_SECONDS = 5  # after which a log gets its first line, so that it says early how long is left


class CommandError(Exception):
    """Ends a subcommand: its one-line message goes to stderr. `code`: 2 if it cannot run as asked, 1 if it failed."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """The error's first line with words in it, without this package's own name in front."""
    lines = [line.strip() for line in str(error).splitlines() if any(c.isalnum() for c in line)]
    return lines[0].removeprefix("moeblaze_cupy: ") if lines else type(error).__name__


class Progress:
    """Progress of `total` steps: one redrawn line on a terminal, else about `plain_lines` lines.

    Silent where the environment has MOEBLAZE_PROGRESS=0. Use as a context manager.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None, plain_lines: int = PLAIN_LINES) -> None:
        self.total, self.label, self.plain_lines = total, label, plain_lines
        self.stream = sys.stderr if stream is None else stream
        self.silent = os.environ.get("MOEBLAZE_PROGRESS") == "0"
        self.is_terminal = self.stream.isatty()
        self.start = time.perf_counter()
        self.next_redraw = self.start
        self.drawn_width = 0
        self.next_plain = 1
        self.early = self.start + EARLY_SECONDS

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.drawn_width:
            self.stream.write("\n")  # leaves the last state of the bar, also where an error follows
            self.stream.flush()

    def update(self, done: int, note: str | Callable[[], str] = "") -> None:
        """Shows `done` of `total` steps. `note` may be a function, called only if something is written: on a GPU,
        reading a loss waits for the device."""
        if self.silent or not self._is_due(done):
            return
        text = f"{self.label} {done}/{self.total}"
        elapsed = time.perf_counter() - self.start
        timing = f"{elapsed:.0f} s"
        if 0 < done < self.total:
            timing += f", {elapsed / done * (self.total - done):.0f} s left"
        note = note() if callable(note) else note
        if not self.is_terminal:
            self.stream.write(f"{text} ({timing}) {note}".rstrip() + "\n")
        else:
            # A line as wide as the terminal would wrap, and a wrapped line cannot be redrawn.
            room = max(1, shutil.get_terminal_size().columns - 1)
            bar_width = min(30, room - len(text) - len(timing) - len(note) - 6)
            filled = max(bar_width, 0) * done // max(self.total, 1)
            bar = f" [{'#' * filled}{'.' * (bar_width - filled)}]" if bar_width >= 5 else ""
            line = f"{text}{bar} {timing} {note}".rstrip()[:room]
            self.stream.write("\r" + line.ljust(min(self.drawn_width, room)))
            self.drawn_width = len(line)
        self.stream.flush()

    def _is_due(self, done: int) -> bool:
        if self.is_terminal:
            now = time.perf_counter()
            if now < self.next_redraw and done < self.total:
                return False
            self.next_redraw = now + REDRAW_SECONDS
            return True
        is_early = done > 0 and time.perf_counter() >= self.early
        if not is_early and done * self.plain_lines < self.next_plain * self.total and done < self.total:
            return False
        self.early = math.inf
        self.next_plain = done * self.plain_lines // max(self.total, 1) + 1
        return True
