"""The way of a prompt through an engine, and its scheduler alone."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import funcmodels as fm
from funcmodels.serving.prefixes import Beginning, plan
from funcmodels.serving.scheduler import Continuation, Offer, Scheduler
from tests.sharding.kinds import whole

ROOT = Path(fm.__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DECORATORS = ROOT / "params" / "modes.py"
"""`lasting` does nothing outside of `torch.inference_mode()`: what wraps a function is no door."""


def doors(draft: str | None, window: bool) -> list[tuple[str, str]]:
    """The calls of ours from `fm.generate` to the family's forward, which raises: of a window, or of a prompt."""
    model, params = whole("qwen_dense")
    inner = model.family.forward

    def forward(*args: Any, keep_steps: bool, **kwargs: Any) -> Any:
        assert keep_steps != window, "raised here"
        return inner(*args, keep_steps=keep_steps, **kwargs)

    raising = replace(model, family=replace(model.family, forward=forward))
    with pytest.raises(AssertionError, match="raised here") as raised:
        fm.generate(raising, params, [[1, 2]], 4, draft, eos=())
    calls = [(Path(entry.path), entry.name) for entry in raised.traceback]
    ours = [(path.relative_to(ROOT), name) for path, name in calls if path.is_relative_to(ROOT) and path != DECORATORS]
    found = [(path.as_posix(), name) for path, name in ours if path.parts[0] in ("funcmodels", "lowering", "params")]
    return [*found, ("funcmodels/models/qwen3_5.py", "forward")]


@pytest.mark.plain  # checks would stand between
@pytest.mark.parametrize(("draft", "window"), [(None, False), ("mtp", False), ("mtp", True)])
def test_seven_doors_from_generate_to_forward(draft: str | None, window: bool) -> None:
    """Those that the page on the architecture names, in its order; with a draft as many."""
    table = PAGE.partition("## A prompt")[2].partition("And back:")[0]
    named = re.findall(r"^\| `(?:\w+[.])?(\w+)` \| `([\w/.]+)` \|", table, re.MULTILINE)
    found = doors(draft, window)
    assert len(found) == len(named) == 7
    if draft is None:
        assert [(name, file) for file, name in found] == named


def following(text: list[int]) -> int:
    """Stands for a model: a token that every token before it has a part in."""
    return sum(token * (3 + place) for place, token in enumerate(text)) % 7


def played(requests: list[fm.Request], rows: int, chunk: int, keeps: bool) -> dict[int, list[int]]:
    """What comes out where rows are lists, which must hold what they are said to."""
    shares = plan([request.prompt for request in requests], 2)
    waiting = [Continuation(at, *each) for at, each in enumerate(zip(requests, shares, strict=True))]
    scheduler, table = Scheduler(waiting, rows, chunk, keeps), [list[int]() for _ in range(rows)]
    held: dict[Beginning, list[int]] = {}
    found: dict[int, list[int]] = {}
    rounds = iter(range(500))
    while scheduler.unfinished:
        assert next(rounds, None) is not None, "a row waits for what nobody runs"
        change = scheduler.refill()
        table = [[] if place in change.ended else table[place] for place in change.kept]
        for copy in change.copies:
            source = held.pop(copy.beginning) if copy.source is None else table[copy.source]
            for place in copy.takers:
                table[place] = source[: copy.beginning[1]]
            if copy.more:
                held[copy.beginning] = list(source)
        turns = scheduler.turns()
        table = [[*row, *turn.tokens] for row, turn in zip(table, turns, strict=True)]
        assert all(len(turn.tokens) <= chunk for turn in turns)
        drawn = [len(turn.tokens) > len(turn.following) for turn in turns]
        offers = [Offer([following(row)]) if one else Offer() for row, one in zip(table, drawn, strict=True)]
        found |= {event.request: event.result.tokens for event in scheduler.take(offers) if event.result}
    assert not held
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_scheduler_gives_every_row_what_it_asked_for(seed: int) -> None:
    """Prompts that share many beginnings, in few rows and many, in pieces of any size."""
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(2) for _ in range(draw.randint(1, 9))) for _ in range(draw.randint(1, 14))]
    requests = [fm.Request(prompt, draw.randint(1, 5)) for prompt in (sorted(prompts) if seed % 2 else prompts)]
    found = played(requests, draw.randint(1, len(requests)), draw.choice([1, 2, 3, 20]), seed % 3 == 0)
    for at, request in enumerate(requests):
        text = list(request.prompt)
        while len(text) < len(request.prompt) + request.max_new_tokens:
            text.append(following(text))
        assert text == [*request.prompt, *found[at]]
