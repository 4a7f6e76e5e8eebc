"""The hosts of a group's ranks tell each other a few integers in memory that they share, or over gloo.

Their devices do not take part. Ranks of route "pull" are on one host. Those of "exact" use memory where they share it.
"""

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from moeblaze_cupy.interop.parallel import collectives, private
from moeblaze_cupy.interop.parallel.collectives import Pending, PendingHeaders, gather_objects

CALL_BITS = 16  # the lowest bits of a word
LINE_WORDS = 8  # words of a cache line; no two ranks write to one
GAVE_UP = -1  # the mark that replaces a rank's first word
# Hosts are often a millisecond apart. time.sleep takes 70 us at least, because the kernel joins timers that are 50 us
# apart, so a step that the host bounds would take as much longer. A shorter wait does not sleep.
SPIN_S = 2e-3
LONGEST_SLEEP_S = 1e-3
LOOK_S = 1.0  # time between two looks for ranks that have ended
_hosts: dict[Any, "HostMemory | HostGloo"] = {}  # connections by process group


class HostMemory:
    """Memory that all processes of a group map. Every rank has a row of words in each of two slots.

    A call uses one slot, the next call the other. A word is an int64 with a value and, in its lowest 16 bits, the
    number of the call. So a reader knows of each word whether it belongs to the call, in whatever order words arrive.
    CPython reads and writes a word of a memoryview of int64 by one instruction.

    Two slots suffice. A rank writes call n + 2 over call n only after it has read all words of call n + 1 of all other
    ranks. These wrote call n + 1 only after they had read call n. Each read decides by its result whether the writes
    after it happen, and no processor carries out a write before it has decided so.

    If a rank fails to get answers, it says so in its rows, and the memory is of no use after it. While a process lives
    it holds a lock on the byte of the file whose number is its rank. The kernel releases the lock when the process
    ends, for whatever reason, even if its parent has not yet asked for its exit status. Children do not inherit it.
    """

    def __init__(self, file: int, words: int, timeout: float, group: Any) -> None:
        """Maps the memory. file: a descriptor of `make_file`, closed with this object, or by its error. words: a row's.

        timeout: in seconds. Raises OSError or ValueError.
        """
        self.calls, self._words, self._timeout, self._group = 0, words, timeout, group
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._last: HostHeaders | None = None
        self._error = ""  # the error of the first call that failed
        self._file = file
        try:
            # mmap has a descriptor of its own. The lock is released when any descriptor of the file is closed.
            memory = memoryview(mmap.mmap(self._file, _nbytes(words, size))).cast("q")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        starts = range(0, len(memory), _lines(words))
        rows = [memory[start : start + words] for start in starts]
        self._slots = rows[:size], rows[size:]

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._file)

    def send(self, values: Sequence[int], what: str) -> "HostHeaders":
        """Gives the other ranks these values, as many in each call.

        It waits for the last call's answers if these were not read. what: names the call in errors. Raises ValueError
        for values that do not fit, and RuntimeError as `HostHeaders`.
        """
        largest = (1 << (63 - CALL_BITS)) - 1
        if len(values) != self._words or not 0 <= min(values) <= max(values) <= largest:
            expected = f"{self._words} integers from 0 to {largest}"
            raise ValueError(f"exchange: {what}: expected {expected}, got {list(values)}")
        if self._error:
            with collectives.named(what, self._group):
                raise RuntimeError(f"an earlier call failed: {self._error}")
        if self._last is not None:
            self._last.read()
        self.calls += 1
        row, tag = self._slots[self.calls % 2][self._rank], self.calls % (1 << CALL_BITS)
        for place, value in enumerate(values):
            row[place] = value << CALL_BITS | tag
        self._last = HostHeaders(self, what)
        return self._last

    def wait(self, what: str) -> list[list[int]]:
        """Returns by rank what all have sent in the last call. Raises RuntimeError as `HostHeaders`."""
        with collectives.named(what, self._group):
            if self._error:
                raise RuntimeError(self._error)
            try:
                values = self._wait()
            except RuntimeError as error:
                self._error = str(error)
                # Some rank may yet have to read one of the slots. It fails too then, and does not wait for this rank.
                for slot in self._slots:
                    slot[self._rank][0] = GAVE_UP
                raise
        self._last = None
        return values

    def _wait(self) -> list[list[int]]:
        rows = self._slots[self.calls % 2]
        found = self._read(rows, range(len(rows)))
        began, look = time.monotonic(), LOOK_S
        while len(found) < len(rows):
            waited = time.monotonic() - began
            missing = [rank for rank in range(len(rows)) if rank not in found]
            ended: list[int] = []
            if waited >= look:
                look = waited + LOOK_S
                ended = [rank for rank in missing if self._has_ended(rank)]
            gave_up = [rank for rank in missing if rows[rank][0] == GAVE_UP]
            found |= self._read(rows, missing)  # it comes after the look, as a rank may write and then end
            missing = [rank for rank in missing if rank not in found]
            for ranks, verb in ((ended, "ended"), (gave_up, "given up")):
                if not found.keys() >= set(ranks):
                    raise RuntimeError(f"expected those of ranks {missing}, of which {ranks} have {verb}")
            if missing and waited > self._timeout:
                raise RuntimeError(f"expected those of ranks {missing} within {self._timeout:g} s, got none")
            if waited < SPIN_S:
                # Other ranks run where cores are few. Other threads of this process run when this one sleeps.
                os.sched_yield()
            else:
                time.sleep(min(waited / 4, LONGEST_SLEEP_S))
        return [found[rank] for rank in range(len(rows))]

    def _read(self, rows: Sequence[memoryview], ranks: Sequence[int]) -> dict[int, list[int]]:
        """Returns by rank the values of those that have written all."""
        mask, found = (1 << CALL_BITS) - 1, {}
        for rank in ranks:
            words: list[int] = rows[rank].tolist()
            if {word & mask for word in words} == {self.calls & mask} and words[0] != GAVE_UP:
                found[rank] = [word >> CALL_BITS for word in words]
        return found

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)  # shared: others may ask, too
        except OSError:
            return False
        return True


class HostHeaders:
    """The values that ranks send in one call of `HostMemory`. They are read before the next call is sent."""

    def __init__(self, memory: HostMemory, what: str) -> None:
        self._memory, self._what = memory, what
        self._values: list[list[int]] | None = None

    def sent(self) -> None:
        """Does nothing: the values are where the other ranks read them, even after the end of this process."""

    def read(self) -> list[list[int]]:
        """Returns the values by rank. The host waits for them.

        Raises RuntimeError if a rank does not answer in time, has ended, or failed to get answers itself.
        """
        if self._values is None:
            self._values = self._memory.wait(self._what)
        return self._values


class HostGloo:
    """Sends the same over gloo, where ranks share no memory."""

    def __init__(self, number: int, timeout: float, group: Any) -> None:
        """Connects. number: the first ExpertGroup's that asks."""
        self._group, self._backend = group, private.gloo_backend(f"moeblaze_cupy/{number}", timeout, group)

    def close(self) -> None:
        """Ends gloo's threads."""
        self._backend = None

    def send(self, values: Sequence[int], what: str) -> PendingHeaders:
        """Gives the other ranks these values, as many on each. what: names the call in errors."""
        here = torch.tensor([list(values)], dtype=torch.int64, device="cpu")
        by_rank = here.new_empty((self._backend.size(), len(values)))
        with collectives.named(what, self._group):
            work = private.all_gather(self._backend, by_rank, here)
        return PendingHeaders(Pending(by_rank, work, what, self._group, here))


def connected(group: Any) -> HostMemory | HostGloo | None:
    """Returns what `connect` has made for the group."""
    return _hosts.get(group)


def connect(
    number: int, words: int, timeout: float, group: Any, only_memory: bool = False
) -> HostMemory | HostGloo | None:
    """Returns the connection of a group, made once: memory if all ranks can map it. All ranks call it together.

    number: the ExpertGroup's that asks. words: integers that a rank sends in a call. timeout: a call's, in seconds.
    only_memory: returns None in place of gloo. Raises RuntimeError if other ranks do not answer.
    """
    if group not in _hosts:
        for ended in [known for known in _hosts if not private.is_alive(known)]:
            _hosts.pop(ended).close()
        with collectives.named("connection of hosts", group):
            made: HostMemory | HostGloo | None = share_memory(words, timeout, group)
            if made is None and not only_memory:
                made = HostGloo(number, timeout, group)
        if made is None:
            return None
        _hosts[group] = made
    return _hosts[group]


def share_memory(words: int, timeout: float, group: Any) -> HostMemory | None:
    """Returns memory of the group, or None on all ranks if one cannot map it. All ranks call it together.

    The first rank makes its file, which has no place in any folder, so that nothing is left whichever rank ends when.
    The others open it by its descriptor in the first rank's process.
    """
    name, file = f"moeblaze_cupy-{secrets.token_hex(16)}", None
    if dist.get_rank(group) == 0:
        with suppress(OSError):
            file = make_file(name, words, dist.get_world_size(group))
    memory = None
    path = None if file is None else f"/proc/{os.getpid()}/fd/{file}"
    path, name = gather_objects((path, name), group)[0]
    if path is not None:
        with suppress(OSError, ValueError):  # the process may be in a container of its own, or another user's
            memory = HostMemory(open_file(path, name) if file is None else file, words, timeout, group)
    if not all(gather_objects(memory is not None, group)) and memory is not None:
        memory.close()
        memory = None
    return memory


def make_file(name: str, words: int, size: int) -> int:
    """Returns the descriptor of a new file in memory. Raises OSError if there is no room."""
    file = os.memfd_create(name)
    try:
        # Memory is taken now. A write to a mapped page without any would end the process.
        os.posix_fallocate(file, 0, _nbytes(words, size))
    except OSError:
        os.close(file)
        raise
    return file


def open_file(path: str, name: str) -> int:
    """Opens what `make_file` made by this name. Raises OSError for another file, such as one of another container."""
    if name not in os.readlink(path):
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _lines(words: int) -> int:
    """Returns the words of the cache lines that hold a row."""
    return -(-words // LINE_WORDS) * LINE_WORDS


def _nbytes(words: int, size: int) -> int:
    """Returns the bytes of two slots with a row for each rank."""
    return 8 * 2 * size * _lines(words)
