"""Processes of ranks, to which tests hand case after case.

A case that raises, hangs or ends a process fails alone.
"""

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.environment import ROOT, plain_environment

LIMIT = 300.0  # seconds of a case, with the start of the processes if they are new
PASSED, LEFT = "passed", "left"


class Leave(Exception):
    """A case raises it to pass by the end of its process."""


def answer(run_case, connection):
    """Runs in a process of a rank: calls run_case with each name that comes from the descriptor `connection`."""
    connection = Connection(connection)
    with suppress(EOFError):  # the test has ended
        while True:
            name, limit = connection.recv()
            faulthandler.dump_traceback_later(limit / 2)  # says where a case is that may hang
            try:
                run_case(name)
                said = PASSED
            except Leave:
                connection.send(LEFT)
                os._exit(0)  # at once: groups that this case holds may take seconds to end
            except Exception:
                said = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            connection.send(said)
    os._exit(0)  # groups whose collectives failed do not end well


class RankProcesses:
    """Starts the processes at the first case, and anew for the case after one that did not pass on every rank.

    words: what Python runs. The rank, the number of ranks, a folder and the descriptor for `answer` are added.
    """

    def __init__(self, size, folder, *words):
        self.size, self.folder, self.words = size, folder, words
        self.processes, self.connections, self.printed = [], [], []

    def start(self):
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        environment = plain_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {"NCCL_NVLS_ENABLE": "0"}  # not all machines that share GPUs allow NVLink's multicast
        self.printed = [folder / f"{rank}.txt" for rank in range(self.size)]
        for rank, path in enumerate(self.printed):
            here, there = Pipe()
            self.connections.append(here)
            words = [*self.words, str(rank), str(self.size), str(folder), str(there.fileno())]
            with path.open("w") as file, there:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        cwd=ROOT,
                        env=environment,
                        pass_fds=[there.fileno()],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def run(self, name, limit=LIMIT):
        """Runs the case of this name on all ranks. Raises AssertionError with what went wrong on which rank."""
        end = time.monotonic() + limit
        if not self.processes:
            self.start()
        said = [None] * self.size
        for connection in self.connections:
            with suppress(BrokenPipeError):  # its process has ended, so no answer comes
                connection.send((name, limit))
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        while waiting and (ready := wait(waiting, max(end - time.monotonic(), 0))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    said[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    with suppress(subprocess.TimeoutExpired):
                        self.processes[rank].wait(timeout=10)  # for its exit status
        processes, hung = self.processes, waiting.values()
        if said != [PASSED] * self.size:
            self.close()
        for rank, path in enumerate(self.printed):
            if said[rank] is None:
                ended = f"its process ended with {processes[rank].returncode}"
                what = f"did not end within {limit:g} s" if rank in hung else ended
                said[rank] = f"{what}, and printed:\n{path.read_text()}"
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text not in (PASSED, LEFT)]
        assert not wrong, "\n".join(wrong)

    def close(self):
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.wait()
            connection.close()
        self.processes, self.connections = [], []
