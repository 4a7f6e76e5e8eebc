"""examples/train.py: what it reports, what it refuses, its gradient, and the lines of its progress."""

import itertools
import math
import os
import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from examples import progress, train
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.tools import dry_run, memory
from tests.environment import ROOT, run_python

TINY = "--device cpu --steps 2 --batch 64 --d-model 32 --d-hidden 24 --experts 4"


def run(line, *more):
    """`main` on the words of `line`, then `more`."""
    return train.main(*line.split(), *more)


def loss(name, output):
    """Nats per byte on the line "held-out loss before" or "held-out loss after"."""
    return float(re.search(rf"held-out loss {name} +([\d.]+) nats/byte", output).group(1))


def assert_fails(capsys, argv, *fragments):
    """Exit code 2, one line on stderr with the fragments, nothing on stdout."""
    assert train.main(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("python examples/train.py: ")
    for fragment in fragments:
        assert fragment in captured.err


@pytest.mark.parametrize("option", ["--steps 0", "--lr nan", "--seed -1", "--activation tanh"])
def test_unreadable_options(option, capsys):
    with pytest.raises(SystemExit) as raised:
        run(option)
    assert raised.value.code == 2
    assert option.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--steps abc", "argument --steps: expected a whole number from 1 on, got 'abc'"),
        ("--steps 1e3", "argument --steps: expected a whole number from 1 on, got '1e3'"),
        ("--seed x", "argument --seed: expected a whole number from 0 on, got 'x'"),
        ("--lr x", "argument --lr: expected a number above 0, got 'x'"),
        ("--lr inf", "argument --lr: expected a number above 0, got 'inf'"),
    ],
)
def test_unreadable_options_are_explained(line, message, capsys):
    with pytest.raises(SystemExit) as raised:
        run(line)
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": error: {message}")


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)], ids=str)
def test_closed_streams(closed):
    """What would go to a stream that the caller has closed is dropped."""
    options = {"preexec_fn": lambda: [os.close(number) for number in closed]}
    result = run_python("examples/train.py", *TINY.split(), **options)
    assert result.returncode == 0, result.stderr
    assert ("tokens/s" in result.stdout) == (1 not in closed)
    assert ("train 2/2" in result.stderr) == (2 not in closed) and "Traceback" not in result.stderr


def test_reports(capsys):
    assert run(TINY) == 0
    output = capsys.readouterr().out
    assert loss("before", output) == pytest.approx(math.log(256), abs=2e-3)
    assert loss("after", output) < loss("before", output)
    # x (64, 32), a and b (128, 48), two int32 lists of 128 and one of 5: 8192 + 24576 + 1044 bytes.
    assert re.search(r"saved for backward +33\.1 KiB", output)
    assert "numpy on CPU" in output and "float32" in output and "tokens/s" in output
    assert re.search(r"unigram entropy +[23]\.\d+ nats/byte \([45]\.\d+ bits\)", output)
    shape = memory.LayerShape(L=64, d=32, h=24, E=4, k=2, dtype="float32")
    routed = memory.format_bytes(memory.routed_layer(shape).saved_bytes)
    assert re.search(rf"with routed buffers +{re.escape(routed)}", output)


def test_is_deterministic(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        assert run(TINY, "--seed", seed, "--save", "recompute") == 0
        outputs.append(loss("after", capsys.readouterr().out))
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    "options",
    [
        "--save paper",
        "--save recompute",
        "--activation relu",
        "--dtype bfloat16",
        "--dtype float16",
        "--dtype float64",
        "--k 1",
    ],
)
def test_options(options, capsys):
    assert run(TINY, *options.split()) == 0
    output = capsys.readouterr().out
    assert loss("after", output) < loss("before", output)


def test_a_file(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_bytes(b"abcdefgh" * 1000)
    assert run(TINY, "--steps", "30", "--text", str(path)) == 0
    output = capsys.readouterr().out
    assert str(path) in output
    assert loss("after", output) < math.log(8)  # each of the 8 bytes follows from the one before


def test_errors(tmp_path, capsys, monkeypatch):
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    assert_fails(capsys, ["--text", str(tmp_path / "none")], "--text", str(tmp_path / "none"))
    assert_fails(capsys, ["--text", str(tmp_path)], "--text")
    assert_fails(capsys, ["--text", str(short)], "--text", "4096", "got 9")
    assert_fails(capsys, ["--d-model", "100"], "--d-model", "16")
    assert_fails(capsys, ["--k", "9"], "--k", "8")
    assert_fails(capsys, ["--experts", "5000"], "--experts", "4096")
    assert_fails(capsys, ["--batch", "100000000000"], "--batch times --k", "got 200000000000")
    assert_fails(capsys, ["--device", "gpu", "--dtype", "float64"], "--device gpu", "float64", "CPU only")
    monkeypatch.setattr(loader, "import_cupy", lambda: 1 / 0)
    assert_fails(capsys, ["--device", "gpu"], "--device gpu", "division by zero")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no file without an end")
def test_does_not_read_a_text_without_end(capsys, monkeypatch):
    monkeypatch.setattr(train, "MAX_TEXT_BYTES", 1 << 21)
    message = "--text: expected at most 2097152 bytes, got more in /dev/zero"
    assert_fails(capsys, ["--text", "/dev/zero"], message)


def test_reads_a_text_of_the_largest_size(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    monkeypatch.setattr(train, "MAX_TEXT_BYTES", 256 * 40)
    text = train.load_text(str(path))
    assert np.concatenate([text.training, text.held_out]).tobytes() == path.read_bytes()


def test_says_first_what_it_will_do(capsys, monkeypatch, tmp_path):
    """On stderr, before the first loss: why there is no GPU, the backend, the text, the model."""
    text = tmp_path / "text"
    text.write_bytes(b"abcdefgh" * 1000)
    said = []

    def fail():
        raise RuntimeError("moeblaze_cupy: CuPy: expected an importable cupy")

    def held_out_loss(*_):
        said.append(capsys.readouterr())
        return 1.0

    monkeypatch.setattr(loader, "import_cupy", fail)
    monkeypatch.setattr(train, "held_out_loss", held_out_loss)
    assert run(TINY, "--device", "auto", "--text", str(text)) == 0
    assert said[0].out == ""
    reason, backend, name, model = said[0].err.splitlines()
    assert reason == "GPU not used: CuPy: expected an importable cupy"
    assert re.match(r"backend +numpy on CPU .*float32", backend)
    assert re.match(rf"text +{re.escape(str(text))}: 7,200 bytes to train on, 800 held out", name)
    assert re.match(r"model +[\d,]+ parameters, d 32, h 24, 4 experts, 2 per token, swiglu", model)


def test_in_float64_takes_the_cpu(capsys):
    assert run(TINY, "--device", "auto", "--dtype", "float64") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("GPU not used: --dtype float64 is for the CPU only\n")
    assert re.search(r"backend +numpy on CPU .*float64", captured.out)


def test_help_says_how_long_it_takes(capsys):
    """As the README does."""
    with pytest.raises(SystemExit):
        train.main("--help")
    for text in (capsys.readouterr().out, (ROOT / "README.md").read_text()):
        assert "takes up to four minutes on two" in " ".join(text.split())


@pytest.mark.parametrize(
    ("steps", "where"), [("5", "loss at step [2-5] of 5"), ("1", "held-out loss after step 1 of 1")]
)
def test_stops_at_a_loss_that_is_not_finite(capsys, recwarn, tmp_path, steps, where):
    text = tmp_path / "text"
    text.write_bytes(b"abcdefgh" * 1000)
    assert run(TINY, "--steps", steps, "--lr", "1e30", "--text", str(text)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not recwarn.list
    last = captured.err.splitlines()[-1]
    assert re.fullmatch(rf"python examples/train\.py: {where}: .*got (nan|inf); is --lr 1e\+30 too high\?", last)


def test_a_nan_that_is_found_late_has_the_right_step(capsys, monkeypatch):
    """On a GPU losses are read every few steps. A copy of NumPy's namespace stands for CuPy."""
    steps = []
    plain = train.Adam.update
    monkeypatch.setattr(train.Adam, "update", lambda *args: steps.append(args) or plain(*args))
    backend = train.Backend(SimpleNamespace(**vars(np)), "stand-in", "float32")
    monkeypatch.setattr(train, "choose_backend", lambda *_: backend)
    assert run(TINY, "--steps", "25", "--lr", "1e30") == 1
    late = capsys.readouterr().err
    assert len(steps) == train.GPU_CHECK_STEPS
    monkeypatch.undo()
    assert run(TINY, "--steps", "25", "--lr", "1e30") == 1
    assert late.splitlines()[-1] == capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("stops_at", "message"),
    [
        (3, r"interrupted after 2 of 5 steps, loss \d\.\d{3} at the first, \d\.\d{3} nats/byte at the last"),
        (1, "interrupted after 0 of 5 steps"),
    ],
)
def test_ctrl_c_leaves_a_summary(capsys, monkeypatch, stops_at, message):
    plain, calls = train.Adam.update, []

    def update(*args):
        calls.append(args)
        if len(calls) == stops_at:
            raise KeyboardInterrupt
        plain(*args)

    monkeypatch.setattr(train.Adam, "update", update)
    assert run(TINY, "--steps", "5") == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"python examples/train\.py: {message}", captured.err.splitlines()[-1])


def test_evaluation_has_pieces_of_its_own_size(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", math.inf)
    sizes = []
    plain = train.Model.loss
    monkeypatch.setattr(train.Model, "loss", lambda model, *of: sizes.append(len(of[1])) or plain(model, *of))
    assert run(TINY, "--steps", "1", "--batch", "1") == 0
    assert set(sizes[:-1]) == {train.EVALUATION_TOKENS, sizes[-1]}
    evaluated = sum(sizes) // 2
    assert evaluated == len(train.load_text(None).held_out) - train.CONTEXT_BYTES
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluate ")]
    assert len(lines) == 2  # before and after
    assert lines[-1].startswith(f"evaluate {evaluated}/{evaluated} (")


def test_that_does_not_fit_is_one_line(capsys):
    """Parameters of 2^61 bytes, which no address space has room for."""
    widest = str(2**24)
    assert run("--device cpu --experts 1024", "--d-model", widest, "--d-hidden", widest) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"python examples/train\.py: out of memory: Unable to allocate .*\n", captured.err)


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert run(TINY, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert_fails(capsys, ["--plot", str(tmp_path / "no" / "loss.png")], "--plot", "folder")
    assert_fails(capsys, ["--plot", str(tmp_path / "loss.xyz")], "--plot", ".png")


def test_plot_target_is_tried_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert_fails(capsys, ["--plot", str(tmp_path / "folder.png")], "--plot", "got a folder")
    os.mkfifo(tmp_path / "fifo.png")
    assert_fails(capsys, ["--plot", str(tmp_path / "fifo.png")], "--plot", "got a device")
    assert_fails(capsys, ["--plot", "/proc/a.png"], "--plot", "can be written", "/proc/a.png")
    assert_fails(capsys, ["--plot", f"{tmp_path}/{'a' * 300}.png"], "--plot", "can be written", "too long")
    older = tmp_path / "older.png"
    older.write_bytes(b"an older plot")
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "not_yet.png")
    for path in (older, link, tmp_path / "new.png"):  # the check itself leaves everything as it was
        assert_fails(capsys, ["--plot", str(path), "--text", "/nowhere"], "--text")
    assert older.read_bytes() == b"an older plot"
    assert link.is_symlink() and not link.exists() and not (tmp_path / "new.png").exists()


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_fails(capsys, ["--plot", "loss.png"], "--plot", 'pip install -e ".[plot]"')


@pytest.mark.parametrize("k", [1, 2])
def test_gradient(k, monkeypatch):
    """Along each parameter's gradient, the loss changes as fast as the gradient is long."""
    first_ids = []
    plain_route = train.mb.route

    def route(logits, k, renormalize):
        """The router with the experts of the first call: a change of experts would be a jump of the loss."""
        weights, ids = plain_route(logits, k, renormalize=renormalize)
        if not first_ids:
            first_ids.append(ids)
            return weights, ids
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        weights = np.take_along_axis(probabilities, first_ids[0], axis=1)
        return weights / weights.sum(axis=1, keepdims=True) if renormalize else weights, first_ids[0]

    monkeypatch.setattr(train.mb, "route", route)
    monkeypatch.setattr(train, "BALANCE_WEIGHT", 0.0)  # Model.loss is the cross-entropy alone
    epsilon = 1e-2
    args = Namespace(d_model=32, d_hidden=24, experts=4, k=k, activation="swiglu", save="minimal")
    rng = np.random.default_rng(0)
    model = train.Model(np, args, "float32", rng)
    model.theta += 0.1 * rng.standard_normal(model.theta.size, np.float32)
    contexts = rng.integers(0, 256, (256, train.CONTEXT_BYTES), np.int32)
    targets = rng.integers(0, 256, 256, np.int32)
    _, gradient, _ = model.loss_and_gradient(contexts, targets)
    start = 0
    for name, parameter in model.parameters.items():
        piece = gradient[start : start + parameter.size].reshape(parameter.shape)
        start += parameter.size
        length = float(np.linalg.norm(piece))
        assert length > 0, name
        step = piece * (epsilon / length)
        losses = []
        for sign in (1, -2):
            parameter += sign * step
            losses.append(float(model.loss(contexts, targets)) / len(targets))
        parameter += step
        assert (losses[0] - losses[1]) / (2 * epsilon) == pytest.approx(length, rel=0.01), name


def test_balance_gradient():
    """The closed form against central differences of E * sum_e share_e * mean_e in float64."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 5))
    index = SimpleNamespace(
        expert_token_offsets=np.array([0, 4, 5, 5, 10, 12]), expert_token_indices=np.empty(12, np.int32)
    )
    shares = np.diff(index.expert_token_offsets) / 12

    def objective(values):
        probabilities = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return train.BALANCE_WEIGHT * 5 * (probabilities @ shares).sum()

    gradient = train._balance_gradient(np, logits, index)
    for position in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[position] = 1e-5
        slope = (objective(logits + step) - objective(logits - step)) / 2e-5
        assert gradient[position] == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_held_out_text_shares_no_paragraph_with_training():
    text = train.load_text(None)
    seen = set(text.training.tobytes().split(b"\n\n"))
    assert not [p for p in text.held_out.tobytes().split(b"\n\n")[1:] if p in seen]


def test_first_steps_of_the_default_run_learn():
    """What the example is for: on the CPU, clearly below what byte frequencies alone allow."""
    result = run_python("examples/train.py", "--device", "cpu", "--steps", "80")
    assert result.returncode == 0
    said = [line.split()[0] for line in result.stderr.splitlines()]
    assert [word for word in said if word not in ("evaluate", "train")] == ["backend", "text", "model"]
    entropy = float(re.search(r"unigram entropy +([\d.]+)", result.stdout).group(1))
    assert 2.8 < entropy < 3.6
    assert loss("after", result.stdout) < 2.6 < entropy - 0.5


@pytest.mark.gpu
def test_default_run_learns_on_the_gpu():
    result = run_python("examples/train.py", "--device", "gpu")
    assert result.returncode == 0, result.stderr
    assert "cupy on" in result.stdout and "bfloat16" in result.stdout
    assert loss("after", result.stdout) < 2.2
    shape = memory.LayerShape(L=2048, d=256, h=128, E=8, k=2)
    saved = memory.format_bytes(dry_run.layer(shape, "minimal").saved_bytes)
    assert re.search(rf"saved for backward +{re.escape(saved)}", result.stdout)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: clock[0] is its time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_progress_is_ever_rarer(clock, capsys):
    """Lines at least five seconds apart, later a fifth of the time; a note is made for these lines alone."""
    made = []
    lines = progress.Progress(36_000, "train")
    for step in range(1, 36_001):
        clock[0] += 1
        lines.update(step, lambda step=step: made.append(step) or f"note {step}")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train 5/36000 (5 s, 35995 s left) note 5"
    assert said[1] == "train 10/36000 (10 s, 35990 s left) note 10"
    assert said[-1] == "train 36000/36000 (36000 s) note 36000"
    assert len(said) == len(made) < 60
    assert all(b <= max(a + 5, 1.2 * a + 1) for a, b in itertools.pairwise(made))
    assert all(a + 5 <= b for a, b in itertools.pairwise(made[:-1]))


def test_progress_of_a_slow_step_is_said_at_once(clock, capsys):
    lines = progress.Progress(10, "train")
    clock[0] += 60
    lines.update(1)
    assert capsys.readouterr().err == "train 1/10 (60 s, 540 s left)\n"


def test_progress_of_a_short_run_is_its_last_line(clock, capsys):
    lines = progress.Progress(3, "train")
    for step in range(1, 4):
        clock[0] += 1
        lines.update(step)
    assert capsys.readouterr().err == "train 3/3 (3 s)\n"


def test_progress_of_a_resumed_run_counts_its_own_steps(clock, capsys):
    lines = progress.Progress(1000, "train", done=900)
    clock[0] += 10
    lines.update(950)
    assert capsys.readouterr().err == "train 950/1000 (10 s, 10 s left)\n"
