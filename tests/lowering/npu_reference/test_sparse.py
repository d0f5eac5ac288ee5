"""The reference of the lightning indexer against a plain loop in float64, and each documented limit, broken once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lowering.npu_reference.calls import assert_like, call, refused

INDEXER = "npu_lightning_indexer"
HELD = (37, 1, 16, 50)
"""Keys of each request, over blocks of 16."""
STEPS = (3, 1, 2, 4)


def valid(packed: bool = False, steps: int = 3, **changes: Any) -> dict[str, Any]:
    """A call that the documentation allows: pages in no order, NaN behind every request's keys."""
    generator = torch.Generator().manual_seed(7)
    used = [-(-held // 16) for held in HELD]
    order = iter((torch.randperm(sum(used), generator=generator) + 1).tolist())
    table = torch.zeros(len(HELD), max(used) + 1, dtype=torch.int32)
    key = torch.full((sum(used) + 1, 16, 1, 128), torch.nan, dtype=torch.bfloat16)
    for row, held in enumerate(HELD):
        for at in range(held):
            if at % 16 == 0:
                table[row, at // 16] = next(order)
            key[table[row, at // 16], at % 16] = torch.randn(1, 128, generator=generator).bfloat16()
    shape = (sum(STEPS), 5) if packed else (len(HELD), steps, 5)
    arguments: dict[str, Any] = {
        "query": torch.randn(*shape, 128, generator=generator).bfloat16(), "key": key,
        "weights": torch.randn(shape, generator=generator).bfloat16(), "block_table": table,
        "actual_seq_lengths_key": torch.tensor(HELD, dtype=torch.int32), "sparse_count": 9, "sparse_mode": 0,
        "layout_query": "TND" if packed else "BSND", "layout_key": "PA_BSND",
    }  # fmt: skip
    if packed:
        arguments["actual_seq_lengths_query"] = torch.tensor(STEPS).cumsum(0).int()
    return arguments | changes


def expected(arguments: dict[str, Any], row: int, query: Tensor, weights: Tensor, seen: int) -> set[int]:
    """The best keys of one query by a loop."""
    keys = [arguments["key"][arguments["block_table"][row, at // 16], at % 16, 0].double() for at in range(seen)]
    score = [sum(float(w) * max(float(q @ k), 0.0) for q, w in zip(query.double(), weights, strict=True)) for k in keys]
    return set(sorted(range(seen), key=lambda at: (-score[at], at))[: arguments["sparse_count"]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", [0, 3])
def test_the_best_keys_come_first_and_then_minus_one(packed: bool, mode: int) -> None:
    """In both layouts of queries; mode 3 hides the newest keys from all but the last query."""
    arguments = valid(packed, sparse_mode=mode)
    found, values = call(INDEXER, arguments)
    assert values.numel() == 0 and found.dtype == torch.int32
    starts = [sum(STEPS[:row]) for row in range(4)]
    for row, held in enumerate(HELD):
        steps = STEPS[row] if packed else 3
        for step in range(steps):
            at = (starts[row] + step,) if packed else (row, step)
            seen = held - (steps - 1 - step if mode == 3 else 0)
            wanted = expected(arguments, row, arguments["query"][at], arguments["weights"][at], max(seen, 0))
            line = found[at][0].tolist()
            assert set(line[: len(wanted)]) == wanted and line[len(wanted) :] == [-1] * (9 - len(wanted))


def test_of_equal_scores_the_lower_key_wins() -> None:
    """All keys alike: the first nine."""
    arguments = valid()
    arguments["key"].fill_(1)
    found, _ = call(INDEXER, arguments)
    assert found[0, 1, 0].tolist() == list(range(9))


@pytest.mark.parametrize("packed", [False, True])
def test_calls_without_values_give_the_same_shapes(packed: bool) -> None:
    """For fake tensors."""
    assert_like(INDEXER, valid(packed))


def strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"layout_query": "BNSD"}, "layout_query is 'BNSD'; expected 'BSND' or 'TND'"),
    ({"layout_key": "BSND"}, "layout_key is 'BSND'; the reference covers 'PA_BSND'"),
    ({"return_value": True}, "return_value is not supported with layout_key 'PA_BSND'"),
    ({"pre_tokens": 4}, "does not cover pre_tokens"),
    ({"next_tokens": 0}, "does not cover next_tokens"),
    ({"sparse_mode": 2}, "sparse_mode is 2; expected 0 or 3"),
    ({"sparse_count": 0}, "sparse_count is 0; expected 1 to 2048"),
    ({"sparse_count": 2049}, "sparse_count is 2049; expected 1 to 2048"),
    ({"query": torch.zeros(4, 3, 5, 64).bfloat16(), "key": torch.zeros(9, 16, 1, 64).bfloat16()}, "heads of 128"),
    ({"query": torch.zeros(4, 3, 65, 128).bfloat16(), "weights": torch.zeros(4, 3, 65).bfloat16()}, "at most 64 heads"),
    ({"query": torch.zeros(4, 3, 5, 128)}, "query is torch.float32; the operator takes"),
    ({"weights": torch.zeros(4, 3, 5).half()}, "dtypes differ"),
    ({"weights": torch.zeros(4, 3, 4).bfloat16()}, r"weights is \[4, 3, 4\]; expected \[4, 3, 5\]"),
    ({"query": strided(torch.zeros(4, 3, 5, 128).bfloat16())}, "query .* is not contiguous"),
    ({"key": torch.zeros(9, 24, 1, 128).bfloat16()}, "block_size in multiples of 16"),
    ({"key": torch.zeros(9, 16, 2, 128).bfloat16()}, "expected one head"),
    ({"key": torch.zeros(9, 1040, 1, 128).bfloat16()}, "up to 1024"),
    ({"block_table": None}, "needs actual_seq_lengths_key and block_table"),
    ({"block_table": torch.zeros(4, 4, dtype=torch.int64)}, "block_table is torch.int64"),
    ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, "a line for each of 4 requests"),
    ({"block_table": torch.full((4, 4), 99, dtype=torch.int32)}, "block_table holds values from 99 to 99"),
    ({"actual_seq_lengths_key": torch.tensor([37, 1, 0, 50], dtype=torch.int32)}, "holds values from 0 to 50"),
    ({"actual_seq_lengths_key": torch.tensor([37, 1, 9, 81], dtype=torch.int32)}, "holds values from 1 to 81"),
    ({"actual_seq_lengths_key": torch.tensor([37, 1, 9], dtype=torch.int32)}, r"expected \[4\]"),
    ({"actual_seq_lengths_query": torch.tensor([1, 1, 1])}, "actual_seq_lengths_query is torch.int64"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_documented_limit_is_enforced(changes: dict[str, Any], words: str) -> None:
    """One change of a valid call."""
    refused(INDEXER, valid(**changes), words)


def test_packed_queries_need_their_lengths() -> None:
    """Layout TND knows its requests by them alone."""
    refused(INDEXER, valid(packed=True) | {"actual_seq_lengths_query": None}, "actual_seq_lengths_query is missing")
