"""examples/: its text, its arms beside one another, a run that is cut and goes on, the plot of its losses."""

import contextlib
import io
import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench import fine_tuning, language_model_report, language_model_runs, report, training_step  # noqa: E402
from bench import language_model_log_probabilities as apart  # noqa: E402
from examples import corpus, plot_losses  # noqa: E402
from examples import language_model as lm  # noqa: E402
from tests.torch_versions import needs_grouped_mm  # noqa: E402

TOY = replace(lm.SIZES["toy"], steps=6, B=4, T=16, evaluate_every=3)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Also where there is a GPU: arms are compared in float32, which no grouped product there takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """400 files of words, some twice, and some that are no text."""
    folder, words = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(400):
        lines = [f"{words.choice(('read', 'write', 'scale'))}(x{words.randrange(50)})" for _ in range(60)]
        (folder / f"f{number}.py").write_text("\n".join(lines))
    (folder / "again.py").write_bytes((folder / "f0.py").read_bytes())
    (folder / "binary.py").write_bytes(b"\xff\xfe" * 500)
    (folder / "short.py").write_text("x")
    (folder / "other.bin").write_text("no text by its name " * 100)
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return corpus.load([folder], 1 << 30)


def files_of(part) -> set[bytes]:
    return set(bytes(part.tolist()).split(b"\0")[:-1])


def test_whole_files_are_held_out_and_none_is_there_twice(folder, data):
    training, held_out = files_of(data.training), files_of(data.held_out)
    texts = {path.read_bytes() for path in folder.glob("f*.py")}
    assert training | held_out == texts and not training & held_out
    assert data.files == len(texts) and 2 <= len(held_out) <= 25
    assert len(data.training) + len(data.held_out) == sum(len(text) + 1 for text in texts)


def test_less_text_holds_out_no_file_that_is_trained_on_with_more(folder, data):
    less = corpus.load([folder, folder], len(data.training) // 2)
    assert less.digest != data.digest and len(less.training) + len(less.held_out) <= len(data.training) // 2
    assert files_of(less.held_out) <= files_of(data.held_out) and files_of(less.training) <= files_of(data.training)
    with pytest.raises(ValueError, match="expected text to train on and to hold out, got 0 files"):
        corpus.load([folder / "none"], 1000)


def test_unigram_loss():
    as_, b = torch.tensor([97] * 30000 + [98] * 10000, dtype=torch.uint8), torch.tensor([98], dtype=torch.uint8)
    assert corpus.Corpus(as_, b, 2, "").unigram_loss() == pytest.approx(math.log(4), rel=0.01)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "TILE", 4)
        return out, {arm: lm.train(arm, 0, TOY, data, out) for arm in lm.ARMS}


@needs_grouped_mm
def test_arms_train_alike(runs):
    """The same weights and batches: losses differ by the rounding of bfloat16, and of e4m3 where an arm has it. Token
    rounding trains on other pairs, and so its losses are further away."""
    _, results = runs
    for arm, result in results.items():
        losses = [(entry["training"], entry["held_out"]) for entry in result["history"]]
        wanted = [(entry["training"], entry["held_out"]) for entry in results["fp32"]["history"]]
        assert losses == [pytest.approx(pair, abs=0.05 if arm == "rounded" else 0.02) for pair in wanted], arm
        assert result["held_out_loss"] < result["history"][0]["held_out"] - 0.1
        assert result["tokens_per_second"] > 0 and [entry["step"] for entry in result["history"]] == [3, 6]
        assert len(result["seconds"]) == 2 and 0 < result["seconds"][0] < result["seconds"][1]
    assert results["minimal"]["history"] == results["recompute"]["history"]
    others = [json.dumps(results[arm]["history"]) for arm in lm.ARMS if arm != "recompute"]
    assert len(set(others)) == len(others)


@needs_grouped_mm
def test_gradients_of_the_arms_agree(data):
    """In float32, where arms differ by the order of sums, and by e4m3 where the first layer is kept in it."""
    windows = lm.batch(data.training, 5, 7, TOY)
    gradients = {}
    exact = [arm for arm in lm.ARMS if not arm.startswith("fp8") and arm != "rounded"]  # their layer is of bfloat16
    for arm in exact:
        model = lm.Model(TOY, arm, 3)
        nats, balance = model.loss(windows)
        (nats + balance).backward()
        gradients[arm] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for arm in exact[1:]:
        for name, wanted in gradients["fp32"].items():
            error = (gradients[arm][name] - wanted).norm() / wanted.norm()
            assert error < (0.05 if arm == "save_fp8" else 1e-4), (arm, name)


@needs_grouped_mm
def test_a_run_that_is_cut_goes_on_to_the_same_bits(runs, data, tmp_path, monkeypatch):
    _, results = runs
    clock = itertools.count()
    monkeypatch.setattr(lm, "synchronize", lambda device: float(next(clock)))
    assert lm.train("minimal", 0, TOY, data, tmp_path, deadline=0.0) is None
    assert (tmp_path / "minimal-0.pt").is_file() and not (tmp_path / "minimal-0.json").exists()
    with pytest.raises(ValueError, match="expected a checkpoint of these settings and text, got others"):
        lm.train("minimal", 0, replace(TOY, lr=1.0), data, tmp_path)
    resumed = lm.train("minimal", 0, TOY, data, tmp_path)
    assert resumed["history"] == results["minimal"]["history"] and resumed["seconds"] == [1.0, 2.0]
    assert not (tmp_path / "minimal-0.pt").exists()
    assert lm.train("minimal", 0, TOY, data, tmp_path) == resumed == json.loads(
        (tmp_path / "minimal-0.json").read_text()
    )  # fmt: skip
    with pytest.raises(ValueError, match="expected a result of these settings and text, got others"):
        lm.train("minimal", 0, replace(TOY, lr=1.0), data, tmp_path)


def test_rounding_trains_on_whole_tiles_and_evaluates_the_plain_choice(data, monkeypatch):
    """Beside a loop over all experts on the weights of the pairs. Float32 sums differ by their order."""
    monkeypatch.setattr(lm, "TILE", 8)
    layer, plain = lm.Model(TOY, "rounded", 3).blocks[0].experts, lm.Model(TOY, "fp32", 3).blocks[0].experts
    x = torch.randn(TOY.B * TOY.T, TOY.d, generator=torch.Generator().manual_seed(0))
    logits = x @ layer.router.T
    weights, chosen = lm.chosen(logits, TOY.k)
    scores = logits.softmax(1).scatter(1, chosen, weights)
    offsets, ids, _ = lm.rounded(logits, weights, chosen.int())
    count = int(offsets[-1])
    assert set((ids[:count].long().bincount() % 8).tolist()) == {0} and count != chosen.numel()
    rows = torch.arange(len(x)).repeat_interleave(offsets.diff())
    dense = torch.zeros_like(scores).index_put((rows, ids[:count].long()), scores[rows, ids[:count].long()])
    every = torch.arange(TOY.E).expand(len(x), -1)
    w1, w2 = layer.w1.mT, layer.w2.mT
    out, kept = layer.mixed(x, logits)
    wanted = lm.experts_in_turn(x, every, dense, w1, w2)
    assert torch.allclose(out, wanted, atol=1e-5) and torch.equal(kept.long().sort().values, chosen.sort().values)
    parameters = (layer.w1, layer.w2, layer.router)
    for name, ours, reference in zip(
        ("w1", "w2", "router"),
        torch.autograd.grad(out.square().sum(), parameters, retain_graph=True),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        assert (ours - reference).norm() < 1e-4 * reference.norm(), name
    assert torch.allclose(layer.eval().mixed(x, logits)[0], plain.mixed(x, logits)[0], atol=1e-5)


def test_main_weights_keep_what_bfloat16_loses(data):
    """Steps far below bfloat16's spacing add up."""
    model = lm.Model(TOY, "minimal", 0)
    weights = lm.MainWeights(model, torch.bfloat16)
    before, rounded = weights.main[0].clone(), model.embedding.weight.detach().clone()
    for step in range(3):
        model.loss(lm.batch(data.training, 0, step, TOY))[0].backward()
        weights.step(1e-5)
    moved = (weights.main[0] - before).abs()
    assert 0 < moved.max() < 1e-4 and moved[before.abs() > 0.5].max() > 0
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.embedding.weight, weights.main[0].bfloat16())
    assert (model.embedding.weight == rounded)[before.abs() > 0.5].float().mean() > 0.9


def test_batches_and_learning_rates():
    data = torch.arange(250, dtype=torch.uint8)
    windows = lm.batch(data, 1, 2, TOY)
    assert windows.shape == (TOY.B, TOY.T + 1) and torch.equal(windows[:, 1:], windows[:, :-1] + 1)
    assert torch.equal(windows, lm.batch(data, 1, 2, TOY)) and not torch.equal(windows, lm.batch(data, 1, 3, TOY))
    s = replace(TOY, steps=100, lr=2.0)
    rates = [lm.learning_rate(step, s) for step in range(100)]
    assert (
        rates[0] == pytest.approx(0.4) and max(rates) == rates[5] == 2.0 and rates[-1] == pytest.approx(0.2, abs=0.01)
    )
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_the_models_sizes():
    with torch.device("meta"):
        model = torch.nn.ModuleList(lm.Block(lm.SIZES["base"], "minimal") for _ in range(8))
    assert lm.SIZES["base"].layers == 8 and 150e6 < sum(p.numel() for p in model.parameters()) < 200e6


def test_the_command_and_its_plot(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = ["--arm", "minimal", "--seed", "0,1", "--size", "toy", "--steps", "2", "--batch", "2"]
    assert lm.main(*command, "--text", str(folder), "--minutes", "5", "--out", str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "minimal, seed 1: held-out loss" in told and "tokens/s" in told
    plot_losses.main(str(tmp_path))
    assert capsys.readouterr().out.startswith("minimal: ") and (tmp_path / "losses.svg").read_text().endswith(
        "</svg>\n"
    )
    other = json.loads((tmp_path / "minimal-0.json").read_text())
    other["settings"]["lr"] = 5.0
    (tmp_path / "minimal-2.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="expected runs of the same settings and text"):
        plot_losses.load(tmp_path)


def test_runs_at_once_have_a_gpu_each_and_tell_of_failures(tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(sys.argv[2], os.environ.get('CUDA_VISIBLE_DEVICES')); sys.exit('1' in sys.argv)"
    )
    monkeypatch.setattr(language_model_runs, "SCRIPT", script)
    assert language_model_runs.run([("fp8", 0), ("fp8", 1), ("minimal", 0)], 2, 1, "toy", tmp_path, []) == 1
    gpus = [(tmp_path / f"fp8-{seed}.log").read_text().split() for seed in (0, 1)]
    assert gpus == [["fp8", "0"], ["fp8", "1"]] and "status 1: fp8 1" in capsys.readouterr().out


def test_runs_on_another_text_than_the_recorded_have_its_arms_too():
    recorded = language_model_report.runs("small")["grouped_mm"][0]["text"]
    assert language_model_runs.queue(["fp8"], [0, 2], "small", recorded) == [("fp8", 0), ("fp8", 2)]
    arms = {arm for arm, _ in language_model_runs.queue(["fp8"], [0], "small", recorded | {"digest": "other"})}
    assert {"fp8", "grouped_mm", "minimal"} <= arms and "fp32" not in arms


def test_the_long_run_counts_equal_repeats_and_collapses_in_its_middle(folder, tmp_path, monkeypatch, capsys):
    from bench import long_run  # sets what cuBLAS reads from the environment

    command = ("--size", "toy", "--repeats", "3", "--steps", "10", "--text", str(folder), "--out")
    long_run.main(*command, str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["repeated"]["equal"] == 3 and "3 of 3 repeats" in capsys.readouterr().out
    assert [e["step"] for e in record["collapsing"]["history"] if e["is_collapsed"]] == [5, 6]
    losses = iter(torch.tensor([1.0, 1.0, 1.5]))
    plain = lm.Model.loss
    monkeypatch.setattr(lm.Model, "loss", lambda model, windows: (next(losses) * plain(model, windows)[0], 0))
    assert long_run.repeated(TOY, "minimal", corpus.load([folder], 1 << 30), "cpu", 3)["equal"] == 2


@pytest.mark.parametrize("guess", [9, 40, 64, 200])
def test_the_largest_batch_is_found_from_any_guess(guess):
    for answer in range(8, 201):
        tried = []
        found = training_step.largest(lambda B, a=answer, t=tried: t.append(B) or a >= B, 8, guess, 200, 8)
        assert found == answer // 8 * 8
        assert len(tried) <= 9 and len(set(tried)) == len(tried)


@needs_grouped_mm
def test_training_steps_of_all_arms_are_timed_and_recorded(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(lm.SIZES, "toy", TOY)
    out = tmp_path / "step.json"
    options = ["--size", "toy", "--rounds", "2", "--window", "0.01", "--text", str(folder), "--out", str(out)]
    training_step.main(*options, "--arm", "fp32,minimal,grouped_mm", "--commit", "abc")
    record = json.loads(out.read_text())
    assert [row["arm"] for row in record["rows"]] == ["fp32", "minimal", "grouped_mm"]
    assert all(row["tokens_per_second"]["median"] > 0 for row in record["rows"])
    assert record["tokens_per_step"] == TOY.B * TOY.T and record["commit_info"]["id"] == "abc"
    assert capsys.readouterr().out.splitlines()[-3].split()[0] == "fp32"


TUNED = replace(TOY, h=32, steps=2, evaluate_every=1)


@pytest.mark.parametrize("arm", fine_tuning.ARMS[1:])
def test_factors_get_the_same_gradients_in_every_arm(arm, data, monkeypatch):
    """In float32, beside experts in turn in torch on the weights that the arm multiplies: arms differ by the order of
    sums. Factors `b` are not zero here, as those of `a` would get no gradient."""
    base = lm.Model(TUNED, "minimal", 3).requires_grad_(False)
    windows, found = lm.batch(data.training, 5, 7, TUNED), {}
    for name in (fine_tuning.EAGER, arm):
        model = fine_tuning.adapted(base, arm if name == arm else fine_tuning.EAGER, seed=1)
        generator = torch.Generator().manual_seed(2)
        for block in model.blocks:
            experts = block.experts
            for factor in (experts.b1, experts.b2):
                factor.data.normal_(std=0.1, generator=generator)
            if name != arm and arm in fine_tuning.PACKED:
                packed = fine_tuning.mb.quantize_experts(experts.w1, experts.w2, fine_tuning.PACKED[arm])
                experts.w1, experts.w2 = (fine_tuning.mb.dequantize(weight).mT for weight in packed)
        nats, _ = model.loss(windows)
        nats.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        found[name] = {"loss": nats.detach(), **grads}
    assert len(found[arm]) == 1 + 4 * TUNED.layers
    for name, wanted in found[fine_tuning.EAGER].items():
        assert wanted.norm() > 0
        assert (found[arm][name] - wanted).norm() / wanted.norm() < 1e-4, name


@pytest.fixture(scope="module")
def tuned(folder, tmp_path_factory):
    """The record of all arms, and what was printed."""
    both = tmp_path_factory.mktemp("both")
    for path in folder.glob("f*.py"):
        (both / path.name).write_bytes(path.read_bytes())
        (both / f"{path.stem}.h").write_text(path.read_text().replace("(x", "[int i").replace(")", "];"))
    out = both / "record.json"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as told:
        patch.setitem(fine_tuning.SIZES, "toy", (replace(TUNED, steps=30), TUNED))
        fine_tuning.main("--size", "toy", "--seed", "0,1", "--text", str(both), "--out", str(out))
    return json.loads(out.read_text()), told.getvalue().splitlines()


def test_fine_tuning_runs_every_arm_on_other_text(tuned):
    record, lines = tuned
    assert [(run["arm"], run["seed"]) for run in record["runs"]] == [(a, s) for s in (0, 1) for a in fine_tuning.ARMS]
    assert record["base"]["text"]["digest"] != record["text"]["digest"]
    by_seed = {s: {run["arm"]: run for run in record["runs"] if run["seed"] == s} for s in (0, 1)}
    for runs_of_seed in by_seed.values():
        eager = runs_of_seed["eager"]["history"]
        for arm, run in runs_of_seed.items():
            assert [entry["step"] for entry in run["history"]] == [0, 1, 2]
            assert run["held_out_loss"] == run["history"][-1]["held_out"] < run["history"][0]["held_out"]
            if arm not in fine_tuning.PACKED:  # bfloat16 rounds in other places
                wanted = [entry["held_out"] for entry in eager]
                assert [entry["held_out"] for entry in run["history"]] == pytest.approx(wanted, abs=0.02), arm
    assert len({json.dumps(run["history"]) for run in record["runs"]}) == len(record["runs"])
    assert [line.split("  ")[0] for line in lines[-len(fine_tuning.ARMS) :]] == list(fine_tuning.ARMS)


def test_the_page_has_a_table_of_fine_tuning(tuned, tmp_path, monkeypatch):
    record, _ = tuned
    for run in record["runs"]:
        run["held_out_loss"] = 1.5 + run["seed"] / 100 + (run["arm"] == "fused") / 1000
        run["history"][0]["held_out"] = 2.25
    (tmp_path / "fine_tuning.json").write_text(json.dumps(record))
    (tmp_path / "small").symlink_to(language_model_report.FOLDER / "small")
    monkeypatch.setattr(language_model_report, "FOLDER", tmp_path)
    text = "\n".join(language_model_report.section(report.table))
    assert "factors of rank 16\nbeside all experts are trained on C and C++ headers, 2 steps of 64 bytes" in text
    row = "| fused | 2.2500 | 2 | 1.5060 | 1.5010 to 1.5110 | +0.0010 | +0.0010 to +0.0010 |"
    assert row in text.splitlines()


@needs_grouped_mm
def test_log_probabilities_of_the_kinds_of_experts(folder, tmp_path, monkeypatch, capsys):
    """Beside numpy on what `log_probabilities` gives, whose mean is the held-out loss."""
    monkeypatch.setitem(lm.SIZES, "toy", TOY)
    found, plain = {}, apart.log_probabilities

    def kept(trained, way, held_out, s):
        found[way] = plain(trained, way, held_out, s)
        return found[way]

    monkeypatch.setattr(apart, "log_probabilities", kept)
    apart.main("--size", "toy", "--text", str(folder), "--out", str(tmp_path / "log_probabilities.json"))
    record = json.loads((tmp_path / "log_probabilities.json").read_text())
    assert -float(found["minimal"].mean()) == pytest.approx(record["held_out_loss"], abs=1e-6)
    assert all(len(each) == TOY.held_out_windows * TOY.T for each in found.values())
    for row, (way, other) in zip(record["rows"], apart.PAIRS, strict=True):
        differences = (found[way] - found[other]).numpy()
        assert (row["experts"], row["less"]) == (way, other)
        assert 0 < row["quantiles"][-1] < 0.1  # of logits of unit size in bfloat16, and of near-ties in the choice
        assert row["quantiles"] == pytest.approx(np.quantile(abs(differences), language_model_report.QUANTILES))
        assert row["cross_entropy"] == pytest.approx(-differences.mean())
    assert capsys.readouterr().out.splitlines()[-2].startswith("moeblaze-cupy, minimal         float32, torch ")
    (tmp_path / "small").symlink_to(language_model_report.FOLDER / "small")
    monkeypatch.setattr(language_model_report, "FOLDER", tmp_path)
    text = "\n".join(language_model_report.section(report.table))
    assert "evaluates 128 held-out bytes" in text and "| moeblaze-cupy, minimal | bf16, torch grouped_mm |" in text
    assert "losses_by_time.svg" not in text


def test_losses_at_equal_time(tmp_path, monkeypatch):
    """grouped_mm is at 2.0 after 10 s and at 1.0 after 20 s; another arm ends after 15 s, one after 25 s."""
    (tmp_path / "timed").mkdir()
    of_arm = {"grouped_mm": ([10.0, 20.0], [2.0, 1.0]), "minimal": ([5.0, 15.0], [1.75, 1.25])}
    of_arm["rounded"] = [5.0, 25.0], [1.75, 1.125]
    made = language_model_report.runs("base")["minimal"][0]
    for arm, (seconds, losses) in of_arm.items():
        history = [{"step": 500 * (i + 1), "held_out": loss} for i, loss in enumerate(losses)]
        run = made | {"arm": arm, "seconds": seconds, "history": history, "held_out_loss": losses[-1]}
        (tmp_path / "timed" / f"{arm}-0.json").write_text(json.dumps(run))
    (tmp_path / "small").symlink_to(language_model_report.FOLDER / "small")
    monkeypatch.setattr(language_model_report, "FOLDER", tmp_path)
    lines = language_model_report.section(report.table)
    assert "| bf16, torch grouped_mm | 1 | 20.0 | 1.0000 | 1.0000 | +0.0000 |" in lines
    assert "| moeblaze-cupy, minimal | 1 | 15.0 | 1.2500 | 1.5000 | -0.2500 |" in lines
    assert "| moeblaze-cupy, token rounding | 1 | 25.0 | 1.1250 | - | - |" in lines
    plots = pytest.importorskip("bench.plots", reason="needs matplotlib")
    test_plots = pytest.importorskip("tests.test_plots")
    figure = plots.losses_by_time(None)
    assert test_plots.outside_canvas(figure) == [] and test_plots.overlapping_texts(figure) == []
    drawn = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert drawn["moeblaze-cupy, minimal"] == [[5.0, 1.75], [15.0, 1.25]]
