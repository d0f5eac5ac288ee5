"""Costs of single operators against counts by hand, and of a whole model against Torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import funcmodels as fm
import lowering
from lowering import OPS, Policy
from lowering.dryrun.costs import NPU
from lowering.explain.costs import Cost
from lowering.explain.trace import Operator, Recorder
from tests.tiny import SIZES

X, WIDE, IDS = torch.ones(3, 5), torch.ones(50, 5), torch.tensor([1, 7])
QUERY, KEYS = torch.ones(1, 2, 6, 8), torch.ones(1, 2, 9, 8)
BIAS = torch.ones(50)
EXPANDED = torch.ones(1, 5).expand(1000, 5)


def recorded(run: Callable[[], Any]) -> list[Operator]:
    recorder, found = Recorder(), []
    with recorder:
        recorder.sink = found
        run()
    return found


@pytest.mark.parametrize(
    ("run", "flops", "moved"),
    [
        (lambda: X @ X.T, 2 * 3 * 5 * 3, 4 * (15 + 15 + 9)),
        (lambda: F.linear(X, WIDE, BIAS), 2 * 3 * 5 * 50, 4 * (15 + 250 + 50 + 150)),
        (lambda: torch.einsum("ab,cb->ac", X, WIDE), 2 * 3 * 5 * 50, 4 * (15 + 250 + 150)),
        (lambda: X + 1, 0, 4 * 30),
        (lambda: X.T.reshape(5, 3)[1:].unsqueeze(0).expand(7, 4, 3), 0, 0),
        (lambda: X.T.contiguous(), 0, 4 * 30),
        (lambda: EXPANDED.sum(), 0, 4 * (5 + 1)),
        (lambda: F.embedding(IDS, WIDE), 0, 4 * 2 * 10 + 16),
        (lambda: WIDE[IDS], 0, 4 * 2 * 10 + 16),
        (lambda: WIDE.index_select(0, IDS), 0, 4 * 2 * 10 + 16),
        (lambda: WIDE.clone().index_copy_(0, IDS, X[:2]), 0, 4 * 500 + 4 * 2 * 10 + 16),
        (lambda: WIDE.clone().index_put_((IDS,), X[:2]), 0, 4 * 500 + 4 * 2 * 10 + 16),
        (lambda: torch.empty(100, 100), 0, 0),
        (lambda: F.scaled_dot_product_attention(QUERY, KEYS, KEYS), 2 * 2 * 6 * 9 * 16, None),
    ],
)
def test_an_operator(run: Callable[[], Tensor], flops: int, moved: int | None) -> None:
    total = sum((operator.cost for operator in recorded(run)), Cost())
    assert total.flops == flops and moved in (None, total.bytes)


def test_a_model_against_the_counter_of_torch() -> None:
    """Products of every op's reference, counted while it computes."""
    model = fm.build({**SIZES, "model_type": "qwen3_5_text"})
    params, batch = model.init_params(), fm.Batch.from_lists([[1, 2, 3], [4]])
    references = Policy(dict.fromkeys(OPS, "torch"))
    low = lowering.lower(model.forward, params, None, batch, target="cpu", policy=references)
    with FlopCounterMode(display=False) as counter, lowering.use(references), torch.no_grad():
        model.forward(params, None, batch)
    assert low.cost_analysis().total.flops == counter.get_total_flops() > 0


def attention(layout: str, mode: int, queries: list[int] | None, keys: list[int], **more: Any) -> dict[str, Any]:
    shapes = {"TND": (7, 2, 16), "BNSD": (2, 2, 4, 16), "BSND": (2, 4, 2, 16), "BSH": (2, 4, 32)}
    query = torch.empty(shapes[layout], device="meta")
    return {
        "input_layout": layout, "sparse_mode": mode, "actual_seq_qlen": queries, "actual_seq_kvlen": keys,
        "num_query_heads": 2, "query": query, "block_table": None, "pre_tokens": 3, "next_tokens": 0, **more,
    }  # fmt: skip


def kept(mode: int, queries: int, keys: int, before: int, after: int) -> int:
    """Pairs that the mask of a sparse mode keeps, one by one."""
    offset = keys - queries
    masks: dict[int, Callable[[int, int], bool]] = {
        0: lambda i, j: True, 2: lambda i, j: j <= i, 3: lambda i, j: j <= i + offset,
        4: lambda i, j: i + offset - before <= j <= i + offset + after,
    }  # fmt: skip
    return sum(masks[mode](i, j) for i in range(queries) for j in range(keys))


@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("layout", ["TND", "BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("paged", [True, False])
def test_fused_attention(mode: int, layout: str, paged: bool) -> None:
    """Lengths are cumulative in TND, except keys in pages; everywhere else they are those of each row."""
    rows = [(3, 9), (4, 5)]
    queries, keys = ([q for q, _ in rows], [k for _, k in rows])
    if layout == "TND":
        queries, keys = [3, 7], keys if paged else [9, 14]
    table = {"block_table": torch.empty(2, 1) if paged else None}
    given = attention(layout, mode, queries, keys, **table)
    out = (torch.empty_like(given["query"]),)
    flops = NPU.flops["npu::npu_fused_infer_attention_score_v2"](given, out)
    assert flops == 2 * 2 * (16 + 16) * sum(kept(mode, q, k, before=3, after=0) for q, k in rows)


def test_pages_cost_what_is_held() -> None:
    """Of a pool of ten pages, the tokens of the rows."""
    pool = torch.empty(10, 16, 32, dtype=torch.bfloat16)
    given = attention("TND", 3, [3, 7], [9, 5], block_table=torch.zeros(2, 1), key=pool, value=pool, block_size=16)
    moved = NPU.bytes["npu::npu_fused_infer_attention_score_v2"](given, ())
    assert moved == 2 * (9 + 5) * 32 * 2 + 7 * 32 * 4 + 2 * 4


def test_quantised_products() -> None:
    """An integer multiplied and added counts as a float does; of ten experts, three rows read three at most."""
    x, weight, scale = (torch.empty(*shape, dtype=torch.int8) for shape in ((3, 64), (64, 20), (20,)))
    given = {"x1": x, "x2": weight, "scale": scale}
    assert NPU.flops["npu::npu_quant_matmul"](given, torch.empty(3, 20)) == 2 * 3 * 64 * 20
    experts, exponents = torch.empty(10, 64, 256, dtype=torch.int8), torch.empty(10, 1, 256, 2, dtype=torch.int8)
    given = {"x": x, "weight": [experts], "weight_scale": [exponents]}
    out = torch.empty(3, 128, dtype=torch.int8), torch.empty(3, 2, 2, dtype=torch.int8)
    assert NPU.flops["npu::npu_grouped_matmul_swiglu_quant_v2"](given, out) == 2 * 3 * 64 * 256
    moved = NPU.bytes["npu::npu_grouped_matmul_swiglu_quant_v2"](given, out)
    assert moved == 3 * 64 + 3 * 64 * 256 + 10 * 256 * 2 + 3 * 128 + 3 * 4
