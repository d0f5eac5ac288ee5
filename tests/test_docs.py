"""The documents: their snippets run, their tables say what the code says, and what they point to exists."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCUMENTS, *sorted((ROOT / "docs").glob("*.ipynb"))]
PACKAGES = ("funcmodels", "lowering", "params")
FOLDERS = "funcmodels|lowering|params|tests|docs"
ARRAYS = {"Bool", "Complex", "Float", "Inexact", "Int", "Integer", "Num", "Real", "Shaped", "UInt"}


def snippets(document: Path) -> list[str]:
    """The Python blocks of a document, in order."""
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def text_of(document: Path) -> str:
    """What a page says: all of it, or a notebook's cells of text."""
    text = document.read_text(encoding="utf-8")
    if document.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


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


def test_the_readme_is_short() -> None:
    (example,) = snippets(ROOT / "README.md")
    assert len([line for line in example.splitlines() if line]) <= 15
    assert len(text_of(ROOT / "README.md").splitlines()) <= 120


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


def test_links_lead_somewhere() -> None:
    for document in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", text_of(document)):
            path, _, anchor = target.partition("#")
            assert (document.parent / path).exists(), f"{document.name} points to {path}"
            titles = re.findall(r"^#+ (.*)", text_of(document.parent / path), re.MULTILINE) if anchor else []
            found = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert not anchor or anchor in found, f"{document.name} points to {target}"


def test_files_and_modules_mentioned_exist() -> None:
    """Those of this repository that a page or a docstring has in backticks."""
    for document in [*PAGES, *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]:
        for piece in mentioned(document):
            for path in re.findall(rf"(?<![\w/])(?:(?:{FOLDERS})/[\w./<>-]*|\w+/[\w/]*\.py)", piece):
                pattern = re.sub(r"<\w+>", "*", path)
                assert any([*ROOT.glob(pattern), *ROOT.glob(f"funcmodels/{pattern}")]), f"{document}: no {path}"
            for name in re.findall(r"(?<=python -m )[\w.]+", piece):
                assert importlib.util.find_spec(name), f"{document}: no module {name}"


def test_names_that_pages_mention_exist() -> None:
    """Names of the packages in backticks, and what tables say is defined in a file."""
    for page in PAGES:
        for name in re.findall(r"(?<![\w./])(?:fm|funcmodels|lowering|params)\.[\w.]*\w", "\n".join(mentioned(page))):
            assert exists(name), f"{page.name}: there is no {name}"
        for name, path in re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", text_of(page), re.MULTILINE):
            assert name in defined(ROOT / path), f"{page.name}: there is no {name} in {path}"


def mentioned(document: Path) -> list[str]:
    """What a text has in backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL))


def exists(name: str) -> bool:
    """Whether a dotted name leads somewhere, through modules that nobody has imported yet too."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module({"fm": "funcmodels"}.get(first, first))
    for part in rest:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, part)
    return True


def defined(path: Path) -> set[str]:
    """The functions and classes of a file, and `Class.method`."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    outer = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    inner = {f"{node.name}.{part.name}" for node in outer for part in node.body if isinstance(part, kinds)}
    return {node.name for node in outer} | inner


def test_the_index_lists_every_page_once() -> None:
    (index,) = (page for page in PAGES if page.name == "index.md")
    listed = Counter(re.findall(r"\]\(([^)]+)\)", text_of(index)))
    assert listed == Counter(page.name for page in PAGES if page.parent != ROOT and page != index)


def test_speeds_say_how_they_were_measured() -> None:
    for section in text_of(ROOT / "docs" / "speed.md").split("\n## ")[1:]:
        assert "|---" not in section or "`python -m tests.bench." in section, section.splitlines()[0]
