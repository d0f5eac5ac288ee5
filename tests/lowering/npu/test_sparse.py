"""Sparse attention lowered for Ascend: at published sizes through the real torch_npu, and through the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import lowering
from lowering import Rows, npu_reference, ops
from lowering.kernel import FUSED
from lowering.npu import sparse
from lowering.target import ASCEND, named
from tests.lowering.ops.test_sparse import Fed, Sizes, filled
from tests.tolerances import assert_close

SERVED = Sizes(ratio=4, top_k=6, heads=6, kv_heads=2, head_dim=32, index_heads=4, index_dim=128, page_size=64)
"""Small, and within what the fused operators take."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


def halved(rows: Fed) -> Fed:
    """The same rows in bfloat16."""
    for name in ("q", "k", "v", "qi", "raw"):
        setattr(rows, name, [x.bfloat16() for x in getattr(rows, name)])
    rows.weight, rows.pools = rows.weight.bfloat16(), [x.bfloat16() for x in rows.pools]
    rows.raw_pages, rows.index_pages = rows.raw_pages.bfloat16(), rows.index_pages.bfloat16()
    return rows


@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("padding", [0, 70])
def test_chunks_select_and_attend_as_the_formula_says(target: str, padding: int) -> None:
    """Ragged and idle rows, lengths below and beyond the budget, NaN in padding and in every slot nobody wrote."""
    chunks = [[90, 0, 3], [1, 9, 0], [1, 1, 1], [5, 5, 5]]
    rows = halved(Fed(SERVED, [sum(column) for column in zip(*chunks, strict=True)], seed=padding))
    for counts in chunks:
        chunk = rows.chunk(counts, padding)
        with lowering.use(target=target, sparse_attention="npu_gather_fia"), lowering.record() as report:
            found, places, y = rows.attended(chunk)
        chosen = {row.op: row.kernel for row in report.rows}
        assert (chosen["index_scores_topk"], chosen["sparse_attention"]) == ("npu_lightning_indexer", "npu_gather_fia")
        for token, (row, place) in enumerate(chunk["at"]):
            keys = rows.keys(row).float()
            rows.qi[row] = rows.qi[row].float()
            blocks, tokens = rows.selection(row, place, keys)
            rows.qi[row] = rows.qi[row].bfloat16()
            assert filled(found[token]) == set(blocks) and filled(places[token]) == set(tokens)
            assert_close(y[token].double(), rows.output(row, place, tokens), dtype=torch.bfloat16, length=32)
        live = len(chunk["at"])
        assert bool((found[live:] == -1).all()) and not y[live:].any()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def published(tokens: int, rows: int, most: int, pages: int = 2048) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of selection and attention at the sizes of the published checkpoint, without values."""
    lengths, start = meta(rows, dtype=torch.int32), meta(rows + 1, dtype=torch.int32)
    where = Rows(start, lengths, meta(rows, 256, dtype=torch.int32), max_query=most, uniform=most * rows == tokens)
    pools = (meta(pages, 128, 2, 256), meta(pages, 128, 2, 256))
    selected = meta(tokens, 2051, dtype=torch.int32)
    return (meta(tokens, 4, 128), meta(pages, 32, 128), where), (meta(tokens, 24, 256), *pools, selected, where)


ROWS = {"decode": (8, 8, 1), "verify": (32, 8, 4), "prefill": (200, 3, 150)}


@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("batch", ROWS)
def test_published_sizes_pass_the_schemas_and_shape_functions_of_torch_npu(target: str, batch: str) -> None:
    """One call of the indexer, each token a request of one query; fused attention once for every 64 tokens."""
    tokens, rows, most = ROWS[batch]
    index, attention = published(tokens, rows, most)
    low = lowering.lower(ops.index_scores_topk, *index, target=target, ratio=4, top_k=512)
    assert [row.kernel for row in low.report.rows] == ["npu_lightning_indexer"] and not low.problems
    (one,) = (operator for call in low.calls for operator in call.operators if "aten" not in operator.name)
    heads = 8 if target == "ascend950" else 4
    assert one.name == "npu.npu_lightning_indexer"
    assert f"i32[{tokens},512]" in low.as_text() and one.cost.flops == 2 * tokens * heads * 128 * 256 * 32
    with lowering.use(sparse_attention="npu_gather_fia"):
        low = lowering.lower(ops.sparse_attention, *attention, target=target, scale=1 / 16)
    assert [row.kernel for row in low.report.rows] == ["npu_gather_fia"] and not low.problems
    called = [operator.name for call in low.calls for operator in call.operators if "aten" not in operator.name]
    assert called == ["npu.npu_fused_infer_attention_score_v2"] * -(-tokens // 64)


@pytest.mark.parametrize("target", ASCEND)
def test_a_prompt_reads_its_keys_where_they_lie(target: str) -> None:
    """From as many tokens on as are gathered at a time; one call, and not an operator of Torch's that touches keys."""
    first = {
        batch: ops.sparse_attention.explain(*published(*sizes)[1], target=target, scale=1 / 16)
        for batch, sizes in ROWS.items()
    }
    assert {batch: choice.kernel.name for batch, choice in first.items()} == {
        "decode": "npu_gather_fia",
        "verify": "npu_gather_fia",
        "prefill": "triton_sparse_attention",
    }
    assert first["prefill"].refused["npu_gather_fia"] == "more than 64 tokens would copy their keys in turns"
    low = lowering.lower(ops.sparse_attention, *published(*ROWS["prefill"])[1], target=target, scale=1 / 16)
    (call,) = low.calls
    (one,) = (operator for operator in call.operators if "aten" not in operator.name)
    assert one.name == "triton_kernels.sparse_attention" and one.cost.flops == 4 * 200 * 24 * 2051 * 256
    keys, others = 200 * 2051 * 4 * 256 * 2, 200 * 2 * 24 * 256 * 2 + 200 * 2051 * 4 + (4 + 3 + 3 * 256) * 4
    assert one.cost.bytes == keys + others
    assert all(operator.cost.bytes < 2**23 for operator in call.operators if operator is not one)


def test_what_no_operator_does_is_said() -> None:
    """The sparse operator of torch_npu reads one latent; Ascend 950 has the indexer from CANN 9.1 on."""
    index, attention = published(8, 8, 1)
    choice = ops.sparse_attention.explain(*attention, target="ascend910b", scale=1 / 16)
    assert choice.refused[FUSED].startswith("npu_sparse_flash_attention reads one latent of 512 channels")
    choice = ops.index_scores_topk.explain(*index, target=named("ascend950", cann="9.0.0"), ratio=4, top_k=512)
    assert choice.kernel.name == "torch_blocked" and "from CANN 9.1.0.pre on" in choice.refused["npu_lightning_indexer"]


def test_a_captured_step_reads_nothing_on_the_host() -> None:
    """One trace of the kernels for fixed shapes, replayed while two rows grow over block ends."""
    rows = halved(Fed(SERVED, [60, 60], seed=1))
    rows.chunk([40, 21])

    def step(q: Tensor, qi: Tensor, lengths: Tensor, table: Tensor, *pools: Tensor) -> tuple[Tensor, Tensor]:
        start = torch.arange(3, dtype=torch.int32) * 2
        where = Rows(start, lengths, table, max_query=2, uniform=True)
        found = ops.index_scores_topk(qi, pools[2], where, ratio=4, top_k=6)
        places = ops.expand_blocks(found, where, ratio=4)
        return found, ops.sparse_attention(q, *pools[:2], places, where, scale=0.3)

    def arguments() -> tuple[Tensor, ...]:
        chunk = rows.chunk([2, 2])
        return chunk["q"], chunk["qi"], rows.lengths, rows.table, *rows.pools, rows.index_pages

    with lowering.use(target="ascend910b"):
        graph = make_fx(step, tracing_mode="fake")(*arguments())
        assert graph.code.count("npu_lightning_indexer") and "_local_scalar_dense" not in graph.code
        for _ in range(5):
            given = arguments()
            found, y = graph(*given)
            expected, other = step(*given)
            assert torch.equal(found, expected) and torch.equal(y, other)


def test_many_tokens_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that do not divide the tokens give what one part gives."""
    rows = halved(Fed(SERVED, [50], seed=2))
    chunk = rows.chunk([50])
    with lowering.use(target="ascend910b", sparse_attention="npu_gather_fia"):
        _, _, whole = rows.attended(chunk)
        monkeypatch.setattr(sparse, "GATHERED", 7)
        _, _, parts = rows.attended(chunk)
    assert torch.equal(whole, parts)
