"""The three packages: imports point one way, and each names only what it may know. Read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "params": {"params"}, "lowering": {"lowering", "params"}, "funcmodels": {"funcmodels", "lowering", "params"},
}  # fmt: skip
FAMILIES = ("qwen", "deepseek", "kimi", "gemma3", "llama", "dflash", "dspark")
CHECKPOINT_WORDS = ("self_attn", "linear_attn", "q_proj", "embed_tokens", "lm_head", "layernorm", "model.layers")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports by its full name, wherever the import stands, with its line."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*above, *((node.module,) if node.module else ())))
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)


def spoken(file: Path) -> Iterator[tuple[str, int]]:
    """Names, attributes and strings of a file, its docstrings left out, with their lines."""
    parsed = ast.parse(file.read_text())
    remarks = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in remarks:
            yield node.value, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


def passed(file: Path) -> Iterator[tuple[str, int]]:
    """The strings that a file passes to some function, an import among them, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        for argument in node.args if isinstance(node, ast.Call) else ():
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, argument.lineno


def importers(packages: Iterable[str], forbidden: Set[str]) -> list[str]:
    """Places in `packages` that import a module under one of the `forbidden` roots."""
    files = [file for package in packages for file in sources(package)]
    assert files
    return [
        f"{file}:{line} {name}" for file in files for name, line in imported(file) if name.split(".")[0] in forbidden
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    assert not importers([package], MAY_IMPORT.keys() - MAY_IMPORT[package])


def test_nothing_shipped_imports_tests_or_oracles() -> None:
    assert not importers(MAY_IMPORT, {"tests", "transformers"})


def test_lowering_names_no_model_and_no_checkpoint_key() -> None:
    words = FAMILIES + CHECKPOINT_WORDS
    found = [
        f"{file.relative_to(ROOT)}:{line} {text[:40]!r}"
        for file in sources("lowering")
        for text, line in spoken(file)
        if any(word in text.lower() for word in words)
    ]
    assert not found


def test_torch_npu_is_imported_in_one_place_only() -> None:
    """Elsewhere its name stands for a version: a field of the target, a key of a report."""
    allowed = tuple(ROOT / "lowering" / place for place in ("npu", "npu_reference", "dryrun", "detect.py"))
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for package in MAY_IMPORT
        for file in sources(package)
        if not any(place in (file, *file.parents) for place in allowed)
        for line in {
            *(line for name, line in imported(file) if name.split(".")[0] == "torch_npu"),
            *(line for text, line in passed(file) if text == "torch_npu"),
        }
    ]
    assert not found


@pytest.mark.parametrize("package", ["funcmodels", "params"])
def test_models_and_checkpoints_do_not_ask_for_a_device(package: str) -> None:
    """No `if npu:`: which machine runs an op is for `lowering` to know."""
    devices = {"npu", "ascend", "is_npu", "torch_npu"}
    found = [f"{file}:{line}" for file in sources(package) for text, line in spoken(file) if text.lower() in devices]
    assert not found
