"""`python -m moeblaze_cupy`: each subcommand, with and without what it needs."""

import io
import math
import os
import re
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from environment import plain_environment

import moeblaze_cupy
from moeblaze_cupy import gemm_config, launch_config, loader, memory
from moeblaze_cupy.__main__ import MAX_WIDTH, build_parser, main
from moeblaze_cupy.cli import compile as compile_command
from moeblaze_cupy.cli import plan as plan_command
from moeblaze_cupy.cli import train
from moeblaze_cupy.cli.progress import Progress
from moeblaze_cupy.structures import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
TINY = "train --device cpu --steps 2 --batch 64 --d-model 32 --d-hidden 24 --experts 4"


def run(line, *more):
    """`main` on the words of `line`, then `more`."""
    return main([*line.split(), *more])


def run_module(*argv, stdout=subprocess.PIPE, **environment):
    """`python -m moeblaze_cupy` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "moeblaze_cupy", *argv],
        cwd=ROOT,
        env=plain_environment() | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=1800,  # against a hang; the default run takes minutes, more on a busy machine
    )


SMALL_PLAN = ["plan", "--tokens", "9", "--d-model", "8", "--d-hidden", "8", "--experts", "4", "--k", "2"]


SMALL_EXPLAIN = ["explain", "--gpu", "h200", *SMALL_PLAN[1:]]


@pytest.mark.parametrize("argv", [["info"], SMALL_PLAN, SMALL_EXPLAIN], ids=["info", "plan", "explain"])
def test_a_reader_that_leaves_is_no_error(argv):
    read, write = os.pipe()
    os.close(read)
    result = run_module(*argv, stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    "argv", [["info"], SMALL_PLAN, SMALL_EXPLAIN, ["--version"], ["explain", "--help"]], ids=" ".join
)
def test_a_full_disk_is_one_line(argv):
    with open("/dev/full", "w") as full:
        result = run_module(*argv, stdout=full, PYTHONUNBUFFERED="")  # unbuffered, argparse drops the error itself
    assert result.returncode == 1
    assert re.fullmatch(r"moeblaze_cupy( \w+)?: .*No space left on device\n", result.stderr)


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)], ids=str)
def test_closed_streams(closed):
    """What would go to a stream that the caller has closed is dropped."""
    result = subprocess.run(
        [sys.executable, "-m", "moeblaze_cupy", *TINY.split()],
        cwd=ROOT,
        env=plain_environment() | {"MOEBLAZE_PROGRESS": "1"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert result.returncode == 0, result.stderr
    assert ("tokens/s" in result.stdout) == (1 not in closed)
    assert ("train 2/2" in result.stderr) == (2 not in closed) and "Traceback" not in result.stderr


def test_version(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"moeblaze_cupy {moeblaze_cupy.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("Unable to allocate 58.2 TiB\nmore"), 1, "out of memory: Unable to allocate 58.2 TiB"),
        (MemoryError(), 1, "out of memory: MemoryError"),
        (OSError(5, "Input/output error"), 1, "[Errno 5] Input/output error"),
    ],
    ids=str,
)
def test_what_ends_a_command_is_one_line(monkeypatch, capsys, error, code, message):
    def fail(args):
        raise error

    monkeypatch.setattr(plan_command, "run", fail)
    monkeypatch.setattr("moeblaze_cupy.__main__._discard_output", lambda: None)  # pytest's own stdout
    assert main(SMALL_PLAN) == code
    assert capsys.readouterr().err == f"moeblaze_cupy plan: {message}\n"


def loss(name, output):
    """Nats per byte on the line "held-out loss before" or "held-out loss after"."""
    return float(re.search(rf"held-out loss {name} +([\d.]+) nats/byte", output).group(1))


def assert_fails(capsys, argv, *fragments):
    """Exit code 2, one line on stderr with the fragments, nothing on stdout."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith(f"moeblaze_cupy {argv[0]}: ")
    for fragment in fragments:
        assert fragment in captured.err


def test_help_names_every_command():
    output = run_module("--help").stdout
    for command in ("train", "info", "compile", "explain", "plan", "bench"):
        assert re.search(rf"^ +{command} ", output, re.MULTILINE)


def test_no_command_is_an_error():
    result = run_module()
    assert result.returncode == 2 and "command" in result.stderr


def test_parsing_imports_no_subcommand():
    code = (
        "import sys; from moeblaze_cupy.__main__ import build_parser; build_parser();"
        "print([m for m in ('cupy', 'torch', 'matplotlib', 'moeblaze_cupy.cli') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--steps", "0"],
        ["train", "--lr", "nan"],
        ["train", "--seed", "-1"],
        ["train", "--activation", "tanh"],
        ["plan", "--tokens", "8"],
        ["explain", "--gpu", "h300"],
    ],
    ids=" ".join,
)
def test_unreadable_options(argv, capsys):
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert argv[-2] in capsys.readouterr().err or argv[0] == "plan"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --steps abc", "argument --steps: expected a whole number from 1 on, got 'abc'"),
        ("train --steps 1e3", "argument --steps: expected a whole number from 1 on, got '1e3'"),
        ("train --seed x", "argument --seed: expected a whole number from 0 on, got 'x'"),
        ("train --lr x", "argument --lr: expected a number above 0, got 'x'"),
        ("train --lr inf", "argument --lr: expected a number above 0, got 'inf'"),
        (
            f"plan --d-model 1{'0' * 32}",
            f"argument --d-model: expected a whole number from 1 to 16777216, got '1{'0' * 32}'",
        ),
        ("bench --order foo", "argument --order: expected row or transposed, comma-separated, got 'foo'"),
        ("bench --order row,", "argument --order: expected row or transposed, comma-separated, got ''"),
    ],
    ids=lambda text: text[:30],
)
def test_unreadable_options_are_explained(line, message, capsys):
    with pytest.raises(SystemExit) as raised:
        run(line)
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": error: {message}")


@pytest.mark.parametrize("value", ["row", "transposed", "row,transposed"])
def test_bench_orders(value):
    assert build_parser().parse_args(["bench", "--order", value]).order == value


def test_plan():
    sizes = {"--tokens": 32768, "--d-model": 2048, "--d-hidden": 768, "--experts": 128, "--k": 8}
    result = run_module("plan", *(str(word) for option in sizes.items() for word in option))
    assert result.returncode == 0 and result.stderr == ""
    saved = next(line for line in result.stdout.splitlines() if line.startswith("saved for backward"))
    assert saved.split()[3:] == ["130.0", "MiB", "526.0", "MiB", "898.0", "MiB", "1.3", "GiB", "0", "B", "3.5", "GiB"]
    for formula in ("g*L*k*h*b", " L*k*1024*b ", "4*L*k*ceil(h/256)", "8*(L*k//128 + min(E, L*k) + 1)"):
        assert formula in result.stdout
    assert "Hopper kernels" in result.stdout


@pytest.mark.parametrize("option", [("--tier", "sm80"), ("--dtype", "float32")])
def test_plan_of_the_portable_kernels(option, capsys):
    assert run("plan --tokens 100 --d-model 64 --d-hidden 32 --experts 4 --k 2", *option) == 0
    output = capsys.readouterr().out
    assert "portable kernels" in output and " L*k*64*b " in output and "4*L*k*ceil(h/128)" in output


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"L": 100, "d": 64, "h": 32, "E": 4, "k": 2}, ()),
        ({"L": 8192, "d": 128, "h": 1024, "E": 4, "k": 1}, ()),  # weight gradients by split-K, fewer in the other order
        ({"L": 8192, "d": 128, "h": 1024, "E": 4, "k": 1}, ("--order", "row")),
    ],
)
def test_plan_shows_every_term(capsys, sizes, order):
    options = zip(("--tokens", "--d-model", "--d-hidden", "--experts", "--k"), sizes.values(), strict=True)
    assert run("plan --activation gelu", *(str(word) for option in options for word in option), *order) == 0
    output = capsys.readouterr().out
    shape = memory.LayerShape(**sizes, activation="gelu", transposed=not order)
    for plan in (*(memory.layer(shape, save) for save in memory.POLICIES), memory.routed_layer(shape)):
        for term in (*plan.saved, *(term for stage in (*plan.forward, *plan.backward) for term in stage)):
            pattern = rf"^  {re.escape(term.name)} +{re.escape(term.formula)} +{memory.format_bytes(term.nbytes)}"
            assert re.search(pattern, output, re.MULTILINE), term


def test_plan_refuses_what_the_layer_refuses(capsys):
    plan = ["plan", "--d-model", "8", "--d-hidden", "8", "--k", "2"]
    assert_fails(capsys, [*plan, "--tokens", str(2**30), "--experts", "8"], "slots", str(2**31))
    limit = launch_config.MAX_EXPERTS
    assert_fails(
        capsys, [*plan, "--tokens", "8", "--experts", str(limit + 1)], "--experts", f"{limit}, got {limit + 1}"
    )
    assert_fails(capsys, [*plan, "--tokens", "8", "--experts", "1"], "--k", "at most 1 for --experts 1, got 2")
    assert_fails(capsys, [*plan, "--tokens", f"1{'0' * 32}", "--experts", "8"], "slots", str(2 * 10**32))


def test_plan_with_biases_and_interleaved_columns(capsys):
    plan = "plan --tokens 64 --d-model 16 --d-hidden 8 --experts 4 --k 2 --gate-up interleaved"
    assert run(f"{plan} --activation swiglu_oai --bias weights") == 0
    assert re.search(r"^  db1 +2\*g\*E\*h +128 B", capsys.readouterr().out, re.MULTILINE)
    assert_fails(capsys, [*plan.split(), "--activation", "relu2"], "--gate-up", "halves", "relu2, which has no gate")


def test_plan_of_the_widest_layer_lists_few_panels(capsys):
    """`plan` makes the list of panels: at the largest --d-model it must still be short."""
    assert run(f"plan --tokens 8 --d-model {MAX_WIDTH} --d-hidden {MAX_WIDTH} --experts 8 --k 2 --tier sm80") == 0
    assert "portable kernels" in capsys.readouterr().out
    assert len(gemm_config.panels(MAX_WIDTH, 16, "sm80")) == 2**16


def info_lines(output):
    return {line[:22].strip(): line[22:] for line in output.splitlines()}


INFO_FACTS = {"moeblaze_cupy", "python", "numpy", "ml_dtypes", "cupy", "torch", "CUDA runtime", "NVRTC", "CUDA driver"}
INFO_GPU_FACTS = {"GPU 0 name", "GPU 0 capability", "GPU 0 memory", "GPU 0 kernels"}


def test_info(tmp_path):
    result = run_module("info", CUPY_CACHE_DIR=str(tmp_path / "cache"), MOEBLAZE_TIER="sm80")
    assert result.returncode == 0 and result.stderr == ""
    facts = info_lines(result.stdout)
    assert facts.keys() >= INFO_FACTS | INFO_GPU_FACTS | {"kernel cache", "MOEBLAZE_TIER"}
    assert facts["numpy"] == np.__version__
    assert facts["kernel cache"].startswith(str(tmp_path / "cache"))
    assert facts["MOEBLAZE_TIER"] == "'sm80'"


@pytest.mark.parametrize(
    "broken", ["raise ImportError('no such library')", "import does_not_exist_at_all", "1 / 0"], ids=str
)
def test_info_with_a_broken_cupy(broken, tmp_path):
    (tmp_path / "cupy.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_module("info", PYTHONPATH=path)
    assert result.returncode == 0 and result.stderr == ""
    facts = info_lines(result.stdout)
    for name in ("cupy", "CUDA runtime", "NVRTC", *INFO_GPU_FACTS):
        assert facts[name].startswith("unavailable: ") and len(facts[name]) > len("unavailable: ")
    assert facts["numpy"] == np.__version__


def test_info_lists_every_gpu(monkeypatch, capsys):
    gpus = [(b"NVIDIA H200", 9, 0, 140 * 2**30), (b"Tesla T4", 7, 5, 15 * 2**30)]
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(gpus),
        getDeviceProperties=lambda i: dict(zip(("name", "major", "minor", "totalGlobalMem"), gpus[i], strict=True)),
        runtimeGetVersion=lambda: 12090,
    )
    cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    assert main(["info"]) == 0
    facts = info_lines(capsys.readouterr().out)
    assert facts["CUDA runtime"] == facts["NVRTC"] == "12.9"
    assert [facts[f"GPU 0 {n}"] for n in ("name", "capability", "memory")] == ["NVIDIA H200", "9.0", "140.0 GiB"]
    assert facts["GPU 0 kernels"] == launch_config.tier(90)
    assert facts["GPU 1 capability"] == "7.5"
    assert facts["GPU 1 kernels"].startswith("unavailable: ") and "7.5" in facts["GPU 1 kernels"]


def test_compile_without_a_gpu(monkeypatch, capsys):
    def fail():
        raise RuntimeError("moeblaze_cupy: GPU: expected at least one CUDA device, got 0\nmore")

    monkeypatch.setattr(loader, "import_cupy", fail)
    assert_fails(capsys, ["compile"], "at least one CUDA device")


@pytest.fixture
def compiled(monkeypatch):
    """The variants that `compile` would compile, on a machine that has a GPU."""
    limits = launch_config.DeviceLimits(80, 108, 163 * 1024, 164 * 1024)
    monkeypatch.setattr(compile_command, "_device_limits", lambda: limits)
    variants = []
    monkeypatch.setattr(loader, "precompile", lambda variant: variants.append(variant) or 0.5)
    return variants


def test_compile_compiles_every_variant(compiled, capsys, monkeypatch):
    monkeypatch.delenv("MOEBLAZE_PROGRESS", raising=False)
    assert run("compile --dtype float16 --dtype bfloat16 --order row --activation all") == 0
    limits = compile_command._device_limits()
    expected = loader.variants(
        dtypes=("float16", "bfloat16"),
        orders=("row",),
        activations=ACTIVATIONS,
        limits=limits,
    )
    assert set(compiled) == set(expected) and len(compiled) == len(expected)
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{len(expected)} of {len(expected)} kernels ready")
    assert f"compile {len(expected)}/{len(expected)}" in captured.err


def test_compile_defaults():
    args = build_parser().parse_args(["compile"])
    assert (args.dtype, args.order, args.activation) == (("bfloat16",), ("row", "transposed"), ("swiglu",))
    assert not args.accumulate


def test_compile_prepares_fp8(compiled):
    assert run("compile --order row --save-fp8 --precision-fp8") == 0
    limits = compile_command._device_limits()
    expected = loader.variants(("bfloat16",), ("row",), limits=limits, fp8=True, fp8_saved=True)
    assert set(compiled) == set(expected)


def test_compile_prepares_biases_and_interleaved_columns(compiled):
    assert run("compile --order row --activation swiglu_oai --bias weights --bias float32 --gate-up interleaved") == 0
    options = {"gate_ups": ("interleaved",), "biases": ("weights", "float32")}
    limits = compile_command._device_limits()
    assert set(compiled) == set(loader.variants(("bfloat16",), ("row",), ("swiglu_oai",), limits=limits, **options))
    sums = {tuple(dict(v.macros)[name] for name in ("BIAS", "OUT")) for v in compiled if v.source == "bias_bwd.cu"}
    assert sums == {("bf16", "bf16"), ("float", "float")}


def test_compile_prepares_accumulation(compiled):
    assert run("compile --order row --accumulate") == 0
    added = {dict(v.macros)["OUT"] for v in compiled if ("ACCUMULATE", "1") in v.macros}
    assert added == {"float", "bf16"}


def test_compile_reports_a_failure_and_goes_on(compiled, capsys, monkeypatch):
    def precompile(variant):
        compiled.append(variant)
        if len(compiled) == 1:
            raise RuntimeError("nvrtc: error: invalid architecture")
        return 0.1

    monkeypatch.setattr(loader, "precompile", precompile)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert main(["compile"]) == 1
    captured = capsys.readouterr()
    assert "invalid architecture" in captured.err
    assert captured.out.startswith(f"{len(compiled) - 1} of {len(compiled)} kernels ready")


def test_compile_can_be_interrupted(compiled, monkeypatch, capsys):
    """What has not begun when Ctrl-C comes is not compiled."""
    release = threading.Event()

    def precompile(variant):
        compiled.append(variant)
        if len(compiled) > 1:
            release.wait(60)
        return 0.1

    def interrupt(*_):
        threading.Timer(0.2, release.set).start()  # the one under way ends after the interrupt
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "precompile", precompile)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(compile_command.Progress, "update", interrupt)
    assert main(["compile"]) == 130
    assert len(compiled) <= 2
    assert capsys.readouterr().err == "moeblaze_cupy compile: interrupted\n"


@pytest.mark.gpu
def test_compile_on_the_gpu(tmp_path):
    result = run_module("compile", CUPY_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir())


def test_train_reports(capsys):
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


def test_train_is_deterministic(capsys):
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
def test_train_options(options, capsys):
    assert run(TINY, *options.split()) == 0
    output = capsys.readouterr().out
    assert loss("after", output) < loss("before", output)


def test_train_on_a_file(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_bytes(b"abcdefgh" * 1000)
    assert run(TINY, "--steps", "30", "--text", str(path)) == 0
    output = capsys.readouterr().out
    assert str(path) in output
    assert loss("after", output) < math.log(8)  # each of the 8 bytes follows from the one before


def test_train_errors(tmp_path, capsys, monkeypatch):
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    assert_fails(capsys, ["train", "--text", str(tmp_path / "none")], "--text", str(tmp_path / "none"))
    assert_fails(capsys, ["train", "--text", str(tmp_path)], "--text")
    assert_fails(capsys, ["train", "--text", str(short)], "--text", "4096", "got 9")
    assert_fails(capsys, ["train", "--d-model", "100"], "--d-model", "16")
    assert_fails(capsys, ["train", "--k", "9"], "--k", "8")
    assert_fails(capsys, ["train", "--experts", "5000"], "--experts", "4096")
    assert_fails(capsys, ["train", "--batch", "100000000000"], "--batch times --k", "got 200000000000")
    assert_fails(capsys, ["train", "--device", "gpu", "--dtype", "float64"], "--device gpu", "float64", "CPU only")
    monkeypatch.setattr(loader, "import_cupy", lambda: 1 / 0)
    assert_fails(capsys, ["train", "--device", "gpu"], "--device gpu", "division by zero")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no file without an end")
def test_train_does_not_read_a_text_without_end(capsys, monkeypatch):
    monkeypatch.setattr(train, "MAX_TEXT_BYTES", 1 << 21)
    message = "--text: expected at most 2097152 bytes, got more in /dev/zero"
    assert_fails(capsys, ["train", "--text", "/dev/zero"], message)


def test_train_reads_a_text_of_the_largest_size(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    monkeypatch.setattr(train, "MAX_TEXT_BYTES", 256 * 40)
    text = train.load_text(str(path))
    assert np.concatenate([text.training, text.held_out]).tobytes() == path.read_bytes()


def test_train_says_first_what_it_will_do(capsys, monkeypatch, tmp_path):
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


def test_train_in_float64_takes_the_cpu(capsys):
    assert run(TINY, "--device", "auto", "--dtype", "float64") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("GPU not used: --dtype float64 is for the CPU only\n")
    assert re.search(r"backend +numpy on CPU .*float64", captured.out)


def test_train_help_says_how_long_it_takes(capsys):
    with pytest.raises(SystemExit):
        run("train --help")
    assert re.search(r"takes\s+a\s+minute\s+or\s+two", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("steps", "where"), [("5", "loss at step [2-5] of 5"), ("1", "held-out loss after step 1 of 1")]
)
def test_train_stops_at_a_loss_that_is_not_finite(capsys, recwarn, tmp_path, steps, where):
    text = tmp_path / "text"
    text.write_bytes(b"abcdefgh" * 1000)
    assert run(TINY, "--steps", steps, "--lr", "1e30", "--text", str(text)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not recwarn.list
    last = captured.err.splitlines()[-1]
    assert re.fullmatch(rf"moeblaze_cupy train: {where}: .*got (nan|inf); is --lr 1e\+30 too high\?", last)


def test_a_nan_that_is_found_late_has_the_right_step(capsys, monkeypatch):
    """On a GPU losses are read every few steps. A copy of NumPy's namespace stands for CuPy."""
    steps = []
    plain = train.Adam.update
    monkeypatch.setattr(train.Adam, "update", lambda *args: steps.append(args) or plain(*args))
    backend = train.Backend(SimpleNamespace(**vars(np)), "stand-in", "float32")
    monkeypatch.setattr(train, "choose_backend", lambda *_: backend)
    monkeypatch.setenv("MOEBLAZE_PROGRESS", "0")
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
    assert re.fullmatch(f"moeblaze_cupy train: {message}", captured.err.splitlines()[-1])


def test_evaluation_has_pieces_of_its_own_size(capsys, monkeypatch):
    monkeypatch.delenv("MOEBLAZE_PROGRESS", raising=False)
    monkeypatch.setattr("moeblaze_cupy.cli.progress.EARLY_SECONDS", math.inf)
    sizes = []
    plain = train.Model.loss
    monkeypatch.setattr(train.Model, "loss", lambda model, *of: sizes.append(len(of[1])) or plain(model, *of))
    assert run(TINY, "--steps", "1", "--batch", "1") == 0
    assert set(sizes[:-1]) == {train.EVALUATION_TOKENS, sizes[-1]}
    evaluated = sum(sizes) // 2
    assert evaluated == len(train.load_text(None).held_out) - train.CONTEXT_BYTES
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluate ")]
    assert len(lines) == 2 * train.EVALUATION_LINES  # before and after
    assert lines[-1].startswith(f"evaluate {evaluated}/{evaluated} (")


def test_train_that_does_not_fit_is_one_line(capsys):
    """Parameters of 2^61 bytes, which no address space has room for."""
    widest = str(2**24)
    assert run("train --device cpu --experts 1024", "--d-model", widest, "--d-hidden", widest) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"moeblaze_cupy train: out of memory: Unable to allocate .*\n", captured.err)


def test_train_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    assert run(TINY, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert_fails(capsys, ["train", "--plot", str(tmp_path / "no" / "loss.png")], "--plot", "folder")
    assert_fails(capsys, ["train", "--plot", str(tmp_path / "loss.xyz")], "--plot", ".png")


def test_train_plot_target_is_tried_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert_fails(capsys, ["train", "--plot", str(tmp_path / "folder.png")], "--plot", "got a folder")
    os.mkfifo(tmp_path / "fifo.png")
    assert_fails(capsys, ["train", "--plot", str(tmp_path / "fifo.png")], "--plot", "got a device")
    assert_fails(capsys, ["train", "--plot", "/proc/a.png"], "--plot", "can be written", "/proc/a.png")
    assert_fails(capsys, ["train", "--plot", f"{tmp_path}/{'a' * 300}.png"], "--plot", "can be written", "too long")
    older = tmp_path / "older.png"
    older.write_bytes(b"an older plot")
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "not_yet.png")
    for path in (older, link, tmp_path / "new.png"):  # the check itself leaves everything as it was
        assert_fails(capsys, ["train", "--plot", str(path), "--text", "/nowhere"], "--text")
    assert older.read_bytes() == b"an older plot"
    assert link.is_symlink() and not link.exists() and not (tmp_path / "new.png").exists()


def test_train_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_fails(capsys, ["train", "--plot", "loss.png"], "--plot", 'pip install -e ".[plot]"')


@pytest.mark.parametrize("k", [1, 2])
def test_train_gradient(k, monkeypatch):
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
    """What `python -m moeblaze_cupy train` is for: on the CPU, clearly below what byte frequencies alone allow."""
    result = run_module("train", "--device", "cpu", "--steps", "80", MOEBLAZE_PROGRESS="0")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["backend", "text", "model"]
    entropy = float(re.search(r"unigram entropy +([\d.]+)", result.stdout).group(1))
    assert 2.8 < entropy < 3.6
    assert loss("after", result.stdout) < 2.6 < entropy - 0.5


@pytest.mark.gpu
def test_default_run_learns_on_the_gpu():
    result = run_module("train", "--device", "gpu")
    assert result.returncode == 0, result.stderr
    assert "cupy on" in result.stdout and "bfloat16" in result.stdout
    assert loss("after", result.stdout) < 2.2
    shape = memory.LayerShape(L=2048, d=256, h=128, E=8, k=2)
    saved = memory.format_bytes(memory.layer(shape, "minimal").saved_bytes)
    assert re.search(rf"saved for backward +{re.escape(saved)}", result.stdout)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_log_is_sparse(monkeypatch):
    monkeypatch.delenv("MOEBLAZE_PROGRESS", raising=False)
    stream = io.StringIO()
    asked = []
    with Progress(1000, "train", stream) as progress:
        for step in range(1000):
            progress.update(step + 1, lambda step=step: asked.append(step) or "note")
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(asked) == 10
    assert lines[0].startswith("train 100/1000 (") and lines[-1].startswith("train 1000/1000 (")
    assert "\r" not in stream.getvalue() and lines[0].endswith("note")


def test_progress_of_a_slow_run_is_in_the_log_early(monkeypatch):
    monkeypatch.delenv("MOEBLAZE_PROGRESS", raising=False)
    monkeypatch.setattr("moeblaze_cupy.cli.progress.EARLY_SECONDS", 0)
    stream = io.StringIO()
    with Progress(1000, "train", stream) as progress:
        for step in range(200):
            progress.update(step)
    assert [line.partition(" (")[0] for line in stream.getvalue().splitlines()] == ["train 1/1000", "train 100/1000"]


def test_progress_on_a_terminal_is_one_line(monkeypatch):
    monkeypatch.delenv("MOEBLAZE_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("moeblaze_cupy.cli.progress.REDRAW_SECONDS", 0)
    stream = Terminal()
    with Progress(3, "compile", stream) as progress:
        progress.update(1, "a rather long note that does not fit the terminal's width at all")
        progress.update(2, "short")
        progress.update(3)
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    states = text[:-1].split("\r")[1:]
    assert len(states) == 3 and all(len(state) < 60 for state in states)
    assert len(states[1]) >= len(states[0].rstrip())  # the longer line before is painted over
    assert states[2].startswith("compile 3/3 [####")


def test_progress_can_be_silenced(monkeypatch):
    monkeypatch.setenv("MOEBLAZE_PROGRESS", "0")
    for stream in (io.StringIO(), Terminal()):
        with Progress(2, "train", stream) as progress:
            progress.update(1)
            progress.update(2)
        assert stream.getvalue() == ""


def test_bench_prints_a_table_and_writes_a_record(tmp_path):
    """Tiny shapes where there is no GPU; the layer's suite on a GPU has its own way to be run."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("would measure on the GPU")
    done = run_module("bench", "--suite", "dispatch", "--commit", "abc1234", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tiny +moeblaze +random +[\d.,]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert "skipped: sonicmoe: needs a CUDA device, and pip install sonic-moe" in done.stdout
    assert "no GPU: tiny shapes" in done.stderr and "bench dispatch 4/4" in done.stderr
    assert '"id": "abc1234"' in (tmp_path / "dispatch.json").read_text()


def test_bench_fails_where_a_provider_is_wrong(monkeypatch, capsys):
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
    assert run("bench --suite dispatch") == 1
    out = capsys.readouterr().out
    assert re.search(r"^failed: tiny-torch_sort: .*torch_sort on tiny: wrong lists", out, re.MULTILINE)
    assert not re.search(r"^tiny +torch_sort", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "fragment"),
    [("--case=conf9", "got 'conf9'"), ("--provider=nobody", "got 'nobody'"), ("--out=/dev/null/x", "--out: ")],
)
def test_bench_refuses_what_it_does_not_know(capsys, option, fragment):
    pytest.importorskip("torch")
    assert main(["bench", option]) == 2
    assert fragment in capsys.readouterr().err


def test_bench_that_measured_nothing_fails(capsys):
    pytest.importorskip("torch")
    assert run("bench --suite dispatch --minutes 1e-9") == 1
    output = capsys.readouterr().out
    assert "dispatch: nothing was measured" in output and "skipped: later than --minutes" in output


def test_bench_can_be_interrupted(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("would measure on the GPU")
    from bench import kernels

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "sorted_lists", interrupt)
    assert run("bench --suite dispatch") == 130
    assert capsys.readouterr().err.endswith("moeblaze_cupy bench: interrupted\n")


def test_bench_needs_a_checkout(monkeypatch, capsys, tmp_path):
    from moeblaze_cupy.cli import bench as bench_command

    monkeypatch.setattr(bench_command.moeblaze_cupy, "__file__", str(tmp_path / "moeblaze_cupy" / "__init__.py"))
    assert_fails(capsys, ["bench"], "a checkout's bench/ folder", str(tmp_path / "bench"))


def test_bench_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    assert_fails(capsys, ["bench"], "needs pytest, pytest-benchmark and torch")
