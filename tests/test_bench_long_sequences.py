"""The benchmark of long sequences: its rows, its tables, and what it refuses to give a time."""

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench import inputs, lora_stack, measure  # noqa: E402
from bench import long_sequences as program  # noqa: E402
from moeblaze_cupy.interop.torch import MoE  # noqa: E402
from moeblaze_cupy.interop.torch.saves import kept_bytes  # noqa: E402

TINY = program.SETTINGS["tiny"]


@pytest.fixture(autouse=True)
def short_rows_of_this_process(monkeypatch, request):
    in_turn = program.fp8.in_turn
    monkeypatch.setattr(program.fp8, "in_turn", lambda calls, seconds, rounds: in_turn(calls, 0.001, 2))
    monkeypatch.setattr(
        measure, "row_of_own_process", lambda module, of_row, seconds, **environment: program.row_of(*of_row)
    )
    if not request.node.get_closest_marker("gpu"):
        for module in (inputs, measure):
            monkeypatch.setattr(module, "has_gpu", lambda: False)


def record_of(tmp_path, *options):
    program.main("--tiny", "--seconds", "0.001", "0.001", "--out", str(tmp_path / "record.json"), *options)
    return json.loads((tmp_path / "record.json").read_text())


def test_a_layer_and_steps_make_tables_and_a_record(tmp_path, capsys, monkeypatch):
    """Arms of one size have the same first loss and gradients, which `main` compares too."""
    monkeypatch.setitem(program.SETTINGS, "tiny", TINY._replace(sizes=dict.fromkeys(TINY.sizes, (32,))))
    layer, *steps = record_of(tmp_path)["rows"]
    assert layer["ways"].keys() == {"None", str(program.GIB)} and layer["errors"].keys() == program.TOLERANCES.keys()
    for way in layer["ways"].values():
        assert way["chunk_tokens"] == 48 and all(nbytes > 0 for nbytes in way["planned_bytes"])
    assert [(row["arm"], row["tokens"]) for row in steps] == [(arm, 32) for arm in TINY.sizes]
    assert [(row["save"], row["limit_bytes"]) for row in steps] == [
        ("minimal", 4 * program.GIB),
        ("minimal", None),
        (None, None),
    ]
    assert all(row["tokens_per_second"] > 0 for row in steps)
    of_layer, of_steps = capsys.readouterr().out.split("arm ")
    assert re.split(r"  +", of_layer.splitlines()[0])[2:5] == ["pass", "ms", "of none"]
    assert len(of_layer.splitlines()) == 5 and len(of_steps.splitlines()) == 4
    steps[1]["gradient_norm"] *= 1.1
    with pytest.raises(AssertionError, match="gradient_norm of 32 tokens: moeblaze"):
        program.check_arms(steps)


def test_grouped_products_are_those_of_the_layer():
    """bf16's rounding is 2**-8; sums in two orders differ by a few."""
    torch.manual_seed(0)
    layer = MoE(64, 64, 4, 2, dtype=torch.bfloat16)
    grouped = program.GroupedMM(64, 64, 4, 2, dtype=torch.bfloat16)
    grouped.load_state_dict(layer.state_dict())
    x, grad_out = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 64).bfloat16()
    found = []
    for module in (layer, grouped):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        found.append((out.detach(), *torch.autograd.grad(out, (leaf, *module.parameters()), grad_out)))
    for name, want, got in zip(("out", "x", *dict(layer.named_parameters())), *found, strict=True):
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm(), name


def test_documents_attend_one_by_one():
    torch.manual_seed(0)
    layer = program.DocumentLayer(TINY.stack, "cpu")
    x = torch.randn(3, 16, 64).bfloat16()
    with torch.no_grad():
        assert torch.allclose(layer.attended(x), lora_stack.Layer.attended(layer, x), atol=2**-7, rtol=2**-7)


def test_the_policy_that_there_is_room_for(monkeypatch):
    """With the bytes of "minimal" for one layer, with one byte less, and with too few for "recompute"."""
    model, tokens = program.Model(TINY, program.LIMITED, 32), 32
    least, most = (kept_bytes(model.layers[0].moe, tokens, save) for save in ("recompute", "minimal"))
    held = 4 * sum(p.nbytes for p in model.parameters()) + 5 * tokens * 64 * 2
    for left, saves in ((most, ["minimal"] * 2), (most - 1, ["recompute"] * 2)):
        monkeypatch.setattr(program, "CARD", program.SPARE + model.limit + held + left)
        model._fit(tokens, model.limit)
        assert [layer.moe.save for layer in model.layers] == saves
    monkeypatch.setattr(program, "CARD", program.SPARE + model.limit + held + least - 1)
    with pytest.raises(ValueError, match="fit_saves: budget: expected at least"):
        model._fit(tokens, model.limit)


def test_sizes_after_one_that_does_not_fit_are_left_out(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(program.GroupedMM, "forward", fails)
    rows = record_of(tmp_path, "--part", "step", "--arm", "grouped_mm")["rows"]
    assert rows == [{"part": "step", "case": "tiny", "arm": "grouped_mm", "tokens": 32, "failed": "out of memory"}]
    assert re.split(r"  +", capsys.readouterr().out.splitlines()[1])[4] == "out of memory"


def test_an_error_leaves_the_other_rows_and_ends_the_program(tmp_path, monkeypatch):
    def fails(module, of_row, seconds, **environment):
        raise RuntimeError("no row") if of_row[0] == "layer" else program.subprocess.TimeoutExpired(module, seconds)

    monkeypatch.setattr(measure, "row_of_own_process", fails)
    with pytest.raises(SystemExit, match="no row"):
        record_of(tmp_path, "--arm", "moeblaze")
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [row["failed"] for row in rows] == ["error", "longer than 180 s"]


def test_wrong_results_get_no_time(monkeypatch):
    right = program.passes_of

    def wrong(layer):
        found, peaks = right(layer)
        return found | ({"x": found["x"] * 1.01} if layer.options["memory_limit"] else {}), peaks

    monkeypatch.setattr(program, "passes_of", wrong)
    with pytest.raises(AssertionError, match="tiny: x within the limit differs"):
        program.layer_row("tiny", 0.001)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(AssertionError, match="moeblaze, 32 tokens: expected losses that fall"):
        program.step_row("tiny", "moeblaze", 32, 0.001)


def test_the_figure_shows_the_steps_of_a_record():
    plots = pytest.importorskip("bench.plots", reason="needs matplotlib", exc_type=ImportError)
    speeds = {2**17: 50e3, 2**18: 40e3, 2**19: None}
    rows = [
        {"part": "step", "arm": "grouped_mm", "tokens": n, "tokens_per_second": v, "peak_bytes": v and n * 2**17}
        for n, v in speeds.items()
    ]
    record = {"machine_info": {"gpu": "a GPU"}, "rows": [{"part": "layer"}, *rows]}
    for axes, values in zip(plots.steps_by_tokens(record).axes, ([50, 40], [16, 32]), strict=True):
        drawn = [list(zip(*line.get_data(), strict=True)) for line in axes.lines if len(line.get_xdata())]
        assert drawn == [[(2**17, values[0]), (2**18, values[1])], [(2**19, 0)]]


def test_the_guide_quotes_the_record():
    root = Path(__file__).resolve().parent.parent
    guide = " ".join((root / "docs" / "guide.md").read_text().split())
    record = json.loads((root / "bench" / "records" / "long_sequences" / "h200.json").read_text())
    layer = next(row for row in record["rows"] if row.get("case") == "qwen30b_1m")
    plain, limited = layer["ways"]["None"], layer["ways"][str(16 * program.GIB)]
    peaks = [f"{nbytes / program.GIB:.1f}" for way in (plain, limited) for nbytes in way["peak_bytes"]]
    assert (
        "peaks of {} GiB in forward and {} GiB in backward. Within 16 GiB they are {} and {} GiB".format(*peaks)
        in guide
    )
    times = (f"{limited[key] / plain[key]:.3f}" for key in ("forward_ms", "forward_backward_ms"))
    assert "An H200 had these peaks, and took {} and {} of the time".format(*times) in guide
    steps = {
        (row["arm"], row["tokens"]): row.get("tokens_per_second") for row in record["rows"] if row["part"] == "step"
    }
    fits = max(tokens for (arm, tokens), speed in steps.items() if arm == program.GROUPED and speed)
    speed = steps[program.LIMITED, 2**20] / steps[program.GROUPED, fits]
    assert fits == 2**18 and f"1M tokens per step, at {speed:.2f} times the speed" in guide
    assert f"torch {record['machine_info']['torch'][:4]}, {record['commit_info']['id']}" in guide


@pytest.mark.long
def test_a_row_is_a_process(monkeypatch):
    monkeypatch.undo()
    row = program.in_own_process("step", "tiny", "moeblaze", 32, 0.001)
    assert row["tokens_per_second"] > 0 and row["part"] == "step"


@pytest.mark.gpu
def test_rows_on_a_gpu():
    """Peaks are within the limit but for the 512 bytes that torch's allocator rounds each of some 20 buffers to."""
    layer = program.row_of("layer", "tiny", 0.01)
    for way in layer["ways"].values():
        for peak, planned in zip(way["peak_bytes"], way["planned_bytes"], strict=True):
            assert 0 < peak <= planned + 20 * 512
    for arm in TINY.sizes:
        assert program.row_of("step", "tiny", arm, 48, 0.01)["peak_bytes"] > 0
