"""Examples with other libraries, each as a user runs it, with few steps."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS = {"hf_training.py": ("torch", "transformers"), "hf_fsdp.py": ("torch", "transformers"), "jax_layer.py": ("jax",)}
RUNS = [
    "hf_training.py --steps 6",
    "hf_training.py --steps 16 --how trainer --lora",
    "hf_fsdp.py --steps 6",
    "jax_layer.py",
]


def run(command: str, **environment: str) -> str:
    name, *options = command.split()
    for package in (*NEEDS[name], *(["accelerate", "peft"] if "--lora" in options else ())):
        pytest.importorskip(package)
    if name == "hf_fsdp.py":
        from tests.torch_versions import NO_SHARDING_ON_THE_CPU

        if NO_SHARDING_ON_THE_CPU:
            pytest.skip(NO_SHARDING_ON_THE_CPU)
    words = [sys.executable, str(ROOT / "examples" / name), *options]
    ended = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("command", RUNS)
def test_example_on_the_cpu(command):
    said = run(command, CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    assert "loss" in said and ("on cpu" in said or "2 processes, 127680 of 255360 parameters" in said)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("hf_training --steps 0", "--steps"),
        ("hf_fsdp --processes 0", "--processes"),
        ("hf_fsdp --steps -1", "--steps"),
        ("language_model --out OUT --steps 0", "--steps"),
        ("language_model --out OUT --batch 0", "--batch"),
    ],
)
def test_numbers_below_one_are_refused(command, option, capsys):
    name, *options = command.split()
    for package in NEEDS.get(f"{name}.py", ("torch",)):
        pytest.importorskip(package)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"examples.{name}").main(*options)
    assert ended.value.code == 2
    assert f"argument {option}: expected a whole number from 1 on, got" in capsys.readouterr().err


def on_two_processes(code: str, folder: Path) -> str:
    """What a program prints that `torchrun --nproc-per-node 2 FILE.py` runs."""
    program = folder / "program.py"
    program.write_text(code)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        # A thread of gloo that still holds a tensor when Python ends aborts the process, after all that it printed.
        if "terminate called without an active exception" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_program_of_the_page_on_many_gpus(tmp_path):
    """The first of docs/parallel.md, as the page says that it is run."""
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "parallel.md").read_text()
    assert "`torchrun --nproc-per-node 2 FILE.py`" in page
    assert on_two_processes(blocks_of(page)[0], tmp_path).count("torch.Size([64, 32])") == 2


def test_the_programs_of_adapters_on_many_gpus(tmp_path):
    """Those of docs/parallel.md on transformers, one after another."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    blocks = blocks_of((ROOT / "docs" / "parallel.md").read_text().partition("## Adapters")[2])
    said = on_two_processes("\n".join([*blocks, "dist.destroy_process_group()"]), tmp_path)
    assert said.count("(Shard(dim=0),)") == 2


def test_help_runs_nothing():
    assert "usage" in run("jax_layer.py --help") and "loss" not in run("jax_layer.py --help")


@pytest.mark.parametrize(
    ("package", "name", "remedy"),
    [
        ("torchtitan", "torchtitan_experts", "torchtitan==0.3.0"),
        ("nemo_automodel", "automodel_experts", "nemo-automodel==0.7.0"),
    ],
)
def test_a_missing_trainer_is_named_with_its_remedy(package, name, remedy):
    pytest.importorskip("torch")
    code = f"import sys; sys.modules['{package}'] = None; import examples.{name}"  # None: as if missing
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert re.search(rf"examples/{name}.py: .*pip install {remedy}", ended.stderr)


@pytest.mark.gpu
@pytest.mark.parametrize("command", RUNS[:-1])
def test_example_on_a_gpu(command):
    said = run(command)
    assert "on cuda" in said or "parameters in each" in said


@pytest.mark.gpu
def test_jax_on_a_gpu():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("jax has no GPU")
    assert "on cuda" in run("jax_layer.py", XLA_PYTHON_CLIENT_PREALLOCATE="false")


def test_the_jax_example_is_differentiated_as_jax_differentiates_its_formula():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    from examples import jax_layer

    def dense(x, ids, weights, w1, w2):
        """Every expert for every token, the chosen ones weighted."""
        gate, up = jnp.split(jnp.einsum("td,edh->teh", x, w1), 2, axis=-1)
        outs = jnp.einsum("teh,ehd->ted", jax.nn.silu(gate) * up, w2)
        return jnp.einsum("tkd,tk->td", jnp.take_along_axis(outs, ids[:, :, None], 1), weights)

    L, k, E, d, h = 12, 2, 4, 6, 5
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 6)
        shapes = ((L, d), (L, k), (E, d, 2 * h), (E, h, d), (L, d))
        x, weights, w1, w2, grad_out = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
        ids = jax.vmap(lambda key: jax.random.permutation(key, E)[:k])(jax.random.split(keys[5], L))
        results = []
        for layer in (jax_layer.moe, dense):
            out, pull = jax.vjp(layer, x, ids, weights, w1, w2)
            results.append([out, *(grad for i, grad in enumerate(pull(grad_out)) if i != 1)])
        assert results[0][0].dtype == jnp.float64
        for got, wanted in zip(*results, strict=True):
            assert jnp.linalg.norm(got - wanted) < 1e-12 * jnp.linalg.norm(wanted)
