"""What tests give to the processes that they start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def plain_environment():
    """Without pytest's own: pytest-benchmark measures nothing where it sees xdist."""
    own = ("PYTEST_XDIST", "PYTEST_ADDOPTS")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def run_python(*argv, stdout=subprocess.PIPE, preexec_fn=None, **environment):
    """Python on these words in a process of its own, in the checkout."""
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=plain_environment() | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=preexec_fn,
        timeout=1800,  # against a hang; a training run takes minutes, more on a busy machine
    )
