"""Kimi-K3 lowered for each Ascend target, in both layouts of pages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering import npu_reference
from lowering.target import ASCEND
from tests.models.test_kimi_k3_config import TEXT

from .lowered import Lowered, assert_near, usual
from .test_mla import ABSORBED, BY_HEAD, TWO

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3", "vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3,
    "q_lora_rank": 80, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 160, "num_experts": 6, "num_experts_per_token": 6, "num_shared_experts": 1,
    "moe_intermediate_size": 48, "routed_expert_hidden_size": 64, "attn_res_block_size": 2, "hidden_act": "situ",
    "activation_situ_beta": 1.0, "activation_situ_linear_beta": 2.0, "max_position_embeddings": 1024,
    "linear_attn_config": {
        "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2],
        "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    },
}  # fmt: skip
FUSED: dict[str, str] = {
    "rms_norm": "npu_rms_norm", "l2_norm": "npu_rms_norm_l2",
    "latent_norm_rope_write": "npu_rms_norm_rope_scatter", "route_sigmoid": "npu_moe_gating_top_k",
    "experts": "npu_grouped_experts",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@functools.cache
def made() -> Lowered:
    """Every expert is chosen: a choice among near equals would turn on the last bit."""
    return Lowered.of(CONFIG)


@pytest.mark.parametrize(
    ("target", "layout", "dtype"),
    [
        ("ascend910b", "nd", torch.bfloat16),
        ("ascend910_93", "nz", torch.float16),
        ("ascend950", "nd", torch.bfloat16),
    ],
)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(target: str, layout: str, dtype: torch.dtype) -> None:
    """Three heads, which decoding fills up to four."""
    with lowering.use(target=target), lowering.record() as report:
        found = made().outcome(dtype, layout)
    chosen = {row.op: row.kernel for row in report.rows}
    assert {op: chosen[op] for op in FUSED} == FUSED
    absorbed = ABSORBED if target == "ascend950" else BY_HEAD
    assert {row.kernel for row in report.rows if row.op == "mla_prefix_attention"} == {absorbed, TWO}
    assert_near(found, *usual(made(), dtype))


@pytest.mark.parametrize("target", ASCEND)
def test_the_published_sizes_say_what_is_composed_and_why(target: str) -> None:
    """Cut to five layers, none of whose tensors exists. Whatever is not fused has a sentence that says why."""
    section = TEXT["linear_attn_config"] | {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}
    model = fm.build(TEXT | {"num_hidden_layers": 5, "linear_attn_config": section})
    spec = model.param_spec(torch.bfloat16)
    on_950 = target == "ascend950"
    for lists, step in (([[1], [2]], {"gated_delta_rule"}), ([[1] * 40, [2] * 3], set())):
        state = model.init_state(2, 4096, torch.bfloat16, torch.bfloat16, "meta")
        report = lowering.explain(model.forward, spec, state, fm.Batch.from_lists(lists), target=target)
        rows = {row.op: row for row in report.rows}
        fused = {op for op, row in rows.items() if row.kernel.startswith(("npu_", "two_fia"))}
        assert fused == {*FUSED, "mla_prefix_attention"} | (set() if on_950 else step)
        assert all(row.refused for op, row in rows.items() if op not in fused)
        assert rows["attention_residual"].refused["fused"].startswith("no fused operator weighs rows")
    if not on_950:
        assert rows["swiglu"].refused["npu_swiglu"] == "has no caps; this call has (4.0, 25.0) (SiTU)"
        assert "takes one decay a head" in rows["gated_delta_rule"].refused["npu_chunk_gated_delta_rule"]
