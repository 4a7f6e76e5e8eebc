"""Experts on 2 and 4 processes over gloo. One start of the processes runs all cases, which `ranks.py` has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environment import plain_environment

pytest.importorskip("torch")
import ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """By rank, then case: None, or what went wrong."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    environment = plain_environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "ranks.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [folder / f"{rank}.json" for rank in range(size)]
    assert all(path.exists() for path in found), "\n".join(said)
    return [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize("name", ranks.CASES)
def test_case(results, name):
    wrong = {rank: found.get(name, "did not come so far") for rank, found in enumerate(results)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)
