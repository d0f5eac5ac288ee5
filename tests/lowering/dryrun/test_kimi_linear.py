"""Kimi Linear at its published sizes, lowered for Ascend without weights, through the real operators."""

from __future__ import annotations

import pytest
import torch

import funcmodels as fm
import lowering
from params import leaves
from tests.models.test_kimi_linear_config import PUBLISHED


@pytest.mark.parametrize(
    ("width", "keep_steps"), [(1, False), (4, True), (40, False)], ids=["decode", "verify", "prompt"]
)
def test_published_sizes_lower_without_weights(width: int, keep_steps: bool) -> None:
    """49 billion parameters; no call is left to a reference; the delta rule of a prompt is composed of Torch's."""
    model = fm.build(PUBLISHED)
    spec = model.param_spec(torch.bfloat16)
    state = model.init_state(2, 256, torch.bfloat16, torch.bfloat16, "meta")
    batch = fm.Batch.from_lists([[0] * width] * 2)
    low = lowering.lower(model.forward, spec, state, batch, target="ascend910b", keep_steps=keep_steps)
    assert low.argument_bytes["params"] == sum(leaf.numel * leaf.dtype.itemsize for leaf in leaves(spec)) > 98e9
    assert not any(call.by_reference for call in low.calls)
    rows = {row.op: row for row in low.explain().rows}
    assert rows["experts"].kernel == "npu_grouped_experts" and rows["route_sigmoid"].kernel == "npu_moe_gating_top_k"
    assert rows["latent_norm_rope_write"].kernel == "npu_rms_norm_rope_scatter"
    assert rows["mla_prefix_attention"].kernel == ("npu_fia_absorbed_by_head" if width <= 8 else "two_fia_merge")
    fused = width <= 16
    assert rows["gated_delta_rule"].kernel == ("npu_recurrent_gated_delta_rule" if fused else "torch_chunked_channels")
    called = {operator.name for call in low.calls if call.op == "gated_delta_rule" for operator in call.operators}
    assert called and any("npu" in name for name in called) == fused
