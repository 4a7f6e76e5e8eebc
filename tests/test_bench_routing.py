"""The benchmarks of recorded, replayed and watched routing, on small models without a GPU."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench import bench_transformers, generation, inputs, log_probabilities, transformers_report, watched_steps

pytestmark = pytest.mark.skipif(inputs.has_gpu(), reason="would measure on the GPU")


def test_parts_in_a_fixed_order_leave_no_difference(monkeypatch):
    """Nor do the layer, and eager experts, which then add in it. With torch's parts the differences are small."""
    monkeypatch.setattr(log_probabilities, "SEQUENCES", 2)
    monkeypatch.setattr(log_probabilities, "NEW", 4)
    rows = log_probabilities.measured(["eager", "moeblaze"])
    assert len(rows) == 16 and {row["batch"] for row in rows} == {1, 2}
    for row in rows:
        assert row["largest"] == 0 if row["parts"] == "fixed" else row["largest"] < 0.5
        assert row["differ"] == 0 if row["parts"] == "fixed" else row["differ"] < 0.2


def test_a_watched_step_is_counted(monkeypatch):
    monkeypatch.setattr(watched_steps, "CALLS", 1)
    monkeypatch.setattr(watched_steps, "ROUNDS", 2)
    rows = watched_steps.measured(bench_transformers.TINY, compiles=False)
    assert [row["arm"] for row in rows] == ["nothing", "monitor", "record", "replay"]
    assert all(row["median"] > 0 for row in rows) and rows[0]["more"] == 0


def test_kinds_of_experts_generate_in_turn():
    rows = generation.measured(bench_transformers.TINY, (1, 2), rounds=2)
    assert [(row["sequences"], row["experts"]) for row in rows] == [
        (number, kind) for number in (1, 2) for kind in ("moeblaze", "grouped_mm")
    ]
    for row in rows:
        assert row["q1"] <= row["median"] <= row["q3"]
    (one, two) = transformers_report.of_generation(rows)
    assert one[:2] == ["tiny_qwen3", "1"] and two[1] == "2"
    assert float(two[-1]) == pytest.approx(rows[3]["median"] / rows[2]["median"], rel=0.01)  # of three digits
