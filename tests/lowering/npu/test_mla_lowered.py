"""Latent attention through the schemas and shape functions of the real torch_npu: calls a layer, and their costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import lowering
from lowering import Policy
from lowering.explain.stages import Lowered

from .test_mla import ABSORBED, BY_HEAD, CONCAT, FIA, MIXED, OP, PRODUCT, RING, TWO, UPDATE, Made, Sizes, made


def lowered(call: Made, kernel: str, target: str = "ascend910_93") -> Lowered:
    policy = Policy({OP.name: kernel})
    return lowering.lower(OP, *call.args, target=target, policy=policy, **call.kwargs)


def fused(low: Lowered) -> Counter[str]:
    """The operators beyond Torch's own, with the number of their calls."""
    (call,) = low.calls
    assert not call.by_reference
    return Counter(operator.name for operator in call.operators if not operator.name.startswith("aten."))


SIZES = ((100, 768, (1, 2, 4, 8, 16, 32, 64, 128)), (256, 2048, (1, 4, 16, 32)), (1024, 8192, (1, 4, 8)))
"""New tokens, cached ones, and numbers of rows."""
ROWS: dict[str, tuple[Any, Any]] = {
    f"{rows}x{new}x{past}": ((new,) * rows, (past,) * rows) for new, past, each in SIZES for rows in each
} | {
    "32x100, every second on 768": ((100,) * 32, (768, 0) * 16),
    "mixed": (MIXED, (768, *[0] * 9)),
    "idle": ((5, 0, 7), (9, 30, 130)),
}


@pytest.mark.parametrize("rows", ROWS)
def test_calls_a_layer(rows: str) -> None:
    """Two passes and a merge are three calls whatever the rows; else it is one call a row with new tokens."""
    call = made(*ROWS[rows], Sizes(16 if rows.startswith("16x100") else 4), page_size=128)
    for kernel, expected in ((TWO, 3), (CONCAT, sum(map(bool, call.counts))), (RING, 2)):
        low = lowered(call, kernel)
        (row,) = (row for row in low.cost_analysis().rows if row.op == OP.name)
        assert (row.kernel, row.calls, row.fused) == (kernel, 1, expected)
        assert not low.problems
    assert fused(lowered(call, TWO)) == {f"npu.{FIA}": 2, f"npu.{UPDATE}": 1}


def test_one_call_reads_latents_as_they_lie() -> None:
    for layout in ("nd", "nz"):
        low = lowered(made((2, 2, 2), (130, 0, 7), Sizes(16), layout=layout), ABSORBED)
        assert fused(low) == {f"npu.{FIA}": 1}


@pytest.mark.parametrize("count", [1, 2])
def test_products_by_head_leave_nothing_loose(count: int) -> None:
    """All products lie in fused operators; of the two copies around Torch's, that of the rope channels is left."""
    call = made((count,) * 3, (130, 0, 7), Sizes(16))
    low, composed = lowered(call, BY_HEAD), lowered(call, ABSORBED)
    assert fused(low) == {f"npu.{FIA}": 1, f"npu.{PRODUCT}": 2} and not low.problems
    before, after = (Counter(one.name for one in each.calls[0].operators) for each in (composed, low))
    assert (before["aten.bmm"], before["aten.clone"]) == (2, 2)
    assert (after["aten.bmm"], after["aten.clone"]) == (0, 1)


def test_the_ring_has_the_shapes_that_its_documentation_tells() -> None:
    """Torch_npu has its schema, and no shape function; that of the reference stands in."""
    low = lowered(made((5, 3), (9, 0), Sizes(4), padding=1), RING)
    assert fused(low) == {"atb.npu_ring_mla": 2}
    assert "-> (bf16[8,4,128], f32[4,8])" in low.as_text()


def test_costs() -> None:
    """By hand: of the pages, what rows hold is read, and once for keys and values; each product is counted once."""
    call = made((2, 2), (130, 6), Sizes(16), page_size=128)
    (one,) = (operator for operator in lowered(call, ABSORBED).calls[0].operators if FIA in operator.name)
    pairs = sum(2 * past + 1 + 2 for past in (130, 6))
    assert one.cost.flops == 2 * pairs * 16 * (512 + 64 + 512)
    held, queries, table = (
        (132 + 8) * (512 + 64) * 2,
        4 * 16 * (512 + 64 + 512) * 2,
        call.args[4].page_table.numel() * 4,
    )
    assert one.cost.bytes == held + queries + table + 2048 * 2048
    apart = [one for one in lowered(call, TWO).calls[0].operators if FIA in one.name]
    assert [one.cost.flops for one in apart] == [2 * n * 16 * (128 + 64 + 128) for n in (3 + 3, 2 * (130 + 6))]
