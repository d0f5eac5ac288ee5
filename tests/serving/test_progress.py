"""What a terminal shows while prompts are run, and that nothing else is shown anywhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

import funcmodels as fm
from funcmodels.serving import progress
from params import tree
from tests import tiny

PROMPTS = [[5, 9], [100], [17, 30, 44]]


@pytest.fixture(scope="module")
def loaded() -> tuple[fm.Model, Any]:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = fm.build({"model_type": "qwen3_5_text", **tiny.SIZES, **layers})
    return model, model.init_params(seed=1)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What standard error would show if it were a terminal, of people without patience."""
    shown = io.StringIO()

    monkeypatch.setattr(progress, "_terminal", lambda: Console(file=shown, force_terminal=True, width=140))
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    return shown


def lines(shown: io.StringIO) -> list[str]:
    """Without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).replace("\r", "\n").split("\n")


def test_a_bar_counts_prompts_and_tokens(loaded: tuple[fm.Model, Any], terminal: io.StringIO) -> None:
    fm.generate(*loaded, PROMPTS, 5, eos=(), rows=2, page_size=8)
    last = [line for line in lines(terminal) if "prompts" in line][-1]
    assert "3/3 prompts, 15 tokens" in last and re.search(r"\d tokens/s", last)
    state = fm.serve(*loaded, [fm.Request((1, 2, 3), 5)] * 3, rows=2, page_size=8).state_bytes
    assert f"state {tree.size(state)}" in last


def test_nothing_is_shown_for_what_is_soon_over(
    loaded: tuple[fm.Model, Any], terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 1e9)
    fm.generate(*loaded, PROMPTS, 2, eos=())
    assert terminal.getvalue() == ""


def test_a_stream_takes_the_place_of_the_bar(loaded: tuple[fm.Model, Any], terminal: io.StringIO) -> None:
    events: list[fm.Event] = []
    fm.generate(*loaded, PROMPTS, 2, eos=(), stream=events.append)
    assert terminal.getvalue() == "" and len(events) == 6


@pytest.mark.parametrize("streamed", [False, True])
def test_captures_are_told(streamed: bool, terminal: io.StringIO, loaded: tuple[fm.Model, Any]) -> None:
    """Once each: the engine's next call says nothing of them."""
    engine = fm.Engine(*loaded, backend="fx")
    options: dict[str, Any] = {"eos": (), "stream": (lambda event: None) if streamed else None}
    engine.generate([[1]], 2, **options)
    assert any("capturing a step" in line for line in lines(terminal))
    before = len(terminal.getvalue())
    engine.generate([[2]], 2, **options)
    assert "capturing" not in terminal.getvalue()[before:]


def test_what_is_no_terminal_shows_nothing(
    loaded: tuple[fm.Model, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    fm.generate(*loaded, PROMPTS, 3, eos=(), backend="fx")
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.plain  # checks would refuse the parameters before the run fails
def test_the_bar_goes_when_a_run_fails(loaded: tuple[fm.Model, Any], terminal: io.StringIO) -> None:
    model, params = loaded
    broken = tree.put(params, "norm.weight", params.norm.weight[1:])
    watch = progress.WATCH.get()
    with pytest.raises(RuntimeError, match="size"):
        fm.generate(model, broken, PROMPTS, 2)
    assert progress.WATCH.get() is watch


def test_states_are_as_large_as_said(loaded: tuple[fm.Model, Any]) -> None:
    """Two layers: one of two heads of 16 numbers, keys and values; one of 4 heads of 8 x 8 and 3 x 64 inputs."""
    for rows, page, new in ((2, 8, 5), (3, 16, 30)):
        requests = [fm.Request((1, 2, 3), new)] * 4
        found = fm.serve(*loaded, requests, rows=rows, page_size=page)
        width = -(-(3 + new) // page)
        pools = 2 * (rows * width + 1) * page * 2 * 16 * 4
        recurrent = (rows + 1) * (4 * 8 * 8 + (2 * 2 * 8 + 4 * 8) * 3) * 4
        assert found.state_bytes == pools + recurrent + 4 * (rows + rows * width)
