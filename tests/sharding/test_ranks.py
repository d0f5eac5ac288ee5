"""Ranks in processes of their own, connected by gloo: together they are the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from funcmodels.cli import main
from tests import tiny
from tests.sharding.kinds import KINDS
from tests.sharding.launch import launch

pytestmark = pytest.mark.plain
NEAR = 3e-5
"""Sums of float32 in another order, in units of the largest value."""
SIZES = {2: tuple(KINDS), 4: ("qwen_moe", "gemma3", "kimi_linear")}


@pytest.fixture(scope="module", params=SIZES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("ranks")
    for code, said in launch(request.param, ["-m", "tests.sharding.worker", str(out), *SIZES[request.param]]):
        assert code == 0, said
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_ranks_together_are_the_whole_model(found: list[dict[str, Any]]) -> None:
    """Logits, hidden states and states put together, over prompts, idle rows, decoding and a verified window."""
    for rank, kinds in enumerate(found):
        for kind, measured in kinds.items():
            far = {name: measured[name] for name in ("logits", "hidden", "states", "captured") if measured[name] > NEAR}
            assert not far, f"{kind} on rank {rank}: {far}"
            assert measured["ops"] == ["all_gather", "all_reduce"]


def test_tokens_are_those_of_the_whole_model_on_every_rank(found: list[dict[str, Any]]) -> None:
    """Greedy and sampled ones, with a draft head where there is one."""
    for kinds in found:
        for kind, measured in kinds.items():
            mine, theirs = measured["tokens"]
            assert mine == theirs, kind


def test_ranks_have_the_same_bits(found: list[dict[str, Any]]) -> None:
    """What they sample from cannot differ."""
    assert all(kinds == found[0] for kinds in found[1:])


def test_a_rank_that_dies_is_reported(tmp_path: Path) -> None:
    """The others end with an error that names the group, well within the time that they would wait."""
    (code, said), (dead, _) = launch(2, ["-m", "tests.sharding.worker", str(tmp_path), "gemma3"], limit=90, DIES="1")
    assert dead == 3
    assert code == 1
    assert "did not answer" in said, said


def test_the_command_line_on_two_ranks(tmp_path: Path) -> None:
    """Only the first rank says something, and its text is that of one process."""
    model = str(tiny.write(tmp_path / "model"))
    command = ["-m", "funcmodels", "generate", "--model", model, "--max-new-tokens", "5", "--prompt", "def read"]
    (code, alone), *_ = launch(1, command)
    (first, said), (second, silent) = launch(2, [*command, "--tp", "2"])
    assert (code, first, second) == (0, 0, 0), said
    assert said.splitlines()[0] == alone.splitlines()[0]
    assert "all_reduce" in said
    assert not silent


def test_ranks_that_nobody_started(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says how to start them."""
    assert main(["generate", "--tp", "2", "--prompt", "x"]) == 2
    assert "torchrun --nproc-per-node 2 -m funcmodels" in capsys.readouterr().err
