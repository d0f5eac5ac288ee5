"""Kimi-K3 at its published sizes, lowered for Ascend without weights, through the real operators."""

from __future__ import annotations

import pytest
import torch

import funcmodels as fm
import lowering
from params import leaves
from tests.models.test_kimi_k3_config import PUBLISHED


@pytest.mark.plain
def test_the_published_model_decodes_without_weights() -> None:
    """5.6 terabytes of bfloat16, 93 layers; no call is left to a reference, and 96 heads read latents as they lie."""
    model = fm.build(PUBLISHED)
    spec = model.param_spec(torch.bfloat16)
    state = model.init_state(2, 256, torch.bfloat16, torch.bfloat16, "meta")
    batch = fm.Batch.from_lists([[0], [0]])
    low = lowering.lower(model.forward, spec, state, batch, target="ascend910b")
    assert low.argument_bytes["params"] == sum(leaf.numel * leaf.dtype.itemsize for leaf in leaves(spec)) > 5.5e12
    assert not any(call.by_reference for call in low.calls)
    rows = {row.op: row for row in low.explain().rows}
    assert (
        rows["mla_prefix_attention"].kernel == "npu_fia_absorbed_by_head" and rows["mla_prefix_attention"].count == 24
    )
    assert rows["experts"].kernel == "npu_grouped_experts" and rows["experts"].count == 92
    assert rows["gated_delta_rule"].count == 69
    # The first sublayer has nothing to weigh, and its call is Torch's.
    residuals = {row.kernel: row.count for row in low.explain().rows if row.op == "attention_residual"}
    assert residuals == {"triton_attention_residual": 2 * 93, "torch": 1}
