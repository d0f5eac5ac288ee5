"""Calls of the gated delta rule's operators."""

from __future__ import annotations

import torch

from .calls import Bad, ints, meta

FP32, FP16 = torch.float32, torch.float16

RECURRENT = {
    "query": meta(6, 2, 64), "key": meta(6, 2, 64), "value": meta(6, 4, 32), "state": meta(8, 4, 32, 64),
    "beta": meta(6, 4), "scale": 1.0, "actual_seq_lengths": ints(2), "ssm_state_indices": ints(6),
    "g": meta(6, 4, dtype=FP32),
}  # fmt: skip
CHUNKED = {
    "query": meta(6, 2, 64), "key": meta(6, 2, 64), "value": meta(6, 4, 32), "beta": meta(6, 4), "scale": 1.0,
    "initial_state": meta(2, 4, 32, 64), "actual_seq_lengths": ints(2), "g": meta(6, 4, dtype=FP32),
}  # fmt: skip

GOOD = {"npu_recurrent_gated_delta_rule_functional": RECURRENT, "npu_chunk_gated_delta_rule": CHUNKED}
BAD = {
    "npu_recurrent_gated_delta_rule_functional": [
        Bad("a scale, write strengths", {"scale": None}),
        Bad("bfloat16 queries", {"query": meta(6, 2, 64, dtype=FP16)}),
        Bad("a bfloat16 state", {"state": meta(8, 4, 32, 64, dtype=FP32)}),
        Bad("a bfloat16 or float32 state", {"state": meta(8, 4, 32, 64, dtype=FP16)}, cann="master"),
        Bad("float32 log decays, one a token", {"g": meta(6, 4)}),
        Bad("no log decays a channel", {"gk": meta(6, 4, 64, dtype=FP32)}, cann="8.5.0"),
        Bad("float32 log decays a channel", {"gk": meta(6, 4, 64)}),
        Bad("int32 lengths", {"ssm_state_indices": ints(6, dtype=torch.int64)}),
        Bad("1 to 256 key", {"key": meta(6, 2, 516), "query": meta(6, 2, 516), "state": meta(8, 4, 32, 516)}),
        Bad("multiples of key heads", {"query": meta(6, 3, 64), "key": meta(6, 3, 64)}),
        Bad("[slots, v_heads, v_dim, k_dim]", {"state": meta(8, 4, 64, 32)}),
        Bad("no empty tensor", {"query": meta(0, 2, 64), "key": meta(0, 2, 64), "value": meta(0, 4, 32), "g": None}),
        Bad("at least as many slots as tokens", {"state": meta(5, 4, 32, 64)}),
    ],
    "npu_chunk_gated_delta_rule": [
        Bad("write strengths, an initial state", {"scale": None}),
        Bad("bfloat16 queries", {"g": meta(6, 4)}),
        Bad("a bfloat16 state", {"initial_state": meta(2, 4, 32, 64, dtype=FP32)}),
        Bad("up to 64 heads", {"value": meta(6, 5, 32), "initial_state": meta(2, 5, 32, 64)}),
        Bad("an initial state of", {"initial_state": meta(3, 4, 32, 64)}),
    ],
}
