"""`python -m moeblaze_cupy`: each subcommand, with and without what it needs."""

import configparser
import importlib
import itertools
import json
import os
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import moeblaze_cupy
from bench import kernel_variants as all_variants
from moeblaze_cupy.__main__ import MAX_WIDTH, main
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.tools import compile as compile_command
from moeblaze_cupy.tools import dry_run, memory
from moeblaze_cupy.tools import info as info_command
from moeblaze_cupy.tools import plan as plan_command
from moeblaze_cupy.tools.explain import GPUS
from moeblaze_cupy.types import GRADIENTS, SAVE_POLICIES
from tests.environment import ROOT, run_python
from tests.fakes import Layer, launches, limits_of, use


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
    monkeypatch.setattr("moeblaze_cupy.tools.command._discard_output", lambda: None)  # pytest's own stdout
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
    for command in ("info", "compile", "explain", "plan", "run"):
        assert re.search(rf"^ +{command} ", output, re.MULTILINE)


def test_no_command_prints_the_help():
    result = run_module()
    assert (result.returncode, result.stderr, result.stdout) == (0, "", run_module("--help").stdout)


def test_the_console_script_is_the_module(monkeypatch, capsys):
    """It has the name that `pip` gives it, and its help uses that name."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, target = config["options.entry_points"]["console_scripts"].strip().split(" = ")
    module, function = target.split(":")
    assert getattr(importlib.import_module(module), function) is main
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}"])
    assert main([]) == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_parsing_imports_no_subcommand():
    code = (
        "import sys; from moeblaze_cupy.__main__ import build_parser; build_parser();"
        "print([m for m in ('cupy', 'torch', 'matplotlib') if m in sys.modules]);"
        "print([m for m in sys.modules if m.startswith('moeblaze_cupy.tools.')])"
    )
    result = run_python("-c", code)
    assert result.stdout == "[]\n['moeblaze_cupy.tools.command']\n", result.stderr


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
            f"argument --d-model: expected a whole number from 1 to 262144, got '1{'0' * 32}'",
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
    assert "Hopper kernels" in result.stdout
    assert "optimizer state are not counted. What is saved comes on top of backward's peak." in result.stdout


@pytest.mark.parametrize("option", [("--tier", "sm80"), ("--dtype", "float32"), ("--d-model", "60")])
def test_plan_of_the_portable_kernels(option, capsys):
    assert run("plan --tokens 100 --d-model 64 --d-hidden 32 --experts 4 --k 2", *option) == 0
    assert "portable kernels" in capsys.readouterr().out


@pytest.mark.parametrize(("short", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_short_name_of_a_dtype_is_taken(short, dtype, capsys):
    assert run("plan --tokens 100 --d-model 64 --d-hidden 32 --experts 4 --k 2 --json --dtype", short) == 0
    layer = json.loads(capsys.readouterr().out)["layer"]
    assert (layer["dtype"], layer["precision"]) == (dtype, None)


def sections(output):
    """{heading: [(buffer, columns that have it)]} of what `plan` prints."""
    _, *parts, work = output.split("\n\n")
    assert work.startswith("Work:")
    found = {}
    for part in parts[1:]:
        heading, *lines = part.splitlines()
        fields = (re.fullmatch(r"  (.+?) +[\d.,]+ \w+(?:   (.*))?", line).groups(default="") for line in lines)
        found[heading] = [(name, users.split(", ")) for name, users in fields]
    return found


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"L": 100, "d": 64, "h": 32, "E": 4, "k": 2}, ()),
        ({"L": 8192, "d": 128, "h": 1024, "E": 4, "k": 1}, ()),  # weight gradients by split-K, fewer in the other order
        ({"L": 8192, "d": 128, "h": 1024, "E": 4, "k": 1}, ("--order", "row")),
    ],
)
def test_plan_shows_every_buffer(capsys, sizes, order):
    options = zip(("--tokens", "--d-model", "--d-hidden", "--experts", "--k"), sizes.values(), strict=True)
    assert run("plan --activation gelu", *(str(word) for option in options for word in option), *order) == 0
    results, saved, forward, backward = sections(capsys.readouterr().out).values()
    shape = memory.LayerShape(**sizes, activation="gelu", transposed=not order)
    assert {name for name, _ in results} == {"out", *(f"gradient of {name}" for name in GRADIENTS)}
    for save in SAVE_POLICIES:
        column, passes = save or "inference", dry_run.layer(shape, save).passes
        kept = {passes[0].contents(a) for a in map(dry_run.allocation_of, passes[0].kept.values())} - {"out"}
        listed = {name for name, users in saved if column in users}
        assert listed == ({"x", *kept} if save else set())
        for of_pass, rows in zip(passes, (forward, backward), strict=False):
            shown = [name for name, users in rows if column in users]
            names = {of_pass.contents(a) for a in of_pass.at_peak()} - {"out"}
            assert set(shown) == names - (kept if of_pass.name == "forward" else set())
    assert "routed tokens" in {name for name, _ in saved}


def test_plan_refuses_what_the_layer_refuses(capsys):
    plan = ["plan", "--d-model", "8", "--d-hidden", "8", "--k", "2"]
    assert_fails(capsys, [*plan, "--tokens", str(2**30), "--experts", "8"], "slots", str(2**31))
    limit = launch_config.MAX_EXPERTS
    assert_fails(
        capsys, [*plan, "--tokens", "8", "--experts", str(limit + 1)], "--experts", f"{limit}, got {limit + 1}"
    )
    assert_fails(capsys, [*plan, "--tokens", "8", "--experts", "1"], "--k", "at most 1 for --experts 1, got 2")
    assert_fails(capsys, [*plan, "--tokens", f"1{'0' * 32}", "--experts", "8"], "slots", str(2 * 10**32))
    identities = [*plan, "--tokens", "8", "--experts", "8", "--identity-experts"]
    assert main([*identities, str(2**31 - 9)]) == 0
    capsys.readouterr()
    assert_fails(capsys, [*identities, "99999999999"], "--identity-experts", f"at most {2**31 - 9}, as ids are int32")


def test_plan_with_biases_and_interleaved_columns(capsys):
    plan = "plan --tokens 64 --d-model 16 --d-hidden 8 --experts 4 --k 2 --gate-up interleaved"
    assert run(f"{plan} --activation swiglu_oai --bias weights") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.endswith("swiglu_oai, bfloat16, gate_up='interleaved', biases in bfloat16")
    assert any(re.match(r"  gradient of b1 +128 B", line) for line in lines)
    assert run(plan.replace("plan", "explain").replace("--gate-up interleaved", "--bias float32")) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("weights transposed, save='minimal', biases in float32")
    assert_fails(capsys, [*plan.split(), "--activation", "relu2"], "--gate-up", "halves", "relu2, which has no gate")


def test_weight_gradients_in_e4m3_are_refused_as_by_the_layer(capsys):
    layer = "plan --tokens 64 --d-model 64 --d-hidden 64 --experts 4 --k 2 --precision fp8 --tier sm90 --fp8-wgrad"
    assert run(layer) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(", precision='fp8', fp8_wgrad=True")
    for more, expected in (
        ("--lora-rank 4", "False with low-rank factors, got True"),
        ("--gate-up interleaved", "False with gate_up='interleaved', got True"),
        ("--unreduced", "False with unreduced, got True"),
        ("--d-hidden 80", "False unless h is a multiple of 64, got h = 80"),
    ):
        assert_fails(capsys, [*layer.split(), *more.split()], f"--fp8-wgrad: fp8_wgrad: expected {expected}")


def test_plan_with_a_memory_limit(capsys):
    """The peaks are within it, and sums over chunks are named; a limit that is too small is refused with the least."""
    plan = ["plan", "--tokens", "20000", "--d-model", "512", "--d-hidden", "256", "--experts", "8", "--k", "4"]
    limit = 64 << 20
    assert run(*plan, "--memory-limit", str(limit), "--json") == 0
    of_layer = json.loads(capsys.readouterr().out)
    columns = {name: column for name, column in of_layer["memory"].items() if name != plan_command.ROUTED}
    assert of_layer["layer"]["memory_limit"] == limit
    for column in columns.values():
        assert max(column["forward_peak_bytes"], column["backward_peak_bytes"] or 0) <= limit
        assert column["chunk_tokens"] < 20000 and column["more_traffic"] > 0
    assert run(*plan, "--memory-limit", str(limit)) == 0
    printed = capsys.readouterr().out
    assert "sums over chunks in float32" in printed and "more traffic by chunks" in printed
    assert f"{columns['recompute']['chunk_tokens']:,}" in printed
    assert_fails(
        capsys, [*plan, "--memory-limit", "9"], "memory_limit: expected at least", "got 9, with save='recompute'"
    )
    assert_fails(capsys, [*plan, "--memory-limit", "9", "--pairs"], "--memory-limit: expected none with --pairs")
    assert run(*plan, "--memory-limit", str(limit), "--lora-rank", "16", "--json") == 0
    of_factors = json.loads(capsys.readouterr().out)["memory"]["minimal"]
    assert of_factors["backward_peak_bytes"] <= limit and of_factors["chunk_tokens"] < 20000
    odd = ["plan", "--tokens", "8", "--d-model", "12", "--d-hidden", "8", "--experts", "4", "--k", "2"]
    assert_fails(capsys, [*odd, "--memory-limit", "9"], "--memory-limit: expected none with bfloat16", "got 12 and 8")
    odd = [*odd, "--dtype", "float32", "--lora-rank", "1"]
    odd[odd.index("--d-model") + 1] = "13"
    assert_fails(capsys, [*odd, "--memory-limit", "9"], "--lora-rank: expected factors with a multiple of 8", "got 1")


def test_plan_of_factors_beside_e4m3(capsys):
    """It saves what factors beside bf16 save, for as many operations."""
    plan = "plan --tokens 4096 --d-model 512 --d-hidden 768 --experts 8 --k 2 --lora-rank 16 --json"
    found = []
    for precision in ("", " --precision fp8"):
        assert run(plan + precision) == 0
        found.append(json.loads(capsys.readouterr().out))
    columns = [of["memory"]["minimal"] for of in found]
    assert columns[0]["saved_bytes"] == columns[1]["saved_bytes"]
    assert found[0]["work"] and all(found[1]["work"][n]["flops"] == of["flops"] for n, of in found[0]["work"].items())


def test_plan_of_the_widest_layer(capsys):
    """The portable kernels have a launch per 256 columns of d."""
    assert run(f"plan --tokens 8 --d-model {MAX_WIDTH} --d-hidden {MAX_WIDTH} --experts 8 --k 2 --tier sm80") == 0
    assert "portable kernels" in capsys.readouterr().out


def info_lines(output):
    return {line[:22].strip(): line[22:] for line in output.splitlines()}


INFO_FACTS = {
    *("this machine", "moeblaze_cupy", "python", "numpy", "ml_dtypes", "cupy", "torch", "triton", "transformers"),
    *("CUDA driver", "kernel cache", "MOEBLAZE_TIER"),
}
INFO_GPU_FACTS = {"GPU 0 name", "GPU 0 capability", "GPU 0 memory", "GPU 0 kernels"}


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_info(tmp_path, form):
    result = run_module("info", *form, CUPY_CACHE_DIR=str(tmp_path / "cache"), MOEBLAZE_TIER="sm80")
    assert result.returncode == 0 and result.stderr == ""
    facts = json.loads(result.stdout) if form else info_lines(result.stdout)
    assert facts.keys() >= INFO_FACTS
    assert next(iter(facts)) == "this machine" and re.match("runs on NumPy, because |uses ", facts["this machine"])
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
    assert facts["cupy"].startswith("unavailable: ") and len(facts["cupy"]) > len("unavailable: ")
    assert facts["this machine"].startswith("runs on NumPy, because ")
    assert facts["numpy"] == np.__version__
    assert not facts.keys() & {"CUDA runtime", "NVRTC", *INFO_GPU_FACTS}  # the line of CuPy says why


def fake_cupy(monkeypatch, *gpus):
    """CuPy that finds these GPUs: name, major, minor, bytes."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(gpus),
        getDeviceProperties=lambda i: dict(zip(("name", "major", "minor", "totalGlobalMem"), gpus[i], strict=True)),
        runtimeGetVersion=lambda: 12090,
    )
    cuda = SimpleNamespace(runtime=runtime, nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.2.0"))


@pytest.fixture
def info(monkeypatch, capsys):
    """A function that gives the facts of `info`."""
    monkeypatch.delenv("MOEBLAZE_TIER", raising=False)

    def facts():
        assert main(["info"]) == 0
        return info_lines(capsys.readouterr().out)

    return facts


HOPPER, TURING = (b"NVIDIA H200", 9, 0, 140 * 2**30), (b"Tesla T4", 7, 5, 15 * 2**30)


def test_info_lists_every_gpu(monkeypatch, info):
    fake_cupy(monkeypatch, HOPPER, TURING)
    facts = info()
    assert facts["this machine"] == "uses the Hopper kernels on NVIDIA H200"
    assert facts["CUDA runtime"] == facts["NVRTC"] == "12.9" and facts["GPUs"] == "2"
    assert [facts[f"GPU 0 {n}"] for n in ("name", "capability", "memory")] == ["NVIDIA H200", "9.0", "140.0 GiB"]
    assert facts["GPU 0 kernels"] == launch_config.tier(90)
    assert facts["GPU 1 capability"] == "7.5"
    assert facts["GPU 1 kernels"].startswith("unavailable: ") and "7.5" in facts["GPU 1 kernels"]


def no_driver():
    raise OSError("libcuda.so.1: cannot open")


@pytest.mark.parametrize(
    ("gpus", "driver", "tier", "verdict"),
    [
        ([HOPPER], lambda: 13000, "sm80", "uses the portable kernels on NVIDIA H200"),
        ([TURING], lambda: 13000, "", "runs on NumPy, because Tesla T4: compute capability: expected 8.0 or later"),
        ([], lambda: 13000, "", "runs on NumPy, because the NVIDIA driver finds no GPU"),
        ([], no_driver, "", "runs on NumPy, because it has no NVIDIA driver: libcuda.so.1: cannot open"),
        (None, lambda: 13000, "", 'runs on NumPy, because CuPy is not installed: pip install "moeblaze-cupy[cuda13]"'),
        (None, lambda: 12040, "", 'runs on NumPy, because CuPy is not installed: pip install "moeblaze-cupy[cuda12]"'),
    ],
    ids=["forced", "too old", "no GPU", "no driver", "no CuPy, CUDA 13", "no CuPy, CUDA 12"],
)
def test_the_verdict_says_why(monkeypatch, info, gpus, driver, tier, verdict):
    def missing():
        raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    if gpus is None:
        monkeypatch.setattr(info_command, "_cupy", missing)
    else:
        fake_cupy(monkeypatch, *gpus)
    monkeypatch.setattr(info_command, "_driver", driver)
    monkeypatch.setenv("MOEBLAZE_TIER", tier)
    assert info()["this machine"].startswith(verdict)


def test_info_says_how_to_install_what_is_missing(monkeypatch, info):
    def missing(distribution):
        raise info_command.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(info_command.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(info_command, "_driver", no_driver)
    facts = info()
    assert facts["torch"] == 'not installed: pip install "moeblaze-cupy[torch]"'
    assert facts["transformers"] == 'not installed: pip install "moeblaze-cupy[transformers]"'
    assert facts["triton"] == "not installed: pip install triton"
    assert facts["cupy"] == 'not installed: pip install "moeblaze-cupy[cuda13]" or "moeblaze-cupy[cuda12]"'


def test_plan_as_json(capsys):
    assert main([*SMALL_PLAN, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["layer"]["tokens"], told["layer"]["d_model"], told["kernels"]) == (9, 8, "sm90")
    run = dry_run.layer(memory.LayerShape(9, 8, 8, 4, 2, transposed=True), "minimal")
    minimal = told["memory"]["minimal"]
    assert minimal["saved_bytes"] == run.saved_bytes == sum(term["nbytes"] for term in minimal["saved"])
    assert minimal["backward_peak_bytes"] == run.backward_peak_bytes
    assert told["memory"]["inference"]["backward_peak_bytes"] is None
    assert [term["name"] for term in told["results"]] == ["out", *(f"gradient of {name}" for name in GRADIENTS)]


COMPILE = "compile --tokens 700 --d-model 64 --d-hidden 32 --experts 4 --k 2"


def test_compile_without_a_gpu(monkeypatch, capsys):
    def fail():
        raise RuntimeError("moeblaze_cupy: GPU: expected at least one CUDA device, got 0\nmore")

    monkeypatch.setattr(loader, "import_cupy", fail)
    assert_fails(capsys, COMPILE.split(), "at least one CUDA device")


@pytest.fixture
def compiled(monkeypatch):
    """The variants that `compile` would compile, on a machine that has an H200."""
    monkeypatch.setattr(compile_command, "_device_limits", lambda: launch_config.H200)
    variants = []
    monkeypatch.setattr(loader, "precompile", lambda variant: variants.append(variant) or 0.5)
    return variants


def modules(variants):
    return {(variant.source, variant.macros) for variant in variants}


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", ["minimal", "paper", "inference"])
@pytest.mark.parametrize(
    ("L", "k", "E", "d", "h"),
    [(700, 2, 4, 64, 32), (700, 1, 4, 60, 32), (5000, 2, 2, 2880, 2880), (4096, 2, 2, 4096, 2048)],
)
def test_compile_compiles_what_the_layer_launches(compiled, monkeypatch, capsys, L, k, E, d, h, save, tier):
    """No more and no less, with all tokens, half of them, and so on to one."""
    limits = limits_of(tier)
    device = use(monkeypatch, limits)
    launched = set()
    for number, weights in itertools.product((L >> n for n in range(L.bit_length())), (np.float32, np.float16)):
        for policy in {None if save == "inference" else save, None}:
            device.restart()
            layer = Layer(number, k, E, d, h, "transposed", save=policy, dtype=np.float16, weights=weights)
            _, saved = layer.forward(device)
            if policy:
                layer.backward(device, saved)
            launched |= modules(variant for variant, *_ in launches(device))
            del saved
    runtime.forget()
    monkeypatch.setattr(compile_command, "_device_limits", lambda: limits)
    sizes = f"--tokens {L} --k {k} --experts {E} --d-model {d} --d-hidden {h}"
    assert run(f"compile {sizes} --dtype float16 --save {save}") == 0
    assert modules(compiled) == launched and len(compiled) == len(launched)
    aligned = (d % 8 == 0,)
    assert launched <= modules(all_variants.variants(("float16",), ("transposed",), aligned=aligned, limits=limits))
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{len(launched)} of {len(launched)} kernels ready")
    assert f"compile {len(launched)}/{len(launched)}" in captured.err


def macros(compiled, name):
    return {value for variant in compiled for key, value in variant.macros if key == name}


def test_compile_prepares_fp8(compiled):
    assert run(f"{COMPILE} --precision fp8 --save fp8") == 0
    assert macros(compiled, "FP8") == macros(compiled, "FP8_SAVED") == {"0", "1"}
    assert "quantize.cu" in {variant.source for variant in compiled}


def test_compile_prepares_tf32(compiled, capsys):
    assert run(f"{COMPILE} --dtype float32 --tf32") == 0
    products = [dict(v.macros) for v in compiled if v.source.endswith("_sm80.cu")]
    assert products and {(m["MMA"], m["TF32"]) for m in products} == {("mma_tf32", "1")}
    capsys.readouterr()
    assert_fails(capsys, [*COMPILE.split(), "--tf32"], "--tf32", "float32", "bfloat16")


def test_compile_prepares_biases_and_interleaved_columns(compiled):
    assert run(f"{COMPILE} --activation swiglu_oai --bias float32 --gate-up interleaved") == 0
    sums = {tuple(dict(v.macros)[name] for name in ("BIAS", "OUT")) for v in compiled if v.source == "bias_bwd.cu"}
    assert sums == {("float", "float")} and "1" in macros(compiled, "INTERLEAVED")


def test_compile_prepares_accumulation(compiled):
    assert run(f"{COMPILE} --accumulate") == 0
    added = {
        (dict(v.macros)["ACCUMULATE"], dict(v.macros)["OUT"]) for v in compiled if v.source.startswith("grouped_wgrad")
    }
    assert added == {("0", "bf16"), ("1", "float")}


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        ("--experts 1", ("--k", "at most 1 for --experts 1, got 2")),
        ("--precision fp8 --d-model 24", ("--precision fp8", "multiples of 16", "24")),
    ],
)
def test_compile_refuses_what_the_layer_refuses(compiled, capsys, more, fragments):
    assert_fails(capsys, [*COMPILE.split(), *more.split()], *fragments)
    assert not compiled


def test_compile_refuses_experts_without_room(compiled, monkeypatch, capsys):
    monkeypatch.setattr(compile_command, "_device_limits", lambda: GPUS["l40s"])
    assert_fails(capsys, [*COMPILE.split(), "--experts", "4096"], "num_experts", "101376 bytes", "got 4096")


def test_compile_reports_a_failure_and_goes_on(compiled, capsys, monkeypatch):
    def precompile(variant):
        compiled.append(variant)
        if len(compiled) == 1:
            raise RuntimeError("nvrtc: error: invalid architecture")
        return 0.1

    monkeypatch.setattr(loader, "precompile", precompile)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert main(COMPILE.split()) == 1
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
    assert main(COMPILE.split()) == 130
    assert len(compiled) <= 2
    assert capsys.readouterr().err == "moeblaze_cupy compile: interrupted\n"


STEP = """
import cupy
import moeblaze_cupy as mb
def zeros(*shape):
    return cupy.zeros(shape, "float16")
for tokens in (700, 350, 1):
    ids, weights = cupy.zeros((tokens, 2), "int32"), cupy.zeros((tokens, 2), "float32")
    arguments = zeros(tokens, 64), ids, weights, zeros(4, 64, 64), zeros(4, 32, 64)
    mb.moe_forward(*arguments, save=None)
    out, saved = mb.moe_forward(*arguments)
    mb.moe_backward(out, saved)
cupy.cuda.Device().synchronize()
"""


@pytest.mark.gpu
def test_compile_on_the_gpu(tmp_path):
    """Afterwards a step compiles nothing."""
    result = run_module(*COMPILE.split(), "--dtype", "float16", "--order", "row", CUPY_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found
    step = run_python("-c", STEP, CUPY_CACHE_DIR=str(tmp_path))
    assert step.returncode == 0, step.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == found
