"""What an installation holds and needs, that every module has one name, and that the metadata agree."""

import ast
import configparser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moeblaze_cupy

ROOT = Path(__file__).resolve().parent.parent
CI = (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def requirements(setup_cfg) -> dict[str, list[str]]:
    """The lines of install_requires, under "", and of every extra, under its name."""
    texts = {"": setup_cfg["options"]["install_requires"], **setup_cfg["options.extras_require"]}
    return {name: [line.strip() for line in text.splitlines() if line.strip()] for name, text in texts.items()}


@pytest.mark.parametrize("name", ["moeblaze_cupy.types", "interop.dlpack", "tests", "bench", "kernels_cu"])
def test_a_module_has_one_name(name):
    """A second name, such as moeblaze_cupy.moeblaze_cupy.types, would make a second class of each in it."""
    try:
        found = importlib.util.find_spec(f"moeblaze_cupy.{name}")
    except ModuleNotFoundError:  # the parent
        found = None
    assert (found is not None) == (name in ("interop.dlpack", "kernels_cu"))


@pytest.mark.parametrize("folder", ["interop", "kernels_cu"])
def test_the_package_links_to_the_folders_beside_it(folder):
    """Relative, so that a checkout may be moved."""
    assert os.readlink(ROOT / "moeblaze_cupy" / folder) == f"../{folder}"


def test_a_checkout_is_enough(tmp_path):
    """As on a machine where nothing may be installed: another folder, and the checkout on PYTHONPATH."""
    code = "import moeblaze_cupy.dlpack; from moeblaze_cupy.cuda import loader; print(loader.source_folder())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()).resolve() == ROOT / "kernels_cu", done.stderr


def test_reports_need_no_torch():
    """`pytest` collects the tests of the results where torch is missing, and a report can be written there."""
    code = "import sys; sys.modules['torch'] = None; import bench.report"  # None: importing it raises ImportError
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_stated_once(setup_cfg):
    """As a literal: a build reads it from the source, without NumPy, which importing the package would need."""
    assert setup_cfg["metadata"]["version"] == "attr: moeblaze_cupy.__version__"
    values = [
        node.value
        for node in ast.parse((ROOT / "moeblaze_cupy" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["__version__"]
    ]
    assert [ast.literal_eval(value) for value in values] == [moeblaze_cupy.__version__]


def test_changelog_and_citation_are_of_this_version():
    released = re.findall(r"^## \[?(\d[\w.]*)\]?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == moeblaze_cupy.__version__
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [moeblaze_cupy.__version__]


def test_every_requirement_has_a_lower_bound(setup_cfg):
    unbounded = [line for lines in requirements(setup_cfg).values() for line in lines if not re.search("[>=]=", line)]
    assert not unbounded


def test_oldest_versions_are_the_lower_bounds(setup_cfg):
    """The constraints that .ci/run installs with."""
    printed = subprocess.run(
        [sys.executable, ROOT / ".ci" / "oldest.py", "test"], capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = requirements(setup_cfg)
    assert len(printed) == len(wanted[""]) + len(wanted["test"])
    for line, constraint in zip([*wanted[""], *wanted["test"]], printed, strict=True):
        assert line.replace(">=", "==").startswith(constraint)


def test_tests_install_on_every_cuda(setup_cfg):
    """The NVRTC of one CUDA version among the requirements of the tests would shut out CuPy for another."""
    wanted = requirements(setup_cfg)
    assert not [line for line in wanted["test"] if re.match("cuda|cupy|nvidia", line)]
    assert [line for line in wanted["compile"] if line.startswith("nvidia-cuda-nvrtc")]


def test_the_description_stands_alone(setup_cfg):
    """An index shows it without the repository: a relative link or picture would be dead there."""
    name = setup_cfg["metadata"]["long_description"].removeprefix("file: ")
    text = (ROOT / name).read_text()
    assert "![" not in text
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))


def test_ci_runs_the_commands_of_the_readme():
    """.ci/run takes them from the README by this pattern."""
    pattern = re.search(r"grep -E '([^']*)' README\.md", CI)[1]
    found = re.findall(pattern + ".*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found == [
        "pip install -e . && python examples/train.py",
        'pip install -e ".[test]" && pytest -n auto',
    ]


def workflow(name):
    return (ROOT / ".github" / "workflows" / name).read_text()


@pytest.mark.parametrize(
    ("name", "runs"), [("ci.yml", [".ci/run", ".ci/run other_torch"]), ("release.yml", [".ci/run release"])]
)
def test_forges_run_the_same_checks(name, runs):
    assert re.findall(r"^ +- run: (.*)$", workflow(name), re.MULTILINE) == runs
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert {words[-1] for words in map(str.split, runs)} - {".ci/run"} <= set(re.findall(r"^(\w+)\(\) {", CI, re.M))


def test_forges_run_the_oldest_torch(setup_cfg):
    versions = re.findall(r'"([\d.]+)"', re.search(r"^ +torch: \[(.*?)\]", workflow("ci.yml"), re.MULTILINE)[1])
    assert f"torch>={versions[0].removesuffix('.0')}" in requirements(setup_cfg)["torch"]
    assert versions == sorted(versions, key=lambda version: tuple(map(int, version.split("."))))


def test_a_release_waits_for_the_checks_and_needs_no_secret():
    text = workflow("release.yml")
    assert "uses: ./.github/workflows/ci.yml" in text and "workflow_call:" in workflow("ci.yml")
    assert text.count("needs: [checks, build]") == 2 and text.count("id-token: write") == 2
    assert "secrets." not in text


def test_the_recipe_is_of_this_version_and_its_requirements(setup_cfg):
    recipe = (ROOT / ".ci" / "conda" / "recipe.yaml").read_text()
    assert re.search(r'^  version: "(.*)"$', recipe, re.MULTILINE)[1] == moeblaze_cupy.__version__
    assert setup_cfg["options.entry_points"]["console_scripts"].strip() in recipe
    assert f"summary: {setup_cfg['metadata']['description']}\n" in recipe
    wanted = requirements(setup_cfg)
    cupy = {re.sub(r"cupy-cuda\d+x\[ctk\]", "cupy", line) for name in ("cuda12", "cuda13") for line in wanted[name]}
    torch = {line.replace("torch", "pytorch") for line in wanted["torch"]}
    others = [line for line in wanted["transformers"] if line.startswith("transformers")]
    listed = {line.replace(" ", "") for line in re.findall(r"^    - (.*)$", recipe, re.MULTILINE)}
    assert {*wanted[""], *cupy, *torch, *others} <= listed
    assert re.search(r'"(setuptools>=.*?)"', (ROOT / "pyproject.toml").read_text())[1] in listed


def test_typed_files_exist(setup_cfg):
    """A file that was renamed would silently leave the list, or stop every check."""
    listed = re.split(r"[,\s]+", setup_cfg["mypy"]["files"].strip())
    assert "moeblaze_cupy/" in listed
    assert not [name for name in listed if not (ROOT / name).exists()]
    assert (ROOT / "moeblaze_cupy" / "py.typed").is_file()
    assert not {"ignore_errors", "ignore_missing_imports"} & set(setup_cfg["mypy"])
