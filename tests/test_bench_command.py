"""`python -m bench`: its options, its table and record, and how it fails."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from bench import __main__ as bench_command
from tests.environment import run_python


@pytest.mark.parametrize(
    ("value", "got"),
    [("foo", "'foo'"), ("row,", "''")],
)
def test_unreadable_orders_are_explained(value, got, capsys):
    with pytest.raises(SystemExit) as raised:
        bench_command.main("--order", value)
    assert raised.value.code == 2
    expected = f": error: argument --order: expected row or transposed, comma-separated, got {got}"
    assert capsys.readouterr().err.splitlines()[-1].endswith(expected)


def test_sizes_are_timed_as_a_case_is():
    pytest.importorskip("torch")
    suites = "bench/bench_layer.py", "bench/bench_experts.py"  # experts' rows are of its own cases
    done = run_python("-m", "pytest", "--collect-only", "-q", *suites, "--case", "L640-d64-h48-E12-k5")
    of_sizes = [line for line in done.stdout.splitlines() if "L640" in line]
    rows = ("cublas_bound", "moeblaze", "torch_grouped_mm")
    expected = [
        f"bench/bench_layer.py::test_layer[L640-d64-h48-E12-k5-transposed-{row}-{what}]"
        for row in rows
        for what in ("forward", "forward_backward")
    ]
    assert set(expected) <= set(of_sizes)
    assert all("bench_layer.py::test_layer[" in line for line in of_sizes), of_sizes
    wrong = run_python("-m", "pytest", "--collect-only", "-q", *suites, "--case", "L640-d64-h48-E12-k13")
    assert "--case: expected k at most E" in wrong.stdout + wrong.stderr


@pytest.mark.parametrize("value", ["row", "transposed", "row,transposed"])
def test_orders(value):
    assert bench_command.build_parser().parse_args(["--order", value]).order == value


def test_it_prints_a_table_and_writes_a_record(tmp_path):
    """Tiny shapes where there is no GPU; the layer's suite on a GPU has its own way to be run."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("would measure on the GPU")
    done = run_python("-m", "bench", "--suite", "dispatch", "--commit", "abc1234", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tiny +moeblaze +random +[\d.,]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert "skipped: sonicmoe: needs a CUDA device, and pip install sonic-moe" in done.stdout
    assert "no GPU: tiny shapes" in done.stderr and "bench dispatch 4/4" in done.stderr
    assert '"id": "abc1234"' in (tmp_path / "dispatch.json").read_text()


def test_it_fails_where_a_provider_is_wrong(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("would measure on the GPU")
    from bench import kernels

    right = kernels.sorted_lists
    calls = []

    def wrong_once(ids, E):
        """The first call gives what is compared, the second what it is compared with."""
        calls.append(ids)
        lists = right(ids, E)
        return lists if len(calls) % 2 else (lists[0] + 1, *lists[1:])

    monkeypatch.setattr(kernels, "sorted_lists", wrong_once)
    assert bench_command.main("--suite", "dispatch") == 1
    out = capsys.readouterr().out
    assert re.search(r"^failed: tiny-torch_sort: .*torch_sort on tiny: wrong lists", out, re.MULTILINE)
    assert not re.search(r"^tiny +torch_sort", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "fragment"),
    [("--case=conf9", "got 'conf9'"), ("--provider=nobody", "got 'nobody'"), ("--out=/dev/null/x", "--out: ")],
)
def test_it_refuses_what_it_does_not_know(capsys, option, fragment):
    pytest.importorskip("torch")
    assert bench_command.main(option) == 2
    assert fragment in capsys.readouterr().err


def test_a_run_that_measured_nothing_fails(capsys):
    pytest.importorskip("torch")
    assert bench_command.main("--suite", "dispatch", "--minutes", "1e-9") == 1
    output = capsys.readouterr().out
    assert "dispatch: nothing was measured" in output and "skipped: later than --minutes" in output


def test_it_can_be_interrupted(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("would measure on the GPU")
    from bench import kernels

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "sorted_lists", interrupt)
    assert bench_command.main("--suite", "dispatch") == 130
    assert capsys.readouterr().err.endswith("python -m bench: interrupted\n")


def test_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    assert bench_command.main("--quick") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m bench: needs pytest, pytest-benchmark and torch: pip install -e ")


def test_commands_that_reproduce_records_are_such():
    """Their programs, suites, cases and providers exist, and every record in a row that has minutes does."""
    pytest.importorskip("torch")
    from bench.recorded import RECORDS

    readme = (RECORDS.parent / "README.md").read_text()
    section = readme[readme.index("## Reproduce") : readme.index("## Records and regressions")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "`python" in line]
    rows = [row for row in rows if len(row) == 3]
    assert len(rows) > 20
    for records, command, minutes in rows:
        names = [name for name in re.findall("`([^`]+)`", records) if not name.endswith("/")]
        paths = [Path(RECORDS, name) for name in names]
        assert not minutes or all(path.is_dir() or path.with_suffix(".json").is_file() for path in paths), names
        program, *options = re.match("`python (?:-m )?([^`]+)`", command)[1].split()
        assert program.endswith(".py") or importlib.util.find_spec(program), program
        if program == "bench":
            args = bench_command.build_parser().parse_args(options)
            bench_command._check_names(args, args.suite)
