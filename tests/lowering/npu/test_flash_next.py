"""Qwen3.8-Flash-Next lowered for each Ascend target: what is chosen, and that it is as near to float32 as Torch is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params as trees
from lowering import npu_reference
from lowering.target import ASCEND
from tests.lowering.npu.lowered import assert_near
from tests.lowering.npu.test_models import PAGE, outcome

BASE: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "vocab_size": 160, "hidden_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 1,
    "linear_num_value_heads": 3, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "hc_count": 4,
    "hc_lowrank": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "ple_layer_ids": [1],
    "ple_embed_dim": 64, "ngram_vocab_size_base": 900, "heads_per_ngram": 2, "split_ngram_parts": 3, "eos_token_id": 5,
    "output_gate_type": "sigmoid", "mtp_num_hidden_layers": 1, "indexer_n_heads": 4, "indexer_head_dim": 128,
    "indexer_compress_ratio": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5],
    },
}  # fmt: skip
BUDGETS = {"dense": 4 * PAGE, "sparse": 64}
"""Tokens of selected blocks: as many as rows can have, and fewer than their pages hold."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@functools.cache
def made(budget: str) -> tuple[fm.Model, Any]:
    """A model with every parameter random, in float32."""
    model = fm.build({**BASE, "indexer_budget": BUDGETS[budget]})
    draw = torch.Generator().manual_seed(7)

    def random(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

    return model, trees.tree_map(random, model.init_params())


@functools.cache
def in_torch(budget: str, dtype: torch.dtype) -> list[Tensor]:
    """What Torch's kernels give on the CPU."""
    return outcome(*made(budget), dtype, torch.float32 if dtype == torch.float32 else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(budget: str, target: str, dtype: torch.dtype) -> None:
    """Where blocks are chosen a near tie may go either way, in half precision of any kind."""
    with lowering.use(target=target), lowering.record() as report:
        lowered = outcome(*made(budget), dtype, torch.bfloat16)
    chosen = {row.kernel for row in report.rows}
    assert len([name for name in chosen if name.startswith("npu_")]) >= 4, f"hardly anything was lowered: {chosen}"
    assert_near(lowered, in_torch(budget, torch.float32), in_torch(budget, dtype))
