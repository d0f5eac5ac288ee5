"""Attention, head by head in float64, ragged and paged; nothing reads what no row holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import Policy, ops
from lowering.host import HostLengths
from lowering.op import Op
from tests.cases import ROWS, VERIFY, Draw, Rows, paged
from tests.tolerances import assert_close

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(8, 2, 16, 16), (3, 1, 24, 16), (4, 4, 8, 12)]
EVERY_ROWS = [*ROWS, VERIFY]


def row_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The newest tokens of one row over all of it: q [queries heads dim], k and v [keys kv_heads dim]."""
    queries, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    out = torch.zeros(queries, heads, v.shape[2], dtype=torch.float64)
    for h in range(heads):
        kv = h // (heads // k.shape[1])
        for i in range(queries):
            seen = keys - queries + i + 1
            weights = (k[:seen, kv].double() @ q[i, h].double() * scale).softmax(0)
            out[i, h] = weights @ v[:seen, kv].double()
    return out


def kernels_for(op: Op, args: Any, kwargs: Any) -> list[str]:
    """Names of the kernels that take this call, the reference among them."""
    kernels = op.serving("cpu")
    return [kernel.name for kernel in kernels if kernel.refuse is None or kernel.refuse(*args, **kwargs) is None]


def held(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """A row's entries, one after the other."""
    page_size = pool.shape[1]
    return (
        torch.stack([pool[table[at // page_size], at % page_size] for at in range(length)]) if length else pool[0, :0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", EVERY_ROWS, ids=lambda rows: rows.name)
def test_attention(rows: Rows, shape: Shape, dtype: torch.dtype) -> None:
    """Every kernel; rows do not see each other; padding gets zeros."""
    heads, kv_heads, head_dim, v_dim = shape
    draw, start = Draw(dtype), rows.query_start()
    q, k = draw.normal(rows.tokens, heads, head_dim), draw.normal(rows.tokens, kv_heads, head_dim)
    v = draw.normal(rows.tokens, kv_heads, v_dim)
    expected = torch.zeros(rows.tokens, heads, v_dim, dtype=torch.float64)
    for row in range(len(rows.counts)):
        part = slice(int(start[row]), int(start[row + 1]))
        expected[part] = row_attention(q[part], k[part], v[part], 0.3)
    args, kwargs = (q, k, v, start), {**rows.hints(), "scale": 0.3}
    for name in kernels_for(ops.attention, args, kwargs):
        with lowering.use(attention=name):
            assert_close(ops.attention(*args, **kwargs), expected, length=sum(rows.counts), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in_order", "scattered"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", EVERY_ROWS, ids=lambda rows: rows.name)
def test_paged_attention(rows: Rows, shape: Shape, shuffled: bool, dtype: torch.dtype) -> None:
    """Every kernel; every page and slot that no row holds is NaN and reaches nothing; padding gets zeros."""
    args, kwargs = paged(rows, *shape, 4, shuffled=shuffled)(Draw(dtype))
    q, k_pages, v_pages, table, lengths, start, _ = args
    expected = torch.zeros(rows.tokens, shape[0], shape[3], dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        part = slice(int(start[row]), int(start[row + 1]))
        k, v = (held(pool, table[row], length) for pool in (k_pages, v_pages))
        expected[part] = row_attention(q[part], k, v, kwargs["scale"])
    for name in kernels_for(ops.paged_attention, args, kwargs):
        with lowering.use(paged_attention=name):
            assert_close(ops.paged_attention(*args, **kwargs), expected, length=int(lengths.max()), dtype=dtype)


def test_padding_may_hold_nan() -> None:
    """Queries, keys and values of padding tokens reach no live output."""
    rows = Rows("padded", (3, 0, 5), (0, 2, 7), padding=4)
    draw = Draw(torch.float32)
    q, k, v = draw.normal(12, 4, 8), draw.normal(12, 2, 8), draw.normal(12, 2, 8)
    args, kwargs = (q, k, v, rows.query_start()), {**rows.hints(), "scale": 0.3}
    paged_args, paged_kwargs = paged(rows, 4, 2, 8, 8, 4, shuffled=True)(draw)
    for op, xs, ys in ((ops.attention, args, kwargs), (ops.paged_attention, paged_args, paged_kwargs)):
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
