"""Kimi Linear lowered for each Ascend target, in both layouts of pages, and captured decoding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering import npu_reference
from lowering.explain.report import Report
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import on
from tests.models.test_kimi_linear_config import PUBLISHED

from .lowered import PAGE, Lowered, assert_near, usual
from .test_mla import ABSORBED, BY_HEAD, TWO

CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
    "intermediate_size": 160, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 48, "routed_scaling_factor": 1.5, "max_position_embeddings": 1024,
    "linear_attn_config": {
        "num_heads": 3, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2],
    },
}  # fmt: skip
NORMS = {"rms_norm": "npu_rms_norm", "add_rms_norm": "npu_add_rms_norm"}
FUSED: dict[str, str] = {
    **NORMS, "l2_norm": "npu_rms_norm_l2",
    "latent_norm_rope_write": "npu_rms_norm_rope_scatter", "route_sigmoid": "npu_moe_gating_top_k",
    "experts": "npu_grouped_experts", "swiglu": "npu_swiglu",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@functools.cache
def made() -> Lowered:
    return Lowered.of(CONFIG)


@pytest.mark.parametrize(
    ("target", "layout", "dtype"),
    [
        ("ascend910b", "nd", torch.bfloat16),
        ("ascend910b", "nz", torch.bfloat16),
        ("ascend910_93", "nz", torch.float16),
        ("ascend950", "nd", torch.bfloat16),
    ],
)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(target: str, layout: str, dtype: torch.dtype) -> None:
    with lowering.use(target=target), lowering.record() as report:
        found = made().outcome(dtype, layout)
    chosen = {row.op: row.kernel for row in report.rows}
    assert {op: chosen[op] for op in FUSED} == FUSED
    absorbed = ABSORBED if target == "ascend950" else BY_HEAD
    assert {row.kernel for row in report.rows if row.op == "mla_prefix_attention"} == {absorbed, TWO}
    # States are bfloat16 by default where the fused rule of steps takes them.
    fused = (target, dtype) == ("ascend910b", torch.bfloat16)
    steps = "npu_recurrent_gated_delta_rule" if fused else "triton_gated_delta_rule"
    assert {row.kernel for row in report.rows if row.op == "gated_delta_rule"} == {"torch_chunked_channels", steps}
    assert_near(found, *usual(made(), dtype))


def published(batch: list[list[int]], target: str) -> Report:
    """The kernels of one forward of the published sizes, cut to five layers, none of whose tensors exists."""
    section = PUBLISHED["linear_attn_config"] | {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}
    model = fm.build(PUBLISHED | {"num_hidden_layers": 5, "linear_attn_config": section})
    state = model.init_state(len(batch), 4096, torch.bfloat16, torch.bfloat16, "meta")
    spec, tokens = model.param_spec(torch.bfloat16), fm.Batch.from_lists(batch)
    return lowering.explain(model.forward, spec, state, tokens, target=target)


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93"])
def test_the_published_sizes_say_what_is_composed_and_why(target: str) -> None:
    """What has an operator of its own gets it; the delta rule of prompts says that a decay a channel has none."""
    for batch, step in (([[1], [2]], {"gated_delta_rule"}), ([[1] * 40, [2] * 3], set())):
        rows = {row.op: row for row in published(batch, target).rows}
        fused = {op for op, row in rows.items() if row.kernel.startswith(("npu_", "two_fia"))}
        assert fused == {*FUSED, "mla_prefix_attention"} | step
        refused = rows["gated_delta_rule"].refused
        assert step or "tokens a row" in refused["npu_recurrent_gated_delta_rule"]
        assert step or refused["npu_chunk_gated_delta_rule"] == "takes one decay a head; this call has one a channel"
        assert rows["channel_gates"].refused["fused"] == "no fused operator makes the gates of the delta rule"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_captured_decoding_equals_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: one capture reads latents over other lengths in each replay, and carries the matrices on."""
    on(Double(), monkeypatch)
    model, params = made().model, made().typed(torch.bfloat16)
    step = lowering.jit(model.forward, ("state",), (4,), backend="npu")
    with lowering.use(target="ascend910b"):
        states = [model.init_state(3, 4 * PAGE, torch.bfloat16, page_size=PAGE) for _ in range(2)]
        prompts = [[5] * 127, [7, 8], [9]]
        for at, state in enumerate(states):
            states[at] = model.forward(params, state, fm.Batch.from_lists(prompts, state))[1]
        for token in range(4):
            batch = fm.Batch.from_lists([[token], [token + 1], [token + 2]], states[0])
            padded = fm.Batch.from_lists([[token], [token + 1], [token + 2]], states[1]).pad(4)
            out, states[0] = step(params, states[0], batch)
            right, states[1] = model.forward(params, states[1], padded)
            assert torch.equal(out.logits, right.logits[:3]), f"token {token}"
    assert step.captures == 1
    for row in range(3):
        one, two = (fm.logical(state, row) for state in states)
        assert all(torch.equal(one[name], two[name]) for name in one)
