"""Cases that pass, fail, hang and end their process, on ranks without torch."""

from contextlib import closing

import pytest

from tests.parallel.rank_processes import RankProcesses

LIMIT = 4.0
RANKS = """
import os, sys, time
from tests.parallel.rank_processes import Leave, answer

def run_case(name):
    is_last = int(sys.argv[1]) == int(sys.argv[2]) - 1
    if name == "fails" and is_last:
        raise ValueError("of the last rank")
    if name == "hangs" and is_last:
        print("about to hang", flush=True)
        time.sleep(60)
    if name == "ends" and is_last:
        print("about to end", flush=True)
        os._exit(0)
    if name == "leaves" and is_last:
        raise Leave

answer(run_case, int(sys.argv[4]))
"""


@pytest.fixture
def processes(tmp_path):
    with closing(RankProcesses(2, tmp_path, "-c", RANKS)) as processes:
        yield processes


def ids_of(processes):
    return [process.pid for process in processes.processes]


def test_cases_that_pass_share_processes(processes):
    processes.run("passes")
    before = ids_of(processes)
    processes.run("passes")
    assert ids_of(processes) == before and len({*before}) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fails", "rank 1: Traceback.*ValueError: of the last rank\n"),
        ("hangs", "rank 1: did not end within 4 s, and printed:\nabout to hang\n.*in run_case\n.*"),
        ("ends", "rank 1: its process ended with 0, and printed:\nabout to end\n"),
    ],
    ids=["fails", "hangs", "ends"],
)
def test_a_case_fails_alone(processes, name, expected):
    """The rank that passed is not named, and the next case has new processes."""
    processes.run("passes")
    before = processes.processes
    with pytest.raises(AssertionError, match=f"(?s)^{expected}$"):
        processes.run(name, LIMIT)
    assert all(process.returncode is not None for process in before)
    processes.run("passes")
    assert not {*ids_of(processes)} & {process.pid for process in before}


def test_a_rank_may_leave(processes):
    """This passes, and the next case has new processes."""
    processes.run("leaves")
    assert not processes.processes
    processes.run("passes")


def test_processes_that_cannot_start(tmp_path):
    with closing(RankProcesses(2, tmp_path, "-c", "raise SystemExit('no such module')")) as processes:
        for _ in range(2):
            with pytest.raises(
                AssertionError, match=r"rank 0: its process ended with 1, and printed:\nno such module\n\n?rank 1"
            ):
                processes.run("passes")
