"""`python -m moeblaze_cupy`: each subcommand, with and without what it needs."""

import os
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from environment import run_python

import moeblaze_cupy
from moeblaze_cupy import gemm_config, launch_config, loader, memory
from moeblaze_cupy.__main__ import MAX_WIDTH, build_parser, main
from moeblaze_cupy.cli import compile as compile_command
from moeblaze_cupy.cli import plan as plan_command
from moeblaze_cupy.structures import ACTIVATIONS


def run(line, *more):
    """`main` on the words of `line`, then `more`."""
    return main([*line.split(), *more])


def run_module(*argv, **options):
    """`python -m moeblaze_cupy` in a process of its own."""
    return run_python("-m", "moeblaze_cupy", *argv, **options)


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
    result = run_module(*SMALL_PLAN, preexec_fn=lambda: [os.close(number) for number in closed])
    assert result.returncode == 0, result.stderr
    assert ("saved for backward" in result.stdout) == (1 not in closed) and result.stderr == ""


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
    monkeypatch.setattr("moeblaze_cupy.cli.command._discard_output", lambda: None)  # pytest's own stdout
    assert main(SMALL_PLAN) == code
    assert capsys.readouterr().err == f"moeblaze_cupy plan: {message}\n"


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
    for command in ("info", "compile", "explain", "plan"):
        assert re.search(rf"^ +{command} ", output, re.MULTILINE)


def test_no_command_is_an_error():
    result = run_module()
    assert result.returncode == 2 and "command" in result.stderr


def test_parsing_imports_no_subcommand():
    code = (
        "import sys; from moeblaze_cupy.__main__ import build_parser; build_parser();"
        "print([m for m in ('cupy', 'torch', 'matplotlib') if m in sys.modules]);"
        "print([m for m in sys.modules if m.startswith('moeblaze_cupy.cli.')])"
    )
    result = run_python("-c", code)
    assert result.stdout == "[]\n['moeblaze_cupy.cli.command']\n", result.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "--activation", "tanh"],
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
        ("plan --tokens abc", "argument --tokens: expected a whole number from 1 on, got 'abc'"),
        (
            f"plan --d-model 1{'0' * 32}",
            f"argument --d-model: expected a whole number from 1 to 16777216, got '1{'0' * 32}'",
        ),
    ],
    ids=lambda text: text[:30],
)
def test_unreadable_options_are_explained(line, message, capsys):
    with pytest.raises(SystemExit) as raised:
        run(line)
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": error: {message}")


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


def test_compile_compiles_every_variant(compiled, capsys):
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
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == [
        f"compile {done}/{len(expected)}" for done in range(1, len(expected) + 1)
    ]


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

    def interrupt(*_, **options):
        threading.Timer(0.2, release.set).start()  # the one under way ends after the interrupt
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "precompile", precompile)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(compile_command, "print", interrupt, raising=False)  # at the first kernel that is ready
    assert main(["compile"]) == 130
    assert len(compiled) <= 2
    assert capsys.readouterr().err == "moeblaze_cupy compile: interrupted\n"


@pytest.mark.gpu
def test_compile_on_the_gpu(tmp_path):
    result = run_module("compile", CUPY_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir())
