"""The benchmark of save policies: its rows, its table, and what it refuses to give a time."""

import json
import re

import pytest

torch = pytest.importorskip("torch")

from bench import cases, inputs, measure, report, save_report  # noqa: E402
from bench import save_policies as program  # noqa: E402


@pytest.fixture(autouse=True)
def short_turns_on_the_cpu(monkeypatch):
    monkeypatch.setattr(program, "SECONDS", 0.001)
    for module in (inputs, measure):
        monkeypatch.setattr(module, "has_gpu", lambda: False)


def test_policies_make_a_table_and_a_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    program.main("--tiny", "--out", str(path))
    record = json.loads(path.read_text())
    assert [row["case"] for row in record["rows"]] == ["tiny", "tiny_silu"]
    case, half = cases.TINY, cases.TINY.slots * cases.TINY.h
    for row, halves in zip(record["rows"], (2, 1), strict=True):
        assert tuple(row["saves"]) == save_report.POLICIES
        kept = {save: round(of["saved_mib"] * measure.MIB) for save, of in row["saves"].items()}
        of_first = {"minimal": 2 * half * halves, "paper": 2 * half * (halves + 1), "recompute": 0}
        of_first["fp8"] = halves * (half + 4 * case.slots)  # and a scale for each row
        assert {save: nbytes - kept["recompute"] for save, nbytes in kept.items()} == of_first
        assert all(of["ms"] > 0 and of["errors"].keys() == set(cases.RESULTS) for of in row["saves"].values())
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == save_report.HEAD and len(lines) == 2


def test_fifteen_layers_have_a_gate():
    names = cases.select(program.CASES, "")
    gated = [name for name in names if cases.LAYERS[name].activation == "swiglu"]
    assert len(gated) == 15 and set(names) - set(gated) == set(save_report.PLAIN)


@pytest.mark.parametrize("save", save_report.POLICIES)
@pytest.mark.parametrize("name", cases.RESULTS)
def test_a_wrong_policy_gets_no_time(name, save, monkeypatch):
    right = program.kept_and_results

    def wrong(case, made, of):
        kept, found = right(case, made, of)
        return kept, {**found, name: found[name] * 1.1} if of == save else found

    monkeypatch.setattr(program, "kept_and_results", wrong)
    with pytest.raises(AssertionError, match=rf"{save} on tiny: .*{name} .*a wrong result gets no time"):
        program.measured(cases.TINY, 0.001)


def test_a_record_says_when_recomputing_pays(tmp_path, monkeypatch):
    """recompute frees 2 GiB for 8 ms more, fp8 one for 1 ms."""
    saves = {"minimal": (40.0, 2048), "paper": (40.0, 3072), "fp8": (41.0, 1024), "recompute": (48.0, 0)}
    row = {"case": "conf3", "saves": {save: {"ms": ms, "saved_mib": mib} for save, (ms, mib) in saves.items()}}
    record = {"machine_info": {"gpu": "a GPU"}, "commit_info": {"id": "abc"}, "rows": [row]}
    monkeypatch.setattr(save_report, "FOLDER", tmp_path)
    assert save_report.section(report.table) == []
    (tmp_path / "gpu.json").write_text(json.dumps(record))
    text = "\n".join(save_report.section(report.table))
    assert 'a GPU, commit `abc`. `"paper"` takes 1.00 to 1.00 of the time' in text
    assert text.rstrip().endswith("| conf3 | 1.025 | 1.00 | 1.200 | 4.00 |")


def test_an_unknown_case_is_explained(capsys):
    with pytest.raises(SystemExit):
        program.main("--case", "foo")
    assert "or names among" in capsys.readouterr().err
