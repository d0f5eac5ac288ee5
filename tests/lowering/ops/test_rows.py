"""Rows as a value: from the flat token axis to a rectangle and back, and what of them a choice of kernel may see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import ROWS, RowCounts


@pytest.mark.parametrize("counts", ROWS, ids=lambda rows: rows.name)
def test_a_rectangle_and_back(counts: RowCounts) -> None:
    """Each row's tokens stand in its line, zeros behind them; padding comes back as zeros."""
    rows, x = counts.made(), torch.arange(1.0, 1 + 2 * counts.tokens).view(-1, 2)
    live, line = sum(counts.counts), rows.rectangle(x)
    for row, (count, part) in enumerate(zip(counts.counts, x[:live].split(counts.counts), strict=True)):
        assert torch.equal(line[row, :count], part) and not line[row, count:].any()
        assert rows.inside[row].sum() == count and rows.of_tokens(counts.tokens).tolist().count(row) == count
    assert torch.equal(rows.flat(line, counts.tokens)[:live], x[:live])
    assert not rows.flat(line, counts.tokens)[live:].any()


def test_the_key_is_of_shapes_dtypes_hints_and_what_the_host_knows() -> None:
    table = torch.zeros(3, 4, dtype=torch.int32)
    rows = RowCounts("verify", (4, 4, 4), (5, 2, 0)).made(table, ((1, 2, 3), (4, 5), (6,)))
    assert rows.host is not None and rows.lengths is not None
    assert rows.static_key() == replace(rows, lengths=rows.lengths + 1).static_key()
    others = [
        rows.alone(), replace(rows, max_query=5), replace(rows, uniform=False), replace(rows, page_table=table[:, :3]),
        replace(rows, lengths=rows.lengths.long()), replace(rows, host=replace(rows.host, exact=False)),
        replace(rows, query_start=rows.query_start[:3]),
    ]  # fmt: skip
    assert len({rows.static_key(), *(other.static_key() for other in others)}) == 1 + len(others)


def test_rows_without_a_state_hold_no_pages() -> None:
    with pytest.raises(ValueError, match="rows without lengths and a page table hold no pages; give those of a state"):
        RowCounts("alone", (2,), (0,)).made().past  # noqa: B018
