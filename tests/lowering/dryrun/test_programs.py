"""Small models of every family in the device check: rehearsed through the references, with faults that are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from funcmodels.model import FAMILIES
from funcmodels.testing import programs
from lowering import __main__ as commands
from lowering import npu_reference
from lowering.check import journal
from lowering.check import programs as entered
from lowering.check.programs import PROGRAMS, ModelPhase
from lowering.npu_reference import registration
from lowering.target import TARGETS

CPU, A3, A5 = torch.device("cpu"), TARGETS["ascend910_93"], TARGETS["ascend950"]
BY_NAME = {(program.model, program.phase): program for program in PROGRAMS}


@pytest.fixture(autouse=True)
def operators() -> None:
    npu_reference.load()


def test_every_family_in_every_phase() -> None:
    built = {id(programs.build(config).family) for config in programs.CONFIGS.values()}
    assert built == {id(family) for family in FAMILIES.values()}
    assert BY_NAME.keys() == {(name, phase) for name in programs.CONFIGS for phase in programs.PHASES}


@pytest.mark.plain
@pytest.mark.parametrize("phase", ["chunk", "verify"])
@pytest.mark.parametrize("name", programs.CONFIGS)
def test_models_hold_through_the_references(name: str, phase: str) -> None:
    found = BY_NAME[name, phase].tried(CPU, A3 if phase == "chunk" else A5)
    assert found.ok and found.error and found.seconds, found
    assert (found.op, found.kernel, found.case, found.dtype) == (name, "those chosen", phase, "bfloat16")


@pytest.mark.plain
def test_a_captured_model_holds() -> None:
    assert BY_NAME["qwen3", "captured"].tried(CPU, A3).ok


def test_a_wrong_operator_is_found_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tenth more than it should give; what raises is told in words, and no other shape passes."""
    right = registration.OPERATORS["npu_swiglu"]
    wrong = replace(right, run=lambda **arguments: right.run(**arguments) * 1.1)
    monkeypatch.setitem(registration.OPERATORS, "npu_swiglu", wrong)
    program = BY_NAME["qwen3", "decode"]
    found = program.tried(CPU, A3)
    assert found.error is not None and found.bound is not None and found.bound < found.error < 0.2 and not found.ok
    monkeypatch.setitem(registration.OPERATORS, "npu_swiglu", replace(right, run=lambda **_: {}["lost"]))
    assert "lost" in (program.tried(CPU, A3).failed or "")
    other = ModelPhase("m", "p", lambda dtype, device: torch.ones(2), lambda dtype, device: torch.ones(3))
    assert "gives shape [2], expected [3]" in (other.tried(CPU, A3).failed or "")
    nan = ModelPhase("m", "p", lambda dtype, device: torch.full((3,), torch.nan), other.plain)
    assert nan.tried(CPU, A3).error == float("inf")


def test_the_command_runs_programs_behind_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few: list[Any] = [ModelPhase(name, "p", lambda *_: torch.ones(3), lambda *_: torch.ones(3)) for name in ("a", "b")]
    monkeypatch.setattr(commands, "PROGRAMS", few)
    stem = tmp_path / "x"

    def here(command: list[str], book: journal.Journal, *_: Any) -> int:
        asked = [word for word in command if word.startswith(("--only", "--target", "--cann"))]
        return commands.main(["check", "--worker", f"--output={stem}", *asked])

    monkeypatch.setattr(commands, "supervise", here)
    for flags, models, kernels in (["--only=a"], 1, 0), (["--only=geglu", "--only=b"], 1, 1), (["--only=geglu"], 0, 1):
        asked = [*flags, "--target=ascend950", "--cann=9.0.0"]
        assert commands.main(["check", "--output", str(stem), *asked]) == 0
        out, err = capsys.readouterr()
        found, _ = journal.Journal(Path(f"{stem}.jsonl")).read()
        assert found is not None and found.models == models and found.environment["CANN"] == "9.0.0"
        assert sum(x.kernel == entered.KERNELS for x in found.outcomes) == models
        assert any(x.op == "geglu" for x in found.outcomes) == bool(kernels) and ("npu_geglu" in out) == bool(kernels)
        assert "to send back" in err and ("no model was run" in err) == (models == 0) and "min left" in err
