"""Configs of Kimi-K3: the published one, whole and in part, both places of a field, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import funcmodels as fm
import params
from tests.oracle.kimi_k3 import sizes

LATENT = [*range(4, 93, 4), 93]
TEXT: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792,
    "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "mla_use_output_gate": True, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "hidden_act": "situ",
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "rms_norm_eps": 1e-5,
    "model_max_length": 1048576, "tie_word_embeddings": False, "linear_attn_config": {
        "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        "gate_lower_bound": -5.0, "full_attn_layers": LATENT,
        "kda_layers": [layer for layer in range(1, 94) if layer not in LATENT],
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {"model_type": "kimi_k3", "text_config": TEXT, "vision_config": {"hidden_size": 1152}}


def text(**changes: Any) -> dict[str, Any]:
    """A small config's text part, fields that are `...` left out."""
    fields = sizes(1)["text_config"] | changes
    return {name: value for name, value in fields.items() if value is not ...}


def linear(**changes: Any) -> dict[str, Any]:
    """The same with changes of its section of delta attention."""
    section = text()["linear_attn_config"] | changes
    return text(linear_attn_config={name: value for name, value in section.items() if value is not ...})


def test_the_published_model() -> None:
    """2.78 trillion parameters, 69 layers of delta attention and 24 of latent attention; shapes of the checkpoint."""
    model = fm.build(PUBLISHED)
    read = model.config
    assert [index + 1 for index in range(93) if not read.is_linear(index)] == LATENT
    assert read.mlp_layer_types == ("dense", *["sparse"] * 92)
    assert (read.caps, read.softmax_scale, read.gate_lower_bound) == ((4.0, 25.0), 192**-0.5, -5.0)
    spec = model.param_spec(torch.bfloat16)
    delta, latent, moe = spec.layers[0].attn, spec.layers[3].attn, spec.layers[1].mlp
    assert delta.in_proj.weight.parts == (12288, 12288, 12288, 96, 128, 12288) and delta.gate is None
    assert latent.down.weight.parts == (1536, 576, 12288) and latent.q_up.weight.shape == (18432, 1536)
    assert latent.up.weight.shape == (24576, 512) and latent.out.weight.shape == (7168, 12288)
    assert moe.experts.gate_up.shape == (896, 6144, 3584) and moe.experts.down.shape == (896, 3584, 3072)
    assert moe.router.weight.shape == (896, 7168) and moe.shared.gate_up.weight.shape == (12288, 7168)
    pinned = (delta.a_log, delta.dt_bias, delta.conv, delta.norm.weight, moe.router.weight, moe.router.bias)
    assert all(leaf.dtype == torch.float32 for leaf in pinned)
    assert spec.layers[0].attn_residual.proj.dtype == torch.bfloat16
    assert 2.77e12 < sum(math.prod(leaf.shape) for leaf in params.leaves(spec)) < 2.79e12


def test_whole_and_in_part_it_is_the_same_model() -> None:
    """The text part may stand alone, under its own name or the whole's, its fields in the section or beside it."""
    config = fm.build(PUBLISHED).config
    tied = {"text_config": TEXT | {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    section = {name: value for name, value in TEXT["linear_attn_config"].items() if name != "gate_lower_bound"}
    for alone in (
        TEXT,
        TEXT | {"model_type": "kimi_k3"},
        TEXT | {"linear_attn_config": section, "gate_lower_bound": -5},
        PUBLISHED | tied,  # which the whole has the say on
    ):
        model = fm.build(alone)
        assert model.config == config and model.family.names.family == "kimi_k3"


def test_what_may_be_left_out() -> None:
    """An unset bound of the activation's gate is 1, and none of the rest is no bound."""
    unset = text(activation_situ_beta=..., activation_situ_linear_beta=None, hidden_act=..., latent_moe_use_norm=...)
    assert fm.build(unset).config.caps == (1.0, None)


def test_all_missing_fields_are_listed_at_once() -> None:
    with pytest.raises(fm.ConfigError) as caught:
        fm.build({"model_type": "kimi_k3", "text_config": {"num_hidden_layers": 2, "vocab_size": 8}})
    missing = re.findall(r"(\w+) is missing", str(caught.value))
    assert {"q_lora_rank", "attn_res_block_size", "routed_expert_hidden_size", "gate_lower_bound"} <= set(missing)
    assert {"hidden_size", "layer_types", "num_experts", "kv_lora_rank"} <= set(missing)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (text(q_lora_rank=None), "q_lora_rank is missing"),
        (text(q_lora_rank=0), "q_lora_rank must be positive, found 0"),
        (text(attn_res_block_size=0, model_type="kimi_k3"), "attn_res_block_size must be positive, found 0"),
        (text(routed_expert_hidden_size="8"), "routed_expert_hidden_size must be an integer, found '8'"),
        (text(activation_situ_beta=0), "activation_situ_beta must be positive, found 0"),
        (text(activation_situ_linear_beta=-1.0), "activation_situ_linear_beta must be positive or null, found -1.0"),
        (text(hidden_act="silu"), "hidden_act 'silu' is not supported; only situ is"),
        (text(latent_moe_use_norm=False), "latent_moe_use_norm False is not supported"),
        (text(mla_use_output_gate=False), "mla_use_output_gate False is not supported"),
        (text(mla_use_nope=False), "mla_use_nope False is not supported: latent attention has no rotation here"),
        (text(attention_bias=True), "attention_bias True is not supported: projections of Kimi-K3 have none"),
        (text(num_experts_per_token=99), "num_experts_per_token must be in 1.."),
        (linear(use_full_rank_gate=False), "use_full_rank_gate False is not supported"),
        (linear(use_full_rank_gate=0), "use_full_rank_gate 0 is not supported"),
        (text(mla_use_nope=0), "mla_use_nope 0 is not supported: latent attention has no rotation here"),
        (text(hidden_act=[]), "hidden_act [] is not supported; only situ is"),
        (text(first_k_dense_replace=-1), "first_k_dense_replace must be an integer from 0, found -1"),
        (text(num_hidden_layers=10**30), f"num_hidden_layers must be at most 1000, found {10**30}"),
        (PUBLISHED | {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported: the head has a weight"),
        (linear(gate_lower_bound=0.5), "gate_lower_bound must be negative, as log decays are; found 0.5"),
        (linear(gate_lower_bound=...), "gate_lower_bound is missing"),
        (linear() | {"gate_lower_bound": -3.0}, "and linear_attn_config.gate_lower_bound is "),
        ({"model_type": "kimi_k3", "text_config": [1]}, "text_config must be a section of fields, found [1]"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(fields)
