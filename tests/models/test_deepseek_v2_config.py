"""Configs of DeepSeek-V2: those that are wrong name their fields; the older spelling, and the two factors of YaRN."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import funcmodels as fm
from tests.oracle.deepseek_v2 import sizes

LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "rope_theta": 10000, "max_position_embeddings": 163840, "moe_layer_freq": 1, "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def config(kind: str = "full", **changes: Any) -> dict[str, Any]:
    changed = {**sizes(kind, 0), "model_type": "deepseek_v2", **changes}
    return {name: value for name, value in changed.items() if value is not ...}


def test_v2_lite_as_it_was_published() -> None:
    """The older spelling of rope; equal factors leave angles alone and sharpen the softmax."""
    model = fm.build(LITE)
    read = model.config
    assert (read.rope_type, read.q_lora_rank, read.experts_in_layer.count(True)) == ("yarn", 0, 26)
    assert read.angle_multiplier == 1.0
    assert math.isclose(read.softmax_scale, 192**-0.5 * 1.58963, rel_tol=1e-5)
    spec = model.param_spec(torch.bfloat16)
    assert spec.layers[0].attn.down.weight.parts == (16 * 192, 576)
    assert spec.layers[1].mlp.shared.down.weight.shape == (2048, 2816)
    assert spec.layers[1].mlp.router.weight.dtype == torch.float32


def test_all_missing_fields_are_listed_at_once() -> None:
    with pytest.raises(fm.ConfigError) as caught:
        fm.build({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "rope_scaling": {"type": "yarn"}})
    expected = [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "num_experts_per_tok", "n_group", "topk_group", "factor",
    ]  # fmt: skip
    assert sorted(re.findall(r"(\w+) is missing", str(caught.value))) == sorted(expected)


def test_a_query_latent_is_left_out_by_null_alone() -> None:
    assert fm.build(config(q_lora_rank=...)).config.q_lora_rank == 1536
    assert fm.build(config(q_lora_rank=None)).config.q_lora_rank == 0


def test_a_model_without_experts_needs_none_of_their_fields() -> None:
    given = config("dense", num_experts_per_tok=..., n_group=..., topk_group=...)
    assert not any(fm.build(given).config.experts_in_layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": "16"}, "kv_lora_rank must be an integer, found '16'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be positive, found 0"),
        ({"q_lora_rank": -1}, "q_lora_rank must be positive or null, found -1"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, found 5"),
        ({"num_key_value_heads": 1}, "num_key_value_heads must be num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu is"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"attention_bias": 1}, "attention_bias must be true or false, found 1"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 1000"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must not be negative, found -1"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok must be in 1..n_routed_experts"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; known: greedy, group_limited_greedy"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; only 'softmax' is"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; only 1 is"),
        ({"n_group": 5, "n_routed_experts": 6, "num_experts_per_tok": 1}, "n_group 5 must divide n_routed_experts 6"),
        ({"topk_group": 9}, "topk_group must be in 1..n_group"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a section of fields, found 'yarn'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_parameters and rope_scaling are both given",
        ),
    ],
)
def test_fields_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "linear"}, "rope_type 'linear' is not supported; known: default, yarn"),
        ({"factor": 0.5}, "factor must be at least 1, found 0.5"),
        ({"factor": "4"}, "factor must be a finite number, found '4'"),
        ({"beta_slow": 40}, "beta_fast must be at least beta_slow, and both positive; found 32 and 40"),
        ({"original_max_position_embeddings": -4}, "original_max_position_embeddings must be positive, found -4"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1 for yarn, found 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_rotary_fields_that_cannot_be(section: str, changes: dict[str, Any], message: str) -> None:
    given = config(rope_parameters=...) | {section: sizes("full", 0)["rope_parameters"] | changes}
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(given)
