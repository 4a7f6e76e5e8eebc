"""Progress of long runs: plain lines on stderr that say how long is left."""

import sys
import time
from collections.abc import Callable

SECONDS = 5.0  # before the first line, and between the next ones
GROWTH = 1.2  # of the time from line to line, so that a run of hours has a short log


class Progress:
    """Lines such as "train 40/500 (6 s, 69 s left) loss 2.918", more rarely as time passes, and one at the end.

    done: steps of `total` that an earlier run made.
    """

    def __init__(self, total: int, label: str, done: int = 0) -> None:
        self.total, self.label, self.first = total, label, done
        self.start, self.due = time.perf_counter(), SECONDS

    def update(self, done: int, note: str | Callable[[], str] = "") -> None:
        """Says that `done` steps are done, if a line is due. `note` may be a function, called only then: on a GPU,
        reading a loss waits for the device."""
        elapsed = time.perf_counter() - self.start
        if elapsed < self.due and done < self.total:
            return
        self.due = max(elapsed + SECONDS, GROWTH * elapsed)
        timing = f"{elapsed:.0f} s"
        if self.first < done < self.total:
            timing += f", {elapsed / (done - self.first) * (self.total - done):.0f} s left"
        note = note() if callable(note) else note
        print(f"{self.label} {done}/{self.total} ({timing}) {note}".rstrip(), file=sys.stderr, flush=True)
