"""Latent attention over pages: every kernel against dense attention in float64 on the concatenated keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from torch import Tensor

import lowering
from lowering import LoweringError, ops
from lowering.layouts import LAYOUTS, NdPages, NzPages, Pages, layout_for
from lowering.ops import LatentPools, LatentQueries, Latents
from params.tree import tree_map
from tests.cases import Draw, RowCounts, latent_rows
from tests.each import each, try_all
from tests.tolerances import assert_close
from tests.typechecker import HOOKED, check

KERNELS = [kernel.name for kernel in ops.mla_prefix_attention.serving("cpu")]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""How far a value may be from the exact one, relative to it plus the root mean square of all."""
NEW = (101, 870, 876, 874, 869, 864, 904, 863, 837, 768)
Calls = tuple[tuple[Any, ...], dict[str, Any]]


def dense(args: Sequence[Any], scale: float, v_dim: int) -> Tensor:
    """The formula, head by head and row by row, on keys that stand one after another."""
    q, new, pages, up, rows = args
    (lengths, table), start, heads = rows.paged, rows.query_start, q.nope.shape[1]
    both = up.double().reshape(heads, -1, new.latent.shape[1])
    out = torch.zeros(q.nope.shape[0], heads, v_dim, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        first, last = start[row : row + 2].tolist()
        c = logical(pages.latent, table[row], length)
        for head in range(heads):
            k, v = c @ both[head, :-v_dim].T, c @ both[head, -v_dim:].T
            scores = q.nope[first:last, head].double() @ k.T
            if q.rope is not None:
                scores += q.rope[first:last, head].double() @ logical(pages.rope, table[row], length).T
            later = torch.arange(length) > torch.arange(length - (last - first), length)[:, None]
            out[first:last, head] = (scores * scale).masked_fill(later, -torch.inf).softmax(-1) @ v
    return out


def logical(pages: Pages, table: Tensor, length: int) -> Tensor:
    """The vectors of a row, element by element from where the layout says that they lie."""
    size, width, at = pages.page_size, pages.width, torch.arange(length)
    page, token = table[at // size].long()[:, None], (at % size)[:, None]
    channel = torch.arange(width)
    if isinstance(pages, NzPages):
        return pages.values[page, channel // 16, token, channel % 16].double()
    return pages.values[page, token, channel].double()


def run(args: Sequence[Any], hints: dict[str, Any], kernel: str) -> Tensor:
    with lowering.use(mla_prefix_attention=kernel), torch.no_grad():
        return ops.mla_prefix_attention(*args, **hints)


def assert_near(found: Tensor, exact: Tensor, live: int) -> None:
    """Within the bound of its dtype, finite, and exactly zero behind the live tokens."""
    assert torch.isfinite(found).all() and not found[live:].any()
    x, y = found[:live].double(), exact[:live]
    excess = (x - y).abs() / (y.abs() + y.square().mean().sqrt())
    assert excess.max() <= BOUNDS[found.dtype], f"off by {excess.max():.3g}"


BATCHES = {
    "decode": RowCounts("decode", (1, 1, 1, 1), (0, 1, 130, 300)),
    "verify": RowCounts("verify", (4, 4, 4), (1, 127, 128)),
    "mixed": RowCounts("mixed", (257, 0, 1, 33, 0, 130), (0, 300, 128, 0, 0, 127), padding=5),
    "idle": RowCounts("idle", (0, 0, 3), (5, 0, 0), padding=2),
}


def check_every_kernel(args: Sequence[Any], hints: dict[str, Any], rows: RowCounts) -> None:
    """Against one computation of the formula."""
    exact = dense(args, hints["scale"], hints["v_dim"])
    try_all(
        [(kernel,) for kernel in KERNELS],
        lambda kernel: assert_near(run(args, hints, kernel), exact, sum(rows.counts)),
    )


@each(
    product((("nd", 1), ("nd", 128), ("nz", 1), ("nz", 128)), BATCHES, BOUNDS),
    hooked=lambda layout, batch, dtype: [layout, batch, dtype],
)
def test_every_kernel_is_dense_attention(layout: tuple[str, int], batch: str, dtype: torch.dtype) -> None:
    """Empty and long prefixes, idle rows, NaN in every slot that is not held; padding holds values."""
    (kind, page_size), rows = layout, BATCHES[batch]
    args, hints = latent_rows(rows, 4, 24, 16, 20, 48, page_size, layout=kind, padding=7.0)(Draw(dtype))
    check_every_kernel(args, hints, rows)


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (2, RowCounts("long", (257,), (2048,))),
        (8, RowCounts("verify", (8, 8), (2048, 5))),
        (16, RowCounts("decode", (1, 1), (700, 0))),
        (128, RowCounts("many_heads", (3, 1), (40, 129))),
    ],
    ids=str,
)
def test_real_widths(heads: int, rows: RowCounts) -> None:
    args, hints = latent_rows(rows, heads, 128, 64, 128, 512, 128)(Draw(torch.float32))
    check_every_kernel(args, hints, rows)


def test_the_mixed_batch_works_in_one_call() -> None:
    """Ten prompts of hundreds of tokens, of which the first stands on a prefix."""
    rows = RowCounts("mixed_batch", NEW, (768, *(0,) * 9))
    args, hints = latent_rows(rows, 2, 8, 4, 6, 16, 128)(Draw(torch.float32))
    check_every_kernel(args, hints, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_logits(dtype: torch.dtype) -> None:
    """Scores of hundreds: no overflow, and no weight lost between the two passes."""
    rows = BATCHES["mixed"]
    args, hints = latent_rows(rows, 2, 24, 16, 20, 48, 16, padding=1e4)(Draw(dtype))
    hints["scale"] = 8.0
    exact = dense(args, 8.0, hints["v_dim"])

    def check_one(kernel: str) -> None:
        found = run(args, hints, kernel)
        assert torch.isfinite(found).all() and not found[sum(rows.counts) :].any()
        reason = "float32 scores of hundreds are off by 1e-5 each, and weights by as much"
        assert_close(found[: sum(rows.counts)], exact[: sum(rows.counts)], length=1000, looser=10, reason=reason)

    try_all([(kernel,) for kernel in KERNELS], check_one)


def test_without_rope() -> None:
    rows = BATCHES["mixed"]
    args, hints = latent_rows(rows, 3, 7, 0, 5, 11, 5)(Draw(torch.float32))
    assert [part.rope for part in args[:3]] == [None] * 3
    check_every_kernel(args, hints, rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", BATCHES)
def test_layouts_are_bitwise_equal(batch: str, kernel: str) -> None:
    found = [
        run(*latent_rows(BATCHES[batch], 2, 24, 16, 20, 32, 16, layout=layout)(Draw(torch.bfloat16)), kernel)
        for layout in LAYOUTS
    ]
    assert torch.equal(*found)


def test_float64_stays_float64() -> None:
    rows = BATCHES["mixed"]
    args, hints = latent_rows(rows, 2, 12, 8, 10, 24, 16)(Draw(torch.float64))
    exact = dense(args, hints["scale"], hints["v_dim"])
    for kernel in KERNELS:
        assert_close(run(args, hints, kernel), exact, length=600)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_through_pages_and_new_latents(kernel: str) -> None:
    """A kernel may read a new token's latent in the pages or beside them; with the write both are one."""
    rows = RowCounts("small", (3, 0, 6), (5, 2, 0), padding=1)
    args, hints = latent_rows(rows, 2, 6, 4, 5, 12, 4)(Draw(torch.float64))
    q, new, pages, up, made = args
    table = made.page_table
    places = torch.cat([table[row].long().repeat_interleave(4) * 4 for row in (0, 2)])
    at = torch.cat([torch.arange(past, past + count) for past, count in ((5, 3), (0, 6))])
    first = torch.cat([torch.full((count,), row) for row, count in ((0, 3), (2, 6))])
    slots = torch.cat((table[first, at // 4].long() * 4 + at % 4, torch.zeros(1, dtype=torch.int64)))
    assert len(places) and len(slots) == rows.tokens

    def loss(q_nope: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, old: Tensor, up: Tensor) -> Tensor:
        pools, new = tree_map(torch.clone, LatentPools(NdPages(old.nan_to_num()), pages.rope)), Latents(latent, rope)
        pools = ops.write_latents(pools, new, slots)
        return ops.mla_prefix_attention(LatentQueries(q_nope, q_rope), new, pools, up, made, **hints).square().sum()

    inputs = (q.nope, q.rope, new.latent, new.rope, pages.latent.values, up)
    with lowering.use(mla_prefix_attention="torch"):
        expected = torch.func.grad(loss, tuple(range(6)))(*inputs)
    with lowering.use(mla_prefix_attention=kernel):
        found = torch.func.grad(loss, tuple(range(6)))(*inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
        eager = torch.autograd.grad(loss(*leaves), leaves)
    assert_close(found, expected, length=600)
    assert_close(eager, expected, length=600)


# Writing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_latents_are_where_the_layout_says(layout: str) -> None:
    """And nothing else changes; the state's dtype wins."""
    draw = Draw(torch.float32)
    pools = [LAYOUTS[layout].empty(4, 3, width, torch.bfloat16, torch.device("cpu")) for width in (32, 16)]
    for pool in pools:
        pool.values.fill_(torch.nan)
    latent, rope, slots = draw.normal(5, 32), draw.normal(5, 16), torch.tensor([9, 0, 4, 11, 3], dtype=torch.int32)
    both = LatentPools(*pools)
    assert ops.write_latents(both, Latents(latent, rope), slots) == both
    for pool, new in zip(pools, (latent, rope), strict=True):
        found = logical(pool, torch.arange(4), 12)
        assert torch.equal(found[slots.long()], new.bfloat16().double())
        assert found.isnan().all(-1).sum() == 7


def test_normed_and_turned_before_they_are_written() -> None:
    draw = Draw(torch.float32)
    pools = [NdPages.empty(3, 4, width, torch.float32, torch.device("cpu")) for width in (10, 6)]
    kv, weight, angles = draw.normal(5, 16), draw.normal(10), draw.uniform(-3, 3, 5, 3)
    slots = torch.tensor([4, 9, 5, 11, 6])
    turned = (angles.cos(), angles.sin())
    written, new = ops.latent_norm_rope_write(LatentPools(*pools), kv, weight, *turned, slots, eps=0.1)
    wide = kv.double()
    c = wide[:, :10] / (wide[:, :10].square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    pairs = torch.complex(wide[:, 10::2], wide[:, 11::2]) * torch.polar(torch.ones(5, 3).double(), angles.double())
    assert_close(new.latent, c)
    assert_close(new.rope, torch.cat((pairs.real, pairs.imag), -1))
    for pool, held in zip((written.latent, written.rope), (new.latent, new.rope), strict=True):
        assert torch.equal(pool.values.flatten(0, 1)[slots], held)
    _, plain = ops.latent_norm_rope_write(LatentPools(*pools), kv, weight, None, None, slots, eps=0.1)
    assert torch.equal(plain.latent, new.latent) and torch.equal(plain.rope, kv[:, 10:])
    alone = LatentPools(pools[0], None)
    _, alone = ops.latent_norm_rope_write(alone, kv[:, :10], weight, None, None, slots, eps=0.1)
    assert torch.equal(alone.latent, new.latent) and alone.rope is None


# Layouts as types


@pytest.mark.parametrize("page_size", [1, 3, 128])
def test_tiled_pages_give_what_plain_ones_give(page_size: int) -> None:
    """Gathering and reading a row's pages, those in one piece and those apart."""
    draw = Draw(torch.float32)
    plain, tiled = (kind.empty(6, page_size, 48, torch.float32, torch.device("cpu")) for kind in (NdPages, NzPages))
    new, slots = draw.normal(6 * page_size, 48), draw.distinct(6 * page_size, 1, 6 * page_size)[0]
    for pages in (plain, tiled):
        pages.write(new, slots)
        assert (pages.page_size, pages.width) == (page_size, 48)
    assert plain.values.shape != tiled.values.shape
    table = torch.tensor([[2, 3, 4], [5, 1, 0]], dtype=torch.int32)
    assert torch.equal(plain.gather(table), tiled.gather(table))
    assert torch.equal(plain.gather(table)[1], torch.stack([plain.values[page] for page in (5, 1, 0)]).flatten(0, 1))
    for pages in ((2, 3, 4), (5, 1, 0), (4,)):
        for length in (0, 1, len(pages) * page_size):
            assert torch.equal(plain.held(pages, length), tiled.held(pages, length))
    in_one_piece = plain.held((2, 3, 4), 2 * page_size)
    assert in_one_piece.untyped_storage().data_ptr() == plain.values.untyped_storage().data_ptr()


def test_an_unconverted_read_is_seen() -> None:
    """The bytes of tiled pages taken for plain ones give another result."""
    args, hints = latent_rows(BATCHES["verify"], 2, 24, 16, 20, 32, 16, layout="nz")(Draw(torch.float32))
    pools = (args[2].latent, args[2].rope)
    pages = LatentPools(*(NdPages(x.values.nan_to_num().reshape(-1, x.page_size, x.width)) for x in pools))
    with pytest.raises(AssertionError):
        assert_near(run((*args[:2], pages, *args[3:]), hints, "torch"), dense(args, hints["scale"], 20), 12)


def test_a_function_of_plain_pages_rejects_tiled_ones() -> None:
    """By the type alone; where shapes are checked, storage of the other layout does not get into a type either."""

    @check
    def reads(pages: NdPages) -> Tensor:
        return pages.values

    cpu = torch.device("cpu")
    assert reads(NdPages.empty(2, 4, 16, torch.float32, cpu)).ndim == 3
    with pytest.raises((TypeError, BeartypeCallHintParamViolation), match="NdPages"):
        reads(NzPages.empty(2, 4, 16, torch.float32, cpu))  # type: ignore[arg-type]
    if HOOKED:
        with pytest.raises(TypeError):
            NdPages(torch.zeros(2, 1, 4, 16))
        with pytest.raises(TypeError):
            NzPages(torch.zeros(2, 4, 16))


def test_layouts_for_targets() -> None:
    cpu = torch.device("cpu")
    assert layout_for(None, cpu, torch.bfloat16, 128, (512, 64)) is NdPages
    with lowering.use(target="ascend950"):  # nothing there attends over tiled pages
        assert layout_for(None, cpu, torch.float16, 256, (512, 64)) is NdPages
    with lowering.use(target="ascend910_93"):
        assert layout_for(None, cpu, torch.float16, 256, (512, 64)) is NzPages
        assert layout_for(None, cpu, torch.float16, 64, (512, 64)) is NdPages
        assert layout_for(None, cpu, torch.float16, 128, (512, 40)) is NdPages
        assert layout_for("nd", cpu, torch.float16, 128, (512, 64)) is NdPages
    with pytest.raises(ValueError, match="layout 'zn' is unknown; known: nd, nz"):
        layout_for("zn", cpu, torch.float16, 128, (512, 64))
    with pytest.raises(ValueError, match=r"'nz' takes widths in multiples of 16, found \[512, 40\]"):
        layout_for("nz", cpu, torch.float16, 128, (512, 40))


# Which kernel


def chosen(counts: RowCounts, exact: bool = True) -> lowering.Choice:
    args, hints = latent_rows(counts, 2, 8, 4, 6, 16, 16)(Draw(torch.float32))
    *others, rows = args
    rows = replace(rows, host=replace(rows.host, exact=exact))
    return ops.mla_prefix_attention.explain(*others, rows, **hints)


def test_the_rule_of_order_and_its_sentence() -> None:
    """Absorbed for decoding, verifying and short prompts; one row at a time for long ones; both without host reads."""
    few, many = RowCounts("few", (100, 4), (9, 0)), RowCounts("many", (101,), (0,))
    assert chosen(few).kernel.name == "torch_absorbed_rows"
    assert chosen(few, exact=False).kernel.name == "torch_absorbed"
    assert chosen(many).kernel.name == "torch_concat"
    assert chosen(many, exact=False).kernel.name == "torch_two_pass"
    refused = chosen(few).refused
    assert [*refused] == ["torch_absorbed", "torch_concat", "torch_two_pass"]
    assert set(refused.values()) == {
        "at up to 100 queries a row, to read latents as they lie takes less than to expand them"
    }
    late = chosen(many, exact=False).refused
    assert "exact row lengths" in late["torch_concat"] and "to expand takes less" in late["torch_absorbed"]


def test_a_policy_overrides_the_rule() -> None:
    args, hints = latent_rows(RowCounts("many", (101,), (0,)), 2, 8, 4, 6, 16, 16)(Draw(torch.float32))
    with lowering.use(mla_prefix_attention="torch_absorbed"), lowering.record() as report:
        ops.mla_prefix_attention(*args, **hints)
    assert [(row.kernel, row.refused) for row in report.rows] == [("torch_absorbed", {})]


def test_a_rule_of_order_is_checked() -> None:
    op = ops.mla_prefix_attention
    with pytest.raises(LoweringError, match="mla_prefix_attention: the rule of order takes"):
        op.order_by(("cuda",))(lambda q: ((), ""))
    with pytest.raises(LoweringError, match="a rule of order for cpu is given twice"):
        op.order_by(("cpu",))(op.orders["cpu"])


def test_row_starts_are_cumulative() -> None:
    """The cases' own arithmetic, on which everything above stands."""
    rows = BATCHES["mixed"]
    assert rows.query_start().tolist() == [0, *accumulate(rows.counts)]
