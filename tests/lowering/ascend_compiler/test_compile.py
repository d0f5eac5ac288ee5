"""`compile_for`: its outcomes, its cache, and what ends its programs before they are done."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowering
from lowering import Compiled, LoweringError, Overflow, Refused, TritonSource, compile_for
from lowering.ascend_compiler import compile as compiling
from lowering.ascend_compiler.packages import ADAPTER, Toolchain, fetched
from lowering.target import ASCEND, TARGETS

PROBES = Path(__file__).with_name("probes.py")
SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i32"}


def probe(name: str, tile: int, target: str = "ascend910b", **options: Any) -> compiling.Outcome:
    return compile_for(TritonSource(PROBES, name), SIGNATURE, {"TILE": tile}, target, **options)


def line_of(words: str) -> int:
    """The line of the probes that ends in a comment of these words."""
    return 1 + next(at for at, line in enumerate(PROBES.read_text().splitlines()) if line.endswith(f"# {words}"))


@pytest.mark.parametrize("target", ASCEND)
def test_a_compiled_kernel(target: str) -> None:
    """The compiler's own figure of the unified buffer is that of the target; a tile and its sum are in it."""
    found = probe("good", 1024, target, multi_buffer=False)
    assert isinstance(found, Compiled)
    assert found.bits_available == 8 * (TARGETS[target].unified_buffer or 0)
    assert 32 * 1024 <= found.bits_used <= 2 * 32 * 1024 and not found.mix and not found.multi_buffer
    assert {unit: sum(names.values()) for unit, names in found.calls.items()} == {"load": 1, "store": 1, "vector": 2}
    assert found.arguments == ["x", "y", "n"] and "hivm.hir.pointer_cast" in found.program
    assert "triton" not in sys.modules
    assert str(found).endswith("% of the unified buffer; calls: 1 load, 1 store, 2 vector")


def test_second_buffers_are_asked_for_on_910() -> None:
    once, twice = probe("good", 1024, multi_buffer=False), probe("good", 1024)
    assert isinstance(once, Compiled) and isinstance(twice, Compiled) and twice.multi_buffer
    assert twice.bits_used == 4 * once.bits_used


@pytest.mark.parametrize("target", ASCEND)
def test_a_tile_that_does_not_fit(target: str) -> None:
    """Two float32 tiles of 256 KiB, more than any of the buffers."""
    found = probe("good", 65536, target, multi_buffer=False)
    assert isinstance(found, Overflow) and found.space == "ub"
    assert found.needs >= 32 * 65536 > found.has == 8 * (TARGETS[target].unified_buffer or 0)


def test_what_is_refused_is_told_with_its_line() -> None:
    """Of Triton's language, with its line; and what the compiler dies of, with its last words."""
    found = compile_for(TritonSource(PROBES, "halved"), {**SIGNATURE, "x": "*fp64"}, {"TILE": 256}, "ascend910b")
    assert isinstance(found, Refused) and "fp64" in found.reason and found.line == line_of("the front end")
    found = probe("doubled", 256)
    assert isinstance(found, Refused) and found.reason.startswith("the compiler was ended 3 times by signal 6: unsup")


def test_a_file_that_ends_the_front_end(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text("import triton\n\ndef kernel(x):\n    pass\n\nraise ValueError('no kernels today')\n")
    found = compile_for(TritonSource(path, "kernel"), {"x": "*fp32"}, {}, "ascend910b")
    assert found == Refused("Ascend910B3", "the front end ended with code 1: ValueError: no kernels today", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import triton\nimport os\n\ndef good(x): ...\n", "imports os; a file of kernels imports triton alone"),
        ("from .other import good\n\ndef good(x): ...\n", "imports .other; a file"),
        ("import triton\n", "defines no function 'good'"),
        ("def good(x, y): ...\n", "good takes x, y; found x"),
    ],
)
def test_a_source_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(text)
    with pytest.raises(LoweringError, match=message):
        compile_for(TritonSource(path, "good"), {"x": "*fp32"}, {}, "ascend910b")


def test_a_target_that_is_no_ascend() -> None:
    with pytest.raises(LoweringError, match="makes programs for ascend910b, ascend910_93, ascend950; target is cuda"):
        probe("good", 1024, "cuda")


def test_a_function_stands_for_its_source() -> None:
    here = TritonSource(Path(__file__), "line_of")
    jitted: Any = SimpleNamespace(fn=line_of)  # as `triton.jit` keeps it
    assert TritonSource.of(line_of) == TritonSource.of(jitted) == TritonSource.of(here) == here


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing compiled is kept, and the packages are where they are; the directory for what is."""
    monkeypatch.setattr(compiling, "cache_directory", lambda: tmp_path)
    return tmp_path / "compiled"


def test_outcomes_are_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By source and arguments; several threads at once."""
    with ThreadPoolExecutor() as threads:
        first = list(threads.map(lambda tile: probe("good", tile), [256, 512, 65536, 65536]))
    assert len(list(fresh.iterdir())) == 3 and first[2] == first[3] and isinstance(first[2], Overflow)
    monkeypatch.setattr(compiling, "_run", lambda *_: pytest.fail("compiled again"))
    assert [probe("good", tile) for tile in (256, 512, 65536)] == first[:3]
    with pytest.raises(pytest.fail.Exception):
        probe("good", 256, multi_buffer=False)


def dying(tools: Toolchain, folder: Path, deaths: int) -> Toolchain:
    """The packages with an adapter that dies so many times before it runs."""
    shutil.copytree(tools.triton, folder / "triton", copy_function=os.symlink)
    program = folder / "triton" / ADAPTER
    program.unlink()
    program.write_text(
        f'#!/bin/sh\necho >> {folder}/runs\n[ "$(wc -l < {folder}/runs)" -gt {deaths} ] || kill -SEGV $$\n'
        f'exec {tools.adapter} "$@"\n'
    )
    program.chmod(0o755)
    return replace(tools, triton=folder / "triton")


@pytest.mark.parametrize("deaths", [1, 3])
def test_an_adapter_that_dies(deaths: int, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then it does: the third time is taken at its word."""
    tools = dying(fetched(), tmp_path, deaths)
    monkeypatch.setattr(compiling, "fetched", lambda: tools)
    found = probe("good", 256)
    assert (tmp_path / "runs").read_text().count("\n") == min(deaths + 1, compiling.ATTEMPTS)
    if deaths < compiling.ATTEMPTS:
        assert isinstance(found, Compiled)
    else:
        assert found == Refused("Ascend910B3", "the adapter was ended 3 times by signal 11", None, sure=False)


def test_a_step_that_does_not_end(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 0.001)
    found = probe("good", 256)
    assert isinstance(found, Refused) and found.reason.endswith("has not ended after 0.001 s")
    assert not fresh.exists(), "an outcome of this moment is not kept"


def test_the_public_names() -> None:
    assert {"Compiled", "Finding", "Overflow", "Refused", "TritonSource", "audit", "compile_for"} <= set(
        lowering.__all__
    )
