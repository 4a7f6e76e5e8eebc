"""Structure: which module may import which, what the sources must say, what an installation must hold."""

import ast
import configparser
import functools
import inspect
import re
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config, loader, structs
from moeblaze_cupy.dispatch import launches as dispatch
from moeblaze_cupy.layer import forward as experts
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.router import launches as router
from moeblaze_cupy.selection import balance
from moeblaze_cupy.selection import launches as selection

ROOT = Path(__file__).parent.parent
FOLDERS = {"moeblaze_cupy": "moeblaze_cupy", "interop": "moeblaze_cupy.interop"}

# Imports go down only: from a line to lines above it. A name stands for a module, or for a folder and all within it.
LEVELS = [
    ["private"],
    ["frameworks"],
    ["cuda"],
    ["dlpack"],
    ["types"],
    ["checks"],
    ["overlaps"],
    ["reference"],
    ["calls"],
    ["dispatch"],
    ["rows"],
    ["gemm"],
    ["fp8"],
    ["lora", "quantised"],
    ["layer"],
    ["selection"],
    ["router"],
    ["__init__"],
    ["interop.torch"],
    ["interop.parallel"],
    ["interop.fsdp", "interop.megatron", "interop.transformers"],
    ["interop.startup"],
    ["tools"],
    ["__main__"],
]
# Documented paths of the version before, which import from the present ones.
FORMER = ("memory", *(f"interop.{n}" for n in ("dlpack", "exchange", "expert_parallel", "transformers_parallel")))
SPEAK_TORCH = ("interop.torch.", "interop.parallel.", "interop.fsdp.", "interop.megatron.", "interop.transformers.")


def module_name(path: Path) -> str:
    """ "ops.router" of moeblaze_cupy/router/launches.py; "ops" of an __init__.py, "__init__" of the package's own."""
    relative = path.relative_to(ROOT).with_suffix("")
    dotted = ".".join((FOLDERS[relative.parts[0]], *relative.parts[1:]))
    inside = dotted.removeprefix("moeblaze_cupy.")
    return inside if inside == "__init__" else inside.removesuffix(".__init__")


MODULES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
KERNELS = sorted((ROOT / "kernels_cu").rglob("*.cu*"))


parsed = functools.cache(ast.parse)


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text())


def imports_of(path: Path) -> list[str]:
    """Absolute names of everything imported, also within functions: modules, or names that modules hold."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Modules of this package among the imports."""
    found = set()
    for name in imports_of(path):
        inside = name.removeprefix("moeblaze_cupy.")
        if name == "moeblaze_cupy":
            found.add("__init__")
        elif name != inside:
            found.add(inside if inside in MODULES else inside.rpartition(".")[0] or "__init__")
    return found


def room_of(module: str) -> tuple[int, str]:
    """The number of a module's line in LEVELS, and the name there."""
    names = (module, *(module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)))
    for name in names:
        for number, line in enumerate(LEVELS):
            if name in line:
                return number, name
    pytest.fail(f"{module} is in no line of LEVELS")


@pytest.mark.parametrize("module", [name for name in MODULES if name not in FORMER])
def test_imports_go_down_only(module):
    imported = imported_modules(MODULES[module])
    if module == "interop":
        assert not imported
        return
    for other in imported:
        assert room_of(other) == room_of(module) or room_of(other)[0] < room_of(module)[0], f"{module} imports {other}"


def test_imports_are_seen():
    """The test above proves nothing if it finds no imports."""
    assert imported_modules(MODULES["layer.api"]) >= {"calls", "checks", "frameworks", "reference", "dispatch.launches"}
    assert imported_modules(MODULES["tools.info"]) >= {"__init__", "tools.command", "tools.memory"}


def test_no_module_imports_itself_by_others():
    """Within folders too."""
    graph = {module: imported_modules(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the names


@pytest.mark.parametrize("module", FORMER)
def test_former_paths_only_import(module):
    tree = tree_of(MODULES[module])
    assert [type(node) for node in tree.body[:2]] == [ast.Expr, ast.ImportFrom] and len(tree.body) < 4
    (new,) = imported_modules(MODULES[module])
    assert new not in FORMER
    assert not [other for other, path in MODULES.items() if module in imported_modules(path)]


def test_features_have_one_name_in_all_folders():
    features = {path.name for path in (ROOT / "moeblaze_cupy").iterdir() if path.is_dir() and not path.is_symlink()}
    libraries = {path.name for path in (ROOT / "interop").iterdir() if path.is_dir()}
    folders = {name: {path.parent for path in (ROOT / name).rglob("*.[cp][uy]*")} for name in ("kernels_cu", "tests")}
    found = {name: {path.name for path in paths if path.parent == ROOT / name} for name, paths in folders.items()}
    assert found["kernels_cu"] <= features | {"common", "__pycache__"}
    assert found["tests"] <= features | libraries | {"emulator", "__pycache__"}
    assert not [name for name in ("torch", "transformers") if (ROOT / "tests" / name / "__init__.py").exists()]


@pytest.mark.parametrize("module", MODULES)
def test_frameworks_are_optional(module):
    """torch is for interop's folders, transformers for its module; CuPy and matplotlib are never imported at import."""
    path = MODULES[module]
    roots = {name.partition(".")[0] for name in imports_of(path)}
    assert "torch" not in roots or module.startswith(SPEAK_TORCH)
    assert "transformers" not in roots or module.startswith("interop.transformers.")
    at_import = [node for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in at_import for alias in node.names} | {getattr(n, "module", "") for n in at_import}
    assert not {"cupy", "matplotlib"} & {(name or "").partition(".")[0] for name in names}


OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@functools.cache
def private_definitions(tree: ast.AST) -> set[str]:
    """Names of classes, functions and variables, and attributes that methods set of `self` or `cls`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if is_private(name)}


def private_uses(tree: ast.AST) -> list[str]:
    """Private attributes, imports, and what `getattr`, its kin, importlib and `sys.modules` are given by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(r"^(?:torch|transformers|megatron|peft|triton|jax|cupy)[.][\w.]+$", node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "attrgetter"):
            found += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return [name for name in found if is_private(name) and name not in OF_NAMED_TUPLES]


def other_private_names(module: str, text: str) -> list[str]:
    """The private names in a module's text that neither it nor a module that it imports defines."""
    trees = [parsed(text), *(tree_of(MODULES[other]) for other in imported_modules(MODULES[module]))]
    own = set().union(*map(private_definitions, trees))
    return [name for name in private_uses(trees[0]) if name not in own]


@pytest.mark.parametrize("module", [name for name in MODULES if name.rpartition(".")[2] != "private"])
def test_private_names_of_other_libraries_stand_in_private(module):
    assert other_private_names(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.rpartition(".")[2] == "private"])
def test_private_names_come_with_the_versions_they_were_tested_with(module):
    text = MODULES[module].read_text()
    assert other_private_names(module, text)
    docstring = " ".join(ast.get_docstring(ast.parse(text)).split())
    assert re.search(r"[Tt]ested with (torch|transformers|megatron-core) \d+\.\d+", docstring)


@pytest.mark.parametrize(
    "text",
    [
        "torch._C.name",
        "import torch._dynamo",
        "from torch import _C",
        "getattr(torch, '_C')",
        "attrgetter('a._b')(x)",
        "import_module('torch._dynamo')",
        "'torch._inductor' in sys.modules",
    ],
)
def test_private_names_are_seen(text):
    assert other_private_names("interop.torch.api", text)
    assert not other_private_names("interop.torch.api", "self._fp8 = layer._replace(x=torch.nn.Module)")


@pytest.mark.parametrize("module", MODULES)
def test_raw_module_belongs_to_the_loader(module):
    assert "RawModule" not in MODULES[module].read_text() or module == "cuda.loader"


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_they_are_for(module):
    tree = tree_of(MODULES[module])
    assert ast.get_docstring(tree)


def public_functions():
    functions = {name: getattr(mb, name) for name in mb.__all__}
    functions |= {f"reference.{n}": f for n, f in vars(reference).items() if inspect.isfunction(f)}
    for module in (router, dispatch, experts, selection, balance):
        functions |= {f"{module.__name__}.{n}": f for n, f in vars(module).items() if inspect.isfunction(f)}
    return {name: f for name, f in functions.items() if not name.rpartition(".")[2].startswith("_")}


@pytest.mark.parametrize(
    "module", ["__init__", *(f"interop.{n}" for n in ("torch", "transformers", "parallel", "fsdp"))]
)
def test_the_page_of_the_api_names_everything_public(module):
    """In the table that a reader of the file sees, and in what makes the page as HTML. Constants have no docstring."""
    (names,) = (ast.literal_eval(n.value) for n in tree_of(MODULES[module]).body if is_assigned(n, "__all__"))
    page = (ROOT / "docs" / "api.md").read_text()
    called = "moeblaze_cupy" if module == "__init__" else f"moeblaze_cupy.{module}"
    section = next((part for part in page.split("\n## ") if f"| `{called}`" in part), page)
    assert [name for name in names if not re.search(rf"^\| `(\S+\.)?{name}` \| \w", section, re.MULTILINE)] == []
    listed = re.findall(r"^\.\. auto(?:class|function):: (?:\S+\.)?(\w+)$", section, re.MULTILINE)
    assert [name for name in names if name not in listed and not name.isupper()] == []


def is_assigned(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [name]


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_have_docstrings(name):
    assert inspect.getdoc(public_functions()[name])


@pytest.mark.parametrize(
    ("module", "names"),
    [("interop.torch.api", {"moe", "route", "MoE"}), ("interop.transformers.api", {"register", "patch", "Patched"})],
)
def test_functions_of_frameworks_have_docstrings(module, names):
    """By the source, as torch and transformers may be missing."""
    tree = tree_of(MODULES[module])
    public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
    assert {node.name for node in public} >= names
    assert all(map(ast.get_docstring, public))


@pytest.mark.parametrize("name", [name for name in mb.__all__ if inspect.isfunction(getattr(mb, name))])
def test_docstrings_name_every_argument_and_what_is_raised(name):
    function = getattr(mb, name)
    docstring = inspect.getdoc(function)
    missing = [p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", docstring)]
    assert not missing
    assert "Raises" in docstring


# Functions that mirror the public API, or the constants of kernels, may have more parameters.
MIRROR = {
    *(
        "moe_forward",
        "route",
        "route_backward",
        "moe",
        "expert_parallel_moe",
        "MoE.__init__",
        "gemm_variant",
    ),
}


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """By name, with that of the class before a method's."""
    found = {}
    for node in ast.walk(tree_of(path)):
        inside = node.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)) else ()
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + child.name: child for child in inside if isinstance(child, ast.FunctionDef)}
    return found


def parameters_of(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [
        each.arg for each in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if each
    ]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def lines_of(function: ast.FunctionDef) -> int:
    """Without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("module", MODULES)
def test_functions_stay_on_a_screen(module):
    functions = functions_of(MODULES[module])
    many = {name: len(parameters_of(f)) for name, f in functions.items() if name not in MIRROR}
    long = {} if module.startswith("reference.") else {name: lines_of(f) for name, f in functions.items()}
    assert not {name: number for name, number in many.items() if number > 12}
    assert not {name: number for name, number in long.items() if number > 80}


def test_functions_are_counted():
    """The test above proves nothing if it counts wrong."""
    functions = functions_of(MODULES["layer.api"])
    assert len(parameters_of(functions["moe_forward"])) == len(inspect.signature(mb.moe_forward).parameters)
    assert {"Lookup.run", "Lookup.__init__", "called"} <= functions_of(MODULES["calls"]).keys()
    assert lines_of(functions_of(MODULES["layer.forward"])["moe_forward"]) > 40


LAYER = ("layer", "gemm", "dispatch")  # and calls.py, types.py; with their kernels


def test_readme_tells_how_large_the_layer_is():
    named = re.search(r"The layer is ([\d,]+) lines", README)
    files = [ROOT / "moeblaze_cupy" / name for name in ("calls.py", "types.py")]
    files += [p for folder in LAYER for top in ("moeblaze_cupy", "kernels_cu") for p in (ROOT / top / folder).glob("*")]
    lines = sum(path.read_text().count("\n") for path in files if path.suffix in (".py", ".cu", ".cuh"))
    assert named and int(named[1].replace(",", "")) == round(lines, -2), lines


def parameters(function) -> list[tuple[str, bool]]:
    """Names, and whether they are keyword-only; without the `context` of CUDA calls."""
    signature = inspect.signature(function).parameters.values()
    return [(p.name, p.kind is p.KEYWORD_ONLY) for p in signature if p.name != "context"]


SELECTION = ["expert_choice", "limit_capacity", "list_pairs", "quantile_histogram", "round_tokens", "tokens_per_expert"]


@pytest.mark.parametrize("name", ["route", "route_backward", "dispatch", "moe_forward", "moe_backward", *SELECTION])
def test_the_reference_takes_the_public_arguments(name):
    public = getattr(mb, "build_dispatch" if name == "dispatch" else name)
    assert [n for n, _ in parameters(public)] == [n for n, _ in parameters(getattr(reference, name))]


@pytest.fixture(scope="module")
def setup_cfg():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_kernels_ship(kernel, setup_cfg):
    patterns = re.split(r"[,\s]+", setup_cfg["options.package_data"]["moeblaze_cupy.kernels_cu"])
    assert any(fnmatch(kernel.relative_to(ROOT / "kernels_cu").as_posix(), pattern) for pattern in patterns)
    assert kernel.parent.parent == Path(loader.source_folder()).resolve()
    assert [path.name for path in KERNELS].count(kernel.name) == 1  # headers are included by name


def test_packages_ship(setup_cfg):
    """Every folder with Python files is a package and listed, at the place where an import finds it in a checkout."""
    packages = setup_cfg["options"]["packages"].split()
    folders = {package: ROOT / package.replace(".", "/") for package in packages}
    on_disk = {path.parent for path in MODULES.values()} | {ROOT / "kernels_cu"}
    assert {folder.resolve() for folder in folders.values()} == on_disk
    assert len(packages) == len(on_disk)
    assert all((folder / "__init__.py").is_file() for folder in folders.values())


@pytest.mark.parametrize("name", ["docs/description.md", "LICENSE"])
def test_metadata_files_exist(name, setup_cfg):
    assert name in setup_cfg["metadata"]["long_description"] + setup_cfg["metadata"]["license_files"]
    assert (ROOT / name).read_text().strip()


README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"])
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
REPLAY = (ROOT / "docs" / "replay.md").read_text()
FINE_TUNING = (ROOT / "docs" / "fine-tuning.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README + INDEX + GUIDE + TRANSFORMERS + REPLAY + FINE_TUNING, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: " ".join(text.split()[1:4]))
def test_examples_run(example):
    for package in ("torch", "transformers", "peft"):
        if re.search(rf"^(?:import|from) {package}\b|interop\.{package}\b", example, re.MULTILINE):
            pytest.importorskip(package)
    exec(compile(example, "an example of the documentation", "exec"), {})


def test_guide_index_lists():
    ids = ast.literal_eval(re.search(r"With the ids (\[\[.*?\]\])", GUIDE).group(1))
    index = mb.build_dispatch(np.array(ids, np.int32), 4)
    assert str(index.expert_token_indices.tolist()) in GUIDE
    assert str(index.expert_token_offsets.tolist()) in GUIDE
    assert str(index.token_index_map[0].tolist()) in GUIDE


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_architecture_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/.]+\.(?:py|cuh|cu))`", text))
    on_disk = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.*")]
    assert len(named) > 30
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in on_disk)] == []


def test_architecture_names_every_module_and_kernel():
    text = (ROOT / "docs" / "architecture.md").read_text()
    whole = {"moeblaze_cupy/reference"}  # told by its folder
    files = [path.relative_to(ROOT) for path in (*MODULES.values(), *KERNELS)]
    told = [file.name for file in files if file.parent.as_posix() not in whole and not file.stem.startswith("__")]
    assert [name for name in told if f"`{name}`" not in text] == []


def test_limits_are_told_as_they_are():
    assert f"E up to {launch_config.MAX_EXPERTS}." in README
    assert f"E up to {router_config.MAX_ROUTER_EXPERTS} and k up to {router_config.MAX_ROUTER_K}" in README
    assert f"num_experts <= {launch_config.MAX_EXPERTS}" in mb.build_dispatch.__doc__
    assert f"E <= {router_config.MAX_ROUTER_EXPERTS}; k <= min(E, {router_config.MAX_ROUTER_K})" in mb.route.__doc__


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_kernel_files_stay_readable(kernel):
    text = kernel.read_text()
    assert text.count("\n") < 500
    assert text.startswith("//")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_inline_assembly_stays_in_the_ptx_headers(kernel):
    code = re.sub(r"//.*", "", kernel.read_text())
    assert kernel.name.startswith("ptx_") or not re.search(r"\b(asm|__asm__|__asm)\b", code)


def entries(text: str) -> dict[str, list[str]]:
    """Parameter declarations of every extern "C" entry, also of those that macros write."""
    code = re.sub(r"//.*", "", text).replace("\\\n", "\n")
    attributes = r"(?:(?:__\w+__|CLUSTERS)\s*(?:\([^()]*\))?\s*)*"
    pattern = rf'extern\s+"C"\s+__global__\s+void\s+{attributes}([\w#]+)\s*\(([^()]*)\)'
    found = {name: [" ".join(p.split()) for p in declared.split(",")] for name, declared in re.findall(pattern, code)}
    assert len(re.findall(r'extern\s+"C"', code)) == len(re.findall(pattern, code)), "an entry was not understood"
    return found


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.suffix == ".cu"], ids=lambda path: path.name)
def test_kernels_take_one_struct_whose_fields_have_comments(kernel):
    """Those of pointers and tensor maps say shape, dtype and direction."""
    found = entries(kernel.read_text())
    included = structs.included(kernel.name)
    text = "".join(path.read_text() for path in KERNELS if path.name in included)
    assert found
    for declarations in found.values():
        (declaration,) = declarations if "<" not in declarations[0] else [", ".join(declarations)]
        assert re.fullmatch(r"const (__grid_constant__ )?\w+Params(<.*>)? (p|params)", declaration)
        assert "__grid_constant__" in declaration or "TensorMap" not in text  # copies read a map at its address
    bodies = re.findall(r"^struct \w+Params \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    assert len(bodies) == len(found) or "##" in "".join(found)
    for field in re.findall(r"^    \w.*", "".join(bodies), re.MULTILINE):
        assert re.search(r"; +// ", field) or not re.search(r"\*|TensorMap", field), field


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.suffix == ".cuh"], ids=lambda path: path.name)
def test_headers_hold_no_entries(kernel):
    text = kernel.read_text()
    assert not entries(text)
    assert "#pragma once" in text
