"""Cases of attention over residual streams."""

from __future__ import annotations

from collections.abc import Callable

from .case import Arguments, Case, Draw


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for name, shape in {
        "tiny": (5, 3, 24),
        "first": (4, 0, 16),
        "awkward": (1, 8, 33),
        "empty": (0, 2, 8),
        "prompt_128": (128, 8, 7168),
        "decode_8": (8, 8, 7168),
    }.items():
        wide = shape[2] == 7168
        made.append(Case("attention_residual", name, _residual(*shape), length=shape[2], bench=wide))
    return made


def _residual(tokens: int, snapshots: int, hidden: int) -> Callable[[Draw], Arguments]:
    # Scores are some units apart: rows count for much and for little.
    def make(draw: Draw) -> Arguments:
        rows = draw.normal(tokens, snapshots, hidden) * 3, draw.normal(tokens, hidden)
        return (*rows, draw.normal(hidden), draw.normal(hidden) * 2 / hidden**0.5), {"eps": 1e-5}

    return make
