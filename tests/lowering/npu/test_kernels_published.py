"""At the sizes of the published Qwen3.5 checkpoints every op that has a fused operator gets it, without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering.explain.report import Report
from lowering.kernel import FUSED

SIZES: dict[str, Any] = {
    "vocab_size": 248320, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
"""Sizes that the 35B-A3B and the 9B checkpoint share, cut to one round of layers."""
MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
DENSE: dict[str, Any] = {"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288}
BATCHES = {"decode": [[1], [2], [3]], "prefill": [[1] * 17, [2] * 5, []], "verify": [[1] * 4, [2] * 3, [3] * 4]}

OTHERS = {"delta_gates", "embedding", "gated_rms_norm", "linear", "rotary_angles", "short_conv"}
"""Ops that no operator of torch_npu is for at these sizes, or that one of ours goes over in one pass."""
ATLAS_A2 = {
    "add_gemma_rms_norm", "gated_delta_rule", "gemma_rms_norm", "l2_norm", "paged_attention", "rotary", "swiglu",
    "write_pages",
}  # fmt: skip
ROUTED = {"experts", "route_softmax"}
ATLAS_A5 = ATLAS_A2 - {"add_gemma_rms_norm", "gated_delta_rule", "gemma_rms_norm", "rotary"}


def lowered(sizes: dict[str, Any], batch: str, target: str) -> Report:
    """The kernels of one forward of a bfloat16 model, none of whose tensors exists."""
    model = fm.build(SIZES | sizes)
    lists = BATCHES[batch]
    state = model.init_state(len(lists), 4096, torch.bfloat16, recurrent_dtype=torch.bfloat16, device="meta")
    tokens = fm.Batch.from_lists(lists)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return lowering.explain(
            model.forward, model.param_spec(), state, tokens, keep_steps=batch == "verify", target=target
        )
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("sizes", "more"), [(DENSE, set()), (MOE, ROUTED)], ids=["dense", "moe"])
@pytest.mark.parametrize(
    ("target", "fused"), [("ascend910b", ATLAS_A2), ("ascend910_93", ATLAS_A2), ("ascend950", ATLAS_A5)]
)
def test_published_sizes_are_fused(
    target: str, fused: set[str], sizes: dict[str, Any], more: set[str], batch: str
) -> None:
    """And each op that something else runs has its reason."""
    rows = lowered(sizes, batch, target).rows
    kernels = {kernel.name for op in lowering.OPS.values() for kernel in op.serving(target) if kernel.operators}
    chosen = {row.op for row in rows if row.kernel in kernels}
    assert chosen == fused | more
    assert {row.op for row in rows} - chosen == OTHERS | ATLAS_A2 - fused
    for row in rows:
        reasons = [reason for name, reason in row.refused.items() if name == FUSED or name in kernels]
        assert row.op in chosen or reasons, row
