"""An engine: the way of a prompt through it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import funcmodels as fm
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
