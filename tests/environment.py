"""What tests give to the processes that they start."""

import os


def plain_environment():
    """Without pytest's own: pytest-benchmark measures nothing where it sees xdist."""
    own = ("PYTEST_XDIST", "PYTEST_ADDOPTS")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}
