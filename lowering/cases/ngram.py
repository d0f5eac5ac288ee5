"""Cases of n-gram embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .case import ROWS, VERIFY, Arguments, Case, Draw, RowCounts


def _hashed(rows: RowCounts, *, context: bool, keep_steps: bool) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        before = draw.ids(9, len(rows.counts) + 1, 2) if context else None
        places = [torch.arange(count) + past * context for past, count in zip(rows.past, rows.counts, strict=True)]
        positions = torch.cat([*places, torch.zeros(rows.padding, dtype=torch.int64)])
        kwargs = {"multipliers": (3, 2**40 + 1, 7), "sizes": (11, 13, 17, 19), "offsets": (0, 11, 24, 41), "end": 2}
        return (draw.ids(9, rows.tokens), before, positions, rows.made()), kwargs | {"keep_steps": keep_steps}

    return make


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for rows in (*ROWS, VERIFY):
        for context, keep in ((False, False), (True, False), (True, rows is VERIFY)):
            tail = ("_context" if context else "") + ("_keep" if keep else "")
            made.append(Case("ngram_rows", f"{rows.name}{tail}", _hashed(rows, context=context, keep_steps=keep)))
    made.append(Case("table_rows", "tiny", lambda draw: ((draw.ids(60, 5, 4), draw.normal(60, 3)), {})))

    def gate(draw: Draw) -> Arguments:
        return (draw.normal(5, 3, 8), draw.normal(5, 3, 8), draw.normal(5, 8)), {}

    made.append(Case("ngram_gate", "tiny", gate, 8))
    return made
