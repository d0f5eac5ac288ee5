"""Attention, head by head in float64, ragged and paged; nothing reads what no row holds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import Policy, ops
from lowering.host import HostLengths
from lowering.op import Op
from tests.cases import ROWS, VERIFY, Draw, Rows, paged
from tests.each import each
from tests.tolerances import assert_close

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(8, 2, 16, 16), (3, 1, 24, 16), (4, 4, 8, 12)]
EVERY_ROWS = [*ROWS, VERIFY]
DTYPES = (torch.float32, torch.bfloat16)


def row_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """The newest tokens of one row over all it has, or a window: q [queries heads dim], k and v [keys kv_heads dim]."""
    queries, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    out = torch.zeros(queries, heads, v.shape[2], dtype=torch.float64)
    for h in range(heads):
        kv = h // (heads // k.shape[1])
        for i in range(queries):
            end = keys - queries + i + 1
            seen = slice(0 if window is None else max(end - window, 0), end)
            weights = (k[seen, kv].double() @ q[i, h].double() * scale).softmax(0)
            out[i, h] = weights @ v[seen, kv].double()
    return out


def kernels_for(op: Op, args: Any, kwargs: Any) -> list[str]:
    """Names of the kernels that take this call, the reference among them."""
    kernels = op.serving("cpu")
    return [kernel.name for kernel in kernels if kernel.refuse is None or kernel.refuse(*args, **kwargs) is None]


def parts(*case: Any) -> list[tuple[int, Any]]:
    """What is checked once in a hooked run: every part of a case, not all of them together."""
    return list(enumerate(case))


def held(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """A row's entries, one after the other."""
    page_size = pool.shape[1]
    return (
        torch.stack([pool[table[at // page_size], at % page_size] for at in range(length)]) if length else pool[0, :0]
    )


@each(product(EVERY_ROWS, SHAPES, DTYPES), hooked=parts)
def test_attention(rows: Rows, shape: Shape, dtype: torch.dtype) -> None:
    """Every kernel; rows do not see each other; padding gets zeros."""
    check_attention(rows, shape, dtype, None)


def check_attention(rows: Rows, shape: Shape, dtype: torch.dtype, window: int | None) -> None:
    heads, kv_heads, head_dim, v_dim = shape
    draw, start = Draw(dtype), rows.query_start()
    q, k = draw.normal(rows.tokens, heads, head_dim), draw.normal(rows.tokens, kv_heads, head_dim)
    v = draw.normal(rows.tokens, kv_heads, v_dim)
    expected = torch.zeros(rows.tokens, heads, v_dim, dtype=torch.float64)
    for row in range(len(rows.counts)):
        part = slice(int(start[row]), int(start[row + 1]))
        expected[part] = row_attention(q[part], k[part], v[part], 0.3, window)
    args, kwargs = (q, k, v, start), {**rows.hints(), "scale": 0.3, "window": window}
    for name in kernels_for(ops.attention, args, kwargs):
        with lowering.use(attention=name):
            assert_close(ops.attention(*args, **kwargs), expected, length=sum(rows.counts), dtype=dtype)


@each(product(EVERY_ROWS, SHAPES, (False, True), DTYPES), hooked=parts)
def test_paged_attention(rows: Rows, shape: Shape, shuffled: bool, dtype: torch.dtype) -> None:
    """Every kernel; every page and slot that no row holds is NaN and reaches nothing; padding gets zeros."""
    check_paged(rows, shape, shuffled, dtype, 4, None)


def check_paged(
    rows: Rows, shape: Shape, shuffled: bool, dtype: torch.dtype, page_size: int, window: int | None
) -> list[str]:
    """Names of the kernels that took the call."""
    args, kwargs = paged(rows, *shape, page_size, shuffled=shuffled)(Draw(dtype))
    q, k_pages, v_pages, table, lengths, start, _ = args
    expected = torch.zeros(rows.tokens, shape[0], shape[3], dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        part = slice(int(start[row]), int(start[row + 1]))
        k, v = (held(pool, table[row], length) for pool in (k_pages, v_pages))
        expected[part] = row_attention(q[part], k, v, kwargs["scale"], window)
    kwargs["window"] = window
    names = kernels_for(ops.paged_attention, args, kwargs)
    for name in names:
        with lowering.use(paged_attention=name):
            assert_close(ops.paged_attention(*args, **kwargs), expected, length=int(lengths.max()), dtype=dtype)
    return names


LONG_ROWS = [*EVERY_ROWS, Rows("long_past", (1, 9, 0, 3), (70, 64, 50, 5), padding=2)]


@each(product(EVERY_ROWS, (1, 2, 5, 63, 64, 129, 1000), DTYPES), hooked=parts)
def test_attention_over_a_window(rows: Rows, window: int, dtype: torch.dtype) -> None:
    """Windows of one token, around the blocks that kernels work in, and longer than any row."""
    check_attention(rows, SHAPES[window % 3], dtype, window)


@each(
    product(LONG_ROWS, (1, 2, 4, 5, 13, 63, 64, 1000), (1, 3, 4, 64), (False, True)),
    by=lambda rows, window, page_size, shuffled: f"pages of {page_size}",
    hooked=parts,
)
def test_paged_attention_over_a_window(rows: Rows, window: int, page_size: int, shuffled: bool) -> None:
    """Pages that end before, at and inside a window; scattered ones leave NaN wherever nobody may read."""
    dtype = torch.bfloat16 if window in (5, 13) else torch.float32
    names = check_paged(rows, SHAPES[window % 3], shuffled, dtype, page_size, window)
    assert ("torch_window" in names) == (
        2 + (window + max(rows.counts) - 3) // page_size < 1 + most_pages(rows, page_size)
    )


def most_pages(rows: Rows, page_size: int) -> int:
    return max(-(-(past + count) // page_size) for past, count in zip(rows.past, rows.counts, strict=True))


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", ["torch", "torch_rows", "torch_window"])
def test_a_window_of_one_token_more_or_fewer_is_noticed(name: str, off: int) -> None:
    """In every row that is longer than the window, of one new token and of several."""
    rows = Rows("rows", (1, 9, 4), (30, 28, 20))
    args, kwargs = paged(rows, 4, 2, 16, 16, 4, shuffled=True)(Draw(torch.float32))
    with lowering.use(paged_attention=name):
        right, wrong = (ops.paged_attention(*args, **kwargs, window=window) for window in (6, 6 + off))
    for x, y in zip(right.split(rows.counts), wrong.split(rows.counts), strict=True):
        with pytest.raises(AssertionError, match="difference"):
            assert_close(x, y, length=30)


@pytest.mark.parametrize("name", ["torch_rows", "torch_window"])
def test_keys_before_a_window_are_not_read(name: str) -> None:
    """Pages that lie whole before every window may hold NaN."""
    rows = Rows("rows", (1, 3, 12), (40, 33, 50))
    args, kwargs = paged(rows, 4, 2, 16, 16, 4, shuffled=True)(Draw(torch.float32))
    _, k_pages, v_pages, *_, host = args
    with lowering.use(paged_attention=name):
        clean = ops.paged_attention(*args, **kwargs, window=6)
        for pages, past in zip(host.pages, rows.past, strict=True):
            unread = list(pages[: (past - 5) // 4])
            assert len(unread) >= 7
            k_pages[unread], v_pages[unread] = torch.nan, torch.nan
        assert torch.equal(ops.paged_attention(*args, **kwargs, window=6), clean)


def test_padding_may_hold_nan() -> None:
    """Queries, keys and values of padding tokens reach no live output."""
    rows = Rows("padded", (3, 0, 5), (0, 2, 7), padding=4)
    draw = Draw(torch.float32)
    q, k, v = draw.normal(12, 4, 8), draw.normal(12, 2, 8), draw.normal(12, 2, 8)
    args, kwargs = (q, k, v, rows.query_start()), {**rows.hints(), "scale": 0.3}
    paged_args, paged_kwargs = paged(rows, 4, 2, 8, 8, 4, shuffled=True)(draw)
    calls = [(ops.attention, args, kwargs), (ops.paged_attention, paged_args, paged_kwargs)]
    calls += [(op, xs, {**ys, "window": 3}) for op, xs, ys in calls]
    for op, xs, ys in calls:
        dirty = [x.clone() if isinstance(x, Tensor) else x for x in xs]
        for x in dirty[: 3 if op is ops.attention else 1]:
            x[8:] = torch.nan
        for name in kernels_for(op, xs, ys):
            with lowering.use(Policy({op.name: name})):
                assert torch.equal(op(*xs, **ys)[:8], op(*dirty, **ys)[:8])


def test_host_and_device_lengths_give_one_result() -> None:
    """A kernel that reads the host's lists refuses when they are only an upper bound."""
    args, kwargs = paged(VERIFY, 4, 2, 16, 16, 4, shuffled=True)(Draw(torch.float32))
    *tensors, host = args
    with lowering.record() as report:
        exact = ops.paged_attention(*tensors, host, **kwargs)
        bound = HostLengths(host.query, tuple(length + 2 for length in host.length), host.pages, exact=False)
        inexact = ops.paged_attention(*tensors, bound, **kwargs)
    assert [row.kernel for row in report.rows] == ["torch_rows", "torch"]
    assert "upper bound" in report.rows[1].refused["torch_rows"]
    assert_close(exact, inexact, length=16)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_write_pages(pool_dtype: torch.dtype) -> None:
    """Each token lands at its slot, in the pool's dtype and the pool's own memory; nothing else changes."""
    draw = Draw(torch.float32)
    k_pages, v_pages = draw.normal(5, 3, 2, 4, dtype=pool_dtype), draw.normal(5, 3, 2, 6, dtype=pool_dtype)
    k, v, slots = draw.normal(4, 2, 4), draw.normal(4, 2, 6), torch.tensor([14, 3, 7, 0])
    wanted = [k_pages.clone(), v_pages.clone()]
    for pool, new in zip(wanted, (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            pool[slot // 3, slot % 3] = new[token]
    found = ops.write_pages(k_pages, v_pages, k, v, slots)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].data_ptr() == k_pages.data_ptr() and found[1].data_ptr() == v_pages.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_batch_mates_move_a_row_by_rounding_only(dtype: torch.dtype) -> None:
    """One row alone and the same row among 2, 3, 8 and 33: equal within the bound; the largest move is printed."""
    draw = Draw(dtype)
    weight, x, others = draw.normal(64, 96), draw.normal(1, 4, 2, 12), draw.normal(33, 4, 2, 12)

    def among(rows: int, at: int) -> Tensor:
        mixed = others[:rows].clone()
        mixed[at] = x[0]
        ragged = Rows("mates", (4,) * rows, (0,) * rows)
        y = ops.attention(*(mixed.flatten(0, 1),) * 3, ragged.query_start(), **ragged.hints(), scale=0.3)
        return ops.linear(y.reshape(4 * rows, 24).repeat(1, 4), weight).unflatten(0, (rows, 4))[at]

    alone, worst = among(1, 0), 0.0
    for rows in (2, 3, 8, 33):
        for at in {0, rows // 2, rows - 1}:
            y = among(rows, at)
            assert_close(y, alone, length=96)
            worst = max(worst, float((y - alone).abs().max() / alone.abs().max()))
    print(f"{dtype}: a row moves by at most {worst:.2g} of the largest value")
