"""Configs of Kimi Linear: the published one, both spellings of fields, layers counted from 1, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import funcmodels as fm
from tests.oracle.kimi_linear import sizes

FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "model_max_length": 1048576,
    "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu",
    "tie_word_embeddings": False, "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": FULL,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
    },
}  # fmt: skip
DELTA, LATENT = "linear_attention", "full_attention"


def config(seed: int = 1, **changes: Any) -> dict[str, Any]:
    """Fields of transformers for odd seeds, a section that counts layers from 1 for even ones."""
    changed = {**sizes("grouped", seed), "model_type": "kimi_linear", **changes}
    return {name: value for name, value in changed.items() if value is not ...}


def test_the_published_model() -> None:
    """Layers counted from 1 are the fourth, the eighth; the first feed-forward block is dense."""
    model = fm.build(PUBLISHED)
    read = model.config
    assert [index for index, kind in enumerate(read.layer_types) if kind == LATENT] == [3, 7, 11, 15, 19, 23, 26]
    assert read.mlp_layer_types == ("dense", *["sparse"] * 26)
    assert (read.q_lora_rank, read.max_position_embeddings, read.softmax_scale) == (0, 1048576, 192**-0.5)
    spec = model.param_spec(torch.bfloat16)
    assert spec.layers[0].attn.in_proj.weight.parts == (4096, 4096, 4096, 32, 128, 128)
    assert spec.layers[0].attn.conv.parts == (4096,) * 3
    assert spec.layers[3].attn.down.weight.parts == (32 * 192, 576)
    assert spec.layers[1].mlp.experts.gate_up.shape == (256, 2048, 2304)
    pinned = (spec.layers[0].attn.a_log, spec.layers[0].attn.dt_bias, spec.layers[1].mlp.router.weight,
              spec.layers[1].mlp.router.bias)  # fmt: skip
    assert all(leaf.dtype == torch.float32 for leaf in pinned)
    assert spec.layers[0].attn.conv.dtype == torch.bfloat16


@pytest.mark.parametrize("seed", [0, 1])
def test_what_transformers_makes_of_a_config_reads_the_same(seed: int) -> None:
    """It writes the published names, and keeps the section beside its own fields."""
    from transformers import KimiLinearConfig

    fields = config(seed)
    theirs = KimiLinearConfig(**{name: value for name, value in fields.items() if name != "model_type"})
    assert fm.build(theirs.to_dict()).config == fm.build(fields).config
    assert list(fm.build(fields).config.layer_types) == theirs.layer_types
    assert list(fm.build(fields).config.mlp_layer_types) == theirs.mlp_layer_types


def test_all_missing_fields_are_listed_at_once() -> None:
    with pytest.raises(fm.ConfigError) as caught:
        fm.build({"model_type": "kimi_linear", "num_hidden_layers": 2})
    expected = [
        "vocab_size", "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "intermediate_size", "layer_types", "linear_num_heads", "linear_head_dim", "num_experts",
        "num_experts_per_token",
    ]  # fmt: skip
    assert sorted(re.findall(r"(\w+) is missing", str(caught.value))) == sorted(expected)


def test_a_model_without_experts_needs_none_of_their_fields() -> None:
    fields = dict.fromkeys(("num_local_experts", "num_experts_per_tok", "n_group", "topk_group"), ...)
    given = config(**fields, mlp_layer_types=["dense"] * 4)
    assert not any(fm.build(given).config.is_sparse(index) for index in range(4))


KINDS = [DELTA, LATENT, DELTA, DELTA]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": "16"}, "kv_lora_rank must be an integer, found '16'"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be positive, found 0"),
        ({"linear_head_dim": 0}, "linear_head_dim must be positive, found 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be above 1, found 1"),
        ({"q_lora_rank": -1}, "q_lora_rank must be positive or null, found -1"),
        ({"num_key_value_heads": 99}, "num_key_value_heads must be num_attention_heads"),
        ({"hidden_act": "situ"}, "hidden_act 'situ' is not supported; only silu is"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported: the head has a weight of its own"),
        ({"mla_use_nope": False}, "mla_use_nope False is not supported: latent attention has no rotation here"),
        ({"mla_use_nope": 0}, "mla_use_nope 0 is not supported"),
        ({"tie_word_embeddings": []}, "tie_word_embeddings [] is not supported"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace must be an integer from 0, found True"),
        ({"attention_bias": 1}, "attention_bias must be true or false, found 1"),
        ({"layer_types": 5}, "layer_types must be a list of str, found 5"),
        ({"mlp_layer_types": 5}, "mlp_layer_types must be a list of str, found 5"),
        ({"layer_types": KINDS[:3]}, "layer_types names 3 layers, num_hidden_layers is 4"),
        ({"layer_types": [*KINDS[:3], "mamba"]}, "layer_types mamba is not supported; known: linear_attention, full"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types moe is not supported; known: dense, sparse"),
        ({"num_experts_per_tok": 99}, "num_experts_per_token must be in 1.."),
        ({"n_group": 5}, "num_expert_group 5 must divide num_experts"),
        ({"topk_group": 9}, "topk_group must be in 1..num_expert_group"),
        ({"n_group": 4, "num_local_experts": 4}, "groups must have 2 experts or more, as many as their score adds up"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; only 1 is"),
        ({"num_experts": 7}, "num_experts is 7 and num_local_experts is "),
        ({"model_max_length": 4}, "max_position_embeddings is 512 and model_max_length is 4: they mean the same"),
        ({"gate_lower_bound": -5.0}, "gate_lower_bound -5.0 is not supported: a model with it is Kimi-K3"),
        ({"routed_expert_hidden_size": 9}, "routed_expert_hidden_size 9 is not supported: a model with it is Kimi-K3"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound -5.0 is not supported: a model with it"),
        ({"linear_attn_config": [1]}, "linear_attn_config must be a section of fields, found [1]"),
        ({"linear_attn_config": {"num_heads": 77}}, "and linear_attn_config.num_heads is 77: they mean the same"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(config(**changes))


@pytest.mark.parametrize(
    ("delta", "latent"),
    [([0, 2, 3], [1]), ([1, 2, 3], [3, 4]), ([1, 2], [4]), ([1, 2, 3, 4], [5])],
    ids=["from_0", "twice", "left_out", "too_many"],
)
def test_numbers_of_layers_that_cannot_be(delta: list[int], latent: list[int]) -> None:
    section = sizes("grouped", 0)["linear_attn_config"] | {"kda_layers": delta, "full_attn_layers": latent}
    message = (
        f"linear_attn_config: kda_layers {delta} and full_attn_layers {latent} must name each layer from 1 to "
        "num_hidden_layers 4 once, counted from 1"
    )
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(config(0, linear_attn_config=section))


@pytest.mark.parametrize("name", ["kda_layers", "full_attn_layers"])
@pytest.mark.parametrize("given", [None, "1", 3, {"1": 2}, [1, "2"], [[1]], [1.0], [True, -1]])
def test_a_list_of_layers_that_is_none_is_named(name: str, given: Any) -> None:
    """By its own key, and not by the one that it is read into."""
    section = sizes("grouped", 0)["linear_attn_config"] | {name: given}
    with pytest.raises(fm.ConfigError, match=f"linear_attn_config.{name} must be a list of layers") as caught:
        fm.build(config(0, linear_attn_config=section))
    assert "layer_types" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace must be an integer from 0, found '1'"),
        ({"first_k_dense_replace": [1]}, "first_k_dense_replace must be an integer from 0, found [1]"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer, found '4'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ],
)
def test_only_the_field_that_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)) as caught:
        fm.build(config(0, **changes))
    assert "layer_types" not in str(caught.value)


def test_both_ways_to_name_layers_must_agree() -> None:
    fields = config(0)
    right = list(fm.build(fields).config.layer_types)
    assert fm.build({**fields, "layer_types": right}).config == fm.build(fields).config
    with pytest.raises(fm.ConfigError, match=r"layer_types \[.*\] and linear_attn_config, which says .* differ"):
        fm.build({**fields, "layer_types": right[1:] + right[:1] if right[0] != right[1] else [LATENT, *right[1:]]})


def test_layers_without_kinds_are_not_guessed() -> None:
    """The default of transformers has other layers than the published model."""
    section = {name: value for name, value in PUBLISHED["linear_attn_config"].items() if "layers" not in name}
    with pytest.raises(fm.ConfigError, match="layer_types is missing"):
        fm.build({**PUBLISHED, "linear_attn_config": section})
