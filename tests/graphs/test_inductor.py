"""Compiled captures compute what plain calls do, within rounding: prompts, tokens, windows and commits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from tests.oracle.mtp import small
from tests.oracle.states import ROUNDING, advance, assert_rows_close, poison
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning"),
    # As Inductor is loaded.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.sweep)])
def test_compiled_calls_equal_plain_ones(kind: str) -> None:
    one = small(kind)
    step = lowering.jit(one.model.forward, donate=("state",), buckets=(8,))
    commit = lowering.jit(fm.commit, donate=("state",))
    assert "inductor" in repr(step)
    captured, plain = (poison(one.model.init_state(2, 24, page_size=4, pages=12)) for _ in range(2))

    def forward(ids: list[list[int]], **kwargs: Any) -> None:
        nonlocal captured, plain
        out, captured = step(one.params, captured, fm.Batch.from_lists(ids, captured), **kwargs)
        right, plain = advance(one, plain, ids, **kwargs)
        assert_close((out.logits, out.hidden), (right.logits, right.hidden), looser=5, reason=ROUNDING)

    forward([[3, 1, 4], [1, 5]])
    pool = [leaf.data_ptr() for leaf in captured.pools()]
    for number in range(3):
        forward([[9 + number], [2]])
        forward([[6, 5, 3], [5, 8, 9]], keep_steps=True)
        captured, plain = commit(captured, [number, 3 - number]), fm.commit(plain, [number, 3 - number])
        assert_rows_close(captured, plain)
    assert [leaf.data_ptr() for leaf in captured.pools()] == pool
    assert (step.captures, commit.captures) == (3, 1)


@pytest.mark.compile
@torch.no_grad()
def test_what_was_lowered_under_a_policy_is_captured_under_it() -> None:
    q, k, v = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    rows: dict[str, Any] = {"max_query": 3, "uniform": True, "scale": 0.4}
    args = (q, k, v, torch.tensor([0, 3, 6], dtype=torch.int32))
    assert lowering.ops.attention.explain(*args, **rows).kernel.name == "torch_sdpa"
    low = lowering.lower(lowering.ops.attention, *args, policy=lowering.Policy({"attention": "torch"}), **rows)
    with lowering.record() as report:
        low.compile()
    assert {row.kernel for row in report.rows} == {"torch"}
