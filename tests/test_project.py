"""The project as a whole: what it declares, what its names say, and what must not be in any file."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import funcmodels
import lowering
import params

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SOURCES = {package: sorted((ROOT / package).rglob("*.py")) for package in ("funcmodels", "lowering", "params")}


def imports(path: Path) -> set[str]:
    """The top-level modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def module_of(path: Path) -> str:
    """The name a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for paths in SOURCES.values() for path in paths}


def arrows(module: str) -> set[str]:
    """The modules of the three packages that a module imports, in functions and for type checkers too."""
    path, found = MODULES[module], set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: len(module.split(".")) - node.level + (path.name == "__init__.py")]
            start = ".".join([*(package if node.level else []), *filter(None, [node.module])])
            names = (f"{start}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else start for name in names)
    return (found & set(MODULES)) - {module}


ARROWS = {module: arrows(module) for module in MODULES}


def reached(module: str) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    found: set[str] = set()
    ahead = set(ARROWS[module])
    while ahead:
        found |= ahead
        ahead = {name for one in ahead for name in ARROWS[one]} - found
    return found


def test_no_modules_import_each_other() -> None:
    """Not for type checkers, nor inside functions: what two share stands where both can import it."""
    behind = {module: reached(module) for module in MODULES}
    assert not [(a, b) for a in MODULES for b in behind[a] if a in behind[b]]


ROOMS = {
    "params": (
        "errors guarded modes sharding", "spec", "tree", "constants weights shards files mapped init", "names",
        "matching reading", "quant", "checkpoint inspection saving sharded single unread", "__init__",
    ),
    "lowering": (
        "errors beside cache wheels", "target detect host rows protocols signature weights kernel policy once op use",
        "prepare layouts", "ops", "portable npu", "npu_reference cases", "explain",
        "dryrun ascend_compiler", "triton", "jit", "check", "lower", "__init__ __main__",
    ),
    "funcmodels": (
        "config errors", "output state", "blocks", "attention", "family models model", "checkpoint", "sampling",
        "drafts", "serving", "testing", "public", "__init__", "commands", "cli", "__main__",
    ),
}  # fmt: skip
"""The files and folders of each package, from what knows nothing to what knows all."""

KNOWN_UPWARD = {("funcmodels.model", "funcmodels.checkpoint.text")}
"""A model carries its tokenizer."""


def test_no_arrow_points_upward() -> None:
    """From package to package, and from room to room inside of one."""
    rows = [(package, row) for package, rooms in ROOMS.items() for row in rooms]
    level = {(package, name): at for at, (package, row) in enumerate(rows) for name in row.split()}

    def height(module: str) -> int:
        package, _, rest = module.partition(".")
        return level[package, rest.partition(".")[0] or "__init__"]

    assert {(a, b) for a in MODULES for b in ARROWS[a] if height(b) > height(a)} == KNOWN_UPWARD


def test_no_two_classes_have_one_name() -> None:
    """A name in an error or a report says what it is."""
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name for name, modules in found.items() if len(modules) > 1} == KNOWN_TWICE


KNOWN_TWICE = {"Layer", "Mtp", "_Keys"}
"""Each family has its own `Layer`, and its own `Mtp` where it drafts."""


def test_a_docstring_opens_with_what_the_thing_is() -> None:
    """Not with a pronoun: who looks a function up has not read the one above."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = (ast.get_docstring(node) if isinstance(node, documented) else None) or ""
            assert not re.match(r"(That|Those|It|Its|They)\b", said), f"{module}: {said}"


def test_the_declared_dependencies_are_the_imported_ones() -> None:
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.DOTALL | re.MULTILINE)
    declared = set(re.findall(r'^    "([a-z_]+)', block, re.MULTILINE))
    used = {name for paths in SOURCES.values() for path in paths for name in imports(path)}
    used -= {*sys.stdlib_module_names, *SOURCES, "__future__", "optree", "torch_npu", "triton"}
    assert used <= declared
    # numpy is imported by torch and safetensors.
    assert declared - used <= {"numpy"}


def test_the_command_exists() -> None:
    ((module, name),) = re.findall(r'^funcmodels = "([\w.]+):(\w+)"$', PROJECT, re.MULTILINE)
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("package", [funcmodels, lowering, params], ids=lambda package: package.__name__)
def test_public_names_exist_and_are_documented(package: Any) -> None:
    names: list[str] = package.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert len(names) == len(set(names))
    for name in names:
        value = getattr(package, name)
        assert isinstance(value, (dict, tuple)) or value.__doc__, f"{name} has no docstring"


def test_no_module_of_the_package_has_a_public_name() -> None:
    # Importing the module would put it where the name is looked for.
    assert not {found.name for found in pkgutil.iter_modules(funcmodels.__path__)} & set(funcmodels.__all__)


IMPORTS = """
import sys
from funcmodels import cli
for words in (["--help"], ["lower", "--help"], ["generat"], ["generate", "--top-k", "x"]):
    try:
        cli.main(words)
    except SystemExit:
        pass
assert not {"torch", "rich", "lowering", "params"} & set(sys.modules), "to show help"
import funcmodels
assert funcmodels.load and len(dir(funcmodels)) > 40
slow = ["torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "beartype", "rich"]
slow += ["huggingface_hub", "tokenizers", "transformers", "lowering.cases"]
print(*[name for name in slow if name in sys.modules])
"""


@pytest.mark.plain
def test_what_importing_costs() -> None:
    """Half of the import's time and memory was once dynamo's, and help waited for all of it."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, ""), done.stderr


@pytest.mark.plain
@pytest.mark.parametrize(
    ("package", "name"),
    [("funcmodels", "params.py"), ("funcmodels", "lowering.py"), ("lowering", "params/__init__.py")],
)
def test_a_file_that_hides_a_package_is_named(package: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('not to be run')")
    found = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert f"Python finds {tmp_path / name} under that name; rename" in found.stderr.splitlines()[-1]


def texts() -> list[Path]:
    """Every file of the project that a person writes."""
    top = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml", ROOT / ".ci" / "run"]
    inside = [path for folder in (*SOURCES, "tests", "docs") for path in (ROOT / folder).rglob("*")]
    return top + [path for path in inside if path.suffix in {".py", ".md", ".ipynb", ".toml"}]


# Each word is written so that this file does not hold it.
UNWANTED = {
    "a path of some machine": r"(?<![\w./])/(?:work|root|opt|home|farm|tmp)/",
    "the host of a registry": r"pypi[.]org|pythonhosted[.]org|registry[.]npmjs|deb[.]debian|download[.]pytorch",
    "an unfinished piece": r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b",
    "a handler for everything": r"except\s+(?:Base)?Exceptio[n]\b|excep[t]\s*:",
}


@pytest.mark.parametrize("what", UNWANTED)
def test_no_file_holds(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(UNWANTED[what], line)
    ]
    assert not found, "\n".join(found)


def test_weights_are_read_by_who_knows_what_the_node_is() -> None:
    """Beside its shape, device and dtype the weight of a node is read where the node is applied, or `exactly` known."""
    for path in (path for path in SOURCES["funcmodels"] if path.parent.name in READERS and path.name != "linear.py"):
        module = ast.parse(path.read_text(encoding="utf-8"))
        facts = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Attribute) and node.attr in FACTS}
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr == "weight":
                owner = ast.unparse(node.value)
                assert id(node) in facts or owner.startswith(("exactly(", "self")), f"{path}:{node.lineno}: {owner}"


FACTS, READERS = ("shape", "device", "dtype"), ("models", "attention", "blocks", "drafts")


def test_functions_are_shipped_bare() -> None:
    """A function with a type checker around it neither compiles nor is fast, and beartype alone binds no axes."""
    for path in (path for paths in SOURCES.values() for path in paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                assert "beartype" not in decorators and "jaxtyped" not in decorators, f"{path}:{node.lineno}"


MADE = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
        "scalar_tensor", "tensor", "zeros"}  # fmt: skip
CPU_ONLY = ("lowering/cases/", "lowering/npu_reference/")
"""Cases and the references of NPU operators, which run under `torch.device("cpu")`."""


def test_tensors_are_made_on_a_named_device() -> None:
    """Left to the default device, which is the user's, what the host makes lands beside neither model nor state."""
    for path in (path for paths in SOURCES.values() for path in paths):
        if str(path.relative_to(ROOT)).startswith(CPU_ONLY):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if name in MADE:
                    assert "device" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
