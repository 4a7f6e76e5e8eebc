"""Benchmarks of low-rank factors and of frozen experts in few bits, their records, and the page that quotes these."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench import cases, inputs, lora, lora_peers, lora_stack, measure, quantised  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GRADIENTS = {"out", "x", "weights"}
PAGE = (ROOT / "docs" / "fine-tuning.md").read_text()
FACTORS = {"lora.a1", "lora.b1", "lora.a2", "lora.b2"}


@pytest.fixture(autouse=True)
def short_windows_on_the_cpu(monkeypatch):
    """A window of a second for each way would take half a minute, and a GPU is left to the programs themselves."""
    in_turn = lora.fp8.in_turn
    monkeypatch.setattr(lora.fp8, "in_turn", lambda calls, window, rounds: in_turn(calls, 0.001, 2))
    for module in (inputs, measure):
        monkeypatch.setattr(module, "has_gpu", lambda: False)


def record_of(program, tmp_path, capsys):
    program.main("--tiny", "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["machine_info"]["torch"] == torch.__version__
    assert record["commit_info"] == {"id": measure.commit()} and record["wall_s"] > 0
    return record, capsys.readouterr().out.splitlines()


def test_ways_with_factors_make_a_table_and_a_record(tmp_path, capsys):
    record, (head, *lines) = record_of(lora, tmp_path, capsys)
    assert [row["way"] for row in record["rows"]] == list(lora.WAYS)
    assert re.split(r"  +", head) == ["case", "way", "ms", "of frozen", "peak MiB"]
    frozen = record["rows"][0]["ms"]
    for row, line in zip(record["rows"], lines, strict=True):
        assert row["of_frozen"] == pytest.approx(row["ms"] / frozen)
        assert re.split(r"  +", line)[:2] == ["tiny", row["way"]] and f"{row['of_frozen']:.3f}" in line
        assert row["errors"].keys() == (GRADIENTS if row["way"] == lora.FROZEN else GRADIENTS | FACTORS)


def test_ways_in_e4m3_stand_beside_bf16(capsys):
    lora.main("--tiny", "--precision", "fp8")
    ways = [re.split(r"  +", line)[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ways == ["frozen", "r = 16", "r = 64", "frozen, e4m3", "r = 16, e4m3", "r = 64, e4m3"]
    rows = lora.measured(replace(cases.TINY, h=32), ways=lora.WAYS_IN_E4M3)
    for in_bf16, in_e4m3 in zip(rows[:3], rows[3:], strict=True):
        assert in_bf16["errors"].keys() == in_e4m3["errors"].keys()
        for name, error in in_bf16["errors"].items():
            assert error < 0.01 < 0.04 < in_e4m3["errors"][name], name


def test_gpt_oss_has_its_biases_and_columns():
    """Its results are compared with those of gpt-oss's formula, from which a layer without biases would differ."""
    rows = lora.measured(replace(cases.TINY, name="gptoss_tiny"))
    assert {(row["activation"], row["order"]) for row in rows} == {("swiglu_oai", "row")}


@pytest.mark.parametrize("name", [*sorted(GRADIENTS), *sorted(FACTORS)])
def test_a_wrong_way_gets_no_time(name, monkeypatch):
    right = lora.fused

    def wrong(made, options, factors):
        found = right(made, options, factors)
        return {**found, name: found[name] * 1.05} if name in found else found

    monkeypatch.setattr(lora, "fused", wrong)
    with pytest.raises(AssertionError, match=f"on tiny: relative error above 0.02: {name} 0.0[45]"):
        lora.measured(cases.TINY)


def test_other_libraries_stand_beside_factors(tmp_path, capsys):
    """Of them only torch is there: a library that is not gets a row with the reason instead of times."""
    record, lines = record_of(lora_peers, tmp_path, capsys)
    timed = [row for row in record["rows"] if "ms" in row]
    assert {row["pass"] for row in timed} == {"forward", "forward_backward"}
    assert {"W + BA, r = 16", "grouped_mm, split, r = 16", "grouped_mm, split, r = 64"} <= {r["way"] for r in timed}
    for row in record["rows"]:
        if "ms" in row:
            assert row["errors"].keys() == (GRADIENTS if row["way"] == lora.FROZEN else GRADIENTS | FACTORS)
        else:
            assert row["way"].startswith(("unsloth", "axolotl"))
            assert "pip install " in row["problem"] or "0 active drivers" in row["problem"]  # Triton's, without a GPU
    assert [re.split(r"  +", line)[1] for line in lines[1:]] == list(lora_peers.WAYS)


class _LikePeft(lora_peers._Peer):
    """A library of peft's layout, which computes as this layer does."""

    def forward(self):
        x, weights, a1, b1, a2, b2 = self.leaves
        pairs = [(a.unflatten(0, (self.E, self.r)), self._b_of_peft(b)) for a, b in ((a1, b1), (a2, b2))]
        factors = lora_peers.mb.Lora(*pairs[0], *pairs[1], *self.scales)
        oss = self.module.is_transposed
        w1, w2 = (w if oss else w.mT for w in (self.module.gate_up_proj, self.module.down_proj))
        biases = {"b1": self.module.gate_up_proj_bias, "b2": self.module.down_proj_bias} if oss else {}
        columns = {"activation": self.kind.activation, "gate_up": self.kind.gate_up}
        moe = importlib.import_module("moeblaze_cupy.interop.torch").moe
        return moe(x, self.ids, weights, w1, w2, lora=factors, **biases, **columns)


@pytest.mark.parametrize(("name", "expert_first"), [("tiny", True), ("gptoss_tiny", False)])
def test_factors_come_back_from_the_layout_of_peft(name, expert_first, monkeypatch):
    build = type("Peer", (_LikePeft,), {"expert_first": expert_first})
    monkeypatch.setitem(lora_peers.WAYS, "peer", lora_peers.Way(build, 16))
    rows = lora_peers.measured(replace(cases.TINY, h=32, name=name), ["frozen", "peer"])
    assert all("ms" in row for row in rows), rows
    monkeypatch.setattr(build, "_b_of_peft", lambda self, b: b.unflatten(1, (self.r, self.E)).permute(2, 0, 1).flip(0))
    *_, wrong = lora_peers.measured(replace(cases.TINY, h=32, name=name), ["frozen", "peer"])
    assert "ms" not in wrong and re.match("AssertionError: relative error above 0.02: .*lora.b1", wrong["problem"])


def test_unknown_layers_are_explained(capsys):
    with pytest.raises(SystemExit):
        lora.main("--case", "olmoe,foo")
    assert re.search(r"--case: expected names among gptoss20b, .*, mixtral, got foo$", capsys.readouterr().err.strip())


def test_formats_make_tables_and_a_record(tmp_path, capsys):
    record, lines = record_of(quantised, tmp_path, capsys)
    formats = [row["format"] for row in record["decode"]]
    assert formats == ["mxfp4", "nf4", "e4m3", "int8", "mxfp8", "nf4, nested"]
    bits = {"mxfp4": 4.25, "nf4": 4.5, "e4m3": 8 + 32 / 128**2, "int8": 8 + 32 / 128, "mxfp8": 8.25}
    weights = 4 * 3 * 128 * 128
    for row in record["decode"]:
        assert row["decode_gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
        if row["format"] in bits:
            assert row["bytes"] == weights * (bits[row["format"]] + 16) / 8
    kinds = ["bf16", *(f"{name}{how}" for name in quantised.OF_PASSES for how in ("", ", once"))]
    kinds.insert(3, quantised.IN_E4M3)
    assert [(row["L"], row["weights"]) for row in record["passes"]] == [(48, kind) for kind in kinds]
    assert len(lines) == 3 + len(formats) + len(kinds) + len(record["errors"])
    assert lines[0].endswith("of a copy") and lines[1 + len(formats)].endswith("of bf16")
    for row, line in zip(record["errors"], lines[-len(record["errors"]) :], strict=True):
        assert row["errors"].keys() == row["arithmetic"].keys() == GRADIENTS | FACTORS
        assert row["bits"] == pytest.approx(bits.get(row["weights"], 16))
        assert f"{1e3 * row['errors']['out']:.1f}" in line.split()


def test_errors_by_format_are_those_of_the_weights_that_were_packed():
    """Fewer bits move results further. bfloat16's own part stays what it is, and alone does not move the weights."""
    rows = {row["weights"]: row for row in quantised.errors(quantised.TINY, "gaussian")}
    assert list(rows) == ["bf16", "mxfp4", "nf4", "e4m3", "int8"]
    assert rows["bf16"]["weight_error"] == 0 and rows["bf16"]["errors"] == rows["bf16"]["arithmetic"]
    for name in rows["bf16"]["errors"]:
        found = [rows[weights]["errors"][name] for weights in ("bf16", "int8", "e4m3", "nf4", "mxfp4")]
        assert found == sorted(found) and found[-1] > 0.05, name
        assert all(row["arithmetic"][name] < 0.01 for row in rows.values()), name
    made = quantised.accuracy.layer_inputs(quantised.TINY, "gaussian", 0)
    w1, w2 = made["w1"].float(), made["w2"].float()
    for name in ("mxfp4", "int8"):  # the error of w2 is like that of w1, whose numbers come from the same distribution
        q1, _ = quantised.mb.quantize_experts(w1, w2, name)
        error = (quantised.mb.dequantize(q1).mT.float() - w1).norm() / w1.norm()
        assert rows[name]["weight_error"] == pytest.approx(float(error), rel=0.05)


def test_only_the_named_parts_are_measured(tmp_path, capsys):
    quantised.main("--tiny", "--part", "errors", "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["decode"] == record["passes"] == [] and len(record["errors"]) == 10
    with pytest.raises(SystemExit):
        quantised.main("--part", "errors,foo")
    assert "expected names among decode, passes, errors, got 'foo'" in capsys.readouterr().err


def test_wrong_numbers_get_no_time(monkeypatch):
    """Of decoded weights whose last element is another one, and of a pass on other weights."""
    right = quantised.mb.dequantize

    def wrong(weight):
        found = right(weight).clone()
        if weight.shape[0] > 1:  # on the GPU, beside what the CPU makes of one expert
            found[0, -1, -1] += 1
        return found

    monkeypatch.setattr(quantised.mb, "dequantize", wrong)
    with pytest.raises(AssertionError, match="mxfp4: other numbers than on the CPU"):
        quantised.decoding(quantised.TINY, 0.001, 2)
    with pytest.raises(AssertionError, match="mxfp4 on tiny: other bits than on decoded weights"):
        quantised.passes(quantised.TINY, 48, 0.001, 2)
    with pytest.raises(AssertionError, match=r"mxfp4 on tiny: relative error above 0\.02: "):
        quantised.errors(quantised.TINY, "gaussian")


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(lora_stack, "in_own_process", lora_stack.row_of)


@pytest.mark.usefixtures("in_this_process")
def test_a_stack_by_each_format(tmp_path, capsys):
    quick = "--format", "bf16,mxfp4", "--window", "0.01", "--rounds", "2"
    lora_stack.main("--tiny", *quick, "--out", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["format"] for row in record["rows"]] == ["bf16", "mxfp4"]
    weights, biases = 2 * 4 * 3 * 64 * 64, 2 * 4 * (2 * 64 + 64) * 2
    routers = 2 * 4 * 64 * 2
    of_bits = {"bf16": 16, "mxfp4": 4.25}
    factors = 2 * 4 * 16 * (64 + 2 * 64 + 64 + 64) * 4
    for row in record["rows"]:
        assert row["factors_bytes"] == factors and row["tokens_per_second"]["median"] > 0
        assert row["experts_bytes"] == weights * of_bits[row["format"]] / 8 + biases + routers
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == ["case", "experts", "tokens", "tokens/s", "peak GiB"]
    assert [re.split(r"  +", line)[:3] for line in lines] == [["tiny", row["format"], "48"] for row in record["rows"]]


@pytest.mark.usefixtures("in_this_process")
def test_a_stack_that_does_not_fit_is_a_row(monkeypatch, capsys):
    def fails(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lora_stack.Layer, "forward", fails)
    lora_stack.main("--tiny", "--format", "nf4")
    assert re.split(r"  +", capsys.readouterr().out.splitlines()[1]) == ["tiny", "nf4", "48", "out of memory", "-"]


def test_a_stack_that_does_not_train_gets_no_time(monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(AssertionError, match=r"0\.moe\.lora_a1 did not change"):
        lora_stack.row_of("tiny", "int8", 48, 0.01, 2)


@pytest.mark.long
def test_a_row_of_a_stack_is_a_process():
    row = lora_stack.in_own_process("tiny", "mxfp4", 48, 0.01, 2)
    assert row["tokens_per_second"]["median"] > 0
    with pytest.raises(
        RuntimeError, match=r"(?s)bench.lora_stack: \('tiny', 'fp3', 48, 0.01, 2\): expected a row, got .*fp3"
    ):
        lora_stack.in_own_process("tiny", "fp3", 48, 0.01, 2)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def tables(page: str) -> list[list[list[str]]]:
    """Rows of cells below the head of each table."""
    found = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [[cells(row) for row in text.splitlines()] for text in found]


def test_the_page_on_fine_tuning_quotes_the_records():
    of_factors, of_formats = tables(PAGE)
    rows = json.loads((ROOT / "bench" / "records" / "lora" / "h100.json").read_text())["rows"]
    by_case = {case: {row["way"]: row for row in rows if row["case"] == case} for case in lora.CASES}
    shown = [lora.FROZEN, "r = 16", "r = 64", "W + BA, r = 16"]
    for found, ways in zip(of_factors, by_case.values(), strict=True):
        times = [f"{ways[name]['of_frozen']:.3f}" for name in shown[1:]]
        wanted = [f"{ways[lora.FROZEN]['ms']:.2f}", *times, *(f"{ways[name]['peak_mib']:,.0f}" for name in shown)]
        assert found[1:] == wanted, found[0]

    rows = json.loads((ROOT / "bench" / "records" / "lora" / "h200-e4m3.json").read_text())["rows"]
    of_e4m3 = re.search(r"^\| swiglu \|.*\n.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line, case in zip(of_e4m3[1].splitlines(), lora.CASES_IN_E4M3, strict=True):
        ways = {row["way"]: row for row in rows if row["case"] == case}
        assert list(ways) == list(lora.WAYS_IN_E4M3)
        times = [f"{row['of_frozen']:.3f}" for name, row in ways.items() if name != lora.FROZEN]
        assert cells(line)[1:] == [f"{ways[lora.FROZEN]['ms']:.2f}", *times], case
    errors = [error for row in rows if row["way"].endswith("e4m3") for error in row["errors"].values()]
    assert f"errors in e4m3 are {min(errors):.3f} to {max(errors):.3f}," in " ".join(PAGE.split())

    record = json.loads((ROOT / "bench" / "records" / "quantised" / "h100.json").read_text())
    speed = {(r["case"], r["format"]): r["decode_gb_per_s"] / r["copy_gb_per_s"] for r in record["decode"]}
    ms = {(r["case"], r["L"], r["weights"]): r["ms"] for r in record["passes"]}
    names = [case.name for case in quantised.CASES]
    kinds = [(name, L) for name in names for L in reversed(quantised.TOKENS)]
    for name, *found in of_formats:
        ratios = [speed.get((case, name)) for case in names]
        ratios += [ms[(*kind, name)] / ms[(*kind, "bf16")] if (*kind, name) in ms else None for kind in kinds]
        assert found == [f"{ratio:.2f}" if ratio else "" for ratio in ratios], name
    assert {name for name, *_ in of_formats} == {name for *_, name in ms} - {"bf16"}
    others = [f"{ratio:.2f}" for (_, name), ratio in speed.items() if name in ("int8", "mxfp8")]
    nested = f"{speed[names[1], 'nf4, nested']:.2f}"
    told = f"at {min(others)} to {max(others)} of a copy's speed, nf4 with nested scales at {nested}."
    assert told in " ".join(PAGE.split())

    record = json.loads((ROOT / "bench" / "records" / "quantised" / "h200.json").read_text())
    speeds = [r["decode_gb_per_s"] / r["copy_gb_per_s"] for r in record["decode"]]
    ms = {(r["case"], r["L"], r["weights"]): r["ms"] for r in record["passes"]}
    taken = [
        [f"{ms[(*kind, name)] / ms[(*kind, 'bf16')]:.2f}" for kind in kinds] for name in ("mxfp4", "mxfp4, in e4m3")
    ]
    bf16, e4m3 = (", ".join(of) for of in taken)
    assert f"decoding reaches {min(speeds):.2f} to {max(speeds):.2f} of" in PAGE
    told = f"{' and '.join(bf16.rsplit(', ', 1))} of those on bf16, in the table's order, and in e4m3 "
    assert told + " and ".join(e4m3.rsplit(", ", 1)) in " ".join(PAGE.split())


def test_the_page_on_fine_tuning_sets_other_libraries_beside_factors():
    (record,) = (ROOT / "bench" / "records" / "lora").glob("*-peers.json")
    found = {(r["case"], r["way"], r["pass"]): r for r in json.loads(record.read_text())["rows"] if "ms" in r}
    of_peers = re.search(r"^\| times the layer's \|.*\n.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line, name in zip(of_peers[1].splitlines(), lora_peers.LIBRARIES, strict=True):
        told = []
        for tokens, field in (*((tokens, "ms") for tokens in ("_1k", "_4k", "_16k", "_32k")), ("k", "peak_mib")):
            of = [
                found[case, way, passed][field] / found[case, way.removeprefix(f"{name}, "), passed][field]
                for case, way, passed in found
                if way.startswith(name) and passed == "forward_backward" and case.endswith(tokens)
            ]
            told.append(f"{min(of):.2f} to {max(of):.2f}")
        assert cells(line)[1:] == told, name
    assert f"`bench/records/lora/{record.name}`" in PAGE
    assert f"{len({case.rpartition('_')[0] for case, *_ in found})} layers" in PAGE
