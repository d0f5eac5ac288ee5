"""The short convolution, tap by tap in float64, with windows, splits and trails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowering import ops
from lowering.ops import WindowTrail
from tests.cases import ROWS, Draw, RowCounts
from tests.tolerances import assert_close


def convolved(x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """One row in float64: outputs, and the window after the last token."""
    channels, width = weight.shape
    inputs = torch.cat((window.double(), x.double()))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for c in range(channels):
            y = sum(weight[c, j].double() * inputs[t + j, c] for j in range(width))
            out[t, c] = y / (1 + torch.exp(-torch.as_tensor(y)))
    return out, inputs[inputs.shape[0] - (width - 1) :]


def call(rows: RowCounts, x: Tensor, weight: Tensor, window: Tensor | None, **kwargs: Any) -> Any:
    """`short_conv` over these rows."""
    return ops.short_conv(x, weight, window, rows.made(), **{"keep_steps": False, **kwargs})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("rows", ROWS[:-1], ids=lambda rows: rows.name)
def test_outputs_and_windows(rows: RowCounts, width: int, dtype: torch.dtype) -> None:
    """Ragged, idle and padded rows; the window is exact, an idle row's is its old one, and so is the scratch slot."""
    draw = Draw(dtype)
    x, weight = draw.normal(rows.tokens, 3), draw.normal(3, width)
    window = draw.normal(len(rows.counts) + 1, width - 1, 3)
    before, start = window.clone(), rows.query_start()
    y, after, trail = call(rows, x, weight, window)
    assert trail is None and torch.equal(window, before)
    assert after.dtype == window.dtype
    for row in range(len(rows.counts)):
        part = slice(int(start[row]), int(start[row + 1]))
        expected, last = convolved(x[part], weight, window[row])
        assert_close(y[part], expected.to(dtype), length=width)
        assert torch.equal(after[row], last.to(dtype))
    assert not y[int(start[-1]) :].any()
    fresh, none, _ = call(rows, x, weight, None)
    assert none is None
    zeros, _, _ = call(rows, x, weight, torch.zeros_like(window))
    assert torch.equal(fresh, zeros)


@pytest.mark.parametrize("splits", [(11,), (8, 3), (8, 1, 1, 1), (1, 10), (2, 9), (1, 1, 9), (3, 3, 5)])
def test_a_split_prompt_is_the_whole_prompt(splits: tuple[int, ...]) -> None:
    """Splits shorter than the window first: the window is part old, part new."""
    draw = Draw(torch.float32)
    x, weight, window = draw.normal(11, 5), draw.normal(5, 4), torch.zeros(2, 3, 5)
    whole, last, _ = call(RowCounts("whole", (11,), (0,)), x, weight, window)
    parts = []
    for count, part in zip(splits, x.split(splits), strict=True):
        y, window, _ = call(RowCounts("part", (count,), (0,)), part, weight, window)
        parts.append(y)
    assert_close(torch.cat(parts), whole, length=4)
    assert torch.equal(window[0], last[0])


@pytest.mark.parametrize("counts", [(4, 4, 4), (3, 0, 1)], ids=["uniform", "ragged"])
def test_a_trail_stands_after_any_token(counts: tuple[int, ...]) -> None:
    """For every accepted count of every row; the state's own dtype is the caller's to restore."""
    draw, rows = Draw(torch.float32), RowCounts("verify", counts, (5, 2, 0), padding=0 if counts[1] else 2)
    x, weight, window = draw.normal(rows.tokens, 5), draw.normal(5, 4), draw.normal(4, 3, 5)
    y, kept, trail = call(rows, x, weight, window, keep_steps=True)
    assert_close(y, call(rows, x, weight, window)[0], length=4)
    assert torch.equal(kept, window) and isinstance(trail, WindowTrail)
    start = rows.query_start()
    for accepted in range(max(counts) + 1):
        taken = torch.tensor([min(accepted, count) for count in counts], dtype=torch.int32)
        found = trail.at(taken, 3)
        for row, count in enumerate(taken.tolist()):
            new = x[int(start[row]) : int(start[row]) + count]
            assert torch.equal(found[row], torch.cat((window[row], new))[-3:])


def test_nothing_reads_padding() -> None:
    """NaN in padding and in the scratch slot reaches no live output or window."""
    draw, rows = Draw(torch.float32), RowCounts("padded", (2, 0, 5), (1, 1, 1), padding=3)
    x, weight, window = draw.normal(rows.tokens, 5), draw.normal(5, 4), draw.normal(4, 3, 5)
    y, after, _ = call(rows, x, weight, window)
    x[7:], window[-1] = torch.nan, torch.nan
    y2, after2, _ = call(rows, x, weight, window)
    assert torch.equal(y[:7], y2[:7]) and torch.equal(after[:-1], after2[:-1])
