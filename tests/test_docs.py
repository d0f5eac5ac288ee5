"""The documents: their snippets run, their tables say what the code says, and what they point to exists."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("funcmodels", "lowering", "params")
ARRAYS = {"Bool", "Complex", "Float", "Inexact", "Int", "Integer", "Num", "Real", "Shaped", "UInt"}


def snippets(document: Path) -> list[str]:
    """The Python blocks of a document, in order."""
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def name_of(document: Path) -> str:
    return document.name


@pytest.mark.plain
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if snippets(path)], ids=name_of)
def test_snippets_run_and_print_what_they_say(document: Path) -> None:
    """The blocks of a document are one program; `print(...)  # prints: text` prints a line that begins so."""
    program = "\n".join(snippets(document))
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for said in re.findall(r"# prints: (.*)", program):
        assert any(line.startswith(said) for line in lines), f"not printed, or not in this order: {said}"


def test_the_readme_example_is_short() -> None:
    (example,) = snippets(ROOT / "README.md")
    assert len([line for line in example.splitlines() if line]) <= 15


def test_generated_tables_are_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_tables.py"))
    for name in made["DOCUMENTS"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert made["filled"](text) == text, f"{name} is out of date: run python docs/generate_tables.py"
        assert set(re.findall(r"<!-- table: (\w+) -->", text)) <= made["TABLES"].keys()


def test_every_axis_name_is_in_the_vocabulary_and_every_entry_is_used() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "axes.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    used = {axis for package in PACKAGES for path in (ROOT / package).rglob("*.py") for axis in axes(path)}
    assert {axis for axis in used if not axis.isdigit()} == set(listed)


def axes(path: Path) -> set[str]:
    """The axis names in the annotations of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ARRAYS:
            assert isinstance(node.slice, ast.Tuple), f"{path}:{node.lineno} names no axes"
            found.update(ast.literal_eval(node.slice.elts[-1]).split())
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} points to {target}"
