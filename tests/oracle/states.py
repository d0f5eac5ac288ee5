"""What tests of states share: runs of a schedule, comparisons of rows, and NaN in every place nobody may read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import params
from funcmodels.state.state import Appended, State
from lowering.layouts import NzPages
from tests.tolerances import assert_close

Ids = Sequence[Sequence[int]]

ROUNDING = "the same sums run at other row counts, in another order, layer after layer"
"""Why results of one model may differ by more than one operation's bound."""


def refuses(error: type[Exception], message: str) -> Any:
    """Expects `error` for a value of the wrong type; where shapes are checked, the check's `TypeError` comes first."""
    if os.environ.get("FUNCMODELS_HOOK") == "1":
        return pytest.raises((error, TypeError))
    return pytest.raises(error, match=re.escape(message))


def advance(pair: Any, state: State, ids: Ids, **kwargs: Any) -> tuple[Any, State]:
    """A forward of one list of new tokens a row."""
    out, after = pair.model.forward(pair.params, state, fm.Batch.from_lists(ids, state), **kwargs)
    assert after is not None
    return out, after


def per_row(flat: Tensor, ids: Ids) -> list[Tensor]:
    """[tokens ...] cut into rows; padding behind them is dropped."""
    counts = [len(row) for row in ids]
    return list(flat[: sum(counts)].split(counts))


def run_schedule(pair: Any, state: State, ids: Ids, schedule: Sequence[Sequence[int]]) -> tuple[list[Tensor], State]:
    """Feed each row its tokens, `schedule[call][row]` at a time; the logits of each row, and the last state."""
    taken = [0] * len(ids)
    logits: list[list[Tensor]] = [[] for _ in ids]
    for counts in schedule:
        new = [row[at : at + count] for row, at, count in zip(ids, taken, counts, strict=True)]
        out, state = advance(pair, state, new)
        taken = [at + count for at, count in zip(taken, counts, strict=True)]
        for row, part in enumerate(per_row(out.logits, new)):
            logits[row].append(part)
    assert taken == [len(row) for row in ids], "the schedule must feed every token"
    return [torch.cat(parts) for parts in logits], state


def assert_rows_close(actual: State, expected: State, rows: Sequence[tuple[int, int]] | None = None) -> None:
    """Every logical entry of the paired rows (all rows by default) agrees."""
    for one, two in rows or [(row, row) for row in range(expected.rows)]:
        assert_close(fm.logical(actual, one), fm.logical(expected, two), looser=5, reason=ROUNDING)


def poison(state: State) -> State:
    """The state with NaN in the scratch page, in every page and slot that no row holds, and in the scratch slots."""
    held = torch.zeros(state.ledger.leases[0].pool.pages + 1, state.page_size, dtype=torch.bool)
    for row in range(state.rows):
        at = torch.arange(int(state.lengths[row]))
        held[state.page_table[row].long()[at // state.page_size], at % state.page_size] = True

    def unread_pages(pages: Any) -> Any:
        if isinstance(pages, NzPages):
            return NzPages(pages.values.masked_fill(~held[:, None, :, None], torch.nan))
        # An entry of several tokens is read once all of them are there.
        whole = held.unflatten(1, (pages.shape[1], -1)).all(-1)
        return pages.masked_fill(~whole.reshape(*whole.shape, *(1,) * (pages.ndim - 2)), torch.nan)

    def unread_slot(slots: Tensor) -> Tensor:
        fill = torch.nan if slots.is_floating_point() else -1
        return torch.cat((slots[:-1], torch.full_like(slots[-1:], fill)))

    def unread(entry: Any) -> Any:
        if isinstance(entry, Appended):
            return params.tree_map(unread_pages, entry, is_leaf=lambda part: isinstance(part, NzPages))
        return params.tree_map(unread_slot, entry)

    return params.put(state, "layers", tuple(unread(entry) for entry in state.layers))
