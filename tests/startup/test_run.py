"""`python -m moeblaze_cupy run`: processes, imports and signals with stand-ins, then models of transformers."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from moeblaze_cupy.__main__ import main
from moeblaze_cupy.interop import startup
from moeblaze_cupy.tools import run as run_command
from tests.environment import ROOT, plain_environment, run_python

FOLDER = os.path.abspath(startup.__path__[0])


def run(*words, **environment):
    """`python -m moeblaze_cupy run` on these words, in a process of its own."""
    return run_python("-m", "moeblaze_cupy", "run", *words, **environment)


STAND_INS = {  # of two packages, whose modules print that they run
    "transformers/__init__.py": "",
    "transformers/modeling_utils.py": "print('modeling_utils')",
    "moeblaze_cupy/__init__.py": "",
    "moeblaze_cupy/interop/__init__.py": "",
    "moeblaze_cupy/interop/transformers/__init__.py": "print('registers')",
    "moeblaze_cupy/interop/transformers/default.py": "print('default')",
    **dict.fromkeys((f"megatron/core/{name}__init__.py" for name in ("", "models/", "extensions/")), ""),
    "megatron/core/models/backends.py": "print('backends')",
    "megatron/core/extensions/transformer_engine_spec_provider.py": "import megatron.core.models.backends; print('te')",
    "moeblaze_cupy/interop/megatron/__init__.py": "def install_loaded(): print('installs')",
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture
def stand_ins(tmp_path):
    return write(tmp_path / "stand_ins", STAND_INS)


def python(code, *path, **environment):
    """Python on `code` with the folder and `path` as its PYTHONPATH, as a child of `run` has it."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    environment = plain_environment() | {"PYTHONPATH": os.pathsep.join([FOLDER, *path])} | environment
    return subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("default", ["modeling_utils", "registers", "default"]),
        ("import", ["modeling_utils", "registers"]),
        ("off", ["modeling_utils"]),
        (None, ["modeling_utils", "registers", "default"]),
    ],
    ids=str,
)
def test_imports_follow_those_of_transformers(stand_ins, mode, lines):
    """Without MOEBLAZE_RUN the folder alone is enough: some launchers hand on PYTHONPATH and no other variable."""
    done = python("import transformers.modeling_utils", stand_ins, **({"MOEBLAZE_RUN": mode} if mode else {}))
    assert done.stdout.split() == lines, done.stderr
    told = "moeblaze_cupy run: 'moeblaze' is registered with transformers, for models that name it\n"
    assert done.stderr == (told if mode == "import" else "")


def test_a_call_follows_each_of_megatrons_providers(stand_ins):
    """Before the module that imports the second goes on, which calls both. transformers is left alone."""
    code = "import megatron.core.extensions.transformer_engine_spec_provider, transformers.modeling_utils; print('on')"
    done = python(code, stand_ins, MOEBLAZE_RUN="megatron")
    assert done.stdout.split() == ["backends", "installs", "te", "installs", "modeling_utils", "on"], done.stderr
    assert python(code, stand_ins).stdout.split() == ["backends", "te", "modeling_utils", "registers", "default", "on"]


def test_modules_look_as_without_it(stand_ins):
    """transformers reads sources of its modules; others ask for a spec and do not import."""
    code = """
    import importlib.util, inspect, sys
    spec = importlib.util.find_spec("transformers.modeling_utils")
    print("modeling_utils" in spec.loader.get_source(spec.name))
    from transformers import modeling_utils as module
    print(type(module.__loader__).__name__, module.__spec__.loader is module.__loader__)
    print("modeling_utils" in inspect.getsource(module))
    importlib.reload(module)
    """
    done = python(code, stand_ins)
    ran = ["modeling_utils", "registers", "default"]
    assert done.stdout.splitlines() == ["True", *ran, "SourceFileLoader True", "True", "modeling_utils"], done.stderr


def test_a_program_without_transformers_imports_nothing():
    names = "{'moeblaze_cupy', 'numpy', 'torch', 'transformers', 'typing', 're'}"
    assert python(f"import sys; print({names} & set(sys.modules) - set(sys.argv))").stdout == "set()\n"
    files = [name for name in os.listdir(FOLDER) if not name.startswith("__")]
    assert files == ["sitecustomize.py"]  # all else would be found by a short name


def test_a_hidden_sitecustomize_runs(tmp_path):
    hidden = write(tmp_path, {"sitecustomize.py": "import sys; sys.path.append('added'); mark = 'of the user'"})
    done = python("import sitecustomize, sys; print(sitecustomize.mark, sys.path[-1])", hidden)
    assert (done.stdout, done.stderr) == ("of the user added\n", "")


def test_a_hidden_sitecustomize_that_fails_is_told_as_always(tmp_path, stand_ins):
    hidden = write(tmp_path, {"sitecustomize.py": "raise ValueError('of the user')"})
    done = python("import transformers.modeling_utils", hidden, stand_ins)
    assert done.stderr.startswith("Error in sitecustomize") and "ValueError: of the user" in done.stderr
    assert done.stdout.split()[-1] == "default"


def test_a_second_installation_on_the_path(tmp_path, stand_ins):
    """Each finder asks the other."""
    shutil.copy(os.path.join(FOLDER, "sitecustomize.py"), tmp_path)
    done = python("import transformers.modeling_utils", str(tmp_path), stand_ins)
    assert done.stdout.split() == ["modeling_utils", "registers", "default"], done.stderr


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_package_that_cannot_be_imported_is_one_line(tmp_path, stand_ins, rank):
    write(tmp_path / "stand_ins", {"moeblaze_cupy/interop/transformers/__init__.py": "import absent_library"})
    done = python("import transformers.modeling_utils", stand_ins, **({"RANK": rank} if rank else {}))
    assert (done.returncode, done.stdout.split()) == (0, ["modeling_utils"])
    reason = "ModuleNotFoundError(\"No module named 'absent_library'\")"
    package = "moeblaze_cupy.interop.transformers.default"
    line = f"moeblaze_cupy run: {sys.executable} cannot import {package}, so the layer is not used: {reason}\n"
    assert done.stderr == ("" if rank == "1" else line)


@pytest.mark.parametrize("before", [None, "", "/a", f"/a{os.pathsep}{FOLDER}{os.pathsep}/b"])
def test_pythonpath_is_kept(monkeypatch, tmp_path, before):
    monkeypatch.setenv("PYTHONPATH", before) if before is not None else monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    kept = [entry for entry in (before or "").split(os.pathsep) if entry not in ("", FOLDER)]
    environment = run_command.environment("import")
    assert environment["PYTHONPATH"].split(os.pathsep) == [FOLDER, *kept]
    assert environment["MOEBLAZE_RUN"] == "import"
    assert {"PYTHONPATH", "MOEBLAZE_RUN"} | os.environ.keys() == environment.keys()


def test_a_checkout_that_only_its_folder_leads_to(monkeypatch):
    """`python -m moeblaze_cupy` finds the package there, and scripts in other folders would not."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(entry for entry in sys.path if entry != str(ROOT))])
    assert run_command.environment("default")["PYTHONPATH"].split(os.pathsep) == [FOLDER, str(ROOT)]


needs_transformers = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))), reason="needs torch and transformers"
)


@needs_transformers
@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["--", "sh", "-c", "exit 7"], 7, ""),
        (["sh", "-c", "exit 7"], 7, ""),
        ([], 2, "COMMAND: expected a program and its arguments after --, got none"),
        (["--", ""], 2, "COMMAND: expected a program and its arguments after --, got none"),
        (
            ["--", "no-such-program"],
            127,
            "COMMAND: expected a program, got 'no-such-program': No such file or directory",
        ),
        (["--", "/"], 126, "COMMAND: expected a program, got '/': Permission denied"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_status(words, status, line):
    done = run(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == (f"moeblaze_cupy run: {line}\n" if line else "")


@needs_transformers
def test_the_command_gets_its_own_words():
    code = "import os, sys; print(os.environ['MOEBLAZE_RUN'], sys.argv[1:])"
    assert run("--", sys.executable, "-c", code, "--import-only", "--", "-h").stdout == (
        "default ['--import-only', '--', '-h']\n"
    )
    assert run("--import-only", "--", sys.executable, "-c", code, "x").stdout == "import ['x']\n"
    assert "not allowed with argument" in run("--import-only", "--megatron", "--", "true").stderr


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_told(monkeypatch, capsys, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the command ran"))
    assert main(["run", "--", "true"]) == 2
    assert capsys.readouterr().err == (
        f"moeblaze_cupy run: moeblaze_cupy.interop.transformers: {missing}: expected an importable {missing} "
        f'(pip install "moeblaze-cupy[{missing}]"), got none\n'
    )


@needs_transformers
def test_signals_reach_the_command():
    """It is the process that was started, so what a scheduler sends arrives. Python's own choices are not inherited."""
    words = [
        sys.executable,
        "-m",
        "moeblaze_cupy",
        "run",
        "--",
        "sh",
        "-c",
        "grep SigIgn /proc/$$/status; exec sleep 99",
    ]
    process = subprocess.Popen(words, cwd=ROOT, env=plain_environment(), stdout=subprocess.PIPE, text=True)
    ignored = int(process.stdout.readline().split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


SMALL = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1)
MOE = dict(moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8)

def qwen3(**more):
    return transformers.Qwen3MoeConfig(**SIZES, **MOE, **more)

def made(config, **more):
    return AutoModelForCausalLM.from_config(config, **more)

def name(model):
    return model.config._experts_implementation
"""

CHOICES = """
def quantised(dequantize):
    config = qwen3()
    config.quantization_config = transformers.FineGrainedFP8Config(dequantize=dequantize)
    return name(made(config))

def inside(quantisation):
    text = dict(SIZES, **MOE, pad_token_id=0, rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]})
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16,
                  deepstack_visual_indexes=[0])
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    if quantisation:
        config.quantization_config = quantisation
    return transformers.Qwen3VLMoeForConditionalGeneration(config).config.text_config._experts_implementation

def of_a_class_that_chooses():
    class Chooses(transformers.Qwen3MoeForCausalLM):
        def get_correct_experts_implementation(self, requested_experts):
            return super().get_correct_experts_implementation(requested_experts or "batched_mm")
    return name(Chooses(qwen3()))

def saved_and_loaded():
    with __import__("tempfile").TemporaryDirectory() as folder:
        made(qwen3()).save_pretrained(folder)
        assert "experts_implementation" not in open(folder + "/config.json").read()
        return name(AutoModelForCausalLM.from_pretrained(folder))

def switched():
    model = made(qwen3())
    model.set_experts_implementation("eager")
    return name(model)

gpt_oss = transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
dbrx = transformers.DbrxConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64,
                               attn_config={"kv_n_heads": 1, "rope_theta": 1e4},
                               ffn_config={"hidden_size": 16, "ffn_hidden_size": 8, "moe_num_experts": 2})
print(json.dumps({
    "names none": name(made(qwen3())),
    "gpt-oss": name(made(gpt_oss)),
    "names grouped_mm": name(made(qwen3(), experts_implementation="grouped_mm")),
    "names eager": name(made(qwen3(), experts_implementation="eager")),
    "names batched_mm": name(made(qwen3(), experts_implementation="batched_mm")),
    "its config names eager": name(made(qwen3(experts_implementation="eager"))),
    "dense": name(made(transformers.LlamaConfig(**SIZES))),
    "not dispatched": name(made(dbrx)),
    "quantised": quantised(False),
    "loaded as bf16": quantised(True),
    "inside of one": inside(None),
    "inside of quantised": inside(transformers.FineGrainedFP8Config()),
    "its class names another": of_a_class_that_chooses(),
    "saved and loaded": saved_and_loaded(),
    "switched": switched(),
}))
"""


SERVED = {"names none", "gpt-oss", "loaded as bf16", "inside of one", "saved and loaded"}


@needs_transformers
def test_which_models_get_the_layer(tmp_path):
    """Beside what transformers chooses without `run`."""
    program = write(tmp_path, {"choices.py": SMALL + CHOICES}) + "/choices.py"
    done = run("--", sys.executable, program)
    chosen, without = (json.loads(each.stdout or "{}") for each in (done, run_python(program)))
    assert chosen.keys() == without.keys() > SERVED, done.stderr
    assert chosen == without | dict.fromkeys(SERVED, "moeblaze")
    assert {without[each] for each in SERVED} == {"grouped_mm"}
    told = [line for line in done.stderr.splitlines() if "moeblaze" in line]
    assert told == ["moeblaze_cupy: Qwen3MoeForCausalLM names no experts implementation and uses 'moeblaze'"]


STEP = """
import os
from moeblaze_cupy.interop.transformers import api

calls = []
experts = api.experts
api.experts = lambda *a, **k: calls.append(1) or experts(*a, **k)
torch.manual_seed(0)
model = made(qwen3(), dtype=torch.float64)
state = model.state_dict()
reference = made(qwen3(), experts_implementation="eager", dtype=torch.float64)
reference.load_state_dict(state)
tokens = torch.arange(24).reshape(2, 12)
for each in (model, reference):
    each(input_ids=tokens, labels=tokens).loss.backward()
worst = max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in zip(model.parameters(), reference.parameters()))
assert worst < 1e-12, worst  # float64: rounding of sums in another order
sys.stdout.write(f"rank {os.environ.get('RANK', '-')}: {len(calls)} call\\n")
"""

UNDER_PYTEST = """
def test_default():
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8)
    assert AutoModelForCausalLM.from_config(config).config._experts_implementation == "moeblaze"
"""

SPAWNS = """
import multiprocessing

def child(queue):
    queue.put(name(made(qwen3())))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=300))
    process.join()
"""

PYTHON = [sys.executable, "-m"]
ACCELERATE = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
LAUNCHERS = {
    "python": ([sys.executable, "step.py"], ["rank -: 1 call"]),
    "torchrun": (
        [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "step.py"],
        ["rank 0: 1 call", "rank 1: 1 call"],
    ),
    "accelerate launch": (
        [*PYTHON, "accelerate.commands.launch", *ACCELERATE.split(), "step.py"],
        ["rank -: 1 call"],
    ),
    "pytest": ([*PYTHON, "pytest", "-q", "-p", "no:cacheprovider", "check_default.py"], ["1 passed"]),
    "spawn": ([sys.executable, "spawns.py"], ["moeblaze"]),
}


@needs_transformers
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(tmp_path, launcher):
    """What trains is a child of what `run` starts. Of several ranks one says that the layer is used."""
    if launcher == "accelerate launch":
        pytest.importorskip("accelerate")
    words, expected = LAUNCHERS[launcher]
    write(tmp_path, {"step.py": SMALL + STEP, "spawns.py": SMALL + SPAWNS, "check_default.py": UNDER_PYTEST})
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    command = [*PYTHON, "moeblaze_cupy", "run", "--", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert [each for each in expected if each not in done.stdout] == []
    assert (done.stderr + done.stdout).count("names no experts implementation") == (launcher != "pytest")
