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
SIZES = [
    pytest.param(2, tuple(KINDS), id="2"),
    pytest.param(4, ("qwen_moe", "kimi_linear"), id="4"),
    pytest.param(4, tuple(KINDS), id="4-every-family", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("size", "kinds"), SIZES)
def test_ranks_together_are_the_whole_model(size: int, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Over prompts, idle rows, decoding and a verified window, in a captured step, greedy and sampled generation."""
    for code, said in launch(size, ["-m", "tests.sharding.worker", str(tmp_path), *kinds]):
        assert code == 0, said
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size))
    assert all(other == first for other in others), "ranks differ, so that they could sample different tokens"
    mine, whole = first.pop("quantised")
    assert 0 < mine < 1.5 * whole, "int8 on ranks is as near to float32 as on one device"
    if "gemma3" in first:
        check_refusals(first["gemma3"]["refused"], size)
    for kind, measured in first.items():
        far = {name: measured[name] for name in ("logits", "hidden", "states", "captured") if measured[name] > NEAR}
        assert not far, f"{kind}: {far}"
        assert measured["ops"] == ["all_gather", "all_reduce"]
        for name in ("tokens", "block tokens"):
            ranks, alone = measured[name]
            assert ranks == alone, f"{kind}: {name}"
        for draft, proposal in measured["drafts"].items():
            check_drafts(f"{kind}: {draft}", proposal, at_once=draft in ("dflash", "plain"), plain=draft == "narrow")


def check_refusals(said: list[str], size: int) -> None:
    """Every rank says the same of a call that is not the same on all; the last one of them is, and runs."""
    ways = ("prompt", "the number of prompts", "sampling", "max_new_tokens", "page_size", "eos", "rows")
    last = {"the number of prompts", "page_size", "rows"}
    for text, way in zip(said, ways, strict=False):
        rank = size - 1 if way in last else 1
        assert text.startswith(f"ranks 0 and {rank} of {size} were given what differs in {way};"), text
    assert said[len(ways) : -1] == ["one refused"] * 2
    assert said[-1].count(",") == 1


def check_drafts(name: str, proposal: dict[str, Any], at_once: bool, plain: bool) -> None:
    """Greedy drafts are the whole model's, and no rank hears more of another than a value and an id for each.

    Every choice is the first rank's: one for a block whose places are independent, else one for each place. A draft
    with a vocabulary of its own, and drawn ones, read the logits of all.
    """
    whole, *found = proposal["tokens"]
    assert all(tokens == whole for tokens in found), name
    assert proposal["greedy"]["agreed"] == (1 if at_once else 2), name
    assert proposal["sampled"]["agreed"] == 2, name
    assert (proposal["greedy"]["widest"] == 1) == (not plain), name
    assert proposal["sampled"]["widest"] > 1, name


def test_a_rank_that_dies_is_reported(tmp_path: Path) -> None:
    """The other ends with an error that names the group, well within the time that it would wait; captured too."""
    (code, said), (dead, _) = launch(2, ["-m", "tests.sharding.worker"], limit=90, DIES="1")
    assert dead == 3
    assert code == 1
    captured, _, rest = said.partition("|")
    assert captured.startswith("a captured program: a rank did not answer"), said
    assert "partly overwritten by a captured call that failed" in rest.splitlines()[0]
    assert "CollectiveError: all_reduce: a rank of group" in rest, said


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
