"""Qwen3.8-Flash-Next at its published sizes, lowered for Ascend without weights."""

from __future__ import annotations

import pytest
import torch

import funcmodels as fm
import lowering
from params import leaves
from tests.models.test_qwen3_8_flash_next_config import PUBLISHED


@pytest.mark.parametrize(
    ("width", "keep_steps"), [(1, False), (4, True), (128, False)], ids=["decode", "verify", "prompt"]
)
def test_published_sizes_lower_without_weights(width: int, keep_steps: bool) -> None:
    """180 billion parameters and rows of 4,096 tokens, more than the index selects: no call is left to a reference."""
    model = fm.build(PUBLISHED)
    spec = model.param_spec(torch.bfloat16)
    state = model.init_state(2, 4096, torch.bfloat16, torch.bfloat16, "meta")
    batch = fm.Batch.from_lists([[0] * width] * 2)
    low = lowering.lower(model.forward, spec, state, batch, target="ascend910b", keep_steps=keep_steps)
    assert low.argument_bytes["params"] == sum(leaf.numel * leaf.dtype.itemsize for leaf in leaves(spec)) > 340e9
    assert not any(call.by_reference for call in low.calls)
    kernels = {row.op: row.kernel for row in low.explain().rows}
    assert kernels["experts"] == "npu_grouped_experts" and kernels["write_pages"].startswith("npu_")
    assert {"index_scores_topk", "sparse_attention", "hyper_mix", "table_rows"} <= kernels.keys()
