"""The gated delta rule: CANN's recurrent and chunked operators."""

from __future__ import annotations

import torch

from .check import ASCEND_910, OP, OT, HostCheck, enter

TILING = "attention/recurrent_gated_delta_rule/op_host/recurrent_gated_delta_rule_tiling.cpp"
CHUNKED = "attention/chunk_gated_delta_rule/op_host/chunk_gated_delta_rule_tiling.cpp"
BF16, FP32 = torch.bfloat16, torch.float32

enter(
    "npu_recurrent_gated_delta_rule_functional",
    HostCheck(
        "a scale, write strengths, lengths and slots, values of three axes",
        lambda c: None not in (c.scale, c.beta, c.actual_seq_lengths, c.ssm_state_indices) and c.value.ndim == 3,
        f"{OP} RecurrentGatedDeltaRuleKernelNpuOpApi.cpp",
    ),
    HostCheck(
        "bfloat16 queries, keys, values and write strengths",
        lambda c: {c.query.dtype, c.key.dtype, c.value.dtype, c.beta.dtype} == {BF16},
        f"{OT} v8.5.0 {TILING} AnalyzeDtype",
    ),
    HostCheck(
        "a bfloat16 state",
        lambda c: c.state.dtype == BF16,
        f"{OT} v8.5.0 to v9.1.0.pre {TILING} AnalyzeDtype",
        until="master",
    ),
    HostCheck(
        "a bfloat16 or float32 state",
        lambda c: c.state.dtype in (BF16, FP32),
        f"{OT} 3a280bcc {TILING} AnalyzeDtype",
        since="master",
    ),
    HostCheck(
        "float32 log decays, one a token and value head",
        lambda c: c.g is None or (c.g.dtype == FP32 and c.g.shape == c.value.shape[:2]),
        f"{OT} v8.5.0 {TILING} AnalyzeOptionalShapes",
    ),
    HostCheck(
        "no log decays a channel (gk)",
        lambda c: c.gk is None,
        f"{OT} v8.5.0 {TILING} AnalyzeOptionalShapes",
        until="9.0.0",
    ),
    HostCheck(
        "float32 log decays a channel of [tokens, v_heads, k_dim]",
        lambda c: c.gk is None or (c.gk.dtype == FP32 and c.gk.shape == (*c.value.shape[:2], c.key.shape[2])),
        f"{OT} v9.0.0 {TILING} AnalyzeOptionalShapes",
        since="9.0.0",
    ),
    HostCheck(
        "int32 lengths, slots and accepted counts",
        lambda c: all(
            x is None or x.dtype == torch.int32
            for x in (c.actual_seq_lengths, c.ssm_state_indices, c.num_accepted_tokens)
        ),
        f"{OT} v8.5.0 {TILING} AnalyzeDtype",
    ),
    HostCheck(
        "1 to 256 key and value heads, of 1 to 512 channels",
        lambda c: (
            0 < c.key.shape[1] <= 256
            and 0 < c.value.shape[1] <= 256
            and 0 < c.key.shape[2] <= 512
            and 0 < c.value.shape[2] <= 512
        ),
        f"{OT} v8.5.0 {TILING} AnalyzeShapes",
    ),
    HostCheck(
        "value heads in multiples of key heads",
        lambda c: c.value.shape[1] % c.key.shape[1] == 0,
        f"{OT} v8.5.0 {TILING} AnalyzeShapes",
    ),
    HostCheck(
        "a state of [slots, v_heads, v_dim, k_dim]",
        lambda c: c.state.shape[1:] == (*c.value.shape[1:], c.key.shape[2]),
        f"{OT} v8.5.0 {TILING} AnalyzeShapes",
    ),
    HostCheck(
        "no empty tensor",
        lambda c: c.value.numel() > 0 and c.state.numel() > 0,
        f"{OT} v8.5.0 {TILING} AnalyzeShapes",
    ),
    HostCheck(
        "at least as many slots as tokens",
        lambda c: c.state.shape[0] >= c.value.shape[0],
        f"{OT} v9.1.0-beta.1 {TILING} AnalyzeShapes",
        since="9.1.0-beta.1",
    ),
)

enter(
    "npu_chunk_gated_delta_rule",
    HostCheck(
        "write strengths, an initial state, lengths and a scale",
        lambda c: None not in (c.beta, c.initial_state, c.actual_seq_lengths, c.scale),
        f"{OP} ChunkGatedDeltaRule binding",
    ),
    HostCheck(
        "bfloat16 queries, keys, values and write strengths, float32 log decays",
        lambda c: (
            {c.query.dtype, c.key.dtype, c.value.dtype, c.beta.dtype} == {BF16} and (c.g is None or c.g.dtype == FP32)
        ),
        f"{OT} 3a280bcc {CHUNKED} AnalyzeDtype",
    ),
    HostCheck(
        "a bfloat16 state",
        lambda c: c.initial_state.dtype == BF16,
        f"{OT} 3a280bcc {CHUNKED} AnalyzeDtype",
        targets=ASCEND_910,
    ),
    HostCheck(
        "up to 64 heads of up to 128 channels, value heads in multiples of key heads",
        lambda c: (
            max(c.key.shape[1], c.value.shape[1]) <= 64
            and max(c.key.shape[2], c.value.shape[2]) <= 128
            and c.value.shape[1] % c.key.shape[1] == 0
        ),
        f"{OT} 3a280bcc {CHUNKED} CheckDerivedDimConstraints",
    ),
    HostCheck(
        "an initial state of [requests, v_heads, v_dim, k_dim]",
        lambda c: c.initial_state.shape == (len(c.actual_seq_lengths), *c.value.shape[1:], c.key.shape[2]),
        f"{OT} 3a280bcc {CHUNKED} CheckDerivedDimConstraints",
    ),
)
