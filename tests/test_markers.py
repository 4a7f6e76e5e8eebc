"""The markers `long` and `slow`, and which of them a call of pytest leaves out."""

import re

import pytest

from tests.environment import ROOT, run_python
from tests.markers import CASES

FILE = "tests/cuda/test_loader.py"
TEST = f"{FILE}::test_variants_are_those_the_layer_launches"


def collected(*words):
    """The number of cases of TEST that pytest collects."""
    done = run_python("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: none
    return done.stdout.count(f"{TEST}[")


@pytest.mark.parametrize("name", CASES)
def test_every_entry_names_tests(name):
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {function}\(" if function else "^def test_", text, re.MULTILINE)
    not_long, not_slow = CASES[name]
    assert not_long >= not_slow


def test_a_call_leaves_out_what_it_does_not_name():
    """`-o testpaths` stands for the call without a path, which collects all files."""
    without_path = "-o", f"testpaths={FILE}"
    not_long, not_slow = CASES[TEST]
    assert 0 < not_slow < not_long
    assert collected(*without_path) == collected("-m", "not long", FILE) == not_long
    assert collected("-m", "not slow", *without_path) == not_slow
    everything = collected(FILE)
    assert everything > not_long
    assert collected("-m", "long or not long", *without_path) == collected(TEST) == everything
